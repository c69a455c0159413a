/* acromion why: for a problem, which kernel is chosen, and for every other what it would cost, what it takes here (if
 * asked to measure) or why it cannot run. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/command.h"
#include "base/json.h"
#include "base/options.h"
#include "base/progress.h"
#include "base/text.h"
#include "internal.h"
#include "kernels/kernel_choice.h"
#include "machine/environment.h"
#include "machine/gpus.h"

static const option_spec options[] = {
    {'g', "gpu", "NAME", "ask for a GPU that is not here: l4 a100 h100 h200 ... (`acromion roofline --gpu help`)"},
    {'w', "wisdom", "FILE", "use the measured choices of this file"},
    {'m', "measure", NULL,
     "time every kernel that could be chosen, side by side, in scratch memory, and list only those"},
    {0, NULL, NULL, NULL},
};

static const command_spec spec = {
    .name = "why",
    .operands = "[PROBLEM...]",
    .about = "Says for every kernel whether it is chosen for a problem, could run it, or why it cannot.\n"
             "A malformed problem is an error (exit code 3), a problem that no kernel can run another (4).\n",
    .options = options,
    .common = COMMON_DEVICE | COMMON_JSON,
    .examples = "  acromion why b2:h8:s512:d64\n"
                "  acromion why bf16:b8:h32/8:s2048:d128:causal --gpu l4\n"
                "  acromion why --measure --json $(cat tools/planner_grid.txt)\n",
};

typedef struct request {
    const gpu_model *gpu;
    const char *wisdom;
    bool measure;
} request;

static bool take_option(void *arg, int id, const char *value)
{
    request *r = arg;
    if (id == 'w') {
        r->wisdom = value;
        return true;
    }
    if (id == 'm') {
        r->measure = true;
        return true;
    }
    r->gpu = gpu_find(value);
    if (!r->gpu) {
        fprintf(stderr, "acromion: --gpu: no GPU '%s' in the table; `acromion roofline --gpu help` lists it\n", value);
    }
    return r->gpu != NULL;
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
        snprintf(a->plan, sizeof a->plan, "%s", kernel ? "by estimate; the GPU is not here" : "no kernel can run this");
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

static void print_answer(const answer *a, const acr_problem *problem, const acr__device *device)
{
    printf("%s on %s (%s)\n%s%s\n", a->text, device->name, backend_name(device->backend),
           a->chosen ? "plan: " : "no plan: ", a->plan);
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
    bool measure, json;
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
        print_answer(&a, problem, ask->device);
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
    const asked ask = {problems, ctx, &acr__ctx_backend_device(ctx)->device, r->measure, common->json};
    const acr_status status = r->wisdom ? acr_wisdom_import(ctx, r->wisdom, NULL) : ACR_OK;
    exit_code = status == ACR_OK ? answer_all(&ask) : report_failure(status, "wisdom");
    acr_ctx_destroy(ctx);
    return exit_code;
}

int cmd_why(int argc, char **argv)
{
    common_options common;
    request r = {NULL, NULL, false};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_option, &r, &exit_code);
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
    const asked elsewhere = {&problems, NULL, r.gpu ? &r.gpu->device : NULL, false, common.json};
    exit_code = r.gpu ? answer_all(&elsewhere) : answer_here(&problems, &common, &r);
    problems_free(&problems);
    return exit_code;
}
