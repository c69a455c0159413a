/* Where tensors lie in memory: see extent.h. */
#include "extent.h"

#include "problem.h"

bool acr__is_aligned(const void *pointer, size_t alignment)
{
    return ((uintptr_t)pointer & (alignment - 1)) == 0;
}

acr__extent acr__extent_of(const char *name, const void *pointer, int64_t batch, int64_t heads, int64_t rows,
                           int64_t dim, const acr_strides *strides, acr_dtype dtype)
{
    const int64_t size = acr__dtype_bytes(dtype);
    return (acr__extent){.name = name,
                         .first = (uintptr_t)pointer,
                         .bytes = pointer ? acr__span_bytes(batch, heads, rows, dim, strides, dtype) : 0,
                         .dim_bytes = dim * size,
                         .batch = batch,
                         .heads = heads,
                         .rows = rows,
                         .batch_bytes = batch > 1 ? strides->batch * size : 0,
                         .head_bytes = heads > 1 ? strides->head * size : 0,
                         .row_bytes = rows > 1 ? strides->row * size : 0};
}

acr__extent acr__extent_of_block(const char *name, const void *pointer, int64_t bytes)
{
    return (acr__extent){.name = name, .first = (uintptr_t)pointer, .bytes = pointer ? bytes : 0};
}

/* Bytes from the start of each step that the tensor can touch, or the whole step when that is not simple to say. */
static int64_t bytes_per_step(const acr__extent *e, int64_t step)
{
    const int64_t steps[] = {e->batch_bytes, e->head_bytes, e->row_bytes}, counts[] = {e->batch, e->heads, e->rows};
    int64_t used = e->dim_bytes;
    for (int i = 0; i < 3 && used < step; i++)
        if (counts[i] > 1 && steps[i] % step != 0) {
            if (steps[i] > step || counts[i] - 1 > (step - used) / steps[i])
                return step;
            used += (counts[i] - 1) * steps[i];
        }
    return used < step ? used : step;
}

/* Whether b's parts of each step lie behind a's. */
static bool are_interleaved_by(const acr__extent *a, const acr__extent *b, int64_t step)
{
    const int64_t offset = (int64_t)((b->first - a->first) % (uintptr_t)step);
    return offset >= bytes_per_step(a, step) && offset + bytes_per_step(b, step) <= step;
}

static bool are_interleaved(const acr__extent *a, const acr__extent *b)
{
    const int64_t steps[] = {a->row_bytes, a->head_bytes, a->batch_bytes};
    for (int i = 0; i < 3; i++)
        if (steps[i] > 0 && are_interleaved_by(a, b, steps[i]))
            return true;
    return false;
}

bool acr__overlap(const acr__extent *a, const acr__extent *b)
{
    if (a->bytes == 0 || b->bytes == 0 || a->first + (uintptr_t)a->bytes <= b->first ||
        b->first + (uintptr_t)b->bytes <= a->first)
        return false;
    return a->first <= b->first ? !are_interleaved(a, b) : !are_interleaved(b, a);
}
