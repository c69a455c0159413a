/* Forward attention on e4m3 queries, keys and values, sm_90a: fwd_wgmma's shape (a queue of query tiles, warpgroups in
 * turns) with what 8 bits need besides.
 *
 * - V is transposed on the way: 8-bit products want both operands K-major, so the producer warpgroup turns each tile
 *   of V into one of dims by keys in shared memory. It moves pairs of bytes, which leaves the keys in the order in
 *   which a lane's packed probabilities are, and the dims with the even ones of each 16 first, which the store undoes.
 * - Probabilities are scaled by 2^5 before rounding: e4m3 has 448 above 1 and little below, and what 2^5 leaves of the
 *   448 is how far the subtracted maximum may lag behind the true one.
 * - Row sums are those of the rounded probabilities: eight columns of ones behind V make the tensor cores add up a key
 *   tile's; over the tiles they are added in float32.
 * - Accumulator promotion: the tensor cores cut each addend at the last of about 14 bits of a running sum, so after
 *   every PROMOTE_TILES key tiles it is added to totals in shared memory (a thread's own vectors, no conflicts) and
 *   starts anew. Where shared memory has no room for float32 they are bf16, and what rounding them leaves stays in the
 *   accumulator, so that nothing is lost.
 *
 * After Shah et al. 2024 (V transposed in the producer, scaled probabilities). See README.md.
 *
 * Parameters: DIM (64, 128, 192 or 256: head dims up to it, zero-padded), Q_TILE, KV_TILE, STAGES; optional
 * PROMOTE_TILES (default 8, 0 = never), BF16_TOTALS (default 0), Q_STAGES (default 1).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES PROMOTE_TILES=8 BF16_TOTALS=0 Q_STAGES=1 */
#include <stddef.h>

#include "fwd_args.h"

#ifndef PROMOTE_TILES
#define PROMOTE_TILES 8
#endif
#ifndef BF16_TOTALS
#define BF16_TOTALS 0
#endif
#ifndef Q_STAGES
#define Q_STAGES 1
#endif
/* Sliding windows: four consumers leave no registers for their limits. */
#define WINDOWS (Q_TILE < 256)
/* Warps that wait sleep, which is 1 % faster (lab.md). Of other lines it has not been timed, or they spill by it. */
#define BARRIERS_SLEEP (DIM == 128 && KV_TILE == 192 && PROMOTE_TILES != 0)

enum {
    ELEM_BYTES = 1,
    PANEL_ELEMS = 128, /* a row of a tile of Q, K and V: a box of the tensor map, zeros beyond the head dim */
    ROW_BYTES = PANEL_ELEMS * ELEM_BYTES,
    GROUP_ROWS = 64,  /* query rows of a consumer warpgroup */
    PANEL_KEYS = 128, /* the transposed V is in panels of 128-byte rows, a byte a key */
    ONES_ROWS = 8,    /* of the transposed V, behind its dims */
    CONSUMERS = Q_TILE / GROUP_ROWS,
    THREADS = 128 * (CONSUMERS + 1),
    QK_PANELS = (DIM + PANEL_ELEMS - 1) / PANEL_ELEMS, /* of V as it comes, too */
    Q_PANEL_BYTES = GROUP_ROWS * ROW_BYTES,
    Q_GROUP_BYTES = QK_PANELS * Q_PANEL_BYTES,
    Q_SLOTS = Q_STAGES * CONSUMERS,
    PANEL_BYTES = KV_TILE * ROW_BYTES,
    TILE_BYTES = QK_PANELS * PANEL_BYTES, /* of K, or of V as it comes */
    TRANSPOSED_ROWS = DIM + ONES_ROWS,
    /* A product is at most 256 columns wide: if there are more, the first ones are in a product of their own. */
    FIRST_COLUMNS = TRANSPOSED_ROWS <= 256 ? 0 : 128,
    TRANSPOSED_PANEL_BYTES = TRANSPOSED_ROWS * ROW_BYTES,
    TRANSPOSED_BYTES = (KV_TILE + PANEL_KEYS - 1) / PANEL_KEYS * TRANSPOSED_PANEL_BYTES, /* of V as it is used */
    TOTALS_VECTORS = BF16_TOTALS ? DIM / 16 : DIM / 8, /* of 8 bf16 or 4 floats: a thread's totals of the output */
    /* If the last panel of transposed keys is at most half full, each consumer's threads have a vector in the other
     * half of it: consumer c in stage c, thread t in row t. */
    SPARE_VECTORS = KV_TILE % PANEL_KEYS > 0 && KV_TILE % PANEL_KEYS <= PANEL_KEYS / 2 && DIM >= 128 &&
                    STAGES >= CONSUMERS &&BF16_TOTALS,
    PROMOTED_TILES = PROMOTE_TILES > 0 ? PROMOTE_TILES : 1,
    SCALES_SLOTS = Q_STAGES + 1 /* one more: see produce_scales */
};

