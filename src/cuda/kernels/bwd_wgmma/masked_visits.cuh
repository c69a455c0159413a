/* What consumers of paired_keys.cuh, which includes this, do under a boolean mask (MASK_BITS): they note which visits of
 * a work tile are made (hidden_visits.cuh) and which of those the mask hides from their own keys, whose products they
 * leave out; in the others they hide scores by words that packed_bias.cuh has packed. */
#ifndef ACR_BWD_WGMMA_MASKED_VISITS_CUH
#define ACR_BWD_WGMMA_MASKED_VISITS_CUH

/* The mark of a work tile's visit of that number. */
DEV uint32_t mark_of_visit(const fwd_args &a, const key_work &w, int number)
{
    return mark_of(w, w.tile_end - 1 - number / a.group, number % a.group);
}

/* Whether a mark says that all pairs are hidden of a group of keys. */
DEV bool is_hidden(uint32_t mark, int group)
{
    return (mark >> group % MARK_GROUPS * 8 & 0xff) == 0;
}

/* Notes a work tile's first visits for the warpgroup. use: of the first one. */
DEV void note_mask(const consumer &c, const fwd_args &a, const key_work &w, shared_memory *shared, int use)
{
    const int visits = min(count_numbers(a, w), (int)NOTED_VISITS),
              group = key_of(w.kv_tile, c.index * GROUP_KEYS) / GROUP_KEYS;
    named_sync(A_CONSUMER + c.index, WARPGROUP_THREADS); /* those of the work tile before are read no more */
    if (c.thread == 0) {
        const bwd_biases m = biases_of(a);
        const int64_t of_tile = anew(m.groups) * m.group_words;
        shared->mask_places[c.index] = {bias_note(a)->words +
                                            bias_group(a, m, w.entry, w.kv_head * a.group, 0, group) * m.group_words,
                                        of_tile, a.bias_stride.head != 0 ? anew(m.tiles) * of_tile : 0};
        shared->first_use[c.index] = use;
    }
#pragma unroll 1
    for (int number = c.thread; number - c.thread < visits; number += WARPGROUP_THREADS) {
        uint32_t mark = 0;
        if (number < visits)
            mark = mark_of_visit(a, w, number);
        const uint32_t made = __ballot_sync(~0u, mark != 0), hidden = __ballot_sync(~0u, is_hidden(mark, group));
        if (c.lane == 0) {
            shared->made_visits[c.index][number / 32] = made;
            shared->hidden_visits[c.index][number / 32] = hidden;
        }
    }
    named_sync(A_CONSUMER + c.index, WARPGROUP_THREADS);
}

/* The first visit of a work tile from `number` on that is made; behind the last one a number that is none's. */
DEV int next_visit(const consumer &c, const fwd_args &a, const key_work &w, const shared_memory *shared, int number)
{
    const int end = count_numbers(a, w);
#pragma unroll 1
    while (number < min(end, (int)NOTED_VISITS)) {
        const uint32_t made = shared->made_visits[c.index][number / 32] >> number % 32;
        if (made != 0)
            return number + __popc(~made & (made - 1)); /* zeros below the lowest bit */
        number = (number / 32 + 1) * 32;
    }
#pragma unroll 1
    while (number < end && mark_of_visit(a, w, number) == 0)
        number++;
    return number;
}

/* Whether the mask hides all pairs of a work tile's visit of that number from the warpgroup. */
DEV bool hides_all(const consumer &c, const fwd_args &a, const key_work &w, const shared_memory *shared, int number)
{
    if (number < NOTED_VISITS)
        return (shared->hidden_visits[c.index][number / 32] >> number % 32 & 1) != 0;
    return is_hidden(mark_of_visit(a, w, number), key_of(w.kv_tile, c.index * GROUP_KEYS) / GROUP_KEYS);
}

/* A consumer thread's words for a work tile's visit of that number, asked for. */
DEV void load_mask_words(uint32_t (&words)[QUERY_PARTS], const consumer &c, const shared_memory *shared,
                         const fwd_args &a, const key_work &w, int number)
{
    const mask_place m = shared->mask_places[c.index];
    const uint32_t *const from =
        m.words + (w.tile_end - 1 - number / a.group) * m.of_tile + number % a.group * m.of_head + c.thread;
#pragma unroll
    for (int part = 0; part < QUERY_PARTS; part++)
        words[part] = from[part * WARPGROUP_THREADS];
}

/* Scores of pairs that the mask hides become -inf; of most warps it hides none. */
DEV void hide_by_mask(score_tile &s, uint32_t word)
{
    if (__all_sync(~0u, word == ~0u))
        return;
#pragma unroll
    for (int i = 0; i < PART_QUERIES / 2; i++)
        if ((word >> i & 1) == 0)
            s[i] = -CUDART_INF_F;
}

#endif
