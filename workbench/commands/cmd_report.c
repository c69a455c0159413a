/* acromion report: results as one page that needs nothing else, and as the tables and the figure of documents. */
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/exit_code.h"
#include "base/files.h"
#include "base/options.h"
#include "build_info.h"
#include "commands.h"
#include "internal.h"
#include "kernels/kernel_source.h"
#include "report/report_charts.h"
#include "report/report_figure.h"
#include "report/report_page.h"
#include "report/report_tables.h"

enum {
    ID_MARKDOWN = OPTION_LONG_ONLY,
    ID_CHECK
};

static const option_spec options[OPTIONS_MAX] = {
    {'o', "output", "FILE", "the page; default report.html"},
    {ID_MARKDOWN, "markdown", "=DOCUMENT",
     "instead rewrite what a document's markers name; README.md and docs/manual/measured.md"},
    {ID_CHECK, "check", NULL, "with --markdown: change nothing, exit code 1 when document and results disagree"},
};

static const command_spec spec = {
    .usage = "report [FILE...]",
    .examples = "  acromion report -o report.html\n"
                "  acromion report results/*.json run.sqlite -o report.html\n"
                "  acromion report --markdown --check\n",
    .about =
        "Writes one HTML page from results files (JSON of bench, profile, tools/train_curves.py and\n"
        "tools/evolve_curves.py) and evolution runs (SQLite):\n"
        "latency beside the peers, roofline, the ladder, evolution, profiles, tables. It holds its charts (drawn by "
        "gnuplot) and styles,\n"
        "and fetches nothing.\n"
        "Without a file: results/*.json and those of profile, train and evolve's curves in this folder.\n"
        "With --markdown it writes the tables of documents.\n",
    .options = options,
    .common = 0,
};

typedef struct request {
    const char *output;
    const char *document; /* NULL: those of the tree */
    bool markdown, check;
} request;

static bool take_option(void *arg, int id, const char *value)
{
    request *r = arg;
    if (id == 'o') {
        return option_file("output", value, &r->output);
    } else if (id == ID_MARKDOWN) {
        r->markdown = true;
        r->document = value ? value : r->document;
    } else {
        r->check = true;
    }
    return true;
}

/* ---- Documents ---- */

/* The way from a document to the tree's root, where the program runs: "../" for each folder of a relative path. */
static void way_to_root(char *out, size_t capacity, const char *path)
{
    size_t length = 0;
    *out = '\0';
    for (const char *at = path; *path != '/' && (at = strchr(at, '/')) && length + 4 < capacity; ++at) {
        length += (size_t)snprintf(out + length, capacity - length, "../");
    }
}

/* What stands between the markers of a table, rewritten; the rest as it is. */
static acr_status rewrite(report_text *out, const char *document, const char *path, const report_data *data)
{
    static const char open[] = "<!-- table:", close[] = "<!-- /table -->";
    char to_root[64];
    way_to_root(to_root, sizeof to_root, path);
    for (const char *at = document;;) {
        const char *marker = strstr(at, open), *line = marker ? strchr(marker, '\n') : NULL;
        const char *end = line ? strstr(line, close) : NULL;
        if (!marker) {
            text_add(out, "%s", at);
            return ACR_OK;
        }
        char name[64];
        if (!end || sscanf(marker + sizeof open - 1, "%63[a-z0-9-] -->", name) != 1) {
            return acr__fail(ACR_FORMAT, "%s: a marker without name or end: %.40s", path, marker);
        }
        report_table table;
        if (!table_make(&table, name, data)) {
            return acr__fail(ACR_FORMAT, "%s: no table is called %s", path, name);
        }
        text_add_bytes(out, at, (size_t)(line + 1 - at));
        table_markdown(out, &table, to_root);
        out->failed = out->failed || table.failed;
        table_free(&table);
        at = end;
        text_add_bytes(out, at, sizeof close - 1);
        at += sizeof close - 1;
    }
}

/* The first line in which two texts differ, of each. */
static void print_difference(const char *path, const char *now, const char *wanted)
{
    int line = 1;
    size_t at = 0, start = 0;
    for (; now[at] && now[at] == wanted[at]; ++at) {
        if (now[at] == '\n') {
            ++line;
            start = at + 1;
        }
    }
    fprintf(stderr, "acromion: %s:%d and the results disagree; `acromion report --markdown` mends it\n- %.*s\n+ %.*s\n",
            path, line, (int)strcspn(now + start, "\n"), now + start, (int)strcspn(wanted + start, "\n"),
            wanted + start);
}

/* Compares a file with what it should hold, or writes it. *agrees: it was so already, or is now. */
static acr_status settle(const char *path, const char *now, const report_text *wanted, bool check, bool *agrees)
{
    if (wanted->failed) {
        return acr__fail(ACR_NO_MEMORY, "%s: no memory for its tables", path);
    }
    if (strcmp(now, wanted->text) == 0) {
        return ACR_OK;
    }
    if (check) {
        print_difference(path, now, wanted->text);
        *agrees = false;
        return ACR_OK;
    }
    const file_part part = {wanted->text, wanted->size};
    const acr_status status = file_write(path, &part, 1);
    if (status == ACR_OK) {
        printf("%s: written\n", path);
    }
    return status;
}

