/* The calls: from arguments to an enqueued execution. */
#ifndef ACR_PY_SDPA_H
#define ACR_PY_SDPA_H

#include "common.h"

PyObject *sdpa_call(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);
PyObject *sdpa_run(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);
PyObject *sdpa_explain(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);
PyObject *sdpa_forget(PyObject *module, PyObject *unused);
PyObject *sdpa_import_wisdom(PyObject *module, PyObject *args);

#endif
