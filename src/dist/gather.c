/* Gathering: each rank receives the keys that its rows see into one tensor in the order of the sequence, so that one
 * call a piece is enough and windows keep their meaning. Heads come in stages: while one is attended to, the next one
 * arrives. By copy engines a rank puts its keys in their place in the others' tensors; by NCCL they travel packed. */
#include "error.h"
#include "plan.h"

enum {
    STAGES_MAX = 4
};

/* Rows that travel, or stay on their rank: from `row` of its tensors to `place` of the receiver's gathered ones. */
typedef struct gather_box {
    int peer; /* the other rank; the rank itself for what stays */
    int64_t row, place, rows;
} gather_box;

typedef struct gather_data {
    int stages;
    acr_rows hull;   /* this rank's: the keys that the gathered tensors have room for, as positions */
    char *k, *v;     /* gathered: packed [batch, kv_heads, hull.count, dim] by the layout */
    char *out, *in;  /* by NCCL: what is sent and received in one stage, packed by box: K, then V */
    acr_rows *hulls; /* of each rank */
    float *lse;      /* of one call */
    int sends, receives;
    gather_box boxes[]; /* sends, then receives; by rank */
} gather_data;

static int64_t head_of_stage(const acr_group_plan *plan, int stage)
{
    return plan->problem.kv_heads * stage / ((const gather_data *)plan->own)->stages;
}

/* ---- Preparing --------------------------------------------------------------------------------------------------- */

/* Which of a chunk's keys a rank needs. */
static acr_rows needed_by(const acr_group_plan *plan, dist_piece *pieces, int rank, int chunk)
{
    return dist_needed(&plan->sequences, pieces, dist_pieces(&plan->sequences, rank, 0, pieces), chunk);
}

/* The boxes that go from one rank to another. `place` is the position in the sequence so far. */
static int boxes_between(const acr_group_plan *plan, dist_piece *pieces, int from, int to, int peer, gather_box *out)
{
    const dist_sequences *s = &plan->sequences;
    const int chunks = dist_chunks(s->ranks, s->placement);
    int64_t row = 0;
    int count = 0;
    for (int which = 0; which < 2; which++) {
        const int index = dist_chunk_of(s->ranks, from, s->placement, which);
        if (index < 0)
            continue;
        const acr_rows chunk = dist_chunk(s->kv_len, chunks, index), needed = needed_by(plan, pieces, to, index);
        if (needed.count > 0)
            out[count++] = (gather_box){peer, row + needed.first - chunk.first, needed.first, needed.count};
        row += chunk.count;
    }
    return count;
}

/* The keys that the rows of a rank see, from the first to the last. */
static acr_rows hull_of(const acr_group_plan *plan, dist_piece *pieces, int rank)
{
    const dist_sequences *s = &plan->sequences;
    int64_t first = plan->problem.kv_len, end = 0;
    for (int i = 0; i < dist_chunks(s->ranks, s->placement); i++) {
        const acr_rows needed = needed_by(plan, pieces, rank, i);
        if (needed.count > 0) {
            first = needed.first < first ? needed.first : first;
            end = needed.first + needed.count > end ? needed.first + needed.count : end;
        }
    }
    return (acr_rows){first, end - first};
}

static void list_boxes(acr_group_plan *plan, dist_piece *pieces)
{
    gather_data *data = plan->own;
    const int rank = plan->group->rank, ranks = plan->group->ranks;
    for (int r = 0; r < ranks; r++)
        data->hulls[r] = hull_of(plan, pieces, r);
    data->hull = data->hulls[rank];
    for (int r = 0; r < ranks; r++)
        if (r != rank)
            data->sends += boxes_between(plan, pieces, rank, r, r, data->boxes + data->sends);
    gather_box *in = data->boxes + data->sends;
    for (int r = 0; r < ranks; r++)
        data->receives += boxes_between(plan, pieces, r, rank, r, in + data->receives);
    for (int i = 0; i < data->sends; i++)
        data->boxes[i].place -= data->hulls[data->boxes[i].peer].first;
    for (int i = 0; i < data->receives; i++)
        in[i].place -= data->hull.first;
}

