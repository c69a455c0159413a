/* One line on stderr that says what runs, how far it is, the best so far and the time left. Silent unless stderr is a
 * terminal. */
#ifndef WORKBENCH_PROGRESS_H
#define WORKBENCH_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct progress {
    const char *what;
    int64_t total;
    double started_s, shown_s; /* on the monotonic clock */
    bool visible;
} progress;

/* what lives until progress_end; total is in whatever unit the steps are counted. */
void progress_begin(progress *p, const char *what, int64_t total);
/* done of total are finished; now names what is at work, best the best result so far ("" = none). Redraws ten times a
 * second at most. */
void progress_step(progress *p, int64_t done, const char *now, const char *best);
/* Clears the line, so that ordinary output can follow; a later step draws it again. */
void progress_clear(const progress *p);

/* Seconds on the monotonic clock. */
double monotonic_s(void);

#endif
