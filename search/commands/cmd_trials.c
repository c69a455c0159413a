/* acromion trials: what a search tried. Reads a store, also while the search is going on. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/exit_code.h"
#include "base/json.h"
#include "base/options.h"
#include "base/text.h"
#include "commands.h"
#include "search/definition.h"
#include "search/store.h"
#include "search/summary.h"

enum {
    ID_STORE = OPTION_LONG_ONLY
};

static const option_spec options[OPTIONS_MAX] = {
    {ID_STORE, "store", "FILE", "the run's file; default evolve.db"},
};

static const command_spec spec = {
    .usage = "trials list|show N|diff N M|export|summary",
    .examples = "  acromion trials list --store mission.db\n"
                "  acromion trials diff 12 31 --store mission.db\n"
                "  acromion trials export --store mission.db > mission.jsonl\n",
    .about = "  list        a line a trial: what it was, how it ended, how fast it was\n"
             "  show N      everything about one trial; its proposer's request and answer with --json\n"
             "  diff N M    what differs between two: parameters, sources, resources, times\n"
             "  export      all trials as JSON lines, with errors of every case and raw samples\n"
             "  summary     what `acromion evolve` prints at its end\n",
    .options = options,
    .common = COMMON_JSON,
};

static bool take_option(void *arg, int id, const char *value)
{
    (void)id;
    *(const char **)arg = value;
    return true;
}

/* ---- list ---- */

static json_t *view_json(const trial_view *v)
{
    json_t *parents = json_array();
    for (int i = 0; i < v->row.parent_count; ++i) {
        json_array_append_new(parents, json_integer(v->row.parents[i]));
    }
    return json_pack("{s:I, s:s, s:s, s:s, s:s, s:s, s:s, s:o, s:s?, s:s?, s:o, s:o, s:o, s:b, s:b, s:b}", "id",
                     (json_int_t)v->row.id, "arm", trial_arm_name(v->row.arm), "operation", v->row.operation, "kernel",
                     v->row.kernel, "family", v->row.family, "arch", v->row.arch, "parameters", v->row.parameters,
                     "parents", parents, "status", v->status, "detail", v->detail, "speedup",
                     json_number_or_null(v->speedup), "speedup_low", json_number_or_null(v->low), "speedup_high",
                     json_number_or_null(v->high), "distinct", (int)v->distinct, "improved", (int)v->improved,
                     "confirmed", (int)v->confirmed);
}

static void print_view(const trial_view *v)
{
    char result[64] = "", parents[48] = "";
    if (isfinite(v->speedup)) {
        snprintf(result, sizeof result, "%.3f [%.3f, %.3f] %s", v->speedup, v->low, v->high,
                 stats_verdict_text(v->verdict));
    }
    for (int i = 0; i < v->row.parent_count; ++i) {
        size_t length = strlen(parents);
        snprintf(parents + length, sizeof parents - length, "%s%lld", i > 0 ? "," : "", (long long)v->row.parents[i]);
    }
    printf("%5lld %-7s %-8s %-7s %-46s %-15s %s%s%s\n", (long long)v->row.id, trial_arm_name(v->row.arm),
           v->row.operation, parents, v->row.kernel[0] ? v->row.kernel : "(no candidate)",
           v->finished ? v->status : "in flight", result, v->improved ? " improved" : "",
           v->confirmed           ? " CONFIRMED"
           : v->confirmations > 0 ? " not confirmed"
                                  : "");
}

/* rows: where the JSON goes, NULL = text. */
static bool list_one(void *rows, const trial_view *v)
{
    if (rows) {
        json_array_append_new(rows, view_json(v));
    } else {
        print_view(v);
    }
    return true;
}

static acr_status list(store *s, bool json)
{
    json_t *rows = json ? json_array() : NULL;
    if (!json) {
        printf("%5s %-7s %-8s %-7s %-46s %-15s %s\n", "trial", "arm", "by", "parents", "kernel", "status",
               "speed-up [95 % interval] verdict");
    }
    acr_status status = store_trials(s, list_one, rows);
    if (rows) {
        json_print(rows);
    }
    return status;
}

/* ---- show ---- */

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

static double number_of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void print_timings(const json_t *trial)
{
    const json_t *timings = json_object_get(trial, "timings");
    for (size_t i = 0; i < json_array_size(timings); ++i) {
        const json_t *t = json_array_get(timings, i);
        char incumbent_us[24], candidate_us[24], floor[24];
        printf("  %-11s %-36s %s us against %s (floor %s): %.3f [%.3f, %.3f] %s\n", text_of(t, "phase"),
               text_of(t, "problem"), us_text(candidate_us, number_of(t, "candidate_p50_us")),
               us_text(incumbent_us, number_of(t, "incumbent_p50_us")), us_text(floor, number_of(t, "floor_us")),
               number_of(t, "speedup"), number_of(t, "speedup_low"), number_of(t, "speedup_high"),
               text_of(t, "verdict"));
    }
}

