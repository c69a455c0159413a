/* Rung 0 of the ladder: FlashAttention's algorithm, and nothing else.
 *
 * Idea: a thread owns one query row and walks its keys once. It keeps the largest score so far, the sum of the
 * exponentials relative to it, and the output relative to it, all in float32; when the maximum grows, sum and output
 * are scaled down (online softmax, Milakov and Gimelshein 2018; as attention, Dao et al. 2022). The scores of a row
 * are never stored anywhere.
 * Expected: slow, and it is, 677 us at b2:h8:s512:d64 on an H200. Every element of K and V is loaded by its own 2-byte
 * instruction, once for each warp of rows, and a row has a single thread to hide latencies with. Any strides and
 * alignment. All predictions and measurements: README.md.
 *
 * PARAMETERS: none */
#include "fwd_args.h"

enum {
    DIM = 64,
    Q_TILE = 64, /* rows of a CTA, a thread each */
    KV_TILE = 1
};

#ifdef __CUDACC__

#include <cuda_fp16.h>
#include <math_constants.h>

#include "cuda/device/isa/common.cuh"
#include "cuda/device/attention/visible.cuh"

extern "C" __global__ void __launch_bounds__(Q_TILE) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    wait_for_previous_kernel();
    const int batch = blockIdx.z, head = blockIdx.y, kv_head = head / a.group;
    const int row = blockIdx.x * Q_TILE + threadIdx.x;
    if (row >= a.q_len)
        return;
    const __half *q = (const __half *)a.q + batch * a.q_stride.batch + head * a.q_stride.head + row * a.q_stride.row;
    const __half *k = (const __half *)a.k + batch * a.k_stride.batch + kv_head * a.k_stride.head;
    const __half *v = (const __half *)a.v + batch * a.v_stride.batch + kv_head * a.v_stride.head;
    __half *o = (__half *)a.o + batch * a.o_stride.batch + head * a.o_stride.head + row * a.o_stride.row;

    float query[DIM], output[DIM]; /* output: sum of exponential * value */
#pragma unroll
    for (int d = 0; d < DIM; d++) {
        query[d] = __half2float(q[d]);
        output[d] = 0.0f;
    }
    float max = -CUDART_INF_F, sum = 0.0f; /* of the scores; of their exponentials relative to max */

    const int end = visible_end(entry_of_batch(a, batch), row); /* hidden keys are never touched, whatever they hold */
    for (int key = 0; key < end; key++) {
        float score = 0.0f;
#pragma unroll
        for (int d = 0; d < DIM; d++)
            score += query[d] * __half2float(k[d]);
        const float new_max = fmaxf(max, score);
        const float base = new_max == -CUDART_INF_F ? 0.0f : new_max; /* no (-inf) - (-inf) */
        const float correction = exp2f((max - base) * a.scale_log2);  /* 0 at the first key */
        const float p = exp2f((score - base) * a.scale_log2);
        max = new_max;
        sum = sum * correction + p;
#pragma unroll
        for (int d = 0; d < DIM; d++)
            output[d] = output[d] * correction + p * __half2float(v[d]);
        k += a.k_stride.row;
        v += a.v_stride.row;
    }

    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum; /* a row that sees no key gets 0 */
#pragma unroll
    for (int d = 0; d < DIM; d++)
        o[d] = __float2half(output[d] * inverse);
    if (a.lse != nullptr)
        a.lse[((int64_t)batch * a.q_heads + head) * a.q_len + row] =
            sum == 0.0f ? -CUDART_INF_F : max * a.scale + logf(sum);
}

#else

#include "cuda/model/fwd_model.h"

enum {
    STAGES = 1
};

static const acr__tiling TILING = {.work = ACR__WORK_TILES, .q_tile = Q_TILE, .threads = Q_TILE, .any_strides = 1};

static const acr__fwd_rates RATES = {
    .mma_flop_per_cycle = 23.0, /* loads and conversions outnumber multiply-adds */
    .exp_per_cycle = 16.0,
    .step_cycles = 2600.0, /* a score's chain of 64 additions, and loads between */
    .cta_cycles = 2000.0,
    .ctas_per_sm = 6,
};

#include "cuda/kernels/ladder/ladder.h"

const acr__kernel KERNEL_DESCRIPTION = {LADDER_KERNEL("fwd_ladder0"), .cost = ladder_cost, .shape = tile_shape};

#endif
