/* Finding the PTX of an image: see fake_program.h. */
#include "fake_program.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    OLDEST_ARCH = 80,  /* an image for many architectures holds PTX of its oldest, which is none before */
    STEM_BYTES = 4096, /* of a path without its ending */
    PATH_BYTES = STEM_BYTES + 32
};

/* ---- Files ---- */

/* Whether a file's bytes are those at `code`: it is read no further than they agree. */
static int holds(const char *path, const unsigned char *code)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return 0;
    unsigned char part[4096];
    size_t got;
    int same = 1, any = 0;
    while (same && (got = fread(part, 1, sizeof part, file)) > 0) {
        size_t i = 0;
        while (i < got && part[i] == code[i])
            i++;
        same = i == got;
        code += got;
        any = 1;
    }
    fclose(file);
    return same && any;
}

/* A file's text; NULL where there is none. The caller frees it. */
static char *read_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return NULL;
    char *text = NULL;
    size_t length = 0, got;
    do {
        char *longer = realloc(text, length + 65537);
        if (longer == NULL)
            abort();
        text = longer;
        got = fread(text + length, 1, 65536, file);
        length += got;
    } while (got > 0);
    fclose(file);
    text[length] = '\0';
    return text;
}

/* The path of the image with these bytes, without its ".bin": in the folder, or where `levels` is above 0, in those
 * inside it. 0 = there is none. */
static int find_image(const char *folder, int levels, const void *code, char stem[STEM_BYTES])
{
    DIR *listing = opendir(folder);
    int found = 0;
    for (const struct dirent *d; listing != NULL && !found && (d = readdir(listing)) != NULL;) {
        const size_t length = strlen(d->d_name);
        char path[STEM_BYTES];
        const int written = snprintf(path, STEM_BYTES, "%s/%s", folder, d->d_name);
        if (written <= 0 || written >= STEM_BYTES || d->d_name[0] == '.')
            continue;
        if (length > 4 && strcmp(d->d_name + length - 4, ".bin") == 0) {
            found = holds(path, code);
            if (found)
                snprintf(stem, STEM_BYTES, "%.*s", written - 4, path);
        } else if (levels > 0 && d->d_type == DT_DIR)
            found = find_image(path, levels - 1, code, stem);
    }
    if (listing != NULL)
        closedir(listing);
    return found;
}

/* ---- Choosing among an image's programs ---- */

static char *read_of_arch(const char stem[STEM_BYTES], int arch)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s.%d.ptx", stem, arch);
    return read_text(path);
}

/* Machine code runs on GPUs of its own major version, the same minor or a later one; PTX on all later ones. */
static char *choose(const char stem[STEM_BYTES], int arch, int ptx_only)
{
    for (int a = arch; a >= arch / 10 * 10 && !ptx_only; a--) {
        char *text = read_of_arch(stem, a);
        if (text != NULL)
            return text;
    }
    char *text = NULL;
    for (int a = OLDEST_ARCH; a <= arch && text == NULL; a++)
        text = read_of_arch(stem, a);
    return text;
}

static int is_text(const char *code)
{
    return strncmp(code, "//", 2) == 0 || strncmp(code, ".version", 8) == 0;
}

static char *find_text(const char *folder, const void *code, int arch, int ptx_only, char *error, size_t error_bytes)
{
    char stem[STEM_BYTES], path[PATH_BYTES];
    if (!find_image(folder, 1, code, stem)) {
        snprintf(error, error_bytes, "no image in %s has these bytes", folder);
        return NULL;
    }
    snprintf(path, sizeof path, "%s.ptx", stem);
    char *text = read_text(path);
    if (text != NULL && arch == 90)
        return text;
    const int is_for_another = text != NULL;
    free(text);
    text = is_for_another ? NULL : choose(stem, arch, ptx_only);
    if (text == NULL)
        snprintf(error, error_bytes, "%s: no PTX beside it for sm_%d", stem, arch);
    return text;
}

ptxvm_module *fake_program_load(const char *folder, const void *code, int arch, int ptx_only, char *error,
                                size_t error_bytes)
{
    if (is_text(code))
        return ptxvm_load(code, error, error_bytes);
    char *text = find_text(folder, code, arch, ptx_only, error, error_bytes);
    if (text == NULL)
        return NULL;
    ptxvm_module *module = ptxvm_load(text, error, error_bytes);
    free(text);
    return module;
}
