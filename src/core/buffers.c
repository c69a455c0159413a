/* Buffers of an execution, see buffers.h. */
#include "buffers.h"

#include <string.h>

#include "kernel.h"
#include "paging.h"
#include "problem.h"

#define OFFSETS(field) offsetof(acr_buffers, field), offsetof(acr__args, fwd.field)
#define BACKWARD_OFFSETS(field) offsetof(acr_buffers, field), offsetof(acr__args, bwd.field)

const acr__buffer_field acr__buffer_fields[ACR__BUFFERS] = {
    [ACR__Q] = {"q", NULL, 0, OFFSETS(q)},
    [ACR__K] = {"k", NULL, 0, OFFSETS(k)},
    [ACR__V] = {"v", NULL, 0, OFFSETS(v)},
    [ACR__KV_LENS] = {"kv_lens", "ACR_KV_LENS", ACR_KV_LENS, OFFSETS(kv_lens)},
    [ACR__Q_OFFSETS] = {"q_offsets", "ACR_PACKED", ACR_PACKED, OFFSETS(q_offsets)},
    [ACR__KV_OFFSETS] = {"kv_offsets", "ACR_PACKED", ACR_PACKED, OFFSETS(kv_offsets)},
    [ACR__PAGE_TABLE] = {"page_table", "ACR_PAGED", ACR_PAGED, offsetof(acr_buffers, page_table),
                         offsetof(acr__args, paged.paging.table)},
    [ACR__Q_SCALES] = {"q_scales", NULL, 0, OFFSETS(q_scales)},
    [ACR__K_SCALES] = {"k_scales", NULL, 0, OFFSETS(k_scales)},
    [ACR__V_SCALES] = {"v_scales", NULL, 0, OFFSETS(v_scales)},
    [ACR__KV_STARTS] = {"kv_starts", "ACR_KV_STARTS", ACR_KV_STARTS, OFFSETS(kv_starts)},
    [ACR__SINKS] = {"sinks", "ACR_SINKS", ACR_SINKS, OFFSETS(sinks)},
    [ACR__SLOPES] = {"slopes", "ACR_ALIBI", ACR_ALIBI, OFFSETS(slopes)},
    [ACR__BIAS] = {"bias", "bias_dtype", 0, OFFSETS(bias)},
    [ACR__RANGES] = {"ranges", "ACR_RANGES", ACR_RANGES, OFFSETS(ranges)},
    [ACR__TREE] = {"tree", "ACR_TREE", ACR_TREE, OFFSETS(tree)},
    [ACR__O] = {"o", NULL, 0, OFFSETS(o)},
    [ACR__LSE] = {"lse", "ACR_WANT_LSE", ACR_WANT_LSE, OFFSETS(lse)},
    [ACR__D_O] = {"d_o", "ACR_BACKWARD", 0, BACKWARD_OFFSETS(d_o)},
    [ACR__DQ] = {"dq", "ACR_BACKWARD", 0, BACKWARD_OFFSETS(dq)},
    [ACR__DK] = {"dk", "ACR_BACKWARD", 0, BACKWARD_OFFSETS(dk)},
    [ACR__DV] = {"dv", "ACR_BACKWARD", 0, BACKWARD_OFFSETS(dv)},
    [ACR__DSINKS] = {"dsinks", "ACR_BACKWARD", 0, BACKWARD_OFFSETS(dsinks)},
};

const acr__buffer acr__tensors[ACR__TENSORS_MOST] = {ACR__Q,   ACR__K,  ACR__V,  ACR__O,
                                                     ACR__D_O, ACR__DQ, ACR__DK, ACR__DV};

int acr__tensor_count(const acr_problem *p)
{
    return p->pass == ACR_BACKWARD ? ACR__TENSORS_MOST : 4;
}

bool acr__is_tensor(acr__buffer which)
{
    return which <= ACR__V || which == ACR__O || (which >= ACR__D_O && which <= ACR__DV);
}

bool acr__is_output(const acr_problem *p, acr__buffer which)
{
    return p->pass == ACR_BACKWARD ? which >= ACR__DQ : which == ACR__O || which == ACR__LSE;
}

void acr__set_pointer_at(void *structure, size_t offset, const void *pointer)
{
    memcpy((char *)structure + offset, &pointer, sizeof pointer);
}

