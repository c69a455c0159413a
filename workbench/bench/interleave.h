/* Two sides timed in turn, so that both meet the same drift: blocks of A B B A, or by chance B A A B, four samples a
 * slot. What the blocks say is for stats.h to judge. Knows no device: whatever can take samples can be a side. */
#ifndef WORKBENCH_INTERLEAVE_H
#define WORKBENCH_INTERLEAVE_H

#include <stdbool.h>
#include <stdint.h>

#include "acromion.h"
#include "stats.h"

/* Takes `count` samples, one straight after another, and writes the seconds a launch of each. */
typedef acr_status interleave_sample(void *arg, int count, double *seconds);

typedef struct interleave_side {
    interleave_sample *sample;
    void *arg;
} interleave_side;

enum {
    INTERLEAVE_SLOT_SAMPLES = 4,
    INTERLEAVE_BLOCK_SAMPLES = 2 * INTERLEAVE_SLOT_SAMPLES, /* of each side */
    INTERLEAVE_BLOCKS_SEARCH = 13,
    INTERLEAVE_BLOCKS_PUBLISH = 50
};

typedef struct interleave_design {
    int blocks;
    double warm_up_s; /* both sides in turn for this long before the first block */
    /* Where the first block shows that all would take longer than this, fewer are made, but INTERLEAVE_BLOCKS_SEARCH at
     * least. Only durations decide, never what they say about the sides. */
    double budget_s;
    uint64_t seed; /* of the choice which blocks are mirrored */
    /* Asked before each block and after each of its slots: true when samples are not to be trusted here (a throttled
     * clock). The block is then discarded and made again. NULL = never. */
    bool (*disturbed)(void *arg);
    void *disturbed_arg;
    /* Asked after each block with all blocks so far: true when no more are wanted. Whoever answers by what the samples
     * say has the error of many looks to answer for. NULL = all are made. */
    bool (*enough)(void *arg, const stats_block *views, int blocks);
    void *enough_arg;
} interleave_design;

typedef struct interleave_result {
    int blocks, discarded;
    double *baseline_us, *candidate_us; /* INTERLEAVE_BLOCK_SAMPLES a block */
    stats_block *views;                 /* the same by blocks, as stats_compare takes them */
} interleave_result;

/* Times both. The caller frees with interleave_free. Errors: those of the sides; ACR_NO_MEMORY; ACR_DEVICE_FAULT
 * when more blocks than are wanted had to be discarded. */
acr_status interleave_run(interleave_result *out, const interleave_side *baseline, const interleave_side *candidate,
                          const interleave_design *design);
void interleave_free(interleave_result *result);

#endif
