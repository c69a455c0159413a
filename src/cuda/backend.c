/* The CUDA backend: the device's primary context, its memory, kernels loaded from embedded images, launches, and timing
 * by graphs. */
#include "backend.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda/driver.h"
#include "cuda/image.h"
#include "cuda/ops/ops.h"
#include "cuda/tensormap.h"
#include "error.h"
#include "internal.h"

/* Machine code in the driver's hands. Images of listed kernels stay loaded until the device is closed, because graphs
 * that a caller has captured refer to them even after the plan is gone; a candidate's image lives as long as its one
 * acr__prepared. */
enum {
    BEFORE, /* what one execution launches, in this order */
    ITSELF,
    AFTER,
    LAUNCHES_MOST
};

typedef struct loaded_image {
    struct loaded_image *next; /* among those of the device; unused for a candidate */
    const acr__kernel *kernel;
    CUlibrary library;
    CUfunction functions[LAUNCHES_MOST]; /* in the primary context; NULL: nothing is launched there */
} loaded_image;

typedef struct cuda_device {
    acr__backend_device base;
    acr__cuda_driver driver;
    CUdevice handle;
    CUcontext context;                /* primary, retained */
    CUstream copy_stream;             /* non-blocking: copies on it cannot disturb a capture on the legacy stream */
    pthread_mutex_t lock;             /* guards images and ops */
    loaded_image *images;             /* of listed kernels and of operations */
    loaded_image *ops[ACR__CUDA_OPS]; /* those of operations, once they are asked for */
    int reads_host_memory;            /* any of the host's, as with HMM or on Grace: an address says nothing */
} cuda_device;

typedef struct cuda_prepared {
    acr__prepared base;
    acr__launch launches[LAUNCHES_MOST];
    loaded_image *image;
    int owns_image; /* a candidate's */
    bwd_maps maps;  /* of a kernel with fixed maps: as for an execution whose tensors all begin at MAP_BASE */
} cuda_prepared;

/* ---- Entering and leaving the device ---- */

/* What `leave` restores. */
typedef struct entered {
    CUstreamCaptureMode capture_mode;
} entered;

static acr_status check(const cuda_device *d, CUresult result, const char *what)
{
    return result == CUDA_SUCCESS ? ACR_OK : acr__cuda_fail(&d->driver, result, ACR_DEVICE_FAULT, what);
}

/* Makes the primary context current, and lets calls pass that a capture on this thread would otherwise forbid. */
static acr_status enter(const cuda_device *d, entered *scope)
{
    acr_status status = check(d, d->driver.CtxPushCurrent(d->context), "cuCtxPushCurrent");
    if (status != ACR_OK)
        return status;
    scope->capture_mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUresult result = d->driver.ThreadExchangeStreamCaptureMode(&scope->capture_mode);
    if (result != CUDA_SUCCESS) {
        CUcontext popped;
        d->driver.CtxPopCurrent(&popped);
    }
    return check(d, result, "cuThreadExchangeStreamCaptureMode");
}

static void leave(const cuda_device *d, const entered *scope)
{
    CUcontext popped;
    CUstreamCaptureMode mode = scope->capture_mode;
    d->driver.ThreadExchangeStreamCaptureMode(&mode);
    d->driver.CtxPopCurrent(&popped);
}

/* ---- Opening ---- */

static acr_status attribute(const cuda_device *d, CUdevice_attribute which, int *out)
{
    CUresult result = d->driver.DeviceGetAttribute(out, which, d->handle);
    return result == CUDA_SUCCESS ? ACR_OK : acr__cuda_fail(&d->driver, result, ACR_NO_DEVICE, "cuDeviceGetAttribute");
}

/* Device attributes as the driver gives them. */
typedef struct device_attributes {
    int major, minor, sm_count, smem_per_cta, smem_per_sm, regs_per_sm, l2_bytes, clock_khz, memory_clock_khz,
        memory_bus_bits, pageable_access;
} device_attributes;

static acr_status read_attributes(const cuda_device *d, device_attributes *a)
{
    const struct {
        CUdevice_attribute which;
        int *out;
    } wanted[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &a->major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &a->minor},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &a->sm_count},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &a->smem_per_cta},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, &a->smem_per_sm},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, &a->regs_per_sm},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &a->l2_bytes},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, &a->clock_khz},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, &a->memory_clock_khz},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, &a->memory_bus_bits},
        {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, &a->pageable_access},
    };
    acr_status status = ACR_OK;
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0] && status == ACR_OK; i++)
        status = attribute(d, wanted[i].which, wanted[i].out);
    return status;
}

/* Fills the description that kernels see. */
static acr_status describe(cuda_device *d)
{
    acr__device *device = &d->base.device;
    device_attributes a;
    size_t mem_bytes;
    acr_status status = read_attributes(d, &a);
    if (status != ACR_OK)
        return status;
    CUresult result = d->driver.DeviceGetName(device->name, (int)sizeof device->name, d->handle);
    if (result != CUDA_SUCCESS)
        return acr__cuda_fail(&d->driver, result, ACR_NO_DEVICE, "cuDeviceGetName");
    result = d->driver.DeviceTotalMem(&mem_bytes, d->handle);
    if (result != CUDA_SUCCESS)
        return acr__cuda_fail(&d->driver, result, ACR_NO_DEVICE, "cuDeviceTotalMem");
    d->reads_host_memory = a.pageable_access;
    device->backend = ACR__CUDA;
    device->threads = 1;
    device->arch = a.major * 10 + a.minor;
    device->sm_count = a.sm_count;
    device->smem_per_cta_bytes = a.smem_per_cta;
    device->smem_per_sm_bytes = a.smem_per_sm;
    device->regs_per_sm = a.regs_per_sm;
    device->l2_bytes = a.l2_bytes;
    device->mem_bytes = (int64_t)mem_bytes;
    device->driver = d->driver.version;
    device->ptx_only = acr__cuda_ptx_forced();
    device->clock_hz = 1e3 * a.clock_khz;
    device->dram_bytes_per_s = 2.0 * 1e3 * a.memory_clock_khz * (a.memory_bus_bits / 8.0); /* two transfers a clock */
    snprintf(d->base.text, sizeof d->base.text,
             "%s, sm_%d, %d SMs at %.2f GHz, %.0f GiB at %.1f TB/s, CUDA %d.%d driver", device->name, device->arch,
             device->sm_count, device->clock_hz * 1e-9, (double)device->mem_bytes / (1024.0 * 1024.0 * 1024.0),
             device->dram_bytes_per_s * 1e-12, device->driver / 1000, device->driver % 1000 / 10);
    return ACR_OK;
}

