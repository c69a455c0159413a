/* Backward attention on Hopper for short sequences, fp16 and bf16, sm_90a: one launch, no workspace.
 *
 * Nothing is summed between CTAs, so nobody waits for anybody and every run gives the same bits. A CTA owns Q_TILE
 * lines, two matrices of them: keys, of which it finds dK and dV, or queries, of which it finds dQ. Their partners come
 * through a ring of STAGES, KV_TILE at a time: Q and dO, or K and V. Both kinds compute the scores and dP of their
 * pairs: seven products where one kind of CTA would need five, and in return no part of dQ leaves a CTA. Lines are the
 * rows of all products, with their operands in registers, but queries' dO, which stays in shared memory: scores and dP
 * are lines by partners, P and dS are the operands of dV, dK and dQ. No product's result passes through shared memory.
 *
 * Of 384 threads, a warp asks for the loads and tells the LSE of queries that are partners, three find their D =
 * rowsum(dO * O), for which the ring has their O, too, and two warpgroups hold 64 lines each. After Dao et al. 2022 and
 * Shah et al. 2024. See README.md.
 *
 * Parameters: DIM (64; dims up to it, zero-padded), STAGES, optional BF16=1, EARLY=1 (the next stage's scores start
 * before this one's score gradients, not just before its last product), LINES_IN_SHARED=1 (dP reads the lines from
 * shared memory), MIXED=1 (a CTA owns 64 keys and 64 queries: one warpgroup finds dK and dV, the other dQ, each with
 * a ring of its own).
 *
 * PARAMETERS: DIM STAGES BF16=0 EARLY=0 LINES_IN_SHARED=0 MIXED=0 */
#include "cuda/device/attention/parameters.h"

#ifndef LINES_IN_SHARED
#define LINES_IN_SHARED 0
#endif
#ifndef MIXED
#define MIXED 0
#endif
#ifndef EARLY
#define EARLY 0
#endif

#include <stddef.h>

#include "cuda/device/attention/gradients.h"

enum {
    ELEM_BYTES = 2,
    ROW_BYTES = DIM * ELEM_BYTES,
    CONSUMERS = 2,
    GROUP_LINES = 64,      /* of a consumer warpgroup */
    KINDS = MIXED ? 2 : 1, /* of lines that a CTA owns: keys, or else queries, and rings for them */
    Q_TILE = CONSUMERS / KINDS * GROUP_LINES,
    KV_TILE = 64,
    THREADS = 128 * (CONSUMERS + 1),
    HELPERS = 96,              /* all but the first warp of the producer's warpgroup */
    STATS_ROWS = 8,            /* of queries whose D a warp finds at once */
    STATS_ROUNDS = 3,          /* of a stage, by three warps */
    BOX_BYTES = 64 * ROW_BYTES /* of a warpgroup's lines, or of a stage's partners */
};

#if !MIXED
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
#endif

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

/* Statistics of 64 queries: LSE in powers of two, +inf of a row that sees no key or does not exist; of two rows -D
 * each, twice, as the accumulators of a lane's two keys are. */
typedef struct query_stats {
    float lse[64], minus_d[32][4];
} query_stats;

/* Where a warp's warpgroup stores its lines' gradients: of K or Q, and of V. Noted while the lines are on their way,
 * since arguments that nobody has read before come slowly. */
typedef struct line_targets {
    char *x, *y; /* the first line's */
    int64_t x_row_bytes, y_row_bytes;
    int32_t lines, x_columns, y_columns, is_f32; /* lines: that are stored */
} line_targets;

/* What lies where in shared memory; the device's loads want each box at a multiple of 1024 bytes. */
typedef struct shared_memory {
    uint8_t x[CONSUMERS][BOX_BYTES], y[CONSUMERS][BOX_BYTES]; /* lines: of K and V, or of Q and dO */
    /* partners: of Q and dO, or of K and V */
    uint8_t ring_x[KINDS][STAGES][BOX_BYTES], ring_y[KINDS][STAGES][BOX_BYTES];
    uint8_t ring_o[STAGES][BOX_BYTES];       /* O of partners that are queries */
    query_stats stats[STAGES];               /* of partners */
    line_targets targets[4 * CONSUMERS];     /* of each consumer warp */
    int32_t seen[CONSUMERS][GROUP_LINES][2]; /* the partners of each line, [first, end) */
    uint64_t own_full[KINDS];                /* the lines */
    uint64_t full[KINDS][STAGES], empty[KINDS][STAGES];
    uint64_t ready[STAGES];   /* LSE: exponentials wait for no more */
    uint64_t d_ready[STAGES]; /* D, which only score gradients want, or cleared partners */
    owned_lines own[KINDS];
} shared_memory;

#ifdef __CUDACC__

#define TRACE_WARPS 2

#include "cuda/device/attention/gradient_lines.cuh"
#include "cuda/device/isa/mma.cuh"
#include "cuda/device/isa/shared.cuh"
#include "cuda/device/isa/trace_points.cuh"
#include "cuda/device/isa/wgmma.cuh"

enum {
    PRODUCER_REGISTERS = 56,
    CONSUMER_REGISTERS = 224,
    CONSUMER_WARPS = 4 * CONSUMERS / KINDS, /* of a ring */
    HELPER_WARPS = HELPERS / WARP_THREADS,
    ROW_CHUNKS = ROW_BYTES / CHUNK_BYTES,
    STORE_BARRIER = 2,         /* named, and the next */
    DIM_STEPS = DIM / WGMMA_K, /* of a product over dims */
    PARTNER_STEPS = KV_TILE / WGMMA_K,
    D_ROUNDS = 2,             /* of D, whose products are started together */
    BEFORE_DP = MIXED ? 8 : 3 /* so many columns of eight exponentials come before dP's product */
};

static_assert(!MIXED || LINES_IN_SHARED,
              "MIXED: beside LINES_IN_SHARED; else dK is wrong, a fault of the assembler (lab.md)");
