/* Forward attention on Hopper's warpgroup tensor cores, fp16 and bf16: the throughput kernel, sm_90a.
 *
 * A persistent CTA takes query tiles from a queue, longest first. One producer thread loads Q, K and V by tensor maps
 * into rings in shared memory; Q_TILE / 64 consumer warpgroups hold 64 query rows each, with scores, probabilities and
 * output in registers. While one warpgroup exponentiates, another has the tensor cores: named barriers hand the turn
 * around. The first scores of the next tile are computed under the last store of this one. After Dao et al. 2022
 * (online softmax) and Shah et al. 2024 (warpgroups in turns). See README.md.
 *
 * Parameters: DIM (query-key dims up to it, zero-padded), Q_TILE, KV_TILE, STAGES (of the K and V rings); optional
 * V_DIM (default DIM), BF16=1, Q_STAGES (tiles of Q in shared memory, default 1), PACKED=1 (for packed batches alone:
 * what they need costs the others 1 to 3 % in d64), HEADS_IN_TILE (query heads of one key head that share a query tile,
 * default 1: for windows that are not much longer than a query tile), AHEAD=1 (a thread plans ahead; of d128 the lines
 * that serve sliding windows), TERMS (FWD_TERM_* of fwd_args.h: the features beyond scale, mask and window), BIAS_TILES
 * (with TERMS=4: slots of a consumer for tiles of the bias; biases of 16 bits and boolean masks), MASKS=1 (beside it:
 * boolean masks alone, whose tiles take half the room), BIAS_FIRST=1 (beside it: biases alone, to which products are
 * added), PAGED=1 (for paged caches alone, whose queries are packed or not; the kernel takes fwd_paging besides) and,
 * beside it, KV_E4M3=1 (for keys and values of e4m3 alone, in pages or not: widening.cuh) or ANY_KEYS=1 (keys in pages,
 * of packed batches and all others: which it is, is asked at run time), OUT_F32=1 (o is float32, and nothing else:
 * partial results). Beside KV_E4M3: UPCAST_ROWS=1 (the upcasting warps share a tile by its rows), UPCAST_GROUPS (of
 * warps that upcast, the producer's among them, default 1), VALUES_F16=1 (with BF16: probabilities and values are
 * multiplied in fp16). POLYNOMIAL (so many groups of keys leave one to the multiply-add lanes when they are
 * exponentiated; default 0, none).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES V_DIM=DIM BF16=0 Q_STAGES=1 PACKED=0 HEADS_IN_TILE=1 AHEAD=0 TERMS=0
 * BIAS_TILES=0 MASKS=0 BIAS_FIRST=0 PAGED=0 KV_E4M3=0 ANY_KEYS=0 OUT_F32=0 UPCAST_ROWS=0 UPCAST_GROUPS=1
 * VALUES_F16=0 POLYNOMIAL=0 */
#include "cuda/device/attention/parameters.h"

#include <limits.h>
#include <stddef.h>

#include "cuda/device/attention/packed_queue.h"
#include "fwd_args.h"

#ifndef Q_STAGES
#define Q_STAGES 1
#endif
#if PAGED /* whether queries are packed is asked at run time */
#define SEQUENCES (1)
#else
#ifndef PACKED
#define PACKED 0
#endif
#define SEQUENCES (PACKED)
#endif
#ifndef HEADS_IN_TILE
#define HEADS_IN_TILE 1
#endif
#ifndef AHEAD
#define AHEAD 0
#endif
#ifndef KV_E4M3
#define KV_E4M3 0
#endif
#ifndef ANY_KEYS
#define ANY_KEYS 0
#endif
#ifndef OUT_F32
#define OUT_F32 0
#endif
#ifndef UPCAST_ROWS
#define UPCAST_ROWS 0
#endif
#ifndef UPCAST_GROUPS
#define UPCAST_GROUPS 1
#endif
#ifndef VALUES_F16
#define VALUES_F16 0
#endif
#ifndef POLYNOMIAL
#define POLYNOMIAL 0
#endif
/* Sliding windows: three consumers or more, and outputs of more than 128 columns, leave no registers for the limits,
 * unless a lane's two rows have the same: with eight heads in a tile. For d128 there are lines of their own. */
#define WINDOWS                                                                                                        \
    ((Q_TILE < 192 || (Q_TILE == 192 && (SEQUENCES || HEADS_IN_TILE >= 8))) && V_DIM <= 128 &&                         \
     (DIM != 128 || SEQUENCES || AHEAD || TERMS))
/* Where work tiles have few key tiles, a thread plans ahead (pipeline.cuh); and where keys come by many boxes, of which
 * one thread issues those of keys and one those of values: pages of the queries' type. */
#define PAGES_APART (PAGED && !KV_E4M3)
#define PLANS_AHEAD (AHEAD || HEADS_IN_TILE > 1 || PAGES_APART)
/* Where work tiles have few key tiles, the store is a good part of them: rows leave by way of shared memory. */
#define STORES_STAGED (HEADS_IN_TILE == 8 && V_DIM == 64 && !OUT_F32)

enum {
    ELEM_BYTES = 2,
    PANEL_ELEMS = 64, /* a tile is stored in panels of 128-byte rows, as the swizzle wants it */
    PANEL_ROW_BYTES = PANEL_ELEMS * ELEM_BYTES,
    KV_BYTES = KV_E4M3 ? 1 : ELEM_BYTES, /* of an element of K and V in global memory */
    GROUP_ROWS = 64,                     /* query rows of a consumer warpgroup */
    CONSUMERS = Q_TILE / GROUP_ROWS,
    THREADS = 128 * (CONSUMERS + UPCAST_GROUPS),
    QK_PANELS = (DIM + PANEL_ELEMS - 1) / PANEL_ELEMS,
    V_PANELS = (V_DIM + PANEL_ELEMS - 1) / PANEL_ELEMS,
    Q_PANEL_BYTES = GROUP_ROWS * PANEL_ROW_BYTES,
    Q_GROUP_BYTES = QK_PANELS * Q_PANEL_BYTES,
    Q_SLOTS = Q_STAGES * CONSUMERS,
    KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES,
    K_BYTES = QK_PANELS * KV_PANEL_BYTES,
    V_BYTES = V_PANELS * KV_PANEL_BYTES,
    BIAS_BYTES = GROUP_ROWS * KV_TILE * (MASKS ? 1 : ELEM_BYTES)
};

