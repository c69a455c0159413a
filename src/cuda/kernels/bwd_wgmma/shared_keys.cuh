/* Consumers of head dims to 256: both warpgroups have the same 64 keys. The first computes S, P and dV, the second dP,
 * dS and dK, and each every other 64 columns of dQ. P goes from the first to the second through shared memory, rounded
 * as it is for dV: in float32 it would take the place of dO's second stage. Visits of pairs are paired_dims.cuh's. A
 * piece of bwd_wgmma.cu, which includes it. */
#ifndef ACR_BWD_WGMMA_SHARED_KEYS_CUH
#define ACR_BWD_WGMMA_SHARED_KEYS_CUH

/* Stores the lane's two rows of the warpgroup's gradient, and notes for the last kernel which of the warp's are not
 * finite. A key that no row sees gets zeros, and so does one that does not exist where it has a place. */
DEV void store_key_gradient(const bwd_args &args, const key_gradient &d, const key_work &w, const shared_memory *shared,
                            bool is_visited, const consumer &c)
{
    const fwd_args &a = args.fwd;
    const bool is_dv = c.index == 0;
    const int keys = PACKED ? w.kv_len : a.kv_len;
    unsigned spoilt = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = lane_key(c) + 8 * h, key = w.kv_tile * KV_TILE + row % GROUP_KEYS;
        const bool is_seen = is_visited && shared->key_rows[row][0] < shared->key_rows[row][1];
        store_gradient_row(args, is_dv ? args.dv : args.dk,
                           key_gradient_index(w, is_dv ? args.dv_stride : args.dk_stride, key), key < keys,
                           is_dv ? a.v_dim : a.qk_dim,
                           !is_seen ? 0.0f
                           : is_dv  ? 1.0f
                                    : a.scale,
                           d, h, c.lane);
        spoilt |= find_spoilt(is_seen && probe(d, h) != 0.0f) << 8 * h;
    }
    if (c.lane == 0 && (!PAIR || w.kv_tile < (int)count_key_tiles(a)))
        ((uint16_t *)spoilt_of(a, w.entry, w.kv_head, w.kv_tile))[lane_key(c) / 16] = spoilt;
}

/* Rows that follow a packed batch's sequence are cleared by both warpgroups before either looks at a tile of it. */
DEV void clear_cut_tile(const consumer &c, const key_work *w, int use, int query)
{
    if (!PACKED || query + Q_TILE <= w->q_len)
        return;
    wait_use(ADDRESS(c.smem, q_full), use);
    wait_use(ADDRESS(c.smem, do_full), use);
    clear_queries(c, ADDRESS(c.smem, q), use, w->q_len - query);
    clear_queries(c, ADDRESS(c.smem, d_o), use, w->q_len - query);
}

/* Where the thread leaves P of 16 columns, or finds it: that of the same thread of the other warpgroup. */
DEV uint32_t exchange_place(const consumer &c, int step)
{
    return ADDRESS(c.smem, p) + (step * WARPGROUP_THREADS + c.thread) * 16;
}

/* What probabilities are multiplied with when they are sent: small ones times a large dP - D are large in dS, and fp16
 * would lose the last digits of all below 2^-14. Those of a row whose log-sum-exp is rounded may pass 1. */
#define SENT_FACTOR (BF16 ? 1.0f : 0x1p14f)

/* Turns scores of 16 columns into probabilities, rounded ones in p, and finds what the second warpgroup gets to find dS
 * from: p, with a softcap times the cap's slope. lse: of the lane's first column. */
DEV void find_probabilities(uint32_t *sent, score_tile &s, packed_tile &p, int step, const float *lse,
                            const consumer &c, const fwd_args &a)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i % 2 == 0)
            find_probabilities_of(s, p, 2 * step + i / 2, lse + 8 * (2 * step + i / 2), c, a, has_softcap(a));
        sent[i] = has_term(FWD_TERM_CAP) || !BF16
                      ? pack<BF16>(s[8 * step + 2 * i] * SENT_FACTOR, s[8 * step + 2 * i + 1] * SENT_FACTOR)
                      : p[4 * step + i];
    }
}

