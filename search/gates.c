/* The gates, the parent's side: see gates.h. The child's is judge.c. */
#include "gates.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "admission.h"
#include "base/files.h"
#include "base/process.h"
#include "base/progress.h"
#include "bench/interleave.h"
#include "build.h"
#include "check/reference_cache.h"
#include "identity.h"
#include "judge.h"
#include "machine/device_lock.h"
#include "worker.h"

struct gates {
    gates_setup setup; /* its pointers are to what follows */
    acr__device device;
    judge_problem *problems;
    double *weights;
    char *backend, *folder, *source_root, *cc, *nvcc, *program, *launcher;
    artefact *incumbent;
    trial_result incumbent_result;
    double noise_floor;
    int references; /* a sealed file of those that every trial needs (reference_cache.h); 0 = none */
    bool references_own;
};

/* ---- Results ---- */

static void fail_trial(trial_result *result, trial_status status, const char *detail)
{
    result->status = status;
    snprintf(result->detail, sizeof result->detail, "%s", detail);
}

/* ---- Reading what a child wrote ---- */

static double number_of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void text_of(char *out, size_t capacity, const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    snprintf(out, capacity, "%s", text ? text : "");
}

static bool read_cases(trial_result *result, const json_t *cases)
{
    const size_t count = json_array_size(cases);
    trial_cases_free(result);
    result->cases = calloc(count + 1, sizeof *result->cases);
    for (size_t i = 0; result->cases && i < count; ++i) {
        const json_t *from = json_array_get(cases, i);
        trial_case *c = &result->cases[result->case_count++];
        text_of(c->problem, sizeof c->problem, from, "problem");
        text_of(c->inputs, sizeof c->inputs, from, "inputs");
        c->seed = (uint64_t)json_integer_value(json_object_get(from, "seed"));
        c->hidden = json_is_true(json_object_get(from, "hidden"));
        c->pass = json_is_true(json_object_get(from, "pass"));
        c->err_max = number_of(from, "err_max");
        c->err_rms = number_of(from, "err_rms");
        c->err_lse = number_of(from, "err_lse");
        c->tol_max = number_of(from, "tol_max");
        c->tol_rms = number_of(from, "tol_rms");
        c->tol_lse = number_of(from, "tol_lse");
    }
    return result->cases != NULL;
}

static double *read_series(const json_t *array)
{
    const size_t count = json_array_size(array);
    double *values = calloc(count + 1, sizeof *values);
    for (size_t i = 0; values && i < count; ++i) {
        values[i] = json_number_value(json_array_get(array, i));
    }
    return values;
}

/* The i-th block of a timing. */
static stats_block block_of(const trial_timing *t, size_t i)
{
    const size_t first = i * INTERLEAVE_BLOCK_SAMPLES;
    return (stats_block){t->incumbent_us + first, t->candidate_us + first, INTERLEAVE_BLOCK_SAMPLES,
                         INTERLEAVE_BLOCK_SAMPLES};
}

static bool summarise(trial_timing *t, size_t processes, double noise_floor)
{
    const size_t blocks = t->samples / INTERLEAVE_BLOCK_SAMPLES;
    stats_block *views = calloc(blocks + 1, sizeof *views);
    if (!views || blocks < 2) {
        free(views);
        return false;
    }
    for (size_t i = 0; i < blocks; ++i) {
        views[i] = block_of(t, i);
    }
    t->comparison = blocks < STATS_BLOCKS_LEAST ? stats_compare_few(views, blocks, noise_floor)
                                                : stats_compare_processes(views, blocks, processes, noise_floor);
    t->incumbent = stats_summarise(t->incumbent_us, t->samples);
    t->candidate = stats_summarise(t->candidate_us, t->samples);
    free(views);
    return true;
}

static bool read_timings(const gates *g, trial_result *result, const json_t *timings)
{
    const size_t count = json_array_size(timings);
    trial_timings_free(result);
    result->timings = calloc(count + 1, sizeof *result->timings);
    for (size_t i = 0; result->timings && i < count && i < g->setup.problem_count; ++i) {
        const json_t *from = json_array_get(timings, i);
        trial_timing *t = &result->timings[result->timing_count++];
        text_of(t->problem, sizeof t->problem, from, "problem");
        t->weight = g->weights[i];
        t->floor_us = g->problems[i].floor_us;
        t->samples = json_array_size(json_object_get(from, "incumbent_us"));
        t->incumbent_us = read_series(json_object_get(from, "incumbent_us"));
        t->candidate_us = read_series(json_object_get(from, "candidate_us"));
        if (!t->incumbent_us || !t->candidate_us ||
            json_array_size(json_object_get(from, "candidate_us")) != t->samples || !summarise(t, 1, g->noise_floor)) {
            return false;
        }
    }
    return result->timings != NULL;
}

/* Block by block the weighted geometric mean of the problems' speed-ups, as blocks of one sample each; the caller frees
 * it. NULL when there is nothing to average. */
static double *overall_blocks(const trial_result *result, size_t *count)
{
    size_t blocks = SIZE_MAX;
    for (size_t i = 0; i < result->timing_count; ++i) {
        const size_t here = result->timings[i].samples / INTERLEAVE_BLOCK_SAMPLES;
        blocks = here < blocks ? here : blocks;
    }
    double *ratios = result->timing_count > 0 && blocks >= 2 ? calloc(blocks, sizeof *ratios) : NULL;
    for (size_t b = 0; ratios && b < blocks; ++b) {
        double sum = 0, weights = 0;
        for (size_t i = 0; i < result->timing_count; ++i) {
            const trial_timing *t = &result->timings[i];
            const stats_block view = block_of(t, b);
            sum += t->weight * log(stats_percentile(view.baseline, view.baseline_count, 0.5) /
                                   stats_percentile(view.candidate, view.candidate_count, 0.5));
            weights += t->weight;
        }
        ratios[b] = exp(sum / weights);
    }
    *count = blocks;
    return ratios;
}

