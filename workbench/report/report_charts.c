/* Charts, see report_charts.h. */
#include "report_charts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/child.h"
#include "base/options.h"
#include "base/text.h"
#include "internal.h"
#include "machine/gpus.h"
#include "machine/roofline.h"
#include "report_tables.h"

enum {
    KEY_BYTES = 512,
    GNUPLOT_LIMIT_S = 30
};

/* ---- gnuplot's SVG in a page ---- */

/* A stretch of SVG and what stands for it. */
typedef struct substitution {
    const char *from, *to;
} substitution;

/* "rgb(  3,   0,   0)" as "var(--s3)"; returns how many bytes were read, 0 when it is no such colour. */
static int series_colour(report_text *out, const char *at)
{
    static const char pattern[] = "rgb(#,0,0)"; /* blanks may stand anywhere, # is the series */
    const char *begin = at;
    char series = '0';
    for (const char *wanted = pattern; *wanted; ++at) {
        if (*at == ' ') {
            continue;
        }
        if (*wanted == '#' && *at >= '1' && *at <= '9') {
            series = *at;
        } else if (*wanted != *at) {
            return 0;
        }
        ++wanted;
    }
    text_add(out, "var(--s%c)", series);
    return (int)(at - begin);
}

/* Elements that only gnuplot's viewer needs: from an opening to a closing text. */
static const char *skip_element(const char *at)
{
    static const struct {
        const char *open, *close;
    } elements[] = {{"<title>", "</title>"}, {"<desc>", "</desc>"}, {"<filter ", "</filter>"}};
    for (size_t i = 0; i < sizeof elements / sizeof elements[0]; ++i) {
        if (strncmp(at, elements[i].open, strlen(elements[i].open)) == 0) {
            const char *end = strstr(at, elements[i].close);
            return end ? end + strlen(elements[i].close) : at;
        }
    }
    return at;
}

void chart_inline(report_text *out, const char *svg, int number, const char *title, const char *description)
{
    char point[32], point_id[32], canvas[48], plot[32];
    snprintf(point, sizeof point, "'#c%dgp", number);
    snprintf(point_id, sizeof point_id, "id='c%dgp", number);
    snprintf(canvas, sizeof canvas, "id=\"c%d_canvas\"", number);
    snprintf(plot, sizeof plot, "id=\"c%d_plot", number);
    const substitution all[] = {
        {"'#gp", point},
        {"id='gp", point_id},
        {"id=\"gnuplot_canvas\"", canvas},
        {"id=\"chart_plot", plot},
        {"'black'", "'currentColor'"},
        {"\"black\"", "\"currentColor\""},
        {"\"white\"", "\"currentColor\""},
        {"'white'", "'var(--ground)'"},
        {"<rect x=\"0\" y=\"0\"", "<rect class=\"back\" x=\"0\" y=\"0\""},
    };
    const char *at = strstr(svg, "<svg"), *box = at ? strstr(at, "viewBox=\"") : NULL;
    const char *body = box ? strchr(box, '>') : NULL;
    if (!body) {
        out->failed = true;
        return;
    }
    int box_length = (int)strcspn(box + strlen("viewBox=\""), "\"");
    text_add(out, "<svg viewBox=\"%.*s\" role=\"img\" aria-labelledby=\"c%d_t c%d_d\"><title id=\"c%d_t\">", box_length,
             box + strlen("viewBox=\""), number, number, number);
    text_add_escaped(out, title);
    text_add(out, "</title><desc id=\"c%d_d\">", number);
    text_add_escaped(out, description);
    text_add(out, "</desc>");
    for (at = body + 1; *at;) {
        const char *after = skip_element(at);
        int colour = after == at ? series_colour(out, at) : 0;
        size_t i = 0;
        while (after == at && colour == 0 && i < sizeof all / sizeof all[0] &&
               strncmp(at, all[i].from, strlen(all[i].from)) != 0) {
            ++i;
        }
        if (after != at) {
            at = after;
        } else if (colour > 0) {
            at += colour;
        } else if (i < sizeof all / sizeof all[0]) {
            text_add(out, "%s", all[i].to);
            at += strlen(all[i].from);
        } else {
            text_add_bytes(out, at++, 1);
        }
    }
}

acr_status charts_open(chart_writer *out, report_text *page)
{
    static const char *const nowhere_else[] = {NULL};
    *out = (chart_writer){.page = page};
    if (!child_find(out->gnuplot, "gnuplot", nowhere_else)) {
        return acr__fail(ACR_UNSUPPORTED, "gnuplot, which draws the charts, is not on PATH (Debian: gnuplot-nox)");
    }
    return ACR_OK;
}

