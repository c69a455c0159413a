/* The internal interface, which the workbench and the tests use: what the public header does not offer. It needs the
 * static library; the shared one exports acromion.h only. The library's own files use some of it among themselves. */
#ifndef ACR_INTERNAL_H
#define ACR_INTERNAL_H

#include "backend.h"
#include "buffers.h"
#include "dtype.h"
#include "error.h"
#include "paging.h"
#include "problem.h"
#include "trace_points.h"
#include "wisdom.h"

/* ---- Contexts and plans ---- */

/* The open device of a context, for its memory, its clock and its description. */
acr__backend_device *acr__ctx_backend_device(const acr_ctx *ctx);

/* A plan with a kernel the caller chose, from the table or made up (a candidate: its image need not be in the table,
 * but must outlive the plan). Errors as acr_plan_create; ACR_UNSUPPORTED with why_not's reason. */
acr_status acr__plan_create_forced(acr_plan **out, acr_ctx *ctx, const acr_problem *problem, const acr__kernel *kernel);

/* Finds the plan that acr_forward would execute, or makes it, and executes nothing: the cost of finding it is part of
 * that of acr_forward. */
acr_status acr__plan_lookup(acr_ctx *ctx, const acr_problem *problem);

/* The table's kernel of that name, or NULL. */
const acr__kernel *acr__kernel_find(const char *name);

/* Digest of a kernel's machine code: XXH3 of its image; of a cpu kernel, of its name and the library's build. */
uint64_t acr__kernel_digest(const acr__kernel *kernel);

/* What ESTIMATE would choose among all kernels for a device that need not exist here; NULL when none can run it.
 * problem canonical. */
const acr__kernel *acr__choose(const acr_problem *problem, const acr__device *device);

/* What a kernel was estimated and seen to take. */
typedef struct acr__surveyed {
    const acr__kernel *kernel;
    double cost_s, median_s; /* of one execution in a stream of them */
    int samples;             /* fewer for a kernel that took more than twice the best one's time */
} acr__surveyed;

/* Times every candidate of a problem (canonical) side by side on the context's device, in scratch memory:
 * out[0..*count) by rising estimate, at most `capacity` of them. Wisdom is neither read nor written. Errors:
 * ACR_NO_MEMORY, ACR_DEVICE_FAULT. */
acr_status acr__survey(acr__surveyed *out, int capacity, int *count, acr_ctx *ctx, const acr_problem *problem);

/* Why a kernel cannot run a problem on a device, backend and architecture range included; NULL when it can. problem
 * canonical. Valid until the thread asks again. */
const char *acr__why_not(const acr__kernel *kernel, const acr_problem *problem, const acr__device *device);

/* Fill the arguments of an execution; problem canonical. Pointers are not checked. acr__fwd_args fills a forward
 * kernel's without pages and 8-bit caches, acr__bwd_args those of either pass, of a forward problem `fwd` alone, and
 * acr__fill_args all that a kernel is given. */
void acr__fwd_args(fwd_args *args, const acr_problem *problem, const acr_buffers *buffers, void *workspace);
void acr__bwd_args(bwd_args *args, const acr_problem *problem, const acr_buffers *buffers, void *workspace);
void acr__fill_args(acr__args *args, const acr_problem *problem, const acr_buffers *buffers, void *workspace);

#endif
