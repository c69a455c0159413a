/* The ring: in step s a rank attends to the block of the rank s before it, while that block goes on to the next rank.
 * Partial outputs of a piece lie in the order of the ranks whose keys they saw, and are merged in it: the bits depend
 * on no transfer. */
#include "error.h"
#include "plan.h"

/* A block is K, then V from `values` on; a rank's own lies in the caller's tensors. */
typedef struct ring_block {
    size_t k_bytes, v_bytes, values;
} ring_block;

typedef struct ring_data {
    char *blocks[2];  /* block of step s >= 1 is in blocks[(s - 1) % 2] */
    ring_block block; /* the largest */
    int parts[];      /* of each piece; a piece's calls are in the order of its parts */
} ring_data;

static ring_block block_of(const acr_group_plan *plan, int rank)
{
    const acr_problem *p = &plan->problem;
    const size_t bytes = dist_dtype_bytes(dist_kv_dtype(p));
    const size_t rows = (size_t)dist_rows_of(p->kv_len, plan->group->ranks, rank, plan->sequences.placement);
    ring_block b;
    b.k_bytes = (size_t)(p->batch * p->kv_heads * p->qk_dim) * rows * bytes;
    b.v_bytes = (size_t)(p->batch * p->kv_heads * p->v_dim) * rows * bytes;
    b.values = dist_round_up(b.k_bytes);
    return b;
}

/* The rank whose block this rank has in a step. */
static int source_of(const acr_group *group, int step)
{
    return (group->rank - step + group->ranks) % group->ranks;
}

static acr_status add_call(acr_group_plan *plan, int index, int source, dist_keys keys, acr_part part, int is_first)
{
    const acr_problem *p = &plan->problem;
    const dist_piece *piece = &plan->pieces[index];
    const int ranks = plan->group->ranks;
    const int64_t kv_rows = dist_rows_of(p->kv_len, ranks, source, plan->sequences.placement);
    const dist_shape shape = {.rows = piece->rows,
                              .q_heads = p->q_heads,
                              .kv_heads = p->kv_heads,
                              .keys = keys,
                              .q = dist_packed(p->layout, p->q_heads, plan->q_rows, p->qk_dim),
                              .k = dist_packed(p->layout, p->kv_heads, kv_rows, p->qk_dim),
                              .v = dist_packed(p->layout, p->kv_heads, kv_rows, p->v_dim),
                              .o = dist_packed(p->layout, p->q_heads, piece->rows, p->v_dim),
                              .is_partial = 1,
                              .with_sinks = is_first && (p->flags & ACR_SINKS)};
    const dist_call call = {.piece = index,
                            .step = (plan->group->rank - source + ranks) % ranks,
                            .q = (size_t)dist_element(&shape.q, 0, piece->row) * dist_dtype_bytes(p->dtype),
                            .part = part};
    return dist_plan_add_call(plan, &call, &shape);
}

/* The parts of a piece: even distances from one to the next. */
static acr_status prepare_piece(acr_group_plan *plan, int index, int *parts)
{
    const acr_problem *p = &plan->problem;
    const dist_piece *piece = &plan->pieces[index];
    const size_t rows = (size_t)(p->batch * p->q_heads * piece->rows);
    const size_t o_bytes = dist_round_up(rows * (size_t)p->v_dim * dist_dtype_bytes(plan->part_dtype));
    const size_t part_bytes = o_bytes + dist_round_up(rows * sizeof(float));
    void *memory = NULL;
    for (int source = 0; source < plan->group->ranks; source++)
        *parts += dist_seen_of(&plan->sequences, piece, source).count > 0;
    acr_status status = dist_plan_alloc(plan, part_bytes * (size_t)*parts, &memory);
    char *at = memory;
    for (int source = 0; source < plan->group->ranks && status == ACR_OK; source++) {
        const dist_keys keys = dist_seen_of(&plan->sequences, piece, source);
        if (keys.count == 0)
            continue;
        status = add_call(plan, index, source, keys, (acr_part){at, (const float *)(const void *)(at + o_bytes)},
                          at == memory);
        at += part_bytes;
    }
    return status;
}

