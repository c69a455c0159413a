/* Two CTAs, a cluster, load the key tiles of their query tiles together (CLUSTER=2): each loads one panel of every tile
 * of K and of V, half of its dims, and the copy engine brings it to both. L2 is asked for a key tile once for two query
 * tiles. These are of neighbouring heads of a key head, where its query heads are even in number: they see the same. Or
 * else they are neighbours of one head, and both are loaded what either sees; a key tile on the right that only the
 * other sees is skipped: consumers release it as it comes. A piece of fwd_wgmma.cu, which includes it.
 *
 * A slot is loaded again when the consumers of both CTAs have released it. Consumers know nothing of the other CTA:
 * they release their own slot, for which their producer waits anyway, and this tells the other producer, by one arrival
 * at k_free or v_free there. Both CTAs have the same uses of the rings, and each use one arrival in each direction: so
 * no one waits in vain, and no barrier is a phase ahead, since the arrival of a slot's next use comes behind the loads
 * of this one, which come behind the wait for this one's. A cluster is on the GPU whole or not at all.
 *
 * The first CTA's planning thread takes work from the queue, one number for both, and sends it to the second's. */
#ifndef ACR_FWD_WGMMA_SHARED_LOADS_CUH
#define ACR_FWD_WGMMA_SHARED_LOADS_CUH

#if CLUSTER > 1

#include "cuda/device/attention/pipeline.cuh"
#include "cuda/device/isa/multicast.cuh"

/* ---- The producer ---- */

/* produce_keys, of one panel for both CTAs; free: the barriers that say of the other CTA's slots that they are empty.
 * Bytes are expected before the other is told that it may send them. */
template <int SLOTS>
DEV void produce_shared_keys(const kv_ring &r, uint32_t free, const fwd_map *map, const key_source &s, int use,
                             int kv_tile)
{
    const int stage = stage_of<SLOTS>(use), rank = cluster_rank();
    const uint32_t at = BARRIER_BYTES * stage, full = r.full + at;
    barrier_wait(r.empty + at, parity_of<SLOTS>(use) ^ 1);
    barrier_arrive_expecting(full, r.panels.count * r.panels.bytes);
    barrier_arrive_cluster(cluster_address(free + at, rank ^ 1));
    barrier_wait(free + at, parity_of<SLOTS>(use));
    load_box_to_all(r.tiles + stage * r.stage_bytes + rank * r.panels.bytes, map, full, rank * r.panels.elems,
                    s.row_first + kv_tile * KV_TILE, s.head, s.batch, (1 << CLUSTER) - 1);
}

/* ---- Consumers ---- */

/* Releases key tiles, from use number `first` on, unread: not before they have landed, since a slot that is loaded
 * again expects the bytes of its next use. */
DEV void skip_keys(uint32_t smem, int first, int count)
{
#pragma unroll 1
    for (int use = first; use < first + count; use++) {
        wait_full(ADDRESS(smem, k_full), use);
        release(ADDRESS(smem, k_empty), use);
    }
}

/* The same of the values, which come later: when the first scores behind them are ready all have been asked for. */
DEV void skip_values(uint32_t smem, int first, int count)
{
#pragma unroll 1
    for (int use = first; use < first + count; use++) {
        wait_full<V_STAGES>(ADDRESS(smem, v_full), use);
        release<V_STAGES>(ADDRESS(smem, v_empty), use);
    }
}

/* ---- The queue ---- */

/* How many query tiles, and of how many heads or pairs of heads, the queue is made of. */
DEV uint32_t count_shared_tiles(const fwd_args &a)
{
    const uint32_t tiles = count_q_tiles(a.q_len);
    return shares_by_heads(a) ? tiles : (tiles + CLUSTER - 1) / CLUSTER;
}

DEV uint32_t count_shared_units(const fwd_args &a)
{
    const uint32_t heads = (uint32_t)(a.q_heads * a.batch);
    return shares_by_heads(a) ? heads / CLUSTER : heads;
}

/* This CTA's query tile of number `index`, which may lie behind the last row: then it loads for the other alone. Which
 * of the two sees more keys changes from one round to the next. */
DEV work_tile find_shared_tile(const fwd_args &a, uint32_t index, uint32_t round)
{
    const uint32_t heads = (uint32_t)(a.q_heads * a.batch), rank = ((uint32_t)cluster_rank() + round) % CLUSTER,
                   of_section = find_section_heads(a, a.kv_len, heads, KV_BYTES);
    const bool by_heads = shares_by_heads(a);
    uint32_t head, q_tile;
    order_tiles(head, q_tile, a, index, count_shared_tiles(a), count_shared_units(a),
                by_heads ? of_section / CLUSTER : of_section);
    return by_heads ? tile_of_queue(a, head * CLUSTER + rank, q_tile) : tile_of_queue(a, head, q_tile * CLUSTER + rank);
}

/* take_next (tile_scheduler.cuh), of a cluster; round: counts the calls. The place of the ticket is free again when the
 * first CTA sends the next one: it has loaded a key tile of the work before, for which the second had to begin it. */
DEV uint32_t take_ticket(const fwd_args &a, uint32_t smem, uint32_t count, uint32_t round)
{
    const uint32_t clusters = gridDim.x / CLUSTER, full = ADDRESS(smem, ticket_full), at = ADDRESS(smem, ticket);
    uint32_t number;
    if (count <= clusters)
        return count;
    if (cluster_rank() == 0) {
        number = clusters + atomicInc((unsigned *)a.workspace, count - 1);
        tell_partner(at, full, number);
    } else
        number = hear_partner(at, full, round & 1);
    return number;
}

/* The planning thread (PLANS_AHEAD, pipeline.cuh). */
DEV void plan_shared_work(const fwd_args &a, uint32_t smem)
{
    const uint32_t count = count_shared_tiles(a) * count_shared_units(a);
    work_tile none = {};
    none.q_first = -1;
    int q_use = 0;
    for (uint32_t index = blockIdx.x / CLUSTER; index < count; index = take_ticket(a, smem, count, q_use - 1)) {
        tell_work(a, find_shared_tile(a, index, q_use), smem, q_use);
        wait_asked(smem, q_use++);
    }
    tell_work(a, none, smem, q_use);
}

/* ---- Begin and end ---- */

DEV void init_shared_barriers(uint32_t smem)
{
    barrier_init(ADDRESS(smem, ticket_full), 1);
    for (int i = 0; i < STAGES; i++)
        barrier_init(ADDRESS(smem, k_free) + BARRIER_BYTES * i, 1);
    for (int i = 0; i < V_STAGES; i++)
        barrier_init(ADDRESS(smem, v_free) + BARRIER_BYTES * i, 1);
}

/* By all threads of both CTAs. What has been asked of the other's shared memory is waited for there. */
DEV void wait_for_cluster(void)
{
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
}

#endif

#endif
