/* fwd_short with e4m3 inputs: V becomes fp16, which holds all of e4m3, by the warps of the producer's warpgroup that
 * load nothing. */
#ifndef ACR_CUDA_FWD_SHORT_UPCAST_CUH
#define ACR_CUDA_FWD_SHORT_UPCAST_CUH

#include "cuda/kernels/fwd_short/loading.cuh"

enum {
    UPCAST_VECTORS = 6, /* widen_rows.cuh */
    UPCAST_UNROLLED = KV_TILE / 8
};

#include "cuda/device/attention/widen_rows.cuh"

DEV void upcast_stage(uint32_t smem, int step, int present)
{
    const int warp = threadIdx.x / WARP_THREADS - (THREADS / WARP_THREADS - UPCAST_WARPS);
    wait_loaded_values(smem, step);
    upcast_tile(v_load_at(smem, step), stage_of(ADDRESS(smem, v), step, V_STAGE_BYTES),
                barrier_of(ADDRESS(smem, v_upcast), step), present, warp, threadIdx.x % WARP_THREADS);
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
