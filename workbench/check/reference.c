/* Judged answers, see reference.h. */
#include "reference.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/memory.h"
#include "base/parallel.h"
#include "internal.h"
#include "oracle.h"

/* The same mathematics, without gaps. */
static acr_problem packed_problem(const acr_problem *problem)
{
    acr_problem packed = *problem;
    const acr_strides none = {0, 0, 0};
    packed.layout = problem->flags & ACR_PACKED ? ACR_BSHD : ACR_BHSD;
    packed.q = packed.k = packed.v = packed.o = none;
    packed.d_o = packed.dq = packed.dk = packed.dv = none;
    packed.flags &= ~(uint32_t)ACR_FAST_ATOMICS;
    packed.alignment = 0;
    packed.flags |= ACR_WANT_LSE;
    return packed;
}

/* Which inputs repeat over batch or heads: the one thing of the strides that changes the values. */
static unsigned repeats(const acr_problem *problem)
{
    const acr_strides *strides[] = {&problem->q, &problem->k, &problem->v, &problem->d_o};
    unsigned bits = 0;
    for (unsigned i = 0; i < (problem->pass == ACR_BACKWARD ? 4 : 3); ++i) {
        bits |= (strides[i]->batch == 0 ? 1u : 0u) << (2 * i) | (strides[i]->head == 0 ? 2u : 0u) << (2 * i);
    }
    return bits;
}

void reference_key(char key[ACR_PROBLEM_TEXT_MAX + 16], const acr_problem *problem)
{
    acr_problem packed = packed_problem(problem);
    char text[ACR_PROBLEM_TEXT_MAX];
    if (acr_problem_format(&packed, text, sizeof text) != ACR_OK) {
        text[0] = '\0';
    }
    snprintf(key, ACR_PROBLEM_TEXT_MAX + 16, "%s/%u", text, repeats(problem));
}

acr__rows reference_extents(const reference *ref)
{
    return (acr__rows){ref->q_rows, ref->kv_rows, ref->buffers.pages, ref->buffers.table_stride};
}

int64_t reference_kv_len(const reference *ref, int64_t batch)
{
    int64_t kv_len = ref->problem.kv_len;
    if (!ref->buffers.kv_lens) {
        return kv_len;
    }
    int64_t wanted = ref->buffers.kv_lens[batch];
    return wanted < 0 ? 0 : wanted > kv_len ? kv_len : wanted;
}

int64_t reference_kv_start(const reference *ref, int64_t batch)
{
    const int64_t wanted = ref->buffers.kv_starts ? ref->buffers.kv_starts[batch] : 0,
                  kv_len = reference_kv_len(ref, batch);
    return wanted < 0 ? 0 : wanted > kv_len ? kv_len : wanted;
}

row_place reference_row(const reference *ref, int64_t i)
{
    int64_t row = ref->row_list ? ref->row_list[i] : i, in_tensor = row % ref->q_rows;
    int64_t head_index = row / ref->q_rows, q_heads = ref->problem.q_heads;
    if (!ref->q_owner) {
        return (row_place){row, head_index / q_heads, head_index % q_heads, in_tensor};
    }
    int32_t owner = ref->q_owner[in_tensor];
    int64_t first = fwd_sequence_of(ref->buffers.q_offsets, owner, ref->q_rows, ref->problem.q_len).first;
    return (row_place){row, owner, head_index, in_tensor - first};
}

/* ---- Inputs ---- */

/* Rows of q, or of k and of v, over all entries and heads. */
static int64_t all_q_rows(const reference *ref)
{
    return ref->entries * ref->problem.q_heads * ref->q_rows;
}

static int64_t all_kv_rows(const reference *ref)
{
    const acr__tensor k = acr__tensor_of(&ref->problem, ACR__K, reference_extents(ref));
    return k.batch * k.heads * k.rows;
}

/* NULL when out of memory, and where values are inside keys. */
static void *make_tensor(const reference *ref, const reference_request *request, input_tensor tensor)
{
    const acr__buffer which = tensor == INPUT_Q ? ACR__Q : tensor == INPUT_K ? ACR__K : ACR__V;
    const acr__tensor t = acr__tensor_of(&ref->problem, which, reference_extents(ref));
    const size_t bytes = (size_t)(t.batch * t.heads * t.rows * t.dim * acr__dtype_bytes(t.dtype));
    void *packed = acr__buffer_is_wanted(&ref->problem, which) ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
    if (packed) {
        input_fill(packed, request->problem, tensor, t.batch, t.rows, request->inputs, request->seed, request->threads);
    }
    return packed;
}

/* The sequence that each row belongs to; NULL when out of memory. */
static int32_t *make_owners(const int32_t *offsets, int64_t batch, int64_t total, int64_t longest)
{
    int32_t *owners = malloc((size_t)total * sizeof *owners);
    for (int64_t row = 0; owners && row < total; ++row) {
        owners[row] = -1;
    }
    for (int64_t entry = 0; owners && entry < batch; ++entry) {
        fwd_sequence s = fwd_sequence_of(offsets, entry, total, longest);
        for (int64_t i = 0; i < s.length; ++i) {
            owners[s.first + i] = (int32_t)entry;
        }
    }
    return owners;
}

