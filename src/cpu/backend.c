/* The CPU backend: what the machine is, host memory, and kernels launched over the lanes of a thread pool. Calls
 * return when their work is done, so streams are ignored and there is nothing to wait for. */
#include "backend.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined __linux__
#include <sched.h>
#endif
#if defined __x86_64__
#include <cpuid.h>
#endif

#include "cpu/ops.h"
#include "cpu/threads.h"
#include "error.h"

enum {
    THREADS_MAX = 1024,    /* acr_ctx_options.threads */
    MEMORY_ALIGNMENT = 256 /* bytes */
};

/* Below this much work on one lane, waking others costs more than they save. */
static const double SHARE_FROM_SECONDS = 20e-6;

typedef struct cpu_device {
    acr__backend_device base;
    acr__pool *pool; /* NULL when parallel_for is the caller's, or there is one thread */
    acr_parallel_for parallel_for;
    void *parallel_user;
} cpu_device;

typedef struct cpu_prepared {
    acr__prepared base;
    int32_t lanes;        /* that share one execution */
    size_t shared_bytes;  /* of all lanes, at the workspace's beginning */
    size_t scratch_bytes; /* of each lane, behind them */
} cpu_prepared;

/* ---- What the machine is --------------------------------------------------------------------------------------- */

#if defined __x86_64__
/* Register state that the operating system saves (XCR0). */
enum {
    XCR0_AVX = 0x6,    /* xmm, ymm */
    XCR0_AVX512 = 0xe6 /* and opmask, zmm */
};

static uint64_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static uint32_t detect_isa(void)
{
    unsigned eax, ebx, ecx, edx;
    uint32_t isa = ACR__ISA_PORTABLE;
    const unsigned leaf1_need = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & leaf1_need) != leaf1_need) {
        return isa;
    }
    uint64_t saved = read_xcr0();
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & bit_AVX2) || (saved & XCR0_AVX) != XCR0_AVX) {
        return isa;
    }
    isa |= ACR__ISA_AVX2;
    const unsigned leaf7_need = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if ((ebx & leaf7_need) == leaf7_need && (saved & XCR0_AVX512) == XCR0_AVX512) {
        isa |= ACR__ISA_AVX512;
        if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax & bit_AVX512BF16) {
            isa |= ACR__ISA_AVX512BF16;
        }
    }
    return isa;
}

/* The processor's own brand string, trimmed. */
static void detect_name(char *name, size_t capacity)
{
    unsigned words[12] = {0};
    for (unsigned i = 0; i < 3; i++) {
        if (!__get_cpuid(0x80000002u + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3])) {
            snprintf(name, capacity, "x86-64 CPU");
            return;
        }
    }
    char brand[sizeof words + 1] = {0};
    memcpy(brand, words, sizeof words);
    const char *first = brand + strspn(brand, " ");
    size_t length = strlen(first);
    while (length > 0 && first[length - 1] == ' ') {
        length--;
    }
    snprintf(name, capacity, "%.*s", (int)length, first);
}
#else
static uint32_t detect_isa(void)
{
    return ACR__ISA_PORTABLE;
}

static void detect_name(char *name, size_t capacity)
{
#if defined __aarch64__
    snprintf(name, capacity, "aarch64 CPU");
#else
    snprintf(name, capacity, "CPU");
#endif
}
#endif

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The core clock, from a chain of additions that take one cycle each: of registers, since newer cores add constants
 * while they rename, several in a cycle. Virtual machines report no frequency, or a wrong one. The fastest of a few
 * short tries, since other programs can only slow it. */
