/* PyTorch's part: dispatch, gradients, new tensors. */
#include "torch_side.h"

static struct {
    PyTypeObject *tensor, *parameter;
    PyObject *run_op[SIGNATURES], *is_grad_enabled, *dispatch_depth, *is_capturing, *empty_like, *spread;
    PyObject *typed[TORCH_DTYPES]; /* keyword arguments that ask for a type */
    PyObject *name_requires_grad, *name_new_empty, *name_dtype;
} torch;

PyObject *torch_bind(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *dtypes[TORCH_DTYPES] = {NULL};
    if (!PyArg_ParseTuple(args, "O!O!OOOOOOOOOOOO:bind_torch", &PyType_Type, &torch.tensor, &PyType_Type,
                          &torch.parameter, &torch.run_op[SIGNATURE_SDPA], &torch.run_op[SIGNATURE_PAGED],
                          &torch.is_grad_enabled, &torch.dispatch_depth, &torch.is_capturing, &torch.empty_like,
                          &torch.spread, &dtypes[TORCH_FLOAT16], &dtypes[TORCH_FLOAT32], &dtypes[TORCH_UINT8],
                          &dtypes[TORCH_INT64], &dtypes[TORCH_UINT64]))
        return NULL;
    Py_INCREF(args); /* holds everything in `torch` from now on */
    torch.name_requires_grad = PyUnicode_InternFromString("requires_grad");
    torch.name_new_empty = PyUnicode_InternFromString("new_empty");
    torch.name_dtype = PyUnicode_InternFromString("dtype");
    if (!torch.name_requires_grad || !torch.name_new_empty || !torch.name_dtype)
        return NULL;
    for (int i = TORCH_SAME + 1; i < TORCH_DTYPES; i++)
        if (!(torch.typed[i] = PyDict_New()) || PyDict_SetItem(torch.typed[i], torch.name_dtype, dtypes[i]))
            return NULL;
    Py_RETURN_NONE;
}

bool torch_is_tensor(PyObject *object)
{
    return torch.tensor && (Py_TYPE(object) == torch.tensor || PyType_IsSubtype(Py_TYPE(object), torch.tensor));
}

static bool is_subclassed(PyObject *object)
{
    return object && Py_TYPE(object) != torch.tensor && Py_TYPE(object) != torch.parameter && torch_is_tensor(object);
}

/* Whether what a function returns is true; -1 with an exception set. */
static int is_true(PyObject *function)
{
    PyObject *answer = PyObject_CallNoArgs(function);
    if (!answer)
        return -1;
    const int result = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return result;
}

int torch_needs_dispatch(const arguments *a)
{
    if (is_subclassed(a->given[ARG_Q]) || is_subclassed(a->given[ARG_K]) || is_subclassed(a->given[ARG_V]) ||
        is_subclassed(a->given[ARG_ATTN_MASK]) || is_subclassed(a->given[ARG_OUT]))
        return 1;
    for (int i = ARG_SIDE; i < ARGUMENTS; i++)
        if (is_subclassed(a->given[i]))
            return 1;
    return is_true(torch.dispatch_depth);
}

PyObject *torch_dispatch(signature function, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    return acr_py_call_with(torch.run_op[function], args, positional, keyword_names);
}

static int requires_grad(PyObject *tensor)
{
    if (!tensor || !torch_is_tensor(tensor))
        return 0;
    PyObject *answer = PyObject_GetAttr(tensor, torch.name_requires_grad);
    if (!answer)
        return -1;
    Py_DECREF(answer);
    return answer == Py_True;
}

static bool has_gradient(int argument)
{
    return argument <= ARG_V || argument == ARG_SINKS;
}

int torch_wants_gradients(const arguments *a)
{
    int wants = 0, refused = -1;
    for (int i = 0; i < ARGUMENTS; i++) {
        if (i > ARG_ATTN_MASK && i < ARG_SIDE && i != ARG_OUT)
            continue; /* no tensors */
        const int is_required = requires_grad(a->given[i]);
        if (is_required < 0)
            return -1;
        wants |= is_required;
        if (is_required && !has_gradient(i))
            refused = i;
    }
    if (!wants)
        return 0;
    PyObject *enabled = PyObject_CallNoArgs(torch.is_grad_enabled);
    if (!enabled)
        return -1;
    const bool is_enabled = enabled == Py_True;
    Py_DECREF(enabled);
    if (!is_enabled || refused < 0)
        return is_enabled;
    PyErr_Format(PyExc_NotImplementedError,
                 "%s requires a gradient, and acromion computes those of q, k, v and sinks only: call under "
                 "torch.no_grad() or torch.inference_mode(), or give %s.detach()",
                 argument_names[refused], argument_names[refused]);
    return -1;
}

PyObject *torch_empty_like(PyObject *like, torch_dtype dtype)
{
    if (dtype == TORCH_SAME)
        return PyObject_CallFunctionObjArgs(torch.empty_like, like, NULL);
    PyObject *args = PyTuple_Pack(1, like), *result = NULL;
    if (args)
        result = PyObject_Call(torch.empty_like, args, torch.typed[dtype]);
    Py_XDECREF(args);
    return result;
}

static PyObject *sizes_of(const int64_t *values, int count)
{
    PyObject *sizes = PyTuple_New(count);
    for (int i = 0; sizes && i < count; i++) {
        PyObject *size = PyLong_FromLongLong(values[i]);
        if (!size)
            Py_CLEAR(sizes);
        else
            PyTuple_SetItem(sizes, i, size);
    }
    return sizes;
}

PyObject *torch_new_empty(PyObject *like, const int64_t *shape, int ndim, torch_dtype dtype)
{
    PyObject *result = NULL, *sizes = sizes_of(shape, ndim), *args = sizes ? PyTuple_Pack(1, sizes) : NULL,
             *method = PyObject_GetAttr(like, torch.name_new_empty);
    if (args && method)
        result = PyObject_Call(method, args, torch.typed[dtype]);
    Py_XDECREF(sizes);
    Py_XDECREF(args);
    Py_XDECREF(method);
    return result;
}

PyObject *torch_new_empty_strided(PyObject *like, const int64_t *shape, const int64_t *strides, int ndim)
{
    PyObject *result = NULL, *sizes = sizes_of(shape, ndim), *steps = sizes_of(strides, ndim);
    if (sizes && steps)
        result = PyObject_CallMethod(like, "new_empty_strided", "OO", sizes, steps);
    Py_XDECREF(sizes);
    Py_XDECREF(steps);
    return result;
}

PyObject *torch_spread(PyObject *mask, int64_t keys)
{
    return PyObject_CallFunction(torch.spread, "OL", mask, (long long)keys);
}

int torch_is_capturing(void)
{
    return is_true(torch.is_capturing);
}
