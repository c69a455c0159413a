/* The summary of a run, see summary.h. */
#include "summary.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "answers.h"
#include "base/json.h"
#include "fold.h"

enum {
    CURVE_MAX = 1024, /* distinct trials of an arm that the curve keeps */
    CURVE_SHOWN = 10,
    CELLS_MAX = ARCHIVE_CELLS_MAX,
    OUTCOMES_MAX = 32,
    VALIDITY_ALARM_FROM = 20, /* distinct trials, all valid: the gates may be blind */
    ELITES_ALARM_FROM = 10
};

/* The trial of an arm that matters. */
typedef struct finding {
    int64_t trial; /* 0 = none */
    char kernel[WISDOM_KERNEL_MAX], family[64], arch[SPACE_NAME_MAX], parameters[SPACE_PARAMETERS_MAX];
    double speedup, low, high;
} finding;

typedef struct cell_finding {
    char text[SPACE_PARAMETERS_MAX];
    int64_t trials, best_trial;
    double best;
} cell_finding;

typedef struct arm_summary {
    int64_t proposed, distinct, valid, improved, in_flight, confirmations;
    int curve_count;
    double curve[CURVE_MAX]; /* the best speed-up seen after so many distinct trials */
    double best, worst;      /* of valid trials */
    double elite_spread;     /* best of the ranked elites over the worst */
    finding fastest;         /* in the search, FASTER by its interval */
    finding confirmed;
    int cell_count;
    cell_finding cells[CELLS_MAX];
} arm_summary;

typedef struct outcome {
    char status[48];
    int64_t count;
} outcome;

typedef struct summary {
    arm_summary arms[ARM_COUNT];
    int outcome_count;
    outcome outcomes[OUTCOMES_MAX];
    double noise_floor; /* the largest of the slices */
    bool control_same;  /* the incumbent against itself was SAME in all slices */
    size_t slices;
    json_t *slice_list;
    json_t *guidance; /* variant -> {trials, valid, best_speedup, mean_speedup}, of external proposers */
} summary;

/* ---- Gathering ---- */

static void set_finding(finding *f, const trial_view *v, double speedup, double low, double high)
{
    *f = (finding){.trial = v->row.id, .speedup = speedup, .low = low, .high = high};
    snprintf(f->kernel, sizeof f->kernel, "%s", v->row.kernel);
    snprintf(f->family, sizeof f->family, "%s", v->row.family);
    snprintf(f->arch, sizeof f->arch, "%s", v->row.arch);
    snprintf(f->parameters, sizeof f->parameters, "%s", v->row.parameters);
}

static void add_to_cell(arm_summary *a, const trial_view *v, bool valid)
{
    int i = 0;
    while (i < a->cell_count && strcmp(a->cells[i].text, v->row.cell) != 0) {
        ++i;
    }
    if (i == CELLS_MAX || !v->row.cell[0]) {
        return;
    }
    cell_finding *cell = &a->cells[i];
    if (i == a->cell_count) {
        ++a->cell_count;
        *cell = (cell_finding){.best = NAN};
        snprintf(cell->text, sizeof cell->text, "%s", v->row.cell);
    }
    cell->trials += v->distinct;
    if (valid && !(cell->best >= v->speedup)) {
        cell->best = v->speedup;
        cell->best_trial = v->row.id;
    }
}

static void count_outcome(summary *s, const char *status)
{
    int i = 0;
    while (i < s->outcome_count && strcmp(s->outcomes[i].status, status) != 0) {
        ++i;
    }
    if (i < OUTCOMES_MAX) {
        s->outcome_count += i == s->outcome_count;
        snprintf(s->outcomes[i].status, sizeof s->outcomes[i].status, "%s", status);
        ++s->outcomes[i].count;
    }
}

static void add_to_curve(arm_summary *a)
{
    if (a->curve_count < CURVE_MAX) {
        a->curve[a->curve_count++] = fmax(1.0, a->best); /* the incumbent is there from the start */
    }
}

