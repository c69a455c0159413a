/* Two CTAs, a cluster, own 256 neighbouring keys of a head (PAIR, head dims to 128), each two of their four blocks of
 * 64 (key_of), and visit the same query tiles at about the same time. Each computes S, dP, dV and dK of its own keys as
 * own_keys.cuh says; a warpgroup whose block no row of a query tile sees leaves its products out and gives zeros for
 * dS. Of dQ each sums half over the keys of both, so that half as much of dQ leaves it: of DIM 64 half of the queries,
 * else half of the dims. For that each copies its dS of those queries into the other's shared memory. A piece of
 * bwd_wgmma.cu, which includes it.
 *
 * dQ of a visit is computed two visits later, when dS of the other CTA has come, by one of the warpgroups: by the first
 * one that of even visits. The CTAs wait for each other at two places: dS (ds_full) and its buffers (ds_empty). Both
 * have the same visits, so no one waits in vain. A cluster is on the GPU whole or not at all, and its work tile is
 * numbered behind those that it waits for. */
#ifndef ACR_BWD_WGMMA_PAIRED_KEYS_CUH
#define ACR_BWD_WGMMA_PAIRED_KEYS_CUH

#include "cuda/kernels/bwd_wgmma/own_keys.cuh"

enum {
    DS_PANELS = DS_BYTES / DS_PANEL_BYTES,
    PART_BYTES = PART_QUERIES * PANEL_ROW_BYTES,    /* of a part's rows, in a panel of Q or dO */
    WARP_DS_BYTES = DS_PANEL_BYTES / CONSUMER_WARPS /* 16 keys of 64 queries: rows one behind the other */
};

/* ---- Consumers ---- */

/* Waits for dS of a use, of both CTAs, and starts the CTA's half of its dQ. */
DEV void start_dq_of(query_gradient &d, const consumer &c, int use)
{
    const int buffer = use % DS_STAGES;
    barrier_wait(ADDRESS(c.smem, ds_full) + BARRIER_BYTES * buffer, use / DS_STAGES & 1);
    const uint32_t own = ADDRESS(c.smem, ds) + buffer * DS_BYTES + ds_panel_of(cluster_rank()) * DS_PANEL_BYTES;
    const uint64_t ds = matrix_descriptor(own, DS_PANEL_BYTES),
                   partner_ds =
                       matrix_descriptor(ADDRESS(c.smem, partner_ds) + buffer * DS_PANEL_BYTES, DS_PANEL_BYTES),
                   partner_k = matrix_descriptor(ADDRESS(c.smem, partner_k), KV_PANEL_BYTES);
    forget(d);
    wgmma_fence();
    add_dq_of_keys(d, ds, c.k_keys, true);
    add_dq_of_keys(d, partner_ds, partner_k, false);
    wgmma_commit();
}

/* Behind dQ's product of a use: both CTAs' dS is read no more, and dQ goes to the thread that adds it up. Register
 * 4g + r of thread t is float 4 (128g + t) + r of the part. */
DEV void leave_dq(const query_gradient &d, const consumer &c, int use)
{
    const uint32_t to = ADDRESS(c.smem, dq) + c.thread * 16;
    arrive_at_both(ADDRESS(c.smem, ds_empty) + BARRIER_BYTES * (use % DS_STAGES), c.lane);
    barrier_wait(ADDRESS(c.smem, dq_empty) + BARRIER_BYTES * c.index, (use / CONSUMERS & 1) ^ (c.index == 0));
    trace_dq_place(use);
#pragma unroll
    for (int g = 0; g < 8; g++)
        store_shared_float4(to + g * (WARPGROUP_THREADS * 16), d[4 * g], d[4 * g + 1], d[4 * g + 2], d[4 * g + 3]);
    shared_stores_visible();
    arrive_warp(ADDRESS(c.smem, dq_full) + BARRIER_BYTES * c.index, c.lane); /* the visit's adder has its number */
}

