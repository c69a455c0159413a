/* Command lines, see options.h. getopt_long does the parsing; the table also prints the help. */
#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exit_code.h"
#include "internal.h"

enum {
    ID_BACKEND = 2000,
    ID_DEVICE,
    ID_THREADS,
    ID_JSON
};
enum {
    SHORTS_MAX = 3 * OPTIONS_MAX + 2 /* a letter and at most two colons each, the leading colon, the end */
};

static const option_spec device_options[] = {
    {ID_BACKEND, "backend", "cuda|cpu", "where to run; default: cuda if there is a usable GPU, else cpu"},
    {ID_DEVICE, "device", "N", "the N-th GPU, from 0"},
    {ID_THREADS, "threads", "N", "CPU threads; default: all that this process may use"},
    {0, NULL, NULL, NULL},
};
static const option_spec json_options[] = {
    {ID_JSON, "json", NULL, "print one JSON document instead of text"},
    {0, NULL, NULL, NULL},
};
static const option_spec help_options[] = {
    {'h', "help", NULL, "print this"},
    {0, NULL, NULL, NULL},
};

/* The option tables of a command, one after another: its own, then the shared ones. */
static size_t option_tables(const command_spec *spec, const option_spec *tables[4])
{
    size_t count = 0;
    if (spec->options) {
        tables[count++] = spec->options;
    }
    if (spec->common & COMMON_DEVICE) {
        tables[count++] = device_options;
    }
    if (spec->common & COMMON_JSON) {
        tables[count++] = json_options;
    }
    tables[count++] = help_options;
    return count;
}

static int argument_kind(const option_spec *option)
{
    if (!option->argument) {
        return no_argument;
    }
    return option->argument[0] == '=' ? optional_argument : required_argument;
}

static void print_option(const option_spec *option)
{
    char left[64];
    char letter[8] = "    ";
    if (option->id < 256) {
        snprintf(letter, sizeof letter, "-%c, ", option->id);
    }
    const char *argument = option->argument ? option->argument : "";
    const char *open = argument_kind(option) == optional_argument ? "[" : *argument ? " " : "";
    const char *close = argument_kind(option) == optional_argument ? "]" : "";
    snprintf(left, sizeof left, "%s--%s%s%s%s", letter, option->name, open, argument, close);
    printf("  %-28s %s\n", left, option->help);
}

/* The first word of the usage. */
static int name_length(const command_spec *spec)
{
    return (int)strcspn(spec->usage, " ");
}

static void print_help(const command_spec *spec)
{
    const int name = name_length(spec);
    printf("usage: acromion %.*s [options]%s\n\n%s\noptions:\n", name, spec->usage, spec->usage + name, spec->about);
    const option_spec *tables[4];
    size_t count = option_tables(spec, tables);
    for (size_t t = 0; t < count; ++t) {
        for (const option_spec *option = tables[t]; option->name; ++option) {
            print_option(option);
        }
    }
    if (spec->examples) {
        printf("\nexamples:\n%s", spec->examples);
    }
}

static bool take_common(common_options *common, int id, const char *value)
{
    int32_t number = 0;
    switch (id) {
    case ID_BACKEND:
        if (strcmp(value, "cuda") != 0 && strcmp(value, "cpu") != 0) {
            fprintf(stderr, "acromion: --backend: '%s' is neither cuda nor cpu\n", value);
            return false;
        }
        common->backend = value;
        return true;
    case ID_DEVICE:
        return option_int32("device", value, 0, 1023, &common->device);
    case ID_THREADS:
        if (!option_int32("threads", value, 1, 1024, &number)) {
            return false;
        }
        common->threads = (uint32_t)number;
        return true;
    default:
        common->json = true;
        return true;
    }
}

/* Translates the tables into getopt's: long options, and the string of short ones. */
static void getopt_tables(const command_spec *spec, struct option longs[OPTIONS_MAX], char shorts[SHORTS_MAX])
{
    const option_spec *tables[4];
    size_t tables_count = option_tables(spec, tables), count = 0, letters = 0;
    shorts[letters++] = ':'; /* tell a missing value from an unknown option, and print nothing */
    for (size_t t = 0; t < tables_count; ++t) {
        for (const option_spec *option = tables[t]; option->name && count < OPTIONS_MAX - 1; ++option) {
            int kind = argument_kind(option);
            longs[count++] = (struct option){option->name, kind, NULL, option->id};
            if (option->id < 256) {
                shorts[letters++] = (char)option->id;
                for (int colon = 0; colon < kind; ++colon) { /* required_argument is 1, optional_argument 2 */
                    shorts[letters++] = ':';
                }
            }
        }
    }
    longs[count] = (struct option){NULL, 0, NULL, 0};
    shorts[letters] = '\0';
}

static const option_field *find_field(const command_spec *spec, int id)
{
    for (const option_field *field = spec->fields; field && field->id; ++field) {
        if (field->id == id) {
            return field;
        }
    }
    return NULL;
}

static const char *option_name(const command_spec *spec, int id)
{
    const option_spec *option = spec->options;
    while (option->id != id) {
        ++option;
    }
    return option->name;
}

/* Writes the value of an option that is a field of arg. */
static bool keep(const command_spec *spec, const option_field *field, const char *value, void *arg)
{
    void *const to = (char *)arg + field->at;
    const char *name = option_name(spec, field->id);
    int64_t number = 0;
    switch (field->kind) {
    case OPTION_FLAG:
        *(bool *)to = true;
        break;
    case OPTION_TEXT:
        *(const char **)to = value;
        break;
    case OPTION_FILE:
        return option_file(name, value, to);
    case OPTION_SEED:
        if (!option_int(name, value, 0, INT64_MAX, &number)) {
            return false;
        }
        *(uint64_t *)to = (uint64_t)number;
        break;
    case OPTION_TIME:
        return option_seconds(name, value, to);
    }
    return true;
}

