/* Forward attention with the keys split over CTAs, fp16 and bf16, sm_80 and newer: for decoding, and for every problem
 * with too few query rows to fill the GPU. Bound by the bytes of K and V.
 *
 * The rows of a tile are the query heads of one key head times their query positions, so that K and V are read once for
 * a whole group of heads. The keys of a tile are split over CTAs, and within a CTA over KV_GROUPS groups of warps, each
 * of which takes every KV_GROUPS-th tile of keys through a ring of STAGES of its own in shared memory (cp.async); a
 * group of one warp waits for nobody until the end. Then the groups' results are added, and, where a tile has several
 * CTAs, left in the workspace; the last CTA to arrive adds them, always in the same order. After Dao et al. 2023 (split
 * keys). See README.md.
 *
 * Parameters: DIM (64, 128, 192 or 256; smaller head dims are zero-padded), Q_TILE (rows: 16 a warp of a group),
 * KV_TILE (keys a group takes in a step), STAGES, KV_GROUPS; optional BF16=1, TERMS (FWD_TERM_* of fwd_args.h: the
 * features beyond scale, mask and window), PAGED=1 (caches: keys in pages, packed queries; fwd_paging.h) and, beside
 * it, KV_E4M3=1 (keys and values of e4m3, in pages or not). Beside KV_E4M3 and BF16: PRODUCTS_F16=1 (the products are
 * of fp16, which holds e4m3, and queries by a power of two a row). Beside PAGED: RUNS=1 (keys that follow each other in
 * a page are loaded by one address). CTAS (of an SM, default 1: as many as have enough registers).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES KV_GROUPS BF16=0 TERMS=0 PAGED=0 KV_E4M3=0 PRODUCTS_F16=0 RUNS=0 CTAS=1 */
#include "cuda/device/attention/parameters.h"

#include "fwd_args.h"

#ifndef KV_E4M3
#define KV_E4M3 0
#endif
#ifndef PRODUCTS_F16
#define PRODUCTS_F16 0
#endif
#ifndef RUNS
#define RUNS 0
#endif
#ifndef CTAS
#define CTAS 1
#endif

enum {
    ELEM_BYTES = 2,
    KV_BYTES = KV_E4M3 ? 1 : ELEM_BYTES, /* of an element of K and V */
    WARP_ROWS = 16,
    ROW_WARPS = Q_TILE / WARP_ROWS, /* warps of a group */
    GROUP_THREADS = 32 * ROW_WARPS,
    WARPS = ROW_WARPS * KV_GROUPS,
    THREADS = 32 * WARPS,
    STEP_KEYS = KV_TILE * KV_GROUPS, /* keys that the CTA takes in a step */
    Q_IN_REGISTERS = DIM <= 192      /* queries pass through the last stage of V; else they stay behind the ring */
};

typedef struct kv_stage {
    unsigned char k[KV_TILE * DIM * KV_BYTES], v[KV_TILE * DIM * KV_BYTES];
} kv_stage;

typedef unsigned char query_tile[Q_TILE * DIM * ELEM_BYTES];

/* A row of a partial result. */
typedef struct partial_row {
    float o[DIM];
    float reference, sum;
    float padding[6]; /* spreads rows over banks */
} partial_row;

typedef union group_memory {
    struct {
        kv_stage ring[STAGES];
#if DIM > 192
        query_tile q;
#endif
    };
    partial_row partial[Q_TILE]; /* in the end */
} group_memory;

enum {
    SMEM_BYTES = KV_GROUPS * (int)sizeof(group_memory),
    ROWS_MAX = SMEM_BYTES / (int)sizeof(partial_row) /* of partial results that shared memory holds */
};

typedef union shared_memory {
    group_memory groups[KV_GROUPS];
    partial_row gathered[ROWS_MAX]; /* of the tile's CTAs */
} shared_memory;

enum {
    SPLITS_MAX = ROWS_MAX < 128 ? ROWS_MAX : 128, /* CTAs of a tile: a row of all of them must fit there */
    FIXED_KEYS = 1024, /* of a CTA of ACR_INVARIANT: its keys begin at a multiple, whatever the lengths and the batch */
    COUNTERS_MAX = 4096
};

/* The workspace: of each tile, how many CTAs have arrived; then the partial results of all CTAs, row by row. The
 * counters' size is the same in every variant, so that variants may follow each other in one workspace. */
typedef struct workspace_layout {
    uint32_t counters[COUNTERS_MAX];
    partial_row partial[];
} workspace_layout;

#ifdef __CUDACC__

#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/isa/copy.cuh"
#include "cuda/device/isa/element.cuh"
#include "cuda/device/isa/mma.cuh"

enum {
    IS_BF16 = BF16 /* of queries and output */
};
#if PRODUCTS_F16 /* from here on: of operands */
#undef BF16
#define BF16 0
#endif

enum {
    ELEMENT = IS_BF16 ? ACR_BF16 : ACR_F16,
    KV_TYPE = KV_E4M3 ? ACR_E4M3 : ELEMENT,
    OPERANDS = BF16 ? MMA_BF16 : MMA_F16,
    ROW_CHUNKS = DIM / CHUNK_ELEMS,
    KV_ROW_CHUNKS = DIM * KV_BYTES / CHUNK_BYTES,
    M_TILES = 1,
    K_STEPS = DIM / 16,                            /* of a score product */
    STEPS_UNROLLED = Q_IN_REGISTERS ? K_STEPS : 4, /* register arrays need all; 4 are one period of the swizzle */
    CHAINS = KV_TILE == 16 ? 2 : 1,     /* sums that a score is made of: few accumulators would wait for each other */
    KEY_TILES = KV_TILE / 8,            /* 8-key accumulators of a score row */
    KEY_STEPS = KV_TILE / 16,           /* of an output product */
    DIM_TILES = DIM / 8,                /* 8-column accumulators of an output row */
    LANE_COLUMNS = DIM / 32,            /* of a finished row */
    ROWS_AT_ONCE = Q_TILE == 16 ? 1 : 2 /* that a warp adds up: two hide each other's latencies */
};

