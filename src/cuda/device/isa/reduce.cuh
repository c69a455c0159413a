/* Additions to global memory from registers, without the sums, sm_90: each float's by itself. */
#ifndef ACR_DEVICE_ISA_REDUCE_CUH
#define ACR_DEVICE_ISA_REDUCE_CUH

#include "cuda/device/isa/common.cuh"

/* Adds to four floats at a multiple of 16 bytes. */
DEV void add_float4(float *to, float x, float y, float z, float w)
{
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}

#endif