static double measure_clock_hz(void)
{
    const double assumed_hz = 2e9;
#if defined __x86_64__ || defined __aarch64__
    enum {
        TRIES = 8,
        ADDITIONS = 100000
    };
    double best_hz = 0;
    for (int try = 0; try < TRIES; try++) {
        uint64_t sum = 0;
        const uint64_t step = (uint64_t)try + 3;
        double start = now_seconds();
        for (int i = 0; i < ADDITIONS / 10; i++) {
#if defined __x86_64__
            __asm__ volatile(".rept 10\n\tadd %1, %0\n\t.endr" : "+r"(sum) : "r"(step));
#else
            __asm__ volatile(".rept 10\n\tadd %0, %0, %1\n\t.endr" : "+r"(sum) : "r"(step));
#endif
        }
        double seconds = now_seconds() - start;
        double hz = seconds > 0 ? ADDITIONS / seconds : 0;
        best_hz = hz > best_hz ? hz : best_hz;
    }
    return best_hz > 0 ? best_hz : assumed_hz;
#else
    return assumed_hz;
#endif
}

/* Processors this process may run on. */
static int32_t usable_threads(void)
{
    long count = 0;
#if defined __linux__
    cpu_set_t *set = CPU_ALLOC(THREADS_MAX);
    if (set && sched_getaffinity(0, CPU_ALLOC_SIZE(THREADS_MAX), set) == 0) {
        count = CPU_COUNT_S(CPU_ALLOC_SIZE(THREADS_MAX), set);
    }
    if (set) {
        CPU_FREE(set);
    }
#endif
    if (count < 1) {
        count = sysconf(_SC_NPROCESSORS_ONLN);
    }
    return (int32_t)(count < 1 ? 1 : count > THREADS_MAX ? THREADS_MAX : count);
}

#if defined __linux__
/* A number at the beginning of a file that sysfs has of a processor's cache; -1 if there is none. */
static long read_cache_number(size_t cpu, int index, const char *file)
{
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%zu/cache/index%d/%s", cpu, index, file);
    FILE *in = fopen(path, "r");
    if (!in) {
        return -1;
    }
    char text[32];
    char *end = text;
    const long number = fgets(text, sizeof text, in) ? strtol(text, &end, 10) : -1;
    fclose(in);
    return end == text ? -1 : number;
}

/* Of all processors that this process may run on, each cache once; 0 if sysfs does not say. */
static int64_t cache_bytes_of_sysfs(void)
{
    static const int LAST_LEVELS[] = {3, 2}; /* index3 is L3, index2 L2 where there is no L3 */
    cpu_set_t usable, counted;
    if (sched_getaffinity(0, sizeof usable, &usable) != 0) {
        return 0; /* more processors than the set has places */
    }
    int64_t kib = 0;
    for (size_t i = 0; i < sizeof LAST_LEVELS / sizeof LAST_LEVELS[0] && kib == 0; i++) {
        CPU_ZERO(&counted);
        for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
            const long first = CPU_ISSET(cpu, &usable) ? read_cache_number(cpu, LAST_LEVELS[i], "shared_cpu_list") : -1;
            if (first >= 0 && first < CPU_SETSIZE && !CPU_ISSET((size_t)first, &counted)) {
                const long size = read_cache_number(cpu, LAST_LEVELS[i], "size");
                CPU_SET((size_t)first, &counted);
                kib += size > 0 ? size : 0;
            }
        }
    }
    return kib * 1024;
}
#endif

/* The C library's own answer comes second: of a virtual machine it may name the caches of the whole host. */
static int64_t last_level_cache_bytes(void)
{
#if defined __linux__
    const int64_t bytes_of_sysfs = cache_bytes_of_sysfs();
    if (bytes_of_sysfs > 0) {
        return bytes_of_sysfs;
    }
#endif
#if defined _SC_LEVEL3_CACHE_SIZE
    const int levels[] = {_SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE};
    for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++) {
        long bytes = sysconf(levels[i]);
        if (bytes > 0) {
            return bytes;
        }
    }
#endif
    return 0;
}

