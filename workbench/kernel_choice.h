/* Which kernels a command is about, and how they are described. */
#ifndef WORKBENCH_KERNEL_CHOICE_H
#define WORKBENCH_KERNEL_CHOICE_H

#include <jansson.h>
#include <stdbool.h>

#include "internal.h"

/* Every kernel there is: the table, then the variants that were loaded (variant.h). */
size_t kernel_total(void);
const acr__kernel *kernel_at(size_t index);

/* True when a kernel is meant by -k: its name, its family, or a shell pattern ('fwd_mma_*_d64_*'). NULL means all; or,
 * where variants are loaded, the kernels that these are variants of. Variants themselves are always meant. */
bool kernel_matches(const acr__kernel *kernel, const char *pattern);

/* Checks that a pattern means at least one kernel; prints what is wrong and returns false otherwise. */
bool kernel_pattern_known(const char *pattern);

/* "cuda" or "cpu". */
const char *backend_name(acr__backend_id backend);

/* The first problem-independent reason why a kernel cannot run on a device, or NULL: backend or architecture. */
const char *kernel_not_here(const acr__kernel *kernel, const acr__device *device);

/* A kernel's description: name, family, backend, dtype, dims, tiles, stages, architectures, traits, image. */
json_t *kernel_json(const acr__kernel *kernel);

/* "0123456789abcdef": the digest of the machine code. */
void digest_text(char out[17], const acr__kernel *kernel);

#endif
