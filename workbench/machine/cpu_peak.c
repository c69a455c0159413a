/* CPU peaks, see cpu_peak.h. The loops are plain vector arithmetic; -ffp-contract=fast fuses a * b + c. */
#include "cpu_peak.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/parallel.h"
#include "base/progress.h"
#include "internal.h"

enum {
    CHAINS = 12,
    ROUNDS = 20000
}; /* 12 independent chains cover a latency of 4 to 6 cycles on two ports */

/* Runs ROUNDS multiply-adds on CHAINS vectors of `bytes`; returns something that depends on all of them. */
#define FMA_LOOP(name, bytes, isa_attribute)                                                                           \
    isa_attribute static float name(void)                                                                              \
    {                                                                                                                  \
        typedef float vector __attribute__((vector_size(bytes)));                                                      \
        vector sums[CHAINS];                                                                                           \
        memset(sums, 0, sizeof sums);                                                                                  \
        volatile float factor_source = 0.999f, term_source = 1e-3f;                                                    \
        const vector factor = (vector){0} + factor_source, term = (vector){0} + term_source;                           \
        for (int round = 0; round < ROUNDS; ++round) {                                                                 \
            for (int chain = 0; chain < CHAINS; ++chain) {                                                             \
                sums[chain] = sums[chain] * factor + term;                                                             \
            }                                                                                                          \
        }                                                                                                              \
        float total = 0;                                                                                               \
        for (int chain = 0; chain < CHAINS; ++chain) {                                                                 \
            total += sums[chain][0];                                                                                   \
        }                                                                                                              \
        return total;                                                                                                  \
    }

/* Reads `count` blocks of READ_BLOCK_BYTES once; returns something that depends on all of them. Four chains of the
 * instruction set's own vectors: what does not fit its registers is spilled, and the loop then waits for that instead
 * of memory. */
#define READ_LOOP(name, bytes, isa_attribute)                                                                          \
    isa_attribute static uint64_t name(const unsigned char *memory, size_t count)                                      \
    {                                                                                                                  \
        typedef uint64_t vector __attribute__((vector_size(bytes)));                                                   \
        enum {                                                                                                         \
            VECTORS = READ_BLOCK_BYTES / (bytes)                                                                       \
        };                                                                                                             \
        const vector *first = (const vector *)(const void *)memory;                                                    \
        vector a = {0}, b = {0}, c = {0}, d = {0};                                                                     \
        for (size_t i = 0; i < count * VECTORS; i += 4) {                                                              \
            a += first[i];                                                                                             \
            b += first[i + 1];                                                                                         \
            c += first[i + 2];                                                                                         \
            d += first[i + 3];                                                                                         \
        }                                                                                                              \
        const vector total = a + b + c + d;                                                                            \
        uint64_t sum = 0;                                                                                              \
        for (size_t i = 0; i < sizeof total / sizeof sum; ++i) {                                                       \
            sum += total[i];                                                                                           \
        }                                                                                                              \
        return sum;                                                                                                    \
    }

enum {
    READ_BLOCK_BYTES = 256
};

FMA_LOOP(fma_loop_portable, 16, )
READ_LOOP(read_loop_portable, 16, )
#if defined __x86_64__
FMA_LOOP(fma_loop_avx2, 32, __attribute__((target("avx2,fma"))))
READ_LOOP(read_loop_avx2, 32, __attribute__((target("avx2"))))
FMA_LOOP(fma_loop_avx512, 64, __attribute__((target("avx512f"))))
READ_LOOP(read_loop_avx512, 64, __attribute__((target("avx512f"))))
#endif

static double thread_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double peak_rate(const peak_part *parts, uint32_t count)
{
    double rate = 0;
    for (uint32_t i = 0; i < count; ++i) {
        rate += parts[i].cpu_s > 0 ? parts[i].amount / parts[i].cpu_s : 0;
    }
    return rate;
}

typedef struct fma_work {
    float (*loop)(void);
    double until_s;
    peak_part *parts; /* by thread */
    double ops_per_loop;
} fma_work;

