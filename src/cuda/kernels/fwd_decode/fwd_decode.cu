/* Forward attention for decoding at low latency: few query rows for each key head, fp16 and bf16, sm_90a.
 *
 * The rows of a tile, up to 8, are the query heads of one key head times their query positions. A tile's keys are
 * divided over the CTAs of a cluster. TMA brings them in blocks of KV_TILE; of every STEP_KEYS each warp
 * multiplies its own with the queries (keys are the rows of the product, queries its 8 columns), all warps agree on the
 * maximum and leave their probabilities in shared memory, and each warp multiplies all of these with its own dims of V:
 * nothing has to be added within a CTA. At the end each CTA sends its sums to those that own the dims (st.async), who
 * add and store them. Online softmax after Milakov and Gimelshein 2018, split keys after Dao et al. 2023.
 * See README.md.
 *
 * Parameters: DIM (64, 128 or 256; smaller head dims are zero-padded), STAGES (blocks of K, and as many of V, in shared
 * memory); optional BF16=1, CLUSTER (CTAs a tile, in place of the host's choice: for experiments), TERMS (FWD_TERM_* of
 * fwd_args.h: the features beyond scale, mask and window), PAGED=1 (caches: keys in pages of any size, packed queries;
 * fwd_paging.h): each warp then copies its own keys of a step (cp.async, pages.cuh) into the place that TMA fills else.
 *
 * PARAMETERS: DIM STAGES BF16=0 CLUSTER=0 TERMS=0 PAGED=0 */
#include "cuda/device/attention/parameters.h"

#include "fwd_args.h"

#ifndef CLUSTER
#define CLUSTER 0
#endif

enum {
    ELEM_BYTES = 2,
    Q_TILE = 8,   /* rows: the columns of mma.sync's accumulators */
    KV_TILE = 64, /* keys of a block */
    WARPS = 8,
    THREADS = 32 * WARPS,
    WARP_KEYS = DIM == 256 ? 16 : 32, /* of a step */
    STEP_KEYS = WARPS * WARP_KEYS,
    STEP_BLOCKS = STEP_KEYS / KV_TILE,
    PANEL_ELEMS = 64, /* of a row: 128 bytes, the width of a box */
    PANELS = DIM / PANEL_ELEMS,
    BLOCK_BYTES = KV_TILE * DIM * ELEM_BYTES,
    ROW_BYTES = PAGED ? DIM * ELEM_BYTES : 128, /* of a block: whole rows of a cache, panels of TMA's boxes */
    PANEL_BYTES = PAGED ? 128 : KV_TILE * 128,  /* from a panel to the next */
    UNIT_DIMS = 16,                             /* of the output: the rows of an accumulator */
    UNITS = DIM / UNIT_DIMS,
    WARP_UNITS = UNITS > WARPS ? UNITS / WARPS : 1,
    HALVES = UNITS < WARPS ? WARPS / UNITS : 1, /* warps that share a unit, and take turns over the keys */
    CLUSTER_MIN = WARP_UNITS,                   /* a warp adds up one unit at most */
    CLUSTER_MAX = 8,                            /* the largest that every GPU with clusters takes */
    SLOTS = HALVES * (UNITS > CLUSTER_MAX ? UNITS : CLUSTER_MAX), /* sums of one unit that a CTA is sent at most */
    Q_ROW_BYTES = DIM * ELEM_BYTES + 16                           /* spreads rows over banks */
};

/* Sums of one unit on their way, as a warp's lanes hold them; and of lane i < 4 reference and sum of columns 2 i and
 * 2 i + 1. 16-byte words. */
typedef struct unit_sums {
    float o[32][4], statistics[4][4];
} unit_sums;

typedef struct shared_memory {
    unsigned char k[STAGES][BLOCK_BYTES], v[STAGES][BLOCK_BYTES];
#if !PAGED
    uint64_t k_full[STAGES], v_full[STAGES];
#endif
    uint64_t all_sent, unused; /* whole 16-byte words */
    unsigned char q[Q_TILE * Q_ROW_BYTES];
    uint16_t p[STEP_KEYS][Q_TILE];                /* probabilities of a step */
    float max[Q_TILE][WARPS], sum[Q_TILE][WARPS]; /* of each row by warp, over a step and over all */
    unit_sums inbox[SLOTS];
} shared_memory;

enum {
    SMEM_BYTES = (int)sizeof(shared_memory),
    CTAS_PER_SM = SMEM_BYTES <= 113 << 10 && !TERMS ? 2 : 1 /* that registers leave room for */
};

#ifdef __CUDACC__

#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/head_group.cuh"
#include "cuda/device/attention/kv_loader.cuh"
#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/isa/cluster.cuh"
#include "cuda/device/isa/trace_points.cuh"
#include "cuda/device/isa/mma.cuh"
#include "cuda/device/isa/shared.cuh"

enum {
    ELEMENT = BF16 ? ACR_BF16 : ACR_F16,
    KV_TYPE = ELEMENT,
    K_STEPS = DIM / 16,         /* of a score product */
    KEY_TILES = WARP_KEYS / 16, /* 16-key accumulators of a warp */
    PV_KEYS = 32,               /* keys whose probabilities one ldmatrix takes */
    PV_TILES = STEP_KEYS / PV_KEYS,
    CHAINS = 2,              /* sums that an accumulator is made of: few accumulators would wait for each other */
    QUERY_WARP = STEP_BLOCKS /* warps below ask for keys, those from here on fetch the queries */
};

