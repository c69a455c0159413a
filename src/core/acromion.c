/* The entry points of acromion.h: they validate, and delegate. */
#include "acromion.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "extent.h"
#include "forward_cache.h"
#include "internal.h"
#include "plan.h"

#define TEXT_OF_(x) #x
#define TEXT_OF(x) TEXT_OF_(x)

enum {
    WORKSPACE_ALIGNMENT = 256,
    MAX_THREADS = 1024
};

const char *acr_version(void)
{
    return TEXT_OF(ACR_VERSION_MAJOR) "." TEXT_OF(ACR_VERSION_MINOR) "." TEXT_OF(ACR_VERSION_PATCH);
}

/* ---- Context ----------------------------------------------------------------------------------------------------- */

static acr_status check_options(const acr_ctx_options *o)
{
    if (o->reserved != 0)
        return acr__fail(ACR_INVALID, "options.reserved is %u, must be 0", o->reserved);
    if (o->threads > MAX_THREADS)
        return acr__fail(ACR_INVALID, "options.threads is %u, at most %d", o->threads, MAX_THREADS);
    if (o->device < 0)
        return acr__fail(ACR_INVALID, "options.device is %d, must not be negative", o->device);
    if (o->backend && strcmp(o->backend, "cuda") != 0 && strcmp(o->backend, "cpu") != 0)
        return acr__fail(ACR_INVALID, "options.backend is \"%s\", must be \"cuda\", \"cpu\" or NULL", o->backend);
    return ACR_OK;
}

/* Opens what the options name; without a name, a GPU if a usable one is there, else the CPU. */
static acr_status open_device(acr__backend_device **out, const acr_ctx_options *options)
{
    const acr__backend *const first =
        options->backend && strcmp(options->backend, "cpu") == 0 ? &acr__backend_cpu : &acr__backend_cuda;
    const acr_status status = first->open(out, options);
    if (status != ACR_NO_DEVICE || options->backend)
        return status;
    return acr__backend_cpu.open(out, options);
}

acr_status acr_ctx_create(acr_ctx **out, const acr_ctx_options *options)
{
    static const acr_ctx_options defaults = ACR_CTX_OPTIONS_INIT;
    if (!out)
        return acr__fail(ACR_INVALID, "out is NULL");
    if (!options)
        options = &defaults;
    acr_ctx_options read;
    acr_status status =
        acr__read_struct(&read, sizeof read, options, options->size, NULL, 0, "options", "ACR_CTX_OPTIONS_INIT");
    if (status != ACR_OK || (status = check_options(&read)) != ACR_OK)
        return status;
    acr_ctx *ctx = calloc(1, sizeof *ctx);
    forward_cache *cache = acr__forward_cache_create();
    if (!ctx || !cache || pthread_mutex_init(&ctx->lock, NULL) != 0) {
        acr__forward_cache_destroy(cache, NULL);
        free(ctx);
        return acr__fail(ACR_NO_MEMORY, "no memory for a context");
    }
    ctx->cache = cache;
    atomic_init(&ctx->references, 1);
    status = open_device(&ctx->device, &read);
    if (status == ACR_OK && !(ctx->wisdom = acr__wisdom_create(&ctx->device->device)))
        status = acr__fail(ACR_NO_MEMORY, "no memory for the context's wisdom");
    if (status != ACR_OK) {
        acr__ctx_release(ctx);
        return status;
    }
    *out = ctx;
    return ACR_OK;
}

void acr__ctx_retain(acr_ctx *ctx)
{
    atomic_fetch_add_explicit(&ctx->references, 1, memory_order_relaxed);
}

void acr__ctx_release(acr_ctx *ctx)
{
    if (atomic_fetch_sub_explicit(&ctx->references, 1, memory_order_acq_rel) != 1)
        return;
    acr__forward_cache_destroy(ctx->cache, ctx->device);
    if (ctx->device)
        ctx->device->backend->close(ctx->device);
    acr__wisdom_destroy(ctx->wisdom);
    pthread_mutex_destroy(&ctx->lock);
    free(ctx);
}

