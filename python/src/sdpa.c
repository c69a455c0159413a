/* From arguments to an enqueued execution: checks, the problem, output, plan, launch. */
#include "sdpa.h"

#include <inttypes.h>
#include <string.h>

#include "arguments.h"
#include "operand.h"
#include "plans.h"
#include "torch_side.h"
#include "workspace.h"

#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

/* One call. Zero-initialised; finish() lets go of what it came to own. */
typedef struct call {
    arguments a;
    operand q, k, v, o, lse;
    operand bias;                    /* attn_mask, one of its dimensions for each of the scores' */
    PyObject *bias_object;           /* owned: attn_mask, or a copy whose keys lie side by side */
    operand sides[SIDES];            /* by argument, from ARG_SIDE on; those not given are absent */
    operand d_o, dq, dk, dv, dsinks; /* of gradients, whose o and lse are inputs */
    PyObject *out, *lse_object;      /* owned: what is returned */
    acr_problem problem;
    sdpa_way *way; /* how it is executed, with the caller's own data; NULL: by a plan */
    void *way_own;
    bool is_traced; /* tensors are descriptions without memory */
    bool is_opaque; /* a tensor of PyTorch could not be read: it stands for others, as under vmap, or has no memory */
} call;

static void finish(call *c)
{
    operand *const all[] = {&c->q, &c->k, &c->v, &c->o, &c->lse, &c->bias, &c->d_o, &c->dq, &c->dk, &c->dv, &c->dsinks};
    for (size_t i = 0; i < COUNT_OF(all); i++)
        operand_release(all[i]);
    for (int i = 0; i < SIDES; i++)
        operand_release(&c->sides[i]);
    Py_CLEAR(c->out);
    Py_CLEAR(c->lse_object);
    Py_CLEAR(c->bias_object);
}

/* A tensor beside q, k, v and out; NULL where it is not given. */
static const operand *side(const call *c, int argument)
{
    return c->a.given[argument] ? &c->sides[argument - ARG_SIDE] : NULL;
}

/* ---- Checking ---------------------------------------------------------------------------------------------------- */

/* Whether a tensor is pages, whose first dimension counts them. */
static bool is_pages(const call *c, const operand *op)
{
    return c->a.is_paged && (op == &c->k || op == &c->v);
}

static acr_layout layout_of(const call *c, const operand *op)
{
    return is_pages(c, op) ? c->a.kv_layout : c->a.layout;
}

/* Where the dimensions of a layout are: batch is 0, dim is 3. */
static int head_axis(const call *c, const operand *op)
{
    return layout_of(c, op) == ACR_BSHD ? 2 : 1;
}

static int row_axis(const call *c, const operand *op)
{
    return layout_of(c, op) == ACR_BSHD ? 1 : 2;
}

static int64_t heads_of(const call *c, const operand *op)
{
    return op->shape[head_axis(c, op)];
}

static int64_t rows_of(const call *c, const operand *op)
{
    return op->shape[row_axis(c, op)];
}