/* What lies where in shared memory; the device's loads want each tile at a multiple of 1024 bytes. */
typedef struct shared_memory {
    uint8_t q[Q_SLOTS][Q_GROUP_BYTES];
    uint8_t k[STAGES][K_BYTES], v[STAGES][V_BYTES];
#if BIAS_TILES
    uint8_t bias[CONSUMERS * BIAS_TILES][BIAS_BYTES];
#endif
#if STORES_STAGED
    uint8_t staged[CONSUMERS * GROUP_ROWS][PANEL_ROW_BYTES]; /* of outputs, each warp's its own */
#endif
    /* Of a slot of Q. */
    uint32_t work[Q_SLOTS][(SEQUENCES ? 8 : 4) + (TERMS & 64 || BIAS_TILES > 0 ? 4 : 0) + (PLANS_AHEAD ? 4 : 0)];
    uint64_t q_full[Q_SLOTS], q_empty[Q_SLOTS];
#if PLANS_AHEAD
    uint64_t work_known[Q_STAGES], plan_next;
#endif
#if BIAS_TILES
    uint64_t bias_full[CONSUMERS * BIAS_TILES], bias_empty[CONSUMERS * BIAS_TILES];
#endif
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
#if KV_E4M3
    uint64_t k_landed[STAGES], v_landed[STAGES];
    uint32_t notes[STAGES]; /* of a use of the ring of keys: what the widening warps are told (widening.cuh) */
#endif
    packed_queue queue; /* if SEQUENCES */
} shared_memory;

#ifdef __CUDACC__

#include "cuda/device/attention/epilogue.cuh"
#if OUT_F32
#include "cuda/device/attention/epilogue_f32.cuh"
#endif
#if BIAS_TILES
#include "cuda/device/attention/bias_tiles.cuh"
#endif
#include "cuda/device/attention/pipeline.cuh"
#include "cuda/device/attention/scores.cuh"
#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/isa/trace_points.cuh"
#include "cuda/device/isa/register_pair.cuh"
#include "cuda/device/isa/wgmma.cuh"

enum {
    ELEMENT = BF16 ? ACR_BF16 : ACR_F16,
    KV_TYPE = KV_E4M3 ? ACR_E4M3 : ELEMENT,
    OUT_TYPE = OUT_F32 ? ACR_F32 : ELEMENT,
    OUT_BYTES = OUT_F32 ? 4 : ELEM_BYTES,
    /* Registers of a thread, multiples of 8: the launch gives every thread an equal share, then the producer's go to
     * the consumers. */
    MORE_FOR_PRODUCER = CONSUMERS == 2 && V_DIM <= 128 && (V_DIM <= 64 || PLANS_AHEAD || PAGED),
    PLANNING_WARP = BIAS_TILES ? 1 + CONSUMERS /* those before it copy biases */ : 1, /* if PLANS_AHEAD */
    PRODUCER_COMPUTES = KV_E4M3 || BIAS_TILES,
    PRODUCER_REGISTERS = ANY_KEYS                                          ? 72 /* ranges, by the thread that plans */
                         : UPCAST_GROUPS > 1                               ? 48
                         : PRODUCER_COMPUTES                               ? 56
                         : MORE_FOR_PRODUCER                               ? 40
                         : CONSUMERS == 3 && PLANS_AHEAD                   ? 56
                         : CONSUMERS == 3 || (SEQUENCES && CONSUMERS == 4) ? 32
                                                                           : 24,
    CONSUMER_REGISTERS = ANY_KEYS            ? 216
                         : CONSUMERS == 4    ? 112
                         : CONSUMERS == 3    ? (PLANS_AHEAD || PRODUCER_COMPUTES ? 152 : 160)
                         : UPCAST_GROUPS > 1 ? 208
                         : PRODUCER_COMPUTES ? 224
                         : MORE_FOR_PRODUCER ? 232
                                             : 240,
    FIRST_ALONE = FIRST_PING_PONG + CONSUMERS, /* named barriers, behind the ping-pong ones: one for each consumer */
    /* When a consumer passes the turn: two do best one after the other, so that the scores of one run under the output
     * product of the other; more of them keep the tensor cores fed by queueing. */
    PASS_AFTER_SCORES = CONSUMERS == 2,
    /* A lane's two offsets, which the exponents of a tile use in turn, are in registers of different banks: then each
     * stays in the operand cache. In one bank they are read again for every exponent, which takes 2 to 3 % of a launch.
     * Lines of other V_DIM are left to the compiler. */
    PAIRED_OFFSETS = CONSUMERS == 2 && V_DIM == 128
};

static_assert(DIM % WGMMA_K == 0 && V_DIM % 16 == 0 && KV_TILE % WGMMA_K == 0,
              "DIM, V_DIM and KV_TILE: multiples of 16");
static_assert(Q_TILE % GROUP_ROWS == 0 && CONSUMERS >= 2 && CONSUMERS <= 4, "Q_TILE: 128, 192 or 256");
static_assert(GROUP_ROWS % HEADS_IN_TILE == 0, "HEADS_IN_TILE: a consumer has rows of each head");
static_assert(HEADS_IN_TILE == 1 || !has_term(FWD_TERM_RANGES | FWD_TERM_TREE),
              "HEADS_IN_TILE: key tiles are counted from the first key of an interval");
static_assert(!PLANS_AHEAD || Q_STAGES >= 2, "Q_STAGES: what is planned ahead needs a slot");
static_assert(!BIAS_TILES || (TERMS == FWD_TERM_BIAS && CONSUMERS == 2 && !SEQUENCES && HEADS_IN_TILE == 1),
              "BIAS_TILES: a warp copies for each of two consumers; no other terms");
static_assert(!MASKS || BIAS_TILES, "MASKS: with BIAS_TILES");
static_assert(!BIAS_FIRST || (BIAS_TILES && !MASKS), "BIAS_FIRST: with BIAS_TILES, without MASKS");
static_assert(STAGES >= 2, "STAGES: the next K arrives while this one is in use");
#if PAGED && defined PACKED
#error "PAGED: packed queries and others are served alike, without PACKED"
#endif
static_assert(!PAGED || (!AHEAD && HEADS_IN_TILE == 1 && !BIAS_TILES),
              "PAGED: without AHEAD, HEADS_IN_TILE and BIAS_TILES");
static_assert(!KV_E4M3 || (PAGED && CONSUMERS <= 3 && DIM == V_DIM && (DIM == 64 || DIM == 128)),
              "KV_E4M3: beside PAGED, two or three consumers, 64 or 128 dims of keys and of values");
static_assert(KV_E4M3 || (!UPCAST_ROWS && UPCAST_GROUPS == 1 && !VALUES_F16),
              "UPCAST_ROWS, UPCAST_GROUPS, VALUES_F16: beside KV_E4M3");
