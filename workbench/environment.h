/* Under what conditions something was measured: machine, driver, clocks, temperature, program, date. */
#ifndef WORKBENCH_ENVIRONMENT_H
#define WORKBENCH_ENVIRONMENT_H

#include <jansson.h>
#include <stdbool.h>

#include "internal.h"

/* A GPU's state at one moment, from NVML; known is false where there is no NVML or no GPU. */
typedef struct gpu_state {
    bool known;
    unsigned sm_mhz, memory_mhz, temperature_c, power_mw;
} gpu_state;

/* Reads the state of the GPU that a device is. */
void gpu_state_read(gpu_state *out, const acr__device *device, int32_t ordinal);

/* NVML held open, to ask for the clock often. */
typedef struct gpu_monitor gpu_monitor;

/* NULL where there is no NVML, no GPU, or no memory. Close with gpu_monitor_close (NULL is a no-op). */
gpu_monitor *gpu_monitor_open(const acr__device *device, int32_t ordinal);
void gpu_monitor_close(gpu_monitor *monitor);

/* Whether the SM clock is below 75 % of nominal now. arg: a gpu_monitor, or NULL: never. */
bool gpu_monitor_throttled(void *arg);

/* {"nominal_mhz", "before": {"sm_mhz", "memory_mhz", "temperature_c", "power_w"} or null, "after"}. */
json_t *clocks_json(const acr__device *device, const gpu_state *before, const gpu_state *after);

/* The driver's version as its vendor writes it ("580.65.06"), or by its CUDA version ("CUDA 13.0"), or "none". */
void driver_text(char *out, size_t capacity, const acr__device *device);

/* The processor's name and how many of them this process may use. */
void host_text(char *out, size_t capacity);

/* Now, in UTC, as 2026-01-31T12:00:00Z. */
void date_text(char out[24]);

/* Adds device, driver, host, library, git_sha, dirty and date to a record. */
void environment_add(json_t *record, const acr__device *device);

#endif
