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
 * KV_TILE (keys a group takes in a step), STAGES, KV_GROUPS; optional BF16=1, SPLITS (at most so many CTAs a tile, in
 * place of the host's choice: for experiments).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES KV_GROUPS BF16=0 SPLITS=0 */
#include "fwd_args.h"

#ifndef BF16
#define BF16 0
#endif
#ifndef SPLITS
#define SPLITS 0
#endif

enum {
    ELEM_BYTES = 2,
    WARP_ROWS = 16,
    ROW_WARPS = Q_TILE / WARP_ROWS, /* warps of a group */
    GROUP_THREADS = 32 * ROW_WARPS,
    WARPS = ROW_WARPS * KV_GROUPS,
    THREADS = 32 * WARPS,
    TILE_BYTES = KV_TILE * DIM * ELEM_BYTES, /* of K, or of V */
    STAGE_BYTES = 2 * TILE_BYTES,
    Q_IN_REGISTERS = DIM <= 192, /* queries pass through the last stage of V; else they stay behind the ring */
    GROUP_BYTES = STAGES * STAGE_BYTES + (Q_IN_REGISTERS ? 0 : Q_TILE * DIM * ELEM_BYTES),
    STEP_KEYS = KV_TILE * KV_GROUPS, /* keys that the CTA takes in a step */
    SMEM_BYTES = KV_GROUPS * GROUP_BYTES,
    /* A partial result: Q_TILE rows of floats: DIM outputs, reference, sum, padding that spreads rows over banks. */
    PARTIAL_STRIDE = DIM + 8,
    PARTIAL_ELEMS = Q_TILE * PARTIAL_STRIDE,
    ROWS_MAX = SMEM_BYTES / (4 * PARTIAL_STRIDE), /* of partial results that shared memory holds */
    SPLITS_MAX = ROWS_MAX < 128 ? ROWS_MAX : 128, /* CTAs of a tile: a row of all of them must fit there */
    /* The workspace: of each tile, how many CTAs have arrived, then the partial results of all CTAs. The counters' size
     * is the same in every variant, so that variants may follow each other in one workspace. */
    COUNTERS_MAX = 4096,
    COUNTERS_BYTES = 4 * COUNTERS_MAX
};

#ifdef __CUDACC__

#include "cuda/device/isa/common.cuh"
#include "cuda/device/attention/kv_loader.cuh"
#include "cuda/device/isa/element.cuh"
#include "cuda/device/attention/visible.cuh"
#include "cuda/device/isa/mma.cuh"
#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/softmax.cuh"

enum {
    ELEMENT = BF16 ? ACR_BF16 : ACR_F16,
    ROW_CHUNKS = DIM / CHUNK_ELEMS,
    K_STEPS = DIM / 16,                            /* of a score product */
    STEPS_UNROLLED = Q_IN_REGISTERS ? K_STEPS : 4, /* register arrays need all; 4 are one period of the swizzle */
    CHAINS = KV_TILE == 16 ? 2 : 1,     /* sums that a score is made of: few accumulators would wait for each other */
    KEY_TILES = KV_TILE / 8,            /* 8-key accumulators of a score row */
    KEY_STEPS = KV_TILE / 16,           /* of an output product */
    DIM_TILES = DIM / 8,                /* 8-column accumulators of an output row */
    LANE_COLUMNS = DIM / 32,            /* of a finished row */
    REFERENCE_AT = DIM,                 /* in a row of a partial result */
    ROWS_AT_ONCE = Q_TILE == 16 ? 1 : 2 /* that a warp adds up: two hide each other's latencies */
};

static_assert(DIM % 64 == 0 && DIM <= 256, "DIM: a multiple of 64 up to 256");
static_assert(Q_TILE % WARP_ROWS == 0 && KV_TILE % 16 == 0, "Q_TILE and KV_TILE: multiples of 16");
static_assert(!Q_IN_REGISTERS || Q_TILE <= KV_TILE, "Q_TILE: the queries pass through the last stage of V");
static_assert(STAGES >= 2, "STAGES: one tile is computed on while the next is on its way");
static_assert(KV_TILE % (GROUP_THREADS / 8) == 0, "KV_TILE: rows divide evenly over a group's threads");
static_assert(4 * PARTIAL_ELEMS <= GROUP_BYTES, "a group's partial result fits into its ring");
static_assert(KV_GROUPS <= 15 || ROW_WARPS == 1, "KV_GROUPS: a named barrier each");

/* ---- Where a CTA is, and which keys are its own ---- */

/* The grid is {splits, row tiles of all key heads, batch}. */
typedef struct place {
    int row_first, rows; /* of the head's group * q_len rows, ordered by position and then by head */
    int kv_head, batch;
    int tile; /* among all tiles of the problem */
} place;

DEV place find_place(const fwd_args &a)
{
    const int head_rows = a.group * a.q_len, tiles = (head_rows + Q_TILE - 1) / Q_TILE;
    place p;
    p.kv_head = tiles == 1 ? blockIdx.y : blockIdx.y / tiles;
    p.row_first = ((int)blockIdx.y - p.kv_head * tiles) * Q_TILE;
    p.rows = min((int)Q_TILE, head_rows - p.row_first);
    p.batch = blockIdx.z;
    p.tile = (int)(blockIdx.z * gridDim.y + blockIdx.y);
    return p;
}

/* The query position of a row of the tile. Rows beyond the last count as the last. */
DEV int row_position(const fwd_args &a, const place &p, int row)
{
    return a.q_len == 1 ? 0 : min(p.row_first + row, a.group * a.q_len - 1) / a.group;
}

/* The keys that the tile's rows see, divided evenly over as many of its CTAs as then have some: so all share the work
 * of a batch entry with few keys. */
typedef struct share {
    int first, end;
    int steps, steps_each; /* of all CTAs of the tile; of one */
} share;

DEV int divide_up(int a, int b)
{
    return (a + b - 1) / b;
}

DEV share find_share(const keys &visible)
{
    share s;
    s.steps = (visible.end + STEP_KEYS - 1) / STEP_KEYS;
    s.steps_each = max(1, divide_up(s.steps, (int)gridDim.x));
    s.first = min((int)blockIdx.x * s.steps_each * STEP_KEYS, visible.end);
    s.end = min(s.first + s.steps_each * STEP_KEYS, visible.end);
    return s;
}

typedef struct lane_place {
    int lane, group;
    int thread; /* of the group */
    int row;    /* of the warp's first row within the tile */
} lane_place;

/* A group of one warp runs ahead of the others as far as its ring allows. */
DEV void group_sync(int group)
{
    if (ROW_WARPS == 1)
        __syncwarp();
    else /* barrier 0 is __syncthreads's */
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"((int)GROUP_THREADS) : "memory");
}

/* ---- Loading ---- */

enum {
    LOAD_LANES = 8, /* threads side by side in a row: 128 bytes */
    LOAD_ROWS = GROUP_THREADS / LOAD_LANES
};

DEV chunk_matrix find_matrix(const void *tensor, const fwd_strides &strides, int batch, int head, int dim)
{
    return {(const char *)tensor + (batch * strides.batch + head * strides.head) * ELEM_BYTES, strides.row * ELEM_BYTES,
            dim / CHUNK_ELEMS};
}

/* Starts copying keys [first, first + KV_TILE) of K or V; what lies at or beyond `end` becomes zeros. READ_ONCE: nobody
 * else reads them. */
template <bool READ_ONCE> DEV void load_keys(uint32_t tile, const chunk_matrix &m, int first, int end, int thread)
{
    const int row = thread / LOAD_LANES, chunk = thread % LOAD_LANES;
    const char *from = m.base + (first + row) * m.row_bytes + chunk * CHUNK_BYTES;
    const uint64_t policy = READ_ONCE ? policy_read_once() : 0;
#pragma unroll
    for (int r = 0; r < KV_TILE; r += LOAD_ROWS) {
        const bool row_valid = first + row + r < end;
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c += LOAD_LANES) {
            const uint32_t to = tile + chunk_offset(row + r, chunk + c, ROW_CHUNKS);
            const bool valid = row_valid && chunk + c < m.chunks;
            if (READ_ONCE)
                copy_chunk_async_by(to, from + c * CHUNK_BYTES, valid, policy);
            else
                copy_chunk_async(to, from + c * CHUNK_BYTES, valid);
        }
        from += LOAD_ROWS * m.row_bytes;
    }
}

