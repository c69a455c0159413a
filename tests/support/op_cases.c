/* Random calls of acr_merge and acr_append: see op_cases.h. */
#include "op_cases.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "op_args.h"

static const acr_dtype wide_types[] = {ACR_F32, ACR_F16, ACR_BF16};

static int64_t between(generator *g, int64_t least, int64_t most)
{
    return least + (int64_t)(next_u64(g) % (uint64_t)(most - least + 1));
}

static int chance(generator *g, int in)
{
    return next_u64(g) % (uint64_t)in == 0;
}

/* ---- Buffers ----------------------------------------------------------------------------------------------------- */

static size_t bytes_of(const op_buffer *b)
{
    const size_t size = b->dtype == ACR_E4M3 ? 1 : b->dtype == ACR_F32 ? 4 : 2;
    return (size_t)b->elements * size;
}

/* A buffer of `elements`, each a normal number of the deviation given. Integers are float32 in name. */
static op_buffer *make_buffer(op_case *c, int index, generator *g, acr_dtype dtype, int64_t elements, double deviation)
{
    op_buffer *b = &c->buffers[index];
    *b = (op_buffer){.dtype = dtype, .elements = elements};
    b->before = calloc(1, bytes_of(b));
    b->after = calloc(1, bytes_of(b));
    if (!b->before || !b->after)
        abort();
    for (int64_t i = 0; i < elements; i++)
        acr__store_element(dtype, b->before, i, deviation * next_normal(g));
    if (index >= c->buffer_count)
        c->buffer_count = index + 1;
    return b;
}

/* Strides of a tensor: packed in a layout, or with gaps. `unit`: what all are multiples of. */
static acr_strides make_strides(generator *g, int64_t heads, int64_t rows, int64_t dim, int is_bshd, int64_t unit)
{
    const int64_t gap = chance(g, 3) ? unit * between(g, 1, 3) : 0;
    const int64_t head_rows = is_bshd ? heads : rows, inner = dim + gap;
    const int64_t outer = inner * head_rows + (chance(g, 4) ? unit : 0);
    acr_strides s = {.head = is_bshd ? inner : outer, .row = is_bshd ? outer : inner};
    s.batch = outer * (is_bshd ? rows : heads) + (chance(g, 4) ? 2 * unit : 0);
    return s;
}

static int64_t span_of(int64_t batch, int64_t heads, int64_t rows, int64_t dim, const acr_strides *s)
{
    return (batch - 1) * s->batch + (heads - 1) * s->head + (rows - 1) * s->row + dim;
}

void op_case_free(op_case *c)
{
    for (int i = 0; c && i < c->buffer_count; i++) {
        free(c->buffers[i].before);
        free(c->buffers[i].after);
    }
    free(c);
}

/* ---- Merging ----------------------------------------------------------------------------------------------------- */

/* Buffers: o and lse of each part, then o and lse; what lies in place of another has none. */
static int out_buffer(const op_case *c)
{
    return 2 * (int)c->merge.count;
}

