/* The survey, see evolve_survey.h. */
#include "evolve_survey.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/exit_code.h"
#include "base/json.h"
#include "base/process.h"
#include "base/progress.h"
#include "base/text.h"
#include "commands/commands.h"
#include "machine/device_lock.h"
#include "machine/roofline.h"
#include "search/survey.h"

enum {
    SHOWN = 10,
    SLICE_LEAST_S = 5 /* a search that has less time than this begins nothing */
};

/* ---- What is known of a problem ---- */

/* A CPU's caches are measured, once for all problems of one size: a factor of eight. */
static void cpu_machine(machine *out, const acr__device *device, double bytes)
{
    enum {
        SIZES = 16
    };
    static machine known[SIZES];
    static bool is_known[SIZES];
    const double size = fmin(fmax(floor(log2(fmax(bytes, 1.0)) / 3.0), 0.0), SIZES - 1);
    const int i = (int)size;
    if (!is_known[i]) {
        machine_of_cpu(&known[i], device, (uint32_t)device->threads, exp2(3.0 * size + 1.5));
        is_known[i] = true;
    }
    *out = known[i];
}

static void describe(survey_item *item, const acr__device *device)
{
    machine m;
    floor_times f;
    const problem_work work = work_of(&item->problem, NULL);
    const acr__kernel *kernel = acr__choose(&item->problem, device);
    if (device->backend == ACR__CUDA) {
        machine_of_gpu(&m, device);
    } else {
        cpu_machine(&m, device, work.bytes);
    }
    floor_of(&f, &m, &item->problem, &work);
    item->attainable_us = 1e6 * (m.launch_s + f.warm_s / SURVEY_SUSTAINED);
    item->time_us = kernel ? 1e6 * kernel->cost(&item->problem, device) : NAN;
    item->peer_us = item->planned_us = NAN;
    snprintf(item->kernel, sizeof item->kernel, "%s", kernel ? kernel->name : "");
    snprintf(item->planned, sizeof item->planned, "%s", item->kernel);
}

static int make_items(survey_item **items, size_t *count, const survey_request *r, const acr__device *device)
{
    problem_list problems;
    const bool own = r->problem_count > 0;
    char **texts = own ? r->problems : (char **)(uintptr_t)survey_grid;
    int exit_code = problems_parse(texts, own ? r->problem_count : (int)survey_grid_count, &problems);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    *count = problems.count;
    *items = calloc(problems.count + 1, sizeof **items);
    for (size_t i = 0; *items && i < problems.count; ++i) {
        survey_item *item = &(*items)[i];
        item->problem = problems.items[i];
        item->ranked = true;
        acr_problem_format(&item->problem, item->text, sizeof item->text);
        describe(item, device);
    }
    problems_free(&problems);
    return *items ? EXIT_DONE : report_failure(acr__fail(ACR_NO_MEMORY, "no memory for a survey"), "survey");
}

/* The kernels that the cost models like best, side by side in streams of launches: a few hundredths of a second a
 * problem. What cannot be measured keeps its estimate. */
static void measure_item(survey_item *item, acr_ctx *ctx)
{
    enum {
        TIMED = 6
    };
    acr__surveyed seen[TIMED];
    int count = 0;
    if (acr__survey(seen, TIMED, &count, ctx, &item->problem) != ACR_OK) {
        fprintf(stderr, "acromion evolve: survey: %s: not measured: %s\n", item->text, acr_last_error());
        return;
    }
    for (int i = 0; i < count; ++i) {
        const double us = 1e6 * seen[i].median_s;
        if (strcmp(seen[i].kernel->name, item->planned) == 0) {
            item->planned_us = us;
        }
        if (!item->measured || us < item->time_us) {
            item->measured = true;
            item->time_us = us;
            snprintf(item->kernel, sizeof item->kernel, "%s", seen[i].kernel->name);
        }
    }
}

/* In the order of expectation, so that a time that ends too early is spent where it counts. */
static void measure_items(survey_item *items, size_t count, const survey_request *r, acr_ctx *ctx)
{
    int lock = -1;
    if (device_lock(&lock, acr__ctx_backend_device(ctx)->backend->name, r->common->device, r->stop) != ACR_OK) {
        fprintf(stderr, "acromion evolve: survey: nothing is measured: %s\n", acr_last_error());
        return;
    }
    const double start_s = monotonic_s();
    survey_rank(items, count);
    for (size_t i = 0; i < count && *r->stop == 0; ++i) {
        if (monotonic_s() - start_s > r->measure_s) {
            fprintf(stderr, "acromion evolve: survey: %zu of %zu problems are measured, the time is up\n", i, count);
            break;
        }
        if (items[i].kernel[0]) {
            measure_item(&items[i], ctx);
        }
    }
    device_unlock(lock);
}

