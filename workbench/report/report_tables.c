/* The tables, see report_tables.h. */
#include "report_tables.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/options.h"
#include "profile/profile_counters.h"

enum {
    KEY_BYTES = 512
};

/* ---- Choosing and ordering records ---- */

/* Where the record with this key is among the first `count`, or count. */
static size_t find_key(const json_t **chosen, size_t count, record_key *key, const char *wanted)
{
    char text[KEY_BYTES];
    for (size_t i = 0; i < count; ++i) {
        key(chosen[i], text);
        if (strcmp(text, wanted) == 0) {
            return i;
        }
    }
    return count;
}

const json_t **records_latest(size_t *count, json_t *const *records, size_t record_count, record_wanted *wanted,
                              record_key *key, record_order *order)
{
    const json_t **chosen = calloc(record_count + 1, sizeof *chosen);
    *count = 0;
    for (size_t i = 0; i < record_count && chosen; ++i) {
        char text[KEY_BYTES];
        if (!wanted(records[i])) {
            continue;
        }
        key(records[i], text);
        size_t at = find_key(chosen, *count, key, text);
        if (at == *count) {
            chosen[(*count)++] = records[i];
        } else if (strcmp(record_text(records[i], "date"), record_text(chosen[at], "date")) >= 0) {
            chosen[at] = records[i];
        }
    }
    if (chosen && *count > 0) {
        qsort(chosen, *count, sizeof *chosen, order);
    }
    return chosen;
}

static const json_t *record_at(const void *item)
{
    return *(const json_t *const *)item;
}

static bool on_gpu(const json_t *r)
{
    const char *driver = record_text(r, "driver");
    return *driver && strcmp(driver, "none") != 0;
}

static int by_number(const json_t *a, const json_t *b, const char *field)
{
    double x = record_number(a, field), y = record_number(b, field);
    return (x > y) - (x < y);
}

static int by_text(const json_t *a, const json_t *b, const char *field)
{
    return strcmp(record_text(a, field), record_text(b, field));
}

/* ---- Rows ---- */

static void begin(report_table *t, const char *caption, const char *const *headings)
{
    t->caption = caption;
    for (t->columns = 0; headings[t->columns]; ++t->columns) {
        t->headings[t->columns] = headings[t->columns];
    }
}

/* Adds a row of empty cells. */
static bool add_row(report_table *t)
{
    char ***rows = realloc(t->rows, (t->row_count + 1) * sizeof *rows);
    char **row = calloc(TABLE_COLUMNS_MAX, sizeof *row);
    if (rows) {
        t->rows = rows;
    }
    if (!rows || !row) {
        free(row);
        t->failed = true;
        return false;
    }
    rows[t->row_count++] = row;
    return true;
}

