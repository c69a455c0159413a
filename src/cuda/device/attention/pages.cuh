/* Caches: keys and values in pages that a table names (fwd_paging.h), and of another type than the queries. A line that
 * is compiled for them (PAGED) finds its keys through this file; without a table its keys lie one after another, as in
 * one page for each batch entry.
 *
 * Each lane of a warp follows one key of the warp's tiles, from tile to tile, and the copies of a tile ask the lanes
 * for their keys' pages. The table is read a step ahead of the tile that it is for: no copy waits for it.
 *
 * An includer defines KV_TYPE, what k and v hold, as in element.cuh. */
#ifndef ACR_DEVICE_ATTENTION_PAGES_CUH
#define ACR_DEVICE_ATTENTION_PAGES_CUH

#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/kv_loader.cuh"
#include "fwd_paging.h"

/* ---- Where an entry's keys are ---- */

typedef struct key_pages {
    const int32_t *table; /* the entry's pages, or nullptr: all keys are in the one page `batch` */
    int page, pages;      /* keys in a page; pages that there are */
    int batch;
} key_pages;

DEV key_pages pages_of_entry(const fwd_args &a, const fwd_paging &p, int batch)
{
    if (p.table == nullptr)
        return {nullptr, INT32_MAX, a.batch, batch};
    return {p.table + batch * p.table_stride, p.page, p.pages, batch};
}

/* The page of a number in the table, which may be none. Reads global memory: the table. */
DEV int read_page(const key_pages &p, int entry)
{
    return p.table == nullptr ? p.batch : p.table[entry];
}

DEV bool is_page(const key_pages &p, int page)
{
    return (uint32_t)page < (uint32_t)p.pages;
}

/* ---- Loading ---- */

enum {
    NO_PAGE = -1
};

/* A lane's key of the tile to be loaded and of the one after it. */
typedef struct page_cursor {
    key_pages pages;
    int page, in_page;                    /* of the lane's key: NO_PAGE beyond the last key */
    int next_page, next_entry, next_rest; /* of its key in the next tile: page, place in the table, key in the page */
    int next_key, end;                    /* one past the last key to load */
    int step, step_entries, step_rest;    /* keys from tile to tile; as entries of the table and keys */
} page_cursor;

/* Of tiles that begin with key `first`, `step` keys apart; the lane's key is number `lane` of them. */
DEV page_cursor start_pages(const key_pages &pages, int first, int end, int step, int lane)
{
    page_cursor c;
    const int key = first + lane;
    const int entry = key / pages.page;
    c.pages = pages;
    c.end = end;
    c.step = step;
    c.step_entries = step / pages.page;
    c.step_rest = step - c.step_entries * pages.page;
    c.in_page = key - entry * pages.page;
    c.page = key < end ? read_page(pages, entry) : NO_PAGE;
    c.next_key = key + step;
    c.next_entry = entry + c.step_entries;
    c.next_rest = c.in_page + c.step_rest;
    if (c.next_rest >= pages.page) {
        c.next_rest -= pages.page;
        c.next_entry++;
    }
    c.next_page = c.next_key < end ? read_page(pages, c.next_entry) : NO_PAGE;
    return c;
}

/* To the next tile, whose pages are known by now; those of the one after it are asked for. */
DEV void advance_pages(page_cursor &c)
{
    c.page = c.next_page;
    c.in_page = c.next_rest;
    c.next_key += c.step;
    c.next_entry += c.step_entries;
    c.next_rest += c.step_rest;
    if (c.next_rest >= c.pages.page) {
        c.next_rest -= c.pages.page;
        c.next_entry++;
    }
    c.next_page = c.next_key < c.end ? read_page(c.pages, c.next_entry) : NO_PAGE;
}

/* K or V of one head: rows of `chunks` chunks in pages. */
typedef struct paged_matrix {
    const char *base;
    int64_t page_bytes, row_bytes;
    int chunks;
} paged_matrix;

DEV paged_matrix paged_matrix_of(const void *tensor, const fwd_strides &strides, int head, int dim, int elem_bytes)
{
    return {(const char *)tensor + head * strides.head * elem_bytes, strides.batch * elem_bytes,
            strides.row * elem_bytes, dim / (CHUNK_BYTES / elem_bytes)};
}

/* load_tile (kv_loader.cuh) of keys in pages: of those that the warp's lanes are at. Keys without a page, beyond the
 * last or by a number that names none, become zeros; nothing is read for them. Whole warps come together. */
