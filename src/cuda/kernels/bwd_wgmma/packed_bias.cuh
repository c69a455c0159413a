/* Boolean masks (MASK_BITS) and biases of 16 bits (NARROW_BIASES): the first kernel packs them in the order in which
 * consumers have scores in registers, so that a consumer's thread loads whole words: of a mask one with a bit for each
 * of its 32 scores of 64 keys and 64 queries, of a bias 16 with two elements each. What entries or heads share is
 * packed once, by all CTAs that have it. A piece of bwd_wgmma.cu, which includes it; hidden_visits.cuh and
 * masked_visits.cuh read masks, own_keys.cuh biases. */
#ifndef ACR_BWD_WGMMA_PACKED_BIAS_CUH
#define ACR_BWD_WGMMA_PACKED_BIAS_CUH

enum {
    ROW_THREADS = STATS_THREADS / PART_QUERIES, /* that load a row of 64 keys */
    ROW_KEYS = GROUP_KEYS / ROW_THREADS,
    MARK_GROUPS = WORK_KEYS / GROUP_KEYS,
    GROUP_WORDS = QUERY_PARTS * BIAS_WORDS * 128 /* bwd_biases' group_words */
};
static_assert(MARKS == 0 || MARK_GROUPS == 4, "a work tile's mark is a word");
static_assert(ROW_KEYS == 16, "a thread loads 16 keys: of a mask 16 bytes, of a bias twice as many");

/* Where the workspace has them: noted by the first kernel for those who read masks and have no registers to find it. A
 * mark is of a work tile and a query tile: a byte for each group of keys, whether the mask leaves any pair. */
typedef struct packed_bias {
    uint32_t *words;           /* part after part of a group */
    uint32_t *of_keys;         /* a work tile's marks together, in the order of query tiles */
    uint32_t *of_queries;      /* the same, a query tile's together, in the order of work tiles */
    int32_t by_entry, by_head; /* the number of a mask is entry * by_entry + head * by_head */
    int32_t tiles, work_tiles; /* of a mask */
} packed_bias;

DEV packed_bias *bias_note(const fwd_args &a)
{
    return (packed_bias *)((char *)a.workspace + BWD_BIAS_NOTE);
}

DEV bwd_biases biases_of(const fwd_args &a)
{
    return bwd_biases_of(&a, Q_TILE, WORK_KEYS, BIAS_WORDS, MARKS);
}

/* The number of an entry's and head's bias. */
DEV int64_t bias_number(const fwd_args &a, int entry, int head)
{
    const bool by_entry = a.bias_stride.batch != 0, by_head = a.bias_stride.head != 0;
    return (by_entry ? entry : 0) * (by_head ? a.q_heads : 1) + (by_head ? head : 0);
}

/* The number of a group of 64 keys for a query tile of an entry and head. */
DEV int64_t bias_group(const fwd_args &a, const bwd_biases &b, int entry, int head, int tile, int group)
{
    return (bias_number(a, entry, head) * b.tiles + tile) * b.groups + group;
}

#if MASK_BITS

typedef uint16_t bias_row[ROW_THREADS]; /* a bit for each key of a row */

/* Which of 16 keys a row sees, as bits; none that does not exist. */
DEV void load_row(bias_row &to, int place, const fwd_args &a, int entry, int head, int row, int key)
{
    uint32_t bits = 0;
    const uint8_t *const from = (const uint8_t *)a.bias + entry * a.bias_stride.batch + head * a.bias_stride.head +
                                row * a.bias_stride.row + key;
    if (row >= a.q_len)
        bits = 0;
    else if ((uintptr_t)from % 16 == 0 && key + ROW_KEYS <= a.kv_len) {
        const uint4 x = *(const uint4 *)from;
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < ROW_KEYS; i++)
            bits |= (words[i / 4] >> 8 * (i % 4) & 0xff) != 0 ? 1u << i : 0;
    } else
        for (int i = 0; i < ROW_KEYS && key + i < a.kv_len; i++)
            bits |= from[i] != 0 ? 1u << i : 0;
    to[place] = bits;
}

DEV int has_any(const bias_row &row, int place)
{
    return row[place];
}

/* Stores what a thread of a consumer's warpgroup has of 64 rows, see hide_scores for the order. */
DEV void store_words(uint32_t *to, const bias_row *rows, int thread)
{
    const int lane = thread % 32;
    uint32_t word = 0;
    if (thread >= WARPGROUP_THREADS)
        return;
#pragma unroll
    for (int i = 0; i < PART_QUERIES / 2; i++) {
        const uint32_t bits = rows[8 * (i / 4) + i % 2 + 2 * (lane % 4)][thread / 32];
        word |= (bits >> (lane / 4 + 8 * (i % 4 / 2)) & 1) << i;
    }
    to[thread] = word;
}

