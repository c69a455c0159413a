/* Shared memory by 32-bit address: loads and stores of a thread's words, and the loads and stores of 8x8 matrices that
 * a warp does together. Everything here is ordered like any access to memory: the compiler moves none of it across
 * another one or across a barrier. A vector of n words lies at a multiple of 4n bytes. */
#ifndef ACR_DEVICE_ISA_SHARED_CUH
#define ACR_DEVICE_ISA_SHARED_CUH

#include <stddef.h>

#include "cuda/device/isa/common.cuh"

/* The address of a member of the includer's struct shared_memory, which begins at `smem`. */
#define ADDRESS(smem, member) ((smem) + (uint32_t)offsetof(shared_memory, member))

DEV uint32_t load_shared(uint32_t from)
{
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

DEV uint32_t load_shared_16(uint32_t from)
{
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
    return x;
}

DEV float load_shared_float(uint32_t from)
{
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}

DEV uint2 load_shared_2(uint32_t from)
{
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}

DEV uint4 load_shared_4(uint32_t from)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

DEV float4 load_shared_float4(uint32_t from)
{
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

DEV void store_shared(uint32_t to, uint32_t x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

DEV void store_shared_4(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

DEV void store_shared_float4(uint32_t to, float x, float y, float z, float w)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

/* Four 8x8 matrices of 16-bit elements. Lane 8i + r names the address of row r of matrix i, 16 bytes; r[i] of lane l is
 * the row l/4, columns 2(l%4) and the next, of matrix i. */
DEV void load_matrices(uint32_t *r, uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
}

/* The same of the transposed matrices. */
DEV void load_matrices_transposed(uint32_t *r, uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
}

/* The inverse of load_matrices. */
DEV void store_matrices(uint32_t row, const uint32_t *r)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

#endif
