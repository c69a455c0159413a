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

static int64_t saturating_mul(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

static acr_strides packed_strides(const acr__op_tensor *t, acr_layout layout)
{
    const int64_t heads = saturating_mul(t->heads, t->dim), rows = saturating_mul(t->rows, t->dim);
    return (acr_strides){.batch = saturating_mul(t->heads, rows),
                         .head = layout == ACR_BSHD ? t->dim : rows,
                         .row = layout == ACR_BSHD ? heads : t->dim};
}

/* Whether no two rows share an element: from the smallest step up, each is at least as long as all inside it. Spans are
 * within SPAN_MAX: nothing overflows. */
static int is_self_disjoint(const acr__op_tensor *t)
{
    const acr_strides *s = t->strides;
    struct {
        int64_t step, count;
    } axes[] = {{s->row, t->rows}, {s->head, t->heads}, {s->batch, t->batch}};
    int64_t inner = t->dim;
    for (int done = 0; done < 3; done++) {
        int next = done;
        for (int i = done + 1; i < 3; i++)
            if (axes[next].count == 1 || (axes[i].count > 1 && axes[i].step < axes[next].step))
                next = i;
        const int64_t step = axes[next].step, count = axes[next].count;
        axes[next] = axes[done];
        if (count > 1 && step < inner)
            return 0;
        if (count > 1)
            inner += step * (count - 1);
    }
    return 1;
}

static acr_status fail_strides(const acr__op_tensor *t, const char *what)
{
    return acr__fail(ACR_INVALID, "args.%s_stride (%lld, %lld, %lld): %s", t->name, (long long)t->strides->batch,
                     (long long)t->strides->head, (long long)t->strides->row, what);
}

acr_status acr__op_read_strides(const acr__op_tensor *t, acr_layout layout)
{
    acr_strides *s = t->strides;
    if (s->batch == 0 && s->head == 0 && s->row == 0)
        *s = packed_strides(t, layout);
    if ((t->batch > 1 && s->batch < 0) || (t->heads > 1 && s->head < 0) || (t->rows > 1 && s->row < 0))
        return fail_strides(t, "a stride must not be negative");
    if (acr__span_bytes(t->batch, t->heads, t->rows, t->dim, s, t->dtype) > SPAN_MAX)
        return fail_strides(t, "the tensor spans more than 2^61 bytes");
    if (t->is_output && !is_self_disjoint(t))
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