/* The figure that a document's marker names, a path from the tree's root; none without a marker. */
static acr_status settle_figure(const char *document, const char *path, const report_data *data, bool check,
                                bool *agrees)
{
    static const char open[] = "<!-- figure:";
    const char *marker = strstr(document, open);
    char figure[256];
    if (!marker) {
        return ACR_OK;
    }
    if (sscanf(marker + sizeof open - 1, "%255[A-Za-z0-9_./-] -->", figure) != 1) {
        return acr__fail(ACR_FORMAT, "%s: a marker of a figure without its file: %.40s", path, marker);
    }
    size_t bytes = 0;
    report_text wanted = {NULL, 0, 0, false};
    char *now = file_text(figure, SIZE_MAX, &bytes); /* NULL: there is none yet */
    figure_headline(&wanted, data);
    const acr_status status = settle(figure, now ? now : "", &wanted, check, agrees);
    free(now);
    text_free(&wanted);
    return status;
}

static acr_status settle_document(const char *path, const report_data *data, bool check, bool *agrees)
{
    size_t bytes = 0;
    report_text wanted = {NULL, 0, 0, false};
    char *now = file_text(path, SIZE_MAX, &bytes);
    acr_status status = now ? rewrite(&wanted, now, path, data) : ACR_IO;
    if (status == ACR_OK) {
        status = settle(path, now, &wanted, check, agrees);
    }
    if (status == ACR_OK) {
        status = settle_figure(now, path, data, check, agrees);
    }
    free(now);
    text_free(&wanted);
    return status;
}

static int write_markdown(const request *r, const report_data *data)
{
    static const char *const of_the_tree[] = {"README.md", "docs/manual/measured.md"};
    bool agrees = true;
    acr_status status = r->document ? settle_document(r->document, data, r->check, &agrees) : ACR_OK;
    for (size_t i = 0; !r->document && i < sizeof of_the_tree / sizeof of_the_tree[0] && status == ACR_OK; ++i) {
        status = settle_document(of_the_tree[i], data, r->check, &agrees);
    }
    return status != ACR_OK ? report_failure(status, "report") : agrees ? EXIT_DONE : EXIT_FAILED;
}

/* ---- The page ---- */

static int write_page(const request *r, const report_data *data)
{
    report_text page = {NULL, 0, 0, false};
    int charts = 0;
    acr_status status = page_make(&page, data, &charts);
    const file_part part = {page.text, page.size};
    if (status == ACR_OK) {
        status = file_write(r->output, &part, 1);
    }
    if (status == ACR_OK) {
        printf("%s: %d charts, %zu measurements, %zu profiles, %zu runs, %zu bytes\n", r->output, charts,
               data->record_count, data->profile_count, data->run_count, page.size);
    }
    text_free(&page);
    return status == ACR_OK ? EXIT_DONE : report_failure(status, "report");
}

/* ---- Files ---- */

static acr_status add_found(report_data *data, const char *pattern)
{
    glob_t found;
    acr_status status = ACR_OK;
    if (glob(pattern, 0, NULL, &found) == 0) { /* sorted by name */
        for (size_t i = 0; i < found.gl_pathc && status == ACR_OK; ++i) {
            status = report_add_file(data, found.gl_pathv[i]);
        }
        globfree(&found);
    }
    return status;
}

static acr_status add_files(report_data *data, char **paths, int count)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < count && status == ACR_OK; ++i) {
        status = report_add_file(data, paths[i]);
    }
    if (count == 0) {
        status = add_found(data, "results/*.json");
        if (status == ACR_OK) {
            status = add_found(data, "results/profile/*.json");
        }
        if (status == ACR_OK) {
            status = add_found(data, "results/train/*.json");
        }
        if (status == ACR_OK) {
            status = add_found(data, "results/evolve/*-curves.json");
        }
    }
    if (status == ACR_OK &&
        data->record_count + data->profile_count + data->run_count + data->search_count + data->training_count == 0) {
        return acr__fail(ACR_IO, "no results: name files, or run it where results/*.json are");
    }
    return status;
}

int cmd_report(int argc, char **argv)
{
    common_options common;
    request r = {.output = "report.html"};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_option, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    if (r.check && !r.markdown) {
        fprintf(stderr, "acromion report: --check goes with --markdown\n");
        return EXIT_USAGE;
    }
    report_data data = {.records = NULL};
    acr_status status = r.markdown ? ACR_OK : file_can_write(r.output);
    if (status == ACR_OK) {
        status = add_files(&data, argv + first, argc - first);
    }
    if (status != ACR_OK) {
        exit_code = report_failure(status, "report");
    } else {
        exit_code = r.markdown ? write_markdown(&r, &data) : write_page(&r, &data);
    }
    report_data_free(&data);
    return exit_code;
}
