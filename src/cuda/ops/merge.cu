/* acr_merge on a GPU. A CTA has as many rows as its threads fill with runs of 16 bytes (op_args.h), once or MERGE_RUNS
 * times. A thread a row weighs the row's parts for all of the row's threads, so that a run costs little more than its
 * bytes. Elements are asked for when the weights are known: sooner took longer (lab.md).
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

/* Of the CTA's rows: where their first elements are, and what a part weighs; negative: it has no keys. */
typedef struct merge_table {
    int64_t part_at[MERGE_THREADS], out_at[MERGE_THREADS];
    float weight[MOST_AT_ONCE][MERGE_THREADS];
} merge_table;

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
        lse[i] = first + i < a.count ? part_of<ONCE>(a, list, first + i).lse[at] : -OP_INFINITY;
}

/* Of all parts, whose lse these are: one without keys adds nothing. */
template <int AT_ONCE> DEV merge_weights weigh(const float (&lse)[AT_ONCE])
{
    float max = -OP_INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        max = merge_larger(max, lse[i]);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        sum = op_add(sum, merge_exp(lse[i], max));
    return merge_weights_of(max, sum);
}

template <int AT_ONCE> DEV void set_weights(merge_table &table, const float (&lse)[AT_ONCE], const merge_weights &w)
{
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        table.weight[i][threadIdx.x] = lse[i] == -OP_INFINITY ? -1.0f : merge_weight(w, lse[i]);
}

/* Adds parts [first, first + AT_ONCE) of a run of the CTA's row `slot`. All are asked for before one is waited for. */
template <bool ONCE, int AT_ONCE, int VEC>
DEV void add_parts(float (&sum)[VEC], const merge_args &a, const merge_list &list, const merge_table &table, int slot,
                   int column, int first)
{
    const int64_t at = table.part_at[slot] + column;
    run_bits<VEC> bits[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        if (first + i < (int)a.count)
            load_bits<DTYPE>(bits[i], part_of<ONCE>(a, list, first + i).o, at);
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

/* A CTA's rows, merge_runs of them for a thread one after the other, where a turn does all columns and parts. */
template <int VEC> DEV void merge_small_rows(const merge_args &a, const merge_list &list, merge_table &table)
{
    const int runs = merge_runs(&a);
    const int rows_at_once = MERGE_THREADS >> a.lane_bits, slot = threadIdx.x >> a.lane_bits;
    const int64_t first_row = (int64_t)blockIdx.x * (runs * rows_at_once), own = first_row + threadIdx.x;
    if (threadIdx.x < runs * rows_at_once && own < a.rows) {
        const merge_row row = merge_row_of(&a, own);
        float lse[MOST_AT_ONCE];
        load_lse<true>(lse, a, list, merge_offset(&a.part_lse_stride, row), 0);
        table.part_at[threadIdx.x] = merge_offset(&a.part_stride, row);
        table.out_at[threadIdx.x] = merge_offset(&a.o_stride, row);
        const merge_weights w = weigh(lse);
        set_weights(table, lse, w);
        if (a.lse != nullptr)
            a.lse[merge_offset(&a.lse_stride, row)] = w.lse;
    }
    __syncthreads();
    const int column = (threadIdx.x & ((1 << a.lane_bits) - 1)) * VEC;
#pragma unroll 1
    for (int r = 0; r < runs; r++)
        if (column < a.dim && first_row + slot + r * rows_at_once < a.rows) {
            float sum[VEC] = {};
            add_parts<true, MOST_AT_ONCE>(sum, a, list, table, slot + r * rows_at_once, column, 0);
            store_run(a.out_dtype, a.o, table.out_at[slot + r * rows_at_once] + column, sum);
        }
}

/* The same for any number of columns and parts, a row a thread. */
template <int VEC> DEV void merge_rows(const merge_args &a, const merge_list &list, merge_table &table)
{
    const int lanes = 1 << a.lane_bits, slot = threadIdx.x >> a.lane_bits, rows_at_once = MERGE_THREADS >> a.lane_bits;
    const int64_t first_row = (int64_t)blockIdx.x * rows_at_once, own = first_row + threadIdx.x;
    const bool weighs = threadIdx.x < rows_at_once && own < a.rows;
    merge_weights w;
    int64_t lse_at = 0;
    if (weighs) {
        const merge_row row = merge_row_of(&a, own);
        lse_at = merge_offset(&a.part_lse_stride, row);
        w = merge_weigh(&a, list.parts, lse_at);
        table.part_at[threadIdx.x] = merge_offset(&a.part_stride, row);
        table.out_at[threadIdx.x] = merge_offset(&a.o_stride, row);
    }
#pragma unroll 1
    for (int before = 0; before < a.dim; before += lanes * VEC) {
        const int column = before + (threadIdx.x & (lanes - 1)) * VEC;
        const bool has = column < a.dim && first_row + slot < a.rows;
        float sum[VEC] = {};
#pragma unroll 1
        for (int first = 0; first < (int)a.count; first += MANY_AT_ONCE) {
            if (weighs) {
                float lse[MANY_AT_ONCE];
                load_lse<false>(lse, a, list, lse_at, first);
                set_weights(table, lse, w);
            }
            __syncthreads();
            if (has)
                add_parts<false, MANY_AT_ONCE>(sum, a, list, table, slot, column, first);
            __syncthreads(); /* the weights are read before the next are written */
        }
        if (has)
            store_run(a.out_dtype, a.o, table.out_at[slot] + column, sum);
    }
    if (weighs && a.lse != nullptr)
        a.lse[merge_offset(&a.lse_stride, merge_row_of(&a, own))] = w.lse;
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