op_case *op_case_merge(uint64_t seed, int is_small)
{
    generator g = {seed * 2654435761u + 1};
    op_case *c = calloc(1, sizeof *c);
    if (!c)
        abort();
    acr_merge_args *m = &c->merge;
    c->is_merge = 1;
    *m = (acr_merge_args)ACR_MERGE_ARGS_INIT;
    m->dtype = wide_types[between(&g, 0, 2)];
    m->out_dtype = chance(&g, 2) ? ACR_DTYPE_DEFAULT : wide_types[between(&g, 0, 2)];
    const acr_dtype out = m->out_dtype == ACR_DTYPE_DEFAULT ? m->dtype : m->out_dtype;
    m->batch = between(&g, 1, 3);
    m->heads = between(&g, 1, 4);
    m->len = between(&g, 1, is_small ? 9 : 60);
    m->dim = chance(&g, 2) ? 8 * between(&g, 1, is_small ? 17 : 40) : between(&g, 1, is_small ? 70 : 300);
    m->count = chance(&g, 4) ? between(&g, 9, OP_PARTS_MAX) : between(&g, 1, 6);
    if (seed % 16 == 5) { /* hundreds of a GPU's CTAs, the last with rows left */
        m->batch = 1;
        m->heads = 4;
        m->len = 4099;
        m->dim = 8 * (1 + (int64_t)(seed / 16 % 9));
        m->count = 1 + m->count % (seed / 16 % 2 ? MERGE_LISTED : 2);
    }
    const int64_t unit = m->dim % 8 == 0 && !chance(&g, 4) ? 8 : 1;
    m->alignment = unit == 8 && !chance(&g, 4) ? 0 : 4;
    m->layout = chance(&g, 2) ? ACR_BHSD : ACR_BSHD;
    const acr_strides packed_lse = {m->heads * m->len, m->len, 1};
    m->part_stride = make_strides(&g, m->heads, m->len, m->dim, chance(&g, 2), unit);
    m->o_stride = make_strides(&g, m->heads, m->len, m->dim, chance(&g, 2), unit);
    m->part_lse_stride = chance(&g, 3) ? make_strides(&g, m->heads, m->len, 1, chance(&g, 2), 1) : packed_lse;
    m->lse_stride = chance(&g, 3) ? make_strides(&g, m->heads, m->len, 1, chance(&g, 2), 1) : packed_lse;
    c->o_in_place = out == m->dtype && chance(&g, 4);
    c->lse_in_place = chance(&g, 4);
    if (c->o_in_place)
        m->o_stride = m->part_stride;
    if (c->lse_in_place)
        m->lse_stride = m->part_lse_stride;
    for (int64_t i = 0; i < m->count; i++) {
        make_buffer(c, 2 * (int)i, &g, m->dtype, span_of(m->batch, m->heads, m->len, m->dim, &m->part_stride), 1.0);
        op_buffer *lse = make_buffer(c, 2 * (int)i + 1, &g, ACR_F32,
                                     span_of(m->batch, m->heads, m->len, 1, &m->part_lse_stride), 3.0);
        float *values = lse->before;
        for (int64_t e = 0; e < lse->elements; e++) {
            const uint64_t kind = next_u64(&g) % 24;
            if (kind < 5)
                values[e] = -INFINITY;
            else if (kind == 5)
                values[e] *= 40.0f;
            else if (kind == 6 && chance(&g, 4))
                values[e] = chance(&g, 2) ? NAN : INFINITY;
        }
        float *o = c->buffers[2 * i].before;
        if (chance(&g, 4)) /* one element that is no number */
            acr__store_element(m->dtype, o, between(&g, 0, c->buffers[2 * i].elements - 1),
                               chance(&g, 2) ? NAN : -INFINITY);
    }
    make_buffer(c, out_buffer(c), &g, out, span_of(m->batch, m->heads, m->len, m->dim, &m->o_stride), 1.0);
    make_buffer(c, out_buffer(c) + 1, &g, ACR_F32, span_of(m->batch, m->heads, m->len, 1, &m->lse_stride), 1.0);
    return c;
}

static acr_status call_merge(op_case *c, acr_ctx *ctx)
{
    acr_part parts[OP_PARTS_MAX];
    acr_merge_args m = c->merge;
    for (int64_t i = 0; i < m.count; i++)
        parts[i] = (acr_part){c->buffers[2 * i].device, c->buffers[2 * i + 1].device};
    m.parts = parts;
    m.o = c->buffers[c->o_in_place ? 0 : out_buffer(c)].device;
    m.lse = c->buffers[c->lse_in_place ? 1 : out_buffer(c) + 1].device;
    return acr_merge(ctx, &m, NULL);
}

/* ---- Appending --------------------------------------------------------------------------------------------------- */

static void make_numbers(op_case *c, int index, generator *g, int64_t count)
{
    make_buffer(c, index, g, ACR_F32, count, 0.0);
}

static int32_t *numbers(const op_case *c, int index)
{
    return c->buffers[index].before;
}

static int has(const op_case *c, int index)
{
    return c->buffers[index].before != NULL;
}

/* Lengths, mostly such that all fits; a few that do not. */
static void make_lengths(op_case *c, generator *g, int64_t kv_len)
{
    const acr_append_args *a = &c->append;
    make_numbers(c, OP_KV_LENS, g, a->batch);
    for (int64_t b = 0; b < a->batch; b++) {
        numbers(c, OP_KV_LENS)[b] = (int32_t)between(g, kv_len > a->len ? a->len : 0, kv_len);
        if (chance(g, 12))
            numbers(c, OP_KV_LENS)[b] = (int32_t)between(g, -3, kv_len + 5);
        if (chance(g, 40))
            numbers(c, OP_KV_LENS)[b] = chance(g, 2) ? INT32_MAX : INT32_MIN;
    }
}