template <int ROWS, int ROW_CHUNKS, int THREADS>
DEV void load_paged_tile(uint32_t tile, const paged_matrix &m, const page_cursor &c, bool read_once, int thread)
{
    constexpr int LANES = ROW_CHUNKS % 8 == 0 ? 8 : 4; /* threads side by side in a row */
    constexpr int ROWS_AT_ONCE = THREADS / LANES;
    static_assert(ROWS % ROWS_AT_ONCE == 0, "the tile's rows divide evenly over the threads");
    static_assert(ROWS <= WARP_THREADS, "a lane follows one key of a tile");
    const int row = thread / LANES, chunk = thread % LANES;
    const uint64_t policy = policy_read_once();
#pragma unroll
    for (int r = 0; r < ROWS; r += ROWS_AT_ONCE) {
        const int page = __shfl_sync(~0u, c.page, row + r), in_page = __shfl_sync(~0u, c.in_page, row + r);
        const bool exists = is_page(c.pages, page);
        const char *from = m.base + page * m.page_bytes + in_page * m.row_bytes + chunk * CHUNK_BYTES;
#pragma unroll
        for (int i = 0; i < ROW_CHUNKS; i += LANES) {
            const uint32_t to = tile + chunk_offset(row + r, chunk + i, ROW_CHUNKS);
            const bool valid = exists && chunk + i < m.chunks;
            if (read_once)
                copy_chunk_async_by(to, from + i * CHUNK_BYTES, valid, policy);
            else
                copy_chunk_async(to, from + i * CHUNK_BYTES, valid);
        }
    }
}

/* ---- Scales of a cache, beside those of the arguments ---- */

typedef struct cache_scales {
    float keys, values; /* of raw scores; of the output */
} cache_scales;

/* Reads global memory where the execution brings scales. */
DEV cache_scales find_cache_scales(const fwd_args &a, int batch, int kv_head)
{
    if (KV_TYPE != ACR_E4M3)
        return {1.0f, 1.0f};
    const int64_t at = (int64_t)batch * a.kv_heads + kv_head;
    return {scale_at(a.k_scales, at), a.out_scale * scale_at(a.v_scales, at)};
}

/* ---- The NaN fix-up: what fix_hidden_nan_of (epilogue.cuh) asks of keys in pages ---- */

/* CACHED: the type of the pages' elements. */
template <int CACHED> struct paged_keys {
    key_pages pages;
};
template <int CACHED> struct paged_inputs {
    int64_t q; /* element index of its query */
    key_pages pages;
    int kv_head;
};

template <int CACHED>
DEV paged_inputs<CACHED> find_inputs(const fwd_args &a, const paged_keys<CACHED> &keys, const stored_row &r)
{
    return {query_index(a, r), keys.pages, r.head / a.group};
}

/* An element of k or v; of a key without a page it is 0. Reads the table, too. */
template <int CACHED>
DEV float load_cached(const paged_inputs<CACHED> &from, const void *tensor, const fwd_strides &strides, int key,
                      int column)
{
    const int entry = key / from.pages.page, page = read_page(from.pages, entry);
    const int64_t in_page = (key - entry * from.pages.page) * strides.row + column;
    return is_page(from.pages, page)
               ? load_element<CACHED>(tensor, page * strides.batch + from.kv_head * strides.head + in_page)
               : 0.0f;
}

template <int TYPE, int CACHED>
DEV float load_k(const fwd_args &a, const paged_inputs<CACHED> &from, int key, int column)
{
    return load_cached(from, a.k, a.k_stride, key, column);
}

template <int TYPE, int CACHED>
DEV float load_v(const fwd_args &a, const paged_inputs<CACHED> &from, int key, int column)
{
    return load_cached(from, a.v, a.v_stride, key, column);
}

/* fix_hidden_nan of a row whose keys are in the pages of its entry. TYPE is that of queries and output; the cache's
 * scales are in r.scale_log2 and r.factor. */
template <int TYPE, int CACHED = KV_TYPE>
DEV void fix_paged_nan(const fwd_args &a, const key_pages &pages, const visible_entry &e, const stored_row &r,
                       float row_sum, int finite, int lane)
{
    fix_hidden_nan_of<TYPE, TYPE>(a, paged_keys<CACHED>{pages}, e, r, row_sum, finite, lane);
}

#endif
