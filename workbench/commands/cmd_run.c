/* acromion run: attention on .npy files. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/exit_code.h"
#include "base/files.h"
#include "base/json.h"
#include "base/npy.h"
#include "base/options.h"
#include "commands.h"
#include "internal.h"
#include "run_features.h"
#include "run_numbers.h"

enum {
    ID_LSE = OPTION_LONG_ONLY,
    ID_CAUSAL,
    ID_SCALE,
    ID_KV_LENS,
    ID_Q_OFFSETS,
    ID_KV_OFFSETS,
    ID_LAYOUT,
    ID_DTYPE,
    ID_OUT_DTYPE,
    ID_Q_SCALE,
    ID_K_SCALE,
    ID_V_SCALE,
    ID_WISDOM,
    ID_WINDOW,
    ID_PAGE_TABLE,
    ID_V_DIM
};

static const option_spec options[OPTIONS_MAX] = {
    {'q', "q", "FILE", "queries, 4-D; of a packed batch 3-D: [rows, heads, dim]"},
    {'k', "k", "FILE", "keys, as many dimensions; its heads divide those of q (grouped-query attention)"},
    {'v', "v", "FILE", "values, as many dimensions"},
    {ID_V_DIM, "v-dim", "N", "in place of --v: values are the first N elements of each key (MLA); wants --scale"},
    {'o', "output", "FILE", "where the output goes"},
    {ID_LSE, "lse", "FILE", "also write the log-sum-exp, [batch, heads, length] or, packed, [heads, rows]; float32"},
    {ID_CAUSAL, "causal", "=tl|br",
     "causal mask: br (default) lets the last query see every key, tl starts at query 0, key 0"},
    {ID_WINDOW, "window", "L[/R]",
     "sliding window: a query sees L keys up to its own and R behind it (0/R: no limit before it)"},
    RUN_FEATURE_OPTIONS,
    {ID_SCALE, "scale", "X", "factor of the scores; default: 1/sqrt(head dim)"},
    {ID_KV_LENS, "kv-lens", "FILE", "key length of each batch entry, 1-D int32 or int64"},
    {ID_Q_OFFSETS, "q-offsets", "FILE",
     "packed batch: sequence b has query rows offsets[b] to offsets[b+1]-1; 1-D int32 or int64"},
    {ID_KV_OFFSETS, "kv-offsets", "FILE", "the same of the keys; default: the queries' offsets"},
    {ID_PAGE_TABLE, "page-table", "FILE",
     "the pages of each batch entry, 2-D; k and v are [pages, heads, page, dim]; wants --kv-lens"},
    {ID_LAYOUT, "layout", "bhsd|bshd",
     "order of the dimensions in every file (b batch, h heads, s length, d dim); default bhsd"},
    {ID_DTYPE, "dtype", "TYPE",
     "compute in f32, f16, bf16 or e4m3; default: the files' type, else they are rounded to it"},
    {ID_OUT_DTYPE, "out-dtype", "TYPE",
     "type of the output: with f16 and bf16 also f32, with e4m3 f16 (default) or bf16"},
    {ID_Q_SCALE, "q-scale", "X|FILE",
     "with e4m3: value = stored * X; FILE: 2-D float32, one X a batch entry and head of k"},
    {ID_K_SCALE, "k-scale", "X|FILE", "the same for k"},
    {ID_V_SCALE, "v-scale", "X|FILE", "the same for v"},
    {ID_WISDOM, "wisdom", "FILE", "use the measured choices of this file"},
};

/* What an fp8 scale is given as. */
typedef struct scale_choice {
    double number;    /* 0 = default */
    const char *file; /* or NULL */
} scale_choice;

typedef struct request {
    const char *q, *k, *v, *o, *lse, *kv_lens, *q_offsets, *kv_offsets, *page_table, *wisdom;
    acr_mask mask;
    int64_t window_left, window_right;
    acr_layout layout;
    bool layout_given;
    acr_dtype dtype;     /* 0 = the files' */
    acr_dtype out_dtype; /* 0 = default */
    int64_t v_dim;       /* of values inside keys; 0 = a file holds them */
    double scale;        /* 0 = default */
    scale_choice q_scale, k_scale, v_scale;
    run_features features;
} request;

static const option_field fields[] = {
    {'q', OPTION_TEXT, offsetof(request, q)},
    {'k', OPTION_TEXT, offsetof(request, k)},
    {'v', OPTION_TEXT, offsetof(request, v)},
    {'o', OPTION_FILE, offsetof(request, o)},
    {ID_LSE, OPTION_FILE, offsetof(request, lse)},
    {ID_KV_LENS, OPTION_TEXT, offsetof(request, kv_lens)},
    {ID_Q_OFFSETS, OPTION_TEXT, offsetof(request, q_offsets)},
    {ID_KV_OFFSETS, OPTION_TEXT, offsetof(request, kv_offsets)},
    {ID_PAGE_TABLE, OPTION_TEXT, offsetof(request, page_table)},
    {ID_WISDOM, OPTION_TEXT, offsetof(request, wisdom)},
    {0},
};

