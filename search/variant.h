/* What makes variants (kernels/variant.h): the compilers and the loader of candidates. */
#ifndef SEARCH_VARIANT_H
#define SEARCH_VARIANT_H

#include "kernels/variant.h"

/* Compiles a variant into the folder `into`/<name>, for the architecture of `device`. Returns ACR_OK after saying on
 * standard error what it took, spills included. Errors: ACR_INVALID for a malformed text; ACR_UNSUPPORTED where there
 * is no compiler or it refused the variant, serialised wgmma included; ACR_IO. */
acr_status variant_build(const char *text, const char *into, const acr__device *device);

extern const variant_maker search_variant_maker;

#endif
