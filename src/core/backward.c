/* The backward pass: the rules that gradients add to a problem and to an execution's buffers. */
#include "backward.h"

#include <stdbool.h>
#include <stddef.h>

#include "error.h"
#include "problem.h"

static bool is_given(const acr_strides *s)
{
    return s->batch != 0 || s->head != 0 || s->row != 0;
}

/* Of a forward problem. */
static acr_status refuse_gradients(const acr_problem *p)
{
    const struct {
        const char *name;
        bool given;
    } fields[] = {{"grad_dtype", p->grad_dtype != ACR_DTYPE_DEFAULT},
                  {"d_o strides", is_given(&p->d_o)},
                  {"dq strides", is_given(&p->dq)},
                  {"dk strides", is_given(&p->dk)},
                  {"dv strides", is_given(&p->dv)},
                  {"flags: ACR_FAST_ATOMICS", (p->flags & ACR_FAST_ATOMICS) != 0}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].given)
            return acr__fail(ACR_INVALID, "%s: given, but pass is ACR_FORWARD; only ACR_BACKWARD has it",
                             fields[i].name);
    return ACR_OK;
}

/* What gradients are not defined for, or not served with by anything. */
static acr_status refuse_combinations(const acr_problem *p)
{
    const struct {
        const char *name;
        bool given;
    } fields[] = {{"dtype e4m3", p->dtype == ACR_E4M3},
                  {"kv_dtype", p->kv_dtype != ACR_DTYPE_DEFAULT},
                  {"ACR_PAGED", (p->flags & ACR_PAGED) != 0 || p->page != 0},
                  {"ACR_V_IN_K", (p->flags & ACR_V_IN_K) != 0},
                  {"ACR_INVARIANT", (p->flags & ACR_INVARIANT) != 0}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].given)
            return acr__fail(ACR_INVALID, "pass is ACR_BACKWARD with %s: it has no gradients", fields[i].name);
    return ACR_OK;
}

acr_status acr__complete_backward(acr_problem *p)
{
    if (p->pass != ACR_BACKWARD)
        return refuse_gradients(p);
    const acr_status status = refuse_combinations(p);
    if (status != ACR_OK)
        return status;
    if (p->out_dtype != p->dtype)
        return acr__fail(ACR_INVALID, "out_dtype is %d (%s), with ACR_BACKWARD it must be the type of the inputs",
                         (int)p->out_dtype, acr__dtype_text(p->out_dtype));
    if (p->grad_dtype == ACR_DTYPE_DEFAULT)
        p->grad_dtype = p->dtype;
    if (p->grad_dtype != p->dtype && p->grad_dtype != ACR_F32)
        return acr__fail(ACR_INVALID, "grad_dtype is %d (%s), must be 0, ACR_F32 or the type of the inputs",
                         (int)p->grad_dtype, acr__dtype_text(p->grad_dtype));
    if (p->alignment < (uint32_t)acr__dtype_bytes(p->grad_dtype))
        return acr__fail(ACR_INVALID, "alignment is %u, must be at least an element of the gradients (%d bytes)",
                         p->alignment, acr__dtype_bytes(p->grad_dtype));
    p->flags |= ACR_WANT_LSE; /* gradients are computed from it */
    return ACR_OK;
}
