/* Names of the kernels that a line has beside its own: KERNEL_NAME with a suffix. */
#ifndef ACR_DEVICE_ISA_NAMES_CUH
#define ACR_DEVICE_ISA_NAMES_CUH

#define NAME_WITH_(name, suffix) name##suffix
#define NAME_WITH(name, suffix) NAME_WITH_(name, suffix)

#endif
