/* Rung 5 of the ladder: specialisation.
 *
 * Idea: a fifth warp does nothing but copy, and the other four nothing but compute. They meet at barriers in shared
 * memory: a full one for each stage, which the copies themselves complete, and an empty one. The producer runs ahead
 * into the next query tile while the consumers finish this one. CTAs are persistent: as many as fit on the GPU, each
 * starting with the query tile of its own number and drawing further ones from a counter in the workspace, long tiles
 * first, so that a causal mask leaves no SM idle at the end.
 * Expected: with one tile an SM 5 % slower than rung 4, for there is no second tile to draw, and one copying warp
 * starts slower than four; with thousands of causal tiles 16 % faster. Measured: 1 % and 19 % faster.
 *
 * PARAMETERS: none */
#include "fwd_args.h"

enum {
    DIM = 64,
    Q_TILE = 64,
    KV_TILE = 64,
    STAGES = 3,
    SWIZZLED = 1,
    CONSUMER_WARPS = Q_TILE / 16, /* a warp for every 16 rows */
    CONSUMERS = CONSUMER_WARPS * 32,
    PRODUCERS = 32,
    THREADS = CONSUMERS + PRODUCERS,
    CTAS_PER_SM = 3, /* at most; shared memory is the limit elsewhere than on sm_90 */
    Q_BYTES = Q_TILE * DIM * 2,
    TILE_BYTES = KV_TILE * DIM * 2, /* of K, or of V */
    SMEM_BYTES = Q_BYTES + STAGES * 2 * TILE_BYTES
};

#ifdef __CUDACC__

#include "cuda/device/isa/barrier.cuh"
#include "cuda/kernels/ladder/warp_attention.cuh"

/* A ring of stages that one side fills and the other empties, as one of the two sees it. */
typedef struct ring_place {
    int stage;
    uint32_t phase; /* 0 or 1: which of a barrier's phases the stage's next use is */
} ring_place;

DEV void advance(ring_place &p)
{
    p.stage = p.stage == STAGES - 1 ? 0 : p.stage + 1;
    p.phase ^= p.stage == 0;
}

typedef struct barriers {
    /* full: arrivers are the producer's lanes, by their copies landing; of q also lane 0, having written tile_index.
     * empty: arrivers are one lane of each consumer warp. */
    uint64_t full[STAGES], empty[STAGES], q_full, q_empty;
    uint32_t tile_index; /* of the query tile in shared memory, or NO_TILE */
} barriers;

#define NO_TILE UINT32_MAX /* the end of the work */

/* Waits for the phase of this parity to end; returns at once for parity 1 of a fresh barrier. Before sm_90 a warp
 * cannot sleep at a barrier, only ask again. */
DEV void wait(uint64_t &barrier, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    barrier_wait(smem_address(&barrier), parity);
#else
    uint32_t done;
    do
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(smem_address(&barrier)), "r"(parity)
                     : "memory");
    while (!done);
#endif
}

/* Arrives when all copies that this thread has started are in shared memory. */
DEV void arrive_with_copies(uint64_t &barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_address(&barrier)) : "memory");
}

/* One arrival for the whole warp, after its last lane. */
DEV void arrive_as_warp(uint64_t &barrier, int lane)
{
    __syncwarp();
    if (lane == 0)
        barrier_arrive(smem_address(&barrier));
}

typedef struct query_tile {
    int batch, head, q_first;
} query_tile;

DEV uint32_t count_tiles(const fwd_args &a)
{
    return (uint32_t)((a.q_len + Q_TILE - 1) / Q_TILE) * a.q_heads * a.batch;
}

/* Tiles are numbered from the end of all heads to their beginning: with a causal mask the last are the longest. */
DEV query_tile find_tile(const fwd_args &a, uint32_t index)
{
    const uint32_t heads = a.q_heads * a.batch, head = index % heads;
    const int q_tiles = (a.q_len + Q_TILE - 1) / Q_TILE;
    return {(int)(head / a.q_heads), (int)(head % a.q_heads), (q_tiles - 1 - (int)(index / heads)) * Q_TILE};
}

/* Draws from the queue. Tiles 0..gridDim.x - 1 are given by birth, so count draws are made in all, by every CTA until
 * it draws one too far: the last draw of the launch wraps the counter to the 0 at which the next launch finds it. */
DEV uint32_t draw_tile(const fwd_args &a, uint32_t count)
{
    return gridDim.x + atomicInc((uint32_t *)a.workspace, count - 1);
}

