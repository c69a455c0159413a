/* The arguments of sdpa, as Python hands them over. */
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
    ARG_KV_LENS,
    ARG_RETURN_LSE,
    ARG_LAYOUT,
    ARG_OUT,
    ARG_Q_SCALE, /* in the order of q, k, v */
    ARG_K_SCALE,
    ARG_V_SCALE,
    ARG_WINDOW,
    ARGUMENTS
};

typedef struct arguments {
    PyObject *given[ARGUMENTS]; /* borrowed; NULL: not given, or None, or a scale of fp8 that is a number */
    bool is_causal, enable_gqa, return_lse;
    acr_mask mask; /* what is_causal and causal_align say, before the lengths are known */
    bool has_align;
    int64_t window_left, window_right; /* 0: no limit */
    acr_layout layout;
    float scale;                        /* 0: not given */
    float q_number, k_number, v_number; /* scales of fp8 that are numbers; 0: not given, or a tensor */
} arguments;

/* Reads the arguments of a vector call. Returns 0, or -1 with a Python exception. */
int arguments_parse(arguments *out, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names);

/* Interns the names; called once at import. */
int arguments_setup(void);

#endif