/* Sends the warp's rows of dS, which its lanes have just stored, to the other CTA, of the queries whose dQ that sums.
 * What comes from there, as much by a warp of the same number, is waited for together with this arrival. */
DEV void send_score_gradients(const consumer &c, int buffer)
{
    const uint32_t full = ADDRESS(c.smem, ds_full) + BARRIER_BYTES * buffer,
                   at = buffer * DS_PANEL_BYTES + (c.index * GROUP_WARPS + c.thread / WARP_THREADS) * WARP_DS_BYTES;
    shared_stores_visible();
    __syncwarp();
    if (c.lane == 0) {
        const int partner = cluster_rank() ^ 1;
        barrier_arrive_expecting(full, WARP_DS_BYTES);
        /* own dS has all queries, what is sent has those of one panel */
        const int skipped = buffer * (DS_PANELS - 1) + ds_panel_of(partner);
        copy_to_cta(cluster_address(ADDRESS(c.smem, partner_ds) + at, partner),
                    ADDRESS(c.smem, ds) + at + skipped * DS_PANEL_BYTES, WARP_DS_BYTES, cluster_address(full, partner));
    }
}

/* The warpgroup's keys, summed over their dims: anew for each product, since there is no register to keep it. */
DEV uint64_t own_k(const consumer &c)
{
    return matrix_descriptor(anew(c.smem) + offsetof(shared_memory, k) + c.index * (GROUP_KEYS * PANEL_ROW_BYTES), 0);
}

/* The first row of the query tile of a work tile's visit of that number. */
DEV int query_of(const fwd_args &a, const key_work &w, int number)
{
    return (w.tile_end - 1 - number / a.group) * Q_TILE;
}

/* A work tile's visit of that number, of one query tile: all products but dQ, of its parts from FIRST_PART on, and with
 * HAS_DQ dQ of the visit before the last. No row of the parts before sees a key of the warpgroup. No product is under
 * way before or behind. */