static void fma_task(void *arg, int64_t index)
{
    const fma_work *work = arg;
    const double started_s = thread_s();
    volatile float sink = 0;
    double ops = 0;
    do {
        sink = work->loop();
        ops += work->ops_per_loop;
    } while (monotonic_s() < work->until_s);
    (void)sink;
    work->parts[index] = (peak_part){ops, thread_s() - started_s};
}

enum {
    THREADS_MAX = 1024
};
/* The best of many short attempts: on a shared machine most are disturbed. */
enum {
    ATTEMPTS = 12
};
static const double measure_s = 0.015;

double cpu_peak_flops(uint32_t isa, uint32_t threads, double *share)
{
    peak_part parts[THREADS_MAX] = {{0}};
    fma_work work = {.loop = fma_loop_portable, .parts = parts};
    double lanes = 4;
#if defined __x86_64__
    if (isa & ACR__ISA_AVX512) {
        work.loop = fma_loop_avx512;
        lanes = 16;
    } else if (isa & ACR__ISA_AVX2) {
        work.loop = fma_loop_avx2;
        lanes = 8;
    }
#else
    (void)isa;
#endif
    work.ops_per_loop = 2.0 * lanes * CHAINS * ROUNDS;
    threads = threads > THREADS_MAX ? THREADS_MAX : threads;
    double best = 0, ran_s = 0, passed_s = 0;
    for (int attempt = 0; attempt < ATTEMPTS; ++attempt) {
        const double started_s = monotonic_s();
        work.until_s = started_s + measure_s;
        parallel_for(threads, threads, fma_task, &work);
        const double rate = peak_rate(parts, threads);
        best = rate > best ? rate : best;
        passed_s += (monotonic_s() - started_s) * threads;
        for (uint32_t i = 0; i < threads; ++i) {
            ran_s += parts[i].cpu_s;
        }
    }
    *share = ran_s / passed_s;
    return best;
}

typedef struct read_work {
    uint64_t (*loop)(const unsigned char *memory, size_t count);
    const unsigned char *memory;
    size_t bytes_per_thread;
    double until_s;
    peak_part *parts; /* by thread */
} read_work;

static void read_task(void *arg, int64_t index)
{
    const read_work *work = arg;
    const unsigned char *first = work->memory + (size_t)index * work->bytes_per_thread;
    const double started_s = thread_s();
    volatile uint64_t sink = 0;
    double bytes = 0;
    do {
        sink = work->loop(first, work->bytes_per_thread / READ_BLOCK_BYTES);
        bytes += (double)work->bytes_per_thread;
    } while (monotonic_s() < work->until_s);
    (void)sink;
    work->parts[index] = (peak_part){bytes, thread_s() - started_s};
}

double cpu_peak_read_bytes_per_s(uint32_t isa, size_t bytes, uint32_t threads)
{
    peak_part parts[THREADS_MAX] = {{0}};
    threads = threads > THREADS_MAX ? THREADS_MAX : threads;
    size_t share = (bytes / threads + READ_BLOCK_BYTES) / READ_BLOCK_BYTES * READ_BLOCK_BYTES;
    unsigned char *memory = aligned_alloc(READ_BLOCK_BYTES, share * threads);
    if (!memory) {
        return 0;
    }
    memset(memory, 1, share * threads);
    read_work work = {.loop = read_loop_portable, .memory = memory, .bytes_per_thread = share, .parts = parts};
#if defined __x86_64__
    work.loop = isa & ACR__ISA_AVX512 ? read_loop_avx512 : isa & ACR__ISA_AVX2 ? read_loop_avx2 : read_loop_portable;
#else
    (void)isa;
#endif
    double best = 0;
    for (int attempt = 0; attempt < ATTEMPTS; ++attempt) {
        work.until_s = monotonic_s() + measure_s;
        parallel_for(threads, threads, read_task, &work);
        const double rate = peak_rate(parts, threads);
        best = rate > best ? rate : best;
    }
    free(memory);
    return best;
}