static const command_spec spec = {
    .usage = "run",
    .examples =
        "  acromion run --q q.npy --k k.npy --v v.npy -o o.npy\n"
        "  acromion run --q q.npy --k k.npy --v v.npy -o o.npy --lse lse.npy --causal --layout bshd --backend cpu\n"
        "  acromion run --q q.npy --k k.npy --v v.npy -o o.npy --q-offsets cu_seqlens.npy --causal\n",
    .about =
        "Computes softmax(scale * q * transpose(k) + mask) * v from NumPy files and writes the result as one.\n"
        "Files hold little-endian arrays in C order: float32, float16, or raw bytes as ml_dtypes saves them: <V2 "
        "is bfloat16, |V1\n"
        "and |u1 are e4m3. The output has the input's type (float16 for e4m3), or --out-dtype. Existing outputs are\n"
        "replaced, all or nothing.\n",
    .options = options,
    .fields = fields,
    .common = COMMON_DEVICE | COMMON_JSON,
};

/* ---- Options ---- */

static bool take_causal(request *r, const char *value)
{
    if (!value || strcmp(value, "br") == 0) {
        r->mask = ACR_MASK_CAUSAL;
    } else if (strcmp(value, "tl") == 0) {
        r->mask = ACR_MASK_CAUSAL_TOP_LEFT;
    } else {
        fprintf(stderr, "acromion: --causal: '%s' is neither tl nor br\n", value);
        return false;
    }
    return true;
}

static bool take_window(request *r, const char *value)
{
    const char *slash = strchr(value, '/');
    char left[32];
    snprintf(left, sizeof left, "%.*s", slash ? (int)(slash - value) : 31, value);
    if (!option_int("window", left, 0, INT32_MAX, &r->window_left) ||
        (slash && !option_int("window", slash + 1, 1, INT32_MAX, &r->window_right))) {
        return false;
    }
    if (r->window_left == 0 && r->window_right == 0) {
        fprintf(stderr, "acromion: --window: 0 keys; say L, L/R or 0/R\n");
        return false;
    }
    return true;
}

static bool take_layout(request *r, const char *value)
{
    if (strcmp(value, "bhsd") != 0 && strcmp(value, "bshd") != 0) {
        fprintf(stderr, "acromion: --layout: '%s' is neither bhsd nor bshd\n", value);
        return false;
    }
    r->layout = strcmp(value, "bshd") == 0 ? ACR_BSHD : ACR_BHSD;
    r->layout_given = true;
    return true;
}

static bool take_dtype(acr_dtype *out, const char *option, const char *value)
{
    for (int dtype = ACR_F32; dtype <= ACR_E4M3; ++dtype) {
        if (strcmp(value, acr__dtype_text((acr_dtype)dtype)) == 0) {
            *out = (acr_dtype)dtype;
            return true;
        }
    }
    const char *hint = acr__dtype_hint(value, strlen(value));
    fprintf(stderr, "acromion: --%s: '%s' is none of f32, f16, bf16, e4m3%s%s\n", option, value,
            hint ? "; it is called " : "", hint ? hint : "");
    return false;
}

static const double scale_smallest = 1e-30, scale_largest = 1e30;

static bool take_scale(scale_choice *out, const char *name, const char *value)
{
    const size_t length = strlen(value);
    if (length > 4 && strcmp(value + length - 4, ".npy") == 0) {
        out->file = value;
        return true;
    }
    return option_double(name, value, scale_smallest, scale_largest, &out->number);
}

static bool take_option(void *arg, int id, const char *value)
{
    request *r = arg;
    if (id >= RUN_FEATURE_FIRST) {
        return run_features_take(&r->features, id, value);
    }
    switch (id) {
    case ID_CAUSAL:
        return take_causal(r, value);
    case ID_WINDOW:
        return take_window(r, value);
    case ID_LAYOUT:
        return take_layout(r, value);
    case ID_DTYPE:
        return take_dtype(&r->dtype, "dtype", value);
    case ID_OUT_DTYPE:
        return take_dtype(&r->out_dtype, "out-dtype", value);
    case ID_V_DIM:
        return option_int("v-dim", value, 1, INT32_MAX, &r->v_dim);
    case ID_SCALE:
        return option_double("scale", value, scale_smallest, scale_largest, &r->scale);
    case ID_Q_SCALE:
        return take_scale(&r->q_scale, "q-scale", value);
    case ID_K_SCALE:
        return take_scale(&r->k_scale, "k-scale", value);
    default:
        return take_scale(&r->v_scale, "v-scale", value);
    }
}

