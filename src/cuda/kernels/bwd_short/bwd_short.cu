/* Backward attention on Hopper for short sequences, fp16 and bf16, sm_90a: one launch, no workspace.
 *
 * Nothing is summed between CTAs, so nobody waits for anybody and every run gives the same bits. A CTA owns Q_TILE
 * lines, two matrices of them: keys, of which it finds dK and dV, or queries, of which it finds dQ. Their partners come
 * through a ring of STAGES, KV_TILE at a time: Q and dO, or K and V. Both kinds compute the scores and dP of their
 * pairs: seven products where one kind of CTA would need five, and in return no part of dQ leaves a CTA. Lines are the
 * rows of all products, with their operands in registers, but queries' dO, which stays in shared memory: scores and dP
 * are lines by partners, P and dS are the operands of dV, dK and dQ. No product's result passes through shared memory.
 *
 * Of 384 threads, a warp asks for the loads, three find D = rowsum(dO * O) of the queries, and two warpgroups hold 64
 * lines each. After Dao et al. 2022 and Shah et al. 2024. See README.md.
 *
 * Parameters: DIM (64; dims up to it, zero-padded), STAGES, optional BF16=1, AHEAD=1 (the next stage's scores start
 * before this one's last product).
 *
 * PARAMETERS: DIM STAGES BF16=0 AHEAD=0 */
#include "cuda/device/attention/parameters.h"

#ifndef AHEAD
#define AHEAD 0
#endif

#include <stddef.h>

#include "cuda/device/attention/gradients.h"

enum {
    ELEM_BYTES = 2,
    ROW_BYTES = DIM * ELEM_BYTES,
    CONSUMERS = 2,
    GROUP_LINES = 64, /* of a consumer warpgroup */
    Q_TILE = CONSUMERS * GROUP_LINES,
    KV_TILE = 64,
    THREADS = 128 * (CONSUMERS + 1),
    BOX_BYTES = 64 * ROW_BYTES /* of a warpgroup's lines, or of a stage's partners */
};

/* The first line of a warpgroup of the CTA that has a tile's number. Where lines at one end have many partners and
 * those at the other few, a warpgroup's lines are as far from the first as the other's from the last (is_apart): so all
 * CTAs have about as many pairs. */
VISIBLE_FUNCTION int32_t first_line(int32_t tiles, int32_t tile, int32_t group, int is_apart)
{
    const int32_t number = !is_apart ? CONSUMERS * tile + group : group == 0 ? tile : CONSUMERS * tiles - 1 - tile;
    return number * GROUP_LINES;
}

VISIBLE_FUNCTION int lines_are_apart(visible_rule rule)
{
    return rule.mask != FWD_MASK_NONE && rule.window_left == 0;
}

/* Which lines a CTA owns. */
typedef struct line_place {
    int32_t has_keys;         /* the lines are keys */
    int32_t entry, head;      /* of the lines */
    int32_t first[CONSUMERS]; /* of each warpgroup's lines */
} line_place;

/* What a CTA owns, and its partners. */
typedef struct owned_lines {
    line_place at;
    int32_t q_len, kv_len;        /* of the batch entry */
    int32_t lines, partners;      /* that exist in the entry */
    int32_t first_head, heads;    /* of the partners */
    int32_t tile_first, tile_end; /* tiles of partners, of each head */
    int32_t needs_clearing;       /* partners that do not exist may be anything */
    visible_rows seen[CONSUMERS]; /* the partners of each warpgroup's lines; full: those that all its lines have */
} owned_lines;

/* Statistics of 64 queries: LSE in powers of two, +inf of a row that sees no key or does not exist; D. */
typedef struct query_stats {
    float lse[64], d[64];
} query_stats;

/* What lies where in shared memory; the device's loads want each box at a multiple of 1024 bytes. */
typedef struct shared_memory {
    uint8_t x[CONSUMERS][BOX_BYTES], y[CONSUMERS][BOX_BYTES];     /* lines: of K and V, or of Q and dO */
    uint8_t ring_x[STAGES][BOX_BYTES], ring_y[STAGES][BOX_BYTES]; /* partners: of Q and dO, or of K and V */
    query_stats stats[STAGES], own_stats[CONSUMERS];              /* of partners; of lines */
    int32_t seen[CONSUMERS][GROUP_LINES][2];                      /* the partners of each line, [first, end) */
    uint64_t own_full, own_stats_full;                            /* the lines; own_stats */
    uint64_t full[STAGES], ready[STAGES], empty[STAGES];          /* ready: stats, or cleared partners */
    owned_lines own;
} shared_memory;

#ifdef __CUDACC__

