/* See image.h; src/core/packed_image.h says how images are packed. */
#include "cuda/image.h"

#include <stdlib.h>
#include <zstd.h>

#include "cuda/ops/ops.h"
#include "error.h"
#include "packed_image.h"

static acr_status unpack(unsigned char **out, const acr__packed_image *header, const unsigned char *image,
                         const unsigned char *base, size_t base_bytes, const char *name)
{
    unsigned char *code = malloc(header->code_bytes + 1);
    ZSTD_DCtx *context = ZSTD_createDCtx();
    if (code == NULL || context == NULL) {
        free(code);
        ZSTD_freeDCtx(context);
        return acr__fail(ACR_NO_MEMORY, "unpacking %s: no host memory", name);
    }
    size_t result = base != NULL ? ZSTD_DCtx_refPrefix(context, base, base_bytes) : 0;
    if (!ZSTD_isError(result))
        result =
            ZSTD_decompressDCtx(context, code, header->code_bytes, image + sizeof *header, (size_t)header->frame_bytes);
    ZSTD_freeDCtx(context);
    if (ZSTD_isError(result) || result != header->code_bytes) {
        free(code);
        return acr__fail(ACR_DEVICE_FAULT, "unpacking %s: %s", name,
                         ZSTD_isError(result) ? ZSTD_getErrorName(result) : "its image is too short");
    }
    code[header->code_bytes] = 0;
    *out = code;
    return ACR_OK;
}

static int is_base(acr__packed_image *out, const acr__kernel *kernel, uint64_t digest)
{
    return acr__read_packed(out, kernel->image, (size_t)(kernel->image_end - kernel->image)) &&
           out->code_digest == digest && out->base_digest == 0;
}

/* The image that stands alone and whose code has this digest, among those of kernels and operations; NULL = none. */
static const unsigned char *find_base(acr__packed_image *out, uint64_t digest)
{
    for (size_t i = 0; i < acr__kernel_count; i++)
        if (acr__kernels[i]->backend == ACR__CUDA && is_base(out, acr__kernels[i], digest))
            return acr__kernels[i]->image;
    for (size_t i = 0; i < ACR__CUDA_OPS; i++)
        if (is_base(out, &acr__cuda_ops[i].code, digest))
            return acr__cuda_ops[i].code.image;
    return NULL;
}

acr_status acr__code_find(acr__code *out, const acr__kernel *kernel)
{
    *out = (acr__code){.bytes = kernel->image};
    acr__packed_image header, base;
    if (!acr__read_packed(&header, kernel->image, (size_t)(kernel->image_end - kernel->image)))
        return ACR_OK;
    unsigned char *base_code = NULL;
    acr_status status = ACR_OK;
    if (header.base_digest != 0) {
        const unsigned char *base_image = find_base(&base, header.base_digest);
        if (base_image == NULL)
            return acr__fail(ACR_DEVICE_FAULT, "unpacking %s: the library lacks the image that it differs from",
                             kernel->name);
        status = unpack(&base_code, &base, base_image, NULL, 0, kernel->name);
    }
    if (status == ACR_OK)
        status = unpack(&out->owned, &header, kernel->image, base_code, base_code != NULL ? (size_t)base.code_bytes : 0,
                        kernel->name);
    free(base_code);
    if (status == ACR_OK)
        out->bytes = out->owned;
    return status;
}

void acr__code_free(acr__code *code)
{
    free(code->owned);
    *code = (acr__code){0};
}
