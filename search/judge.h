/* The child's side of the gates: this program again, with the command GATES_CHILD, a job file and a result file. It
 * loads what was compiled, checks it and times it; whatever becomes of it, the parent (gates.c) has lost nothing. Of a
 * foreign CPU kernel nothing runs in this process: it is called in processes of its own (sandbox.h).
 *
 * Job and result are JSON objects of one key a field of the structures below; the result also has cases and timings as
 * trial_result has them, raw samples included, and the wisdom key of the device. What they add up to is for the parent
 * to compute. */
#ifndef SEARCH_JUDGE_H
#define SEARCH_JUDGE_H

#include <jansson.h>

#include "check/reference.h"
#include "trial.h"

#define GATES_CHILD "--gates-child"

typedef enum judge_stage {
    STAGE_FLOORS,      /* of the problems on this machine */
    STAGE_CORRECTNESS, /* cases against the reference */
    STAGE_PERFORMANCE, /* plausibility, then interleaved with the incumbent */
    STAGE_PROFILE,     /* launches for a profiler to look at */
    STAGE_PROBE,       /* nothing: is there a device? */
    STAGE_JUDGEMENT    /* cuda: correctness and performance, with one start of the driver */
} judge_stage;

typedef struct judge_job {
    judge_stage stage;
    const char *backend;
    int32_t device;
    uint32_t threads;
    const char *candidate, *incumbent; /* folders */
    judge_problem *problems;
    size_t problem_count;
    uint64_t visible_seed, hidden_seed;
    int visible_cases, hidden_cases, blocks;
    double case_timeout_s, timing_timeout_s, budget_s;
    int references; /* a descriptor of references that need not be made (reference_cache.h); 0 = none */
    bool swapped;   /* the candidate takes the incumbent's place in the blocks */
    bool model_clock;
    bool race;     /* blocks end where the interval says that the candidate cannot win (judge_is_slower) */
    bool locks;    /* STAGE_JUDGEMENT: it shares the device with others that check, and times alone (device_lock.h) */
    bool thorough; /* more samples of large tensors are looked at: a claim depends on it */
} judge_job;

json_t *judge_job_json(const judge_job *job);

/* What every judgement with the job's seeds needs references of, whatever the candidate: the task's problems. Returns
 * how many, at most JUDGE_REQUESTS for each problem; their problems are the job's. */
enum {
    JUDGE_REQUESTS = 12
};
size_t judge_requests(reference_request *out, const judge_job *job);

/* Whether the blocks so far say that a candidate is slower: the interval of its speed-up, of six blocks or more, ends
 * below 1. Looking after every block makes it say so once in 28 times of two that are equally fast, and once in 300 of
 * one that wins two blocks of three: what is dropped wrongly is lost, what is claimed is not touched. */
bool judge_is_slower(const stats_block *views, int blocks);

/* Does the job of a file, writes the result file. Returns the exit code. */
int judge_run(const char *job_path, const char *result_path);

#endif