static void make_pages(op_case *c, generator *g)
{
    acr_append_args *a = &c->append;
    static const int64_t sizes[] = {1, 2, 8, 16, 64};
    a->page = sizes[between(g, 0, 4)];
    a->table_stride = between(g, 1, 4);
    a->pages = a->batch * a->table_stride + between(g, 0, 3);
    make_numbers(c, OP_TABLE, g, a->batch * a->table_stride);
    int32_t *table = numbers(c, OP_TABLE);
    for (int64_t i = 0; i < a->batch * a->table_stride; i++) { /* a permutation: no page is anybody else's */
        const int64_t other = between(g, 0, i);
        table[i] = table[other];
        table[other] = (int32_t)i;
    }
    static const int32_t strange[] = {-1, INT32_MIN, INT32_MAX};
    for (int64_t i = 0; i < a->batch * a->table_stride; i++)
        if (chance(g, 10))
            table[i] = chance(g, 4) ? (int32_t)a->pages : strange[between(g, 0, 2)];
}

static void make_offsets(op_case *c, generator *g)
{
    const acr_append_args *a = &c->append;
    make_numbers(c, OP_OFFSETS, g, a->batch + 1);
    int32_t *offsets = numbers(c, OP_OFFSETS);
    offsets[0] = (int32_t)(chance(g, 3) ? between(g, 0, a->len / 2) : 0);
    for (int64_t b = 1; b <= a->batch; b++)
        offsets[b] = (int32_t)between(g, offsets[b - 1], a->len);
}

static void make_rotation(op_case *c, generator *g, int64_t kv_len)
{
    acr_append_args *a = &c->append;
    const int64_t unit = a->qk_dim % 16 == 0 && !chance(g, 4) ? 16 : 2;
    a->rope_dim = unit * between(g, 1, a->qk_dim / unit);
    a->rope_first = chance(g, 2) ? a->qk_dim - a->rope_dim : 0;
    a->rope_rows = kv_len + between(g, 1, 4);
    a->rope_stride = chance(g, 3) ? a->rope_dim / 2 + between(g, 0, 3) : 0;
    a->flags |= chance(g, 2) ? ACR_ROPE_INTERLEAVED : 0;
    const int64_t stride = a->rope_stride ? a->rope_stride : a->rope_dim / 2, elements = a->rope_rows * stride;
    make_buffer(c, OP_COS, g, ACR_F32, elements, 1.0);
    make_buffer(c, OP_SIN, g, ACR_F32, elements, 1.0);
    for (int64_t i = 0; i < elements; i++) {
        const double angle = next_normal(g) * 3.0;
        ((float *)c->buffers[OP_COS].before)[i] = (float)cos(angle);
        ((float *)c->buffers[OP_SIN].before)[i] = (float)sin(angle);
    }
    if (chance(g, 3)) {
        make_numbers(c, OP_ROPE_OFFSETS, g, a->batch);
        for (int64_t b = 0; b < a->batch; b++)
            numbers(c, OP_ROPE_OFFSETS)[b] = (int32_t)between(g, -2, 2);
    }
    if (chance(g, 4)) {
        const int64_t tokens = has(c, OP_OFFSETS) ? a->len : a->batch * a->len;
        make_numbers(c, OP_ROPE_POSITIONS, g, tokens);
        for (int64_t i = 0; i < tokens; i++)
            numbers(c, OP_ROPE_POSITIONS)[i] = (int32_t)between(g, chance(g, 20) ? -1 : 0, a->rope_rows - 1);
    }
}

static void make_scales(op_case *c, generator *g, int index, float *scale)
{
    const acr_append_args *a = &c->append;
    *scale = chance(g, 2) ? 0.0f : (float)(0.01 * (double)between(g, 1, 300));
    if (chance(g, 2))
        return;
    make_buffer(c, index, g, ACR_F32, a->batch * a->kv_heads, 1.0);
    for (int64_t i = 0; i < a->batch * a->kv_heads; i++)
        ((float *)c->buffers[index].before)[i] = (float)(0.001 * (double)between(g, 1, 3000));
}

static void make_tensor(op_case *c, generator *g, int index, acr_dtype dtype, int64_t batch, int64_t heads,
                        int64_t rows, int64_t dim, acr_strides *strides, int64_t unit)
{
    const int is_packed = has(c, OP_OFFSETS) && index < OP_K_CACHE;
    *strides = make_strides(g, heads, rows, dim, is_packed || chance(g, 2), unit);
    if (is_packed)
        strides->batch = 0;
    make_buffer(c, index, g, dtype, span_of(batch, heads, rows, dim, strides), 2.0);
    if (chance(g, 6))
        acr__store_element(dtype, c->buffers[index].before, between(g, 0, c->buffers[index].elements - 1),
                           chance(g, 2) ? NAN : 1e9);
}

