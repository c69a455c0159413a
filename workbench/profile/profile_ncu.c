/* Nsight Compute, see profile_ncu.h. */
#include "profile_ncu.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/exit_code.h"

static const struct {
    const char *name;
    int exit_code;
} statuses[PROFILE_STATUS_COUNT] = {
    [PROFILE_OK] = {"OK", EXIT_DONE},
    [PROFILE_NO_TOOL] = {"NO_TOOL", EXIT_CANNOT_RUN},
    [PROFILE_NO_PERMISSION] = {"NO_PERMISSION", EXIT_CANNOT_RUN},
    [PROFILE_DRIVER] = {"DRIVER", EXIT_CANNOT_RUN},
    [PROFILE_TIMEOUT] = {"TIMEOUT", EXIT_FAILED},
    [PROFILE_LAUNCH_FAILED] = {"LAUNCH_FAILED", EXIT_FAILED},
    [PROFILE_NO_KERNEL] = {"NO_KERNEL", EXIT_FAILED},
    [PROFILE_BAD_OUTPUT] = {"BAD_OUTPUT", EXIT_FAILED},
    [PROFILE_NO_SOURCE] = {"NO_SOURCE", EXIT_CANNOT_RUN},
    [PROFILE_NO_MARKS] = {"NO_MARKS", EXIT_CANNOT_RUN},
    [PROFILE_COMPILE_FAILED] = {"COMPILE_FAILED", EXIT_FAILED},
};

const char *profile_status_name(profile_status status)
{
    return statuses[status].name;
}

int profile_status_exit(profile_status status)
{
    return statuses[status].exit_code;
}

bool profile_status_is_machines(profile_status status)
{
    return status == PROFILE_NO_TOOL || status == PROFILE_NO_PERMISSION || status == PROFILE_DRIVER;
}

profile_status profile_fail(profile_status *status, char detail[PROFILE_TEXT_BYTES], profile_status is,
                            const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(detail, PROFILE_TEXT_BYTES, format, arguments);
    va_end(arguments);
    *status = is;
    return is;
}

/* ---- The list of metrics ---- */

enum {
    METRICS_MAX = COUNTER_COUNT + STALL_COUNT
};

/* Those that are still asked for. */
typedef struct metric_list {
    const char *names[METRICS_MAX];
    int count;
} metric_list;

static metric_list all_metrics(void)
{
    metric_list list = {.count = 0};
    for (int i = 0; i < COUNTER_COUNT; ++i) {
        list.names[list.count++] = counter_infos[i].metric;
    }
    for (int i = 0; i < STALL_COUNT; ++i) {
        list.names[list.count++] = stall_infos[i].metric;
    }
    return list;
}

/* The names with commas between them, in memory of its own; NULL without memory. */
static char *joined(const metric_list *list)
{
    size_t bytes = 1;
    for (int i = 0; i < list->count; ++i) {
        bytes += strlen(list->names[i]) + 1;
    }
    char *text = malloc(bytes), *end = text;
    if (text) {
        *end = '\0';
        for (int i = 0; i < list->count; ++i) {
            int length = snprintf(end, bytes - (size_t)(end - text), "%s%s", i ? "," : "", list->names[i]);
            end += length;
        }
    }
    return text;
}

/* GPUs differ in what they count, and some versions of the tool give up at a metric they do not know. Takes those off
 * the list that a line about not finding a metric names. Returns how many. */
static int drop_unknown(metric_list *list, const char *said)
{
    int kept = 0, before = list->count;
    for (int i = 0; i < before; ++i) {
        bool unknown = false;
        for (const char *at = strstr(said, list->names[i]); at && !unknown; at = strstr(at + 1, list->names[i])) {
            const char *line = at;
            while (line > said && line[-1] != '\n') {
                --line;
            }
            const char *find = strstr(line, "find metric");
            unknown = find && find < at;
        }
        if (!unknown) {
            list->names[kept++] = list->names[i];
        }
    }
    list->count = kept;
    return before - kept;
}

/* ---- What the tool says ---- */

