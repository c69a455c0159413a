/* What becomes of a trial: how far it came, what was measured, and why it failed. The gates (gates.h), the compilers
 * (build.h) and the child that judges (judge.h) all write into it. */
#ifndef SEARCH_TRIAL_H
#define SEARCH_TRIAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bench/stats.h"
#include "internal.h"

/* X(identifier, stable name, what it means). Names go into stores and never change their meaning. */
#define TRIAL_STATUSES(X)                                                                                              \
    X(VALID, "valid", "passed every gate; the comparison says whether it is faster")                                   \
    X(DUPLICATE, "duplicate", "the machine code and launch of an earlier trial")                                       \
    X(INADMISSIBLE, "inadmissible", "source, descriptor or object contain what no candidate may contain")              \
    X(COMPILE_FAILED, "compile_failed", "the compiler refused it")                                                     \
    X(COMPILE_TIMEOUT, "compile_timeout", "the compiler took too long")                                                \
    X(RESOURCES, "resources", "registers spill, or it needs more than the device has")                                 \
    X(UNSUPPORTED, "unsupported", "it cannot run one of the problems, by its own word")                                \
    X(WRONG, "wrong", "a case failed")                                                                                 \
    X(CRASHED, "crashed", "its process died, or the device reported a fault")                                          \
    X(HUNG, "hung", "it did not end within its time")                                                                  \
    X(FORBIDDEN, "forbidden", "it attempted a system call")                                                            \
    X(IMPLAUSIBLE, "implausible", "faster than physics, or than a second look from a fresh process")                   \
    X(UNCONFIRMED, "unconfirmed", "the confirmation did not repeat what the search saw")                               \
    X(LOST, "lost", "its worker was lost: no verdict, and no budget is used")                                          \
    X(HARNESS_FAILED, "harness_failed", "not the candidate's doing: no memory, no device, no disk")

typedef enum trial_status {
#define X(identifier, name, meaning) TRIAL_##identifier,
    TRIAL_STATUSES(X)
#undef X
    TRIAL_STATUS_COUNT
} trial_status;

/* X(identifier, stable name), in order. */
#define TRIAL_GATES(X)                                                                                                 \
    X(ADMISSION, "admission")                                                                                          \
    X(COMPILE, "compile")                                                                                              \
    X(RESOURCES, "resources")                                                                                          \
    X(IDENTITY, "identity")                                                                                            \
    X(CORRECTNESS, "correctness")                                                                                      \
    X(PLAUSIBILITY, "plausibility")                                                                                    \
    X(PERFORMANCE, "performance")                                                                                      \
    X(PROFILE, "profile")                                                                                              \
    X(CONFIRMATION, "confirmation")

typedef enum trial_gate {
#define X(identifier, name) GATE_##identifier,
    TRIAL_GATES(X)
#undef X
    GATE_COUNT
} trial_gate;

const char *trial_status_name(trial_status status);
const char *trial_status_meaning(trial_status status);
/* Returns false for an unknown name. */
bool trial_status_parse(const char *name, trial_status *out);
const char *trial_gate_name(trial_gate gate);
bool trial_gate_parse(const char *name, trial_gate *out);

/* What ptxas and the object say. -1 = not known: there is none on that backend, or the gate was not reached. */
typedef struct trial_resources {
    int64_t registers;   /* a thread; cuda */
    int64_t smem_bytes;  /* static and dynamic, a CTA; cuda */
    int64_t spill_bytes; /* stores and loads; cuda */
    int64_t stack_bytes; /* cuda */
    int64_t code_bytes;  /* machine code */
    int64_t ctas_per_sm; /* cuda: by registers, shared memory and threads */
} trial_resources;

/* One case of the correctness gate, passed or not; those after the first failure were not run. */
typedef struct trial_case {
    char problem[ACR_PROBLEM_TEXT_MAX];
    char inputs[16]; /* input_kind_name */
    uint64_t seed;
    bool hidden; /* not to be shown to proposers */
    bool pass;
    double err_max, err_rms, err_lse, tol_max, tol_rms, tol_lse;
} trial_case;

/* One problem of the task against the incumbent, interleaved. */
typedef struct trial_timing {
    char problem[ACR_PROBLEM_TEXT_MAX];
    double weight;
    double floor_us;
    size_t samples;                      /* of each series; INTERLEAVE_BLOCK_SAMPLES a block, in order */
    double *incumbent_us, *candidate_us; /* raw, microseconds a launch */
    stats_summary incumbent, candidate;
    stats_comparison comparison; /* speedup = incumbent time / candidate time */
} trial_timing;

typedef struct trial_result {
    trial_status status;
    trial_gate gate;   /* the last gate entered: where it failed, or the last one passed */
    char detail[1024]; /* "" for a valid trial; else what is wrong, and where, in words */
    char original[64]; /* of a duplicate: what `find` called the earlier trial */
    char identity[33]; /* 128 bits in hexadecimal of machine code and launch; "" before the identity gate */
    trial_resources resources;
    size_t case_count, timing_count;
    trial_case *cases;
    trial_timing *timings; /* of performance, or of the confirmation */
    /* Over the weighted problems, block by block: the geometric mean of the speed-ups. NaN before performance. */
    stats_comparison overall;
    double gate_s[GATE_COUNT]; /* seconds spent, by the wall; 0 = not entered */
} trial_result;

/* An empty result that trial_result_free accepts. */
void trial_result_init(trial_result *result);
void trial_result_free(trial_result *result);

/* Back to no cases, no timings. */
void trial_cases_free(trial_result *result);
void trial_timings_free(trial_result *result);

/* A problem of the task as those who compile and judge want it. */
typedef struct judge_problem {
    char text[ACR_PROBLEM_TEXT_MAX];
    acr_problem problem; /* the text's, canonical */
    double floor_us;     /* 0 = none */
    double memory_us;    /* to move every byte of it from or to memory; 0 = not known */
} judge_problem;

enum {
    TRIAL_PROFILE_LAUNCHES = 21 /* of one problem, for a profiler, which measures the last */
};

#endif