/* Runs a script and adds what it draws as a figure. The script is freed. */
static acr_status draw(chart_writer *w, report_text *script, const char *title, const char *description)
{
    const char *const arguments[] = {w->gnuplot, "-", NULL};
    child_result result;
    acr_status status = script->failed ? acr__fail(ACR_NO_MEMORY, "no memory for a chart")
                                       : child_run(&result, arguments, script->text, GNUPLOT_LIMIT_S);
    text_free(script);
    if (status != ACR_OK) {
        return status;
    }
    if (result.timed_out || result.exit_code != 0 || !strstr(result.out, "</svg>")) {
        status = acr__fail(ACR_IO, "gnuplot failed at \"%s\": %.300s", title,
                           result.timed_out ? "it did not end" : result.err);
    } else {
        text_add(w->page, "<figure><figcaption>");
        text_add_escaped(w->page, title);
        text_add(w->page, "</figcaption>");
        chart_inline(w->page, result.out, ++w->charts, title, description);
        text_add(w->page, "</figure>\n");
    }
    child_result_free(&result);
    return status;
}

/* The same, which ends what it was made of. */
static acr_status draw_once(chart_writer *w, report_text *script, const char *title, report_text *description)
{
    const acr_status status = description->failed ? acr__fail(ACR_NO_MEMORY, "no memory for a chart")
                                                  : draw(w, script, title, description->text);
    text_free(script);
    text_free(description);
    return status;
}

/* A chart of each file's data. */
static acr_status draw_each(chart_writer *w, json_t *const *files, size_t count,
                            acr_status (*draw_file)(chart_writer *w, const json_t *file))
{
    acr_status status = ACR_OK;
    for (size_t i = 0; i < count && status == ACR_OK; ++i) {
        status = draw_file(w, files[i]);
    }
    return status;
}

/* A text inside gnuplot's quotes. */
static void add_quoted(report_text *script, const char *plain)
{
    text_add(script, "\"");
    for (; *plain; ++plain) {
        text_add(script, "%c", *plain == '"' || *plain == '\\' ? ' ' : *plain);
    }
    text_add(script, "\"");
}

/* width x height in units of which a letter is about 7 wide. */
static void begin_script(report_text *script, int width, int height)
{
    text_add(script,
             "set terminal svg size %d,%d dynamic font \"sans-serif,13\" name \"chart\" noenhanced\n"
             "set encoding utf8\nset style fill solid\nunset key\nset border 3\nset tics nomirror out\n",
             width, height);
}

/* ---- Latency: bars of ours and the peers, a chart a problem ---- */

typedef struct bar {
    const json_t *record;
    double p50, low, high;
    bool ours;
} bar;

enum {
    BARS_MAX = 24
};

static bool measured_wanted(const json_t *r)
{
    return !record_flag(r, "overlap") && strncmp(record_text(r, "kernel"), "fwd_ladder", strlen("fwd_ladder")) != 0;
}

static void bar_key(const json_t *r, char out[KEY_BYTES])
{
    snprintf(out, KEY_BYTES, "%s\n%s\n%s\n%s", record_text(r, "device"), record_text(r, "mode"),
             record_text(r, "problem"), record_timed(r));
}

static int by_chart_and_time(const void *a, const void *b)
{
    const json_t *x = *(const json_t *const *)a, *y = *(const json_t *const *)b;
    static const char *const fields[] = {"device", "mode", "problem"};
    int cpu = (strcmp(record_text(x, "driver"), "none") == 0) - (strcmp(record_text(y, "driver"), "none") == 0);
    int calls = (strcmp(record_text(x, "mode"), "call") == 0) - (strcmp(record_text(y, "mode"), "call") == 0);
    if (cpu || calls) { /* GPUs and streams come first */
        return cpu ? cpu : calls;
    }
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; ++i) {
        int order = strcmp(record_text(x, fields[i]), record_text(y, fields[i]));
        if (order) {
            return order;
        }
    }
    double p = record_number(x, "p50_us"), q = record_number(y, "p50_us");
    return (p > q) - (p < q);
}

static bool same_chart(const json_t *a, const json_t *b)
{
    return strcmp(record_text(a, "device"), record_text(b, "device")) == 0 &&
           strcmp(record_text(a, "mode"), record_text(b, "mode")) == 0 &&
           strcmp(record_text(a, "problem"), record_text(b, "problem")) == 0;
}

/* The bars of one problem, fastest first: all peers, and of ours the planned kernel, or the fastest. Returns how many,
 * or 0 when there is nobody to stand beside. */