static bool add_trial(void *arg, const trial_view *v)
{
    summary *s = arg;
    arm_summary *a = &s->arms[v->row.arm];
    ++a->proposed;
    a->in_flight += !v->finished;
    if (!v->finished) {
        return true;
    }
    bool valid = strcmp(v->status, trial_status_name(TRIAL_VALID)) == 0;
    count_outcome(s, v->status);
    a->distinct += v->distinct;
    a->valid += valid;
    a->improved += v->improved;
    a->confirmations += v->confirmations;
    if (valid && isfinite(v->speedup)) {
        a->best = a->valid == 1 ? v->speedup : fmax(a->best, v->speedup);
        a->worst = a->valid == 1 ? v->speedup : fmin(a->worst, v->speedup);
    }
    if (v->improved) {
        set_finding(&a->fastest, v, v->speedup, v->low, v->high);
    }
    if (v->confirmed) {
        set_finding(&a->confirmed, v, v->confirmed_speedup, v->confirmed_low, v->confirmed_high);
    }
    add_to_cell(a, v, valid);
    if (v->distinct) {
        add_to_curve(a);
    }
    return true;
}

static void read_slices(summary *s)
{
    s->slices = json_array_size(s->slice_list);
    s->control_same = true;
    for (size_t i = 0; i < s->slices; ++i) {
        const json_t *slice = json_array_get(s->slice_list, i);
        const char *verdict = json_string_value(json_object_get(slice, "control_verdict"));
        bool cut_short = !verdict; /* before its control was measured, and so before any trial */
        s->control_same = s->control_same && (cut_short || strcmp(verdict, stats_verdict_text(STATS_SAME)) == 0);
        s->noise_floor = fmax(s->noise_floor, json_number_value(json_object_get(slice, "noise_floor")));
    }
}

/* How far apart the ranked elites are, which needs the archive. */
static acr_status find_spreads(summary *s, store *from, const definition *d)
{
    static const space_list none = {.count = 0};
    fold f;
    acr_status status = fold_read(&f, from, d, &none);
    for (int arm = 0; arm < ARM_COUNT && status == ACR_OK; ++arm) {
        const member *elites[ARCHIVE_ELITES];
        int count = archive_elites(&f.learnt[arm], elites);
        s->arms[arm].elite_spread = count > 1 ? elites[0]->speedup / elites[count - 1]->speedup : NAN;
    }
    if (status == ACR_OK) {
        fold_free(&f);
    }
    return status;
}

/* What a proposer was guided by, as its answers say, and what came of it. */
static bool add_guidance(void *arg, const json_t *trial, const json_t *answer)
{
    json_t *all = arg;
    const char *variant = answers_text(answer, "guidance");
    const bool valid = strcmp(answers_text(trial, "status"), trial_status_name(TRIAL_VALID)) == 0;
    if (!*variant) {
        return true;
    }
    json_t *old = json_object_get(all, variant);
    const double speedup = valid ? json_number_value(json_object_get(trial, "speedup")) : 0.0;
    const double best = json_number_value(json_object_get(old, "best_speedup"));
    const json_int_t trials = json_integer_value(json_object_get(old, "trials")) + 1;
    const json_int_t count = json_integer_value(json_object_get(old, "valid"));
    double mean = json_number_value(json_object_get(old, "mean_speedup")); /* geometric */
    mean = !valid ? mean : count == 0 ? speedup : exp((log(mean) * (double)count + log(speedup)) / (double)(count + 1));
    json_t *now = json_pack("{s:I, s:I}", "trials", trials, "valid", count + (json_int_t)valid);
    if (count + valid > 0) {
        json_object_set_new(now, "best_speedup", json_real(fmax(best, speedup)));
        json_object_set_new(now, "mean_speedup", json_real(mean));
    }
    return json_object_set_new(all, variant, now) == 0;
}

static acr_status gather(summary *out, store *s, const definition *d)
{
    memset(out, 0, sizeof *out);
    acr_status status = store_slices(s, &out->slice_list);
    if (status == ACR_OK) {
        read_slices(out);
        status = store_trials(s, add_trial, out);
    }
    out->guidance = json_object();
    if (status == ACR_OK) {
        status = answers_each(s, add_guidance, out->guidance);
    }
    return status == ACR_OK ? find_spreads(out, s, d) : status;
}

/* ---- What it means ---- */

static bool is_finished(const summary *s)
{
    const json_t *last = json_array_get(s->slice_list, s->slices - 1);
    const char *reason = s->slices > 0 ? json_string_value(json_object_get(last, "reason")) : NULL;
    return reason && strcmp(reason, "complete") == 0;
}

