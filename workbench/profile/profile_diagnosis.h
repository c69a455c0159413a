/* What the counters of a launch say: which resource binds it, what its warps wait for, how far the floor is. */
#ifndef WORKBENCH_PROFILE_DIAGNOSIS_H
#define WORKBENCH_PROFILE_DIAGNOSIS_H

#include "machine/roofline.h"
#include "profile_counters.h"

typedef struct diagnosis {
    const char *bound;   /* the binding resource's name; "latency" when no unit is busy */
    double bound_pct;    /* how busy the busiest unit is; NaN when none was counted */
    const char *busiest; /* its name */
    double floor_share;  /* floor over the launch's time */
    char text[768];      /* one to four sentences */
} diagnosis;

/* A unit binds from here on: what keeps two thirds of its cycles busy while others depend on it leaves little room. */
#define DIAGNOSIS_BUSY_PCT 60.0

/* launch_s: what an empty launch takes on the device. */
void diagnose(diagnosis *out, const profile_counters *c, const floor_times *floor, const acr__device *device,
              double launch_s);

#endif
