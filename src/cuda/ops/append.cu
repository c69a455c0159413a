/* acr_append on a GPU. CTAs along x share a token's units (op_args.h), which k, v and q number through; y and z count
 * tokens. A thread has one unit, so that no thread reads what another has written where q is rotated in place:
 * few bytes a thread and many short CTAs, which came nearest to what memory passes (lab.md).
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
    MIN_CTAS = 8 /* of an SM: 64 registers a thread */
};

typedef enum append_tensor {
    TENSOR_K,
    TENSOR_V,
    TENSOR_Q
} append_tensor;

/* All below 2^32. */
DEV int64_t offset_of(const fwd_strides &s, int64_t batch, int head, int64_t row)
{
    return (uint32_t)batch * s.batch + (uint32_t)head * s.head + (uint32_t)row * s.row;
}

/* ---- Units ---- */

/* Its first run, and how far from there its second is: in columns of what is rotated, else in heads. */
typedef struct unit {
    int head, column, column_step, head_step;
    int pair; /* the first of its cosines; -1: it is copied */
    bool has_second;
} unit;

/* Unit `number` of the tensor's of a token. */
template <int TENSOR, int VEC> DEV unit find_unit(const append_args &a, uint32_t number)
{
    const uint32_t turned = TENSOR == TENSOR_V ? 0 : TENSOR == TENSOR_K ? a.turned_of_k : a.turned_of_q;
    unit u;
    if (TENSOR != TENSOR_V && number < turned) {
        u.head = op_divide(a.turned, number);
        u.pair = (number - u.head * a.turned.by) * VEC;
        u.column = a.rope_first + (a.is_interleaved ? 2 * u.pair : u.pair);
        u.column_step = a.is_interleaved ? VEC : a.rope_dim / 2;
        u.head_step = 0;
        u.has_second = true;
    } else {
        const op_divisor &copied = TENSOR == TENSOR_V ? a.v_copied : a.copied;
        const uint32_t two_heads = op_divide(copied, number - turned);
        u.head = 2 * two_heads;
        u.pair = -1;
        u.column = (number - turned - two_heads * copied.by) * VEC;
        if (TENSOR != TENSOR_V && a.rope_dim > 0 && u.column >= a.rope_first)
            u.column += a.rope_dim;
        u.column_step = 0;
        u.head_step = 1;
        u.has_second = u.head + 1 < (TENSOR == TENSOR_Q ? a.q_heads : a.kv_heads);
    }
    return u;
}

/* ---- Rotation ---- */

