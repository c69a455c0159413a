/* Deterministic inputs: an element depends on the seed, the tensor and its coordinates alone, never on layout, strides,
 * threads or order. */
#ifndef WORKBENCH_INPUTS_H
#define WORKBENCH_INPUTS_H

#include <stdbool.h>
#include <stdint.h>

#include "internal.h"

typedef enum input_kind {
    INPUT_NORMAL,      /* N(0,1) */
    INPUT_SHIFTED,     /* N(1,1): scores with a common offset, outputs away from 0 */
    INPUT_HEAVY,       /* Student t with 2 degrees of freedom, cut at 50: few elements dominate */
    INPUT_LARGE,       /* q and k N(0,10^2): scores of magnitude 100, one key takes nearly all the weight */
    INPUT_CONSTANT_V,  /* every key has the same value row: the output is that row */
    INPUT_NEEDLE,      /* one key of each head matches every query: the output is its value */
    INPUT_SCALED,      /* N(0,1) with a scale that is not the default, and with fp8 scales for e4m3 */
    INPUT_HEAD_SCALED, /* e4m3 alone, or of k and v alone: besides, fp8 scales for each batch entry and key/value head,
                          which differ a lot */
    INPUT_SHIFTED_V,   /* q and k N(0,1), v N(1,1): what a long sum without cancellation loses; not among the kinds that
                          input_kind_count counts, but with cases of its own (cases.c) */
    INPUT_LOWEST_KEYS, /* N(0,1), but the scores of every other head's first 16 keys, and of the next one's all but the
                          last 16, are -inf: a running maximum has to begin behind them. So, too, with its own cases */
    INPUT_KIND_COUNT
} input_kind;

typedef enum input_tensor {
    INPUT_Q,
    INPUT_K,
    INPUT_V,
    INPUT_D_O /* the gradient of o, of a backward problem */
} input_tensor;

const char *input_kind_name(input_kind kind);
/* Returns false for an unknown name. */
bool input_kind_parse(const char *name, input_kind *out);
/* All names, separated by spaces. */
const char *input_kind_names(void);

/* The kinds that the inputs of any case can be whose keys and values are of a type: the first so many. */
int input_kind_count(acr_dtype kv_dtype);
/* Whether a problem can have inputs of a kind. INPUT_LOWEST_KEYS are for types that have infinities, and every row must
 * see the last keys, as they are. */
bool input_kind_fits(const acr_problem *problem, input_kind kind);

/* Sets the scales that belong to a kind: the defaults for all but INPUT_SCALED and INPUT_HEAD_SCALED. */
void input_scales(acr_problem *problem, input_kind kind);
/* Writes the [batch, kv_heads] scales of a tensor for INPUT_HEAD_SCALED: within a factor of 8, since the gate's
 * tolerance is that of the largest head. */
void input_head_scales(float *scales, const acr_problem *problem, input_tensor tensor, uint64_t seed);

/* Writes a tensor [entries, heads, length, dim], packed, in the problem's input type, or of k and v in theirs. A batch
 * or head stride of 0 in the problem repeats the values of entry 0. Keys in pages are one entry a page. */
void input_fill(void *packed, const acr_problem *problem, input_tensor tensor, int64_t entries, int64_t length,
                input_kind kind, uint64_t seed, uint32_t threads);

/* How long the entries of a batch are, where the problem leaves it to the execution. */
typedef enum length_pattern {
    LENGTHS_EDGES,    /* for checks: none, one, some, all, and what kernels must clamp */
    LENGTHS_FULL,     /* all of them the longest: times mean something */
    LENGTHS_SKEWED,   /* from a 64th of the longest to the longest, each longer than the one before by one factor */
    LENGTHS_ONE_LONG, /* the first entry the longest, all others a 64th of it */
    LENGTHS_MIXED     /* packed queries: every eighth entry the longest, the others one token; keys as LENGTHS_FULL */
} length_pattern;

/* Writes [batch] key lengths. */
void input_kv_lens(int32_t *lens, const acr_problem *problem, uint64_t seed, length_pattern pattern);

/* The pool of a paged problem: how many pages it has, and the step from one batch entry's to the next one's in the
 * table. All seeds have the same. With LENGTHS_EDGES it has room for the longest length of each entry, else for what
 * the entries have. */
typedef struct input_pool {
    int64_t pages, table_stride;
} input_pool;
input_pool input_pool_of(const acr_problem *problem, length_pattern pattern);

/* Writes the [batch, table_stride] table of a paged problem whose key lengths are `lens`. Pages are in no order. With
 * LENGTHS_EDGES every other batch entry begins with pages of the one before, some pages are nobody's, and what is
 * behind an entry's last page names such a page, or none at all. */
void input_page_table(int32_t *table, const acr_problem *problem, const int32_t *lens, uint64_t seed,
                      length_pattern pattern);

/* Writes the [batch + 1] offsets of a packed batch, of queries (tensor INPUT_Q) or of keys, and returns the tensors'
 * rows. With LENGTHS_EDGES there are rows that belong to no sequence before the first, behind the last, and behind one
 * that is cut at the longest length; or the outermost offsets lie outside the tensor. */
int64_t input_offsets(int32_t *offsets, const acr_problem *problem, input_tensor tensor, uint64_t seed,
                      length_pattern pattern);

/* Fills a buffer of terms (ACR__TERMS to ACR__TERMS_END), as large as acr__buffer_bytes says. With LENGTHS_EDGES
 * there are rows that a bias, a mask or a tree hides from every key, runs of hidden keys as long as a tile, whole
 * tiles that a bias hides or leaves as they are, biases of the lowest finite value, sinks that take all the weight
 * and such as are none, starts that must be clamped, and ranges that are empty, turned around, or reach beyond the
 * keys; else nothing is padding, biases hide nothing, and masks and trees are causal. An element of a bias depends
 * on its place in memory and its tile, of rows that overlap the last one's; what is in no row is 0xff. */
void input_term(void *to, acr__buffer which, const acr_problem *problem, uint64_t seed, length_pattern pattern);

/* The counter-based generator itself: 64 random bits for a seed, a stream and a counter. */
uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t counter);

#endif
