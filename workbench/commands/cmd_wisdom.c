/* acromion wisdom: shows, verifies, merges and measures files of choices and links. Their format is
 * docs/manual/wisdom-format.md. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/exit_code.h"
#include "base/files.h"
#include "base/json.h"
#include "base/options.h"
#include "commands.h"
#include "internal.h"
#include "wisdom_device.h"
#include "wisdom_link.h"

enum {
    ID_PATIENT = OPTION_LONG_ONLY,
    ID_GPUS,
    ID_LIBRARY
};

static const option_spec options[OPTIONS_MAX] = {
    {'o', "output", "FILE",
     "merge, measure, link: the file to write; facts it already holds are kept unless a better one comes"},
    {ID_PATIENT, "patient", NULL, "measure: time every kernel, longer"},
    {ID_GPUS, "gpus", "N", "link: between GPUs 0 to N - 1 of this host"},
    {ID_LIBRARY, "library", "FILE", "link: in the place of libnccl.so.2; with --backend cpu N ranks of this process"},
};

static const command_spec spec = {
    .usage = "wisdom show|verify|merge|measure|link ARGUMENT...",
    .examples = "  acromion wisdom measure b2:h8:s512:d64 b2:h8:s512:d64:causal -o h200.wisdom\n"
                "  acromion wisdom verify h200.wisdom\n"
                "  acromion wisdom merge monday.wisdom tuesday.wisdom -o all.wisdom\n"
                "  acromion wisdom link --gpus 4 -o h200.wisdom\n",
    .about = "  show FILE...               prints the facts: problem, kernel, time\n"
             "  verify FILE...             checks form and checksum, and says how many facts this device can use\n"
             "  merge FILE... -o OUT       puts all facts into one file; higher effort wins, then the later file\n"
             "  measure PROBLEM... -o OUT  times the likely kernels of each problem here and adds what won\n"
             "  link --gpus N -o OUT       times transfers between N GPUs of this host, by NCCL, and adds the link\n",
    .options = options,
    .common = COMMON_DEVICE | COMMON_JSON,
};

typedef struct request {
    const char *output, *library;
    bool patient;
    int64_t gpus;
} request;

static bool take_option(void *arg, int id, const char *value)
{
    request *r = arg;
    if (id == 'o') {
        return option_file("output", value, &r->output);
    }
    if (id == ID_GPUS) {
        return option_int("gpus", value, 2, 64, &r->gpus);
    }
    if (id == ID_LIBRARY) {
        r->library = value;
        return true;
    }
    r->patient = true;
    return true;
}

/* The last error, which speaks of a file's content, with the file's name before it. */
static acr_status in_file(acr_status status, const char *path)
{
    char detail[512];
    snprintf(detail, sizeof detail, "%s", acr_last_error());
    return acr__fail(status, "%s: %s", path, detail);
}

/* Parses a file and shows a visitor every fact. */
static acr_status each_fact(const char *path, const acr__wisdom_visitor *visitor, void *user)
{
    const void *bytes = NULL;
    size_t size = 0;
    acr_status status = file_map(path, &bytes, &size);
    if (status != ACR_OK) {
        return status;
    }
    status = acr__wisdom_parse(bytes ? bytes : "", size, visitor, user);
    file_unmap(bytes, size);
    return status == ACR_OK ? ACR_OK : in_file(status, path);
}

/* ---- show ---- */

static const char *effort_text(acr_effort effort)
{
    return effort == ACR_PATIENT ? "patient" : "measure";
}

static acr_status show_fact(void *user, const char *device_key, const acr__fact *fact)
{
    (void)user;
    printf("%-40s %-44s %9.3f us (MAD %.3f, n %u, %s)  %s\n", fact->problem, fact->kernel, fact->median_ns / 1e3,
           fact->mad_ns / 1e3, fact->samples, effort_text(fact->effort), device_key);
    return ACR_OK;
}

static acr_status fact_json(void *user, const char *device_key, const acr__fact *fact)
{
    char digest[17];
    snprintf(digest, sizeof digest, "%016" PRIx64, fact->digest);
    json_array_append_new(user, json_pack("{s:s, s:s, s:s, s:s, s:f, s:f, s:I, s:s}", "device", device_key, "problem",
                                          fact->problem, "kernel", fact->kernel, "effort", effort_text(fact->effort),
                                          "median_us", fact->median_ns / 1e3, "mad_us", fact->mad_ns / 1e3, "n",
                                          (json_int_t)fact->samples, "image", digest));
    return ACR_OK;
}

static acr_status show_link(void *user, const char *device_key, const acr_link *link)
{
    (void)user;
    printf("link of %d ranks on %d host%s: %.1f GB/s to the next, %.1f us, copies %.1f GB/s (n %u)  %s\n",
           (int)link->ranks, (int)link->hosts, link->hosts == 1 ? "" : "s", link->bytes_per_s / 1e9,
           link->latency_s * 1e6, link->copy_bytes_per_s / 1e9, link->samples, device_key);
    return ACR_OK;
}

