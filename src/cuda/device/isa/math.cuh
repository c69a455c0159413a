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
