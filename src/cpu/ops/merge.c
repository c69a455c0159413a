/* acr_merge on the CPU. */
#include "cpu/ops.h"
#include "cpu/ops/element.h"

static int64_t elements_of_row(const merge_args *a)
{
    return a->dim * (a->count + 1);
}

int64_t acr__cpu_merge_blocks(const acr__op_call *call)
{
    return blocks_of(call->merge->rows, elements_of_row(call->merge));
}

/* Columns [column, column + count) of a row. */
static void merge_run(const acr__op_call *call, merge_weights w, merge_row row, int64_t column, int64_t count)
{
    const merge_args *a = call->merge;
    const int64_t part_at = merge_offset(&a->part_stride, row) + column,
                  lse_at = merge_offset(&a->part_lse_stride, row);
    float sum[RUN] = {0}, values[RUN];
    for (int64_t i = 0; i < a->count; i++) {
        const merge_part part = merge_part_of(a, call->parts, i);
        if (part.lse[lse_at] == -OP_INFINITY)
            continue;
        const float weight = merge_weight(w, part.lse[lse_at]);
        load_run(values, a->dtype, part.o, part_at, count);
        for (int64_t c = 0; c < count; c++)
            sum[c] = op_add(sum[c], op_mul(weight, values[c]));
    }
    store_run(a->out_dtype, a->o, merge_offset(&a->o_stride, row) + column, sum, count);
}

/* The lse is written last: it may be the first part's. */
static void merge_one(const acr__op_call *call, uint32_t index)
{
    const merge_args *a = call->merge;
    const merge_row row = merge_row_of(a, index);
    const merge_weights w = merge_weigh(a, call->parts, merge_offset(&a->part_lse_stride, row));
    for (int64_t column = 0; column < a->dim; column += RUN)
        merge_run(call, w, row, column, a->dim - column < RUN ? a->dim - column : RUN);
    if (a->lse)
        a->lse[merge_offset(&a->lse_stride, row)] = w.lse;
}

void acr__cpu_merge(const acr__op_call *call, int64_t blocks, _Atomic int64_t *queue)
{
    const int64_t rows = call->merge->rows, in_block = (rows - 1) / blocks + 1;
    for (int64_t block; (block = atomic_fetch_add(queue, 1)) < blocks;)
        for (int64_t row = block * in_block; row < rows && row < (block + 1) * in_block; row++)
            merge_one(call, (uint32_t)row);
}