#include "cuda/device/attention/gradient_lines.cuh"
#include "cuda/device/isa/shared.cuh"
#include "cuda/device/isa/trace_points.cuh"
#include "cuda/device/isa/wgmma_rs.cuh"

enum {
    PRODUCER_REGISTERS = 56,
    CONSUMER_REGISTERS = 224,
    CONSUMER_WARPS = 4 * CONSUMERS,
    HELPER_WARPS = 3, /* of the producer's warpgroup, all but the first */
    HELPERS = HELPER_WARPS * WARP_THREADS,
    ROW_CHUNKS = ROW_BYTES / CHUNK_BYTES,
    ROWS_AT_ONCE = HELPERS / ROW_CHUNKS, /* whose D the helpers find together */
    ROW_ROUNDS = (64 + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE,
    DIM_STEPS = DIM / WGMMA_K, /* of a product over dims */
    PARTNER_STEPS = KV_TILE / WGMMA_K
};

static_assert(DIM == 64, "DIM: 64; dK and dV of 128 dims leave no registers for scores");
static_assert(STAGES >= 2, "STAGES: one tile is computed on while the next is on its way");
static_assert(sizeof(shared_memory) <= 232448, "227 KB, a CTA's limit on sm_90");

/* ---- What a CTA owns ---- */

DEV visible_entry entry_of(const fwd_args &a, const owned_lines &own)
{
    const sequence rows = {0, own.q_len, 0, own.kv_len};
    return entry_of(a, rows);
}

/* The partners of some lines; full: those that all the lines have. */
template <bool KEYS> DEV visible_rows partners_of_tile(const visible_entry &e, int first, int lines)
{
    if constexpr (KEYS)
        return visible_to_keys(e, first, lines);
    const visible_keys keys = visible_to_rows(e, first, lines);
    return {keys.first, keys.full_first, keys.full_end, keys.end};
}

/* CTAs with keys come first, since they have more to do. */
DEV line_place find_place(const fwd_args &a)
{
    const int key_tiles = (a.kv_len + Q_TILE - 1) / Q_TILE, q_tiles = (a.q_len + Q_TILE - 1) / Q_TILE;
    const int key_work = key_tiles * a.kv_heads * a.batch;
    line_place at;
    at.has_keys = blockIdx.x < key_work;
    const int number = at.has_keys ? blockIdx.x : blockIdx.x - key_work, tiles = at.has_keys ? key_tiles : q_tiles;
    const int heads = at.has_keys ? a.kv_heads : a.q_heads, tile = number / (heads * a.batch);
    const int in_batch = number - tile * heads * a.batch;
    at.entry = in_batch / heads;
    at.head = in_batch - at.entry * heads;
#pragma unroll
    for (int i = 0; i < CONSUMERS; i++)
        at.first[i] = first_line(tiles, tile, i, lines_are_apart(rule_of(a)));
    return at;
}

DEV owned_lines find_owned(const fwd_args &a)
{
    owned_lines own;
    own.at = find_place(a);
    const bool has_keys = own.at.has_keys;
    own.q_len = a.q_len;
    own.kv_len = find_kv_len(a, own.at.entry);
    own.lines = has_keys ? own.kv_len : own.q_len;
    own.partners = has_keys ? own.q_len : own.kv_len;
    own.first_head = has_keys ? own.at.head * a.group : own.at.head / a.group;
    own.heads = has_keys ? a.group : 1;
    own.needs_clearing = !has_keys && a.kv_lens != nullptr;
    const visible_entry e = entry_of(a, own);
    int first = INT32_MAX, end = 0;
#pragma unroll
    for (int i = 0; i < CONSUMERS; i++) {
        const int line = own.at.first[i];
        visible_rows seen = {0, 0, 0, 0};
        if (line < own.lines)
            seen =
                has_keys ? partners_of_tile<true>(e, line, GROUP_LINES) : partners_of_tile<false>(e, line, GROUP_LINES);
        own.seen[i] = seen;
        first = seen.first < seen.end ? min(first, seen.first) : first;
        end = seen.first < seen.end ? max(end, seen.end) : end;
    }
    own.tile_first = first < end ? first / KV_TILE : 0;
    own.tile_end = (end + KV_TILE - 1) / KV_TILE;
    return own;
}

/* A use of the ring: a tile of partners of one head. All tiles of the first head, then those of the next. */
typedef struct ring_use {
    int number, head, tile;
} ring_use;

DEV ring_use first_use(const owned_lines &own)
{
    return {0, own.first_head, own.tile_first};
}

DEV bool is_in_use(const ring_use &use, const owned_lines &own)
{
    return use.head < own.first_head + own.heads && own.tile_first < own.tile_end;
}

DEV void next_use(ring_use &use, const owned_lines &own)
{
    use.number++;
    if (++use.tile == own.tile_end) {
        use.tile = own.tile_first;
        use.head++;
    }
}

DEV int stage_of(const ring_use &use)
{
    return use.number % STAGES;
}

/* Waits for a barrier of a use's stage. */
DEV void wait_use(uint32_t barriers, const ring_use &use)
{
    barrier_wait(barriers + BARRIER_BYTES * stage_of(use), use.number / STAGES & 1);
}

DEV void wait_empty(uint32_t smem, const ring_use &use)
{
    barrier_wait(ADDRESS(smem, empty) + BARRIER_BYTES * stage_of(use), (use.number / STAGES & 1) ^ 1);
}

/* One arrival per warp, behind what all its lanes have done. */
DEV void arrive_warp(uint32_t barrier, int lane)
{
    __syncwarp();
    if (lane == 0)
        barrier_arrive(barrier);
}

/* ---- The producer: one thread ---- */

/* Before anything else is known of the CTA. */
DEV void load_own(const fwd_maps &maps, uint32_t smem, const line_place &at)
{
    const uint32_t own_full = ADDRESS(smem, own_full);
    barrier_arrive_expecting(own_full, 2 * CONSUMERS * BOX_BYTES);
#pragma unroll
    for (int i = 0; i < CONSUMERS; i++) {
        load_box(ADDRESS(smem, x) + i * BOX_BYTES, at.has_keys ? &maps.k : &maps.q, own_full, 0, at.first[i], at.head,
                 at.entry);
        load_box(ADDRESS(smem, y) + i * BOX_BYTES, at.has_keys ? &maps.v : &maps.o, own_full, 0, at.first[i], at.head,
                 at.entry);
    }
}

DEV void produce(const fwd_maps &maps, uint32_t smem, const owned_lines &own)
{
    const fwd_map *const x = own.at.has_keys ? &maps.q : &maps.k, *const y = own.at.has_keys ? &maps.o : &maps.v;
    for (ring_use use = first_use(own); is_in_use(use, own); next_use(use, own)) {
        const int stage = stage_of(use);
        const uint32_t full = ADDRESS(smem, full) + BARRIER_BYTES * stage;
        wait_empty(smem, use);
        barrier_arrive_expecting(full, 2 * BOX_BYTES);
        load_box(ADDRESS(smem, ring_x) + stage * BOX_BYTES, x, full, 0, use.tile * KV_TILE, use.head, own.at.entry);
        load_box(ADDRESS(smem, ring_y) + stage * BOX_BYTES, y, full, 0, use.tile * KV_TILE, use.head, own.at.entry);
    }
    barrier_wait(ADDRESS(smem, own_full), 0); /* a CTA does not end before its copies, if nobody else waits for them */
}

/* ---- The helpers: three warps, which find D, or clear keys that do not exist ---- */

/* Finds the statistics of 64 queries from row `first` on. O comes from global memory; dO from the box, which has landed
 * when the barrier's phase of that parity has ended. thread: of the helpers. */
DEV void find_stats(const fwd_args &a, const owned_lines &own, int head, int first, uint32_t box, uint32_t full,
                    uint32_t parity, query_stats *to, int thread)
{
    const sequence rows = {0, own.q_len, 0, own.kv_len};
    const float *const lse = find_lse(a, rows, own.at.entry, head);
    const int chunk = thread % ROW_CHUNKS, in_round = thread / ROW_CHUNKS;
    const float own_lse = thread < 64 && first + thread < own.q_len ? lse[first + thread] : -CUDART_INF_F;
    const char *from =
        (const char *)a.o + (output_index(a, rows, own.at.entry, head, first + in_round) + 8 * chunk) * ELEM_BYTES;
    const int end = 8 * chunk < a.v_dim ? min(64, own.q_len - first) : 0;
    uint4 o[ROW_ROUNDS];
#pragma unroll
    for (int i = 0; i < ROW_ROUNDS; i++) {
        o[i] = {0, 0, 0, 0};
        if (i * ROWS_AT_ONCE + in_round < end)
            o[i] = *(const uint4 *)from;
        from += ROWS_AT_ONCE * ELEM_BYTES * a.o_stride.row;
    }
    if (thread < 64)
        to->lse[thread] = stats_lse(own_lse);
    barrier_wait(full, parity);
#pragma unroll
    for (int i = 0; i < ROW_ROUNDS; i++) {
        const int in_box = i * ROWS_AT_ONCE + in_round;
        float sum = 0.0f;
        if (in_box < 64)
            sum = dot_chunk(o[i], load_shared_4(box + chunk_offset(in_box, chunk, ROW_CHUNKS)));
#pragma unroll
        for (int distance = ROW_CHUNKS / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        if (chunk == 0 && in_box < 64)
            to->d[in_box] = sum;
    }
}

/* Keys behind an entry's length may be anything, and NaN times a probability of zero is NaN. first: of them, in the
 * stage. */
DEV void clear_partners(uint32_t smem, int stage, int first, int thread)
{
    for (int i = first * ROW_CHUNKS + thread; i < KV_TILE * ROW_CHUNKS; i += HELPERS) {
        store_shared_4(ADDRESS(smem, ring_x) + stage * BOX_BYTES + i * CHUNK_BYTES, 0, 0, 0, 0);
        store_shared_4(ADDRESS(smem, ring_y) + stage * BOX_BYTES + i * CHUNK_BYTES, 0, 0, 0, 0);
    }
    shared_stores_visible();
}

DEV void help(const fwd_args &a, uint32_t smem, shared_memory *shared, const owned_lines &own)
{
    const int thread = threadIdx.x - WARP_THREADS, lane = thread % WARP_THREADS;
    ring_use use = first_use(own);
    if (!is_in_use(use, own))
        return;
    if (!own.at.has_keys) {
#pragma unroll 1
        for (int i = 0; i < CONSUMERS; i++)
            find_stats(a, own, own.at.head, own.at.first[i], ADDRESS(smem, y) + i * BOX_BYTES, ADDRESS(smem, own_full),
                       0, &shared->own_stats[i], thread);
        arrive_warp(ADDRESS(smem, own_stats_full), lane);
        if (!own.needs_clearing)
            return;
    }
#pragma unroll 1
    for (; is_in_use(use, own); next_use(use, own)) {
        const int stage = stage_of(use), first = use.tile * KV_TILE;
        const uint32_t full = ADDRESS(smem, full) + BARRIER_BYTES * stage, parity = use.number / STAGES & 1;
        wait_empty(smem, use);
        if (own.at.has_keys)
            find_stats(a, own, use.head, first, ADDRESS(smem, ring_y) + stage * BOX_BYTES, full, parity,
                       &shared->stats[stage], thread);
        else {
            barrier_wait(full, parity);
            if (first + KV_TILE > own.partners)
                clear_partners(smem, stage, own.partners - first, thread);
        }
        arrive_warp(ADDRESS(smem, ready) + BARRIER_BYTES * stage, lane);
    }
}

/* ---- Consumers: a warpgroup each. Arrays are in registers, as device/isa/wgmma.cuh says; rows are lines. ---- */

typedef float score_tile[KV_TILE / 2];
typedef uint32_t packed_tile[KV_TILE / 4];
typedef float gradient[DIM / 2];
typedef uint32_t operand[DIM_STEPS * 4];

/* Where a thread is, and what stays the same for it. */
typedef struct consumer {
    uint32_t smem;
    int index, thread, lane; /* among the consumers; in the warpgroup; in the warp */
    float lse[2], d[2];      /* of the lane's two lines, if they are queries */
    float scale_log2;
} consumer;

/* The first of the lane's two lines among the warpgroup's; the other is the eighth after it. */
DEV int lane_line(const consumer &c)
{
    return c.thread / 32 * 16 + c.lane / 4;
}

/* Notes which partners the warp's lines have. */
template <bool KEYS> DEV void note_partners(const consumer &c, const visible_entry &e, shared_memory *shared)
{
    const owned_lines &own = shared->own;
    const int in_group = c.thread / 32 * 16 + c.lane, line = own.at.first[c.index] + in_group;
    if (c.lane < 16) {
        const key_range seen = line < own.lines ? partners_of<KEYS>(e, line) : key_range{0, 0};
        shared->seen[c.index][in_group][0] = seen.first;
        shared->seen[c.index][in_group][1] = seen.end;
    }
    __syncwarp();
}

/* Loads the warp's rows of a box as the A operand of products over dims. */
DEV void load_lines(operand &to, const consumer &c, uint32_t box)
{
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++)
        load_matrices(to + 4 * step,
                      box + chunk_offset(c.thread / 32 * 16 + c.lane % 16, 2 * step + c.lane / 16, ROW_CHUNKS));
}

/* What it held is of no use: the first product overwrites it. */
DEV void forget(score_tile &s)
{
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; i++)
        asm volatile("" : "=f"(s[i]));
}

