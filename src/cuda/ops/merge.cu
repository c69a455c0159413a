/* acr_merge on a GPU. A CTA has as many rows as its threads fill with runs of 16 bytes (op_args.h), a run a thread. A
 * thread a row weighs the row's parts for all of the row's threads, so that a run costs little more than its bytes. All
 * ask for their elements before that: weights take as long as memory does (lab.md).
 *
 * A row's lse are read by the thread that writes the row's lse, and before: it may be the first part's. So may the
 * elements.
 *
 * DTYPE, an acr_dtype: of the parts; PARTS: how many a launch can list (ops.def). */
#include "cuda/device/isa/common.cuh"
#include "cuda/ops/vector.cuh"
#include "op_args.h"

enum {
    MIN_CTAS = PARTS == 2 ? 6 : 4, /* of an SM: 40 registers a thread, or 64 */
    MOST_AT_ONCE = PARTS < MERGE_LISTED ? PARTS : MERGE_LISTED,
    MANY_AT_ONCE = 4 /* where columns or parts take several turns */
};

typedef struct merge_list {
    merge_part parts[PARTS];
} merge_list;

/* What a part weighs in each of the CTA's rows; negative: it has no keys. */
typedef struct merge_table {
    float weight[MOST_AT_ONCE][MERGE_THREADS];
} merge_table;

/* A thread's row, that is of its run, and the row that it weighs. */
typedef struct merge_place {
    uint32_t row, own;
    int slot, lane;
    bool has_row, weighs;
} merge_place;

DEV merge_place find_place(const merge_args &a)
{
    const int rows = MERGE_THREADS >> a.lane_bits;
    const int64_t first_row = (int64_t)blockIdx.x * rows;
    merge_place p;
    p.slot = threadIdx.x >> a.lane_bits;
    p.lane = threadIdx.x & ((1 << a.lane_bits) - 1);
    p.row = (uint32_t)(first_row + p.slot);
    p.has_row = first_row + p.slot < a.rows;
    p.own = (uint32_t)(first_row + threadIdx.x);
    p.weighs = threadIdx.x < rows && first_row + threadIdx.x < a.rows;
    return p;
}

template <bool ONCE> DEV merge_part part_of(const merge_args &a, const merge_list &list, int i)
{
    return ONCE ? list.parts[i] : merge_part_of(&a, list.parts, i);
}

/* A row's lse of parts [first, first + AT_ONCE); of a part that there is not, as of one without keys. */
template <bool ONCE, int AT_ONCE>
DEV void load_lse(float (&lse)[AT_ONCE], const merge_args &a, const merge_list &list, int64_t at, int first)
{
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        lse[i] = first + i < (int)a.count ? part_of<ONCE>(a, list, first + i).lse[at] : -OP_INFINITY;
}

/* Of a run, of parts [first, first + AT_ONCE). */
template <bool ONCE, int AT_ONCE, int VEC>
DEV void load_runs(run_bits<VEC> (&bits)[AT_ONCE], const merge_args &a, const merge_list &list, int64_t at, int first)
{
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        if (first + i < (int)a.count)
            load_bits<DTYPE>(bits[i], part_of<ONCE>(a, list, first + i).o, at);
}

template <int AT_ONCE, int VEC>
DEV void add_runs(float (&sum)[VEC], const run_bits<VEC> (&bits)[AT_ONCE], const merge_args &a,
                  const merge_table &table, int slot, int first)
{
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const float weight = table.weight[i][slot];
        if (first + i < (int)a.count && !(weight < 0.0f)) {
            float values[VEC];
            run_values<DTYPE>(values, bits[i]);
#pragma unroll
            for (int c = 0; c < VEC; c++)
                sum[c] = op_add(sum[c], op_mul(weight, values[c]));
        }
    }
}

/* Leaves the weights of all parts, whose lse these are, in the table, and returns the row's lse. The table holds powers
 * before: registers are taken by elements. */
