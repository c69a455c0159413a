/* The judge: attention computed plainly on the exact stored inputs, in float64, and the unfused float32
 * computation whose error sets the tolerance of every kernel. Plain does not mean slow: K is transposed once for
 * each key/value head, so that the inner loops run over vectors.
 *
 * Both go row by row:   scores -> softmax over the keys this row sees -> weighted sum of those keys' values. Keys
 * a row does not see are not touched, so that whatever they hold, NaN included, stays out of it. */
#include "oracle.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "internal.h"

/* A softmax weight as it is stored, times a factor, between the two products of an unfused computation. */
static float round_weight(acr_dtype dtype, float weight, float grid)
{
    if (dtype == ACR_F32 || isnan(weight)) {
        return weight;
    }
    return (float)acr__round_magnitude(dtype, weight * grid) / grid;
}

/* ---- One key/value head, widened ------------------------------------------------------------------------------- */

/* Vectors of one cache line. Rows of the widened tensors are padded with zeros to whole vectors. */
typedef double doubles __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(64)));
enum {
    DOUBLES = 8,
    FLOATS = 16
};

/* Where a row's arithmetic happens: everything double, or everything float. */
typedef enum precision {
    IN_DOUBLE,
    IN_FLOAT
} precision;

/* The operands of the rows of one batch entry and key/value head, and the scratch of one row, in the chosen
 * precision. */
typedef struct workspace {
    precision precision;
    int64_t kv_padded, v_padded; /* elements */
    void *k;                     /* [qk_dim, kv_padded]: transposed */
    void *v;                     /* [kv_len, v_padded] */
    void *q;                     /* [qk_dim] */
    void *scores;                /* [kv_padded] */
    void *out;                   /* [v_padded] */
    bool spread;                 /* oracle_spread is asked; else the next four are NULL */
    void *squares;               /* [kv_padded]: of a score, the sum of the squares of its products */
    void *raw;                   /* [kv_padded]: scores, scaled */
    void *finals;                /* [kv_padded]: scores as the softmax has them */
    void *sums;                  /* [3, v_padded] */
    bool *seen;                  /* [kv_padded]: whether the row sees the key */
    double sum;             /* of the last row's weights beside its largest score's or sink's, the sink's included */
    int64_t batch, kv_head; /* whose k and v are loaded; -1 = none */
    float grid;             /* see oracle_unfused */
} workspace;

static int64_t round_up(int64_t value, int64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

static void close_workspace(workspace *w)
{
    FREE_ALL(w->k, w->v, w->q, w->scores, w->out, w->squares, w->raw, w->finals, w->seen, w->sums);
}

static acr_status open_workspace(workspace *w, precision in, const acr_problem *p, bool spread)
{
    const size_t element_bytes = in == IN_DOUBLE ? sizeof(double) : sizeof(float);
    const int64_t kv_padded = round_up(p->kv_len, FLOATS), v_padded = round_up(p->v_dim, FLOATS);
    const int64_t q_padded = round_up(p->qk_dim, FLOATS);
    *w = (workspace){.precision = in, .kv_padded = kv_padded, .v_padded = v_padded, .batch = -1, .kv_head = -1};
    w->spread = spread;
    const struct {
        void **at;
        int64_t elements;
    } parts[] = {{&w->k, p->qk_dim * kv_padded},
                 {&w->v, p->kv_len * v_padded},
                 {&w->q, q_padded},
                 {&w->scores, kv_padded},
                 {&w->out, v_padded},
                 {&w->squares, spread ? kv_padded : 0},
                 {&w->raw, spread ? kv_padded : 0},
                 {&w->finals, spread ? kv_padded : 0},
                 {&w->sums, spread ? 3 * v_padded : 0}};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const size_t bytes = (size_t)parts[i].elements * element_bytes;
        if (bytes == 0) {
            continue;
        }
        *parts[i].at = aligned_alloc(64, bytes);
        if (!*parts[i].at) {
            close_workspace(w);
            return acr__fail(ACR_NO_MEMORY, "oracle: no memory for %zu bytes", bytes);
        }
        memset(*parts[i].at, 0, bytes);
    }
    w->seen = calloc((size_t)kv_padded, sizeof *w->seen);
    if (!w->seen) {
        close_workspace(w);
        return acr__fail(ACR_NO_MEMORY, "oracle: no memory for %lld keys", (long long)kv_padded);
    }
    return ACR_OK;
}

static void put(const workspace *w, void *at, int64_t index, double value)
{
    if (w->precision == IN_DOUBLE) {
        ((double *)at)[index] = value;
    } else {
        ((float *)at)[index] = (float)value; /* exact: stored elements are at most float32 */
    }
}

/* So many stored elements, each `step` behind the one before it. */
static void put_row(const workspace *w, void *to, int64_t first, int64_t step, acr_dtype dtype, const void *from,
                    int64_t at, int64_t count)
{
    enum {
        CHUNK = 64
    };
    double chunk[CHUNK];
    for (int64_t done = 0; done < count; done += CHUNK) {
        const int64_t now = count - done < CHUNK ? count - done : CHUNK;
        acr__load_elements(chunk, dtype, from, at + done, now);
        for (int64_t i = 0; i < now; i++) {
            put(w, to, first + (done + i) * step, chunk[i]);
        }
    }
}

/* The rows of a batch entry that exist; of a packed batch counted from the tensors' first, its batch strides being
 * 0. */
