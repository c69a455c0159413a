/* One measurement as the results files keep it (docs/manual/measuring.md). */
#ifndef WORKBENCH_BENCH_RECORD_H
#define WORKBENCH_BENCH_RECORD_H

#include <jansson.h>

#include "machine/environment.h"
#include "machine/watch.h"
#include "mode.h"
#include "stats.h"

/* What the records of one problem share. */
typedef struct bench_conditions {
    const acr__device *device;
    const char *problem; /* its text */
    bench_mode mode;
    double empty_us; /* cold mode: what no launch at all takes */
    const problem_work *work;
    const floor_times *floor;
    uint64_t seed;
    const watch *watched;
} bench_conditions;

/* One series of samples. */
typedef struct bench_series {
    const stats_summary *stats;
    int launches;  /* in a sample */
    int sets;      /* of buffers */
    int discarded; /* blocks */
    bool overlap;
    double err_max; /* NaN: unknown */
    double joules;  /* a launch, in sustained mode; NaN: unknown */
} bench_series;

/* The record without what says whose it is: "kernel" and "image", or "peer". */
json_t *bench_record(const bench_conditions *on, const bench_series *series);

/* Says that the forward pass went before the gradients, if it did. */
void bench_record_step(json_t *record, bool step);

/* Adds "kernel" and "image". */
void bench_record_kernel(json_t *record, const acr__kernel *kernel);

#endif