static int collect_bars(bar bars[BARS_MAX], const json_t **sorted, size_t first, size_t end)
{
    int count = 0, peers = 0, ours = 0;
    bool planned_known = false;
    for (size_t i = first; i < end; ++i) {
        planned_known = planned_known || record_flag(sorted[i], "planned");
    }
    for (size_t i = first; i < end && count < BARS_MAX; ++i) {
        const json_t *r = sorted[i];
        bool peer = *record_text(r, "peer") != '\0';
        if (!peer && (planned_known ? !record_flag(r, "planned") : ours > 0)) {
            continue;
        }
        double p50 = record_number(r, "p50_us"), low = record_bound(r, "ci95_us", 0),
               high = record_bound(r, "ci95_us", 1);
        bars[count++] = (bar){r, p50, isnan(low) ? p50 : low, isnan(high) ? p50 : high, !peer};
        peers += peer;
        ours += !peer;
    }
    return peers > 0 && ours > 0 ? count : 0;
}

/* 1, 2 or 5 times a power of ten: about four tics on an axis of this length. */
static double tic_step(double length)
{
    double power = pow(10, floor(log10(length / 4))), rest = length / 4 / power;
    return power * (rest <= 1 ? 1 : rest <= 2 ? 2 : rest <= 5 ? 5 : 10);
}

/* The rows of a chart, fastest at the top: the name and the time stand above the bar. */
static void add_bars(report_text *script, report_text *description, const bar *bars, int count, double longest)
{
    enum {
        LETTERS = 40 /* of a name, beside its time */
    };
    for (int i = 0; i < count; ++i) {
        const bar *b = &bars[i];
        const char *name = record_timed(b->record);
        char us[24], low[24], high[24], label[256];
        double shown = fmin(b->p50, longest);
        us_text(us, b->p50);
        snprintf(label, sizeof label, "%.*s%s  %s%s µs", LETTERS, name, strlen(name) > LETTERS ? "…" : "",
                 shown < b->p50 ? "→ " : "", us);
        text_add(script, "%g %d %g %g %d ", shown, count - i, fmin(b->low, shown), fmax(fmin(b->high, longest), shown),
                 b->ours ? 1 : 2);
        add_quoted(script, label);
        text_add(script, "\n");
        text_add(description, "%s%s %s microseconds, interval %s to %s", i ? "; " : "", name, us, us_text(low, b->low),
                 us_text(high, b->high));
    }
}

static acr_status draw_bars(chart_writer *w, const bar *bars, int count)
{
    static const double cut = 4; /* times the fastest: longer bars end there, their time stands in the text */
    report_text script = {NULL, 0, 0, false}, title = {NULL, 0, 0, false}, description = {NULL, 0, 0, false};
    double longest = 0;
    for (int i = 0; i < count; ++i) {
        longest = fmax(longest, fmin(bars[i].high, cut * bars[0].p50));
    }
    const json_t *r = bars[0].record;
    text_add(&title, "%s, %s mode, %s", record_text(r, "problem"), record_text(r, "mode"), record_text(r, "device"));
    enum {
        ROW = 36,
        BELOW = 58, /* for the axis and its unit */
        ABOVE = 4
    };
    double height = ROW * count + BELOW + ABOVE;
    begin_script(&script, 400, (int)height);
    text_add(&script,
             "set lmargin 1\nset rmargin 3\nset tmargin at screen %g\nset bmargin 4\nset border 1\n"
             "unset ytics\nset xlabel \"µs a launch\"\nset xtics %g\nset format x \"%%.10g\"\nset xrange [0:%g]\nset "
             "yrange [0.5:%d.5]\n$bars << END\n",
             1 - ABOVE / height, tic_step(longest), 1.02 * longest, count);
    add_bars(&script, &description, bars, count, longest);
    text_add(&script, "END\nplot ");
    for (int series = 1; series <= 2; ++series) {
        text_add(
            &script,
            "$bars using ($5==%d ? $1/2 : NaN):($2-0.2):($1/2):(0.16) with boxxyerror lc rgb \"#0%d0000\" notitle, ",
            series, series);
    }
    text_add(&script, "'' using 1:($2-0.2):3:4 with xerrorbars pt 0 lw 1.5 lc rgb \"#030000\" notitle, "
                      "'' using (0):($2+0.31):6 with labels left offset 0,0 notitle\n");
    acr_status status = title.failed || description.failed ? acr__fail(ACR_NO_MEMORY, "no memory for a chart")
                                                           : draw(w, &script, title.text, description.text);
    text_free(&script);
    text_free(&title);
    text_free(&description);
    return status;
}

/* Charts of groups of records: which records, in which order, and when two are of one group; `draw` draws a group; what
 * stands there when no chart was drawn. */
typedef struct chart_groups {
    record_wanted *wanted;
    record_order *order;
    bool (*is_same)(const json_t *a, const json_t *b);
    acr_status (*draw)(chart_writer *w, const json_t **group, size_t count);
    bool in_grid; /* side by side, as many as fit */
    const char *none;
} chart_groups;

