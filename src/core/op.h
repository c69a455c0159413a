/* The operations beside attention, acr_merge and acr_append: what a backend is asked to do, and what their entry points
 * check alike. */
#ifndef ACR_OP_H
#define ACR_OP_H

#include "backend.h"
#include "extent.h"
#include "op_args.h"

typedef enum acr__op {
    ACR__OP_MERGE = 0,
    ACR__OP_APPEND = 1
} acr__op;

/* One call, checked. Nothing of it is kept. */
typedef struct acr__op_call {
    acr__op op;
    acr_dtype dtype;           /* of what is read */
    const merge_args *merge;   /* ACR__OP_MERGE */
    const merge_part *parts;   /* ACR__OP_MERGE: merge->count of them */
    const append_args *append; /* ACR__OP_APPEND */
    uint32_t flags;            /* 0 or ACR_OVERLAP_PREVIOUS */
} acr__op_call;

/* A field that counts something: least to 2^31 - 1. */
acr_status acr__op_check_extent(const char *field, int64_t value, int64_t least);

/* A product of extents that has to fit 32 bits; a is within 2^62. */
acr_status acr__op_check_product(const char *fields, int64_t a, int64_t b);

/* dtype and its like: 0 becomes `otherwise`, if that is a type; ACR_E4M3 only where it may be. */
acr_status acr__op_read_dtype(acr_dtype *dtype, const char *field, acr_dtype otherwise, int e4m3_too);

/* 0 becomes 16; a power of two from `least` to 256. */
acr_status acr__op_read_alignment(uint32_t *alignment, int least);

/* A tensor of the arguments. */
typedef struct acr__op_tensor {
    const char *name;
    const void *pointer;
    int64_t batch, heads, rows, dim;
    acr_strides *strides;
    acr_dtype dtype;
    int is_output;
} acr__op_tensor;

/* Fills in packed strides where all are zero, and checks the rest: not negative, within 2^61 bytes, and an output does
 * not overlap itself. */
acr_status acr__op_read_strides(const acr__op_tensor *tensor, acr_layout layout);

/* The pointer is a multiple of the alignment, in bytes. */
acr_status acr__op_check_alignment(const char *name, const void *pointer, uint32_t alignment);

acr__extent acr__op_extent(const acr__op_tensor *tensor);

/* Whether rows begin at multiples of `elements`; dim does, too. */
int acr__op_is_wide(const acr__op_tensor *tensor, int64_t elements);

fwd_strides acr__op_strides(const acr_strides *strides);

#endif