/* dS = P * (dP - D), rounded. d: D of the lane's first column. */
DEV void find_score_gradients(packed_tile &ds, const score_tile &dp, const float *d, const consumer &c)
{
#pragma unroll
    for (int step = 0; step < PART_QUERIES / 16; step++) {
        const uint4 sent = load_shared_4(exchange_place(c, step));
        const uint32_t words[4] = {sent.x, sent.y, sent.z, sent.w};
        float p[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = unpack(words[i]);
            p[i / 2][2 * (i % 2)] = pair.x * (1 / SENT_FACTOR);
            p[i / 2][2 * (i % 2) + 1] = pair.y * (1 / SENT_FACTOR);
        }
#pragma unroll
        for (int column = 2 * step; column < 2 * step + 2; column++)
            find_score_gradients_of(ds, column, p[column % 2], dp, d + 8 * column);
    }
}

#if PAIR
#include "cuda/kernels/bwd_wgmma/paired_dims.cuh"
#else

/* Behind the last product of the visit before that reads dS. */
DEV void release_ds(const consumer &c, int use)
{
    arrive_warp(ADDRESS(c.smem, ds_empty) + BARRIER_BYTES * (use % DS_STAGES), c.lane);
}

/* Starts scores, of a visit that is not its work tile's first behind the first part of dQ of the visit before, which
 * then leaves under them. */
template <int IS_FIRST> DEV void start_visit(score_tile &s, const consumer &c, uint64_t keys, uint64_t queries, int use)
{
    if constexpr (IS_FIRST)
        start_scores(s, nullptr, keys, queries);
    else {
        query_gradient dq;
        start_dq_of(dq, c, use - 1, 0);
        start_scores(s, nullptr, keys, queries);
        WGMMA_WAIT(1); /* dQ */
        hand_over(dq, c, (use - 1) * DQ_ROUNDS);
    }
    WGMMA_WAIT(0);
}

/* Finds probabilities and sends the second warpgroup its own. */
DEV void send_probabilities(score_tile &s, packed_tile &p, const float *lse, const consumer &c, const fwd_args &a)
{
#pragma unroll
    for (int step = 0; step < PART_QUERIES / 16; step++) {
        uint32_t sent[4];
        find_probabilities(sent, s, p, step, lse, c, a);
        store_shared_4(exchange_place(c, step), sent[0], sent[1], sent[2], sent[3]);
    }
}

/* The first warpgroup's part of a visit of a query tile, which begins with row `query`. No product is under way before
 * or behind. P of the visit before has been read: its dS, which the dQ before has waited for, was found from it. */
template <int IS_FIRST>
DEV void visit_values(key_gradient &dv, const consumer &c, const fwd_args &a, const key_work *w, shared_memory *shared,
                      int use, int query, bool masked)
{
    score_tile s;
    packed_tile p;
    query_gradient dq;
    clear_cut_tile(c, w, use, query);
    wait_use(ADDRESS(c.smem, q_full), use);
    start_visit<IS_FIRST>(s, c, c.k, query_matrix(ADDRESS(c.smem, q), use), use);
    arrive_warp(ADDRESS(c.smem, q_empty) + BARRIER_BYTES * (use % STAGES), c.lane);
    if constexpr (!IS_FIRST)
        start_dq_of(dq, c, use - 1, 1);
    wait_use(ADDRESS(c.smem, do_full), use); /* the statistics, too */
    if (masked)
        hide_scores(s, c, shared, query);
    send_probabilities(s, p, &shared->stats[use % STAGES][0][2 * (c.lane % 4)], c, a);
    arrive_warp(ADDRESS(c.smem, p_full), c.lane);
    start_key_gradient(dv, p, query_matrix(ADDRESS(c.smem, d_o), use), !IS_FIRST);
    if constexpr (!IS_FIRST) {
        WGMMA_WAIT(1); /* dQ */
        release_ds(c, use - 1);
        hand_over(dq, c, (use - 1) * DQ_ROUNDS + 1);
    }
    WGMMA_WAIT(0);
    arrive_warp(ADDRESS(c.smem, do_empty) + BARRIER_BYTES * (use % STAGES), c.lane);
}

