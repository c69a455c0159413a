/* The page, see report_page.h. */
#include "report_page.h"

#include <stdio.h>
#include <string.h>

#include "build_info.h"
#include "internal.h"
#include "report_charts.h"
#include "report_tables.h"

/* Colours have enough contrast on both grounds; --s1 is ours, --s2 the peers', --s3 lines, --s4 a second line. */
static const char head[] =
    "<!DOCTYPE html>\n"
    "<html lang=\"en\">\n"
    "<head>\n"
    "<meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
    "<meta name=\"color-scheme\" content=\"light dark\">\n"
    "<link rel=\"icon\" href=\"data:,\">\n"
    "<title>acromion: results</title>\n"
    "<style>\n"
    ":root { color-scheme: light dark; --ground: #fff; --text: #1b1f24; --soft: #57606a; --line: #d0d7de;\n"
    "  --head: #f3f5f7; --s1: #0969da; --s2: #9a6700; --s3: #57606a; --s4: #8250df; }\n"
    "@media (prefers-color-scheme: dark) {\n"
    "  :root { --ground: #0d1117; --text: #e6edf3; --soft: #9da7b1; --line: #30363d; --head: #161b22;\n"
    "    --s1: #58a6ff; --s2: #d29922; --s3: #9da7b1; --s4: #bc8cff; } }\n"
    "body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--ground); color: var(--text);\n"
    "  font: 1rem/1.5 system-ui, sans-serif; }\n"
    "h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }\n"
    "a { color: var(--s1); } p, figcaption { color: var(--soft); } code { font-size: .92em; }\n"
    "nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; padding: 0; }\n"
    "figure { margin: 0 0 1rem; min-width: 0; } figcaption { font-size: .875rem; font-weight: 600; margin-bottom: "
    ".25rem; overflow-wrap: anywhere; }\n"
    "svg { display: block; width: 100%; height: auto; max-width: 36rem; color: var(--text); font-family: inherit; }\n"
    "svg text { fill: currentColor; }\n"
    ".grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem 2rem; "
    "}\n"
    ".scroll { overflow-x: auto; margin: 1rem 0; border: 1px solid var(--line); border-radius: 6px;\n"
    "  scrollbar-width: thin; scrollbar-color: var(--soft) var(--head); }\n"
    ".scroll::-webkit-scrollbar { height: 10px; background: var(--head); }\n" /* seen without being touched */
    ".scroll::-webkit-scrollbar-thumb { background: var(--soft); border-radius: 5px; }\n"
    "table { border-collapse: collapse; font-size: .875rem; width: 100%; }\n"
    "caption { text-align: left; padding: .5rem .75rem; color: var(--soft); }\n"
    "th, td { padding: .3rem .75rem; text-align: left; white-space: nowrap; border-top: 1px solid var(--line); }\n"
    "th { background: var(--head); } td.n { font-variant-numeric: tabular-nums; }\n"
    "dd { margin: 0 0 .75rem; }\n"
    ".alarm { border-left: 4px solid var(--s2); padding-left: .75rem; color: var(--text); }\n"
    ".ours { color: var(--s1); } .peers { color: var(--s2); }\n"
    "</style>\n"
    "</head>\n"
    "<body>\n"
    "<header>\n"
    "<h1>acromion: results</h1>\n";

static void add_table(report_text *page, const report_data *data, const char *name)
{
    report_table table;
    if (table_make(&table, name, data)) {
        if (table.row_count > 0) {
            table_html(page, &table);
        }
        page->failed = page->failed || table.failed;
        table_free(&table);
    }
}

/* The names of the files that the records are from, each once. */
static void add_sources(report_text *page, const report_data *data)
{
    const char *last = "";
    text_add(page, "<p>Made by acromion %s (%s%s) from:", acr_version(), BUILD_GIT_SHA,
             BUILD_GIT_DIRTY ? ", modified" : "");
    for (size_t i = 0; i < data->record_count + data->profile_count; ++i) {
        const json_t *record = i < data->record_count ? data->records[i] : data->profiles[i - data->record_count];
        const char *file = record_text(record, "file");
        if (strcmp(file, last) != 0) {
            text_add(page, "%s <code>", *last ? "," : "");
            text_add_escaped(page, file);
            text_add(page, "</code>");
            last = file;
        }
    }
    for (size_t i = 0; i < data->run_count; ++i) {
        text_add(page, "%s <code>", *last || i > 0 ? "," : "");
        text_add_escaped(page, data->runs[i].file);
        text_add(page, "</code>");
    }
    const size_t before = data->run_count + (*last ? 1 : 0);
    for (size_t i = 0; i < data->search_count + data->training_count; ++i) {
        const json_t *curves = i < data->search_count ? data->searches[i] : data->trainings[i - data->search_count];
        text_add(page, "%s <code>", before + i > 0 ? "," : "");
        text_add_escaped(page, record_text(curves, "file"));
        text_add(page, "</code>");
    }
    text_add(page, ".</p>\n");
}

