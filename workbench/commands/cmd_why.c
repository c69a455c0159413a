/* acromion why: for a problem, which kernel is chosen, and for every other what it would cost, what it takes here (if
 * asked to measure) or why it cannot run. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/exit_code.h"
#include "base/json.h"
#include "base/options.h"
#include "base/progress.h"
#include "base/text.h"
#include "commands.h"
#include "internal.h"
#include "kernels/kernel_choice.h"
#include "machine/environment.h"
#include "machine/gpus.h"

enum {
    ID_ALL = OPTION_LONG_ONLY
};

static const option_spec options[OPTIONS_MAX] = {
    {ID_ALL, "all", NULL, "every kernel on a line of its own; without it the choice, the next best, and reasons"},
    {'g', "gpu", "NAME", "ask for a GPU that is not here: l4 a100 h100 h200 ... (`acromion roofline --gpu help`)"},
    {'w', "wisdom", "FILE", "use the measured choices of this file"},
    {'m', "measure", NULL,
     "time every kernel that could be chosen, side by side, in scratch memory, and list only those"},
};

typedef struct request {
    const gpu_model *gpu;
    const char *wisdom;
    bool measure, all;
} request;

static const option_field fields[] = {
    {ID_ALL, OPTION_FLAG, offsetof(request, all)},
    {'w', OPTION_TEXT, offsetof(request, wisdom)},
    {'m', OPTION_FLAG, offsetof(request, measure)},
    {0},
};

static const command_spec spec = {
    .usage = "why [PROBLEM...]",
    .examples = "  acromion why b2:h8:s512:d64\n"
                "  acromion why bf16:b8:h32/8:s2048:d128:causal --gpu l4\n"
                "  acromion why --measure --json $(cat tools/planner_grid.txt)\n",
    .about = "Says which kernel is chosen for a problem, which others could run it and what they would take by\n"
             "estimate, and why the rest cannot: the most common reasons, or with --all each kernel's.\n"
             "A malformed problem is an error (exit code 3), a problem that no kernel can run another (4).\n",
    .options = options,
    .fields = fields,
    .common = COMMON_DEVICE | COMMON_JSON,
};

static bool take_gpu(void *arg, int id, const char *value)
{
    (void)id;
    return gpu_asked(value, &((request *)arg)->gpu);
}

enum {
    SEEN_MAX = 128
};

/* What is known about a problem before the kernels are gone through. */
typedef struct answer {
    char text[ACR_PROBLEM_TEXT_MAX];
    const char *chosen; /* a kernel's name, NULL = none */
    char plan[1024];    /* the plan's own words, or why there is none */
    acr__surveyed seen[SEEN_MAX];
    int seen_count; /* 0 = not measured */
} answer;

/* On a device that is here the plan itself is asked, so that wisdom counts; for another the estimate. */
static void make_answer(answer *a, const acr_problem *problem, acr_ctx *ctx, const acr__device *device)
{
    acr_problem_format(problem, a->text, sizeof a->text);
    a->chosen = NULL;
    a->seen_count = 0;
    if (!ctx) {
        const acr__kernel *kernel = acr__choose(problem, device);
        a->chosen = kernel ? kernel->name : NULL;
        char estimate[24];
        if (kernel) {
            snprintf(a->plan, sizeof a->plan, "%s (estimate: %s us; the GPU is not here)", kernel->name,
                     us_text(estimate, 1e6 * kernel->cost(problem, device)));
        } else {
            snprintf(a->plan, sizeof a->plan, "no kernel can run this");
        }
        return;
    }
    acr_plan *plan = NULL;
    if (acr_plan_create(&plan, ctx, problem, ACR_ESTIMATE) == ACR_OK) {
        a->chosen = acr_plan_kernel(plan); /* lives as long as the library */
        snprintf(a->plan, sizeof a->plan, "%s", acr_plan_text(plan));
        acr_plan_destroy(plan);
    } else {
        snprintf(a->plan, sizeof a->plan, "%s", acr_last_error());
    }
}

