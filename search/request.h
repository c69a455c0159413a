/* What an external proposer is told, and what its answer means (docs/manual/evolve.md, "Proposers"). */
#ifndef SEARCH_REQUEST_H
#define SEARCH_REQUEST_H

#include "fold.h"
#include "proposer.h"

/* What a request is made from. */
typedef struct request_inputs {
    const definition *definition;
    const acr__device *device;
    const space_list *spaces;
    const fold *fold;
    store *store;
    const char *tree;
    const trial_result *control; /* floors, and the incumbent's times */
    const char *insights;        /* the user's own words; NULL = none */
    int64_t trial;               /* that the answer will be */
} request_inputs;

/* The request, malloc'd: task and device, floors, spaces, elites with their sources and profiles, failed trials with
 * their errors, what single parameters did, the user's insights. Hidden cases are left out. Errors: those of the store;
 * ACR_NO_MEMORY; ACR_IO when a family's source cannot be read. */
acr_status request_make(char **out, const request_inputs *in);

/* What is told of a finished trial to whoever prepared it, as JSON text, malloc'd: status, times, what failed, and the
 * insights of the run so far. Hidden cases are left out. Errors: as request_make. */
acr_status request_verdict(char **out, const request_inputs *in, int64_t trial);

/* A trial made of an answer: the strings are its own. */
typedef struct request_trial {
    proposer_status status; /* ANSWERED, MALFORMED, ILLEGAL or REPEATED */
    char detail[512];
    char kernel[WISDOM_KERNEL_MAX], family[CANDIDATE_TEXT_MAX], arch[SPACE_NAME_MAX];
    char parameters[SPACE_PARAMETERS_MAX], cell[SPACE_PARAMETERS_MAX];
    char *source, *descriptor, *rationale; /* NULL = none */
} request_trial;

/* Reads an answer that has the right form. Free with request_trial_free. */
void request_accept(request_trial *out, const json_t *answer, const space_list *spaces, const archive *proposed);
void request_trial_free(request_trial *trial);

#endif
