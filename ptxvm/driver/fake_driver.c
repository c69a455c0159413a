/* The fake CUDA driver: see fake_driver.h. Exports cuGetProcAddress_v2 and its own controls; every entry that the
 * library asks for is here, with the type that src/cuda/driver.h names. */
#include "fake_driver.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/driver.h"
#include "fake_program.h"
#include "fwd_args.h"
#include "ptxvm/ptxvm.h"

/* ---- State ---- */

typedef struct model {
    int arch, sm_count, smem_per_cta, smem_per_sm, l2_bytes, clock_khz, memory_clock_khz, memory_bus_bits;
    size_t mem_bytes;
    const char *name;
} model;

static const model models[] = {
    {90, 132, 232448, 233472, 62914560, 1980000, 3201000, 6144, (size_t)150 << 30, "NVIDIA H200"},
    {80, 108, 166912, 167936, 41943040, 1410000, 1215000, 5120, (size_t)40 << 30, "NVIDIA A100-SXM4-40GB"},
    {86, 84, 101376, 102400, 6291456, 1740000, 7251000, 384, (size_t)48 << 30, "NVIDIA A40"},
    {89, 58, 101376, 102400, 50331648, 2040000, 6251000, 192, (size_t)24 << 30, "NVIDIA L4"},
    {120, 188, 101376, 102400, 134217728, 2430000, 14001000, 512, (size_t)96 << 30, "NVIDIA RTX PRO 6000"},
};

typedef enum step_kind {
    LAUNCH,
    FILL,
    COPY,       /* between memories of devices */
    COPY_LINES, /* likewise */
    UPLOAD,     /* of what `parameters` holds */
    WRITE_WORD,
    WAIT_WORD, /* until one bit of `word` is set */
    RECORD,    /* an event */
    FOLLOW     /* `stream`'s steps to the one that `awaited` numbers */
} step_kind;

/* What a captured stream shall do with each replay, or a stream that waits when it goes on. */
typedef struct step {
    step_kind kind;
    struct object *kernel;
    CUlaunchConfig config; /* without attributes */
    unsigned cluster;
    unsigned char *parameters; /* copies, one behind the other; NULL where launches are not executed */
    CUdeviceptr to, from;
    CUDA_MEMCPY2D lines;
    unsigned char value;
    uint64_t word;
    size_t bytes;
    struct object *stream, *event;
    long number, awaited; /* in queues steps are numbered from 1 on, over all streams */
} step;

/* The steps of a graph and of those made from it. */
typedef struct recording {
    int users, count;
    step *steps;
} recording;

enum {
    DEFAULT_SMEM_BYTES = 49152, /* of a CTA whose kernel was not allowed more */
    MAX_CLUSTER = 8
};

/* An object that the driver handed out; handles point to it. */
typedef enum object_kind {
    MEMORY,
    LIBRARY,
    KERNEL,
    STREAM,
    EVENT,
    GRAPH,
    GRAPH_EXEC
} object_kind;

typedef struct object {
    struct object *next;
    object_kind kind;
    void *memory;            /* MEMORY: between two guards, in `block` */
    size_t bytes;            /* MEMORY */
    unsigned char *block;    /* MEMORY */
    char shared_name[64];    /* MEMORY that another process may map, or has mapped; "" = none */
    int is_mapped;           /* MEMORY of another process, or of this one by a handle */
    int capturing;           /* STREAM */
    step *queue;             /* STREAM: what waits for a word, and what comes behind it */
    int queued;              /* STREAM */
    struct object *recorded; /* EVENT: the stream, */
    long recorded_number;    /* EVENT: and the number there; 0 = what is over already */
    recording *captured;     /* EVENT that a capturing stream recorded: only compared */
    recording *steps;        /* STREAM while capturing, GRAPH, GRAPH_EXEC */
    ptxvm_module *program;   /* LIBRARY, NULL where launches are not executed */
    struct object *library;  /* KERNEL */
    char name[160];          /* KERNEL */
    ptxvm_needs needs;       /* KERNEL of a program */
    int dynamic_bytes_limit; /* KERNEL */
    double at_us;            /* EVENT */
} object;

typedef struct settings {
    int version, devices;
    const model *model;
    char hidden[64], failing[64], endless[64];
    CUresult failing_result;
    long fail_call, fail_alloc; /* counted down; the fault happens at 1 */
    char execute[512];          /* the folder with the PTX; "" = launches nothing */
    int sms;                    /* 0 = the model's */
    uint64_t seed;
    int eager;
    long launch_us, host_us; /* the clock's; launch_us 0 = there is none */
    ptxvm_races check_races;
    int sharing;    /* large allocations can be mapped by other processes */
    int races;      /* found in the present launch */
    CUresult fault; /* of a launch: every later call returns it */
} settings;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything below */
static int is_set_up;
static settings set;
static fake_cuda_counters count;
static fake_cuda_launch last_launch;
static object *objects;        /* all that are alive */
static object primary_context; /* its address is the handle */
static long kernels_alive;
static _Thread_local object *default_stream; /* whose handle is NULL; threads stand for ranks, each with a GPU */
static long steps_queued;                    /* so far */
static int steps_waiting;
static _Thread_local CUstreamCaptureMode mode; /* of the thread: begins as global */

static void copy_text(char *to, size_t capacity, const char *from)
{
    to[0] = '\0';
    if (from != NULL)
        strncat(to, from, capacity - 1);
}

static const model *model_of(int arch)
{
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        if (models[i].arch == arch)
            return &models[i];
    abort(); /* a test's mistake */
}

static long number_from_environment(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? strtol(text, NULL, 10) : otherwise;
}

static void set_defaults(void)
{
    memset(&set, 0, sizeof set);
    set.version = 13000;
    set.devices = 1;
    set.model = model_of(90);
}

static void set_up_from_environment(void)
{
    if (is_set_up)
        return;
    is_set_up = 1;
    set_defaults();
    set.version = (int)number_from_environment("FAKE_CUDA_DRIVER_VERSION", set.version);
    set.devices = (int)number_from_environment("FAKE_CUDA_DEVICES", set.devices);
    set.model = model_of((int)number_from_environment("FAKE_CUDA_ARCH", set.model->arch));
    set.fail_call = number_from_environment("FAKE_CUDA_FAIL_CALL", 0);
    set.fail_alloc = number_from_environment("FAKE_CUDA_FAIL_ALLOC", 0);
    copy_text(set.hidden, sizeof set.hidden, getenv("FAKE_CUDA_HIDE"));
    copy_text(set.endless, sizeof set.endless, getenv("FAKE_CUDA_ENDLESS"));
    copy_text(set.execute, sizeof set.execute, getenv("FAKE_CUDA_EXECUTE"));
    set.sms = (int)number_from_environment("FAKE_CUDA_SMS", 0);
    set.seed = (uint64_t)number_from_environment("FAKE_CUDA_SEED", 1);
    set.eager = number_from_environment("FAKE_CUDA_EAGER", 0) != 0;
    set.launch_us = number_from_environment("FAKE_CUDA_LAUNCH_US", 0);
    set.host_us = number_from_environment("FAKE_CUDA_HOST_US", 0);
    set.sharing = number_from_environment("FAKE_CUDA_SHARING", 0) != 0;
    set.check_races = (ptxvm_races)number_from_environment("FAKE_CUDA_RACES", PTXVM_RACES_OFF);
}

static void lock_state(void)
{
    pthread_mutex_lock(&lock);
    set_up_from_environment();
}

static void unlock_state(void)
{
    pthread_mutex_unlock(&lock);
}

/* ---- Controls ---- */

void fake_cuda_reset(void)
{
    lock_state();
    set_defaults();
    count.calls = count.launches = count.misuses = 0;
    memset(&last_launch, 0, sizeof last_launch);
    unlock_state();
}

