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

/* Adds transpose(dS) * K of the keys of one CTA to a part of dQ, or with is_first stores it. */
DEV void add_dq_of_keys(query_gradient &d, uint64_t ds, uint64_t keys, bool is_first)
{
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_K; step++)
        wgmma_ss_mn(d, descriptor_at(ds, step * WGMMA_K * PANEL_ROW_BYTES),
                    descriptor_at(keys, step * WGMMA_K * PANEL_ROW_BYTES), step != 0 || !is_first);
}

#endif