static_assert(DIM == 64, "DIM: 64; dK and dV of 128 dims leave no registers for scores");
static_assert(STAGES >= 3, "STAGES: one tile is computed on, the next waited for, the one before not yet released");
static_assert(HELPER_WARPS * STATS_ROUNDS * STATS_ROWS >= 64, "helpers reach all rows of a stage");
static_assert(WARPGROUP_THREADS * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <=
                  THREADS * (65536 / THREADS / 8 * 8),
              "registers: setmaxnreg hands out what a launch gets, 8 a thread at a time; for more it waits");
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

/* The grid is {key heads, batch, tiles}: of each head of keys its key tiles, which come first, since they have more to
 * do, then the query tiles of all heads of its group. With MIXED a tile is one of keys, kind 0, and one of queries,
 * kind 1, of the same number: under a causal mask one has as many partners as the other lacks. */
DEV line_place find_place(const fwd_args &a, int kind)
{
#if MIXED
    const int line = blockIdx.z * GROUP_LINES;
    return {kind == 0, (int)blockIdx.y, (int)blockIdx.x, {line, line}};
#else
    const int key_tiles = (a.kv_len + Q_TILE - 1) / Q_TILE, q_tiles = (a.q_len + Q_TILE - 1) / Q_TILE;
    line_place at;
    at.has_keys = blockIdx.z < key_tiles;
    at.entry = blockIdx.y;
    at.head = blockIdx.x;
    int tile = blockIdx.z;
    if (!at.has_keys) {
        const int number = tile - key_tiles;
        tile = a.group == 1 ? number : number / a.group; /* a division takes longer than all else here */
        at.head = at.head * a.group + number - tile * a.group;
    }
    const int tiles = at.has_keys ? key_tiles : q_tiles;
#pragma unroll
    for (int i = 0; i < CONSUMERS; i++)
        at.first[i] = first_line(tiles, tile, i, lines_are_apart(rule_of(a)));
    return at;
#endif
}

DEV owned_lines find_owned(const fwd_args &a, int kind)
{
    owned_lines own;
    own.at = find_place(a, kind);
    const bool has_keys = own.at.has_keys;
    own.q_len = a.q_len;
    own.kv_len = find_kv_len(a, own.at.entry);
    own.lines = has_keys ? own.kv_len : own.q_len;
    own.partners = has_keys ? own.q_len : own.kv_len;
    own.first_head = has_keys ? own.at.head * a.group : blockIdx.x;
    own.heads = has_keys ? a.group : 1;
    own.needs_clearing = !has_keys && a.kv_lens != nullptr;
    const visible_entry e = entry_of(a, own);
    const bool sees_all = !visible_is_limited(e.rule); /* asked first, for a short way to the first load */
    int first = INT32_MAX, end = 0;
#pragma unroll
    for (int i = 0; i < CONSUMERS; i++) {
        const int line = MIXED && i != kind ? own.lines : own.at.first[i];
        visible_rows seen = {0, 0, 0, 0};
        if (line < own.lines && sees_all)
            seen = {0, 0, own.partners, own.partners};
        else if (line < own.lines)
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
    int stage, parity, head, tile;
} ring_use;

DEV ring_use first_use(const owned_lines &own)
{
    return {0, 0, own.first_head, own.tile_first};
}

DEV bool is_in_use(const ring_use &use, const owned_lines &own)
{
    return use.head < own.first_head + own.heads && own.tile_first < own.tile_end;
}

DEV void next_use(ring_use &use, const owned_lines &own)
{
    if (++use.stage == STAGES) {
        use.stage = 0;
        use.parity ^= 1;
    }
    if (++use.tile == own.tile_end) {
        use.tile = own.tile_first;
        use.head++;
    }
}

/* Where a stage of a ring's is: of barriers, or of boxes. ring: that of keys' partners, 0, or of queries'. */
DEV uint32_t barrier_in(uint32_t barriers, int ring, int stage)
{
    return barriers + BARRIER_BYTES * (ring * STAGES + stage);
}

DEV uint32_t box_in(uint32_t boxes, int ring, int stage)
{
    return boxes + BOX_BYTES * (ring * STAGES + stage);
}

/* Waits for a barrier of a use's stage. */
DEV void wait_use(uint32_t barriers, const ring_use &use, int ring = 0)
{
    barrier_wait(barrier_in(barriers, ring, use.stage), use.parity);
}

/* The ring of a warpgroup's partners. */
template <bool KEYS> DEV constexpr int ring_of(void)
{
    return MIXED && !KEYS ? 1 : 0;
}

/* One arrival per warp, behind what all its lanes have done. */
DEV void arrive_warp(uint32_t barrier, int lane)
{
    __syncwarp();
    if (lane == 0)
        barrier_arrive(barrier);
}

/* ---- The producer: a warp, of which one thread asks for loads ---- */

/* Before anything else is known of the CTA. */
DEV void load_own(const fwd_maps &maps, uint32_t smem, const line_place &at, int kind)
{
    const uint32_t own_full = ADDRESS(smem, own_full) + BARRIER_BYTES * kind;
    barrier_arrive_expecting(own_full, 2 * CONSUMERS / KINDS * BOX_BYTES);
#pragma unroll
    for (int i = 0; i < CONSUMERS; i++) {
        if (MIXED && i != kind)
            continue;
        load_box(ADDRESS(smem, x) + i * BOX_BYTES, at.has_keys ? &maps.k : &maps.q, own_full, 0, at.first[i], at.head,
                 at.entry);
        load_box(ADDRESS(smem, y) + i * BOX_BYTES, at.has_keys ? &maps.v : &maps.o, own_full, 0, at.first[i], at.head,
                 at.entry);
    }
}

DEV void load_partners(const bwd_maps &all, uint32_t smem, const owned_lines &own, const ring_use &use, int ring)
{
    const fwd_maps &maps = all.inputs;
    const fwd_map *const x = own.at.has_keys ? &maps.q : &maps.k, *const y = own.at.has_keys ? &maps.o : &maps.v;
    const uint32_t full = barrier_in(ADDRESS(smem, full), ring, use.stage);
    barrier_arrive_expecting(full, (own.at.has_keys ? 3 : 2) * BOX_BYTES);
    load_box(box_in(ADDRESS(smem, ring_x), ring, use.stage), x, full, 0, use.tile * KV_TILE, use.head, own.at.entry);
    load_box(box_in(ADDRESS(smem, ring_y), ring, use.stage), y, full, 0, use.tile * KV_TILE, use.head, own.at.entry);
    if (own.at.has_keys)
        load_box(box_in(ADDRESS(smem, ring_o), 0, use.stage), &all.out, full, 0, use.tile * KV_TILE, use.head,
                 own.at.entry);
}

/* LSE of partners that are queries, of two rows a lane. */
typedef struct lse_pair {
    float of[2];
} lse_pair;

/* Of the lane's rows of a use. */
DEV lse_pair load_lse(const fwd_args &a, const owned_lines &own, const ring_use &use, int lane)
{
    const sequence rows = {0, own.q_len, 0, own.kv_len};
    lse_pair lse;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = use.tile * KV_TILE + i * WARP_THREADS + lane;
        lse.of[i] =
            is_in_use(use, own) && row < own.q_len ? find_lse(a, rows, own.at.entry, use.head)[row] : -CUDART_INF_F;
    }
    return lse;
}

