/* acromion report: results as one page that needs nothing else, and as the tables of the README. */
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/command.h"
#include "base/files.h"
#include "base/options.h"
#include "build_info.h"
#include "internal.h"
#include "kernels/kernel_source.h"
#include "report/report_charts.h"
#include "report/report_page.h"
#include "report/report_tables.h"

enum {
    ID_MARKDOWN = OPTION_LONG_ONLY,
    ID_CHECK
};

static const option_spec options[] = {
    {'o', "output", "FILE", "the page; default report.html"},
    {ID_MARKDOWN, "markdown", "=DOCUMENT", "instead rewrite the tables between the markers of a document; README.md"},
    {ID_CHECK, "check", NULL, "with --markdown: change nothing, exit code 1 when document and results disagree"},
    {0, NULL, NULL, NULL},
};

static const command_spec spec = {
    .name = "report",
    .operands = "[FILE...]",
    .about =
        "Writes one HTML page from results files (JSON of bench and profile) and evolution runs (SQLite): "
        "latency beside the peers,\n"
        "roofline, the ladder, evolution, profiles, tables. It holds its charts (drawn by gnuplot) and styles, and "
        "fetches nothing.\n"
        "Without a file: results/*.json and results/profile/*.json of this folder. With --markdown it writes the "
        "README's tables.\n",
    .options = options,
    .common = 0,
    .examples = "  acromion report -o report.html\n"
                "  acromion report results/*.json run.sqlite -o report.html\n"
                "  acromion report --markdown --check\n",
};

typedef struct request {
    const char *output, *document;
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

/* ---- The README ---- */

/* What stands between the markers of a table, rewritten; the rest as it is. */
static acr_status rewrite(report_text *out, const char *document, const char *path, const report_data *data)
{
    static const char open[] = "<!-- table:", close[] = "<!-- /table -->";
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
        table_markdown(out, &table);
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

static int write_markdown(const request *r, const report_data *data)
{
    size_t bytes = 0;
    report_text wanted = {NULL, 0, 0, false};
    char *now = kernel_read_text(r->document, &bytes);
    acr_status status = now ? rewrite(&wanted, now, r->document, data) : ACR_IO;
    int exit_code = EXIT_DONE;
    if (status == ACR_OK && wanted.failed) {
        status = acr__fail(ACR_NO_MEMORY, "%s: no memory for its tables", r->document);
    }
    if (status == ACR_OK && strcmp(now, wanted.text) != 0) {
        const file_part part = {wanted.text, wanted.size};
        if (r->check) {
            print_difference(r->document, now, wanted.text);
            exit_code = EXIT_FAILED;
        } else {
            status = file_write(r->document, &part, 1);
            printf("%s: tables written\n", r->document);
        }
    }
    free(now);
    text_free(&wanted);
    return status == ACR_OK ? exit_code : report_failure(status, "report");
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
    }
    if (status == ACR_OK && data->record_count + data->profile_count + data->run_count == 0) {
        return acr__fail(ACR_IO, "no results: name files, or run it where results/*.json are");
    }
    return status;
}

int cmd_report(int argc, char **argv)
{
    common_options common;
    request r = {.output = "report.html", .document = "README.md"};
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
