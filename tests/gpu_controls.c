/* Positive controls of measuring, on a GPU: kernels that cheat must be refused and an honest one must not be; a kernel
 * must be the same as itself; and a launch made 5 % longer must be found. Device code of the cheats: exploits_gpu/; they
 * borrow the host description of fwd_ladder0. Without a GPU: exit code 77. tools/gpu-check.sh runs it. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "interleave.h"
#include "subject.h"
#include "timer.h"

#define IMAGE(name) extern const unsigned char acr__image_##name[], acr__image_end_##name[]
IMAGE(exploit_honest_sm80);
IMAGE(exploit_skips_last_block_sm80);
IMAGE(exploit_caches_output_sm80);
IMAGE(exploit_returns_early_sm80);
IMAGE(exploit_delay_sm80);

enum {
    EXIT_SKIPPED = 77
};

typedef struct world {
    acr_ctx *ctx;
    acr__backend_device *device;
    int failures;
} world;

static void report(world *w, bool good, const char *what, const char *detail)
{
    printf("%-6s %s: %s\n", good ? "ok" : "FAILED", what, detail);
    fflush(stdout);
    w->failures += !good;
}

/* Stops where the test itself cannot go on. */
static bool works(world *w, acr_status status, const char *what)
{
    if (status != ACR_OK) {
        report(w, false, what, acr_last_error());
    }
    return status == ACR_OK;
}

static bool make_reference(reference **out, const acr_problem *problem)
{
    enum {
        ROWS = 128
    };
    const reference_request wanted = {
        .problem = problem, .seed = 1, .sampled_rows = ROWS, .full_kv_lens = true, .threads = 4};
    return reference_create(out, &wanted) == ACR_OK;
}

/* ---- Cheats ---- */

typedef struct exploit {
    const char *name;
    const unsigned char *image, *image_end;
    bool passes_gate, passes_timing;
} exploit;

/* Times it in a mode; what the timed loop found. */
static acr_status time_exploit(const world *w, const acr__kernel *kernel, const acr_problem *problem,
                               const reference *ref, bench_mode mode, verdict *found)
{
    static const timer_limits limits = {20e-3, 50e-3, 32, 32};
    const subject_request wanted = {
        .ctx = w->ctx, .kernel = kernel, .problem = problem, .ref = ref, .mode = mode, .seed = 1};
    subject *s = NULL;
    timing t;
    watch unwatched = {.monitor = NULL};
    acr_status status = subject_create(&s, &wanted);
    if (status == ACR_OK) {
        status = timer_series(&t, subject_sample, s, &limits, &unwatched);
    }
    if (status == ACR_OK) {
        status = subject_judge(s, found);
    }
    subject_destroy(s);
    return status;
}

static void try_exploit(world *w, const exploit *e, const acr_problem *problem, const reference *ref)
{
    static const bench_mode modes[] = {MODE_STREAM, MODE_COLD, MODE_CALL};
    const acr__kernel *lender = acr__kernel_find("fwd_ladder0_f16_d64_64x1_sm80");
    char what[160];
    if (!lender) {
        report(w, false, e->name, "fwd_ladder0 is not in the list");
        return;
    }
    acr__kernel kernel = *lender;
    kernel.name = kernel.symbol = e->name;
    kernel.image = e->image;
    kernel.image_end = e->image_end;
    verdict gate;
    if (!works(w, conformance_check(&gate, w->ctx, &kernel, problem, ref), e->name)) {
        return;
    }
    snprintf(what, sizeof what, "%s, the gate", e->name);
    report(w, gate.pass == e->passes_gate, what, gate.pass ? "passes" : gate.failure);
    for (size_t i = 0; i < sizeof modes / sizeof modes[0] && gate.pass; ++i) {
        verdict found;
        snprintf(what, sizeof what, "%s, %s mode", e->name, mode_name(modes[i]));
        if (works(w, time_exploit(w, &kernel, problem, ref, modes[i], &found), what)) {
            report(w, found.pass == e->passes_timing, what, found.pass ? "passes" : found.failure);
        }
    }
}

