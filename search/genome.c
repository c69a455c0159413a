/* Moves among points, see genome.h. */
#include "genome.h"

#include <string.h>

enum {
    TRIES = 4096, /* of drawing a legal point; spaces with fewer than one in a thousand are searched in vain */
    STEP_TRIES = 64
};

bool genome_same(const space_list *spaces, const genome *a, const genome *b)
{
    if (a->space != b->space || a->arch != b->arch) {
        return false;
    }
    size_t genes = (size_t)spaces->items[a->space].gene_count;
    return memcmp(a->choice, b->choice, genes * sizeof a->choice[0]) == 0;
}

bool genome_legal(const space_list *spaces, const genome *g)
{
    char reason[SPACE_REASON_MAX];
    return space_legal(&spaces->items[g->space], g, reason);
}

/* Draws the micro parameters (all of them, or those that are not macro) until the point is legal. */
static bool draw_genes(const space_list *spaces, dice *d, bool micro_only, genome *g)
{
    const space *s = &spaces->items[g->space];
    for (int i = 0; i < TRIES; ++i) {
        for (int gene = 0; gene < s->gene_count; ++gene) {
            if (!micro_only || !s->genes[gene].macro) {
                g->choice[gene] = (int)dice_below(d, s->genes[gene].count);
            }
        }
        if (!micro_only) {
            g->arch = (int)dice_below(d, s->arch_count);
        }
        if (genome_legal(spaces, g)) {
            return true;
        }
    }
    return false;
}

bool genome_random(const space_list *spaces, dice *d, genome *out)
{
    genome g = {.space = (int)dice_below(d, spaces->count)};
    bool found = draw_genes(spaces, d, false, &g);
    *out = g;
    return found;
}

/* Moves one parameter to another of its values; false where it has only one. */
static bool move_gene(const space_gene *gene, dice *d, int *choice)
{
    static const double NEIGHBOUR_SHARE = 0.7;
    if (gene->count < 2) {
        return false;
    }
    if (dice_unit(d) < NEIGHBOUR_SHARE) {
        int next = *choice + (dice_below(d, 2) ? 1 : -1);
        *choice = next < 0 ? 1 : next == gene->count ? gene->count - 2 : next;
    } else {
        int other = (int)dice_below(d, gene->count - 1);
        *choice = other + (other >= *choice);
    }
    return true;
}

/* The n-th parameter of a kind. */
static int nth_gene(const space *s, bool macro, int64_t n)
{
    for (int i = 0; i < s->gene_count; ++i) {
        if (s->genes[i].macro == macro && n-- == 0) {
            return i;
        }
    }
    return -1;
}

static int count_genes(const space *s, bool macro)
{
    int count = 0;
    for (int i = 0; i < s->gene_count; ++i) {
        count += s->genes[i].macro == macro;
    }
    return count;
}

bool genome_step(const space_list *spaces, dice *d, const genome *parent, genome *out)
{
    static const double TWO_SHARE = 0.25;
    const space *s = &spaces->items[parent->space];
    int micros = count_genes(s, false);
    for (int i = 0; i < STEP_TRIES && micros > 0; ++i) {
        genome g = *parent;
        int moves = dice_unit(d) < TWO_SHARE ? 2 : 1;
        for (int move = 0; move < moves; ++move) {
            int gene = nth_gene(s, false, dice_below(d, micros));
            move_gene(&s->genes[gene], d, &g.choice[gene]);
        }
        if (!genome_same(spaces, &g, parent) && genome_legal(spaces, &g)) {
            *out = g;
            return true;
        }
    }
    return false;
}

/* Copies the values that both spaces have, by name. Macro choices stay; either: each with probability one half. */
static void inherit(const space_list *spaces, const genome *from, dice *d, bool either, genome *to)
{
    const space *source = &spaces->items[from->space], *target = &spaces->items[to->space];
    for (int i = 0; i < target->gene_count; ++i) {
        for (int k = 0; k < source->gene_count && !target->genes[i].macro; ++k) {
            if (strcmp(target->genes[i].name, source->genes[k].name) != 0 || (either && dice_below(d, 2))) {
                continue;
            }
            int64_t value = source->genes[k].values[from->choice[k]];
            for (int v = 0; v < target->genes[i].count; ++v) {
                to->choice[i] = target->genes[i].values[v] == value ? v : to->choice[i];
            }
        }
    }
}

/* Another family at a random point, with the parent's values where it has the same parameters. */
static bool leap_to_family(const space_list *spaces, dice *d, const genome *parent, genome *out)
{
    int other = (int)dice_below(d, spaces->count - 1);
    genome g = {.space = other + (other >= parent->space)};
    if (!draw_genes(spaces, d, false, &g)) {
        return false;
    }
    *out = g;
    inherit(spaces, parent, d, false, &g);
    if (genome_legal(spaces, &g)) {
        *out = g;
    }
    return true;
}

bool genome_leap(const space_list *spaces, dice *d, const genome *parent, genome *out)
{
    static const double FAMILY_SHARE = 0.25;
    const space *s = &spaces->items[parent->space];
    int macros = count_genes(s, true);
    for (int i = 0; i < STEP_TRIES; ++i) {
        if (spaces->count > 1 && (macros + s->arch_count == 1 || dice_unit(d) < FAMILY_SHARE)) {
            return leap_to_family(spaces, d, parent, out);
        }
        genome g = *parent;
        int64_t which = dice_below(d, macros + 1); /* the last one is the arch */
        if (which == macros) {
            g.arch = (int)dice_below(d, s->arch_count);
        } else {
            int gene = nth_gene(s, true, which);
            move_gene(&s->genes[gene], d, &g.choice[gene]);
        }
        if (genome_same(spaces, &g, parent)) {
            continue;
        }
        if (genome_legal(spaces, &g) || draw_genes(spaces, d, true, &g)) {
            *out = g;
            return true;
        }
    }
    return false;
}

bool genome_cross(const space_list *spaces, dice *d, const genome *a, const genome *b, genome *out)
{
    for (int i = 0; i < STEP_TRIES; ++i) {
        genome g = *a;
        inherit(spaces, b, d, true, &g);
        if (!genome_same(spaces, &g, a) && !genome_same(spaces, &g, b) && genome_legal(spaces, &g)) {
            *out = g;
            return true;
        }
    }
    return false;
}

/* The next point in counting order; false after the last. */
static bool count_on(const space *s, genome *g)
{
    for (int i = s->gene_count - 1; i >= 0; --i) {
        if (++g->choice[i] < s->genes[i].count) {
            return true;
        }
        g->choice[i] = 0;
    }
    return ++g->arch < s->arch_count;
}

int64_t genome_count(const space_list *spaces, int64_t limit, genome_visit *visit, void *arg)
{
    int64_t count = 0;
    for (int i = 0; i < spaces->count; ++i) {
        genome g = {.space = i};
        do {
            if (genome_legal(spaces, &g)) {
                ++count;
                if ((visit && !visit(arg, &g)) || count >= limit) {
                    return count;
                }
            }
        } while (count_on(&spaces->items[i], &g));
    }
    return count;
}
