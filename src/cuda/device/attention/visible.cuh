/* What visible.h says, for device code: the rows and keys of a batch entry, the keys that a tile of rows sees, and one
 * mask for the layouts of scores. A new rule of visibility changes visible.h; this file adds what is no interval of
 * keys: ranges, whose keys a row sees beside its interval, and the tree, which hides keys of either.
 *
 * TERMS says which features a line is compiled with, FWD_TERM_* of fwd_args.h; without one its argument is not looked
 * at. With it, whether a problem has it is asked at run time, the same answer for all threads. */
#ifndef ACR_DEVICE_ATTENTION_VISIBLE_CUH
#define ACR_DEVICE_ATTENTION_VISIBLE_CUH

#include <math_constants.h>

#include "cuda/device/attention/parameters.h"
#include "cuda/device/isa/common.cuh"
#include "fwd_args.h"

/* Whether the line is compiled with a feature: one of FWD_TERM_*, or any of several. */
DEV constexpr bool has_term(int terms)
{
    return ((TERMS)&terms) != 0;
}

/* ---- Where a batch entry's rows are ---- */

/* The whole of a dimension, cut by its key length, or a sequence of a packed batch. */
typedef struct sequence {
    int q_begin, q_len;   /* rows of q and o, from the entry's own first on (batch strides are 0 where it is not 0) */
    int kv_begin, kv_len; /* of k and v */
#if VISIBLE_LIMITS
    int kv_start; /* the first key that exists */
#endif
} sequence;

/* A family that is compiled apart for packed batches says by PACKED which this is; the others look. */
DEV bool is_packed(const fwd_args &a)
{
#ifdef PACKED
    return PACKED;
#else
    return a.q_offsets != nullptr;
#endif
}

/* Rows offsets[entry] to offsets[entry + 1], no more than length_max, whatever the offsets hold. */
DEV void find_rows(int &begin, int &length, const int32_t *offsets, int entry, int total, int length_max)
{
    begin = min(max(offsets[entry], 0), total);
    length = min(min(max(offsets[entry + 1], begin), total) - begin, length_max);
}

/* Reads global memory: kv_lens. */
DEV int find_kv_len(const fwd_args &a, int batch)
{
    return a.kv_lens == nullptr ? a.kv_len : min(max(a.kv_lens[batch], 0), a.kv_len);
}

/* Of an entry that is not of a packed batch. Reads global memory: kv_lens, kv_starts. */
DEV sequence find_whole_sequence(const fwd_args &a, int batch)
{
    sequence s = {0, a.q_len, 0, find_kv_len(a, batch)};
#if VISIBLE_LIMITS
    s.kv_start = a.kv_starts == nullptr ? 0 : min(max(a.kv_starts[batch], 0), s.kv_len);
#endif
    return s;
}

/* Of an entry whose keys are a cache's: its key length, and of packed queries the rows that its offsets name; in lines
 * with ANY_KEYS, of packed keys the same. Reads global memory: kv_lens, kv_starts, the offsets. */
DEV sequence find_cached_sequence(const fwd_args &a, int batch)
{
    sequence s = find_whole_sequence(a, batch);
    if (a.q_offsets != nullptr)
        find_rows(s.q_begin, s.q_len, a.q_offsets, batch, a.q_total, a.q_len);
#if ANY_KEYS
    if (a.kv_offsets != nullptr)
        find_rows(s.kv_begin, s.kv_len, a.kv_offsets, batch, a.kv_total, a.kv_len);
#endif
    return s;
}

/* Reads global memory: kv_lens and kv_starts, or the offsets. */
DEV sequence find_sequence(const fwd_args &a, int batch)
{
#if PAGED
    return find_cached_sequence(a, batch);
#else
    if (!is_packed(a))
        return find_whole_sequence(a, batch);
    sequence s = {};
    find_rows(s.q_begin, s.q_len, a.q_offsets, batch, a.q_total, a.q_len);
    find_rows(s.kv_begin, s.kv_len, a.kv_offsets, batch, a.kv_total, a.kv_len);
    return s;
#endif
}

/* ---- Which keys a tile of rows sees ---- */

/* A line that refuses sliding windows says so by WINDOWS 0, and has no code for them; the others look. */
DEV visible_rule rule_of(const fwd_args &a)
{
    visible_rule rule = fwd_rule_of(&a);
#ifdef WINDOWS
    if (!(WINDOWS))
        rule.window_left = rule.window_right = 0;
#endif
    return rule;
}

DEV visible_entry entry_of(const fwd_args &a, const sequence &s)
{
    visible_entry e = {rule_of(a), s.q_len, s.kv_len};
#if VISIBLE_LIMITS
    e.kv_start = s.kv_start;
#endif
    return e;
}

/* Of an entry that is not of a packed batch. Reads global memory: kv_lens, kv_starts. */
DEV visible_entry entry_of_batch(const fwd_args &a, int batch)
{
    return entry_of(a, find_whole_sequence(a, batch));
}

