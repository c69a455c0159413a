/* The middle of the unfused baseline (cublas.c): softmax of scores that a matrix product has written, one
 * warp a row, read twice. Not an attention kernel: it is in no list, and only the bench launches it. Parameters:
 * SCORES and ELEMENT, types of scores and weights.
 *
 * Takes fwd_args in which q points to the scores, already scaled, and o to the weights, both packed
 * [batch, q_heads, q_len, kv_len]. Keys that a mask hides get the weight 0: the next product multiplies all. */
#include "fwd_args.h"

#include <math_constants.h>

#include "cuda/device/isa/element.cuh"
#include "cuda/device/attention/visible.cuh"

enum {
    ROWS = 8, /* of a CTA */
    VECTOR = 8
};

DEV float max_of_warp(float x)
{
    for (int distance = WARP_THREADS / 2; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

DEV float sum_of_warp(float x)
{
    for (int distance = WARP_THREADS / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

/* WIDTH neighbouring elements in registers, moved in pieces of up to 16 bytes. */
template <int TYPE, int WIDTH> struct piece {
    enum {
        ELEM_BYTES = TYPE == ACR_F32 ? 4 : 2,
        BYTES = WIDTH * ELEM_BYTES
    };
    __align__(BYTES < 16 ? BYTES : 16) unsigned char bytes[BYTES];
};

/* The largest score of the row and the sum of the exponentials relative to it, over `seen` keys. */
template <int WIDTH> DEV void read_row(const void *scores, int64_t row, int seen, float *top, float *sum)
{
    float max = -CUDART_INF_F, total = 0.0f;
    for (int first = threadIdx.x % WARP_THREADS * WIDTH; first < seen; first += WARP_THREADS * WIDTH) {
        const auto loaded = ((const piece<SCORES, WIDTH> *)scores)[(row + first) / WIDTH];
        float x[WIDTH], local = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            x[i] = first + i < seen ? load_element<SCORES>(&loaded, i) : -CUDART_INF_F;
            local = fmaxf(local, x[i]);
        }
        const float grown = fmaxf(max, local);
        const float base = grown == -CUDART_INF_F ? 0.0f : grown;
        total *= __expf(max - base);
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            total += __expf(x[i] - base);
        max = grown;
    }
    *top = max_of_warp(max);
    *sum = sum_of_warp(*top == -CUDART_INF_F ? 0.0f : total * __expf(max - *top));
}

template <int WIDTH>
DEV void write_row(void *weights, const void *scores, int64_t row, int seen, int kv_len, float top, float sum)
{
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f; /* a row that sees no key: weights 0 */
    for (int first = threadIdx.x % WARP_THREADS * WIDTH; first < kv_len; first += WARP_THREADS * WIDTH) {
        const auto loaded = ((const piece<SCORES, WIDTH> *)scores)[(row + first) / WIDTH];
        piece<ELEMENT, WIDTH> out;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const float weight = __expf(load_element<SCORES>(&loaded, i) - top) * inverse;
            store_element<ELEMENT>(&out, i, first + i < seen ? weight : 0.0f);
        }
        ((piece<ELEMENT, WIDTH> *)weights)[(row + first) / WIDTH] = out;
    }
}

template <int WIDTH> DEV void do_row(const fwd_args &a, int64_t row, int seen)
{
    float top, sum;
    read_row<WIDTH>(a.q, row, seen, &top, &sum);
    write_row<WIDTH>(a.o, a.q, row, seen, a.kv_len, top, sum);
}

extern "C" __global__ void __launch_bounds__(ROWS *WARP_THREADS) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    wait_for_previous_kernel();
    const int batch = blockIdx.z, head = blockIdx.y, q = blockIdx.x * ROWS + threadIdx.x / WARP_THREADS;
    if (q >= a.q_len)
        return;
    const int seen = visible_end(entry_of_batch(a, batch), q);
    const int64_t row = (((int64_t)batch * a.q_heads + head) * a.q_len + q) * a.kv_len;
    if (a.kv_len % VECTOR == 0)
        do_row<VECTOR>(a, row, seen);
    else
        do_row<1>(a, row, seen);
}
