/* Two floats in neighbouring registers, an even one and the odd one behind it: the register file keeps even and odd
 * ones in different banks. */
#ifndef ACR_DEVICE_ISA_REGISTER_PAIR_CUH
#define ACR_DEVICE_ISA_REGISTER_PAIR_CUH

#include "cuda/device/isa/common.cuh"

typedef uint64_t register_pair;

DEV register_pair join_registers(const float (&x)[2])
{
    register_pair p;
    asm("mov.b64 %0, {%1, %2};" : "=l"(p) : "f"(x[0]), "f"(x[1]));
    return p;
}

DEV void split_registers(float (&x)[2], register_pair p)
{
    asm("mov.b64 {%0, %1}, %2;" : "=f"(x[0]), "=f"(x[1]) : "l"(p));
}

#endif
