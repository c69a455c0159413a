/* The thread's last error, and the texts of the status codes. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[768];

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
