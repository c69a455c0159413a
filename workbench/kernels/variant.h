/* Variants: kernels that are not in kernels.def, each a listed kernel with other parameters, compiled when asked for.
 * For experiments beside the listed kernel (`acromion bench --variant`): the planner never sees them.
 *
 * Written BASE:NAME=VALUE,NAME=VALUE, for example fwd_short_f16_d64_128x64_s6_ring_sm90a:LAG=200; called
 * BASE+NAME=VALUE,NAME=VALUE in tables and records. A folder stands for what `acromion variant` compiled into it. */
#ifndef WORKBENCH_VARIANT_H
#define WORKBENCH_VARIANT_H

#include <stdbool.h>
#include <stddef.h>

#include "internal.h"

enum {
    VARIANTS_MAX = 32 /* in one process */
};

/* Who compiles and loads variants: the search, as it does with its candidates. The workbench knows it by this only. */
typedef struct variant_maker {
    /* Loads what one --variant names, compiling it into a temporary folder where it is not compiled yet, and hands each
     * kernel to variant_add. */
    acr_status (*load)(const char *asked, const acr__device *device);
    void (*unload)(void); /* all of them, and what was compiled for them */
} variant_maker;
void variants_made_by(const variant_maker *maker);
/* A loaded variant of the listed kernel `base`; both outlive the maker's unload. */
void variant_add(const acr__kernel *kernel, const char *base);

/* Notes what --variant was given, for variants_load. False after printing what is wrong. */
bool variant_ask(const char *text);
bool variant_asked(void);

/* Loads what was asked for. From then on kernel_at (kernel_choice.h) lists it. Returns ACR_OK at once when nothing was
 * asked for. Errors: ACR_UNSUPPORTED where nobody makes variants; the maker's. Free with variants_unload. */
acr_status variants_load(const acr__device *device);
void variants_unload(void);

/* The loaded ones. */
size_t variant_count(void);
const acr__kernel *variant_at(size_t index);
bool variant_is(const acr__kernel *kernel);
/* Whether a loaded variant is one of this listed kernel. */
bool variant_is_base(const acr__kernel *kernel);

#endif
