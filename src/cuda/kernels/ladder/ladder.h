/* What the descriptions of the ladder's rungs share: the problems they serve, and most fields. Host side only; below
 * the rung's TILING (cuda/model/tile_kernel.h). */
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

#define LADDER_KERNEL(family_text)                                                                                     \
    TILE_KERNEL(family_text, 80, 999), .dtype = ACR_F16, .traits = ACR__TRAIT_NEVER_PLANNED, .why_not = ladder_why_not

#endif