static_assert(DIM % 64 == 0 && DIM <= 256, "DIM: a multiple of 64 up to 256");
static_assert(Q_TILE % WARP_ROWS == 0 && KV_TILE % 16 == 0, "Q_TILE and KV_TILE: multiples of 16");
static_assert(!Q_IN_REGISTERS || Q_TILE * ELEM_BYTES <= KV_TILE * KV_BYTES,
              "Q_TILE: the queries pass through the last stage of V");
static_assert(STAGES >= 2, "STAGES: one tile is computed on while the next is on its way");
static_assert(KV_TILE % (GROUP_THREADS / 8) == 0, "KV_TILE: rows divide evenly over a group's threads");
static_assert(Q_TILE * sizeof(partial_row) <=
                  sizeof(((group_memory *)0)->ring) + (Q_IN_REGISTERS ? 0 : sizeof(query_tile)),
              "a group's partial result fits into its ring");
static_assert(KV_GROUPS <= 15 || ROW_WARPS == 1, "KV_GROUPS: a named barrier each");

#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/head_group.cuh"
#include "cuda/device/attention/kv_loader.cuh"
#include "cuda/device/attention/warp_tile_16.cuh"
#if PAGED
#include "cuda/device/attention/pages.cuh"
#include "cuda/device/attention/warp_tile_kv8.cuh"
#endif
#include "cuda/device/attention/paging_argument.cuh"

static_assert(!KV_E4M3 || (PAGED && Q_IN_REGISTERS && !TERMS), "KV_E4M3: beside PAGED, up to 192 dims, without TERMS");
static_assert(!PRODUCTS_F16 || (KV_E4M3 && IS_BF16), "PRODUCTS_F16: beside KV_E4M3 and BF16");
static_assert(!RUNS || PAGED, "RUNS: beside PAGED");

/* ---- Where a CTA is, and which keys are its own ---- */

/* The grid is {splits, row tiles of all key heads, batch}. */
DEV group_tile find_tile(const fwd_args &a)
{
    const int head_rows = a.group * a.q_len, tiles = (head_rows + Q_TILE - 1) / Q_TILE;
    group_tile t;
    t.kv_head = tiles == 1 ? blockIdx.y : divide_rows(blockIdx.y, tiles);
    t.row_first = ((int)blockIdx.y - t.kv_head * tiles) * Q_TILE;
    t.rows = min((int)Q_TILE, head_rows - t.row_first);
    t.batch = blockIdx.z;
#if PAGED
    const sequence s = find_cached_sequence(a, t.batch);
    t.q_begin = s.q_begin;
    t.rows = min((int)Q_TILE, a.group * s.q_len - t.row_first); /* none where fewer rows are packed than there may be */
#endif
    return t;
}

/* Among all tiles of the problem. */
DEV int tile_number(void)
{
    return (int)(blockIdx.z * gridDim.y + blockIdx.y);
}

/* The keys that the tile's rows see, divided evenly over as many of its CTAs as then have some: so all share the work
 * of a batch entry with few keys, or with a window. */
typedef struct share {
    key_range keys;
    int steps, steps_each; /* of all CTAs of the tile; of one */
} share;

DEV int divide_up(int a, int b)
{
    return (a + b - 1) / b;
}

DEV share find_share(const visible_keys &visible)
{
    const int begin = visible.first / KV_TILE * KV_TILE;
    share s;
    s.steps = divide_up(max(0, visible.end - begin), STEP_KEYS);
    s.steps_each = max(1, divide_up(s.steps, (int)gridDim.x));
    s.keys.first = min(begin + (int)blockIdx.x * s.steps_each * STEP_KEYS, visible.end);
    s.keys.end = min(s.keys.first + s.steps_each * STEP_KEYS, visible.end);
    return s;
}

#if PAGED
/* The same of ACR_INVARIANT: the keys of a CTA, and of its groups, begin at multiples of a constant, whatever the
 * lengths and the batch. What a row does not see of them adds zeros to it, and leaves its bits. */
DEV share find_fixed_share(const visible_keys &visible)
{
    static_assert(FIXED_KEYS % STEP_KEYS == 0, "FIXED_KEYS: whole steps");
    const int first_part = visible.first / FIXED_KEYS, part = first_part + (int)blockIdx.x;
    share s;
    s.steps_each = FIXED_KEYS / STEP_KEYS;
    s.steps = max(0, divide_up(visible.end, FIXED_KEYS) - first_part) * s.steps_each;
    s.keys.first = min(max(part * FIXED_KEYS, visible.first / STEP_KEYS * STEP_KEYS), visible.end);
    s.keys.end = min((part + 1) * FIXED_KEYS, visible.end);
    return s;
}
#endif

/* A group of one warp runs ahead of the others as far as its ring allows. */
DEV void group_sync(int group)
{
    if (ROW_WARPS == 1)
        __syncwarp();
    else
        named_sync(group + 1, GROUP_THREADS); /* barrier 0 is __syncthreads's */
}

/* ---- Loading ---- */

enum {
    LOAD_LANES = 8, /* threads side by side in a row: 128 bytes */
    LOAD_ROWS = GROUP_THREADS / LOAD_LANES
};

