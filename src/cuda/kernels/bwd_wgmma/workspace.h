/* What the three kernels of bwd_wgmma keep in the workspace, for device code and for the host's sizes.
 *
 * Query rows of a batch entry are cut into tiles of q_tile rows. Every entry has as many as the longest may have, in a
 * packed batch, too: whatever its offsets hold, no two entries share a tile. For each query head and tile there are
 *   visits  how many key tiles have added to the tile's dQ
 *   stats   q_tile floats of LSE in powers of two, +inf where a row sees no key or does not exist; then q_tile of D
 *   dq      q_tile x dim floats of unscaled dQ, in halves of 64 x 64 that a warpgroup has: bwd_wgmma.cu says the order.
 *           With few key tiles each of them has floats of its own, `slots` of them `slot` floats apart, and the last
 *           kernel sums them: nobody waits for anybody. Else there is one slot, and the key tiles add to it in turn. */
#ifndef ACR_BWD_WGMMA_WORKSPACE_H
#define ACR_BWD_WGMMA_WORKSPACE_H

#include "bwd_args.h"

enum {
    BWD_SLOTS_MAX = 8 /* passing the turn takes about 3000 cycles, a key tile's visit about 4000 */
};

/* Byte offsets; `ticket` is at 0: the number of the next work tile. */
typedef struct bwd_workspace {
    int64_t visits, stats, dq, bytes;
    int64_t slot;         /* floats */
    int32_t slots, tiles; /* tiles: of a query head */
} bwd_workspace;

/* The tiles of a batch entry of one head, and the first one's number. */
VISIBLE_FUNCTION int32_t bwd_tiles(const fwd_args *a, int32_t q_tile)
{
    return (a->q_len + q_tile - 1) / q_tile;
}

VISIBLE_FUNCTION int32_t bwd_first_tile(const fwd_args *a, int32_t entry, int32_t q_tile)
{
    return entry * bwd_tiles(a, q_tile);
}

/* How many key tiles have floats of dQ of their own, or 1. */
VISIBLE_FUNCTION int32_t bwd_slots(int64_t key_tiles)
{
    return key_tiles <= BWD_SLOTS_MAX ? (int32_t)key_tiles : 1;
}

VISIBLE_FUNCTION bwd_workspace bwd_workspace_of(const fwd_args *a, int32_t q_tile, int32_t kv_tile, int32_t dim)
{
    const int64_t line = 256;
    bwd_workspace w;
    w.tiles = bwd_first_tile(a, a->batch, q_tile);
    const int64_t all = (int64_t)w.tiles * a->q_heads;
    w.visits = line;
    w.stats = w.visits + (all * 4 + line - 1) / line * line;
    w.dq = w.stats + (all * q_tile * 8 + line - 1) / line * line;
    const int32_t key_tiles = (a->kv_len + kv_tile - 1) / kv_tile;
    w.slots = bwd_slots(key_tiles);
    w.slot = all * q_tile * dim;
    w.bytes = w.dq + w.slots * w.slot * 4;
    return w;
}

#endif
