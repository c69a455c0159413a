/* What every forward kernel is told, on the CPU and on the GPU: one plain struct, compiled by the C compiler and by
 * nvcc alike.
 *
 * The host side fills it from the canonical problem and the caller's buffers (fwd_args.c), the device side receives it
 * by value as its first parameter. Kernels that load by tensor maps take one more parameter, see acr__boxes in
 * kernel.h; what pages and 8-bit caches have besides is in fwd_paging.h. */
#ifndef ACR_FWD_ARGS_H
#define ACR_FWD_ARGS_H

#include <stdint.h>

#include "visible.h"

typedef struct fwd_strides {
    int64_t batch, head, row; /* elements */
} fwd_strides;

/* A kernel's first read of a line of 256 bytes of its arguments waits for L2, and short launches feel it. On sm_90 the
 * arguments begin 16 bytes after such a line does: so the first 240 bytes hold all that a kernel of 16-bit inputs asks
 * for, and behind FWD_ARGS_FIRST_LINE is what only e4m3 inputs have. */
enum {
    FWD_ARGS_FIRST_LINE = 240
};

/* What a kernel's scores and visibility may have beyond a scale, a mask and a window, as bits: the terms that a line is
 * compiled with (acr__kernel.terms, TERMS of its device code). A problem that needs others is refused in one place,
 * acr__why_not. A bit never changes its meaning. */
enum {
    FWD_TERM_CAP = 1,     /* softcap */
    FWD_TERM_SINKS = 2,   /* sinks */
    FWD_TERM_BIAS = 4,    /* bias: additive, or a boolean mask */
    FWD_TERM_ALIBI = 8,   /* slopes */
    FWD_TERM_TREE = 16,   /* tree */
    FWD_TERM_RANGES = 32, /* ranges */
    FWD_TERM_LIMITS = 64, /* kv_starts and chunk: what leaves a row one interval of keys (visible.h) */
    FWD_TERM_ALL = 127
};

/* fwd_args.bias_type; the numbers of acr_dtype. */
enum {
    FWD_BIAS_NONE = 0,
    FWD_BIAS_F32 = 1,
    FWD_BIAS_F16 = 2,
    FWD_BIAS_BF16 = 3,
    FWD_BIAS_MASK = 5 /* one byte an element: 0 hides the key, anything else adds nothing */
};

/* What is 0 or NULL is not there. A score is scaled, capped, biased, then hidden, in this order. */
typedef struct fwd_args {
    const void *q, *k, *v;
    void *o;
    float *lse;             /* [batch, q_heads, q_len] packed, natural logarithm; NULL = not wanted */
    const int32_t *kv_lens; /* [batch], to be clamped to [0, kv_len]; NULL = kv_len for all */
    /* Packed batches, else NULL and 0: batch entry b has the rows offsets[b]..offsets[b + 1]-1, each offset to be
     * clamped to [0, q_total] or [0, kv_total], and no more than q_len or kv_len of them; batch strides are 0; lse is
     * [q_heads, q_total]. Only kernels with ACR__TRAIT_PACKED are given them. */
    const int32_t *q_offsets, *kv_offsets;
    void *workspace;
    fwd_strides q_stride, k_stride, v_stride, o_stride;
    int32_t batch, q_heads, kv_heads, group; /* group = q_heads / kv_heads */
    int32_t q_len, kv_len, qk_dim, v_dim;
    int32_t mask;                      /* FWD_MASK_* of visible.h */
    int32_t window_left, window_right; /* of the rule, see visible.h; 0 = no limit */
    float scale;                       /* of the scores, with the fp8 scales of q and k folded in; > 0 */
    float scale_log2;                  /* scale * log2(e): exponentials are taken to base 2 */
    float out_scale;                   /* of the output: the fp8 scale of v, else 1 */
    int32_t out_bf16;                  /* e4m3 inputs only: 1 = output bf16, 0 = f16 */
    int32_t q_total, kv_total;
    int32_t paged; /* 1 = these are the first member of fwd_paged_args (fwd_paging.h) */
    /* From here on: FWD_ARGS_FIRST_LINE. */
    /* e4m3 inputs only: [batch, kv_heads], factors beside those above, of the scores (q, k) and of the output (v);
     * NULL = 1. Every kernel of e4m3 inputs has to apply them (fwd_scales_of; device/attention/scores.cuh). */
    const float *q_scales, *k_scales, *v_scales;
    /* Lines are given those of their terms alone (FWD_TERM_*). */
    float softcap;                 /* a score s becomes softcap * tanh(s / softcap) */
    float softcap_in, softcap_out; /* scale / softcap and softcap * log2(e): softcap_out * tanh(softcap_in * (q.k)) is
                                      the capped score in powers of two */
    int32_t bias_type;             /* FWD_BIAS_*, of bias */
    const float *sinks;            /* [q_heads], natural units: exp(sink) is added to a row's sum */
    const float *slopes;           /* [q_heads]: slope * |position - key| is taken off a score */
    const void *bias;         /* [batch, q_heads, q_len, kv_len] by bias_stride, key stride 1; aligned to an element.
                                      Of a packed batch by entry, the entry's row and the entry's key */
    fwd_strides bias_stride;  /* elements; 0 broadcasts */
    const int32_t *kv_starts; /* [batch], to be clamped to [0, the entry's key length] */
    const int32_t *ranges;    /* [batch, ranges_count, 2]: keys [begin, end), empty where begin >= end; a row sees,
                                      beside its interval, the keys that exist of each range that holds its position */
    const uint8_t *tree;      /* bits [batch, q_len, ceil(q_len / 8)], lowest first: whether a row sees each of the
                                      entry's last q_len keys, beside the other rules; q_len is the entry's for which
                                      keys, the arguments' for the strides */
    int32_t ranges_count;
    int32_t chunk; /* of the rule, see visible.h */
} fwd_args;

/* The part of the arguments that visible.h wants. */
VISIBLE_FUNCTION visible_rule fwd_rule_of(const fwd_args *args)
{
#if VISIBLE_LIMITS
    return (visible_rule){args->mask, args->window_left, args->window_right, args->chunk};
#else
    return (visible_rule){args->mask, args->window_left, args->window_right};
#endif
}

#ifndef __CUDACC__ /* device/attention/visible.cuh and scores.cuh have them for the GPU */

/* The rows of one entry of a packed batch, relative to the tensor. */
typedef struct fwd_sequence {
    int64_t first, length;
} fwd_sequence;

static inline fwd_sequence fwd_sequence_of(const int32_t *offsets, int64_t entry, int64_t total, int64_t length_max)
{
    int64_t first = offsets[entry], end = offsets[entry + 1];
    first = first < 0 ? 0 : first > total ? total : first;
    end = end < first ? first : end > total ? total : end;
    return (fwd_sequence){first, end - first < length_max ? end - first : length_max};
}

/* scale, scale_log2 and out_scale of one key/value head of a batch entry. */
typedef struct fwd_scales {
    float scale, scale_log2, out_scale;
} fwd_scales;

static inline fwd_scales fwd_scales_of(const fwd_args *args, int64_t entry, int64_t kv_head)
{
    const int64_t at = entry * args->kv_heads + kv_head;
    const float scores = (args->q_scales ? args->q_scales[at] : 1.0f) * (args->k_scales ? args->k_scales[at] : 1.0f);
    const float values = args->v_scales ? args->v_scales[at] : 1.0f;
    return (fwd_scales){args->scale * scores, args->scale_log2 * scores, args->out_scale * values};
}

#endif

#endif
