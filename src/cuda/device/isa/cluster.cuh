/* Clusters of CTAs (sm_90): their barrier, and stores into each other's shared memory. */
#ifndef ACR_DEVICE_ISA_CLUSTER_CUH
#define ACR_DEVICE_ISA_CLUSTER_CUH

#include "cuda/device/isa/common.cuh"

/* The cluster's barrier ends a phase when all threads of all its CTAs, but those that have ended, have arrived; every
 * warp comes whole, and waits after each arrival. Orders nothing: shows only that the others have begun. */
DEV void cluster_arrive_relaxed(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/* This CTA's place in the cluster. */
DEV int cluster_rank(void)
{
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEV void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* cluster_arrive_relaxed; and what the threads have asked of each other's shared memory is behind the wait. */
DEV void cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

/* Where the address of this CTA's shared memory is in the CTA of that rank. */
DEV uint32_t cluster_address(uint32_t address, uint32_t rank)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

/* Stores asynchronously to such an address; `barrier`, of the same CTA, is credited with the 16 bytes. */
DEV void cluster_send(uint32_t to, float4 value, uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
                 : "memory");
}

/* barrier_wait (barrier.cuh) for what other CTAs of the cluster have sent. */
DEV void barrier_wait_cluster(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    do
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, "
            "1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    while (!done);
}

#endif
