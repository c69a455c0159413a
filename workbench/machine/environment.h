/* Under what conditions something was measured: machine, driver, program, date. The GPU's own state: watch.h. */
#ifndef WORKBENCH_ENVIRONMENT_H
#define WORKBENCH_ENVIRONMENT_H

#include <jansson.h>
#include <stddef.h>

#include "internal.h"

/* The driver's version as its vendor writes it ("580.65.06"), or by its CUDA version ("CUDA 13.0"), or "none". */
void driver_text(char *out, size_t capacity, const acr__device *device);

/* The processor's name and how many of them this process may use. */
void host_text(char *out, size_t capacity);

/* Now, in UTC, as 2026-01-31T12:00:00Z. */
void date_text(char out[24]);

/* Adds device, driver, host, library, git_sha, dirty and date to a record. */
void environment_add(json_t *record, const acr__device *device);

#endif
