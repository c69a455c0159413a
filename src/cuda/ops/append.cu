/* acr_append on a GPU. CTAs along x take some tokens each, those along y share their units: a unit reads one or two
 * runs of a row of each of some heads and writes them, so that no thread reads what another has written where q is
 * rotated in place. A unit of what is rotated has both elements of each pair. The heads of a unit have the same
 * columns: one cosine and sine, and most of what is computed beside the elements, serve them all; so do a CTA's tokens.
 * The units of k, v and q are numbered through, so that every thread of a token has work as long as there is some.
 *
 * Runs of 16 bytes and cosines of a token are on their way to shared memory while those of the token before it are
 * rotated and stored. What a thread has asked for it reads alone: there is no barrier.
 *
 * DTYPE, an acr_dtype: of k, v and q (ops.def). */
#define QUANTISES 1
#include "cuda/device/isa/copy.cuh"
#include "cuda/ops/vector.cuh"
#include "op_args.h"

enum {
    MIN_CTAS = 4,                              /* of an SM: 128 registers a thread */
    HEAD_CHUNKS = 2 * APPEND_HEADS,            /* of 16 bytes, of a thread: a run or two of each head */
    ANGLE_CHUNKS = wide_elements<DTYPE>() / 4, /* of its cosines, and as many of its sines */
    CHUNKS = HEAD_CHUNKS + 2 * ANGLE_CHUNKS
};

/* Of a token, what the CTA's threads have asked for. */
typedef uint4 token_chunks[CHUNKS][APPEND_THREADS];

/* The tensors of a token, in the order of their units. */
typedef enum tensor {
    TENSOR_K,
    TENSOR_V,
    TENSOR_Q
} tensor;

/* ---- Units ---- */

template <int TENSOR> DEV int rope_dim_of(const append_args &a)
{
    return TENSOR == TENSOR_V ? 0 : a.rope_dim;
}

template <int TENSOR> DEV int heads_of(const append_args &a)
{
    return TENSOR == TENSOR_Q ? a.q_heads : a.kv_heads;
}

/* Of a row: as shape_append of ops.c counts them. */
template <int TENSOR, int VEC> DEV uint32_t units_of(const append_args &a)
{
    const int dim = TENSOR == TENSOR_V ? a.v_dim : a.qk_dim, rope_dim = rope_dim_of<TENSOR>(a);
    return (uint32_t)(rope_dim / 2 + (dim - rope_dim)) / VEC;
}

/* Of a token. */
template <int TENSOR, int VEC> DEV uint32_t count_units(const append_args &a)
{
    if ((TENSOR == TENSOR_K ? a.k : TENSOR == TENSOR_V ? a.v : a.q) == nullptr)
        return 0;
    const int heads = append_heads(&a);
    return (uint32_t)(heads_of<TENSOR>(a) + heads - 1) / heads * units_of<TENSOR, VEC>(a);
}

/* A unit: a row of some heads, where its elements are, and what becomes of them; of token 0, entry 0 and row 0. Its
 * runs are columns of the row: of what is rotated, two, whose elements are halves or neighbours of each other. */
typedef struct unit {
    const void *from;
    void *to;
    int64_t from_first, from_batch, from_row; /* elements: the first head's row, and from entry to entry, row to row */
    int64_t to_first, to_batch, to_row;
    int64_t from_head, to_head; /* from a head to the next */
    const float *scales;
    float scale, factor; /* factor: where there are no scales */
    int to_type, head, heads;
    int column, other, pair; /* pair: the first of its cosines */
    bool is_turned, is_query;
} unit;