typedef struct entry {
    int64_t batch;
    fwd_sequence q, kv;
    int64_t kv_start; /* the first key that exists, counted from the entry's first row of k */
} entry;

static entry entry_of(const acr_problem *p, const acr_buffers *b, int64_t batch)
{
    const bool packed = p->flags & ACR_PACKED;
    const fwd_sequence q =
        packed ? fwd_sequence_of(b->q_offsets, batch, b->q_total, p->q_len) : (fwd_sequence){0, p->q_len};
    if (packed && !(p->flags & ACR_PAGED)) {
        return (entry){batch, q, fwd_sequence_of(b->kv_offsets, batch, b->kv_total, p->kv_len), 0};
    }
    int64_t keys = b->kv_lens ? b->kv_lens[batch] : p->kv_len;
    keys = keys < 0 ? 0 : keys > p->kv_len ? p->kv_len : keys;
    const int64_t start = b->kv_starts ? b->kv_starts[batch] : 0;
    return (entry){batch, q, {0, keys}, start < 0 ? 0 : start > keys ? keys : start};
}

/* The first element of a key or value: of row j % page of the page that the table names, where there are pages. */
static int64_t element_of_key(const acr_problem *p, const acr_buffers *b, const entry *e, const acr_strides *s,
                              int64_t kv_head, int64_t j)
{
    if (!(p->flags & ACR_PAGED)) {
        return e->batch * s->batch + kv_head * s->head + (e->kv.first + j) * s->row;
    }
    const int64_t page = b->page_table[e->batch * b->table_stride + j / p->page];
    return page * s->batch + kv_head * s->head + j % p->page * s->row;
}

static void load_key_value_head(workspace *w, const acr_problem *p, const acr_buffers *b, const entry *e,
                                int64_t kv_head)
{
    if (w->batch == e->batch && w->kv_head == kv_head) {
        return;
    }
    w->batch = e->batch;
    w->kv_head = kv_head;
    const acr_dtype dtype = acr__kv_dtype(p);
    const bool v_in_k = p->flags & ACR_V_IN_K; /* a value is the first part of its key */
    for (int64_t j = 0; j < e->kv.length; j++) {
        const int64_t k_row = element_of_key(p, b, e, &p->k, kv_head, j);
        const int64_t v_row = v_in_k ? k_row : element_of_key(p, b, e, &p->v, kv_head, j);
        put_row(w, w->k, j, w->kv_padded, dtype, b->k, k_row, p->qk_dim);
        put_row(w, w->v, j * w->v_padded, 1, dtype, v_in_k ? b->k : b->v, v_row, p->v_dim);
    }
}

/* ---- One row --------------------------------------------------------------------------------------------------- */

/* sums[0..vectors) += factor[0] * rows[0][0..vectors) + factor[1] * rows[1]..., one row after another; rows are
 * `stride` vectors apart. Both products of attention have this form: scores over the dims of a query, outputs over
 * the keys of a row. */
#define ADD_ROWS(name, scalar, vector)                                                                                 \
    static void name(vector *sums, const scalar *factor, const vector *rows, int64_t stride, int64_t count,            \
                     int64_t vectors)                                                                                  \
    {                                                                                                                  \
        int64_t r = 0;                                                                                                 \
        for (; r + 4 <= count; r += 4) {                                                                               \
            const vector *row = rows + r * stride;                                                                     \
            for (int64_t x = 0; x < vectors; x++) {                                                                    \
                sums[x] = sums[x] + factor[r] * row[x] + factor[r + 1] * row[stride + x] +                             \
                          factor[r + 2] * row[2 * stride + x] + factor[r + 3] * row[3 * stride + x];                   \
            }                                                                                                          \
        }                                                                                                              \
        for (; r < count; r++) {                                                                                       \
            for (int64_t x = 0; x < vectors; x++) {                                                                    \
                sums[x] += factor[r] * rows[r * stride + x];                                                           \
            }                                                                                                          \
        }                                                                                                              \
    }
ADD_ROWS(add_rows_double, double, doubles)
ADD_ROWS(add_rows_float, float, floats)
#undef ADD_ROWS

/* What the products of stored elements are multiplied by. */
typedef struct scales {
    double scores, values;
} scales;

/* Of a key/value head of a batch entry: the problem's scales, and the buffers' where there are any. */
static scales scales_of(const acr_problem *p, const acr_buffers *b, int64_t batch, int64_t kv_head)
{
    const int64_t at = batch * p->kv_heads + kv_head;
    const bool v_in_k = p->flags & ACR_V_IN_K;
    const float *v_scales = v_in_k ? b->k_scales : b->v_scales;
    scales of = {(double)p->scale * p->q_scale * p->k_scale, v_in_k ? p->k_scale : p->v_scale};
    of.scores *= b->q_scales ? b->q_scales[at] : 1.0f;
    of.scores *= b->k_scales ? b->k_scales[at] : 1.0f;
    of.values *= v_scales ? v_scales[at] : 1.0f;
    return of;
}

/* ---- What a row sees, and what becomes of its scores ----------------------------------------------------------- */

/* Query i of an entry, at key `position`. */
typedef struct query_row {
    const acr_problem *p;
    const acr_buffers *b;
    const entry *e;
    int64_t head, i, position;
    scales of;
    double sink; /* -infinity = none */
} query_row;

/* Keys from first to end - 1. */
typedef struct span {
    int64_t first, end;
} span;

static int64_t floor_divide(int64_t a, int64_t b)
{
    return a / b - (a % b < 0 ? 1 : 0);
}

