/* What a report is made of: records of results files, the trials of an evolution run, curves of searches with several
 * seeds, loss curves of a training. */
#ifndef WORKBENCH_REPORT_DATA_H
#define WORKBENCH_REPORT_DATA_H

#include <jansson.h>
#include <stdbool.h>

#include "acromion.h"

/* A trial that was timed, or not; in the order of proposal within its arm. */
typedef struct report_trial {
    char arm[16];
    int number;
    bool distinct, improved;
    double speedup, low, high; /* over the incumbent; NaN where not timed */
    char status[32];
} report_trial;

typedef struct report_run {
    char file[256]; /* without its folder */
    report_trial *trials;
    size_t count;
    json_t *summary;   /* what the run concludes, as `acromion trials summary --json` has it; NULL = */
    char unknown[256]; /* why not */
} report_run;

/* Who can tell what a run concludes: the search, which this room does not know. Until it is named no run has a
 * summary. summarise: *out is the caller's; errors in acr_last_error(). */
typedef acr_status report_summarise(json_t **out, const char *path);
void report_use_summaries(report_summarise *summarise);

typedef struct report_data {
    json_t **records; /* measurements, each with its file's name as "file" */
    size_t record_count;
    json_t **profiles; /* of `acromion profile`: those with a "kind" */
    size_t profile_count;
    report_run *runs;
    size_t run_count;
    json_t **searches; /* what tools/evolve_curves.py writes, a set of seeds each, with its file's name as "file" */
    size_t search_count;
    json_t **trainings; /* what tools/train_curves.py writes, each with its file's name as "file" */
    size_t training_count;
} report_data;

/* Adds a file: a JSON array of records, a JSON object of loss curves or of curves of searches, or an SQLite file of
 * trials (recognised by its first bytes). Errors: ACR_IO; ACR_FORMAT, naming file and record; ACR_UNSUPPORTED for an
 * SQLite file in a build without SQLite; ACR_NO_MEMORY. */
acr_status report_add_file(report_data *data, const char *path);
void report_data_free(report_data *data);

/* The trials of an SQLite file (docs/internals/evolve-store.md). Errors as above. */
acr_status report_read_trials(report_run *out, const char *path);

/* A field: NaN, "" or false when the record lacks it or it is of another type. */
double record_number(const json_t *record, const char *name);
const char *record_text(const json_t *record, const char *name);
bool record_flag(const json_t *record, const char *name);
/* Of an interval [low, high]: NaN where it is null. */
double record_bound(const json_t *record, const char *name, int side);
/* The kernel's name or the peer's. */
const char *record_timed(const json_t *record);

#endif