static acr_status find_device(cuda_device *d, int32_t ordinal)
{
    int count;
    CUresult result = d->driver.DeviceGetCount(&count);
    if (result != CUDA_SUCCESS)
        return acr__cuda_fail(&d->driver, result, ACR_NO_DEVICE, "cuDeviceGetCount");
    if (ordinal < 0 || ordinal >= count)
        return acr__fail(ACR_NO_DEVICE, "device %d: the driver has %d device%s", (int)ordinal, count,
                         count == 1 ? "" : "s");
    result = d->driver.DeviceGet(&d->handle, ordinal);
    if (result != CUDA_SUCCESS)
        return acr__cuda_fail(&d->driver, result, ACR_NO_DEVICE, "cuDeviceGet");
    return describe(d);
}

static acr_status make_copy_stream(cuda_device *d)
{
    entered scope;
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    status = check(d, d->driver.StreamCreate(&d->copy_stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    leave(d, &scope);
    return status;
}

static acr_status open_context(cuda_device *d)
{
    CUresult result = d->driver.DevicePrimaryCtxRetain(&d->context, d->handle);
    if (result != CUDA_SUCCESS)
        return acr__cuda_fail(&d->driver, result, ACR_NO_DEVICE, "cuDevicePrimaryCtxRetain");
    acr_status status = make_copy_stream(d);
    if (status != ACR_OK)
        d->driver.DevicePrimaryCtxRelease(d->handle);
    return status == ACR_DEVICE_FAULT ? ACR_NO_DEVICE : status; /* a device that cannot be set up is not usable */
}

static acr_status open_device(cuda_device *d, const acr_ctx_options *options)
{
    acr_status status = acr__cuda_driver_open(&d->driver);
    if (status != ACR_OK)
        return status;
    status = find_device(d, options->device);
    if (status == ACR_OK)
        status = open_context(d);
    if (status != ACR_OK)
        acr__cuda_driver_close(&d->driver);
    return status;
}

static acr_status cuda_open(acr__backend_device **out, const acr_ctx_options *options)
{
    cuda_device *d = calloc(1, sizeof *d);
    if (d == NULL)
        return acr__fail(ACR_NO_MEMORY, "a device handle: no host memory");
    d->base.backend = &acr__backend_cuda;
    if (pthread_mutex_init(&d->lock, NULL) != 0) {
        free(d);
        return acr__fail(ACR_NO_MEMORY, "a device handle: no mutex");
    }
    acr_status status = open_device(d, options);
    if (status != ACR_OK) {
        pthread_mutex_destroy(&d->lock);
        free(d);
        return status;
    }
    *out = &d->base;
    return ACR_OK;
}

static void cuda_close(acr__backend_device *device)
{
    cuda_device *d = (cuda_device *)device;
    entered scope;
    if (enter(d, &scope) == ACR_OK) {
        d->driver.CtxSynchronize(); /* launches of freed plans may still be running the code that goes now */
        while (d->images != NULL) {
            loaded_image *image = d->images;
            d->images = image->next;
            d->driver.LibraryUnload(image->library);
            free(image);
        }
        d->driver.StreamDestroy(d->copy_stream);
        leave(d, &scope);
    }
    d->driver.DevicePrimaryCtxRelease(d->handle);
    acr__cuda_driver_close(&d->driver);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

/* ---- Loading kernels ---- */

/* Allows all dynamic shared memory that the device can give beyond the kernel's static part. */
static acr_status allow_shared_memory(const cuda_device *d, CUkernel kernel)
{
    int static_bytes = 0;
    acr_status status =
        check(d, d->driver.KernelGetAttribute(&static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel, d->handle),
              "cuKernelGetAttribute");
    if (status != ACR_OK)
        return status;
    int dynamic_bytes = d->base.device.smem_per_cta_bytes - static_bytes;
    status = check(
        d,
        d->driver.KernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_bytes, kernel, d->handle),
        "cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)");
    if (status != ACR_OK)
        return status;
    return check(d,
                 d->driver.KernelSetAttribute(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                              CU_SHAREDMEM_CARVEOUT_MAX_SHARED, kernel, d->handle),
                 "cuKernelSetAttribute(PREFERRED_SHARED_MEMORY_CARVEOUT)");
}

/* ACR_FORCE_PTX must not be believed when the driver took machine code all the same, as it does when something else in
 * the process initialised it before: PTX is of the oldest architecture that a kernel serves (cmake/compile_image.sh),
 * machine code of the GPU's own. */
static acr_status check_origin(const cuda_device *d, CUkernel function, const acr__kernel *kernel)
{
    int ptx_version = 0;
    const acr_status status =
        check(d, d->driver.KernelGetAttribute(&ptx_version, CU_FUNC_ATTRIBUTE_PTX_VERSION, function, d->handle),
              "cuKernelGetAttribute(PTX_VERSION)");
    if (status != ACR_OK || ptx_version == kernel->arch_min)
        return status;
    return acr__fail(ACR_DEVICE_FAULT,
                     "%s: ACR_FORCE_PTX is set, but the driver took code of compute_%d: was it initialised before?",
                     kernel->name, ptx_version);
}

/* Finds an entry point in a loaded library and readies it. */
static acr_status find_function(const cuda_device *d, const loaded_image *image, const char *symbol, CUfunction *out)
{
    CUkernel kernel;
    acr_status status = check(d, d->driver.LibraryGetKernel(&kernel, image->library, symbol), "cuLibraryGetKernel");
    if (status == ACR_OK && d->base.device.ptx_only)
        status = check_origin(d, kernel, image->kernel);
    /* An operation beside attention asks for no dynamic shared memory, but for all that an SM can have on its way from
     * memory: this has its place in L1, of which shared memory would leave a tenth. */
    const int is_operation = image->kernel->shape == NULL;
    if (status == ACR_OK && !is_operation)
        status = allow_shared_memory(d, kernel);
    if (status == ACR_OK)
        status = check(d, d->driver.KernelGetFunction(out, kernel), "cuKernelGetFunction");
    return status;
}

static acr_status find_functions(const cuda_device *d, loaded_image *image)
{
    const acr__kernel *kernel = image->kernel;
    const char *const symbols[LAUNCHES_MOST] = {
        [BEFORE] = kernel->before.symbol, [ITSELF] = kernel->symbol, [AFTER] = kernel->after.symbol};
    acr_status status = ACR_OK;
    for (int i = 0; i < LAUNCHES_MOST && status == ACR_OK; i++)
        if (symbols[i] != NULL)
            status = find_function(d, image, symbols[i], &image->functions[i]);
    return status;
}

static acr_status load_library(const cuda_device *d, loaded_image *image)
{
    char log[256] = "";
    CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {log, (void *)(uintptr_t)sizeof log};
    acr__code code;
    const acr_status status = acr__code_find(&code, image->kernel);
    if (status != ACR_OK)
        return status;
    const CUresult result = d->driver.LibraryLoadData(&image->library, code.bytes, options, values, 2, NULL, NULL, 0);
    acr__code_free(&code);
    if (result == CUDA_SUCCESS)
        return ACR_OK;
    char what[400];
    snprintf(what, sizeof what, "loading %s on sm_%d%s%s", image->kernel->name, d->base.device.arch,
             log[0] != '\0' ? ": " : "", log);
    return acr__cuda_fail(&d->driver, result, ACR_DEVICE_FAULT, what);
}

static acr_status load_image(const cuda_device *d, const acr__kernel *kernel, loaded_image **out)
{
    loaded_image *image = calloc(1, sizeof *image);
    if (image == NULL)
        return acr__fail(ACR_NO_MEMORY, "loading %s: no host memory", kernel->name);
    image->kernel = kernel;
    acr_status status = load_library(d, image);
    if (status == ACR_OK) {
        status = find_functions(d, image);
        if (status != ACR_OK)
            d->driver.LibraryUnload(image->library);
    }
    if (status != ACR_OK) {
        free(image);
        return status;
    }
    *out = image;
    return ACR_OK;
}

static int is_listed(const acr__kernel *kernel)
{
    for (size_t i = 0; i < acr__kernel_count; i++)
        if (acr__kernels[i] == kernel)
            return 1;
    return 0;
}

/* The image of a listed kernel: loaded already, or now. The lock is held. */
static acr_status find_image(cuda_device *d, const acr__kernel *kernel, loaded_image **out)
{
    for (loaded_image *image = d->images; image != NULL; image = image->next)
        if (image->kernel == kernel) {
            *out = image;
            return ACR_OK;
        }
    acr_status status = load_image(d, kernel, out);
    if (status == ACR_OK) {
        (*out)->next = d->images;
        d->images = *out;
    }
    return status;
}

static acr_status obtain_image(cuda_device *d, cuda_prepared *prepared)
{
    entered scope;
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    prepared->owns_image = !is_listed(prepared->base.kernel);
    if (prepared->owns_image) {
        status = load_image(d, prepared->base.kernel, &prepared->image);
    } else {
        pthread_mutex_lock(&d->lock);
        status = find_image(d, prepared->base.kernel, &prepared->image);
        pthread_mutex_unlock(&d->lock);
    }
    leave(d, &scope);
    return status;
}

static void cuda_release(acr__prepared *base)
{
    cuda_prepared *prepared = (cuda_prepared *)base;
    cuda_device *d = (cuda_device *)base->device;
    entered scope;
    if (prepared->owns_image && enter(d, &scope) == ACR_OK) {
        d->driver.CtxSynchronize(); /* its last launch may still be running */
        d->driver.LibraryUnload(prepared->image->library);
        leave(d, &scope);
    }
    if (prepared->owns_image)
        free(prepared->image);
    free(prepared);
}

static int has_maps(const acr__boxes *boxes)
{
    return boxes->q_rows != 0 || boxes->k_rows != 0 || boxes->v_rows != 0 || boxes->o_rows != 0 || boxes->out_rows != 0;
}

/* Whether the executions of a plan differ in the bases of their maps alone. The rows of a packed batch's tensors, and
 * how many pages a cache has, are known with the buffers only. */
static int has_fixed_maps(const acr__kernel *kernel, const acr_problem *problem)
{
    return has_maps(&kernel->boxes) && !(problem->flags & (ACR_PACKED | ACR_PAGED));
}

/* Encodes the maps of a plan's executions, but for their bases. */
static acr_status encode_maps(const cuda_device *d, cuda_prepared *prepared)
{
    enum {
        MAP_BASE = 4096 /* any address that the driver accepts: nothing is read through these maps */
    };
    void *const base = (void *)(uintptr_t)MAP_BASE;
    const acr_buffers nowhere = {.q = base, .k = base, .v = base, .o = base, .d_o = base, .bias = base};
    acr__args args;
    entered scope;
    acr__fill_args(&args, &prepared->base.problem, &nowhere, NULL);
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    status = acr__maps_encode(&d->driver, &prepared->maps, &prepared->base.kernel->boxes, &prepared->base.problem,
                              &args.fwd);
    leave(d, &scope);
    return status;
}

static acr_status cuda_prepare(acr__prepared **out, acr__backend_device *device, const acr__kernel *kernel,
                               const acr_problem *problem)
{
    cuda_device *d = (cuda_device *)device;
    cuda_prepared *prepared = calloc(1, sizeof *prepared);
    if (prepared == NULL)
        return acr__fail(ACR_NO_MEMORY, "preparing %s: no host memory", kernel->name);
    acr__prepared *base = &prepared->base;
    base->device = device;
    base->kernel = kernel;
    base->problem = *problem;
    base->workspace_bytes = kernel->workspace != NULL ? kernel->workspace(problem, &device->device) : 0;
    kernel->shape(problem, &device->device, &base->launch);
    prepared->launches[ITSELF] = base->launch;
    if (kernel->before.symbol != NULL)
        kernel->before.shape(problem, &device->device, &prepared->launches[BEFORE]);
    if (kernel->after.symbol != NULL)
        kernel->after.shape(problem, &device->device, &prepared->launches[AFTER]);
    acr_status status = obtain_image(d, prepared);
    if (status != ACR_OK) {
        free(prepared);
        return status;
    }
    if (has_fixed_maps(kernel, problem))
        status = encode_maps(d, prepared);
    if (status != ACR_OK) {
        cuda_release(base);
        return status;
    }
    *out = base;
    return ACR_OK;
}

/* ---- Launching ---- */

enum {
    ATTRIBUTES_MAX = 2
};

/* Fills the launch attributes that apply and returns how many. */
static unsigned set_attributes(CUlaunchAttribute attributes[ATTRIBUTES_MAX], const acr__launch *launch,
                               int overlap_previous)
{
    unsigned count = 0;
    memset(attributes, 0, ATTRIBUTES_MAX * sizeof attributes[0]);
    if (launch->cluster > 1) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[count].value.clusterDim.x = launch->cluster;
        attributes[count].value.clusterDim.y = 1;
        attributes[count].value.clusterDim.z = 1;
        count++;
    }
    if (overlap_previous) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count].value.programmaticStreamSerializationAllowed = 1;
        count++;
    }
    return count;
}

