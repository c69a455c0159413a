/* What the fake driver executes: the PTX of a device image, found among what a build left. */
#ifndef FAKE_PROGRAM_H
#define FAKE_PROGRAM_H

#include <stddef.h>

#include "ptxvm/ptxvm.h"

/* The program that a GPU of this architecture (80, 86, 89, 90, 120) would take from the image at `code`: of an image
 * for sm_90a its PTX, NAME.ptx; of one for many architectures NAME.<arch>.ptx of the newest that the GPU runs, or, with
 * ptx_only, that of the oldest. `folder` or a folder in it holds the image, NAME.bin, and the PTX beside it
 * (cmake/compile_image.sh); an image is known by its bytes. `code` may also be PTX itself, NUL-terminated. NULL and a
 * text where there is none, or where the machine does not know it. */
ptxvm_module *fake_program_load(const char *folder, const void *code, int arch, int ptx_only, char *error,
                                size_t error_bytes);

#endif