op_case *op_case_append(uint64_t seed, int is_small)
{
    generator g = {seed * 2654435761u + 7};
    op_case *c = calloc(1, sizeof *c);
    if (!c)
        abort();
    acr_append_args *a = &c->append;
    *a = (acr_append_args)ACR_APPEND_ARGS_INIT;
    static const acr_dtype cache_types[] = {ACR_DTYPE_DEFAULT, ACR_DTYPE_DEFAULT, ACR_E4M3, ACR_E4M3,
                                            ACR_F32,           ACR_F16,           ACR_BF16};
    a->dtype = wide_types[between(&g, 0, 2)];
    a->cache_dtype = cache_types[between(&g, 0, 6)];
    const acr_dtype cache = a->cache_dtype == ACR_DTYPE_DEFAULT ? a->dtype : a->cache_dtype;
    a->layout = chance(&g, 2) ? ACR_BHSD : ACR_BSHD;
    a->batch = between(&g, 1, 5);
    a->len = chance(&g, 2) ? 1 : between(&g, 1, is_small ? 7 : 40);
    const int has_k = !chance(&g, 8), has_v = !has_k || !chance(&g, 8), has_q = chance(&g, 2);
    /* Some tokens are as long as an engine's: a GPU divides them over several CTAs. */
    const int is_long = chance(&g, 5);
    a->kv_heads = is_long ? 8 : between(&g, 1, 3);
    a->q_heads = has_q ? a->kv_heads * between(&g, 1, is_long ? 5 : 3) : 0;
    a->qk_dim = is_long         ? 16 * between(&g, 5, 8)
                : chance(&g, 2) ? 16 * between(&g, 1, is_small ? 5 : 9)
                                : between(&g, 2, is_small ? 40 : 150);
    a->v_dim = chance(&g, 3) ? between(&g, 1, 100) : a->qk_dim;
    const int64_t unit = a->qk_dim % 16 == 0 && !chance(&g, 4) ? 8 : 1;
    a->alignment = unit == 8 && !chance(&g, 4) ? 0 : 4;
    if (!has_k && !has_q)
        a->qk_dim = 0;
    if (chance(&g, 2))
        make_offsets(c, &g);
    if (chance(&g, 2))
        make_pages(c, &g);
    else
        a->kv_len = a->len + between(&g, 0, 30);
    const int64_t kv_len = a->page ? a->page * a->table_stride : a->kv_len;
    make_lengths(c, &g, kv_len);
    if (has_q || (has_k && !chance(&g, 3)))
        make_rotation(c, &g, kv_len);
    const int64_t batch = has(c, OP_OFFSETS) ? 1 : a->batch, entries = a->page ? a->pages : a->batch,
                  rows = a->page ? a->page : a->kv_len;
    if (has_k) {
        make_tensor(c, &g, OP_K, a->dtype, batch, a->kv_heads, a->len, a->qk_dim, &a->k_stride, unit);
        make_tensor(c, &g, OP_K_CACHE, cache, entries, a->kv_heads, rows, a->qk_dim, &a->k_cache_stride, unit);
    }
    if (has_v) {
        make_tensor(c, &g, OP_V, a->dtype, batch, a->kv_heads, a->len, a->v_dim, &a->v_stride, unit);
        make_tensor(c, &g, OP_V_CACHE, cache, entries, a->kv_heads, rows, a->v_dim, &a->v_cache_stride, unit);
    }
    if (has_q) {
        make_tensor(c, &g, OP_Q, a->dtype, batch, a->q_heads, a->len, a->qk_dim, &a->q_stride, unit);
        c->q_in_place = chance(&g, 3);
        if (c->q_in_place)
            a->q_out_stride = a->q_stride;
        else
            make_tensor(c, &g, OP_Q_OUT, a->dtype, batch, a->q_heads, a->len, a->qk_dim, &a->q_out_stride, unit);
    }
    if (cache == ACR_E4M3) {
        make_scales(c, &g, OP_K_SCALES, &a->k_scale);
        make_scales(c, &g, OP_V_SCALES, &a->v_scale);
    }
    return c;
}

static void *device_of(const op_case *c, int index)
{
    return c->buffers[index].device;
}

