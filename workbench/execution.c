/* Guarded executions, see execution.h. */
#include "execution.h"

#include <stdlib.h>
#include <string.h>

enum {
    GUARD_BYTES = 512,
    NAN_BYTE = 0xff
};

/* An allocation: guard, payload, guard. */
typedef struct guarded {
    unsigned char *memory; /* on the device; NULL = not used */
    size_t payload_offset, payload_bytes, bytes;
    unsigned char *image; /* inputs: what the whole allocation holds and must go on holding; else NULL */
} guarded;

/* A tensor inside an allocation, and its packed twin on the host. */
typedef struct tensor_view {
    int64_t batch, heads, length;
    size_t row_bytes, elem_bytes;
    acr_strides strides;
} tensor_view;

struct execution {
    acr__backend_device *device;
    acr_plan *plan;
    bool owns_plan;
    bool negated; /* the values */
    acr_problem problem;
    size_t alignment; /* of q, k, v and o, bytes */
    acr_buffers buffers;
    guarded q, k, v, o, lse, kv_lens, workspace;
    size_t workspace_bytes;
};

/* ---- Views ---- */

static tensor_view view_of(const acr_problem *p, const acr_strides *strides, int64_t heads, int64_t length, int64_t dim,
                           acr_dtype dtype)
{
    size_t elem_bytes = (size_t)acr__dtype_bytes(dtype);
    return (tensor_view){p->batch, heads, length, (size_t)dim * elem_bytes, elem_bytes, *strides};
}

static size_t row_offset(const tensor_view *view, int64_t batch, int64_t head, int64_t position)
{
    return (size_t)(batch * view->strides.batch + head * view->strides.head + position * view->strides.row) *
           view->elem_bytes;
}

static const unsigned char *packed_row(const tensor_view *view, const void *packed, int64_t batch, int64_t head,
                                       int64_t position)
{
    return (const unsigned char *)packed +
           (size_t)((batch * view->heads + head) * view->length + position) * view->row_bytes;
}

/* How many positions of a batch entry exist: all queries, or the keys within its length. */
static int64_t existing(const tensor_view *view, const reference *key_lens, int64_t batch)
{
    return key_lens ? reference_kv_len(key_lens, batch) : view->length;
}

/* Packed rows to their strided places. key_lens: NULL for queries, else whose key lengths bound the rows. */
static void scatter(unsigned char *payload, const tensor_view *view, const void *packed, const reference *key_lens,
                    bool reversed)
{
    for (int64_t batch = 0; batch < view->batch; ++batch) {
        int64_t end = existing(view, key_lens, batch);
        for (int64_t head = 0; head < view->heads; ++head) {
            for (int64_t position = 0; position < end; ++position) {
                int64_t source = reversed ? end - 1 - position : position;
                memcpy(payload + row_offset(view, batch, head, position), packed_row(view, packed, batch, head, source),
                       view->row_bytes);
            }
        }
    }
}

/* Strided rows to packed ones; their places become NaN bytes, so that afterwards the whole allocation must be NaN
 * bytes. */
static void gather(unsigned char *payload, const tensor_view *view, unsigned char *packed)
{
    for (int64_t batch = 0; batch < view->batch; ++batch) {
        for (int64_t head = 0; head < view->heads; ++head) {
            for (int64_t position = 0; position < view->length; ++position) {
                unsigned char *row = payload + row_offset(view, batch, head, position);
                memcpy(packed, row, view->row_bytes);
                memset(row, NAN_BYTE, view->row_bytes);
                packed += view->row_bytes;
            }
        }
    }
}

static bool all_nan_bytes(const unsigned char *bytes, size_t size)
{
    return size == 0 || (bytes[0] == NAN_BYTE && memcmp(bytes, bytes + 1, size - 1) == 0);
}

/* ---- Guarded allocations ---- */

/* Allocates with the payload at a multiple of `alignment` that is no multiple of twice that, and fills all with NaN
 * bytes. */
static acr_status guarded_create(guarded *g, acr__backend_device *device, size_t payload_bytes, size_t alignment)
{
    g->payload_offset = GUARD_BYTES + alignment;
    g->payload_bytes = payload_bytes;
    g->bytes = g->payload_offset + payload_bytes + GUARD_BYTES;
    void *memory = NULL;
    acr_status status = device->backend->mem_alloc(device, g->bytes, &memory);
    if (status != ACR_OK) {
        return status;
    }
    g->memory = memory;
    return device->backend->mem_fill(device, memory, NAN_BYTE, g->bytes);
}

