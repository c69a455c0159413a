/* What every entry point needs: the thread's last error, and structures of other versions of the header. */
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

/* Copies a caller's structure, which begins with its size, whatever version of the header the caller was compiled
 * against: `earlier` lists the sizes of earlier versions, newest first, whose missing fields read as zero; a larger
 * structure is accepted where what this version does not know is zero. `what` and `init` name the structure and its
 * macro. Errors: ACR_INVALID. *out may be *in only where the sizes agree. */
acr_status acr__read_struct(void *out, size_t bytes, const void *in, uint32_t in_bytes, const size_t *earlier,
                            size_t earlier_count, const char *what, const char *init);

#endif