static acr_status link_json(void *user, const char *device_key, const acr_link *link)
{
    json_array_append_new(user, json_pack("{s:s, s:i, s:i, s:f, s:f, s:f, s:I}", "device", device_key, "link_ranks",
                                          (int)link->ranks, "hosts", (int)link->hosts, "bytes_per_s", link->bytes_per_s,
                                          "latency_us", link->latency_s * 1e6, "copy_bytes_per_s",
                                          link->copy_bytes_per_s, "n", (json_int_t)link->samples));
    return ACR_OK;
}

static int show(char **files, int count, bool json)
{
    static const acr__wisdom_visitor text = {show_fact, show_link}, objects = {fact_json, link_json};
    json_t *facts = json_array();
    acr_status status = ACR_OK;
    for (int i = 0; i < count && status == ACR_OK; ++i) {
        status = each_fact(files[i], json ? &objects : &text, facts);
        if (status != ACR_OK) {
            json_decref(facts);
            return report_failure(status, NULL);
        }
    }
    if (json) {
        json_print(facts);
    } else {
        json_decref(facts);
    }
    return EXIT_DONE;
}

/* ---- verify ---- */

static int verify_file(const char *path, acr_ctx *ctx, json_t *reports)
{
    acr_wisdom_report report = ACR_WISDOM_REPORT_INIT;
    acr_wisdom_forget(ctx);
    acr_status status = acr_wisdom_import(ctx, path, &report);
    if (status != ACR_OK) {
        return report_failure(status, NULL);
    }
    if (reports) {
        json_array_append_new(reports, json_pack("{s:s, s:i, s:i, s:i}", "file", path, "usable", (int)report.imported,
                                                 "stale", (int)report.skipped, "other_devices", (int)report.other));
    } else {
        printf("%s: sound; %u facts usable here, %u stale (kernel unknown, changed, or unable), %u for other devices\n",
               path, report.imported, report.skipped, report.other);
    }
    return EXIT_DONE;
}

static int verify(char **files, int count, const common_options *common)
{
    acr_ctx *ctx = NULL;
    int exit_code = context_open(common, &ctx);
    json_t *reports = common->json ? json_array() : NULL;
    for (int i = 0; i < count && exit_code == EXIT_DONE; ++i) {
        exit_code = verify_file(files[i], ctx, reports);
    }
    if (reports) {
        json_print(reports);
    }
    acr_ctx_destroy(ctx);
    return exit_code;
}

/* ---- merge ---- */

/* The facts about one device, from all files. */
typedef struct device_facts {
    char device_key[WISDOM_DEVICE_MAX];
    acr__wisdom *wisdom;
} device_facts;

typedef struct merge_state {
    device_facts *devices;
    size_t count;
} merge_state;

static acr_status add_device(merge_state *m, const char *device_key)
{
    acr__device device;
    if (!wisdom_device(&device, device_key)) {
        return acr__fail(ACR_FORMAT, "device '%s' has no known form", device_key);
    }
    device_facts *devices = realloc(m->devices, (m->count + 1) * sizeof *devices);
    m->devices = devices ? devices : m->devices;
    acr__wisdom *wisdom = devices ? acr__wisdom_create(&device) : NULL;
    if (!wisdom) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the facts");
    }
    device_facts *d = &m->devices[m->count++];
    snprintf(d->device_key, sizeof d->device_key, "%s", device_key);
    d->wisdom = wisdom;
    return ACR_OK;
}

/* The facts about a device so far, found or made. */
static acr_status find_device(merge_state *m, const char *device_key, acr__wisdom **out)
{
    size_t i = 0;
    while (i < m->count && strcmp(m->devices[i].device_key, device_key) != 0) {
        ++i;
    }
    acr_status status = i == m->count ? add_device(m, device_key) : ACR_OK;
    *out = status == ACR_OK ? m->devices[i].wisdom : NULL;
    return status;
}

static acr_status merge_fact(void *user, const char *device_key, const acr__fact *fact)
{
    acr__wisdom *wisdom;
    acr_status status = find_device(user, device_key, &wisdom);
    return status == ACR_OK ? acr__wisdom_put(wisdom, fact) : status;
}

static acr_status merge_link(void *user, const char *device_key, const acr_link *link)
{
    acr__wisdom *wisdom;
    acr_status status = find_device(user, device_key, &wisdom);
    return status == ACR_OK ? acr__wisdom_put_link(wisdom, link) : status;
}