/* Of a work tile, for all consumers. */
typedef struct tile_scales {
    float score, score_log2, out, none;
} tile_scales;

/* What lies where in shared memory; the device's loads want each tile at a multiple of 1024 bytes. */
typedef struct shared_memory {
    uint8_t q[Q_SLOTS][Q_GROUP_BYTES];
    uint8_t k[STAGES][TILE_BYTES], v[STAGES][TILE_BYTES]; /* v: as it is in global memory, */
    uint8_t transposed[STAGES][TRANSPOSED_BYTES];         /* and as it is used */
#if PROMOTE_TILES
    uint32_t totals[CONSUMERS][TOTALS_VECTORS - SPARE_VECTORS][128][4];
    float references[CONSUMERS][GROUP_ROWS]; /* what the totals of a row are relative to */
#endif
    uint32_t work[Q_SLOTS][4]; /* the work tile that a slot of Q is of */
    tile_scales scales[SCALES_SLOTS];
    uint32_t next[2]; /* the loading thread's next index */
    uint64_t q_full[Q_SLOTS], q_empty[Q_SLOTS];
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    uint64_t transposed_full[STAGES], transposed_empty[STAGES];
} shared_memory;

#ifdef __CUDACC__

#define PACKED 0 /* tile_scheduler.cuh asks: no packed batches here */
#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/pipeline.cuh"
#include "cuda/device/attention/scores.cuh"
#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/isa/wgmma_fp8.cuh"

enum {
    PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32,
    CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : CONSUMERS == 3 ? 160 : 112,
    PART_ELEMS = WGMMA_FP8_K / 2,        /* of a lane's scores: the keys of one step of the output's product */
    MAX_CHAINS = CONSUMERS == 2 ? 2 : 1, /* of dependent comparisons, for a row's maximum: two need registers */
    PRODUCERS_MEET = FIRST_PING_PONG + CONSUMERS, /* a named barrier, behind those of the ping-pong */
    SHIFT = 5                                     /* probabilities reach 2^SHIFT */
};

/* Probabilities reach 2^SHIFT, and by as much as the reference may lag behind the maximum, more: less than 448. */
static constexpr float THRESHOLD = 8.75f - SHIFT;

static_assert(DIM % 64 == 0 && DIM <= 256, "DIM: 64, 128, 192 or 256");
static_assert(KV_TILE % WGMMA_FP8_K == 0, "KV_TILE: a multiple of 32");
static_assert(Q_TILE % GROUP_ROWS == 0 && CONSUMERS >= 2 && CONSUMERS <= 4, "Q_TILE: 128, 192 or 256");
static_assert(STAGES >= 2, "STAGES: the next tiles arrive while these are in use");
static_assert(!BF16_TOTALS || PROMOTE_TILES, "BF16_TOTALS: of promoted accumulators");
static_assert(BF16_TOTALS || (PROMOTE_TILES & (PROMOTE_TILES - 1)) == 0, "PROMOTE_TILES: a power of two, or 0");
static_assert(PROMOTE_TILES >= 0 && PROMOTE_TILES * KV_TILE <= 1152,
              "PROMOTE_TILES: the tensor cores' sums over more than 1152 keys lose accuracy");
static_assert(sizeof(shared_memory) <= 232448, "tiles and stages: 227 KB, a CTA's limit on sm_90");

/* ---- Producers: a warpgroup; its first thread loads, all of it transposes ---- */

/* A scale of use number `use` of Q: a member of tile_scales. Loaded where they are used: four consumers have no
 * register to spare. */
#define LOAD_SCALE(smem, use, member)                                                                                  \
    load_shared_float(ADDRESS(smem, scales) + (use) % SCALES_SLOTS * (uint32_t)sizeof(tile_scales) +                   \
                      (uint32_t)offsetof(tile_scales, member))

DEV uint32_t swizzled(uint32_t row, uint32_t chunk)
{
    return row * ROW_BYTES + ((chunk ^ row % 8) << 4);
}

/* 16 dims of 32 keys: tiles of 8 keys by 16 bytes are read transposed by pairs of bytes, then the even and the odd
 * dims of the pairs are taken apart. */
