/* Backward attention on Hopper's warpgroup tensor cores, fp16 and bf16, sm_90a.
 *
 * Three kernels, one after the other. NAME_prepare: D = rowsum(dO * O) and LSE in powers of two. NAME: a CTA owns 128
 * keys of a key head and visits the query tiles that see them, of all query heads of the group: dK and dV stay in
 * registers, so nothing of them is ever summed between CTAs. dQ is summed in float32 in the workspace, in the order of
 * the key tiles: a tile's count of visits says whose turn it is, and so every run gives the same bits. NAME_finish:
 * scales dQ, converts it to the output's type, and sums the gradients of sinks.
 *
 * Two consumer warpgroups hold 64 keys each. Scores are computed transposed, keys by queries: then P and dS are in the
 * registers that the products P^T * dO and dS^T * Q take them from; dS goes through shared memory for dQ = dS * K
 * alone, which is issued a query tile later, so that the warpgroups may be half a tile apart. After Dao 2023
 * (FlashAttention-2's loop over keys outside) and Shah et al. 2024. See README.md.
 *
 * Parameters: DIM (64 or 128; dims up to it, zero-padded), Q_TILE (128 for DIM 64, else 64), optional BF16=1, PACKED=1
 * (packed batches alone), TERMS (FWD_TERM_CAP or 0), PART (64; 32 leaves registers to what the line has more to do).
 *
 * PARAMETERS: DIM Q_TILE BF16=0 PACKED=0 TERMS=0 PART=64 */
#include "cuda/device/attention/parameters.h"

#ifndef PACKED
#define PACKED 0
#endif
#ifndef PART
#define PART 64
#endif
#include <stddef.h>

#include "cuda/kernels/bwd_wgmma/workspace.h"

enum {
    ELEM_BYTES = 2,
    PANEL_ELEMS = 64, /* tiles are stored in panels of 128-byte rows, as the swizzle wants it */
    PANEL_ROW_BYTES = PANEL_ELEMS * ELEM_BYTES,
    PANELS = DIM / PANEL_ELEMS,
    GROUP_KEYS = 64, /* of a consumer warpgroup */
    CONSUMERS = 2,
    KV_TILE = CONSUMERS * GROUP_KEYS,
    THREADS = 128 * (CONSUMERS + 1),
    STAGES = 2,               /* of Q and dO */
    HEADS_MEMORY = 32 * 1024, /* KB */
    DS_STAGES = 2,            /* of dS: warpgroups may be that far apart */
    KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES,
    Q_PANEL_BYTES = Q_TILE * PANEL_ROW_BYTES,
    KV_BYTES = PANELS * KV_PANEL_BYTES,
    Q_BYTES = PANELS * Q_PANEL_BYTES,
    DS_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES, /* 64 queries of each key */
    DS_BYTES = Q_TILE / PANEL_ELEMS * DS_PANEL_BYTES,
    PART_QUERIES = PART,                 /* whose scores a warpgroup has in registers at a time */
    QUERY_PARTS = Q_TILE / PART_QUERIES, /* that a warpgroup visits of a tile */
    DQ_HALF_FLOATS = 64 * 64, /* of dQ that a warpgroup computes: 64 rows of DIM 64, or 64 columns of DIM 128 */
    STATS_BYTES = 2 * Q_TILE * 4
};

/* What the producer tells of a work tile: its keys, and the query tiles that see one of them. */
typedef struct key_work {
    int32_t kv_tile; /* -1: there is no more work */
    int32_t kv_head, entry;
    int32_t q_begin, q_len, kv_begin, kv_len;
    int32_t tile_first, tile_end; /* query tiles of the entry, visited from the last to the first */
    int32_t full_first, full_end; /* of them, those whose rows all see all keys of the tile */
} key_work;

/* What lies where in shared memory; the device's loads want each tile at a multiple of 1024 bytes. */
typedef struct shared_memory {
    uint8_t k[KV_BYTES], v[KV_BYTES];
    uint8_t q[STAGES][Q_BYTES], d_o[STAGES][Q_BYTES];
    uint8_t ds[DS_STAGES][DS_BYTES];
    float dq[CONSUMERS][DQ_HALF_FLOATS];
    float stats[STAGES][2][Q_TILE];
    key_work work[2];             /* of a work tile, while the next is loaded; of round r that in r % 2 */
    int32_t key_rows[KV_TILE][2]; /* the rows that see a key, [first, end) */
    uint64_t kv_full, kv_empty;   /* K, V and the work tile */
    uint64_t q_full[STAGES], q_empty[STAGES], do_full[STAGES], do_empty[STAGES];
    uint64_t ds_full[DS_STAGES], ds_empty[DS_STAGES];
    uint64_t dq_full[CONSUMERS], dq_empty[CONSUMERS];
} shared_memory;

#ifdef __CUDACC__

#include "cuda/device/attention/gradient_lines.cuh"
#include "cuda/device/isa/bulk.cuh"
#include "cuda/device/isa/flag.cuh"
#include "cuda/device/isa/names.cuh"
#include "cuda/device/isa/shared.cuh"
#include "cuda/device/isa/wgmma_mn.cuh"

enum {
    PRODUCER_REGISTERS = 40,
    CONSUMER_REGISTERS = 232,
    CONSUMER_WARPS = 4 * CONSUMERS,
    ALONE = -1, /* instead of a turn: nobody else has these floats of dQ */
    ANY_ORDER = -2,
    BOTH_CONSUMERS = 1,                /* a named barrier */
    FINISH_THREADS = WARPGROUP_THREADS /* of the last kernel */
};

