/* What this machine's processors can do at most, measured in tens of milliseconds: the CPU's column of the roofline. */
#ifndef WORKBENCH_CPU_PEAK_H
#define WORKBENCH_CPU_PEAK_H

#include <stddef.h>
#include <stdint.h>

/* Floating-point operations a second of float32 fused multiply-adds in registers, on the widest vectors of isa
 * (ACR__ISA_*), all threads. */
double cpu_peak_flops(uint32_t isa, uint32_t threads);

/* Bytes a second that all threads together read from a working set of this many bytes, each thread its own share, read
 * repeatedly. */
double cpu_peak_read_bytes_per_s(size_t bytes, uint32_t threads);

#endif