static void add_diagnoses(report_text *page, const report_data *data)
{
    if (data->profile_count == 0) {
        text_add(page, "<p>These files have no profile; <code>acromion profile -o FILE</code> makes them.</p>\n");
        return;
    }
    text_add(page, "<dl>\n");
    for (size_t i = 0; i < data->profile_count; ++i) {
        const json_t *p = data->profiles[i];
        if (*record_text(p, "diagnosis")) {
            text_add(page, "<dt><code>");
            text_add_escaped(page, record_text(p, "kernel"));
            text_add(page, "</code> at <code>");
            text_add_escaped(page, record_text(p, "problem"));
            text_add(page, "</code></dt><dd>");
            text_add_escaped(page, record_text(p, "diagnosis"));
            text_add(page, "</dd>\n");
        }
    }
    text_add(page, "</dl>\n");
}

/* "1.234 (1.2 to 1.3), kernel", or "none". */
static void add_finding(report_text *page, const char *arm, const json_t *finding)
{
    if (!json_is_object(finding)) {
        text_add(page, "%s: none", arm);
        return;
    }
    text_add(page, "%s: %.3f (%.3f to %.3f), <code>", arm, record_number(finding, "speedup"),
             record_number(finding, "low"), record_number(finding, "high"));
    text_add_escaped(page, record_text(finding, "kernel"));
    text_add(page, "</code>%s", record_flag(finding, "beyond_noise") ? "" : ", within the noise");
}

/* What each run concludes, in its own words: the charts below show what was not confirmed, too. */
static void add_conclusions(report_text *page, const report_data *data)
{
    for (size_t i = 0; i < data->run_count; ++i) {
        const report_run *run = &data->runs[i];
        text_add(page, "<p><code>");
        text_add_escaped(page, run->file);
        text_add(page, "</code>: ");
        text_add_escaped(page, run->summary ? record_text(run->summary, "conclusion") : run->unknown);
        text_add(page, "</p>\n");
        if (!run->summary) {
            continue;
        }
        text_add(page, "<p>Confirmed in a fresh process. ");
        add_finding(page, "Search", json_object_get(json_object_get(run->summary, "search"), "confirmed"));
        text_add(page, ". ");
        add_finding(page, "Random control", json_object_get(json_object_get(run->summary, "control"), "confirmed"));
        text_add(page, ". Noise floor %.1f&nbsp;%%.</p>\n", 100 * record_number(run->summary, "noise_floor"));
        const json_t *alarms = json_object_get(run->summary, "alarms");
        for (size_t k = 0; k < json_array_size(alarms); ++k) {
            text_add(page, "<p class=\"alarm\"><strong>Alarm</strong>: ");
            text_add_escaped(page, json_string_value(json_array_get(alarms, k)));
            text_add(page, "</p>\n");
        }
    }
}

static bool any_record(const report_data *data, const char *field)
{
    for (size_t i = 0; i < data->record_count; ++i) {
        if (*record_text(data->records[i], field)) {
            return true;
        }
    }
    return false;
}

static bool any_rung(const report_data *data)
{
    for (size_t i = 0; i < data->record_count; ++i) {
        if (strncmp(record_text(data->records[i], "kernel"), "fwd_ladder", strlen("fwd_ladder")) == 0) {
            return true;
        }
    }
    return false;
}

static bool any_record_at_all(const report_data *data)
{
    return data->record_count > 0;
}

static bool any_best_peer(const report_data *data)
{
    return any_record(data, "best_peer");
}

static bool any_peer(const report_data *data)
{
    return any_record(data, "peer");
}

static bool any_run(const report_data *data)
{
    return data->run_count > 0;
}

static bool any_search(const report_data *data)
{
    return data->search_count > 0;
}

static bool any_training(const report_data *data)
{
    return data->training_count > 0;
}

