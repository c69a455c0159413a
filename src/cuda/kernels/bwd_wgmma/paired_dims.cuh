/* Pairs of key tiles of head dims to 256 (PAIR): two CTAs, a cluster, own two neighbouring tiles of 64 keys and visit
 * the same query tiles. Each computes S, dP, dV and dK of its own keys as shared_keys.cuh says; of dQ it sums 128 dims
 * over the keys of both, a warpgroup 64 of them, so that half as much of dQ leaves it. For that each has the other's K
 * of those dims and copies its dS into the other's shared memory. Each loads half of Q and dO, for both. A piece of
 * bwd_wgmma.cu, which includes it.
 *
 * What comes from the other CTA lies where P was: dS of a visit is sent when the other has read P, and the next P is
 * stored when both warpgroups' products of dQ have ended. A thread of its own sends, so that no consumer waits for the
 * other CTA before it has asked for the next scores and for dQ of its own keys. The CTAs wait for each other before
 * they send (partner_p_read), for what they are sent (ds_full), before they store dS again (ds_empty) and at stages of
 * Q and dO. Both have the same visits, so no one waits in vain. */
#ifndef ACR_BWD_WGMMA_PAIRED_DIMS_CUH
#define ACR_BWD_WGMMA_PAIRED_DIMS_CUH

/* ---- One thread of the first warpgroup ---- */

/* Sends each visit's dS to the other CTA, into the place of that one's P. */
DEV void send_score_gradients(const bwd_args &args, uint32_t smem, const shared_memory *shared)
{
    const int partner = cluster_rank() ^ 1;
    const uint32_t full = ADDRESS(smem, ds_full), to = cluster_address(ADDRESS(smem, partner_ds), partner),
                   partner_full = cluster_address(full, partner),
                   partner_empty = cluster_address(ADDRESS(smem, ds_empty), partner);
    int use = 0;
    for (uint32_t round = 0;; round++) {
        const key_work *const w = wait_key_work(smem, shared, round);
        if (w->kv_tile < 0)
            return;
        const int end = use + count_visits(args.fwd, *w);
        barrier_arrive(ADDRESS(smem, kv_empty)); /* the work tile is read no more */
#pragma unroll 1
        for (; use < end; use++) {
            barrier_wait(ADDRESS(smem, ds_stored), use & 1);
            barrier_wait(ADDRESS(smem, partner_p_read), use & 1);
            barrier_arrive_expecting(full, DS_BYTES);
            copy_to_cta(to, ADDRESS(smem, ds), DS_BYTES, partner_full);
            barrier_wait(full, use & 1);
            barrier_arrive_cluster(partner_empty); /* which has sent its dS */
        }
    }
}

/* ---- Consumers ---- */

/* Waits for the CTA's own dS of a use, and starts the warpgroup's part of dQ of it. */
DEV void start_own_dq(query_gradient &d, const consumer &c, int use)
{
    barrier_wait(ADDRESS(c.smem, ds_stored), use & 1);
    start_query_gradient(d, matrix_descriptor(ADDRESS(c.smem, ds), DS_PANEL_BYTES), c.k_keys);
}

/* The same of what the other CTA sends, on top of it. */
DEV void start_partner_dq(query_gradient &d, const consumer &c, int use)
{
    barrier_wait(ADDRESS(c.smem, ds_full), use & 1);
    wgmma_fence();
    add_dq_of_keys(d, matrix_descriptor(ADDRESS(c.smem, partner_ds), DS_PANEL_BYTES),
                   matrix_descriptor(ADDRESS(c.smem, partner_k) + c.index * KV_PANEL_BYTES, KV_PANEL_BYTES), false);
    wgmma_commit();
}

/* Behind what reads a tile of Q or dO, whose barriers these are. */
DEV void release_queries(uint32_t barriers, const consumer &c, int use)
{
    const uint32_t barrier = barriers + BARRIER_BYTES * (use % STAGES);
    arrive_at_both(barrier, c.lane);
}

/* Behind dQ's product: the other CTA's dS is read no more. */
DEV void release_exchange(const consumer &c)
{
    arrive_warp(ADDRESS(c.smem, p_empty), c.lane);
}

/* The warp has read P, or shown it to the copy engine: when all have, the other CTA writes there. */
DEV void arrive_at_partner(const consumer &c)
{
    __syncwarp();
    if (c.lane == 0)
        barrier_arrive_cluster(cluster_address(ADDRESS(c.smem, partner_p_read), cluster_rank() ^ 1));
}

