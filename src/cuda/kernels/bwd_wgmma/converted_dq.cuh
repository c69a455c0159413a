/* Sums of dQ become elements of the output while other key tiles are still at work, out of L2 (CONVERT): a warp of the
 * first warpgroup does it for the query tiles to which its CTA is the last to add. Else the last kernel reads all of dQ
 * from memory again. A piece of bwd_wgmma.cu, which includes it. */
#ifndef ACR_BWD_WGMMA_CONVERTED_DQ_CUH
#define ACR_BWD_WGMMA_CONVERTED_DQ_CUH

DEV void begin_converting(const fwd_args &a, converter_state *c)
{
    c->results = results_of(a, 0, 0);
    c->tiles = bwd_first_tile(&a, a.batch, Q_TILE);
    c->round = 0;
    c->tile = 0; /* no work tile is at hand: none is left of it */
    c->head = a.group - 1;
    c->part = DQ_PARTS;
}

/* By one lane: goes to the next query tile, head of the group or part to which the CTA is the last to add. Returns the
 * place of its work tile, or -1 behind the last one. */
DEV int next_dq_part(const bwd_args &args, uint32_t smem, shared_memory *shared, converter_state *c)
{
    const fwd_args &a = args.fwd;
    int slot = (c->round + WORK_SLOTS - 1) % WORK_SLOTS;
    c->part += WORK_CTAS;
    if (c->part < DQ_PARTS)
        return slot;
    c->part = own_rank();
    if (++c->head < a.group)
        return slot;
    c->head = 0;
    int tile_first = c->round == 0 ? 0 : shared->work[slot].tile_first;
    for (;;) {
        while (--c->tile >= tile_first) {
            const visible_tiles seen = key_tiles_of(entry_of(a, shared->work[slot]), c->tile);
            c->turns = seen.end - seen.first;
            if (shared->work[slot].kv_tile / WORK_CTAS + 1 == seen.end)
                return slot;
        }
        slot = c->round % WORK_SLOTS;
        if (wait_key_work(smem, shared, c->round)->kv_tile < 0)
            return -1;
        barrier_arrive(ADDRESS(smem, kv_empty)); /* the work tile before is read no more */
        c->round++;
        tile_first = shared->work[slot].tile_first;
        /* in any order nobody is known to be the last */
        c->tile = args.atomics ? tile_first : shared->work[slot].tile_end;
    }
}

/* By one lane: finds the next part, and waits until all key tiles that see its query tile have added to it. */
DEV void find_dq_part(const bwd_args &args, uint32_t smem, shared_memory *shared, converter_state *c)
{
    const int slot = next_dq_part(args, smem, shared, c);
    c->rows = 0;
    if (slot < 0)
        return;
    const key_work *const w = &shared->work[slot];
    const int head = w->kv_head * args.fwd.group + c->head, column = DIM == 64 ? 0 : 64 * c->part,
              row = c->tile * Q_TILE + (DIM == 64 ? 64 * c->part : 0);
    const int64_t number = (int64_t)head * c->tiles + w->first_tile + c->tile;
    const int32_t *const visits = c->results.visits + number * WORK_CTAS + (PAIR ? c->part : 0);
    c->from = c->results.dq + (number * DQ_PARTS + c->part) * DQ_PART_FLOATS;
    c->spoilt = c->results.spoilt + number * DQ_PARTS + c->part;
    c->stride = args.dq_stride.row;
    c->to = (char *)args.dq + ((PACKED ? 0 : w->entry * args.dq_stride.batch) + head * args.dq_stride.head +
                               (w->q_begin + row) * args.dq_stride.row + column) *
                                  (args.grad_f32 ? 4 : ELEM_BYTES);
    c->rows = max(w->q_len - row, 1); /* the second part of the last tile may have none */
    c->columns = row < w->q_len ? args.fwd.qk_dim - column : 0;
    while (load_flag(visits) != c->turns)
        ;
}

/* Scales and stores the part, and notes which of its rows are not finite, for the last kernel: bit i of 64 is the row i
 * of the part. A lane has two rows and two columns of every eight, those of a thread that summed them: to exchange them
 * for longer runs there are no registers. */
DEV void store_dq_part(const bwd_args &args, const converter_state *c, int lane)
{
    const float scale = args.fwd.scale;
    lane = anew(lane, true);
#pragma unroll 1
    for (int i = 0; i < 2 * GROUP_WARPS; i++) { /* 16 rows by 32 columns */
        const int row = i / 2 * 16 + lane / 4, column = i % 2 * 32;
        float probes[2] = {0.0f, 0.0f}; /* NaN where a value is not finite */
        float4 x[4];                    /* of eight columns each */
        const float4 *const from =
            (const float4 *)c->from + column / 8 * WARPGROUP_THREADS + i / 2 * WARP_THREADS + lane;
#pragma unroll
        for (int g = 0; g < 4; g++)
            x[g] = __ldcg(from + g * WARPGROUP_THREADS);
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int g = 0; g < 4; g++) {
                float *const y = &x[g].x + 2 * h;
                probes[h] = fmaf(y[0], 0.0f, fmaf(y[1], 0.0f, probes[h]));
                y[0] *= scale;
                y[1] *= scale;
            }
            if (row + 8 * h >= c->rows)
                continue;
            const int columns = c->columns - column;
            const int64_t at = (row + 8 * h) * c->stride + column + 2 * (lane % 4);
            if (args.grad_f32) {
                float2 *const to = (float2 *)(c->to + at * 4);
#pragma unroll
                for (int g = 0; g < 4; g++)
                    if (8 * g < columns)
                        to[4 * g] = h == 0 ? make_float2(x[g].x, x[g].y) : make_float2(x[g].z, x[g].w);
            } else {
                uint32_t *const to = (uint32_t *)(c->to + at * ELEM_BYTES);
#pragma unroll
                for (int g = 0; g < 4; g++)
                    if (8 * g < columns)
                        to[4 * g] = h == 0 ? pack<BF16>(x[g].x, x[g].y) : pack<BF16>(x[g].z, x[g].w);
            }
        }
        const unsigned spoilt =
            find_spoilt(row < c->rows && probes[0] != 0.0f) | find_spoilt(row + 8 < c->rows && probes[1] != 0.0f) << 8;
        uint16_t *const of_rows = (uint16_t *)c->spoilt + i / 2;
        if (lane == 0)
            *of_rows = i % 2 == 0 ? spoilt : *of_rows | spoilt;
    }
}

DEV void convert_dq(const bwd_args &args, uint32_t smem, shared_memory *shared, int lane)
{
    converter_state *const c = &shared->converter;
    if (lane == 0)
        begin_converting(args.fwd, c);
#pragma unroll 1
    for (;;) {
        __syncwarp(); /* the part before is done */
        if (lane == 0)
            find_dq_part(args, smem, shared, c);
        __syncwarp();
        if (c->rows == 0)
            return;
        store_dq_part(args, c, lane);
    }
}

#endif