void acr_ctx_destroy(acr_ctx *ctx)
{
    if (ctx)
        acr__ctx_release(ctx);
}

const char *acr_ctx_backend(const acr_ctx *ctx)
{
    return ctx ? ctx->device->backend->name : "";
}

const char *acr_ctx_device(const acr_ctx *ctx)
{
    return ctx ? ctx->device->text : "";
}

acr__backend_device *acr__ctx_backend_device(const acr_ctx *ctx)
{
    return ctx->device;
}

/* ---- Plan -------------------------------------------------------------------------------------------------------- */

acr_status acr_plan_create(acr_plan **out, acr_ctx *ctx, const acr_problem *problem, acr_effort effort)
{
    if (!out || !ctx)
        return acr__fail(ACR_INVALID, "%s is NULL", out ? "ctx" : "out");
    if (effort != ACR_ESTIMATE && effort != ACR_MEASURE && effort != ACR_PATIENT && effort != ACR_WISDOM_ONLY)
        return acr__fail(ACR_INVALID, "effort is %d, must be an acr_effort", (int)effort);
    acr_problem canonical;
    const acr_status status = acr_problem_canonical(&canonical, problem);
    return status == ACR_OK ? acr__plan_make(out, ctx, &canonical, effort, 1) : status;
}

void acr_plan_destroy(acr_plan *plan)
{
    if (!plan)
        return;
    acr_ctx *ctx = plan->ctx;
    plan->prepared->device->backend->release(plan->prepared);
    free(plan);
    if (ctx)
        acr__ctx_release(ctx);
}

const char *acr_plan_text(const acr_plan *plan)
{
    return plan ? plan->text : "";
}

const char *acr_plan_kernel(const acr_plan *plan)
{
    return plan ? plan->prepared->kernel->name : "";
}

size_t acr_plan_workspace(const acr_plan *plan)
{
    return plan ? plan->prepared->workspace_bytes : 0;
}

double acr_plan_seconds(const acr_plan *plan)
{
    return plan ? plan->seconds : 0.0;
}

/* ---- Execution --------------------------------------------------------------------------------------------------- */

static acr_status check_workspace(const acr_plan *plan, const void *workspace, size_t bytes)
{
    const size_t needed = plan->prepared->workspace_bytes;
    if (needed == 0)
        return ACR_OK;
    if (!workspace)
        return acr__fail(ACR_WORKSPACE, "workspace is NULL, the plan needs %zu bytes", needed);
    if (bytes < needed)
        return acr__fail(ACR_WORKSPACE, "workspace has %zu bytes, the plan needs %zu", bytes, needed);
    if (!acr__is_aligned(workspace, WORKSPACE_ALIGNMENT))
        return acr__fail(ACR_WORKSPACE, "workspace %p is not %d-byte aligned", workspace, WORKSPACE_ALIGNMENT);
    return ACR_OK;
}

acr_status acr_workspace_init(const acr_plan *plan, void *workspace, size_t bytes, void *stream)
{
    if (!plan)
        return acr__fail(ACR_INVALID, "plan is NULL");
    const acr_status status = check_workspace(plan, workspace, bytes);
    if (status != ACR_OK || plan->prepared->workspace_bytes == 0)
        return status;
    acr__backend_device *device = plan->prepared->device;
    return device->backend->mem_zero_async(device, workspace, plan->prepared->workspace_bytes, stream);
}

static acr_status read_buffers(acr_buffers *out, const acr_buffers *in)
{
    static const size_t earlier[] = {offsetof(acr_buffers, page_table), offsetof(acr_buffers, kv_starts),
                                     offsetof(acr_buffers, q_scales), offsetof(acr_buffers, q_offsets)};
    const acr_status status =
        acr__read_struct(out, sizeof *out, in, in->size, earlier, 4, "buffers", "ACR_BUFFERS_INIT");
    out->size = (uint32_t)sizeof *out;
    return status;
}

