/* The modes of measuring, see docs/manual/measuring.md. Times of different modes are never compared with each other. */
#ifndef WORKBENCH_MODE_H
#define WORKBENCH_MODE_H

#include <stdbool.h>

#include "machine/roofline.h"

typedef enum bench_mode {
    MODE_STREAM,      /* launches back to back over the same buffers */
    MODE_SUSTAINED,   /* the same after 120 ms of nothing else: at the clock that the kernel's power leaves */
    MODE_FULL_CLOCK,  /* the same a few milliseconds after a pause: at the highest clock */
    MODE_ROTATING,    /* launches back to back over buffer sets that together exceed the cache five times */
    MODE_COLD,        /* one launch alone, the cache emptied before */
    MODE_CALL,        /* host calls one after another, to the completion of the last */
    MODE_CALL_SINGLE, /* one host call to its completion */
    MODE_COUNT
} bench_mode;

/* "stream", "sustained", "full-clock", "rotating", "cold", "call", "call-single". */
const char *mode_name(bench_mode mode);
/* Returns false for an unknown name. */
bool mode_parse(const char *name, bench_mode *out);
/* All names, separated by commas. */
const char *mode_names(void);

/* True for those that pace.h takes samples in. */
bool mode_is_paced(bench_mode mode);
/* True for what a host clock around calls measures. */
bool mode_is_call(bench_mode mode);
/* Host calls of one sample in the call modes. */
int mode_calls(bench_mode mode);

/* The floor that a time of this mode must not undercut, seconds, and what binds it: inputs are in memory in rotating
 * and cold mode, else in the cache as far as they fit. */
double mode_floor_s(bench_mode mode, const floor_times *floor);
const char *mode_floor_bound(bench_mode mode, const floor_times *floor);

#endif
