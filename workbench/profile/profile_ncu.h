/* One launch of a kernel under Nsight Compute. */
#ifndef WORKBENCH_PROFILE_NCU_H
#define WORKBENCH_PROFILE_NCU_H

#include <limits.h>

#include "base/child.h"
#include "profile_counters.h"

/* What can come of a profile; each ends the command with its exit code and is named in its output. No status but OK
 * comes with a number. */
typedef enum profile_status {
    PROFILE_OK,
    PROFILE_NO_TOOL,        /* Nsight Compute or nvcc is not on this machine */
    PROFILE_NO_PERMISSION,  /* the driver keeps the counters for administrators (ERR_NVGPUCTRPERM) */
    PROFILE_DRIVER,         /* the tool does not work with this driver or GPU */
    PROFILE_TIMEOUT,        /* killed after the time that --timeout names */
    PROFILE_LAUNCH_FAILED,  /* the profiled process failed: the kernel is wrong or could not be launched */
    PROFILE_NO_KERNEL,      /* the tool ran and saw no launch of the kernel */
    PROFILE_BAD_OUTPUT,     /* the tool printed no table that can be read, or one without the time */
    PROFILE_NO_SOURCE,      /* --timeline: the kernels' sources are not here */
    PROFILE_NO_MARKS,       /* --timeline: the family has none */
    PROFILE_COMPILE_FAILED, /* --timeline */
    PROFILE_STATUS_COUNT
} profile_status;

const char *profile_status_name(profile_status status); /* "NO_PERMISSION" */
int profile_status_exit(profile_status status);         /* an exit_code */
/* Whether nothing can be profiled on this machine as it is, whatever the kernel. */
bool profile_status_is_machines(profile_status status);

enum {
    PROFILE_TEXT_BYTES = 1024,
    PROFILE_WARM_UPS = 20 /* launches before the profiled one */
};

typedef struct profile_run {
    profile_status status;
    char detail[PROFILE_TEXT_BYTES]; /* one sentence, or the tool's own words; "" when OK */
    char tool[96];                   /* "Nsight Compute 2025.3.1.0" */
    profile_counters counters;
} profile_run;

/* Runs `program profile --launch` of the kernel and problem (texts) under the tool, for at most limit_s seconds. Clocks
 * and caches are left as they are: what is measured is what stream mode sees. Counters that the tool does not know stay
 * NaN. */
void profile_with_ncu(profile_run *out, const char *program, const char *kernel, const char *problem, int device,
                      double limit_s);

/* The same for a launch of any program: run(arg, ...) starts the tool's command line (NULL-terminated) with the
 * program's behind it, and returns what it printed as out->out and out->err, both malloc'd. The launch behind
 * PROFILE_WARM_UPS others of the kernel is measured. Errors of run: it could not be started. */
typedef acr_status profile_runner(void *arg, const char *const *tool, child_result *out);
void profile_under_ncu(profile_run *out, const char *kernel, profile_runner *run, void *arg, double limit_s);

/* Sets status and detail, formatted; returns the status. */
profile_status profile_fail(profile_status *status, char detail[PROFILE_TEXT_BYTES], profile_status is,
                            const char *format, ...) __attribute__((format(printf, 4, 5)));

#endif
