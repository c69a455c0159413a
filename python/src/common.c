/* How a status becomes an exception. */
#include "common.h"

#include <stdarg.h>

/* acromion._errors.from_status(status, text) -> exception */
static PyObject *from_status;

/* Sets the exception of a status; steals text. */
static void set_error(acr_status status, PyObject *text)
{
    PyObject *error = text ? PyObject_CallFunction(from_status, "iO", (int)status, text) : NULL;
    Py_XDECREF(text);
    if (error)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
}

int acr_py_refuse(acr_status status, const char *text)
{
    set_error(status, PyUnicode_FromString(text));
    return -1;
}

int acr_py_raise(acr_status status)
{
    return acr_py_refuse(status, acr_last_error());
}

int acr_py_invalid(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    set_error(ACR_INVALID, PyUnicode_FromFormatV(format, values));
    va_end(values);
    return -1;
}

uint32_t acr_py_alignment(uintptr_t addresses)
{
    const uintptr_t bits = addresses | 16;
    return (uint32_t)(bits & (~bits + 1));
}

int common_setup(void)
{
    PyObject *errors = PyImport_ImportModule("acromion._errors");
    from_status = errors ? PyObject_GetAttrString(errors, "from_status") : NULL;
    Py_XDECREF(errors);
    return from_status ? 0 : -1;
}

PyObject *acr_py_call_with(PyObject *callable, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    const Py_ssize_t count = keyword_names ? PyTuple_Size(keyword_names) : 0;
    PyObject *values = PyTuple_New(positional), *keywords = count ? PyDict_New() : NULL, *result = NULL;
    if (!values || (count && !keywords))
        goto done;
    for (Py_ssize_t i = 0; i < positional; i++) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(values, i, args[i]);
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyDict_SetItem(keywords, PyTuple_GetItem(keyword_names, i), args[positional + i]))
            goto done;
    result = PyObject_Call(callable, values, keywords);
done:
    Py_XDECREF(values);
    Py_XDECREF(keywords);
    return result;
}