static_assert(DIM == 64 || DIM == 128 || DIM == 256, "DIM: 64, 128 or 256");
static_assert(STAGES >= STEP_BLOCKS, "STAGES: a step's blocks are in shared memory together");
static_assert(CLUSTER == 0 || (CLUSTER >= CLUSTER_MIN && CLUSTER <= CLUSTER_MAX && (CLUSTER & (CLUSTER - 1)) == 0),
              "CLUSTER: a power of two up to 8, with 256 dims at least 2");
static_assert(!PAGED || (STAGES == STEP_BLOCKS && WARP_KEYS == PV_KEYS && !TERMS),
              "PAGED: a stage for each block of a step, up to 128 dims, without TERMS");
static_assert(sizeof(shared_memory) % 16 == 0 && offsetof(shared_memory, q) % 16 == 0, "16-byte words");

#if PAGED
#include "cuda/device/attention/pages.cuh"
#endif
#include "cuda/device/attention/paging_argument.cuh"

/* ---- Where a CTA is, and which keys are its own ---- */

/* The grid is {CTAs of a tile, key heads of all row tiles, batch}; a cluster is the CTAs of a tile. */
DEV group_tile find_tile(const fwd_args &a)
{
    group_tile t = {0, 0, (int)blockIdx.y, (int)blockIdx.z};
    while (t.kv_head >= a.kv_heads) { /* tiles are few, mostly one: shorter than a division */
        t.kv_head -= a.kv_heads;
        t.row_first += Q_TILE;
    }
    t.rows = min((int)Q_TILE, a.group * a.q_len - t.row_first);
#if PAGED
    const sequence s = find_cached_sequence(a, t.batch);
    t.q_begin = s.q_begin;
    t.rows = min((int)Q_TILE, a.group * s.q_len - t.row_first); /* none where fewer rows are packed than there may be */
#endif
    return t;
}

/* A cluster is a power of two of CTAs. */
DEV int log_ctas(void)
{
    return 31 - __clz((int)gridDim.x);
}

/* The keys that any row of the tile sees, divided evenly over its CTAs, in whole tiles of probabilities. */
DEV key_range find_share(const visible_keys &visible)
{
    const int log_tile = 5, log_step = log_tile + log_ctas();
    static_assert(1 << log_tile == PV_KEYS, "log_tile");
    const int keys = max(0, visible.end - visible.first);
    const int each = ((keys + (1 << log_step) - 1) >> log_step) << log_tile;
    key_range share;
    share.first = min(visible.first + (int)blockIdx.x * each, visible.end);
    share.end = min(share.first + each, visible.end);
    return share;
}

/* ---- Loading ---- */

#if PAGED

/* K or V: in the cache, in shared memory. */
typedef struct ring {
    uint32_t smem;
    paged_matrix matrix;
} ring;

typedef struct loader {
    ring k, v;
    key_range keys;     /* the CTA's share */
    page_cursor cursor; /* of the warp's keys of the step that is loaded next: V follows its K */
} loader;

typedef loader step_loader; /* what changes from step to step */

/* A warp copies its own keys of each step, those that it multiplies with the queries and as many of V. Its groups of
 * copies are K and V in turn, one each for a step, empty where it has no keys; keys behind the share's end become
 * zeros. So the newest group but one is K at a step's begin, and V once the next step's K has been asked for. */
DEV void load_own_keys(const loader &l, const ring &r, int first, int warp, int lane)
{
    if (first + warp * WARP_KEYS < l.keys.end)
        load_paged_tile<WARP_KEYS, ROW_BYTES / CHUNK_BYTES, WARP_THREADS>(r.smem + warp * WARP_KEYS * ROW_BYTES,
                                                                          r.matrix, l.cursor, false, lane);
    copies_commit();
}

#else

/* K or V in shared memory. */
typedef struct ring {
    uint32_t smem, barriers; /* of the first stage */
    const fwd_map *map;
} ring;

typedef struct loader {
    ring k, v;
    key_source source;
    key_range keys; /* the CTA's share */
} loader;

typedef const loader step_loader;

/* Asks for a block of the share, by one thread; for nothing beyond its end. */
DEV void load_block(const loader &l, const ring &r, int block, int stage)
{
    const int key = l.keys.first + block * KV_TILE;
    if (key >= l.keys.end)
        return;
    const tile_panels panels = {PANELS, PANEL_BYTES, PANEL_ELEMS};
    load_key_boxes(r.smem + stage * BLOCK_BYTES, r.map, r.barriers + stage * BARRIER_BYTES, panels, l.source, key);
}

/* By one thread of each of the first warps, before it can wait for anybody: barriers and first blocks of its stages. */
DEV void start_ring(const loader &l, const ring &r, int warp)
{
#pragma unroll
    for (int round = 0; round < STAGES; round += STEP_BLOCKS)
        if (round + warp < STAGES)
            barrier_init(r.barriers + (round + warp) * BARRIER_BYTES, 1);
    barrier_init_done();
    load_block(l, r, warp, warp);
}

