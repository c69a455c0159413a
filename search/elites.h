/* Hardware counters of the search's ranked elites and of the incumbent, for the store and for external proposers: which
 * of them still want some, and taking them. That Nsight Compute is missing, or may not count, is written down as it is,
 * and never a number instead. */
#ifndef SEARCH_ELITES_H
#define SEARCH_ELITES_H

#include "definition.h"
#include "store.h"

/* The incumbent (0), or else the best of the ranked elites, for whom no counters, and no reason of its own why there
 * are none, are in the store; -1 = there is none such. Reasons that are the machine's do not count. */
acr_status elites_next(int64_t *trial, store *s, const archive *learnt);

/* What a profile needs beside the trial. */
typedef struct elite_profiler {
    gates *gates;
    store *store;
    int64_t slice;
    const definition *definition;
} elite_profiler;

/* Runs a trial's kernel (a; NULL = the incumbent) under Nsight Compute on each problem and stores what came of it.
 * *works becomes false when this machine gives no counters, whatever the trial; problems behind that are left out.
 * Errors: those of the store. */
acr_status elites_profile(const elite_profiler *p, int64_t trial, const artefact *a, bool *works);

#endif
