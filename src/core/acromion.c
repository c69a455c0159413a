/* The entry points of acromion.h: they validate, and delegate. */
#include "acromion.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "backward.h"
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

static acr_status check_offsets(const acr_plan *plan, const acr_buffers *b)
{
    if (!(plan->problem.flags & ACR_PACKED)) {
        if (b->q_offsets || b->kv_offsets || b->q_total != 0 || b->kv_total != 0)
            return acr__fail(ACR_INVALID, "buffers.%s is given, the problem lacks ACR_PACKED",
                             b->q_offsets    ? "q_offsets"
                             : b->kv_offsets ? "kv_offsets"
                             : b->q_total    ? "q_total"
                                             : "kv_total");
        return ACR_OK;
    }
    if (!b->q_offsets || !b->kv_offsets)
        return acr__fail(ACR_INVALID, "buffers.%s is NULL, the problem has ACR_PACKED",
                         b->q_offsets ? "kv_offsets" : "q_offsets");
    const acr_status status = check_total("q_total", b->q_total);
    return status == ACR_OK ? check_total("kv_total", b->kv_total) : status;
}

static acr_status check_scales(const acr_plan *plan, const acr_buffers *b)
{
    if (plan->problem.dtype == ACR_E4M3 || (!b->q_scales && !b->k_scales && !b->v_scales))
        return ACR_OK;
    return acr__fail(ACR_INVALID,
                     "buffers.%s_scales is given, but only e4m3 inputs have scales and the problem's are %s",
                     b->q_scales   ? "q"
                     : b->k_scales ? "k"
                                   : "v",
                     acr__dtype_text(plan->problem.dtype));
}

/* A buffer of a term is given where the problem has the term, and only there. */
static acr_status check_terms(const acr_plan *plan, const acr_buffers *b)
{
    const uint32_t flags = plan->problem.flags;
    const struct {
        const char *name, *term;
        const void *pointer;
        bool wanted;
    } terms[] = {{"kv_starts", "ACR_KV_STARTS", b->kv_starts, flags & ACR_KV_STARTS},
                 {"sinks", "ACR_SINKS", b->sinks, flags & ACR_SINKS},
                 {"slopes", "ACR_ALIBI", b->slopes, flags & ACR_ALIBI},
                 {"bias", "bias_dtype", b->bias, plan->problem.bias_dtype != ACR_DTYPE_DEFAULT},
                 {"ranges", "ACR_RANGES", b->ranges, flags & ACR_RANGES},
                 {"tree", "ACR_TREE", b->tree, flags & ACR_TREE}};
    for (size_t i = 0; i < sizeof terms / sizeof terms[0]; i++)
        if (terms[i].wanted != (terms[i].pointer != NULL))
            return acr__fail(ACR_INVALID,
                             terms[i].wanted ? "buffers.%s is NULL, the problem has %s"
                                             : "buffers.%s is given, the problem lacks %s",
                             terms[i].name, terms[i].term);
    return ACR_OK;
}

/* What no problem reads yet. */
static acr_status refuse_unserved(const acr_buffers *b)
{
    const struct {
        const char *name;
        bool given;
    } fields[] = {
        {"page_table", b->page_table != NULL}, {"table_stride", b->table_stride != 0}, {"pages", b->pages != 0}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].given)
            return acr__fail(ACR_INVALID, "buffers.%s is given, no problem reads it yet", fields[i].name);
    return ACR_OK;
}

static acr_status check_presence(const acr_plan *plan, const acr_buffers *b)
{
    if (b->flags & ~(uint32_t)ACR_OVERLAP_PREVIOUS)
        return acr__fail(ACR_INVALID, "buffers.flags 0x%x has bits that are not ACR_OVERLAP_PREVIOUS", b->flags);
    if (!b->q || !b->k || !b->v || !b->o)
        return acr__fail(ACR_INVALID, "buffers.%s is NULL", !b->q ? "q" : !b->k ? "k" : !b->v ? "v" : "o");
    const bool want_lse = plan->problem.flags & ACR_WANT_LSE, has_lengths = plan->problem.flags & ACR_KV_LENS;
    if (want_lse != (b->lse != NULL))
        return acr__fail(ACR_INVALID,
                         want_lse ? "buffers.lse is NULL, the problem has %s"
                                  : "buffers.lse is given, the problem lacks %s",
                         plan->problem.pass == ACR_BACKWARD ? "ACR_BACKWARD" : "ACR_WANT_LSE");
    if (has_lengths != (b->kv_lens != NULL))
        return acr__fail(ACR_INVALID, has_lengths ? "buffers.kv_lens is NULL, the problem has ACR_KV_LENS"
                                                  : "buffers.kv_lens is given, the problem lacks ACR_KV_LENS");
    acr_status status = check_scales(plan, b);
    if (status == ACR_OK)
        status = check_terms(plan, b);
    if (status == ACR_OK)
        status = refuse_unserved(b);
    if (status == ACR_OK)
        status = acr__check_backward_buffers(&plan->problem, b);
    return status == ACR_OK ? check_offsets(plan, b) : status;
}