/* A candidate that fell far behind has few blocks: its interval is what those of the problems allow, weighted. Only of
 * one that is slower, which is all that so few can say. */
static void bound_overall(trial_result *result)
{
    double low = 0, high = 0, weights = 0;
    for (size_t i = 0; i < result->timing_count; ++i) {
        const trial_timing *t = &result->timings[i];
        low += t->weight * log(t->comparison.ci95.low);
        high += t->weight * log(t->comparison.ci95.high);
        weights += t->weight;
    }
    stats_comparison *c = &result->overall;
    c->ci95 = (stats_interval){exp(low / weights), exp(high / weights)};
    c->verdict = c->ci95.high < 1.0 / (1.0 + c->noise_floor) ? STATS_SLOWER : STATS_AMBIGUOUS;
}

/* With views of the ratios: the comparison, or (control) the noise floor that they support. */
static bool compare_overall(const gates *g, trial_result *result, size_t processes, double *noise_floor)
{
    static const double one = 1.0;
    size_t count;
    double *ratios = overall_blocks(result, &count);
    stats_block *views = ratios ? calloc(count, sizeof *views) : NULL;
    for (size_t i = 0; views && i < count; ++i) {
        views[i] = (stats_block){&ratios[i], &one, 1, 1};
    }
    if (views && noise_floor) {
        *noise_floor = stats_noise_floor(views, count);
    }
    if (views) {
        result->overall = stats_compare_processes(views, count, processes, noise_floor ? *noise_floor : g->noise_floor);
        if (count < STATS_BLOCKS_LEAST) {
            bound_overall(result);
        }
    }
    const bool done = views != NULL;
    free(views);
    free(ratios);
    return done;
}

/* ---- Children ---- */

/* What a child's death says about the candidate. */
static void read_death(trial_result *result, const process_outcome *outcome, const char *where)
{
    char how[96], detail[640];
    const bool alarmed = outcome->end == PROCESS_SIGNALLED && outcome->code == SIGALRM; /* the child's own limit */
    const bool hung = outcome->end == PROCESS_TIMED_OUT || alarmed;
    if (alarmed)
        snprintf(how, sizeof how, "a call did not end in its time");
    else
        process_outcome_text(how, outcome);
    snprintf(detail, sizeof detail, "%s%s%s", where, *where ? ": " : "", how);
    const bool forbidden = outcome->end == PROCESS_SIGNALLED && outcome->code == SIGSYS; /* the seal was broken */
    const bool never_ran = outcome->end == PROCESS_EXITED && !*where;
    fail_trial(result,
               outcome->end == PROCESS_STOPPED || never_ran ? TRIAL_HARNESS_FAILED
               : hung                                       ? TRIAL_HUNG
               : forbidden                                  ? TRIAL_FORBIDDEN
                                                            : TRIAL_CRASHED,
               detail);
}

/* Runs a stage in a child; the caller drops what it answers. NULL after filling result when the child did not live to
 * answer. */
static json_t *ask_wrapped_child(const gates *g, const judge_job *job, const char *folder, const char *name,
                                 const char *const *wrapper, double timeout_s, process_outcome *outcome,
                                 trial_result *result)
{
    char job_path[PATH_MAX], result_path[PATH_MAX], log_path[PATH_MAX];
    *outcome = (process_outcome){.end = PROCESS_EXITED, .code = -1};
    const process_limits limits = {.wall_s = timeout_s, .file_bytes = (int64_t)256 << 20, .shared = job->references};
    json_t *object = judge_job_json(job);
    acr_status status = file_path(job_path, folder, name, ".job.json");
    if (status == ACR_OK) {
        status = file_path(result_path, folder, name, ".result.json");
    }
    if (status == ACR_OK) {
        status = file_path(log_path, folder, name, ".log");
    }
    if (status == ACR_OK && (!object || json_dump_file(object, job_path, JSON_INDENT(1)) != 0)) {
        status = acr__fail(ACR_IO, "%s: cannot be written", job_path);
    }
    json_decref(object);
    if (status == ACR_OK) {
        unlink(result_path);
        enum {
            WORDS_MAX = 32
        };
        const char *argv[WORDS_MAX + 5], *const own[] = {g->program, GATES_CHILD, job_path, result_path, NULL};
        size_t words = 0;
        for (; wrapper && wrapper[words] && words < WORDS_MAX; ++words) {
            argv[words] = wrapper[words];
        }
        memcpy(argv + words, own, sizeof own);
        status = process_run(outcome, argv, log_path, &limits, g->setup.stop);
    }
    if (status != ACR_OK) {
        fail_trial(result, TRIAL_HARNESS_FAILED, acr_last_error());
        return NULL;
    }
    json_t *answer = json_load_file(result_path, 0, NULL);
    if (!answer || outcome->end != PROCESS_EXITED || outcome->code != 0) {
        char where[WORKER_PLACE_MAX];
        json_decref(answer);
        worker_last_place(where, log_path);
        read_death(result, outcome, where);
        return NULL;
    }
    return answer;
}

/* Another device's times are not this run's. */
static acr_status check_device(const gates *g, const json_t *answer)
{
    char key[WISDOM_DEVICE_MAX];
    const char *theirs = json_string_value(json_object_get(answer, "device"));
    acr__wisdom_device_key(&g->device, key);
    return theirs && strcmp(theirs, key) == 0
               ? ACR_OK
               : acr__fail(ACR_IO, "its device is %s, the run's is %s", theirs && *theirs ? theirs : "none", key);
}

