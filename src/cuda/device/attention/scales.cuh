/* The scales of e4m3 inputs: the problem's, and those that the execution brings for each batch entry and key/value
 * head. For every kernel of such inputs. */
#ifndef ACR_DEVICE_ATTENTION_SCALES_CUH
#define ACR_DEVICE_ATTENTION_SCALES_CUH

#include "cuda/device/isa/common.cuh"
#include "fwd_args.h"

/* What scale, scale_log2 and out_scale of the arguments are for one head. */
typedef struct head_scales {
    float scale, scale_log2, out;
} head_scales;

DEV float scale_at(const float *scales, int64_t at)
{
    return scales == nullptr ? 1.0f : scales[at];
}

/* batch: the entry, of a packed batch the sequence. Reads global memory where the execution brings scales. */
DEV head_scales find_scales(const fwd_args &a, int batch, int kv_head)
{
    const int64_t at = (int64_t)batch * a.kv_heads + kv_head;
    const float scores = scale_at(a.q_scales, at) * scale_at(a.k_scales, at);
    return {a.scale * scores, a.scale_log2 * scores, a.out_scale * scale_at(a.v_scales, at)};
}

#endif