/* Tells them, when the use's stage is free. */
DEV void tell_lse(uint32_t smem, shared_memory *shared, const ring_use &use, const lse_pair &lse, int lane)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        shared->stats[use.stage].lse[i * WARP_THREADS + lane] = stats_lse(lse.of[i]);
    arrive_warp(ADDRESS(smem, ready) + BARRIER_BYTES * use.stage, lane);
}

#if MIXED
/* Whether a stage of a ring is empty, the same for the whole warp. */
DEV bool is_empty(uint32_t smem, const ring_use &use, int ring)
{
    return __shfl_sync(~0u, barrier_test(barrier_in(ADDRESS(smem, empty), ring, use.stage), use.parity ^ 1), 0) != 0;
}

/* All partners behind the first uses', of both rings, whichever has an empty stage, and the LSE of those that are
 * queries: asked for a use ahead and told with the loads. */
DEV void produce(const bwd_args &args, const bwd_maps &maps, uint32_t smem, shared_memory *shared)
{
    const owned_lines of_keys = shared->own[0], of_queries = shared->own[1];
    const int lane = threadIdx.x % WARP_THREADS;
    ring_use use = first_use(of_keys), next = use, other = first_use(of_queries);
    lse_pair lse = load_lse(args.fwd, of_keys, use, lane);
    next_use(other, of_queries);
    bool is_first = true, goes_on = is_in_use(use, of_keys), other_goes_on = is_in_use(other, of_queries);
#pragma unroll 1
    while (goes_on || other_goes_on) {
        if (goes_on && (is_first || is_empty(smem, use, 0))) {
            if (!is_first && elect_one())
                load_partners(maps, smem, of_keys, use, 0);
            __syncwarp();
            next_use(next, of_keys);
            const lse_pair of_next = load_lse(args.fwd, of_keys, next, lane);
            tell_lse(smem, shared, use, lse, lane);
            lse = of_next;
            use = next;
            is_first = false;
            goes_on = is_in_use(use, of_keys);
        }
        if (other_goes_on && is_empty(smem, other, 1)) {
            if (elect_one())
                load_partners(maps, smem, of_queries, other, 1);
            __syncwarp();
            next_use(other, of_queries);
            other_goes_on = is_in_use(other, of_queries);
        }
    }
}
#else
/* All partners behind the first use's, and the LSE of all that are queries: asked for a use ahead and told with the
 * loads, long before anybody wants them. */
DEV void produce(const bwd_args &args, const bwd_maps &maps, uint32_t smem, shared_memory *shared,
                 const owned_lines &own)
{
    const int lane = threadIdx.x % WARP_THREADS;
    const bool has_keys = own.at.has_keys;
    ring_use use = first_use(own), next = use;
    lse_pair lse;
    if (has_keys)
        lse = load_lse(args.fwd, own, use, lane);
#pragma unroll 1
    for (bool is_first = true; is_in_use(use, own); is_first = false) {
        next_use(next, own);
        if (!is_first) {
            barrier_wait(ADDRESS(smem, empty) + BARRIER_BYTES * use.stage, use.parity ^ 1);
            if (elect_one())
                load_partners(maps, smem, own, use, 0);
            __syncwarp(); /* else both sides of the branch may use the warp's uniform registers at a time (lab.md) */
        }
        if (has_keys) {
            const lse_pair of_next = load_lse(args.fwd, own, next, lane);
            tell_lse(smem, shared, use, lse, lane);
            lse = of_next;
        }
        use = next;
    }
}
#endif

/* ---- The helpers: three warps, which find D, or clear keys that do not exist ----
 *
 * D is the diagonal of dO * transpose(O), eight rows at a time on the tensor cores, for a third of the instructions of
 * sums. Lane l has dims 16 (l % 4) and further of row l / 4 of both: in which order a product takes the dims does not
 * matter, if both operands have the same. A product's rows 0 to 7 are these rows with half of a lane's words, its rows
 * 8 to 15 the same rows with the other half: each of two products has the right partner for one of the halves. */

/* Whose rows a helper warp takes in a round, in a stage; the last round has none for the last warp. */
DEV int stats_row(int thread, int round)
{
    return (round * HELPER_WARPS + thread / WARP_THREADS) * STATS_ROWS;
}

