/* The source tree that a search compiles from: where it is, and what its families let a search choose. */
#ifndef SEARCH_TREE_H
#define SEARCH_TREE_H

#include "genome.h"

enum {
    TREE_PATH_MAX = 512
};

/* Finds the tree: `given`, else ACROMION_SOURCE, else the folder at or above this program's that holds
 * src/kernels.def. Errors: ACR_IO, saying where it was looked for. */
acr_status tree_find(char out[TREE_PATH_MAX], const char *given);

/* Reads the spaces of a backend's families, in the order of their names, and binds those that serve the scene to it.
 * pattern: of family names, as fnmatch takes it, NULL = all. The scene is copied; what it points to must outlive the
 * list. Errors: those of space_read; ACR_UNSUPPORTED when no family serves, with the reasons; ACR_IO. */
acr_status tree_spaces(space_list *out, const char *tree, const search_scene *scene, const char *pattern);

/* The digest of a space's file, for noticing that it has changed. Errors: ACR_IO. */
acr_status tree_space_digest(char out[17], const char *tree, const char *family);

/* The source of a family, malloc'd. Errors: ACR_IO, ACR_NO_MEMORY. */
acr_status tree_family_source(char **out, const char *tree, const char *family);

#endif