/* Unit `number` of the tensor's of a token. In a row, first what is rotated, then the rest. */
template <int TENSOR, int VEC> DEV unit find_unit(const append_args &a, uint32_t number)
{
    const uint32_t units = units_of<TENSOR, VEC>(a);
    const int in_row = (int)(number % units), rope_dim = rope_dim_of<TENSOR>(a), turned = rope_dim / 2 / VEC;
    unit u;
    u.head = (int)(number / units) * append_heads(&a);
    u.heads = min(append_heads(&a), heads_of<TENSOR>(a) - u.head);
    u.is_query = TENSOR == TENSOR_Q;
    u.is_turned = in_row < turned;
    u.pair = in_row * VEC;
    u.column = u.pair - turned * VEC;
    if (u.is_turned)
        u.column = a.rope_first + (a.is_interleaved ? 2 * u.pair : u.pair);
    else if (rope_dim > 0 && u.column >= a.rope_first)
        u.column += rope_dim;
    u.other = u.column + (a.is_interleaved ? VEC : rope_dim / 2);
    const bool is_k = TENSOR == TENSOR_K;
    const fwd_strides &from = TENSOR == TENSOR_Q ? a.q_stride : is_k ? a.k_stride : a.v_stride;
    const fwd_strides &to = TENSOR == TENSOR_Q ? a.q_out_stride : is_k ? a.k_cache_stride : a.v_cache_stride;
    u.from = TENSOR == TENSOR_Q ? a.q : is_k ? a.k : a.v;
    u.to = TENSOR == TENSOR_Q ? a.q_out : is_k ? a.k_cache : a.v_cache;
    u.from_first = u.head * from.head;
    u.from_batch = from.batch;
    u.from_row = from.row;
    u.from_head = from.head;
    u.to_first = u.head * to.head;
    u.to_batch = to.batch;
    u.to_row = to.row;
    u.to_head = to.head;
    u.to_type = TENSOR == TENSOR_Q ? (int)DTYPE : a.cache_dtype;
    u.scale = TENSOR == TENSOR_Q ? 1.0f : is_k ? a.k_scale : a.v_scale;
    u.scales = TENSOR == TENSOR_Q ? nullptr : is_k ? a.k_scales : a.v_scales;
    u.factor = op_div(1.0f, u.scale);
    return u;
}

/* The units of a token: those of k, of v, of q. */
typedef struct unit_counts {
    uint32_t of_k, of_kv, all;
} unit_counts;

template <int VEC> DEV unit_counts count_all_units(const append_args &a)
{
    unit_counts n;
    n.of_k = count_units<TENSOR_K, VEC>(a);
    n.of_kv = n.of_k + count_units<TENSOR_V, VEC>(a);
    n.all = n.of_kv + count_units<TENSOR_Q, VEC>(a);
    return n;
}

template <int VEC> DEV unit find_any_unit(const append_args &a, const unit_counts &n, uint32_t i)
{
    return i < n.of_k    ? find_unit<TENSOR_K, VEC>(a, i)
           : i < n.of_kv ? find_unit<TENSOR_V, VEC>(a, i - n.of_k)
                         : find_unit<TENSOR_Q, VEC>(a, i - n.of_kv);
}

/* Elements of the unit's `from` where a token's first head is, and of its `to`. */
DEV int64_t source_of(const unit &u, const append_token &t)
{
    return u.from_first + t.batch * u.from_batch + t.row * u.from_row;
}

DEV int64_t target_of(const unit &u, const append_token &t)
{
    return u.to_first + (u.is_query ? t.batch * u.to_batch + t.row * u.to_row : t.entry * u.to_batch + t.at * u.to_row);
}

/* ---- Rotation ---- */

template <int VEC> DEV void load_angles(float (&to)[VEC], const float *table, int64_t at, int64_t stride)
{
    if (VEC > 1 && stride % 4 == 0 && (uintptr_t)table % 16 == 0) {
#pragma unroll
        for (int i = 0; i < VEC; i += 4) {
            const float4 four = *(const float4 *)(table + at + i);
            to[i] = four.x;
            to[i + 1] = four.y;
            to[i + 2] = four.z;
            to[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i++)
            to[i] = table[at + i];
    }
}

template <int VEC> DEV void find_angles(float (&c)[VEC], float (&s)[VEC], const append_args &a, int64_t angle, int pair)
{
    if (angle >= 0) {
        load_angles(c, a.cos, angle * a.rope_stride + pair, a.rope_stride);
        load_angles(s, a.sin, angle * a.rope_stride + pair, a.rope_stride);
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i++)
            c[i] = s[i] = OP_NAN;
    }
}

DEV void turn(float &x, float &y, float c, float s)
{
    const float turned = op_rotated_first(x, y, c, s);
    y = op_rotated_second(x, y, c, s);
    x = turned;
}

