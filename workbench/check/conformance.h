/* The correctness gate: one kernel on one problem against its reference (docs/internals/design.md, Correctness). */
#ifndef WORKBENCH_CONFORMANCE_H
#define WORKBENCH_CONFORMANCE_H

#include <jansson.h>
#include <stdbool.h>

#include "execution.h"

/* Recorded for passes too. */
typedef struct verdict {
    bool pass;
    int64_t rows; /* compared; all others were looked at for NaN */
    double err_max, err_rms, err_lse;
    double tol_max, tol_rms, tol_lse, tol_floor;
    char failure[400]; /* "" for a pass, else the first thing that is wrong */
} verdict;

/* Runs a kernel and judges it: output and log-sum-exp within tolerance, every element written, nothing else written,
 * inputs unchanged, a second run bitwise equal (with ACR_FAST_ATOMICS: right as well), a row's bits the same beside
 * rows that are zero, NaN, infinite or huge, with ACR_INVARIANT also in other batches (invariance.h), and without mask
 * and kv_lens the order of the keys of no effect.
 * problem is canonical and has the reference's mathematics. Returns ACR_DEVICE_FAULT or ACR_NO_MEMORY when no verdict
 * was possible because the device is lost or the host is short of memory (verdict->failure says so too); every other
 * failure of the kernel is a verdict and ACR_OK. */
acr_status conformance_check(verdict *out, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                             const reference *ref);

/* The same with `reruns` runs after the first, at least 0, each to give its bits. */
acr_status conformance_check_reruns(verdict *out, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                                    const reference *ref, int reruns);

/* The comparison alone: what a run left behind, against the reference. */
void conformance_judge(verdict *out, const reference *ref, const run_output *output);

/* Adds its errors and tolerances to a JSON object; null where there is none. */
void verdict_add_json(json_t *to, const verdict *v);

/* The largest of the three errors, each as a share of its tolerance. */
double verdict_share(const verdict *v);

#endif
