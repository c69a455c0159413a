/* Measuring the link between several GPUs of this host, one thread for each, by libacromion_nccl. */
#ifndef WORKBENCH_WISDOM_LINK_H
#define WORKBENCH_WISDOM_LINK_H

#include "base/options.h"

/* Opens ranks 0 to ranks - 1, on cuda each on the GPU of its number, and measures their link; *out is the context
 * of rank 0, whose wisdom has it, and the caller's to destroy. library: NCCL's, NULL = its own. Returns EXIT_DONE
 * or, after printing the reason, another exit code. */
int wisdom_link(const common_options *common, int ranks, const char *library, acr_ctx **out, acr_link *link);

#endif
