/* Accumulators on their way to 16 and 8 bits, in the layout that mma.cuh and wgmma.cuh share: packed, and exchanged
 * within a quad, so that a lane has 16 bytes of a row. */
#ifndef ACR_DEVICE_ISA_FRAGMENT_CUH
#define ACR_DEVICE_ISA_FRAGMENT_CUH

#include "cuda/device/isa/common.cuh"

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

/* The same where the type of the output is known with the arguments only: of e4m3 inputs. */
DEV uint32_t pack_output(float low, float high, int bf16)
{
    return bf16 ? pack<1>(low, high) : pack<0>(low, high);
}

/* Four floats rounded to nearest even into e4m3, `a` lowest. Beyond 448 is 448; NaN stays. sm_89 and newer. */
DEV uint32_t pack_e4m3(float a, float b, float c, float d)
{
    uint32_t packed;
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
        "mov.b32 %0, {low, high}; }"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
}

/* Four e4m3 as fp16, which holds all of them, the lowest byte first. sm_89 and newer. */
DEV uint2 upcast_e4m3(uint32_t x)
{
    uint2 wide;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(wide.x), "=r"(wide.y)
        : "r"(x));
    return wide;
}

/* Of two neighbouring lanes' words x[0] and x[1] the even lane gets both lanes' x[0], the odd one both lanes' x[1]. */
DEV uint4 join_neighbours(const uint32_t (&x)[2][2])
{
    const int odd = threadIdx.x & 1;
    const uint32_t got_0 = __shfl_xor_sync(~0u, odd ? x[0][0] : x[1][0], 1),
                   got_1 = __shfl_xor_sync(~0u, odd ? x[0][1] : x[1][1], 1);
    return {odd ? got_0 : x[0][0], odd ? got_1 : x[0][1], odd ? x[1][0] : got_0, odd ? x[1][1] : got_1};
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
