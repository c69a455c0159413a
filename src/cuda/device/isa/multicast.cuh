/* What the CTAs of a cluster (sm_90) do with each other's shared memory by the copy engine: boxes that it brings to all
 * of them at once, runs of bytes from one to another, and arrivals at each other's mbarriers. */
#ifndef ACR_DEVICE_ISA_MULTICAST_CUH
#define ACR_DEVICE_ISA_MULTICAST_CUH

#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/isa/cluster.cuh"
#include "cuda/device/isa/shared.cuh"
#include "cuda/device/isa/tma.cuh"

/* load_box into the CTAs of the cluster whose bits are set, the lowest that of rank 0: in each of them at the places
 * that `to` and `barrier` have in this one. Each one's barrier is credited with the box's bytes. */
DEV void load_box_to_all(uint32_t to, const fwd_map *map, uint32_t barrier, int dim, int row, int head, int batch,
                         int ctas)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"((uint64_t)map), "r"(barrier), "r"(dim), "r"(row), "r"(head), "r"(batch), "h"((uint16_t)ctas)
                 : "memory");
}

/* Copies from this CTA's shared memory to another's; `barrier`, of that CTA, is credited with the bytes. Both addresses
 * there are cluster_address's; all and the length are multiples of 16. */
DEV void copy_to_cta(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "r"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* barrier_arrive (barrier.cuh) at a barrier of any CTA of the cluster, by its address there (cluster_address). It says
 * that copies and products have ended which the thread has waited for, and that it has read what it has used since: no
 * more, and it shows no stores. With .release.cluster each arrival would first be a fence of the whole GPU
 * (MEMBAR.ALL.GPU). */
DEV void barrier_arrive_cluster(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Tells the second CTA of a pair a number, by 16 bytes at the same place in both, of which the barrier `full` knows. */
DEV void tell_partner(uint32_t at, uint32_t full, uint32_t number)
{
    cluster_send(cluster_address(at, 1), make_float4(__uint_as_float(number), 0.0f, 0.0f, 0.0f),
                 cluster_address(full, 1));
}

/* What the first CTA tells, a number below 2^31, by one thread of the second, which then arrives at the first one's
 * barrier `heard`. A read has been done when its value is used, not sooner: on a GPU that had left the kernel for
 * another process, an arrival that only followed it in the program overtook it, and the next number was read in its
 * place. So the arrival's address needs the number. */
DEV uint32_t hear_partner(uint32_t at, uint32_t full, uint32_t parity, uint32_t heard)
{
    barrier_arrive_expecting(full, 16);
    barrier_wait_cluster(full, parity);
    const uint32_t number = load_shared(at);
    barrier_arrive_cluster(cluster_address(heard, number >> 31));
    return number;
}

#endif
