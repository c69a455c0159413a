/* Wrappers that count, and fail when told: see faults.h. The linker sends calls of f to __wrap_f and gives the real f
 * as __real_f. */
#include "faults.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    KINDS = 3
};
static _Atomic int calls[KINDS], failing[KINDS]; /* failing: which call fails; 0 = none */
static atomic_bool fired;
static _Atomic int64_t live_blocks;
static _Atomic int live_threads;

void fault_arm(fault_kind kind, int n)
{
    for (int i = 0; i < KINDS; i++) {
        calls[i] = 0;
        failing[i] = 0;
    }
    fired = false;
    failing[kind] = n;
}

int fault_calls(fault_kind kind)
{
    return calls[kind];
}

bool fault_fired(void)
{
    return fired;
}

int64_t fault_live_blocks(void)
{
    return live_blocks;
}

int fault_live_threads(void)
{
    return live_threads;
}

/* Counts a call; true when it is the one to fail. */
static bool fails(fault_kind kind)
{
    if (atomic_fetch_add(&calls[kind], 1) + 1 != failing[kind])
        return false;
    fired = true;
    errno = kind == FAULT_MEMORY ? ENOMEM : kind == FAULT_THREAD ? EAGAIN : ENOSPC;
    return true;
}

static void *counted(void *block)
{
    live_blocks += block != NULL;
    return block;
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes)
{
    return fails(FAULT_MEMORY) ? NULL : counted(__real_malloc(bytes));
}

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails(FAULT_MEMORY) ? NULL : counted(__real_calloc(count, bytes));
}

void *__real_realloc(void *block, size_t bytes);
void *__wrap_realloc(void *block, size_t bytes);
void *__wrap_realloc(void *block, size_t bytes)
{
    if (fails(FAULT_MEMORY))
        return NULL;
    void *moved = __real_realloc(block, bytes);
    live_blocks += moved != NULL && block == NULL;
    return moved;
}

void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return fails(FAULT_MEMORY) ? NULL : counted(__real_aligned_alloc(alignment, bytes));
}

int __real_posix_memalign(void **out, size_t alignment, size_t bytes);
int __wrap_posix_memalign(void **out, size_t alignment, size_t bytes);
int __wrap_posix_memalign(void **out, size_t alignment, size_t bytes)
{
    if (fails(FAULT_MEMORY))
        return ENOMEM;
    const int error = __real_posix_memalign(out, alignment, bytes);
    live_blocks += error == 0;
    return error;
}

void __real_free(void *block);
void __wrap_free(void *block);
void __wrap_free(void *block)
{
    live_blocks -= block != NULL;
    __real_free(block);
}

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg)
{
    if (fails(FAULT_THREAD))
        return EAGAIN;
    const int error = __real_pthread_create(thread, attributes, run, arg);
    live_threads += error == 0;
    return error;
}

int __real_pthread_join(pthread_t thread, void **result);
int __wrap_pthread_join(pthread_t thread, void **result);
int __wrap_pthread_join(pthread_t thread, void **result)
{
    const int error = __real_pthread_join(thread, result);
    live_threads -= error == 0;
    return error;
}

int __real_mkstemp(char *template);
int __wrap_mkstemp(char *template);
int __wrap_mkstemp(char *template)
{
    return fails(FAULT_FILE) ? -1 : __real_mkstemp(template);
}

ssize_t __real_write(int file, const void *bytes, size_t count);
ssize_t __wrap_write(int file, const void *bytes, size_t count);
ssize_t __wrap_write(int file, const void *bytes, size_t count)
{
    if (!fails(FAULT_FILE))
        return __real_write(file, bytes, count);
    if (__real_write(file, bytes, count / 2) < 0) /* the disk fills up in the middle */
        return -1;
    errno = ENOSPC;
    return -1;
}

int __real_fsync(int file);
int __wrap_fsync(int file);
int __wrap_fsync(int file)
{
    return fails(FAULT_FILE) ? -1 : __real_fsync(file);
}

int __real_fchmod(int file, mode_t mode);
int __wrap_fchmod(int file, mode_t mode);
int __wrap_fchmod(int file, mode_t mode)
{
    return fails(FAULT_FILE) ? -1 : __real_fchmod(file, mode);
}

int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to)
{
    return fails(FAULT_FILE) ? -1 : __real_rename(from, to);
}