static acr_status call_append(op_case *c, acr_ctx *ctx)
{
    acr_append_args a = c->append;
    a.q = device_of(c, OP_Q);
    a.k = device_of(c, OP_K);
    a.v = device_of(c, OP_V);
    a.q_out = device_of(c, c->q_in_place ? OP_Q : OP_Q_OUT);
    a.k_cache = device_of(c, OP_K_CACHE);
    a.v_cache = device_of(c, OP_V_CACHE);
    a.cos = device_of(c, OP_COS);
    a.sin = device_of(c, OP_SIN);
    a.kv_lens = device_of(c, OP_KV_LENS);
    a.offsets = device_of(c, OP_OFFSETS);
    a.page_table = device_of(c, OP_TABLE);
    a.rope_offsets = device_of(c, OP_ROPE_OFFSETS);
    a.rope_positions = device_of(c, OP_ROPE_POSITIONS);
    a.k_scales = device_of(c, OP_K_SCALES);
    a.v_scales = device_of(c, OP_V_SCALES);
    return acr_append(ctx, &a, NULL);
}

/* ---- Running ----------------------------------------------------------------------------------------------------- */

static acr_status place(op_case *c, acr__backend_device *device)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < c->buffer_count && status == ACR_OK; i++) {
        op_buffer *b = &c->buffers[i];
        if (b->before && (status = device->backend->mem_alloc(device, bytes_of(b), &b->device)) == ACR_OK)
            status = device->backend->mem_upload(device, b->device, b->before, bytes_of(b));
    }
    return status;
}

acr_status op_case_run(op_case *c, acr_ctx *ctx)
{
    acr__backend_device *device = acr__ctx_backend_device(ctx);
    acr_status status = place(c, device);
    if (status == ACR_OK)
        status = c->is_merge ? call_merge(c, ctx) : call_append(c, ctx);
    if (status == ACR_OK)
        status = device->backend->synchronize(device);
    for (int i = 0; i < c->buffer_count; i++) {
        op_buffer *b = &c->buffers[i];
        if (b->device && status == ACR_OK)
            status = device->backend->mem_download(device, b->after, b->device, bytes_of(b));
        device->backend->mem_free(device, b->device);
        b->device = NULL;
    }
    return status;
}

const char *op_case_text(const op_case *c)
{
    static char text[512];
    if (c->is_merge)
        snprintf(text, sizeof text, "merge dtype %d to %d, %lld parts, %lld x %lld x %lld x %lld%s%s, align %u",
                 (int)c->merge.dtype, (int)c->merge.out_dtype, (long long)c->merge.count, (long long)c->merge.batch,
                 (long long)c->merge.heads, (long long)c->merge.len, (long long)c->merge.dim,
                 c->o_in_place ? ", o in place" : "", c->lse_in_place ? ", lse in place" : "", c->merge.alignment);
    else
        snprintf(text, sizeof text,
                 "append dtype %d to %d, batch %lld, heads %lld/%lld, len %lld, dims %lld/%lld, page %lld, rope "
                 "%lld+%lld%s%s%s%s, align %u",
                 (int)c->append.dtype, (int)c->append.cache_dtype, (long long)c->append.batch,
                 (long long)c->append.q_heads, (long long)c->append.kv_heads, (long long)c->append.len,
                 (long long)c->append.qk_dim, (long long)c->append.v_dim, (long long)c->append.page,
                 (long long)c->append.rope_first, (long long)c->append.rope_dim,
                 c->append.flags & ACR_ROPE_INTERLEAVED ? " interleaved" : "", has(c, OP_OFFSETS) ? ", offsets" : "",
                 has(c, OP_ROPE_POSITIONS) ? ", positions" : "", c->q_in_place ? ", q in place" : "",
                 c->append.alignment);
    return text;
}

/* ---- Comparing --------------------------------------------------------------------------------------------------- */

/* What an output should hold: a value with its tolerance, or the bytes from before. */
typedef struct expected {
    double *value, *tolerance; /* tolerance < 0: as before; NaN values want NaN; infinite ones anything not finite */
} expected;

static expected expect(const op_buffer *b)
{
    expected e = {calloc((size_t)b->elements, sizeof(double)), calloc((size_t)b->elements, sizeof(double))};
    if (!e.value || !e.tolerance)
        abort();
    for (int64_t i = 0; i < b->elements; i++)
        e.tolerance[i] = -1.0;
    return e;
}

