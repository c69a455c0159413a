/* Reading arguments of sdpa and sdpa_paged. Keyword names arrive interned, so that comparing addresses finds them. */
#include "arguments.h"

#include <math.h>
#include <string.h>

const char *const argument_names[ARGUMENTS] = {
    [ARG_Q] = "q",
    [ARG_K] = "k",
    [ARG_V] = "v",
    [ARG_ATTN_MASK] = "attn_mask",
    [ARG_DROPOUT_P] = "dropout_p",
    [ARG_IS_CAUSAL] = "is_causal",
    [ARG_CAUSAL_ALIGN] = "causal_align",
    [ARG_SCALE] = "scale",
    [ARG_ENABLE_GQA] = "enable_gqa",
    [ARG_RETURN_LSE] = "return_lse",
    [ARG_LAYOUT] = "layout",
    [ARG_OUT] = "out",
    [ARG_WINDOW] = "window",
    [ARG_SOFTCAP] = "softcap",
    [ARG_CHUNK] = "chunk",
    [ARG_MAX_Q_LEN] = "max_q_len",
    [ARG_MAX_KV_LEN] = "max_kv_len",
    [ARG_V_DIM] = "v_dim",
    [ARG_INVARIANT] = "invariant",
    [ARG_Q_SCALE] = "q_scale",
    [ARG_K_SCALE] = "k_scale",
    [ARG_V_SCALE] = "v_scale",
    [ARG_KV_LENS] = "kv_lens",
    [ARG_Q_OFFSETS] = "q_offsets",
    [ARG_KV_OFFSETS] = "kv_offsets",
    [ARG_KV_STARTS] = "kv_starts",
    [ARG_SINKS] = "sinks",
    [ARG_ALIBI_SLOPES] = "alibi_slopes",
    [ARG_RANGES] = "ranges",
    [ARG_TREE] = "tree",
    [ARG_PAGE_TABLE] = "page_table",
};

static const struct form {
    const char *name;
    const char *unnamed; /* the arguments that may stand without a name, in words */
    int positional[POSITIONAL];
    int positional_count, required_count; /* of those */
} forms[SIGNATURES] = {
    [SIGNATURE_SDPA] = {"sdpa",
                        "q, k, v, attn_mask, dropout_p, is_causal",
                        {ARG_Q, ARG_K, ARG_V, ARG_ATTN_MASK, ARG_DROPOUT_P, ARG_IS_CAUSAL},
                        POSITIONAL,
                        REQUIRED},
    [SIGNATURE_PAGED] = {"sdpa_paged",
                         "q, k_cache, v_cache, page_table, kv_lens",
                         {ARG_Q, ARG_K, ARG_V, ARG_PAGE_TABLE, ARG_KV_LENS},
                         5,
                         5},
};

/* What others call them: PyTorch, FlashAttention. */
static const struct alias {
    const char *name;
    int argument;
} aliases[] = {
    {"query", ARG_Q},
    {"key", ARG_K},
    {"value", ARG_V},
    {"k_cache", ARG_K},
    {"v_cache", ARG_V},
    {"cu_seqlens_q", ARG_Q_OFFSETS},
    {"cu_seqlens_k", ARG_KV_OFFSETS},
    {"max_seqlen_q", ARG_MAX_Q_LEN},
    {"max_seqlen_k", ARG_MAX_KV_LEN},
};
enum {
    ALIASES = sizeof aliases / sizeof aliases[0],
    NAMES = ARGUMENTS + ALIASES
};
static PyObject *names[NAMES], *text_bhsd, *text_bshd, *text_top_left, *text_bottom_right;

static const char *name_text(int i)
{
    return i < ARGUMENTS ? argument_names[i] : aliases[i - ARGUMENTS].name;
}

static int argument_at(int i)
{
    return i < ARGUMENTS ? i : aliases[i - ARGUMENTS].argument;
}

