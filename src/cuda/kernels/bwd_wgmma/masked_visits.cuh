/* Visits under a boolean mask (MASK_BITS): one thread of the producer's warpgroup tells consumers which visit is next,
 * how much of it the mask leaves, and where the words are by which they hide scores (packed_bias.cuh). A piece of
 * bwd_wgmma.cu, which includes it. */
#ifndef ACR_BWD_WGMMA_MASKED_VISITS_CUH
#define ACR_BWD_WGMMA_MASKED_VISITS_CUH

/* Fills in a note for a warpgroup. number: of the visit. */
DEV void note_visit(visit_note &to, const key_work &w, int index, int number, uint32_t mark, const uint32_t *words)
{
    const group_visits own = w.groups[index];
    const int group = key_of(w.kv_tile, index * GROUP_KEYS) / GROUP_KEYS;
    const bool is_hidden = (mark >> group % MARK_GROUPS * 8 & 0xff) == 0;
    to.words = words + group * GROUP_WORDS;
    to.number = number;
    to.first_part = is_hidden ? QUERY_PARTS : number < own.whole_end ? 0 : number < own.cut_end ? 1 : QUERY_PARTS;
}

/* By one thread: tells of all visits, of each when the one that had its stage before is over. Its arrival at q_full, at
 * which queries arrive, too, makes a note visible. */
DEV void tell_visits(const fwd_args &a, uint32_t smem, shared_memory *shared)
{
    int use = 0;
    for (uint32_t round = 0;; round++) {
        const key_work *const w = wait_key_work(smem, shared, round);
        if (w->kv_tile < 0)
            break;
        const int first_head = w->kv_head * a.group;
        int tile = w->tile_end - 1, head = first_head;
#pragma unroll 1
        for (int left = w->made; left > 0; left--, use++) {
            skip_hidden(a, *w, tile, head);
            const int stage = use % STAGES, in_group = head - first_head,
                      number = (w->tile_end - 1 - tile) * a.group + in_group;
            const uint32_t mark = mark_of(*w, tile, in_group);
            const uint32_t *const words = w->words + (int64_t)tile * w->words_of_tile + in_group * w->words_of_head;
            barrier_wait(ADDRESS(smem, q_empty) + BARRIER_BYTES * stage, (use / STAGES & 1) ^ 1);
#pragma unroll
            for (int index = 0; index < CONSUMERS; index++)
                note_visit(shared->visits[stage][index], *w, index, number, mark, words);
            barrier_arrive(ADDRESS(smem, q_full) + BARRIER_BYTES * stage);
            if (++head == first_head + a.group) {
                head = first_head;
                tile--;
            }
        }
        barrier_arrive(ADDRESS(smem, kv_empty)); /* the work tile is read no more */
    }
}

/* A consumer's next visit: waits until it has been told and its queries are there. */
DEV const visit_note &wait_visit(const consumer &c, const shared_memory *shared, int use)
{
    wait_use(ADDRESS(c.smem, q_full), use);
    return shared->visits[use % STAGES][c.index];
}

/* A consumer thread's words for a visit, asked for. */
DEV void load_mask_words(uint32_t (&words)[QUERY_PARTS], const consumer &c, const shared_memory *shared, int stage)
{
    const uint32_t *const from = shared->visits[stage][c.index].words + c.thread;
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
