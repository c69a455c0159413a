/* Outputs that a hidden value spoilt. A value of V that is not finite reaches, as 0 * NaN, also the rows of its key
 * tile that a mask hides it from; such outputs are computed again from global memory, one by one: right, and slow, and
 * only for such inputs. */
#ifndef ACR_DEVICE_REPAIR_CUH
#define ACR_DEVICE_REPAIR_CUH

#include "element.cuh"
#include "fwd_args.h"
#include "softmax.cuh"

/* Of one row, which sees keys_end keys, every fourth column from the lane's: a key's weight is 2^(score * scale_log2 -
 * offset) * factor. */
template <int TYPE>
DEV void repair_row(const fwd_args &a, int batch, int head, int row, int keys_end, float offset, float factor, int lane)
{
    const int kv_head = head / a.group;
    const int64_t q = batch * a.q_stride.batch + head * a.q_stride.head + row * a.q_stride.row;
    const int64_t k = batch * a.k_stride.batch + kv_head * a.k_stride.head,
                  v = batch * a.v_stride.batch + kv_head * a.v_stride.head;
    const int64_t o = batch * a.o_stride.batch + head * a.o_stride.head + row * a.o_stride.row;
    for (int column = lane % 4; column < a.v_dim; column += 4) {
        if (isfinite(load_element<TYPE>(a.o, o + column)))
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
            output += exp2_fast(fmaf(score, a.scale_log2, -offset)) *
                      load_element<TYPE>(a.v, v + key * a.v_stride.row + column);
        }
        store_element<TYPE>(a.o, o + column, output * factor);
    }
}

#endif
