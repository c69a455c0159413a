/* Reading tensors through DLPack: by the C functions that their type offers, else by the method __dlpack__. */
#include "operand.h"

#include <string.h>

static PyObject *name_dlpack, *name_dlpack_device, *name_exchange, *empty_tuple;

int operand_setup(void)
{
    name_dlpack = PyUnicode_InternFromString("__dlpack__");
    name_dlpack_device = PyUnicode_InternFromString("__dlpack_device__");
    name_exchange = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    empty_tuple = PyTuple_New(0);
    return name_dlpack && name_dlpack_device && name_exchange && empty_tuple ? 0 : -1;
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
    if (!out->exchange || !out->exchange->view)
        return acquire_capsule(out);
    dl_tensor t;
    return out->exchange->view(object, &t) == 0 ? describe(out, &t) : -1;
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
