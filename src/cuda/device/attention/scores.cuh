/* What happens to a score between its product and its exponential, in the order of the library's header: scale,
 * softcap, bias (additive, ALiBi), visibility.
 *
 * A score stays as the product gave it ("raw") until the exponential, where one multiply-add scales it and subtracts
 * the row's offset: thresholds and maxima are of raw scores. A softcap makes of it a number between -1 and 1, whose
 * scale is the cap. Only where numbers are added to scores, biases or ALiBi's, finish_scores makes every score a power
 * of two, by which its exponential is taken: a positive factor no longer says how two scores differ. score_scale_log2
 * and score_scale say which, and whoever multiplies a score, a maximum or a reference asks them.
 *
 * Softcap is taken by tanh.approx.f32, whose relative error of 2^-11 moves a score by up to softcap * 2^-11; an
 * includer with time for it defines EXACT_SOFTCAP. */
#ifndef ACR_DEVICE_ATTENTION_SCORES_CUH
#define ACR_DEVICE_ATTENTION_SCORES_CUH

#include "cuda/device/attention/visible.cuh"
#include "cuda/device/isa/element.cuh"
#include "cuda/device/isa/math.cuh"

#ifndef EXACT_SOFTCAP
#define EXACT_SOFTCAP 0
#endif

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

/* Whether finish_scores does anything but hide keys. */
DEV constexpr bool finishes_scores(void)
{
    return has_term(FWD_TERM_CAP | FWD_TERM_BIAS | FWD_TERM_ALIBI);
}

/* Whether it adds numbers to scores, the same for all threads. Asked of the problem, but in lines that read biases one
 * by one, which have no registers for the answer: there a score is made a power of two in any case. */
DEV bool adds_numbers(const fwd_args &a)
{
    if (MASKS || BIAS_FIRST)
        return false;
    if (has_term(FWD_TERM_BIAS))
        return !BIAS_TILES || (a.bias != nullptr && a.bias_type != FWD_BIAS_MASK);
    return has_term(FWD_TERM_ALIBI) && a.slopes != nullptr;
}

/* Whether it then makes scores natural exponents, not powers of two, in lines whose biases come as tiles
 * (bias_tiles.cuh): there a bias is added as it is. */
DEV constexpr bool finishes_naturally(void)
{
    return BIAS_TILES > 0;
}

DEV bool is_capped(const fwd_args &a)
{
    return has_term(FWD_TERM_CAP) && a.softcap != 0.0f;
}

#define LOG2_E 1.442695041f
#define LN_2 0.693147181f

/* What a finished score is multiplied by to be a power of two. */
DEV float score_scale_log2(const fwd_args &a)
{
    if (adds_numbers(a))
        return finishes_naturally() ? LOG2_E : 1.0f;
    return is_capped(a) ? a.softcap_out : a.scale_log2;
}

/* What a finished score is multiplied by to be a natural exponent. */
DEV float score_scale(const fwd_args &a)
{
    if (adds_numbers(a))
        return finishes_naturally() ? 1.0f : LN_2;
    return is_capped(a) ? a.softcap : a.scale;
}

/* ---- Softcap and biases ---- */

/* What they need of one row. */
typedef struct row_terms {
    float slope;      /* ALiBi's, times log2(e); 0: none */
    int position;     /* of the row among the keys */
    const char *bias; /* its first key's element, or nullptr */
} row_terms;

DEV int bias_elem_bytes(int type)
{
    return type == FWD_BIAS_F32 ? 4 : type == FWD_BIAS_MASK ? 1 : 2;
}

/* Rows beyond the entry's last count as the last. batch: the entry, of a packed batch the sequence. Reads global
 * memory: slopes. */
DEV row_terms find_row_terms(const fwd_args &a, const visible_entry &e, int batch, int head, int row)
{
    row_terms t = {0.0f, 0, nullptr};
    if (has_term(FWD_TERM_ALIBI) && a.slopes != nullptr) {
        t.slope = a.slopes[head] * LOG2_E;
        t.position = visible_position(e, row);
    }
    if (has_term(FWD_TERM_BIAS) && a.bias != nullptr)
        t.bias = (const char *)a.bias + (batch * a.bias_stride.batch + head * a.bias_stride.head +
                                         max(min(row, e.q_len - 1), 0) * a.bias_stride.row) *
                                            bias_elem_bytes(a.bias_type);
    return t;
}