/* What one execution hands to the driver. The configurations point to the attributes and the parameters to the rest: it
 * stays where it was filled. */
typedef struct kernel_call {
    bwd_args args; /* of a forward kernel `fwd` alone */
    bwd_maps maps;
    fwd_paging paging;
    CUlaunchAttribute attributes[LAUNCHES_MOST][ATTRIBUTES_MAX];
    CUlaunchConfig configs[LAUNCHES_MOST];
    void *parameters[3]; /* a kernel without maps has one parameter less, one without paging, too: the driver reads no
                            further */
} kernel_call;

/* Whether a kernel is told where a cache lies, behind its other parameters (fwd_paging.h). */
static int has_paging(const acr__kernel *kernel)
{
    return kernel->pages || kernel->v_in_k || kernel->kv_types != 0;
}

enum {
    OVERLAP_ARCH = 90 /* programmatic dependent launch begins here; before, every launch waits for the previous */
};

static void fill_configs(kernel_call *call, const cuda_prepared *prepared, int overlap_previous, CUstream stream)
{
    int overlaps = overlap_previous;
    memset(call->configs, 0, sizeof call->configs);
    for (int i = 0; i < LAUNCHES_MOST; i++) {
        const acr__launch *launch = &prepared->launches[i];
        CUlaunchConfig *config = &call->configs[i];
        if (prepared->image->functions[i] == NULL)
            continue;
        config->gridDimX = launch->grid[0];
        config->gridDimY = launch->grid[1];
        config->gridDimZ = launch->grid[2];
        config->blockDimX = launch->block;
        config->blockDimY = config->blockDimZ = 1;
        config->sharedMemBytes = launch->smem_bytes;
        config->hStream = stream;
        config->attrs = call->attributes[i];
        config->numAttrs = set_attributes(call->attributes[i], launch, overlaps);
        overlaps = prepared->base.device->device.arch >= OVERLAP_ARCH; /* those of one execution */
    }
}

