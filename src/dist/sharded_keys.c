/* Decoding over a cache whose keys lie on several ranks: each attends to its own, all exchange the small results, each
 * merges them in the order of ranks. */
#include "error.h"
#include "plan.h"

typedef struct sharded_data {
    char *parts; /* of all ranks: o, then lse */
    size_t part_bytes, o_bytes;
} sharded_data;

static acr_part part_of(const sharded_data *data, int rank)
{
    const char *part = data->parts + (size_t)rank * data->part_bytes;
    return (acr_part){part, (const float *)(const void *)(part + data->o_bytes)};
}

static acr_status sharded_prepare(acr_group_plan *plan)
{
    const acr_strides packed = {0, 0, 0};
    acr_problem p = plan->problem;
    sharded_data *data;
    acr_status status = dist_calloc(1, sizeof *data, &plan->own);
    if (status != ACR_OK)
        return status;
    data = plan->own;
    const size_t rows = (size_t)(p.batch * p.q_heads * p.q_len);
    data->o_bytes = dist_round_up(rows * (size_t)p.v_dim * dist_dtype_bytes(plan->part_dtype));
    data->part_bytes = data->o_bytes + dist_round_up(rows * sizeof(float));
    plan->traffic_bytes = data->part_bytes * (size_t)(plan->group->ranks - 1);
    void *memory = NULL;
    if ((status = dist_plan_alloc(plan, data->part_bytes * (size_t)plan->group->ranks, &memory)) != ACR_OK)
        return status;
    data->parts = memory;
    /* The part is packed and has an lse; one rank's counts the sink. */
    p.o = packed;
    p.out_dtype = plan->part_dtype;
    p.flags |= ACR_WANT_LSE;
    if (plan->group->rank != 0)
        p.flags &= ~(uint32_t)ACR_SINKS;
    int kernel;
    return dist_plan_kernel(plan, &p, &kernel);
}

/* Nothing overlaps: attention, the exchange of the parts, the merge. */
static double sharded_expect(const acr_group_plan *plan, const acr_link *link)
{
    const acr_problem *p = &plan->problem;
    return plan->kernels[0].seconds + link->latency_s + (double)plan->traffic_bytes / link->bytes_per_s +
           dist_plan_merging(plan, link, p->batch * p->q_heads * p->q_len, plan->group->ranks);
}

static acr_status attend(const acr_group_plan *plan, const acr_buffers *b, acr_part part, void *stream)
{
    const dist_kernel *kernel = &plan->kernels[0];
    acr_buffers own = *b;
    own.o = (void *)(uintptr_t)part.o;
    own.lse = (float *)(uintptr_t)part.lse;
    if (plan->group->rank != 0)
        own.sinks = NULL;
    return dist_pass(acr_execute(kernel->plan, &own, kernel->workspace, acr_plan_workspace(kernel->plan), stream));
}

static acr_status share(const acr_group_plan *plan, const void *part)
{
    acr_group *group = plan->group;
    const sharded_data *data = plan->own;
    acr_status status = dist_transfer_begin(group);
    if (status == ACR_OK)
        status = dist_transfer_add(group, group->nccl.AllGather(part, data->parts, data->part_bytes, NCCL_UINT8,
                                                                group->comm, group->device.transfers));
    if (status == ACR_OK)
        status = dist_transfer_enqueue(group);
    return status == ACR_OK ? dist_transfer_end(group) : status;
}

static acr_status merge(const acr_group_plan *plan, const acr_buffers *b, void *stream)
{
    const acr_problem *p = &plan->problem;
    acr_part parts[ACR_GROUP_RANKS_MAX];
    acr_merge_args m = ACR_MERGE_ARGS_INIT;
    for (int r = 0; r < plan->group->ranks; r++)
        parts[r] = part_of(plan->own, r);
    m.dtype = plan->part_dtype;
    m.out_dtype = p->out_dtype;
    m.layout = p->layout;
    m.alignment = p->alignment;
    m.batch = p->batch;
    m.heads = p->q_heads;
    m.len = p->q_len;
    m.dim = p->v_dim;
    m.count = plan->group->ranks;
    m.o_stride = p->o;
    m.parts = parts;
    m.o = b->o;
    m.lse = b->lse;
    return dist_pass(acr_merge(plan->group->ctx, &m, stream));
}

static acr_status sharded_execute(acr_group_plan *plan, const acr_buffers *b, void *stream)
{
    const acr_group *group = plan->group;
    const acr_part own = part_of(plan->own, group->rank);
    if (!b->o || !b->lse != !(plan->problem.flags & ACR_WANT_LSE))
        return dist_fail(ACR_INVALID, "buffers.%s is %s", b->o ? "lse" : "o",
                         b->lse && b->o ? "given, but not wanted" : "NULL");
    acr_status status = attend(plan, b, own, stream);
    if (status == ACR_OK)
        status = dist_follow(&group->device, group->device.transfers, stream);
    if (status == ACR_OK)
        status = share(plan, own.o);
    if (status == ACR_OK)
        status = dist_follow(&group->device, stream, group->device.transfers);
    return status == ACR_OK ? merge(plan, b, stream) : status;
}

const dist_schedule dist_sharded_keys = {"sharded keys", sharded_expect, sharded_prepare, sharded_execute};