static acr_status make_sequences(reference *ref, const reference_request *request)
{
    acr_problem *p = &ref->problem;
    const bool paged = p->flags & ACR_PAGED; /* a table says where keys are */
    const size_t bytes = (size_t)(p->batch + 1) * sizeof(int32_t);
    int32_t *q_offsets = malloc(bytes), *kv_offsets = paged ? NULL : malloc(bytes);
    ref->buffers.q_offsets = q_offsets;
    ref->buffers.kv_offsets = kv_offsets;
    if (!q_offsets || (!kv_offsets && !paged)) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the offsets");
    }
    ref->entries = 1;
    ref->q_rows = input_offsets(q_offsets, p, INPUT_Q, request->seed, request->lengths);
    ref->buffers.q_total = ref->q_rows;
    ref->q_owner = make_owners(q_offsets, p->batch, ref->q_rows, p->q_len);
    p->q = (acr_strides){0, ref->q_rows * p->qk_dim, p->qk_dim};
    p->o = p->d_o = (acr_strides){0, ref->q_rows * p->v_dim, p->v_dim};
    if (kv_offsets) {
        ref->kv_rows = input_offsets(kv_offsets, p, INPUT_K, request->seed, request->lengths);
        ref->buffers.kv_total = ref->kv_rows;
        ref->kv_owner = make_owners(kv_offsets, p->batch, ref->kv_rows, p->kv_len);
        p->k = (acr_strides){0, ref->kv_rows * p->qk_dim, p->qk_dim};
        p->v = p->flags & ACR_V_IN_K ? p->k : (acr_strides){0, ref->kv_rows * p->v_dim, p->v_dim};
    }
    return ref->q_owner && (ref->kv_owner || paged) ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for the sequences");
}

static acr_status make_lengths(reference *ref, const reference_request *request)
{
    const acr_problem *p = &ref->problem;
    int32_t *kv_lens = malloc((size_t)p->batch * sizeof *kv_lens);
    ref->buffers.kv_lens = kv_lens;
    if (!kv_lens) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the key lengths");
    }
    input_kv_lens(kv_lens, p, request->seed, request->lengths);
    return ACR_OK;
}

static acr_status make_table(reference *ref, const reference_request *request)
{
    acr_problem *p = &ref->problem;
    const input_pool pool = input_pool_of(p, request->lengths);
    if (pool.pages > INT32_MAX) {
        return acr__fail(ACR_UNSUPPORTED, "batch, kv_len and page make %lld pages, a table names at most %d",
                         (long long)pool.pages, (int)INT32_MAX);
    }
    int32_t *table = malloc((size_t)(p->batch * pool.table_stride) * sizeof *table);
    ref->buffers.page_table = table;
    ref->buffers.table_stride = pool.table_stride;
    ref->buffers.pages = pool.pages;
    ref->kv_rows = p->page;
    p->k = (acr_strides){p->kv_heads * p->page * p->qk_dim, p->page * p->qk_dim, p->qk_dim};
    p->v = p->flags & ACR_V_IN_K ? p->k : (acr_strides){p->kv_heads * p->page * p->v_dim, p->page * p->v_dim, p->v_dim};
    if (!table) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the page table");
    }
    input_page_table(table, p, ref->buffers.kv_lens, request->seed, request->lengths);
    return ACR_OK;
}

/* Makes NaN bytes of the rows of k and v that are no batch entry's key. */
static acr_status spoil_stale_rows(reference *ref)
{
    const acr_problem *p = &ref->problem;
    const acr_buffers *b = &ref->buffers;
    unsigned char *is_key = calloc((size_t)(b->pages * p->page), 1);
    if (!is_key) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a list of the cache's rows");
    }
    for (int64_t batch = 0; batch < p->batch; ++batch) {
        for (int64_t j = reference_kv_start(ref, batch); j < reference_kv_len(ref, batch); ++j) {
            is_key[b->page_table[batch * b->table_stride + j / p->page] * (int64_t)p->page + j % p->page] = 1;
        }
    }
    for (acr__buffer which = ACR__K; which <= ACR__V; ++which) {
        const acr__tensor t = acr__tensor_of(p, which, reference_extents(ref));
        const size_t row_bytes = (size_t)t.dim * (size_t)acr__dtype_bytes(t.dtype);
        unsigned char *to = (unsigned char *)(uintptr_t)(which == ACR__K ? b->k : b->v);
        for (int64_t row = 0; to && row < t.batch * t.heads * t.rows; ++row) {
            if (!is_key[row / (t.heads * t.rows) * t.rows + row % t.rows]) {
                memset(to + (size_t)row * row_bytes, 0xff, row_bytes);
            }
        }
    }
    free(is_key);
    return ACR_OK;
}

static float *make_head_scales(const reference_request *request, input_tensor tensor)
{
    const acr_problem *p = request->problem;
    float *scales = malloc((size_t)(p->batch * p->kv_heads) * sizeof *scales);
    if (scales) {
        input_head_scales(scales, p, tensor, request->seed);
    }
    return scales;
}

static acr_status make_terms(reference *ref, const reference_request *request)
{
    const acr_problem *p = &ref->problem;
    for (acr__buffer i = ACR__TERMS; i < ACR__TERMS_END; ++i) {
        const int64_t bytes = acr__buffer_bytes(p, i, reference_extents(ref));
        void *memory = bytes > 0 ? malloc((size_t)bytes) : NULL;
        if (bytes > 0 && !memory) {
            return acr__fail(ACR_NO_MEMORY, "no memory for the inputs");
        }
        acr__set_pointer_at(&ref->buffers, acr__buffer_fields[i].in_buffers, memory);
        if (memory) {
            input_term(memory, i, p, request->seed, request->lengths);
        }
    }
    return ACR_OK;
}