/* Rows of padding keep what shared memory holds: no row of a product depends on another. */
DEV void load_queries(uint32_t tile, const fwd_args &a, const group_tile &t, int thread)
{
    const int chunk = thread % LOAD_LANES, first_head = t.kv_head * a.group;
    const chunk_matrix m = head_matrix_of(a.q, a.q_stride, t.batch, first_head, first_query(t), a.qk_dim, ELEM_BYTES);
#pragma unroll
    for (int r = 0; r < Q_TILE; r += LOAD_ROWS) {
        const int row = r + thread / LOAD_LANES;
        if (row >= t.rows)
            break;
        const group_row at = find_row(a, t, row);
        const char *from = m.base + at.position * m.row_bytes + (at.head - first_head) * a.q_stride.head * ELEM_BYTES +
                           chunk * CHUNK_BYTES;
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c += LOAD_LANES)
            copy_chunk_async(tile + chunk_offset(row, chunk + c, ROW_CHUNKS), from + c * CHUNK_BYTES,
                             chunk + c < m.chunks);
    }
}

/* What a group loads, tile by tile, K and V separately; nothing beyond the last tile. */
typedef struct key_loader {
#if PAGED
    paged_matrix matrix;
#else
    chunk_matrix matrix;
#endif
    uint32_t stages; /* of K or V: the first stage's half */
    int thread;
    bool read_once; /* one tile of rows: no other CTA reads these keys */
    int next;       /* key of the next tile to load */
    int end;        /* one past the last key to load */
} key_loader;

/* What a warp's group has under way. */
typedef struct pipeline {
    key_loader k, v;
    uint32_t q_smem;
#if PAGED
    page_cursor cursor; /* of the tile whose K or V is loaded next: V follows its K at once */
#endif
} pipeline;

#if RUNS
enum {
    RUN_KEYS = 16 /* of a tile; pages of a multiple of it, and keys without pages, hold whole runs */
};

/* load_paged_tile, a run at a time. Tiles begin at multiples of a run. */
template <bool READ_ONCE> DEV void load_runs(uint32_t tile, const paged_matrix &m, const page_cursor &c, int thread)
{
    constexpr int LANES = KV_ROW_CHUNKS % 8 == 0 ? 8 : 4, ROWS_AT_ONCE = GROUP_THREADS / LANES;
    static_assert(RUN_KEYS % ROWS_AT_ONCE == 0 && KV_TILE % RUN_KEYS == 0, "RUNS: of as many as are loaded at once");
    const int row = thread / LANES, chunk = thread % LANES;
    const int keys = c.end - (c.next_key - c.step - thread % WARP_THREADS) - row; /* from the thread's first row on */
    const uint64_t policy = READ_ONCE ? policy_read_once() : 0;
#pragma unroll
    for (int run = 0; run < KV_TILE; run += RUN_KEYS) {
        const int page = __shfl_sync(~0u, c.page, run), in_page = __shfl_sync(~0u, c.in_page, run);
        const bool exists = is_page(c.pages, page);
        const char *from = m.base + page * m.page_bytes + (in_page + row) * m.row_bytes + chunk * CHUNK_BYTES;
#pragma unroll
        for (int r = 0; r < RUN_KEYS; r += ROWS_AT_ONCE) {
            const bool row_valid = exists && run + r < keys;
#pragma unroll
            for (int i = 0; i < KV_ROW_CHUNKS; i += LANES) {
                const uint32_t to = tile + chunk_offset(row + run + r, chunk + i, KV_ROW_CHUNKS);
                const bool valid = row_valid && chunk + i < m.chunks;
                if (READ_ONCE)
                    copy_chunk_async_by(to, from + i * CHUNK_BYTES, valid, policy);
                else
                    copy_chunk_async(to, from + i * CHUNK_BYTES, valid);
            }
            from += ROWS_AT_ONCE * m.row_bytes;
        }
    }
}
#endif

DEV void load_next(const pipeline &x, key_loader &loader, int stage)
{
    const uint32_t tile = loader.stages + stage * (uint32_t)sizeof(kv_stage);
    if (loader.next < loader.end) {
#if RUNS
        if (x.cursor.pages.table == nullptr || x.cursor.pages.page % RUN_KEYS == 0) {
            if (loader.read_once)
                load_runs<true>(tile, loader.matrix, x.cursor, loader.thread);
            else
                load_runs<false>(tile, loader.matrix, x.cursor, loader.thread);
        } else
#endif
#if PAGED
            load_paged_tile<KV_TILE, KV_ROW_CHUNKS, GROUP_THREADS>(tile, loader.matrix, x.cursor, loader.read_once,
                                                                   loader.thread);
#else
        if (loader.read_once)
            load_tile<KV_TILE, ROW_CHUNKS, GROUP_THREADS, true>(tile, loader.matrix, loader.next, loader.end,
                                                                loader.thread);
        else
            load_tile<KV_TILE, ROW_CHUNKS, GROUP_THREADS>(tile, loader.matrix, loader.next, loader.end, loader.thread);
#endif
    }
    loader.next += STEP_KEYS;
}

DEV void load_next_keys(pipeline &x, int stage)
{
    load_next(x, x.k, stage);
}

DEV void load_next_values(pipeline &x, int stage)
{
    load_next(x, x.v, stage);
#if PAGED
    advance_pages(x.cursor);
#endif
}

/* Starts the loads of the first stages. Groups of copies: {K 0, Q}, V 0, K 1, ... V STAGES-2, K STAGES-1; then one in
 * every half step. Not unrolled: code that runs once costs the time to fetch it. */
