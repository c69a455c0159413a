/* JSON documents, see json.h. */
#include "json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "files.h"
#include "internal.h"

static const size_t dump_flags = JSON_INDENT(2) | JSON_REAL_PRECISION(7) | JSON_ENSURE_ASCII;

void json_print(json_t *document)
{
    json_dumpf(document, stdout, dump_flags);
    putchar('\n');
    json_decref(document);
}

/* Bytes of a control character at `at`, 0 where there is none: C0, DEL, and C1 in UTF-8. */
static size_t control_bytes(const unsigned char *at)
{
    if (*at == '\n' || *at == '\t') {
        return 0;
    }
    if (*at < 0x20 || *at == 0x7f) {
        return 1;
    }
    return at[0] == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0 ? 2 : 0;
}

/* The text with its control characters written out, or NULL: nothing to change, or no memory. The caller frees it. */
static char *printable(const char *text)
{
    size_t controls = 0;
    for (const unsigned char *at = (const unsigned char *)text; *at; ++at) {
        controls += control_bytes(at) > 0;
    }
    char *out = controls > 0 ? malloc(strlen(text) + 4 * controls + 1) : NULL;
    char *to = out;
    for (const unsigned char *at = (const unsigned char *)text; out && *at;) {
        const size_t bytes = control_bytes(at);
        if (bytes > 0) {
            to += snprintf(to, 5, "\\x%02x", at[bytes - 1]);
            at += bytes;
        } else {
            *to++ = (char)*at++;
        }
    }
    if (out) {
        *to = '\0';
    }
    return out;
}

void json_make_printable(json_t *document)
{
    const char *key = NULL;
    json_t *value = NULL;
    size_t i = 0;
    if (json_is_string(document)) {
        char *text = printable(json_string_value(document));
        if (text) {
            json_string_set_nocheck(document, text);
            free(text);
        }
    } else if (json_is_array(document)) {
        json_array_foreach(document, i, value)
        {
            json_make_printable(value);
        }
    } else if (json_is_object(document)) {
        json_object_foreach(document, key, value)
        {
            json_make_printable(value);
        }
    }
}

json_t *json_number_or_null(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

/* What the file holds, or a new array when there is no regular file. NULL after setting *status. */
static json_t *load_array(const char *path, acr_status *status)
{
    struct stat info;
    if (stat(path, &info) != 0 ? errno == ENOENT : !S_ISREG(info.st_mode)) {
        return json_array();
    }
    json_error_t error;
    json_t *array = json_load_file(path, 0, &error);
    if (!array) {
        *status = acr__fail(ACR_FORMAT, "%s:%d: %s", path, error.line, error.text);
    } else if (!json_is_array(array)) {
        json_decref(array);
        array = NULL;
        *status = acr__fail(ACR_FORMAT, "%s: not a JSON array of results", path);
    }
    return array;
}

acr_status json_can_append(const char *path)
{
    acr_status status = ACR_OK;
    json_decref(load_array(path, &status));
    return status == ACR_OK ? file_can_write(path) : status;
}

acr_status json_append(const char *path, json_t *records)
{
    acr_status status = ACR_OK;
    json_t *array = load_array(path, &status);
    if (!array) {
        return status;
    }
    char *text = json_array_extend(array, records) == 0 ? json_dumps(array, dump_flags) : NULL;
    json_decref(array);
    if (!text) {
        return acr__fail(ACR_NO_MEMORY, "%s: no memory for the results", path);
    }
    const file_part parts[] = {{text, strlen(text)}, {"\n", 1}};
    status = file_write(path, parts, 2);
    free(text);
    return status;
}
