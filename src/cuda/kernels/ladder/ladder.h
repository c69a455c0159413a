/* What the descriptions of the ladder's rungs share: the problems they serve, and most fields. Host side only. */
#ifndef ACR_LADDER_H
#define ACR_LADDER_H

#include "cuda/model/fwd_model.h"

/* Why no rung runs the problem; NULL when rung 0 does, which reads element by element. */
static inline const char *ladder_why_not(const acr_problem *problem, int32_t q_tile)
{
    const int32_t dim = 64;
    if (problem->qk_dim != dim)
        return "qk_dim is not 64, the only one that the ladder serves";
    if (problem->v_dim != dim)
        return "v_dim is not 64, the only one that the ladder serves";
    const char *reason = acr__length_why_not(problem);
    return reason != NULL ? reason : acr__grid_why_not(problem, q_tile);
}

/* The same for rungs 1 and up, which copy rows in pieces of 16 bytes and keep smem_bytes of tiles. */
static inline const char *ladder_tiles_why_not(const acr_problem *problem, const acr__device *device, int32_t q_tile,
                                               int32_t smem_bytes)
{
    const char *reason = ladder_why_not(problem, q_tile);
    if (reason == NULL)
        reason = acr__vector_why_not(problem);
    return reason != NULL ? reason : acr__smem_why_not(smem_bytes, device);
}

/* The fields of an acr__kernel that all rungs have alike. */
#define LADDER_FIELDS                                                                                                  \
    .name = KERNEL_TEXT, .backend = ACR__CUDA, .dtype = ACR_F16, .qk_dim_max = DIM, .v_dim_max = DIM,                  \
    .q_tile = Q_TILE, .kv_tile = KV_TILE, .traits = ACR__TRAIT_NEVER_PLANNED, .symbol = KERNEL_TEXT,                   \
    .image = KERNEL_IMAGE, .image_end = KERNEL_IMAGE_END, .arch_min = 80, .arch_max = 999 /* PTX for what comes */

#endif
