/* Forward attention with wide heads on Hopper's warpgroup tensor cores, fp16 and bf16, sm_90a: up to 512 dims, of which
 * neither one warpgroup's registers hold the outputs of 64 rows, nor shared memory two stages of K and V.
 *
 * A CTA has 64 query rows. Two consumer warpgroups take turns over the key tiles: one computes a tile's scores and
 * probabilities whole and hands the probabilities, with the rows' references, to the other through shared memory; each
 * multiplies all probabilities with its own half of the values' dims. So nothing is computed twice, and while one is at
 * its exponentials the other has the tensor cores. What a consumer needs of K and V comes through a ring of its own, in
 * slots of 128 dims. See README.md.
 *
 * Parameters: DIM and V_DIM (query-key dims and value dims up to them, zero-padded), Q_TILE and KV_TILE (64), STAGES
 * (slots of a consumer's ring); optional BF16=1, V_IN_K=1 (MLA in its absorbed form: values are the first dims of the
 * keys, and whole key tiles in two stages, one for each consumer, serve both products; the rows of a tile are query
 * heads of one key head, keys may lie in pages, and CTAs share out the keys of a tile).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES V_DIM=DIM BF16=0 V_IN_K=0 */
#include "cuda/device/attention/parameters.h"

#include <stddef.h>
#include <stdint.h>

#ifndef V_IN_K
#define V_IN_K 0
#endif

enum {
    ELEM_BYTES = 2,
    PANEL_ELEMS = 64, /* a tile is stored in panels of 128-byte rows, as the swizzle wants it */
    PANEL_ROW_BYTES = PANEL_ELEMS * ELEM_BYTES,
    CONSUMERS = 2,
    THREADS = 128 * (CONSUMERS + 1),
    QK_PANELS = DIM / PANEL_ELEMS,
    Q_PANEL_BYTES = Q_TILE * PANEL_ROW_BYTES,
    SLOT_PANELS = 2,
    SLOT_DIMS = SLOT_PANELS * PANEL_ELEMS,
    KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES,
    SLOT_BYTES = SLOT_PANELS * KV_PANEL_BYTES,
    K_SLOTS = DIM / SLOT_DIMS, /* of a tile */
    V_SLOTS = V_DIM / SLOT_DIMS,
    OWN_SLOTS = V_SLOTS / CONSUMERS, /* of V: a consumer's */
    OWN_DIMS = OWN_SLOTS * SLOT_DIMS,
    SEGMENTS = CONSUMERS + 1, /* of a tile with V_IN_K: each consumer's own dims of V, and the dims behind them */
    OWN_PANELS = OWN_DIMS / PANEL_ELEMS,
    BOX_HEADS = 16,       /* of Q with V_IN_K, at one position: a warp's rows */
    P_WORDS = KV_TILE / 4 /* of a thread's probabilities */
};

/* What a consumer hands to the other of a key tile, as its threads hold it: thread t of one has the rows and columns of
 * thread t of the other. */
typedef struct handed_tile {
    uint32_t probabilities[P_WORDS / 4][128][4];
    float references[128][2];
} handed_tile;

/* What lies where in shared memory; the device's loads want each tile at a multiple of 1024 bytes. */
typedef struct shared_memory {
    uint8_t q[QK_PANELS * Q_PANEL_BYTES];
#if V_IN_K
    uint8_t tiles[CONSUMERS][QK_PANELS * KV_PANEL_BYTES]; /* by who computes their scores */
    handed_tile handed;
    uint64_t full[CONSUMERS][SEGMENTS], empty[CONSUMERS][SEGMENTS];
#else
    uint8_t rings[CONSUMERS][STAGES][SLOT_BYTES];
    handed_tile handed;
    uint64_t full[CONSUMERS][STAGES], empty[CONSUMERS][STAGES];
#endif
    uint64_t q_full, handed_full[CONSUMERS]; /* handed_full: by who wrote it */
} shared_memory;

/* With V_IN_K, what CTAs leave of a tile's rows whose keys they share. */
typedef struct partial_row {
    float o[V_DIM];
    float reference, sum;
    float padding[2]; /* rows begin at 16 bytes */
} partial_row;

enum {
    PARTIALS_ALIGNMENT = 128,  /* of the first in the workspace, behind a number for each tile: in how many parts */
    MERGE_THREADS = V_DIM / 4, /* of a row */
    PARTS_MAX = 128
};

#ifdef __CUDACC__

#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/kv_loader.cuh"
#include "cuda/device/attention/scores.cuh"
#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/attention/tile_scheduler.cuh"
#include "cuda/device/isa/names.cuh"
#include "cuda/device/isa/shared.cuh"
#include "cuda/device/isa/trace_points.cuh"
#include "cuda/device/isa/wgmma.cuh"

#if V_IN_K
#define KV_TYPE (BF16 ? ACR_BF16 : ACR_F16)
#include "cuda/device/attention/pages.cuh"

/* What a function that finds keys in pages is told besides. */
#define PAGING_PARAMETER , const fwd_paging &paging
#define PAGING_ARGUMENT , paging
#define PAGING_OF_KERNEL , const __grid_constant__ fwd_paging paging
#else
#define PAGING_PARAMETER
#define PAGING_ARGUMENT
#define PAGING_OF_KERNEL
#endif

enum {
    ELEMENT = BF16 ? ACR_BF16 : ACR_F16,
    PRODUCER_REGISTERS = V_IN_K ? 40 : 24, /* of a thread: the launch gives all an equal share, then they go over */
    CONSUMER_REGISTERS = V_IN_K ? 232 : 240,
    BOTH_CONSUMERS = 1, /* a named barrier */
    CONSUMER_WARPS = 4  /* of each */
};

static_assert((V_IN_K ? DIM % PANEL_ELEMS == 0 && DIM > V_DIM : DIM % SLOT_DIMS == 0) &&
                  V_DIM % (CONSUMERS * SLOT_DIMS) == 0 && V_DIM <= 512,
              "DIM: a multiple of 128, with V_IN_K of 64 and above V_DIM; V_DIM: 256 or 512");
