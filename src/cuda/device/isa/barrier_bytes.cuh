/* Bytes that a barrier expects before anybody arrives at it: copies start, and who has more to say arrives later. */
#ifndef ACR_DEVICE_ISA_BARRIER_BYTES_CUH
#define ACR_DEVICE_ISA_BARRIER_BYTES_CUH

#include "cuda/device/isa/common.cuh"

/* barrier_arrive_expecting (barrier.cuh) without the arrival. */
DEV void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

#endif
