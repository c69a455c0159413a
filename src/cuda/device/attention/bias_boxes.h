/* Which biases the copy engine brings in tiles (bias_tiles.cuh). Plain C, so that the host makes tensor maps for the
 * same ones. */
#ifndef ACR_DEVICE_ATTENTION_BIAS_BOXES_H
#define ACR_DEVICE_ATTENTION_BIAS_BOXES_H

#include <stdint.h>

#include "fwd_args.h"

/* Whether tensor maps can describe the bias: its rows lie apart, and all of it in units of 16 bytes. */
VISIBLE_FUNCTION int bias_fits_boxes(const fwd_args *a)
{
    const uint64_t most = (uint64_t)1 << 40; /* bytes of a stride */
    const uint64_t bytes = a->bias_type == FWD_BIAS_MASK ? 1 : a->bias_type == FWD_BIAS_F32 ? 4 : 2;
    const uint64_t row = (uint64_t)a->bias_stride.row, others = (uint64_t)(a->bias_stride.head | a->bias_stride.batch);
    return a->bias_type != FWD_BIAS_NONE && row != 0 && (row | others) < most / bytes &&
           ((uint64_t)(uintptr_t)a->bias | (row | others) * bytes) % 16 == 0;
}

#endif
