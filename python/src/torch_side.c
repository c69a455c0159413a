/* PyTorch's part: dispatch, gradients, new tensors. */
#include "torch_side.h"

#include <dlfcn.h>
#include <string.h>

static struct {
    PyTypeObject *tensor, *parameter;
    PyObject *run_op[SIGNATURES], *is_grad_enabled, *dispatch_depth, *is_capturing, *empty_like, *spread;
    PyObject *typed[TORCH_DTYPES]; /* keyword arguments that ask for a type */
    PyObject *name_requires_grad, *name_new_empty, *name_dtype;
} torch;

/* ---- PyTorch's own functions ------------------------------------------------------------------------------------- */

/* Most are of PyTorch's C interface (torch/csrc/inductor/aoti_torch/c/shim.h). Two are C++ functions of one plain
 * argument or none, whose names in the library hold their arguments' types. Each saves a call through Python; where one
 * is missing, Python is called. */
static struct {
    bool (*is_grad_enabled)(void);
    int64_t (*dispatch_depth)(void);
    int32_t (*empty_strided)(int64_t ndim, const int64_t *shape, const int64_t *strides, int32_t dtype,
                             int32_t device_type, int32_t device_index, torch_handle **out);
    int32_t (*delete_handle)(torch_handle *tensor);
    PyObject *(*wrap)(const torch_handle *tensor);
    int32_t (*float16)(void), (*bfloat16)(void), (*float32)(void), (*uint8)(void), (*int64)(void), (*uint64)(void);
    int32_t (*cpu)(void), (*cuda)(void);
    int (*is_capturing)(void *stream, int *capture); /* of CUDA's runtime: 0 for success, capture 0 for none */
    bool makes_tensors;                              /* all that this takes are there */
} shim;

static const struct shim_symbol {
    const char *name;
    void *place;
    bool makes_tensors;
} shim_symbols[] = {
    {"aoti_torch_grad_mode_is_enabled", &shim.is_grad_enabled, false},
    {"_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", &shim.dispatch_depth, false},
    {"aoti_torch_empty_strided", &shim.empty_strided, true},
    {"aoti_torch_delete_tensor_object", &shim.delete_handle, true},
    {"_Z16THPVariable_WrapRKN2at10TensorBaseE", &shim.wrap, true},
    {"aoti_torch_dtype_float16", &shim.float16, true},
    {"aoti_torch_dtype_bfloat16", &shim.bfloat16, true},
    {"aoti_torch_dtype_float32", &shim.float32, true},
    {"aoti_torch_dtype_uint8", &shim.uint8, true},
    {"aoti_torch_dtype_int64", &shim.int64, true},
    {"aoti_torch_dtype_uint64", &shim.uint64, true},
    {"aoti_torch_device_type_cpu", &shim.cpu, true},
    {"aoti_torch_device_type_cuda", &shim.cuda, true},
    {"cudaStreamIsCapturing", &shim.is_capturing, false},
};

void *torch_symbol(const char *name)
{
    void *library = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
    PyObject *const *const type = library ? dlsym(library, "THPVariableClass") : NULL;
    return type && *type == (PyObject *)torch.tensor ? dlsym(library, name) : NULL;
}

/* Finds the at::Tensor in a tensor's object: behind the object's head, perhaps behind a flag. It is the one pointer
 * that a handle of the same tensor is. */
static size_t find_tensor(void)
{
    torch_handle *handle = NULL;
    size_t result = 0;
    if (shim.empty_strided(0, NULL, NULL, shim.float32(), shim.cpu(), 0, &handle))
        return 0;
    PyObject *const object = shim.wrap(handle);
    for (size_t at = 2 * sizeof(void *); object && !result && at <= 3 * sizeof(void *); at += sizeof(void *))
        if (memcmp((const char *)object + at, handle, sizeof(void *)) == 0)
            result = at;
    shim.delete_handle(handle);
    Py_XDECREF(object);
    return result;
}

static void find_shim(void)
{
    memset(&shim, 0, sizeof shim);
    shim.makes_tensors = true;
    for (size_t i = 0; i < sizeof shim_symbols / sizeof shim_symbols[0]; i++) {
        void *found = torch_symbol(shim_symbols[i].name);
        memcpy(shim_symbols[i].place, &found, sizeof found);
        shim.makes_tensors = shim.makes_tensors && (found || !shim_symbols[i].makes_tensors);
    }
}

PyObject *torch_bind(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *dtypes[TORCH_DTYPES] = {NULL}, *pairs;
    if (!PyArg_ParseTuple(args, "O!O!OOOOOOOOOOOOO!:bind_torch", &PyType_Type, &torch.tensor, &PyType_Type,
                          &torch.parameter, &torch.run_op[SIGNATURE_SDPA], &torch.run_op[SIGNATURE_PAGED],
                          &torch.is_grad_enabled, &torch.dispatch_depth, &torch.is_capturing, &torch.empty_like,
                          &torch.spread, &dtypes[TORCH_FLOAT16], &dtypes[TORCH_FLOAT32], &dtypes[TORCH_UINT8],
                          &dtypes[TORCH_INT64], &dtypes[TORCH_UINT64], &PyTuple_Type, &pairs))
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
    torch_object_bind(torch.tensor);
    find_shim();
    if (shim.makes_tensors)
        torch_object_learn(find_tensor(), pairs);
    Py_RETURN_NONE;
}

