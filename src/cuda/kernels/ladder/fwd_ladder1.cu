/* Rung 1 of the ladder: memory.
 *
 * Idea: arithmetic as on rung 0, but every byte moves well. K and V come in tiles of 64 keys into shared memory,
 * copied 16 bytes a thread by neighbouring threads to neighbouring addresses (cp.async), one tile ahead of the
 * arithmetic in a second buffer. Four lanes share a row, 16 of its elements each, so that rows, too, are read and
 * written 16 bytes at a time, and an SM has four times the warps. Scores come in batches of 16 keys, so that sum and
 * output are scaled once a batch. K and V are marked to be evicted last from L2: other CTAs will read them again.
 * Expected: 6 times rung 0; measured 9. Conversions and multiply-adds bind now, not memory. The hint helps only where K
 * and V compete with other data for L2; measured, it is worth nothing.
 *
 * PARAMETERS: none */
#include "fwd_args.h"

enum {
    DIM = 64,
    Q_TILE = 64,
    KV_TILE = 64,
    STAGES = 2,
    ROW_LANES = 4, /* that share a row */
    THREADS = Q_TILE * ROW_LANES
};

#ifdef __CUDACC__

#include <cuda_fp16.h>
#include <math_constants.h>

#include "cuda/device/isa/common.cuh"
#include "cuda/device/attention/visible.cuh"
#include "cuda/kernels/ladder/tile_copy.cuh"

enum {
    LANE_ELEMS = DIM / ROW_LANES, /* lane i of a row's four holds chunks i and i + 4 */
    BATCH = 16                    /* keys between two scalings */
};

/* This lane's 16 elements of a row: two loads of 16 bytes. */
DEV void load_elements(float (&to)[LANE_ELEMS], const __half *row)
{
    const uint4 *chunks = (const uint4 *)row + threadIdx.x % ROW_LANES;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const uint4 chunk = chunks[c * ROW_LANES];
        const uint32_t words[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const float2 pair = __half22float2(*(const __half2 *)&words[w]);
            to[CHUNK * c + 2 * w] = pair.x;
            to[CHUNK * c + 2 * w + 1] = pair.y;
        }
    }
}

/* What one lane knows of its row. */
typedef struct row_state {
    float query[LANE_ELEMS], output[LANE_ELEMS];
    float max, sum; /* the same in all four lanes */
} row_state;

/* The scores of a batch of keys, hidden ones -inf. */
DEV void find_scores(float (&scores)[BATCH], const row_state &r, const tile &k, int first, int seen)
{
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
        float key[LANE_ELEMS], score = 0.0f;
        load_elements(key, k[first + j]);
#pragma unroll
        for (int d = 0; d < LANE_ELEMS; d++)
            score += r.query[d] * key[d];
        score += __shfl_xor_sync(~0u, score, 1);
        score += __shfl_xor_sync(~0u, score, 2);
        scores[j] = first + j < seen ? score : -CUDART_INF_F;
    }
}

/* One tile of keys, of which the row sees the first `seen` and the CTA's rows any of the first `end`. */
DEV void attend(row_state &r, const tile &k, const tile &v, int seen, int end, float scale_log2)
{
#pragma unroll 1
    for (int first = 0; first < min((int)KV_TILE, end); first += BATCH) {
        float scores[BATCH], new_max = r.max;
        find_scores(scores, r, k, first, seen);
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            new_max = fmaxf(new_max, scores[j]);
        const float base = new_max == -CUDART_INF_F ? 0.0f : new_max; /* no (-inf) - (-inf) */
        const float correction = exp2f((r.max - base) * scale_log2);
        r.max = new_max;
        r.sum *= correction;
#pragma unroll
        for (int d = 0; d < LANE_ELEMS; d++)
            r.output[d] *= correction;
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            float value[LANE_ELEMS];
            const float p = exp2f((scores[j] - base) * scale_log2);
            load_elements(value, v[first + j]);
            r.sum += p;
            if (first + j < seen) /* 0 * NaN would be NaN: a hidden value must not enter */
#pragma unroll
                for (int d = 0; d < LANE_ELEMS; d++)
                    r.output[d] += p * value[d];
        }
    }
}

/* Writes this lane's part of the output, two stores of 16 bytes. */
DEV void store_elements(__half *row, const float (&from)[LANE_ELEMS], float factor)
{
    uint4 *chunks = (uint4 *)row + threadIdx.x % ROW_LANES;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; w++)
            *(__half2 *)&words[w] =
                __floats2half2_rn(from[CHUNK * c + 2 * w] * factor, from[CHUNK * c + 2 * w + 1] * factor);
        chunks[c * ROW_LANES] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    __shared__ __align__(16) tile k_tiles[STAGES], v_tiles[STAGES];
    wait_for_previous_kernel();
    const int batch = blockIdx.z, head = blockIdx.y, kv_head = head / a.group;
    const int q_first = blockIdx.x * Q_TILE, row = q_first + threadIdx.x / ROW_LANES;
    const __half *q = (const __half *)a.q + batch * a.q_stride.batch + head * a.q_stride.head;
    const __half *k = (const __half *)a.k + batch * a.k_stride.batch + kv_head * a.k_stride.head;
    const __half *v = (const __half *)a.v + batch * a.v_stride.batch + kv_head * a.v_stride.head;
    __half *o = (__half *)a.o + batch * a.o_stride.batch + head * a.o_stride.head;
    const visible_entry entry = entry_of_batch(a, batch);
    const visible_keys visible = visible_to_rows(entry, q_first, Q_TILE);
    const int seen = visible_end(entry, row);

    copy_rows(k_tiles[0], k, a.k_stride.row, 0, visible.end);
    copy_rows(v_tiles[0], v, a.v_stride.row, 0, visible.end);
    row_state r = {};
    r.max = -CUDART_INF_F;
    load_elements(r.query, q + min(row, a.q_len - 1) * a.q_stride.row); /* rows beyond the last repeat it */

    int stage = 0;
    for (int first = 0; first < visible.end; first += KV_TILE) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads(); /* this tile has landed for all, and all have left the other buffer */
        copy_rows(k_tiles[stage ^ 1], k, a.k_stride.row, first + KV_TILE, visible.end);
        copy_rows(v_tiles[stage ^ 1], v, a.v_stride.row, first + KV_TILE, visible.end);
        attend(r, k_tiles[stage], v_tiles[stage], seen - first, visible.end - first, a.scale_log2);
        stage ^= 1;
    }

    if (row >= a.q_len)
        return;
    store_elements(o + row * a.o_stride.row, r.output, r.sum == 0.0f ? 0.0f : 1.0f / r.sum);
    if (a.lse != nullptr && threadIdx.x % ROW_LANES == 0)
        a.lse[((int64_t)batch * a.q_heads + head) * a.q_len + row] =
            r.sum == 0.0f ? -CUDART_INF_F : r.max * a.scale + logf(r.sum);
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {.work = ACR__WORK_TILES, .q_tile = Q_TILE, .threads = THREADS};

static const acr__fwd_rates RATES = {
    .mma_flop_per_cycle = 74.0, /* of 256: half of the instructions convert operands */
    .exp_per_cycle = 4.0,       /* four lanes take the same one */
    .step_cycles = 18000.0,
    .cta_cycles = 2500.0,
    .ctas_per_sm = 3,
};

#include "cuda/kernels/ladder/ladder.h"

const acr__kernel KERNEL_DESCRIPTION = {LADDER_KERNEL("fwd_ladder1"), .cost = ladder_cost, .shape = tile_shape};

#endif