static_assert(!V_IN_K || STAGES == CONSUMERS, "STAGES: 2 with V_IN_K");
static_assert(Q_TILE == 64 && KV_TILE == 64, "Q_TILE and KV_TILE: 64");
static_assert(STAGES >= 2, "STAGES: the next slot arrives while one is in use");
static_assert(sizeof(shared_memory) <= 232448, "tiles and stages: 227 KB, a CTA's limit on sm_90");

/* ---- The work of a CTA ---- */

/* The CTA's rows, and the key tiles that it visits, from the right to the left: number i is key tile end - 1 - i. */
typedef struct cta_work {
    work_tile tile; /* q_first and head are those of its first row */
    int row_first;  /* with V_IN_K among all rows of the key head, ordered by position, then by head */
    int map_batch;  /* in the tensor map of Q, and without V_IN_K in the others: 0 of a packed batch */
    visible_tiles tiles;
#if V_IN_K
    int part, parts; /* of the tile's keys: the CTA's, and how many CTAs have some */
#endif
} cta_work;

#if V_IN_K
DEV int divide_up(int a, int b)
{
    return (a + b - 1) / b;
}

/* The grid is {CTAs that share a tile's keys, tiles of all key heads, batch}. */
DEV int tile_number(void)
{
    return (int)(blockIdx.z * gridDim.y + blockIdx.y);
}

/* The tile without its keys; row: its first row among those of the key head. */
DEV work_tile find_tile(const fwd_args &a, int &row)
{
    const int tiles = divide_up(a.group * a.q_len, Q_TILE), kv_head = (int)blockIdx.y / tiles;
    row = ((int)blockIdx.y - kv_head * tiles) * Q_TILE;
    work_tile t = {};
    t.q_first = row / a.group;
    t.head = kv_head * a.group;
    t.batch = (int)blockIdx.z;
    set_entry_number(t, t.batch);
    t.rows = find_cached_sequence(a, t.batch);
    return t;
}

/* The key tiles that a tile's rows see are divided evenly over its CTAs: so a short batch entry is shared, too. */
DEV cta_work find_work(const fwd_args &a)
{
    cta_work w;
    int row;
    w.tile = find_tile(a, row);
    w.row_first = row;
    w.map_batch = is_packed(a) ? 0 : w.tile.batch;
    const int positions = (row + Q_TILE - 1) / a.group - w.tile.q_first + 1;
    const visible_tiles all =
        key_tiles_of(find_visible_keys(a, entry_of(a, w.tile), entry_number(w.tile), w.tile.q_first, positions));
    const int count = all.end - all.first, each = divide_up(count, (int)gridDim.x);
    w.part = (int)blockIdx.x;
    w.parts = divide_up(count, each);
    w.tiles = all;
    w.tiles.end = max(all.end - w.part * each, all.first);
    w.tiles.first = max(w.tiles.end - each, all.first);
    return w;
}

/* Whether the CTA has rows and keys. */
DEV bool has_work(const fwd_args &a)
{
    const cta_work w = find_work(a);
    return w.tile.q_first < count_queries(a, w.tile) && w.part < w.parts;
}

/* The position and the head of a CTA's row. */
DEV int position_of(const fwd_args &a, const cta_work &w, int row)
{
    return (w.row_first + row) / a.group;
}

DEV int head_of(const fwd_args &a, const cta_work &w, int row)
{
    return w.tile.head + (w.row_first + row) % a.group;
}
#else
DEV work_tile find_tile(const fwd_args &a)
{
    work_tile t = tile_of_cta(a, blockIdx);
    t.rows = find_sequence(a, t.batch);
    return t;
}

/* Key tiles are counted from key 0, whatever the rows see first. */
DEV cta_work find_work(const fwd_args &a)
{
    const work_tile t = find_tile(a);
    return {t, t.q_first, is_packed(a) ? 0 : t.batch,
            key_tiles_of(find_visible_keys(a, entry_of(a, t), entry_number(t), t.q_first, Q_TILE))};
}

/* Whether there are rows: not of a sequence shorter than the longest. */
DEV bool has_work(const fwd_args &a)
{
    const work_tile t = find_tile(a);
    return t.q_first < count_queries(a, t);
}

/* The position and the head of a CTA's row. */
DEV int position_of(const fwd_args &a, const cta_work &w, int row)
{
    return w.row_first + row;
}

DEV int head_of(const fwd_args &a, const cta_work &w, int row)
{
    return w.tile.head;
}
#endif

/* ---- Shared memory ---- */

DEV void store_shared_float2(uint32_t to, float x, float y)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

/* ---- Loading ---- */

/* A place in shared memory that is filled again and again: where it lies, its barriers, and the parity of a use. */
typedef struct key_slot {
    uint32_t at, full, empty, parity;
} key_slot;

/* One arrival per warp: the warp reads the slot no more. */
DEV void release_slot(const key_slot &slot)
{
    if (threadIdx.x % WARP_THREADS == 0)
        barrier_arrive(slot.empty);
}

/* Waits until a slot is full; returns where it is. */
DEV uint32_t wait_slot(const key_slot &slot)
{
    barrier_wait(slot.full, slot.parity);
    return slot.at;
}

/* Waits until a slot is empty, and announces its bytes. */
DEV void begin_slot(const key_slot &slot, int panels)
{
    barrier_wait(slot.empty, slot.parity ^ 1);
    barrier_arrive_expecting(slot.full, panels * KV_PANEL_BYTES);
}

/* Loads some rows of panels, from panel `first` on, to `to` and KV_PANEL_BYTES apart. */
DEV void load_panels(uint32_t to, const key_slot &slot, const fwd_map *map, int first, int panels, int row, int head,
                     int batch)
{
    for (int panel = 0; panel < panels; panel++)
        load_box(to + panel * KV_PANEL_BYTES, map, slot.full, (first + panel) * PANEL_ELEMS, row, head, batch);
}