/* The limits that ranges may lift: mask, window, chunk. */
static bool is_within_limits(const query_row *r, int64_t j)
{
    const acr_problem *p = r->p;
    if (p->mask != ACR_MASK_NONE && j > r->position) {
        return false;
    }
    if (p->window_left > 0 && j <= r->position - p->window_left) {
        return false;
    }
    if (p->window_right > 0 && j > r->position + p->window_right) {
        return false;
    }
    const int64_t start = r->e->kv_start;
    return p->chunk == 0 || floor_divide(j - start, p->chunk) == floor_divide(r->position - start, p->chunk);
}

static bool share_a_range(const query_row *r, int64_t j)
{
    for (int64_t n = 0; n < r->p->ranges; n++) {
        const int32_t *range = &r->b->ranges[2 * (r->e->batch * r->p->ranges + n)];
        if (r->position >= range[0] && r->position < range[1] && j >= range[0] && j < range[1]) {
            return true;
        }
    }
    return false;
}

/* Trees speak of the entry's last keys, as many as it has queries. */
static bool is_in_tree(const query_row *r, int64_t j)
{
    const int64_t bit = j - (r->e->kv.length - r->e->q.length);
    if (!r->b->tree || bit < 0) {
        return true;
    }
    const int64_t row_bytes = (r->p->q_len + 7) / 8;
    const uint8_t *bits = r->b->tree + (r->e->batch * r->p->q_len + r->i) * row_bytes;
    return bits[bit / 8] >> (bit % 8) & 1;
}

/* The element of the bias, or of the boolean mask, for a key. */
static double bias_element(const query_row *r, int64_t j)
{
    const acr_strides *s = &r->p->bias;
    return acr__load_element(r->p->bias_dtype, r->b->bias,
                             r->e->batch * s->batch + r->head * s->head + r->i * s->row + j);
}

/* What a bias adds to a score; -infinity hides the key. A boolean mask adds nothing where it is true. */
static double bias_of(const query_row *r, int64_t j)
{
    if (r->p->bias_dtype == ACR_DTYPE_DEFAULT) {
        return 0;
    }
    const double element = bias_element(r, j);
    return r->p->bias_dtype != ACR_BOOL8 ? element : element != 0 ? 0 : -INFINITY;
}

static double alibi_of(const query_row *r, int64_t j)
{
    return r->b->slopes ? -(double)r->b->slopes[r->head] * fabs((double)(r->position - j)) : 0;
}

static bool sees(const query_row *r, int64_t j)
{
    return j >= r->e->kv_start && (is_within_limits(r, j) || share_a_range(r, j)) && is_in_tree(r, j) &&
           bias_of(r, j) != -INFINITY;
}

/* Marks the keys that the row sees; returns the keys from the first of them to the last, {0, 0} where there is none. */
static span mark_seen(const workspace *w, const query_row *r)
{
    span seen = {0, 0};
    for (int64_t j = 0; j < r->e->kv.length; j++) {
        w->seen[j] = sees(r, j);
        if (w->seen[j]) {
            seen.first = seen.end == 0 ? j : seen.first;
            seen.end = j + 1;
        }
    }
    return seen;
}

/* The next keys from `from` on that the row sees and that follow one another; empty behind the last. */
static span next_seen(const workspace *w, span keys, int64_t from)
{
    while (from < keys.end && !w->seen[from]) {
        from++;
    }
    int64_t end = from;
    while (end < keys.end && w->seen[end]) {
        end++;
    }
    return (span){from, end};
}

/* Softmax of the row's scores of `keys` in float64 and their weighted sum of values; returns the log-sum-exp.
 * At least one key. */
static double attend_double(workspace *w, const query_row *r, span keys, double *o)
{
    const acr_problem *p = r->p;
    const double cap = p->softcap;
    double *s = w->scores;
    memset(s, 0, (size_t)w->kv_padded * sizeof *s);
    add_rows_double(w->scores, w->q, w->k, w->kv_padded / DOUBLES, p->qk_dim, round_up(keys.end, DOUBLES) / DOUBLES);
    double max = r->sink;
    for (int64_t j = keys.first; j < keys.end; j++) {
        s[j] *= r->of.scores;
        if (w->spread) {
            ((double *)w->raw)[j] = s[j];
        }
        if (!w->seen[j]) {
            continue;
        }
        s[j] = (cap > 0 ? cap * tanh(s[j] / cap) : s[j]) + bias_of(r, j) + alibi_of(r, j);
        max = s[j] > max || isnan(s[j]) ? s[j] : max;
    }
    if (w->spread) {
        memcpy(w->finals, s, (size_t)keys.end * sizeof *s);
    }
    double sum = exp(r->sink - max);
    double *out = w->out;
    memset(out, 0, (size_t)w->v_padded * sizeof *out);
    for (span run = next_seen(w, keys, keys.first); run.first < run.end; run = next_seen(w, keys, run.end)) {
        for (int64_t j = run.first; j < run.end; j++) {
            s[j] = exp(s[j] - max);
            sum += s[j];
        }
        add_rows_double(w->out, s + run.first, (const doubles *)w->v + run.first * (w->v_padded / DOUBLES),
                        w->v_padded / DOUBLES, run.end - run.first, w->v_padded / DOUBLES);
    }
    for (int64_t d = 0; d < p->v_dim; d++) {
        o[d] = out[d] / sum * r->of.values;
    }
    w->sum = sum;
    return max + log(sum);
}

/* ---- How far a right kernel may be from a row ------------------------------------------------------------------ */