/* Stores -D of a row, which a lane on the diagonal of its products has. */
DEV void store_d(query_stats *to, int row, int lane, const float (&first)[4], const float (&second)[4])
{
    if (lane % 4 == lane / 4 / 2) {
        float *const minus_d = to->minus_d[row / 2] + row % 2;
        minus_d[0] = minus_d[2] = lane / 4 % 2 ? -(first[1] + second[3]) : -(first[0] + second[2]);
    }
}

/* D of a stage's rows, once its dO and O have landed. A round's products wait behind those of the consumers, so that
 * D_ROUNDS of them are started together. */
DEV void find_d(uint32_t d_o_box, uint32_t o_box, query_stats *to, int thread)
{
    const int lane = thread % WARP_THREADS, row = lane / 4;
#pragma unroll
    for (int of = 0; of < STATS_ROUNDS; of += D_ROUNDS) { /* a round that does not exist is found and not stored */
        float first[D_ROUNDS][4] = {}, second[D_ROUNDS][4] = {};
#pragma unroll
        for (int i = 0; i < D_ROUNDS && of + i < STATS_ROUNDS; i++) {
            const int in_stage = stats_row(thread, of + i) < 64 ? stats_row(thread, of + i) : 0;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint32_t at = chunk_offset(in_stage + row, 2 * (lane % 4) + j, ROW_CHUNKS);
                const uint4 o = load_shared_4(o_box + at), d_o = load_shared_4(d_o_box + at);
                const uint32_t a[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
                multiply_add<BF16>(first[i], a, o.x, o.z);
                multiply_add<BF16>(second[i], a, o.y, o.w);
            }
        }
#pragma unroll
        for (int i = 0; i < D_ROUNDS && of + i < STATS_ROUNDS; i++)
            if (stats_row(thread, of + i) < 64)
                store_d(to, stats_row(thread, of + i) + row, lane, first[i], second[i]);
    }
}

