/* Two CTAs, a cluster, own two neighbouring key tiles of a head (PAIR, head dims to 128) and visit the same query
 * tiles at about the same time. Each computes S, dP, dV and dK of its own keys as own_keys.cuh says; of dQ it sums half
 * over the keys of both, so that half as much of dQ leaves it: of DIM 64 half of the queries, else half of the dims.
 * For that each copies its dS of those queries into the other's shared memory. With PAIR=2 each loads half of a query
 * tile's Q and dO, for both. A piece of bwd_wgmma.cu, which includes it.
 *
 * dQ of a visit is computed two visits later, when dS of the other CTA has come, by one of the warpgroups: by the first
 * one that of even visits. The CTAs wait for each other at three places: dS (ds_full), its buffers (ds_empty) and, with
 * PAIR=2, stages of Q and dO (q_empty, which stands for dO's, too). Both have the same visits, so no one waits in vain.
 * A cluster is on the GPU whole or not at all, and its work tile is numbered behind those that it waits for. */
#ifndef ACR_BWD_WGMMA_PAIRED_KEYS_CUH
#define ACR_BWD_WGMMA_PAIRED_KEYS_CUH

#include "cuda/kernels/bwd_wgmma/own_keys.cuh"

enum {
    BOTH_CTAS = 3, /* of the cluster, as bits */
    DS_PANELS = DS_BYTES / DS_PANEL_BYTES,
    WARP_DS_BYTES = DS_PANEL_BYTES / CONSUMER_WARPS /* 16 keys of 64 queries: rows one behind the other */
};

/* The panels of dS and of K that the CTA of that rank sums its half of dQ from: of DIM 64 dS has a panel for each half
 * of the queries, else K one for each half of the dims. */
DEV int ds_panel_of(int rank)
{
    return DIM == 64 ? rank : 0;
}

DEV int k_panel_of(int rank)
{
    return DIM == 64 ? 0 : rank;
}

/* ---- The producer: one thread ---- */

/* Loads a query tile as use number `use` of the rings of Q and dO, or with PAIR=2 the CTA's half of its dims. */
DEV void load_queries(const fwd_maps &maps, uint32_t smem, int rank, int use, const float *stats, int row, int head,
                      int batch)
{
    const int stage = use % STAGES;
    const uint32_t at = BARRIER_BYTES * stage, q_full = ADDRESS(smem, q_full) + at,
                   do_full = ADDRESS(smem, do_full) + at, q = ADDRESS(smem, q) + stage * Q_BYTES,
                   d_o = ADDRESS(smem, d_o) + stage * Q_BYTES;
    barrier_wait(ADDRESS(smem, q_empty) + at, (use / STAGES & 1) ^ 1);
    barrier_arrive_expecting(q_full, Q_BYTES);
#if PAIR == 2
    load_box_to_all(q + rank * Q_PANEL_BYTES, &maps.q, q_full, rank * PANEL_ELEMS, row, head, batch, BOTH_CTAS);
#else
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        load_box(q + panel * Q_PANEL_BYTES, &maps.q, q_full, panel * PANEL_ELEMS, row, head, batch);
#endif
    barrier_arrive_expecting(do_full, Q_BYTES + STATS_BYTES);
    load_bytes(ADDRESS(smem, stats) + stage * STATS_BYTES, stats, STATS_BYTES, do_full);
#if PAIR == 2
    load_box_to_all(d_o + rank * Q_PANEL_BYTES, &maps.o, do_full, rank * PANEL_ELEMS, row, head, batch, BOTH_CTAS);
#else
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        load_box(d_o + panel * Q_PANEL_BYTES, &maps.o, do_full, panel * PANEL_ELEMS, row, head, batch);
#endif
}

/* The number of the cluster's next work tile: the first CTA takes it and tells the second. */
DEV uint32_t take_ticket(uint32_t *ticket, uint32_t smem, int rank, uint32_t round)
{
    const uint32_t full = ADDRESS(smem, ticket_full), empty = ADDRESS(smem, ticket_empty), at = ADDRESS(smem, ticket);
    uint32_t number;
    if (rank == 0) {
        number = atomicAdd(ticket, 1u);
        barrier_wait(empty, (round & 1) ^ 1);
        cluster_send(cluster_address(at, 1), make_float4(__uint_as_float(number), 0.0f, 0.0f, 0.0f),
                     cluster_address(full, 1));
    } else {
        barrier_arrive_expecting(full, 16);
        barrier_wait_cluster(full, round & 1);
        number = load_shared(at);
        barrier_arrive_cluster(cluster_address(empty, 0));
    }
    return number;
}