/* How far rounding to a type may take a value. */
static double rounding(acr_dtype dtype, double value)
{
    const double x = fabs(value);
    return dtype == ACR_F32    ? x * 0x1p-24 + 0x1p-150
           : dtype == ACR_F16  ? x * 0x1p-11 + 0x1p-25
           : dtype == ACR_BF16 ? x * 0x1p-8 + 0x1p-134
                               : x * 0x1p-4 + 0x1p-10;
}

static double largest(acr_dtype dtype)
{
    return dtype == ACR_F16 ? 65504.0 : dtype == ACR_E4M3 ? 448.0 : 3.38e38;
}

static bool is_expected(acr_dtype dtype, double got, double wanted, double tolerance)
{
    if (isnan(wanted))
        return isnan(got);
    if (dtype == ACR_E4M3 && fabs(wanted) > 448.0)
        wanted = copysign(448.0, wanted);
    if (isinf(wanted) || fabs(wanted) + tolerance > largest(dtype) * (dtype == ACR_E4M3 ? 2.0 : 1.0))
        return !isfinite(got) || fabs(got) >= 0.99 * largest(dtype);
    return fabs(got - wanted) <= tolerance;
}

static bool compare(const op_buffer *b, expected *e, const char *name, char *difference, size_t bytes)
{
    const size_t size = bytes_of(b) / (size_t)b->elements;
    bool agrees = true;
    for (int64_t i = 0; i < b->elements && agrees; i++) {
        const char *got = (const char *)b->after + (size_t)i * size, *was = (const char *)b->before + (size_t)i * size;
        if (e->tolerance[i] < 0.0) {
            agrees = memcmp(got, was, size) == 0;
            if (!agrees)
                snprintf(difference, bytes, "%s[%lld] was written, it is in no row of the call", name, (long long)i);
            continue;
        }
        const double value = acr__load_element(b->dtype, b->after, i);
        agrees = is_expected(b->dtype, value, e->value[i], e->tolerance[i]);
        if (!agrees)
            snprintf(difference, bytes, "%s[%lld] is %.9g, float64 says %.9g +- %.2g", name, (long long)i, value,
                     e->value[i], e->tolerance[i]);
    }
    free(e->value);
    free(e->tolerance);
    return agrees;
}

static int64_t at(const acr_strides *s, int64_t batch, int64_t head, int64_t row)
{
    return batch * s->batch + head * s->head + row * s->row;
}

/* One row of a merge, from the header's formula. */
static void expect_merged(const op_case *c, int64_t batch, int64_t head, int64_t row, expected *o, expected *lse)
{
    const acr_merge_args *m = &c->merge;
    const int64_t part_at = at(&m->part_stride, batch, head, row), out_at = at(&m->o_stride, batch, head, row),
                  part_lse_at = at(&m->part_lse_stride, batch, head, row);
    double max = -INFINITY, sum = 0.0;
    bool is_spoilt = false;
    for (int64_t i = 0; i < m->count; i++) {
        const double value = ((float *)c->buffers[2 * i + 1].before)[part_lse_at];
        is_spoilt = is_spoilt || isnan(value) || value == INFINITY;
        max = value > max ? value : max;
    }
    for (int64_t i = 0; i < m->count && max > -INFINITY; i++)
        sum += exp(((float *)c->buffers[2 * i + 1].before)[part_lse_at] - max);
    const int64_t lse_at = at(&m->lse_stride, batch, head, row);
    lse->value[lse_at] = is_spoilt ? (double)NAN : max == -INFINITY ? max : max + log(sum);
    lse->tolerance[lse_at] = max == -INFINITY ? 0.0 : 0x1p-23 * (fabs(lse->value[lse_at]) + 2.0 + (double)m->count);
    for (int64_t d = 0; d < m->dim; d++) {
        double value = is_spoilt ? (double)NAN : 0.0, magnitude = 0.0;
        bool is_unsure = false; /* an infinite value whose weight float32 may or may not hold */
        for (int64_t i = 0; i < m->count && !is_spoilt; i++) {
            const double part_lse = ((float *)c->buffers[2 * i + 1].before)[part_lse_at];
            const double x = acr__load_element(m->dtype, c->buffers[2 * i].before, part_at + d);
            const double weight = part_lse == -INFINITY ? 0.0 : exp(part_lse - max) / sum;
            if (part_lse == -INFINITY)
                continue;
            is_unsure = is_unsure || (!isfinite(x) && part_lse - max > -88.0 && part_lse - max < -84.0);
            value += !isfinite(x) && part_lse - max < -86.0 ? (double)NAN : weight * x;
            magnitude += weight * fabs(x);
        }
        const acr_dtype dtype = c->buffers[out_buffer(c)].dtype;
        value = is_unsure ? (double)INFINITY : value; /* NaN is expected then, too */
        o->value[out_at + d] = value;
        o->tolerance[out_at + d] =
            isfinite(value) ? rounding(dtype, value) * 1.01 + magnitude * 0x1p-23 * (4.0 + (double)m->count) + 1e-37
                            : 0.0;
    }
}

