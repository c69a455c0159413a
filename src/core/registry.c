/* kernels.def as a table: the lines of it that this build has (on ARM, say, no avx2). And the names of instruction
 * sets. */
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

const acr__isa acr__isas[ACR__ISA_COUNT] = {{"avx512bf16", ACR__ISA_AVX512BF16},
                                            {"avx512", ACR__ISA_AVX512},
                                            {"avx2", ACR__ISA_AVX2},
                                            {"portable", ACR__ISA_PORTABLE}};

const char *acr__isa_widest(uint32_t isa)
{
    int i = 0;
    while (i < ACR__ISA_COUNT - 1 && !(isa & acr__isas[i].bit))
        i++;
    return acr__isas[i].name;
}
