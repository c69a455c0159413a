/* How a producer feeds consumer warpgroups through shared memory: rings of K and V tiles that all consumers read, a
 * ring of Q tiles and work tiles for each consumer, and the ping-pong barriers by which consumers take turns at the
 * tensor cores.
 *
 * Use number n of a ring is slot n % slots in round n / slots; a slot has a barrier for "full" and one for "empty".
 *
 * An includer defines, beside the parameters of tile_scheduler.cuh: CONSUMERS, each with GROUP_ROWS query rows; STAGES,
 * the slots of the rings of K and V, and Q_STAGES; QK_PANELS panels of Q_PANEL_BYTES with PANEL_ELEMS in a row,
 * of a consumer's rows of Q; and struct shared_memory with, for each of the Q_STAGES * CONSUMERS slots of Q, its rows
 * q, its work tile `work` (4 words, 8 if SEQUENCES, 4 more with FWD_TERM_LIMITS or BIAS_TILES), and its barriers q_full
 * and q_empty.
 *
 * PLANS_AHEAD=1: a thread of its own, in plan_work, finds each work tile and which of its key tiles a consumer visits,
 * while the one before it is at work: it is a long chain of instructions, for which the producer would leave its rings
 * empty and the consumers would wait. Then `work` has 4 words more, and struct shared_memory has barriers of 1 arrival:
 * work_known for each of the Q_STAGES, 2 at least, and plan_next. */
#ifndef ACR_DEVICE_ATTENTION_PIPELINE_CUH
#define ACR_DEVICE_ATTENTION_PIPELINE_CUH

#include "cuda/device/attention/kv_loader.cuh"
#include "cuda/device/attention/tile_scheduler.cuh"
#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/isa/shared.cuh"
#if BIAS_TILES
#include "cuda/device/attention/bias_survey.cuh"
#endif

#ifndef PLANS_AHEAD
#define PLANS_AHEAD 0
#endif

enum {
    GROUP_POSITIONS = GROUP_ROWS / HEADS_IN_TILE, /* of a consumer */
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
    int stage_bytes;
} kv_ring;