/* Functions that set one thing. `assignment` reads their argument `to`. */
#define SETTER(name, type, assignment)                                                                                 \
    void name(type to)                                                                                                 \
    {                                                                                                                  \
        lock_state();                                                                                                  \
        assignment;                                                                                                    \
        unlock_state();                                                                                                \
    }
SETTER(fake_cuda_set_driver_version, int, set.version = to)
SETTER(fake_cuda_set_devices, int, set.devices = to)
SETTER(fake_cuda_set_arch, int, set.model = model_of(to))
SETTER(fake_cuda_set_sms, int, set.sms = to)

void fake_cuda_set_clock(long launch_us, long host_us)
{
    lock_state();
    set.launch_us = launch_us;
    set.host_us = host_us;
    unlock_state();
}

SETTER(fake_cuda_hide_entry, const char *, copy_text(set.hidden, sizeof set.hidden, to))
SETTER(fake_cuda_fail_nth_call, long, set.fail_call = to)
SETTER(fake_cuda_fail_nth_alloc, long, set.fail_alloc = to)

void fake_cuda_set_execute(const char *folder, uint64_t seed, int eager)
{
    lock_state();
    copy_text(set.execute, sizeof set.execute, folder);
    set.seed = seed;
    set.eager = eager;
    unlock_state();
}

void fake_cuda_fail_entry(const char *name, int cu_result)
{
    lock_state();
    copy_text(set.failing, sizeof set.failing, name);
    set.failing_result = (CUresult)cu_result;
    unlock_state();
}

fake_cuda_counters fake_cuda_count(void)
{
    lock_state();
    fake_cuda_counters now = count;
    unlock_state();
    return now;
}

const size_t fake_cuda_counters_bytes = sizeof(fake_cuda_counters);
const size_t fake_cuda_launch_bytes = sizeof(fake_cuda_launch);

fake_cuda_launch fake_cuda_last_launch(void)
{
    lock_state();
    fake_cuda_launch launch = last_launch;
    unlock_state();
    return launch;
}

/* ---- Calls and objects; all with the lock held ---- */

/* A kernel that overruns an allocation comes into a guard, which belongs to none. */
static size_t guard_bytes(void)
{
    return set.execute[0] != '\0' ? 65536 : 0;
}

/* Counts down to a fault that happens once. */
static int is_due(long *n)
{
    return *n > 0 && --*n == 0;
}

static CUresult misuse(CUresult result)
{
    count.misuses++;
    return result;
}

static void go_on(void);

/* Begins an entry: takes the lock, counts, and says whether it shall fail. Every entry ends with finish(). */
static CUresult begin(const char *entry)
{
    lock_state();
    count.calls++;
    go_on();
    while (strcmp(entry, set.endless) == 0)
        pause();
    if (strcmp(entry, set.failing) == 0)
        return set.failing_result;
    if (set.fault != CUDA_SUCCESS)
        return set.fault;
    return is_due(&set.fail_call) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

static CUresult finish(CUresult result)
{
    unlock_state();
    return result;
}

static void leave_recording(recording *steps)
{
    if (steps == NULL || --steps->users > 0)
        return;
    for (int i = 0; i < steps->count; i++)
        free(steps->steps[i].parameters);
    free(steps->steps);
    free(steps);
}

static recording *join_recording(recording *steps)
{
    steps->users++;
    return steps;
}

static recording *make_recording(void)
{
    recording *made = calloc(1, sizeof *made);
    if (made == NULL)
        abort();
    return join_recording(made);
}

static void record(recording *to, const step *added)
{
    step *longer = realloc(to->steps, (size_t)(to->count + 1) * sizeof *longer);
    if (longer == NULL)
        abort();
    to->steps = longer;
    to->steps[to->count++] = *added;
}

static object *make_object(object_kind kind, long *counter)
{
    object *made = calloc(1, sizeof *made);
    if (made == NULL)
        abort();
    made->kind = kind;
    made->next = objects;
    objects = made;
    ++*counter;
    return made;
}

static int is_alive(const void *handle, object_kind kind)
{
    for (const object *o = objects; o != NULL; o = o->next)
        if (o == handle)
            return o->kind == kind;
    return 0;
}

/* Memory that processes share lies in a file of shared memory, which is unlinked with the owner's. */
static void end_sharing(object *memory)
{
    munmap(memory->block, memory->bytes + 2 * guard_bytes());
    if (!memory->is_mapped)
        shm_unlink(memory->shared_name);
}

/* Ends an object; one that is none is misuse. */
static CUresult end_object(void *handle, object_kind kind, long *counter)
{
    if (!is_alive(handle, kind))
        return misuse(CUDA_ERROR_INVALID_HANDLE);
    object **link = &objects;
    while (*link != handle)
        link = &(*link)->next;
    object *ended = *link;
    *link = ended->next;
    if (ended->queued > 0)
        misuse(CUDA_ERROR_ILLEGAL_STATE); /* a real one would let it come to its end */
    for (int i = 0; i < ended->queued; i++, steps_waiting--)
        free(ended->queue[i].parameters);
    free(ended->queue);
    if (ended->shared_name[0] != '\0')
        end_sharing(ended);
    else
        free(ended->block);
    leave_recording(ended->steps);
    ptxvm_free(ended->program);
    free(ended);
    --*counter;
    return CUDA_SUCCESS;
}

/* Kernels end with their library. */
static void end_kernels_of(const object *library)
{
    for (object *o = objects, *next; o != NULL; o = next) {
        next = o->next;
        if (o->kind == KERNEL && o->library == library)
            end_object(o, KERNEL, &kernels_alive);
    }
}

static CUresult need_context(void)
{
    return count.pushed > 0 ? CUDA_SUCCESS : misuse(CUDA_ERROR_INVALID_CONTEXT);
}

/* begin() of an entry that needs a context. */
static CUresult begin_in_context(const char *entry)
{
    const CUresult result = begin(entry);
    return result == CUDA_SUCCESS ? need_context() : result;
}

/* NULL is the legacy default stream; others must be ours. */
static CUresult need_stream(CUstream stream)
{
    return stream == NULL || is_alive(stream, STREAM) ? need_context() : misuse(CUDA_ERROR_INVALID_HANDLE);
}

/* Begins a call that puts something of this kind into a stream. */
static CUresult begin_in_stream(const char *entry, const void *handle, object_kind kind, CUstream stream)
{
    const CUresult result = begin(entry);
    if (result != CUDA_SUCCESS)
        return result;
    return is_alive(handle, kind) ? need_stream(stream) : misuse(CUDA_ERROR_INVALID_HANDLE);
}

static int is_capturing(CUstream stream)
{
    return stream != NULL && ((object *)(void *)stream)->capturing;
}

/* The allocation that holds [address, address + bytes), as a host pointer; NULL when none does. */
static unsigned char *find_memory(CUdeviceptr address, size_t bytes)
{
    for (const object *o = objects; o != NULL; o = o->next) {
        CUdeviceptr first = (CUdeviceptr)(uintptr_t)o->memory;
        if (o->kind == MEMORY && address >= first && address + bytes <= first + o->bytes)
            return (unsigned char *)o->memory + (address - first);
    }
    return NULL;
}

/* ---- The clock ---- */

/* Of an idle device that works off one stream: a replay begins when the host has queued it, which takes the host 0 to
 * set.host_us behind the event before, and each step takes set.launch_us. Behind a closed gate all is queued before any
 * of it begins. */
static double now_us;
static uint64_t pauses;
static const volatile cuuint32_t *gate; /* the last that was waited for */
static cuuint32_t gate_opens_at;

static void pass_time(int steps)
{
    const int is_closed = gate != NULL && *gate != gate_opens_at;
    pauses = pauses * 6364136223846793005u + 1442695040888963407u;
    now_us +=
        (double)set.launch_us * steps + (is_closed ? 0.0 : (double)set.host_us * ((double)(pauses >> 40) * 0x1p-24));
}

/* ---- Entries: device and context ---- */

static CUresult fake_Init(unsigned flags)
{
    CUresult result = begin("cuInit");
    (void)flags;
    return finish(result);
}

/* The two texts never fail by order: what they explain has failed already. */
static CUresult fake_GetErrorName(CUresult error, const char **out)
{
    *out = error == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
           : error == CUDA_ERROR_UNKNOWN       ? "CUDA_ERROR_UNKNOWN"
           : error == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
                                               : "CUDA_ERROR_FAKE";
    return CUDA_SUCCESS;
}

static CUresult fake_GetErrorString(CUresult error, const char **out)
{
    *out = error == CUDA_ERROR_OUT_OF_MEMORY   ? "out of memory"
           : error == CUDA_ERROR_LAUNCH_FAILED ? "a kernel went wrong in the PTX machine"
                                               : "a fault that the fake driver was told to make";
    return CUDA_SUCCESS;
}

static CUresult fake_DeviceGetCount(int *out)
{
    CUresult result = begin("cuDeviceGetCount");
    if (result == CUDA_SUCCESS)
        *out = set.devices;
    return finish(result);
}

static CUresult fake_DeviceGet(CUdevice *out, int ordinal)
{
    CUresult result = begin("cuDeviceGet");
    if (result == CUDA_SUCCESS && (ordinal < 0 || ordinal >= set.devices))
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS)
        *out = ordinal;
    return finish(result);
}

