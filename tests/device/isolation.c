/* What must not reach an output row: values that a mask hides from it, other rows, and memory behind the tensors.
 * Checks of a kernel on a problem, beside those of `acromion check`, whose inputs are finite and lie between guards:
 *
 * - rows: one query row of each head is NaN, infinite or huge. The other rows, output and log-sum-exp, are bit for bit
 *   what they are without it; and a row is bit for bit the same when all others are zero.
 * - hidden: some values of V are NaN or infinite. Outputs of rows that see one are not finite, in its column; all
 *   others are as if it were not there, since 0 * NaN has to stay out of them.
 * - exact: each tensor ends with its allocation, so that a read of one row too many is a fault of the PTX machine (and
 *   of compute-sanitizer).
 * - matched: each query is twice some key, which takes nearly all the weight if the row sees it: a key at an edge of
 *   the mask, the key beyond that edge, or any key. So one key too many or too few moves a row by the size of a value,
 *   where inputs that know nothing of each other move it by less than rounding does.
 *
 * Of a backward problem, in place of these: some elements of each of q, k, v and d_o in turn are NaN or infinite.
 * Gradients that the oracle finds finite are as if those were not there, the others are not finite.
 *
 *     isolation cpu|cuda KERNEL PROBLEM...      KERNEL: a name, a family or a pattern, as of `acromion check -k`
 *     isolation --rows cpu|cuda KERNEL PROBLEM...      the first check alone
 *     isolation --in-turn cpu|cuda KERNEL PROBLEM...   every other of the problems that a kernel can run, of the next
 *                                                      kernel those between
 *
 * Prints each failure and then "N cases passed, M failed"; exits 0 when all passed and there were any. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/conformance.h"
#include "check/oracle.h"
#include "kernels/kernel_choice.h"
#include "paging.h"

typedef struct tally {
    int passed, failed;
} tally;

static void report(tally *t, const char *check, const acr__kernel *kernel, const acr_problem *problem,
                   const char *failure)
{
    char text[ACR_PROBLEM_TEXT_MAX];
    if (failure[0] == '\0') {
        ++t->passed;
        return;
    }
    ++t->failed;
    acr_problem_format(problem, text, sizeof text);
    printf("FAIL %s %s %s: %s\n", check, kernel->name, text, failure);
    fflush(stdout);
}

/* ---- Other rows ---- */

/* What a row is made beside others that stay as they are. */
typedef struct disturbance {
    const char *name;
    double value;  /* of all elements; or, where it is 0, */
    double factor; /* times what the element was */
    bool others;   /* the row stays as it is, and all others become this */
} disturbance;

static const disturbance disturbances[] = {
    {"beside NaN", NAN, 0.0, false},
    {"beside infinity", INFINITY, 0.0, false},
    {"beside a row of large scores", 0.0, 64.0, false},
    {"alone", 0.0, 0.0, true},
};

/* In each head of each entry the row that is disturbed, or spared. */
static int64_t chosen_row(const reference *ref, int64_t head, uint64_t seed)
{
    return (int64_t)(random_bits(seed, 102, (uint64_t)head) % (uint64_t)ref->q_rows);
}

static bool is_chosen(const reference *ref, int64_t row, uint64_t seed)
{
    return row % ref->q_rows == chosen_row(ref, row / ref->q_rows, seed);
}

static void disturb_rows(const reference *ref, const void *before, const disturbance *d, uint64_t seed)
{
    const acr_problem *p = &ref->problem;
    const double largest = p->dtype == ACR_E4M3 ? 448.0 : 60000.0;
    for (int64_t i = 0; i < ref->entries * p->q_heads * ref->q_rows * p->qk_dim; ++i) {
        double value = acr__load_element(p->dtype, before, i);
        if (is_chosen(ref, i / p->qk_dim, seed) != d->others) {
            value = d->value != 0.0 ? d->value : fmax(-largest, fmin(largest, value * d->factor));
        }
        acr__store_element(p->dtype, (void *)ref->buffers.q, i, value);
    }
}

