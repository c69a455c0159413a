/* How a producer feeds consumer warpgroups through shared memory: rings of K and V tiles that all consumers read, a
 * ring of Q tiles and work tiles for each consumer, and the ping-pong barriers by which consumers take turns at the
 * tensor cores.
 *
 * Use number n of a ring is slot n % slots in round n / slots; a slot has a barrier for "full" and one for "empty".
 *
 * An includer defines, beside the parameters of tile_scheduler.cuh: CONSUMERS, each with GROUP_ROWS query rows; STAGES,
 * the slots of the rings of K and V, and Q_STAGES; PACKED; QK_PANELS panels of Q_PANEL_BYTES with PANEL_ELEMS in a row,
 * of a consumer's rows of Q; and struct shared_memory with, for each of the Q_STAGES * CONSUMERS slots of Q, its rows
 * q, its work tile `work` (4 words, 8 if PACKED), and its barriers q_full and q_empty. */
#ifndef ACR_DEVICE_ATTENTION_PIPELINE_CUH
#define ACR_DEVICE_ATTENTION_PIPELINE_CUH

#include "cuda/device/attention/kv_loader.cuh"
#include "cuda/device/attention/tile_scheduler.cuh"
#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/isa/shared.cuh"

enum {
    FIRST_PING_PONG = 1, /* named barriers (0 is __syncthreads): from here on one for each consumer */
    PING_PONG_THREADS = 2 * WARPGROUP_THREADS
};

/* ---- K and V: rings that all consumers read ---- */

DEV int stage_of(int use)
{
    return use % STAGES;
}

DEV uint32_t parity_of(int use)
{
    return (uint32_t)(use / STAGES) & 1;
}

/* Waits, as a consumer, for use number `use` of the barriers at `full`. */
DEV void wait_full(uint32_t full, int use)
{
    barrier_wait(full + BARRIER_BYTES * stage_of(use), parity_of(use));
}

/* One arrival per warp: the warp reads the stage no more. */
DEV void release(uint32_t empty, int use)
{
    if (threadIdx.x % WARP_THREADS == 0)
        barrier_arrive(empty + BARRIER_BYTES * stage_of(use));
}

/* Where a ring of K or V lies: its tiles and its barriers. */
typedef struct kv_ring {
    uint32_t tiles, full, empty;
    tile_panels panels;
} kv_ring;

/* Loads a key tile, as use number `use` of the ring, once the stage is empty. */
DEV void produce_keys(const kv_ring &r, const fwd_map *map, const key_source &s, int use, int kv_tile)
{
    const int stage = stage_of(use);
    barrier_wait(r.empty + BARRIER_BYTES * stage, parity_of(use) ^ 1);
    load_key_boxes(r.tiles + stage * (r.panels.count * r.panels.bytes), map, r.full + BARRIER_BYTES * stage, r.panels,
                   s, kv_tile * KV_TILE);
}

/* ---- Q: for each consumer a slot a stage, with the work tile that it is of ---- */

DEV int q_slot(int use, int consumer)
{
    return use % Q_STAGES * CONSUMERS + consumer;
}

DEV uint32_t q_parity(int use)
{
    return (uint32_t)(use / Q_STAGES) & 1;
}

/* Where the consumer's rows of Q are. */
DEV uint32_t query_at(uint32_t smem, int consumer, int use)
{
    return ADDRESS(smem, q) + q_slot(use, consumer) * (QK_PANELS * Q_PANEL_BYTES);
}

/* Tells every consumer its next work tile, and loads its rows of Q. */
DEV void produce_work(const work_tile &t, const fwd_map *map, uint32_t smem, int use)
{
    for (int consumer = 0; consumer < CONSUMERS; consumer++) {
        const int slot = q_slot(use, consumer);
        const uint32_t full = ADDRESS(smem, q_full) + BARRIER_BYTES * slot;
        barrier_wait(ADDRESS(smem, q_empty) + BARRIER_BYTES * slot, q_parity(use) ^ 1);
        const uint32_t to = ADDRESS(smem, work) + (uint32_t)sizeof(shared_memory::work[0]) * slot;
        store_shared_4(to, t.q_first, t.head, t.batch, t.rows.kv_len);
        if (PACKED)
            store_shared_4(to + 16, t.rows.q_begin, t.rows.q_len, t.rows.kv_begin, t.rows.kv_begin);
        if (t.q_first < 0)
            barrier_arrive(full);
        else
            load_boxes(query_at(smem, consumer, use), map, full, {QK_PANELS, Q_PANEL_BYTES, PANEL_ELEMS},
                       t.rows.q_begin + t.q_first + GROUP_ROWS * consumer, t.head, t.batch);
    }
}

/* Waits for the consumer's next work tile, and for its rows of Q. */
DEV work_tile wait_work(uint32_t smem, int consumer, int use)
{
    const int slot = q_slot(use, consumer);
    barrier_wait(ADDRESS(smem, q_full) + BARRIER_BYTES * slot, q_parity(use));
    const uint32_t from = ADDRESS(smem, work) + (uint32_t)sizeof(shared_memory::work[0]) * slot;
    const uint4 tile = load_shared_4(from);
    work_tile t = {(int)tile.x, (int)tile.y, (int)tile.z, {0, 0, 0, (int)tile.w}};
    if (PACKED) {
        const uint2 rows = load_shared_2(from + 16);
        t.rows.q_begin = (int)rows.x;
        t.rows.q_len = (int)rows.y;
        t.rows.kv_begin = (int)load_shared(from + 24);
    }
    return t;
}

DEV void release_query(uint32_t smem, int consumer, int use)
{
    __syncwarp(); /* every lane has read its work tile */
    if (threadIdx.x % WARP_THREADS == 0)
        barrier_arrive(ADDRESS(smem, q_empty) + BARRIER_BYTES * q_slot(use, consumer));
}

/* ---- Consumers ---- */

/* The lane's first row within the query tile; of the accumulators it holds this one and the eighth after it. */
DEV int lane_row(int consumer, int thread)
{
    return GROUP_ROWS * consumer + 16 * (thread % WARPGROUP_THREADS / WARP_THREADS) + thread % WARP_THREADS / 4;
}

/* Waits until it is the consumer's turn at the tensor cores. */
DEV void wait_ping_pong(int consumer)
{
    named_sync(FIRST_PING_PONG + consumer, PING_PONG_THREADS);
}

/* Gives the turn to the next consumer. */
DEV void pass_ping_pong(int consumer)
{
    named_arrive(FIRST_PING_PONG + (consumer + 1) % CONSUMERS, PING_PONG_THREADS);
}

/* The first turn is consumer 0's; to be called once by it, before its first wait. */
DEV void open_ping_pong(int consumer)
{
    if (consumer == 0)
        named_arrive(FIRST_PING_PONG, PING_PONG_THREADS);
}

/* After the last turn nobody is left to take it: a named barrier must not be left half full. */
DEV void close_ping_pong(int consumer)
{
    if (consumer == 0)
        wait_ping_pong(consumer);
}

#endif