static void describe(acr__backend_device *base, int32_t threads)
{
    acr__device *device = &base->device;
    device->backend = ACR__CPU;
    detect_name(device->name, sizeof device->name);
    device->isa = detect_isa();
    device->threads = threads;
    device->l2_bytes = last_level_cache_bytes();
    device->mem_bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    device->clock_hz = measure_clock_hz();
    snprintf(base->text, sizeof base->text, "%s, %s, %d thread%s, %.1f GHz, %lld MiB last-level cache", device->name,
             acr__isa_widest(device->isa), (int)threads, threads == 1 ? "" : "s", device->clock_hz * 1e-9,
             (long long)(device->l2_bytes >> 20));
}

/* ---- Open, close ----------------------------------------------------------------------------------------------- */

static void cpu_close(acr__backend_device *base)
{
    if (base) {
        cpu_device *cpu = (cpu_device *)base;
        acr__pool_destroy(cpu->pool);
        free(cpu);
    }
}

static acr_status cpu_open(acr__backend_device **out, const acr_ctx_options *options)
{
    if (options->device != 0) {
        return acr__fail(ACR_NO_DEVICE, "cpu device %d: there is only device 0", (int)options->device);
    }
    if (options->threads > THREADS_MAX) {
        return acr__fail(ACR_INVALID, "threads is %u: at most %d", (unsigned)options->threads, (int)THREADS_MAX);
    }
    cpu_device *cpu = calloc(1, sizeof *cpu);
    if (!cpu) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a cpu device");
    }
    int32_t threads = options->threads ? (int32_t)options->threads : usable_threads();
    cpu->base.backend = &acr__backend_cpu;
    cpu->parallel_for = options->parallel_for;
    cpu->parallel_user = options->parallel_user;
    describe(&cpu->base, threads);
    if (!cpu->parallel_for && threads > 1) {
        acr_status status = acr__pool_create(&cpu->pool, threads);
        if (status != ACR_OK) {
            cpu_close(&cpu->base);
            return status;
        }
    }
    *out = &cpu->base;
    return ACR_OK;
}

/* ---- Kernels --------------------------------------------------------------------------------------------------- */

/* Items of a kernel that does not count its own: tiles of rows of a head, of a backward pass also tiles of keys. */
static int64_t tiles_of(const acr__kernel *kernel, const acr_problem *problem)
{
    int64_t tiles = problem->batch * problem->q_heads * ((problem->q_len + kernel->q_tile - 1) / kernel->q_tile);
    if (problem->pass == ACR_BACKWARD)
        tiles += problem->batch * problem->kv_heads * ((problem->kv_len + kernel->q_tile - 1) / kernel->q_tile);
    return tiles;
}

/* How many lanes share an execution: no more than there are work items, and one when the work is too short to
 * share. */
static int32_t choose_lanes(const acr__kernel *kernel, const acr_problem *problem, const acr__device *device)
{
    acr__device one_thread = *device;
    one_thread.threads = 1;
    if (kernel->cost(problem, &one_thread) < SHARE_FROM_SECONDS) {
        return 1;
    }
    const int64_t items = kernel->items ? kernel->items(problem) : tiles_of(kernel, problem);
    return (int32_t)(items < device->threads ? items : device->threads);
}

static acr_status cpu_prepare(acr__prepared **out, acr__backend_device *device, const acr__kernel *kernel,
                              const acr_problem *problem)
{
    cpu_prepared *prepared = calloc(1, sizeof *prepared);
    if (!prepared) {
        return acr__fail(ACR_NO_MEMORY, "no memory to prepare kernel %s", kernel->name);
    }
    prepared->base.device = device;
    prepared->base.kernel = kernel;
    prepared->base.problem = *problem;
    prepared->base.workspace_bytes = kernel->workspace ? kernel->workspace(problem, &device->device) : 0;
    prepared->shared_bytes = kernel->shared ? kernel->shared(problem) : 0;
    prepared->scratch_bytes =
        (prepared->base.workspace_bytes - prepared->shared_bytes) / (size_t)device->device.threads;
    prepared->lanes = choose_lanes(kernel, problem, &device->device);
    *out = &prepared->base;
    return ACR_OK;
}

