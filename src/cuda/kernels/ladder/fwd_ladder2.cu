/* Rung 2 of the ladder: tensor cores.
 *
 * Idea: both products, Q * transpose(K) and P * V, as WMMA 16x16x16 in fp16 with float32 accumulators. A warp owns 16
 * query rows. WMMA does not tell which lane holds which element of a fragment, so everything that is not a product
 * happens in shared memory: scores go there as floats, two lanes a row read them, take the softmax, and leave
 * probabilities as fp16; P * V goes the same way and is added to the output, which those lanes keep in registers.
 * K and V arrive as on rung 1. nvcuda::wmma, from mma.h, is the ladder's only C++ library: WMMA has no other name.
 * Expected: 1.8 times rung 1; measured 2.4. Far from the tensor cores' rate: a warp's trips through shared memory, most
 * of them with bank conflicts (8 rows of K or V, 128 bytes apart, lie in the same banks), take the time.
 *
 * PARAMETERS: none */
#include "fwd_args.h"

enum {
    DIM = 64,
    Q_TILE = 64,
    KV_TILE = 64,
    STAGES = 2,
    WARP_ROWS = 16,
    THREADS = Q_TILE / WARP_ROWS * 32,
    SCORE_PITCH = KV_TILE + 4, /* 16 bytes more than a row: lanes of 8 rows reach different banks */
    HALF_PITCH = KV_TILE + 8,
    SMEM_BYTES = 2 * Q_TILE * DIM + 4 * STAGES * KV_TILE * DIM + 4 * Q_TILE * SCORE_PITCH + 2 * Q_TILE * HALF_PITCH
};

#ifdef __CUDACC__

#include <cuda_fp16.h>
#include <math_constants.h>
#include <mma.h>

#include "cuda/device/isa/common.cuh"
#include "cuda/device/attention/visible.cuh"
#include "cuda/kernels/ladder/tile_copy.cuh"

using namespace nvcuda;

enum {
    SIDE = 16,         /* of a product */
    STEPS = 64 / SIDE, /* products along the head dim, and along the keys of a tile */
    LANE_COLUMNS = 32  /* of the 64 scores, or outputs, of a row: two lanes share it */
};
static_assert(DIM == 64 && KV_TILE == 64, "a row of scores and a row of outputs are shared alike");

typedef wmma::fragment<wmma::matrix_a, SIDE, SIDE, SIDE, __half, wmma::row_major> left_matrix;
typedef wmma::fragment<wmma::accumulator, SIDE, SIDE, SIDE, float> accumulator;

typedef struct shared_tiles {
    tile q, k[STAGES], v[STAGES];
    float scores[Q_TILE][SCORE_PITCH]; /* then P * V */
    __half p[Q_TILE][HALF_PITCH];
} shared_tiles;
static_assert(sizeof(shared_tiles) == SMEM_BYTES, "the launch asks for what the kernel uses");

/* scores = Q * transpose(K) for the warp's rows and a tile of keys. */
DEV void multiply_scores(float *scores, const left_matrix (&q)[STEPS], const tile &k)
{
#pragma unroll
    for (int n = 0; n < STEPS; n++) {
        accumulator sum;
        wmma::fill_fragment(sum, 0.0f);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, __half, wmma::col_major> keys_transposed;
            wmma::load_matrix_sync(keys_transposed, &k[SIDE * n][SIDE * step], DIM);
            wmma::mma_sync(sum, q[step], keys_transposed, sum);
        }
        wmma::store_matrix_sync(scores + SIDE * n, sum, SCORE_PITCH, wmma::mem_row_major);
    }
}

/* products = P * V */
DEV void multiply_values(float *products, const __half *p, const tile &v)
{
    left_matrix left[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        wmma::load_matrix_sync(left[step], p + SIDE * step, HALF_PITCH);
#pragma unroll
    for (int n = 0; n < STEPS; n++) {
        accumulator sum;
        wmma::fill_fragment(sum, 0.0f);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, __half, wmma::row_major> values;
            wmma::load_matrix_sync(values, &v[SIDE * step][SIDE * n], DIM);
            wmma::mma_sync(sum, left[step], values, sum);
        }
        wmma::store_matrix_sync(products + SIDE * n, sum, SCORE_PITCH, wmma::mem_row_major);
    }
}

/* What one lane knows of its row, and its half of the row's output. */
typedef struct row_state {
    float output[LANE_COLUMNS];
    float max, sum; /* the same in both lanes */
} row_state;

/* Reads this lane's half of a row of scores, hides those from `seen` on, and leaves their exponentials in p. Returns
 * what the output so far is to be multiplied with. */
DEV float take_softmax(row_state &r, __half *p, const float *scores, int seen, float scale_log2)
{
    float s[LANE_COLUMNS], new_max = r.max;
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j += 4) {
        const float4 four = *(const float4 *)&scores[j];
        s[j] = four.x, s[j + 1] = four.y, s[j + 2] = four.z, s[j + 3] = four.w;
    }
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j++) {
        s[j] = j < seen ? s[j] : -CUDART_INF_F;
        new_max = fmaxf(new_max, s[j]);
    }
    new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 16));  /* the row's other lane */
    const float base = new_max == -CUDART_INF_F ? 0.0f : new_max; /* no (-inf) - (-inf) */
    const float correction = exp2f((r.max - base) * scale_log2);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j++) {
        s[j] = exp2f((s[j] - base) * scale_log2);
        sum += s[j];
    }
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j += 2)
        *(__half2 *)&p[j] = __floats2half2_rn(s[j], s[j + 1]);
    r.max = new_max;
    r.sum = r.sum * correction + sum + __shfl_xor_sync(~0u, sum, 16);
    return correction;
}

