/* The retrospect, see evolve_retrospect.h. */
#include "evolve_retrospect.h"

#include <dlfcn.h>
#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/exit_code.h"
#include "base/files.h"
#include "base/json.h"
#include "base/parallel.h"
#include "bench/stats.h"
#include "search/build.h"
#include "search/fold.h"
#include "search/retrospect.h"
#include "search/tree.h"

enum {
    SEEDS = 20,
    POINTS_MAX = 20000,
    COMPILE_LIMIT_S = 60
};

/* ---- A family's costs ---- */

typedef struct oracle {
    const retrospect_request *request;
    char folder[PATH_MAX], common[PATH_MAX + 16];
    build_tools tools;
    const acr_problem *problem;
    retrospect_table *table;
    double *seconds;
    char failure[300]; /* of any compilation; "" = none */
} oracle;

static acr_status make_folder(oracle *o)
{
    const char *tmp = getenv("TMPDIR");
    const char *cc = getenv("CC");
    snprintf(o->folder, sizeof o->folder, "%s/acromion-retrospect-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(o->folder)) {
        o->folder[0] = '\0';
        return acr__fail(ACR_IO, "no temporary folder: %s", strerror(errno));
    }
    o->tools = (build_tools){.cc = cc && *cc ? cc : "cc",
                             .nvcc = "",
                             .source_root = o->request->tree,
                             .device = &o->request->gpu->device,
                             .timeout_s = COMPILE_LIMIT_S,
                             .stop = o->request->stop};
    trial_result result;
    trial_result_init(&result);
    const bool done = build_common(o->folder, &o->tools, &result);
    acr_status status = done ? ACR_OK : acr__fail(ACR_IO, "what the families share: %.300s", result.detail);
    trial_result_free(&result);
    snprintf(o->common, sizeof o->common, "%s/common.so", o->folder);
    o->tools.common = o->common;
    return status;
}

static double ask_cost(const artefact *a, const acr_problem *problem, const acr__device *device)
{
    void *handle = NULL;
    const acr__kernel *kernel = NULL;
    double seconds = NAN;
    if (build_describe_open(&handle, &kernel, a) == ACR_OK) {
        seconds = acr__why_not(kernel, problem, device) ? NAN : kernel->cost(problem, device);
    }
    if (handle) {
        dlclose(handle);
    }
    return seconds;
}

static void ask_point(void *arg, int64_t index)
{
    oracle *o = arg;
    const genome *g = &o->table->points[index];
    const space *s = &o->table->spaces->items[g->space];
    char parameters[SPACE_PARAMETERS_MAX];
    candidate c;
    artefact a = {.backend = ACR__CUDA};
    trial_result result;
    o->seconds[index] = NAN;
    space_parameters(s, g, parameters);
    snprintf(a.folder, sizeof a.folder, "%.400s/%lld", o->folder, (long long)index);
    if (*o->request->stop || candidate_of_family(&c, s->family, s->archs[g->arch], parameters) != ACR_OK) {
        return;
    }
    trial_result_init(&result);
    if (mkdir(a.folder, 0700) == 0 && build_describe(&a, &o->tools, &c, &result)) {
        o->seconds[index] = ask_cost(&a, o->problem, o->tools.device);
    } else if (result.status == TRIAL_HARNESS_FAILED) { /* a set that is refused is a trial that is not valid */
        snprintf(o->failure, sizeof o->failure, "%.299s", result.detail);
    }
    folder_remove(a.folder);
    trial_result_free(&result);
    candidate_free(&c);
}

/* ---- Tables ---- */

static bool add_point(void *arg, const genome *g)
{
    retrospect_table *t = arg;
    t->points[t->count++] = *g;
    return t->count < POINTS_MAX;
}

static acr_status allocate_table(retrospect_table *t, const space_list *spaces, size_t count)
{
    *t = (retrospect_table){.spaces = spaces,
                            .points = calloc(count, sizeof *t->points),
                            .speedups = calloc(count, sizeof *t->speedups),
                            .start = SIZE_MAX};
    return t->points && t->speedups ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for a table");
}