static acr_status draw_groups(chart_writer *w, const report_data *data, const chart_groups *g)
{
    size_t count = 0;
    const int before = w->charts;
    const json_t **sorted = records_latest(&count, data->records, data->record_count, g->wanted, bar_key, g->order);
    acr_status status = sorted ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for the charts");
    text_add(w->page, g->in_grid ? "<div class=\"grid\">\n" : "<div>\n");
    for (size_t first = 0, end; first < count && status == ACR_OK; first = end) {
        for (end = first; end < count && g->is_same(sorted[first], sorted[end]); ++end) {
        }
        status = g->draw(w, sorted + first, end - first);
    }
    text_add(w->page, "</div>\n");
    if (w->charts == before) {
        text_add(w->page, "<p>%s</p>\n", g->none);
    }
    free(sorted);
    return status;
}

static acr_status draw_latency(chart_writer *w, const json_t **group, size_t count)
{
    bar bars[BARS_MAX];
    const int bar_count = collect_bars(bars, group, 0, count);
    return bar_count > 0 ? draw_bars(w, bars, bar_count) : ACR_OK;
}

acr_status charts_latency(chart_writer *w, const report_data *data)
{
    return draw_groups(w, data,
                       &(chart_groups){measured_wanted, by_chart_and_time, same_chart, draw_latency, true,
                                       "No problem in these files was measured beside a peer."});
}

/* ---- The headline: one row a problem, how many times as fast as the best peer ---- */

static bool ratio_wanted(const json_t *r)
{
    return *record_text(r, "best_peer") && record_flag(r, "planned") && !record_flag(r, "overlap") &&
           strcmp(record_text(r, "mode"), "stream") == 0 && strcmp(record_text(r, "driver"), "none") != 0 &&
           record_number(r, "ratio_to_best_peer") > 0;
}

static void ratio_key(const json_t *r, char out[KEY_BYTES])
{
    snprintf(out, KEY_BYTES, "%s\n%s", record_text(r, "device"), record_text(r, "problem"));
}

static bool is_mission(const json_t *r)
{
    return strcmp(record_text(r, "problem"), MISSION_PROBLEM) == 0;
}

/* By device; the mission shape first, then from the largest ratio to the smallest. */
static int by_device_and_ratio(const void *a, const void *b)
{
    const json_t *x = *(const json_t *const *)a, *y = *(const json_t *const *)b;
    const int device = strcmp(record_text(x, "device"), record_text(y, "device"));
    const double p = record_number(x, "ratio_to_best_peer"), q = record_number(y, "ratio_to_best_peer");
    return device ? device : is_mission(x) != is_mission(y) ? is_mission(y) - is_mission(x) : (p < q) - (p > q);
}

/* By the comparison's own verdict, which knows the noise floor: 1 faster, 2 slower, 3 neither. */
static int outcome_of(const json_t *r)
{
    const char *verdict = record_text(r, "verdict");
    return strcmp(verdict, "FASTER") == 0 ? 1 : strcmp(verdict, "SLOWER") == 0 ? 2 : 3;
}

static void add_headline_words(report_text *page, const json_t **sorted, size_t first, size_t end)
{
    int outcomes[4] = {0};
    for (size_t i = first; i < end; ++i) {
        ++outcomes[outcome_of(sorted[i])];
    }
    const json_t *r = sorted[first];
    text_add(page, "<p>On ");
    text_add_escaped(page, record_text(r, "device"));
    if (is_mission(r)) {
        char us[24];
        text_add(page, ", the mission shape <code>%s</code> takes <strong>%s&nbsp;µs</strong>, ", MISSION_PROBLEM,
                 us_text(us, record_number(r, "p50_us")));
        text_add(page, "<strong>%.2f times as fast</strong> (%.2f to %.2f) as the best peer, ",
                 record_number(r, "ratio_to_best_peer"), record_bound(r, "ratio_ci95", 0),
                 record_bound(r, "ratio_ci95", 1));
        text_add_escaped(page, record_text(r, "best_peer"));
    }
    text_add(page, ". Of %zu problems beside peers %d are faster beyond the noise, %d slower, %d neither.</p>\n",
             end - first, outcomes[1], outcomes[2], outcomes[3]);
}

