/* What a run has found, said plainly: counts, cells, the curve of the best so far beside the control's, what was
 * confirmed, what looks wrong. A function of the store alone. */
#ifndef SEARCH_SUMMARY_H
#define SEARCH_SUMMARY_H

#include <jansson.h>
#include <stdio.h>

#include "definition.h"
#include "store.h"

/* As JSON; the caller decrefs. Errors: those of the store; ACR_NO_MEMORY. */
acr_status summary_json(json_t **out, store *s, const definition *d, const char *path);

/* The same of a file. Errors: those of store_open, too. */
acr_status summary_of_file(json_t **out, const char *path);

/* The same as text. */
acr_status summary_print(FILE *out, store *s, const definition *d, const char *path);

#endif
