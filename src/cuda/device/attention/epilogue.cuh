/* How finished rows leave: rows and log-sum-exp to global memory, and the NaN fix-up. */
#ifndef ACR_DEVICE_ATTENTION_EPILOGUE_CUH
#define ACR_DEVICE_ATTENTION_EPILOGUE_CUH

#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/attention/visible.cuh"
#include "cuda/device/isa/element.cuh"
#include "cuda/device/isa/fragment.cuh"
#include "fwd_args.h"

/* ---- Where rows go ---- */

/* Of one row of the output: element index of its first column. */
DEV int64_t output_index(const fwd_args &a, const sequence &s, int batch, int head, int row)
{
    return batch * a.o_stride.batch + head * a.o_stride.head + (s.q_begin + row) * a.o_stride.row;
}

/* Where the log-sum-exp of a sequence's first row is. */
DEV float *find_lse(const fwd_args &a, const sequence &s, int batch, int head)
{
    return is_packed(a) ? a.lse + (int64_t)head * a.q_total + s.q_begin
                        : a.lse + ((int64_t)batch * a.q_heads + head) * a.q_len;
}

/* ---- Rows of 16-bit elements from accumulators: a lane's row h, 16 bytes at a time. ---- */

/* What is needed of a row beside its values. */
typedef struct row_store {
    char *to;     /* the row's first byte */
    bool exists;  /* else nothing is stored */
    int columns;  /* of the output, a multiple of 8 */
    float factor; /* of all values; 0: the row has seen no key, and becomes 0 whatever the accumulators hold */
} row_store;

DEV void store_chunk(const row_store &r, int column, const uint4 &values)
{
    const uint4 none = {0, 0, 0, 0};
    if (r.exists && column < r.columns)
        *(uint4 *)(r.to + column * 2) = r.factor != 0.0f ? values : none;
}

/* Accumulators of V as it is: columns 8c + 2 (lane % 4) and the next in o[4c + 2h] and the next. Returns whether all
 * values are finite. All lanes of a quad come together. */
template <int IS_BF16, int ELEMS> DEV int store_row(const row_store &r, const float (&o)[ELEMS], int h, int lane)
{
    float probe = 0.0f; /* NaN where a value is not finite */
#pragma unroll
    for (int c = 0; c < ELEMS / 4; c += 4) {
        uint32_t x[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 4 && c + i < ELEMS / 4; i++) {
            const float low = o[4 * (c + i) + 2 * h] * r.factor, high = o[4 * (c + i) + 2 * h + 1] * r.factor;
            probe = fmaf(low, 0.0f, fmaf(high, 0.0f, probe));
            x[i] = pack<IS_BF16>(low, high);
        }
        transpose_quad(x);
        store_chunk(r, 8 * (c + lane % 4), {x[0], x[1], x[2], x[3]});
    }
    return probe == 0.0f;
}

/* Accumulators of V of e4m3 transposed by pairs of bytes: of every 16 dims the first 8 columns are the even ones, the
 * other 8 the odd ones, so lane i of a quad holds dims 4i..4i + 3. Neighbouring lanes exchange halves of two such 16;
 * then each has 8 dims in a row. The output's type is known with the arguments only. */
template <int DIMS, int ELEMS>
DEV int store_even_odd_row(const row_store &r, const float (&o)[ELEMS], int h, int is_bf16, int lane)
{
    float probe = 0.0f;
#pragma unroll
    for (int dims = 0; dims < DIMS; dims += 32) {
        uint32_t x[2][2]; /* of the first and the second 16 dims */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int even_at = 4 * (dims / 8 + 2 * half) + 2 * h, odd_at = even_at + 4;
            const float d0 = o[even_at] * r.factor, d1 = o[odd_at] * r.factor, d2 = o[even_at + 1] * r.factor,
                        d3 = o[odd_at + 1] * r.factor;
            probe = fmaf(d0, 0.0f, fmaf(d1, 0.0f, fmaf(d2, 0.0f, fmaf(d3, 0.0f, probe))));
            x[half][0] = pack_output(d0, d1, is_bf16);
            x[half][1] = pack_output(d2, d3, is_bf16);
        }
        store_chunk(r, dims + 16 * (lane % 2) + lane % 4 / 2 * 8, join_neighbours(x));
    }
    return probe == 0.0f;
}

/* ---- The NaN fix-up ----
 *
 * A key that a row does not see has probability 0 in its tile's product, but 0 * NaN is NaN: a value of V that is not
 * finite reaches the rows that it is hidden from. Such outputs are found when they are stored, and computed again from
 * global memory, one by one: right, and slow, and only for such inputs. Rows of V that do not exist are no matter of
 * this: loaders leave zeros there. */

/* A stored row, and how its keys were weighed: a key by 2^exponent_of(score, scale_log2, offset) * factor. */
typedef struct stored_row {
    int batch, head, row;             /* batch: the entry; of a packed batch, whose batch strides are 0, the sequence */
    int q_begin, kv_begin;            /* the first rows of its sequence in a packed batch; else 0 */
    float scale_log2, offset, factor; /* scale_log2: see score_scale_log2 */
} stored_row;

/* The output's type where the arguments say it: of e4m3 inputs. */
enum {
    ACR_BF16_OR_F16 = 0
};

template <int TYPE> DEV float load_output(const fwd_args &a, int64_t at)
{
    if constexpr (TYPE == ACR_BF16_OR_F16)
        return a.out_bf16 ? load_element<ACR_BF16>(a.o, at) : load_element<ACR_F16>(a.o, at);
    else
        return load_element<TYPE>(a.o, at);
}

