/* Tiles of query rows as the backward families number them in the workspace, for device code and for the host's sizes.
 *
 * Query rows of a batch entry are cut into tiles of q_tile rows. Every entry has as many as the longest may have, in a
 * packed batch, too: whatever its offsets hold, no two entries share a tile. A tile of a query head has 2 q_tile floats
 * of statistics: LSE in powers of two, +inf where a row sees no key or does not exist; then D = rowsum(dO * O). */
#ifndef ACR_DEVICE_ATTENTION_GRADIENTS_H
#define ACR_DEVICE_ATTENTION_GRADIENTS_H

#include "bwd_args.h"

/* The tiles of a batch entry of one head, and the first one's number. */
VISIBLE_FUNCTION int32_t bwd_tiles(const fwd_args *a, int32_t q_tile)
{
    return (a->q_len + q_tile - 1) / q_tile;
}

VISIBLE_FUNCTION int32_t bwd_first_tile(const fwd_args *a, int32_t entry, int32_t q_tile)
{
    return entry * bwd_tiles(a, q_tile);
}

/* The tiles of all entries and heads. */
VISIBLE_FUNCTION int64_t bwd_all_tiles(const fwd_args *a, int32_t q_tile)
{
    return (int64_t)bwd_first_tile(a, a->batch, q_tile) * a->q_heads;
}

VISIBLE_FUNCTION int64_t bwd_stats_bytes(const fwd_args *a, int32_t q_tile)
{
    return bwd_all_tiles(a, q_tile) * q_tile * 8;
}

#endif
