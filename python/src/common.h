/* What the files of the extension share: the limited C API of Python and how errors are raised. */
#ifndef ACR_PY_COMMON_H
#define ACR_PY_COMMON_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#error "build with -DPy_LIMITED_API: one binary serves every Python from that version on"
#endif
#include <Python.h>

#include "acromion.h"

/* Raises acromion.InvalidError, a ValueError, with a text in the manner of PyUnicode_FromFormat. Returns -1. */
int acr_py_invalid(const char *format, ...);

/* Raises the exception of a status with a text. Returns -1. */
int acr_py_refuse(acr_status status, const char *text);

/* The alignment in bytes that addresses share, at most 16, from the bitwise or of all. */
uint32_t acr_py_alignment(uintptr_t addresses);

/* Calls with the arguments of a vector call. */
PyObject *acr_py_call_with(PyObject *callable, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);

/* Finds the exceptions; called once at import. */
int common_setup(void);

/* Raises the exception of a status with acr_last_error()'s text. Returns -1. */
int acr_py_raise(acr_status status);

#endif