/* Rows of padding keep what shared memory holds: no row of a product depends on another. */
DEV void load_queries(uint32_t tile, const fwd_args &a, const place &p, int thread)
{
    const chunk_matrix m =
        find_matrix(a.q, a.q_stride, p.batch, p.kv_head * a.group, a.qk_dim); /* of the group's first head */
    const int chunk = thread % LOAD_LANES;
#pragma unroll
    for (int r = 0; r < Q_TILE; r += LOAD_ROWS) {
        const int row = r + thread / LOAD_LANES;
        if (row >= p.rows)
            break;
        const int position = row_position(a, p, row), head = p.row_first + row - position * a.group;
        const char *from = m.base + position * m.row_bytes + head * a.q_stride.head * ELEM_BYTES + chunk * CHUNK_BYTES;
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c += LOAD_LANES)
            copy_chunk_async(tile + chunk_offset(row, chunk + c, ROW_CHUNKS), from + c * CHUNK_BYTES,
                             chunk + c < m.chunks);
    }
}

/* What a group loads, tile by tile, K and V separately; nothing beyond the last tile. */
typedef struct key_loader {
    chunk_matrix matrix;
    uint32_t ring; /* of K or V: the first stage's half */
    int thread;
    bool read_once; /* one tile of rows: no other CTA reads these keys */
    int first;      /* key of the next tile to load */
    int end;        /* one past the last key to load */
} key_loader;

