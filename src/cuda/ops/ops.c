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

acr_status acr__cuda_op_choose(int *out, const acr__op_call *call)
{
    const int64_t listed = call->op != ACR__OP_MERGE ? 0 : call->merge->is_spaced ? 1 : call->merge->count;
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

enum {
    MERGE_THREADS = 256, /* of a CTA: OP_THREADS of vector.cuh */
    Y_MAX = 64           /* CTAs that share a token */
};

static uint32_t at_most(int64_t value, int64_t most)
{
    return (uint32_t)(value < most ? value : most);
}

static void shape_merge(acr__launch *out, const merge_args *a)
{
    const int64_t run = a->is_wide ? (a->dtype == ACR_F32 ? 4 : 8) : 1, runs = (a->dim + run - 1) / run;
    const int64_t rows_of_cta = MERGE_THREADS / merge_lanes(a, runs);
    *out = (acr__launch){.grid = {at_most((a->rows - 1) / rows_of_cta + 1, INT32_MAX), 1, 1}, .block = MERGE_THREADS};
}

/* A tensor's units of a token, as append.cu counts them: of what is rotated one has both elements of each pair. */
static int64_t append_units(const void *tensor, int64_t heads, int64_t dim, int64_t rope_dim, int64_t run)
{
    return tensor ? (heads + APPEND_HEADS - 1) / APPEND_HEADS * ((dim - rope_dim + rope_dim / 2) / run) : 0;
}

static void shape_append(acr__launch *out, const append_args *a)
{
    const int64_t run = a->is_wide ? (a->dtype == ACR_F32 ? 4 : 8) : 1;
    const int64_t units = append_units(a->k, a->kv_heads, a->qk_dim, a->rope_dim, run) +
                          append_units(a->v, a->kv_heads, a->v_dim, 0, run) +
                          append_units(a->q, a->q_heads, a->qk_dim, a->rope_dim, run);
    *out = (acr__launch){.grid = {at_most(a->rows, INT32_MAX), at_most((units - 1) / APPEND_THREADS + 1, Y_MAX), 1},
                         .block = APPEND_THREADS};
}

void acr__cuda_op_shape(acr__launch *out, const acr__op_call *call)
{
    if (call->op == ACR__OP_MERGE)
        shape_merge(out, call->merge);
    else
        shape_append(out, call->append);
}