static acr_status check_total(const char *name, int64_t total)
{
    const int64_t most = INT32_MAX - 1024; /* a tile beyond the end is still a 32-bit number */
    if (total < 1 || total > most)
        return acr__fail(ACR_INVALID, "buffers.%s is %lld, must be 1 to %lld rows", name, (long long)total,
                         (long long)most);
    return ACR_OK;
}

static acr_status check_totals(const acr_plan *plan, const acr_buffers *b)
{
    if (!(plan->problem.flags & ACR_PACKED)) {
        if (b->q_total != 0 || b->kv_total != 0)
            return acr__fail(ACR_INVALID, "buffers.%s is given, the problem lacks ACR_PACKED",
                             b->q_total ? "q_total" : "kv_total");
        return ACR_OK;
    }
    const acr_status status = check_total("q_total", b->q_total);
    if (status != ACR_OK || !(plan->problem.flags & ACR_PAGED))
        return status == ACR_OK ? check_total("kv_total", b->kv_total) : status;
    return b->kv_total == 0 ? ACR_OK
                            : acr__fail(ACR_INVALID, "buffers.kv_total is given, with ACR_PAGED kv_lens and page_table "
                                                     "say where keys are");
}

/* The flag or field because of which a problem has a buffer, or would have it. */
static const char *wanted_by(const acr_problem *p, acr__buffer which)
{
    if (p->pass == ACR_BACKWARD && which == ACR__LSE)
        return "ACR_BACKWARD";
    if (p->pass == ACR_BACKWARD && which == ACR__DSINKS)
        return "ACR_SINKS";
    return acr__buffer_fields[which].wanted_by;
}

_Static_assert(ACR__BUFFERS <= 32, "buffers are bits of a word");

/* Which buffers are given, as bits. Few of them ever are: what is done at every execution is done for these alone. */
static uint32_t given_buffers(const acr_buffers *b)
{
    uint32_t given = 0;
    for (acr__buffer i = 0; i < ACR__BUFFERS; i++)
        given |= (uint32_t)(acr__pointer_at(b, acr__buffer_fields[i].in_buffers) != NULL) << i;
    return given;
}

static acr__buffer lowest_buffer(uint32_t bits)
{
    return (acr__buffer)__builtin_ctz(bits);
}

/* What a flag or a field of the problem wants is given where the problem has it, and only there. */
static acr_status check_wanted(const acr_plan *plan, uint32_t given)
{
    const uint32_t wrong = (given ^ plan->wanted) & plan->settled;
    if (wrong == 0)
        return ACR_OK;
    const acr__buffer i = lowest_buffer(wrong);
    return acr__fail(ACR_INVALID,
                     plan->wanted >> i & 1 ? "buffers.%s is NULL, the problem has %s"
                                           : "buffers.%s is given, the problem lacks %s",
                     acr__buffer_fields[i].name, wanted_by(&plan->problem, i));
}

static acr_status check_presence(const acr_plan *plan, const acr_buffers *b, uint32_t given)
{
    if (b->flags & ~(uint32_t)ACR_OVERLAP_PREVIOUS)
        return acr__fail(ACR_INVALID, "buffers.flags 0x%x has bits that are not ACR_OVERLAP_PREVIOUS", b->flags);
    if (!b->q || !b->k || !b->o)
        return acr__fail(ACR_INVALID, "buffers.%s is NULL", !b->q ? "q" : !b->k ? "k" : "o");
    acr_status status = acr__check_cache_buffers(&plan->problem, b);
    if (status == ACR_OK)
        status = check_wanted(plan, given);
    return status == ACR_OK ? check_totals(plan, b) : status;
}

static acr_status check_alignment(const acr_plan *plan, const acr_buffers *b, uint32_t given)
{
    for (; given != 0; given &= given - 1) {
        const acr__buffer i = lowest_buffer(given);
        const acr__buffer_field *field = &acr__buffer_fields[i];
        const void *pointer = acr__pointer_at(b, field->in_buffers);
        const size_t alignment = acr__buffer_alignment(&plan->problem, i);
        if (!acr__is_aligned(pointer, alignment))
            return acr__fail(ACR_ALIGNMENT, "buffers.%s is %p, not a multiple of %zu bytes as the problem says",
                             field->name, pointer, alignment);
    }
    return ACR_OK;
}

