/* acr_merge on a GPU. Some lanes of a warp, a power of two, share a row: each weighs the parts by itself, and merges
 * 16 bytes of columns at a time, of many rows MERGE_RUNS times 16: weighing takes more instructions than 16 bytes do.
 * Two parts are on their way at a time, and the first two while their weights are computed.
 * A warp writes a row's lse after all of its lanes have read it: it may be the first part's.
 *
 * DTYPE, an acr_dtype: of the parts; PARTS: how many a launch can list (ops.def). */
#include "cuda/device/isa/common.cuh"
#include "cuda/ops/vector.cuh"
#include "op_args.h"

enum {
    MIN_CTAS = 2 /* of an SM: 128 registers a thread; 128 bytes of each are on their way */
};

typedef struct merge_list {
    merge_part parts[PARTS];
} merge_list;

/* Where a row's elements are, and what of them a lane merges: columns [column + r * step, column + r * step + VEC) for
 * each of its runs r, those below a.dim. */
typedef struct lane_columns {
    int64_t part_at, lse_at, out_at; /* elements */
    int column, step;
} lane_columns;

/* A lane's runs of a part. */
template <int VEC, int RUNS> struct part_bits {
    run_bits<VEC> runs[RUNS];
};

template <int VEC, int RUNS>
DEV void load_part(part_bits<VEC, RUNS> &to, const merge_args &a, const merge_list &list, const lane_columns &at,
                   int64_t i)
{
    const merge_part part = merge_part_of(&a, list.parts, i);
#pragma unroll
    for (int r = 0; r < RUNS; r++)
        if (r == 0 || at.column + r * at.step < a.dim)
            load_bits<DTYPE>(to.runs[r], part.o, at.part_at + r * at.step);
}

/* What a part without keys holds is not looked at: it may be anything. */
template <int VEC, int RUNS>
DEV void add_part(float (&sum)[RUNS][VEC], const part_bits<VEC, RUNS> &from, const merge_args &a,
                  const merge_list &list, const merge_weights &w, const lane_columns &at, int64_t i)
{
    const float lse = merge_part_of(&a, list.parts, i).lse[at.lse_at];
    if (lse == -OP_INFINITY)
        return;
    const float weight = merge_weight(w, lse);
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
        float values[VEC];
        run_values<DTYPE>(values, from.runs[r]);
#pragma unroll
        for (int c = 0; c < VEC; c++)
            sum[r][c] = op_add(sum[r][c], op_mul(weight, values[c]));
    }
}

/* A lane's runs of a row. Two parts are on their way at a time, the first two while the row's parts are weighed, unless
 * w says that they have been. */
template <int VEC, int RUNS>
DEV void merge_columns(const merge_args &a, const merge_list &list, merge_weights &w, bool is_weighed,
                       const lane_columns &at)
{
    constexpr int AT_ONCE = VEC == 1 || PARTS > 8 ? 1 : 2; /* long lists are rare, and their code as long */
    float sum[RUNS][VEC];
#pragma unroll
    for (int r = 0; r < RUNS; r++)
#pragma unroll
        for (int i = 0; i < VEC; i++)
            sum[r][i] = 0.0f;
#pragma unroll 1
    for (int64_t i = 0; i < a.count; i += AT_ONCE) {
        part_bits<VEC, RUNS> bits[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (j == 0 || i + j < a.count)
                load_part(bits[j], a, list, at, i + j);
        if (i == 0 && !is_weighed)
            w = merge_weigh(&a, list.parts, at.lse_at);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (j == 0 || i + j < a.count)
                add_part(sum, bits[j], a, list, w, at, i + j);
    }
#pragma unroll
    for (int r = 0; r < RUNS; r++)
        if (r == 0 || at.column + r * at.step < a.dim)
            store_run(a.out_dtype, a.o, at.out_at + r * at.step, sum[r]);
}

template <int VEC, int RUNS> DEV void merge_rows(const merge_args &a, const merge_list &list)
{
    const int lanes = merge_lanes(&a, (a.dim + VEC - 1) / VEC), rows_of_warp = WARP_THREADS / lanes;
    const int lane = threadIdx.x % WARP_THREADS, in_row = lane % lanes, step = lanes * VEC;
    const int64_t warp = ((int64_t)blockIdx.x * OP_THREADS + threadIdx.x) / WARP_THREADS,
                  warps = (int64_t)gridDim.x * (OP_THREADS / WARP_THREADS);
    for (int64_t first = warp * rows_of_warp; first < a.rows; first += warps * rows_of_warp) {
        const int64_t index = first + lane / lanes;
        merge_weights w = {};
        if (index < a.rows) {
            const merge_row row = merge_row_of(&a, index);
            const int64_t part_at = merge_offset(&a.part_stride, row), out_at = merge_offset(&a.o_stride, row),
                          lse_at = merge_offset(&a.part_lse_stride, row);
            for (int column = in_row * VEC; column < a.dim; column += RUNS * step)
                merge_columns<VEC, RUNS>(a, list, w, column != in_row * VEC,
                                         {part_at + column, lse_at, out_at + column, column, step});
        }
        __syncwarp();
        if (index < a.rows && in_row == 0 && a.lse != nullptr)
            a.lse[merge_offset(&a.lse_stride, merge_row_of(&a, index))] = w.lse;
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
