/* What a subcommand is, and the exit codes they share. A subcommand is one file cmd_<name>.c and one line of the table
 * in main.c. */
#ifndef WORKBENCH_COMMAND_H
#define WORKBENCH_COMMAND_H

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

typedef struct command {
    const char *name;
    const char *summary;               /* one line for the list of commands */
    int (*run)(int argc, char **argv); /* argv[0] is the command's name; returns an exit code */
} command;

int cmd_run(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_why(int argc, char **argv);
int cmd_check(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_roofline(int argc, char **argv);
int cmd_wisdom(int argc, char **argv);
int cmd_evolve(int argc, char **argv);
int cmd_trials(int argc, char **argv);
int cmd_promote(int argc, char **argv);
int cmd_profile(int argc, char **argv);
int cmd_report(int argc, char **argv);
int cmd_variant(int argc, char **argv);

/* Prints "acromion: <what>: <detail of the last error>" to stderr and returns the exit code that fits the status. what
 * may be NULL. */
int report_failure(acr_status status, const char *what);

#endif