#if V_IN_K
/* Tiles whole, each in the stage of the consumer that computes its scores, in segments: the dims of V that are consumer
 * 0's, those of consumer 1, and the rest. Its scores read all, a consumer's output product the consumer's own. */
DEV key_slot find_segment(uint32_t smem, int number, int segment)
{
    const uint32_t stage = number % CONSUMERS, barrier = (stage * SEGMENTS + segment) * BARRIER_BYTES;
    return {ADDRESS(smem, tiles) + (stage * QK_PANELS + segment * OWN_PANELS) * KV_PANEL_BYTES,
            ADDRESS(smem, full) + barrier, ADDRESS(smem, empty) + barrier, (uint32_t)(number / CONSUMERS) & 1};
}

DEV constexpr int segment_panels(int segment)
{
    return segment < CONSUMERS ? OWN_PANELS : QK_PANELS - CONSUMERS * OWN_PANELS;
}

/* Warps that release a segment of a stage: its owner's once, and those of another whose dims it has. */
DEV int releasing_warps(int stage, int segment)
{
    return CONSUMER_WARPS * (segment < CONSUMERS && segment != stage ? 2 : 1);
}

/* Where the keys of one head of a batch entry are. */
typedef struct cached_keys {
    key_pages pages;
    int head, end; /* end: one past the last key that exists */
} cached_keys;

/* Loads the keys of a segment of the tile that begins with `key`. A page is a multiple of a tile, or a tile of them;
 * what lies in no page is outside of the map and becomes zeros. Reads global memory: the table. */
DEV void load_segment(const key_slot &slot, const fwd_map *map, int segment, const cached_keys &keys, int key)
{
    const int box = min(keys.pages.page, (int)KV_TILE);
    int entry = key / keys.pages.page, in_page = key - entry * keys.pages.page;
    int page = key < keys.end || keys.pages.table == nullptr ? read_page(keys.pages, entry) : NO_PAGE;
    begin_slot(slot, segment_panels(segment));
    for (int row = 0;;) {
        load_panels(slot.at + row * PANEL_ROW_BYTES, slot, map, segment * OWN_PANELS, segment_panels(segment), in_page,
                    keys.head, page);
        row += box;
        if (row >= KV_TILE)
            break;
        entry++; /* the next box is the next page */
        page = key + row < keys.end ? read_page(keys.pages, entry) : NO_PAGE;
    }
}
#else
/* A ring for each consumer, a tile in slots of some dims each. What a consumer with the tiles w, w + 2, ... is sent, K
 * whole and V its own dims: K(w), V(w - 1), V(w), K(w + 2), V(w + 1), V(w + 2), ... up to the last V. use: number of a
 * use of its ring. */
DEV key_slot find_slot(uint32_t smem, int consumer, int use)
{
    const uint32_t slot = consumer * STAGES + use % STAGES;
    return {ADDRESS(smem, rings) + slot * SLOT_BYTES, ADDRESS(smem, full) + slot * BARRIER_BYTES,
            ADDRESS(smem, empty) + slot * BARRIER_BYTES, (uint32_t)(use / STAGES) & 1};
}

/* Loads panels of the tile that begins with `key`, from panel `first` on. */
DEV void load_slot(const key_slot &slot, const fwd_map *map, int first, int panels, const key_source &source, int key)
{
    begin_slot(slot, panels);
    load_panels(slot.at, slot, map, first, panels, source.row_first + key, source.head, source.batch);
}
#endif

DEV void load_queries(const fwd_args &a, const fwd_maps &maps, uint32_t smem, const cta_work &w)
{
#if V_IN_K
    barrier_arrive_expecting(ADDRESS(smem, q_full), QK_PANELS * Q_PANEL_BYTES);
    for (int row = 0; row < Q_TILE; row += BOX_HEADS)
        for (int panel = 0; panel < QK_PANELS; panel++)
            load_box(ADDRESS(smem, q) + panel * Q_PANEL_BYTES + row * PANEL_ROW_BYTES, &maps.q, ADDRESS(smem, q_full),
                     panel * PANEL_ELEMS, w.tile.rows.q_begin + position_of(a, w, row), head_of(a, w, row),
                     w.map_batch);
#else
    load_boxes(ADDRESS(smem, q), &maps.q, ADDRESS(smem, q_full), {QK_PANELS, Q_PANEL_BYTES, PANEL_ELEMS},
               w.tile.rows.q_begin + w.row_first, w.tile.head, w.map_batch);
#endif
}

/* One thread for each consumer; consumer 0's loads Q, too. */
DEV void produce(const fwd_args &a, const fwd_maps &maps PAGING_PARAMETER, uint32_t smem, int consumer)
{
    const cta_work w = find_work(a);
    const int tiles = w.tiles.end - w.tiles.first;
    if (consumer == 0)
        load_queries(a, maps, smem, w);
#if V_IN_K
    const cached_keys keys = {pages_of_entry(a, paging, w.tile.batch), w.tile.head / a.group, w.tile.rows.kv_len};
    for (int number = consumer; number < tiles; number += CONSUMERS)
        for (int segment = 0; segment < SEGMENTS; segment++)
            load_segment(find_segment(smem, number, segment), &maps.k, segment, keys,
                         (w.tiles.end - 1 - number) * KV_TILE);
#else
    const key_source source = key_source_of(w.tile.rows, w.map_batch, w.tile.head / a.group);
    int use = 0;
    for (int number = consumer; number <= tiles; number += CONSUMERS) {
        const int key = (w.tiles.end - 1 - number) * KV_TILE;
        for (int part = 0; part < K_SLOTS && number < tiles; part++)
            load_slot(find_slot(smem, consumer, use++), &maps.k, part * SLOT_PANELS, SLOT_PANELS, source, key);
        for (int part = 0; part < OWN_SLOTS && number > 0; part++)
            load_slot(find_slot(smem, consumer, use++), &maps.v, (consumer * OWN_SLOTS + part) * SLOT_PANELS,
                      SLOT_PANELS, source, key + KV_TILE);
        for (int part = 0; part < OWN_SLOTS && number < tiles; part++)
            load_slot(find_slot(smem, consumer, use++), &maps.v, (consumer * OWN_SLOTS + part) * SLOT_PANELS,
                      SLOT_PANELS, source, key);
    }
#endif
}

