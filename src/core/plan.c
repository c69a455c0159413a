/* Planning: candidates -> wisdom, estimate or measurement -> a plan.
 *
 * A kernel is a candidate when its why_not is silent. Wisdom of sufficient effort decides at once; else ESTIMATE takes
 * the lowest cost, and MEASURE and PATIENT time the candidates side by side on the device, in scratch memory, and
 * remember the winner. */
#include "plan.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "context.h"
#include "internal.h"
#include "packed_image.h"

enum {
    MAX_CANDIDATES = 256
};

/* ---- What can run ------------------------------------------------------------------------------------------------ */

/* "qk_dim is 300, the kernel serves up to 256"; valid until the thread's next call. */
static const char *over_limit(const char *field, int64_t value, int32_t limit)
{
    static _Thread_local char reason[96];
    snprintf(reason, sizeof reason, "%s is %lld, the kernel serves up to %d", field, (long long)value, (int)limit);
    return reason;
}

/* "compute capability is 8.6, the kernel needs 8.9"; valid until the thread's next call. */
static const char *below_capability(int32_t arch, int32_t arch_min)
{
    static _Thread_local char reason[96];
    snprintf(reason, sizeof reason, "compute capability is %d.%d, the kernel needs %d.%d", (int)arch / 10,
             (int)arch % 10, (int)arch_min / 10, (int)arch_min % 10);
    return reason;
}

const char *acr__why_not(const acr__kernel *kernel, const acr_problem *problem, const acr__device *device)
{
    if (kernel->backend != device->backend)
        return kernel->backend == ACR__CUDA ? "runs on a GPU only" : "runs on the CPU only";
    if (kernel->pass != problem->pass)
        return problem->pass == ACR_BACKWARD ? "pass is bwd, the kernel computes the forward pass"
                                             : "pass is fwd, the kernel computes gradients";
    if (kernel->dtype != problem->dtype)
        return "dtype is another than the kernel's";
    if (kernel->backend == ACR__CUDA && device->arch < kernel->arch_min)
        return below_capability(device->arch, kernel->arch_min);
    if (kernel->backend == ACR__CUDA && device->arch > kernel->arch_max)
        return "the kernel's machine code is for an older compute capability only";
    if (kernel->backend == ACR__CUDA && device->ptx_only && !acr__kernel_has_ptx(kernel))
        return "the kernel has no PTX, and ACR_FORCE_PTX leaves machine code aside";
    if (problem->qk_dim > kernel->qk_dim_max)
        return over_limit("qk_dim", problem->qk_dim, kernel->qk_dim_max);
    if (problem->v_dim > kernel->v_dim_max)
        return over_limit("v_dim", problem->v_dim, kernel->v_dim_max);
    if (problem->flags & ACR_PACKED && !(kernel->traits & ACR__TRAIT_PACKED))
        return "packed: the kernel serves no packed batches (ACR_PACKED)";
    if ((problem->window_left || problem->window_right) && kernel->traits & ACR__TRAIT_NEVER_PLANNED) /* the ladder */
        return "window: the kernel serves no sliding window (window_left, window_right)";
    const char *reason = acr__out_why_not(kernel, problem);
    if (!reason)
        reason = acr__terms_why_not(kernel->terms, problem);
    if (!reason)
        reason = acr__cache_why_not(kernel, problem);
    return reason ? reason : kernel->why_not(problem, device);
}

const acr__kernel *acr__kernel_find(const char *name)
{
    for (size_t i = 0; i < acr__kernel_count; i++)
        if (strcmp(acr__kernels[i]->name, name) == 0)
            return acr__kernels[i];
    return NULL;
}

uint64_t acr__kernel_digest(const acr__kernel *kernel)
{
    const size_t bytes = (size_t)(kernel->image_end - kernel->image);
    acr__packed_image packed;
    return acr__read_packed(&packed, kernel->image, bytes) ? packed.code_digest : XXH3_64bits(kernel->image, bytes);
}

/* ---- Estimate ---------------------------------------------------------------------------------------------------- */