static bool any_profile(const report_data *data)
{
    return data->profile_count > 0;
}

/* The page's sections, in order. What nothing was given for has none. */
static const struct section {
    const char *id, *title, *text; /* text: HTML */
    bool (*wanted)(const report_data *data);
    void (*before)(report_text *page, const report_data *data); /* in front of the charts */
    acr_status (*charts)(chart_writer *w, const report_data *data);
    const char *tables[2];
    void (*behind)(report_text *page, const report_data *data);
} sections[] = {
    {"headline", "Wins and losses",
     "<p><strong class=\"ours\">Faster</strong> and <strong class=\"peers\">slower</strong> than the best peer beyond "
     "the "
     "noise; the others are neither. The first row is the shape that the project was begun for.</p>\n",
     any_best_peer, .charts = charts_headline},
    {"latency", "Latency beside the peers",
     "<p>Median time of a launch with its 95&nbsp;% interval: <strong class=\"ours\">ours</strong>, the planner's "
     "kernel or "
     "else our fastest, and <strong class=\"peers\">the peers</strong>. Bars longer than four times the fastest end at "
     "an "
     "arrow.</p>\n",
     any_peer, .charts = charts_latency, .tables = {"gpu-peers", "cpu-pytorch"}},
    {"roofline", "Roofline",
     "<p>Each problem once for <strong class=\"ours\">ours</strong> and once for <strong class=\"peers\">the fastest "
     "peer</strong>. Bytes are those that must be moved once; inputs in L2 may pass the DRAM line.</p>\n",
     any_record_at_all, .charts = charts_roofline},
    {"ladder", "The ladder", "", any_rung, .charts = charts_ladder, .tables = {"ladder"}},
    {"evolution", "Evolution", "", any_run, .before = add_conclusions, .charts = charts_trials,
     .tables = {"trials", "winners"}},
    {"searches", "Does the search beat chance?",
     "<p>The best speed-up over the incumbent that <strong class=\"ours\">the search</strong> and <strong "
     "class=\"peers\">random search</strong> had seen after so many distinct trials, over several seeds.</p>\n",
     any_search, .charts = charts_searches},
    {"training", "Training",
     "<p>A small model that is trained with <strong class=\"ours\">acromion.sdpa</strong> and with "
     "<strong class=\"peers\">PyTorch's attention</strong>.</p>\n",
     any_training, .charts = charts_training},
    {"profiles", "Profiles", "", any_profile, .tables = {"profiles", "timelines"}, .behind = add_diagnoses},
    {"tables", "Tables", "", any_record_at_all, .tables = {"mission-gpu", "all"}},
};
enum {
    SECTION_COUNT = sizeof sections / sizeof sections[0]
};

static acr_status add_section(report_text *page, const report_data *data, chart_writer *charts, const struct section *s)
{
    text_add(page, "<section aria-labelledby=\"%s\">\n<h2 id=\"%s\">%s</h2>\n%s", s->id, s->id, s->title, s->text);
    if (s->before) {
        s->before(page, data);
    }
    const acr_status status = s->charts ? s->charts(charts, data) : ACR_OK;
    for (size_t i = 0; i < sizeof s->tables / sizeof s->tables[0] && s->tables[i]; ++i) {
        add_table(page, data, s->tables[i]);
    }
    if (s->behind) {
        s->behind(page, data);
    }
    text_add(page, "</section>\n");
    return status;
}

acr_status page_make(report_text *page, const report_data *data, int *charts)
{
    chart_writer writer;
    acr_status status = charts_open(&writer, page);
    text_add(page, "%s", head);
    add_sources(page, data);
    text_add(page, "<nav aria-label=\"Sections\"><ul>\n");
    for (size_t i = 0; i < SECTION_COUNT; ++i) {
        if (sections[i].wanted(data)) {
            text_add(page, "<li><a href=\"#%s\">%s</a></li>\n", sections[i].id, sections[i].title);
        }
    }
    text_add(page, "</ul></nav>\n</header>\n<main>\n");
    for (size_t i = 0; i < SECTION_COUNT && status == ACR_OK; ++i) {
        if (sections[i].wanted(data)) {
            status = add_section(page, data, &writer, &sections[i]);
        }
    }
    text_add(page, "</main>\n</body>\n</html>\n");
    *charts = writer.charts;
    return status == ACR_OK && page->failed ? acr__fail(ACR_NO_MEMORY, "no memory for the page") : status;
}
