/* The trial store: one SQLite file a run. docs/internals/evolve-store.md describes its tables; store.c holds the
 * schema. A trial is written in two transactions: as proposed, and as finished. Every transaction is on the disk when
 * its function returns (WAL, synchronous=FULL), so a kill at any moment loses at most what the trial in flight had
 * measured.
 *
 * Functions return ACR_OK, ACR_IO (the file), ACR_FORMAT (not a store, or of another version), ACR_INVALID (no such
 * trial) or ACR_NO_MEMORY, with the detail in acr_last_error(). */
#ifndef SEARCH_STORE_H
#define SEARCH_STORE_H

#include <jansson.h>

#include "archive.h"
#include "gates.h"
#include "profile/profile_ncu.h"

enum {
    STORE_VERSION = 3, /* older ones are read, and become this when a run in them goes on */
    STORE_DIGEST_MAX = 33
};

typedef struct store store;

/* Create: the file must not exist (ACR_IO); else it must. Read: for looking at a run, even one that is going on. */
typedef enum store_mode {
    STORE_CREATE,
    STORE_WRITE,
    STORE_READ
} store_mode;
acr_status store_open(store **out, const char *path, store_mode mode);
void store_close(store *s);

/* ---- The run ---- */

/* What a run is, fixed when it begins: everything that its proposals depend on. JSON, see
 * docs/internals/evolve-store.md. */
acr_status store_set_run(store *s, json_t *run);
/* The caller's to decref. */
acr_status store_run(store *s, json_t **out);

/* ---- Slices: one a start of the program ---- */

acr_status store_begin_slice(store *s, json_t *environment, int64_t *id);
/* The incumbent against itself at the start of the slice, on one of its devices, which are numbered from 0. */
acr_status store_slice_control(store *s, int64_t slice, int device, const trial_result *control);
/* Times of other libraries, measured beside the slice: an array of bench records. */
acr_status store_slice_peers(store *s, int64_t slice, json_t *records);
acr_status store_end_slice(store *s, int64_t slice, const char *reason);

/* ---- Trials ---- */

typedef enum trial_arm {
    ARM_SEARCH,
    ARM_CONTROL, /* random search with the same budget */
    ARM_COUNT
} trial_arm;
const char *trial_arm_name(trial_arm arm);

/* A trial as proposed. */
typedef struct trial_row {
    int64_t id; /* from 1, in the order of proposal */
    trial_arm arm;
    int64_t number, round; /* of the arm's proposals, from 0; of the run's rounds, from 0 */
    const char *operation;
    int parent_count;
    int64_t parents[2];
    const char *kernel, *family, *arch, *parameters, *cell;
    const char *source, *descriptor, *rationale; /* NULL = none */
    const char *request, *answer;                /* of an external proposer; NULL = the built-in one */
} trial_row;

/* Several trials in one transaction. */
acr_status store_propose(store *s, int64_t slice, const trial_row *rows, size_t count);

/* What a finished trial was: `status` is trial_status_name's, or one of the proposer's (proposer.h). */
typedef struct trial_end {
    int64_t id;
    const char *status, *detail;
    int64_t original; /* of a duplicate: the earlier trial, 0 = the incumbent; else -1 */
    bool distinct, improved;
    double wall_s;
    int device;                 /* that judged it, as store_slice_control numbers them; -1 = none did */
    const trial_result *result; /* NULL = it never became a candidate */
} trial_end;
acr_status store_finish(store *s, int64_t slice, const trial_end *end);
/* Both at once, for a proposal that never became a candidate. */
acr_status store_failure(store *s, int64_t slice, const trial_row *row, const trial_end *end);

/* A confirmation of a trial, valid or not. round counts the run's. */
acr_status store_confirm(store *s, int64_t slice, int64_t trial, int round, const trial_result *result);

/* What a profile of an elite on one of the run's problems gave: counters, or why there are none. Takes the place of an
 * earlier one. */
typedef struct store_profile_row {
    int64_t trial, ordinal; /* 0 = the incumbent; the problem's place in the run */
    const char *problem;
    const profile_run *run;
    const char *diagnosis; /* "" where there are no counters */
} store_profile_row;
acr_status store_profile(store *s, int64_t slice, const store_profile_row *row);

/* Whether it has a profile, or a reason of its own why it has none: one that is not the machine's. */
acr_status store_is_profiled(store *s, int64_t trial, bool *out);

/* ---- Reading ---- */

/* A trial's own row, strings valid during the visit. */
typedef struct trial_view {
    trial_row row;
    bool finished;
    const char *status, *gate, *detail, *identity; /* NULL where not finished or not reached */
    int64_t original;                              /* -1 = none */
    bool distinct, improved;
    double speedup, low, high, noise_floor; /* NaN where not timed */
    stats_verdict verdict;
    trial_resources resources;
    int confirmations; /* that were made */
    bool confirmed;    /* the last one was valid and FASTER */
    double confirmed_speedup, confirmed_low, confirmed_high;
} trial_view;
/* In the order of their ids; visit returns false to stop. */
typedef bool store_visit(void *arg, const trial_view *view);
acr_status store_trials(store *s, store_visit *visit, void *arg);

/* Everything about one trial, raw samples included when wanted. The caller decrefs. */
acr_status store_trial_json(store *s, int64_t id, bool samples, json_t **out);
/* The profiles of a trial (0 = the incumbent), a problem each: [{"problem", "status", "detail", "tool", "diagnosis",
 * "counters": {name: number}}]. The caller decrefs. */
acr_status store_profile_json(store *s, int64_t trial, json_t **out);
/* Its whole source, malloc'd; NULL when it is a family's parameter set. */
acr_status store_trial_source(store *s, int64_t id, char **out);
/* The slices, with their environments, controls and peers. */
acr_status store_slices(store *s, json_t **out);
/* The rounds of confirmation so far. */
acr_status store_confirmation_count(store *s, int *out);

#endif