/* Sets the next empty cell of the last row. */
static void cell(report_table *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void cell(report_table *t, const char *format, ...)
{
    char text[1024];
    if (t->failed) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    char **row = t->rows[t->row_count - 1];
    int column = 0;
    while (row[column]) {
        ++column;
    }
    row[column] = strdup(text);
    t->failed = !row[column];
}

/* With so many decimals; "" where there is no number. */
static void number_cell(report_table *t, int decimals, double value)
{
    if (isnan(value)) {
        cell(t, "%s", "");
    } else {
        cell(t, "%.*f", decimals, value);
    }
}

static void error_cell(report_table *t, const json_t *r)
{
    double error = record_number(r, "err_max");
    if (isnan(error)) {
        cell(t, "%s", "");
    } else {
        cell(t, "%.1e", error);
    }
}

static void file_cell(report_table *t, const json_t *r)
{
    cell(t, "[%.10s](%s)", record_text(r, "date"), record_text(r, "file"));
}

static const char *overlap_note(const json_t *r)
{
    return record_flag(r, "overlap") ? " overlapped" : "";
}

/* ---- The mission shape on GPUs ---- */

static bool mission_wanted(const json_t *r)
{
    return strcmp(record_text(r, "problem"), MISSION_PROBLEM) == 0 && strcmp(record_text(r, "mode"), "stream") == 0 &&
           on_gpu(r);
}

static void timed_key(const json_t *r, char out[KEY_BYTES])
{
    snprintf(out, KEY_BYTES, "%s\n%s\n%d", record_text(r, "device"), record_timed(r), record_flag(r, "overlap"));
}

static int by_device_and_time(const void *a, const void *b)
{
    int device = by_text(record_at(a), record_at(b), "device");
    return device ? device : by_number(record_at(a), record_at(b), "p50_us");
}

/* "fwd_mma" of a kernel's name; a peer is its own family. */
static void family_of(const json_t *r, char out[KEY_BYTES])
{
    const char *kernel = record_text(r, "kernel"), *second = strchr(kernel, '_');
    const char *end = second ? strchr(second + 1, '_') : NULL;
    snprintf(out, KEY_BYTES, "%.*s", end ? (int)(end - kernel) : (int)strlen(record_timed(r)), record_timed(r));
}

/* Whether a faster one of the same family, device and overlap stands before it. */
static bool family_has_faster(const json_t **sorted, size_t at)
{
    char mine[KEY_BYTES], other[KEY_BYTES];
    family_of(sorted[at], mine);
    for (size_t i = 0; i < at; ++i) {
        family_of(sorted[i], other);
        if (strcmp(mine, other) == 0 && by_text(sorted[i], sorted[at], "device") == 0 &&
            record_flag(sorted[i], "overlap") == record_flag(sorted[at], "overlap")) {
            return true;
        }
    }
    return false;
}

static void make_mission(report_table *t, const report_data *data)
{
    static const char *const headings[] = {"GPU", "kernel", "p50 µs", "p99 µs", "n", "max error", "result", NULL};
    begin(t, "The mission shape on GPUs, stream mode: the fastest kernel of each family of ours, and the peers.",
          headings);
    size_t count = 0;
    const json_t **chosen =
        records_latest(&count, data->records, data->record_count, mission_wanted, timed_key, by_device_and_time);
    for (size_t i = 0; i < count; ++i) {
        const json_t *r = chosen[i];
        if (family_has_faster(chosen, i) || !add_row(t)) {
            continue;
        }
        cell(t, "%s", record_text(r, "device"));
        cell(t, "`%s`%s", record_timed(r), overlap_note(r));
        cell(t, "%.2f", record_number(r, "p50_us"));
        cell(t, "%.2f", record_number(r, "p99_us"));
        cell(t, "%.0f", record_number(r, "n"));
        error_cell(t, r);
        file_cell(t, r);
    }
    free(chosen);
}

/* ---- Beside the peers ---- */

/* The record of the peer that the record names as the best, from the same call: NULL when the file lacks it. */
static const json_t *best_peer_of(const json_t *r, const report_data *data)
{
    static const char *const same[] = {"file", "device", "problem", "mode", "date"};
    for (size_t i = 0; i < data->record_count; ++i) {
        const json_t *other = data->records[i];
        bool found = *record_text(r, "best_peer") &&
                     strcmp(record_text(other, "peer"), record_text(r, "best_peer")) == 0 &&
                     record_flag(other, "overlap") == record_flag(r, "overlap");
        for (size_t k = 0; k < sizeof same / sizeof same[0]; ++k) {
            found = found && by_text(r, other, same[k]) == 0;
        }
        if (found) {
            return other;
        }
    }
    return NULL;
}

static bool peers_wanted(const json_t *r)
{
    return *record_text(r, "best_peer") && record_flag(r, "planned") && on_gpu(r) && !record_flag(r, "overlap");
}

static void problem_key(const json_t *r, char out[KEY_BYTES])
{
    snprintf(out, KEY_BYTES, "%s\n%s\n%s", record_text(r, "device"), record_text(r, "problem"), record_text(r, "mode"));
}

static int by_device_mode_problem(const void *a, const void *b)
{
    const json_t *x = record_at(a), *y = record_at(b);
    int device = by_text(x, y, "device");
    int mode = (strcmp(record_text(x, "mode"), "stream") != 0) - (strcmp(record_text(y, "mode"), "stream") != 0);
    return device ? device : mode ? mode : by_text(x, y, "problem");
}

static void make_peers(report_table *t, const report_data *data)
{
    static const char *const headings[] = {"GPU",
                                           "mode",
                                           "problem",
                                           "kernel",
                                           "p50 µs",
                                           "best peer µs",
                                           "times as fast (95 %)",
                                           "verdict",
                                           "tier",
                                           "times as fast as the default",
                                           "max error",
                                           "result",
                                           NULL};
    begin(t, "The planner's kernels beside PyTorch's attention on GPUs, from interleaved runs.", headings);
    size_t count = 0;
    const json_t **chosen =
        records_latest(&count, data->records, data->record_count, peers_wanted, problem_key, by_device_mode_problem);
    for (size_t i = 0; i < count && add_row(t); ++i) {
        const json_t *r = chosen[i];
        double ratio = record_number(r, "ratio_to_best_peer"), to_default = record_number(r, "ratio_to_default");
        cell(t, "%s", record_text(r, "device"));
        cell(t, "%s", record_text(r, "mode"));
        cell(t, "`%s`", record_text(r, "problem"));
        cell(t, "`%s`", record_timed(r));
        cell(t, "%.2f", record_number(r, "p50_us"));
        const json_t *peer = best_peer_of(r, data);
        if (peer) {
            cell(t, "%.2f %s", record_number(peer, "p50_us"), record_text(r, "best_peer"));
        } else {
            cell(t, "%s", record_text(r, "best_peer"));
        }
        cell(t, "%.2f (%.2f to %.2f)", ratio, record_bound(r, "ratio_ci95", 0), record_bound(r, "ratio_ci95", 1));
        cell(t, "%s", record_text(r, "verdict"));
        cell(t, "%s", record_text(r, "tier"));
        number_cell(t, 2, to_default);
        error_cell(t, r);
        file_cell(t, r);
    }
    free(chosen);
}

/* ---- CPUs ---- */

static bool cpu_wanted(const json_t *r)
{
    return !isnan(record_number(r, "speedup_over_torch"));
}

static int by_device_and_problem(const void *a, const void *b)
{
    int device = by_text(record_at(a), record_at(b), "device");
    return device ? device : by_text(record_at(a), record_at(b), "problem");
}

/* The peer's record of the same file and problem, or NULL. */
static const json_t *peer_of(const json_t *r, const report_data *data)
{
    for (size_t i = 0; i < data->record_count; ++i) {
        const json_t *other = data->records[i];
        if (*record_text(other, "peer") && by_text(r, other, "file") == 0 && by_text(r, other, "problem") == 0) {
            return other;
        }
    }
    return NULL;
}

static void make_cpu(report_table *t, const report_data *data)
{
    static const char *const headings[] = {
        "CPU",    "problem", "acromion p50 µs", "share of FMA peak", "PyTorch p50 µs", "times as fast (95 %)",
        "result", NULL};
    begin(t, "The CPU backend against PyTorch's CPU attention, interleaved in one run.", headings);
    size_t count = 0;
    const json_t **chosen =
        records_latest(&count, data->records, data->record_count, cpu_wanted, problem_key, by_device_and_problem);
    for (size_t i = 0; i < count; ++i) {
        const json_t *r = chosen[i], *peer = peer_of(r, data);
        if (!peer || !add_row(t)) {
            continue;
        }
        cell(t, "%s", record_text(r, "device"));
        cell(t, "`%s`", record_text(r, "problem"));
        cell(t, "%.0f", record_number(r, "p50_us"));
        cell(t, "%.0f%%", 100 * record_number(r, "fma_peak_share"));
        cell(t, "%.0f", record_number(peer, "p50_us"));
        cell(t, "%.2f (%.2f to %.2f)", record_number(r, "speedup_over_torch"),
             record_bound(r, "speedup_over_torch_ci95", 0), record_bound(r, "speedup_over_torch_ci95", 1));
        file_cell(t, r);
    }
    free(chosen);
}

/* ---- The headline ---- */

static const headline_row headlines[HEADLINE_ROWS] = {
    {.kind = "latency", .problem = MISSION_PROBLEM, .page = "src/cuda/kernels/fwd_short/README.md"},
    {.kind = "long", .problem = "b1:h16:s16384:d128", .page = "src/cuda/kernels/fwd_wgmma/README.md"},
    {.kind = "causal", .problem = "b8:h32/8:s2048:d128:causal", .page = "src/cuda/kernels/fwd_wgmma/README.md"},
    {.kind = "decoding", .problem = "b1:h32/8:s1/2048:d128", .page = "src/cuda/kernels/fwd_decode/README.md"},
    {.kind = "fp8", .problem = "e4m3:b2:h16:s4096:d128", .page = "src/cuda/kernels/fwd_fp8/README.md"},
    {.kind = "CPU", .problem = "f32:b2:h8:s512:d64", .page = "src/cpu/fwd_simd/README.md"},
};

static bool headline_wanted(const json_t *r)
{
    return cpu_wanted(r) || (record_flag(r, "planned") && on_gpu(r) && !record_flag(r, "overlap") &&
                             strcmp(record_text(r, "mode"), "stream") == 0);
}

void headline_make(headline_row out[HEADLINE_ROWS], const report_data *data)
{
    size_t count = 0;
    const json_t **chosen =
        records_latest(&count, data->records, data->record_count, headline_wanted, problem_key, by_device_and_problem);
    for (size_t row = 0; row < HEADLINE_ROWS; ++row) {
        headline_row *h = &out[row];
        *h = headlines[row];
        h->ratio = h->ratio_low = h->ratio_high = NAN;
        for (size_t i = 0; i < count; ++i) {
            if (strcmp(record_text(chosen[i], "problem"), h->problem) == 0 &&
                (!h->ours || strcmp(record_text(chosen[i], "date"), record_text(h->ours, "date")) > 0)) {
                h->ours = chosen[i];
            }
        }
        if (h->ours) {
            const bool on_cpu = cpu_wanted(h->ours);
            const char *interval = on_cpu ? "speedup_over_torch_ci95" : "ratio_ci95";
            h->peer = on_cpu ? peer_of(h->ours, data) : best_peer_of(h->ours, data);
            h->ratio = record_number(h->ours, on_cpu ? "speedup_over_torch" : "ratio_to_best_peer");
            h->ratio_low = record_bound(h->ours, interval, 0);
            h->ratio_high = record_bound(h->ours, interval, 1);
        }
    }
    free(chosen);
}

static void make_headline(report_table *t, const report_data *data)
{
    static const char *const headings[] = {
        "for", "problem", "device", "acromion p50 µs", "PyTorch's best p50 µs", "times as fast (95 %)", "result", NULL};
    begin(t, "One problem of each kind, and the fastest of PyTorch's attention beside it in the same call.", headings);
    headline_row rows[HEADLINE_ROWS];
    headline_make(rows, data);
    for (size_t i = 0; i < HEADLINE_ROWS && add_row(t); ++i) {
        const headline_row *h = &rows[i];
        cell(t, "[%s](/%s)", h->kind, h->page);
        cell(t, "`%s`", h->problem);
        cell(t, "%s", h->ours ? record_text(h->ours, "device") : "");
        const double ours_us = h->ours ? record_number(h->ours, "p50_us") : NAN;
        number_cell(t, ours_us < 100 ? 2 : 0, ours_us);
        if (h->peer) {
            const double peer_us = record_number(h->peer, "p50_us");
            const char *peer = record_text(h->peer, "peer"); /* its first word: a version may follow */
            cell(t, "%.*f %.*s", peer_us < 100 ? 2 : 0, peer_us, (int)strcspn(peer, " "), peer);
            cell(t, "%.2f (%.2f to %.2f)", h->ratio, h->ratio_low, h->ratio_high);
        } else {
            cell(t, "%s", "it has none");
            cell(t, "%s", "");
        }
        if (h->ours) {
            file_cell(t, h->ours);
        } else {
            cell(t, "%s", "see its page");
        }
    }
}

/* ---- The ladder ---- */

static bool ladder_wanted(const json_t *r)
{
    return strncmp(record_text(r, "kernel"), "fwd_ladder", strlen("fwd_ladder")) == 0;
}

static void ladder_key(const json_t *r, char out[KEY_BYTES])
{
    snprintf(out, KEY_BYTES, "%s\n%s\n%s", record_text(r, "device"), record_text(r, "problem"), record_timed(r));
}

static int by_rung(const void *a, const void *b)
{
    int device = by_text(record_at(a), record_at(b), "device");
    int problem = by_text(record_at(a), record_at(b), "problem");
    return device ? device : problem ? problem : strcmp(record_timed(record_at(a)), record_timed(record_at(b)));
}

static void make_ladder(report_table *t, const report_data *data)
{
    static const char *const headings[] = {
        "GPU", "problem", "rung", "p50 µs", "times as fast as the rung before", "TFLOP/s", "max error", "result", NULL};
    begin(t, "The teaching ladder, rung by rung.", headings);
    size_t count = 0;
    const json_t **chosen =
        records_latest(&count, data->records, data->record_count, ladder_wanted, ladder_key, by_rung);
    for (size_t i = 0; i < count && add_row(t); ++i) {
        const json_t *r = chosen[i], *before = i > 0 ? chosen[i - 1] : NULL;
        bool same = before && by_text(r, before, "device") == 0 && by_text(r, before, "problem") == 0;
        cell(t, "%s", record_text(r, "device"));
        cell(t, "`%s`", record_text(r, "problem"));
        cell(t, "`%s`", record_timed(r));
        cell(t, "%.2f", record_number(r, "p50_us"));
        number_cell(t, 2, same ? record_number(before, "p50_us") / record_number(r, "p50_us") : NAN);
        number_cell(t, 1, record_number(r, "tflops"));
        error_cell(t, r);
        file_cell(t, r);
    }
    free(chosen);
}

/* ---- Profiles ---- */

static bool counters_wanted(const json_t *r)
{
    return strcmp(record_text(r, "kind"), "counters") == 0;
}

/* How busy the units were, in percent. */
static void unit_cells(report_table *t, const json_t *counters)
{
    static const char *const keys[] = {"tensor_pct", "exponentials_pct", "issue_pct",
                                       "shared_pct", "l2_pct",           "dram_pct"};
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; ++k) {
        number_cell(t, 1, record_number(counters, keys[k]));
    }
}

