/* The judge: attention computed plainly, in float64, and the unfused computation whose error sets the tolerance. It
 * shares no code with any kernel. */
#ifndef WORKBENCH_ORACLE_H
#define WORKBENCH_ORACLE_H

#include "acromion.h"

/* Attention in float64 on the exact stored inputs, host pointers. Rows are numbered (batch * q_heads + head) * q_len
 * + i; of a packed batch head * q_total + the row in the tensor, and one of no sequence counts as seeing no key.
 * row_list names the rows wanted, or NULL for all. o receives rows * v_dim doubles (packed, row by row), lse (may be
 * NULL) one double a row. O = sum p v / sum p with the row maximum subtracted; no unnormalised result is stored. A row
 * without a key gives 0 and -infinity. */
acr_status oracle_forward(const acr_problem *problem, const acr_buffers *buffers, const int64_t *row_list, int64_t rows,
                          double *o, double *lse);

/* Scores and log-sum-exps below this stand for no number of their own: their biases, all that is left of them, are so
 * low that kernels may take them for one another (acromion.h). */
#define ORACLE_LOWEST (-2e38)

/* The same, and how far a right kernel may be from o before it rounds its output: the sum of many small errors with the
 * variance `variance` in all, and errors of one sign of `most` in all. Both have rows * v_dim elements. */
acr_status oracle_spread(const acr_problem *problem, const acr_buffers *buffers, const int64_t *row_list, int64_t rows,
                         double *o, double *lse, double *variance, double *most);

/* The unfused computation whose error is the least tolerance (docs/internals/design.md, section 4): scores and softmax
 * in float32, P normalised, then rounded to the operand type, products accumulated in float32, output rounded to the
 * output type. Same arguments; o holds the rounded values. Weights are multiplied by `grid` while they are rounded: 1
 * is the computation as it stands, another factor the same with the type's values elsewhere among the weights. */
acr_status oracle_unfused(const acr_problem *problem, const acr_buffers *buffers, const int64_t *row_list, int64_t rows,
                          float grid, double *o);

/* Where gradients go, and the variance of what a right kernel loses before it rounds them: of q, k and v as the
 * tensors without gaps [entries, heads, rows, dim], of sinks [batch, q_heads], to be summed over the batch; these two
 * NULL without sinks. All are 0 before. */
typedef struct oracle_gradients {
    double *dq, *dk, *dv, *dsinks;
    double *dq_variance, *dk_variance, *dv_variance, *dsinks_variance;
    /* Not 0: the row's dq, or the key's dk and dv, are wanted; others are left incomplete. One for each row of the
     * tensors; both NULL = all. */
    const uint8_t *rows, *keys;
} oracle_gradients;

/* Gradients in float64, by the formulas of acromion.h, from exactly what is stored, o and lse among it, for batch entry
 * index / kv_heads and key/value head index % kv_heads: other calls write other elements. problem is canonical, but for
 * the strides of a packed batch as reference.c has them. */
acr_status oracle_backward(const acr_problem *problem, const acr_buffers *buffers, int64_t index,
                           const oracle_gradients *out);

#endif