typedef struct candidate {
    const acr__kernel *kernel;
    double cost_s;
} candidate;

/* By cost, cheapest first; equal costs in the table's order (the sort is stable by insertion). */
static int list_candidates(const acr_problem *problem, const acr__device *device, candidate list[MAX_CANDIDATES])
{
    int count = 0;
    for (size_t i = 0; i < acr__kernel_count && count < MAX_CANDIDATES; i++) {
        const acr__kernel *kernel = acr__kernels[i];
        if (kernel->traits & ACR__TRAIT_NEVER_PLANNED || acr__why_not(kernel, problem, device))
            continue;
        const candidate c = {kernel, kernel->cost(problem, device)};
        int at = count++;
        for (; at > 0 && list[at - 1].cost_s > c.cost_s; at--)
            list[at] = list[at - 1];
        list[at] = c;
    }
    return count;
}

const acr__kernel *acr__choose(const acr_problem *problem, const acr__device *device)
{
    candidate list[MAX_CANDIDATES];
    return list_candidates(problem, device, list) > 0 ? list[0].kernel : NULL;
}

/* No kernel can: the reason of the most general kernel of this backend and type is the most telling. */
static acr_status fail_unsupported(const acr_problem *problem, const acr__device *device, const char *text)
{
    const acr__kernel *nearest = NULL;
    for (size_t i = 0; i < acr__kernel_count; i++) {
        const acr__kernel *kernel = acr__kernels[i];
        if (kernel->backend != device->backend || kernel->pass != problem->pass || kernel->dtype != problem->dtype ||
            kernel->traits & ACR__TRAIT_NEVER_PLANNED)
            continue;
        if (!nearest || kernel->traits & ACR__TRAIT_LAST_RESORT)
            nearest = kernel;
    }
    if (!nearest)
        return acr__fail(ACR_UNSUPPORTED, "%s: no %s kernel for %sdtype %s exists yet", text,
                         device->backend == ACR__CUDA ? "cuda" : "cpu",
                         problem->pass == ACR_BACKWARD ? "pass bwd and " : "", acr__dtype_text(problem->dtype));
    return acr__fail(ACR_UNSUPPORTED, "%s: no kernel can run this on %s; the most general, %s: %s", text, device->name,
                     nearest->name, acr__why_not(nearest, problem, device));
}

/* ---- Measure ----------------------------------------------------------------------------------------------------- */

/* Scratch buffers of a problem, filled with noise: the caller's data are never touched by measuring. */
typedef struct scratch {
    acr__backend_device *device;
    void *memory[ACR__BUFFERS];
    acr_buffers buffers;
    void *workspace;
} scratch;

static void free_scratch(scratch *s)
{
    for (int i = 0; i < ACR__BUFFERS; i++)
        if (s->memory[i])
            s->device->backend->mem_free(s->device, s->memory[i]);
    if (s->workspace)
        s->device->backend->mem_free(s->device, s->workspace);
}

/* Roughly normal values, so that the arithmetic units and the power they draw see realistic data. */
static acr_status upload_noise(scratch *s, void *to, int64_t bytes, acr_dtype dtype)
{
    enum {
        CHUNK_BYTES = 1 << 20
    };
    unsigned char *chunk = malloc(CHUNK_BYTES);
    if (!chunk)
        return acr__fail(ACR_NO_MEMORY, "no memory for the scratch data of measuring");
    uint64_t state = 0x9e3779b97f4a7c15u;
    const int64_t chunk_bytes = bytes < CHUNK_BYTES ? bytes : CHUNK_BYTES;
    for (int64_t i = 0; i < chunk_bytes / acr__dtype_bytes(dtype); i++) {
        double sum = -6.0; /* twelve uniform numbers: mean 0, variance 1 */
        for (int j = 0; j < 12; j++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            sum += (double)(state >> 40) * 0x1p-24;
        }
        acr__store_element(dtype, chunk, i, sum);
    }
    acr_status status = ACR_OK;
    for (int64_t done = 0; done < bytes && status == ACR_OK; done += CHUNK_BYTES) {
        const int64_t part = bytes - done < CHUNK_BYTES ? bytes - done : CHUNK_BYTES;
        status = s->device->backend->mem_upload(s->device, (char *)to + done, chunk, (size_t)part);
    }
    free(chunk);
    return status;
}

