/* What this machine's processors can do at most, measured in tens of milliseconds: the CPU's column of the roofline. */
#ifndef WORKBENCH_CPU_PEAK_H
#define WORKBENCH_CPU_PEAK_H

#include <stddef.h>
#include <stdint.h>

/* What one thread did, in operations or bytes, and the processor's time that it took. */
typedef struct peak_part {
    double amount, cpu_s;
} peak_part;

/* The rate of threads that each have a processor: of the time in which they ran, so that what other programs take of
 * the processors lowers no rate and raises no floor. A part without time counts nothing. */
double peak_rate(const peak_part *parts, uint32_t count);

/* Floating-point operations a second of float32 fused multiply-adds in registers, on the widest vectors of isa
 * (ACR__ISA_*), all threads. *share: of the processors' time, how much this process had meanwhile, 1 on an idle
 * machine. */
double cpu_peak_flops(uint32_t isa, uint32_t threads, double *share);

/* Bytes a second that all threads together read, by the widest vectors of isa, from a working set of this many bytes,
 * each thread its own share, read repeatedly. */
double cpu_peak_read_bytes_per_s(uint32_t isa, size_t bytes, uint32_t threads);

#endif
