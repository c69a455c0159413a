/* Taking times: launches recorded until they fill a stretch, host calls, and a series of samples under watch. What is
 * timed and in which mode: timed_kernel.h. */
#ifndef WORKBENCH_TIMER_H
#define WORKBENCH_TIMER_H

#include "interleave.h"
#include "internal.h"
#include "machine/watch.h"
#include "stats.h"

/* Records `launches` units of something, ready for replay. */
typedef acr_status timer_record(acr__graph **out, void *arg, int launches);

enum {
    TIMER_LAUNCHES_MAX = 4000
};
/* A sample of recorded launches covers at least this long, so that the resolution of events does not matter. */
#define TIMER_STRETCH_S 200e-6

/* Records as many launches as fill stretch_s, a multiple of `granule` (1 <= granule <= TIMER_LAUNCHES_MAX). *launch_s
 * becomes the shortest time of one that was seen on the way. The caller frees *out with graph_free of its device's
 * backend. Errors: those of record and of the backend. */
acr_status timer_fill(acr__graph **out, double *launch_s, timer_record *record, void *arg, double stretch_s,
                      int granule);

/* Seconds a call, over `calls` host calls on the default stream, from the first to the completion of the last. */
acr_status timer_calls(acr__backend_device *device, acr__enqueue *enqueue, void *arg, int calls, double *seconds);

/* Seconds between the two events of cold mode when nothing is launched between them: part of every cold time. */
acr_status timer_empty_cold(acr__backend_device *device, double *seconds);

typedef struct timer_limits {
    double warm_up_s;
    double budget_s; /* about how long to sample */
    int samples_min, samples_max;
} timer_limits;

/* 50 ms of warm-up, 200 samples or about 2 s, but 16 samples at least. */
#define TIMER_LIMITS_DEFAULT                                                                                           \
    {                                                                                                                  \
        50e-3, 2.0, 16, 200                                                                                            \
    }

typedef struct timing {
    stats_summary stats; /* of microseconds */
    int discarded;       /* blocks of INTERLEAVE_BLOCK_SAMPLES samples taken while the GPU was throttled */
} timing;

/* Samples one kernel in blocks, after warming up; watched before and after each block. Errors: those of the sampling;
 * ACR_NO_MEMORY; ACR_DEVICE_FAULT when as many blocks had to be discarded as are wanted. */
acr_status timer_series(timing *out, interleave_sample *sample, void *arg, const timer_limits *limits, watch *watched);

#endif