static_assert(UPCAST_GROUPS == 1 || (UPCAST_GROUPS == 2 && UPCAST_ROWS), "UPCAST_GROUPS: 1, or 2 beside UPCAST_ROWS");
static_assert(!VALUES_F16 || BF16, "VALUES_F16: with BF16");
static_assert(!ANY_KEYS || (PAGED && !KV_E4M3 && CONSUMERS == 2), "ANY_KEYS: beside PAGED, two consumers, not KV_E4M3");
static_assert(!OUT_F32 || (!PAGED && !BIAS_TILES), "OUT_F32: without PAGED and BIAS_TILES");
static_assert(sizeof(shared_memory) <= 232448, "tiles and stages: 227 KB, a CTA's limit on sm_90");

#include "cuda/device/attention/pages.cuh"
#if PAGED
#include "cuda/device/attention/page_boxes.cuh"
#endif
#include "cuda/device/attention/paging_argument.cuh"
#include "cuda/kernels/fwd_wgmma/widening.cuh"

/* ---- Producer: one thread; of PAGES_APART two, each in a warp of its own ---- */

DEV uint32_t count_work(const fwd_args &a, shared_memory *memory)
{
    return is_packed(a) ? memory->queue.tiles : count_tiles(a);
}

/* Tile number `index` of the queue. */
DEV work_tile find_tile(const fwd_args &a, uint32_t index, shared_memory *memory)
{
    return is_packed(a) ? packed_tile_at(a, index, memory->queue, KV_BYTES) : tile_at(a, index, KV_BYTES);
}

/* The rings. Written in place, since through functions the compiler orders d64's instructions otherwise. */
#define KEY_RING                                                                                                       \
    {                                                                                                                  \
        ADDRESS(smem, k), ADDRESS(smem, K_LOADED), ADDRESS(smem, k_empty),                                             \
            {LOADED_K_PANELS, KV_PANEL_BYTES, LOADED_ELEMS}, K_BYTES                                                   \
    }
#define VALUE_RING                                                                                                     \
    {                                                                                                                  \
        ADDRESS(smem, v), ADDRESS(smem, V_LOADED), ADDRESS(smem, v_empty),                                             \
            {LOADED_V_PANELS, KV_PANEL_BYTES, LOADED_ELEMS}, V_BYTES                                                   \
    }

/* A tile of K or of V as use number `use` of its ring. */
#define LOAD_KEYS(use, tile) produce_keys(k, &maps.k, source, use, tile)
#define LOAD_VALUES(use, tile) produce_keys(v, &maps.v, source, use, tile)

#if PAGES_APART
/* Loads Q, and K from the right to the left. */
DEV void produce_keys_and_queries(const fwd_args &a, const fwd_maps &maps, const fwd_paging &paging, uint32_t smem)
{
    const kv_ring k = KEY_RING;
    int use = 0, q_use = 0;
    work_tile t = wait_planned(smem, 0);
    for (; t.q_first >= 0; t = wait_planned(smem, ++q_use)) {
        const visible_tiles tiles = read_tiles(smem, 0, q_use);
        const page_source source = page_source_of(a, paging, t);
        load_queries(t, &maps.q, smem, q_use);
        const int asks = min(tiles.end - 1, tiles.first + PLAN_TILES);
        for (int kv_tile = tiles.end - 1; kv_tile >= tiles.first; kv_tile--) {
            produce_keys(k, &maps.k, source, use++, kv_tile);
            if (kv_tile == asks)
                ask_plan(smem);
        }
    }
    load_queries(t, nullptr, smem, q_use); /* there is no more work */
}

/* Loads V. The plan of a work tile is read before its slot is handed back: with one key tile consumers may have
 * released theirs by then. */
DEV void produce_values(const fwd_args &a, const fwd_maps &maps, const fwd_paging &paging, uint32_t smem)
{
    const kv_ring v = VALUE_RING;
    int use = 0, q_use = 0;
    for (work_tile t = wait_planned(smem, 0); t.q_first >= 0; t = wait_planned(smem, ++q_use)) {
        const visible_tiles tiles = read_tiles(smem, 0, q_use);
        const page_source source = page_source_of(a, paging, t);
        barrier_arrive(ADDRESS(smem, q_empty) + BARRIER_BYTES * q_slot(q_use, 0));
        for (int kv_tile = tiles.end - 1; kv_tile >= tiles.first; kv_tile--)
            produce_keys(v, &maps.v, source, use++, kv_tile);
    }
}
#else
/* Loads in the order of use: K of the last key tile, Q, then K a step ahead of V, from the right to the left. */
DEV void produce(const fwd_args &a, const fwd_maps &maps PAGING_PARAMETER, uint32_t smem, shared_memory *memory)
{
    const kv_ring k = KEY_RING, v = VALUE_RING;
    int use = 0, q_use = 0; /* of the K and V rings; of the Q ring */
#if PLANS_AHEAD
    for (work_tile t = wait_planned(smem, 0); t.q_first >= 0; t = wait_planned(smem, ++q_use)) {
        const visible_tiles tiles = read_tiles(smem, 0, q_use);
#else
#if BIAS_TILES
    const uint32_t section_heads = find_surveyed_section(a, KV_BYTES);
    for (uint32_t index = blockIdx.x; index < count_work(a, memory);) {
        visible_tiles surveyed;
        const work_tile t = find_surveyed_tile(a, index, section_heads, surveyed);
        const visible_tiles tiles = without_hidden(find_key_tiles(a, t), surveyed);
#else
    const uint32_t section_heads = SEQUENCES ? 0 : find_queue_section(a, KV_BYTES);
    for (uint32_t index = blockIdx.x; index < count_work(a, memory);) {
        const work_tile t = SEQUENCES ? find_tile(a, index, memory) : tile_in_section(a, index, section_heads);
        const visible_tiles surveyed = {}, tiles = find_key_tiles(a, t);
#endif
#endif
#if PAGED
        const page_source source = page_source_of(a, paging, t);
#else
        key_source source = key_source_of(t.rows, t.batch, t.head / a.group);
        source.row_first += key_origin(entry_of(a, t), t.q_first);
#endif
        tell_widening(k, smem, use, t, tiles, tiles.end - 1);
        LOAD_KEYS(use, tiles.end - 1);
#if PLANS_AHEAD
        load_queries(t, &maps.q, smem, q_use);
#else
        produce_work(t, &maps.q, smem, q_use++, surveyed);
#endif
#if PLANS_AHEAD
        if (tiles.end - 1 <= tiles.first + PLAN_TILES)
            ask_plan(smem);
#endif
        for (int kv_tile = tiles.end - 2; kv_tile >= tiles.first; kv_tile--) {
#if PLANS_AHEAD
            if (kv_tile == tiles.first + PLAN_TILES)
                ask_plan(smem);
#endif
            use++;
            tell_widening(k, smem, use, t, tiles, kv_tile);
            LOAD_KEYS(use, kv_tile);
            LOAD_VALUES(use - 1, kv_tile + 1);
        }
#if !PLANS_AHEAD
        index = take_next(a, count_work(a, memory)); /* arrives during the wait for the last V's stage */
#endif
        LOAD_VALUES(use++, tiles.first);
    }
    work_tile none = {};
    none.q_first = -1;
#if PLANS_AHEAD
    load_queries(none, nullptr, smem, q_use);
#else
    produce_work(none, nullptr, smem, q_use);
#endif
    end_widening(k, smem, use);
}
#endif

#if PLANS_AHEAD
/* Another thread: which work is next. */
DEV void plan_work(const fwd_args &a, uint32_t smem, shared_memory *memory)
{
    const uint32_t count = count_work(a, memory);
    work_tile none = {};
    none.q_first = -1;
    int q_use = 0;
#if BIAS_TILES
    const uint32_t section_heads = find_surveyed_section(a, KV_BYTES);
#endif
    for (uint32_t index = blockIdx.x; index < count; index = take_next(a, count)) {
#if BIAS_TILES
        visible_tiles surveyed;
        const work_tile t = find_surveyed_tile(a, index, section_heads, surveyed);
        tell_work(a, t, smem, q_use, surveyed);
#else
        tell_work(a, find_tile(a, index, memory), smem, q_use);
#endif
        wait_asked(smem, q_use++);
    }
    tell_work(a, none, smem, q_use);
}
#endif

/* ---- Consumers: a warpgroup each. Arrays are in registers, laid out as device/isa/wgmma.cuh says. ---- */

typedef float score_tile[KV_TILE / 2];
typedef float output_tile[V_DIM / 2];
typedef uint32_t probability_tile[KV_TILE / 4];

/* Where a thread is, and what stays the same for it. */
typedef struct consumer {
    uint32_t smem;
    int index;     /* among the consumers */
    int lane, row; /* the lane's first row within the query tile; its other is the eighth after it */
    uint64_t k, v; /* descriptors of stage 0 */
    float scale_log2;
    float threshold; /* RESCALE_THRESHOLD in raw scores */
} consumer;

/* The descriptor of the consumer's rows of Q. */
DEV uint64_t query_matrix(const consumer &c, int use)
{
    return matrix_descriptor(query_at(c.smem, c.index, use), 0);
}

/* Starts S = Q * transpose(K), or S += it, as a group of its own. */
DEV void start_scores(score_tile &s, uint64_t q, uint64_t k, int accumulate = 0)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM / WGMMA_K; step++) {
        const uint32_t in_panel = step % 4 * WGMMA_K * ELEM_BYTES;
        wgmma_ss(s, descriptor_at(q, step / 4 * Q_PANEL_BYTES + in_panel),
                 descriptor_at(k, step / 4 * KV_PANEL_BYTES + in_panel), step != 0 || accumulate);
    }
    wgmma_commit();
}