static void judge_rows(char *failure, size_t size, const reference *ref, const run_output *before,
                       const run_output *after, const disturbance *d, uint64_t seed)
{
    const size_t row_bytes = (size_t)(ref->problem.v_dim * acr__dtype_bytes(ref->problem.out_dtype));
    int64_t changed = 0, compared = 0;
    row_place first = {0};
    for (int64_t i = 0; i < ref->rows; ++i) {
        const row_place at = reference_row(ref, i);
        const size_t from = (size_t)at.row * row_bytes;
        if (is_chosen(ref, at.row, seed) != d->others) {
            continue;
        }
        ++compared;
        if (memcmp((char *)before->o + from, (char *)after->o + from, row_bytes) != 0 ||
            (before->lse && memcmp(&before->lse[at.row], &after->lse[at.row], sizeof(float)) != 0)) {
            first = changed++ == 0 ? at : first;
        }
    }
    if (changed > 0) {
        snprintf(failure, size, "%s: %lld of %lld rows have other bits, the first of them [%lld,%lld,%lld]", d->name,
                 (long long)changed, (long long)compared, (long long)first.batch, (long long)first.head,
                 (long long)first.position);
    }
}

/* Of the inputs as they are in `ref`. */
static acr_status run_reference(run_output *output, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                                const reference *ref)
{
    execution *e = NULL;
    acr_status status = execution_create(&e, ctx, kernel, problem, ref, false, 0, 0);
    if (status == ACR_OK) {
        status = execution_run(e);
    }
    if (status == ACR_OK) {
        status = execution_collect(e, output);
    }
    execution_destroy(e);
    return status;
}

static acr_status check_rows(tally *t, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                             const reference *ref, uint64_t seed)
{
    const acr_problem *p = &ref->problem;
    const size_t q_bytes = (size_t)(ref->entries * p->q_heads * ref->q_rows * p->qk_dim * acr__dtype_bytes(p->dtype));
    run_output whole = {.o = NULL};
    void *q = malloc(q_bytes);
    if (!q) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the queries");
    }
    memcpy(q, ref->buffers.q, q_bytes);
    acr_status status = run_reference(&whole, ctx, kernel, problem, ref);
    for (size_t i = 0; i < sizeof disturbances / sizeof disturbances[0] && status == ACR_OK; ++i) {
        char failure[256] = "";
        run_output output = {.o = NULL};
        if (p->dtype == ACR_E4M3 && isinf(disturbances[i].value)) {
            continue; /* it knows no infinity */
        }
        disturb_rows(ref, q, &disturbances[i], seed);
        status = run_reference(&output, ctx, kernel, problem, ref);
        if (status == ACR_OK) {
            judge_rows(failure, sizeof failure, ref, &whole, &output, &disturbances[i], seed);
            report(t, "rows", kernel, problem, failure);
        }
        run_output_free(&output);
    }
    memcpy((void *)ref->buffers.q, q, q_bytes);
    run_output_free(&whole);
    free(q);
    return status;
}

/* ---- Hidden values ---- */

/* Puts values that are not finite into V: in each head of each entry three keys, each in two of its columns. e4m3 knows
 * no infinity. */
static void spoil_values(const reference *ref, uint64_t seed)
{
    const acr_problem *p = &ref->problem;
    const acr_dtype type = acr__kv_dtype(p);
    const double values[] = {NAN, INFINITY, -INFINITY};
    for (int64_t head = 0; head < ref->entries * p->kv_heads; ++head) {
        for (unsigned i = 0; i < 6; ++i) {
            const uint64_t key_bits = random_bits(seed, 100, (uint64_t)head * 3 + i / 2);
            const uint64_t column_bits = random_bits(seed, 101, (uint64_t)head * 6 + i);
            const int64_t key = (int64_t)(key_bits % (uint64_t)ref->kv_rows);
            const int64_t column = (int64_t)(column_bits % (uint64_t)p->v_dim);
            acr__store_element(type, (void *)ref->buffers.v, (head * ref->kv_rows + key) * p->v_dim + column,
                               type == ACR_E4M3 ? NAN : values[i / 2]);
        }
    }
}

