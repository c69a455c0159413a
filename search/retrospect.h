/* The search looked at from behind: whether it would have found what people found by hand, and in how many trials
 * (docs/manual/evolve.md, "Retrospect"). The clock is the cost model, asked for every legal point of the winner's
 * family before anything is searched, or what a run has recorded; nothing is run. */
#ifndef SEARCH_RETROSPECT_H
#define SEARCH_RETROSPECT_H

#include <stdbool.h>

#include "genome.h"

/* A gain that a lab records: a set, and the one that took its place. */
typedef struct retrospect_win {
    const char *what, *problem, *family, *arch;
    const char *before, *after; /* as kernels.def has them, without the type's parameters */
} retrospect_win;
extern const retrospect_win retrospect_wins[];
extern const size_t retrospect_win_count;

typedef enum retrospect_way {
    RETROSPECT_RANDOM,    /* the control */
    RETROSPECT_MOVES,     /* the built-in proposer, a move as it comes */
    RETROSPECT_SURROGATE, /* and what the surrogate expects most of */
    RETROSPECT_WAYS
} retrospect_way;
const char *retrospect_way_name(retrospect_way way);

enum {
    RETROSPECT_SEEDS_MAX = 64,
    RETROSPECT_MARKS = 4 /* numbers of trials at which curves are kept: a quarter, a half, three quarters, all */
};

/* What searches from a start found, over the seeds. */
typedef struct retrospect_found {
    int seeds, found;                    /* how many reached the goal */
    double trials[RETROSPECT_SEEDS_MAX]; /* until then; those that did not: one more than the budget */
    /* The best true speed-up over the start after each mark. */
    double best[RETROSPECT_SEEDS_MAX][RETROSPECT_MARKS];
} retrospect_found;

/* A table of true speed-ups over a start: what is searched in. */
typedef struct retrospect_table {
    const space_list *spaces;
    genome *points;
    double *speedups; /* over the start; NaN = cannot run */
    size_t count;
    size_t start; /* whose speed-up is 1; SIZE_MAX = not among them */
    double goal;  /* the speed-up to reach */
    bool closed;  /* nothing but these points is known: they are drawn from, and not moved among */
} retrospect_table;

typedef struct retrospect_setup {
    int seeds, trials, generation;
} retrospect_setup;

/* Searches by one way with each seed. `RETROSPECT_MOVES` needs an open table. Errors: ACR_NO_MEMORY. */
acr_status retrospect_search(retrospect_found *out, const retrospect_table *table, const retrospect_setup *setup,
                             retrospect_way way);

#endif
