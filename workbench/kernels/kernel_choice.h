/* Which kernels a command is about, and how they are described. */
#ifndef WORKBENCH_KERNEL_CHOICE_H
#define WORKBENCH_KERNEL_CHOICE_H

#include <jansson.h>
#include <stdbool.h>

#include "internal.h"

/* Every kernel there is: the table, then the variants that were loaded (variant.h). */
size_t kernel_total(void);
const acr__kernel *kernel_at(size_t index);

/* What -k was given, as often as it was given. */
enum {
    KERNEL_PATTERNS_MAX = 32
};
typedef struct kernel_patterns {
    const char *items[KERNEL_PATTERNS_MAX]; /* a name, a family, or a shell pattern ('fwd_mma_*_d64_*') */
    int count;
} kernel_patterns;

/* Takes one more. Prints what is wrong and returns false when it means no kernel, or when there are too many. */
bool kernel_patterns_add(kernel_patterns *patterns, const char *pattern);

/* True when a kernel is meant by one of the patterns. Without any (count 0) all are meant; or, where variants are
 * loaded, the kernels that these are variants of. Variants themselves are always meant. */
bool kernel_matches(const acr__kernel *kernel, const kernel_patterns *patterns);

/* The planner's kernel for a problem. Errors: those of acr_plan_create; ACR_UNSUPPORTED. */
acr_status kernel_planned(const acr__kernel **out, acr_ctx *ctx, const acr_problem *problem);

/* "cuda" or "cpu". */
const char *backend_name(acr__backend_id backend);

/* The first problem-independent reason why a kernel cannot run on a device, or NULL: backend or architecture. */
const char *kernel_not_here(const acr__kernel *kernel, const acr__device *device);

/* "found by evolve, trial 12 (random search) of ...", of a kernel that a search came upon (found.def); else NULL. */
const char *kernel_found(const char *name);

/* A kernel's description: name, family, backend, dtype, dims, tiles, stages, architectures, traits, image, and
 * what kernel_found says. */
json_t *kernel_json(const acr__kernel *kernel);

/* "0123456789abcdef": the digest of the machine code. */
void digest_text(char out[17], const acr__kernel *kernel);

#endif