static CUresult fake_DeviceGetName(char *name, int capacity, CUdevice device)
{
    CUresult result = begin("cuDeviceGetName");
    (void)device;
    if (result == CUDA_SUCCESS)
        copy_text(name, (size_t)capacity, set.model->name);
    return finish(result);
}

static int attribute_of(const model *m, CUdevice_attribute which)
{
    switch ((int)which) { /* those that the backend reads */
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return m->arch / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return m->arch % 10;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return set.sms > 0 ? set.sms : m->sm_count;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        return m->smem_per_cta;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        return m->smem_per_sm;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
        return 65536;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        return m->l2_bytes;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        return m->clock_khz;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
        return m->memory_clock_khz;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
        return m->memory_bus_bits;
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
        return 0;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
        return 1;
    default:
        return -1;
    }
}

static CUresult fake_DeviceGetAttribute(int *out, CUdevice_attribute which, CUdevice device)
{
    CUresult result = begin("cuDeviceGetAttribute");
    (void)device;
    int value = attribute_of(set.model, which);
    if (result == CUDA_SUCCESS && value < 0)
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    if (result == CUDA_SUCCESS)
        *out = value;
    return finish(result);
}

static CUresult fake_DeviceTotalMem(size_t *out, CUdevice device)
{
    CUresult result = begin("cuDeviceTotalMem");
    (void)device;
    if (result == CUDA_SUCCESS)
        *out = set.model->mem_bytes;
    return finish(result);
}

static CUresult fake_DevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    CUresult result = begin("cuDevicePrimaryCtxRetain");
    (void)device;
    if (result == CUDA_SUCCESS) {
        count.contexts++;
        *out = (CUcontext)(void *)&primary_context;
    }
    return finish(result);
}

static CUresult fake_DevicePrimaryCtxRelease(CUdevice device)
{
    CUresult result = begin("cuDevicePrimaryCtxRelease");
    (void)device;
    if (result == CUDA_SUCCESS && count.contexts == 0)
        result = misuse(CUDA_ERROR_INVALID_CONTEXT);
    if (result == CUDA_SUCCESS)
        count.contexts--;
    return finish(result);
}

static CUresult fake_CtxPushCurrent(CUcontext context)
{
    CUresult result = begin("cuCtxPushCurrent");
    if (result == CUDA_SUCCESS && ((void *)context != &primary_context || count.contexts == 0))
        result = misuse(CUDA_ERROR_INVALID_CONTEXT);
    if (result == CUDA_SUCCESS)
        count.pushed++;
    return finish(result);
}

static CUresult fake_CtxPopCurrent(CUcontext *out)
{
    CUresult result = begin("cuCtxPopCurrent");
    if (count.pushed > 0)
        count.pushed--; /* also when told to fail: nobody can do better about it */
    else
        result = misuse(CUDA_ERROR_INVALID_CONTEXT);
    *out = (CUcontext)(void *)&primary_context;
    return finish(result);
}

static CUresult fake_CtxSynchronize(void)
{
    CUresult result = begin("cuCtxSynchronize");
    return finish(result == CUDA_SUCCESS ? need_context() : result);
}

static CUresult fake_CtxResetPersistingL2Cache(void)
{
    CUresult result = begin("cuCtxResetPersistingL2Cache");
    return finish(result == CUDA_SUCCESS ? need_context() : result);
}

static CUresult fake_ThreadExchangeStreamCaptureMode(CUstreamCaptureMode *exchanged)
{
    CUresult result = begin("cuThreadExchangeStreamCaptureMode");
    if (result == CUDA_SUCCESS) {
        CUstreamCaptureMode previous = mode;
        mode = *exchanged;
        *exchanged = previous;
    }
    return finish(result);
}

/* ---- Entries: kernels ---- */

static int is_ptx_forced(void)
{
    return getenv("CUDA_FORCE_PTX_JIT") != NULL;
}

static ptxvm_module *load_program(const void *code)
{
    char error[512];
    ptxvm_module *program = fake_program_load(set.execute, code, set.model->arch, is_ptx_forced(), error, sizeof error);
    if (program == NULL)
        fprintf(stderr, "fake driver: an image cannot be executed: %s\n", error);
    return program;
}

static CUresult fake_LibraryLoadData(CUlibrary *out, const void *code, CUjit_option *options, void **values,
                                     unsigned options_count, CUlibraryOption *library_options, void **library_values,
                                     unsigned library_options_count)
{
    CUresult result = begin("cuLibraryLoadData");
    (void)options, (void)values, (void)options_count, (void)library_options, (void)library_values,
        (void)library_options_count;
    if (result == CUDA_SUCCESS && code == NULL)
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    ptxvm_module *program = NULL;
    if (result == CUDA_SUCCESS && set.execute[0] != '\0') {
        program = load_program(code);
        result = program != NULL ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    if (result == CUDA_SUCCESS) {
        object *made = make_object(LIBRARY, &count.libraries);
        made->program = program;
        *out = (CUlibrary)(void *)made;
    }
    return finish(result);
}

static CUresult fake_LibraryUnload(CUlibrary library)
{
    CUresult result = begin("cuLibraryUnload");
    if (is_alive(library, LIBRARY))
        end_kernels_of((object *)(void *)library);
    CUresult ended = end_object(library, LIBRARY, &count.libraries);
    return finish(result == CUDA_SUCCESS ? ended : result);
}

static CUresult fake_LibraryGetKernel(CUkernel *out, CUlibrary library, const char *name)
{
    CUresult result = begin("cuLibraryGetKernel");
    if (result == CUDA_SUCCESS && (!is_alive(library, LIBRARY) || name == NULL))
        result = misuse(CUDA_ERROR_INVALID_HANDLE);
    const object *owner = (const object *)(void *)library;
    ptxvm_needs needs = {0};
    if (result == CUDA_SUCCESS && owner->program != NULL && ptxvm_describe(owner->program, name, &needs) != 0)
        result = CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS) {
        object *made = make_object(KERNEL, &kernels_alive);
        made->library = (object *)(void *)library;
        copy_text(made->name, sizeof made->name, name);
        made->needs = needs;
        made->dynamic_bytes_limit = DEFAULT_SMEM_BYTES - (int)needs.static_smem_bytes;
        *out = (CUkernel)(void *)made;
    }
    return finish(result);
}

/* An image has machine code for the GPU, and PTX of the architecture that its kernel's name ends in. */
static int oldest_arch(const char *kernel)
{
    const char *end = strrchr(kernel, '_');
    return end != NULL && strncmp(end, "_sm", 3) == 0 ? (int)strtol(end + 3, NULL, 10) : 80;
}

