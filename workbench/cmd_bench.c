/* acromion bench: the gates, then the time of every kernel that can run a problem, and its distance from the physical
 * floor. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_record.h"
#include "command.h"
#include "conformance.h"
#include "contest.h"
#include "environment.h"
#include "interleave.h"
#include "json.h"
#include "kernel_choice.h"
#include "options.h"
#include "progress.h"
#include "python_exec.h"
#include "roofline.h"
#include "text.h"
#include "timer.h"

enum {
    ID_LADDER = OPTION_LONG_ONLY,
    ID_OVERLAP,
    ID_SEED,
    ID_LENGTHS,
    ID_QUICK,
    ID_PEERS,
    ID_PUBLISH,
    ID_MODE,
    ID_PYTHON_PATH
};

static const option_spec options[] = {
    {'k', "kernel", "KERNEL", "only this kernel: a name, a family, or a pattern like 'fwd_mma_*_d64_*'"},
    {ID_LADDER, "ladder", NULL, "also the kernels that are never planned: the teaching ladder"},
    {ID_OVERLAP, "overlap", NULL, "launches may overlap their predecessor (programmatic dependent launch); cuda"},
    {ID_SEED, "seed", "N", "of the inputs; default 1"},
    {ID_LENGTHS, "lengths", "full|skewed",
     "with kvlens or packed: all batch entries the longest (default), or a 64th of it and up"},
    {ID_QUICK, "quick", NULL, "about 0.3 s a kernel: for a look, not for publishing"},
    {ID_PEERS, "peers", "torch",
     "beside PyTorch's attention, in its process and interleaved; the planner's kernel, or -k"},
    {ID_MODE, "mode", "stream|call", "with --peers: launches in a graph (default), or ordinary calls from Python"},
    {ID_PUBLISH, "publish", NULL, "with --peers: 50 blocks a pair (400 samples a side) instead of 13"},
    {ID_PYTHON_PATH, "python-path", "FOLDER", "that holds the Python package acromion, if it is not found"},
    {'o', "output", "FILE", "add the records to this JSON file"},
    {0, NULL, NULL, NULL},
};

static const command_spec spec = {
    .name = "bench",
    .operands = "[PROBLEM...]",
    .about = "Checks each kernel on the problem, then measures it in stream mode: a sequence of back-to-back launches "
             "over the same buffers,\n"
             "replayed; a sample is the time a launch of one replay. What the timed launches wrote is judged again. A "
             "kernel that fails is not\n"
             "timed, a time below 0.9 of the physical floor is refused; both make the exit code 1. * marks the kernel "
             "the planner takes.\n"
             "How to repeat a measurement: docs/measuring.md.\n",
    .options = options,
    .common = COMMON_DEVICE | COMMON_JSON,
    .examples = "  acromion bench\n"
                "  acromion bench b2:h8:s512:d64 b4:h16:s2048:d64:causal -o results/mine.json\n"
                "  acromion bench -k fwd_simt --ladder --json\n"
                "  acromion bench b2:h8:s512:d64 --peers torch --publish -o results/mine.json\n",
};

typedef struct request {
    const char *kernel, *output, *python_path;
    bool ladder, overlap, quick, peers, publish, call_mode;
    length_pattern lengths;
    uint64_t seed;
} request;

typedef struct session {
    const request *request;
    const common_options *common;
    acr_ctx *ctx;
    const acr__device *device;
    uint32_t threads;
    const peer_provider *provider; /* NULL = ours alone */
    json_t *records;
    size_t saved; /* of the records: in the output file */
    int measured, refused;
} session;

/* One problem and what all its kernels are compared with. Functions call it `on`. */
typedef struct bench_problem {
    const acr_problem *problem;
    char text[ACR_PROBLEM_TEXT_MAX];
    reference *ref;
    demand demand;
    floor_times floor;
    char planned[128]; /* the planner's kernel, "" = none */
} bench_problem;

/* One kernel's result. */
typedef struct measurement {
    const acr__kernel *kernel;
    verdict verdict; /* of what the timed launches wrote */
    timing timing;
    gpu_state before, after;
} measurement;

/* The one word that an option knows (besides those its caller has looked for). */
static bool option_word(const char *option, const char *value, const char *known)
{
    if (strcmp(value, known) == 0) {
        return true;
    }
    fprintf(stderr, "acromion bench: --%s: '%s' is unknown; `acromion bench --help` says what there is\n", option,
            value);
    return false;
}

