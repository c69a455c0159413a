/* One of our kernels being timed: its buffers, one sample after another in one of the modes, and its outputs checked in
 * between, in the timed loop itself, so that a kernel cannot be right when it is checked and cheat when it is timed.
 *
 * In the first stretch of samples, and then in one of sixteen chosen by the seed (in fewer where the problem is large),
 * the values change their sign and the outputs are NaN before it is timed: what it leaves must be the output of the new
 * values. Then, after a drawn number of launches, four in a row get other values each and must each be right; after the
 * last sample sixteen. docs/manual/measuring.md says what this cannot catch, docs/internals/statistics.md how likely it
 * is to miss a kernel that leaves launches out. */
#ifndef WORKBENCH_TIMED_KERNEL_H
#define WORKBENCH_TIMED_KERNEL_H

#include "check/conformance.h"
#include "interleave.h"
#include "internal.h"
#include "mode.h"
#include "pace.h"

typedef struct timed_kernel_request {
    acr_ctx *ctx;
    const acr__kernel *kernel;
    const acr_problem *problem;
    const reference *ref;
    bench_mode mode;
    uint32_t flags; /* acr_buffers.flags */
    uint64_t seed;  /* of which samples are checked and whose values are negated */
    bool step;      /* of a backward problem: each execution follows one of its forward pass, by the planner's kernel */
    const gpu_monitor *monitor; /* NULL: the energy of sustained mode is not known */
    /* Call modes: takes samples from elsewhere, by timed_kernel_enqueue; NULL = the workbench's own loop. */
    interleave_sample *take;
    void *take_arg;
} timed_kernel_request;

typedef struct timed_kernel timed_kernel;

/* How many sets of buffers rotating mode takes, so that they exceed the cache five times: each launch then finds its
 * data in memory. *sets is at least 2. Errors: ACR_UNSUPPORTED, naming the
 * limit: an unknown cache size, more than TIMED_KERNEL_SETS_MAX sets, more than a quarter of the device's memory. */
enum {
    TIMED_KERNEL_SETS_MAX = 1024
};
acr_status timed_kernel_sets(int *sets, const acr__device *device, const problem_work *d);

/* Makes the buffers and, but for the call modes, the recording. Times nothing that counts. The kernel must have passed
 * conformance_check. The caller frees with timed_kernel_destroy (NULL is a no-op). Errors: as execution_create;
 * ACR_UNSUPPORTED when the mode cannot be had here. */
acr_status timed_kernel_create(timed_kernel **out, const timed_kernel_request *request);
void timed_kernel_destroy(timed_kernel *s);

/* The kernel of the forward pass, "" where none goes before. */
const char *timed_kernel_forward(const timed_kernel *s);
/* Launches in one sample. */
int timed_kernel_launches(const timed_kernel *s);
/* Sets of buffers. */
int timed_kernel_set_count(const timed_kernel *s);

/* An interleave_sample; arg: a timed kernel. A wrong output makes no error but shows in timed_kernel_judge. */
acr_status timed_kernel_sample(void *arg, int count, double *seconds);

/* Sustained mode: of the launches so far that warmed the GPU up. */
pace_energy timed_kernel_energy(const timed_kernel *s);

/* An acr__enqueue: one execution, over the next set of buffers. For call modes timed from elsewhere. */
acr_status timed_kernel_enqueue(void *arg, void *stream);

/* After the last sample: every set of buffers once more, with other values, first as it is timed, then by single
 * launches back to back, then the last run; or the first thing that was wrong before. */
acr_status timed_kernel_judge(timed_kernel *s, verdict *out);

#endif
