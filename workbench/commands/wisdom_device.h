/* The device that a wisdom file's line names, which need not be here. */
#ifndef WORKBENCH_WISDOM_DEVICE_H
#define WORKBENCH_WISDOM_DEVICE_H

#include <stdbool.h>

#include "internal.h"

/* A device with this wisdom key: name/sm<arch>/<SMs> of a GPU, name/<isa>/<threads> threads of a CPU. False when it is
 * neither. */
bool wisdom_device(acr__device *out, const char *device_key);

#endif