/* D of all uses. */
DEV void find_all_d(uint32_t smem, shared_memory *shared, const owned_lines &own, int thread)
{
#pragma unroll 1
    for (ring_use use = first_use(own); is_in_use(use, own); next_use(use, own)) {
        wait_use(ADDRESS(smem, full), use);
        __syncwarp(); /* products are the whole warp's */
        ACR_TRACE_POINT(use.tile, "helper: dO here");
        find_d(ADDRESS(smem, ring_y) + use.stage * BOX_BYTES, ADDRESS(smem, ring_o) + use.stage * BOX_BYTES,
               &shared->stats[use.stage], thread);
        arrive_warp(ADDRESS(smem, d_ready) + BARRIER_BYTES * use.stage, thread % WARP_THREADS);
        ACR_TRACE_POINT(use.tile, "helper: D stored");
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

DEV void help(uint32_t smem, shared_memory *shared)
{
    const owned_lines &own = shared->own[0];
    const int thread = threadIdx.x - WARP_THREADS;
    if (own.at.has_keys) {
        const owned_lines copy = own; /* in registers: shared memory would be read again behind every barrier */
        find_all_d(smem, shared, copy, thread);
        return;
    }
    if (!own.needs_clearing)
        return;
#pragma unroll 1
    for (ring_use use = first_use(own); is_in_use(use, own); next_use(use, own)) {
        const int stage = use.stage, first = use.tile * KV_TILE;
        wait_use(ADDRESS(smem, full), use);
        if (first + KV_TILE > own.partners)
            clear_partners(smem, stage, own.partners - first, thread);
        arrive_warp(ADDRESS(smem, d_ready) + BARRIER_BYTES * stage, thread % WARP_THREADS);
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
    const owned_lines &own = shared->own[ring_of<KEYS>()];
    const int in_group = c.thread / 32 * 16 + c.lane, line = own.at.first[c.index] + in_group;
    if (c.lane < 16) {
        key_range seen = {0, 0};
        if (line < own.lines)
            seen = visible_is_limited(e.rule) ? partners_of<KEYS>(e, line) : key_range{0, own.partners};
        shared->seen[c.index][in_group][0] = seen.first;
        shared->seen[c.index][in_group][1] = seen.end;
    }
    __syncwarp();
}

/* The address of the row of a box, among the warp's, that the lane names when matrices of 16 dims move. */
DEV uint32_t matrix_row(const consumer &c, uint32_t box, int step)
{
    return box + chunk_offset(c.thread / 32 * 16 + c.lane % 16, 2 * step + c.lane / 16, ROW_CHUNKS);
}

/* Loads the warp's rows of a box as the A operand of products over dims. */
DEV void load_lines(operand &to, const consumer &c, uint32_t box)
{
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++)
        load_matrices(to + 4 * step, matrix_row(c, box, step));
}

/* What it held is of no use: the first product overwrites it. */
DEV void forget(score_tile &s)
{
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; i++)
        asm volatile("" : "=f"(s[i]));
}

/* Starts lines * transpose(partners), as a group of its own: by the lines' registers, or by the box that holds them. */
template <bool FROM_BOX> DEV void start_scores(score_tile &s, const operand &lines, uint32_t box, uint64_t partners)
{
    const uint64_t in_box = matrix_descriptor(box, 0);
    forget(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++) {
        const uint64_t to = descriptor_at(partners, step * WGMMA_K * ELEM_BYTES);
        if constexpr (FROM_BOX)
            wgmma_ss(s, descriptor_at(in_box, step * WGMMA_K * ELEM_BYTES), to, step != 0);
        else
            wgmma_rs(s, lines + 4 * step, to, step != 0);
    }
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

/* Turns scores of columns [FIRST, END) of eight partners into probabilities. stats: of the stage's partners. */
template <bool KEYS, int FIRST, int END>
DEV void find_probabilities(score_tile &p, const score_tile &s, const consumer &c, const query_stats *stats)
{
#pragma unroll
    for (int i = 4 * FIRST; i < 4 * END; i += 4) {
        const float2 lse = KEYS ? *(const float2 *)(stats->lse + 2 * i + 2 * (c.lane % 4)) : float2{0.0f, 0.0f};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            p[i + 2 * h] = exp2_fast(fmaf(s[i + 2 * h], c.scale_log2, KEYS ? -lse.x : -c.lse[h]));
            p[i + 2 * h + 1] = exp2_fast(fmaf(s[i + 2 * h + 1], c.scale_log2, KEYS ? -lse.y : -c.lse[h]));
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
        const float2 d = !KEYS ? float2{0.0f, 0.0f} : *(const float2 *)stats->minus_d[i + c.lane % 4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = i + 2 * h;
            ds[at / 2] = pack<BF16>(p[at] * (dp[at] + (KEYS ? d.x : -c.d[h])),
                                    p[at + 1] * (dp[at + 1] + (KEYS ? d.y : -c.d[h])));
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
template <bool KEYS> DEV void wait_partners(const consumer &c, const ring_use &use, const owned_lines &own)
{
    wait_use(ADDRESS(c.smem, full), use, ring_of<KEYS>());
    if (own.needs_clearing)
        wait_use(ADDRESS(c.smem, d_ready), use);
}

template <bool KEYS> DEV void release(const consumer &c, int stage)
{
    arrive_warp(barrier_in(ADDRESS(c.smem, empty), ring_of<KEYS>(), stage), c.lane);
}

/* The partners' x of a stage, either way: summed over dims, or over partners; and their y. */
template <bool KEYS> DEV uint64_t partner_x(const consumer &c, int stage)
{
    return matrix_descriptor(box_in(ADDRESS(c.smem, ring_x), ring_of<KEYS>(), stage), 0);
}

template <bool KEYS> DEV uint64_t partner_y(const consumer &c, int stage)
{
    return matrix_descriptor(box_in(ADDRESS(c.smem, ring_y), ring_of<KEYS>(), stage), 0);
}

/* A warpgroup's lines, and their gradients so far. */
typedef struct held_lines {
    operand x, y;
    gradient dx, dy;
} held_lines;

/* Starts a stage's scores, and its dP. Queries' dO is read from shared memory: held in registers over the loop, CUDA
 * 13.0's assembler puts dS into them, although the next stage needs them (lab.md). */
template <bool KEYS> DEV void start_own_scores(score_tile &s, const held_lines &l, const consumer &c, int stage)
{
    start_scores<false>(s, l.x, ADDRESS(c.smem, x) + c.index * BOX_BYTES, partner_x<KEYS>(c, stage));
}

template <bool KEYS> DEV void start_weight_gradients(score_tile &dp, const held_lines &l, const consumer &c, int stage)
{
    start_scores<LINES_IN_SHARED || !KEYS>(dp, l.y, ADDRESS(c.smem, y) + c.index * BOX_BYTES,
                                           partner_y<KEYS>(c, stage));
}

/* From the scores, which are ready, to the probabilities; starts the products of dP and dV. dP's is asked for between
 * exponentials: before them the warps would wait until the tensor cores take it. */
template <bool KEYS>
DEV void find_p(held_lines &l, score_tile &p, score_tile &s, score_tile &dp, const consumer &c,
                const shared_memory *shared, const ring_use &use, bool masked)
{
    if constexpr (KEYS)
        ACR_TRACE_POINT(use.tile, "keys: scores ready");
    else
        ACR_TRACE_POINT(use.tile, "queries: scores ready");
    if (KEYS)
        wait_use(ADDRESS(c.smem, ready), use);
    if (masked)
        hide_partners(s, c, shared, use.tile * KV_TILE);
    find_probabilities<KEYS, 0, BEFORE_DP>(p, s, c, &shared->stats[use.stage]);
    start_weight_gradients<KEYS>(dp, l, c, use.stage);
    find_probabilities<KEYS, BEFORE_DP, KV_TILE / 8>(p, s, c, &shared->stats[use.stage]);
    if constexpr (KEYS)
        ACR_TRACE_POINT(use.tile, "keys: exponentials done");
    else
        ACR_TRACE_POINT(use.tile, "queries: exponentials done");
    if constexpr (KEYS) {
        packed_tile rounded;
        round_probabilities(rounded, p);
        start_gradient(l.dy, rounded, partner_y<KEYS>(c, use.stage));
    }
}

/* dS, rounded, once dP is there. LATER products have been started behind dP. release_before: a stage whose products
 * have then all ended, or -1. */
template <bool KEYS, int LATER>
DEV void find_ds(packed_tile &ds, const score_tile &p, const score_tile &dp, const consumer &c,
                 const shared_memory *shared, const ring_use &use, int release_before)
{
    if (KEYS)
        wait_use(ADDRESS(c.smem, d_ready), use);
    WGMMA_WAIT(LATER);
    if (release_before >= 0)
        release<KEYS>(c, release_before);
    find_score_gradients<KEYS>(ds, p, dp, c, &shared->stats[use.stage]);
    if constexpr (KEYS)
        ACR_TRACE_POINT(use.tile, "keys: score gradients done");
    else
        ACR_TRACE_POINT(use.tile, "queries: score gradients done");
}

/* The stages from `use` on that the lines have partners in, without a gap: the next stage's scores start before this
 * one's last product, which so runs under the exponentials. Leaves `use` behind the last. No product is under way
 * before or behind. */
template <bool KEYS>
DEV void visit_stages(held_lines &l, const consumer &c, const shared_memory *shared, ring_use &use,
                      const owned_lines &own, const visible_rows &seen)
{
    score_tile s, p, dp;
    packed_tile ds;
    int before = -1; /* the stage that the last product under way reads */
    bool goes_on = true;
    start_own_scores<KEYS>(s, l, c, use.stage);
    wgmma_commit(); /* in place of the last product */
#pragma unroll 1
    while (goes_on) {
        const int stage = use.stage;
        const bool masked = is_masked(use, seen);
        ring_use next = use;
        next_use(next, own);
        goes_on = is_visited(next, own, seen);
        WGMMA_WAIT(1); /* the scores */
        find_p<KEYS>(l, p, s, dp, c, shared, use, masked);
        const int next_stage = goes_on ? next.stage : stage; /* behind the last: of no use */
        if ((EARLY || !KEYS) &&
            goes_on) /* a branch keeps the assembler from moving exponentials behind the next wait */
            wait_partners<KEYS>(c, next, own);
        if (EARLY)
            start_own_scores<KEYS>(s, l, c, next_stage);
        find_ds<KEYS, KEYS + EARLY>(ds, p, dp, c, shared, use, before);
        if (!EARLY && KEYS && goes_on)
            wait_partners<KEYS>(c, next, own);
        if (!EARLY)
            start_own_scores<KEYS>(s, l, c, next_stage);
        start_gradient(l.dx, ds, partner_x<KEYS>(c, stage));
        ACR_TRACE_POINT(use.tile, "last product asked");
        WGMMA_WAIT(1); /* the next scores */
        before = stage;
        use = next;
    }
    WGMMA_WAIT(0);
    release<KEYS>(c, before);
}

/* Packs the warp's lines of a gradient into its rows of a box. */
DEV void stage_lines(const gradient &d, float factor, const consumer &c, uint32_t box)
{
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = pack<BF16>(d[8 * step + 2 * i] * factor, d[8 * step + 2 * i + 1] * factor);
        store_matrices(matrix_row(c, box, step), x);
    }
}

/* Stores the lines that stage_lines has left in the warp's rows of a box, whole rows of 16 bytes a lane. to: the
 * warpgroup's first line. A line that has no partners becomes zeros. */
DEV void store_staged(char *to, int64_t row_bytes, int lines, int columns, const consumer &c,
                      const shared_memory *shared, uint32_t box)
{
    const int chunk = c.lane % ROW_CHUNKS;
#pragma unroll
    for (int i = 0; i < 16; i += WARP_THREADS / ROW_CHUNKS) {
        const int line = c.thread / 32 * 16 + i + c.lane / ROW_CHUNKS;
        const uint4 values = load_shared_4(box + chunk_offset(line, chunk, ROW_CHUNKS)), none = {0, 0, 0, 0};
        const int32_t *const seen = shared->seen[c.index][line];
        if (line < lines && chunk * CHUNK_ELEMS < columns)
            *(uint4 *)(to + line * row_bytes + chunk * CHUNK_BYTES) = seen[0] < seen[1] ? values : none;
    }
}

/* Stores the lane's line h of a gradient as float32. factor: 0 where the line has no partners. */
DEV void store_f32_line(char *to, bool exists, int columns, float factor, const gradient &d, int h, const consumer &c)
{
#pragma unroll
    for (int i = 0; i < DIM / 8; i++) {
        const float2 values = {d[4 * i + 2 * h] * factor, d[4 * i + 2 * h + 1] * factor}, none = {0.0f, 0.0f};
        if (exists && 8 * i < columns)
            *(float2 *)(to + (8 * i + 2 * (c.lane % 4)) * 4) = factor != 0.0f ? values : none;
    }
}

DEV int warp_of(const consumer &c)
{
    return 4 * c.index + c.thread / WARP_THREADS;
}

template <bool KEYS> DEV void note_targets(const bwd_args &args, const consumer &c, shared_memory *shared)
{
    const fwd_args &a = args.fwd;
    const owned_lines &own = shared->own[ring_of<KEYS>()];
    if (c.lane == 0) {
        const line_head of = {{0, own.q_len, 0, own.kv_len}, {}, own.at.entry, own.at.head};
        const int first = own.at.first[c.index], elem_bytes = args.grad_f32 ? 4 : ELEM_BYTES;
        const fwd_strides &x_stride = KEYS ? args.dk_stride : args.dq_stride;
        line_targets *const to = &shared->targets[warp_of(c)];
        to->x = (char *)(KEYS ? args.dk : args.dq) + gradient_index<KEYS>(of, x_stride, first) * elem_bytes;
        to->x_row_bytes = x_stride.row * elem_bytes;
        to->x_columns = a.qk_dim;
        if (KEYS) {
            to->y = (char *)args.dv + gradient_index<KEYS>(of, args.dv_stride, first) * elem_bytes;
            to->y_row_bytes = args.dv_stride.row * elem_bytes;
            to->y_columns = a.v_dim;
        }
        to->lines = (KEYS ? a.kv_len : a.q_len) - first;
        to->is_f32 = args.grad_f32;
    }
    __syncwarp();
}

/* Stores the warp's lines of dK and dV, or of dQ, and computes those again that a hidden pair has spoilt. Lines without
 * a partner, and those that do not exist, get zeros. */
template <bool KEYS>
DEV void store_lines(const bwd_args &args, const held_lines &l, const consumer &c, const shared_memory *shared)
{
    const fwd_args &a = args.fwd;
    const owned_lines &own = shared->own[ring_of<KEYS>()];
    const line_targets &to = shared->targets[warp_of(c)];
    if (to.is_f32) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int line = lane_line(c) + 8 * h;
            const int32_t *const seen = shared->seen[c.index][line];
            const bool sees = seen[0] < seen[1], exists = line < to.lines;
            store_f32_line(to.x + line * to.x_row_bytes, exists, to.x_columns, sees ? a.scale : 0.0f, l.dx, h, c);
            if (KEYS)
                store_f32_line(to.y + line * to.y_row_bytes, exists, to.y_columns, sees ? 1.0f : 0.0f, l.dy, h, c);
        }
    } else {
        const uint32_t x_box = ADDRESS(c.smem, x) + c.index * BOX_BYTES,
                       y_box = ADDRESS(c.smem, y) + c.index * BOX_BYTES;
        if (LINES_IN_SHARED) /* the other warps' products have read the boxes, too */
            named_sync(STORE_BARRIER + c.index, WARPGROUP_THREADS);
        stage_lines(l.dx, a.scale, c, x_box);
        if (KEYS)
            stage_lines(l.dy, 1.0f, c, y_box);
        __syncwarp();
        store_staged(to.x, to.x_row_bytes, to.lines, to.x_columns, c, shared, x_box);
        if (KEYS)
            store_staged(to.y, to.y_row_bytes, to.lines, to.y_columns, c, shared, y_box);
    }
    const sequence rows = {0, own.q_len, 0, own.kv_len};
    const line_head of = {rows, entry_of(a, rows), own.at.entry, own.at.head};
    if (!hides_keys(of.entry))
        return;
    unsigned spoilt = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int32_t *const seen = shared->seen[c.index][lane_line(c) + 8 * h];
        spoilt |= find_spoilt(seen[0] < seen[1] && probe(l.dx, h) + (KEYS ? probe(l.dy, h) : 0.0f) != 0.0f) << 8 * h;
    }
    fix_lines<KEYS>(args, of, unstored_stats{}, spoilt, own.at.first[c.index] + c.thread / 32 * 16, 0, DIM, c.lane);
}

/* What a thread holds of its lines' O, if they are queries: of each of two, 32 bytes. */
typedef struct own_o {
    uint4 half[2][2];
} own_o;

/* Asks for the log-sum-exps and O of the lane's two queries. */
DEV void load_own_o(own_o &o, consumer &c, const fwd_args &a, const owned_lines &own)
{
    const sequence rows = {0, own.q_len, 0, own.kv_len};
    const int column = c.lane % 4 * 16;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = own.at.first[c.index] + lane_line(c) + 8 * h;
        const char *const from =
            (const char *)a.o + (output_index(a, rows, own.at.entry, own.at.head, row) + column) * ELEM_BYTES;
        c.lse[h] = -CUDART_INF_F;
        if (row < own.q_len)
            c.lse[h] = find_lse(a, rows, own.at.entry, own.at.head)[row];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            o.half[h][j] = {0, 0, 0, 0};
            if (row < own.q_len && column + 8 * j < a.v_dim)
                o.half[h][j] = *(const uint4 *)(from + j * CHUNK_BYTES);
        }
    }
}