static bool take_option(void *arg, int id, const char *value)
{
    request *r = arg;
    int64_t seed = 0;
    switch (id) {
    case 'k':
        r->kernel = value;
        return kernel_pattern_known(value);
    case 'o':
        r->output = value;
        return true;
    case ID_LADDER:
        r->ladder = true;
        return true;
    case ID_OVERLAP:
        r->overlap = true;
        return true;
    case ID_QUICK:
        r->quick = true;
        return true;
    case ID_PEERS:
        r->peers = true;
        return option_word("peers", value, "torch");
    case ID_PUBLISH:
        r->publish = true;
        return true;
    case ID_LENGTHS:
        r->lengths = strcmp(value, "skewed") == 0 ? LENGTHS_SKEWED : LENGTHS_FULL;
        return r->lengths == LENGTHS_SKEWED || option_word("lengths", value, "full");
    case ID_MODE:
        r->call_mode = strcmp(value, "call") == 0;
        return r->call_mode || option_word("mode", value, "stream");
    case ID_PYTHON_PATH:
        r->python_path = value;
        return true;
    default:
        if (!option_int("seed", value, 0, INT64_MAX, &seed)) {
            return false;
        }
        r->seed = (uint64_t)seed;
        return true;
    }
}

/* ---- One kernel ---- */

/* Gate, time, judge again. Returns ACR_OK with measurement->verdict.pass telling whether the times count. */
static acr_status measure(measurement *m, const session *s, const bench_problem *on)
{
    static const timer_limits thorough = TIMER_LIMITS_DEFAULT;
    static const timer_limits quick = {200e-6, 20e-3, 0.3, 10, 100};
    acr_status status = conformance_check(&m->verdict, s->ctx, m->kernel, on->problem, on->ref);
    if (status != ACR_OK || !m->verdict.pass) {
        return status;
    }
    execution *e = NULL;
    status = execution_create(&e, s->ctx, m->kernel, on->problem, on->ref, false,
                              s->request->overlap ? ACR_OVERLAP_PREVIOUS : 0, ALLOCATOR_ALIGNMENT);
    if (status == ACR_OK) {
        status = execution_run(e);
    }
    gpu_state_read(&m->before, s->device, s->common->device);
    if (status == ACR_OK) {
        status = timer_stream(&m->timing, acr__ctx_backend_device(s->ctx), execution_enqueue, e,
                              s->request->quick ? &quick : &thorough);
    }
    gpu_state_read(&m->after, s->device, s->common->device);
    run_output output;
    if (status == ACR_OK) {
        status = execution_collect(e, &output);
    }
    if (status == ACR_OK) {
        conformance_judge(&m->verdict, on->ref, &output);
        run_output_free(&output);
    }
    execution_destroy(e);
    return status;
}

/* A floor from the table of GPUs is a gate; one that was measured here, the CPU's, is only printed. */
static bool below_floor(const session *s, const bench_problem *on, const measurement *m)
{
    return s->device->backend == ACR__CUDA && m->timing.stats.p50 < 0.9e6 * on->floor.warm_s;
}

/* ---- Output ---- */

static json_t *record_json(const session *s, const bench_problem *on, const measurement *m)
{
    const bench_conditions conditions = {s->device, on->text, "stream", &on->demand, &on->floor, s->request->seed};
    json_t *json = bench_record(&conditions, &m->timing.stats, m->timing.launches, s->request->overlap,
                                m->verdict.err_max, &m->before, &m->after);
    if (s->request->lengths != LENGTHS_FULL) {
        json_object_set_new(json, "lengths", json_string("skewed"));
    }
    bench_record_kernel(json, m->kernel);
    return json;
}

static void print_header(const session *s, const bench_problem *on)
{
    printf("%s on %s, stream mode%s\n", on->text, s->device->name, s->request->overlap ? ", overlapping launches" : "");
    char floor_us[24];
    printf("floor %s us, bound by %s\n", us_text(floor_us, 1e6 * on->floor.warm_s), on->floor.warm_bound);
    printf("  %-44s %9s %19s %9s %9s %5s %8s %7s %8s\n", "kernel", "p50 us", "95 % interval", "p90", "p99", "n",
           "TFLOP/s", "x floor", "max err");
}

