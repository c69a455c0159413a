/* The thread's last error of libacromion_nccl, which sees of libacromion only its public header. */
#ifndef ACR_DIST_ERROR_H
#define ACR_DIST_ERROR_H

#include <acromion.h>

#if defined __GNUC__
#define DIST_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define DIST_PRINTF(text, first)
#endif

/* Stores the detail for acr_group_last_error() and returns the status. */
acr_status dist_fail(acr_status status, const char *format, ...) DIST_PRINTF(2, 3);

/* The same of a call of acromion.h, with its detail. ACR_OK stays ACR_OK. */
acr_status dist_pass(acr_status status);

#endif