static void try_exploits(world *w)
{
#define EXPLOIT(image_name, gate, timing)                                                                              \
    {                                                                                                                  \
#image_name, acr__image_##image_name, acr__image_end_##image_name, gate, timing                                \
    }
    static const exploit exploits[] = {
        EXPLOIT(exploit_honest_sm80, true, true),
        EXPLOIT(exploit_skips_last_block_sm80, false, false),
        EXPLOIT(exploit_caches_output_sm80, true, false),
        EXPLOIT(exploit_returns_early_sm80, true, false),
    };
#undef EXPLOIT
    acr_problem problem;
    reference *ref = NULL;
    if (acr_problem_parse(&problem, "b2:h8:s512:d64", NULL) != ACR_OK ||
        acr_problem_canonical(&problem, &problem) != ACR_OK || !make_reference(&ref, &problem)) {
        report(w, false, "the exploits' problem", acr_last_error());
        return;
    }
    for (size_t i = 0; i < sizeof exploits / sizeof exploits[0]; ++i) {
        try_exploit(w, &exploits[i], &problem, ref);
    }
    reference_destroy(ref);
}

/* ---- An injected slowdown ---- */

/* An execution, and behind it a kernel of one thread that waits; cycles < 0: no such kernel. */
typedef struct delayed {
    execution *execution;
    const acr__prepared *delay;
    int cycles;
} delayed;

static acr_status enqueue_delayed(void *arg, void *stream)
{
    const delayed *d = arg;
    acr_status status = execution_enqueue(d->execution, stream);
    if (status != ACR_OK || d->cycles < 0) {
        return status;
    }
    const fwd_args args = {.batch = d->cycles};
    return d->delay->device->backend->launch(d->delay, &args, 0, stream);
}

static acr_status sample_graph(void *arg, int count, double *seconds)
{
    acr__graph *graph = arg;
    return graph->device->backend->graph_time(graph, count, seconds);
}

enum {
    LAUNCHES = 10 /* of 150 us each */
};

/* Median seconds of an execution with so many cycles of delay. */
static acr_status time_delayed(world *w, const delayed *base, int cycles, double *seconds)
{
    enum {
        REPLAYS = 40
    };
    delayed d = *base;
    double samples[REPLAYS];
    acr__graph *graph = NULL;
    d.cycles = cycles;
    acr_status status = w->device->backend->graph_record(&graph, w->device, enqueue_delayed, &d, LAUNCHES);
    if (status == ACR_OK) {
        status = w->device->backend->graph_time(graph, REPLAYS, samples);
    }
    w->device->backend->graph_free(graph);
    *seconds = stats_percentile(samples, REPLAYS, 0.5);
    return status;
}

/* How many cycles make an execution longer by a share, the extra launch included. */
static acr_status calibrate(world *w, const delayed *base, double share, int *cycles)
{
    enum {
        PROBE = 20000
    };
    double plain_s, none_s, probe_s;
    acr_status status = time_delayed(w, base, -1, &plain_s);
    if (status == ACR_OK) {
        status = time_delayed(w, base, 0, &none_s);
    }
    if (status == ACR_OK) {
        status = time_delayed(w, base, PROBE, &probe_s);
    }
    if (status != ACR_OK) {
        return status;
    }
    const double wanted = (1 + share) * plain_s - none_s, cycle_s = (probe_s - none_s) / PROBE;
    printf("       plain %.2f us, with an empty kernel %.2f us, a cycle %.3f ns\n", 1e6 * plain_s, 1e6 * none_s,
           1e9 * cycle_s);
    if (!(wanted >= 0 && cycle_s > 0)) {
        return acr__fail(ACR_UNSUPPORTED, "an empty kernel alone is more than %.0f %% of the execution", 100 * share);
    }
    *cycles = (int)(wanted / cycle_s);
    return ACR_OK;
}

