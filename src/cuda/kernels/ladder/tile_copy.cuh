/* The tile of keys or values of rungs 1 and 2, and how it is copied: 16 bytes a thread, plain rows, marked to stay in
 * L2. Rungs 3 and up: warp_attention.cuh. */
#ifndef ACR_LADDER_TILE_COPY_CUH
#define ACR_LADDER_TILE_COPY_CUH

#include <cuda_fp16.h>

#include "cuda/device/isa/common.cuh"

enum {
    CHUNK = 8, /* elements in 16 bytes */
    ROW_CHUNKS = DIM / CHUNK
};

typedef __half tile[KV_TILE][DIM];

/* Starts copying rows [first, first + KV_TILE); those from end on become zeros, whatever memory holds. */
DEV void copy_rows(tile &to, const __half *from, int64_t row_stride, int first, int end)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#pragma unroll
    for (int i = threadIdx.x; i < KV_TILE * ROW_CHUNKS; i += THREADS) {
        const int row = i / ROW_CHUNKS, column = i % ROW_CHUNKS * CHUNK;
        asm volatile(
            "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(smem_address(&to[row][column])),
            "l"(from + (first + row) * row_stride + column), "r"(first + row < end ? 16 : 0), "l"(policy)
            : "memory");
    }
}

#endif