static bool same_type(dl_type a, dl_type b)
{
    return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

static bool is_e4m3(const operand *op)
{
    return operand_has_type(op, DL_FLOAT8_E4M3FN, 8);
}

static int check_device(const call *c, const operand *op)
{
    return operand_check_device(op, &c->q);
}

/* q's type; as output of 8-bit inputs one of 16 bits, as keys and values also 8 bits. */
static int check_type(const call *c, const operand *op)
{
    if (op == &c->o && is_e4m3(&c->q)) {
        const bool is_16_bit = op->dtype.bits == 16 && op->dtype.lanes == 1;
        return is_16_bit && (op->dtype.code == DL_FLOAT || op->dtype.code == DL_BFLOAT)
                   ? 0
                   : operand_fail_type(op, "float16 or bfloat16 for q of float8_e4m3fn");
    }
    const operand *like = op == &c->v ? &c->k : &c->q; /* k may be a cache of 8 bits */
    if (same_type(op->dtype, like->dtype) || (op == &c->k && is_e4m3(op)))
        return 0;
    PyObject *text = operand_type_text(like->dtype);
    if (text)
        operand_fail_type(op, PyUnicode_AsUTF8AndSize(text, NULL));
    Py_XDECREF(text);
    return -1;
}

static const char *dimensions_of(const call *c, const operand *op)
{
    const bool is_bshd = layout_of(c, op) == ACR_BSHD;
    return is_pages(c, op) ? is_bshd ? "[pages, page, heads, dim]" : "[pages, heads, page, dim]"
           : is_bshd       ? "[batch, length, heads, dim]"
                           : "[batch, heads, length, dim]";
}

/* What holds for q, k, v and out alike. */
static int check_tensor(const call *c, const operand *op)
{
    if (op->ndim != OPERAND_DIMS)
        return acr_py_invalid("%s has %d dimensions, must have 4: %s", op->name, (int)op->ndim, dimensions_of(c, op));
    if (check_type(c, op))
        return -1;
    const bool is_empty = op->shape[0] == 0 || op->shape[1] == 0 || op->shape[2] == 0;
    if (op->strides[3] != 1 && op->shape[3] > 1 && !is_empty)
        return acr_py_invalid("%s has a stride of %lld in its last dimension, must be 1: give a contiguous copy",
                              op->name, (long long)op->strides[3]);
    return check_device(c, op);
}

static int check_extent(const operand *op, int axis, int64_t wanted, const char *of)
{
    if (op->shape[axis] == wanted)
        return 0;
    return acr_py_invalid("%s has extent %lld in dimension %d, must be %lld, %s", op->name, (long long)op->shape[axis],
                          axis, (long long)wanted, of);
}

/* Values inside keys: v is k, of whose rows the first elements are meant. */
static int check_v_in_k(call *c)
{
    const operand *k = &c->k;
    operand *v = &c->v;
    if (v->data != k->data || memcmp(v->shape, k->shape, sizeof k->shape) != 0 ||
        memcmp(v->strides, k->strides, sizeof k->strides) != 0)
        return acr_py_invalid("v is another tensor than k, and v_dim is given: values inside keys have v None");
    if (c->a.v_dim > k->shape[3])
        return acr_py_invalid("v_dim is %lld, must be at most k's head dim, %lld", (long long)c->a.v_dim,
                              (long long)k->shape[3]);
    if (c->a.scale == 0)
        return acr_py_invalid("scale is missing: with v_dim it has no default");
    v->shape[3] = c->a.v_dim;
    return 0;
}

static int check_shapes(call *c)
{
    const operand *q = &c->q, *k = &c->k, *v = &c->v;
    if (c->a.v_dim && check_v_in_k(c))
        return -1;
    if ((!c->a.is_paged && check_extent(k, 0, q->shape[0], "q's batch")) ||
        check_extent(v, 0, k->shape[0], c->a.is_paged ? "k's pages" : "q's batch") ||
        check_extent(k, 3, q->shape[3], "q's head dim") ||
        check_extent(v, head_axis(c, v), heads_of(c, k), "k's heads") ||
        check_extent(v, row_axis(c, v), rows_of(c, k), c->a.is_paged ? "k's page" : "k's length"))
        return -1;
    const long long q_heads = heads_of(c, q), kv_heads = heads_of(c, k);
    if (q_heads != kv_heads && !c->a.enable_gqa)
        return acr_py_invalid("q has %lld heads and k %lld: fewer key heads need enable_gqa=True", q_heads, kv_heads);
    if (kv_heads < 1 || q_heads % kv_heads != 0)
        return acr_py_invalid("q has %lld heads, must be a multiple of k's %lld", q_heads, kv_heads);
    if (c->a.is_paged && k->shape[0] < 1)
        return acr_py_invalid("%s has no pages, must have at least 1", k->name);
    if (rows_of(c, k) < 1 || k->shape[3] < 1 || v->shape[3] < 1)
        return acr_py_invalid("k has length %lld and dim %lld, v has dim %lld, must be at least 1",
                              (long long)rows_of(c, k), (long long)k->shape[3], (long long)v->shape[3]);
    return 0;
}

static int check_mask(const call *c)
{
    if (!c->a.is_causal || c->a.has_align)
        return 0;
    const long long q_len = rows_of(c, &c->q), kv_len = rows_of(c, &c->k);
    if (c->a.is_packed)
        return acr_py_invalid("is_causal with packed sequences: say causal_align='top_left' (query i sees keys 0..i of "
                              "its sequence) or 'bottom_right' (the last query sees the last key)");
    if (q_len != kv_len)
        return acr_py_invalid("is_causal with q_len %lld and kv_len %lld: say causal_align='top_left' (query i sees "
                              "keys 0..i, as PyTorch) or 'bottom_right' (the last query sees the last key)",
                              q_len, kv_len);
    if (c->a.given[ARG_KV_LENS])
        return acr_py_invalid("is_causal with kv_lens: say causal_align='top_left' (query i sees keys 0..i) or "
                              "'bottom_right' (the last query sees the last of the batch entry's keys)");
    return 0;
}

/* Int32, [extent], packed, on q's device. */
static int check_numbers(const call *c, const operand *op, int64_t extent, const char *of)
{
    if (!operand_has_type(op, DL_INT, 32))
        return operand_fail_type(op, "int32");
    if (op->ndim != 1 || op->shape[0] != extent)
        return acr_py_invalid("%s must have one dimension of %s, %lld", op->name, of, (long long)extent);
    if (op->strides[0] != 1 && op->shape[0] > 1)
        return acr_py_invalid("%s has a stride of %lld, must be 1", op->name, (long long)op->strides[0]);
    return check_device(c, op);
}

/* Sequences, not batch entries, where those are packed. */
static int64_t batch_of(const call *c)
{
    return c->a.is_packed ? side(c, ARG_Q_OFFSETS)->shape[0] - 1 : c->q.shape[0];
}

static int check_offsets(const call *c)
{
    const operand *q = side(c, ARG_Q_OFFSETS), *kv = side(c, ARG_KV_OFFSETS);
    if (!q || (!kv && !c->a.is_paged))
        return acr_py_invalid("%s is missing: packed sequences need q_offsets and kv_offsets",
                              q ? "kv_offsets" : "q_offsets");
    if (q->ndim != 1 || q->shape[0] < 2)
        return acr_py_invalid("q_offsets must have one dimension of the number of sequences and 1");
    return check_numbers(c, q, q->shape[0], "itself") || (kv && check_numbers(c, kv, q->shape[0], "q_offsets' extent"))
               ? -1
               : 0;
}

static int check_kv_lens(const call *c)
{
    if (c->a.is_packed && !c->a.is_paged)
        return acr_py_invalid("kv_lens is given with packed sequences, whose lengths kv_offsets says");
    return check_numbers(c, side(c, ARG_KV_LENS), batch_of(c), c->a.is_packed ? "the sequences" : "q's batch");
}

/* [batch, pages of a sequence], from one row to the next any distance. */
static int check_page_table(const call *c)
{
    const operand *table = side(c, ARG_PAGE_TABLE);
    const long long batch = batch_of(c), page = rows_of(c, &c->k);
    if (!operand_has_type(table, DL_INT, 32))
        return operand_fail_type(table, "int32");
    if (table->ndim != 2 || table->shape[0] != batch || table->shape[1] < 1)
        return acr_py_invalid("page_table must have two dimensions [%lld, pages of a sequence], at least one page",
                              batch);
    if ((table->shape[1] > 1 && table->strides[1] != 1) || (batch > 1 && table->strides[0] < table->shape[1]))
        return acr_py_invalid("page_table has strides [%lld, %lld], must be contiguous, or part of a wider table",
                              (long long)table->strides[0], (long long)table->strides[1]);
    if (c->a.max_kv_len > table->shape[1] * page)
        return acr_py_invalid("max_kv_len is %lld, and page_table has %lld pages of %lld keys for a sequence",
                              (long long)c->a.max_kv_len, (long long)table->shape[1], page);
    return check_device(c, table);
}

static int check_scale(const call *c, const operand *scale)
{
    const long long batch = batch_of(c), heads = heads_of(c, &c->k);
    const operand *scaled = scale == side(c, ARG_Q_SCALE) ? &c->q : &c->k; /* v has k's type */
    if (!is_e4m3(scaled))
        return operand_fail_type(scaled, "float8_e4m3fn: no other type has q_scale, k_scale or v_scale");
    if (!operand_has_type(scale, DL_FLOAT, 32))
        return operand_fail_type(scale, "float32");
    if (scale->ndim != 2 || scale->shape[0] != batch || scale->shape[1] != heads)
        return acr_py_invalid("%s must be a number, or have two dimensions [%lld, %lld], batch and heads of k",
                              scale->name, batch, heads);
    if ((heads > 1 && scale->strides[1] != 1) || (batch > 1 && scale->strides[0] != heads))
        return acr_py_invalid("%s has strides [%lld, %lld], must be contiguous", scale->name,
                              (long long)scale->strides[0], (long long)scale->strides[1]);
    return check_device(c, scale);
}

/* Float32, one for each query head, packed, on q's device. */
static int check_of_heads(const call *c, const operand *op)
{
    const long long heads = heads_of(c, &c->q);
    if (!operand_has_type(op, DL_FLOAT, 32))
        return operand_fail_type(op, "float32");
    if (op->ndim != 1 || op->shape[0] != heads)
        return acr_py_invalid("%s must have one dimension of q's heads, %lld", op->name, heads);
    if (op->strides[0] != 1 && heads > 1)
        return acr_py_invalid("%s has a stride of %lld, must be 1", op->name, (long long)op->strides[0]);
    return check_device(c, op);
}

static int check_contiguous(const call *c, const operand *op, const char *dimensions)
{
    int64_t packed = 1;
    for (int axis = op->ndim - 1; axis >= 0; axis--) {
        if (op->shape[axis] != 1 && op->strides[axis] != packed)
            return acr_py_invalid("%s must be contiguous: %s", op->name, dimensions);
        packed *= op->shape[axis];
    }
    return check_device(c, op);
}

static int check_ranges(const call *c, const operand *ranges)
{
    if (!operand_has_type(ranges, DL_INT, 32))
        return operand_fail_type(ranges, "int32");
    if (ranges->ndim != 3 || ranges->shape[0] != batch_of(c) || ranges->shape[1] < 1 || ranges->shape[2] != 2)
        return acr_py_invalid("ranges must have three dimensions [%lld, ranges, 2]: batch, ranges, begin and end",
                              (long long)batch_of(c));
    return check_contiguous(c, ranges, "[batch, ranges, 2]");
}

/* The longest sequence of packed ones, else what q and k have. */
static int64_t q_len_of(const call *c)
{
    return c->a.max_q_len ? c->a.max_q_len : rows_of(c, &c->q);
}

/* Of pages as many keys as the table has room for. */
static int64_t kv_len_of(const call *c)
{
    const int64_t pages = c->a.is_paged ? side(c, ARG_PAGE_TABLE)->shape[1] : 1;
    return c->a.max_kv_len ? c->a.max_kv_len : pages * rows_of(c, &c->k);
}

static int check_tree(const call *c, const operand *tree)
{
    const long long rows = q_len_of(c), bytes = (rows + 7) / 8;
    if (!operand_has_type(tree, DL_UINT, 8))
        return operand_fail_type(tree, "uint8");
    if (tree->ndim != 3 || tree->shape[0] != batch_of(c) || tree->shape[1] != rows || tree->shape[2] != bytes)
        return acr_py_invalid(
            "tree must have three dimensions [%lld, %lld, %lld]: batch, queries, a bit for each query",
            (long long)batch_of(c), rows, bytes);
    return check_contiguous(c, tree, "[batch, queries, bytes]");
}

/* Each dimension is that of the scores, or 1. */
static int check_bias(const call *c)
{
    const int64_t wanted[] = {batch_of(c), heads_of(c, &c->q), q_len_of(c), kv_len_of(c)};
    static const char *const names[] = {"batch", "heads of q", "length of q", "length of k"};
    const operand *bias = &c->bias;
    if (!operand_has_type(bias, DL_BOOL, 8) && !operand_has_type(bias, DL_FLOAT, 16) &&
        !operand_has_type(bias, DL_BFLOAT, 16) && !operand_has_type(bias, DL_FLOAT, 32))
        return operand_fail_type(bias, "bool, float16, bfloat16 or float32");
    for (int axis = 0; axis < OPERAND_DIMS; axis++) {
        if (axis == 3 && bias->shape[axis] == 1 && wanted[axis] > 1)
            return acr_py_invalid("attn_mask has one value for all keys, must have %lld: give a copy with all of them",
                                  (long long)wanted[axis]);
        if (bias->shape[axis] != wanted[axis] && bias->shape[axis] != 1)
            return acr_py_invalid("attn_mask has extent %lld for the %s, must be 1 or %lld",
                                  (long long)bias->shape[axis], names[axis], (long long)wanted[axis]);
        if (bias->strides[axis] < 0)
            return acr_py_invalid("attn_mask has a negative stride, must be at least 0");
    }
    if (bias->strides[3] != 1 && wanted[3] > 1)
        return acr_py_invalid("attn_mask has a stride of %lld between keys, must be 1: give a contiguous copy",
                              (long long)bias->strides[3]);
    return check_device(c, bias);
}

/* Tensors beside q, k, v and out, of those that are given. */
static int check_sides(const call *c)
{
    for (int i = ARG_Q_SCALE; i <= ARG_V_SCALE; i++)
        if (side(c, i) && check_scale(c, side(c, i)))
            return -1;
    const operand *starts = side(c, ARG_KV_STARTS), *sinks = side(c, ARG_SINKS), *slopes = side(c, ARG_ALIBI_SLOPES);
    if (starts && c->a.is_packed)
        return acr_py_invalid("kv_starts is given with packed sequences, which begin where kv_offsets says");
    return (side(c, ARG_KV_LENS) && check_kv_lens(c)) || (c->a.is_paged && check_page_table(c)) ||
                   (starts && check_numbers(c, starts, c->q.shape[0], "q's batch")) ||
                   (sinks && check_of_heads(c, sinks)) || (slopes && check_of_heads(c, slopes)) ||
                   (side(c, ARG_RANGES) && check_ranges(c, side(c, ARG_RANGES))) ||
                   (side(c, ARG_TREE) && check_tree(c, side(c, ARG_TREE))) || (c->bias_object && check_bias(c))
               ? -1
               : 0;
}

static int check_inputs(call *c)
{
    if (check_tensor(c, &c->q) || check_tensor(c, &c->k) || check_tensor(c, &c->v) || check_shapes(c) ||
        check_mask(c) || (c->a.is_packed && check_offsets(c)))
        return -1;
    return check_sides(c);
}

/* ---- The problem ------------------------------------------------------------------------------------------------- */

/* A tensor's strides. Those of an extent of 1 mean nothing: packed ones in their place give equal problems equal keys,
 * and all zero would mean packed. */
static int read_strides(acr_strides *out, const call *c, const operand *op)
{
    const int head = head_axis(c, op), row = row_axis(c, op);
    const int64_t *n = op->shape, *s = op->strides;
    const bool is_bshd = layout_of(c, op) == ACR_BSHD;
    const int64_t packed_head = is_bshd ? n[3] : n[row] * n[3], packed_row = is_bshd ? n[head] * n[3] : n[3];
    out->batch = c->a.is_packed && !is_pages(c, op) ? 0 : n[0] == 1 ? n[head] * n[row] * n[3] : s[0];
    out->head = n[head] == 1 ? packed_head : s[head];
    out->row = n[row] == 1 ? packed_row : s[row];
    if (out->batch < 0 || out->head < 0 || out->row < 0)
        return acr_py_invalid("%s has a negative stride, must be at least 0", op->name);
    if (out->batch == 0 && out->head == 0 && out->row == 0)
        return acr_py_invalid("%s repeats one row everywhere: its strides are all 0, at least one must not be",
                              op->name);
    return 0;
}

/* Where attn_mask stands in the problem. */
static void describe_bias(acr_problem *p, const operand *bias)
{
    const int64_t *n = bias->shape, *s = bias->strides;
    p->bias_dtype = bias->dtype.code == DL_BOOL     ? ACR_BOOL8
                    : bias->dtype.code == DL_BFLOAT ? ACR_BF16
                    : bias->dtype.bits == 16        ? ACR_F16
                                                    : ACR_F32;
    p->bias.batch = n[0] == 1 ? 0 : s[0];
    p->bias.head = n[1] == 1 ? 0 : s[1];
    p->bias.row = n[2] == 1 ? 0 : s[2];
}

static uint32_t flags_of(const call *c)
{
    static const struct {
        int argument;
        uint32_t flag;
    } flags[] = {{ARG_KV_LENS, ACR_KV_LENS}, {ARG_KV_STARTS, ACR_KV_STARTS}, {ARG_SINKS, ACR_SINKS},
                 {ARG_RANGES, ACR_RANGES},   {ARG_ALIBI_SLOPES, ACR_ALIBI},  {ARG_TREE, ACR_TREE},
                 {ARG_PAGE_TABLE, ACR_PAGED}};
    uint32_t result = (c->a.return_lse ? ACR_WANT_LSE : 0) | (c->a.is_packed ? ACR_PACKED : 0) |
                      (c->a.v_dim ? ACR_V_IN_K : 0) | (c->a.is_invariant ? ACR_INVARIANT : 0);
    for (size_t i = 0; i < COUNT_OF(flags); i++)
        if (c->a.given[flags[i].argument])
            result |= flags[i].flag;
    return result;
}

static int fill_problem(call *c)
{
    acr_problem *p = &c->problem;
    p->size = (uint32_t)sizeof *p;
    p->pass = ACR_FORWARD;
    p->mask = c->a.mask;
    p->window_left = c->a.window_left;
    p->window_right = c->a.window_right;
    p->layout = c->a.layout;
    p->softcap = c->a.softcap;
    p->chunk = c->a.chunk;
    if (side(c, ARG_RANGES))
        p->ranges = (int32_t)side(c, ARG_RANGES)->shape[1];
    if (c->bias_object)
        describe_bias(p, &c->bias);
    if (c->a.is_paged)
        p->page = rows_of(c, &c->k) < INT32_MAX ? (int32_t)rows_of(c, &c->k) : INT32_MAX;
    if (is_e4m3(&c->k) && !is_e4m3(&c->q))
        p->kv_dtype = ACR_E4M3;
    p->flags = flags_of(c);
    p->alignment = acr_py_alignment((uintptr_t)c->q.data | (uintptr_t)c->k.data | (uintptr_t)c->v.data |
                                    (uintptr_t)c->o.data | (uintptr_t)c->d_o.data | (uintptr_t)c->dq.data |
                                    (uintptr_t)c->dk.data | (uintptr_t)c->dv.data);
    p->batch = batch_of(c);
    p->q_heads = heads_of(c, &c->q);
    p->kv_heads = heads_of(c, &c->k);
    p->q_len = q_len_of(c);
    p->kv_len = kv_len_of(c);
    p->qk_dim = c->q.shape[3];
    p->v_dim = c->v.shape[3];
    p->scale = c->a.scale;
    p->q_scale = c->a.q_number;
    p->k_scale = c->a.k_number;
    p->v_scale = c->a.v_number;
    if (operand_read_type(&p->dtype, &c->q) || read_strides(&p->q, c, &c->q) || read_strides(&p->k, c, &c->k) ||
        read_strides(&p->v, c, &c->v))
        return -1;
    if (c->a.v_dim)
        p->v = p->k;
    if (!c->o.object)
        return 0;
    return read_strides(&p->o, c, &c->o) || (p->dtype == ACR_E4M3 && operand_read_type(&p->out_dtype, &c->o)) ? -1 : 0;
}

/* ---- Operands ---------------------------------------------------------------------------------------------------- */

static int acquire(call *c, operand *op, const char *name, PyObject *object)
{
    if (c->is_traced)
        return operand_describe(op, name, object);
    if (operand_acquire(op, name, object) == 0)
        return 0;
    c->is_opaque = torch_is_tensor(object);
    return -1;
}

/* Packed sequences, [total, heads, dim], are from here on [1, total, heads, dim]. */
static int unpack(const call *c, operand *op)
{
    if (!c->a.is_packed || is_pages(c, op))
        return 0;
    if (op->ndim != 3)
        return acr_py_invalid("%s has %d dimensions, must have 3 for packed sequences: [total, heads, dim]", op->name,
                              (int)op->ndim);
    memmove(&op->shape[1], op->shape, 3 * sizeof op->shape[0]);
    memmove(&op->strides[1], op->strides, 3 * sizeof op->strides[0]);
    op->ndim = OPERAND_DIMS;
    op->shape[0] = 1;
    op->strides[0] = 0;
    return 0;
}

/* q, k, v or out. */
static int acquire_main(call *c, operand *op, const char *name, PyObject *object)
{
    return acquire(c, op, name, object) ? -1 : unpack(c, op);
}

static int acquire_input(call *c, operand *op, int argument)
{
    static const char *const paged_names[] = {"q", "k_cache", "v_cache"};
    if (!c->a.acquired[argument])
        return acquire_main(c, op, c->a.is_paged ? paged_names[argument] : argument_names[argument],
                            c->a.given[argument]);
    *op = *c->a.acquired[argument];
    op->capsule = NULL; /* the caller's, who keeps it */
    return unpack(c, op);
}

/* attn_mask in the four dimensions of the scores. One of PyTorch whose keys do not lie side by side is copied. */
static int acquire_bias(call *c, PyObject *mask)
{
    operand *bias = &c->bias;
    const int64_t keys = kv_len_of(c);
    int64_t extent, stride;
    Py_INCREF(mask);
    c->bias_object = mask;
    if (acquire(c, bias, "attn_mask", mask))
        return -1;
    extent = bias->ndim ? bias->shape[bias->ndim - 1] : 1;
    stride = bias->ndim ? bias->strides[bias->ndim - 1] : 0;
    if (keys > 1 && (extent == 1 || (extent == keys && stride != 1)) && torch_is_tensor(mask)) {
        operand_release(bias);
        c->bias_object = torch_spread(mask, keys);
        Py_DECREF(mask);
        if (!c->bias_object || acquire(c, bias, "attn_mask", c->bias_object))
            return -1;
    }
    const int missing = OPERAND_DIMS - bias->ndim;
    memmove(&bias->shape[missing], bias->shape, (size_t)bias->ndim * sizeof bias->shape[0]);
    memmove(&bias->strides[missing], bias->strides, (size_t)bias->ndim * sizeof bias->strides[0]);
    for (int axis = 0; axis < missing; axis++) {
        bias->shape[axis] = 1;
        bias->strides[axis] = 0;
    }
    bias->ndim = OPERAND_DIMS;
    return 0;
}

static int acquire_inputs(call *c)
{
    if (acquire_input(c, &c->q, ARG_Q) || acquire_input(c, &c->k, ARG_K) || acquire_input(c, &c->v, ARG_V))
        return -1;
    for (int i = ARG_SIDE; i < ARGUMENTS; i++)
        if (c->a.given[i] && acquire(c, &c->sides[i - ARG_SIDE], argument_names[i], c->a.given[i]))
            return -1;
    return c->a.given[ARG_ATTN_MASK] ? acquire_bias(c, c->a.given[ARG_ATTN_MASK]) : 0;
}

/* ---- Output ------------------------------------------------------------------------------------------------------ */

/* The module whose `empty` makes arrays like this one: what the array says; NumPy before version 2 and CuPy do not
 * say. */
static PyObject *namespace_of(PyObject *array)
{
    PyObject *method = PyObject_GetAttrString(array, "__array_namespace__");
    if (method) {
        PyObject *namespace = PyObject_CallNoArgs(method);
        Py_DECREF(method);
        return namespace;
    }
    PyErr_Clear();
    PyObject *home = PyObject_GetAttrString((PyObject *)Py_TYPE(array), "__module__"), *namespace = NULL;
    if (home && PyUnicode_Check(home) &&
        (!PyUnicode_CompareWithASCIIString(home, "numpy") || !PyUnicode_CompareWithASCIIString(home, "cupy")))
    namespace = PyImport_Import(home);
    else if (home) PyErr_Format(PyExc_TypeError, "out is needed: a %R does not say how to make another",
                                (PyObject *)Py_TYPE(array));
    Py_XDECREF(home);
    return namespace;
}

/* A new array of a library other than PyTorch. dtype: what its namespace calls it, or NULL for that of `like`. */
static PyObject *new_array(const operand *like, const int64_t *shape, int ndim, const char *dtype_name)
{
    PyObject *result = NULL, *dtype = NULL, *sizes = PyTuple_New(ndim), *namespace = namespace_of(like->object);
    if (!sizes || !namespace)
        goto done;
    for (int i = 0; i < ndim; i++) {
        PyObject *size = PyLong_FromLongLong(shape[i]);
        if (!size)
            goto done;
        PyTuple_SetItem(sizes, i, size);
    }
    dtype = dtype_name ? PyObject_GetAttrString(namespace, dtype_name) : PyObject_GetAttrString(like->object, "dtype");
    if (dtype)
        result = PyObject_CallMethod(namespace, "empty", "OO", sizes, dtype);
done:
    Py_XDECREF(dtype);
    Py_XDECREF(sizes);
    Py_XDECREF(namespace);
    return result;
}

/* PyTorch's q as the caller has it: that of packed sequences has no batch. */
static operand given_q(const call *c)
{
    operand q = c->q;
    if (!c->a.is_packed)
        return q;
    q.ndim = OPERAND_DIMS - 1;
    memmove(q.shape, &q.shape[1], (size_t)q.ndim * sizeof q.shape[0]);
    memmove(q.strides, &q.strides[1], (size_t)q.ndim * sizeof q.strides[0]);
    return q;
}

static PyObject *new_output(const call *c)
{
    const operand *q = &c->q;
    const int64_t shape[] = {q->shape[0], q->shape[1], q->shape[2], c->v.shape[3]};
    const int first = c->a.is_packed ? 1 : 0; /* dimension, of those that the caller knows */
    const bool narrow = is_e4m3(q);
    if (!torch_is_tensor(q->object))
        return new_array(q, shape + first, 4 - first, narrow ? "float16" : NULL);
    const torch_dtype dtype = narrow ? TORCH_FLOAT16 : TORCH_SAME;
    const operand given = given_q(c);
    return shape[3] == q->shape[3] ? torch_empty_like(&given, dtype)
                                   : torch_new_empty(q, shape + first, 4 - first, dtype);
}

/* [batch, heads, q_len]; of packed sequences [heads, q_total]. */
static PyObject *new_lse(const call *c)
{
    const int64_t shape[] = {c->q.shape[0], heads_of(c, &c->q), rows_of(c, &c->q), 1};
    const int first = c->a.is_packed ? 1 : 0, count = (c->a.lse_is_column ? 4 : 3) - first;
    return torch_is_tensor(c->q.object) ? torch_new_empty(&c->q, shape + first, count, TORCH_FLOAT32)
                                        : new_array(&c->q, shape + first, count, "float32");
}

static int check_output(const call *c)
{
    const operand *o = &c->o;
    if (check_tensor(c, o))
        return -1;
    for (int axis = 0; axis < 3; axis++)
        if (check_extent(o, axis, c->q.shape[axis], "as q has"))
            return -1;
    if (check_extent(o, 3, c->v.shape[3], "v's head dim"))
        return -1;
    return o->read_only ? acr_py_invalid("out is read-only") : 0;
}

static int prepare_output(call *c)
{
    c->out = c->a.given[ARG_OUT];
    if (c->out)
        Py_INCREF(c->out);
    else if (!(c->out = new_output(c)))
        return -1;
    if (acquire_main(c, &c->o, "out", c->out) || check_output(c))
        return -1;
    if (!c->a.return_lse)
        return 0;
    return (c->lse_object = new_lse(c)) ? operand_acquire(&c->lse, "lse", c->lse_object) : -1;
}

/* ---- Executing --------------------------------------------------------------------------------------------------- */

/* Where each tensor beside q, k, v and out goes. */
#define SIDE_OFFSET(argument, field) [(argument)-ARG_SIDE] = offsetof(acr_buffers, field)
static const size_t side_offsets[SIDES] = {
    SIDE_OFFSET(ARG_Q_SCALE, q_scales),    SIDE_OFFSET(ARG_K_SCALE, k_scales),
    SIDE_OFFSET(ARG_V_SCALE, v_scales),    SIDE_OFFSET(ARG_KV_LENS, kv_lens),
    SIDE_OFFSET(ARG_Q_OFFSETS, q_offsets), SIDE_OFFSET(ARG_KV_OFFSETS, kv_offsets),
    SIDE_OFFSET(ARG_KV_STARTS, kv_starts), SIDE_OFFSET(ARG_SINKS, sinks),
    SIDE_OFFSET(ARG_ALIBI_SLOPES, slopes), SIDE_OFFSET(ARG_RANGES, ranges),
    SIDE_OFFSET(ARG_TREE, tree),           SIDE_OFFSET(ARG_PAGE_TABLE, page_table),
};

static acr_buffers buffers_of(const call *c)
{
    acr_buffers b = ACR_BUFFERS_INIT;
    b.q = c->q.data;
    b.k = c->k.data;
    b.v = c->v.data;
    b.o = c->o.data;
    b.lse = (float *)(void *)c->lse.data;
    for (int i = ARG_SIDE; i < ARGUMENTS; i++)
        if (c->a.given[i])
            memcpy((char *)&b + side_offsets[i - ARG_SIDE], &side(c, i)->data, sizeof(void *));
    b.bias = c->bias.data;
    b.d_o = c->d_o.data;
    b.dq = c->dq.data;
    b.dk = c->dk.data;
    b.dv = c->dv.data;
    b.dsinks = (float *)(void *)c->dsinks.data;
    if (c->a.is_packed) {
        b.q_total = rows_of(c, &c->q);
        b.kv_total = c->a.is_paged ? 0 : rows_of(c, &c->k);
    }
    if (c->a.is_paged) {
        const operand *table = side(c, ARG_PAGE_TABLE);
        b.table_stride = table->shape[0] > 1 ? table->strides[0] : table->shape[1];
        b.pages = c->k.shape[0];
    }
    return b;
}

static int execute_cpu(const call *c, plan_entry *entry)
{
    const acr_buffers b = buffers_of(c);
    workspace w = {0};
    if (entry->workspace_bytes > 0 && workspace_for_cpu(&w, entry))
        return -1;
    acr_status status;
    entry->users++;
    Py_BEGIN_ALLOW_THREADS;
    status = acr_execute(entry->plan, &b, w.memory, w.bytes, NULL);
    Py_END_ALLOW_THREADS;
    const int result = status == ACR_OK ? 0 : acr_py_raise(status);
    plans_release(entry);
    workspace_return(&w);
    return result;
}

static int execute_cuda(const call *c, acr_ctx *ctx, plan_entry *entry)
{
    acr_buffers b = buffers_of(c);
    b.flags = ACR_OVERLAP_PREVIOUS; /* the order of the stream holds all the same: see acromion.h */
    workspace w = {0};
    void *stream;
    int result = 0;
    acr_status status = ACR_OK;
    if (operand_stream(&c->q, &stream))
        return -1;
    entry->users++; /* PyTorch's allocator lets other threads run */
    if (entry->workspace_bytes > 0 && !torch_is_tensor(c->q.object)) {
        status = acr_forward(ctx, &c->problem, &b, stream); /* the context allocates for callers who cannot */
    } else {
        if (entry->workspace_bytes > 0)
            result = workspace_for_stream(&w, entry, &c->q, stream);
        if (!result)
            status = acr_execute(entry->plan, &b, w.memory, w.bytes, stream);
    }
    if (status != ACR_OK)
        result = acr_py_raise(status);
    plans_release(entry);
    workspace_return(&w);
    return result;
}

static int execute(call *c)
{
    acr_ctx *ctx;
    plan_entry *entry;
    if (c->way) {
        const acr_buffers b = buffers_of(c);
        return c->way(c->way_own, &c->problem, &b, &c->q);
    }
    if (plans_context(&ctx, c->q.device) || plans_find(&entry, ctx, &c->problem))
        return -1;
    return c->q.device.type == DL_CUDA ? execute_cuda(c, ctx, entry) : execute_cpu(c, entry);
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

static bool has_no_rows(const call *c)
{
    return c->q.shape[0] == 0 || c->q.shape[1] == 0 || c->q.shape[2] == 0;
}

/* Everything after parsing: fills in c->out and c->lse_object. */
static int compute(call *c)
{
    if (acquire_inputs(c) || check_inputs(c) || prepare_output(c))
        return -1;
    return (has_no_rows(c) && !c->way) || (!fill_problem(c) && !execute(c)) ? 0 : -1;
}

int sdpa_compute(const arguments *a, PyObject **out, PyObject **lse)
{
    call c;
    memset(&c, 0, sizeof c);
    c.a = *a;
    const int failed = compute(&c);
    if (!failed) {
        Py_INCREF(c.out);
        *out = c.out;
        Py_XINCREF(c.lse_object);
        *lse = c.lse_object;
    }
    finish(&c);
    return failed;
}

static PyObject *perform(call *c)
{
    if (compute(c))
        return NULL;
    if (c->a.return_lse)
        return PyTuple_Pack(2, c->out, c->lse_object);
    Py_INCREF(c->out);
    return c->out;
}

/* -1: an error is set. */
static int begin(call *c, signature function, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    memset(c, 0, sizeof *c);
    return arguments_parse(&c->a, function, args, positional, keyword_names) ? -1 : 0;
}

PyObject *sdpa_run(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    (void)module;
    call c;
    if (begin(&c, SIGNATURE_SDPA, args, positional, keyword_names))
        return NULL;
    PyObject *result = perform(&c);
    finish(&c);
    return result;
}

PyObject *sdpa_call_by(sdpa_way *way, void *own, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    call c;
    if (begin(&c, SIGNATURE_SDPA, args, positional, keyword_names))
        return NULL;
    c.way = way;
    c.way_own = own;
    PyObject *result = perform(&c);
    finish(&c);
    return result;
}

static bool uses_torch(const arguments *a)
{
    return torch_is_tensor(a->given[ARG_Q]) || torch_is_tensor(a->given[ARG_K]) || torch_is_tensor(a->given[ARG_V]);
}

static PyObject *call_eagerly(signature function, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    call c;
    if (begin(&c, function, args, positional, keyword_names))
        return NULL;
    if (uses_torch(&c.a)) {
        const int needs_dispatch = torch_needs_dispatch(&c.a);
        if (needs_dispatch)
            return needs_dispatch < 0 ? NULL : torch_dispatch(function, args, positional, keyword_names);
        const int wants_gradients = torch_wants_gradients(&c.a);
        if (wants_gradients)
            return wants_gradients < 0 ? NULL : torch_dispatch(function, args, positional, keyword_names);
    }
    PyObject *result = perform(&c);
    finish(&c);
    if (result || !c.is_opaque)
        return result;
    PyErr_Clear();
    return torch_dispatch(function, args, positional, keyword_names);
}

PyObject *sdpa_call(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    (void)module;
    return call_eagerly(SIGNATURE_SDPA, args, positional, keyword_names);
}

PyObject *sdpa_paged_call(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    (void)module;
    return call_eagerly(SIGNATURE_PAGED, args, positional, keyword_names);
}

PyObject *sdpa_explain(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    (void)module;
    call c;
    memset(&c, 0, sizeof c);
    acr_ctx *ctx;
    plan_entry *entry;
    PyObject *result = NULL;
    if (arguments_parse(&c.a, SIGNATURE_SDPA, args, positional, keyword_names))
        return NULL;
    PyObject *out = c.a.given[ARG_OUT];
    if (!acquire_inputs(&c) && !check_inputs(&c) &&
        (!out || (!acquire_main(&c, &c.o, "out", out) && !check_output(&c)))) {
        if (has_no_rows(&c))
            result = PyUnicode_FromString("nothing to compute: q has no rows");
        else if (!fill_problem(&c) && !plans_context(&ctx, c.q.device) && !plans_find(&entry, ctx, &c.problem))
            result = PyUnicode_FromString(acr_plan_text(entry->plan));
    }
    if (c.is_opaque) {
        PyErr_Clear();
        PyErr_SetString(PyExc_TypeError, "explain() needs dense tensors with memory on the CPU or CUDA: one is on "
                                         "another device, sparse, nested, or stands for others, as under vmap");
    }
    finish(&c);
    return result;
}

/* What a call without its tensors would be: None where q has no rows. */
static PyObject *describe_problem(call *c)
{
    PyObject *out = c->a.given[ARG_OUT];
    acr_problem canonical;
    if (acquire_inputs(c) || check_inputs(c) ||
        (out && (acquire_main(c, &c->o, argument_names[ARG_OUT], out) || check_output(c))))
        return NULL;
    if (has_no_rows(c))
        Py_RETURN_NONE;
    if (fill_problem(c))
        return NULL;
    const acr_status status = acr_problem_canonical(&canonical, &c->problem);
    if (status != ACR_OK) {
        acr_py_raise(status);
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)&canonical, sizeof canonical);
}

PyObject *sdpa_problem(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    (void)module;
    call c;
    memset(&c, 0, sizeof c);
    c.is_traced = true;
    if (arguments_parse(&c.a, SIGNATURE_SDPA, args, positional, keyword_names))
        return NULL;
    PyObject *result = describe_problem(&c);
    finish(&c);
    return result;
}

/* The acr_problem in bytes that describe_problem made. */
static int read_problem(acr_problem *out, const char *bytes, Py_ssize_t count)
{
    if (count != (Py_ssize_t)sizeof *out)
        return acr_py_invalid("a problem has %zd bytes, must have %zu", count, sizeof *out);
    memcpy(out, bytes, sizeof *out);
    return 0;
}

PyObject *sdpa_plan_text(PyObject *module, PyObject *args)
{
    (void)module;
    const char *bytes;
    Py_ssize_t count;
    dl_device device;
    acr_ctx *ctx;
    plan_entry *entry;
    acr_problem problem;
    if (!PyArg_ParseTuple(args, "y#ii:plan_text", &bytes, &count, &device.type, &device.id) ||
        read_problem(&problem, bytes, count) || plans_context(&ctx, device) || plans_find(&entry, ctx, &problem))
        return NULL;
    return PyUnicode_FromString(acr_plan_text(entry->plan));
}

PyObject *sdpa_gradient_problem(PyObject *module, PyObject *args)
{
    (void)module;
    const char *bytes;
    Py_ssize_t count;
    acr_problem forward, canonical;
    if (!PyArg_ParseTuple(args, "y#:gradient_problem", &bytes, &count) || read_problem(&forward, bytes, count))
        return NULL;
    forward.pass = ACR_BACKWARD;
    forward.d_o = forward.o;
    forward.dq = forward.q;
    forward.dk = forward.k;
    forward.dv = forward.v;
    const acr_status status = acr_problem_canonical(&canonical, &forward);
    if (status != ACR_OK) {
        acr_py_raise(status);
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)&canonical, sizeof canonical);
}

