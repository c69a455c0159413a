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

#include "backward.h"
#include "buffers.h"
#include "error.h"
#include "paging.h"

enum {
    DEFAULT_ALIGNMENT = 16,
    MAX_ALIGNMENT = 256
};
static const int64_t MAX_EXTENT = INT32_MAX;
static const int32_t MAX_RANGES = 65536;
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
    case ACR_BOOL8:
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
    case ACR_BOOL8:
        return "bool8";
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

/* Returns how many there are. A packed batch is one entry with as many rows as offsets can name, and a cache has as
 * many pages as a table can: how many there are is known at the execution. Values inside keys have the keys' rows. */
static int tensors_of(const acr_problem *p, acr__tensor list[ACR__TENSORS_MOST])
{
    const acr__rows longest = {p->q_len, p->kv_len, MAX_EXTENT, 0}, any = {MAX_EXTENT, MAX_EXTENT, MAX_EXTENT, 0};
    const int count = acr__tensor_count(p);
    for (int i = 0; i < count; i++)
        list[i] = acr__tensor_of(p, acr__tensors[i], p->flags & ACR_PACKED ? any : longest);
    if (p->flags & ACR_V_IN_K)
        list[2].dim = p->qk_dim;
    return count;
}

/* Equal as far as they matter: the stride of an extent of 1 is never used. */
static bool same_strides(const acr__tensor *t, const acr_strides *s)
{
    return (t->batch == 1 || t->strides.batch == s->batch) && (t->heads == 1 || t->strides.head == s->head) &&
           (t->rows == 1 || t->strides.row == s->row);
}

/* Fills in packed strides where all are zero, and checks the rest. */
static acr_status complete_strides(acr__tensor *t, acr_layout layout)
{
    acr_strides *s = &t->strides;
    if (s->batch == 0 && s->head == 0 && s->row == 0)
        *s = acr__packed_strides(t, layout);
    if ((t->batch > 1 && s->batch < 0) || (t->heads > 1 && s->head < 0) || (t->rows > 1 && s->row < 0))
        return acr__fail(ACR_INVALID, "%s strides (%lld, %lld, %lld): a stride must not be negative", t->name,
                         (long long)s->batch, (long long)s->head, (long long)s->row);
    if (acr__tensor_bytes(t) > MAX_SPAN)
        return acr__fail(ACR_INVALID, "%s spans more than 2^61 bytes", t->name);
    if (t->is_output && !acr__is_self_disjoint(t))
        return acr__fail(ACR_INVALID, "%s strides (%lld, %lld, %lld): the output would overlap itself", t->name,
                         (long long)s->batch, (long long)s->head, (long long)s->row);
    return ACR_OK;
}

static bool all_packed(const acr__tensor *list, int count, acr_layout layout)
{
    for (int i = 0; i < count; i++) {
        const acr_strides packed = acr__packed_strides(&list[i], layout);
        if (!same_strides(&list[i], &packed))
            return false;
    }
    return true;
}

/* One form for equal strides: those of extents of 1 take their packed value, and the layout says bshd only when it
 * describes all of them. */