/* Whether two intervals tell the two apart. */
static int compare_findings(const finding *a, const finding *b)
{
    return !a->trial && !b->trial ? 0
           : !b->trial            ? 1
           : !a->trial            ? -1
           : a->low > b->high     ? 1
           : a->high < b->low     ? -1
                                  : 0;
}

/* Whether what was confirmed is more than the machine's own unrest: the whole interval beyond the noise floor of the
 * run, and the incumbent the same as itself in every slice. Only that is claimed. */
static bool is_claim(const summary *s, const finding *f)
{
    return f->trial && s->control_same && f->low > 1.0 + s->noise_floor;
}

static void conclude_of_times(const summary *s, const definition *d, const char *path, char *out, size_t capacity)
{
    const arm_summary *search = &s->arms[ARM_SEARCH], *control = &s->arms[ARM_CONTROL];
    const finding *won = &search->confirmed;
    if (!is_finished(s)) {
        char so_far[400] = "nothing is claimed yet.";
        if (is_claim(s, won)) {
            snprintf(
                so_far, sizeof so_far,
                "so far %s (trial %lld) is confirmed as %.3f times as fast as the incumbent %s, 95 %% interval %.3f "
                "to %.3f.",
                won->kernel, (long long)won->trial, won->speedup, d->incumbent_kernel, won->low, won->high);
        }
        snprintf(
            out, capacity,
            "Not finished: %lld of %d distinct trials (control %lld); %s acromion evolve --resume --store %s goes on.",
            (long long)search->distinct, d->trials, (long long)control->distinct, so_far, path);
        return;
    }
    int length = 0;
    if (won->trial && !is_claim(s, won)) {
        length = snprintf(out, capacity,
                          "No claim: %s (trial %lld) came out as %.3f times as fast in a fresh process, 95 %% interval "
                          "%.3f to %.3f, but the noise floor is %.1f %% and the incumbent against itself was %s. The "
                          "incumbent %s stands until a quiet machine says otherwise.",
                          won->kernel, (long long)won->trial, won->speedup, won->low, won->high, 100.0 * s->noise_floor,
                          s->control_same ? "SAME" : "not SAME in every slice", d->incumbent_kernel);
    } else if (won->trial) {
        length = snprintf(out, capacity,
                          "%s (trial %lld) is %.3f times as fast as the incumbent %s, 95 %% interval %.3f to %.3f, "
                          "confirmed in a fresh process with fresh seeds.",
                          won->kernel, (long long)won->trial, won->speedup, d->incumbent_kernel, won->low, won->high);
    } else if (search->confirmations > 0) {
        length = snprintf(out, capacity,
                          "No improvement: what looked faster in the search (%.3f) was not confirmed in a fresh "
                          "process with fresh seeds. The incumbent %s stands.",
                          search->fastest.speedup, d->incumbent_kernel);
    } else {
        length = snprintf(out, capacity,
                          "No improvement: none of %lld distinct trials is faster than the incumbent %s beyond the "
                          "noise floor of %.1f %%. The incumbent stands.",
                          (long long)search->distinct, d->incumbent_kernel, 100.0 * s->noise_floor);
    }
    if (length < 0 || (size_t)length >= capacity) {
        return;
    }
    const finding *drawn = &control->confirmed;
    int order = compare_findings(won, drawn);
    char budget[96] = "the same budget";
    if (control->distinct != search->distinct) {
        snprintf(budget, sizeof budget, "%lld distinct trials (the search: %lld)", (long long)control->distinct,
                 (long long)search->distinct);
    }
    if (drawn->trial) {
        snprintf(out + length, capacity - (size_t)length,
                 " Random search with %s: %.3f (%.3f to %.3f, trial %lld), %s.", budget, drawn->speedup, drawn->low,
                 drawn->high, (long long)drawn->trial,
                 order > 0   ? "less: the intervals are apart"
                 : order < 0 ? "more: the search did worse than chance"
                             : "not told apart from it");
    } else {
        snprintf(out + length, capacity - (size_t)length, " Random search with %s found no confirmed improvement.",
                 budget);
    }
}

static void conclude(const summary *s, const definition *d, const char *path, char *out, size_t capacity)
{
    const int length =
        snprintf(out, capacity, "%s", d->clock == GATES_CLOCK_MODEL ? "MODEL CLOCK, nothing was timed: " : "");
    conclude_of_times(s, d, path, out + length, capacity - (size_t)length);
}