static acr_status upload_floats(scratch *s, void *to, int64_t count, float value)
{
    float *values = malloc((size_t)count * sizeof *values);
    if (!values)
        return acr__fail(ACR_NO_MEMORY, "no memory for the scratch data of measuring");
    for (int64_t i = 0; i < count; i++)
        values[i] = value;
    const acr_status status = s->device->backend->mem_upload(s->device, to, values, (size_t)count * sizeof *values);
    free(values);
    return status;
}

/* first + i * step for i in [0, count). */
static acr_status upload_numbers(scratch *s, void *to, int64_t count, int64_t first, int64_t step)
{
    int32_t *numbers = malloc((size_t)count * sizeof *numbers);
    if (!numbers)
        return acr__fail(ACR_NO_MEMORY, "no memory for the scratch data of measuring");
    for (int64_t i = 0; i < count; i++)
        numbers[i] = (int32_t)(first + i * step);
    const acr_status status = s->device->backend->mem_upload(s->device, to, numbers, (size_t)count * sizeof *numbers);
    free(numbers);
    return status;
}

/* Every page once, in no order, as caches have them after a while. */
static acr_status upload_table(scratch *s, void *to, int64_t pages)
{
    int32_t *table = malloc((size_t)pages * sizeof *table);
    uint64_t state = 0x9e3779b97f4a7c15u;
    if (!table)
        return acr__fail(ACR_NO_MEMORY, "no memory for the scratch data of measuring");
    for (int64_t i = 0; i < pages; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const int64_t at = (int64_t)((state >> 33) % (uint64_t)(i + 1));
        table[i] = table[at];
        table[at] = (int32_t)i;
    }
    const acr_status status = s->device->backend->mem_upload(s->device, to, table, (size_t)pages * sizeof *table);
    free(table);
    return status;
}

/* Every entry has its longest length. What terms read hides no key, padding and ranges are empty, sinks and slopes are
 * 0: the work is that of other values. A backward pass' log-sum-exp is what rows of noise have, log(kv_len) + 1/2, so
 * that no gradient is infinite: such are computed again, and that would be timed. */
static acr_status fill_input(scratch *s, const acr_problem *p, acr__buffer which, int64_t bytes)
{
    enum {
        EVERY_BIT = 0xff,
        TRUE_BYTE = 1
    };
    void *to = s->memory[which];
    switch (which) {
    case ACR__KV_LENS:
        return upload_numbers(s, to, p->batch, p->kv_len, 0);
    case ACR__Q_OFFSETS:
        return upload_numbers(s, to, p->batch + 1, 0, p->q_len);
    case ACR__KV_OFFSETS:
        return upload_numbers(s, to, p->batch + 1, 0, p->kv_len);
    case ACR__PAGE_TABLE:
        return upload_table(s, to, s->buffers.pages);
    case ACR__K:
    case ACR__V:
        return upload_noise(s, to, bytes, acr__kv_dtype(p));
    case ACR__BIAS:
        return p->bias_dtype == ACR_BOOL8 ? s->device->backend->mem_fill(s->device, to, TRUE_BYTE, (size_t)bytes)
                                          : upload_noise(s, to, bytes, p->bias_dtype);
    case ACR__TREE:
        return s->device->backend->mem_fill(s->device, to, EVERY_BIT, (size_t)bytes);
    case ACR__LSE:
        return upload_floats(s, to, bytes / (int64_t)sizeof(float), (float)log((double)p->kv_len) + 0.5f);
    default:
        return acr__is_tensor(which) ? upload_noise(s, to, bytes, p->dtype)
                                     : s->device->backend->mem_fill(s->device, to, 0, (size_t)bytes);
    }
}

