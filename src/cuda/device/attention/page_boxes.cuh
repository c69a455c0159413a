/* Boxes of tensor maps for keys in pages (fwd_paging.h), for producers (pipeline.cuh) of lines that are compiled with
 * PAGED=1: the maps of k and v are {dim, page rows, heads, pages}. A page is a multiple of a key tile, or a key tile of
 * a page, and a box is the smaller of the two. Without a table a batch entry is one page. */
#ifndef ACR_DEVICE_ATTENTION_PAGE_BOXES_CUH
#define ACR_DEVICE_ATTENTION_PAGE_BOXES_CUH

#include "cuda/device/attention/pages.cuh"
#include "cuda/device/attention/pipeline.cuh"

/* The keys of one head of a batch entry. */
typedef struct page_source {
    key_pages pages;
    int head, end; /* end: one past the last key that exists */
} page_source;

/* The page of a number in the table, which lines for keys of the queries' type always have. */
DEV int page_at(const key_pages &p, int entry)
{
    return KV_TYPE == ACR_E4M3 ? read_page(p, entry) : p.table[entry];
}

/* Loads the tile of keys, or of values, that begins with `key`. What lies behind the last key's page, or in a page that
 * does not exist, is outside of the map and becomes zeros; rows of the last page behind its last key are loaded. Reads
 * global memory: the table. */
DEV void load_page_boxes(uint32_t to, const fwd_map *map, uint32_t full, const tile_panels &p, const page_source &s,
                         int key)
{
    enum {
        AT_ONCE = 4 /* numbers of pages that are on their way together */
    };
    const int first = key / s.pages.page, in_page = key - first * s.pages.page, box = min(s.pages.page, KV_TILE);
    barrier_arrive_expecting(full, p.count * p.bytes);
#pragma unroll 1
    for (int i = 0; i * box < KV_TILE; i += AT_ONCE) {
        int pages[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            pages[j] =
                (i + j) * box < KV_TILE && key + (i + j) * box < s.end ? page_at(s.pages, first + i + j) : NO_PAGE;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if ((i + j) * box < KV_TILE)
                for (int panel = 0; panel < p.count; panel++)
                    load_box(to + panel * p.bytes + (i + j) * box * BOX_ROW_BYTES, map, full, p.elems * panel, in_page,
                             s.head, pages[j]);
    }
}

/* Of a ring, as use number `use`, once the stage is empty. */
DEV void produce_keys(const kv_ring &r, const fwd_map *map, const page_source &s, int use, int kv_tile)
{
    const int stage = stage_of(use);
    barrier_wait(r.empty + BARRIER_BYTES * stage, parity_of(use) ^ 1);
    load_page_boxes(r.tiles + stage * r.stage_bytes, map, r.full + BARRIER_BYTES * stage, r.panels, s,
                    kv_tile * KV_TILE);
}

#endif