/* Consecutive keys; none where end <= first. */
typedef struct key_range {
    int first, end;
} key_range;

/* The keys that exist of all ranges which hold one of the positions, both included: for one position these are
 * consecutive, since all of its ranges hold it; for several they may have gaps. Reads global memory: ranges. */
DEV key_range join_ranges(const fwd_args &a, const visible_entry &e, int batch, int first_position, int last_position)
{
    key_range joined = {e.kv_len, 0};
    const int32_t *ranges = a.ranges + 2 * (int64_t)batch * a.ranges_count;
    for (int i = 0; i < a.ranges_count; i++) {
        const int first = ranges[2 * i], end = ranges[2 * i + 1];
        if (first < end && first <= last_position && end > first_position) {
            joined.first = min(joined.first, max(first, visible_start(e)));
            joined.end = max(joined.end, min(end, e.kv_len));
        }
    }
    return joined;
}

/* visible_to_rows, with ranges and the tree: keys outside [first, end) are seen by no row of the tile, those in
 * [full_first, full_end) by all; between, ranges may leave gaps that no row sees. batch: the entry, of a packed batch
 * the sequence. Reads global memory: ranges. */
DEV visible_keys find_visible_keys(const fwd_args &a, const visible_entry &e, int batch, int first_row, int rows)
{
    visible_keys k = visible_to_rows(e, first_row, rows);
    if (has_term(FWD_TERM_RANGES) && a.ranges != nullptr) {
        const key_range joined =
            join_ranges(a, e, batch, visible_position(e, first_row), visible_position(e, first_row + rows - 1));
        if (joined.first < joined.end) {
            const bool alone = k.first >= k.end; /* then the full part is empty, and stays so */
            k.first = alone ? joined.first : min(k.first, joined.first);
            k.end = alone ? joined.end : max(k.end, joined.end);
        }
    }
    if (has_term(FWD_TERM_TREE) && a.tree != nullptr)
        k.full_end = min(k.full_end, max(e.kv_len - e.q_len, 0));
    return k;
}

/* Whether the rule can hide keys that exist: then a tile of keys may hold values that some of its rows must not see. */
DEV bool hides_keys(const visible_entry &e)
{
    /* visible_is_limited, written out: through a call fwd_wgmma's four consumers spill */
    return e.rule.mask != FWD_MASK_NONE || e.rule.window_left != 0 || e.rule.window_right != 0 ||
           visible_chunk(e.rule) != 0 || visible_start(e) != 0;
}

/* The same of the rule and of what else hides keys. */
DEV bool hides_keys(const fwd_args &a, const visible_entry &e)
{
    return hides_keys(e) || (has_term(FWD_TERM_TREE) && a.tree != nullptr) ||
           (has_term(FWD_TERM_BIAS) && a.bias != nullptr);
}

/* ---- What one row sees: for loops over single keys ---- */

typedef struct row_view {
    key_range own, joined; /* by the rule; by ranges */
    int tree_first;        /* the key of the tree's bit 0 */
    const uint8_t *tree;   /* the row's bits, or nullptr */
} row_view;

/* Of a row of the tree: its bits. */
DEV const uint8_t *find_tree_row(const fwd_args &a, const visible_entry &e, int batch, int row)
{
    const int64_t row_bytes = (a.q_len + 7) / 8;
    return a.tree + ((int64_t)batch * a.q_len + max(min(row, e.q_len - 1), 0)) * row_bytes;
}

DEV bool tree_hides(const uint8_t *tree, int bit)
{
    return bit >= 0 && (tree[bit / 8] >> bit % 8 & 1) == 0;
}

/* batch: the entry, of a packed batch the sequence. Reads global memory: ranges. */
DEV row_view find_row_view(const fwd_args &a, const visible_entry &e, int batch, int row)
{
    const int position = visible_position(e, row);
    row_view v = {{visible_first(e, row), visible_end(e, row)}, {0, 0}, 0, nullptr};
    if (has_term(FWD_TERM_RANGES) && a.ranges != nullptr)
        v.joined = join_ranges(a, e, batch, position, position);
    if (has_term(FWD_TERM_TREE) && a.tree != nullptr) {
        v.tree_first = e.kv_len - e.q_len;
        v.tree = find_tree_row(a, e, batch, row);
    }
    return v;
}

DEV bool sees_key(const row_view &v, int key)
{
    bool sees = key >= v.own.first && key < v.own.end;
    if (has_term(FWD_TERM_RANGES))
        sees = sees || (key >= v.joined.first && key < v.joined.end);
    if (has_term(FWD_TERM_TREE) && sees && v.tree != nullptr)
        sees = !tree_hides(v.tree, key - v.tree_first);
    return sees;
}

/* ---- Masks ---- */