static CUresult fake_KernelGetAttribute(int *out, CUfunction_attribute which, CUkernel kernel, CUdevice device)
{
    CUresult result = begin("cuKernelGetAttribute");
    (void)device;
    if (result == CUDA_SUCCESS && !is_alive(kernel, KERNEL))
        result = misuse(CUDA_ERROR_INVALID_HANDLE);
    if (result == CUDA_SUCCESS) {
        const object *known = (const object *)(void *)kernel;
        *out = which == CU_FUNC_ATTRIBUTE_PTX_VERSION ? (is_ptx_forced() ? oldest_arch(known->name) : set.model->arch)
               : which == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? (int)known->needs.static_smem_bytes
                                                              : 0;
    }
    return finish(result);
}

static CUresult fake_KernelSetAttribute(CUfunction_attribute which, int value, CUkernel kernel, CUdevice device)
{
    CUresult result = begin("cuKernelSetAttribute");
    (void)device;
    if (result == CUDA_SUCCESS && !is_alive(kernel, KERNEL))
        result = misuse(CUDA_ERROR_INVALID_HANDLE);
    object *changed = (object *)(void *)kernel;
    const int is_limit = which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    if (result == CUDA_SUCCESS && is_limit && value + (int)changed->needs.static_smem_bytes > set.model->smem_per_cta)
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    if (result == CUDA_SUCCESS && is_limit)
        changed->dynamic_bytes_limit = value;
    return finish(result);
}

static CUresult fake_KernelGetFunction(CUfunction *out, CUkernel kernel)
{
    CUresult result = begin_in_context("cuKernelGetFunction");
    if (result == CUDA_SUCCESS)
        *out = (CUfunction)(void *)kernel;
    return finish(result);
}

/* What a kernel's second parameter may be. Without a program its name says so: a paged line has none. */
static int takes_maps(const object *kernel)
{
    const ptxvm_needs *needs = &kernel->needs;
    return needs->parameter_count > 0
               ? needs->parameter_count > 1 && needs->parameter_bytes[1] == 4 * sizeof(CUtensorMap)
               : strstr(kernel->name, "_paged") == NULL;
}

/* Of operations beside attention (op_...) nobody asks for the arguments, which are others. */
static void remember_launch(const CUlaunchConfig *config, unsigned cluster, void **parameters, const object *kernel)
{
    memset(&last_launch, 0, sizeof last_launch);
    last_launch.grid[0] = config->gridDimX;
    last_launch.grid[1] = config->gridDimY;
    last_launch.grid[2] = config->gridDimZ;
    last_launch.block = config->blockDimX;
    last_launch.cluster = cluster;
    last_launch.smem_bytes = config->sharedMemBytes;
    last_launch.stream = config->hStream;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            last_launch.overlap_previous = config->attrs[i].value.programmaticStreamSerializationAllowed;
    if (strncmp(kernel->name, "op_", 3) == 0)
        return;
    memcpy(last_launch.args, parameters[0], sizeof(fwd_args));
    for (int i = 0; i < 4 && takes_maps(kernel); i++) {
        tensor_map map;
        memcpy(&map, (const CUtensorMap *)parameters[1] + i, sizeof map);
        last_launch.map_bases[i] = map.base;
        last_launch.map_rows[i] = map.extents[1];
    }
}

static unsigned cluster_of(const CUlaunchConfig *config)
{
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            return config->attrs[i].value.clusterDim.x;
    return 0;
}

/* The kernel's own limits are known only of a program. */
static int is_launchable(const CUlaunchConfig *c, unsigned cluster, const object *kernel)
{
    const int known = kernel->library->program != NULL;
    const unsigned threads = c->blockDimX * c->blockDimY * c->blockDimZ;
    return c->gridDimX > 0 && c->gridDimX <= 2147483647u && c->gridDimY > 0 && c->gridDimY <= 65535 &&
           c->gridDimZ > 0 && c->gridDimZ <= 65535 && threads > 0 && threads <= 1024 &&
           c->sharedMemBytes <= (unsigned)set.model->smem_per_cta &&
           (!known || kernel->needs.max_threads == 0 || threads <= kernel->needs.max_threads) &&
           (!known || (int)c->sharedMemBytes <= kernel->dynamic_bytes_limit) &&
           (cluster <= 1 || (cluster <= MAX_CLUSTER && c->gridDimX % cluster == 0));
}

/* The machine asks with the lock held: a launch is executed within a call. */
static int is_allocated(void *user, uint64_t address, size_t bytes)
{
    (void)user;
    return find_memory(address, bytes) != NULL;
}

static void tell_race(void *user, const char *text)
{
    const object *kernel = user;
    set.races++;
    fprintf(stderr, "fake driver: %s: %s\n", kernel->name, text);
}

static void execute(const object *kernel, const CUlaunchConfig *c, unsigned cluster, void *const *parameters)
{
    set.races = 0;
    const ptxvm_launch launch = {
        .module = kernel->library->program,
        .entry = kernel->name,
        .grid = {c->gridDimX, c->gridDimY, c->gridDimZ},
        .block = {c->blockDimX, c->blockDimY, c->blockDimZ},
        .cluster = cluster,
        .dynamic_smem_bytes = c->sharedMemBytes,
        .parameters = parameters,
        .sm_count = (uint32_t)(set.sms > 0 ? set.sms : set.model->sm_count),
        .is_allocated = is_allocated,
        .seed = set.seed++,
        .eager = set.eager,
        .user = (void *)(uintptr_t)kernel,
        .check_races = set.check_races,
        .race_found = tell_race,
    };
    char error[1024];
    const int result = ptxvm_run(&launch, NULL, error, sizeof error);
    if (result == 0 && set.races == 0)
        return;
    if (result == 0)
        snprintf(error, sizeof error, "%d races", set.races);
    fprintf(stderr, "fake driver: %s, seed %llu: %s\n", kernel->name, (unsigned long long)launch.seed, error);
    set.fault = CUDA_ERROR_LAUNCH_FAILED;
}

/* What a launch does later: it keeps its parameters. */
static step launch_step(const object *kernel, const CUlaunchConfig *config, unsigned cluster, void **parameters)
{
    step made = {.kind = LAUNCH, .kernel = (object *)(uintptr_t)kernel, .config = *config, .cluster = cluster};
    made.config.attrs = NULL;
    made.config.numAttrs = 0;
    size_t bytes = 0;
    for (int i = 0; i < kernel->needs.parameter_count && kernel->library->program != NULL; i++) {
        unsigned char *longer = realloc(made.parameters, bytes + kernel->needs.parameter_bytes[i]);
        if (longer == NULL)
            abort();
        memcpy(longer + bytes, parameters[i], kernel->needs.parameter_bytes[i]);
        made.parameters = longer;
        bytes += kernel->needs.parameter_bytes[i];
    }
    return made;
}

static CUresult replay_launch(const step *s)
{
    if (!is_alive(s->kernel, KERNEL))
        return misuse(CUDA_ERROR_INVALID_HANDLE);
    count.launches++;
    if (s->parameters == NULL)
        return CUDA_SUCCESS;
    void *parameters[sizeof s->kernel->needs.parameter_bytes / sizeof(size_t)];
    size_t bytes = 0;
    for (int i = 0; i < s->kernel->needs.parameter_count; i++) {
        parameters[i] = s->parameters + bytes;
        bytes += s->kernel->needs.parameter_bytes[i];
    }
    execute(s->kernel, &s->config, s->cluster, parameters);
    return CUDA_SUCCESS;
}

static CUresult copy_lines(const CUDA_MEMCPY2D *copy)
{
    const unsigned char *from = find_memory(copy->srcDevice, (copy->Height - 1) * copy->srcPitch + copy->WidthInBytes);
    unsigned char *to = find_memory(copy->dstDevice, (copy->Height - 1) * copy->dstPitch + copy->WidthInBytes);
    if (!from || !to)
        return misuse(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < copy->Height; i++)
        memcpy(to + i * copy->dstPitch, from + i * copy->srcPitch, copy->WidthInBytes);
    return CUDA_SUCCESS;
}

