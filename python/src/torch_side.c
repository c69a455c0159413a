/* PyTorch's part: dispatch, gradients, new tensors. */
#include "torch_side.h"

static struct {
    PyTypeObject *tensor, *parameter;
    PyObject *run_op, *is_grad_enabled, *dispatch_depth, *is_capturing, *empty_like, *float16, *float32, *uint8;
    PyObject *name_requires_grad, *name_new_empty, *name_dtype;
} torch;

PyObject *torch_bind(PyObject *module, PyObject *args)
{
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!OOOOOOOO:bind_torch", &PyType_Type, &torch.tensor, &PyType_Type, &torch.parameter,
                          &torch.run_op, &torch.is_grad_enabled, &torch.dispatch_depth, &torch.is_capturing,
                          &torch.empty_like, &torch.float16, &torch.float32, &torch.uint8))
        return NULL;
    Py_INCREF(args); /* holds everything in `torch` from now on */
    torch.name_requires_grad = PyUnicode_InternFromString("requires_grad");
    torch.name_new_empty = PyUnicode_InternFromString("new_empty");
    torch.name_dtype = PyUnicode_InternFromString("dtype");
    if (!torch.name_requires_grad || !torch.name_new_empty || !torch.name_dtype)
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

int torch_needs_dispatch(const arguments *a)
{
    static const int tensors[] = {ARG_Q, ARG_K, ARG_V, ARG_KV_LENS, ARG_OUT, ARG_Q_SCALE, ARG_K_SCALE, ARG_V_SCALE};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        if (is_subclassed(a->given[tensors[i]]))
            return 1;
    PyObject *depth = PyObject_CallNoArgs(torch.dispatch_depth);
    if (!depth)
        return -1;
    const int result = PyObject_IsTrue(depth);
    Py_DECREF(depth);
    return result;
}

PyObject *torch_dispatch(PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    PyObject *values = PyTuple_New(positional), *keywords = PyDict_New(), *result = NULL;
    if (!values || !keywords)
        goto done;
    for (Py_ssize_t i = 0; i < positional; i++) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(values, i, args[i]);
    }
    const Py_ssize_t count = keyword_names ? PyTuple_Size(keyword_names) : 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyDict_SetItem(keywords, PyTuple_GetItem(keyword_names, i), args[positional + i]))
            goto done;
    result = PyObject_Call(torch.run_op, values, keywords);
done:
    Py_XDECREF(values);
    Py_XDECREF(keywords);
    return result;
}

/* The argument that requires a gradient, -1 for none, -2 with an exception. */
static int find_requiring(const arguments *a)
{
    static const int tensors[] = {ARG_Q, ARG_K, ARG_V, ARG_OUT, ARG_Q_SCALE, ARG_K_SCALE, ARG_V_SCALE};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        PyObject *tensor = a->given[tensors[i]];
        if (!tensor || !torch_is_tensor(tensor))
            continue;
        PyObject *answer = PyObject_GetAttr(tensor, torch.name_requires_grad);
        if (!answer)
            return -2;
        const bool is_required = answer == Py_True;
        Py_DECREF(answer);
        if (is_required)
            return tensors[i];
    }
    return -1;
}

int torch_check_grad(const arguments *a)
{
    static const char *const texts[] = {[ARG_Q] = "q",
                                        [ARG_K] = "k",
                                        [ARG_V] = "v",
                                        [ARG_OUT] = "out",
                                        [ARG_Q_SCALE] = "q_scale",
                                        [ARG_K_SCALE] = "k_scale",
                                        [ARG_V_SCALE] = "v_scale"};
    const int found = find_requiring(a);
    if (found < 0)
        return found == -1 ? 0 : -1;
    PyObject *enabled = PyObject_CallNoArgs(torch.is_grad_enabled);
    if (!enabled)
        return -1;
    const bool is_enabled = enabled == Py_True;
    Py_DECREF(enabled);
    if (!is_enabled)
        return 0;
    PyErr_Format(PyExc_NotImplementedError,
                 "%s requires a gradient, and acromion computes the forward pass only: call under torch.no_grad() or "
                 "torch.inference_mode(), or give %s.detach()",
                 texts[found], texts[found]);
    return -1;
}

/* Keyword arguments that ask for a type; NULL with an exception. */
static PyObject *keywords_of(torch_dtype dtype)
{
    PyObject *const types[] = {
        [TORCH_FLOAT16] = torch.float16, [TORCH_FLOAT32] = torch.float32, [TORCH_UINT8] = torch.uint8};
    PyObject *keywords = PyDict_New();
    if (keywords && PyDict_SetItem(keywords, torch.name_dtype, types[dtype]))
        Py_CLEAR(keywords);
    return keywords;
}

PyObject *torch_empty_like(PyObject *like, torch_dtype dtype)
{
    if (dtype == TORCH_SAME)
        return PyObject_CallFunctionObjArgs(torch.empty_like, like, NULL);
    PyObject *args = PyTuple_Pack(1, like), *keywords = keywords_of(dtype), *result = NULL;
    if (args && keywords)
        result = PyObject_Call(torch.empty_like, args, keywords);
    Py_XDECREF(args);
    Py_XDECREF(keywords);
    return result;
}

PyObject *torch_new_empty(PyObject *like, const int64_t *shape, int ndim, torch_dtype dtype)
{
    PyObject *result = NULL, *keywords = NULL, *sizes = PyTuple_New(ndim), *args = PyTuple_New(1),
             *method = PyObject_GetAttr(like, torch.name_new_empty);
    if (!sizes || !args || !method)
        goto done;
    for (int i = 0; i < ndim; i++) {
        PyObject *size = PyLong_FromLongLong(shape[i]);
        if (!size)
            goto done;
        PyTuple_SetItem(sizes, i, size);
    }
    PyTuple_SetItem(args, 0, sizes);
    sizes = NULL;
    if (dtype != TORCH_SAME && !(keywords = keywords_of(dtype)))
        goto done;
    result = PyObject_Call(method, args, keywords);
done:
    Py_XDECREF(sizes);
    Py_XDECREF(args);
    Py_XDECREF(keywords);
    Py_XDECREF(method);
    return result;
}

int torch_is_capturing(void)
{
    PyObject *answer = PyObject_CallNoArgs(torch.is_capturing);
    if (!answer)
        return -1;
    const int result = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return result;
}
