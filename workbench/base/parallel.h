/* Plain parallel loops for the workbench's own work: inputs and oracle. The library's thread pool is the thing under
 * test, so it is not used. */
#ifndef WORKBENCH_PARALLEL_H
#define WORKBENCH_PARALLEL_H

#include <stdint.h>

typedef void parallel_task(void *arg, int64_t index);

/* Calls task(arg, i) once for every i in [0, count) from up to `threads` threads, the caller's among them, and returns
 * when all are done. If threads cannot be started, fewer do the work. */
void parallel_for(uint32_t threads, int64_t count, parallel_task *task, void *arg);

#endif