static void free_table(retrospect_table *t)
{
    free(t->points);
    free(t->speedups);
    *t = (retrospect_table){.points = NULL};
}

static size_t find_point(const retrospect_table *t, const genome *g)
{
    for (size_t i = 0; i < t->count; ++i) {
        if (genome_same(t->spaces, &t->points[i], g)) {
            return i;
        }
    }
    return SIZE_MAX;
}

static double best_of(const retrospect_table *t)
{
    double best = 0.0;
    for (size_t i = 0; i < t->count; ++i) {
        best = isfinite(t->speedups[i]) ? fmax(best, t->speedups[i]) : best;
    }
    return best;
}

/* ---- A win ---- */

typedef struct row {
    char what[200], problem[ACR_PROBLEM_TEXT_MAX], family[SPACE_NAME_MAX];
    char refusal[SPACE_REASON_MAX + 32]; /* why the space does not hold it; "" = it does */
    size_t points;
    double start_us, goal, best; /* goal and best: speed-ups over the start */
    bool seen;                   /* the clock tells the winner from the start: there is something to find */
    bool closed;                 /* recorded: no moves */
    retrospect_found found[RETROSPECT_WAYS];
} row;

/* Where a set of the win lies in the table; SIZE_MAX after saying in row->refusal why it does not. */
static size_t place_set(row *r, const retrospect_table *t, const retrospect_win *win, const char *which,
                        const char *parameters)
{
    char full[SPACE_PARAMETERS_MAX], reason[SPACE_REASON_MAX];
    genome g = {.space = 0};
    const space *s = &t->spaces->items[0];
    snprintf(full, sizeof full, "%s %s", parameters, s->fixed);
    if (!space_point(s, win->arch, full, &g, reason) || !space_legal(s, &g, reason)) {
        snprintf(r->refusal, sizeof r->refusal, "%s: %s", which, reason);
        return SIZE_MAX;
    }
    const size_t at = find_point(t, &g);
    if (at == SIZE_MAX) {
        snprintf(r->refusal, sizeof r->refusal, "%s: not among the first %d points", which, POINTS_MAX);
    }
    return at;
}

static acr_status fill_table(oracle *o, row *r, const retrospect_win *win, const space_list *spaces,
                             retrospect_table *t)
{
    acr_status status = allocate_table(t, spaces, POINTS_MAX);
    if (status != ACR_OK) {
        return status;
    }
    genome_count(spaces, POINTS_MAX, add_point, t);
    const size_t before = place_set(r, t, win, "before", win->before);
    const size_t after = before == SIZE_MAX ? SIZE_MAX : place_set(r, t, win, "after", win->after);
    r->points = t->count;
    if (after == SIZE_MAX) {
        return ACR_OK;
    }
    o->table = t;
    o->seconds = t->speedups;
    parallel_for(o->request->threads, (int64_t)t->count, ask_point, o);
    if (o->failure[0] || *o->request->stop) {
        return acr__fail(ACR_IO, "%s", o->failure[0] ? o->failure : "interrupted");
    }
    const double start_s = t->speedups[before];
    for (size_t i = 0; i < t->count; ++i) {
        t->speedups[i] = start_s / t->speedups[i];
    }
    t->start = before;
    r->start_us = 1e6 * start_s;
    r->goal = t->speedups[after];
    t->goal = r->goal * 0.9999; /* the same time by another sum is the same time */
    r->best = best_of(t);
    r->seen = isfinite(r->goal) && r->goal > 1.001;
    return ACR_OK;
}

static acr_status search_table(row *r, const retrospect_table *t, const retrospect_request *request)
{
    const retrospect_setup setup = {SEEDS, request->trials, request->generation};
    acr_status status = ACR_OK;
    for (int way = 0; way < RETROSPECT_WAYS && status == ACR_OK; ++way) {
        if (way != RETROSPECT_MOVES || !t->closed) {
            status = retrospect_search(&r->found[way], t, &setup, (retrospect_way)way);
        }
    }
    return status;
}