static acr_status ring_prepare(acr_group_plan *plan)
{
    const acr_group *group = plan->group;
    ring_data *data;
    acr_status status = dist_calloc((size_t)dist_pieces_max(&plan->sequences), sizeof *plan->pieces, &plan->pieces);
    if (status != ACR_OK)
        return status;
    plan->q_rows = dist_rows_of(plan->problem.q_len, group->ranks, group->rank, plan->sequences.placement);
    plan->kv_rows = dist_rows_of(plan->problem.kv_len, group->ranks, group->rank, plan->sequences.placement);
    plan->piece_count = dist_pieces(&plan->sequences, group->rank, 1, plan->pieces);
    status = dist_calloc(1, sizeof *data + (size_t)plan->piece_count * sizeof data->parts[0], &plan->own);
    if (status != ACR_OK)
        return status;
    data = plan->own;
    for (int r = 0; r < group->ranks; r++) {
        const ring_block b = block_of(plan, r);
        if (b.values + b.v_bytes > data->block.values + data->block.v_bytes)
            data->block = b;
    }
    for (int i = 0; i < 2 && i < group->ranks - 1 && status == ACR_OK; i++) {
        void *memory = NULL;
        status = dist_plan_alloc(plan, data->block.values + data->block.v_bytes, &memory);
        data->blocks[i] = memory;
    }
    for (int s = 0; s < group->ranks - 1; s++) {
        const ring_block b = block_of(plan, source_of(group, s));
        plan->traffic_bytes += b.k_bytes + b.v_bytes;
    }
    for (int i = 0; i < plan->piece_count && status == ACR_OK; i++)
        status = prepare_piece(plan, i, &data->parts[i]);
    return status;
}

/* A step takes as long as its attention or its transfer, whichever is longer; the last has none. */
static double ring_expect(const acr_group_plan *plan, const acr_link *link)
{
    const acr_problem *p = &plan->problem;
    const ring_data *data = plan->own;
    double seconds = 0.0;
    for (int step = 0; step < plan->group->ranks; step++) {
        const ring_block b = block_of(plan, source_of(plan->group, step));
        const double attention = dist_plan_attention(plan, step);
        const double transfer =
            step < plan->group->ranks - 1 ? link->latency_s + (double)(b.k_bytes + b.v_bytes) / link->bytes_per_s : 0.0;
        seconds += attention > transfer ? attention : transfer;
    }
    for (int i = 0; i < plan->piece_count; i++)
        seconds += dist_plan_merging(plan, link, p->batch * p->q_heads * plan->pieces[i].rows, data->parts[i]);
    return seconds;
}

/* ---- Executing --------------------------------------------------------------------------------------------------- */

typedef struct ring_keys {
    const void *k, *v;
} ring_keys;

static ring_keys keys_of(const acr_group_plan *plan, const acr_buffers *b, int step)
{
    const ring_data *data = plan->own;
    if (step == 0)
        return (ring_keys){b->k, b->v};
    const char *block = data->blocks[(step - 1) % 2];
    return (ring_keys){block, block + block_of(plan, source_of(plan->group, step)).values};
}

/* Sends the block of a step to the next rank and receives that of the next step. */
static acr_status pass_on(acr_group_plan *plan, ring_keys from, int step)
{
    acr_group *group = plan->group;
    const ring_data *data = plan->own;
    const ring_block sent = block_of(plan, source_of(group, step)), got = block_of(plan, source_of(group, step + 1));
    const int next = (group->rank + 1) % group->ranks, before = (group->rank + group->ranks - 1) % group->ranks;
    void *stream = group->device.transfers;
    char *to = data->blocks[step % 2];
    acr_status status = dist_transfer_begin(group);
    if (status == ACR_OK)
        status =
            dist_transfer_add(group, group->nccl.Send(from.k, sent.k_bytes, NCCL_UINT8, next, group->comm, stream));
    if (status == ACR_OK)
        status = dist_transfer_add(group, group->nccl.Recv(to, got.k_bytes, NCCL_UINT8, before, group->comm, stream));
    if (status == ACR_OK)
        status =
            dist_transfer_add(group, group->nccl.Send(from.v, sent.v_bytes, NCCL_UINT8, next, group->comm, stream));
    if (status == ACR_OK)
        status = dist_transfer_add(
            group, group->nccl.Recv(to + got.values, got.v_bytes, NCCL_UINT8, before, group->comm, stream));
    return status == ACR_OK ? dist_transfer_enqueue(group) : status;
}

