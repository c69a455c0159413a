/* Boolean masks (TERMS with FWD_TERM_BIAS): the first kernel packs them as bits in the order in which consumers have
 * scores in registers, and a consumer's thread loads a word for its 32 scores of 64 keys and 64 queries. A warpgroup
 * leaves out its products where all pairs of a visit are hidden from it. A mask that entries or heads share is packed
 * once, by all CTAs that have it. A piece of bwd_wgmma.cu, which includes it; paired_keys.cuh reads what it packs. */
#ifndef ACR_BWD_WGMMA_MASK_BITS_CUH
#define ACR_BWD_WGMMA_MASK_BITS_CUH

enum {
    MASK_THREADS = 4, /* that load a row of 64 keys, 16 bytes each */
    MASK_KEYS = GROUP_KEYS / MASK_THREADS
};
static_assert(STATS_THREADS == PART_QUERIES * MASK_THREADS, "a CTA of the first kernel loads 64 rows at once");

/* Where the workspace has them: noted by the first kernel, since in the second nobody has the registers to find it. */
typedef struct mask_bits {
    uint32_t *words; /* part after part of a group */
    uint8_t *any;    /* whether any bit of a group is 1 */
} mask_bits;

DEV mask_bits *mask_note(const fwd_args &a)
{
    return (mask_bits *)((char *)a.workspace + BWD_MASK_NOTE);
}

/* The number of a group of 64 keys for a query tile of an entry and head. */
DEV int64_t mask_group(const fwd_args &a, const bwd_masks &m, int entry, int head, int tile, int group)
{
    const bool by_entry = a.bias_stride.batch != 0, by_head = a.bias_stride.head != 0;
    const int mask = (by_entry ? entry : 0) * (by_head ? a.q_heads : 1) + (by_head ? head : 0);
    return ((int64_t)mask * m.tiles + tile) * m.groups + group;
}

/* Which of 16 keys a row sees, as bits; none that does not exist. */
DEV uint32_t load_mask_row(const fwd_args &a, int entry, int head, int row, int key)
{
    uint32_t bits = 0;
    if (row >= a.q_len)
        return 0;
    const uint8_t *const from = (const uint8_t *)a.bias + entry * a.bias_stride.batch + head * a.bias_stride.head +
                                row * a.bias_stride.row + key;
    if ((uintptr_t)from % 16 == 0 && key + MASK_KEYS <= a.kv_len) {
        const uint4 x = *(const uint4 *)from;
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < MASK_KEYS; i++)
            bits |= (words[i / 4] >> 8 * (i % 4) & 0xff) != 0 ? 1u << i : 0;
    } else
        for (int i = 0; i < MASK_KEYS && key + i < a.kv_len; i++)
            bits |= from[i] != 0 ? 1u << i : 0;
    return bits;
}

/* By a CTA of the first kernel, for its query tile: packs its share of the key groups. */
DEV void pack_mask(const fwd_args &a, int entry, int head, int tile)
{
    __shared__ uint16_t seen[PART_QUERIES][MASK_THREADS];
    const bool by_entry = a.bias_stride.batch != 0, by_head = a.bias_stride.head != 0;
    const int entries = by_entry ? 1 : a.batch, heads = by_head ? 1 : a.q_heads,
              share = (by_entry ? 0 : entry) * heads + (by_head ? 0 : head), thread = threadIdx.x, lane = thread % 32;
    const bwd_masks m = bwd_masks_of(&a, Q_TILE, WORK_KEYS);
    const bwd_workspace w = bwd_workspace_of(&a, Q_TILE, KV_TILE, DIM, WORK_CTAS);
    uint32_t *const words = (uint32_t *)((char *)a.workspace + w.bytes);
    uint8_t *const any_of = (uint8_t *)(words + m.all_groups * m.group_words);
    if (tile == 0 && entry == 0 && head == 0 && thread == 0)
        *mask_note(a) = {words, any_of};
    for (int group = share; group < m.groups; group += entries * heads) {
        const int64_t number = mask_group(a, m, entry, head, tile, group);
        int any = 0;
#pragma unroll 1
        for (int part = 0; part < QUERY_PARTS; part++) {
            const int row = thread / MASK_THREADS, of_row = thread % MASK_THREADS;
            seen[row][of_row] = load_mask_row(a, entry, head, tile * Q_TILE + part * PART_QUERIES + row,
                                              group * GROUP_KEYS + of_row * MASK_KEYS);
            any |= __syncthreads_or(seen[row][of_row]);
            if (thread < BWD_MASK_WORDS) {
                uint32_t word = 0;
#pragma unroll
                for (int i = 0; i < PART_QUERIES / 2; i++) { /* see hide_scores */
                    const uint32_t bits = seen[8 * (i / 4) + i % 2 + 2 * (lane % 4)][thread / 32];
                    word |= (bits >> (lane / 4 + 8 * (i % 4 / 2)) & 1) << i;
                }
                words[number * m.group_words + part * BWD_MASK_WORDS + thread] = word;
            }
            __syncthreads();
        }
        if (thread == 0)
            any_of[number] = any != 0;
    }
}

#endif
