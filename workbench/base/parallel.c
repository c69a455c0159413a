/* Parallel loops, see parallel.h. */
#include "parallel.h"

#include <pthread.h>
#include <stdatomic.h>

typedef struct loop {
    _Atomic int64_t next;
    int64_t count;
    parallel_task *task;
    void *arg;
} loop;

static void *work(void *arg)
{
    loop *l = arg;
    for (;;) {
        int64_t index = atomic_fetch_add(&l->next, 1);
        if (index >= l->count) {
            return NULL;
        }
        l->task(l->arg, index);
    }
}

void parallel_for(uint32_t threads, int64_t count, parallel_task *task, void *arg)
{
    enum {
        HELPERS_MAX = 255
    };
    pthread_t helpers[HELPERS_MAX];
    int64_t started = 0, wanted = threads > 0 ? (int64_t)threads - 1 : 0;
    loop l = {.count = count, .task = task, .arg = arg};
    if (wanted > HELPERS_MAX) {
        wanted = HELPERS_MAX;
    }
    while (started < wanted && started < count - 1 && pthread_create(&helpers[started], NULL, work, &l) == 0) {
        ++started;
    }
    work(&l);
    while (started > 0) {
        pthread_join(helpers[--started], NULL);
    }
}
