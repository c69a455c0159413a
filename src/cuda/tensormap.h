/* Tensor maps: how the copy engine of sm_90 sees q, k, v and o. Compiled by the C compiler and by nvcc; needs no CUDA
 * header. */
#ifndef ACR_CUDA_TENSORMAP_H
#define ACR_CUDA_TENSORMAP_H

#include <stdint.h>

/* The same bytes as a CUtensorMap, opaque to all but the driver and the copy engine. */
typedef struct fwd_map {
    uint64_t opaque[16];
} __attribute__((aligned(128))) fwd_map;

/* The second parameter of a kernel with maps (acr__boxes in kernel.h, which says what takes o's place): `const
 * __grid_constant__ fwd_maps maps`. */
typedef struct fwd_maps {
    fwd_map q, k, v, o;
} fwd_maps;

/* The same of a backward kernel that asks for o, too (out_rows), beside d_o in its place. The host keeps all kernels'
 * maps as these: the driver reads as many as a kernel declares. */
typedef struct bwd_maps {
    fwd_maps inputs;
    fwd_map out;
} bwd_maps;

#ifndef __CUDACC__
#include "kernel.h"

/* Encodes the maps that `boxes` asks for, of an execution with these arguments, of a backward problem the first of its
 * bwd_args; the others are left as they are. What
 * acr__tiling_why_not (fwd_model.h) accepts can be encoded. Errors: ACR_DEVICE_FAULT, naming the tensor, its base and
 * its strides. */
struct acr__cuda_driver;
acr_status acr__maps_encode(const struct acr__cuda_driver *driver, bwd_maps *maps, const acr__boxes *boxes,
                            const acr_problem *problem, const fwd_args *args);

/* Moves encoded maps to the bases of another execution's tensors, all that differs between executions of a plan. Much
 * cheaper than encoding. Errors: ACR_DEVICE_FAULT, naming the tensor. */
acr_status acr__maps_move(const struct acr__cuda_driver *driver, bwd_maps *maps, const acr__boxes *boxes,
                          const acr_problem *problem, const fwd_args *args);
#endif

#endif