static bool complete(const request *r)
{
    const char *missing = !r->q ? "q" : !r->k ? "k" : !r->v && !r->v_dim ? "v" : !r->o ? "output" : NULL;
    if (missing) {
        fprintf(stderr, "acromion run: --%s is missing; `acromion run --help` shows an example\n", missing);
        return false;
    }
    if (r->v_dim && (r->v || r->scale == 0.0 || r->v_scale.number != 0.0 || r->v_scale.file)) {
        fprintf(stderr, "acromion run: --v-dim %s\n",
                r->v              ? "goes without --v: values are a part of k"
                : r->scale == 0.0 ? "wants --scale: it is that of the dims before projection, which no file says"
                                  : "goes without --v-scale: --k-scale is that of values inside k");
        return false;
    }
    if (r->kv_offsets && !r->q_offsets) {
        fprintf(stderr, "acromion run: --kv-offsets without --q-offsets\n");
        return false;
    }
    if (r->lse && file_same(r->o, r->lse)) {
        fprintf(stderr, "acromion run: --output and --lse are one file, %s\n", r->lse);
        return false;
    }
    if (r->q_offsets && !r->page_table && (r->kv_lens || r->layout_given)) {
        fprintf(stderr, "acromion run: --q-offsets goes with --kv-lens and --layout only beside --page-table\n");
        return false;
    }
    if (r->page_table && (!r->kv_lens || r->kv_offsets)) {
        fprintf(stderr, "acromion run: --page-table %s\n",
                r->kv_offsets ? "goes without --kv-offsets: --kv-lens says how many keys there are"
                              : "wants --kv-lens");
        return false;
    }
    return true;
}

/* ---- From files to a problem ---- */

typedef struct tensors {
    npy_file q, k, v;
    npy_file kv_lens, q_offsets, kv_offsets, page_table; /* where the request names them */
    npy_file q_scales, k_scales, v_scales;               /* likewise */
} tensors;

static void tensors_close(tensors *t)
{
    npy_close(&t->q);
    npy_close(&t->k);
    npy_close(&t->v);
    npy_close(&t->kv_lens);
    npy_close(&t->q_offsets);
    npy_close(&t->kv_offsets);
    npy_close(&t->page_table);
    npy_close(&t->q_scales);
    npy_close(&t->k_scales);
    npy_close(&t->v_scales);
}

static acr_status open_tensor(npy_file *file, const char *path, int rank)
{
    acr_status status = npy_open(path, file);
    if (status == ACR_OK && file->array.rank != rank) {
        const char *way_out = rank == 4 ? "; [batch, heads, length, dim], or for a packed batch give --q-offsets"
                                        : "; with --q-offsets tensors are [rows, heads, dim]";
        return acr__fail(ACR_INVALID, "%s: has %d dimensions, expected %d%s", path, file->array.rank, rank, way_out);
    }
    return status;
}

/* Lengths or offsets, or a table of two dimensions; nothing without a path. */
static acr_status open_numbers(npy_file *file, const char *path, int rank)
{
    acr_status status = path ? npy_open(path, file) : ACR_OK;
    const npy_array *a = &file->array;
    if (path && status == ACR_OK && (a->rank != rank || !run_holds_integers(a))) {
        return acr__fail(ACR_INVALID, "%s: expected a %d-D array of int32 or int64", path, rank);
    }
    return status;
}

/* Scales of heads; nothing without a path. */
static acr_status open_scales(npy_file *file, const char *path)
{
    acr_status status = path ? npy_open(path, file) : ACR_OK;
    if (path && status == ACR_OK && (file->array.rank != 2 || file->array.type != NPY_F32)) {
        return acr__fail(ACR_INVALID, "%s: expected a 2-D array of float32", path);
    }
    return status;
}

