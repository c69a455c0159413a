/* ATen's forward operators: their arguments, their results, and why a call is not served. */
#include "aten.h"

#include <string.h>

#include "arguments.h"
#include "operand.h"
#include "sdpa.h"
#include "torch_side.h"

static struct {
    PyObject *unused, *pad_rows, *heads_innermost, *without_keys; /* see aten_bind */
} helpers;

/* ---- Arguments --------------------------------------------------------------------------------------------------- */

enum {
    QUERY,
    KEY,
    VALUE,
    DROPOUT,
    IS_CAUSAL,
    DEBUG_MASK,
    BIAS,
    WANTS_LSE,
    CUM_SEQ_Q,
    CUM_SEQ_K,
    MAX_Q,
    MAX_K,
    KEYWORDS, /* from here on by name alone */
    SCALE = KEYWORDS,
    WINDOW_LEFT,
    WINDOW_RIGHT,
    USED_K,
    ALIBI,
    ATTN_MASK,
    GIVEN,
    POSITIONAL_MAX = 10
};

static const struct keyword {
    const char *name;
    int argument;
} keywords[] = {
    {"scale", SCALE},      {"window_size_left", WINDOW_LEFT}, {"window_size_right", WINDOW_RIGHT},
    {"seqused_k", USED_K}, {"alibi_slopes", ALIBI},           {"attn_mask", ATTN_MASK},
};

/* One call of an operator. */
typedef struct request {
    PyObject *given[GIVEN]; /* borrowed; NULL: not given, or None */
    operand q, k, v;
    arguments a;
    const char *reason; /* why it is not served, or NULL */
} request;

/* What an operator gives, or NULL with an exception or r->reason. */
typedef PyObject *(*operator_function)(request *r);

static int collect(request *r, const unsigned char *order, PyObject *const *args, Py_ssize_t positional,
                   PyObject *names)
{
    for (Py_ssize_t i = 0; i < positional; i++)
        r->given[order[i]] = args[i] == Py_None ? NULL : args[i];
    const Py_ssize_t count = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        size_t j = 0;
        while (j < sizeof keywords / sizeof keywords[0] &&
               PyUnicode_CompareWithASCIIString(name, keywords[j].name) != 0)
            j++;
        if (j == sizeof keywords / sizeof keywords[0]) {
            PyErr_Format(PyExc_TypeError, "an operator of ATen has an argument '%U' that acromion does not know", name);
            return -1;
        }
        PyObject *value = args[positional + i];
        r->given[keywords[j].argument] = value == Py_None ? NULL : value;
    }
    return 0;
}

static PyObject *refuse(request *r, const char *reason)
{
    r->reason = reason;
    return NULL;
}

static bool is_true(PyObject *value)
{
    return value == Py_True;
}

/* A window's side as FlashAttention has it: keys beside the query's own; -1 and NULL are no limit. -2 with an
 * exception. */
static long long side_of_window(PyObject *value)
{
    if (!value)
        return -1;
    const long long side = PyLong_AsLongLong(value);
    if (side == -1 && PyErr_Occurred())
        return -2;
    return side < 0 ? -1 : side;
}

/* ---- What all have in common ------------------------------------------------------------------------------------- */

/* A bias on CUDA that goes to ATen's backward pass, too: that wants four dimensions, and keys side by side. A copy
 * would serve our part alone. */
static int check_bias(request *r)
{
    operand bias = {0};
    const char *reason = NULL;
    const int failed = operand_acquire(&bias, "attn_bias", r->given[BIAS]);
    if (bias.ndim != OPERAND_DIMS || r->k.ndim != OPERAND_DIMS)
        reason = "a bias that has not 4 dimensions, of which a gradient is wanted";
    else if (bias.shape[3] != r->k.shape[2] || (bias.strides[3] != 1 && bias.shape[3] > 1))
        reason = "a bias whose keys do not lie side by side";
    operand_release(&bias);
    if (!failed && reason)
        refuse(r, reason);
    return failed || reason ? -1 : 0;
}

