/* The search's live line on stderr: how far it is, the best so far against incumbent, peers and floor, the time left.
 * Silent unless stderr is a terminal. */
#ifndef SEARCH_SCREEN_H
#define SEARCH_SCREEN_H

#include "fold.h"

typedef struct screen {
    bool visible;
    double started_s;
    double limit_s;      /* 0 = none */
    int trials;          /* budget of an arm */
    int64_t done_before; /* distinct trials of both arms when this slice began */
    char against[160];   /* "incumbent 7.7 us, cudnn 9.2, floor 2.3" */
} screen;

/* control: the incumbent's own times; peers: bench records, or NULL. Of several problems the first is shown. */
void screen_begin(screen *s, const definition *d, const fold *f, const trial_result *control, const json_t *peers,
                  double limit_s);
/* now: what is at work. */
void screen_draw(const screen *s, const fold *f, const char *now);
void screen_clear(const screen *s);

#endif
