/* acromion promote: makes a confirmed trial a kernel of the tree. Writes its line into src/kernels.def, builds, checks,
 * and writes the wisdom that makes the planner choose it. */
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/exit_code.h"
#include "base/files.h"
#include "base/options.h"
#include "base/process.h"
#include "commands.h"
#include "commands/wisdom_device.h"
#include "search/definition.h"
#include "search/store.h"
#include "search/tree.h"

enum {
    ID_STORE = OPTION_LONG_ONLY,
    ID_TREE,
    ID_BUILD,
    ID_LINE_ONLY,
    PATH_BYTES = TREE_PATH_MAX + 128,
    LINE_BYTES = SPACE_PARAMETERS_MAX + 256
};

static const option_spec options[OPTIONS_MAX] = {
    {ID_STORE, "store", "FILE", "the run's file; default evolve.db"},
    {ID_TREE, "tree", "DIR", "the source tree; default: where this program is"},
    {ID_BUILD, "build", "DIR", "its configured build; default: build in the tree"},
    {'w', "wisdom", "FILE", "default: wisdom/<device>.wisdom in the tree"},
    {ID_LINE_ONLY, "line-only", NULL, "only write the line; no build, no wisdom"},
};

typedef struct request {
    const char *store, *tree, *build, *wisdom;
    bool line_only;
} request;

static const option_field fields[OPTIONS_MAX] = {
    {ID_STORE, OPTION_TEXT, offsetof(request, store)},         {ID_TREE, OPTION_TEXT, offsetof(request, tree)},
    {ID_BUILD, OPTION_TEXT, offsetof(request, build)},         {'w', OPTION_TEXT, offsetof(request, wisdom)},
    {ID_LINE_ONLY, OPTION_FLAG, offsetof(request, line_only)},
};

static const command_spec spec = {
    .usage = "promote TRIAL",
    .examples = "  acromion promote 31 --store mission.db\n",
    .about = "Writes a confirmed trial's line into src/kernels.def, builds the tree, runs the whole correctness gate\n"
             "on the new kernel, writes the wisdom of its problems, and asks the new program which kernel it chooses.\n"
             "Trials that are not confirmed are refused (exit code 1), and so are whole sources, which need a file of\n"
             "their own (docs/internals/kernels-howto.md).\n",
    .options = options,
    .fields = fields,
};

/* Everything the steps need. */
typedef struct promotion {
    const request *request;
    char tree[TREE_PATH_MAX], build[PATH_BYTES], program[PATH_BYTES + 32], wisdom[PATH_BYTES], log[PATH_BYTES + 32];
    definition definition;
    json_t *trial; /* as the store has it */
    const char *kernel, *family, *arch, *parameters;
} promotion;

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

/* ---- The trial ---- */

typedef struct confirmed_query {
    int64_t trial;
    bool found, confirmed;
} confirmed_query;

static bool find_confirmed(void *arg, const trial_view *v)
{
    confirmed_query *q = arg;
    if (v->row.id == q->trial) {
        q->found = true;
        q->confirmed = v->confirmed;
    }
    return !q->found;
}

static acr_status read_trial(promotion *p, int64_t id)
{
    store *s = NULL;
    json_t *run = NULL;
    confirmed_query q = {id, false, false};
    acr_status status = store_open(&s, p->request->store, STORE_READ);
    if (status == ACR_OK) {
        status = store_run(s, &run);
    }
    if (status == ACR_OK) {
        status = definition_read(&p->definition, run);
    }
    if (status == ACR_OK) {
        status = store_trials(s, find_confirmed, &q);
    }
    if (status == ACR_OK) {
        status = store_trial_json(s, id, false, &p->trial);
    }
    json_decref(run);
    store_close(s);
    if (status == ACR_OK && p->definition.clock == GATES_CLOCK_MODEL) {
        return acr__fail(ACR_UNSUPPORTED, "the run had the model clock: nothing was timed");
    }
    if (status == ACR_OK && *text_of(p->trial, "source_text")) {
        return acr__fail(
            ACR_UNSUPPORTED,
            "trial %" PRId64 " is a whole source: it becomes a family by hand (docs/internals/kernels-howto.md)", id);
    }
    if (status == ACR_OK && !q.confirmed) {
        return acr__fail(ACR_UNSUPPORTED,
                         "trial %" PRId64 " is not confirmed as faster; only confirmed trials are "
                         "promoted",
                         id);
    }
    return status;
}