template <int IS_FIRST, int HAS_DQ, int FIRST_PART>
DEV void visit(key_gradient &dk, key_gradient &dv, const key_fragments &f, const consumer &c, const fwd_args &a,
               const key_work *w, shared_memory *shared, int use, int number)
{
    const int stage = use % STAGES, buffer = use % DS_STAGES;
    const bool is_cut = PACKED && number < a.group && w->tile_end * Q_TILE > w->q_len;
    const uint64_t q = query_matrix(ADDRESS(c.smem, q), use), d_o = query_matrix(ADDRESS(c.smem, d_o), use);
    const float *const of_stage = &shared->stats[stage][0][2 * (c.lane % 4)];
    const group_visits own = w->groups[c.index];
    const bool masked = number < own.plain_first || number >= own.plain_end;
    score_tile s;
    wait_use(ADDRESS(c.smem, q_full), use);
#if MASK_BITS
    uint32_t mask[QUERY_PARTS];
    if constexpr (FIRST_PART < QUERY_PARTS)
        load_mask_words(mask, c, shared, stage);
#endif
    if (is_cut)
        clear_queries(c, ADDRESS(c.smem, q), use, w->q_len - query_of(a, *w, number));
    if constexpr (HAS_DQ) {
        query_gradient dq;
        start_dq_of(dq, c, use - DS_STAGES);
        if constexpr (FIRST_PART < QUERY_PARTS)
            start_scores(s, f.k, own_k(c), descriptor_at(q, FIRST_PART * PART_BYTES));
        WGMMA_WAIT(FIRST_PART < QUERY_PARTS); /* dQ */
        trace_dq(use);
        leave_dq(dq, c, use - DS_STAGES);
        trace_dq_left(use);
    } else if constexpr (FIRST_PART < QUERY_PARTS)
        start_scores(s, f.k, own_k(c), descriptor_at(q, FIRST_PART * PART_BYTES));
    wait_use(ADDRESS(c.smem, do_full), use);
    if (is_cut)
        clear_queries(c, ADDRESS(c.smem, d_o), use, w->q_len - query_of(a, *w, number));
    if constexpr (FIRST_PART > 0) {
        const packed_tile zeros = {};
        barrier_wait(ADDRESS(c.smem, ds_empty) + BARRIER_BYTES * buffer, (use / DS_STAGES & 1) ^ 1);
#pragma unroll
        for (int part = 0; part < FIRST_PART; part++)
            store_score_gradients(zeros, c, buffer, part);
    }
#pragma unroll
    for (int part = FIRST_PART; part < QUERY_PARTS; part++) {
        const float *const stats = of_stage + part * PART_QUERIES;
        const uint32_t rows = part * PART_BYTES;
        score_tile dp;
        packed_tile p, ds;
        if (!ASKS_LATE)
            start_scores(dp, f.v, c.v, descriptor_at(d_o, rows));
        WGMMA_WAIT(!ASKS_LATE); /* the scores */
        trace_scores(use);
        if (masked)
            hide_scores(s, c, shared, query_of(a, *w, number) + part * PART_QUERIES);
#if MASK_BITS
        hide_by_mask(s, mask[part]);
#endif
        find_probabilities<0, BEFORE_DP>(s, p, stats, c, a);
        if (ASKS_LATE)
            start_scores(dp, f.v, c.v, descriptor_at(d_o, rows));
        find_probabilities<BEFORE_DP, PART_QUERIES / 8>(s, p, stats, c, a);
        if (!ASKS_LATE)
            start_key_gradient(dv, p, descriptor_at(d_o, rows), !IS_FIRST || part > 0);
        trace_dv_asked(use);
        WGMMA_WAIT(!ASKS_LATE); /* dP */
        trace_dp(use);
        find_score_gradients(ds, s, dp, stats + Q_TILE);
        if (ASKS_LATE)
            start_key_gradient(dv, p, descriptor_at(d_o, rows), !IS_FIRST || part > 0);
        start_key_gradient(dk, ds, descriptor_at(q, rows), !IS_FIRST || part > 0);
        if (part + 1 < QUERY_PARTS)
            start_scores(s, f.k, own_k(c), descriptor_at(q, rows + PART_BYTES));
        if (part == 0) /* waited for once */
            barrier_wait(ADDRESS(c.smem, ds_empty) + BARRIER_BYTES * buffer, (use / DS_STAGES & 1) ^ 1);
        store_score_gradients(ds, c, buffer, part);
    }
    send_score_gradients(c, buffer);
    trace_ds_left(use);
    WGMMA_WAIT(0);
    arrive_warp(ADDRESS(c.smem, q_empty) + BARRIER_BYTES * stage, c.lane);
    trace_end_of_visit(use);
}

/* dQ of one of a work tile's last two visits; behind its product the work tile's keys are read no more. */
DEV void finish_dq_of(const consumer &c, int use)
{
    query_gradient dq;
    start_dq_of(dq, c, use);
    WGMMA_WAIT(0);
    arrive_warp(ADDRESS(c.smem, kv_empty), c.lane);
    leave_dq(dq, c, use);
}

#if MASK_BITS

/* Makes a work tile's visits behind its first one. use: of the next visit. */
DEV void make_visits(key_gradient &dk, key_gradient &dv, const key_fragments &f, const consumer &c, const fwd_args &a,
                     const key_work *w, shared_memory *shared, int &use)
{
#pragma unroll 1
    for (int made = 1; made < w->made; made++, use++) {
        const visit_note &next = wait_visit(c, shared, use);
        const int number = next.number, first_part = next.first_part;
        const bool has_dq = use % CONSUMERS == c.index && made >= DS_STAGES;
        if (first_part == 0) {
            if (has_dq)
                visit<0, 1, 0>(dk, dv, f, c, a, w, shared, use, number);
            else
                visit<0, 0, 0>(dk, dv, f, c, a, w, shared, use, number);
        } else if (first_part == QUERY_PARTS) {
            if (has_dq)
                visit<0, 1, QUERY_PARTS>(dk, dv, f, c, a, w, shared, use, number);
            else
                visit<0, 0, QUERY_PARTS>(dk, dv, f, c, a, w, shared, use, number);
        } else if constexpr (QUERY_PARTS == 2) {
            if (has_dq)
                visit<0, 1, 1>(dk, dv, f, c, a, w, shared, use, number);
            else
                visit<0, 0, 1>(dk, dv, f, c, a, w, shared, use, number);
        }
    }
}