/* A word that other threads and processes write. */
static uint64_t read_word(const unsigned char *memory)
{
    return __atomic_load_n((const uint64_t *)(const void *)memory, __ATOMIC_ACQUIRE);
}

/* One step; what it refers to must live still. */
static CUresult perform(const step *s)
{
    unsigned char *to = s->kind == FILL || s->kind == COPY || s->kind == UPLOAD ? find_memory(s->to, s->bytes)
                        : s->kind == WRITE_WORD                                 ? find_memory(s->to, sizeof(uint32_t))
                                                                                : NULL;
    const unsigned char *from = s->kind == COPY ? find_memory(s->from, s->bytes) : to;
    switch (s->kind) {
    case LAUNCH:
        return replay_launch(s);
    case COPY_LINES:
        return copy_lines(&s->lines);
    case RECORD:
        if (is_alive(s->event, EVENT))
            s->event->at_us = now_us;
        return CUDA_SUCCESS;
    case WAIT_WORD:
    case FOLLOW:
        return CUDA_SUCCESS;
    default:
        break;
    }
    if (to == NULL || from == NULL)
        return misuse(CUDA_ERROR_INVALID_VALUE);
    if (s->kind == FILL)
        memset(to, s->value, s->bytes);
    else if (s->kind == WRITE_WORD)
        __atomic_store_n((uint32_t *)(void *)to, (uint32_t)s->word, __ATOMIC_RELEASE);
    else
        memmove(to, s->kind == UPLOAD ? s->parameters : from, s->bytes);
    return CUDA_SUCCESS;
}

/* ---- Streams that wait ---- */

static object *stream_of(CUstream stream)
{
    static long default_streams;
    if (stream == NULL && default_stream == NULL)
        default_stream = make_object(STREAM, &default_streams);
    return stream == NULL ? default_stream : (object *)(void *)stream;
}

/* Whether a stream's next step can be taken. */
static int is_ready(const step *s)
{
    if (s->kind == WAIT_WORD) {
        const unsigned char *memory = find_memory(s->to, sizeof s->word);
        return memory == NULL || (read_word(memory) & s->word) != 0;
    }
    return s->kind != FOLLOW || !is_alive(s->stream, STREAM) || s->stream->queued == 0 ||
           s->stream->queue[0].number > s->awaited;
}

static int advance(object *stream)
{
    int taken = 0;
    while (taken < stream->queued && is_ready(&stream->queue[taken])) {
        const CUresult result = perform(&stream->queue[taken]);
        if (result != CUDA_SUCCESS && set.fault == CUDA_SUCCESS)
            set.fault = result;
        free(stream->queue[taken++].parameters);
    }
    stream->queued -= taken;
    steps_waiting -= taken;
    if (taken > 0)
        memmove(stream->queue, stream->queue + taken, (size_t)stream->queued * sizeof *stream->queue);
    return taken;
}

/* Takes every step that waits no longer. */
static void go_on(void)
{
    for (int taken = steps_waiting > 0; taken > 0;) {
        taken = 0;
        for (object *o = objects; o != NULL; o = o->next)
            taken += o->kind == STREAM ? advance(o) : 0;
    }
}

/* Behind what the stream has to do before; parameters are the queue's then. */
static void queue(CUstream stream, const step *added)
{
    object *to = stream_of(stream);
    step *longer = realloc(to->queue, (size_t)(to->queued + 1) * sizeof *longer);
    if (longer == NULL)
        abort();
    to->queue = longer;
    to->queue[to->queued] = *added;
    to->queue[to->queued++].number = ++steps_queued;
    steps_waiting++;
    go_on();
}

static int is_waiting(CUstream stream)
{
    go_on();
    return stream_of(stream)->queued > 0;
}

/* A step at once, with every replay of what the stream captures, or when the stream comes to it. */
static CUresult take(CUstream stream, const step *s)
{
    if (is_capturing(stream)) {
        record(stream_of(stream)->steps, s);
        return CUDA_SUCCESS;
    }
    if (is_waiting(stream)) {
        queue(stream, s);
        return CUDA_SUCCESS;
    }
    return perform(s);
}

/* Lets other threads and processes go on until the stream has come to its end. */
static void wait_for_end(CUstream stream)
{
    while (is_waiting(stream)) {
        unlock_state();
        usleep(100);
        lock_state();
    }
}

/* A kernel runs at once, or with every replay of what the stream captures. */
static void launch_or_record(const object *kernel, const CUlaunchConfig *config, unsigned cluster, void **parameters)
{
    if (is_capturing(config->hStream) || is_waiting(config->hStream)) {
        const step added = launch_step(kernel, config, cluster, parameters);
        take(config->hStream, &added);
        return;
    }
    count.launches++;
    if (kernel->library->program != NULL)
        execute(kernel, config, cluster, parameters);
}

static CUresult fake_LaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    CUresult result = begin("cuLaunchKernelEx");
    (void)extra;
    const unsigned cluster = cluster_of(config);
    const object *kernel = (const object *)(void *)function;
    if (result == CUDA_SUCCESS)
        result = need_stream(config->hStream);
    if (result == CUDA_SUCCESS && (!is_alive(function, KERNEL) || !is_launchable(config, cluster, kernel)))
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    if (result == CUDA_SUCCESS) {
        remember_launch(config, cluster, parameters, kernel);
        launch_or_record(kernel, config, cluster, parameters);
    }
    return finish(result);
}

static int is_legal_map(cuuint32_t rank, const void *base, const cuuint64_t *extents, const cuuint64_t *strides,
                        const cuuint32_t *box)
{
    int legal = rank >= 3 && rank <= 5 && (uintptr_t)base % 16 == 0;
    for (cuuint32_t i = 0; i < rank && legal; i++)
        legal = extents[i] > 0 && box[i] > 0 && box[i] <= 256;
    for (cuuint32_t i = 0; i + 1 < rank && legal; i++)
        legal = strides[i] % 16 == 0 && strides[i] < (cuuint64_t)1 << 40;
    return legal;
}

static unsigned element_bytes(CUtensorMapDataType type)
{
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
        return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
        return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
        return 4;
    default:
        return 0; /* nobody uses the others */
    }
}

static unsigned bytes_of_swizzle(CUtensorMapSwizzle swizzle)
{
    return swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
           : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
           : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                  : 0;
}

static CUresult fake_TensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                          const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box,
                                          const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                          CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                          CUtensorMapFloatOOBfill fill)
{
    CUresult result = begin("cuTensorMapEncodeTiled");
    (void)element_strides, (void)interleave, (void)promotion;
    const unsigned row_bytes = box[0] * element_bytes(type), swizzle_bytes = bytes_of_swizzle(swizzle);
    if (result == CUDA_SUCCESS)
        result = need_context();
    if (result == CUDA_SUCCESS &&
        (!is_legal_map(rank, base, extents, strides, box) || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
         row_bytes == 0 || row_bytes % 16 != 0 || (swizzle_bytes != 0 && row_bytes > swizzle_bytes)))
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    if (result == CUDA_SUCCESS) {
        tensor_map made = {.base = (uint64_t)(uintptr_t)base,
                           .rank = (uint8_t)rank,
                           .element_bytes = (uint8_t)element_bytes(type),
                           .swizzle = (uint8_t)swizzle_bytes,
                           .magic = TENSOR_MAP_MAGIC};
        for (cuuint32_t i = 0; i < rank; i++) {
            made.extents[i] = extents[i];
            made.box[i] = (uint16_t)box[i];
            if (i > 0)
                made.strides[i - 1] = strides[i - 1];
        }
        memset(map, 0, sizeof *map);
        memcpy(map, &made, sizeof made);
    }
    return finish(result);
}

