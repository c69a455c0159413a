/* JSON documents: to stdout, and into results files. */
#ifndef WORKBENCH_JSON_H
#define WORKBENCH_JSON_H

#include <jansson.h>

#include "acromion.h"

/* Prints a document to stdout, indented, and drops it. */
void json_print(json_t *document);

/* A number, or null when it is not finite: JSON has neither infinity nor NaN. */
json_t *json_number_or_null(double value);

/* Makes every string of a document fit to be printed to a terminal: control characters other than newline and tab, of
 * which escape sequences are made, become \\x1b and the like. JSON output needs none of this. */
void json_make_printable(json_t *document);

/* For before the work whose records json_append will add: can they be? Errors: as json_append. */
acr_status json_can_append(const char *path);

/* Adds the records (an array) to the array that the file holds, or makes the file; all or nothing. records stays the
 * caller's. Errors: ACR_IO; ACR_FORMAT when the file exists and is no JSON array; ACR_NO_MEMORY. */
acr_status json_append(const char *path, json_t *records);

#endif
