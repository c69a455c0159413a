/* acromion check: every kernel against the oracle. Cases that share their inputs and judged answer are run one after
 * another, so that each reference is made once. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/exit_code.h"
#include "base/json.h"
#include "base/options.h"
#include "base/progress.h"
#include "check/cases.h"
#include "check/conformance.h"
#include "commands.h"
#include "kernels/kernel_choice.h"
#include "kernels/variant.h"
#include "machine/environment.h"

enum {
    ID_QUICK = OPTION_LONG_ONLY,
    ID_SEED,
    ID_INPUTS,
    ID_RERUNS,
    ID_VARIANT,
    ID_LIST
};

static const option_spec options[OPTIONS_MAX] = {
    {'k', "kernel", "KERNEL",
     "only this kernel: a name, a family, or a pattern like 'fwd_mma_*_d64_*'; as often as wanted"},
    {ID_VARIANT, "variant", "VARIANT",
     "also KERNEL:NAME=VALUE,..., or a folder of `acromion variant`; beside what -k names"},
    {ID_QUICK, "quick", NULL, "only the first 16 cases of each kernel"},
    {ID_SEED, "seed", "N", "of the inputs; default 1"},
    {ID_INPUTS, "inputs", "KIND",
     "only these: normal shifted heavy large constant-v needle scaled "
     "head-scaled shifted-v lowest-keys"},
    {ID_RERUNS, "reruns", "N", "runs of each case after the first, all to give its bits; default 1"},
    {ID_LIST, "list", NULL, "print the cases as commands and run none"},
};

typedef struct request {
    kernel_patterns patterns;
    bool quick, list, one_kind;
    input_kind inputs; /* when one_kind */
    int reruns;
    uint64_t seed;
} request;

static const option_field fields[OPTIONS_MAX] = {
    {ID_QUICK, OPTION_FLAG, offsetof(request, quick)},
    {ID_LIST, OPTION_FLAG, offsetof(request, list)},
    {ID_SEED, OPTION_SEED, offsetof(request, seed)},
};

static const command_spec spec = {
    .usage = "check [PROBLEM...]",
    .examples = "  acromion check\n"
                "  acromion check b1:h3:s65:d64:causal -k fwd_mma --seed 7 --inputs large\n"
                "  acromion check --backend cpu --quick --json > check.json\n",
    .about = "Runs every kernel that this device can run and compares it with a float64 oracle. Without PROBLEM each "
             "kernel gets its own\n"
             "list of at most 320 cases, in which all pairs of lengths around its tiles, dims, head counts, layouts, "
             "masks and inputs occur;\n"
             "with PROBLEM, each kernel that can run it gets it with every kind of inputs. A failure prints the "
             "command that repeats it.\n"
             "The tolerance is what the rounding errors of a right kernel exceed less than once in 10^7 cases: "
             "docs/manual/measuring.md.\n",
    .options = options,
    .fields = fields,
    .common = COMMON_DEVICE | COMMON_JSON,
};

/* One run of one kernel. */
typedef struct job {
    char key[ACR_PROBLEM_TEXT_MAX + 16]; /* what jobs with the same reference share */
    const acr__kernel *kernel;
    test_case test;
} job;

typedef struct job_list {
    job *items;
    size_t count, capacity;
} job_list;

/* What became of a kernel. */
typedef struct tally {
    int passed, failed;
    double worst_share;    /* of the tolerance, over all passed cases */
    double worst_error;    /* over all cases */
    bool failed_otherwise; /* some case failed, and not by an error beyond the tolerance */
} tally;

typedef struct session {
    const request *request;
    const common_options *common;
    acr_ctx *ctx;
    const acr__device *device;
    uint32_t threads;
    job_list jobs;
    tally *tallies; /* one a kernel of the table */
    json_t *records;
    bool device_lost;
} session;

static bool take_option(void *arg, int id, const char *value)
{
    request *r = arg;
    switch (id) {
    case 'k':
        return kernel_patterns_add(&r->patterns, value);
    case ID_VARIANT:
        return variant_ask(value);
    case ID_RERUNS:
        return option_int32("reruns", value, 1, 1000000, &r->reruns);
    default:
        r->one_kind = input_kind_parse(value, &r->inputs);
        if (!r->one_kind) {
            fprintf(stderr, "acromion: --inputs: '%s' is none of %s\n", value, input_kind_names());
        }
        return r->one_kind;
    }
}

/* ---- Jobs ---- */

