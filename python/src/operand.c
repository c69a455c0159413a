/* Reading tensors through DLPack: by the C functions that their type offers, else by the method __dlpack__. */
#include "operand.h"

#include <stdlib.h>
#include <string.h>

#include "torch_object.h"

static PyObject *name_dlpack, *name_dlpack_device, *name_exchange, *empty_tuple;

int operand_setup(void)
{
    name_dlpack = PyUnicode_InternFromString("__dlpack__");
    name_dlpack_device = PyUnicode_InternFromString("__dlpack_device__");
    name_exchange = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    empty_tuple = PyTuple_New(0);
    return name_dlpack && name_dlpack_device && name_exchange && empty_tuple ? 0 : -1;
}

/* ---- Names of types ---------------------------------------------------------------------------------------------- */

enum {
    KINDS = 6,
    TYPES = 12
};
/* By DLPack's numbers: first kinds, whose names the number of bits follows, then types. */
static const char *const kinds[KINDS] = {"int", "uint", "float", "opaque", "bfloat", "complex"};
static const struct named_type {
    const char *name;
    uint8_t bits;
} types[TYPES] = {{"bool", 8},           {"float8_e3m4", 8},     {"float8_e4m3", 8},   {"float8_e4m3b11fnuz", 8},
                  {"float8_e4m3fn", 8},  {"float8_e4m3fnuz", 8}, {"float8_e5m2", 8},   {"float8_e5m2fnuz", 8},
                  {"float8_e8m0fnu", 8}, {"float6_e2m3fn", 6},   {"float6_e3m2fn", 6}, {"float4_e2m1fn", 4}};

PyObject *operand_type_text(dl_type type)
{
    if (type.code < KINDS)
        return PyUnicode_FromFormat("%s%d", kinds[type.code], type.bits);
    if (type.code < KINDS + TYPES)
        return PyUnicode_FromString(types[type.code - KINDS].name);
    return PyUnicode_FromFormat("of DLPack type %d with %d bits", type.code, type.bits);
}

bool operand_has_type(const operand *op, uint8_t code, uint8_t bits)
{
    return op->dtype.code == code && op->dtype.bits == bits && op->dtype.lanes == 1;
}

int operand_fail_type(const operand *op, const char *wanted)
{
    PyObject *text = operand_type_text(op->dtype);
    if (text)
        PyErr_Format(PyExc_TypeError, "%s is %U, must be %s", op->name, text, wanted);
    Py_XDECREF(text);
    return -1;
}

