/* The built-in proposer, see parametric.h. */
#include "parametric.h"

enum {
    REDRAWS = 64,         /* until a point comes that was not proposed before */
    EXPECTED_DRAWS = 512, /* that a surrogate chooses among: points drawn uniformly */
    EXPECTED_MOVES = 16,  /* and moves */
    STREAM_SEARCH = 1,
    STREAM_CONTROL
};

/* Of the proposals that are not seeds. The rest are steps from ranked parents. */
static const double RANDOM_SHARE = 0.10, QUOTA_SHARE = 0.45, LEAP_SHARE = 0.15, CROSS_SHARE = 0.10;
static const double RANKED_SHARE = 0.8; /* of parents; the others come from any live cell */
/* With a surrogate: of the proposals that it does not choose, so that what it is wrong about is seen. */
static const double UNCHOSEN_SHARE = 0.1;

/* ---- Parents ---- */

/* Rank r of n with weight 1 / (r + n), r from 1. */
static const member *ranked_parent(const archive *learnt, dice *d)
{
    const member *elites[ARCHIVE_ELITES];
    int count = archive_elites(learnt, elites);
    double total = 0.0;
    for (int r = 1; r <= count; ++r) {
        total += 1.0 / (r + count);
    }
    double drawn = dice_unit(d) * total;
    for (int r = 1; r <= count; ++r) {
        drawn -= 1.0 / (r + count);
        if (drawn < 0.0 || r == count) {
            return elites[r - 1];
        }
    }
    return NULL;
}

static const member *cell_parent(const archive *learnt, dice *d)
{
    archive_cell cells[ARCHIVE_CELLS_MAX];
    const member *best[ARCHIVE_CELLS_MAX];
    int count = archive_cells(learnt, cells), live = 0;
    for (int i = 0; i < count; ++i) {
        if (cells[i].live && cells[i].best) {
            best[live++] = cells[i].best;
        }
    }
    return live > 0 ? best[dice_below(d, live)] : NULL;
}

/* A parent that is a point; NULL when the archive has none. */
static const member *choose_parent(const archive *learnt, dice *d)
{
    const member *m = dice_unit(d) < RANKED_SHARE ? ranked_parent(learnt, d) : cell_parent(learnt, d);
    return m && m->has_genome ? m : NULL;
}

/* A cell below its quota, through its best or, before anything in it was valid, its latest point: every other time the
 * most promising one, else any. */
static const member *quota_parent(const archive *learnt, dice *d)
{
    archive_cell cells[ARCHIVE_CELLS_MAX];
    const member *young[ARCHIVE_CELLS_MAX], *promising = NULL;
    int count = archive_cells(learnt, cells), young_count = 0;
    for (int i = 0; i < count; ++i) {
        const member *m = cells[i].best ? cells[i].best : cells[i].last;
        if (cells[i].tries >= ARCHIVE_QUOTA || !m->has_genome) {
            continue;
        }
        young[young_count++] = m;
        promising = m->valid && (!promising || m->speedup > promising->speedup) ? m : promising;
    }
    if (young_count == 0) {
        return NULL;
    }
    return promising && dice_below(d, 2) ? promising : young[dice_below(d, young_count)];
}

/* ---- Moves ---- */

static bool draw_random(const parametric *p, dice *d, proposal *out)
{
    out->operation = "random";
    out->parent_count = 0;
    if (p->points) {
        out->genome = p->points[dice_below(d, (int64_t)p->point_count)];
        return true;
    }
    return genome_random(p->spaces, d, &out->genome);
}

static bool step_from(const parametric *p, dice *d, const member *parent, const char *operation, proposal *out)
{
    out->operation = operation;
    out->parent_count = 1;
    out->parents[0] = parent->trial;
    return genome_step(p->spaces, d, &parent->genome, &out->genome);
}

static bool cross(const parametric *p, const archive *learnt, dice *d, const member *parent, proposal *out)
{
    const member *other = choose_parent(learnt, d);
    if (!other || other == parent) {
        return step_from(p, d, parent, "step", out);
    }
    *out = (proposal){.operation = "cross", .parent_count = 2, .parents = {parent->trial, other->trial}};
    return genome_cross(p->spaces, d, &parent->genome, &other->genome, &out->genome);
}

