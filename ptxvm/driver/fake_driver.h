/* A CUDA driver that is none: fake_driver.c, built as a libcuda.so.1 of its own. It shows one H200 (or what it is
 * told), keeps device memory in host memory, counts what is alive, and fails where it is told to. It launches nothing,
 * so kernels leave their outputs as they were, unless it is told where the PTX of the images lies: then the PTX machine
 * (ptxvm/ptxvm.h) executes every launch, at once, and a fault of a kernel is one of the device, printed to stderr.
 *
 * Use in a test: link the test with the target fake_driver; the library's dlopen("libcuda.so.1") then finds it, because
 * a library of that soname is loaded already. Or, for a program, put its folder first in LD_LIBRARY_PATH and set it up
 * by environment variables, read at the first call:
 *
 *     FAKE_CUDA_DRIVER_VERSION=12080   FAKE_CUDA_DEVICES=0   FAKE_CUDA_ARCH=89   FAKE_CUDA_HIDE=cuLaunchKernelEx
 *     FAKE_CUDA_ENDLESS=cuCtxSynchronize   (a call that never returns)
 *     FAKE_CUDA_FAIL_CALL=7            FAKE_CUDA_FAIL_ALLOC=2    FAKE_CUDA_SMS=2
 *     FAKE_CUDA_EXECUTE=build/images   FAKE_CUDA_SEED=7          FAKE_CUDA_EAGER=1
 *     FAKE_CUDA_RACES=1                FAKE_CUDA_LAUNCH_US=5     FAKE_CUDA_HOST_US=10
 *
 * All functions may be called from any thread. Copies, fills and launches happen at once; fills and launches on a
 * capturing stream happen with each replay. */
#ifndef FAKE_DRIVER_H
#define FAKE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

/* Back to one H200 without faults; counters of calls and launches to 0. What is alive stays alive. */
void fake_cuda_reset(void);

/* What the driver says of itself. Before acr_ctx_create. */
void fake_cuda_set_driver_version(int version); /* 13000 = CUDA 13.0, the default */
void fake_cuda_set_devices(int count);          /* default 1 */
void fake_cuda_set_arch(int arch); /* 80, 86, 89, 90 (default) or 120: capability, SMs, shared memory, L2 alike */
void fake_cuda_set_sms(int count); /* of the GPU shown; behind set_arch */
/* Executes launches from now on: the folder holds the images and their PTX. The seed orders warps and asynchronous
 * work; eager: asynchronous work happens at once, not as late as it may. NULL = launches nothing, the default. */
void fake_cuda_set_execute(const char *folder, uint64_t seed, int eager);
/* A clock for events: so many microseconds a launch of a graph, and where the device waits for the host to queue a
 * replay, 0 to host_us besides, by chance. launch_us 0 = every replay takes one millisecond, the default. */
void fake_cuda_set_clock(long launch_us, long host_us);
void fake_cuda_hide_entry(const char *name); /* cuGetProcAddress does not find it; NULL = none hidden */

/* Faults. n counts from 1 = the next such call; 0 = never. Each happens once. */
void fake_cuda_fail_nth_call(long n);                       /* any entry that can fail: CUDA_ERROR_UNKNOWN */
void fake_cuda_fail_nth_alloc(long n);                      /* cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY */
void fake_cuda_fail_entry(const char *name, int cu_result); /* every call of this entry, until reset or (NULL, 0) */

/* What has happened, and what is alive now: leaks show as numbers that do not return to 0. */
typedef struct fake_cuda_counters {
    long calls;    /* of entries, cuGetProcAddress and error texts excepted */
    long launches; /* kernels, those of replayed graphs included */
    long allocations, libraries, streams, events, graphs, graph_execs, contexts;
    long pushed;  /* context pushes not popped */
    long misuses; /* calls that a real driver would not survive: free of a stranger, a pop too many, a launch without a
                     context, ... */
} fake_cuda_counters;
fake_cuda_counters fake_cuda_count(void);

/* The last launch (captured ones included). */
typedef struct fake_cuda_launch {
    uint32_t grid[3], block, cluster, smem_bytes;
    int overlap_previous; /* programmatic stream serialisation asked for */
    void *stream;
    unsigned char args[512]; /* the first parameter's bytes: begins with the fwd_args */
    uint64_t map_bases[4];   /* of the tensor maps in the second parameter: q, k, v, o; noise where a kernel has none */
    uint64_t map_rows[4];    /* their extents in rows */
} fake_cuda_launch;
fake_cuda_launch fake_cuda_last_launch(void);

/* For those who write these structs down again in another language. */
extern const size_t fake_cuda_counters_bytes, fake_cuda_launch_bytes;

#endif
