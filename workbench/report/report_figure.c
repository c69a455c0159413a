/* The README's figure, see report_figure.h. Drawn here and not by gnuplot: the same bytes on every machine, so that a
 * check can compare them. */
#include "report_figure.h"

#include <math.h>

#include "report_tables.h"

/* Pixels. Bars begin at BARS_X, where the ratio is 0. */
enum {
    WIDTH = 800,
    TOP = 58,
    ROW = 44,
    BAR = 20,
    BARS_X = 225,
    BARS_WIDTH = 300
};

/* One row: what was computed on what, the bar with its interval, ratio and time. */
static void add_bar(report_text *out, const headline_row *h, int y, double scale)
{
    const double end = BARS_X + h->ratio * scale;
    text_add(out, "<text x=\"%d\" y=\"%d\" class=\"name\">%s</text>\n<text x=\"%d\" y=\"%d\" class=\"fine\">",
             BARS_X - 12, y + 8, h->kind, BARS_X - 12, y + 24);
    text_add_escaped(out, h->problem);
    text_add(out, "</text>\n<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" class=\"bar\"/>\n", BARS_X, y,
             end - BARS_X, BAR);
    text_add(out, "<path d=\"M%.1f %dH%.1f\" class=\"interval\"/>\n", BARS_X + h->ratio_low * scale, y + BAR / 2,
             BARS_X + h->ratio_high * scale);
    text_add(out, "<text x=\"%.1f\" y=\"%d\"><tspan class=\"ratio\">%.2f ×</tspan>  %.*f µs, PyTorch %.*f µs</text>\n",
             BARS_X + fmax(h->ratio_high, h->ratio) * scale + 8, y + 15, h->ratio,
             record_number(h->ours, "p50_us") < 100 ? 2 : 0, record_number(h->ours, "p50_us"),
             record_number(h->peer, "p50_us") < 100 ? 2 : 0, record_number(h->peer, "p50_us"));
}

void figure_headline(report_text *out, const report_data *data)
{
    headline_row rows[HEADLINE_ROWS];
    headline_make(rows, data);
    double longest = 1;
    int count = 0;
    for (int i = 0; i < HEADLINE_ROWS; ++i) {
        if (rows[i].peer) {
            longest = fmax(longest, fmax(rows[i].ratio, rows[i].ratio_high));
            ++count;
        }
    }
    const double scale = BARS_WIDTH / longest;
    const int bottom = TOP + ROW * count;
    text_add(out,
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\" aria-labelledby=\"t d\">\n"
             "<title id=\"t\">Times as fast as the best of PyTorch's attention</title>\n<desc id=\"d\">",
             WIDTH, bottom + 34);
    for (int i = 0; i < HEADLINE_ROWS; ++i) {
        if (rows[i].peer) {
            text_add(out, "%s: %.2f times. ", rows[i].kind, rows[i].ratio);
        }
    }
    text_add(out,
             "</desc>\n<style>\n"
             "text{font:13px system-ui,-apple-system,Segoe UI,sans-serif;fill:#1f2328}\n"
             ".title{font-size:16px;font-weight:600}.name{font-weight:600;text-anchor:end}.ratio{font-weight:600}\n"
             ".fine{font-size:11px;text-anchor:end;fill:#59636e}.note{font-size:11px;fill:#59636e}\n"
             ".bar{fill:#2f6fd0}.interval{stroke:#1f2328;stroke-width:2}.one{stroke:#59636e;stroke-dasharray:4 3}\n"
             "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.fine,.note{fill:#9198a1}.bar{fill:#5b9bff}"
             ".interval{stroke:#e6edf3}.one{stroke:#9198a1}}\n</style>\n");
    text_add(out, "<text x=\"16\" y=\"26\" class=\"title\">Times as fast as the best of PyTorch's attention</text>\n");
    for (int i = 0, y = TOP; i < HEADLINE_ROWS; ++i) {
        if (rows[i].peer) {
            add_bar(out, &rows[i], y, scale);
            y += ROW;
        }
    }
    text_add(out, "<path d=\"M%.1f %dV%d\" class=\"one\"/>\n", BARS_X + scale, TOP - 10, bottom - 8);
    text_add(
        out,
        "<text x=\"%.1f\" y=\"%d\" class=\"note\">1 = the fastest of PyTorch's backends in the same call; the mark "
        "on a bar's end is the 95 %% interval</text>\n</svg>\n",
        16.0, bottom + 14);
}
