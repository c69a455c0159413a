/* In place of the CUDA backend where the build leaves it out (-DACR_CUDA=OFF): no device of it can be opened. */
#include "backend.h"
#include "error.h"

static acr_status absent_open(acr__backend_device **out, const acr_ctx_options *options)
{
    (void)out, (void)options;
    return acr__fail(ACR_NO_DEVICE, "this build has no CUDA backend: it was configured with ACR_CUDA=OFF");
}

const acr__backend acr__backend_cuda = {.name = "cuda", .id = ACR__CUDA, .open = absent_open};
