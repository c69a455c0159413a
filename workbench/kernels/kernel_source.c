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

char *kernel_read_text(const char *path, size_t *bytes)
{
    const void *mapped = NULL;
    size_t size = 0;
    if (file_map(path, &mapped, &size) != ACR_OK) {
        return NULL;
    }
    char *text = malloc(size + 1);
    if (text) {
        if (size > 0) {
            memcpy(text, mapped, size);
        }
        text[size] = '\0';
        *bytes = size;
    } else {
        acr__fail(ACR_NO_MEMORY, "%s: no memory for %zu bytes", path, size);
    }
    file_unmap(mapped, size);
    return text;
}

bool kernel_source_line(kernel_line *out, const char *folder, const char *kernel)
{
    char path[PATH_MAX], name[128];
    size_t bytes = 0;
    char *text = joined(path, folder, "kernels.def") ? kernel_read_text(path, &bytes) : NULL;
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
    char name[192];
    snprintf(name, sizeof name, "cuda/kernels/%s/%s.cu", family, family);
    if (joined(out, folder, name)) {
        return true;
    }
    snprintf(name, sizeof name, "cuda/kernels/ladder/%s.cu", family);
    return joined(out, folder, name);
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