static acr_status tensors_open(tensors *t, request *r)
{
    const int rank = r->q_offsets ? 3 : 4, kv_rank = r->page_table ? 4 : rank;
    *t = (tensors){.q = {.bytes = NULL}};
    acr_status status = open_tensor(&t->q, r->q, rank);
    if (status == ACR_OK) {
        status = open_tensor(&t->k, r->k, kv_rank);
    }
    if (status == ACR_OK && r->v) {
        status = open_tensor(&t->v, r->v, kv_rank);
    }
    if (status == ACR_OK) {
        status = open_numbers(&t->kv_lens, r->kv_lens, 1);
    }
    if (status == ACR_OK) {
        status = open_numbers(&t->q_offsets, r->q_offsets, 1);
    }
    if (status == ACR_OK && !r->page_table) {
        status = open_numbers(&t->kv_offsets, r->kv_offsets ? r->kv_offsets : r->q_offsets, 1);
    }
    if (status == ACR_OK) {
        status = open_numbers(&t->page_table, r->page_table, 2);
    }
    if (status == ACR_OK) {
        status = open_scales(&t->q_scales, r->q_scale.file);
    }
    if (status == ACR_OK) {
        status = open_scales(&t->k_scales, r->k_scale.file);
    }
    if (status == ACR_OK) {
        status = open_scales(&t->v_scales, r->v_scale.file);
    }
    return status == ACR_OK ? run_features_open(&r->features) : status;
}

/* The type that a tensor file's elements are; 0 for integers and booleans. */
static acr_dtype dtype_of(npy_type type)
{
    return type == NPY_BOOL ? ACR_DTYPE_DEFAULT : npy_dtype(type);
}

static npy_type type_of(acr_dtype dtype)
{
    return dtype == ACR_F32 ? NPY_F32 : dtype == ACR_BF16 ? NPY_RAW2 : NPY_F16; /* no output is e4m3 */
}

/* A tensor's extents by meaning. */
typedef struct extents {
    int64_t batch, heads, length, dim;
} extents;

/* Of a packed tensor the length is that of all sequences together, and the batch 1. */
static extents extents_of(const npy_array *a, acr_layout layout)
{
    if (a->rank == 3) {
        return (extents){1, a->shape[1], a->shape[0], a->shape[2]};
    }
    int64_t heads = a->shape[layout == ACR_BHSD ? 1 : 2], length = a->shape[layout == ACR_BHSD ? 2 : 1];
    return (extents){a->shape[0], heads, length, a->shape[3]};
}

/* The array that values are in: k where they are a part of the keys. */
static const npy_array *values_of(const tensors *t, const request *r)
{
    return r->v_dim ? &t->k.array : &t->v.array;
}

static extents extents_of_values(const tensors *t, const request *r)
{
    extents v = extents_of(values_of(t, r), r->layout);
    v.dim = r->v_dim ? r->v_dim : v.dim;
    return v;
}

/* Keys and values of 8 bits under wider queries. */
static bool is_8_bit_cache(const tensors *t, const request *r)
{
    const npy_type k = t->k.array.type;
    return !r->dtype && k != t->q.array.type && k == values_of(t, r)->type && dtype_of(k) == ACR_E4M3;
}

/* The files must agree with each other; what they mean together is for acr_problem_canonical to judge. */
static acr_status agree(const tensors *t, const request *r)
{
    extents q = extents_of(&t->q.array, r->layout), k = extents_of(&t->k.array, r->layout);
    extents v = extents_of_values(t, r);
    const npy_array *lens = &t->kv_lens.array, *table = &t->page_table.array;
    const int64_t entries = r->q_offsets ? t->q_offsets.array.elems - 1 : q.batch;
    if (r->page_table && k.batch != v.batch) {
        return acr__fail(ACR_INVALID, "k has %lld pages, v %lld", (long long)k.batch, (long long)v.batch);
    }
    if (r->page_table && table->shape[0] != entries) {
        return acr__fail(ACR_INVALID, "%s: rows of %lld entries, but the batch has %lld", r->page_table,
                         (long long)table->shape[0], (long long)entries);
    }
    if (!r->page_table && (k.batch != q.batch || v.batch != q.batch)) {
        return acr__fail(ACR_INVALID, "batch: q has %lld entries, k %lld, v %lld", (long long)q.batch,
                         (long long)k.batch, (long long)v.batch);
    }
    if (k.dim != q.dim) {
        return acr__fail(ACR_INVALID, "head dim: q has %lld, k %lld", (long long)q.dim, (long long)k.dim);
    }
    if (k.heads != v.heads || k.length != v.length) {
        return acr__fail(ACR_INVALID, "k has %lld heads of length %lld, v %lld of %lld", (long long)k.heads,
                         (long long)k.length, (long long)v.heads, (long long)v.length);
    }
    if (r->kv_lens && lens->shape[0] != entries) {
        return acr__fail(ACR_INVALID, "%s: %lld key lengths, but the batch of %s is %lld", r->kv_lens,
                         (long long)lens->shape[0], r->q, (long long)entries);
    }
    if (!r->dtype && !is_8_bit_cache(t, r) &&
        (t->k.array.type != t->q.array.type || values_of(t, r)->type != t->q.array.type)) {
        return acr__fail(ACR_INVALID, "q, k and v have different types (%s, %s, %s); --dtype rounds them to one",
                         npy_type_text(t->q.array.type), npy_type_text(t->k.array.type),
                         npy_type_text(values_of(t, r)->type));
    }
    return ACR_OK;
}

