/* Where tensors lie in memory: alignment, and whether two overlap. Shared by the entry points. */
#ifndef ACR_EXTENT_H
#define ACR_EXTENT_H

#include <stdbool.h>

#include "acromion.h"

/* A tensor in memory: where it begins, how far it reaches, and its steps. A step of 0 is not taken; without steps it is
 * a plain block. */
typedef struct acr__extent {
    const char *name;
    uintptr_t first;
    int64_t bytes;     /* from the first to one past the last; 0 = nothing */
    int64_t dim_bytes; /* of a row */
    int64_t batch, heads, rows;
    int64_t batch_bytes, head_bytes, row_bytes; /* from one to the next */
} acr__extent;

/* A tensor whose strides are canonical. */
acr__extent acr__extent_of(const char *name, const void *pointer, int64_t batch, int64_t heads, int64_t rows,
                           int64_t dim, const acr_strides *strides, acr_dtype dtype);

/* A block without steps; NULL is nothing. */
acr__extent acr__extent_of_block(const char *name, const void *pointer, int64_t bytes);

/* Whether two share a byte. Tensors that are interleaved, as in one [batch, length, q k v o, head, dim] buffer or in
 * pages [pages, k v, page, head, dim], share their span but not a byte. Where that is not simple to say, the
 * answer is that they overlap. */
bool acr__overlap(const acr__extent *a, const acr__extent *b);

/* alignment: a power of two. */
bool acr__is_aligned(const void *pointer, size_t alignment);

#endif
