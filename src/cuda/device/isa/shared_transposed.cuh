/* Stores of 8x8 matrices that a warp transposes on the way to shared memory (shared.cuh says the rest). */
#ifndef ACR_DEVICE_ISA_SHARED_TRANSPOSED_CUH
#define ACR_DEVICE_ISA_SHARED_TRANSPOSED_CUH

#include "cuda/device/isa/common.cuh"

/* As store_matrices, but what lies in a lane's registers as parts of a row becomes part of a column: row r of matrix
 * m, which lane 8m + r names, gets the registers' column r. */
DEV void store_matrices_transposed(uint32_t row, const uint32_t *r)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

#endif
