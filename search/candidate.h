/* What a search proposes: a kernel that is not in the tree yet, as data. Either a family of the tree with a set of
 * parameters, or a whole source text with a launch descriptor (descriptor.h). Never code that runs on the host with the
 * harness's rights. */
#ifndef SEARCH_CANDIDATE_H
#define SEARCH_CANDIDATE_H

#include <stdbool.h>

#include "internal.h"

enum {
    CANDIDATE_SOURCE_BYTES_MAX = 256 << 10, /* of a source text */
    CANDIDATE_TEXT_MAX = 512                /* family, arch, parameters */
};

/* All strings are the candidate's own: made by the functions below, freed by candidate_free. */
typedef struct candidate {
    acr__backend_id backend;
    char *family;     /* a file of the tree without its ending; of a source, a name for the record */
    char *arch;       /* as in kernels.def: portable avx2 avx512 avx512bf16, 80 89 90a */
    char *parameters; /* canonical: NAME=value, one space between, ordered by name, each name once; "" = none */
    char *source;     /* the whole text; NULL = the family's file of the tree */
    char *descriptor; /* of a source: JSON, see descriptor.h; else NULL */
} candidate;

/* A family of the tree with parameters, in any order. Errors: ACR_INVALID naming what is malformed (names are
 * [A-Z][A-Z0-9_]*, values [A-Za-z0-9_]+, at most 32 of them); ACR_NO_MEMORY. Whether the family exists and takes them
 * is for the gates. */
acr_status candidate_of_family(candidate *out, const char *family, const char *arch, const char *parameters);
/* A whole source. Errors: as above, ACR_INVALID for an unknown arch. Everything else is for the gates. */
acr_status candidate_of_source(candidate *out, const char *name, const char *arch, const char *parameters,
                               const char *source, const char *descriptor);
/* The line of kernels.def with that name. Errors: ACR_INVALID for an unknown name; ACR_NO_MEMORY. */
acr_status candidate_of_kernel(candidate *out, const char *kernel_name);
/* The name of the line with this family, arch and set (in any order); NULL = none. */
const char *candidate_listed_name(const char *family, const char *arch, const char *parameters);
bool candidate_name_is_listed(const char *kernel_name);
acr_status candidate_copy(candidate *out, const candidate *from);
/* Frees the strings; a zeroed candidate is a no-op. */
void candidate_free(candidate *c);

/* "fwd_simd avx512 COLUMNS=8 DIM=1024 ..."; a source is marked by its digest. */
void candidate_text(char out[CANDIDATE_TEXT_MAX], const candidate *c);

/* Adds to a set (NAME=value, separated by spaces, in any order) those of `others` whose names it does not have. */
void candidate_complete_set(char *set, size_t capacity, const char *others);

/* The value of a parameter into out, or false where the set has none of that name. */
bool candidate_parameter(const candidate *c, const char *name, char *out, size_t capacity);

#endif