/* Starts lines * transpose(partners), as a group of its own. */
DEV void start_scores(score_tile &s, const operand &lines, uint64_t partners)
{
    forget(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++)
        wgmma_rs(s, lines + 4 * step, descriptor_at(partners, step * WGMMA_K * ELEM_BYTES), step != 0);
    wgmma_commit();
}

/* Starts d += P * partners or dS * partners, as a group of its own. */
DEV void start_gradient(gradient &d, const packed_tile &p, uint64_t partners)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < PARTNER_STEPS; step++)
        wgmma_rs_mn(d, p + 4 * step, descriptor_at(partners, step * WGMMA_K * ROW_BYTES), 1);
    wgmma_commit();
}

/* Scores of pairs that are hidden become -inf. partner: the stage's first. */
DEV void hide_partners(score_tile &s, const consumer &c, const shared_memory *shared, int partner)
{
    const int32_t(*const seen)[2] = shared->seen[c.index] + lane_line(c);
    const int column = partner + 2 * (c.lane % 4), first[2] = {seen[0][0] - column, seen[8][0] - column},
              end[2] = {seen[0][1] - column, seen[8][1] - column};
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; i++) {
        const int at = 8 * (i / 4) + i % 2, h = i % 4 / 2;
        if (at < first[h] || at >= end[h])
            s[i] = -CUDART_INF_F;
    }
}