/* Offsets of a file must be what they should: begin at 0 or later, not decrease, end within the rows. */
static acr_status longest_of(int64_t *longest, const npy_array *offsets, int64_t rows, const char *option)
{
    *longest = 1; /* problems have no length 0, sequences may */
    for (int64_t i = 0; i < offsets->elems; ++i) {
        int64_t at = run_integer_at(offsets, i), before = i > 0 ? run_integer_at(offsets, i - 1) : 0;
        if (at < before || at > rows) {
            return acr__fail(ACR_INVALID, "%s[%lld] is %lld, allowed are %lld to %lld", option, (long long)i,
                             (long long)at, (long long)before, (long long)rows);
        }
        if (i > 0 && at - before > *longest) {
            *longest = at - before;
        }
    }
    return ACR_OK;
}

/* Makes a problem whose keys are those of one page a paged one: as many keys as the table has room for. */
static acr_status put_in_pages(acr_problem *p, const tensors *t)
{
    const int64_t page = p->kv_len, heads = p->kv_heads, entries = t->page_table.array.shape[1];
    const acr_strides bhsd = {heads * page, page, 1}, bshd = {page * heads, 1, heads},
                      s = p->layout == ACR_BHSD ? bhsd : bshd;
    if (entries < 1 || page > INT32_MAX / entries) {
        return acr__fail(ACR_INVALID,
                         "page-table has %lld pages of %lld keys for an entry, together allowed are 1 to "
                         "%d keys",
                         (long long)entries, (long long)page, INT32_MAX);
    }
    p->flags |= ACR_PAGED;
    p->page = (int32_t)page;
    p->kv_len = entries * page;
    p->k = (acr_strides){s.batch * p->qk_dim, s.head * p->qk_dim, s.row * p->qk_dim};
    if (!(p->flags & ACR_V_IN_K)) {
        p->v = (acr_strides){s.batch * p->v_dim, s.head * p->v_dim, s.row * p->v_dim};
    }
    return ACR_OK;
}

/* Makes a problem whose lengths are those of the tensors a packed one. */
static acr_status pack(acr_problem *p, const tensors *t)
{
    const npy_array *q = &t->q_offsets.array, *kv = &t->kv_offsets.array;
    if (q->elems < 2 || (kv->data && kv->elems != q->elems)) {
        return acr__fail(ACR_INVALID, "q-offsets has %lld entries, kv-offsets %lld; both need batch + 1, at least 2",
                         (long long)q->elems, (long long)kv->elems);
    }
    p->flags |= ACR_PACKED;
    p->layout = ACR_BSHD;
    p->batch = q->elems - 1;
    acr_status status = longest_of(&p->q_len, q, t->q.array.shape[0], "q-offsets");
    return status == ACR_OK && kv->data ? longest_of(&p->kv_len, kv, t->k.array.shape[0], "kv-offsets") : status;
}

static acr_status problem_of(acr_problem *out, const tensors *t, const request *r)
{
    acr_status status = agree(t, r);
    if (status != ACR_OK) {
        return status;
    }
    extents q = extents_of(&t->q.array, r->layout), k = extents_of(&t->k.array, r->layout);
    extents v = extents_of_values(t, r);
    acr_problem p = ACR_PROBLEM_INIT;
    p.dtype = r->dtype ? r->dtype : dtype_of(t->q.array.type);
    p.out_dtype = r->out_dtype;
    p.mask = r->mask;
    p.window_left = r->window_left;
    p.window_right = r->window_right;
    p.layout = r->layout;
    p.flags = (r->lse ? ACR_WANT_LSE : 0u) | (r->kv_lens ? ACR_KV_LENS : 0u) | (r->v_dim ? (uint32_t)ACR_V_IN_K : 0u);
    p.batch = q.batch;
    p.q_heads = q.heads;
    p.kv_heads = k.heads;
    p.q_len = q.length;
    p.kv_len = k.length;
    p.qk_dim = q.dim;
    p.v_dim = v.dim;
    p.scale = (float)r->scale;
    p.q_scale = (float)r->q_scale.number;
    p.k_scale = (float)r->k_scale.number;
    p.v_scale = (float)r->v_scale.number;
    /* A zero would mean "as the other one" to the problem; in a file it is an empty tensor. */
    if (k.length == 0 || k.heads == 0 || v.dim == 0) {
        return acr__fail(ACR_INVALID, "%s is empty", k.length == 0 || k.heads == 0 ? r->k : r->v);
    }
    const struct {
        const npy_array *array;
        const char *path;
    } tensors_of[] = {{&t->q.array, r->q}, {&t->k.array, r->k}, {values_of(t, r), r->v_dim ? r->k : r->v}};
    for (size_t i = 0; i < sizeof tensors_of / sizeof tensors_of[0]; ++i) {
        const npy_type type = tensors_of[i].array->type;
        if (dtype_of(type) == 0) {
            return acr__fail(ACR_INVALID, "%s: holds integers (%s), expected floating-point numbers",
                             tensors_of[i].path, npy_type_text(type));
        }
    }
    if (is_8_bit_cache(t, r)) {
        p.kv_dtype = ACR_E4M3;
    }
    if (r->page_table) {
        status = put_in_pages(&p, t);
    }
    if (status == ACR_OK && r->q_offsets) {
        status = pack(&p, t);
    }
    if (status == ACR_OK) {
        status = run_features_describe(&r->features, &p);
    }
    return status == ACR_OK ? acr_problem_canonical(out, &p) : status;
}