static acr_status compare(world *w, delayed *a, delayed *b, double noise_floor, stats_comparison *out, double *floor_out)
{
    acr__graph *graphs[2] = {NULL, NULL};
    const interleave_design design = {.blocks = INTERLEAVE_BLOCKS_PUBLISH, .warm_up_s = 50e-3, .budget_s = 20, .seed = 1};
    interleave_result r;
    acr_status status = w->device->backend->graph_record(&graphs[0], w->device, enqueue_delayed, a, LAUNCHES);
    if (status == ACR_OK) {
        status = w->device->backend->graph_record(&graphs[1], w->device, enqueue_delayed, b, LAUNCHES);
    }
    if (status == ACR_OK) {
        const interleave_subject baseline = {sample_graph, graphs[0]}, candidate = {sample_graph, graphs[1]};
        status = interleave_run(&r, &baseline, &candidate, &design);
    }
    if (status == ACR_OK) {
        *floor_out = stats_noise_floor(r.views, (size_t)r.blocks);
        *out = stats_compare(r.views, (size_t)r.blocks, noise_floor > 0 ? noise_floor : *floor_out);
        interleave_free(&r);
    }
    w->device->backend->graph_free(graphs[0]);
    w->device->backend->graph_free(graphs[1]);
    return status;
}

static void check_comparisons(world *w, delayed *plain, delayed *slower)
{
    stats_comparison same, found;
    double noise_floor, ignored;
    char detail[160];
    if (!works(w, compare(w, plain, plain, 0, &same, &noise_floor), "A/A") ||
        !works(w, compare(w, plain, slower, noise_floor, &found, &ignored), "5 % slower")) {
        return;
    }
    snprintf(detail, sizeof detail, "%s, ratio %.4f (%.4f - %.4f), noise floor %.2f %%", stats_verdict_text(same.verdict),
             same.speedup, same.ci95.low, same.ci95.high, 100 * noise_floor);
    report(w, same.verdict == STATS_SAME, "a kernel against itself", detail);
    snprintf(detail, sizeof detail, "%s, ratio %.4f (%.4f - %.4f), injected %.4f", stats_verdict_text(found.verdict),
             found.speedup, found.ci95.low, found.ci95.high, 1 / 1.05);
    report(w, found.verdict == STATS_SLOWER && fabs(1 / found.speedup - 1.05) < 0.015, "a launch 5 % longer", detail);
}

static void delay_shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    (void)problem, (void)device;
    *launch = (acr__launch){.grid = {1, 1, 1}, .block = 1};
}

static void try_slowdown(world *w)
{
    static const acr__kernel delay = {.name = "exploit_delay_sm80",
                                      .symbol = "exploit_delay_sm80",
                                      .family = "exploit_delay",
                                      .backend = ACR__CUDA,
                                      .image = acr__image_exploit_delay_sm80,
                                      .image_end = acr__image_end_exploit_delay_sm80,
                                      .arch_min = 80,
                                      .arch_max = 999,
                                      .shape = delay_shape};
    acr_problem problem;
    reference *ref = NULL;
    acr_plan *plan = NULL;
    acr__prepared *prepared = NULL;
    delayed plain = {.cycles = -1}, slower;
    if (acr_problem_parse(&problem, "b4:h16:s2048:d64", NULL) != ACR_OK ||
        acr_problem_canonical(&problem, &problem) != ACR_OK || !make_reference(&ref, &problem) ||
        acr_plan_create(&plan, w->ctx, &problem, ACR_ESTIMATE) != ACR_OK) {
        report(w, false, "the slowdown's problem", acr_last_error());
    } else if (works(w, w->device->backend->prepare(&prepared, w->device, &delay, &problem), "the delay") &&
               works(w,
                     execution_create(&plain.execution, w->ctx, acr__kernel_find(acr_plan_kernel(plan)), &problem, ref,
                                      false, 0, ALLOCATOR_ALIGNMENT),
                     "the slowdown's execution")) {
        plain.delay = prepared;
        slower = plain;
        if (works(w, calibrate(w, &plain, 0.05, &slower.cycles), "calibration")) {
            check_comparisons(w, &plain, &slower);
        }
    }
    execution_destroy(plain.execution);
    if (prepared) {
        w->device->backend->release(prepared);
    }
    acr_plan_destroy(plan);
    reference_destroy(ref);
}

int main(void)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cuda";
    world w = {.ctx = NULL};
    if (acr_ctx_create(&w.ctx, &options) != ACR_OK) {
        printf("skipped: %s\n", acr_last_error());
        return EXIT_SKIPPED;
    }
    w.device = acr__ctx_backend_device(w.ctx);
    printf("%s\n", acr_ctx_device(w.ctx));
    try_exploits(&w);
    try_slowdown(&w);
    acr_ctx_destroy(w.ctx);
    printf("%d failed\n", w.failures);
    return w.failures > 0;
}