static acr_status make_inputs(reference *ref, const reference_request *request)
{
    const acr_problem *problem = request->problem;
    ref->entries = problem->batch;
    ref->q_rows = problem->q_len;
    ref->kv_rows = problem->kv_len;
    acr_status status = problem->flags & ACR_PACKED ? make_sequences(ref, request) : ACR_OK;
    if (status == ACR_OK && problem->flags & ACR_KV_LENS) {
        status = make_lengths(ref, request);
    }
    if (status == ACR_OK && problem->flags & ACR_PAGED) {
        status = make_table(ref, request);
    }
    if (status != ACR_OK) {
        return status;
    }
    ref->buffers.q = make_tensor(ref, request, INPUT_Q);
    ref->buffers.k = make_tensor(ref, request, INPUT_K);
    ref->buffers.v = make_tensor(ref, request, INPUT_V);
    const bool v_in_k = problem->flags & ACR_V_IN_K, scaled_q = problem->dtype == ACR_E4M3;
    bool complete = ref->buffers.q && ref->buffers.k && (ref->buffers.v || v_in_k);
    if (request->inputs == INPUT_HEAD_SCALED) {
        ref->buffers.q_scales = scaled_q ? make_head_scales(request, INPUT_Q) : NULL;
        ref->buffers.k_scales = make_head_scales(request, INPUT_K);
        ref->buffers.v_scales = v_in_k ? NULL : make_head_scales(request, INPUT_V);
        complete = complete && (ref->buffers.q_scales || !scaled_q) && ref->buffers.k_scales &&
                   (ref->buffers.v_scales || v_in_k);
    }
    status = complete ? make_terms(ref, request) : acr__fail(ACR_NO_MEMORY, "no memory for the inputs");
    return status == ACR_OK && problem->flags & ACR_PAGED ? spoil_stale_rows(ref) : status;
}

/* ---- Rows ---- */

/* Of a packed batch, the numbers of the rows that belong to a sequence; NULL when out of memory. */
static int64_t *list_owned(const reference *ref, int64_t *count)
{
    int64_t *list = malloc((size_t)all_q_rows(ref) * sizeof *list);
    *count = 0;
    for (int64_t row = 0; list && row < all_q_rows(ref); ++row) {
        if (ref->q_owner[row % ref->q_rows] >= 0) {
            list[(*count)++] = row;
        }
    }
    return list;
}

/* One from each of `sampled` equal strata of 0..total-1, the very first and last for the outermost. */
static void sample_rows(int64_t *list, int64_t sampled, int64_t total, uint64_t seed)
{
    enum {
        STREAM_ROWS = 32
    };
    for (int64_t i = 0; i < sampled; ++i) {
        int64_t first = (int64_t)((double)i * (double)total / (double)sampled);
        int64_t end = (int64_t)((double)(i + 1) * (double)total / (double)sampled);
        list[i] = first + (int64_t)(random_bits(seed, STREAM_ROWS, (uint64_t)i) % (uint64_t)(end - first));
    }
    list[0] = 0;
    list[sampled - 1] = total - 1;
}

static acr_status choose_rows(reference *ref, int64_t sampled_rows)
{
    const acr_problem *p = &ref->problem;
    ref->rows = all_q_rows(ref);
    int64_t *owned = ref->q_owner ? list_owned(ref, &ref->rows) : NULL;
    if (ref->q_owner && !owned) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the row list");
    }
    double work = (double)ref->rows * (double)p->kv_len * (double)(p->qk_dim + p->v_dim);
    if (work <= (double)REFERENCE_FULL_WORK || ref->rows <= sampled_rows) {
        ref->row_list = owned;
        return ACR_OK;
    }
    ref->row_list = malloc((size_t)sampled_rows * sizeof *ref->row_list);
    if (ref->row_list) {
        sample_rows(ref->row_list, sampled_rows, ref->rows, ref->seed);
    }
    for (int64_t i = 0; i < sampled_rows && ref->row_list && owned; ++i) {
        ref->row_list[i] = owned[ref->row_list[i]];
    }
    ref->rows = sampled_rows;
    free(owned);
    return ref->row_list ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for the row list");
}

/* ---- The oracle, its rows split over threads ---- */

typedef struct judging {
    const reference *ref;
    acr_buffers buffers;
    int64_t rows_per_slice;
    const int64_t *row_list;
    double *o, *lse;         /* lse NULL: the unfused computation */
    double *variance, *most; /* beside lse: see oracle_spread */
    float grid;              /* of the unfused computation's weights */
    _Atomic int status;      /* the first failure */
} judging;

static void judge_slice(void *arg, int64_t slice)
{
    judging *j = arg;
    int64_t first = slice * j->rows_per_slice;
    int64_t rows = j->ref->rows - first < j->rows_per_slice ? j->ref->rows - first : j->rows_per_slice;
    const acr_problem *p = &j->ref->problem;
    double *o = j->o + first * p->v_dim;
    acr_status status = j->lse ? oracle_spread(p, &j->buffers, j->row_list + first, rows, o, j->lse + first,
                                               j->variance + first * p->v_dim, j->most + first * p->v_dim)
                               : oracle_unfused(p, &j->buffers, j->row_list + first, rows, j->grid, o);
    if (status != ACR_OK) {
        atomic_store(&j->status, (int)status);
    }
}

