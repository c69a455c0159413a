/* The CPU backend's thread pool.
 *
 * A call opens a job, runs lane 0 itself, closes the job and waits for the workers inside it. Workers watch `job`,
 * one atomic word
 *
 *     serial << 32 | OPEN | number of workers inside
 *
 * and enter by adding one to it while it is open, so a worker is either counted before the job closes or stays
 * out: a sleeping worker never delays a short call. Idle workers spin briefly, since calls tend to follow each
 * other, and then sleep. */
#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "error.h"

#define JOB_OPEN ((uint64_t)1 << 31)
#define JOB_INSIDE (JOB_OPEN - 1)
#define JOB_SERIAL_ONE ((uint64_t)1 << 32)

/* Polls before sleeping: roughly 50 microseconds, about what a wake-up costs. */
enum {
    SPINS = 2000
};

typedef struct worker {
    acr__pool *pool;
    pthread_t thread;
    int32_t lane;
} worker;

struct acr__pool {
    pid_t process; /* whose threads the workers are: a child of fork has none of them */
    _Atomic uint64_t job;
    atomic_flag busy; /* a caller owns the pool */

    /* Written by the owner while no worker is inside; read by workers after entering. */
    acr__lane_task *task;
    void *arg;
    _Atomic int32_t lanes;

    /* Sleeping. A sleeper announces itself, then looks at `job` once more; who changes `job` looks for sleepers
     * afterwards. Both orders are sequentially consistent, so one of the two sees the other. */
    pthread_mutex_t mutex;
    pthread_cond_t work_came, workers_left;
    _Atomic int32_t sleeping_workers;
    atomic_bool owner_sleeps, ending;

    int32_t worker_count;
    worker workers[];
};

static void pause_briefly(void)
{
#if defined __x86_64__ || defined __i386__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

/* Whether there is a job for this lane other than the one of `last_serial`. */
static bool has_work(acr__pool *pool, int32_t lane, uint64_t last_serial)
{
    uint64_t job = atomic_load(&pool->job);
    return (job & JOB_OPEN) && job >> 32 != last_serial && lane < atomic_load(&pool->lanes);
}

/* Returns with work in sight, or at the pool's end. */
static void await_work(acr__pool *pool, int32_t lane, uint64_t last_serial)
{
    for (int i = 0; i < SPINS; i++) {
        if (has_work(pool, lane, last_serial) || atomic_load(&pool->ending)) {
            return;
        }
        pause_briefly();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleeping_workers, 1);
    while (!has_work(pool, lane, last_serial) && !atomic_load(&pool->ending)) {
        pthread_cond_wait(&pool->work_came, &pool->mutex);
    }
    atomic_fetch_sub(&pool->sleeping_workers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

/* Enters the open job, if there still is one for this lane; its serial goes to *serial. */
static bool enter_job(acr__pool *pool, int32_t lane, uint64_t *serial)
{
    uint64_t job = atomic_load(&pool->job);
    while ((job & JOB_OPEN) && job >> 32 != *serial) {
        if (atomic_compare_exchange_weak(&pool->job, &job, job + 1)) {
            *serial = job >> 32;
            return lane < atomic_load(&pool->lanes);
        }
    }
    return false;
}

static void leave_job(acr__pool *pool)
{
    uint64_t before = atomic_fetch_sub(&pool->job, 1);
    if ((before & (JOB_OPEN | JOB_INSIDE)) == 1 && atomic_load(&pool->owner_sleeps)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_signal(&pool->workers_left);
        pthread_mutex_unlock(&pool->mutex);
    }
}

static void *worker_main(void *arg)
{
    worker *self = arg;
    acr__pool *pool = self->pool;
    uint64_t serial = 0;
    while (!atomic_load(&pool->ending)) {
        await_work(pool, self->lane, serial);
        uint64_t previous = serial;
        bool wanted = enter_job(pool, self->lane, &serial);
        if (wanted) {
            pool->task(pool->arg, self->lane);
        }
        if (serial != previous) {
            leave_job(pool);
        }
    }
    return NULL;
}

static void await_workers_leaving(acr__pool *pool)
{
    for (int i = 0; i < SPINS; i++) {
        if (!(atomic_load(&pool->job) & JOB_INSIDE)) {
            return;
        }
        pause_briefly();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->owner_sleeps, true);
    while (atomic_load(&pool->job) & JOB_INSIDE) {
        pthread_cond_wait(&pool->workers_left, &pool->mutex);
    }
    atomic_store(&pool->owner_sleeps, false);
    pthread_mutex_unlock(&pool->mutex);
}

bool acr__pool_try_run(acr__pool *pool, int32_t lanes, acr__lane_task *task, void *arg)
{
    if (pool->process != getpid() || atomic_flag_test_and_set(&pool->busy)) {
        return false;
    }
    pool->task = task;
    pool->arg = arg;
    atomic_store(&pool->lanes, lanes);
    /* Nobody is inside and the job is closed, so the word holds the last serial alone. Serial 0 is skipped: it
     * means "none yet". */
    uint64_t next = atomic_load(&pool->job) + JOB_SERIAL_ONE;
    next = next == 0 ? JOB_SERIAL_ONE : next;
    atomic_store(&pool->job, next | JOB_OPEN);
    if (atomic_load(&pool->sleeping_workers) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->work_came);
        pthread_mutex_unlock(&pool->mutex);
    }

    task(arg, 0);

    atomic_fetch_and(&pool->job, ~JOB_OPEN);
    await_workers_leaving(pool);
    atomic_flag_clear(&pool->busy);
    return true;
}

void acr__pool_destroy(acr__pool *pool)
{
    if (!pool) {
        return;
    }
    if (pool->process != getpid()) { /* nobody to join, and a worker may have held the mutex when the process forked */
        free(pool);
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->ending, true);
    pthread_cond_broadcast(&pool->work_came);
    pthread_mutex_unlock(&pool->mutex);
    for (int32_t i = 0; i < pool->worker_count; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    pthread_cond_destroy(&pool->workers_left);
    pthread_cond_destroy(&pool->work_came);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

/* Starts workers up to `wanted` or the first refusal, whose error number it returns. Workers take no signals:
 * those are the program's. */
static int start_workers(acr__pool *pool, int32_t wanted)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    while (pool->worker_count < wanted && !error) {
        worker *next = &pool->workers[pool->worker_count];
        next->pool = pool;
        next->lane = pool->worker_count + 1;
        error = pthread_create(&next->thread, NULL, worker_main, next);
        if (!error) {
            pool->worker_count++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

acr_status acr__pool_create(acr__pool **out, int32_t threads)
{
    size_t workers = (size_t)threads - 1;
    acr__pool *pool = calloc(1, sizeof *pool + workers * sizeof pool->workers[0]);
    if (!pool) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a pool of %d threads", (int)threads);
    }
    pool->process = getpid();
    atomic_flag_clear(&pool->busy);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work_came, NULL);
    pthread_cond_init(&pool->workers_left, NULL);
    int error = start_workers(pool, (int32_t)workers);
    if (error) {
        int32_t started = pool->worker_count;
        acr__pool_destroy(pool);
        return acr__fail(ACR_NO_MEMORY, "the system refused thread %d of %d: %s", (int)started + 2, (int)threads,
                         strerror(error));
    }
    *out = pool;
    return ACR_OK;
}
