/* Integers of .npy files, and how arrays reach the device: shared by cmd_run.c and run_features.c. */
#ifndef WORKBENCH_RUN_NUMBERS_H
#define WORKBENCH_RUN_NUMBERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/npy.h"
#include "internal.h"

bool run_holds_integers(const npy_array *a);

/* An integer of a file; its data may be less aligned than its type. */
int64_t run_integer_at(const npy_array *a, int64_t index);

/* Allocates memory of the device and copies bytes into it; *to is written even where the copy fails, for the caller to
 * free. */
acr_status run_upload(acr__backend_device *device, void **to, const void *from, size_t bytes);

/* Integers of a file as int32; one outside [0, most] is refused by the option's name and its index. */
acr_status run_upload_integers(acr__backend_device *device, void **to, const npy_array *a, int64_t most,
                               const char *option);

#endif