template <int VEC>
DEV void turn_runs(float (&x)[VEC], float (&y)[VEC], const float (&c)[VEC], const float (&s)[VEC], bool interleaved)
{
    if (interleaved && VEC > 1) {
#pragma unroll
        for (int i = 0; i < VEC / 2; i++) {
            turn(x[2 * i], x[2 * i + 1], c[i], s[i]);
            turn(y[2 * i], y[2 * i + 1], c[VEC / 2 + i], s[VEC / 2 + i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i++)
            turn(x[i], y[i], c[i], s[i]);
    }
}

/* ---- A unit's work ---- */

template <int VEC> DEV void store_scaled(const unit &u, int64_t first, float (&values)[VEC], float factor)
{
#pragma unroll
    for (int i = 0; i < VEC; i++)
        values[i] = op_mul(values[i], factor);
    store_run(u.to_type, u.to, first, values);
}

/* A head's elements of a token that goes to `to`. */
template <int VEC>
DEV void store_head(const append_args &a, const unit &u, const append_token &t, int i, int64_t to, float (&x)[VEC],
                    float (&y)[VEC], const float (&c)[VEC], const float (&s)[VEC])
{
    const float factor = u.scales == nullptr ? u.factor : append_factor(&a, u.scale, u.scales, t.sequence, u.head + i);
    if (u.is_turned) {
        turn_runs(x, y, c, s, a.is_interleaved);
        store_scaled(u, to + u.other, y, factor);
    }
    store_scaled(u, to + u.column, x, factor);
}

/* ---- Elements one by one ---- */

DEV void do_narrow_unit(const append_args &a, const unit &u, int64_t index, append_token t)
{
    append_find_target(&a, index, &t);
    if (!u.is_query && t.entry < 0)
        return;
    float c[1] = {}, s[1] = {};
    if (u.is_turned)
        find_angles(c, s, a, t.angle, u.pair);
#pragma unroll 1
    for (int i = 0; i < u.heads; i++) {
        const int64_t from = source_of(u, t) + i * u.from_head;
        float x[1] = {load_element<DTYPE>(u.from, from + u.column)}, y[1] = {};
        if (u.is_turned)
            y[0] = load_element<DTYPE>(u.from, from + u.other);
        store_head(a, u, t, i, target_of(u, t) + i * u.to_head, x, y, c, s);
    }
}

DEV void append_narrow_rows(const append_args &a, int64_t first, int64_t end, int thread, int threads)
{
    const unit_counts n = count_all_units<1>(a);
#pragma unroll 1
    for (uint32_t i = thread; i < n.all; i += threads) {
        const unit u = find_any_unit<1>(a, n, i);
#pragma unroll 1
        for (int64_t index = first; index < end; index++) {
            const append_token t = append_source_of(&a, index);
            if (t.sequence >= 0)
                do_narrow_unit(a, u, index, t);
        }
    }
}

/* ---- Runs of 16 bytes ---- */

/* Whether cosines and sines are asked for ahead. */
DEV bool has_wide_angles(const append_args &a)
{
    return a.rope_stride % 4 == 0 && ((uintptr_t)a.cos | (uintptr_t)a.sin) % 16 == 0;
}

/* Asks for what token `index` needs, and returns where it comes from and goes to. Its elements first: they wait for
 * memory, the others for the cache. */
template <int VEC> DEV append_token ask_token(const append_args &a, const unit &u, int64_t index, token_chunks &to)
{
    append_token t = append_source_of(&a, index);
    if (t.sequence < 0)
        return t;
    const char *from = (const char *)u.from + source_of(u, t) * (CHUNK_BYTES / VEC);
#pragma unroll
    for (int i = 0; i < APPEND_HEADS; i++) {
        if (i < u.heads) {
            const char *head = from + i * u.from_head * (CHUNK_BYTES / VEC);
            copy_chunk_async(smem_address(&to[2 * i][threadIdx.x]), head + u.column * (CHUNK_BYTES / VEC), 1);
            if (u.is_turned)
                copy_chunk_async(smem_address(&to[2 * i + 1][threadIdx.x]), head + u.other * (CHUNK_BYTES / VEC), 1);
        }
    }
    append_find_target(&a, index, &t);
    if (u.is_turned && t.angle >= 0 && has_wide_angles(a)) {
        const int64_t angle = t.angle * a.rope_stride + u.pair;
#pragma unroll
        for (int i = 0; i < ANGLE_CHUNKS; i++) {
            copy_chunk_async(smem_address(&to[HEAD_CHUNKS + i][threadIdx.x]), a.cos + angle + 4 * i, 1);
            copy_chunk_async(smem_address(&to[HEAD_CHUNKS + ANGLE_CHUNKS + i][threadIdx.x]), a.sin + angle + 4 * i, 1);
        }
    }
    return t;
}

DEV void read_angles(float (&to)[4 * ANGLE_CHUNKS], const token_chunks &from, int first)
{
#pragma unroll
    for (int i = 0; i < ANGLE_CHUNKS; i++) {
        const uint4 four = from[first + i][threadIdx.x];
        to[4 * i] = __uint_as_float(four.x);
        to[4 * i + 1] = __uint_as_float(four.y);
        to[4 * i + 2] = __uint_as_float(four.z);
        to[4 * i + 3] = __uint_as_float(four.w);
    }
}

/* The same token, whose chunks have landed. */
template <int VEC> DEV void finish_token(const append_args &a, const unit &u, const append_token &t, token_chunks &from)
{
    if (t.sequence < 0 || (!u.is_query && t.entry < 0))
        return;
    float c[VEC], s[VEC];
    if (u.is_turned && t.angle >= 0 && has_wide_angles(a)) {
        read_angles(c, from, HEAD_CHUNKS);
        read_angles(s, from, HEAD_CHUNKS + ANGLE_CHUNKS);
    } else if (u.is_turned)
        find_angles(c, s, a, t.angle, u.pair);
    const int64_t to = target_of(u, t);
#pragma unroll 1
    for (int i = 0; i < u.heads; i++) {
        float x[VEC], y[VEC];
        run_values<DTYPE>(x, run_bits<VEC>{from[2 * i][threadIdx.x]});
        if (u.is_turned)
            run_values<DTYPE>(y, run_bits<VEC>{from[2 * i + 1][threadIdx.x]});
        store_head(a, u, t, i, to + i * u.to_head, x, y, c, s);
    }
}

/* Tokens [first, end): units [thread, ...), each `threads` apart. */
template <int VEC>
DEV void append_wide_rows(const append_args &a, int64_t first, int64_t end, int thread, int threads,
                          token_chunks (&chunks)[2])
{
    const unit_counts n = count_all_units<VEC>(a);
    const uint32_t lane = threadIdx.x % WARP_THREADS;
#pragma unroll 1
    for (uint32_t i = thread; i - lane < n.all; i += threads) {
        unit u = find_any_unit<VEC>(a, n, min(i, n.all - 1));
        if (i >= n.all) { /* the warp's lanes stay together: groups of copies are the warp's */
            u.heads = 0;
            u.is_turned = false;
        }
        append_token t = ask_token<VEC>(a, u, first, chunks[0]);
        __syncwarp();
        copies_commit();
        int stage = 0;
#pragma unroll 1
        for (int64_t index = first; index < end; index++) {
            append_token next = t;
            if (index + 1 < end)
                next = ask_token<VEC>(a, u, index + 1, chunks[stage ^ 1]);
            __syncwarp();
            copies_commit();
            COPIES_WAIT(1);
            finish_token<VEC>(a, u, t, chunks[stage]);
            t = next;
            stage ^= 1;
        }
    }
}

extern "C" __global__ void __launch_bounds__(APPEND_THREADS, MIN_CTAS)
    KERNEL_NAME(const __grid_constant__ append_args a)
{
    __shared__ token_chunks chunks[2];
    wait_for_previous_kernel();
    const int thread = blockIdx.y * APPEND_THREADS + threadIdx.x, threads = gridDim.y * APPEND_THREADS;
    const int64_t tokens = append_tokens(&a);
    for (int64_t first = blockIdx.x * tokens; first < a.rows; first += gridDim.x * tokens) {
        const int64_t end = min(first + tokens, a.rows);
        if (a.is_wide)
            append_wide_rows<wide_elements<DTYPE>()>(a, first, end, thread, threads, chunks);
        else
            append_narrow_rows(a, first, end, thread, threads);
    }
    allow_next_kernel();
}