static_assert(DIM == 64 || DIM == 128, "DIM: 64 or 128");
static_assert(Q_TILE == (DIM == 64 ? 128 : 64), "Q_TILE: dQ is two halves of 64 x 64");
static_assert(PART == 64 || PART == 32, "PART: 64 or 32");
static_assert((TERMS & ~FWD_TERM_CAP) == 0, "TERMS: softcap alone");
static_assert(sizeof(shared_memory) <= 232448, "227 KB, a CTA's limit on sm_90");

/* ---- Workspace ---- */

/* What a query head has in the workspace of one of its tiles. */
typedef struct tile_results {
    int32_t *visits;
    float *stats, *dq;
    int64_t slot; /* floats from a key tile's dq to the next one's; 0: all add to the same */
} tile_results;

DEV tile_results results_of(const fwd_args &a, int head, int tile)
{
    const bwd_workspace w = bwd_workspace_of(&a, Q_TILE, KV_TILE, DIM);
    char *const base = (char *)a.workspace;
    const int64_t at = (int64_t)head * w.tiles + tile;
    return {(int32_t *)(base + w.visits) + at, (float *)(base + w.stats) + at * (2 * Q_TILE),
            (float *)(base + w.dq) + at * (Q_TILE * DIM), w.slots > 1 ? w.slot : 0};
}

DEV uint32_t count_key_tiles(const fwd_args &a)
{
    return (a.kv_len + KV_TILE - 1) / KV_TILE;
}

/* Which keys of a tile are spoilt: KV_TILE bits. */
DEV char *spoilt_of(const fwd_args &a, int entry, int kv_head, int tile)
{
    const uint32_t number = (entry * a.kv_heads + kv_head) * count_key_tiles(a) + tile;
    return (char *)a.workspace + bwd_workspace_of(&a, Q_TILE, KV_TILE, DIM).spoilt + (int64_t)number * (KV_TILE / 8);
}

/* ---- The first kernel: a CTA a tile of queries; grid {tiles, query heads, entries}. ---- */

extern "C" __global__ void __launch_bounds__(STATS_THREADS)
    NAME_WITH(KERNEL_NAME, _prepare)(const __grid_constant__ bwd_args args)
{
    const fwd_args &a = args.fwd;
    const int tile = blockIdx.x, head = blockIdx.y, entry = blockIdx.z;
    wait_for_previous_kernel();
    allow_next_kernel();
    const sequence rows = find_sequence(a, entry);
    if (blockIdx.x == 0 && head == 0 && entry == 0 && threadIdx.x == 0)
        *(uint32_t *)a.workspace = 0;
    if (tile * Q_TILE >= rows.q_len)
        return;
    const tile_results to = results_of(a, head, bwd_first_tile(&a, entry, Q_TILE) + tile);
    if (threadIdx.x == 0)
        *to.visits = 0;
    if (args.atomics && to.slot == 0)
        for (int i = threadIdx.x; i < Q_TILE * DIM / 4; i += STATS_THREADS)
            ((float4 *)to.dq)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    find_row_stats(args, rows, entry, head, tile, to.stats);
}

/* ---- The second kernel: work tiles ---- */

DEV uint32_t count_work(const fwd_args &a)
{
    return count_key_tiles(a) * a.kv_heads * a.batch;
}

/* Heads whose work tiles alternate, so that a key tile begins well behind the one that adds to dQ before it: as many as
 * L2 holds Q, dO and dQ of. */
DEV uint32_t heads_at_once(const fwd_args &a)
{
    return (uint32_t)max((int64_t)HEADS_MEMORY / ((int64_t)a.q_len * a.group * DIM * 8 / 1024 + 1), (int64_t)1);
}

/* Of some heads at once, the key tiles from the first on: a key tile's CTA adds to dQ after those of the key tiles
 * before it, which have smaller numbers and so have begun. */
DEV key_work find_work(const fwd_args &a, uint32_t number)
{
    const uint32_t tiles = count_key_tiles(a), heads = a.kv_heads * a.batch;
    const uint32_t most = min(heads_at_once(a), heads), first = number / (tiles * most) * most,
                   together = min(heads - first, most), at = number - first * tiles, head = first + at % together;
    key_work w;
    w.kv_tile = at / together;
    w.entry = head / a.kv_heads;
    w.kv_head = head - w.entry * a.kv_heads;
    const sequence rows = find_sequence(a, w.entry);
    w.q_begin = rows.q_begin;
    w.q_len = rows.q_len;
    w.kv_begin = rows.kv_begin;
    w.kv_len = rows.kv_len;
    const visible_rows seen = visible_to_keys(entry_of(a, rows), w.kv_tile * KV_TILE, KV_TILE);
    const bool cut = (w.kv_tile + 1) * KV_TILE > rows.kv_len;
    w.tile_first = seen.first / Q_TILE;
    w.tile_end = seen.first < seen.end ? (seen.end + Q_TILE - 1) / Q_TILE : w.tile_first;
    /* rows that do not exist have probabilities of 0 by their LSE */
    const int full_end = seen.full_end >= rows.q_len ? w.tile_end : seen.full_end / Q_TILE;
    w.full_first = cut ? w.tile_end : (seen.full_first + Q_TILE - 1) / Q_TILE;
    w.full_end = full_end;
    return w;
}

DEV visible_entry entry_of(const fwd_args &a, const key_work &w)
{
    sequence s = {w.q_begin, w.q_len, w.kv_begin, w.kv_len};
    return entry_of(a, s);
}

/* The key tiles that visit a query tile: consecutive ones. */
DEV visible_tiles key_tiles_of(const visible_entry &e, int tile)
{
    return visible_tiles_of(visible_to_rows(e, tile * Q_TILE, Q_TILE), KV_TILE);
}

/* Query tiles of all heads of the group. */
DEV int count_visits(const fwd_args &a, const key_work &w)
{
    return (w.tile_end - w.tile_first) * a.group;
}

/* ---- The producer: one thread ---- */