DEV void load_next(key_loader &loader, int stage)
{
    const uint32_t tile = loader.ring + stage * STAGE_BYTES;
    if (loader.first < loader.end) {
        if (loader.read_once)
            load_keys<true>(tile, loader.matrix, loader.first, loader.end, loader.thread);
        else
            load_keys<false>(tile, loader.matrix, loader.first, loader.end, loader.thread);
    }
    loader.first += STEP_KEYS;
}

/* ---- Computing: one warp, 16 rows. Arrays are in registers, laid out as device/isa/mma.cuh says. ---- */

typedef float score_tile[KEY_TILES][4];
typedef float output_tile[DIM_TILES][4];
typedef uint32_t probability_tile[KEY_STEPS][4];
typedef uint32_t query_operands[K_STEPS][4]; /* unused where they are read from shared memory every time */

/* Per row that a lane holds: [0] row lane/4, [1] row lane/4 + 8. */
typedef struct softmax_state {
    float reference[2]; /* what exponentials are relative to: a score that was the row's maximum and is exceeded only by
                           little */
    float sum[2];       /* of this lane's exponentials; lanes of a quad are added at the end */
} softmax_state;

DEV void load_query(uint32_t (&q)[4], uint32_t q_smem, const lane_place &l, int step)
{
    load_matrices(q, q_smem + chunk_offset(l.row + l.lane % 16, 2 * step + l.lane / 16, ROW_CHUNKS));
}

/* s = Q * transpose(K) for a tile of keys. */
DEV void multiply_scores(score_tile &s, const query_operands &q, uint32_t q_smem, uint32_t k_smem, const lane_place &l)
{
    const int lane = l.lane;
    score_tile sums[CHAINS];
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int c = 0; c < CHAINS; c++)
                sums[c][n][e] = 0.0f;
