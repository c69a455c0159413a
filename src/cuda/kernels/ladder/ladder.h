/* What the descriptions of the ladder's rungs share: the problems they serve, their cost, and most fields. Host side
 * only; below the rung's TILING (cuda/model/tile_kernel.h) and RATES. */
#ifndef ACR_LADDER_H
#define ACR_LADDER_H

#include "cuda/model/tile_kernel.h"

static inline const char *ladder_why_not(const acr_problem *problem, const acr__device *device)
{
    if (problem->qk_dim != DIM)
        return "qk_dim is not 64, the only one that the ladder serves";
    if (problem->v_dim != DIM)
        return "v_dim is not 64, the only one that the ladder serves";
    return tile_why_not(problem, device);
}

static inline double ladder_cost(const acr_problem *problem, const acr__device *device)
{
    return tile_seconds_unpadded(problem, device, RATES);
}

/* As ladder_cost, where the tensor cores bind: other GPUs have another share of the rate. */
static inline double ladder_tensor_cost(const acr_problem *problem, const acr__device *device)
{
    acr__fwd_rates rates = RATES;
    rates.mma_flop_per_cycle *= acr__mma_share(device);
    return tile_seconds_unpadded(problem, device, rates);
}

#define LADDER_KERNEL(family_text)                                                                                     \
    TILE_KERNEL(family_text, 80, 999), .dtype = ACR_F16, .traits = ACR__TRAIT_NEVER_PLANNED, .why_not = ladder_why_not

#endif
