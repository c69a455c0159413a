/* The ring: in step s a rank attends to the block of the rank s before it. Blocks come straight from their ranks: the
 * first alone, then two at once, four, eight, while attention goes on. So there are few transfers, each of which may
 * have to wait until attention leaves it multiprocessors.
 * Partial outputs of a piece lie in the order of the ranks whose keys they saw, and are merged in it: the bits depend
 * on no transfer. */
#include "error.h"
#include "plan.h"

/* A block is K, then V from `values` on; a rank's own lies in the caller's tensors. */
typedef struct ring_block {
    size_t k_bytes, v_bytes, values;
} ring_block;

typedef struct ring_data {
    char **blocks; /* of each step; NULL of step 0, and where none of the rank's rows sees a key of the block */
    int *parts;    /* of each piece; a piece's calls are in the order of its parts */
    char *sends;   /* of each step, whether the rank that has this rank's block then sees a key of it */
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

/* A transfer brings the blocks of the steps from `first`, a power of two, to before `end`. */
typedef struct ring_steps {
    int first, end;
} ring_steps;

static ring_steps steps_from(const acr_group *group, int first)
{
    return (ring_steps){first, 2 * first < group->ranks ? 2 * first : group->ranks};
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

/* Whether one of a rank's rows sees a key of another's block. pieces: room for those of any rank. */
static int needs(const acr_group_plan *plan, dist_piece *pieces, int rank, int source)
{
    const int count = dist_pieces(&plan->sequences, rank, 1, pieces);
    int needed = 0;
    for (int i = 0; i < count; i++)
        needed |= dist_seen_of(&plan->sequences, &pieces[i], source).count > 0;
    return needed;
}

/* What travels in each step, and where to. */
static acr_status prepare_blocks(acr_group_plan *plan, dist_piece *pieces)
{
    const acr_group *group = plan->group;
    const ring_data *data = plan->own;
    const ring_block own = block_of(plan, group->rank);
    acr_status status = ACR_OK;
    for (int step = 1; step < group->ranks && status == ACR_OK; step++) {
        const int source = source_of(group, step);
        const ring_block b = block_of(plan, source);
        void *memory = NULL;
        data->sends[step] = (char)needs(plan, pieces, target_of(group, step), group->rank);
        plan->traffic_bytes += data->sends[step] ? own.k_bytes + own.v_bytes : 0;
        if (needs(plan, pieces, group->rank, source))
            status = dist_plan_alloc(plan, b.values + b.v_bytes, &memory);
        data->blocks[step] = memory;
    }
    return status;
}

static acr_status ring_prepare(acr_group_plan *plan)
{
    const acr_group *group = plan->group;
    const size_t pieces = (size_t)dist_pieces_max(&plan->sequences), ranks = (size_t)group->ranks;
    ring_data *data;
    acr_status status = dist_calloc(pieces, sizeof *plan->pieces, &plan->pieces);
    if (status == ACR_OK)
        status = dist_calloc(1, sizeof *data + ranks * (sizeof *data->blocks + 1) + pieces * sizeof *data->parts,
                             &plan->own);
    if (status != ACR_OK)
        return status;
    data = plan->own;
    data->blocks = (char **)(void *)(data + 1);
    data->parts = (int *)(void *)(data->blocks + ranks);
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

/* Transfers follow each other beside attention; attention to a block waits for the one that brings it. */
static double ring_expect(const acr_group_plan *plan, const acr_link *link)
{
    const acr_group *group = plan->group;
    const acr_problem *p = &plan->problem;
    const ring_data *data = plan->own;
    double arrived = 0.0, seconds = dist_plan_attention(plan, 0);
    for (int first = 1; first < group->ranks; first *= 2) {
        const ring_steps steps = steps_from(group, first);
        arrived += transfer_seconds(plan, link, steps);
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

/* Sends the rank's own block to those that have it in these steps, and receives theirs. */
static acr_status exchange(acr_group_plan *plan, const acr_buffers *b, ring_steps steps)
{
    acr_group *group = plan->group;
    const ring_data *data = plan->own;
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

/* Begins the transfer of the steps from `first` on, if there are any: it waits for nothing but the transfer before. */
static acr_status begin_exchange(acr_group_plan *plan, const acr_buffers *b, int first)
{
    return first < plan->group->ranks ? exchange(plan, b, steps_from(plan->group, first)) : ACR_OK;
}

/* Attention to the first block of a transfer waits for it, and so behind the last wait all that is sent has left, too:
 * the caller's keys and values are the caller's again. The next transfer is enqueued before that attention. */
static acr_status ring_execute(acr_group_plan *plan, const acr_buffers *b, void *stream)
{
    acr_group *group = plan->group;
    const dist_device *device = &group->device;
    acr_status status = dist_follow(device, device->transfers, stream); /* the caller's inputs */
    if (status == ACR_OK)
        status = begin_exchange(plan, b, 1);
    if (status == ACR_OK)
        status = attend(plan, b, 0, stream);
    for (int first = 1; first < group->ranks && status == ACR_OK; first *= 2) {
        const ring_steps steps = steps_from(group, first);
        status = dist_transfer_end(group);
        if (status == ACR_OK)
            status = dist_follow(device, stream, device->transfers);
        if (status == ACR_OK)
            status = begin_exchange(plan, b, 2 * first);
        for (int s = steps.first; s < steps.end && status == ACR_OK; s++)
            status = attend(plan, b, s, stream);
    }
    return status == ACR_OK ? merge(plan, b, stream) : status;
}

const dist_schedule dist_ring = {"ring", ring_expect, ring_prepare, ring_execute};
