/* The state of a run as a pure fold over its store: archives, counts, identities, and the trials still in flight. */
#ifndef SEARCH_FOLD_H
#define SEARCH_FOLD_H

#include "definition.h"
#include "store.h"

/* A trial that is proposed and not finished. */
typedef struct flight {
    int64_t id;
    trial_arm arm;
    char kernel[WISDOM_KERNEL_MAX];
    candidate candidate;
    artefact *artefact; /* NULL until it is prepared, or when a gate refused it */
    trial_result result;
    double prepare_s, judge_s;
    int device;    /* that judged it; -1 = none */
    bool prepared; /* as far as it comes without a device */
    bool judged;   /* the result is whole */
} flight;

typedef struct arm_counts {
    int64_t proposed, distinct, valid, improved;
    int64_t failures_in_a_row; /* proposals that gave nothing new: no candidate, or a duplicate */
    const char *best_kernel;   /* the fastest whose interval excludes the incumbent; NULL = none; lives with the fold */
    double best_speedup;       /* of it; 1 when there is none */
} arm_counts;

typedef struct known_identity {
    trial_arm arm;
    int64_t trial;
    char text[33];
} known_identity;

typedef struct fold {
    const space_list *spaces;
    archive learnt[ARM_COUNT];   /* finished trials, the incumbent first */
    archive proposed[ARM_COUNT]; /* all of them */
    arm_counts counts[ARM_COUNT];
    int64_t next_id, next_round;
    size_t flight_count, identity_count, identity_capacity;
    flight *flights; /* by id */
    known_identity *identities;
    char best_kernels[ARM_COUNT][WISDOM_KERNEL_MAX];
} fold;

/* Reads the store. spaces must outlive it. Errors: those of the store; ACR_NO_MEMORY. */
acr_status fold_read(fold *out, store *s, const definition *d, const space_list *spaces);
void fold_free(fold *f);

/* Takes a trial that has just been finished into identities and counts, as reading the store again would. The archives
 * stay as they were: a round's proposals do not see each other's results. Errors: ACR_NO_MEMORY. */
acr_status fold_finish(fold *f, trial_arm arm, const char *kernel, const trial_end *end);

/* The point of a family's set, when it is one of a space. */
bool fold_point(const space_list *spaces, const char *family, const char *arch, const char *parameters, genome *out);

/* The earlier trial of the arm with this identity; -1 = none. */
int64_t fold_find(const fold *f, trial_arm arm, const char *identity);

#endif
