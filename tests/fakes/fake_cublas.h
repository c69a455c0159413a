/* A fake cuBLAS for tests: computes its products on host memory, which the fake driver's device memory is, and
 * remembers how it was called. Loaded by dlopen under the name that ACROMION_CUBLAS gives. */
#ifndef FAKE_CUBLAS_H
#define FAKE_CUBLAS_H

#include <stddef.h>

typedef struct fake_cublas_state {
    int handles;            /* alive */
    long products;          /* so far */
    void *stream;           /* set last */
    size_t workspace_bytes; /* since the last change of stream; 0 = none given, which a capture would not survive */
    long without_workspace; /* products */
    int fail_products;      /* a test sets it: products return an error */
} fake_cublas_state;

/* Shared with the tests, which find it by dlsym. */
fake_cublas_state *fake_cublas(void);

#endif
