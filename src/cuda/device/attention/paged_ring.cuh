/* The ring of key_ring.cuh for caches, in pages or not, of Q's 16 bits or of e4m3, which becomes Q's type in shared
 * memory. What is a thread's to copy is a few rows of each tile: it looks their pages up while the tile before is on
 * its way, and widens what it has copied itself, so that its own wait for the copies is enough. */
#ifndef ACR_DEVICE_ATTENTION_PAGED_RING_CUH
#define ACR_DEVICE_ATTENTION_PAGED_RING_CUH

#include "cuda/device/attention/pages.cuh"
#include "cuda/device/attention/tile_scheduler.cuh"
#include "cuda/device/attention/warp_tile.cuh"
#include "cuda/device/isa/shared.cuh"
#include "cuda/device/isa/widen.cuh"

enum {
    RING_LANES = ROW_CHUNKS % 8 == 0 ? 8 : 4, /* threads side by side in a row */
    ROWS_AT_ONCE = GROUP_THREADS / RING_LANES,
    THREAD_ROWS = KV_TILE / ROWS_AT_ONCE, /* of a tile, that a thread copies pieces of */
    CACHE_CHUNK_DIMS = CHUNK_BYTES        /* of e4m3 in 16 bytes */
};

static_assert(KV_TILE % ROWS_AT_ONCE == 0 && ROWS_AT_ONCE % 8 == 0,
              "KV_TILE: its rows divide evenly over a group's threads, each of which keeps its place in the swizzle");

typedef struct key_ring {
    const char *k, *v; /* of page 0, the head's first row */
    fwd_strides k_stride, v_stride;
    int k_chunks, v_chunks;
    int is_narrow; /* of e4m3 */
    key_pages pages;
    uint32_t inverse;            /* 2^32 / pages.page, at most 1 below it */
    int next_pages[THREAD_ROWS]; /* of this thread's rows of the next tile */
    uint32_t stages;             /* the first's address */
    int thread;                  /* of the group */
    int next;                    /* key of the next tile to load */
    int end;                     /* one past the last key to load */
} key_ring;

/* A key's place in the table, and in its page. A product with the inverse is at most 1 below the quotient. */
typedef struct key_place {
    int entry, in_page;
} key_place;

DEV key_place place_of(const key_ring &ring, int key)
{
    key_place at = {(int)__umulhi((uint32_t)key, ring.inverse), 0};
    at.in_page = key - at.entry * ring.pages.page;
    if (at.in_page >= ring.pages.page) {
        at.in_page -= ring.pages.page;
        at.entry++;
    }
    return at;
}

/* Key number i of the tile that begins with the ring's next, among the thread's. */
DEV int thread_key(const key_ring &ring, int i)
{
    return ring.next + ring.thread / RING_LANES + i * ROWS_AT_ONCE;
}

/* Looks up the pages of the next tile, NO_PAGE where a key is behind the last. Reads global memory: the table. */
DEV void find_next_pages(key_ring &ring)
{
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        const int key = thread_key(ring, i);
        ring.next_pages[i] = key < ring.end ? read_page(ring.pages, place_of(ring, key).entry) : NO_PAGE;
    }
}

/* Of a work tile's head, from key `first` on. */
DEV key_ring make_ring(const fwd_args &a, const fwd_paging &paging, const work_tile &t, int first, int end,
                       uint32_t stages, int thread)
{
    const int kv_head = divide_small(t.head, a.group), is_narrow = paging.kv_type == ACR_E4M3;
    const int chunk_dims = is_narrow ? CACHE_CHUNK_DIMS : CHUNK_ELEMS, elem_bytes = is_narrow ? 1 : ELEM_BYTES;
    key_ring ring = {(const char *)a.k + kv_head * a.k_stride.head * elem_bytes,
                     (const char *)a.v + kv_head * a.v_stride.head * elem_bytes,
                     a.k_stride,
                     a.v_stride,
                     a.qk_dim / chunk_dims,
                     a.v_dim / chunk_dims,
                     is_narrow,
                     pages_of_entry(a, paging, t.batch),
                     0,
                     {},
                     stages,
                     thread,
                     first,
                     end};
    ring.inverse = ~0u / (uint32_t)ring.pages.page;
    find_next_pages(ring);
    return ring;
}

/* The rows of a work tile's head of Q. */
DEV chunk_matrix query_matrix(const fwd_args &a, const work_tile &t)
{
    return head_matrix_of(a.q, a.q_stride, t.batch, t.head, t.rows.q_begin, a.qk_dim, ELEM_BYTES);
}

