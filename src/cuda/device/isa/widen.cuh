/* e4m3 on its way to 16 bits, which hold all of it. */
#ifndef ACR_DEVICE_ISA_WIDEN_CUH
#define ACR_DEVICE_ISA_WIDEN_CUH

#include <cuda_fp16.h>

#include "cuda/device/isa/fragment.cuh"

/* Four e4m3 as bf16, or as fp16, the lowest byte first. sm_89 and newer. */
template <int IS_BF16> DEV uint2 widen_e4m3(uint32_t x)
{
    const uint2 halves = upcast_e4m3(x);
    if constexpr (IS_BF16) {
        const float2 low = __half22float2(*(const __half2 *)&halves.x),
                     high = __half22float2(*(const __half2 *)&halves.y);
        return {pack<1>(low.x, low.y), pack<1>(high.x, high.y)};
    } else
        return halves;
}

#endif
