/* The device code of a build as the PTX machine sees it: the PTX beside every image of a folder is read, all its
 * instructions have executors, and the entry is called like the image.
 *     ptx_load FOLDER
 * Exit code 77 where the folder holds no PTX at all: its images come from a build that kept none. */
#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ptxvm/ptxvm.h"

enum {
    PATH_BYTES = 4096,
    SKIPPED = 77
};

static char *read_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return NULL;
    char *text = NULL;
    if (fseek(file, 0, SEEK_END) == 0) {
        const long size = ftell(file);
        rewind(file);
        text = size >= 0 ? malloc((size_t)size + 1) : NULL;
        if (text)
            text[fread(text, 1, (size_t)size, file)] = '\0';
    }
    fclose(file);
    return text;
}

static bool ends_with(const char *text, const char *end)
{
    const size_t length = strlen(text), end_length = strlen(end);
    return length > end_length && strcmp(text + length - end_length, end) == 0;
}

/* Whether NAME.ptx or NAME.<arch>.ptx holds an entry NAME that the machine can execute. */
static bool is_executable(const char *folder, const char *file)
{
    char path[PATH_BYTES], error[512] = "it cannot be read";
    snprintf(path, sizeof path, "%s/%s", folder, file);
    char *text = read_text(path);
    ptxvm_module *module = text ? ptxvm_load(text, error, sizeof error) : NULL;
    snprintf(path, sizeof path, "%.*s", (int)strcspn(file, "."), file);
    const bool is_there = module && ptxvm_has_entry(module, path);
    if (!is_there)
        printf("%s: %s\n", file, module ? "its entry is called otherwise" : error);
    ptxvm_free(module);
    free(text);
    return is_there;
}

int main(int argc, char **argv)
{
    DIR *folder = argc == 2 ? opendir(argv[1]) : NULL;
    if (!folder) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    int read = 0, failed = 0;
    for (const struct dirent *file; (file = readdir(folder));) {
        if (!ends_with(file->d_name, ".ptx"))
            continue;
        read++;
        failed += !is_executable(argv[1], file->d_name);
    }
    closedir(folder);
    printf("%d files of PTX, %d failed\n", read, failed);
    if (read == 0)
        return SKIPPED;
    return failed ? 1 : 0;
}