/* The statistics of the lane's two queries, whose dO has landed. */
DEV void find_own_stats(consumer &c, const own_o &o)
{
    const uint32_t box = ADDRESS(c.smem, y) + c.index * BOX_BYTES;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++)
            sum += dot_chunk(o.half[h][j],
                             load_shared_4(box + chunk_offset(lane_line(c) + 8 * h, c.lane % 4 * 2 + j, ROW_CHUNKS)));
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        c.d[h] = sum;
        c.lse[h] = stats_lse(c.lse[h]);
    }
}

template <bool KEYS> DEV void consume(const bwd_args &args, uint32_t smem, shared_memory *shared, int index)
{
    const fwd_args &a = args.fwd;
    const owned_lines own = shared->own[ring_of<KEYS>()];
    const int thread = threadIdx.x % WARPGROUP_THREADS;
    consumer c = {smem, index, thread, thread % WARP_THREADS, {}, {}, a.scale_log2};
    const visible_entry e = entry_of(a, own);
    const visible_rows seen = shared->own[ring_of<KEYS>()].seen[index];
    ACR_TRACE_POINT(0, "owned lines known");
    note_partners<KEYS>(c, e, shared);
    note_targets<KEYS>(args, c, shared);
    held_lines l;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        l.dx[i] = l.dy[i] = 0.0f;
    own_o o;
    if constexpr (!KEYS)
        load_own_o(o, c, a, shared->own[ring_of<KEYS>()]);
    barrier_wait(ADDRESS(smem, own_full) + BARRIER_BYTES * ring_of<KEYS>(),
                 0); /* by lines without partners, too: what is stored goes through the boxes */
    ring_use use = first_use(own);
    if (is_in_use(use, own)) {
        load_lines(l.x, c, ADDRESS(smem, x) + index * BOX_BYTES);
        if (!LINES_IN_SHARED && KEYS)
            load_lines(l.y, c, ADDRESS(smem, y) + index * BOX_BYTES);
        if constexpr (!KEYS)
            find_own_stats(c, o);
        ACR_TRACE_POINT(0, "lines in registers");
#pragma unroll 1
        while (is_in_use(use, own)) {
            wait_partners<KEYS>(c, use, own);
            ACR_TRACE_POINT(use.tile, "partners landed");
            if (is_visited(use, own, seen)) {
                visit_stages<KEYS>(l, c, shared, use, own, seen);
                continue;
            }
            if (KEYS) /* the helpers read what is released here */
                wait_use(ADDRESS(smem, d_ready), use);
            release<KEYS>(c, use.stage);
            next_use(use, own);
        }
    }
    allow_next_kernel();
    store_lines<KEYS>(args, l, c, shared);
    ACR_TRACE_POINT(0, "stored");
}