static void judge_hidden(char *failure, size_t size, const reference *ref, const run_output *output,
                         const double *expected)
{
    const acr_problem *p = &ref->problem;
    for (int64_t i = 0; i < ref->rows * p->v_dim; ++i) {
        const row_place at = reference_row(ref, i / p->v_dim);
        const double got = acr__load_element(p->out_dtype, output->o, at.row * p->v_dim + i % p->v_dim);
        if (isfinite(expected[i]) ? fabs(got - expected[i]) <= ref->tol_max : !isfinite(got)) {
            continue;
        }
        snprintf(failure, size, "o[%lld,%lld,%lld,%lld]: got %.6g, expected %.6g, tolerance %.3g", (long long)at.batch,
                 (long long)at.head, (long long)at.position, (long long)(i % p->v_dim), got, expected[i], ref->tol_max);
        return;
    }
}

static acr_status check_hidden(tally *t, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                               reference *ref, uint64_t seed)
{
    char failure[256] = "";
    const acr_problem *p = &ref->problem;
    const acr_buffers buffers = ref->buffers;
    double *expected = malloc((size_t)(ref->rows * p->v_dim) * sizeof *expected);
    run_output output = {.o = NULL};
    if (!expected) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the expected output");
    }
    spoil_values(ref, seed);
    acr_status status = oracle_forward(p, &buffers, ref->row_list, ref->rows, expected, NULL);
    if (status == ACR_OK) {
        status = run_reference(&output, ctx, kernel, problem, ref);
    }
    if (status == ACR_OK) {
        judge_hidden(failure, sizeof failure, ref, &output, expected);
        run_output_free(&output);
    } else {
        snprintf(failure, sizeof failure, "%s", acr_last_error());
    }
    report(t, "hidden", kernel, problem, failure);
    free(expected);
    return status;
}

/* ---- Tensors that end with their allocations ---- */

enum {
    TENSORS_MAX = 16
};

typedef struct tensors {
    acr__backend_device *device;
    void *memory[TENSORS_MAX];
    int count;
    acr_status status; /* of the first that failed */
} tensors;

/* An allocation of so many bytes, with the content if there is one. */
static void *add_tensor(tensors *t, const void *content, size_t bytes)
{
    void *memory = NULL;
    if (t->status == ACR_OK) {
        t->status = t->device->backend->mem_alloc(t->device, bytes, &memory);
    }
    if (t->status == ACR_OK) {
        t->memory[t->count++] = memory;
        t->status = content ? t->device->backend->mem_upload(t->device, memory, content, bytes) : ACR_OK;
    }
    return memory;
}

static void *add_numbers(tensors *t, const void *content, int64_t count)
{
    return content ? add_tensor(t, content, (size_t)count * 4) : NULL;
}

/* The reference's own tensors, without gaps, as device memory. */
static acr_buffers add_inputs(tensors *t, const reference *ref)
{
    const acr_problem *p = &ref->problem;
    const size_t elem_bytes = (size_t)acr__dtype_bytes(p->dtype), kv_bytes = (size_t)acr__dtype_bytes(acr__kv_dtype(p));
    acr_buffers b = ref->buffers;
    b.q = add_tensor(t, ref->buffers.q, (size_t)(ref->entries * p->q_heads * ref->q_rows * p->qk_dim) * elem_bytes);
    b.k = add_tensor(t, ref->buffers.k, (size_t)(ref->entries * p->kv_heads * ref->kv_rows * p->qk_dim) * kv_bytes);
    b.v = add_tensor(t, ref->buffers.v, (size_t)(ref->entries * p->kv_heads * ref->kv_rows * p->v_dim) * kv_bytes);
    b.kv_lens = add_numbers(t, ref->buffers.kv_lens, p->batch);
    b.q_scales = add_numbers(t, ref->buffers.q_scales, p->batch * p->kv_heads);
    b.k_scales = add_numbers(t, ref->buffers.k_scales, p->batch * p->kv_heads);
    b.v_scales = add_numbers(t, ref->buffers.v_scales, p->batch * p->kv_heads);
    for (acr__buffer i = ACR__TERMS; i < ACR__TERMS_END; ++i) {
        const size_t at = acr__buffer_fields[i].in_buffers;
        const void *content = acr__pointer_at(&ref->buffers, at);
        if (content) {
            const int64_t bytes = acr__buffer_bytes(p, i, reference_extents(ref));
            acr__set_pointer_at(&b, at, add_tensor(t, content, (size_t)bytes));
        }
    }
    return b;
}