#pragma unroll STEPS_UNROLLED
    for (int step = 0; step < K_STEPS; step++) {
        uint32_t a[4];
        if (Q_IN_REGISTERS)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = q[step][i];
        else
            load_query(a, q_smem, l, step);
#pragma unroll
        for (int n = 0; n < KEY_TILES; n += 2) { /* 16 keys: matrices {n, low dims} {n, high} {n+1, low} {n+1, high} */
            uint32_t k[4];
            load_matrices(k,
                          k_smem + chunk_offset(8 * n + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2, ROW_CHUNKS));
            multiply_add<BF16>(sums[step % CHAINS][n], a, k[0], k[1]);
            multiply_add<BF16>(sums[step % CHAINS][n + 1], a, k[2], k[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = CHAINS == 1 ? sums[0][n][e] : sums[0][n][e] + sums[CHAINS - 1][n][e];
}

/* Sets the scores of keys that a row does not see to -inf. seen is relative to the tile's first key. */
DEV void mask_scores(score_tile &s, const int (&seen)[2], int lane)
{
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (8 * n + 2 * (lane % 4) + e % 2 >= seen[e / 2])
                s[n][e] = -CUDART_INF_F;
}

/* By how many powers of two an exponential may exceed that of its row's reference: sums and products of such stay far
 * from the end of fp16's and float's range. */
#define REFERENCE_SLACK 8.0f

/* Makes its maximum the reference of each row that exceeded it by more than the slack, and scales sum and output
 * accordingly. The other rows of the warp keep theirs: what a row gives depends on no other. */
DEV void move_references(softmax_state &state, output_tile &o, const float (&max)[2], float scale_log2)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float old = state.reference[h], row_max = quad_max(max[h]);
        const float reference = (row_max - old) * scale_log2 > REFERENCE_SLACK ? row_max : old;
        const float correction = exp2_fast((state.reference[h] - finite_max(reference)) * scale_log2);
        state.reference[h] = reference;
        state.sum[h] *= correction;
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++) {
            o[n][2 * h] *= correction;
            o[n][2 * h + 1] *= correction;
        }
    }
}

/* Turns scores into probabilities relative to the references, which move only when a score exceeds one by more than the
 * slack: then no lane needs another's maximum, and the output no scaling, in most steps. Padding, which holds anything,
 * moves none. */
DEV void update_softmax(probability_tile &p, softmax_state &state, output_tile &o, const score_tile &s,
                        const bool (&is_row)[2], float scale_log2)
{
    float max[2];
    bool exceeded = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        max[h] = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < KEY_TILES; n++)
            max[h] = fmaxf(max[h], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        exceeded |= is_row[h] && (max[h] - state.reference[h]) * scale_log2 > REFERENCE_SLACK; /* not (-inf) - (-inf) */
    }
    if (__any_sync(~0u, exceeded))
        move_references(state, o, max, scale_log2);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float subtrahend = finite_max(state.reference[h]) * scale_log2;
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            const float even = exp2_fast(s[n][2 * h] * scale_log2 - subtrahend);
            const float odd = exp2_fast(s[n][2 * h + 1] * scale_log2 - subtrahend);
            state.sum[h] += even + odd;
            p[n / 2][h + 2 * (n % 2)] = pack<BF16>(even, odd);
        }
    }
}

/* o += P * V */
DEV void accumulate(output_tile &o, const probability_tile &p, uint32_t v_smem, int lane)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++)
#pragma unroll
        for (int n = 0; n < DIM_TILES; n += 2) {
            uint32_t v[4];
            load_matrices_transposed(v, v_smem + chunk_offset(16 * step + lane % 16, n + lane / 16, ROW_CHUNKS));
            multiply_add<BF16>(o[n], p[step], v[0], v[1]);
            multiply_add<BF16>(o[n + 1], p[step], v[2], v[3]);
        }
}

/* What a warp's group has under way. */
typedef struct pipeline {
    key_loader k, v;
    uint32_t q_smem;
} pipeline;

/* Starts the loads of the first stages. Groups of copies: {K 0, Q}, V 0, K 1, ... V STAGES-2, K STAGES-1; then one in
 * every half step. Not unrolled: code that runs once costs the time to fetch it. */