static acr_status draw_ratios(chart_writer *w, const json_t **sorted, size_t first, size_t end)
{
    enum {
        ROW = 17,
        BELOW = 58,
        ABOVE = 4
    };
    report_text script = {NULL, 0, 0, false}, description = {NULL, 0, 0, false};
    const size_t count = end - first;
    const double height = (double)(ROW * count + BELOW + ABOVE);
    double least = 0.9, most = 1.1;
    begin_script(&script, 620, (int)height);
    text_add(&script, "$rows << END\n");
    for (size_t i = first; i < end; ++i) {
        const json_t *r = sorted[i];
        const double ratio = record_number(r, "ratio_to_best_peer");
        const double low = record_bound(r, "ratio_ci95", 0), high = record_bound(r, "ratio_ci95", 1);
        char label[96];
        snprintf(label, sizeof label, "%.60s  %.2f", record_text(r, "problem"), ratio);
        text_add(&script, "%g %zu %g %g %d ", ratio, end - i, isnan(low) ? ratio : low, isnan(high) ? ratio : high,
                 outcome_of(r));
        add_quoted(&script, label);
        text_add(&script, "\n");
        text_add(&description, "%s%s %.2f (%.2f to %.2f)", i > first ? "; " : "", record_text(r, "problem"), ratio, low,
                 high);
        least = fmin(least, low);
        most = fmax(most, high);
    }
    text_add(&script,
             "END\nset tmargin at screen %g\nset bmargin 4\nset lmargin at screen 0.5\nset rmargin 3\n"
             "set border 1\nset logscale x 2\nset xrange [%g:%g]\nset yrange [0.5:%zu.5]\nset xtics (",
             1 - ABOVE / height, 0.97 * least, 1.05 * most, count);
    static const char *const tics[] = {"0.25", "0.5", "0.7", "1", "1.5", "2", "3", "4", "6", "8", "12", "16", "32"};
    for (size_t i = 0; i < sizeof tics / sizeof tics[0]; ++i) {
        text_add(&script, "%s\"%s\" %s", i ? ", " : "", tics[i], tics[i]);
    }
    text_add(&script,
             ")\nset xlabel \"times as fast, logarithmic; 95 %% interval\"\n"
             "set ytics out scale 0\nset arrow from 1, graph 0 to 1, graph 1 nohead dt 2 lc rgb \"#030000\"\nplot ");
    for (int series = 1; series <= 3; ++series) {
        text_add(
            &script,
            "%s$rows using ($5==%d ? $1 : NaN):2:3:4:ytic(6) with xerrorbars pt 7 ps 0.8 lw 1.5 lc rgb \"#0%d0000\" "
            "notitle",
            series > 1 ? ", " : "", series, series);
    }
    text_add(&script, "\n");
    char title[256];
    snprintf(title, sizeof title, "Times as fast as the best peer, %s, stream mode",
             record_text(sorted[first], "device"));
    return draw_once(w, &script, title, &description);
}

acr_status charts_headline(chart_writer *w, const report_data *data)
{
    size_t count = 0;
    const json_t **sorted =
        records_latest(&count, data->records, data->record_count, ratio_wanted, ratio_key, by_device_and_ratio);
    acr_status status = ACR_OK;
    for (size_t first = 0, end; first < count && status == ACR_OK; first = end) {
        const char *device = record_text(sorted[first], "device");
        for (end = first; end < count && strcmp(device, record_text(sorted[end], "device")) == 0; ++end) {
        }
        add_headline_words(w->page, sorted, first, end);
        status = draw_ratios(w, sorted, first, end);
    }
    free(sorted);
    return status;
}

/* ---- Roofline ---- */

static bool stream_on_gpu(const json_t *r)
{
    acr_problem p;
    const char *driver = record_text(r, "driver");
    return measured_wanted(r) && strcmp(record_text(r, "mode"), "stream") == 0 && strcmp(driver, "none") != 0 &&
           acr_problem_parse(&p, record_text(r, "problem"), NULL) == ACR_OK;
}

/* FLOP a byte, and FLOP a second. */
typedef struct roofline_point {
    double intensity, rate;
    int series; /* 1 ours, 2 a peer */
} roofline_point;

static bool point_of(roofline_point *out, const json_t *r)
{
    acr_problem p;
    if (acr_problem_parse(&p, record_text(r, "problem"), NULL) != ACR_OK || acr_problem_canonical(&p, &p) != ACR_OK ||
        p.dtype == ACR_F32) { /* has another roof */
        return false;
    }
    problem_work d = work_of(&p, NULL);
    *out = (roofline_point){d.flops / d.bytes, 1e6 * d.flops / record_number(r, "p50_us"),
                            *record_text(r, "peer") ? 2 : 1};
    return true;
}

/* Whether a name beside a point would stand clear of those that stand already: on logarithmic axes, a line high and
 * a name wide. */
static bool is_apart(const roofline_point *p, const roofline_point *labels, int count)
{
    static const double line = 1.09, name = 6.0;
    for (int i = 0; i < count; ++i) {
        const double x = p->intensity / labels[i].intensity, y = p->rate / labels[i].rate;
        if (x < name && x > 1 / name && y < line && y > 1 / line) {
            return false;
        }
    }
    return true;
}

