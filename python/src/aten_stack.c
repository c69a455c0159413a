/* Operators as PyTorch's C interface registers them (torch/csrc/stable): a function finds the arguments on a stack of
 * 64-bit words and leaves the results there. Each argument becomes the Python object that it was or would be, and the
 * operator of aten.c is called; what is saved is the dispatcher's own way into Python. */
#include "aten_stack.h"

#include <stdbool.h>
#include <string.h>

#include "torch_side.h"

typedef struct torch_library torch_library; /* torch::Library: takes its operators back when it is deleted */
typedef PyObject *operator_call(PyObject *self, PyObject *const *args, Py_ssize_t positional, PyObject *names);
typedef void stack_function(uint64_t *stack, uint64_t given, uint64_t results);

/* The first ones are of PyTorch's C interface. Of the others wrap gives a tensor's object, negate is an operator in
 * place, fail throws a text, and release is C++'s operator delete. */
static struct {
    int32_t (*open_library)(const char *space, const char *key, const char *file, uint32_t line, torch_library **out);
    int32_t (*register_in)(torch_library *library, const char *name, stack_function *function);
    int32_t (*close_library)(torch_library *library);
    int32_t (*new_handle)(const torch_handle *tensor, torch_handle **out);
    int32_t (*new_undefined)(torch_handle **out);
    int32_t (*delete_handle)(torch_handle *tensor);
    PyObject *(*wrap)(const torch_handle *tensor);
    torch_handle *(*negate)(torch_handle *tensor);
    void (*fail)(const char *function, const char *file, uint32_t line, const char *text);
    void (*release)(void *memory);
} torch;

static const struct symbol {
    const char *name;
    void *place;
} symbols[] = {
    {"aoti_torch_library_init_impl", &torch.open_library},
    {"aoti_torch_library_impl", &torch.register_in},
    {"aoti_torch_delete_library_object", &torch.close_library},
    {"aoti_torch_new_tensor_handle", &torch.new_handle},
    {"aoti_torch_new_uninitialized_tensor", &torch.new_undefined},
    {"aoti_torch_delete_tensor_object", &torch.delete_handle},
    {"_Z16THPVariable_WrapRKN2at10TensorBaseE", &torch.wrap},
    {"_ZN2at4_ops4neg_4callERNS_6TensorE", &torch.negate},
    {"_ZN3c106detail14torchCheckFailEPKcS2_jS2_", &torch.fail},
    {"_ZdlPv", &torch.release},
};

static bool has_all; /* of these, and objects' tensors are known */

enum {
    PLACES = 5, /* operators registered at once: a function for each, since a registered one is told no more */
    VALUES = 16
};

static struct place {
    torch_library *library; /* NULL: free */
    operator_call *call;
    PyObject *function, *self, *keywords;
    char arguments[VALUES + 1], results[VALUES + 1];
} places[PLACES];

/* ---- Errors ------------------------------------------------------------------------------------------------------ */

/* What the call on this thread has to raise. */
static _Thread_local struct {
    PyObject *type, *value, *trace;
} pending;
static PyObject *raising; /* a tensor: whatever is done to it calls aten_stack_raise */

PyObject *aten_stack_raise(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (!pending.type)
        return PyErr_Format(PyExc_RuntimeError, "acromion has no exception to raise");
    PyErr_Restore(pending.type, pending.value, pending.trace);
    memset(&pending, 0, sizeof pending);
    return NULL;
}

/* The pending exception as one of C++, which C cannot throw but PyTorch can: it passes through this function and its
 * callers here, which hold nothing, not the interpreter either. */