/* Which two rows and which keys a lane's accumulators belong to. */
enum {
    /* Of wgmma and of mma.sync: of every four neighbours two are columns 0 and 1 of the lane's row 0, two those of row
     * 1; the next four are eight columns further. The lane's first column is 2 (lane % 4). */
    BY_ROWS,
    /* Transposed: rows are keys, columns 0 and 1 the lane's two query rows; the next four elements are 16 keys further.
     * The lane's first key is lane / 4. */
    TRANSPOSED
};

template <int LAYOUT> DEV constexpr int row_at(int i)
{
    return LAYOUT == BY_ROWS ? i % 4 / 2 : i % 2;
}

/* Counted from the lane's first key of the tile. */
template <int LAYOUT> DEV constexpr int key_at(int i)
{
    return LAYOUT == BY_ROWS ? 8 * (i / 4) + i % 2 : 16 * (i / 4) + i % 4 / 2 * 8;
}

/* The keys that a lane's two rows see, counted from the lane's first key of tile 0: [first, end), and beside them
 * [joined_first, joined_end). */
typedef struct row_keys {
    int first[2], end[2];
    bool has_first;  /* false: both rows see every key before their end */
    bool endless;    /* true: both see every key from their first on, of the tiles that this is asked about */
    bool has_joined; /* false: no ranges */
    int joined_first[2], joined_end[2];
    int tree_first;         /* the key of the tree's bit 0 */
    const uint8_t *tree[2]; /* the rows' bits; nullptr: no tree */
} row_keys;

DEV row_keys find_row_keys(const visible_entry &e, int row_0, int row_1, int first_column)
{
    return {{visible_first(e, row_0) - first_column, visible_first(e, row_1) - first_column},
            {visible_end(e, row_0) - first_column, visible_end(e, row_1) - first_column},
            e.rule.window_left != 0 || visible_chunk(e.rule) != 0 || visible_start(e) != 0};
}

/* The same with ranges and the tree. batch: the entry, of a packed batch the sequence. Reads global memory: ranges. */
DEV row_keys find_row_keys(const fwd_args &a, const visible_entry &e, int batch, int row_0, int row_1, int first_column)
{
    row_keys v = find_row_keys(e, row_0, row_1, first_column);
    if (has_term(FWD_TERM_RANGES) && a.ranges != nullptr) {
        v.has_joined = true;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int position = visible_position(e, h == 0 ? row_0 : row_1);
            const key_range joined = join_ranges(a, e, batch, position, position);
            v.joined_first[h] = joined.first - first_column;
            v.joined_end[h] = joined.end - first_column;
        }
    }
    if (has_term(FWD_TERM_TREE) && a.tree != nullptr) {
        v.tree_first = e.kv_len - e.q_len - first_column;
        v.tree[0] = find_tree_row(a, e, batch, row_0);
        v.tree[1] = find_tree_row(a, e, batch, row_1);
    }
    return v;
}

/* Leaves the rows no key from `end` on, counted as theirs are. */
DEV void end_row_keys(row_keys &v, int end)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        v.end[h] = min(v.end[h], end);
        v.joined_end[h] = min(v.joined_end[h], end);
    }
}

/* Scores of keys that a row does not see become -inf. key: the tile's first. */
template <int LAYOUT, int ELEMS> DEV void mask_scores(float (&s)[ELEMS], const row_keys &v, int key)
{
    const int end[2] = {v.end[0] - key, v.end[1] - key};
    if (has_term(FWD_TERM_RANGES) && v.has_joined) {
        const int first[2] = {v.first[0] - key, v.first[1] - key},
                  joined_first[2] = {v.joined_first[0] - key, v.joined_first[1] - key},
                  joined_end[2] = {v.joined_end[0] - key, v.joined_end[1] - key};
#pragma unroll
        for (int i = 0; i < ELEMS; i++) {
            const int at = key_at<LAYOUT>(i), h = row_at<LAYOUT>(i);
            if ((at < first[h] || at >= end[h]) && (at < joined_first[h] || at >= joined_end[h]))
                s[i] = -CUDART_INF_F;
        }
    } else {
        if (!v.endless) {
#pragma unroll
            for (int i = 0; i < ELEMS; i++)
                if (key_at<LAYOUT>(i) >= end[row_at<LAYOUT>(i)])
                    s[i] = -CUDART_INF_F;
        }
        if (v.has_first) {
            const int first[2] = {v.first[0] - key, v.first[1] - key};
#pragma unroll
            for (int i = 0; i < ELEMS; i++)
                if (key_at<LAYOUT>(i) < first[row_at<LAYOUT>(i)])
                    s[i] = -CUDART_INF_F;
        }
    }
    if (has_term(FWD_TERM_TREE) && v.tree[0] != nullptr)
#pragma unroll
        for (int i = 0; i < ELEMS; i++) {
            const int h = row_at<LAYOUT>(i);
            /* a key that is hidden already may lie behind the tree's last bit */
            if (s[i] != -CUDART_INF_F && tree_hides(v.tree[h], key + key_at<LAYOUT>(i) - v.tree_first))
                s[i] = -CUDART_INF_F;
        }
}

#endif
