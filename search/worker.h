/* Judging by a command that may run on another machine: `acromion judge` takes one JSON job on its standard input and
 * writes one JSON result to its standard output. Whatever starts it (srun, mpirun, ssh, a script, or nothing) is a
 * launcher; how many run at once is its user's to say (docs/manual/evolve.md, "Workers").
 *
 * A job holds all that a judgement needs: what the child of gates.h is told, and the files of the candidate and of the
 * incumbent. So the two machines share no folder. The judge is trusted with the hidden seed and passes it on to nobody:
 * a job travels on a pipe, never in a command line, and lies in a folder that only its user can read. The candidate
 * runs where it always does, in a child of the judge and on a CPU in the sandbox there. */
#ifndef SEARCH_WORKER_H
#define SEARCH_WORKER_H

#include <jansson.h>
#include <stdbool.h>

#include "base/process.h"

enum {
    WORKER_PLACE_MAX = 512
};

/* Where and how judgements are asked for. */
typedef struct worker {
    const char *launcher; /* a shell's words before the program's; "" = none: the judge runs here */
    const char *program;  /* this one, where the launcher starts it */
    int number;           /* from 0: ACROMION_WORKER in the launcher's environment */
    double wait_s; /* beside the job's own time: for a scheduler's queue, and for who times on the device before */
    const volatile int *stop; /* 2 ends it */
} worker;

/* One judgement. */
typedef struct worker_job {
    const json_t *job;                 /* judge_job_json's, without references */
    const char *candidate, *incumbent; /* folders; NULL = none */
    double timeout_s;                  /* of the child */
    bool timed;                        /* the child has its device to itself */
} worker_job;

/* What became of the judge's child. */
typedef struct worker_answer {
    json_t *result;               /* what the child wrote; NULL = it did not live to; the caller's to decref */
    process_outcome outcome;      /* the child's */
    char place[WORKER_PLACE_MAX]; /* where it last was; "" = it never began */
} worker_answer;

/* Has a job done. The files folder/NAME.job.json, .result.json and .log are made on the way. Errors: ACR_IO with the
 * reason that there is no answer: the worker is lost. */
acr_status worker_ask(worker_answer *out, const worker *w, const worker_job *job, const char *folder, const char *name);

/* The other end: does the job that stdin holds and writes its result to stdout. Returns the exit code. */
int worker_serve(void);

/* The last line of a child's log that says where it was; "" where there is none. */
void worker_last_place(char out[WORKER_PLACE_MAX], const char *log_path);

#endif
