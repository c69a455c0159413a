/* Stored elements of any type, one at a time, as floats.
 *
 * Without CUDA's headers of these types, which took long to compile beside a kernel. The instructions are
 * written as there, braces included: the PTX is part of portable images, and wisdom goes by the digests of images. */
#ifndef ACR_DEVICE_ISA_ELEMENT_CUH
#define ACR_DEVICE_ISA_ELEMENT_CUH

#include "cuda/device/isa/common.cuh"

enum {
    ACR_F32 = 1,
    ACR_F16 = 2,
    ACR_BF16 = 3,
    ACR_E4M3 = 4
}; /* as in acromion.h, which device code does not include */

/* Types of their own, so that the compiler does not take loads of the one and of the other for the same. */
typedef struct f16_element {
    uint16_t bits;
} f16_element;
typedef struct bf16_element {
    uint16_t bits;
} bf16_element;

DEV float f16_to_float(uint16_t bits)
{
    float value;
    asm("{  cvt.f32.f16 %0, %1;}\n" : "=f"(value) : "h"(bits));
    return value;
}

DEV float bf16_to_float(uint16_t bits)
{
    float value;
#if __CUDA_ARCH__ >= 900
    asm("{ cvt.f32.bf16 %0, %1;}\n" : "=f"(value) : "h"(bits));
#else
    asm("{ mov.b32 %0, {0,%1};}\n" : "=f"(value) : "h"(bits));
#endif
    return value;
}

DEV float e4m3_to_float(uint8_t bits)
{
#if __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("{cvt.rn.f16x2.e4m3x2 %0, %1;}\n" : "=r"(pair) : "h"((uint16_t)bits));
    return f16_to_float((uint16_t)pair);
#else
    /* Exponent and mantissa at their places in fp16, whose bias is 8 more: the number is 2^8 too small,
     * subnormal or not. */
    const uint32_t magnitude = bits & 0x7f;
    const float value = f16_to_float((uint16_t)((bits & 0x80) << 8 | magnitude << 7)) * 256.0f;
    return magnitude == 0x7f ? __int_as_float(0x7fffffff) : value;
#endif
}

template <int TYPE> DEV float load_element(const void *base, int64_t index)
{
    if constexpr (TYPE == ACR_F32)
        return ((const float *)base)[index];
    else if constexpr (TYPE == ACR_F16)
        return f16_to_float(((const f16_element *)base)[index].bits);
    else if constexpr (TYPE == ACR_BF16)
        return bf16_to_float(((const bf16_element *)base)[index].bits);
    else
        return e4m3_to_float(((const uint8_t *)base)[index]);
}

/* Rounds to nearest even; out of fp16's range becomes infinity. */
template <int TYPE> DEV void store_element(void *base, int64_t index, float value)
{
    if constexpr (TYPE == ACR_F32)
        ((float *)base)[index] = value;
    else {
        uint16_t bits;
        if constexpr (TYPE == ACR_F16)
            asm("{  cvt.rn.f16.f32 %0, %1;}\n" : "=h"(bits) : "f"(value));
        else
            asm("{  cvt.rn.bf16.f32 %0, %1;}\n" : "=h"(bits) : "f"(value));
        if constexpr (TYPE == ACR_F16)
            ((f16_element *)base)[index].bits = bits;
        else
            ((bf16_element *)base)[index].bits = bits;
    }
}

#endif
