/* The fake cuBLAS: see fake_cublas.h. */
#include "fake_cublas.h"

#include <stdint.h>

#include "internal.h"

#define EXPORT __attribute__((visibility("default")))

enum { /* cuBLAS's own numbers */
    SUCCESS = 0,
    EXECUTION_FAILED = 13,
    TRANSPOSED = 1,
    R32F = 0,
    R16F = 2
};

static fake_cublas_state state;

EXPORT fake_cublas_state *fake_cublas(void)
{
    return &state;
}

EXPORT int cublasCreate_v2(void **handle);
EXPORT int cublasDestroy_v2(void *handle);
EXPORT int cublasGetVersion_v2(void *handle, int *version);
EXPORT int cublasSetStream_v2(void *handle, void *stream);
EXPORT int cublasSetWorkspace_v2(void *handle, void *memory, size_t bytes);
EXPORT int cublasGemmStridedBatchedEx(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha,
                                      const void *a, int a_type, int a_rows, long long a_step, const void *b,
                                      int b_type, int b_rows, long long b_step, const void *beta, void *c, int c_type,
                                      int c_rows, long long c_step, int count, int compute_type, int algorithm);

int cublasCreate_v2(void **handle)
{
    state.handles++;
    *handle = &state;
    return SUCCESS;
}

int cublasDestroy_v2(void *handle)
{
    (void)handle;
    state.handles--;
    return SUCCESS;
}

int cublasGetVersion_v2(void *handle, int *version)
{
    (void)handle;
    *version = 130100;
    return SUCCESS;
}

int cublasSetStream_v2(void *handle, void *stream)
{
    (void)handle;
    state.stream = stream;
    state.workspace_bytes = 0;
    return SUCCESS;
}

int cublasSetWorkspace_v2(void *handle, void *memory, size_t bytes)
{
    (void)handle;
    state.workspace_bytes = memory ? bytes : 0;
    return SUCCESS;
}

static acr_dtype dtype_of(int type)
{
    return type == R32F ? ACR_F32 : type == R16F ? ACR_F16 : ACR_BF16;
}

/* Element (row, column) of a matrix stored by columns. */
static double element(const void *base, int type, int rows, int transposed, int64_t first, int row, int column)
{
    const int64_t index = transposed ? (int64_t)row * rows + column : (int64_t)column * rows + row;
    return acr__load_element(dtype_of(type), base, first + index);
}

int cublasGemmStridedBatchedEx(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a,
                               int a_type, int a_rows, long long a_step, const void *b, int b_type, int b_rows,
                               long long b_step, const void *beta, void *c, int c_type, int c_rows, long long c_step,
                               int count, int compute_type, int algorithm)
{
    (void)handle, (void)beta, (void)compute_type, (void)algorithm;
    state.products++;
    state.without_workspace += state.workspace_bytes == 0;
    if (state.fail_products)
        return EXECUTION_FAILED;
    for (int i = 0; i < count; i++)
        for (int row = 0; row < m; row++)
            for (int column = 0; column < n; column++) {
                double sum = 0;
                for (int inner = 0; inner < k; inner++)
                    sum += element(a, a_type, a_rows, op_a == TRANSPOSED, i * a_step, row, inner) *
                           element(b, b_type, b_rows, op_b == TRANSPOSED, i * b_step, inner, column);
                acr__store_element(dtype_of(c_type), c, i * c_step + (int64_t)column * c_rows + row,
                                   (double)*(const float *)alpha * sum);
            }
    return SUCCESS;
}
