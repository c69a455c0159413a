/* Warpgroup matrix products of sm_90a on e4m3 operands: D[64 x N] += A[64 x 32] * B[32 x N] in float32 (of which the
 * tensor cores keep about 14 bits while they add). Both operands are K-major: of a row, 32 consecutive bytes are
 * summed over. Accumulators lie as in wgmma.cuh; a register of A holds 4 bytes: lane l has bytes 4(l%4)..+3 of row l/4
 * (register 0) and l/4 + 8 (1), and the same of bytes 16..31 (2, 3). */
#ifndef ACR_DEVICE_ISA_WGMMA_FP8_CUH
#define ACR_DEVICE_ISA_WGMMA_FP8_CUH

#include "cuda/device/isa/wgmma.cuh"

enum {
    WGMMA_FP8_K = 32
};

/* clang-format off */
#define WGMMA_D_N72 WGMMA_D_N64 ", %32, %33, %34, %35"
#define WGMMA_IO_N72 WGMMA_IO_N64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_D_N136 WGMMA_D_N128 ", %64, %65, %66, %67"
#define WGMMA_IO_N136 WGMMA_IO_N128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WGMMA_D_N200 WGMMA_D_N192 ", %96, %97, %98, %99"
#define WGMMA_IO_N200 WGMMA_IO_N192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])

/* As WGMMA_SHAPE. wgmma_fp8_ss: A and B in shared memory; wgmma_fp8_rs: A in registers. */
#define WGMMA_FP8_TEXT(n) "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" WGMMA_D_N##n "}"
#define WGMMA_FP8_SHAPE(n, i0, i1, i2, i3, i4, i5)                                                                     \
    DEV void wgmma_fp8_ss(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate)                                   \
    {                                                                                                                  \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #i2 ", 0; "                                                    \
                     WGMMA_FP8_TEXT(n) ", %" #i0 ", %" #i1 ", p, 1, 1; }"                                              \
                     : WGMMA_IO_N##n : "l"(a), "l"(b), "r"(accumulate));                                               \
    }                                                                                                                  \
    DEV void wgmma_fp8_rs(float (&d)[n / 2], const uint32_t *a, uint64_t b, int accumulate)                            \
    {                                                                                                                  \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #i5 ", 0; "                                                    \
                     WGMMA_FP8_TEXT(n) ", {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1; }"              \
                     : WGMMA_IO_N##n : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));           \
    }

WGMMA_FP8_SHAPE(64, 32, 33, 34, 35, 36, 37)
WGMMA_FP8_SHAPE(72, 36, 37, 38, 39, 40, 41)
WGMMA_FP8_SHAPE(96, 48, 49, 50, 51, 52, 53)
WGMMA_FP8_SHAPE(128, 64, 65, 66, 67, 68, 69)
WGMMA_FP8_SHAPE(136, 68, 69, 70, 71, 72, 73)
WGMMA_FP8_SHAPE(160, 80, 81, 82, 83, 84, 85)
WGMMA_FP8_SHAPE(192, 96, 97, 98, 99, 100, 101)
WGMMA_FP8_SHAPE(200, 100, 101, 102, 103, 104, 105)
WGMMA_FP8_SHAPE(224, 112, 113, 114, 115, 116, 117)
/* clang-format on */

#endif