static int merge(char **files, int count, const char *output)
{
    static const acr__wisdom_visitor visitor = {merge_fact, merge_link};
    merge_state m = {NULL, 0};
    acr_status status = access(output, F_OK) == 0 ? each_fact(output, &visitor, &m) : ACR_OK;
    for (int i = 0; i < count && status == ACR_OK; ++i) {
        status = each_fact(files[i], &visitor, &m);
    }
    for (size_t i = 0; i < m.count; ++i) {
        if (status == ACR_OK) {
            status = acr__wisdom_write(m.devices[i].wisdom, output);
        }
        acr__wisdom_destroy(m.devices[i].wisdom);
    }
    free(m.devices);
    return status == ACR_OK ? EXIT_DONE : report_failure(status, "wisdom merge");
}

/* ---- measure ---- */

/* plans: where the JSON goes, NULL = text. */
static acr_status measure_problem(acr_ctx *ctx, const acr_problem *problem, acr_effort effort, json_t *plans)
{
    acr_plan *plan = NULL;
    acr_status status = acr_plan_create(&plan, ctx, problem, effort);
    if (status != ACR_OK) {
        return status;
    }
    if (plans) {
        json_array_append_new(plans,
                              json_pack("{s:s, s:s}", "kernel", acr_plan_kernel(plan), "plan", acr_plan_text(plan)));
    } else {
        printf("%s\n", acr_plan_text(plan));
    }
    acr_plan_destroy(plan);
    return ACR_OK;
}

static int measure(char **operands, int count, const request *r, const common_options *common)
{
    problem_list problems;
    int exit_code = problems_parse(operands, count, &problems);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    acr_ctx *ctx = NULL;
    exit_code = context_open(common, &ctx);
    json_t *plans = common->json ? json_array() : NULL;
    acr_status status = ACR_OK;
    for (size_t i = 0; i < problems.count && exit_code == EXIT_DONE && status == ACR_OK; ++i) {
        status = measure_problem(ctx, &problems.items[i], r->patient ? ACR_PATIENT : ACR_MEASURE, plans);
    }
    if (exit_code == EXIT_DONE && status == ACR_OK) {
        status = acr_wisdom_export(ctx, r->output);
    }
    if (plans) {
        json_print(plans);
    }
    acr_ctx_destroy(ctx);
    problems_free(&problems);
    return exit_code != EXIT_DONE ? exit_code : status == ACR_OK ? EXIT_DONE : report_failure(status, "wisdom");
}

/* ---- link ---- */

static int measure_link(const request *r, const common_options *common)
{
    acr_ctx *ctx = NULL;
    acr_link link;
    int exit_code = wisdom_link(common, (int)r->gpus, r->library, &ctx, &link);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    if (common->json) {
        json_t *links = json_array();
        link_json(links, acr_ctx_device(ctx), &link);
        json_print(links);
    } else {
        show_link(NULL, acr_ctx_device(ctx), &link);
    }
    const acr_status status = acr_wisdom_export(ctx, r->output);
    acr_ctx_destroy(ctx);
    return status == ACR_OK ? EXIT_DONE : report_failure(status, "wisdom link");
}

/* Whether wisdom can be added to a file, before it is made: what is there already must be wisdom. */
static acr_status check_output(const char *path)
{
    acr_status status = file_can_write(path);
    if (status == ACR_OK && access(path, F_OK) == 0) {
        static const acr__wisdom_visitor visitor = {NULL, NULL};
        status = each_fact(path, &visitor, NULL);
    }
    return status;
}

static int usage(const char *what)
{
    fprintf(stderr, "acromion wisdom: %s; `acromion wisdom --help` explains\n", what);
    return EXIT_USAGE;
}

int cmd_wisdom(int argc, char **argv)
{
    common_options common;
    request r = {NULL, NULL, false, 0};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_option, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    if (first == argc) {
        return usage("show, verify, merge, measure or link?");
    }
    const char *action = argv[first];
    char **operands = argv + first + 1;
    int count = argc - first - 1;
    bool links = strcmp(action, "link") == 0;
    bool writes = links || strcmp(action, "merge") == 0 || strcmp(action, "measure") == 0;
    if (writes && !r.output) {
        return usage("-o FILE is missing");
    }
    if (links && (count > 0 || r.gpus == 0)) {
        return usage("link takes --gpus N and no other argument");
    }
    if (count == 0 && !links && strcmp(action, "measure") != 0) {
        return usage("which file?");
    }
    const acr_status writable = writes ? check_output(r.output) : ACR_OK;
    if (writable != ACR_OK) {
        return report_failure(writable, "wisdom --output");
    }
    if (strcmp(action, "show") == 0) {
        return show(operands, count, common.json);
    }
    if (strcmp(action, "verify") == 0) {
        return verify(operands, count, &common);
    }
    if (strcmp(action, "merge") == 0) {
        return merge(operands, count, r.output);
    }
    if (links) {
        return measure_link(&r, &common);
    }
    return writes ? measure(operands, count, &r, &common) : usage("unknown action");
}
