/* The diagnosis, see profile_diagnosis.h. */
#include "profile_diagnosis.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

/* Adds to the text. */
static void say(diagnosis *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(diagnosis *out, const char *format, ...)
{
    size_t length = strlen(out->text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(out->text + length, sizeof out->text - length, format, arguments);
    va_end(arguments);
}

static const profile_counter units[] = {COUNTER_TENSOR, COUNTER_EXPONENTIALS, COUNTER_FMA, COUNTER_ALU,
                                        COUNTER_ISSUE,  COUNTER_SHARED,       COUNTER_L2,  COUNTER_DRAM};

static void find_busiest(diagnosis *out, const profile_counters *c)
{
    out->bound_pct = NAN;
    out->busiest = "nothing that was counted";
    for (size_t i = 0; i < sizeof units / sizeof units[0]; ++i) {
        double pct = c->value[units[i]];
        if (!isnan(pct) && !(pct <= out->bound_pct)) {
            out->bound_pct = pct;
            out->busiest = counter_infos[units[i]].what;
        }
    }
    out->bound = isnan(out->bound_pct) ? "unknown" : out->bound_pct >= DIAGNOSIS_BUSY_PCT ? out->busiest : "latency";
}

/* The others that are nearly as busy: a kernel between several limits gains little from easing one. */
static void say_also(diagnosis *out, const profile_counters *c)
{
    static const double nearly = 0.85, some_pct = 30; /* below that no unit is a limit */
    bool any = false;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; ++i) {
        const char *what = counter_infos[units[i]].what;
        double pct = c->value[units[i]];
        if (strcmp(what, out->busiest) != 0 && pct > nearly * out->bound_pct && pct > some_pct) {
            say(out, "%s%s %.0f %%", any ? ", " : " Nearly as busy: ", what, pct);
            any = true;
        }
    }
    if (any) {
        say(out, ".");
    }
}

/* The reasons by size, those of less than a tenth of a warp left out. */
static void say_stalls(diagnosis *out, const profile_counters *c)
{
    enum {
        NAMED = 3
    };
    double below = INFINITY;
    for (int rank = 0; rank < NAMED; ++rank) {
        int most = -1;
        for (int i = 0; i < STALL_COUNT; ++i) {
            if (c->stall[i] < below && (most < 0 || c->stall[i] > c->stall[most])) {
                most = i;
            }
        }
        if (most < 0 || c->stall[most] < 0.1) {
            break;
        }
        below = c->stall[most];
        say(out, "%s%s (%.2f warps)", rank == 0 ? " Warps wait for " : ", ", stall_infos[most].what, below);
    }
    if (below < INFINITY) {
        say(out, ".");
    }
}

static void say_conflicts(diagnosis *out, const profile_counters *c)
{
    double share = c->value[COUNTER_CONFLICTS] / c->value[COUNTER_WAVEFRONTS];
    if (share > 0.05) {
        say(out, " %.0f %% of the shared-memory wavefronts are repeats for bank conflicts.", 100 * share);
    }
}

/* Why SMs stand empty, where they do. */
static void say_idle(diagnosis *out, const profile_counters *c, const acr__device *device, double launch_s)
{
    double active = c->value[COUNTER_SM_ACTIVE], ctas = c->value[COUNTER_GRID];
    if (!(active < 80)) {
        return;
    }
    say(out, " SMs have a CTA for %.0f %% of the time: ", active);
    if (ctas < 0.9 * device->sm_count) {
        say(out, "the grid has %.0f CTAs for %d SMs.", ctas, device->sm_count);
    } else if (c->value[COUNTER_DURATION] < 20e6 * launch_s) {
        say(out, "start and end of a launch this short weigh.");
    } else {
        say(out, "CTAs end unevenly.");
    }
}

void diagnose(diagnosis *out, const profile_counters *c, const floor_times *floor, const acr__device *device,
              double launch_s)
{
    double time_us = c->value[COUNTER_DURATION];
    *out = (diagnosis){.floor_share = 1e6 * floor->warm_s / time_us};
    find_busiest(out, c);
    if (strcmp(out->bound, "latency") == 0) {
        say(out, "Bound by latency: no unit is busy for more than %.0f %% of the time (%s).", out->bound_pct,
            out->busiest);
    } else if (isnan(out->bound_pct)) {
        say(out, "What binds it is unknown: the tool counted no unit.");
    } else {
        say(out, "Bound by %s, busy for %.0f %% of the time.", out->bound, out->bound_pct);
    }
    say_also(out, c);
    say_stalls(out, c);
    say_conflicts(out, c);
    say_idle(out, c, device, launch_s);
    if (1e6 * c->value[COUNTER_SM_CLOCK] < 0.95 * device->clock_hz) {
        say(out, " The SMs ran at %.0f MHz of %.0f.", c->value[COUNTER_SM_CLOCK], device->clock_hz / 1e6);
    }
    char floor_us[24];
    say(out, " It runs at %.0f %% of the floor's rate (floor %s us, %s).", 100 * out->floor_share,
        us_text(floor_us, 1e6 * floor->warm_s), floor->warm_bound);
}