DEV void fill_ring(const loader &l, const ring &r, int warp)
{
#pragma unroll
    for (int round = STEP_BLOCKS; round < STAGES; round += STEP_BLOCKS)
        if (round + warp < STAGES)
            load_block(l, r, round + warp, round + warp);
}

#endif

/* The queries, zeros for rows and dims that do not exist; by the warps from QUERY_WARP on. */
DEV void load_queries(shared_memory &m, const fwd_args &a, const group_tile &t)
{
    const int row_chunks = DIM / CHUNK_ELEMS, threads = THREADS - WARP_THREADS * QUERY_WARP;
#pragma unroll
    for (int i = 0; i < Q_TILE * row_chunks; i += threads) {
        const int at = i + (int)threadIdx.x - WARP_THREADS * QUERY_WARP, row = at / row_chunks, chunk = at % row_chunks;
        if (at >= Q_TILE * row_chunks)
            break;
        uint4 x = {0, 0, 0, 0};
        if (row < t.rows && chunk * CHUNK_ELEMS < a.qk_dim) {
            group_row r = find_row(a, t, row);
#if PAGED
            r.position += t.q_begin;
#endif
            const chunk_matrix q = head_matrix_of(a.q, a.q_stride, t.batch, r.head, r.position, a.qk_dim, ELEM_BYTES);
            x = *(const uint4 *)(q.base + chunk * CHUNK_BYTES);
        }
        *(uint4 *)(m.q + row * Q_ROW_BYTES + chunk * CHUNK_BYTES) = x;
    }
}

/* ---- Which CTA owns which units of the output ---- */

/* Units are divided evenly over the CTAs; with more CTAs than units only some have one. */
DEV int units_each(void)
{
    return max(1, UNITS >> log_ctas());
}

DEV bool owns_units(void)
{
    return ((int)blockIdx.x * UNITS & ((int)gridDim.x - 1)) == 0;
}

DEV int first_unit(int owner)
{
    return owner * UNITS >> log_ctas();
}

/* To each owner. */
DEV int sent_bytes(const group_tile &t)
{
    const int lanes = (t.rows + 1) / 2 * 9; /* a column pair's 8 lanes, and its statistics */
    return (units_each() << log_ctas()) * HALVES * lanes * 16;
}

/* Where an owner has a CTA's sums of one of its units, of one half of the warps that share the unit. */
DEV int slot_of(int cta, int half, int unit)
{
    return (cta * HALVES + half) * units_each() + unit;
}

/* ---- Computing. Of an accumulator a lane holds columns 2 (lane % 4) and the next, of rows lane / 4 and that + 8;
 * columns are queries throughout, rows are keys of the scores and dims of the output. ---- */

typedef float score_tile[KEY_TILES * 4];
typedef float output_tile[WARP_UNITS][CHAINS][4];

/* What a warp does all the time: its keys of a step, its dims of the output. */
typedef struct worker {
    int warp, lane;
    int unit, half;               /* its first unit; which tiles of keys it takes of those that share it */
    uint32_t k_at[4], v_at, p_at; /* what the lane gives to ldmatrix: in a block of K for steps 0..3 of each panel, of V
                                     for the first unit; of the step's probabilities */
    uint32_t q[K_STEPS][2];       /* the queries, as B operands */
    int full_first, full_end;     /* of the CTA's share, all queries see the keys between */
    row_keys seen;                /* those that the lane's two queries see, of the CTA's share */
#if TERMS
    row_terms terms[2]; /* of the lane's two queries */
    int key_end;        /* one past the last key that exists */
#endif
    float scale_log2;
    uint32_t slot_at[WARP_UNITS], sent_at[WARP_UNITS]; /* of a unit, in the owner: where its sums go, its barrier */
} worker;

/* Of the lane's two columns. */
typedef struct softmax_state {
    float reference[2]; /* the maximum of the scores so far */
    float sum[2];       /* of the lane's own exponentials; in the end of all */
} softmax_state;

/* Where a step's blocks are: `stage` is its first's, `parity` that of its barriers' phase. */
typedef struct stage_use {
    int stage, parity;
} stage_use;

DEV stage_use use_of(const stage_use &first, int block)
{
    const int stage = first.stage + block, wraps = stage >= STAGES;
    return {wraps ? stage - STAGES : stage, first.parity ^ wraps};
}

#if !PAGED
DEV void wait_full(const ring &r, const stage_use &t)
{
    barrier_wait(r.barriers + t.stage * BARRIER_BYTES, t.parity);
}
#endif

/* Where a row's 16 bytes are in a block, swizzled as TMA does it. */
DEV uint32_t chunk_at(int row, int chunk)
{
    return chunk / 8 * PANEL_BYTES + row * ROW_BYTES + ((chunk ^ row) & 7) * CHUNK_BYTES;
}

DEV void make_worker(worker &w, const fwd_args &a, shared_memory &m, int warp, int lane)
{
    const int warps_of_units = UNITS / WARP_UNITS;
    w.warp = warp;
    w.lane = lane;
    w.unit = warp % warps_of_units * WARP_UNITS;
    w.half = warp / warps_of_units;
#pragma unroll
    for (int step = 0; step < 4; step++)
        w.k_at[step] = chunk_at(warp * WARP_KEYS % KV_TILE + lane % 16, 2 * step + lane / 16);
    w.v_at = chunk_at(lane / 16 * 8 + lane % 8, 2 * w.unit + lane / 8 % 2);
    w.p_at = smem_address(&m.p[lane]);
    w.scale_log2 = score_scale_log2(a);
#pragma unroll
    for (int u = 0; u < WARP_UNITS; u++) {
        const int unit = w.unit + u, owner = (unit << log_ctas()) / UNITS;
        const unit_sums &slot = m.inbox[slot_of((int)blockIdx.x, w.half, unit - first_unit(owner))];
        w.slot_at[u] = cluster_address(smem_address(&slot), owner);
        w.sent_at[u] = cluster_address(smem_address(&m.all_sent), owner);
    }
}

