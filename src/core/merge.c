/* acr_merge: its arguments are checked and become merge_args; a backend does the rest. */
#include "context.h"
#include "error.h"
#include "op.h"
#include "problem.h"

/* The tensors of a call; `part` has the pointer of none. */
typedef struct merge_tensors {
    acr__op_tensor part, part_lse, o, lse;
} merge_tensors;

static merge_tensors tensors_of(acr_merge_args *m)
{
    return (merge_tensors){
        {"part", NULL, m->batch, m->heads, m->len, m->dim, &m->part_stride, m->dtype, 0},
        {"part_lse", NULL, m->batch, m->heads, m->len, 1, &m->part_lse_stride, ACR_F32, 0},
        {"o", m->o, m->batch, m->heads, m->len, m->dim, &m->o_stride, m->out_dtype, 1},
        {"lse", m->lse, m->batch, m->heads, m->len, 1, &m->lse_stride, ACR_F32, 1},
    };
}

static acr_status check_fields(acr_merge_args *m)
{
    acr_status status;
    if (m->flags & ~(uint32_t)ACR_OVERLAP_PREVIOUS)
        return acr__fail(ACR_INVALID, "args.flags 0x%x has bits that are not ACR_OVERLAP_PREVIOUS", m->flags);
    if (m->layout != ACR_BHSD && m->layout != ACR_BSHD)
        return acr__fail(ACR_INVALID, "args.layout is %d, must be ACR_BHSD or ACR_BSHD", (int)m->layout);
    if ((status = acr__op_read_dtype(&m->dtype, "dtype", ACR_DTYPE_DEFAULT, 0)) != ACR_OK ||
        (status = acr__op_read_dtype(&m->out_dtype, "out_dtype", m->dtype, 0)) != ACR_OK ||
        (status = acr__op_check_extent("batch", m->batch, 1)) != ACR_OK ||
        (status = acr__op_check_extent("heads", m->heads, 1)) != ACR_OK ||
        (status = acr__op_check_extent("len", m->len, 1)) != ACR_OK ||
        (status = acr__op_check_extent("dim", m->dim, 1)) != ACR_OK ||
        (status = acr__op_check_extent("count", m->count, 1)) != ACR_OK)
        return status;
    const int part_bytes = acr__dtype_bytes(m->dtype), out_bytes = acr__dtype_bytes(m->out_dtype);
    return acr__op_read_alignment(&m->alignment, part_bytes < out_bytes ? part_bytes : out_bytes);
}

static acr_status check_rows(const acr_merge_args *m)
{
    return acr__op_check_product("batch * heads * len", m->batch * m->heads, m->len);
}

static acr_status check_strides(const merge_tensors *t, acr_layout layout)
{
    acr_status status;
    if ((status = acr__op_read_strides(&t->part, layout)) != ACR_OK ||
        (status = acr__op_read_strides(&t->part_lse, ACR_BHSD)) != ACR_OK ||
        (status = acr__op_read_strides(&t->o, layout)) != ACR_OK)
        return status;
    return t->lse.pointer ? acr__op_read_strides(&t->lse, ACR_BHSD) : ACR_OK;
}

/* What a tensor of a type is a multiple of: the alignment, but at least an element. */
static uint32_t alignment_of(const acr_merge_args *m, acr_dtype dtype)
{
    const uint32_t element = (uint32_t)acr__dtype_bytes(dtype);
    return m->alignment > element ? m->alignment : element;
}

static acr_status check_pointers(const acr_merge_args *m)
{
    const uint32_t alignment = alignment_of(m, m->dtype);
    acr_status status;
    if (!m->parts || !m->o)
        return acr__fail(ACR_INVALID, "args.%s is NULL", m->parts ? "o" : "parts");
    if ((status = acr__op_check_alignment("o", m->o, alignment_of(m, m->out_dtype))) != ACR_OK ||
        (status = acr__op_check_alignment("lse", m->lse, sizeof(float))) != ACR_OK)
        return status;
    for (int64_t i = 0; i < m->count; i++) {
        const acr_part *part = &m->parts[i];
        if (!part->o || !part->lse)
            return acr__fail(ACR_INVALID, "args.parts[%lld].%s is NULL", (long long)i, part->o ? "lse" : "o");
        if (!acr__is_aligned(part->o, alignment) || !acr__is_aligned(part->lse, sizeof(float)))
            return acr__fail(ACR_ALIGNMENT, "args.parts[%lld].%s is not a multiple of %u bytes", (long long)i,
                             acr__is_aligned(part->o, alignment) ? "lse" : "o",
                             acr__is_aligned(part->o, alignment) ? (unsigned)sizeof(float) : alignment);
    }
    return ACR_OK;
}

static int same_strides(const acr_merge_args *m, const acr_strides *a, const acr_strides *b)
{
    return (m->batch == 1 || a->batch == b->batch) && (m->heads == 1 || a->head == b->head) &&
           (m->len == 1 || a->row == b->row);
}