static acr_status make_scratch(scratch *s, acr__backend_device *device, const acr_problem *p, size_t workspace_bytes)
{
    *s = (scratch){.device = device, .buffers = ACR_BUFFERS_INIT};
    const bool packed = p->flags & ACR_PACKED, paged = p->flags & ACR_PAGED;
    const int64_t sequences = packed ? p->batch : 1, pages = acr__pages_of_entry(p);
    const acr__rows rows = {sequences * p->q_len, sequences * p->kv_len, p->batch * pages, pages};
    if (rows.pages > INT32_MAX)
        return acr__fail(ACR_UNSUPPORTED, "%lld entries of %lld keys in pages of %d are too many to be measured",
                         (long long)p->batch, (long long)p->kv_len, (int)p->page);
    if (packed && (rows.q > INT32_MAX || rows.kv > INT32_MAX))
        return acr__fail(ACR_UNSUPPORTED, "a packed batch of %lld x %lld / %lld rows is too long to be measured",
                         (long long)p->batch, (long long)p->q_len, (long long)p->kv_len);
    s->buffers.q_total = packed ? rows.q : 0;
    s->buffers.kv_total = packed && !paged ? rows.kv : 0;
    s->buffers.pages = rows.pages;
    s->buffers.table_stride = rows.table_stride;
    acr_status status = ACR_OK;
    for (acr__buffer i = 0; i < ACR__BUFFERS && status == ACR_OK; i++) {
        if (!acr__buffer_is_wanted(p, i))
            continue;
        const int64_t bytes = acr__buffer_bytes(p, i, rows);
        status = device->backend->mem_alloc(device, (size_t)bytes, &s->memory[i]);
        if (status == ACR_OK && !acr__is_output(p, i))
            status = fill_input(s, p, i, bytes);
        acr__set_pointer_at(&s->buffers, acr__buffer_fields[i].in_buffers, s->memory[i]);
    }
    if (status == ACR_OK && workspace_bytes > 0)
        status = device->backend->mem_alloc(device, workspace_bytes, &s->workspace);
    if (status != ACR_OK)
        free_scratch(s);
    return status;
}

enum {
    MAX_ROUNDS = 21,
    REPLAYS = 3
};

/* A candidate in the race. */
typedef struct runner {
    acr__prepared *prepared;
    acr__args args;
    double samples_s[MAX_ROUNDS * REPLAYS];
    int sample_count;
    int launches; /* in one replay */
    double median_s;
} runner;

static acr_status enqueue_runner(void *arg, void *stream)
{
    const runner *r = arg;
    return r->prepared->device->backend->launch(r->prepared, &r->args.fwd, 0, stream);
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(const double *values, int count, double around, bool deviations)
{
    double sorted[MAX_ROUNDS * REPLAYS];
    for (int i = 0; i < count; i++)
        sorted[i] = deviations ? (values[i] > around ? values[i] - around : around - values[i]) : values[i];
    qsort(sorted, (size_t)count, sizeof *sorted, compare_doubles);
    return count % 2 ? sorted[count / 2] : 0.5 * (sorted[count / 2 - 1] + sorted[count / 2]);
}

/* One turn of a runner: a few replays, each long enough for the clock. */
static acr_status run_turn(runner *r, acr__backend_device *device)
{
    static const double REPLAY_S = 200e-6;
    if (r->sample_count == 0) { /* the first turn also finds how many launches make a replay */
        double once_s;
        const acr_status status = device->backend->time(device, enqueue_runner, r, 1, 1, &once_s);
        if (status != ACR_OK)
            return status;
        const double launches = once_s > 0.0 ? REPLAY_S / once_s : 20.0;
        r->launches = launches < 1.0 ? 1 : launches > 100.0 ? 100 : (int)launches;
    }
    const acr_status status =
        device->backend->time(device, enqueue_runner, r, r->launches, REPLAYS, &r->samples_s[r->sample_count]);
    if (status != ACR_OK)
        return status;
    r->sample_count += REPLAYS;
    r->median_s = median_of(r->samples_s, r->sample_count, 0.0, false);
    return ACR_OK;
}

/* Rounds in which every candidate still in the race has a turn, so that drifting clocks touch all alike. After the
 * first round those twice as slow as the best drop out. */
static acr_status race(runner *runners, int count, int rounds, acr__backend_device *device, int *winner)
{
    double best_s = 0.0;
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < count; i++) {
            if (round > 0 && runners[i].median_s > 2.0 * best_s)
                continue;
            const acr_status status = run_turn(&runners[i], device);
            if (status != ACR_OK)
                return status;
        }
        *winner = 0;
        for (int i = 1; i < count; i++)
            if (runners[i].median_s < runners[*winner].median_s)
                *winner = i;
        best_s = runners[*winner].median_s; /* NOLINT(clang-analyzer-unix.Malloc): count is at least 1 */
    }
    return ACR_OK;
}

