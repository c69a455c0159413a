/* What external proposers answered, as the store has kept it: the words of an answer that are no part of a candidate
 * (`insight`, `guidance`, and the file that a prepared one lay in). */
#ifndef SEARCH_ANSWERS_H
#define SEARCH_ANSWERS_H

#include "store.h"

/* A trial as store_trial_json has it, without samples, and its answer, which is an object. False ends the visit. */
typedef bool answers_visit(void *arg, const json_t *trial, const json_t *answer);

/* Every trial that has such an answer, in order. Errors: those of the store. */
acr_status answers_each(store *s, answers_visit *visit, void *arg);

/* The text of a key; "" without one. */
const char *answers_text(const json_t *object, const char *key);

#endif