int arguments_setup(void)
{
    for (int i = 0; i < NAMES; i++)
        if (!(names[i] = PyUnicode_InternFromString(name_text(i))))
            return -1;
    text_bhsd = PyUnicode_InternFromString("bhsd");
    text_bshd = PyUnicode_InternFromString("bshd");
    text_top_left = PyUnicode_InternFromString("top_left");
    text_bottom_right = PyUnicode_InternFromString("bottom_right");
    return text_bhsd && text_bshd && text_top_left && text_bottom_right ? 0 : -1;
}

/* The argument of a name, or -1. */
static int argument_of(PyObject *name)
{
    for (int i = 0; i < NAMES; i++)
        if (names[i] == name)
            return argument_at(i);
    for (int i = 0; i < NAMES; i++)
        if (PyUnicode_CompareWithASCIIString(name, name_text(i)) == 0)
            return argument_at(i);
    return -1;
}

static int collect(PyObject *given[ARGUMENTS], const struct form *form, PyObject *const *args, Py_ssize_t positional,
                   PyObject *keyword_names)
{
    if (positional > form->positional_count) {
        PyErr_Format(PyExc_TypeError, "%s() takes up to %d positional arguments (%s) but %zd were given", form->name,
                     form->positional_count, form->unnamed, positional);
        return -1;
    }
    memset(given, 0, ARGUMENTS * sizeof given[0]);
    for (Py_ssize_t i = 0; i < positional; i++)
        given[form->positional[i]] = args[i];
    const Py_ssize_t keywords = keyword_names ? PyTuple_Size(keyword_names) : 0;
    for (Py_ssize_t i = 0; i < keywords; i++) {
        PyObject *name = PyTuple_GetItem(keyword_names, i);
        const int argument = argument_of(name);
        if (argument < 0) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", form->name, name);
            return -1;
        }
        if (given[argument]) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'", form->name,
                         argument_names[argument]);
            return -1;
        }
        given[argument] = args[positional + i];
    }
    for (int i = 0; i < form->required_count; i++)
        if (!given[form->positional[i]]) {
            PyErr_Format(PyExc_TypeError, "%s() is missing the argument '%s'", form->name,
                         argument_names[form->positional[i]]);
            return -1;
        }
    for (int i = REQUIRED; i < ARGUMENTS; i++)
        if (given[i] == Py_None)
            given[i] = NULL;
    return 0;
}