/* Bytes of a key and its value, of some heads. */
static size_t row_bytes(const acr_group_plan *plan, int64_t heads)
{
    const acr_problem *p = &plan->problem;
    return (size_t)(p->batch * heads * (p->qk_dim + p->v_dim)) * dist_dtype_bytes(dist_kv_dtype(p));
}

/* Bytes of a rank's gathered keys, behind which its values lie, or of the values. */
static size_t hull_bytes(const acr_group_plan *plan, int rank, int64_t dim)
{
    const acr_problem *p = &plan->problem;
    const int64_t keys = ((const gather_data *)plan->own)->hulls[rank].count;
    return dist_round_up((size_t)(p->batch * p->kv_heads * keys * dim) * dist_dtype_bytes(dist_kv_dtype(p)));
}

static acr_status allocate(acr_group_plan *plan)
{
    const acr_problem *p = &plan->problem;
    const int rank = plan->group->rank;
    gather_data *data = plan->own;
    const size_t stage_row = row_bytes(plan, (p->kv_heads + data->stages - 1) / data->stages);
    size_t out_rows = 0, in_rows = 0;
    void *gathered = NULL, *memory[3] = {NULL};
    for (int i = 0; i < data->sends; i++)
        out_rows += (size_t)data->boxes[i].rows;
    for (int i = 0; i < data->receives; i++)
        in_rows += data->boxes[data->sends + i].peer == rank ? 0 : (size_t)data->boxes[data->sends + i].rows;
    plan->traffic_bytes = out_rows * row_bytes(plan, p->kv_heads);
    const int is_packed = plan->way != DIST_BY_COPIES;
    const size_t keys = hull_bytes(plan, rank, p->qk_dim), values = hull_bytes(plan, rank, p->v_dim);
    const size_t bytes[3] = {is_packed ? out_rows * stage_row : 0, is_packed ? in_rows * stage_row : 0,
                             (size_t)(p->batch * p->q_heads * plan->q_rows) * sizeof(float)};
    acr_status status = dist_plan_alloc_shared(plan, data->stages, keys + values, &gathered);
    for (int i = 0; i < 3 && status == ACR_OK; i++)
        status = dist_plan_alloc(plan, bytes[i], &memory[i]);
    if (status != ACR_OK)
        return status;
    data->k = gathered;
    data->v = data->k + keys;
    data->out = memory[0];
    data->in = memory[1];
    data->lse = memory[2];
    return ACR_OK;
}

static acr_status add_call(acr_group_plan *plan, int index, int stage)
{
    const acr_problem *p = &plan->problem;
    const gather_data *data = plan->own;
    const dist_piece *piece = &plan->pieces[index];
    dist_keys keys = dist_seen(&plan->sequences, piece);
    const int64_t group = p->q_heads / p->kv_heads, head = head_of_stage(plan, stage),
                  heads = head_of_stage(plan, stage + 1) - head;
    const int64_t place = keys.first - data->hull.first;
    const dist_shape shape = {.rows = piece->rows,
                              .q_heads = heads * group,
                              .kv_heads = heads,
                              .keys = keys,
                              .q = dist_packed(p->layout, p->q_heads, plan->q_rows, p->qk_dim),
                              .k = dist_packed(p->layout, p->kv_heads, data->hull.count, p->qk_dim),
                              .v = dist_packed(p->layout, p->kv_heads, data->hull.count, p->v_dim),
                              .o = dist_packed(p->layout, p->q_heads, plan->q_rows, p->v_dim),
                              .with_sinks = (p->flags & ACR_SINKS) != 0};
    const dist_call call = {.piece = index,
                            .step = stage,
                            .q = (size_t)dist_element(&shape.q, head * group, piece->row) * dist_dtype_bytes(p->dtype),
                            .k = (size_t)dist_element(&shape.k, head, place) * dist_dtype_bytes(dist_kv_dtype(p)),
                            .v = (size_t)dist_element(&shape.v, head, place) * dist_dtype_bytes(dist_kv_dtype(p)),
                            .o = (size_t)dist_element(&shape.o, head * group, piece->row) *
                                 dist_dtype_bytes(p->out_dtype),
                            .q_head = head * group};
    return dist_plan_add_call(plan, &call, &shape);
}

