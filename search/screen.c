/* The live line, see screen.h. */
#include "screen.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/progress.h"
#include "base/text.h"

/* The fastest of the peers' records for a problem; NULL = none. */
static const json_t *fastest_peer(const json_t *peers, const char *problem)
{
    const json_t *best = NULL;
    for (size_t i = 0; i < json_array_size(peers); ++i) {
        const json_t *record = json_array_get(peers, i);
        const char *of = json_string_value(json_object_get(record, "problem"));
        double us = json_number_value(json_object_get(record, "p50_us"));
        bool wanted = of && strcmp(of, problem) == 0 && json_object_get(record, "peer") && us > 0.0;
        if (wanted && (!best || us < json_number_value(json_object_get(best, "p50_us")))) {
            best = record;
        }
    }
    return best;
}

void screen_begin(screen *s, const definition *d, const fold *f, const trial_result *control, const json_t *peers,
                  double limit_s)
{
    *s = (screen){.visible = isatty(STDERR_FILENO) == 1,
                  .started_s = monotonic_s(),
                  .limit_s = limit_s,
                  .trials = d->trials,
                  .done_before = f->counts[ARM_SEARCH].distinct + f->counts[ARM_CONTROL].distinct};
    if (control->timing_count == 0) {
        return;
    }
    char us[24], floor[24], peer_us[24], peer_text[64] = "";
    const trial_timing *t = &control->timings[0];
    const json_t *peer = fastest_peer(peers, t->problem);
    if (peer) {
        snprintf(peer_text, sizeof peer_text, ", %.24s %s", json_string_value(json_object_get(peer, "peer")),
                 us_text(peer_us, json_number_value(json_object_get(peer, "p50_us"))));
    }
    snprintf(s->against, sizeof s->against, "incumbent %s us%s, floor %s", us_text(us, t->incumbent.p50), peer_text,
             us_text(floor, t->floor_us));
}

static void time_left(const screen *s, const fold *f, char out[48])
{
    double elapsed = monotonic_s() - s->started_s;
    int64_t done = f->counts[ARM_SEARCH].distinct + f->counts[ARM_CONTROL].distinct - s->done_before;
    int64_t wanted = (int64_t)ARM_COUNT * s->trials - s->done_before;
    double left = done > 0 ? elapsed / (double)done * (double)(wanted - done) : NAN;
    if (s->limit_s > 0.0) {
        left = fmin(left, s->limit_s - elapsed); /* fmin leaves out NaN */
    }
    out[0] = '\0';
    if (isfinite(left) && left >= 0.0) {
        snprintf(out, 48, ", %d:%02d left", (int)left / 60, (int)left % 60);
    }
}

void screen_draw(const screen *s, const fold *f, const char *now)
{
    if (!s->visible) {
        return;
    }
    const arm_counts *c = &f->counts[ARM_SEARCH], *control = &f->counts[ARM_CONTROL];
    char left[48], line[600], best[160] = "no improvement yet";
    time_left(s, f, left);
    if (c->best_kernel) {
        snprintf(best, sizeof best, "best %.3fx %s", c->best_speedup, c->best_kernel);
    }
    snprintf(line, sizeof line,
             "%lld/%d (control %lld): proposed %lld, valid %lld, improved %lld%s | %s | %s | control %.3fx | %s",
             (long long)c->distinct, s->trials, (long long)control->distinct, (long long)c->proposed,
             (long long)c->valid, (long long)c->improved, left, best, s->against, control->best_speedup, now);
    struct winsize size = {0};
    int columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1 : 119;
    fprintf(stderr, "\r\033[K%.*s", columns, line);
    fflush(stderr);
}

void screen_clear(const screen *s)
{
    if (s->visible) {
        fputs("\r\033[K", stderr);
    }
}
