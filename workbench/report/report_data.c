/* Records, see report_data.h. */
#include "report_data.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "internal.h"

double record_number(const json_t *record, const char *name)
{
    const json_t *value = json_object_get(record, name);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

const char *record_text(const json_t *record, const char *name)
{
    const char *text = json_string_value(json_object_get(record, name));
    return text ? text : "";
}

bool record_flag(const json_t *record, const char *name)
{
    return json_is_true(json_object_get(record, name));
}

double record_bound(const json_t *record, const char *name, int side)
{
    const json_t *value = json_array_get(json_object_get(record, name), (size_t)side);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

const char *record_timed(const json_t *record)
{
    const char *kernel = record_text(record, "kernel");
    return *kernel ? kernel : record_text(record, "peer");
}

/* ---- Files ---- */

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static acr_status append(json_t ***list, size_t *count, json_t *record, const char *path)
{
    json_t **longer = realloc(*list, (*count + 1) * sizeof **list);
    if (!longer) {
        return acr__fail(ACR_NO_MEMORY, "%s: no memory for its records", path);
    }
    *list = longer;
    longer[(*count)++] = json_incref(record);
    return ACR_OK;
}

/* What every table relies on; the rest is tools/check_results.py's. */
static acr_status check_record(const json_t *record, const char *path, size_t index)
{
    static const char *const texts[] = {"problem", "device", "date"};
    bool profile = json_object_get(record, "kind") != NULL;
    if (!json_is_object(record)) {
        return acr__fail(ACR_FORMAT, "%s: record %zu is no object", path, index);
    }
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; ++i) {
        if (!*record_text(record, texts[i])) {
            return acr__fail(ACR_FORMAT, "%s: record %zu has no text \"%s\"", path, index, texts[i]);
        }
    }
    if (!*record_timed(record)) {
        return acr__fail(ACR_FORMAT, "%s: record %zu names neither kernel nor peer", path, index);
    }
    if (!profile && !(record_number(record, "p50_us") > 0)) {
        return acr__fail(ACR_FORMAT, "%s: record %zu has no positive \"p50_us\"", path, index);
    }
    return ACR_OK;
}

static bool are_numbers(const json_t *values)
{
    for (size_t i = 0; i < json_array_size(values); ++i) {
        if (!json_is_number(json_array_get(values, i))) {
            return false;
        }
    }
    return json_array_size(values) > 0;
}

/* Two curves of the same steps. */
static acr_status add_training(report_data *data, const char *path, json_t *training)
{
    const json_t *loss = json_object_get(training, "loss"), *ours = json_object_get(loss, "acromion"),
                 *theirs = json_object_get(loss, "sdpa");
    if (!are_numbers(ours) || !are_numbers(theirs) || json_array_size(ours) != json_array_size(theirs)) {
        return acr__fail(ACR_FORMAT, "%s: \"loss\" has no \"acromion\" and \"sdpa\" with a number for each step", path);
    }
    if (!*record_text(training, "device") || !*record_text(training, "torch")) {
        return acr__fail(ACR_FORMAT, "%s: the training has no text \"device\" or \"torch\"", path);
    }
    json_object_set_new(training, "file", json_string(base_name(path)));
    return append(&data->trainings, &data->training_count, training, path);
}

static bool is_middle(const json_t *value)
{
    const json_t *bounds = json_object_get(value, "interval");
    return json_is_number(json_object_get(value, "median")) &&
           (json_is_null(bounds) || (are_numbers(bounds) && json_array_size(bounds) == 2));
}

/* Sets of seeds, each with what its arms had seen after each trial. */
static acr_status add_searches(report_data *data, const char *path, const json_t *sets)
{
    static const char *const texts[] = {"device", "incumbent", "clock"}, *const middles[] = {"search", "random",
                                                                                             "ratio"};
    for (size_t i = 0; i < json_array_size(sets); ++i) {
        json_t *set = json_array_get(sets, i);
        const json_t *trials = json_object_get(set, "by_trial");
        bool whole = json_array_size(trials) > 0 && json_array_size(json_object_get(set, "problems")) > 0 &&
                     is_middle(json_object_get(set, "mean_ratio"));
        for (size_t k = 0; k < sizeof texts / sizeof texts[0]; ++k) {
            whole = whole && *record_text(set, texts[k]);
        }
        for (size_t t = 0; t < json_array_size(trials); ++t) {
            for (size_t k = 0; k < sizeof middles / sizeof middles[0]; ++k) {
                whole = whole && is_middle(json_object_get(json_array_get(trials, t), middles[k]));
            }
        }
        if (!whole) {
            return acr__fail(ACR_FORMAT, "%s: set %zu of \"search_curves\" is not what tools/evolve_curves.py writes",
                             path, i);
        }
        json_object_set_new(set, "file", json_string(base_name(path)));
        const acr_status status = append(&data->searches, &data->search_count, set, path);
        if (status != ACR_OK) {
            return status;
        }
    }
    return ACR_OK;
}

static acr_status add_records(report_data *data, const char *path, const char *bytes, size_t size)
{
    json_error_t error;
    json_t *array = json_loadb(bytes, size, 0, &error);
    const json_t *sets = json_object_get(array, "search_curves");
    if (sets || json_object_get(array, "loss")) {
        const acr_status added = sets ? add_searches(data, path, sets) : add_training(data, path, array);
        json_decref(array);
        return added;
    }
    if (!json_is_array(array)) {
        json_decref(array);
        return array ? acr__fail(ACR_FORMAT, "%s: no array of records", path)
                     : acr__fail(ACR_FORMAT, "%s:%d: %s", path, error.line, error.text);
    }
    acr_status status = ACR_OK;
    for (size_t i = 0; i < json_array_size(array) && status == ACR_OK; ++i) {
        json_t *record = json_array_get(array, i);
        status = check_record(record, path, i);
        if (status == ACR_OK) {
            json_object_set_new(record, "file", json_string(base_name(path)));
            status = json_object_get(record, "kind") ? append(&data->profiles, &data->profile_count, record, path)
                                                     : append(&data->records, &data->record_count, record, path);
        }
    }
    json_decref(array);
    return status;
}

static report_summarise *summarise_run;

void report_use_summaries(report_summarise *summarise)
{
    summarise_run = summarise;
}

static acr_status add_run(report_data *data, const char *path)
{
    report_run *longer = realloc(data->runs, (data->run_count + 1) * sizeof *longer);
    if (!longer) {
        return acr__fail(ACR_NO_MEMORY, "%s: no memory for its trials", path);
    }
    data->runs = longer;
    report_run *run = &longer[data->run_count];
    *run = (report_run){.trials = NULL};
    snprintf(run->file, sizeof run->file, "%s", base_name(path));
    acr_status status = report_read_trials(run, path);
    if (status == ACR_OK) {
        ++data->run_count;
        if (!summarise_run || summarise_run(&run->summary, path) != ACR_OK) {
            snprintf(run->unknown, sizeof run->unknown, "%s",
                     summarise_run ? acr_last_error() : "this program has no search");
        }
    }
    return status;
}

acr_status report_add_file(report_data *data, const char *path)
{
    static const char magic[] = "SQLite format 3";
    const void *bytes = NULL;
    size_t size = 0;
    acr_status status = file_map(path, &bytes, &size);
    if (status != ACR_OK) {
        return status;
    }
    if (size >= sizeof magic && memcmp(bytes, magic, sizeof magic) == 0) {
        status = add_run(data, path);
    } else {
        status = add_records(data, path, bytes ? bytes : "", size);
    }
    file_unmap(bytes, size);
    return status;
}

void report_data_free(report_data *data)
{
    for (size_t i = 0; i < data->record_count; ++i) {
        json_decref(data->records[i]);
    }
    for (size_t i = 0; i < data->profile_count; ++i) {
        json_decref(data->profiles[i]);
    }
    for (size_t i = 0; i < data->training_count; ++i) {
        json_decref(data->trainings[i]);
    }
    free(data->trainings);
    for (size_t i = 0; i < data->search_count; ++i) {
        json_decref(data->searches[i]);
    }
    free(data->searches);
    for (size_t i = 0; i < data->run_count; ++i) {
        free(data->runs[i].trials);
        json_decref(data->runs[i].summary);
    }
    free(data->records);
    free(data->profiles);
    free(data->runs);
    *data = (report_data){.records = NULL};
}
