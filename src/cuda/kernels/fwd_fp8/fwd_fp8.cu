/* Forward attention on e4m3 queries, keys and values, sm_90a: fwd_wgmma's shape (a queue of query tiles, warpgroups in
 * turns) with what 8 bits need besides.
 *
 * - V is transposed on the way: 8-bit products want both operands K-major, so the producer warpgroup turns each tile
 *   of V into one of dims by keys in shared memory. It moves pairs of bytes, which leaves the keys in the order in
 *   which a lane's packed probabilities are, and the dims with the even ones of each 16 first, which the store undoes.
 * - Probabilities are scaled by 2^5 before rounding: e4m3 has 448 above 1 and little below, and what 2^5 leaves of the
 *   448 is how far the subtracted maximum may lag behind the true one.
 * - Row sums are those of the rounded probabilities: eight columns of ones behind V make the tensor cores add them up.
 * - Two-level accumulation: the tensor cores keep about 14 bits of a running sum, so after every FOLD_TILES key tiles
 *   it is added to float32 totals in shared memory (a thread's own places, no conflicts) and starts anew.
 *
 * After Shah et al. 2024 (V transposed in the producer, scaled probabilities). See README.md.
 *
 * Parameters: DIM (64, 128, 192 or 256: head dims up to it, zero-padded), Q_TILE, KV_TILE, STAGES; optional FOLD_TILES
 * (default 8, 0 = never), Q_STAGES (default 1).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES FOLD_TILES=8 Q_STAGES=1 */
#include "fwd_args.h"

#ifndef FOLD_TILES
#define FOLD_TILES 8
#endif
#ifndef Q_STAGES
#define Q_STAGES 1
#endif

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
    TURNED_ROWS = DIM + ONES_ROWS,
    /* A product is at most 256 columns wide: if there are more, the first ones are in a product of their own. */
    FIRST_COLUMNS = TURNED_ROWS <= 256 ? 0 : 128,
    TURNED_PANEL_BYTES = TURNED_ROWS * ROW_BYTES,
    TURNED_BYTES = (KV_TILE + PANEL_KEYS - 1) / PANEL_KEYS * TURNED_PANEL_BYTES, /* of V as it is used */
    /* A thread's totals, in vectors of 4 floats: its part of the output; its two rows' maximum and sum. */
    OUTPUT_VECTORS = DIM / 8,
    TOTALS_BYTES = FOLD_TILES > 0 ? 128 * (OUTPUT_VECTORS + 1) * 16 : 0, /* of a consumer */
    PLACE_BYTES = 16,
    SCALES_SLOTS = Q_STAGES + 1, /* one more: see produce_scales */
    SCALES_BYTES = 16,
    /* Shared memory: the tiles, totals, where each slot of Q is in the problem, the places' scales, the producer's next
     * index, barriers. */
    K_AT = Q_SLOTS * Q_GROUP_BYTES,
    V_AT = K_AT + STAGES * TILE_BYTES,
    TURNED_AT = V_AT + STAGES * TILE_BYTES,
    TOTALS_AT = TURNED_AT + STAGES * TURNED_BYTES,
    PLACES_AT = TOTALS_AT + CONSUMERS * TOTALS_BYTES,
    SCALES_AT = PLACES_AT + Q_SLOTS * PLACE_BYTES,
    NEXT_AT = SCALES_AT + SCALES_SLOTS * SCALES_BYTES,
    Q_FULL_AT = NEXT_AT + 8,
    Q_EMPTY_AT = Q_FULL_AT + Q_SLOTS * 8,
    K_FULL_AT = Q_EMPTY_AT + Q_SLOTS * 8,
    K_EMPTY_AT = K_FULL_AT + STAGES * 8,
    V_FULL_AT = K_EMPTY_AT + STAGES * 8,
    V_EMPTY_AT = V_FULL_AT + STAGES * 8,
    TURNED_FULL_AT = V_EMPTY_AT + STAGES * 8,
    TURNED_EMPTY_AT = TURNED_FULL_AT + STAGES * 8,
    SMEM_BYTES = TURNED_EMPTY_AT + STAGES * 8
};

#ifdef __CUDACC__

#define PACKED 0 /* places.cuh asks: no packed batches here */
#include "cuda/device/isa/element.cuh"
#include "cuda/device/isa/fragment.cuh"
#include "cuda/device/attention/pipeline.cuh"
#include "cuda/device/attention/scales.cuh"
#include "cuda/device/attention/scores.cuh"
#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/isa/wgmma_fp8.cuh"