/* ---- Consumers: a warpgroup each. Arrays are in registers, laid out as device/isa/wgmma.cuh says. ---- */

typedef float score_tile[KV_TILE / 2];
typedef float output_part[SLOT_DIMS / 2];
typedef uint32_t probability_tile[P_WORDS];

/* Where a thread is, and what stays the same for it. */
typedef struct consumer {
    uint32_t smem;
    int index;             /* 0 has the even tiles, 1 the odd ones */
    int thread, lane, row; /* of the warpgroup; the lane's first row within the CTA's, its other is the eighth after */
    int tiles;             /* how many the CTA visits */
    int use;               /* of the consumer's ring: the next one */
    float scale_log2;
    float threshold; /* RESCALE_THRESHOLD in raw scores */
} consumer;

/* Starts S = Q * transpose(K) for panels of a tile, from panel `first` on, as a group; FIRST: nothing is added to. */
template <bool FIRST, int PANELS> DEV void start_panels(score_tile &s, const consumer &c, int first, uint32_t keys)
{
    const uint64_t q = matrix_descriptor(ADDRESS(c.smem, q) + first * Q_PANEL_BYTES, 0), k = matrix_descriptor(keys, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < PANELS * PANEL_ELEMS / WGMMA_K; step++) {
        const uint32_t in_panel = step % 4 * WGMMA_K * ELEM_BYTES;
        wgmma_ss(s, descriptor_at(q, step / 4 * Q_PANEL_BYTES + in_panel),
                 descriptor_at(k, step / 4 * KV_PANEL_BYTES + in_panel), !FIRST || step != 0);
    }
    wgmma_commit();
}

/* Starts O += P * V of some dims, as a group. */
DEV void start_values(output_part &o, const probability_tile &p, uint32_t values)
{
    const uint64_t v = matrix_descriptor(values, KV_PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_K; step++)
        wgmma_rs_mn(o, p + 4 * step, descriptor_at(v, step * WGMMA_K * PANEL_ROW_BYTES), 1);
    wgmma_commit();
}

#if V_IN_K
/* Starts the scores of the consumer's tile `number`. */
DEV void start_scores(score_tile &s, const consumer &c, int number)
{
    start_panels<true, OWN_PANELS>(s, c, 0, wait_slot(find_segment(c.smem, number, 0)));
    start_panels<false, OWN_PANELS>(s, c, OWN_PANELS, wait_slot(find_segment(c.smem, number, 1)));
    start_panels<false, segment_panels(2)>(s, c, 2 * OWN_PANELS, wait_slot(find_segment(c.smem, number, 2)));
}

/* Waits for them, and releases what the consumer does not need for its output product. */
DEV void wait_scores(consumer &c, int number)
{
    WGMMA_WAIT(0);
    release_slot(find_segment(c.smem, number, 1 - c.index));
    release_slot(find_segment(c.smem, number, CONSUMERS));
}

/* The consumer's dims of V of a tile. */
DEV uint32_t wait_values(const consumer &c, int number, int part)
{
    return wait_slot(find_segment(c.smem, number, c.index)) + part * SLOT_BYTES;
}

/* Waits for the output product of a tile, LATER groups of products before the last, and releases its values. */
template <int LATER = 0> DEV void wait_output(consumer &c, int number)
{
    WGMMA_WAIT(LATER);
    release_slot(find_segment(c.smem, number, c.index));
}
#else
/* Waits for the product of LEFT + 1 slots that was started last, and releases each slot when its part is done. */
template <int LEFT> DEV void wait_parts(consumer &c)
{
    WGMMA_WAIT(LEFT);
    release_slot(find_slot(c.smem, c.index, c.use++));
    if constexpr (LEFT > 0)
        wait_parts<LEFT - 1>(c);
}

/* Starts the scores of the consumer's tile `number`. */
DEV void start_scores(score_tile &s, const consumer &c, int number)
{
    start_panels<true, SLOT_PANELS>(s, c, 0, wait_slot(find_slot(c.smem, c.index, c.use)));
#pragma unroll
    for (int part = 1; part < K_SLOTS; part++)
        start_panels<false, SLOT_PANELS>(s, c, part * SLOT_PANELS, wait_slot(find_slot(c.smem, c.index, c.use + part)));
}

DEV void wait_scores(consumer &c, int number)
{
    wait_parts<K_SLOTS - 1>(c);
}

/* The consumer's dims of V of a tile. */
DEV uint32_t wait_values(const consumer &c, int number, int part)
{
    return wait_slot(find_slot(c.smem, c.index, c.use + part));
}

/* Waits for the output product of a tile, the last one, and releases its values. */
template <int LATER = 0> DEV void wait_output(consumer &c, int number)
{
    wait_parts<OWN_SLOTS - 1>(c);
}
#endif

DEV void scale_outputs(output_part (&o)[OWN_SLOTS], const float (&factor)[2])
{
#pragma unroll
    for (int part = 0; part < OWN_SLOTS; part++)
        scale_output(o[part], factor);
}

/* Gives the other consumer what this one has made of its tile. One buffer does for both: a thread writes where it has
 * read what the same thread of the other handed over before. */
DEV void hand_over(const consumer &c, const probability_tile &p, const lane_rows &r)
{
    const uint32_t to = ADDRESS(c.smem, handed);
#pragma unroll
    for (int i = 0; i < P_WORDS / 4; i++)
        store_shared_4(to + (i * WARPGROUP_THREADS + c.thread) * 16, p[4 * i], p[4 * i + 1], p[4 * i + 2],
                       p[4 * i + 3]);
    store_shared_float2(to + (uint32_t)offsetof(handed_tile, references) + c.thread * 8, r.max[0], r.max[1]);
    __syncwarp();
    if (c.lane == 0)
        barrier_arrive(ADDRESS(c.smem, handed_full) + BARRIER_BYTES * c.index);
}