DEV pipeline start_loads(const fwd_args &a PAGING_PARAMETER, const group_tile &t, const share &s, const lane_place &l,
                         uint32_t memory)
{
    const bool read_once = a.group * a.q_len <= Q_TILE;
    const int first = s.keys.first + l.group * KV_TILE;
    const uint32_t v_memory = memory + offsetof(kv_stage, v);
#if PAGED
    const paged_matrix k = paged_matrix_of(a.k, a.k_stride, t.kv_head, a.qk_dim, KV_BYTES),
                       v = paged_matrix_of(a.v, a.v_stride, t.kv_head, a.v_dim, KV_BYTES);
#else
    const key_source source = {t.kv_head, t.batch, 0};
    const chunk_matrix k = key_matrix(a.k, a.k_stride, source, a.qk_dim, ELEM_BYTES),
                       v = key_matrix(a.v, a.v_stride, source, a.v_dim, ELEM_BYTES);
#endif
    pipeline x = {{k, memory, l.thread, read_once, first, s.keys.end},
                  {v, v_memory, l.thread, read_once, first, s.keys.end},
                  Q_IN_REGISTERS ? v_memory + (STAGES - 1) * (uint32_t)sizeof(kv_stage)
                                 : memory + STAGES * (uint32_t)sizeof(kv_stage)};
#if PAGED
    x.cursor = start_pages(pages_of_entry(a, paging, t.batch), first, s.keys.end, STEP_KEYS, l.lane);
#endif
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) {
        load_next_keys(x, stage);
        if (stage == 0)
            load_queries(x.q_smem, a, t, l.thread);
        copies_commit();
        if (stage < STAGES - 1) {
            load_next_values(x, stage);
            copies_commit();
        }
    }
    return x;
}

#if PRODUCTS_F16
/* A warp's queries, bf16, become fp16: the rows a lane is in by powers of two of their own, for which their largest
 * elements are from 2^14 to 2^15. What fp16 then cannot hold exactly is below 2^-31 of the row's largest, and rounded
 * by 2^-39 of it at most: float32 sums of such products are rounded by more. back: the powers' inverses. */
DEV void bring_queries_to_f16(uint32_t (&q)[K_STEPS][4], float (&back)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t largest = 0; /* a magnitude as float32 bits, which are ordered as it is */
#pragma unroll
        for (int step = 0; step < K_STEPS; step++)
#pragma unroll
            for (int i = h; i < 4; i += 2)
                largest = max(largest, max(q[step][i] & 0x7fff0000, q[step][i] << 16 & 0x7fff0000));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        const uint32_t exponent = max(largest >> 23, 15u); /* so that both powers are normal numbers */
        const float there = __uint_as_float((268 - exponent) << 23);
        back[h] = __uint_as_float((exponent - 14) << 23);
#pragma unroll
        for (int step = 0; step < K_STEPS; step++)
#pragma unroll
            for (int i = h; i < 4; i += 2)
                q[step][i] = pack<0>(__uint_as_float(q[step][i] << 16) * there,
                                     __uint_as_float(q[step][i] & 0xffff0000) * there);
    }
}
#endif

/* Runs a warp through its group's tiles of keys. Copies are in flight up to the stage that is computed on: a half of a
 * stage is filled again as soon as the group has read it. */
DEV void attend(output_tile &o, softmax_state &state, pipeline &x, const fwd_args &a, const group_tile &t,
                const visible_entry &entry, const visible_keys &visible, const share &s, const lane_place &l,
                float key_scale)
{
    const int rows[2] = {l.row + l.lane / 4, l.row + l.lane / 4 + 8};
    const group_row at_rows[2] = {find_row(a, t, rows[0]), find_row(a, t, rows[1])};
    const int positions[2] = {at_rows[0].position, at_rows[1].position};
    const row_terms terms[2] = {find_group_terms(a, entry, t, at_rows[0]), find_group_terms(a, entry, t, at_rows[1])};
    const bool exists[M_TILES][2] = {{rows[0] < t.rows, rows[1] < t.rows}};
    COPIES_WAIT(2 * STAGES - 2);
    group_sync(l.group);
    query_operands q;
#if KV_E4M3
    load_query_operands_kv8(q, x.q_smem, l);
#if PRODUCTS_F16
    float back[2]; /* by what scores are multiplied */
    bring_queries_to_f16(q[0], back);
#endif
#else
    load_query_operands(q, x.q_smem, l);
#endif

    int stage = 0;
    for (int key = s.keys.first + l.group * KV_TILE; key < s.keys.end; key += STEP_KEYS) {
        const uint32_t at = stage * (uint32_t)sizeof(kv_stage);
        COPIES_WAIT(2 * STAGES - 2);
        group_sync(l.group); /* this K has landed for all, and all have left the V before */
        load_next_values(x, stage == 0 ? STAGES - 1 : stage - 1);
        copies_commit();
        const bool masked = key < visible.full_first || key + KV_TILE > visible.full_end;
        score_tile scores;
#if KV_E4M3
        multiply_scores_kv8(scores, q, x.k.stages + at, l);
#if PRODUCTS_F16
#pragma unroll
        for (int i = 0; i < KEY_TILES * 4; i++)
            scores[0][i] *= back[i / 2 % 2];
#endif
#else
        multiply_scores(scores, q, x.q_smem, x.k.stages + at, l);
#endif
        row_keys seen = {};
        if (masked)
            seen = find_row_keys(a, entry, t.batch, positions[0], positions[1], 2 * (l.lane % 4));
        finish_scores(scores[0], seen, key, masked, a, terms, 2 * (l.lane % 4), entry.kv_len);
        probability_tile probabilities;
        update_softmax(probabilities, state, o, scores, exists, score_scale_log2(a) * key_scale);
        COPIES_WAIT(2 * STAGES - 2);
        group_sync(l.group); /* this V has landed for all, and all have left the K */
        load_next_keys(x, stage);
        copies_commit();
#if KV_E4M3
        multiply_values_kv8(o, probabilities, x.v.stages + at, l.lane);
#else
        multiply_values(o, probabilities, x.v.stages + at, 0, l.lane);
#endif
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    COPIES_WAIT(0);
    group_sync(l.group);
}

/* ---- Adding partial results: a warp a row, a lane LANE_COLUMNS columns side by side ---- */

typedef struct row_result {
    float o[LANE_COLUMNS];
    float reference, sum;
} row_result;

/* Leaves a warp's part of its group's result in shared memory; the scales of a cache of e4m3 come in here. */
#if KV_E4M3
DEV void publish(partial_row *partial, const output_tile &o, const softmax_state &state, const lane_place &l,
                 const cache_scales &scales)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        partial_row &row = partial[l.row + l.lane / 4 + 8 * h];
#pragma unroll
        for (int n = 0; n < DIM_TILES; n += 2) {
            const float *even = &o[0][4 * n + 2 * h], *odd = &o[0][4 * n + 4 + 2 * h];
            *(float4 *)&row.o[first_column_kv8(n, l.lane)] = make_float4(
                even[0] * scales.values, odd[0] * scales.values, even[1] * scales.values, odd[1] * scales.values);
        }
        const float sum = quad_sum(state.sum[0][h]);
        if (l.lane % 4 == 0)
            *(float2 *)&row.reference = make_float2(state.reference[0][h] * scales.keys, sum);
    }
}
#else
DEV void publish(partial_row *partial, const output_tile &o, const softmax_state &state, const lane_place &l)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        partial_row &row = partial[l.row + l.lane / 4 + 8 * h];
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++)
            *(float2 *)&row.o[8 * n + 2 * (l.lane % 4)] = make_float2(o[0][4 * n + 2 * h], o[0][4 * n + 2 * h + 1]);
        const float sum = quad_sum(state.sum[0][h]);
        if (l.lane % 4 == 0)
            *(float2 *)&row.reference = make_float2(state.reference[0][h], sum);
    }
}
#endif

