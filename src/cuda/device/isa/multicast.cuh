/* Boxes that the copy engine brings to several CTAs of a cluster at once, and arrivals at their barriers. */
#ifndef ACR_DEVICE_ISA_MULTICAST_CUH
#define ACR_DEVICE_ISA_MULTICAST_CUH

#include "cuda/device/isa/cluster.cuh"
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

/* barrier_arrive (barrier.cuh) at a barrier of any CTA of the cluster, by its address there (cluster_address). Who
 * waits for it by barrier_wait_cluster knows that this thread has read what it read. */
DEV void barrier_arrive_cluster(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

#endif
