/* In place of cublas.c where the build leaves CUDA out (-DACR_CUDA=OFF). */
#include "cublas.h"

acr_status cublas_open(const peer_provider **out, acr_ctx *ctx)
{
    (void)out, (void)ctx;
    return acr__fail(ACR_UNSUPPORTED, "this build has no CUDA: it was configured with ACR_CUDA=OFF");
}

void cublas_close(void)
{
}