/* Runs a judging over the compared rows. */
static acr_status judge(judging *j, uint32_t threads)
{
    const reference *ref = j->ref;
    if (ref->rows <= 0) {
        return ACR_OK; /* a packed batch without rows */
    }
    j->buffers = ref->buffers;
    int64_t slices =
        threads > 1 ? 4 * (int64_t)threads : 1; /* more than threads: under a causal mask rows differ in work */
    j->rows_per_slice = (ref->rows + slices - 1) / slices;
    parallel_for(threads, (ref->rows + j->rows_per_slice - 1) / j->rows_per_slice, judge_slice, j);
    acr_status status = (acr_status)atomic_load(&j->status);
    return status == ACR_OK ? ACR_OK : acr__fail(status, "the oracle failed: %s", acr_status_text(status));
}

/* ---- Tolerance ---- */

/* The distance between neighbouring values of a type at a magnitude. */
static double unit_in_last_place(acr_dtype dtype, double magnitude)
{
    static const struct {
        int mantissa_bits, exponent_min;
    } formats[] = {[ACR_F32] = {23, -126}, [ACR_F16] = {10, -14}, [ACR_BF16] = {7, -126}, [ACR_E4M3] = {3, -6}};
    int exponent = formats[dtype].exponent_min;
    if (magnitude > 0 && ilogb(magnitude) > exponent) {
        exponent = ilogb(magnitude);
    }
    return ldexp(1.0, exponent - formats[dtype].mantissa_bits);
}

/* The largest squared norm of each of NORM_SLICES parts of the rows. */
enum {
    NORM_SLICES = 64
};
typedef struct norm_search {
    const acr_problem *p;
    const void *packed;
    acr_dtype dtype;
    int64_t rows;
    double largest[NORM_SLICES];
} norm_search;

static void search_slice(void *arg, int64_t slice)
{
    enum {
        CHUNK = 64
    };
    norm_search *s = arg;
    const acr_problem *p = s->p;
    const int64_t each = (s->rows + NORM_SLICES - 1) / NORM_SLICES, first = slice * each;
    const int64_t end = first + each < s->rows ? first + each : s->rows;
    s->largest[slice] = 0;
    for (int64_t row = first; row < end; ++row) {
        double sum = 0, x[CHUNK];
        for (int64_t d = 0; d < p->qk_dim; ++d) {
            if (d % CHUNK == 0) {
                const int64_t count = p->qk_dim - d < CHUNK ? p->qk_dim - d : CHUNK;
                acr__load_elements(x, s->dtype, s->packed, row * p->qk_dim + d, count);
            }
            sum += isinf(x[d % CHUNK]) ? 0 : x[d % CHUNK] * x[d % CHUNK]; /* a score of -inf is not rounded */
        }
        s->largest[slice] = fmax(s->largest[slice], sum); /* of numbers: rows of a page may be NaN */
    }
}

static double largest_row_norm(const acr_problem *p, const void *packed, acr_dtype dtype, int64_t rows,
                               uint32_t threads)
{
    norm_search s = {.p = p, .packed = packed, .dtype = dtype, .rows = rows};
    parallel_for(threads, NORM_SLICES, search_slice, &s);
    double largest = 0;
    for (int slice = 0; slice < NORM_SLICES; ++slice) {
        largest = fmax(largest, s.largest[slice]);
    }
    return sqrt(largest);
}

/* The largest factor that a head's scales put on its scores. */
static double largest_head_scale(const reference *ref)
{
    const float *of_q = ref->buffers.q_scales, *of_k = ref->buffers.k_scales;
    double largest = of_k ? 0 : 1;
    for (int64_t i = 0; of_k && i < ref->problem.batch * ref->problem.kv_heads; ++i) {
        largest = fmax(largest, (of_q ? (double)of_q[i] : 1) * (double)of_k[i]);
    }
    return largest;
}

/* The log-sum-exp is a float32 that kernels sum from weights of the operand type: the relative error of a weight shows
 * as an absolute error of the logarithm. The float32 rounding of a score grows with the scores' largest possible
 * magnitude and, as a random walk, with the square root of the number of products that are summed. Hopper's tensor
 * cores align the products of 8-bit operands to the largest and keep about 14 bits (DeepSeek-V3 Technical Report,
 * section 3.3.2): they lose up to 2^-13 of it with every 32 products. */
static double lse_tolerance(const reference *ref, uint32_t threads)
{
    const acr_problem *p = &ref->problem;
    double q_norm = largest_row_norm(p, ref->buffers.q, p->dtype, all_q_rows(ref), threads);
    double k_norm = largest_row_norm(p, ref->buffers.k, acr__kv_dtype(p), all_kv_rows(ref), threads);
    double scale = (double)p->scale * (double)p->q_scale * (double)p->k_scale * largest_head_scale(ref);
    double score = scale * q_norm * k_norm, capped = 0, added = 0;
    if (p->softcap > 0) {
        capped = fmin(score, (double)p->softcap);
    }
    /* sinks, biases and ALiBi show in the log-sum-exp itself */
    const bool adds = acr__terms_of(p) & (FWD_TERM_SINKS | FWD_TERM_BIAS | FWD_TERM_ALIBI);
    for (int64_t i = 0; adds && i < ref->rows; ++i) {
        added = isfinite(ref->lse[i]) && ref->lse[i] >= ORACLE_LOWEST ? fmax(added, fabs(ref->lse[i])) : added;
    }
    double aligned = p->dtype == ACR_E4M3 ? 0x1p-13 * score * ceil((double)p->qk_dim / 32.0) : 0.0;
    double approximate = p->dtype == ACR_F32 ? 0.0 : 0x1p-11 * capped; /* see losses.cap in oracle.c */
    return unit_in_last_place(p->dtype, 1.0) + aligned + approximate +
           (4.0 + 2.0 * sqrt((double)p->qk_dim)) * 0x1p-24 * (score + added + 16.0);
}