/* Fills in the arguments of sdpa. Returns 0; or -1 with r->reason, or an exception. */
static int prepare(request *r)
{
    PyObject *dropout = r->given[DROPOUT];
    arguments_init(&r->a, r->given[QUERY], r->given[KEY], r->given[VALUE]);
    if (dropout && PyFloat_AsDouble(dropout) != 0)
        return refuse(r, "dropout"), -1;
    if (is_true(r->given[DEBUG_MASK]))
        return refuse(r, "a debug mask"), -1;
    if (operand_acquire(&r->q, "q", r->given[QUERY]) || operand_acquire(&r->k, "k", r->given[KEY]) ||
        operand_acquire(&r->v, "v", r->given[VALUE]) || arguments_read_scale(&r->a.scale, r->given[SCALE], "scale"))
        return -1;
    r->a.acquired[ARG_Q] = &r->q;
    r->a.acquired[ARG_K] = &r->k;
    r->a.acquired[ARG_V] = &r->v;
    if (r->q.device.type == DL_CUDA && r->q.dtype.code == DL_FLOAT && r->q.dtype.bits == 32)
        return refuse(r, "float32 on CUDA: acromion has kernels of last resort for it only"), -1;
    r->a.given[ARG_ATTN_MASK] = r->given[BIAS] ? r->given[BIAS] : r->given[ATTN_MASK];
    if (r->given[BIAS] && is_true(r->given[WANTS_LSE]) && check_bias(r))
        return -1;
    r->a.enable_gqa = true;
    r->a.is_causal = is_true(r->given[IS_CAUSAL]);
    r->a.has_align = true;
    r->a.mask = r->a.is_causal ? ACR_MASK_CAUSAL_TOP_LEFT : ACR_MASK_NONE;
    return 0;
}

/* Where ATen's kernels want values like queries, and differ in what causal means with unequal lengths. */
static int check_like_query(request *r)
{
    if (r->q.ndim != OPERAND_DIMS || r->k.ndim != OPERAND_DIMS || r->v.ndim != OPERAND_DIMS)
        return refuse(r, "tensors that have not 4 dimensions"), -1;
    if (r->v.shape[3] != r->q.shape[3])
        return refuse(r, "values of another head dim"), -1;
    if (r->a.is_causal && r->q.shape[2] != r->k.shape[2])
        return refuse(r, "causal with unequal lengths, where ATen's kernels differ in what they mean"), -1;
    return 0;
}

/* Computes. ATen's backward passes take the difference of scores and log-sum-exp: where a mask may hide all keys of a
 * row, that is put so that it gives weights of 0, not NaN. */
static int compute(const request *r, PyObject **out, PyObject **lse)
{
    if (sdpa_compute(&r->a, out, lse))
        return -1;
    if (!*lse || !r->a.given[ARG_ATTN_MASK])
        return 0;
    PyObject *mended = PyObject_CallFunctionObjArgs(helpers.without_keys, *lse, NULL);
    Py_DECREF(*lse);
    *lse = mended;
    if (mended)
        return 0;
    Py_CLEAR(*out);
    return -1;
}

/* A tuple of these, whose references it takes; None for NULL. Lets go of all of them where one failed. */
static PyObject *pack(PyObject **values, Py_ssize_t count, bool failed)
{
    PyObject *result = failed ? NULL : PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!result) {
            Py_XDECREF(values[i]);
            continue;
        }
        if (!values[i])
            Py_INCREF(Py_None);
        PyTuple_SetItem(result, i, values[i] ? values[i] : Py_None);
    }
    return result;
}

/* The random states that nobody reads, since nothing is dropped: memory that nobody writes. */
static PyObject *new_state(const request *r, torch_dtype dtype, int ndim)
{
    static const int64_t shape[] = {2};
    return torch_new_empty(&r->q, shape, ndim, dtype);
}

/* Seed and offset, which nobody reads. Saved for a backward pass they are their own; else all calls on a device share
 * one tensor, that a graph which is being captured may have, too, but not make. Returns 0, or -1 with an exception. */
