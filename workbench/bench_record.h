/* One measurement as the results files keep it (docs/measuring.md). */
#ifndef WORKBENCH_BENCH_RECORD_H
#define WORKBENCH_BENCH_RECORD_H

#include <jansson.h>

#include "environment.h"
#include "roofline.h"
#include "stats.h"

/* What the records of one problem share. */
typedef struct bench_conditions {
    const acr__device *device;
    const char *problem; /* its text */
    const char *mode;    /* "stream" or "call" */
    const demand *demand;
    const floor_times *floor;
    uint64_t seed;
} bench_conditions;

/* The record without what says whose it is: "kernel" and "image", or "peer". err_max NaN: unknown. */
json_t *bench_record(const bench_conditions *on, const stats_summary *stats, int launches, bool overlap, double err_max,
                     const gpu_state *before, const gpu_state *after);

/* Adds "kernel" and "image". */
void bench_record_kernel(json_t *record, const acr__kernel *kernel);

#endif
