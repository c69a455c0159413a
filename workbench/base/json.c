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