static int take_results(survey_item **items, size_t *count, const char *path, const acr__device *device)
{
    machine m = {.launch_s = 0.0};
    json_error_t error;
    json_t *records = json_load_file(path, 0, &error);
    if (!json_is_array(records)) {
        fprintf(stderr, "acromion evolve: %s: %s\n", path, records ? "no array of bench records" : error.text);
        json_decref(records);
        return EXIT_BAD_INPUT;
    }
    if (device->backend == ACR__CUDA) {
        machine_of_gpu(&m, device);
    }
    acr_status status = survey_take_records(items, count, records, device->name, 1e6 * m.launch_s);
    json_decref(records);
    return status == ACR_OK ? EXIT_DONE : report_failure(status, path);
}

/* ---- Telling ---- */

static size_t ranked_count(const survey_item *items, size_t count)
{
    size_t ranked = 0;
    while (ranked < count && items[ranked].ranked) {
        ++ranked;
    }
    return ranked;
}

static const char *ratio_text(char out[16], double ratio)
{
    snprintf(out, 16, isfinite(ratio) ? "%.2f" : "-", ratio);
    return out;
}

static void print_items(const survey_item *items, size_t ranked, const survey_request *r, const acr__device *device)
{
    const size_t shown = r->all || ranked < SHOWN ? ranked : SHOWN;
    printf(
        "expected gain on %s; our time to what is attainable (roofline), to what neighbours reach, to the best peer\n",
        device->name);
    printf("%4s %6s %-11s %9s %9s %10s %6s  %s\n", "rank", "gain", "because of", "time us", "roofline", "neighbours",
           "peer", "problem");
    for (size_t i = 0; i < shown; ++i) {
        const survey_item *s = &items[i];
        char us[24], roofline[16], neighbours[16], peer[16];
        if (isfinite(s->time_us)) {
            printf("%4zu %6.2f %-11s %8s%c %9s %10s %6s  %s\n", i + 1, s->gain, survey_reason_text(s->reason),
                   us_text(us, s->time_us), s->measured ? ' ' : '~', ratio_text(roofline, s->to_roofline),
                   ratio_text(neighbours, s->to_neighbours), ratio_text(peer, s->to_peer), s->text);
        } else {
            printf("%4zu %6s %-11s %9s %9s %10s %6s  %s: no kernel runs it\n", i + 1, "-", "", "-", "-", "-", "-",
                   s->text);
        }
    }
    printf("~ by the cost model: what it does not know is not seen%s\n",
           shown < ranked ? "; --all lists the others" : "");
}

static json_t *items_json(const survey_item *items, size_t ranked)
{
    json_t *list = json_array();
    for (size_t i = 0; i < ranked; ++i) {
        const survey_item *s = &items[i];
        json_array_append_new(list, json_pack("{s:I, s:s, s:f, s:s, s:s, s:o, s:b, s:o, s:o, s:o, s:o, s:s, s:s, s:o}",
                                              "rank", (json_int_t)i + 1, "problem", s->text, "gain", s->gain, "reason",
                                              survey_reason_text(s->reason), "kernel", s->kernel, "time_us",
                                              json_number_or_null(s->time_us), "measured", (int)s->measured,
                                              "attainable_us", json_number_or_null(s->attainable_us), "to_roofline",
                                              json_number_or_null(s->to_roofline), "to_neighbours",
                                              json_number_or_null(s->to_neighbours), "to_peer",
                                              json_number_or_null(s->to_peer), "peer", s->peer, "planned", s->planned,
                                              "planned_us", json_number_or_null(s->planned_us)));
    }
    return list;
}

/* ---- Spending ---- */

/* Options of the survey itself; true where the next word is the option's value. */
static bool is_own(const char *word, bool *has_value)
{
    static const struct {
        const char *name;
        bool value;
    } own[] = {{"--survey", false}, {"--all", false}, {"--json", false}, {"--gpu", true}, {"--results", true},
               {"--measure", true}, {"--top", true},  {"--into", true},  {"--time", true}};
    for (size_t i = 0; i < sizeof own / sizeof own[0]; ++i) {
        const size_t length = strlen(own[i].name);
        if (strncmp(word, own[i].name, length) == 0 && (word[length] == '\0' || word[length] == '=')) {
            *has_value = own[i].value && word[length] == '\0';
            return true;
        }
    }
    return false;
}

static void store_path(char *out, size_t capacity, const char *folder, const char *problem)
{
    int at = snprintf(out, capacity, "%s/", folder);
    for (const char *c = problem; *c && at > 0 && (size_t)at + 4 < capacity; ++c) {
        out[at++] = (char)(*c == ':' ? '-' : *c == '/' ? '_' : *c);
    }
    snprintf(out + at, capacity - (size_t)at, ".db");
}

