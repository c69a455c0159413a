/* What the three kernels of bwd_wgmma keep in the workspace, for device code and for the host's sizes.
 *
 * For each tile of keys of each key head there is
 *   spoilt  which of its keys have a gradient that is not finite (gradient_lines.cuh): a bit for each of 128 keys, or
 *           for dV of each of 64 and then for dK of each
 * For each query head and tile of query rows (gradients.h) there are
 *   visits  how many key tiles have added to the tile's dQ; of pairs of key tiles (PAIR), to each half of it
 *   stats   its statistics
 *   dq      q_tile x dim floats of unscaled dQ, in parts of 64 x 64 that a warpgroup has: bwd_wgmma.cu says the order
 *           in which key tiles add to them.
 * Behind all of it are biases or masks as packed_bias.cuh keeps them and, of masks, marks: whether any pair is left. */
#ifndef ACR_BWD_WGMMA_WORKSPACE_H
#define ACR_BWD_WGMMA_WORKSPACE_H

#include "cuda/device/attention/gradients.h"

enum {
    BWD_SPOILT_BYTES = 16,
    BWD_BIAS_NOTE = 16 /* offset of what the first kernel notes of biases */
};

/* Byte offsets; at 0 are the numbers of the next work tile and, where consumers convert dQ, of what
 * they take next. */
typedef struct bwd_workspace {
    int64_t spoilt, visits, stats, dq, bytes;
    int32_t tiles; /* of a query head */
} bwd_workspace;

/* counts: of a query tile's visits. */
VISIBLE_FUNCTION bwd_workspace bwd_workspace_of(const fwd_args *a, int32_t q_tile, int32_t kv_tile, int32_t dim,
                                                int32_t counts)
{
    const int64_t line = 256;
    bwd_workspace w;
    w.tiles = bwd_first_tile(a, a->batch, q_tile);
    const int64_t all = bwd_all_tiles(a, q_tile);
    const int32_t key_tiles = (a->kv_len + kv_tile - 1) / kv_tile;
    w.spoilt = line;
    w.visits = w.spoilt + ((int64_t)key_tiles * a->kv_heads * a->batch * BWD_SPOILT_BYTES + line - 1) / line * line;
    w.stats = w.visits + (all * counts * 4 + line - 1) / line * line;
    w.dq = w.stats + (bwd_stats_bytes(a, q_tile) + line - 1) / line * line;
    w.bytes = w.dq + all * q_tile * dim * 4;
    return w;
}

/* Biases, as many as their strides tell apart; of each and of each query tile there are `groups` of 64 keys, those of
 * work tiles whose keys do not exist included. Of each group there are words and, of masks, two marks. */
typedef struct bwd_biases {
    int64_t count;
    int32_t tiles, groups;
    int64_t group_words, all_groups, bytes;
} bwd_biases;

/* words: of a thread of a warpgroup, for 64 keys and 64 queries. marks: bytes of a group. */
VISIBLE_FUNCTION bwd_biases bwd_biases_of(const fwd_args *a, int32_t q_tile, int32_t work_keys, int32_t words,
                                          int32_t marks)
{
    bwd_biases b;
    b.count = (int64_t)(a->bias_stride.batch != 0 ? a->batch : 1) * (a->bias_stride.head != 0 ? a->q_heads : 1);
    b.tiles = bwd_tiles(a, q_tile);
    b.groups = (a->kv_len + work_keys - 1) / work_keys * (work_keys / 64);
    b.group_words = q_tile / 64 * 128 * words;
    b.all_groups = b.count * b.tiles * b.groups;
    b.bytes = b.all_groups * (b.group_words * 4 + marks);
    return b;
}

#endif