static int seed_and_offset(const request *r, bool is_saved, PyObject **seed, PyObject **offset)
{
    static PyObject *shared[64];
    const int32_t device = r->q.device.id;
    int is_own = is_saved || device < 0 || device >= 64;
    if (!is_own && !shared[device])
        is_own = torch_is_capturing(&r->q);
    if (is_own < 0)
        return -1;
    if (is_own) {
        *seed = new_state(r, TORCH_INT64, 0);
        *offset = new_state(r, TORCH_INT64, 0);
    } else {
        if (!shared[device])
            shared[device] = PyObject_CallFunctionObjArgs(helpers.unused, r->given[QUERY], NULL);
        Py_XINCREF(shared[device]);
        Py_XINCREF(shared[device]);
        *seed = *offset = shared[device];
    }
    return *seed && *offset ? 0 : -1;
}

/* ---- Operators --------------------------------------------------------------------------------------------------- */

static PyObject *flash_for_cpu(request *r)
{
    PyObject *values[2];
    if (prepare(r))
        return NULL;
    r->a.return_lse = true;
    if (compute(r, &values[0], &values[1]))
        return NULL;
    if (r->q.shape[1] > 1 && r->q.shape[2] > 1) { /* where ATen has it in memory */
        PyObject *lse = PyObject_CallFunctionObjArgs(helpers.heads_innermost, values[1], NULL);
        Py_DECREF(values[1]);
        values[1] = lse;
    }
    return pack(values, 2, !values[1]);
}

static PyObject *flash(request *r)
{
    PyObject *values[9] = {NULL};
    static const int64_t none[] = {0};
    if (prepare(r) || check_like_query(r))
        return NULL;
    r->a.return_lse = true;
    if (compute(r, &values[0], &values[1]))
        return NULL;
    values[4] = PyLong_FromLongLong(r->q.shape[2]);
    values[5] = PyLong_FromLongLong(r->k.shape[2]);
    values[6] = new_state(r, TORCH_UINT64, 1);
    values[7] = new_state(r, TORCH_UINT64, 0);
    values[8] = torch_new_empty(&r->q, none, 1, TORCH_SAME);
    return pack(values, 9, !values[4] || !values[5] || !values[6] || !values[7] || !values[8]);
}

static PyObject *cudnn(request *r)
{
    PyObject *values[9] = {NULL};
    if (prepare(r) || check_like_query(r))
        return NULL;
    r->a.return_lse = is_true(r->given[WANTS_LSE]);
    r->a.lse_is_column = true;
    if (compute(r, &values[0], &values[1]))
        return NULL;
    values[4] = PyLong_FromLongLong(r->q.shape[2]);
    values[5] = PyLong_FromLongLong(r->k.shape[2]);
    const int failed = seed_and_offset(r, r->a.return_lse, &values[6], &values[7]);
    return pack(values, 9, failed || !values[4] || !values[5]);
}

/* The log-sum-exp as efficient attention has it: rows up to a multiple of 32, none where it is not asked for. */
static PyObject *padded_lse(const request *r, PyObject *lse)
{
    const int64_t none[] = {r->q.shape[0], r->q.shape[1], 0};
    if (!lse)
        return torch_new_empty(&r->q, none, 3, TORCH_FLOAT32);
    if (r->q.shape[2] % 32 == 0)
        return lse;
    PyObject *result = PyObject_CallFunction(helpers.pad_rows, "OL", lse, (long long)(32 - r->q.shape[2] % 32));
    Py_DECREF(lse);
    return result;
}

static PyObject *efficient(request *r)
{
    PyObject *values[4] = {NULL};
    if (prepare(r))
        return NULL;
    if (r->q.ndim != OPERAND_DIMS || r->v.ndim != OPERAND_DIMS)
        return refuse(r, "tensors that have not 4 dimensions");
    const int64_t batch = r->q.shape[0], heads = r->q.shape[1], rows = r->q.shape[2], dim = r->v.shape[3];
    const int64_t shape[] = {batch, heads, rows, dim}, strides[] = {rows * heads * dim, dim, heads * dim, 1};
    PyObject *out = torch_new_empty_strided(&r->q, shape, strides, 4);
    if (!out)
        return NULL;
    r->a.given[ARG_OUT] = out;
    r->a.return_lse = is_true(r->given[WANTS_LSE]);
    const int failed = compute(r, &values[0], &values[1]);
    Py_DECREF(out);
    if (failed)
        return NULL;
    values[1] = padded_lse(r, values[1]);
    const int no_states = seed_and_offset(r, r->a.return_lse, &values[2], &values[3]);
    return pack(values, 4, no_states || !values[1]);
}

