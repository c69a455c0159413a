/* ATen's forward operators of attention by this library: what acromion._aten puts below PyTorch's dispatcher. */
#ifndef ACR_PY_ATEN_H
#define ACR_PY_ATEN_H

#include "common.h"

/* _native.bind_aten(unused, pad_rows, heads_innermost, without_keys), called once: unused(like) makes the tensor that
 * stands for a random state; pad_rows(lse, rows), heads_innermost(lse) and without_keys(lse) put a log-sum-exp in
 * ATen's form. */
PyObject *aten_bind(PyObject *module, PyObject *args);

/* _native.aten_operator(name, call, tell) -> what computes the operator aten::name, called with the dispatch keys and
 * the operator's arguments. Of what it does not serve tell(reason) learns, and may raise; then call(keys, arguments...)
 * is the result. */
PyObject *aten_operator(PyObject *module, PyObject *args);

#endif