/* Microseconds that a kernel was seen to take; NaN when it was not timed. */
static double seen_us(const answer *a, const acr__kernel *kernel)
{
    for (int i = 0; i < a->seen_count; ++i) {
        if (a->seen[i].kernel == kernel) {
            return 1e6 * a->seen[i].median_s;
        }
    }
    return NAN;
}

/* Whoever measures asks about speed: then only what was timed is listed. */
static bool is_listed(const answer *a, const acr__kernel *kernel)
{
    return a->seen_count == 0 || isfinite(seen_us(a, kernel));
}

/* The kernel that was seen to take the least; NULL when none was timed. */
static const acr__kernel *seen_best(const answer *a)
{
    const acr__surveyed *best = NULL;
    for (int i = 0; i < a->seen_count; ++i) {
        if (!best || a->seen[i].median_s < best->median_s) {
            best = &a->seen[i];
        }
    }
    return best ? best->kernel : NULL;
}

typedef enum kernel_verdict {
    VERDICT_CHOSEN,
    VERDICT_COULD,
    VERDICT_NO
} kernel_verdict;
static const char *const verdict_texts[] = {
    [VERDICT_CHOSEN] = "chosen", [VERDICT_COULD] = "could", [VERDICT_NO] = "no"};

static kernel_verdict judge_kernel(const acr__kernel *kernel, const answer *a, const char *reason)
{
    if (reason) {
        return VERDICT_NO;
    }
    return a->chosen && strcmp(a->chosen, kernel->name) == 0 ? VERDICT_CHOSEN : VERDICT_COULD;
}

static void print_kernel(const acr__kernel *kernel, const answer *a, const acr_problem *problem,
                         const acr__device *device)
{
    const char *reason = acr__why_not(kernel, problem, device);
    const char *verdict = verdict_texts[judge_kernel(kernel, a, reason)];
    if (reason) {
        printf("  %-7s %-44s %s\n", verdict, kernel->name, reason);
    } else {
        char estimate[24], seen[24], measured[64] = "";
        if (isfinite(seen_us(a, kernel))) {
            snprintf(measured, sizeof measured, ", %s us measured%s", us_text(seen, seen_us(a, kernel)),
                     kernel == seen_best(a) ? " (best)" : "");
        }
        printf("  %-7s %-44s %s us estimated%s%s%s\n", verdict, kernel->name,
               us_text(estimate, 1e6 * kernel->cost(problem, device)), measured,
               kernel->traits & ACR__TRAIT_LAST_RESORT ? ", last resort" : "",
               kernel->traits & ACR__TRAIT_NEVER_PLANNED ? ", never planned" : "");
    }
}

static json_t *kernel_answer_json(const acr__kernel *kernel, const answer *a, const acr_problem *problem,
                                  const acr__device *device)
{
    const char *reason = acr__why_not(kernel, problem, device);
    json_t *json =
        json_pack("{s:s, s:s}", "kernel", kernel->name, "verdict", verdict_texts[judge_kernel(kernel, a, reason)]);
    if (reason) {
        json_object_set_new(json, "reason", json_string(reason));
    } else {
        json_object_set_new(json, "estimate_us", json_number_or_null(1e6 * kernel->cost(problem, device)));
    }
    if (kernel_found(kernel->name)) {
        json_object_set_new(json, "found", json_string(kernel_found(kernel->name)));
    }
    if (a->seen_count > 0) {
        char digest[17];
        digest_text(digest, kernel);
        json_object_set_new(json, "image", json_string(digest));
        json_object_set_new(json, "measured_us", json_number_or_null(seen_us(a, kernel)));
    }
    return json;
}

