/* How a producer feeds consumer warpgroups through shared memory: rings of K and V tiles that all consumers read, a
 * ring of Q tiles and places for each of them, and the turns in which they use the tensor cores.
 *
 * Use number n of a ring is slot n % slots in round n / slots; a slot has a barrier for "full" and one for "empty".
 *
 * An includer defines, beside the parameters of places.cuh: CONSUMERS, each with GROUP_ROWS query rows; STAGES, the
 * slots of the rings of K and V, and Q_STAGES; PANEL_ELEMS of a row in a panel, QK_PANELS and Q_PANEL_BYTES of a
 * consumer's Q tile of Q_GROUP_BYTES in all; PLACE_BYTES (32 if PACKED, else 16); and where in shared memory the places
 * and the barriers of Q are: PLACES_AT, Q_FULL_AT, Q_EMPTY_AT. Q itself comes first. */
#ifndef ACR_DEVICE_ATTENTION_PIPELINE_CUH
#define ACR_DEVICE_ATTENTION_PIPELINE_CUH

#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/attention/tile_scheduler.cuh"
#include "cuda/device/isa/tma.cuh"

enum {
    FIRST_TURN = 1, /* named barriers (0 is __syncthreads): from here on a turn for each consumer */
    TURN_THREADS = 2 * WARPGROUP_THREADS
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

/* Loads the rows of a tile from `row` on, panel after panel, by one thread. */
DEV void load_tile(uint32_t to, const fwd_map *map, uint32_t full, int panels, int panel_bytes, int row, int head,
                   int batch)
{
    barrier_arrive_expecting(full, panels * panel_bytes);
    for (int panel = 0; panel < panels; panel++)
        load_box(to + panel * panel_bytes, map, full, PANEL_ELEMS * panel, row, head, batch);
}

/* Use number `use` of the ring of K or V at `tiles`: a key tile of a place. */
DEV void produce_keys(uint32_t tiles, uint32_t full, uint32_t empty, int panels, int panel_bytes, const place &p,
                      const fwd_map *map, int kv_head, int use, int kv_tile)
{
    const int stage = stage_of(use);
    barrier_wait(empty + BARRIER_BYTES * stage, parity_of(use) ^ 1);
    load_tile(tiles + stage * (panels * panel_bytes), map, full + BARRIER_BYTES * stage, panels, panel_bytes,
              p.rows.kv_begin + kv_tile * KV_TILE, kv_head, p.batch);
}

/* ---- Q: for each consumer a slot a stage, with the place that it is of ---- */

DEV int q_slot(int use, int consumer)
{
    return use % Q_STAGES * CONSUMERS + consumer;
}

DEV uint32_t q_parity(int use)
{
    return (uint32_t)(use / Q_STAGES) & 1;
}

/* Tells every consumer its next place, and loads its rows of Q. */
DEV void produce_place(const place &p, const fwd_map *map, uint32_t smem, int use)
{
    for (int consumer = 0; consumer < CONSUMERS; consumer++) {
        const int slot = q_slot(use, consumer);
        const uint32_t full = smem + Q_FULL_AT + BARRIER_BYTES * slot;
        barrier_wait(smem + Q_EMPTY_AT + BARRIER_BYTES * slot, q_parity(use) ^ 1);
        const uint32_t to = smem + PLACES_AT + PLACE_BYTES * slot;
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(p.q_first), "r"(p.head), "r"(p.batch),
                     "r"(p.rows.kv_len)
                     : "memory");
        if (PACKED)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(to + 16), "r"(p.rows.q_begin),
                         "r"(p.rows.q_len), "r"(p.rows.kv_begin)
                         : "memory");
        if (p.q_first < 0)
            barrier_arrive(full);
        else
            load_tile(smem + slot * Q_GROUP_BYTES, map, full, QK_PANELS, Q_PANEL_BYTES,
                      p.rows.q_begin + p.q_first + GROUP_ROWS * consumer, p.head, p.batch);
    }
}

/* Waits for the consumer's next place, and for its rows of Q. */
DEV place wait_place(uint32_t smem, int consumer, int use)
{
    const int slot = q_slot(use, consumer);
    place p;
    barrier_wait(smem + Q_FULL_AT + BARRIER_BYTES * slot, q_parity(use));
    const uint32_t from = smem + PLACES_AT + PLACE_BYTES * slot;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.q_first), "=r"(p.head), "=r"(p.batch), "=r"(p.rows.kv_len)
                 : "r"(from)
                 : "memory");
    p.rows.q_begin = p.rows.q_len = p.rows.kv_begin = 0;
    if (PACKED) {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(p.rows.q_begin), "=r"(p.rows.q_len)
                     : "r"(from + 16)
                     : "memory");
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(p.rows.kv_begin) : "r"(from + 24) : "memory");
    }
    return p;
}

DEV void release_query(uint32_t smem, int consumer, int use)
{
    __syncwarp(); /* every lane has read its place */
    if (threadIdx.x % WARP_THREADS == 0)
        barrier_arrive(smem + Q_EMPTY_AT + BARRIER_BYTES * q_slot(use, consumer));
}

/* Where the consumer's rows of Q are. */
DEV uint32_t query_at(uint32_t smem, int consumer, int use)
{
    return smem + q_slot(use, consumer) * Q_GROUP_BYTES;
}

/* ---- Consumers ---- */

/* The lane's first row within the query tile; of the accumulators it holds this one and the eighth after it. */
DEV int lane_row(int consumer, int lane)
{
    return GROUP_ROWS * consumer + 16 * ((int)threadIdx.x % WARPGROUP_THREADS / WARP_THREADS) + lane / 4;
}

DEV void wait_turn(int consumer)
{
    named_sync(FIRST_TURN + consumer, TURN_THREADS);
}

DEV void pass_turn(int consumer)
{
    named_arrive(FIRST_TURN + (consumer + 1) % CONSUMERS, TURN_THREADS);
}

/* The first turn is consumer 0's; to be called once by it, before its first wait. */
DEV void open_turns(int consumer)
{
    if (consumer == 0)
        named_arrive(FIRST_TURN, TURN_THREADS);
}

/* After the last turn nobody is left to take it: a named barrier must not be left half full. */
DEV void close_turns(int consumer)
{
    if (consumer == 0)
        wait_turn(consumer);
}

#endif