/* ---- Device memory ---- */

typedef struct device_buffers {
    acr__backend_device *device;
    void *q, *k, *v, *o, *lse, *kv_lens, *q_offsets, *kv_offsets, *q_scales, *k_scales, *v_scales, *page_table,
        *workspace;
    int64_t pages, table_stride; /* of a paged cache, else 0 */
    int64_t q_total, kv_total;   /* rows of a packed batch, else 0 */
    size_t o_bytes, lse_bytes, workspace_bytes;
} device_buffers;

static void buffers_free(device_buffers *b)
{
    void *const all[] = {b->q,          b->k,        b->v,        b->o,        b->lse,        b->kv_lens,  b->q_offsets,
                         b->kv_offsets, b->q_scales, b->k_scales, b->v_scales, b->page_table, b->workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        if (all[i]) {
            b->device->backend->mem_free(b->device, all[i]);
        }
    }
}

/* Copies a tensor to the device, rounded to the problem's type where the file has another. */
static acr_status upload_tensor(acr__backend_device *device, void **to, const npy_array *a, acr_dtype dtype)
{
    acr_dtype stored = dtype_of(a->type);
    if (stored == dtype) {
        return run_upload(device, to, a->data, a->data_bytes);
    }
    size_t elem_bytes = npy_type_bytes(a->type), bytes = (size_t)a->elems * (size_t)acr__dtype_bytes(dtype);
    void *rounded = malloc(bytes);
    if (!rounded) {
        return acr__fail(ACR_NO_MEMORY, "no memory to convert %zu bytes", bytes);
    }
    for (int64_t i = 0; i < a->elems; ++i) {
        uint32_t element = 0; /* a file's data may be less aligned than its type */
        memcpy(&element, (const char *)a->data + (size_t)i * elem_bytes, elem_bytes);
        acr__store_element(dtype, rounded, i, acr__load_element(stored, &element, 0));
    }
    acr_status status = run_upload(device, to, rounded, bytes);
    free(rounded);
    return status;
}

/* Scales of heads, where a file holds them. */
static acr_status upload_scales(acr__backend_device *device, void **to, const npy_array *a, const acr_problem *p,
                                const char *option)
{
    if (!a->data) {
        return ACR_OK;
    }
    if (a->shape[0] != p->batch || a->shape[1] != p->kv_heads) {
        return acr__fail(ACR_INVALID, "%s has shape [%lld, %lld], expected [%lld, %lld]: batch and heads of k", option,
                         (long long)a->shape[0], (long long)a->shape[1], (long long)p->batch, (long long)p->kv_heads);
    }
    return run_upload(device, to, a->data, a->data_bytes);
}

/* The table as int32. Numbers behind an entry's last key name no page, whatever they are; the others have to. */
static acr_status upload_table(device_buffers *b, const acr_problem *p, const tensors *t)
{
    const npy_array *table = &t->page_table.array;
    const int64_t columns = table->shape[1];
    acr_status status = ACR_OK;
    int32_t *numbers = malloc((size_t)table->elems * sizeof *numbers);
    b->pages = t->k.array.shape[0];
    b->table_stride = columns;
    if (!numbers) {
        return acr__fail(ACR_NO_MEMORY, "no memory for page-table");
    }
    for (int64_t i = 0; i < table->elems && status == ACR_OK; ++i) {
        const int64_t number = run_integer_at(table, i), entry = i / columns, column = i % columns;
        const bool names_page = number >= 0 && number < b->pages;
        if (!names_page && column * p->page < run_integer_at(&t->kv_lens.array, entry)) {
            status = acr__fail(ACR_INVALID, "page-table[%lld, %lld] is %lld, allowed are 0 to %lld", (long long)entry,
                               (long long)column, (long long)number, (long long)(b->pages - 1));
        }
        numbers[i] = names_page ? (int32_t)number : -1;
    }
    if (status == ACR_OK) {
        status = run_upload(b->device, &b->page_table, numbers, (size_t)table->elems * sizeof *numbers);
    }
    free(numbers);
    return status;
}