/* The unfused computation's error over the compared rows. */
typedef struct error_size {
    double max, rms;
} error_size;

static acr_status unfused_error(error_size *out, const reference *ref, const int64_t *row_list, float grid,
                                uint32_t threads)
{
    int64_t elems = ref->rows * ref->problem.v_dim;
    double *unfused = malloc((size_t)elems * sizeof *unfused);
    if (!unfused) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the unfused computation");
    }
    judging j = {.ref = ref, .row_list = row_list, .o = unfused, .grid = grid};
    acr_status status = judge(&j, threads);
    double largest = 0, square = 0;
    for (int64_t i = 0; i < elems && status == ACR_OK; ++i) {
        double error = fabs(unfused[i] - ref->o[i]);
        largest = fmax(largest, error);
        square += error * error;
    }
    free(unfused);
    *out = (error_size){largest, sqrt(square / (double)elems)};
    return status;
}

/* Of e4m3, which has eight values in an octave, the weights' own rounding is luck where a few rows have two or three
 * weights that matter: the unfused computation is done with the type's values at several places, and the largest error
 * counts. */
static acr_status largest_unfused_error(error_size *out, const reference *ref, const int64_t *row_list,
                                        uint32_t threads)
{
    static const float grids[] = {1.18920712f, 1.41421356f, 1.68179283f}; /* quarters of an octave */
    acr_status status = unfused_error(out, ref, row_list, 1.0f, threads);
    const size_t more = ref->problem.dtype == ACR_E4M3 ? sizeof grids / sizeof grids[0] : 0;
    for (size_t i = 0; i < more && status == ACR_OK; ++i) {
        error_size other;
        status = unfused_error(&other, ref, row_list, grids[i], threads);
        if (status == ACR_OK) {
            *out = (error_size){fmax(out->max, other.max), fmax(out->rms, other.rms)};
        }
    }
    return status;
}

/* The error that a right kernel exceeds with a probability below 10^-7: half of it for the largest error of an element,
 * half for the root mean square. */
static const double half_alarm = 0.5e-7;

/* The largest error of n elements, each the sum of independent errors without bias: a sum of errors that are uniform
 * within bounds exceeds x standard deviations less often than a normal variable, 2 exp(-x^2 / 2). */
static double largest_of(double elements)
{
    return sqrt(2 * log(2 * elements / half_alarm));
}

/* The mean square of all elements, whose expectation is the sum of `shares`, one of each row: within a row elements may
 * err together, rows err by themselves. For a share s and any t < 1 / 2s the mean of exp(t * square) is at most 1 /
 * sqrt(1 - 2 s t), since that holds for the square of each element and the exponential is convex; so the mean square is
 * x or more with a probability of at most exp(-t x) times the product of these. The best t of a few decides. */
static double largest_mean_square(const double *shares, int64_t rows)
{
    double largest = 0;
    for (int64_t i = 0; i < rows; ++i) {
        largest = fmax(largest, shares[i]);
    }
    double best = INFINITY;
    /* NOLINTNEXTLINE(cert-flp30-c): a geometric search; the number of steps does not matter */
    for (double part = 0.98; part > 1e-6 && largest > 0; part *= 0.9) {
        const double t = part / (2 * largest);
        double exponent = -log(half_alarm);
        for (int64_t i = 0; i < rows; ++i) {
            exponent -= 0.5 * log1p(-2 * shares[i] * t);
        }
        best = fmin(best, exponent / t);
    }
    return largest > 0 ? best : 0;
}

/* Rows that repeat err together: the strides of q repeat them over the batch or the heads. */
static int64_t independent_rows(const reference *ref)
{
    const acr_problem *p = &ref->problem;
    const bool repeat = (p->q.batch == 0 && ref->entries > 1) || (p->q.head == 0 && p->q_heads > 1);
    return repeat ? 1 : ref->rows;
}

/* What a right kernel's errors stay within: its arithmetic's, and one unit in the last place of the output. */
static acr_status bound_errors(error_size *out, const reference *ref, const double *variance, const double *most)
{
    const acr_problem *p = &ref->problem;
    const int64_t elems = ref->rows * p->v_dim, groups = independent_rows(ref);
    const double deviations = largest_of((double)elems);
    double *shares = calloc((size_t)groups + 1, sizeof *shares);
    double most_square = 0;
    if (!shares) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the tolerance");
    }
    *out = (error_size){0, 0};
    for (int64_t i = 0; i < elems; ++i) {
        const double inner = deviations * sqrt(variance[i]) + most[i];
        const double unit = unit_in_last_place(p->out_dtype, fabs(ref->o[i]) + inner), systematic = most[i] + unit;
        out->max = fmax(out->max, inner + unit);
        shares[groups == 1 ? 0 : i / p->v_dim] += variance[i] / (double)elems;
        most_square += systematic * systematic / (double)elems;
    }
    out->rms = sqrt(largest_mean_square(shares, groups)) + sqrt(most_square);
    free(shares);
    return ACR_OK;
}