static acr_status gather_prepare(acr_group_plan *plan)
{
    const acr_group *group = plan->group;
    const acr_problem *p = &plan->problem;
    dist_piece *others;
    gather_data *data;
    acr_status status = dist_calloc((size_t)dist_pieces_max(&plan->sequences), sizeof *plan->pieces, &plan->pieces);
    if (status == ACR_OK)
        status = dist_calloc(1, sizeof *data + (size_t)group->ranks * (4 * sizeof data->boxes[0] + sizeof *data->hulls),
                             &plan->own);
    if (status != ACR_OK)
        return status;
    data = plan->own;
    data->hulls = (acr_rows *)(void *)(data->boxes + 4 * group->ranks);
    data->stages = group->ranks == 1 ? 1 : p->kv_heads < STAGES_MAX ? (int)p->kv_heads : STAGES_MAX;
    plan->q_rows = dist_rows_of(p->q_len, group->ranks, group->rank, plan->sequences.placement);
    plan->kv_rows = dist_rows_of(p->kv_len, group->ranks, group->rank, plan->sequences.placement);
    others = plan->pieces; /* room for those of any rank */
    list_boxes(plan, others);
    plan->piece_count = dist_pieces(&plan->sequences, group->rank, 0, plan->pieces);
    status = allocate(plan);
    for (int stage = 0; stage < data->stages && status == ACR_OK; stage++)
        for (int i = 0; i < plan->piece_count && status == ACR_OK; i++)
            status = add_call(plan, i, stage);
    return status;
}

/* A stage's keys on their way: sent while others arrive, and what the rank has itself put in its place; by NCCL packed
 * before, and put in their place behind that. */
static double arrival(const acr_group_plan *plan, const acr_link *link, int stage)
{
    const gather_data *data = plan->own;
    const size_t row = row_bytes(plan, head_of_stage(plan, stage + 1) - head_of_stage(plan, stage));
    size_t sent = 0, received = 0, own = 0;
    for (int i = 0; i < data->sends; i++)
        sent += (size_t)data->boxes[i].rows * row;
    for (int i = data->sends; i < data->sends + data->receives; i++)
        *(data->boxes[i].peer == plan->group->rank ? &own : &received) += (size_t)data->boxes[i].rows * row;
    const size_t travelling = sent > received ? sent : received;
    return (travelling > 0 ? link->latency_s : 0.0) + (double)travelling / link->bytes_per_s +
           (double)(own + (plan->way == DIST_BY_COPIES ? 0 : sent + received)) / link->copy_bytes_per_s;
}

/* The first stage's keys are waited for; after that a stage takes as long as its attention or the next one's keys, by
 * NCCL as both, see ring_expect. */
static double gather_expect(const acr_group_plan *plan, const acr_link *link)
{
    const int stages = ((const gather_data *)plan->own)->stages;
    double seconds = arrival(plan, link, 0);
    for (int stage = 0; stage < stages; stage++) {
        const double attention = dist_plan_attention(plan, stage);
        const double next = stage < stages - 1 ? arrival(plan, link, stage + 1) : 0.0;
        seconds += plan->way != DIST_BY_COPIES ? attention + next : attention > next ? attention : next;
    }
    return seconds;
}

/* ---- Copies ------------------------------------------------------------------------------------------------------ */

/* A tensor [batch, heads, rows, dim] by the layout, or a box packed in its own order. */
typedef struct gather_tensor {
    char *data;
    int64_t heads, rows; /* of the tensor */
    int64_t head, row;   /* the first of the box in it */
} gather_tensor;

