/* The kernels' sources where this program can find them, and nvcc: for building a kernel anew. */
#ifndef WORKBENCH_KERNEL_SOURCE_H
#define WORKBENCH_KERNEL_SOURCE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "internal.h"

/* A line of kernels.def. */
typedef struct kernel_line {
    char family[64], arch[16];
    char parameters[256]; /* NAME=value, separated by blanks */
} kernel_line;

/* Whether a line's arch is that of a family with images for many architectures (80, 89), and so is compiled for the
 * device that is here; false for 90a. */
bool kernel_arch_is_portable(const char *arch);

/* The folder src: `given`, or the nearest in the program's folder (a bundle) or one above it (a build in its tree).
 * False when none holds kernels.def. */
bool kernel_source_folder(char out[PATH_MAX], const char *given);
/* False when the list has no such kernel. */
bool kernel_source_line(kernel_line *out, const char *folder, const char *kernel);
/* The family's file. */
bool kernel_source_file(char out[PATH_MAX], const char *folder, const char *family);

/* ACR_NVCC, or nvcc on PATH, in CUDA_HOME/bin, /usr/local/cuda/bin, or where ./run setup puts it in a build tree. */
bool kernel_find_nvcc(char out[PATH_MAX]);

/* The text of a file, NUL-terminated; the caller frees it. NULL after acr__fail. */
char *kernel_read_text(const char *path, size_t *bytes);

#endif