static void make_profiles(report_table *t, const report_data *data)
{
    static const char *const headings[] = {
        "GPU",           "problem",         "kernel", "µs alone", "floor's rate %", "tensor cores %", "exponentials %",
        "issue slots %", "shared memory %", "L2 %",   "DRAM %",   "bound by",       "result",         NULL};
    begin(t, "Hardware counters of one launch, caches warm: how busy each unit is.", headings);
    size_t count = 0;
    const json_t **chosen =
        records_latest(&count, data->profiles, data->profile_count, counters_wanted, ladder_key, by_rung);
    for (size_t i = 0; i < count && add_row(t); ++i) {
        const json_t *r = chosen[i], *counters = json_object_get(r, "counters");
        cell(t, "%s", record_text(r, "device"));
        cell(t, "`%s`", record_text(r, "problem"));
        cell(t, "`%s`", record_timed(r));
        cell(t, "%.2f", record_number(counters, "duration_us"));
        cell(t, "%.0f", 100 * record_number(r, "floor_share"));
        unit_cells(t, counters);
        cell(t, "%s", record_text(r, "bound"));
        file_cell(t, r);
    }
    free(chosen);
}

static bool timelines_wanted(const json_t *r)
{
    return strcmp(record_text(r, "kind"), "timeline") == 0;
}

