/* Where a survey of a bias (bias_survey.cuh) has its part of the workspace, what a CTA keeps of it in shared memory,
 * and which biases are looked at. Plain C, so that the host knows, too. */
#ifndef ACR_DEVICE_ATTENTION_BIAS_SURVEY_H
#define ACR_DEVICE_ATTENTION_BIAS_SURVEY_H

#include <stdint.h>

#include "fwd_args.h"

enum {
    SURVEY_SEEN_AT = 32, /* bytes: behind the queue's counter and four of the survey, a multiple of 16 */
    SURVEY_UNIT_BYTES = 48
};

/* What stays the same in a launch, in shared memory: it takes long to find, and roles have no registers for it. */
typedef struct survey_plan {
    uint32_t section_heads; /* find_surveyed_section */
    /* of a survey: */
    int32_t fixed;  /* first_ranks: of a head's query tiles so many, its last ones, come first in the queue: the tiles
                       with numbers below gridDim.x have them */
    int32_t first;  /* of each part so many query tiles, its last ones, are looked at before work begins */
    uint32_t ready; /* for wait_for_ranks */
} survey_plan;

/* Boolean masks, and biases that all heads share: those are masks as a rule. type: FWD_BIAS_*, of at most 16 bits. */
VISIBLE_FUNCTION int survey_is_wanted(int32_t type, int64_t head_stride)
{
    return type == FWD_BIAS_MASK || head_stride == 0;
}

/* Bytes of the workspace; query_tiles: of all entries and heads that the bias tells apart. */
static inline int64_t survey_bytes(int64_t query_tiles, int64_t key_tiles)
{
    return SURVEY_SEEN_AT + query_tiles * (SURVEY_UNIT_BYTES + key_tiles);
}

#endif
