/* The kernel that a search has to beat: the fastest that the table has for the whole set of problems. */
#ifndef SEARCH_INCUMBENT_H
#define SEARCH_INCUMBENT_H

#include "gates.h"

/* Times every kernel of the table that can run all problems (those that are never planned excepted) and writes the one
 * with the lowest weighted geometric mean to *out. by_cost: takes the kernels' own estimates for the times, so that the
 * choice is the same in every run. Errors: ACR_UNSUPPORTED when no kernel runs all of them; those of timing. */
acr_status incumbent_find(const acr__kernel **out, acr_ctx *ctx, const gates_problem *problems, size_t count,
                          bool by_cost, uint32_t threads);

#endif
