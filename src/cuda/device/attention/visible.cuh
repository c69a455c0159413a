/* What visible.h says, for device code: the rows and keys of a batch entry, the keys that a tile of rows sees, and one
 * mask for each layout of scores. A new rule of visibility changes visible.h; it changes this file only if a row no
 * longer sees one interval of keys. */
#ifndef ACR_DEVICE_ATTENTION_VISIBLE_CUH
#define ACR_DEVICE_ATTENTION_VISIBLE_CUH

#include <math_constants.h>

#include "cuda/device/isa/common.cuh"
#include "fwd_args.h"

/* ---- Where a batch entry's rows are ---- */

/* The whole of a dimension, cut by its key length, or a sequence of a packed batch. */
typedef struct sequence {
    int q_begin, q_len;   /* rows of q and o, from the entry's own first on (batch strides are 0 where it is not 0) */
    int kv_begin, kv_len; /* of k and v */
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

/* Reads global memory: kv_lens or the offsets. */
DEV sequence find_sequence(const fwd_args &a, int batch)
{
    if (!is_packed(a))
        return {0, a.q_len, 0, find_kv_len(a, batch)};
    sequence s;
    find_rows(s.q_begin, s.q_len, a.q_offsets, batch, a.q_total, a.q_len);
    find_rows(s.kv_begin, s.kv_len, a.kv_offsets, batch, a.kv_total, a.kv_len);
    return s;
}

/* ---- Which keys a tile of rows sees: visible_to_rows and visible_tiles_of of visible.h take this entry ---- */

/* A line that refuses sliding windows says so by WINDOWS 0, and has no code for them; the others look. */
DEV visible_rule rule_of(const fwd_args &a)
{
#ifdef WINDOWS
    if (!(WINDOWS))
        return {a.mask, 0, 0};
#endif
    return fwd_rule_of(&a);
}

DEV visible_entry entry_of(const fwd_args &a, const sequence &s)
{
    return {rule_of(a), s.q_len, s.kv_len};
}

/* Of an entry that is not of a packed batch. Reads global memory: kv_lens. */
DEV visible_entry entry_of_batch(const fwd_args &a, int batch)
{
    return {fwd_rule_of(&a), a.q_len, find_kv_len(a, batch)};
}

/* Of a kernel without packed batches. Reads global memory: kv_lens. */
DEV visible_entry find_entry(const fwd_args &a, int batch)
{
    return {rule_of(a), a.q_len, find_kv_len(a, batch)};
}

/* Whether the rule can hide keys that exist: then a tile of keys may hold values that some of its rows must not see. */
DEV bool hides_keys(const visible_entry &e)
{
    /* visible_is_limited, written out: through a call fwd_wgmma's four consumers spill */
    return e.rule.mask != FWD_MASK_NONE || e.rule.window_left != 0 || e.rule.window_right != 0;
}

/* ---- Masks ---- */

/* The keys [first, end) that a lane's two rows see, counted from the key of the lane's first column in tile 0. */
typedef struct row_keys {
    int first[2], end[2];
    bool has_first; /* false: both rows see every key before their end */
} row_keys;

DEV row_keys find_row_keys(const visible_entry &e, int row_0, int row_1, int first_column)
{
    return {{visible_first(e, row_0) - first_column, visible_first(e, row_1) - first_column},
            {visible_end(e, row_0) - first_column, visible_end(e, row_1) - first_column},
            e.rule.window_left != 0};
}

/* Accumulators of wgmma and of mma.sync: of every four neighbours two are columns 0 and 1 of the lane's row 0, two
 * those of row 1; the next four are eight columns further. first_column is 2 (lane % 4). Scores of keys that a row does
 * not see become -inf. key: the tile's first. */
template <int ELEMS> DEV void mask_scores(float (&s)[ELEMS], const row_keys &v, int key)
{
    const int end[2] = {v.end[0] - key, v.end[1] - key};
#pragma unroll
    for (int i = 0; i < ELEMS; i++)
        if (8 * (i / 4) + i % 2 >= end[i % 4 / 2])
            s[i] = -CUDART_INF_F;
    if (v.has_first) {
        const int first[2] = {v.first[0] - key, v.first[1] - key};
#pragma unroll
        for (int i = 0; i < ELEMS; i++)
            if (8 * (i / 4) + i % 2 < first[i % 4 / 2])
                s[i] = -CUDART_INF_F;
    }
}

/* Transposed accumulators: rows are keys, columns 0 and 1 the lane's two query rows; the next four elements are 16 keys
 * further. first_column is lane / 4, the lane's first key. */
template <int ELEMS> DEV void mask_transposed_scores(float (&s)[ELEMS], const row_keys &v, int key)
{
    const int end[2] = {v.end[0] - key, v.end[1] - key};
#pragma unroll
    for (int i = 0; i < ELEMS; i++)
        if (16 * (i / 4) + i % 4 / 2 * 8 >= end[i % 2])
            s[i] = -CUDART_INF_F;
    if (v.has_first) {
        const int first[2] = {v.first[0] - key, v.first[1] - key};
#pragma unroll
        for (int i = 0; i < ELEMS; i++)
            if (16 * (i / 4) + i % 4 / 2 * 8 < first[i % 2])
                s[i] = -CUDART_INF_F;
    }
}

/* One score, for families whose threads hold scores as ordinary arrays. */
DEV bool sees_key(const visible_entry &e, int row, int key)
{
    return key < visible_end(e, row) && (e.rule.window_left == 0 || key >= visible_first(e, row));
}

#endif