/* The same by a launcher. HARNESS_FAILED where the worker is lost. */
static json_t *ask_worker(const gates *g, const judge_job *job, const char *folder, const char *name, double timeout_s,
                          trial_result *result)
{
    enum {
        WAIT_S = 900 /* in a scheduler's queue, or for others' timing on the device */
    };
    const worker w = {g->launcher, g->program, g->setup.worker, WAIT_S, g->setup.stop};
    json_t *object = judge_job_json(job);
    const worker_job asked = {.job = object,
                              .candidate = job->candidate,
                              .incumbent = job->incumbent,
                              .timeout_s = timeout_s,
                              .timed = job->stage == STAGE_PERFORMANCE && !job->model_clock};
    worker_answer answer = {.result = NULL};
    acr_status status =
        object ? worker_ask(&answer, &w, &asked, folder, name) : acr__fail(ACR_NO_MEMORY, "no memory for a job");
    json_decref(object);
    const bool whole =
        status == ACR_OK && answer.result && answer.outcome.end == PROCESS_EXITED && answer.outcome.code == 0;
    if (whole) {
        status = check_device(g, answer.result);
    } else if (status == ACR_OK) {
        read_death(result, &answer.outcome, answer.place);
    }
    if (status != ACR_OK) {
        char detail[sizeof result->detail];
        snprintf(detail, sizeof detail, "worker %d was lost: %.900s", g->setup.worker, acr_last_error());
        fail_trial(result, TRIAL_HARNESS_FAILED, detail);
    }
    if (!whole || status != ACR_OK) {
        json_decref(answer.result);
        return NULL;
    }
    return answer.result;
}

static json_t *ask_child(const gates *g, const judge_job *job, const char *folder, const char *name, double timeout_s,
                         trial_result *result)
{
    process_outcome outcome;
    return g->launcher ? ask_worker(g, job, folder, name, timeout_s, result)
                       : ask_wrapped_child(g, job, folder, name, NULL, timeout_s, &outcome, result);
}

static void read_end(trial_result *result, const json_t *answer)
{
    const char *status = json_string_value(json_object_get(answer, "status"));
    const char *gate = json_string_value(json_object_get(answer, "gate"));
    if (!status || !gate || !trial_status_parse(status, &result->status) || !trial_gate_parse(gate, &result->gate)) {
        fail_trial(result, TRIAL_HARNESS_FAILED, "the child's answer is none");
        return;
    }
    text_of(result->detail, sizeof result->detail, answer, "detail");
}

static judge_job job_of(const gates *g, judge_stage stage, const artefact *a)
{
    const gates_setup *s = &g->setup;
    return (judge_job){.stage = stage,
                       .backend = s->backend,
                       .device = s->device,
                       .threads = s->threads,
                       .candidate = a ? a->folder : NULL,
                       .incumbent = g->incumbent ? g->incumbent->folder : NULL,
                       .problems = g->problems,
                       .problem_count = s->problem_count,
                       .visible_seed = s->visible_seed,
                       .hidden_seed = s->hidden_seed,
                       .visible_cases = s->visible_cases,
                       .hidden_cases = s->hidden_cases,
                       .blocks = s->blocks,
                       .case_timeout_s = stage == STAGE_PERFORMANCE ? s->timing_timeout_s : s->case_timeout_s,
                       .timing_timeout_s = s->timing_timeout_s,
                       .budget_s = 5.0,
                       .references = g->references,
                       .model_clock = s->clock == GATES_CLOCK_MODEL};
}

/* ---- Opening ---- */

static acr_status describe_device(gates *g)
{
    acr_ctx *ctx;
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = g->setup.backend;
    options.device = g->setup.device;
    options.threads = g->setup.threads;
    acr_status status = acr_ctx_create(&ctx, &options);
    if (status == ACR_OK) {
        g->device = acr__ctx_backend_device(ctx)->device;
        if (g->device.backend == ACR__CPU) {
            g->setup.threads = (uint32_t)g->device.threads;
        }
        acr_ctx_destroy(ctx);
    }
    return status;
}

/* What was named, else the environment's, else the usual; a copy. */
static char *tool(const char *wanted, const char *variable, const char *usual)
{
    const char *named = getenv(variable);
    return strdup(wanted ? wanted : named && *named ? named : usual);
}

/* The build's nvcc where it is still there, for toolkits that are not on PATH. */
static const char *usual_nvcc(void)
{
    return access(ACR_NVCC, X_OK) == 0 ? ACR_NVCC : "nvcc";
}

static char *absolute(const char *path)
{
    char *whole = realpath(path, NULL);
    return whole ? whole : strdup(path);
}

static acr_status copy_problems(gates *g, const gates_problem *problems, size_t count)
{
    g->problems = calloc(count + 1, sizeof *g->problems);
    g->weights = calloc(count + 1, sizeof *g->weights);
    if (!g->problems || !g->weights) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %zu problems", count);
    }
    for (size_t i = 0; i < count; ++i) {
        judge_problem *p = &g->problems[i];
        acr_status status = acr_problem_format(&problems[i].problem, p->text, sizeof p->text);
        if (status != ACR_OK) {
            return status;
        }
        p->problem = problems[i].problem;
        g->weights[i] = problems[i].weight;
        if (!(problems[i].weight > 0)) {
            return acr__fail(ACR_INVALID, "%s: weight is %g: above 0 is wanted", p->text, problems[i].weight);
        }
    }
    return ACR_OK;
}

