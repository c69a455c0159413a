/* The search itself: rounds of proposals from both arms, compiled side by side, judged one after another on each
 * device, kept in the store in the order of their proposal; in the end confirmations. What it does next follows from
 * the store alone, so that a run which was cut short goes on as if it had not been. */
#ifndef SEARCH_ENGINE_H
#define SEARCH_ENGINE_H

#include "definition.h"
#include "store.h"

/* Why a slice of a run ended. */
typedef enum engine_end {
    ENGINE_COMPLETE,    /* the budget is used, or the spaces are; winners are confirmed or not */
    ENGINE_TIME,        /* --time */
    ENGINE_INTERRUPTED, /* by a signal */
    ENGINE_PROPOSER,    /* the external proposer failed too often in a row */
    ENGINE_FOLDER,      /* of candidates has none that was not taken: whoever prepares them has its turn */
    ENGINE_CONFIRMED,   /* what there was to confirm is, or is not, as was asked for; there is budget left */
    ENGINE_FAULT        /* the machine, not a candidate: see the status */
} engine_end;

enum {
    ENGINE_GPUS_MAX = 8,
    ENGINE_JUDGES_MAX = 8,
    ENGINE_WORKERS_MAX = 64
};

typedef struct engine_request {
    definition *definition;
    bool resume;
    bool confirm; /* propose and judge nothing more: what was found so far is confirmed */
    store *store;
    const char *tree;
    const char *folder;       /* for artefacts; made, and removed at the end */
    const char *insights;     /* the user's notes for external proposers; NULL = none */
    const char *peers_python; /* measure PyTorch beside the slice: the folder of the module, "" = wherever; NULL = no */
    bool no_profiles;         /* of elites, on a GPU */
    double time_s;            /* 0 = no limit */
    double proposer_timeout_s;
    int32_t ordinal;      /* of the device, of several the first */
    int gpus;             /* so many devices judge the trials of a round side by side; 1 to ENGINE_GPUS_MAX */
    int judges;           /* so many trials at once on each: checked side by side, timed alone; 1 to JUDGES_MAX */
    const char *launcher; /* not NULL: so many workers do instead, which it starts (gates_setup); "" = here */
    int workers;          /* 1 to ENGINE_WORKERS_MAX */
    uint32_t threads;
    const volatile int *stop; /* 1: finish the trial in flight; 2: end it */
} engine_request;

/* Runs until an end. Errors: those of the gates and the store. */
acr_status engine_run(const engine_request *request, engine_end *end);
const char *engine_end_text(engine_end end);

/* The scene, spaces and incumbent of a definition: what a new run decides before it is stored. Problems, backend and
 * `from` are set. Errors: ACR_UNSUPPORTED and those of tree_spaces. */
acr_status engine_define(definition *d, acr_ctx *ctx, const char *tree);

#endif
