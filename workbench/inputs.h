/* Deterministic inputs: an element depends on the seed, the tensor and its coordinates alone, never on layout, strides,
 * threads or order. */
#ifndef WORKBENCH_INPUTS_H
#define WORKBENCH_INPUTS_H

#include <stdbool.h>
#include <stdint.h>

#include "acromion.h"

typedef enum input_kind {
    INPUT_NORMAL,     /* N(0,1) */
    INPUT_SHIFTED,    /* N(1,1): scores with a common offset, outputs away from 0 */
    INPUT_HEAVY,      /* Student t with 2 degrees of freedom, cut at 50: few elements dominate */
    INPUT_LARGE,      /* q and k N(0,10^2): scores of magnitude 100, one key takes nearly all the weight */
    INPUT_CONSTANT_V, /* every key has the same value row: the output is that row */
    INPUT_NEEDLE,     /* one key of each head matches every query: the output is its value */
    INPUT_SCALED,     /* N(0,1) with a scale that is not the default, and with fp8 scales for e4m3 */
    INPUT_KIND_COUNT
} input_kind;

typedef enum input_tensor {
    INPUT_Q,
    INPUT_K,
    INPUT_V
} input_tensor;

const char *input_kind_name(input_kind kind);
/* Returns false for an unknown name. */
bool input_kind_parse(const char *name, input_kind *out);
/* All names, separated by spaces. */
const char *input_kind_names(void);

/* Sets the scales that belong to a kind: the defaults for all but INPUT_SCALED. */
void input_scales(acr_problem *problem, input_kind kind);

/* Writes a tensor, packed [batch, heads, length, dim], in the problem's input type. A batch or head stride of 0 in the
 * problem repeats the values of entry 0. */
void input_fill(void *packed, const acr_problem *problem, input_tensor tensor, input_kind kind, uint64_t seed,
                uint32_t threads);

/* Writes [batch] key lengths: all of them kv_len when full; else none, one, some, all, and values outside [0, kv_len],
 * which kernels clamp. */
void input_kv_lens(int32_t *lens, const acr_problem *problem, uint64_t seed, bool full);

/* The counter-based generator itself: 64 random bits for a seed, a stream and a counter. */
uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t counter);

#endif