static acr_status look_back(row *r, oracle *o, const retrospect_win *win)
{
    acr_problem problem;
    snprintf(r->what, sizeof r->what, "%s", win->what);
    snprintf(r->problem, sizeof r->problem, "%s", win->problem);
    snprintf(r->family, sizeof r->family, "%s", win->family);
    acr_status status = acr_problem_parse(&problem, win->problem, NULL);
    if (status == ACR_OK) {
        status = acr_problem_canonical(&problem, &problem);
    }
    const search_scene scene = {&problem, 1, &o->request->gpu->device};
    space_list *spaces = calloc(1, sizeof *spaces);
    retrospect_table t = {.points = NULL};
    status = status == ACR_OK && !spaces ? acr__fail(ACR_NO_MEMORY, "no memory for the spaces") : status;
    if (status == ACR_OK) {
        status = tree_spaces(spaces, o->request->tree, &scene, win->family);
    }
    if (status == ACR_OK) {
        o->problem = &problem;
        status = fill_table(o, r, win, spaces, &t);
    }
    if (status == ACR_OK && r->seen) {
        status = search_table(r, &t, o->request);
    }
    free_table(&t);
    free(spaces);
    return status;
}

/* ---- A recorded run ---- */

static const char *text_of(const json_t *json, const char *key)
{
    const char *text = json_string_value(json_object_get(json, key));
    return text ? text : "";
}

/* The trials of both arms that were timed, each point once. */
static void take_recorded(retrospect_table *t, const json_t *trials)
{
    size_t i;
    json_t *trial;
    json_array_foreach(trials, i, trial)
    {
        genome g;
        const double speedup = json_number_value(json_object_get(trial, "speedup"));
        if (strcmp(text_of(trial, "status"), "valid") == 0 && speedup > 0.0 && t->count < POINTS_MAX &&
            fold_point(t->spaces, text_of(trial, "family"), text_of(trial, "arch"), text_of(trial, "parameters"), &g) &&
            find_point(t, &g) == SIZE_MAX) {
            t->points[t->count] = g;
            t->speedups[t->count++] = speedup;
        }
    }
}

/* A file of one JSON object a line. */
static json_t *read_lines(const char *path)
{
    FILE *file = fopen(path, "r");
    json_t *trials = file ? json_array() : NULL;
    for (json_t *trial; file && (trial = json_loadf(file, JSON_DISABLE_EOF_CHECK, NULL)) != NULL;) {
        json_array_append_new(trials, trial);
    }
    if (file) {
        fclose(file);
    }
    return trials;
}

/* The problem of a run's first timed trial: those of a search share what a space asks of them, or nearly. */
static const char *recorded_problem(const json_t *trials)
{
    size_t i;
    json_t *trial;
    json_array_foreach(trials, i, trial)
    {
        const json_t *timing = json_array_get(json_object_get(trial, "timings"), 0);
        if (timing) {
            return text_of(timing, "problem");
        }
    }
    return "";
}

static acr_status look_at_record(row *r, const retrospect_request *request, const char *path)
{
    static const double NEAR = 0.99;
    acr_problem problem;
    json_t *trials = read_lines(path);
    space_list *spaces = calloc(1, sizeof *spaces);
    retrospect_table t = {.points = NULL};
    const search_scene scene = {&problem, 1, &request->gpu->device};
    const char *name = strrchr(path, '/');
    snprintf(r->what, sizeof r->what, "%.190s", name ? name + 1 : path);
    snprintf(r->family, sizeof r->family, "recorded");
    snprintf(r->problem, sizeof r->problem, "%.150s", trials ? recorded_problem(trials) : "");
    acr_status status = !trials || !r->problem[0]
                            ? acr__fail(ACR_FORMAT, "%s: no timed trials of `trials export`", path)
                        : !spaces ? acr__fail(ACR_NO_MEMORY, "no memory for the spaces")
                                  : acr_problem_parse(&problem, r->problem, NULL);
    if (status == ACR_OK) {
        status = acr_problem_canonical(&problem, &problem);
    }
    if (status == ACR_OK) {
        status = tree_spaces(spaces, request->tree, &scene, NULL);
    }
    if (status == ACR_OK) {
        status = allocate_table(&t, spaces, POINTS_MAX);
    }
    if (status == ACR_OK) {
        take_recorded(&t, trials);
        t.closed = r->closed = true;
        r->points = t.count;
        r->best = best_of(&t);
        r->goal = t.goal = NEAR * r->best;
        r->seen = t.count > 0;
        status = t.count > 0 ? search_table(r, &t, request) : ACR_OK;
    }
    free_table(&t);
    free(spaces);
    json_decref(trials);
    return status;
}

