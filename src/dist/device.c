#include "device.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "error.h"

typedef int cu_result; /* CUresult: 0 = success */
typedef unsigned long long cu_pointer;

/* CUipcMemHandle, which is passed by value */
typedef struct cu_handle {
    unsigned char bytes[64];
} cu_handle;

enum {
    CU_NOT_READY = 600,
    CU_PEER_ACCESS_ALREADY_ENABLED = 704,
    CU_64_BIT_STREAM_MEM_OPS = 122, /* CUdevice_attribute */
    CU_IPC_LAZY_PEER_ACCESS = 1,
    CU_WAIT_FOR_BITS = 2, /* CU_STREAM_WAIT_VALUE_AND */
    CU_OUT_OF_MEMORY = 2,
    CU_MEMORY_DEVICE = 2,
    CU_EVENT_NO_TIMING = 2,
    CU_STREAM_NON_BLOCKING = 1
};

/* CUDA_MEMCPY2D */
typedef struct cu_copy {
    size_t from_x, from_y;
    int from_type;
    const void *from_host;
    cu_pointer from;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void *to_host;
    cu_pointer to;
    void *to_array;
    size_t to_pitch, width, height;
} cu_copy;

/* X(name without cu, the CUDA version whose signature is meant, arguments) */
#define CU_ENTRIES(X)                                                                                                  \
    X(Init, 2000, (unsigned flags))                                                                                    \
    X(GetErrorString, 6000, (cu_result result, const char **text))                                                     \
    X(DeviceGet, 2000, (int *device, int ordinal))                                                                     \
    X(DevicePrimaryCtxRetain, 7000, (void **context, int device))                                                      \
    X(DevicePrimaryCtxRelease, 11000, (int device))                                                                    \
    X(CtxPushCurrent, 4000, (void *context))                                                                           \
    X(CtxPopCurrent, 4000, (void **context))                                                                           \
    X(CtxGetStreamPriorityRange, 5050, (int *least, int *greatest))                                                    \
    X(MemAlloc, 3020, (cu_pointer * memory, size_t bytes))                                                             \
    X(MemFree, 3020, (cu_pointer memory))                                                                              \
    X(MemcpyHtoDAsync, 3020, (cu_pointer to, const void *from, size_t bytes, void *stream))                            \
    X(MemcpyDtoHAsync, 3020, (void *to, cu_pointer from, size_t bytes, void *stream))                                  \
    X(Memcpy2DAsync, 3020, (const cu_copy *copy, void *stream))                                                        \
    X(StreamCreateWithPriority, 5050, (void **stream, unsigned flags, int priority))                                   \
    X(StreamDestroy, 4000, (void *stream))                                                                             \
    X(StreamQuery, 2000, (void *stream))                                                                               \
    X(StreamWaitEvent, 3020, (void *stream, void *event, unsigned flags))                                              \
    X(EventCreate, 2000, (void **event, unsigned flags))                                                               \
    X(EventElapsedTime, 12080, (float *milliseconds, void *begin, void *end))                                          \
    X(EventRecord, 2000, (void *event, void *stream))                                                                  \
    X(EventDestroy, 4000, (void *event))

/* Those that only copy engines need: a driver that lacks one has NCCL. */
#define CU_SHARING_ENTRIES(X)                                                                                          \
    X(CtxEnablePeerAccess, 4000, (void *context, unsigned flags))                                                      \
    X(DeviceGetAttribute, 2000, (int *value, int attribute, int device))                                               \
    X(IpcCloseMemHandle, 4010, (cu_pointer memory))                                                                    \
    X(IpcGetMemHandle, 4010, (cu_handle * handle, cu_pointer memory))                                                  \
    X(IpcOpenMemHandle, 11000, (cu_pointer * memory, cu_handle handle, unsigned flags))                                \
    X(MemcpyDtoDAsync, 3020, (cu_pointer to, cu_pointer from, size_t bytes, void *stream))                             \
    X(StreamWaitValue64, 11070, (void *stream, cu_pointer word, uint64_t value, unsigned flags))                       \
    X(StreamWriteValue32, 11070, (void *stream, cu_pointer word, uint32_t value, unsigned flags))

struct dist_driver {
#define CU_FIELD(name, version, arguments) cu_result(*name) arguments;
    CU_ENTRIES(CU_FIELD)
    CU_SHARING_ENTRIES(CU_FIELD)
#undef CU_FIELD
    const char *lacks; /* the first of CU_SHARING_ENTRIES that was not found; NULL = none */
};

typedef cu_result get_address(const char *name, void **address, int version, uint64_t flags, int *found);