static bool move(const parametric *p, const archive *learnt, dice *d, proposal *out)
{
    double which = dice_unit(d);
    const member *parent = which < RANDOM_SHARE ? NULL : choose_parent(learnt, d);
    if (!parent) {
        return draw_random(p, d, out);
    }
    which -= RANDOM_SHARE;
    const member *young = which < QUOTA_SHARE ? quota_parent(learnt, d) : NULL;
    if (young) {
        return step_from(p, d, young, "quota", out);
    }
    which -= QUOTA_SHARE;
    if (which >= 0.0 && which < LEAP_SHARE) {
        *out = (proposal){.operation = "leap", .parent_count = 1, .parents = {parent->trial}};
        return genome_leap(p->spaces, d, &parent->genome, &out->genome);
    }
    which -= LEAP_SHARE;
    return which >= 0.0 && which < CROSS_SHARE ? cross(p, learnt, d, parent, out)
                                               : step_from(p, d, parent, "step", out);
}

/* ---- The last resort: the first point, in counting order, that is new ---- */

typedef struct hunt {
    const parametric *parametric;
    const archive *proposed;
    proposal *out;
    bool found;
} hunt;

static bool take_if_new(void *arg, const genome *g)
{
    hunt *h = arg;
    h->found = !archive_has(h->proposed, h->parametric->spaces, g);
    if (h->found) {
        *h->out = (proposal){.genome = *g, .operation = "rest"};
    }
    return !h->found;
}

static bool find_rest(const parametric *p, const archive *proposed, proposal *out)
{
    hunt h = {p, proposed, out, false};
    for (size_t i = 0; i < p->point_count && !h.found; ++i) {
        take_if_new(&h, &p->points[i]);
    }
    if (!p->points) {
        genome_count(p->spaces, INT64_MAX, take_if_new, &h);
    }
    return h.found;
}

/* Takes what was drawn where it is new and more is expected of it than of the best so far. */
static void take_expected(const parametric *p, const archive *proposed, const proposal *drawn, double *best,
                          proposal *out)
{
    const double improvement = surrogate_predict(p->surrogate, &drawn->genome).improvement;
    if (improvement > *best && !archive_has(proposed, p->spaces, &drawn->genome)) {
        *best = improvement;
        *out = *drawn;
        out->operation = "expected";
    }
}

/* The new point of many, draws and moves, of which the surrogate expects the greatest improvement. false: it has too
 * little to say, or nothing new was drawn. */
static bool draw_expected(const parametric *p, const archive *learnt, const archive *proposed, dice *d, proposal *out)
{
    double best = -1.0;
    size_t count = 0;
    if (!surrogate_fit(p->surrogate, learnt, proposed)) {
        return false;
    }
    const genome *points = surrogate_points(p->surrogate, &count);
    points = p->points ? p->points : points;
    count = p->points ? p->point_count : count;
    const bool all = count <= EXPECTED_DRAWS;
    for (size_t i = 0; i < (all ? count : EXPECTED_DRAWS); ++i) {
        const proposal drawn = {.genome = points[all ? i : (size_t)dice_below(d, (int64_t)count)]};
        take_expected(p, proposed, &drawn, &best, out);
    }
    for (int i = 0; i < EXPECTED_MOVES && !all && !p->points; ++i) {
        proposal drawn = {.operation = NULL};
        if (move(p, learnt, d, &drawn)) {
            take_expected(p, proposed, &drawn, &best, out);
        }
    }
    return best >= 0.0;
}

/* blind: without parents. */
static bool draw_new(const parametric *p, const archive *learnt, const archive *proposed, bool blind, dice *d,
                     proposal *out)
{
    if (!blind && p->surrogate && dice_unit(d) >= UNCHOSEN_SHARE && draw_expected(p, learnt, proposed, d, out)) {
        return true;
    }
    for (int i = 0; i < REDRAWS; ++i) {
        bool made = blind || p->points || i >= REDRAWS / 2 ? draw_random(p, d, out) : move(p, learnt, d, out);
        if (made && !archive_has(proposed, p->spaces, &out->genome)) {
            return true;
        }
    }
    return find_rest(p, proposed, out);
}

bool parametric_propose(const parametric *p, const archive *learnt, const archive *proposed, int64_t number,
                        proposal *out)
{
    *out = (proposal){.operation = "seed"};
    if (number < p->seed_count) {
        out->genome = p->seeds[number];
        return true;
    }
    dice d = dice_of(p->seed, p->control ? STREAM_CONTROL : STREAM_SEARCH, number);
    return draw_new(p, learnt, proposed, p->control || number < PARAMETRIC_FIRST, &d, out);
}