static CUresult fake_TensorMapReplaceAddress(CUtensorMap *map, void *base)
{
    CUresult result = begin("cuTensorMapReplaceAddress");
    if (result == CUDA_SUCCESS && (uintptr_t)base % 16 != 0)
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    if (result == CUDA_SUCCESS) {
        const uint64_t address = (uint64_t)(uintptr_t)base;
        memcpy((unsigned char *)map + offsetof(tensor_map, base), &address, sizeof address);
    }
    return finish(result);
}

/* ---- Entries: memory ---- */

/* Maps shared memory by its name; makes it first where `bytes` says how much. */
static void *map_shared(const char *name, size_t *bytes)
{
    const int file = shm_open(name, O_RDWR | (*bytes > 0 ? O_CREAT | O_EXCL : 0), 0600);
    void *memory = MAP_FAILED;
    struct stat found;
    if (file >= 0 && (*bytes == 0 || ftruncate(file, (off_t)*bytes) == 0) && fstat(file, &found) == 0) {
        *bytes = (size_t)found.st_size;
        memory = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    if (file >= 0)
        close(file);
    return memory == MAP_FAILED ? NULL : memory;
}

static void *make_shared(char *name, size_t capacity, size_t bytes)
{
    static int made;
    snprintf(name, capacity, "/fake_cuda.%ld.%d", (long)getpid(), made++);
    return map_shared(name, &bytes);
}

static CUresult fake_MemAlloc(CUdeviceptr *out, size_t bytes)
{
    enum {
        ALIGNMENT = 256,
        SHARED_BYTES = 2 << 20
    };
    CUresult result = begin_in_context("cuMemAlloc");
    if (result == CUDA_SUCCESS && is_due(&set.fail_alloc))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS && bytes == 0)
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    void *block = NULL;
    char name[64] = "";
    if (result == CUDA_SUCCESS && set.sharing && bytes >= SHARED_BYTES)
        block = make_shared(name, sizeof name, bytes + 2 * guard_bytes());
    else if (result == CUDA_SUCCESS && posix_memalign(&block, ALIGNMENT, bytes + 2 * guard_bytes()) != 0)
        block = NULL;
    if (result == CUDA_SUCCESS && block == NULL)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        object *made = make_object(MEMORY, &count.allocations);
        memcpy(made->shared_name, name, sizeof name);
        made->block = block;
        made->memory = made->block + guard_bytes();
        made->bytes = bytes;
        if (set.execute[0] != '\0')
            memset(made->memory, POISON, bytes); /* a GPU does not clear memory either */
        *out = (CUdeviceptr)(uintptr_t)made->memory;
    }
    return finish(result);
}

static CUresult fake_MemFree(CUdeviceptr address)
{
    CUresult result = begin("cuMemFree");
    object *found = objects;
    while (found != NULL && (found->kind != MEMORY || (CUdeviceptr)(uintptr_t)found->memory != address))
        found = found->next;
    CUresult ended = found != NULL ? end_object(found, MEMORY, &count.allocations) : misuse(CUDA_ERROR_INVALID_VALUE);
    return finish(result == CUDA_SUCCESS ? ended : result);
}

/* Of memory that the driver did not allocate it knows nothing, and says so: no misuse. */
static CUresult fake_PointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr address)
{
    CUresult result = begin("cuPointerGetAttribute");
    if (result == CUDA_SUCCESS && which != CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    if (result == CUDA_SUCCESS && find_memory(address, 1) == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *(CUmemorytype *)out = CU_MEMORYTYPE_DEVICE;
    return finish(result);
}

/* Of memory that is not pinned a driver keeps a copy until the stream comes there. */
static void queue_upload(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    step later = {.kind = UPLOAD, .to = to, .bytes = bytes, .parameters = malloc(bytes)};
    if (later.parameters == NULL)
        abort();
    memcpy(later.parameters, from, bytes);
    queue(stream, &later);
}

/* Begins a call that writes device memory by way of a stream. */
static CUresult begin_write(const char *entry, CUdeviceptr to, size_t bytes, CUstream stream)
{
    CUresult result = begin(entry);
    if (result == CUDA_SUCCESS)
        result = need_stream(stream);
    return result == CUDA_SUCCESS && find_memory(to, bytes) == NULL ? misuse(CUDA_ERROR_INVALID_VALUE) : result;
}

static CUresult fake_MemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    const CUresult result = begin_write("cuMemcpyHtoDAsync", to, bytes, stream);
    if (result == CUDA_SUCCESS && !is_waiting(stream))
        memcpy(find_memory(to, bytes), from, bytes);
    else if (result == CUDA_SUCCESS)
        queue_upload(to, from, bytes, stream);
    return finish(result);
}

static CUresult fake_MemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    CUdeviceptr address = 0;
    (void)flags;
    const CUresult result = fake_MemAlloc(&address, bytes);
    *out = (void *)(uintptr_t)address;
    return result;
}

static CUresult fake_MemFreeHost(void *memory)
{
    return fake_MemFree((CUdeviceptr)(uintptr_t)memory);
}

static CUresult fake_MemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    CUresult result = begin_write("cuMemcpyDtoDAsync", to, bytes, stream);
    if (result == CUDA_SUCCESS && find_memory(from, bytes) == NULL)
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    const step copy = {.kind = COPY, .to = to, .from = from, .bytes = bytes};
    return finish(result == CUDA_SUCCESS ? take(stream, &copy) : result);
}

/* Into memory that is not pinned it comes back when it is done. */
static CUresult fake_MemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    CUresult result = begin("cuMemcpyDtoHAsync");
    if (result == CUDA_SUCCESS)
        result = need_stream(stream);
    if (result == CUDA_SUCCESS)
        wait_for_end(stream);
    const unsigned char *memory = find_memory(from, bytes);
    if (result == CUDA_SUCCESS && memory == NULL)
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    if (result == CUDA_SUCCESS)
        memcpy(to, memory, bytes);
    return finish(result);
}

static CUresult fake_MemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream)
{
    const CUresult result = begin_write("cuMemsetD8Async", to, bytes, stream);
    const step fill = {.kind = FILL, .to = to, .value = value, .bytes = bytes};
    return finish(result == CUDA_SUCCESS ? take(stream, &fill) : result);
}

/* Lines from device memory to device memory. */
static CUresult fake_Memcpy2DAsync(const CUDA_MEMCPY2D *copy, CUstream stream)
{
    CUresult result = begin("cuMemcpy2DAsync");
    if (result == CUDA_SUCCESS)
        result = need_stream(stream);
    const int is_between_devices = copy->srcMemoryType == CU_MEMORYTYPE_DEVICE &&
                                   copy->dstMemoryType == CU_MEMORYTYPE_DEVICE && copy->srcXInBytes == 0 &&
                                   copy->srcY == 0 && copy->dstXInBytes == 0 && copy->dstY == 0;
    if (result == CUDA_SUCCESS && (!is_between_devices || (copy->Height > 1 && (copy->srcPitch < copy->WidthInBytes ||
                                                                                copy->dstPitch < copy->WidthInBytes))))
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    if (result != CUDA_SUCCESS || copy->Height == 0 || copy->WidthInBytes == 0)
        return finish(result);
    const step lines = {.kind = COPY_LINES, .lines = *copy};
    return finish(take(stream, &lines));
}

/* ---- Entries: memory of other processes ---- */

static object *memory_at(CUdeviceptr address)
{
    for (object *o = objects; o != NULL; o = o->next)
        if (o->kind == MEMORY && (CUdeviceptr)(uintptr_t)o->memory == address)
            return o;
    return NULL;
}

static CUresult fake_CtxEnablePeerAccess(CUcontext context, unsigned flags)
{
    CUresult result = begin_in_context("cuCtxEnablePeerAccess");
    (void)context, (void)flags;
    return finish(result == CUDA_SUCCESS ? CUDA_ERROR_INVALID_CONTEXT : result); /* there is one device */
}