#else

/* Makes a work tile's visits from `number` up to `end`, of which the first FIRST_PART parts see none of the warpgroup's
 * keys. use: of the next visit. */
template <int FIRST_PART>
DEV void make_visits(key_gradient &dk, key_gradient &dv, const key_fragments &f, const consumer &c, const fwd_args &a,
                     const key_work *w, shared_memory *shared, int &use, int &number, int end)
{
#pragma unroll 1
    for (; number < end; number++, use++)
        if (use % CONSUMERS == c.index && number >= DS_STAGES)
            visit<0, 1, FIRST_PART>(dk, dv, f, c, a, w, shared, use, number);
        else
            visit<0, 0, FIRST_PART>(dk, dv, f, c, a, w, shared, use, number);
}

#endif

DEV void consume(const bwd_args &args, uint32_t smem, shared_memory *shared, int index)
{
    const fwd_args &a = args.fwd;
    const int thread = threadIdx.x % WARPGROUP_THREADS, lane = threadIdx.x % WARP_THREADS;
    const int own_keys = index * GROUP_KEYS, own_rows = own_keys * PANEL_ROW_BYTES;
    const int ds_key = own_keys + thread / 32 * 16 + lane % 16;
    const consumer c = {
        smem,
        index,
        thread,
        lane,
        0, /* see own_k */
        matrix_descriptor(ADDRESS(smem, v) + own_rows, 0),
        matrix_descriptor(ADDRESS(smem, k) + k_panel_of(cluster_rank()) * KV_PANEL_BYTES, KV_PANEL_BYTES),
        ADDRESS(smem, ds) + chunk_offset(ds_key, lane / 16, 8),
        a.scale_log2};
    int use = 0;
    key_gradient dk, dv;
    const key_work *w = wait_key_work(smem, shared, 0);
    while (w->kv_tile >= 0) {
        if (count_visits(a, *w) > 0) {
            begin_keys(c, a, w, shared);
            key_fragments f;
            load_key_fragments(f, smem, ds_key, lane);
#if MASK_BITS
            visit<1, 0, 0>(dk, dv, f, c, a, w, shared, use, wait_visit(c, shared, use).number);
            use++;
            make_visits(dk, dv, f, c, a, w, shared, use);
            const int number = w->made;
#else
            int number = 1;
            visit<1, 0, 0>(dk, dv, f, c, a, w, shared, use++, 0);
            make_visits<0>(dk, dv, f, c, a, w, shared, use, number, w->groups[index].whole_end);
            if constexpr (QUERY_PARTS == 2)
                make_visits<1>(dk, dv, f, c, a, w, shared, use, number, w->groups[index].cut_end);
            make_visits<QUERY_PARTS>(dk, dv, f, c, a, w, shared, use, number, count_visits(a, *w));
#endif
            const int last = use - 1 - (use - 1 + index) % CONSUMERS; /* the last visit whose dQ is this warpgroup's */
            if (number > use - 1 - last)
                finish_dq_of(c, last);
            else
                arrive_warp(ADDRESS(smem, kv_empty), lane);
        } else
            arrive_warp(ADDRESS(smem, kv_empty), lane);
        store_key_gradients(args, dk, dv, *w, shared, count_visits(a, *w) > 0, c);
        w = wait_key_work(smem, shared, w->round + 1); /* a number of its own would have no register */
    }
}

#endif
