/* Child processes (process.h) whose output is wanted: what they print and how they end; and where programs are. */
#ifndef WORKBENCH_CHILD_H
#define WORKBENCH_CHILD_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "acromion.h"

typedef struct child_result {
    bool timed_out;  /* it and all that it had started were killed */
    int exit_code;   /* -1: ended by a signal */
    char *out, *err; /* what it printed, NUL-terminated; each is cut at CHILD_OUTPUT_MAX */
    size_t out_bytes;
} child_result;

enum {
    CHILD_OUTPUT_MAX = 64 << 20
};

/* Runs argv[0] (a path, or a name on PATH) with `input` (NULL = none) as its standard input and waits for its end, at
 * most limit_s seconds. Free the result with child_result_free, after success only. Errors: ACR_IO when it cannot be
 * started; ACR_NO_MEMORY. */
acr_status child_run(child_result *out, const char *const *argv, const char *input, double limit_s);
void child_result_free(child_result *result);

/* The path of the first executable file called `name`: on PATH, then in these folders (NULL-terminated, may hold
 * patterns like /opt/tool/?*; of several matches the last by name, so the newest version). Returns false when there is
 * none. */
bool child_find(char out[PATH_MAX], const char *name, const char *const *folders);

/* The folder of this program, without the last slash. */
bool child_own_folder(char out[PATH_MAX]);

#endif
