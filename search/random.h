/* The search's randomness: counter-based, keyed by (seed, trial, draw). A trial's draws depend on nothing that happened
 * before it, so a run that was cut short goes on with the same ones. */
#ifndef SEARCH_RANDOM_H
#define SEARCH_RANDOM_H

#include <stdint.h>

/* The draws of one trial, in order. */
typedef struct dice {
    uint64_t seed, trial, draw;
} dice;

/* stream tells apart what draws for the same trial number (an arm of the search, say). */
dice dice_of(uint64_t seed, uint64_t stream, int64_t trial);
/* Uniform in [0, count); count >= 1. */
int64_t dice_below(dice *d, int64_t count);
/* Uniform in [0, 1). */
double dice_unit(dice *d);

#endif