/* Takes the other's tile, and its references: what was relative to older ones is scaled. */
DEV void take_over(const consumer &c, int number, probability_tile &p, lane_rows &r, output_part (&o)[OWN_SLOTS])
{
    const int other = 1 - c.index;
    barrier_wait(ADDRESS(c.smem, handed_full) + BARRIER_BYTES * other, (uint32_t)number / 2 & 1);
    const uint32_t from = ADDRESS(c.smem, handed);
#pragma unroll
    for (int i = 0; i < P_WORDS / 4; i++) {
        const uint4 x = load_shared_4(from + (i * WARPGROUP_THREADS + c.thread) * 16);
        p[4 * i] = x.x, p[4 * i + 1] = x.y, p[4 * i + 2] = x.z, p[4 * i + 3] = x.w;
    }
    const uint2 bits = load_shared_2(from + (uint32_t)offsetof(handed_tile, references) + c.thread * 8);
    const float max[2] = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
    if (any_row_exceeds(r, max, 0.0f)) {
        float factor[2];
        raise_references(r, factor, max, c.scale_log2);
        scale_outputs(o, factor);
    }
}

/* Rows of V beyond the key length may hold anything, the next sequence for one, and NaN times a probability of zero is
 * NaN: a consumer clears those of its own slots. */
DEV void clear_rows(const consumer &c, int number, int first)
{
    if (V_IN_K) /* all warps' scores of these keys, which are hidden, are done */
        named_sync(BOTH_CONSUMERS + 1 + c.index, WARPGROUP_THREADS);
    for (int part = 0; part < OWN_SLOTS; part++) {
        const uint32_t at = wait_values(c, number, part);
        for (int i = c.thread + first * 8; i < KV_TILE * 8; i += WARPGROUP_THREADS)
            for (int panel = 0; panel < SLOT_PANELS; panel++)
                store_shared_4(at + panel * KV_PANEL_BYTES + i * 16, 0, 0, 0, 0);
    }
    shared_stores_visible();
    named_sync(BOTH_CONSUMERS + 1 + c.index, WARPGROUP_THREADS);
}

/* What hides keys from the CTA's rows. */
typedef struct tile_mask {
    row_keys seen;
    int full_first, full_end; /* tiles between need no mask */
    int end;                  /* one past the last key that exists */
    bool may_be_stale;        /* what V has beyond it */
} tile_mask;

DEV tile_mask find_mask(const fwd_args &a, const cta_work &w, const visible_entry &e, const consumer &c)
{
    tile_mask m;
    m.seen = find_row_keys(a, e, entry_number(w.tile), position_of(a, w, c.row), position_of(a, w, c.row + 8),
                           2 * (c.lane % 4));
    const int first = position_of(a, w, 0), positions = position_of(a, w, Q_TILE - 1) - first + 1;
    const visible_tiles own =
        visible_tiles_of(find_visible_keys(a, e, entry_number(w.tile), first, positions), KV_TILE);
    m.full_first = own.full_first;
    m.full_end = own.first < own.end ? own.full_end : 0; /* rows without a key: every tile is masked */
    m.end = e.kv_len;
    m.may_be_stale = a.kv_lens != nullptr || is_packed(a);
    return m;
}

/* The product of tile `number` with the consumer's dims of V; to be waited for. */
DEV void multiply_values(output_part (&o)[OWN_SLOTS], const probability_tile &p, const consumer &c, const tile_mask &m,
                         int number, int tile)
{
    if (m.may_be_stale && (tile + 1) * KV_TILE > m.end)
        clear_rows(c, number, max(m.end - tile * KV_TILE, 0));
#pragma unroll
    for (int part = 0; part < OWN_SLOTS; part++)
        start_values(o[part], p, wait_values(c, number, part));
}

/* The consumer's tile `number`: its scores and probabilities; the product of the other's tile before; the product of
 * this one. So the softmax waits for no values. With V_IN_K the other's product comes before the scores: these wait for
 * the consumer's own stage, and until the product is done the other's stage cannot be loaded again, so that the stages
 * would be loaded one after the other. FIRST: of tile 0, before which there is none. What hides these waits is the
 * other consumer, which is half a round behind. Accumulators are changed only where no product of the warpgroup is
 * under way: else the compiler serialises all of them. */
template <bool FIRST>
DEV void step(score_tile &s, output_part (&o)[OWN_SLOTS], lane_rows &r, consumer &c, const tile_mask &m, int number,
              int tile)
{
    probability_tile taken, p;
    if (V_IN_K && !FIRST) {
        take_over(c, number - 1, taken, r, o);
        multiply_values(o, taken, c, m, number - 1, tile + 1);
    }
    start_scores(s, c, number);
    if (V_IN_K && !FIRST)
        wait_output<SEGMENTS>(c, number - 1);
    wait_scores(c, number);
    ACR_TRACE_POINT(number, "scores ready");
    if (!V_IN_K && !FIRST)
        take_over(c, number - 1, taken, r, o);
    finish_scores(s, m.seen, tile * KV_TILE, tile >= m.full_end || tile < m.full_first);
    float max[2], factor[2];
    lane_max(max, s);
    const int grown = any_row_exceeds(r, max, c.threshold);
    if (grown)
        raise_references(r, factor, max, c.scale_log2, c.threshold);
    exponentiate_and_sum(s, r, c.scale_log2);
#pragma unroll
    for (int i = 0; i < P_WORDS; i++)
        p[i] = pack<BF16>(s[2 * i], s[2 * i + 1]);
    hand_over(c, p, r);
    ACR_TRACE_POINT(number, "probabilities handed over");
    if (!FIRST) {
        if (!V_IN_K) {
            multiply_values(o, taken, c, m, number - 1, tile + 1);
            wait_output(c, number - 1);
        }
        ACR_TRACE_POINT(number, "the other's product done");
        if (grown)
            scale_outputs(o, factor);
    }
    multiply_values(o, p, c, m, number, tile);
    wait_output(c, number);
    ACR_TRACE_POINT(number, "own product done");
}