/* Starts O += P * V, or O = P * V, as a group of its own. */
DEV void start_output(output_tile &o, const probability_tile &p, uint64_t v, int accumulate)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_K; step++)
        OUTPUT_PRODUCT(o, p + 4 * step, descriptor_at(v, step * WGMMA_K * PANEL_ROW_BYTES), step != 0 || accumulate);
    wgmma_commit();
}

DEV void pack_probabilities(probability_tile &p, const score_tile &s)
{
#pragma unroll
    for (int i = 0; i < KV_TILE / 4; i++)
        p[i] = pack < BF16 && !VALUES_F16 > (s[2 * i], s[2 * i + 1]);
}

/* While step loops, `offsets` holds r.offset if PAIRED_OFFSETS. */
DEV void keep_offsets(register_pair &offsets, const lane_rows &r)
{
    if (PAIRED_OFFSETS)
        offsets = join_registers(r.offset);
}

DEV void use_offsets(lane_rows &r, register_pair offsets)
{
    if (PAIRED_OFFSETS)
        split_registers(r.offset, offsets);
}

/* Whether a row of the warp has grown beyond its reference by more than the threshold. With tiles of a bias, whose
 * scores are raw or not, the threshold has no register. */
DEV int any_row_grows(const lane_rows &r, const float (&max)[2], const consumer &c)
{
    if (BIAS_TILES)
        return __any_sync(~0u, (max[0] - r.max[0]) * c.scale_log2 > RESCALE_THRESHOLD ||
                                   (max[1] - r.max[1]) * c.scale_log2 > RESCALE_THRESHOLD);
    return any_row_exceeds(r, max, c.threshold);
}

/* What softcap and biases ask of a work tile; without them nothing. */
typedef struct tile_terms {
    row_terms rows[2];
    int first_column, end; /* the lane's first key of tile 0; one past the last key that exists */
#if BIAS_TILES
    int use;       /* the next of the ring of biases, counted over all work tiles */
    uint32_t work; /* where the work tile is (work_at) */
#endif
} tile_terms;

/* Makes the raw scores of a key tile ready for the softmax; key: its first. plain: nothing hides a key, and no bias
 * changes a score. */
DEV void finish_tile(score_tile &s, const row_keys &seen, int key, int masked, int plain, const fwd_args &a,
                     tile_terms &terms, const consumer &c)
{
#if BIAS_TILES
    if (plain) {
        finish_clean_scores(s, a);
        return;
    }
    finish_biased_scores(s, a, c.smem, c.index, terms.use, has_biases(terms.work, key / KV_TILE));
    finish_scores(s, seen, key, masked);
#else
    finish_scores(s, seen, key, masked, a, terms.rows, terms.first_column, terms.end);
#endif
}

/* One key tile: S = Q * transpose(K) of it and O += P * V of the one before, then P of this one. `use` is that of the
 * tile before; `key` the tile's first. */
