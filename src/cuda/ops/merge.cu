/* acr_merge on a GPU. Some lanes of a warp, a power of two, share a row: each weighs the parts by itself, and merges
 * 16 bytes of columns at a time, of many rows MERGE_RUNS times 16: weighing takes more instructions than 16 bytes do.
 * A warp writes a row's lse after all of its lanes have read it: it may be the first part's.
 *
 * DTYPE, an acr_dtype: of the parts; PARTS: how many a launch can list (ops.def). */
#include "cuda/device/isa/common.cuh"
#include "cuda/ops/vector.cuh"
#include "op_args.h"

enum {
    MIN_CTAS = 2 /* of an SM: 128 registers a thread; 64 bytes of each are on their way */
};

typedef struct merge_list {
    merge_part parts[PARTS];
} merge_list;

/* RUNS runs of a row: columns [column + r * step, column + r * step + VEC), those below a.dim. Loads of all runs are
 * asked for before the first is waited for. */
template <int VEC, int RUNS>
DEV void merge_columns(const merge_args &a, const merge_list &list, const merge_weights &w, const merge_row &row,
                       int column, int step)
{
    const int64_t part_at = merge_offset(&a.part_stride, row) + column, lse_at = merge_offset(&a.part_lse_stride, row);
    const int64_t out_at = merge_offset(&a.o_stride, row) + column;
    float sum[RUNS][VEC];
#pragma unroll
    for (int r = 0; r < RUNS; r++)
#pragma unroll
        for (int i = 0; i < VEC; i++)
            sum[r][i] = 0.0f;
#pragma unroll 1
    for (int64_t i = 0; i < a.count; i++) {
        const merge_part part = merge_part_of(&a, list.parts, i);
        const float lse = part.lse[lse_at];
        if (lse == -OP_INFINITY)
            continue;
        run_bits<VEC> bits[RUNS];
#pragma unroll
        for (int r = 0; r < RUNS; r++)
            if (r == 0 || column + r * step < a.dim)
                load_bits<DTYPE>(bits[r], part.o, part_at + r * step);
        const float weight = merge_weight(w, lse);
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            float values[VEC];
            run_values<DTYPE>(values, bits[r]);
#pragma unroll
            for (int c = 0; c < VEC; c++)
                sum[r][c] = op_add(sum[r][c], op_mul(weight, values[c]));
        }
    }
#pragma unroll
    for (int r = 0; r < RUNS; r++)
        if (r == 0 || column + r * step < a.dim)
            store_run(a.out_dtype, a.o, out_at + r * step, sum[r]);
}

template <int VEC, int RUNS> DEV void merge_rows(const merge_args &a, const merge_list &list)
{
    const int lanes = merge_lanes(&a, (a.dim + VEC - 1) / VEC), rows_of_warp = WARP_THREADS / lanes;
    const int lane = threadIdx.x % WARP_THREADS, in_row = lane % lanes, step = lanes * VEC;
    const int64_t warp = ((int64_t)blockIdx.x * OP_THREADS + threadIdx.x) / WARP_THREADS,
                  warps = (int64_t)gridDim.x * (OP_THREADS / WARP_THREADS);
    for (int64_t first = warp * rows_of_warp; first < a.rows; first += warps * rows_of_warp) {
        const int64_t index = first + lane / lanes;
        float lse = 0.0f;
        if (index < a.rows) {
            const merge_row row = merge_row_of(&a, index);
            const merge_weights w = merge_weigh(&a, list.parts, merge_offset(&a.part_lse_stride, row));
            for (int column = in_row * VEC; column < a.dim; column += RUNS * step)
                merge_columns<VEC, RUNS>(a, list, w, row, column, step);
            lse = w.lse;
        }
        __syncwarp();
        if (index < a.rows && in_row == 0 && a.lse != nullptr)
            a.lse[merge_offset(&a.lse_stride, merge_row_of(&a, index))] = lse;
    }
}

extern "C" __global__ void __launch_bounds__(OP_THREADS, MIN_CTAS)
    KERNEL_NAME(const __grid_constant__ merge_args a, const __grid_constant__ merge_list list)
{
    wait_for_previous_kernel();
    if (!a.is_wide)
        merge_rows<1, 1>(a, list);
    else if (merge_runs(&a) == 1)
        merge_rows<wide_elements<DTYPE>(), 1>(a, list);
    else
        merge_rows<wide_elements<DTYPE>(), MERGE_RUNS>(a, list);
    allow_next_kernel();
}