static acr_status run_exact(run_output *output, tensors *t, acr_ctx *ctx, const acr__kernel *kernel,
                            const reference *ref)
{
    const acr_problem *p = &ref->problem;
    acr_plan *plan = NULL;
    acr_buffers b = add_inputs(t, ref);
    output->o_bytes = (size_t)(ref->entries * p->q_heads * ref->q_rows * p->v_dim * acr__dtype_bytes(p->out_dtype));
    output->lse_bytes = (size_t)(ref->entries * p->q_heads * ref->q_rows) * sizeof(float);
    b.o = add_tensor(t, NULL, output->o_bytes);
    b.lse = add_tensor(t, NULL, output->lse_bytes);
    output->o = malloc(output->o_bytes);
    output->lse = malloc(output->lse_bytes);
    acr_status status = t->status;
    if (status == ACR_OK && (!output->o || !output->lse)) {
        status = acr__fail(ACR_NO_MEMORY, "no memory for the output");
    }
    if (status == ACR_OK) {
        status = acr__plan_create_forced(&plan, ctx, p, kernel);
    }
    const size_t workspace_bytes = plan ? acr_plan_workspace(plan) : 0;
    void *workspace = workspace_bytes > 0 ? add_tensor(t, NULL, workspace_bytes) : NULL;
    status = status == ACR_OK ? t->status : status;
    if (status == ACR_OK && workspace) {
        status = acr_workspace_init(plan, workspace, workspace_bytes, NULL);
    }
    if (status == ACR_OK) {
        status = acr_execute(plan, &b, workspace, workspace_bytes, NULL);
    }
    if (status == ACR_OK) {
        status = t->device->backend->synchronize(t->device);
    }
    if (status == ACR_OK) {
        status = t->device->backend->mem_download(t->device, output->o, b.o, output->o_bytes);
    }
    if (status == ACR_OK) {
        status = t->device->backend->mem_download(t->device, output->lse, b.lse, output->lse_bytes);
    }
    if (plan) {
        acr_plan_destroy(plan);
    }
    return status;
}

static acr_status check_exact(tally *t, acr_ctx *ctx, const acr__kernel *kernel, const reference *ref)
{
    char failure[512] = "";
    tensors memory = {.device = acr__ctx_backend_device(ctx)};
    run_output output = {.o = NULL};
    verdict v;
    acr_status status = run_exact(&output, &memory, ctx, kernel, ref);
    if (status == ACR_OK) {
        conformance_judge(&v, ref, &output);
        snprintf(failure, sizeof failure, "%s", v.failure);
    } else {
        snprintf(failure, sizeof failure, "%s", acr_last_error());
    }
    report(t, "exact", kernel, &ref->problem, failure);
    run_output_free(&output);
    for (int i = 0; i < memory.count; ++i) {
        memory.device->backend->mem_free(memory.device, memory.memory[i]);
    }
    return status;
}

/* ---- Matched keys ---- */

/* Keys that a row is matched with. Whether it sees them is the oracle's to say: no rule of a mask stands here. */
enum {
    MATCH_ANY,
    MATCH_AT_POSITION,     /* as the bottom-right rule counts it */
    MATCH_BEHIND_POSITION, /* the first key that a causal row does not see */
    MATCH_TOP_LEFT,
    MATCH_BEHIND_TOP_LEFT,
    MATCH_LAST, /* the last key that exists */
    MATCH_BEHIND_LAST,
    MATCH_WINDOW_FIRST,
    MATCH_BEFORE_WINDOW,
    MATCH_WINDOW_LAST,
    MATCH_BEHIND_WINDOW,
    MATCH_KINDS
};

static bool is_match_of(const acr_problem *p, int kind)
{
    switch (kind) {
    case MATCH_ANY:
        return true;
    case MATCH_AT_POSITION:
    case MATCH_BEHIND_POSITION:
        return p->mask == ACR_MASK_CAUSAL;
    case MATCH_TOP_LEFT:
    case MATCH_BEHIND_TOP_LEFT:
        return p->mask == ACR_MASK_CAUSAL_TOP_LEFT;
    case MATCH_LAST:
    case MATCH_BEHIND_LAST:
        return p->mask == ACR_MASK_NONE && p->window_right == 0;
    case MATCH_WINDOW_FIRST:
    case MATCH_BEFORE_WINDOW:
        return p->window_left > 0;
    default:
        return p->window_right > 0;
    }
}

