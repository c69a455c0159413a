/* Short runs of stored elements, as floats: VEC of them at 16 bytes of the type that is read, or one. An includer that
 * is asked for e4m3 defines QUANTISES=1: from sm_89 on one instruction rounds two of them as op_e4m3 does. */
#ifndef ACR_CUDA_OPS_VECTOR_CUH
#define ACR_CUDA_OPS_VECTOR_CUH

#include "cuda/device/isa/element.cuh"
#if QUANTISES
#include "cuda/device/isa/fragment.cuh"
#endif
#include "op_math.h"

template <int TYPE> DEV constexpr int wide_elements(void)
{
    return TYPE == ACR_F32 ? 4 : 8;
}

/* A run as it is stored, of one element the first bytes: a load is waited for where its values are wanted. */
template <int VEC> struct run_bits {
    uint4 bits;
};

/* `first` is a multiple of VEC. */
template <int TYPE, int VEC> DEV void load_bits(run_bits<VEC> &to, const void *base, int64_t first)
{
    if constexpr (VEC > 1)
        to.bits = *(const uint4 *)((const char *)base + first * (16 / VEC));
    else if constexpr (TYPE == ACR_F32)
        to.bits.x = ((const uint32_t *)base)[first];
    else
        to.bits.x = ((const uint16_t *)base)[first];
}

template <int TYPE, int VEC> DEV void store_bits(void *base, int64_t first, const run_bits<VEC> &from)
{
    if constexpr (VEC > 1)
        *(uint4 *)((char *)base + first * (16 / VEC)) = from.bits;
    else if constexpr (TYPE == ACR_F32)
        ((uint32_t *)base)[first] = from.bits.x;
    else
        ((uint16_t *)base)[first] = (uint16_t)from.bits.x;
}

template <int TYPE, int VEC> DEV void run_values(float (&to)[VEC], const run_bits<VEC> &from)
{
#pragma unroll
    for (int i = 0; i < VEC; i++)
        to[i] = load_element<TYPE>(&from.bits, i);
}

template <int BYTES> DEV void store_bytes(void *to, const uint32_t *bits)
{
    if constexpr (BYTES == 4)
        *(uint32_t *)to = bits[0];
    else if constexpr (BYTES == 8)
        *(uint2 *)to = make_uint2(bits[0], bits[1]);
    else
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++)
            ((uint4 *)to)[i] = make_uint4(bits[4 * i], bits[4 * i + 1], bits[4 * i + 2], bits[4 * i + 3]);
}

/* The lowest byte first. */
DEV uint32_t four_e4m3(const float *from)
{
#if QUANTISES && __CUDA_ARCH__ >= 890
    return pack_e4m3(from[0], from[1], from[2], from[3]);
#else
    return op_e4m3(from[0]) | op_e4m3(from[1]) << 8 | op_e4m3(from[2]) << 16 | op_e4m3(from[3]) << 24;
#endif
}

template <int TYPE, int VEC> DEV void store_typed(void *base, int64_t first, const float (&from)[VEC])
{
    constexpr int bytes = TYPE == ACR_F32 ? 4 : TYPE == ACR_E4M3 ? 1 : 2;
    if constexpr (VEC == 1 && TYPE == ACR_E4M3) {
        ((uint8_t *)base)[first] = (uint8_t)op_e4m3(from[0]);
    } else if constexpr (VEC == 1) {
        store_element<TYPE>(base, first, from[0]);
    } else {
        uint32_t bits[VEC * bytes / 4];
        if constexpr (TYPE == ACR_E4M3) {
#pragma unroll
            for (int i = 0; i < VEC / 4; i++)
                bits[i] = four_e4m3(from + 4 * i);
        } else {
#pragma unroll
            for (int i = 0; i < VEC; i++)
                store_element<TYPE>(bits, i, from[i]);
        }
        store_bytes<VEC * bytes>((char *)base + first * bytes, bits);
    }
}

/* type: the number of an acr_dtype, the same for all threads. */
template <int VEC> DEV void store_run(int type, void *base, int64_t first, const float (&from)[VEC])
{
    if (type == ACR_F32)
        store_typed<ACR_F32>(base, first, from);
    else if (type == ACR_F16)
        store_typed<ACR_F16>(base, first, from);
    else if (type == ACR_BF16)
        store_typed<ACR_BF16>(base, first, from);
    else
        store_typed<ACR_E4M3>(base, first, from);
}

#endif
