#include "error.h"

#include <stdarg.h>
#include <stdio.h>

#include <acromion_nccl.h>

static _Thread_local char last_error[1024];

acr_status dist_fail(acr_status status, const char *format, ...)
{
    char text[sizeof last_error]; /* the arguments may be the last error */
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(last_error, sizeof last_error, "%s", text);
    return status;
}

acr_status dist_pass(acr_status status)
{
    return status == ACR_OK ? ACR_OK : dist_fail(status, "%s", acr_last_error());
}

const char *acr_group_last_error(void)
{
    return last_error;
}