/* Copies rows of a stage's heads from one tensor to another. */
static acr_status copy_box(const acr_group_plan *plan, const gather_tensor *to, const gather_tensor *from,
                           int64_t heads, int64_t rows, int64_t dim)
{
    const acr_problem *p = &plan->problem;
    const size_t element = dist_dtype_bytes(dist_kv_dtype(p));
    const acr_strides t = dist_packed(p->layout, to->heads, to->rows, dim),
                      f = dist_packed(p->layout, from->heads, from->rows, dim);
    const int by_heads = p->layout == ACR_BHSD; /* lines of one head's rows, or of one row's heads */
    acr_status status = ACR_OK;
    for (int64_t b = 0; b < p->batch && status == ACR_OK; b++) {
        const dist_copy copy = {.from = from->data +
                                        (size_t)(b * f.batch + dist_element(&f, from->head, from->row)) * element,
                                .to = to->data + (size_t)(b * t.batch + dist_element(&t, to->head, to->row)) * element,
                                .from_pitch = (size_t)(by_heads ? f.head : f.row) * element,
                                .to_pitch = (size_t)(by_heads ? t.head : t.row) * element,
                                .width = (size_t)((by_heads ? rows : heads) * dim) * element,
                                .height = (size_t)(by_heads ? heads : rows)};
        status = dist_copy_lines(&plan->group->device, &copy, plan->group->device.transfers);
    }
    return status;
}

/* What a box is copied between, for K (is_value 0) and V. */
static int64_t dim_of(const acr_group_plan *plan, int is_value)
{
    return is_value ? plan->problem.v_dim : plan->problem.qk_dim;
}

static gather_tensor own_of(const acr_group_plan *plan, const acr_buffers *b, const gather_box *box, int is_value,
                            int64_t head)
{
    return (gather_tensor){(char *)(uintptr_t)(is_value ? b->v : b->k), plan->problem.kv_heads, plan->kv_rows, head,
                           box->row};
}

static gather_tensor gathered_of(const acr_group_plan *plan, const gather_box *box, int is_value, int64_t head)
{
    const gather_data *data = plan->own;
    return (gather_tensor){is_value ? data->v : data->k, plan->problem.kv_heads, data->hull.count, head, box->place};
}

static gather_tensor packet_of(const acr_group_plan *plan, char *at, const gather_box *box, int is_value, int64_t heads)
{
    const acr_problem *p = &plan->problem;
    const size_t keys = (size_t)(p->batch * heads * box->rows * p->qk_dim) * dist_dtype_bytes(dist_kv_dtype(p));
    return (gather_tensor){is_value ? at + keys : at, heads, box->rows, 0, 0};
}

/* ---- Executing --------------------------------------------------------------------------------------------------- */

static acr_status pack(const acr_group_plan *plan, const acr_buffers *b, int64_t head, int64_t heads)
{
    const gather_data *data = plan->own;
    acr_status status = ACR_OK;
    char *at = data->out;
    for (int i = 0; i < data->sends; i++) {
        const gather_box *box = &data->boxes[i];
        for (int is_value = 0; is_value < 2 && status == ACR_OK; is_value++) {
            const gather_tensor from = own_of(plan, b, box, is_value, head),
                                to = packet_of(plan, at, box, is_value, heads);
            status = copy_box(plan, &to, &from, heads, box->rows, dim_of(plan, is_value));
        }
        at += (size_t)box->rows * row_bytes(plan, heads);
    }
    return status;
}

/* One message for each box. A stage that has none is no transfer. */
static acr_status exchange(acr_group_plan *plan, int64_t heads)
{
    acr_group *group = plan->group;
    const gather_data *data = plan->own;
    char *out = data->out, *in = data->in;
    acr_status status = dist_transfer_begin(group);
    for (int i = 0; i < data->sends + data->receives && status == ACR_OK; i++) {
        const gather_box *box = &data->boxes[i];
        const size_t bytes = (size_t)box->rows * row_bytes(plan, heads);
        if (box->peer == group->rank)
            continue;
        if (i < data->sends) {
            status = dist_transfer_add(
                group, group->nccl.Send(out, bytes, NCCL_UINT8, box->peer, group->comm, group->device.transfers));
            out += bytes;
        } else {
            status = dist_transfer_add(
                group, group->nccl.Recv(in, bytes, NCCL_UINT8, box->peer, group->comm, group->device.transfers));
            in += bytes;
        }
    }
    return status == ACR_OK ? dist_transfer_enqueue(group) : status;
}