/* Turns scores into probabilities. stats: of the lane's first partner. */
template <bool KEYS> DEV void find_probabilities(score_tile &s, const consumer &c, const query_stats *stats)
{
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; i += 4) {
        const float2 lse = KEYS ? *(const float2 *)(stats->lse + 2 * i + 2 * (c.lane % 4)) : float2{0.0f, 0.0f};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            s[i + 2 * h] = exp2_fast(fmaf(s[i + 2 * h], c.scale_log2, KEYS ? -lse.x : -c.lse[h]));
            s[i + 2 * h + 1] = exp2_fast(fmaf(s[i + 2 * h + 1], c.scale_log2, KEYS ? -lse.y : -c.lse[h]));
        }
    }
}

/* P, rounded. */
DEV void round_probabilities(packed_tile &p, const score_tile &s)
{
#pragma unroll
    for (int i = 0; i < KV_TILE / 4; i++)
        p[i] = pack<BF16>(s[2 * i], s[2 * i + 1]);
}

/* dS = P * (dP - D), rounded. */
template <bool KEYS>
DEV void find_score_gradients(packed_tile &ds, const score_tile &p, const score_tile &dp, const consumer &c,
                              const query_stats *stats)
{
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; i += 4) {
        const float2 d = KEYS ? *(const float2 *)(stats->d + 2 * i + 2 * (c.lane % 4)) : float2{0.0f, 0.0f};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = i + 2 * h;
            ds[at / 2] =
                pack<BF16>(p[at] * (dp[at] - (KEYS ? d.x : c.d[h])), p[at + 1] * (dp[at + 1] - (KEYS ? d.y : c.d[h])));
        }
    }
}