enum {
    PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32,
    CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : CONSUMERS == 3 ? 160 : 112,
    PART_ELEMS = WGMMA_FP8_K / 2,           /* of a lane's scores: the keys of one step of the output's product */
    MAX_CHAINS = CONSUMERS == 2 ? 2 : 1,    /* of dependent comparisons, for a row's maximum: two need registers */
    PRODUCERS_MEET = FIRST_TURN + CONSUMERS /* a named barrier, behind those of the turns */
};

/* Probabilities reach 2^SHIFT, and with the slack, by which the subtracted maximum may be too small, less than 448. */
static constexpr float SHIFT = 5.0f, SLACK = 8.75f - SHIFT;

static_assert(DIM % 64 == 0 && DIM <= 256, "DIM: 64, 128, 192 or 256");
static_assert(KV_TILE % WGMMA_FP8_K == 0, "KV_TILE: a multiple of 32");
static_assert(Q_TILE % GROUP_ROWS == 0 && CONSUMERS >= 2 && CONSUMERS <= 4, "Q_TILE: 128, 192 or 256");
static_assert(STAGES >= 2, "STAGES: the next tiles arrive while these are in use");
static_assert((FOLD_TILES & (FOLD_TILES - 1)) == 0, "FOLD_TILES: a power of two, or 0");
static_assert(SMEM_BYTES <= 232448, "tiles and stages: 227 KB, a CTA's limit on sm_90");

/* ---- Producers: a warpgroup; its first thread loads, all of it transposes ---- */

/* Of a place, for all consumers: floats in this order. */
enum {
    SCORE_SCALE,
    SCORE_SCALE_LOG2,
    OUT_SCALE
};

DEV uint32_t scales_at(uint32_t smem, int use)
{
    return smem + SCALES_AT + use % SCALES_SLOTS * SCALES_BYTES;
}

DEV float load_scale(uint32_t smem, int use, int which)
{
    float scale;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(scales_at(smem, use) + 4 * which) : "memory");
    return scale;
}

DEV uint32_t swizzled(uint32_t row, uint32_t chunk)
{
    return row * ROW_BYTES + ((chunk ^ row % 8) << 4);
}

/* 16 dims of 32 keys: tiles of 8 keys by 16 bytes are read transposed by pairs of bytes, then the even and the odd
 * dims of the pairs are taken apart. */
DEV void turn_block(uint32_t v, uint32_t turned, int dim_chunk, int key_block, int lane)
{
    uint32_t x[4];
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
        : "r"(v + dim_chunk / 8 * PANEL_BYTES + swizzled((uint32_t)(key_block * 32 + lane), (uint32_t)(dim_chunk % 8)))
        : "memory");
    const uint32_t even_0 = __byte_perm(x[0], x[1], 0x6420), even_1 = __byte_perm(x[2], x[3], 0x6420),
                   odd_0 = __byte_perm(x[0], x[1], 0x7531), odd_1 = __byte_perm(x[2], x[3], 0x7531);
    const int matrix = lane / 8; /* even dims of keys 0..15 and 16..31, then odd ones */
    const uint32_t row = (uint32_t)(dim_chunk * 16 + matrix / 2 * 8 + lane % 8),
                   chunk = (uint32_t)(key_block % 4 * 2 + matrix % 2);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     turned + key_block / 4 * TURNED_PANEL_BYTES + swizzled(row, chunk)),
                 "r"(even_0), "r"(even_1), "r"(odd_0), "r"(odd_1)
                 : "memory");
}

/* Rows of V beyond a batch entry's key length may hold anything, and NaN times a probability of zero is NaN. */
DEV void clear_rows(uint32_t v, int first)
{
    const int thread = threadIdx.x;
    for (int panel = 0; panel < QK_PANELS; panel++)
        for (int i = thread + max(first, 0) * 8; i < KV_TILE * 8; i += WARPGROUP_THREADS)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v + panel * PANEL_BYTES + i * 16), "r"(0)
                         : "memory");
    shared_stores_visible(); /* the copy engine writes here next */
    named_sync(PRODUCERS_MEET, WARPGROUP_THREADS);
}

