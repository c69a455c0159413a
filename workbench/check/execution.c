/* Guarded executions, see execution.h. */
#include "execution.h"

#include <stdio.h>
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
    /* Inputs: what the allocation holds and must go on holding. All of it; or, of a tensor that has no gaps there
     * either, the payload alone, which is the reference's own. */
    unsigned char *image;
    const unsigned char *elements;
} guarded;

/* A tensor inside an allocation, and its twin without gaps on the host. */
typedef struct tensor_view {
    int64_t entries, heads, length;
    size_t row_bytes, elem_bytes;
    acr_strides strides;
    const reference *key_lens; /* keys: whose key starts and lengths bound an entry's rows; else NULL */
    const int32_t *owner;      /* of a packed batch: rows with -1 do not exist; else NULL */
} tensor_view;

struct execution {
    acr__backend_device *device;
    acr_plan *plan;
    bool owns_plan;
    bool negated; /* the values, or of a backward problem the gradient of o */
    acr_problem problem;
    const reference *ref;
    size_t alignment; /* of q, k, v and o, bytes */
    acr_buffers buffers;
    size_t bias_alignment; /* bytes */
    guarded at[ACR__BUFFERS], workspace;
    size_t workspace_bytes;
};

/* ---- Views ---- */

static tensor_view query_view(const reference *ref, const acr_strides *strides, int64_t heads, int64_t dim,
                              acr_dtype dtype)
{
    size_t elem_bytes = (size_t)acr__dtype_bytes(dtype);
    return (tensor_view){ref->entries, heads,    ref->q_rows, (size_t)dim * elem_bytes,
                         elem_bytes,   *strides, NULL,        ref->q_owner};
}

/* A tensor of the execution's problem, with the rows of a reference. Every key gets a gradient. */
static tensor_view view_of(const execution *e, const reference *ref, acr__buffer which)
{
    const acr__tensor t = acr__tensor_of(&e->problem, which, reference_extents(ref));
    tensor_view view = query_view(ref, &t.strides, t.heads, t.dim, t.dtype);
    if (which == ACR__K || which == ACR__V || which == ACR__DK || which == ACR__DV) {
        const bool paged = e->problem.flags & ACR_PAGED; /* all rows of all pages, with the reference's NaN */
        view.entries = t.batch;
        view.length = t.rows;
        view.key_lens = !paged && (which == ACR__K || which == ACR__V) ? ref : NULL;
        view.owner = ref->kv_owner;
    }
    return view;
}

