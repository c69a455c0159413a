/* The launch descriptor of a whole source: one JSON object that says declaratively what a family's host half says in C.
 *
 *     {"pass": "fwd",                                               or "bwd"; default "fwd"
 *      "dtype": "f16", "qk_dim": 64, "v_dim": 64, "q_tile": 64, "kv_tile": 64, "stages": 2,
 *      "when": "kv_len <= 512 && !lse && packed",                    what it can run; default "1"
 *      "workspace_bytes": "0",                                       cpu: of one lane
 *      "grid": ["ceil_div(q_len, q_tile)", "q_heads", "batch"], "block": 128, "cluster": 0, "smem_bytes": "0",  cuda
 *      "boxes": {"q": 64, "k": 64, "v": 64, "o": 0}}                 cuda: rows of the tensor maps; default none; for
 *                                                                    gradients "o" is d_o, and "out" o itself
 *
 * Sliding windows are offered only where "when" names window_left or window_right, gradients of another type than the
 * inputs' only where it names grad_f32.
 *
 * Expressions (expression.h) are numbers or texts over the fields of the problem and the device (DESCRIPTOR_FIELDS).
 * Overflow, division by zero and a size outside of its limits are errors. No other key is allowed. The kernel's entry
 * point is KERNEL_NAME, its parameters as kernel.h says. */
#ifndef SEARCH_DESCRIPTOR_H
#define SEARCH_DESCRIPTOR_H

#include <stdbool.h>

#include "internal.h"

enum {
    DESCRIPTOR_EXPRESSION_BYTES = 256
};

/* X(name, value from `const acr_problem *p`, `const acr__device *d`, `const descriptor *s`) */
#define DESCRIPTOR_FIELDS(X)                                                                                           \
    X(batch, p->batch)                                                                                                 \
    X(q_heads, p->q_heads)                                                                                             \
    X(kv_heads, p->kv_heads)                                                                                           \
    X(group, p->q_heads / p->kv_heads)                                                                                 \
    X(q_len, p->q_len)                                                                                                 \
    X(kv_len, p->kv_len)                                                                                               \
    X(qk_dim, p->qk_dim)                                                                                               \
    X(v_dim, p->v_dim)                                                                                                 \
    X(causal, p->mask == ACR_MASK_CAUSAL)                                                                              \
    X(causal_tl, p->mask == ACR_MASK_CAUSAL_TOP_LEFT)                                                                  \
    X(lse, (p->flags & ACR_WANT_LSE) != 0)                                                                             \
    X(kv_lens, (p->flags & ACR_KV_LENS) != 0)                                                                          \
    X(window_left, p->window_left)                                                                                     \
    X(window_right, p->window_right)                                                                                   \
    X(grad_f32, p->grad_dtype == ACR_F32)                                                                              \
    X(atomics, (p->flags & ACR_FAST_ATOMICS) != 0)                                                                     \
    X(packed, is_packed(p))                                                                                            \
    X(bshd, p->layout == ACR_BSHD)                                                                                     \
    X(alignment, p->alignment)                                                                                         \
    X(q_tile, s->q_tile)                                                                                               \
    X(kv_tile, s->kv_tile)                                                                                             \
    X(stages, s->stages)                                                                                               \
    X(sm_count, d->sm_count)                                                                                           \
    X(smem_per_cta, d->smem_per_cta_bytes)

typedef char descriptor_expression[DESCRIPTOR_EXPRESSION_BYTES];

typedef struct descriptor {
    acr__backend_id backend;
    acr_pass pass;
    acr_dtype dtype;
    int32_t qk_dim, v_dim, q_tile, kv_tile, stages;
    descriptor_expression when, workspace_bytes;
    descriptor_expression grid[3], block, cluster, smem_bytes; /* cuda */
    acr__boxes boxes;                                          /* cuda */
} descriptor;

/* Reads the JSON text. Errors: ACR_FORMAT naming the key and what is wrong, by field and limit. Expressions are parsed
 * too. */
acr_status descriptor_parse(descriptor *out, acr__backend_id backend, const char *json);

/* Evaluates an expression. Errors: ACR_FORMAT with what is wrong in its text. */
acr_status descriptor_evaluate(int64_t *out, const char *expression, const descriptor *s, const acr_problem *problem,
                               const acr__device *device);

/* NULL, or why the problem cannot be run; static or thread-local text. */
const char *descriptor_why_not(const descriptor *s, const acr_problem *problem, const acr__device *device);
/* Bytes of the whole workspace: of all lanes together on cpu. Where why_not is NULL. */
size_t descriptor_workspace(const descriptor *s, const acr_problem *problem, const acr__device *device);
void descriptor_shape(const descriptor *s, const acr_problem *problem, const acr__device *device, acr__launch *launch);

#endif