static acr_status upload_inputs(device_buffers *b, const acr_problem *p, const tensors *t)
{
    const acr_dtype kv_dtype = p->kv_dtype ? p->kv_dtype : p->dtype;
    acr_status status = upload_tensor(b->device, &b->q, &t->q.array, p->dtype);
    if (status == ACR_OK) {
        status = upload_tensor(b->device, &b->k, &t->k.array, kv_dtype);
    }
    if (status == ACR_OK && !(p->flags & ACR_V_IN_K)) {
        status = upload_tensor(b->device, &b->v, &t->v.array, kv_dtype);
    }
    if (status == ACR_OK && (p->flags & ACR_KV_LENS)) {
        status = run_upload_integers(b->device, &b->kv_lens, &t->kv_lens.array, p->kv_len, "kv-lens");
    }
    if (status == ACR_OK) {
        status = upload_scales(b->device, &b->q_scales, &t->q_scales.array, p, "q-scale");
    }
    if (status == ACR_OK) {
        status = upload_scales(b->device, &b->k_scales, &t->k_scales.array, p, "k-scale");
    }
    if (status == ACR_OK) {
        status = upload_scales(b->device, &b->v_scales, &t->v_scales.array, p, "v-scale");
    }
    if (status == ACR_OK && (p->flags & ACR_PAGED)) {
        status = upload_table(b, p, t);
    }
    if (status != ACR_OK || !(p->flags & ACR_PACKED)) {
        return status;
    }
    b->q_total = t->q.array.shape[0];
    if (p->flags & ACR_PAGED) {
        return run_upload_integers(b->device, &b->q_offsets, &t->q_offsets.array, b->q_total, "q-offsets");
    }
    b->kv_total = t->k.array.shape[0];
    status = run_upload_integers(b->device, &b->q_offsets, &t->q_offsets.array, b->q_total, "q-offsets");
    return status == ACR_OK
               ? run_upload_integers(b->device, &b->kv_offsets, &t->kv_offsets.array, b->kv_total, "kv-offsets")
               : status;
}

/* Zero, which rows of a packed batch that belong to no sequence keep. */
static acr_status make_output(acr__backend_device *device, void **out, size_t bytes)
{
    acr_status status = device->backend->mem_alloc(device, bytes, out);
    return status == ACR_OK ? device->backend->mem_fill(device, *out, 0, bytes) : status;
}

static acr_status buffers_make(device_buffers *b, const acr_problem *p, const tensors *t, size_t workspace_bytes)
{
    int64_t rows = p->q_heads * (p->flags & ACR_PACKED ? t->q.array.shape[0] : p->batch * p->q_len);
    b->o_bytes = (size_t)(rows * p->v_dim) * (size_t)acr__dtype_bytes(p->out_dtype);
    b->lse_bytes = p->flags & ACR_WANT_LSE ? (size_t)rows * sizeof(float) : 0;
    b->workspace_bytes = workspace_bytes;
    acr_status status = upload_inputs(b, p, t);
    if (status == ACR_OK) {
        status = make_output(b->device, &b->o, b->o_bytes);
    }
    if (status == ACR_OK && b->lse_bytes > 0) {
        status = make_output(b->device, &b->lse, b->lse_bytes);
    }
    const acr__backend *backend = b->device->backend;
    if (status == ACR_OK && workspace_bytes > 0) {
        status = backend->mem_alloc(b->device, workspace_bytes, &b->workspace);
    }
    return status;
}

/* ---- Running ---- */

static acr_status execute(const acr_plan *plan, const device_buffers *b, const run_features *features)
{
    acr_buffers buffers = ACR_BUFFERS_INIT;
    buffers.q = b->q;
    buffers.k = b->k;
    buffers.v = b->v;
    buffers.o = b->o;
    buffers.lse = b->lse;
    buffers.kv_lens = b->kv_lens;
    buffers.q_offsets = b->q_offsets;
    buffers.kv_offsets = b->kv_offsets;
    buffers.q_scales = b->q_scales;
    buffers.k_scales = b->k_scales;
    buffers.v_scales = b->v_scales;
    buffers.page_table = b->page_table;
    buffers.table_stride = b->table_stride;
    buffers.pages = b->pages;
    buffers.q_total = b->q_total;
    buffers.kv_total = b->kv_total;
    run_features_set(features, &buffers);
    acr_status status = acr_workspace_init(plan, b->workspace, b->workspace_bytes, NULL);
    if (status == ACR_OK) {
        status = acr_execute(plan, &buffers, b->workspace, b->workspace_bytes, NULL);
    }
    return status == ACR_OK ? b->device->backend->synchronize(b->device) : status;
}