static void throw_pending(void)
{
    torch.negate(torch_inside(raising));
    torch.fail(__func__, __FILE__, __LINE__, "acromion failed, and its exception was lost");
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

static PyObject *number_of(char kind, uint64_t word)
{
    double real;
    memcpy(&real, &word, sizeof real);
    return kind == 'b'   ? PyBool_FromLong((word & 1) != 0)
           : kind == 'i' ? PyLong_FromLongLong((int64_t)word)
                         : PyFloat_FromDouble(real);
}

/* A tensor's object; the handle is given up. An undefined one has none. */
static PyObject *object_of(uint64_t word)
{
    torch_handle *const handle = (torch_handle *)(uintptr_t)word; // NOLINT(performance-no-int-to-ptr)
    PyObject *const object = torch.wrap(handle);
    torch.delete_handle(handle);
    return object;
}

/* The object of an argument; what the stack owned is given up. */
static PyObject *take(char kind, uint64_t word)
{
    static const char optional[] = "tjg", present[] = "Tif";
    const char *const at = strchr(optional, kind);
    if (at) {
        uint64_t *const inner = (uint64_t *)(uintptr_t)word; // NOLINT(performance-no-int-to-ptr)
        if (!inner) {
            Py_INCREF(Py_None);
            return Py_None;
        }
        kind = present[at - optional];
        word = *inner;
        torch.release(inner);
    }
    return kind == 'T' ? object_of(word) : number_of(kind, word);
}

/* Leaves a result on the stack. Returns 0, or -1 with an exception. */
static int put(uint64_t *word, char kind, PyObject *value)
{
    torch_handle *handle = NULL;
    if (kind == 'i') {
        *word = (uint64_t)PyLong_AsLongLong(value);
        return PyErr_Occurred() ? -1 : 0;
    }
    if (value != Py_None && !torch_is_tensor(value)) {
        PyErr_Format(PyExc_TypeError, "a result is a %R, must be a tensor or None", (PyObject *)Py_TYPE(value));
        return -1;
    }
    if (value == Py_None ? torch.new_undefined(&handle) : torch.new_handle(torch_inside(value), &handle)) {
        PyErr_SetString(PyExc_RuntimeError, "PyTorch made no handle for a result");
        return -1;
    }
    *word = (uint64_t)(uintptr_t)handle;
    return 0;
}

static int put_results(const struct place *p, uint64_t *stack, PyObject *results)
{
    const Py_ssize_t count = (Py_ssize_t)strlen(p->results);
    if (!PyTuple_Check(results) || PyTuple_Size(results) != count) {
        PyErr_SetString(PyExc_RuntimeError, "an operator of ATen has another number of results than its schema");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!put(&stack[i], p->results[i], PyTuple_GetItem(results, i)))
            continue;
        while (i-- > 0)
            if (p->results[i] == 'T')
                torch.delete_handle((torch_handle *)(uintptr_t)stack[i]); // NOLINT(performance-no-int-to-ptr)
        return -1;
    }
    return 0;
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

static int call_operator(const struct place *p, uint64_t *stack, Py_ssize_t count)
{
    PyObject *objects[VALUES];
    int failed = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        objects[i] = take(p->arguments[i], stack[i]);
        failed |= !objects[i];
    }
    PyObject *results = NULL;
    if (!failed)
        results = p->call(p->self, objects, count - PyTuple_Size(p->keywords), p->keywords);
    for (Py_ssize_t i = 0; i < count; i++)
        Py_XDECREF(objects[i]);
    failed = !results || put_results(p, stack, results);
    Py_XDECREF(results);
    return failed ? -1 : 0;
}

static void enter(const struct place *p, uint64_t *stack, uint64_t given)
{
    const PyGILState_STATE state = PyGILState_Ensure();
    const int failed = call_operator(p, stack, (Py_ssize_t)given);
    if (failed)
        PyErr_Fetch(&pending.type, &pending.value, &pending.trace);
    PyGILState_Release(state);
    if (failed)
        throw_pending();
}

#define PLACE(n)                                                                                                       \
    static void enter_##n(uint64_t *stack, uint64_t given, uint64_t results)                                           \
    {                                                                                                                  \
        (void)results;                                                                                                 \
        enter(&places[n], stack, given);                                                                               \
    }
PLACE(0)
PLACE(1)
PLACE(2)
PLACE(3)
PLACE(4)
static stack_function *const entries[PLACES] = {enter_0, enter_1, enter_2, enter_3, enter_4};

/* ---- Registering ------------------------------------------------------------------------------------------------- */

PyObject *aten_stack_bind(PyObject *module, PyObject *tensor)
{
    (void)module;
    has_all = torch_inside(tensor);
    for (size_t i = 0; has_all && i < sizeof symbols / sizeof symbols[0]; i++) {
        void *found = torch_symbol(symbols[i].name);
        memcpy(symbols[i].place, &found, sizeof found);
        has_all = found;
    }
    Py_INCREF(tensor);
    Py_XDECREF(raising);
    raising = tensor;
    return PyBool_FromLong(has_all);
}

static void take_back(PyObject *capsule)
{
    struct place *p = PyCapsule_GetPointer(capsule, "acromion.aten_stack");
    torch.close_library(p->library);
    Py_CLEAR(p->function);
    Py_CLEAR(p->keywords);
    p->library = NULL;
}

static struct place *free_place(void)
{
    for (int i = 0; i < PLACES; i++)
        if (!places[i].library)
            return &places[i];
    return NULL;
}

PyObject *aten_stack_register(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name, *key, *takes, *gives;
    PyObject *function, *keywords, *capsule;
    struct place *const p = free_place();
    if (!PyArg_ParseTuple(args, "ssO!sO!s:aten_stack_register", &name, &key, &PyCFunction_Type, &function, &takes,
                          &PyTuple_Type, &keywords, &gives))
        return NULL;
    if (!has_all || !p || strlen(takes) > VALUES || strlen(gives) > VALUES)
        Py_RETURN_NONE;
    if (torch.open_library("aten", key, __FILE__, __LINE__, &p->library))
        return PyErr_Format(PyExc_RuntimeError, "PyTorch gave no library for the dispatch key %s", key);
    memcpy(p->arguments, takes, strlen(takes) + 1);
    memcpy(p->results, gives, strlen(gives) + 1);
    Py_INCREF(function);
    Py_INCREF(keywords);
    p->function = function;
    p->keywords = keywords;
    p->self = PyCFunction_GetSelf(function);
    p->call = (operator_call *)(void (*)(void))PyCFunction_GetFunction(function);
    capsule = PyCapsule_New(p, "acromion.aten_stack", take_back);
    if (capsule && torch.register_in(p->library, name, entries[p - places])) {
        Py_CLEAR(capsule);
        PyErr_Format(PyExc_RuntimeError, "PyTorch refused a kernel for aten::%s", name);
    }
    return capsule;
}