/* The narrower limit of the root mean square, of inputs in e4m3 whose rows see many keys: INFINITY for others. A kernel
 * that loses nothing but the rounding of its weights to 8 bits errs by what that costs by itself: which way a weight is
 * rounded is luck, but the mean square over so many elements and keys is known to within 2 %. What makes more of it is
 * sums that lose low bits: of weights, which shows whatever the values are, or of values that do not cancel, where the
 * errors of weights mostly do, so that the limit is a share of the output. */
static acr_status weights_floor(double *out, const reference *ref, const int64_t *row_list, double output_rms,
                                uint32_t threads)
{
    enum {
        KEYS_MIN = 512,
        ELEMS_MIN = 8192 /* the root mean square of so many: known to within 0.8 % */
    };
    static const double above_rounding = 1.1, of_output = 1.6e-2;
    const float grid = 2.0f * (float)ref->problem.kv_len; /* a common weight is rounded as 1, few are denormal */
    const acr_problem *p = &ref->problem;
    const bool all_keys = p->mask == ACR_MASK_NONE && !p->window_left && !p->window_right &&
                          !(p->flags & (ACR_KV_LENS | ACR_PACKED)) && p->kv_len >= KEYS_MIN;
    *out = INFINITY;
    if (p->dtype != ACR_E4M3 || !all_keys || ref->rows * p->v_dim < ELEMS_MIN || independent_rows(ref) != ref->rows) {
        return ACR_OK;
    }
    if (ref->inputs == INPUT_SHIFTED_V) {
        *out = of_output * output_rms;
    }
    error_size rounded = {0, 0};
    acr_status status = ref->inputs == INPUT_NORMAL ? unfused_error(&rounded, ref, row_list, grid, threads) : ACR_OK;
    if (status == ACR_OK && ref->inputs == INPUT_NORMAL) {
        *out = above_rounding * rounded.rms;
    }
    return status;
}

static acr_status set_tolerances(reference *ref, const int64_t *row_list, const double *variance, const double *most,
                                 uint32_t threads)
{
    error_size error = {0, 0}, bound = {0, 0};
    acr_status status = largest_unfused_error(&error, ref, row_list, threads);
    if (status == ACR_OK) {
        status = bound_errors(&bound, ref, variance, most);
    }
    double largest = 0, square = 0;
    int64_t elems = ref->rows * ref->problem.v_dim;
    for (int64_t i = 0; i < elems; ++i) {
        largest = fmax(largest, fabs(ref->o[i]));
        square += ref->o[i] * ref->o[i];
    }
    acr_dtype stored = ref->problem.out_dtype;
    ref->tol_max = fmax(bound.max, 2 * error.max + unit_in_last_place(stored, largest));
    ref->tol_rms = fmax(bound.rms, 2 * error.rms + unit_in_last_place(stored, sqrt(square / (double)elems)));
    ref->tol_lse = lse_tolerance(ref, threads);
    return status == ACR_OK ? weights_floor(&ref->tol_floor, ref, row_list, sqrt(square / (double)elems), threads)
                            : status;
}

/* ---- Gradients ---- */

acr_problem reference_forward_problem(const acr_problem *p)
{
    const acr_strides none = {0, 0, 0};
    acr_problem forward = *p;
    forward.pass = ACR_FORWARD;
    forward.flags &= ~(uint32_t)ACR_FAST_ATOMICS;
    forward.grad_dtype = ACR_DTYPE_DEFAULT;
    forward.d_o = forward.dq = forward.dk = forward.dv = none;
    return forward;
}

/* Whether the oracle agrees with o and lse in rows of a list, to what float32 and the output's type lose and more. */
static acr_status compare_forward(const reference *ref, const acr_problem *forward, const int64_t *row_list,
                                  int64_t rows)
{
    static const double far = 0.02; /* far beyond rounding: what a wrong mask or key does is more */
    const int64_t dims = forward->v_dim;
    double *o = malloc((size_t)(rows * dims) * sizeof *o), *lse = malloc((size_t)rows * sizeof *lse);
    const acr_buffers b = ref->buffers;
    acr_status status = o && lse ? oracle_forward(forward, &b, row_list, rows, o, lse)
                                 : acr__fail(ACR_NO_MEMORY, "no memory for the oracle's output");
    for (int64_t i = 0; i < rows * dims && status == ACR_OK; ++i) {
        const int64_t row = row_list[i / dims];
        const double got = acr__load_element(forward->out_dtype, ref->buffers.o, row * dims + i % dims),
                     got_lse = ref->buffers.lse[row], own = lse[i / dims];
        if (!(fabs(got - o[i]) <= far * (1 + fabs(o[i]))) ||
            !(got_lse == own || fabs(got_lse - own) <= far * (1 + fabs(own)))) {
            status = acr__fail(ACR_UNSUPPORTED, "the CPU's forward pass and the oracle's differ in row %" PRId64, row);
        }
    }
    free(o);
    free(lse);
    return status;
}

/* o and lse of a problem that is too large for the oracle: by the library on the CPU, and the oracle looks at rows.
 * They are inputs: what gradients must be follows from them as they are stored. */
static acr_status run_forward(reference *ref, const int64_t *row_list, int64_t rows, uint32_t threads)
{
    const acr_problem forward = reference_forward_problem(&ref->problem);
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cpu";
    options.threads = threads;
    acr_ctx *ctx = NULL;
    acr_buffers b = ref->buffers;
    b.d_o = NULL;
    acr_status status = acr_ctx_create(&ctx, &options);
    if (status == ACR_OK) {
        status = acr_forward(ctx, &forward, &b, NULL);
        acr_ctx_destroy(ctx);
    }
    return status == ACR_OK ? compare_forward(ref, &forward, row_list, rows) : status;
}