/* Steps that take at least a twentieth of the group's time, in their order. */
static void steps_cell(report_table *t, const json_t *group)
{
    static const double least_share = 0.05;
    const json_t *steps = json_object_get(group, "steps");
    char text[900] = "";
    size_t used = 0;
    for (size_t i = 0; i < json_array_size(steps) && used < sizeof text; ++i) {
        const json_t *step = json_array_get(steps, i);
        const double share = record_number(step, "share");
        if (share >= least_share) {
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s %.0f %%", used > 0 ? "; " : "",
                                     record_text(step, "step"), 100 * share);
        }
    }
    cell(t, "%s", text);
}

static void make_timelines(report_table *t, const report_data *data)
{
    static const char *const headings[] = {"problem",         "kernel",   "group of warps", "share of its time until",
                                           "cycles of a CTA", "µs alone", "µs with stamps", "GPU",
                                           "result",          NULL};
    begin(t, "Clock stamps in one launch: what each group of warps of the median CTA spends its time on, from 5 %.",
          headings);
    size_t count = 0;
    const json_t **chosen =
        records_latest(&count, data->profiles, data->profile_count, timelines_wanted, ladder_key, by_rung);
    for (size_t i = 0; i < count; ++i) {
        const json_t *r = chosen[i], *groups = json_object_get(r, "groups");
        for (size_t g = 0; g < json_array_size(groups) && add_row(t); ++g) {
            const json_t *group = json_array_get(groups, g);
            cell(t, "`%s`", record_text(r, "problem"));
            cell(t, "`%s`", record_timed(r));
            number_cell(t, 0, record_number(group, "group"));
            steps_cell(t, group);
            number_cell(t, 0, record_number(r, "cta_cycles"));
            number_cell(t, 2, record_number(r, "plain_us"));
            number_cell(t, 2, record_number(r, "marked_us"));
            cell(t, "%s", record_text(r, "device"));
            file_cell(t, r);
        }
    }
    free(chosen);
}

