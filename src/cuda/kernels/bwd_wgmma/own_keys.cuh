/* Consumers of head dims to 128: each warpgroup has 64 keys of its own, of which it computes S, dP, dV and dK, and half
 * of dQ over the keys of both. A piece of bwd_wgmma.cu, which includes it. */
#ifndef ACR_BWD_WGMMA_OWN_KEYS_CUH
#define ACR_BWD_WGMMA_OWN_KEYS_CUH

DEV void load_key_fragments(key_fragments &f, uint32_t smem, int key, int lane)
{
#if KEYS_IN_REGISTERS
#pragma unroll
    for (int step = 0; step < DIM / WGMMA_K; step++) {
        const uint32_t at = chunk_offset(key, 2 * step + lane / 16, 8);
        load_matrices(f.k + 4 * step, ADDRESS(smem, k) + at);
        load_matrices(f.v + 4 * step, ADDRESS(smem, v) + at);
    }
#endif
}

/* Turns scores of columns [FIRST, END) of eight queries into probabilities, see find_probabilities_of. lse: of the
 * lane's first query. */
template <int FIRST, int END>
DEV void find_probabilities(score_tile &s, packed_tile &p, const float *lse, const consumer &c, const fwd_args &a)
{
    const bool is_capped = has_softcap(a);
#pragma unroll
    for (int column = FIRST; column < END; column++)
        find_probabilities_of(s, p, column, lse + 8 * column, c, a, is_capped);
}

#if NARROW_BIASES

/* A thread's pairs of biases, of a part. */
typedef struct narrow_biases {
    uint4 of_columns[BIAS_WORDS / 4]; /* 16 columns each */
} narrow_biases;

/* Asks for those of a part of the query tile that begins with row `query`. head: its number among the key head's. */
DEV void load_biases(narrow_biases &b, const consumer &c, const fwd_args &a, const key_work &w, int head, int query,
                     int part)
{
    const bwd_biases all = biases_of(a);
    const bwd_workspace place = bwd_workspace_of(&a, Q_TILE, KV_TILE, DIM, WORK_CTAS);
    const int64_t number =
        bias_group(a, all, w.entry, w.kv_head * a.group + head, query / Q_TILE, w.kv_tile * CONSUMERS + c.index) *
            QUERY_PARTS +
        part;
    const uint4 *const from = (const uint4 *)((const char *)a.workspace + place.bytes) +
                              number * (BIAS_WORDS / 4 * WARPGROUP_THREADS) + c.thread;
#pragma unroll
    for (int i = 0; i < BIAS_WORDS / 4; i++)
        b.of_columns[i] = from[i * WARPGROUP_THREADS];
}

/* find_probabilities with biases, which hide where they are -inf. */
template <int FIRST, int END>
DEV void find_probabilities(score_tile &s, packed_tile &p, const narrow_biases &b, const float *lse, const consumer &c,
                            const fwd_args &a)
{
#pragma unroll
    for (int column = FIRST; column < END; column++) {
        const float2 l = *(const float2 *)(lse + 8 * column);
        const uint4 chunk = b.of_columns[column / 2];
        const uint32_t pairs[2] = {column % 2 == 0 ? chunk.x : chunk.z, column % 2 == 0 ? chunk.y : chunk.w};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float *const x = s + 4 * column + 2 * h;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float bias = bias_of<2>(pairs[h] >> 16 * i & 0xffff, a.bias_type),
                            exponent = added_exponent(x[i], c.scale_log2, bias, i == 0 ? l.x : l.y);
                x[i] = bias == -CUDART_INF_F ? 0.0f : exp2_fast(exponent);
            }
            p[2 * column + h] = pack<BF16>(x[0], x[1]);
        }
    }
}

#endif

/* dS = P * (dP - D), rounded. */
DEV void find_score_gradients(packed_tile &ds, const score_tile &p, const score_tile &dp, const float *d)
{
#pragma unroll
    for (int column = 0; column < PART_QUERIES / 8; column++)
        find_score_gradients_of(ds, column, p + 4 * column, dp, d + 8 * column);
}

/* Stores the lane's two rows of dK and dV, and notes for the last kernel which of the warp's are not finite: here the
 * NaN fix-up has no registers. A key that no row sees gets zeros, and so does one that does not exist where it has a
 * place in the gradients. */
DEV void store_key_gradients(const bwd_args &args, const key_gradient &dk, const key_gradient &dv, const key_work &w,
                             const shared_memory *shared, bool is_visited, const consumer &c)
{
    const fwd_args &a = args.fwd;
    const int keys = PACKED ? w.kv_len : a.kv_len;
    const int first = anew(lane_key(c));
    unsigned spoilt = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int in_tile = first + 8 * h, key = key_of(w.kv_tile, in_tile);
        const bool is_seen = is_visited && shared->key_rows[in_tile][0] < shared->key_rows[in_tile][1];
        store_gradient_row(args, args.dv, key_gradient_index(w, args.dv_stride, key), key < keys, a.v_dim,
                           is_seen ? 1.0f : 0.0f, dv, h, c.lane);
        store_gradient_row(args, args.dk, key_gradient_index(w, args.dk_stride, key), key < keys, a.qk_dim,
                           is_seen ? a.scale : 0.0f, dk, h, c.lane);
        spoilt |= find_spoilt(is_seen && probe(dk, h) + probe(dv, h) != 0.0f) << 8 * h;
    }
    const int key = key_of(w.kv_tile, first), tile = SPREAD_KEYS ? key / KV_TILE : w.kv_tile,
              sixteen = (SPREAD_KEYS ? key % KV_TILE : first) / 16; /* of lane 0 */
    if (c.lane == 0 && (!PAIR || tile * KV_TILE < a.kv_len))
        ((uint16_t *)spoilt_of(a, w.entry, w.kv_head, tile))[sixteen] = spoilt;
}