int operand_read_type(acr_dtype *out, const operand *op)
{
    static const struct {
        acr_dtype dtype;
        uint8_t code, bits;
    } known[] = {
        {ACR_F32, DL_FLOAT, 32}, {ACR_F16, DL_FLOAT, 16}, {ACR_BF16, DL_BFLOAT, 16}, {ACR_E4M3, DL_FLOAT8_E4M3FN, 8}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (operand_has_type(op, known[i].code, known[i].bits)) {
            *out = known[i].dtype;
            return 0;
        }
    return operand_fail_type(op, "float16, bfloat16, float32 or float8_e4m3fn");
}

/* "cpu" or "cuda:0", as PyTorch writes them. */
static PyObject *device_text(dl_device device)
{
    return device.type == DL_CPU ? PyUnicode_FromString("cpu") : PyUnicode_FromFormat("cuda:%d", (int)device.id);
}

int operand_check_device(const operand *op, const operand *like)
{
    if (op->device.type == like->device.type && op->device.id == like->device.id)
        return 0;
    PyObject *own = device_text(op->device), *other = device_text(like->device);
    if (own && other)
        acr_py_invalid("%s is on %U and %s on %U, must be the same", op->name, own, like->name, other);
    Py_XDECREF(own);
    Py_XDECREF(other);
    return -1;
}

/* The type of a name; of one that is not known an opaque one. */
static dl_type type_named(const char *name)
{
    for (int i = 0; i < TYPES; i++)
        if (strcmp(name, types[i].name) == 0)
            return (dl_type){(uint8_t)(KINDS + i), types[i].bits, 1};
    for (int i = 0; i < KINDS; i++) {
        const size_t length = strlen(kinds[i]);
        char *end;
        const unsigned long bits = strncmp(name, kinds[i], length) == 0 ? strtoul(name + length, &end, 10) : 0;
        if (bits > 0 && bits <= UINT8_MAX && *end == '\0')
            return (dl_type){(uint8_t)i, (uint8_t)bits, 1};
    }
    return (dl_type){DL_OPAQUE, 0, 1};
}

/* ---- The exchange functions of a type ---------------------------------------------------------------------------- */

/* What is known of the types seen lately. A type in the list is kept alive, so its address means nothing else. */
enum {
    KNOWN_TYPES = 8
};
static struct known_type {
    PyTypeObject *type;
    const dl_exchange *exchange; /* NULL: it has none of our version */
} known_types[KNOWN_TYPES];
static unsigned next_known;

static const dl_exchange *look_up_exchange(PyTypeObject *type)
{
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, name_exchange);
    const dl_exchange *exchange = NULL;
    if (capsule && PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyErr_Clear();
    Py_XDECREF(capsule);
    while (exchange && exchange->version.major != DL_MAJOR)
        exchange = exchange->previous;
    return exchange;
}

static const dl_exchange *exchange_of(PyTypeObject *type)
{
    for (unsigned i = 0; i < KNOWN_TYPES; i++)
        if (known_types[i].type == type)
            return known_types[i].exchange;
    struct known_type *place = &known_types[next_known++ % KNOWN_TYPES];
    const dl_exchange *exchange = look_up_exchange(type);
    Py_INCREF(type);
    Py_XDECREF(place->type);
    *place = (struct known_type){type, exchange};
    return exchange;
}

/* ---- Describing -------------------------------------------------------------------------------------------------- */

static int describe(operand *op, const dl_tensor *t)
{
    if (t->ndim < 0 || t->ndim > OPERAND_DIMS)
        return acr_py_invalid("%s has %d dimensions, at most %d are possible", op->name, (int)t->ndim, OPERAND_DIMS);
    op->device = t->device;
    if (t->device.type == DL_CUDA_HOST)
        op->device = (dl_device){DL_CPU, 0};
    else if (t->device.type == DL_CUDA_MANAGED)
        op->device.type = DL_CUDA;
    else if (t->device.type != DL_CPU && t->device.type != DL_CUDA)
        return acr_py_invalid("%s is on a device of DLPack type %d, must be the CPU (1) or CUDA (2)", op->name,
                              (int)t->device.type);
    op->data = (char *)t->data + t->byte_offset;
    op->dtype = t->dtype;
    op->ndim = t->ndim;
    int64_t packed = 1;
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        op->shape[d] = t->shape[d];
        op->strides[d] = t->strides ? t->strides[d] : packed;
        packed *= t->shape[d];
    }
    return 0;
}

/* Calls object.__dlpack__ with keyword arguments. */
static PyObject *call_dlpack(PyObject *method, bool is_cuda, bool versioned)
{
    PyObject *capsule = NULL, *keywords = PyDict_New(), *version = Py_BuildValue("(ii)", DL_MAJOR, 0),
             *stream = PyLong_FromLong(1); /* the legacy default stream */
    if (keywords && version && stream && (!versioned || PyDict_SetItemString(keywords, "max_version", version) == 0) &&
        (!is_cuda || PyDict_SetItemString(keywords, "stream", stream) == 0))
        capsule = PyObject_Call(method, empty_tuple, keywords);
    Py_XDECREF(keywords);
    Py_XDECREF(version);
    Py_XDECREF(stream);
    return capsule;
}

/* The device type that an object says it is on, or -1 with an exception. */
static long device_type_of(PyObject *object)
{
    PyObject *method = PyObject_GetAttr(object, name_dlpack_device);
    PyObject *pair = method ? PyObject_CallNoArgs(method) : NULL;
    PyObject *type = pair ? PySequence_GetItem(pair, 0) : NULL;
    const long number = type ? PyLong_AsLong(type) : -1;
    Py_XDECREF(type);
    Py_XDECREF(pair);
    Py_XDECREF(method);
    return number;
}