/* Use number `use` of V, of which `keys` keys exist, becomes the same use of the transposed V. */
DEV void turn_tile(uint32_t smem, int use, int keys)
{
    const int warp = threadIdx.x / WARP_THREADS, lane = threadIdx.x % WARP_THREADS, stage = stage_of(use);
    const uint32_t v = smem + V_AT + stage * TILE_BYTES, turned = smem + TURNED_AT + stage * TURNED_BYTES;
    barrier_wait(smem + V_FULL_AT + BARRIER_BYTES * stage, parity_of(use));
    if (keys < KV_TILE)
        clear_rows(v, keys);
    barrier_wait(smem + TURNED_EMPTY_AT + BARRIER_BYTES * stage, parity_of(use) ^ 1);
#pragma unroll
    for (int dims = 0; dims < DIM / 64; dims++)
#pragma unroll
        for (int key_block = 0; key_block < KV_TILE / 32; key_block++)
            turn_block(v, turned, dims * 4 + warp, key_block, lane);
    shared_stores_visible();
    __syncwarp();
    if (lane == 0) {
        barrier_arrive(smem + V_EMPTY_AT + BARRIER_BYTES * stage);
        barrier_arrive(smem + TURNED_FULL_AT + BARRIER_BYTES * stage);
    }
}

/* The loading thread's next index, for all producers. Two words in turns: one meeting a place is enough. */
DEV uint32_t share_index(uint32_t smem, uint32_t index, int q_use)
{
    const uint32_t word = smem + NEXT_AT + q_use % 2 * 4;
    if (threadIdx.x == 0)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(word), "r"(index) : "memory");
    named_sync(PRODUCERS_MEET, WARPGROUP_THREADS);
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(index) : "r"(word) : "memory");
    return index;
}

/* The second arrival at the barriers of a place's Q: its scales, of no matter what when there is none. Behind the
 * loads, so that theirs and these from global memory are under way together. The scales of use n stay until those of
 * use n + Q_STAGES + 1, for which every consumer has released the Q of use n + 1, and so has stored use n. */
DEV void produce_scales(const fwd_args &a, const place &p, uint32_t smem, int use)
{
    const head_scales s = p.q_first < 0 ? head_scales{0.0f, 0.0f, 0.0f} : find_scales(a, p.batch, p.head / a.group);
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %3};" ::"r"(scales_at(smem, use)), "f"(s.scale),
                 "f"(s.scale_log2), "f"(s.out)
                 : "memory");
    for (int consumer = 0; consumer < CONSUMERS; consumer++)
        barrier_arrive(smem + Q_FULL_AT + BARRIER_BYTES * q_slot(use, consumer));
}

/* Loads in the order of use, from the right to the left, and a tile behind the loads transposes V. */
DEV void produce(const fwd_args &a, const fwd_maps &maps, uint32_t smem)
{
    const uint32_t places = count_equal_places(a);
    const bool loads = threadIdx.x == 0;
    int use = 0, q_use = 0; /* of the K and V rings; of the Q ring */
    int keys_before = 0;    /* of the tile before, which is still to be transposed */
    for (uint32_t index = blockIdx.x; index < places;) {
        const place p = find_place(a, index);
        const int kv_head = p.head / a.group, kv_tiles = count_kv_tiles(a, p);
        for (int kv_tile = kv_tiles - 1; kv_tile >= 0; kv_tile--, use++) {
            if (loads) {
                produce_keys(smem + K_AT, smem + K_FULL_AT, smem + K_EMPTY_AT, QK_PANELS, PANEL_BYTES, p, &maps.k,
                             kv_head, use, kv_tile);
                if (kv_tile == kv_tiles - 1)
                    produce_place(p, &maps.q, smem, q_use);
                produce_keys(smem + V_AT, smem + V_FULL_AT, smem + V_EMPTY_AT, QK_PANELS, PANEL_BYTES, p, &maps.v,
                             kv_head, use, kv_tile);
                if (kv_tile == kv_tiles - 1)
                    produce_scales(a, p, smem, q_use);
            }
            __syncwarp();
            if (use > 0)
                turn_tile(smem, use - 1, keys_before);
            keys_before = a.kv_lens == nullptr ? KV_TILE : p.rows.kv_len - kv_tile * KV_TILE;
        }
        uint32_t next = 0;
        if (loads)
            next = take_next(a, places);
        index = share_index(smem, next, q_use++);
    }
    if (use > 0)
        turn_tile(smem, use - 1, keys_before);
    const place none = {-1, 0, 0, {0, 0, 0, 0}};
    if (loads) {
        produce_place(none, nullptr, smem, q_use);
        produce_scales(a, none, smem, q_use);
    }
}

/* ---- Consumers: a warpgroup each. Arrays are in registers, laid out as device/isa/wgmma_fp8.cuh says. ---- */

typedef float score_tile[KV_TILE / 2];
typedef float output_tile[TURNED_ROWS / 2]; /* the output's columns, and a row's sum in each of the last eight */
typedef uint32_t probability_tile[KV_TILE / 8];

