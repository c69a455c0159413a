/* acromion info: devices, instruction sets, kernels and their limits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/command.h"
#include "base/json.h"
#include "base/options.h"
#include "build_info.h"
#include "kernels/kernel_choice.h"
#include "machine/environment.h"

static const command_spec spec = {
    .name = "info",
    .operands = "",
    .about = "Lists the devices that this machine has, and every kernel with its limits and whether it can run here.\n",
    .common = COMMON_JSON,
    .examples = "  acromion info\n  acromion info --json | jq '.kernels[] | select(.here) | .name'\n",
};

enum {
    DEVICES_MAX = 17
}; /* GPUs 0 to 15 and the CPU */

typedef struct machine_devices {
    acr_ctx *contexts[DEVICES_MAX];
    size_t count;
    char cuda_reason[512]; /* why there is no (further) GPU */
} machine_devices;

static bool take_option(void *arg, int id, const char *value)
{
    (void)arg, (void)id, (void)value;
    return false;
}

static void open_devices(machine_devices *devices)
{
    *devices = (machine_devices){.count = 0};
    for (int32_t ordinal = 0; ordinal < DEVICES_MAX - 1; ++ordinal) {
        acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
        options.backend = "cuda";
        options.device = ordinal;
        if (acr_ctx_create(&devices->contexts[devices->count], &options) != ACR_OK) {
            snprintf(devices->cuda_reason, sizeof devices->cuda_reason, "%s", acr_last_error());
            break;
        }
        ++devices->count;
    }
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cpu";
    if (acr_ctx_create(&devices->contexts[devices->count], &options) == ACR_OK) {
        ++devices->count;
    }
}

static const acr__device *device_of(const acr_ctx *ctx)
{
    return &acr__ctx_backend_device(ctx)->device;
}

static bool runs_here(const machine_devices *devices, const acr__kernel *kernel)
{
    for (size_t i = 0; i < devices->count; ++i) {
        if (!kernel_not_here(kernel, device_of(devices->contexts[i]))) {
            return true;
        }
    }
    return false;
}

static const char *isa_text(uint32_t isa)
{
    return isa & ACR__ISA_AVX512 ? "avx512 avx2 portable" : isa & ACR__ISA_AVX2 ? "avx2 portable" : "portable";
}

static json_t *device_json(const acr_ctx *ctx)
{
    const acr__device *d = device_of(ctx);
    json_t *json = json_pack("{s:s, s:s, s:s, s:f}", "backend", backend_name(d->backend), "name", d->name, "text",
                             acr_ctx_device(ctx), "clock_mhz", d->clock_hz / 1e6);
    if (d->backend == ACR__CUDA) {
        char driver[64];
        driver_text(driver, sizeof driver, d);
        json_object_set_new(json, "arch", json_integer(d->arch));
        json_object_set_new(json, "sm_count", json_integer(d->sm_count));
        json_object_set_new(json, "smem_per_cta_bytes", json_integer(d->smem_per_cta_bytes));
        json_object_set_new(json, "l2_bytes", json_integer(d->l2_bytes));
        json_object_set_new(json, "mem_bytes", json_integer(d->mem_bytes));
        json_object_set_new(json, "driver", json_string(driver));
    } else {
        json_object_set_new(json, "isa", json_string(isa_text(d->isa)));
        json_object_set_new(json, "threads", json_integer(d->threads));
    }
    return json;
}

static void print_json(const machine_devices *devices)
{
    json_t *device_list = json_array(), *kernel_list = json_array();
    for (size_t i = 0; i < devices->count; ++i) {
        json_array_append_new(device_list, device_json(devices->contexts[i]));
    }
    for (size_t i = 0; i < acr__kernel_count; ++i) {
        json_t *kernel = kernel_json(acr__kernels[i]);
        json_object_set_new(kernel, "here", json_boolean(runs_here(devices, acr__kernels[i])));
        json_array_append_new(kernel_list, kernel);
    }
    json_print(json_pack("{s:s, s:s, s:b, s:o, s:s, s:o}", "library", acr_version(), "git_sha", BUILD_GIT_SHA, "dirty",
                         BUILD_GIT_DIRTY, "devices", device_list, "cuda_note", devices->cuda_reason, "kernels",
                         kernel_list));
}

static void kernel_limits(char *out, size_t capacity, const acr__kernel *k)
{
    char arch[32] = "";
    if (k->backend == ACR__CUDA && k->arch_max > k->arch_min) {
        snprintf(arch, sizeof arch, acr__kernel_has_ptx(k) ? "sm_%d and newer" : "sm_%d to sm_%d", k->arch_min,
                 k->arch_max);
    } else if (k->backend == ACR__CUDA) {
        snprintf(arch, sizeof arch, "sm_%d", k->arch_min);
    }
    snprintf(out, capacity, "%-5s d <= %d%s  tile %dx%d  %s%s%s", acr__dtype_text(k->dtype), k->qk_dim_max,
             k->v_dim_max != k->qk_dim_max ? " (values differ)" : "", k->q_tile, k->kv_tile, arch,
             k->traits & ACR__TRAIT_LAST_RESORT ? "  last resort" : "",
             k->traits & ACR__TRAIT_NEVER_PLANNED ? "  never planned" : "");
}

static void print_text(const machine_devices *devices)
{
    printf("acromion %s (%s%s)\n\ndevices\n", acr_version(), BUILD_GIT_SHA, BUILD_GIT_DIRTY ? ", modified" : "");
    for (size_t i = 0; i < devices->count; ++i) {
        const acr__device *d = device_of(devices->contexts[i]);
        printf("  %-5s %s\n", backend_name(d->backend), acr_ctx_device(devices->contexts[i]));
        if (d->backend == ACR__CPU) {
            printf("        instruction sets: %s\n", isa_text(d->isa));
        }
    }
    if (devices->count == 1 && *devices->cuda_reason) {
        printf("  cuda  none: %s\n", devices->cuda_reason);
    }
    printf("\nkernels (+ runs here)\n");
    for (size_t i = 0; i < acr__kernel_count; ++i) {
        char limits[160];
        kernel_limits(limits, sizeof limits, acr__kernels[i]);
        printf("  %c %-44s %s\n", runs_here(devices, acr__kernels[i]) ? '+' : '-', acr__kernels[i]->name, limits);
    }
}

int cmd_info(int argc, char **argv)
{
    common_options common;
    int exit_code = EXIT_DONE;
    if (options_parse(&spec, argc, argv, &common, take_option, NULL, &exit_code) < 0) {
        return exit_code;
    }
    machine_devices devices;
    open_devices(&devices);
    if (common.json) {
        print_json(&devices);
    } else {
        print_text(&devices);
    }
    for (size_t i = 0; i < devices.count; ++i) {
        acr_ctx_destroy(devices.contexts[i]);
    }
    return EXIT_DONE;
}