static int acquire_capsule(operand *op)
{
    PyObject *method = PyObject_GetAttr(op->object, name_dlpack);
    if (!method) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s is a %R, which has no __dlpack__: give a tensor or an array", op->name,
                     (PyObject *)Py_TYPE(op->object));
        return -1;
    }
    const long device_type = device_type_of(op->object);
    if (device_type < 0) {
        Py_DECREF(method);
        return -1;
    }
    const bool is_cuda = device_type == DL_CUDA || device_type == DL_CUDA_MANAGED;
    op->capsule = call_dlpack(method, is_cuda, true);
    if (!op->capsule && PyErr_ExceptionMatches(PyExc_TypeError)) { /* it may be older than versions of capsules */
        PyErr_Clear();
        op->capsule = call_dlpack(method, is_cuda, false);
    }
    Py_DECREF(method);
    if (!op->capsule)
        return -1;
    if (PyCapsule_IsValid(op->capsule, "dltensor_versioned")) {
        const dl_managed_versioned *managed = PyCapsule_GetPointer(op->capsule, "dltensor_versioned");
        if (managed->version.major != DL_MAJOR)
            return acr_py_invalid("%s comes with DLPack version %u, must be %d", op->name, managed->version.major,
                                  DL_MAJOR);
        op->read_only = managed->flags & DL_READ_ONLY;
        return describe(op, &managed->tensor);
    }
    const dl_managed *managed = PyCapsule_GetPointer(op->capsule, "dltensor");
    return managed ? describe(op, &managed->tensor) : -1;
}

int operand_acquire(operand *out, const char *name, PyObject *object)
{
    out->name = name;
    out->object = object;
    out->capsule = NULL;
    out->read_only = false;
    out->exchange = exchange_of(Py_TYPE(object));
    const int is_negated = torch_is_negated(object);
    if (is_negated < 0)
        return -1;
    if (is_negated)
        return acr_py_invalid("%s is a view that PyTorch negates when it is read: resolve_neg() gives one that is not",
                              name);
    if (!out->exchange || !out->exchange->view)
        return acquire_capsule(out);
    dl_tensor t;
    return out->exchange->view(object, &t) == 0 ? describe(out, &t) : -1;
}

/* `count` numbers of a tuple. */
static int read_extents(int64_t *out, PyObject *tuple, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *number = PyTuple_GetItem(tuple, i);
        out[i] = number ? PyLong_AsLongLong(number) : -1;
        if (out[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

int operand_describe(operand *out, const char *name, PyObject *description)
{
    PyObject *shape, *strides;
    const char *type;
    int64_t extents[OPERAND_DIMS], steps[OPERAND_DIMS];
    if (!PyArg_ParseTuple(description, "O!Os", &PyTuple_Type, &shape, &strides, &type))
        return -1;
    *out = (operand){.name = name, .object = description};
    const Py_ssize_t ndim = PyTuple_Size(shape);
    const Py_ssize_t known = ndim <= OPERAND_DIMS ? ndim : 0; /* more are refused by their number */
    if (read_extents(extents, shape, known) || (strides != Py_None && read_extents(steps, strides, known)))
        return -1;
    return describe(out, &(dl_tensor){.device = {DL_CPU, 0},
                                      .ndim = (int32_t)ndim,
                                      .dtype = type_named(type),
                                      .shape = extents,
                                      .strides = strides != Py_None ? steps : NULL});
}

void operand_release(operand *op)
{
    Py_CLEAR(op->capsule);
}

int operand_stream(const operand *op, void **out)
{
    *out = NULL;
    if (op->device.type != DL_CUDA || !op->exchange || !op->exchange->current_stream)
        return 0;
    return op->exchange->current_stream(DL_CUDA, op->device.id, out);
}
