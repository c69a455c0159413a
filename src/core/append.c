/* acr_append: its arguments are checked and become append_args; a backend does the rest. */
#include <math.h>

#include "context.h"
#include "error.h"
#include "op.h"
#include "problem.h"

/* The tensors of a call. */
enum {
    Q,
    K,
    V,
    Q_OUT,
    K_CACHE,
    V_CACHE,
    TENSORS
};

static int is_paged(const acr_append_args *a)
{
    return a->page_table != NULL;
}

static void list_tensors(acr_append_args *a, acr__op_tensor list[TENSORS])
{
    const int64_t batch = a->offsets ? 1 : a->batch, entries = is_paged(a) ? a->pages : a->batch,
                  rows = is_paged(a) ? a->page : a->kv_len;
    const acr_dtype in = a->dtype, out = a->cache_dtype;
    list[Q] = (acr__op_tensor){"q", a->q, batch, a->q_heads, a->len, a->qk_dim, &a->q_stride, in, 0};
    list[K] = (acr__op_tensor){"k", a->k, batch, a->kv_heads, a->len, a->qk_dim, &a->k_stride, in, 0};
    list[V] = (acr__op_tensor){"v", a->v, batch, a->kv_heads, a->len, a->v_dim, &a->v_stride, in, 0};
    list[Q_OUT] = (acr__op_tensor){"q_out", a->q_out, batch, a->q_heads, a->len, a->qk_dim, &a->q_out_stride, in, 1};
    list[K_CACHE] =
        (acr__op_tensor){"k_cache", a->k_cache, entries, a->kv_heads, rows, a->qk_dim, &a->k_cache_stride, out, 1};
    list[V_CACHE] =
        (acr__op_tensor){"v_cache", a->v_cache, entries, a->kv_heads, rows, a->v_dim, &a->v_cache_stride, out, 1};
}

/* ---- Which arguments belong together ----------------------------------------------------------------------------- */

/* Something given that its condition does not want, or missing that it wants. */
typedef struct presence {
    const char *name, *with;
    int is_given, is_wanted;
} presence;

static acr_status check_presence_of(const presence *list, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (list[i].is_given != list[i].is_wanted)
            return acr__fail(ACR_INVALID,
                             list[i].is_wanted ? "args.%s is missing, there is %s" : "args.%s is given without %s",
                             list[i].name, list[i].with);
    return ACR_OK;
}

static acr_status check_presence(const acr_append_args *a)
{
    const int has_kv = a->k || a->v, has_q = a->q != NULL, turns = a->rope_dim != 0, paged = is_paged(a);
    const presence list[] = {
        {"k_cache", "k", a->k_cache != NULL, a->k != NULL},
        {"v_cache", "v", a->v_cache != NULL, a->v != NULL},
        {"q_out", "q", a->q_out != NULL, has_q},
        {"q_heads", "q", a->q_heads != 0, has_q},
        {"kv_heads", "k or v", a->kv_heads != 0, has_kv},
        {"qk_dim", "k or q", a->qk_dim != 0, a->k || has_q},
        {"cos", "rope_dim", a->cos != NULL, turns},
        {"sin", "rope_dim", a->sin != NULL, turns},
        {"rope_rows", "rope_dim", a->rope_rows != 0, turns},
        {"page", "page_table", a->page != 0, paged},
        {"pages", "page_table", a->pages != 0, paged},
        {"table_stride", "page_table", a->table_stride != 0, paged},
    };
    if (!has_kv && !has_q)
        return acr__fail(ACR_INVALID, "args.k, v and q are NULL: there is nothing to do");
    if (!a->kv_lens)
        return acr__fail(ACR_INVALID, "args.kv_lens is NULL");
    const acr_status status = check_presence_of(list, sizeof list / sizeof list[0]);
    if (status != ACR_OK)
        return status;
    if (has_q && !turns)
        return acr__fail(ACR_INVALID, "args.q is given, rope_dim is 0: q would not be rotated");
    if (turns && !a->k && !has_q)
        return acr__fail(ACR_INVALID, "args.rope_dim is %lld, k and q are NULL: there is nothing to rotate",
                         (long long)a->rope_dim);
    if (!turns &&
        (a->rope_first || a->rope_stride || a->rope_offsets || a->rope_positions || a->flags & ACR_ROPE_INTERLEAVED))
        return acr__fail(ACR_INVALID, "args.%s is given, rope_dim is 0",
                         a->rope_first       ? "rope_first"
                         : a->rope_stride    ? "rope_stride"
                         : a->rope_offsets   ? "rope_offsets"
                         : a->rope_positions ? "rope_positions"
                                             : "flags ACR_ROPE_INTERLEAVED");
    return ACR_OK;
}

