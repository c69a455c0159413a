/* Rows of float32 from accumulators of 16-bit inputs: partial results, which lose nothing before they are merged
 * (acr_merge). */
#ifndef ACR_DEVICE_ATTENTION_EPILOGUE_F32_CUH
#define ACR_DEVICE_ATTENTION_EPILOGUE_F32_CUH

#include "cuda/device/attention/epilogue.cuh"

/* As store_row: a lane has columns 8c + 2 (lane % 4) and the next in o[4c + 2h] and the next. Neighbouring lanes
 * exchange two c, so that a lane stores 4 columns, 16 bytes; a row's `to` and `columns` are those of float32. */
template <int ELEMS> DEV int store_row_f32(const row_store &r, const float (&o)[ELEMS], int h, int lane)
{
    static_assert(ELEMS % 8 == 0, "two chunks of 8 columns at a time");
    float probe = 0.0f; /* NaN where a value is not finite */
#pragma unroll
    for (int c = 0; c < ELEMS / 4; c += 2) {
        uint32_t x[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float low = o[4 * (c + i) + 2 * h] * r.factor, high = o[4 * (c + i) + 2 * h + 1] * r.factor;
            probe = fmaf(low, 0.0f, fmaf(high, 0.0f, probe));
            x[i][0] = __float_as_uint(low);
            x[i][1] = __float_as_uint(high);
        }
        const int column = 8 * (c + lane % 2) + lane % 4 / 2 * 4;
        const uint4 values = join_neighbours(x), none = {0, 0, 0, 0};
        if (r.exists && column < r.columns)
            *(uint4 *)(r.to + column * 4) = r.factor != 0.0f ? values : none;
    }
    return probe == 0.0f;
}

#endif
