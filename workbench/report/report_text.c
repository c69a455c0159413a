/* Growing text, see report_text.h. */
#include "report_text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Room for so many more bytes and the end. */
static bool reserve(report_text *t, size_t more)
{
    enum {
        FIRST_BYTES = 4096
    };
    if (t->failed || t->size + more + 1 <= t->capacity) {
        return !t->failed;
    }
    size_t capacity = t->capacity ? t->capacity : FIRST_BYTES;
    while (capacity < t->size + more + 1) {
        capacity *= 2;
    }
    char *text = realloc(t->text, capacity);
    t->failed = !text;
    if (text) {
        t->text = text;
        t->capacity = capacity;
    }
    return !t->failed;
}

void text_add_bytes(report_text *t, const char *bytes, size_t size)
{
    if (reserve(t, size)) {
        memcpy(t->text + t->size, bytes, size);
        t->size += size;
        t->text[t->size] = '\0';
    }
}

void text_add(report_text *t, const char *format, ...)
{
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    if (length >= 0 && reserve(t, (size_t)length)) {
        vsnprintf(t->text + t->size, (size_t)length + 1, format, again);
        t->size += (size_t)length;
    }
    va_end(again);
    va_end(arguments);
}

void text_add_escaped(report_text *t, const char *plain)
{
    for (; *plain; ++plain) {
        const char *entity = *plain == '&'   ? "&amp;"
                             : *plain == '<' ? "&lt;"
                             : *plain == '>' ? "&gt;"
                             : *plain == '"' ? "&quot;"
                                             : NULL;
        text_add_bytes(t, entity ? entity : plain, entity ? strlen(entity) : 1);
    }
}

void text_free(report_text *t)
{
    free(t->text);
    *t = (report_text){.text = NULL};
}