/* The two rows that a lane holds: l / 4 and l / 4 + 8 of its warp's 16. */
typedef struct softmax_rows {
    float max[2];    /* what is subtracted from the raw scores; the true maximum may be higher by the slack */
    float offset[2]; /* the same, finite, times scale_log2, less the shift */
} softmax_rows;

/* Where a thread is, and what stays the same for it. */
typedef struct consumer {
    uint32_t smem;
    int index;          /* among the consumers */
    int lane, row;      /* the lane's first row within the query tile */
    uint64_t k, turned; /* descriptors of stage 0 */
    float scale_log2;   /* of raw scores, in the place that it is at */
    uint32_t totals;    /* the thread's first vector; the next is a warpgroup's vectors further */
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
template <int FIRST, int END> DEV void add_columns(output_tile &o, const uint32_t *p, uint64_t turned, int accumulate)
{
    if constexpr (END > FIRST)
        wgmma_fp8_rs(*(float(*)[(END - FIRST) / 2])(o + FIRST / 2), p, descriptor_at(turned, FIRST * ROW_BYTES),
                     accumulate);
}

/* Starts O += P * V, or O = P * V, as a group of its own. */
DEV void start_output(output_tile &o, const probability_tile &p, uint64_t turned, int accumulate)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_FP8_K; step++) {
        const uint64_t keys = descriptor_at(turned, step / 4 * TURNED_PANEL_BYTES + step % 4 * WGMMA_FP8_K);
        const int adds = step != 0 || accumulate;
        add_columns<0, FIRST_COLUMNS>(o, p + 4 * step, keys, adds);
        add_columns<FIRST_COLUMNS, TURNED_ROWS>(o, p + 4 * step, keys, adds);
    }
    wgmma_commit();
}

/* Elements [first, end) of the scores become probabilities times 2^SHIFT, relative to the subtracted maximum. */
DEV void exponentiate(score_tile &s, const softmax_rows &r, float scale_log2, int first, int end)
{
#pragma unroll
    for (int i = first; i < end; i++)
        s[i] = exp2_fast(fmaf(s[i], scale_log2, -r.offset[i % 4 / 2]));
}

/* A lane's probabilities of keys 2j, 2j + 1 of two neighbouring groups of 8 make one register: the order of keys that
 * turn_block leaves. */
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
DEV void weigh_visible(probability_tile &p, score_tile &s, const softmax_rows &r, float scale_log2, int seen)
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

/* Over the lane's own columns. */
DEV void find_max(float (&max)[2], const score_tile &s)
{
    float chains[2][MAX_CHAINS];
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; i++) {
        const int nth = i / 4 * 2 + i % 2; /* of the row's */
        float &chain = chains[i % 4 / 2][nth % MAX_CHAINS];
        chain = nth < MAX_CHAINS ? s[i] : fmaxf(chain, s[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
        max[h] = fmaxf(chains[h][0], chains[h][MAX_CHAINS - 1]);
}

DEV float offset_of(float max, float scale_log2)
{
    return finite_max(max) * scale_log2 - SHIFT;
}

DEV void first_max(const score_tile &s, softmax_rows &r, float scale_log2)
{
    find_max(r.max, s);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.max[h] = quad_max(r.max[h]);
        r.offset[h] = offset_of(r.max[h], scale_log2);
    }
}

/* A row's maximum is left alone until it has grown by more than the slack. It depends on no other row. Returns whether
 * some row's was changed, and what has been added up so far is to be multiplied by `factor`. */
DEV int move_max(const score_tile &s, softmax_rows &r, float (&factor)[2], const consumer &c)
{
    float max[2];
    find_max(max, s);
    const int grown = __any_sync(~0u, (max[0] - r.max[0]) * c.scale_log2 > SLACK ||
                                          (max[1] - r.max[1]) * c.scale_log2 > SLACK); /* not (-inf) - (-inf) */
    if (grown) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float row_max = quad_max(max[h]);
            max[h] = (row_max - r.max[h]) * c.scale_log2 > SLACK ? row_max : r.max[h];
            const float offset = offset_of(max[h], c.scale_log2);
            factor[h] = max[h] == r.max[h] ? 1.0f : exp2_fast(r.max[h] * c.scale_log2 - SHIFT - offset);
            r.max[h] = max[h];
            r.offset[h] = offset;
        }
    }
    return grown;
}

DEV float4 load_total(const consumer &c, int i)
{
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(c.totals + i * WARPGROUP_THREADS * 16)
                 : "memory");
    return x;
}

DEV void store_total(const consumer &c, int i, const float *x)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(c.totals + i * WARPGROUP_THREADS * 16), "f"(x[0]),
                 "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

