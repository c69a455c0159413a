/* fwd_short's producer: one thread brings Q, K and V to shared memory by tensor maps. */
#ifndef ACR_CUDA_FWD_SHORT_LOADING_CUH
#define ACR_CUDA_FWD_SHORT_LOADING_CUH

#include "cuda/device/attention/kv_loader.cuh"
#include "cuda/device/isa/trace_points.cuh"
#include "cuda/device/isa/tma.cuh"
#include "cuda/kernels/fwd_short/tile.cuh"

enum {
    UPCAST_WARPS = PRODUCER_THREADS / WARP_THREADS - 1, /* the producer's warpgroup but the warp that loads */
    LOAD_V_EARLY = E4M3                                 /* V that is still to be upcast is asked for a stage earlier */
};

/* source: its key 0 is the first key of the tile's first stage. */
DEV void load_stage(uint32_t to, const fwd_map *map, uint32_t full, int stage, const key_source &source)
{
#pragma unroll
    for (int box = 0; box < BOXES; box++)
        load_box(to + box * KV_PANEL_BYTES, map, full, BOX_ELEMS * box, source.row_first + stage * KV_TILE, source.head,
                 source.batch);
}

/* All barriers but the one of the first keys, which was initialised before their loads. */
DEV void init_barriers(uint32_t smem)
{
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        if (stage > 0)
            barrier_init(ADDRESS(smem, k_full) + BARRIER_BYTES * stage, 1);
        barrier_init(ADDRESS(smem, v_full) + BARRIER_BYTES * stage, 1);
        if (E4M3)
            barrier_init(ADDRESS(smem, v_upcast) + BARRIER_BYTES * stage, UPCAST_WARPS);
        if (RING) {
            barrier_init(ADDRESS(smem, k_free) + BARRIER_BYTES * stage, CONSUMERS * CONSUMER_WARPS);
            barrier_init(ADDRESS(smem, v_free) + BARRIER_BYTES * stage, CONSUMERS * CONSUMER_WARPS);
        }
    }
    if (RING)
        barrier_init(ADDRESS(smem, verdict), 1);
    barrier_init_done();
}

/* The first loads: the query rows and the first keys, on one barrier, before anything that can wait. */
DEV void load_first(const fwd_args &a, const fwd_maps &maps, uint32_t smem, const key_source &source)
{
    const uint32_t full = ADDRESS(smem, k_full);
    barrier_init(full, 1);
    barrier_init_done();
    wait_for_previous_kernel();
    barrier_arrive_expecting(full, (JOINT ? 2 : 1) * LOAD_BYTES + HALVES * BOXES * Q_PANEL_BYTES);
    load_stage(ADDRESS(smem, k), &maps.k, full, 0, source);
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int box = 0; box < BOXES; box++)
            load_box(ADDRESS(smem, q) + half * Q_HALF_BYTES + box * Q_PANEL_BYTES, &maps.q, full, BOX_ELEMS * box,
                     first_row(a, half % 2, half / 2), blockIdx.y, blockIdx.z);
    if (JOINT)
        load_stage(v_load_at(smem, 0), &maps.v, full, 0, source);
    ACR_TRACE_POINT(0, "first loads issued");
}

/* JOINT: and V. */
DEV void load_k(const fwd_maps &maps, uint32_t smem, const key_source &source, int stage, int step)
{
    const uint32_t full = barrier_of(ADDRESS(smem, k_full), step);
    if (RING)
        barrier_wait(barrier_of(JOINT ? ADDRESS(smem, v_free) : ADDRESS(smem, k_free), step), !phase_of(step));
    barrier_arrive_expecting(full, (JOINT ? 2 : 1) * LOAD_BYTES);
    load_stage(stage_of(ADDRESS(smem, k), step, K_STAGE_BYTES), &maps.k, full, stage, source);
    if (JOINT)
        load_stage(v_load_at(smem, step), &maps.v, full, stage, source);
    ACR_TRACE_POINT(step, "K asked for");
}

DEV void load_v(const fwd_maps &maps, uint32_t smem, const key_source &source, int stage, int step)
{
    if (JOINT)
        return;
    const uint32_t full = barrier_of(ADDRESS(smem, v_full), step);
    if (RING)
        barrier_wait(barrier_of(ADDRESS(smem, v_free), step), !phase_of(step));
    barrier_arrive_expecting(full, LOAD_BYTES);
    load_stage(v_load_at(smem, step), &maps.v, full, stage, source);
    ACR_TRACE_POINT(step, "V asked for");
}

/* All stages once, in the order of use, K two stages ahead of V, and never all at once: loads in flight share the
 * bandwidth, so the first would come last. `from` is the first K that is not under way yet, `step` the first stage's
 * step. */
DEV void load_stages(const fwd_maps &maps, uint32_t smem, const key_source &source, int stages, int from, int step)
{
    if (EXACT) /* nothing else is under way before the first keys are there */
        barrier_wait(ADDRESS(smem, k_full), 0);
    for (int stage = from; stage < 2 && stage < stages; stage++)
        load_k(maps, smem, source, stage, step + stage);
    if (LOAD_V_EARLY && stages > 0)
        load_v(maps, smem, source, 0, step);
    for (int stage = 0; stage < stages; stage++, step++) {
        barrier_wait(barrier_of(ADDRESS(smem, k_full), step), phase_of(step));
        if (!LOAD_V_EARLY)
            load_v(maps, smem, source, stage, step);
        if (stage + 2 < stages)
            load_k(maps, smem, source, stage + 2, step + 2);
        if (LOAD_V_EARLY && stage + 1 < stages)
            load_v(maps, smem, source, stage + 1, step + 1);
    }
    if (stages == 0) /* no CTA ends before its loads */
        barrier_wait(ADDRESS(smem, k_full), 0);
}

DEV void load_all(const fwd_maps &maps, uint32_t smem, const key_source &source, int stages)
{
    load_stages(maps, smem, source, stages, 1, 0);
    if (RING && wait_verdict(smem))
        load_stages(maps, smem, source, stages, 0, stages);
}

#endif