DEV void step(score_tile &s, probability_tile &p, output_tile &o, lane_rows &r, register_pair &offsets, uint64_t q,
              const consumer &c, int use, int accumulate, int masked, int plain, const row_keys &seen, int key,
              const fwd_args &a, tile_terms &terms)
{
    float max[2], factor[2];
    int begun = 0;
#if BIAS_FIRST /* while the other consumer has the tensor cores */
    begun = begin_biased_scores(s, a, c.smem, c.index, terms.use, !plain && has_biases(terms.work, key / KV_TILE));
#endif
    wait_full(ADDRESS(c.smem, k_full), use + 1);
    wait_ping_pong(c.index);
    ACR_TRACE_POINT(use, "K landed, turn taken");
    start_scores(s, q, descriptor_at(c.k, stage_of(use + 1) * K_BYTES), begun);
    wait_full(ADDRESS(c.smem, v_full), use);
    start_output(o, p, descriptor_at(c.v, stage_of(use) * V_BYTES), accumulate);
    if (!PASS_AFTER_SCORES)
        pass_ping_pong(c.index);
    WGMMA_WAIT(1);
    ACR_TRACE_POINT(use, "scores ready");
    if (PASS_AFTER_SCORES)
        pass_ping_pong(c.index);
    release(ADDRESS(c.smem, k_empty), use + 1);
    finish_tile(s, seen, key, masked, plain || BIAS_FIRST, a, terms, c);
    if (BIAS_FIRST && !plain)
        finish_scores(s, seen, key, masked);
    lane_max(max, s);
    const int grown = any_row_grows(r, max, c);
    if (grown) {
        raise_references(r, factor, max, c.scale_log2,
                         BIAS_TILES ? RESCALE_THRESHOLD * reciprocal_fast(c.scale_log2) : c.threshold);
        keep_offsets(offsets, r);
    }
    use_offsets(r, offsets);
    exponentiate_and_sum<POLYNOMIAL>(s, r, c.scale_log2);
    ACR_TRACE_POINT(use, "exponentials done");
    WGMMA_WAIT(0);
    ACR_TRACE_POINT(use, "output product done");
    release(ADDRESS(c.smem, v_empty), use);
    pack_probabilities(p, s);
    if (grown)
        scale_output(o, factor);
}

/* Rows of V beyond the key length may hold anything, the next sequence for one, and NaN times a probability of zero
 * is NaN: each consumer clears them for itself. */
DEV void clear_rows(const consumer &c, int use, int first)
{
    const int thread = threadIdx.x % WARPGROUP_THREADS;
    wait_full(ADDRESS(c.smem, v_full), use);
    for (int i = thread + first * 8; i < KV_TILE * 8; i += WARPGROUP_THREADS)
        for (int panel = 0; panel < V_PANELS; panel++)
            store_shared_4(ADDRESS(c.smem, v) + stage_of(use) * V_BYTES + panel * KV_PANEL_BYTES + i * 16, 0, 0, 0, 0);
    shared_stores_visible();
    named_sync(FIRST_ALONE + c.index, WARPGROUP_THREADS);
}

/* ---- Output ---- */

/* A row's sum, what its output was multiplied by, and whether all of that was finite. */
typedef struct row_result {
    float sum, factor;
    int finite;
} row_result;

/* Behind a row's output what few callers want or few inputs need: its log-sum-exp, and the row again where a hidden key
 * has spoilt it. */
DEV void finish_row(const fwd_args &a PAGING_PARAMETER, const work_tile &t, const visible_entry &entry, int batch,
                    const cache_scales &scales, float max, float offset, int h, const row_result &found,
                    const consumer &c)
{
    const int row = row_of(t, c.row, h), head = head_of(t, c.row, h);
    if (a.lse != nullptr && c.lane % 4 == 0 && row < entry.q_len)
        find_lse(a, t.rows, batch, head)[row] = row_lse(a, head, max * scales.keys, found.sum);
    /* c's copy where it is in a register anyway: held for this alone it spills beside the widest outputs, and read
     * again it spills beside four consumers */
    const float scale_log2 = V_DIM > 128 ? score_scale_log2(a) : c.scale_log2;
    const stored_row stored = {entry_number(t), head,       row,    t.rows.q_begin,
                               t.rows.kv_begin, scale_log2, offset, found.factor};
#if ANY_KEYS
    if (paging.table == nullptr)
        fix_hidden_nan<ELEMENT>(a, entry, stored, found.sum, found.finite, c.lane);
    else
        fix_paged_nan<ELEMENT>(a, pages_of_entry(a, paging, batch), entry, stored, found.sum, found.finite, c.lane);
#elif PAGED
    fix_paged_nan<ELEMENT>(a, pages_of_entry(a, paging, batch), entry, stored, found.sum, found.finite, c.lane);
#else
    fix_hidden_nan<ELEMENT, OUT_TYPE>(a, entry, stored, found.sum, found.finite, c.lane);
#endif
#if BIAS_TILES
    const int again = row < entry.q_len && loses_keys(a, max, found.sum);
    if (__any_sync(~0u, again))
        __syncwarp(); /* what other lanes have stored of the row comes first */
    if (again)
        compute_row_again<ELEMENT>(a, entry, stored,
                                   a.lse == nullptr ? nullptr : find_lse(a, t.rows, batch, head) + row, c.lane);
#endif
}

/* The sums of a lane's rows, and what their outputs are multiplied by, if STORES_STAGED. */
DEV void find_row_results(row_result (&found)[2], const fwd_args &a, const work_tile &t, const lane_rows &r,
                          const consumer &c)
{
    if (!STORES_STAGED)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        found[h].sum = quad_sum(r.sum[h]);
        found[h].factor = row_factor(a, head_of(t, c.row, h), r.max[h], found[h].sum);
    }
}

#if STORES_STAGED
/* Stores a warp's rows, of two heads, by way of shared memory: transposed by stmatrix and read back by rows they take
 * half the instructions that transposing by shuffles takes. */
DEV void store_staged(const fwd_args &a, const work_tile &t, output_tile &o, row_result (&found)[2], const consumer &c)
{
    const int warp = c.row / 16 % 4, row = c.lane % 16, chunk = c.lane / 16;
    const uint32_t rows = ADDRESS(c.smem, staged) + (uint32_t)(c.index * GROUP_ROWS + warp * 16) * PANEL_ROW_BYTES;
    const uint32_t to = rows + chunk_offset(row, chunk, 8);
    float probe[2] = {0.0f, 0.0f}; /* NaN where a value is not finite */
    if (__any_sync(~0u, found[0].factor == 0.0f || found[1].factor == 0.0f)) {
#pragma unroll
        for (int i = 0; i < V_DIM / 2; i++) /* a row that has seen no key becomes 0 whatever the accumulators hold */
            o[i] = found[i % 4 / 2].factor == 0.0f ? 0.0f : o[i];
    }
#pragma unroll
    for (int i = 0; i < V_DIM / 8; i += 2) {
        uint32_t x[4]; /* of both rows 8 columns, then the next 8 */
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int h = j % 2, at = 4 * (i + j / 2) + 2 * h;
            const float low = o[at] * found[h].factor, high = o[at + 1] * found[h].factor;
            probe[h] = fmaf(low, 0.0f, fmaf(high, 0.0f, probe[h]));
            x[j] = pack<BF16>(low, high);
        }
        store_matrices(chunk_address(to, i, 8), x);
    }
    found[0].finite = probe[0] == 0.0f;
    found[1].finite = probe[1] == 0.0f;
    __syncwarp();
    const int position = t.q_first + c.index * GROUP_POSITIONS + c.lane / 8, column = c.lane % 8;
    const uint32_t from = rows + chunk_offset(c.lane / 8, column, 8);
    char *const first =
        (char *)a.o +
        (output_index(a, t.rows, t.batch, t.head + 2 * warp, position) + column * CHUNK_ELEMS) * ELEM_BYTES;
    const int64_t four_rows = 4 * a.o_stride.row * ELEM_BYTES, head = a.o_stride.head * ELEM_BYTES;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 x = load_shared_4(chunk_address(from, i % 2 * 4, 8) + i * 4 * PANEL_ROW_BYTES);
        if (position + i % 2 * 4 < count_queries(a, t) && column * CHUNK_ELEMS < a.v_dim)
            *(uint4 *)(first + i % 2 * four_rows + i / 2 * head) = x;
    }
    __syncwarp(); /* every lane has read */
}
#endif

