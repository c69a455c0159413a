/* What an execution reads and writes, described once: the fields of acr_buffers, and the tensors behind some of them.
 * Whoever allocates, checks, copies or hands on the buffers of a problem walks acr__buffer_fields. */
#ifndef ACR_CORE_BUFFERS_H
#define ACR_CORE_BUFFERS_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "acromion.h"

/* What a forward pass reads, then what it writes, then what a backward pass has besides: o and lse are inputs of that
 * one. Buffers of terms are those that a problem may want beyond a scale, a mask and a window. */
typedef enum acr__buffer {
    ACR__Q,
    ACR__K,
    ACR__V,
    ACR__KV_LENS,
    ACR__Q_OFFSETS,
    ACR__KV_OFFSETS,
    ACR__PAGE_TABLE,
    ACR__Q_SCALES,
    ACR__K_SCALES,
    ACR__V_SCALES,
    ACR__KV_STARTS,
    ACR__SINKS,
    ACR__SLOPES,
    ACR__BIAS,
    ACR__RANGES,
    ACR__TREE,
    ACR__O,
    ACR__LSE,
    ACR__D_O,
    ACR__DQ,
    ACR__DK,
    ACR__DV,
    ACR__DSINKS,
    ACR__BUFFERS,
    ACR__TERMS = ACR__KV_STARTS,
    ACR__TERMS_END = ACR__TREE + 1,
    ACR__FORWARD_INPUTS = ACR__O, /* how many, as the next */
    ACR__FORWARD_BUFFERS = ACR__D_O
} acr__buffer;

/* A field of acr_buffers. */
typedef struct acr__buffer_field {
    const char *name;
    const char *wanted_by;      /* the flag or field of the problem that wants it; NULL: every problem, or none */
    uint32_t flag;              /* the same where it is a flag, else 0 */
    size_t in_buffers, in_args; /* offsets of the pointer in acr_buffers and in acr__args */
} acr__buffer_field;
extern const acr__buffer_field acr__buffer_fields[ACR__BUFFERS];

/* The pointer at an offset of a structure, whatever it points to. */
static inline const void *acr__pointer_at(const void *structure, size_t offset)
{
    const void *pointer;
    memcpy(&pointer, (const char *)structure + offset, sizeof pointer);
    return pointer;
}
void acr__set_pointer_at(void *structure, size_t offset, const void *pointer);

/* q: rows of q and o; kv: rows of k and v. Each is the longest length, or in a packed batch the tensor's total. A paged
 * cache has, instead of kv, its pages and the step in the table from one batch entry's pages to the next one's. */
typedef struct acr__rows {
    int64_t q, kv, pages, table_stride;
} acr__rows;
acr__rows acr__rows_of(const acr_problem *problem, const acr_buffers *buffers);

/* A tensor of a problem that has so many rows. Its batch is 1 in a packed batch, and the number of pages for k and v in
 * pages. */
typedef struct acr__tensor {
    const char *name;
    int64_t batch, heads, rows, dim;
    acr_strides strides;
    acr_dtype dtype;
    bool is_output;
} acr__tensor;
acr__tensor acr__tensor_of(const acr_problem *problem, acr__buffer which, acr__rows rows);
acr_strides *acr__strides_of(acr_problem *problem, acr__buffer which);

/* Which buffers are tensors: q, k, v, o, and of a backward pass their gradients. */
enum {
    ACR__TENSORS_MOST = 8
};
extern const acr__buffer acr__tensors[ACR__TENSORS_MOST];
int acr__tensor_count(const acr_problem *problem);
bool acr__is_tensor(acr__buffer which);

bool acr__is_output(const acr_problem *problem, acr__buffer which);

/* Bytes from a tensor's first element to one past its last. */
int64_t acr__tensor_bytes(const acr__tensor *tensor);
int64_t acr__span_bytes(int64_t batch, int64_t heads, int64_t rows, int64_t dim, const acr_strides *strides,
                        acr_dtype dtype);

/* The strides of a tensor without gaps; INT64_MAX where a stride is too large for int64_t. */
acr_strides acr__packed_strides(const acr__tensor *tensor, acr_layout layout);

/* Whether no two elements share an address. Strides are not negative where an extent is above 1. */
bool acr__is_self_disjoint(const acr__tensor *tensor);

/* Whether an execution of the problem must bring a buffer. It need never bring scales, which e4m3 inputs may have, nor
 * v where values are inside keys. */
bool acr__buffer_is_wanted(const acr_problem *problem, acr__buffer which);

/* Bytes of a buffer that an execution of a canonical problem must bring, or, being scales, may bring; else 0. */
int64_t acr__buffer_bytes(const acr_problem *problem, acr__buffer which, acr__rows rows);

/* What a buffer's address has to be a multiple of. */
size_t acr__buffer_alignment(const acr_problem *problem, acr__buffer which);

#endif