/* What the arithmetic of an input type loses. Rounding errors are independent, without bias, and uniform within half a
 * unit in the last place: their variance is a third of the square of that half. What tensor cores cut off has a bias:
 * it adds up. */
typedef struct losses {
    double weight;       /* half a unit in the last place of a weight of 1, as the second product takes it; 0 = none */
    double weight_least; /* the same of a weight too small for its type to be normal, beside the row's largest weight */
    double cut;          /* of a sum's magnitude, with every `cut_every` products */
    int cut_every;
    double cap; /* of a capped score: GPUs have a tanh of that relative error (PTX ISA, tanh.approx.f32), and kernels of
                   inputs narrower than float32 may take it */
} losses;

/* Hopper's tensor cores align the products of 8-bit operands to the largest and keep about 14 bits (DeepSeek-V3
 * Technical Report, section 3.3.2); those of 16-bit operands are summed in float32 without rounding. */
static losses losses_of(acr_dtype dtype)
{
    switch (dtype) {
    case ACR_F16:
        return (losses){0x1p-11, 0x1p-25, 0x1p-23, 16, 0x1p-11};
    case ACR_BF16:
        return (losses){0x1p-8, 0, 0x1p-23, 16, 0x1p-11};
    case ACR_E4M3:
        return (losses){0x1p-4, 0x1p-10, 0x1p-13, 32, 0x1p-11};
    default:
        return (losses){0, 0, 0, 1, 0};
    }
}

static const double rounding_variance = 0x1p-48 / 3; /* of a float32 of magnitude 1 */

typedef uint64_t words __attribute__((vector_size(64)));

/* Of each score, the sum of the squares of its products: how large partial sums are, whatever their order. */
static void sum_squared_products(const workspace *w, int64_t dims, int64_t vectors)
{
    const double *q = w->q;
    const doubles *k = w->k;
    doubles *squares = w->squares;
    memset(squares, 0, (size_t)vectors * sizeof *squares);
    for (int64_t d = 0; d < dims; d++) {
        for (int64_t x = 0; x < vectors; x++) {
            const doubles product = q[d] * k[d * (w->kv_padded / DOUBLES) + x];
            squares[x] += product * product;
        }
    }
}

/* A key's score on its way: q times k, scaled; after the softcap; as the softmax has it. */
typedef struct score_terms {
    double raw, capped, final;
    double slope;         /* of the softcap at raw, 1 without one: so much of an error of raw is left */
    double squared_terms; /* what is rounded by a few units in the last place on the way, squared */
} score_terms;

static score_terms terms_of_score(const query_row *r, int64_t j, double raw, double final)
{
    score_terms t = {raw, raw, final, 1, 0};
    if (final < ORACLE_LOWEST) {
        return (score_terms){0}; /* the bias alone, to the bit: nothing else of the score is left to be rounded */
    }
    const double cap = r->p->softcap, bias = bias_of(r, j), alibi = alibi_of(r, j);
    if (cap > 0) {
        t.capped = cap * tanh(raw / cap);
        t.slope = 1 - (t.capped / cap) * (t.capped / cap);
        t.squared_terms += 4 * t.slope * t.slope * raw * raw + 16 * t.capped * t.capped; /* a tanh within 4 units */
    }
    t.squared_terms += 4 * (bias * bias + alibi * alibi);
    if (bias != 0 || alibi != 0) {
        t.squared_terms += 4 * t.capped * t.capped;
    }
    return t;
}

/* What the error of one key's weight does to an output: variance per (v - o)^2 and per v^2, and the most per
 * |v - o|. */
typedef struct key_effect {
    double score_variance, weight_variance, score_most;
} key_effect;

static key_effect effect_of(const losses *l, double dims, double scale, const score_terms *score, double largest_score,
                            double squared_products, double weight, double largest_weight)
{
    const double raw = score->raw, slope = score->slope, final = score->final;
    /* The squares of the partial sums, summed over all of them: their mean over all orders of the products. */
    const double partial_sums = raw * raw * (dims / 3 + 0.5) + scale * scale * squared_products * (dims + 1) / 6;
    /* Each product's addition; the scaling and the difference to the maximum, twice each; an exponential within 4
     * units in the last place. */
    const double variance = rounding_variance * (slope * slope * partial_sums + score->squared_terms +
                                                 4 * (final * final + largest_score * largest_score) + 16);
    const double least = l->weight_least * largest_weight;
    const double rounding = weight * l->weight > least ? weight * l->weight : least;
    const double cut = slope * l->cut * (dims / l->cut_every) * (scale * sqrt(squared_products) + fabs(raw));
    return (key_effect){weight * weight * variance, rounding * rounding / 3,
                        weight * (0x1p-23 + cut + l->cap * fabs(score->capped))};
}

