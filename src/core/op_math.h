/* Arithmetic of the operations beside attention, for host and device: float32, every result rounded once, so that a CPU
 * and a GPU agree to the bit (NaNs apart, whose bits nobody promises). A product is never contracted with a sum: the
 * device's functions say so, the host's files are compiled with -ffp-contract=off. */
#ifndef ACR_OP_MATH_H
#define ACR_OP_MATH_H

#include <stdint.h>

#ifdef __CUDACC__
#define OP_FUNCTION static __device__ __forceinline__
#else
#include <string.h>
#define OP_FUNCTION static inline
#endif

OP_FUNCTION float op_add(float a, float b)
{
#ifdef __CUDACC__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

OP_FUNCTION float op_mul(float a, float b)
{
#ifdef __CUDACC__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

OP_FUNCTION float op_div(float a, float b)
{
#ifdef __CUDACC__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

OP_FUNCTION uint32_t op_bits(float x)
{
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

OP_FUNCTION float op_float(uint32_t bits)
{
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

#define OP_NAN op_float(0x7fffffffu)
#define OP_INFINITY op_float(0x7f800000u)

/* ln 2 in two parts: the first has 9 bits, so that products with whole numbers up to 2^15 are exact. */
#define OP_LN2_HIGH 0.693359375f
#define OP_LN2_LOW (-2.12194440e-4f)

/* e^x for x <= 0, to a few units of the last place; 0 where that is no normal number. NaN stays NaN. What is selected
 * at the end, not branched to, lets a GPU take several at once. */
OP_FUNCTION float op_exp(float x)
{
    const float whole = 12582912.0f; /* 1.5 * 2^23: a sum with it has no fraction */
    const float shifted = op_add(op_mul(x, 1.44269504f), whole), n = op_add(shifted, -whole);
    const float r = op_add(op_add(x, op_mul(n, -OP_LN2_HIGH)), op_mul(n, -OP_LN2_LOW)); /* |r| <= 0.35 */
    float p = 1.0f / 5040.0f;
    p = op_add(op_mul(p, r), 1.0f / 720.0f);
    p = op_add(op_mul(p, r), 1.0f / 120.0f);
    p = op_add(op_mul(p, r), 1.0f / 24.0f);
    p = op_add(op_mul(p, r), 1.0f / 6.0f);
    p = op_add(op_mul(p, r), 0.5f);
    p = op_add(op_mul(p, op_mul(r, r)), r);
    const uint32_t exponent = op_bits(shifted) - op_bits(whole); /* n, modulo 2^32 */
    const float power = op_mul(op_add(p, 1.0f), op_float((exponent + 127u) << 23));
    return x > -87.0f ? power : x == x ? 0.0f : x;
}

/* ln x for finite x >= 1, to a few units of the last place; exactly 0 for 1. NaN stays NaN. */
OP_FUNCTION float op_log(float x)
{
    if (!(x < OP_INFINITY))
        return x;
    const uint32_t above = (op_bits(x) - 0x3f3504f3u) >> 23; /* powers of two from sqrt(1/2) on */
    const float n = (float)above, m = op_float(op_bits(x) - (above << 23));
    /* ln m = 2 atanh(u), |u| <= 0.172 */
    const float u = op_div(op_add(m, -1.0f), op_add(m, 1.0f)), w = op_mul(u, u);
    float p = 2.0f / 9.0f;
    p = op_add(op_mul(p, w), 2.0f / 7.0f);
    p = op_add(op_mul(p, w), 2.0f / 5.0f);
    p = op_add(op_mul(p, w), 2.0f / 3.0f);
    p = op_add(op_mul(p, w), 2.0f);
    return op_add(op_mul(n, OP_LN2_HIGH), op_add(op_mul(p, u), op_mul(n, OP_LN2_LOW)));
}

/* The nearest e4m3, ties to even, beyond 448 that; NaN is 0x7f. */
OP_FUNCTION uint32_t op_e4m3(float x)
{
    const uint32_t bits = op_bits(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    if (magnitude > 0x7f800000u)
        return 0x7fu;
    if (magnitude >= 0x43e00000u) /* 448 */
        return sign | 0x7eu;
    if (magnitude < 0x3c800000u) { /* 2^-6: below, steps are 2^-9, the last bit of a sum with 2^14 */
        const float sum = op_add(op_float(magnitude), 16384.0f);
        return sign | (op_bits(sum) - 0x46800000u);
    }
    return sign | (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
}

/* Division by a number that is known when a call begins, which takes a GPU five instructions instead of twenty. Any
 * divisor from 1 on and any dividend below 2^32 (Granlund and Montgomery, 1994). */
typedef struct op_divisor {
    uint32_t by, factor, first_shift, second_shift;
} op_divisor;

#ifndef __CUDACC__
OP_FUNCTION op_divisor op_divisor_of(uint32_t by)
{
    uint32_t bits = 0;
    while (((uint64_t)1 << bits) < by)
        bits++;
    return (op_divisor){.by = by,
                        .factor = (uint32_t)((((((uint64_t)1 << bits) - by) << 32) / by) + 1),
                        .first_shift = bits > 0,
                        .second_shift = bits > 0 ? bits - 1 : 0};
}
#endif

OP_FUNCTION uint32_t op_divide(op_divisor d, uint32_t x)
{
#ifdef __CUDACC__
    const uint32_t high = __umulhi(d.factor, x);
#else
    const uint32_t high = (uint32_t)((uint64_t)d.factor * x >> 32);
#endif
    return (high + ((x - high) >> d.first_shift)) >> d.second_shift;
}

/* A pair rotated by the angle of this cosine and sine. */
OP_FUNCTION float op_rotated_first(float x, float y, float c, float s)
{
    return op_add(op_mul(x, c), -op_mul(y, s));
}

OP_FUNCTION float op_rotated_second(float x, float y, float c, float s)
{
    return op_add(op_mul(y, c), op_mul(x, s));
}

#endif
