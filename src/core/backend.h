/* What a backend does: open a device, hold memory, prepare kernels, launch them, time them. Two exist, cpu/backend.c
 * and cuda/backend.c; they never see each other. Every function returns a status and leaves its detail with acr__fail
 * (error.h). */
#ifndef ACR_BACKEND_H
#define ACR_BACKEND_H

#include "kernel.h"

typedef struct acr__backend acr__backend;
struct acr__op_call; /* op.h */

/* An open device. The backend embeds this at the start of its own struct. */
typedef struct acr__backend_device {
    const acr__backend *backend;
    acr__device device;
    char text[192]; /* one line about the device */
} acr__backend_device;

/* A kernel ready to launch: loaded on cuda, bound to its workers on cpu. The backend embeds this at the start of its
 * own struct. Immutable and shared by threads. */
typedef struct acr__prepared {
    acr__backend_device *device;
    const acr__kernel *kernel;
    acr_problem problem; /* canonical */
    acr__launch launch;  /* cuda */
    size_t workspace_bytes;
} acr__prepared;

/* Enqueues one unit of work on a stream: what `time` repeats. */
typedef acr_status acr__enqueue(void *arg, void *stream);

/* Units of work recorded once, to be replayed and timed as often as wanted. The backend embeds this at the start of its
 * own struct. */
typedef struct acr__graph {
    acr__backend_device *device;
    int launches; /* units in one replay, back to back */
} acr__graph;

/* What the workbench and the search ask of a backend to measure it from outside. No function of the library's API needs
 * this table. NULL where the backend cannot be opened. */
typedef struct acr__timing {
    /* Stream mode (docs/manual/measuring.md). graph_record enqueues `launches` units back to back (cuda: captured into
     * a graph); arg must outlive the graph where enqueue is called again at every replay (cpu). */
    acr_status (*graph_record)(acr__graph **out, acr__backend_device *device, acr__enqueue *enqueue, void *arg,
                               int launches);
    /* As graph_record, from a CUgraph of `launches` units that the caller captured in the device's primary context. The
     * caller keeps the CUgraph and the memory that it uses. cpu: ACR_UNSUPPORTED. */
    acr_status (*graph_adopt)(acr__graph **out, acr__backend_device *device, void *cuda_graph, int launches);
    /* Replays once to warm up, then `replays` times, and writes the seconds a unit of each replay to
     * seconds[0..replays). */
    acr_status (*graph_time)(acr__graph *graph, int replays, double *seconds);
    /* Cold mode: the seconds of `samples` replays, each alone. Before each the cache is emptied by writing twice its
     * size (cuda: L2, with the lines that a kernel marked to stay; cpu: the last-level cache). A first replay is not
     * counted. ACR_UNSUPPORTED where the cache's size is unknown. */
    acr_status (*graph_time_cold)(acr__graph *graph, int samples, double *seconds);
    /* The seconds a unit of one replay, alone, after prepare(arg, stream), which may wait for the device. cuda: the
     * replay waits until the host has queued all of it, so that the host's pace is no part of the time. */
    acr_status (*graph_time_prepared)(acr__graph *graph, acr__enqueue *prepare, void *arg, double *seconds);
    void (*graph_free)(acr__graph *graph); /* NULL is a no-op */
    /* Copies and fills of device memory that a stream's later work finds done. */
    acr_status (*copy_on_device)(acr__backend_device *device, void *to, const void *from, size_t bytes, void *stream);
    acr_status (*fill_on_device)(acr__backend_device *device, void *memory, unsigned char value, size_t bytes,
                                 void *stream);

    /* Host seconds of the driver's launch call alone, the mean of `launches` in a row; everything else is done before
     * the first. `launch` cannot be cheaper. Waits for nothing. cpu: ACR_UNSUPPORTED. */
    acr_status (*launch_bare)(const acr__prepared *prepared, const fwd_args *args, void *stream, int launches,
                              double *seconds);

    /* Calls work(arg, NULL) with the device's context current, for libraries that look for it. */
    acr_status (*within)(acr__backend_device *device, acr__enqueue *work, void *arg);
} acr__timing;

struct acr__backend {
    const char *name;
    acr__backend_id id;

    acr_status (*open)(acr__backend_device **out, const acr_ctx_options *options);
    void (*close)(acr__backend_device *device);

    /* Loads a kernel for a problem that it can run (why_not is NULL). Safe while a stream is being captured. */
    acr_status (*prepare)(acr__prepared **out, acr__backend_device *device, const acr__kernel *kernel,
                          const acr_problem *problem);
    void (*release)(acr__prepared *prepared);

    /* Enqueues one execution. args are filled; a backward kernel's are the first member of its bwd_args. flags are
     * acr_buffers.flags. Neither allocates nor synchronises. */
    acr_status (*launch)(const acr__prepared *prepared, const fwd_args *args, uint32_t flags, void *stream);

    /* Enqueues one operation beside attention (op.h), which is checked. cuda: the first call that needs an image loads
     * it, also while a stream is being captured; otherwise it neither allocates nor synchronises. */
    acr_status (*run_op)(acr__backend_device *device, const struct acr__op_call *call, void *stream);

    /* Device memory, at least 256-byte aligned, for scratch, workspaces and the workbench; never on the execution path.
     * Copies and fills are complete when they return, but wait for nothing: `synchronize` first where enqueued work
     * uses the memory. So they are safe while a stream is being captured, which `synchronize` is not. */
    acr_status (*mem_alloc)(acr__backend_device *device, size_t bytes, void **out);
    void (*mem_free)(acr__backend_device *device, void *memory);
    acr_status (*mem_upload)(acr__backend_device *device, void *to, const void *from_host, size_t bytes);
    acr_status (*mem_download)(acr__backend_device *device, void *to_host, const void *from, size_t bytes);
    acr_status (*mem_fill)(acr__backend_device *device, void *memory, unsigned char value, size_t bytes);
    /* Enqueues a fill with zero on a stream; capture-safe. */
    acr_status (*mem_zero_async)(acr__backend_device *device, void *memory, size_t bytes, void *stream);
    /* *out = 1 when the stream is being captured into a graph. */
    acr_status (*is_capturing)(acr__backend_device *device, void *stream, int *out);
    /* Waits for all work of the device; reports its faults. */
    acr_status (*synchronize)(acr__backend_device *device);

    /* Enqueues `launches` units back to back, replays them once to warm up, then `replays` times, and writes the
     * seconds a unit of each replay to seconds[0..replays): how acr_plan_measure chooses. */
    acr_status (*time)(acr__backend_device *device, acr__enqueue *enqueue, void *arg, int launches, int replays,
                       double *seconds);

    const acr__timing *timing;
};

extern const acr__backend acr__backend_cpu;
extern const acr__backend acr__backend_cuda;

#endif