/* For the row that attend_double has just left in w. */
static void spread_of_row(workspace *w, const query_row *r, span keys, double *variance, double *most)
{
    const acr_problem *p = r->p;
    const scales *of = &r->of;
    const double *s = w->scores, *raw = w->raw, *finals = w->finals, *squares = w->squares;
    const losses l = losses_of(p->dtype);
    const int64_t vectors = w->v_padded / DOUBLES;
    doubles *out = w->out, *variances = w->sums, *squared = variances + vectors, *linear = squared + vectors;
    const words sign = (words){0} + ((uint64_t)1 << 63);
    const double sum = w->sum;
    double largest_score = isfinite(r->sink) ? fabs(r->sink) : 0;
    sum_squared_products(w, p->qk_dim, round_up(keys.end, DOUBLES) / DOUBLES);
    for (int64_t j = keys.first; j < keys.end; j++) {
        const bool is_larger =
            w->seen[j] && s[j] > 0.5 && finals[j] >= ORACLE_LOWEST && fabs(finals[j]) > largest_score;
        largest_score = is_larger ? fabs(finals[j]) : largest_score;
    }
    memset(w->sums, 0, 3 * (size_t)w->v_padded * sizeof(double));
    int64_t seen = 0;
    for (int64_t j = keys.first; j < keys.end; j++) {
        if (!w->seen[j]) {
            continue;
        }
        seen++;
        if (finals[j] == -INFINITY) {
            continue; /* its weight is 0, to the bit */
        }
        const double weight = s[j] / sum;
        const score_terms score = terms_of_score(r, j, raw[j], finals[j]);
        const key_effect e =
            effect_of(&l, (double)p->qk_dim, of->scores, &score, largest_score, squares[j], weight, 1 / sum);
        const doubles *v = (const doubles *)w->v + j * vectors;
        for (int64_t x = 0; x < vectors; x++) {
            const doubles from_output = v[x] - out[x] / sum, square = v[x] * v[x];
            variances[x] += e.score_variance * from_output * from_output + e.weight_variance * square;
            squared[x] += weight * weight * square;
            linear[x] += e.score_most * (doubles)((words)from_output & ~sign);
        }
    }
    const double count = (double)seen;
    const double additions = 2 * rounding_variance * count, cut = l.cut * (count / l.cut_every);
    for (int64_t d = 0; d < p->v_dim; d++) {
        const double o = ((double *)out)[d] / sum, partial = ((double *)squared)[d];
        /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference): called with a spread only */
        variance[d] = of->values * of->values * (((double *)variances)[d] + additions * (partial + o * o));
        most[d] = of->values * (((double *)linear)[d] + cut * (sqrt(partial) + fabs(o)));
    }
}

/* ---- The unfused computation ----------------------------------------------------------------------------------- */

/* The same as unfused kernels compute it: float32, and weights normalised, then rounded to the operand type,
 * between the two products. */
static void attend_float(workspace *w, const query_row *r, span keys, double *o)
{
    const acr_problem *p = r->p;
    float *s = w->scores;
    const float scale = (float)r->of.scores, cap = p->softcap, sink = (float)r->sink;
    memset(s, 0, (size_t)w->kv_padded * sizeof *s);
    add_rows_float(w->scores, w->q, w->k, w->kv_padded / FLOATS, p->qk_dim, round_up(keys.end, FLOATS) / FLOATS);
    float max = sink;
    for (int64_t j = keys.first; j < keys.end; j++) {
        if (!w->seen[j]) {
            continue;
        }
        s[j] *= scale;
        s[j] = (cap > 0 ? cap * tanhf(s[j] / cap) : s[j]) + (float)bias_of(r, j) + (float)alibi_of(r, j);
        max = s[j] > max || isnan(s[j]) ? s[j] : max;
    }
    float sum = expf(sink - max);
    for (int64_t j = keys.first; j < keys.end; j++) {
        s[j] = w->seen[j] ? expf(s[j] - max) : 0;
        sum += s[j];
    }
    float *out = w->out;
    memset(out, 0, (size_t)w->v_padded * sizeof *out);
    for (span run = next_seen(w, keys, keys.first); run.first < run.end; run = next_seen(w, keys, run.end)) {
        for (int64_t j = run.first; j < run.end; j++) {
            s[j] = round_weight(p->dtype, s[j] / sum, w->grid);
        }
        add_rows_float(w->out, s + run.first, (const floats *)w->v + run.first * (w->v_padded / FLOATS),
                       w->v_padded / FLOATS, run.end - run.first, w->v_padded / FLOATS);
    }
    for (int64_t d = 0; d < p->v_dim; d++) {
        uint32_t stored;
        acr__store_element(p->out_dtype, &stored, 0, out[d] * r->of.values);
        o[d] = acr__load_element(p->out_dtype, &stored, 0);
    }
}

/* The batch entry that a row of a packed batch belongs to; batch where there is none. Where garbage offsets make
 * sequences overlap, the first. */
static int64_t find_owner(const acr_problem *p, const acr_buffers *b, int64_t row)
{
    int64_t batch = 0;
    for (; batch < p->batch; batch++) {
        const fwd_sequence q = fwd_sequence_of(b->q_offsets, batch, b->q_total, p->q_len);
        if (row >= q.first && row < q.first + q.length) {
            break;
        }
    }
    return batch;
}

/* Where the results of a row go; lse, and variance and most together, may be NULL. */
typedef struct row_result {
    double *o, *lse, *variance, *most;
} row_result;

/* The row of a number, in an entry that is left in *e; e->batch is the problem's where the row is of no sequence. */
static query_row find_row(entry *e, const acr_problem *p, const acr_buffers *b, int64_t number)
{
    const bool packed = p->flags & ACR_PACKED;
    const int64_t q_rows = packed ? b->q_total : p->q_len, in_tensor = number % q_rows;
    const int64_t batch = packed ? find_owner(p, b, in_tensor) : number / q_rows / p->q_heads;
    *e = batch < p->batch ? entry_of(p, b, batch) : (entry){batch, {in_tensor, 1}, {0, 0}, 0};
    query_row r = {.p = p, .b = b, .e = e, .head = number / q_rows % p->q_heads, .i = in_tensor - e->q.first};
    r.position = p->mask == ACR_MASK_CAUSAL_TOP_LEFT ? r.i : r.i + e->kv.length - e->q.length;
    r.sink = b->sinks && batch < p->batch ? b->sinks[r.head] : -INFINITY;
    return r;
}