static CUresult fake_IpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address)
{
    CUresult result = begin_in_context("cuIpcGetMemHandle");
    const object *memory = memory_at(address);
    if (result == CUDA_SUCCESS && memory == NULL)
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    if (result == CUDA_SUCCESS) {
        memset(out, 0, sizeof *out);
        memcpy(out->reserved, memory->shared_name, sizeof memory->shared_name);
    }
    return finish(result);
}

/* A driver refuses handles of its own process. */
static CUresult fake_IpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    CUresult result = begin_in_context("cuIpcOpenMemHandle");
    char own[32];
    size_t bytes = 0;
    void *block = NULL;
    snprintf(own, sizeof own, "/fake_cuda.%ld.", (long)getpid());
    handle.reserved[sizeof handle.reserved - 1] = '\0';
    if (result == CUDA_SUCCESS && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS &&
        strncmp(handle.reserved, own, strlen(own)) != 0 && handle.reserved[0] == '/')
        block = map_shared(handle.reserved, &bytes);
    if (result == CUDA_SUCCESS && block == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        object *made = make_object(MEMORY, &count.allocations);
        memcpy(made->shared_name, handle.reserved, sizeof made->shared_name);
        made->is_mapped = 1;
        made->block = block;
        made->memory = made->block + guard_bytes();
        made->bytes = bytes - 2 * guard_bytes();
        *out = (CUdeviceptr)(uintptr_t)made->memory;
    }
    return finish(result);
}

static CUresult fake_IpcCloseMemHandle(CUdeviceptr address)
{
    CUresult result = begin_in_context("cuIpcCloseMemHandle");
    object *memory = memory_at(address);
    if (result == CUDA_SUCCESS && (memory == NULL || !memory->is_mapped))
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    return finish(result == CUDA_SUCCESS ? end_object(memory, MEMORY, &count.allocations) : result);
}

/* ---- Entries: streams, graphs, events ---- */

/* The whole of an entry point that makes an object, which is its own handle. */
static CUresult create(const char *entry, object_kind kind, long *counter, void *out)
{
    const CUresult result = begin_in_context(entry);
    if (result == CUDA_SUCCESS) {
        const object *made = make_object(kind, counter);
        memcpy(out, &made, sizeof made);
    }
    return finish(result);
}

static CUresult fake_StreamCreate(CUstream *out, unsigned flags)
{
    (void)flags;
    return create("cuStreamCreate", STREAM, &count.streams, out);
}

/* All work happens at once, so that no stream comes before another. */
static CUresult fake_CtxGetStreamPriorityRange(int *least, int *greatest)
{
    CUresult result = begin_in_context("cuCtxGetStreamPriorityRange");
    if (result == CUDA_SUCCESS) {
        *least = 0;
        *greatest = -5;
    }
    return finish(result);
}

static CUresult fake_StreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    (void)flags;
    (void)priority;
    return create("cuStreamCreateWithPriority", STREAM, &count.streams, out);
}

static CUresult fake_StreamQuery(CUstream stream)
{
    CUresult result = begin("cuStreamQuery");
    if (result == CUDA_SUCCESS)
        result = need_stream(stream);
    return finish(result == CUDA_SUCCESS && is_waiting(stream) ? CUDA_ERROR_NOT_READY : result);
}

/* The whole of an entry point that ends an object. */
static CUresult destroy(const char *entry, void *handle, object_kind kind, long *counter)
{
    const CUresult result = begin(entry), ended = end_object(handle, kind, counter);
    return finish(result == CUDA_SUCCESS ? ended : result);
}

static CUresult fake_StreamDestroy(CUstream stream)
{
    return destroy("cuStreamDestroy", stream, STREAM, &count.streams);
}

static CUresult fake_StreamSynchronize(CUstream stream)
{
    CUresult result = begin("cuStreamSynchronize");
    if (result == CUDA_SUCCESS)
        result = need_stream(stream);
    if (result == CUDA_SUCCESS && is_capturing(stream))
        result = misuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (gate != NULL && *gate != gate_opens_at)
        result = misuse(CUDA_ERROR_LAUNCH_TIMEOUT); /* a real one would never return */
    gate = NULL;
    if (result == CUDA_SUCCESS)
        wait_for_end(stream);
    return finish(result);
}

static CUresult fake_StreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags)
{
    CUresult result = begin("cuStreamWriteValue32");
    if (result == CUDA_SUCCESS)
        result = need_stream(stream);
    if (result == CUDA_SUCCESS && (find_memory(address, sizeof value) == NULL || address % sizeof value != 0 || flags))
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    const step write = {.kind = WRITE_WORD, .to = address, .word = value};
    return finish(result == CUDA_SUCCESS ? take(stream, &write) : result);
}

/* What follows waits until a bit of the word is set. */
static CUresult fake_StreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags)
{
    CUresult result = begin("cuStreamWaitValue64");
    if (result == CUDA_SUCCESS)
        result = need_stream(stream);
    if (result == CUDA_SUCCESS && (find_memory(address, sizeof value) == NULL || address % sizeof value != 0 ||
                                   flags != CU_STREAM_WAIT_VALUE_AND))
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    const step wait = {.kind = WAIT_WORD, .to = address, .word = value};
    if (result == CUDA_SUCCESS && is_capturing(stream))
        record(stream_of(stream)->steps, &wait);
    else if (result == CUDA_SUCCESS)
        queue(stream, &wait);
    return finish(result);
}

/* Nothing waits here: what follows happens at once, but on the clock it happens together, once the word is written. */
static CUresult fake_StreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags)
{
    CUresult result = begin("cuStreamWaitValue32");
    if (result == CUDA_SUCCESS)
        result = need_stream(stream);
    const unsigned char *memory = find_memory(address, sizeof value);
    if (result == CUDA_SUCCESS && (memory == NULL || flags != CU_STREAM_WAIT_VALUE_EQ || is_capturing(stream)))
        result = misuse(CUDA_ERROR_INVALID_VALUE);
    if (result == CUDA_SUCCESS) {
        gate = (const volatile cuuint32_t *)(const void *)memory;
        gate_opens_at = value;
    }
    return finish(result);
}

static CUresult fake_StreamIsCapturing(CUstream stream, CUstreamCaptureStatus *out)
{
    CUresult result = begin("cuStreamIsCapturing");
    if (result == CUDA_SUCCESS)
        result = need_stream(stream);
    if (result == CUDA_SUCCESS)
        *out = is_capturing(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return finish(result);
}

static CUresult fake_StreamBeginCapture(CUstream stream, CUstreamCaptureMode capture_mode)
{
    CUresult result = begin("cuStreamBeginCapture");
    (void)capture_mode;
    if (result == CUDA_SUCCESS)
        result = need_stream(stream);
    if (result == CUDA_SUCCESS && (stream == NULL || is_capturing(stream)))
        result = misuse(CUDA_ERROR_ILLEGAL_STATE);
    if (result == CUDA_SUCCESS) {
        object *o = (object *)(void *)stream;
        o->capturing = 1;
        o->steps = make_recording();
    }
    return finish(result);
}

static CUresult fake_StreamEndCapture(CUstream stream, CUgraph *out)
{
    CUresult result = begin("cuStreamEndCapture");
    CUresult usable = need_stream(stream);
    if (usable == CUDA_SUCCESS && !is_capturing(stream))
        usable = misuse(CUDA_ERROR_ILLEGAL_STATE);
    recording *steps = NULL;
    if (usable == CUDA_SUCCESS) { /* a failed end ends the capture as well */
        object *o = (object *)(void *)stream;
        steps = o->steps;
        for (object *joined = objects; joined != NULL; joined = joined->next)
            if (joined->kind == STREAM && joined->steps == steps) {
                joined->capturing = 0;
                joined->steps = NULL;
                steps->users -= joined != o;
            }
    }
    if (result == CUDA_SUCCESS)
        result = usable;
    if (result == CUDA_SUCCESS) {
        object *graph = make_object(GRAPH, &count.graphs);
        graph->steps = steps;
        *out = (CUgraph)(void *)graph;
    } else {
        leave_recording(steps);
    }
    return finish(result);
}

static CUresult fake_GraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    CUresult result = begin("cuGraphInstantiateWithFlags");
    (void)flags;
    if (result == CUDA_SUCCESS && !is_alive(graph, GRAPH))
        result = misuse(CUDA_ERROR_INVALID_HANDLE);
    if (result == CUDA_SUCCESS) {
        object *exec = make_object(GRAPH_EXEC, &count.graph_execs);
        exec->steps = join_recording(((object *)(void *)graph)->steps);
        *out = (CUgraphExec)(void *)exec;
    }
    return finish(result);
}

