/* A problem: canonical form, text form (parse and print), digest.
 *
 * The text grammar is that of acr_problem_parse in acromion.h. The canonical text leaves out what is default and keeps
 * one order, so that two problems which get the same kernels have the same text. */
#include "problem.h"

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "error.h"

enum {
    DEFAULT_ALIGNMENT = 16,
    MAX_ALIGNMENT = 256
};
static const int64_t MAX_EXTENT = INT32_MAX;
static const int64_t MAX_SPAN = INT64_MAX / 4; /* bytes from first to last element: sums cannot overflow */

/* ---- Types ------------------------------------------------------------------------------------------------------- */

int acr__dtype_bytes(acr_dtype dtype)
{
    switch (dtype) {
    case ACR_F32:
        return 4;
    case ACR_F16:
    case ACR_BF16:
        return 2;
    case ACR_E4M3:
        return 1;
    case ACR_DTYPE_DEFAULT:
        break;
    }
    return 0;
}

const char *acr__dtype_text(acr_dtype dtype)
{
    switch (dtype) {
    case ACR_F32:
        return "f32";
    case ACR_F16:
        return "f16";
    case ACR_BF16:
        return "bf16";
    case ACR_E4M3:
        return "e4m3";
    case ACR_DTYPE_DEFAULT:
        break;
    }
    return "default";
}

