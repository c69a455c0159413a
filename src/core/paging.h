/* Caches: pages of keys and values (ACR_PAGED), keys and values of another type than the queries (kv_dtype), and values
 * that are a part of the keys (ACR_V_IN_K). What a problem may say of them, what an execution has to bring, and which
 * kernels serve them. */
#ifndef ACR_PAGING_H
#define ACR_PAGING_H

#include "kernel.h"

/* The type of k and v. */
acr_dtype acr__kv_dtype(const acr_problem *problem);

/* Pages that the longest keys of a batch entry take; 0 without ACR_PAGED. */
int64_t acr__pages_of_entry(const acr_problem *problem);

/* Bytes of the table of an execution, from its first number to one past the last. */
int64_t acr__table_bytes(const acr_problem *problem, int64_t table_stride);

/* Checks the fields of a problem whose extents and types are filled in, and gives them their canonical form: kv_dtype 0
 * where it is dtype, and with ACR_V_IN_K v's strides and scale those of k. Before strides are completed and scales are
 * checked. Errors: ACR_INVALID. */
acr_status acr__complete_cache(acr_problem *problem);

/* Whether the v, the scales and the table's extents that an execution brings are those of the (canonical) problem. */
acr_status acr__check_cache_buffers(const acr_problem *problem, const acr_buffers *buffers);

/* Why a kernel does not serve the (canonical) problem's cache or its ACR_INVARIANT; NULL when it does. A static
 * string. */
const char *acr__cache_why_not(const acr__kernel *kernel, const acr_problem *problem);

#endif
