/* The teaching ladder (src/cuda/kernels/ladder/README.md): what each rung adds, and what it was predicted to take
 * before it first ran. The document's tables repeat these predictions; tests/tree/ladder_docs.py compares. */
#ifndef WORKBENCH_LADDER_H
#define WORKBENCH_LADDER_H

#include "internal.h"

enum {
    LADDER_RUNGS = 6
};

/* Which rung a kernel is, or -1. */
int ladder_rung(const acr__kernel *kernel);

/* The rung's idea, a few words. */
const char *ladder_idea(int rung);

/* Predicted microseconds of a rung on an H200 at a problem (its text), NaN where nothing was predicted. */
double ladder_predicted_us(int rung, const char *problem);

/* How many times as fast as the rung below: predicted, NaN for rung 0 and where nothing was predicted. */
double ladder_predicted_gain(int rung, const char *problem);

#endif