DEV void transpose_block(uint32_t v, uint32_t transposed, int dim_chunk, int key_block, int lane)
{
    uint32_t x[4];
    load_matrices_transposed(x, v + dim_chunk / 8 * PANEL_BYTES +
                                    swizzled((uint32_t)(key_block * 32 + lane), (uint32_t)(dim_chunk % 8)));
    /* even dims of keys 0..15 and 16..31, then odd ones */
    const uint32_t dims[4] = {__byte_perm(x[0], x[1], 0x6420), __byte_perm(x[2], x[3], 0x6420),
                              __byte_perm(x[0], x[1], 0x7531), __byte_perm(x[2], x[3], 0x7531)};
    const int matrix = lane / 8;
    const uint32_t row = (uint32_t)(dim_chunk * 16 + matrix / 2 * 8 + lane % 8),
                   chunk = (uint32_t)(key_block % 4 * 2 + matrix % 2);
    store_matrices(transposed + key_block / 4 * TRANSPOSED_PANEL_BYTES + swizzled(row, chunk), dims);
}

/* Rows of V beyond a batch entry's key length may hold anything, and NaN times a probability of zero is NaN. */
DEV void clear_rows(uint32_t v, int first)
{
    const int thread = threadIdx.x;
    for (int panel = 0; panel < QK_PANELS; panel++)
        for (int i = thread + max(first, 0) * 8; i < KV_TILE * 8; i += WARPGROUP_THREADS)
            store_shared_4(v + panel * PANEL_BYTES + i * 16, 0, 0, 0, 0);
    shared_stores_visible(); /* TMA writes here next */
    named_sync(PRODUCERS_MEET, WARPGROUP_THREADS);
}

/* Use number `use` of V, of which `keys` keys exist, becomes the same use of the transposed V. */
DEV void transpose_tile(uint32_t smem, int use, int keys)
{
    const int warp = threadIdx.x / WARP_THREADS, lane = threadIdx.x % WARP_THREADS, stage = stage_of(use);
    const uint32_t v = ADDRESS(smem, v) + stage * TILE_BYTES,
                   transposed = ADDRESS(smem, transposed) + stage * TRANSPOSED_BYTES;
    barrier_wait(ADDRESS(smem, v_full) + BARRIER_BYTES * stage, parity_of(use));
    if (keys < KV_TILE)
        clear_rows(v, keys);
    barrier_wait(ADDRESS(smem, transposed_empty) + BARRIER_BYTES * stage, parity_of(use) ^ 1);
#pragma unroll
    for (int dims = 0; dims < DIM / 64; dims++)
#pragma unroll
        for (int key_block = 0; key_block < KV_TILE / 32; key_block++)
            transpose_block(v, transposed, dims * 4 + warp, key_block, lane);
    shared_stores_visible();
    __syncwarp();
    if (lane == 0) {
        barrier_arrive(ADDRESS(smem, v_empty) + BARRIER_BYTES * stage);
        barrier_arrive(ADDRESS(smem, transposed_full) + BARRIER_BYTES * stage);
    }
}

/* The loading thread's next index, for all producers. Two words in turns: one barrier a work tile is enough. */
DEV uint32_t share_index(uint32_t smem, uint32_t index, int q_use)
{
    const uint32_t word = ADDRESS(smem, next) + q_use % 2 * 4;
    if (threadIdx.x == 0)
        store_shared(word, index);
    named_sync(PRODUCERS_MEET, WARPGROUP_THREADS);
    return load_shared(word);
}

/* The second arrival at the barriers of a work tile's Q: its scales, whatever they are when there is no more work.
 * After the loads, so that theirs and these from global memory are under way together. The scales of use n stay until
 * those of use n + Q_STAGES + 1, for which every consumer has released the Q of use n + 1, and so has stored use n. */
DEV void produce_scales(const fwd_args &a, const work_tile &t, uint32_t smem, int use)
{
    const head_scales s = t.q_first < 0 ? head_scales{0.0f, 0.0f, 0.0f} : find_scales(a, t.batch, t.head / a.group);
    store_shared_float4(ADDRESS(smem, scales) + use % SCALES_SLOTS * (uint32_t)sizeof(tile_scales), s.scale,
                        s.scale_log2, s.out, s.out);
    for (int consumer = 0; consumer < CONSUMERS; consumer++)
        barrier_arrive(ADDRESS(smem, q_full) + BARRIER_BYTES * q_slot(use, consumer));
}

