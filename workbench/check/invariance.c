/* Rows that do not depend on their neighbours, see invariance.h. */
#include "invariance.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Some batch entries of a reference, in any order. */
typedef struct selection {
    const char *name;
    const int64_t *entries;
    int64_t count;
    bool last_row;      /* of each entry's queries, its last one alone */
    int64_t keys_added; /* to kv_len, of pages alone */
} selection;

/* A reference of them without an answer: what it does not share is in `made`. */
typedef struct part {
    acr_problem problem; /* with the strides of the whole */
    reference ref;
    void *made[ACR__FORWARD_INPUTS + 2];
    int made_count;
} part;

static void *make(part *to, int64_t bytes)
{
    void *memory = malloc((size_t)bytes + 1);
    to->made[to->made_count++] = memory;
    return memory;
}

static void free_part(part *p)
{
    for (int i = 0; i < p->made_count; ++i) {
        free(p->made[i]);
    }
}

/* Pieces of `bytes` of the selected entries, one after another; from: of entry 0. NULL when out of memory. */
static void *select_pieces(part *to, const void *from, const selection *s, int64_t step, int64_t offset, int64_t bytes)
{
    char *pieces = make(to, s->count * bytes);
    for (int64_t i = 0; pieces && i < s->count; ++i) {
        memcpy(pieces + i * bytes, (const char *)from + s->entries[i] * step + offset, (size_t)bytes);
    }
    return pieces;
}

/* Rows of a tensor without gaps, [entries, heads, rows, dim], from `first` on. */
static const void *select_rows(part *to, const void *from, const selection *s, const acr__tensor *t, int64_t first,
                               int64_t rows)
{
    const int64_t row_bytes = t->dim * acr__dtype_bytes(t->dtype);
    char *all = make(to, s->count * t->heads * rows * row_bytes);
    for (int64_t i = 0; all && i < s->count * t->heads; ++i) {
        const int64_t head = s->entries[i / t->heads] * t->heads + i % t->heads;
        memcpy(all + i * rows * row_bytes, (const char *)from + (head * t->rows + first) * row_bytes,
               (size_t)(rows * row_bytes));
    }
    return all;
}

/* A sequence of a packed batch as the only one: its rows stay where they are. */
static bool select_sequence(part *to, const reference *ref, const selection *s)
{
    const int64_t entry = s->entries[0];
    const fwd_sequence q = fwd_sequence_of(ref->buffers.q_offsets, entry, ref->q_rows, ref->problem.q_len);
    int32_t *q_offsets = make(to, 2 * (int64_t)sizeof *q_offsets),
            *q_owner = make(to, ref->q_rows * (int64_t)sizeof *q_owner);
    if (!q_offsets || !q_owner) {
        return false;
    }
    q_offsets[0] = (int32_t)(q.first + (s->last_row && q.length > 0 ? q.length - 1 : 0));
    q_offsets[1] = (int32_t)(q.first + q.length);
    for (int64_t row = 0; row < ref->q_rows; ++row) {
        q_owner[row] = row >= q_offsets[0] && row < q_offsets[1] ? 0 : -1;
    }
    to->ref.buffers.q_offsets = q_offsets;
    to->ref.q_owner = q_owner;
    if (!ref->kv_owner) {
        return true;
    }
    int32_t *kv_owner = make(to, ref->kv_rows * (int64_t)sizeof *kv_owner);
    for (int64_t row = 0; kv_owner && row < ref->kv_rows; ++row) {
        kv_owner[row] = ref->kv_owner[row] == entry ? 0 : -1;
    }
    to->ref.kv_owner = kv_owner;
    to->ref.buffers.kv_offsets =
        select_pieces(to, ref->buffers.kv_offsets, s, sizeof(int32_t), 0, 2 * (int64_t)sizeof(int32_t));
    return kv_owner && to->ref.buffers.kv_offsets;
}

/* The numbers of each entry: lengths, scales, ranges, trees. */
static bool select_numbers(part *to, const reference *ref, const selection *s)
{
    static const acr__buffer by_entry[] = {ACR__KV_LENS,  ACR__KV_STARTS, ACR__Q_SCALES, ACR__K_SCALES,
                                           ACR__V_SCALES, ACR__RANGES,    ACR__TREE};
    acr_problem one = ref->problem;
    one.batch = 1;
    bool complete = true;
    for (size_t i = 0; i < sizeof by_entry / sizeof by_entry[0]; ++i) {
        const size_t field = acr__buffer_fields[by_entry[i]].in_buffers;
        const void *from = acr__pointer_at(&ref->buffers, field);
        const int64_t bytes = acr__buffer_bytes(&one, by_entry[i], reference_extents(ref));
        if (from) {
            void *numbers = select_pieces(to, from, s, bytes, 0, bytes);
            acr__set_pointer_at(&to->ref.buffers, field, numbers);
            complete = complete && numbers;
        }
    }
    return complete;
}