/* O += totals, both relative to the maximum that is subtracted now; of a row that had seen no key that is -inf. */
DEV void add_totals(output_tile &o, const softmax_rows &r, const consumer &c)
{
    const float4 rows = load_total(c, OUTPUT_VECTORS);
    const float factor[2] = {exp2_fast(rows.x * c.scale_log2 - SHIFT - r.offset[0]),
                             exp2_fast(rows.y * c.scale_log2 - SHIFT - r.offset[1])};
    o[DIM / 2] = fmaf(rows.z, factor[0], o[DIM / 2]);
    o[DIM / 2 + 2] = fmaf(rows.w, factor[1], o[DIM / 2 + 2]);
#pragma unroll
    for (int i = 0; i < OUTPUT_VECTORS; i++) {
        const float4 x = load_total(c, i);
        o[4 * i] = fmaf(x.x, factor[0], o[4 * i]);
        o[4 * i + 1] = fmaf(x.y, factor[0], o[4 * i + 1]);
        o[4 * i + 2] = fmaf(x.z, factor[1], o[4 * i + 2]);
        o[4 * i + 3] = fmaf(x.w, factor[1], o[4 * i + 3]);
    }
}

/* Totals += O, after every FOLD_TILES products: the next one starts O anew. */
DEV void fold(output_tile &o, const softmax_rows &r, const consumer &c, int first)
{
    if (!first)
        add_totals(o, r, c);
    const float rows[4] = {r.max[0], r.max[1], o[DIM / 2], o[DIM / 2 + 2]};
    store_total(c, OUTPUT_VECTORS, rows);
#pragma unroll
    for (int i = 0; i < OUTPUT_VECTORS; i++)
        store_total(c, i, &o[4 * i]);
}

/* Whether O holds a product already, after so many of the place. */
DEV int adds_up(int products)
{
#if FOLD_TILES
    return products % FOLD_TILES != 0;
#else
    return products != 0;
#endif
}

/* One product more; without folding it only matters whether there was one, and a counter would cost a register. */
DEV int next_count(int products)
{
    return FOLD_TILES > 0 ? products + 1 : 1;
}

/* One key tile: S = Q * transpose(K) of it and O += P * V of the one before, then P of this one. `use` is that of the
 * tile before, `products` how many the place has had. Of a masked tile the lane's rows see the first `seen_0` and
 * `seen_1` keys, from its first column on. */
DEV void step(score_tile &s, probability_tile &p, output_tile &o, softmax_rows &r, uint64_t q, const consumer &c,
              int use, int products, int masked, int seen_0, int seen_1)
{
    float factor[2];
    wait_full(c.smem + K_FULL_AT, use + 1);
    wait_turn(c.index);
    start_scores(s, q, descriptor_at(c.k, stage_of(use + 1) * TILE_BYTES));
    wait_full(c.smem + TURNED_FULL_AT, use);
    start_output(o, p, descriptor_at(c.turned, stage_of(use) * TURNED_BYTES), adds_up(products));
    pass_turn(c.index); /* at once: waiting for the scores, as fwd_wgmma's two consumers do, loses here */
    WGMMA_WAIT(1);
    release(c.smem + K_EMPTY_AT, use + 1);
    if (masked)
        mask_scores(s, seen_0, seen_1);
    const int grown = move_max(s, r, factor, c);
    if (!masked)
        exponentiate(s, r, c.scale_log2, 0, KV_TILE / 2);
    WGMMA_WAIT(0);
    release(c.smem + TURNED_EMPTY_AT, use);
    if (masked)
        weigh_visible(p, s, r, c.scale_log2, seen_1);
    else
        pack_probabilities(p, s, 0, KV_TILE / 2);
    if (grown)
        scale_output(o, factor);
    if (FOLD_TILES > 0 && !adds_up(products + 1))
        fold(o, r, c, products < FOLD_TILES);
}

/* ---- Output ---- */

/* Stores one row of the lane, 16 bytes at a time: h selects it. Of 16 dims the tile's first group of 8 columns are the
 * even ones, the second the odd ones: lane i of a quad holds dims 4i..4i + 3. Neighbouring lanes exchange halves of
 * two such 16, so that each has 8 dims in a row. Returns whether all values are finite. */