DEV void load_operands(worker &w, const shared_memory &m)
{
    const uint32_t at = smem_address(m.q) + w.lane % 8 * Q_ROW_BYTES + w.lane / 8 * CHUNK_BYTES;
#pragma unroll
    for (int step = 0; step < K_STEPS; step += 2) {
        uint32_t x[4];
        load_matrices(x, at + 2 * step * CHUNK_BYTES);
        w.q[step][0] = x[0];
        w.q[step][1] = x[1];
        w.q[step + 1][0] = x[2];
        w.q[step + 1][1] = x[3];
    }
}

/* s = K * transpose(Q) for the warp's keys of a block. */
DEV void multiply_scores(score_tile &s, const worker &w, uint32_t block)
{
    float sums[KEY_TILES][CHAINS][4] = {};
#pragma unroll
    for (int step = 0; step < K_STEPS; step++)
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            uint32_t k[4];
            load_matrices(k, block + w.k_at[step % 4] + step / 4 * PANEL_BYTES + n * 16 * ROW_BYTES);
            multiply_add<BF16>(sums[n][step % CHAINS], k, w.q[step][0], w.q[step][1]);
        }
#pragma unroll
    for (int i = 0; i < KEY_TILES * 4; i++)
        s[i] = sums[i / 4][0][i % 4] + sums[i / 4][1][i % 4];
}

DEV float larger(float x, float y)
{
    return fmaxf(x, y);
}

DEV float add(float x, float y)
{
    return x + y;
}

typedef float combine(float, float);

/* Joins the lane's two columns with those of the 7 other lanes that hold them, and leaves the warp's values for all
 * warps, which find them behind the next barrier. */
template <combine OPERATION> DEV void leave_columns(float (&to)[Q_TILE][WARPS], const float (&x)[2], const worker &w)
{
    const int odd = w.lane & 4;
    float joined = OPERATION(odd ? x[1] : x[0], __shfl_xor_sync(~0u, odd ? x[0] : x[1], 4));
    joined = OPERATION(joined, __shfl_xor_sync(~0u, joined, 8));
    joined = OPERATION(joined, __shfl_xor_sync(~0u, joined, 16));
    if (w.lane < Q_TILE)
        to[2 * (w.lane % 4) + w.lane / 4][w.warp] = joined;
}

template <combine OPERATION> DEV float over_warps(const float (&row)[WARPS])
{
    const float4 low = *(const float4 *)&row[0], high = *(const float4 *)&row[4];
    return OPERATION(OPERATION(OPERATION(low.x, low.y), OPERATION(low.z, low.w)),
                     OPERATION(OPERATION(high.x, high.y), OPERATION(high.z, high.w)));
}

/* Makes the maxima of all warps the references, and scales what was summed up relative to the old ones. */
template <bool FIRST>
DEV void move_references(softmax_state &state, output_tile &o, const shared_memory &m, const worker &w)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float max = over_warps<larger>(m.max[2 * (w.lane % 4) + h]);
        const float reference = FIRST ? max : fmaxf(state.reference[h], max);
        if (!FIRST) {
            const float correction = exp2_fast((state.reference[h] - finite_max(reference)) * w.scale_log2);
            state.sum[h] *= correction;
#pragma unroll
            for (int u = 0; u < WARP_UNITS; u++)
#pragma unroll
                for (int c = 0; c < CHAINS; c++) {
                    o[u][c][h] *= correction;
                    o[u][c][h + 2] *= correction;
                }
        }
        state.reference[h] = reference;
    }
}

/* Turns the warp's scores into probabilities relative to the references, for all warps. */
DEV void leave_probabilities(shared_memory &m, softmax_state &state, const score_tile &s, const worker &w)
{
    const float offset[2] = {offset_of(state.reference[0], w.scale_log2), offset_of(state.reference[1], w.scale_log2)};
    uint32_t *to = (uint32_t *)&m.p[w.warp * WARP_KEYS + w.lane / 4][2 * (w.lane % 4)];
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const float even = exp2_fast(exponent_of(s[4 * n + e], w.scale_log2, offset[0])),
                        odd = exp2_fast(exponent_of(s[4 * n + e + 1], w.scale_log2, offset[1]));
            state.sum[0] += even;
            state.sum[1] += odd;
            to[(16 * n + e / 2 * 8) * Q_TILE / 2] = pack<BF16>(even, odd);
        }
}

typedef uint32_t probability_tile[4]; /* B operands for PV_KEYS keys */

DEV void load_probabilities(probability_tile &p, const worker &w, int tile)
{
    load_matrices_transposed(p, w.p_at + tile * PV_KEYS * Q_TILE * ELEM_BYTES);
}

