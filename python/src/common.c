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

int acr_py_raise(acr_status status)
{
    set_error(status, PyUnicode_FromString(acr_last_error()));
    return -1;
}

int acr_py_invalid(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    set_error(ACR_INVALID, PyUnicode_FromFormatV(format, values));
    va_end(values);
    return -1;
}

int common_setup(void)
{
    PyObject *errors = PyImport_ImportModule("acromion._errors");
    from_status = errors ? PyObject_GetAttrString(errors, "from_status") : NULL;
    Py_XDECREF(errors);
    return from_status ? 0 : -1;
}
