/* acr_merge and acr_append for tensors that speak DLPack: see ops.h. */
#include "ops.h"

#include <stdlib.h>

#include "operand.h"
#include "plans.h"

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* What a tensor says of itself: [batch, heads, rows, dim] or by layout; [rows, heads, dim] of packed sequences. */
typedef struct shape {
    int64_t batch, heads, rows, dim;
    acr_strides strides;
} shape;

/* The stride of an extent of 1 means nothing, and may be anything. */
static int64_t stride_of(const operand *op, int axis)
{
    return op->shape[axis] > 1 ? op->strides[axis] : 0;
}

static int read_shape(shape *out, const operand *op, acr_layout layout)
{
    if (op->ndim != 3 && op->ndim != 4)
        return acr_py_invalid("%s has %d dimensions, must have 4, or 3 of packed sequences", op->name, (int)op->ndim);
    const int last = op->ndim - 1, is_packed = op->ndim == 3, head = is_packed || layout != ACR_BSHD ? 1 : 2,
              row = is_packed ? 0 : 3 - head;
    if (op->shape[last] > 1 && op->strides[last] != 1)
        return acr_py_invalid("%s has a stride of %lld in its last dimension, must be 1: give a contiguous copy",
                              op->name, (long long)op->strides[last]);
    *out = (shape){is_packed ? 1 : op->shape[0],
                   op->shape[head],
                   op->shape[row],
                   op->shape[last],
                   {is_packed ? 0 : stride_of(op, 0), stride_of(op, head), stride_of(op, row)}};
    acr_strides *s = &out->strides;
    if (s->batch != 0 || s->head != 0 || s->row != 0)
        return 0;
    if (out->batch > 1 || out->heads > 1 || out->rows > 1)
        return acr_py_invalid("%s repeats one row everywhere: its strides are all 0, at least one must not be",
                              op->name);
    s->row = out->dim > 0 ? out->dim : 1; /* one row: all zero would mean packed, which comes to the same */
    return 0;
}

static int check_writable(const operand *op)
{
    return op->read_only ? acr_py_invalid("%s is read-only", op->name) : 0;
}

static int check_same_shape(const operand *op, const shape *a, const operand *like, const shape *b)
{
    if (a->batch == b->batch && a->heads == b->heads && a->rows == b->rows && a->dim == b->dim)
        return 0;
    return acr_py_invalid("%s is [%lld, %lld, %lld, %lld] (batch, heads, length, dim), must be as %s, "
                          "[%lld, %lld, %lld, %lld]",
                          op->name, (long long)a->batch, (long long)a->heads, (long long)a->rows, (long long)a->dim,
                          like->name, (long long)b->batch, (long long)b->heads, (long long)b->rows, (long long)b->dim);
}

static int same_strides(const acr_strides *a, const acr_strides *b)
{
    return a->batch == b->batch && a->head == b->head && a->row == b->row;
}

/* ---- Merging ----------------------------------------------------------------------------------------------------- */

/* lse is [batch, heads, rows], or [heads, rows] of packed sequences. */
static int read_lse(acr_strides *out, const operand *op, const shape *o)
{
    const int batch = op->ndim == 3;
    if (!operand_has_type(op, DL_FLOAT, 32))
        return operand_fail_type(op, "float32");
    if ((op->ndim != 2 && op->ndim != 3) || (batch ? op->shape[0] : 1) != o->batch || op->shape[batch] != o->heads ||
        op->shape[batch + 1] != o->rows)
        return acr_py_invalid("%s must be [%lld, %lld, %lld]: batch, heads, length; of packed sequences heads, total",
                              op->name, (long long)o->batch, (long long)o->heads, (long long)o->rows);
    *out = (acr_strides){batch ? stride_of(op, 0) : 0, stride_of(op, batch), stride_of(op, batch + 1)};
    if (out->batch == 0 && out->head == 0 && out->row == 0) {
        if (o->batch > 1 || o->heads > 1 || o->rows > 1)
            return acr_py_invalid("%s repeats one number everywhere", op->name);
        out->row = 1;
    }
    return 0;
}

