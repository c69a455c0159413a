/* What consumers of paired CTAs share (paired_keys.cuh, paired_dims.cuh): arrivals at both CTAs' barriers, and products
 * over the keys of both. A piece of bwd_wgmma.cu, which includes it. */
#ifndef ACR_BWD_WGMMA_PAIRED_DQ_CUH
#define ACR_BWD_WGMMA_PAIRED_DQ_CUH

/* One arrival per warp at the same barrier of each CTA. */
DEV void arrive_at_both(uint32_t barrier, int lane)
{
    __syncwarp();
    if (lane < WORK_CTAS)
        barrier_arrive_cluster(cluster_address(barrier, lane));
}

/* Waits for dS of a use, of both CTAs, and starts the CTA's half of its dQ, or with shared keys the warpgroup's part of
 * it. */
DEV void start_dq_of(query_gradient &d, const consumer &c, int use)
{
    const int buffer = use % DS_STAGES;
    barrier_wait(ADDRESS(c.smem, ds_full) + BARRIER_BYTES * buffer, use / DS_STAGES & 1);
    const uint32_t own = ADDRESS(c.smem, ds) + buffer * DS_BYTES + ds_panel_of(cluster_rank()) * DS_PANEL_BYTES;
    const uint64_t ds = matrix_descriptor(own, DS_PANEL_BYTES),
                   partner_ds =
                       matrix_descriptor(ADDRESS(c.smem, partner_ds) + buffer * DS_PANEL_BYTES, DS_PANEL_BYTES),
                   partner_k = matrix_descriptor(
                       ADDRESS(c.smem, partner_k) + (SHARED_KEYS ? c.index * KV_PANEL_BYTES : 0), KV_PANEL_BYTES);
    forget(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_K; step++)
        wgmma_ss_mn(d, descriptor_at(ds, step * WGMMA_K * PANEL_ROW_BYTES),
                    descriptor_at(c.k_keys, step * WGMMA_K * PANEL_ROW_BYTES), step != 0);
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_K; step++)
        wgmma_ss_mn(d, descriptor_at(partner_ds, step * WGMMA_K * PANEL_ROW_BYTES),
                    descriptor_at(partner_k, step * WGMMA_K * PANEL_ROW_BYTES), 1);
    wgmma_commit();
}

#endif
