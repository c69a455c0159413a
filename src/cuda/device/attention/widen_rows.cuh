/* A tile of e4m3 in shared memory becomes one of 16 bits, by several warps, where it lies or elsewhere: rows of 128
 * bytes, as the copy engine has swizzled them, become PANELS panels of such rows, of which the first may take their
 * place. Eight rows, the swizzle's period, are one warp's: it has read all of them before it writes where they were. A
 * lane has 16 dims of a row in each panel; eight lanes side by side are in eight rows, so in different banks, when they
 * read and when they write.
 *
 * An includer defines KV_TILE, the tile's rows; PANELS, and KV_PANEL_BYTES of each; PANEL_ROW_BYTES, 128; BF16;
 * UPCAST_WARPS, which share the tile; UPCAST_VECTORS, of 16 bytes, that a lane has in registers at once; and
 * UPCAST_UNROLLED, by how much the loop over such is unrolled. */
#ifndef ACR_DEVICE_ATTENTION_WIDEN_ROWS_CUH
#define ACR_DEVICE_ATTENTION_WIDEN_ROWS_CUH

#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/isa/shared.cuh"
#include "cuda/device/isa/widen.cuh"

enum {
    SWIZZLE_ROWS = 8,                              /* the swizzle's period */
    PERIODS = KV_TILE / SWIZZLE_ROWS,              /* of a tile */
    PERIODS_AT_ONCE = UPCAST_VECTORS / PANELS,     /* that a lane has in registers */
    WARPS_AT_ONCE = UPCAST_WARPS * PERIODS_AT_ONCE /* periods that all warps have */
};

/* The address of 16 bytes, number `piece`, in one of eight swizzled rows. */
DEV uint32_t piece_in(uint32_t rows_at, int row, int piece)
{
    return rows_at + row * PANEL_ROW_BYTES + ((piece ^ row) << 4);
}

DEV void read_rows(uint4 (&x)[PANELS], uint32_t rows_at, int row, int lane)
{
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        x[panel] = load_shared_4(piece_in(rows_at, row, 4 * panel + lane / 8));
}

/* Eight e4m3. */
DEV void write_upcast(uint32_t to, uint32_t low, uint32_t high)
{
    const uint2 l = widen_e4m3<BF16>(low), h = widen_e4m3<BF16>(high);
    store_shared_4(to, l.x, l.y, h.x, h.y);
}

DEV void write_rows(const uint4 (&x)[PANELS], uint32_t rows_at, int row, int lane)
{
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        const uint32_t panel_at = rows_at + panel * KV_PANEL_BYTES;
        write_upcast(piece_in(panel_at, row, lane / 8 * 2), x[panel].x, x[panel].y);
        write_upcast(piece_in(panel_at, row, lane / 8 * 2 + 1), x[panel].z, x[panel].w);
    }
}

/* The warp's next rows of a stage, from period `first` on; what is not `present` may hold NaN, which a probability of 0
 * does not silence, and becomes 0. */
DEV void upcast_rows(uint32_t from, uint32_t to, int first, int present, int lane)
{
    const int row = lane % SWIZZLE_ROWS;
    uint4 x[PERIODS_AT_ONCE][PANELS];
#pragma unroll
    for (int i = 0; i < PERIODS_AT_ONCE; i++) {
        const int period = first + UPCAST_WARPS * i;
        if (period < PERIODS)
            read_rows(x[i], from + period * SWIZZLE_ROWS * PANEL_ROW_BYTES, row, lane);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PERIODS_AT_ONCE; i++) {
        const int period = first + UPCAST_WARPS * i;
        if (period * SWIZZLE_ROWS + row >= present)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++)
                x[i][panel] = {0, 0, 0, 0};
        if (period < PERIODS)
            write_rows(x[i], to + period * SWIZZLE_ROWS * PANEL_ROW_BYTES, row, lane);
    }
}

/* A warp's part of a tile; warp: 0 to UPCAST_WARPS - 1. Whose wgmma waits for its arrival at `done` sees it. */
DEV void upcast_tile(uint32_t from, uint32_t to, uint32_t done, int present, int warp, int lane)
{
#pragma unroll UPCAST_UNROLLED
    for (int first = 0; first < PERIODS; first += WARPS_AT_ONCE)
        upcast_rows(from, to, first + warp, present, lane);
    shared_stores_visible();
    __syncwarp();
    if (lane == 0)
        barrier_arrive(done);
}

#endif
