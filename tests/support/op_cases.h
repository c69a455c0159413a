/* Random calls of acr_merge and acr_append on any backend, and what float64 makes of them. A call's tensors lie in
 * buffers of the device, with holes where strides leave some; a call's outcome is all bytes of its outputs, so that a
 * write beside the rows shows. */
#ifndef ACR_TESTS_OP_CASES_H
#define ACR_TESTS_OP_CASES_H

#include "support.h"

/* A tensor of a case. */
typedef struct op_buffer {
    acr_dtype dtype;
    int64_t elements;
    void *before, *after; /* on the host: as given to the call, and as the call left it */
    void *device;         /* while the call runs */
} op_buffer;

enum {
    OP_PARTS_MAX = 40,
    OP_BUFFERS_MAX = 2 * OP_PARTS_MAX + 2
};

typedef struct op_case {
    int is_merge;
    acr_merge_args merge; /* pointers are set while the call runs */
    acr_append_args append;
    op_buffer buffers[OP_BUFFERS_MAX];
    int buffer_count;
    int o_in_place, lse_in_place; /* merge: into the first part */
    int q_in_place;               /* append */
} op_case;

/* Case number `seed`. Small cases suit the PTX machine. */
op_case *op_case_merge(uint64_t seed, int is_small);
op_case *op_case_append(uint64_t seed, int is_small);
void op_case_free(op_case *c);

/* Calls on the context's device and fetches what the call left; the buffers begin as they were made each time. */
acr_status op_case_run(op_case *c, acr_ctx *ctx);

/* Compares what the call left with float64, bytes that are no element of an output included; on failure writes the
 * first difference. Returns whether they agree. */
bool op_case_agrees(const op_case *c, char *difference, size_t bytes);

/* Whether two runs of a case left the same bits, NaNs apart, which only have to be NaNs. `other` is the outcome of
 * another run: op_case_keep. */
typedef struct op_outcome {
    void *after[OP_BUFFERS_MAX];
} op_outcome;
op_outcome op_case_keep(const op_case *c);
bool op_case_equals(const op_case *c, const op_outcome *other, char *difference, size_t bytes);
void op_outcome_free(op_outcome *outcome);

/* "merge f16 -> f32 count 3 ...": to say which case it was. Static. */
const char *op_case_text(const op_case *c);

/* Where in buffers[] an append's tensors are, -1 = none. */
enum {
    OP_Q,
    OP_K,
    OP_V,
    OP_Q_OUT,
    OP_K_CACHE,
    OP_V_CACHE,
    OP_COS,
    OP_SIN,
    OP_KV_LENS,
    OP_OFFSETS,
    OP_TABLE,
    OP_ROPE_OFFSETS,
    OP_ROPE_POSITIONS,
    OP_K_SCALES,
    OP_V_SCALES,
    OP_APPEND_BUFFERS
};

#endif