/* The first line that holds the fragment, without its decoration; false when there is none. */
static bool line_with(char *out, size_t capacity, const char *text, const char *fragment)
{
    const char *at = strstr(text, fragment);
    if (!at) {
        return false;
    }
    while (at > text && at[-1] != '\n') {
        --at;
    }
    at += strspn(at, "= ");
    snprintf(out, capacity, "%.*s", (int)strcspn(at, "\r\n"), at);
    return true;
}

/* The failures that the tool words itself. Both streams are looked at: versions differ in which they use. */
static profile_status known_failure(profile_run *out, const char *said)
{
    static const struct {
        const char *fragment;
        profile_status status;
    } failures[] = {
        {"ERR_NVGPUCTRPERM", PROFILE_NO_PERMISSION},
        {"does not have permission", PROFILE_NO_PERMISSION},
        {"LibraryNotLoaded", PROFILE_DRIVER},
        {"incompatible driver", PROFILE_DRIVER},
        {"driver is not compatible", PROFILE_DRIVER},
        {"Cuda driver is not compatible", PROFILE_DRIVER},
        {"Profiling is not supported", PROFILE_DRIVER},
        {"Unsupported GPU", PROFILE_DRIVER},
        {"The application returned an error code", PROFILE_LAUNCH_FAILED},
        {"No kernels were profiled", PROFILE_NO_KERNEL},
    };
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; ++i) {
        if (line_with(out->detail, sizeof out->detail, said, failures[i].fragment)) {
            out->status = failures[i].status;
            return out->status;
        }
    }
    return PROFILE_OK;
}

/* The first words on either stream, for a failure that nothing else explains. */
static const char *first_words(const child_result *result, char *out, size_t capacity)
{
    const char *text = line_with(out, capacity, result->err, "ERROR") || line_with(out, capacity, result->out, "ERROR")
                           ? NULL
                       : *result->err ? result->err
                                      : result->out;
    if (text) {
        snprintf(out, capacity, "%.*s", (int)strcspn(text, "\r\n"), text);
    }
    return *out ? out : "nothing";
}

static void judge(profile_run *out, child_result *result, const char *kernel, double limit_s)
{
    char words[256] = "";
    bool is_table = false;
    if (result->timed_out) {
        profile_fail(&out->status, out->detail, PROFILE_TIMEOUT,
                     "Nsight Compute was killed after %g s; --timeout gives it longer", limit_s);
        return;
    }
    if (known_failure(out, result->err) != PROFILE_OK || known_failure(out, result->out) != PROFILE_OK) {
        /* What the program itself says is worth more than that it ended. */
        if (out->status == PROFILE_LAUNCH_FAILED) {
            (void)(line_with(out->detail, sizeof out->detail, result->err, "acromion:") ||
                   line_with(out->detail, sizeof out->detail, result->out, "acromion:"));
        }
        return;
    }
    first_words(result, words, sizeof words);
    int launches = profile_parse_csv(&out->counters, result->out, kernel, &is_table);
    if (result->exit_code != 0) {
        profile_fail(&out->status, out->detail, PROFILE_BAD_OUTPUT, "Nsight Compute ended with code %d: %s",
                     result->exit_code, words);
    } else if (!is_table) {
        profile_fail(&out->status, out->detail, PROFILE_BAD_OUTPUT, "Nsight Compute printed no table but: %s", words);
    } else if (launches == 0) {
        profile_fail(&out->status, out->detail, PROFILE_NO_KERNEL, "no launch of %s in what Nsight Compute printed",
                     kernel);
    } else if (!(out->counters.value[COUNTER_DURATION] > 0)) {
        profile_fail(&out->status, out->detail, PROFILE_BAD_OUTPUT, "Nsight Compute gave no time for %s", kernel);
    }
    if (out->status != PROFILE_OK) {
        out->counters = profile_no_counters();
    }
}

/* ---- Running it ---- */

static void read_version(profile_run *out, const char *ncu, double limit_s)
{
    const char *const arguments[] = {ncu, "--version", NULL};
    child_result result;
    char line[64];
    snprintf(out->tool, sizeof out->tool, "Nsight Compute");
    if (child_run(&result, arguments, NULL, limit_s) != ACR_OK) {
        return;
    }
    if (line_with(line, sizeof line, result.out, "Version ")) {
        snprintf(out->tool, sizeof out->tool, "Nsight Compute %.*s", (int)strcspn(line + strlen("Version "), " "),
                 line + strlen("Version "));
    }
    child_result_free(&result);
}

