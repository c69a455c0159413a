#ifndef ACR_CUDA_IMAGE_H
#define ACR_CUDA_IMAGE_H
/* Device images as the driver takes them: cubin, fat binary or PTX, unpacked where the library packed them. */
#include "kernel.h"

typedef struct acr__code {
    const unsigned char *bytes; /* ends in a zero byte that is not part of it, as PTX needs */
    unsigned char *owned;       /* the same where it was unpacked, else NULL */
} acr__code;

/* The code of a kernel's image. Release it with acr__code_free once the driver has loaded it. ACR_NO_MEMORY;
 * ACR_DEVICE_FAULT where the image is damaged. */
acr_status acr__code_find(acr__code *out, const acr__kernel *kernel);
void acr__code_free(acr__code *code);

#endif
