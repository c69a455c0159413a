/* Positive controls of measuring, on a GPU: kernels that cheat must be refused and an honest one must not be; a kernel
 * must be the same as itself; and 5 % more work must be found. Device code of the cheats: exploits_gpu/; they
 * borrow the host description of fwd_ladder0. Without a GPU: exit code 77. tools/gpu_day.py runs it. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bench/interleave.h"
#include "bench/timed_kernel.h"
#include "bench/timer.h"

#define IMAGE(name) extern const unsigned char acr__image_##name[], acr__image_end_##name[]
IMAGE(exploit_honest_sm80);
IMAGE(exploit_skips_last_block_sm80);
IMAGE(exploit_caches_output_sm80);
IMAGE(exploit_returns_early_sm80);

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
        .problem = problem, .seed = 1, .sampled_rows = ROWS, .lengths = LENGTHS_FULL, .threads = 4};
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
    const timed_kernel_request wanted = {
        .ctx = w->ctx, .kernel = kernel, .problem = problem, .ref = ref, .mode = mode, .seed = 1};
    timed_kernel *s = NULL;
    timing t;
    watch unwatched = {.monitor = NULL};
    acr_status status = timed_kernel_create(&s, &wanted);
    if (status == ACR_OK) {
        status = timer_series(&t, timed_kernel_sample, s, &limits, &unwatched);
    }
    if (status == ACR_OK) {
        status = timed_kernel_judge(s, found);
    }
    timed_kernel_destroy(s);
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

enum {
    LAUNCHES = 20
};

/* An execution; with `extra`, every twentieth is done twice and counted once: 5 % more work, and nothing else. */
typedef struct repeated {
    execution *execution;
    bool extra;
    int count;
} repeated;

static acr_status enqueue_repeated(void *arg, void *stream)
{
    repeated *r = arg;
    acr_status status = execution_enqueue(r->execution, stream);
    const bool again = r->extra && ++r->count % LAUNCHES == 0;
    return status == ACR_OK && again ? execution_enqueue(r->execution, stream) : status;
}

static acr_status sample_graph(void *arg, int count, double *seconds)
{
    acr__graph *graph = arg;
    return graph->device->backend->timing->graph_time(graph, count, seconds);
}

/* Two recordings of the same kernel, compared as the bench compares. noise_floor 0: that of this very comparison, which
 * *noise_floor becomes. */
static acr_status compare(world *w, execution *e, bool extra, double *noise_floor, stats_comparison *out)
{
    const acr__backend *backend = w->device->backend;
    const interleave_design design = {
        .blocks = INTERLEAVE_BLOCKS_PUBLISH, .warm_up_s = 50e-3, .budget_s = 20, .seed = 1};
    repeated plain = {e, false, 0}, other = {e, extra, 0};
    acr__graph *graphs[2] = {NULL, NULL};
    interleave_result r;
    acr_status status = backend->timing->graph_record(&graphs[0], w->device, enqueue_repeated, &plain, LAUNCHES);
    if (status == ACR_OK) {
        status = backend->timing->graph_record(&graphs[1], w->device, enqueue_repeated, &other, LAUNCHES);
    }
    if (status == ACR_OK) {
        const interleave_side baseline = {sample_graph, graphs[0]}, candidate = {sample_graph, graphs[1]};
        status = interleave_run(&r, &baseline, &candidate, &design);
    }
    if (status == ACR_OK) {
        *noise_floor = *noise_floor > 0 ? *noise_floor : stats_noise_floor(r.views, (size_t)r.blocks);
        *out = stats_compare(r.views, (size_t)r.blocks, *noise_floor);
        interleave_free(&r);
    }
    backend->timing->graph_free(graphs[0]);
    backend->timing->graph_free(graphs[1]);
    return status;
}

static void check_comparisons(world *w, execution *e, const char *problem)
{
    static const double INJECTED = 1.05, NEAR = 0.01;
    double noise_floor = 0;
    stats_comparison same, slower;
    char what[160], detail[160];
    if (!works(w, compare(w, e, false, &noise_floor, &same), "A/A") ||
        !works(w, compare(w, e, true, &noise_floor, &slower), "5 % more")) {
        return;
    }
    snprintf(what, sizeof what, "%s, a kernel against itself", problem);
    snprintf(detail, sizeof detail, "%s, ratio %.4f (%.4f - %.4f), noise floor %.2f %%",
             stats_verdict_text(same.verdict), same.speedup, same.ci95.low, same.ci95.high, 100 * noise_floor);
    report(w, same.verdict == STATS_SAME, what, detail);
    snprintf(what, sizeof what, "%s, against itself with 5 %% more to do", problem);
    snprintf(detail, sizeof detail, "%s, ratio %.4f (%.4f - %.4f), true %.4f", stats_verdict_text(slower.verdict),
             slower.speedup, slower.ci95.low, slower.ci95.high, 1 / INJECTED);
    report(w, slower.verdict == STATS_SLOWER && fabs(1 / slower.speedup - INJECTED) < NEAR, what, detail);
}

static void try_slowdown(world *w, const char *text)
{
    acr_problem problem;
    reference *ref = NULL;
    acr_plan *plan = NULL;
    execution *e = NULL;
    if (acr_problem_parse(&problem, text, NULL) != ACR_OK || acr_problem_canonical(&problem, &problem) != ACR_OK ||
        !make_reference(&ref, &problem) || acr_plan_create(&plan, w->ctx, &problem, ACR_ESTIMATE) != ACR_OK) {
        report(w, false, text, acr_last_error());
    } else if (works(w,
                     execution_create(&e, w->ctx, acr__kernel_find(acr_plan_kernel(plan)), &problem, ref, false, 0,
                                      ALLOCATOR_ALIGNMENT),
                     text)) {
        check_comparisons(w, e, text);
    }
    execution_destroy(e);
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
    try_slowdown(&w, "b2:h8:s512:d64");
    try_slowdown(&w, "b4:h16:s2048:d64");
    acr_ctx_destroy(w.ctx);
    printf("%d failed\n", w.failures);
    return w.failures > 0;
}