/* Loads a query tile as use number `use` of the rings of Q and dO. */
DEV void load_queries(const fwd_maps &maps, uint32_t smem, int use, const float *stats, int row, int head, int batch)
{
    const int stage = use % STAGES;
    const uint32_t parity = (use / STAGES & 1) ^ 1, at = BARRIER_BYTES * stage, q_full = ADDRESS(smem, q_full) + at,
                   do_full = ADDRESS(smem, do_full) + at;
    barrier_wait(ADDRESS(smem, q_empty) + at, parity);
    barrier_arrive_expecting(q_full, Q_BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        load_box(ADDRESS(smem, q) + stage * Q_BYTES + panel * Q_PANEL_BYTES, &maps.q, q_full, panel * PANEL_ELEMS, row,
                 head, batch);
    barrier_wait(ADDRESS(smem, do_empty) + at, parity);
    barrier_arrive_expecting(do_full, Q_BYTES + STATS_BYTES);
    load_bytes(ADDRESS(smem, stats) + stage * STATS_BYTES, stats, STATS_BYTES, do_full);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        load_box(ADDRESS(smem, d_o) + stage * Q_BYTES + panel * Q_PANEL_BYTES, &maps.o, do_full, panel * PANEL_ELEMS,
                 row, head, batch);
}

DEV void produce(const bwd_args &args, const fwd_maps &maps, uint32_t smem, shared_memory *shared)
{
    const fwd_args &a = args.fwd;
    uint32_t *const ticket = (uint32_t *)a.workspace;
    const uint32_t kv_full = ADDRESS(smem, kv_full);
    int use = 0;
    for (uint32_t round = 0;; round++) {
        const uint32_t number = atomicAdd(ticket, 1u);
        key_work w = {};
        w.kv_tile = -1;
        if (number < count_work(a))
            w = find_work(a, number);
        barrier_wait(ADDRESS(smem, kv_empty), (round & 1) ^ 1);
        shared->work[round % 2] = w;
        if (w.kv_tile < 0) {
            barrier_arrive(kv_full);
            return;
        }
        const int batch = PACKED ? 0 : w.entry, key = w.kv_begin + w.kv_tile * KV_TILE;
        barrier_arrive_expecting(kv_full, 2 * KV_BYTES);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            load_box(ADDRESS(smem, k) + panel * KV_PANEL_BYTES, &maps.k, kv_full, panel * PANEL_ELEMS, key, w.kv_head,
                     batch);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            load_box(ADDRESS(smem, v) + panel * KV_PANEL_BYTES, &maps.v, kv_full, panel * PANEL_ELEMS, key, w.kv_head,
                     batch);
#pragma unroll 1
        for (int head = w.kv_head * a.group; head < (w.kv_head + 1) * a.group; head++) {
            const float *stats = results_of(a, head, bwd_first_tile(&a, w.entry, Q_TILE) + w.tile_end - 1).stats;
#pragma unroll 1
            for (int tile = w.tile_end - 1; tile >= w.tile_first; tile--, use++, stats -= 2 * Q_TILE)
                load_queries(maps, smem, use, stats, w.q_begin + tile * Q_TILE, head, batch);
        }
    }
}

/* ---- The accumulator of dQ: one thread, which adds what the consumers leave in shared memory ---- */

/* Adds a query tile's dQ, of both consumers, when the key tiles before this one have: it is number `turn`; with turn
 * ALONE it stores them, and with ANY_ORDER nobody waits. */
DEV void add_dq(uint32_t smem, int use, int turn, int32_t *visits, float *dq)
{
    if (turn > 0) {
        while (load_flag(visits) != turn)
            ;
        bulk_global_fence();
    }
#pragma unroll
    for (int half = 0; half < CONSUMERS; half++) {
        const uint32_t from = ADDRESS(smem, dq) + half * (DQ_HALF_FLOATS * 4);
        barrier_wait(ADDRESS(smem, dq_full) + BARRIER_BYTES * half, use & 1);
        if (turn > 0 || turn == ANY_ORDER)
            add_floats(dq + half * DQ_HALF_FLOATS, from, DQ_HALF_FLOATS * 4);
        else
            store_bytes(dq + half * DQ_HALF_FLOATS, from, DQ_HALF_FLOATS * 4);
        bulk_commit();
    }
    bulk_wait_read();
#pragma unroll
    for (int half = 0; half < CONSUMERS; half++)
        barrier_arrive(ADDRESS(smem, dq_empty) + BARRIER_BYTES * half);
    if (turn >= 0) {
        bulk_wait_done();
        bulk_global_fence();
        store_flag(visits, turn + 1);
    }
}

DEV void accumulate_dq(const bwd_args &args, uint32_t smem, const shared_memory *shared)
{
    const fwd_args &a = args.fwd;
    int use = 0;
    for (uint32_t round = 0;; round++) {
        barrier_wait(ADDRESS(smem, kv_full), round & 1);
        const key_work *const w = &shared->work[round % 2];
        const int kv_tile = w->kv_tile;
        if (kv_tile < 0)
            return;
        const visible_entry entry = entry_of(a, *w);
        const int tile_first = w->tile_first, tile_end = w->tile_end;
#pragma unroll 1
        for (int head = w->kv_head * a.group; head < (w->kv_head + 1) * a.group; head++) {
            const tile_results to = results_of(a, head, bwd_first_tile(&a, w->entry, Q_TILE) + w->tile_end - 1);
            int32_t *visits = to.visits;
            float *dq = to.dq + kv_tile * to.slot;
#pragma unroll 1
            for (int tile = tile_end - 1; tile >= tile_first; tile--, use++, visits--, dq -= Q_TILE * DIM) {
                /* the key tiles that visit the query tile are consecutive */
                const int turn = to.slot != 0        ? ALONE
                                 : args.atomics != 0 ? ANY_ORDER
                                                     : kv_tile - key_tiles_of(entry, tile).first;
                add_dq(smem, use, turn, visits, dq);
            }
        }
        bulk_wait_done();
        barrier_arrive(ADDRESS(smem, kv_empty)); /* the work tile is read no more */
    }
}

/* ---- Consumers: a warpgroup each. Arrays are in registers, as device/isa/wgmma.cuh says; rows are keys. ---- */

typedef float score_tile[PART_QUERIES / 2];
typedef uint32_t packed_tile[PART_QUERIES / 4];
typedef float key_gradient[DIM / 2];
typedef float query_gradient[DQ_HALF_FLOATS / 128];

/* Where a thread is, and what stays the same for it. */
typedef struct consumer {
    uint32_t smem;
    int index, thread, lane; /* among the consumers; in the warpgroup; in the warp */
    uint64_t k, v;           /* descriptors of the warpgroup's keys, summed over their dims */
    uint64_t k_keys;         /* of all keys, summed over the keys: the dims of the warpgroup's half of dQ */
    uint32_t ds_row;         /* address of the row of dS that the lane names to store_matrices */
    float scale_log2;
} consumer;

/* The first of the lane's two keys in the tile; the other is the eighth after it. */
DEV int lane_key(const consumer &c)
{
    return c.index * GROUP_KEYS + c.thread / 32 * 16 + c.lane / 4;
}

/* Notes which rows see the warp's keys. */
DEV void note_key_rows(const consumer &c, const visible_entry &e, const key_work *w, shared_memory *shared)
{
    const int key = c.index * GROUP_KEYS + c.thread / 32 * 16 + c.lane;
    __syncwarp(); /* those of the work tile before are read no more */
    if (c.lane < 16) {
        const visible_rows rows = visible_to_keys(e, w->kv_tile * KV_TILE + key, 1);
        shared->key_rows[key][0] = rows.first;
        shared->key_rows[key][1] = rows.end;
    }
    __syncwarp();
}

DEV void wait_use(uint32_t barriers, int use)
{
    barrier_wait(barriers + BARRIER_BYTES * (use % STAGES), use / STAGES & 1);
}

/* One arrival per warp, behind what all its lanes have done. */
DEV void arrive_warp(uint32_t barrier, int lane)
{
    __syncwarp();
    if (lane == 0)
        barrier_arrive(barrier);
}

/* What the array held before is of no use: products name their sums as operands even where they overwrite them. */
template <int ELEMS> DEV void forget(float (&d)[ELEMS])
{
#pragma unroll
    for (int i = 0; i < ELEMS; i++)
        asm volatile("" : "=f"(d[i]));
}

/* Starts S^T = K * transpose(Q), or dP^T = V * transpose(dO), as a group of its own. */
DEV void start_scores(score_tile &s, uint64_t keys, uint64_t queries)
{
    forget(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM / WGMMA_K; step++) {
        const uint32_t in_panel = step % 4 * WGMMA_K * ELEM_BYTES;
        wgmma_ss(s, descriptor_at(keys, step / 4 * KV_PANEL_BYTES + in_panel),
                 descriptor_at(queries, step / 4 * Q_PANEL_BYTES + in_panel), step != 0);
    }
    wgmma_commit();
}

/* Starts dV += P^T * dO, or dK += dS^T * Q, as a group of its own. */
DEV void start_key_gradient(key_gradient &d, const packed_tile &p, uint64_t queries, int accumulate)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < PART_QUERIES / WGMMA_K; step++)
        wgmma_rs_mn(d, p + 4 * step, descriptor_at(queries, step * WGMMA_K * PANEL_ROW_BYTES), step != 0 || accumulate);
    wgmma_commit();
}

