/* The CPU backend's threads: a small pool whose workers help the caller with the lanes of one call
 * (docs/decisions/001-threads.md). */
#ifndef ACR_CPU_THREADS_H
#define ACR_CPU_THREADS_H

#include <stdbool.h>

#include "acromion.h"

typedef struct acr__pool acr__pool;

/* One lane's share of a call. Lanes take their work from a queue they share, so a lane that never runs leaves
 * nothing undone. */
typedef void acr__lane_task(void *arg, int32_t lane);

/* Starts threads - 1 workers; the caller of a run is the remaining thread. 1 <= threads. The caller frees *out
 * with acr__pool_destroy. Errors: ACR_NO_MEMORY, also when the system refuses a thread. */
acr_status acr__pool_create(acr__pool **out, int32_t threads);

/* Ends the workers. No run may be in progress. NULL is a no-op. */
void acr__pool_destroy(acr__pool *pool);

/* Runs task(arg, 0) on the calling thread and task(arg, lane), 1 <= lane < lanes, on those workers that arrive
 * before lane 0 has returned; returns when all that started have returned. lanes is at most the pool's threads.
 * Neither allocates nor blocks on another caller: while the pool serves one, this returns false and runs nothing. */
bool acr__pool_try_run(acr__pool *pool, int32_t lanes, acr__lane_task *task, void *arg);

#endif