/* Above it a machine is not one to measure on. */
static const double QUIET_FLOOR = 0.05;

/* The tripwires of docs/manual/evolve.md; returns an array of texts. */
static json_t *alarms(const summary *s, const definition *d)
{
    json_t *list = json_array();
    for (int arm = 0; arm < ARM_COUNT; ++arm) {
        const arm_summary *a = &s->arms[arm];
        const char *name = trial_arm_name((trial_arm)arm);
        if (is_finished(s) && a->distinct < d->trials) {
            json_array_append_new(list, json_sprintf("%s: ended after %lld of %d distinct trials: no set was left that "
                                                     "is legal, new and another kernel",
                                                     name, (long long)a->distinct, d->trials));
        }
        if (a->distinct >= VALIDITY_ALARM_FROM && a->valid == a->distinct) {
            json_array_append_new(list, json_sprintf("%s: all %lld distinct trials were valid: look whether the gates "
                                                     "see anything",
                                                     name, (long long)a->distinct));
        }
        if (a->proposed >= VALIDITY_ALARM_FROM && 2 * a->distinct < a->proposed) {
            json_array_append_new(list,
                                  json_sprintf("%s: only %lld of %lld proposals were distinct: the space is small or "
                                               "its parameters change nothing",
                                               name, (long long)a->distinct, (long long)a->proposed));
        }
        if (a->valid >= ELITES_ALARM_FROM && a->elite_spread < 1.0 + s->noise_floor) {
            json_array_append_new(list,
                                  json_sprintf("%s: the ranked elites differ by less than the noise floor", name));
        }
    }
    if (!s->control_same || s->noise_floor > QUIET_FLOOR) {
        json_array_append_new(
            list, json_sprintf("the machine was not quiet: noise floor %.1f %%, the incumbent against "
                               "itself %s",
                               100.0 * s->noise_floor, s->control_same ? "SAME" : "not SAME in every slice"));
    }
    for (int i = 0; i < s->outcome_count; ++i) {
        if (strcmp(s->outcomes[i].status, trial_status_name(TRIAL_LOST)) == 0) {
            json_array_append_new(list,
                                  json_sprintf("%lld trials were lost with their workers: nothing is known of them",
                                               (long long)s->outcomes[i].count));
        }
    }
    return list;
}

/* ---- JSON ---- */

static json_t *finding_json(const summary *s, const finding *f)
{
    return f->trial ? json_pack("{s:I, s:s, s:s, s:s, s:s, s:f, s:o, s:o, s:b}", "trial", (json_int_t)f->trial,
                                "kernel", f->kernel, "family", f->family, "arch", f->arch, "parameters", f->parameters,
                                "speedup", f->speedup, "low", json_number_or_null(f->low), "high",
                                json_number_or_null(f->high), "beyond_noise", (int)is_claim(s, f))
                    : json_null();
}

static json_t *arm_json(const summary *s, const arm_summary *a)
{
    json_t *curve = json_array(), *cells = json_array();
    for (int i = 0; i < a->curve_count; ++i) {
        json_array_append_new(curve, json_real(a->curve[i]));
    }
    for (int i = 0; i < a->cell_count; ++i) {
        const cell_finding *c = &a->cells[i];
        json_array_append_new(cells, json_pack("{s:s, s:I, s:o, s:I}", "cell", c->text, "distinct",
                                               (json_int_t)c->trials, "best_speedup", json_number_or_null(c->best),
                                               "best_trial", (json_int_t)c->best_trial));
    }
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o}", "proposed", (json_int_t)a->proposed, "distinct",
                     (json_int_t)a->distinct, "valid", (json_int_t)a->valid, "improved", (json_int_t)a->improved,
                     "in_flight", (json_int_t)a->in_flight, "fastest", finding_json(s, &a->fastest), "confirmed",
                     finding_json(s, &a->confirmed), "best_after_distinct_trials", curve, "cells", cells);
}

