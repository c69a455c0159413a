/* fwd_short's softmax, which looks for no running maximum. A row's scores are relative to a reference, the maximum over
 * the row's first 16 keys of each consumer, and to 2^SHIFT. Every exponential is at most the row's sum, so a sum that
 * is not large proves that none overflowed; otherwise the row is computed again, with the true maximum
 * (second_pass.cuh). */
#ifndef ACR_CUDA_FWD_SHORT_SOFTMAX_CUH
#define ACR_CUDA_FWD_SHORT_SOFTMAX_CUH

#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/isa/fragment.cuh"
#include "cuda/kernels/fwd_short/consumer.cuh"

enum {
    /* Probabilities are 2^SHIFT relative to the reference: in fp16 they may rise by 2^24 before they overflow. */
    SHIFT = BF16 ? 0 : -8
};

/* Whether one consumer's sum of a row leaves it open that an exponential or its product with V overflowed, as NaN
 * does. */
DEV int is_large(float sum)
{
    return !(sum < (BF16 ? 0x1p100f : 60000.0f));
}

/* The maximum over the lane's columns among the first so many eights. */
DEV float row_max(const score_tile &s, int row, const int eights)
{
    float max = fmaxf(s[2 * row], s[2 * row + 1]);
#pragma unroll
    for (int i = 1; i < eights; i++)
        max = fmaxf(max, fmaxf(s[4 * i + 2 * row], s[4 * i + 2 * row + 1]));
    return max;
}

/* A row whose scores of the keys that a reference comes from are all -inf, though it sees keys among them, has none:
 * its sum becomes NaN, which asks for the second pass. first, end: of these keys, relative to the consumer's first;
 * c.seen is relative to the lane's. */
DEV void mark_without_reference(const consumer &c, lane_rows &r, int row, int first, int end)
{
    const int lane_first = 2 * (c.lane % 4);
    if (r.max[row] == -CUDART_INF_F && c.seen.end[row] > first && (!WINDOW || c.seen.first[row] < end - lane_first) &&
        (!has_term(FWD_TERM_LIMITS) || c.seen.first[row] < c.seen.end[row]))
        r.sum[row] = CUDART_NAN_F;
}

/* From the scores of chunk 0. Keys are seen from the first on, so a row that sees none of the first 16 sees none of
 * this consumer's. With WINDOW a row may see a part of the chunk, or none. */
DEV void choose_references(const consumer &c, lane_rows &r, const score_tile &s)
{
    const int eights = WINDOW ? CHUNK_KEYS / 8 : 2;
    const float max[2] = {row_max(s, 0, eights), row_max(s, 1, eights)};
    start_rows<SHIFT>(r, max, c.scale_log2);
    mark_without_reference(c, r, 0, 0, CHUNK_KEYS);
    mark_without_reference(c, r, 1, 0, CHUNK_KEYS);
}

/* WINDOW, from the scores of chunk 1, for rows that saw nothing of chunk 0: their sum is 0 yet. The first keys of the
 * tile's rows lie within 64 keys, so a row that sees nothing of chunk 1 either sees none of this consumer's keys; but
 * with FWD_TERM_LIMITS a tile's rows may be of two chunks of the problem, and those of the second see later keys. */
DEV void choose_late_references(const consumer &c, lane_rows &r, const score_tile &s)
{
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const float max = quad_max(row_max(s, row, CHUNK_KEYS / 8));
        if (r.max[row] == -CUDART_INF_F) {
            r.max[row] = max;
            r.offset[row] = offset_of<SHIFT>(max, c.scale_log2);
            mark_without_reference(c, r, row, KV_TILE, has_term(FWD_TERM_LIMITS) ? INT32_MAX : KV_TILE + CHUNK_KEYS);
        }
    }
}

/* Here and below: without `top`, the lane's row of the top half sees none of the keys, and is left out. */
DEV void find_exponents(const consumer &c, const lane_rows &r, score_tile &t, const score_tile &s, const int top)
{
#pragma unroll
    for (int i = 0; i < CHUNK_KEYS / 2; i++)
        if (top || i / 2 % 2)
            t[i] = exponent_of(s[i], c.scale_log2, r.offset[i / 2 % 2]);
}

/* A group is 8 keys. */
DEV void exponentiate(score_tile &t, int group, const int top)
{
#pragma unroll
    for (int i = 4 * group; i < 4 * group + 4; i++)
        if (top || i / 2 % 2)
            t[i] = exp2_fast(t[i]);
}

DEV void pack_group(probability_tile &p, const score_tile &t, int group, const int top)
{
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const int i = 4 * group + 2 * row;
        if (top || row)
            p[i / 2] = pack<BF16>(t[i], t[i + 1]);
        else
            p[i / 2] = ONE_HALF ? pack<BF16>(t[i + 2], t[i + 3]) : 0; /* anything finite would do; this compiles best */
    }
}

DEV void add_and_pack(lane_rows &r, probability_tile &p, const score_tile &t, int group, const int top)
{
#pragma unroll
    for (int row = 0; row < 2; row++)
        if (top || row)
            r.sum[row] += t[4 * group + 2 * row] + t[4 * group + 2 * row + 1];
    pack_group(p, t, group, top);
}

#endif
