/* Memory, streams and their order on the device of a group: a GPU, or the host for contexts of the "cpu" backend, where
 * every call is done when it returns. */
#ifndef ACR_DIST_DEVICE_H
#define ACR_DIST_DEVICE_H

#include <acromion.h>
#include <stddef.h>
#include <stdint.h>

typedef struct dist_driver dist_driver; /* the driver's entries that are used (device.c) */

typedef struct dist_device {
    dist_driver *driver; /* NULL = the host */
    int ordinal;
    void *context;   /* CUcontext, retained */
    void *transfers; /* the stream of transfers; the host has none */
    void *rescue;    /* a stream for what must not wait for any other's work */
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

/* Bytes from one memory to another, of which one may be another rank's. By a copy engine. */
acr_status dist_copy_bytes(const dist_device *device, void *to, const void *from, size_t bytes, void *stream);

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

/* Between two looks: lets others run, briefly while an answer is near, then longer. */
void dist_pause(int looks);

/* *out = 1 when all of the stream's work has ended. */
acr_status dist_is_idle(const dist_device *device, void *stream, int *out);

/* ---- Memory that other ranks write ---- */

/* How another rank finds memory of this one. */
typedef struct dist_address {
    unsigned char handle[64];  /* CUipcMemHandle: for another process */
    uint64_t pointer, context; /* for another thread of this process */
} dist_address;

/* Whether this device can share memory with other ranks and wait for what they write. Errors: ACR_UNSUPPORTED (says
 * what is missing). */
acr_status dist_can_share(const dist_device *device);

/* memory: of dist_alloc. */
acr_status dist_export(const dist_device *device, void *memory, dist_address *out);

/* Maps another rank's memory here. is_here: it is a thread of this process, and what is mapped needs no dist_unmap. */
acr_status dist_map(const dist_device *device, const dist_address *address, int is_here, void **out);
void dist_unmap(const dist_device *device, void *mapped);

/* Enqueues the write of a word, behind everything that the stream did before, copies to other ranks' memory too. */
acr_status dist_write_word(const dist_device *device, void *word, uint32_t value, void *stream);

/* Enqueues a wait until one of these bits of a word is set. */
acr_status dist_wait_word(const dist_device *device, const void *word, uint64_t bits, void *stream);

/* Waits until a stream is idle, at most so many seconds; ACR_TIMEOUT. */
acr_status dist_wait_idle(const dist_device *device, void *stream, double seconds);

#endif