/* The lane's columns of a row in shared memory; as wide as their alignment allows. */
DEV void read_columns(float (&to)[LANE_COLUMNS], const float *row, int lane)
{
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i += LANE_COLUMNS % 4 == 0 ? 4 : 2)
        if (LANE_COLUMNS % 4 == 0)
            *(float4 *)&to[i] = *(const float4 *)(row + LANE_COLUMNS * lane + i);
        else
            *(float2 *)&to[i] = *(const float2 *)(row + LANE_COLUMNS * lane + i);
}

/* A row of several partial results in shared memory: so many bytes from one to the next. */
DEV const partial_row &part(const partial_row *first, int stride_bytes, int i)
{
    return *(const partial_row *)((const char *)first + i * stride_bytes);
}

/* The sums of some rows of `count` partial results, in their order. */
template <int ROWS>
DEV void add_partials(row_result (&r)[ROWS], const partial_row *const (&rows)[ROWS], int stride_bytes, int count,
                      int lane, float scale_log2)
{
#pragma unroll
    for (int k = 0; k < ROWS; k++)
        r[k] = {{}, -CUDART_INF_F, 0.0f};
#pragma unroll 4
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            r[k].reference = fmaxf(r[k].reference, part(rows[k], stride_bytes, i).reference);
#pragma unroll 4
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const partial_row &from = part(rows[k], stride_bytes, i);
            const float2 state = *(const float2 *)&from.reference;
            const float weight = exp2_fast((state.x - finite_max(r[k].reference)) * scale_log2);
            float columns[LANE_COLUMNS];
            read_columns(columns, from.o, lane);
            r[k].sum += weight * state.y;
#pragma unroll
            for (int c = 0; c < LANE_COLUMNS; c++)
                r[k].o[c] += weight * columns[c];
        }
}

/* Row `row` of the tile in the workspace: the CTAs' results side by side. */
DEV partial_row *find_partials(const fwd_args &a, int row)
{
    return ((workspace_layout *)a.workspace)->partial + ((int64_t)tile_number() * Q_TILE + row) * (int)gridDim.x;
}

/* Leaves a row of this CTA in the workspace. */
DEV void leave_row(const fwd_args &a, const row_result &r, int row, int lane)
{
    partial_row &to = find_partials(a, row)[blockIdx.x];
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i += LANE_COLUMNS % 4 == 0 ? 4 : 2)
        if (LANE_COLUMNS % 4 == 0)
            *(float4 *)&to.o[LANE_COLUMNS * lane + i] = make_float4(r.o[i], r.o[i + 1], r.o[i + 2], r.o[i + 3]);
        else
            *(float2 *)&to.o[LANE_COLUMNS * lane + i] = make_float2(r.o[i], r.o[i + 1]);
    if (lane == 0)
        *(float2 *)&to.reference = make_float2(r.reference, r.sum);
}

/* Copies what all CTAs of the tile left of a row to shared memory, past L1; by the warp that needs it. */
DEV void fetch_row(uint32_t smem, const partial_row *row, int splits, int lane)
{
#pragma unroll 4
    for (int i = lane; i < splits * (int)sizeof(partial_row) / CHUNK_BYTES; i += WARP_THREADS)
        copy_chunk_async(smem + i * CHUNK_BYTES, (const char *)row + i * CHUNK_BYTES, 1);
}

