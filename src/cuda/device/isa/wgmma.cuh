/* Warpgroup matrix products of sm_90a: D[64 x N] += A[64 x 16] * B[16 x N] in float32, 16-bit operands, issued by 128
 * threads together.
 *
 * B is in shared memory, A in shared memory ("ss") or in registers ("rs"), D in registers. Thread t of the warpgroup
 * (warp w = t / 32, lane l) holds D's rows 16w + l/4 + 8h and columns 8c + 2(l%4) + e in d[4c + 2h + e]; A's registers
 * are the same places of a 64 x 16 matrix, packed in pairs, so scores turn into P by packing alone. Operand tiles are
 * 128-byte rows with the 128-byte swizzle of the copy engine, in panels of 64 elements; tiles start at multiples of
 * 1024 bytes.
 *
 * The operands are bf16 where a family is compiled with BF16=1, else fp16. */
#ifndef ACR_DEVICE_ISA_WGMMA_CUH
#define ACR_DEVICE_ISA_WGMMA_CUH

#include "cuda/device/isa/common.cuh"

#if BF16
#define WGMMA_TYPE "bf16"
#else
#define WGMMA_TYPE "f16"
#endif

enum {
    WGMMA_ROWS = 64,
    WGMMA_K = 16,             /* elements that one instruction sums over */
    SWIZZLE_ROWS_BYTES = 1024 /* eight rows of 128 bytes: the swizzle's period */
};

/* A matrix in shared memory as wgmma takes it. K-major (rows of keys or queries, summed over the row): panel_bytes is
 * not used. MN-major (V: summed over the rows): the next 64 columns are panel_bytes further. */
DEV uint64_t matrix_descriptor(uint32_t address, uint32_t panel_bytes)
{
    const uint64_t swizzle_128 = UINT64_C(1) << 62;
    return swizzle_128 | (uint64_t)(SWIZZLE_ROWS_BYTES >> 4) << 32 | (uint64_t)(panel_bytes >> 4) << 16 |
           (uint64_t)((address & 0x3FFFF) >> 4);
}

/* The descriptor of a place so many bytes further. */
DEV uint64_t descriptor_at(uint64_t descriptor, uint32_t bytes)
{
    return descriptor + (bytes >> 4);
}

/* Orders earlier register writes before the next wgmma. */
DEV void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* Closes a group of wgmmas. */
DEV void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most `pending` of the youngest groups still run; until then their registers are off limits. */
#define WGMMA_WAIT(pending) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory")

/* The accumulators' part of an instruction: operand numbers by eights, and the operands themselves. */
/* clang-format off */
#define WGMMA_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_D1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_D3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_D5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_D7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_D9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_D10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_D11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_D13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_D14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_D15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_IO(i) \
    "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), \
    "+f"(d[8 * i + 4]), "+f"(d[8 * i + 5]), "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])