DEV pipeline start_loads(const fwd_args &a, const place &p, const share &s, const lane_place &l, uint32_t ring)
{
    const bool read_once = a.group * a.q_len <= Q_TILE;
    const int first = s.first + l.group * KV_TILE;
    pipeline x = {{find_matrix(a.k, a.k_stride, p.batch, p.kv_head, a.qk_dim), ring, l.thread, read_once, first, s.end},
                  {find_matrix(a.v, a.v_stride, p.batch, p.kv_head, a.v_dim), ring + TILE_BYTES, l.thread, read_once,
                   first, s.end},
                  Q_IN_REGISTERS ? ring + TILE_BYTES + (STAGES - 1) * STAGE_BYTES : ring + STAGES * STAGE_BYTES};
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) {
        load_next(x.k, stage);
        if (stage == 0)
            load_queries(x.q_smem, a, p, l.thread);
        copies_commit();
        if (stage < STAGES - 1) {
            load_next(x.v, stage);
            copies_commit();
        }
    }
    return x;
}

/* Runs a warp through its group's tiles of keys. Copies are in flight up to the stage that is computed on: a half of a
 * stage is filled again as soon as the group has read it. */
DEV void attend(output_tile &o, softmax_state &state, pipeline &x, const fwd_args &a, const place &p,
                const keys &visible, const share &s, const lane_place &l)
{
    const int positions[2] = {row_position(a, p, l.row + l.lane / 4), row_position(a, p, l.row + l.lane / 4 + 8)};
    const bool is_row[2] = {l.row + l.lane / 4 < p.rows, l.row + l.lane / 4 + 8 < p.rows};
    COPIES_WAIT(2 * STAGES - 2);
    group_sync(l.group);
    query_operands q;
    if (Q_IN_REGISTERS)
#pragma unroll
        for (int step = 0; step < K_STEPS; step++)
            load_query(q[step], x.q_smem, l, step);

    int stage = 0;
    for (int key = s.first + l.group * KV_TILE; key < s.end; key += STEP_KEYS) {
        COPIES_WAIT(2 * STAGES - 2);
        group_sync(l.group); /* this K has landed for all, and all have left the V before */
        load_next(x.v, stage == 0 ? STAGES - 1 : stage - 1);
        copies_commit();
        score_tile scores;
        multiply_scores(scores, q, x.q_smem, x.k.ring + stage * STAGE_BYTES, l);
        if (key + KV_TILE > visible.full_end) {
            const int seen[2] = {keys_seen(a, visible, positions[0]) - key, keys_seen(a, visible, positions[1]) - key};
            mask_scores(scores, seen, l.lane);
        }
        probability_tile probabilities;
        update_softmax(probabilities, state, o, scores, is_row, a.scale_log2);
        COPIES_WAIT(2 * STAGES - 2);
        group_sync(l.group); /* this V has landed for all, and all have left the K */
        load_next(x.k, stage);
        copies_commit();
        accumulate(o, probabilities, x.v.ring + stage * STAGE_BYTES, l.lane);
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

/* Leaves a warp's part of its group's result in shared memory. */
DEV void publish(float *partial, const output_tile &o, const softmax_state &state, const lane_place &l)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float *row = partial + (l.row + l.lane / 4 + 8 * h) * PARTIAL_STRIDE;
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++)
            *(float2 *)(row + 8 * n + 2 * (l.lane % 4)) = make_float2(o[n][2 * h], o[n][2 * h + 1]);
        const float sum = quad_sum(state.sum[h]);
        if (l.lane % 4 == 0)
            *(float2 *)(row + REFERENCE_AT) = make_float2(state.reference[h], sum);
    }
}

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