DEV int store_row(const fwd_args &a, const place &p, const output_tile &o, int h, int row, float factor, int lane)
{
    char *to = (char *)a.o + (p.batch * a.o_stride.batch + p.head * a.o_stride.head + row * a.o_stride.row) * 2;
    float probe = 0.0f;
#pragma unroll
    for (int dims = 0; dims < DIM; dims += 32) {
        uint32_t x[2][2]; /* of the first and the second 16 dims */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int even_at = 4 * (dims / 8 + 2 * half) + 2 * h, odd_at = even_at + 4;
            const float d0 = o[even_at] * factor, d1 = o[odd_at] * factor, d2 = o[even_at + 1] * factor,
                        d3 = o[odd_at + 1] * factor;
            probe = fmaf(d0, 0.0f, fmaf(d1, 0.0f, fmaf(d2, 0.0f, fmaf(d3, 0.0f, probe))));
            x[half][0] = pack_output(d0, d1, a.out_bf16);
            x[half][1] = pack_output(d2, d3, a.out_bf16);
        }
        const uint4 none = {0, 0, 0, 0}, values = join_neighbours(x);
        const int column = dims + 16 * (lane % 2) + lane % 4 / 2 * 8;
        if (row < a.q_len && column < a.v_dim) /* factor 0: no key seen, whatever V holds */
            *(uint4 *)(to + column * 2) = factor != 0.0f ? values : none;
    }
    return probe == 0.0f;
}

/* The outputs of one row of the lane that a hidden, not finite value of V spoilt, computed again; see repair.cuh. */
DEV void repair(const fwd_args &a, const place &p, int row, int keys_end, float scale_log2, float offset, float factor,
                int lane)
{
    const int kv_head = p.head / a.group;
    const int64_t q = p.batch * a.q_stride.batch + p.head * a.q_stride.head + row * a.q_stride.row;
    const int64_t k = p.batch * a.k_stride.batch + kv_head * a.k_stride.head,
                  v = p.batch * a.v_stride.batch + kv_head * a.v_stride.head;
    const int64_t o = p.batch * a.o_stride.batch + p.head * a.o_stride.head + row * a.o_stride.row;
    for (int column = lane % 4; column < a.v_dim; column += 4) {
        const float stored =
            a.out_bf16 ? load_element<ACR_BF16>(a.o, o + column) : load_element<ACR_F16>(a.o, o + column);
        int key = keys_end;
        if (!isfinite(stored))
            for (key = 0; key < keys_end && isfinite(load_element<ACR_E4M3>(a.v, v + key * a.v_stride.row + column));)
                key++;
        if (key < keys_end || keys_end == 0 ||
            isfinite(stored)) /* the row sees such a value itself, or nothing is wrong */
            continue;
        float output = 0.0f;
        for (key = 0; key < keys_end; key++) {
            float score = 0.0f;
            for (int d = 0; d < a.qk_dim; d++)
                score += load_element<ACR_E4M3>(a.q, q + d) * load_element<ACR_E4M3>(a.k, k + key * a.k_stride.row + d);
            output += exp2_fast(fmaf(score, scale_log2, -offset)) *
                      load_element<ACR_E4M3>(a.v, v + key * a.v_stride.row + column);
        }
        if (a.out_bf16)
            store_element<ACR_BF16>(a.o, o + column, output * factor);
        else
            store_element<ACR_F16>(a.o, o + column, output * factor);
    }
}

DEV void store_lse(const fwd_args &a, const place &p, const output_tile &o, const softmax_rows &r, const consumer &c,
                   int use)
{
    const float shift_ln = SHIFT * 0.6931471806f, scale = load_scale(c.smem, use, SCORE_SCALE);
    float *const lse = a.lse + ((int64_t)p.batch * a.q_heads + p.head) * a.q_len;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = p.q_first + c.row + 8 * h;
        if (c.lane % 4 == 0 && row < a.q_len)
            lse[row] = log_sum_exp(r.max[h], o[DIM / 2 + 2 * h], scale) - shift_ln;
    }
}

/* Use number `use` of Q was the place's. Scales are loaded where they are used: four consumers have no register to
 * spare. */
DEV void store_tile(const fwd_args &a, const place &p, const keys &k, const output_tile &o, const softmax_rows &r,
                    const consumer &c, int use)
{
    if (a.lse != nullptr)
        store_lse(a, p, o, r, c, use);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = p.q_first + c.row + 8 * h;
        const float sum = o[DIM / 2 + 2 * h], factor = inverse_sum(sum) * load_scale(c.smem, use, OUT_SCALE);
        const int finite = store_row(a, p, o, h, row, factor, c.lane);
        if (a.mask != FWD_MASK_NONE && __any_sync(~0u, !finite)) {
            __threadfence();
            __syncwarp(); /* the values are other lanes' */
            if (row < a.q_len && isfinite(sum))
                repair(a, p, row, keys_seen(a, k, row), load_scale(c.smem, use, SCORE_SCALE_LOG2), r.offset[h], factor,
                       c.lane);
        }
    }
}