static void load_query(const workspace *w, const query_row *r)
{
    const acr_problem *p = r->p;
    const int64_t at = r->e->batch * p->q.batch + r->head * p->q.head + (r->e->q.first + r->i) * p->q.row;
    put_row(w, w->q, 0, 1, p->dtype, r->b->q, at, p->qk_dim);
}

/* One row, by its number. */
static void attend_row(workspace *w, const acr_problem *p, const acr_buffers *b, int64_t number, const row_result *to)
{
    entry e;
    query_row r = find_row(&e, p, b, number);
    const span keys = mark_seen(w, &r);
    double row_lse = r.sink;
    if (keys.end == 0) {
        memset(to->o, 0, (size_t)p->v_dim * sizeof *to->o);
        if (w->spread) {
            /* NOLINTNEXTLINE(clang-analyzer-core.NonNullParamChecker): a spread has both arrays */
            memset(to->variance, 0, (size_t)p->v_dim * sizeof *to->o);
            memset(to->most, 0, (size_t)p->v_dim * sizeof *to->o);
        }
    } else {
        const int64_t kv_head = r.head / (p->q_heads / p->kv_heads);
        r.of = scales_of(p, b, e.batch, kv_head);
        load_key_value_head(w, p, b, &e, kv_head);
        load_query(w, &r);
        if (w->precision == IN_DOUBLE) {
            row_lse = attend_double(w, &r, keys, to->o);
            if (w->spread) {
                spread_of_row(w, &r, keys, to->variance, to->most);
            }
        } else {
            attend_float(w, &r, keys, to->o);
        }
    }
    if (to->lse) {
        *to->lse = row_lse;
    }
}

/* ---- Many rows ------------------------------------------------------------------------------------------------- */

/* A row wanted and its place in the results. */
typedef struct wanted_row {
    int64_t row, place;
} wanted_row;

static int by_row(const void *a, const void *b)
{
    const int64_t left = ((const wanted_row *)a)->row, right = ((const wanted_row *)b)->row;
    return (left > right) - (left < right);
}

/* Ascending rows visit the key/value heads one after another, so that each is loaded once. */
static acr_status sort_rows(wanted_row **out, const int64_t *row_list, int64_t rows)
{
    wanted_row *wanted = malloc((size_t)rows * sizeof *wanted);
    if (!wanted) {
        return acr__fail(ACR_NO_MEMORY, "oracle: no memory for %lld rows", (long long)rows);
    }
    for (int64_t r = 0; r < rows; r++) {
        wanted[r] = (wanted_row){row_list[r], r};
    }
    qsort(wanted, (size_t)rows, sizeof *wanted, by_row);
    *out = wanted;
    return ACR_OK;
}

/* to: of row 0. */
static acr_status attend_rows(precision in, float grid, const acr_problem *p, const acr_buffers *b,
                              const int64_t *row_list, int64_t rows, const row_result *to)
{
    wanted_row *wanted = NULL;
    acr_status status = row_list && rows > 0 ? sort_rows(&wanted, row_list, rows) : ACR_OK;
    workspace w;
    if (status == ACR_OK) {
        status = open_workspace(&w, in, p, to->variance != NULL);
        w.grid = grid;
    }
    if (status == ACR_OK) {
        for (int64_t r = 0; r < rows; r++) {
            const wanted_row now = wanted ? wanted[r] : (wanted_row){r, r};
            const int64_t first = now.place * p->v_dim;
            const row_result of_row = {to->o + first, to->lse ? to->lse + now.place : NULL,
                                       to->variance ? to->variance + first : NULL, to->most ? to->most + first : NULL};
            attend_row(&w, p, b, now.row, &of_row);
        }
        close_workspace(&w);
    }
    free(wanted);
    return status;
}

acr_status oracle_forward(const acr_problem *problem, const acr_buffers *buffers, const int64_t *row_list, int64_t rows,
                          double *o, double *lse)
{
    const row_result to = {o, lse, NULL, NULL};
    return attend_rows(IN_DOUBLE, 1.0f, problem, buffers, row_list, rows, &to);
}

acr_status oracle_spread(const acr_problem *problem, const acr_buffers *buffers, const int64_t *row_list, int64_t rows,
                         double *o, double *lse, double *variance, double *most)
{
    const row_result to = {o, lse, variance, most};
    return attend_rows(IN_DOUBLE, 1.0f, problem, buffers, row_list, rows, &to);
}

acr_status oracle_unfused(const acr_problem *problem, const acr_buffers *buffers, const int64_t *row_list, int64_t rows,
                          float grid, double *o)
{
    const row_result to = {o, NULL, NULL, NULL};
    return attend_rows(IN_FLOAT, grid, problem, buffers, row_list, rows, &to);
}

/* ---- Gradients --------------------------------------------------------------------------------------------------- */

/* What a right kernel may lose: in sixteen bits it rounds weights and their gradients to the type of the inputs between
 * two products and takes the cap's tanh as acromion.h allows; everything else is float32. */
typedef struct gradient_losses {
    double weight, least; /* half a unit in the last place of 1, and what a number too small to be normal may lose */
    double cap;           /* relative error of the tanh */
} gradient_losses;