/* ---- Single fields ----------------------------------------------------------------------------------------------- */

static acr_status check_extents(acr_append_args *a)
{
    acr_status status;
    const int has_kv = a->k || a->v;
    if (a->v_dim == 0)
        a->v_dim = a->qk_dim;
    const struct {
        const char *name;
        int64_t value, least;
    } extents[] = {{"batch", a->batch, 1},
                   {"len", a->len, 1},
                   {"q_heads", a->q_heads, a->q != NULL},
                   {"kv_heads", a->kv_heads, has_kv},
                   {"qk_dim", a->qk_dim, a->k || a->q},
                   {"v_dim", a->v_dim, a->v != NULL},
                   {"page", a->page, is_paged(a)},
                   {"pages", a->pages, is_paged(a)},
                   {"table_stride", a->table_stride, is_paged(a)},
                   {"rope_rows", a->rope_rows, 0},
                   {"rope_stride", a->rope_stride, 0},
                   {"rope_first", a->rope_first, 0},
                   {"rope_dim", a->rope_dim, 0}};
    for (size_t i = 0; i < sizeof extents / sizeof extents[0]; i++)
        if ((status = acr__op_check_extent(extents[i].name, extents[i].value, extents[i].least)) != ACR_OK)
            return status;
    if (is_paged(a) && a->kv_len != 0)
        return acr__fail(ACR_INVALID, "args.kv_len is %lld, with a page_table it must be 0: table_stride * page says",
                         (long long)a->kv_len);
    if (!is_paged(a) && has_kv && (status = acr__op_check_extent("kv_len", a->kv_len, 1)) != ACR_OK)
        return status;
    if ((status = acr__op_check_product("batch * len", a->offsets ? 1 : a->batch, a->len)) != ACR_OK ||
        (status = acr__op_check_product("q_heads * qk_dim", a->q_heads, a->qk_dim)) != ACR_OK ||
        (status = acr__op_check_product("kv_heads * qk_dim", a->kv_heads, a->qk_dim)) != ACR_OK)
        return status;
    return acr__op_check_product("kv_heads * v_dim", a->kv_heads, a->v_dim);
}

static acr_status check_rotation(acr_append_args *a)
{
    if (a->rope_dim % 2 != 0)
        return acr__fail(ACR_INVALID, "args.rope_dim is %lld, must be even", (long long)a->rope_dim);
    const int64_t end = a->rope_first + a->rope_dim;
    if (end > a->qk_dim)
        return acr__fail(ACR_INVALID, "args.rope_first + rope_dim is %lld, at most qk_dim, %lld", (long long)end,
                         (long long)a->qk_dim);
    if (a->rope_stride == 0)
        a->rope_stride = a->rope_dim / 2;
    if (a->rope_stride < a->rope_dim / 2)
        return acr__fail(ACR_INVALID, "args.rope_stride is %lld, must be at least rope_dim / 2, %lld",
                         (long long)a->rope_stride, (long long)(a->rope_dim / 2));
    return ACR_OK;
}

static acr_status check_scale(const acr_append_args *a, float *scale, const char *name, const float *scales)
{
    if (*scale == 0.0f)
        *scale = 1.0f;
    if (a->cache_dtype != ACR_E4M3 && (*scale != 1.0f || scales))
        return acr__fail(ACR_INVALID, "args.%s%s is given, but only an e4m3 cache has scales and cache_dtype is %s",
                         name, scales ? "s" : "", acr__dtype_text(a->cache_dtype));
    if (!(*scale > 0.0f) || !isfinite(*scale))
        return acr__fail(ACR_INVALID, "args.%s is %g, must be positive and finite", name, (double)*scale);
    return ACR_OK;
}

