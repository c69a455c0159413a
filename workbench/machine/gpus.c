/* The table of GPUs, see gpus.h.
 *
 * Rates are those of the highest clock the card runs at without being asked to exceed its specification, so that a
 * floor computed from them is one. They are dense rates: data sheets of L4, L40S and the SXM parts print twice these,
 * "with sparsity". Check of a line: SMs x FLOP a clock x clock, e.g. L4 58 x 1024 x 2.04 GHz = 121 TFLOP/s, A100 108 x
 * 2048 x 1.41 = 312, H100 SXM 132 x 4096 x 1.83 = 989 (its data sheet's clock; it runs at up to 1.98), L40S 142 x 1024
 * x 2.52 = 366, RTX 4090 128 x 512 x 2.52 = 165, RTX 5090 170 x 512 x 2.41 = 209, B200 148 x 8192 x 1.86 = 2250. */
#include "gpus.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#define KIB(n) ((n)*1024)
#define MIB(n) ((int64_t)(n) << 20)
#define GIB(n) ((int64_t)(n) << 30)

/* Shared memory by architecture (CUDA programming guide, technical specifications per compute capability): the opt-in
 * maximum of a CTA, of an SM. */
#define SMEM_80 .smem_per_cta_bytes = KIB(163), .smem_per_sm_bytes = KIB(164)
#define SMEM_86 .smem_per_cta_bytes = KIB(99), .smem_per_sm_bytes = KIB(100)
#define SMEM_90 .smem_per_cta_bytes = KIB(227), .smem_per_sm_bytes = KIB(228)

#define GPU(vendor_name, arch_number, sms, smem, ghz, dram_gb_s, l2_mib, mem_gib)                                      \
    {                                                                                                                  \
        .backend = ACR__CUDA, .name = vendor_name, .threads = 1, .arch = arch_number, .sm_count = sms, smem,           \
        .regs_per_sm = KIB(64), .l2_bytes = MIB(l2_mib), .mem_bytes = GIB(mem_gib), .driver = 13000,                   \
        .clock_hz = (ghz)*1e9, .dram_bytes_per_s = (dram_gb_s)*1e9                                                     \
    }

/* Launch: 0.7 us was measured on the H200 (docs/manual/measuring.md), 0.95 to 1.24 us is published for the H100; for
 * the rest 1 us is assumed. It is no part of any floor.
 * Link: NVLink of the SXM parts, the bridge of the H100 PCIe and the RTX 3090, else 16 lanes of PCIe. */