/* The sums of some rows of `count` partial results in shared memory, `stride` elements apart, in their order. */
template <int ROWS>
DEV void add_partials(row_result (&r)[ROWS], const float *const (&rows)[ROWS], int stride, int count, int lane,
                      float scale_log2)
{
#pragma unroll
    for (int k = 0; k < ROWS; k++)
        r[k] = {{}, -CUDART_INF_F, 0.0f};
#pragma unroll 4
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            r[k].reference = fmaxf(r[k].reference, rows[k][i * stride + REFERENCE_AT]);
#pragma unroll 4
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const float2 state = *(const float2 *)(rows[k] + i * stride + REFERENCE_AT);
            const float weight = exp2_fast((state.x - finite_max(r[k].reference)) * scale_log2);
            float part[LANE_COLUMNS];
            read_columns(part, rows[k] + i * stride, lane);
            r[k].sum += weight * state.y;
#pragma unroll
            for (int c = 0; c < LANE_COLUMNS; c++)
                r[k].o[c] += weight * part[c];
        }
}

/* The tile's rows in the workspace, one after the other, of each the CTAs' results side by side. */
DEV float *find_partials(const fwd_args &a, const place &p)
{
    return (float *)((char *)a.workspace + COUNTERS_BYTES) + (int64_t)p.tile * Q_TILE * (int)gridDim.x * PARTIAL_STRIDE;
}

/* Leaves a row of this CTA in the workspace. */
DEV void leave_row(const fwd_args &a, const place &p, const row_result &r, int row, int lane)
{
    float *to = find_partials(a, p) + (row * (int)gridDim.x + (int)blockIdx.x) * PARTIAL_STRIDE;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i += LANE_COLUMNS % 4 == 0 ? 4 : 2)
        if (LANE_COLUMNS % 4 == 0)
            *(float4 *)(to + LANE_COLUMNS * lane + i) = make_float4(r.o[i], r.o[i + 1], r.o[i + 2], r.o[i + 3]);
        else
            *(float2 *)(to + LANE_COLUMNS * lane + i) = make_float2(r.o[i], r.o[i + 1]);
    if (lane == 0)
        *(float2 *)(to + REFERENCE_AT) = make_float2(r.reference, r.sum);
}

/* Copies what all CTAs of the tile left of a row to shared memory, past L1; by the warp that needs it. */
DEV void fetch_row(uint32_t smem, const float *row, int splits, int lane)
{
#pragma unroll 4
    for (int i = lane; i < splits * PARTIAL_STRIDE * 4 / CHUNK_BYTES; i += WARP_THREADS)
        copy_chunk_async(smem + i * CHUNK_BYTES, row + i * (CHUNK_BYTES / 4), 1);
}

/* Where a row of the tile is in the problem. */
typedef struct row_place {
    int head, position;
} row_place;

DEV row_place find_row(const fwd_args &a, const place &p, int row)
{
    row_place at;
    at.position = row_position(a, p, row);
    at.head = p.kv_head * a.group + p.row_first + row - at.position * a.group;
    return at;
}

/* Divides a row by its sum and stores it, and its log-sum-exp. Returns whether all values of the lane are finite. */
DEV bool store_row(const fwd_args &a, const place &p, const row_result &r, int row, int lane)
{
    const row_place at = find_row(a, p, row);
    char *to = (char *)a.o +
               (p.batch * a.o_stride.batch + at.head * a.o_stride.head + at.position * a.o_stride.row) * ELEM_BYTES;
    const float factor = inverse_sum(r.sum);
    float probe = 0.0f; /* NaN when a value is not finite */
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i += 2) {
        const int column = LANE_COLUMNS * lane + i;
        const float even = r.o[i] * factor, odd = r.o[i + 1] * factor;
        probe += even * 0.0f + odd * 0.0f;
        if (column < a.v_dim)
            *(uint32_t *)(to + column * ELEM_BYTES) = pack<BF16>(even, odd);
    }
    if (a.lse != nullptr && lane == 0)
        a.lse[((int64_t)p.batch * a.q_heads + at.head) * a.q_len + at.position] =
            log_sum_exp(r.reference, r.sum, a.scale);
    return probe == 0.0f;
}