static acr_status check_alignment(const acr_plan *plan, const acr_buffers *b)
{
    const size_t promised = plan->problem.alignment;
    const int bias_bytes = acr__dtype_bytes(plan->problem.bias_dtype);
    const struct {
        const char *name;
        const void *pointer;
        size_t alignment;
    } pointers[] = {{"q", b->q, promised},
                    {"k", b->k, promised},
                    {"v", b->v, promised},
                    {"o", b->o, promised},
                    {"lse", b->lse, sizeof(float)},
                    {"kv_lens", b->kv_lens, sizeof(int32_t)},
                    {"q_offsets", b->q_offsets, sizeof(int32_t)},
                    {"kv_offsets", b->kv_offsets, sizeof(int32_t)},
                    {"q_scales", b->q_scales, sizeof(float)},
                    {"k_scales", b->k_scales, sizeof(float)},
                    {"v_scales", b->v_scales, sizeof(float)},
                    {"kv_starts", b->kv_starts, sizeof(int32_t)},
                    {"sinks", b->sinks, sizeof(float)},
                    {"slopes", b->slopes, sizeof(float)},
                    {"bias", b->bias, bias_bytes > 0 ? (size_t)bias_bytes : 1},
                    {"ranges", b->ranges, sizeof(int32_t)},
                    {"d_o", b->d_o, promised},
                    {"dq", b->dq, promised},
                    {"dk", b->dk, promised},
                    {"dv", b->dv, promised},
                    {"dsinks", b->dsinks, sizeof(float)}};
    for (size_t i = 0; i < sizeof pointers / sizeof pointers[0]; i++)
        if (!acr__is_aligned(pointers[i].pointer, pointers[i].alignment))
            return acr__fail(ACR_ALIGNMENT, "buffers.%s is %p, not a multiple of %zu bytes as the problem says",
                             pointers[i].name, pointers[i].pointer, pointers[i].alignment);
    return ACR_OK;
}

/* total: rows of a packed tensor, whose span the plan cannot know; else 0. Only steps from row to row tell two tensors
 * apart: how many rows there are is left open. */
static acr__extent extent_of(const char *name, const void *pointer, const acr_problem *p, int64_t span_bytes,
                             int64_t heads, int64_t total, int64_t dim, const acr_strides *s, acr_dtype dtype)
{
    const int64_t size = acr__dtype_bytes(dtype);
    if (total > 0)
        span_bytes = acr__span_bytes(1, heads, total, dim, s, dtype);
    return (acr__extent){.name = name,
                         .first = (uintptr_t)pointer,
                         .bytes = span_bytes,
                         .batch = p->batch,
                         .heads = heads,
                         .rows = INT64_MAX,
                         .row_bytes = s->row * size,
                         .head_bytes = s->head * size,
                         .batch_bytes = p->batch > 1 ? s->batch * size : 0,
                         .dim_bytes = dim * size};
}

/* NULL: nothing. */
static acr__extent block_of(const char *name, const void *pointer, int64_t bytes)
{
    return acr__extent_of_block(name, pointer, bytes);
}

/* Where an execution's buffers lie. The outputs of a forward pass are o and lse, which are inputs of a backward one. */
enum {
    OUTPUTS_MOST = 4,
    INPUTS_MOST = 18
};
typedef struct execution_extents {
    acr__extent outputs[OUTPUTS_MOST], inputs[INPUTS_MOST];
    int output_count, input_count;
} execution_extents;

static void add_output(execution_extents *e, acr__extent output)
{
    e->outputs[e->output_count++] = output;
}

static void add_input(execution_extents *e, acr__extent input)
{
    e->inputs[e->input_count++] = input;
}

static void add_gradients(execution_extents *e, const acr_plan *plan, const acr_buffers *b)
{
    const acr_problem *p = &plan->problem;
    const acr_dtype grad = p->grad_dtype;
    add_input(
        e, extent_of("d_o", b->d_o, p, plan->d_o_span_bytes, p->q_heads, b->q_total, p->v_dim, &p->d_o, p->out_dtype));
    add_output(e, extent_of("dq", b->dq, p, plan->dq_span_bytes, p->q_heads, b->q_total, p->qk_dim, &p->dq, grad));
    add_output(e, extent_of("dk", b->dk, p, plan->dk_span_bytes, p->kv_heads, b->kv_total, p->qk_dim, &p->dk, grad));
    add_output(e, extent_of("dv", b->dv, p, plan->dv_span_bytes, p->kv_heads, b->kv_total, p->v_dim, &p->dv, grad));
    if (b->dsinks)
        add_output(e, block_of("dsinks", b->dsinks, acr__term_bytes_of(p).dsinks));
}

