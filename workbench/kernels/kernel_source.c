/* Kernels' sources, see kernel_source.h. */
#include "kernel_source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/child.h"
#include "base/files.h"

static bool joined(char out[PATH_MAX], const char *folder, const char *name)
{
    int length = snprintf(out, PATH_MAX, "%s/%s", folder, name);
    return length > 0 && length < PATH_MAX && access(out, R_OK) == 0;
}

static bool has_list(char out[PATH_MAX], const char *folder)
{
    char list[PATH_MAX];
    int length = snprintf(out, PATH_MAX, "%s", folder);
    return length > 0 && length < PATH_MAX && joined(list, folder, "kernels.def");
}

bool kernel_arch_is_portable(const char *arch)
{
    return *arch != '\0' && arch[strspn(arch, "0123456789")] == '\0';
}

bool kernel_source_folder(char out[PATH_MAX], const char *given)
{
    char above[PATH_MAX], candidate[PATH_MAX];
    if (given) {
        return has_list(out, given);
    }
    bool found = false;
    for (char *end = child_own_folder(above) ? above + strlen(above) : NULL; end && !found; end = strrchr(above, '/')) {
        *end = '\0';
        found = joined(candidate, above, "src") && has_list(out, candidate);
    }
    return found;
}

bool kernel_source_line(kernel_line *out, const char *folder, const char *kernel)
{
    char path[PATH_MAX], name[128];
    size_t bytes = 0;
    char *text = joined(path, folder, "kernels.def") ? file_text(path, SIZE_MAX, &bytes) : NULL;
    bool found = false;
    char *rest = NULL;
    for (char *line = text ? strtok_r(text, "\n", &rest) : NULL; line && !found; line = strtok_r(NULL, "\n", &rest)) {
        found = sscanf(line, "KERNEL(%127[a-z0-9_], %63[a-z0-9_], %15[a-z0-9], %255[^)])", name, out->family, out->arch,
                       out->parameters) == 4 &&
                strcmp(name, kernel) == 0;
    }
    free(text);
    return found;
}

bool kernel_source_file(char out[PATH_MAX], const char *folder, const char *family)
{
    /* The ladder's rungs share a folder. */
    static const char *const forms[] = {"cuda/kernels/%s/%s.cu", "cuda/kernels/ladder/%.0s%s.cu", "cpu/%s/%s.c"};
    bool found = false;
    for (size_t i = 0; i < sizeof forms / sizeof forms[0] && !found; ++i) {
        char name[192];
        snprintf(name, sizeof name, forms[i], family, family);
        found = joined(out, folder, name);
    }
    return found;
}

/* ---- Parameters ---- */

static acr_status malformed(const char *file, const char *why)
{
    return acr__fail(ACR_FORMAT, "%s: PARAMETERS: %s", file, why);
}

/* One word of the declaration: NAME, or NAME=default. */
static acr_status take_declared(kernel_parameters *out, const char *file, const char *word, size_t length)
{
    const size_t name = strcspn(word, "= \n");
    const bool optional = name < length;
    if (name == 0 || name > length || name >= sizeof out->items[0].name) {
        return malformed(file, "has a word that is neither NAME nor NAME=default");
    }
    if (out->count == KERNEL_PARAMETERS_MAX) {
        return malformed(file, "has too many names");
    }
    snprintf(out->items[out->count].name, sizeof out->items[0].name, "%.*s", (int)name, word);
    out->items[out->count++].optional = optional;
    return ACR_OK;
}

/* The next word, or the comment's end: past blanks and the stars that lines of a comment begin with. */
static const char *next_declared(const char *at)
{
    at += strspn(at, " \n");
    while (*at == '*' && at[1] != '/') {
        at += 1 + strspn(at + 1, " \n");
    }
    return at;
}

acr_status kernel_parameters_read(kernel_parameters *out, const char *file)
{
    static const char mark[] = "PARAMETERS:";
    size_t bytes = 0;
    char *text = file_text(file, SIZE_MAX, &bytes);
    if (!text) {
        return ACR_IO;
    }
    const char *base = strrchr(file, '/') ? strrchr(file, '/') + 1 : file, *line = strstr(text, mark);
    *out = (kernel_parameters){.count = 0};
    snprintf(out->family, sizeof out->family, "%.*s", (int)strcspn(base, "."), base);
    acr_status status = line ? ACR_OK : malformed(file, "is missing");
    const char *at = line ? next_declared(line + sizeof mark - 1) : "";
    while (status == ACR_OK && strncmp(at, "*/", 2) != 0) {
        const size_t length = strcspn(at, " \n");
        if (length == 0) {
            status = malformed(file, "the comment does not end");
        } else if (strncmp(at, "none", length) != 0) {
            status = take_declared(out, file, at, length);
        }
        at = next_declared(at + length);
    }
    free(text);
    return status;
}