DEV void produce(const bwd_args &args, const fwd_maps &maps, uint32_t smem, shared_memory *shared)
{
    const fwd_args &a = args.fwd;
    const int rank = cluster_rank();
    const uint32_t kv_full = ADDRESS(smem, kv_full);
    int use = 0;
    for (uint32_t round = 0;; round++) {
        const uint32_t number = take_ticket((uint32_t *)a.workspace, smem, rank, round);
        key_work w = {};
        w.kv_tile = -1;
        if (number < count_work(a))
            w = find_work(a, number, rank);
        barrier_wait(ADDRESS(smem, kv_empty), (round & 1) ^ 1);
        shared->work[round % 2] = w;
        if (w.kv_tile < 0) {
            barrier_arrive(kv_full);
            return;
        }
        const int batch = PACKED ? 0 : w.entry, key = w.kv_begin + w.kv_tile * KV_TILE;
        barrier_arrive_expecting(kv_full, 2 * KV_BYTES + KV_PANEL_BYTES);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            load_box(ADDRESS(smem, k) + panel * KV_PANEL_BYTES, &maps.k, kv_full, panel * PANEL_ELEMS, key, w.kv_head,
                     batch);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            load_box(ADDRESS(smem, v) + panel * KV_PANEL_BYTES, &maps.v, kv_full, panel * PANEL_ELEMS, key, w.kv_head,
                     batch);
        load_box(ADDRESS(smem, partner_k), &maps.k, kv_full, k_panel_of(rank) * PANEL_ELEMS,
                 w.kv_begin + (w.kv_tile ^ 1) * KV_TILE, w.kv_head, batch);
        const int first_tile = bwd_first_tile(&a, w.entry, Q_TILE);
#pragma unroll 1
        for (int tile = w.tile_end - 1; tile >= w.tile_first; tile--)
#pragma unroll 1
            for (int head = w.kv_head * a.group; head < (w.kv_head + 1) * a.group; head++)
                load_queries(maps, smem, rank, use++, results_of(a, head, first_tile + tile).stats,
                             w.q_begin + tile * Q_TILE, head, batch);
    }
}

/* ---- The accumulator of dQ: one thread ---- */

/* Adds the CTA's half of a query tile's dQ when the pairs before this one have: it is number `turn`, and number 0
 * stores. With ANY_ORDER nobody waits. */
DEV void add_dq(uint32_t smem, int use, int turn, int32_t *visits, float *dq)
{
    const uint32_t from = ADDRESS(smem, dq);
    if (turn > 0) {
        while (load_flag(visits) != turn)
            ;
        bulk_global_fence();
    }
    barrier_wait(ADDRESS(smem, dq_full), use & 1);
    if (turn > 0 || turn == ANY_ORDER)
        add_floats(dq, from, DQ_PART_FLOATS * 4);
    else
        store_bytes(dq, from, DQ_PART_FLOATS * 4);
    bulk_commit();
    bulk_wait_read();
    barrier_arrive(ADDRESS(smem, dq_empty) + BARRIER_BYTES * ((use + 1) % CONSUMERS)); /* the other warpgroup's turn */
    if (turn >= 0) {
        bulk_wait_done();
        bulk_global_fence();
        store_flag(visits, turn + 1);
    }
}

DEV void accumulate_dq(const bwd_args &args, uint32_t smem, const shared_memory *shared)
{
    const fwd_args &a = args.fwd;
    const int rank = cluster_rank();
    int use = 0;
    for (uint32_t round = 0;; round++) {
        const key_work *const w = wait_key_work(smem, shared, round);
        const int kv_tile = w->kv_tile;
        if (kv_tile < 0)
            return;
        const visible_entry entry = entry_of(a, *w);
        const int tile_first = w->tile_first, tile_end = w->tile_end;
        const int first_head = w->kv_head * a.group, first_tile = bwd_first_tile(&a, w->entry, Q_TILE);
#pragma unroll 1
        for (int tile = tile_end - 1; tile >= tile_first; tile--) {
            /* the pairs that visit the query tile are consecutive */
            const int turn = args.atomics != 0 ? ANY_ORDER : kv_tile / WORK_CTAS - key_tiles_of(entry, tile).first;
#pragma unroll 1
            for (int head = first_head; head < first_head + a.group; head++) {
                const tile_results to = results_of(a, head, first_tile + tile);
                add_dq(smem, use++, turn, to.visits + rank, to.dq + rank * DQ_PART_FLOATS);
            }
        }
        bulk_wait_done();
        barrier_arrive(ADDRESS(smem, kv_empty)); /* the work tile is read no more */
    }
}

