/* ATen's forward operators of attention by this library: what acromion._aten puts below PyTorch's dispatcher. */
#ifndef ACR_PY_ATEN_H
#define ACR_PY_ATEN_H

#include "common.h"

/* _native.bind_aten(unused, pad_rows, heads_innermost, without_keys), called once: unused(like) makes the tensor that
 * stands for a random state; pad_rows(lse, rows), heads_innermost(lse) and without_keys(lse) put a log-sum-exp in
 * ATen's form. */
PyObject *aten_bind(PyObject *module, PyObject *args);

/* _native.aten_operator(name, call, keys, counts, tell) -> what computes the operator aten::name, called with the
 * operator's arguments. For what it does not serve call(keys, arguments...) is the result. Before, counts[reason] grows
 * by one where it is known; where not, tell(reason) enters it, or raises. */
PyObject *aten_operator(PyObject *module, PyObject *args);

#endif