static int read_bool(bool *out, PyObject *value, const char *name)
{
    if (!value || value == Py_False) {
        *out = false;
        return 0;
    }
    if (value == Py_True) {
        *out = true;
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s is %R, must be True or False", name, value);
    return -1;
}

/* Which of two words a text is: 0 or 1, or -1 with an exception. */
static int read_word(PyObject *value, const char *name, PyObject *first, PyObject *second)
{
    if (value == first || value == second)
        return value == second;
    if (PyUnicode_Check(value)) {
        if (PyUnicode_Compare(value, first) == 0 || PyUnicode_Compare(value, second) == 0)
            return PyUnicode_Compare(value, second) == 0;
        return acr_py_invalid("%s is %R, must be %R or %R", name, value, first, second);
    }
    PyErr_Format(PyExc_TypeError, "%s is %R, must be %R or %R", name, value, first, second);
    return -1;
}

/* PyTorch's dropout is accepted where it drops nothing. */
static int check_dropout(PyObject *value)
{
    if (!value)
        return 0;
    const double dropout_p = PyFloat_AsDouble(value);
    if (dropout_p == -1.0 && PyErr_Occurred())
        return -1;
    if (dropout_p == 0)
        return 0;
    PyErr_Format(PyExc_NotImplementedError, "dropout_p is %R, must be 0: nothing is ever dropped", value);
    return -1;
}

int arguments_read_scale(float *out, PyObject *value, const char *name)
{
    *out = 0;
    if (!value)
        return 0;
    const double scale = PyFloat_AsDouble(value);
    if (scale == -1.0 && PyErr_Occurred())
        return -1;
    *out = (float)scale;
    if (*out > 0 && isfinite(*out))
        return 0;
    return acr_py_invalid("%s is %R, must be positive and finite", name, value);
}

/* 0 is none, as FlashAttention has it. */
static int read_softcap(float *out, PyObject *value)
{
    *out = 0;
    if (!value)
        return 0;
    const double softcap = PyFloat_AsDouble(value);
    if (softcap == -1.0 && PyErr_Occurred())
        return -1;
    return softcap == 0 ? 0 : arguments_read_scale(out, value, "softcap");
}

int arguments_read_count(int64_t *out, PyObject *value, const char *name)
{
    *out = 0;
    if (!value)
        return 0;
    if (!PyLong_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s is %R, must be a number", name, value);
        return -1;
    }
    *out = PyLong_AsLongLong(value);
    if (*out == -1 && PyErr_Occurred())
        return -1;
    return *out > 0 ? 0 : acr_py_invalid("%s is %R, must be positive", name, value);
}

/* One side of a window; None, and -1 where an operator's list has no None, are no limit. */
static int read_limit(int64_t *out, PyObject *value)
{
    *out = 0;
    if (value == Py_None)
        return 0;
    if (!PyLong_Check(value)) {
        PyErr_Format(PyExc_TypeError, "window has %R, must be a number of keys or None", value);
        return -1;
    }
    *out = PyLong_AsLongLong(value);
    if (*out == -1 && PyErr_Occurred())
        return -1;
    if (*out != -1)
        return *out > 0 ? 0 : acr_py_invalid("window has %R, must be positive; None for no limit", value);
    *out = 0;
    return 0;
}

/* A number of keys up to the query's own, or that and the number of keys behind it. */
static int read_window(arguments *out, PyObject *window)
{
    out->window_left = out->window_right = 0;
    if (!window)
        return 0;
    if (PyLong_Check(window))
        return read_limit(&out->window_left, window);
    if (!PySequence_Check(window) || PySequence_Size(window) != 2) {
        PyErr_Format(PyExc_TypeError, "window is %R, must be a number of keys or (left, right)", window);
        return -1;
    }
    int64_t *const sides[] = {&out->window_left, &out->window_right};
    int failed = 0;
    for (Py_ssize_t i = 0; i < 2 && !failed; i++) {
        PyObject *side = PySequence_GetItem(window, i);
        failed = !side || read_limit(sides[i], side);
        Py_XDECREF(side);
    }
    return failed ? -1 : 0;
}

/* A scale of fp8 may be a number, which is read, or a tensor or its description, which is left in its place. */
static int read_fp8_scale(float *number, PyObject **value, const char *name)
{
    *number = 0;
    if (!*value || PyTuple_Check(*value) ||
        (!PyFloat_Check(*value) && !PyLong_Check(*value) && PyObject_HasAttrString(*value, "__dlpack__")))
        return 0;
    PyObject *given = *value;
    *value = NULL;
    return arguments_read_scale(number, given, name);
}

void arguments_init(arguments *out, PyObject *q, PyObject *k, PyObject *v)
{
    memset(out, 0, sizeof *out);
    out->given[ARG_Q] = q;
    out->given[ARG_K] = k;
    out->given[ARG_V] = v;
    out->mask = ACR_MASK_NONE;
    out->layout = out->kv_layout = ACR_BHSD;
}

/* Values inside keys have no tensor of their own: v is k, or None. */
static int read_values(arguments *out)
{
    if (arguments_read_count(&out->v_dim, out->given[ARG_V_DIM], "v_dim"))
        return -1;
    if (out->given[ARG_V] != Py_None)
        return 0;
    if (!out->v_dim)
        return acr_py_invalid("v is None: give v_dim where values are the first v_dim elements of each key");
    out->given[ARG_V] = out->given[ARG_K];
    return 0;
}

/* What pages change: key heads are as many as the cache has, and only the last query can see the last key. */
static int read_paging(arguments *out, const struct form *form)
{
    out->is_paged = out->given[ARG_PAGE_TABLE] != NULL;
    if (out->is_paged && !out->given[ARG_KV_LENS])
        return acr_py_invalid("kv_lens is missing: pages do not say how many keys a sequence has");
    if (out->is_paged && out->given[ARG_KV_OFFSETS])
        return acr_py_invalid("kv_offsets is given with page_table: kv_lens says how many keys a sequence has");
    if (!out->is_paged && form == &forms[SIGNATURE_PAGED])
        return acr_py_invalid("page_table is None, must be a tensor");
    out->enable_gqa = out->enable_gqa || out->is_paged;
    return 0;
}

int arguments_parse(arguments *out, signature function, PyObject *const *args, Py_ssize_t positional,
                    PyObject *keyword_names)
{
    const struct form *form = &forms[function];
    if (collect(out->given, form, args, positional, keyword_names) || read_values(out) ||
        check_dropout(out->given[ARG_DROPOUT_P]) ||
        read_bool(&out->is_causal, out->given[ARG_IS_CAUSAL], "is_causal") ||
        read_bool(&out->enable_gqa, out->given[ARG_ENABLE_GQA], "enable_gqa") ||
        read_bool(&out->return_lse, out->given[ARG_RETURN_LSE], "return_lse") ||
        read_bool(&out->is_invariant, out->given[ARG_INVARIANT], "invariant") || read_paging(out, form) ||
        arguments_read_scale(&out->scale, out->given[ARG_SCALE], "scale") || read_window(out, out->given[ARG_WINDOW]) ||
        read_softcap(&out->softcap, out->given[ARG_SOFTCAP]) ||
        arguments_read_count(&out->chunk, out->given[ARG_CHUNK], "chunk") ||
        arguments_read_count(&out->max_q_len, out->given[ARG_MAX_Q_LEN], "max_q_len") ||
        arguments_read_count(&out->max_kv_len, out->given[ARG_MAX_KV_LEN], "max_kv_len") ||
        read_fp8_scale(&out->q_number, &out->given[ARG_Q_SCALE], "q_scale") ||
        read_fp8_scale(&out->k_number, &out->given[ARG_K_SCALE], "k_scale") ||
        read_fp8_scale(&out->v_number, &out->given[ARG_V_SCALE], "v_scale"))
        return -1;
    PyObject *layout = out->given[ARG_LAYOUT], *align = out->given[ARG_CAUSAL_ALIGN];
    const int is_bshd = layout ? read_word(layout, "layout", text_bhsd, text_bshd) : 0;
    const int is_bottom_right =
        align ? read_word(align, "causal_align", text_top_left, text_bottom_right) : out->is_paged;
    if (is_bshd < 0 || is_bottom_right < 0)
        return -1;
    if (align && !out->is_causal)
        return acr_py_invalid("causal_align is %R, but is_causal is not True", align);
    out->is_packed = out->given[ARG_Q_OFFSETS] || out->given[ARG_KV_OFFSETS];
    out->layout = is_bshd || out->is_packed ? ACR_BSHD : ACR_BHSD;
    out->kv_layout = out->is_paged && !is_bshd ? ACR_BHSD : out->layout;
    if (!out->is_packed && (out->max_q_len || (out->max_kv_len && !out->is_paged)))
        return acr_py_invalid("max_q_len and max_kv_len are of packed sequences: give q_offsets and kv_offsets");
    if (out->is_packed && !out->is_paged && layout && !is_bshd)
        return acr_py_invalid("layout is 'bhsd', but packed sequences are [total, heads, dim]");
    out->has_align = align != NULL || out->is_paged;
    out->mask = !out->is_causal ? ACR_MASK_NONE : is_bottom_right ? ACR_MASK_CAUSAL : ACR_MASK_CAUSAL_TOP_LEFT;
    return 0;
}