template <int VEC> DEV void load_angles(float (&to)[VEC], const float *from)
{
    if constexpr (VEC == 1) {
        to[0] = *from;
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i += 4) {
            const float4 four = *(const float4 *)(from + i);
            to[i] = four.x;
            to[i + 1] = four.y;
            to[i + 2] = four.z;
            to[i + 3] = four.w;
        }
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

template <int TENSOR, int VEC>
DEV void store_scaled(const append_args &a, int64_t at, float (&values)[VEC], int64_t sequence, int head)
{
    if constexpr (TENSOR == TENSOR_Q) {
        store_typed<DTYPE>(a.q_out, at, values);
    } else {
        const bool is_k = TENSOR == TENSOR_K;
        if (a.cache_dtype == ACR_E4M3) { /* no other has scales */
            const float factor =
                append_factor(&a, is_k ? a.k_scale : a.v_scale, is_k ? a.k_scales : a.v_scales, sequence, head);
#pragma unroll
            for (int i = 0; i < VEC; i++)
                values[i] = op_mul(values[i], factor);
        }
        store_run(a.cache_dtype, is_k ? a.k_cache : a.v_cache, at, values);
    }
}

template <int TENSOR, int VEC>
DEV void copy_run(const append_args &a, int64_t at, const run_bits<VEC> &bits, int64_t sequence, int head)
{
    if (TENSOR == TENSOR_Q || a.cache_dtype == DTYPE) {
        store_bits<DTYPE>(TENSOR == TENSOR_Q ? a.q_out : TENSOR == TENSOR_K ? a.k_cache : a.v_cache, at, bits);
    } else {
        float values[VEC];
        run_values<DTYPE>(values, bits);
        store_scaled<TENSOR>(a, at, values, sequence, head);
    }
}

template <int TENSOR, int VEC> DEV void do_unit(const append_args &a, int64_t index, append_token t, uint32_t number)
{
    const bool is_k = TENSOR == TENSOR_K, is_q = TENSOR == TENSOR_Q;
    const fwd_strides &from = is_q   ? a.q_stride
                              : is_k ? a.k_stride
                                     : a.v_stride,
                      &to = is_q   ? a.q_out_stride
                            : is_k ? a.k_cache_stride
                                   : a.v_cache_stride;
    const void *const source = is_q ? a.q : is_k ? a.k : a.v;
    const unit u = find_unit<TENSOR, VEC>(a, number);
    const int64_t first = offset_of(from, t.batch, u.head, t.row) + u.column;
    run_bits<VEC> bits, second_bits;
    load_bits<DTYPE>(bits, source, first);
    if (u.has_second)
        load_bits<DTYPE>(second_bits, source, first + u.column_step + u.head_step * from.head);
    append_find_target(&a, index, &t);
    float c[VEC], s[VEC];
    const bool is_turned = TENSOR != TENSOR_V && u.pair >= 0;
    if (is_turned && t.angle >= 0) {
        const int64_t angle = (uint32_t)t.angle * a.rope_stride + u.pair;
        load_angles(c, a.cos + angle);
        load_angles(s, a.sin + angle);
    }
    if (!is_q && t.entry < 0)
        return;
    const int64_t at = offset_of(to, is_q ? t.batch : t.entry, u.head, is_q ? t.row : t.at) + u.column,
                  second_at = at + u.column_step + u.head_step * to.head;
    if (!is_turned) {
        copy_run<TENSOR>(a, at, bits, t.sequence, u.head);
        if (u.has_second)
            copy_run<TENSOR>(a, second_at, second_bits, t.sequence, u.head + 1);
        return;
    }
    float x[VEC], y[VEC];
    if (t.angle >= 0) {
        run_values<DTYPE>(x, bits);
        run_values<DTYPE>(y, second_bits);
        turn_runs(x, y, c, s, a.is_interleaved);
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i++)
            x[i] = y[i] = OP_NAN;
    }
    store_scaled<TENSOR>(a, at, x, t.sequence, u.head);
    store_scaled<TENSOR>(a, second_at, y, t.sequence, u.head);
}

/* Unit `number` of the token. */
template <int VEC> DEV void append_unit(const append_args &a, int64_t index, uint32_t number)
{
    const append_token t = append_source_of(&a, index);
    if (t.sequence < 0)
        return;
    if (number < a.v_from)
        do_unit<TENSOR_K, VEC>(a, index, t, number);
    else if (number < a.q_from)
        do_unit<TENSOR_V, VEC>(a, index, t, number - a.v_from);
    else
        do_unit<TENSOR_Q, VEC>(a, index, t, number - a.q_from);
}

extern "C" __global__ void __launch_bounds__(APPEND_THREADS, MIN_CTAS)
    KERNEL_NAME(const __grid_constant__ append_args a)
{
    wait_for_previous_kernel();
    const int64_t index = (int64_t)blockIdx.z * gridDim.y + blockIdx.y;
    const uint32_t number = blockIdx.x * APPEND_THREADS + threadIdx.x;
    if (index < a.rows && number < (uint32_t)a.units) {
        if (a.is_wide)
            append_unit<wide_elements<DTYPE>()>(a, index, number);
        else
            append_unit<1>(a, index, number);
    }
    allow_next_kernel();
}
