/* A fake NCCL that exchanges memory of the host, and so the fake driver's (ptxvm/driver/fake_driver.h), between threads
 * and processes: each pair of ranks has a pipe in shared memory. Streams mean nothing to it, as to that driver: what is
 * enqueued happens at once. As the real one with blocking = 0, calls come back at once; a thread of the communicator
 * does the transfers, and ncclCommGetAsyncError says NCCL_IN_PROGRESS until they have ended. Calls that do not fit each
 * other (a message of another length) are an error on every rank, as is the abort of any rank. A rank that does not
 * come leaves the others in progress for ever: the time limit is the caller's. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "dist/nccl.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    PIPE_BYTES = 16384,
    OPS_MAX = 4096
};

typedef struct fake_pipe {
    atomic_size_t written, read; /* bytes so far */
    char data[PIPE_BYTES];
} fake_pipe;

typedef struct world {
    atomic_int ranks, joined, aborted;
    fake_pipe pipes[]; /* [from * ranks + to] */
} world;

typedef struct op {
    int is_send, peer;
    char *data;
    size_t count, done;
    int has_header; /* the length is written, or was read */
} op;

struct dist_comm {
    char name[64];
    world *world;
    size_t bytes;
    int rank, ranks;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int wanted; /* 1 = transfers, 2 = end; guarded by lock */
    atomic_int state, stopping;
    char text[128];
    op ops[OPS_MAX];
    int op_count;
};

static _Thread_local struct {
    int depth;
    dist_comm *comm; /* of the calls of this group */
} group;

/* ---- Pipes ------------------------------------------------------------------------------------------------------- */

static size_t pipe_write(fake_pipe *p, const char *data, size_t count)
{
    const size_t at = atomic_load(&p->written), space = PIPE_BYTES - (at - atomic_load(&p->read));
    count = count < space ? count : space;
    for (size_t i = 0; i < count; i++)
        p->data[(at + i) % PIPE_BYTES] = data[i];
    atomic_store(&p->written, at + count);
    return count;
}

static size_t pipe_read(fake_pipe *p, char *data, size_t count)
{
    const size_t at = atomic_load(&p->read), there = atomic_load(&p->written) - at;
    count = count < there ? count : there;
    for (size_t i = 0; i < count; i++)
        data[i] = p->data[(at + i) % PIPE_BYTES];
    atomic_store(&p->read, at + count);
    return count;
}

/* ---- The thread of a communicator -------------------------------------------------------------------------------- */

/* Takes one step of a transfer: 1 = something moved, 0 = nothing, -1 = the other side has another length. */
static int step(dist_comm *c, op *o)
{
    const int from = o->is_send ? c->rank : o->peer, to = o->is_send ? o->peer : c->rank;
    fake_pipe *p = &c->world->pipes[from * c->ranks + to];
    if (!o->has_header) {
        size_t length = o->count;
        if (o->is_send && PIPE_BYTES - (atomic_load(&p->written) - atomic_load(&p->read)) < sizeof length)
            return 0;
        if (!o->is_send && atomic_load(&p->written) - atomic_load(&p->read) < sizeof length)
            return 0;
        if (o->is_send)
            pipe_write(p, (const char *)&length, sizeof length);
        else
            pipe_read(p, (char *)&length, sizeof length);
        o->has_header = 1;
        if (length == o->count)
            return 1;
        snprintf(c->text, sizeof c->text, "rank %d sends %zu bytes, rank %d waits for %zu", from, length, to, o->count);
        return -1;
    }
    const size_t moved = o->is_send ? pipe_write(p, o->data + o->done, o->count - o->done)
                                    : pipe_read(p, o->data + o->done, o->count - o->done);
    o->done += moved;
    return moved > 0;
}

static int is_over(const op *o)
{
    return o->has_header && o->done == o->count;
}

/* One look at every transfer; those between the same two ranks keep their order. Returns how many are left, or -1. */
static int look(dist_comm *c, int *moved)
{
    char waits[2][ACR_GROUP_RANKS_MAX] = {{0}};
    int left = 0;
    for (int i = 0; i < c->op_count; i++) {
        op *o = &c->ops[i];
        if (is_over(o) || waits[o->is_send][o->peer]) {
            left += !is_over(o);
            continue;
        }
        const int stepped = step(c, o);
        if (stepped < 0)
            return -1;
        *moved |= stepped;
        if (!is_over(o)) {
            waits[o->is_send][o->peer] = 1;
            left++;
        }
    }
    return left;
}