/* Starts the warpgroup's half of dQ = dS * K, as a group of its own. */
DEV void start_query_gradient(query_gradient &d, uint64_t ds, uint64_t keys)
{
    forget(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_K; step++)
        wgmma_ss_mn(d, descriptor_at(ds, step * WGMMA_K * PANEL_ROW_BYTES),
                    descriptor_at(keys, step * WGMMA_K * PANEL_ROW_BYTES), step != 0);
    wgmma_commit();
}

/* The descriptor of a tile of Q or dO, either way: panel_bytes is not looked at where dims are summed over. */
DEV uint64_t query_matrix(uint32_t tiles, int use)
{
    return matrix_descriptor(tiles + use % STAGES * Q_BYTES, Q_PANEL_BYTES);
}

/* Turns scores into probabilities, rounded ones in p. With a softcap s becomes the probabilities times the slope of the
 * cap. lse: of the lane's first column. */
DEV void find_probabilities(score_tile &s, packed_tile &p, const float *lse, const consumer &c, const fwd_args &a,
                            const shared_memory *shared, bool masked, int query)
{
    const bool is_capped = has_term(FWD_TERM_CAP) && a.softcap > 0.0f;
    if (masked) {
        const int32_t(*const seen)[2] = shared->key_rows + lane_key(c);
        const int column = query + 2 * (c.lane % 4), first[2] = {seen[0][0] - column, seen[8][0] - column},
                  end[2] = {seen[0][1] - column, seen[8][1] - column};
#pragma unroll
        for (int i = 0; i < PART_QUERIES / 2; i++) {
            const int at = 8 * (i / 4) + i % 2, h = i % 4 / 2;
            if (at < first[h] || at >= end[h])
                s[i] = -CUDART_INF_F;
        }
    }
#pragma unroll
    for (int column = 0; column < PART_QUERIES / 8; column++) {
        const float2 l = *(const float2 *)(lse + 8 * column);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float *const x = s + 4 * column + 2 * h;
            float slope[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (is_capped) {
                    const float t = tanh_fast(x[i] * a.softcap_in);
                    slope[i] = fmaf(-t, t, 1.0f);
                    x[i] = x[i] == -CUDART_INF_F ? 0.0f : exp2_fast(fmaf(t, a.softcap_out, -(i == 0 ? l.x : l.y)));
                } else
                    x[i] = exp2_fast(fmaf(x[i], c.scale_log2, -(i == 0 ? l.x : l.y)));
            }
            p[2 * column + h] = pack<BF16>(x[0], x[1]);
            if (is_capped) {
                x[0] *= slope[0];
                x[1] *= slope[1];
            }
        }
    }
}

