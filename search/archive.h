/* What a search has learnt: a pure fold over the trials of one arm. The best trial of every macro cell is kept for ever
 * (MAP-Elites), and the best ARCHIVE_ELITES of all are ranked. Cells that were tried often enough and are among the
 * worst no longer give parents, but keep their place in the archive. */
#ifndef SEARCH_ARCHIVE_H
#define SEARCH_ARCHIVE_H

#include "gates.h"
#include "genome.h"

enum {
    ARCHIVE_ELITES = 5,        /* ranked over all cells */
    ARCHIVE_ELITES_A_CELL = 2, /* of them, from one cell */
    ARCHIVE_CELLS_MAX = 256,
    ARCHIVE_LIVE_CELLS = 8, /* that give parents, beside those below their quota */
    ARCHIVE_QUOTA = 8       /* distinct trials a cell gets before it can be evicted: macro changes start untuned */
};

/* A trial as the archive sees it. */
typedef struct member {
    int64_t trial; /* 0 = the incumbent */
    bool has_genome;
    genome genome; /* when it has one; else the trial is a whole source */
    char cell[SPACE_PARAMETERS_MAX];
    bool distinct; /* costs budget: neither a duplicate nor a proposal that never became a candidate */
    bool valid;
    double speedup, low, high, noise_floor;
    stats_verdict verdict;
    int64_t spill_bytes, registers, smem_bytes;
    int confirmations;
    bool confirmed; /* by the last of them */
} member;

typedef struct archive {
    member *items; /* by trial */
    size_t count, capacity;
} archive;

typedef struct archive_cell {
    const char *text;
    int tries;          /* distinct trials */
    const member *best; /* NULL = none was valid */
    const member *last;
    bool live;
} archive_cell;

/* Appends a copy. false when out of memory. */
bool archive_add(archive *a, const member *m);
void archive_free(archive *a);

/* Whether the arm has proposed this point before. */
bool archive_has(const archive *a, const space_list *spaces, const genome *g);

/* The best of the trials `eligible` (NULL = all valid ones), or NULL: the greatest speed-up; within the noise floor of
 * it the one with fewer spills, then registers, then shared memory, then the older. */
typedef bool archive_eligible(void *arg, const member *m);
const member *archive_best(const archive *a, archive_eligible *eligible, void *arg);

/* The ranked elites, best first; returns how many. */
int archive_elites(const archive *a, const member *out[ARCHIVE_ELITES]);

/* The cells in the order of their discovery; returns how many. */
int archive_cells(const archive *a, archive_cell out[ARCHIVE_CELLS_MAX]);

#endif
