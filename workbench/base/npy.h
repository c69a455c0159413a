/* Tensor files in NumPy's .npy format, versions 1 to 3: C order, little endian, rank 1 to 4.
 *
 * NumPy has no bfloat16 or fp8, so these travel as raw bytes: '<V2' is bfloat16 and '|V1' e4m3, which is what ml_dtypes
 * saves. */
#ifndef WORKBENCH_NPY_H
#define WORKBENCH_NPY_H

#include <stddef.h>
#include <stdint.h>

#include "acromion.h"

enum {
    NPY_RANK_MAX = 4
};

typedef enum npy_type {
    NPY_F32,  /* '<f4' */
    NPY_F16,  /* '<f2' */
    NPY_RAW2, /* '<V2', '|V2': bfloat16 */
    NPY_RAW1, /* '|V1', '|u1': e4m3 */
    NPY_BOOL, /* '|b1' */
    NPY_I32,  /* '<i4' */
    NPY_I64   /* '<i8' */
} npy_type;

typedef struct npy_array {
    npy_type type;
    int rank; /* 1..NPY_RANK_MAX */
    int64_t shape[NPY_RANK_MAX];
    int64_t elems;    /* product of shape; may be 0 */
    const void *data; /* elems elements inside the parsed bytes; any alignment */
    size_t data_bytes;
} npy_array;

/* Parses a whole file in memory. *out points into bytes. Never reads outside [bytes, bytes + size).
 * Errors: ACR_FORMAT, with what is wrong and the byte offset in acr_last_error(). */
acr_status npy_parse(const void *bytes, size_t size, npy_array *out);

/* Opens a file: maps it and parses it. Free with npy_close. Errors: ACR_IO, ACR_FORMAT. */
typedef struct npy_file {
    npy_array array;
    const void *bytes;
    size_t size;
} npy_file;
acr_status npy_open(const char *path, npy_file *out);
void npy_close(npy_file *file);

/* Bytes of an element, and the type's name as in the header. */
size_t npy_type_bytes(npy_type type);
const char *npy_type_text(npy_type type);
/* The type of the library that these elements are; ACR_DTYPE_DEFAULT for integers. */
acr_dtype npy_dtype(npy_type type);

/* Writes a tensor of `rank` dimensions to a file, all or nothing. Errors: ACR_IO, ACR_NO_MEMORY. */
acr_status npy_write(const char *path, npy_type type, int rank, const int64_t *shape, const void *data);

#endif