/* The tensor's row of the key that a row is matched with; it exists, but need not be one of the entry's keys. */
static int64_t matched_key(const reference *ref, const row_place *at, int kind, uint64_t seed)
{
    const acr_problem *p = &ref->problem;
    const bool packed = ref->buffers.kv_offsets != NULL;
    const int64_t first = packed ? ref->buffers.kv_offsets[at->batch] : 0;
    const int64_t keys = packed ? ref->buffers.kv_offsets[at->batch + 1] - first : reference_kv_len(ref, at->batch);
    const int64_t rows = packed ? ref->buffers.q_offsets[at->batch + 1] - ref->buffers.q_offsets[at->batch] : p->q_len;
    const int64_t position = p->mask == ACR_MASK_CAUSAL_TOP_LEFT ? at->position : at->position + keys - rows;
    const int64_t any = (int64_t)(random_bits(seed, 103, (uint64_t)at->row) % (uint64_t)ref->kv_rows);
    const int64_t wanted[MATCH_KINDS] = {[MATCH_ANY] = any - first,
                                         [MATCH_AT_POSITION] = position,
                                         [MATCH_BEHIND_POSITION] = position + 1,
                                         [MATCH_TOP_LEFT] = position,
                                         [MATCH_BEHIND_TOP_LEFT] = position + 1,
                                         [MATCH_LAST] = keys - 1,
                                         [MATCH_BEHIND_LAST] = keys,
                                         [MATCH_WINDOW_FIRST] = position - p->window_left + 1,
                                         [MATCH_BEFORE_WINDOW] = position - p->window_left,
                                         [MATCH_WINDOW_LAST] = position + p->window_right,
                                         [MATCH_BEHIND_WINDOW] = position + p->window_right + 1};
    const int64_t row = first + wanted[kind];
    return row >= 0 && row < ref->kv_rows ? row : any;
}

/* A score of 2 |k|^2 times the scale, 16 for 64 dims, among others of deviation 2. */
static void match_rows(const reference *ref, int kind, uint64_t seed)
{
    const acr_problem *p = &ref->problem;
    for (int64_t i = 0; i < ref->rows; ++i) {
        const row_place at = reference_row(ref, i);
        const int64_t entry = ref->buffers.kv_offsets ? 0 : at.batch, kv_head = at.head / (p->q_heads / p->kv_heads);
        const int64_t key = (entry * p->kv_heads + kv_head) * ref->kv_rows + matched_key(ref, &at, kind, seed);
        for (int64_t d = 0; d < p->qk_dim; ++d) {
            const double value = 2 * acr__load_element(acr__kv_dtype(p), ref->buffers.k, key * p->qk_dim + d);
            acr__store_element(p->dtype, (void *)ref->buffers.q, at.row * p->qk_dim + d, value);
        }
    }
}

static void judge_matched(char *failure, size_t size, const reference *ref, const run_output *output,
                          const double *expected, int kind)
{
    /* Coarse on purpose: a key too many or too few costs the size of a value, about 1. */
    const acr_problem *p = &ref->problem;
    const double share = p->dtype == ACR_F32 ? 1e-3 : p->dtype == ACR_E4M3 ? 0.15 : 0.03;
    for (int64_t i = 0; i < ref->rows * p->v_dim; ++i) {
        const row_place at = reference_row(ref, i / p->v_dim);
        const double got = acr__load_element(p->out_dtype, output->o, at.row * p->v_dim + i % p->v_dim);
        if (fabs(got - expected[i]) <= share * fmax(1.0, fabs(expected[i]))) {
            continue;
        }
        snprintf(failure, size, "match %d: o[%lld,%lld,%lld,%lld]: got %.6g, expected %.6g", kind, (long long)at.batch,
                 (long long)at.head, (long long)at.position, (long long)(i % p->v_dim), got, expected[i]);
        return;
    }
}