/* The lane's first row within the query tile, from the thread's number read again: four consumers have no register to
 * keep it in from place to place. */
DEV int find_row(int index)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return GROUP_ROWS * index + 16 * (thread % WARPGROUP_THREADS / WARP_THREADS) + thread % WARP_THREADS / 4;
}

DEV void consume(const fwd_args &a, uint32_t smem, int index)
{
    const int lane = threadIdx.x % WARP_THREADS;
    consumer c = {smem,
                  index,
                  lane,
                  0,
                  matrix_descriptor(smem + K_AT, 0),
                  matrix_descriptor(smem + TURNED_AT, 0),
                  0.0f,
                  smem + TOTALS_AT + index * TOTALS_BYTES + threadIdx.x % WARPGROUP_THREADS * 16};
    int use = 0, q_use = 0;
    score_tile s;
    probability_tile probabilities;
    output_tile o;
    softmax_rows r;

    open_turns(index);
    place p = wait_place(smem, index, q_use);
    uint64_t q = query_matrix(c, q_use);
    wait_full(smem + K_FULL_AT, use);
    start_scores(s, q, c.k);
    do {
        c.row = find_row(index);
        const keys k = place_keys(a, p, GROUP_ROWS * index, GROUP_ROWS);
        const int first_column = 2 * (lane % 4);
        const int seen_0 = keys_seen(a, k, p.q_first + c.row) - first_column,
                  seen_1 = keys_seen(a, k, p.q_first + c.row + 8) - first_column;
        const int unmasked = k.full_end / KV_TILE; /* key tiles that every row sees whole */
        int tile = count_kv_tiles(a, p) - 1, products = 0;

        WGMMA_WAIT(0);
        release(smem + K_EMPTY_AT, use);
        if (tile >= unmasked)
            mask_scores(s, seen_0 - tile * KV_TILE, seen_1 - tile * KV_TILE);
        c.scale_log2 = load_scale(smem, q_use, SCORE_SCALE_LOG2);
        first_max(s, r, c.scale_log2);
        weigh_visible(probabilities, s, r, c.scale_log2, seen_1 - tile * KV_TILE);
#pragma unroll 1
        for (tile--; tile >= unmasked; tile--, products = next_count(products))
            step(s, probabilities, o, r, q, c, use++, products, 1, seen_0 - tile * KV_TILE, seen_1 - tile * KV_TILE);
#pragma unroll 1
        for (; tile >= 0; tile--, products = next_count(products))
            step(s, probabilities, o, r, q, c, use++, products, 0, 0, 0);

        /* The last output product of this place, and under its store the first scores of the next. */
        release_query(smem, index, q_use);
        wait_full(smem + TURNED_FULL_AT, use);
        wait_turn(c.index);
        start_output(o, probabilities, descriptor_at(c.turned, stage_of(use) * TURNED_BYTES), adds_up(products));
        const place next = wait_place(smem, index, ++q_use);
        if (next.q_first >= 0)
            wait_full(smem + K_FULL_AT, use + 1);
        q = query_matrix(c, q_use);
        start_scores(s, q, descriptor_at(c.k, stage_of(use + 1) * TILE_BYTES)); /* after the last place of stale tiles:
                                                                                   never looked at */
        pass_turn(c.index);
        WGMMA_WAIT(1);
        release(smem + TURNED_EMPTY_AT, use++);
        if (FOLD_TILES > 0 && products >= FOLD_TILES)
            add_totals(o, r, c);
        store_tile(a, p, k, o, r, c, q_use - 1);
        p = next;
    } while (p.q_first >= 0);
    WGMMA_WAIT(0);
    close_turns(index);
}

DEV void init_barriers(uint32_t smem)
{
    const int warps = WARPGROUP_THREADS / WARP_THREADS;
    for (int i = 0; i < Q_SLOTS; i++) {
        barrier_init(smem + Q_FULL_AT + BARRIER_BYTES * i, 2); /* Q with its place, and the scales */
        barrier_init(smem + Q_EMPTY_AT + BARRIER_BYTES * i, warps);
    }
    for (int i = 0; i < STAGES; i++) {
        barrier_init(smem + K_FULL_AT + BARRIER_BYTES * i, 1);
        barrier_init(smem + K_EMPTY_AT + BARRIER_BYTES * i, warps * CONSUMERS);
        barrier_init(smem + V_FULL_AT + BARRIER_BYTES * i, 1);
        barrier_init(smem + V_EMPTY_AT + BARRIER_BYTES * i, warps);
        barrier_init(smem + TURNED_FULL_AT + BARRIER_BYTES * i, warps);
        barrier_init(smem + TURNED_EMPTY_AT + BARRIER_BYTES * i, warps * CONSUMERS);
    }
    barrier_init_done();
}