/* One search as a process of its own, whose output is this one's. Returns its exit code, -1 when it did not end by
 * itself. */
static int search_one(const survey_request *r, const survey_item *item, double slice_s)
{
    enum {
        WORDS_MAX = 96,
        LIMIT_S = 1000000 /* it ends by itself */
    };
    char store[1024], text[ACR_PROBLEM_TEXT_MAX], slice[32];
    const char *argv[WORDS_MAX + 8] = {"/proc/self/exe", "evolve", "--time", slice, "--store", store};
    int words = 6;
    bool has_value = false;
    store_path(store, sizeof store, r->into, item->text);
    snprintf(slice, sizeof slice, "%.3fs", slice_s);
    snprintf(text, sizeof text, "%s", item->text);
    const bool again = access(store, F_OK) == 0;
    if (again) { /* a run's own options are in its store */
        argv[words++] = "--resume";
    }
    for (int i = 0; !again && i < r->option_count && words < WORDS_MAX; ++i) {
        if (!is_own(r->options[i], &has_value)) {
            argv[words++] = r->options[i];
        } else if (has_value) {
            ++i;
        }
    }
    if (!again) {
        argv[words++] = text;
    }
    argv[words] = NULL;
    fprintf(stderr, "acromion evolve: survey: %s for %.0f s, expected gain %.2f, %s\n", item->text, slice_s, item->gain,
            store);
    fflush(stdout);
    pid_t pid;
    process_outcome outcome;
    const process_limits limits = {.wall_s = LIMIT_S};
    if (process_start(&pid, argv, NULL, (const int[]){STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}, &limits) != ACR_OK) {
        report_failure(ACR_IO, "survey");
        return -1;
    }
    *r->searching = pid;
    process_wait(&outcome, pid, INFINITY, r->stop);
    *r->searching = 0;
    return outcome.end == PROCESS_EXITED ? outcome.code : -1;
}

/* By rank, the rest of the time shared by the gains that are still expected: what a search leaves is the next ones'. */
static int spend(const survey_item *items, size_t ranked, const survey_request *r)
{
    const double start_s = monotonic_s();
    const size_t top = ranked < (size_t)r->top ? ranked : (size_t)r->top;
    int worst = EXIT_DONE;
    if (mkdir(r->into, 0777) != 0 && errno != EEXIST) {
        fprintf(stderr, "acromion evolve: --into: %s: %s\n", r->into, strerror(errno));
        return EXIT_FILE;
    }
    for (size_t i = 0; i < top && items[i].gain > 1.0 && *r->stop == 0; ++i) {
        const double slice_s = survey_share(items + i, top - i, r->time_s - (monotonic_s() - start_s));
        if (slice_s < SLICE_LEAST_S) {
            fprintf(stderr, "acromion evolve: survey: no time is left for rank %zu and later\n", i + 1);
            return EXIT_UNFINISHED;
        }
        const int code = search_one(r, &items[i], slice_s);
        if (code != EXIT_DONE && code != EXIT_UNFINISHED) {
            fprintf(stderr, "acromion evolve: survey: %s ended with exit code %d; the next one goes on\n",
                    items[i].text, code);
        }
        worst = code == EXIT_DONE || worst == EXIT_FAILED ? worst : code == EXIT_UNFINISHED ? code : EXIT_FAILED;
    }
    return *r->stop ? EXIT_UNFINISHED : worst;
}

/* ---- All of it ---- */

int evolve_survey(const survey_request *r)
{
    acr_ctx *ctx = NULL;
    survey_item *items = NULL;
    size_t count = 0;
    int exit_code = r->gpu ? EXIT_DONE : context_open(r->common, &ctx);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    const acr__device device = r->gpu ? r->gpu->device : acr__ctx_backend_device(ctx)->device;
    exit_code = make_items(&items, &count, r, &device);
    if (exit_code == EXIT_DONE && r->measure_s > 0.0) {
        measure_items(items, count, r, ctx);
    }
    acr_ctx_destroy(ctx); /* before searches, which time on the same device */
    if (exit_code == EXIT_DONE && r->results) {
        exit_code = take_results(&items, &count, r->results, &device);
    }
    if (exit_code == EXIT_DONE) {
        survey_rank(items, count);
        const size_t ranked = ranked_count(items, count);
        if (r->common->json) {
            json_print(items_json(items, ranked));
        } else {
            print_items(items, ranked, r, &device);
        }
        exit_code = r->into ? spend(items, ranked, r) : EXIT_DONE;
    }
    free(items);
    return exit_code;
}