/* ---- Consumers ---- */

/* One arrival per warp at the same barrier of each CTA. */
DEV void arrive_at_both(uint32_t barrier, int lane)
{
    __syncwarp();
    if (lane < WORK_CTAS)
        barrier_arrive_cluster(cluster_address(barrier, lane));
}

/* clear_keys, the partner's too. */
DEV void clear_pair(const consumer &c, const key_work &w)
{
    for (int i = c.index * WARPGROUP_THREADS + c.thread; i < KV_TILE * 8; i += CONSUMERS * WARPGROUP_THREADS)
        if ((w.kv_tile ^ 1) * KV_TILE + i / 8 >= w.kv_len)
            store_shared_4(ADDRESS(c.smem, partner_k) + i * 16, 0, 0, 0, 0);
    clear_keys(c, w);
}

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
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_K; step++)
        wgmma_ss_mn(d, descriptor_at(ds, step * WGMMA_K * PANEL_ROW_BYTES),
                    descriptor_at(c.k_keys, step * WGMMA_K * PANEL_ROW_BYTES), step != 0);
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_K; step++)
        wgmma_ss_mn(d, descriptor_at(partner_ds, step * WGMMA_K * PANEL_ROW_BYTES),
                    descriptor_at(partner_k, step * WGMMA_K * PANEL_ROW_BYTES), 1);
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
    arrive_warp(ADDRESS(c.smem, dq_full), c.lane);
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

/* One query tile, that begins with row `query`: all products but dQ, and with HAS_DQ dQ of the visit before the last.
 * No product is under way before or behind. */
template <int IS_FIRST, int HAS_DQ>
DEV void visit(key_gradient &dk, key_gradient &dv, const key_fragments &f, const consumer &c, const fwd_args &a,
               const key_work *w, shared_memory *shared, int use, int query, bool masked)
{
    const int stage = use % STAGES, buffer = use % DS_STAGES;
    const bool is_cut = PACKED && query + Q_TILE > w->q_len;
    const uint64_t q = query_matrix(ADDRESS(c.smem, q), use), d_o = query_matrix(ADDRESS(c.smem, d_o), use);
    const float *const of_stage = &shared->stats[stage][0][2 * (c.lane % 4)];
    score_tile s;

    wait_use(ADDRESS(c.smem, q_full), use);
    if (is_cut)
        clear_queries(c, ADDRESS(c.smem, q), use, w->q_len - query);
    if constexpr (HAS_DQ) {
        query_gradient dq;
        start_dq_of(dq, c, use - DS_STAGES);
        start_scores(s, f.k, c.k, q);
        WGMMA_WAIT(1); /* dQ */
        trace_dq(use);
        leave_dq(dq, c, use - DS_STAGES);
        trace_dq_left(use);
    } else
        start_scores(s, f.k, c.k, q);
    wait_use(ADDRESS(c.smem, do_full), use);
    if (is_cut)
        clear_queries(c, ADDRESS(c.smem, d_o), use, w->q_len - query);
#pragma unroll
    for (int part = 0; part < QUERY_PARTS; part++) {
        const float *const stats = of_stage + part * PART_QUERIES;
        const uint32_t rows = part * PART_QUERIES * PANEL_ROW_BYTES;
        score_tile dp;
        packed_tile p, ds;
        start_scores(dp, f.v, c.v, descriptor_at(d_o, rows));
        WGMMA_WAIT(1); /* the scores */
        trace_scores(use);
        /* of one part no sum, so that the machine code is what was timed */
        const int part_query = QUERY_PARTS == 1 ? query : query + part * PART_QUERIES;
        find_probabilities(s, p, stats, c, a, shared, masked, part_query);
        start_key_gradient(dv, p, descriptor_at(d_o, rows), !IS_FIRST || part > 0);
        trace_dv_asked(use);
        WGMMA_WAIT(1); /* dP */
        trace_dp(use);
        find_score_gradients(ds, s, dp, stats + Q_TILE);
        start_key_gradient(dk, ds, descriptor_at(q, rows), !IS_FIRST || part > 0);
        if (part + 1 < QUERY_PARTS)
            start_scores(s, f.k, c.k, descriptor_at(q, rows + PART_QUERIES * PANEL_ROW_BYTES));
        if (part == 0)
            barrier_wait(ADDRESS(c.smem, ds_empty) + BARRIER_BYTES * buffer, (use / DS_STAGES & 1) ^ 1);
        store_score_gradients(ds, c, buffer, part);
    }
    send_score_gradients(c, buffer);
    trace_ds_left(use);
    WGMMA_WAIT(0);
#if PAIR == 2
    arrive_at_both(ADDRESS(c.smem, q_empty) + BARRIER_BYTES * stage, c.lane);
#else
    arrive_warp(ADDRESS(c.smem, q_empty) + BARRIER_BYTES * stage, c.lane);
#endif
    trace_end_of_visit(use);
}

