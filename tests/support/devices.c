/* Devices for tests of planning: round numbers near the real ones, so that choices stay put when the workbench's table
 * is refined. */
#include "devices.h"

#define CPU(isa_bits, thread_count)                                                                                    \
    {                                                                                                                  \
        .backend = ACR__CPU, .name = "test cpu", .isa = (isa_bits), .threads = (thread_count), .l2_bytes = 32 << 20,   \
        .mem_bytes = (int64_t)64 << 30, .clock_hz = 3.0e9, .dram_bytes_per_s = 0.0                                     \
    }
#define GPU(gpu_name, cc, sms, smem_cta, smem_sm, l2_mib, mem_gib, hz, dram)                                           \
    {                                                                                                                  \
        .backend = ACR__CUDA, .name = gpu_name, .threads = 1, .arch = (cc), .sm_count = (sms),                         \
        .smem_per_cta_bytes = (smem_cta), .smem_per_sm_bytes = (smem_sm), .regs_per_sm = 65536,                        \
        .l2_bytes = (int64_t)(l2_mib) << 20, .mem_bytes = (int64_t)(mem_gib) << 30, .driver = 13000, .clock_hz = (hz), \
        .dram_bytes_per_s = (dram)                                                                                     \
    }

const named_device test_devices[TEST_DEVICES] = {
    {"h200", GPU("NVIDIA H200", 90, 132, 232448, 233472, 50, 141, 1.98e9, 4.8e12)},
    {"a100", GPU("NVIDIA A100", 80, 108, 166912, 167936, 40, 80, 1.41e9, 2.0e12)},
    {"l4", GPU("NVIDIA L4", 89, 58, 101376, 102400, 48, 24, 2.04e9, 3.0e11)},
    {"rtx5090", GPU("NVIDIA GeForce RTX 5090", 120, 170, 101376, 102400, 96, 32, 2.4e9, 1.79e12)},
    {"future", GPU("NVIDIA Future", 150, 200, 262144, 270336, 128, 256, 2.5e9, 1.0e13)},
    {"cpu-avx512", CPU(ACR__ISA_PORTABLE | ACR__ISA_AVX2 | ACR__ISA_AVX512, 2)},
    {"cpu-avx2", CPU(ACR__ISA_PORTABLE | ACR__ISA_AVX2, 2)},
    {"cpu-portable", CPU(ACR__ISA_PORTABLE, 2)},
};
