/* Online softmax of rows that lie across the four lanes of a quad, in the accumulator layout that mma.cuh and wgmma.cuh
 * share: of every four elements of a lane two are its row 0, two its row 1.
 *
 * Exponentials are relative to a reference, a maximum of the row's scores that may lag behind the true one by the
 * rescale threshold: while it does, no lane needs another lane's maximum and the output needs no scaling. */
#ifndef ACR_DEVICE_ATTENTION_SOFTMAX_CUH
#define ACR_DEVICE_ATTENTION_SOFTMAX_CUH

#include <math_constants.h>

#include "cuda/device/attention/scores.cuh"
#include "cuda/device/isa/common.cuh"
#include "cuda/device/isa/math.cuh"

/* ---- Across a quad ---- */

DEV float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEV float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* ---- One row ---- */

/* The maximum to subtract: a row without any visible key has -inf; 0 keeps (-inf) - (-inf) from giving NaN, all its
 * exponentials are 0. */
DEV float finite_max(float row_max)
{
    if (finishes_naturally()) /* the lowest finite biases times log2(e) are not finite */
        return fmaxf(row_max, -0x1p125f);
    return row_max == -CUDART_INF_F ? 0.0f : row_max;
}

/* By what a row's output is multiplied at the end, to 1 ulp; a row without a key gets output 0. A row's sum is never
 * denormal: its largest exponential is not. */
DEV float inverse_sum(float row_sum)
{
    return row_sum == 0.0f ? 0.0f : reciprocal_fast(row_sum);
}

/* The natural logarithm of the sum of exp(scale * score), from the score maximum and the sum relative to it. */
DEV float log_sum_exp(float row_max, float row_sum, float scale)
{
    return row_sum == 0.0f ? -CUDART_INF_F : row_max * scale + logf(row_sum);
}

/* ---- The end of a row: its sink, a score without a value that the sum takes in. A sink comes in once, where all keys
 * of a row have been added up. ---- */

typedef struct sunk_row {
    float max, sum; /* power of two, and the sum relative to it */
    float weight;   /* of what was relative to the reference */
} sunk_row;

/* reference, sum: of all keys, as log_sum_exp takes them; the reference in finished scores. A sink may exceed the
 * reference by any amount, and a row without a key has a reference of -inf: neither overflows. Reads global memory:
 * sinks. */
DEV sunk_row join_sink(const fwd_args &a, int head, float reference, float sum)
{
    const float scaled = reference * score_scale_log2(a), sink = a.sinks[head] * LOG2_E;
    sunk_row r;
    r.max = fmaxf(scaled, sink);
    r.weight = exp2_fast(scaled - finite_max(r.max));
    r.sum = sum * r.weight + exp2_fast(sink - finite_max(r.max));
    return r;
}

/* By what the outputs of a row are multiplied, see inverse_sum. */
DEV float row_factor(const fwd_args &a, int head, float reference, float sum)
{
    if (has_term(FWD_TERM_SINKS) && a.sinks != nullptr) {
        const sunk_row r = join_sink(a, head, reference, sum);
        return r.weight * inverse_sum(r.sum);
    }
    return inverse_sum(sum);
}

/* The log-sum-exp of a row. */
DEV float row_lse(const fwd_args &a, int head, float reference, float sum)
{
    if (has_term(FWD_TERM_SINKS) && a.sinks != nullptr) {
        const sunk_row r = join_sink(a, head, reference, sum);
        return log_sum_exp(r.max, r.sum, LN_2);
    }
    return log_sum_exp(reference, sum, score_scale(a));
}

/* ---- The two rows of a lane ---- */

typedef struct lane_rows {
    float max[2];    /* the references, of raw scores */
    float offset[2]; /* the same, finite, times scale_log2, less the shift: what exponents are relative to */
    float sum[2];    /* of this lane's exponentials; lanes of a quad are added at the end */
} lane_rows;

/* 16-bit probabilities may exceed 1 by 2^RESCALE_THRESHOLD: sums and products of such stay far from the end of fp16's
 * and float's range. */