/* ---- Telling ---- */

static void print_trials(const row *r, retrospect_way way, int trials)
{
    const retrospect_found *f = &r->found[way];
    if (way == RETROSPECT_MOVES && r->closed) {
        printf(" %16s", "-");
        return;
    }
    const double middle = stats_percentile(f->trials, (size_t)f->seeds, 0.5);
    char text[32], count[12];
    snprintf(text, sizeof text, middle > trials ? ">%.0f" : "%.0f", middle > trials ? trials : middle);
    snprintf(count, sizeof count, "(%d/%d)", f->found, f->seeds);
    printf(" %8s %7s", text, count);
}

static void print_rows(const row *rows, size_t count, int trials)
{
    printf("Trials until a point as fast as the winner, by the clock: median of %d seeds, budget %d "
           "(found in so many)\n",
           SEEDS, trials);
    printf("%-10s %7s %7s %7s %16s %16s %16s  %s\n", "family", "points", "winner", "best", "random", "moves",
           "surrogate", "problem: what was found");
    for (size_t i = 0; i < count; ++i) {
        const row *r = &rows[i];
        if (r->refusal[0]) {
            printf("%-10s not in the space: %s  %s: %s\n", r->family, r->refusal, r->problem, r->what);
            continue;
        }
        printf("%-10s %7zu %7.3f %7.3f", r->family, r->points, r->goal, r->best);
        for (int way = 0; way < RETROSPECT_WAYS && r->seen; ++way) {
            print_trials(r, (retrospect_way)way, trials);
        }
        printf("%s  %s: %s\n", r->seen ? "" : "  in the space; the clock does not see it   ", r->problem, r->what);
    }
}

/* A seed's mean over the rows of log(best of one way / best of another). */
static stats_interval against(double *middle, const row *rows, size_t count, retrospect_way way, retrospect_way other,
                              int mark, bool closed)
{
    double ratios[SEEDS] = {0.0};
    size_t used = 0;
    for (size_t i = 0; i < count; ++i) {
        const row *r = &rows[i];
        if (!r->seen || r->refusal[0] || r->closed != closed) {
            continue;
        }
        ++used;
        for (int seed = 0; seed < SEEDS; ++seed) {
            ratios[seed] += log(r->found[way].best[seed][mark] / r->found[other].best[seed][mark]);
        }
    }
    for (int seed = 0; seed < SEEDS; ++seed) {
        ratios[seed] = used > 0 ? exp(ratios[seed] / (double)used) : NAN;
    }
    *middle = stats_percentile(ratios, SEEDS, 0.5);
    return stats_percentile_interval(ratios, SEEDS, 0.5);
}

typedef struct contest {
    retrospect_way way, other;
    bool closed;
} contest;
static const contest contests[] = {{RETROSPECT_MOVES, RETROSPECT_RANDOM, false},
                                   {RETROSPECT_SURROGATE, RETROSPECT_RANDOM, false},
                                   {RETROSPECT_SURROGATE, RETROSPECT_MOVES, false},
                                   {RETROSPECT_SURROGATE, RETROSPECT_RANDOM, true}};

