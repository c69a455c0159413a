/* Warp matrix products: mma.sync, on 16-bit floats m16n8k16 (sm_80), on e4m3 m16n8k32 (sm_89).
 *
 * Lane l of a warp holds, of a 16x8 accumulator, row l/4 and columns 2(l%4), 2(l%4)+1 in c[0], c[1], and the same
 * columns of row l/4+8 in c[2], c[3]. Two neighbouring accumulators, packed to 16 bits, are the A operand of the next
 * product: no data moves between lanes.
 *
 * To ldmatrix a pair of e4m3 is an element of 16 bits, and m16n8k32 takes its operands as m16n8k16 would take those
 * pairs: a row of A or a column of B is 32 bytes in either case, and the same lanes hold the same bytes of it. */
#ifndef ACR_DEVICE_ISA_MMA_CUH
#define ACR_DEVICE_ISA_MMA_CUH

#include "cuda/device/isa/common.cuh"
#include "cuda/device/isa/fragment.cuh"
#include "cuda/device/isa/shared.cuh"

/* What A and B hold: of multiply_add's template argument. */
enum {
    MMA_F16 = 0,
    MMA_BF16 = 1,
    MMA_E4M3 = 2 /* sm_89 and newer */
};

/* c += a * b for an A of 16 rows and a B of 8 columns of 32 bytes. */
template <int KIND> DEV void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (KIND == MMA_E4M3)
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else if constexpr (KIND == MMA_BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
