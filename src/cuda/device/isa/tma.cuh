/* The copy engine of sm_90: boxes of rank-4 tensor maps {dim, rows, heads, batch} (cuda/tensormap.h) into shared
 * memory. */
#ifndef ACR_DEVICE_ISA_TMA_CUH
#define ACR_DEVICE_ISA_TMA_CUH

#include "cuda/device/isa/common.cuh"
#include "cuda/tensormap.h"

enum {
    BOX_ROW_BYTES = 128
};

/* Nonzero in one lane of a whole warp. What only that lane does, the compiler knows to be done once: operands of copies
 * need no loop over lanes, since they are in registers that the warp has once. So where the other lanes go on to do
 * more than wait, all meet first (__syncwarp): else both sides use those registers at a time, and a copy lands
 * elsewhere (bwd_short's lab.md). */
DEV int elect_one(void)
{
    int elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
}

DEV void prefetch_map(const fwd_map *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"((uint64_t)map) : "memory");
}

/* Of all kernels that load their inputs by maps. */
DEV void prefetch_inputs(const fwd_maps &maps)
{
    prefetch_map(&maps.q);
    prefetch_map(&maps.k);
    prefetch_map(&maps.v);
}

/* Loads one box, by one thread; `barrier` is credited with the box's bytes. Elements outside the tensor become zero. */
DEV void load_box(uint32_t to, const fwd_map *map, uint32_t barrier, int dim, int row, int head, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
                 "%5, %6}], [%2];" ::"r"(to),
                 "l"((uint64_t)map), "r"(barrier), "r"(dim), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

#endif