static acr_status fill_call(kernel_call *call, const cuda_prepared *prepared, const fwd_args *args,
                            int overlap_previous, CUstream stream)
{
    const acr__prepared *base = &prepared->base;
    if (base->kernel->pass == ACR_BACKWARD)
        call->args = *bwd_args_of(args);
    else
        call->args.fwd = *args;
    const int maps = has_maps(&base->kernel->boxes);
    call->paging = fwd_paging_of(args);
    call->parameters[0] = &call->args;
    call->parameters[1] = !maps && has_paging(base->kernel) ? (void *)&call->paging : &call->maps;
    call->parameters[2] = &call->paging;
    fill_configs(call, prepared, overlap_previous, stream);
    const acr__boxes *boxes = &base->kernel->boxes;
    const acr__cuda_driver *driver = &((const cuda_device *)base->device)->driver;
    if (!maps)
        return ACR_OK;
    if (!has_fixed_maps(base->kernel, &base->problem))
        return acr__maps_encode(driver, &call->maps, boxes, &base->problem, args);
    call->maps = prepared->maps;
    return acr__maps_move(driver, &call->maps, boxes, &base->problem, args);
}

/* What one execution launches, one after another: not what has no CTAs. */
static acr_status launch_call(const cuda_device *d, kernel_call *call, const loaded_image *image)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < LAUNCHES_MOST && status == ACR_OK; i++)
        if (image->functions[i] != NULL && call->configs[i].gridDimX != 0)
            status = check(d, d->driver.LaunchKernelEx(&call->configs[i], image->functions[i], call->parameters, NULL),
                           "cuLaunchKernelEx");
    return status;
}

/* With the primary context current. */
static acr_status enqueue_kernel(const cuda_prepared *prepared, const fwd_args *args, int overlap_previous,
                                 CUstream stream)
{
    const cuda_device *d = (const cuda_device *)prepared->base.device;
    kernel_call call;
    acr_status status = fill_call(&call, prepared, args, overlap_previous, stream);
    return status == ACR_OK ? launch_call(d, &call, prepared->image) : status;
}

/* Scales are numbers of the host in the problem and device memory in an execution: the two are easily confused, and
 * what the kernel would make of it is a fault that names no cause. Memory unknown to the driver the device cannot
 * read. */
static acr_status check_scales(const cuda_device *d, const fwd_args *args)
{
    const struct {
        const char *name;
        const float *at;
    } scales[] = {{"q_scales", args->q_scales}, {"k_scales", args->k_scales}, {"v_scales", args->v_scales}};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        CUmemorytype type;
        if (scales[i].at == NULL || d->reads_host_memory)
            continue;
        const CUresult result = d->driver.PointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                              (CUdeviceptr)(uintptr_t)scales[i].at);
        if (result == CUDA_ERROR_INVALID_VALUE)
            return acr__fail(ACR_INVALID, "buffers.%s is %p, memory of the host that the device cannot read",
                             scales[i].name, (const void *)scales[i].at);
        if (result != CUDA_SUCCESS)
            return check(d, result, "cuPointerGetAttribute");
    }
    return ACR_OK;
}

