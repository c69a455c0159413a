/* What a run's own trials say about points that were not tried: a Gaussian process over the points of the spaces, of
 * the logarithm of the speed-up, with the uncertainty that a choice by expected improvement needs
 * (docs/internals/statistics.md, "The surrogate of a search"). Pure arithmetic: the same trials give the same
 * numbers. */
#ifndef SEARCH_SURROGATE_H
#define SEARCH_SURROGATE_H

#include "archive.h"

enum {
    SURROGATE_POINTS_MAX = 1 << 16, /* legal points that it looks at; of more those that come first in counting order */
    SURROGATE_TRIALS_MAX = 256,     /* the latest; what is older has no say */
    SURROGATE_TRIALS_MIN = 4        /* fewer say nothing */
};

typedef struct surrogate surrogate;

/* Room for all that a fit needs. spaces must outlive it. Errors: ACR_NO_MEMORY. One thread at a time. */
acr_status surrogate_create(surrogate **out, const space_list *spaces);
void surrogate_free(surrogate *s);

/* Fits it to an arm's finished trials. A trial that is not valid counts as slow as the slowest valid one; duplicates
 * and whole sources have no say. Points that were proposed and are not finished count as if they had shown what is
 * expected of them, so that a round does not ask the same question twice. false: too few trials. */
bool surrogate_fit(surrogate *s, const archive *learnt, const archive *proposed);

/* What is expected of a point, of a fitted surrogate: the logarithm of its speed-up. */
typedef struct surrogate_view {
    double mean, deviation;
    double improvement; /* expected, over the best that was seen */
} surrogate_view;
surrogate_view surrogate_predict(const surrogate *s, const genome *g);

/* The legal points of the spaces, in counting order, of a fitted surrogate: counted by its first fit. */
const genome *surrogate_points(const surrogate *s, size_t *count);

#endif