/* ---- kernels.def ---- */

/* Where in the text a new line of the family belongs: after its last one; else at the end. */
static size_t place_of_line(const char *text, size_t size, const char *family)
{
    char word[SPACE_NAME_MAX + 8];
    size_t place = size;
    snprintf(word, sizeof word, ", %s,", family);
    for (size_t at = 0; at < size;) {
        const char *stop = memchr(text + at, '\n', size - at);
        size_t next = stop ? (size_t)(stop - text) + 1 : size;
        bool line = strncmp(text + at, "KERNEL(", strlen("KERNEL(")) == 0;
        if (line && memmem(text + at, next - at, word, strlen(word))) {
            place = next;
        }
        at = next;
    }
    return place;
}

static bool names_kernel(const char *text, size_t size, const char *kernel)
{
    char word[WISDOM_KERNEL_MAX + 16];
    snprintf(word, sizeof word, "KERNEL(%s,", kernel);
    return memmem(text, size, word, strlen(word)) != NULL;
}

/* A line of those is not broken: kernels.def is read by lines. */
static acr_status write_line(const promotion *p)
{
    char path[PATH_BYTES], line[LINE_BYTES];
    const void *bytes = NULL;
    size_t size = 0;
    snprintf(path, sizeof path, "%s/src/kernels.def", p->tree);
    snprintf(line, sizeof line, "KERNEL(%s, %s, %s, %s)\n", p->kernel, p->family, p->arch, p->parameters);
    acr_status status = file_map(path, &bytes, &size);
    if (status != ACR_OK) {
        return status;
    }
    if (names_kernel(bytes, size, p->kernel)) {
        printf("%s is in src/kernels.def already\n", p->kernel);
    } else {
        size_t place = place_of_line(bytes, size, p->family);
        const file_part parts[] = {{bytes, place}, {line, strlen(line)}, {(const char *)bytes + place, size - place}};
        status = file_write(path, parts, 3);
        if (status == ACR_OK) {
            printf("src/kernels.def: %s", line);
        }
    }
    file_unmap(bytes, size);
    return status;
}

/* Where the kernel comes from, which `why` says from then on. */
static acr_status write_found(const promotion *p)
{
    char path[PATH_BYTES], line[LINE_BYTES];
    const void *bytes = NULL;
    size_t size = 0;
    const char *file = strrchr(p->request->store, '/'), *date = text_of(p->trial, "finished_at");
    const bool random = strcmp(text_of(p->trial, "arm"), trial_arm_name(ARM_CONTROL)) == 0;
    snprintf(path, sizeof path, "%s/workbench/kernels/found.def", p->tree);
    snprintf(line, sizeof line, "FOUND(%s, %" PRId64 ", \"%s\", \"%s, %.10s, %s\")\n", p->kernel,
             (int64_t)json_integer_value(json_object_get(p->trial, "id")),
             random ? "random search" : text_of(p->trial, "operation"), file ? file + 1 : p->request->store, date,
             p->definition.device_key);
    if (strpbrk(p->request->store, "\"\\\n") || strpbrk(p->definition.device_key, "\"\\\n")) {
        return acr__fail(ACR_FORMAT, "the store's name has characters that no C string holds as they are");
    }
    acr_status status = file_map(path, &bytes, &size);
    if (status != ACR_OK) {
        return status;
    }
    char word[WISDOM_KERNEL_MAX + 16];
    snprintf(word, sizeof word, "FOUND(%s,", p->kernel);
    if (!memmem(bytes, size, word, strlen(word))) {
        const file_part parts[] = {{bytes, size}, {line, strlen(line)}};
        status = file_write(path, parts, 2);
    }
    file_unmap(bytes, size);
    return status;
}

/* ---- Building, checking, asking ---- */

static void print_log(const char *path)
{
    char line[512];
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        fputs(line, stderr);
    }
    if (file) {
        fclose(file);
    }
}

/* Runs a program to its end; its output goes into the log. quiet: leaves it there when it fails. */
static acr_status run_step(const promotion *p, const char *title, const char *const *argv)
{
    static const process_limits limits = {.wall_s = 3600.0};
    process_outcome outcome;
    char what[96];
    printf("%s\n", title);
    fflush(stdout);
    acr_status status = process_run(&outcome, argv, p->log, &limits, NULL);
    if (status == ACR_OK && (outcome.end != PROCESS_EXITED || outcome.code != 0)) {
        print_log(p->log);
        process_outcome_text(what, &outcome);
        return acr__fail(ACR_UNSUPPORTED, "%s: %s", title, what);
    }
    return status;
}

