/* Warpgroup products of two matrices in shared memory that are both summed over their rows: D[64 x 64] += transpose(A)
 * * B with A [16 x 64] and B [16 x 64] as rows of 128 bytes (wgmma.cuh says the rest). */
#ifndef ACR_DEVICE_ISA_WGMMA_MN_CUH
#define ACR_DEVICE_ISA_WGMMA_MN_CUH

#include "cuda/device/isa/wgmma.cuh"

/* accumulate 0: D = transpose(A) * B. */
DEV void wgmma_ss_mn(float (&d)[32], uint64_t a, uint64_t b, int accumulate)
{
    /* clang-format off */
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; " WGMMA_TEXT(64) ", %32, %33, p, 1, 1, 1, 1; }"
                 : WGMMA_IO_N64 : "l"(a), "l"(b), "r"(accumulate));
    /* clang-format on */
}

/* Products of 32 columns: half of the first 64 accumulators of wgmma.cuh. */
#define WGMMA_D_N32 WGMMA_D0 ", " WGMMA_D1
#define WGMMA_IO_N32 WGMMA_IO(0), WGMMA_IO(1)
WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21)

#endif
