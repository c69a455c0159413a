/* The thread's last error: a status and the sentence that explains it. */
#ifndef ACR_ERROR_H
#define ACR_ERROR_H

#include "acromion.h"

#if defined __GNUC__
#define ACR__PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define ACR__PRINTF(text, first)
#endif

/* Stores the detail for acr_last_error() and returns the status, so that a failure is one line: return
 * acr__fail(ACR_INVALID, ...). */
acr_status acr__fail(acr_status status, const char *format, ...) ACR__PRINTF(2, 3);

#endif