template <int TYPE> DEV void store_output(const fwd_args &a, int64_t at, float value)
{
    if constexpr (TYPE == ACR_BF16_OR_F16) {
        if (a.out_bf16)
            store_element<ACR_BF16>(a.o, at, value);
        else
            store_element<ACR_F16>(a.o, at, value);
    } else
        store_element<TYPE>(a.o, at, value);
}

/* A row's keys one by one, in a line that is compiled with terms. */
typedef struct row_rules {
    row_view view;
    row_terms terms;
} row_rules;

DEV row_rules find_row_rules(const fwd_args &a, const visible_entry &e, const stored_row &r)
{
    if (!TERMS)
        return {};
    return {find_row_view(a, e, r.batch, r.row), find_row_terms(a, e, r.batch, r.head, r.row)};
}

/* Of a key between the first and the last that the row sees. */
DEV bool reaches(const fwd_args &a, const row_rules &rules, int key)
{
    return !(TERMS) || (sees_key(rules.view, key) && !hides_key(a, rules.terms, key));
}

/* Where q[row] is. */
DEV int64_t query_index(const fwd_args &a, const stored_row &r)
{
    return r.batch * a.q_stride.batch + r.head * a.q_stride.head + (r.q_begin + r.row) * a.q_stride.row;
}

/* Keys one after another, as dense and packed tensors hold them. What a row is computed from: element indices of its
 * query, and of the first key and value of its sequence. */
typedef struct dense_keys {
} dense_keys;
typedef struct dense_inputs {
    int64_t q, k, v;
} dense_inputs;

DEV dense_inputs find_inputs(const fwd_args &a, const dense_keys &, const stored_row &r)
{
    const int kv_head = r.head / a.group;
    return {query_index(a, r), r.batch * a.k_stride.batch + kv_head * a.k_stride.head + r.kv_begin * a.k_stride.row,
            r.batch * a.v_stride.batch + kv_head * a.v_stride.head + r.kv_begin * a.v_stride.row};
}

template <int TYPE> DEV float load_k(const fwd_args &a, const dense_inputs &from, int key, int column)
{
    return load_element<TYPE>(a.k, from.k + key * a.k_stride.row + column);
}

template <int TYPE> DEV float load_v(const fwd_args &a, const dense_inputs &from, int key, int column)
{
    return load_element<TYPE>(a.v, from.v + key * a.v_stride.row + column);
}

/* Of a row that sees no keys but some in `seen`, every fourth column, from the lane's on. TYPE is that of the inputs;
 * `from` says where query and keys are: dense_inputs, or paged_inputs (pages.cuh). */
template <int TYPE, int OUT_TYPE, typename INPUTS>
DEV void fix_row(const fwd_args &a, const INPUTS &from, const stored_row &r, const row_rules &rules,
                 const visible_keys &seen, int lane)
{
    const int64_t o = r.batch * a.o_stride.batch + r.head * a.o_stride.head + (r.q_begin + r.row) * a.o_stride.row;
    for (int column = lane % 4; column < a.v_dim; column += 4) {
        if (isfinite(load_output<OUT_TYPE>(a, o + column)))
            continue;
        int key = seen.first;
        while (key < seen.end && (((TERMS) && !reaches(a, rules, key)) || isfinite(load_v<TYPE>(a, from, key, column))))
            key++;
        if (key < seen.end) /* the row sees such a value itself */
            continue;
        float output = 0.0f;
        for (key = seen.first; key < seen.end; key++) {
            if constexpr ((TERMS) != 0)
                if (!reaches(a, rules, key))
                    continue;
            float score = 0.0f;
            for (int d = 0; d < a.qk_dim; d++)
                score += load_element<TYPE>(a.q, from.q + d) * load_k<TYPE>(a, from, key, d);
            if (finishes_scores())
                score = finish_score(a, rules.terms, score, key);
            output += exp2_fast(exponent_of(score, r.scale_log2, r.offset)) * load_v<TYPE>(a, from, key, column);
        }
        store_output<OUT_TYPE>(a, o + column, output * r.factor);
    }
}

/* Fixes a row that its quad has just stored, if some value of the warp's rows is not finite: `finite` is what the
 * lane's store has returned. row_sum: of the row's exponentials; where it is not finite, the row's own keys made it so.
 * `keys` are dense_keys, or paged_keys (pages.cuh). The whole warp comes together, whether its rows exist or not. */
template <int TYPE, int OUT_TYPE, typename KEYS>
DEV void fix_hidden_nan_of(const fwd_args &a, const KEYS &keys, const visible_entry &e, const stored_row &r,
                           float row_sum, int finite, int lane)
{
    if (!hides_keys(a, e) || !__any_sync(~0u, !finite))
        return;
    __threadfence();
    __syncwarp(); /* the values are other lanes' */
    if (r.row < e.q_len && isfinite(row_sum)) {
        const visible_keys seen = find_visible_keys(a, e, r.batch, r.row, 1);
        const row_rules rules = find_row_rules(a, e, r);
        fix_row<TYPE, OUT_TYPE>(a, find_inputs(a, keys, r), r, rules, seen, lane);
    }
}

template <int TYPE, int OUT_TYPE = TYPE>
DEV void fix_hidden_nan(const fwd_args &a, const visible_entry &e, const stored_row &r, float row_sum, int finite,
                        int lane)
{
    fix_hidden_nan_of<TYPE, OUT_TYPE>(a, dense_keys{}, e, r, row_sum, finite, lane);
}

#endif
