/* Which tile of work comes next: the order of query tiles, and who takes which. Three kinds of launches:
 *
 *   a grid       every query tile has a CTA of its own: tile_of_cta
 *   a queue      CTAs take tile after tile of entries of equal lengths: count_tiles, tile_at, take_next
 *   a packed     the same of a packed batch, sequence after sequence: order_sequences, packed_tile_at, take_next
 *   queue
 *
 * An includer defines Q_TILE and KV_TILE; SEQUENCES=1, if the queue's work tiles say their rows: of packed batches, and
 * of lines for caches (PAGED), which take packed queries and others by one queue; HEADS_IN_TILE too, if the rows of a
 * tile are of so many query heads of one key head: each has TILE_POSITIONS of them, at the same positions. Key tiles of
 * such are counted from the first key that a row sees (key_origin), since few key tiles serve them. */
#ifndef ACR_DEVICE_ATTENTION_TILE_SCHEDULER_CUH
#define ACR_DEVICE_ATTENTION_TILE_SCHEDULER_CUH

#include "cuda/device/attention/packed_queue.h"
#include "cuda/device/attention/visible.cuh"

#ifndef HEADS_IN_TILE
#define HEADS_IN_TILE 1
#endif
#ifndef SEQUENCES
#define SEQUENCES 0
#endif
/* A work tile's entry is said beside its place in the tensors. */
#define ENTRY_APART (TERMS || (SEQUENCES && PAGED))

enum {
    TILE_POSITIONS = Q_TILE / HEADS_IN_TILE
};

/* A query tile, and the rows of its batch entry. */
typedef struct work_tile {
    int q_first;     /* from the entry's first row; -1: there is no more work */
    int head, batch; /* head: the tile's first; batch: in the tensors, 0 of packed queries */
    sequence rows;
#if ENTRY_APART
    int entry; /* of the batch: whose pages, starts, ranges, bias and tree these are; of a packed batch the sequence */
#endif
} work_tile;

/* The entry of a tile. */
DEV int entry_number(const work_tile &t)
{
#if ENTRY_APART
    return t.entry;
#else
    return t.batch;
#endif
}

DEV void set_entry_number(work_tile &t, int entry)
{
#if ENTRY_APART
    t.entry = entry;
#endif
}

DEV uint32_t count_q_tiles(int q_len)
{
    return (uint32_t)(q_len + TILE_POSITIONS - 1) / TILE_POSITIONS;
}

/* Heads are counted by as many as a tile has. */
DEV uint32_t count_head_units(const fwd_args &a)
{
    return (uint32_t)a.q_heads / HEADS_IN_TILE;
}

/* ---- Order ---- */

/* Tiles differ in length: within sections of heads whose keys fit L2 together, the first tiles of all heads come before
 * the second ones. rank: which of its head's. */
DEV void order_in_sections(uint32_t &head, uint32_t &rank, uint32_t index, uint32_t q_tiles, uint32_t heads,
                           uint32_t section_heads)
{
    const uint32_t section = index / (q_tiles * section_heads), in_section = index - section * q_tiles * section_heads;
    const uint32_t heads_here = min(section_heads, heads - section * section_heads);
    rank = in_section / heads_here;
    head = section * section_heads + in_section - rank * heads_here;
}

/* Without a mask, tiles of one head run side by side and share its keys in L2. With one, the long tiles of a section's
 * heads come first. */
DEV void order_tiles(uint32_t &head, uint32_t &q_tile, const fwd_args &a, uint32_t index, uint32_t q_tiles,
                     uint32_t heads, uint32_t section_heads)
{
    if (a.mask == FWD_MASK_NONE) {
        head = index / q_tiles;
        q_tile = index - head * q_tiles;
        return;
    }
    uint32_t rank;
    order_in_sections(head, rank, index, q_tiles, heads, section_heads);
    q_tile = q_tiles - 1 - rank;
}

/* ---- A grid {query tiles, heads, batch} ---- */

