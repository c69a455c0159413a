/* Running a foreign CPU kernel where it can neither learn nor do anything but compute.
 *
 * The kernel's object is laid out by us, without a loader (elf_object.h), in a process that holds nothing else: no
 * library, no heap, no vDSO, no descriptor, no environment, no expected result. Every other mapping is gone before the
 * first instruction of the kernel runs, and this process has looked that it is. There are no system calls (seccomp ends
 * the process at any) and no clock (the time stamp counter faults). Code, constants, inputs and arguments are
 * read-only; outputs, workspace and the queue are shared memory between inaccessible pages at random addresses.
 *
 * A call starts and ends by ptrace: registers and stack are set from here before each, and the kernel returns to an
 * address that faults. A process that has stopped is stopped: nothing goes on computing while its output is looked at.
 * The time of a call is what the kernel of the operating system has charged its process with (the longest lane's), less
 * the least that an empty call costs, both read from here.
 *
 *     sandbox_begin(SANDBOX_CANDIDATE, &code, ACR_FORWARD, dtype, 5.0);
 *     kernel.run = sandbox_run_candidate;     executions come here: lane 0's call does the work of all lanes
 *     fault = sandbox_end(SANDBOX_CANDIDATE, text);
 *
 * A call that fails leaves its outputs as they were, so whoever judges them sees that they were not written;
 * sandbox_end says why. After a failure further calls return at once. One thread alone may use sandboxes, and SIGCHLD
 * is blocked in it meanwhile. */
#ifndef SEARCH_SANDBOX_H
#define SEARCH_SANDBOX_H

#include "elf_object.h"
#include "internal.h"

typedef enum sandbox_slot {
    SANDBOX_CANDIDATE,
    SANDBOX_INCUMBENT,
    SANDBOX_SLOTS
} sandbox_slot;

typedef enum sandbox_fault {
    SANDBOX_FINE,
    SANDBOX_CRASHED,   /* a signal: it read or wrote where there is nothing, divided by zero, ... */
    SANDBOX_HUNG,      /* a call took longer than its time, as a process's time is counted */
    SANDBOX_FORBIDDEN, /* a system call, or a clock */
    SANDBOX_BROKEN     /* not the kernel's doing: no memory, no process */
} sandbox_fault;

/* code: what will run, a kernel of that pass for inputs of that type; it must outlive the sandbox. Errors:
 * ACR_NO_MEMORY; ACR_UNSUPPORTED on a system where processes cannot be held in like this, with what is missing. */
acr_status sandbox_begin(sandbox_slot slot, const elf_code *code, acr_pass pass, acr_dtype dtype,
                         double call_timeout_s);

/* Each an acr__cpu_run: the kernel's call, made in the slot's sandbox. */
acr__cpu_run sandbox_run_candidate, sandbox_run_incumbent;

/* Of the calls to come: the bytes of the workspace that a plan has, those at its beginning that all lanes share
 * (acr__kernel.shared), and for how many threads the others are. */
void sandbox_set_workspace(sandbox_slot slot, size_t bytes, size_t shared_bytes, int32_t threads);

/* Whether calls to come run on all of their lanes at once, in as many processes. Before: one lane does all the work, by
 * turns one that is alone, or one of three whose others never start. */
void sandbox_share_work(sandbox_slot slot, bool shared);

/* Seconds of the last call. */
double sandbox_seconds(sandbox_slot slot);

/* The first failure so far, with its words. */
sandbox_fault sandbox_look(sandbox_slot slot, char text[160]);

/* Ends the processes. Without sandbox_begin a no-op that returns SANDBOX_FINE. */
sandbox_fault sandbox_end(sandbox_slot slot, char text[160]);

#endif