acr__rows acr__rows_of(const acr_problem *p, const acr_buffers *b)
{
    const bool packed = p->flags & ACR_PACKED;
    return (acr__rows){packed ? b->q_total : p->q_len, packed ? b->kv_total : p->kv_len, b->pages, b->table_stride};
}

/* What a tensor is in the problem: whose extents it has (q, k, v or o), and where its strides are. */
typedef struct tensor_shape {
    acr__buffer like;
    size_t strides;
} tensor_shape;

static const tensor_shape shapes[ACR__BUFFERS] = {
    [ACR__Q] = {ACR__Q, offsetof(acr_problem, q)},     [ACR__K] = {ACR__K, offsetof(acr_problem, k)},
    [ACR__V] = {ACR__V, offsetof(acr_problem, v)},     [ACR__O] = {ACR__O, offsetof(acr_problem, o)},
    [ACR__D_O] = {ACR__O, offsetof(acr_problem, d_o)}, [ACR__DQ] = {ACR__Q, offsetof(acr_problem, dq)},
    [ACR__DK] = {ACR__K, offsetof(acr_problem, dk)},   [ACR__DV] = {ACR__V, offsetof(acr_problem, dv)},
};

acr_strides *acr__strides_of(acr_problem *p, acr__buffer which)
{
    return (acr_strides *)(void *)((char *)p + shapes[which].strides);
}

acr__tensor acr__tensor_of(const acr_problem *p, acr__buffer which, acr__rows rows)
{
    const tensor_shape shape = shapes[which];
    const bool of_queries = shape.like == ACR__Q || shape.like == ACR__O,
               of_scores = shape.like == ACR__Q || shape.like == ACR__K, is_gradient = which >= ACR__DQ,
               paged = p->flags & ACR_PAGED && !of_queries;
    acr__tensor t = {.name = acr__buffer_fields[which].name,
                     .batch = paged                   ? rows.pages
                              : p->flags & ACR_PACKED ? 1
                                                      : p->batch,
                     .heads = of_queries ? p->q_heads : p->kv_heads,
                     .rows = of_queries ? rows.q
                             : paged    ? p->page
                                        : rows.kv,
                     .dim = of_scores ? p->qk_dim : p->v_dim,
                     .dtype = is_gradient            ? p->grad_dtype
                              : shape.like == ACR__O ? p->out_dtype
                              : of_queries           ? p->dtype
                                                     : acr__kv_dtype(p),
                     .is_output = acr__is_output(p, which)};
    memcpy(&t.strides, (const char *)p + shape.strides, sizeof t.strides);
    return t;
}

/* ---- Where elements lie: strides and spans. Sums saturate: an overflow shows as a span beyond any limit. ---- */

