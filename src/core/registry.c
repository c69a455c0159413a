/* kernels.def as a table: the lines of it that this build has (on ARM, say, no avx2). */
#include "kernel.h"

#define KERNEL(name, family, arch, ...) extern const acr__kernel acr__kernel_##name;
#include "kernels_built.def"
#undef KERNEL

const acr__kernel *const acr__kernels[] = {
#define KERNEL(name, family, arch, ...) &acr__kernel_##name,
#include "kernels_built.def"
#undef KERNEL
};

const size_t acr__kernel_count = sizeof acr__kernels / sizeof acr__kernels[0];
