/* Tiles of rows for decoding: the rows of a tile are the query heads that share one key head, times their query
 * positions, ordered by position and then by head, so that a key is read once for all of them; and their keys are
 * divided over CTAs. Of packed batches only lines for caches (PAGED) have such tiles.
 *
 * An includer defines Q_TILE. */
#ifndef ACR_DEVICE_ATTENTION_HEAD_GROUP_CUH
#define ACR_DEVICE_ATTENTION_HEAD_GROUP_CUH

#include "cuda/device/attention/scores.cuh"

typedef struct group_tile {
    int row_first, rows; /* of the head's group * q_len rows */
    int kv_head, batch;
#if PAGED
    int q_begin; /* of packed queries: the entry's first row of q and o */
#endif
} group_tile;

/* The entry's first row of q and o. */
DEV int first_query(const group_tile &t)
{
#if PAGED
    return t.q_begin;
#else
    return 0;
#endif
}

/* Where a row of the tile is in the problem. */
typedef struct group_row {
    int head, position;
} group_row;

/* a / b for 0 <= a < 2^21, 0 < b. A head has fewer rows than that: a grid has fewer than 2^16 tiles, of up to 32 rows.
 * The quotient of a + 1/2 stays further from a whole number than it is rounded by (2 ulp). */
DEV int divide_rows(int a, int b)
{
    static_assert(Q_TILE <= 32, "Q_TILE: rows of a head are below 2^21");
    return (int)__fdividef((float)a + 0.5f, (float)b);
}

/* Rows beyond the tile's last count as the last. */
DEV group_row find_row(const fwd_args &a, const group_tile &t, int row)
{
    const int at = t.row_first + min(row, t.rows - 1);
    group_row r;
    r.position = a.q_len == 1 ? 0 : divide_rows(at, a.group);
    r.head = t.kv_head * a.group + at - r.position * a.group;
    return r;
}

/* The keys that the tile's rows see. One branch around everything where the rule hides nothing: what is fetched and not
 * run delays the first load. */
DEV visible_keys visible_to_tile(const fwd_args &a, const visible_entry &e, const group_tile &t)
{
    if (!hides_keys(a, e))
        return {0, 0, e.kv_len, e.kv_len};
    const int first = find_row(a, t, 0).position, last = find_row(a, t, t.rows - 1).position;
    return find_visible_keys(a, e, t.batch, first, last - first + 1);
}

/* The terms of a row of the tile. Reads global memory: slopes. */
DEV row_terms find_group_terms(const fwd_args &a, const visible_entry &e, const group_tile &t, const group_row &r)
{
    return find_row_terms(a, e, t.batch, r.head, r.position);
}

/* Element index of a row's first column of the output. */
DEV int64_t group_output_index(const fwd_args &a, const group_tile &t, const group_row &r)
{
#if PAGED
    return t.batch * a.o_stride.batch + r.head * a.o_stride.head + (t.q_begin + r.position) * a.o_stride.row;
#else
    return t.batch * a.o_stride.batch + r.head * a.o_stride.head + r.position * a.o_stride.row;
#endif
}

DEV float *group_lse(const fwd_args &a, const group_tile &t, const group_row &r)
{
#if PAGED
    if (a.q_offsets != nullptr)
        return a.lse + (int64_t)r.head * a.q_total + t.q_begin + r.position;
#endif
    return a.lse + ((int64_t)t.batch * a.q_heads + r.head) * a.q_len + r.position;
}

#endif
