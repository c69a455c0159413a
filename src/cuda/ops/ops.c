/* The images of the operations beside attention: see ops.h. */
#include "cuda/ops/ops.h"

#include "error.h"

#define OP(name, op, file, dtype, parts) extern const unsigned char acr__image_##name[], acr__image_end_##name[];
#include "cuda/ops/ops.def"
#undef OP

#define OP(line, operation, file, type, most)                                                                          \
    {.code = {.name = #line,                                                                                           \
              .family = #file,                                                                                         \
              .backend = ACR__CUDA,                                                                                    \
              .image = acr__image_##line,                                                                              \
              .image_end = acr__image_end_##line,                                                                      \
              .symbol = #line,                                                                                         \
              .arch_min = 80,                                                                                          \
              .arch_max = 999},                                                                                        \
     .op = operation,                                                                                                  \
     .dtype = type,                                                                                                    \
     .parts = most},
const acr__cuda_op acr__cuda_ops[ACR__CUDA_OPS] = {
#include "cuda/ops/ops.def"
};
#undef OP

enum {
    GRID_MOST = 65535 /* CTAs along y and along z */
};

acr_status acr__cuda_op_choose(int *out, const acr__op_call *call)
{
    if (call->op == ACR__OP_APPEND && call->append->rows > (int64_t)GRID_MOST * GRID_MOST)
        return acr__fail(ACR_UNSUPPORTED, "there are %lld tokens, cuda appends at most %lld",
                         (long long)call->append->rows, (long long)GRID_MOST * GRID_MOST);
    if (call->op == ACR__OP_APPEND && call->append->units > INT32_MAX)
        return acr__fail(ACR_UNSUPPORTED, "a token has %lld units of work, cuda appends at most %d",
                         (long long)call->append->units, INT32_MAX);
    int64_t listed = 0;
    if (call->op == ACR__OP_MERGE) {
        const int64_t least = merge_is_small(call->merge) ? 1 : MERGE_LISTED; /* shorter lists merge small rows alone */
        listed = call->merge->is_spaced || call->merge->count < least ? least : call->merge->count;
    }
    int32_t most = 0;
    for (int i = 0; i < ACR__CUDA_OPS; i++) {
        const acr__cuda_op *line = &acr__cuda_ops[i];
        if (line->op != call->op || line->dtype != call->dtype)
            continue;
        if (listed <= line->parts) {
            *out = i;
            return ACR_OK;
        }
        most = line->parts;
    }
    return acr__fail(ACR_UNSUPPORTED, "args.count is %lld: cuda merges at most %d parts at uneven distances",
                     (long long)listed, (int)most);
}

/* A CTA has 8 rows or more, of less than 2^32. */
static void shape_merge(acr__launch *out, const merge_args *a)
{
    const int64_t ctas = (a->rows - 1) / merge_rows_of_cta(a) + 1;
    *out = (acr__launch){.grid = {(uint32_t)ctas, 1, 1}, .block = MERGE_THREADS};
}

static void shape_append(acr__launch *out, const append_args *a)
{
    const int64_t layers = (a->rows - 1) / GRID_MOST + 1, rows = (a->rows - 1) / layers + 1;
    *out = (acr__launch){.grid = {(uint32_t)((a->units - 1) / APPEND_THREADS + 1), (uint32_t)rows, (uint32_t)layers},
                         .block = APPEND_THREADS};
}

void acr__cuda_op_shape(acr__launch *out, const acr__op_call *call)
{
    if (call->op == ACR__OP_MERGE)
        shape_merge(out, call->merge);
    else
        shape_append(out, call->append);
}
