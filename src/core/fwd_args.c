/* Fills a kernel's arguments from the canonical problem and the caller's buffers. */
#include "internal.h"

#include <stddef.h>

_Static_assert(offsetof(fwd_args, q_scales) == FWD_ARGS_FIRST_LINE,
               "what every kernel asks for lies in the arguments' first line");

_Static_assert(FWD_TERM_LIMITS == 64, "visible.h knows it as a number");
_Static_assert((int)FWD_BIAS_NONE == (int)ACR_DTYPE_DEFAULT && (int)FWD_BIAS_F32 == (int)ACR_F32 &&
                   (int)FWD_BIAS_F16 == (int)ACR_F16 && (int)FWD_BIAS_BF16 == (int)ACR_BF16 &&
                   (int)FWD_BIAS_MASK == (int)ACR_BOOL8,
               "a bias has the numbers of its acr_dtype");

static fwd_strides strides_of(const acr_strides *s)
{
    return (fwd_strides){s->batch, s->head, s->row};
}

void acr__fwd_args(fwd_args *args, const acr_problem *problem, const acr_buffers *buffers, void *workspace)
{
    static const double log2_e = 1.44269504088896340736;
    const float scale = problem->scale * problem->q_scale * problem->k_scale;
    /* ranges add keys to what limits leave; without limits there is nothing to add */
    const int has_ranges = (acr__terms_of(problem) & FWD_TERM_RANGES) != 0;
    const float cap = problem->softcap;
    const int v_in_k = (problem->flags & ACR_V_IN_K) != 0;
    *args = (fwd_args){
        .q = buffers->q,
        .k = buffers->k,
        .v = v_in_k ? buffers->k : buffers->v,
        .o = buffers->o,
        .lse = buffers->lse,
        .kv_lens = buffers->kv_lens,
        .q_offsets = buffers->q_offsets,
        .kv_offsets = buffers->kv_offsets,
        .q_total = (int32_t)buffers->q_total,
        .kv_total = (int32_t)buffers->kv_total,
        .q_scales = buffers->q_scales,
        .k_scales = buffers->k_scales,
        .v_scales = v_in_k ? buffers->k_scales : buffers->v_scales,
        .workspace = workspace,
        .q_stride = strides_of(&problem->q),
        .k_stride = strides_of(&problem->k),
        .v_stride = strides_of(&problem->v),
        .o_stride = strides_of(&problem->o),
        .batch = (int32_t)problem->batch,
        .q_heads = (int32_t)problem->q_heads,
        .kv_heads = (int32_t)problem->kv_heads,
        .group = (int32_t)(problem->q_heads / problem->kv_heads),
        .q_len = (int32_t)problem->q_len,
        .kv_len = (int32_t)problem->kv_len,
        .qk_dim = (int32_t)problem->qk_dim,
        .v_dim = (int32_t)problem->v_dim,
        .mask = acr__rule_of(problem).mask,
        .window_left = acr__rule_of(problem).window_left,
        .window_right = acr__rule_of(problem).window_right,
        .scale = scale,
        .scale_log2 = (float)((double)scale * log2_e),
        .out_scale = problem->v_scale,
        .out_bf16 = problem->dtype == ACR_E4M3  ? problem->out_dtype == ACR_BF16
                    : problem->dtype == ACR_F32 ? 0
                                                : (problem->out_dtype == ACR_F32) * ACR__OUT_F32,
        .softcap = cap,
        .softcap_in = cap > 0.0f ? scale / cap : 0.0f,
        .softcap_out = (float)((double)cap * log2_e),
        .bias_type = (int32_t)problem->bias_dtype,
        .sinks = buffers->sinks,
        .slopes = buffers->slopes,
        .bias = buffers->bias,
        .bias_stride = strides_of(&problem->bias),
        .kv_starts = buffers->kv_starts,
        .ranges = has_ranges ? buffers->ranges : NULL,
        .ranges_count = has_ranges ? problem->ranges : 0,
        .tree = buffers->tree,
        .chunk = acr__rule_of(problem).chunk,
    };
}

_Static_assert(offsetof(bwd_args, fwd) == 0, "a pointer to fwd_args leads to bwd_args");

void acr__bwd_args(bwd_args *args, const acr_problem *problem, const acr_buffers *buffers, void *workspace)
{
    acr__fwd_args(&args->fwd, problem, buffers, workspace);
    if (problem->pass != ACR_BACKWARD)
        return;
    args->d_o = buffers->d_o;
    args->dq = buffers->dq;
    args->dk = buffers->dk;
    args->dv = buffers->dv;
    args->dsinks = buffers->dsinks;
    args->d_o_stride = strides_of(&problem->d_o);
    args->dq_stride = strides_of(&problem->dq);
    args->dk_stride = strides_of(&problem->dk);
    args->dv_stride = strides_of(&problem->dv);
    args->grad_f32 = problem->grad_dtype == ACR_F32;
    args->atomics = (problem->flags & ACR_FAST_ATOMICS) != 0;
}

_Static_assert(offsetof(fwd_paged_args, fwd) == 0, "a pointer to fwd_args leads to fwd_paged_args");

void acr__fill_args(acr__args *args, const acr_problem *problem, const acr_buffers *buffers, void *workspace)
{
    if (problem->pass == ACR_BACKWARD) {
        acr__bwd_args(&args->bwd, problem, buffers, workspace);
        return;
    }
    acr__fwd_args(&args->fwd, problem, buffers, workspace);
    if (!(problem->flags & ACR_PAGED) && problem->kv_dtype == ACR_DTYPE_DEFAULT)
        return;
    args->fwd.paged = 1;
    args->paged.paging = (fwd_paging){.table = buffers->page_table,
                                      .table_stride = buffers->table_stride,
                                      .page = problem->page,
                                      .pages = (int32_t)buffers->pages,
                                      .kv_type = (int32_t)problem->kv_dtype,
                                      .invariant = (problem->flags & ACR_INVARIANT) != 0};
}