static bool add_job(job_list *jobs, const acr__kernel *kernel, const test_case *test)
{
    if (jobs->count == jobs->capacity) {
        size_t capacity = jobs->capacity ? 2 * jobs->capacity : 256;
        job *items = realloc(jobs->items, capacity * sizeof *items);
        if (!items) {
            fprintf(stderr, "acromion: out of memory\n");
            return false;
        }
        jobs->items = items;
        jobs->capacity = capacity;
    }
    job *j = &jobs->items[jobs->count++];
    *j = (job){.kernel = kernel, .test = *test};
    reference_key(j->key, &test->problem);
    return true;
}

/* The kernel's own list. */
static bool add_cases(session *s, const acr__kernel *kernel)
{
    static case_list list; /* 40 KB */
    cases_make(&list, kernel, s->device, s->request->quick);
    for (size_t i = 0; i < list.count; ++i) {
        if (s->request->one_kind && list.items[i].inputs != s->request->inputs) {
            continue;
        }
        if (!add_job(&s->jobs, kernel, &list.items[i])) {
            return false;
        }
    }
    return true;
}

/* The problems that were asked for, with every kind of inputs or the one that was asked for. */
static bool add_problems(session *s, const acr__kernel *kernel, const problem_list *problems)
{
    for (size_t i = 0; i < problems->count; ++i) {
        if (acr__why_not(kernel, &problems->items[i], s->device)) {
            continue;
        }
        const int all = input_kind_count(acr__kv_dtype(&problems->items[i]));
        const int kinds = s->request->one_kind ? INPUT_KIND_COUNT : all;
        for (int kind = 0; kind < kinds; ++kind) {
            test_case test = {problems->items[i], (input_kind)kind};
            bool wanted = input_kind_fits(&test.problem, test.inputs) &&
                          (!s->request->one_kind || s->request->inputs == test.inputs);
            if (wanted && !add_job(&s->jobs, kernel, &test)) {
                return false;
            }
        }
    }
    return true;
}

static int compare_jobs(const void *a, const void *b)
{
    const job *x = a, *y = b;
    int order = (int)x->test.inputs - (int)y->test.inputs;
    if (order == 0) {
        order = strcmp(x->key, y->key);
    }
    return order != 0 ? order : strcmp(x->kernel->name, y->kernel->name);
}

static bool same_reference(const job *a, const job *b)
{
    return a->test.inputs == b->test.inputs && strcmp(a->key, b->key) == 0;
}

/* problems NULL: each kernel's own cases. */
static bool make_jobs(session *s, const problem_list *problems)
{
    for (size_t i = 0; i < kernel_total(); ++i) {
        const acr__kernel *kernel = kernel_at(i);
        if (!kernel_matches(kernel, &s->request->patterns)) {
            continue;
        }
        if (!(problems ? add_problems(s, kernel, problems) : add_cases(s, kernel))) {
            return false;
        }
    }
    if (s->jobs.count > 0) {
        qsort(s->jobs.items, s->jobs.count, sizeof *s->jobs.items, compare_jobs);
    }
    return true;
}

/* ---- Running ---- */

static void repro_text(char *out, size_t capacity, const session *s, const job *j)
{
    char text[ACR_PROBLEM_TEXT_MAX];
    acr_problem_format(&j->test.problem, text, sizeof text);
    snprintf(out, capacity, "acromion check %s -k %s --seed %" PRIu64 " --inputs %s --backend %s", text,
             j->kernel->name, s->request->seed, input_kind_name(j->test.inputs), backend_name(j->kernel->backend));
}

static tally *tally_of(const session *s, const acr__kernel *kernel)
{
    for (size_t i = 0; i < kernel_total(); ++i) {
        if (kernel_at(i) == kernel) {
            return &s->tallies[i];
        }
    }
    return NULL;
}

static json_t *record_json(const session *s, const job *j, const verdict *v, const char *repro)
{
    char text[ACR_PROBLEM_TEXT_MAX];
    acr_problem_format(&j->test.problem, text, sizeof text);
    json_t *json = json_pack("{s:s, s:s, s:s, s:I, s:b, s:I}", "problem", text, "kernel", j->kernel->name, "inputs",
                             input_kind_name(j->test.inputs), "seed", (json_int_t)s->request->seed, "pass", v->pass,
                             "rows", (json_int_t)v->rows);
    verdict_add_json(json, v);
    if (!v->pass) {
        json_object_set_new(json, "failure", json_string(v->failure));
        json_object_set_new(json, "repro", json_string(repro));
    }
    return json;
}