int options_parse(const command_spec *spec, int argc, char **argv, common_options *common, option_take *take, void *arg,
                  int *exit_code)
{
    struct option longs[OPTIONS_MAX];
    char shorts[SHORTS_MAX];
    const int name = name_length(spec);
    getopt_tables(spec, longs, shorts);
    *common = (common_options){NULL, 0, 0, false};
    *exit_code = EXIT_USAGE;
    optind = 0; /* glibc: start anew */
    for (;;) {
        int id = getopt_long(argc, argv, shorts, longs, NULL);
        if (id == -1) {
            break;
        }
        if (id == 'h') {
            print_help(spec);
            *exit_code = EXIT_DONE;
            return -1;
        }
        if (id == '?' || id == ':') {
            fprintf(stderr, "acromion %.*s: option '%s' %s; `acromion %.*s --help` lists the options\n", name,
                    spec->usage, argv[optind - 1],
                    id == ':' ? "needs a value" : "is unknown, ambiguous, or takes no value", name, spec->usage);
            return -1;
        }
        const option_field *field = find_field(spec, id);
        if (!(id >= ID_BACKEND ? take_common(common, id, optarg)
              : field          ? keep(spec, field, optarg, arg)
                               : take(arg, id, optarg))) {
            return -1;
        }
    }
    if (optind < argc && !spec->usage[name]) {
        fprintf(stderr, "acromion %.*s: '%s' is one argument too many\n", name, spec->usage, argv[optind]);
        return -1;
    }
    return optind;
}

bool option_file(const char *option, const char *text, const char **out)
{
    if (!*text || strcmp(text, "-") == 0) {
        fprintf(stderr, "acromion: --%s: %s; a file of the name - is ./-, standard output is /dev/stdout\n", option,
                *text ? "'-' is no file" : "the name is empty");
        return false;
    }
    *out = text;
    return true;
}

bool option_int(const char *option, const char *text, int64_t min, int64_t max, int64_t *out)
{
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || value < min || value > max) {
        fprintf(stderr, "acromion: --%s: '%s' is not a whole number from %lld to %lld\n", option, text, (long long)min,
                (long long)max);
        return false;
    }
    *out = value;
    return true;
}

bool option_int32(const char *option, const char *text, int32_t min, int32_t max, int32_t *out)
{
    int64_t value = 0;
    if (!option_int(option, text, min, max, &value)) {
        return false;
    }
    *out = (int32_t)value;
    return true;
}

bool option_double(const char *option, const char *text, double min, double max, double *out)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= min && value <= max)) {
        fprintf(stderr, "acromion: --%s: '%s' is not a number from %g to %g\n", option, text, min, max);
        return false;
    }
    *out = value;
    return true;
}

bool option_seconds(const char *option, const char *text, double *out)
{
    static const struct {
        const char *unit;
        double seconds;
    } units[] = {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1.0}};
    char *end = NULL;
    double value = strtod(text, &end);
    if (end != text && value > 0 && isfinite(value)) {
        for (size_t i = 0; i < sizeof units / sizeof units[0]; ++i) {
            if (strcmp(end, units[i].unit) == 0) {
                *out = value * units[i].seconds;
                return true;
            }
        }
    }
    fprintf(stderr, "acromion: --%s: '%s' is not a time like 5us, 300ns, 1.5ms or 2s\n", option, text);
    return false;
}

/* The text, and a caret under the character that is wrong. */
static int report_problem(acr_status status, const char *text, size_t position)
{
    int exit_code = report_failure(status, "problem");
    fprintf(stderr, "    %s\n    %*s^\n", text, (int)position, "");
    return exit_code;
}

int problems_parse(char **operands, int operand_count, problem_list *out)
{
    static char mission_text[] = MISSION_PROBLEM;
    static char *mission[] = {mission_text};
    if (operand_count == 0) {
        operands = mission;
        operand_count = 1;
    }
    problem_list list = {calloc((size_t)operand_count, sizeof *list.items), 0};
    if (!list.items) {
        fprintf(stderr, "acromion: out of memory\n");
        return EXIT_FAULT;
    }
    for (int i = 0; i < operand_count; ++i) {
        size_t position = 0;
        acr_status status = acr_problem_parse(&list.items[i], operands[i], &position);
        if (status == ACR_OK) {
            status = acr_problem_canonical(&list.items[i], &list.items[i]);
        }
        if (status != ACR_OK) {
            problems_free(&list);
            return report_problem(status, operands[i], position);
        }
        ++list.count;
    }
    *out = list;
    return EXIT_DONE;
}

void problems_free(problem_list *list)
{
    free(list->items);
    *list = (problem_list){NULL, 0};
}

int context_open(const common_options *common, acr_ctx **out)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = common->backend;
    options.device = common->device;
    options.threads = common->threads;
    acr_status status = acr_ctx_create(out, &options);
    return status == ACR_OK ? EXIT_DONE : report_failure(status, "device");
}

uint32_t thread_count(const common_options *common)
{
    if (common->threads) {
        return common->threads;
    }
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) {
        return 1;
    }
    int count = CPU_COUNT(&set);
    return count > 0 ? (uint32_t)count : 1;
}
