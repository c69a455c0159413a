/* Running a foreign CPU kernel where it can do no harm: in a process of its own, forked before any expected result was
 * computed, without system calls (seccomp), with inputs and arguments read-only and its outputs in shared memory
 * between inaccessible pages. A process runs one sandbox at a time.
 *
 *     sandbox_begin(run, dtype, 5.0);         before references are made: the process inherits what memory holds
 *     kernel.run = sandbox_run;               executions with one thread: they come here
 *     fault = sandbox_end(text);
 *
 * A call that fails leaves its outputs as they were, so whoever judges them sees that they were not written;
 * sandbox_end says why. After a failure further calls return at once. */
#ifndef SEARCH_SANDBOX_H
#define SEARCH_SANDBOX_H

#include "internal.h"

typedef enum sandbox_fault {
    SANDBOX_FINE,
    SANDBOX_CRASHED,   /* a signal: it read or wrote where there is nothing, divided by zero, ... */
    SANDBOX_HUNG,      /* a call took longer than its time */
    SANDBOX_FORBIDDEN, /* a system call */
    SANDBOX_BROKEN     /* not the kernel's doing: no memory, no process */
} sandbox_fault;

/* Starts the process that runs `run`, a kernel for inputs of that type. Errors: ACR_NO_MEMORY; ACR_IO when processes or
 * shared memory are not to be had; ACR_UNSUPPORTED on a processor whose system calls this cannot filter. */
acr_status sandbox_begin(acr__cpu_run *run, acr_dtype dtype, double call_timeout_s);

/* An acr__cpu_run: the kernel's call, made there. workspace_bytes as the plan has it: see sandbox_set_workspace. */
void sandbox_run(const fwd_args *args, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch);

/* Bytes of the lane's scratch in the calls to come. */
void sandbox_set_workspace(size_t bytes);

/* The first failure so far, with its words. */
sandbox_fault sandbox_look(char text[160]);

/* Ends the process. Without sandbox_begin a no-op that returns SANDBOX_FINE. */
sandbox_fault sandbox_end(char text[160]);

/* For the process that times kernels: from now on it may compute, wait, take memory and write to descriptors that are
 * open, and nothing else; anything else ends it with SIGSYS. Errors: ACR_UNSUPPORTED. */
acr_status sandbox_seal(void);

#endif