/* Divides a row by its sum and stores it, and its log-sum-exp. Returns whether all values of the lane are finite. */
DEV int store_split_row(const fwd_args &a, const group_tile &t, const row_result &r, int row, int lane)
{
    const group_row at = find_row(a, t, row);
    char *to = (char *)a.o + group_output_index(a, t, at) * ELEM_BYTES;
    const float factor = row_factor(a, at.head, r.reference, r.sum);
    float probe = 0.0f; /* NaN when a value is not finite */
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i += 2) {
        const int column = LANE_COLUMNS * lane + i;
        const float even = r.o[i] * factor, odd = r.o[i + 1] * factor;
        probe += even * 0.0f + odd * 0.0f;
        if (column < a.v_dim)
            *(uint32_t *)(to + column * ELEM_BYTES) = pack<IS_BF16>(even, odd);
    }
    if (a.lse != nullptr && lane == 0)
        *group_lse(a, t, at) = row_lse(a, at.head, r.reference, r.sum);
    return probe == 0.0f;
}

/* The NaN fix-up of a stored row, by the warp's first quad. */
DEV void fix_split_row(const fwd_args &a PAGING_PARAMETER, const group_tile &t, const visible_entry &entry,
                       const row_result &r, int row, int lane)
{
    const group_row at = find_row(a, t, row);
    const float scale_log2 = score_scale_log2(a);
    stored_row stored = {
        t.batch, at.head,    lane < 4 ? at.position : a.q_len,   first_query(t),
        0,       scale_log2, offset_of(r.reference, scale_log2), row_factor(a, at.head, r.reference, r.sum)};
#if PAGED
    const cache_scales scales = find_cache_scales(a, t.batch, t.kv_head);
    stored.scale_log2 *= scales.keys;
    stored.factor *= scales.values;
    fix_paged_nan<ELEMENT>(a, pages_of_entry(a, paging, t.batch), entry, stored, r.sum, false, lane);
#else
    fix_hidden_nan<ELEMENT>(a, entry, stored, r.sum, false, lane);
#endif
}

/* Rows of partial results in shared memory: rows first, first + step, ... below end of the tile. */
typedef struct gathered_rows {
    const partial_row *results;
    int first, end, step;
    int row_results;         /* partial_rows from row to row */
    int stride_bytes, count; /* from result to result of a row; results of a row */
} gathered_rows;

/* Adds up rows, a warp a row, and stores them; or, unless they are the whole, leaves them for one that adds again. */
DEV void add_rows(const fwd_args &a PAGING_PARAMETER, const group_tile &t, const visible_entry &entry,
                  const gathered_rows &g, bool whole)
{
    const int warp = threadIdx.x / WARP_THREADS, lane = threadIdx.x % WARP_THREADS;
    for (int row = g.first + warp * g.step; row < g.end; row += ROWS_AT_ONCE * WARPS * g.step) {
        row_result r[ROWS_AT_ONCE];
        const partial_row *from[ROWS_AT_ONCE];
        int finite = true;
#pragma unroll
        for (int k = 0; k < ROWS_AT_ONCE; k++) {
            const int other = row + k * WARPS * g.step;
            from[k] = g.results + ((other < g.end ? other : row) - g.first) * g.row_results;
        }
        add_partials(r, from, g.stride_bytes, g.count, lane, score_scale_log2(a));
#pragma unroll
        for (int k = 0; k < ROWS_AT_ONCE; k++)
            if (row + k * WARPS * g.step < g.end) {
                if (whole)
                    finite &= store_split_row(a, t, r[k], row + k * WARPS * g.step, lane);
                else
                    leave_row(a, r[k], row + k * WARPS * g.step, lane);
            }
        /* Asked before a row's fix-up is prepared: that is seldom needed, and takes divisions. */
        if (hides_keys(a, entry) && __any_sync(~0u, !finite))
#pragma unroll
            for (int k = 0; k < ROWS_AT_ONCE; k++)
                if (row + k * WARPS * g.step < g.end)
                    fix_split_row(a PAGING_ARGUMENT, t, entry, r[k], row + k * WARPS * g.step, lane);
    }
}

/* The results of the CTA's groups. */
DEV gathered_rows find_groups(const group_tile &t, const shared_memory &smem)
{
    return {smem.groups[0].partial, 0, t.rows, 1, 1, (int)sizeof(group_memory), KV_GROUPS};
}

/* Whether this CTA is the last of `count` to come here: then what the others left before is visible to it. The counter
 * wraps back to 0. */
DEV bool arrives_last(unsigned *counter, int count)
{
    __syncthreads();
    unsigned arrived = 0;
    if (threadIdx.x == 0)
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(arrived)
                     : "l"(counter), "r"(count - 1)
                     : "memory");
    return __syncthreads_or(threadIdx.x == 0 && arrived == (unsigned)count - 1);
}

/* Adds the groups' results, and those of the tile's other CTAs where there are any. One loop for both, so that its code
 * is at hand the second time. */