/* What stays on the rank, to its place. */
static acr_status keep_own(const acr_group_plan *plan, const acr_buffers *b, int64_t head, int64_t heads)
{
    const gather_data *data = plan->own;
    acr_status status = ACR_OK;
    for (int i = data->sends; i < data->sends + data->receives; i++) {
        const gather_box *box = &data->boxes[i];
        for (int is_value = 0; is_value < 2 && status == ACR_OK && box->peer == plan->group->rank; is_value++) {
            const gather_tensor from = own_of(plan, b, box, is_value, head),
                                to = gathered_of(plan, box, is_value, head);
            status = copy_box(plan, &to, &from, heads, box->rows, dim_of(plan, is_value));
        }
    }
    return status;
}

/* A box to its place in the tensors of the rank that receives it. */
static acr_status push_box(const acr_group_plan *plan, const acr_buffers *b, const gather_box *box, int64_t head,
                           int64_t heads)
{
    const acr_problem *p = &plan->problem;
    const gather_data *data = plan->own;
    char *keys = dist_push_memory(plan->group, plan->push, box->peer);
    acr_status status = ACR_OK;
    for (int is_value = 0; is_value < 2 && status == ACR_OK; is_value++) {
        const gather_tensor from = own_of(plan, b, box, is_value, head);
        const gather_tensor to = {is_value ? keys + hull_bytes(plan, box->peer, p->qk_dim) : keys, p->kv_heads,
                                  data->hulls[box->peer].count, head, box->place};
        status = copy_box(plan, &to, &from, heads, box->rows, dim_of(plan, is_value));
    }
    return status;
}

/* All that goes to one rank in a stage. Its room is free for all of them once it has said so. */
static acr_status push_to(const acr_group_plan *plan, const acr_buffers *b, int target, int stage)
{
    const acr_group *group = plan->group;
    const gather_data *data = plan->own;
    const int64_t head = head_of_stage(plan, stage), heads = head_of_stage(plan, stage + 1) - head;
    acr_status status = ACR_OK;
    int pushed = 0;
    for (int i = 0; i < data->sends && status == ACR_OK; i++) {
        if (data->boxes[i].peer != target)
            continue;
        if (pushed++ == 0 && stage == 0)
            status = dist_push_begin(group, plan->push, target, group->device.transfers);
        if (status == ACR_OK)
            status = push_box(plan, b, &data->boxes[i], head, heads);
    }
    return status == ACR_OK && pushed ? dist_push_end(group, plan->push, target, stage, group->device.transfers)
                                      : status;
}

/* Each rank begins with the one behind it, so that no two push to the same. */
static acr_status push_stage(const acr_group_plan *plan, const acr_buffers *b, int stage)
{
    const acr_group *group = plan->group;
    const int64_t head = head_of_stage(plan, stage), heads = head_of_stage(plan, stage + 1) - head;
    acr_status status = ACR_OK;
    for (int i = 1; i < group->ranks && status == ACR_OK; i++)
        status = push_to(plan, b, (group->rank + i) % group->ranks, stage);
    return status == ACR_OK ? keep_own(plan, b, head, heads) : status;
}

/* Calls `act` for each other rank from which keys come. */
static acr_status for_sources(const acr_group_plan *plan, acr_status (*act)(const acr_group_plan *, int, int, void *),
                              int stage, void *stream)
{
    const gather_data *data = plan->own;
    acr_status status = ACR_OK;
    for (int i = data->sends, last = plan->group->rank; i < data->sends + data->receives && status == ACR_OK; i++) {
        const int source = data->boxes[i].peer;
        if (source != plan->group->rank && source != last)
            status = act(plan, source, stage, stream);
        last = source;
    }
    return status;
}

static acr_status announce(const acr_group_plan *plan, int source, int stage, void *stream)
{
    (void)stage;
    return dist_push_announce(plan->group, plan->push, source, stream);
}

static acr_status await(const acr_group_plan *plan, int source, int stage, void *stream)
{
    return dist_push_await(plan->group, plan->push, source, stage, stream);
}

static acr_status begin_stage(acr_group_plan *plan, const acr_buffers *b, int stage)
{
    const int64_t head = head_of_stage(plan, stage), heads = head_of_stage(plan, stage + 1) - head;
    if (plan->push)
        return push_stage(plan, b, stage);
    const acr_status status = pack(plan, b, head, heads);
    return status == ACR_OK ? exchange(plan, heads) : status;
}