/* Hidden keys have probability 0, but 0 * NaN is NaN: takes products that are not finite again, from the keys that the
 * row sees. */
DEV void mend_products(float *products, const __half *p, const tile &v, int column, int seen)
{
#pragma unroll 1
    for (int d = 0; d < LANE_COLUMNS; d++) {
        if (__all_sync(~0u, isfinite(products[d])))
            continue;
        float sum = 0.0f;
        for (int key = 0; key < KV_TILE; key++)
            sum += key < seen ? __half2float(p[key]) * __half2float(v[key][column + d]) : 0.0f;
        products[d] = isfinite(products[d]) ? products[d] : sum;
    }
}

/* One tile of keys, of which this lane's row sees the first `seen`. The warp's lanes 0..15 have a row each and its
 * columns 0..31, lanes 16..31 the same rows and columns 32..63. */
DEV void attend(row_state &r, shared_tiles &tiles, const left_matrix (&q)[STEPS], int stage, int seen, float scale_log2)
{
    const int warp_row = threadIdx.x / 32 * WARP_ROWS, row = warp_row + threadIdx.x % 16;
    const int column = threadIdx.x % 32 / 16 * LANE_COLUMNS;
    multiply_scores(tiles.scores[warp_row], q, tiles.k[stage]);
    __syncwarp();
    const float correction =
        take_softmax(r, &tiles.p[row][column], &tiles.scores[row][column], seen - column, scale_log2);
    __syncwarp();
    multiply_values(tiles.scores[warp_row], tiles.p[warp_row], tiles.v[stage]);
    __syncwarp();
    if (__any_sync(~0u, seen < KV_TILE))
        mend_products(&tiles.scores[row][column], tiles.p[row], tiles.v[stage], column, seen);
#pragma unroll
    for (int d = 0; d < LANE_COLUMNS; d++)
        r.output[d] = r.output[d] * correction + tiles.scores[row][column + d];
    __syncwarp();
}

/* Divides this lane's half of a row by the sum and stores it, 16 bytes at a time. */
DEV void store_half_row(__half *to, const row_state &r)
{
    const float inverse = r.sum == 0.0f ? 0.0f : 1.0f / r.sum; /* a row that sees no key gets 0 */
#pragma unroll
    for (int d = 0; d < LANE_COLUMNS; d += CHUNK) {
        __half2 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            pairs[i] = __floats2half2_rn(r.output[d + 2 * i] * inverse, r.output[d + 2 * i + 1] * inverse);
        *(uint4 *)(to + d) = *(const uint4 *)pairs;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    extern __shared__ __align__(128) unsigned char smem[];
    shared_tiles &tiles = *(shared_tiles *)smem;
    wait_for_previous_kernel();
    const int batch = blockIdx.z, head = blockIdx.y, kv_head = head / a.group, q_first = blockIdx.x * Q_TILE;
    const __half *q = (const __half *)a.q + batch * a.q_stride.batch + head * a.q_stride.head;
    const __half *k = (const __half *)a.k + batch * a.k_stride.batch + kv_head * a.k_stride.head;
    const __half *v = (const __half *)a.v + batch * a.v_stride.batch + kv_head * a.v_stride.head;
    __half *o = (__half *)a.o + batch * a.o_stride.batch + head * a.o_stride.head;
    const int warp_row = threadIdx.x / 32 * WARP_ROWS, row = q_first + warp_row + threadIdx.x % 16;
    const visible_entry entry = entry_of_batch(a, batch);
    const visible_keys visible = visible_to_rows(entry, q_first, Q_TILE);
    const int seen = visible_end(entry, row);

    copy_rows(tiles.q, q, a.q_stride.row, q_first, a.q_len);
    copy_rows(tiles.k[0], k, a.k_stride.row, 0, visible.end);
    copy_rows(tiles.v[0], v, a.v_stride.row, 0, visible.end);
    row_state r = {};
    r.max = -CUDART_INF_F;
    left_matrix queries[STEPS];

    int stage = 0;
    for (int first = 0; first < visible.end; first += KV_TILE) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads(); /* this tile has landed for all, and all have left the other buffer */
        copy_rows(tiles.k[stage ^ 1], k, a.k_stride.row, first + KV_TILE, visible.end);
        copy_rows(tiles.v[stage ^ 1], v, a.v_stride.row, first + KV_TILE, visible.end);
        if (first == 0)
#pragma unroll
            for (int step = 0; step < STEPS; step++)
                wmma::load_matrix_sync(queries[step], &tiles.q[warp_row][SIDE * step], DIM);
        attend(r, tiles, queries, stage, seen - first, a.scale_log2);
        stage ^= 1;
    }

    if (row >= a.q_len)
        return;
    store_half_row(o + row * a.o_stride.row + threadIdx.x % 32 / 16 * LANE_COLUMNS, r);
    if (a.lse != nullptr && threadIdx.x % 32 < 16)
        a.lse[((int64_t)batch * a.q_heads + head) * a.q_len + row] =
            r.sum == 0.0f ? -CUDART_INF_F : r.max * a.scale + logf(r.sum);
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {
    .work = ACR__WORK_TILES, .q_tile = Q_TILE, .threads = THREADS, .smem_bytes = SMEM_BYTES};

static const acr__fwd_rates RATES = {
    .mma_flop_per_cycle = 162.0, /* shared memory binds, not the tensor cores */
    .exp_per_cycle = 16.0,
    .step_cycles = 7250.0,
    .cta_cycles = 3000.0,
    .ctas_per_sm = 3,
};

#include "cuda/kernels/ladder/ladder.h"

const acr__kernel KERNEL_DESCRIPTION = {LADDER_KERNEL("fwd_ladder2"), .cost = ladder_cost, .shape = tile_shape};

#endif