/* How many of the candidates, cheapest first, are worth timing. */
static int candidates_to_time(const candidate *list, int count, acr_effort effort)
{
    enum {
        MEASURE_MOST = 6
    };
    static const double MEASURE_WITHIN = 4.0; /* times the lowest cost: cost models err by less */
    if (effort == ACR_PATIENT)
        return count;
    int n = 0;
    while (n < count && n < MEASURE_MOST && list[n].cost_s <= MEASURE_WITHIN * list[0].cost_s)
        n++;
    return n;
}

static acr_status prepare_runners(runner *runners, const candidate *list, int count, acr__backend_device *device,
                                  const acr_problem *p)
{
    for (int i = 0; i < count; i++) {
        const acr_status status = device->backend->prepare(&runners[i].prepared, device, list[i].kernel, p);
        if (status != ACR_OK)
            return status;
    }
    return ACR_OK;
}

/* Times candidates side by side; afterwards runners[i] holds what was seen of list[i]. The caller frees with
 * release_runners, after a failure too. */
static acr_status time_candidates(runner *runners, const candidate *list, int count, acr__backend_device *device,
                                  const acr_problem *p, int rounds, int *winner)
{
    acr_status status = prepare_runners(runners, list, count, device, p);
    size_t workspace_bytes = 0;
    for (int i = 0; i < count && status == ACR_OK; i++)
        if (runners[i].prepared->workspace_bytes > workspace_bytes)
            workspace_bytes = runners[i].prepared->workspace_bytes;
    scratch s = {0};
    if (status == ACR_OK)
        status = make_scratch(&s, device, p, workspace_bytes);
    if (status != ACR_OK)
        return status;
    for (int i = 0; i < count; i++)
        acr__fill_args(&runners[i].args, p, &s.buffers, s.workspace);
    if (s.workspace)
        status = device->backend->mem_fill(device, s.workspace, 0, workspace_bytes);
    if (status == ACR_OK)
        status = race(runners, count, rounds, device, winner);
    free_scratch(&s);
    return status;
}

static void release_runners(runner *runners, int count, acr__backend_device *device)
{
    for (int i = 0; i < count; i++)
        if (runners[i].prepared)
            device->backend->release(runners[i].prepared);
    free(runners);
}

/* Times the candidates and fills in the fact about the winner. */
static acr_status measure(acr__backend_device *device, const acr_problem *p, const candidate *list, int count,
                          acr_effort effort, acr__fact *fact)
{
    runner *runners = calloc((size_t)count, sizeof *runners);
    if (!runners)
        return acr__fail(ACR_NO_MEMORY, "no memory to time %d kernels", count);
    int winner = 0;
    const acr_status status =
        time_candidates(runners, list, count, device, p, effort == ACR_PATIENT ? MAX_ROUNDS : 5, &winner);
    if (status == ACR_OK) {
        const runner *best = &runners[winner];
        snprintf(fact->kernel, sizeof fact->kernel, "%s", list[winner].kernel->name);
        fact->digest = acr__kernel_digest(list[winner].kernel);
        fact->effort = effort;
        fact->median_ns = 1e9 * best->median_s;
        fact->mad_ns = 1e9 * median_of(best->samples_s, best->sample_count, best->median_s, true);
        fact->samples = (uint32_t)best->sample_count;
    }
    release_runners(runners, count, device);
    return status;
}