static void find_extents(execution_extents *e, const acr_plan *plan, const acr_buffers *b)
{
    const acr_problem *p = &plan->problem;
    const int64_t scale_bytes = p->batch * p->kv_heads * (int64_t)sizeof(float);
    const acr__term_bytes term = acr__term_bytes_of(p);
    const int64_t lse_rows = p->q_heads * (b->q_total > 0 ? b->q_total : p->batch * p->q_len);
    const acr__extent o =
        extent_of("o", b->o, p, plan->o_span_bytes, p->q_heads, b->q_total, p->v_dim, &p->o, p->out_dtype);
    const acr__extent lse = block_of("lse", b->lse, lse_rows * (int64_t)sizeof(float));
    e->output_count = e->input_count = 0;
    const acr__extent inputs[] = {
        extent_of("q", b->q, p, plan->q_span_bytes, p->q_heads, b->q_total, p->qk_dim, &p->q, p->dtype),
        extent_of("k", b->k, p, plan->k_span_bytes, p->kv_heads, b->kv_total, p->qk_dim, &p->k, p->dtype),
        extent_of("v", b->v, p, plan->v_span_bytes, p->kv_heads, b->kv_total, p->v_dim, &p->v, p->dtype),
        block_of("kv_lens", b->kv_lens, p->batch * (int64_t)sizeof(int32_t)),
        block_of("q_offsets", b->q_offsets, (p->batch + 1) * (int64_t)sizeof(int32_t)),
        block_of("kv_offsets", b->kv_offsets, (p->batch + 1) * (int64_t)sizeof(int32_t)),
        block_of("q_scales", b->q_scales, scale_bytes),
        block_of("k_scales", b->k_scales, scale_bytes),
        block_of("v_scales", b->v_scales, scale_bytes),
        block_of("kv_starts", b->kv_starts, term.kv_starts),
        block_of("sinks", b->sinks, term.sinks),
        block_of("slopes", b->slopes, term.slopes),
        block_of("bias", b->bias, term.bias),
        block_of("ranges", b->ranges, term.ranges),
        block_of("tree", b->tree, term.tree)};
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
        add_input(e, inputs[i]);
    if (p->pass == ACR_BACKWARD) {
        add_input(e, o);
        add_input(e, lse);
        add_gradients(e, plan, b);
    } else {
        add_output(e, o);
        add_output(e, lse);
    }
}

static acr_status check_overlap(const execution_extents *e)
{
    for (int i = 0; i < e->output_count; i++) {
        const acr__extent *output = &e->outputs[i];
        for (int j = i + 1; j < e->output_count; j++)
            if (acr__overlap(output, &e->outputs[j]))
                return acr__fail(ACR_OVERLAP, "buffers.%s overlaps buffers.%s", output->name, e->outputs[j].name);
        for (int j = 0; j < e->input_count; j++)
            if (acr__overlap(output, &e->inputs[j]))
                return acr__fail(ACR_OVERLAP, "buffers.%s overlaps buffers.%s", output->name, e->inputs[j].name);
    }
    return ACR_OK;
}

static acr_status check_workspace_overlap(const acr_plan *plan, const execution_extents *e, const void *workspace)
{
    const acr__extent own = block_of("workspace", workspace, (int64_t)plan->prepared->workspace_bytes);
    for (int i = 0; i < e->output_count; i++)
        if (acr__overlap(&e->outputs[i], &own))
            return acr__fail(ACR_OVERLAP, "buffers.%s overlaps the workspace", e->outputs[i].name);
    for (int i = 0; i < e->input_count; i++)
        if (acr__overlap(&e->inputs[i], &own))
            return acr__fail(ACR_OVERLAP, "buffers.%s overlaps the workspace", e->inputs[i].name);
    return ACR_OK;
}

acr_status acr_execute(const acr_plan *plan, const acr_buffers *buffers, void *workspace, size_t bytes, void *stream)
{
    if (!plan || !buffers)
        return acr__fail(ACR_INVALID, "%s is NULL", plan ? "buffers" : "plan");
    acr_buffers b;
    acr_status status;
    if ((status = read_buffers(&b, buffers)) != ACR_OK || (status = check_presence(plan, &b)) != ACR_OK ||
        (status = check_alignment(plan, &b)) != ACR_OK)
        return status;
    execution_extents e;
    find_extents(&e, plan, &b);
    if ((status = check_overlap(&e)) != ACR_OK || (status = check_workspace(plan, workspace, bytes)) != ACR_OK ||
        (status = check_workspace_overlap(plan, &e, workspace)) != ACR_OK)
        return status;
    bwd_args args; /* of a forward pass `fwd` alone */
    acr__bwd_args(&args, &plan->problem, &b, workspace);
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

void acr_wisdom_forget(acr_ctx *ctx)
{
    if (!ctx)
        return;
    pthread_mutex_lock(&ctx->lock);
    acr__wisdom_clear(ctx->wisdom);
    acr__forward_cache_clear(ctx->cache, ctx->device);
    pthread_mutex_unlock(&ctx->lock);
}
