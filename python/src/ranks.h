/* Groups of ranks over libacromion_nccl, for acromion.distributed, which says what the functions do. */
#ifndef ACR_PY_RANKS_H
#define ACR_PY_RANKS_H

#include "common.h"

PyObject *ranks_id(PyObject *module, PyObject *args);
PyObject *ranks_open(PyObject *module, PyObject *args);
PyObject *ranks_close(PyObject *module, PyObject *args);
PyObject *ranks_wait(PyObject *module, PyObject *args);
PyObject *ranks_rows(PyObject *module, PyObject *args);
PyObject *ranks_parse_problem(PyObject *module, PyObject *args);
PyObject *ranks_plan(PyObject *module, PyObject *args);
PyObject *ranks_refuse(PyObject *module, PyObject *args);
PyObject *ranks_sdpa(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);

#endif