/* The rows of ones behind every stage's transposed V, once. */
DEV void write_ones(uint32_t smem)
{
    const uint32_t ones = 0x38383838; /* 1.0 in e4m3 */
    const int chunks = ONES_ROWS * ROW_BYTES / 16, panels = STAGES * TURNED_BYTES / TURNED_PANEL_BYTES;
    for (int i = threadIdx.x; i < chunks * panels; i += THREADS)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                         smem + TURNED_AT + i / chunks * TURNED_PANEL_BYTES + DIM * ROW_BYTES + i % chunks * 16),
                     "r"(ones)
                     : "memory");
    shared_stores_visible();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_maps maps)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t smem = smem_address(memory);
    const int group =
        __shfl_sync(~0u, threadIdx.x / WARPGROUP_THREADS, 0); /* the same in all lanes, for the compiler too */
    if (threadIdx.x == 0) {
        prefetch_map(&maps.q);
        prefetch_map(&maps.k);
        prefetch_map(&maps.v);
        init_barriers(smem);
    }
    write_ones(smem);
    __syncthreads();
    wait_for_previous_kernel();
    allow_next_kernel();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)PRODUCER_REGISTERS));
        produce(a, maps, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)CONSUMER_REGISTERS));
        consume(a, smem, group - 1);
    }
}

#else

#include "cuda/model/fwd_model.h"

/* The tensor cores' own sums are as good as float32's up to about so many keys (README.md). */
enum {
    UNFOLDED_KEYS_MAX = 4096,
    /* The rates below are for what rates.def lacks: d128_128x192_u, whose times at 4096 keys they meet within 3 %, and
     * candidates of a search. Above 128 dims start and end of a CTA grow as fwd_wgmma's. */
    IS_NARROW = DIM <= 128
};

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    const char *reason = acr__fwd_size_why_not(problem, DIM, DIM);
    if (reason == NULL)
        reason = acr__boxes_why_not(problem, &KERNEL_DESCRIPTION.boxes);
    if (reason == NULL)
        reason = acr__queue_why_not(problem, Q_TILE);
    if (reason == NULL && FOLD_TILES == 0 && problem->kv_len > UNFOLDED_KEYS_MAX)
        reason = "kv_len is above 4096, beyond which this kernel's sums would lose accuracy";
    return reason != NULL ? reason : acr__smem_why_not(SMEM_BYTES, device);
}

static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    return acr__queue_workspace(problem, device, Q_TILE);
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    *launch = acr__queue_launch(problem, device, Q_TILE, THREADS, SMEM_BYTES);
}

static double cost(const acr_problem *problem, const acr__device *device)
{
    const acr_problem padded = acr__padded(problem, DIM, DIM);
    const acr__fwd_rates rates = {
        .kernel = KERNEL_TEXT,
        .q_tile = Q_TILE,
        .kv_tile = KV_TILE,
        .mma_flop_per_cycle = IS_NARROW ? 5200.0 : 3600.0, /* of 8192 */
        .exp_per_cycle = 14.0,
        .step_cycles = 600.0 + (IS_NARROW ? 128 : DIM) / 32.0 * KV_TILE, /* of one warpgroup alone */
        .cta_cycles = IS_NARROW ? 6200.0 : 5250.0 + 15.0 * DIM,
        .ctas_per_sm = 1,
    };
    return acr__fwd_seconds(&padded, device, &rates);
}

const acr__kernel KERNEL_DESCRIPTION = {
    .name = KERNEL_TEXT,
    .family = "fwd_fp8",
    .backend = ACR__CUDA,
    .dtype = ACR_E4M3,
    .qk_dim_max = DIM,
    .v_dim_max = DIM,
    .q_tile = Q_TILE,
    .kv_tile = KV_TILE,
    .stages = STAGES,
    .why_not = why_not,
    .workspace = workspace,
    .cost = cost,
    .symbol = KERNEL_TEXT,
    .image = KERNEL_IMAGE,
    .image_end = KERNEL_IMAGE_END,
    .arch_min = 90,
    .arch_max = 90,
    .shape = shape,
    .boxes = {.q_rows = GROUP_ROWS, .k_rows = KV_TILE, .v_rows = KV_TILE},
};

#endif