/* ---- Output ---- */

/* Some dims of the output: a problem of which they are the whole. */
DEV fwd_args some_dims(const fwd_args &a, int first, int dims)
{
    fwd_args some = a;
    some.o = (char *)a.o + first * ELEM_BYTES;
    some.v = (const char *)a.v + first * ELEM_BYTES;
    some.v_dim = max(min(dims, a.v_dim - first), 0);
    return some;
}

/* Both have added up the sums of their own tiles: returns those of all. */
DEV void join_sums(const consumer &c, lane_rows &r)
{
    const uint32_t sums = ADDRESS(c.smem, handed) + c.thread * 8, consumer_bytes = WARPGROUP_THREADS * 8;
    named_sync(BOTH_CONSUMERS, CONSUMERS * WARPGROUP_THREADS); /* nobody reads a handed tile any more */
    store_shared_float2(sums + c.index * consumer_bytes, r.sum[0], r.sum[1]);
    named_sync(BOTH_CONSUMERS, CONSUMERS * WARPGROUP_THREADS);
    const uint2 bits = load_shared_2(sums + (1 - c.index) * consumer_bytes);
    r.sum[0] = quad_sum(r.sum[0] + __uint_as_float(bits.x));
    r.sum[1] = quad_sum(r.sum[1] + __uint_as_float(bits.y));
}

DEV void store_rows(const fwd_args &a PAGING_PARAMETER, const cta_work &w, const visible_entry &entry,
                    const output_part (&o)[OWN_SLOTS], const lane_rows &r, const consumer &c)
{
    const fwd_args own = some_dims(a, c.index * OWN_DIMS, OWN_DIMS);
    const work_tile &t = w.tile;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = position_of(a, w, c.row + 8 * h), head = head_of(a, w, c.row + 8 * h);
        const float factor = row_factor(a, head, r.max[h], r.sum[h]);
        char *to = (char *)own.o + output_index(a, t.rows, t.batch, head, row) * ELEM_BYTES;
        int finite = true;
#pragma unroll
        for (int part = 0; part < OWN_SLOTS; part++) {
            const row_store columns = {to + part * SLOT_DIMS * ELEM_BYTES, row < entry.q_len,
                                       own.v_dim - part * SLOT_DIMS, factor};
            finite &= store_row<BF16>(columns, o[part], h, c.lane);
        }
        if (a.lse != nullptr && c.index == 0 && c.lane % 4 == 0 && row < entry.q_len)
            find_lse(a, t.rows, t.batch, head)[row] = row_lse(a, head, r.max[h], r.sum[h]);
        const stored_row stored = {entry_number(t), head,         row,         t.rows.q_begin,
                                   t.rows.kv_begin, c.scale_log2, r.offset[h], factor};
#if V_IN_K
        fix_paged_nan<ELEMENT>(own, pages_of_entry(a, paging, t.batch), entry, stored, r.sum[h], finite, c.lane);
#else
        fix_hidden_nan<ELEMENT>(own, entry, stored, r.sum[h], finite, c.lane);
#endif
    }
}

#if V_IN_K
/* ---- Keys shared by CTAs: each leaves its part of a row in the workspace, and a second kernel adds them in the
 * order of the parts ---- */

/* In how many parts a tile is. */
DEV uint32_t *find_parts(const fwd_args &a, int tile)
{
    return (uint32_t *)a.workspace + tile;
}

/* A row of a part of this tile. */
DEV partial_row *find_partial(const fwd_args &a, int part, int row)
{
    const int tiles = (int)(gridDim.y * gridDim.z);
    const int64_t first_byte = divide_up(tiles * (int)sizeof(uint32_t), PARTIALS_ALIGNMENT) * PARTIALS_ALIGNMENT;
    return (partial_row *)((char *)a.workspace + first_byte) + ((int64_t)part * tiles + tile_number()) * Q_TILE + row;
}

DEV void leave_rows(const fwd_args &a, const cta_work &w, const visible_entry &entry, const output_part (&o)[OWN_SLOTS],
                    const lane_rows &r, const consumer &c)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (position_of(a, w, c.row + 8 * h) >= entry.q_len)
            continue;
        partial_row *to = find_partial(a, w.part, c.row + 8 * h);
#pragma unroll
        for (int part = 0; part < OWN_SLOTS; part++)
#pragma unroll
            for (int i = 0; i < SLOT_DIMS / 8; i++)
                *(float2 *)&to->o[c.index * OWN_DIMS + part * SLOT_DIMS + 8 * i + 2 * (c.lane % 4)] =
                    make_float2(o[part][4 * i + 2 * h], o[part][4 * i + 2 * h + 1]);
        if (c.index == 0 && c.lane % 4 == 0)
            *(float2 *)&to->reference = make_float2(r.max[h], r.sum[h]);
    }
}

/* The sum of a row's parts, four columns a thread; a warp's threads have 128 columns side by side. */
DEV void merge_row(const fwd_args &a, const fwd_paging &paging, const work_tile &t, const visible_entry &entry,
                   int parts, int group_row)
{
    const int thread = threadIdx.x, warp = thread / WARP_THREADS, lane = thread % WARP_THREADS;
    const int position = group_row / a.group, head = t.head + group_row % a.group;
    const int64_t step = (int64_t)gridDim.y * gridDim.z * Q_TILE; /* from part to part */
    const partial_row *first = find_partial(a, 0, (int)blockIdx.x);
    const float scale_log2 = score_scale_log2(a);
    float reference = -CUDART_INF_F, sum = 0.0f;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int i = 0; i < parts; i++)
        reference = fmaxf(reference, first[i * step].reference);
