/* Barriers of sm_90: mbarriers in shared memory, which copies can complete, named barriers among warpgroups, register
 * hand-over. */
#ifndef ACR_DEVICE_ISA_BARRIER_CUH
#define ACR_DEVICE_ISA_BARRIER_CUH

#include "cuda/device/isa/common.cuh"

enum {
    WARPGROUP_THREADS = 128,
    BARRIER_BYTES = 8
};

/* The warpgroup of this thread in its CTA: the compiler, too, knows that all lanes of a warp have the same. */
DEV int read_warpgroup(void)
{
    return __shfl_sync(~0u, threadIdx.x / WARPGROUP_THREADS, 0);
}

DEV void barrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* Makes the initialising thread's barriers visible to the copy engine; a __syncthreads shows them to the other threads.
 * */
DEV void barrier_init_done(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEV void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and makes the phase end only after copies of so many bytes have landed, those beyond a tensor's bounds
 * included. */
DEV void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* Returns once the phase of this parity has ended; at once for parity 1 of a fresh barrier. Meanwhile the warp looks
 * every 25 cycles or so. With BARRIERS_SLEEP=1, which a family says before it includes this, it sleeps until the
 * barrier wakes it, at most 10 ms, and takes no issue slots or reads of shared memory from the other warps. */
#ifndef BARRIERS_SLEEP
#define BARRIERS_SLEEP 0
#endif
#if BARRIERS_SLEEP
#define LONGEST_SLEEP ", 10000000" /* ns */
#else
#define LONGEST_SLEEP
#endif
DEV void barrier_wait(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2" LONGEST_SLEEP
                     "; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    while (!done);
}

/* Nonzero once the phase of that parity is over; does not wait. */
DEV uint32_t barrier_test(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

/* Named barriers 1..15 (0 is __syncthreads): threads = those that sync and those that only arrive. */
DEV void named_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEV void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* named_sync that returns whether any of the threads says yes. */
template <int ID, int COUNT> DEV int named_any(int yes)
{
    int any;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.s32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; selp.s32 %0, 1, 0, q; }"
        : "=r"(any)
        : "r"(yes), "n"(ID), "n"(COUNT)
        : "memory");
    return any;
}

/* Register hand-over between warpgroups: from here on each thread of this one has so many, a constant multiple of 8.
 * All its warps come here; who takes waits until others have given. */
#define REGISTERS_GIVE(left) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)(left)))
#define REGISTERS_TAKE(all) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)(all)))

/* Makes this thread's ordinary stores to shared memory visible to wgmma and to the copy engine. */
DEV void shared_stores_visible(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#endif