static const struct {
    const char *name;
    int version, is_needed;
    size_t offset;
} entries[] = {
#define ENTRY(name, version, arguments) {"cu" #name, version, 1, offsetof(dist_driver, name)},
    CU_ENTRIES(ENTRY)
#undef ENTRY
#define ENTRY(name, version, arguments) {"cu" #name, version, 0, offsetof(dist_driver, name)},
        CU_SHARING_ENTRIES(ENTRY)
#undef ENTRY
};

static acr_status driver_open(dist_driver *driver)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    void *address = handle ? dlsym(handle, "cuGetProcAddress_v2") : NULL;
    get_address *get;
    acr_status status = ACR_OK;
    if (!address)
        status = dist_fail(ACR_NO_DEVICE, "no CUDA driver of CUDA 12 or newer: libcuda.so.1 %s",
                           handle ? "lacks cuGetProcAddress_v2" : "does not load");
    memcpy(&get, &address, sizeof get);
    for (size_t i = 0; i < sizeof entries / sizeof entries[0] && status == ACR_OK; i++) {
        int found = 1;
        address = NULL;
        const int is_missing =
            get(entries[i].name, &address, entries[i].version, 1 /* legacy default stream */, &found) != 0 ||
            found != 0 || !address;
        if (is_missing && !entries[i].is_needed && !driver->lacks)
            driver->lacks = entries[i].name;
        if (is_missing && entries[i].is_needed)
            status = dist_fail(ACR_NO_DEVICE, "libcuda.so.1 lacks %s of CUDA %d.%d", entries[i].name,
                               entries[i].version / 1000, entries[i].version % 1000 / 10);
        memcpy((char *)driver + entries[i].offset, &address, sizeof address);
    }
    if (handle)
        dlclose(handle);
    return status;
}

/* A driver's answer as a status. */
static acr_status check(const dist_driver *driver, cu_result result, const char *what)
{
    const char *text = NULL;
    if (result == 0)
        return ACR_OK;
    if (driver->GetErrorString(result, &text) != 0 || !text)
        text = "no description";
    return dist_fail(result == CU_OUT_OF_MEMORY ? ACR_NO_MEMORY : ACR_DEVICE_FAULT, "%s: error %d: %s", what, result,
                     text);
}

/* The stream of transfers has the highest priority: a step's transfer finds its multiprocessors before attention takes
 * them all. */
