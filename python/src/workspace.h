/* Workspaces: memory that some kernels need beside the tensors. All functions need the GIL. */
#ifndef ACR_PY_WORKSPACE_H
#define ACR_PY_WORKSPACE_H

#include "common.h"
#include "operand.h"
#include "plans.h"

/* Memory for one execution, ready for its plan. */
typedef struct workspace {
    void *memory;
    size_t bytes;
    PyObject *owner; /* owned: a tensor to let go once enqueued, or NULL */
    bool is_shared;  /* the CPU's common one: workspace_return gives it back */
    bool is_private; /* allocated for this execution: workspace_return frees it */
} workspace;

/* On CUDA, for PyTorch's tensors: one workspace a stream, from PyTorch's allocator, cleared when another plan used it
 * last. While a graph is being captured, one of the graph's own, cleared within the graph: replays need nothing from
 * outside. `like` is a tensor on the device, whose current stream `stream` is. */
int workspace_for_stream(workspace *out, const plan_entry *entry, const operand *like, void *stream);

/* On the CPU: the common one, or one of its own while another thread has that. */
int workspace_for_cpu(workspace *out, const plan_entry *entry);

void workspace_return(workspace *w);

/* Lets go of every kept workspace that nobody is using. */
void workspace_forget(void);

#endif
