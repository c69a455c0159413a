/* Rung 3 of the ladder: fusion in registers.
 *
 * Idea: the products by mma.sync, whose accumulator layout is known, so that scores, probabilities and output never
 * leave the registers of the warp that made them. The score buffer of rung 2, its barriers and its traffic are gone;
 * all of it is in warp_attention.cuh, since rungs 4 and 5 keep it. K and V arrive as before, in plain rows.
 * Expected: 1.4 times rung 2; measured 1.2. What remains is reading K and V: the 8 rows that ldmatrix takes at once are
 * 128 bytes apart and so in the same banks, and each of its reads takes 32 cycles, not 4.
 *
 * PARAMETERS: none */
#include "fwd_args.h"

enum {
    DIM = 64,
    Q_TILE = 64,
    KV_TILE = 64,
    STAGES = 2,
    SWIZZLED = 0,
    THREADS = Q_TILE / 16 * 32, /* a warp for every 16 rows */
    CTAS_PER_SM = 3             /* that registers leave room for */
};

#ifdef __CUDACC__

#include "cuda/kernels/ladder/warp_attention.cuh"

typedef struct shared_tiles {
    unsigned char q[Q_TILE * DIM * ELEM_BYTES];
    unsigned char k[STAGES][KV_TILE * DIM * ELEM_BYTES], v[STAGES][KV_TILE * DIM * ELEM_BYTES];
} shared_tiles;

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    __shared__ __align__(128) shared_tiles tiles;
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

    copy_rows<Q_TILE, THREADS>(smem_address(tiles.q), q_rows, q_first, a.q_len, thread);
    copy_rows<KV_TILE, THREADS>(smem_address(tiles.k[0]), k_rows, 0, visible.end, thread);
    copy_rows<KV_TILE, THREADS>(smem_address(tiles.v[0]), v_rows, 0, visible.end, thread);
    copies_commit();
    COPIES_WAIT(0);
    __syncthreads();
    left_operands queries;
    output_tile o;
    row_state r;
    load_queries(queries, smem_address(tiles.q), warp_row, lane);
    clear(o, r);

    int stage = 0;
    for (int first = 0; first < visible.end; first += KV_TILE) {
        const int next = first + KV_TILE, seen_in_tile[2] = {seen[0] - first, seen[1] - first};
        if (next < visible.end) {
            copy_rows<KV_TILE, THREADS>(smem_address(tiles.k[stage ^ 1]), k_rows, next, visible.end, thread);
            copy_rows<KV_TILE, THREADS>(smem_address(tiles.v[stage ^ 1]), v_rows, next, visible.end, thread);
            copies_commit();
        }
        attend(o, r, queries, smem_address(tiles.k[stage]), smem_address(tiles.v[stage]), seen_in_tile, a.scale_log2,
               lane);
        COPIES_WAIT(0);
        __syncthreads(); /* the next tile has landed for all, and all have left this one */
        stage ^= 1;
    }
    store_rows(a, batch, head, q_first + warp_row, o, r, lane);
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {.work = ACR__WORK_TILES, .q_tile = Q_TILE, .threads = THREADS};

static const acr__fwd_rates RATES = {
    .mma_flop_per_cycle = 216.0, /* shared memory binds: bank conflicts */
    .exp_per_cycle = 16.0,
    .step_cycles = 6000.0,
    .cta_cycles = 3000.0,
    .ctas_per_sm = CTAS_PER_SM,
};

#include "cuda/kernels/ladder/ladder.h"

const acr__kernel KERNEL_DESCRIPTION = {LADDER_KERNEL("fwd_ladder3"), .cost = ladder_cost, .shape = tile_shape};

#endif