static acr_status check_fields(acr_append_args *a)
{
    acr_status status;
    const uint32_t known = ACR_OVERLAP_PREVIOUS | ACR_ROPE_INTERLEAVED;
    if (a->flags & ~known)
        return acr__fail(ACR_INVALID,
                         "args.flags 0x%x has bits that are neither ACR_OVERLAP_PREVIOUS nor ACR_ROPE_INTERLEAVED",
                         a->flags);
    if (a->layout != ACR_BHSD && a->layout != ACR_BSHD)
        return acr__fail(ACR_INVALID, "args.layout is %d, must be ACR_BHSD or ACR_BSHD", (int)a->layout);
    if ((status = check_presence(a)) != ACR_OK ||
        (status = acr__op_read_dtype(&a->dtype, "dtype", ACR_DTYPE_DEFAULT, 0)) != ACR_OK ||
        (status = acr__op_read_dtype(&a->cache_dtype, "cache_dtype", a->dtype, 1)) != ACR_OK ||
        (status = check_extents(a)) != ACR_OK || (status = check_rotation(a)) != ACR_OK ||
        (status = check_scale(a, &a->k_scale, "k_scale", a->k_scales)) != ACR_OK ||
        (status = check_scale(a, &a->v_scale, "v_scale", a->v_scales)) != ACR_OK)
        return status;
    const int in_bytes = acr__dtype_bytes(a->dtype), out_bytes = acr__dtype_bytes(a->cache_dtype);
    return acr__op_read_alignment(&a->alignment, in_bytes > out_bytes ? in_bytes : out_bytes);
}

static acr_status check_tensors(const acr_append_args *a, const acr__op_tensor list[TENSORS])
{
    for (int i = 0; i < TENSORS; i++) {
        const acr__op_tensor *t = &list[i];
        acr_status status;
        if (!t->pointer)
            continue;
        if (a->offsets && i < K_CACHE && t->strides->batch != 0)
            return acr__fail(ACR_INVALID, "args.%s_stride.batch is %lld, with offsets it must be 0", t->name,
                             (long long)t->strides->batch);
        /* Rows of packed sequences are outermost. */
        const acr_layout layout = a->offsets && i < K_CACHE ? ACR_BSHD : a->layout;
        if ((status = acr__op_read_strides(t, layout)) != ACR_OK ||
            (status = acr__op_check_alignment(t->name, t->pointer, a->alignment)) != ACR_OK)
            return status;
    }
    return ACR_OK;
}

/* ---- The numbers beside ------------------------------------------------------------------------------------------ */

enum {
    BLOCKS = 9
};

/* Bytes of count * step words, no more than 2^61: extents are up to 2^31 each. */
static int64_t bytes_of(int64_t count, int64_t step)
{
    const int64_t most = (int64_t)1 << 61, words = count * step;
    return words < most / 4 ? 4 * words : most;
}

static void list_blocks(const acr_append_args *a, acr__extent list[BLOCKS])
{
    const int64_t rope = bytes_of(a->rope_rows, a->rope_stride), scales = bytes_of(a->batch, a->kv_heads);
    list[0] = acr__extent_of_block("cos", a->cos, rope);
    list[1] = acr__extent_of_block("sin", a->sin, rope);
    list[2] = acr__extent_of_block("kv_lens", a->kv_lens, bytes_of(a->batch, 1));
    list[3] = acr__extent_of_block("offsets", a->offsets, bytes_of(a->batch + 1, 1));
    list[4] = acr__extent_of_block("page_table", a->page_table, bytes_of(a->batch, a->table_stride));
    list[5] = acr__extent_of_block("rope_offsets", a->rope_offsets, bytes_of(a->batch, 1));
    list[6] = acr__extent_of_block("rope_positions", a->rope_positions, bytes_of(a->offsets ? 1 : a->batch, a->len));
    list[7] = acr__extent_of_block("k_scales", a->k_scales, scales);
    list[8] = acr__extent_of_block("v_scales", a->v_scales, scales);
}

static acr_status check_block_alignment(const acr__extent list[BLOCKS])
{
    for (int i = 0; i < BLOCKS; i++) {
        const acr_status status = acr__op_check_alignment(list[i].name, (const void *)list[i].first, 4);
        if (status != ACR_OK)
            return status;
    }
    return ACR_OK;
}

/* ---- Overlap ----------------------------------------------------------------------------------------------------- */

static int rotates_in_place(const acr_append_args *a, const acr__op_tensor *q)
{
    const acr_strides *from = &a->q_stride, *to = &a->q_out_stride;
    return a->q_out == a->q && (q->batch == 1 || from->batch == to->batch) &&
           (q->heads == 1 || from->head == to->head) && (q->rows == 1 || from->row == to->row);
}

static acr_status check_overlap(const acr_append_args *a, const acr__op_tensor tensors[TENSORS],
                                const acr__extent blocks[BLOCKS])
{
    acr__extent extents[TENSORS];
    for (int i = 0; i < TENSORS; i++)
        extents[i] = tensors[i].pointer ? acr__op_extent(&tensors[i]) : (acr__extent){.name = tensors[i].name};
    for (int out = Q_OUT; out < TENSORS; out++) {
        for (int i = 0; i < out; i++)
            if (!(i == Q && out == Q_OUT && rotates_in_place(a, &tensors[Q])) &&
                acr__overlap(&extents[out], &extents[i]))
                return acr__fail(ACR_OVERLAP, "args.%s overlaps args.%s", extents[out].name, extents[i].name);
        for (int i = 0; i < BLOCKS; i++)
            if (acr__overlap(&extents[out], &blocks[i]))
                return acr__fail(ACR_OVERLAP, "args.%s overlaps args.%s", extents[out].name, blocks[i].name);
    }
    return ACR_OK;
}