/* The oracle's o and lse of every row, stored as a forward kernel stores them. */
static acr_status store_forward(reference *ref)
{
    const acr_problem forward = reference_forward_problem(&ref->problem);
    const int64_t rows = all_q_rows(ref), dims = forward.v_dim;
    double *o = malloc((size_t)(rows * dims) * sizeof *o), *lse = malloc((size_t)rows * sizeof *lse);
    const acr_buffers b = ref->buffers;
    if (!o || !lse) {
        free(o);
        free(lse);
        return acr__fail(ACR_NO_MEMORY, "no memory for the oracle's output");
    }
    const acr_status status = oracle_forward(&forward, &b, NULL, rows, o, lse);
    for (int64_t i = 0; i < rows * dims && status == ACR_OK; ++i) {
        acr__store_element(forward.out_dtype, ref->buffers.o, i, o[i]);
    }
    for (int64_t i = 0; i < rows && status == ACR_OK; ++i) {
        ref->buffers.lse[i] = (float)lse[i];
    }
    free(o);
    free(lse);
    return status;
}

static void free_gradients(gradients *g)
{
    for (int i = 0; i < 4; ++i) {
        free(g->expected[i]);
        free(g->tolerance[i]);
    }
    free(g->rows);
    free(g->keys);
    free(g);
}

static bool allocate_gradients(reference *ref)
{
    const acr_problem *p = &ref->problem;
    gradients *g = ref->grads = calloc(1, sizeof *g);
    if (!g) {
        return false;
    }
    const int64_t q_rows = all_q_rows(ref), kv_rows = all_kv_rows(ref);
    const int64_t elements[4] = {q_rows * p->qk_dim, kv_rows * p->qk_dim, kv_rows * p->v_dim,
                                 p->flags & ACR_SINKS ? p->batch * p->q_heads : 0};
    const size_t o_bytes = (size_t)(q_rows * p->v_dim * acr__dtype_bytes(p->out_dtype));
    ref->buffers.o = malloc(o_bytes);
    ref->buffers.d_o = malloc(o_bytes);
    ref->buffers.lse = malloc((size_t)q_rows * sizeof(float));
    bool complete = ref->buffers.o && ref->buffers.d_o && ref->buffers.lse;
    for (int i = 0; i < 4; ++i) {
        g->elements[i] = elements[i];
        g->expected[i] = calloc((size_t)elements[i] + 1, sizeof(double));
        g->tolerance[i] = calloc((size_t)elements[i] + 1, sizeof(double));
        complete = complete && g->expected[i] && g->tolerance[i];
    }
    return complete;
}

/* Runs the oracle for each key/value head of each batch entry. */
typedef struct differentiating {
    const reference *ref;
    acr_buffers buffers;
    oracle_gradients out;
    _Atomic int status;
} differentiating;

static void differentiate_head(void *arg, int64_t index)
{
    differentiating *d = arg;
    const acr_status status = oracle_backward(&d->ref->problem, &d->buffers, index, &d->out);
    if (status != ACR_OK) {
        atomic_store(&d->status, (int)status);
    }
}

/* Turns variances into tolerances: what errors without bias exceed with a probability below 10^-7 in all elements, one
 * unit in the last place of the gradient, and float32's smallest normal number, since a GPU's exponentials flush what
 * is smaller to zero. */
static void set_gradient_tolerances(reference *ref)
{
    gradients *g = ref->grads;
    const acr_problem *p = &ref->problem;
    if (g->elements[3] > 0) { /* the sum over the batch */
        for (int64_t i = p->q_heads; i < g->elements[3]; ++i) {
            g->expected[3][i % p->q_heads] += g->expected[3][i];
            g->tolerance[3][i % p->q_heads] += g->tolerance[3][i];
        }
        g->elements[3] = p->q_heads;
    }
    const double deviations = largest_of((double)(g->elements[0] + g->elements[1] + g->elements[2] + g->elements[3]));
    for (int which = 0; which < 4; ++which) {
        for (int64_t i = 0; i < g->elements[which]; ++i) {
            const double inner = deviations * sqrt(g->tolerance[which][i]);
            g->tolerance[which][i] =
                inner + FLT_MIN +
                unit_in_last_place(which == 3 ? ACR_F32 : p->grad_dtype, fabs(g->expected[which][i]) + inner);
        }
    }
}

/* Marks `sampled` of so many rows; the first `sampled` numbers of `list` are theirs. NULL when out of memory. */
static uint8_t *mark_sampled(int64_t *list, int64_t sampled, int64_t total, uint64_t seed)
{
    uint8_t *marks = calloc((size_t)total, 1);
    sample_rows(list, sampled, total, seed);
    for (int64_t i = 0; i < sampled && marks; ++i) {
        marks[list[i]] = 1;
    }
    return marks;
}