#else

typedef uint16_t bias_row[GROUP_KEYS + 2]; /* the elements of a row; rows lie in other banks */

/* 16 elements of a row, those that do not exist as 0. */
DEV void load_row(bias_row &to, int place, const fwd_args &a, int entry, int head, int row, int key)
{
    const uint16_t *const from = (const uint16_t *)a.bias + entry * a.bias_stride.batch + head * a.bias_stride.head +
                                 row * a.bias_stride.row + key;
    uint32_t *const pairs = (uint32_t *)(to + place * ROW_KEYS);
    if (row < a.q_len && (uintptr_t)from % 16 == 0 && key + ROW_KEYS <= a.kv_len) {
        const uint4 x = ((const uint4 *)from)[0], y = ((const uint4 *)from)[1];
        const uint32_t words[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            pairs[i] = words[i];
    } else
        for (int i = 0; i < ROW_KEYS; i++)
            to[place * ROW_KEYS + i] = row < a.q_len && key + i < a.kv_len ? from[i] : 0;
}

DEV int has_any(const bias_row &, int)
{
    return 1;
}

/* As above: word j has elements 2j and 2j + 1 of a thread's scores, four words lie together. Both halves of the CTA
 * store half of them. */
DEV void store_words(uint32_t *to, const bias_row *rows, int thread)
{
    const int lane = thread % 32, half = thread / WARPGROUP_THREADS, of_group = thread % WARPGROUP_THREADS;
#pragma unroll
    for (int chunk = 0; chunk < BIAS_WORDS / 8; chunk++) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int word = (half * (BIAS_WORDS / 8) + chunk) * 4 + i, row = 8 * (word / 2) + 2 * (lane % 4),
                      key = of_group / 32 * 16 + lane / 4 + 8 * (word % 2);
            x[i] = rows[row][key] | (uint32_t)rows[row + 1][key] << 16;
        }
        ((uint4 *)to)[(half * (BIAS_WORDS / 8) + chunk) * WARPGROUP_THREADS + of_group] =
            make_uint4(x[0], x[1], x[2], x[3]);
    }
}

#endif

/* By a CTA of the first kernel, for its query tile: packs its share of the key groups. */
DEV void pack_bias(const fwd_args &a, int entry, int head, int tile)
{
    __shared__ __align__(16) bias_row rows[PART_QUERIES];
    const bool by_entry = a.bias_stride.batch != 0, by_head = a.bias_stride.head != 0;
    const int entries = by_entry ? 1 : a.batch, heads = by_head ? 1 : a.q_heads,
              share = (by_entry ? 0 : entry) * heads + (by_head ? 0 : head), thread = threadIdx.x;
    const bwd_biases b = biases_of(a);
    const bwd_workspace w = bwd_workspace_of(&a, Q_TILE, KV_TILE, DIM, WORK_CTAS);
    uint32_t *const words = (uint32_t *)((char *)a.workspace + w.bytes);
    uint32_t *const of_keys = words + b.all_groups * b.group_words, *const of_queries =
                                                                        of_keys + b.all_groups / MARK_GROUPS;
    if (MARKS > 0 && tile == 0 && entry == 0 && head == 0 && thread == 0)
        *bias_note(a) = {words,
                         of_keys,
                         of_queries,
                         by_entry ? (by_head ? a.q_heads : 1) : 0,
                         by_head,
                         b.tiles,
                         b.groups / MARK_GROUPS};
    for (int group = share; group < b.groups; group += entries * heads) {
        const int64_t number = bias_group(a, b, entry, head, tile, group);
        int any = 0;
#pragma unroll 1
        for (int part = 0; part < QUERY_PARTS; part++) {
            const int row = thread / ROW_THREADS, place = thread % ROW_THREADS;
            load_row(rows[row], place, a, entry, head, tile * Q_TILE + part * PART_QUERIES + row,
                     group * GROUP_KEYS + place * ROW_KEYS);
            any |= __syncthreads_or(has_any(rows[row], place));
            store_words(words + number * b.group_words + part * (BIAS_WORDS * WARPGROUP_THREADS), rows, thread);
            __syncthreads();
        }
        if (MARKS > 0 && thread == 0) {
            const int64_t work_tile = bias_number(a, entry, head) * (b.groups / MARK_GROUPS) + group / MARK_GROUPS;
            ((uint8_t *)(of_keys + work_tile * b.tiles + tile))[group % MARK_GROUPS] = any != 0;
            ((uint8_t *)of_queries)[number] = any != 0;
        }
    }
}

#endif
