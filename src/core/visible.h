/* Which keys a query row sees, and which rows see a key: the one place that states the rule. Plain C for the C compiler
 * and for nvcc, like fwd_args.h: device code (cuda/device/attention/visible.cuh), the CPU's kernels, the cost model and
 * the roofline ask here. The oracle states the rule again by itself, so that it can contradict this file.
 *
 * A row sees an interval of keys, and both ends of the interval never fall from one row to the next. A new rule that
 * keeps this property changes the two functions visible_first and visible_end and their inverse, visible_to_keys. What
 * leaves a row no interval is not here: ranges, which add keys, and trees, biases and boolean masks, which hide some.
 *
 * Lengths, limits and rows are those of one batch entry, at least 0 and below 2^31. */
#ifndef ACR_VISIBLE_H
#define ACR_VISIBLE_H

#include <stdint.h>

#ifdef __CUDACC__
#define VISIBLE_FUNCTION static __device__ __forceinline__
#else
#define VISIBLE_FUNCTION static inline
#endif

/* Whether an entry has a chunk and a kv_start: always on the CPU, on a GPU in lines with FWD_TERM_LIMITS. Structures
 * of other lines lack the two: fields that are always 0 would still change their machine code. */
#ifndef __CUDACC__
#define VISIBLE_LIMITS 1
#elif defined TERMS
#define VISIBLE_LIMITS (((TERMS)&64) != 0)
#else
#define VISIBLE_LIMITS 0
#endif

/* Where row i stands among the keys, its position: at key i + (kv_len - q_len) without a mask and with a mask of the
 * bottom-right rule, at key i with the top-left rule. With a mask a row sees no key behind its position. */
enum {
    FWD_MASK_NONE = 0,
    FWD_MASK_TOP_LEFT = 1,
    FWD_MASK_BOTTOM_RIGHT = 2
};

/* What holds for all rows of a problem. */
typedef struct visible_rule {
    int32_t mask;         /* FWD_MASK_* */
    int32_t window_left;  /* a row sees so many keys up to its position, that at its position included; 0: no limit */
    int32_t window_right; /* a row sees so many keys behind its position; 0: no limit; with a mask always 0 */
#if VISIBLE_LIMITS
    int32_t chunk; /* keys from kv_start on are cut into chunks of so many; a row sees those of the chunk that
                             holds its position; 0: no limit */
#endif
} visible_rule;

/* One batch entry under the rule. */
typedef struct visible_entry {
    visible_rule rule;
    int32_t q_len, kv_len; /* rows and keys that exist */
#if VISIBLE_LIMITS
    int32_t kv_start; /* the first key that exists, in [0, kv_len]; the keys before it are padding */
#endif
} visible_entry;

/* The keys that a tile of rows sees. Keys outside [first, end) are seen by no row, those in [full_first, full_end) by
 * every row; either may be empty: first >= end, full_first >= full_end. All four lie in [0, kv_len]. */
typedef struct visible_keys {
    int32_t first, full_first, full_end, end;
} visible_keys;

/* The rows that see a tile of keys, in the same way. All four lie in [0, q_len]. */
typedef struct visible_rows {
    int32_t first, full_first, full_end, end;
} visible_rows;

/* Tiles of keys, counted from key 0: those outside [first, end) hold no key that any row sees, those in [full_first,
 * full_end) need no mask. first <= full_first <= full_end <= end wherever a row sees a key; else first == end. */
typedef struct visible_tiles {
    int32_t first, full_first, full_end, end;
} visible_tiles;

