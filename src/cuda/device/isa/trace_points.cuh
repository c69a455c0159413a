/* Clock stamps at a kernel's steps, for `acromion profile --timeline`. Other builds have none: the macros are empty,
 * and the machine code is that of a file without them.
 *
 * ACR_TRACE_POINT(hit, "K landed") notes when thread 0 of each group of TRACE_WARPS warps (a family may define it
 * before it includes this file; default 4, a warpgroup) came here; hit counts how often before, 0 outside loops. The
 * name says what has just ended. ACR_TRACE_END(args) is the kernel's last statement. The program reads the names from
 * the source in the order of their lines, so a trace point is a line of the family's own file. */
#ifndef ACR_DEVICE_ISA_TRACE_POINTS_CUH
#define ACR_DEVICE_ISA_TRACE_POINTS_CUH

#ifndef ACR_TRACE_AT

#define ACR_TRACE_POINT(hit, name)                                                                                     \
    do {                                                                                                               \
    } while (0)
#define ACR_TRACE_END(args)                                                                                            \
    do {                                                                                                               \
    } while (0)

#else /* ACR_TRACE_AT: where in the workspace the stamps go, in bytes, behind what the kernel itself uses */

#include "cuda/device/isa/common.cuh"
#include "trace_points.h"

#ifndef TRACE_WARPS
#define TRACE_WARPS 4
#endif

/* While the kernel runs, a constant address is all that a stamp needs, in no function's way. */
static __device__ uint32_t trace_times[TRACE_CTAS][TRACE_GROUPS][TRACE_STEPS][TRACE_HITS];

enum {
    FIRST_TRACE_POINT = __COUNTER__ + 1 /* of the first */
};

DEV uint32_t trace_cta(void)
{
    return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

/* No branch: that would end the compiler's stretch of asynchronous products. */
DEV void trace_step(int step, uint32_t hit)
{
    const uint32_t cta = trace_cta(), group = threadIdx.x / (WARP_THREADS * TRACE_WARPS);
    const int taken = threadIdx.x % (WARP_THREADS * TRACE_WARPS) == 0 && cta < TRACE_CTAS && group < TRACE_GROUPS &&
                      step < TRACE_STEPS && hit < TRACE_HITS;
    uint32_t *to = &trace_times[0][0][0][0] + ((cta * TRACE_GROUPS + group) * TRACE_STEPS + step) * TRACE_HITS + hit;
    asm volatile("{ .reg .pred p; .reg .u32 t; setp.ne.s32 p, %0, 0; mov.u32 t, %%clock; or.b32 t, t, 1;\n\t"
                 "@p st.global.u32 [%1], t; }" ::"r"(taken),
                 "l"(to)
                 : "memory");
}

/* The first warp of each group hands its stamps over and clears them for the next launch. */
DEV void trace_end(void *workspace)
{
    const uint32_t cta = trace_cta(), group = threadIdx.x / (WARP_THREADS * TRACE_WARPS),
                   thread = threadIdx.x % WARP_THREADS;
    uint32_t *to = (uint32_t *)((char *)workspace + ACR_TRACE_AT);
    __syncwarp();
    if (threadIdx.x % (WARP_THREADS * TRACE_WARPS) >= WARP_THREADS || cta >= TRACE_CTAS || group >= TRACE_GROUPS ||
        *(volatile uint32_t *)(to + TRACE_ASKED_WORD) != 1)
        return;
    if (cta == 0 && threadIdx.x == 0)
        to[TRACE_WARPS_WORD] = TRACE_WARPS;
    to += TRACE_HEADER_WORDS + (cta * TRACE_GROUPS + group) * TRACE_STEPS * TRACE_HITS;
    uint32_t *from = &trace_times[cta][group][0][0];
    for (int i = thread; i < TRACE_STEPS * TRACE_HITS; i += WARP_THREADS) {
        to[i] = from[i];
        from[i] = 0;
    }
}

#define ACR_TRACE_POINT(hit, name) trace_step(__COUNTER__ - FIRST_TRACE_POINT, hit)
#define ACR_TRACE_END(args) trace_end((args).workspace)

#endif

#endif
