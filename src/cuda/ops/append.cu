/* acr_append on a GPU. CTAs along x take a token each, those along y share its units: a unit reads one or two runs of
 * a row of each of APPEND_HEADS heads and writes them, so that no thread reads what another has written where q is
 * rotated in place. A unit of what is rotated has both elements of each pair. The heads of a unit have the same
 * columns: one cosine and sine, and most of what is computed beside the elements, serve them all. The units of k, v
 * and q are numbered through, so that every thread of a token has work as long as there is some.
 *
 * Where a token comes from is known at once, where it goes only after its sequence's length and its page's number have
 * been read: so a unit asks for its elements first, and for its cosines before it looks at the page's number.
 *
 * DTYPE, an acr_dtype: of k, v and q (ops.def). */
#define QUANTISES 1
#include "cuda/device/isa/common.cuh"
#include "cuda/ops/vector.cuh"
#include "op_args.h"

enum {
    MIN_CTAS = 4 /* of an SM: 128 registers a thread */
};

/* The tensors of a token, in the order of their units. */
typedef enum tensor {
    TENSOR_K,
    TENSOR_V,
    TENSOR_Q
} tensor;

DEV int64_t offset_of(const fwd_strides &s, int64_t batch, int head, int64_t row)
{
    return batch * s.batch + head * s.head + row * s.row;
}

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
    return (uint32_t)(heads_of<TENSOR>(a) + APPEND_HEADS - 1) / APPEND_HEADS * units_of<TENSOR, VEC>(a);
}

/* A unit: a row of some heads, where its elements begin, and what becomes of them. Its runs are columns of the row: of
 * what is rotated, two, whose elements are halves or neighbours of each other. */
typedef struct unit {
    const void *from;
    void *to;
    int64_t from_first, to_first;    /* elements: the first head's row, of a cache that of entry 0, row 0 */
    int64_t from_head, to_head;      /* from a head to the next */
    int64_t entry_stride, at_stride; /* of a cache */
    const float *scales;
    float scale;
    int to_type, head, heads;
    int column, other, pair; /* pair: the first of its cosines */
    bool is_turned, is_query;
} unit;

/* Unit `number` of the tensor's of a token. In a row, first what is rotated, then the rest. */
template <int TENSOR, int VEC> DEV unit find_unit(const append_args &a, const append_token &t, uint32_t number)
{
    const uint32_t units = units_of<TENSOR, VEC>(a);
    const int in_row = (int)(number % units), rope_dim = rope_dim_of<TENSOR>(a), turned = rope_dim / 2 / VEC;
    unit u;
    u.head = (int)(number / units) * APPEND_HEADS;
    u.heads = heads_of<TENSOR>(a) - u.head;
    u.is_query = TENSOR == TENSOR_Q;
    u.is_turned = in_row < turned;
    u.pair = in_row * VEC;
    u.column = u.pair - turned * VEC;
    if (u.is_turned)
        u.column = a.rope_first + (a.is_interleaved ? 2 * u.pair : u.pair);
    else if (rope_dim > 0 && u.column >= a.rope_first)
        u.column += rope_dim;
    u.other = u.column + (a.is_interleaved ? VEC : rope_dim / 2);
    if constexpr (TENSOR == TENSOR_Q) {
        u.from = a.q;
        u.from_first = offset_of(a.q_stride, t.batch, u.head, t.row);
        u.from_head = a.q_stride.head;
        u.to = a.q_out;
        u.to_first = offset_of(a.q_out_stride, t.batch, u.head, t.row);
        u.to_head = a.q_out_stride.head;
        u.entry_stride = u.at_stride = 0;
        u.to_type = DTYPE;
        u.scale = 1.0f;
        u.scales = nullptr;
    } else {
        const bool is_k = TENSOR == TENSOR_K;
        const fwd_strides &from = is_k ? a.k_stride : a.v_stride, &to = is_k ? a.k_cache_stride : a.v_cache_stride;
        u.from = is_k ? a.k : a.v;
        u.from_first = offset_of(from, t.batch, u.head, t.row);
        u.from_head = from.head;
        u.to = is_k ? a.k_cache : a.v_cache;
        u.to_first = u.head * to.head;
        u.to_head = to.head;
        u.entry_stride = to.batch;
        u.at_stride = to.row;
        u.to_type = a.cache_dtype;
        u.scale = is_k ? a.k_scale : a.v_scale;
        u.scales = is_k ? a.k_scales : a.v_scales;
    }
    return u;
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

/* A unit of token `index`. */
template <int VEC> DEV void do_unit(const append_args &a, int64_t index, append_token t, const unit &u)
{
    run_bits<VEC> bits[APPEND_HEADS], other_bits[APPEND_HEADS];
#pragma unroll
    for (int i = 0; i < APPEND_HEADS; i++) {
        if (i < u.heads) {
            const int64_t from = u.from_first + i * u.from_head;
            load_bits<DTYPE>(bits[i], u.from, from + u.column);
            if (u.is_turned)
                load_bits<DTYPE>(other_bits[i], u.from, from + u.other);
        }
    }
    append_find_target(&a, index, &t);
    float c[VEC], s[VEC];
    if (u.is_turned)
        find_angles(c, s, a, t.angle, u.pair);
    if (!u.is_query && t.entry < 0)
        return;
    const int64_t to_first = u.to_first + t.entry * u.entry_stride + t.at * u.at_stride;
#pragma unroll
    for (int i = 0; i < APPEND_HEADS; i++) {
        if (i < u.heads) {
            const float factor = append_factor(&a, u.scale, u.scales, t.sequence, u.head + i);
            const int64_t to = to_first + i * u.to_head;
            float x[VEC], y[VEC];
            run_values<DTYPE>(x, bits[i]);
            if (u.is_turned) {
                run_values<DTYPE>(y, other_bits[i]);
                turn_runs(x, y, c, s, a.is_interleaved);
                store_scaled(u, to + u.other, y, factor);
            }
            store_scaled(u, to + u.column, x, factor);
        }
    }
}

/* Units [thread, ...) of the token, each `threads` apart: those of k, of v, of q. */
template <int VEC> DEV void append_token_rows(const append_args &a, int64_t index, int thread, int threads)
{
    const append_token t = append_source_of(&a, index);
    if (t.sequence < 0)
        return;
    const uint32_t of_k = count_units<TENSOR_K, VEC>(a), of_kv = of_k + count_units<TENSOR_V, VEC>(a),
                   all = of_kv + count_units<TENSOR_Q, VEC>(a);
#pragma unroll 1
    for (uint32_t i = thread; i < all; i += threads)
        do_unit<VEC>(a, index, t,
                     i < of_k    ? find_unit<TENSOR_K, VEC>(a, t, i)
                     : i < of_kv ? find_unit<TENSOR_V, VEC>(a, t, i - of_k)
                                 : find_unit<TENSOR_Q, VEC>(a, t, i - of_kv));
}

extern "C" __global__ void __launch_bounds__(APPEND_THREADS, MIN_CTAS)
    KERNEL_NAME(const __grid_constant__ append_args a)
{
    wait_for_previous_kernel();
    const int thread = blockIdx.y * APPEND_THREADS + threadIdx.x, threads = gridDim.y * APPEND_THREADS;
    for (int64_t index = blockIdx.x; index < a.rows; index += gridDim.x) {
        if (a.is_wide)
            append_token_rows<wide_elements<DTYPE>()>(a, index, thread, threads);
        else
            append_token_rows<1>(a, index, thread, threads);
    }
    allow_next_kernel();
}
