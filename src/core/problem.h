/* A problem: canonical form, text form, digest. */
#ifndef ACR_PROBLEM_H
#define ACR_PROBLEM_H

#include "buffers.h"

/* Bytes of an element. */
int acr__dtype_bytes(acr_dtype dtype);
/* "f32", "f16", "bf16", "e4m3". */
const char *acr__dtype_text(acr_dtype dtype);
/* What an element type is called here, for another name of it ("fp16", "float8_e4m3fn"); NULL when it is none. */
const char *acr__dtype_hint(const char *word, size_t length);

/* A digest of everything an execution depends on (the text form's content and the scales); of a canonical problem.
 * Stable within one version of the library; wisdom is keyed by the text, never by this. */
uint64_t acr__problem_digest(const acr_problem *canonical);

#endif
