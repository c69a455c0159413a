/* The judged answer to a problem: its inputs, without gaps on the host, the oracle's output for the compared rows, and
 * how far a kernel may be from it.
 *
 * The tolerance (docs/manual/measuring.md): what rounding errors of the kernel's arithmetic exceed with a probability
 * below 10^-7, and no less than twice the error that the unfused computation of the same type makes on the same inputs,
 * each with one unit in the last place of the output; for the maximum and for the root mean square. Of e4m3 inputs the
 * root mean square has a second, narrower limit: what rounding weights to 8 bits costs by itself, and hardly more. */
#ifndef WORKBENCH_REFERENCE_H
#define WORKBENCH_REFERENCE_H

#include <stddef.h>
#include <stdint.h>

#include "inputs.h"
#include "internal.h"

/* What must come out of a backward problem: dq, dk and dv as the tensors, and dsinks [q_heads] with sinks. An element's
 * error is at most its tolerance. */
typedef struct gradients {
    double *expected[4], *tolerance[4];
    int64_t elements[4];
    /* Of a large problem: not 0 where dq of a row, or dk and dv of a key, is judged, one for each row of the tensors;
     * others are looked at for NaN. NULL = all. dsinks always is. */
    uint8_t *rows, *keys;
} gradients;

typedef struct reference {
    acr_problem problem; /* canonical, of q, k and v as they are here, with log-sum-exp */
    input_kind inputs;
    uint64_t seed;
    /* Extents of the tensors, [entries, heads, q_rows or kv_rows, dim]: batch, q_len and kv_len; of a packed batch 1
     * and the totals. Keys and values in pages are [buffers.pages, heads, page, dim] instead, with NaN bytes in the
     * rows that are no batch entry's key, and kv_rows is the page. */
    int64_t entries, q_rows, kv_rows;
    acr_buffers buffers;         /* all inputs, on the host; scales with INPUT_HEAD_SCALED only; no outputs: o and lse
                                    are there of a backward problem, as the oracle's forward pass stores them */
    int32_t *q_owner, *kv_owner; /* of a packed batch [rows]: the sequence that a row belongs to, -1 = none */
    gradients *grads;            /* of a backward problem, which has no o and lse below and no row_list; else NULL */
    int64_t rows;                /* compared rows */
    int64_t *row_list;           /* ascending, numbers as of oracle_forward; NULL = all */
    double *o, *lse;             /* the oracle's: rows * v_dim, rows */
    double tol_max, tol_rms, tol_lse;
    double tol_floor; /* of the root mean square, too; INFINITY where there is none (reference.c, weights_floor) */
    void *mapping;    /* all of the above are parts of it and read-only (reference_cache.h); NULL = each is its own */
    size_t mapping_bytes;
} reference;

/* Work up to which every row is compared; beyond it REFERENCE_SAMPLED_ROWS rows, the first and last among them.
 * Multiply-adds of a pass. */
#define REFERENCE_FULL_WORK ((int64_t)1 << 24)
/* The same of a backward pass, for each of its products; beyond it so many rows and as many keys. */
#define REFERENCE_FULL_GRADIENTS ((int64_t)1 << 30)
enum {
    REFERENCE_SAMPLED_ROWS = 256
};

/* What to make a reference of. */
typedef struct reference_request {
    const acr_problem *problem; /* canonical, any strides: of q, k and v only which are 0 matters */
    input_kind inputs;
    uint64_t seed;
    int64_t sampled_rows;   /* bounds the compared rows of a large problem */
    length_pattern lengths; /* of kv_lens, or of a packed batch's sequences */
    uint32_t threads;
} reference_request;

/* Makes inputs and judgement. The caller frees with reference_destroy. Errors: ACR_NO_MEMORY, those of the oracle. */
acr_status reference_create(reference **out, const reference_request *request);
void reference_destroy(reference *ref);

/* The forward pass whose results a backward problem reads, canonical as that is. */
acr_problem reference_forward_problem(const acr_problem *backward);

/* The text that two problems share when one reference serves both (with the same inputs and seed). */
void reference_key(char key[ACR_PROBLEM_TEXT_MAX + 16], const acr_problem *problem);

/* What the tensors' extents are to acr__tensor_of and acr__buffer_bytes. */
acr__rows reference_extents(const reference *ref);

/* Key length of a batch entry, clamped. */
int64_t reference_kv_len(const reference *ref, int64_t batch);

/* The first key of a batch entry that exists, clamped. */
int64_t reference_kv_start(const reference *ref, int64_t batch);

/* (Batch, head, position) of the i-th compared row; of a packed batch the position is within the sequence. */
typedef struct row_place {
    int64_t row, batch, head, position;
} row_place;
row_place reference_row(const reference *ref, int64_t i);

#endif