/* dS = P * (dP - D), rounded. */
DEV void find_score_gradients(packed_tile &ds, const score_tile &p, const score_tile &dp, const float *d)
{
#pragma unroll
    for (int column = 0; column < PART_QUERIES / 8; column++) {
        const float2 sum = *(const float2 *)(d + 8 * column);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = 4 * column + 2 * h;
            ds[2 * column + h] = pack<BF16>(p[at] * (dp[at] - sum.x), p[at + 1] * (dp[at + 1] - sum.y));
        }
    }
}

/* Rows of dS: keys; 64 queries a panel. */
DEV void store_score_gradients(const packed_tile &ds, const consumer &c, int buffer, int part)
{
    const int query = part * PART_QUERIES;
    const uint32_t row = c.ds_row + buffer * DS_BYTES + query / PANEL_ELEMS * DS_PANEL_BYTES;
#pragma unroll
    for (int step = 0; step < PART_QUERIES / 16; step++)
        store_matrices(row ^ (uint32_t)((query % PANEL_ELEMS / 8 + step * 2) * CHUNK_BYTES), ds + 4 * step);
}

/* Leaves the warpgroup's half of dQ to the thread that adds it up. Register 4g + r of thread t is float
 * 4 (128g + t) + r of the half. */
DEV void hand_over(const query_gradient &d, const consumer &c, int use)
{
    const uint32_t to = ADDRESS(c.smem, dq) + c.index * (DQ_HALF_FLOATS * 4) + c.thread * 16;
    barrier_wait(ADDRESS(c.smem, dq_empty) + BARRIER_BYTES * c.index, (use & 1) ^ 1);
#pragma unroll
    for (int g = 0; g < 8; g++)
        store_shared_float4(to + g * (WARPGROUP_THREADS * 16), d[4 * g], d[4 * g + 1], d[4 * g + 2], d[4 * g + 3]);
    shared_stores_visible();
    arrive_warp(ADDRESS(c.smem, dq_full) + BARRIER_BYTES * c.index, c.lane);
}

/* Waits for both warpgroups' dS of a use and starts the warpgroup's half of dQ of it. */
DEV void start_dq_of(query_gradient &d, const consumer &c, int use)
{
    const int buffer = use % DS_STAGES;
    const int panel = DIM == 64 ? c.index : 0;
    barrier_wait(ADDRESS(c.smem, ds_full) + BARRIER_BYTES * buffer, use / DS_STAGES & 1);
    start_query_gradient(
        d, matrix_descriptor(ADDRESS(c.smem, ds) + buffer * DS_BYTES + panel * DS_PANEL_BYTES, DS_PANEL_BYTES),
        c.k_keys);
}

/* Keys that do not exist may be anything in a packed batch or behind a key length, and NaN times a gradient of zero is
 * NaN: both warpgroups clear them. */
DEV void clear_keys(const consumer &c, const key_work &w)
{
    for (int i = c.index * WARPGROUP_THREADS + c.thread; i < KV_TILE * 8; i += CONSUMERS * WARPGROUP_THREADS)
        if (w.kv_tile * KV_TILE + i / 8 >= w.kv_len)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                store_shared_4(ADDRESS(c.smem, k) + panel * KV_PANEL_BYTES + i * 16, 0, 0, 0, 0);
                store_shared_4(ADDRESS(c.smem, v) + panel * KV_PANEL_BYTES + i * 16, 0, 0, 0, 0);
            }
    shared_stores_visible();
    named_sync(BOTH_CONSUMERS, CONSUMERS * WARPGROUP_THREADS);
}

/* The same of queries, in packed batches: in the last tile of a sequence others' rows follow. */
DEV void clear_queries(const consumer &c, uint32_t tiles, int use, int first)
{
    for (int i = c.index * WARPGROUP_THREADS + c.thread; i < Q_TILE * 8; i += CONSUMERS * WARPGROUP_THREADS)
        if (i / 8 >= first)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++)
                store_shared_4(tiles + use % STAGES * Q_BYTES + panel * Q_PANEL_BYTES + i * 16, 0, 0, 0, 0);
    shared_stores_visible();
    named_sync(BOTH_CONSUMERS, CONSUMERS * WARPGROUP_THREADS);
}

/* Where a key's row of dK or dV begins, in elements. */
DEV int64_t key_gradient_index(const key_work &w, const fwd_strides &stride, int key)
{
    return (PACKED ? 0 : w.entry * stride.batch) + w.kv_head * stride.head + (w.kv_begin + key) * stride.row;
}

/* Stores the lane's two rows of dK and dV, and notes for the last kernel which of the warp's are not finite: here the
 * NaN fix-up has no registers. A key that no row sees gets zeros, and so does one that does not exist where it has a
 * place in the gradients. */