/* ---- Gradients --------------------------------------------------------------------------------------------------- */

/* What stands before the arguments of sdpa. */
enum {
    GRAD_D_O,
    GRAD_O,
    GRAD_LSE,
    GRAD_DQ,
    GRAD_DK,
    GRAD_DV,
    GRAD_DSINKS,
    GRADS
};

static int check_like(const operand *op, const operand *like, int dims)
{
    for (int axis = 0; axis < dims; axis++)
        if (check_extent(op, axis, like->shape[axis], "as what it is a gradient of"))
            return -1;
    return 0;
}

static int acquire_gradients(call *c, PyObject *const *given)
{
    if (acquire_main(c, &c->d_o, "d_o", given[GRAD_D_O]) || acquire_main(c, &c->o, "o", given[GRAD_O]) ||
        acquire_main(c, &c->dq, "dq", given[GRAD_DQ]) || acquire_main(c, &c->dk, "dk", given[GRAD_DK]) ||
        acquire_main(c, &c->dv, "dv", given[GRAD_DV]) || acquire(c, &c->lse, "lse", given[GRAD_LSE]) ||
        (given[GRAD_DSINKS] != Py_None && acquire(c, &c->dsinks, "dsinks", given[GRAD_DSINKS])))
        return -1;
    const operand *const all[] = {&c->d_o, &c->o, &c->dq, &c->dk, &c->dv};
    for (size_t i = 0; i < COUNT_OF(all); i++)
        if (check_tensor(c, all[i]))
            return -1;
    return check_output(c) || check_like(&c->d_o, &c->o, 4) || check_like(&c->dq, &c->q, 4) ||
                   check_like(&c->dk, &c->k, 4) || check_like(&c->dv, &c->v, 4)
               ? -1
               : 0;
}