static bool has_rows(const row *rows, size_t count, bool closed)
{
    for (size_t i = 0; i < count; ++i) {
        if (rows[i].seen && rows[i].closed == closed) {
            return true;
        }
    }
    return false;
}

static void print_contests(const row *rows, size_t count, int trials)
{
    printf("\nBest so far, one way to another: mean over rows, median over seeds, 95 %% interval\n");
    for (size_t i = 0; i < sizeof contests / sizeof contests[0]; ++i) {
        const contest *c = &contests[i];
        for (int mark = 0; mark < RETROSPECT_MARKS && has_rows(rows, count, c->closed); ++mark) {
            double middle;
            const stats_interval interval = against(&middle, rows, count, c->way, c->other, mark, c->closed);
            printf("%-9s to %-7s %-8s after %3d trials: %.4f, %.4f - %.4f\n", retrospect_way_name(c->way),
                   retrospect_way_name(c->other), c->closed ? "recorded" : "model",
                   (mark + 1) * trials / RETROSPECT_MARKS, middle, interval.low, interval.high);
        }
    }
}

static json_t *found_json(const retrospect_found *f)
{
    json_t *trials = json_array(), *best = json_array();
    for (int seed = 0; seed < f->seeds; ++seed) {
        json_t *marks = json_array();
        json_array_append_new(trials, json_real(f->trials[seed]));
        for (int mark = 0; mark < RETROSPECT_MARKS; ++mark) {
            json_array_append_new(marks, json_real(f->best[seed][mark]));
        }
        json_array_append_new(best, marks);
    }
    return json_pack("{s:i, s:o, s:o}", "found", f->found, "trials", trials, "best", best);
}

static json_t *rows_json(const row *rows, size_t count)
{
    json_t *list = json_array();
    for (size_t i = 0; i < count; ++i) {
        const row *r = &rows[i];
        json_t *object =
            json_pack("{s:s, s:s, s:s, s:s, s:I, s:o, s:o, s:o, s:b}", "what", r->what, "problem", r->problem, "family",
                      r->family, "refusal", r->refusal, "points", (json_int_t)r->points, "before_us",
                      json_number_or_null(r->start_us), "winner", json_number_or_null(r->goal), "best",
                      json_number_or_null(r->best), "seen", (int)r->seen);
        for (int way = 0; way < RETROSPECT_WAYS && r->seen; ++way) {
            if (r->found[way].seeds > 0) {
                json_object_set_new(object, retrospect_way_name((retrospect_way)way), found_json(&r->found[way]));
            }
        }
        json_array_append_new(list, object);
    }
    return list;
}

int evolve_retrospect(const retrospect_request *request)
{
    const size_t most = retrospect_win_count + (size_t)request->recorded_count;
    row *rows = calloc(most, sizeof *rows);
    oracle *o = calloc(1, sizeof *o);
    size_t count = 0;
    acr_status status = rows && o ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for a retrospect");
    if (status == ACR_OK) {
        o->request = request;
        status = make_folder(o);
    }
    for (size_t i = 0; i < retrospect_win_count && status == ACR_OK && *request->stop == 0; ++i) {
        const retrospect_win *win = &retrospect_wins[i];
        if (!request->only[0] || fnmatch(request->only, win->family, 0) == 0) {
            fprintf(stderr, "acromion evolve: retrospect: %s: %s\n", win->family, win->what);
            status = look_back(&rows[count++], o, win);
        }
    }
    for (int i = 0; i < request->recorded_count && status == ACR_OK && *request->stop == 0; ++i) {
        status = look_at_record(&rows[count++], request, request->recorded[i]);
    }
    int exit_code = status == ACR_OK ? EXIT_DONE : report_failure(status, "retrospect");
    if (exit_code == EXIT_DONE && request->common->json) {
        json_print(rows_json(rows, count));
    } else if (exit_code == EXIT_DONE) {
        print_rows(rows, count, request->trials);
        print_contests(rows, count, request->trials);
    }
    if (o && o->folder[0]) {
        folder_remove(o->folder);
    }
    free(o);
    free(rows);
    return exit_code;
}