static void cpu_release(acr__prepared *prepared)
{
    free(prepared);
}

/* One execution as its lanes see it. */
typedef struct lane_call {
    const fwd_args *args;
    const cpu_prepared *prepared;
    int32_t lanes;
    _Atomic int64_t queue;
} lane_call;

static void run_lane(void *arg, int32_t lane)
{
    lane_call *call = arg;
    const cpu_prepared *prepared = call->prepared;
    char *scratch = (char *)call->args->workspace + prepared->shared_bytes + (size_t)lane * prepared->scratch_bytes;
    prepared->base.kernel->run(call->args, lane, call->lanes, &call->queue, scratch);
}

static void run_indexed_lane(void *arg, size_t index)
{
    run_lane(arg, (int32_t)index);
}

/* Runs a task by several threads, when it has several lanes and they are free; otherwise returns false and runs
 * nothing. indexed: the same task for the caller's own thread pool. */
static bool share_lanes(cpu_device *cpu, int32_t lanes, acr__lane_task *task, acr_task indexed, void *arg)
{
    if (lanes <= 1)
        return false;
    if (!cpu->parallel_for)
        return acr__pool_try_run(cpu->pool, lanes, task, arg);
    cpu->parallel_for(cpu->parallel_user, (size_t)lanes, indexed, arg);
    return true;
}

/* Looks at what a GPU's caller alone could know. */
static acr_status check_scales(const fwd_args *args)
{
    const struct {
        const char *name;
        const float *values;
    } scales[] = {{"q_scales", args->q_scales}, {"k_scales", args->k_scales}, {"v_scales", args->v_scales}};
    for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++) {
        const float *values = scales[s].values;
        for (int64_t i = 0; values && i < (int64_t)args->batch * args->kv_heads; i++)
            if (!(values[i] > 0.0f) || !isfinite(values[i]))
                return acr__fail(ACR_INVALID, "buffers.%s[%d, %d] is %g, must be positive and finite", scales[s].name,
                                 (int)(i / args->kv_heads), (int)(i % args->kv_heads), (double)values[i]);
    }
    return ACR_OK;
}

static acr_status cpu_launch(const acr__prepared *base, const fwd_args *args, uint32_t flags, void *stream)
{
    (void)flags; /* ACR_OVERLAP_PREVIOUS: the previous kernel has always ended */
    (void)stream;
    const acr_status status = check_scales(args);
    if (status != ACR_OK)
        return status;
    const cpu_prepared *prepared = (const cpu_prepared *)base;
    cpu_device *cpu = (cpu_device *)base->device;
    lane_call call = {.args = args, .prepared = prepared, .lanes = prepared->lanes};
    if (!share_lanes(cpu, call.lanes, run_lane, run_indexed_lane, &call)) {
        call.lanes = 1; /* short work, or the pool is at another thread's service: this thread does it all */
        run_lane(&call, 0);
    }
    return ACR_OK;
}

/* ---- Operations beside attention ------------------------------------------------------------------------------- */

/* One call as its lanes see it. */
typedef struct op_lanes {
    const acr__op_call *call;
    int64_t blocks;
    _Atomic int64_t queue;
} op_lanes;

static void run_op_lane(void *arg, int32_t lane)
{
    op_lanes *lanes = arg;
    (void)lane;
    if (lanes->call->op == ACR__OP_MERGE)
        acr__cpu_merge(lanes->call, lanes->blocks, &lanes->queue);
    else
        acr__cpu_append(lanes->call, lanes->blocks, &lanes->queue);
}

static void run_indexed_op_lane(void *arg, size_t index)
{
    run_op_lane(arg, (int32_t)index);
}