/* Both rows are stored before what is rare is asked for, where that does not spill. */
DEV void store_tile(const fwd_args &a PAGING_PARAMETER, const work_tile &t, output_tile &o, const lane_rows &r,
                    row_result (&found)[2], const consumer &c)
{
    const visible_entry entry = entry_of(a, t);
    const int batch = PAGED ? entry_number(t) : t.batch; /* of packed queries, too: their batch strides are 0 */
    const cache_scales scales = find_cache_scales(a, batch, t.head / a.group);
    const bool finishes_later = (!BIAS_TILES || MASKS) && V_DIM <= 128 && CONSUMERS < 4;
#if STORES_STAGED
    store_staged(a, t, o, found, c);
#else
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = row_of(t, c.row, h), head = head_of(t, c.row, h);
        found[h].sum = quad_sum(r.sum[h]);
        found[h].factor = row_factor(a, head, r.max[h], found[h].sum) * scales.values;
        const row_store to = {(char *)a.o + output_index(a, t.rows, batch, head, row) * OUT_BYTES, row < entry.q_len,
                              a.v_dim, found[h].factor};
#if OUT_F32
        found[h].finite = store_row_f32(to, o, h, c.lane);
#else
        found[h].finite = store_row<BF16>(to, o, h, c.lane);
#endif
        if (!finishes_later)
            finish_row(a PAGING_ARGUMENT, t, entry, batch, scales, r.max[h], r.offset[h], h, found[h], c);
    }
#endif
    if (!finishes_later || (a.lse == nullptr && !hides_keys(a, entry)))
        return;
#if MASKS /* one row after the other by the same code, which is long */
#pragma unroll 1
    for (int h = 0; h < 2; h++) {
        const row_result of_row = h == 0 ? found[0] : found[1];
        finish_row(a PAGING_ARGUMENT, t, entry, batch, scales, h == 0 ? r.max[0] : r.max[1],
                   h == 0 ? r.offset[0] : r.offset[1], h, of_row, c);
    }
#else
#pragma unroll
    for (int h = 0; h < 2; h++)
        finish_row(a PAGING_ARGUMENT, t, entry, batch, scales, r.max[h], r.offset[h], h, found[h], c);
#endif
}

/* What a mask has to do in a key tile: seldom both, since it costs as much on either side of the rows' keys. */
DEV row_keys at_tile(const row_keys &seen, const visible_tiles &tiles, int tile)
{
    row_keys v = seen;
    if (WINDOWS) {
        v.has_first = seen.has_first && tile < tiles.full_first;
        v.endless = tile < tiles.full_end && tiles.full_first < tiles.full_end;
    }
    return v;
}

/* The key tiles that the consumers of a work tile visit. */
DEV visible_tiles find_all_tiles(const fwd_args &a, const work_tile &t, uint32_t smem, int index, int q_use)
{
#if BIAS_TILES
    return without_hidden(find_key_tiles(a, t), read_surveyed(work_at(smem, q_slot(q_use, index))));
#else
    return find_key_tiles(a, t);
#endif
}

