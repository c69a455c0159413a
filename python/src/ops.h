/* The operations beside attention, for acromion/_ops.py, which makes outputs and knows the arguments' defaults. */
#ifndef ACR_PY_OPS_H
#define ACR_PY_OPS_H

#include "common.h"

/* _native.merge(outs, lses, out, out_lse or None, layout): sequences of tensors, and where the result goes. */
PyObject *ops_merge(PyObject *module, PyObject *args);

/* _native.append(tensors, numbers): a sequence of the tensors in the order of ops.c, None where there is none, and
 * (layout, interleaved, rope_first, k_scale, v_scale). */
PyObject *ops_append(PyObject *module, PyObject *args);

#endif