static void record(session *s, const job *j, const verdict *v)
{
    char repro[2 * ACR_PROBLEM_TEXT_MAX];
    repro_text(repro, sizeof repro, s, j);
    tally *t = tally_of(s, j->kernel);
    if (v->pass) {
        ++t->passed;
        double share = verdict_share(v);
        t->worst_share = share > t->worst_share ? share : t->worst_share;
    } else {
        ++t->failed;
        t->failed_otherwise |= v->err_max <= v->tol_max;
    }
    t->worst_error = v->err_max > t->worst_error ? v->err_max : t->worst_error;
    if (s->common->json) {
        json_array_append_new(s->records, record_json(s, j, v, repro));
    } else if (!v->pass) {
        printf("FAIL %s: %s\n     %s\n", j->kernel->name, v->failure, repro);
        fflush(stdout);
    }
}

/* Runs the jobs of one reference, [first, end). */
static acr_status run_group(session *s, size_t first, size_t end, progress *line)
{
    const job *jobs = s->jobs.items;
    reference_request wanted = {
        .problem = &jobs[first].test.problem,
        .inputs = jobs[first].test.inputs,
        .seed = s->request->seed,
        .sampled_rows = REFERENCE_SAMPLED_ROWS,
        .threads = s->threads,
    };
    reference *ref = NULL;
    acr_status status = reference_create(&ref, &wanted);
    for (size_t i = first; i < end && status == ACR_OK; ++i) {
        progress_step(line, (int64_t)i, jobs[i].kernel->name, "");
        verdict v;
        status = conformance_check_reruns(&v, s->ctx, jobs[i].kernel, &jobs[i].test.problem, ref, s->request->reruns);
        progress_clear(line);
        record(s, &jobs[i], &v);
        s->device_lost = status == ACR_DEVICE_FAULT;
    }
    reference_destroy(ref);
    return status;
}

static acr_status run_jobs(session *s)
{
    progress line;
    progress_begin(&line, "check", (int64_t)s->jobs.count);
    acr_status status = ACR_OK;
    for (size_t first = 0; first < s->jobs.count && status == ACR_OK;) {
        size_t end = first + 1;
        while (end < s->jobs.count && same_reference(&s->jobs.items[first], &s->jobs.items[end])) {
            ++end;
        }
        status = run_group(s, first, end, &line);
        first = end;
    }
    progress_clear(&line);
    return status;
}

static void list_jobs(const session *s)
{
    for (size_t i = 0; i < s->jobs.count; ++i) {
        char repro[2 * ACR_PROBLEM_TEXT_MAX];
        repro_text(repro, sizeof repro, s, &s->jobs.items[i]);
        puts(repro);
    }
}

/* ---- Reporting ---- */

/* Why a kernel that was asked for has no cases; NULL when it has. */
static const char *skip_reason(const session *s, size_t index, const problem_list *problems)
{
    if (s->tallies[index].passed + s->tallies[index].failed > 0 || s->device_lost) {
        return NULL;
    }
    const char *reason = kernel_not_here(kernel_at(index), s->device);
    if (!reason && problems) {
        reason = acr__why_not(kernel_at(index), &problems->items[0], s->device);
    }
    return reason ? reason : "none of its cases uses these inputs";
}

static void print_tally(const char *name, const tally *t)
{
    if (t->failed == 0) {
        printf("pass     %-44s %3d cases, max error %.2g, at most %.0f %% of a tolerance\n", name, t->passed,
               t->worst_error, 100 * t->worst_share);
        return;
    }
    printf("FAIL     %-44s %3d cases, %d failed", name, t->passed + t->failed, t->failed);
    if (!t->failed_otherwise || t->worst_error > 0) {
        printf(", max error %.2g", t->worst_error);
    }
    puts(t->failed_otherwise ? ", and not by an error alone" : "");
}

static void print_report(const session *s, const problem_list *problems, double elapsed_s)
{
    int passed = 0, failed = 0, kernels = 0, skipped = 0;
    for (size_t i = 0; i < kernel_total(); ++i) {
        const tally *t = &s->tallies[i];
        if (!kernel_matches(kernel_at(i), &s->request->patterns)) {
            continue;
        }
        passed += t->passed;
        failed += t->failed;
        const char *reason = skip_reason(s, i, problems);
        if (reason) {
            ++skipped;
            if (s->request->patterns.count > 0) {
                printf("not run  %-44s %s\n", kernel_at(i)->name, reason);
            }
        } else if (t->passed == 0) {
            ++kernels;
            printf("FAIL     %-44s %3d cases, none passed\n", kernel_at(i)->name, t->failed);
        } else {
            ++kernels;
            print_tally(kernel_at(i)->name, t);
        }
    }
    printf("%s: %d kernels, %d cases passed, %d failed, %d kernels not for this device or problem; seed %" PRIu64
           ", %.1f s\n",
           s->device->name, kernels, passed, failed, skipped, s->request->seed, elapsed_s);
}

