/* The built-in proposer: seeds, then moves from parents that the archive ranks, or what a surrogate fitted to the
 * trials expects most of; and the control, which draws uniformly. A pure function of the archive, the seed and the
 * proposal's number. */
#ifndef SEARCH_PARAMETRIC_H
#define SEARCH_PARAMETRIC_H

#include "surrogate.h"

enum {
    PARAMETRIC_FIRST = 8, /* proposals before any parent is chosen: the seeds, and random points where they are fewer */
    SEEDS_MAX = PARAMETRIC_FIRST
};

typedef struct proposal {
    genome genome;
    const char *operation; /* seed, random, step, leap, cross, quota, expected, rest */
    int parent_count;
    int64_t parents[2]; /* trials; 0 = the incumbent */
} proposal;

typedef struct parametric {
    const space_list *spaces;
    uint64_t seed;
    bool control;         /* uniform draws, no parents */
    surrogate *surrogate; /* chooses among moves and draws; NULL = a move is taken as it comes */
    const genome *points; /* not NULL: these alone are proposed, by draws without parents */
    size_t point_count;
    int seed_count;
    genome seeds[SEEDS_MAX]; /* proposed first, by both arms */
} parametric;

/* The proposal with this number (from 0) of the arm, given everything the arm has finished in `learnt` and everything
 * it has proposed at all in `proposed`. false when no legal point is left that it has not proposed. */
bool parametric_propose(const parametric *p, const archive *learnt, const archive *proposed, int64_t number,
                        proposal *out);

#endif
