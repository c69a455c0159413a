/* The variants of this process, see variant.h: what was asked for, and what its maker has loaded. */
#include "variant.h"

#include <stdio.h>
#include <string.h>

static struct {
    const variant_maker *maker;
    const char *asked[VARIANTS_MAX];
    size_t asked_count;
    struct {
        const acr__kernel *kernel;
        const char *base;
    } items[VARIANTS_MAX];
    size_t count;
} all;

void variants_made_by(const variant_maker *maker)
{
    all.maker = maker;
}

void variant_add(const acr__kernel *kernel, const char *base)
{
    if (all.count < VARIANTS_MAX) {
        all.items[all.count].kernel = kernel;
        all.items[all.count++].base = base;
    }
}

bool variant_ask(const char *text)
{
    if (all.asked_count == VARIANTS_MAX) {
        fprintf(stderr, "acromion: --variant: at most %d times\n", VARIANTS_MAX);
        return false;
    }
    all.asked[all.asked_count++] = text;
    return true;
}

bool variant_asked(void)
{
    return all.asked_count > 0;
}

acr_status variants_load(const acr__device *device)
{
    if (all.asked_count > 0 && !all.maker) {
        return acr__fail(ACR_UNSUPPORTED, "variants: this program cannot make them");
    }
    acr_status status = ACR_OK;
    for (size_t i = 0; i < all.asked_count && status == ACR_OK; ++i) {
        status = all.maker->load(all.asked[i], device);
    }
    return status;
}

void variants_unload(void)
{
    all.count = 0;
    if (all.maker) {
        all.maker->unload();
    }
}

size_t variant_count(void)
{
    return all.count;
}

const acr__kernel *variant_at(size_t index)
{
    return all.items[index].kernel;
}

bool variant_is(const acr__kernel *kernel)
{
    for (size_t i = 0; i < all.count; ++i) {
        if (kernel == all.items[i].kernel) {
            return true;
        }
    }
    return false;
}

bool variant_is_base(const acr__kernel *kernel)
{
    for (size_t i = 0; i < all.count; ++i) {
        if (strcmp(kernel->name, all.items[i].base) == 0) {
            return true;
        }
    }
    return false;
}