/* One call; everything in it is released at its end. */
typedef struct merge_call {
    acr_merge_args args;
    Py_ssize_t count;
    operand *outs, *lses;
    acr_part *parts;
    operand o, lse;
} merge_call;

static int read_parts(merge_call *c, PyObject *outs, PyObject *lses, acr_layout layout, shape *first)
{
    acr_merge_args *m = &c->args;
    for (Py_ssize_t i = 0; i < c->count; i++) {
        PyObject *out = PySequence_GetItem(outs, i), *lse = out ? PySequence_GetItem(lses, i) : NULL;
        shape here;
        acr_strides lse_strides;
        acr_dtype dtype;
        /* The caller's sequences keep the objects. */
        const int failed = !lse || operand_acquire(&c->outs[i], "a part's out", out) ||
                           operand_acquire(&c->lses[i], "a part's lse", lse) ||
                           read_shape(&here, &c->outs[i], layout) || read_lse(&lse_strides, &c->lses[i], &here) ||
                           operand_read_type(&dtype, &c->outs[i]) || operand_check_device(&c->outs[i], &c->outs[0]) ||
                           operand_check_device(&c->lses[i], &c->outs[0]);
        Py_XDECREF(out);
        Py_XDECREF(lse);
        if (failed)
            return -1;
        if (i == 0) {
            *first = here;
            m->dtype = dtype;
            m->part_stride = here.strides;
            m->part_lse_stride = lse_strides;
        }
        if (check_same_shape(&c->outs[i], &here, &c->outs[0], first))
            return -1;
        if (dtype != m->dtype || !same_strides(&here.strides, &m->part_stride) ||
            !same_strides(&lse_strides, &m->part_lse_stride))
            return acr_py_invalid("part %zd differs from part 0 in type or strides: give contiguous copies", i);
        m->alignment = acr_py_alignment((uintptr_t)c->outs[i].data | m->alignment);
        c->parts[i] = (acr_part){c->outs[i].data, (const float *)(const void *)c->lses[i].data};
    }
    return 0;
}

static int run_merge(merge_call *c, PyObject *out, PyObject *out_lse, acr_layout layout, const shape *first)
{
    acr_merge_args *m = &c->args;
    shape here;
    acr_ctx *ctx;
    void *stream;
    if (operand_acquire(&c->o, "out", out) || read_shape(&here, &c->o, layout) ||
        operand_read_type(&m->out_dtype, &c->o) || check_same_shape(&c->o, &here, &c->outs[0], first) ||
        operand_check_device(&c->o, &c->outs[0]) || check_writable(&c->o))
        return -1;
    if (out_lse != Py_None &&
        (operand_acquire(&c->lse, "out_lse", out_lse) || read_lse(&m->lse_stride, &c->lse, first) ||
         operand_check_device(&c->lse, &c->outs[0]) || check_writable(&c->lse)))
        return -1;
    if (first->batch == 0 || first->heads == 0 || first->rows == 0 || first->dim == 0)
        return 0; /* no rows */
    m->alignment = acr_py_alignment((uintptr_t)c->o.data | m->alignment);
    m->layout = layout;
    m->batch = first->batch;
    m->heads = first->heads;
    m->len = first->rows;
    m->dim = first->dim;
    m->count = c->count;
    m->o_stride = here.strides;
    m->parts = c->parts;
    m->o = c->o.data;
    m->lse = (float *)(void *)c->lse.data;
    if (plans_context(&ctx, c->outs[0].device) || operand_stream(&c->outs[0], &stream))
        return -1;
    acr_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = acr_merge(ctx, m, stream);
    Py_END_ALLOW_THREADS;
    return status == ACR_OK ? 0 : acr_py_raise(status);
}

