/* The archive, see archive.h. Runs have hundreds of trials at most: everything is looked up by going through them. */
#include "archive.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

bool archive_add(archive *a, const member *m)
{
    member *items = room_for_one(a->items, a->count, &a->capacity, sizeof *items);
    if (!items) {
        return false;
    }
    a->items = items;
    a->items[a->count++] = *m;
    return true;
}

void archive_free(archive *a)
{
    free(a->items);
    *a = (archive){NULL, 0, 0};
}

bool archive_has(const archive *a, const space_list *spaces, const genome *g)
{
    for (size_t i = 0; i < a->count; ++i) {
        if (a->items[i].has_genome && genome_same(spaces, &a->items[i].genome, g)) {
            return true;
        }
    }
    return false;
}

/* Whether a takes less of the machine than b: spills, registers, shared memory; then the older one. */
static bool leaner(const member *a, const member *b)
{
    const int64_t needs[][2] = {{a->spill_bytes, b->spill_bytes},
                                {a->registers, b->registers},
                                {a->smem_bytes, b->smem_bytes},
                                {a->trial, b->trial}};
    for (size_t i = 0; i < sizeof needs / sizeof needs[0]; ++i) {
        if (needs[i][0] != needs[i][1]) {
            return needs[i][0] < needs[i][1];
        }
    }
    return false;
}

static bool counts(const member *m, archive_eligible *eligible, void *arg)
{
    return m->valid && isfinite(m->speedup) && (!eligible || eligible(arg, m));
}

const member *archive_best(const archive *a, archive_eligible *eligible, void *arg)
{
    const member *fastest = NULL, *best = NULL;
    for (size_t i = 0; i < a->count; ++i) {
        const member *m = &a->items[i];
        if (counts(m, eligible, arg) && (!fastest || m->speedup > fastest->speedup)) {
            fastest = m;
        }
    }
    for (size_t i = 0; fastest && i < a->count; ++i) {
        const member *m = &a->items[i];
        bool tied = counts(m, eligible, arg) && m->speedup * (1.0 + fastest->noise_floor) >= fastest->speedup;
        if (tied && (!best || leaner(m, best))) {
            best = m;
        }
    }
    return best;
}

/* ---- Elites ---- */

typedef struct ranking {
    const member **out;
    int count;
} ranking;

static bool not_ranked(void *arg, const member *m)
{
    const ranking *r = arg;
    int of_cell = 0;
    for (int i = 0; i < r->count; ++i) {
        of_cell += strcmp(r->out[i]->cell, m->cell) == 0;
        if (r->out[i] == m) {
            return false;
        }
    }
    return of_cell < ARCHIVE_ELITES_A_CELL;
}

int archive_elites(const archive *a, const member *out[ARCHIVE_ELITES])
{
    ranking r = {out, 0};
    for (const member *m = NULL; r.count < ARCHIVE_ELITES && (m = archive_best(a, not_ranked, &r)) != NULL;) {
        out[r.count++] = m;
    }
    return r.count;
}

/* ---- Cells ---- */

static bool of_cell(void *arg, const member *m)
{
    return strcmp(arg, m->cell) == 0;
}

static archive_cell *find_cell(archive_cell *cells, int *count, const char *text)
{
    for (int i = 0; i < *count; ++i) {
        if (strcmp(cells[i].text, text) == 0) {
            return &cells[i];
        }
    }
    if (*count == ARCHIVE_CELLS_MAX) {
        return NULL;
    }
    cells[*count] = (archive_cell){.text = text};
    return &cells[(*count)++];
}

/* A cell gives parents while it is below its quota, and then while fewer than ARCHIVE_LIVE_CELLS are better. */
static void mark_live(archive_cell *cells, int count)
{
    for (int i = 0; i < count; ++i) {
        int better = 0;
        for (int k = 0; k < count && cells[i].best; ++k) {
            better += cells[k].best && cells[k].best->speedup > cells[i].best->speedup;
        }
        cells[i].live = cells[i].tries < ARCHIVE_QUOTA || (cells[i].best && better < ARCHIVE_LIVE_CELLS);
    }
}

int archive_cells(const archive *a, archive_cell out[ARCHIVE_CELLS_MAX])
{
    int count = 0;
    for (size_t i = 0; i < a->count; ++i) {
        const member *m = &a->items[i];
        archive_cell *cell = m->cell[0] ? find_cell(out, &count, m->cell) : NULL;
        if (cell) {
            cell->tries += m->distinct;
            cell->last = m;
        }
    }
    for (int i = 0; i < count; ++i) {
        char text[SPACE_PARAMETERS_MAX];
        memcpy(text, out[i].text, strlen(out[i].text) + 1);
        out[i].best = archive_best(a, of_cell, text);
    }
    mark_live(out, count);
    return count;
}
