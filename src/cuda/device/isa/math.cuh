/* Approximate functions of the special function unit. */
#ifndef ACR_DEVICE_ISA_MATH_CUH
#define ACR_DEVICE_ISA_MATH_CUH

#include "cuda/device/isa/common.cuh"

/* 2^x: relative error 2^-22, 0 below 2^-126. */
DEV float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The same on the multiply-add lanes: relative error 2^-13.7, 0 below 2^-126.5, up to 2^127.5; NaN stays NaN. The
 * nearest integer becomes the exponent, a polynomial of least relative error (by Remez' algorithm) gives the rest. */
DEV float exp2_by_polynomial(float x)
{
    const float to_integer = 12582912.0f + 127.0f; /* 1.5 * 2^23: a sum's last bits are the exponent, with its bias */
    float clamped;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(clamped) : "f"(x), "f"(-127.0f));
    const float sum = clamped + to_integer, rest = clamped - (sum - to_integer);
    const float power = fmaf(fmaf(fmaf(0.0551716691f, rest, 0.242611122f), rest, 0.693260985f), rest, 0.999928074f);
    return power * __uint_as_float(__float_as_uint(sum) << 23);
}

/* Relative error 2^-11. */
DEV float tanh_fast(float x)
{
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1/x to 1 ulp; denormal numbers count as 0. */
DEV float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
