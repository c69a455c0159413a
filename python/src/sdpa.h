/* The calls: from arguments to an enqueued execution. */
#ifndef ACR_PY_SDPA_H
#define ACR_PY_SDPA_H

#include "arguments.h"
#include "common.h"
#include "operand.h"

/* Another way to execute than by a plan of this process alone: problem and buffers are those of the call, q its first
 * tensor; what it changes of the problem is lost. Returns 0, or -1 with an exception. */
typedef int sdpa_way(void *own, acr_problem *problem, const acr_buffers *buffers, const operand *q);

/* sdpa below the dispatcher, executed in another way, also where q has no rows. */
PyObject *sdpa_call_by(sdpa_way *way, void *own, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);

/* Computes what the arguments say, below the dispatcher and without a look at gradients. The caller owns *out, and
 * *lse, which is NULL where it was not asked for. Returns 0, or -1 with a Python exception. */
int sdpa_compute(const arguments *a, PyObject **out, PyObject **lse);

PyObject *sdpa_call(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);
/* The same of a cache in pages. */
PyObject *sdpa_paged_call(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);
PyObject *sdpa_run(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);
/* Writes dq, dk, dv and dsinks, which come before sdpa's arguments with d_o, o and lse. */
PyObject *sdpa_gradients(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);
PyObject *sdpa_explain(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);
PyObject *sdpa_problem(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);
PyObject *sdpa_plan_text(PyObject *module, PyObject *args);
PyObject *sdpa_gradient_problem(PyObject *module, PyObject *args);
PyObject *sdpa_forget(PyObject *module, PyObject *unused);
PyObject *sdpa_import_wisdom(PyObject *module, PyObject *args);

#endif
