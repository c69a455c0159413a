/* Defaults of the parameters that several families have, for device code and host descriptions alike: a line of
 * kernels.def that does not set one means these. Included before anything that asks for them. */
#ifndef ACR_CUDA_DEVICE_PARAMETERS_H
#define ACR_CUDA_DEVICE_PARAMETERS_H

#ifndef TERMS
#define TERMS 0 /* FWD_TERM_* of fwd_args.h: the features beyond scale, mask and window */
#endif
#ifndef BF16
#define BF16 0
#endif
#ifndef V_DIM
#define V_DIM DIM
#endif
#ifndef PAGED
#define PAGED 0
#endif
#ifndef BIAS_TILES
#define BIAS_TILES 0 /* slots of a consumer for tiles of a bias (bias_tiles.cuh) */
#endif
#ifndef MASKS
#define MASKS 0 /* beside it: boolean masks alone */
#endif
#ifndef BIAS_FIRST
#define BIAS_FIRST 0 /* beside it: products are added to biases, not biases to products */
#endif

#endif