static bool merge_agrees(const op_case *c, char *difference, size_t bytes)
{
    const acr_merge_args *m = &c->merge;
    const op_buffer *o_buffer = &c->buffers[c->o_in_place ? 0 : out_buffer(c)],
                    *lse_buffer = &c->buffers[c->lse_in_place ? 1 : out_buffer(c) + 1];
    expected o = expect(o_buffer), lse = expect(lse_buffer);
    for (int64_t batch = 0; batch < m->batch; batch++)
        for (int64_t head = 0; head < m->heads; head++)
            for (int64_t row = 0; row < m->len; row++)
                expect_merged(c, batch, head, row, &o, &lse);
    const bool o_agrees = compare(o_buffer, &o, "o", difference, bytes);
    return compare(lse_buffer, &lse, "lse", o_agrees ? difference : (char[8]){0}, o_agrees ? bytes : 8) && o_agrees;
}

/* A row of a head, turned by a table's row (-1: NaN) and multiplied. */
static void expect_row(const op_case *c, int from, int64_t from_at, expected *to, int64_t to_at, acr_dtype dtype,
                       int64_t dim, int turns, int64_t angle, double scale)
{
    const acr_append_args *a = &c->append;
    const int64_t pairs = turns ? a->rope_dim / 2 : 0, first = a->rope_first,
                  stride = a->rope_stride ? a->rope_stride : a->rope_dim / 2;
    for (int64_t d = 0; d < dim; d++) {
        to->value[to_at + d] = acr__load_element(a->dtype, c->buffers[from].before, from_at + d) / scale;
        to->tolerance[to_at + d] = rounding(dtype, to->value[to_at + d]) * 1.0001 + fabs(to->value[to_at + d]) * 1e-6;
        if (dtype == a->dtype && scale == 1.0)
            to->tolerance[to_at + d] = 0.0;
    }
    for (int64_t p = 0; p < pairs; p++) {
        const bool is_interleaved = a->flags & ACR_ROPE_INTERLEAVED;
        const int64_t x_at = first + (is_interleaved ? 2 * p : p), y_at = is_interleaved ? x_at + 1 : x_at + pairs;
        const double x = acr__load_element(a->dtype, c->buffers[from].before, from_at + x_at),
                     y = acr__load_element(a->dtype, c->buffers[from].before, from_at + y_at);
        const double cosine = angle < 0 ? (double)NAN : ((float *)c->buffers[OP_COS].before)[angle * stride + p],
                     sine = angle < 0 ? (double)NAN : ((float *)c->buffers[OP_SIN].before)[angle * stride + p];
        const double turned[2] = {(x * cosine - y * sine) / scale, (y * cosine + x * sine) / scale};
        for (int i = 0; i < 2; i++) {
            const int64_t index = to_at + (i == 0 ? x_at : y_at);
            to->value[index] = turned[i];
            to->tolerance[index] = rounding(dtype, turned[i]) * 1.0001 + (fabs(x) + fabs(y)) / scale * 0x1p-22;
            if (!isfinite(turned[i]))
                to->tolerance[index] = 0.0;
        }
    }
}

static double scale_of(const op_case *c, int index, float number, int64_t sequence, int64_t head)
{
    const double scale = number == 0.0f ? 1.0 : number;
    return has(c, index) ? scale * ((float *)c->buffers[index].before)[sequence * c->append.kv_heads + head] : scale;
}