template <int AT_ONCE> DEV float weigh_all(merge_table &table, const float (&lse)[AT_ONCE])
{
    float max = -OP_INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        max = merge_larger(max, lse[i]);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const float power = merge_exp(lse[i], max);
        sum = op_add(sum, power);
        table.weight[i][threadIdx.x] = lse[i] == -OP_INFINITY ? -1.0f : power;
    }
    const merge_weights w = merge_weights_of(max, sum);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const float power = table.weight[i][threadIdx.x];
        table.weight[i][threadIdx.x] = power < 0.0f ? power : op_mul(power, w.factor);
    }
    return w.lse;
}

/* Rows of which a thread's run is all columns that it has, and of which all parts are asked for at once. */
template <int VEC> DEV void merge_small_rows(const merge_args &a, const merge_list &list, merge_table &table)
{
    const merge_place p = find_place(a);
    const int column = p.lane * VEC;
    const bool has = p.has_row && column < a.dim;
    float lse[MOST_AT_ONCE], merged;
    if (p.weighs)
        load_lse<true>(lse, a, list, merge_offset(&a.part_lse_stride, merge_row_of(&a, p.own)), 0);
    run_bits<VEC> bits[MOST_AT_ONCE];
    if (has)
        load_runs<true>(bits, a, list, merge_offset(&a.part_stride, merge_row_of(&a, p.row)) + column, 0);
    if (p.weighs)
        merged = weigh_all(table, lse);
    __syncthreads();
    if (has) {
        float sum[VEC] = {};
        add_runs(sum, bits, a, table, p.slot, 0);
        store_run(a.out_dtype, a.o, merge_offset(&a.o_stride, merge_row_of(&a, p.row)) + column, sum);
    }
    if (p.weighs && a.lse != nullptr)
        a.lse[merge_offset(&a.lse_stride, merge_row_of(&a, p.own))] = merged;
}

/* The same for any number of columns and parts. */
template <int VEC> DEV void merge_rows(const merge_args &a, const merge_list &list, merge_table &table)
{
    const merge_place p = find_place(a);
    const int64_t part_at = merge_offset(&a.part_stride, merge_row_of(&a, p.row));
    merge_weights w;
    int64_t lse_at = 0;
    if (p.weighs) {
        lse_at = merge_offset(&a.part_lse_stride, merge_row_of(&a, p.own));
        w = merge_weigh(&a, list.parts, lse_at);
    }
#pragma unroll 1
    for (int before = 0; before < a.dim; before += VEC << a.lane_bits) {
        const int column = before + p.lane * VEC;
        const bool has = p.has_row && column < a.dim;
        float sum[VEC] = {};
#pragma unroll 1
        for (int first = 0; first < (int)a.count; first += MANY_AT_ONCE) {
            run_bits<VEC> bits[MANY_AT_ONCE];
            if (has)
                load_runs<false>(bits, a, list, part_at + column, first);
            if (p.weighs) {
                float lse[MANY_AT_ONCE];
                load_lse<false>(lse, a, list, lse_at, first);
#pragma unroll
                for (int i = 0; i < MANY_AT_ONCE; i++)
                    table.weight[i][threadIdx.x] = lse[i] == -OP_INFINITY ? -1.0f : merge_weight(w, lse[i]);
            }
            __syncthreads();
            if (has)
                add_runs(sum, bits, a, table, p.slot, first);
            __syncthreads(); /* the weights are read before the next are written */
        }
        if (has)
            store_run(a.out_dtype, a.o, merge_offset(&a.o_stride, merge_row_of(&a, p.row)) + column, sum);
    }
    if (p.weighs && a.lse != nullptr)
        a.lse[merge_offset(&a.lse_stride, merge_row_of(&a, p.own))] = w.lse;
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS, MIN_CTAS)
    KERNEL_NAME(const __grid_constant__ merge_args a, const __grid_constant__ merge_list list)
{
    __shared__ merge_table table;
    wait_for_previous_kernel();
    constexpr int wide = wide_elements<DTYPE>();
    if (PARTS < MERGE_LISTED || (PARTS == MERGE_LISTED && merge_is_small(&a)))
        merge_small_rows<wide>(a, list, table);
    else if (a.is_wide)
        merge_rows<wide>(a, list, table);
    else
        merge_rows<1>(a, list, table);
    allow_next_kernel();
}