/* FlashAttention's windows count the keys beside a query's own, ours the keys up to it with it. */
static int read_windows(request *r)
{
    const long long left = side_of_window(r->given[WINDOW_LEFT]), right = side_of_window(r->given[WINDOW_RIGHT]);
    if (left == -2 || right == -2)
        return -1;
    if (r->a.is_causal || right == 0) {
        r->a.is_causal = true;
        r->a.mask = ACR_MASK_CAUSAL;
    } else if (right > 0)
        r->a.window_right = right;
    r->a.window_left = left + 1;
    return 0;
}

static PyObject *flash_packed(request *r)
{
    PyObject *values[5] = {NULL};
    static const int64_t none[] = {0};
    if (!r->given[CUM_SEQ_Q] || !r->given[CUM_SEQ_K])
        return refuse(r, "dense tensors: _scaled_dot_product_flash_attention is for those");
    if (r->given[USED_K])
        return refuse(r, "seqused_k");
    if (prepare(r) || read_windows(r) || arguments_read_count(&r->a.max_q_len, r->given[MAX_Q], "max_q") ||
        arguments_read_count(&r->a.max_kv_len, r->given[MAX_K], "max_k"))
        return NULL;
    r->a.is_packed = true;
    r->a.layout = ACR_BSHD;
    r->a.given[ARG_Q_OFFSETS] = r->given[CUM_SEQ_Q];
    r->a.given[ARG_KV_OFFSETS] = r->given[CUM_SEQ_K];
    r->a.given[ARG_ALIBI_SLOPES] = r->given[ALIBI];
    r->a.return_lse = true;
    if (compute(r, &values[0], &values[1]))
        return NULL;
    values[2] = new_state(r, TORCH_UINT64, 1);
    values[3] = new_state(r, TORCH_UINT64, 0);
    values[4] = torch_new_empty(&r->q, none, 1, TORCH_SAME);
    return pack(values, 5, !values[2] || !values[3] || !values[4]);
}

/* ---- Calling them ------------------------------------------------------------------------------------------------ */

/* Takes an exception that says that acromion cannot do this, and gives its text; NULL where it is another. */
static PyObject *take_refusal(void)
{
    if (!PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_TypeError) &&
        !PyErr_ExceptionMatches(PyExc_NotImplementedError))
        return NULL; /* a device that failed, memory that ran out: no other kernel would mend that */
    PyObject *type, *value, *trace, *text;
    PyErr_Fetch(&type, &value, &trace);
    text = value ? PyObject_Str(value) : PyUnicode_FromString("(no text)");
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return text;
}

/* What aten_operator was given, in a tuple. */
enum {
    NATIVE_CALL,
    NATIVE_KEYS,
    NATIVE_COUNTS,
    NATIVE_TELL,
    NATIVE
};

/* Counts a call that is handed over. Python hears of the first for a reason alone. Returns 0, or -1 with an
 * exception. */
static int count_call(PyObject *native, PyObject *reason)
{
    PyObject *counts = PyTuple_GetItem(native, NATIVE_COUNTS), *count = PyDict_GetItemWithError(counts, reason);
    if (!count && PyErr_Occurred())
        return -1;
    PyObject *done = count ? PyLong_FromLongLong(PyLong_AsLongLong(count) + 1)
                           : PyObject_CallFunctionObjArgs(PyTuple_GetItem(native, NATIVE_TELL), reason, NULL);
    const int failed = !done || (count && PyDict_SetItem(counts, reason, done));
    Py_XDECREF(done);
    return failed ? -1 : 0;
}

/* ATen's own kernel. What that calls in turn is handed over already: it is not counted again. */
static PyObject *hand_over(PyObject *native, PyObject *reason, PyObject *const *args, Py_ssize_t positional,
                           PyObject *names)
{
    static _Thread_local bool is_inside;
    const bool was_inside = is_inside;
    const Py_ssize_t count = positional + (names ? PyTuple_Size(names) : 0);
    PyObject *all[1 + GIVEN] = {PyTuple_GetItem(native, NATIVE_KEYS)};
    if (!was_inside && count_call(native, reason))
        return NULL;
    memcpy(&all[1], args, (size_t)count * sizeof args[0]);
    is_inside = true;
    PyObject *result = acr_py_call_with(PyTuple_GetItem(native, NATIVE_CALL), all, positional + 1, names);
    is_inside = was_inside;
    return result;
}

