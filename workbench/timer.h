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

/* Records `launches` units of something, ready for replay. */
typedef acr_status timer_record(acr__graph **out, void *arg, int launches);

/* Records as many launches as fill stretch_s. *launch_s becomes the shortest time of one that was seen on the way. The
 * caller frees *out with graph_free of its device's backend. Errors: those of record and of the backend. */
acr_status timer_fill(acr__graph **out, double *launch_s, timer_record *record, void *arg, double stretch_s);

/* A timer_record's argument, and the timer_record: what an acr__enqueue enqueues. */
typedef struct timer_work {
    acr__backend_device *device;
    acr__enqueue *enqueue;
    void *arg;
} timer_work;
acr_status timer_record_work(acr__graph **out, void *work, int launches);

typedef struct timing {
    int launches;        /* back to back in each sample */
    stats_summary stats; /* of microseconds a launch, one sample a replay */
} timing;

/* Stream mode: a sequence of back-to-back launches over the same buffers, replayed; a sample is the time of a replay
 * divided by its launches. Errors: those of the backend; ACR_NO_MEMORY. */
acr_status timer_stream(timing *out, acr__backend_device *device, acr__enqueue *enqueue, void *arg,
                        const timer_limits *limits);

#endif
