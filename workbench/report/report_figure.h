/* The one figure of the README: how many times as fast as the best of PyTorch, for a problem of each kind. An SVG file
 * of its own, which follows the reader's light or dark scheme and needs nothing else. */
#ifndef WORKBENCH_REPORT_FIGURE_H
#define WORKBENCH_REPORT_FIGURE_H

#include "report_data.h"
#include "report_text.h"

void figure_headline(report_text *out, const report_data *data);

#endif
