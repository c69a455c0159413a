/* acr_merge on a GPU. Some lanes of a warp, a power of two, share a row: each weighs the parts by itself, since that
 * is few instructions beside what it loads, and merges 16 bytes of columns at a time. A warp writes a row's lse after
 * all of its lanes have read it: it may be the first part's.
 *
 * DTYPE, an acr_dtype: of the parts; PARTS: how many a launch can list (ops.def). */
#include "cuda/device/isa/common.cuh"
#include "cuda/ops/vector.cuh"
#include "op_args.h"

typedef struct merge_list {
    merge_part parts[PARTS];
} merge_list;

/* Columns [column, column + VEC) of a row. */
template <int VEC>
DEV void merge_run(const merge_args &a, const merge_list &list, const merge_weights &w, const merge_row &row,
                   int column)
{
    const int64_t part_at = merge_offset(&a.part_stride, row) + column, lse_at = merge_offset(&a.part_lse_stride, row);
    float sum[VEC];
#pragma unroll
    for (int i = 0; i < VEC; i++)
        sum[i] = 0.0f;
#pragma unroll 2
    for (int64_t i = 0; i < a.count; i++) {
        const merge_part part = merge_part_of(&a, list.parts, i);
        const float lse = part.lse[lse_at];
        if (lse == -OP_INFINITY)
            continue;
        const float weight = merge_weight(w, lse);
        float values[VEC];
        load_run<DTYPE>(values, part.o, part_at);
#pragma unroll
        for (int c = 0; c < VEC; c++)
            sum[c] = op_add(sum[c], op_mul(weight, values[c]));
    }
    store_run(a.out_dtype, a.o, merge_offset(&a.o_stride, row) + column, sum);
}

/* The lanes that share a row of so many runs. */
DEV int lanes_of(int runs)
{
    int lanes = 1;
    while (lanes < runs && lanes < WARP_THREADS)
        lanes *= 2;
    return lanes;
}

template <int VEC> DEV void merge_rows(const merge_args &a, const merge_list &list)
{
    const int lanes = lanes_of((a.dim + VEC - 1) / VEC), rows_of_warp = WARP_THREADS / lanes;
    const int lane = threadIdx.x % WARP_THREADS, in_row = lane % lanes;
    const int64_t warp = ((int64_t)blockIdx.x * OP_THREADS + threadIdx.x) / WARP_THREADS,
                  warps = (int64_t)gridDim.x * (OP_THREADS / WARP_THREADS);
    for (int64_t first = warp * rows_of_warp; first < a.rows; first += warps * rows_of_warp) {
        const int64_t index = first + lane / lanes;
        float lse = 0.0f;
        if (index < a.rows) {
            const merge_row row = merge_row_of(&a, index);
            const merge_weights w = merge_weigh(&a, list.parts, merge_offset(&a.part_lse_stride, row));
            for (int column = in_row * VEC; column < a.dim; column += lanes * VEC)
                merge_run<VEC>(a, list, w, row, column);
            lse = w.lse;
        }
        __syncwarp();
        if (index < a.rows && in_row == 0 && a.lse != nullptr)
            a.lse[merge_offset(&a.lse_stride, merge_row_of(&a, index))] = lse;
    }
}

extern "C" __global__ void __launch_bounds__(OP_THREADS, OP_MIN_CTAS)
    KERNEL_NAME(const __grid_constant__ merge_args a, const __grid_constant__ merge_list list)
{
    wait_for_previous_kernel();
    if (a.is_wide)
        merge_rows<wide_elements<DTYPE>()>(a, list);
    else
        merge_rows<1>(a, list);
    allow_next_kernel();
}
