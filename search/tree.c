/* The source tree, see tree.h. */
#include "tree.h"

#include <dirent.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/files.h"
#include "kernels/kernel_source.h"

/* Where families live, each in a folder of its name, and how their files end. */
static const struct {
    acr__backend_id backend;
    const char *folder, *ending;
} places[] = {
    {ACR__CPU, "src/cpu", ".c"},
    {ACR__CUDA, "src/cuda/kernels", ".cu"},
};
enum {
    PLACE_COUNT = sizeof places / sizeof places[0]
};

static bool is_tree(const char *folder)
{
    char path[TREE_PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/src/kernels.def", folder);
    return access(path, R_OK) == 0;
}

/* The program's folder, or one of those above it. */
static bool find_above_program(char out[TREE_PATH_MAX])
{
    char sources[PATH_MAX];
    if (!kernel_source_folder(sources, NULL)) {
        return false;
    }
    *strrchr(sources, '/') = '\0';
    return snprintf(out, TREE_PATH_MAX, "%s", sources) < TREE_PATH_MAX;
}

acr_status tree_find(char out[TREE_PATH_MAX], const char *given)
{
    const char *from_environment = getenv("ACROMION_SOURCE");
    const char *named = given ? given : from_environment && *from_environment ? from_environment : NULL;
    if (named) {
        snprintf(out, TREE_PATH_MAX, "%s", named);
        return strlen(named) < TREE_PATH_MAX && is_tree(out)
                   ? ACR_OK
                   : acr__fail(ACR_IO, "%s: no source tree: src/kernels.def is not there", named);
    }
    return find_above_program(out) ? ACR_OK
                                   : acr__fail(ACR_IO, "no source tree at or above this program's folder; "
                                                       "ACROMION_SOURCE (evolve, promote: or --tree) names one");
}

/* ---- Spaces ---- */

enum {
    FAMILY_LIST_MAX = SPACES_MAX
};

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* The families of a folder that have a space, sorted. */
static acr_status list_families(const char *folder, char names[FAMILY_LIST_MAX][SPACE_NAME_MAX], int *count)
{
    DIR *directory = opendir(folder);
    if (!directory) {
        return acr__fail(ACR_IO, "%s: cannot be read", folder);
    }
    *count = 0;
    for (const struct dirent *entry = readdir(directory); entry; entry = readdir(directory)) {
        char path[TREE_PATH_MAX + 128];
        if (strlen(entry->d_name) >= SPACE_NAME_MAX || *count == FAMILY_LIST_MAX) {
            continue;
        }
        snprintf(path, sizeof path, "%s/%.31s/%.31s.space", folder, entry->d_name, entry->d_name);
        if (access(path, R_OK) == 0) {
            snprintf(names[(*count)++], SPACE_NAME_MAX, "%.31s", entry->d_name);
        }
    }
    closedir(directory);
    qsort(names, (size_t)*count, SPACE_NAME_MAX, by_name);
    return ACR_OK;
}

static void note_reason(char *reasons, size_t capacity, const char *reason)
{
    size_t length = strlen(reasons);
    snprintf(reasons + length, capacity - length, "%s%s", length > 0 ? "; " : "", reason);
}

/* A space must not choose what its family does not read: its points would be one kernel under many names. */
static acr_status check_names(const space *s, const char *tree)
{
    char folder[PATH_MAX], file[PATH_MAX], set[SPACE_PARAMETERS_MAX] = "";
    kernel_parameters declared;
    snprintf(folder, sizeof folder, "%s/src", tree);
    if (!kernel_source_file(file, folder, s->family)) {
        return acr__fail(ACR_IO, "%s.space: the family's file is not beside it", s->family);
    }
    acr_status status = kernel_parameters_read(&declared, file);
    if (status == ACR_OK) {
        space_names(s, set);
        status = kernel_parameters_check(&declared, set, false);
    }
    if (status != ACR_OK) {
        char detail[512];
        snprintf(detail, sizeof detail, "%s", acr_last_error());
        return acr__fail(ACR_FORMAT, "%s.space: %s", s->family, detail);
    }
    return ACR_OK;
}

acr_status tree_spaces(space_list *out, const char *tree, const search_scene *scene, const char *pattern)
{
    char folder[TREE_PATH_MAX + 32], names[FAMILY_LIST_MAX][SPACE_NAME_MAX], reasons[600] = "";
    int count = 0, place = 0;
    while (place < PLACE_COUNT - 1 && places[place].backend != scene->device->backend) {
        ++place;
    }
    out->scene = *scene;
    out->count = 0;
    snprintf(folder, sizeof folder, "%s/%s", tree, places[place].folder);
    acr_status status = list_families(folder, names, &count);
    for (int i = 0; i < count && status == ACR_OK; ++i) {
        char path[TREE_PATH_MAX + 128], reason[SPACE_REASON_MAX];
        if (pattern && fnmatch(pattern, names[i], 0) != 0) {
            continue;
        }
        snprintf(path, sizeof path, "%s/%.31s/%.31s.space", folder, names[i], names[i]);
        space *s = &out->items[out->count];
        status = space_read(s, path);
        if (status == ACR_OK) {
            status = check_names(s, tree);
        }
        if (status == ACR_OK && space_bind(s, &out->scene, reason)) {
            ++out->count;
        } else if (status == ACR_OK) {
            note_reason(reasons, sizeof reasons, reason);
        }
    }
    if (status == ACR_OK && out->count == 0) {
        return acr__fail(ACR_UNSUPPORTED, "no family to search in: %s",
                         *reasons ? reasons : "none matches, or none has a .space file");
    }
    return status;
}

/* ---- Texts ---- */

/* Maps a file of a family: the first place that has it. */
static acr_status map_file(const char *tree, const char *family, bool space_file, const void **bytes, size_t *size)
{
    acr_status status = ACR_IO;
    for (int i = 0; i < PLACE_COUNT && status != ACR_OK; ++i) {
        char path[TREE_PATH_MAX + 64 + 2 * SPACE_NAME_MAX];
        snprintf(path, sizeof path, "%s/%s/%s/%s%s", tree, places[i].folder, family, family,
                 space_file ? ".space" : places[i].ending);
        status = file_map(path, bytes, size);
    }
    return status;
}

acr_status tree_space_digest(char out[17], const char *tree, const char *family)
{
    const void *bytes = NULL;
    size_t size = 0;
    acr_status status = map_file(tree, family, true, &bytes, &size);
    if (status == ACR_OK) {
        snprintf(out, 17, "%016llx", (unsigned long long)XXH3_64bits(bytes, size));
        file_unmap(bytes, size);
    }
    return status;
}

acr_status tree_family_source(char **out, const char *tree, const char *family)
{
    const void *bytes = NULL;
    size_t size = 0;
    acr_status status = map_file(tree, family, false, &bytes, &size);
    if (status == ACR_OK) {
        *out = size > 0 ? strndup(bytes, size) : strdup("");
        file_unmap(bytes, size);
        status = *out ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for a source");
    }
    return status;
}
