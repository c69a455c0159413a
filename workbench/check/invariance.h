/* Whether rows of a problem with ACR_INVARIANT have the same bits whatever is computed beside them. */
#ifndef WORKBENCH_INVARIANCE_H
#define WORKBENCH_INVARIANCE_H

#include "execution.h"
#include "reference.h"

/* Compares the rows of `whole`, what the kernel made of the reference's inputs, with those of smaller and larger
 * batches of the same batch entries: an entry alone, all entries twice in the opposite order over a longer kv_len, and
 * the last row of an entry by itself. What a kernel does not take goes to another that takes it. failure is empty where
 * the bits are the same. Errors: as execution_create, of the device and of memory alone. */
acr_status invariance_check(char failure[256], acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                            const reference *ref, const run_output *whole);

#endif