static json_t *to_json(const summary *s, const definition *d, const char *path)
{
    char conclusion[1024];
    conclude(s, d, path, conclusion, sizeof conclusion);
    json_t *outcomes = json_object();
    for (int i = 0; i < s->outcome_count; ++i) {
        json_object_set_new(outcomes, s->outcomes[i].status, json_integer(s->outcomes[i].count));
    }
    return json_pack("{s:o, s:b, s:s, s:f, s:b, s:o, s:o, s:o, s:o, s:O, s:O}", "run", definition_json(d), "finished",
                     (int)is_finished(s), "conclusion", conclusion, "noise_floor", s->noise_floor, "control_is_same",
                     (int)s->control_same, "search", arm_json(s, &s->arms[ARM_SEARCH]), "control",
                     arm_json(s, &s->arms[ARM_CONTROL]), "outcomes", outcomes, "alarms", alarms(s, d), "slices",
                     s->slice_list, "guidance", s->guidance);
}

/* What Nsight Compute said of the incumbent and of what the search found, where it was asked. */
static acr_status add_profiles(json_t *json, const summary *found, store *s)
{
    const arm_summary *a = &found->arms[ARM_SEARCH];
    json_t *search = json_object_get(json, "search");
    const struct {
        json_t *to;
        const char *name;
        int64_t trial; /* 0: the incumbent */
        bool wanted;
    } profiles[] = {{json, "incumbent_profile", 0, true},
                    {json_object_get(search, "fastest"), "profile", a->fastest.trial, a->fastest.trial != 0},
                    {json_object_get(search, "confirmed"), "profile", a->confirmed.trial, a->confirmed.trial != 0}};
    acr_status status = ACR_OK;
    for (size_t i = 0; i < sizeof profiles / sizeof profiles[0] && status == ACR_OK; ++i) {
        json_t *profile = NULL;
        if (profiles[i].wanted && (status = store_profile_json(s, profiles[i].trial, &profile)) == ACR_OK) {
            json_object_set_new(profiles[i].to, profiles[i].name, profile);
        }
    }
    return status;
}

acr_status summary_json(json_t **out, store *s, const definition *d, const char *path)
{
    summary *found = malloc(sizeof *found);
    if (!found) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a summary");
    }
    json_t *json = NULL;
    acr_status status = gather(found, s, d);
    if (status == ACR_OK) {
        json = to_json(found, d, path);
        status = json ? add_profiles(json, found, s) : acr__fail(ACR_NO_MEMORY, "no memory for a summary");
    }
    if (status == ACR_OK) {
        *out = json;
    } else {
        json_decref(json);
    }
    json_decref(found->slice_list);
    json_decref(found->guidance);
    free(found);
    return status;
}

/* ---- Text ---- */

static void finding_text(char out[96], const finding *f, const char *more)
{
    if (f->trial) {
        snprintf(out, 96, "%.3f [%.3f, %.3f] t%lld%s", f->speedup, f->low, f->high, (long long)f->trial, more);
    } else {
        snprintf(out, 96, "none");
    }
}

static void print_arm(FILE *out, const summary *s, const char *name, const arm_summary *a)
{
    char fastest[96], confirmed[96];
    finding_text(fastest, &a->fastest, "");
    finding_text(confirmed, &a->confirmed, is_claim(s, &a->confirmed) ? "" : ", within the noise");
    fprintf(out, "  %-8s %8lld %8lld %6lld %8lld   %-30s %s\n", name, (long long)a->proposed, (long long)a->distinct,
            (long long)a->valid, (long long)a->improved, fastest, confirmed);
}

static void print_curves(FILE *out, const summary *s)
{
    int longest = s->arms[ARM_SEARCH].curve_count;
    longest = s->arms[ARM_CONTROL].curve_count > longest ? s->arms[ARM_CONTROL].curve_count : longest;
    int step = (longest + CURVE_SHOWN - 1) / CURVE_SHOWN;
    fprintf(out, "best so far, after so many distinct trials (unconfirmed)\n  %-8s", "");
    for (int i = step; i <= longest && step > 0; i += step) {
        fprintf(out, " %6d", i);
    }
    fputc('\n', out);
    for (int arm = 0; arm < ARM_COUNT; ++arm) {
        const arm_summary *a = &s->arms[arm];
        fprintf(out, "  %-8s", trial_arm_name((trial_arm)arm));
        for (int i = step; i <= longest && step > 0; i += step) {
            if (i <= a->curve_count) {
                fprintf(out, " %6.3f", a->curve[i - 1]);
            }
        }
        fputc('\n', out);
    }
}