static acr_status check_matched(tally *t, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                                const reference *ref, uint64_t seed)
{
    const acr_problem *p = &ref->problem;
    const acr_buffers buffers = ref->buffers;
    const size_t q_bytes = (size_t)(ref->entries * p->q_heads * ref->q_rows * p->qk_dim * acr__dtype_bytes(p->dtype));
    double *expected = malloc((size_t)(ref->rows * p->v_dim) * sizeof *expected);
    void *q = malloc(q_bytes);
    acr_status status = expected && q ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for the expected output");
    if (q) {
        memcpy(q, ref->buffers.q, q_bytes);
    }
    for (int kind = 0; kind < MATCH_KINDS && status == ACR_OK; ++kind) {
        char failure[256] = "";
        run_output output = {.o = NULL};
        if (!is_match_of(p, kind)) {
            continue;
        }
        match_rows(ref, kind, seed);
        status = oracle_forward(p, &buffers, ref->row_list, ref->rows, expected, NULL);
        if (status == ACR_OK) {
            status = run_reference(&output, ctx, kernel, problem, ref);
        }
        if (status == ACR_OK) {
            judge_matched(failure, sizeof failure, ref, &output, expected, kind);
        } else {
            snprintf(failure, sizeof failure, "%s", acr_last_error());
        }
        run_output_free(&output);
        report(t, "matched", kernel, problem, failure);
    }
    if (q) {
        memcpy((void *)ref->buffers.q, q, q_bytes);
    }
    free(q);
    free(expected);
    return status;
}

/* ---- Gradients: hidden pairs ---- */

/* A tensor of a backward problem whose rows are spoilt in turn. */
typedef struct spoilt_tensor {
    const char *name;
    const void *data;
    int64_t heads, rows, dim;
} spoilt_tensor;

/* In each head of each entry the first half of a row becomes NaN, and one element of another infinite. */
static void spoil_tensor(const reference *ref, const spoilt_tensor *s, uint64_t seed)
{
    for (int64_t head = 0; head < ref->entries * s->heads; ++head) {
        for (unsigned i = 0; i < 2; ++i) {
            const int64_t row =
                (int64_t)(random_bits(seed, 104, (uint64_t)head * 2 + i) % (uint64_t)s->rows) + head * s->rows;
            const int64_t column = (int64_t)(random_bits(seed, 105, (uint64_t)head * 2 + i) % (uint64_t)s->dim);
            const int64_t first = i == 0 ? 0 : column, end = i == 0 ? s->dim / 2 : column + 1;
            for (int64_t c = first; c < end; ++c) {
                acr__store_element(ref->problem.dtype, (void *)s->data, row * s->dim + c, i == 0 ? NAN : INFINITY);
            }
        }
    }
}

/* Whether an element of a gradient, 0 dq, 1 dk, 2 dv, belongs to a row or key of some batch entry. */
static bool is_of_entry(const reference *ref, int tensor, int64_t element)
{
    const int64_t dims = tensor == 2 ? ref->problem.v_dim : ref->problem.qk_dim;
    const int32_t *owner = tensor == 0 ? ref->q_owner : ref->kv_owner;
    return !owner || owner[element / dims % (tensor == 0 ? ref->q_rows : ref->kv_rows)] >= 0;
}

/* expected: of the spoilt inputs. Tolerances are those of the whole ones, doubled for that: an element that the spoilt
 * ones move and leave finite, as an infinite score under a softcap does, has to be finite and no more. */
static void judge_gradients(char *failure, size_t size, const reference *ref, const run_output *output,
                            double *const expected[3], const char *spoilt)
{
    static const char *const names[] = {"dq", "dk", "dv"};
    const acr_dtype type = ref->problem.grad_dtype ? ref->problem.grad_dtype : ref->problem.dtype;
    int64_t finite = 0, spoilt_elements = 0;
    for (int tensor = 0; tensor < 3; ++tensor) {
        for (int64_t i = 0; i < ref->grads->elements[tensor]; ++i) {
            if (!is_of_entry(ref, tensor, i)) {
                continue;
            }
            const double got = acr__load_element(type, output->grads[tensor], i), want = expected[tensor][i];
            const double tolerance = ref->grads->tolerance[tensor][i];
            const bool moved = fabs(want - ref->grads->expected[tensor][i]) > tolerance;
            finite += isfinite(want) && !moved;
            spoilt_elements += !isfinite(want);
            if (!isfinite(want) ? !isfinite(got) : moved ? isfinite(got) : fabs(got - want) <= 2 * tolerance) {
                continue;
            }
            snprintf(failure, size, "%s spoilt: %s[%lld]: got %.6g, expected %.6g", spoilt, names[tensor], (long long)i,
                     got, want);
            return;
        }
    }
    if (finite == 0 || spoilt_elements == 0) {
        snprintf(failure, size, "%s spoilt: %lld finite gradients and %lld others: nothing was shown", spoilt,
                 (long long)finite, (long long)spoilt_elements);
    }
}