acr_status acr__survey(acr__surveyed *out, int capacity, int *count, acr_ctx *ctx, const acr_problem *problem)
{
    enum {
        ROUNDS = 7
    };
    candidate list[MAX_CANDIDATES];
    const int candidates = list_candidates(problem, &ctx->device->device, list);
    const int timed = candidates < capacity ? candidates : capacity;
    *count = 0;
    if (timed <= 0)
        return ACR_OK;
    runner *runners = calloc((size_t)timed, sizeof *runners);
    if (!runners)
        return acr__fail(ACR_NO_MEMORY, "no memory to time %d kernels", timed);
    int winner = 0;
    const acr_status status = time_candidates(runners, list, timed, ctx->device, problem, ROUNDS, &winner);
    for (int i = 0; i < timed && status == ACR_OK; i++)
        out[i] = (acr__surveyed){list[i].kernel, list[i].cost_s, runners[i].median_s, runners[i].sample_count};
    release_runners(runners, timed, ctx->device);
    if (status == ACR_OK)
        *count = timed;
    return status;
}

/* ---- Making a plan ----------------------------------------------------------------------------------------------- */

/* A choice and the words that explain it. */
typedef struct choice {
    const acr__kernel *kernel;
    double seconds; /* that an execution is expected to take */
    char why[160];
} choice;

static void explain_fact(choice *c, const acr__fact *fact, const char *source)
{
    c->kernel = acr__kernel_find(fact->kernel);
    c->seconds = fact->median_ns * 1e-9;
    snprintf(c->why, sizeof c->why, "%s: %.2f us, effort %s, %u samples", source, fact->median_ns * 1e-3,
             fact->effort == ACR_PATIENT ? "patient" : "measure", fact->samples);
}

/* True when the context's wisdom answers at this effort. */
static bool choose_by_wisdom(choice *c, acr_ctx *ctx, const char *text, acr_effort effort)
{
    const bool any = effort == ACR_ESTIMATE || effort == ACR_WISDOM_ONLY;
    pthread_mutex_lock(&ctx->lock);
    const acr__fact *fact = acr__wisdom_find(ctx->wisdom, text);
    const bool found = fact && (any || fact->effort >= effort) && acr__wisdom_usable(fact, &ctx->device->device);
    if (found)
        explain_fact(c, fact, "wisdom");
    pthread_mutex_unlock(&ctx->lock);
    return found;
}

static acr_status choose_by_measuring(choice *c, acr_ctx *ctx, const acr_problem *p, const candidate *list, int count,
                                      acr_effort effort)
{
    acr__fact fact = {0};
    acr_status status = acr__wisdom_problem(fact.problem, p);
    if (status == ACR_OK)
        status = measure(ctx->device, p, list, candidates_to_time(list, count, effort), effort, &fact);
    if (status != ACR_OK)
        return status;
    explain_fact(c, &fact, "measured");
    pthread_mutex_lock(&ctx->lock);
    status = acr__wisdom_put(ctx->wisdom, &fact);
    pthread_mutex_unlock(&ctx->lock);
    return status;
}