enum {
    RESCALE_THRESHOLD = 8
};

/* Over the lane's own columns. CHAINS: of dependent comparisons for a row; two hide latency and cost a register. */
template <int CHAINS = 1, int ELEMS> DEV void lane_max(float (&max)[2], const float (&s)[ELEMS])
{
    float chains[2][CHAINS];
#pragma unroll
    for (int i = 0; i < ELEMS; i++) {
        const int nth = i / 4 * 2 + i % 2; /* of the row's */
        float &chain = chains[i % 4 / 2][nth % CHAINS];
        chain = nth < CHAINS ? s[i] : fmaxf(chain, s[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
        max[h] = fmaxf(chains[h][0], chains[h][CHAINS - 1]);
}

/* Exponentials are 2^SHIFT times as large as relative to the maximum alone. */
template <int SHIFT = 0> DEV float offset_of(float max, float scale_log2)
{
    return finite_max(max) * scale_log2 - SHIFT;
}

/* The rows of the first key tile: max are the lane's own maxima. */
template <int SHIFT = 0> DEV void start_rows(lane_rows &r, const float (&max)[2], float scale_log2)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.max[h] = quad_max(max[h]);
        r.offset[h] = offset_of<SHIFT>(r.max[h], scale_log2);
        r.sum[h] = 0.0f;
    }
}

/* Whether a row of the warp has grown beyond its reference by more than the threshold, in raw scores: powers of two
 * divided by scale_log2. The answer is the same in the whole warp. */
DEV int any_row_exceeds(const lane_rows &r, const float (&max)[2], float raw_threshold)
{
    return __any_sync(~0u, max[0] > r.max[0] + raw_threshold || max[1] > r.max[1] + raw_threshold);
}

/* Raises the references of the rows whose maxima exceed them by more than the threshold to these maxima. The other rows
 * of the warp keep theirs, so that what a row gives depends on no other row. max: of the lane's own columns. What has
 * been added up relative to the old references, other than r.sum, is to be multiplied by `factor`. */
template <int SHIFT = 0>
DEV void raise_references(lane_rows &r, float (&factor)[2], const float (&max)[2], float scale_log2,
                          float raw_threshold = 0.0f)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float row_max = quad_max(max[h]), raised = row_max > r.max[h] + raw_threshold ? row_max : r.max[h];
        const float offset = offset_of<SHIFT>(raised, scale_log2);
        factor[h] = raised == r.max[h] ? 1.0f : exp2_fast(r.max[h] * scale_log2 - SHIFT - offset);
        r.sum[h] *= factor[h];
        r.max[h] = raised;
        r.offset[h] = offset;
    }
}

/* Elements [first, end) become exponentials. */
template <int ELEMS> DEV void exponentiate(float (&s)[ELEMS], const lane_rows &r, float scale_log2, int first, int end)
{
#pragma unroll
    for (int i = first; i < end; i++)
        s[i] = exp2_fast(exponent_of(s[i], scale_log2, r.offset[i % 4 / 2]));
}

/* All of a tile become exponentials, and are added to the rows' sums. EVERY: so many groups of columns leave one to the
 * multiply-add lanes; 0: none. */
template <int EVERY = 0, int ELEMS> DEV void exponentiate_and_sum(float (&s)[ELEMS], lane_rows &r, float scale_log2)
{
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < ELEMS; i++) {
        const float exponent = exponent_of(s[i], scale_log2, r.offset[i % 4 / 2]);
        s[i] = EVERY > 0 && i / 4 % max(EVERY, 1) == EVERY - 1 ? exp2_by_polynomial(exponent) : exp2_fast(exponent);
        sum[i % 4 / 2] += s[i];
    }
    r.sum[0] += sum[0];
    r.sum[1] += sum[1];
}

template <int ELEMS> DEV void scale_output(float (&o)[ELEMS], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < ELEMS; i++)
        o[i] *= factor[i % 4 / 2];
}

#endif
