/* The arguments of sdpa and sdpa_paged, as Python hands them over. */
#ifndef ACR_PY_ARGUMENTS_H
#define ACR_PY_ARGUMENTS_H

#include <stdbool.h>

#include "common.h"

enum {
    ARG_Q,
    ARG_K,
    ARG_V,
    REQUIRED,
    ARG_ATTN_MASK = REQUIRED, /* these three in the order of PyTorch's scaled_dot_product_attention */
    ARG_DROPOUT_P,
    ARG_IS_CAUSAL,
    POSITIONAL,
    ARG_CAUSAL_ALIGN = POSITIONAL,
    ARG_SCALE,
    ARG_ENABLE_GQA,
    ARG_RETURN_LSE,
    ARG_LAYOUT,
    ARG_OUT,
    ARG_WINDOW,
    ARG_SOFTCAP,
    ARG_CHUNK,
    ARG_MAX_Q_LEN,
    ARG_MAX_KV_LEN,
    ARG_V_DIM,
    ARG_INVARIANT,
    ARG_SIDE,               /* from here on: tensors beside q, k, v and out */
    ARG_Q_SCALE = ARG_SIDE, /* in the order of q, k, v */
    ARG_K_SCALE,
    ARG_V_SCALE,
    ARG_KV_LENS,
    ARG_Q_OFFSETS,
    ARG_KV_OFFSETS,
    ARG_KV_STARTS,
    ARG_SINKS,
    ARG_ALIBI_SLOPES,
    ARG_RANGES,
    ARG_TREE,
    ARG_PAGE_TABLE,
    ARGUMENTS,
    SIDES = ARGUMENTS - ARG_SIDE
};

/* What Python calls them. */
extern const char *const argument_names[];

/* The functions that take them: they differ in what may stand without a name, and in which must be given. */
typedef enum signature {
    SIGNATURE_SDPA,
    SIGNATURE_PAGED, /* k and v are the caches; page_table and kv_lens follow them */
    SIGNATURES
} signature;

typedef struct arguments {
    PyObject *given[ARGUMENTS]; /* borrowed; NULL: not given, or None, or a scale of fp8 that is a number */
    bool is_causal, enable_gqa, return_lse;
    bool lse_is_column; /* the log-sum-exp has a last dimension of 1 */
    bool is_packed;     /* q_offsets or kv_offsets are given */
    bool is_paged;      /* page_table is given: k and v are pages, and packed sequences are those of q alone */
    bool is_invariant;
    acr_mask mask; /* what is_causal and causal_align say, before the lengths are known */
    bool has_align;
    int64_t window_left, window_right;  /* 0: no limit */
    int64_t chunk;                      /* 0: no limit */
    int64_t max_q_len, max_kv_len;      /* of packed sequences; 0: not given */
    int64_t v_dim;                      /* values are so many elements of each key, v being k; 0: not given */
    acr_layout layout, kv_layout;       /* of q and out; of k and v, which differs where q is packed and k paged */
    float softcap;                      /* 0: none */
    float scale;                        /* 0: not given */
    float q_number, k_number, v_number; /* scales of fp8 that are numbers; 0: not given, or a tensor */
    const struct operand *acquired[3];  /* q, k and v as they were read already; NULL: not yet */
} arguments;

/* Zero-initialises, and lets q, k and v be these: what a caller that has no Python arguments sets the rest of. */
void arguments_init(arguments *out, PyObject *q, PyObject *k, PyObject *v);

/* One keyword argument that is a positive number. Returns 0, or -1 with a Python exception; NULL gives 0. */
int arguments_read_count(int64_t *out, PyObject *value, const char *name);

/* `scale` as Python has it: 0 for NULL, else positive and finite. Returns 0, or -1 with a Python exception. */
int arguments_read_scale(float *out, PyObject *value, const char *name);

/* Reads the arguments of a vector call. Returns 0, or -1 with a Python exception. */
int arguments_parse(arguments *out, signature function, PyObject *const *args, Py_ssize_t positional,
                    PyObject *keyword_names);

/* Interns the names; called once at import. */
int arguments_setup(void);

#endif
