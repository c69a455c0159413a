/* The ring: in step s a rank attends to the block of the rank s before it. Blocks come straight from their ranks while
 * attention goes on: by copy engines one after the other; by NCCL the first alone, then two at once, four, eight, since
 * each of its transfers may have to wait until attention leaves it multiprocessors.
 * Partial outputs of a piece lie in the order of the ranks whose keys they saw, and are merged in it: the bits depend
 * on no transfer. */
#include "error.h"
#include "plan.h"

/* A block is K, then V from `values` on; a rank's own lies in the caller's tensors. */
typedef struct ring_block {
    size_t k_bytes, v_bytes, values;
} ring_block;

typedef struct ring_data {
    char **blocks;  /* of each step; NULL of step 0, and where none of the rank's rows sees a key of the block */
    size_t *places; /* of each step: where this rank's block goes, behind the target's first block */
    int *parts;     /* of each piece; a piece's calls are in the order of its parts */
    char *sends;    /* of each step, whether the rank that has this rank's block then sees a key of it */
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

/* The rank whose block this rank has in a step; and the one that has this rank's. */
static int source_of(const acr_group *group, int step)
{
    return (group->rank - step + group->ranks) % group->ranks;
}

static int target_of(const acr_group *group, int step)
{
    return (group->rank + step) % group->ranks;
}

/* A transfer brings the blocks of the steps from `first`, by NCCL a power of two, to before `end`. */
typedef struct ring_steps {
    int first, end;
} ring_steps;

static ring_steps steps_from(const acr_group_plan *plan, int first)
{
    const int end = plan->way == DIST_BY_COPIES ? first + 1 : 2 * first;
    return (ring_steps){first, end < plan->group->ranks ? end : plan->group->ranks};
}

/* ---- Preparing --------------------------------------------------------------------------------------------------- */

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

/* Whether one of a rank's pieces sees a key of another's block. */
static int needs(const acr_group_plan *plan, const dist_piece *pieces, int count, int source)
{
    int needed = 0;
    for (int i = 0; i < count; i++)
        needed |= dist_seen_of(&plan->sequences, &pieces[i], source).count > 0;
    return needed;
}

/* Bytes of the blocks that a rank receives in the steps before `end`, one behind the other in this order. */
static size_t bytes_before(const acr_group_plan *plan, const dist_piece *pieces, int count, int rank, int end)
{
    const int ranks = plan->group->ranks;
    size_t bytes = 0;
    for (int step = 1; step < end; step++) {
        const int source = (rank - step + ranks) % ranks;
        const ring_block b = block_of(plan, source);
        bytes += needs(plan, pieces, count, source) ? b.values + dist_round_up(b.v_bytes) : 0;
    }
    return bytes;
}

/* What travels in each step, where to and where it lies there. pieces: room for those of any rank. */
static acr_status prepare_blocks(acr_group_plan *plan, dist_piece *pieces)
{
    const acr_group *group = plan->group;
    const ring_data *data = plan->own;
    const ring_block own = block_of(plan, group->rank);
    void *memory = NULL;
    for (int step = 1; step < group->ranks; step++) {
        const int target = target_of(group, step), count = dist_pieces(&plan->sequences, target, 1, pieces);
        data->sends[step] = (char)needs(plan, pieces, count, group->rank);
        data->places[step] = bytes_before(plan, pieces, count, target, step);
        plan->traffic_bytes += data->sends[step] ? own.k_bytes + own.v_bytes : 0;
    }
    const int count = dist_pieces(&plan->sequences, group->rank, 1, pieces);
    const size_t bytes = bytes_before(plan, pieces, count, group->rank, group->ranks);
    const acr_status status = group->ranks > 1 ? dist_plan_alloc_shared(plan, 1, bytes, &memory) : ACR_OK;
    for (int step = 1; step < group->ranks && status == ACR_OK; step++)
        if (needs(plan, pieces, count, source_of(group, step)))
            data->blocks[step] = (char *)memory + bytes_before(plan, pieces, count, group->rank, step);
    return status;
}

static acr_status ring_prepare(acr_group_plan *plan)
{
    const acr_group *group = plan->group;
    const size_t pieces = (size_t)dist_pieces_max(&plan->sequences), ranks = (size_t)group->ranks;
    ring_data *data;
    acr_status status = dist_calloc(pieces, sizeof *plan->pieces, &plan->pieces);
    if (status == ACR_OK)
        status = dist_calloc(
            1, sizeof *data + ranks * (sizeof *data->blocks + sizeof *data->places + 1) + pieces * sizeof *data->parts,
            &plan->own);
    if (status != ACR_OK)
        return status;
    data = plan->own;
    data->blocks = (char **)(void *)(data + 1);
    data->places = (size_t *)(void *)(data->blocks + ranks);
    data->parts = (int *)(void *)(data->places + ranks);
    data->sends = (char *)(data->parts + pieces);
    plan->q_rows = dist_rows_of(plan->problem.q_len, group->ranks, group->rank, plan->sequences.placement);
    plan->kv_rows = dist_rows_of(plan->problem.kv_len, group->ranks, group->rank, plan->sequences.placement);
    status = prepare_blocks(plan, plan->pieces); /* the rank's own come after the others' */
    plan->piece_count = dist_pieces(&plan->sequences, group->rank, 1, plan->pieces);
    for (int i = 0; i < plan->piece_count && status == ACR_OK; i++)
        status = prepare_piece(plan, i, &data->parts[i]);
    return status;
}

/* Seconds of the transfer of some steps: what is sent goes beside what is received. */
static double transfer_seconds(const acr_group_plan *plan, const acr_link *link, ring_steps steps)
{
    const ring_data *data = plan->own;
    const ring_block own = block_of(plan, plan->group->rank);
    size_t sent = 0, received = 0;
    for (int s = steps.first; s < steps.end; s++) {
        const ring_block b = block_of(plan, source_of(plan->group, s));
        sent += data->sends[s] ? own.k_bytes + own.v_bytes : 0;
        received += data->blocks[s] ? b.k_bytes + b.v_bytes : 0;
    }
    return sent + received > 0 ? link->latency_s + (double)(sent > received ? sent : received) / link->bytes_per_s
                               : 0.0;
}

/* By copy engines transfers follow each other beside attention, and attention to a block waits for the one that brings
 * it. NCCL's hide so little beside attention, whose multiprocessors they need, that they are taken to hide nothing. */
static double ring_expect(const acr_group_plan *plan, const acr_link *link)
{
    const acr_group *group = plan->group;
    const acr_problem *p = &plan->problem;
    const ring_data *data = plan->own;
    double arrived = 0.0, seconds = dist_plan_attention(plan, 0);
    for (ring_steps steps = steps_from(plan, 1); steps.first < group->ranks; steps = steps_from(plan, steps.end)) {
        const double transfer = transfer_seconds(plan, link, steps);
        arrived = (plan->way == DIST_BY_COPIES ? arrived : seconds) + transfer;
        seconds = seconds > arrived ? seconds : arrived;
        for (int s = steps.first; s < steps.end; s++)
            seconds += dist_plan_attention(plan, s);
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
    const char *block = ((const ring_data *)plan->own)->blocks[step];
    if (!block) /* of step 0; of other steps without a block there is no call */
        return (ring_keys){b->k, b->v};
    return (ring_keys){block, block + block_of(plan, source_of(plan->group, step)).values};
}

static acr_status send_own(acr_group_plan *plan, const acr_buffers *b, int to)
{
    acr_group *group = plan->group;
    const ring_block own = block_of(plan, group->rank);
    void *stream = group->device.transfers;
    const acr_status status =
        dist_transfer_add(group, group->nccl.Send(b->k, own.k_bytes, NCCL_UINT8, to, group->comm, stream));
    return status == ACR_OK
               ? dist_transfer_add(group, group->nccl.Send(b->v, own.v_bytes, NCCL_UINT8, to, group->comm, stream))
               : status;
}

static acr_status receive(acr_group_plan *plan, char *to, int from)
{
    acr_group *group = plan->group;
    const ring_block got = block_of(plan, from);
    void *stream = group->device.transfers;
    const acr_status status =
        dist_transfer_add(group, group->nccl.Recv(to, got.k_bytes, NCCL_UINT8, from, group->comm, stream));
    return status == ACR_OK ? dist_transfer_add(group, group->nccl.Recv(to + got.values, got.v_bytes, NCCL_UINT8, from,
                                                                        group->comm, stream))
                            : status;
}

/* Copies the rank's own block to where the rank has it that attends to it in this step. */
static acr_status push_own(const acr_group_plan *plan, const acr_buffers *b, int step)
{
    const acr_group *group = plan->group;
    const dist_device *device = &group->device;
    const ring_block own = block_of(plan, group->rank);
    const int to = target_of(group, step);
    char *there = dist_push_memory(group, plan->push, to) + ((const ring_data *)plan->own)->places[step];
    acr_status status = dist_push_begin(group, plan->push, to, device->transfers);
    if (status == ACR_OK)
        status = dist_copy_bytes(device, there, b->k, own.k_bytes, device->transfers);
    if (status == ACR_OK)
        status = dist_copy_bytes(device, there + own.values, b->v, own.v_bytes, device->transfers);
    return status == ACR_OK ? dist_push_end(group, plan->push, to, 0, device->transfers) : status;
}

/* Tells the ranks whose blocks this rank needs that their room is free. */
static acr_status announce(const acr_group_plan *plan)
{
    const acr_group *group = plan->group;
    acr_status status = ACR_OK;
    for (int s = 1; s < group->ranks && status == ACR_OK; s++)
        if (((const ring_data *)plan->own)->blocks[s])
            status = dist_push_announce(group, plan->push, source_of(group, s), group->device.transfers);
    return status;
}

/* Attention to a step's block waits for it. */
static acr_status await(const acr_group_plan *plan, int step, void *stream)
{
    if (!plan->push || !((const ring_data *)plan->own)->blocks[step])
        return ACR_OK;
    return dist_push_await(plan->group, plan->push, source_of(plan->group, step), 0, stream);
}

/* Sends the rank's own block to those that have it in these steps, and receives theirs. */
static acr_status exchange(acr_group_plan *plan, const acr_buffers *b, ring_steps steps)
{
    acr_group *group = plan->group;
    const ring_data *data = plan->own;
    if (plan->push)
        return data->sends[steps.first] ? push_own(plan, b, steps.first) : ACR_OK;
    acr_status status = dist_transfer_begin(group);
    for (int s = steps.first; s < steps.end && status == ACR_OK; s++) {
        if (data->sends[s])
            status = send_own(plan, b, target_of(group, s));
        if (status == ACR_OK && data->blocks[s])
            status = receive(plan, data->blocks[s], source_of(group, s));
    }
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

static acr_status attend(const acr_group_plan *plan, const acr_buffers *b, int step, void *stream)
{
    const ring_keys keys = keys_of(plan, b, step);
    acr_status status = ACR_OK;
    for (int i = 0; i < plan->call_count && status == ACR_OK; i++) {
        const dist_call *call = &plan->calls[i];
        if (call->step == step)
            status = dist_plan_run(plan, call, b, keys.k, keys.v, (void *)(uintptr_t)call->part.o,
                                   (float *)(uintptr_t)call->part.lse, stream);
    }
    return status;
}

/* Begins the transfer of the steps from `first` on, if there are any: it waits for nothing but the transfer before, and
 * for the others' room. */
static acr_status begin_exchange(acr_group_plan *plan, const acr_buffers *b, int first)
{
    return first < plan->group->ranks ? exchange(plan, b, steps_from(plan, first)) : ACR_OK;
}

/* Attention to the first block of a transfer follows what the rank sends in it, by NCCL all of the transfer, and so
 * behind the last one all that is sent has left: the caller's keys and values are the caller's again. The next transfer
 * is enqueued before that attention. */
static acr_status ring_execute(acr_group_plan *plan, const acr_buffers *b, void *stream)
{
    acr_group *group = plan->group;
    const dist_device *device = &group->device;
    acr_status status = dist_follow(device, device->transfers, stream); /* the caller's inputs, and earlier attention */
    if (status == ACR_OK && plan->push)
        status = announce(plan);
    if (status == ACR_OK)
        status = begin_exchange(plan, b, 1);
    if (status == ACR_OK)
        status = attend(plan, b, 0, stream);
    for (ring_steps steps = steps_from(plan, 1); steps.first < group->ranks && status == ACR_OK;
         steps = steps_from(plan, steps.end)) {
        status = dist_transfer_end(group);
        if (status == ACR_OK)
            status = dist_follow(device, stream, device->transfers);
        if (status == ACR_OK)
            status = begin_exchange(plan, b, steps.end);
        for (int s = steps.first; s < steps.end && status == ACR_OK; s++) {
            status = await(plan, s, stream);
            if (status == ACR_OK)
                status = attend(plan, b, s, stream);
        }
    }
    return status == ACR_OK ? merge(plan, b, stream) : status;
}

const dist_schedule dist_ring = {"ring", ring_expect, ring_prepare, ring_execute};