static acr_status copy_setup(gates *g, const gates_setup *setup)
{
    g->setup = *setup;
    g->backend = strdup(setup->backend);
    g->folder = absolute(setup->folder);
    g->source_root = absolute(build_source_root(setup->source_root));
    g->cc = tool(setup->cc, "CC", "cc");
    g->nvcc = tool(setup->nvcc, "NVCC", usual_nvcc());
    g->program = absolute(setup->program ? setup->program : "/proc/self/exe");
    g->launcher = setup->launcher ? strdup(setup->launcher) : NULL;
    if ((setup->launcher && !g->launcher) || !g->backend || !g->folder || !g->source_root || !g->cc || !g->nvcc ||
        !g->program) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the gates");
    }
    g->setup.backend = g->backend;
    g->setup.first = NULL;
    g->setup.problems = NULL; /* copied below */
    g->setup.incumbent = NULL;
    g->setup.visible_cases = setup->visible_cases ? setup->visible_cases : 8;
    g->setup.hidden_cases = setup->hidden_cases ? setup->hidden_cases : 8;
    g->setup.blocks = setup->blocks ? setup->blocks : INTERLEAVE_BLOCKS_SEARCH;
    g->setup.compile_timeout_s = setup->compile_timeout_s > 0 ? setup->compile_timeout_s : 120;
    g->setup.case_timeout_s = setup->case_timeout_s > 0 ? setup->case_timeout_s : 20;
    g->setup.timing_timeout_s = setup->timing_timeout_s > 0 ? setup->timing_timeout_s : 60;
    g->noise_floor = 0.01;
    return copy_problems(g, setup->problems, setup->problem_count);
}

/* Measures them, on a CPU; the lowest that was ever seen counts, since other work on the machine only raises them. */
static acr_status find_floors(gates *g)
{
    trial_result result;
    if (g->setup.clock == GATES_CLOCK_MODEL) {
        return ACR_OK; /* nothing is measured that a floor could be held against */
    }
    const judge_job job = job_of(g, STAGE_FLOORS, NULL);
    trial_result_init(&result);
    json_t *answer = ask_child(g, &job, g->folder, "floors", g->setup.timing_timeout_s, &result);
    if (!answer) {
        return acr__fail(ACR_UNSUPPORTED, "no floors: %s", result.detail);
    }
    const json_t *floors = json_object_get(answer, "floors_us");
    const bool whole = json_array_size(floors) == g->setup.problem_count;
    for (size_t i = 0; whole && i < g->setup.problem_count; ++i) {
        const json_t *pair = json_array_get(floors, i);
        const double floor_us = json_number_value(json_array_get(pair, 0)), known_us = g->problems[i].floor_us;
        g->problems[i].floor_us = known_us > 0 ? fmin(floor_us, known_us) : floor_us;
        g->problems[i].memory_us = fmax(g->problems[i].memory_us, json_number_value(json_array_get(pair, 1)));
    }
    text_of(result.detail, sizeof result.detail, answer, "detail");
    json_decref(answer);
    return whole ? ACR_OK : acr__fail(ACR_UNSUPPORTED, "no floors: %s", result.detail);
}

/* A quarter of the machine's memory at most; what does not fit, each child makes for itself. */
static int64_t references_bytes_max(void)
{
    return (int64_t)sysconf(_SC_PHYS_PAGES) / 4 * sysconf(_SC_PAGESIZE);
}

/* The references of the task's own problems depend on the seeds alone, so that children need not make them for each
 * trial anew. A foreign CPU kernel is called in processes that hold nothing of the child's (sandbox.h). */
static acr_status make_references(gates *g)
{
    if (g->launcher) { /* descriptors stay on their machine: each judge makes its own */
        return ACR_OK;
    }
    const judge_job job = job_of(g, STAGE_CORRECTNESS, NULL);
    reference_request *requests = calloc(JUDGE_REQUESTS * job.problem_count + 1, sizeof *requests);
    if (!requests) {
        return acr__fail(ACR_NO_MEMORY, "no memory for references");
    }
    int file;
    acr_status status = reference_cache_make(&file, requests, judge_requests(requests, &job), references_bytes_max());
    free(requests);
    g->references = status == ACR_OK ? file : 0;
    g->references_own = status == ACR_OK;
    return status;
}

static void judge_correctness(gates *g, const artefact *a, trial_result *result, const judge_job *job,
                              const char *name);

static acr_status open_incumbent(gates *g, const candidate *incumbent)
{
    trial_result *result = &g->incumbent_result;
    gates_prepare(&g->incumbent, g, incumbent, "incumbent", result);
    if (g->incumbent) {
        const judge_job job = job_of(g, STAGE_CORRECTNESS, g->incumbent);
        judge_correctness(g, g->incumbent, result, &job, "correctness");
    }
    return result->status == TRIAL_VALID
               ? ACR_OK
               : acr__fail(ACR_UNSUPPORTED, "the incumbent does not pass the gate %s: %s: %s",
                           trial_gate_name(result->gate), trial_status_name(result->status), result->detail);
}

/* What does not depend on which of several equal devices it is. The incumbent is right: what is timed of it on this
 * device is judged. */
static acr_status take_over(gates *g, const gates *first)
{
    char key[WISDOM_DEVICE_MAX], first_key[WISDOM_DEVICE_MAX];
    acr__wisdom_device_key(&g->device, key);
    acr__wisdom_device_key(&first->device, first_key);
    if (strcmp(key, first_key) != 0) {
        return acr__fail(ACR_UNSUPPORTED, "device %d is %s, device %d is %s: one search wants equal ones",
                         (int)g->setup.device, key, (int)first->setup.device, first_key);
    }
    for (size_t i = 0; i < g->setup.problem_count; ++i) {
        g->problems[i].floor_us = first->problems[i].floor_us;
        g->problems[i].memory_us = first->problems[i].memory_us;
    }
    g->references = first->references;
    g->incumbent = first->incumbent ? malloc(sizeof *g->incumbent) : NULL;
    if (first->incumbent && !g->incumbent) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the incumbent");
    }
    if (g->incumbent) {
        *g->incumbent = *first->incumbent;
    }
    return ACR_OK;
}

acr_status gates_probe(const gates *g)
{
    char name[32];
    const judge_job job = job_of(g, STAGE_PROBE, NULL);
    trial_result result;
    trial_result_init(&result);
    snprintf(name, sizeof name, "probe%d", g->setup.worker);
    json_t *answer = ask_child(g, &job, g->folder, name, g->setup.case_timeout_s, &result);
    if (answer) {
        read_end(&result, answer);
        json_decref(answer);
    }
    return result.status == TRIAL_VALID ? ACR_OK : acr__fail(ACR_IO, "%s", result.detail);
}

