/* acromion evolve --retrospect: whether the search would have found what people found by hand. */
#ifndef SEARCH_EVOLVE_RETROSPECT_H
#define SEARCH_EVOLVE_RETROSPECT_H

#include <stdbool.h>

#include "base/options.h"
#include "machine/gpus.h"

typedef struct retrospect_request {
    const common_options *common;
    const gpu_model *gpu; /* whose cost model is the clock; NULL = h200 */
    const char *tree;     /* the source tree */
    const char *only;     /* a pattern of families; "" = all */
    int trials, generation;
    char **recorded; /* files of `trials export`, each searched with its own times as the clock */
    int recorded_count;
    uint32_t threads;
    const volatile int *stop; /* not 0: nothing more is begun */
} retrospect_request;

/* Returns the exit code. */
int evolve_retrospect(const retrospect_request *request);

#endif
