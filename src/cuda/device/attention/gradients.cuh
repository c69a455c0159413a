/* What the backward families share around their products: the statistics of query rows beforehand, the gradients of
 * sinks behind them, and how a row of a gradient leaves.
 *
 * An includer defines DIM (head dims up to it), BF16 and Q_TILE, the rows of a tile of gradients.h. */
#ifndef ACR_DEVICE_ATTENTION_GRADIENTS_CUH
#define ACR_DEVICE_ATTENTION_GRADIENTS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/gradients.h"

enum {
    STATS_THREADS = 256,  /* of the CTAs that find statistics */
    STATS_LANES = DIM / 8 /* that share a row of O and dO, 16 bytes each */
};

/* ---- Statistics ---- */

/* Two elements as floats, that in the lower half first. */
DEV float2 unpack(uint32_t pair)
{
    if constexpr (BF16)
        return __bfloat1622float2(*(const __nv_bfloat162 *)&pair);
    else
        return __half22float2(*(const __half2 *)&pair);
}

/* Sums the products of eight pairs of elements. */
DEV float dot_chunk(uint4 x, uint4 y)
{
    const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = unpack(a[i]), v = unpack(b[i]);
        sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
    return sum;
}

/* A row's LSE as statistics have it; that of a row that does not exist counts as -inf. As biases do (finished_bias) a
 * finite one stays finite. */
DEV float stats_lse(float lse)
{
    if (lse == -CUDART_INF_F)
        return CUDART_INF_F;
    return has_term(FWD_TERM_BIAS) ? fmaxf(lse * LOG2_E, -CUDART_MAX_NORMAL_F) : lse * LOG2_E;
}

/* The exponent of 2 of a weight that numbers are added to. Those may be so low that scores vanish beside them, in the
 * LSE, too: so they come first. */
DEV float added_exponent(float score, float factor, float added, float lse)
{
    return fmaf(score, factor, added) - lse;
}

/* Finds the statistics of an entry's query tile, by STATS_THREADS threads, and stores them at `to`. */
DEV void find_row_stats(const bwd_args &args, const sequence &rows, int entry, int head, int tile, float *to)
{
    const fwd_args &a = args.fwd;
    const int rows_at_once = STATS_THREADS / STATS_LANES, lane = threadIdx.x % STATS_LANES, column = 8 * lane;
    const float *lse = find_lse(a, rows, entry, head);
#pragma unroll
    for (int first = 0; first < Q_TILE; first += rows_at_once) {
        const int in_tile = first + threadIdx.x / STATS_LANES, row = tile * Q_TILE + in_tile;
        const bool exists = row < rows.q_len;
        uint4 o = {0, 0, 0, 0}, d_o = {0, 0, 0, 0};
        if (exists && column < a.v_dim) {
            o = *(const uint4 *)((const char *)a.o + (output_index(a, rows, entry, head, row) + column) * 2);
            d_o =
                *(const uint4 *)((const char *)args.d_o + (entry * args.d_o_stride.batch + head * args.d_o_stride.head +
                                                           (rows.q_begin + row) * args.d_o_stride.row + column) *
                                                              2);
        }
        float sum = dot_chunk(o, d_o);
#pragma unroll
        for (int distance = STATS_LANES / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) {
            to[in_tile] = stats_lse(exists ? lse[row] : -CUDART_INF_F);
            to[Q_TILE + in_tile] = sum;
        }
    }
}

/* ---- Sinks ---- */

/* dsinks of a head: the sum of -P(sink) * D over all rows, always in the same order. stats: of the head's first tile;
 * by all THREADS of the CTA. sums: in shared memory, the kernel's: as a variable of this function it would have a name
 * that depends on the folder of the build. */
template <int THREADS> DEV void sum_sinks(float (&sums)[THREADS], const bwd_args &args, int head, const float *stats)
{
    const fwd_args &a = args.fwd;
    float sum = 0.0f;
    for (int entry = 0; entry < a.batch; entry++) {
        const sequence rows = find_sequence(a, entry);
        for (int row = threadIdx.x; row < rows.q_len; row += THREADS) {
            const float *of_tile =
                stats + (int64_t)(bwd_first_tile(&a, entry, Q_TILE) + row / Q_TILE) * (2 * Q_TILE) + row % Q_TILE;
            sum -= exp2_fast(a.sinks[head] * LOG2_E - of_tile[0]) * of_tile[Q_TILE];
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int other = THREADS / 2; other > 0; other /= 2) {
        if (threadIdx.x < other)
            sums[threadIdx.x] += sums[threadIdx.x + other];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        args.dsinks[head] = sums[0];
}

/* ---- Rows of a gradient ---- */

/* Stores row h of accumulators as store_row does, or as float32. at: the element of dq, dk or dv that the row begins
 * with; columns: of the gradient that the accumulators' first is the first of; factor: see row_store. */
template <int ELEMS>
DEV void store_gradient_row(const bwd_args &args, void *gradient, int64_t at, bool exists, int columns, float factor,
                            const float (&d)[ELEMS], int h, int lane)
{
    if (args.grad_f32) {
#pragma unroll
        for (int i = 0; i < ELEMS / 4; i++)
            if (exists && 8 * i < columns)
                *(float2 *)((float *)gradient + at + 8 * i + 2 * (lane % 4)) =
                    factor != 0.0f ? make_float2(d[4 * i + 2 * h] * factor, d[4 * i + 2 * h + 1] * factor)
                                   : make_float2(0.0f, 0.0f);
    } else
        store_row<BF16>({(char *)gradient + at * 2, exists, columns, factor}, d, h, lane);
}

#endif
