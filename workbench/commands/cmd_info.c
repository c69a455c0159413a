/* acromion info: devices, instruction sets, kernels and their limits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/exit_code.h"
#include "base/json.h"
#include "base/options.h"
#include "build_info.h"
#include "commands.h"
#include "kernels/kernel_choice.h"
#include "machine/environment.h"

enum {
    ID_ALL = OPTION_LONG_ONLY
};

static const option_spec options[OPTIONS_MAX] = {
    {ID_ALL, "all", NULL, "every kernel with its limits"},
};

static const command_spec spec = {
    .usage = "info",
    .examples =
        "  acromion info\n  acromion info --all\n  acromion info --json | jq '.kernels[] | select(.here) | .name'\n",
    .about = "Lists the devices that this machine has and the families of kernels that run on them; with --all every\n"
             "kernel with its limits and whether it can run here.\n",
    .options = options,
    .common = COMMON_JSON,
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
    bool *all = arg;
    (void)id, (void)value;
    *all = true;
    return true;
}

static void open_devices(machine_devices *devices)
{
    *devices = (machine_devices){.count = 0};
    for (int32_t ordinal = 0; ordinal < DEVICES_MAX - 1; ++ordinal) {
        acr_ctx_options wanted = ACR_CTX_OPTIONS_INIT;
        wanted.backend = "cuda";
        wanted.device = ordinal;
        if (acr_ctx_create(&devices->contexts[devices->count], &wanted) != ACR_OK) {
            snprintf(devices->cuda_reason, sizeof devices->cuda_reason, "%s", acr_last_error());
            break;
        }
        ++devices->count;
    }
    acr_ctx_options wanted = ACR_CTX_OPTIONS_INIT;
    wanted.backend = "cpu";
    if (acr_ctx_create(&devices->contexts[devices->count], &wanted) == ACR_OK) {
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

enum {
    ISA_TEXT_MAX = 64
};

/* The instruction sets, the widest first, separated by spaces. */
static const char *isa_text(char text[ISA_TEXT_MAX], uint32_t isa)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < ACR__ISA_COUNT; ++i) {
        if (isa & acr__isas[i].bit) {
            used += (size_t)snprintf(text + used, ISA_TEXT_MAX - used, "%s%s", used ? " " : "", acr__isas[i].name);
        }
    }
    return text;
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
        char isa[ISA_TEXT_MAX];
        json_object_set_new(json, "isa", json_string(isa_text(isa, d->isa)));
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

static void print_kernels(const machine_devices *devices)
{
    printf("\nkernels (+ runs here)\n");
    for (size_t i = 0; i < acr__kernel_count; ++i) {
        char limits[160];
        kernel_limits(limits, sizeof limits, acr__kernels[i]);
        const char *found = kernel_found(acr__kernels[i]->name);
        printf("  %c %-44s %s%s%s\n", runs_here(devices, acr__kernels[i]) ? '+' : '-', acr__kernels[i]->name, limits,
               found ? "; " : "", found ? found : "");
    }
}

/* A family's kernels; the rungs of the ladder, which are never planned, count as one family. */
typedef struct family_count {
    const char *name;
    int here, total;
} family_count;

static void count_family(family_count *families, int *count, const acr__kernel *kernel, bool here)
{
    const char *name = kernel->traits & ACR__TRAIT_NEVER_PLANNED ? "the teaching ladder" : kernel->family;
    int i = 0;
    while (i < *count && strcmp(families[i].name, name) != 0) {
        ++i;
    }
    if (i == *count) {
        families[(*count)++] = (family_count){name, 0, 0};
    }
    families[i].here += here;
    ++families[i].total;
}

/* "here: fwd_simd (20), ...", in lines of a terminal's width; nothing where there is none. */
static void print_family_list(const family_count *families, int count, bool here)
{
    static const int WIDTH = 100;
    int column = 0;
    for (int i = 0; i < count; ++i) {
        const int kernels = here ? families[i].here : families[i].total - families[i].here;
        char entry[96];
        if (kernels == 0) {
            continue;
        }
        const int length = snprintf(entry, sizeof entry, "%s (%d)", families[i].name, kernels);
        if (column == 0) {
            column = printf(here ? "  run here: %s" : "  do not:   %s", entry);
        } else if (column + length + 2 > WIDTH) {
            column = printf(",\n            %s", entry) - 2;
        } else {
            column += printf(", %s", entry);
        }
    }
    if (column > 0) {
        printf("\n");
    }
}

static void print_families(const machine_devices *devices)
{
    family_count *families = calloc(acr__kernel_count, sizeof *families);
    int count = 0, here = 0;
    for (size_t i = 0; i < acr__kernel_count && families; ++i) {
        const bool runs = runs_here(devices, acr__kernels[i]);
        count_family(families, &count, acr__kernels[i], runs);
        here += runs;
    }
    printf("kernels: %zu, of which %d run here\n", acr__kernel_count, here);
    print_family_list(families, count, true);
    print_family_list(families, count, false);
    printf("`acromion info --all` lists every kernel, `acromion why PROBLEM` says which is chosen\n");
    free(families);
}

static void print_text(const machine_devices *devices, bool all)
{
    printf("acromion %s (%s%s)\ndevices\n", acr_version(), BUILD_GIT_SHA, BUILD_GIT_DIRTY ? ", modified" : "");
    for (size_t i = 0; i < devices->count; ++i) {
        const acr__device *d = device_of(devices->contexts[i]);
        printf("  %-5s %s\n", backend_name(d->backend), acr_ctx_device(devices->contexts[i]));
        if (all && d->backend == ACR__CPU) {
            char isa[ISA_TEXT_MAX];
            printf("        instruction sets: %s\n", isa_text(isa, d->isa));
        }
    }
    if (devices->count == 1 && *devices->cuda_reason) {
        printf("  cuda  none: %s\n", devices->cuda_reason);
    }
    if (all) {
        print_kernels(devices);
    } else {
        print_families(devices);
    }
}

int cmd_info(int argc, char **argv)
{
    common_options common;
    bool all = false;
    int exit_code = EXIT_DONE;
    if (options_parse(&spec, argc, argv, &common, take_option, &all, &exit_code) < 0) {
        return exit_code;
    }
    machine_devices devices;
    open_devices(&devices);
    if (common.json) {
        print_json(&devices);
    } else {
        print_text(&devices, all);
    }
    for (size_t i = 0; i < devices.count; ++i) {
        acr_ctx_destroy(devices.contexts[i]);
    }
    return EXIT_DONE;
}