/* Which uses of the ring a warpgroup's lines have partners in, and which of those need a mask. */
DEV bool is_visited(const ring_use &use, const owned_lines &own, const visible_rows &seen)
{
    const int partner = use.tile * KV_TILE;
    return is_in_use(use, own) && partner < seen.end && partner + KV_TILE > seen.first;
}

DEV bool is_masked(const ring_use &use, const visible_rows &seen)
{
    const int partner = use.tile * KV_TILE;
    return partner < seen.full_first || partner + KV_TILE > seen.full_end;
}

/* Waits for a use's partners. */
DEV void wait_partners(const consumer &c, const ring_use &use, const owned_lines &own)
{
    wait_use(ADDRESS(c.smem, full), use);
    if (own.needs_clearing)
        wait_use(ADDRESS(c.smem, ready), use);
}

DEV void release(const consumer &c, int stage)
{
    arrive_warp(ADDRESS(c.smem, empty) + BARRIER_BYTES * stage, c.lane);
}

/* The partners' x of a stage, either way: summed over dims, or over partners; and their y. */
DEV uint64_t partner_x(const consumer &c, int stage)
{
    return matrix_descriptor(ADDRESS(c.smem, ring_x) + stage * BOX_BYTES, 0);
}

DEV uint64_t partner_y(const consumer &c, int stage)
{
    return matrix_descriptor(ADDRESS(c.smem, ring_y) + stage * BOX_BYTES, 0);
}

/* A warpgroup's lines, and their gradients so far. */
typedef struct held_lines {
    operand x, y;
    gradient dx, dy;
} held_lines;

/* From the scores, which are ready, to dS, rounded. Leaves dV's product under way, and none before it.
 * release_before: a stage whose products have then all ended, or -1. */