/* Without its rows. cta: blockIdx. */
DEV work_tile tile_of_cta(const fwd_args &a, uint3 cta)
{
    enum {
        SECTION_HEADS = 64
    };
    work_tile t;
    if (a.mask == FWD_MASK_NONE) {
        t.q_first = (int)cta.x * TILE_POSITIONS;
        t.head = (int)cta.y;
        t.batch = (int)cta.z;
    } else {
        uint32_t head, q_tile;
        order_tiles(head, q_tile, a, cta.x + gridDim.x * (cta.y + gridDim.y * cta.z), gridDim.x, gridDim.y * gridDim.z,
                    SECTION_HEADS);
        t.q_first = (int)q_tile * TILE_POSITIONS;
        t.head = (int)(head % gridDim.y);
        t.batch = (int)(head / gridDim.y);
    }
    set_entry_number(t, t.batch);
    return t;
}

/* ---- A queue of entries of equal lengths ---- */

DEV uint32_t count_tiles(const fwd_args &a)
{
    return count_q_tiles(a.q_len) * count_head_units(a) * (uint32_t)a.batch;
}

/* Of a queue: so many of `heads` head units, whose keys and values fit L2 together. elem_bytes: of a key's or a value's
 * element. */
DEV uint32_t find_section_heads(const fwd_args &a, int kv_len, uint32_t heads, int elem_bytes)
{
    const int64_t section_bytes = 32 << 20;
    const int64_t kv_head_bytes = (int64_t)kv_len * (a.qk_dim + a.v_dim) * elem_bytes;
    return (uint32_t)min(max(section_bytes / kv_head_bytes, (int64_t)1) * (a.group / HEADS_IN_TILE), (int64_t)heads);
}

/* The same of the whole queue, asked for before its loop. Without a mask there are no sections, and no CTA's first load
 * waits for a division of 64 bits. */
DEV uint32_t find_queue_section(const fwd_args &a, int elem_bytes)
{
    const uint32_t heads = count_head_units(a) * (uint32_t)a.batch;
    return a.mask == FWD_MASK_NONE ? heads : find_section_heads(a, a.kv_len, heads, elem_bytes);
}

/* A query tile of the queue; head: a head unit, counted over all batch entries. Reads global memory: kv_lens. */
DEV work_tile tile_of_queue(const fwd_args &a, uint32_t head, uint32_t q_tile)
{
    work_tile t;
    t.batch = (int)(head / count_head_units(a));
    t.head = (int)(head - (uint32_t)t.batch * count_head_units(a)) * HEADS_IN_TILE;
    t.q_first = (int)q_tile * TILE_POSITIONS;
    t.rows = find_whole_sequence(a, t.batch);
    set_entry_number(t, t.batch);
    return t;
}

/* Tile number `index` of the queue. */
DEV work_tile tile_in_section(const fwd_args &a, uint32_t index, uint32_t section_heads)
{
    const uint32_t heads = count_head_units(a) * (uint32_t)a.batch;
    uint32_t head, q_tile;
    order_tiles(head, q_tile, a, index, count_q_tiles(a.q_len), heads, section_heads);
    return tile_of_queue(a, head, q_tile);
}

/* The same where sections are found for each tile. */
DEV work_tile tile_at(const fwd_args &a, uint32_t index, int elem_bytes)
{
    const uint32_t heads = count_head_units(a) * (uint32_t)a.batch;
    return tile_in_section(a, index, find_section_heads(a, a.kv_len, heads, elem_bytes));
}

/* The next tile of a CTA. The first tiles are the CTAs' own, the others are taken from a counter in the workspace. A
 * CTA stops at its first failure, so a launch takes as many numbers as there are tiles, and the counter wraps back to 0
 * with the last one. */
DEV uint32_t take_next(const fwd_args &a, uint32_t tiles)
{
    if (tiles <= gridDim.x)
        return tiles;
    return gridDim.x + atomicInc((unsigned *)a.workspace, tiles - 1);
}

/* ---- A queue of a packed batch: sequence after sequence, that with the most keys first ---- */

