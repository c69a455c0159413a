/* The search, see engine.h. */
#include "engine.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "answers.h"
#include "base/files.h"
#include "base/json.h"
#include "base/parallel.h"
#include "base/process.h"
#include "base/progress.h"
#include "candidate_folder.h"
#include "elites.h"
#include "incumbent.h"
#include "machine/environment.h"
#include "machine/watch.h"
#include "parametric.h"
#include "request.h"
#include "screen.h"
#include "tree.h"

enum {
    PROPOSER_FAILURES_MAX = 10, /* in a row: then the proposer is broken, and the run waits for a better one */
    LOSSES_MAX = 3,             /* judgements in a row that a worker may lose before it is given up */
    PROPOSALS_A_TRIAL = 20,     /* duplicates cost no budget, but not without end */
    CONFIRMED_OF_SEARCH = 3,    /* trials that may be put forward for confirmation */
    CONFIRMED_OF_CONTROL = 1
};

typedef struct engine engine;

/* A device at which trials are judged, one after another: one of this machine's, or a worker's. */
typedef struct seat {
    engine *engine;
    int number;  /* from 0; of a worker its own, whichever others there are */
    int device;  /* from 0: the same of several where trials of one device are judged side by side */
    bool beside; /* others: their first one's control is its own, too */
    int losses;  /* of a worker: judgements in a row */
    bool gone;   /* of a worker: nothing is asked of it any more */
    gates *gates;
    const flight *judging;
    trial_result control;
} seat;

struct engine {
    const engine_request *request;
    const definition *definition;
    acr_problem problems[DEFINITION_PROBLEMS_MAX];
    space_list spaces;
    int seat_count;
    seat seats[ENGINE_WORKERS_MAX];
    gates *gates; /* the first seat's: for all but judging */
    fold fold;
    parametric arms[ARM_COUNT];
    bool exhausted[ARM_COUNT];
    int64_t slice;
    screen screen;
    double started_s, longest_judge_s, longest_profile_s;
    double longest_prepare_s;        /* until the first trial of a round can be judged */
    double longest_compile_s;        /* of one trial */
    bool profiles;                   /* of elites are wanted, and to be had */
    char next_file[FOLDER_NAME_MAX]; /* of the folder of candidates; "" = none */
    /* The judging of a round: what several threads change, with `lock`. */
    pthread_mutex_t lock;
    pthread_cond_t progress; /* a trial was prepared, or none will be any more */
    size_t next_flight, next_record;
    size_t prepared;   /* trials, from the first on without a gap, that can be judged */
    bool prepared_all; /* no other will be: those behind them stay in flight */
    bool judged_all;   /* no other will be: nothing is worth compiling any more */
    double round_started_s;
    engine_end round_end;
    acr_status round_status; /* the first that is not ACR_OK, with its reason */
    char round_reason[512];
};

const char *engine_end_text(engine_end end)
{
    static const char *const texts[] = {
        [ENGINE_COMPLETE] = "complete",
        [ENGINE_TIME] = "time is up",
        [ENGINE_INTERRUPTED] = "interrupted",
        [ENGINE_PROPOSER] = "the proposer fails",
        [ENGINE_FOLDER] = "the folder has no further candidate",
        [ENGINE_CONFIRMED] = "confirmed what there was",
        [ENGINE_FAULT] = "a fault",
    };
    return texts[end];
}

static int stopped(const engine *e)
{
    return e->request->stop ? *e->request->stop : 0;
}

/* ---- Setting up ---- */

static search_scene scene_of(const definition *d, acr_problem problems[DEFINITION_PROBLEMS_MAX],
                             const acr__device *device)
{
    for (size_t i = 0; i < d->problem_count; ++i) {
        problems[i] = d->problems[i].problem;
    }
    return (search_scene){problems, d->problem_count, device};
}

static const char *pattern_of(const definition *d)
{
    return d->families[0] ? d->families : NULL;
}

/* The sets that the user wants tried. Errors: ACR_INVALID with the reason that one is no legal point. */
static acr_status list_tries(const definition *d, const space_list *spaces, genome seeds[SEEDS_MAX], int *count)
{
    definition_try t;
    const char *at = d->tries;
    *count = 0;
    while (definition_next_try(&t, &at)) {
        char reason[SPACE_REASON_MAX] = "no such family serves the problems";
        genome g;
        bool is_point = false;
        for (int i = 0; i < spaces->count && !is_point; ++i) {
            g = (genome){.space = i};
            is_point = strcmp(spaces->items[i].family, t.family) == 0 &&
                       space_point(&spaces->items[i], t.arch, t.parameters, &g, reason);
        }
        if (is_point && !genome_legal(spaces, &g)) {
            snprintf(reason, sizeof reason, "the conditions of the space exclude it");
            is_point = false;
        }
        if (is_point && *count == SEEDS_MAX) {
            snprintf(reason, sizeof reason, "more than %d sets", SEEDS_MAX);
            is_point = false;
        }
        if (!is_point) {
            return acr__fail(ACR_INVALID, "--try %s %s %s: %s", t.family, t.arch, t.parameters, reason);
        }
        seeds[(*count)++] = g;
    }
    return ACR_OK;
}

acr_status engine_define(definition *d, acr_ctx *ctx, const char *tree)
{
    const acr__device *device = &acr__ctx_backend_device(ctx)->device;
    acr_problem problems[DEFINITION_PROBLEMS_MAX];
    const search_scene scene = scene_of(d, problems, device);
    acr__wisdom_device_key(device, d->device_key);
    acr_status status = ACR_OK;
    if (!d->from) {
        const acr__kernel *kernel = NULL;
        status = incumbent_find(&kernel, ctx, d->problems, d->problem_count, d->clock == GATES_CLOCK_MODEL, d->threads);
        if (status == ACR_OK) {
            snprintf(d->incumbent_kernel, sizeof d->incumbent_kernel, "%s", kernel->name);
            status = candidate_of_kernel(&d->incumbent, kernel->name);
        }
    }
    space_list *spaces = status == ACR_OK ? malloc(sizeof *spaces) : NULL;
    if (status == ACR_OK && !spaces) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the spaces");
    }
    if (status == ACR_OK) {
        status = tree_spaces(spaces, tree, &scene, pattern_of(d));
    }
    if (status == ACR_OK) {
        status = definition_note_spaces(d, spaces, tree);
    }
    if (status == ACR_OK) {
        genome seeds[SEEDS_MAX];
        int count;
        status = list_tries(d, spaces, seeds, &count);
    }
    free(spaces);
    return status;
}

