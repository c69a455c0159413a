/* Which keys the rows of a query tile see: lengths, masks, and both together. */
#ifndef ACR_DEVICE_ATTENTION_VISIBLE_CUH
#define ACR_DEVICE_ATTENTION_VISIBLE_CUH

#include "cuda/device/isa/common.cuh"
#include "fwd_args.h"

typedef struct keys {
    int len;      /* keys of the batch entry that exist */
    int diagonal; /* with a mask, row i sees keys up to i + diagonal */
    int end;      /* one past the last key that any row of the tile sees */
    int full_end; /* one past the last key that every row sees */
} keys;

/* One past the last key that a row sees. Rows at and beyond q_len count as the last. */
DEV int keys_seen(const fwd_args &a, const keys &k, int row)
{
    return a.mask == FWD_MASK_NONE ? k.len : min(k.len, max(0, min(row, a.q_len - 1) + k.diagonal + 1));
}

/* Of the tile's rows from q_first on. Reads global memory: kv_lens. */
DEV keys find_keys(const fwd_args &a, int batch, int q_first, int rows)
{
    keys k;
    k.len = a.kv_lens == nullptr ? a.kv_len : min(max(a.kv_lens[batch], 0), a.kv_len);
    k.diagonal = a.mask == FWD_MASK_BOTTOM_RIGHT ? k.len - a.q_len : 0;
    k.end = keys_seen(a, k, q_first + rows - 1);
    k.full_end = keys_seen(a, k, q_first);
    return k;
}

#endif
