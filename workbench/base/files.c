/* Files, see files.h. */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

/* What stands where a regular file is expected. */
static const char *kind_of(mode_t mode)
{
    return S_ISDIR(mode)    ? "a folder"
           : S_ISFIFO(mode) ? "a FIFO"
           : S_ISCHR(mode)  ? "a character device"
           : S_ISBLK(mode)  ? "a block device"
           : S_ISSOCK(mode) ? "a socket"
                            : "no regular file";
}

acr_status file_map(const char *path, const void **out, size_t *size)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a FIFO would wait for its writer */
    if (fd < 0) {
        return acr__fail(ACR_IO, "%s: %s", path, strerror(errno));
    }
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        return acr__fail(ACR_IO, "%s: %s, expected a regular file", path, kind_of(info.st_mode));
    }
    void *bytes = NULL;
    if (info.st_size > 0) {
        bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    int map_error = errno;
    close(fd);
    if (bytes == MAP_FAILED) {
        return acr__fail(ACR_IO, "%s: %s", path, strerror(map_error));
    }
    *out = bytes;
    *size = (size_t)info.st_size;
    return ACR_OK;
}

void file_unmap(const void *bytes, size_t size)
{
    if (bytes) {
        munmap((void *)(uintptr_t)bytes, size);
    }
}

char *file_text(const char *path, size_t bytes_max, size_t *bytes)
{
    const void *mapped = NULL;
    size_t size = 0;
    if (file_map(path, &mapped, &size) != ACR_OK) {
        return NULL;
    }
    const size_t whole = mapped ? size : 0, kept = whole < bytes_max ? whole : bytes_max;
    char *text = malloc(kept + 1);
    if (text) {
        if (kept > 0) {
            memcpy(text, mapped, kept);
        }
        text[kept] = '\0';
        *bytes = kept;
    } else {
        acr__fail(ACR_NO_MEMORY, "%s: no memory for %zu bytes", path, kept);
    }
    file_unmap(mapped, size);
    return text;
}

static int write_all(int fd, const char *bytes, size_t size)
{
    while (size > 0) {
        ssize_t written = write(fd, bytes, size);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written < 0) {
            return -1;
        }
        bytes += written;
        size -= (size_t)written;
    }
    return 0;
}

static int write_parts(int fd, const file_part *parts, size_t part_count)
{
    for (size_t i = 0; i < part_count; ++i) {
        if (write_all(fd, parts[i].bytes, parts[i].size) != 0) {
            return -1;
        }
    }
    return 0;
}

/* What an output path stands for. */
typedef enum output_kind {
    OUTPUT_REPLACED, /* a regular file, or nothing yet: a new file takes its name */
    OUTPUT_STREAM    /* a character device or a FIFO: written to in place */
} output_kind;

/* *target becomes the path to write to, links followed; the caller frees it. */
static acr_status find_output(const char *path, output_kind *kind, char **target)
{
    struct stat info;
    if (stat(path, &info) != 0) {
        if (errno != ENOENT) {
            return acr__fail(ACR_IO, "%s: %s", path, strerror(errno));
        }
        *kind = OUTPUT_REPLACED;
        *target = strdup(path);
    } else if (S_ISCHR(info.st_mode) || S_ISFIFO(info.st_mode)) {
        *kind = OUTPUT_STREAM;
        *target = strdup(path);
    } else if (S_ISREG(info.st_mode)) {
        *kind = OUTPUT_REPLACED;
        *target = realpath(path, NULL);
    } else {
        return acr__fail(ACR_IO, "%s: %s, where a file would be written", path, kind_of(info.st_mode));
    }
    return *target ? ACR_OK : acr__fail(ACR_IO, "%s: %s", path, strerror(errno));
}

/* An empty file beside the target, with a name of its own. Returns its descriptor, or -1 with errno; *name is freed by
 * the caller. */
static int make_temporary(const char *target, char **name)
{
    const size_t length = strlen(target) + sizeof ".XXXXXX";
    *name = malloc(length);
    if (!*name) {
        return -1;
    }
    snprintf(*name, length, "%s.XXXXXX", target);
    return mkstemp(*name);
}

