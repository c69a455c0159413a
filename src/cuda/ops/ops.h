/* The images of the operations beside attention (ops.def): which one does a call, and its launch. */
#ifndef ACR_CUDA_OPS_H
#define ACR_CUDA_OPS_H

#include "op.h"

/* A line of ops.def. Its code is described as a kernel's is, of which loading asks name, symbol, image and arch_min. */
typedef struct acr__cuda_op {
    acr__kernel code;
    acr__op op;
    acr_dtype dtype;
    int32_t parts; /* that a launch can list */
} acr__cuda_op;

enum {
#define OP(name, op, file, dtype, parts) ACR__CUDA_OP_##name,
#include "cuda/ops/ops.def"
#undef OP
    ACR__CUDA_OPS
};

extern const acr__cuda_op acr__cuda_ops[ACR__CUDA_OPS];

/* The line for a call, as a number below ACR__CUDA_OPS. Errors: ACR_UNSUPPORTED. */
acr_status acr__cuda_op_choose(int *out, const acr__op_call *call);

/* Its launch; a cluster of none, no dynamic shared memory. */
void acr__cuda_op_shape(acr__launch *out, const acr__op_call *call);

#endif
