/* fwd_short with e4m3 inputs: V becomes fp16, which holds all of e4m3, where it lies in shared memory, by the warps of
 * the producer's warpgroup that load nothing. Eight rows, the swizzle's period, are one warp's: it has read all of them
 * before it writes where they were. A lane has 16 dims of a row in each panel; eight lanes side by side are in eight
 * rows, so in different banks, when they read and when they write. */
#ifndef ACR_CUDA_FWD_SHORT_UPCAST_CUH
#define ACR_CUDA_FWD_SHORT_UPCAST_CUH

#include "cuda/device/isa/fragment.cuh"
#include "cuda/device/isa/shared.cuh"
#include "cuda/kernels/fwd_short/loading.cuh"

enum {
    GROUP_ROWS = 8,           /* the swizzle's period */
    ROWS_AT_ONCE = 6 / PANELS /* groups of rows that a lane has in registers */
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

/* Eight e4m3 as fp16. */
DEV void write_upcast(uint32_t to, uint32_t low, uint32_t high)
{
    const uint2 l = upcast_e4m3(low), h = upcast_e4m3(high);
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

/* The warp's next rows of a stage, from group `first` of eight on; what is not `present` may hold NaN, which a
 * probability of 0 does not silence, and becomes 0. */
DEV void upcast_rows(uint32_t from, uint32_t to, int first, int present, int lane)
{
    const int row = lane % GROUP_ROWS;
    uint4 x[ROWS_AT_ONCE][PANELS];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const int group = first + UPCAST_WARPS * i;
        if (group < KV_TILE / GROUP_ROWS)
            read_rows(x[i], from + group * GROUP_ROWS * PANEL_ROW_BYTES, row, lane);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const int group = first + UPCAST_WARPS * i;
        if (group * GROUP_ROWS + row >= present)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++)
                x[i][panel] = {0, 0, 0, 0};
        if (group < KV_TILE / GROUP_ROWS)
            write_rows(x[i], to + group * GROUP_ROWS * PANEL_ROW_BYTES, row, lane);
    }
}

DEV void upcast_stage(uint32_t smem, int step, int present)
{
    const int warp = threadIdx.x / WARP_THREADS - (THREADS / WARP_THREADS - UPCAST_WARPS);
    const int lane = threadIdx.x % WARP_THREADS;
    wait_loaded_values(smem, step);
#pragma unroll
    for (int first = 0; first < KV_TILE / GROUP_ROWS; first += UPCAST_WARPS * ROWS_AT_ONCE)
        upcast_rows(v_load_at(smem, step), stage_of(ADDRESS(smem, v), step, V_STAGE_BYTES), first + warp, present,
                    lane);
    shared_stores_visible();
    __syncwarp();
    if (lane == 0)
        barrier_arrive(barrier_of(ADDRESS(smem, v_upcast), step));
}

DEV void upcast_all(uint32_t smem, int stages, int kv_len)
{
    int step = 0;
    do
        for (int stage = 0; stage < stages; stage++)
            upcast_stage(smem, step++, kv_len - stage * KV_TILE);
    while (RING && step == stages && wait_verdict(smem));
}

#endif
