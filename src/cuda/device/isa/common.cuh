/* What every device file needs: the function qualifier, shared-memory addresses, dependent launch. */
#ifndef ACR_DEVICE_ISA_COMMON_CUH
#define ACR_DEVICE_ISA_COMMON_CUH

#include <stdint.h>

#define DEV static __device__ __forceinline__

enum {
    WARP_THREADS = 32
};

/* A shared-memory pointer as the 32-bit address that PTX instructions take. */
DEV uint32_t smem_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* threadIdx.x read anew, where no register is left to keep it in. */
DEV int read_thread(void)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* Waits until the kernels before this one in the stream have ended and their results are visible. Every thread that
 * touches global memory comes through here first, in every CTA. Without ACR_OVERLAP_PREVIOUS, and before sm_90, there
 * is nothing to wait for. */
DEV void wait_for_previous_kernel(void)
{
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Lets the next kernel in the stream, if launched with ACR_OVERLAP_PREVIOUS, take free places on the SMs once every CTA
 * of this one has come here or ended. Orders no memory. */
DEV void allow_next_kernel(void)
{
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
