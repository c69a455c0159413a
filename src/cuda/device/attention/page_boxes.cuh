/* Boxes of tensor maps for keys in pages (fwd_paging.h), for producers (pipeline.cuh) of lines that are compiled with
 * PAGED=1: the maps of k and v are {dim, page rows, heads, pages}. A page is a multiple of a key tile, or a key tile of
 * a page, and a box is the smaller of the two. Without a table a batch entry is one page. ANY_KEYS: the line looks
 * whether there is a table, and serves packed batches of keys. */
#ifndef ACR_DEVICE_ATTENTION_PAGE_BOXES_CUH
#define ACR_DEVICE_ATTENTION_PAGE_BOXES_CUH

#include "cuda/device/attention/pages.cuh"
#include "cuda/device/attention/pipeline.cuh"

/* The keys of one head of a batch entry. */
typedef struct page_source {
    key_pages pages;
    int head, end; /* end: one past the last key that exists */
#if ANY_KEYS
    int first; /* the row of key 0 in the one page */
#endif
} page_source;

DEV page_source page_source_of(const fwd_args &a, const fwd_paging &paging, const work_tile &t)
{
    page_source s = {pages_of_entry(a, paging, entry_number(t)), t.head / a.group, t.rows.kv_len};
#if ANY_KEYS
    if (paging.table == nullptr)
        s.pages.batch = t.batch; /* all keys of a packed batch are in page 0 */
    s.first = t.rows.kv_begin;
#endif
    return s;
}

/* In which row of its page a key is. */
DEV int row_in_page(const page_source &s, int in_page)
{
#if ANY_KEYS
    return s.first + in_page;
#else
    return in_page;
#endif
}

/* The page of a number in the table, which lines for paged caches alone always have. */
DEV int page_at(const key_pages &p, int entry)
{
    return KV_TYPE == ACR_E4M3 || ANY_KEYS ? read_page(p, entry) : p.table[entry];
}

enum {
    PAGES_AT_ONCE = 8 /* numbers of pages that are on their way together */
};

/* The pages of a tile's boxes, from box `first_box` on. What lies behind the last key's page has none. Reads global
 * memory: the table. */
DEV void find_pages(int (&pages)[PAGES_AT_ONCE], const page_source &s, int key, int entry, int box, int first_box)
{
#pragma unroll
    for (int i = 0; i < PAGES_AT_ONCE; i++) {
        const int row = (first_box + i) * box;
        pages[i] = row < KV_TILE && key + row < s.end ? page_at(s.pages, entry + first_box + i) : NO_PAGE;
    }
}

/* Loads the tile of keys, or of values, that begins with `key`, as use number `use` of the ring, once the stage is
 * empty; the first numbers of its pages are asked for before that is awaited. What has no page, or one that does not
 * exist, is outside of the map and becomes zeros; rows of the last page behind its last key are loaded. Reads global
 * memory: the table. */
DEV void produce_keys(const kv_ring &r, const fwd_map *map, const page_source &s, int use, int kv_tile)
{
    const int stage = stage_of(use), key = kv_tile * KV_TILE;
    const int entry = key / s.pages.page, in_page = key - entry * s.pages.page, box = min(s.pages.page, KV_TILE);
    const uint32_t full = r.full + BARRIER_BYTES * stage;
    uint32_t to = r.tiles + stage * r.stage_bytes;
    int pages[PAGES_AT_ONCE];
    find_pages(pages, s, key, entry, box, 0);
    barrier_wait(r.empty + BARRIER_BYTES * stage, parity_of(use) ^ 1);
    barrier_arrive_expecting(full, r.panels.count * r.panels.bytes);
#pragma unroll 1
    for (int first = 0;;) {
#pragma unroll
        for (int i = 0; i < PAGES_AT_ONCE; i++)
            if ((first + i) * box < KV_TILE) {
                for (int panel = 0; panel < r.panels.count; panel++)
                    load_box(to + panel * r.panels.bytes, map, full, r.panels.elems * panel, row_in_page(s, in_page),
                             s.head, pages[i]);
                to += box * BOX_ROW_BYTES;
            }
        first += PAGES_AT_ONCE;
        if (first * box >= KV_TILE)
            break;
        find_pages(pages, s, key, entry, box, first);
    }
}

#endif