/* ---- Evolution ---- */

static void make_trials(report_table *t, const report_data *data)
{
    static const char *const headings[] = {"run",   "arm",      "proposed",           "distinct",
                                           "timed", "improved", "best times as fast", NULL};
    begin(t, "Evolution runs: what became of the trials, and the best over the incumbent.", headings);
    for (size_t i = 0; i < data->run_count; ++i) {
        const report_run *run = &data->runs[i];
        for (size_t first = 0, end; first < run->count; first = end) {
            size_t distinct = 0, timed = 0, improved = 0;
            double best = NAN;
            for (end = first; end < run->count && strcmp(run->trials[end].arm, run->trials[first].arm) == 0; ++end) {
                const report_trial *trial = &run->trials[end];
                distinct += trial->distinct ? 1 : 0;
                timed += isnan(trial->speedup) ? 0 : 1;
                improved += trial->improved ? 1 : 0;
                best = fmax(best, trial->speedup); /* fmax ignores NaN */
            }
            if (!add_row(t)) {
                return;
            }
            cell(t, "`%s`", run->file);
            cell(t, "%s", run->trials[first].arm);
            cell(t, "%zu", end - first);
            cell(t, "%zu", distinct);
            cell(t, "%zu", timed);
            cell(t, "%zu", improved);
            number_cell(t, 3, best);
        }
    }
}