const char *acr__dtype_hint(const char *word, size_t length)
{
    static const struct {
        const char *other;
        acr_dtype dtype;
    } names[] = {
        {"fp16", ACR_F16},           {"float16", ACR_F16},  {"half", ACR_F16},      {"fp32", ACR_F32},
        {"float32", ACR_F32},        {"float", ACR_F32},    {"single", ACR_F32},    {"bfloat16", ACR_BF16},
        {"bfp16", ACR_BF16},         {"brain16", ACR_BF16}, {"fp8", ACR_E4M3},      {"f8", ACR_E4M3},
        {"float8_e4m3fn", ACR_E4M3}, {"e4m3fn", ACR_E4M3},  {"fp8_e4m3", ACR_E4M3}, {"float8_e4m3", ACR_E4M3},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strlen(names[i].other) == length && strncasecmp(names[i].other, word, length) == 0)
            return acr__dtype_text(names[i].dtype);
    for (int dtype = ACR_F32; dtype <= ACR_E4M3; dtype++) { /* in capitals */
        const char *text = acr__dtype_text((acr_dtype)dtype);
        if (strlen(text) == length && strncasecmp(text, word, length) == 0)
            return text;
    }
    return NULL;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* A tensor of the problem, for the rules that hold for all four. */
typedef struct tensor {
    const char *name;
    int64_t batch, heads, rows, dim;
    acr_strides *strides;
    bool is_output;
} tensor;

enum {
    TENSORS = 4
};

/* A packed batch is one entry with as many rows as offsets can name: how many there are is known at the execution. */
static void tensors_of(acr_problem *p, tensor list[TENSORS])
{
    if (p->flags & ACR_PACKED) {
        list[0] = (tensor){"q", 1, p->q_heads, MAX_EXTENT, p->qk_dim, &p->q, false};
        list[1] = (tensor){"k", 1, p->kv_heads, MAX_EXTENT, p->qk_dim, &p->k, false};
        list[2] = (tensor){"v", 1, p->kv_heads, MAX_EXTENT, p->v_dim, &p->v, false};
        list[3] = (tensor){"o", 1, p->q_heads, MAX_EXTENT, p->v_dim, &p->o, true};
        return;
    }
    list[0] = (tensor){"q", p->batch, p->q_heads, p->q_len, p->qk_dim, &p->q, false};
    list[1] = (tensor){"k", p->batch, p->kv_heads, p->kv_len, p->qk_dim, &p->k, false};
    list[2] = (tensor){"v", p->batch, p->kv_heads, p->kv_len, p->v_dim, &p->v, false};
    list[3] = (tensor){"o", p->batch, p->q_heads, p->q_len, p->v_dim, &p->o, true};
}

/* Packed strides, saturating: an overflow shows as a span beyond MAX_SPAN. */
static int64_t saturating_mul(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

static int64_t saturating_add(int64_t a, int64_t b)
{
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

static acr_strides packed_strides(const tensor *t, acr_layout layout)
{
    acr_strides s;
    if (layout == ACR_BSHD) {
        s.head = t->dim;
        s.row = saturating_mul(t->heads, t->dim);
        s.batch = saturating_mul(t->rows, s.row);
    } else {
        s.row = t->dim;
        s.head = saturating_mul(t->rows, t->dim);
        s.batch = saturating_mul(t->heads, s.head);
    }
    return s;
}

/* Equal as far as they matter: the stride of an extent of 1 is never used. */
static bool same_strides(const tensor *t, const acr_strides *a, const acr_strides *b)
{
    return (t->batch == 1 || a->batch == b->batch) && (t->heads == 1 || a->head == b->head) &&
           (t->rows == 1 || a->row == b->row);
}

static int64_t span_elems(const tensor *t)
{
    int64_t last = saturating_mul(t->batch - 1, t->strides->batch);
    last = saturating_add(last, saturating_mul(t->heads - 1, t->strides->head));
    last = saturating_add(last, saturating_mul(t->rows - 1, t->strides->row));
    return saturating_add(last, t->dim);
}

int64_t acr__span_bytes(int64_t batch, int64_t heads, int64_t rows, int64_t dim, const acr_strides *strides,
                        acr_dtype dtype)
{
    acr_strides copy = *strides;
    const tensor t = {"", batch, heads, rows, dim, &copy, false};
    return saturating_mul(span_elems(&t), acr__dtype_bytes(dtype));
}

/* True when no two elements share an address: walking the dimensions from the smallest stride up, each step is at least
 * as long as everything inside it. */
static bool is_self_disjoint(const tensor *t)
{
    int64_t stride[3] = {t->strides->row, t->strides->head, t->strides->batch};
    int64_t extent[3] = {t->rows, t->heads, t->batch};
    int64_t inner = t->dim;
    for (int done = 0; done < 3; done++) {
        int next = -1;
        for (int i = 0; i < 3; i++)
            if (extent[i] > 1 && (next < 0 || stride[i] < stride[next]))
                next = i;
        if (next < 0)
            return true;
        if (stride[next] < inner)
            return false;
        inner = saturating_add(saturating_mul(stride[next], extent[next] - 1), inner);
        extent[next] = 1;
    }
    return true;
}

/* Fills in packed strides where all are zero, and checks the rest. */
static acr_status complete_strides(tensor *t, acr_layout layout, acr_dtype dtype)
{
    acr_strides *s = t->strides;
    if (s->batch == 0 && s->head == 0 && s->row == 0)
        *s = packed_strides(t, layout);
    if ((t->batch > 1 && s->batch < 0) || (t->heads > 1 && s->head < 0) || (t->rows > 1 && s->row < 0))
        return acr__fail(ACR_INVALID, "%s strides (%lld, %lld, %lld): a stride must not be negative", t->name,
                         (long long)s->batch, (long long)s->head, (long long)s->row);
    if (saturating_mul(span_elems(t), acr__dtype_bytes(dtype)) > MAX_SPAN)
        return acr__fail(ACR_INVALID, "%s spans more than 2^61 bytes", t->name);
    if (t->is_output && !is_self_disjoint(t))
        return acr__fail(ACR_INVALID, "o strides (%lld, %lld, %lld): the output would overlap itself",
                         (long long)s->batch, (long long)s->head, (long long)s->row);
    return ACR_OK;
}

static bool all_packed(tensor list[TENSORS], acr_layout layout)
{
    for (int i = 0; i < TENSORS; i++) {
        const acr_strides packed = packed_strides(&list[i], layout);
        if (!same_strides(&list[i], list[i].strides, &packed))
            return false;
    }
    return true;
}

/* One form for equal strides: those of extents of 1 take their packed value, and the layout says bshd only when it
 * describes all four. */
static void normalise_strides(acr_problem *p, tensor list[TENSORS])
{
    if (!(p->flags & ACR_PACKED)) /* which has but the one */
        p->layout = !all_packed(list, ACR_BHSD) && all_packed(list, ACR_BSHD) ? ACR_BSHD : ACR_BHSD;
    for (int i = 0; i < TENSORS; i++) {
        const acr_strides packed = packed_strides(&list[i], p->layout);
        acr_strides *s = list[i].strides;
        if (list[i].batch == 1)
            s->batch = p->flags & ACR_PACKED ? 0 : packed.batch;
        if (list[i].heads == 1)
            s->head = packed.head;
        if (list[i].rows == 1)
            s->row = packed.row;
    }
}

/* ---- Canonical form ---------------------------------------------------------------------------------------------- */

static acr_status read_problem(acr_problem *out, const acr_problem *in)
{
    if (!in)
        return acr__fail(ACR_INVALID, "problem is NULL");
    static const size_t earlier[] = {offsetof(acr_problem, window_left)};
    const acr_status status =
        acr__read_struct(out, sizeof *out, in, in->size, earlier, 1, "problem", "ACR_PROBLEM_INIT");
    out->size = (uint32_t)sizeof *out;
    return status;
}

static acr_status check_extent(const char *name, int64_t value)
{
    if (value < 1 || value > MAX_EXTENT)
        return acr__fail(ACR_INVALID, "%s is %lld, must be 1 to %lld", name, (long long)value, (long long)MAX_EXTENT);
    return ACR_OK;
}

static acr_status check_extents(const acr_problem *p)
{
    const struct {
        const char *name;
        int64_t value;
    } extents[] = {{"batch", p->batch},   {"q_heads", p->q_heads}, {"kv_heads", p->kv_heads}, {"q_len", p->q_len},
                   {"kv_len", p->kv_len}, {"qk_dim", p->qk_dim},   {"v_dim", p->v_dim}};
    for (size_t i = 0; i < sizeof extents / sizeof extents[0]; i++) {
        const acr_status status = check_extent(extents[i].name, extents[i].value);
        if (status != ACR_OK)
            return status;
    }
    if (p->q_heads % p->kv_heads != 0)
        return acr__fail(ACR_INVALID, "kv_heads (%lld) must divide q_heads (%lld)", (long long)p->kv_heads,
                         (long long)p->q_heads);
    return ACR_OK;
}

static acr_status check_choices(const acr_problem *p)
{
    if (p->pass != ACR_FORWARD)
        return acr__fail(ACR_INVALID, "pass is %d, must be ACR_FORWARD (0)", (int)p->pass);
    if (acr__dtype_bytes(p->dtype) == 0)
        return acr__fail(ACR_INVALID, "dtype is %d, must be ACR_F32, ACR_F16, ACR_BF16 or ACR_E4M3", (int)p->dtype);
    if (p->dtype == ACR_E4M3 ? p->out_dtype != ACR_F16 && p->out_dtype != ACR_BF16 : p->out_dtype != p->dtype)
        return acr__fail(ACR_INVALID, "out_dtype is %d (%s), must be %s", (int)p->out_dtype,
                         acr__dtype_text(p->out_dtype),
                         p->dtype == ACR_E4M3 ? "f16 or bf16 for e4m3 inputs" : "the type of the inputs");
    if (p->mask != ACR_MASK_NONE && p->mask != ACR_MASK_CAUSAL && p->mask != ACR_MASK_CAUSAL_TOP_LEFT)
        return acr__fail(ACR_INVALID, "mask is %d, must be an acr_mask", (int)p->mask);
    if (p->layout != ACR_BHSD && p->layout != ACR_BSHD)
        return acr__fail(ACR_INVALID, "layout is %d, must be ACR_BHSD or ACR_BSHD", (int)p->layout);
    if (p->flags & ~(uint32_t)(ACR_WANT_LSE | ACR_KV_LENS | ACR_PACKED))
        return acr__fail(ACR_INVALID, "flags 0x%x has bits that are not ACR_WANT_LSE, ACR_KV_LENS or ACR_PACKED",
                         p->flags);
    if (p->window_left < 0 || p->window_right < 0)
        return acr__fail(ACR_INVALID, "%s is %lld, must not be negative (0 for no limit)",
                         p->window_left < 0 ? "window_left" : "window_right",
                         (long long)(p->window_left < 0 ? p->window_left : p->window_right));
    const uint32_t a = p->alignment;
    if (a > MAX_ALIGNMENT || (a & (a - 1)) != 0 || a < (uint32_t)acr__dtype_bytes(p->dtype) ||
        a < (uint32_t)acr__dtype_bytes(p->out_dtype))
        return acr__fail(ACR_INVALID, "alignment is %u, must be a power of two from one element (%d bytes) to %d", a,
                         acr__dtype_bytes(p->dtype) > acr__dtype_bytes(p->out_dtype) ? acr__dtype_bytes(p->dtype)
                                                                                     : acr__dtype_bytes(p->out_dtype),
                         MAX_ALIGNMENT);
    return ACR_OK;
}

/* What a packed batch cannot be combined with. Before defaults are filled in: a batch stride that was given shows. */
static acr_status check_packed(const acr_problem *p)
{
    if (!(p->flags & ACR_PACKED))
        return ACR_OK;
    if (p->flags & ACR_KV_LENS)
        return acr__fail(ACR_INVALID, "flags: ACR_PACKED with ACR_KV_LENS; the offsets already say the key lengths");
    if (p->layout != ACR_BSHD)
        return acr__fail(ACR_INVALID, "layout is ACR_BHSD, with ACR_PACKED it must be ACR_BSHD: [total, heads, dim]");
    const struct {
        const char *name;
        int64_t batch_stride;
    } tensors[TENSORS] = {{"q", p->q.batch}, {"k", p->k.batch}, {"v", p->v.batch}, {"o", p->o.batch}};
    for (int i = 0; i < TENSORS; i++)
        if (tensors[i].batch_stride != 0)
            return acr__fail(ACR_INVALID,
                             "%s.batch stride is %lld, with ACR_PACKED it must be 0: offsets say where "
                             "an entry begins",
                             tensors[i].name, (long long)tensors[i].batch_stride);
    return ACR_OK;
}

static acr_status check_scales(acr_problem *p)
{
    if (!(p->scale > 0.0f) || !isfinite(p->scale))
        return acr__fail(ACR_INVALID, "scale is %g, must be positive and finite (0 for the default)", (double)p->scale);
    struct {
        const char *name;
        float *value;
    } scales[] = {{"q_scale", &p->q_scale}, {"k_scale", &p->k_scale}, {"v_scale", &p->v_scale}};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        float *value = scales[i].value;
        if (*value == 0.0f)
            *value = 1.0f;
        if (p->dtype == ACR_E4M3 ? !(*value > 0.0f) || !isfinite(*value) : !(*value == 1.0f))
            return acr__fail(ACR_INVALID, "%s is %g, must be %s", scales[i].name, (double)*value,
                             p->dtype == ACR_E4M3 ? "positive and finite" : "0 or 1: only e4m3 inputs have scales");
    }
    return ACR_OK;
}

/* A limit of the window that hides no key becomes 0. The last row stands at the last key, or at key q_len - 1 by the
 * top-left rule; the first row stands q_len - 1 keys before the last key, whatever the length of a batch entry. */
static void canonical_window(acr_problem *p)
{
    const int64_t last_position = (p->mask == ACR_MASK_CAUSAL_TOP_LEFT ? p->q_len : p->kv_len) - 1;
    if (p->window_left > last_position)
        p->window_left = 0;
    if (p->mask != ACR_MASK_NONE || p->window_right >= p->q_len - 1)
        p->window_right = 0;
}

/* Masks that hide the same keys get one name. */
static acr_mask canonical_mask(const acr_problem *p)
{
    acr_mask mask = p->mask;
    if (mask == ACR_MASK_CAUSAL_TOP_LEFT && p->q_len == p->kv_len && !(p->flags & (ACR_KV_LENS | ACR_PACKED)))
        mask = ACR_MASK_CAUSAL; /* both diagonals are 0 */
    if (mask == ACR_MASK_CAUSAL && p->q_len == 1)
        mask = ACR_MASK_NONE; /* the last query sees every key */
    return mask;
}

acr_status acr_problem_canonical(acr_problem *out, const acr_problem *in)
{
    acr_problem p;
    acr_status status = out ? read_problem(&p, in) : acr__fail(ACR_INVALID, "out is NULL");
    if (status != ACR_OK)
        return status;
    if (p.kv_heads == 0)
        p.kv_heads = p.q_heads;
    if (p.kv_len == 0)
        p.kv_len = p.q_len;
    if (p.v_dim == 0)
        p.v_dim = p.qk_dim;
    if (p.alignment == 0)
        p.alignment = DEFAULT_ALIGNMENT;
    if (p.out_dtype == ACR_DTYPE_DEFAULT)
        p.out_dtype = p.dtype == ACR_E4M3 ? ACR_F16 : p.dtype;
    if ((status = check_extents(&p)) != ACR_OK || (status = check_choices(&p)) != ACR_OK ||
        (status = check_packed(&p)) != ACR_OK)
        return status;
    if (p.scale == 0.0f)
        p.scale = (float)(1.0 / sqrt((double)p.qk_dim));
    if ((status = check_scales(&p)) != ACR_OK)
        return status;
    canonical_window(&p);
    p.mask = canonical_mask(&p);

    tensor list[TENSORS];
    tensors_of(&p, list);
    for (int i = 0; i < TENSORS; i++) {
        status = complete_strides(&list[i], p.layout, list[i].is_output ? p.out_dtype : p.dtype);
        if (status != ACR_OK)
            return status;
    }
    normalise_strides(&p, list);
    *out = p;
    return ACR_OK;
}

uint64_t acr__problem_digest(const acr_problem *canonical)
{
    /* The struct has no padding, so its bytes are its value. */
    _Static_assert(sizeof(acr_problem) == 8 * sizeof(uint32_t) + 21 * sizeof(int64_t) + 4 * sizeof(float),
                   "acr_problem must not have padding");
    return XXH3_64bits(canonical, sizeof *canonical);
}

/* ---- Text form: writing ------------------------------------------------------------------------------------------ */

/* Text being written; full once something did not fit. */
typedef struct writer {
    char *text;
    size_t used, capacity;
    bool full;
} writer;

static void put(writer *w, const char *format, ...) ACR__PRINTF(2, 3);
static void put(writer *w, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const size_t room = w->capacity - w->used;
    const int length = vsnprintf(w->text + w->used, room, format, args);
    va_end(args);
    if (length < 0 || (size_t)length >= room)
        w->full = true;
    else
        w->used += (size_t)length;
}

/* ":x8", or ":x8/2" where the second number is not the first. */
static void put_pair(writer *w, char letter, int64_t first, int64_t second)
{
    put(w, ":%c%lld", letter, (long long)first);
    if (second != first)
        put(w, "/%lld", (long long)second);
}

static void put_problem(writer *w, acr_problem *p)
{
    if (p->dtype != ACR_F16)
        put(w, "%s:", acr__dtype_text(p->dtype));
    put(w, "b%lld", (long long)p->batch);
    put_pair(w, 'h', p->q_heads, p->kv_heads);
    put_pair(w, 's', p->q_len, p->kv_len);
    put_pair(w, 'd', p->qk_dim, p->v_dim);
    if (p->mask != ACR_MASK_NONE)
        put(w, p->mask == ACR_MASK_CAUSAL ? ":causal" : ":causal-tl");
    if (p->window_left || p->window_right)
        put(w, ":win%lld", (long long)p->window_left);
    if (p->window_right)
        put(w, "/%lld", (long long)p->window_right);
    if (p->layout == ACR_BSHD)
        put(w, ":bshd");
    tensor list[TENSORS];
    tensors_of(p, list);
    for (int i = 0; i < TENSORS; i++) {
        const acr_strides packed = packed_strides(&list[i], p->layout), *s = list[i].strides;
        if (!same_strides(&list[i], s, &packed))
            put(w, ":%ss=%lld,%lld,%lld", list[i].name, (long long)s->batch, (long long)s->head, (long long)s->row);
    }
    if (p->alignment != DEFAULT_ALIGNMENT)
        put(w, ":align%u", p->alignment);
    if (p->dtype == ACR_E4M3 && p->out_dtype == ACR_BF16)
        put(w, ":obf16");
    if (p->flags & ACR_WANT_LSE)
        put(w, ":lse");
    if (p->flags & ACR_KV_LENS)
        put(w, ":kvlens");
    if (p->flags & ACR_PACKED)
        put(w, ":packed");
}

acr_status acr_problem_format(const acr_problem *problem, char *text, size_t capacity)
{
    acr_problem p;
    const acr_status status = acr_problem_canonical(&p, problem);
    if (status != ACR_OK)
        return status;
    if (!text)
        return acr__fail(ACR_INVALID, "text is NULL");
    char whole[ACR_PROBLEM_TEXT_MAX];
    writer w = {whole, 0, sizeof whole, false};
    put_problem(&w, &p);
    if (w.full || w.used >= capacity)
        return acr__fail(ACR_INVALID, "capacity is %zu, the text needs %zu bytes", capacity, w.used + 1);
    memcpy(text, whole, w.used + 1);
    return ACR_OK;
}

/* ---- Text form: reading ------------------------------------------------------------------------------------------ */

/* The fields of the grammar; each may occur once. Words of one group exclude each other. */
enum {
    SEEN_PASS = 1u << 0,
    SEEN_DTYPE = 1u << 1,
    SEEN_B = 1u << 2,
    SEEN_H = 1u << 3,
    SEEN_S = 1u << 4,
    SEEN_D = 1u << 5,
    SEEN_MASK = 1u << 6,
    SEEN_LAYOUT = 1u << 7,
    SEEN_Q_STRIDES = 1u << 8,
    SEEN_K_STRIDES = 1u << 9,
    SEEN_V_STRIDES = 1u << 10,
    SEEN_O_STRIDES = 1u << 11,
    SEEN_ALIGN = 1u << 12,
    SEEN_OUT = 1u << 13,
    SEEN_LSE = 1u << 14,
    SEEN_KV_LENS = 1u << 15,
    SEEN_PACKED = 1u << 16,
    SEEN_WINDOW = 1u << 17
};

typedef struct reader {
    const char *text, *at;
    unsigned seen;
    acr_problem *problem;
} reader;

static acr_status syntax_error(const reader *r, const char *reason)
{
    return acr__fail(ACR_FORMAT, "problem text, character %zu: %s", (size_t)(r->at - r->text), reason);
}

/* A decimal number up to 2^63 - 1: every stride that a problem can have. */
static acr_status read_number(reader *r, int64_t *value)
{
    const char *first = r->at;
    int64_t number = 0;
    while (*r->at >= '0' && *r->at <= '9') {
        if (__builtin_mul_overflow(number, 10, &number) || __builtin_add_overflow(number, *r->at - '0', &number))
            return syntax_error(r, "number has too many digits");
        r->at++;
    }
    if (r->at == first)
        return syntax_error(r, "expected a number");
    *value = number;
    return ACR_OK;
}

/* A number that an extent can be. Zero would mean "default" in the struct; in the text it is an error. */
static acr_status read_extent(reader *r, int64_t *value)
{
    const char *first = r->at;
    const acr_status status = read_number(r, value);
    if (status == ACR_OK && (*value < 1 || *value > MAX_EXTENT)) {
        r->at = first;
        return syntax_error(r, "number must be 1 to 2147483647");
    }
    return status;
}

static acr_status read_pair(reader *r, int64_t *first, int64_t *second)
{
    acr_status status = read_extent(r, first);
    if (status != ACR_OK || *r->at != '/') {
        *second = *first;
        return status;
    }
    r->at++;
    return read_extent(r, second);
}

static acr_status read_strides(reader *r, acr_strides *strides)
{
    const char *first = r->at;
    int64_t *const part[3] = {&strides->batch, &strides->head, &strides->row};
    for (int i = 0; i < 3; i++) {
        if (i > 0) {
            if (*r->at != ',')
                return syntax_error(r, "expected ',': strides are batch,head,row");
            r->at++;
        }
        const acr_status status = read_number(r, part[i]);
        if (status != ACR_OK)
            return status;
    }
    if (strides->batch == 0 && strides->head == 0 && strides->row == 0) {
        r->at = first;
        return syntax_error(r, "strides must not all be 0");
    }
    return ACR_OK;
}

/* "256", "256/128" or "0/128". */
static acr_status read_window(reader *r)
{
    const char *first = r->at;
    acr_status status = read_number(r, &r->problem->window_left);
    if (status == ACR_OK && *r->at == '/') {
        r->at++;
        status = read_extent(r, &r->problem->window_right);
    }
    if (status == ACR_OK && r->problem->window_left == 0 && r->problem->window_right == 0) {
        r->at = first;
        return syntax_error(r, "a window of 0 keys: say winL, winL/R or win0/R");
    }
    return status;
}

static acr_status read_alignment(reader *r)
{
    int64_t value = 0;
    const char *first = r->at;
    const acr_status status = read_number(r, &value);
    if (status == ACR_OK && (value < 1 || value > MAX_ALIGNMENT)) {
        r->at = first;
        return syntax_error(r, "alignment must be 1 to 256");
    }
    r->problem->alignment = (uint32_t)value;
    return status;
}

static bool is_field(const char *at, size_t length, const char *word)
{
    return strlen(word) == length && memcmp(at, word, length) == 0;
}

/* Takes a field without a number: sets its value and returns which field it was, or 0. */
static unsigned take_word(acr_problem *p, const char *at, size_t length)
{
    static const struct {
        const char *word;
        acr_dtype dtype;
    } dtypes[] = {{"f32", ACR_F32}, {"f16", ACR_F16}, {"bf16", ACR_BF16}, {"e4m3", ACR_E4M3}};
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (is_field(at, length, dtypes[i].word)) {
            p->dtype = dtypes[i].dtype;
            return SEEN_DTYPE;
        }
    if (is_field(at, length, "fwd"))
        return SEEN_PASS;
    if (is_field(at, length, "causal") || is_field(at, length, "causal-tl")) {
        p->mask = length == strlen("causal") ? ACR_MASK_CAUSAL : ACR_MASK_CAUSAL_TOP_LEFT;
        return SEEN_MASK;
    }
    if (is_field(at, length, "bhsd") || is_field(at, length, "bshd")) {
        p->layout = at[1] == 'h' ? ACR_BHSD : ACR_BSHD;
        return SEEN_LAYOUT;
    }
    if (is_field(at, length, "of16") || is_field(at, length, "obf16")) {
        p->out_dtype = at[1] == 'f' ? ACR_F16 : ACR_BF16;
        return SEEN_OUT;
    }
    if (is_field(at, length, "lse")) {
        p->flags |= ACR_WANT_LSE;
        return SEEN_LSE;
    }
    if (is_field(at, length, "kvlens")) {
        p->flags |= ACR_KV_LENS;
        return SEEN_KV_LENS;
    }
    if (is_field(at, length, "packed")) {
        p->flags |= ACR_PACKED;
        return SEEN_PACKED;
    }
    return 0;
}

/* Notes a field as seen; a second one is an error. */
static acr_status once(reader *r, unsigned field, const char *start)
{
    if (r->seen & field) {
        r->at = start;
        return syntax_error(r, "this field is given twice");
    }
    r->seen |= field;
    return ACR_OK;
}

/* Takes a field that carries numbers: its name has just been recognised, its value follows. */
static acr_status take_numbers(reader *r, unsigned field)
{
    acr_problem *p = r->problem;
    switch (field) {
    case SEEN_B:
        return read_extent(r, &p->batch);
    case SEEN_H:
        return read_pair(r, &p->q_heads, &p->kv_heads);
    case SEEN_S:
        return read_pair(r, &p->q_len, &p->kv_len);
    case SEEN_D:
        return read_pair(r, &p->qk_dim, &p->v_dim);
    case SEEN_Q_STRIDES:
        return read_strides(r, &p->q);
    case SEEN_K_STRIDES:
        return read_strides(r, &p->k);
    case SEEN_V_STRIDES:
        return read_strides(r, &p->v);
    case SEEN_O_STRIDES:
        return read_strides(r, &p->o);
    case SEEN_WINDOW:
        return read_window(r);
    default:
        return read_alignment(r);
    }
}

static acr_status read_field(reader *r)
{
    static const struct {
        const char *prefix;
        unsigned field;
    } numbered[] = {{"qs=", SEEN_Q_STRIDES}, {"ks=", SEEN_K_STRIDES},
                    {"vs=", SEEN_V_STRIDES}, {"win", SEEN_WINDOW},
                    {"os=", SEEN_O_STRIDES}, {"align", SEEN_ALIGN},
                    {"b", SEEN_B},           {"h", SEEN_H},
                    {"s", SEEN_S},           {"d", SEEN_D}};
    const char *start = r->at;
    const size_t length = strcspn(start, ":");
    if (length == 0)
        return syntax_error(r, "expected a field");
    acr_problem before = *r->problem;
    const unsigned word = take_word(r->problem, start, length);
    if (word) {
        const acr_status status = once(r, word, start);
        if (status != ACR_OK)
            *r->problem = before;
        else
            r->at += length;
        return status;
    }
    if (length >= 6 && memcmp(start, "window", 6) == 0)
        return syntax_error(r, "a window is winL or winL/R");
    for (size_t i = 0; i < sizeof numbered / sizeof numbered[0]; i++) {
        const size_t prefix = strlen(numbered[i].prefix);
        if (length < prefix || memcmp(start, numbered[i].prefix, prefix) != 0)
            continue;
        if (prefix == 1 && (start[1] < '0' || start[1] > '9') && length > 1)
            break; /* a word that happens to begin with b, h, s or d */
        acr_status status = once(r, numbered[i].field, start);
        if (status != ACR_OK)
            return status;
        r->at += prefix;
        status = take_numbers(r, numbered[i].field);
        if (status == ACR_OK && *r->at != ':' && *r->at != '\0')
            return syntax_error(r, "unexpected character after the number");
        return status;
    }
    const char *hint = acr__dtype_hint(start, length);
    char reason[64] = "unknown field";
    if (hint)
        snprintf(reason, sizeof reason, "unknown field; the element type is called %s", hint);
    return syntax_error(r, reason);
}

static acr_status read_fields(reader *r)
{
    for (;;) {
        const acr_status status = read_field(r);
        if (status != ACR_OK)
            return status;
        if (*r->at == '\0')
            break;
        r->at++; /* the ':' */
    }
    static const struct {
        unsigned field;
        const char *missing;
    } required[] = {{SEEN_B, "the batch (bN) is missing"},
                    {SEEN_H, "the heads (hN or hN/M) are missing"},
                    {SEEN_S, "the lengths (sN or sN/M) are missing"},
                    {SEEN_D, "the head dim (dN or dN/M) is missing"}};
    for (size_t i = 0; i < sizeof required / sizeof required[0]; i++)
        if (!(r->seen & required[i].field))
            return syntax_error(r, required[i].missing);
    return ACR_OK;
}

acr_status acr_problem_parse(acr_problem *out, const char *text, size_t *position)
{
    if (!out || !text)
        return acr__fail(ACR_INVALID, "%s is NULL", out ? "text" : "out");
    acr_problem p = ACR_PROBLEM_INIT;
    reader r = {text, text, 0, &p};
    acr_status status = read_fields(&r);
    acr_problem canonical;
    if (status == ACR_OK)
        status = acr_problem_canonical(&canonical, &p);
    if (status != ACR_OK) {
        if (position)
            *position = (size_t)(r.at - text);
        return status;
    }
    *out = p;
    return ACR_OK;
}