/* A finite bias stays finite: the product of the lowest ones would overflow, and they hide no key. */
DEV float finished_bias(float bias)
{
    if (finishes_naturally())
        return bias;
    const float product = bias * LOG2_E;
    return product == -CUDART_INF_F && bias != -CUDART_INF_F ? -CUDART_MAX_NORMAL_F : product;
}

/* One element of the bias, of so many bytes, as what is added to a finished score; -inf hides the key. */
template <int BYTES> DEV float bias_of(uint32_t bits, int type)
{
    if constexpr (BYTES == 1)
        return bits != 0 ? 0.0f : -CUDART_INF_F;
    else if constexpr (BYTES == 4)
        return finished_bias(__uint_as_float(bits));
    else
        return finished_bias(type == FWD_BIAS_BF16 ? __uint_as_float(bits << 16) : f16_to_float((uint16_t)bits));
}

template <int BYTES> DEV uint32_t load_bits(const char *at)
{
    if constexpr (BYTES == 1)
        return *(const uint8_t *)at;
    else if constexpr (BYTES == 2)
        return *(const uint16_t *)at;
    else
        return *(const uint32_t *)at;
}

/* What a key hides from a row must reach it in no way: neither must an infinite or undefined score. */
DEV float add_bias(float score, float bias)
{
    return bias == -CUDART_INF_F ? bias : score + bias;
}

/* Of one key. */
DEV float find_bias(const fwd_args &a, const row_terms &t, int key)
{
    const char *at = t.bias + (int64_t)key * bias_elem_bytes(a.bias_type);
    if (a.bias_type == FWD_BIAS_F32)
        return bias_of<4>(load_bits<4>(at), FWD_BIAS_F32);
    if (a.bias_type == FWD_BIAS_MASK)
        return bias_of<1>(load_bits<1>(at), FWD_BIAS_MASK);
    return bias_of<2>(load_bits<2>(at), a.bias_type);
}

/* Whether the bias hides a key. */
DEV bool hides_key(const fwd_args &a, const row_terms &t, int key)
{
    return has_term(FWD_TERM_BIAS) && a.bias != nullptr && find_bias(a, t, key) == -CUDART_INF_F;
}

/* Two neighbouring elements, the second in the upper half; those from `end` on count as 0. is_aligned: they may be
 * loaded together. */
template <int BYTES> DEV uint64_t load_bias_pair(const char *row, int key, int end, bool is_aligned)
{
    const char *at = row + (int64_t)key * BYTES;
    if (is_aligned && key + 1 < end) {
        if constexpr (BYTES == 1) {
            const uint32_t pair = *(const uint16_t *)at;
            return pair & 0xff | (uint64_t)(pair >> 8) << 32;
        } else if constexpr (BYTES == 2) {
            const uint32_t pair = *(const uint32_t *)at;
            return pair & 0xffff | (uint64_t)(pair >> 16) << 32;
        } else {
            const uint2 pair = *(const uint2 *)at;
            return pair.x | (uint64_t)pair.y << 32;
        }
    }
    const uint64_t low = key < end ? load_bits<BYTES>(at) : 0;
    return low | (uint64_t)(key + 1 < end ? load_bits<BYTES>(at + BYTES) : 0) << 32;
}

/* first_key: the lane's first of the tile; nothing is read from key `end` on. */
template <int LAYOUT, int BYTES, int ELEMS>
DEV void add_biases(float (&s)[ELEMS], const row_terms (&t)[2], int type, int first_key, int end)
{
#pragma unroll
    for (int i = 0; i < ELEMS; i++) {
        const int key = first_key + key_at<LAYOUT>(i);
        const char *row = t[row_at<LAYOUT>(i)].bias;
        if constexpr (LAYOUT == BY_ROWS) { /* its first keys are even, so that rows alone say what is aligned */
            if (i % 2 == 0) {
                const uint64_t pair = load_bias_pair<BYTES>(row, key, end, (uintptr_t)row % (2 * BYTES) == 0);
                s[i] = add_bias(s[i], bias_of<BYTES>((uint32_t)pair, type));
                s[i + 1] = add_bias(s[i + 1], bias_of<BYTES>((uint32_t)(pair >> 32), type));
            }
        } else
            s[i] = add_bias(s[i], bias_of<BYTES>(key < end ? load_bits<BYTES>(row + (int64_t)key * BYTES) : 0, type));
    }
}