#define WGMMA_D_N64 WGMMA_D0 ", " WGMMA_D1 ", " WGMMA_D2 ", " WGMMA_D3
#define WGMMA_IO_N64 WGMMA_IO(0), WGMMA_IO(1), WGMMA_IO(2), WGMMA_IO(3)
#define WGMMA_D_N72 WGMMA_D_N64 ", %32, %33, %34, %35"
#define WGMMA_IO_N72 WGMMA_IO_N64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_D_N80 WGMMA_D_N64 ", " WGMMA_D4
#define WGMMA_IO_N80 WGMMA_IO_N64, WGMMA_IO(4)
#define WGMMA_D_N96 WGMMA_D_N80 ", " WGMMA_D5
#define WGMMA_IO_N96 WGMMA_IO_N80, WGMMA_IO(5)
#define WGMMA_D_N112 WGMMA_D_N96 ", " WGMMA_D6
#define WGMMA_IO_N112 WGMMA_IO_N96, WGMMA_IO(6)
#define WGMMA_D_N128 WGMMA_D_N112 ", " WGMMA_D7
#define WGMMA_IO_N128 WGMMA_IO_N112, WGMMA_IO(7)
#define WGMMA_D_N144 WGMMA_D_N128 ", " WGMMA_D8
#define WGMMA_IO_N144 WGMMA_IO_N128, WGMMA_IO(8)
#define WGMMA_D_N160 WGMMA_D_N144 ", " WGMMA_D9
#define WGMMA_IO_N160 WGMMA_IO_N144, WGMMA_IO(9)
#define WGMMA_D_N176 WGMMA_D_N160 ", " WGMMA_D10
#define WGMMA_IO_N176 WGMMA_IO_N160, WGMMA_IO(10)
#define WGMMA_D_N192 WGMMA_D_N176 ", " WGMMA_D11
#define WGMMA_IO_N192 WGMMA_IO_N176, WGMMA_IO(11)
#define WGMMA_D_N208 WGMMA_D_N192 ", " WGMMA_D12
#define WGMMA_IO_N208 WGMMA_IO_N192, WGMMA_IO(12)
#define WGMMA_D_N224 WGMMA_D_N208 ", " WGMMA_D13
#define WGMMA_IO_N224 WGMMA_IO_N208, WGMMA_IO(13)
#define WGMMA_D_N240 WGMMA_D_N224 ", " WGMMA_D14
#define WGMMA_IO_N240 WGMMA_IO_N224, WGMMA_IO(14)
#define WGMMA_D_N256 WGMMA_D_N240 ", " WGMMA_D15
#define WGMMA_IO_N256 WGMMA_IO_N240, WGMMA_IO(15)

/* WGMMA_SHAPE(N, i0..i5): the products for one N; i0 = N / 2 and its successors number the operands after the
 * accumulators. accumulate 0: D = A * B.
 *   wgmma_ss       A and B in shared memory, both K-major
 *   wgmma_rs       A in registers, B in shared memory, K-major
 *   wgmma_rs_mn    A in registers, B in shared memory, MN-major */
#define WGMMA_TEXT(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." WGMMA_TYPE "." WGMMA_TYPE " {" WGMMA_D_N##n "}"
#define WGMMA_SHAPE(n, i0, i1, i2, i3, i4, i5)                                                                         \
    DEV void wgmma_ss(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate)                                       \
    {                                                                                                                  \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #i2 ", 0; "                                                    \
                     WGMMA_TEXT(n) ", %" #i0 ", %" #i1 ", p, 1, 1, 0, 0; }"                                            \
                     : WGMMA_IO_N##n : "l"(a), "l"(b), "r"(accumulate));                                               \
    }                                                                                                                  \
    DEV void wgmma_rs(float (&d)[n / 2], const uint32_t *a, uint64_t b, int accumulate)                                \
    {                                                                                                                  \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #i5 ", 0; "                                                    \
                     WGMMA_TEXT(n) ", {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, 0; }"               \
                     : WGMMA_IO_N##n : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));           \
    }                                                                                                                  \
    DEV void wgmma_rs_mn(float (&d)[n / 2], const uint32_t *a, uint64_t b, int accumulate)                             \
    {                                                                                                                  \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #i5 ", 0; "                                                    \
                     WGMMA_TEXT(n) ", {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, 1; }"               \
                     : WGMMA_IO_N##n : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));           \
    }

WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37)
WGMMA_SHAPE(72, 36, 37, 38, 39, 40, 41)
WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45)
WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53)
WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61)
WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69)
WGMMA_SHAPE(144, 72, 73, 74, 75, 76, 77)
WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85)
WGMMA_SHAPE(176, 88, 89, 90, 91, 92, 93)
WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101)
WGMMA_SHAPE(208, 104, 105, 106, 107, 108, 109)
WGMMA_SHAPE(224, 112, 113, 114, 115, 116, 117)
WGMMA_SHAPE(240, 120, 121, 122, 123, 124, 125)
WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133)
/* clang-format on */

#endif
