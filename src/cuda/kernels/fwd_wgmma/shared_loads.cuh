/* Keys and values that CLUSTER CTAs load together: with neighbouring query tiles of one head they visit the same key
 * tiles, each loads its part of the keys, and the copy engine brings them to all. L2 is asked for every key tile once
 * for so many query tiles. CLUSTER=1: a CTA loads its own, by pipeline.cuh.
 *
 * A slot is empty once the consumers of all CTAs have released it: each CTA's barrier counts the arrivals of all. The
 * CTAs of a cluster take their work in an order that is known beforehand, so that none has to tell another. */
#ifndef ACR_KERNELS_FWD_WGMMA_SHARED_LOADS_CUH
#define ACR_KERNELS_FWD_WGMMA_SHARED_LOADS_CUH

#if CLUSTER > 1
#include "cuda/device/isa/multicast.cuh"

enum {
    BOX_KEYS = KV_TILE / CLUSTER /* of K and V: what one CTA loads */
};
#endif

/* release of a slot of keys or of values. */
DEV void release_keys(uint32_t empty, int use)
{
#if CLUSTER > 1
    const int lane = threadIdx.x % WARP_THREADS;
    if (lane < CLUSTER)
        barrier_arrive_cluster(cluster_address(empty + BARRIER_BYTES * stage_of(use), lane));
#else
    release(empty, use);
#endif
}

#if CLUSTER > 1
/* produce_keys, of the CTA's part. */
DEV void produce_shared_keys(const kv_ring &r, const fwd_map *map, const key_source &s, int use, int kv_tile)
{
    const int stage = stage_of(use), first = (int)(blockIdx.x % CLUSTER) * BOX_KEYS;
    const uint32_t full = r.full + BARRIER_BYTES * stage,
                   to = r.tiles + stage * r.stage_bytes + first * PANEL_ROW_BYTES;
    barrier_wait_cluster(r.empty + BARRIER_BYTES * stage, parity_of(use) ^ 1);
    barrier_arrive_expecting(full, r.panels.count * r.panels.bytes);
    for (int panel = 0; panel < r.panels.count; panel++)
        load_box_to_all(to + panel * r.panels.bytes, map, full, r.panels.elems * panel,
                        s.row_first + kv_tile * KV_TILE + first, s.head, s.batch, (1 << CLUSTER) - 1);
}

/* Of the whole queue. */
DEV uint32_t count_cluster_tiles(const fwd_args &a)
{
    return (count_q_tiles(a.q_len) + CLUSTER - 1) / CLUSTER * (uint32_t)(a.q_heads * a.batch);
}

/* A cluster's tile number n of the queue: there and back again, so that long and short ones even out. */
DEV uint32_t cluster_index(uint32_t n)
{
    const uint32_t clusters = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER;
    return n * clusters + (n % 2 != 0 ? clusters - 1 - cluster : cluster);
}

/* The CTA's query tile of it, which may lie behind the last row. */
DEV work_tile find_cluster_tile(const fwd_args &a, uint32_t index, uint32_t section_heads)
{
    const uint32_t units = (uint32_t)(a.q_heads * a.batch), in_head = count_cluster_tiles(a) / units;
    uint32_t head, rank;
    if (a.mask != FWD_MASK_NONE) {
        order_in_sections(head, rank, index, in_head, units, section_heads);
        rank = in_head - 1 - rank;
#if BIAS_TILES
    } else if (shares_bias(a)) {
        order_by_bias(head, rank, a, index, in_head);
#endif
    } else {
        head = index / in_head;
        rank = index - head * in_head;
    }
    return tile_of_queue(a, head, rank * CLUSTER + blockIdx.x % CLUSTER);
}
#endif

#endif
