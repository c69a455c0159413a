/* Counters of elites, see elites.h. */
#include "elites.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "profile/profile_diagnosis.h"
#include "profile/profile_ncu.h"

enum {
    LIMIT_S = 120 /* of the tool, for one problem */
};

_Static_assert((int)TRIAL_PROFILE_LAUNCHES == (int)PROFILE_WARM_UPS + 1, "the tool measures the last launch");

acr_status elites_next(int64_t *trial, store *s, const archive *learnt)
{
    const member *ranked[ARCHIVE_ELITES];
    int64_t wanted[ARCHIVE_ELITES + 1] = {0};
    int count = archive_elites(learnt, ranked), wanted_count = 1;
    acr_status status = ACR_OK;
    *trial = -1;
    for (int i = 0; i < count; ++i) {
        wanted[wanted_count] = ranked[i]->trial;
        wanted_count += ranked[i]->trial > 0;
    }
    for (int i = 0; i < wanted_count && *trial < 0 && status == ACR_OK; ++i) {
        bool profiled = false;
        status = store_is_profiled(s, wanted[i], &profiled);
        *trial = profiled ? -1 : wanted[i];
    }
    return status;
}

/* ---- Under the tool ---- */

typedef struct launch {
    const elite_profiler *profiler;
    const artefact *artefact;
    size_t problem;
    bool stopped;
} launch;

/* A profile_runner: the gates' child behind the tool. What it prints is in one file. */
static acr_status run_behind(void *arg, const char *const *tool, child_result *out)
{
    launch *l = arg;
    gates_profiled done;
    gates_profile(&done, l->profiler->gates, l->artefact, l->problem, tool, LIMIT_S);
    const bool ended = done.outcome.end == PROCESS_EXITED;
    if (ended && done.outcome.code < 0) {
        return acr__fail(ACR_IO, "%s", done.result.detail);
    }
    l->stopped = done.outcome.end == PROCESS_STOPPED;
    size_t bytes = 0;
    char *text = file_text(done.log, SIZE_MAX, &bytes);
    if (!text) {
        return ACR_IO;
    }
    *out = (child_result){.timed_out = done.outcome.end == PROCESS_TIMED_OUT,
                          .exit_code = ended ? done.outcome.code : -1,
                          .out = text,
                          .out_bytes = bytes,
                          .err = strdup(ended && done.result.status != TRIAL_VALID ? done.result.detail : "")};
    if (!out->err) {
        child_result_free(out);
        return acr__fail(ACR_NO_MEMORY, "no memory for what the profiler said");
    }
    return ACR_OK;
}

static void diagnose_run(diagnosis *out, const profile_run *run, const acr__device *device, const acr_problem *problem)
{
    machine m;
    floor_times floor;
    const problem_work d = work_of(problem, NULL);
    machine_of_gpu(&m, device);
    floor_of(&floor, &m, problem, &d);
    diagnose(out, &run->counters, &floor, device, m.launch_s);
}

acr_status elites_profile(const elite_profiler *p, int64_t trial, const artefact *a, bool *works)
{
    acr_status status = ACR_OK;
    *works = true;
    for (size_t i = 0; i < p->definition->problem_count && *works && status == ACR_OK; ++i) {
        const acr_problem *problem = &p->definition->problems[i].problem;
        launch l = {.profiler = p, .artefact = a, .problem = i};
        profile_run run;
        diagnosis d = {.text = ""};
        char text[ACR_PROBLEM_TEXT_MAX];
        acr_problem_format(problem, text, sizeof text);
        profile_under_ncu(&run, GATES_PROFILE_KERNEL, run_behind, &l, LIMIT_S);
        if (l.stopped) {
            return ACR_OK;
        }
        if (run.status == PROFILE_OK) {
            diagnose_run(&d, &run, gates_device(p->gates), problem);
        }
        const store_profile_row row = {trial, (int64_t)i, text, &run, d.text};
        status = store_profile(p->store, p->slice, &row);
        *works = !profile_status_is_machines(run.status);
    }
    return status;
}
