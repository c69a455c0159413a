/* The exit codes that all commands share. */
#ifndef WORKBENCH_EXIT_CODE_H
#define WORKBENCH_EXIT_CODE_H

#include "acromion.h"

/* Documented in acromion(1); a number never changes its meaning. */
enum exit_code {
    EXIT_DONE = 0,
    EXIT_FAILED = 1,     /* a check failed, or nothing could be checked or measured */
    EXIT_USAGE = 2,      /* the command line */
    EXIT_BAD_INPUT = 3,  /* a malformed problem, tensor file or wisdom file */
    EXIT_CANNOT_RUN = 4, /* no such device, or no kernel for the problem */
    EXIT_FILE = 5,       /* a file could not be read or written */
    EXIT_FAULT = 6,      /* out of memory, or the device reported an error */
    EXIT_UNFINISHED = 7  /* evolve: stopped before its budget was used; --resume goes on */
};

/* Prints "acromion: <what>: <detail of the last error>" to stderr and returns the exit code that fits the status. what
 * may be NULL. */
int report_failure(acr_status status, const char *what);

#endif