DEV void consume(const fwd_args &a PAGING_PARAMETER, uint32_t smem, int index)
{
    const int lane = threadIdx.x % WARP_THREADS;
    consumer c = {smem,
                  index,
                  lane,
                  lane_row(index, threadIdx.x),
                  matrix_descriptor(ADDRESS(smem, k), 0),
                  matrix_descriptor(ADDRESS(smem, v), KV_PANEL_BYTES),
                  score_scale_log2(a),
                  RESCALE_THRESHOLD / score_scale_log2(a)};
    int use = 0, q_use = 0;
#if BIAS_TILES
    int bias_use = 0;
#endif
    score_tile s;
    probability_tile probabilities;
    output_tile o;
    lane_rows r;
    register_pair offsets = 0;

    open_ping_pong(index);
    work_tile t = wait_work(smem, index, q_use);
    uint64_t q = query_matrix(c, q_use);
    wait_full(ADDRESS(smem, k_full), use);
    ACR_TRACE_POINT(0, "first Q and K landed");
    start_scores(s, q, c.k);
    do {
        const visible_entry entry = entry_of(a, t);
        const int origin = key_origin(entry, t.q_first), keys = entry.kv_len - origin; /* from tile 0's first on */
        if (KV_E4M3) {
            c.scale_log2 = score_scale_log2(a) * find_cache_scales(a, entry_number(t), t.head / a.group).keys;
            c.threshold = RESCALE_THRESHOLD / c.scale_log2;
        }
        const row_keys seen = find_row_keys(a, entry, entry_number(t), row_of(t, c.row, 0), row_of(t, c.row, 1),
                                            origin + 2 * (c.lane % 4));
        tile_terms terms = {};
        if (has_term(FWD_TERM_BIAS | FWD_TERM_ALIBI) && !BIAS_TILES)
            terms = {{find_row_terms(a, entry, entry_number(t), head_of(t, c.row, 0), row_of(t, c.row, 0)),
                      find_row_terms(a, entry, entry_number(t), head_of(t, c.row, 1), row_of(t, c.row, 1))},
                     origin + 2 * (c.lane % 4),
                     entry.kv_len};
#if BIAS_TILES
        terms.use = bias_use;
        terms.work = work_at(smem, q_slot(q_use, index));
#endif
#if PLANS_AHEAD
        const visible_tiles tiles = read_tiles(smem, index, q_use);
#else
        const visible_tiles tiles = tiles_of_consumer(a, entry, t, find_all_tiles(a, t, smem, index, q_use), index);
#endif
        int tile = tiles.end - 1, accumulate = 0;
        float max[2];

        WGMMA_WAIT(0);
        ACR_TRACE_POINT(q_use, "tile: first scores ready");
        release(ADDRESS(smem, k_empty), use);
        finish_tile(s, at_tile(seen, tiles, tile), tile * KV_TILE, tile >= tiles.full_end || tile < tiles.full_first, 0,
                    a, terms, c);
        lane_max(max, s);
        start_rows(r, max, c.scale_log2);
        keep_offsets(offsets, r);
        use_offsets(r, offsets);
        exponentiate_and_sum<POLYNOMIAL>(s, r, c.scale_log2);
        pack_probabilities(probabilities, s);
        ACR_TRACE_POINT(q_use, "tile: first exponentials done");
        if (!KV_E4M3 && (a.kv_lens != nullptr || SEQUENCES) && (tile + 1) * KV_TILE > keys)
            clear_rows(c, use, keys - tile * KV_TILE);
        tile--;
#if BIAS_TILES /* of tiles with biases some are masked */
        const visible_tiles plain = clean_tiles(tiles, read_surveyed(terms.work));
#else
        const visible_tiles &plain = tiles;
#endif
        for (int end = plain.full_end;;
             end = tiles.first) { /* masked tiles, tiles without a mask, masked tiles again */
#pragma unroll 1
            for (; tile >= end; tile--, accumulate = 1)
                step(s, probabilities, o, r, offsets, q, c, use++, accumulate,
                     !BIAS_TILES || tile >= tiles.full_end || tile < tiles.full_first, 0, at_tile(seen, tiles, tile),
                     tile * KV_TILE, a, terms);
#pragma unroll 1
            for (; tile >= plain.full_first; tile--, accumulate = 1)
                step(s, probabilities, o, r, offsets, q, c, use++, accumulate, 0, 1, seen, tile * KV_TILE, a, terms);
            if (tile < tiles.first)
                break;
        }

#if BIAS_TILES
        bias_use = terms.use;
#endif
        /* The last output product of this tile, and under its store the first scores of the next. */
        release_query(smem, index, q_use);
        wait_full(ADDRESS(smem, v_full), use);
        wait_ping_pong(c.index);
        start_output(o, probabilities, descriptor_at(c.v, stage_of(use) * V_BYTES), accumulate);
        const work_tile next = wait_work(smem, index, ++q_use);
        if (next.q_first >= 0)
            wait_full(ADDRESS(smem, k_full), use + 1);
        q = query_matrix(c, q_use);
        /* behind the last work tile these are scores of stale tiles, which nobody reads */
        start_scores(s, q, descriptor_at(c.k, stage_of(use + 1) * K_BYTES));
        pass_ping_pong(c.index);
        row_result found[2];
        find_row_results(found, a, t, r, c); /* under the products */
        WGMMA_WAIT(1);
        ACR_TRACE_POINT(q_use, "tile: last output product done");
        release(ADDRESS(smem, v_empty), use++);
        use_offsets(r, offsets);
        store_tile(a PAGING_ARGUMENT, t, o, r, found, c);
        ACR_TRACE_POINT(q_use, "tile: stored");
        t = next;
    } while (t.q_first >= 0);
    WGMMA_WAIT(0);
    close_ping_pong(index);
}

DEV void init_barriers(const fwd_args &a, uint32_t smem)
{
    const int warps = WARPGROUP_THREADS / WARP_THREADS;
    const bool has_copier = BIAS_TILES && a.bias != nullptr;
    for (int i = 0; i < Q_SLOTS; i++) {
        barrier_init(ADDRESS(smem, q_full) + BARRIER_BYTES * i, 1);
        /* the producer of values tells consumer 0's slot, too, and who copies biases that of his consumer */
        barrier_init(ADDRESS(smem, q_empty) + BARRIER_BYTES * i,
                     warps + (PAGES_APART && i % CONSUMERS == 0) + has_copier);
    }
#if PLANS_AHEAD
    for (int i = 0; i < Q_STAGES; i++)
        barrier_init(ADDRESS(smem, work_known) + BARRIER_BYTES * i, 1);
    barrier_init(ADDRESS(smem, plan_next), 1);
#endif
    for (int i = 0; i < STAGES; i++) {
        barrier_init(ADDRESS(smem, k_full) + BARRIER_BYTES * i, KV_E4M3 ? UPCAST_WARPS : 1);
        barrier_init(ADDRESS(smem, k_empty) + BARRIER_BYTES * i, warps * CONSUMERS);
        barrier_init(ADDRESS(smem, v_full) + BARRIER_BYTES * i, KV_E4M3 ? UPCAST_WARPS : 1);
        barrier_init(ADDRESS(smem, v_empty) + BARRIER_BYTES * i, warps * CONSUMERS);
#if KV_E4M3
        barrier_init(ADDRESS(smem, k_landed) + BARRIER_BYTES * i, 1);
        barrier_init(ADDRESS(smem, v_landed) + BARRIER_BYTES * i, 1);
#endif
    }
#if BIAS_TILES
    for (int i = 0; i < CONSUMERS * BIAS_TILES; i++) {
        barrier_init(ADDRESS(smem, bias_full) + BARRIER_BYTES * i, bias_arrivals(a));
        barrier_init(ADDRESS(smem, bias_empty) + BARRIER_BYTES * i, warps);
    }
#endif
    barrier_init_done();
}

#if PAGED
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_maps maps,
                const __grid_constant__ fwd_paging paging)
{
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_maps maps)
{
#endif
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_memory *const shared = (shared_memory *)memory;
    const uint32_t smem = smem_address(memory);
    ACR_TRACE_POINT(0, "start");
    const int group = read_warpgroup();
    if (threadIdx.x == 0) {
        prefetch_inputs(maps);
        init_barriers(a, smem);
    }
    __syncthreads();
    wait_for_previous_kernel();
    allow_next_kernel();
    if (is_packed(a)) {
        order_sequences(a, shared->queue, THREADS);
        if (blockIdx.x >= count_work(a, shared))
            return;
    }
#if BIAS_TILES
    survey_bias(a);
#endif
    ACR_TRACE_POINT(0, "CTA ready");
    if (UPCAST_GROUPS == 1 ? group == 0 : group < UPCAST_GROUPS) {
        REGISTERS_GIVE(PRODUCER_REGISTERS);
#if PAGED /* by elected lanes: else a loop over lanes would issue each box */
        const int warp = __shfl_sync(~0u, threadIdx.x / WARP_THREADS, 0);
#endif
#if PAGES_APART
        if (warp == 0 && elect_one())
            produce_keys_and_queries(a, maps, paging, smem);
        if (warp == 1 && elect_one())
            plan_work(a, smem, shared);
        if (warp == 2 && elect_one())
            produce_values(a, maps, paging, smem);
#else
#if PAGED
        if (warp == 0 && elect_one())
#else
        if (threadIdx.x == 0)
#endif
            produce(a, maps PAGING_ARGUMENT, smem, shared);
#if PLANS_AHEAD
        if (threadIdx.x == PLANNING_WARP * WARP_THREADS)
            plan_work(a, smem, shared);
#endif
#endif
#if KV_E4M3
        if (threadIdx.x >= WARP_THREADS)
            widen_tiles(smem);
#endif
#if BIAS_TILES
        const int copier = threadIdx.x / WARP_THREADS - 1;
        if (copier >= 0 && copier < CONSUMERS)
            produce_biases(a, &maps.o, smem, copier);
#endif
    } else {
        REGISTERS_TAKE(CONSUMER_REGISTERS);
        consume(a PAGING_ARGUMENT, smem, group - UPCAST_GROUPS);
    }
    ACR_TRACE_END(a);
}

