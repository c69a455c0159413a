/* A warpgroup's scores of one key tile, and its output, in accumulators as wgmma.cuh lays them out: of element i a lane
 * holds its first row or, where i % 4 / 2 is 1, the eighth after it. */
#ifndef ACR_DEVICE_ATTENTION_SCORES_CUH
#define ACR_DEVICE_ATTENTION_SCORES_CUH

#include <math_constants.h>

#include "cuda/device/isa/common.cuh"

/* seen: how many keys each of the lane's rows sees, counted from the lane's first column of the tile on. */
template <int ELEMS> DEV void mask_scores(float (&s)[ELEMS], int seen_0, int seen_1)
{
#pragma unroll
    for (int i = 0; i < ELEMS; i++)
        if (8 * (i / 4) + i % 2 >= (i % 4 < 2 ? seen_0 : seen_1))
            s[i] = -CUDART_INF_F;
}

/* Over the lane's own columns. */
template <int ELEMS> DEV void lane_max(float (&max)[2], const float (&s)[ELEMS])
{
#pragma unroll
    for (int h = 0; h < 2; h++)
        max[h] = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int i = 4; i < ELEMS; i++)
        max[i % 4 / 2] = fmaxf(max[i % 4 / 2], s[i]);
}

template <int ELEMS> DEV void scale_output(float (&o)[ELEMS], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < ELEMS; i++)
        o[i] *= factor[i % 4 / 2];
}

#endif