/* Loads in the order of use, from the right to the left, and a tile behind the loads transposes V. */
DEV void produce(const fwd_args &a, const fwd_maps &maps, uint32_t smem)
{
    const tile_panels panels = {QK_PANELS, PANEL_BYTES, PANEL_ELEMS};
    const kv_ring k = {ADDRESS(smem, k), ADDRESS(smem, k_full), ADDRESS(smem, k_empty), panels, TILE_BYTES},
                  v = {ADDRESS(smem, v), ADDRESS(smem, v_full), ADDRESS(smem, v_empty), panels, TILE_BYTES};
    const uint32_t tiles = count_tiles(a);
    const bool loads = threadIdx.x == 0;
    int use = 0, q_use = 0; /* of the K and V rings; of the Q ring */
    int keys_before = 0;    /* of the tile before, which is still to be transposed */
    for (uint32_t index = blockIdx.x; index < tiles;) {
        const work_tile t = tile_at(a, index, ELEM_BYTES);
        const key_source source = key_source_of(t.rows, t.batch, t.head / a.group);
        const visible_tiles key_tiles = find_key_tiles(a, t);
        for (int kv_tile = key_tiles.end - 1; kv_tile >= key_tiles.first; kv_tile--, use++) {
            if (loads) {
                produce_keys(k, &maps.k, source, use, kv_tile);
                if (kv_tile == key_tiles.end - 1)
                    produce_work(t, &maps.q, smem, q_use);
                produce_keys(v, &maps.v, source, use, kv_tile);
                if (kv_tile == key_tiles.end - 1)
                    produce_scales(a, t, smem, q_use);
            }
            __syncwarp();
            if (use > 0)
                transpose_tile(smem, use - 1, keys_before);
            keys_before = a.kv_lens == nullptr ? KV_TILE : t.rows.kv_len - kv_tile * KV_TILE;
        }
        uint32_t next = 0;
        if (loads)
            next = take_next(a, tiles);
        index = share_index(smem, next, q_use++);
    }
    if (use > 0)
        transpose_tile(smem, use - 1, keys_before);
    const work_tile none = {-1, 0, 0, {0, 0, 0, 0}};
    if (loads) {
        produce_work(none, nullptr, smem, q_use);
        produce_scales(a, none, smem, q_use);
    }
}

/* ---- Consumers: a warpgroup each. Arrays are in registers, laid out as device/isa/wgmma_fp8.cuh says. ---- */

typedef float score_tile[KV_TILE / 2];
typedef float output_tile[TRANSPOSED_ROWS / 2]; /* the output's columns, and a row's sum in each of the last eight */
typedef uint32_t probability_tile[KV_TILE / 8];

/* Where a thread is, and what stays the same for it. */
typedef struct consumer {
    uint32_t smem;
    int index;              /* among the consumers */
    int lane, row;          /* the lane's first row within the query tile */
    uint64_t k, transposed; /* descriptors of stage 0 */
    float scale_log2;       /* of raw scores, in the work tile that it is at */
} consumer;

/* The descriptor of the consumer's rows of Q. */
DEV uint64_t query_matrix(const consumer &c, int use)
{
    return matrix_descriptor(query_at(c.smem, c.index, use), 0);
}

/* Starts S = Q * transpose(K) as a group of its own. */
DEV void start_scores(score_tile &s, uint64_t q, uint64_t k)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM / WGMMA_FP8_K; step++) {
        const int panel = step / 4, in_panel = step % 4 * WGMMA_FP8_K;
        wgmma_fp8_ss(s, descriptor_at(q, panel * Q_PANEL_BYTES + in_panel),
                     descriptor_at(k, panel * PANEL_BYTES + in_panel), step != 0);
    }
    wgmma_commit();
}

/* Columns [FIRST, END) of O += P * V for the next WGMMA_FP8_K keys. */
template <int FIRST, int END>
DEV void add_columns(output_tile &o, const uint32_t *p, uint64_t transposed, int accumulate)
{
    if constexpr (END > FIRST)
        wgmma_fp8_rs(*(float(*)[(END - FIRST) / 2])(o + FIRST / 2), p, descriptor_at(transposed, FIRST * ROW_BYTES),
                     accumulate);
}

/* Starts O += P * V, or O = P * V, as a group of its own. */
DEV void start_output(output_tile &o, const probability_tile &p, uint64_t transposed, int accumulate)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_FP8_K; step++) {
        const uint64_t keys = descriptor_at(transposed, step / 4 * TRANSPOSED_PANEL_BYTES + step % 4 * WGMMA_FP8_K);
        const int adds = step != 0 || accumulate;
        add_columns<0, FIRST_COLUMNS>(o, p + 4 * step, keys, adds);
        add_columns<FIRST_COLUMNS, TRANSPOSED_ROWS>(o, p + 4 * step, keys, adds);
    }
    wgmma_commit();
}

/* A lane's probabilities of keys 2j, 2j + 1 of two neighbouring groups of 8 make one register: the order of keys that
 * transpose_block leaves. */
