/* The kernel to beat, see incumbent.h. */
#include "incumbent.h"

#include <math.h>

#include "bench/timed_kernel.h"
#include "bench/timer.h"
#include "definition.h"

/* Estimates are good enough to leave those out that are so much slower. */
static const double WORTH_TIMING = 4.0;

static bool eligible(const acr__kernel *kernel, const gates_problem *problems, size_t count, const acr__device *device)
{
    if (kernel->traits & ACR__TRAIT_NEVER_PLANNED) {
        return false;
    }
    for (size_t i = 0; i < count; ++i) {
        if (acr__why_not(kernel, &problems[i].problem, device)) {
            return false;
        }
    }
    return true;
}

/* The weighted mean of log seconds, by the kernel's own estimate. */
static double estimate(const acr__kernel *kernel, const gates_problem *problems, size_t count,
                       const acr__device *device)
{
    double sum = 0.0, weights = 0.0;
    for (size_t i = 0; i < count; ++i) {
        sum += problems[i].weight * log(kernel->cost(&problems[i].problem, device));
        weights += problems[i].weight;
    }
    return sum / weights;
}

static acr_status time_one(double *seconds, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                           const reference *ref)
{
    static const timer_limits limits = {20e-3, 0.2, 16, 48};
    timed_kernel *timed = NULL;
    timing t;
    watch unwatched = {.monitor = NULL};
    const timed_kernel_request asked = {
        .ctx = ctx, .kernel = kernel, .problem = problem, .ref = ref, .mode = MODE_STREAM, .seed = 1};
    acr_status status = timed_kernel_create(&timed, &asked);
    if (status == ACR_OK) {
        status = timer_series(&t, timed_kernel_sample, timed, &limits, &unwatched);
    }
    if (status == ACR_OK) {
        *seconds = 1e-6 * t.stats.p50;
    }
    timed_kernel_destroy(timed);
    return status;
}

/* The inputs that all kernels are timed on. */
static acr_status make_references(reference *refs[DEFINITION_PROBLEMS_MAX], const gates_problem *problems, size_t count,
                                  uint32_t threads)
{
    acr_status status = ACR_OK;
    for (size_t i = 0; i < count && status == ACR_OK; ++i) {
        const reference_request wanted = {.problem = &problems[i].problem,
                                          .inputs = INPUT_NORMAL,
                                          .seed = 1,
                                          .sampled_rows = 1,
                                          .lengths = LENGTHS_FULL,
                                          .threads = threads};
        status = reference_create(&refs[i], &wanted);
    }
    return status;
}

static acr_status measure(double *score, acr_ctx *ctx, const acr__kernel *kernel, const gates_problem *problems,
                          size_t count, reference *const refs[])
{
    double sum = 0.0, weights = 0.0;
    acr_status status = ACR_OK;
    for (size_t i = 0; i < count && status == ACR_OK; ++i) {
        double seconds = 0.0;
        status = time_one(&seconds, ctx, kernel, &problems[i].problem, refs[i]);
        sum += problems[i].weight * log(seconds);
        weights += problems[i].weight;
    }
    *score = sum / weights;
    return status;
}

/* The best of those that the cost models like; refs: NULL = by the models alone. */
static acr_status choose(const acr__kernel **out, acr_ctx *ctx, const gates_problem *problems, size_t count,
                         reference *const refs[])
{
    const acr__device *device = &acr__ctx_backend_device(ctx)->device;
    double lowest = INFINITY, best = INFINITY;
    for (size_t i = 0; i < acr__kernel_count; ++i) {
        if (eligible(acr__kernels[i], problems, count, device)) {
            lowest = fmin(lowest, estimate(acr__kernels[i], problems, count, device));
        }
    }
    *out = NULL;
    for (size_t i = 0; i < acr__kernel_count; ++i) {
        const acr__kernel *kernel = acr__kernels[i];
        if (!eligible(kernel, problems, count, device)) {
            continue;
        }
        double score = estimate(kernel, problems, count, device);
        if (score > lowest + log(WORTH_TIMING)) {
            continue;
        }
        acr_status status = refs ? measure(&score, ctx, kernel, problems, count, refs) : ACR_OK;
        if (status != ACR_OK) {
            return status;
        }
        if (score < best) {
            best = score;
            *out = kernel;
        }
    }
    return *out ? ACR_OK : acr__fail(ACR_UNSUPPORTED, "no kernel of the table runs all of these problems");
}

acr_status incumbent_find(const acr__kernel **out, acr_ctx *ctx, const gates_problem *problems, size_t count,
                          bool by_cost, uint32_t threads)
{
    reference *refs[DEFINITION_PROBLEMS_MAX] = {NULL};
    acr_status status = by_cost ? ACR_OK : make_references(refs, problems, count, threads);
    if (status == ACR_OK) {
        status = choose(out, ctx, problems, count, by_cost ? NULL : refs);
    }
    for (size_t i = 0; i < count; ++i) {
        reference_destroy(refs[i]);
    }
    return status;
}
