/* The report's charts: gnuplot draws them, as SVG that stands in the page. Colours are the page's CSS variables. */
#ifndef WORKBENCH_REPORT_CHARTS_H
#define WORKBENCH_REPORT_CHARTS_H

#include "report_data.h"
#include "report_text.h"

/* Draws into a page, and counts. */
typedef struct chart_writer {
    char gnuplot[4096]; /* its path */
    report_text *page;
    int charts;
} chart_writer;

/* Finds gnuplot. Errors: ACR_UNSUPPORTED, naming the package. */
acr_status charts_open(chart_writer *out, report_text *page);

/* Each adds its figures to the page, one sentence when there is nothing to draw. Errors: ACR_IO when gnuplot fails;
 * ACR_NO_MEMORY. */
acr_status charts_headline(chart_writer *w, const report_data *data);
acr_status charts_latency(chart_writer *w, const report_data *data);
acr_status charts_roofline(chart_writer *w, const report_data *data);
acr_status charts_ladder(chart_writer *w, const report_data *data);
acr_status charts_trials(chart_writer *w, const report_data *data);
acr_status charts_searches(chart_writer *w, const report_data *data);
acr_status charts_training(chart_writer *w, const report_data *data);

/* gnuplot's SVG as a part of a page: without its XML head, with a title and a description for those who do not see it,
 * names that are the chart's own, and colours rgb(1,0,0), rgb(2,0,0), ... as var(--s1), var(--s2), ... and black as the
 * text's. */
void chart_inline(report_text *out, const char *svg, int number, const char *title, const char *description);

#endif
