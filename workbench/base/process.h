/* One child process: how it is started, what it may take, and how it ends. Its children belong to it: all of its
 * process group is ended with it, and it with this program. child.h collects what a child prints. */
#ifndef WORKBENCH_PROCESS_H
#define WORKBENCH_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "acromion.h"

typedef struct process_limits {
    double wall_s;
    int64_t memory_bytes;  /* of address space, each process; 0 = no limit (CUDA reserves far more than it uses) */
    int64_t file_bytes;    /* of any file written; 0 = no limit */
    int shared;            /* a descriptor that it has too, under the same number; 0 = none */
    const char *temporary; /* process_run: its TMPDIR, which the caller removes; NULL = this program's */
} process_limits;

typedef enum process_end {
    PROCESS_EXITED,
    PROCESS_SIGNALLED,
    PROCESS_TIMED_OUT,
    PROCESS_STOPPED /* because *stop said so */
} process_end;

typedef struct process_outcome {
    process_end end;
    int code; /* exit code, or the signal; -1 = it was not started */
    double wall_s;
} process_outcome;

/* Starts argv (argv[0] is a path, or looked up on PATH) with these descriptors as its standard streams, in a process
 * group of its own. environment: NULL = this program's. Every start is ended by process_wait. Errors: ACR_IO with the
 * reason that it cannot be started. */
acr_status process_start(pid_t *out, const char *const *argv, const char *const *environment, const int streams[3],
                         const process_limits *limits);

/* Waits until it ends by itself, end_s has come (as monotonic_s counts), or *stop is 2 (stop may be NULL); then
 * whatever is left of its group is killed. wall_s of the outcome counts from the call. */
void process_wait(process_outcome *out, pid_t pid, double end_s, const volatile int *stop);

/* From now on a process whose parent has ended becomes this program's child, wherever setsid or a second fork has put
 * it. Only for a program whose children are all started by process_start. */
void process_adopt_strays(void);
/* Kills and collects every child that process_start did not start: what ended processes left behind. */
void process_end_strays(void);

/* Both, with stdin empty, stdout and stderr into the file log_path. Errors: also when the log cannot be made. */
acr_status process_run(process_outcome *out, const char *const *argv, const char *log_path,
                       const process_limits *limits, const volatile int *stop);

/* "exit code 3", "signal 11 (Segmentation fault)", "did not end within 20 s". */
void process_outcome_text(char out[96], const process_outcome *outcome);

#endif