/* What does not change between attempts. */
typedef struct tool_call {
    const char *ncu, *kernel;
    profile_runner *run;
    void *arg;
    double limit_s;
} tool_call;

/* One attempt. Returns how many metrics were taken off the list, when it is worth another one. */
static int attempt(profile_run *out, metric_list *list, const tool_call *call)
{
    char skip[16];
    char *metrics = joined(list);
    snprintf(skip, sizeof skip, "%d", PROFILE_WARM_UPS);
    const char *const options[] = {call->ncu,
                                   "--csv",
                                   "--page",
                                   "raw",
                                   "--print-units",
                                   "base",
                                   "--clock-control",
                                   "none",
                                   "--cache-control",
                                   "none",
                                   "--kernel-name-base",
                                   "function",
                                   "--kernel-name",
                                   call->kernel,
                                   "--launch-skip",
                                   skip,
                                   "--launch-count",
                                   "1",
                                   "--metrics",
                                   metrics,
                                   NULL};
    out->status = PROFILE_OK;
    out->detail[0] = '\0';
    child_result result;
    int dropped = 0;
    if (!metrics || call->run(call->arg, options, &result) != ACR_OK) {
        profile_fail(&out->status, out->detail, PROFILE_NO_TOOL, "%s cannot be run: %s", call->ncu,
                     metrics ? acr_last_error() : "out of memory");
    } else {
        metric_list before = *list;
        dropped = drop_unknown(list, result.err) + drop_unknown(list, result.out);
        judge(out, &result, call->kernel, call->limit_s);
        dropped = out->status == PROFILE_OK ? 0 : dropped; /* the rest was measured all the same */
        *list = dropped ? *list : before;
        child_result_free(&result);
    }
    free(metrics);
    return dropped;
}

void profile_under_ncu(profile_run *out, const char *kernel, profile_runner *run, void *arg, double limit_s)
{
    char ncu[PATH_MAX], home[PATH_MAX] = "/usr/local/cuda/bin";
    *out = (profile_run){.status = PROFILE_OK, .counters = profile_no_counters()};
    const char *cuda_home = getenv("CUDA_HOME");
    if (cuda_home && *cuda_home) {
        snprintf(home, sizeof home, "%s/bin", cuda_home);
    }
    const char *const folders[] = {home, "/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*", NULL};
    if (!child_find(ncu, "ncu", folders)) {
        profile_fail(&out->status, out->detail, PROFILE_NO_TOOL,
                     "no Nsight Compute here: `ncu` is neither on PATH nor in CUDA_HOME/bin, /usr/local/cuda/bin or "
                     "/opt/nvidia/nsight-compute/*");
        return;
    }
    read_version(out, ncu, limit_s);
    const tool_call call = {ncu, kernel, run, arg, limit_s};
    metric_list list = all_metrics();
    if (attempt(out, &list, &call) > 0 && list.count > 0) {
        attempt(out, &list, &call);
    }
}

/* ---- A kernel of the table, in `program profile --launch` ---- */

typedef struct listed_launch {
    const char *const *words;
    double limit_s;
} listed_launch;

static acr_status run_listed(void *arg, const char *const *tool, child_result *out)
{
    enum {
        WORDS_MAX = 48
    };
    const listed_launch *launch = arg;
    const char *arguments[WORDS_MAX] = {NULL};
    size_t count = 0;
    for (; tool[count] && count < WORDS_MAX - 1; ++count) {
        arguments[count] = tool[count];
    }
    for (size_t i = 0; launch->words[i] && count < WORDS_MAX - 1; ++i) {
        arguments[count++] = launch->words[i];
    }
    return child_run(out, arguments, NULL, launch->limit_s);
}

void profile_with_ncu(profile_run *out, const char *program, const char *kernel, const char *problem, int device,
                      double limit_s)
{
    char ordinal[16];
    snprintf(ordinal, sizeof ordinal, "%d", device);
    const char *const words[] = {program, "profile",  "--launch", "-k",    kernel, "--backend",
                                 "cuda",  "--device", ordinal,    problem, NULL};
    listed_launch launch = {words, limit_s};
    profile_under_ncu(out, kernel, run_listed, &launch, limit_s);
}