static acr_status make_stream(dist_device *device)
{
    const dist_driver *driver = device->driver;
    int least = 0, greatest = 0;
    acr_status status =
        check(driver, driver->CtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
    if (status == ACR_OK)
        status = check(driver, driver->StreamCreateWithPriority(&device->transfers, CU_STREAM_NON_BLOCKING, greatest),
                       "cuStreamCreateWithPriority");
    if (status == ACR_OK)
        status = check(driver, driver->StreamCreateWithPriority(&device->rescue, CU_STREAM_NON_BLOCKING, greatest),
                       "cuStreamCreateWithPriority");
    if (status == ACR_OK)
        status = check(driver, driver->EventCreate(&device->event, CU_EVENT_NO_TIMING), "cuEventCreate");
    return status;
}

acr_status dist_device_open(dist_device *device, const acr_ctx *ctx, int ordinal)
{
    *device = (dist_device){.ordinal = ordinal};
    if (strcmp(acr_ctx_backend(ctx), "cuda") != 0)
        return ordinal == 0 ? ACR_OK : dist_fail(ACR_INVALID, "options.device is %d, on \"cpu\" it is 0", ordinal);
    dist_driver *driver = calloc(1, sizeof *driver);
    if (!driver)
        return dist_fail(ACR_NO_MEMORY, "out of memory");
    acr_status status = driver_open(driver);
    if (status != ACR_OK) {
        free(driver);
        return status;
    }
    device->driver = driver;
    int handle = 0;
    if ((status = check(driver, driver->Init(0), "cuInit")) == ACR_OK &&
        (status = check(driver, driver->DeviceGet(&handle, ordinal), "cuDeviceGet")) == ACR_OK &&
        (status = check(driver, driver->DevicePrimaryCtxRetain(&device->context, handle),
                        "cuDevicePrimaryCtxRetain")) == ACR_OK &&
        (status = dist_enter(device)) == ACR_OK) {
        status = make_stream(device);
        dist_leave(device);
    }
    if (status != ACR_OK)
        dist_device_close(device);
    return status;
}

void dist_device_close(dist_device *device)
{
    dist_driver *driver = device->driver;
    if (!driver)
        return;
    if (device->context && driver->CtxPushCurrent(device->context) == 0) {
        if (device->event)
            driver->EventDestroy(device->event);
        if (device->transfers)
            driver->StreamDestroy(device->transfers);
        if (device->rescue)
            driver->StreamDestroy(device->rescue);
        dist_leave(device);
        driver->DevicePrimaryCtxRelease(device->ordinal);
    }
    free(driver);
    *device = (dist_device){0};
}

acr_status dist_enter(const dist_device *device)
{
    return device->driver ? check(device->driver, device->driver->CtxPushCurrent(device->context), "cuCtxPushCurrent")
                          : ACR_OK;
}

void dist_leave(const dist_device *device)
{
    void *context;
    if (device->driver)
        device->driver->CtxPopCurrent(&context);
}

acr_status dist_alloc(const dist_device *device, size_t bytes, void **out)
{
    cu_pointer memory = 0;
    if (!device->driver) {
        void *host = aligned_alloc(256, (bytes + 255) / 256 * 256);
        if (!host)
            return dist_fail(ACR_NO_MEMORY, "out of memory: %zu bytes", bytes);
        *out = host;
        return ACR_OK;
    }
    const acr_status status = check(device->driver, device->driver->MemAlloc(&memory, bytes), "cuMemAlloc");
    if (status == ACR_OK)
        *out = (void *)(uintptr_t)memory;
    return status;
}

void dist_free(const dist_device *device, void *memory)
{
    if (!device->driver)
        free(memory);
    else if (memory)
        device->driver->MemFree((cu_pointer)(uintptr_t)memory);
}

acr_status dist_upload(const dist_device *device, void *to, const void *from_host, size_t bytes, void *stream)
{
    if (!device->driver) {
        memcpy(to, from_host, bytes);
        return ACR_OK;
    }
    return check(device->driver, device->driver->MemcpyHtoDAsync((cu_pointer)(uintptr_t)to, from_host, bytes, stream),
                 "cuMemcpyHtoDAsync");
}

acr_status dist_download(const dist_device *device, void *to_host, const void *from, size_t bytes, void *stream)
{
    if (!device->driver) {
        memcpy(to_host, from, bytes);
        return ACR_OK;
    }
    return check(device->driver, device->driver->MemcpyDtoHAsync(to_host, (cu_pointer)(uintptr_t)from, bytes, stream),
                 "cuMemcpyDtoHAsync");
}

acr_status dist_copy_lines(const dist_device *device, const dist_copy *copy, void *stream)
{
    if (!device->driver) {
        for (size_t i = 0; i < copy->height; i++)
            memcpy((char *)copy->to + i * copy->to_pitch, (const char *)copy->from + i * copy->from_pitch, copy->width);
        return ACR_OK;
    }
    const cu_copy c = {.from_type = CU_MEMORY_DEVICE,
                       .from = (cu_pointer)(uintptr_t)copy->from,
                       .from_pitch = copy->from_pitch,
                       .to_type = CU_MEMORY_DEVICE,
                       .to = (cu_pointer)(uintptr_t)copy->to,
                       .to_pitch = copy->to_pitch,
                       .width = copy->width,
                       .height = copy->height};
    return check(device->driver, device->driver->Memcpy2DAsync(&c, stream), "cuMemcpy2DAsync");
}

acr_status dist_copy_bytes(const dist_device *device, void *to, const void *from, size_t bytes, void *stream)
{
    return check(device->driver,
                 device->driver->MemcpyDtoDAsync((cu_pointer)(uintptr_t)to, (cu_pointer)(uintptr_t)from, bytes, stream),
                 "cuMemcpyDtoDAsync");
}

acr_status dist_follow(const dist_device *device, void *later, void *earlier)
{
    const dist_driver *driver = device->driver;
    if (!driver)
        return ACR_OK;
    const acr_status status = check(driver, driver->EventRecord(device->event, earlier), "cuEventRecord");
    return status == ACR_OK ? check(driver, driver->StreamWaitEvent(later, device->event, 0), "cuStreamWaitEvent")
                            : status;
}

void dist_pause(int looks)
{
    if (looks < 100)
        sched_yield();
    else
        nanosleep(&(struct timespec){0, looks < 1000 ? 50000 : 1000000}, NULL);
}

acr_status dist_is_idle(const dist_device *device, void *stream, int *out)
{
    const cu_result result = device->driver ? device->driver->StreamQuery(stream) : 0;
    *out = result == 0;
    return result == CU_NOT_READY ? ACR_OK : check(device->driver, result, "the stream");
}

acr_status dist_wait_idle(const dist_device *device, void *stream, double seconds)
{
    const double end_s = dist_now_s() + seconds;
    for (int looks = 0;; looks++) {
        int idle = 0;
        const acr_status status = dist_is_idle(device, stream, &idle);
        if (status != ACR_OK || idle)
            return status;
        if (dist_now_s() >= end_s)
            return dist_fail(ACR_TIMEOUT, "a stream's work did not end within %g s", seconds);
        dist_pause(looks);
    }
}

/* ---- Memory that other ranks write ------------------------------------------------------------------------------- */

acr_status dist_can_share(const dist_device *device)
{
    const dist_driver *driver = device->driver;
    int value = 0;
    if (!driver)
        return dist_fail(ACR_UNSUPPORTED, "the device is the CPU");
    if (driver->lacks)
        return dist_fail(ACR_UNSUPPORTED, "libcuda.so.1 lacks %s", driver->lacks);
    const acr_status status = check(
        driver, driver->DeviceGetAttribute(&value, CU_64_BIT_STREAM_MEM_OPS, device->ordinal), "cuDeviceGetAttribute");
    return status != ACR_OK || value
               ? status
               : dist_fail(ACR_UNSUPPORTED, "the device's streams cannot wait for words of 64 bits");
}

acr_status dist_export(const dist_device *device, void *memory, dist_address *out)
{
    const dist_driver *driver = device->driver;
    cu_handle handle;
    out->pointer = (uint64_t)(uintptr_t)memory;
    out->context = (uint64_t)(uintptr_t)device->context;
    const acr_status status =
        check(driver, driver->IpcGetMemHandle(&handle, (cu_pointer)(uintptr_t)memory), "cuIpcGetMemHandle");
    if (status == ACR_OK)
        memcpy(out->handle, handle.bytes, sizeof out->handle);
    return status;
}

/* A process does not open its own handles: there memory has the same address for all contexts. */
static acr_status reach(const dist_device *device, const dist_address *address)
{
    void *context = (void *)(uintptr_t)address->context;
    if (context == device->context)
        return ACR_OK;
    const cu_result result = device->driver->CtxEnablePeerAccess(context, 0);
    return result == CU_PEER_ACCESS_ALREADY_ENABLED ? ACR_OK : check(device->driver, result, "cuCtxEnablePeerAccess");
}

acr_status dist_map(const dist_device *device, const dist_address *address, int is_here, void **out)
{
    cu_pointer mapped = (cu_pointer)address->pointer;
    cu_handle handle;
    memcpy(handle.bytes, address->handle, sizeof handle.bytes);
    const acr_status status =
        is_here ? reach(device, address)
                : check(device->driver, device->driver->IpcOpenMemHandle(&mapped, handle, CU_IPC_LAZY_PEER_ACCESS),
                        "cuIpcOpenMemHandle");
    if (status == ACR_OK)
        *out = (void *)(uintptr_t)mapped;
    return status;
}

void dist_unmap(const dist_device *device, void *mapped)
{
    device->driver->IpcCloseMemHandle((cu_pointer)(uintptr_t)mapped);
}

acr_status dist_write_word(const dist_device *device, void *word, uint32_t value, void *stream)
{
    return check(device->driver,
                 device->driver->StreamWriteValue32(stream, (cu_pointer)(uintptr_t)word, value, 0 /* with a barrier */),
                 "cuStreamWriteValue32");
}

acr_status dist_wait_word(const dist_device *device, const void *word, uint64_t bits, void *stream)
{
    return check(device->driver,
                 device->driver->StreamWaitValue64(stream, (cu_pointer)(uintptr_t)word, bits, CU_WAIT_FOR_BITS),
                 "cuStreamWaitValue64");
}

/* ---- Timing ------------------------------------------------------------------------------------------------------ */

double dist_now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

acr_status dist_timer_open(const dist_device *device, dist_timer *timer)
{
    const dist_driver *driver = device->driver;
    *timer = (dist_timer){NULL, NULL, 0.0, 0.0};
    if (!driver)
        return ACR_OK;
    acr_status status = check(driver, driver->EventCreate(&timer->begin, 0), "cuEventCreate");
    if (status == ACR_OK)
        status = check(driver, driver->EventCreate(&timer->end, 0), "cuEventCreate");
    return status;
}

void dist_timer_close(const dist_device *device, dist_timer *timer)
{
    if (timer->begin)
        device->driver->EventDestroy(timer->begin);
    if (timer->end)
        device->driver->EventDestroy(timer->end);
}

acr_status dist_timer_start(const dist_device *device, dist_timer *timer, void *stream)
{
    timer->begin_s = dist_now_s();
    return device->driver ? check(device->driver, device->driver->EventRecord(timer->begin, stream), "cuEventRecord")
                          : ACR_OK;
}

acr_status dist_timer_stop(const dist_device *device, dist_timer *timer, void *stream)
{
    timer->end_s = dist_now_s();
    return device->driver ? check(device->driver, device->driver->EventRecord(timer->end, stream), "cuEventRecord")
                          : ACR_OK;
}

acr_status dist_timer_read(const dist_device *device, const dist_timer *timer, double *seconds)
{
    float milliseconds = 0.0F;
    if (!device->driver) {
        *seconds = timer->end_s - timer->begin_s;
        return ACR_OK;
    }
    const acr_status status =
        check(device->driver, device->driver->EventElapsedTime(&milliseconds, timer->begin, timer->end),
              "cuEventElapsedTime");
    *seconds = (double)milliseconds * 1e-3;
    return status;
}
