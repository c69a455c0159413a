/* The report's page: one HTML document without any other file. */
#ifndef WORKBENCH_REPORT_PAGE_H
#define WORKBENCH_REPORT_PAGE_H

#include "report_data.h"
#include "report_text.h"

/* *charts becomes how many it holds. Errors: those of the charts; ACR_NO_MEMORY. */
acr_status page_make(report_text *page, const report_data *data, int *charts);

#endif