DEV void pack_probabilities(probability_tile &p, const score_tile &s, int first, int end)
{
#pragma unroll
    for (int i = first / 4; i < end / 4; i++) {
        const int group = i / 4 * 4 + i % 4 / 2 * 2, at = 4 * group + 2 * (i % 2);
        p[i] = pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
    }
}

/* Both, of a masked tile: nothing is computed of parts that no row of the warp sees. `seen`: how many keys the lane's
 * second row sees, from its first column on. */
DEV void exponentiate_visible(probability_tile &p, score_tile &s, const lane_rows &r, float scale_log2, int seen)
{
    const int visible = __shfl_sync(~0u, seen, 28); /* the warp's last row, which sees the most, and first column */
#pragma unroll
    for (int first = 0; first < KV_TILE / 2; first += PART_ELEMS)
        if (2 * first < visible) {
            exponentiate(s, r, scale_log2, first, first + PART_ELEMS);
            pack_probabilities(p, s, first, first + PART_ELEMS);
        } else {
#pragma unroll
            for (int i = 0; i < PART_ELEMS / 4; i++)
                p[first / 4 + i] = 0;
        }
}

/* Whether a row of the warp has grown beyond its reference by more than the threshold: any_row_exceeds without the
 * register that holds the threshold in raw scores. A difference of infinities is NaN, which is not more. */
DEV int any_row_exceeds_scaled(const lane_rows &r, const float (&max)[2], float scale_log2)
{
    return __any_sync(~0u,
                      (max[0] - r.max[0]) * scale_log2 > THRESHOLD || (max[1] - r.max[1]) * scale_log2 > THRESHOLD);
}

/* Takes a product's row sums out of the accumulator, which starts them anew. The tensor cores cut each addend at the
 * accumulator's own last bit, so that a long sum of positive numbers would come out several per cent too small. */
DEV void take_sums(output_tile &o, lane_rows &r)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.sum[h] += o[DIM / 2 + 2 * h];
        o[DIM / 2 + 2 * h] = 0.0f;
    }
}

/* Where the thread's vector of totals is. */
DEV uint32_t total_at(const consumer &c, int i)
{
#if PROMOTE_TILES
    const uint32_t thread = threadIdx.x % WARPGROUP_THREADS;
    if (i >= TOTALS_VECTORS - SPARE_VECTORS)
        return ADDRESS(c.smem, transposed) + (c.index + 1) * TRANSPOSED_BYTES - TRANSPOSED_PANEL_BYTES +
               swizzled(thread, 4);
    return ADDRESS(c.smem, totals) + c.index * (uint32_t)sizeof(shared_memory::totals[0]) +
           (i * WARPGROUP_THREADS + thread) * 16;
#else
    return 0;
#endif
}

/* Where the reference of the totals of the lane's row `half` is. */
DEV uint32_t reference_at(const consumer &c, int half)
{
#if PROMOTE_TILES
    return ADDRESS(c.smem, references) +
           (c.index * GROUP_ROWS + threadIdx.x % WARPGROUP_THREADS / WARP_THREADS * 16 + c.lane / 4 + 8 * half) * 4;
#else
    return 0;
#endif
}

DEV float low_of(uint32_t two_bf16)
{
    return __uint_as_float(two_bf16 << 16);
}

DEV float high_of(uint32_t two_bf16)
{
    return __uint_as_float(two_bf16 & 0xffff0000u);
}

/* By what totals are multiplied to be relative to the reference that holds now; of a row that had seen no key that
 * is -inf. */
DEV float totals_factor(const lane_rows &r, const consumer &c, int half)
{
    return exp2_fast(load_shared_float(reference_at(c, half)) * c.scale_log2 - SHIFT - r.offset[half]);
}

/* O += totals. */
DEV void add_totals(output_tile &o, const lane_rows &r, const consumer &c)
{
    const float factor[2] = {totals_factor(r, c, 0), totals_factor(r, c, 1)};
#pragma unroll
    for (int i = 0; i < TOTALS_VECTORS; i++) {
        if constexpr (BF16_TOTALS) {
            const uint4 vector = load_shared_4(total_at(c, i));
            const uint32_t x[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                o[8 * i + 2 * j] = fmaf(low_of(x[j]), factor[j % 2], o[8 * i + 2 * j]);
                o[8 * i + 2 * j + 1] = fmaf(high_of(x[j]), factor[j % 2], o[8 * i + 2 * j + 1]);
            }
        } else {
            const float4 x = load_shared_float4(total_at(c, i));
            o[4 * i] = fmaf(x.x, factor[0], o[4 * i]);
            o[4 * i + 1] = fmaf(x.y, factor[0], o[4 * i + 1]);
            o[4 * i + 2] = fmaf(x.z, factor[1], o[4 * i + 2]);
            o[4 * i + 3] = fmaf(x.w, factor[1], o[4 * i + 3]);
        }
    }
}

