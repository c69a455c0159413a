/* Keeping workspaces. What a plan leaves in one is fit for that plan only, so another plan clears it first; memory is
 * thereby bounded by the largest need and not by the number of plans. */
#include "workspace.h"

#include <stdlib.h>

#include "torch_side.h"

enum {
    STREAMS_MAX = 64, /* PyTorch has 64 streams a device; beyond, the oldest is replaced */
    ALIGNMENT = 256
};

/* Which plan a workspace is fit for. */
typedef struct kept {
    void *memory;
    size_t bytes;
    const plan_entry *last;
    unsigned generation; /* of `last` */
} kept;

static struct stream_workspace {
    kept kept;
    dl_device device;
    void *stream;
    PyObject *owner;
} streams[STREAMS_MAX];
static unsigned next_stream;

static kept cpu_kept;
static bool cpu_is_taken;

/* Clears memory for a plan, unless that used it last. */
static int make_fit(kept *k, const plan_entry *entry, void *stream)
{
    if (k->last == entry && k->generation == plans_generation())
        return 0;
    k->last = NULL;
    const acr_status status = acr_workspace_init(entry->plan, k->memory, k->bytes, stream);
    if (status != ACR_OK)
        return acr_py_raise(status);
    k->last = entry;
    k->generation = plans_generation();
    return 0;
}

/* A tensor of bytes and its address. The caller owns *owner. */
static int allocate(PyObject **owner, void **memory, const operand *like, size_t bytes)
{
    const int64_t shape[] = {(int64_t)bytes};
    operand op = {0};
    PyObject *tensor = torch_new_empty(like, shape, 1, TORCH_UINT8);
    if (!tensor)
        return -1;
    const int failed = operand_acquire(&op, "the workspace", tensor);
    *memory = op.data;
    operand_release(&op);
    if (failed) {
        Py_DECREF(tensor);
        return -1;
    }
    *owner = tensor;
    return 0;
}

static struct stream_workspace *find_stream(dl_device device, void *stream)
{
    for (unsigned i = 0; i < STREAMS_MAX; i++)
        if (streams[i].owner && streams[i].stream == stream && streams[i].device.id == device.id)
            return &streams[i];
    return NULL;
}

/* Gives a stream a larger workspace. Allocating lets other threads run: only afterwards a place is chosen. What the
 * place held goes to *replaced, to be let go when nothing can come between clearing and enqueueing any more. */
static struct stream_workspace *replace(PyObject **replaced, const operand *like, size_t bytes, void *stream)
{
    const dl_device device = like->device;
    PyObject *owner;
    void *memory;
    if (allocate(&owner, &memory, like, bytes))
        return NULL;
    struct stream_workspace *s = find_stream(device, stream);
    if (!s)
        s = &streams[next_stream++ % STREAMS_MAX];
    *replaced = s->owner; /* the allocator hands it out again in the order of the stream */
    *s = (struct stream_workspace){
        .kept = {.memory = memory, .bytes = bytes}, .device = device, .stream = stream, .owner = owner};
    return s;
}

static int capture_workspace(workspace *out, const plan_entry *entry, const operand *like, void *stream)
{
    kept own = {.bytes = entry->workspace_bytes};
    if (allocate(&out->owner, &own.memory, like, own.bytes) || make_fit(&own, entry, stream))
        return -1;
    out->memory = own.memory;
    out->bytes = own.bytes;
    return 0;
}

int workspace_for_stream(workspace *out, const plan_entry *entry, const operand *like, void *stream)
{
    const int capturing = torch_is_capturing(like);
    if (capturing)
        return capturing < 0 ? -1 : capture_workspace(out, entry, like, stream);
    struct stream_workspace *s = find_stream(like->device, stream);
    if ((!s || s->kept.bytes < entry->workspace_bytes) &&
        !(s = replace(&out->owner, like, entry->workspace_bytes, stream)))
        return -1;
    out->memory = s->kept.memory;
    out->bytes = s->kept.bytes;
    return make_fit(&s->kept, entry, stream);
}

static int grow(kept *k, size_t bytes)
{
    free(k->memory);
    *k = (kept){.memory = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT), .bytes = bytes};
    if (k->memory)
        return 0;
    k->bytes = 0;
    PyErr_NoMemory();
    return -1;
}

int workspace_for_cpu(workspace *out, const plan_entry *entry)
{
    kept own = {0}, *k = cpu_is_taken ? &own : &cpu_kept;
    if (k->bytes < entry->workspace_bytes && grow(k, entry->workspace_bytes))
        return -1;
    if (make_fit(k, entry, NULL)) {
        free(own.memory);
        return -1;
    }
    *out = (workspace){.memory = k->memory, .bytes = k->bytes, .is_shared = k == &cpu_kept, .is_private = k == &own};
    cpu_is_taken = true;
    return 0;
}

void workspace_return(workspace *w)
{
    Py_CLEAR(w->owner);
    if (w->is_shared)
        cpu_is_taken = false;
    if (w->is_private)
        free(w->memory);
    *w = (workspace){0};
}

void workspace_forget(void)
{
    for (unsigned i = 0; i < STREAMS_MAX; i++) {
        PyObject *owner = streams[i].owner;
        streams[i] = (struct stream_workspace){0};
        Py_XDECREF(owner);
    }
    if (!cpu_is_taken) {
        free(cpu_kept.memory);
        cpu_kept = (kept){0};
    }
}