/* Of a kind's ring, and of the statistics of queries, which only that of keys wants. */
DEV void init_ring(uint32_t smem, int kind)
{
    for (int i = 0; i < STAGES; i++) {
        barrier_init(barrier_in(ADDRESS(smem, full), kind, i), 1);
        barrier_init(barrier_in(ADDRESS(smem, empty), kind, i), CONSUMER_WARPS);
        if (kind == 0) {
            barrier_init(ADDRESS(smem, ready) + BARRIER_BYTES * i, 1);
            barrier_init(ADDRESS(smem, d_ready) + BARRIER_BYTES * i, HELPER_WARPS);
        }
    }
    barrier_init_done();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ bwd_args args, const __grid_constant__ bwd_maps all_maps)
{
    const fwd_maps &maps = all_maps.inputs;
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_memory *const shared = (shared_memory *)memory;
    const uint32_t smem = smem_address(memory);
    const int group = read_warpgroup(), warp = __shfl_sync(~0u, threadIdx.x / WARP_THREADS, 0);
    ACR_TRACE_POINT(0, "begun");
    if (warp == 0 || (MIXED && warp == 3)) { /* asks for lines as soon as it knows which */
        const int kind = MIXED && warp == 3;
        const line_place at = find_place(args.fwd, kind);
        if (elect_one()) {
            prefetch_map(at.has_keys ? &maps.k : &maps.q);
            prefetch_map(at.has_keys ? &maps.v : &maps.o);
            barrier_init(ADDRESS(smem, own_full) + BARRIER_BYTES * kind, 1);
            barrier_init_done();
        }
        wait_for_previous_kernel();
        if (elect_one())
            load_own(maps, smem, at, kind);
    } else if (warp == 1 || (MIXED && warp == 2)) { /* meanwhile, which partners they have */
        const int kind = MIXED && warp == 2;
        if (elect_one())
            init_ring(smem, kind);
        wait_for_previous_kernel();
        if (elect_one()) {
            owned_lines &own = shared->own[kind];
            own = find_owned(args.fwd, kind);
            if (is_in_use(first_use(own), own))
                load_partners(all_maps, smem, own, first_use(own), kind);
        }
    } else
        wait_for_previous_kernel();
    __syncthreads();
    if (group == 0) {
        REGISTERS_GIVE(PRODUCER_REGISTERS);
        if (warp != 0)
            help(smem, shared);
        else {
#if MIXED
            produce(args, all_maps, smem, shared);
#else
            const owned_lines own = shared->own[0];
            produce(args, all_maps, smem, shared, own);
#endif
        }
    } else {
        REGISTERS_TAKE(CONSUMER_REGISTERS);
        if (MIXED ? group == 1 : shared->own[0].at.has_keys != 0)
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

static int64_t count_tiles(int64_t lines)
{
    return (lines + Q_TILE - 1) / Q_TILE;
}

/* Of a head of keys, and of the heads of its group. */
static int64_t count_head_tiles(const acr_problem *problem)
{
    if (MIXED)
        return count_tiles(problem->kv_len > problem->q_len ? problem->kv_len : problem->q_len);
    return count_tiles(problem->kv_len) + count_tiles(problem->q_len) * (problem->q_heads / problem->kv_heads);
}

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    const char *reason = tile_why_not(problem, device);
    if (reason)
        return reason;
    if (MIXED && problem->q_heads != problem->kv_heads)
        return "q_heads is not kv_heads: a CTA owns keys and queries of one head (MIXED)";
    if (MIXED && (problem->flags & ACR_KV_LENS))
        return "ACR_KV_LENS: no warp clears keys that do not exist (MIXED)";
    if (problem->batch > 65535)
        return "batch is above 65535";
    if (count_head_tiles(problem) > 65535)
        return "a key head and its query heads have more than 65535 tiles of 128 keys or queries";
    return NULL;
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    (void)device;
    *launch = (acr__launch){
        .grid = {(uint32_t)problem->kv_heads, (uint32_t)problem->batch, (uint32_t)count_head_tiles(problem)},
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

/* Of a CTA whose warpgroups visit so many stages, of keys or not. By an H200 (lab.md, "The cost"): of two warpgroups
 * side by side a visit takes 1080 cycles for keys and 820 for queries, of one alone 1600; that of queries is a guess,
 * in the same ratio. A CTA takes 5100 besides. With MIXED 0.92 of the former, 5700 besides, and where CTAs are many an
 * eighth more, since all load partners of both kinds. */
static double cta_cycles(double first, int first_keys, double second, int second_keys)
{
    const double visit_cycles[2] = {MIXED ? 754.0 : 820.0, MIXED ? 994.0 : 1080.0}, alone_cycles[2] = {1215.0, 1600.0},
                 besides = MIXED ? 5700.0 : 5100.0,
                 both = first * visit_cycles[first_keys] + second * visit_cycles[second_keys],
                 first_alone = first * alone_cycles[first_keys], second_alone = second * alone_cycles[second_keys],
                 longer = first_alone > second_alone ? first_alone : second_alone;
    return (both > longer ? both : longer) + besides;
}

static double cost(const acr_problem *problem, const acr__device *device)
{
    const visible_entry entry = acr__longest_entry(problem);
    double cycles = 0, most = 0; /* of all CTAs, and of one */
#if MIXED
    for (int32_t tile = 0; tile < count_head_tiles(problem); tile++) {
        const double own =
            cta_cycles(count_visits(entry, 1, tile * GROUP_LINES), 1, count_visits(entry, 0, tile * GROUP_LINES), 0);
        cycles += (double)(problem->batch * problem->q_heads) * own * 1.12;
        most = own > most ? own : most;
    }
#else
    for (int keys = 0; keys <= 1; keys++) {
        const int32_t tiles = (int32_t)count_tiles(keys ? problem->kv_len : problem->q_len);
        const double heads = (double)(problem->batch * (keys ? problem->kv_heads : problem->q_heads)),
                     group = keys ? (double)(problem->q_heads / problem->kv_heads) : 1.0;
        for (int32_t tile = 0; tile < tiles; tile++) {
            double visits[CONSUMERS];
            for (int i = 0; i < CONSUMERS; i++)
                visits[i] = group * count_visits(entry, keys, first_line(tiles, tile, i, lines_are_apart(entry.rule)));
            const double own = cta_cycles(visits[0], keys, visits[1], keys);
            cycles += heads * own;
            most = own > most ? own : most;
        }
    }
#endif
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
    .boxes = {.q_rows = KV_TILE, .k_rows = KV_TILE, .v_rows = KV_TILE, .o_rows = KV_TILE, .out_rows = KV_TILE},
};

#endif