/* The first warpgroup's part of a visit of a query tile, which begins with row `query`. No product is under way before
 * or behind. */
template <int IS_FIRST>
DEV void visit_values(key_gradient &dv, const consumer &c, const fwd_args &a, const key_work *w, shared_memory *shared,
                      int use, int query, bool masked)
{
    score_tile s;
    packed_tile p, sent;
    query_gradient dq;
    clear_cut_tile(c, w, use, query);
    wait_use(ADDRESS(c.smem, q_full), use);
    start_scores(s, nullptr, c.k, query_matrix(ADDRESS(c.smem, q), use));
    if constexpr (IS_FIRST)
        WGMMA_WAIT(0);
    else {
        start_own_dq(dq, c, use - 1);
        WGMMA_WAIT(1); /* the scores */
    }
    trace_scores(use);
    release_queries(ADDRESS(c.smem, q_empty), c, use);
    wait_use(ADDRESS(c.smem, do_full), use); /* the statistics, too */
    if (masked)
        hide_scores(s, c, shared, query);
#pragma unroll
    for (int step = 0; step < PART_QUERIES / 16; step++)
        find_probabilities(sent + 4 * step, s, p, step, &shared->stats[use % STAGES][0][2 * (c.lane % 4)], c, a);
    if constexpr (!IS_FIRST)
        start_partner_dq(dq, c, use - 1);
    start_key_gradient(dv, p, query_matrix(ADDRESS(c.smem, d_o), use), !IS_FIRST);
    trace_dv_asked(use);
    if constexpr (!IS_FIRST) {
        WGMMA_WAIT(1); /* dQ */
        trace_dq(use);
        release_exchange(c);
        barrier_wait(ADDRESS(c.smem, p_empty), (use & 1) ^ 1); /* in a first visit K has come behind it */
    }
#pragma unroll
    for (int step = 0; step < PART_QUERIES / 16; step++)
        store_shared_4(exchange_place(c, step), sent[4 * step], sent[4 * step + 1], sent[4 * step + 2],
                       sent[4 * step + 3]);
    arrive_warp(ADDRESS(c.smem, p_full), c.lane);
    shared_stores_visible(); /* the copy engine writes there next */
    arrive_at_partner(c);
    if constexpr (!IS_FIRST)
        hand_over(dq, c, use - 1);
    WGMMA_WAIT(0);
    release_queries(ADDRESS(c.smem, do_empty), c, use);
    trace_end_of_visit(use);
}

/* The second warpgroup's part. */
template <int IS_FIRST>
DEV void visit_keys(key_gradient &dk, const consumer &c, const key_work *w, shared_memory *shared, int use, int query)
{
    score_tile dp;
    packed_tile ds;
    query_gradient dq;
    clear_cut_tile(c, w, use, query);
    wait_use(ADDRESS(c.smem, do_full), use);
    start_scores(dp, nullptr, c.v, query_matrix(ADDRESS(c.smem, d_o), use));
    if constexpr (!IS_FIRST) {
        start_own_dq(dq, c, use - 1);
        start_partner_dq(dq, c, use - 1);
    }
    WGMMA_WAIT(0);
    if constexpr (!IS_FIRST)
        release_exchange(c);
    barrier_wait(ADDRESS(c.smem, p_full), use & 1);
    find_score_gradients(ds, dp, &shared->stats[use % STAGES][1][2 * (c.lane % 4)], c);
    wait_use(ADDRESS(c.smem, q_full), use);
    start_key_gradient(dk, ds, query_matrix(ADDRESS(c.smem, q), use), !IS_FIRST);
    arrive_at_partner(c); /* P has been read: the product has taken what was found from it (hear_partner) */
    release_queries(ADDRESS(c.smem, do_empty), c, use);
    barrier_wait(ADDRESS(c.smem, ds_empty), (use & 1) ^ 1);
    store_score_gradients(ds, c, 0, 0);
    shared_stores_visible();
    arrive_warp(ADDRESS(c.smem, ds_stored), c.lane);
    if constexpr (!IS_FIRST)
        hand_over(dq, c, use - 1);
    WGMMA_WAIT(0);
    release_queries(ADDRESS(c.smem, q_empty), c, use);
}

/* dQ of a work tile's last visit. */
DEV void finish_dq_of(const consumer &c, int use)
{
    query_gradient dq;
    start_own_dq(dq, c, use);
    start_partner_dq(dq, c, use);
    WGMMA_WAIT(0);
    release_exchange(c);
    hand_over(dq, c, use);
}

#endif