VISIBLE_FUNCTION int32_t visible_min(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

VISIBLE_FUNCTION int32_t visible_max(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

VISIBLE_FUNCTION int32_t visible_chunk(visible_rule rule)
{
#if VISIBLE_LIMITS
    return rule.chunk;
#else
    return 0;
#endif
}

VISIBLE_FUNCTION int32_t visible_start(visible_entry e)
{
#if VISIBLE_LIMITS
    return e.kv_start;
#else
    return 0;
#endif
}

/* Whether some row may see less than every key that exists. */
VISIBLE_FUNCTION int visible_is_limited(visible_rule rule)
{
    return rule.mask != FWD_MASK_NONE || rule.window_left != 0 || rule.window_right != 0 || visible_chunk(rule) != 0;
}

/* What is added to a row for its position. */
VISIBLE_FUNCTION int32_t visible_diagonal(visible_entry e)
{
    return e.rule.mask == FWD_MASK_TOP_LEFT ? 0 : e.kv_len - e.q_len;
}

/* The position of a row. Rows at and beyond q_len count as the last, so that padding widens no tile. */
VISIBLE_FUNCTION int32_t visible_position(visible_entry e, int32_t row)
{
    return visible_min(row, e.q_len - 1) + visible_diagonal(e);
}

/* The first key of the chunk that holds a position, at or behind kv_start. Only of a rule with chunks. */
VISIBLE_FUNCTION int32_t visible_chunk_first(visible_entry e, int32_t position)
{
    /* NOLINTNEXTLINE(clang-analyzer-core.DivideZero): callers have asked for a chunk, which the analyser forgets */
    return position - (position - visible_start(e)) % visible_chunk(e.rule);
}

/* The first key that a row sees, if it sees one: if this is less than visible_end, which it never exceeds. */
VISIBLE_FUNCTION int32_t visible_first(visible_entry e, int32_t row)
{
    int32_t first = visible_start(e);
    if (e.rule.window_left == 0 && visible_chunk(e.rule) == 0)
        return first;
    if (e.rule.window_left != 0)
        first = visible_max(first, visible_position(e, row) - e.rule.window_left + 1);
    if (visible_chunk(e.rule) != 0 && visible_position(e, row) >= visible_start(e))
        first = visible_max(first, visible_chunk_first(e, visible_position(e, row)));
    return visible_min(e.kv_len, first);
}

/* One past the last key that a row sees, kv_start if the rule lets it see none. */
VISIBLE_FUNCTION int32_t visible_end(visible_entry e, int32_t row)
{
    int32_t most = e.kv_len;
    if (visible_chunk(e.rule) != 0) {
        const int32_t position = visible_position(e, row);
        if (position < visible_start(e))
            return visible_start(e); /* its chunk lies before every key */
        if (visible_chunk_first(e, position) < most - visible_chunk(e.rule))
            most = visible_chunk_first(e, position) + visible_chunk(e.rule);
    }
    if (e.rule.mask == FWD_MASK_NONE && e.rule.window_right == 0)
        return most;
    if (e.rule.mask == FWD_MASK_NONE && visible_position(e, row) >= e.kv_len - 1 - e.rule.window_right)
        return most; /* before the sum below can overflow */
    return visible_min(most, visible_max(visible_start(e), visible_position(e, row) + 1 + e.rule.window_right));
}

/* Of the rows [first_row, first_row + rows), rows > 0. */
VISIBLE_FUNCTION visible_keys visible_to_rows(visible_entry e, int32_t first_row, int32_t rows)
{
    const int32_t last_row = first_row + rows - 1;
    visible_keys k;
    k.first = visible_first(e, first_row);
    k.full_first = visible_first(e, last_row);
    k.full_end = visible_end(e, first_row);
    k.end = visible_end(e, last_row);
    return k;
}

/* Whether key tile `tile` of kv_tile keys needs a mask: some row does not see some key of it, or it holds a key that
 * does not exist. */
VISIBLE_FUNCTION int visible_needs_mask(visible_keys k, int32_t tile, int32_t kv_tile)
{
    return tile * kv_tile < k.full_first || (tile + 1) * kv_tile > k.full_end;
}

/* The tiles that a loop over key tiles visits, and those among them without a mask. */
VISIBLE_FUNCTION visible_tiles visible_tiles_of(visible_keys k, int32_t kv_tile)
{
    visible_tiles t;
    t.first = k.first / kv_tile;
    t.end = k.first < k.end ? (k.end + kv_tile - 1) / kv_tile : t.first;
    t.full_first = k.full_first == 0 ? 0 : visible_min(t.end, (k.full_first + kv_tile - 1) / kv_tile);
    t.full_end = visible_max(t.full_first, visible_min(t.end, k.full_end / kv_tile));
    return t;
}

/* Leaves in [*first, *end_row) the rows whose positions lie in [begin, end). */
VISIBLE_FUNCTION void visible_keep_positions(visible_entry e, int32_t *first, int32_t *end_row, int64_t begin,
                                             int64_t end)
{
    begin -= visible_diagonal(e);
    end -= visible_diagonal(e);
    *first = visible_max(*first, (int32_t)(begin < 0 ? 0 : begin > e.q_len ? e.q_len : begin));
    *end_row = visible_min(*end_row, (int32_t)(end < 0 ? 0 : end > e.q_len ? e.q_len : end));
}

/* Which rows see the keys [first_key, first_key + keys), keys > 0; a row in the full part sees all of them that exist,
 * padding included: it is empty where some are padding. For loops over rows, as a backward pass has them. */
VISIBLE_FUNCTION visible_rows visible_to_keys(visible_entry e, int32_t first_key, int32_t keys)
{
    const int32_t begin_key = visible_max(visible_start(e), first_key),
                  end_key = visible_min(e.kv_len, first_key + keys);
    const int32_t left = e.rule.window_left, right = e.rule.window_right, diagonal = visible_diagonal(e);
    const int32_t first = begin_key - diagonal, last = end_key - 1 - diagonal; /* rows that stand at these keys */
    visible_rows r = {0, 0, e.q_len, e.q_len};
    if (begin_key >= end_key)
        return (visible_rows){0, 0, 0, 0};
    /* A row sees no key further than `right` behind its position; compared before a difference can overflow. */
    if (e.rule.mask != FWD_MASK_NONE || right != 0) {
        r.first = first > right ? visible_min(e.q_len, first - right) : 0;
        r.full_first = last > right ? visible_min(e.q_len, last - right) : 0;
    }
    if (left != 0 && last < e.q_len - left)
        r.end = visible_max(0, last + left);
    if (left != 0 && first < e.q_len - left)
        r.full_end = visible_max(0, first + left);
    if (visible_chunk(e.rule) != 0) {
        const int32_t first_chunk = visible_chunk_first(e, begin_key), last_chunk = visible_chunk_first(e, end_key - 1);
        visible_keep_positions(e, &r.first, &r.end, first_chunk, (int64_t)last_chunk + visible_chunk(e.rule));
        visible_keep_positions(e, &r.full_first, &r.full_end, last_chunk, (int64_t)first_chunk + visible_chunk(e.rule));
    }
    if (begin_key != first_key)
        r.full_end = r.full_first;
    return r;
}

#endif