/* native: what aten_operator was given. args: the operator's, whose places `order` tells. */
static PyObject *serve(PyObject *native, operator_function function, const unsigned char *order, PyObject *const *args,
                       Py_ssize_t positional, PyObject *names)
{
    request r;
    memset(&r, 0, sizeof r);
    if (positional < 3 || positional > POSITIONAL_MAX || collect(&r, order, args, positional, names))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "%zd arguments for an operator", positional);
    PyObject *result = function(&r), *reason = NULL;
    operand_release(&r.q);
    operand_release(&r.k);
    operand_release(&r.v);
    if (result)
        return result;
    reason = r.reason ? PyUnicode_FromString(r.reason) : take_refusal();
    if (!reason)
        return NULL;
    result = hand_over(native, reason, args, positional, names);
    Py_DECREF(reason);
    return result;
}

/* Each has the places of its positional arguments. */
#define OPERATOR(name, ...)                                                                                            \
    static PyObject *serve_##name(PyObject *native, PyObject *const *args, Py_ssize_t positional, PyObject *names)     \
    {                                                                                                                  \
        static const unsigned char order[POSITIONAL_MAX] = {__VA_ARGS__};                                              \
        return serve(native, name, order, args, positional, names);                                                    \
    }
OPERATOR(flash_for_cpu, QUERY, KEY, VALUE, DROPOUT, IS_CAUSAL)
OPERATOR(flash, QUERY, KEY, VALUE, DROPOUT, IS_CAUSAL, DEBUG_MASK)
OPERATOR(cudnn, QUERY, KEY, VALUE, BIAS, WANTS_LSE, DROPOUT, IS_CAUSAL, DEBUG_MASK)
OPERATOR(efficient, QUERY, KEY, VALUE, BIAS, WANTS_LSE, DROPOUT, IS_CAUSAL)
OPERATOR(flash_packed, QUERY, KEY, VALUE, CUM_SEQ_Q, CUM_SEQ_K, MAX_Q, MAX_K, DROPOUT, IS_CAUSAL, DEBUG_MASK)

#define METHOD(aten, name)                                                                                             \
    {                                                                                                                  \
        aten, (PyCFunction)(void (*)(void))serve_##name, METH_FASTCALL | METH_KEYWORDS, NULL                           \
    }
static PyMethodDef operators[] = {
    METHOD("_scaled_dot_product_flash_attention_for_cpu", flash_for_cpu),
    METHOD("_scaled_dot_product_flash_attention", flash),
    METHOD("_scaled_dot_product_cudnn_attention", cudnn),
    METHOD("_scaled_dot_product_efficient_attention", efficient),
    METHOD("_flash_attention_forward", flash_packed),
};

PyObject *aten_operator(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name;
    PyObject *given[NATIVE];
    if (!PyArg_ParseTuple(args, "sOOO!O:aten_operator", &name, &given[NATIVE_CALL], &given[NATIVE_KEYS], &PyDict_Type,
                          &given[NATIVE_COUNTS], &given[NATIVE_TELL]))
        return NULL;
    for (size_t i = 0; i < sizeof operators / sizeof operators[0]; i++) {
        if (strcmp(operators[i].ml_name, name) != 0)
            continue;
        PyObject *native = PyTuple_Pack(NATIVE, given[NATIVE_CALL], given[NATIVE_KEYS], given[NATIVE_COUNTS],
                                        given[NATIVE_TELL]),
                 *result = NULL;
        if (native)
            result = PyCFunction_NewEx(&operators[i], native, NULL);
        Py_XDECREF(native);
        return result;
    }
    return PyErr_Format(PyExc_KeyError, "acromion computes no operator aten::%s", name);
}

PyObject *aten_bind(PyObject *module, PyObject *args)
{
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOO:bind_aten", &helpers.unused, &helpers.pad_rows, &helpers.heads_innermost,
                          &helpers.without_keys))
        return NULL;
    Py_INCREF(args); /* holds the helpers from now on */
    Py_RETURN_NONE;
}