DEV void store_key_gradients(const bwd_args &args, const key_gradient &dk, const key_gradient &dv, const key_work &w,
                             const shared_memory *shared, bool is_visited, const consumer &c)
{
    const fwd_args &a = args.fwd;
    const int keys = PACKED ? w.kv_len : a.kv_len;
    unsigned spoilt = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int in_tile = lane_key(c) + 8 * h, key = w.kv_tile * KV_TILE + in_tile;
        const bool is_seen = is_visited && shared->key_rows[in_tile][0] < shared->key_rows[in_tile][1];
        store_gradient_row(args, args.dv, key_gradient_index(w, args.dv_stride, key), key < keys, a.v_dim,
                           is_seen ? 1.0f : 0.0f, dv, h, c.lane);
        store_gradient_row(args, args.dk, key_gradient_index(w, args.dk_stride, key), key < keys, a.qk_dim,
                           is_seen ? a.scale : 0.0f, dk, h, c.lane);
        spoilt |= find_spoilt(is_seen && probe(dk, h) + probe(dv, h) != 0.0f) << 8 * h;
    }
    if (c.lane == 0)
        ((uint16_t *)spoilt_of(a, w.entry, w.kv_head, w.kv_tile))[lane_key(c) / 16] = spoilt;
}

/* Behind the last product of a visit, its dQ: what they have read is released, and dQ leaves. */
DEV void finish_visit(const query_gradient &dq, const consumer &c, int use)
{
    arrive_warp(ADDRESS(c.smem, ds_empty) + BARRIER_BYTES * (use % DS_STAGES), c.lane);
    hand_over(dq, c, use);
}

/* One query tile, that begins with row `query`: dQ of the visit before, and all other products of this one, 64 queries
 * after 64. No product is under way before or behind. */
template <int IS_FIRST>
DEV void visit(key_gradient &dk, key_gradient &dv, const consumer &c, const fwd_args &a, const key_work *w,
               shared_memory *shared, int use, int query, bool masked)
{
    const int stage = use % STAGES, buffer = use % DS_STAGES;
    const bool is_cut = PACKED && query + Q_TILE > w->q_len;
    const uint64_t q = query_matrix(ADDRESS(c.smem, q), use), d_o = query_matrix(ADDRESS(c.smem, d_o), use);
    score_tile s;

    wait_use(ADDRESS(c.smem, q_full), use);
    if (is_cut)
        clear_queries(c, ADDRESS(c.smem, q), use, w->q_len - query);
    if constexpr (IS_FIRST)
        start_scores(s, c.k, q);
    else {
        query_gradient dq;
        start_dq_of(dq, c, use - 1);
        start_scores(s, c.k, q);
        WGMMA_WAIT(1); /* dQ */
        finish_visit(dq, c, use - 1);
    }
    wait_use(ADDRESS(c.smem, do_full), use);
    if (is_cut)
        clear_queries(c, ADDRESS(c.smem, d_o), use, w->q_len - query);
#pragma unroll
    for (int part = 0; part < QUERY_PARTS; part++) {
        const float *const stats = &shared->stats[stage][0][part * PART_QUERIES + 2 * (c.lane % 4)];
        const uint32_t rows = part * PART_QUERIES * PANEL_ROW_BYTES;
        score_tile dp;
        packed_tile p, ds;
        start_scores(dp, c.v, descriptor_at(d_o, rows));
        WGMMA_WAIT(1); /* the scores */
        find_probabilities(s, p, stats, c, a, shared, masked, query + part * PART_QUERIES);
        start_key_gradient(dv, p, descriptor_at(d_o, rows), !IS_FIRST || part > 0);
        WGMMA_WAIT(1); /* dP */
        find_score_gradients(ds, s, dp, stats + Q_TILE);
        start_key_gradient(dk, ds, descriptor_at(q, rows), !IS_FIRST || part > 0);
        if (part + 1 < QUERY_PARTS)
            start_scores(s, c.k, descriptor_at(q, rows + PART_QUERIES * PANEL_ROW_BYTES));
        if (part == 0)
            barrier_wait(ADDRESS(c.smem, ds_empty) + BARRIER_BYTES * buffer, (use / DS_STAGES & 1) ^ 1);
        store_score_gradients(ds, c, buffer, part);
    }
    shared_stores_visible();
    arrive_warp(ADDRESS(c.smem, ds_full) + BARRIER_BYTES * buffer, c.lane);
    WGMMA_WAIT(0);
    arrive_warp(ADDRESS(c.smem, q_empty) + BARRIER_BYTES * stage, c.lane);
    arrive_warp(ADDRESS(c.smem, do_empty) + BARRIER_BYTES * stage, c.lane);
}

DEV void consume(const bwd_args &args, uint32_t smem, shared_memory *shared, int index)
{
    const fwd_args &a = args.fwd;
    const int thread = threadIdx.x % WARPGROUP_THREADS, lane = threadIdx.x % WARP_THREADS;
    const int own_keys = index * GROUP_KEYS, own_rows = own_keys * PANEL_ROW_BYTES;
    const int ds_key = own_keys + thread / 32 * 16 + lane % 16;
    const consumer c = {smem,
                        index,
                        thread,
                        lane,
                        matrix_descriptor(ADDRESS(smem, k) + own_rows, 0),
                        matrix_descriptor(ADDRESS(smem, v) + own_rows, 0),
                        matrix_descriptor(ADDRESS(smem, k) + (DIM == 64 ? 0 : index) * KV_PANEL_BYTES, KV_PANEL_BYTES),
                        ADDRESS(smem, ds) + chunk_offset(ds_key, lane / 16, 8),
                        a.scale_log2};
    int use = 0;
    key_gradient dk, dv;
    for (uint32_t round = 0;; round++) {
        barrier_wait(ADDRESS(smem, kv_full), round & 1);
        const key_work *const w = &shared->work[round % 2];
        if (w->kv_tile < 0)
            break;
        int left = count_visits(a, *w);
        const bool is_visited = left > 0;
        if (is_visited) {
            note_key_rows(c, entry_of(a, *w), w, shared);
            if ((a.kv_lens != nullptr || PACKED) && (w->kv_tile + 1) * KV_TILE > w->kv_len)
                clear_keys(c, *w);
            int tile = w->tile_end - 1;
            visit<1>(dk, dv, c, a, w, shared, use, tile * Q_TILE, tile < w->full_first || tile >= w->full_end);
#pragma unroll 1
            while (--left > 0) {
                tile = tile == w->tile_first ? w->tile_end - 1 : tile - 1;
                use++;
                visit<0>(dk, dv, c, a, w, shared, use, tile * Q_TILE, tile < w->full_first || tile >= w->full_end);
            }
            query_gradient dq;
            start_dq_of(dq, c, use);
            WGMMA_WAIT(0);
            finish_visit(dq, c, use++);
        }
        arrive_warp(ADDRESS(smem, kv_empty), lane);
        store_key_gradients(args, dk, dv, *w, shared, is_visited, c);
    }
}

