/* Of a bias in tiles: which the copy engine brings, which are surveyed (bias_survey.cuh), and where a survey has its
 * part of the workspace. Plain C, so that the host knows, too. */
#ifndef ACR_DEVICE_ATTENTION_BIAS_SURVEY_H
#define ACR_DEVICE_ATTENTION_BIAS_SURVEY_H

#include <stdint.h>

#include "fwd_args.h"

enum {
    SURVEY_SEEN_AT = 16 /* bytes: behind the queue's counter and two of the survey */
};

/* Boolean masks, and biases that all heads share: those are masks as a rule. type: FWD_BIAS_*, of at most 16 bits. */
VISIBLE_FUNCTION int survey_is_wanted(int32_t type, int64_t head_stride)
{
    return type == FWD_BIAS_MASK || head_stride == 0;
}

/* Whether tensor maps can describe the bias: its rows lie apart, and all of it in units of 16 bytes. */
VISIBLE_FUNCTION int bias_fits_boxes(const fwd_args *a)
{
    const uint64_t most = (uint64_t)1 << 40; /* bytes of a stride */
    const uint64_t bytes = a->bias_type == FWD_BIAS_MASK ? 1 : a->bias_type == FWD_BIAS_F32 ? 4 : 2;
    const uint64_t row = (uint64_t)a->bias_stride.row, others = (uint64_t)(a->bias_stride.head | a->bias_stride.batch);
    return a->bias_type != FWD_BIAS_NONE && row != 0 && (row | others) < most / bytes &&
           ((uint64_t)(uintptr_t)a->bias | (row | others) * bytes) % 16 == 0;
}

/* Bytes of the workspace; query_tiles: of all entries and heads that the bias tells apart. */
static inline int64_t survey_bytes(int64_t query_tiles, int64_t key_tiles)
{
    return SURVEY_SEEN_AT + query_tiles * (2 * 16 + 4 * 4 + key_tiles);
}

#endif
