/* References in a sealed memory file: made once, then mapped read-only by every process that inherits its descriptor.
 * What a search judges all of its trials by depends on problems and seeds alone, and was most of a judgement's work.
 *
 * The file is sealed against writing, growing and shrinking before anybody sees it, so that no process can change what
 * the next one judges by. It must not reach a process that runs foreign CPU code: whoever has it can read what a kernel
 * should compute. Writer and reader are the same program. */
#ifndef WORKBENCH_REFERENCE_CACHE_H
#define WORKBENCH_REFERENCE_CACHE_H

#include <stddef.h>

#include "reference.h"

/* Makes the references of the requests and puts them into a new file, as many of the first as bytes_max holds. *fd is
 * closed on exec and for the caller to close. Errors: those of reference_create; ACR_IO for the file. */
acr_status reference_cache_make(int *fd, const reference_request *requests, size_t count, int64_t bytes_max);

/* Where in the file which reference is. */
typedef struct reference_cache reference_cache;

/* Reads the index of an inherited file. The descriptor stays the caller's and must outlive the reference_cache. Errors:
 * ACR_FORMAT for what is no such file or is not sealed; ACR_IO; ACR_NO_MEMORY. */
acr_status reference_cache_open(reference_cache **out, int fd);
void reference_cache_close(reference_cache *s);

/* The reference of a request, mapped; NULL when it is not there. The caller frees it with reference_destroy, before or
 * after reference_cache_close. Errors: ACR_IO, ACR_NO_MEMORY. */
acr_status reference_cache_take(reference **out, const reference_cache *s, const reference_request *wanted);

#endif