static void print_cases(const json_t *trial)
{
    const json_t *cases = json_object_get(trial, "cases");
    for (size_t i = 0; i < json_array_size(cases); ++i) {
        const json_t *c = json_array_get(cases, i);
        printf("  %-11s %-4s %-48s %-10s seed %s%s  max %.2g of %.2g\n", text_of(c, "phase"),
               json_integer_value(json_object_get(c, "pass")) ? "ok" : "FAIL", text_of(c, "problem"),
               text_of(c, "inputs"), text_of(c, "seed"),
               json_integer_value(json_object_get(c, "hidden")) ? " hidden" : "", number_of(c, "err_max"),
               number_of(c, "tol_max"));
    }
}

static void print_named(const char *title, const json_t *rows)
{
    if (json_array_size(rows) > 0) {
        printf("%s:", title);
    }
    for (size_t i = 0; i < json_array_size(rows); ++i) {
        const json_t *row = json_array_get(rows, i);
        printf("%s %s %g %s", i > 0 ? "," : "", text_of(row, "name"), number_of(row, "value"), text_of(row, "unit"));
    }
    if (json_array_size(rows) > 0) {
        putchar('\n');
    }
}

/* Of each problem the counters and what they say, or why there are none. */
static void print_profiles(const json_t *profiles)
{
    for (size_t i = 0; i < json_array_size(profiles); ++i) {
        const json_t *p = json_array_get(profiles, i);
        const char *name = NULL;
        json_t *value = NULL;
        printf("profile of %s: %s, %s%s%s\n", text_of(p, "problem"), text_of(p, "status"), text_of(p, "tool"),
               *text_of(p, "detail") ? ": " : "", text_of(p, "detail"));
        if (*text_of(p, "diagnosis")) {
            printf("  %s\n ", text_of(p, "diagnosis"));
            json_object_foreach(json_object_get(p, "counters"), name, value)
            {
                printf(" %s %.6g", name, json_number_value(value));
            }
            putchar('\n');
        }
    }
}

static void print_trial(const json_t *trial)
{
    printf("trial %lld, %s by %s, round %lld\n", (long long)json_integer_value(json_object_get(trial, "id")),
           text_of(trial, "arm"), text_of(trial, "operation"),
           (long long)json_integer_value(json_object_get(trial, "round")));
    printf("kernel: %s\nset: %s %s %s\ncell: %s\n", text_of(trial, "kernel"), text_of(trial, "family"),
           text_of(trial, "arch"), text_of(trial, "parameters"), text_of(trial, "cell"));
    if (*text_of(trial, "rationale")) {
        printf("rationale: %s\n", text_of(trial, "rationale"));
    }
    printf("status: %s", *text_of(trial, "status") ? text_of(trial, "status") : "in flight");
    if (*text_of(trial, "gate")) {
        printf(", gate %s", text_of(trial, "gate"));
    }
    printf("%s%s\n", *text_of(trial, "detail") ? ": " : "", text_of(trial, "detail"));
    if (json_is_integer(json_object_get(trial, "original"))) {
        printf("the same machine code as trial %lld (0 = the incumbent)\n",
               (long long)json_integer_value(json_object_get(trial, "original")));
    }
    if (json_is_number(json_object_get(trial, "speedup"))) {
        printf("speed-up: %.3f [%.3f, %.3f] %s, noise floor %.1f %%\n", number_of(trial, "speedup"),
               number_of(trial, "speedup_low"), number_of(trial, "speedup_high"), text_of(trial, "verdict"),
               100.0 * number_of(trial, "noise_floor"));
    }
    print_named("resources", json_object_get(trial, "resources"));
    print_profiles(json_object_get(trial, "profile"));
    print_timings(trial);
    print_cases(trial);
    if (*text_of(trial, "source_text")) {
        printf("---- source ----\n%s", text_of(trial, "source_text"));
    }
}

static acr_status show(store *s, int64_t id, bool json)
{
    json_t *trial = NULL;
    acr_status status = store_trial_json(s, id, json, &trial);
    if (status != ACR_OK) {
        return status;
    }
    if (json) {
        json_print(trial);
    } else {
        json_make_printable(trial); /* a proposer's words are among it */
        print_trial(trial);
        json_decref(trial);
    }
    return ACR_OK;
}