static acr_status merge_piece(const acr_group_plan *plan, int index, const acr_part *parts, const acr_buffers *b,
                              void *stream)
{
    const acr_problem *p = &plan->problem;
    const dist_piece *piece = &plan->pieces[index];
    const acr_strides o = dist_packed(p->layout, p->q_heads, plan->q_rows, p->v_dim);
    const acr_strides lse = dist_packed(ACR_BHSD, p->q_heads, plan->q_rows, 1);
    const size_t offset = (size_t)dist_element(&o, 0, piece->row) * dist_dtype_bytes(p->out_dtype);
    acr_merge_args m = ACR_MERGE_ARGS_INIT;
    m.dtype = plan->part_dtype;
    m.out_dtype = p->out_dtype;
    m.layout = p->layout;
    for (m.alignment = p->alignment; offset % m.alignment;)
        m.alignment /= 2;
    m.batch = p->batch;
    m.heads = p->q_heads;
    m.len = piece->rows;
    m.dim = p->v_dim;
    m.count = ((const ring_data *)plan->own)->parts[index];
    m.o_stride = o;
    m.lse_stride = lse;
    m.parts = parts;
    m.o = (char *)b->o + offset;
    m.lse = p->flags & ACR_WANT_LSE ? b->lse + piece->row : NULL;
    return dist_pass(acr_merge(plan->group->ctx, &m, stream));
}

static acr_status merge(const acr_group_plan *plan, const acr_buffers *b, void *stream)
{
    acr_part parts[ACR_GROUP_RANKS_MAX];
    acr_status status = ACR_OK;
    for (int i = 0, call = 0; i < plan->piece_count && status == ACR_OK; i++) {
        for (int j = 0; call < plan->call_count && plan->calls[call].piece == i; j++)
            parts[j] = plan->calls[call++].part;
        status = merge_piece(plan, i, parts, b, stream);
    }
    return status;
}

static acr_status attend(const acr_group_plan *plan, const acr_buffers *b, ring_keys keys, int step, void *stream)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < plan->call_count && status == ACR_OK; i++) {
        const dist_call *call = &plan->calls[i];
        if (call->step == step)
            status = dist_plan_run(plan, call, b, keys.k, keys.v, (void *)(uintptr_t)call->part.o,
                                   (float *)(uintptr_t)call->part.lse, stream);
    }
    return status;
}

/* The stream of transfers waits for attention to a block before the next but one takes its place, and so at first for
 * the caller's inputs. */
static acr_status ring_execute(acr_group_plan *plan, const acr_buffers *b, void *stream)
{
    acr_group *group = plan->group;
    acr_status status = ACR_OK;
    for (int step = 0; step < group->ranks && status == ACR_OK; step++) {
        const int is_last = step == group->ranks - 1;
        const ring_keys keys = keys_of(plan, b, step);
        if (!is_last && (status = dist_follow(&group->device, group->device.transfers, stream)) == ACR_OK)
            status = pass_on(plan, keys, step);
        if (status == ACR_OK)
            status = attend(plan, b, keys, step, stream);
        if (!is_last && status == ACR_OK && (status = dist_transfer_end(group)) == ACR_OK)
            status = dist_follow(&group->device, stream, group->device.transfers);
    }
    return status == ACR_OK ? merge(plan, b, stream) : status;
}

const dist_schedule dist_ring = {"ring", ring_expect, ring_prepare, ring_execute};
