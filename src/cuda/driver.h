/* The CUDA driver, loaded with dlopen: nothing is linked against it, so the library loads on machines without one. */
#ifndef ACR_CUDA_DRIVER_H
#define ACR_CUDA_DRIVER_H

#include <cuda.h>
#include <cudaTypedefs.h>

#include "error.h"

/* Every driver entry that is used, with the CUDA version whose signature is meant. cuda.h renames many functions by
 * macros (cuMemAlloc is cuMemAlloc_v2), so a plain dlsym of the name would fetch an older signature: each entry is
 * asked for through cuGetProcAddress_v2 with its version. X(name without cu, version). */
#define ACR__CUDA_ENTRIES(X)                                                                                           \
    X(Init, 2000)                                                                                                      \
    X(GetErrorName, 6000)                                                                                              \
    X(GetErrorString, 6000)                                                                                            \
    X(DeviceGetCount, 2000)                                                                                            \
    X(DeviceGet, 2000)                                                                                                 \
    X(DeviceGetName, 2000)                                                                                             \
    X(DeviceGetAttribute, 2000)                                                                                        \
    X(DeviceTotalMem, 3020)                                                                                            \
    X(DevicePrimaryCtxRetain, 7000)                                                                                    \
    X(DevicePrimaryCtxRelease, 11000)                                                                                  \
    X(CtxPushCurrent, 4000)                                                                                            \
    X(CtxPopCurrent, 4000)                                                                                             \
    X(CtxSynchronize, 2000)                                                                                            \
    X(CtxResetPersistingL2Cache, 11000)                                                                                \
    X(ThreadExchangeStreamCaptureMode, 10010)                                                                          \
    X(LibraryLoadData, 12000)                                                                                          \
    X(LibraryUnload, 12000)                                                                                            \
    X(LibraryGetKernel, 12000)                                                                                         \
    X(KernelGetAttribute, 12000)                                                                                       \
    X(KernelSetAttribute, 12000)                                                                                       \
    X(KernelGetFunction, 12000)                                                                                        \
    X(LaunchKernelEx, 11060)                                                                                           \
    X(TensorMapEncodeTiled, 12000)                                                                                     \
    X(TensorMapReplaceAddress, 12000)                                                                                  \
    X(MemAlloc, 3020)                                                                                                  \
    X(MemFree, 3020)                                                                                                   \
    X(MemHostAlloc, 2020)                                                                                              \
    X(MemFreeHost, 2000)                                                                                               \
    X(PointerGetAttribute, 4000)                                                                                       \
    X(MemcpyHtoDAsync, 3020)                                                                                           \
    X(MemcpyDtoHAsync, 3020)                                                                                           \
    X(MemcpyDtoDAsync, 3020)                                                                                           \
    X(MemsetD8Async, 3020)                                                                                             \
    X(StreamCreate, 2000)                                                                                              \
    X(StreamDestroy, 4000)                                                                                             \
    X(StreamSynchronize, 2000)                                                                                         \
    X(StreamWaitValue32, 11070)                                                                                        \
    X(StreamIsCapturing, 10000)                                                                                        \
    X(StreamBeginCapture, 10010)                                                                                       \
    X(StreamEndCapture, 10000)                                                                                         \
    X(GraphInstantiateWithFlags, 11040)                                                                                \
    X(GraphUpload, 11010)                                                                                              \
    X(GraphLaunch, 10000)                                                                                              \
    X(GraphExecDestroy, 10000)                                                                                         \
    X(GraphDestroy, 10000)                                                                                             \
    X(EventCreate, 2000)                                                                                               \
    X(EventRecord, 2000)                                                                                               \
    X(EventElapsedTime, 12080)                                                                                         \
    X(EventDestroy, 4000)

typedef struct acr__cuda_driver {
    void *handle; /* of dlopen */
    int version;  /* the CUDA version that the driver supports: 13000 = 13.0 */
#define ACR__CUDA_FIELD(name, version) PFN_cu##name##_v##version name;
    ACR__CUDA_ENTRIES(ACR__CUDA_FIELD)
#undef ACR__CUDA_FIELD
} acr__cuda_driver;

/* The oldest driver served: R580. */
#define ACR__CUDA_VERSION_MIN 13000

/* Loads libcuda.so.1, checks its version, finds every entry and initialises it. The code stays in the process for ever
 * (unloading a driver that has run is not safe); close only drops the handle. Errors: ACR_NO_DEVICE with the loader's
 * text, both versions, or the entry that is missing. */
acr_status acr__cuda_driver_open(acr__cuda_driver *driver);
void acr__cuda_driver_close(acr__cuda_driver *driver);

/* True when the environment asks (ACR_FORCE_PTX=1) that kernels be compiled from PTX by the driver although machine
 * code for the GPU is there: how the way to unknown GPUs is tested. acr__cuda_driver_open passes it to the driver. */
int acr__cuda_ptx_forced(void);

/* Stores "<what>: <error's name>: <error's text>" as the last error. Returns ACR_NO_MEMORY when the driver ran out of
 * memory, else `status`. `result` is a failure. */
acr_status acr__cuda_fail(const acr__cuda_driver *driver, CUresult result, acr_status status, const char *what);

#endif