static json_t *answer_json(const answer *a, const acr_problem *problem, const acr__device *device)
{
    json_t *kernels = json_array();
    for (size_t i = 0; i < acr__kernel_count; ++i) {
        if (is_listed(a, acr__kernels[i])) {
            json_array_append_new(kernels, kernel_answer_json(acr__kernels[i], a, problem, device));
        }
    }
    json_t *json = json_pack("{s:s, s:s, s:s?, s:s, s:o}", "problem", a->text, "device", device->name, "chosen",
                             a->chosen, "plan", a->plan, "kernels", kernels);
    if (a->seen_count > 0) {
        environment_add(json, device);
    }
    return json;
}

/* ---- In ten lines ---- */

enum {
    OTHERS_SHOWN = 3,
    REASONS_SHOWN = 2
};

/* A kernel that could run the problem and was not chosen, or kernels that cannot, for one reason. */
typedef struct other_kernel {
    const acr__kernel *kernel;
    double estimate_s;
} other_kernel;
typedef struct shared_reason {
    const char *text;
    int kernels;
} shared_reason;

static int by_estimate(const void *a, const void *b)
{
    const double x = ((const other_kernel *)a)->estimate_s, y = ((const other_kernel *)b)->estimate_s;
    return (x > y) - (x < y);
}

static int by_count(const void *a, const void *b)
{
    return ((const shared_reason *)b)->kernels - ((const shared_reason *)a)->kernels;
}

static void count_reason(shared_reason *reasons, int *count, const char *text)
{
    int i = 0;
    while (i < *count && strcmp(reasons[i].text, text) != 0) {
        ++i;
    }
    if (i == *count) {
        reasons[(*count)++] = (shared_reason){text, 0};
    }
    ++reasons[i].kernels;
}

static void print_others(other_kernel *others, int count)
{
    int shown = 0, never = 0;
    qsort(others, (size_t)count, sizeof *others, by_estimate);
    for (int i = 0; i < count; ++i) {
        char estimate[24];
        if (others[i].kernel->traits & ACR__TRAIT_NEVER_PLANNED) {
            ++never;
        } else if (shown < OTHERS_SHOWN) {
            printf("  could run it: %-44s %s us estimated\n", others[i].kernel->name,
                   us_text(estimate, 1e6 * others[i].estimate_s));
            ++shown;
        }
    }
    if (count > shown) {
        printf("  and %d more could", count - shown);
        printf(never > 0 ? ", %d of them never planned\n" : "\n", never);
    }
}

static void print_reasons(shared_reason *reasons, int count)
{
    int rest = 0, shown = count > REASONS_SHOWN + 1 ? REASONS_SHOWN : count; /* no line for the last alone */
    qsort(reasons, (size_t)count, sizeof *reasons, by_count);
    for (int i = 0; i < shown; ++i) {
        printf("  %d cannot: %s\n", reasons[i].kernels, reasons[i].text);
    }
    for (int i = shown; i < count; ++i) {
        rest += reasons[i].kernels;
    }
    if (rest > 0) {
        printf("  %d cannot for %d other reasons\n", rest, count - shown);
    }
}

static void print_summary(const answer *a, const acr_problem *problem, const acr__device *device)
{
    other_kernel *others = calloc(acr__kernel_count, sizeof *others);
    shared_reason *reasons = calloc(acr__kernel_count, sizeof *reasons);
    int other_count = 0, reason_count = 0;
    for (size_t i = 0; i < acr__kernel_count && others && reasons; ++i) {
        const acr__kernel *kernel = acr__kernels[i];
        const char *reason = acr__why_not(kernel, problem, device);
        if (reason) {
            count_reason(reasons, &reason_count, reason);
        } else if (judge_kernel(kernel, a, reason) == VERDICT_COULD) {
            others[other_count++] = (other_kernel){kernel, kernel->cost(problem, device)};
        }
    }
    print_others(others, other_count);
    print_reasons(reasons, reason_count);
    free(others);
    free(reasons);
}

