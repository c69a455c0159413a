/* Online softmax of rows that lie across the four lanes of a quad (the accumulator layout of mma.cuh). */
#ifndef ACR_DEVICE_ATTENTION_SOFTMAX_CUH
#define ACR_DEVICE_ATTENTION_SOFTMAX_CUH

#include <math_constants.h>

#include "cuda/device/isa/common.cuh"

/* 2^x: relative error 2^-22, 0 below 2^-126. */
DEV float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEV float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEV float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* The maximum to subtract: a row without any visible key has -inf; 0 keeps (-inf) - (-inf) from giving NaN, all its
 * exponentials are 0. */
DEV float finite_max(float row_max)
{
    return row_max == -CUDART_INF_F ? 0.0f : row_max;
}

/* By what a row's output is multiplied at the end, to 1 ulp; a row without a key gets output 0. A row's sum is never
 * denormal: its largest exponential is not. */
DEV float inverse_sum(float row_sum)
{
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(row_sum));
    return row_sum == 0.0f ? 0.0f : inverse;
}

/* The natural logarithm of the sum of exp(scale * score), from the score maximum and the sum relative to it. */
DEV float log_sum_exp(float row_max, float row_sum, float scale)
{
    return row_sum == 0.0f ? -CUDART_INF_F : row_max * scale + logf(row_sum);
}

#endif