/* Puts what came, and what the rank has itself, in its place. */
static acr_status end_stage(acr_group_plan *plan, const acr_buffers *b, int stage)
{
    const gather_data *data = plan->own;
    const int64_t head = head_of_stage(plan, stage), heads = head_of_stage(plan, stage + 1) - head;
    if (plan->push)
        return ACR_OK;
    acr_status status = dist_transfer_end(plan->group);
    char *at = data->in;
    for (int i = 0; i < data->receives && status == ACR_OK; i++) {
        const gather_box *box = &data->boxes[data->sends + i];
        const int stays = box->peer == plan->group->rank;
        for (int is_value = 0; is_value < 2 && status == ACR_OK; is_value++) {
            const gather_tensor from =
                stays ? own_of(plan, b, box, is_value, head) : packet_of(plan, at, box, is_value, heads);
            const gather_tensor to = gathered_of(plan, box, is_value, head);
            status = copy_box(plan, &to, &from, heads, box->rows, dim_of(plan, is_value));
        }
        if (!stays)
            at += (size_t)box->rows * row_bytes(plan, heads);
    }
    return status;
}

/* lse of a call is packed; the rank's is that of all its rows and heads. */
static acr_status copy_lse(const acr_group_plan *plan, const dist_call *call, const acr_buffers *b, void *stream)
{
    const acr_problem *p = &plan->problem;
    const gather_data *data = plan->own;
    const dist_piece *piece = &plan->pieces[call->piece];
    const int64_t heads =
        (head_of_stage(plan, call->step + 1) - head_of_stage(plan, call->step)) * (p->q_heads / p->kv_heads);
    acr_status status = ACR_OK;
    for (int64_t i = 0; i < p->batch && status == ACR_OK; i++) {
        const dist_copy copy = {.from = data->lse + i * heads * piece->rows,
                                .to = b->lse + (i * p->q_heads + call->q_head) * plan->q_rows + piece->row,
                                .from_pitch = (size_t)piece->rows * sizeof(float),
                                .to_pitch = (size_t)plan->q_rows * sizeof(float),
                                .width = (size_t)piece->rows * sizeof(float),
                                .height = (size_t)heads};
        status = dist_copy_lines(&plan->group->device, &copy, stream);
    }
    return status;
}

static acr_status attend(const acr_group_plan *plan, const acr_buffers *b, int stage, void *stream)
{
    const gather_data *data = plan->own;
    const int wants_lse = (plan->problem.flags & ACR_WANT_LSE) != 0;
    acr_status status = ACR_OK;
    for (int i = 0; i < plan->call_count && status == ACR_OK; i++) {
        const dist_call *call = &plan->calls[i];
        if (call->step != stage)
            continue;
        status = dist_plan_run(plan, call, b, data->k, data->v, (char *)b->o + call->o, wants_lse ? data->lse : NULL,
                               stream);
        if (status == ACR_OK && wants_lse)
            status = copy_lse(plan, call, b, stream);
    }
    return status;
}

static acr_status gather_execute(acr_group_plan *plan, const acr_buffers *b, void *stream)
{
    acr_group *group = plan->group;
    const int stages = ((const gather_data *)plan->own)->stages;
    acr_status status = dist_follow(&group->device, group->device.transfers, stream);
    if (status == ACR_OK && plan->push)
        status = for_sources(plan, announce, 0, group->device.transfers);
    if (status == ACR_OK && (status = begin_stage(plan, b, 0)) == ACR_OK)
        status = end_stage(plan, b, 0);
    for (int stage = 0; stage < stages && status == ACR_OK; stage++) {
        const int is_last = stage == stages - 1;
        status = dist_follow(&group->device, stream, group->device.transfers); /* this stage's keys are there */
        if (!is_last && status == ACR_OK)
            status = begin_stage(plan, b, stage + 1);
        if (status == ACR_OK && plan->push)
            status = for_sources(plan, await, stage, stream);
        if (status == ACR_OK)
            status = attend(plan, b, stage, stream);
        if (!is_last && status == ACR_OK)
            status = end_stage(plan, b, stage + 1);
    }
    return status;
}

const dist_schedule dist_gather = {"gather", gather_expect, gather_prepare, gather_execute};