static acr_status choose(choice *c, acr_ctx *ctx, const acr_problem *p, const char *text, acr_effort effort)
{
    char key[ACR_PROBLEM_TEXT_MAX];
    const acr_status status = acr__wisdom_problem(key, p);
    if (status != ACR_OK || choose_by_wisdom(c, ctx, key, effort))
        return status;
    if (effort == ACR_WISDOM_ONLY)
        return acr__fail(ACR_NO_WISDOM, "%s: no usable wisdom for it on %s", text, ctx->device->device.name);
    candidate list[MAX_CANDIDATES];
    const int count = list_candidates(p, &ctx->device->device, list);
    if (count == 0)
        return fail_unsupported(p, &ctx->device->device, text);
    if (effort != ACR_ESTIMATE)
        return choose_by_measuring(c, ctx, p, list, count, effort);
    c->kernel = list[0].kernel;
    c->seconds = list[0].cost_s;
    snprintf(c->why, sizeof c->why, "estimate: %.2f us, best of %d kernels that can run it%s", list[0].cost_s * 1e6,
             count, list[0].kernel->traits & ACR__TRAIT_LAST_RESORT ? "; the kernel of last resort, slow" : "");
    return ACR_OK;
}

static acr_status make_plan(acr_plan **out, acr_ctx *ctx, const acr_problem *p, const char *text, const choice *c,
                            int pins)
{
    acr_plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return acr__fail(ACR_NO_MEMORY, "no memory for a plan");
    acr__backend_device *device = ctx->device;
    const acr_status status = device->backend->prepare(&plan->prepared, device, c->kernel, p);
    if (status != ACR_OK) {
        free(plan);
        return status;
    }
    plan->problem = *p;
    plan->seconds = c->seconds;
    for (acr__buffer i = 0; i < ACR__BUFFERS; i++)
        if (acr__buffer_fields[i].wanted_by) {
            plan->settled |= 1u << i;
            plan->wanted |= acr__buffer_is_wanted(p, i) ? 1u << i : 0u;
        }
    for (int i = 0; i < acr__tensor_count(p) && !(p->flags & (ACR_PACKED | ACR_PAGED)); i++)
        plan->span_bytes[acr__tensors[i]] =
            acr__buffer_bytes(p, acr__tensors[i], (acr__rows){p->q_len, p->kv_len, 0, 0});
    snprintf(plan->text, sizeof plan->text, "%s: %s (%s)", text, c->kernel->name, c->why);
    if (pins) {
        acr__ctx_retain(ctx);
        plan->ctx = ctx;
    }
    *out = plan;
    return ACR_OK;
}

acr_status acr__plan_make(acr_plan **out, acr_ctx *ctx, const acr_problem *canonical, acr_effort effort, int pins)
{
    char text[ACR_PROBLEM_TEXT_MAX];
    choice c;
    acr_status status = acr_problem_format(canonical, text, sizeof text);
    if (status == ACR_OK)
        status = choose(&c, ctx, canonical, text, effort);
    return status == ACR_OK ? make_plan(out, ctx, canonical, text, &c, pins) : status;
}

acr_status acr__plan_create_forced(acr_plan **out, acr_ctx *ctx, const acr_problem *problem, const acr__kernel *kernel)
{
    acr_problem p;
    char text[ACR_PROBLEM_TEXT_MAX];
    acr_status status = acr_problem_canonical(&p, problem);
    if (status != ACR_OK || (status = acr_problem_format(&p, text, sizeof text)) != ACR_OK)
        return status;
    const char *reason = acr__why_not(kernel, &p, &ctx->device->device);
    if (reason)
        return acr__fail(ACR_UNSUPPORTED, "%s cannot run %s: %s", kernel->name, text, reason);
    const choice c = {kernel, kernel->cost(&p, &ctx->device->device), "forced"};
    return make_plan(out, ctx, &p, text, &c, 1);
}

acr_status acr_estimate_seconds(double *out, acr_ctx *ctx, const acr_problem *problem)
{
    if (!out || !ctx || !problem)
        return acr__fail(ACR_INVALID, "%s is NULL", !out ? "out" : ctx ? "problem" : "ctx");
    acr_problem p;
    char text[ACR_PROBLEM_TEXT_MAX];
    choice c;
    acr_status status = acr_problem_canonical(&p, problem);
    if (status == ACR_OK)
        status = acr_problem_format(&p, text, sizeof text);
    if (status == ACR_OK)
        status = choose(&c, ctx, &p, text, ACR_ESTIMATE);
    if (status == ACR_OK)
        *out = c.seconds;
    return status;
}