/* Copies a result from the device into a file. */
static acr_status save(const char *path, acr__backend_device *device, const void *from, size_t bytes, npy_type type,
                       int rank, const int64_t *shape)
{
    void *host = malloc(bytes);
    if (!host) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %zu bytes of output", bytes);
    }
    acr_status status = device->backend->mem_download(device, host, from, bytes);
    if (status == ACR_OK) {
        status = npy_write(path, type, rank, shape, host);
    }
    free(host);
    return status;
}

static acr_status save_results(const request *r, const acr_problem *p, const device_buffers *b)
{
    bool bhsd = p->layout == ACR_BHSD, packed = p->flags & ACR_PACKED;
    const int64_t o_shape[] = {p->batch, bhsd ? p->q_heads : p->q_len, bhsd ? p->q_len : p->q_heads, p->v_dim};
    const int64_t packed_o_shape[] = {b->q_total, p->q_heads, p->v_dim};
    const int64_t lse_shape[] = {p->batch, p->q_heads, p->q_len}, packed_lse_shape[] = {p->q_heads, b->q_total};
    acr_status status = save(r->o, b->device, b->o, b->o_bytes, type_of(p->out_dtype), packed ? 3 : 4,
                             packed ? packed_o_shape : o_shape);
    return status == ACR_OK && r->lse ? save(r->lse, b->device, b->lse, b->lse_bytes, NPY_F32, packed ? 2 : 3,
                                             packed ? packed_lse_shape : lse_shape)
                                      : status;
}

static void print_summary(const request *r, const acr_problem *p, const acr_plan *plan, const acr_ctx *ctx, bool json)
{
    char text[ACR_PROBLEM_TEXT_MAX];
    acr_problem_format(p, text, sizeof text);
    if (json) {
        json_print(json_pack("{s:s, s:s, s:s, s:s, s:s, s:s?}", "problem", text, "kernel", acr_plan_kernel(plan),
                             "plan", acr_plan_text(plan), "device", acr_ctx_device(ctx), "output", r->o, "lse",
                             r->lse));
    } else {
        printf("%s\n%s written on %s\n", acr_plan_text(plan), r->o, acr_ctx_device(ctx));
    }
}

static acr_status run_on(acr_ctx *ctx, request *r, const tensors *t, const acr_problem *p, bool json)
{
    acr_plan *plan = NULL;
    device_buffers b = {.device = acr__ctx_backend_device(ctx)};
    acr_status status = r->wisdom ? acr_wisdom_import(ctx, r->wisdom, NULL) : ACR_OK;
    if (status == ACR_OK) {
        status = acr_plan_create(&plan, ctx, p, ACR_ESTIMATE);
    }
    if (status == ACR_OK) {
        status = buffers_make(&b, p, t, acr_plan_workspace(plan));
    }
    if (status == ACR_OK) {
        status = run_features_upload(&r->features, p, b.device);
    }
    if (status == ACR_OK) {
        status = execute(plan, &b, &r->features);
    }
    if (status == ACR_OK) {
        status = save_results(r, p, &b);
    }
    if (status == ACR_OK) {
        print_summary(r, p, plan, ctx, json);
    }
    buffers_free(&b);
    run_features_free(&r->features, b.device);
    acr_plan_destroy(plan);
    return status;
}

int cmd_run(int argc, char **argv)
{
    common_options common;
    request r = {.q = NULL};
    int exit_code = EXIT_DONE;
    if (options_parse(&spec, argc, argv, &common, take_option, &r, &exit_code) < 0) {
        return exit_code;
    }
    if (!complete(&r)) {
        return EXIT_USAGE;
    }
    tensors t;
    acr_problem p;
    acr_status status = tensors_open(&t, &r);
    if (status == ACR_OK) {
        status = file_can_write(r.o);
    }
    if (status == ACR_OK && r.lse) {
        status = file_can_write(r.lse);
    }
    if (status == ACR_OK) {
        status = problem_of(&p, &t, &r);
    }
    acr_ctx *ctx = NULL;
    if (status != ACR_OK) {
        exit_code = report_failure(status, NULL);
    } else {
        exit_code = context_open(&common, &ctx);
    }
    if (exit_code == EXIT_DONE) {
        status = run_on(ctx, &r, &t, &p, common.json);
        exit_code = status == ACR_OK ? EXIT_DONE : report_failure(status, NULL);
    }
    acr_ctx_destroy(ctx);
    run_features_close(&r.features);
    tensors_close(&t);
    return exit_code;
}
