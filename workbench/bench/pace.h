/* At which clock a kernel is timed. A GPU under full load is held at its power limit, where its clock depends on what
 * ran before: on the kernel beside which another is timed, too. So long kernels are timed twice: sustained, after
 * 120 ms of the same kernel, and at full clock, within a few milliseconds after a pause of 30. */
#ifndef WORKBENCH_PACE_H
#define WORKBENCH_PACE_H

#include "interleave.h"
#include "machine/nvml.h"
#include "mode.h"

/* What the launches under which a GPU warmed up took: joules of the whole card. launches 0: nothing is known. */
typedef struct pace_energy {
    double joules, launches;
} pace_energy;

typedef struct pace_request {
    interleave_sample *take; /* takes samples at once */
    void *arg;
    acr__backend_device *device;
    int launches;               /* in a sample */
    const gpu_monitor *monitor; /* NULL: energy is not known */
    pace_energy *energy;        /* is added to; NULL: nobody asks */
} pace_request;

#define PACE_WARM_UP_S 120e-3
#define PACE_PAUSE_S 30e-3
#define PACE_START_S 1e-3 /* after a pause, before a sample: clocks and caches come back */

/* Joules a launch; NaN where nothing is known. */
double pace_joules(const pace_energy *energy);

/* Takes samples in a mode of mode_is_paced. Errors: those of `take`;
 * ACR_UNSUPPORTED on a CPU, whose clock is not ours to hold. */
acr_status pace_samples(const pace_request *request, bench_mode mode, int count, double *seconds);

#endif