/* dQ of one of a work tile's last two visits. */
DEV void finish_dq_of(const consumer &c, int use)
{
    query_gradient dq;
    start_dq_of(dq, c, use);
    WGMMA_WAIT(0);
    leave_dq(dq, c, use);
}

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
        matrix_descriptor(ADDRESS(smem, k) + own_rows, 0),
        matrix_descriptor(ADDRESS(smem, v) + own_rows, 0),
        matrix_descriptor(ADDRESS(smem, k) + k_panel_of(cluster_rank()) * KV_PANEL_BYTES, KV_PANEL_BYTES),
        ADDRESS(smem, ds) + chunk_offset(ds_key, lane / 16, 8),
        a.scale_log2};
    int use = 0;
    key_gradient dk, dv;
    for (uint32_t round = 0;; round++) {
        const key_work *const w = wait_key_work(smem, shared, round);
        if (w->kv_tile < 0)
            break;
        int left = count_visits(a, *w);
        const bool is_visited = left > 0;
        if (is_visited) {
            note_key_rows(c, entry_of(a, *w), w, shared);
            if ((a.kv_lens != nullptr || PACKED) && (w->kv_tile / WORK_CTAS + 1) * WORK_KEYS > w->kv_len)
                clear_pair(c, *w);
            key_fragments f;
            load_key_fragments(f, smem, ds_key, lane);
            const int first = use;
            int tile = w->tile_end - 1, head = 0;
            visit<1, 0>(dk, dv, f, c, a, w, shared, use, tile * Q_TILE, tile < w->full_first || tile >= w->full_end);
#pragma unroll 1
            while (--left > 0) {
                head = head + 1 == a.group ? 0 : head + 1;
                tile -= head == 0;
                use++;
                const bool masked = tile < w->full_first || tile >= w->full_end;
                if (use % CONSUMERS == index && use - first >= DS_STAGES)
                    visit<0, 1>(dk, dv, f, c, a, w, shared, use, tile * Q_TILE, masked);
                else
                    visit<0, 0>(dk, dv, f, c, a, w, shared, use, tile * Q_TILE, masked);
            }
            const int own = use - (use + index) % CONSUMERS; /* the last visit whose dQ is this warpgroup's */
            if (own >= first)
                finish_dq_of(c, own);
            use++;
        }
        arrive_warp(ADDRESS(smem, kv_empty), lane);
        store_key_gradients(args, dk, dv, *w, shared, is_visited, c);
    }
}

DEV void init_barriers(uint32_t smem)
{
    barrier_init(ADDRESS(smem, kv_full), 1);
    barrier_init(ADDRESS(smem, kv_empty), CONSUMER_WARPS + 1);
    barrier_init(ADDRESS(smem, ticket_full), 1);
    barrier_init(ADDRESS(smem, ticket_empty), 1);
    for (int i = 0; i < STAGES; i++) {
        barrier_init(ADDRESS(smem, q_full) + BARRIER_BYTES * i, 1);
        barrier_init(ADDRESS(smem, q_empty) + BARRIER_BYTES * i, CONSUMER_WARPS * (PAIR == 2 ? WORK_CTAS : 1));
        barrier_init(ADDRESS(smem, do_full) + BARRIER_BYTES * i, 1);
    }
    for (int i = 0; i < DS_STAGES; i++) {
        barrier_init(ADDRESS(smem, ds_full) + BARRIER_BYTES * i, CONSUMER_WARPS);
        barrier_init(ADDRESS(smem, ds_empty) + BARRIER_BYTES * i, GROUP_WARPS * WORK_CTAS);
    }
    barrier_init(ADDRESS(smem, dq_full), GROUP_WARPS);
    for (int i = 0; i < CONSUMERS; i++)
        barrier_init(ADDRESS(smem, dq_empty) + BARRIER_BYTES * i, 1);
    barrier_init_done();
}

#endif
