/* Searches in tables, see retrospect.h. */
#include "retrospect.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/inputs.h"
#include "parametric.h"

/* Gains of the labs (src/cuda/kernels/<family>/lab.md) that parameters express. */
const retrospect_win retrospect_wins[] = {
    {"two row tiles a warp halve what is read from shared memory", "b4:h16:s2048:d64", "fwd_mma", "80",
     "DIM=64 Q_TILE=128 KV_TILE=64 STAGES=2", "DIM=64 Q_TILE=128 KV_TILE=64 STAGES=2 WARP_ROWS=32"},
    {"key groups for few tiles", "b2:h8:s512:d64", "fwd_mma", "80", "DIM=64 Q_TILE=64 KV_TILE=64 STAGES=2",
     "DIM=64 Q_TILE=64 KV_TILE=32 STAGES=2 KV_GROUPS=4"},
    {"key groups at a decode step", "b1:h32/8:s1/2048:d128", "fwd_split", "80",
     "DIM=128 Q_TILE=16 KV_TILE=64 STAGES=2 KV_GROUPS=1", "DIM=128 Q_TILE=16 KV_TILE=16 STAGES=3 KV_GROUPS=8"},
    {"four consumers of 64 rows and short key tiles", "b4:h16:s2048:d64", "fwd_wgmma", "90a",
     "DIM=64 Q_TILE=192 KV_TILE=128 STAGES=3", "DIM=64 Q_TILE=256 KV_TILE=64 STAGES=4"},
    {"a second tile of Q", "b4:h16:s2048:d64", "fwd_wgmma", "90a", "DIM=64 Q_TILE=256 KV_TILE=64 STAGES=4",
     "DIM=64 Q_TILE=256 KV_TILE=64 STAGES=4 Q_STAGES=2"},
    {"a thread that plans ahead", "b1:h16:s16384:d128:causal:win1024", "fwd_wgmma", "90a",
     "DIM=128 Q_TILE=128 KV_TILE=64 STAGES=2 Q_STAGES=2 AHEAD=1",
     "DIM=128 Q_TILE=128 KV_TILE=128 STAGES=2 Q_STAGES=2 AHEAD=1"},
    {"planning ahead under a mask", "b2:h16:s4096:d128:causal", "fwd_wgmma", "90a",
     "DIM=128 Q_TILE=128 KV_TILE=128 STAGES=2 Q_STAGES=2",
     "DIM=128 Q_TILE=128 KV_TILE=128 STAGES=2 Q_STAGES=2 AHEAD=1"},
    {"longer key tiles", "e4m3:b1:h16:s1024:d128", "fwd_fp8", "90a",
     "DIM=128 Q_TILE=128 KV_TILE=128 STAGES=2 Q_STAGES=2 PROMOTE_TILES=0",
     "DIM=128 Q_TILE=128 KV_TILE=192 STAGES=2 Q_STAGES=2 PROMOTE_TILES=0"},
    {"totals in bfloat16 make room for longer key tiles", "e4m3:b2:h16:s4096:d128", "fwd_fp8", "90a",
     "DIM=128 Q_TILE=128 KV_TILE=128 STAGES=2 Q_STAGES=2",
     "DIM=128 Q_TILE=128 KV_TILE=192 STAGES=2 Q_STAGES=2 PROMOTE_TILES=6 BF16_TOTALS=1"},
    {"four consumers for eight bits", "e4m3:b4:h16:s2048:d64", "fwd_fp8", "90a",
     "DIM=64 Q_TILE=128 KV_TILE=128 STAGES=2", "DIM=64 Q_TILE=256 KV_TILE=64 STAGES=3 PROMOTE_TILES=16"},
    {"shorter query tiles for few heads", "b1:h8:s512:d64", "fwd_short", "90a", "DIM=64 Q_TILE=64 STAGES=4",
     "DIM=64 Q_TILE=32 STAGES=4"},
    {"short query tiles and a late second consumer, found by a search", "e4m3:b1:h8:s512:d128", "fwd_short", "90a",
     "DIM=128 Q_TILE=64 STAGES=2 RING=1", "DIM=128 Q_TILE=32 STAGES=2 RING=1 LAG=200"},
    {"all keys at once, exactly so many", "b2:h8:s512:d64", "fwd_short", "90a", "DIM=64 Q_TILE=64 STAGES=4 RING=1",
     "DIM=64 Q_TILE=64 STAGES=4 EXACT=1"},
    {"the next scores before the score gradients, values' lines in shared memory", "bwd:b2:h8:s512:d64", "bwd_short",
     "90a", "DIM=64 STAGES=4", "DIM=64 STAGES=4 EARLY=1 LINES_IN_SHARED=1"},
    {"two key tiles sum their part of dQ together", "bwd:b2:h16:s4096:d128", "bwd_wgmma", "90a", "DIM=128 Q_TILE=64",
     "DIM=128 Q_TILE=64 PAIR=1"},
    {"deeper rings at a decode step", "b32:h32/8:s1/8192:d128", "fwd_decode", "90a", "DIM=128 STAGES=4",
     "DIM=128 STAGES=6"},
};
const size_t retrospect_win_count = sizeof retrospect_wins / sizeof retrospect_wins[0];

