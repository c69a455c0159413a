/* Kernels named on the command line, see kernel_choice.h. */
#include "kernel_choice.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "variant.h"

size_t kernel_total(void)
{
    return acr__kernel_count + variant_count();
}

const acr__kernel *kernel_at(size_t index)
{
    return index < acr__kernel_count ? acr__kernels[index] : variant_at(index - acr__kernel_count);
}

static bool means(const char *pattern, const acr__kernel *kernel)
{
    return strcmp(kernel->family, pattern) == 0 || fnmatch(pattern, kernel->name, 0) == 0;
}

bool kernel_matches(const acr__kernel *kernel, const kernel_patterns *patterns)
{
    if (variant_is(kernel)) {
        return true;
    }
    if (patterns->count == 0) {
        return variant_count() == 0 || variant_is_base(kernel);
    }
    for (int i = 0; i < patterns->count; ++i) {
        if (means(patterns->items[i], kernel)) {
            return true;
        }
    }
    return false;
}

bool kernel_patterns_add(kernel_patterns *patterns, const char *pattern)
{
    if (patterns->count == KERNEL_PATTERNS_MAX) {
        fprintf(stderr, "acromion: -k: at most %d times\n", KERNEL_PATTERNS_MAX);
        return false;
    }
    for (size_t i = 0; i < acr__kernel_count; ++i) {
        if (means(pattern, acr__kernels[i])) {
            patterns->items[patterns->count++] = pattern;
            return true;
        }
    }
    fprintf(stderr, "acromion: no kernel is called '%s', and no family; `acromion info` lists them\n", pattern);
    return false;
}

const char *backend_name(acr__backend_id backend)
{
    return backend == ACR__CUDA ? "cuda" : "cpu";
}

const char *kernel_not_here(const acr__kernel *kernel, const acr__device *device)
{
    /* The smallest problem of the kernel's own type and dims: what remains are reasons that hold for all problems. */
    acr_problem p = ACR_PROBLEM_INIT;
    p.dtype = kernel->dtype;
    p.out_dtype = acr__usual_out_dtype(kernel);
    p.batch = p.q_heads = 1;
    p.q_len = kernel->q_tile > 0 ? kernel->q_tile : 1;
    p.kv_len = kernel->kv_tile > 0 ? kernel->kv_tile : 1;
    p.qk_dim = kernel->qk_dim_max;
    p.v_dim = kernel->v_dim_max;
    return acr_problem_canonical(&p, &p) == ACR_OK ? acr__why_not(kernel, &p, device) : acr_last_error();
}

void digest_text(char out[17], const acr__kernel *kernel)
{
    snprintf(out, 17, "%016" PRIx64, acr__kernel_digest(kernel));
}

const char *kernel_found(const char *name)
{
    static const struct {
        const char *kernel, *text;
    } found[] = {
#define FOUND(kernel, trial, how, run) {#kernel, "found by evolve, trial " #trial " (" how ") of " run},
#include "found.def"
#undef FOUND
    };
    for (size_t i = 0; i < sizeof found / sizeof found[0]; ++i) {
        if (strcmp(found[i].kernel, name) == 0) {
            return found[i].text;
        }
    }
    return NULL;
}

json_t *kernel_json(const acr__kernel *kernel)
{
    char digest[17];
    digest_text(digest, kernel);
    json_t *json =
        json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:b, s:b, s:s}", "name", kernel->name, "family",
                  kernel->family, "backend", backend_name(kernel->backend), "dtype", acr__dtype_text(kernel->dtype),
                  "qk_dim_max", (int)kernel->qk_dim_max, "v_dim_max", (int)kernel->v_dim_max, "q_tile",
                  (int)kernel->q_tile, "kv_tile", (int)kernel->kv_tile, "stages", (int)kernel->stages, "last_resort",
                  (int)(kernel->traits & ACR__TRAIT_LAST_RESORT), "never_planned",
                  (int)(kernel->traits & ACR__TRAIT_NEVER_PLANNED), "digest", digest);
    if (kernel_found(kernel->name)) {
        json_object_set_new(json, "found", json_string(kernel_found(kernel->name)));
    }
    if (kernel->backend == ACR__CUDA) {
        json_object_set_new(json, "arch_min", json_integer(kernel->arch_min));
        json_object_set_new(json, "arch_max", json_integer(kernel->arch_max));
        json_object_set_new(json, "image_bytes", json_integer(kernel->image_end - kernel->image));
    }
    return json;
}

acr_status kernel_planned(const acr__kernel **out, acr_ctx *ctx, const acr_problem *problem)
{
    acr_plan *plan = NULL;
    acr_status status = acr_plan_create(&plan, ctx, problem, ACR_ESTIMATE);
    if (status != ACR_OK) {
        return status;
    }
    *out = NULL;
    for (size_t i = 0; i < kernel_total() && !*out; ++i) {
        *out = strcmp(kernel_at(i)->name, acr_plan_kernel(plan)) == 0 ? kernel_at(i) : NULL;
    }
    acr_plan_destroy(plan);
    return *out ? ACR_OK : acr__fail(ACR_UNSUPPORTED, "the planner's kernel is not listed");
}