/* o += transpose(V) * P for one tile of a step's keys; `block` is the one that holds them. */
DEV void multiply_values(output_tile &o, const worker &w, const probability_tile &p, uint32_t block, int tile)
{
#pragma unroll
    for (int part = 0; part < 2; part++)
#pragma unroll
        for (int u = 0; u < WARP_UNITS; u++) {
            uint32_t v[4];
            const uint32_t at = WARP_UNITS == 1 ? w.v_at : w.v_at ^ (u * 2 * CHUNK_BYTES);
            load_matrices_transposed(v, block + at + (tile * PV_KEYS % KV_TILE + part * 16) * ROW_BYTES);
            multiply_add<BF16>(o[u][part], v, p[2 * part], p[2 * part + 1]);
        }
}

#if !PAGED
/* Clears the warp's dims of V from a key of the tile on: those rows are nobody's, and may hold anything. */
DEV void clear_values(uint32_t block, int tile, int keys, const worker &w)
{
    for (int i = w.lane; i < (PV_KEYS - keys) * 2 * WARP_UNITS; i += WARP_THREADS) {
        const int row = tile * PV_KEYS % KV_TILE + keys + i / (2 * WARP_UNITS);
        store_shared_4(block + chunk_at(row, 2 * w.unit + i % (2 * WARP_UNITS)), 0, 0, 0, 0);
    }
    __syncwarp();
}
#endif

/* A step: STEP_KEYS keys from `first` on, or those that are left. Code for the first and for the others: the first is
 * all of a short problem. */
template <bool FIRST>
DEV void attend_step(output_tile &o, softmax_state &state, shared_memory &m, const fwd_args &a, step_loader &l,
                     const worker &w, const stage_use &t, int first)
{
    const int key = first + w.warp * WARP_KEYS, left = l.keys.end - first;
    score_tile s;
    float max[2] = {-CUDART_INF_F, -CUDART_INF_F};
#if PAGED
    COPIES_WAIT(1); /* the warp's K */
    __syncwarp();
#endif
    if (key < l.keys.end) {
        const stage_use at = use_of(t, w.warp * WARP_KEYS / KV_TILE);
#if !PAGED
        wait_full(l.k, at);
#endif
        multiply_scores(s, w, l.k.smem + at.stage * BLOCK_BYTES);
        const bool masked = key < w.full_first || key + WARP_KEYS > w.full_end;
#if TERMS
        finish_scores<TRANSPOSED>(s, w.seen, key, masked, a, w.terms, w.lane / 4, w.key_end);
#else
        finish_transposed_scores(s, w.seen, key, masked);
#endif
#pragma unroll
        for (int i = 0; i < KEY_TILES * 4; i++)
            max[i % 2] = fmaxf(max[i % 2], s[i]);
    } else if (WARP_KEYS < PV_KEYS) {
#pragma unroll
        for (int i = 0; i < KEY_TILES * 4; i++)
            s[i] = -CUDART_INF_F;
    }
    leave_columns<larger>(m.max, max, w);
    ACR_TRACE_POINT(0, "scores");
    __syncthreads(); /* K has been read */
#if PAGED
    if (left > STEP_KEYS)
        advance_pages(l.cursor);
    load_own_keys(l, l.k, first + STEP_KEYS, w.warp, w.lane);
#else
    const int block_after = (first - l.keys.first) / KV_TILE + STAGES + w.warp;
    if (left > STAGES * KV_TILE && w.warp < STEP_BLOCKS && elect_one())
        load_block(l, l.k, block_after, use_of(t, w.warp).stage);
#endif
    move_references<FIRST>(state, o, m, w);
    if (first + w.warp * WARP_KEYS / PV_KEYS * PV_KEYS < l.keys.end) /* all that are read together */
        leave_probabilities(m, state, s, w);
    if (left <= STEP_KEYS)
        leave_columns<add>(m.sum, state.sum, w);
    ACR_TRACE_POINT(0, "probabilities");
#if PAGED
    COPIES_WAIT(1); /* the warp's V; behind the barrier, all warps' */
#endif
    __syncthreads();
    if (left <= STEP_KEYS)
#pragma unroll
        for (int h = 0; h < 2; h++)
            state.sum[h] = over_warps<add>(m.sum[2 * (w.lane % 4) + h]);
    if (left >= STEP_KEYS) {
        probability_tile p[PV_TILES / HALVES];
#pragma unroll
        for (int i = 0; i < PV_TILES / HALVES; i++)
            load_probabilities(p[i], w, i * HALVES + w.half);
#if !PAGED
#pragma unroll
        for (int block = 0; block < STEP_BLOCKS; block++)
            wait_full(l.v, use_of(t, block));
#endif
#pragma unroll
        for (int i = 0; i < PV_TILES / HALVES; i++) {
            const int tile = i * HALVES + w.half;
            multiply_values(o, w, p[i], l.v.smem + use_of(t, i * HALVES * PV_KEYS / KV_TILE).stage * BLOCK_BYTES, tile);
        }
    } else {
#pragma unroll 1
        for (int tile = w.half; tile * PV_KEYS < left; tile += HALVES) {
            const stage_use at = use_of(t, tile * PV_KEYS / KV_TILE);
            const uint32_t block = l.v.smem + at.stage * BLOCK_BYTES;
            probability_tile p;
            load_probabilities(p, w, tile);
#if !PAGED
            wait_full(l.v, at);
            if (left < (tile + 1) * PV_KEYS)
                clear_values(block, tile, left - tile * PV_KEYS, w);
#endif
            multiply_values(o, w, p, block, tile);
        }
    }
    ACR_TRACE_POINT(0, "output");
    if (left > STEP_KEYS) {
        __syncthreads(); /* V and the probabilities have been read */
#if PAGED
        load_own_keys(l, l.v, first + STEP_KEYS, w.warp, w.lane);
#else
        if (w.warp < STEP_BLOCKS && elect_one())
            load_block(l, l.v, block_after, use_of(t, w.warp).stage);
#endif
    }
}

