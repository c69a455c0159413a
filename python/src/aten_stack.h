/* ATen's operators straight from PyTorch's dispatcher, without its way through Python. */
#ifndef ACR_PY_ATEN_STACK_H
#define ACR_PY_ATEN_STACK_H

#include "common.h"

/* _native.aten_stack_bind(raising): whether this PyTorch has all that is needed. raising is a tensor of which every
 * operator calls _native.aten_stack_raise(), which raises what a call of an operator has to raise. */
PyObject *aten_stack_bind(PyObject *module, PyObject *tensor);
PyObject *aten_stack_raise(PyObject *module, PyObject *unused);

/* _native.aten_stack_register(name, key, operator, arguments, keywords, results) -> object: from now on aten::name
 * calls operator, one of aten_operator, for tensors of the dispatch key; until the object dies. arguments: a letter for
 * each of the schema's, T tensor, b bool, i int, f float, lower-case t, j and g where it may be None; keywords: the
 * names of the last ones, which go by name; results: T and i. None where all places are taken, or without bind. */
PyObject *aten_stack_register(PyObject *module, PyObject *args);

#endif