/* ---- diff ---- */

static void print_difference(const char *name, const char *a, const char *b)
{
    if (strcmp(a, b) != 0) {
        printf("  %-14s %-44s %s\n", name, *a ? a : "-", *b ? b : "-");
    }
}

/* The value of a parameter in "NAME=value NAME=value", "" where it is not there. */
static void parameter_of(char out[64], const char *set, const char *name)
{
    size_t length = strlen(name);
    out[0] = '\0';
    for (const char *at = set; at; at = strchr(at, ' ')) {
        at += *at == ' ';
        if (strncmp(at, name, length) == 0 && at[length] == '=') {
            snprintf(out, 64, "%.*s", (int)strcspn(at + length + 1, " "), at + length + 1);
            return;
        }
    }
}

/* Parameters named in `set`; skip: a set whose names were dealt with already, or NULL. */
static void diff_parameters(const char *set, const char *a, const char *b, const char *skip)
{
    for (const char *at = set; at && *at; at = strchr(at, ' ')) {
        char name[64], value_a[64], value_b[64], seen[64] = "";
        at += *at == ' ';
        snprintf(name, sizeof name, "%.*s", (int)strcspn(at, "= "), at);
        parameter_of(value_a, a, name);
        parameter_of(value_b, b, name);
        if (skip) {
            parameter_of(seen, skip, name);
        }
        if (!seen[0]) {
            print_difference(name, value_a, value_b);
        }
    }
}

static double named_value(const json_t *rows, const char *name)
{
    for (size_t i = 0; i < json_array_size(rows); ++i) {
        const json_t *row = json_array_get(rows, i);
        if (strcmp(text_of(row, "name"), name) == 0) {
            return number_of(row, "value");
        }
    }
    return NAN;
}

static void diff_resources(const json_t *a, const json_t *b)
{
    const json_t *of_a = json_object_get(a, "resources"), *of_b = json_object_get(b, "resources");
    for (size_t i = 0; i < json_array_size(of_a); ++i) {
        const char *name = text_of(json_array_get(of_a, i), "name");
        char value_a[32], value_b[32];
        snprintf(value_a, sizeof value_a, "%g", named_value(of_a, name));
        snprintf(value_b, sizeof value_b, "%g", named_value(of_b, name));
        print_difference(name, value_a, value_b);
    }
}

/* What diff(1) says of two sources. */
static void diff_sources(const char *a, const char *b)
{
    char names[2][32] = {"/tmp/acromion.XXXXXX", "/tmp/acromion.XXXXXX"};
    const char *texts[2] = {a, b};
    bool written = true;
    for (int i = 0; i < 2; ++i) {
        int fd = mkstemp(names[i]);
        written = written && fd >= 0 && write(fd, texts[i], strlen(texts[i])) == (ssize_t)strlen(texts[i]);
        if (fd >= 0) {
            close(fd);
        }
    }
    char words[96];
    snprintf(words, sizeof words, "diff -u %s %s", names[0], names[1]);
    fflush(stdout);
    FILE *pipe = written ? popen(words, "r") : NULL; /* NOLINT(cert-env33-c): our own words */
    char line[512];
    while (pipe && fgets(line, sizeof line, pipe)) {
        fputs(line, stdout);
    }
    if (pipe) {
        pclose(pipe);
    }
    for (int i = 0; i < 2; ++i) {
        unlink(names[i]);
    }
}

static void print_diff(const json_t *a, const json_t *b)
{
    static const char *const keys[] = {"arm",    "operation", "family",  "arch",    "cell",
                                       "status", "detail",    "verdict", "identity"};
    char id_a[32], id_b[32], speed_a[64], speed_b[64];
    snprintf(id_a, sizeof id_a, "trial %lld", (long long)json_integer_value(json_object_get(a, "id")));
    snprintf(id_b, sizeof id_b, "trial %lld", (long long)json_integer_value(json_object_get(b, "id")));
    printf("  %-14s %-44s %s\n", "", id_a, id_b);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; ++i) {
        print_difference(keys[i], text_of(a, keys[i]), text_of(b, keys[i]));
    }
    diff_parameters(text_of(a, "parameters"), text_of(a, "parameters"), text_of(b, "parameters"), NULL);
    diff_parameters(text_of(b, "parameters"), text_of(a, "parameters"), text_of(b, "parameters"),
                    text_of(a, "parameters"));
    diff_resources(a, b);
    snprintf(speed_a, sizeof speed_a, "%.3f [%.3f, %.3f]", number_of(a, "speedup"), number_of(a, "speedup_low"),
             number_of(a, "speedup_high"));
    snprintf(speed_b, sizeof speed_b, "%.3f [%.3f, %.3f]", number_of(b, "speedup"), number_of(b, "speedup_low"),
             number_of(b, "speedup_high"));
    print_difference("speed-up", speed_a, speed_b);
    if (strcmp(text_of(a, "source_text"), text_of(b, "source_text")) != 0) {
        diff_sources(text_of(a, "source_text"), text_of(b, "source_text"));
    }
}

