/* Measuring a kernel. One mode so far, stream (docs/measuring.md); others (rotating, cold, call) are further functions
 * with the same result. */
#ifndef WORKBENCH_TIMER_H
#define WORKBENCH_TIMER_H

#include "internal.h"
#include "stats.h"

typedef struct timer_limits {
    double stretch_s; /* a sample covers at least this long: launches = stretch / time of one */
    double warm_up_s;
    double budget_s; /* about how long to sample */
    int samples_min, samples_max;
} timer_limits;

/* 200 us a sample, 50 ms of warm-up, 200 samples or about 2 s, but 10 samples at least. */
#define TIMER_LIMITS_DEFAULT                                                                                           \
    {                                                                                                                  \
        200e-6, 50e-3, 2.0, 10, 200                                                                                    \
    }

typedef struct timing {
    int launches;        /* back to back in each sample */
    stats_summary stats; /* of microseconds a launch, one sample a replay */
} timing;

/* Stream mode: a sequence of back-to-back launches over the same buffers, replayed; a sample is the time of a replay
 * divided by its launches. Errors: those of the backend; ACR_NO_MEMORY. */
acr_status timer_stream(timing *out, acr__backend_device *device, acr__enqueue *enqueue, void *arg,
                        const timer_limits *limits);

#endif
