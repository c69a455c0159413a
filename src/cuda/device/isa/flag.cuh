/* Words of global memory by which one CTA tells another that its results are there. */
#ifndef ACR_DEVICE_ISA_FLAG_CUH
#define ACR_DEVICE_ISA_FLAG_CUH

#include "cuda/device/isa/common.cuh"

/* What another CTA had written before it stored this value with store_flag is visible from here on. */
DEV int load_flag(const int32_t *from)
{
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

DEV void store_flag(int32_t *to, int value)
{
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

#endif