/* By all of a CTA's threads: counts the tiles, and orders the sequences if they are not too many. */
DEV void order_sequences(const fwd_args &a, packed_queue &q, int threads)
{
    const int ordered = a.batch <= ORDERED_SEQUENCES;
    if (threadIdx.x == 0) {
        q.tiles = 0;
        q.next = 0;
        q.first = q.end = 0;
        q.batch = 0;
    }
    __syncthreads();
    uint32_t q_tiles = 0;
    for (int i = threadIdx.x; i < a.batch; i += threads) {
        const sequence rows = find_sequence(a, i);
        q_tiles += count_q_tiles(rows.q_len);
        if (ordered)
            q.lengths[i] = rows.kv_len;
    }
    atomicAdd(&q.tiles, q_tiles * count_head_units(a));
    __syncthreads();
    for (int i = threadIdx.x; ordered && i < a.batch; i += threads) {
        int rank = 0;
        for (int other = 0; other < a.batch; other++)
            rank += q.lengths[other] > q.lengths[i] || (q.lengths[other] == q.lengths[i] && other < i);
        q.order[rank] = (uint8_t)i;
    }
    __syncthreads();
}

/* Tile number `index`, by one thread, which asks for ascending numbers. Reads global memory: the offsets. */
DEV work_tile packed_tile_at(const fwd_args &a, uint32_t index, packed_queue &q, int elem_bytes)
{
    while (index >= q.end) {
        const int next = q.next;
        const int batch = a.batch <= ORDERED_SEQUENCES ? q.order[next] : next;
        const sequence rows = find_sequence(a, batch);
        q.next = next + 1;
        q.first = q.end;
        q.end = q.end + count_q_tiles(rows.q_len) * count_head_units(a);
        q.batch = batch;
    }
    const sequence rows = find_sequence(a, q.batch);
    const uint32_t heads = count_head_units(a);
    uint32_t head, q_tile;
    order_tiles(head, q_tile, a, index - q.first, count_q_tiles(rows.q_len), heads,
                find_section_heads(a, max(rows.kv_len, 1), heads, elem_bytes));
    work_tile t = {(int)q_tile * TILE_POSITIONS, (int)head * HEADS_IN_TILE, is_packed(a) ? 0 : q.batch, rows};
    set_entry_number(t, q.batch);
    return t;
}

/* ---- What a tile sees ---- */

/* Of batch entries of equal lengths the query length is the arguments': no register, and no work tile, has to hold it.
 */
DEV int count_queries(const fwd_args &a, const work_tile &t)
{
    return SEQUENCES || is_packed(a) ? t.rows.q_len : a.q_len;
}

DEV visible_entry entry_of(const fwd_args &a, const work_tile &t)
{
    visible_entry e = entry_of(a, t.rows);
    e.q_len = count_queries(a, t);
    return e;
}

/* The first key of key tile 0, for the query tile that begins with row q_first. */
DEV int key_origin(const visible_entry &e, int q_first)
{
    return HEADS_IN_TILE > 1 ? visible_first(e, q_first) : 0;
}

/* Keys counted from the key `origin`, which is no later than the first. */
DEV visible_keys count_from(int origin, const visible_keys &k)
{
    return {k.first - origin, k.full_first - origin, max(k.full_end - origin, 0), k.end - origin};
}

/* The key tiles that a CTA's rows together see, or one tile, all of it masked, where they see no key: so every work
 * tile has at least one. */
DEV visible_tiles key_tiles_of(const visible_keys &seen)
{
    visible_tiles k = visible_tiles_of(seen, KV_TILE);
    k.end = max(k.end, k.first + 1);
    return k;
}

/* In lines without ranges and trees. */
DEV visible_tiles key_tiles_of(const visible_entry &e, int q_first)
{
    return key_tiles_of(count_from(key_origin(e, q_first), visible_to_rows(e, q_first, TILE_POSITIONS)));
}

/* Reads global memory: ranges. */
DEV visible_tiles find_key_tiles(const fwd_args &a, const work_tile &t)
{
    const visible_entry e = entry_of(a, t);
    return key_tiles_of(
        count_from(key_origin(e, t.q_first), find_visible_keys(a, e, entry_number(t), t.q_first, TILE_POSITIONS)));
}

#endif
