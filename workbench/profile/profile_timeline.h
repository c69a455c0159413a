/* A kernel built with clock stamps at its steps (cuda/device/isa/trace_points.cuh), and how many cycles each takes. */
#ifndef WORKBENCH_PROFILE_TIMELINE_H
#define WORKBENCH_PROFILE_TIMELINE_H

#include "check/execution.h"
#include "profile_ncu.h"

/* One step of one group of warps. Cycles are the SM's; medians and maxima are over CTAs. */
typedef struct timeline_step {
    int hits;                       /* in the median CTA */
    double first_cycles, first_max; /* from the CTA's first stamp to the step's first end */
    double each_cycles, each_max;   /* from the stamp before, whatever it was, to this one; mean of a CTA's hits */
    double share;                   /* of all cycles of the group, in the median CTA */
} timeline_step;

typedef struct timeline {
    profile_status status;
    char detail[PROFILE_TEXT_BYTES];
    char names[TRACE_STEPS][64];
    int steps; /* names in the source */
    timeline_step table[TRACE_GROUPS][TRACE_STEPS];
    bool group_seen[TRACE_GROUPS];
    int warps_of_group, ctas, ctas_of_grid; /* ctas: that left stamps */
    double cta_cycles, cta_max;             /* first to last stamp */
    double stamped_us, plain_us;            /* a launch, stream mode: what the stamps cost */
    bool serialised, spilled;               /* what the compiler did to the build with stamps, and not without */
} timeline;

typedef struct timeline_request {
    acr_ctx *ctx;
    const acr__kernel *kernel;
    const acr_problem *problem;
    const reference *ref;
    const char *source; /* folder src; NULL = look */
    double limit_s;     /* of the compiler */
} timeline_request;

/* Builds, launches, reads the stamps. What fails on the device is the returned acr_status; what keeps a timeline from
 * being made is out->status. */
acr_status timeline_run(timeline *out, const timeline_request *request);

/* The names of the trace points in a family's source, in order. Returns how many, at most TRACE_STEPS. */
int timeline_names(char names[TRACE_STEPS][64], const char *source);

/* The table from the words that the kernel left behind its workspace (trace_points.h). */
void timeline_evaluate(timeline *out, const uint32_t *words);

#endif
