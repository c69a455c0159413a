/* Text that grows: what the report is put together from. */
#ifndef WORKBENCH_REPORT_TEXT_H
#define WORKBENCH_REPORT_TEXT_H

#include <stdbool.h>
#include <stddef.h>

/* Starts as {0}. After a failed allocation `failed` stays set and nothing more is added: look once, at the end. */
typedef struct report_text {
    char *text; /* NUL-terminated, NULL while empty */
    size_t size, capacity;
    bool failed;
} report_text;

void text_add(report_text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
void text_add_bytes(report_text *t, const char *bytes, size_t size);
/* With & < > " as entities, so that it may stand in HTML, inside quotes too. */
void text_add_escaped(report_text *t, const char *plain);
void text_free(report_text *t);

#endif