static int64_t saturating_mul(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

static int64_t saturating_add(int64_t a, int64_t b)
{
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

acr_strides acr__packed_strides(const acr__tensor *t, acr_layout layout)
{
    acr_strides s;
    if (layout == ACR_BSHD) {
        s.head = t->dim;
        s.row = saturating_mul(t->heads, t->dim);
        s.batch = saturating_mul(t->rows, s.row);
    } else {
        s.row = t->dim;
        s.head = saturating_mul(t->rows, t->dim);
        s.batch = saturating_mul(t->heads, s.head);
    }
    return s;
}

static int64_t span_elems(const acr__tensor *t)
{
    int64_t last = saturating_mul(t->batch - 1, t->strides.batch);
    last = saturating_add(last, saturating_mul(t->heads - 1, t->strides.head));
    last = saturating_add(last, saturating_mul(t->rows - 1, t->strides.row));
    return saturating_add(last, t->dim);
}

int64_t acr__span_bytes(int64_t batch, int64_t heads, int64_t rows, int64_t dim, const acr_strides *strides,
                        acr_dtype dtype)
{
    const acr__tensor t = {"", batch, heads, rows, dim, *strides, dtype, false};
    return saturating_mul(span_elems(&t), acr__dtype_bytes(dtype));
}

/* Walking the dimensions from the smallest stride up, each step is at least as long as everything inside it. */
bool acr__is_self_disjoint(const acr__tensor *t)
{
    int64_t stride[3] = {t->strides.row, t->strides.head, t->strides.batch};
    int64_t extent[3] = {t->rows, t->heads, t->batch};
    int64_t inner = t->dim;
    for (int done = 0; done < 3; done++) {
        int next = -1;
        for (int i = 0; i < 3; i++)
            if (extent[i] > 1 && (next < 0 || stride[i] < stride[next]))
                next = i;
        if (next < 0)
            return true;
        if (stride[next] < inner)
            return false;
        inner = saturating_add(saturating_mul(stride[next], extent[next] - 1), inner);
        extent[next] = 1;
    }
    return true;
}

int64_t acr__tensor_bytes(const acr__tensor *t)
{
    return saturating_mul(span_elems(t), acr__dtype_bytes(t->dtype));
}

/* ---- Buffers ---- */

static bool is_scale(acr__buffer which)
{
    return which == ACR__Q_SCALES || which == ACR__K_SCALES || which == ACR__V_SCALES;
}

bool acr__buffer_is_wanted(const acr_problem *p, acr__buffer which)
{
    if (which == ACR__V)
        return !(p->flags & ACR_V_IN_K);
    if (which == ACR__KV_OFFSETS)
        return p->flags & ACR_PACKED && !(p->flags & ACR_PAGED);
    if (which == ACR__BIAS)
        return p->bias_dtype != ACR_DTYPE_DEFAULT;
    if (which >= ACR__D_O)
        return p->pass == ACR_BACKWARD && (which != ACR__DSINKS || p->flags & ACR_SINKS);
    const uint32_t flag = acr__buffer_fields[which].flag;
    return flag != 0 ? p->flags & flag : !is_scale(which);
}

/* Of one that is wanted, or may be brought. */
static int64_t bytes_of(const acr_problem *p, acr__buffer which, acr__rows rows)
{
    const int64_t number = 4, tree_row = (p->q_len + 7) / 8; /* number: int32 or float32 */
    const acr_strides tree = {p->q_len * tree_row, 0, tree_row};
    switch (which) {
    case ACR__LSE:
        return (p->flags & ACR_PACKED ? 1 : p->batch) * p->q_heads * rows.q * number;
    case ACR__KV_LENS:
    case ACR__KV_STARTS:
        return p->batch * number;
    case ACR__Q_OFFSETS:
    case ACR__KV_OFFSETS:
        return (p->batch + 1) * number;
    case ACR__PAGE_TABLE:
        return acr__table_bytes(p, rows.table_stride);
    case ACR__Q_SCALES:
    case ACR__K_SCALES:
    case ACR__V_SCALES:
        return p->batch * p->kv_heads * number;
    case ACR__SINKS:
    case ACR__DSINKS:
    case ACR__SLOPES:
        return p->q_heads * number;
    case ACR__BIAS:
        return acr__span_bytes(p->batch, p->q_heads, p->q_len, p->kv_len, &p->bias, p->bias_dtype);
    case ACR__RANGES:
        return p->batch * 2 * number * p->ranges;
    case ACR__TREE:
        return acr__span_bytes(p->batch, 1, p->q_len, tree_row, &tree, ACR_BOOL8);
    default: {
        const acr__tensor t = acr__tensor_of(p, which, rows);
        return acr__tensor_bytes(&t);
    }
    }
}

int64_t acr__buffer_bytes(const acr_problem *p, acr__buffer which, acr__rows rows)
{
    return is_scale(which) || acr__buffer_is_wanted(p, which) ? bytes_of(p, which, rows) : 0;
}

size_t acr__buffer_alignment(const acr_problem *p, acr__buffer which)
{
    switch (which) {
    case ACR__BIAS:
        return p->bias_dtype == ACR_DTYPE_DEFAULT ? 1 : (size_t)acr__dtype_bytes(p->bias_dtype);
    case ACR__TREE:
        return 1;
    case ACR__O: /* of float32 beside 16-bit inputs it may be wider than the problem's alignment */
        return p->alignment > (uint32_t)acr__dtype_bytes(p->out_dtype) ? p->alignment
                                                                       : (size_t)acr__dtype_bytes(p->out_dtype);
    default:
        return acr__is_tensor(which) ? p->alignment : 4; /* int32 and float32 */
    }
}