template <bool KEYS>
DEV void find_ds(packed_tile &ds, held_lines &l, score_tile &s, const score_tile &dp, const consumer &c,
                 const shared_memory *shared, const ring_use &use, bool masked, int release_before)
{
    const query_stats *const stats = &shared->stats[stage_of(use)];
    ACR_TRACE_POINT(use.number, "scores ready");
    if (KEYS)
        wait_use(ADDRESS(c.smem, ready), use);
    if (masked)
        hide_partners(s, c, shared, use.tile * KV_TILE);
    find_probabilities<KEYS>(s, c, stats);
    ACR_TRACE_POINT(use.number, "exponentials done");
    if constexpr (KEYS) {
        packed_tile p;
        round_probabilities(p, s);
        start_gradient(l.dy, p, partner_y(c, stage_of(use)));
        WGMMA_WAIT(1); /* all but dV */
    } else
        WGMMA_WAIT(0);
    if (AHEAD && release_before >= 0)
        release(c, release_before);
    find_score_gradients<KEYS>(ds, s, dp, c, stats);
    ACR_TRACE_POINT(use.number, "score gradients done");
}

/* Starts dP, of a stage, as a group of its own. Queries' dO is read from shared memory: held in registers over the
 * loop, CUDA 13.0's assembler puts dS into them, although the next stage needs them (lab.md). */
template <bool KEYS> DEV void start_weight_gradients(score_tile &dp, const held_lines &l, const consumer &c, int stage)
{
    if constexpr (KEYS)
        start_scores(dp, l.y, partner_y(c, stage));
    else {
        const uint64_t lines = matrix_descriptor(ADDRESS(c.smem, y) + c.index * BOX_BYTES, 0);
        forget(dp);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < DIM_STEPS; step++)
            wgmma_ss(dp, descriptor_at(lines, step * WGMMA_K * ELEM_BYTES),
                     descriptor_at(partner_y(c, stage), step * WGMMA_K * ELEM_BYTES), step != 0);
        wgmma_commit();
    }
}

/* One stage. No product is under way before or behind. */
template <bool KEYS>
DEV void visit(held_lines &l, const consumer &c, const shared_memory *shared, const ring_use &use, bool masked)
{
    const int stage = stage_of(use);
    score_tile s, dp;
    packed_tile ds;
    start_scores(s, l.x, partner_x(c, stage));
    start_weight_gradients<KEYS>(dp, l, c, stage);
    WGMMA_WAIT(1); /* the scores */
    find_ds<KEYS>(ds, l, s, dp, c, shared, use, masked, -1);
    start_gradient(l.dx, ds, partner_x(c, stage));
    WGMMA_WAIT(0);
    ACR_TRACE_POINT(use.number, "products done");
}

/* The stages from `use` on that the lines have partners in, without a gap: the next stage's scores start before this
 * one's last product, which so runs under the exponentials. Leaves `use` behind the last. No product is under way
 * before or behind. */
template <bool KEYS>
DEV void visit_ahead(held_lines &l, const consumer &c, const shared_memory *shared, ring_use &use,
                     const owned_lines &own, const visible_rows &seen)
{
    score_tile s, dp;
    packed_tile ds;
    int before = -1; /* the stage that the last product under way reads */
    bool goes_on = true;
    start_scores(s, l.x, partner_x(c, stage_of(use)));
    wgmma_commit(); /* in place of the last product */
#pragma unroll 1
    while (goes_on) {
        const int stage = stage_of(use);
        const bool masked = is_masked(use, seen);
        ring_use next = use;
        next_use(next, own);
        goes_on = is_visited(next, own, seen);
        start_weight_gradients<KEYS>(dp, l, c, stage);
        WGMMA_WAIT(2); /* the scores */
        find_ds<KEYS>(ds, l, s, dp, c, shared, use, masked, before);
        if (goes_on)
            wait_partners(c, next, own);
        start_scores(s, l.x, partner_x(c, goes_on ? stage_of(next) : stage)); /* behind the last: of no use */
        start_gradient(l.dx, ds, partner_x(c, stage));
        WGMMA_WAIT(1); /* the next scores */
        before = stage;
        use = next;
    }
    WGMMA_WAIT(0);
    release(c, before);
}