/* The trial that had this machine code before: of those in the store, or of the round's that come first. Which seat is
 * done with what makes no difference. */
static int64_t earlier_trial(const engine *e, const flight *now, const char *identity)
{
    int64_t trial = fold_find(&e->fold, now->arm, identity);
    for (const flight *f = e->fold.flights; trial < 0 && f < now; ++f) {
        if (f->arm == now->arm && strcmp(f->result.identity, identity) == 0) {
            trial = f->id;
        }
    }
    return trial;
}

/* Whether the arm has seen this machine code; the incumbent's is known from the start. */
static bool find_earlier(void *arg, const char *identity, char original[64])
{
    const seat *s = arg;
    engine *e = s->engine;
    pthread_mutex_lock(&e->lock);
    const int64_t trial =
        strcmp(gates_incumbent(e->gates)->identity, identity) == 0 ? 0 : earlier_trial(e, s->judging, identity);
    pthread_mutex_unlock(&e->lock);
    if (trial >= 0) {
        snprintf(original, 64, "%lld", (long long)trial);
    }
    return trial >= 0;
}

static acr_status open_seat(engine *e, int number)
{
    const definition *d = e->definition;
    const engine_request *r = e->request;
    seat *s = &e->seats[e->seat_count];
    const int judges = r->launcher ? 1 : r->judges;
    *s = (seat){.engine = e, .number = number, .device = number / judges, .beside = number % judges > 0};
    trial_result_init(&s->control);
    const gates_setup setup = {
        .backend = d->backend,
        .device = r->launcher ? r->ordinal : r->ordinal + s->device,
        .threads = d->threads,
        .problems = d->problems,
        .problem_count = d->problem_count,
        .incumbent = &d->incumbent,
        .visible_seed = d->visible_seed,
        .hidden_seed = d->hidden_seed,
        .visible_cases = d->visible_cases,
        .hidden_cases = d->hidden_cases,
        .blocks = d->blocks,
        .clock = d->clock,
        .race = d->race,
        .folder = r->folder,
        .source_root = r->tree,
        .launcher = r->launcher,
        .worker = number,
        .find = find_earlier,
        .find_arg = s,
        .first = e->seat_count > 0 ? e->gates : NULL,
        .stop = r->stop,
    };
    acr_status status = gates_open(&s->gates, &setup);
    if (status == ACR_OK) {
        e->gates = e->seats[0].gates;
        ++e->seat_count;
    }
    return status;
}

/* One line for the user, whatever the live line shows. */
static void tell(const engine *e, const char *what)
{
    screen_clear(&e->screen);
    fprintf(stderr, "acromion evolve: %s\n", what);
}

/* Workers that do not answer are left out and named; all others are wanted. */
static acr_status open_seats(engine *e)
{
    const bool launched = e->request->launcher != NULL;
    const int wanted = launched ? e->request->workers : e->request->gpus * e->request->judges;
    acr_status status = ACR_OK;
    for (int i = 0; i < wanted && (status == ACR_OK || (launched && status == ACR_IO)); ++i) {
        status = open_seat(e, i);
        if (launched && status == ACR_IO) {
            char what[1200];
            snprintf(what, sizeof what, "worker %d is left out: %.1000s", i, acr_last_error());
            tell(e, what);
        }
    }
    return launched && status == ACR_IO && e->seat_count > 0 ? ACR_OK : status;
}

static void close_seats(engine *e)
{
    while (e->seat_count > 0) {
        seat *s = &e->seats[--e->seat_count];
        trial_result_free(&s->control);
        gates_close(s->gates);
    }
}

/* The logarithm of what the cost models think of a kernel on all the problems; infinity where it cannot run one. */
static double modelled_cost(const definition *d, const acr__kernel *kernel, const acr__device *device)
{
    double sum = 0.0;
    for (size_t i = 0; i < d->problem_count; ++i) {
        const acr_problem *p = &d->problems[i].problem;
        sum += acr__why_not(kernel, p, device) ? INFINITY : d->problems[i].weight * log(kernel->cost(p, device));
    }
    return sum;
}

static bool line_is_point(const space_list *spaces, const acr__kernel *kernel, genome *out)
{
    candidate c = {.family = NULL};
    bool wanted = kernel->dtype == spaces->scene.problems[0].dtype && candidate_of_kernel(&c, kernel->name) == ACR_OK &&
                  fold_point(spaces, c.family, c.arch, c.parameters, out) && genome_legal(spaces, out);
    candidate_free(&c);
    return wanted;
}

static bool is_seed(const space_list *spaces, const genome seeds[SEEDS_MAX], int count, const genome *g)
{
    bool found = false;
    for (int i = 0; i < count; ++i) {
        found = found || genome_same(spaces, &seeds[i], g);
    }
    return found;
}

/* The lines of the table that are points of the spaces, those that the cost models like best: what both arms begin
 * with, behind the `first` ones that are there. */
static int list_seeds(const definition *d, const space_list *spaces, genome seeds[SEEDS_MAX], int first)
{
    double costs[SEEDS_MAX];
    int count = first;
    for (size_t i = 0; i < acr__kernel_count; ++i) {
        genome g;
        double cost = line_is_point(spaces, acr__kernels[i], &g)
                          ? modelled_cost(d, acr__kernels[i], spaces->scene.device)
                          : INFINITY;
        if (isfinite(cost) && is_seed(spaces, seeds, first, &g)) {
            continue;
        }
        int at = count;
        for (; at > first && cost < costs[at - 1]; --at) {
            if (at < SEEDS_MAX) {
                costs[at] = costs[at - 1];
                seeds[at] = seeds[at - 1];
            }
        }
        if (at < SEEDS_MAX && isfinite(cost)) {
            costs[at] = cost;
            seeds[at] = g;
            count += count < SEEDS_MAX;
        }
    }
    return count;
}