/* What is found out and made before the first trial. */
static acr_status make_ready(gates *g, const candidate *incumbent)
{
    acr_status status = find_floors(g);
    if (status == ACR_OK) {
        status = make_references(g);
    }
    return status == ACR_OK && incumbent ? open_incumbent(g, incumbent) : status;
}

void gates_close(gates *g)
{
    if (!g) {
        return;
    }
    if (g->references_own) {
        close(g->references);
    }
    artefact_free(g->incumbent);
    trial_result_free(&g->incumbent_result);
    void *const owned[] = {g->problems, g->weights, g->backend, g->folder,   g->source_root,
                           g->cc,       g->nvcc,    g->program, g->launcher, g};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; ++i) {
        free(owned[i]);
    }
}

acr_status gates_open(gates **out, const gates_setup *setup)
{
    gates *g = calloc(1, sizeof *g);
    if (!g) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the gates");
    }
    trial_result_init(&g->incumbent_result);
    acr_status status = copy_setup(g, setup);
    if (status == ACR_OK && access(g->folder, W_OK) != 0) {
        status = acr__fail(ACR_IO, "%s: %s", g->folder, strerror(errno));
    }
    if (status == ACR_OK) {
        status = describe_device(g);
    }
    if (status == ACR_OK && g->launcher) {
        status = gates_probe(g);
    }
    if (status == ACR_OK) {
        status = setup->first ? take_over(g, setup->first) : make_ready(g, setup->incumbent);
    }
    if (status != ACR_OK) {
        gates_close(g);
        return status;
    }
    *out = g;
    return ACR_OK;
}

const acr__device *gates_device(const gates *g)
{
    return &g->device;
}

const trial_result *gates_incumbent(const gates *g)
{
    return &g->incumbent_result;
}

/* ---- Prepare ---- */

void artefact_free(artefact *a)
{
    free(a);
}

const char *artefact_folder(const artefact *a)
{
    return a->folder;
}

/* A trial that was interrupted is made again: nothing of the first attempt is taken for the second's. */
static void empty_folder(const char *folder)
{
    DIR *directory = opendir(folder);
    for (const struct dirent *entry; directory && (entry = readdir(directory)) != NULL;) {
        unlinkat(dirfd(directory), entry->d_name, 0);
    }
    if (directory) {
        closedir(directory);
    }
}