/* A profile of a search's store: its counters, or why there are none. */
static void profile_row(report_table *t, const report_run *run, const char *what, const json_t *profile)
{
    const json_t *counters = json_object_get(profile, "counters");
    const bool counted = json_object_size(counters) > 0;
    if (!add_row(t)) {
        return;
    }
    cell(t, "`%s`", run->file);
    cell(t, "`%s`", record_text(profile, "problem"));
    cell(t, "%s", what);
    number_cell(t, 2, record_number(counters, "duration_us"));
    unit_cells(t, counters);
    if (counted) {
        cell(t, "%s", record_text(profile, "diagnosis"));
    } else {
        cell(t, "%s %s", record_text(profile, "status"), record_text(profile, "detail"));
    }
}

/* On each problem what the search found, then the incumbent. */
static void make_winners(report_table *t, const report_data *data)
{
    static const char *const headings[] = {
        "run",           "problem",         "kernel", "µs alone", "tensor cores %",        "exponentials %",
        "issue slots %", "shared memory %", "L2 %",   "DRAM %",   "what the counters say", NULL};
    begin(t, "Hardware counters of what the search found beside the incumbent's, one launch each, caches warm.",
          headings);
    for (size_t i = 0; i < data->run_count; ++i) {
        const report_run *run = &data->runs[i];
        const json_t *search = json_object_get(run->summary, "search");
        const json_t *confirmed = json_object_get(search, "confirmed");
        const json_t *won = json_is_object(confirmed) ? confirmed : json_object_get(search, "fastest");
        const json_t *profiles = json_object_get(won, "profile");
        const json_t *incumbents = json_object_get(run->summary, "incumbent_profile");
        char what[KEY_BYTES];
        snprintf(what, sizeof what, "`%s`, %s", record_text(won, "kernel"),
                 won == confirmed ? "the winner" : "not confirmed");
        for (size_t k = 0; k < json_array_size(profiles); ++k) {
            const json_t *profile = json_array_get(profiles, k);
            profile_row(t, run, what, profile);
            for (size_t n = 0; n < json_array_size(incumbents); ++n) {
                const json_t *incumbent = json_array_get(incumbents, n);
                if (strcmp(record_text(incumbent, "problem"), record_text(profile, "problem")) == 0) {
                    profile_row(t, run, "the incumbent", incumbent);
                }
            }
        }
    }
}

