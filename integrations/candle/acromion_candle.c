/* run_mha's arguments written as a problem and its buffers: see acromion_candle.h. */
#include "acromion_candle.h"

#include <stdbool.h>

#include "refusal.h"

const char *acr_candle_error(void)
{
    return refusal_text;
}

acr_status acr_candle_run_mha(acr_ctx *ctx, const void *q_ptr, const void *k_ptr, const void *v_ptr, void *o_ptr,
                              void *softmax_lse_ptr, const void *alibi_slopes_ptr, const int32_t *cu_seqlens_q_ptr,
                              const int32_t *cu_seqlens_k_ptr, uint32_t q_batch_stride, uint32_t k_batch_stride,
                              uint32_t v_batch_stride, uint32_t o_batch_stride, uint32_t alibi_slopes_batch_stride,
                              uint32_t q_row_stride, uint32_t k_row_stride, uint32_t v_row_stride,
                              uint32_t o_row_stride, uint32_t q_head_stride, uint32_t k_head_stride,
                              uint32_t v_head_stride, uint32_t o_head_stride, uint32_t b, uint32_t h, uint32_t h_k,
                              uint32_t d, uint32_t d_rounded, float softmax_scale, uint32_t seqlen_q, uint32_t seqlen_k,
                              uint32_t seqlen_q_rounded, uint32_t seqlen_k_rounded, int is_bf16, int is_causal,
                              int unpadded_lse, int window_size_left, int window_size_right, float softcap,
                              int64_t total_q, int64_t total_k, void *stream)
{
    const bool packed = cu_seqlens_q_ptr && cu_seqlens_k_ptr;
    const void *const tensors[] = {q_ptr, k_ptr, v_ptr, o_ptr};
    acr_problem p = ACR_PROBLEM_INIT;
    acr_buffers buffers = ACR_BUFFERS_INIT;
    (void)d_rounded, (void)seqlen_q_rounded, (void)seqlen_k_rounded;

    if (!cu_seqlens_q_ptr != !cu_seqlens_k_ptr)
        return refuse(ACR_INVALID, "cu_seqlens_q_ptr and cu_seqlens_k_ptr: one is NULL, the other is not");
    if (!packed && (total_q != 0 || total_k != 0))
        return refuse(ACR_INVALID, "total_q %lld and total_k %lld must be 0 without cu_seqlens", (long long)total_q,
                      (long long)total_k);
    if (packed && softmax_lse_ptr && !unpadded_lse)
        return refuse(ACR_INVALID, "unpadded_lse is 0: with cu_seqlens softmax_lse_ptr is [h, total_q], unpadded");
    if (alibi_slopes_ptr && alibi_slopes_batch_stride != 0 && b != 1)
        return refuse(ACR_INVALID, "alibi_slopes_batch_stride is %u, must be 0: slopes are [h]",
                      alibi_slopes_batch_stride);
    if (softmax_scale == 0.0f) /* which is the default elsewhere */
        return refuse(ACR_INVALID, "softmax_scale is 0, must be positive");
    /* Zeros are defaults of acr_problem; here they are none. */
    if (h_k == 0 || seqlen_k == 0)
        return refuse(ACR_INVALID, "h_k is %u and seqlen_k %u, both must be at least 1", h_k, seqlen_k);

    p.dtype = is_bf16 ? ACR_BF16 : ACR_F16;
    p.layout = ACR_BSHD;
    p.flags = (packed ? ACR_PACKED : 0u) | (softmax_lse_ptr ? ACR_WANT_LSE : 0u) | (alibi_slopes_ptr ? ACR_ALIBI : 0u);
    p.alignment = common_alignment(tensors, 4);
    p.batch = b;
    p.q_heads = h;
    p.kv_heads = h_k;
    p.q_len = seqlen_q;
    p.kv_len = seqlen_k;
    p.qk_dim = d;
    p.scale = softmax_scale;
    p.softcap = softcap;
    p.mask = is_causal || window_size_right == 0 ? ACR_MASK_CAUSAL : ACR_MASK_NONE;
    p.window_left = window_size_left < 0 ? 0 : (int64_t)window_size_left + 1; /* ours counts the position itself */
    p.window_right = p.mask != ACR_MASK_NONE || window_size_right < 0 ? 0 : window_size_right;
    p.q = (acr_strides){packed ? 0 : q_batch_stride, q_head_stride, q_row_stride};
    p.k = (acr_strides){packed ? 0 : k_batch_stride, k_head_stride, k_row_stride};
    p.v = (acr_strides){packed ? 0 : v_batch_stride, v_head_stride, v_row_stride};
    p.o = (acr_strides){packed ? 0 : o_batch_stride, o_head_stride, o_row_stride};

    buffers.q = q_ptr;
    buffers.k = k_ptr;
    buffers.v = v_ptr;
    buffers.o = o_ptr;
    buffers.lse = softmax_lse_ptr;
    buffers.slopes = alibi_slopes_ptr;
    buffers.q_offsets = cu_seqlens_q_ptr;
    buffers.kv_offsets = cu_seqlens_k_ptr;
    buffers.q_total = total_q;
    buffers.kv_total = total_k;
    return pass_on(acr_forward(ctx, &p, &buffers, stream));
}