static void doze(int *idle)
{
    if (++*idle < 50)
        sched_yield();
    else
        nanosleep(&(struct timespec){0, 100000}, NULL);
}

static nccl_result transfer(dist_comm *c)
{
    for (int idle = 0;;) {
        int moved = 0;
        if (atomic_load(&c->stopping))
            return NCCL_SYSTEM_ERROR;
        if (atomic_load(&c->world->aborted))
            return NCCL_REMOTE_ERROR;
        const int left = look(c, &moved);
        if (left == 0)
            return NCCL_SUCCESS;
        if (left < 0) {
            atomic_store(&c->world->aborted, 1);
            return NCCL_INVALID_USAGE;
        }
        if (moved)
            idle = 0;
        else
            doze(&idle);
    }
}

static nccl_result join_world(dist_comm *c)
{
    int none = 0, idle = 0;
    if (!atomic_compare_exchange_strong(&c->world->ranks, &none, c->ranks) && none != c->ranks)
        return NCCL_INVALID_ARGUMENT;
    atomic_fetch_add(&c->world->joined, 1);
    while (atomic_load(&c->world->joined) < c->ranks) {
        if (atomic_load(&c->stopping))
            return NCCL_SYSTEM_ERROR;
        if (atomic_load(&c->world->aborted))
            return NCCL_REMOTE_ERROR;
        doze(&idle);
    }
    shm_unlink(c->name); /* the first to come here succeeds */
    return NCCL_SUCCESS;
}

static void *serve(void *comm)
{
    dist_comm *c = comm;
    atomic_store(&c->state, (int)join_world(c));
    for (;;) {
        pthread_mutex_lock(&c->lock);
        while (!c->wanted)
            pthread_cond_wait(&c->wake, &c->lock);
        const int wanted = c->wanted;
        if (wanted == 1)
            c->wanted = 0;
        pthread_mutex_unlock(&c->lock);
        if (wanted == 2)
            return NULL;
        const nccl_result result = transfer(c);
        c->op_count = 0;
        atomic_store(&c->state, (int)result);
    }
}

static void want(dist_comm *c, int what)
{
    pthread_mutex_lock(&c->lock);
    c->wanted = what;
    pthread_cond_signal(&c->wake);
    pthread_mutex_unlock(&c->lock);
}

static void end(dist_comm *c)
{
    atomic_store(&c->stopping, 1);
    want(c, 2);
    pthread_join(c->thread, NULL);
    munmap(c->world, c->bytes);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->wake);
    free(c);
}

/* ---- NCCL's entries ---------------------------------------------------------------------------------------------- */

EXPORT nccl_result ncclGetVersion(int *version);
EXPORT nccl_result ncclGetVersion(int *version)
{
    *version = 22805;
    return NCCL_SUCCESS;
}

EXPORT const char *ncclGetLastError(const dist_comm *comm);
EXPORT const char *ncclGetLastError(const dist_comm *comm)
{
    return atomic_load(&comm->state) == NCCL_IN_PROGRESS ? "" : comm->text;
}

EXPORT nccl_result ncclGetUniqueId(acr_group_id *id);
EXPORT nccl_result ncclGetUniqueId(acr_group_id *id)
{
    static atomic_int made;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "/fake_nccl.%ld.%d.%ld", (long)getpid(), atomic_fetch_add(&made, 1),
             (long)t.tv_nsec);
    return NCCL_SUCCESS;
}

EXPORT nccl_result ncclCommInitRankConfig(dist_comm **comm, int ranks, acr_group_id id, int rank, nccl_config *config);
EXPORT nccl_result ncclCommInitRankConfig(dist_comm **comm, int ranks, acr_group_id id, int rank, nccl_config *config)
{
    if (config->magic != 0xcafebeef || config->size != sizeof *config || config->blocking != 0)
        return NCCL_INVALID_ARGUMENT;
    dist_comm *c = calloc(1, sizeof *c);
    if (!c)
        return NCCL_SYSTEM_ERROR;
    snprintf(c->name, sizeof c->name, "%.63s", id.bytes);
    c->rank = rank;
    c->ranks = ranks;
    c->bytes = sizeof(world) + (size_t)(ranks * ranks) * sizeof(fake_pipe);
    atomic_init(&c->state, NCCL_IN_PROGRESS);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->wake, NULL);
    const int file = shm_open(c->name, O_CREAT | O_RDWR, 0600);
    void *memory = MAP_FAILED;
    if (file >= 0 && ftruncate(file, (off_t)c->bytes) == 0)
        memory = mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    c->world = memory == MAP_FAILED ? NULL : memory;
    if (!c->world || pthread_create(&c->thread, NULL, serve, c) != 0) {
        if (c->world)
            munmap(c->world, c->bytes);
        free(c);
        return NCCL_SYSTEM_ERROR;
    }
    *comm = c;
    return NCCL_IN_PROGRESS;
}

