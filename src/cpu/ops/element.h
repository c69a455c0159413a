/* Stored elements of the operations beside attention, as floats and back: short runs that compilers vectorise. A value
 * is rounded to the nearest, ties to even; a NaN becomes one of all ones, as on a GPU. */
#ifndef ACR_CPU_OPS_ELEMENT_H
#define ACR_CPU_OPS_ELEMENT_H

#include "op_math.h"

enum {
    RUN = 128 /* elements at a time: what stays in the first cache, and is worth a loop */
};

static inline float float_of_f16(uint16_t half)
{
    const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t finite = op_bits(op_mul(op_float(magnitude), 0x1p112f)); /* subnormal numbers, too */
    return op_float(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}

static inline uint16_t f16_of_float(float x)
{
    const uint32_t bits = op_bits(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    /* Below 2^-14 steps are 2^-24, the last bit of a sum with 1/2. */
    const uint32_t small = op_bits(op_add(op_float(magnitude < 0x38800000u ? magnitude : 0), 0.5f)) - 0x3f000000u;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t finite = magnitude < 0x38800000u ? small : magnitude < 0x477ff000u ? normal : 0x7c00u;
    return (uint16_t)(magnitude > 0x7f800000u ? 0x7fffu : sign | finite);
}

static inline float float_of_bf16(uint16_t half)
{
    return op_float((uint32_t)half << 16);
}

static inline uint16_t bf16_of_float(float x)
{
    const uint32_t bits = op_bits(x);
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* dtype: the number of an acr_dtype, f32, f16 or bf16. */
static inline void load_run(float *restrict to, int32_t dtype, const void *from, int64_t first, int64_t count)
{
    const float *floats = (const float *)from + first;
    const uint16_t *halves = (const uint16_t *)from + first;
    if (dtype == 1)
        memcpy(to, floats, (size_t)count * sizeof *to);
    else if (dtype == 2)
        for (int64_t i = 0; i < count; i++)
            to[i] = float_of_f16(halves[i]);
    else
        for (int64_t i = 0; i < count; i++)
            to[i] = float_of_bf16(halves[i]);
}

/* dtype: any of those, or e4m3. */
static inline void store_run(int32_t dtype, void *to, int64_t first, const float *restrict from, int64_t count)
{
    if (dtype == 1)
        memcpy((float *)to + first, from, (size_t)count * sizeof *from);
    else if (dtype == 2)
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)to)[first + i] = f16_of_float(from[i]);
    else if (dtype == 3)
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)to)[first + i] = bf16_of_float(from[i]);
    else
        for (int64_t i = 0; i < count; i++)
            ((uint8_t *)to)[first + i] = (uint8_t)op_e4m3(from[i]);
}

/* Blocks of a call: about so many elements each. */
static inline int64_t blocks_of(int64_t rows, int64_t elements_of_row)
{
    const int64_t elements = 16384, in_block = elements / elements_of_row > 0 ? elements / elements_of_row : 1;
    return (rows - 1) / in_block + 1;
}

#endif