/* Accumulator promotion: totals += O. Of O remains what rounding the totals has left, or nothing (holds_product). */
DEV void promote(output_tile &o, const lane_rows &r, const consumer &c, int first)
{
    if (!first)
        add_totals(o, r, c);
#pragma unroll
    for (int i = 0; i < TOTALS_VECTORS; i++) {
        if constexpr (BF16_TOTALS) {
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float *const two = &o[8 * i + 2 * j];
                x[j] = pack<1>(two[0], two[1]);
                two[0] -= low_of(x[j]);
                two[1] -= high_of(x[j]);
            }
            store_shared_4(total_at(c, i), x[0], x[1], x[2], x[3]);
        } else {
            store_shared_float4(total_at(c, i), o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
        }
    }
    __syncwarp(); /* the quad has read its rows' references */
    if (c.lane % 4 == 0) {
        store_shared(reference_at(c, 0), __float_as_uint(r.max[0]));
        store_shared(reference_at(c, 1), __float_as_uint(r.max[1]));
    }
    __syncwarp();
}

/* Of a work tile, after so many products: whether O holds one. What rounding the totals left counts. */
DEV int holds_product(int products)
{
    return PROMOTE_TILES > 0 && !BF16_TOTALS ? products % PROMOTED_TILES != 0 : products != 0;
}

/* One product more. Without promotion it only matters whether there was one, and a counter would cost a register. A
 * count that need not be a power of two goes from PROMOTE_TILES up to twice as many again and again. */
DEV int next_count(int products)
{
    if (PROMOTE_TILES == 0)
        return 1;
    return BF16_TOTALS && products + 1 == 2 * PROMOTE_TILES ? PROMOTE_TILES : products + 1;
}

/* One key tile: S = Q * transpose(K) of it and O += P * V of the one before, then P of this one. `use` is that of the
 * tile before, `products` how many the work tile has had; `key` the tile's first. */
DEV void step(score_tile &s, probability_tile &p, output_tile &o, lane_rows &r, uint64_t q, const consumer &c, int use,
              int products, int masked, const row_keys &seen, int key)
{
    float max[2], factor[2];
    wait_full(ADDRESS(c.smem, k_full), use + 1);
    wait_ping_pong(c.index);
    start_scores(s, q, descriptor_at(c.k, stage_of(use + 1) * TILE_BYTES));
    wait_full(ADDRESS(c.smem, transposed_full), use);
    start_output(o, p, descriptor_at(c.transposed, stage_of(use) * TRANSPOSED_BYTES), holds_product(products));
    pass_ping_pong(c.index); /* at once: waiting for the scores, as fwd_wgmma's two consumers do, loses here */
    WGMMA_WAIT(1);
    release(ADDRESS(c.smem, k_empty), use + 1);
    finish_scores(s, seen, key, masked);
    lane_max<MAX_CHAINS>(max, s);
    const int grown = any_row_exceeds_scaled(r, max, c.scale_log2);
    if (grown)
        raise_references<SHIFT>(r, factor, max, c.scale_log2, __fdividef(THRESHOLD, c.scale_log2));
    if (CONSUMERS == 4) /* computed again, for no register holds them from tile to tile */
#pragma unroll
        for (int h = 0; h < 2; h++)
            r.offset[h] = offset_of<SHIFT>(r.max[h], c.scale_log2);
    if (!masked)
        exponentiate(s, r, c.scale_log2, 0, KV_TILE / 2);
    WGMMA_WAIT(0);
    release(ADDRESS(c.smem, transposed_empty), use);
    if (masked)
        exponentiate_visible(p, s, r, c.scale_log2, seen.end[1] - key);
    else
        pack_probabilities(p, s, 0, KV_TILE / 2);
    if (grown)
        scale_output(o, factor);
    take_sums(o, r);
    if (PROMOTE_TILES > 0 && next_count(products) % PROMOTED_TILES == 0)
        promote(o, r, c, products < PROMOTE_TILES);
}

/* ---- Output ---- */

DEV void store_lse(const fwd_args &a, const work_tile &t, const output_tile &o, const lane_rows &r, const consumer &c,
                   int use)
{
    const float shift_ln = SHIFT * 0.6931471806f, scale = LOAD_SCALE(c.smem, use, score);
    float *const lse = find_lse(a, t.rows, t.batch, t.head);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = t.q_first + c.row + 8 * h;
        if (c.lane % 4 == 0 && row < a.q_len)
            lse[row] = log_sum_exp(r.max[h], r.sum[h], scale) - shift_ln;
    }
}