/* One token of a sequence: the `i`-th of `count`, in row `row` of the new tensors. */
static void expect_token(const op_case *c, int64_t sequence, int64_t i, int64_t count, int64_t batch, int64_t row,
                         expected *k, expected *v, expected *q)
{
    const acr_append_args *a = &c->append;
    const int64_t position = numbers(c, OP_KV_LENS)[sequence] - count + i;
    int64_t entry = sequence, in_entry = position, angle = position;
    bool is_written = position >= 0 && position < (a->page ? a->page * a->table_stride : a->kv_len);
    if (a->page && is_written) {
        entry = numbers(c, OP_TABLE)[sequence * a->table_stride + position / a->page];
        in_entry = position % a->page;
        is_written = entry >= 0 && entry < a->pages;
    }
    if (has(c, OP_ROPE_POSITIONS))
        angle = numbers(c, OP_ROPE_POSITIONS)[has(c, OP_OFFSETS) ? row : sequence * a->len + row];
    if (has(c, OP_ROPE_OFFSETS))
        angle += numbers(c, OP_ROPE_OFFSETS)[sequence];
    if (angle < 0 || angle >= a->rope_rows)
        angle = -1;
    for (int64_t head = 0; head < a->kv_heads && is_written; head++) {
        if (has(c, OP_K))
            expect_row(c, OP_K, at(&a->k_stride, batch, head, row), k, at(&a->k_cache_stride, entry, head, in_entry),
                       c->buffers[OP_K_CACHE].dtype, a->qk_dim, 1, angle,
                       scale_of(c, OP_K_SCALES, a->k_scale, sequence, head));
        if (has(c, OP_V))
            expect_row(c, OP_V, at(&a->v_stride, batch, head, row), v, at(&a->v_cache_stride, entry, head, in_entry),
                       c->buffers[OP_V_CACHE].dtype, a->v_dim, 0, angle,
                       scale_of(c, OP_V_SCALES, a->v_scale, sequence, head));
    }
    for (int64_t head = 0; head < a->q_heads; head++)
        expect_row(c, OP_Q, at(&a->q_stride, batch, head, row), q, at(&a->q_out_stride, batch, head, row), a->dtype,
                   a->qk_dim, 1, angle, 1.0);
}

static bool append_agrees(const op_case *c, char *difference, size_t bytes)
{
    const acr_append_args *a = &c->append;
    const int outs[] = {OP_K_CACHE, OP_V_CACHE, c->q_in_place ? OP_Q : OP_Q_OUT};
    static const char *const names[] = {"k_cache", "v_cache", "q_out"};
    expected e[3] = {{NULL, NULL}};
    for (int i = 0; i < 3; i++)
        if (has(c, outs[i]))
            e[i] = expect(&c->buffers[outs[i]]);
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t first = has(c, OP_OFFSETS) ? numbers(c, OP_OFFSETS)[b] : 0,
                      end = has(c, OP_OFFSETS) ? numbers(c, OP_OFFSETS)[b + 1] : a->len;
        for (int64_t row = first; row < end; row++)
            expect_token(c, b, row - first, end - first, has(c, OP_OFFSETS) ? 0 : b, row, &e[0], &e[1], &e[2]);
    }
    bool agrees = true;
    for (int i = 0; i < 3; i++)
        if (has(c, outs[i])) {
            char unwanted[8];
            const bool same = compare(&c->buffers[outs[i]], &e[i], names[i], agrees ? difference : unwanted,
                                      agrees ? bytes : sizeof unwanted);
            agrees = agrees && same;
        }
    return agrees;
}

bool op_case_agrees(const op_case *c, char *difference, size_t bytes)
{
    return c->is_merge ? merge_agrees(c, difference, bytes) : append_agrees(c, difference, bytes);
}

op_outcome op_case_keep(const op_case *c)
{
    op_outcome kept = {{NULL}};
    for (int i = 0; i < c->buffer_count; i++)
        if (c->buffers[i].before) {
            kept.after[i] = malloc(bytes_of(&c->buffers[i]));
            if (!kept.after[i])
                abort();
            memcpy(kept.after[i], c->buffers[i].after, bytes_of(&c->buffers[i]));
        }
    return kept;
}

void op_outcome_free(op_outcome *outcome)
{
    for (int i = 0; i < OP_BUFFERS_MAX; i++)
        free(outcome->after[i]);
}

bool op_case_equals(const op_case *c, const op_outcome *other, char *difference, size_t bytes)
{
    for (int i = 0; i < c->buffer_count; i++) {
        const op_buffer *b = &c->buffers[i];
        for (int64_t e = 0; b->before && e < b->elements; e++) {
            const size_t size = bytes_of(b) / (size_t)b->elements;
            if (memcmp((char *)b->after + (size_t)e * size, (char *)other->after[i] + (size_t)e * size, size) == 0)
                continue;
            const double x = acr__load_element(b->dtype, b->after, e),
                         y = acr__load_element(b->dtype, other->after[i], e);
            if (isnan(x) && isnan(y))
                continue;
            snprintf(difference, bytes, "buffer %d [%lld]: %.9g and %.9g", i, (long long)e, x, y);
            return false;
        }
    }
    return true;
}
