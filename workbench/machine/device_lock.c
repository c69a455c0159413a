/* Locks of devices, see device_lock.h. */
#include "device_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

/* The GPU behind an ordinal: what CUDA_VISIBLE_DEVICES says at that place, else the ordinal itself. */
static void gpu_name(char out[64], int32_t ordinal)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    for (int32_t i = 0; visible && i < ordinal; ++i) {
        visible = strchr(visible, ',');
        visible = visible ? visible + 1 : NULL;
    }
    const int length = visible ? (int)strspn(visible, "0123456789abcdefABCDEFGPUMI-") : 0;
    if (length > 0) {
        snprintf(out, 64, "%.*s", length, visible);
    } else {
        snprintf(out, 64, "%d", (int)ordinal);
    }
}

/* Another user's file is not opened with O_CREAT: some systems refuse that in /tmp. */
static int open_file(const char *path)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    return file >= 0 || errno != ENOENT ? file : open(path, O_RDONLY | O_CREAT | O_CLOEXEC, 0644);
}

static acr_status open_lock(int *out, char path[PATH_MAX], const char *backend, int32_t ordinal)
{
    char gpu[64] = "";
    if (strcmp(backend, "cuda") == 0) {
        gpu_name(gpu, ordinal);
    }
    snprintf(path, PATH_MAX, "/tmp/acromion-%s%s.lock", backend, gpu);
    *out = open_file(path);
    return *out >= 0 ? ACR_OK : acr__fail(ACR_IO, "%s: %s", path, strerror(errno));
}

acr_status device_lock(int *out, const char *backend, int32_t ordinal, const volatile int *stop)
{
    static const struct timespec pause = {0, 10000000};
    char path[PATH_MAX];
    int file;
    acr_status opened = open_lock(&file, path, backend, ordinal);
    if (opened != ACR_OK) {
        return opened;
    }
    while (flock(file, LOCK_EX | LOCK_NB) != 0) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || (stop && *stop == 2)) {
            acr_status status = acr__fail(ACR_IO, "%s: %s", path, stop && *stop == 2 ? "stopped" : strerror(errno));
            close(file);
            return status;
        }
        nanosleep(&pause, NULL);
    }
    *out = file;
    return ACR_OK;
}

static acr_status wait_for(int lock, int how)
{
    while (flock(lock, how) != 0) {
        if (errno != EINTR) {
            return acr__fail(ACR_IO, "the device's lock: %s", strerror(errno));
        }
    }
    return ACR_OK;
}

acr_status device_share(int *out, const char *backend, int32_t ordinal)
{
    char path[PATH_MAX];
    acr_status status = open_lock(out, path, backend, ordinal);
    return status == ACR_OK ? wait_for(*out, LOCK_SH) : status;
}

acr_status device_take(int lock)
{
    return wait_for(lock, LOCK_EX);
}

void device_unlock(int lock)
{
    close(lock);
}