/* Use number `use` of Q was the work tile's. */
DEV void store_tile(const fwd_args &a, const work_tile &t, const output_tile &o, const lane_rows &r, const consumer &c,
                    int use)
{
    const visible_entry entry = entry_of(a, t);
    if (a.lse != nullptr)
        store_lse(a, t, o, r, c, use);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = t.q_first + c.row + 8 * h;
        const float sum = r.sum[h], factor = inverse_sum(sum) * LOAD_SCALE(c.smem, use, out);
        const row_store to = {(char *)a.o + output_index(a, t.rows, t.batch, t.head, row) * 2, row < a.q_len, a.v_dim,
                              factor};
        const int finite = store_even_odd_row<DIM>(to, o, h, a.out_bf16, c.lane);
        fix_hidden_nan<ACR_E4M3, ACR_BF16_OR_F16>(
            a, entry, {t.batch, t.head, row, 0, 0, LOAD_SCALE(c.smem, use, score_log2), r.offset[h], factor}, sum,
            finite, c.lane);
    }
}

/* The lane's first row within the query tile, from the thread's number read again: four consumers have no register to
 * keep it in from tile to tile. */
DEV int find_row(int index)
{
    return lane_row(index, read_thread());
}

DEV void consume(const fwd_args &a, uint32_t smem, int index)
{
    const int lane = threadIdx.x % WARP_THREADS;
    consumer c = {
        smem, index, lane, 0, matrix_descriptor(ADDRESS(smem, k), 0), matrix_descriptor(ADDRESS(smem, transposed), 0),
        0.0f};
    int use = 0, q_use = 0;
    score_tile s;
    probability_tile probabilities;
    output_tile o;
    lane_rows r;

    open_ping_pong(index);
    work_tile t = wait_work(smem, index, q_use);
    uint64_t q = query_matrix(c, q_use);
    wait_full(ADDRESS(smem, k_full), use);
    start_scores(s, q, c.k);
    do {
        c.row = find_row(index);
        const visible_entry entry = entry_of(a, t);
        const row_keys seen = find_row_keys(entry, t.q_first + c.row, t.q_first + c.row + 8, 2 * (lane % 4));
        const visible_tiles all = find_key_tiles(a, t), /* that the consumers visit together */
            own = visible_tiles_of(visible_to_rows(entry, t.q_first + GROUP_ROWS * index, GROUP_ROWS), KV_TILE);
        int tile = all.end - 1, products = 0;
        float max[2];

        WGMMA_WAIT(0);
        release(ADDRESS(smem, k_empty), use);
        finish_scores(s, seen, tile * KV_TILE, tile >= own.full_end || tile < own.full_first);
        c.scale_log2 = LOAD_SCALE(smem, q_use, score_log2);
        lane_max<MAX_CHAINS>(max, s);
        start_rows<SHIFT>(r, max, c.scale_log2);
        exponentiate_visible(probabilities, s, r, c.scale_log2, seen.end[1] - tile * KV_TILE);
        tile--;
        for (int end = own.full_end;; end = all.first) { /* masked tiles, tiles without a mask, masked tiles again */
#pragma unroll 1
            for (; tile >= end; tile--, products = next_count(products))
                step(s, probabilities, o, r, q, c, use++, products, 1, seen, tile * KV_TILE);
#pragma unroll 1
            for (; tile >= own.full_first; tile--, products = next_count(products))
                step(s, probabilities, o, r, q, c, use++, products, 0, seen, 0);
            if (tile < all.first)
                break;
        }

        /* The last output product of this tile, and under its store the first scores of the next. */
        release_query(smem, index, q_use);
        wait_full(ADDRESS(smem, transposed_full), use);
        wait_ping_pong(c.index);
        start_output(o, probabilities, descriptor_at(c.transposed, stage_of(use) * TRANSPOSED_BYTES),
                     holds_product(products));
        const work_tile next = wait_work(smem, index, ++q_use);
        if (next.q_first >= 0)
            wait_full(ADDRESS(smem, k_full), use + 1);
        q = query_matrix(c, q_use);
        /* behind the last work tile these are scores of stale tiles, which nobody reads */
        start_scores(s, q, descriptor_at(c.k, stage_of(use + 1) * TILE_BYTES));
        pass_ping_pong(c.index);
        WGMMA_WAIT(1);
        release(ADDRESS(smem, transposed_empty), use++);
        r.sum[0] += o[DIM / 2];
        r.sum[1] += o[DIM / 2 + 2];
        if (PROMOTE_TILES > 0 && products >= PROMOTE_TILES)
            add_totals(o, r, c);
        store_tile(a, t, o, r, c, q_use - 1);
        t = next;
    } while (t.q_first >= 0);
    WGMMA_WAIT(0);
    close_ping_pong(index);
}