static acr_status open_spaces(engine *e)
{
    const definition *d = e->definition;
    char device_key[WISDOM_DEVICE_MAX];
    acr__wisdom_device_key(gates_device(e->gates), device_key);
    if (strcmp(device_key, d->device_key) != 0) {
        return acr__fail(ACR_UNSUPPORTED, "the run began on %s, this is %s: times of the two cannot go together",
                         d->device_key, device_key);
    }
    const search_scene scene = scene_of(d, e->problems, gates_device(e->gates));
    acr_status status = tree_spaces(&e->spaces, e->request->tree, &scene, pattern_of(d));
    if (status == ACR_OK) {
        status = definition_check_spaces(d, &e->spaces, e->request->tree);
    }
    for (int arm = 0; arm < ARM_COUNT && status == ACR_OK; ++arm) {
        parametric *p = &e->arms[arm];
        *p = (parametric){.spaces = &e->spaces, .seed = d->seed, .control = arm == ARM_CONTROL};
        if (d->surrogate && arm == ARM_SEARCH && !definition_is_external(d)) {
            status = surrogate_create(&p->surrogate, &e->spaces);
        }
        if (status == ACR_OK) {
            status = list_tries(d, &e->spaces, p->seeds, &p->seed_count);
        }
        if (status == ACR_OK && !d->from) {
            p->seed_count = list_seeds(d, &e->spaces, p->seeds, p->seed_count);
        }
    }
    return status;
}

static acr_status begin_slice(engine *e)
{
    watch now;
    const acr__device *device = gates_device(e->gates);
    json_t *environment = json_object();
    environment_add(environment, device);
    watch_open(&now, device, e->request->ordinal);
    watch_disturbed(&now); /* looks once */
    json_object_set_new(environment, "clocks", watch_json(&now));
    watch_close(&now);
    acr_status status = store_begin_slice(e->request->store, environment, &e->slice);
    json_decref(environment);
    return status;
}

/* What a lost worker means: its judgement is lost, and nothing else. Whoever does not even answer a probe, or has lost
 * LOSSES_MAX in a row, is given up. */
static void note_loss(seat *s, const char *detail)
{
    char what[1400];
    ++s->losses;
    const bool answers = gates_probe(s->gates) == ACR_OK;
    s->gone = !answers || s->losses >= LOSSES_MAX;
    snprintf(what, sizeof what, "%.1000s%s", detail,
             !s->gone  ? "; it answers again, the run goes on"
             : answers ? "; it is given up: too many in a row"
                       : "; it is given up: it does not answer any more");
    tell(s->engine, what);
}

/* Whether a result says no more than that the worker was lost. */
static bool is_loss(const engine *e, const trial_result *result)
{
    return e->request->launcher && result->status == TRIAL_HARNESS_FAILED && stopped(e) < 2;
}

/* The first that is there; NULL = all workers are gone. */
static seat *living_seat(engine *e)
{
    for (int i = 0; i < e->seat_count; ++i) {
        if (!e->seats[i].gone) {
            return &e->seats[i];
        }
    }
    return NULL;
}

static acr_status all_are_gone(const engine *e)
{
    return acr__fail(ACR_NO_DEVICE, "all %d workers are lost; --resume goes on, with workers that are there",
                     e->seat_count);
}

static void control_seat(void *arg, int64_t number)
{
    seat *s = &((engine *)arg)->seats[number];
    if (!s->beside) {
        gates_control(s->gates, &s->control);
    }
}

/* The incumbent against itself, on every device: the noise floors of this slice. */
static acr_status run_controls(engine *e)
{
    acr_status status = ACR_OK;
    parallel_for((uint32_t)e->seat_count, e->seat_count, control_seat, e);
    for (int i = 0; i < e->seat_count && status == ACR_OK; ++i) {
        seat *s = &e->seats[i];
        const trial_result *control = &s->control;
        if (s->beside) {
            gates_share_control(s->gates, e->seats[i - 1].gates);
            continue;
        }
        if (is_loss(e, control)) {
            s->gone = true; /* without a noise floor of its own */
            tell(e, control->detail);
            continue;
        }
        /* Without it there is no noise floor, and no trial means anything. */
        status = control->status == TRIAL_VALID ? store_slice_control(e->request->store, e->slice, s->device, control)
                                                : acr__fail(ACR_DEVICE_FAULT, "the incumbent against itself: %s: %s",
                                                            trial_status_name(control->status), control->detail);
    }
    return status == ACR_OK && !living_seat(e) ? all_are_gone(e) : status;
}

/* ---- Peers ---- */

static acr_status measure_peers(engine *e, json_t **records)
{
    enum {
        LIMIT_S = 300
    };
    const definition *d = e->definition;
    char output[512], log[512], texts[DEFINITION_PROBLEMS_MAX][ACR_PROBLEM_TEXT_MAX];
    const char *arguments[16 + DEFINITION_PROBLEMS_MAX] = {"/proc/self/exe", "bench", "--peers", "torch", "-o", output};
    int count = 6;
    snprintf(output, sizeof output, "%.400s/peers.json", e->request->folder);
    snprintf(log, sizeof log, "%.400s/peers.log", e->request->folder);
    if (e->request->peers_python[0]) {
        arguments[count++] = "--python-path";
        arguments[count++] = e->request->peers_python;
    }
    for (size_t i = 0; i < d->problem_count; ++i) {
        acr_problem_format(&d->problems[i].problem, texts[i], sizeof texts[i]);
        arguments[count++] = texts[i];
    }
    unlink(output);
    const process_limits limits = {.wall_s = LIMIT_S, .file_bytes = 64 << 20};
    process_outcome outcome;
    json_error_t error;
    acr_status status = process_run(&outcome, arguments, log, &limits, e->request->stop);
    *records = status == ACR_OK ? json_load_file(output, 0, &error) : NULL;
    if (status == ACR_OK && !*records) {
        char what[96];
        process_outcome_text(what, &outcome);
        return acr__fail(ACR_NO_DEVICE, "the peers could not be measured (%s; see %s)", what, log);
    }
    return status;
}