#if !PAIR

/* Behind the last product of a visit, its dQ: what they have read is released, and dQ leaves. */
DEV void finish_visit(const query_gradient &dq, const consumer &c, int use)
{
    arrive_warp(ADDRESS(c.smem, ds_empty) + BARRIER_BYTES * (use % DS_STAGES), c.lane);
    hand_over(dq, c, use);
}

/* One query tile, that begins with row `query`: dQ of the visit before, and all other products of this one, 64 queries
 * after 64. No product is under way before or behind. */
template <int IS_FIRST>
DEV void visit(key_gradient &dk, key_gradient &dv, const key_fragments &f, const consumer &c, const fwd_args &a,
               const key_work *w, shared_memory *shared, int use, int query, int head, bool masked)
{
    const int stage = use % STAGES, buffer = use % DS_STAGES;
    const bool is_cut = PACKED && query + Q_TILE > w->q_len;
    const uint64_t q = query_matrix(ADDRESS(c.smem, q), use), d_o = query_matrix(ADDRESS(c.smem, d_o), use);
    score_tile s;
#if NARROW_BIASES
    narrow_biases biases;
    load_biases(biases, c, a, *w, head, query, 0);
#endif

    wait_use(ADDRESS(c.smem, q_full), use);
    if (is_cut)
        clear_queries(c, ADDRESS(c.smem, q), use, w->q_len - query);
    if constexpr (IS_FIRST)
        start_scores(s, f.k, c.k, q);
    else {
        query_gradient dq;
        start_dq_of(dq, c, use - 1, 0);
        start_scores(s, f.k, c.k, q);
        WGMMA_WAIT(1); /* dQ */
        trace_dq(use);
        finish_visit(dq, c, use - 1);
        trace_dq_left(use);
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
        if (!ASKS_LATE)
            start_scores(dp, f.v, c.v, descriptor_at(d_o, rows));
        WGMMA_WAIT(!ASKS_LATE); /* the scores */
        trace_scores(use);
        if (masked)
            hide_scores(s, c, shared, query + part * PART_QUERIES);
#if NARROW_BIASES
        find_probabilities<0, BEFORE_DP>(s, p, biases, stats, c, a);
        if (ASKS_LATE)
            start_scores(dp, f.v, c.v, descriptor_at(d_o, rows));
        find_probabilities<BEFORE_DP, PART_QUERIES / 8>(s, p, biases, stats, c, a);
        if (part + 1 < QUERY_PARTS)
            load_biases(biases, c, a, *w, head, query, part + 1);
#else
        find_probabilities<0, BEFORE_DP>(s, p, stats, c, a);
        if (ASKS_LATE)
            start_scores(dp, f.v, c.v, descriptor_at(d_o, rows));
        find_probabilities<BEFORE_DP, PART_QUERIES / 8>(s, p, stats, c, a);
#endif
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
            start_scores(s, f.k, c.k, descriptor_at(q, rows + PART_QUERIES * PANEL_ROW_BYTES));
        if (part == 0)
            barrier_wait(ADDRESS(c.smem, ds_empty) + BARRIER_BYTES * buffer, (use / DS_STAGES & 1) ^ 1);
        store_score_gradients(ds, c, buffer, part);
    }
    shared_stores_visible();
    arrive_warp(ADDRESS(c.smem, ds_full) + BARRIER_BYTES * buffer, c.lane);
    trace_ds_left(use);
    WGMMA_WAIT(0);
    arrive_warp(ADDRESS(c.smem, q_empty) + BARRIER_BYTES * stage, c.lane);
    arrive_warp(ADDRESS(c.smem, do_empty) + BARRIER_BYTES * stage, c.lane);
    trace_end_of_visit(use);
}

/* dQ of a work tile's last visit. A function of its own: written into the loop it costs d128 6 % (nvcc 13.0). */
DEV void finish_dq_of(const consumer &c, int use)
{
    query_gradient dq;
    start_dq_of(dq, c, use, 0);
    WGMMA_WAIT(0);
    finish_visit(dq, c, use);
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
        const key_work *const w = wait_key_work(smem, shared, round);
        if (w->kv_tile < 0)
            break;
        int left = count_visits(a, *w);
        const bool is_visited = left > 0;
        if (is_visited) {
            begin_keys(c, a, w, shared);
            key_fragments f;
            load_key_fragments(f, smem, ds_key, lane);
            int tile = w->tile_end - 1, head = 0;
            visit<1>(dk, dv, f, c, a, w, shared, use, tile * Q_TILE, head, tile < w->full_first || tile >= w->full_end);
#pragma unroll 1
            while (--left > 0) {
                head = head + 1 == a.group ? 0 : head + 1;
                tile -= head == 0;
                use++;
                visit<0>(dk, dv, f, c, a, w, shared, use, tile * Q_TILE, head,
                         tile < w->full_first || tile >= w->full_end);
            }
            finish_dq_of(c, use++);
        }
        arrive_warp(ADDRESS(smem, kv_empty), lane);
        store_key_gradients(args, dk, dv, *w, shared, is_visited, c);
    }
}

#endif

#endif