DEV void init_barriers(uint32_t smem)
{
    const int warps = WARPGROUP_THREADS / WARP_THREADS;
    for (int i = 0; i < Q_SLOTS; i++) {
        barrier_init(ADDRESS(smem, q_full) + BARRIER_BYTES * i, 2); /* Q with its work tile, and the scales */
        barrier_init(ADDRESS(smem, q_empty) + BARRIER_BYTES * i, warps);
    }
    for (int i = 0; i < STAGES; i++) {
        barrier_init(ADDRESS(smem, k_full) + BARRIER_BYTES * i, 1);
        barrier_init(ADDRESS(smem, k_empty) + BARRIER_BYTES * i, warps * CONSUMERS);
        barrier_init(ADDRESS(smem, v_full) + BARRIER_BYTES * i, 1);
        barrier_init(ADDRESS(smem, v_empty) + BARRIER_BYTES * i, warps);
        barrier_init(ADDRESS(smem, transposed_full) + BARRIER_BYTES * i, warps);
        barrier_init(ADDRESS(smem, transposed_empty) + BARRIER_BYTES * i, warps * CONSUMERS);
    }
    barrier_init_done();
}

/* The rows of ones behind every stage's transposed V, once. */
DEV void write_ones(uint32_t smem)
{
    const uint32_t ones = 0x38383838; /* 1.0 in e4m3 */
    const int chunks = ONES_ROWS * ROW_BYTES / 16, panels = STAGES * TRANSPOSED_BYTES / TRANSPOSED_PANEL_BYTES;
    for (int i = threadIdx.x; i < chunks * panels; i += THREADS)
        store_shared_4(ADDRESS(smem, transposed) + i / chunks * TRANSPOSED_PANEL_BYTES + DIM * ROW_BYTES +
                           i % chunks * 16,
                       ones, ones, ones, ones);
    shared_stores_visible();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_maps maps)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t smem = smem_address(memory);
    const int group = read_warpgroup();
    if (threadIdx.x == 0) {
        prefetch_inputs(maps);
        init_barriers(smem);
    }
    write_ones(smem);
    __syncthreads();
    wait_for_previous_kernel();
    allow_next_kernel();
    if (group == 0) {
        REGISTERS_GIVE(PRODUCER_REGISTERS);
        produce(a, maps, smem);
    } else {
        REGISTERS_TAKE(CONSUMER_REGISTERS);
        consume(a, smem, group - 1);
    }
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {.work = ACR__WORK_QUEUE,
                                   .q_tile = Q_TILE,
                                   .threads = THREADS,
                                   .smem_bytes = sizeof(shared_memory),
                                   .no_windows = !WINDOWS};

#include "cuda/model/tile_kernel.h"

/* The tensor cores' own sums are as good as float32's up to about so many keys (README.md). */
enum {
    UNPROMOTED_KEYS_MAX = 1024,
    /* The rates below are for what rates.def lacks: d128_128x192_u, whose times at 4096 keys they meet within 3 %, and
     * candidates of a search. Above 128 dims start and end of a CTA grow as fwd_wgmma's. */
    IS_NARROW = DIM <= 128
};

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    if (PROMOTE_TILES == 0 && problem->kv_len > UNPROMOTED_KEYS_MAX)
        return "kv_len is above 1024, beyond which this kernel's sums would lose accuracy";
    return tile_why_not(problem, device);
}

static double cost(const acr_problem *problem, const acr__device *device)
{
    const acr__fwd_rates rates = {
        .mma_flop_per_cycle = IS_NARROW ? 5200.0 : 3600.0, /* of 8192 */
        .exp_per_cycle = 14.0,
        .step_cycles = 600.0 + (IS_NARROW ? 128 : DIM) / 32.0 * KV_TILE, /* of one warpgroup alone */
        .cta_cycles = IS_NARROW ? 6200.0 : 5250.0 + 15.0 * DIM,
        .ctas_per_sm = 1,
    };
    return tile_seconds(problem, device, rates);
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("fwd_fp8", 90, 90),
    .dtype = ACR_E4M3,
    .why_not = why_not,
    .workspace = tile_workspace,
    .cost = cost,
    .shape = tile_shape,
    .boxes = {.q_rows = GROUP_ROWS, .k_rows = KV_TILE, .v_rows = KV_TILE},
};

#endif
