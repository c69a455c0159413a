/* Sums of dQ become elements of the output while the last work tiles are still at work: consumers do it when there is
 * no work left for their CTA. Else the last kernel does it, when all are done. For problems that bwd_converts names. A
 * piece of bwd_wgmma.cu, which includes it.
 *
 * Whose sums are complete first are converted first, whichever CTAs have added them. A warp waits for what it has
 * taken: that is work tiles', which CTAs that are there have taken, too. */
#ifndef ACR_BWD_WGMMA_CONVERTED_DQ_CUH
#define ACR_BWD_WGMMA_CONVERTED_DQ_CUH

enum {
    PIECE_ROWS = 16,          /* and 64 columns: what a warp of those that summed it had in registers */
    PIECES = 64 / PIECE_ROWS, /* of a part */
    POLL_NS = 200
};

/* Pieces of a part that a warp converts. */
typedef struct dq_pieces {
    const float *from;
    const int32_t *visits;
    int64_t to;        /* the element of dQ that the first row begins with */
    int rows, columns; /* of the gradient, from the first piece's on */
} dq_pieces;

/* Of the query tiles of heads that are at work together the last ones are complete first (find_place, key_work). part:
 * a number among those of all heads, of which a key head has per_head. */
DEV dq_pieces find_pieces(const bwd_args &args, uint32_t part, uint32_t per_head, int piece)
{
    const fwd_args &a = args.fwd;
    const head_place place = find_place(a, part, per_head);
    const int entry = place.head / a.kv_heads, of_tile = a.group * DQ_PARTS,
              tile = bwd_tiles(&a, Q_TILE) - 1 - (int)place.at / of_tile, in_tile = (int)place.at % of_tile,
              head = (place.head - entry * a.kv_heads) * a.group + in_tile / DQ_PARTS, of_head = in_tile % DQ_PARTS,
              column = DIM == 64 ? 0 : 64 * of_head,
              row = tile * Q_TILE + (DIM == 64 ? 64 * of_head : 0) + piece * PIECE_ROWS;
    const tile_results from = results_of(a, head, bwd_first_tile(&a, entry, Q_TILE) + tile);
    const int64_t to = entry * args.dq_stride.batch + head * args.dq_stride.head + row * args.dq_stride.row + column;
    return {from.dq + of_head * DQ_PART_FLOATS + piece * (WARP_THREADS * 4),
            from.visits + of_head * WORK_CTAS / DQ_PARTS, to, a.q_len - row, a.qk_dim - column};
}

/* Converts pieces from the first one on. */
DEV void convert_pieces(const bwd_args &args, const dq_pieces &p, int count, int lane)
{
#pragma unroll 1
    for (int piece = 0; piece < count; piece++) {
        float d[32];
        load_piece(d, (const float4 *)p.from + piece * WARP_THREADS + lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = piece * PIECE_ROWS + 8 * h + lane / 4;
            store_gradient_row(args, args.dq, p.to + row * args.dq_stride.row, row < p.rows, p.columns, args.fwd.scale,
                               d, h, lane);
        }
    }
}

/* By the consumers' warps, each for itself: converts dQ until none is left to take. Of the last parts each warp has a
 * piece, of those before a part at a time; if there are only as many pieces as warps, its own one. */
DEV void convert_dq(const bwd_args &args)
{
    const fwd_args &a = args.fwd;
    if (!bwd_converts(hides_keys(entry_of(a, find_sequence(a, 0))), a.kv_lens != nullptr, args.atomics, gridDim.x))
        return;
    const int lane = threadIdx.x % WARP_THREADS, turns = count_work_tiles(a);
    const uint32_t per_head = bwd_tiles(&a, Q_TILE) * a.group * DQ_PARTS, parts = per_head * a.kv_heads * a.batch,
                   warps = gridDim.x * CONSUMER_WARPS, whole = parts - min(parts, warps / PIECES),
                   all = whole + (parts - whole) * PIECES;
    uint32_t number = all > warps ? 0 : blockIdx.x * CONSUMER_WARPS + threadIdx.x / WARP_THREADS - GROUP_WARPS;
    do {
        if (all > warps) {
            if (lane == 0)
                number = atomicAdd((uint32_t *)a.workspace + 1, 1u);
            number = __shfl_sync(~0u, number, 0);
        }
        if (number >= all)
            return;
        const bool is_whole = number < whole;
        const dq_pieces p = find_pieces(args, is_whole ? number : whole + (number - whole) / PIECES, per_head,
                                        is_whole ? 0 : (number - whole) % PIECES);
        while (load_flag(p.visits) != turns)
            __nanosleep(POLL_NS);
        convert_pieces(args, p, is_whole ? PIECES : 1, lane);
    } while (all > warps);
}

#endif