/* span_bytes: of the tensor, where the plan knows it. Only steps from row to row tell two tensors apart: how many rows
 * there are is left open. */
static acr__extent extent_of(const acr__tensor *t, const void *pointer, int64_t span_bytes)
{
    const int64_t size = acr__dtype_bytes(t->dtype);
    return (acr__extent){.name = t->name,
                         .first = (uintptr_t)pointer,
                         .bytes = span_bytes > 0 ? span_bytes : acr__tensor_bytes(t),
                         .batch = t->batch,
                         .heads = t->heads,
                         .rows = INT64_MAX,
                         .row_bytes = t->strides.row * size,
                         .head_bytes = t->strides.head * size,
                         .batch_bytes = t->batch > 1 ? t->strides.batch * size : 0,
                         .dim_bytes = t->dim * size};
}

/* Where an execution's buffers lie: those that are given. */
typedef struct execution_extents {
    int count;
    bool is_output[ACR__BUFFERS];
    acr__extent of[ACR__BUFFERS];
} execution_extents;

static void find_extents(execution_extents *e, const acr_plan *plan, const acr_buffers *b, uint32_t given)
{
    const acr_problem *p = &plan->problem;
    const acr__rows rows = acr__rows_of(p, b);
    for (e->count = 0; given != 0; given &= given - 1, e->count++) {
        const acr__buffer i = lowest_buffer(given);
        const acr__buffer_field *field = &acr__buffer_fields[i];
        const void *pointer = acr__pointer_at(b, field->in_buffers);
        e->is_output[e->count] = acr__is_output(p, i);
        if (acr__is_tensor(i)) {
            const acr__tensor t = acr__tensor_of(p, i, rows);
            e->of[e->count] = extent_of(&t, pointer, plan->span_bytes[i]);
        } else {
            e->of[e->count] = acr__extent_of_block(field->name, pointer, acr__buffer_bytes(p, i, rows));
        }
    }
}

/* An output lies apart from every other buffer. */
static acr_status check_overlap(const execution_extents *e)
{
    for (int i = 0; i < e->count; i++)
        for (int j = 0; e->is_output[i] && j < e->count; j++)
            if (i != j && acr__overlap(&e->of[i], &e->of[j]))
                return acr__fail(ACR_OVERLAP, "buffers.%s overlaps buffers.%s", e->of[i].name, e->of[j].name);
    return ACR_OK;
}

static acr_status check_workspace_overlap(const acr_plan *plan, const execution_extents *e, const void *workspace)
{
    const acr__extent own = acr__extent_of_block("workspace", workspace, (int64_t)plan->prepared->workspace_bytes);
    for (int i = 0; i < e->count; i++)
        if (acr__overlap(&e->of[i], &own))
            return acr__fail(ACR_OVERLAP, "buffers.%s overlaps the workspace", e->of[i].name);
    return ACR_OK;
}

acr_status acr_execute(const acr_plan *plan, const acr_buffers *buffers, void *workspace, size_t bytes, void *stream)
{
    if (!plan || !buffers)
        return acr__fail(ACR_INVALID, "%s is NULL", plan ? "buffers" : "plan");
    acr_buffers b;
    acr_status status;
    if ((status = read_buffers(&b, buffers)) != ACR_OK)
        return status;
    const uint32_t given = given_buffers(&b);
    if ((status = check_presence(plan, &b, given)) != ACR_OK || (status = check_alignment(plan, &b, given)) != ACR_OK)
        return status;
    execution_extents e;
    find_extents(&e, plan, &b, given);
    if ((status = check_overlap(&e)) != ACR_OK || (status = check_workspace(plan, workspace, bytes)) != ACR_OK ||
        (status = check_workspace_overlap(plan, &e, workspace)) != ACR_OK)
        return status;
    acr__args args;
    acr__fill_args(&args, &plan->problem, &b, workspace);
    return plan->prepared->device->backend->launch(plan->prepared, &args.fwd, b.flags, stream);
}

