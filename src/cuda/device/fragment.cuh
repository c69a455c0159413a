/* Accumulators on their way to 16 bits, in the layout that mma.cuh and wgmma.cuh share: packed in pairs, and transposed
 * within a quad, so that a lane has 16 bytes of a row. */
#ifndef ACR_DEVICE_FRAGMENT_CUH
#define ACR_DEVICE_FRAGMENT_CUH

#include "common.cuh"

/* Two floats rounded to nearest even into one register, `low` in the lower half. What fp16 cannot hold is infinity. */
template <int IS_BF16> DEV uint32_t pack(float low, float high)
{
    uint32_t packed;
    if constexpr (IS_BF16) /* the instruction's first source is the upper half */
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/* Transposes a 4x4 matrix of words held by the four lanes of a quad: w[i] of lane q becomes w[q] of lane i. */
DEV void transpose_quad(uint32_t (&w)[4])
{
    const int odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) { /* within each 2x2 block, over its diagonal */
        const uint32_t received = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
        w[i] = odd ? received : w[i];
        w[i + 1] = odd ? w[i + 1] : received;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) { /* the two off-diagonal blocks */
        const uint32_t received = __shfl_xor_sync(~0u, upper ? w[i] : w[i + 2], 2);
        w[i] = upper ? received : w[i];
        w[i + 2] = upper ? w[i + 2] : received;
    }
}

#endif
