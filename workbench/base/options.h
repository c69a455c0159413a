/* Command lines: options described by a table (which is also the help), the options that all commands share, problems
 * as operands. */
#ifndef WORKBENCH_OPTIONS_H
#define WORKBENCH_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "acromion.h"

enum {
    OPTIONS_MAX = 40 /* of a command, the shared ones and an empty one at the end included */
};

/* One option of a command. Tables of OPTIONS_MAX hold them, and end where the name is NULL. */
typedef struct option_spec {
    int id;           /* what option_take gets: the short letter where the option has one, else >= OPTION_LONG_ONLY */
    const char *name; /* long name without the dashes */
    const char *argument; /* NULL = a flag; "=X" = the argument is optional; else what the help calls it */
    const char *help;
} option_spec;

enum {
    OPTION_LONG_ONLY = 1000
};

enum {                       /* command_spec.common: which shared options a command takes besides --help */
    COMMON_DEVICE = 1u << 0, /* --backend --device --threads */
    COMMON_JSON = 1u << 1
};

/* What an option's value is when it is only kept: a field of the command's request. */
typedef enum option_kind {
    OPTION_FLAG, /* bool: true */
    OPTION_TEXT, /* const char * */
    OPTION_FILE, /* const char *: as option_file */
    OPTION_SEED, /* uint64_t: a number from 0 on */
    OPTION_TIME  /* double: as option_seconds */
} option_kind;

typedef struct option_field {
    int id; /* 0 ends the table */
    option_kind kind;
    size_t at; /* offsetof */
} option_field;

typedef struct command_spec {
    const char *usage; /* the command's name and, behind a space, its operands: a name alone takes none */
    const char *about; /* what the command does, whole sentences, lines ended by newlines */
    const option_spec *options;
    const option_field *fields; /* of the options that are only kept; NULL = option_take handles all */
    unsigned common;
    const char *examples;
} command_spec;

typedef struct common_options {
    const char *backend; /* "cuda", "cpu" or NULL: cuda where there is a usable device, else cpu */
    int32_t device;
    uint32_t threads; /* cpu backend, and the oracle; 0 = all */
    bool json;
} common_options;

/* Handles one option of the command's own that is no field; value is NULL for a flag. Returns false after printing what
 * is wrong. */
typedef bool option_take(void *arg, int id, const char *value);

/* Parses a command line. Returns the index in argv of the first operand (argc when there is none); or -1 when the
 * command is over: help was printed, or what is wrong was; *exit_code says which. Options may stand after operands,
 * argv is reordered. arg: what option_take gets and spec->fields lie in; take NULL = all options are fields. */
int options_parse(const command_spec *spec, int argc, char **argv, common_options *common, option_take *take, void *arg,
                  int *exit_code);

/* Numbers, whole text. On failure they print "acromion: --<option>: ..." with the limits, leave
 * *out and return false. */
bool option_int(const char *option, const char *text, int64_t min, int64_t max, int64_t *out);
bool option_int32(const char *option, const char *text, int32_t min, int32_t max, int32_t *out);
bool option_double(const char *option, const char *text, double min, double max, double *out);
/* The name of a file to be written: anything but "" and "-". */
bool option_file(const char *option, const char *text, const char **out);
/* A duration with its unit: 5us, 300ns, 1.5ms, 2s. */
bool option_seconds(const char *option, const char *text, double *out);

/* ---- Problems as operands ---- */

#define MISSION_PROBLEM "b2:h8:s512:d64"

typedef struct problem_list {
    acr_problem *items; /* canonical */
    size_t count;
} problem_list;

/* Reads every operand as a problem; none means the mission shape. Returns EXIT_DONE, or after printing the error with
 * its position marked under the text another exit code. The caller frees with problems_free. */
int problems_parse(char **operands, int operand_count, problem_list *out);
void problems_free(problem_list *list);

/* Opens the context that the common options ask for. Returns EXIT_DONE or, after printing the reason, another exit
 * code. */
int context_open(const common_options *common, acr_ctx **out);

/* The number of threads the workbench's own work may use: the option, or the processors this process may run on. */
uint32_t thread_count(const common_options *common);

#endif
