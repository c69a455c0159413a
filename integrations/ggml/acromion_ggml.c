/* GGML_OP_FLASH_ATTN_EXT written as a problem and its buffers, with conversions where ggml mixes types: see
 * acromion_ggml.h. */
#include "acromion_ggml.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "refusal.h"

enum {
    SCRATCH_ALIGNMENT = 64
};

/* A part of the scratch: bytes before it and its own. Empty: not needed. */
typedef struct part {
    size_t at, bytes;
} part;

/* How an operation is executed. */
typedef struct execution {
    acr_problem problem;
    part q, k, v, o, bias; /* in scratch, each tensor packed: [batch, heads, rows, dim] */
    int64_t bias_batches;  /* that the multiplied out mask has: 1 or all */
    size_t bytes;          /* of scratch, with room to align it */
} execution;

const char *acr_ggml_error(void)
{
    return refusal_text;
}

/* ---- numbers ---- */

static float half_to_float(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
    const float magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                            : exponent == 0 ? ldexpf((float)fraction, -24)
                                            : ldexpf((float)(fraction | 0x400u), (int)exponent - 25);
    return sign ? -magnitude : magnitude;
}

/* To nearest, ties to even; beyond 65504 infinite. */
static uint16_t float_to_half(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) /* 65520: halfway to what would come after 65504 */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) /* below 2^-14: multiples of 2^-24, and adding 2^-1 rounds to those */
    {
        float shifted;
        memcpy(&shifted, &magnitude, sizeof shifted);
        shifted += 0.5f;
        memcpy(&bits, &shifted, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
}

/* The slope that multiplies head h's mask. */
static float slope_of(float max_bias, int64_t heads, int64_t h)
{
    int64_t n = 1;
    while (2 * n <= heads)
        n *= 2;
    if (!(max_bias > 0.0f))
        return 1.0f;
    return h < n ? exp2f(-max_bias * (float)(h + 1) / (float)n)
                 : exp2f(-max_bias / 2.0f * (float)(2 * (h - n) + 1) / (float)n);
}

/* ---- what an operation is ---- */

static size_t size_of_type(int32_t type)
{
    return type == ACR_GGML_F32 ? sizeof(float) : sizeof(uint16_t);
}

static acr_status check_tensor(const char *name, const acr_ggml_tensor *t, bool half_too)
{
    if (t->type != ACR_GGML_F32 && !(half_too && t->type == ACR_GGML_F16))
        return refuse(ACR_UNSUPPORTED, "%s.type is ggml's %d, must be f32 (0)%s", name, (int)t->type,
                      half_too ? " or f16 (1)" : "");
    if (!t->data)
        return refuse(ACR_INVALID, "%s.data is NULL", name);
    if (t->reserved != 0)
        return refuse(ACR_INVALID, "%s.reserved is %d, must be 0", name, (int)t->reserved);
    if (t->nb[0] != size_of_type(t->type))
        return refuse(ACR_INVALID, "%s.nb[0] is %zu, must be %zu: rows are contiguous", name, t->nb[0],
                      size_of_type(t->type));
    if ((uintptr_t)t->data % t->nb[0] != 0)
        return refuse(ACR_ALIGNMENT, "%s.data is not a multiple of %zu bytes", name, t->nb[0]);
    for (int i = 0; i < 4; i++) {
        if (t->ne[i] < 1 || t->ne[i] > INT32_MAX)
            return refuse(ACR_INVALID, "%s.ne[%d] is %lld, must be 1 to 2^31 - 1", name, i, (long long)t->ne[i]);
        if (t->nb[i] == 0 || t->nb[i] % t->nb[0] != 0 || t->nb[i] > INT64_MAX)
            return refuse(ACR_INVALID, "%s.nb[%d] is %zu, must be a positive multiple of %zu", name, i, t->nb[i],
                          t->nb[0]);
    }
    return ACR_OK;
}

static acr_status check_extent(const char *name, int i, const acr_ggml_tensor *t, int64_t wanted, const char *whose)
{
    if (t->ne[i] == wanted)
        return ACR_OK;
    return refuse(ACR_INVALID, "%s.ne[%d] is %lld, must be %lld as %s", name, i, (long long)t->ne[i], (long long)wanted,
                  whose);
}

static acr_status check_tensors(const acr_ggml_flash_attn *op)
{
    const acr_ggml_tensor *q = &op->q, *k = &op->k, *v = &op->v, *dst = &op->dst;
    acr_status status;
    if ((status = check_tensor("q", q, true)) || (status = check_tensor("k", k, true)) ||
        (status = check_tensor("v", v, true)) || (status = check_tensor("dst", dst, true)))
        return status;
    if (v->type != k->type)
        return refuse(ACR_UNSUPPORTED, "v.type is %d and k.type %d: they must be equal", (int)v->type, (int)k->type);
    if (dst->type != q->type)
        return refuse(ACR_UNSUPPORTED, "dst.type is %d and q.type %d: they must be equal", (int)dst->type,
                      (int)q->type);
    if (q->type == ACR_GGML_F16 && k->type != ACR_GGML_F16)
        return refuse(ACR_UNSUPPORTED, "q.type is f16 and k.type f32: q in f16 goes with k and v in f16");
    if ((status = check_extent("k", 0, k, q->ne[0], "q.ne[0]")) ||
        (status = check_extent("v", 1, v, k->ne[1], "k's")) || (status = check_extent("v", 2, v, k->ne[2], "k's")) ||
        (status = check_extent("v", 3, v, k->ne[3], "k's")) ||
        (status = check_extent("dst", 0, dst, v->ne[0], "v.ne[0]")) ||
        (status = check_extent("dst", 1, dst, q->ne[2], "q.ne[2]")) ||
        (status = check_extent("dst", 2, dst, q->ne[1], "q.ne[1]")) ||
        (status = check_extent("dst", 3, dst, q->ne[3], "q.ne[3]")))
        return status;
    if (q->ne[2] % k->ne[2] != 0)
        return refuse(ACR_INVALID, "k.ne[2] is %lld and does not divide q.ne[2] %lld", (long long)k->ne[2],
                      (long long)q->ne[2]);
    if (k->ne[3] != 1 && k->ne[3] != q->ne[3])
        return refuse(ACR_UNSUPPORTED, "k.ne[3] is %lld, must be 1 or q.ne[3] %lld", (long long)k->ne[3],
                      (long long)q->ne[3]);
    return ACR_OK;
}

static acr_status check_terms(const acr_ggml_flash_attn *op)
{
    const acr_ggml_tensor *q = &op->q, *mask = &op->mask, *sinks = &op->sinks;
    acr_status status;
    if (mask->data) {
        if ((status = check_tensor("mask", mask, true)))
            return status;
        if (mask->type != ACR_GGML_F16)
            return refuse(ACR_UNSUPPORTED, "mask.type is ggml's %d, must be f16 (1)", (int)mask->type);
        if (mask->ne[0] < op->k.ne[1] || mask->ne[1] < q->ne[1])
            return refuse(ACR_INVALID, "mask is %lld x %lld, must be at least %lld keys x %lld queries",
                          (long long)mask->ne[0], (long long)mask->ne[1], (long long)op->k.ne[1], (long long)q->ne[1]);
        if (q->ne[2] % mask->ne[2] != 0 || q->ne[3] % mask->ne[3] != 0)
            return refuse(ACR_INVALID, "mask.ne[2] %lld and mask.ne[3] %lld must divide q's %lld and %lld",
                          (long long)mask->ne[2], (long long)mask->ne[3], (long long)q->ne[2], (long long)q->ne[3]);
    }
    if (sinks->data && ((status = check_tensor("sinks", sinks, false)) ||
                        (status = check_extent("sinks", 0, sinks, q->ne[2], "q.ne[2]"))))
        return status;
    if (!(op->scale > 0.0f))
        return refuse(ACR_INVALID, "scale is %g, must be positive", (double)op->scale);
    if (!(op->max_bias >= 0.0f) || isinf(op->max_bias))
        return refuse(ACR_INVALID, "max_bias is %g, must be finite and not negative", (double)op->max_bias);
    if (op->max_bias > 0.0f && !mask->data)
        return refuse(ACR_INVALID, "max_bias is %g and mask is missing: it multiplies the mask", (double)op->max_bias);
    if (op->exact != 0 && op->exact != 1)
        return refuse(ACR_INVALID, "exact is %d, must be 0 or 1", (int)op->exact);
    return ACR_OK;
}

/* ---- how it is executed ---- */

/* Strides of a ggml tensor whose dimensions are, from the innermost: elements, `row`, `head`, batch. */
static acr_strides strides_of(const acr_ggml_tensor *t, int row, int head, bool one_batch)
{
    const size_t size = size_of_type(t->type);
    return (acr_strides){one_batch ? 0 : (int64_t)(t->nb[3] / size), (int64_t)(t->nb[head] / size),
                         (int64_t)(t->nb[row] / size)};
}

/* Puts a part of the product of the extents and the element's size into the scratch. */
static acr_status add_part(execution *e, part *added, const char *name, const int64_t extents[4], size_t element)
{
    size_t bytes = element;
    for (int i = 0; i < 4; i++) {
        if ((size_t)extents[i] > (SIZE_MAX / 2 - e->bytes) / bytes)
            return refuse(ACR_INVALID, "the scratch for %s would have more than %zu bytes", name, SIZE_MAX / 2);
        bytes *= (size_t)extents[i];
    }
    if (bytes > SIZE_MAX / 2 - e->bytes - SCRATCH_ALIGNMENT)
        return refuse(ACR_INVALID, "the scratch for %s would have more than %zu bytes", name, SIZE_MAX / 2);
    *added = (part){e->bytes, bytes};
    e->bytes += (bytes + SCRATCH_ALIGNMENT - 1) / SCRATCH_ALIGNMENT * SCRATCH_ALIGNMENT;
    return ACR_OK;
}

/* The mask as it lies where strides say it, else multiplied out. */
static acr_status plan_mask(const acr_ggml_flash_attn *op, execution *e)
{
    const acr_ggml_tensor *mask = &op->mask;
    acr_problem *p = &e->problem;
    if (!mask->data)
        return ACR_OK;
    if (op->max_bias == 0.0f && (mask->ne[2] == 1 || mask->ne[2] == p->q_heads) &&
        (mask->ne[3] == 1 || mask->ne[3] == p->batch)) {
        p->bias_dtype = ACR_F16;
        p->bias = strides_of(mask, 1, 2, mask->ne[3] == 1);
        if (mask->ne[2] == 1)
            p->bias.head = 0;
        return ACR_OK;
    }
    e->bias_batches = mask->ne[3] == 1 ? 1 : p->batch;
    p->bias_dtype = ACR_F32;
    p->bias = (acr_strides){0, p->q_len * p->kv_len, p->kv_len};
    if (e->bias_batches > 1)
        p->bias.batch = p->q_heads * p->bias.head;
    return add_part(e, &e->bias, "mask", (int64_t[]){e->bias_batches, p->q_heads, p->q_len, p->kv_len}, sizeof(float));
}

static acr_status plan_execution(acr_ctx *ctx, const acr_ggml_flash_attn *op, execution *e)
{
    acr_status status;
    if (!ctx || !op)
        return refuse(ACR_INVALID, "%s is NULL", ctx ? "op" : "ctx");
    if ((status = check_tensors(op)) || (status = check_terms(op)))
        return status;

    *e = (execution){.problem = ACR_PROBLEM_INIT};
    acr_problem *p = &e->problem;
    const bool mixed = op->q.type != op->k.type, narrow = mixed && !op->exact, widen = mixed && op->exact;
    p->dtype = op->q.type == ACR_GGML_F32 && !narrow ? ACR_F32 : ACR_F16;
    p->batch = op->q.ne[3];
    p->q_heads = op->q.ne[2];
    p->q_len = op->q.ne[1];
    p->qk_dim = op->q.ne[0];
    p->kv_heads = op->k.ne[2];
    p->kv_len = op->k.ne[1];
    p->v_dim = op->v.ne[0];
    p->scale = op->scale;
    p->softcap = op->logit_softcap;
    p->flags = op->sinks.data ? ACR_SINKS : 0u;
    if (narrow) { /* strides of all zeros: packed */
        if ((status = add_part(e, &e->q, "q", op->q.ne, sizeof(uint16_t))) ||
            (status = add_part(e, &e->o, "dst", op->dst.ne, sizeof(uint16_t))))
            return status;
    } else {
        p->q = strides_of(&op->q, 1, 2, false);
        p->o = strides_of(&op->dst, 2, 1, false);
    }
    if (widen) {
        if ((status = add_part(e, &e->k, "k", op->k.ne, sizeof(float))) ||
            (status = add_part(e, &e->v, "v", op->v.ne, sizeof(float))))
            return status;
        p->k = (acr_strides){0, p->kv_len * p->qk_dim, p->qk_dim};
        p->v = (acr_strides){0, p->kv_len * p->v_dim, p->v_dim};
        if (op->k.ne[3] > 1) {
            p->k.batch = p->kv_heads * p->k.head;
            p->v.batch = p->kv_heads * p->v.head;
        }
    } else {
        p->k = strides_of(&op->k, 1, 2, op->k.ne[3] == 1);
        p->v = strides_of(&op->v, 1, 2, op->v.ne[3] == 1);
    }
    if ((status = plan_mask(op, e)))
        return status;
    if (e->bytes > 0 && strcmp(acr_ctx_backend(ctx), "cpu") != 0)
        return refuse(ACR_UNSUPPORTED,
                      "%s needs a conversion, which runs on the host: on this device hand over q and dst in f16, "
                      "and a mask without max_bias",
                      e->bias.bytes > 0 ? "mask" : "q in f32 beside k in f16");
    e->bytes += e->bytes > 0 ? SCRATCH_ALIGNMENT : 0;
    return ACR_OK;
}

acr_status acr_ggml_scratch(acr_ctx *ctx, const acr_ggml_flash_attn *op, size_t *bytes)
{
    execution e;
    if (!bytes)
        return refuse(ACR_INVALID, "bytes is NULL");
    const acr_status status = plan_execution(ctx, op, &e);
    if (status == ACR_OK)
        *bytes = e.bytes;
    return status;
}

/* ---- conversions ---- */

static const char *row_of(const acr_ggml_tensor *t, int64_t i1, int64_t i2, int64_t i3)
{
    return (const char *)t->data + (size_t)i1 * t->nb[1] + (size_t)i2 * t->nb[2] + (size_t)i3 * t->nb[3];
}

typedef void convert_row(const void *row, void *packed, int64_t count);

static void narrow_row(const void *row, void *packed, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        ((uint16_t *)packed)[i] = float_to_half(((const float *)row)[i]);
}

static void widen_row(const void *row, void *packed, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        ((float *)packed)[i] = half_to_float(((const uint16_t *)row)[i]);
}

/* All rows of a tensor, one behind the other; an element of `packed` has so many bytes. */
static void convert_rows(const acr_ggml_tensor *t, void *packed, size_t bytes, convert_row *convert)
{
    char *to = packed;
    for (int64_t i3 = 0; i3 < t->ne[3]; i3++)
        for (int64_t i2 = 0; i2 < t->ne[2]; i2++)
            for (int64_t i1 = 0; i1 < t->ne[1]; i1++) {
                convert(row_of(t, i1, i2, i3), to, t->ne[0]);
                to += (size_t)t->ne[0] * bytes;
            }
}

/* Packed rows [batch, heads, queries, d_v] into dst [d_v, heads, queries, batch]. */
static void widen_output(const uint16_t *packed, const acr_ggml_tensor *dst)
{
    for (int64_t b = 0; b < dst->ne[3]; b++)
        for (int64_t h = 0; h < dst->ne[1]; h++)
            for (int64_t i = 0; i < dst->ne[2]; i++) {
                float *row = (float *)((char *)dst->data + (size_t)h * dst->nb[1] + (size_t)i * dst->nb[2] +
                                       (size_t)b * dst->nb[3]);
                for (int64_t d = 0; d < dst->ne[0]; d++)
                    row[d] = half_to_float(*packed++);
            }
}

static void multiply_mask(const acr_ggml_flash_attn *op, const execution *e, float *bias)
{
    const acr_ggml_tensor *mask = &op->mask;
    const acr_problem *p = &e->problem;
    for (int64_t b = 0; b < e->bias_batches; b++)
        for (int64_t h = 0; h < p->q_heads; h++) {
            const float slope = slope_of(op->max_bias, p->q_heads, h);
            for (int64_t i = 0; i < p->q_len; i++) {
                const uint16_t *row = (const uint16_t *)row_of(mask, i, h % mask->ne[2], b % mask->ne[3]);
                for (int64_t j = 0; j < p->kv_len; j++)
                    *bias++ = slope * half_to_float(row[j]);
            }
        }
}

acr_status acr_ggml_flash_attn_ext(acr_ctx *ctx, const acr_ggml_flash_attn *op, void *scratch, size_t scratch_bytes,
                                   void *stream)
{
    execution e;
    acr_status status = plan_execution(ctx, op, &e);
    if (status != ACR_OK)
        return status;
    if (e.bytes > scratch_bytes || (e.bytes > 0 && !scratch))
        return refuse(ACR_WORKSPACE, "scratch has %zu bytes, needs %zu", scratch ? scratch_bytes : 0, e.bytes);

    char *base = (char *)scratch;
    if (e.bytes > 0)
        base += (SCRATCH_ALIGNMENT - (uintptr_t)scratch % SCRATCH_ALIGNMENT) % SCRATCH_ALIGNMENT;
    acr_buffers buffers = ACR_BUFFERS_INIT;
    buffers.q = e.q.bytes > 0 ? base + e.q.at : op->q.data;
    buffers.k = e.k.bytes > 0 ? base + e.k.at : op->k.data;
    buffers.v = e.v.bytes > 0 ? base + e.v.at : op->v.data;
    buffers.o = e.o.bytes > 0 ? base + e.o.at : op->dst.data;
    buffers.bias = e.bias.bytes > 0 ? base + e.bias.at : op->mask.data;
    buffers.sinks = (const float *)op->sinks.data;
    if (e.q.bytes > 0)
        convert_rows(&op->q, base + e.q.at, sizeof(uint16_t), narrow_row);
    if (e.k.bytes > 0) {
        convert_rows(&op->k, base + e.k.at, sizeof(float), widen_row);
        convert_rows(&op->v, base + e.v.at, sizeof(float), widen_row);
    }
    if (e.bias.bytes > 0)
        multiply_mask(op, &e, (float *)(void *)(base + e.bias.at));

    e.problem.alignment = common_alignment((const void *const[]){buffers.q, buffers.k, buffers.v, buffers.o}, 4);
    status = pass_on(acr_forward(ctx, &e.problem, &buffers, stream));
    if (status == ACR_OK && e.o.bytes > 0)
        widen_output((const uint16_t *)(const void *)(base + e.o.at), &op->dst);
    return status;
}