/* The JSON that a step printed; the caller decrefs. */
static acr_status read_log(const promotion *p, json_t **out)
{
    json_error_t error;
    *out = json_load_file(p->log, 0, &error);
    return *out ? ACR_OK : acr__fail(ACR_FORMAT, "%s: %s", p->log, error.text);
}

static acr_status build_and_check(const promotion *p)
{
    char title[256];
    const char *const build[] = {"cmake", "--build", p->build, "--target", "acromion-cli", NULL};
    const char *const check[] = {p->program, "check", "--backend", p->definition.backend, "-k", p->kernel, NULL};
    snprintf(title, sizeof title, "building in %.200s", p->build);
    acr_status status = run_step(p, title, build);
    snprintf(title, sizeof title, "checking %s", p->kernel);
    return status == ACR_OK ? run_step(p, title, check) : status;
}

/* The digest of the machine code that the new build has for the kernel. */
static acr_status read_digest(const promotion *p, uint64_t *out)
{
    const char *const info[] = {p->program, "info", "--json", NULL};
    json_t *document = NULL;
    acr_status status = run_step(p, "reading the kernel's digest", info);
    if (status == ACR_OK) {
        status = read_log(p, &document);
    }
    const json_t *kernels = json_object_get(document, "kernels");
    *out = 0;
    for (size_t i = 0; i < json_array_size(kernels); ++i) {
        const json_t *kernel = json_array_get(kernels, i);
        if (strcmp(text_of(kernel, "name"), p->kernel) == 0) {
            *out = strtoull(text_of(kernel, "digest"), NULL, 16);
        }
    }
    json_decref(document);
    return status == ACR_OK && *out == 0 ? acr__fail(ACR_UNSUPPORTED, "%s does not list %s", p->program, p->kernel)
                                         : status;
}

/* ---- Wisdom ---- */

/* The facts of the last confirmation: timings are listed with the phase last made last. */
static acr_status put_facts(const promotion *p, acr__wisdom *wisdom, uint64_t digest)
{
    const json_t *timings = json_object_get(p->trial, "timings"), *rounds = json_object_get(p->trial, "confirmations");
    const json_t *last = json_array_get(rounds, json_array_size(rounds) - 1);
    char phase[32];
    snprintf(phase, sizeof phase, "confirm %lld", (long long)json_integer_value(json_object_get(last, "round")));
    acr_status status = ACR_OK;
    for (size_t i = 0; i < json_array_size(timings) && status == ACR_OK; ++i) {
        enum {
            SAMPLES_A_BLOCK = 8
        };
        const json_t *t = json_array_get(timings, i);
        if (strcmp(text_of(t, "phase"), phase) != 0) {
            continue;
        }
        acr__fact fact = {.digest = digest,
                          .effort = ACR_PATIENT,
                          .median_ns = 1e3 * json_number_value(json_object_get(t, "candidate_p50_us")),
                          .mad_ns = 1e3 * json_number_value(json_object_get(t, "candidate_mad_us")),
                          .samples = (uint32_t)(SAMPLES_A_BLOCK * json_integer_value(json_object_get(t, "blocks")))};
        snprintf(fact.problem, sizeof fact.problem, "%s", text_of(t, "problem"));
        snprintf(fact.kernel, sizeof fact.kernel, "%s", p->kernel);
        status = acr__wisdom_put(wisdom, &fact);
    }
    return status;
}

static acr_status write_wisdom(const promotion *p, uint64_t digest)
{
    acr__device device;
    if (!wisdom_device(&device, p->definition.device_key)) {
        return acr__fail(ACR_FORMAT, "the run's device '%s' has no known form", p->definition.device_key);
    }
    acr__wisdom *wisdom = acr__wisdom_create(&device);
    if (!wisdom) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the wisdom");
    }
    acr_status status = put_facts(p, wisdom, digest);
    if (status == ACR_OK) {
        status = acr__wisdom_write(wisdom, p->wisdom);
    }
    acr__wisdom_destroy(wisdom);
    if (status == ACR_OK) {
        printf("wisdom: %s\n", p->wisdom);
    }
    return status;
}