/* Every element of the first part is read by the thread that writes it, and before: there o and lse may lie. */
static acr_status check_overlap(const acr_merge_args *m, merge_tensors *t)
{
    const acr__extent o = acr__op_extent(&t->o), lse = acr__op_extent(&t->lse);
    if (acr__overlap(&o, &lse))
        return acr__fail(ACR_OVERLAP, "args.o overlaps args.lse");
    for (int64_t i = 0; i < m->count; i++) {
        t->part.pointer = m->parts[i].o;
        t->part_lse.pointer = m->parts[i].lse;
        const acr__extent part = acr__op_extent(&t->part), part_lse = acr__op_extent(&t->part_lse);
        const int o_in_place = i == 0 && m->o == m->parts[0].o && m->out_dtype == m->dtype &&
                               same_strides(m, &m->o_stride, &m->part_stride),
                  lse_in_place =
                      i == 0 && m->lse == m->parts[0].lse && same_strides(m, &m->lse_stride, &m->part_lse_stride);
        if ((!o_in_place && acr__overlap(&o, &part)) || acr__overlap(&o, &part_lse))
            return acr__fail(ACR_OVERLAP, "args.o overlaps args.parts[%lld].%s", (long long)i,
                             acr__overlap(&o, &part_lse) ? "lse" : "o");
        if (acr__overlap(&lse, &part) || (!lse_in_place && acr__overlap(&lse, &part_lse)))
            return acr__fail(ACR_OVERLAP, "args.lse overlaps args.parts[%lld].%s", (long long)i,
                             acr__overlap(&lse, &part) ? "o" : "lse");
    }
    return ACR_OK;
}

/* Whether the first part and two distances say where all are. */
static int are_spaced(const acr_merge_args *m, int64_t *o_spacing, int64_t *lse_spacing)
{
    *o_spacing = *lse_spacing = 0;
    if (m->count > 1) {
        *o_spacing = (int64_t)((uintptr_t)m->parts[1].o - (uintptr_t)m->parts[0].o);
        *lse_spacing = (int64_t)((uintptr_t)m->parts[1].lse - (uintptr_t)m->parts[0].lse);
    }
    for (int64_t i = 2; i < m->count; i++)
        if ((int64_t)((uintptr_t)m->parts[i].o - (uintptr_t)m->parts[i - 1].o) != *o_spacing ||
            (int64_t)((uintptr_t)m->parts[i].lse - (uintptr_t)m->parts[i - 1].lse) != *lse_spacing)
            return 0;
    return 1;
}

/* Rows fall into 16 bytes of the parts' type. */
static int is_wide(const acr_merge_args *m, const merge_tensors *t)
{
    const int64_t elements = 16 / acr__dtype_bytes(m->dtype);
    acr__op_tensor part = t->part;
    part.pointer = m->parts[0].o;
    return m->alignment >= 16 && acr__op_is_wide(&part, elements) && acr__op_is_wide(&t->o, elements);
}

static merge_args args_of(const acr_merge_args *m, const merge_tensors *t)
{
    merge_args a = {
        .part_stride = acr__op_strides(&m->part_stride),
        .part_lse_stride = acr__op_strides(&m->part_lse_stride),
        .o_stride = acr__op_strides(&m->o_stride),
        .lse_stride = acr__op_strides(&m->lse_stride),
        .o = m->o,
        .lse = m->lse,
        .rows = m->batch * m->heads * m->len,
        .count = m->count,
        .heads = (int32_t)m->heads,
        .len = (int32_t)m->len,
        .dim = (int32_t)m->dim,
        .dtype = (int32_t)m->dtype,
        .out_dtype = (int32_t)m->out_dtype,
        .is_wide = is_wide(m, t),
        .by_len = op_divisor_of((uint32_t)m->len),
        .by_heads = op_divisor_of((uint32_t)m->heads),
    };
    a.is_spaced = m->count > MERGE_LISTED && are_spaced(m, &a.o_spacing, &a.lse_spacing);
    a.lane_bits = merge_lane_bits(&a);
    return a;
}

_Static_assert(sizeof(acr_part) == sizeof(merge_part) && offsetof(acr_part, lse) == offsetof(merge_part, lse),
               "a list of one is a list of the other");

acr_status acr_merge(acr_ctx *ctx, const acr_merge_args *args, void *stream)
{
    acr_merge_args m;
    if (!ctx || !args)
        return acr__fail(ACR_INVALID, "%s is NULL", ctx ? "args" : "ctx");
    acr_status status = acr__read_struct(&m, sizeof m, args, args->size, NULL, 0, "args", "ACR_MERGE_ARGS_INIT");
    if (status != ACR_OK || (status = check_fields(&m)) != ACR_OK || (status = check_rows(&m)) != ACR_OK)
        return status;
    merge_tensors tensors = tensors_of(&m);
    if ((status = check_strides(&tensors, m.layout)) != ACR_OK || (status = check_pointers(&m)) != ACR_OK ||
        (status = check_overlap(&m, &tensors)) != ACR_OK)
        return status;
    const merge_args filled = args_of(&m, &tensors);
    const acr__op_call call = {.op = ACR__OP_MERGE,
                               .dtype = m.dtype,
                               .merge = &filled,
                               .parts = (const merge_part *)(const void *)m.parts,
                               .flags = m.flags};
    return ctx->device->backend->run_op(ctx->device, &call, stream);
}