static CUresult fake_GraphUpload(CUgraphExec exec, CUstream stream)
{
    CUresult result = begin_in_stream("cuGraphUpload", exec, GRAPH_EXEC, stream);
    return finish(result);
}

static size_t bytes_of_parameters(const step *s)
{
    size_t bytes = 0;
    for (int i = 0; i < s->kernel->needs.parameter_count && s->kind == LAUNCH; i++)
        bytes += s->kernel->needs.parameter_bytes[i];
    return bytes;
}

/* One step of a graph, all of whose steps follow each other in the order in which they were captured. */
static CUresult replay(CUstream stream, const step *s)
{
    if (!is_waiting(stream) && s->kind != WAIT_WORD)
        return perform(s);
    step later = *s;
    if (s->parameters != NULL && is_alive(s->kernel, KERNEL)) {
        const size_t bytes = bytes_of_parameters(s);
        later.parameters = malloc(bytes);
        if (later.parameters == NULL)
            abort();
        memcpy(later.parameters, s->parameters, bytes);
    }
    queue(stream, &later);
    return CUDA_SUCCESS;
}

static CUresult fake_GraphLaunch(CUgraphExec exec, CUstream stream)
{
    CUresult result = begin_in_stream("cuGraphLaunch", exec, GRAPH_EXEC, stream);
    if (result != CUDA_SUCCESS)
        return finish(result);
    const recording *steps = ((object *)(void *)exec)->steps;
    for (int i = 0; i < steps->count && result == CUDA_SUCCESS && set.fault == CUDA_SUCCESS; i++)
        result = replay(stream, &steps->steps[i]);
    pass_time(steps->count);
    return finish(result);
}

static CUresult fake_GraphExecDestroy(CUgraphExec exec)
{
    return destroy("cuGraphExecDestroy", exec, GRAPH_EXEC, &count.graph_execs);
}

static CUresult fake_GraphDestroy(CUgraph graph)
{
    return destroy("cuGraphDestroy", graph, GRAPH, &count.graphs);
}

static CUresult fake_EventCreate(CUevent *out, unsigned flags)
{
    (void)flags;
    return create("cuEventCreate", EVENT, &count.events, out);
}

static void record_event(object *event, CUstream stream)
{
    event->captured = is_capturing(stream) ? stream_of(stream)->steps : NULL;
    event->recorded_number = 0;
    event->at_us = now_us;
    if (is_capturing(stream) || !is_waiting(stream))
        return;
    const step later = {.kind = RECORD, .event = event};
    queue(stream, &later);
    event->recorded = stream_of(stream);
    event->recorded_number = steps_queued;
}

/* A stream that waits for a capturing one is captured, too. */
static CUresult follow(CUstream stream, const object *event)
{
    object *later = stream_of(stream);
    if (event->captured != NULL && (stream == NULL || (later->capturing && later->steps != event->captured)))
        return misuse(CUDA_ERROR_STREAM_CAPTURE_MERGE);
    if (event->captured != NULL && !later->capturing) {
        later->capturing = 1;
        later->steps = join_recording(event->captured);
    } else if (event->captured == NULL && event->recorded_number > 0) {
        const step wait = {.kind = FOLLOW, .stream = event->recorded, .awaited = event->recorded_number};
        queue(stream, &wait);
    }
    return CUDA_SUCCESS;
}

static CUresult fake_EventRecord(CUevent event, CUstream stream)
{
    CUresult result = begin_in_stream("cuEventRecord", event, EVENT, stream);
    if (result == CUDA_SUCCESS)
        record_event((object *)(void *)event, stream);
    return finish(result);
}

static CUresult fake_StreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    CUresult result = begin("cuStreamWaitEvent");
    (void)flags;
    if (result == CUDA_SUCCESS)
        result = is_alive(event, EVENT) ? need_stream(stream) : misuse(CUDA_ERROR_INVALID_HANDLE);
    return finish(result == CUDA_SUCCESS ? follow(stream, (const object *)(const void *)event) : result);
}

/* Every replay takes one millisecond, unless there is a clock. */
static CUresult fake_EventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    CUresult result = begin("cuEventElapsedTime");
    if (result == CUDA_SUCCESS && (!is_alive(start, EVENT) || !is_alive(end, EVENT)))
        result = misuse(CUDA_ERROR_INVALID_HANDLE);
    if (result == CUDA_SUCCESS)
        *milliseconds = set.launch_us > 0
                            ? (float)(1e-3 * (((object *)(void *)end)->at_us - ((object *)(void *)start)->at_us))
                            : 1.0f;
    return finish(result);
}

static CUresult fake_EventDestroy(CUevent event)
{
    return destroy("cuEventDestroy", event, EVENT, &count.events);
}

/* ---- Finding entries ---- */

static CUresult fake_DriverGetVersion(int *out)
{
    CUresult result = begin("cuDriverGetVersion");
    if (result == CUDA_SUCCESS)
        *out = set.version;
    return finish(result);
}

/* What libacromion_nccl asks for beside the library's entries (src/dist/device.c). */
#define NCCL_SIDE_ENTRIES(X)                                                                                           \
    X(CtxEnablePeerAccess, 4000)                                                                                       \
    X(CtxGetStreamPriorityRange, 5050)                                                                                 \
    X(IpcCloseMemHandle, 4010)                                                                                         \
    X(IpcGetMemHandle, 4010)                                                                                           \
    X(IpcOpenMemHandle, 11000)                                                                                         \
    X(Memcpy2DAsync, 3020)                                                                                             \
    X(StreamCreateWithPriority, 5050)                                                                                  \
    X(StreamQuery, 2000)                                                                                               \
    X(StreamWaitEvent, 3020)                                                                                           \
    X(StreamWaitValue64, 11070)                                                                                        \
    X(StreamWriteValue32, 11070)

/* The compiler checks here that each has the type that the library calls it by. */
#define TYPED(name, version) static const PFN_cu##name##_v##version typed_##name = fake_##name;
ACR__CUDA_ENTRIES(TYPED)
NCCL_SIDE_ENTRIES(TYPED)
TYPED(DriverGetVersion, 2020)
#undef TYPED

static void *find_entry(const char *name, int version)
{
#define ENTRY(entry_name, entry_version)                                                                               \
    if (strcmp(name, "cu" #entry_name) == 0 && version >= entry_version) {                                             \
        void *address;                                                                                                 \
        memcpy(&address, &typed_##entry_name, sizeof address);                                                         \
        return address;                                                                                                \
    }
    ACR__CUDA_ENTRIES(ENTRY)
    NCCL_SIDE_ENTRIES(ENTRY)
    ENTRY(DriverGetVersion, 2020)
#undef ENTRY
    return NULL;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *found)
{
    (void)flags;
    lock_state();
    int hidden = strcmp(symbol, set.hidden) == 0;
    unlock_state();
    *out = hidden ? NULL : find_entry(symbol, version);
    if (found != NULL)
        *found = *out != NULL ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