static bool select_tensors(part *to, const reference *ref, const selection *s)
{
    const acr_problem *p = &ref->problem;
    const acr__rows extents = reference_extents(ref);
    const acr__tensor q = acr__tensor_of(p, ACR__Q, extents), k = acr__tensor_of(p, ACR__K, extents),
                      v = acr__tensor_of(p, ACR__V, extents);
    const bool paged = p->flags & ACR_PAGED, has_v = ref->buffers.v != NULL;
    to->ref.entries = s->count;
    to->ref.q_rows = s->last_row ? 1 : ref->q_rows;
    to->ref.buffers.q = select_rows(to, ref->buffers.q, s, &q, s->last_row ? q.rows - 1 : 0, to->ref.q_rows);
    if (!paged) {
        to->ref.buffers.k = select_rows(to, ref->buffers.k, s, &k, 0, k.rows);
        to->ref.buffers.v = has_v ? select_rows(to, ref->buffers.v, s, &v, 0, v.rows) : NULL;
    }
    return to->ref.buffers.q && to->ref.buffers.k && (to->ref.buffers.v || !has_v);
}

/* Numbers that are added name no page. */
static bool select_table(part *to, const reference *ref, const selection *s)
{
    const int64_t before = ref->buffers.table_stride, added = s->keys_added / ref->problem.page + 1;
    int32_t *table = make(to, s->count * (before + added) * (int64_t)sizeof *table);
    for (int64_t i = 0; table && i < s->count * (before + added); ++i) {
        const int64_t entry = s->entries[i / (before + added)], at = i % (before + added);
        table[i] = at < before ? ref->buffers.page_table[entry * before + at] : -1;
    }
    to->ref.buffers.page_table = table;
    to->ref.buffers.table_stride = before + added;
    return table != NULL;
}

/* The bias of the entry, and of its last row: one entry alone has its own. */
static void shift_bias(part *to, const acr_problem *p, const reference *ref, const selection *s)
{
    const fwd_sequence q = p->flags & ACR_PACKED
                               ? fwd_sequence_of(ref->buffers.q_offsets, s->entries[0], ref->q_rows, p->q_len)
                               : (fwd_sequence){0, (int)p->q_len};
    const int64_t row = s->last_row && q.length > 0 ? q.length - 1 : 0;
    const int64_t elements = s->entries[0] * p->bias.batch + row * p->bias.row;
    if (to->ref.buffers.bias) {
        to->ref.buffers.bias = (const char *)to->ref.buffers.bias + elements * acr__dtype_bytes(p->bias_dtype);
    }
}

/* The stride of a single entry means nothing: two entries lie one behind the other. */
static void set_batch_strides(acr_problem *to, const acr_problem *problem)
{
    static const acr__buffer tensors[] = {ACR__Q, ACR__K, ACR__V, ACR__O};
    enum {
        ELEMENTS = 16 /* what an entry begins at a multiple of */
    };
    const acr__rows longest = {problem->q_len, problem->kv_len, 1, 0};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; ++i) {
        const acr__tensor t = acr__tensor_of(problem, tensors[i], longest);
        const bool in_pages = problem->flags & ACR_PAGED && (tensors[i] == ACR__K || tensors[i] == ACR__V);
        const int64_t elements = acr__tensor_bytes(&t) / acr__dtype_bytes(t.dtype);
        if (!in_pages) {
            acr__strides_of(to, tensors[i])->batch = (elements + ELEMENTS - 1) / ELEMENTS * ELEMENTS;
        }
    }
    if (to->flags & ACR_V_IN_K) {
        to->v = to->k;
    }
}

static acr_status make_part(part *to, const acr_problem *problem, const reference *ref, const selection *s)
{
    const bool packed = problem->flags & ACR_PACKED, paged = problem->flags & ACR_PAGED;
    *to = (part){.problem = *problem, .ref = *ref};
    to->problem.batch = s->count;
    to->problem.q_len = s->last_row && !packed ? 1 : problem->q_len;
    to->problem.kv_len += s->keys_added;
    if (problem->batch == 1 && s->count > 1) {
        set_batch_strides(&to->problem, problem);
    }
    shift_bias(to, problem, ref, s);
    const bool complete = (packed ? select_sequence(to, ref, s) : select_tensors(to, ref, s)) &&
                          select_numbers(to, ref, s) && (!paged || select_table(to, ref, s));
    for (int64_t i = 0; complete && s->keys_added > 0 && i < s->count; ++i) { /* clamped at the shorter kv_len */
        const int64_t length = reference_kv_len(ref, s->entries[i]);
        memcpy((char *)(uintptr_t)to->ref.buffers.kv_lens + i * 4, &(int32_t){(int32_t)length}, 4);
    }
    if (!complete) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a part of the batch");
    }
    to->ref.problem.batch = s->count;
    to->ref.problem.q_len = to->problem.q_len;
    to->ref.problem.kv_len = to->problem.kv_len;
    return acr_problem_canonical(&to->problem, &to->problem);
}

