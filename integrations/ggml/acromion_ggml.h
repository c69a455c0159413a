/* acromion for ggml: one function with the fields of GGML_OP_FLASH_ATTN_EXT as plain C. It needs none of ggml's
 * headers. README.md beside this file shows the lines that a fork of ggml needs. */
#ifndef ACROMION_GGML_H
#define ACROMION_GGML_H

#include <acromion.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { /* acr_ggml_tensor.type: ggml's numbers */
    ACR_GGML_F32 = 0,
    ACR_GGML_F16 = 1
};

/* A tensor as ggml has it: ne[0] is the innermost extent, nb[i] the bytes from one index of dimension i to the next. */
typedef struct acr_ggml_tensor {
    void *data; /* NULL: there is no such tensor */
    int32_t type;
    int32_t reserved; /* 0 */
    int64_t ne[4];
    size_t nb[4];
} acr_ggml_tensor;

/* The operation. With slope(h) = 1 without max_bias, and with it
 *     n = largest power of two <= heads,  slope(h) = 2^(-max_bias (h + 1) / n)              for h < n
 *                                         slope(h) = 2^(-max_bias / 2 (2 (h - n) + 1) / n)  for the others
 * a score is s = scale (q . k), capped: logit_softcap tanh(s / logit_softcap) where that is not 0, plus
 * slope(h) mask[k, q, h % mask.ne[2], b % mask.ne[3]]; softmax over the keys, whose sum gains exp(sinks[h]). A row
 * whose keys are all masked by -infinity is 0. */
typedef struct acr_ggml_flash_attn {
    acr_ggml_tensor q;                    /* [d, queries, heads, batch]: f32; f16 goes with dst f16 */
    acr_ggml_tensor k;                    /* [d, keys, kv_heads, 1 or batch]: f16 or f32; kv_heads divides heads */
    acr_ggml_tensor v;                    /* [d_v, keys, kv_heads, as k]: k's type */
    acr_ggml_tensor mask;                 /* [>= keys, >= queries, divides heads, divides batch]: f16; or none */
    acr_ggml_tensor sinks;                /* [heads]: f32, contiguous; or none */
    acr_ggml_tensor dst;                  /* [d_v, heads, queries, batch]: q's type */
    float scale, max_bias, logit_softcap; /* op_params 0, 1, 2. scale > 0; max_bias > 0 needs a mask */
    int32_t exact;                        /* 1: GGML_PREC_F32 is asked for; 0 otherwise */
} acr_ggml_flash_attn;

/* Bytes of scratch that an execution needs, and in *bytes 0 where it needs none. The library multiplies tensors of one
 * type, so with q in f32 and k and v in f16
 *  - exact 0: q is rounded to f16 (as ggml's own CPU code does), dst is rounded to f16 and then widened: relative 2^-11
 *    each. Scratch for q and dst. A q beyond 65504 becomes infinite, and its row NaN.
 *  - exact 1: k and v are widened, which loses nothing; all is computed in f32. Scratch for k and v.
 * A mask with max_bias, or whose extents are neither 1 nor whole, is multiplied out into scratch: f32
 * [keys, queries, heads, batch].
 * Conversions run on the host, so on a "cuda" context whatever needs scratch is refused with ACR_UNSUPPORTED: hand over
 * q and dst in f16 there.
 * Errors: ACR_INVALID (naming the tensor, the field, the limit), ACR_UNSUPPORTED. acr_ggml_error() has the sentence. */
ACR_API acr_status acr_ggml_scratch(acr_ctx *ctx, const acr_ggml_flash_attn *op, size_t *bytes);

/* Executes the operation: enqueued on the stream on "cuda", done on return on "cpu". scratch is memory of the host, of
 * any alignment, of at least the bytes that acr_ggml_scratch says; nothing is kept in it. One thread calls this, the
 * context's threads do the work. Threads that call it at once for one context need a stream and scratch each; on "cpu"
 * each its own value of stream (acr_forward).
 * Errors: those of acr_ggml_scratch and acr_forward; ACR_WORKSPACE (scratch missing or too small). */
ACR_API acr_status acr_ggml_flash_attn_ext(acr_ctx *ctx, const acr_ggml_flash_attn *op, void *scratch,
                                           size_t scratch_bytes, void *stream);

/* Why the last call on this thread failed; "" before the first failure. Valid until the next failure. */
ACR_API const char *acr_ggml_error(void);

#ifdef __cplusplus
}
#endif
#endif