/* Computes those outputs of a stored row again that a hidden, not finite value of V spoilt. */
DEV void repair(const fwd_args &a, const place &p, const keys &visible, const row_result &r, int row, int lane)
{
    const row_place at = find_row(a, p, row);
    __threadfence();
    __syncwarp(); /* the values are other lanes' */
    if (isfinite(r.sum) && lane < 4)
        repair_row<ELEMENT>(a,
                            {p.batch, at.head, at.position, 0, 0, keys_seen(a, visible, at.position), a.scale_log2,
                             finite_max(r.reference) * a.scale_log2, inverse_sum(r.sum)},
                            lane);
}

/* Rows of partial results in shared memory: rows first, first + step, ... below end of the tile. */
typedef struct gathered_rows {
    const float *results;
    int first, end, step;
    int row_elems, stride, count; /* from row to row; from result to result of a row; results of a row */
} gathered_rows;

/* Adds up rows, a warp a row, and stores them; or, unless they are the whole, leaves them for one that adds again. */
DEV void add_rows(const fwd_args &a, const place &p, const keys &visible, const gathered_rows &g, bool whole)
{
    const int warp = threadIdx.x / WARP_THREADS, lane = threadIdx.x % WARP_THREADS;
    for (int row = g.first + warp * g.step; row < g.end; row += ROWS_AT_ONCE * WARPS * g.step) {
        row_result r[ROWS_AT_ONCE];
        const float *from[ROWS_AT_ONCE];
        bool spoilt = false;
#pragma unroll
        for (int k = 0; k < ROWS_AT_ONCE; k++) {
            const int other = row + k * WARPS * g.step;
            from[k] = g.results + ((other < g.end ? other : row) - g.first) * g.row_elems;
        }
        add_partials(r, from, g.stride, g.count, lane, a.scale_log2);
#pragma unroll
        for (int k = 0; k < ROWS_AT_ONCE; k++)
            if (row + k * WARPS * g.step < g.end) {
                if (whole)
                    spoilt |= !store_row(a, p, r[k], row + k * WARPS * g.step, lane);
                else
                    leave_row(a, p, r[k], row + k * WARPS * g.step, lane);
            }
        if (a.mask != FWD_MASK_NONE && __any_sync(~0u, spoilt))
#pragma unroll
            for (int k = 0; k < ROWS_AT_ONCE; k++)
                if (row + k * WARPS * g.step < g.end)
                    repair(a, p, visible, r[k], row + k * WARPS * g.step, lane);
    }
}

