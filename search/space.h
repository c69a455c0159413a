/* What a search may choose in a kernel family. The family says it itself, in <family>.space beside its source: its
 * architectures, types and head dims, its macro and micro parameters with their values, and the conditions under which
 * a set of them is legal (docs/manual/evolve.md, "Spaces"). The library does not read these files. */
#ifndef SEARCH_SPACE_H
#define SEARCH_SPACE_H

#include <stdbool.h>

#include "internal.h"

enum {
    SPACE_GENES_MAX = 12,
    SPACE_VALUES_MAX = 32,
    SPACE_ARCHS_MAX = 4,
    SPACE_CONDITIONS_MAX = 32,
    SPACE_NAME_MAX = 32,
    SPACE_TEXT_MAX = 200,
    SPACE_PARAMETERS_MAX = 512, /* "NAME=value NAME=value": as a line of kernels.def has them */
    SPACE_REASON_MAX = 240
};

/* A parameter that a search may choose. */
typedef struct space_gene {
    char name[SPACE_NAME_MAX];
    bool macro;  /* part of the cell: a different kind of kernel, not a different size of it */
    char tag[8]; /* before its value in a kernel's name; "" = not in the name */
    int count;
    int64_t values[SPACE_VALUES_MAX]; /* ascending */
    bool has_default;                 /* a set that has the default does not name the parameter */
    int64_t default_value;
} space_gene;

/* A name for an expression, or a condition with its reason. */
typedef struct space_rule {
    char name[SPACE_NAME_MAX]; /* of a let; "" = a condition */
    char expression[SPACE_TEXT_MAX];
    char reason[SPACE_TEXT_MAX]; /* of a condition */
} space_rule;

typedef struct space_dtype {
    acr_dtype dtype;
    char parameters[SPACE_TEXT_MAX];
} space_dtype;

/* For whom a search is: every condition must hold for every problem. */
typedef struct search_scene {
    const acr_problem *problems; /* canonical; of one pass, one dtype and one pair of head dims */
    size_t count;
    const acr__device *device;
} search_scene;

typedef struct space {
    char family[SPACE_NAME_MAX];
    acr_pass pass; /* that the family computes */
    int arch_count;
    char archs[SPACE_ARCHS_MAX][SPACE_NAME_MAX]; /* as kernels.def writes them */
    int dtype_count;
    space_dtype dtypes[ACR_E4M3 + 1];
    space_gene dim;     /* the head dim's parameter: the smallest value that serves the problems */
    space_gene v_dim;   /* of the values' head dim, where it has its own; count 0 = it is the head dim's */
    int constant_count; /* fixed in the source: for names and conditions */
    space_gene constants[4];
    int gene_count;
    space_gene genes[SPACE_GENES_MAX]; /* macro ones first */
    int rule_count;
    space_rule rules[SPACE_CONDITIONS_MAX];
    bool refuses_packed;
    char packed_parameter[SPACE_TEXT_MAX]; /* of the variants for packed batches alone; "" = they are like others */
    /* Bound by space_bind. */
    const search_scene *scene;
    int64_t dim_value, v_dim_value;
    bool is_packed;             /* packed_parameter is part of every set */
    char fixed[SPACE_TEXT_MAX]; /* what every set has beside DIM and the genes: "BF16=1 V_DIM=128"; "" = nothing */
} space;

/* A point: which arch and which value of each gene, by index. */
typedef struct genome {
    int space; /* index into the search's list of spaces */
    int arch;
    int choice[SPACE_GENES_MAX];
} genome;

/* Reads a file. Errors: ACR_IO; ACR_FORMAT with file, line and what is wrong. */
acr_status space_read(space *out, const char *path);

/* Binds a space to the problems and the device of a search; the scene must outlive it. false with the reason when the
 * family cannot serve them at all (their pass, their type, their head dims, no architecture). */
bool space_bind(space *s, const search_scene *scene, char reason[SPACE_REASON_MAX]);

/* Whether a point is legal; if not, why. Bound spaces only. */
bool space_legal(const space *s, const genome *g, char reason[SPACE_REASON_MAX]);

/* Every parameter that a point of the space may set, each with one of its values, as a set. Unbound spaces, too. */
void space_names(const space *s, char out[SPACE_PARAMETERS_MAX]);

/* The -D set of a point, as a line of kernels.def has it. */
void space_parameters(const space *s, const genome *g, char out[SPACE_PARAMETERS_MAX]);

/* The kernel's name: that of the line of kernels.def with the same family, arch and set; else by the naming rule
 * (docs/internals/design.md, section 3), with defaults where a line has the shorter name for another set. */
void space_kernel_name(const space *s, const genome *g, char out[WISDOM_KERNEL_MAX]);

/* The cell of the archive a point belongs to: family, arch and macro choices. */
void space_cell(const space *s, const genome *g, char out[SPACE_PARAMETERS_MAX]);

/* The point of an arch and a -D set. false with the reason when the set is no point of this space: a parameter that it
 * does not have, a value that is not listed, one that is missing. Says nothing about legality. Bound spaces only. */
bool space_point(const space *s, const char *arch, const char *parameters, genome *out, char reason[SPACE_REASON_MAX]);

#endif
