/* Global memory by pointer, where the compiler's own loads and stores will not do. */
#ifndef ACR_DEVICE_ISA_GLOBAL_CUH
#define ACR_DEVICE_ISA_GLOBAL_CUH

#include "cuda/device/isa/common.cuh"

/* Stores 16 bytes at a multiple of 16, in this place among the other volatile instructions. */
DEV void store_global_4(void *to, uint4 x)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

#endif
