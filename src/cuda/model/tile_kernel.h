/* The part of a CUDA family's description that follows from numbers. The family's file includes this once, in its host
 * part, below its `static const acr__tiling TILING`; the functions and fields below then speak for that family and for
 * the line of kernels.def being compiled (DIM, Q_TILE, KV_TILE, STAGES; V_DIM where values have another head dim). What
 * a family says besides is its own: further refusals, its rates, a grid that no acr__work has. */
#ifndef ACR_CUDA_TILE_KERNEL_H
#define ACR_CUDA_TILE_KERNEL_H

#include "cuda/model/fwd_model.h"

#ifndef V_DIM
#define V_DIM DIM
#endif

static inline const char *tile_why_not(const acr_problem *problem, const acr__device *device)
{
    return acr__tiling_why_not(&TILING, &KERNEL_DESCRIPTION.boxes, problem, device);
}

static inline size_t tile_workspace(const acr_problem *problem, const acr__device *device)
{
    return acr__tiling_workspace(&TILING, problem, device);
}

static inline void tile_shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    *launch = acr__tiling_launch(&TILING, problem, device);
}

/* The CTAs of this kernel that fit on an SM beside each other. */
static inline int32_t tile_ctas_per_sm(const acr__device *device, int32_t regs_per_thread)
{
    return acr__ctas_per_sm(device, TILING.smem_bytes, regs_per_thread, TILING.threads);
}

/* Expected seconds of a problem at these rates, which rates.def may replace: products run over the problem's own head
 * dims; over those of the tiles, zeros included. rates names neither the kernel nor, unless a step takes more keys than
 * KV_TILE, the tile. */
static inline double tile_seconds_unpadded(const acr_problem *problem, const acr__device *device, acr__fwd_rates rates)
{
    rates.kernel = KERNEL_TEXT;
    rates.q_tile = Q_TILE;
    rates.kv_tile = rates.kv_tile != 0 ? rates.kv_tile : KV_TILE;
    return acr__fwd_seconds(problem, device, &rates);
}

static inline double tile_seconds(const acr_problem *problem, const acr__device *device, acr__fwd_rates rates)
{
    const acr_problem padded = acr__padded(problem, DIM, V_DIM);
    return tile_seconds_unpadded(&padded, device, rates);
}

/* By how much a line that is compiled with terms is slower than one without. Not fitted: what a problem without any is
 * charged leaves it to lines without. */
static inline double tile_terms_cost(const acr_problem *problem, uint32_t terms)
{
    return terms == 0 ? 1.0 : acr__terms_of(problem) != 0 ? 1.15 : 1.5;
}

/* The fields of acr__kernel that any family fills alike. It serves compute capabilities from first_arch to last_arch;
 * 999: its image holds PTX, for all that come. */
#define TILE_KERNEL(family_text, first_arch, last_arch)                                                                \
    .name = KERNEL_TEXT, .family = family_text, .backend = ACR__CUDA, .symbol = KERNEL_TEXT, .image = KERNEL_IMAGE,    \
    .image_end = KERNEL_IMAGE_END, .arch_min = first_arch, .arch_max = last_arch, .qk_dim_max = DIM,                   \
    .v_dim_max = V_DIM, .q_tile = Q_TILE, .kv_tile = KV_TILE, .stages = STAGES

#endif