/* ---- One call ---------------------------------------------------------------------------------------------------- */

acr_status acr_forward(acr_ctx *ctx, const acr_problem *problem, const acr_buffers *buffers, void *stream)
{
    if (!ctx || !buffers)
        return acr__fail(ACR_INVALID, "%s is NULL", ctx ? "buffers" : "ctx");
    acr_problem canonical;
    acr_status status = acr_problem_canonical(&canonical, problem);
    if (status != ACR_OK)
        return status;
    forward_use use;
    status = acr__forward_begin(&use, ctx, &canonical, stream);
    if (status != ACR_OK)
        return status;
    status = acr_execute(use.plan, buffers, use.workspace, use.workspace_bytes, stream);
    acr__forward_end(ctx, &use);
    return status;
}

/* ---- Wisdom ------------------------------------------------------------------------------------------------------ */

acr_status acr_wisdom_import(acr_ctx *ctx, const char *path, acr_wisdom_report *report)
{
    if (!ctx || !path)
        return acr__fail(ACR_INVALID, "%s is NULL", ctx ? "path" : "ctx");
    if (report && report->size != sizeof *report)
        return acr__fail(ACR_INVALID, "report.size is %u, must be %zu: initialise with ACR_WISDOM_REPORT_INIT",
                         report->size, sizeof *report);
    pthread_mutex_lock(&ctx->lock);
    const acr_status status = acr__wisdom_read(ctx->wisdom, &ctx->device->device, path, report);
    pthread_mutex_unlock(&ctx->lock);
    return status;
}

acr_status acr_wisdom_export(const acr_ctx *ctx, const char *path)
{
    if (!ctx || !path)
        return acr__fail(ACR_INVALID, "%s is NULL", ctx ? "path" : "ctx");
    pthread_mutex_t *lock = (pthread_mutex_t *)&ctx->lock; /* locking does not change what the context holds */
    pthread_mutex_lock(lock);
    const acr_status status = acr__wisdom_write(ctx->wisdom, path);
    pthread_mutex_unlock(lock);
    return status;
}

static acr_status check_link(const acr_link *link)
{
    if (link->size != sizeof *link)
        return acr__fail(ACR_INVALID, "link.size is %u, must be %zu: initialise with ACR_LINK_INIT", link->size,
                         sizeof *link);
    const char *reason = acr__link_why_not(link);
    return reason ? acr__fail(ACR_INVALID, "link.%s", reason) : ACR_OK;
}

acr_status acr_wisdom_add_link(acr_ctx *ctx, const acr_link *link)
{
    if (!ctx || !link)
        return acr__fail(ACR_INVALID, "%s is NULL", ctx ? "link" : "ctx");
    acr_status status = check_link(link);
    if (status != ACR_OK)
        return status;
    pthread_mutex_lock(&ctx->lock);
    status = acr__wisdom_put_link(ctx->wisdom, link);
    pthread_mutex_unlock(&ctx->lock);
    return status;
}

acr_status acr_wisdom_find_link(const acr_ctx *ctx, int32_t ranks, int32_t hosts, acr_link *out)
{
    if (!ctx || !out)
        return acr__fail(ACR_INVALID, "%s is NULL", ctx ? "out" : "ctx");
    pthread_mutex_t *lock = (pthread_mutex_t *)&ctx->lock; /* locking does not change what the context holds */
    pthread_mutex_lock(lock);
    const acr_link *link = acr__wisdom_find_link(ctx->wisdom, ranks, hosts);
    if (link)
        *out = *link;
    pthread_mutex_unlock(lock);
    return link ? ACR_OK
                : acr__fail(ACR_NO_WISDOM, "no wisdom of a link of %d ranks on %d hosts", (int)ranks, (int)hosts);
}

void acr_wisdom_forget(acr_ctx *ctx)
{
    if (!ctx)
        return;
    pthread_mutex_lock(&ctx->lock);
    acr__wisdom_clear(ctx->wisdom);
    acr__forward_cache_clear(ctx->cache, ctx->device);
    pthread_mutex_unlock(&ctx->lock);
}