/* ---- Everything ---- */

static bool any_wanted(const json_t *r)
{
    (void)r;
    return true;
}

static void every_key(const json_t *r, char out[KEY_BYTES])
{
    snprintf(out, KEY_BYTES, "%s\n%s\n%s\n%s\n%d\n%s", record_text(r, "device"), record_text(r, "problem"),
             record_text(r, "mode"), record_timed(r), record_flag(r, "overlap"), record_text(r, "file"));
}

static int by_everything(const void *a, const void *b)
{
    int problem = by_device_and_problem(a, b), mode = by_text(record_at(a), record_at(b), "mode");
    return problem ? problem : mode ? mode : by_number(record_at(a), record_at(b), "p50_us");
}

static void make_all(report_table *t, const report_data *data)
{
    static const char *const headings[] = {"device",        "problem", "mode", "kernel or peer",  "p50 µs",
                                           "95 % interval", "p99 µs",  "n",    "times the floor", "TFLOP/s",
                                           "max error",     "result",  NULL};
    begin(t, "All measurements, the latest of each.", headings);
    size_t count = 0;
    const json_t **chosen =
        records_latest(&count, data->records, data->record_count, any_wanted, every_key, by_everything);
    for (size_t i = 0; i < count && add_row(t); ++i) {
        const json_t *r = chosen[i];
        double low = record_bound(r, "ci95_us", 0), high = record_bound(r, "ci95_us", 1);
        double times_floor = record_number(r, "p50_us") / record_number(r, "floor_us"),
               tflops = record_number(r, "tflops");
        cell(t, "%s", record_text(r, "device"));
        cell(t, "`%s`", record_text(r, "problem"));
        cell(t, "%s", record_text(r, "mode"));
        cell(t, "`%s`%s", record_timed(r), overlap_note(r));
        cell(t, "%.2f", record_number(r, "p50_us"));
        if (isnan(low) || isnan(high)) {
            cell(t, "%s", "");
        } else {
            cell(t, "%.2f to %.2f", low, high);
        }
        cell(t, "%.2f", record_number(r, "p99_us"));
        cell(t, "%.0f", record_number(r, "n"));
        number_cell(t, 2, times_floor);
        number_cell(t, 1, tflops);
        error_cell(t, r);
        file_cell(t, r);
    }
    free(chosen);
}

/* ---- All tables ---- */