/* Stores the warp's lines of dK and dV, or of dQ, and computes those again that a hidden pair has spoilt. */
template <bool KEYS>
DEV void store_lines(const bwd_args &args, const held_lines &l, const consumer &c, const shared_memory *shared)
{
    const fwd_args &a = args.fwd;
    const owned_lines &own = shared->own;
    const sequence rows = {0, own.q_len, 0, own.kv_len};
    const line_head of = {rows, entry_of(a, rows), own.at.entry, own.at.head};
    const int stored = KEYS ? a.kv_len : a.q_len; /* those that do not exist get zeros */
    unsigned spoilt = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int in_group = lane_line(c) + 8 * h, line = own.at.first[c.index] + in_group;
        const int32_t *const seen = shared->seen[c.index][in_group];
        const bool exists = line < stored, sees = seen[0] < seen[1];
        if constexpr (KEYS) {
            store_gradient_row(args, args.dv, gradient_index<true>(of, args.dv_stride, line), exists, a.v_dim,
                               sees ? 1.0f : 0.0f, l.dy, h, c.lane);
            store_gradient_row(args, args.dk, gradient_index<true>(of, args.dk_stride, line), exists, a.qk_dim,
                               sees ? a.scale : 0.0f, l.dx, h, c.lane);
            spoilt |= find_spoilt(sees && probe(l.dx, h) + probe(l.dy, h) != 0.0f) << 8 * h;
        } else {
            store_gradient_row(args, args.dq, gradient_index<false>(of, args.dq_stride, line), exists, a.qk_dim,
                               sees ? a.scale : 0.0f, l.dx, h, c.lane);
            spoilt |= find_spoilt(sees && probe(l.dx, h) != 0.0f) << 8 * h;
        }
    }
    fix_lines<KEYS>(args, of, unstored_stats{}, spoilt, own.at.first[c.index] + c.thread / 32 * 16, 0, DIM, c.lane);
}

template <bool KEYS> DEV void consume(const bwd_args &args, uint32_t smem, shared_memory *shared, int index)
{
    const fwd_args &a = args.fwd;
    const owned_lines own = shared->own;
    const int thread = threadIdx.x % WARPGROUP_THREADS;
    consumer c = {smem, index, thread, thread % WARP_THREADS, {}, {}, a.scale_log2};
    const visible_entry e = entry_of(a, own);
    const visible_rows seen = shared->own.seen[index];
    note_partners<KEYS>(c, e, shared);
    held_lines l;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        l.dx[i] = l.dy[i] = 0.0f;
    ring_use use = first_use(own);
    if (is_in_use(use, own)) {
        barrier_wait(ADDRESS(smem, own_full), 0);
        load_lines(l.x, c, ADDRESS(smem, x) + index * BOX_BYTES);
        if constexpr (KEYS)
            load_lines(l.y, c, ADDRESS(smem, y) + index * BOX_BYTES);
        ACR_TRACE_POINT(0, "lines in registers");
        if constexpr (!KEYS) {
            barrier_wait(ADDRESS(smem, own_stats_full), 0);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                c.lse[h] = shared->own_stats[index].lse[lane_line(c) + 8 * h];
                c.d[h] = shared->own_stats[index].d[lane_line(c) + 8 * h];
            }
        }
#pragma unroll 1
        while (is_in_use(use, own)) {
            wait_partners(c, use, own);
            ACR_TRACE_POINT(use.number, "partners landed");
            if (AHEAD && is_visited(use, own, seen)) {
                visit_ahead<KEYS>(l, c, shared, use, own, seen);
                continue;
            }
            if (is_visited(use, own, seen))
                visit<KEYS>(l, c, shared, use, is_masked(use, seen));
            else if (KEYS) /* the helpers read what is released here */
                wait_use(ADDRESS(smem, ready), use);
            release(c, stage_of(use));
            next_use(use, own);
        }
    }
    allow_next_kernel();
    store_lines<KEYS>(args, l, c, shared);
    ACR_TRACE_POINT(0, "stored");
}

DEV void init_barriers(uint32_t smem)
{
    barrier_init(ADDRESS(smem, own_full), 1);
    barrier_init(ADDRESS(smem, own_stats_full), HELPER_WARPS);
    for (int i = 0; i < STAGES; i++) {
        barrier_init(ADDRESS(smem, full) + BARRIER_BYTES * i, 1);
        barrier_init(ADDRESS(smem, ready) + BARRIER_BYTES * i, HELPER_WARPS);
        barrier_init(ADDRESS(smem, empty) + BARRIER_BYTES * i, CONSUMER_WARPS);
    }
    barrier_init_done();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ bwd_args args, const __grid_constant__ fwd_maps maps)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_memory *const shared = (shared_memory *)memory;
    const uint32_t smem = smem_address(memory);
    const int group = read_warpgroup();
    if (threadIdx.x == 0) {
        prefetch_map(&maps.q);
        prefetch_map(&maps.k);
        prefetch_map(&maps.v);
        prefetch_map(&maps.o);
        init_barriers(smem);
    }
    wait_for_previous_kernel();
    if (threadIdx.x == 0)
        load_own(maps, smem, find_place(args.fwd));
    if (threadIdx.x == WARP_THREADS) /* meanwhile */
        shared->own = find_owned(args.fwd);
    __syncthreads();
    if (group == 0) {
        REGISTERS_GIVE(PRODUCER_REGISTERS);
        if (threadIdx.x == 0)
            produce(maps, smem, shared->own);
        if (threadIdx.x >= WARP_THREADS)
            help(args.fwd, smem, shared, shared->own);
    } else {
        REGISTERS_TAKE(CONSUMER_REGISTERS);
        if (shared->own.at.has_keys)
            consume<true>(args, smem, shared, group - 1);
        else
            consume<false>(args, smem, shared, group - 1);
    }
    ACR_TRACE_END(args.fwd);
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {.work = ACR__WORK_OWN, .threads = THREADS, .smem_bytes = sizeof(shared_memory)};

