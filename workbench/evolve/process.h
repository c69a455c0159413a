/* One child process with limits: a compiler, or this program again. Its children belong to it: all of its process group
 * is ended with it. */
#ifndef WORKBENCH_EVOLVE_PROCESS_H
#define WORKBENCH_EVOLVE_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

#include "acromion.h"

typedef struct process_limits {
    double wall_s;
    int64_t memory_bytes; /* of address space, each process; 0 = no limit (CUDA reserves far more than it uses) */
    int64_t file_bytes;   /* of any file written */
} process_limits;

typedef enum process_end {
    PROCESS_EXITED,
    PROCESS_SIGNALLED,
    PROCESS_TIMED_OUT,
    PROCESS_STOPPED /* because *stop said so */
} process_end;

typedef struct process_outcome {
    process_end end;
    int code; /* exit code, or the signal */
    double wall_s;
} process_outcome;

/* Runs argv (argv[0] is looked up on PATH) with stdin empty, stdout and stderr into the file log_path, and waits. stop,
 * where not NULL, is polled: 2 ends the child. Errors: ACR_IO when it cannot be started, or the log not be made. */
acr_status process_run(process_outcome *out, const char *const *argv, const char *log_path,
                       const process_limits *limits, const volatile int *stop);

/* "exit code 3", "signal 11 (Segmentation fault)", "did not end within 20 s". */
void process_outcome_text(char out[96], const process_outcome *outcome);

#endif
