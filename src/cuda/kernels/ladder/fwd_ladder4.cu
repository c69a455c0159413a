/* Rung 4 of the ladder: the pipeline.
 *
 * Idea: K and V go through a ring of three stages, so that two tiles are on their way while a third is computed on,
 * and a step has one barrier. In the tiles the 16-byte chunks of a row are XORed with the row's number: the 8 rows
 * that ldmatrix takes at once lie in 8 different groups of banks, without padding.
 * Expected: 2.2 times rung 3, nearly all of it from the swizzle: an ldmatrix takes 4 cycles of shared memory, not 32.
 * Measured: 2.5, all of it from the swizzle. A third stage hides DRAM's latency; where K and V come from L2, two do.
 *
 * PARAMETERS: none */
#include "fwd_args.h"

enum {
    DIM = 64,
    Q_TILE = 64,
    KV_TILE = 64,
    STAGES = 3,
    SWIZZLED = 1,
    THREADS = Q_TILE / 16 * 32, /* a warp for every 16 rows */
    CTAS_PER_SM = 3,            /* that registers leave room for */
    Q_BYTES = Q_TILE * DIM * 2,
    TILE_BYTES = KV_TILE * DIM * 2, /* of K, or of V */
    SMEM_BYTES = Q_BYTES + STAGES * 2 * TILE_BYTES
};

#ifdef __CUDACC__

#include "cuda/kernels/ladder/warp_attention.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    extern __shared__ __align__(128) unsigned char smem[]; /* Q, then the stages: K, V */
    const uint32_t q_tile = smem_address(smem), ring = q_tile + Q_BYTES;
    wait_for_previous_kernel();
    const int thread = threadIdx.x, lane = thread % WARP_THREADS, warp_row = thread / WARP_THREADS * WARP_ROWS;
    const int batch = blockIdx.z, head = blockIdx.y, kv_head = head / a.group, q_first = blockIdx.x * Q_TILE;
    const head_rows q_rows = find_rows(a.q, a.q_stride, batch, head);
    const head_rows k_rows = find_rows(a.k, a.k_stride, batch, kv_head);
    const head_rows v_rows = find_rows(a.v, a.v_stride, batch, kv_head);
    const visible_entry entry = entry_of_batch(a, batch);
    const visible_keys visible = visible_to_rows(entry, q_first, Q_TILE);
    const int row = q_first + warp_row + lane / 4;
    const int seen[2] = {visible_end(entry, row), visible_end(entry, row + 8)};

    /* Starts copying the tiles that begin at a key, if there are any. A group of copies a step, even an empty one, so
     * that "all but the newest STAGES - 2 groups" always means the step to be computed. */
    const auto load_step = [&](int stage, int first) {
        const uint32_t k_tile = ring + stage * 2 * TILE_BYTES;
        if (first < visible.end) {
            copy_rows<KV_TILE, THREADS>(k_tile, k_rows, first, visible.end, thread);
            copy_rows<KV_TILE, THREADS>(k_tile + TILE_BYTES, v_rows, first, visible.end, thread);
        }
        copies_commit();
    };
    copy_rows<Q_TILE, THREADS>(q_tile, q_rows, q_first, a.q_len, thread);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++)
        load_step(stage, stage * KV_TILE);

    left_operands queries;
    output_tile o;
    row_state r;
    clear(o, r);
    int stage = 0;
    for (int first = 0; first < visible.end; first += KV_TILE) {
        COPIES_WAIT(STAGES - 2);
        __syncthreads(); /* this step's tiles have landed for all, and all have left those of the step before */
        load_step(stage == 0 ? STAGES - 1 : stage - 1, first + (STAGES - 1) * KV_TILE);
        if (first == 0)
            load_queries(queries, q_tile, warp_row, lane);
        const uint32_t k_tile = ring + stage * 2 * TILE_BYTES;
        const int seen_in_tile[2] = {seen[0] - first, seen[1] - first};
        attend(o, r, queries, k_tile, k_tile + TILE_BYTES, seen_in_tile, a.scale_log2, lane);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    store_rows(a, batch, head, q_first + warp_row, o, r, lane);
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {
    .work = ACR__WORK_TILES, .q_tile = Q_TILE, .threads = THREADS, .smem_bytes = SMEM_BYTES};

static const acr__fwd_rates RATES = {
    .mma_flop_per_cycle = 1000.0,
    .exp_per_cycle = 16.0,
    .step_cycles = 2050.0,
    .cta_cycles = 3000.0,
    .ctas_per_sm = CTAS_PER_SM,
};

#include "cuda/kernels/ladder/ladder.h"

const acr__kernel KERNEL_DESCRIPTION = {LADDER_KERNEL("fwd_ladder4"), .cost = ladder_tensor_cost, .shape = tile_shape};

#endif
