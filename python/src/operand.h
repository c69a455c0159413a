/* Tensors as the extension sees them: any object that speaks DLPack, without a copy. */
#ifndef ACR_PY_OPERAND_H
#define ACR_PY_OPERAND_H

#include <stdbool.h>

#include "common.h"
#include "dlpack.h"

enum {
    OPERAND_DIMS = 4
};

/* A tensor for the time of one call. Zero-initialised, it is an absent one. */
typedef struct operand {
    const char *name;            /* of the argument, for errors */
    PyObject *object;            /* borrowed */
    PyObject *capsule;           /* owned: keeps the description alive; NULL where the type offers a view */
    const dl_exchange *exchange; /* of the object's type, or NULL */
    char *data;
    dl_device device; /* type DL_CPU or DL_CUDA */
    dl_type dtype;
    int32_t ndim;
    bool read_only;
    int64_t shape[OPERAND_DIMS], strides[OPERAND_DIMS]; /* of dimensions [0, ndim) */
} operand;

/* Describes an object of at most OPERAND_DIMS dimensions. Returns 0, or -1 with a Python exception; either way
 * operand_release is due. */
int operand_acquire(operand *out, const char *name, PyObject *object);
void operand_release(operand *op);

/* A tensor that has no memory yet, of a program that is being traced: (shape, strides or None for packed, type's name),
 * on the CPU. Returns 0, or -1 with a Python exception; nothing is to be released. */
int operand_describe(operand *out, const char *name, PyObject *description);

/* "float16" and so on. */
PyObject *operand_type_text(dl_type type);

/* Whether a tensor's elements are of a type. */
bool operand_has_type(const operand *op, uint8_t code, uint8_t bits);

/* The type of a tensor whose elements acromion computes with. Returns 0, or -1 with a Python exception. */
int operand_read_type(acr_dtype *out, const operand *op);

/* Raises a TypeError: what a tensor's type is, and what it must be. Returns -1. */
int operand_fail_type(const operand *op, const char *wanted);

/* Whether a tensor lies on the device of another. Returns 0, or -1 with a Python exception. */
int operand_check_device(const operand *op, const operand *like);

/* The stream that work on the operand's device belongs on: the current one of the object's library; the legacy default
 * stream where that does not tell. */
int operand_stream(const operand *op, void **out);

/* Sets up names; called once at import. */
int operand_setup(void);

#endif
