/* The operations beside attention on the CPU: each call is cut into blocks of rows, and the lanes of a call take them
 * from a queue, so that lanes that start late or never are harmless. */
#ifndef ACR_CPU_OPS_H
#define ACR_CPU_OPS_H

#include <stdatomic.h>

#include "op.h"

/* How many blocks a call has; 1 = too short to share. */
int64_t acr__cpu_merge_blocks(const acr__op_call *call);
int64_t acr__cpu_append_blocks(const acr__op_call *call);

/* Does blocks until the queue, which starts at 0, has none left. */
void acr__cpu_merge(const acr__op_call *call, int64_t blocks, _Atomic int64_t *queue);
void acr__cpu_append(const acr__op_call *call, int64_t blocks, _Atomic int64_t *queue);

/* Looks at what a GPU's caller alone could know: scales are positive and finite. Errors: ACR_INVALID. */
acr_status acr__cpu_append_check(const acr__op_call *call);

#endif