DEV void init_barriers(uint32_t smem)
{
    barrier_init(ADDRESS(smem, kv_full), 1);
    barrier_init(ADDRESS(smem, kv_empty), CONSUMER_WARPS + 1);
    for (int i = 0; i < STAGES; i++) {
        barrier_init(ADDRESS(smem, q_full) + BARRIER_BYTES * i, 1);
        barrier_init(ADDRESS(smem, q_empty) + BARRIER_BYTES * i, CONSUMER_WARPS);
        barrier_init(ADDRESS(smem, do_full) + BARRIER_BYTES * i, 1);
        barrier_init(ADDRESS(smem, do_empty) + BARRIER_BYTES * i, CONSUMER_WARPS);
    }
    for (int i = 0; i < DS_STAGES; i++) {
        barrier_init(ADDRESS(smem, ds_full) + BARRIER_BYTES * i, CONSUMER_WARPS);
        barrier_init(ADDRESS(smem, ds_empty) + BARRIER_BYTES * i, CONSUMER_WARPS);
    }
    for (int i = 0; i < CONSUMERS; i++) {
        barrier_init(ADDRESS(smem, dq_full) + BARRIER_BYTES * i, WARPGROUP_THREADS / WARP_THREADS);
        barrier_init(ADDRESS(smem, dq_empty) + BARRIER_BYTES * i, 1);
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
    __syncthreads();
    wait_for_previous_kernel();
    allow_next_kernel();
    if (group == 0) {
        REGISTERS_GIVE(PRODUCER_REGISTERS);
        if (threadIdx.x == 0)
            produce(args, maps, smem, shared);
        if (threadIdx.x == WARP_THREADS)
            accumulate_dq(args, smem, shared);
    } else {
        REGISTERS_TAKE(CONSUMER_REGISTERS);
        consume(args, smem, shared, group - 1);
    }
}

/* ---- The third kernel: a CTA half a tile of queries; grid {2 tiles, query heads, entries}. Where the rule hides
 * something, CTAs of a tile of keys each follow those of queries: the heads of a group share the key head's. ---- */

/* Sums the parts of a half tile's dQ and stores it. */
DEV void finish_dq(const bwd_args &args, const line_head &of, int tile, int half)
{
    const fwd_args &a = args.fwd;
    const int thread = threadIdx.x, lane = thread % WARP_THREADS;
    const tile_results from = results_of(a, of.head, bwd_first_tile(&a, of.batch, Q_TILE) + tile);
    const visible_tiles seen = key_tiles_of(of.entry, tile);
    const float factor = seen.first < seen.end ? a.scale : 0.0f;
    float d[32] = {};
    for (int kv_tile = seen.first; kv_tile < (from.slot != 0 ? seen.end : min(seen.end, seen.first + 1)); kv_tile++)
#pragma unroll
        for (int g = 0; g < 8; g++) {
            const float4 *dq = (const float4 *)(from.dq + kv_tile * from.slot + half * DQ_HALF_FLOATS);
            const float4 x = dq[g * WARPGROUP_THREADS + thread];
            d[4 * g] += x.x;
            d[4 * g + 1] += x.y;
            d[4 * g + 2] += x.z;
            d[4 * g + 3] += x.w;
        }
    const int column = DIM == 64 ? 0 : 64 * half, columns = a.qk_dim - column;
    const int first_row = tile * Q_TILE + (DIM == 64 ? 64 * half : 0) + thread / WARP_THREADS * 16;
    unsigned spoilt = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = first_row + lane / 4 + 8 * h;
        store_gradient_row(args, args.dq, gradient_index<false>(of, args.dq_stride, row) + column, row < of.rows.q_len,
                           columns, factor, d, h, lane);
        spoilt |= find_spoilt(row < of.rows.q_len && probe(d, h) != 0.0f) << 8 * h;
    }
    fix_lines<false>(args, of, stored_stats{results_of(a, 0, 0).stats}, spoilt, first_row, column, column + 64, lane);
}

/* Fixes dK and dV of the keys of a tile, a warp 32 of them. */
DEV void finish_keys(const bwd_args &args, const line_head &of, int tile)
{
    const fwd_args &a = args.fwd;
    const int warp = threadIdx.x / WARP_THREADS, keys = KV_TILE / (FINISH_THREADS / WARP_THREADS);
    static_assert(KV_TILE == FINISH_THREADS, "a lane's bit is a key");
    const uint32_t spoilt = ((const uint32_t *)spoilt_of(a, of.batch, of.head, tile))[warp];
    fix_lines<true>(args, of, stored_stats{results_of(a, 0, 0).stats}, spoilt, tile * KV_TILE + warp * keys, 0, DIM,
                    threadIdx.x % WARP_THREADS);
}

extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
    NAME_WITH(KERNEL_NAME, _finish)(const __grid_constant__ bwd_args args)
{
    const fwd_args &a = args.fwd;
    const int number = blockIdx.x, ctas = CONSUMERS * bwd_tiles(&a, Q_TILE), head = blockIdx.y, entry = blockIdx.z;
    wait_for_previous_kernel();
    allow_next_kernel();
    if (args.dsinks != nullptr && blockIdx.x == 0 && entry == 0)
        sum_sinks<FINISH_THREADS>(args, head, results_of(a, head, 0).stats);
    line_head of = {find_sequence(a, entry), {}, entry, head};
    of.entry = entry_of(a, of.rows);
    if (number < ctas) {
        if (number / CONSUMERS * Q_TILE < of.rows.q_len)
            finish_dq(args, of, number / CONSUMERS, number % CONSUMERS);
        return;
    }
    of.head = head / a.group;
    const int tile = (number - ctas) * a.group + head % a.group;
    if (tile < (int)count_key_tiles(a))
        finish_keys(args, of, tile);
}

#else

#include "cuda/model/fwd_model.h"

enum {
    HELPER_THREADS = 256, /* as above */
    FINISH_THREADS = 128
};

static const acr__tiling TILING = {.work = ACR__WORK_TILES, /* of the helpers */
                                   .q_tile = Q_TILE,
                                   .threads = THREADS,
                                   .smem_bytes = sizeof(shared_memory),
                                   .packed_only = PACKED};

#include "cuda/model/tile_kernel.h"

static int64_t count_key_tiles(const acr_problem *problem)
{
    return (problem->kv_len + KV_TILE - 1) / KV_TILE;
}

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    if (count_key_tiles(problem) > INT32_MAX / 2 / (problem->kv_heads * problem->batch))
        return "batch * kv_heads has more than 2^30 key tiles";
    return tile_why_not(problem, device);
}

static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    const fwd_args args = {.batch = (int32_t)problem->batch,
                           .q_heads = (int32_t)problem->q_heads,
                           .kv_heads = (int32_t)problem->kv_heads,
                           .q_len = (int32_t)problem->q_len,
                           .kv_len = (int32_t)problem->kv_len};
    (void)device;
    return (size_t)bwd_workspace_of(&args, Q_TILE, KV_TILE, DIM).bytes;
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    const int64_t work = count_key_tiles(problem) * problem->kv_heads * problem->batch;
    *launch = (acr__launch){.grid = {(uint32_t)(work < device->sm_count ? work : device->sm_count), 1, 1},
                            .block = THREADS,
                            .smem_bytes = sizeof(shared_memory)};
}

static void shape_prepare(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    *launch = acr__tiling_launch(&TILING, problem, device);
    launch->block = HELPER_THREADS;
    launch->smem_bytes = 0;
}

static void shape_finish(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    const int64_t group = problem->q_heads / problem->kv_heads;
    shape_prepare(problem, device, launch);
    launch->grid[0] *= CONSUMERS;
    if (visible_is_limited(acr__longest_entry(problem).rule))
        launch->grid[0] += (uint32_t)((count_key_tiles(problem) + group - 1) / group);
    launch->block = FINISH_THREADS;
}

/* Predicted in lab.md, not fitted: of a visit of a query tile by a key tile, and of a key tile besides, in cycles of an
 * SM; and what the helpers move. */
static double cost(const acr_problem *problem, const acr__device *device)
{
    /* Of head dims to 64 fitted by hand to four runs on an H200 (lab.md); the rest is predicted. */
    const double visit_cycles = DIM == 128 ? (PART == 32 ? 4900.0 : 4000.0) : 6300.0, tile_cycles = 3200.0;
    const double cap_cycles =
        TERMS & FWD_TERM_CAP ? 1500.0 : 0.0; /* charged without one, too: other lines are for that */
    const int64_t key_tiles = count_key_tiles(problem);
    const double heads = (double)(problem->batch * problem->kv_heads),
                 group = (double)(problem->q_heads / problem->kv_heads);
    double visits = 0, most = 0; /* of a key head: together, and by one key tile */
    for (int64_t tile = 0; tile < key_tiles; tile++) {
        const visible_rows rows = visible_to_keys(acr__longest_entry(problem), (int32_t)tile * KV_TILE, KV_TILE);
        const double own =
            rows.first < rows.end ? group * (double)((rows.end + Q_TILE - 1) / Q_TILE - rows.first / Q_TILE) : 0;
        visits += own;
        most = own > most ? own : most;
    }
    const double step = visit_cycles + cap_cycles;
    const double shared = heads * (visits * step + (double)key_tiles * tile_cycles) / device->sm_count,
                 alone = most * step + tile_cycles;
    const double rows = (double)(problem->batch * problem->q_heads * problem->q_len),
                 sums = (double)bwd_slots(key_tiles) * 4.0; /* bytes of dQ that the last kernel reads of an element */
    const double handing_over_s = 4.6e-6; /* three kernels, each of which waits for the last row of the one before */
    const double helper_bytes = rows * DIM * (2 * ELEM_BYTES + ELEM_BYTES + sums);
    return (shared > alone ? shared : alone) / device->clock_hz +
           helper_bytes / acr__memory_rate(problem, device, 1.0) + 3 * ACR__LAUNCH_SECONDS + handing_over_s;
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("bwd_wgmma", 90, 90),
    .pass = ACR_BACKWARD,
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .traits = PACKED ? ACR__TRAIT_PACKED : 0,
    .terms = TERMS | FWD_TERM_SINKS, /* which are in the log-sum-exp */
    .why_not = why_not,
    .workspace = workspace,
    .cost = cost,
    .shape = shape,
    .boxes = {.q_rows = Q_TILE, .k_rows = KV_TILE, .v_rows = KV_TILE, .o_rows = Q_TILE},
    .before = {.symbol = KERNEL_TEXT "_prepare", .shape = shape_prepare},
    .after = {.symbol = KERNEL_TEXT "_finish", .shape = shape_finish},
};

#endif
