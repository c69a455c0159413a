/* Files: read whole, written all or nothing. Failures return a status with its detail in acr_last_error(). Folders:
 * removed whole. */
#ifndef WORKBENCH_FILES_H
#define WORKBENCH_FILES_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "acromion.h"

/* Maps a regular file for reading; *out is NULL for an empty file. Waits for nobody: a FIFO is refused. Free with
 * file_unmap. Errors: ACR_IO. */
acr_status file_map(const char *path, const void **out, size_t *size);
void file_unmap(const void *bytes, size_t size);

/* The text of a file, of a longer one its first bytes_max bytes, NUL-terminated; the caller frees it. NULL after
 * acr__fail. */
char *file_text(const char *path, size_t bytes_max, size_t *bytes);

typedef struct file_part {
    const void *bytes;
    size_t size;
} file_part;

/* Writes the parts one after another to a temporary file beside `path` (of a symbolic link: beside the file it leads
 * to), syncs it, and renames it to `path`: a reader sees the old file or the new one, whole. Character devices, and
 * FIFOs that somebody reads, are written to, never replaced; anything else that is no regular file is refused. Errors:
 * ACR_IO, ACR_NO_MEMORY. */
acr_status file_write(const char *path, const file_part *parts, size_t part_count);

/* For before the work whose result goes to `path`: would file_write succeed now? Makes a temporary file there and
 * removes it; of a device or a FIFO looks at the permissions alone. Errors: ACR_IO, naming the path and the reason. */
acr_status file_can_write(const char *path);

/* Whether what is written to one path would replace what was written to the other; devices and FIFOs take both. */
bool file_same(const char *one, const char *other);

/* "folder/name" and an ending, "" = none. Errors: ACR_IO when that is longer than a path may be. */
acr_status file_path(char out[PATH_MAX], const char *folder, const char *name, const char *ending);

/* Removes a folder with all that is in it, as far as that is possible. */
void folder_remove(const char *path);

#endif