#else

#include "cuda/device/attention/bias_survey.h"
#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {.work = ACR__WORK_QUEUE,
                                   .q_tile = Q_TILE,
                                   .heads_in_tile = HEADS_IN_TILE,
                                   .threads = THREADS,
                                   .smem_bytes = sizeof(shared_memory),
                                   .packed_only = SEQUENCES && !PAGED,
                                   .caches_only = PAGED && !ANY_KEYS,
                                   .narrow_only = KV_E4M3,
                                   .no_windows = !WINDOWS};

#include "cuda/model/tile_kernel.h"

/* A key tile is loaded by boxes of a page, or of the tile. Smaller ones than 8 rows would cut the swizzle's period. */
static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    const int32_t page = problem->page;
    if (PAGED && problem->flags & ACR_PAGED && page % KV_TILE != 0 && (page % 8 != 0 || KV_TILE % page != 0))
        return "page: neither a multiple of a key tile (KV_TILE) nor 8 keys or a multiple of 8 that divides it";
    if (PAGED && !ANY_KEYS && (problem->flags & (ACR_PACKED | ACR_PAGED)) == ACR_PACKED)
        return "packed: keys of another type than q's (kv_dtype) only in pages (ACR_PAGED)";
    if (BIAS_TILES && problem->bias_dtype == ACR_F32)
        return "bias_dtype: the kernel serves biases of 16 bits and boolean masks (BIAS_TILES)";
    if (BIAS_FIRST && problem->bias_dtype == ACR_BOOL8)
        return "bias_dtype: the kernel serves no boolean masks (BIAS_FIRST)";
    if (MASKS && problem->bias_dtype != ACR_DTYPE_DEFAULT && problem->bias_dtype != ACR_BOOL8)
        return "bias_dtype: the kernel serves no biases but boolean masks (MASKS)";
    return tile_why_not(problem, device);
}

static double cost(const acr_problem *problem, const acr__device *device)
{
#if AHEAD || PAGED || OUT_F32 || (TERMS && HEADS_IN_TILE == 1)
    /* As rates.def has the line without: one that plans ahead takes less for a masked query tile, more for the first,
     * and of d128 1 % less for each key tile. */
    const int wide = DIM > 64, ahead = PLANS_AHEAD;
    const double mask_cycles = wide ? 1228.0 : 415.0;
    const acr__fwd_rates rates = {
        .mma_flop_per_cycle = wide ? (ahead ? 3620.0 : 3580.0) : 3239.0,
        .exp_per_cycle = wide ? (ahead ? 9.97 : 9.86) : 9.38,
        .step_cycles = 800.0,
        .cta_cycles = wide ? 3795.0 : 2897.0,
        .mask_cycles = ahead ? 650.0 : mask_cycles,
        .first_cycles = ahead ? 4400.0 : 3000.0,
        .memory_share = 0.9,
        .ctas_per_sm = 1,
    };
#else
    const acr__fwd_rates rates = {
        .heads_in_tile = HEADS_IN_TILE,
        /* of 4096, what the power limit leaves; several heads in a tile pay with few key tiles alone */
        .mma_flop_per_cycle = HEADS_IN_TILE > 1 ? 3000.0 : 3600.0,
        .exp_per_cycle = HEADS_IN_TILE > 1 ? 9.4 : 14.0,
        .step_cycles = 600.0 + 4.0 * KV_TILE, /* of one warpgroup alone */
        .cta_cycles = 3500.0,
        .ctas_per_sm = 1,
    };
#endif
    /* Biases as tiles cost less than biases lane by lane wherever both can be had. Not fitted. */
    const double terms = MASKS ? 0.85 : BIAS_FIRST ? 0.8 : BIAS_TILES ? 0.9 : 1.0;
    /* Of e4m3: over the 16-bit line of these tiles that does not plan ahead, causal, on an H100 (lab.md). */
    const double widening = !KV_E4M3 ? 1.0 : DIM == 64 ? (BF16 ? 1.27 : 1.23) : (BF16 ? 1.23 : 1.17);
    /* Lines of one term, of keys that lie in one way, are to be taken where they serve. Not fitted. */
    const double general = ANY_KEYS ? 1.1 : 1.0;
    return tile_seconds(problem, device, rates) * tile_terms_cost(problem, HEADS_IN_TILE > 1 ? 0 : TERMS) * terms *
           widening * general;
}

static size_t workspace(const acr_problem *p, const acr__device *device)
{
    if (!BIAS_TILES || p->bias_dtype == ACR_DTYPE_DEFAULT || !survey_is_wanted((int32_t)p->bias_dtype, p->bias.head))
        return tile_workspace(p, device);
    const int64_t query_tiles =
        (p->q_len + Q_TILE - 1) / Q_TILE * (p->bias.batch != 0 ? p->batch : 1) * (p->bias.head != 0 ? p->q_heads : 1);
    return (size_t)survey_bytes(query_tiles, (p->kv_len + KV_TILE - 1) / KV_TILE);
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("fwd_wgmma", 90, 90),
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .traits = SEQUENCES ? ACR__TRAIT_PACKED : 0,
    .terms = TERMS,
    .pages = PAGED,
    .kv_types = KV_E4M3 ? 1u << ACR_E4M3 : 0,
    .out_types = OUT_F32 ? 1u << ACR_F32 : 0,
    .why_not = why_not,
    .workspace = workspace,
    .cost = cost,
    .shape = tile_shape,
    .boxes = {.q_rows = GROUP_ROWS / HEADS_IN_TILE,
              .k_rows = KV_TILE,
              .v_rows = KV_TILE,
              .q_heads = HEADS_IN_TILE,
              .bias_rows = BIAS_TILES ? GROUP_ROWS : 0},
};

#endif
