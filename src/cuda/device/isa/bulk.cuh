/* Runs of bytes between global and shared memory by the copy engine of sm_90, without a tensor map: both addresses and
 * the length are multiples of 16. One thread asks for each. */
#ifndef ACR_DEVICE_ISA_BULK_CUH
#define ACR_DEVICE_ISA_BULK_CUH

#include "cuda/device/isa/common.cuh"

/* Loads; `barrier` is credited with the bytes. */
DEV void load_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Stores, as part of the thread's open group. */
DEV void store_bytes(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

/* Adds floats to those in global memory, each addition by itself, as part of the thread's open group. */
DEV void add_floats(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

/* Closes the group of the thread's stores and additions since the last commit. */
DEV void bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until all groups of this thread have read shared memory: it may be written again. */
DEV void bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Waits until all groups of this thread have changed global memory, visibly to this thread. */
DEV void bulk_wait_done(void)
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Orders this thread's accesses to global memory by the copy engine and its ordinary ones. */
DEV void bulk_global_fence(void)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

#endif
