/* Where a survey of a bias (bias_survey.cuh) has its part of the workspace, and which biases are looked at. Plain C, so
 * that the host knows, too. */
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

/* Bytes of the workspace; query_tiles: of all entries and heads that the bias tells apart. */
static inline int64_t survey_bytes(int64_t query_tiles, int64_t key_tiles)
{
    return SURVEY_SEEN_AT + query_tiles * (2 * 16 + 4 * 4 + key_tiles);
}

#endif