/* The peers' records of the run: those of an earlier slice, or new ones when they are asked for. */
static acr_status find_peers(engine *e, json_t **records)
{
    json_t *slices = NULL;
    *records = NULL;
    acr_status status = store_slices(e->request->store, &slices);
    for (size_t i = 0; i < json_array_size(slices) && !*records; ++i) {
        json_t *peers = json_object_get(json_array_get(slices, i), "peers");
        *records = json_is_array(peers) ? json_incref(peers) : NULL;
    }
    json_decref(slices);
    if (status == ACR_OK && !*records && e->request->peers_python) {
        status = measure_peers(e, records);
        if (status == ACR_OK) {
            status = store_slice_peers(e->request->store, e->slice, *records);
        }
    }
    return status;
}

/* ---- Time ---- */

/* Whether work that takes so long does not fit into the time any more. */
static bool out_of_time(const engine *e, double needed_s)
{
    return e->request->time_s > 0.0 && monotonic_s() - e->started_s + needed_s > e->request->time_s;
}

/* Whether trials are judged while others are compiled: not where the processors that compile are what is timed. */
static bool compiles_beside(const engine *e)
{
    return strcmp(e->definition->backend, "cuda") == 0;
}

/* ---- Proposing ---- */

typedef struct proposed_texts {
    char kernel[WISDOM_KERNEL_MAX], parameters[SPACE_PARAMETERS_MAX], cell[SPACE_PARAMETERS_MAX];
} proposed_texts;

/* The rows of one round, and what their strings point to. */
typedef struct round_rows {
    trial_row *rows;
    proposed_texts *texts;
    size_t count;
    request_trial trial; /* of an external proposer: one a round */
    proposer_answer answer;
    char *request;
} round_rows;

static void free_rows(round_rows *r)
{
    free(r->rows);
    free(r->texts);
    free(r->request);
    request_trial_free(&r->trial);
    proposer_answer_free(&r->answer);
}

static trial_row *next_row(engine *e, round_rows *r, trial_arm arm)
{
    trial_row *row = &r->rows[r->count];
    *row = (trial_row){.id = e->fold.next_id + (int64_t)r->count,
                       .arm = arm,
                       .number = e->fold.counts[arm].proposed,
                       .round = e->fold.next_round};
    return row;
}

/* Notes that the arm has proposed it, so that the rest of the round does not repeat it. */
static bool note_proposed(engine *e, trial_arm arm, const genome *g)
{
    member m = {.has_genome = g != NULL};
    if (g) {
        m.genome = *g;
    }
    ++e->fold.counts[arm].proposed;
    return archive_add(&e->fold.proposed[arm], &m);
}

static acr_status propose_built_in(engine *e, round_rows *r, trial_arm arm)
{
    trial_row *row = next_row(e, r, arm);
    proposed_texts *texts = &r->texts[r->count];
    proposal p;
    if (!parametric_propose(&e->arms[arm], &e->fold.learnt[arm], &e->fold.proposed[arm], row->number, &p)) {
        e->exhausted[arm] = true;
        return ACR_OK;
    }
    const space *s = &e->spaces.items[p.genome.space];
    space_kernel_name(s, &p.genome, texts->kernel);
    space_parameters(s, &p.genome, texts->parameters);
    space_cell(s, &p.genome, texts->cell);
    row->operation = p.operation;
    row->parent_count = p.parent_count;
    memcpy(row->parents, p.parents, sizeof row->parents);
    row->kernel = texts->kernel;
    row->family = s->family;
    row->arch = s->archs[p.genome.arch];
    row->parameters = texts->parameters;
    row->cell = texts->cell;
    ++r->count;
    return note_proposed(e, arm, &p.genome) ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for the archive");
}

/* What an external proposer's failure is in the store: a trial that ended as it began. */
static acr_status finish_failure(engine *e, const trial_row *row, proposer_status status, const char *detail)
{
    const trial_end end = {.id = row->id,
                           .status = proposer_status_name(status),
                           .detail = detail,
                           .original = -1,
                           .device = -1,
                           .result = NULL};
    ++e->fold.next_id;
    return store_failure(e->request->store, e->slice, row, &end);
}

/* What requests and verdicts are made from. */
static request_inputs inputs_of(const engine *e, int64_t trial)
{
    return (request_inputs){e->definition,    gates_device(e->gates), &e->spaces,           &e->fold, e->request->store,
                            e->request->tree, &e->seats[0].control,   e->request->insights, trial};
}

/* Asks the external proposer, or takes the next of the folder. A failure is stored at once and adds no row. */
static acr_status propose_external(engine *e, round_rows *r)
{
    trial_row *row = next_row(e, r, ARM_SEARCH);
    const request_inputs inputs = inputs_of(e, row->id);
    const bool prepared = e->definition->folder[0] != '\0';
    acr_status status = request_make(&r->request, &inputs);
    if (status != ACR_OK) {
        return status;
    }
    if (prepared) {
        folder_read(&r->answer, e->definition->folder, e->next_file);
    } else {
        proposer_ask(&r->answer, e->definition->proposer, r->request, e->request->proposer_timeout_s, e->request->stop);
    }
    if (r->answer.status == PROPOSER_STOPPED) {
        return ACR_OK; /* the caller sees the signal */
    }
    r->trial.status = r->answer.status;
    snprintf(r->trial.detail, sizeof r->trial.detail, "%s", r->answer.detail);
    if (r->answer.status == PROPOSER_ANSWERED) {
        request_accept(&r->trial, r->answer.json, &e->spaces, &e->fold.proposed[ARM_SEARCH]);
    }
    const request_trial *t = &r->trial;
    row->operation = prepared ? "folder" : "external";
    row->kernel = t->kernel;
    row->family = t->family;
    row->arch = t->arch;
    row->parameters = t->parameters;
    row->cell = t->cell;
    row->source = t->source;
    row->descriptor = t->descriptor;
    row->rationale = t->rationale;
    row->request = r->request;
    row->answer = r->answer.text;
    if (!note_proposed(e, ARM_SEARCH, NULL)) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the archive");
    }
    if (t->status != PROPOSER_ANSWERED) {
        return finish_failure(e, row, t->status, t->detail);
    }
    ++r->count;
    return ACR_OK;
}

