/* Objects that are PyTorch's tensors, without a header of PyTorch: what lies inside them, and what that says.
 * torch_side.c tells what a tensor is; until then there are none. */
#ifndef ACR_PY_TORCH_OBJECT_H
#define ACR_PY_TORCH_OBJECT_H

#include <stdbool.h>
#include <stddef.h>

#include "common.h"

typedef struct torch_handle torch_handle; /* at::Tensor */

/* Tensors are objects of that type, which lives on, and of its subclasses. */
void torch_object_bind(PyTypeObject *tensor);

/* offset: where in an object its at::Tensor is, one pointer to what it shares with others; 0: not known. pairs: a tuple
 * of tuples of a tensor and its negated view, each of which is as every tensor is but for that. */
void torch_object_learn(size_t offset, PyObject *pairs);

bool torch_is_tensor(PyObject *object);

/* The at::Tensor of a tensor's object, or NULL where that is not known. */
torch_handle *torch_inside(PyObject *tensor);

/* Whether an object is a tensor that PyTorch negates whenever it is read: its memory holds the opposite of what it says
 * (torch.Tensor.is_neg; imaginary parts of conjugated tensors are such). -1 with an exception. */
int torch_is_negated(PyObject *object);

#endif