/* Where the thread's e4m3 of a row, which lie where the first half of them will be, begin. */
DEV uint32_t narrow_chunk(uint32_t tile, int thread, int i, int column)
{
    return tile + i * (ROWS_AT_ONCE * ROW_CHUNKS * CHUNK_BYTES) +
           chunk_offset(thread / RING_LANES, 2 * (thread % RING_LANES + column), ROW_CHUNKS);
}

/* Starts copying the thread's pieces of the next tile of K or V. What does not exist becomes zeros. */
DEV void load_rows(uint32_t tile, const key_ring &ring, const char *base, const fwd_strides &strides, int chunks)
{
    const int lane = ring.thread % RING_LANES;
    const uint32_t at = tile + chunk_offset(ring.thread / RING_LANES, lane, ROW_CHUNKS);
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        const int page = ring.next_pages[i], exists = is_page(ring.pages, page);
        const int64_t elems = page * strides.batch + place_of(ring, thread_key(ring, i)).in_page * strides.row;
        if (ring.is_narrow) {
            const char *from = base + elems + lane * CHUNK_BYTES;
#pragma unroll
            for (int c = 0; c < ROW_CHUNKS / 2; c += RING_LANES)
                if (lane + c < ROW_CHUNKS / 2)
                    copy_chunk_async(narrow_chunk(tile, ring.thread, i, c), from + c * CHUNK_BYTES,
                                     exists && lane + c < chunks);
        } else {
            const char *from = base + elems * ELEM_BYTES + lane * CHUNK_BYTES;
#pragma unroll
            for (int c = 0; c < ROW_CHUNKS; c += RING_LANES)
                copy_chunk_async(at + (i * ROWS_AT_ONCE * ROW_CHUNKS + c) * CHUNK_BYTES, from + c * CHUNK_BYTES,
                                 exists && lane + c < chunks);
        }
    }
}

DEV uint32_t stage_address(const key_ring &ring, int stage)
{
    return ring.stages + stage * (uint32_t)sizeof(kv_stage);
}

/* Starts loading the next tile into a stage: two groups of copies, K and V, empty beyond the last tile. */
DEV void load_next(key_ring &ring, int stage)
{
    const uint32_t to = stage_address(ring, stage);
    if (ring.next < ring.end)
        load_rows(to, ring, ring.k, ring.k_stride, ring.k_chunks);
    copies_commit();
    if (ring.next < ring.end)
        load_rows(to + offsetof(kv_stage, v), ring, ring.v, ring.v_stride, ring.v_chunks);
    copies_commit();
    ring.next += STEP_KEYS;
    find_next_pages(ring);
}

/* One e4m3, in the lowest byte. */
DEV float float_of_e4m3(uint32_t x)
{
    const uint32_t magnitude = x & 0x7f, bits = magnitude == 0x7f ? 0x7fc00000u : magnitude << 20;
    const float scaled = __uint_as_float(bits) * 0x1p120f; /* the exponents' biases are 7 and 127 */
    return x & 0x80 ? -scaled : scaled;
}

/* Four e4m3 as Q's type, which holds all of them, the lowest byte first. */
DEV uint2 widen_four(uint32_t x)
{
#if __CUDA_ARCH__ >= 890
    return widen_e4m3<BF16>(x);
#else
    return {pack<BF16>(float_of_e4m3(x), float_of_e4m3(x >> 8)),
            pack<BF16>(float_of_e4m3(x >> 16), float_of_e4m3(x >> 24))};
#endif
}

/* Makes Q's type of a tile of K or V, whose copies have landed for this thread; all threads of the group do so before
 * anyone reads it. */
DEV void widen_tile(const key_ring &ring, uint32_t tile)
{
    if (!ring.is_narrow)
        return;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++)
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS / 2; c += RING_LANES)
            if (ring.thread % RING_LANES + c < ROW_CHUNKS / 2) {
                const uint32_t at = narrow_chunk(tile, ring.thread, i, c);
                const uint4 x = load_shared_4(at);
                const uint2 w[4] = {widen_four(x.x), widen_four(x.y), widen_four(x.z), widen_four(x.w)};
                store_shared_4(at, w[0].x, w[0].y, w[1].x, w[1].y);
                /* the neighbour: its number differs in the lowest bit, and so does its place in the swizzle */
                store_shared_4(at ^ CHUNK_BYTES, w[2].x, w[2].y, w[3].x, w[3].y);
            }
}

#endif