static acr_status cuda_launch(const acr__prepared *base, const fwd_args *args, uint32_t flags, void *stream)
{
    const cuda_device *d = (const cuda_device *)base->device;
    acr_status status = check(d, d->driver.CtxPushCurrent(d->context), "cuCtxPushCurrent");
    if (status != ACR_OK)
        return status;
    const int overlap_previous = (flags & ACR_OVERLAP_PREVIOUS) != 0 && d->base.device.arch >= OVERLAP_ARCH;
    status = check_scales(d, args);
    if (status == ACR_OK)
        status = enqueue_kernel((const cuda_prepared *)base, args, overlap_previous, stream);
    CUcontext popped;
    d->driver.CtxPopCurrent(&popped);
    return status;
}

/* ---- Operations beside attention ---- */

/* The loaded image of a line of ops.def. */
static acr_status obtain_op(cuda_device *d, int line, loaded_image **out)
{
    acr_status status = ACR_OK;
    pthread_mutex_lock(&d->lock);
    if (d->ops[line] == NULL) {
        entered scope;
        status = enter(d, &scope);
        if (status == ACR_OK) {
            status = find_image(d, &acr__cuda_ops[line].code, &d->ops[line]);
            leave(d, &scope);
        }
    }
    *out = d->ops[line];
    pthread_mutex_unlock(&d->lock);
    return status;
}

/* What the longest list takes. A launch hands its whole list over, so that the caller's cannot serve. */
typedef struct op_list {
    merge_part parts[1900];
} op_list;

static acr_status launch_op(const cuda_device *d, const loaded_image *image, const acr__op_call *call, op_list *list,
                            CUstream stream)
{
    acr__launch launch;
    CUlaunchAttribute attributes[ATTRIBUTES_MAX];
    CUlaunchConfig config;
    acr__cuda_op_shape(&launch, call);
    memset(&config, 0, sizeof config);
    config.gridDimX = launch.grid[0];
    config.gridDimY = launch.grid[1];
    config.gridDimZ = launch.grid[2];
    config.blockDimX = launch.block;
    config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream;
    config.attrs = attributes;
    config.numAttrs = set_attributes(attributes, &launch,
                                     (call->flags & ACR_OVERLAP_PREVIOUS) != 0 && d->base.device.arch >= OVERLAP_ARCH);
    merge_args merge;
    append_args append;
    void *parameters[2] = {&append, list};
    if (call->op == ACR__OP_MERGE) {
        merge = *call->merge;
        parameters[0] = &merge;
        memcpy(list->parts, call->parts, (size_t)(merge.is_spaced ? 1 : merge.count) * sizeof list->parts[0]);
    } else
        append = *call->append;
    return check(d, d->driver.LaunchKernelEx(&config, image->functions[ITSELF], parameters, NULL), "cuLaunchKernelEx");
}

