/* The unfused baseline B1 as a peer: cuBLAS's matrix product, our softmax (device/softmax.cu), cuBLAS's matrix product.
 * What attention costs without a fused kernel. cuBLAS is opened with dlopen; nothing is linked against it. */
#ifndef WORKBENCH_CUBLAS_H
#define WORKBENCH_CUBLAS_H

#include "bench/peer_interface.h"
#include "internal.h"

/* Two peers: "cublas-unfused" keeps the scores in the input type, "cublas-unfused-f32" in float32. fp16 and bf16, bhsd,
 * every mask, grouped heads. The provider is static, one at a time; ctx (of a GPU) must outlive cublas_close. Errors:
 * ACR_UNSUPPORTED, saying which files were tried and why they do not serve. ACROMION_CUBLAS names another file. */
acr_status cublas_open(const peer_provider **out, acr_ctx *ctx);
void cublas_close(void);

#endif
