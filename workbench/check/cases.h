/* The problems that a kernel must get right: a list, made from its own tiles and dims, in which every pair of values of
 * two axes occurs together wherever the kernel can run it (pairwise covering). The list depends on the kernel and the
 * device alone. */
#ifndef WORKBENCH_CASES_H
#define WORKBENCH_CASES_H

#include <stddef.h>

#include "inputs.h"
#include "internal.h"

enum {
    CASES_MAX = 320,
    CASES_QUICK = 16
};

typedef struct test_case {
    acr_problem problem; /* canonical; the kernel can run it on the device */
    input_kind inputs;
} test_case;

typedef struct case_list {
    test_case items[CASES_MAX];
    size_t count;
    size_t pairs, pairs_covered,
        pairs_impossible; /* of axis values; what is neither covered nor impossible did not fit into CASES_MAX */
} case_list;

/* Makes the list. quick: CASES_QUICK of them, the first, which cover most pairs, and a few with a cache.
 * Empty when the kernel cannot run there. */
void cases_make(case_list *out, const acr__kernel *kernel, const acr__device *device, bool quick);

#endif