static acr_status find_gradients(double *const expected[3], const reference *ref)
{
    const acr_problem *p = &ref->problem;
    double *variance[3] = {NULL};
    double *dsinks = calloc((size_t)(2 * p->batch * p->q_heads), sizeof *dsinks);
    acr_status status = dsinks ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for the gradients");
    for (int i = 0; i < 3; ++i) {
        memset(expected[i], 0, (size_t)ref->grads->elements[i] * sizeof *expected[i]);
        variance[i] = calloc((size_t)ref->grads->elements[i], sizeof *variance[i]);
        status = variance[i] ? status : acr__fail(ACR_NO_MEMORY, "no memory for the gradients");
    }
    if (status == ACR_OK) {
        const bool sinks = ref->buffers.sinks != NULL;
        const oracle_gradients to = {.dq = expected[0],
                                     .dk = expected[1],
                                     .dv = expected[2],
                                     .dsinks = sinks ? dsinks : NULL,
                                     .dq_variance = variance[0],
                                     .dk_variance = variance[1],
                                     .dv_variance = variance[2],
                                     .dsinks_variance = sinks ? dsinks + p->batch * p->q_heads : NULL};
        for (int64_t i = 0; i < p->batch * p->kv_heads && status == ACR_OK; ++i) {
            status = oracle_backward(p, &ref->buffers, i, &to);
        }
    }
    for (int i = 0; i < 3; ++i) {
        free(variance[i]);
    }
    free(dsinks);
    return status;
}

static acr_status check_gradients(tally *t, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                                  const reference *ref, uint64_t seed)
{
    const acr_problem *p = &ref->problem;
    const spoilt_tensor inputs[] = {{"q", ref->buffers.q, p->q_heads, ref->q_rows, p->qk_dim},
                                    {"k", ref->buffers.k, p->kv_heads, ref->kv_rows, p->qk_dim},
                                    {"v", ref->buffers.v, p->kv_heads, ref->kv_rows, p->v_dim},
                                    {"d_o", ref->buffers.d_o, p->q_heads, ref->q_rows, p->v_dim}};
    double *expected[3] = {NULL};
    acr_status status = ACR_OK;
    for (int i = 0; i < 3; ++i) {
        expected[i] = malloc((size_t)ref->grads->elements[i] * sizeof *expected[i]);
        status = expected[i] ? status : acr__fail(ACR_NO_MEMORY, "no memory for the gradients");
    }
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0] && status == ACR_OK; ++i) {
        char failure[256] = "";
        run_output output = {.o = NULL};
        const size_t bytes =
            (size_t)(ref->entries * inputs[i].heads * inputs[i].rows * inputs[i].dim * acr__dtype_bytes(p->dtype));
        void *whole = malloc(bytes);
        if (!whole) {
            status = acr__fail(ACR_NO_MEMORY, "no memory for a tensor");
            break;
        }
        memcpy(whole, inputs[i].data, bytes);
        spoil_tensor(ref, &inputs[i], seed + i);
        status = find_gradients(expected, ref);
        if (status == ACR_OK) {
            status = run_reference(&output, ctx, kernel, problem, ref);
        }
        if (status == ACR_OK) {
            judge_gradients(failure, sizeof failure, ref, &output, expected, inputs[i].name);
            report(t, "gradients", kernel, problem, failure);
        }
        memcpy((void *)inputs[i].data, whole, bytes);
        free(whole);
        run_output_free(&output);
    }
    for (int i = 0; i < 3; ++i) {
        free(expected[i]);
    }
    return status;
}