/* Of a raw score. */
DEV float cap_score(const fwd_args &a, float score)
{
    const float capped = EXACT_SOFTCAP ? tanhf(a.softcap_in * score) : tanh_fast(a.softcap_in * score);
    return adds_numbers(a) ? a.softcap_out * capped : capped;
}

/* One score, for loops over single keys: from raw to finished. Visibility comes after. */
DEV float finish_score(const fwd_args &a, const row_terms &t, float score, int key)
{
    if (is_capped(a))
        score = cap_score(a, score);
    else /* selected: a branch would spill where biases come as tiles */
        score *= adds_numbers(a) ? finishes_naturally() ? a.scale : a.scale_log2 : 1.0f;
    if (has_term(FWD_TERM_BIAS) && a.bias != nullptr)
        score = add_bias(score, BIAS_FIRST ? find_bias(a, t, key) / a.scale : find_bias(a, t, key));
    if (has_term(FWD_TERM_ALIBI))
        score -= t.slope * fabsf((float)(t.position - key));
    return score;
}

/* The same of a tile. first_key: the lane's first key of it; end: one past the last key that exists. */
template <int LAYOUT, int ELEMS>
DEV void apply_terms(float (&s)[ELEMS], const fwd_args &a, const row_terms (&t)[2], int first_key, int end)
{
    if (is_capped(a)) {
#pragma unroll
        for (int i = 0; i < ELEMS; i++)
            s[i] = cap_score(a, s[i]);
    } else if (adds_numbers(a)) {
#pragma unroll
        for (int i = 0; i < ELEMS; i++)
            s[i] *= a.scale_log2;
    }
    if (has_term(FWD_TERM_BIAS) && a.bias != nullptr) {
        if (a.bias_type == FWD_BIAS_F32)
            add_biases<LAYOUT, 4>(s, t, FWD_BIAS_F32, first_key, end);
        else if (a.bias_type == FWD_BIAS_MASK)
            add_biases<LAYOUT, 1>(s, t, FWD_BIAS_MASK, first_key, end);
        else
            add_biases<LAYOUT, 2>(s, t, a.bias_type, first_key, end);
    }
    if (has_term(FWD_TERM_ALIBI) && a.slopes != nullptr) {
        const float distance[2] = {(float)(t[0].position - first_key), (float)(t[1].position - first_key)};
#pragma unroll
        for (int i = 0; i < ELEMS; i++) {
            const int h = row_at<LAYOUT>(i);
            s[i] -= t[h].slope * fabsf(distance[h] - key_at<LAYOUT>(i));
        }
    }
}

/* ---- A tile of scores ---- */

/* Makes raw scores of one key tile ready for the softmax. Every family calls this, or one of those below, for every key
 * tile. masked: whether some row does not see some key of the tile; v: which keys the lane's rows see. */
template <int LAYOUT = BY_ROWS, int ELEMS>
DEV void finish_scores(float (&s)[ELEMS], const row_keys &v, int key, int masked)
{
    if (masked)
        mask_scores<LAYOUT>(s, v, key);
}

template <int ELEMS> DEV void finish_transposed_scores(float (&s)[ELEMS], const row_keys &v, int key, int masked)
{
    finish_scores<TRANSPOSED>(s, v, key, masked);
}

/* The same with softcap and biases, in lines that are compiled with any. t: of the lane's two rows; first_column: the
 * lane's first key of tile 0; end: one past the last key that exists. */
template <int LAYOUT = BY_ROWS, int ELEMS>
DEV void finish_scores(float (&s)[ELEMS], const row_keys &v, int key, int masked, const fwd_args &a,
                       const row_terms (&t)[2], int first_column, int end)
{
    if (finishes_scores())
        apply_terms<LAYOUT>(s, a, t, key + first_column, end);
    finish_scores<LAYOUT>(s, v, key, masked);
}

/* The exponent, to base 2, of a score relative to its row's offset (softmax.cuh). */
DEV float exponent_of(float score, float scale_log2, float offset)
{
    return fmaf(score, scale_log2, -offset);
}

#endif