/* The fastest of ours and of the peers for each problem; sorted by chart and time, so the first of each. */
static void add_points(report_text *script, const json_t **sorted, size_t first, size_t end, double range[2])
{
    enum {
        LABELS_MAX = 64
    };
    roofline_point labels[LABELS_MAX];
    int label_count = 0;
    bool seen[3] = {false, false, false};
    for (size_t i = first; i < end; ++i) {
        if (i > first && !same_chart(sorted[i], sorted[i - 1])) {
            seen[1] = seen[2] = false;
        }
        roofline_point p;
        if (point_of(&p, sorted[i]) && !seen[p.series]) {
            seen[p.series] = true;
            text_add(script, "%g %g %d ", p.intensity, p.rate / 1e12, p.series);
            const bool ours = p.series == 1, labelled = ours && is_apart(&p, labels, label_count);
            add_quoted(script, labelled ? record_text(sorted[i], "problem") : "");
            text_add(script, "\n");
            if (labelled && label_count < LABELS_MAX) {
                labels[label_count++] = p;
            }
            range[0] = fmin(range[0], p.intensity);
            range[1] = fmax(range[1], p.intensity);
        }
    }
}

static acr_status draw_roofline(chart_writer *w, const json_t **group, size_t count)
{
    acr__device named = {.backend = ACR__CUDA};
    const char *device = record_text(group[0], "device");
    snprintf(named.name, sizeof named.name, "%s", device);
    const gpu_model *model = gpu_of_device(&named);
    if (!model) {
        text_add(w->page, "<p>No roofline for ");
        text_add_escaped(w->page, device);
        text_add(w->page, ": the table of GPUs does not have it.</p>\n");
        return ACR_OK;
    }
    machine m;
    machine_of_gpu(&m, &model->device);
    report_text script = {NULL, 0, 0, false};
    double range[2] = {INFINITY, 0}, peak = m.multiply_add_flops[ACR_F16] / 1e12;
    begin_script(&script, 620, 540);
    text_add(&script, "$points << END\n");
    add_points(&script, group, 0, count, range);
    text_add(&script, "END\n");
    if (!(range[1] > 0)) {
        text_free(&script);
        return ACR_OK;
    }
    double left = fmin(range[0] / 2, peak * 1e12 / m.memory_bytes_per_s / 20), right = 2 * range[1];
    text_add(
        &script,
        "set logscale xy\nset xrange [%g:%g]\nset yrange [*:%g]\nset xlabel \"FLOP a byte that must be moved\"\n"
        "set ylabel \"TFLOP/s\"\nset key above Left reverse vertical maxrows 4\nset samples 400\n"
        "plot (x*%g < %g ? x*%g : %g) lw 2 lc rgb \"#030000\" title \"DRAM %.3g TB/s, tensor cores %.4g TFLOP/s\", "
        "(x*%g < %g ? x*%g : NaN) lw 2 dt 2 lc rgb \"#040000\" title \"L2 %.3g TB/s\", "
        "$points using ($3==2 ? $1 : NaN):2 with points pt 7 ps 0.8 lc rgb \"#020000\" title \"fastest peer\", "
        "$points using ($3==1 ? $1 : NaN):2 with points pt 7 ps 1.1 lc rgb \"#010000\" title \"fastest of ours\", "
        "$points using ($3==1 ? $1 : NaN):2:4 with labels left offset 0.7,-0.2 font \",7\" notitle\n",
        left, right, 2 * peak, m.memory_bytes_per_s / 1e12, peak, m.memory_bytes_per_s / 1e12, peak,
        m.memory_bytes_per_s / 1e12, peak, m.cache_bytes_per_s / 1e12, peak, m.cache_bytes_per_s / 1e12,
        m.cache_bytes_per_s / 1e12);
    char title[256];
    snprintf(title, sizeof title, "Roofline of %s: 16-bit and 8-bit problems, stream mode", device);
    acr_status status = draw(w, &script, title,
                             "Rate against FLOP a byte, both logarithmic, with the lines that DRAM, L2 and the 16-bit "
                             "tensor cores draw. The figures are those of the table of all measurements.");
    text_free(&script);
    return status;
}

static bool same_device(const json_t *a, const json_t *b)
{
    return strcmp(record_text(a, "device"), record_text(b, "device")) == 0;
}

acr_status charts_roofline(chart_writer *w, const report_data *data)
{
    return draw_groups(w, data,
                       &(chart_groups){stream_on_gpu, by_chart_and_time, same_device, draw_roofline, false,
                                       "No measurement in these files is of a GPU whose roofs are known."});
}

/* ---- The ladder ---- */

static bool rung_wanted(const json_t *r)
{
    return strncmp(record_text(r, "kernel"), "fwd_ladder", strlen("fwd_ladder")) == 0;
}

static int by_chart_and_name(const void *a, const void *b)
{
    const json_t *x = *(const json_t *const *)a, *y = *(const json_t *const *)b;
    return same_chart(x, y) ? strcmp(record_timed(x), record_timed(y)) : by_chart_and_time(a, b);
}

