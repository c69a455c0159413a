/* One kernel bound to one reference: a plan, and device buffers made to catch mistakes.
 *
 * Every buffer is surrounded by guard bands, aligned to what the problem says and no better. All bytes that are no
 * element of an input are 0xff, a NaN in every type: guards, gaps between strided rows, keys beyond a batch entry's
 * length, rows of a packed tensor that belong to no sequence, outputs and workspace before a run. So what reads or
 * writes where it must not shows in the result or in a changed byte. */
#ifndef WORKBENCH_EXECUTION_H
#define WORKBENCH_EXECUTION_H

#include <stdbool.h>

#include "internal.h"
#include "reference.h"

typedef struct execution execution;

/* What device allocators give at least; a 128-byte line more or less is 20 % of a short kernel's time. */
enum {
    ALLOCATOR_ALIGNMENT = 256
};

/* Prepares a kernel for a problem (canonical, any strides; its scales are taken from the reference). reversed_keys
 * uploads keys and values in reverse order, which must not change the output when there is neither mask nor kv_lens.
 * flags are acr_buffers.flags. alignment, in bytes, is that of the tensors and no better: 0 = what the problem
 * promises, for checks; ALLOCATOR_ALIGNMENT for timing, since no program's tensors lie worse. The reference must
 * outlive the execution, which the caller frees with execution_destroy. Errors: as acr__plan_create_forced;
 * ACR_NO_MEMORY; ACR_DEVICE_FAULT. */
acr_status execution_create(execution **out, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                            const reference *ref, bool reversed_keys, uint32_t flags, size_t alignment);
/* Another with buffers of its own, to the same plan, which `first` must outlive. */
acr_status execution_create_sibling(execution **out, const execution *first, const reference *ref);
void execution_destroy(execution *e);

/* The problem as it is executed, with the reference's scales. */
const acr_problem *execution_problem(const execution *e);

/* Fills the outputs with NaN again, runs once and waits. execution_create has initialised the workspace, once. */
acr_status execution_run(execution *e);

/* Runs once more and waits: outputs and workspace stay as the last run left them. */
acr_status execution_rerun(execution *e);

/* Writes another reference's inputs in place of those that it was created with: of the same problem, with the same
 * scales and key lengths. No launch may be under way. That reference too must outlive the execution. Errors:
 * ACR_DEVICE_FAULT. */
acr_status execution_replace_inputs(execution *e, const reference *ref);
/* Changes what the next run must produce, and nothing about its cost: turns the sign of every value around (twice is as
 * before), and with it that of every output. execution_collect turns the output's back, so that the same reference
 * judges it. No work may be enqueued. */
acr_status execution_negate_values(execution *e);
/* Fills the outputs with NaN. No work may be enqueued. */
acr_status execution_poison(execution *e);
/* As new: another reference's inputs (execution_replace_inputs), outputs of NaN, and the workspace as a caller gives it
 * for the first time. Of `ref` only what q, k and v point to must outlive the execution; of a backward problem what o,
 * lse and d_o do, too. */
acr_status execution_renew(execution *e, const reference *ref);

/* The same from inputs that are on the device already, enqueued on a stream: sources[i] is a tensor as the reference's,
 * without gaps; NULL = that input stays. For executions that take them (execution_takes_device_inputs). What
 * execution_collect expects of inputs is not changed: execution_collect_outputs is for these. */
acr_status execution_renew_on_device(execution *e, const void *const sources[ACR__BUFFERS], void *stream);
/* Whether no tensor that execution_replace_inputs writes has gaps. */
bool execution_takes_device_inputs(const execution *e);
/* Whether q, k, v and the gradient of o are on the device as a reference has them. For the same executions. Errors:
 * ACR_NO_MEMORY, ACR_DEVICE_FAULT. */
acr_status execution_holds_inputs(bool *holds, const execution *e, const reference *ref);
/* Where a buffer lies on the device; NULL = there is none. */
const void *execution_buffer(const execution *e, acr__buffer which);

/* An acr__enqueue for acr__timing.graph_record and acr__backend.time: one execution of the `execution` that arg points
 * to. */
acr_status execution_enqueue(void *arg, void *stream);

/* Copies a part of the workspace, which must have it, to the host, or into it. */
acr_status execution_read_workspace(const execution *e, size_t offset, void *to, size_t bytes);
acr_status execution_write_workspace(const execution *e, size_t offset, const void *from, size_t bytes);

/* What a run left behind. */
typedef struct run_output {
    void *o;    /* [entries, q_heads, q_rows, v_dim] as the reference's tensors, in the output's type */
    float *lse; /* [entries, q_heads, q_rows]; NULL when the problem does not ask for it */
    size_t o_bytes, lse_bytes;
    /* Of a backward problem, which has no o and lse: dq, dk and dv as the reference's tensors, and dsinks [q_heads] or
     * NULL. */
    void *grads[4];
    size_t grad_bytes[4];
    char violation[64]; /* empty, or which buffer was written where it must not be */
} run_output;

/* Copies the outputs to the host and looks at every byte that must not have changed. Free with run_output_free. */
acr_status execution_collect(execution *e, run_output *out);
/* The same without a look at inputs and workspace, which can be much larger than the outputs. */
acr_status execution_collect_outputs(execution *e, run_output *out);
void run_output_free(run_output *output);

#endif