/* ---- The cluster's sums ---- */

/* Gives the warp's sums to the CTAs that own them. A CTA alone is its own, and no cluster: nothing can be sent. */
DEV void hand_over(const output_tile &o, const softmax_state &state, shared_memory &m, const group_tile &t,
                   const worker &w)
{
    const float4 statistics = make_float4(state.reference[0], state.sum[0], state.reference[1], state.sum[1]);
#pragma unroll
    for (int u = 0; u < WARP_UNITS; u++) {
        const float4 sums = make_float4(o[u][0][0] + o[u][1][0], o[u][0][1] + o[u][1][1], o[u][0][2] + o[u][1][2],
                                        o[u][0][3] + o[u][1][3]);
        if (gridDim.x == 1) {
            unit_sums &slot = m.inbox[slot_of(0, w.half, w.unit + u)];
            *(float4 *)slot.o[w.lane] = sums;
            if (w.lane < 4)
                *(float4 *)slot.statistics[w.lane] = statistics;
        } else if (2 * (w.lane % 4) < t.rows) {
            cluster_send(w.slot_at[u] + w.lane * 16, sums, w.sent_at[u]);
            if (w.lane < 4)
                cluster_send(w.slot_at[u] + (uint32_t)offsetof(unit_sums, statistics) + w.lane * 16, statistics,
                             w.sent_at[u]);
        }
    }
}

/* Where a lane of a warp that owns a unit stores: 4 dims of a row. */
typedef struct target {
    int present;
    char *o;
    float *lse;
    int head, position, unit;
} target;

DEV target find_target(const fwd_args &a, const group_tile &t, int warp, int lane)
{
    const group_row at = find_row(a, t, lane / 4);
    target to = {lane / 4 < t.rows, nullptr, nullptr, at.head, at.position, first_unit(blockIdx.x) + warp};
    const int dim = to.unit * UNIT_DIMS + 4 * (lane % 4);
    to.o = (char *)a.o + (group_output_index(a, t, at) + dim) * ELEM_BYTES;
    if (dim >= a.v_dim)
        to.o = nullptr;
    if (a.lse != nullptr && dim == 0)
        to.lse = group_lse(a, t, at);
    /* now, not when they are needed: the first read of a parameter takes as long as one of L2 */
    asm volatile("" : "+l"(to.o), "+l"(to.lse), "+r"(to.present));
    return to;
}

/* What the unit's warp adds up from all CTAs. */
typedef struct total {
    float o[4], reference, sum;
} total;

template <int CTAS> DEV total add_up(const shared_memory &m, int warp, int lane, float scale_log2)
{
    const int row = lane / 4, dim = 4 * (lane % 4);
    const float *first = &m.inbox[warp].o[dim % 8 * 4 + row / 2][row % 2 + dim / 8 * 2];
    const float *first_statistics = &m.inbox[warp].statistics[row / 2][row % 2 * 2];
    const int slots = CTAS > UNITS ? HALVES : HALVES * (UNITS / CTAS), slot_elems = sizeof(unit_sums) / 4;
    total t = {{0.0f, 0.0f, 0.0f, 0.0f}, -CUDART_INF_F, 0.0f};
    float2 statistics[CTAS];
#pragma unroll
    for (int cta = 0; cta < CTAS; cta++) {
        statistics[cta] = *(const float2 *)(first_statistics + cta * slots * slot_elems);
        t.reference = fmaxf(t.reference, statistics[cta].x);
    }
#pragma unroll
    for (int cta = 0; cta < CTAS; cta++) {
        const float weight = exp2_fast((statistics[cta].x - finite_max(t.reference)) * scale_log2);
        t.sum += weight * statistics[cta].y;
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                t.o[i] += weight * first[(cta * slots + half * (slots / HALVES)) * slot_elems + i * 16];
    }
    return t;
}

/* The NaN fix-up of the rows that the warp has stored; of the unit's dims alone: the others are other warps'. */
DEV void fix_unit(const fwd_args &a PAGING_PARAMETER, const group_tile &t, const visible_entry &entry, const target &to,
                  const total &sums, int finite, int lane)
{
    fwd_args own = a;
    own.o = (char *)a.o + to.unit * UNIT_DIMS * ELEM_BYTES;
    own.v = (const char *)a.v + to.unit * UNIT_DIMS * ELEM_BYTES;
    own.v_dim = min((int)UNIT_DIMS, a.v_dim - to.unit * UNIT_DIMS);
    const float scale_log2 = score_scale_log2(a);
    stored_row stored = {
        t.batch, to.head,    to.present ? to.position : a.q_len,    0,
        0,       scale_log2, offset_of(sums.reference, scale_log2), row_factor(a, to.head, sums.reference, sums.sum)};
#if PAGED
    stored.q_begin = t.q_begin;
    fix_paged_nan<ELEMENT>(own, pages_of_entry(a, paging, t.batch), entry, stored, sums.sum, finite, lane);
#else
    fix_hidden_nan<ELEMENT>(own, entry, stored, sums.sum, finite, lane);
#endif
}