static void print_answer(const answer *a, const acr_problem *problem, const acr__device *device, bool all)
{
    printf("%s on %s (%s)\n", a->text, device->name, backend_name(device->backend));
    const size_t length = strlen(a->text); /* a plan's words begin with its problem */
    const char *plan =
        strncmp(a->plan, a->text, length) == 0 && a->plan[length] == ':' ? a->plan + length + 2 : a->plan;
    printf("%s%s\n", a->chosen ? "plan: " : "no plan: ", plan);
    if (a->chosen && kernel_found(a->chosen)) {
        printf("  %s\n", kernel_found(a->chosen));
    }
    if (!all) {
        print_summary(a, problem, device);
        return;
    }
    for (size_t i = 0; i < acr__kernel_count; ++i) {
        if (is_listed(a, acr__kernels[i])) {
            print_kernel(acr__kernels[i], a, problem, device);
        }
    }
}

/* What all answers of one command line share. */
typedef struct asked {
    const problem_list *problems;
    acr_ctx *ctx; /* NULL: about a device that is not here */
    const acr__device *device;
    bool measure, json, all;
} asked;

/* Exit code of one problem; its answer goes to the list or to standard output. */
static int answer_one(const asked *ask, const acr_problem *problem, json_t *list)
{
    answer a;
    make_answer(&a, problem, ask->ctx, ask->device);
    const acr_status status = ask->measure ? acr__survey(a.seen, SEEN_MAX, &a.seen_count, ask->ctx, problem) : ACR_OK;
    if (status != ACR_OK) {
        return report_failure(status, a.text);
    }
    if (ask->json) {
        json_array_append_new(list, answer_json(&a, problem, ask->device));
    } else {
        print_answer(&a, problem, ask->device, ask->all || ask->measure);
    }
    return a.chosen ? EXIT_DONE : EXIT_CANNOT_RUN;
}

static int answer_all(const asked *ask)
{
    int exit_code = EXIT_DONE;
    json_t *list = json_array();
    progress line;
    progress_begin(&line, "why", (int64_t)ask->problems->count);
    for (size_t i = 0; i < ask->problems->count; ++i) {
        if (ask->measure) {
            progress_step(&line, (int64_t)i, "", "");
        }
        const int code = answer_one(ask, &ask->problems->items[i], list);
        exit_code = code == EXIT_DONE ? exit_code : code;
    }
    progress_clear(&line);
    if (ask->json) {
        json_print(list);
    } else {
        json_decref(list);
        if (!ask->all && !ask->measure) {
            printf("`acromion why --all` lists every kernel\n");
        }
    }
    return exit_code;
}

static int answer_here(const problem_list *problems, const common_options *common, const request *r)
{
    acr_ctx *ctx = NULL;
    int exit_code = context_open(common, &ctx);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    const asked ask = {problems, ctx, &acr__ctx_backend_device(ctx)->device, r->measure, common->json, r->all};
    const acr_status status = r->wisdom ? acr_wisdom_import(ctx, r->wisdom, NULL) : ACR_OK;
    exit_code = status == ACR_OK ? answer_all(&ask) : report_failure(status, "wisdom");
    acr_ctx_destroy(ctx);
    return exit_code;
}

int cmd_why(int argc, char **argv)
{
    common_options common;
    request r = {.gpu = NULL};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_gpu, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    if (r.gpu && r.measure) {
        fprintf(stderr, "acromion: why: --measure times this machine's device, --gpu asks about another\n");
        return EXIT_USAGE;
    }
    problem_list problems;
    exit_code = problems_parse(argv + first, argc - first, &problems);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    const asked elsewhere = {&problems, NULL, r.gpu ? &r.gpu->device : NULL, false, common.json, r.all};
    exit_code = r.gpu ? answer_all(&elsewhere) : answer_here(&problems, &common, &r);
    problems_free(&problems);
    return exit_code;
}