static int fill_gradients(call *c)
{
    acr_problem *p = &c->problem;
    if (fill_problem(c))
        return -1;
    p->pass = ACR_BACKWARD;
    return read_strides(&p->d_o, c, &c->d_o) || read_strides(&p->dq, c, &c->dq) || read_strides(&p->dk, c, &c->dk) ||
                   read_strides(&p->dv, c, &c->dv)
               ? -1
               : 0;
}

PyObject *sdpa_gradients(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    (void)module;
    call c;
    memset(&c, 0, sizeof c);
    if (positional < GRADS)
        return PyErr_Format(PyExc_TypeError,
                            "gradients() takes d_o, o, lse, dq, dk, dv, dsinks, then sdpa's arguments");
    if (arguments_parse(&c.a, SIGNATURE_SDPA, args + GRADS, positional - GRADS, keyword_names))
        return NULL;
    PyObject *result = NULL;
    if (!acquire_inputs(&c) && !check_inputs(&c) && !acquire_gradients(&c, args) && !fill_gradients(&c) &&
        !execute(&c)) {
        Py_INCREF(Py_None);
        result = Py_None;
    }
    finish(&c);
    return result;
}

PyObject *sdpa_forget(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    workspace_forget();
    plans_forget();
    Py_RETURN_NONE;
}

PyObject *sdpa_import_wisdom(PyObject *module, PyObject *args)
{
    (void)module;
    const char *path;
    dl_device device;
    acr_ctx *ctx;
    if (!PyArg_ParseTuple(args, "sii:import_wisdom", &path, &device.type, &device.id) || plans_context(&ctx, device))
        return NULL;
    acr_wisdom_report report = ACR_WISDOM_REPORT_INIT;
    const acr_status status = acr_wisdom_import(ctx, path, &report);
    if (status != ACR_OK) {
        acr_py_raise(status);
        return NULL;
    }
    plans_forget(); /* they were made without it */
    return Py_BuildValue("(III)", report.imported, report.skipped, report.other);
}