#include "cuda/model/tile_kernel.h"

/* CTAs that own keys, and those that own queries. */
static int64_t count_tiles(int64_t lines)
{
    return (lines + Q_TILE - 1) / Q_TILE;
}

static int64_t count_key_work(const acr_problem *problem)
{
    return count_tiles(problem->kv_len) * problem->kv_heads * problem->batch;
}

static int64_t count_query_work(const acr_problem *problem)
{
    return count_tiles(problem->q_len) * problem->q_heads * problem->batch;
}

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    if (count_tiles(problem->kv_len) > INT32_MAX / 2 / (problem->kv_heads * problem->batch))
        return "batch * kv_heads has more than 2^30 tiles of 128 keys";
    if (count_tiles(problem->q_len) > INT32_MAX / 2 / (problem->q_heads * problem->batch))
        return "batch * q_heads has more than 2^30 tiles of 128 queries";
    return tile_why_not(problem, device);
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    (void)device;
    *launch = (acr__launch){.grid = {(uint32_t)(count_key_work(problem) + count_query_work(problem)), 1, 1},
                            .block = THREADS,
                            .smem_bytes = sizeof(shared_memory)};
}

/* Stages that a warpgroup's lines visit, for one head of the partners. */
static double count_visits(visible_entry entry, int keys, int32_t line)
{
    if (line >= (keys ? entry.kv_len : entry.q_len))
        return 0;
    const visible_rows rows = visible_to_keys(entry, line, GROUP_LINES);
    const visible_keys columns = visible_to_rows(entry, line, GROUP_LINES);
    const int32_t first = keys ? rows.first : columns.first, end = keys ? rows.end : columns.end;
    return first < end ? (double)((end + KV_TILE - 1) / KV_TILE - first / KV_TILE) : 0;
}

/* By an H200: a warpgroup alone takes 3800 cycles for a visit of keys, two side by side 1850 each, and a CTA 5400
 * besides; queries' share is a guess. So long sequences, and many short ones, are bwd_wgmma's. */
static double cost(const acr_problem *problem, const acr__device *device)
{
    const double visit_cycles[2] = {1050.0, 1850.0}, alone_cycles[2] = {2100.0, 3800.0}, cta_cycles = 5400.0;
    const visible_entry entry = acr__longest_entry(problem);
    double cycles = 0, most = 0; /* of all CTAs, and of one */
    for (int keys = 0; keys <= 1; keys++) {
        const int32_t tiles = (int32_t)count_tiles(keys ? problem->kv_len : problem->q_len);
        const double heads = (double)(problem->batch * (keys ? problem->kv_heads : problem->q_heads)),
                     group = keys ? (double)(problem->q_heads / problem->kv_heads) : 1.0;
        for (int32_t tile = 0; tile < tiles; tile++) {
            double visits[CONSUMERS];
            for (int i = 0; i < CONSUMERS; i++)
                visits[i] = group * count_visits(entry, keys, first_line(tiles, tile, i, lines_are_apart(entry.rule)));
            const double both = (visits[0] + visits[1]) * visit_cycles[keys],
                         longer = (visits[0] > visits[1] ? visits[0] : visits[1]) * alone_cycles[keys],
                         own = (both > longer ? both : longer) + cta_cycles;
            cycles += heads * own;
            most = own > most ? own : most;
        }
    }
    const double shared = cycles / device->sm_count;
    return (shared > most ? shared : most) / device->clock_hz + ACR__LAUNCH_SECONDS;
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("bwd_short", 90, 90),
    .pass = ACR_BACKWARD,
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .why_not = why_not,
    .cost = cost,
    .shape = shape,
    .boxes = {.q_rows = KV_TILE, .k_rows = KV_TILE, .v_rows = KV_TILE, .o_rows = KV_TILE},
};

#endif