/* o and lse of all rows, and of a large problem which rows and keys are judged. */
static acr_status prepare_gradients(reference *ref, const reference_request *request)
{
    const acr_problem *p = &ref->problem;
    const int64_t q_rows = all_q_rows(ref), kv_rows = all_kv_rows(ref);
    const double work = (double)q_rows * (double)p->kv_len * (double)(p->qk_dim > p->v_dim ? p->qk_dim : p->v_dim);
    const int64_t least = q_rows < kv_rows ? q_rows : kv_rows, sampled = request->sampled_rows < REFERENCE_SAMPLED_ROWS
                                                                             ? request->sampled_rows
                                                                             : REFERENCE_SAMPLED_ROWS;
    if (work <= (double)REFERENCE_FULL_GRADIENTS || least <= sampled) {
        return store_forward(ref);
    }
    int64_t list[REFERENCE_SAMPLED_ROWS];
    gradients *g = ref->grads;
    g->keys = mark_sampled(list, sampled, kv_rows, ref->seed + 1);
    g->rows = mark_sampled(list, sampled, q_rows, ref->seed);
    if (!g->rows || !g->keys) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the rows that are judged");
    }
    /* A packed batch has its heads outside here, which no kernel takes: the oracle's time, then. */
    return ref->q_owner ? store_forward(ref) : run_forward(ref, list, sampled, request->threads);
}

static acr_status fill_gradients(reference *ref, const reference_request *request)
{
    acr_status status = make_inputs(ref, request);
    if (status != ACR_OK) {
        return status;
    }
    if (!allocate_gradients(ref)) {
        return acr__fail(ACR_NO_MEMORY, "no memory for gradients");
    }
    const acr_problem *p = &ref->problem;
    gradients *g = ref->grads;
    input_fill((void *)(uintptr_t)ref->buffers.d_o, request->problem, INPUT_D_O, ref->entries, ref->q_rows,
               request->inputs, request->seed, request->threads);
    status = prepare_gradients(ref, request);
    if (status != ACR_OK) {
        return status;
    }
    const bool sinks = g->elements[3] > 0;
    differentiating d = {.ref = ref, .buffers = ref->buffers};
    d.out = (oracle_gradients){.dq = g->expected[0],
                               .dk = g->expected[1],
                               .dv = g->expected[2],
                               .dsinks = sinks ? g->expected[3] : NULL,
                               .dq_variance = g->tolerance[0],
                               .dk_variance = g->tolerance[1],
                               .dv_variance = g->tolerance[2],
                               .dsinks_variance = sinks ? g->tolerance[3] : NULL,
                               .rows = g->rows,
                               .keys = g->keys};
    parallel_for(request->threads, p->batch * p->kv_heads, differentiate_head, &d);
    status = (acr_status)atomic_load(&d.status);
    if (status != ACR_OK) {
        return acr__fail(status, "the oracle failed: %s", acr_status_text(status));
    }
    ref->rows = all_q_rows(ref);
    set_gradient_tolerances(ref);
    return ACR_OK;
}

/* ---- All together ---- */

static int64_t *all_rows(int64_t rows)
{
    int64_t *list = malloc((size_t)rows * sizeof *list);
    for (int64_t i = 0; list && i < rows; ++i) {
        list[i] = i;
    }
    return list;
}

static acr_status fill_reference(reference *ref, const reference_request *request)
{
    acr_status status = make_inputs(ref, request);
    if (status == ACR_OK) {
        status = choose_rows(ref, request->sampled_rows);
    }
    if (status != ACR_OK) {
        return status;
    }
    const size_t elems = (size_t)(ref->rows * ref->problem.v_dim);
    ref->o = malloc(elems * sizeof *ref->o);
    ref->lse = malloc((size_t)ref->rows * sizeof *ref->lse);
    double *variance = malloc(elems * sizeof *variance), *most = malloc(elems * sizeof *most);
    int64_t *every_row = ref->row_list ? NULL : all_rows(ref->rows);
    const int64_t *row_list = ref->row_list ? ref->row_list : every_row;
    if (!ref->o || !ref->lse || !variance || !most || !row_list) {
        status = acr__fail(ACR_NO_MEMORY, "no memory for the oracle's output");
    } else {
        judging j = {
            .ref = ref, .row_list = row_list, .o = ref->o, .lse = ref->lse, .variance = variance, .most = most};
        status = judge(&j, request->threads);
    }
    if (status == ACR_OK) {
        status = set_tolerances(ref, row_list, variance, most, request->threads);
    }
    free(variance);
    free(most);
    free(every_row);
    return status;
}

void reference_destroy(reference *ref)
{
    if (!ref) {
        return;
    }
    if (ref->mapping) {
        munmap(ref->mapping, ref->mapping_bytes);
        free(ref->grads);
        free(ref);
        return;
    }
    for (acr__buffer i = 0; i < ACR__DQ; ++i) { /* o, lse and d_o of a backward problem among them */
        free((void *)acr__pointer_at(&ref->buffers, acr__buffer_fields[i].in_buffers));
    }
    if (ref->grads) {
        free_gradients(ref->grads);
    }
    FREE_ALL(ref->q_owner, ref->kv_owner, ref->row_list, ref->o, ref->lse, ref);
}

acr_status reference_create(reference **out, const reference_request *request)
{
    reference *ref = calloc(1, sizeof *ref);
    if (!ref) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a reference");
    }
    ref->buffers = (acr_buffers)ACR_BUFFERS_INIT;
    ref->inputs = request->inputs;
    ref->seed = request->seed;
    ref->problem = packed_problem(request->problem);
    input_scales(&ref->problem, request->inputs);
    acr_status status = acr_problem_canonical(&ref->problem, &ref->problem);
    if (status == ACR_OK) {
        status = ref->problem.pass == ACR_BACKWARD ? fill_gradients(ref, request) : fill_reference(ref, request);
    }
    if (status != ACR_OK) {
        reference_destroy(ref);
        return status;
    }
    *out = ref;
    return ACR_OK;
}
