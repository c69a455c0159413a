/* What every backward kernel is told, on the CPU and on the GPU: one plain struct, compiled by the C compiler and by
 * nvcc alike, as fwd_args.h is for forward kernels.
 *
 * It begins with a forward kernel's arguments, which say the inputs, the shape and the terms: so one pointer to
 * fwd_args leads to either, and the kernel's pass says which it is. o and lse are inputs here; out_scale, out_bf16 and
 * the fp8 scales mean nothing. A kernel for GPUs gets the whole struct by value as its first parameter. */
#ifndef ACR_BWD_ARGS_H
#define ACR_BWD_ARGS_H

#include "fwd_args.h"

typedef struct bwd_args {
    fwd_args fwd;
    const void *d_o;    /* the gradient of o, shaped as o, in o's type */
    void *dq, *dk, *dv; /* shaped as q, k and v, every head of k and v by itself */
    float *dsinks;      /* [q_heads]; NULL = no sinks */
    fwd_strides d_o_stride, dq_stride, dk_stride, dv_stride;
    int32_t grad_f32; /* 1 = dq, dk and dv are float32, 0 = of the inputs' type */
    int32_t atomics;  /* 1 = sums may be taken in any order (ACR_FAST_ATOMICS) */
} bwd_args;

/* The arguments of a backward kernel, of which `args` are the first. */
#ifndef __CUDACC__
static inline const bwd_args *bwd_args_of(const fwd_args *args)
{
    return (const bwd_args *)(const void *)args;
}
#endif

#endif