/* Adds up a unit's sums from all CTAs and stores it. */
DEV void finish(const fwd_args &a PAGING_PARAMETER, const group_tile &t, const visible_entry &entry,
                const shared_memory &m, const target &to, int warp, int lane)
{
    const int ctas = (int)gridDim.x;
    const float scale_log2 = score_scale_log2(a);
    const total sums = ctas == 8   ? add_up<8>(m, warp, lane, scale_log2)
                       : ctas == 4 ? add_up<4>(m, warp, lane, scale_log2)
                       : ctas == 2 ? add_up<2>(m, warp, lane, scale_log2)
                                   : add_up<1>(m, warp, lane, scale_log2);
    const float factor = row_factor(a, to.head, sums.reference, sums.sum);
    float o[4], probe = 0.0f; /* NaN when a value is not finite */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        o[i] = sums.o[i] * factor;
        probe += o[i] * 0.0f;
    }
    if (to.present && to.o != nullptr)
        *(uint2 *)to.o = make_uint2(pack<BF16>(o[0], o[1]), pack<BF16>(o[2], o[3]));
    ACR_TRACE_POINT(0, "stored");
    if (to.present && to.lse != nullptr)
        *to.lse = row_lse(a, to.head, sums.reference, sums.sum);
    fix_unit(a PAGING_ARGUMENT, t, entry, to, sums, !to.present || probe == 0.0f, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
#if PAGED
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_paging paging)
#else
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_maps maps)
#endif
{
    extern __shared__ __align__(1024) unsigned char memory[];
    shared_memory &m = *(shared_memory *)memory;
    const int warp = __shfl_sync(~0u, threadIdx.x / WARP_THREADS, 0), lane = threadIdx.x % WARP_THREADS;
    ACR_TRACE_POINT(0, "start");
    wait_for_previous_kernel();
    const group_tile t = find_tile(a);
#if PAGED
    if (t.rows <= 0) /* of all CTAs of the cluster */
        return;
    const visible_entry entry = entry_of(a, find_cached_sequence(a, t.batch));
    const visible_keys visible = visible_to_tile(a, entry, t);
    loader l = {{smem_address(m.k), paged_matrix_of(a.k, a.k_stride, t.kv_head, a.qk_dim, ELEM_BYTES)},
                {smem_address(m.v), paged_matrix_of(a.v, a.v_stride, t.kv_head, a.v_dim, ELEM_BYTES)},
                find_share(visible)};
    l.cursor =
        start_pages(pages_of_entry(a, paging, t.batch), l.keys.first + warp * WARP_KEYS, l.keys.end, STEP_KEYS, lane);
    load_own_keys(l, l.k, l.keys.first, warp, lane);
    load_own_keys(l, l.v, l.keys.first, warp, lane);
    if (warp >= STEP_BLOCKS) {
#else
    const visible_entry entry = entry_of_batch(a, t.batch);
    const visible_keys visible = visible_to_tile(a, entry, t);
    const loader l = {{smem_address(m.k), smem_address(m.k_full), &maps.k},
                      {smem_address(m.v), smem_address(m.v_full), &maps.v},
                      {t.kv_head, t.batch, 0},
                      find_share(visible)};
    if (warp < STEP_BLOCKS) {
        if (elect_one()) {
            start_ring(l, l.k, warp);
            start_ring(l, l.v, warp);
            fill_ring(l, l.k, warp);
            fill_ring(l, l.v, warp);
        }
    } else {
#endif
        load_queries(m, a, t);
        if (warp == WARPS - 1 && elect_one()) {
            barrier_init(smem_address(&m.all_sent), 1);
            barrier_init_done();
            barrier_arrive_expecting(smem_address(&m.all_sent), owns_units() ? sent_bytes(t) : 0);
        }
    }
    __syncwarp();
    cluster_arrive_relaxed();
    ACR_TRACE_POINT(0, "loads asked for");
    worker w;
    make_worker(w, a, m, warp, lane);
    w.full_first = visible.full_first;
    w.full_end = min(visible.full_end, l.keys.end);
    w.seen = {{-(lane / 4), -(lane / 4)}, {l.keys.end - lane / 4, l.keys.end - lane / 4}, false};
    if (hides_keys(a, entry)) {
        w.seen = find_row_keys(a, entry, t.batch, find_row(a, t, 2 * (lane % 4)).position,
                               find_row(a, t, 2 * (lane % 4) + 1).position, lane / 4);
        end_row_keys(w.seen, l.keys.end - lane / 4);
    }
#if TERMS
    w.terms[0] = find_group_terms(a, entry, t, find_row(a, t, 2 * (lane % 4)));
    w.terms[1] = find_group_terms(a, entry, t, find_row(a, t, 2 * (lane % 4) + 1));
    w.key_end = entry.kv_len;
#endif
    softmax_state state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    const target to = find_target(a, t, warp, lane);
    __syncthreads();
    load_operands(w, m);
    cluster_wait(); /* the others have begun: their inboxes exist */
    ACR_TRACE_POINT(0, "cluster ready");

    output_tile o = {};
    if (l.keys.first < l.keys.end)
        attend_step<true>(o, state, m, a, l, w, {0, 0}, l.keys.first);
    stage_use use = {0, 0};
    for (int first = l.keys.first + STEP_KEYS; first < l.keys.end; first += STEP_KEYS) {
        use = use_of(use, STEP_BLOCKS);
        attend_step<false>(o, state, m, a, l, w, use, first);
    }
    allow_next_kernel();
    hand_over(o, state, m, t, w);
    ACR_TRACE_POINT(0, "sums handed over");
    if (gridDim.x == 1)
        __syncthreads();
    if (owns_units() && warp < units_each()) {
        if (gridDim.x > 1)
            barrier_wait_cluster(smem_address(&m.all_sent), 0);
        ACR_TRACE_POINT(0, "all sums here");
        finish(a PAGING_ARGUMENT, t, entry, m, to, warp, lane);
    }
    ACR_TRACE_END(a);
}

#else

#include <math.h>

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {
    .work = ACR__WORK_HEAD_ROWS, .q_tile = Q_TILE, .threads = THREADS, .smem_bytes = SMEM_BYTES, .caches_only = PAGED};

#include "cuda/model/tile_kernel.h"

/* The clusters that run at once with so many CTAs beside each other on an SM: those of 4 and 8 leave SMs over, since a
 * cluster does not reach beyond its GPC. */
static double clusters_at_once(int64_t ctas, const acr__device *device, int32_t ctas_per_sm)
{
    const double sms = (double)device->sm_count / (double)ctas;
    return fmax(1.0, floor(ctas_per_sm * sms * (ctas > 2 ? 0.91 : 1.0)));
}

/* Without the launch. Fitted to runs on an H200 (README.md). */
static double cluster_seconds(const acr_problem *problem, const acr__device *device, int64_t ctas)
{
    const double clock_hz = 0.89 * device->clock_hz; /* what the power limit leaves of it */
    const double tiles = (double)(acr__row_tiles(problem, Q_TILE) * problem->kv_heads * problem->batch);
    const double cta_keys = 32.0 * ceil((double)problem->kv_len / (32.0 * (double)ctas));
    const double cta_bytes = cta_keys * (double)(problem->qk_dim + problem->v_dim) * ELEM_BYTES;
    const double at_once = clusters_at_once(ctas, device, tile_ctas_per_sm(device, 128));
    const double pages = PAGED ? 2800.0 : 0.0; /* the first numbers of pages, addresses */
    /* All latencies: start, end, and the first step's keys; the other steps. CTAs that share an SM slow each other. */
    const double ends = (DIM == 64 ? 4780.0 : DIM == 128 ? 5250.0 : 5400.0) - (ctas == 1 ? 300.0 : 0.0) + pages;
    const double first_step = 770.0 * fmin(cta_keys, STEP_KEYS) * DIM / (256.0 * 128.0);
    const double step = (PAGED ? 1.5 : 1.0) * (DIM == 64 ? 2380.0 : DIM == 128 ? 2700.0 : 2500.0);
    const double shared = fmin(tiles, at_once) > clusters_at_once(ctas, device, 1) ? 1.3 : 1.0;
    const double cycles = shared * (ends + first_step + step * (ceil(cta_keys / STEP_KEYS) - 1.0));
    const double rate = 0.92 * acr__memory_rate(problem, device, (double)acr__row_tiles(problem, Q_TILE));
    const double running = fmin(tiles, at_once) * (double)ctas; /* CTAs of a wave */
    const double memory = 1.5e-6 + fmax(running / rate, device->sm_count / (2.05 * rate)) * cta_bytes;
    return ceil(tiles / at_once) * fmax(cycles / clock_hz, memory);
}

static int64_t choose_ctas(const acr_problem *problem, const acr__device *device)
{
    int64_t best = CLUSTER_MIN;
    if (CLUSTER > 0)
        return CLUSTER;
    for (int64_t ctas = 2 * CLUSTER_MIN; ctas <= CLUSTER_MAX; ctas *= 2)
        if (cluster_seconds(problem, device, ctas) < cluster_seconds(problem, device, best))
            best = ctas;
    return best;
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    const uint32_t ctas = (uint32_t)choose_ctas(problem, device);
    *launch = (acr__launch){
        .grid = {ctas, (uint32_t)(acr__row_tiles(problem, Q_TILE) * problem->kv_heads), (uint32_t)problem->batch},
        .block = THREADS,
        .cluster = ctas, /* 1: none */
        .smem_bytes = SMEM_BYTES};
}

/* At full key lengths, as the other families' costs are. */
static double cost(const acr_problem *problem, const acr__device *device)
{
    return ACR__LAUNCH_SECONDS +
           tile_terms_cost(problem, TERMS) * cluster_seconds(problem, device, choose_ctas(problem, device));
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("fwd_decode", 90, 90),
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .terms = TERMS,
    .why_not = tile_why_not,
    .cost = cost,
    .shape = shape,
    .traits = PAGED ? ACR__TRAIT_PACKED : 0,
    .pages = PAGED,
    .boxes = {.k_rows = PAGED ? 0 : KV_TILE, .v_rows = PAGED ? 0 : KV_TILE},
};

#endif
