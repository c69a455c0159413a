/* Points of several families' spaces, and the moves a search makes among them. Every move draws from dice and returns a
 * legal point, or says that it found none. */
#ifndef SEARCH_GENOME_H
#define SEARCH_GENOME_H

#include "random.h"
#include "space.h"

enum {
    SPACES_MAX = 16
};

/* The families a search may use, bound to its scene. */
typedef struct space_list {
    search_scene scene;
    int count;
    space items[SPACES_MAX];
} space_list;

bool genome_same(const space_list *spaces, const genome *a, const genome *b);
bool genome_legal(const space_list *spaces, const genome *g);

/* Uniform over families, then over the family's legal points. */
bool genome_random(const space_list *spaces, dice *d, genome *out);

/* One micro parameter a step up or down, or to any other value; sometimes two of them. */
bool genome_step(const space_list *spaces, dice *d, const genome *parent, genome *out);

/* One macro choice changed (a macro parameter, the arch, or the family), the micro parameters kept where that is
 * legal and drawn anew where it is not. */
bool genome_leap(const space_list *spaces, dice *d, const genome *parent, genome *out);

/* The macro choices of one parent; of the parameters that both have, each from either. */
bool genome_cross(const space_list *spaces, dice *d, const genome *a, const genome *b, genome *out);

/* Legal points of all families, by going through them: up to `limit`, at which it stops. visit may be NULL. */
typedef bool genome_visit(void *arg, const genome *g); /* false = stop */
int64_t genome_count(const space_list *spaces, int64_t limit, genome_visit *visit, void *arg);

#endif
