/* Watching the GPU while it is measured: its state before and after every block of samples, which blocks are not to be
 * trusted, and what of it all a record keeps. */
#ifndef WORKBENCH_WATCH_H
#define WORKBENCH_WATCH_H

#include <jansson.h>

#include "nvml.h"

typedef struct watch {
    gpu_monitor *monitor; /* NULL: nothing is known, and nothing discarded */
    double nominal_hz;
    gpu_state first, last; /* of all that were seen */
    gpu_state low, high;   /* field by field: the least and the most; reasons: all that were ever given, in high */
    int seen;
} watch;

/* Opens; close with watch_close. */
void watch_open(watch *w, const acr__device *device, int32_t ordinal);
void watch_close(watch *w);

/* Forgets what was seen. */
void watch_restart(watch *w);

/* Looks. Returns true when the GPU is throttled now, so that the block that ends or begins here does not count. arg: a
 * watch. */
bool watch_disturbed(void *arg);

/* {"nominal_mhz", "before", "after": {"sm_mhz", "memory_mhz", "temperature_c", "power_w", "reasons"} or null, "range":
 * {"sm_mhz": [low, high], ...} or null}: of what was seen since the restart; fields that are not known are left out. */
json_t *watch_json(const watch *w);

#endif