const gpu_model gpu_models[] = {
    {"l4", GPU("NVIDIA L4", 89, 58, SMEM_86, 2.04, 300, 48, 24), 0, 1.0e-6, 32,
     "NVIDIA L4 data sheet (242 TFLOP/s there is sparse); boost 2.04 GHz"},
    {"a10", GPU("NVIDIA A10", 86, 72, SMEM_86, 1.695, 600, 6, 24), 0, 1.0e-6, 32, "NVIDIA A10 data sheet: 125 TFLOP/s"},
    {"a100", GPU("NVIDIA A100-SXM4-80GB", 80, 108, SMEM_80, 1.41, 2039, 40, 80), 5120, 1.0e-6, 300,
     "NVIDIA A100 data sheet: 312 TFLOP/s, 2039 GB/s; A100 white paper: L2 5120 B/clk"},
    {"a100-40gb", GPU("NVIDIA A100-SXM4-40GB", 80, 108, SMEM_80, 1.41, 1555, 40, 40), 5120, 1.0e-6, 300,
     "NVIDIA A100 data sheet: 312 TFLOP/s, 1555 GB/s; A100 white paper: L2 5120 B/clk"},
    {"l40s", GPU("NVIDIA L40S", 89, 142, SMEM_86, 2.52, 864, 96, 48), 0, 1.0e-6, 32,
     "NVIDIA L40S data sheet: 362 TFLOP/s dense, 864 GB/s"},
    {"rtx3090", GPU("NVIDIA GeForce RTX 3090", 86, 82, SMEM_86, 1.695, 936, 6, 24), 0, 1.0e-6, 56.25,
     "NVIDIA Ampere GA102 white paper: 71 TFLOP/s with float32 accumulation"},
    {"rtx4090", GPU("NVIDIA GeForce RTX 4090", 89, 128, SMEM_86, 2.52, 1008, 72, 24), 0, 1.0e-6, 32,
     "NVIDIA Ada white paper: 165 TFLOP/s with float32 accumulation (330 with float16)"},
    {"rtx5090", GPU("NVIDIA GeForce RTX 5090", 120, 170, SMEM_86, 2.407, 1792, 96, 32), 0, 1.0e-6, 64,
     "NVIDIA RTX Blackwell white paper: 209 TFLOP/s with float32 accumulation"},
    {"h100", GPU("NVIDIA H100 80GB HBM3", 90, 132, SMEM_90, 1.98, 3350, 50, 80), 4800, 1.2e-6, 450,
     "NVIDIA H100 data sheet: 989 TFLOP/s at 1.83 GHz, here at 1.98; L2 as measured on it, 4200 to 4800 B/clk"},
    {"h100-pcie", GPU("NVIDIA H100 PCIe", 90, 114, SMEM_90, 1.755, 2000, 50, 80), 0, 1.2e-6, 300,
     "NVIDIA H100 data sheet: 756 TFLOP/s at 1.62 GHz, here at its maximum of 1.755"},
    {"h200", GPU("NVIDIA H200", 90, 132, SMEM_90, 1.98, 4800, 60, 141), 4800, 0.7e-6, 450,
     "NVIDIA H200 data sheet: 989 TFLOP/s at 1.83 GHz, here at 1.98; L2 rate as on the H100, size from the driver"},
    {"b200", GPU("NVIDIA B200", 100, 148, SMEM_90, 1.965, 8000, 126, 180), 0, 1.0e-6, 900,
     "NVIDIA HGX B200 data sheet: 2.25 PFLOP/s dense, 8 TB/s"},
};
const size_t gpu_model_count = sizeof gpu_models / sizeof gpu_models[0];

const gpu_model *gpu_find(const char *name)
{
    for (size_t i = 0; i < gpu_model_count; ++i) {
        if (strcasecmp(gpu_models[i].name, name) == 0) {
            return &gpu_models[i];
        }
    }
    return NULL;
}

bool gpu_asked(const char *name, const gpu_model **out)
{
    *out = gpu_find(name);
    if (!*out) {
        fprintf(stderr, "acromion: --gpu: no GPU '%s' in the table; `acromion roofline --gpu help` lists it\n", name);
    }
    return *out != NULL;
}

const gpu_model *gpu_of_device(const acr__device *device)
{
    for (size_t i = 0; i < gpu_model_count; ++i) {
        if (strcmp(gpu_models[i].device.name, device->name) == 0) {
            return &gpu_models[i];
        }
    }
    return NULL;
}

sm_rates gpu_sm_rates(const acr__device *device)
{
    /* Per clock and SM. Special function units: 4 lanes in each of 4 quarters, on every one of these. */
    static const struct {
        int32_t arch_min;
        sm_rates rates;
    } by_arch[] = {
        {120, {1024, 2048, 256, 16}}, {100, {8192, 16384, 256, 16}}, {90, {4096, 8192, 256, 16}},
        {89, {1024, 2048, 256, 16}},  {86, {1024, 1024, 256, 16}},   {0, {2048, 2048, 128, 16}},
    };
    size_t i = 0;
    while (device->arch < by_arch[i].arch_min) {
        ++i;
    }
    sm_rates rates = by_arch[i].rates;
    if (strstr(device->name, "GeForce")) {
        rates.f16 /= 2;
        rates.e4m3 /= 2;
    }
    return rates;
}
