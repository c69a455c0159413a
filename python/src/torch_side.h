/* What the extension knows of PyTorch: objects that python/acromion/_torch.py hands over, and functions of the
 * libraries that PyTorch has loaded by then. No header of PyTorch is needed, and without PyTorch nothing here is ever
 * true. */
#ifndef ACR_PY_TORCH_SIDE_H
#define ACR_PY_TORCH_SIDE_H

#include <stdbool.h>

#include "arguments.h"
#include "common.h"
#include "operand.h"
#include "torch_object.h"

/* _native.bind_torch(tensor_type, parameter_type, run_op, run_paged_op, is_grad_enabled, dispatch_depth, is_capturing,
 * empty_like, spread, float16, float32, uint8, int64, uint64, pairs): called once. pairs: tuples of a tensor and its
 * negated view, each of which is as every tensor is but for that. */
PyObject *torch_bind(PyObject *module, PyObject *args);

/* A function of PyTorch's libraries: of the one that torch._C has loaded and those it needs, if its tensors are the
 * ones that were bound; NULL where there is none of this name. */
void *torch_symbol(const char *name);

/* True when a call has to go through PyTorch's dispatcher: a tensor of a subclass, or a dispatch mode is active. -1
 * with an exception. */
int torch_needs_dispatch(const arguments *a);

/* The same call through the dispatcher. */
PyObject *torch_dispatch(signature function, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);

/* 1 where q, k, v or sinks want a gradient, which the dispatcher records; 0 where nothing does; -1 with an exception
 * where another argument wants one. */
int torch_wants_gradients(const arguments *a);

/* The type of a new tensor. */
typedef enum torch_dtype {
    TORCH_SAME, /* as that of `like` */
    TORCH_FLOAT16,
    TORCH_FLOAT32,
    TORCH_UINT8,
    TORCH_INT64,
    TORCH_UINT64,
    TORCH_DTYPES
} torch_dtype;

/* New tensors on the device of `like`: like it in shape and order of strides, or packed of the shape. */
PyObject *torch_empty_like(const operand *like, torch_dtype dtype);
PyObject *torch_new_empty(const operand *like, const int64_t *shape, int ndim, torch_dtype dtype);
PyObject *torch_new_empty_strided(const operand *like, const int64_t *shape, const int64_t *strides, int ndim);

/* A copy of a mask whose last dimension lies side by side; an extent of 1 there becomes `keys`. */
PyObject *torch_spread(PyObject *mask, int64_t keys);

/* Whether the stream that is current on an operand's device is being captured into a graph. -1 with an exception. */
int torch_is_capturing(const operand *like);

#endif
