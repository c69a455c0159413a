/* A made-up CPU kernel for tests of planning and execution that must not depend on a real one: it writes into o, as a
 * number, how often each query row was visited, and records how it was called. */
#ifndef ACR_TESTS_PROBE_KERNEL_H
#define ACR_TESTS_PROBE_KERNEL_H

#include "internal.h"

enum {
    PROBE_Q_TILE = 4,
    PROBE_SCRATCH_BYTES = 512 /* workspace of each lane */
};

/* The description: f16, head dims up to 256, long enough (by its cost) that every lane is worth waking. */
extern const acr__kernel probe_kernel;
/* The same without workspace. */
extern const acr__kernel probe_kernel_without_workspace;

/* What the calls since the last probe_reset saw. Lanes are counted, not numbered. */
typedef struct probe_record {
    int runs;           /* lanes run, over all executions */
    int lanes_max;      /* the largest `lanes` passed */
    int scratch_faults; /* scratch that was NULL, misaligned, or written by somebody else meanwhile */
} probe_record;
void probe_reset(void);
probe_record probe_read(void);

#endif