static void normalise_strides(acr_problem *p, const acr__tensor *list, int count)
{
    if (!(p->flags & ACR_PACKED)) /* which has but the one */
        p->layout = !all_packed(list, count, ACR_BHSD) && all_packed(list, count, ACR_BSHD) ? ACR_BSHD : ACR_BHSD;
    for (int i = 0; i < count; i++) {
        const acr_strides packed = acr__packed_strides(&list[i], p->layout);
        acr_strides *s = acr__strides_of(p, acr__tensors[i]);
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
    static const size_t earlier[] = {offsetof(acr_problem, kv_dtype), offsetof(acr_problem, softcap),
                                     offsetof(acr_problem, window_left)};
    const acr_status status =
        acr__read_struct(out, sizeof *out, in, in->size, earlier, 3, "problem", "ACR_PROBLEM_INIT");
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
    if (p->pass != ACR_FORWARD && p->pass != ACR_BACKWARD)
        return acr__fail(ACR_INVALID, "pass is %d, must be ACR_FORWARD (0) or ACR_BACKWARD (1)", (int)p->pass);
    if (acr__dtype_bytes(p->dtype) == 0 || p->dtype == ACR_BOOL8)
        return acr__fail(ACR_INVALID, "dtype is %d, must be ACR_F32, ACR_F16, ACR_BF16 or ACR_E4M3", (int)p->dtype);
    const bool e4m3 = p->dtype == ACR_E4M3;
    if (e4m3 ? p->out_dtype != ACR_F16 && p->out_dtype != ACR_BF16
             : p->out_dtype != p->dtype && p->out_dtype != ACR_F32)
        return acr__fail(ACR_INVALID, "out_dtype is %d (%s), must be %s", (int)p->out_dtype,
                         acr__dtype_text(p->out_dtype),
                         e4m3 ? "f16 or bf16 for e4m3 inputs" : "f32 or the type of the inputs");
    if (p->mask != ACR_MASK_NONE && p->mask != ACR_MASK_CAUSAL && p->mask != ACR_MASK_CAUSAL_TOP_LEFT)
        return acr__fail(ACR_INVALID, "mask is %d, must be an acr_mask", (int)p->mask);
    if (p->layout != ACR_BHSD && p->layout != ACR_BSHD)
        return acr__fail(ACR_INVALID, "layout is %d, must be ACR_BHSD or ACR_BSHD", (int)p->layout);
    const uint32_t known = ACR_WANT_LSE | ACR_KV_LENS | ACR_PACKED | ACR_KV_STARTS | ACR_SINKS | ACR_ALIBI |
                           ACR_RANGES | ACR_TREE | ACR_PAGED | ACR_V_IN_K | ACR_INVARIANT | ACR_FAST_ATOMICS;
    if (p->flags & ~known)
        return acr__fail(ACR_INVALID, "flags 0x%x has bits that mean nothing (0x%x)", p->flags, p->flags & ~known);
    if (p->window_left < 0 || p->window_right < 0)
        return acr__fail(ACR_INVALID, "%s is %lld, must not be negative (0 for no limit)",
                         p->window_left < 0 ? "window_left" : "window_right",
                         (long long)(p->window_left < 0 ? p->window_left : p->window_right));
    const uint32_t a = p->alignment;
    /* an element of q, k and v; of e4m3 inputs one of o, too */
    const uint32_t least = (uint32_t)acr__dtype_bytes(e4m3 ? p->out_dtype : p->dtype);
    if (a > MAX_ALIGNMENT || (a & (a - 1)) != 0 || a < least)
        return acr__fail(ACR_INVALID, "alignment is %u, must be a power of two from one element (%u bytes) to %d", a,
                         least, MAX_ALIGNMENT);
    return ACR_OK;
}

/* What changes scores, and what hides or adds keys beyond a mask and a window. */
static acr_status check_terms(const acr_problem *p)
{
    if (acr__buffer_bytes(p, ACR__TREE, (acr__rows){0}) > MAX_SPAN)
        return acr__fail(ACR_INVALID, "tree spans more than 2^61 bytes");
    if (!(p->softcap >= 0.0f) || !isfinite(p->softcap))
        return acr__fail(ACR_INVALID, "softcap is %g, must be positive and finite (0 for none)", (double)p->softcap);
    if (p->chunk < 0)
        return acr__fail(ACR_INVALID, "chunk is %lld, must not be negative (0 for no limit)", (long long)p->chunk);
    if (p->flags & ACR_RANGES ? p->ranges < 1 || p->ranges > MAX_RANGES : p->ranges != 0)
        return acr__fail(ACR_INVALID,
                         p->flags & ACR_RANGES ? "ranges is %d, with ACR_RANGES it must be 1 to %d"
                                               : "ranges is %d, without ACR_RANGES it must be 0",
                         (int)p->ranges, (int)MAX_RANGES);
    if (p->flags & ACR_KV_STARTS && p->flags & ACR_PACKED)
        return acr__fail(ACR_INVALID, "flags: ACR_KV_STARTS with ACR_PACKED; the offsets already say where keys begin");
    if (p->reserved != 0 || p->reserved_2 != 0)
        return acr__fail(ACR_INVALID, "reserved is %u, must be 0", p->reserved | p->reserved_2);
    return ACR_OK;
}

/* The bias, whose strides broadcast where they are 0: that of an extent of 1 becomes 0, so that equal biases have one
 * form. */
static acr_status complete_bias(acr_problem *p)
{
    acr_strides *s = &p->bias;
    if (p->bias_dtype == ACR_DTYPE_DEFAULT) {
        if (s->batch == 0 && s->head == 0 && s->row == 0)
            return ACR_OK;
        return acr__fail(ACR_INVALID, "bias strides (%lld, %lld, %lld) are given, bias_dtype is 0: there is no bias",
                         (long long)s->batch, (long long)s->head, (long long)s->row);
    }
    if (p->bias_dtype != ACR_F32 && p->bias_dtype != ACR_F16 && p->bias_dtype != ACR_BF16 && p->bias_dtype != ACR_BOOL8)
        return acr__fail(ACR_INVALID, "bias_dtype is %d, must be ACR_F32, ACR_F16, ACR_BF16, ACR_BOOL8 or 0",
                         (int)p->bias_dtype);
    if (p->batch == 1)
        s->batch = 0;
    if (p->q_heads == 1)
        s->head = 0;
    if (p->q_len == 1)
        s->row = 0;
    if (s->batch < 0 || s->head < 0 || s->row < 0)
        return acr__fail(ACR_INVALID, "bias strides (%lld, %lld, %lld): a stride must not be negative",
                         (long long)s->batch, (long long)s->head, (long long)s->row);
    if (acr__span_bytes(p->batch, p->q_heads, p->q_len, p->kv_len, s, p->bias_dtype) > MAX_SPAN)
        return acr__fail(ACR_INVALID, "bias spans more than 2^61 bytes");
    return ACR_OK;
}

/* What a packed batch cannot be combined with. Before defaults are filled in: a batch stride that was given shows. */
static acr_status check_packed(const acr_problem *p)
{
    if (!(p->flags & ACR_PACKED))
        return ACR_OK;
    const bool paged = p->flags & ACR_PAGED; /* lengths and a table say where keys lie */
    if (p->flags & ACR_KV_LENS && !paged)
        return acr__fail(ACR_INVALID, "flags: ACR_PACKED with ACR_KV_LENS; the offsets already say the key lengths");
    if (p->layout != ACR_BSHD)
        return acr__fail(ACR_INVALID, "layout is ACR_BHSD, with ACR_PACKED it must be ACR_BSHD: [total, heads, dim]");
    acr__tensor list[ACR__TENSORS_MOST];
    const int count = tensors_of(p, list);
    for (int i = 0; i < count; i++)
        if (list[i].batch == 1 && list[i].strides.batch != 0)
            return acr__fail(ACR_INVALID,
                             "%s.batch stride is %lld, with ACR_PACKED it must be 0: offsets say where "
                             "an entry begins",
                             list[i].name, (long long)list[i].strides.batch);
    return ACR_OK;
}

static acr_status check_scales(acr_problem *p)
{
    if (!(p->scale > 0.0f) || !isfinite(p->scale))
        return acr__fail(ACR_INVALID, "scale is %g, must be positive and finite (0 for the default)", (double)p->scale);
    const bool e4m3 = p->dtype == ACR_E4M3, kv_e4m3 = acr__kv_dtype(p) == ACR_E4M3;
    struct {
        const char *name;
        float *value;
        bool scaled;
    } scales[] = {{"q_scale", &p->q_scale, e4m3}, {"k_scale", &p->k_scale, kv_e4m3}, {"v_scale", &p->v_scale, kv_e4m3}};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        float *value = scales[i].value;
        if (*value == 0.0f)
            *value = 1.0f;
        if (scales[i].scaled ? !(*value > 0.0f) || !isfinite(*value) : !(*value == 1.0f))
            return acr__fail(ACR_INVALID, "%s is %g, must be %s", scales[i].name, (double)*value,
                             scales[i].scaled ? "positive and finite" : "0 or 1: only e4m3 inputs have scales");
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

/* A chunk that holds every key and every position of a row hides nothing, and becomes 0; a longer one than that is as
 * good as the shortest of that kind. With a mask, rows that stand before the first key see none in any case; without
 * one, those are told apart by the chunk alone. After the mask has its name. */
static void canonical_chunk(acr_problem *p)
{
    const int64_t keys = p->kv_len, rows = p->mask == ACR_MASK_CAUSAL_TOP_LEFT ? p->q_len : 0;
    const int64_t whole = keys > rows ? keys : rows;
    const bool no_row_before =
        p->q_len == 1 || (p->q_len <= p->kv_len && !(p->flags & (ACR_KV_LENS | ACR_PACKED | ACR_KV_STARTS)));
    if (p->chunk >= whole)
        p->chunk = p->mask != ACR_MASK_NONE || no_row_before ? 0 : whole;
    if (p->chunk == 0)
        return;
    if (p->window_left >= p->chunk) /* the chunk hides these keys */
        p->window_left = 0;
    if (p->window_right >= p->chunk - 1)
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
        (status = acr__complete_backward(&p)) != ACR_OK || (status = check_terms(&p)) != ACR_OK ||
        (status = check_packed(&p)) != ACR_OK || (status = complete_bias(&p)) != ACR_OK ||
        (status = acr__complete_cache(&p)) != ACR_OK)
        return status;
    if (p.softcap == 0.0f)
        p.softcap = 0.0f; /* -0 is none, too */
    if (p.scale == 0.0f)
        p.scale = (float)(1.0 / sqrt((double)p.qk_dim));
    if ((status = check_scales(&p)) != ACR_OK)
        return status;
    canonical_window(&p);
    p.mask = canonical_mask(&p);
    canonical_chunk(&p);

    acr__tensor list[ACR__TENSORS_MOST];
    const int count = tensors_of(&p, list);
    for (int i = 0; i < count; i++) {
        status = complete_strides(&list[i], p.layout);
        if (status != ACR_OK)
            return status;
        *acr__strides_of(&p, acr__tensors[i]) = list[i].strides;
    }
    normalise_strides(&p, list, count);
    *out = p;
    return ACR_OK;
}

uint64_t acr__problem_digest(const acr_problem *canonical)
{
    /* The struct has no padding, so its bytes are its value. */
    _Static_assert(sizeof(acr_problem) == 16 * sizeof(uint32_t) + 37 * sizeof(int64_t) + 4 * sizeof(float),
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

/* ---- Decimals: a softcap ---- */

/* digits * 10^exponent, as the text form means it: writing finds digits for which reading gives the same float. */
static float decimal_value(int64_t digits, int exponent)
{
    return (float)((double)digits * pow(10.0, exponent));
}

/* The shortest decimal that reads as the same number: "50", "0.5", "1e-9". No locale's point comes into it. */
static void put_decimal(writer *w, float value)
{
    const int magnitude = (int)floor(log10((double)value));
    int64_t digits = 0;
    int exponent = 0;
    for (int count = 1; count <= 17; count++) {
        exponent = magnitude + 1 - count;
        digits = llround((double)value / pow(10.0, exponent));
        if (decimal_value(digits, exponent) == value)
            break;
    }
    if (exponent >= 0 && magnitude < 9) {
        put(w, "%lld", (long long)llround((double)digits * pow(10.0, exponent)));
    } else if (exponent < 0 && magnitude >= -4 && exponent >= -9) {
        const int64_t one = (int64_t)llround(pow(10.0, -exponent));
        put(w, "%lld.%0*lld", (long long)(digits / one), -exponent, (long long)(digits % one));
    } else {
        put(w, "%llde%d", (long long)digits, exponent);
    }
}

/* ":bias-bf16/0,0,64" or ":mask/0,0,64". */
static void put_bias(writer *w, const acr_problem *p)
{
    if (p->bias_dtype == ACR_BOOL8)
        put(w, ":mask");
    else
        put(w, ":bias-%s", acr__dtype_text(p->bias_dtype));
    put(w, "/%lld,%lld,%lld", (long long)p->bias.batch, (long long)p->bias.head, (long long)p->bias.row);
}

/* What is beyond a mask and a window. */
static void put_terms(writer *w, const acr_problem *p)
{
    if (p->chunk)
        put(w, ":chunk%lld", (long long)p->chunk);
    if (p->flags & ACR_RANGES)
        put(w, ":ranges%d", (int)p->ranges);
    if (p->flags & ACR_TREE)
        put(w, ":tree");
    if (p->softcap > 0.0f) {
        put(w, ":cap");
        put_decimal(w, p->softcap);
    }
    if (p->bias_dtype != ACR_DTYPE_DEFAULT)
        put_bias(w, p);
    if (p->flags & ACR_ALIBI)
        put(w, ":alibi");
    if (p->flags & ACR_SINKS)
        put(w, ":sinks");
}

/* Where keys and values lie. */
static void put_cache(writer *w, const acr_problem *p)
{
    if (p->flags & ACR_PAGED)
        put(w, ":page%d", (int)p->page);
    if (p->kv_dtype != ACR_DTYPE_DEFAULT)
        put(w, ":kv-%s", acr__dtype_text(p->kv_dtype));
    if (p->flags & ACR_V_IN_K)
        put(w, ":v-in-k");
    if (p->flags & ACR_INVARIANT)
        put(w, ":invariant");
}

static void put_problem(writer *w, acr_problem *p)
{
    if (p->pass == ACR_BACKWARD)
        put(w, "bwd:");
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
    put_terms(w, p);
    if (p->layout == ACR_BSHD)
        put(w, ":bshd");
    acr__tensor list[ACR__TENSORS_MOST];
    const int count = tensors_of(p, list);
    for (int i = 0; i < count; i++) {
        const acr_strides packed = acr__packed_strides(&list[i], p->layout), *s = &list[i].strides;
        const char *text = acr__tensors[i] == ACR__D_O ? "do" : list[i].name;
        if (acr__tensors[i] == ACR__V && p->flags & ACR_V_IN_K) /* those of k */
            continue;
        if (!same_strides(&list[i], &packed))
            put(w, ":%ss=%lld,%lld,%lld", text, (long long)s->batch, (long long)s->head, (long long)s->row);
    }
    if (p->alignment != DEFAULT_ALIGNMENT)
        put(w, ":align%u", p->alignment);
    if (p->dtype == ACR_E4M3 && p->out_dtype == ACR_BF16)
        put(w, ":obf16");
    if (p->dtype != ACR_F32 && p->out_dtype == ACR_F32)
        put(w, ":of32");
    if (p->pass == ACR_BACKWARD && p->grad_dtype != p->dtype)
        put(w, ":grad-%s", acr__dtype_text(p->grad_dtype));
    if (p->flags & ACR_FAST_ATOMICS)
        put(w, ":atomics");
    if (p->flags & ACR_WANT_LSE && p->pass != ACR_BACKWARD) /* which always reads it */
        put(w, ":lse");
    if (p->flags & ACR_KV_LENS)
        put(w, ":kvlens");
    if (p->flags & ACR_KV_STARTS)
        put(w, ":kvstarts");
    if (p->flags & ACR_PACKED)
        put(w, ":packed");
    put_cache(w, p);
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
    SEEN_NONE = 0,
    SEEN_PASS,
    SEEN_DTYPE,
    SEEN_B,
    SEEN_H,
    SEEN_S,
    SEEN_D,
    SEEN_MASK,
    SEEN_LAYOUT,
    SEEN_Q_STRIDES,
    SEEN_K_STRIDES,
    SEEN_V_STRIDES,
    SEEN_O_STRIDES,
    SEEN_DO_STRIDES,
    SEEN_DQ_STRIDES,
    SEEN_DK_STRIDES,
    SEEN_DV_STRIDES,
    SEEN_ALIGN,
    SEEN_OUT,
    SEEN_LSE,
    SEEN_KV_LENS,
    SEEN_PACKED,
    SEEN_WINDOW,
    SEEN_CHUNK,
    SEEN_RANGES,
    SEEN_TREE,
    SEEN_CAP,
    SEEN_BIAS,
    SEEN_ALIBI,
    SEEN_SINKS,
    SEEN_KV_STARTS,
    SEEN_GRAD,
    SEEN_ATOMICS,
    SEEN_PAGE,
    SEEN_KV_DTYPE,
    SEEN_V_IN_K,
    SEEN_INVARIANT
};

typedef struct reader {
    const char *text, *at;
    uint64_t seen; /* a bit for each field */
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

/* "0,64,8" */
static acr_status read_three(reader *r, acr_strides *strides)
{
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
    return ACR_OK;
}

static acr_status read_strides(reader *r, acr_strides *strides)
{
    const char *first = r->at;
    const acr_status status = read_three(r, strides);
    if (status != ACR_OK)
        return status;
    if (strides->batch == 0 && strides->head == 0 && strides->row == 0) {
        r->at = first;
        return syntax_error(r, "strides must not all be 0");
    }
    return ACR_OK;
}

/* "50", "0.5", "1e-3": a softcap, positive. */
static acr_status read_softcap(reader *r)
{
    enum {
        DIGITS_MAX = 17
    };
    const char *first = r->at;
    int64_t digits = 0, power = 0;
    int exponent = 0, count = 0;
    bool has_point = false;
    for (; (*r->at >= '0' && *r->at <= '9') || (*r->at == '.' && !has_point); r->at++) {
        if (*r->at == '.') {
            has_point = true;
            continue;
        }
        digits = 10 * digits + (*r->at - '0');
        exponent -= has_point;
        if (count++ >= DIGITS_MAX)
            return syntax_error(r, "number has too many digits");
    }
    if (count == 0 || r->at[-1] == '.')
        return syntax_error(r, "expected a decimal number");
    if (*r->at == 'e') {
        r->at++;
        const bool negative = *r->at == '-';
        r->at += negative;
        const acr_status status = read_number(r, &power);
        if (status != ACR_OK)
            return status;
        power = power > 1000 ? 1000 : power;
        exponent += (int)(negative ? -power : power);
    }
    r->problem->softcap = decimal_value(digits, exponent);
    if (!(r->problem->softcap > 0.0f) || !isfinite(r->problem->softcap)) {
        r->at = first;
        return syntax_error(r, "a softcap must be positive and finite, as a float32");
    }
    return ACR_OK;
}

/* "1024": keys. */
static acr_status read_chunk(reader *r)
{
    const char *first = r->at;
    const acr_status status = read_number(r, &r->problem->chunk);
    if (status == ACR_OK && r->problem->chunk == 0) {
        r->at = first;
        return syntax_error(r, "a chunk of 0 keys: say chunkN");
    }
    return status;
}

static acr_status read_ranges(reader *r)
{
    const char *first = r->at;
    int64_t count = 0;
    const acr_status status = read_number(r, &count);
    if (status == ACR_OK && (count < 1 || count > MAX_RANGES)) {
        r->at = first;
        return syntax_error(r, "ranges must be 1 to 65536");
    }
    r->problem->ranges = (int32_t)count;
    r->problem->flags |= ACR_RANGES;
    return status;
}

/* "16": keys in a page. */
static acr_status read_page(reader *r)
{
    int64_t page = 0;
    const acr_status status = read_extent(r, &page);
    r->problem->page = (int32_t)page;
    r->problem->flags |= ACR_PAGED;
    return status;
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
    if (is_field(at, length, "fwd") || is_field(at, length, "bwd")) {
        p->pass = at[0] == 'f' ? ACR_FORWARD : ACR_BACKWARD;
        return SEEN_PASS;
    }
    if (is_field(at, length, "kv-e4m3")) {
        p->kv_dtype = ACR_E4M3;
        return SEEN_KV_DTYPE;
    }
    if (is_field(at, length, "grad-f32")) {
        p->grad_dtype = ACR_F32;
        return SEEN_GRAD;
    }
    if (is_field(at, length, "causal") || is_field(at, length, "causal-tl")) {
        p->mask = length == strlen("causal") ? ACR_MASK_CAUSAL : ACR_MASK_CAUSAL_TOP_LEFT;
        return SEEN_MASK;
    }
    if (is_field(at, length, "bhsd") || is_field(at, length, "bshd")) {
        p->layout = at[1] == 'h' ? ACR_BHSD : ACR_BSHD;
        return SEEN_LAYOUT;
    }
    if (is_field(at, length, "of16") || is_field(at, length, "obf16") || is_field(at, length, "of32")) {
        p->out_dtype = at[1] == 'b' ? ACR_BF16 : at[2] == '1' ? ACR_F16 : ACR_F32;
        return SEEN_OUT;
    }
    static const struct {
        const char *word;
        uint32_t flag;
        unsigned field;
    } flags[] = {{"lse", ACR_WANT_LSE, SEEN_LSE},     {"kvlens", ACR_KV_LENS, SEEN_KV_LENS},
                 {"packed", ACR_PACKED, SEEN_PACKED}, {"kvstarts", ACR_KV_STARTS, SEEN_KV_STARTS},
                 {"sinks", ACR_SINKS, SEEN_SINKS},    {"alibi", ACR_ALIBI, SEEN_ALIBI},
                 {"tree", ACR_TREE, SEEN_TREE},       {"atomics", ACR_FAST_ATOMICS, SEEN_ATOMICS},
                 {"v-in-k", ACR_V_IN_K, SEEN_V_IN_K}, {"invariant", ACR_INVARIANT, SEEN_INVARIANT}};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        if (is_field(at, length, flags[i].word)) {
            p->flags |= flags[i].flag;
            return flags[i].field;
        }
    return 0;
}

/* Notes a field as seen; a second one is an error. */
static acr_status once(reader *r, unsigned field, const char *start)
{
    if (r->seen >> field & 1) {
        r->at = start;
        return syntax_error(r, "this field is given twice");
    }
    r->seen |= UINT64_C(1) << field;
    return ACR_OK;
}

/* Takes a field that carries numbers: its name has just been recognised, its value follows. */
static acr_status take_numbers(reader *r, unsigned field)
{
    acr_problem *p = r->problem;
    acr_strides *const strides[] = {&p->q, &p->k, &p->v, &p->o, &p->d_o, &p->dq, &p->dk, &p->dv};
    if (field >= SEEN_Q_STRIDES && field <= SEEN_DV_STRIDES)
        return read_strides(r, strides[field - SEEN_Q_STRIDES]);
    switch (field) {
    case SEEN_B:
        return read_extent(r, &p->batch);
    case SEEN_H:
        return read_pair(r, &p->q_heads, &p->kv_heads);
    case SEEN_S:
        return read_pair(r, &p->q_len, &p->kv_len);
    case SEEN_D:
        return read_pair(r, &p->qk_dim, &p->v_dim);
    case SEEN_WINDOW:
        return read_window(r);
    case SEEN_CHUNK:
        return read_chunk(r);
    case SEEN_RANGES:
        return read_ranges(r);
    case SEEN_PAGE:
        return read_page(r);
    case SEEN_CAP:
        return read_softcap(r);
    case SEEN_BIAS:
        return read_three(r, &p->bias);
    default:
        return read_alignment(r);
    }
}

static acr_status read_field(reader *r)
{
    static const struct {
        const char *prefix;
        unsigned field;
        acr_dtype bias_dtype;
    } numbered[] = {{"qs=", SEEN_Q_STRIDES, ACR_DTYPE_DEFAULT},
                    {"ks=", SEEN_K_STRIDES, ACR_DTYPE_DEFAULT},
                    {"vs=", SEEN_V_STRIDES, ACR_DTYPE_DEFAULT},
                    {"os=", SEEN_O_STRIDES, ACR_DTYPE_DEFAULT},
                    {"dos=", SEEN_DO_STRIDES, ACR_DTYPE_DEFAULT},
                    {"dqs=", SEEN_DQ_STRIDES, ACR_DTYPE_DEFAULT},
                    {"dks=", SEEN_DK_STRIDES, ACR_DTYPE_DEFAULT},
                    {"dvs=", SEEN_DV_STRIDES, ACR_DTYPE_DEFAULT},
                    {"win", SEEN_WINDOW, ACR_DTYPE_DEFAULT},
                    {"align", SEEN_ALIGN, ACR_DTYPE_DEFAULT},
                    {"chunk", SEEN_CHUNK, ACR_DTYPE_DEFAULT},
                    {"ranges", SEEN_RANGES, ACR_DTYPE_DEFAULT},
                    {"page", SEEN_PAGE, ACR_DTYPE_DEFAULT},
                    {"cap", SEEN_CAP, ACR_DTYPE_DEFAULT},
                    {"bias-f32/", SEEN_BIAS, ACR_F32},
                    {"bias-f16/", SEEN_BIAS, ACR_F16},
                    {"bias-bf16/", SEEN_BIAS, ACR_BF16},
                    {"mask/", SEEN_BIAS, ACR_BOOL8},
                    {"b", SEEN_B, ACR_DTYPE_DEFAULT},
                    {"h", SEEN_H, ACR_DTYPE_DEFAULT},
                    {"s", SEEN_S, ACR_DTYPE_DEFAULT},
                    {"d", SEEN_D, ACR_DTYPE_DEFAULT}};
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
    if (is_field(start, length, "mask") || is_field(start, length, "bias"))
        return syntax_error(r, "a bias is bias-bf16/B,H,S (f32, f16, bf16), a boolean mask is mask/B,H,S");
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
        if (numbered[i].field == SEEN_BIAS)
            r->problem->bias_dtype = numbered[i].bias_dtype;
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
        if (!(r->seen >> required[i].field & 1))
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
    if (status == ACR_OK && p.flags & ACR_V_IN_K)
        p.scale = (float)(1.0 / sqrt((double)p.qk_dim));
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