static acr_status cuda_run_op(acr__backend_device *device, const acr__op_call *call, void *stream)
{
    cuda_device *d = (cuda_device *)device;
    loaded_image *image;
    op_list list;
    int line;
    acr_status status = acr__cuda_op_choose(&line, call);
    if (status != ACR_OK || (status = obtain_op(d, line, &image)) != ACR_OK ||
        (status = check(d, d->driver.CtxPushCurrent(d->context), "cuCtxPushCurrent")) != ACR_OK)
        return status;
    status = launch_op(d, image, call, &list, stream);
    CUcontext popped;
    d->driver.CtxPopCurrent(&popped);
    return status;
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static acr_status cuda_launch_bare(const acr__prepared *base, const fwd_args *args, void *stream, int launches,
                                   double *seconds)
{
    const cuda_device *d = (const cuda_device *)base->device;
    kernel_call call;
    entered scope;
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    status = fill_call(&call, (const cuda_prepared *)base, args, 0, stream);
    double start = now_seconds();
    for (int i = 0; i < launches && status == ACR_OK; i++)
        status = launch_call(d, &call, ((const cuda_prepared *)base)->image);
    *seconds = (now_seconds() - start) / launches;
    leave(d, &scope);
    return status;
}

static acr_status cuda_within(acr__backend_device *device, acr__enqueue *work, void *arg)
{
    const cuda_device *d = (const cuda_device *)device;
    entered scope;
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    status = work(arg, NULL);
    leave(d, &scope);
    return status;
}

/* ---- Memory ---- */

/* Device addresses travel as pointers in the public interface and as integers in the driver's. */
static CUdeviceptr address_of(const void *memory)
{
    return (CUdeviceptr)(uintptr_t)memory;
}

static acr_status cuda_mem_alloc(acr__backend_device *device, size_t bytes, void **out)
{
    const cuda_device *d = (const cuda_device *)device;
    entered scope;
    CUdeviceptr address = 0;
    char what[64];
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    snprintf(what, sizeof what, "cuMemAlloc of %zu bytes", bytes);
    status = check(d, d->driver.MemAlloc(&address, bytes > 0 ? bytes : 1), what);
    leave(d, &scope);
    if (status == ACR_OK)
        *out = (void *)(uintptr_t)address;
    return status;
}

static void cuda_mem_free(acr__backend_device *device, void *memory)
{
    const cuda_device *d = (const cuda_device *)device;
    entered scope;
    if (memory == NULL || enter(d, &scope) != ACR_OK)
        return;
    d->driver.MemFree(address_of(memory));
    leave(d, &scope);
}

/* Enqueues a copy or fill on a stream. */
typedef CUresult transfer(const cuda_device *d, void *to, const void *from, unsigned char value, size_t bytes,
                          CUstream stream);

static CUresult upload(const cuda_device *d, void *to, const void *from, unsigned char value, size_t bytes,
                       CUstream stream)
{
    (void)value;
    return d->driver.MemcpyHtoDAsync(address_of(to), from, bytes, stream);
}

static CUresult download(const cuda_device *d, void *to, const void *from, unsigned char value, size_t bytes,
                         CUstream stream)
{
    (void)value;
    return d->driver.MemcpyDtoHAsync(to, address_of(from), bytes, stream);
}

static CUresult copy(const cuda_device *d, void *to, const void *from, unsigned char value, size_t bytes,
                     CUstream stream)
{
    (void)value;
    return d->driver.MemcpyDtoDAsync(address_of(to), address_of(from), bytes, stream);
}

static CUresult fill(const cuda_device *d, void *to, const void *from, unsigned char value, size_t bytes,
                     CUstream stream)
{
    (void)from;
    return d->driver.MemsetD8Async(address_of(to), value, bytes, stream);
}

/* Where a transfer goes: on the copy stream, with a wait for it, or on the caller's. */
typedef struct transfer_stream {
    int waits;
    CUstream stream;
} transfer_stream;

static const transfer_stream waited_for = {1, NULL};

static transfer_stream on_stream(void *stream)
{
    return (transfer_stream){0, stream};
}

/* Nothing here waits for the whole device: that would void a capture running on any stream. */
static acr_status run_transfer(acr__backend_device *device, transfer *run, const char *what, void *to, const void *from,
                               unsigned char value, size_t bytes, transfer_stream on)
{
    const cuda_device *d = (const cuda_device *)device;
    entered scope;
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    if (bytes > 0)
        status = check(d, run(d, to, from, value, bytes, on.waits ? d->copy_stream : on.stream), what);
    if (status == ACR_OK && on.waits)
        status = check(d, d->driver.StreamSynchronize(d->copy_stream), what);
    leave(d, &scope);
    return status;
}

static acr_status cuda_mem_upload(acr__backend_device *device, void *to, const void *from_host, size_t bytes)
{
    return run_transfer(device, upload, "cuMemcpyHtoDAsync", to, from_host, 0, bytes, waited_for);
}

static acr_status cuda_mem_download(acr__backend_device *device, void *to_host, const void *from, size_t bytes)
{
    return run_transfer(device, download, "cuMemcpyDtoHAsync", to_host, from, 0, bytes, waited_for);
}

static acr_status cuda_mem_fill(acr__backend_device *device, void *memory, unsigned char value, size_t bytes)
{
    return run_transfer(device, fill, "cuMemsetD8Async", memory, NULL, value, bytes, waited_for);
}

static acr_status cuda_mem_zero_async(acr__backend_device *device, void *memory, size_t bytes, void *stream)
{
    return run_transfer(device, fill, "cuMemsetD8Async", memory, NULL, 0, bytes, on_stream(stream));
}

static acr_status cuda_copy_on_device(acr__backend_device *device, void *to, const void *from, size_t bytes,
                                      void *stream)
{
    return run_transfer(device, copy, "cuMemcpyDtoDAsync", to, from, 0, bytes, on_stream(stream));
}

static acr_status cuda_fill_on_device(acr__backend_device *device, void *memory, unsigned char value, size_t bytes,
                                      void *stream)
{
    return run_transfer(device, fill, "cuMemsetD8Async", memory, NULL, value, bytes, on_stream(stream));
}

/* ---- Streams ---- */

static acr_status cuda_is_capturing(acr__backend_device *device, void *stream, int *out)
{
    const cuda_device *d = (const cuda_device *)device;
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    entered scope;
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    status = check(d, d->driver.StreamIsCapturing(stream, &capture), "cuStreamIsCapturing");
    leave(d, &scope);
    if (status == ACR_OK)
        *out = capture != CU_STREAM_CAPTURE_STATUS_NONE;
    return status;
}

static acr_status cuda_synchronize(acr__backend_device *device)
{
    const cuda_device *d = (const cuda_device *)device;
    entered scope;
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    status = check(d, d->driver.CtxSynchronize(), "cuCtxSynchronize");
    leave(d, &scope);
    return status;
}

/* ---- Timing ---- */

/* A graph ready to launch, on a stream of its own. */
typedef struct cuda_graph {
    acr__graph base;
    CUstream stream;
    CUgraphExec exec;
    CUdeviceptr flush; /* cold mode: memory to write, 0 = not needed yet */
    size_t flush_bytes;
    uint32_t *gate; /* prepared mode: host memory that the stream waits for, NULL = not needed yet */
} cuda_graph;

/* Captures `launches` units on the stream. */
static acr_status capture_units(const cuda_device *d, CUstream stream, acr__enqueue *enqueue, void *arg, int launches,
                                CUgraph *out)
{
    *out = NULL;
    acr_status status =
        check(d, d->driver.StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
    if (status != ACR_OK)
        return status;
    for (int i = 0; i < launches && status == ACR_OK; i++)
        status = enqueue(arg, stream);
    acr_status ended = check(d, d->driver.StreamEndCapture(stream, out), "cuStreamEndCapture");
    return status == ACR_OK ? ended : status;
}

static acr_status instantiate(const cuda_device *d, cuda_graph *g, CUgraph graph)
{
    acr_status status =
        check(d, d->driver.GraphInstantiateWithFlags(&g->exec, graph, 0), "cuGraphInstantiateWithFlags");
    if (status == ACR_OK)
        status = check(d, d->driver.GraphUpload(g->exec, g->stream), "cuGraphUpload");
    return status;
}

static acr_status record_units(const cuda_device *d, cuda_graph *g, acr__enqueue *enqueue, void *arg)
{
    CUgraph graph;
    acr_status status = capture_units(d, g->stream, enqueue, arg, g->base.launches, &graph);
    if (status == ACR_OK)
        status = instantiate(d, g, graph);
    if (graph != NULL)
        d->driver.GraphDestroy(graph);
    return status;
}

static void cuda_graph_free(acr__graph *graph)
{
    cuda_graph *g = (cuda_graph *)graph;
    entered scope;
    if (g == NULL)
        return;
    const cuda_device *d = (const cuda_device *)g->base.device;
    if (enter(d, &scope) == ACR_OK) {
        if (g->exec != NULL)
            d->driver.GraphExecDestroy(g->exec);
        if (g->flush != 0)
            d->driver.MemFree(g->flush);
        if (g->gate != NULL)
            d->driver.MemFreeHost(g->gate);
        if (g->stream != NULL)
            d->driver.StreamDestroy(g->stream);
        leave(d, &scope);
    }
    free(g);
}

/* Makes a graph from the caller's CUgraph, or else from what enqueue(arg) enqueues. */
static acr_status make_graph(acr__graph **out, acr__backend_device *device, CUgraph graph, acr__enqueue *enqueue,
                             void *arg, int launches)
{
    const cuda_device *d = (const cuda_device *)device;
    entered scope;
    cuda_graph *g = calloc(1, sizeof *g);
    if (g == NULL)
        return acr__fail(ACR_NO_MEMORY, "recording %d launches: no host memory", launches);
    g->base = (acr__graph){device, launches};
    acr_status status = enter(d, &scope);
    if (status == ACR_OK) {
        status = check(d, d->driver.StreamCreate(&g->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
        if (status == ACR_OK)
            status = graph != NULL ? instantiate(d, g, graph) : record_units(d, g, enqueue, arg);
        leave(d, &scope);
    }
    if (status != ACR_OK) {
        cuda_graph_free(&g->base);
        return status;
    }
    *out = &g->base;
    return ACR_OK;
}

static acr_status cuda_graph_record(acr__graph **out, acr__backend_device *device, acr__enqueue *enqueue, void *arg,
                                    int launches)
{
    return make_graph(out, device, NULL, enqueue, arg, launches);
}

static acr_status cuda_graph_adopt(acr__graph **out, acr__backend_device *device, void *graph, int launches)
{
    return make_graph(out, device, graph, NULL, NULL, launches);
}

/* Replays the graph between consecutive events, all queued at once, behind one replay that warms up and gives the host
 * its lead. */
static acr_status replay(const cuda_device *d, CUstream stream, CUgraphExec graph, const CUevent *events, int replays)
{
    acr_status status = check(d, d->driver.GraphLaunch(graph, stream), "cuGraphLaunch");
    if (status == ACR_OK)
        status = check(d, d->driver.EventRecord(events[0], stream), "cuEventRecord");
    for (int i = 0; i < replays && status == ACR_OK; i++) {
        status = check(d, d->driver.GraphLaunch(graph, stream), "cuGraphLaunch");
        if (status == ACR_OK)
            status = check(d, d->driver.EventRecord(events[i + 1], stream), "cuEventRecord");
    }
    acr_status finished =
        check(d, d->driver.StreamSynchronize(stream), "cuStreamSynchronize"); /* also after a failure: work is queued */
    return status == ACR_OK ? finished : status;
}

static acr_status read_events(const cuda_device *d, const CUevent *events, int launches, int replays, double *seconds)
{
    for (int i = 0; i < replays; i++) {
        float milliseconds;
        acr_status status =
            check(d, d->driver.EventElapsedTime(&milliseconds, events[i], events[i + 1]), "cuEventElapsedTime");
        if (status != ACR_OK)
            return status;
        seconds[i] = 1e-3 * (double)milliseconds / launches;
    }
    return ACR_OK;
}

static acr_status time_replays(const cuda_device *d, const cuda_graph *g, int replays, double *seconds)
{
    int made = 0;
    acr_status status = ACR_OK;
    CUevent *events = calloc((size_t)replays + 1, sizeof *events);
    if (events == NULL)
        return acr__fail(ACR_NO_MEMORY, "timing %d replays: no host memory", replays);
    while (made <= replays && status == ACR_OK) {
        status = check(d, d->driver.EventCreate(&events[made], CU_EVENT_DEFAULT), "cuEventCreate");
        made += status == ACR_OK;
    }
    if (status == ACR_OK)
        status = replay(d, g->stream, g->exec, events, replays);
    if (status == ACR_OK)
        status = read_events(d, events, g->base.launches, replays, seconds);
    for (int i = 0; i < made; i++)
        d->driver.EventDestroy(events[i]);
    free(events);
    return status;
}

static acr_status cuda_graph_time(acr__graph *graph, int replays, double *seconds)
{
    const cuda_device *d = (const cuda_device *)graph->device;
    entered scope;
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    status = time_replays(d, (const cuda_graph *)graph, replays, seconds);
    leave(d, &scope);
    return status;
}

/* ---- Cold mode ---- */

/* Memory of twice the size of L2, and the events around a replay. */
typedef struct cold_timer {
    cuda_graph *graph;
    CUevent start, stop;
} cold_timer;

static acr_status make_flush(const cuda_device *d, cuda_graph *g)
{
    if (g->flush != 0)
        return ACR_OK;
    g->flush_bytes = 2 * (size_t)d->base.device.l2_bytes;
    if (g->flush_bytes == 0)
        return acr__fail(ACR_UNSUPPORTED, "cold mode: the driver gives no size of L2");
    return check(d, d->driver.MemAlloc(&g->flush, g->flush_bytes), "cuMemAlloc to empty L2");
}

/* Ends with the device idle and nothing of the kernel in L2; lines marked to stay would outlive the writing, so their
 * mark is taken first. The writing takes tens of microseconds, in which the host queues what follows it. */
static acr_status flush_l2(const cuda_device *d, const cuda_graph *g)
{
    CUresult reset = d->driver.CtxResetPersistingL2Cache();
    if (reset != CUDA_ERROR_NOT_SUPPORTED && reset != CUDA_SUCCESS)
        return check(d, reset, "cuCtxResetPersistingL2Cache");
    return check(d, d->driver.MemsetD8Async(g->flush, 0, g->flush_bytes, g->stream), "cuMemsetD8Async");
}

/* Queues one replay between the two events. */
static acr_status queue_alone(const cuda_device *d, const cold_timer *timer)
{
    const cuda_graph *g = timer->graph;
    acr_status status = check(d, d->driver.EventRecord(timer->start, g->stream), "cuEventRecord");
    if (status == ACR_OK)
        status = check(d, d->driver.GraphLaunch(g->exec, g->stream), "cuGraphLaunch");
    return status == ACR_OK ? check(d, d->driver.EventRecord(timer->stop, g->stream), "cuEventRecord") : status;
}

/* Waits for what was queued, all of it or not, and reads the events. */
static acr_status finish_alone(const cuda_device *d, const cold_timer *timer, acr_status status, double *seconds)
{
    const cuda_graph *g = timer->graph;
    float milliseconds = 0;
    acr_status finished =
        check(d, d->driver.StreamSynchronize(g->stream), "cuStreamSynchronize"); /* also after a failure */
    status = status == ACR_OK ? finished : status;
    if (status == ACR_OK)
        status = check(d, d->driver.EventElapsedTime(&milliseconds, timer->start, timer->stop), "cuEventElapsedTime");
    *seconds = 1e-3 * (double)milliseconds / g->base.launches;
    return status;
}

static acr_status time_one_cold(const cuda_device *d, const cold_timer *timer, double *seconds)
{
    acr_status status = flush_l2(d, timer->graph);
    return status == ACR_OK ? finish_alone(d, timer, queue_alone(d, timer), seconds) : status;
}

static acr_status make_events(const cuda_device *d, cold_timer *timer)
{
    acr_status status = check(d, d->driver.EventCreate(&timer->start, CU_EVENT_DEFAULT), "cuEventCreate");
    return status == ACR_OK ? check(d, d->driver.EventCreate(&timer->stop, CU_EVENT_DEFAULT), "cuEventCreate") : status;
}

static void free_events(const cuda_device *d, const cold_timer *timer)
{
    if (timer->stop != NULL)
        d->driver.EventDestroy(timer->stop);
    if (timer->start != NULL)
        d->driver.EventDestroy(timer->start);
}

static acr_status time_cold(const cuda_device *d, cold_timer *timer, int samples, double *seconds)
{
    double first;
    acr_status status = make_flush(d, timer->graph);
    if (status == ACR_OK)
        status = make_events(d, timer);
    if (status == ACR_OK)
        status = time_one_cold(d, timer, &first);
    for (int i = 0; i < samples && status == ACR_OK; i++)
        status = time_one_cold(d, timer, &seconds[i]);
    free_events(d, timer);
    return status;
}

static acr_status cuda_graph_time_cold(acr__graph *graph, int samples, double *seconds)
{
    const cuda_device *d = (const cuda_device *)graph->device;
    cold_timer timer = {.graph = (cuda_graph *)graph};
    entered scope;
    acr_status status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    status = time_cold(d, &timer, samples, seconds);
    leave(d, &scope);
    return status;
}

/* ---- Prepared mode ---- */

/* The memory that closes a stream, one word that the host writes and the device reads at the same address. */
static acr_status make_gate(const cuda_device *d, cuda_graph *g)
{
    void *memory = NULL;
    if (g->gate != NULL)
        return ACR_OK;
    acr_status status =
        check(d, d->driver.MemHostAlloc(&memory, sizeof *g->gate, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
              "cuMemHostAlloc");
    g->gate = memory;
    return status;
}

/* One replay between the two events. An idle device would pass the first event while the host still queues the replay,
 * and that would count: microseconds, and others on a busy host each time. So the stream is closed until all is queued.
 * Where a driver does not offer that, the replay is timed as it is. */
static acr_status time_gated(const cuda_device *d, const cold_timer *timer, double *seconds)
{
    enum {
        CLOSED,
        OPEN
    };
    const cuda_graph *g = timer->graph;
    __atomic_store_n(g->gate, CLOSED, __ATOMIC_SEQ_CST);
    const CUresult closed =
        d->driver.StreamWaitValue32(g->stream, (CUdeviceptr)(uintptr_t)g->gate, OPEN, CU_STREAM_WAIT_VALUE_EQ);
    acr_status status = closed == CUDA_ERROR_NOT_SUPPORTED ? ACR_OK : check(d, closed, "cuStreamWaitValue32");
    if (status == ACR_OK)
        status = queue_alone(d, timer);
    __atomic_store_n(g->gate, OPEN, __ATOMIC_SEQ_CST); /* also after a failure: something may wait */
    return finish_alone(d, timer, status, seconds);
}

static acr_status cuda_graph_time_prepared(acr__graph *graph, acr__enqueue *prepare, void *arg, double *seconds)
{
    const cuda_device *d = (const cuda_device *)graph->device;
    cold_timer timer = {.graph = (cuda_graph *)graph};
    entered scope;
    acr_status status = prepare(arg, timer.graph->stream);
    if (status == ACR_OK)
        status = graph->device->backend->synchronize(graph->device);
    if (status == ACR_OK)
        status = enter(d, &scope);
    if (status != ACR_OK)
        return status;
    status = make_gate(d, timer.graph);
    if (status == ACR_OK)
        status = make_events(d, &timer);
    if (status == ACR_OK)
        status = time_gated(d, &timer, seconds);
    free_events(d, &timer);
    leave(d, &scope);
    return status;
}

static acr_status cuda_time(acr__backend_device *device, acr__enqueue *enqueue, void *arg, int launches, int replays,
                            double *seconds)
{
    acr__graph *graph = NULL;
    acr_status status = cuda_graph_record(&graph, device, enqueue, arg, launches);
    if (status == ACR_OK)
        status = cuda_graph_time(graph, replays, seconds);
    cuda_graph_free(graph);
    return status;
}

static const acr__timing timing = {
    .graph_record = cuda_graph_record,
    .graph_adopt = cuda_graph_adopt,
    .graph_time = cuda_graph_time,
    .graph_time_cold = cuda_graph_time_cold,
    .graph_time_prepared = cuda_graph_time_prepared,
    .graph_free = cuda_graph_free,
    .copy_on_device = cuda_copy_on_device,
    .fill_on_device = cuda_fill_on_device,
    .launch_bare = cuda_launch_bare,
    .within = cuda_within,
};

const acr__backend acr__backend_cuda = {
    .name = "cuda",
    .id = ACR__CUDA,
    .open = cuda_open,
    .close = cuda_close,
    .prepare = cuda_prepare,
    .release = cuda_release,
    .launch = cuda_launch,
    .run_op = cuda_run_op,
    .mem_alloc = cuda_mem_alloc,
    .mem_free = cuda_mem_free,
    .mem_upload = cuda_mem_upload,
    .mem_download = cuda_mem_download,
    .mem_fill = cuda_mem_fill,
    .mem_zero_async = cuda_mem_zero_async,
    .is_capturing = cuda_is_capturing,
    .synchronize = cuda_synchronize,
    .time = cuda_time,
    .timing = &timing,
};
