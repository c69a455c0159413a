/* acromion for candle: one function with the arguments of candle-flash-attn's `run_mha`, in their order.
 * README.md beside this file shows the lines that a fork of candle needs. */
#ifndef ACROMION_CANDLE_H
#define ACROMION_CANDLE_H

#include <acromion.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Attention over fp16 or bf16 tensors whose last dimension is contiguous, enqueued on the stream.
 *
 * The arguments from q_ptr to softcap are run_mha's. Strides count elements. What they mean here:
 *  - q, o: [b, seqlen_q, h, d] by strides, k, v: [b, seqlen_k, h_k, d]; h_k divides h. Every row, head and batch entry
 *    of o is written. On a cuda context all pointers are device memory, on a cpu context memory of the host.
 *  - softmax_lse_ptr: NULL, or float32 [b, h, seqlen_q]; with cu_seqlens [h, total_q], and unpadded_lse must be 1. It
 *    is the natural logarithm of the sum of exponentials of the scores as acromion.h defines them, ALiBi included.
 *  - alibi_slopes_ptr: NULL, or float32 [h]; alibi_slopes_batch_stride must be 0 unless b is 1.
 *  - cu_seqlens_q_ptr, cu_seqlens_k_ptr: both NULL, or both int32 [b + 1]: tensors are then [total, heads, d], batch
 *    strides are ignored, and seqlen_q and seqlen_k are the longest lengths. total_q and total_k are the rows of q and
 *    k: nothing beyond them is touched whatever the offsets hold. Otherwise both totals must be 0.
 *  - is_causal, or window_size_right 0: query i sees keys up to i + seqlen_k - seqlen_q, with the lengths of the entry.
 *    window_size_left W >= 0: the W keys before that position, too; window_size_right W > 0: the W behind it. Negative
 *    is no limit.
 *  - softmax_scale is positive; softcap 0 is none.
 *  - d_rounded, seqlen_q_rounded and seqlen_k_rounded are not read: kernels choose their own tiles.
 *
 * Added to run_mha's: ctx, the totals, and stream (a CUstream; candle's default stream is NULL). Threads that call
 * this at once need a stream each; on a cpu context each its own value, because executions of one stream share a
 * workspace (acr_forward).
 * Errors: those of acr_forward; ACR_INVALID for what is said above. acr_candle_error() has the sentence. */
ACR_API acr_status acr_candle_run_mha(
    acr_ctx *ctx, const void *q_ptr, const void *k_ptr, const void *v_ptr, void *o_ptr, void *softmax_lse_ptr,
    const void *alibi_slopes_ptr, const int32_t *cu_seqlens_q_ptr, const int32_t *cu_seqlens_k_ptr,
    uint32_t q_batch_stride, uint32_t k_batch_stride, uint32_t v_batch_stride, uint32_t o_batch_stride,
    uint32_t alibi_slopes_batch_stride, uint32_t q_row_stride, uint32_t k_row_stride, uint32_t v_row_stride,
    uint32_t o_row_stride, uint32_t q_head_stride, uint32_t k_head_stride, uint32_t v_head_stride,
    uint32_t o_head_stride, uint32_t b, uint32_t h, uint32_t h_k, uint32_t d, uint32_t d_rounded, float softmax_scale,
    uint32_t seqlen_q, uint32_t seqlen_k, uint32_t seqlen_q_rounded, uint32_t seqlen_k_rounded, int is_bf16,
    int is_causal, int unpadded_lse, int window_size_left, int window_size_right, float softcap, int64_t total_q,
    int64_t total_k, void *stream);

/* Why the last call on this thread failed; "" before the first failure. Valid until the next failure. */
ACR_API const char *acr_candle_error(void);

#ifdef __cplusplus
}
#endif
#endif