acr_status file_can_write(const char *path)
{
    output_kind kind;
    char *target = NULL, *temporary = NULL;
    acr_status status = find_output(path, &kind, &target);
    if (status != ACR_OK) {
        return status;
    }
    if (kind == OUTPUT_STREAM) {
        status = access(target, W_OK) == 0 ? ACR_OK : acr__fail(ACR_IO, "%s: %s", path, strerror(errno));
    } else {
        const int fd = make_temporary(target, &temporary);
        status = fd >= 0 ? ACR_OK : acr__fail(ACR_IO, "%s: cannot be written: %s", path, strerror(errno));
        if (fd >= 0) {
            close(fd);
            unlink(temporary);
        }
    }
    free(temporary);
    free(target);
    return status;
}

/* The folder of a path that leads to nothing yet, and the name in it; NULL when there is no such folder. */
static char *place_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
    char *found = folder ? realpath(folder, NULL) : NULL, *place = NULL;
    const char *name = slash ? slash + 1 : path;
    if (found) {
        const size_t length = strlen(found) + strlen(name) + 2;
        place = malloc(length);
        if (place) {
            snprintf(place, length, "%s/%s", found, name);
        }
    }
    free(found);
    free(folder);
    return place;
}

bool file_same(const char *one, const char *other)
{
    struct stat first, second;
    const bool there = stat(one, &first) == 0, also_there = stat(other, &second) == 0;
    if (there || also_there) {
        return there && also_there && S_ISREG(first.st_mode) && first.st_dev == second.st_dev &&
               first.st_ino == second.st_ino;
    }
    char *place = place_of(one), *other_place = place_of(other);
    const bool same = place && other_place && strcmp(place, other_place) == 0;
    free(place);
    free(other_place);
    return same;
}

/* mkstemp makes private files; a result gets the mode that the umask allows, as if it had been opened plainly. */
static void set_plain_mode(int fd)
{
    mode_t mask = umask(0);
    umask(mask);
    (void)fchmod(fd, 0666 & ~mask);
}

/* Both return 0 or an errno. */
static int write_in_place(const char *target, const file_part *parts, size_t part_count)
{
    const int fd = open(target, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); /* ENXIO: a FIFO that nobody reads */
    if (fd < 0) {
        return errno;
    }
    int reason = fcntl(fd, F_SETFL, 0) == 0 && write_parts(fd, parts, part_count) == 0 ? 0 : errno;
    if (close(fd) != 0 && reason == 0) {
        reason = errno;
    }
    return reason;
}

static int write_and_rename(const char *target, const file_part *parts, size_t part_count)
{
    char *temporary = NULL;
    const int fd = make_temporary(target, &temporary);
    if (fd < 0) {
        const int reason = errno;
        free(temporary);
        return reason;
    }
    set_plain_mode(fd);
    int reason = write_parts(fd, parts, part_count) == 0 && fsync(fd) == 0 ? 0 : errno;
    if (close(fd) != 0 && reason == 0) {
        reason = errno;
    }
    if (reason == 0 && rename(temporary, target) != 0) {
        reason = errno;
    }
    if (reason != 0) {
        unlink(temporary);
    }
    free(temporary);
    return reason;
}

acr_status file_write(const char *path, const file_part *parts, size_t part_count)
{
    output_kind kind;
    char *target = NULL;
    acr_status status = find_output(path, &kind, &target);
    if (status == ACR_OK) {
        const int reason = kind == OUTPUT_STREAM ? write_in_place(target, parts, part_count)
                                                 : write_and_rename(target, parts, part_count);
        status = reason == 0       ? ACR_OK
                 : reason == ENXIO ? acr__fail(ACR_IO, "%s: a FIFO that nobody reads", path)
                                   : acr__fail(ACR_IO, "%s: %s", path, strerror(reason));
    }
    free(target);
    return status;
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info;
    (void)kind;
    (void)walk;
    return remove(path);
}

acr_status file_path(char out[PATH_MAX], const char *folder, const char *name, const char *ending)
{
    return snprintf(out, PATH_MAX, "%s/%s%s", folder, name, ending) < PATH_MAX
               ? ACR_OK
               : acr__fail(ACR_IO, "%s: the path is too long", folder);
}

void folder_remove(const char *path)
{
    enum {
        OPEN_FOLDERS = 8
    };
    nftw(path, remove_entry, OPEN_FOLDERS, FTW_DEPTH | FTW_PHYS);
}
