/* The progress line, see progress.h. */
#include "progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

double monotonic_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void progress_begin(progress *p, const char *what, int64_t total)
{
    *p = (progress){what, total, monotonic_s(), 0.0, isatty(STDERR_FILENO) == 1};
}

void progress_step(progress *p, int64_t done, const char *now, const char *best)
{
    double time_s = monotonic_s();
    if (!p->visible || time_s - p->shown_s < 0.1) {
        return;
    }
    p->shown_s = time_s;
    char left[32] = "";
    if (done > 0 && p->total > done) {
        double left_s = (time_s - p->started_s) / (double)done * (double)(p->total - done);
        snprintf(left, sizeof left, ", %.0f s left", left_s);
    }
    fprintf(stderr, "\r\033[K%s %" PRId64 "/%" PRId64 "%s  %.60s%s%.40s", p->what, done, p->total, left, now,
            *best ? "  best " : "", best);
    fflush(stderr);
}

void progress_clear(const progress *p)
{
    if (p->visible) {
        fputs("\r\033[K", stderr);
    }
}
