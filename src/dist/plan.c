#include "plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

/* ---- Small things ------------------------------------------------------------------------------------------------ */

size_t dist_dtype_bytes(acr_dtype dtype)
{
    return dtype == ACR_F32 ? 4 : dtype == ACR_E4M3 ? 1 : 2;
}

size_t dist_round_up(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

acr_dtype dist_kv_dtype(const acr_problem *p)
{
    return p->kv_dtype == ACR_DTYPE_DEFAULT ? p->dtype : p->kv_dtype;
}

acr_strides dist_packed(acr_layout layout, int64_t heads, int64_t rows, int64_t dim)
{
    return layout == ACR_BHSD ? (acr_strides){heads * rows * dim, rows * dim, dim}
                              : (acr_strides){rows * heads * dim, dim, heads * dim};
}

int64_t dist_element(const acr_strides *s, int64_t head, int64_t row)
{
    return head * s->head + row * s->row;
}

acr_status dist_calloc(size_t count, size_t bytes, void *out)
{
    void *block = calloc(count ? count : 1, bytes);
    memcpy(out, &block, sizeof block);
    return block ? ACR_OK : dist_fail(ACR_NO_MEMORY, "out of memory");
}

/* An array with room for one more. */
static acr_status grow(void *array, int count, size_t bytes)
{
    void *old, *block;
    memcpy(&old, array, sizeof old);
    if (count & (count - 1)) /* full at powers of two only */
        return ACR_OK;
    block = realloc(old, (count ? 2 * (size_t)count : 1) * bytes);
    if (!block)
        return dist_fail(ACR_NO_MEMORY, "out of memory");
    memcpy(array, &block, sizeof block);
    return ACR_OK;
}

acr_status dist_plan_alloc(acr_group_plan *plan, size_t bytes, void **out)
{
    if (plan->is_estimate) { /* an address to reckon with, which nothing touches */
        *out = (void *)(uintptr_t)4096;
        plan->memory_bytes += dist_round_up(bytes);
        return ACR_OK;
    }
    acr_status status = grow(&plan->memory, plan->memory_count, sizeof *plan->memory);
    if (status == ACR_OK)
        status = dist_alloc(&plan->group->device, dist_round_up(bytes ? bytes : 1), out);
    if (status == ACR_OK) {
        plan->memory[plan->memory_count++] = *out;
        plan->memory_bytes += dist_round_up(bytes);
    }
    return status;
}

acr_status dist_plan_alloc_shared(acr_group_plan *plan, int channels, size_t bytes, void **out)
{
    const acr_group *group = plan->group;
    void *memory = NULL;
    if (plan->way != DIST_BY_COPIES)
        return dist_plan_alloc(plan, bytes, out);
    const acr_status status = dist_plan_alloc(plan, dist_push_bytes(group, channels, bytes), &memory);
    if (status != ACR_OK)
        return status;
    plan->shared = memory;
    plan->channels = channels;
    *out = (char *)memory + dist_push_offset(group, channels);
    return ACR_OK;
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

acr_status dist_plan_kernel(acr_group_plan *plan, const acr_problem *problem, int *out)
{
    char text[ACR_PROBLEM_TEXT_MAX];
    acr_status status = dist_pass(acr_problem_format(problem, text, sizeof text));
    for (int i = 0; i < plan->kernel_count && status == ACR_OK; i++)
        if (strcmp(plan->kernels[i].text, text) == 0) {
            *out = i;
            return ACR_OK;
        }
    if (status == ACR_OK)
        status = grow(&plan->kernels, plan->kernel_count, sizeof *plan->kernels);
    if (status != ACR_OK)
        return status;
    dist_kernel *kernel = &plan->kernels[plan->kernel_count];
    *kernel = (dist_kernel){.plan = NULL};
    memcpy(kernel->text, text, sizeof text);
    status = dist_pass(plan->is_estimate ? acr_estimate_seconds(&kernel->seconds, plan->group->ctx, problem)
                                         : acr_plan_create(&kernel->plan, plan->group->ctx, problem, plan->effort));
    if (status != ACR_OK)
        return status;
    *out = plan->kernel_count++;
    if (plan->is_estimate)
        return ACR_OK;
    kernel->seconds = acr_plan_seconds(kernel->plan);
    const size_t bytes = acr_plan_workspace(kernel->plan);
    if (bytes == 0)
        return ACR_OK;
    status = dist_plan_alloc(plan, bytes, &kernel->workspace);
    return status == ACR_OK
               ? dist_pass(acr_workspace_init(kernel->plan, kernel->workspace, bytes, plan->group->device.transfers))
               : status;
}

static acr_problem problem_of(const acr_group_plan *plan, const dist_call *call, const dist_shape *shape)
{
    acr_problem p = plan->problem;
    p.q_heads = shape->q_heads;
    p.kv_heads = shape->kv_heads;
    p.q_len = shape->rows;
    p.kv_len = shape->keys.count;
    p.mask = shape->keys.is_causal ? ACR_MASK_CAUSAL : ACR_MASK_NONE;
    p.q = shape->q;
    p.k = shape->k;
    p.v = shape->v;
    p.o = shape->o;
    if (shape->is_partial) {
        p.out_dtype = plan->part_dtype;
        p.flags |= ACR_WANT_LSE;
    }
    if (!shape->with_sinks)
        p.flags &= ~(uint32_t)ACR_SINKS;
    for (size_t all = call->q | call->k | call->v | call->o; all % p.alignment;)
        p.alignment /= 2;
    return p;
}

acr_status dist_plan_add_call(acr_group_plan *plan, const dist_call *call, const dist_shape *shape)
{
    const acr_problem p = problem_of(plan, call, shape);
    acr_status status = grow(&plan->calls, plan->call_count, sizeof *plan->calls);
    if (status != ACR_OK)
        return status;
    plan->calls[plan->call_count] = *call;
    plan->calls[plan->call_count].with_sinks = shape->with_sinks;
    if ((status = dist_plan_kernel(plan, &p, &plan->calls[plan->call_count].kernel)) == ACR_OK)
        plan->call_count++;
    return status;
}

acr_status dist_plan_run(const acr_group_plan *plan, const dist_call *call, const acr_buffers *rank, const void *k,
                         const void *v, void *o, float *lse, void *stream)
{
    const dist_kernel *kernel = &plan->kernels[call->kernel];
    acr_buffers b = ACR_BUFFERS_INIT;
    b.q = (const char *)rank->q + call->q;
    b.k = (const char *)k + call->k;
    b.v = (const char *)v + call->v;
    b.o = o;
    b.lse = lse;
    b.sinks = call->with_sinks ? rank->sinks + call->q_head : NULL;
    return dist_pass(acr_execute(kernel->plan, &b, kernel->workspace, acr_plan_workspace(kernel->plan), stream));
}

/* ---- What is served ---------------------------------------------------------------------------------------------- */

static const struct {
    uint32_t flag;
    const char *name;
} flags[] = {{ACR_KV_LENS, "ACR_KV_LENS"},   {ACR_PACKED, "ACR_PACKED"}, {ACR_KV_STARTS, "ACR_KV_STARTS"},
             {ACR_ALIBI, "ACR_ALIBI"},       {ACR_RANGES, "ACR_RANGES"}, {ACR_TREE, "ACR_TREE"},
             {ACR_PAGED, "ACR_PAGED"},       {ACR_V_IN_K, "ACR_V_IN_K"}, {ACR_INVARIANT, "ACR_INVARIANT"},
             {ACR_WANT_LSE, "ACR_WANT_LSE"}, {ACR_SINKS, "ACR_SINKS"},   {ACR_FAST_ATOMICS, "ACR_FAST_ATOMICS"}};

static acr_status refuse(const acr_group_plan *plan, const char *what)
{
    return dist_fail(ACR_UNSUPPORTED, "schedule %s does not serve %s", plan->schedule->name, what);
}

static acr_status check_common(const acr_group_plan *plan, uint32_t served)
{
    const acr_problem *p = &plan->problem;
    if (p->pass != ACR_FORWARD)
        return refuse(plan, "ACR_BACKWARD");
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        if (p->flags & ~served & flags[i].flag)
            return refuse(plan, flags[i].name);
    if (p->bias_dtype != ACR_DTYPE_DEFAULT)
        return refuse(plan, "a bias (bias_dtype)");
    if (p->chunk != 0)
        return refuse(plan, "chunk");
    return p->window_right != 0 ? refuse(plan, "window_right") : ACR_OK;
}

static int is_packed(const acr_problem *p, const acr_strides *s, int64_t heads, int64_t rows, int64_t dim)
{
    const acr_strides packed = dist_packed(p->layout, heads, rows, dim);
    return (p->batch == 1 || s->batch == packed.batch) && (heads == 1 || s->head == packed.head) &&
           (rows == 1 || s->row == packed.row);
}

static acr_status check_sequences(const acr_group_plan *plan)
{
    const acr_problem *p = &plan->problem;
    const int chunks = dist_chunks(plan->group->ranks, plan->sequences.placement);
    acr_status status = check_common(plan, ACR_WANT_LSE | ACR_SINKS);
    if (status != ACR_OK)
        return status;
    if (p->window_left != 0 && (p->mask == ACR_MASK_NONE || plan->schedule == &dist_ring))
        return refuse(plan, p->mask == ACR_MASK_NONE ? "window_left without a mask" : "window_left");
    if (p->mask != ACR_MASK_NONE && p->q_len > p->kv_len)
        return refuse(plan, "a mask where q_len is greater than kv_len");
    if (!is_packed(p, &p->q, p->q_heads, p->q_len, p->qk_dim) ||
        !is_packed(p, &p->k, p->kv_heads, p->kv_len, p->qk_dim) ||
        !is_packed(p, &p->v, p->kv_heads, p->kv_len, p->v_dim) || !is_packed(p, &p->o, p->q_heads, p->q_len, p->v_dim))
        return refuse(plan, "strides: tensors are packed");
    if (p->q_len < chunks || p->kv_len < chunks)
        return dist_fail(ACR_INVALID, "problem.%s is %lld, less than the %d chunks that %d ranks hold",
                         p->q_len < chunks ? "q_len" : "kv_len", (long long)(p->q_len < chunks ? p->q_len : p->kv_len),
                         chunks, plan->group->ranks);
    return ACR_OK;
}

static acr_status check_sharded_keys(const acr_group_plan *plan)
{
    const acr_problem *p = &plan->problem;
    if (p->window_left != 0)
        return refuse(plan, "window_left");
    if (p->mask == ACR_MASK_CAUSAL_TOP_LEFT || (p->mask != ACR_MASK_NONE && p->q_len != 1))
        return refuse(plan, "a mask that hides keys");
    return check_common(plan, ACR_WANT_LSE | ACR_SINKS | ACR_KV_LENS | ACR_KV_STARTS | ACR_PAGED | ACR_V_IN_K);
}

static acr_status read_arguments(acr_group_plan *plan, const acr_problem *problem, acr_schedule schedule,
                                 acr_placement placement)
{
    acr_problem *p = &plan->problem;
    acr_status status = dist_pass(acr_problem_canonical(p, problem));
    if (status != ACR_OK)
        return status;
    if (placement != ACR_CONTIGUOUS && placement != ACR_ZIGZAG)
        return dist_fail(ACR_INVALID, "placement is %d, must be ACR_CONTIGUOUS or ACR_ZIGZAG", (int)placement);
    switch (schedule) {
    case ACR_SCHEDULE_AUTO:
        plan->schedule = p->window_left != 0 ? &dist_gather : &dist_ring;
        break;
    case ACR_RING:
        plan->schedule = &dist_ring;
        break;
    case ACR_GATHER:
        plan->schedule = &dist_gather;
        break;
    case ACR_SHARDED_KEYS:
        plan->schedule = &dist_sharded_keys;
        break;
    default:
        return dist_fail(ACR_INVALID, "schedule is %d, must be ACR_SCHEDULE_AUTO to ACR_SHARDED_KEYS", (int)schedule);
    }
    plan->part_dtype = p->dtype == ACR_E4M3 ? p->out_dtype : ACR_F32;
    plan->sequences = (dist_sequences){.q_len = p->q_len,
                                       .kv_len = p->kv_len,
                                       .ranks = plan->group->ranks,
                                       .placement = placement,
                                       .is_causal = p->mask != ACR_MASK_NONE,
                                       .diagonal = p->mask == ACR_MASK_CAUSAL ? p->kv_len - p->q_len : 0,
                                       .window_left = p->window_left};
    return plan->schedule == &dist_sharded_keys ? check_sharded_keys(plan) : check_sequences(plan);
}

/* What the ranks must have alike. */
static acr_status write_arguments(const acr_group_plan *plan, char *text, size_t bytes)
{
    acr_problem p = plan->problem;
    char problem[ACR_PROBLEM_TEXT_MAX];
    if (plan->schedule == &dist_sharded_keys) { /* of the keys all but how many, and where they lie */
        const acr_strides packed = {0, 0, 0};
        p.kv_len = p.q_len;
        p.mask = ACR_MASK_NONE;
        p.flags &= (uint32_t)(ACR_WANT_LSE | ACR_SINKS | ACR_V_IN_K);
        p.page = 0;
        p.q = p.k = p.v = p.o = packed;
    }
    const acr_status status = dist_pass(acr_problem_format(&p, problem, sizeof problem));
    if (status == ACR_OK)
        snprintf(text, bytes, "%s, %s, placement %d, effort %d, scales %a %a %a %a, softcap %a", problem,
                 plan->schedule->name, (int)plan->sequences.placement, (int)plan->effort, (double)p.scale,
                 (double)p.q_scale, (double)p.k_scale, (double)p.v_scale, (double)p.softcap);
    return status;
}

/* ---- Making and ending ------------------------------------------------------------------------------------------- */

enum {
    LATER_BYTES = 768 /* of lines that are known when the ranks have agreed */
};

/* With room for what add_line writes. */
static acr_status write_text(acr_group_plan *plan)
{
    static const char *const dtypes[] = {"", "f32", "f16", "bf16", "e4m3"};
    size_t bytes = 256 + LATER_BYTES;
    for (int i = 0; i < plan->kernel_count; i++)
        bytes += strlen(acr_plan_text(plan->kernels[i].plan)) + 1;
    bytes += strlen(plan->narrow_reason) + strlen(plan->choice);
    const acr_status status = dist_calloc(bytes, 1, &plan->text);
    if (status != ACR_OK)
        return status;
    size_t at = (size_t)snprintf(plan->text, bytes, "%s over %d ranks, %d calls, partial results in %s%s%s",
                                 plan->schedule->name, plan->group->ranks, plan->call_count,
                                 plan->schedule == &dist_gather ? "no type: there are none" : dtypes[plan->part_dtype],
                                 *plan->narrow_reason ? ", not in f32: " : "", plan->narrow_reason);
    if (*plan->choice)
        at += (size_t)snprintf(plan->text + at, bytes - at, "\nchosen %s", plan->choice);
    for (int i = 0; i < plan->kernel_count; i++)
        at += (size_t)snprintf(plan->text + at, bytes - at, "\n%s", acr_plan_text(plan->kernels[i].plan));
    return ACR_OK;
}

static void add_line(acr_group_plan *plan, const char *line, const char *more)
{
    const size_t length = strlen(plan->text);
    snprintf(plan->text + length, LATER_BYTES, "\n%s%s", line, more);
}

/* How keys and values travel, and what is expected. */
static void add_agreed(acr_group_plan *plan)
{
    char line[64];
    if (plan->way == DIST_BY_COPIES)
        add_line(plan, "transfers by copy engines", "");
    else if (plan->way == DIST_BY_NCCL)
        add_line(plan, "transfers by NCCL: ", plan->way_reason);
    snprintf(line, sizeof line, "expected of the slowest rank: %.3f ms", plan->seconds * 1e3);
    if (plan->seconds > 0.0)
        add_line(plan, line, "");
}

/* The part that does not speak to other ranks. */
acr_status dist_plan_prepare(acr_group_plan *plan)
{
    const dist_device *device = &plan->group->device;
    acr_status status = dist_enter(device);
    if (status != ACR_OK)
        return status;
    status = plan->schedule->prepare(plan);
    if (status == ACR_OK && !plan->is_estimate)
        status = write_text(plan);
    dist_leave(device);
    return status;
}

/* Forgets what prepare made. */
void dist_plan_unprepare(acr_group_plan *plan)
{
    const dist_device *device = &plan->group->device;
    if (dist_enter(device) == ACR_OK) {
        for (int i = 0; i < plan->memory_count; i++)
            if (!plan->push || plan->memory[i] != plan->shared)
                dist_free(device, plan->memory[i]);
        dist_push_close(plan->group, plan->push);
        dist_leave(device);
    }
    for (int i = 0; i < plan->kernel_count; i++)
        acr_plan_destroy(plan->kernels[i].plan);
    void *const lists[] = {plan->memory, plan->kernels, plan->calls, plan->pieces, plan->own, plan->text};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        free(lists[i]);
    plan->push = NULL;
    plan->shared = NULL;
    plan->memory = NULL;
    plan->kernels = NULL;
    plan->calls = NULL;
    plan->pieces = NULL;
    plan->own = NULL;
    plan->text = NULL;
    plan->memory_count = plan->kernel_count = plan->call_count = plan->piece_count = 0;
    plan->memory_bytes = plan->traffic_bytes = 0;
}

/* Seconds that this rank is expected to take; 0 where it knows no link. */
static double expected(const acr_group_plan *plan)
{
    acr_link link;
    return plan->group->ranks > 1 && dist_link_of(plan->group, &link) ? plan->schedule->expect(plan, &link) : 0.0;
}

/* What ranks tell each other of their seconds: values[1] is 1 where one knows no link. */
static void tell_seconds(const acr_group_plan *plan, acr_status status, double *values)
{
    values[0] = status == ACR_OK ? expected(plan) : 0.0;
    values[1] = values[0] == 0.0;
}

/* What partial results in float32 may cost: kernels that write them take at most so many times as long as those that
 * write the output's type, or so many seconds longer. Decoding may have only kernels for prompts that write float32. */
static const double F32_TIMES = 2.0, F32_SECONDS = 50e-6;

/* Says why not where the plan's kernels, which write float32, are expected to cost more. */
static acr_status weigh_f32(const acr_group_plan *plan, char *reason, size_t bytes)
{
    double wide = 0.0, narrow = 0.0;
    for (int i = 0; i < plan->kernel_count; i++) {
        acr_problem p;
        double seconds[2] = {0.0, 0.0};
        acr_status status = dist_pass(acr_problem_parse(&p, plan->kernels[i].text, NULL));
        if (status == ACR_OK)
            status = dist_pass(acr_estimate_seconds(&seconds[0], plan->group->ctx, &p));
        p.out_dtype = plan->problem.out_dtype;
        if (status == ACR_OK)
            status = dist_pass(acr_estimate_seconds(&seconds[1], plan->group->ctx, &p));
        if (status != ACR_OK)
            return status == ACR_UNSUPPORTED ? ACR_OK : status; /* there is nothing to compare with */
        wide += seconds[0];
        narrow += seconds[1];
    }
    if (wide > F32_TIMES * narrow && wide - narrow > F32_SECONDS)
        snprintf(reason, bytes, "kernels that write f32 are expected to take %.1f times as long", wide / narrow);
    return ACR_OK;
}

/* Shares the plan's memory with the other ranks. If one cannot, the plan is made anew for NCCL. values: seconds, told
 * again then. */
static acr_status share(acr_group_plan *plan, double *values)
{
    acr_group *group = plan->group;
    double none[DIST_VALUES] = {0.0};
    char objection[sizeof plan->way_reason];
    acr_status status = dist_enter(&group->device);
    if (status != ACR_OK)
        return status;
    status = dist_push_open(group, "", none, plan->shared, plan->channels, &plan->push, plan->way_reason,
                            sizeof plan->way_reason);
    dist_leave(&group->device);
    if (status != ACR_OK || plan->push)
        return status;
    if (group->wants_copies)
        return dist_way_refused(plan->way_reason);
    dist_plan_unprepare(plan);
    plan->way = DIST_BY_NCCL;
    status = dist_plan_prepare(plan);
    memset(values, 0, DIST_VALUES * sizeof *values);
    tell_seconds(plan, status, values);
    return dist_group_object(group, status, status == ACR_OK ? "" : acr_group_last_error(), values, objection,
                             sizeof objection);
}

/* Partial results in float32 if every rank has kernels that write them without costing much, otherwise on all ranks in
 * the type of the output: ranks exchange them. Ranks agree behind the work, so that none waits for one that has no
 * plan. */
static acr_status prepare_with_others(acr_group_plan *plan)
{
    char reason[sizeof plan->narrow_reason] = "";
    double values[DIST_VALUES] = {0.0};
    const int may_be_narrow = plan->part_dtype != plan->problem.out_dtype;
    acr_status status = dist_plan_prepare(plan);
    if (status == ACR_OK && may_be_narrow)
        status = weigh_f32(plan, reason, sizeof reason);
    if (status == ACR_UNSUPPORTED && may_be_narrow) {
        snprintf(reason, sizeof reason, "%s", acr_group_last_error());
        status = ACR_OK;
    } else if (!*reason) {
        tell_seconds(plan, status, values);
    }
    status = dist_group_object(plan->group, status, status == ACR_OK ? reason : acr_group_last_error(), values,
                               plan->narrow_reason, sizeof plan->narrow_reason);
    if (status == ACR_OK && *plan->narrow_reason) {
        char objection[sizeof plan->narrow_reason];
        dist_plan_unprepare(plan);
        plan->part_dtype = plan->problem.out_dtype;
        status = dist_plan_prepare(plan);
        memset(values, 0, sizeof values);
        tell_seconds(plan, status, values);
        status = dist_group_object(plan->group, status, status == ACR_OK ? "" : acr_group_last_error(), values,
                                   objection, sizeof objection);
    }
    if (status == ACR_OK && plan->shared)
        status = share(plan, values);
    if (status != ACR_OK)
        return status;
    plan->seconds = values[1] > 0.0 ? 0.0 : values[0];
    add_agreed(plan);
    return ACR_OK;
}

acr_status acr_group_plan_create(acr_group_plan **out, acr_group *group, const acr_problem *problem,
                                 acr_schedule schedule, acr_placement placement, acr_effort effort)
{
    if (!out || !group || !problem)
        return dist_fail(ACR_INVALID, "%s is NULL", !out ? "out" : group ? "problem" : "group");
    acr_status status = dist_group_check(group);
    if (status != ACR_OK)
        return status;
    acr_group_plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return dist_fail(ACR_NO_MEMORY, "out of memory");
    char text[ACR_PROBLEM_TEXT_MAX + 256];
    plan->group = group;
    plan->effort = effort;
    status = read_arguments(plan, problem, schedule, placement);
    if (status == ACR_OK)
        status = write_arguments(plan, text, sizeof text);
    /* Ranks agree before the work, so that each tells its own mistake. */
    status = dist_group_agree(group, status, status == ACR_OK ? text : acr_group_last_error());
    if (status == ACR_OK && group->ranks > 1 && plan->schedule != &dist_sharded_keys) {
        status = dist_way_find(group);
        plan->way = group->way;
        memcpy(plan->way_reason, group->way_reason, sizeof plan->way_reason);
    }
    if (status == ACR_OK && schedule == ACR_SCHEDULE_AUTO && plan->schedule == &dist_ring && group->ranks > 1)
        status = dist_plan_choose(plan, &dist_gather);
    if (status == ACR_OK)
        status = prepare_with_others(plan);
    if (status != ACR_OK) {
        acr_group_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return ACR_OK;
}

acr_status acr_group_refuse(acr_group *group, acr_status status, const char *text)
{
    if (!group || !text)
        return dist_fail(ACR_INVALID, "%s is NULL", group ? "text" : "group");
    if (status == ACR_OK)
        return dist_fail(ACR_INVALID, "status is ACR_OK: nothing is refused");
    const acr_status broken = dist_group_check(group);
    return broken == ACR_OK ? dist_group_agree(group, status, text) : broken;
}

void acr_group_plan_destroy(acr_group_plan *plan)
{
    if (!plan)
        return;
    dist_plan_unprepare(plan);
    free(plan);
}

const char *acr_group_plan_text(const acr_group_plan *plan)
{
    return plan ? plan->text : "";
}

double acr_group_plan_seconds(const acr_group_plan *plan)
{
    return plan ? plan->seconds : 0.0;
}

size_t acr_group_plan_memory(const acr_group_plan *plan)
{
    return plan ? plan->memory_bytes : 0;
}

size_t acr_group_plan_traffic(const acr_group_plan *plan)
{
    return plan ? plan->traffic_bytes : 0;
}

/* ---- Executing --------------------------------------------------------------------------------------------------- */

static acr_status check_pointer(const char *name, const void *pointer, uint32_t alignment)
{
    if (!pointer)
        return dist_fail(ACR_INVALID, "buffers.%s is NULL", name);
    return (uintptr_t)pointer % alignment == 0
               ? ACR_OK
               : dist_fail(ACR_ALIGNMENT, "buffers.%s is not a multiple of %u bytes", name, alignment);
}

/* Those that a schedule over sequences uses, and no others. acr_execute checks those of sharded keys. */
static acr_status check_buffers(const acr_group_plan *plan, const acr_buffers *b)
{
    const acr_problem *p = &plan->problem;
    acr_buffers used = ACR_BUFFERS_INIT;
    acr_status status;
    used.flags = b->flags;
    used.q = b->q;
    used.k = b->k;
    used.v = b->v;
    used.o = b->o;
    if (p->flags & ACR_WANT_LSE)
        used.lse = b->lse;
    if (p->flags & ACR_SINKS)
        used.sinks = b->sinks;
    if (memcmp(&used, b, sizeof used) != 0)
        return dist_fail(ACR_INVALID, "buffers has one that the problem does not want");
    if ((status = check_pointer("q", b->q, p->alignment)) != ACR_OK ||
        (status = check_pointer("k", b->k, p->alignment)) != ACR_OK ||
        (status = check_pointer("v", b->v, p->alignment)) != ACR_OK ||
        (status = check_pointer("o", b->o, p->alignment)) != ACR_OK)
        return status;
    if ((p->flags & ACR_WANT_LSE) && (status = check_pointer("lse", b->lse, sizeof(float))) != ACR_OK)
        return status;
    return p->flags & ACR_SINKS ? check_pointer("sinks", b->sinks, sizeof(float)) : ACR_OK;
}

acr_status acr_group_execute(acr_group_plan *plan, const acr_buffers *buffers, void *stream)
{
    acr_buffers b = ACR_BUFFERS_INIT;
    if (!plan || !buffers)
        return dist_fail(ACR_INVALID, "%s is NULL", plan ? "buffers" : "plan");
    if (buffers->size < sizeof(uint32_t) || buffers->size > sizeof b)
        return dist_fail(ACR_INVALID, "buffers.size is %u, must be at most %zu: initialise with ACR_BUFFERS_INIT",
                         buffers->size, sizeof b);
    memcpy(&b, buffers, buffers->size);
    b.size = sizeof b;
    acr_status status = dist_group_check(plan->group);
    if (status == ACR_OK && b.flags != 0)
        status = dist_fail(ACR_INVALID, "buffers.flags is 0x%x, must be 0 over several ranks", b.flags);
    if (status == ACR_OK && plan->schedule != &dist_sharded_keys)
        status = check_buffers(plan, &b);
    if (status != ACR_OK || (status = dist_enter(&plan->group->device)) != ACR_OK)
        return status;
    status = plan->schedule->execute(plan, &b, stream);
    dist_leave(&plan->group->device);
    return status;
}
