/* Memory, streams and their order on the device of a group: a GPU, or the host for contexts of the "cpu" backend, where
 * every call is done when it returns. */
#ifndef ACR_DIST_DEVICE_H
#define ACR_DIST_DEVICE_H

#include <acromion.h>

typedef struct dist_driver dist_driver; /* the driver's entries that are used (device.c) */

typedef struct dist_device {
    dist_driver *driver; /* NULL = the host */
    int ordinal;
    void *context;   /* CUcontext, retained */
    void *transfers; /* the stream of transfers; the host has none */
    void *event;     /* for dist_follow */
} dist_device;

/* Errors: ACR_NO_DEVICE, ACR_NO_MEMORY, ACR_DEVICE_FAULT. */
acr_status dist_device_open(dist_device *device, const acr_ctx *ctx, int ordinal);
void dist_device_close(dist_device *device);

/* Makes the device's context the thread's, until dist_leave; on failure it is not. */
acr_status dist_enter(const dist_device *device);
void dist_leave(const dist_device *device);

/* 256-byte aligned. */
acr_status dist_alloc(const dist_device *device, size_t bytes, void **out);
void dist_free(const dist_device *device, void *memory);

/* Enqueue on a stream; from and to the host the memory must live until the stream has come there. */
acr_status dist_upload(const dist_device *device, void *to, const void *from_host, size_t bytes, void *stream);
acr_status dist_download(const dist_device *device, void *to_host, const void *from, size_t bytes, void *stream);

/* A block of `height` lines of `width` bytes, from one memory of the device to another. */
typedef struct dist_copy {
    const void *from;
    void *to;
    size_t from_pitch, to_pitch, width, height; /* bytes from one line to the next; lines */
} dist_copy;
acr_status dist_copy_lines(const dist_device *device, const dist_copy *copy, void *stream);

/* What comes on stream `later` from now on waits for what is on stream `earlier`. */
acr_status dist_follow(const dist_device *device, void *later, void *earlier);

/* The host's clock that only goes forward. */
double dist_now_s(void);

/* How long a stream's work takes between start and stop; on the host by the clock. read: once the stream is idle. */
typedef struct dist_timer {
    void *begin, *end; /* events; the host has none */
    double begin_s, end_s;
} dist_timer;
acr_status dist_timer_open(const dist_device *device, dist_timer *timer);
void dist_timer_close(const dist_device *device, dist_timer *timer);
acr_status dist_timer_start(const dist_device *device, dist_timer *timer, void *stream);
acr_status dist_timer_stop(const dist_device *device, dist_timer *timer, void *stream);
acr_status dist_timer_read(const dist_device *device, const dist_timer *timer, double *seconds);

/* *out = 1 when all of the stream's work has ended. */
acr_status dist_is_idle(const dist_device *device, void *stream, int *out);

#endif