/* The results of the CTA's groups. */
DEV gathered_rows find_groups(const place &p, unsigned char *smem)
{
    return {(const float *)smem, 0, p.rows, 1, PARTIAL_STRIDE, GROUP_BYTES / 4, KV_GROUPS};
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
DEV void finish(const fwd_args &a, const place &p, const keys &visible, int splits, unsigned char *smem)
{
    const int warp = threadIdx.x / WARP_THREADS, lane = threadIdx.x % WARP_THREADS;
    gathered_rows g = find_groups(p, smem);
    bool whole = splits == 1;
    for (;;) {
        add_rows(a, p, visible, g, whole);
        if (!whole) {
            if (!arrives_last((unsigned *)a.workspace + p.tile, splits))
                return;
            whole = true;
            g = {(const float *)smem, 0, 0, 1, splits * PARTIAL_STRIDE, PARTIAL_STRIDE, splits};
        }
        if (g.end == p.rows)
            return;
        g.first = g.end; /* as many rows as shared memory holds; a place in it is always the same warp's */
        g.end = min(p.rows, g.first + ROWS_MAX / splits);
        __syncwarp();
        for (int row = g.first + warp; row < g.end; row += WARPS)
            fetch_row(smem_address(smem) + (row - g.first) * g.row_elems * 4,
                      find_partials(a, p) + row * (int)gridDim.x * PARTIAL_STRIDE, splits, lane);
        copies_commit();
        COPIES_WAIT(0);
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    extern __shared__ __align__(128) unsigned char smem[];
    wait_for_previous_kernel();

    const int warp = threadIdx.x / WARP_THREADS, group = ROW_WARPS == 1 ? warp : warp / ROW_WARPS;
    const lane_place l = {(int)threadIdx.x % WARP_THREADS, group, (int)threadIdx.x - group * GROUP_THREADS,
                          (warp - group * ROW_WARPS) * WARP_ROWS};
    const place p = find_place(a);
    const int position_first = row_position(a, p, 0);
    const keys visible = find_keys(a, p.batch, position_first, row_position(a, p, p.rows - 1) - position_first + 1);
    const share s = find_share(visible);
    if (s.first == s.end && blockIdx.x != 0) /* the first CTA writes the rows that see no key */
        return;

    pipeline x = start_loads(a, p, s, l, smem_address(smem) + group * GROUP_BYTES);
    const int splits = max(1, divide_up(s.steps, s.steps_each)); /* CTAs of the tile that have keys */
    softmax_state state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    output_tile o;
#pragma unroll
    for (int n = 0; n < DIM_TILES; n++)
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    attend(o, state, x, a, p, visible, s, l);
    allow_next_kernel();
    publish((float *)(smem + group * GROUP_BYTES), o, state, l);
    __syncthreads();
    finish(a, p, visible, splits, smem);
}

#else

#include <math.h>

#include "cuda/model/fwd_model.h"

static int64_t head_rows(const acr_problem *problem)
{
    return problem->q_heads / problem->kv_heads * problem->q_len;
}

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    const char *reason = acr__fwd_size_why_not(problem, DIM, DIM);
    if (reason == NULL)
        reason = acr__row_tiles_why_not(problem, Q_TILE);
    if (reason == NULL)
        reason = acr__vector_why_not(problem);
    return reason != NULL ? reason : acr__smem_why_not(SMEM_BYTES, device);
}

/* CTAs that fit on an SM beside each other. */
static int32_t ctas_per_sm(const acr__device *device)
{
    const int32_t regs_per_thread = DIM == 64 ? 160 : DIM == 128 && Q_TILE == 16 ? 184 : 255; /* ptxas -v tells */
    return acr__ctas_per_sm(device, SMEM_BYTES, regs_per_thread, THREADS);
}

/* Cycles from a CTA's start to its end when nothing waits for memory. Fitted, as are the other numbers here, to runs on
 * an H200 (README.md). */
static double cta_cycles(const acr_problem *problem, const acr__device *device, double steps_each, double splits,
                         double ctas_beside)
{
    const double rows_of_warp = ceil(fmin((double)head_rows(problem), Q_TILE) / WARPS);
    /* One warp's way through a tile of keys, all latencies; and what its CTA takes of the SM's pipes meanwhile. */
    const double latency = (100.0 + 5.75 * DIM) * pow(KV_TILE / 16.0, 0.85);
    const double pipes = 120.0 * WARPS * (DIM / 128.0) * (KV_TILE / 16.0) / acr__mma_share(device);
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
    const double cta_bytes = cta_keys * (double)(problem->qk_dim + problem->v_dim) * ELEM_BYTES;
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
    const int64_t tiles = acr__row_tiles(problem, Q_TILE) * problem->kv_heads * problem->batch;
    const int64_t most = tiles > COUNTERS_MAX ? 1 : steps < SPLITS_MAX ? steps : SPLITS_MAX;
    if (SPLITS > 0)
        return split_into(steps, most < SPLITS ? most : SPLITS);
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
    const int64_t ctas = acr__row_tiles(problem, Q_TILE) * problem->kv_heads * problem->batch * splits;
    return splits == 1 ? 0 : COUNTERS_BYTES + (size_t)ctas * PARTIAL_ELEMS * sizeof(float);
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
    return ACR__LAUNCH_SECONDS + split_seconds(problem, device, c.steps_each, c.splits, 1.0);
}

const acr__kernel KERNEL_DESCRIPTION = {
    .name = KERNEL_TEXT,
    .family = "fwd_split",
    .backend = ACR__CUDA,
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
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
    .arch_min = 80,
    .arch_max = 999, /* PTX for what comes */
    .shape = shape,
};

#endif
