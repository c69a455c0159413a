/* What happens to a score between its product and its exponential: masks and the scale; here softcap and bias will be.
 * The order is that of the library's header: scale, cap, bias, visibility.
 *
 * A score stays as the product gave it ("raw") until the exponential, where one multiply-add scales it and subtracts
 * the row's offset. Thresholds and maxima are of raw scores, so a term that changes scores by other than a positive
 * factor must be applied in finish_scores. */
#ifndef ACR_DEVICE_ATTENTION_SCORES_CUH
#define ACR_DEVICE_ATTENTION_SCORES_CUH

#include "cuda/device/attention/visible.cuh"

/* ---- Scales: of the problem, and of e4m3 inputs those that the execution brings for each batch entry and key/value
 * head ---- */

/* What scale, scale_log2 and out_scale of the arguments are for one head. */
typedef struct head_scales {
    float scale, scale_log2, out;
} head_scales;

DEV float scale_at(const float *scales, int64_t at)
{
    return scales == nullptr ? 1.0f : scales[at];
}

/* For every kernel of e4m3 inputs; of other inputs the arguments hold the scales. batch: the entry, of a packed batch
 * the sequence. Reads global memory where the execution brings scales. */
DEV head_scales find_scales(const fwd_args &a, int batch, int kv_head)
{
    const int64_t at = (int64_t)batch * a.kv_heads + kv_head;
    const float scores = scale_at(a.q_scales, at) * scale_at(a.k_scales, at);
    return {a.scale * scores, a.scale_log2 * scores, a.out_scale * scale_at(a.v_scales, at)};
}

/* ---- A tile of scores ---- */

/* Makes raw scores of one key tile ready for the softmax, in the accumulator layout of wgmma and mma.sync. Every family
 * calls this, or its transposed twin, for every key tile. masked: whether some row does not see some key of the tile;
 * v: which keys the lane's rows see. */
template <int ELEMS> DEV void finish_scores(float (&s)[ELEMS], const row_keys &v, int key, int masked)
{
    if (masked)
        mask_scores(s, v, key);
}

template <int ELEMS> DEV void finish_transposed_scores(float (&s)[ELEMS], const row_keys &v, int key, int masked)
{
    if (masked)
        mask_transposed_scores(s, v, key);
}

/* The exponent, to base 2, of a score relative to its row's offset (softmax.cuh). */
DEV float exponent_of(float score, float scale_log2, float offset)
{
    return fmaf(score, scale_log2, -offset);
}

#endif
