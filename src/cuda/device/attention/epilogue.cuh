/* Outputs that a hidden value spoilt. A value of V that is not finite reaches, as 0 * NaN, also the rows of its key
 * tile that a mask hides it from; such outputs are computed again from global memory, one by one: right, and slow, and
 * only for such inputs. */
#ifndef ACR_DEVICE_ATTENTION_EPILOGUE_CUH
#define ACR_DEVICE_ATTENTION_EPILOGUE_CUH

#include "cuda/device/isa/element.cuh"
#include "fwd_args.h"
#include "cuda/device/attention/softmax.cuh"

/* Where a row is, and how the keys that it sees are weighed: a key by 2^(score * scale_log2 - offset) * factor. */
typedef struct spoilt_row {
    int batch, head, row;
    int q_begin, kv_begin; /* the first rows of its sequence in a packed batch; else 0 */
    int keys_end;
    float scale_log2, offset, factor;
} spoilt_row;

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

/* Every fourth column of the row, from the lane's on. TYPE is that of the inputs. */
template <int TYPE, int OUT_TYPE = TYPE> DEV void repair_row(const fwd_args &a, const spoilt_row &r, int lane)
{
    const int kv_head = r.head / a.group, keys_end = r.keys_end;
    const int64_t q = r.batch * a.q_stride.batch + r.head * a.q_stride.head + (r.q_begin + r.row) * a.q_stride.row;
    const int64_t k = r.batch * a.k_stride.batch + kv_head * a.k_stride.head + r.kv_begin * a.k_stride.row,
                  v = r.batch * a.v_stride.batch + kv_head * a.v_stride.head + r.kv_begin * a.v_stride.row;
    const int64_t o = r.batch * a.o_stride.batch + r.head * a.o_stride.head + (r.q_begin + r.row) * a.o_stride.row;
    for (int column = lane % 4; column < a.v_dim; column += 4) {
        if (isfinite(load_output<OUT_TYPE>(a, o + column)))
            continue;
        int key = 0;
        while (key < keys_end && isfinite(load_element<TYPE>(a.v, v + key * a.v_stride.row + column)))
            key++;
        if (key < keys_end) /* the row sees such a value itself */
            continue;
        float output = 0.0f;
        for (key = 0; key < keys_end; key++) {
            float score = 0.0f;
            for (int d = 0; d < a.qk_dim; d++)
                score += load_element<TYPE>(a.q, q + d) * load_element<TYPE>(a.k, k + key * a.k_stride.row + d);
            output += exp2_fast(fmaf(score, r.scale_log2, -r.offset)) *
                      load_element<TYPE>(a.v, v + key * a.v_stride.row + column);
        }
        store_output<OUT_TYPE>(a, o + column, output * r.factor);
    }
}

#endif
