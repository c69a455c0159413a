/* The queue of query tiles of a persistent kernel: its order, who takes which, and the keys that a tile sees. For
 * families whose CTAs take tile after tile; where every tile has a CTA of its own, keys.cuh is enough.
 *
 * An includer defines Q_TILE, KV_TILE, ELEM_BYTES (of keys and values), and PACKED: 1 if it serves packed batches
 * alone, whose queue it then orders itself, else 0. */
#ifndef ACR_DEVICE_ATTENTION_TILE_SCHEDULER_CUH
#define ACR_DEVICE_ATTENTION_TILE_SCHEDULER_CUH

#include "cuda/device/attention/sequence.cuh"

/* A query tile, and the rows of its batch entry. */
typedef struct place {
    int q_first;     /* from the entry's first row; -1: the queue is empty */
    int head, batch; /* batch: in the tensors, 0 of a packed batch */
    sequence rows;
} place;

DEV uint32_t count_q_tiles(int q_len)
{
    return (uint32_t)(q_len + Q_TILE - 1) / Q_TILE;
}

/* Of entries of equal lengths. */
DEV uint32_t count_equal_places(const fwd_args &a)
{
    return count_q_tiles(a.q_len) * (uint32_t)a.q_heads * (uint32_t)a.batch;
}

/* The order of the queue over entries of equal lengths, or over the heads of one. Without a mask, tiles of one head run
 * side by side and share its keys in L2. With one, tiles differ in length: within sections of heads whose keys and
 * values fit L2 together, the long tiles of all heads come first. */
DEV void order_tiles(uint32_t &head, uint32_t &q_tile, const fwd_args &a, uint32_t index, uint32_t q_tiles,
                     uint32_t heads, int kv_len)
{
    const int64_t section_bytes = 32 << 20;
    if (a.mask == FWD_MASK_NONE) {
        head = index / q_tiles;
        q_tile = index - head * q_tiles;
    } else {
        const int64_t kv_head_bytes = (int64_t)kv_len * (a.qk_dim + a.v_dim) * ELEM_BYTES;
        const int64_t fitting = max(section_bytes / kv_head_bytes, (int64_t)1) * a.group;
        const uint32_t section_heads = (uint32_t)min(fitting, (int64_t)heads);
        const uint32_t section = index / (q_tiles * section_heads),
                       in_section = index - section * q_tiles * section_heads;
        const uint32_t heads_here = min(section_heads, heads - section * section_heads);
        const uint32_t rank = in_section / heads_here;
        head = section * section_heads + in_section - rank * heads_here;
        q_tile = q_tiles - 1 - rank;
    }
}

/* Of entries of equal lengths. Reads global memory: kv_lens. */
DEV place find_place(const fwd_args &a, uint32_t index)
{
    uint32_t head, q_tile;
    order_tiles(head, q_tile, a, index, count_q_tiles(a.q_len), (uint32_t)a.q_heads * (uint32_t)a.batch, a.kv_len);
    place p;
    p.batch = (int)(head / (uint32_t)a.q_heads);
    p.head = (int)(head - (uint32_t)p.batch * (uint32_t)a.q_heads);
    p.q_first = (int)q_tile * Q_TILE;
    p.rows = {0, a.q_len, 0, a.kv_lens == nullptr ? a.kv_len : min(max(a.kv_lens[p.batch], 0), a.kv_len)};
    return p;
}

/* The first places are the CTAs' own, the others are taken from a counter in the workspace. A CTA stops at its first
 * failure, so a launch takes as many numbers as there are places, and the counter wraps back to 0 with the last one. */
DEV uint32_t take_next(const fwd_args &a, uint32_t places)
{
    if (places <= gridDim.x)
        return places;
    return gridDim.x + atomicInc((unsigned *)a.workspace, places - 1);
}

/* Of the entry. Of other than packed batches from the arguments: no register, and no place, has to hold it. */
DEV int count_queries(const fwd_args &a, const place &p)
{
    return PACKED ? p.rows.q_len : a.q_len;
}

/* The keys that the rows of a part of the tile see. */
DEV keys place_keys(const fwd_args &a, const place &p, int first_row, int rows)
{
    sequence entry = p.rows;
    entry.q_len = count_queries(a, p);
    return sequence_keys(a, entry, p.q_first + first_row, rows);
}

/* The key tiles of a query tile: at least one, all of it masked where no key is seen. */
DEV int count_kv_tiles(const fwd_args &a, const place &p)
{
    return max(1, (place_keys(a, p, 0, Q_TILE).end + KV_TILE - 1) / KV_TILE);
}

#endif