static void print_json(const session *s, const problem_list *problems)
{
    json_t *kernels = json_array();
    for (size_t i = 0; i < kernel_total(); ++i) {
        if (!kernel_matches(kernel_at(i), &s->request->patterns)) {
            continue;
        }
        const tally *t = &s->tallies[i];
        json_t *entry = json_pack("{s:s, s:i, s:i, s:f}", "kernel", kernel_at(i)->name, "passed", t->passed, "failed",
                                  t->failed, "worst_share", t->worst_share);
        const char *reason = skip_reason(s, i, problems);
        if (reason) {
            json_object_set_new(entry, "not_run", json_string(reason));
        }
        json_array_append_new(kernels, entry);
    }
    json_t *document =
        json_pack("{s:i, s:o, s:O}", "reruns", s->request->reruns, "kernels", kernels, "records", s->records);
    environment_add(document, s->device);
    json_print(document);
}

/* Whether -k means CUDA kernels and the context is a CPU's. */
static bool asks_for_a_gpu(const session *s)
{
    bool cuda = false;
    for (size_t i = 0; i < kernel_total() && s->request->patterns.count > 0; ++i) {
        cuda = cuda || (kernel_at(i)->backend == ACR__CUDA && kernel_matches(kernel_at(i), &s->request->patterns));
    }
    return cuda && s->device->backend != ACR__CUDA;
}

/* Nothing checked is a failure: a gate that looked at nothing has not passed. */
static int result_of(const session *s)
{
    int passed = 0, failed = 0;
    for (size_t i = 0; i < kernel_total(); ++i) {
        passed += s->tallies[i].passed;
        failed += s->tallies[i].failed;
    }
    if (passed + failed == 0) {
        fprintf(stderr, "acromion: nothing was checked\n");
        if (asks_for_a_gpu(s)) {
            fprintf(stderr,
                    "without a GPU the PTX machine executes CUDA kernels on this processor: `./run kernel NAME` "
                    "in the source tree, ptxvm/README.md\n");
        }
    }
    return failed > 0 || passed == 0 ? EXIT_FAILED : EXIT_DONE;
}

static int check_all(session *s, const problem_list *problems)
{
    if (!make_jobs(s, problems)) {
        return EXIT_FAULT;
    }
    if (s->request->list) {
        list_jobs(s);
        return EXIT_DONE;
    }
    double started_s = monotonic_s();
    acr_status status = run_jobs(s);
    if (s->common->json) {
        print_json(s, problems);
    } else {
        print_report(s, problems, monotonic_s() - started_s);
    }
    if (status != ACR_OK) {
        return report_failure(status, s->device_lost ? "the device is lost, no further case can run" : "check");
    }
    return result_of(s);
}

int cmd_check(int argc, char **argv)
{
    common_options common;
    request r = {.seed = 1, .reruns = 1};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_option, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    problem_list problems = {NULL, 0};
    bool own_cases = first == argc;
    exit_code = own_cases ? EXIT_DONE : problems_parse(argv + first, argc - first, &problems);
    session s = {.request = &r, .common = &common, .threads = thread_count(&common)};
    if (exit_code == EXIT_DONE) {
        exit_code = context_open(&common, &s.ctx);
    }
    if (exit_code == EXIT_DONE) {
        s.device = &acr__ctx_backend_device(s.ctx)->device;
        const acr_status status = variants_load(s.device);
        exit_code = status == ACR_OK ? EXIT_DONE : report_failure(status, "variant");
    }
    if (exit_code == EXIT_DONE) {
        s.records = json_array();
        s.tallies = calloc(kernel_total(), sizeof *s.tallies);
        exit_code = s.tallies ? check_all(&s, own_cases ? NULL : &problems) : EXIT_FAULT;
    }
    json_decref(s.records);
    free(s.tallies);
    free(s.jobs.items);
    acr_ctx_destroy(s.ctx);
    variants_unload();
    problems_free(&problems);
    return exit_code;
}