static acr_status diff(store *s, int64_t first, int64_t second, bool json)
{
    json_t *a = NULL, *b = NULL;
    acr_status status = store_trial_json(s, first, false, &a);
    if (status == ACR_OK) {
        status = store_trial_json(s, second, false, &b);
    }
    if (status == ACR_OK && json) {
        json_print(json_pack("[O, O]", a, b));
    } else if (status == ACR_OK) {
        json_make_printable(a);
        json_make_printable(b);
        print_diff(a, b);
    }
    json_decref(a);
    json_decref(b);
    return status;
}

/* ---- export, summary ---- */

typedef struct ids {
    int64_t *items;
    size_t count;
} ids;

static bool take_id(void *arg, const trial_view *v)
{
    ids *list_of = arg;
    int64_t *items = realloc(list_of->items, (list_of->count + 1) * sizeof *items);
    if (!items) {
        return false;
    }
    list_of->items = items;
    items[list_of->count++] = v->row.id;
    return true;
}

static acr_status export_all(store *s)
{
    ids all = {NULL, 0};
    acr_status status = store_trials(s, take_id, &all);
    for (size_t i = 0; i < all.count && status == ACR_OK; ++i) {
        json_t *trial = NULL;
        status = store_trial_json(s, all.items[i], true, &trial);
        if (status == ACR_OK) {
            json_dumpf(trial, stdout, JSON_COMPACT | JSON_SORT_KEYS);
            putchar('\n');
            json_decref(trial);
        }
    }
    free(all.items);
    return status;
}

static acr_status summarise(store *s, const char *path, bool json)
{
    json_t *run = NULL, *document = NULL;
    definition d = {.problem_count = 0};
    acr_status status = store_run(s, &run);
    if (status == ACR_OK) {
        status = definition_read(&d, run);
    }
    json_decref(run);
    if (status == ACR_OK && json) {
        status = summary_json(&document, s, &d, path);
        if (status == ACR_OK) {
            json_print(document);
        }
    } else if (status == ACR_OK) {
        status = summary_print(stdout, s, &d, path);
    }
    definition_free(&d);
    return status;
}

/* ---- The command ---- */

static int usage(const char *what)
{
    fprintf(stderr, "acromion trials: %s; `acromion trials --help` explains\n", what);
    return EXIT_USAGE;
}

static int act(store *s, char **operands, int count, const char *path, bool json)
{
    static const struct {
        const char *name;
        int numbers;
    } actions[] = {{"list", 0}, {"show", 1}, {"diff", 2}, {"export", 0}, {"summary", 0}};
    enum {
        ACTION_COUNT = sizeof actions / sizeof actions[0]
    };
    int action = 0;
    while (action < ACTION_COUNT && strcmp(actions[action].name, operands[0]) != 0) {
        ++action;
    }
    if (action == ACTION_COUNT || count - 1 != actions[action].numbers) {
        return usage(action == ACTION_COUNT ? "list, show, diff, export or summary?" : "the wrong number of trials");
    }
    int64_t numbers[2] = {0, 0};
    for (int i = 1; i < count; ++i) {
        if (!option_int("trial", operands[i], 1, INT64_MAX, &numbers[i - 1])) {
            return EXIT_USAGE;
        }
    }
    acr_status status = action == 0   ? list(s, json)
                        : action == 1 ? show(s, numbers[0], json)
                        : action == 2 ? diff(s, numbers[0], numbers[1], json)
                        : action == 3 ? export_all(s)
                                      : summarise(s, path, json);
    if (status == ACR_OK) {
        return EXIT_DONE;
    }
    const int exit_code = report_failure(status, "trials");
    return status == ACR_INVALID ? EXIT_USAGE : exit_code; /* a number that no trial has */
}

int cmd_trials(int argc, char **argv)
{
    common_options common;
    const char *path = "evolve.db";
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_option, &path, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    if (first == argc) {
        return usage("list, show, diff, export or summary?");
    }
    store *s = NULL;
    acr_status status = store_open(&s, path, STORE_READ);
    exit_code =
        status == ACR_OK ? act(s, argv + first, argc - first, path, common.json) : report_failure(status, "store");
    store_close(s);
    return exit_code;
}
