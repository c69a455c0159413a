/* What becomes of a trial, see trial.h: its words, and its result's memory. */
#include "trial.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"

/* ---- Names ---- */

static const struct {
    const char *name, *meaning;
} statuses[] = {
#define X(identifier, name, meaning) {name, meaning},
    TRIAL_STATUSES(X)
#undef X
};

static const char *const gate_names[] = {
#define X(identifier, name) name,
    TRIAL_GATES(X)
#undef X
};

const char *trial_status_name(trial_status status)
{
    return statuses[status].name;
}

const char *trial_status_meaning(trial_status status)
{
    return statuses[status].meaning;
}

const char *trial_gate_name(trial_gate gate)
{
    return gate_names[gate];
}

bool trial_status_parse(const char *name, trial_status *out)
{
    for (int i = 0; i < TRIAL_STATUS_COUNT; ++i) {
        if (strcmp(statuses[i].name, name) == 0) {
            *out = (trial_status)i;
            return true;
        }
    }
    return false;
}

bool trial_gate_parse(const char *name, trial_gate *out)
{
    const int index = text_index(gate_names, GATE_COUNT, name);
    if (index >= 0) {
        *out = (trial_gate)index;
    }
    return index >= 0;
}

/* ---- Results ---- */

static stats_comparison no_comparison(void)
{
    return (stats_comparison){.speedup = NAN, .ci95 = {0, INFINITY}, .verdict = STATS_AMBIGUOUS};
}

void trial_result_init(trial_result *result)
{
    *result = (trial_result){.resources = {-1, -1, -1, -1, -1, -1}, .overall = no_comparison()};
}

void trial_cases_free(trial_result *result)
{
    free(result->cases);
    result->cases = NULL;
    result->case_count = 0;
}

void trial_timings_free(trial_result *result)
{
    for (size_t i = 0; i < result->timing_count; ++i) {
        free(result->timings[i].incumbent_us);
        free(result->timings[i].candidate_us);
    }
    free(result->timings);
    result->timings = NULL;
    result->timing_count = 0;
    result->overall = no_comparison();
}

void trial_result_free(trial_result *result)
{
    trial_cases_free(result);
    trial_timings_free(result);
    trial_result_init(result);
}