static void print_measurement(const bench_problem *on, const measurement *m)
{
    const stats_summary *t = &m->timing.stats;
    char p50[24], p90[24], p99[24], low[24], high[24], interval[64];
    snprintf(interval, sizeof interval, "%s - %s", us_text(low, t->p50_ci95.low), us_text(high, t->p50_ci95.high));
    printf("%c %-44s %9s %19s %9s %9s %5zu %8.3g %7.2f %8.2g\n", strcmp(on->planned, m->kernel->name) == 0 ? '*' : ' ',
           m->kernel->name, us_text(p50, t->p50), interval, us_text(p90, t->p90), us_text(p99, t->p99), t->count,
           on->demand.flops / t->p50 / 1e6, t->p50 / (1e6 * on->floor.warm_s), m->verdict.err_max);
    fflush(stdout);
}

static void refuse(session *s, const bench_problem *on, const measurement *m)
{
    ++s->refused;
    if (m->verdict.pass) {
        fprintf(stderr,
                "REFUSED %s: %.4g us is below 0.9 of the floor of %.4g us: the measurement or the kernel is wrong\n",
                m->kernel->name, m->timing.stats.p50, 1e6 * on->floor.warm_s);
    } else {
        fprintf(stderr, "FAIL %s: %s\n     acromion check %s -k %s --seed %" PRIu64 " --inputs normal --backend %s\n",
                m->kernel->name, m->verdict.failure, on->text, m->kernel->name, s->request->seed,
                backend_name(m->kernel->backend));
    }
}

/* ---- All kernels of a problem ---- */

static bool wanted(const session *s, const acr__kernel *kernel, const acr_problem *problem)
{
    if (!kernel_matches(kernel, s->request->kernel) || acr__why_not(kernel, problem, s->device)) {
        return false;
    }
    return !(kernel->traits & ACR__TRAIT_NEVER_PLANNED) || s->request->ladder || s->request->kernel;
}

static acr_status bench_kernels(session *s, const bench_problem *on)
{
    progress line;
    char best[64] = "";
    double best_us = INFINITY;
    progress_begin(&line, "bench", (int64_t)acr__kernel_count);
    acr_status status = ACR_OK;
    for (size_t i = 0; i < acr__kernel_count && status == ACR_OK; ++i) {
        measurement m = {.kernel = acr__kernels[i]};
        if (!wanted(s, m.kernel, on->problem)) {
            continue;
        }
        progress_step(&line, (int64_t)i, m.kernel->name, best);
        status = measure(&m, s, on);
        progress_clear(&line);
        if (status != ACR_OK) {
            break;
        }
        if (!m.verdict.pass || below_floor(s, on, &m)) {
            refuse(s, on, &m);
            continue;
        }
        ++s->measured;
        json_array_append_new(s->records, record_json(s, on, &m));
        if (!s->common->json) {
            print_measurement(on, &m);
        }
        if (m.timing.stats.p50 < best_us) {
            best_us = m.timing.stats.p50;
            snprintf(best, sizeof best, "%.4g us", best_us);
        }
    }
    return status;
}

static void plan_name(char *out, size_t capacity, acr_ctx *ctx, const acr_problem *problem)
{
    acr_plan *plan = NULL;
    out[0] = '\0';
    if (acr_plan_create(&plan, ctx, problem, ACR_ESTIMATE) == ACR_OK) {
        snprintf(out, capacity, "%s", acr_plan_kernel(plan));
        acr_plan_destroy(plan);
    }
}

static void find_floor(const session *s, bench_problem *on)
{
    machine m;
    const acr_buffers lengths = reference_buffers(on->ref);
    on->demand = demand_of(on->problem, &lengths);
    if (s->device->backend == ACR__CUDA) {
        machine_of_gpu(&m, s->device);
    } else {
        machine_of_cpu(&m, s->device, s->threads, on->demand.bytes);
    }
    floor_of(&on->floor, &m, on->problem, &on->demand);
}