/* Gives an input its image, all NaN bytes; the caller writes the elements, then uploads. */
static acr_status guarded_image(guarded *g)
{
    g->image = malloc(g->bytes);
    if (!g->image) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %zu bytes of input", g->bytes);
    }
    memset(g->image, NAN_BYTE, g->bytes);
    return ACR_OK;
}

static void guarded_destroy(guarded *g, acr__backend_device *device)
{
    if (g->memory) {
        device->backend->mem_free(device, g->memory);
    }
    free(g->image);
}

static void *payload(const guarded *g)
{
    return g->memory ? g->memory + g->payload_offset : NULL;
}

static acr_status download(const guarded *g, acr__backend_device *device, unsigned char **out)
{
    unsigned char *bytes = malloc(g->bytes);
    if (!bytes) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %zu bytes of output", g->bytes);
    }
    acr_status status = device->backend->mem_download(device, bytes, g->memory, g->bytes);
    if (status != ACR_OK) {
        free(bytes);
        return status;
    }
    *out = bytes;
    return ACR_OK;
}

/* ---- Creation ---- */

static acr_status make_input(guarded *g, acr__backend_device *device, size_t alignment, acr_dtype dtype,
                             const tensor_view *view, const void *packed, const reference *key_lens, bool reversed)
{
    int64_t dim = (int64_t)(view->row_bytes / view->elem_bytes);
    int64_t span = acr__span_bytes(view->batch, view->heads, view->length, dim, &view->strides, dtype);
    acr_status status = guarded_create(g, device, (size_t)span, alignment);
    if (status == ACR_OK) {
        status = guarded_image(g);
    }
    if (status != ACR_OK) {
        return status;
    }
    scatter(g->image + g->payload_offset, view, packed, key_lens, reversed);
    return device->backend->mem_upload(device, g->memory, g->image, g->bytes);
}

static acr_status make_inputs(execution *e, const reference *ref, bool reversed_keys)
{
    const acr_problem *p = &e->problem;
    tensor_view q = view_of(p, &p->q, p->q_heads, p->q_len, p->qk_dim, p->dtype);
    tensor_view k = view_of(p, &p->k, p->kv_heads, p->kv_len, p->qk_dim, p->dtype);
    tensor_view v = view_of(p, &p->v, p->kv_heads, p->kv_len, p->v_dim, p->dtype);
    acr_status status = make_input(&e->q, e->device, e->alignment, p->dtype, &q, ref->q, NULL, false);
    if (status == ACR_OK) {
        status = make_input(&e->k, e->device, e->alignment, p->dtype, &k, ref->k, ref, reversed_keys);
    }
    if (status == ACR_OK) {
        status = make_input(&e->v, e->device, e->alignment, p->dtype, &v, ref->v, ref, reversed_keys);
    }
    if (status != ACR_OK || !(p->flags & ACR_KV_LENS)) {
        return status;
    }
    size_t lens_bytes = (size_t)p->batch * sizeof *ref->kv_lens;
    status = guarded_create(&e->kv_lens, e->device, lens_bytes, sizeof *ref->kv_lens);
    if (status == ACR_OK) {
        status = guarded_image(&e->kv_lens);
    }
    if (status != ACR_OK) {
        return status;
    }
    memcpy(e->kv_lens.image + e->kv_lens.payload_offset, ref->kv_lens, lens_bytes);
    return e->device->backend->mem_upload(e->device, e->kv_lens.memory, e->kv_lens.image, e->kv_lens.bytes);
}

static acr_status make_outputs(execution *e)
{
    const acr_problem *p = &e->problem;
    int64_t span = acr__span_bytes(p->batch, p->q_heads, p->q_len, p->v_dim, &p->o, p->out_dtype);
    acr_status status = guarded_create(&e->o, e->device, (size_t)span, e->alignment);
    if (status == ACR_OK && (p->flags & ACR_WANT_LSE)) {
        size_t lse_bytes = (size_t)(p->batch * p->q_heads * p->q_len) * sizeof(float);
        status = guarded_create(&e->lse, e->device, lse_bytes, sizeof(float));
    }
    e->workspace_bytes = acr_plan_workspace(e->plan);
    enum {
        WORKSPACE_ALIGNMENT = 256
    };
    if (status == ACR_OK && e->workspace_bytes > 0) {
        status = guarded_create(&e->workspace, e->device, e->workspace_bytes, WORKSPACE_ALIGNMENT);
        if (status == ACR_OK) {
            status = acr_workspace_init(e->plan, payload(&e->workspace), e->workspace_bytes, NULL);
        }
    }
    return status;
}