static gradient_losses gradient_losses_of(acr_dtype dtype)
{
    switch (dtype) {
    case ACR_F16:
        return (gradient_losses){0x1p-11, 0x1p-25, 0x1p-11};
    case ACR_BF16:
        return (gradient_losses){0x1p-8, 0x1p-126, 0x1p-11};
    default:
        return (gradient_losses){0x1p-24, 0x1p-126, 0x1p-21};
    }
}

/* One query row beside its key/value head, widened. */
typedef struct gradient_row {
    query_row r;
    const double *q, *d_o, *k, *v; /* [qk_dim], [v_dim], [keys, qk_dim], [keys, v_dim] */
    double q_norm, d_o_norm, lse, delta;
    int64_t seen; /* keys */
} gradient_row;

static double dot(const double *a, const double *b, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

/* sum[i] += factor * x[i], with the variance that an error of `error` in the factor and the additions of `count` terms
 * leave. */
static void add_term(double *sum, double *variance, const double *x, int64_t dims, double factor, double error,
                     int64_t count)
{
    const double additions = 0x1p-46 * (double)count * factor * factor + error * error;
    for (int64_t d = 0; d < dims; d++) {
        sum[d] += factor * x[d];
        variance[d] += additions * x[d] * x[d];
    }
}

/* Where the gradients of a row and of its key/value head go. */
typedef struct gradient_places {
    double *dq, *dk, *dv, *dq_variance, *dk_variance, *dv_variance;
} gradient_places;

/* Adds what a row and a key that it sees have to do with each other. */
static void add_pair(const gradient_row *g, int64_t j, const gradient_places *to)
{
    const acr_problem *p = g->r.p;
    const double *k = g->k + j * p->qk_dim, *v = g->v + j * p->v_dim, scale = p->scale, cap = p->softcap;
    const double k_norm = sqrt(dot(k, k, p->qk_dim)), v_norm = sqrt(dot(v, v, p->v_dim));
    const gradient_losses lost = gradient_losses_of(p->dtype);
    double s = scale * dot(g->q, k, p->qk_dim), slope = 1, slope_error = 0;
    const double raw = fabs(scale) * g->q_norm * k_norm, added = bias_of(&g->r, j) + alibi_of(&g->r, j);
    if (cap > 0) {
        const double t = tanh(s / cap);
        s = cap * t;
        slope = 1 - t * t;
        slope_error = 2 * t * t * lost.cap;
    }
    const double p_ij = exp(s + added - g->lse);
    const double of_score = 0x1p-24 * (4 + 2 * sqrt((double)p->qk_dim)) * (raw + fabs(g->lse) + fabs(added) + 16) +
                            (cap > 0 ? fabs(s) * lost.cap : 0);
    const double dp = dot(g->d_o, v, p->v_dim), ds = p_ij * (dp - g->delta) * slope;
    const double of_dp = 0x1p-24 * (4 + 2 * sqrt((double)p->v_dim)) * (g->d_o_norm * v_norm + fabs(g->delta)),
                 of_slope = p_ij * (dp - g->delta) * slope_error;
    const double p_error = hypot(p_ij * hypot(lost.weight, of_score), lost.least);
    const double of_small = 0x1p-126 * fabs(dp - g->delta); /* a weight as small as that may be 0 */
    const double ds_error =
        hypot(hypot(ds * hypot(lost.weight, of_score), p_ij * slope * of_dp), hypot(of_slope, lost.least + of_small));
    const int64_t rows = p->q_len * (p->q_heads / p->kv_heads);
    add_term(to->dq, to->dq_variance, k, p->qk_dim, scale * ds, scale * ds_error, g->seen);
    add_term(to->dk + j * p->qk_dim, to->dk_variance + j * p->qk_dim, g->q, p->qk_dim, scale * ds, scale * ds_error,
             rows);
    add_term(to->dv + j * p->v_dim, to->dv_variance + j * p->v_dim, g->d_o, p->v_dim, p_ij, p_error, rows);
}

/* Rows of a tensor as doubles, one after another. */
static void widen_rows(double *to, acr_dtype dtype, const void *base, int64_t first, int64_t row_stride, int64_t rows,
                       int64_t dims)
{
    for (int64_t row = 0; row < rows; row++) {
        acr__load_elements(to + row * dims, dtype, base, first + row * row_stride, dims);
    }
}

/* The scratch of one key/value head. */
typedef struct gradient_scratch {
    workspace w; /* `seen` alone */
    double *k, *v, *q, *d_o, *o;
    int64_t *wanted, wanted_count; /* keys, where not all are */
} gradient_scratch;

/* A row whose dq is not wanted: its part in the keys that are. */
static void add_wanted_pairs(const gradient_scratch *at, const gradient_row *g, const gradient_places *to)
{
    for (int64_t i = 0; i < at->wanted_count; i++) {
        if (sees(&g->r, at->wanted[i])) {
            add_pair(g, at->wanted[i], to);
        }
    }
}

static void add_all_pairs(const gradient_scratch *at, gradient_row *g, const gradient_places *to)
{
    const span keys = mark_seen(&at->w, &g->r);
    for (int64_t j = keys.first; j < keys.end; j++) {
        g->seen += at->w.seen[j];
    }
    for (int64_t j = keys.first; j < keys.end; j++) {
        if (at->w.seen[j]) {
            add_pair(g, j, to);
        }
    }
}

static void add_row(gradient_scratch *at, const query_row *r, bool is_wanted, const gradient_places *to, double *dsink,
                    double *dsink_variance)
{
    const acr_problem *p = r->p;
    const acr_buffers *b = r->b;
    const int64_t row = r->e->q.first + r->i, batch = r->e->batch;
    const bool packed = p->flags & ACR_PACKED;
    widen_rows(at->q, p->dtype, b->q, batch * p->q.batch + r->head * p->q.head + row * p->q.row, 0, 1, p->qk_dim);
    widen_rows(at->o, p->out_dtype, b->o, batch * p->o.batch + r->head * p->o.head + row * p->o.row, 0, 1, p->v_dim);
    widen_rows(at->d_o, p->out_dtype, b->d_o, batch * p->d_o.batch + r->head * p->d_o.head + row * p->d_o.row, 0, 1,
               p->v_dim);
    gradient_row g = {.r = *r, .q = at->q, .d_o = at->d_o, .k = at->k, .v = at->v};
    g.q_norm = sqrt(dot(at->q, at->q, p->qk_dim));
    g.d_o_norm = sqrt(dot(at->d_o, at->d_o, p->v_dim));
    g.lse = b->lse[packed ? r->head * b->q_total + row : (batch * p->q_heads + r->head) * p->q_len + row];
    g.delta = dot(at->d_o, at->o, p->v_dim);
    if (is_wanted) {
        add_all_pairs(at, &g, to);
    } else {
        add_wanted_pairs(at, &g, to);
    }
    if (dsink && r->sink > -INFINITY) {
        const double weight = exp(r->sink - g.lse), o_norm = sqrt(dot(at->o, at->o, p->v_dim));
        const double error = 0x1p-24 * (4 + 2 * sqrt((double)p->v_dim)) * weight *
                             (g.d_o_norm * o_norm + fabs(g.delta) * (fabs(g.lse) + fabs(r->sink) + 16));
        *dsink -= weight * g.delta;
        *dsink_variance += error * error;
    }
}

static acr_status open_gradients(gradient_scratch *at, const acr_problem *p)
{
    *at = (gradient_scratch){.k = malloc((size_t)(p->kv_len * p->qk_dim) * sizeof(double)),
                             .v = malloc((size_t)(p->kv_len * p->v_dim) * sizeof(double)),
                             .q = malloc((size_t)p->qk_dim * sizeof(double)),
                             .d_o = malloc((size_t)p->v_dim * sizeof(double)),
                             .o = malloc((size_t)p->v_dim * sizeof(double)),
                             .wanted = malloc((size_t)p->kv_len * sizeof(int64_t))};
    at->w.seen = calloc((size_t)p->kv_len, sizeof *at->w.seen);
    return at->k && at->v && at->q && at->d_o && at->o && at->w.seen && at->wanted
               ? ACR_OK
               : acr__fail(ACR_NO_MEMORY, "oracle: no memory for gradients");
}

static void close_gradients(gradient_scratch *at)
{
    FREE_ALL(at->k, at->v, at->q, at->d_o, at->o, at->w.seen, at->wanted);
}

acr_status oracle_backward(const acr_problem *p, const acr_buffers *b, int64_t index, const oracle_gradients *to)
{
    const entry e = entry_of(p, b, index / p->kv_heads);
    const bool packed = p->flags & ACR_PACKED;
    const int64_t kv_head = index % p->kv_heads, group = p->q_heads / p->kv_heads;
    const int64_t q_rows = packed ? b->q_total : p->q_len, kv_rows = packed ? b->kv_total : p->kv_len;
    const int64_t in_tensor = packed ? 0 : e.batch; /* the entry of the tensors */
    gradient_scratch at;
    const acr_status status = open_gradients(&at, p);
    if (status != ACR_OK) {
        close_gradients(&at);
        return status;
    }
    widen_rows(at.k, p->dtype, b->k, e.batch * p->k.batch + kv_head * p->k.head + e.kv.first * p->k.row, p->k.row,
               e.kv.length, p->qk_dim);
    widen_rows(at.v, p->dtype, b->v, e.batch * p->v.batch + kv_head * p->v.head + e.kv.first * p->v.row, p->v.row,
               e.kv.length, p->v_dim);
    const int64_t key = (in_tensor * p->kv_heads + kv_head) * kv_rows + e.kv.first;
    for (int64_t j = 0; j < e.kv.length && to->keys; j++) {
        if (to->keys[key + j]) {
            at.wanted[at.wanted_count++] = j;
        }
    }
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int64_t i = 0; i < e.q.length; i++) {
            query_row r = {.p = p, .b = b, .e = &e, .head = head, .i = i};
            r.position = p->mask == ACR_MASK_CAUSAL_TOP_LEFT ? i : i + e.kv.length - e.q.length;
            r.sink = b->sinks ? b->sinks[head] : -INFINITY;
            const int64_t row = (in_tensor * p->q_heads + head) * q_rows + e.q.first + i;
            const gradient_places places = {to->dq + row * p->qk_dim,          to->dk + key * p->qk_dim,
                                            to->dv + key * p->v_dim,           to->dq_variance + row * p->qk_dim,
                                            to->dk_variance + key * p->qk_dim, to->dv_variance + key * p->v_dim};
            const int64_t sink = e.batch * p->q_heads + head;
            add_row(&at, &r, !to->rows || to->rows[row], &places, to->dsinks ? to->dsinks + sink : NULL,
                    to->dsinks ? to->dsinks_variance + sink : NULL);
        }
    }
    close_gradients(&at);
    return ACR_OK;
}
