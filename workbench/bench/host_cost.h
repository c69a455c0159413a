/* What a call costs the host (docs/manual/measuring.md, Host cost): a bare launch by the driver, acr_execute,
 * acr_forward and the look-up of its plan, interleaved in one run; and the first call of a fresh process. */
#ifndef WORKBENCH_HOST_COST_H
#define WORKBENCH_HOST_COST_H

#include <jansson.h>
#include <stdbool.h>

#include "internal.h"
#include "machine/watch.h"

enum {
    HOST_COST_COLD_RUNS = 5
};

/* One fresh process: seconds to open the device (driver initialised, context made), and those of the first acr_forward
 * to the completion of its work. */
typedef struct host_cost_cold {
    double open_s, first_call_s;
} host_cost_cold;

/* Forks a process for each run, which opens its own context. Call it before this process opens any: the driver does not
 * survive a fork. Errors: those of the child's calls; ACR_IO when it cannot be made or dies. */
acr_status host_cost_measure_cold(host_cost_cold runs[HOST_COST_COLD_RUNS], const acr_ctx_options *options,
                                  const acr_problem *problem);

typedef struct host_cost_request {
    acr_ctx *ctx;
    const acr_problem *problem;
    const char *text; /* of the problem */
    const host_cost_cold *cold;
    watch *watched;
    bool quiet; /* no table */
} host_cost_request;

/* Measures, prints the table, appends the records. On a cpu there is no bare launch, and the table says so. */
acr_status host_cost_run(const host_cost_request *request, json_t *records);

#endif
