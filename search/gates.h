/* The gates of the evolutionary search: what a candidate has to pass, in order, before a figure of it is believed
 * (docs/internals/design.md, Evolution).
 *
 *     gates_open  ->  gates_prepare (any thread, in parallel)  ->  gates_judge (one at a time on a device)
 *                 ->  gates_confirm (winners: fresh process, fresh seeds)  ->  gates_close
 *
 * Everything that a candidate could break happens in child processes with limits of time, memory and files: the
 * compilers, and this program itself with the hidden command GATES_CHILD, which loads, checks and times. A crash, a
 * hang or a lost CUDA context ends the child and costs one trial. A program that uses the gates calls gates_child first
 * of all in main.
 *
 * Seeds: inputs of the visible cases come from visible_seed, of the hidden ones from hidden_seed, of a confirmation
 * from hidden_seed and its round. Proposers may be told of visible cases only (trial_case.hidden). */
#ifndef SEARCH_GATES_H
#define SEARCH_GATES_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/process.h"
#include "candidate.h"
#include "trial.h"

/* ---- Setup ---- */

typedef struct gates_problem {
    acr_problem problem; /* canonical */
    double weight;       /* > 0 */
} gates_problem;

typedef enum gates_clock {
    GATES_CLOCK_REAL,
    /* For tests of the search: nothing is timed; samples are what the description's `cost` says for a fixed
     * machine (a source: a function of its identity), with noise from the identity, the problem and the seeds. The same
     * candidate gets the same figures in every run. */
    GATES_CLOCK_MODEL
} gates_clock;

/* Whether the store has seen this machine code and launch: writes what to call the earlier trial. Asked by gates_judge,
 * on its caller's thread. */
typedef bool gates_find(void *arg, const char *identity, char original[64]);

typedef struct gates gates;

typedef struct gates_setup {
    const char *backend; /* "cuda", "cpu" */
    int32_t device;
    uint32_t threads; /* cpu: lanes while timing, and threads of the judge; 0 = all */
    const gates_problem *problems;
    size_t problem_count;
    const candidate
        *incumbent; /* what performance is measured against; must pass the gates up to correctness. NULL: there
                                   is none, and no candidate passes plausibility */
    uint64_t visible_seed, hidden_seed;
    int visible_cases, hidden_cases; /* of the correctness gate, beside the task's own problems; 0 = 8 and 8 */
    int blocks;                      /* of interleaved timing; 0 = INTERLEAVE_BLOCKS_SEARCH */
    double compile_timeout_s, case_timeout_s, timing_timeout_s; /* 0 = 120, 20 a case, 60 a problem */
    gates_clock clock;
    bool race;               /* gates_judge stops timing a candidate once its interval says that it cannot win */
    const char *folder;      /* exists; artefacts and compiler logs go into folder/<trial>/ */
    const char *source_root; /* the tree: src, include, cmake; NULL = ACROMION_SOURCE, or the tree of the build */
    const char *cc, *nvcc;   /* NULL = CC or cc; NVCC or nvcc, as found on PATH */
    const char *program;     /* whose main calls gates_child; NULL = /proc/self/exe */
    const char *launcher;    /* not NULL: children are started by `LAUNCHER PROGRAM judge`, on whichever machine
                                (worker.h); theirs is the device of the setup's ordinal, of the same kind */
    int worker;              /* with launcher: its number, from 0 */
    gates_find *find;        /* NULL = nothing is a duplicate */
    void *find_arg;
    const gates *first;       /* not NULL: the gates of the same setup on another device, which must be of the same kind
                                 and outlive these: floors, references and the compiled incumbent are theirs */
    const volatile int *stop; /* not NULL: children are ended and HARNESS_FAILED "stopped" returned once *stop is set
                                 to 2 */
} gates_setup;

/* Opens the device for its description and compiles the incumbent. Copies what it needs of the setup, the problems and
 * the incumbent included. Errors: those of acr_ctx_create; ACR_UNSUPPORTED with the reason that the incumbent does not
 * pass, or that the device is of another kind than the first; ACR_IO for the folder; ACR_NO_MEMORY. */
acr_status gates_open(gates **out, const gates_setup *setup);
void gates_close(gates *g);

/* The device as the candidates' why_not and cost see it. */
const acr__device *gates_device(const gates *g);
const trial_result *gates_incumbent(const gates *g); /* its resources, identity and cases */

/* ---- The gates ---- */

/* A compiled candidate: files in folder/<trial>/. Immutable, shared by threads. */
typedef struct artefact artefact;
void artefact_free(artefact *a);
const char *artefact_folder(const artefact *a);

/* Admission, compile, resources, and the digest of identity. Safe from several threads at once, with different trials.
 * trial is the name of its folder under the setup's, [A-Za-z0-9_-]+; what is there already is replaced. result is
 * initialised by it. *out is NULL when a gate refused (result says which); the caller frees it with artefact_free. */
void gates_prepare(artefact **out, gates *g, const candidate *c, const char *trial, trial_result *result);

/* With a launcher HARNESS_FAILED by those that follow means that the worker was lost, unless *stop is 2. */

/* The rest of identity, correctness, plausibility and performance, of what gates_prepare made, into the same result.
 * One at a time with the same gates; at once on several devices, each with its own. */
void gates_judge(gates *g, const artefact *a, trial_result *result);

/* Takes over the noise floor that another's gates_control has shown on the same device. */
void gates_share_control(gates *g, const gates *from);

/* Whether the launcher still starts something that judges, on a device of the run's kind. Errors: ACR_IO with the
 * reason. */
acr_status gates_probe(const gates *g);

/* Both. */
void gates_run(gates *g, const candidate *c, const char *trial, trial_result *result);

/* The measurement that may be published: GATES_CONFIRM_PROCESSES fresh processes, each with inputs of fresh hidden
 * seeds (round 0, 1, ... counts the confirmations of a run) and a search's blocks, roles exchanged in every second;
 * the interval is that of the median over processes. result is initialised by it; VALID, UNCONFIRMED when the interval
 * does not exclude 1 / (1 + noise floor) .. 1 + noise floor, or what else happened. */
enum {
    GATES_CONFIRM_PROCESSES = 6 /* no fewer give an interval of 95 % without assuming a distribution */
};
void gates_confirm(gates *g, const artefact *a, int round, trial_result *result);

/* Counters of an elite: runs it TRIAL_PROFILE_LAUNCHES times on one of the problems in a child that `profiler` (a
 * NULL-terminated command line, to which the child's is added) wraps, for at most timeout_s; the kernel's name there is
 * GATES_PROFILE_KERNEL. What the profiler prints goes to a file, which the caller reads; nothing is timed. a: NULL =
 * the incumbent. For cuda: a foreign CPU kernel has no business outside of its sandbox. */
#define GATES_PROFILE_KERNEL "acr_candidate"
typedef struct gates_profiled {
    trial_result result;     /* VALID: all launches were made; or HARNESS_FAILED with the reason */
    process_outcome outcome; /* of the profiler; code -1 where it was not started */
    char log[PATH_MAX];      /* the file's path; "" where there is none */
} gates_profiled;
void gates_profile(gates_profiled *out, gates *g, const artefact *a, size_t problem, const char *const *profiler,
                   double timeout_s);

/* The incumbent against itself, which sets the noise floor of all later comparisons (1 % before). */
void gates_control(gates *g, trial_result *result);

/* ---- The child ---- */

/* First of all in main: where argv is that of a child, does its work and returns true with its exit code. */
bool gates_child(int argc, char **argv, int *exit_code);

#endif