#pragma unroll 8
    for (int i = 0; i < parts; i++) {
        const float2 state = *(const float2 *)&first[i * step].reference;
        const float4 x = *(const float4 *)&first[i * step].o[4 * thread];
        const float weight = exp2_fast((state.x - finite_max(reference)) * scale_log2);
        sum += weight * state.y;
        o = {o.x + weight * x.x, o.y + weight * x.y, o.z + weight * x.z, o.w + weight * x.w};
    }
    const float factor = row_factor(a, head, reference, sum);
    const uint2 values = {pack<BF16>(o.x * factor, o.y * factor), pack<BF16>(o.z * factor, o.w * factor)};
    const float probe = o.x * factor * 0.0f + o.y * factor * 0.0f + o.z * factor * 0.0f + o.w * factor * 0.0f;
    char *to = (char *)a.o + output_index(a, t.rows, t.batch, head, position) * ELEM_BYTES;
    if (4 * thread < a.v_dim)
        *(uint2 *)(to + 4 * thread * ELEM_BYTES) = factor != 0.0f ? values : uint2{0, 0};
    if (a.lse != nullptr && thread == 0)
        find_lse(a, t.rows, t.batch, head)[position] = row_lse(a, head, reference, sum);
    enum {
        WARP_COLUMNS = 4 * WARP_THREADS
    };
    const stored_row stored = {entry_number(t),
                               head,
                               lane < 4 ? position : entry.q_len,
                               t.rows.q_begin,
                               0,
                               scale_log2,
                               offset_of(reference, scale_log2),
                               factor};
    fix_paged_nan<ELEMENT>(some_dims(a, warp * WARP_COLUMNS, WARP_COLUMNS), pages_of_entry(a, paging, t.batch), entry,
                           stored, sum, probe == 0.0f, lane);
}

/* A CTA a row: the grid is {rows of a tile, tiles of all key heads, batch}. */
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    NAME_WITH(KERNEL_NAME, _merge)(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_maps,
                                   const __grid_constant__ fwd_paging paging)
{
    wait_for_previous_kernel();
    allow_next_kernel();
    const uint32_t parts = *find_parts(a, tile_number());
    if (parts <= 1) /* the rows are stored, or there are none */
        return;
    int row;
    const work_tile t = find_tile(a, row);
    const visible_entry entry = entry_of(a, t);
    row += (int)blockIdx.x;
    if (row / a.group < entry.q_len)
        merge_row(a, paging, t, entry, (int)parts, row);
}
#endif

DEV void consume(const fwd_args &a PAGING_PARAMETER, uint32_t smem, int index)
{
    const cta_work w = find_work(a);
    const visible_entry entry = entry_of(a, w.tile);
    const int thread = threadIdx.x % WARPGROUP_THREADS, lane = threadIdx.x % WARP_THREADS;
    consumer c = {smem,
                  index,
                  thread,
                  lane,
                  thread / WARP_THREADS * 16 + lane / 4,
                  w.tiles.end - w.tiles.first,
                  0,
                  score_scale_log2(a),
                  RESCALE_THRESHOLD / score_scale_log2(a)};
    const tile_mask mask = find_mask(a, w, entry, c);
    score_tile s;
    output_part o[OWN_SLOTS];
    lane_rows r = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
    for (int part = 0; part < OWN_SLOTS; part++)
#pragma unroll
        for (int i = 0; i < SLOT_DIMS / 2; i++)
            o[part][i] = 0.0f;

    barrier_wait(ADDRESS(smem, q_full), 0);
    ACR_TRACE_POINT(0, "Q landed");
    int number = index;
    if (number == 0) {
        step<true>(s, o, r, c, mask, 0, w.tiles.end - 1);
        number = 2;
    }
#pragma unroll 1
    for (; number < c.tiles; number += 2)
        step<false>(s, o, r, c, mask, number, w.tiles.end - 1 - number);
    if (number == c.tiles) { /* the other has the last tile */
        probability_tile taken;
        take_over(c, number - 1, taken, r, o);
        multiply_values(o, taken, c, mask, number - 1, w.tiles.first);
        wait_output(c, number - 1);
    }
    ACR_TRACE_POINT(0, "last product done");
    join_sums(c, r);
#if V_IN_K
    if (w.parts > 1)
        leave_rows(a, w, entry, o, r, c);
    else
#endif
        store_rows(a PAGING_ARGUMENT, w, entry, o, r, c);
    ACR_TRACE_POINT(0, "stored");
}

DEV void init_barriers(uint32_t smem)
{
    barrier_init(ADDRESS(smem, q_full), 1);
    const int slots = sizeof(shared_memory::full) / BARRIER_BYTES;
    for (int i = 0; i < slots; i++) {
        barrier_init(ADDRESS(smem, full) + BARRIER_BYTES * i, 1);
#if V_IN_K
        const int warps = releasing_warps(i / SEGMENTS, i % SEGMENTS);
#else
        const int warps = CONSUMER_WARPS;
#endif
        barrier_init(ADDRESS(smem, empty) + BARRIER_BYTES * i, warps);
    }
    for (int i = 0; i < CONSUMERS; i++)
        barrier_init(ADDRESS(smem, handed_full) + BARRIER_BYTES * i, CONSUMER_WARPS);
    barrier_init_done();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_maps maps PAGING_OF_KERNEL)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t smem = smem_address(memory);
    const int group = read_warpgroup();
    ACR_TRACE_POINT(0, "start");
    if (threadIdx.x == 0) {
        prefetch_map(&maps.q);
        prefetch_map(&maps.k);
        if (!V_IN_K)
            prefetch_map(&maps.v);
        init_barriers(smem);
    }
    __syncthreads();
    wait_for_previous_kernel();
    allow_next_kernel();
    const bool works = has_work(a);
#if V_IN_K
    if (gridDim.x > 1 && blockIdx.x == 0 && threadIdx.x == 0)
        *find_parts(a, tile_number()) = works ? (uint32_t)find_work(a).parts : 0;
#endif
    if (works) {
        if (group == 0) {
            REGISTERS_GIVE(PRODUCER_REGISTERS);
            const int warp = __shfl_sync(~0u, threadIdx.x / WARP_THREADS, 0);
            if (warp < CONSUMERS && elect_one()) /* by other threads a loop over lanes would issue each box */
                produce(a, maps PAGING_ARGUMENT, smem, warp);
        } else {
            REGISTERS_TAKE(CONSUMER_REGISTERS);
            consume(a PAGING_ARGUMENT, smem, group - 1);
        }
    }
    ACR_TRACE_END(a);
}