EXPORT nccl_result ncclCommDestroy(dist_comm *comm);
EXPORT nccl_result ncclCommDestroy(dist_comm *comm)
{
    end(comm);
    return NCCL_SUCCESS;
}

EXPORT nccl_result ncclCommAbort(dist_comm *comm);
EXPORT nccl_result ncclCommAbort(dist_comm *comm)
{
    atomic_store(&comm->world->aborted, 1);
    shm_unlink(comm->name);
    end(comm);
    return NCCL_SUCCESS;
}

EXPORT nccl_result ncclCommGetAsyncError(dist_comm *comm, nccl_result *error);
EXPORT nccl_result ncclCommGetAsyncError(dist_comm *comm, nccl_result *error)
{
    const int state = atomic_load(&comm->state);
    *error = state == NCCL_SUCCESS && atomic_load(&comm->world->aborted) ? NCCL_REMOTE_ERROR : (nccl_result)state;
    return NCCL_SUCCESS;
}

EXPORT nccl_result ncclCommCount(const dist_comm *comm, int *count);
EXPORT nccl_result ncclCommCount(const dist_comm *comm, int *count)
{
    *count = comm->ranks;
    return NCCL_SUCCESS;
}

EXPORT nccl_result ncclCommUserRank(const dist_comm *comm, int *rank);
EXPORT nccl_result ncclCommUserRank(const dist_comm *comm, int *rank)
{
    *rank = comm->rank;
    return NCCL_SUCCESS;
}

static nccl_result add(dist_comm *c, int is_send, int peer, void *data, size_t count, int type)
{
    if (group.depth == 0 || type != NCCL_UINT8 || peer < 0 || peer >= c->ranks || c->op_count == OPS_MAX)
        return NCCL_INVALID_USAGE;
    group.comm = c;
    c->ops[c->op_count++] = (op){.is_send = is_send, .peer = peer, .data = data, .count = count};
    return NCCL_SUCCESS;
}

EXPORT nccl_result ncclSend(const void *data, size_t count, int type, int peer, dist_comm *comm, void *stream);
EXPORT nccl_result ncclSend(const void *data, size_t count, int type, int peer, dist_comm *comm, void *stream)
{
    (void)stream;
    return add(comm, 1, peer, (void *)(uintptr_t)data, count, type);
}

EXPORT nccl_result ncclRecv(void *data, size_t count, int type, int peer, dist_comm *comm, void *stream);
EXPORT nccl_result ncclRecv(void *data, size_t count, int type, int peer, dist_comm *comm, void *stream)
{
    (void)stream;
    return add(comm, 0, peer, data, count, type);
}

EXPORT nccl_result ncclAllGather(const void *send, void *receive, size_t count, int type, dist_comm *comm,
                                 void *stream);
EXPORT nccl_result ncclAllGather(const void *send, void *receive, size_t count, int type, dist_comm *comm, void *stream)
{
    (void)stream;
    char *to = receive;
    nccl_result result = NCCL_SUCCESS;
    if (send != to + (size_t)comm->rank * count)
        memcpy(to + (size_t)comm->rank * count, send, count);
    for (int r = 0; r < comm->ranks && result == NCCL_SUCCESS; r++) {
        if (r == comm->rank)
            continue;
        result = add(comm, 1, r, (void *)(uintptr_t)send, count, type);
        if (result == NCCL_SUCCESS)
            result = add(comm, 0, r, to + (size_t)r * count, count, type);
    }
    return result;
}

EXPORT nccl_result ncclGroupStart(void);
EXPORT nccl_result ncclGroupStart(void)
{
    group.depth++;
    return NCCL_SUCCESS;
}

EXPORT nccl_result ncclGroupEnd(void);
EXPORT nccl_result ncclGroupEnd(void)
{
    dist_comm *c = group.comm;
    if (--group.depth > 0 || !c)
        return NCCL_SUCCESS;
    group.comm = NULL;
    atomic_store(&c->state, NCCL_IN_PROGRESS);
    want(c, 1);
    return NCCL_IN_PROGRESS;
}