PyObject *ops_merge(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *outs, *lses, *out, *out_lse;
    int layout;
    if (!PyArg_ParseTuple(args, "OOOOi:merge", &outs, &lses, &out, &out_lse, &layout))
        return NULL;
    const Py_ssize_t count = PySequence_Size(outs), lse_count = PySequence_Size(lses);
    if (count < 0 || lse_count < 0)
        return NULL;
    if (count == 0 || count != lse_count) {
        acr_py_invalid("there are %zd outs and %zd lses, must be as many, and at least one", count, lse_count);
        return NULL;
    }
    merge_call c = {.args = ACR_MERGE_ARGS_INIT,
                    .count = count,
                    .outs = calloc((size_t)count, sizeof(operand)),
                    .lses = calloc((size_t)count, sizeof(operand)),
                    .parts = calloc((size_t)count, sizeof(acr_part))};
    c.args.alignment = 16;
    shape first = {0};
    int failed = -1;
    if (!c.outs || !c.lses || !c.parts)
        PyErr_NoMemory();
    else
        failed = read_parts(&c, outs, lses, (acr_layout)layout, &first) ||
                 run_merge(&c, out, out_lse, (acr_layout)layout, &first);
    for (Py_ssize_t i = 0; i < count && c.outs && c.lses; i++) {
        operand_release(&c.outs[i]);
        operand_release(&c.lses[i]);
    }
    operand_release(&c.o);
    operand_release(&c.lse);
    free(c.outs);
    free(c.lses);
    free(c.parts);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- Appending --------------------------------------------------------------------------------------------------- */

enum {
    K,
    V,
    K_CACHE,
    V_CACHE,
    KV_LENS,
    Q,
    Q_OUT,
    COS,
    SIN,
    OFFSETS,
    PAGE_TABLE,
    ROPE_OFFSETS,
    ROPE_POSITIONS,
    K_SCALES,
    V_SCALES,
    TENSORS
};

static const char *const tensor_names[TENSORS] = {
    "k",   "v",       "k_cache",    "v_cache",      "kv_lens",        "q",       "q_out",  "cos",
    "sin", "offsets", "page_table", "rope_offsets", "rope_positions", "k_scale", "v_scale"};

typedef struct append_call {
    acr_append_args args;
    operand tensors[TENSORS];
    shape shapes[TENSORS];
    int given[TENSORS];
} append_call;

static int has(const append_call *c, int tensor)
{
    return c->given[tensor];
}

/* A contiguous tensor of numbers with these extents; columns 0 = one dimension. */
static int check_numbers(const append_call *c, int tensor, int is_float, int64_t rows, int64_t columns)
{
    const operand *op = &c->tensors[tensor];
    if (!has(c, tensor))
        return 0;
    if (!operand_has_type(op, is_float ? DL_FLOAT : DL_INT, 32))
        return operand_fail_type(op, is_float ? "float32" : "int32");
    const int ndim = columns ? 2 : 1;
    if (op->ndim != ndim || op->shape[0] != rows || (columns && op->shape[1] != columns))
        return columns ? acr_py_invalid("%s must have two dimensions [%lld, %lld]", op->name, (long long)rows,
                                        (long long)columns)
                       : acr_py_invalid("%s must have one dimension of %lld", op->name, (long long)rows);
    if ((op->shape[ndim - 1] > 1 && op->strides[ndim - 1] != 1) || (columns && rows > 1 && op->strides[0] != columns))
        return acr_py_invalid("%s must be contiguous", op->name);
    return 0;
}

static int read_tables(append_call *c)
{
    acr_append_args *a = &c->args;
    const operand *cos = &c->tensors[COS], *sin = &c->tensors[SIN], *table = &c->tensors[PAGE_TABLE];
    if (has(c, COS) != has(c, SIN))
        return acr_py_invalid("%s is missing: a rotation needs cos and sin", has(c, COS) ? "sin" : "cos");
    if (has(c, COS)) {
        if (cos->ndim != 2 || sin->ndim != 2)
            return acr_py_invalid("cos and sin must have two dimensions: positions, pairs");
        if (check_numbers(c, COS, 1, cos->shape[0], cos->shape[1]) ||
            check_numbers(c, SIN, 1, cos->shape[0], cos->shape[1]))
            return -1;
        a->rope_rows = cos->shape[0];
        a->rope_dim = 2 * cos->shape[1];
    }
    if (has(c, PAGE_TABLE)) {
        if (table->ndim != 2)
            return acr_py_invalid("page_table must have two dimensions: batch, pages of a sequence");
        a->table_stride = table->shape[1];
    }
    return check_numbers(c, KV_LENS, 0, a->batch, 0) || check_numbers(c, OFFSETS, 0, a->batch + 1, 0) ||
                   (has(c, PAGE_TABLE) && check_numbers(c, PAGE_TABLE, 0, a->batch, a->table_stride)) ||
                   check_numbers(c, ROPE_OFFSETS, 0, a->batch, 0) ||
                   check_numbers(c, ROPE_POSITIONS, 0, has(c, OFFSETS) ? a->len : a->batch,
                                 has(c, OFFSETS) ? 0 : a->len) ||
                   check_numbers(c, K_SCALES, 1, a->batch, a->kv_heads) ||
                   check_numbers(c, V_SCALES, 1, a->batch, a->kv_heads)
               ? -1
               : 0;
}

static int read_rows(append_call *c, acr_layout layout)
{
    static const int rows[] = {K, V, K_CACHE, V_CACHE, Q, Q_OUT};
    acr_append_args *a = &c->args;
    acr_dtype dtype;
    const int first = has(c, K) ? K : has(c, V) ? V : Q;
    for (int i = 0; i < 6; i++) {
        const int t = rows[i], is_cache = t == K_CACHE || t == V_CACHE;
        const operand *op = &c->tensors[t];
        if (!has(c, t))
            continue;
        if (read_shape(&c->shapes[t], op, layout) || operand_read_type(&dtype, op))
            return -1;
        if (op->ndim != (has(c, OFFSETS) && !is_cache ? 3 : 4))
            return acr_py_invalid("%s has %d dimensions, must have %d", op->name, (int)op->ndim, op->ndim == 3 ? 4 : 3);
        acr_dtype *own = is_cache ? &a->cache_dtype : &a->dtype;
        if (*own != ACR_DTYPE_DEFAULT && *own != dtype)
            return acr_py_invalid("%s has another type than %s", op->name, is_cache ? "k_cache" : tensor_names[first]);
        *own = dtype;
        a->alignment = acr_py_alignment((uintptr_t)op->data | a->alignment);
        if ((is_cache || t == Q_OUT) && check_writable(op))
            return -1;
    }
    return 0;
}

/* Extents agree: what the library is told once must hold for every tensor. */
static int check_extents(append_call *c)
{
    acr_append_args *a = &c->args;
    const shape *s = c->shapes;
    const int first = has(c, K) ? K : has(c, V) ? V : Q;
    a->batch = has(c, KV_LENS) ? c->tensors[KV_LENS].shape[0] : 0;
    a->len = s[first].rows;
    a->q_heads = has(c, Q) ? s[Q].heads : 0;
    a->kv_heads = first == Q ? 0 : s[first].heads;
    a->qk_dim = has(c, K) ? s[K].dim : has(c, Q) ? s[Q].dim : 0;
    a->v_dim = has(c, V) ? s[V].dim : 0;
    const struct {
        int tensor;
        int64_t heads, dim;
    } wanted[] = {{K, a->kv_heads, a->qk_dim},      {V, a->kv_heads, a->v_dim}, {K_CACHE, a->kv_heads, a->qk_dim},
                  {V_CACHE, a->kv_heads, a->v_dim}, {Q, a->q_heads, a->qk_dim}, {Q_OUT, a->q_heads, a->qk_dim}};
    for (int i = 0; i < 6; i++) {
        const int t = wanted[i].tensor, is_cache = t == K_CACHE || t == V_CACHE;
        const int64_t batch = is_cache && has(c, PAGE_TABLE) ? s[has(c, K_CACHE) ? K_CACHE : V_CACHE].batch
                              : has(c, OFFSETS) && !is_cache ? 1
                                                             : a->batch,
                      length = is_cache ? s[has(c, K_CACHE) ? K_CACHE : V_CACHE].rows : a->len;
        const shape like = {batch, wanted[i].heads, length, wanted[i].dim, {0, 0, 0}};
        const operand the_others = {.name = "the others say"};
        if (has(c, t) && check_same_shape(&c->tensors[t], &s[t], &the_others, &like))
            return -1;
    }
    const shape *cache = &s[has(c, K_CACHE) ? K_CACHE : V_CACHE];
    if (has(c, PAGE_TABLE)) {
        a->page = cache->rows;
        a->pages = cache->batch;
    } else
        a->kv_len = cache->rows;
    return 0;
}

static void fill_append(append_call *c)
{
    acr_append_args *a = &c->args;
    const operand *t = c->tensors;
    a->q_stride = c->shapes[Q].strides;
    a->k_stride = c->shapes[K].strides;
    a->v_stride = c->shapes[V].strides;
    a->q_out_stride = c->shapes[Q_OUT].strides;
    a->k_cache_stride = c->shapes[K_CACHE].strides;
    a->v_cache_stride = c->shapes[V_CACHE].strides;
    a->q = t[Q].data;
    a->k = t[K].data;
    a->v = t[V].data;
    a->q_out = t[Q_OUT].data;
    a->k_cache = t[K_CACHE].data;
    a->v_cache = t[V_CACHE].data;
    a->cos = (const float *)(const void *)t[COS].data;
    a->sin = (const float *)(const void *)t[SIN].data;
    a->kv_lens = (const int32_t *)(const void *)t[KV_LENS].data;
    a->offsets = (const int32_t *)(const void *)t[OFFSETS].data;
    a->page_table = (const int32_t *)(const void *)t[PAGE_TABLE].data;
    a->rope_offsets = (const int32_t *)(const void *)t[ROPE_OFFSETS].data;
    a->rope_positions = (const int32_t *)(const void *)t[ROPE_POSITIONS].data;
    a->k_scales = (const float *)(const void *)t[K_SCALES].data;
    a->v_scales = (const float *)(const void *)t[V_SCALES].data;
}

static int run_append(append_call *c, PyObject *tensors, acr_layout layout)
{
    acr_ctx *ctx;
    void *stream;
    for (int i = 0; i < TENSORS; i++) {
        PyObject *object = PySequence_GetItem(tensors, i);
        if (!object)
            return -1;
        c->given[i] = object != Py_None;
        const int failed = c->given[i] && operand_acquire(&c->tensors[i], tensor_names[i], object);
        Py_DECREF(object); /* the caller's sequence keeps it */
        if (failed)
            return -1;
    }
    if (!has(c, K) && !has(c, V) && !has(c, Q))
        return acr_py_invalid("k, v and q are None: there is nothing to do");
    if (!has(c, KV_LENS) || c->tensors[KV_LENS].ndim != 1)
        return acr_py_invalid("kv_lens must be an int32 tensor of one dimension, batch");
    for (int i = 0; i < TENSORS; i++)
        if (c->given[i] && operand_check_device(&c->tensors[i], &c->tensors[KV_LENS]))
            return -1;
    if (read_rows(c, layout) || check_extents(c) || read_tables(c))
        return -1;
    fill_append(c);
    const int leading = has(c, K) ? K : has(c, V) ? V : Q;
    if (plans_context(&ctx, c->tensors[leading].device) || operand_stream(&c->tensors[leading], &stream))
        return -1;
    acr_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = acr_append(ctx, &c->args, stream);
    Py_END_ALLOW_THREADS;
    return status == ACR_OK ? 0 : acr_py_raise(status);
}

PyObject *ops_append(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tensors;
    int layout, is_interleaved;
    long long rope_first;
    double k_scale, v_scale;
    if (!PyArg_ParseTuple(args, "O(iiLdd):append", &tensors, &layout, &is_interleaved, &rope_first, &k_scale, &v_scale))
        return NULL;
    append_call c = {.args = ACR_APPEND_ARGS_INIT};
    c.args.alignment = 16;
    c.args.layout = (acr_layout)layout;
    c.args.flags = is_interleaved ? ACR_ROPE_INTERLEAVED : 0;
    c.args.rope_first = rope_first;
    c.args.k_scale = (float)k_scale;
    c.args.v_scale = (float)v_scale;
    const int failed = run_append(&c, tensors, (acr_layout)layout);
    for (int i = 0; i < TENSORS; i++)
        operand_release(&c.tensors[i]);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}