static acr_status draw_ladder(chart_writer *w, const json_t **rungs, size_t count)
{
    report_text script = {NULL, 0, 0, false}, description = {NULL, 0, 0, false};
    char title[256];
    snprintf(title, sizeof title, "The ladder: %s, %s", record_text(rungs[0], "problem"),
             record_text(rungs[0], "device"));
    begin_script(&script, 400, 300);
    text_add(&script,
             "set logscale y\nset ylabel \"µs a launch (logarithmic)\"\nset xlabel \"rung\"\nset xrange [-0.5:%g]\n"
             "set offsets 0,0,graph 0.1,0\nset xtics 1\n$rungs << END\n",
             (double)count - 0.5);
    for (size_t i = 0; i < count; ++i) {
        double us = record_number(rungs[i], "p50_us");
        char text[24];
        text_add(&script, "%zu %g \"%s\"\n", i, us, us_text(text, us));
        text_add(&description, "%s%s %s microseconds", i ? "; " : "", record_timed(rungs[i]), text);
    }
    text_add(&script, "END\nplot $rungs using 1:2 with linespoints lw 2 pt 7 lc rgb \"#010000\" notitle, "
                      "'' using 1:2:3 with labels offset 0,1 notitle\n");
    return draw_once(w, &script, title, &description);
}

acr_status charts_ladder(chart_writer *w, const report_data *data)
{
    return draw_groups(w, data,
                       &(chart_groups){rung_wanted, by_chart_and_name, same_chart, draw_ladder, true,
                                       "These files have no rung of the ladder; <code>acromion bench --ladder</code> "
                                       "measures them."});
}

/* ---- Evolution ---- */

static acr_status draw_run(chart_writer *w, const report_run *run)
{
    report_text script = {NULL, 0, 0, false};
    char title[320];
    snprintf(title, sizeof title, "Evolution run %s: times as fast as the incumbent", run->file);
    begin_script(&script, 480, 340);
    text_add(&script, "set xlabel \"trial\"\nset ylabel \"times as fast as the incumbent\"\nset key top left\n");
    int arms = 0;
    for (size_t first = 0, end; first < run->count; first = end, ++arms) {
        double best = NAN;
        text_add(&script, "$arm%d << END\n", arms);
        for (end = first; end < run->count && strcmp(run->trials[end].arm, run->trials[first].arm) == 0; ++end) {
            const report_trial *t = &run->trials[end];
            if (!isnan(t->speedup)) {
                best = fmax(best, t->speedup);
                text_add(&script, "%d %g %g %g %g\n", t->number, t->speedup, isnan(t->low) ? t->speedup : t->low,
                         isnan(t->high) ? t->speedup : t->high, best);
            }
        }
        text_add(&script, "END\narm%d = ", arms);
        add_quoted(&script, run->trials[first].arm);
        text_add(&script, "\nhas%d = %d\n", arms, !isnan(best));
    }
    text_add(&script, "plot 1 lc rgb \"#030000\" dt 2 notitle");
    for (int i = 0; i < arms; ++i) {
        text_add(&script, ", $arm%d using 1:2:3:4 with yerrorbars pt 7 ps 0.5 lc rgb \"#0%d0000\" notitle", i,
                 i % 2 + 1);
        text_add(&script, ", $arm%d using 1:5 with steps lw 2 lc rgb \"#0%d0000\" title arm%d.\": best so far\"", i,
                 i % 2 + 1, i);
    }
    text_add(&script, "\n");
    acr_status status = draw(w, &script, title,
                             "Each timed trial with its 95 % interval, and the best so far of each arm; "
                             "the counts are in the table of trials.");
    text_free(&script);
    return status;
}

acr_status charts_trials(chart_writer *w, const report_data *data)
{
    acr_status status = ACR_OK;
    int timed_runs = 0;
    for (size_t i = 0; i < data->run_count && status == ACR_OK; ++i) {
        bool timed = false;
        for (size_t t = 0; t < data->runs[i].count; ++t) {
            timed = timed || !isnan(data->runs[i].trials[t].speedup);
        }
        if (timed) {
            status = draw_run(w, &data->runs[i]);
            ++timed_runs;
        }
    }
    if (timed_runs == 0) {
        text_add(w->page,
                 data->run_count ? "<p>No trial of the run was timed.</p>\n" : "<p>No evolution run was given.</p>\n");
    }
    return status;
}

/* ---- Searches with several seeds ---- */

/* "trial median low high", the median twice where there is no interval. */
static void add_middles(report_text *script, const json_t *trials, const char *which)
{
    text_add(script, "$%s << END\n", which);
    for (size_t t = 0; t < json_array_size(trials); ++t) {
        const json_t *middle = json_object_get(json_array_get(trials, t), which);
        const double median = record_number(middle, "median");
        const double low = record_bound(middle, "interval", 0), high = record_bound(middle, "interval", 1);
        text_add(script, "%zu %g %g %g\n", t + 1, median, isnan(low) ? median : low, isnan(high) ? median : high);
    }
    text_add(script, "END\n");
}