const char *retrospect_way_name(retrospect_way way)
{
    static const char *const names[] = {"random", "moves", "surrogate"};
    return names[way];
}

/* ---- One search ---- */

typedef struct run {
    const retrospect_table *table;
    const retrospect_setup *setup;
    parametric proposer;
    archive learnt, proposed;
    int64_t number; /* of the next proposal */
} run;

static size_t index_of(const retrospect_table *t, const genome *g)
{
    size_t i = 0;
    while (i < t->count && !genome_same(t->spaces, &t->points[i], g)) {
        ++i;
    }
    return i;
}

/* What a comparison would say: the truth within a quarter of a per cent, by the seed. */
static double measured(const run *r, size_t index)
{
    enum {
        STREAM_MEASURED = 98
    };
    const uint64_t bits = random_bits(r->proposer.seed, STREAM_MEASURED, index);
    return r->table->speedups[index] * (1.0 + 0.005 * ((double)(bits >> 11) * 0x1p-53 - 0.5));
}

static member member_at(const run *r, size_t index, int64_t trial)
{
    const retrospect_table *t = r->table;
    const bool valid = index < t->count && isfinite(t->speedups[index]);
    const double speedup = !valid ? NAN : trial == 0 ? 1.0 : measured(r, index);
    member m = {.trial = trial,
                .has_genome = true,
                .genome = t->points[index < t->count ? index : 0],
                .distinct = trial > 0,
                .valid = valid,
                .speedup = speedup,
                .low = speedup,
                .high = speedup,
                .noise_floor = 0.01};
    space_cell(&t->spaces->items[m.genome.space], &m.genome, m.cell);
    return m;
}

/* Proposes a round as the engine does: from what was learnt before it. false: out of memory. */
static bool run_round(run *r, int wanted, size_t *indices, int *count)
{
    *count = 0;
    for (int i = 0; i < wanted; ++i) {
        proposal p;
        if (!parametric_propose(&r->proposer, &r->learnt, &r->proposed, r->number, &p)) {
            return true;
        }
        ++r->number;
        const member m = {.has_genome = true, .genome = p.genome};
        indices[(*count)++] = index_of(r->table, &p.genome);
        if (!archive_add(&r->proposed, &m)) {
            return false;
        }
    }
    return true;
}

static void note_trial(retrospect_found *out, int seed, int trial, double best, const retrospect_table *t, int trials)
{
    if (best >= t->goal && out->trials[seed] > trials) {
        out->trials[seed] = trial;
        ++out->found;
    }
    for (int mark = 0; mark < RETROSPECT_MARKS; ++mark) {
        if (trial <= (mark + 1) * trials / RETROSPECT_MARKS) {
            out->best[seed][mark] = best;
        }
    }
}

static bool search_once(retrospect_found *out, run *r, int seed)
{
    enum {
        GENERATION_MAX = 256
    };
    const retrospect_table *t = r->table;
    const int trials = r->setup->trials, generation = r->setup->generation;
    size_t indices[GENERATION_MAX];
    double best = t->start < t->count ? 1.0 : 0.0;
    int count = 1, trial = 0;
    out->trials[seed] = trials + 1;
    if (t->start < t->count) {
        const member m = member_at(r, t->start, 0);
        if (!archive_add(&r->learnt, &m)) {
            return false;
        }
    }
    while (trial < trials && count > 0) {
        const int wanted = trials - trial < generation ? trials - trial : generation;
        if (!run_round(r, wanted, indices, &count)) {
            return false;
        }
        for (int i = 0; i < count; ++i) {
            const member m = member_at(r, indices[i], ++trial);
            if (!archive_add(&r->learnt, &m)) {
                return false;
            }
            best = m.valid ? fmax(best, t->speedups[indices[i]]) : best;
            note_trial(out, seed, trial, best, t, trials);
        }
    }
    for (++trial; trial <= trials; ++trial) { /* nothing is left to propose */
        note_trial(out, seed, trial, best, t, trials);
    }
    return true;
}

acr_status retrospect_search(retrospect_found *out, const retrospect_table *table, const retrospect_setup *setup,
                             retrospect_way way)
{
    surrogate *fitted = NULL;
    acr_status status = way == RETROSPECT_SURROGATE ? surrogate_create(&fitted, table->spaces) : ACR_OK;
    memset(out, 0, sizeof *out);
    out->seeds = setup->seeds;
    for (int seed = 0; seed < setup->seeds && status == ACR_OK; ++seed) {
        run r = {.table = table,
                 .setup = setup,
                 .proposer = {.spaces = table->spaces,
                              .seed = (uint64_t)seed + 1,
                              .control = way == RETROSPECT_RANDOM,
                              .surrogate = fitted,
                              .points = table->closed ? table->points : NULL,
                              .point_count = table->closed ? table->count : 0}};
        if (!search_once(out, &r, seed)) {
            status = acr__fail(ACR_NO_MEMORY, "no memory for a search");
        }
        archive_free(&r.learnt);
        archive_free(&r.proposed);
    }
    surrogate_free(fitted);
    return status;
}
