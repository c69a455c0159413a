/* What a run of the search is: everything that its proposals depend on, fixed when the run begins and kept in its
 * store, so that --resume can go on with nothing but the file. */
#ifndef SEARCH_DEFINITION_H
#define SEARCH_DEFINITION_H

#include <jansson.h>

#include "gates.h"
#include "genome.h"

enum {
    DEFINITION_PROBLEMS_MAX = 16,
    DEFINITION_TEXT_MAX = 1024,
    TRIALS_DEFAULT = 45,
    GENERATION_DEFAULT = 8 /* proposals of an arm that are made from the same archive, and compiled side by side */
};

typedef struct definition {
    size_t problem_count;
    gates_problem problems[DEFINITION_PROBLEMS_MAX];
    char backend[8];
    char device_key[WISDOM_DEVICE_MAX]; /* times of another device cannot go into the same run */
    uint32_t threads;
    uint64_t seed, visible_seed, hidden_seed;
    int trials, generation, blocks, visible_cases, hidden_cases;
    char families[DEFINITION_TEXT_MAX]; /* pattern, "" = all */
    char proposer[DEFINITION_TEXT_MAX]; /* "" = the built-in one */
    char folder[DEFINITION_TEXT_MAX];   /* of prepared candidates, absolute; "" = none. One of the two at most */
    char tries[DEFINITION_TEXT_MAX];    /* sets that both arms begin with, each as in definition_next_try; "" = none */
    gates_clock clock;
    bool surrogate, race; /* parametric.h; gates_setup. Runs that began before these existed have neither */
    bool from;            /* the incumbent was named by the user: the only start, and not the best of the table */
    candidate incumbent;
    char incumbent_kernel[WISDOM_KERNEL_MAX]; /* its line's name, or a text */
    int space_count;
    struct {
        char family[SPACE_NAME_MAX], digest[17];
    } spaces[SPACES_MAX];
} definition;

/* Whether the search's proposals come from outside: the control's never do. */
bool definition_is_external(const definition *d);

/* Frees what it holds. */
void definition_free(definition *d);

json_t *definition_json(const definition *d);
/* Errors: ACR_FORMAT naming what is missing; ACR_NO_MEMORY. */
acr_status definition_read(definition *out, const json_t *json);

/* Notes the digests of the spaces that a run begins with; or checks them: ACR_FORMAT naming each that has changed, is
 * gone or, where the spaces of today are given (NULL = not known yet), is new. */
acr_status definition_note_spaces(definition *d, const space_list *spaces, const char *tree);
acr_status definition_check_spaces(const definition *d, const space_list *spaces, const char *tree);

/* One more of `tries`. false: it does not fit. */
bool definition_add_try(definition *d, const char *text);
/* Reads the set at *at, `family arch NAME=value...`, and moves on; false when there is none. */
typedef struct definition_try {
    char family[SPACE_NAME_MAX], arch[SPACE_NAME_MAX], parameters[SPACE_PARAMETERS_MAX];
} definition_try;
bool definition_next_try(definition_try *out, const char **at);

/* The incumbent by a line's name or as `family arch NAME=value...`. Errors: ACR_INVALID. */
acr_status definition_set_incumbent(definition *d, const char *text);

#endif