/* How many more proposals an arm wants in this round; 0 = it is done. */
static int64_t wanted(const engine *e, trial_arm arm)
{
    const definition *d = e->definition;
    const arm_counts *c = &e->fold.counts[arm];
    int64_t left = d->trials - c->distinct;
    bool spent = c->proposed >= (int64_t)PROPOSALS_A_TRIAL * d->trials + SEEDS_MAX;
    return e->exhausted[arm] || spent || left <= 0 ? 0 : left < d->generation ? left : d->generation;
}

static acr_status propose_one(engine *e, round_rows *r, trial_arm arm)
{
    bool external = arm == ARM_SEARCH && definition_is_external(e->definition);
    return external && e->fold.counts[arm].proposed >= e->arms[arm].seed_count ? propose_external(e, r)
                                                                               : propose_built_in(e, r, arm);
}

/* Proposes the next round and takes it into the fold. */
static acr_status propose_round(engine *e)
{
    size_t capacity = (size_t)ARM_COUNT * (size_t)e->definition->generation;
    round_rows r = {.rows = calloc(capacity, sizeof *r.rows), .texts = calloc(capacity, sizeof *r.texts)};
    acr_status status = r.rows && r.texts ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for a round");
    int64_t left[ARM_COUNT], most = 0;
    for (int arm = 0; arm < ARM_COUNT; ++arm) {
        left[arm] = wanted(e, (trial_arm)arm);
        most = left[arm] > most ? left[arm] : most;
    }
    /* In turn: a slice that ends within a round has judged as many of each. */
    for (int64_t i = 0; i < most; ++i) {
        for (int arm = 0; arm < ARM_COUNT && status == ACR_OK; ++arm) {
            status = i < left[arm] ? propose_one(e, &r, (trial_arm)arm) : ACR_OK;
        }
    }
    if (status == ACR_OK && r.count > 0 && stopped(e) < 2) {
        status = store_propose(e->request->store, e->slice, r.rows, r.count);
    }
    free_rows(&r);
    if (status == ACR_OK) {
        fold_free(&e->fold);
        status = fold_read(&e->fold, e->request->store, e->definition, &e->spaces);
    }
    return status;
}

/* ---- Preparing ---- */

/* Whether this trial is still to be compiled in this slice. */
static bool wants_preparing(engine *e)
{
    pthread_mutex_lock(&e->lock);
    const bool wanted = e->round_status == ACR_OK && e->round_end == ENGINE_COMPLETE && !e->judged_all && !stopped(e) &&
                        !out_of_time(e, e->longest_compile_s + e->longest_judge_s);
    pthread_mutex_unlock(&e->lock);
    return wanted;
}

static void note_prepared(engine *e, flight *f)
{
    pthread_mutex_lock(&e->lock);
    f->prepared = true;
    e->longest_compile_s = fmax(e->longest_compile_s, f->prepare_s);
    while (e->prepared < e->fold.flight_count && e->fold.flights[e->prepared].prepared) {
        if (e->prepared++ == 0) {
            e->longest_prepare_s = fmax(e->longest_prepare_s, monotonic_s() - e->round_started_s);
        }
    }
    pthread_cond_broadcast(&e->progress);
    pthread_mutex_unlock(&e->lock);
}

static void prepare_one(void *arg, int64_t index)
{
    engine *e = arg;
    flight *f = &e->fold.flights[index];
    char name[32];
    double start_s = monotonic_s();
    if (!wants_preparing(e)) {
        return;
    }
    snprintf(name, sizeof name, "t%lld", (long long)f->id);
    gates_prepare(&f->artefact, e->gates, &f->candidate, name, &f->result);
    f->prepare_s = monotonic_s() - start_s;
    note_prepared(e, f);
}