/* ---- Where a call goes ------------------------------------------------------------------------------------------- */

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
    return shim.dispatch_depth ? shim.dispatch_depth() != 0 : is_true(torch.dispatch_depth);
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
    const int is_enabled = shim.is_grad_enabled ? shim.is_grad_enabled() : is_true(torch.is_grad_enabled);
    int wants = 0, refused = -1;
    if (is_enabled <= 0)
        return is_enabled;
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
    if (!wants || refused < 0)
        return wants;
    PyErr_Format(PyExc_NotImplementedError,
                 "%s requires a gradient, and acromion computes those of q, k, v and sinks only: call under "
                 "torch.no_grad() or torch.inference_mode(), or give %s.detach()",
                 argument_names[refused], argument_names[refused]);
    return -1;
}

/* ---- New tensors ------------------------------------------------------------------------------------------------- */

/* PyTorch's number of a type; -1 where only Python knows it. */
static int32_t scalar_type(const operand *like, torch_dtype dtype)
{
    switch (dtype) {
    case TORCH_FLOAT16:
        return shim.float16();
    case TORCH_FLOAT32:
        return shim.float32();
    case TORCH_UINT8:
        return shim.uint8();
    case TORCH_INT64:
        return shim.int64();
    case TORCH_UINT64:
        return shim.uint64();
    default:
        return operand_has_type(like, DL_FLOAT, 16)    ? shim.float16()
               : operand_has_type(like, DL_BFLOAT, 16) ? shim.bfloat16()
               : operand_has_type(like, DL_FLOAT, 32)  ? shim.float32()
                                                       : -1;
    }
}

/* A tensor straight from PyTorch's allocator; NULL without an exception where Python has to be asked, which then says
 * why there is none. */
static PyObject *new_directly(const operand *like, const int64_t *shape, const int64_t *strides, int ndim,
                              torch_dtype dtype)
{
    const int32_t type = shim.makes_tensors ? scalar_type(like, dtype) : -1;
    torch_handle *made = NULL;
    int32_t failed;
    if (type < 0)
        return NULL;
    const int32_t device = like->device.type == DL_CUDA ? shim.cuda() : shim.cpu();
    Py_BEGIN_ALLOW_THREADS; /* other threads of PyTorch wait for the interpreter inside the allocator */
    failed = shim.empty_strided(ndim, shape, strides, type, device, like->device.id, &made);
    Py_END_ALLOW_THREADS;
    if (failed)
        return NULL;
    PyObject *result = shim.wrap(made);
    shim.delete_handle(made); /* the object holds the tensor now */
    return result;
}

/* Whether a tensor's elements fill its memory, each place once: then one like it has its strides. */
static bool is_dense(const operand *op)
{
    int64_t expected = 1;
    bool is_taken[OPERAND_DIMS] = {false};
    for (int i = 0; i < op->ndim; i++) {
        int innermost = -1;
        for (int axis = 0; axis < op->ndim; axis++)
            if (!is_taken[axis] && op->shape[axis] > 1 && op->strides[axis] == expected)
                innermost = axis;
        if (innermost < 0)
            break;
        is_taken[innermost] = true;
        expected *= op->shape[innermost];
    }
    for (int axis = 0; axis < op->ndim; axis++)
        if (op->shape[axis] < 1 || (op->shape[axis] > 1 && !is_taken[axis]))
            return false;
    return true;
}

PyObject *torch_empty_like(const operand *like, torch_dtype dtype)
{
    PyObject *result = is_dense(like) ? new_directly(like, like->shape, like->strides, like->ndim, dtype) : NULL;
    if (result || PyErr_Occurred())
        return result;
    if (dtype == TORCH_SAME)
        return PyObject_CallFunctionObjArgs(torch.empty_like, like->object, NULL);
    PyObject *args = PyTuple_Pack(1, like->object);
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

PyObject *torch_new_empty(const operand *like, const int64_t *shape, int ndim, torch_dtype dtype)
{
    int64_t strides[OPERAND_DIMS], packed = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[i] = packed;
        packed *= shape[i] > 1 ? shape[i] : 1;
    }
    PyObject *result = new_directly(like, shape, strides, ndim, dtype);
    if (result || PyErr_Occurred())
        return result;
    PyObject *sizes = sizes_of(shape, ndim), *args = sizes ? PyTuple_Pack(1, sizes) : NULL,
             *method = PyObject_GetAttr(like->object, torch.name_new_empty);
    if (args && method)
        result = PyObject_Call(method, args, torch.typed[dtype]);
    Py_XDECREF(sizes);
    Py_XDECREF(args);
    Py_XDECREF(method);
    return result;
}

PyObject *torch_new_empty_strided(const operand *like, const int64_t *shape, const int64_t *strides, int ndim)
{
    PyObject *result = new_directly(like, shape, strides, ndim, TORCH_SAME);
    if (result || PyErr_Occurred())
        return result;
    PyObject *sizes = sizes_of(shape, ndim), *steps = sizes_of(strides, ndim);
    if (sizes && steps)
        result = PyObject_CallMethod(like->object, "new_empty_strided", "OO", sizes, steps);
    Py_XDECREF(sizes);
    Py_XDECREF(steps);
    return result;
}

PyObject *torch_spread(PyObject *mask, int64_t keys)
{
    return PyObject_CallFunction(torch.spread, "OL", mask, (long long)keys);
}

int torch_is_capturing(const operand *like)
{
    void *stream;
    int capture;
    if (like->device.type != DL_CUDA)
        return 0;
    if (!shim.is_capturing)
        return is_true(torch.is_capturing);
    if (operand_stream(like, &stream))
        return -1;
    return shim.is_capturing(stream, &capture) == 0 ? capture != 0 : is_true(torch.is_capturing); /* says why */
}
