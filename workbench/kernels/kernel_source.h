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

/* Where a set (NAME=value, separated by blanks) has NAME=value of a name; NULL = nowhere. */
const char *kernel_set_find(const char *set, const char *name, size_t length);

/* What a family's file declares at the end of its head comment, in one line or several, by "PARAMETERS: NAME
 * NAME=default ...": the names that a set may have, and must where they have no default. kernel_line.cmake reads it by
 * the same rules. */
enum {
    KERNEL_PARAMETERS_MAX = 32
};
typedef struct kernel_parameters {
    char family[64];
    int count;
    struct {
        char name[32];
        bool optional;
    } items[KERNEL_PARAMETERS_MAX];
} kernel_parameters;

/* file: as kernel_source_file finds it. Errors: ACR_IO; ACR_FORMAT when the declaration is missing or malformed. */
acr_status kernel_parameters_read(kernel_parameters *out, const char *file);
/* Checks a set (NAME=value, separated by blanks): only declared names; DTYPE one of ACR_F32, ACR_F16, ACR_BF16,
 * ACR_E4M3, every other value a whole number, of BF16, E4M3 and PACKED 0 or 1; if `whole`, nothing required missing.
 * Errors: ACR_INVALID, naming the parameter and what the family has. */
acr_status kernel_parameters_check(const kernel_parameters *declared, const char *set, bool whole);

/* ACR_NVCC, or nvcc on PATH, in CUDA_HOME/bin, /usr/local/cuda/bin, or where ./run setup puts it in a build tree. */
bool kernel_find_nvcc(char out[PATH_MAX]);

#endif