/* Beside judging, all processors but one for each device compile. */
static void *prepare_flights(void *arg)
{
    engine *e = arg;
    const uint32_t judging = compiles_beside(e) ? (uint32_t)e->seat_count : 0, threads = e->request->threads;
    parallel_for(threads > judging ? threads - judging : 1, (int64_t)e->fold.flight_count, prepare_one, e);
    pthread_mutex_lock(&e->lock);
    e->prepared_all = true;
    pthread_cond_broadcast(&e->progress);
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* ---- Judging ---- */

/* Takes a folder's name out of a text, so that what a compiler said is the same wherever the tree lies. */
static void cut_out(char *text, const char *folder)
{
    size_t length = strlen(folder);
    for (char *at = strstr(text, folder); at && length > 0; at = strstr(at, folder)) {
        size_t cut = length + (at[length] == '/');
        memmove(at, at + cut, strlen(at + cut) + 1);
    }
}

static acr_status finish_flight(engine *e, flight *f)
{
    const trial_result *r = &f->result;
    cut_out(f->result.detail, e->request->tree);
    cut_out(f->result.detail, e->request->folder);
    const arm_counts *c = &e->fold.counts[f->arm];
    bool duplicate = r->status == TRIAL_DUPLICATE, lost = r->status == TRIAL_LOST;
    bool improved =
        r->status == TRIAL_VALID && r->overall.verdict == STATS_FASTER && r->overall.speedup > c->best_speedup;
    const trial_end end = {.id = f->id,
                           .status = trial_status_name(r->status),
                           .detail = r->detail,
                           .original = duplicate ? strtoll(r->original, NULL, 10) : -1,
                           .distinct = !duplicate && !lost,
                           .improved = improved,
                           .wall_s = f->prepare_s + f->judge_s,
                           .device = f->device,
                           .result = r};
    acr_status status = store_finish(e->request->store, e->slice, &end);
    return status == ACR_OK ? fold_finish(&e->fold, f->arm, f->kernel, &end) : status;
}

static void judge_flight(const seat *s, flight *f)
{
    const double start_s = monotonic_s();
    if (f->artefact) {
        gates_judge(s->gates, f->artefact, &f->result);
    }
    f->judge_s = monotonic_s() - start_s;
    f->device = f->result.gate_s[GATE_CORRECTNESS] > 0.0 ? s->device : -1;
    if (f->artefact && is_loss(s->engine, &f->result)) {
        f->result.status = TRIAL_LOST;
        f->result.identity[0] = '\0'; /* the same machine code is still to be judged */
    }
    f->judged = f->result.status != TRIAL_HARNESS_FAILED; /* else it stays in flight */
}

/* The next to be judged, in the order of proposal; NULL when there is none, or no more are to be begun. */
static flight *next_to_judge(engine *e)
{
    while (e->next_flight == e->prepared && !e->prepared_all) {
        pthread_cond_wait(&e->progress, &e->lock);
    }
    if (e->round_status != ACR_OK || e->round_end != ENGINE_COMPLETE || e->next_flight == e->fold.flight_count) {
        return NULL;
    }
    if (stopped(e) || e->next_flight == e->prepared || out_of_time(e, e->longest_judge_s)) {
        e->round_end = stopped(e) ? ENGINE_INTERRUPTED : ENGINE_TIME;
        return NULL;
    }
    return &e->fold.flights[e->next_flight++];
}

static void note_round_status(engine *e, acr_status status)
{
    if (e->round_status == ACR_OK && status != ACR_OK) {
        e->round_status = status;
        snprintf(e->round_reason, sizeof e->round_reason, "%s", acr_last_error());
    }
}

/* Stores what has been judged, in the order of proposal: the archive must not depend on who is done first. */
static void record_judged(engine *e)
{
    while (e->round_status == ACR_OK && e->next_record < e->next_flight && e->fold.flights[e->next_record].judged) {
        flight *f = &e->fold.flights[e->next_record++];
        e->longest_judge_s = fmax(e->longest_judge_s, f->judge_s);
        note_round_status(e, finish_flight(e, f));
    }
}

/* One seat's part of a round. */
static void judge_at_seat(void *arg, int64_t number)
{
    engine *e = arg;
    seat *s = &e->seats[number];
    pthread_mutex_lock(&e->lock);
    for (flight *f = NULL; !s->gone && (f = next_to_judge(e)) != NULL;) {
        screen_draw(&e->screen, &e->fold, f->kernel);
        s->judging = f;
        pthread_mutex_unlock(&e->lock);
        judge_flight(s, f);
        pthread_mutex_lock(&e->lock);
        if (f->result.status == TRIAL_LOST) {
            pthread_mutex_unlock(&e->lock);
            note_loss(s, f->result.detail);
            pthread_mutex_lock(&e->lock);
        } else {
            s->losses = 0;
        }
        if (!f->judged && stopped(e) < 2) {
            note_round_status(e, acr__fail(ACR_DEVICE_FAULT, "trial %lld: %s", (long long)f->id, f->result.detail));
        }
        record_judged(e);
    }
    pthread_mutex_unlock(&e->lock);
}

/* Compiles and judges what is in flight. *end is set when not all of it was. */
static acr_status fly(engine *e, engine_end *end)
{
    pthread_t compiling;
    char now[64];
    snprintf(now, sizeof now, "compiling %zu", e->fold.flight_count);
    screen_draw(&e->screen, &e->fold, now);
    e->next_flight = e->next_record = e->prepared = 0;
    e->prepared_all = e->judged_all = false;
    e->round_started_s = monotonic_s();
    e->round_end = ENGINE_COMPLETE;
    e->round_status = ACR_OK;
    const bool beside = compiles_beside(e) && pthread_create(&compiling, NULL, prepare_flights, e) == 0;
    if (!beside) {
        prepare_flights(e);
    }
    parallel_for((uint32_t)e->seat_count, e->seat_count, judge_at_seat, e);
    if (beside) {
        pthread_mutex_lock(&e->lock);
        e->judged_all = true;
        pthread_mutex_unlock(&e->lock);
        pthread_join(compiling, NULL);
    }
    if (e->next_flight < e->fold.flight_count && e->round_end == ENGINE_COMPLETE && !living_seat(e)) {
        note_round_status(e, all_are_gone(e));
    }
    acr_status status = e->round_status == ACR_OK ? ACR_OK : acr__fail(e->round_status, "%s", e->round_reason);
    if (e->round_end != ENGINE_COMPLETE) {
        *end = e->round_end;
        return status;
    }
    if (status == ACR_OK && stopped(e) < 2) {
        fold_free(&e->fold);
        status = fold_read(&e->fold, e->request->store, e->definition, &e->spaces);
    }
    return status;
}

/* ---- Confirming ---- */

static bool worth_confirming(void *arg, const member *m)
{
    (void)arg;
    return m->trial > 0 && m->verdict == STATS_FASTER && m->confirmations == 0;
}

/* The next trial of an arm to confirm; NULL when one is confirmed, or enough were tried. */
static const member *next_to_confirm(const engine *e, trial_arm arm)
{
    const archive *learnt = &e->fold.learnt[arm];
    int tried = 0;
    for (size_t i = 0; i < learnt->count; ++i) {
        tried += learnt->items[i].confirmations > 0;
        if (learnt->items[i].confirmed) {
            return NULL;
        }
    }
    int most = arm == ARM_SEARCH ? CONFIRMED_OF_SEARCH : CONFIRMED_OF_CONTROL;
    return tried < most ? archive_best(learnt, worth_confirming, NULL) : NULL;
}

typedef struct wanted_candidate {
    int64_t trial;
    candidate candidate;
    acr_status status;
} wanted_candidate;

static bool take_candidate(void *arg, const trial_view *v)
{
    wanted_candidate *w = arg;
    const trial_row *row = &v->row;
    if (row->id != w->trial) {
        return true;
    }
    w->status = row->source ? candidate_of_source(&w->candidate, row->family, row->arch, row->parameters, row->source,
                                                  row->descriptor)
                            : candidate_of_family(&w->candidate, row->family, row->arch, row->parameters);
    return false;
}

/* Compiles a trial anew, under a name of its own. *a is NULL where that failed, which result says. */
static acr_status prepare_again(engine *e, int64_t trial, char purpose, artefact **a, trial_result *result)
{
    wanted_candidate w = {.trial = trial, .status = ACR_INVALID};
    char name[32];
    *a = NULL;
    acr_status status = store_trials(e->request->store, take_candidate, &w);
    status = status == ACR_OK ? w.status : status;
    if (status == ACR_OK) {
        snprintf(name, sizeof name, "%c%lld", purpose, (long long)trial);
        gates_prepare(a, e->gates, &w.candidate, name, result);
        candidate_free(&w.candidate);
    }
    return status;
}

static acr_status confirm(engine *e, int64_t trial)
{
    int round = 0;
    trial_result result;
    artefact *a = NULL;
    acr_status status = store_confirmation_count(e->request->store, &round);
    if (status == ACR_OK) {
        status = prepare_again(e, trial, 'c', &a, &result);
    }
    if (status != ACR_OK) {
        return status;
    }
    for (seat *s = living_seat(e); a && s; s = result.status == TRIAL_HARNESS_FAILED ? living_seat(e) : NULL) {
        trial_result_free(&result);
        gates_confirm(s->gates, a, round, &result);
        if (!is_loss(e, &result)) {
            break;
        }
        note_loss(s, result.detail); /* the confirmation is begun anew by whoever is there */
    }
    if (result.status == TRIAL_HARNESS_FAILED) {
        status = stopped(e) == 2
                     ? ACR_OK
                     : acr__fail(ACR_DEVICE_FAULT, "confirming trial %lld: %s", (long long)trial, result.detail);
    } else {
        status = store_confirm(e->request->store, e->slice, trial, round, &result);
    }
    trial_result_free(&result);
    artefact_free(a);
    return status;
}

static acr_status confirm_winners(engine *e, engine_end *end)
{
    /* A compilation, and as many comparisons as a search's. */
    const double needed_s = e->longest_prepare_s + GATES_CONFIRM_PROCESSES * e->longest_judge_s;
    acr_status status = ACR_OK;
    for (int arm = 0; arm < ARM_COUNT; ++arm) {
        for (const member *m = NULL; status == ACR_OK && (m = next_to_confirm(e, (trial_arm)arm)) != NULL;) {
            if (stopped(e) || out_of_time(e, needed_s)) {
                *end = stopped(e) ? ENGINE_INTERRUPTED : ENGINE_TIME;
                return ACR_OK;
            }
            char now[64];
            snprintf(now, sizeof now, "confirming trial %lld", (long long)m->trial);
            screen_draw(&e->screen, &e->fold, now);
            status = confirm(e, m->trial);
            if (status == ACR_OK && stopped(e) < 2) {
                fold_free(&e->fold);
                status = fold_read(&e->fold, e->request->store, e->definition, &e->spaces);
            }
        }
    }
    *end = ENGINE_COMPLETE;
    return status;
}

/* ---- Profiles of elites ---- */

/* Of the incumbent (0) or a trial. */
static acr_status profile_one(engine *e, int64_t trial)
{
    const elite_profiler profiler = {e->gates, e->request->store, e->slice, e->definition};
    const double start_s = monotonic_s();
    artefact *a = NULL;
    trial_result result;
    trial_result_init(&result);
    acr_status status = trial > 0 ? prepare_again(e, trial, 'p', &a, &result) : ACR_OK;
    if (status == ACR_OK && trial > 0 && !a) { /* it was compiled before */
        status = acr__fail(ACR_DEVICE_FAULT, "trial %lld, for its profile: %s", (long long)trial, result.detail);
    }
    if (status == ACR_OK) {
        status = elites_profile(&profiler, trial, a, &e->profiles);
    }
    trial_result_free(&result);
    artefact_free(a);
    e->longest_profile_s = fmax(e->longest_profile_s, monotonic_s() - start_s);
    return status;
}

/* All that are wanted now; *end is set when there was no time for one. */
static acr_status profile_elites(engine *e, engine_end *end)
{
    int64_t trial = 0;
    acr_status status = ACR_OK;
    while (e->profiles && status == ACR_OK) {
        status = elites_next(&trial, e->request->store, &e->fold.learnt[ARM_SEARCH]);
        if (status != ACR_OK || trial < 0) {
            return status;
        }
        if (stopped(e) || out_of_time(e, e->longest_prepare_s + e->longest_profile_s)) {
            *end = stopped(e) ? ENGINE_INTERRUPTED : ENGINE_TIME;
            return ACR_OK;
        }
        char now[64];
        snprintf(now, sizeof now, "counters of trial %lld", (long long)trial);
        screen_draw(&e->screen, &e->fold, now);
        status = profile_one(e, trial);
    }
    return status;
}

/* ---- The run ---- */

static bool budget_left(const engine *e)
{
    return wanted(e, ARM_SEARCH) > 0 || wanted(e, ARM_CONTROL) > 0;
}

/* ---- The folder of candidates ---- */

/* What became of a candidate, beside it. */
static bool write_verdict(void *arg, const json_t *trial, const json_t *answer)
{
    engine *e = arg;
    const char *file = answers_text(answer, "file");
    char name[FOLDER_NAME_MAX], *text = NULL;
    if (!*file || !*answers_text(trial, "status")) {
        return true;
    }
    const request_inputs inputs = inputs_of(e, 0);
    snprintf(name, sizeof name, "%.*s", (int)(strrchr(file, '.') - file), file);
    e->round_status = request_verdict(&text, &inputs, json_integer_value(json_object_get(trial, "id")));
    if (e->round_status == ACR_OK) {
        e->round_status = folder_write(e->definition->folder, name, ".verdict.json", text);
    }
    free(text);
    return e->round_status == ACR_OK;
}

/* Of all: insights grow, and confirmations come later. */
static acr_status write_verdicts(engine *e)
{
    if (!e->definition->folder[0]) {
        return ACR_OK;
    }
    e->round_status = ACR_OK;
    acr_status status = answers_each(e->request->store, write_verdict, e);
    return status == ACR_OK ? e->round_status : status;
}

/* Looks for the next candidate before a round. Where there is none yet, *end is set, and the request that whoever
 * prepares the next one should read is in the folder; where none will come, the search is done. */
static acr_status look_into_folder(engine *e, engine_end *end)
{
    const char *folder = e->definition->folder;
    bool closed = false;
    if (!folder[0] || wanted(e, ARM_SEARCH) == 0 ||
        e->fold.counts[ARM_SEARCH].proposed < e->arms[ARM_SEARCH].seed_count) {
        return ACR_OK;
    }
    acr_status status = write_verdicts(e);
    if (status == ACR_OK) {
        status = folder_next(e->next_file, &closed, folder, e->request->store);
    }
    if (status != ACR_OK || e->next_file[0]) {
        return status;
    }
    if (closed) {
        e->exhausted[ARM_SEARCH] = true;
        return ACR_OK;
    }
    char *text = NULL;
    const request_inputs inputs = inputs_of(e, e->fold.next_id);
    *end = ENGINE_FOLDER;
    status = request_make(&text, &inputs);
    if (status == ACR_OK) {
        status = folder_write(folder, "request", ".json", text);
    }
    free(text);
    return status;
}

static acr_status go_on(engine *e, engine_end *end)
{
    *end = ENGINE_COMPLETE;
    acr_status status = fold_read(&e->fold, e->request->store, e->definition, &e->spaces);
    const bool whole = e->fold.flight_count == 0 && !budget_left(e);
    if (status == ACR_OK && e->request->confirm && !whole) {
        status = confirm_winners(e, end);
        *end = *end == ENGINE_COMPLETE ? ENGINE_CONFIRMED : *end;
        return status;
    }
    while (status == ACR_OK && (e->fold.flight_count > 0 || budget_left(e))) {
        if (stopped(e)) {
            *end = ENGINE_INTERRUPTED;
            return ACR_OK;
        }
        if (out_of_time(e, e->longest_prepare_s + e->longest_judge_s)) {
            *end = ENGINE_TIME;
            return ACR_OK;
        }
        if (e->definition->proposer[0] && e->fold.counts[ARM_SEARCH].failures_in_a_row >= PROPOSER_FAILURES_MAX) {
            *end = ENGINE_PROPOSER;
            return ACR_OK;
        }
        if (e->fold.flight_count == 0 && definition_is_external(e->definition)) { /* which is told of them */
            status = profile_elites(e, end);
            if (status != ACR_OK || *end != ENGINE_COMPLETE) {
                return status;
            }
        }
        status = e->fold.flight_count == 0 ? look_into_folder(e, end) : ACR_OK;
        if (status != ACR_OK || *end != ENGINE_COMPLETE) {
            return status;
        }
        status = e->fold.flight_count == 0 ? propose_round(e) : ACR_OK;
        if (status == ACR_OK && e->fold.flight_count > 0) {
            status = fly(e, end);
        }
        if (*end != ENGINE_COMPLETE) {
            return status;
        }
    }
    status = status == ACR_OK ? confirm_winners(e, end) : status;
    return status == ACR_OK && *end == ENGINE_COMPLETE ? profile_elites(e, end) : status;
}

/* However a slice ends, what it found lies beside the candidates. */
static acr_status search(engine *e, engine_end *end)
{
    acr_status status = go_on(e, end);
    return status == ACR_OK ? write_verdicts(e) : status;
}

static acr_status run_slice(engine *e, engine_end *end)
{
    json_t *peers = NULL;
    acr_status status = open_spaces(e);
    if (status == ACR_OK) {
        status = begin_slice(e);
    }
    if (status == ACR_OK) {
        status = run_controls(e);
    }
    if (status == ACR_OK) {
        status = find_peers(e, &peers);
    }
    if (status == ACR_OK) {
        status = fold_read(&e->fold, e->request->store, e->definition, &e->spaces);
    }
    if (status == ACR_OK) {
        screen_begin(&e->screen, e->definition, &e->fold, &e->seats[0].control, peers, e->request->time_s);
        fold_free(&e->fold);
        status = search(e, end);
        screen_clear(&e->screen);
    }
    if (e->slice > 0) {
        char reason[512];
        snprintf(reason, sizeof reason, "%s", status == ACR_OK ? engine_end_text(*end) : acr_last_error());
        acr_status ended = store_end_slice(e->request->store, e->slice, reason);
        status = status == ACR_OK ? ended : acr__fail(status, "%s", reason);
    }
    json_decref(peers);
    return status;
}

acr_status engine_run(const engine_request *request, engine_end *end)
{
    engine *e = calloc(1, sizeof *e);
    *end = ENGINE_FAULT;
    if (!e) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the search");
    }
    e->request = request;
    e->definition = request->definition;
    e->started_s = monotonic_s();
    e->profiles = strcmp(request->definition->backend, "cuda") == 0 && !request->no_profiles;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->progress, NULL);
    if (mkdir(request->folder, 0777) != 0 && access(request->folder, W_OK) != 0) {
        free(e);
        return acr__fail(ACR_IO, "%s: cannot be made", request->folder);
    }
    acr_status status = definition_check_spaces(e->definition, NULL, request->tree); /* before anything is compiled */
    if (status == ACR_OK) {
        status = open_seats(e);
    }
    if (status == ACR_OK) {
        status = run_slice(e, end);
    }
    fold_free(&e->fold);
    surrogate_free(e->arms[ARM_SEARCH].surrogate);
    close_seats(e);
    pthread_cond_destroy(&e->progress);
    pthread_mutex_destroy(&e->lock);
    folder_remove(request->folder);
    free(e);
    return status;
}