/* Both arms above, their ratio below. */
static acr_status draw_searches(chart_writer *w, const json_t *set)
{
    static const char *const parts[] = {"search", "random", "ratio"};
    const json_t *trials = json_object_get(set, "by_trial"), *problems = json_object_get(set, "problems");
    const json_t *mean = json_object_get(set, "mean_ratio");
    report_text script = {NULL, 0, 0, false}, description = {NULL, 0, 0, false};
    char title[320];
    snprintf(title, sizeof title, "Search and random search: %.90s%s, %zu seeds, %.80s%s",
             json_string_value(json_array_get(problems, 0)), json_array_size(problems) > 1 ? " and others" : "",
             json_array_size(json_object_get(set, "seeds")), record_text(set, "device"),
             strcmp(record_text(set, "clock"), "real") == 0 ? "" : ", model clock: nothing was timed");
    begin_script(&script, 480, 520);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; ++i) {
        add_middles(&script, trials, parts[i]);
    }
    text_add(&script,
             "set style fill transparent solid 0.15 noborder\nset multiplot layout 2,1\nset xrange [1:%zu]\n"
             "set ylabel \"times as fast as the incumbent\"\nset key bottom right\nplot "
             "$search using 1:3:4 with filledcurves lc rgb \"#010000\" notitle, "
             "$random using 1:3:4 with filledcurves lc rgb \"#020000\" notitle, "
             "$search using 1:2 with steps lw 2 lc rgb \"#010000\" title \"search\", "
             "$random using 1:2 with steps lw 2 lc rgb \"#020000\" title \"random\"\n"
             "set xlabel \"distinct trials of an arm\"\nset ylabel \"search / random\"\nunset key\nplot "
             "$ratio using 1:3:4 with filledcurves lc rgb \"#010000\" notitle, 1 lc rgb \"#030000\" dt 2 notitle, "
             "$ratio using 1:2 with steps lw 2 lc rgb \"#010000\" notitle\nunset multiplot\n",
             json_array_size(trials) > 1 ? json_array_size(trials) : 2);
    text_add(&description,
             "Against %s. Medians over seeds of the best so far with their intervals, unconfirmed, and of search / "
             "random below. The mean over trials of search / random is %.3f",
             record_text(set, "incumbent"), record_number(mean, "median"));
    if (!isnan(record_bound(mean, "interval", 0))) {
        text_add(&description, ", interval %.3f to %.3f", record_bound(mean, "interval", 0),
                 record_bound(mean, "interval", 1));
    }
    text_add(&description, "; the noise floor of a trial %.1f %%.", 100 * record_number(set, "noise_floor"));
    return draw_once(w, &script, title, &description);
}

acr_status charts_searches(chart_writer *w, const report_data *data)
{
    return draw_each(w, data->searches, data->search_count, draw_searches);
}

/* ---- Training: loss curves ---- */

static acr_status draw_training(chart_writer *w, const json_t *training)
{
    static const char *const names[] = {"acromion", "sdpa"};
    const json_t *loss = json_object_get(training, "loss");
    const size_t steps = json_array_size(json_object_get(loss, names[0]));
    report_text script = {NULL, 0, 0, false}, description = {NULL, 0, 0, false};
    char title[320];
    double most = 0, last[2] = {0, 0};
    snprintf(title, sizeof title, "Loss of %zu training steps on %s, PyTorch %s", steps,
             record_text(training, "device"), record_text(training, "torch"));
    begin_script(&script, 480, 340);
    text_add(&script, "set xlabel \"step\"\nset ylabel \"loss\"\nset key top right\n$loss << END\n");
    for (size_t i = 0; i < steps; ++i) {
        for (int k = 0; k < 2; ++k) {
            last[k] = json_number_value(json_array_get(json_object_get(loss, names[k]), i));
        }
        most = fmax(most, fabs(last[0] - last[1]));
        text_add(&script, "%zu %g %g\n", i, last[0], last[1]);
    }
    text_add(&script, "END\nplot $loss using 1:3 with lines lw 5 lc rgb \"#020000\" title \"PyTorch's attention\", "
                      "'' using 1:2 with lines lw 2 lc rgb \"#010000\" title \"acromion.sdpa\"\n");
    text_add(&description,
             "The same model from the same weights on the same tokens: %.4f with acromion.sdpa, %.4f with PyTorch's "
             "attention in the last step; the largest difference of a step is %.4f.",
             last[0], last[1], most);
    return draw_once(w, &script, title, &description);
}

acr_status charts_training(chart_writer *w, const report_data *data)
{
    return draw_each(w, data->trainings, data->training_count, draw_training);
}
