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

acr_status file_map(const char *path, const void **out, size_t *size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return acr__fail(ACR_IO, "%s: %s", path, strerror(errno));
    }
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        return acr__fail(ACR_IO, "%s: not a regular file", path);
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
    return fsync(fd);
}

/* mkstemp makes private files; a result gets the mode that the umask allows, as if it had been opened plainly. */
static void set_plain_mode(int fd)
{
    mode_t mask = umask(0);
    umask(mask);
    (void)fchmod(fd, 0666 & ~mask);
}

acr_status file_write(const char *path, const file_part *parts, size_t part_count)
{
    size_t length = strlen(path) + sizeof ".XXXXXX";
    char *temporary = malloc(length);
    if (!temporary) {
        return acr__fail(ACR_NO_MEMORY, "%s: out of memory", path);
    }
    snprintf(temporary, length, "%s.XXXXXX", path);
    acr_status status = ACR_OK;
    int fd = mkstemp(temporary);
    if (fd < 0) {
        status = acr__fail(ACR_IO, "%s: %s", path, strerror(errno));
    } else {
        set_plain_mode(fd);
        int failed = write_parts(fd, parts, part_count);
        int reason = errno;
        if (close(fd) != 0 && !failed) {
            failed = -1;
            reason = errno;
        }
        if (!failed && rename(temporary, path) != 0) {
            failed = -1;
            reason = errno;
        }
        if (failed) {
            unlink(temporary);
            status = acr__fail(ACR_IO, "%s: %s", path, strerror(reason));
        }
    }
    free(temporary);
    return status;
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info;
    (void)kind;
    (void)walk;
    return remove(path);
}

void folder_remove(const char *path)
{
    enum {
        OPEN_FOLDERS = 8
    };
    nftw(path, remove_entry, OPEN_FOLDERS, FTW_DEPTH | FTW_PHYS);
}