/* ---- The call ---------------------------------------------------------------------------------------------------- */

static int is_wide(const acr_append_args *a, const acr__op_tensor tensors[TENSORS])
{
    const int64_t elements = 16 / acr__dtype_bytes(a->dtype);
    for (int i = 0; i < TENSORS; i++)
        if (!acr__op_is_wide(&tensors[i], elements))
            return 0;
    return a->alignment >= 16 && a->rope_first % elements == 0 && a->rope_dim / 2 % elements == 0 &&
           acr__is_aligned(a->cos, 16) && acr__is_aligned(a->sin, 16) && a->rope_stride % 4 == 0;
}

static append_args args_of(const acr_append_args *a, const acr__op_tensor tensors[TENSORS])
{
    append_args filled = {
        .q_stride = acr__op_strides(&a->q_stride),
        .k_stride = acr__op_strides(&a->k_stride),
        .v_stride = acr__op_strides(&a->v_stride),
        .q_out_stride = acr__op_strides(&a->q_out_stride),
        .k_cache_stride = acr__op_strides(&a->k_cache_stride),
        .v_cache_stride = acr__op_strides(&a->v_cache_stride),
        .q = a->q,
        .k = a->k,
        .v = a->v,
        .q_out = a->q_out,
        .k_cache = a->k_cache,
        .v_cache = a->v_cache,
        .cos = a->cos,
        .sin = a->sin,
        .k_scales = a->k_scales,
        .v_scales = a->v_scales,
        .kv_lens = a->kv_lens,
        .offsets = a->offsets,
        .page_table = a->page_table,
        .rope_offsets = a->rope_offsets,
        .rope_positions = a->rope_positions,
        .rows = a->offsets ? a->len : a->batch * a->len,
        .kv_len = is_paged(a) ? a->table_stride * a->page : a->kv_len,
        .table_stride = a->table_stride,
        .rope_rows = a->rope_rows,
        .rope_stride = a->rope_stride,
        .batch = (int32_t)a->batch,
        .len = (int32_t)a->len,
        .q_heads = (int32_t)a->q_heads,
        .kv_heads = (int32_t)a->kv_heads,
        .qk_dim = (int32_t)a->qk_dim,
        .v_dim = (int32_t)a->v_dim,
        .page = (int32_t)a->page,
        .pages = (int32_t)a->pages,
        .rope_first = (int32_t)a->rope_first,
        .rope_dim = (int32_t)a->rope_dim,
        .is_interleaved = (a->flags & ACR_ROPE_INTERLEAVED) != 0,
        .dtype = (int32_t)a->dtype,
        .cache_dtype = (int32_t)a->cache_dtype,
        .is_wide = is_wide(a, tensors),
        .k_scale = a->k_scale,
        .v_scale = a->v_scale,
    };
    append_count_units(&filled);
    return filled;
}

acr_status acr_append(acr_ctx *ctx, const acr_append_args *args, void *stream)
{
    acr_append_args a;
    if (!ctx || !args)
        return acr__fail(ACR_INVALID, "%s is NULL", ctx ? "args" : "ctx");
    acr_status status = acr__read_struct(&a, sizeof a, args, args->size, NULL, 0, "args", "ACR_APPEND_ARGS_INIT");
    if (status != ACR_OK || (status = check_fields(&a)) != ACR_OK)
        return status;
    acr__op_tensor tensors[TENSORS];
    acr__extent blocks[BLOCKS];
    list_tensors(&a, tensors);
    list_blocks(&a, blocks);
    if ((status = check_tensors(&a, tensors)) != ACR_OK || (status = check_block_alignment(blocks)) != ACR_OK ||
        (status = check_overlap(&a, tensors, blocks)) != ACR_OK)
        return status;
    const append_args filled = args_of(&a, tensors);
    const acr__op_call call = {
        .op = ACR__OP_APPEND, .dtype = a.dtype, .append = &filled, .flags = a.flags & ACR_OVERLAP_PREVIOUS};
    return ctx->device->backend->run_op(ctx->device, &call, stream);
}
