/* One of our kernels being timed: its buffers, one sample after another in one of the modes, and its outputs checked in
 * between, in the timed loop itself, so that a kernel cannot be right when it is checked and cheat when it is timed.
 *
 * In the first stretch of samples, and then in one of sixteen chosen by the seed (in fewer where the problem is large),
 * the values change their sign and the outputs are NaN before it is timed: what it leaves must be the output of the new
 * values. Then, after a drawn number of launches, four in a row get other values each and must each be right; after the
 * last sample sixteen. docs/manual/measuring.md says what this cannot catch, docs/internals/statistics.md how likely it
 * is to miss a kernel that leaves launches out. */
#ifndef WORKBENCH_SUBJECT_H
#define WORKBENCH_SUBJECT_H

#include "check/conformance.h"
#include "interleave.h"
#include "internal.h"
#include "mode.h"

typedef struct subject_request {
    acr_ctx *ctx;
    const acr__kernel *kernel;
    const acr_problem *problem;
    const reference *ref;
    bench_mode mode;
    uint32_t flags; /* acr_buffers.flags */
    uint64_t seed;  /* of which samples are checked and whose values are negated */
    /* Call modes: takes the samples from elsewhere, by calling subject_enqueue; NULL = the workbench's own loop. */
    interleave_sample *take;
    void *take_arg;
} subject_request;

typedef struct subject subject;

/* How many sets of buffers rotating mode takes, so that they exceed the cache five times: each launch then finds its
 * data in memory. *sets is at least 2. Errors: ACR_UNSUPPORTED, naming the
 * limit: an unknown cache size, more than SUBJECT_SETS_MAX sets, more than a quarter of the device's memory. */
enum {
    SUBJECT_SETS_MAX = 1024
};
acr_status subject_sets(int *sets, const acr__device *device, const demand *d);

/* Makes the buffers and, but for the call modes, the recording. Times nothing that counts. The kernel must have passed
 * conformance_check. The caller frees with subject_destroy (NULL is a no-op). Errors: as execution_create;
 * ACR_UNSUPPORTED when the mode cannot be had here. */
acr_status subject_create(subject **out, const subject_request *request);
void subject_destroy(subject *s);

/* Launches in one sample. */
int subject_launches(const subject *s);
/* Sets of buffers. */
int subject_set_count(const subject *s);

/* An interleave_sample; arg: a subject. A wrong output makes no error but shows in subject_judge. */
acr_status subject_sample(void *arg, int count, double *seconds);

/* An acr__enqueue: one execution, over the next set of buffers. For call modes timed from elsewhere. */
acr_status subject_enqueue(void *arg, void *stream);

/* After the last sample: every set of buffers once more, with other values, first as it is timed, then by single
 * launches back to back, then the last run; or the first thing that was wrong before. */
acr_status subject_judge(subject *s, verdict *out);

#endif
