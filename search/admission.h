/* The first gate: what a candidate's text may contain. It keeps out what the later gates could be fooled by (other
 * files, inline machine code on the CPU, clocks, attributes that run code at load time); what the compiler then makes
 * of the rest is looked at again as an object (identity.h). */
#ifndef SEARCH_ADMISSION_H
#define SEARCH_ADMISSION_H

#include "candidate.h"
#include "descriptor.h"

/* ACR_OK, or ACR_INVALID with what is wrong, with the line of the source. Of a source, *out becomes its descriptor. */
acr_status admission_check(const candidate *c, const char *source_root, descriptor *out);

/* The same words and attributes looked for in what the preprocessor made of a CPU source: macros hide nothing there.
 * Only what comes from the file `name` counts, by the preprocessor's own line marks. text is changed. */
acr_status admission_check_preprocessed(char *text, const char *name);

/* The file of a family relative to the tree's src ("cpu/fwd_simd/fwd_simd.c"). Errors: ACR_INVALID when there is
 * none. */
acr_status admission_family_file(char out[128], const candidate *c, const char *source_root);

#endif