/* The same beside peers. */
static acr_status bench_contest(session *s, const bench_problem *on)
{
    const contest_request wanted_contest = {
        .ctx = s->ctx,
        .ordinal = s->common->device,
        .problem = on->problem,
        .text = on->text,
        .ref = on->ref,
        .demand = &on->demand,
        .floor = &on->floor,
        .pattern = s->request->kernel,
        .planned = on->planned,
        .provider = s->provider,
        .call_mode = s->request->call_mode,
        .overlap = s->request->overlap,
        .blocks = s->request->publish ? INTERLEAVE_BLOCKS_PUBLISH : INTERLEAVE_BLOCKS_SEARCH,
        .seed = s->request->seed,
        .quiet = s->common->json,
    };
    contest_counts counts = {0, 0};
    acr_status status = contest_run(&wanted_contest, s->records, &counts);
    s->measured += counts.measured;
    s->refused += counts.refused;
    if (status == ACR_OK && counts.measured + counts.refused == 0) {
        fprintf(stderr, "acromion: %s: no kernel of ours to measure; `acromion why` says why\n", on->text);
    }
    return status;
}

static acr_status bench_one(session *s, const acr_problem *problem)
{
    enum {
        GATE_ROWS = 128
    };
    bench_problem on = {.problem = problem};
    acr_problem_format(problem, on.text, sizeof on.text);
    plan_name(on.planned, sizeof on.planned, s->ctx, problem);
    reference_request wanted_reference = {
        .problem = problem,
        .inputs = INPUT_NORMAL,
        .seed = s->request->seed,
        .sampled_rows = GATE_ROWS,
        .lengths = s->request->lengths,
        .threads = s->threads,
    };
    acr_status status = reference_create(&on.ref, &wanted_reference);
    if (status != ACR_OK) {
        return status;
    }
    find_floor(s, &on);
    if (s->provider) {
        status = bench_contest(s, &on);
    } else {
        if (!s->common->json) {
            print_header(s, &on);
        }
        status = bench_kernels(s, &on);
    }
    reference_destroy(on.ref);
    return status;
}

/* Adds the records from `saved` on to the output file, problem by problem: a run cut short keeps what it has. */
static acr_status save(session *s)
{
    size_t count = json_array_size(s->records);
    if (!s->request->output || s->saved == count) {
        return ACR_OK;
    }
    json_t *added = json_array();
    for (; s->saved < count; ++s->saved) {
        json_array_append(added, json_array_get(s->records, s->saved));
    }
    acr_status status = json_append(s->request->output, added);
    json_decref(added);
    return status;
}

static int finish(const session *s, acr_status status)
{
    int exit_code = status == ACR_OK ? EXIT_DONE : report_failure(status, "bench");
    if (s->common->json) {
        json_print(json_incref(s->records));
    }
    if (exit_code == EXIT_DONE && s->measured + s->refused == 0) {
        fprintf(stderr, "acromion: nothing was measured; `acromion why` says why\n");
    }
    return exit_code != EXIT_DONE ? exit_code : s->measured == 0 || s->refused > 0 ? EXIT_FAILED : EXIT_DONE;
}

static int bench_all(session *s, const problem_list *problems)
{
    s->device = &acr__ctx_backend_device(s->ctx)->device;
    if (s->provider && s->device->backend != ACR__CUDA) {
        fprintf(stderr, "acromion bench: peers are met on a GPU, and this context is %s\n", s->device->name);
        return EXIT_CANNOT_RUN;
    }
    s->records = json_array();
    acr_status status = ACR_OK;
    for (size_t i = 0; i < problems->count && status == ACR_OK; ++i) {
        status = bench_one(s, &problems->items[i]);
        acr_status saved = save(s);
        status = status == ACR_OK ? saved : status;
    }
    int exit_code = finish(s, status);
    json_decref(s->records);
    return exit_code;
}

int bench_with_peers(int argc, char **argv, const peer_provider *provider)
{
    common_options common;
    request r = {.seed = 1, .lengths = LENGTHS_FULL};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_option, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    r.peers = r.peers || provider;
    if (!r.peers && (r.publish || r.call_mode)) {
        fprintf(stderr, "acromion bench: --publish and --mode call go with --peers\n");
        return EXIT_USAGE;
    }
    problem_list problems;
    exit_code = problems_parse(argv + first, argc - first, &problems);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    if (r.peers && !provider) {
        problems_free(&problems);
        return python_exec_bench(argc, argv, r.python_path);
    }
    session s = {.request = &r, .common = &common, .threads = thread_count(&common), .provider = provider};
    exit_code = context_open(&common, &s.ctx);
    if (exit_code == EXIT_DONE) {
        exit_code = bench_all(&s, &problems);
    }
    acr_ctx_destroy(s.ctx);
    problems_free(&problems);
    return exit_code;
}

int cmd_bench(int argc, char **argv)
{
    return bench_with_peers(argc, argv, NULL);
}
