/* Ours against peers: one problem, every kernel wanted and every peer that can run it, timed interleaved in one process
 * and one context, judged by docs/internals/statistics.md. Peers come from one or several providers. */
#ifndef WORKBENCH_COMPARISON_H
#define WORKBENCH_COMPARISON_H

#include <jansson.h>
#include <stdbool.h>

#include "peer_interface.h"
#include "check/reference.h"
#include "internal.h"
#include "kernels/kernel_choice.h"
#include "mode.h"

enum {
    COMPARISON_PROVIDERS_MAX = 2
};

typedef struct comparison_request {
    acr_ctx *ctx;
    int32_t ordinal; /* of the device */
    const acr_problem *problem;
    const char *text; /* of the problem */
    const reference *ref;
    const problem_work *work;
    const floor_times *floor;
    const kernel_patterns *patterns; /* which of our kernels; none = the planner's */
    const char *planned;             /* the planner's, "" = none */
    const peer_provider *const *providers;
    int provider_count; /* 1..COMPARISON_PROVIDERS_MAX */
    bench_mode mode;
    double empty_us; /* cold mode: what no launch at all takes */
    bool overlap;    /* ours may overlap their predecessors */
    bool step;       /* timed_kernel_request.step, of peers as well */
    int blocks;
    uint64_t seed;
    bool quiet; /* no table */
} comparison_request;

typedef struct comparison_counts {
    int measured, refused; /* of our kernels */
} comparison_counts;

/* Measures, prints the table, appends one record for each entrant. A kernel that fails a gate is refused: said on
 * stderr and counted. A peer that cannot take part is named with its reason. Errors: ACR_NO_MEMORY, ACR_DEVICE_FAULT
 * and others that leave no measurement. */
acr_status comparison_run(const comparison_request *request, json_t *records, comparison_counts *counts);

/* What a ratio is worth in the project's own scale, judged by the lower end of its interval: "A+" 13 times as fast, "A"
 * 5, "B+" 3, "B" 2, "C" parity, which the noise floor allows to be a little below 1; else "-". */
const char *comparison_tier(double ratio_low, double noise_floor);

#endif