DEV void finish(const fwd_args &a PAGING_PARAMETER, const group_tile &t, const visible_entry &entry, int splits,
                shared_memory &smem)
{
    const int warp = threadIdx.x / WARP_THREADS, lane = threadIdx.x % WARP_THREADS;
    gathered_rows g = find_groups(t, smem);
    bool whole = splits == 1;
    for (;;) {
        add_rows(a PAGING_ARGUMENT, t, entry, g, whole);
        if (!whole) {
            if (!arrives_last(&((workspace_layout *)a.workspace)->counters[tile_number()], splits))
                return;
            whole = true;
            g = {smem.gathered, 0, 0, 1, splits, (int)sizeof(partial_row), splits};
        }
        if (g.end == t.rows)
            return;
        g.first = g.end; /* as many rows as shared memory holds; a place in it is always the same warp's */
        g.end = min(t.rows, g.first + ROWS_MAX / splits);
        __syncwarp();
        for (int row = g.first + warp; row < g.end; row += WARPS)
            fetch_row(smem_address(smem.gathered + (row - g.first) * splits), find_partials(a, row), splits, lane);
        copies_commit();
        COPIES_WAIT(0);
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
#if PAGED
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_paging paging)
#else
    KERNEL_NAME(const __grid_constant__ fwd_args a)
#endif
{
    extern __shared__ __align__(128) unsigned char memory[];
    shared_memory &smem = *(shared_memory *)memory;
    wait_for_previous_kernel();

    const int warp = threadIdx.x / WARP_THREADS, group = ROW_WARPS == 1 ? warp : warp / ROW_WARPS;
    const lane_place l = {(int)threadIdx.x % WARP_THREADS, group, (int)threadIdx.x - group * GROUP_THREADS,
                          (warp - group * ROW_WARPS) * WARP_ROWS};
    const group_tile t = find_tile(a);
#if PAGED
    if (t.rows <= 0)
        return;
    const visible_entry entry = entry_of(a, find_cached_sequence(a, t.batch));
    const cache_scales scales = find_cache_scales(a, t.batch, t.kv_head);
    const float key_scale = scales.keys;
#else
    const float key_scale = 1.0f;
    const visible_entry entry = entry_of_batch(a, t.batch);
#endif
    const visible_keys visible = visible_to_tile(a, entry, t);
#if PAGED
    const share s = paging.invariant ? find_fixed_share(visible) : find_share(visible);
#else
    const share s = find_share(visible);
#endif
    if (s.keys.first == s.keys.end && blockIdx.x != 0) /* the first CTA writes the rows that see no key */
        return;

    pipeline x = start_loads(a PAGING_ARGUMENT, t, s, l, smem_address(&smem.groups[group]));
    const int splits = max(1, divide_up(s.steps, s.steps_each)); /* CTAs of the tile that have keys */
    softmax_state state;
    output_tile o;
    clear(o, state);
    attend(o, state, x, a, t, entry, visible, s, l, key_scale);
    allow_next_kernel();
#if KV_E4M3
    publish(smem.groups[group].partial, o, state, l, scales);
#else
    publish(smem.groups[group].partial, o, state, l);
#endif
    __syncthreads();
    finish(a PAGING_ARGUMENT, t, entry, splits, smem);
}

#else

#include <math.h>

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {.work = ACR__WORK_HEAD_ROWS,
                                   .q_tile = Q_TILE,
                                   .threads = THREADS,
                                   .smem_bytes = SMEM_BYTES,
                                   .narrow_only = KV_E4M3};

#include "cuda/model/tile_kernel.h"

static int64_t head_rows(const acr_problem *problem)
{
    return problem->q_heads / problem->kv_heads * problem->q_len;
}

/* CTAs that fit on an SM beside each other. */
static int32_t ctas_per_sm(const acr__device *device)
{
    const int32_t regs_per_thread = DIM == 64 ? 160 : DIM == 128 && Q_TILE == 16 ? 184 : 255; /* ptxas -v tells */
    const int32_t most = 65536 / (THREADS * CTAS);
    return tile_ctas_per_sm(device, CTAS > 1 && regs_per_thread > most ? most : regs_per_thread);
}

static int64_t count_tiles(const acr_problem *problem)
{
    return acr__row_tiles(problem, Q_TILE) * problem->kv_heads * problem->batch;
}

/* Of all lines one alone may take a problem: their bits differ. */
static const char *invariant_why_not(const acr_problem *problem)
{
    if (DIM > 64 && !KV_E4M3 && problem->qk_dim <= 64 && problem->v_dim <= 64)
        return "invariant: heads of up to 64 dims are those of the line for 64 (ACR_INVARIANT)";
    if (problem->kv_len > (int64_t)SPLITS_MAX * FIXED_KEYS)
        return "invariant: kv_len is above 131072, 128 CTAs of 1024 keys (ACR_INVARIANT)";
    return problem->kv_len > FIXED_KEYS && count_tiles(problem) > COUNTERS_MAX
               ? "invariant: more than 4096 tiles of 16 rows of a key head (ACR_INVARIANT)"
               : NULL;
}

/* Why the line does not serve a problem beside what acr__cache_why_not says: what has no cache is for dense lines. */
static const char *cache_why_not(const acr_problem *problem)
{
    const int paged = (problem->flags & ACR_PAGED) != 0;
    if (!PAGED)
        return NULL;
    if (problem->flags & ACR_PACKED && !paged)
        return "packed: the kernel serves packed queries over pages only (ACR_PACKED with ACR_PAGED)";
    if (!KV_E4M3 && !paged)
        return "page: the kernel serves caches in pages only (PAGED)";
    return problem->flags & ACR_INVARIANT ? invariant_why_not(problem) : NULL;
}

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    const char *reason = cache_why_not(problem);
    return reason ? reason : tile_why_not(problem, device);
}

/* Cycles from a CTA's start to its end when nothing waits for memory. Fitted, as are the other numbers here, to runs on
 * an H200 (README.md). */
static double cta_cycles(const acr_problem *problem, const acr__device *device, double steps_each, double splits,
                         double ctas_beside)
{
    const double rows_of_warp = ceil(fmin((double)head_rows(problem), Q_TILE) / WARPS);
    /* One warp's way through a tile of keys, all latencies; and what its CTA takes of the SM's pipes meanwhile. */
    const double widening = !KV_E4M3 ? 1.0 : BF16 && !PRODUCTS_F16 ? 1.6 : 1.2; /* not measured yet */
    const double latency = widening * (100.0 + 5.75 * DIM) * pow(KV_TILE / 16.0, 0.85);
    const double pipes = widening * 120.0 * WARPS * (DIM / 128.0) * (KV_TILE / 16.0) / acr__mma_share(device);
    const double steps = steps_each * fmax(latency, ctas_beside * pipes);
    const double ends = 3450.0 + 420.0 * rows_of_warp; /* until the first data; adding the groups' results */
    const double merge = 2750.0 + 45.0 * splits + (600.0 + 80.0 * splits) * (rows_of_warp - 1.0);
    return ends + steps + (splits > 1.0 ? merge : 0.0);
}