static void print_cells(FILE *out, const arm_summary *a)
{
    fprintf(out, "macro cells of the search\n");
    for (int i = 0; i < a->cell_count; ++i) {
        const cell_finding *c = &a->cells[i];
        fprintf(out, "  %-50s %3lld distinct, best ", c->text, (long long)c->trials);
        if (isfinite(c->best)) {
            fprintf(out, "%.3f (t%lld)\n", c->best, (long long)c->best_trial);
        } else {
            fputs("none\n", out);
        }
    }
}

static void print_head(FILE *out, const summary *s, const definition *d, const char *path)
{
    fprintf(out, "%s: search against %s on %s, seed %llu%s\n", path, d->incumbent_kernel, d->device_key,
            (unsigned long long)d->seed,
            d->clock == GATES_CLOCK_MODEL ? ", MODEL CLOCK: nothing was timed, no figure means anything" : "");
    for (size_t i = 0; i < d->problem_count; ++i) {
        char text[ACR_PROBLEM_TEXT_MAX];
        acr_problem_format(&d->problems[i].problem, text, sizeof text);
        fprintf(out, "  %s, weight %g\n", text, d->problems[i].weight);
    }
    fprintf(out, "noise floor %.1f %% (the incumbent against itself: %s, %zu slice%s)\n\n", 100.0 * s->noise_floor,
            s->control_same ? "SAME" : "NOT always SAME", s->slices, s->slices == 1 ? "" : "s");
    fprintf(out, "  %-8s %8s %8s %6s %8s   %-30s %s\n", "", "proposed", "distinct", "valid", "improved",
            "fastest in the search", "confirmed");
}

static void print_guidance(FILE *out, const summary *s)
{
    const char *variant = NULL;
    json_t *v = NULL;
    json_object_foreach(s->guidance, variant, v)
    {
        const json_t *best = json_object_get(v, "best_speedup");
        fprintf(out, "guidance %s: %lld trials, %lld valid", variant,
                (long long)json_integer_value(json_object_get(v, "trials")),
                (long long)json_integer_value(json_object_get(v, "valid")));
        if (best) {
            fprintf(out, ", best %.3f, mean %.3f", json_number_value(best),
                    json_number_value(json_object_get(v, "mean_speedup")));
        }
        fputc('\n', out);
    }
}

static void print_rest(FILE *out, const summary *s, const definition *d, const char *path)
{
    char conclusion[1024];
    json_t *warnings = alarms(s, d);
    print_guidance(out, s);
    fputs("outcomes:", out);
    for (int i = 0; i < s->outcome_count; ++i) {
        fprintf(out, "%s %s %lld", i > 0 ? "," : "", s->outcomes[i].status, (long long)s->outcomes[i].count);
    }
    fputc('\n', out);
    for (size_t i = 0; i < json_array_size(warnings); ++i) {
        fprintf(out, "ALARM %s\n", json_string_value(json_array_get(warnings, i)));
    }
    json_decref(warnings);
    conclude(s, d, path, conclusion, sizeof conclusion);
    fprintf(out, "\n%s\n", conclusion);
}

acr_status summary_print(FILE *out, store *s, const definition *d, const char *path)
{
    summary *found = malloc(sizeof *found);
    if (!found) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a summary");
    }
    acr_status status = gather(found, s, d);
    if (status == ACR_OK) {
        print_head(out, found, d, path);
        print_arm(out, found, "search", &found->arms[ARM_SEARCH]);
        print_arm(out, found, "control", &found->arms[ARM_CONTROL]);
        fputc('\n', out);
        print_curves(out, found);
        print_cells(out, &found->arms[ARM_SEARCH]);
        print_rest(out, found, d, path);
    }
    json_decref(found->slice_list);
    json_decref(found->guidance);
    free(found);
    return status;
}

acr_status summary_of_file(json_t **out, const char *path)
{
    store *s = NULL;
    json_t *run = NULL;
    definition d = {.problem_count = 0};
    acr_status status = store_open(&s, path, STORE_READ);
    if (status == ACR_OK) {
        status = store_run(s, &run);
    }
    if (status == ACR_OK) {
        status = definition_read(&d, run);
    }
    if (status == ACR_OK) {
        status = summary_json(out, s, &d, path);
    }
    json_decref(run);
    definition_free(&d);
    store_close(s);
    return status;
}
