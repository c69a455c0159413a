/* Stored elements of any type, one at a time, as floats. */
#ifndef ACR_DEVICE_ISA_ELEMENT_CUH
#define ACR_DEVICE_ISA_ELEMENT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/device/isa/common.cuh"

enum {
    ACR_F32 = 1,
    ACR_F16 = 2,
    ACR_BF16 = 3,
    ACR_E4M3 = 4
}; /* as in acromion.h, which device code does not include */

template <int TYPE> DEV float load_element(const void *base, int64_t index)
{
    if constexpr (TYPE == ACR_F32)
        return ((const float *)base)[index];
    else if constexpr (TYPE == ACR_F16)
        return __half2float(((const __half *)base)[index]);
    else if constexpr (TYPE == ACR_BF16)
        return __bfloat162float(((const __nv_bfloat16 *)base)[index]);
    else
        return __half2float(__half(__nv_cvt_fp8_to_halfraw(((const __nv_fp8_storage_t *)base)[index], __NV_E4M3)));
}

/* Rounds to nearest even; out of fp16's range becomes infinity. */
template <int TYPE> DEV void store_element(void *base, int64_t index, float value)
{
    if constexpr (TYPE == ACR_F32)
        ((float *)base)[index] = value;
    else if constexpr (TYPE == ACR_F16)
        ((__half *)base)[index] = __float2half_rn(value);
    else
        ((__nv_bfloat16 *)base)[index] = __float2bfloat16_rn(value);
}

#endif
