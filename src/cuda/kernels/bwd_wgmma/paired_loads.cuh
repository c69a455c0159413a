/* What the threads of a paired CTA's first warpgroup do in another way than those of a CTA alone (paired_keys.cuh):
 * work tiles come to the cluster, a key tile brings a part of its neighbour's keys, and a CTA adds half of dQ. A piece
 * of bwd_wgmma.cu, which includes it. */
#ifndef ACR_BWD_WGMMA_PAIRED_LOADS_CUH
#define ACR_BWD_WGMMA_PAIRED_LOADS_CUH

enum {
    BOTH_CTAS = 3 /* of the cluster, as bits */
};

/* The first panels of dS and of K that the CTA of that rank sums its half of dQ from: of DIM 64 dS has a panel for each
 * half of the queries, else K one, or of DIM 256 two, for each half of the dims. */
DEV int ds_panel_of(int rank)
{
    return DIM == 64 ? rank : 0;
}

DEV int k_panel_of(int rank)
{
    return DIM == 64 ? 0 : rank * PARTNER_PANELS;
}

DEV int own_rank(void)
{
    return cluster_rank();
}

/* Loads a query tile's boxes of Q or dO, or with SHARED_QUERIES the CTA's half of them, for both. */
DEV void load_query_boxes(uint32_t to, const fwd_map *map, uint32_t full, int rank, int row, int head, int batch)
{
#if SHARED_QUERIES
#pragma unroll
    for (int i = 0; i < PANELS / WORK_CTAS; i++) {
        const int panel = rank * (PANELS / WORK_CTAS) + i;
        load_box_to_all(to + panel * Q_PANEL_BYTES, map, full, panel * PANEL_ELEMS, row, head, batch, BOTH_CTAS);
    }
#else
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        load_box(to + panel * Q_PANEL_BYTES, map, full, panel * PANEL_ELEMS, row, head, batch);
#endif
}

/* Loads a query tile as use number `use` of the rings of Q and dO. */
DEV void load_queries(const fwd_maps &maps, uint32_t smem, int rank, int use, const float *stats, int row, int head,
                      int batch)
{
    const int stage = use % STAGES;
    const uint32_t at = BARRIER_BYTES * stage, q_full = ADDRESS(smem, q_full) + at,
                   do_full = ADDRESS(smem, do_full) + at, q = ADDRESS(smem, q) + stage * Q_BYTES,
                   d_o = ADDRESS(smem, d_o) + stage * Q_BYTES;
    barrier_wait(ADDRESS(smem, q_empty) + at, (use / STAGES & 1) ^ 1);
    barrier_arrive_expecting(q_full, Q_BYTES);
    load_query_boxes(q, &maps.q, q_full, rank, row, head, batch);
    if (SHARED_KEYS) /* else q_empty stands for dO's, too */
        barrier_wait(ADDRESS(smem, do_empty) + at, (use / STAGES & 1) ^ 1);
    barrier_arrive_expecting(do_full, Q_BYTES + STATS_BYTES);
    load_bytes(ADDRESS(smem, stats) + stage * STATS_BYTES, stats, STATS_BYTES, do_full);
    load_query_boxes(d_o, &maps.o, do_full, rank, row, head, batch);
}

/* The number of the cluster's next work tile: the first CTA takes it and tells the second. */
DEV uint32_t take_ticket(uint32_t *ticket, uint32_t smem, int rank, uint32_t round)
{
    const uint32_t full = ADDRESS(smem, ticket_full), empty = ADDRESS(smem, ticket_empty), at = ADDRESS(smem, ticket);
    uint32_t number;
    if (rank == 0) {
        number = atomicAdd(ticket, 1u);
        barrier_wait(empty, (round & 1) ^ 1);
        tell_partner(at, full, number);
    } else
        number = hear_partner(at, full, round & 1, empty);
    return number;
}

/* The other CTA's keys, of the panels that this one's half of dQ takes. */
DEV void load_partner_keys(const fwd_maps &maps, uint32_t smem, const key_work &w, int rank, int batch)
{
    const int first = anew(k_panel_of(rank), SHARED_KEYS); /* else the thread keeps both panels' columns */
#pragma unroll
    for (int row = 0; row < KV_TILE; row += BOX_KEYS)
#pragma unroll
        for (int panel = 0; panel < PARTNER_PANELS; panel++)
            load_box(ADDRESS(smem, partner_k) + panel * KV_PANEL_BYTES + row * PANEL_ROW_BYTES, &maps.k,
                     ADDRESS(smem, kv_full), (first + panel) * PANEL_ELEMS, w.kv_begin + key_of(w.kv_tile ^ 1, row),
                     w.kv_head, batch);
}

#if !DQ_RED

/* Adds the CTA's half of a query tile's dQ when the pairs before this one have (wait_turn). is_last: of a work tile. */
DEV void add_dq(uint32_t smem, int use, int turn, int32_t *visits, float *dq, bool is_last)
{
    wait_turn(visits, turn);
    barrier_wait(ADDRESS(smem, dq_full) + BARRIER_BYTES * (use % ADDERS), use / ADDERS & 1);
    add_dq_part(dq, ADDRESS(smem, dq), turn);
    bulk_wait_read();
    barrier_arrive(ADDRESS(smem, dq_empty) + BARRIER_BYTES * ((use + 1) % CONSUMERS)); /* the other warpgroup's turn */
    if (DQ_OVER_V && is_last)
        barrier_arrive(ADDRESS(smem, kv_empty)); /* no dQ is in V's place any more */
    pass_turn(visits, turn);
}

#endif

#endif
