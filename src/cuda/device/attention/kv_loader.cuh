/* Brings tiles of keys, of values and of queries to shared memory. A source says where in global memory a key is: in a
 * dense tensor or in a packed batch it is a row of the tensor. Two mechanisms: boxes of tensor maps (TMA), asked for by
 * one thread, and copies of 16 bytes (cp.async) by many threads. A source of another kind changes key_source,
 * load_key_boxes and key_matrix, and no family. */
#ifndef ACR_DEVICE_ATTENTION_KV_LOADER_CUH
#define ACR_DEVICE_ATTENTION_KV_LOADER_CUH

#include "cuda/device/attention/visible.cuh"
#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/isa/copy.cuh"
#include "cuda/device/isa/tma.cuh"

/* The keys of one head of a batch entry: key j is row row_first + j. */
typedef struct key_source {
    int head, batch; /* batch: in the tensors, 0 of a packed queue */
    int row_first;
} key_source;

DEV key_source key_source_of(const sequence &rows, int batch, int kv_head)
{
    return {kv_head, batch, rows.kv_begin};
}

/* ---- Boxes of tensor maps ---- */

/* A tile in shared memory: panels of rows of BOX_ROW_BYTES each, a box a panel. */
typedef struct tile_panels {
    int count, bytes, elems; /* bytes: of a panel; elems: of a row of it */
} tile_panels;

/* Loads a tile's rows from `row` on, by one thread; `full` is credited with all of the tile's bytes. */
DEV void load_boxes(uint32_t to, const fwd_map *map, uint32_t full, const tile_panels &p, int row, int head, int batch)
{
    barrier_arrive_expecting(full, p.count * p.bytes);
    for (int panel = 0; panel < p.count; panel++)
        load_box(to + panel * p.bytes, map, full, p.elems * panel, row, head, batch);
}

/* The same of the tile of keys, or of values, that begins with `key`. */
DEV void load_key_boxes(uint32_t to, const fwd_map *map, uint32_t full, const tile_panels &p, const key_source &s,
                        int key)
{
    load_boxes(to, map, full, p, s.row_first + key, s.head, s.batch);
}

/* ---- Copies of 16 bytes ---- */

/* A matrix in global memory, of any elements: rows of `chunks` chunks. */
typedef struct chunk_matrix {
    const char *base;
    int64_t row_bytes;
    int chunks;
} chunk_matrix;

/* Starts copying rows [first, first + ROWS) of a matrix into a swizzled tile of ROW_CHUNKS chunks a row, by the threads
 * 0..THREADS-1. What lies at or beyond row `end` or beyond the matrix's chunks becomes zeros, whatever memory holds
 * there. READ_ONCE: nobody else reads these rows. Where a thread keeps its place within the swizzle's period of 8 rows,
 * its addresses differ by constants. */
template <int ROWS, int ROW_CHUNKS, int THREADS, bool READ_ONCE = false>
DEV void load_tile(uint32_t tile, const chunk_matrix &m, int first, int end, int thread)
{
    constexpr int LANES = ROW_CHUNKS % 8 == 0 ? 8 : 4; /* threads side by side in a row */
    constexpr int ROWS_AT_ONCE = THREADS / LANES;
    constexpr bool KEEPS_PLACE = ROWS_AT_ONCE % 8 == 0;
    static_assert(ROWS % ROWS_AT_ONCE == 0, "the tile's rows divide evenly over the threads");
    const int row = thread / LANES, chunk = thread % LANES;
    const char *from = m.base + (first + row) * m.row_bytes + chunk * CHUNK_BYTES;
    const uint64_t policy = READ_ONCE ? policy_read_once() : 0;
    const uint32_t at = tile + chunk_offset(row, chunk, ROW_CHUNKS);
#pragma unroll
    for (int r = 0; r < ROWS; r += ROWS_AT_ONCE) {
        const bool row_valid = first + row + r < end;
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c += LANES) {
            const uint32_t to = KEEPS_PLACE ? at + (r * ROW_CHUNKS + c) * CHUNK_BYTES
                                            : tile + chunk_offset(row + r, chunk + c, ROW_CHUNKS);
            const bool valid = row_valid && chunk + c < m.chunks;
            if (READ_ONCE)
                copy_chunk_async_by(to, from + c * CHUNK_BYTES, valid, policy);
            else
                copy_chunk_async(to, from + c * CHUNK_BYTES, valid);
        }
        from += ROWS_AT_ONCE * m.row_bytes;
    }
}

/* A matrix of one head of a batch entry, its rows from `row` on. elem_bytes: of an element. */
DEV chunk_matrix head_matrix_of(const void *tensor, const fwd_strides &strides, int batch, int head, int row, int dim,
                                int elem_bytes)
{
    return {(const char *)tensor + (batch * strides.batch + head * strides.head + row * strides.row) * elem_bytes,
            strides.row * elem_bytes, dim / (CHUNK_BYTES / elem_bytes)};
}

/* K or V of a source: row j is key j. */
DEV chunk_matrix key_matrix(const void *tensor, const fwd_strides &strides, const key_source &s, int dim,
                            int elem_bytes)
{
    return head_matrix_of(tensor, strides, s.batch, s.head, s.row_first, dim, elem_bytes);
}

#endif