/* ---- The program ---- */

/* The checks of a kernel; an error means that the device is lost, or that the test cannot go on. */
static acr_status check_kernel(tally *t, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                               bool rows_only)
{
    enum {
        SEED = 1,
        ROWS = 1 << 20 /* all */
    };
    const reference_request wanted = {.problem = problem, .seed = SEED, .sampled_rows = ROWS, .threads = 2};
    reference *ref = NULL;
    acr_status status = reference_create(&ref, &wanted);
    if (problem->pass == ACR_BACKWARD) {
        status = status == ACR_OK ? check_gradients(t, ctx, kernel, problem, ref, SEED) : status;
        reference_destroy(ref);
        return status;
    }
    if (status == ACR_OK && rows_only) {
        status = check_rows(t, ctx, kernel, problem, ref, SEED);
    }
    if (status == ACR_OK && !rows_only &&
        !(ref->problem.flags & ACR_PACKED)) { /* a packed batch's tensors end with rows of nobody */
        status = acr__why_not(kernel, &ref->problem, &acr__ctx_backend_device(ctx)->device)
                     ? ACR_OK
                     : check_exact(t, ctx, kernel, ref);
    }
    if (status == ACR_OK && !rows_only) {
        status = check_matched(t, ctx, kernel, problem, ref, SEED);
    }
    if (status == ACR_OK && !rows_only) {
        status = check_hidden(t, ctx, kernel, problem, ref, SEED);
    }
    reference_destroy(ref);
    return status;
}

/* What main was asked for. */
typedef struct request {
    const char *pattern;
    bool rows_only, in_turn;
} request;

static acr_status check_problem(tally *t, acr_ctx *ctx, const request *asked, const char *text, unsigned char *turns)
{
    const kernel_patterns wanted = {{asked->pattern}, 1};
    acr_problem problem;
    acr_status status = acr_problem_parse(&problem, text, NULL);
    if (status == ACR_OK) {
        status = acr_problem_canonical(&problem, &problem);
    }
    for (size_t i = 0; i < kernel_total() && status == ACR_OK; ++i) {
        const acr__kernel *kernel = kernel_at(i);
        if (!kernel_matches(kernel, &wanted) || acr__why_not(kernel, &problem, &acr__ctx_backend_device(ctx)->device)) {
            continue;
        }
        if (!asked->in_turn || turns[i] % 2 == 0) {
            status = check_kernel(t, ctx, kernel, &problem, asked->rows_only);
        }
        ++turns[i];
    }
    return status;
}

int main(int argc, char **argv)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    acr_ctx *ctx = NULL;
    tally t = {0, 0};
    request asked = {NULL, argc > 1 && strcmp(argv[1], "--rows") == 0, argc > 1 && strcmp(argv[1], "--in-turn") == 0};
    argc -= asked.rows_only || asked.in_turn;
    argv += asked.rows_only || asked.in_turn;
    if (argc < 4) {
        fprintf(stderr, "usage: isolation [--rows | --in-turn] cpu|cuda KERNEL PROBLEM...\n");
        return 2;
    }
    unsigned char *turns =
        calloc(kernel_total(), 1); /* of each kernel, how many of the problems it could run; the first
                                                         is run by every other kernel */
    for (size_t i = 0, matching = 0; turns && i < kernel_total(); ++i) {
        const kernel_patterns wanted = {{argv[2]}, 1};
        turns[i] = kernel_matches(kernel_at(i), &wanted) ? (unsigned char)(matching++ % 2) : 0;
    }
    asked.pattern = argv[2];
    options.backend = argv[1];
    acr_status status = turns ? acr_ctx_create(&ctx, &options) : ACR_NO_MEMORY;
    for (int i = 3; i < argc && status == ACR_OK; ++i) {
        status = check_problem(&t, ctx, &asked, argv[i], turns);
    }
    if (status != ACR_OK) {
        fprintf(stderr, "isolation: %s\n", acr_last_error());
    }
    free(turns);
    acr_ctx_destroy(ctx);
    printf("%d cases passed, %d failed\n", t.passed, t.failed);
    return status == ACR_OK && t.failed == 0 && t.passed > 0 ? 0 : 1;
}
