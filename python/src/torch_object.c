/* What is known of tensors' objects. */
#include "torch_object.h"

#include <stdint.h>
#include <string.h>

enum {
    TENSOR_WORDS = 23 /* of 64 bits, that at::Tensor points to at least */
};

static struct {
    PyTypeObject *type; /* NULL: there are no tensors */
    size_t offset;
    size_t negated_word;  /* of what at::Tensor points to: that with the bit of negated views */
    uint64_t negated_bit; /* 0: not known */
} tensor;

bool torch_is_tensor(PyObject *object)
{
    return tensor.type && (Py_TYPE(object) == tensor.type || PyType_IsSubtype(Py_TYPE(object), tensor.type));
}

torch_handle *torch_inside(PyObject *object)
{
    return tensor.offset ? (torch_handle *)((char *)object + tensor.offset) : NULL;
}

/* What at::Tensor points to, as words. */
static const uint64_t *words_of(PyObject *object)
{
    const uint64_t *words;
    memcpy(&words, torch_inside(object), sizeof words);
    return words;
}

int torch_is_negated(PyObject *object)
{
    if (!torch_is_tensor(object))
        return 0;
    if (tensor.negated_bit)
        return (words_of(object)[tensor.negated_word] & tensor.negated_bit) != 0;
    PyObject *const answer = PyObject_CallMethod(object, "is_neg", NULL);
    const int is_negated = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return is_negated;
}

/* The bit in a word that each negated view has and the tensor that it is of has not, where those words differ in
 * nothing else; 0: there is none. */
static uint64_t differing_bit(PyObject *pairs, size_t word)
{
    uint64_t bit = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(pairs); i++) {
        PyObject *const pair = PyTuple_GetItem(pairs, i);
        const uint64_t plain = words_of(PyTuple_GetItem(pair, 0))[word],
                       negated = words_of(PyTuple_GetItem(pair, 1))[word], differing = plain ^ negated;
        if ((differing & (differing - 1)) != 0 || (differing & negated) == 0 || (i > 0 && differing != bit))
            return 0;
        bit = differing;
    }
    return bit;
}

/* Finds where tensors say that they are negated views: PyTorch's own function goes by way of its dispatcher. */
static void find_negated_bit(PyObject *pairs)
{
    for (size_t word = 0; word < TENSOR_WORDS; word++) {
        const uint64_t bit = differing_bit(pairs, word);
        if (!bit)
            continue;
        if (tensor.negated_bit) { /* two such words say nothing */
            tensor.negated_bit = 0;
            return;
        }
        tensor.negated_word = word;
        tensor.negated_bit = bit;
    }
}

void torch_object_bind(PyTypeObject *type)
{
    tensor.type = type;
}

void torch_object_learn(size_t offset, PyObject *pairs)
{
    tensor.offset = offset;
    if (offset)
        find_negated_bit(pairs);
}
