/* acr_append on a GPU. CTAs along x take a token each, those along y share its work, which is cut into units: a unit
 * reads at most two runs of a head's row and writes them, so that no thread reads what another has written where q is
 * rotated in place. A unit of what is rotated has both elements of each pair.
 *
 * DTYPE, an acr_dtype: of k, v and q (ops.def). */
#include "cuda/device/isa/common.cuh"
#include "cuda/ops/vector.cuh"
#include "op_args.h"

/* A row of one head: where its elements begin, and what becomes of them. */
typedef struct head_row {
    const void *from;
    void *to;
    int64_t from_first, to_first;
    int to_type;
    float factor;
} head_row;

DEV int64_t offset_of(const fwd_strides &s, int64_t batch, int head, int64_t row)
{
    return batch * s.batch + head * s.head + row * s.row;
}

template <int VEC> DEV void store_scaled(const head_row &h, int column, float (&values)[VEC])
{
#pragma unroll
    for (int i = 0; i < VEC; i++)
        values[i] = op_mul(values[i], h.factor);
    store_run(h.to_type, h.to, h.to_first + column, values);
}

template <int VEC> DEV void copy_run(const head_row &h, int column)
{
    float values[VEC];
    load_run<DTYPE>(values, h.from, h.from_first + column);
    store_scaled(h, column, values);
}

DEV void turn(float &x, float &y, const append_args &a, int64_t angle, int pair)
{
    const float c = angle < 0 ? OP_NAN : a.cos[angle * a.rope_stride + pair],
                s = angle < 0 ? OP_NAN : a.sin[angle * a.rope_stride + pair];
    const float turned = op_rotated_first(x, y, c, s);
    y = op_rotated_second(x, y, c, s);
    x = turned;
}

/* Pairs [pair, pair + VEC) of a row: two runs, whose elements are halves or neighbours of each other. */
template <int VEC> DEV void turn_runs(const append_args &a, const head_row &h, int64_t angle, int pair)
{
    const int column = a.rope_first + (a.is_interleaved ? 2 * pair : pair),
              other = a.is_interleaved ? column + VEC : column + a.rope_dim / 2;
    float x[VEC], y[VEC];
    load_run<DTYPE>(x, h.from, h.from_first + column);
    load_run<DTYPE>(y, h.from, h.from_first + other);
    if (a.is_interleaved && VEC > 1) {
#pragma unroll
        for (int i = 0; i < VEC / 2; i++) {
            turn(x[2 * i], x[2 * i + 1], a, angle, pair + i);
            turn(y[2 * i], y[2 * i + 1], a, angle, pair + VEC / 2 + i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i++)
            turn(x[i], y[i], a, angle, pair + i);
    }
    store_scaled(h, column, x);
    store_scaled(h, other, y);
}

/* Units of a row: first what is rotated, then the rest. */
template <int VEC> DEV int units_of(int dim, int rope_dim)
{
    return (rope_dim / 2 + (dim - rope_dim)) / VEC;
}

template <int VEC> DEV void do_unit(const append_args &a, const head_row &h, int rope_dim, int64_t angle, int unit)
{
    const int turned = rope_dim / 2 / VEC;
    if (unit < turned) {
        turn_runs<VEC>(a, h, angle, unit * VEC);
        return;
    }
    const int column = (unit - turned) * VEC;
    copy_run<VEC>(h, rope_dim > 0 && column >= a.rope_first ? column + rope_dim : column);
}

/* Units [thread, units) of all heads of one tensor's token, each `threads` apart. */
template <int VEC>
DEV void do_heads(const append_args &a, const append_token &t, head_row h, const fwd_strides &from_stride,
                  const fwd_strides &to_stride, int64_t to_batch, int64_t to_row, int heads, int dim, int rope_dim,
                  float scale, const float *scales, int thread, int threads)
{
    const int units = units_of<VEC>(dim, rope_dim);
    for (uint32_t i = thread; i < (uint32_t)heads * (uint32_t)units; i += threads) {
        const int head = i / (uint32_t)units, unit = i % (uint32_t)units;
        h.from_first = offset_of(from_stride, t.batch, head, t.row);
        h.to_first = offset_of(to_stride, to_batch, head, to_row);
        h.factor = append_factor(&a, scale, scales, t.sequence, head);
        do_unit<VEC>(a, h, rope_dim, t.angle, unit);
    }
}

template <int VEC> DEV void append_token_rows(const append_args &a, const append_token &t, int thread, int threads)
{
    head_row h;
    h.to_type = a.cache_dtype;
    if (a.k != nullptr && t.entry >= 0) {
        h.from = a.k;
        h.to = a.k_cache;
        do_heads<VEC>(a, t, h, a.k_stride, a.k_cache_stride, t.entry, t.at, a.kv_heads, a.qk_dim, a.rope_dim, a.k_scale,
                      a.k_scales, thread, threads);
    }
    if (a.v != nullptr && t.entry >= 0) {
        h.from = a.v;
        h.to = a.v_cache;
        do_heads<VEC>(a, t, h, a.v_stride, a.v_cache_stride, t.entry, t.at, a.kv_heads, a.v_dim, 0, a.v_scale,
                      a.v_scales, thread, threads);
    }
    if (a.q != nullptr) {
        h.from = a.q;
        h.to = a.q_out;
        h.to_type = DTYPE;
        do_heads<VEC>(a, t, h, a.q_stride, a.q_out_stride, t.batch, t.row, a.q_heads, a.qk_dim, a.rope_dim, 1.0f,
                      nullptr, thread, threads);
    }
}

extern "C" __global__ void __launch_bounds__(OP_THREADS, OP_MIN_CTAS) KERNEL_NAME(const __grid_constant__ append_args a)
{
    wait_for_previous_kernel();
    const int thread = blockIdx.y * OP_THREADS + threadIdx.x, threads = gridDim.y * OP_THREADS;
    for (int64_t index = blockIdx.x; index < a.rows; index += gridDim.x) {
        const append_token t = append_token_of(&a, index);
        if (t.sequence < 0)
            continue;
        if (a.is_wide)
            append_token_rows<wide_elements<DTYPE>()>(a, t, thread, threads);
        else
            append_token_rows<1>(a, t, thread, threads);
    }
    allow_next_kernel();
}
