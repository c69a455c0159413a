/* Counters and the tool's tables, see profile_counters.h. */
#include "profile_counters.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/json.h"

const counter_info counter_infos[COUNTER_COUNT] = {
#define X(id, key, unit, metric, what) [COUNTER_##id] = {key, unit, metric, what},
    PROFILE_COUNTERS(X)
#undef X
};

const stall_info stall_infos[STALL_COUNT] = {
#define X(reason, what)                                                                                                \
    [STALL_##reason] = {#reason, "smsp__average_warps_issue_stalled_" #reason "_per_issue_active.ratio", what},
    PROFILE_STALLS(X)
#undef X
};

profile_counters profile_no_counters(void)
{
    profile_counters c;
    for (int i = 0; i < COUNTER_COUNT; ++i) {
        c.value[i] = NAN;
    }
    for (int i = 0; i < STALL_COUNT; ++i) {
        c.stall[i] = NAN;
    }
    return c;
}

/* ---- CSV ---- */

enum {
    FIELDS_MAX = 2048 /* the raw page adds some 250 columns about device and launch to what was asked for */
};

/* Cuts a line into its fields, in place: quotes go, doubled quotes become one. Returns how many there are, at most
 * FIELDS_MAX. */
static int split_line(char *line, char *fields[FIELDS_MAX])
{
    int count = 0;
    while (count < FIELDS_MAX) {
        fields[count++] = line;
        char *to = line;
        bool quoted = false;
        for (; *line && (quoted || *line != ','); ++line) {
            if (*line == '"' && quoted && line[1] == '"') {
                *to++ = *++line;
            } else if (*line == '"') {
                quoted = !quoted;
            } else {
                *to++ = *line;
            }
        }
        bool more = *line == ',';
        *to = '\0';
        if (!more) {
            break;
        }
        ++line;
    }
    return count;
}

/* "1,234.5" as 1234.5; NaN for what no counter can be. */
static double number_of(const char *text)
{
    char digits[64];
    size_t length = 0;
    for (; *text && length < sizeof digits - 1; ++text) {
        if (*text != ',') {
            digits[length++] = *text;
        }
    }
    digits[length] = '\0';
    char *end = NULL;
    double value = strtod(digits, &end);
    return end == digits || *end || !isfinite(value) || value < 0 ? NAN : value;
}

/* What a number in this unit is to be multiplied by, so that it is in seconds, bytes, hertz or plain. */
static double unit_factor(const char *unit)
{
    static const struct {
        const char *name;
        double factor;
    } units[] = {{"ns", 1e-9},
                 {"nsecond", 1e-9},
                 {"us", 1e-6},
                 {"usecond", 1e-6},
                 {"ms", 1e-3},
                 {"msecond", 1e-3},
                 {"s", 1},
                 {"second", 1},
                 {"byte", 1},
                 {"Kbyte", 1e3},
                 {"Mbyte", 1e6},
                 {"Gbyte", 1e9},
                 {"hz", 1},
                 {"Khz", 1e3},
                 {"Mhz", 1e6},
                 {"Ghz", 1e9},
                 {"cycle/s", 1},
                 {"cycle/ms", 1e3},
                 {"cycle/us", 1e6},
                 {"cycle/ns", 1e9},
                 {"cycle/second", 1},
                 {"cycle/msecond", 1e3},
                 {"cycle/usecond", 1e6},
                 {"cycle/nsecond", 1e9}};
    char plain[32];
    size_t length = strcspn(unit, "/");
    bool rate = strncmp(unit, "cycle/", 6) == 0;
    if (length >= sizeof plain || strlen(unit) >= sizeof plain) {
        return 1;
    }
    memcpy(plain, unit, rate ? strlen(unit) + 1 : length + 1);
    if (!rate) {
        plain[length] = '\0'; /* "Kbyte/block" */
    }
    for (size_t i = 0; i < sizeof units / sizeof units[0]; ++i) {
        if (strcasecmp(plain, units[i].name) == 0) {
            return units[i].factor;
        }
    }
    return 1;
}

static void store(profile_counters *c, const char *metric, const char *unit, const char *text)
{
    for (int i = 0; i < COUNTER_COUNT; ++i) {
        if (strcmp(metric, counter_infos[i].metric) == 0) {
            double scale = i == COUNTER_DURATION ? 1e6 : i == COUNTER_SM_CLOCK ? 1e-6 : 1;
            c->value[i] = number_of(text) * unit_factor(unit) * scale;
        }
    }
    for (int i = 0; i < STALL_COUNT; ++i) {
        if (strcmp(metric, stall_infos[i].metric) == 0) {
            c->stall[i] = number_of(text);
        }
    }
}

static int column_of(char *const *fields, int count, const char *name)
{
    for (int i = 0; i < count; ++i) {
        if (strcmp(fields[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

/* "name" of "name", "name(fwd_args, fwd_maps)" or "void name<4>(...)". */
static bool names_kernel(const char *field, const char *kernel)
{
    size_t length = strlen(kernel);
    for (const char *at = strstr(field, kernel); at; at = strstr(at + 1, kernel)) {
        bool begins = at == field || strchr(" *&:", at[-1]);
        if (begins && (at[length] == '\0' || strchr("(< ", at[length]))) {
            return true;
        }
    }
    return false;
}

/* The table that is being read. */
typedef struct table {
    char *headings[FIELDS_MAX], *units[FIELDS_MAX];
    int columns, kernel, id, metric, unit, value; /* columns' numbers; -1 = not there */
    bool has_units;
    char *last_id; /* of the launch before, where a line is a metric */
} table;

static void begin_table(table *t, char *const *fields, int count)
{
    memcpy(t->headings, fields, (size_t)count * sizeof *fields);
    t->columns = count;
    t->id = 0;
    t->kernel = column_of(fields, count, "Kernel Name");
    t->metric = column_of(fields, count, "Metric Name");
    t->unit = column_of(fields, count, "Metric Unit");
    t->value = column_of(fields, count, "Metric Value");
    t->has_units = false;
    t->last_id = NULL;
}

/* One line of the table's body. Returns 1 when it begins another launch of the kernel. */
static int read_row(table *t, profile_counters *out, char *const *fields, const char *kernel)
{
    bool by_metric = t->metric >= 0 && t->value >= 0;
    if (!by_metric && !*fields[t->id] && !t->has_units) { /* the second line: units, and no launch's number */
        memcpy(t->units, fields, (size_t)t->columns * sizeof *fields);
        t->has_units = true;
        return 0;
    }
    if (!names_kernel(fields[t->kernel], kernel)) {
        return 0;
    }
    int another = !by_metric || !t->last_id || strcmp(t->last_id, fields[t->id]) != 0;
    t->last_id = fields[t->id];
    if (another) {
        *out = profile_no_counters();
    }
    if (by_metric) {
        store(out, fields[t->metric], t->unit >= 0 ? fields[t->unit] : "", fields[t->value]);
    }
    for (int i = 0; i < t->columns && !by_metric; ++i) {
        store(out, t->headings[i], t->has_units ? t->units[i] : "", fields[i]);
    }
    return another;
}

int profile_parse_csv(profile_counters *out, char *text, const char *kernel, bool *is_table)
{
    table t = {.columns = 0};
    int launches = 0;
    *out = profile_no_counters();
    char *rest = NULL;
    for (char *line = strtok_r(text, "\r\n", &rest); line; line = strtok_r(NULL, "\r\n", &rest)) {
        char *fields[FIELDS_MAX];
        if (strncmp(line, "==", 2) == 0) { /* the tool talks */
            continue;
        }
        int count = split_line(line, fields);
        if (strcmp(fields[0], "ID") == 0 && column_of(fields, count, "Kernel Name") > 0) {
            begin_table(&t, fields, count);
        } else if (t.columns > 0 && count == t.columns) {
            launches += read_row(&t, out, fields, kernel);
        }
    }
    *is_table = t.columns > 0;
    return launches;
}

/* ---- JSON ---- */

json_t *counters_json(const profile_counters *c)
{
    static const double whole_max = 0x1p53; /* counts are written with all their digits */
    json_t *json = json_object();
    for (int i = 0; i < COUNTER_COUNT; ++i) {
        double value = c->value[i];
        bool whole = value == floor(value) && fabs(value) < whole_max;
        json_object_set_new(json, counter_infos[i].key,
                            whole ? json_integer((json_int_t)value) : json_number_or_null(value));
    }
    return json;
}

json_t *stalls_json(const profile_counters *c)
{
    json_t *json = json_object();
    for (int i = 0; i < STALL_COUNT; ++i) {
        json_object_set_new(json, stall_infos[i].reason, json_number_or_null(c->stall[i]));
    }
    return json;
}
