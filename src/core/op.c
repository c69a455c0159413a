/* What the entry points of the operations beside attention check alike: see op.h. */
#include "op.h"

#include "error.h"
#include "problem.h"

static const int64_t SPAN_MAX = (int64_t)1 << 61; /* bytes */

acr_status acr__op_check_extent(const char *field, int64_t value, int64_t least)
{
    if (value < least || value > INT32_MAX)
        return acr__fail(ACR_INVALID, "args.%s is %lld, must be %lld to 2^31 - 1", field, (long long)value,
                         (long long)least);
    return ACR_OK;
}

acr_status acr__op_check_product(const char *fields, int64_t a, int64_t b)
{
    int64_t product;
    if (__builtin_mul_overflow(a, b, &product) || product > UINT32_MAX)
        return acr__fail(ACR_INVALID, "args.%s is %lld * %lld, must be below 2^32", fields, (long long)a, (long long)b);
    return ACR_OK;
}

acr_status acr__op_read_dtype(acr_dtype *dtype, const char *field, acr_dtype otherwise, int e4m3_too)
{
    if (*dtype == ACR_DTYPE_DEFAULT)
        *dtype = otherwise;
    if (*dtype == ACR_F32 || *dtype == ACR_F16 || *dtype == ACR_BF16 || (e4m3_too && *dtype == ACR_E4M3))
        return ACR_OK;
    return acr__fail(ACR_INVALID, "args.%s is %d, must be ACR_F32, ACR_F16%s", field, (int)*dtype,
                     e4m3_too ? ", ACR_BF16 or ACR_E4M3" : " or ACR_BF16");
}

acr_status acr__op_read_alignment(uint32_t *alignment, int least)
{
    enum {
        USUAL = 16,
        MOST = 256
    };
    if (*alignment == 0)
        *alignment = USUAL;
    if ((*alignment & (*alignment - 1)) != 0 || *alignment < (uint32_t)least || *alignment > MOST)
        return acr__fail(ACR_INVALID, "args.alignment is %u, must be a power of two from %d to %d", *alignment, least,
                         MOST);
    return ACR_OK;
}

static acr_status fail_strides(const acr__op_tensor *t, const char *what)
{
    return acr__fail(ACR_INVALID, "args.%s_stride (%lld, %lld, %lld): %s", t->name, (long long)t->strides->batch,
                     (long long)t->strides->head, (long long)t->strides->row, what);
}

acr_status acr__op_read_strides(const acr__op_tensor *t, acr_layout layout)
{
    acr_strides *s = t->strides;
    acr__tensor tensor = {t->name, t->batch, t->heads, t->rows, t->dim, *s, t->dtype, t->is_output};
    if (s->batch == 0 && s->head == 0 && s->row == 0)
        *s = tensor.strides = acr__packed_strides(&tensor, layout);
    if ((t->batch > 1 && s->batch < 0) || (t->heads > 1 && s->head < 0) || (t->rows > 1 && s->row < 0))
        return fail_strides(t, "a stride must not be negative");
    if (acr__tensor_bytes(&tensor) > SPAN_MAX)
        return fail_strides(t, "the tensor spans more than 2^61 bytes");
    if (t->is_output && !acr__is_self_disjoint(&tensor))
        return fail_strides(t, "the output would overlap itself");
    return ACR_OK;
}

acr_status acr__op_check_alignment(const char *name, const void *pointer, uint32_t alignment)
{
    if (!acr__is_aligned(pointer, alignment))
        return acr__fail(ACR_ALIGNMENT, "args.%s is %p, not a multiple of %u bytes", name, pointer, alignment);
    return ACR_OK;
}

acr__extent acr__op_extent(const acr__op_tensor *t)
{
    return acr__extent_of(t->name, t->pointer, t->batch, t->heads, t->rows, t->dim, t->strides, t->dtype);
}

int acr__op_is_wide(const acr__op_tensor *t, int64_t elements)
{
    const acr_strides *s = t->strides;
    return !t->pointer || (t->dim % elements == 0 && (t->batch == 1 || s->batch % elements == 0) &&
                           (t->heads == 1 || s->head % elements == 0) && (t->rows == 1 || s->row % elements == 0));
}

fwd_strides acr__op_strides(const acr_strides *s)
{
    return (fwd_strides){s->batch, s->head, s->row};
}