/* The second warpgroup's part. */
template <int IS_FIRST>
DEV void visit_keys(key_gradient &dk, const consumer &c, const key_work *w, shared_memory *shared, int use, int query)
{
    const int buffer = use % DS_STAGES;
    score_tile dp;
    packed_tile ds;
    query_gradient dq;
    clear_cut_tile(c, w, use, query);
    wait_use(ADDRESS(c.smem, do_full), use);
    start_visit<IS_FIRST>(dp, c, c.v, query_matrix(ADDRESS(c.smem, d_o), use), use);
    if constexpr (!IS_FIRST)
        start_dq_of(dq, c, use - 1, 1);
    barrier_wait(ADDRESS(c.smem, p_full), use & 1);
    find_score_gradients(ds, dp, &shared->stats[use % STAGES][1][2 * (c.lane % 4)], c);
    arrive_warp(ADDRESS(c.smem, do_empty) + BARRIER_BYTES * (use % STAGES), c.lane);
    wait_use(ADDRESS(c.smem, q_full), use);
    start_key_gradient(dk, ds, query_matrix(ADDRESS(c.smem, q), use), !IS_FIRST);
    if constexpr (!IS_FIRST) {
        WGMMA_WAIT(1); /* dQ */
        release_ds(c, use - 1);
    }
    barrier_wait(ADDRESS(c.smem, ds_empty) + BARRIER_BYTES * buffer, (use / DS_STAGES & 1) ^ 1);
    store_score_gradients(ds, c, buffer, 0);
    shared_stores_visible();
    arrive_warp(ADDRESS(c.smem, ds_full) + BARRIER_BYTES * buffer, c.lane);
    if constexpr (!IS_FIRST)
        hand_over(dq, c, (use - 1) * DQ_ROUNDS + 1);
    WGMMA_WAIT(0);
    arrive_warp(ADDRESS(c.smem, q_empty) + BARRIER_BYTES * (use % STAGES), c.lane);
}

/* dQ of a work tile's last visit. */
DEV void finish_dq_of(const consumer &c, int use)
{
#pragma unroll
    for (int round = 0; round < DQ_ROUNDS; round++) {
        query_gradient dq;
        start_dq_of(dq, c, use, round);
        WGMMA_WAIT(0);
        if (round == DQ_ROUNDS - 1)
            release_ds(c, use);
        hand_over(dq, c, use * DQ_ROUNDS + round);
    }
}

#endif

template <int IS_KEYS, int IS_FIRST>
DEV void visit(key_gradient &d, const consumer &c, const fwd_args &a, const key_work *w, shared_memory *shared, int use,
               int tile)
{
    if constexpr (IS_KEYS)
        visit_keys<IS_FIRST>(d, c, w, shared, use, tile * Q_TILE);
    else
        visit_values<IS_FIRST>(d, c, a, w, shared, use, tile * Q_TILE, tile < w->full_first || tile >= w->full_end);
}

template <int IS_KEYS> DEV void consume(const bwd_args &args, uint32_t smem, shared_memory *shared)
{
    const fwd_args &a = args.fwd;
    const int thread = threadIdx.x % WARPGROUP_THREADS, lane = threadIdx.x % WARP_THREADS;
    const consumer c = {
        smem,
        IS_KEYS,
        thread,
        lane,
        matrix_descriptor(ADDRESS(smem, k), 0),
        matrix_descriptor(ADDRESS(smem, v), 0),
        matrix_descriptor(ADDRESS(smem, k) + (k_panel_of(own_rank()) + IS_KEYS) * KV_PANEL_BYTES, KV_PANEL_BYTES),
        ADDRESS(smem, ds) + chunk_offset(thread / 32 * 16 + lane % 16, lane / 16, 8),
        a.scale_log2};
    int use = 0;
    key_gradient d;
    for (uint32_t round = 0;; round++) {
        const key_work *const w = wait_key_work(smem, shared, round);
        if (w->kv_tile < 0)
            break;
        int left = count_visits(a, *w);
        const bool is_visited = left > 0;
        if (is_visited) {
            begin_keys(c, a, w, shared);
            int tile = w->tile_end - 1, head = 0;
            visit<IS_KEYS, 1>(d, c, a, w, shared, use, tile);
#pragma unroll 1
            while (--left > 0) {
                head = head + 1 == a.group ? 0 : head + 1;
                tile -= head == 0;
                use++;
                visit<IS_KEYS, 0>(d, c, a, w, shared, use, tile);
            }
            finish_dq_of(c, use++);
        }
        arrive_warp(ADDRESS(smem, kv_empty), lane);
        store_key_gradient(args, d, *w, shared, is_visited, c);
    }
}

#endif