/* The seconds without the launch. mean_len: of the key lengths, as a share of kv_len. */
static double split_seconds(const acr_problem *problem, const acr__device *device, int64_t steps_each, int64_t splits,
                            double mean_len)
{
    const double clock_hz = 0.89 * device->clock_hz; /* what the power limit leaves of it */
    /* Groups of several warps wait for each other; padded dims take room from loads under way. */
    const double padding = 2.0 * DIM / (double)(problem->qk_dim + problem->v_dim) - 1.0;
    const double rate = (1.0 - 0.05 * (ROW_WARPS - 1) - 0.02 * fmin(padding, 4.0)) *
                        acr__memory_rate(problem, device, (double)acr__row_tiles(problem, Q_TILE));
    const double sm_rate = 1.75 * rate / device->sm_count;
    const double cta_keys = fmin((double)steps_each * STEP_KEYS, (double)problem->kv_len);
    const double cta_bytes = cta_keys * (double)(problem->qk_dim + problem->v_dim) * KV_BYTES;
    const double ctas = (double)(acr__row_tiles(problem, Q_TILE) * problem->kv_heads * problem->batch * splits);
    const double slots = (double)device->sm_count * ctas_per_sm(device);
    const double waves = ceil(ctas / slots) - 1.0, rest = ctas - waves * slots; /* whole waves before the last */
    const double beside_rest = ceil(rest / device->sm_count);                   /* CTAs of an SM in the last wave */
    const double wave_cycles = cta_cycles(problem, device, (double)steps_each, (double)splits, ctas_per_sm(device));
    const double wave_seconds = fmax(slots * cta_bytes / rate, wave_cycles / clock_hz) +
                                1000.0 / clock_hz; /* its CTAs start one after the other's end */
    /* With uneven lengths the longest CTAs end later than the others. */
    const double uneven = mean_len < 1.0 ? 0.12 * 2.0 * device->sm_count * cta_bytes / rate : 0.0;
    const double whole_waves = waves * mean_len * wave_seconds + uneven;
    const double start_seconds = 3.0e-6; /* of a wave that is bound by memory: its first data, its last rows */
    const double memory = fmax(mean_len * rest / rate, beside_rest / sm_rate) * cta_bytes;
    const double cycles = cta_cycles(problem, device, (double)steps_each, (double)splits, beside_rest);
    const double merge = cta_cycles(problem, device, 0.0, (double)splits, 1.0) / clock_hz;
    return whole_waves + fmax(memory + fmax(start_seconds, merge), cycles / clock_hz);
}

/* Into how many CTAs the keys of a tile are split, of so many steps each. */
typedef struct choice {
    int64_t splits, steps_each;
} choice;

/* Into at most so many CTAs. */
static choice split_into(int64_t steps, int64_t ctas)
{
    const int64_t steps_each = (steps + ctas - 1) / ctas;
    return (choice){(steps + steps_each - 1) / steps_each, steps_each};
}

static choice choose_splits(const acr_problem *problem, const acr__device *device)
{
    const double mean_len = problem->flags & ACR_KV_LENS ? 0.5 : 1.0; /* they are not known here */
    const int64_t steps = (problem->kv_len + STEP_KEYS - 1) / STEP_KEYS;
    const int64_t most = count_tiles(problem) > COUNTERS_MAX ? 1 : steps < SPLITS_MAX ? steps : SPLITS_MAX;
    if (problem->flags & ACR_INVARIANT)
        return (choice){(problem->kv_len + FIXED_KEYS - 1) / FIXED_KEYS, FIXED_KEYS / STEP_KEYS};
    choice best = {1, steps};
    double best_seconds = split_seconds(problem, device, steps, 1, mean_len);
    for (int64_t wanted = 2; wanted <= most; wanted++) {
        const choice tried = split_into(steps, wanted);
        const double seconds = split_seconds(problem, device, tried.steps_each, tried.splits, mean_len);
        if (seconds < best_seconds) {
            best = tried;
            best_seconds = seconds;
        }
    }
    return best;
}

static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    const int64_t splits = choose_splits(problem, device).splits;
    const int64_t ctas = count_tiles(problem) * splits;
    return splits == 1 ? 0 : sizeof(workspace_layout) + (size_t)ctas * Q_TILE * sizeof(partial_row);
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    const uint32_t splits = (uint32_t)choose_splits(problem, device).splits;
    *launch = (acr__launch){
        .grid = {splits, (uint32_t)(acr__row_tiles(problem, Q_TILE) * problem->kv_heads), (uint32_t)problem->batch},
        .block = THREADS,
        .smem_bytes = SMEM_BYTES};
}

/* At full key lengths, as the other families' costs are. */
static double cost(const acr_problem *problem, const acr__device *device)
{
    const choice c = choose_splits(problem, device);
    return ACR__LAUNCH_SECONDS +
           tile_terms_cost(problem, TERMS) * split_seconds(problem, device, c.steps_each, c.splits, 1.0);
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("fwd_split", KV_E4M3 ? 89 : 80, 999),
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .traits = PAGED ? ACR__TRAIT_PACKED | ACR__TRAIT_INVARIANT : 0,
    .terms = TERMS,
    .pages = PAGED,
    .kv_types = KV_E4M3 ? 1u << ACR_E4M3 : 0,
    .why_not = why_not,
    .workspace = workspace,
    .cost = cost,
    .shape = shape,
};

#endif