#else

#include "cuda/model/fwd_model.h"

#include <math.h>

static const acr__tiling TILING = {.work = V_IN_K ? ACR__WORK_HEAD_ROWS : ACR__WORK_TILES,
                                   .q_tile = Q_TILE,
                                   .threads = THREADS,
                                   .smem_bytes = sizeof(shared_memory)};

#include "cuda/model/tile_kernel.h"

#if V_IN_K

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    if (!(problem->flags & ACR_V_IN_K))
        return "v_in_k: the kernel serves values inside the keys alone (V_IN_K)";
    if (problem->q_heads / problem->kv_heads % BOX_HEADS != 0)
        return "q_heads / kv_heads is no multiple of 16";
    if (problem->flags & ACR_PACKED && !(problem->flags & ACR_PAGED))
        return "packed: the kernel serves packed queries over pages only (ACR_PACKED with ACR_PAGED)";
    if (problem->flags & ACR_PAGED &&
        (problem->page % 8 != 0 || (problem->page % KV_TILE != 0 && KV_TILE % problem->page != 0)))
        return "page: must be 8, 16, 32 or a multiple of 64";
    return tile_why_not(problem, device);
}

static int64_t count_tiles(const acr_problem *problem)
{
    return acr__row_tiles(problem, Q_TILE) * problem->kv_heads * problem->batch;
}

/* Fitted by hand to nine runs on an H200 (lab.md). A visit is of a key tile; besides, what a CTA takes
 * from its start to its first scores and from its last ones to its end, and to leave partial results; and the second
 * kernel. */
static double split_seconds(const acr_problem *problem, const acr__device *device, int64_t splits)
{
    const double visit_cycles = 3600.0, cta_cycles = 9000.0, leave_cycles = 12000.0;
    const double clock_hz = device->clock_hz;
    const double keys = acr__visible_keys(acr__longest_entry(problem));
    const double tiles = fmax(ceil(keys / KV_TILE), 1.0), ctas = (double)(count_tiles(problem) * splits);
    const double waves = ceil(ctas / (double)device->sm_count);
    const double cycles =
        waves * (cta_cycles + ceil(tiles / (double)splits) * visit_cycles + (splits > 1 ? leave_cycles : 0.0));
    const double rows = (double)(problem->batch * problem->q_heads * problem->q_len);
    const double key_bytes = (double)(problem->batch * problem->kv_heads) * keys * (double)problem->qk_dim * ELEM_BYTES;
    const double memory = key_bytes / (0.75 * acr__memory_rate(problem, device, 1.0));
    const double merge_cycles = 4000.0 + 400.0 * (double)splits * fmax(1.0, rows / (4.0 * device->sm_count));
    const double merge = splits > 1 ? ACR__LAUNCH_SECONDS + merge_cycles / clock_hz : 0.0;
    return fmax(cycles / clock_hz, memory + cta_cycles / clock_hz) + merge;
}

/* Into how many parts the keys of a tile are split. */
static int64_t choose_splits(const acr_problem *problem, const acr__device *device)
{
    const int64_t key_tiles = (problem->kv_len + KV_TILE - 1) / KV_TILE;
    int64_t best = 1;
    for (int64_t splits = 2; splits <= PARTS_MAX && splits <= key_tiles; splits++)
        if (split_seconds(problem, device, splits) < split_seconds(problem, device, best))
            best = splits;
    return best;
}

static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    const size_t splits = (size_t)choose_splits(problem, device), tiles = (size_t)count_tiles(problem);
    const size_t numbers =
        (tiles * sizeof(uint32_t) + PARTIALS_ALIGNMENT - 1) / PARTIALS_ALIGNMENT * PARTIALS_ALIGNMENT;
    return splits == 1 ? 0 : numbers + splits * tiles * Q_TILE * sizeof(partial_row);
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    *launch = (acr__launch){.grid = {(uint32_t)choose_splits(problem, device),
                                     (uint32_t)(acr__row_tiles(problem, Q_TILE) * problem->kv_heads),
                                     (uint32_t)problem->batch},
                            .block = THREADS,
                            .smem_bytes = sizeof(shared_memory)};
}

/* Nothing where every tile has one part. */
static void shape_merge(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    shape(problem, device, launch);
    launch->grid[0] = launch->grid[0] > 1 ? Q_TILE : 0;
    launch->block = MERGE_THREADS;
    launch->smem_bytes = 0;
}

static double cost(const acr_problem *problem, const acr__device *device)
{
    return ACR__LAUNCH_SECONDS + split_seconds(problem, device, choose_splits(problem, device));
}

#else

/* Fitted to five problems on an H100 (lab.md): 0.91 to 1.11 times what was seen. */
static double cost(const acr_problem *problem, const acr__device *device)
{
    const acr__fwd_rates rates = {
        .mma_flop_per_cycle = 2750.0,
        .exp_per_cycle = 14.0,
        .step_cycles = 2000.0,
        .cta_cycles = 12000.0,
        .first_cycles = 1000.0,
        .ctas_per_sm = 1,
    };
    return tile_seconds(problem, device, rates);
}

#endif

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("fwd_wide", 90, 90),
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .traits = ACR__TRAIT_PACKED,
    .cost = cost,
#if V_IN_K
    .shape = shape,
    .pages = 1,
    .v_in_k = 1,
    .why_not = why_not,
    .workspace = workspace,
    .boxes = {.q_rows = 1, .k_rows = KV_TILE, .q_heads = BOX_HEADS},
    .after = {.symbol = KERNEL_TEXT "_merge", .shape = shape_merge},
#else
    .why_not = tile_why_not,
    .shape = tile_shape,
    .boxes = {.q_rows = Q_TILE, .k_rows = KV_TILE, .v_rows = KV_TILE},
#endif
};

#endif
