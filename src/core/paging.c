/* Caches, see paging.h. */
#include "paging.h"

#include <stdbool.h>

#include "error.h"
#include "problem.h"

static const int32_t MAX_PAGE = 65536;

acr_dtype acr__kv_dtype(const acr_problem *p)
{
    return p->kv_dtype == ACR_DTYPE_DEFAULT ? p->dtype : p->kv_dtype;
}

int64_t acr__pages_of_entry(const acr_problem *p)
{
    return p->flags & ACR_PAGED ? (p->kv_len + p->page - 1) / p->page : 0;
}

int64_t acr__table_bytes(const acr_problem *p, int64_t table_stride)
{
    const acr_strides rows = {0, 0, table_stride};
    return p->flags & ACR_PAGED ? acr__span_bytes(1, 1, p->batch, acr__pages_of_entry(p), &rows, ACR_F32) : 0;
}

/* ---- The problem ------------------------------------------------------------------------------------------------- */

static acr_status check_page(const acr_problem *p)
{
    if (!(p->flags & ACR_PAGED))
        return p->page == 0 ? ACR_OK
                            : acr__fail(ACR_INVALID, "page is %d, without ACR_PAGED it must be 0", (int)p->page);
    if (p->page < 1 || p->page > MAX_PAGE)
        return acr__fail(ACR_INVALID, "page is %d, with ACR_PAGED it must be 1 to %d keys", (int)p->page,
                         (int)MAX_PAGE);
    if (!(p->flags & ACR_KV_LENS))
        return acr__fail(ACR_INVALID, "flags: ACR_PAGED without ACR_KV_LENS; key lengths say which pages are read");
    return ACR_OK;
}

static bool is_packed(const acr_strides *s)
{
    return s->batch == 0 && s->head == 0 && s->row == 0;
}

/* v is a part of k: it has nothing of its own. */
static acr_status complete_v_in_k(acr_problem *p)
{
    const acr_strides *k = &p->k, *v = &p->v;
    if (p->v_dim > p->qk_dim)
        return acr__fail(ACR_INVALID, "v_dim is %lld, with ACR_V_IN_K it must be at most qk_dim (%lld)",
                         (long long)p->v_dim, (long long)p->qk_dim);
    if (!(p->scale > 0.0f))
        return acr__fail(ACR_INVALID,
                         "scale is %g, with ACR_V_IN_K it must be given: it is that of the dims before "
                         "they were absorbed",
                         (double)p->scale);
    if (!is_packed(v) && (v->batch != k->batch || v->head != k->head || v->row != k->row))
        return acr__fail(ACR_INVALID,
                         "v strides (%lld, %lld, %lld) are given, with ACR_V_IN_K they must be 0 or those of k",
                         (long long)v->batch, (long long)v->head, (long long)v->row);
    if (p->v_scale != 0.0f && p->v_scale != p->k_scale)
        return acr__fail(ACR_INVALID, "v_scale is %g, with ACR_V_IN_K it must be 0 or k_scale (%g)", (double)p->v_scale,
                         (double)p->k_scale);
    p->v = p->k;
    p->v_scale = p->k_scale;
    return ACR_OK;
}

acr_status acr__complete_cache(acr_problem *p)
{
    if (p->kv_dtype == p->dtype)
        p->kv_dtype = ACR_DTYPE_DEFAULT;
    if (p->kv_dtype != ACR_DTYPE_DEFAULT && p->kv_dtype != ACR_E4M3)
        return acr__fail(ACR_INVALID, "kv_dtype is %d (%s), must be dtype, ACR_E4M3 or 0", (int)p->kv_dtype,
                         acr__dtype_text(p->kv_dtype));
    const acr_status status = check_page(p);
    return status == ACR_OK && p->flags & ACR_V_IN_K ? complete_v_in_k(p) : status;
}

/* ---- The execution ----------------------------------------------------------------------------------------------- */

static acr_status check_values(const acr_problem *p, const acr_buffers *b)
{
    if (!(p->flags & ACR_V_IN_K))
        return b->v ? ACR_OK : acr__fail(ACR_INVALID, "buffers.v is NULL");
    if (b->v && b->v != b->k)
        return acr__fail(ACR_INVALID, "buffers.v is given, the problem has ACR_V_IN_K: it must be NULL or k");
    if (b->v_scales)
        return acr__fail(ACR_INVALID, "buffers.v_scales is given, with ACR_V_IN_K k_scales are those of v");
    return ACR_OK;
}

static acr_status check_scales(const acr_problem *p, const acr_buffers *b)
{
    const struct {
        const char *name, *type;
        const float *given;
        acr_dtype dtype;
    } scales[] = {{"q_scales", "inputs", b->q_scales, p->dtype},
                  {"k_scales", "keys", b->k_scales, acr__kv_dtype(p)},
                  {"v_scales", "values", b->v_scales, acr__kv_dtype(p)}};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++)
        if (scales[i].given && scales[i].dtype != ACR_E4M3)
            return acr__fail(ACR_INVALID,
                             "buffers.%s is given, but only e4m3 inputs have scales and the problem's %s are %s",
                             scales[i].name, scales[i].type, acr__dtype_text(scales[i].dtype));
    return ACR_OK;
}

static acr_status check_table(const acr_problem *p, const acr_buffers *b)
{
    const int64_t needed = acr__pages_of_entry(p);
    if (!(p->flags & ACR_PAGED)) {
        if (b->table_stride != 0 || b->pages != 0)
            return acr__fail(ACR_INVALID, "buffers.%s is given, the problem lacks ACR_PAGED",
                             b->table_stride ? "table_stride" : "pages");
        return ACR_OK;
    }
    if (b->kv_offsets)
        return acr__fail(ACR_INVALID, "buffers.kv_offsets is given, with ACR_PAGED kv_lens and page_table say where "
                                      "keys are");
    if (b->pages < 1 || b->pages > INT32_MAX)
        return acr__fail(ACR_INVALID, "buffers.pages is %lld, must be 1 to %d", (long long)b->pages, (int)INT32_MAX);
    if (p->batch > 1 && (b->table_stride < needed || b->table_stride > INT32_MAX))
        return acr__fail(ACR_INVALID, "buffers.table_stride is %lld, must be %lld (kv_len %lld in pages of %d) to %d",
                         (long long)b->table_stride, (long long)needed, (long long)p->kv_len, (int)p->page,
                         (int)INT32_MAX);
    return ACR_OK;
}

acr_status acr__check_cache_buffers(const acr_problem *p, const acr_buffers *b)
{
    acr_status status = check_values(p, b);
    if (status == ACR_OK)
        status = check_scales(p, b);
    return status == ACR_OK ? check_table(p, b) : status;
}

/* ---- Kernels ----------------------------------------------------------------------------------------------------- */

const char *acr__cache_why_not(const acr__kernel *kernel, const acr_problem *p)
{
    if (p->flags & ACR_PAGED && !kernel->pages)
        return "page: the kernel is compiled without paging (PAGED)";
    if (p->kv_dtype != ACR_DTYPE_DEFAULT && !(kernel->kv_types & 1u << p->kv_dtype))
        return "kv_dtype: the kernel is compiled for keys and values of q's type (KV_E4M3)";
    if (p->flags & ACR_V_IN_K && !kernel->v_in_k)
        return "v_in_k: the kernel is compiled without values inside the keys (V_IN_K)";
    if (p->flags & ACR_INVARIANT && !(kernel->traits & ACR__TRAIT_INVARIANT))
        return "invariant: what the kernel sums together depends on lengths and batch (ACR_INVARIANT)";
    return NULL;
}