static artefact *make_folder(const gates *g, const candidate *c, const char *trial, trial_result *result)
{
    const bool named =
        *trial && strspn(trial, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == strlen(trial);
    artefact *a = calloc(1, sizeof *a);
    if (!a || !named || file_path(a->folder, g->folder, trial, "") != ACR_OK ||
        (mkdir(a->folder, 0777) != 0 && errno != EEXIST)) {
        snprintf(result->detail, sizeof result->detail, "no folder for the trial %.64s: %s", trial,
                 !a       ? "no memory"
                 : !named ? "a name of other characters than [A-Za-z0-9_-]"
                          : strerror(errno));
        result->status = TRIAL_HARNESS_FAILED;
        free(a);
        return NULL;
    }
    empty_folder(a->folder);
    a->backend = c->backend;
    a->is_source = c->source != NULL;
    snprintf(a->arch, sizeof a->arch, "%s", c->arch);
    return a;
}

static bool admit(const gates *g, const candidate *c, descriptor *d, trial_result *result)
{
    result->gate = GATE_ADMISSION;
    if ((c->backend == ACR__CPU) != (g->device.backend == ACR__CPU)) {
        fail_trial(result, TRIAL_INADMISSIBLE, "arch: it is of the other backend");
        return false;
    }
    acr_status status = admission_check(c, g->source_root, d);
    if (status != ACR_OK) {
        fail_trial(result, status == ACR_NO_MEMORY ? TRIAL_HARNESS_FAILED : TRIAL_INADMISSIBLE, acr_last_error());
    }
    return status == ACR_OK;
}

/* CTAs that an SM holds, by registers (given out in eights a thread), shared memory (1 KB of it taken a CTA) and
 * threads. */
static int64_t ctas_per_sm(const acr__device *d, const trial_resources *r, const build_launches *launches)
{
    const int64_t threads = (launches->block + 31) / 32 * 32, registers = (r->registers + 7) / 8 * 8;
    const int64_t by_registers = d->regs_per_sm / (registers * threads);
    const int64_t by_smem = d->smem_per_sm_bytes / (r->smem_bytes + 1024), by_threads = 2048 / threads;
    const int64_t fewer = by_registers < by_smem ? by_registers : by_smem;
    return fewer < by_threads ? fewer : by_threads;
}

static bool check_resources(const gates *g, const artefact *a, const build_launches *launches, trial_result *result)
{
    trial_resources *r = &result->resources;
    const acr__device *d = &g->device;
    char detail[200];
    if (a->backend == ACR__CPU) {
        return true;
    }
    if (build_read_resources(a, r) != ACR_OK) {
        fail_trial(result, TRIAL_COMPILE_FAILED, acr_last_error());
        return false;
    }
    r->smem_bytes += launches->smem_bytes;
    r->ctas_per_sm = ctas_per_sm(d, r, launches);
    if (r->spill_bytes > 0) {
        snprintf(detail, sizeof detail, "registers spill: %lld bytes of stores and loads", (long long)r->spill_bytes);
    } else if (r->smem_bytes > d->smem_per_cta_bytes) {
        snprintf(detail, sizeof detail, "shared memory: %lld bytes, the device has %d a CTA", (long long)r->smem_bytes,
                 (int)d->smem_per_cta_bytes);
    } else if (r->ctas_per_sm < 1) {
        snprintf(detail, sizeof detail, "%lld registers for each of %d threads: the SM has %d", (long long)r->registers,
                 (int)launches->block, (int)d->regs_per_sm);
    } else {
        return true;
    }
    fail_trial(result, TRIAL_RESOURCES, detail);
    return false;
}

/* What the compiler made, as an object: nothing forbidden in it, and its digest. */
static bool look_at_object(artefact *a, const char *launches, trial_result *result)
{
    char path[PATH_MAX];
    object_facts facts = {.code_bytes = 0};
    const bool cpu = a->backend == ACR__CPU;
    acr_status status = file_path(path, a->folder, cpu ? "code.so" : "image.bin", "");
    if (status == ACR_OK) {
        status = object_look(&facts, path, a->backend, launches);
    }
    const bool read_on = cpu || a->is_source; /* families of ours may read a clock to keep an order */
    if (status == ACR_OK && !facts.refusal[0] && read_on) {
        status = file_path(path, a->folder, cpu ? "code.txt" : "image.ptx", "");
    }
    if (status == ACR_OK && !facts.refusal[0] && read_on) {
        status = cpu ? disassembly_look(facts.refusal, path) : ptx_look(facts.refusal, path);
    }
    if (status != ACR_OK || facts.refusal[0]) {
        fail_trial(result, status != ACR_OK ? TRIAL_HARNESS_FAILED : TRIAL_INADMISSIBLE,
                   status != ACR_OK ? acr_last_error() : facts.refusal);
        return false;
    }
    result->resources.code_bytes = facts.code_bytes;
    memcpy(a->identity, facts.digest, sizeof a->identity);
    memcpy(result->identity, facts.digest, sizeof result->identity);
    return true;
}

static bool compile(const gates *g, artefact *a, const candidate *c, trial_result *result)
{
    const build_tools tools = {.cc = g->cc,
                               .nvcc = g->nvcc,
                               .source_root = g->source_root,
                               .device = &g->device,
                               .timeout_s = g->setup.compile_timeout_s,
                               .stop = g->setup.stop};
    result->gate = GATE_COMPILE;
    const double start_s = monotonic_s();
    const bool done = build_compile(a, &tools, c, result);
    result->gate_s[GATE_COMPILE] = monotonic_s() - start_s;
    return done;
}

static bool inspect(const gates *g, artefact *a, const descriptor *d, trial_result *result)
{
    static const size_t LAUNCHES_BYTES = 16384;
    build_launches launches = {.block = 1};
    const double start_s = monotonic_s();
    char *text = calloc(1, LAUNCHES_BYTES);
    result->gate = GATE_RESOURCES;
    const char *reason = NULL;
    acr_status status = text ? build_find_launches(&launches, text, LAUNCHES_BYTES, &reason, a, d, &g->device,
                                                   g->problems, g->setup.problem_count)
                             : acr__fail(ACR_NO_MEMORY, "no memory for launches");
    bool passed = status == ACR_OK && !reason;
    if (status != ACR_OK) {
        fail_trial(result, TRIAL_HARNESS_FAILED, acr_last_error());
    } else if (reason) {
        fail_trial(result, TRIAL_UNSUPPORTED, reason);
    }
    passed = passed && check_resources(g, a, &launches, result);
    result->gate_s[GATE_RESOURCES] = monotonic_s() - start_s;
    if (passed) {
        result->gate = GATE_IDENTITY;
        passed = look_at_object(a, text, result);
        result->gate = passed || result->status != TRIAL_INADMISSIBLE ? GATE_IDENTITY : GATE_COMPILE;
        result->gate_s[GATE_IDENTITY] = monotonic_s() - start_s - result->gate_s[GATE_RESOURCES];
    }
    free(text);
    return passed;
}

void gates_prepare(artefact **out, gates *g, const candidate *c, const char *trial, trial_result *result)
{
    descriptor d = {.backend = c->backend};
    *out = NULL;
    trial_result_init(result);
    const double start_s = monotonic_s();
    const bool admitted = admit(g, c, &d, result);
    result->gate_s[GATE_ADMISSION] = monotonic_s() - start_s;
    artefact *a = admitted ? make_folder(g, c, trial, result) : NULL;
    if (!a || !compile(g, a, c, result) || !inspect(g, a, &d, result)) {
        free(a);
        return;
    }
    if (build_save(a) != ACR_OK) {
        fail_trial(result, TRIAL_HARNESS_FAILED, acr_last_error());
        free(a);
        return;
    }
    *out = a;
}

/* ---- Judge ---- */

/* References take time too, and small cases take none: by the number of them, not by the candidate. */
static double correctness_timeout_s(const judge_job *job)
{
    const double cases =
        (double)(job->visible_cases + job->hidden_cases) + (double)JUDGE_REQUESTS * (double)job->problem_count;
    return job->case_timeout_s * cases;
}

static void take_cases(trial_result *result, const json_t *answer)
{
    if (!read_cases(result, json_object_get(answer, "cases"))) {
        fail_trial(result, TRIAL_HARNESS_FAILED, "no memory for the cases");
    }
}

static void take_timings(const gates *g, trial_result *result, const json_t *answer)
{
    if (result->status == TRIAL_VALID &&
        (!read_timings(g, result, json_object_get(answer, "timings")) || !compare_overall(g, result, 1, NULL))) {
        fail_trial(result, TRIAL_HARNESS_FAILED, "the child's timings are not whole");
    }
}

static void judge_correctness(gates *g, const artefact *a, trial_result *result, const judge_job *job, const char *name)
{
    result->gate = GATE_CORRECTNESS;
    const double start_s = monotonic_s();
    json_t *answer = ask_child(g, job, a->folder, name, correctness_timeout_s(job), result);
    if (answer) {
        read_end(result, answer);
        take_cases(result, answer);
        json_decref(answer);
    }
    result->gate_s[GATE_CORRECTNESS] += monotonic_s() - start_s;
}

/* The child that times, alone on its device. */
static json_t *ask_timing_child(gates *g, const artefact *a, trial_result *result, const judge_job *job,
                                const char *name)
{
    enum {
        WAIT_S = 900 /* for others at the device, of a child that locks it itself; its own alarm ends what hangs */
    };
    const double timeout_s = g->setup.timing_timeout_s * (double)g->setup.problem_count +
                             (job->stage == STAGE_JUDGEMENT ? correctness_timeout_s(job) : 0.0) +
                             (job->locks ? WAIT_S : 0.0);
    int lock = -1;
    if (g->setup.clock == GATES_CLOCK_REAL && !job->locks && !g->launcher && /* a worker's judge locks its own */
        device_lock(&lock, g->backend, g->setup.device, g->setup.stop) != ACR_OK) {
        fail_trial(result, TRIAL_HARNESS_FAILED, acr_last_error());
        return NULL;
    }
    json_t *answer = ask_child(g, job, a->folder, name, timeout_s, result);
    if (lock >= 0) {
        device_unlock(lock);
    }
    return answer;
}

/* One measurement in a process of its own. */
static void judge_performance(gates *g, const artefact *a, trial_result *result, const judge_job *job, const char *name)
{
    result->gate = GATE_PLAUSIBILITY;
    const double start_s = monotonic_s();
    json_t *answer = ask_timing_child(g, a, result, job, name);
    if (answer) {
        read_end(result, answer);
        take_timings(g, result, answer);
        json_decref(answer);
    }
    result->gate_s[GATE_PERFORMANCE] += monotonic_s() - start_s;
}

/* Correctness, then performance, in one process: on a GPU each process costs a start of the driver. */
static void judge_both(gates *g, const artefact *a, trial_result *result, const judge_job *job)
{
    static const char timing[] = "timing "; /* where a child was that died there */
    result->gate = GATE_CORRECTNESS;
    const double start_s = monotonic_s();
    double correctness_s = 0.0, waited_s = 0.0;
    json_t *answer = ask_timing_child(g, a, result, job, "judgement");
    if (answer) {
        read_end(result, answer);
        correctness_s = number_of(answer, "correctness_s");
        waited_s = number_of(answer, "waited_s");
        take_cases(result, answer);
        take_timings(g, result, answer);
        json_decref(answer);
    } else if (strncmp(result->detail, timing, sizeof timing - 1) == 0) {
        result->gate = GATE_PLAUSIBILITY;
    }
    const double all_s = monotonic_s() - start_s - waited_s;
    const bool was_timed = result->gate > GATE_CORRECTNESS;
    result->gate_s[GATE_CORRECTNESS] = was_timed ? fmin(correctness_s, all_s) : all_s;
    result->gate_s[GATE_PERFORMANCE] = all_s - result->gate_s[GATE_CORRECTNESS];
}

/* Far ahead is looked at twice: the second look must see most of it, and is what counts. */
static void look_twice(gates *g, const artefact *a, trial_result *result)
{
    static const double FAR_AHEAD = 1.5, KEPT = 0.75;
    const double first = result->overall.speedup;
    if (result->status != TRIAL_VALID || !(first > FAR_AHEAD) || g->setup.clock == GATES_CLOCK_MODEL) {
        return;
    }
    judge_job job = job_of(g, STAGE_PERFORMANCE, a);
    job.hidden_seed ^= 0x5eedf00d00000000u;
    job.thorough = true;
    judge_performance(g, a, result, &job, "second_look");
    if (result->status == TRIAL_VALID && !(result->overall.speedup >= KEPT * first)) {
        char detail[160];
        snprintf(detail, sizeof detail, "%.2f times the incumbent, but %.2f in a fresh process with fresh seeds", first,
                 result->overall.speedup);
        result->gate = GATE_PLAUSIBILITY;
        fail_trial(result, TRIAL_IMPLAUSIBLE, detail);
    }
}

void gates_judge(gates *g, const artefact *a, trial_result *result)
{
    result->gate = GATE_IDENTITY;
    if (g->setup.find && g->setup.find(g->setup.find_arg, a->identity, result->original)) {
        fail_trial(result, TRIAL_DUPLICATE, "the machine code and launch of an earlier trial");
        return;
    }
    const bool at_once = a->backend == ACR__CUDA && !g->launcher && g->incumbent;
    judge_job job = job_of(g, at_once ? STAGE_JUDGEMENT : STAGE_CORRECTNESS, a);
    job.race = g->setup.race;
    job.locks = at_once && g->setup.clock == GATES_CLOCK_REAL;
    if (at_once) {
        judge_both(g, a, result, &job);
    } else {
        judge_correctness(g, a, result, &job, "correctness");
        if (result->status == TRIAL_VALID) {
            job = job_of(g, STAGE_PERFORMANCE, a);
            job.race = g->setup.race;
            judge_performance(g, a, result, &job, "performance");
        }
    }
    look_twice(g, a, result);
}

void gates_run(gates *g, const candidate *c, const char *trial, trial_result *result)
{
    artefact *a;
    gates_prepare(&a, g, c, trial, result);
    if (a) {
        gates_judge(g, a, result);
        artefact_free(a);
    }
}

/* The samples of a further process behind those of the earlier ones. False when they are not as many, or there is no
 * memory. */
static bool append_timings(trial_result *all, const trial_result *more, size_t processes)
{
    for (size_t i = 0; i < all->timing_count && more->timing_count == all->timing_count; ++i) {
        trial_timing *t = &all->timings[i];
        const trial_timing *m = &more->timings[i];
        const size_t total = t->samples + m->samples;
        double *theirs = realloc(t->incumbent_us, (total + 1) * sizeof *theirs);
        t->incumbent_us = theirs ? theirs : t->incumbent_us;
        double *ours = realloc(t->candidate_us, (total + 1) * sizeof *ours);
        t->candidate_us = ours ? ours : t->candidate_us;
        if (!theirs || !ours || t->samples != m->samples * processes) {
            return false;
        }
        memcpy(theirs + t->samples, m->incumbent_us, m->samples * sizeof *theirs);
        memcpy(ours + t->samples, m->candidate_us, m->samples * sizeof *ours);
        t->samples = total;
    }
    return more->timing_count == all->timing_count;
}

/* One process more, and what all of them together say. */
static void confirm_once(gates *g, const artefact *a, uint64_t seed, size_t processes, trial_result *result)
{
    char name[32];
    trial_result one;
    judge_job job = job_of(g, STAGE_PERFORMANCE, a);
    job.hidden_seed = seed + 0xd1342543de82ef95u * processes;
    job.swapped = processes % 2 == 0;
    job.blocks = INTERLEAVE_BLOCKS_SEARCH;
    job.budget_s = 20.0;
    job.thorough = true;
    snprintf(name, sizeof name, "confirm_performance%d", (int)processes);
    if (processes == 0) {
        judge_performance(g, a, result, &job, name);
        return;
    }
    trial_result_init(&one);
    judge_performance(g, a, &one, &job, name);
    result->gate_s[GATE_PERFORMANCE] += one.gate_s[GATE_PERFORMANCE];
    if (one.status != TRIAL_VALID) {
        result->gate = one.gate;
        fail_trial(result, one.status, one.detail);
    } else {
        bool done = append_timings(result, &one, processes);
        for (size_t i = 0; i < result->timing_count && done; ++i) {
            done = summarise(&result->timings[i], processes + 1, g->noise_floor);
        }
        if (!done || !compare_overall(g, result, processes + 1, NULL)) {
            fail_trial(result, TRIAL_HARNESS_FAILED, "the processes of a confirmation do not fit together");
        }
    }
    trial_result_free(&one);
}

void gates_confirm(gates *g, const artefact *a, int round, trial_result *result)
{
    trial_result_init(result);
    memcpy(result->identity, a->identity, sizeof result->identity);
    const uint64_t seed = g->setup.hidden_seed + 0x9e3779b97f4a7c15u * (uint64_t)(1 + round);
    judge_job job = job_of(g, STAGE_CORRECTNESS, a);
    job.hidden_seed = seed;
    judge_correctness(g, a, result, &job, "confirm_correctness");
    for (size_t processes = 0; processes < GATES_CONFIRM_PROCESSES && result->status == TRIAL_VALID; ++processes) {
        confirm_once(g, a, seed, processes, result);
    }
    if (result->status == TRIAL_VALID && result->overall.verdict != STATS_FASTER) {
        char detail[160];
        snprintf(detail, sizeof detail, "speed-up %.3f, 95 %% interval %.3f - %.3f: %s", result->overall.speedup,
                 result->overall.ci95.low, result->overall.ci95.high, stats_verdict_text(result->overall.verdict));
        fail_trial(result, TRIAL_UNCONFIRMED, detail);
    }
    if (result->status == TRIAL_VALID || result->status == TRIAL_UNCONFIRMED) {
        result->gate = GATE_CONFIRMATION;
    }
    result->gate_s[GATE_CONFIRMATION] = result->gate_s[GATE_CORRECTNESS] + result->gate_s[GATE_PERFORMANCE];
}

void gates_profile(gates_profiled *out, gates *g, const artefact *a, size_t problem, const char *const *profiler,
                   double timeout_s)
{
    trial_result *result = &out->result;
    a = a ? a : g->incumbent;
    *out = (gates_profiled){.outcome = {.end = PROCESS_EXITED, .code = -1}};
    trial_result_init(result);
    result->gate = GATE_PROFILE;
    if (!a || a->backend != ACR__CUDA) {
        fail_trial(result, TRIAL_HARNESS_FAILED,
                   a ? "a CPU kernel is not run outside of its sandbox to be profiled" : "there is no incumbent");
        return;
    }
    const double start_s = monotonic_s();
    judge_job job = job_of(g, STAGE_PROFILE, a);
    job.problems = g->problems + problem;
    job.problem_count = 1;
    job.references = 0; /* a profiler need not hand descriptors on */
    json_t *answer = ask_wrapped_child(g, &job, a->folder, "profile", profiler, timeout_s, &out->outcome, result);
    if (answer) {
        read_end(result, answer);
        json_decref(answer);
    }
    if (result->status != TRIAL_VALID) { /* it has passed the gates: whatever fails now is not its doing */
        result->status = TRIAL_HARNESS_FAILED;
    }
    (void)file_path(out->log, a->folder, "profile", ".log");
    result->gate_s[GATE_PROFILE] = monotonic_s() - start_s;
}

void gates_control(gates *g, trial_result *result)
{
    enum {
        TRIES = 4
    };
    judge_job job = job_of(g, STAGE_PERFORMANCE, g->incumbent);
    char name[32]; /* of the device: several have one folder of the incumbent */
    snprintf(name, sizeof name, "control%d", g->launcher ? g->setup.worker : (int)g->setup.device);
    trial_result_init(result);
    judge_performance(g, g->incumbent, result, &job, name);
    /* The incumbent is right: what it falls below was measured on a machine busy with something else. */
    for (int i = 1; i < TRIES && result->status == TRIAL_IMPLAUSIBLE && g->device.backend == ACR__CPU; ++i) {
        if (find_floors(g) != ACR_OK) {
            fail_trial(result, TRIAL_HARNESS_FAILED, acr_last_error());
            return;
        }
        trial_result_free(result);
        judge_performance(g, g->incumbent, result, &job, name);
    }
    if (result->status == TRIAL_VALID) {
        compare_overall(g, result, 1, &g->noise_floor);
    }
}

void gates_share_control(gates *g, const gates *from)
{
    g->noise_floor = from->noise_floor;
}

/* ---- The child ---- */

bool gates_child(int argc, char **argv, int *exit_code)
{
    if (argc != 4 || strcmp(argv[1], GATES_CHILD) != 0) {
        return false;
    }
    *exit_code = judge_run(argv[2], argv[3]);
    return true;
}