static bool is_one_of(const char *value, size_t length, const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; ++i) {
        if (strlen(words[i]) == length && strncmp(value, words[i], length) == 0) {
            return true;
        }
    }
    return false;
}

/* What a value of a parameter must be, or NULL when it is. */
static const char *wrong_value(const char *name, size_t name_length, const char *value, size_t length)
{
    static const char *const dtype[] = {"DTYPE"}, *const switches[] = {"BF16", "E4M3", "PACKED", "PAGED"};
    static const char *const dtypes[] = {"ACR_F32", "ACR_F16", "ACR_BF16", "ACR_E4M3"}, *const bits[] = {"0", "1"};
    if (is_one_of(name, name_length, dtype, 1)) {
        return is_one_of(value, length, dtypes, 4) ? NULL : "ACR_F32, ACR_F16, ACR_BF16 or ACR_E4M3";
    }
    if (is_one_of(name, name_length, switches, 4)) {
        return is_one_of(value, length, bits, 2) ? NULL : "0 or 1";
    }
    return length > 0 && strspn(value, "0123456789") == length ? NULL : "a whole number";
}

const char *kernel_set_find(const char *set, const char *name, size_t length)
{
    for (const char *at = set + strspn(set, " "); *at; at += strspn(at, " ")) {
        if (strncmp(at, name, length) == 0 && at[length] == '=') {
            return at;
        }
        at += strcspn(at, " ");
    }
    return NULL;
}

static acr_status undeclared(const kernel_parameters *declared, const char *name, size_t length)
{
    char names[KERNEL_PARAMETERS_MAX * 34] = "none";
    for (int i = 0, used = 0; i < declared->count; ++i) {
        used += snprintf(names + used, sizeof names - (size_t)used, "%s%s", i ? " " : "", declared->items[i].name);
    }
    return acr__fail(ACR_INVALID, "%s has no parameter %.*s; it has %s", declared->family, (int)length, name, names);
}

acr_status kernel_parameters_check(const kernel_parameters *declared, const char *set, bool whole)
{
    for (const char *at = set + strspn(set, " "); *at; at += strspn(at, " ")) {
        const size_t item = strcspn(at, " "), name = strcspn(at, "= ");
        int i = 0;
        while (i < declared->count &&
               (strlen(declared->items[i].name) != name || strncmp(declared->items[i].name, at, name) != 0)) {
            ++i;
        }
        if (i == declared->count) {
            return undeclared(declared, at, name);
        }
        const size_t value = item > name ? item - name - 1 : 0;
        const char *wanted = wrong_value(at, name, at + name + 1, value);
        if (wanted) {
            return acr__fail(ACR_INVALID, "%s: %.*s is not %s", declared->family, (int)item, at, wanted);
        }
        at += item;
    }
    for (int i = 0; i < declared->count && whole; ++i) {
        const char *name = declared->items[i].name;
        if (!declared->items[i].optional && !kernel_set_find(set, name, strlen(name))) {
            return acr__fail(ACR_INVALID, "%s: %s is missing, which has no default", declared->family, name);
        }
    }
    return ACR_OK;
}

bool kernel_find_nvcc(char out[PATH_MAX])
{
    const char *named = getenv("ACR_NVCC"), *cuda_home = getenv("CUDA_HOME");
    char home[PATH_MAX] = "/usr/local/cuda/bin", own[PATH_MAX] = "", toolchain[PATH_MAX + 32];
    if (named && *named && strcmp(named, "wheels") != 0) {
        int length = snprintf(out, PATH_MAX, "%s", named);
        return length < PATH_MAX && access(out, X_OK) == 0;
    }
    if (cuda_home && *cuda_home) {
        snprintf(home, sizeof home, "%s/bin", cuda_home);
    }
    child_own_folder(own);
    snprintf(toolchain, sizeof toolchain, "%s/../toolchain/bin", own);
    const char *const folders[] = {home, "/usr/local/cuda/bin", toolchain, NULL};
    return child_find(out, "nvcc", folders);
}