static const struct {
    const char *name;
    void (*make)(report_table *t, const report_data *data);
} makers[] = {
    {"headline", make_headline},   {"mission-gpu", make_mission},
    {"gpu-peers", make_peers},     {"cpu-pytorch", make_cpu},
    {"ladder", make_ladder},       {"profiles", make_profiles},
    {"timelines", make_timelines}, {"trials", make_trials},
    {"winners", make_winners},     {"all", make_all},
};

const char *const table_names[] = {"headline",  "mission-gpu", "gpu-peers", "cpu-pytorch", "ladder", "profiles",
                                   "timelines", "trials",      "winners",   "all",         NULL};

bool table_make(report_table *out, const char *name, const report_data *data)
{
    for (size_t i = 0; i < sizeof makers / sizeof makers[0]; ++i) {
        if (strcmp(makers[i].name, name) == 0) {
            *out = (report_table){.name = makers[i].name};
            makers[i].make(out, data);
            return true;
        }
    }
    return false;
}

void table_free(report_table *table)
{
    for (size_t row = 0; row < table->row_count; ++row) {
        for (int column = 0; column < TABLE_COLUMNS_MAX; ++column) {
            free(table->rows[row][column]);
        }
        free(table->rows[row]);
    }
    free(table->rows);
    *table = (report_table){.rows = NULL};
}

/* ---- Markdown ---- */

void table_markdown(report_text *out, const report_table *table, const char *to_root)
{
    if (table->row_count == 0) {
        text_add(out, "*(no result in results/ yet)*\n");
        return;
    }
    for (int column = 0; column < table->columns; ++column) {
        text_add(out, "| %s ", table->headings[column]);
    }
    text_add(out, "|\n|");
    for (int column = 0; column < table->columns; ++column) {
        text_add(out, "---|");
    }
    text_add(out, "\n");
    for (size_t row = 0; row < table->row_count; ++row) {
        for (int column = 0; column < table->columns; ++column) {
            const char *text = table->rows[row][column], *link = strstr(text, "](");
            if (link) { /* a file of results/, or with / from the root */
                const char *folder = link[2] == '/' ? "" : "results/";
                text_add(out, "| %.*s%s%s%s ", (int)(link - text) + 2, text, to_root, folder,
                         link + 2 + (link[2] == '/'));
            } else {
                text_add(out, "| %s ", text);
            }
        }
        text_add(out, "|\n");
    }
}

/* ---- HTML ---- */

static void html_cell(report_text *out, const char *text)
{
    const char *link = *text == '[' ? strstr(text, "](") : NULL;
    if (link) {
        text_add(out, "<td data-file=\"%.*s\">%.*s</td>", (int)strcspn(link + 2, ")"), link + 2, (int)(link - text) - 1,
                 text + 1);
        return;
    }
    bool number = (*text >= '0' && *text <= '9');
    text_add(out, number ? "<td class=\"n\">" : "<td>");
    const char *code = *text == '`' ? strchr(text + 1, '`') : NULL;
    if (code) {
        char name[512];
        snprintf(name, sizeof name, "%.*s", (int)(code - text) - 1, text + 1);
        text_add(out, "<code>");
        text_add_escaped(out, name);
        text_add(out, "</code>");
        text = code + 1;
    }
    text_add_escaped(out, text);
    text_add(out, "</td>");
}

void table_html(report_text *out, const report_table *table)
{
    text_add(out,
             "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"%s\">\n<table id=\"table-%s\">\n"
             "<caption>%s</caption>\n<thead><tr>",
             table->name, table->name, table->caption);
    for (int column = 0; column < table->columns; ++column) {
        text_add(out, "<th scope=\"col\">%s</th>", table->headings[column]);
    }
    text_add(out, "</tr></thead>\n<tbody>\n");
    for (size_t row = 0; row < table->row_count; ++row) {
        text_add(out, "<tr>");
        for (int column = 0; column < table->columns; ++column) {
            html_cell(out, table->rows[row][column]);
        }
        text_add(out, "</tr>\n");
    }
    text_add(out, "</tbody>\n</table>\n</div>\n");
}
