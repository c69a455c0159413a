/* Warpgroup products whose A is in registers and whose B, in shared memory, is K-major: D[64 x 64] += A[64 x 16] *
 * transpose(B) with B [64 x 16] as parts of rows of 128 bytes (wgmma.cuh says the rest). */
#ifndef ACR_DEVICE_ISA_WGMMA_RS_CUH
#define ACR_DEVICE_ISA_WGMMA_RS_CUH

#include "cuda/device/isa/wgmma.cuh"

/* accumulate 0: D = A * transpose(B). */
DEV void wgmma_rs(float (&d)[32], const uint32_t *a, uint64_t b, int accumulate)
{
    /* clang-format off */
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; "
                 WGMMA_TEXT(64) ", {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : WGMMA_IO_N64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    /* clang-format on */
}

#endif
