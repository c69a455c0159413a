/* Integers of files, see run_numbers.h. */
#include "run_numbers.h"

#include <stdlib.h>
#include <string.h>

bool run_holds_integers(const npy_array *a)
{
    return a->type == NPY_I32 || a->type == NPY_I64;
}

int64_t run_integer_at(const npy_array *a, int64_t index)
{
    int32_t narrow = 0;
    int64_t value = 0;
    if (a->type == NPY_I32) {
        memcpy(&narrow, (const char *)a->data + (size_t)index * sizeof narrow, sizeof narrow);
        return narrow;
    }
    memcpy(&value, (const char *)a->data + (size_t)index * sizeof value, sizeof value);
    return value;
}

acr_status run_upload(acr__backend_device *device, void **to, const void *from, size_t bytes)
{
    acr_status status = device->backend->mem_alloc(device, bytes, to);
    return status == ACR_OK ? device->backend->mem_upload(device, *to, from, bytes) : status;
}

acr_status run_upload_integers(acr__backend_device *device, void **to, const npy_array *a, int64_t most,
                               const char *option)
{
    int32_t *numbers = malloc((size_t)a->elems * sizeof *numbers);
    if (!numbers)
        return acr__fail(ACR_NO_MEMORY, "no memory for %s", option);
    acr_status status = ACR_OK;
    for (int64_t i = 0; i < a->elems && status == ACR_OK; i++) {
        const int64_t value = run_integer_at(a, i);
        if (value < 0 || value > most || value > INT32_MAX)
            status = acr__fail(ACR_INVALID, "%s[%lld] is %lld, allowed are 0 to %lld", option, (long long)i,
                               (long long)value, (long long)(most < INT32_MAX ? most : INT32_MAX));
        numbers[i] = (int32_t)value;
    }
    if (status == ACR_OK)
        status = run_upload(device, to, numbers, (size_t)a->elems * sizeof *numbers);
    free(numbers);
    return status;
}