static void compare_rows(char failure[256], const part *of, const reference *ref, const selection *s,
                         const run_output *whole, const run_output *got)
{
    const acr_problem *p = &ref->problem;
    const bool packed = ref->q_owner != NULL;
    const int64_t row_bytes = p->v_dim * acr__dtype_bytes(p->out_dtype);
    const int64_t rows = of->ref.q_rows, skipped = s->last_row && !packed ? ref->q_rows - 1 : 0;
    for (int64_t i = 0; i < of->ref.entries * p->q_heads * rows && !failure[0]; ++i) {
        const int64_t entry = packed ? 0 : s->entries[i / rows / p->q_heads], head = i / rows % p->q_heads;
        const int64_t in_whole = (entry * p->q_heads + head) * ref->q_rows + i % rows + skipped;
        if (packed && of->ref.q_owner[i % rows] < 0) {
            continue;
        }
        if (memcmp((const char *)whole->o + in_whole * row_bytes, (const char *)got->o + i * row_bytes,
                   (size_t)row_bytes) != 0 ||
            (whole->lse && memcmp(&whole->lse[in_whole], &got->lse[i], sizeof(float)) != 0)) {
            snprintf(failure, 256, "ACR_INVARIANT: row [%" PRId64 ",%" PRId64 ",%" PRId64 "] has other bits %s",
                     packed ? s->entries[0] : entry, head, i % rows + skipped, s->name);
        }
    }
}

/* The kernel, or where it does not take the problem the first that does; NULL where none does. */
static const acr__kernel *taker_of(const acr__kernel *kernel, const acr_problem *p, const acr__device *device)
{
    if (!acr__why_not(kernel, p, device)) {
        return kernel;
    }
    for (size_t i = 0; i < acr__kernel_count; ++i) {
        if (acr__kernels[i]->backend == kernel->backend && !acr__why_not(acr__kernels[i], p, device)) {
            return acr__kernels[i];
        }
    }
    return NULL;
}

/* Of failures of the device and of memory the status; others go to `failure`. */
static acr_status try_selection(char failure[256], acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                                const reference *ref, const run_output *whole, const selection *s)
{
    part of;
    execution *e = NULL;
    run_output got = {.o = NULL};
    const acr__device *device = &acr__ctx_backend_device(ctx)->device;
    acr_status status = make_part(&of, problem, ref, s);
    if (status == ACR_OK) {
        const acr__kernel *taker = taker_of(kernel, &of.problem, device);
        status = taker ? execution_create(&e, ctx, taker, &of.problem, &of.ref, false, 0, 0)
                       : acr__fail(ACR_UNSUPPORTED, "no kernel of the device takes the rows so");
    }
    if (status == ACR_OK) {
        status = execution_run(e);
    }
    if (status == ACR_OK) {
        status = execution_collect_outputs(e, &got);
    }
    if (status == ACR_OK) {
        compare_rows(failure, &of, ref, s, whole, &got);
    } else {
        snprintf(failure, 256, "ACR_INVARIANT: %s: %s", s->name, acr_last_error());
    }
    run_output_free(&got);
    execution_destroy(e);
    free_part(&of);
    return status == ACR_DEVICE_FAULT || status == ACR_NO_MEMORY ? status : ACR_OK;
}

/* The i-th of all entries twice, in the opposite order. */
static int64_t *all_turned(int64_t batch)
{
    int64_t *entries = malloc((size_t)(2 * batch) * sizeof *entries);
    for (int64_t i = 0; entries && i < 2 * batch; ++i) {
        entries[i] = batch - 1 - i % batch;
    }
    return entries;
}

acr_status invariance_check(char failure[256], acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                            const reference *ref, const run_output *whole)
{
    enum {
        KEYS_ADDED = 200
    };
    const bool packed = problem->flags & ACR_PACKED, paged = problem->flags & ACR_PAGED;
    /* The last row stands where it stood: with masks and limits from the other corner, and in trees, it does not. */
    const bool last_row = problem->mask != ACR_MASK_CAUSAL_TOP_LEFT && !(problem->flags & ACR_TREE);
    const bool own_bias = problem->bias_dtype != ACR_DTYPE_DEFAULT && problem->bias.batch != 0;
    const int64_t first = 0, last = problem->batch - 1;
    int64_t *turned = all_turned(problem->batch);
    if (!turned) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a list of the batch");
    }
    const bool longer = paged && problem->bias_dtype == ACR_DTYPE_DEFAULT; /* a bias has kv_len elements a row */
    const struct {
        bool possible;
        selection what;
    } all[] = {
        {true, {"alone, the first of the batch", &first, 1, false, 0}},
        {true, {"alone, the last of the batch", &last, 1, false, 0}},
        {last_row, {"as the only row of its batch entry", &last, 1, true, 0}},
        {!packed && !own_bias,
         {"in a batch of twice as many in the opposite order", turned, 2 * problem->batch, false,
          longer ? KEYS_ADDED : 0}},
    };
    acr_status status = ACR_OK;
    failure[0] = '\0';
    for (size_t i = 0; i < sizeof all / sizeof all[0] && !failure[0] && status == ACR_OK; ++i) {
        if (all[i].possible) {
            status = try_selection(failure, ctx, kernel, problem, ref, whole, &all[i].what);
        }
    }
    free(turned);
    return status;
}