/* Loads a key tile, as use number `use` of the ring, once the stage is empty. */
DEV void produce_keys(const kv_ring &r, const fwd_map *map, const key_source &s, int use, int kv_tile)
{
    const int stage = stage_of(use);
    barrier_wait(r.empty + BARRIER_BYTES * stage, parity_of(use) ^ 1);
    load_key_boxes(r.tiles + stage * r.stage_bytes, map, r.full + BARRIER_BYTES * stage, r.panels, s,
                   kv_tile * KV_TILE);
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

/* The key tiles of a work tile, for one consumer: it visits [first, end), and [full_first, full_end) without a mask.
 * Reads global memory: ranges. */
DEV visible_tiles tiles_of_consumer(const fwd_args &a, const visible_entry &e, const work_tile &t,
                                    const visible_tiles &all, int consumer)
{
    const visible_keys seen =
        find_visible_keys(a, e, entry_number(t), t.q_first + GROUP_POSITIONS * consumer, GROUP_POSITIONS);
    const visible_tiles own = visible_tiles_of(count_from(key_origin(e, t.q_first), seen), KV_TILE);
    /* Rows that see no key have all tiles masked on both sides: their keys' first may lie within any of these tiles. */
    if (WINDOWS && own.first >= own.end)
        return {all.first, all.end, all.end, all.end};
    if (BIAS_TILES) /* a bias may hide all tiles that these rows see by the rule, and leave others' */
        return {all.first, max(own.full_first, all.first), max(own.full_end, all.first), all.end};
    return {all.first, own.full_first, own.full_end, all.end};
}

DEV uint32_t work_at(uint32_t smem, int slot)
{
    return ADDRESS(smem, work) + (uint32_t)sizeof(shared_memory::work[0]) * slot;
}

/* surveyed: in lines with BIAS_TILES, what the survey of the bias says of the tile (bias_survey.cuh). */
DEV void write_work(const work_tile &t, uint32_t smem, int slot, const visible_tiles &surveyed = {})
{
    store_shared_4(work_at(smem, slot), t.q_first, t.head, t.batch, t.rows.kv_len);
    if (SEQUENCES)
        store_shared_4(work_at(smem, slot) + 16, t.rows.q_begin, t.rows.q_len, t.rows.kv_begin, entry_number(t));
#if VISIBLE_LIMITS
    store_shared_4(work_at(smem, slot) + (SEQUENCES ? 32 : 16), t.rows.kv_start, 0, 0, 0);
#endif
#if BIAS_TILES
    store_shared_4(work_at(smem, slot) + 16, surveyed.first, surveyed.full_first, surveyed.full_end, surveyed.end);
#endif
}

/* Loads a consumer's rows of Q, or none where there is no more work. */
DEV void load_query(const work_tile &t, const fwd_map *map, uint32_t smem, int consumer, int use)
{
    const uint32_t full = ADDRESS(smem, q_full) + BARRIER_BYTES * q_slot(use, consumer);
    if (t.q_first < 0)
        barrier_arrive(full);
    else
        load_boxes(query_at(smem, consumer, use), map, full, {QK_PANELS, Q_PANEL_BYTES, PANEL_ELEMS},
                   t.rows.q_begin + t.q_first + GROUP_POSITIONS * consumer, t.head, t.batch);
}

/* Tells every consumer its next work tile, and loads its rows of Q. */
DEV void produce_work(const work_tile &t, const fwd_map *map, uint32_t smem, int use,
                      const visible_tiles &surveyed = {})
{
    for (int consumer = 0; consumer < CONSUMERS; consumer++) {
        const int slot = q_slot(use, consumer);
        barrier_wait(ADDRESS(smem, q_empty) + BARRIER_BYTES * slot, q_parity(use) ^ 1);
        write_work(t, smem, slot, surveyed);
        load_query(t, map, smem, consumer, use);
    }
}

/* The same of work that has been planned. */
DEV void load_queries(const work_tile &t, const fwd_map *map, uint32_t smem, int use)
{
    for (int consumer = 0; consumer < CONSUMERS; consumer++)
        load_query(t, map, smem, consumer, use);
}

#if BIAS_TILES
/* work: work_at of its slot. */
DEV visible_tiles read_surveyed(uint32_t work)
{
    const uint4 s = load_shared_4(work + 16);
    return {(int)s.x, (int)s.y, (int)s.z, (int)s.w};
}
#endif

/* The work tile of a slot that has been told. */
DEV work_tile read_work(uint32_t smem, int consumer, int use)
{
    const uint32_t from = work_at(smem, q_slot(use, consumer));
    const uint4 tile = load_shared_4(from);
    work_tile t = {(int)tile.x, (int)tile.y, (int)tile.z, {0, 0, 0, (int)tile.w}};
    set_entry_number(t, SEQUENCES ? (int)load_shared(from + 28) : t.batch);
#if VISIBLE_LIMITS
    t.rows.kv_start = (int)load_shared(from + (SEQUENCES ? 32 : 16));
#endif
    if (SEQUENCES) {
        const uint2 rows = load_shared_2(from + 16);
        t.rows.q_begin = (int)rows.x;
        t.rows.q_len = (int)rows.y;
        t.rows.kv_begin = (int)load_shared(from + 24);
    }
    return t;
}

/* Waits for the consumer's next work tile, and for its rows of Q. */
DEV work_tile wait_work(uint32_t smem, int consumer, int use)
{
    barrier_wait(ADDRESS(smem, q_full) + BARRIER_BYTES * q_slot(use, consumer), q_parity(use));
    return read_work(smem, consumer, use);
}

#if PLANS_AHEAD
DEV uint32_t tiles_at(uint32_t smem, int slot)
{
    return work_at(smem, slot) + (SEQUENCES ? 32 : 16) + (VISIBLE_LIMITS || BIAS_TILES ? 16 : 0);
}

DEV visible_tiles read_tiles(uint32_t smem, int consumer, int use)
{
    const uint4 t = load_shared_4(tiles_at(smem, q_slot(use, consumer)));
    return {(int)t.x, (int)t.y, (int)t.z, (int)t.w};
}

DEV uint32_t work_known(uint32_t smem, int use)
{
    return ADDRESS(smem, work_known) + BARRIER_BYTES * (use % Q_STAGES);
}

/* Tells the producer and every consumer a work tile and its key tiles, once the consumers have released the slots.
 * surveyed: see write_work. */
DEV void tell_work(const fwd_args &a, const work_tile &t, uint32_t smem, int use, const visible_tiles &surveyed = {})
{
    const visible_entry entry = entry_of(a, t);
#if BIAS_TILES
    const visible_tiles all = without_hidden(find_key_tiles(a, t), surveyed);
#else
    const visible_tiles all = find_key_tiles(a, t);
#endif
#pragma unroll 1
    for (int consumer = 0; consumer < CONSUMERS; consumer++) {
        const int slot = q_slot(use, consumer);
        const visible_tiles tiles = tiles_of_consumer(a, entry, t, all, consumer);
        barrier_wait(ADDRESS(smem, q_empty) + BARRIER_BYTES * slot, q_parity(use) ^ 1);
        write_work(t, smem, slot, surveyed);
        store_shared_4(tiles_at(smem, slot), tiles.first, tiles.full_first, tiles.full_end, tiles.end);
    }
    barrier_arrive(work_known(smem, use));
}

/* Work is not taken from the queue earlier than needed, so that CTAs end together: the producer asks for the next tile
 * with so many key tiles left to load. */
enum {
    PLAN_TILES = 2
};

DEV void ask_plan(uint32_t smem)
{
    barrier_arrive(ADDRESS(smem, plan_next));
}

DEV void wait_asked(uint32_t smem, int use)
{
    barrier_wait(ADDRESS(smem, plan_next), (uint32_t)use & 1);
}

/* As the producer: the next work tile. */
DEV work_tile wait_planned(uint32_t smem, int use)
{
    barrier_wait(work_known(smem, use), q_parity(use));
    return read_work(smem, 0, use);
}
#endif

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

/* Where the lane's row h of a tile is in its batch entry: which row of which head. Of a consumer's rows those of one
 * head follow each other, as a box of several heads brings them. row: the lane's first. */
DEV int row_of(const work_tile &t, int row, int h)
{
    if (HEADS_IN_TILE == 1)
        return t.q_first + row + 8 * h;
    /* where a head has eight rows both are at one position: the compiler does not see that of the sum */
    return t.q_first + row / GROUP_ROWS * GROUP_POSITIONS + (row + 8 * h % GROUP_POSITIONS) % GROUP_POSITIONS;
}

DEV int head_of(const work_tile &t, int row, int h)
{
    return HEADS_IN_TILE == 1 ? t.head : t.head + (row + 8 * h) % GROUP_ROWS / GROUP_POSITIONS;
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