/* Gives an execution its buffers. */
static acr_status furnish(execution *e, const reference *ref, bool reversed_keys, uint32_t flags)
{
    acr_status status = make_inputs(e, ref, reversed_keys);
    if (status == ACR_OK) {
        status = make_outputs(e);
    }
    e->buffers = (acr_buffers)ACR_BUFFERS_INIT;
    e->buffers.flags = flags;
    e->buffers.q = payload(&e->q);
    e->buffers.k = payload(&e->k);
    e->buffers.v = payload(&e->v);
    e->buffers.o = payload(&e->o);
    e->buffers.lse = payload(&e->lse);
    e->buffers.kv_lens = payload(&e->kv_lens);
    return status;
}

acr_status execution_create(execution **out, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                            const reference *ref, bool reversed_keys, uint32_t flags, size_t alignment)
{
    execution *e = calloc(1, sizeof *e);
    if (!e) {
        return acr__fail(ACR_NO_MEMORY, "no memory for an execution");
    }
    e->device = acr__ctx_backend_device(ctx);
    e->problem = *problem;
    e->alignment = alignment ? alignment : problem->alignment;
    e->problem.scale = ref->problem.scale;
    e->problem.q_scale = ref->problem.q_scale;
    e->problem.k_scale = ref->problem.k_scale;
    e->problem.v_scale = ref->problem.v_scale;
    e->owns_plan = true;
    acr_status status = acr__plan_create_forced(&e->plan, ctx, &e->problem, kernel);
    if (status == ACR_OK) {
        status = furnish(e, ref, reversed_keys, flags);
    }
    if (status != ACR_OK) {
        execution_destroy(e);
        return status;
    }
    *out = e;
    return ACR_OK;
}

acr_status execution_create_sibling(execution **out, const execution *first, const reference *ref)
{
    execution *e = calloc(1, sizeof *e);
    if (!e) {
        return acr__fail(ACR_NO_MEMORY, "no memory for an execution");
    }
    e->device = first->device;
    e->plan = first->plan;
    e->problem = first->problem;
    e->alignment = first->alignment;
    acr_status status = furnish(e, ref, false, first->buffers.flags);
    if (status != ACR_OK) {
        execution_destroy(e);
        return status;
    }
    *out = e;
    return ACR_OK;
}

void execution_destroy(execution *e)
{
    if (!e) {
        return;
    }
    guarded *const all[] = {&e->q, &e->k, &e->v, &e->o, &e->lse, &e->kv_lens, &e->workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        guarded_destroy(all[i], e->device);
    }
    if (e->owns_plan) {
        acr_plan_destroy(e->plan);
    }
    free(e);
}

/* ---- Running ---- */

acr_status execution_enqueue(void *arg, void *stream)
{
    execution *e = arg;
    return acr_execute(e->plan, &e->buffers, payload(&e->workspace), e->workspace_bytes, stream);
}

acr_status execution_poison(execution *e)
{
    const acr__backend *backend = e->device->backend;
    acr_status status = backend->mem_fill(e->device, e->o.memory, NAN_BYTE, e->o.bytes);
    if (status == ACR_OK && e->lse.memory) {
        status = backend->mem_fill(e->device, e->lse.memory, NAN_BYTE, e->lse.bytes);
    }
    return status;
}

acr_status execution_run(execution *e)
{
    acr_status status = execution_poison(e);
    if (status == ACR_OK) {
        status = execution_enqueue(e, NULL);
    }
    return status == ACR_OK ? e->device->backend->synchronize(e->device) : status;
}

/* Elements are little endian in every type: the sign is the top bit of the last byte. A NaN byte pattern stays one. */
static void negate(unsigned char *bytes, size_t size, size_t elem_bytes)
{
    for (size_t i = elem_bytes - 1; i < size; i += elem_bytes) {
        bytes[i] ^= 0x80;
    }
}

acr_status execution_negate_values(execution *e)
{
    guarded *v = &e->v;
    negate(v->image + v->payload_offset, v->payload_bytes, (size_t)acr__dtype_bytes(e->problem.dtype));
    e->negated = !e->negated;
    return e->device->backend->mem_upload(e->device, v->memory, v->image, v->bytes);
}

