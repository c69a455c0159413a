/* The thread's last error, the texts of the status codes, and structures of other versions of the header. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[1024];

acr_status acr__fail(acr_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

const char *acr_last_error(void)
{
    return last_error;
}

const char *acr_status_text(acr_status status)
{
    switch (status) {
#define STATUS_CASE(name, number, text)                                                                                \
    case ACR_##name:                                                                                                   \
        return text;
        ACR_STATUS_LIST(STATUS_CASE)
#undef STATUS_CASE
    }
    return "unknown status";
}

static acr_status wrong_size(uint32_t got, size_t bytes, const size_t *earlier, size_t earlier_count, const char *what,
                             const char *init)
{
    char sizes[128];
    int used = snprintf(sizes, sizeof sizes, "%zu", bytes);
    for (size_t i = 0; i < earlier_count && used < (int)sizeof sizes; i++)
        used += snprintf(sizes + used, sizeof sizes - (size_t)used, i + 1 < earlier_count ? ", %zu" : " or %zu",
                         earlier[i]);
    return acr__fail(ACR_INVALID, "%s.size is %u, must be %s: initialise with %s", what, got, sizes, init);
}

acr_status acr__read_struct(void *out, size_t bytes, const void *in, uint32_t in_bytes, const size_t *earlier,
                            size_t earlier_count, const char *what, const char *init)
{
    size_t version = 0;
    while (version < earlier_count && in_bytes != earlier[version])
        version++;
    if (in_bytes < bytes && version == earlier_count)
        return wrong_size(in_bytes, bytes, earlier, earlier_count, what, init);
    for (size_t i = bytes; i < in_bytes; i++)
        if (((const unsigned char *)in)[i] != 0)
            return acr__fail(ACR_INVALID, "%s.size is %u and sets fields that this library (%s) does not know", what,
                             in_bytes, acr_version());
    const size_t known = in_bytes < bytes ? in_bytes : bytes;
    memset((char *)out + known, 0, bytes - known);
    memcpy(out, in, known);
    return ACR_OK;
}