static tensor_view lse_view(const execution *e)
{
    const int64_t heads = e->problem.q_heads, rows = e->ref->q_rows;
    const acr_strides strides = {heads * rows, rows, 1};
    return query_view(e->ref, &strides, heads, 1, ACR_F32);
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

/* One past the last row of an entry that may exist: all queries, or the keys within its length. */
static int64_t existing_end(const tensor_view *view, int64_t batch)
{
    return view->key_lens && view->key_lens->buffers.kv_lens ? reference_kv_len(view->key_lens, batch) : view->length;
}

static int64_t existing_first(const tensor_view *view, int64_t batch)
{
    return view->key_lens && view->key_lens->buffers.kv_starts ? reference_kv_start(view->key_lens, batch) : 0;
}

static bool exists(const tensor_view *view, int64_t position)
{
    return !view->owner || view->owner[position] >= 0;
}

/* Whether an entry's rows of a head, all of which exist, follow one another as they do without gaps. */
static bool rows_adjoin(const tensor_view *view)
{
    return !view->owner && (size_t)view->strides.row * view->elem_bytes == view->row_bytes;
}

/* Whether it is byte for byte as on the host. */
static bool has_no_gaps(const tensor_view *view)
{
    const acr_strides *s = &view->strides;
    const bool all_exist =
        !view->owner && !(view->key_lens && (view->key_lens->buffers.kv_lens || view->key_lens->buffers.kv_starts));
    return all_exist && rows_adjoin(view) && s->head == view->length * s->row && s->batch == view->heads * s->head;
}

/* Packed rows to their strided places. */
static void scatter(unsigned char *payload, const tensor_view *view, const void *packed, bool reversed)
{
    for (int64_t batch = 0; batch < view->entries; ++batch) {
        const int64_t first = existing_first(view, batch), end = existing_end(view, batch);
        for (int64_t head = 0; head < view->heads; ++head) {
            if (rows_adjoin(view) && !reversed) {
                memcpy(payload + row_offset(view, batch, head, first), packed_row(view, packed, batch, head, first),
                       (size_t)(end - first) * view->row_bytes);
                continue;
            }
            for (int64_t position = first; position < end; ++position) {
                int64_t source = reversed ? end - 1 - position : position;
                if (!exists(view, position)) {
                    continue;
                }
                memcpy(payload + row_offset(view, batch, head, position), packed_row(view, packed, batch, head, source),
                       view->row_bytes);
            }
        }
    }
}

/* Strided rows to packed ones; the places of those that exist become NaN bytes, so that afterwards the whole allocation
 * must be NaN bytes. */
static void gather(unsigned char *payload, const tensor_view *view, unsigned char *packed)
{
    for (int64_t batch = 0; batch < view->entries; ++batch) {
        for (int64_t head = 0; head < view->heads; ++head) {
            if (rows_adjoin(view)) {
                const size_t bytes = (size_t)view->length * view->row_bytes;
                unsigned char *rows = payload + row_offset(view, batch, head, 0);
                memcpy(packed, rows, bytes);
                memset(rows, NAN_BYTE, bytes);
                packed += bytes;
                continue;
            }
            for (int64_t position = 0; position < view->length; ++position) {
                unsigned char *row = payload + row_offset(view, batch, head, position);
                memcpy(packed, row, view->row_bytes);
                if (exists(view, position)) {
                    memset(row, NAN_BYTE, view->row_bytes);
                }
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

/* An input's elements from a reference, to the device. */
static acr_status write_elements(guarded *g, acr__backend_device *device, const tensor_view *view, const void *packed,
                                 bool reversed)
{
    if (!g->image) {
        g->elements = packed;
        return device->backend->mem_upload(device, payload(g), packed, g->payload_bytes);
    }
    scatter(g->image + g->payload_offset, view, packed, reversed);
    return device->backend->mem_upload(device, g->memory, g->image, g->bytes);
}

/* Compares a part of the device's memory with what it should hold, NULL = NaN bytes, piece by piece: what has just been
 * copied is still in the processor's cache. */
static acr_status compare(bool *same, acr__backend_device *device, const unsigned char *memory,
                          const unsigned char *expected, size_t bytes)
{
    static const size_t PIECE_BYTES = (size_t)1 << 20;
    unsigned char *piece = malloc(bytes < PIECE_BYTES ? bytes + 1 : PIECE_BYTES);
    if (!piece) {
        return acr__fail(ACR_NO_MEMORY, "no memory to look at %zu bytes", bytes);
    }
    acr_status status = ACR_OK;
    for (size_t at = 0; at < bytes && *same && status == ACR_OK; at += PIECE_BYTES) {
        const size_t count = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
        status = device->backend->mem_download(device, piece, memory + at, count);
        *same = expected ? memcmp(piece, expected + at, count) == 0 : all_nan_bytes(piece, count);
    }
    free(piece);
    return status;
}

/* Whether what surrounds the payload is as it was made. */
static acr_status compare_guards(bool *same, const guarded *g, acr__backend_device *device)
{
    const size_t payload_end = g->payload_offset + g->payload_bytes;
    acr_status status = compare(same, device, g->memory, NULL, g->payload_offset);
    return status == ACR_OK ? compare(same, device, g->memory + payload_end, NULL, g->bytes - payload_end) : status;
}

/* ---- Creation ---- */

static acr_status make_input(guarded *g, acr__backend_device *device, size_t alignment, acr_dtype dtype,
                             const tensor_view *view, const void *packed, bool reversed)
{
    int64_t dim = (int64_t)(view->row_bytes / view->elem_bytes);
    int64_t span = acr__span_bytes(view->entries, view->heads, view->length, dim, &view->strides, dtype);
    acr_status status = guarded_create(g, device, (size_t)span, alignment);
    if (status == ACR_OK && (reversed || !has_no_gaps(view))) {
        status = guarded_image(g);
    }
    return status == ACR_OK ? write_elements(g, device, view, packed, reversed) : status;
}

/* Lengths, offsets, scales and what terms read; nothing for a NULL. */
static acr_status make_numbers(guarded *g, acr__backend_device *device, const void *numbers, size_t bytes,
                               size_t alignment)
{
    acr_status status = numbers ? guarded_create(g, device, bytes, alignment) : ACR_OK;
    if (status == ACR_OK && numbers) {
        status = guarded_image(g);
    }
    if (status != ACR_OK || !numbers) {
        return status;
    }
    memcpy(g->image + g->payload_offset, numbers, bytes);
    return device->backend->mem_upload(device, g->memory, g->image, g->bytes);
}

static acr_status make_inputs(execution *e, bool reversed_keys)
{
    const acr_problem *p = &e->problem;
    const reference *ref = e->ref;
    const acr__rows rows = reference_extents(ref);
    acr_status status = ACR_OK;
    for (acr__buffer i = 0; i < ACR__FORWARD_INPUTS && status == ACR_OK; ++i) {
        const void *elements = acr__pointer_at(&ref->buffers, acr__buffer_fields[i].in_buffers);
        if (i == ACR__V && !elements) {
            continue; /* values inside keys */
        }
        if (i == ACR__Q || i == ACR__K || i == ACR__V) {
            const tensor_view view = view_of(e, ref, i);
            const acr_dtype dtype = i == ACR__Q ? p->dtype : acr__kv_dtype(p);
            status =
                make_input(&e->at[i], e->device, e->alignment, dtype, &view, elements, reversed_keys && i != ACR__Q);
        } else {
            const size_t alignment = i == ACR__BIAS ? e->bias_alignment : acr__buffer_alignment(p, i);
            status = make_numbers(&e->at[i], e->device, elements, (size_t)acr__buffer_bytes(p, i, rows), alignment);
        }
    }
    for (acr__buffer i = ACR__O; i <= ACR__D_O && p->pass == ACR_BACKWARD && status == ACR_OK; ++i) {
        const tensor_view view = i == ACR__LSE ? lse_view(e) : view_of(e, ref, i);
        const void *elements = acr__pointer_at(&ref->buffers, acr__buffer_fields[i].in_buffers);
        status = make_input(&e->at[i], e->device, i == ACR__LSE ? sizeof(float) : e->alignment,
                            i == ACR__LSE ? ACR_F32 : p->out_dtype, &view, elements, false);
    }
    return status;
}

static acr_status make_outputs(execution *e)
{
    const acr_problem *p = &e->problem;
    const reference *ref = e->ref;
    acr_status status = ACR_OK;
    for (acr__buffer i = ACR__FORWARD_INPUTS; i < ACR__BUFFERS && status == ACR_OK; ++i) {
        const int64_t bytes = acr__is_output(p, i) ? acr__buffer_bytes(p, i, reference_extents(ref)) : 0;
        const size_t element = i == ACR__O ? (size_t)acr__dtype_bytes(p->out_dtype) : 1;
        const size_t alignment = !acr__is_tensor(i)       ? acr__buffer_alignment(p, i)
                                 : e->alignment < element ? element
                                                          : e->alignment;
        status = bytes > 0 ? guarded_create(&e->at[i], e->device, (size_t)bytes, alignment) : ACR_OK;
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
static acr_status furnish(execution *e, bool reversed_keys, uint32_t flags)
{
    acr_status status = make_inputs(e, reversed_keys);
    if (status == ACR_OK) {
        status = make_outputs(e);
    }
    e->buffers = (acr_buffers)ACR_BUFFERS_INIT;
    e->buffers.flags = flags;
    for (acr__buffer i = 0; i < ACR__BUFFERS; ++i) {
        acr__set_pointer_at(&e->buffers, acr__buffer_fields[i].in_buffers, payload(&e->at[i]));
    }
    e->buffers.q_total = e->ref->buffers.q_total;
    e->buffers.kv_total = e->ref->buffers.kv_total;
    e->buffers.pages = e->ref->buffers.pages;
    e->buffers.table_stride = e->ref->buffers.table_stride;
    return status;
}

/* Gives an execution with a plan its buffers; destroys what has failed, earlier or here. */
static acr_status complete(execution **out, execution *e, acr_status status, bool reversed_keys, uint32_t flags)
{
    if (status == ACR_OK) {
        status = furnish(e, reversed_keys, flags);
    }
    if (status != ACR_OK) {
        execution_destroy(e);
        e = NULL;
    }
    *out = e;
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
    e->ref = ref;
    e->alignment = alignment ? alignment : problem->alignment;
    e->bias_alignment = alignment ? alignment : (size_t)acr__dtype_bytes(problem->bias_dtype);
    e->problem.scale = ref->problem.scale;
    e->problem.q_scale = ref->problem.q_scale;
    e->problem.k_scale = ref->problem.k_scale;
    e->problem.v_scale = ref->problem.v_scale;
    e->owns_plan = true;
    const acr_status status = acr__plan_create_forced(&e->plan, ctx, &e->problem, kernel);
    return complete(out, e, status, reversed_keys, flags);
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
    e->ref = ref;
    e->alignment = first->alignment;
    e->bias_alignment = first->bias_alignment;
    return complete(out, e, ACR_OK, false, first->buffers.flags);
}

void execution_destroy(execution *e)
{
    if (!e) {
        return;
    }
    for (acr__buffer i = 0; i < ACR__BUFFERS; ++i) {
        guarded_destroy(&e->at[i], e->device);
    }
    guarded_destroy(&e->workspace, e->device);
    if (e->owns_plan) {
        acr_plan_destroy(e->plan);
    }
    free(e);
}

const acr_problem *execution_problem(const execution *e)
{
    return &e->problem;
}

/* ---- Running ---- */

/* The inputs that another reference's replace: from ACR__Q on, one past the last. */
static acr__buffer replaced_end(const execution *e)
{
    return e->problem.pass == ACR_BACKWARD ? ACR__DQ : ACR__V + 1;
}

static acr__buffer next_replaced(acr__buffer i)
{
    return i == ACR__V ? ACR__O : i + 1;
}

acr_status execution_replace_inputs(execution *e, const reference *ref)
{
    acr_status status = ACR_OK;
    for (acr__buffer i = ACR__Q; i < replaced_end(e) && status == ACR_OK; i = next_replaced(i)) {
        const tensor_view view = i == ACR__LSE ? lse_view(e) : view_of(e, ref, i);
        const void *elements = acr__pointer_at(&ref->buffers, acr__buffer_fields[i].in_buffers);
        status = elements ? write_elements(&e->at[i], e->device, &view, elements, false) : ACR_OK;
    }
    guarded *table = &e->at[ACR__PAGE_TABLE];
    if (status == ACR_OK && table->memory) {
        memcpy(table->image + table->payload_offset, ref->buffers.page_table, table->payload_bytes);
        status = e->device->backend->mem_upload(e->device, table->memory, table->image, table->bytes);
    }
    return status;
}

acr_status execution_rerun(execution *e)
{
    acr_status status = execution_enqueue(e, NULL);
    return status == ACR_OK ? e->device->backend->synchronize(e->device) : status;
}

acr_status execution_enqueue(void *arg, void *stream)
{
    execution *e = arg;
    return acr_execute(e->plan, &e->buffers, payload(&e->workspace), e->workspace_bytes, stream);
}

acr_status execution_poison(execution *e)
{
    acr_status status = ACR_OK;
    for (acr__buffer i = ACR__O; i < ACR__BUFFERS && status == ACR_OK; ++i) {
        const guarded *g = &e->at[i];
        if (g->memory && acr__is_output(&e->problem, i)) {
            status = e->device->backend->mem_fill(e->device, g->memory, NAN_BYTE, g->bytes);
        }
    }
    return status;
}

acr_status execution_renew(execution *e, const reference *ref)
{
    acr_status status = execution_replace_inputs(e, ref);
    if (status == ACR_OK) {
        status = execution_poison(e);
    }
    if (status == ACR_OK && e->workspace_bytes > 0) {
        status = e->device->backend->mem_fill(e->device, payload(&e->workspace), NAN_BYTE, e->workspace_bytes);
    }
    return status == ACR_OK && e->workspace_bytes > 0
               ? acr_workspace_init(e->plan, payload(&e->workspace), e->workspace_bytes, NULL)
               : status;
}

bool execution_takes_device_inputs(const execution *e)
{
    bool takes = !e->at[ACR__PAGE_TABLE].memory;
    for (acr__buffer i = ACR__Q; i < replaced_end(e); i = next_replaced(i)) {
        takes = takes && !e->at[i].image;
    }
    return takes;
}

acr_status execution_holds_inputs(bool *holds, const execution *e, const reference *ref)
{
    static const acr__buffer drawn[] = {ACR__Q, ACR__K, ACR__V, ACR__D_O};
    acr_status status = ACR_OK;
    *holds = true;
    for (size_t i = 0; i < sizeof drawn / sizeof drawn[0] && status == ACR_OK; ++i) {
        const guarded *g = &e->at[drawn[i]];
        const void *elements = acr__pointer_at(&ref->buffers, acr__buffer_fields[drawn[i]].in_buffers);
        status = g->memory && elements ? compare(holds, e->device, payload(g), elements, g->payload_bytes) : ACR_OK;
    }
    return status;
}

const void *execution_buffer(const execution *e, acr__buffer which)
{
    return payload(&e->at[which]);
}

acr_status execution_renew_on_device(execution *e, const void *const sources[ACR__BUFFERS], void *stream)
{
    const acr__timing *device = e->device->backend->timing;
    acr_status status = ACR_OK;
    for (acr__buffer i = ACR__Q; i < replaced_end(e) && status == ACR_OK; i = next_replaced(i)) {
        const guarded *g = &e->at[i];
        status = g->memory && sources[i]
                     ? device->copy_on_device(e->device, payload(g), sources[i], g->payload_bytes, stream)
                     : ACR_OK;
    }
    for (acr__buffer i = ACR__O; i < ACR__BUFFERS && status == ACR_OK; ++i) {
        const guarded *g = &e->at[i];
        status = g->memory && acr__is_output(&e->problem, i)
                     ? device->fill_on_device(e->device, g->memory, NAN_BYTE, g->bytes, stream)
                     : ACR_OK;
    }
    if (status == ACR_OK && e->workspace_bytes > 0) {
        status = device->fill_on_device(e->device, payload(&e->workspace), NAN_BYTE, e->workspace_bytes, stream);
    }
    return status == ACR_OK && e->workspace_bytes > 0
               ? acr_workspace_init(e->plan, payload(&e->workspace), e->workspace_bytes, stream)
               : status;
}

acr_status execution_run(execution *e)
{
    acr_status status = execution_poison(e);
    return status == ACR_OK ? execution_rerun(e) : status;
}

/* Elements are little endian in every type: the sign is the top bit of the last byte. A NaN byte pattern stays one. */
static void negate(unsigned char *bytes, size_t size, size_t elem_bytes)
{
    for (size_t i = elem_bytes - 1; i < size; i += elem_bytes) {
        bytes[i] ^= 0x80;
    }
}

static acr_status negate_input(const execution *e, guarded *g, acr_dtype dtype)
{
    if (!g->image) {
        acr_status status = guarded_image(g);
        if (status != ACR_OK) {
            return status;
        }
        memcpy(g->image + g->payload_offset, g->elements, g->payload_bytes);
    }
    negate(g->image + g->payload_offset, g->payload_bytes, (size_t)acr__dtype_bytes(dtype));
    return e->device->backend->mem_upload(e->device, g->memory, g->image, g->bytes);
}

/* Values inside keys turn with their keys: the queries turn as well, so that scores stay. */
acr_status execution_negate_values(execution *e)
{
    const acr_problem *p = &e->problem;
    e->negated = !e->negated;
    if (p->pass == ACR_BACKWARD) {
        return negate_input(e, &e->at[ACR__D_O], p->dtype);
    }
    if (!(p->flags & ACR_V_IN_K)) {
        return negate_input(e, &e->at[ACR__V], acr__kv_dtype(p));
    }
    const acr_status status = negate_input(e, &e->at[ACR__Q], p->dtype);
    return status == ACR_OK ? negate_input(e, &e->at[ACR__K], acr__kv_dtype(p)) : status;
}

/* ---- Collecting ---- */

/* Reports an input that a run changed. */
static acr_status check_input(const guarded *g, acr__backend_device *device, const char *name, run_output *out)
{
    if (!g->memory || out->violation[0]) {
        return ACR_OK;
    }
    bool same = true;
    acr_status status = g->image ? compare(&same, device, g->memory, g->image, g->bytes)
                                 : compare(&same, device, payload(g), g->elements, g->payload_bytes);
    if (status == ACR_OK && !g->image) {
        status = compare_guards(&same, g, device);
    }
    if (!same) {
        snprintf(out->violation, sizeof out->violation, "%s, an input, was written", name);
    }
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

static acr_status check_workspace(const execution *e, run_output *out)
{
    const guarded *g = &e->workspace;
    if (!g->memory || out->violation[0]) {
        return ACR_OK;
    }
    bool same = true;
    acr_status status = compare_guards(&same, g, e->device);
    if (!same) {
        snprintf(out->violation, sizeof out->violation, "the workspace's guard bands were written");
    }
    return status;
}

/* Downloads an output that may have gaps into a packed array; *clean tells whether only its elements were written. */
static acr_status gather_output(const execution *e, const guarded *g, const tensor_view *view, void *packed,
                                bool *clean)
{
    unsigned char *now = malloc(g->bytes);
    acr_status status = now ? e->device->backend->mem_download(e->device, now, g->memory, g->bytes)
                            : acr__fail(ACR_NO_MEMORY, "no memory for %zu bytes of output", g->bytes);
    if (status == ACR_OK) {
        gather(now + g->payload_offset, view, packed);
        *clean = all_nan_bytes(now, g->bytes);
    }
    free(now);
    return status;
}

/* Downloads an output into a packed array. */
static acr_status take_output(const execution *e, acr__buffer which, const tensor_view *view, void **packed,
                              size_t *packed_bytes, run_output *out)
{
    const guarded *g = &e->at[which];
    bool clean = true;
    *packed_bytes = (size_t)(view->entries * view->heads * view->length) * view->row_bytes;
    *packed = malloc(*packed_bytes);
    if (!*packed) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %zu bytes of output", *packed_bytes);
    }
    acr_status status = ACR_OK;
    if (has_no_gaps(view)) {
        status = e->device->backend->mem_download(e->device, *packed, payload(g), *packed_bytes);
        status = status == ACR_OK ? compare_guards(&clean, g, e->device) : status;
    } else {
        status = gather_output(e, g, view, *packed, &clean);
    }
    if (!clean && !out->violation[0]) {
        snprintf(out->violation, sizeof out->violation, "%s was written outside its elements",
                 acr__buffer_fields[which].name);
    }
    return status;
}

static acr_status collect_gradients(const execution *e, run_output *out)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < 4 && status == ACR_OK; ++i) {
        const acr__buffer which = ACR__DQ + (acr__buffer)i;
        const tensor_view sinks = {1, 1, e->problem.q_heads, sizeof(float), sizeof(float), {0, 0, 1}, NULL, NULL};
        const tensor_view view = which == ACR__DSINKS ? sinks : view_of(e, e->ref, which);
        if (!e->at[which].memory) {
            continue;
        }
        status = take_output(e, which, &view, &out->grads[i], &out->grad_bytes[i], out);
        if (status == ACR_OK && e->negated) {
            negate(out->grads[i], out->grad_bytes[i], view.elem_bytes);
        }
    }
    if (status != ACR_OK) {
        run_output_free(out);
    }
    return status;
}

acr_status execution_collect_outputs(execution *e, run_output *out)
{
    const acr_problem *p = &e->problem;
    *out = (run_output){.o = NULL};
    if (p->pass == ACR_BACKWARD) {
        return collect_gradients(e, out);
    }
    const tensor_view o = view_of(e, e->ref, ACR__O);
    acr_status status = take_output(e, ACR__O, &o, &out->o, &out->o_bytes, out);
    if (status == ACR_OK && e->negated) {
        negate(out->o, out->o_bytes, (size_t)acr__dtype_bytes(p->out_dtype));
    }
    if (status == ACR_OK && e->at[ACR__LSE].memory) {
        const tensor_view lse = lse_view(e);
        void *packed = NULL;
        status = take_output(e, ACR__LSE, &lse, &packed, &out->lse_bytes, out);
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
    for (acr__buffer i = 0; i < ACR__BUFFERS && status == ACR_OK; ++i) {
        if (acr__is_output(&e->problem, i)) {
            continue;
        }
        status = check_input(&e->at[i], e->device, acr__buffer_fields[i].name, out);
    }
    if (status == ACR_OK) {
        status = check_workspace(e, out);
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
    for (int i = 0; i < 4; ++i) {
        free(output->grads[i]);
    }
    *output = (run_output){.o = NULL};
}