DEV void produce(const fwd_args &a, barriers &b, uint32_t q_smem, uint32_t ring, int lane)
{
    const uint32_t count = count_tiles(a);
    ring_place p = {0, 0};
    uint32_t index = blockIdx.x, q_phase = 0;
    for (;;) {
        wait(b.q_empty, q_phase ^ 1);
        if (lane == 0) {
            b.tile_index = index < count ? index : NO_TILE;
            barrier_arrive(smem_address(&b.q_full));
        }
        if (index >= count)
            break;
        const query_tile t = find_tile(a, index);
        const head_rows q_rows = find_rows(a.q, a.q_stride, t.batch, t.head);
        const head_rows k_rows = find_rows(a.k, a.k_stride, t.batch, t.head / a.group);
        const head_rows v_rows = find_rows(a.v, a.v_stride, t.batch, t.head / a.group);
        copy_rows<Q_TILE, PRODUCERS>(q_smem, q_rows, t.q_first, a.q_len, lane);
        arrive_with_copies(b.q_full);
        if (lane == 0)
            index = draw_tile(a, count);
        const int key_end = visible_to_rows(entry_of_batch(a, t.batch), t.q_first, Q_TILE).end;
        for (int first = 0; first < key_end; first += KV_TILE) {
            const uint32_t k_tile = ring + p.stage * 2 * TILE_BYTES;
            wait(b.empty[p.stage], p.phase ^ 1);
            copy_rows<KV_TILE, PRODUCERS>(k_tile, k_rows, first, key_end, lane);
            copy_rows<KV_TILE, PRODUCERS>(k_tile + TILE_BYTES, v_rows, first, key_end, lane);
            arrive_with_copies(b.full[p.stage]);
            advance(p);
        }
        index = __shfl_sync(~0u, index, 0);
        q_phase ^= 1;
    }
    arrive_with_copies(b.q_full);
}

DEV void consume(const fwd_args &a, barriers &b, uint32_t q_smem, uint32_t ring, int warp_row, int lane)
{
    ring_place p = {0, 0};
    for (uint32_t q_phase = 0;; q_phase ^= 1) {
        wait(b.q_full, q_phase);
        const uint32_t index = b.tile_index;
        if (index == NO_TILE)
            break;
        const query_tile t = find_tile(a, index);
        left_operands queries;
        load_queries(queries, q_smem, warp_row, lane);
        arrive_as_warp(b.q_empty, lane);

        const visible_entry entry = entry_of_batch(a, t.batch);
        const visible_keys visible = visible_to_rows(entry, t.q_first, Q_TILE);
        const int row = t.q_first + warp_row + lane / 4;
        const int seen[2] = {visible_end(entry, row), visible_end(entry, row + 8)};
        output_tile o;
        row_state r;
        clear(o, r);
        for (int first = 0; first < visible.end; first += KV_TILE) {
            const uint32_t k_tile = ring + p.stage * 2 * TILE_BYTES;
            const int seen_in_tile[2] = {seen[0] - first, seen[1] - first};
            wait(b.full[p.stage], p.phase);
            attend(o, r, queries, k_tile, k_tile + TILE_BYTES, seen_in_tile, a.scale_log2, lane);
            arrive_as_warp(b.empty[p.stage], lane);
            advance(p);
        }
        store_rows(a, t.batch, t.head, t.q_first + warp_row, o, r, lane);
    }
}

/* CTAs of an SM that registers must leave room for: three where shared memory does, too. */
#if __CUDA_ARCH__ == 900
#define MIN_CTAS CTAS_PER_SM
#else
#define MIN_CTAS 1
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    extern __shared__ __align__(128) unsigned char smem[]; /* Q, then the stages: K, V */
    __shared__ barriers b;
    const int warp = threadIdx.x / WARP_THREADS, lane = threadIdx.x % WARP_THREADS;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(smem_address(&b.full[stage]), PRODUCERS);
            barrier_init(smem_address(&b.empty[stage]), CONSUMER_WARPS);
        }
        barrier_init(smem_address(&b.q_full), PRODUCERS + 1);
        barrier_init(smem_address(&b.q_empty), CONSUMER_WARPS);
    }
    __syncthreads();
    wait_for_previous_kernel();
    if (warp == CONSUMER_WARPS)
        produce(a, b, smem_address(smem), smem_address(smem) + Q_BYTES, lane);
    else
        consume(a, b, smem_address(smem), smem_address(smem) + Q_BYTES, warp * WARP_ROWS, lane);
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {
    .work = ACR__WORK_TILES, .q_tile = Q_TILE, .threads = THREADS, .smem_bytes = SMEM_BYTES};

static const acr__fwd_rates RATES = {
    .mma_flop_per_cycle = 1020.0,
    .exp_per_cycle = 16.0,
    .step_cycles = 1960.0,
    .cta_cycles = 3500.0,
    .ctas_per_sm = CTAS_PER_SM,
};

#include "cuda/kernels/ladder/ladder.h"

/* The counter of the queue. */
static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    (void)problem, (void)device;
    return sizeof(uint32_t);
}

/* No more CTAs than fit beside each other, and than there are tiles. */
static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    const int32_t reserved_bytes = 2048; /* of shared memory, a CTA: its barriers, and what the hardware keeps */
    const int32_t by_smem = device->smem_per_sm_bytes / (SMEM_BYTES + reserved_bytes);
    const int64_t resident = (int64_t)device->sm_count * (by_smem < CTAS_PER_SM ? by_smem : CTAS_PER_SM);
    const int64_t tiles = acr__q_tiles(problem, Q_TILE) * problem->q_heads * problem->batch;
    *launch = (acr__launch){
        .grid = {(uint32_t)(tiles < resident ? tiles : resident), 1, 1},
        .block = THREADS,
        .smem_bytes = SMEM_BYTES,
    };
}

const acr__kernel KERNEL_DESCRIPTION = {LADDER_KERNEL("fwd_ladder5"), .workspace = workspace,
                                        .cost = ladder_tensor_cost, .shape = shape};

#endif