static acr_status cpu_run_op(acr__backend_device *device, const acr__op_call *call, void *stream)
{
    (void)stream;
    const acr_status status = call->op == ACR__OP_APPEND ? acr__cpu_append_check(call) : ACR_OK;
    if (status != ACR_OK)
        return status;
    op_lanes shared = {
        .call = call, .blocks = call->op == ACR__OP_MERGE ? acr__cpu_merge_blocks(call) : acr__cpu_append_blocks(call)};
    const int32_t threads = device->device.threads, lanes = shared.blocks < threads ? (int32_t)shared.blocks : threads;
    if (!share_lanes((cpu_device *)device, lanes, run_op_lane, run_indexed_op_lane, &shared))
        run_op_lane(&shared, 0);
    return ACR_OK;
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

static acr_status cpu_mem_alloc(acr__backend_device *device, size_t bytes, void **out)
{
    (void)device;
    size_t rounded = (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
    void *memory = rounded < bytes ? NULL : aligned_alloc(MEMORY_ALIGNMENT, rounded ? rounded : MEMORY_ALIGNMENT);
    if (!memory) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %zu bytes", bytes);
    }
    *out = memory;
    return ACR_OK;
}

static void cpu_mem_free(acr__backend_device *device, void *memory)
{
    (void)device;
    free(memory);
}

static acr_status cpu_mem_copy(acr__backend_device *device, void *to, const void *from, size_t bytes)
{
    (void)device;
    memcpy(to, from, bytes);
    return ACR_OK;
}

static acr_status cpu_mem_fill(acr__backend_device *device, void *memory, unsigned char value, size_t bytes)
{
    (void)device;
    memset(memory, value, bytes);
    return ACR_OK;
}

static acr_status cpu_mem_zero_async(acr__backend_device *device, void *memory, size_t bytes, void *stream)
{
    (void)stream;
    return cpu_mem_fill(device, memory, 0, bytes);
}

/* ---- Order and time -------------------------------------------------------------------------------------------- */

static acr_status cpu_is_capturing(acr__backend_device *device, void *stream, int *out)
{
    (void)device;
    (void)stream;
    *out = 0;
    return ACR_OK;
}

static acr_status cpu_synchronize(acr__backend_device *device)
{
    (void)device;
    return ACR_OK;
}

/* ---- Timing ---- */

/* A CPU records nothing: it calls the work again at every replay. */
typedef struct cpu_graph {
    acr__graph base;
    acr__enqueue *enqueue;
    void *arg;
    unsigned char *flush; /* cold mode: memory to write, NULL = not needed yet */
} cpu_graph;

static acr_status cpu_graph_record(acr__graph **out, acr__backend_device *device, acr__enqueue *enqueue, void *arg,
                                   int launches)
{
    cpu_graph *graph = malloc(sizeof *graph);
    if (!graph) {
        return acr__fail(ACR_NO_MEMORY, "recording %d launches: no host memory", launches);
    }
    *graph = (cpu_graph){{device, launches}, enqueue, arg, NULL};
    *out = &graph->base;
    return ACR_OK;
}

static acr_status cpu_graph_adopt(acr__graph **out, acr__backend_device *device, void *cuda_graph, int launches)
{
    (void)out;
    (void)device;
    (void)cuda_graph;
    (void)launches;
    return acr__fail(ACR_UNSUPPORTED, "the cpu backend cannot replay CUDA graphs");
}

static acr_status replay_once(const cpu_graph *graph, double *seconds)
{
    double start = now_seconds();
    for (int i = 0; i < graph->base.launches; i++) {
        acr_status status = graph->enqueue(graph->arg, NULL);
        if (status != ACR_OK) {
            return status;
        }
    }
    *seconds = (now_seconds() - start) / graph->base.launches;
    return ACR_OK;
}

static acr_status cpu_graph_time(acr__graph *graph, int replays, double *seconds)
{
    double warm_up;
    acr_status status = replay_once((const cpu_graph *)graph, &warm_up);
    for (int i = 0; i < replays && status == ACR_OK; i++) {
        status = replay_once((const cpu_graph *)graph, &seconds[i]);
    }
    return status;
}

/* Writes memory of twice the size of the last-level cache. */
static void flush_cache(unsigned char *memory, size_t bytes, int value)
{
    memset(memory, value, bytes);
    atomic_signal_fence(memory_order_seq_cst); /* the compiler must not leave the writing out */
}

static acr_status cpu_graph_time_cold(acr__graph *graph, int samples, double *seconds)
{
    const size_t bytes = 2 * (size_t)graph->device->device.l2_bytes;
    if (bytes == 0)
        return acr__fail(ACR_UNSUPPORTED, "cold mode: the size of the last-level cache is unknown");
    cpu_graph *g = (cpu_graph *)graph;
    if (!g->flush && !(g->flush = malloc(bytes)))
        return acr__fail(ACR_NO_MEMORY, "no memory for %zu bytes to empty the cache with", bytes);
    double first;
    acr_status status = ACR_OK;
    for (int i = -1; i < samples && status == ACR_OK; i++) {
        flush_cache(g->flush, bytes, i & 0xff);
        status = replay_once(g, i < 0 ? &first : &seconds[i]);
    }
    return status;
}

static acr_status cpu_graph_time_prepared(acr__graph *graph, acr__enqueue *prepare, void *arg, double *seconds)
{
    acr_status status = prepare(arg, NULL);
    return status == ACR_OK ? replay_once((const cpu_graph *)graph, seconds) : status;
}

static acr_status cpu_copy_on_device(acr__backend_device *device, void *to, const void *from, size_t bytes,
                                     void *stream)
{
    (void)device, (void)stream;
    memcpy(to, from, bytes);
    return ACR_OK;
}

static acr_status cpu_fill_on_device(acr__backend_device *device, void *memory, unsigned char value, size_t bytes,
                                     void *stream)
{
    (void)device, (void)stream;
    memset(memory, value, bytes);
    return ACR_OK;
}

static void cpu_graph_free(acr__graph *graph)
{
    if (graph)
        free(((cpu_graph *)graph)->flush);
    free(graph);
}

static acr_status cpu_time(acr__backend_device *device, acr__enqueue *enqueue, void *arg, int launches, int replays,
                           double *seconds)
{
    cpu_graph graph = {{device, launches}, enqueue, arg, NULL};
    return cpu_graph_time(&graph.base, replays, seconds);
}

static acr_status cpu_launch_bare(const acr__prepared *prepared, const fwd_args *args, void *stream, int launches,
                                  double *seconds)
{
    (void)args, (void)stream, (void)launches, (void)seconds;
    return acr__fail(ACR_UNSUPPORTED, "%s: a cpu kernel is called, no driver launches it", prepared->kernel->name);
}

static acr_status cpu_within(acr__backend_device *device, acr__enqueue *work, void *arg)
{
    (void)device;
    return work(arg, NULL);
}

static const acr__timing timing = {
    .graph_record = cpu_graph_record,
    .graph_adopt = cpu_graph_adopt,
    .graph_time = cpu_graph_time,
    .graph_time_cold = cpu_graph_time_cold,
    .graph_time_prepared = cpu_graph_time_prepared,
    .graph_free = cpu_graph_free,
    .copy_on_device = cpu_copy_on_device,
    .fill_on_device = cpu_fill_on_device,
    .launch_bare = cpu_launch_bare,
    .within = cpu_within,
};

const acr__backend acr__backend_cpu = {
    .name = "cpu",
    .id = ACR__CPU,
    .open = cpu_open,
    .close = cpu_close,
    .prepare = cpu_prepare,
    .release = cpu_release,
    .launch = cpu_launch,
    .run_op = cpu_run_op,
    .mem_alloc = cpu_mem_alloc,
    .mem_free = cpu_mem_free,
    .mem_upload = cpu_mem_copy,
    .mem_download = cpu_mem_copy,
    .mem_fill = cpu_mem_fill,
    .mem_zero_async = cpu_mem_zero_async,
    .is_capturing = cpu_is_capturing,
    .synchronize = cpu_synchronize,
    .time = cpu_time,
    .timing = &timing,
};
