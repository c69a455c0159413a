/* Visits that a boolean mask hides whole (MASK_BITS): no row of the query tile sees a key of the work tile. Nobody
 * makes them: the producer does not load their queries, consumers have no products of them, and of dQ's turns there are
 * only those of work tiles that do visit the query tile. Everybody finds the same visits, by the marks of
 * packed_bias.cuh; consumers are told by a thread of their own (masked_visits.cuh). A piece of bwd_wgmma.cu, which
 * includes it. */
#ifndef ACR_BWD_WGMMA_HIDDEN_VISITS_CUH
#define ACR_BWD_WGMMA_HIDDEN_VISITS_CUH

/* The mark of a work tile's visit of a query tile, of that number among the group's heads. */
DEV uint32_t mark_of(const key_work &w, int tile, int head)
{
    return w.marks[tile + head * w.marks_of_head];
}

/* Fills in a work tile where its marks and words are and how many visits are made: by the producer. */
DEV void mark_visits(const fwd_args &a, key_work &w)
{
    const packed_bias *const note = bias_note(a);
    const int mask = w.entry * note->by_entry + w.kv_head * anew(a.group) * note->by_head;
    w.marks = note->of_keys + ((int64_t)mask * note->work_tiles + w.kv_tile / WORK_CTAS) * note->tiles;
    w.marks_of_head = note->by_head * note->tiles * note->work_tiles;
    w.words_of_tile = note->work_tiles * (MARK_GROUPS * GROUP_WORDS);
    w.words_of_head = (int64_t)(note->by_head * note->tiles) * w.words_of_tile;
    w.words = note->words + (int64_t)mask * note->tiles * w.words_of_tile;
    int made = 0;
#pragma unroll 1
    for (int head = 0; head < anew(a.group); head++)
#pragma unroll 4
        for (int tile = w.tile_first; tile < w.tile_end; tile++)
            made += mark_of(w, tile, head) != 0;
    w.made = made;
}

/* From a visit on to the first one that is made; there is one. head: of all. */
DEV void skip_hidden(const fwd_args &a, const key_work &w, int &tile, int &head)
{
#pragma unroll 1
    while (mark_of(w, tile, head - w.kv_head * anew(a.group)) == 0)
        if (++head == (w.kv_head + 1) * anew(a.group)) {
            head -= anew(a.group);
            tile--;
        }
}

/* Of a query tile of an entry and head, the marks of work tiles. */
DEV const uint32_t *marks_of(const fwd_args &a, int entry, int head, int tile)
{
    const packed_bias *const note = bias_note(a);
    const int number = entry * note->by_entry + head * note->by_head;
    return note->of_queries + ((int64_t)number * note->tiles + tile) * note->work_tiles;
}

/* How many work tiles from `first` up to `end` visit a query tile. */
DEV int count_visitors(const uint32_t *marks, int first, int end)
{
    int count = 0;
#pragma unroll 4
    for (int at = first; at < end; at++)
        count += marks[at] != 0;
    return count;
}

/* Whether any does: by all threads of a CTA of the last kernel. */
DEV bool is_visited(const uint32_t *marks, int first, int end)
{
    const int at = first + threadIdx.x;
    int any = 0;
    for (int i = at; i < end; i += FINISH_THREADS)
        any |= marks[i] != 0;
    return __syncthreads_or(any);
}

#endif
