/* Files: read whole, written all or nothing. Failures return a status with its detail in acr_last_error(). Folders:
 * removed whole. */
#ifndef WORKBENCH_FILES_H
#define WORKBENCH_FILES_H

#include <stddef.h>

#include "acromion.h"

/* Maps a file for reading; *out is NULL for an empty file. Free with file_unmap. Errors: ACR_IO. */
acr_status file_map(const char *path, const void **out, size_t *size);
void file_unmap(const void *bytes, size_t size);

typedef struct file_part {
    const void *bytes;
    size_t size;
} file_part;

/* Writes the parts one after another to a temporary file beside `path`, syncs it, and renames it to `path`: a reader
 * sees the old file or the new one, whole. Errors: ACR_IO, ACR_NO_MEMORY. */
acr_status file_write(const char *path, const file_part *parts, size_t part_count);

/* Removes a folder with all that is in it, as far as that is possible. */
void folder_remove(const char *path);

#endif