/* Which kernel the new program chooses for each problem, with the new wisdom. */
static acr_status ask_why(const promotion *p)
{
    acr_status status = ACR_OK;
    for (size_t i = 0; i < p->definition.problem_count && status == ACR_OK; ++i) {
        char problem[ACR_PROBLEM_TEXT_MAX], title[ACR_PROBLEM_TEXT_MAX + 32];
        acr_problem_format(&p->definition.problems[i].problem, problem, sizeof problem);
        const char *const why[] = {p->program, "why",   "--backend", p->definition.backend, "--wisdom", p->wisdom,
                                   "--json",   problem, NULL};
        json_t *answers = NULL;
        snprintf(title, sizeof title, "why %s", problem);
        status = run_step(p, title, why);
        if (status == ACR_OK) {
            status = read_log(p, &answers);
        }
        const char *chosen = text_of(json_array_get(answers, 0), "chosen");
        if (status == ACR_OK && strcmp(chosen, p->kernel) != 0) {
            status = acr__fail(ACR_UNSUPPORTED, "%s: %s is chosen, not %s", problem, chosen, p->kernel);
        } else if (status == ACR_OK) {
            printf("%s\n", text_of(json_array_get(answers, 0), "plan"));
        }
        json_decref(answers);
    }
    return status;
}

/* ---- The command ---- */

/* wisdom/amd-epyc.wisdom for "AMD EPYC/avx512/2". */
static void name_wisdom(promotion *p)
{
    char name[64];
    size_t length = 0;
    for (const char *at = p->definition.device_key; *at && *at != '/' && length < sizeof name - 1; ++at) {
        name[length++] = isalnum((unsigned char)*at) ? (char)tolower((unsigned char)*at) : '-';
    }
    name[length] = '\0';
    snprintf(p->wisdom, sizeof p->wisdom, "%s/wisdom", p->tree);
    mkdir(p->wisdom, 0777);
    snprintf(p->wisdom, sizeof p->wisdom, "%s/wisdom/%s.wisdom", p->tree, name);
}

static acr_status set_paths(promotion *p)
{
    const request *r = p->request;
    acr_status status = tree_find(p->tree, r->tree);
    snprintf(p->build, sizeof p->build, "%s%s", r->build ? r->build : p->tree, r->build ? "" : "/build");
    snprintf(p->program, sizeof p->program, "%s/workbench/acromion", p->build);
    snprintf(p->log, sizeof p->log, "%s/promote.log", p->build);
    if (r->wisdom) {
        snprintf(p->wisdom, sizeof p->wisdom, "%s", r->wisdom);
    } else if (status == ACR_OK) {
        name_wisdom(p);
    }
    return status;
}

static acr_status promote(promotion *p, int64_t id)
{
    acr_status status = read_trial(p, id);
    if (status != ACR_OK) {
        return status;
    }
    p->kernel = text_of(p->trial, "kernel");
    p->family = text_of(p->trial, "family");
    p->arch = text_of(p->trial, "arch");
    p->parameters = text_of(p->trial, "parameters");
    status = set_paths(p);
    if (status == ACR_OK) {
        status = write_line(p);
    }
    if (status == ACR_OK) {
        status = write_found(p);
    }
    if (status != ACR_OK || p->request->line_only) {
        return status;
    }
    uint64_t digest = 0;
    status = build_and_check(p);
    if (status == ACR_OK) {
        status = read_digest(p, &digest);
    }
    if (status == ACR_OK) {
        status = write_wisdom(p, digest);
    }
    if (status == ACR_OK) {
        status = ask_why(p);
    }
    if (status == ACR_OK) {
        unlink(p->log);
        printf("A new line changes what is planned without wisdom: look at the difference with\n"
               "    build/tests/golden_plans --update tests/golden/plans.txt\n");
    }
    return status;
}

int cmd_promote(int argc, char **argv)
{
    common_options common;
    request r = {.store = "evolve.db"};
    int64_t id = 0;
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, NULL, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    if (first + 1 != argc) {
        fprintf(stderr, "acromion promote: which trial? `acromion promote --help` explains\n");
        return EXIT_USAGE;
    }
    if (!option_int("trial", argv[first], 1, INT64_MAX, &id)) {
        return EXIT_USAGE;
    }
    promotion p = {.request = &r};
    acr_status status = promote(&p, id);
    json_decref(p.trial);
    definition_free(&p.definition);
    if (status == ACR_UNSUPPORTED) {
        report_failure(status, "promote");
        return EXIT_FAILED;
    }
    return status == ACR_OK ? EXIT_DONE : report_failure(status, "promote");
}