/* ---- Collecting ---- */

/* Reports an input that a run changed. */
static acr_status check_input(const guarded *g, acr__backend_device *device, const char *what, const char **violation)
{
    if (!g->memory || *violation) {
        return ACR_OK;
    }
    unsigned char *now = NULL;
    acr_status status = download(g, device, &now);
    if (status == ACR_OK && memcmp(now, g->image, g->bytes) != 0) {
        *violation = what;
    }
    free(now);
    return status;
}

acr_status execution_read_workspace(const execution *e, size_t offset, void *to, size_t bytes)
{
    return e->device->backend->mem_download(e->device, to, e->workspace.memory + e->workspace.payload_offset + offset,
                                            bytes);
}

acr_status execution_write_workspace(const execution *e, size_t offset, const void *from, size_t bytes)
{
    return e->device->backend->mem_upload(e->device, e->workspace.memory + e->workspace.payload_offset + offset, from,
                                          bytes);
}

static acr_status check_workspace(const execution *e, const char **violation)
{
    const guarded *g = &e->workspace;
    if (!g->memory || *violation) {
        return ACR_OK;
    }
    unsigned char *now = NULL;
    acr_status status = download(g, e->device, &now);
    if (status == ACR_OK) {
        size_t payload_end = g->payload_offset + g->payload_bytes;
        if (!all_nan_bytes(now, g->payload_offset) || !all_nan_bytes(now + payload_end, g->bytes - payload_end)) {
            *violation = "the workspace's guard bands were written";
        }
    }
    free(now);
    return status;
}

/* Downloads an output into a packed array. */
static acr_status take_output(const execution *e, const guarded *g, const tensor_view *view, const char *what,
                              void **packed, size_t *packed_bytes, const char **violation)
{
    unsigned char *now = NULL;
    acr_status status = download(g, e->device, &now);
    if (status != ACR_OK) {
        return status;
    }
    *packed_bytes = (size_t)(view->batch * view->heads * view->length) * view->row_bytes;
    *packed = malloc(*packed_bytes);
    if (*packed) {
        gather(now + g->payload_offset, view, *packed);
        if (!all_nan_bytes(now, g->bytes) && !*violation) {
            *violation = what;
        }
    } else {
        status = acr__fail(ACR_NO_MEMORY, "no memory for %zu bytes of output", *packed_bytes);
    }
    free(now);
    return status;
}

acr_status execution_collect_outputs(execution *e, run_output *out)
{
    const acr_problem *p = &e->problem;
    *out = (run_output){.o = NULL};
    tensor_view o = view_of(p, &p->o, p->q_heads, p->q_len, p->v_dim, p->out_dtype);
    acr_status status =
        take_output(e, &e->o, &o, "o was written outside its elements", &out->o, &out->o_bytes, &out->violation);
    if (status == ACR_OK && e->negated) {
        negate(out->o, out->o_bytes, (size_t)acr__dtype_bytes(p->out_dtype));
    }
    if (status == ACR_OK && e->lse.memory) {
        tensor_view lse = {p->batch,      p->q_heads,    p->q_len,
                           sizeof(float), sizeof(float), {p->q_heads * p->q_len, p->q_len, 1}};
        void *packed = NULL;
        status = take_output(e, &e->lse, &lse, "lse was written outside its elements", &packed, &out->lse_bytes,
                             &out->violation);
        out->lse = packed;
    }
    if (status != ACR_OK) {
        run_output_free(out);
    }
    return status;
}

acr_status execution_collect(execution *e, run_output *out)
{
    acr_status status = execution_collect_outputs(e, out);
    if (status != ACR_OK) {
        return status;
    }
    const struct {
        const guarded *buffer;
        const char *what;
    } inputs[] = {{&e->q, "q, an input, was written"},
                  {&e->k, "k, an input, was written"},
                  {&e->v, "v, an input, was written"},
                  {&e->kv_lens, "kv_lens, an input, was written"}};
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0] && status == ACR_OK; ++i) {
        status = check_input(inputs[i].buffer, e->device, inputs[i].what, &out->violation);
    }
    if (status == ACR_OK) {
        status = check_workspace(e, &out->violation);
    }
    if (status != ACR_OK) {
        run_output_free(out);
    }
    return status;
}

void run_output_free(run_output *output)
{
    free(output->o);
    free(output->lse);
    *output = (run_output){.o = NULL};
}
