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
    bool spread;                 /* oracle_spread is asked; else the next three are NULL */
    void *squares;               /* [kv_padded]: of a score, the sum of the squares of its products */
    void *raw;                   /* [kv_padded]: scores, scaled */
    void *sums;                  /* [3, v_padded] */
    int64_t batch, kv_head;      /* whose k and v are loaded; -1 = none */
    float grid;                  /* see oracle_unfused */
} workspace;

static int64_t round_up(int64_t value, int64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

static void close_workspace(workspace *w)
{
    free(w->k);
    free(w->v);
    free(w->q);
    free(w->scores);
    free(w->out);
    free(w->squares);
    free(w->raw);
    free(w->sums);
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

/* The rows of a batch entry that exist; of a packed batch counted from the tensors' first, its batch strides being
 * 0. */
typedef struct entry {
    int64_t batch;
    fwd_sequence q, kv;
} entry;

static entry entry_of(const acr_problem *p, const acr_buffers *b, int64_t batch)
{
    if (p->flags & ACR_PACKED) {
        return (entry){batch, fwd_sequence_of(b->q_offsets, batch, b->q_total, p->q_len),
                       fwd_sequence_of(b->kv_offsets, batch, b->kv_total, p->kv_len)};
    }
    const int64_t keys = b->kv_lens ? b->kv_lens[batch] : p->kv_len;
    return (entry){batch, {0, p->q_len}, {0, keys < 0 ? 0 : keys > p->kv_len ? p->kv_len : keys}};
}

static void load_key_value_head(workspace *w, const acr_problem *p, const acr_buffers *b, const entry *e,
                                int64_t kv_head)
{
    if (w->batch == e->batch && w->kv_head == kv_head) {
        return;
    }
    w->batch = e->batch;
    w->kv_head = kv_head;
    for (int64_t j = 0; j < e->kv.length; j++) {
        const int64_t k_row = e->batch * p->k.batch + kv_head * p->k.head + (e->kv.first + j) * p->k.row;
        const int64_t v_row = e->batch * p->v.batch + kv_head * p->v.head + (e->kv.first + j) * p->v.row;
        for (int64_t d = 0; d < p->qk_dim; d++) {
            put(w, w->k, d * w->kv_padded + j, acr__load_element(p->dtype, b->k, k_row + d));
        }
        for (int64_t d = 0; d < p->v_dim; d++) {
            put(w, w->v, j * w->v_padded + d, acr__load_element(p->dtype, b->v, v_row + d));
        }
    }
}

/* ---- One row --------------------------------------------------------------------------------------------------- */

/* sums[0..vectors) += factor[0] * rows[0][0..vectors) + factor[1] * rows[1]..., one row after another; rows are
 * `stride` vectors apart. Both products of attention have this form: scores over the dims of a query, outputs over
 * the keys of a row. */
static void add_rows_double(doubles *sums, const double *factor, const doubles *rows, int64_t stride, int64_t count,
                            int64_t vectors)
{
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) {
        const doubles *row = rows + r * stride;
        for (int64_t x = 0; x < vectors; x++) {
            sums[x] = sums[x] + factor[r] * row[x] + factor[r + 1] * row[stride + x] +
                      factor[r + 2] * row[2 * stride + x] + factor[r + 3] * row[3 * stride + x];
        }
    }
    for (; r < count; r++) {
        for (int64_t x = 0; x < vectors; x++) {
            sums[x] += factor[r] * rows[r * stride + x];
        }
    }
}

static void add_rows_float(floats *sums, const float *factor, const floats *rows, int64_t stride, int64_t count,
                           int64_t vectors)
{
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) {
        const floats *row = rows + r * stride;
        for (int64_t x = 0; x < vectors; x++) {
            sums[x] = sums[x] + factor[r] * row[x] + factor[r + 1] * row[stride + x] +
                      factor[r + 2] * row[2 * stride + x] + factor[r + 3] * row[3 * stride + x];
        }
    }
    for (; r < count; r++) {
        for (int64_t x = 0; x < vectors; x++) {
            sums[x] += factor[r] * rows[r * stride + x];
        }
    }
}

/* What the products of stored elements are multiplied by. */
typedef struct scales {
    double scores, values;
} scales;

/* Of a key/value head of a batch entry: the problem's scales, and the buffers' where there are any. */
static scales scales_of(const acr_problem *p, const acr_buffers *b, int64_t batch, int64_t kv_head)
{
    const int64_t at = batch * p->kv_heads + kv_head;
    scales of = {(double)p->scale * p->q_scale * p->k_scale, p->v_scale};
    of.scores *= b->q_scales ? b->q_scales[at] : 1.0f;
    of.scores *= b->k_scales ? b->k_scales[at] : 1.0f;
    of.values *= b->v_scales ? b->v_scales[at] : 1.0f;
    return of;
}

/* Keys from first to end - 1. */
typedef struct span {
    int64_t first, end;
} span;

/* Softmax of the row's scores of `keys` in float64 and their weighted sum of values; returns the log-sum-exp.
 * At least one key. */
static double attend_double(workspace *w, const acr_problem *p, const scales *of, span keys, double *o)
{
    double *s = w->scores;
    memset(s, 0, (size_t)w->kv_padded * sizeof *s);
    add_rows_double(w->scores, w->q, w->k, w->kv_padded / DOUBLES, p->qk_dim, round_up(keys.end, DOUBLES) / DOUBLES);
    double max = -INFINITY;
    for (int64_t j = keys.first; j < keys.end; j++) {
        s[j] *= of->scores;
        max = s[j] > max || isnan(s[j]) ? s[j] : max;
    }
    if (w->spread) {
        memcpy(w->raw, s, (size_t)keys.end * sizeof *s);
    }
    double sum = 0;
    for (int64_t j = keys.first; j < keys.end; j++) {
        s[j] = exp(s[j] - max);
        sum += s[j];
    }
    double *out = w->out;
    memset(out, 0, (size_t)w->v_padded * sizeof *out);
    add_rows_double(w->out, s + keys.first, (const doubles *)w->v + keys.first * (w->v_padded / DOUBLES),
                    w->v_padded / DOUBLES, keys.end - keys.first, w->v_padded / DOUBLES);
    for (int64_t d = 0; d < p->v_dim; d++) {
        o[d] = out[d] / sum * of->values;
    }
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
} losses;

/* Hopper's tensor cores align the products of 8-bit operands to the largest and keep about 14 bits (DeepSeek-V3
 * Technical Report, section 3.3.2); those of 16-bit operands are summed in float32 without rounding. */
static losses losses_of(acr_dtype dtype)
{
    switch (dtype) {
    case ACR_F16:
        return (losses){0x1p-11, 0x1p-25, 0x1p-23, 16};
    case ACR_BF16:
        return (losses){0x1p-8, 0, 0x1p-23, 16};
    case ACR_E4M3:
        return (losses){0x1p-4, 0x1p-10, 0x1p-13, 32};
    default:
        return (losses){0, 0, 0, 1};
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

/* What the error of one key's weight does to an output: variance per (v - o)^2 and per v^2, and the most per
 * |v - o|. */
typedef struct key_effect {
    double score_variance, weight_variance, score_most;
} key_effect;

static key_effect effect_of(const losses *l, double dims, double scale, double score, double largest_score,
                            double squared_products, double weight, double largest_weight)
{
    /* The squares of the partial sums, summed over all of them: their mean over all orders of the products. */
    const double partial_sums = score * score * (dims / 3 + 0.5) + scale * scale * squared_products * (dims + 1) / 6;
    /* Each product's addition; the scaling and the difference to the maximum, twice each; an exponential within 4
     * units in the last place. */
    const double variance =
        rounding_variance * (partial_sums + 4 * (score * score + largest_score * largest_score) + 16);
    const double least = l->weight_least * largest_weight;
    const double rounding = weight * l->weight > least ? weight * l->weight : least;
    const double cut = l->cut * (dims / l->cut_every) * (scale * sqrt(squared_products) + fabs(score));
    return (key_effect){weight * weight * variance, rounding * rounding / 3, weight * (0x1p-23 + cut)};
}

/* For the row that attend_double has just left in w. */
static void spread_of_row(workspace *w, const acr_problem *p, const scales *of, span keys, double *variance,
                          double *most)
{
    const double *s = w->scores, *raw = w->raw, *squares = w->squares;
    const losses l = losses_of(p->dtype);
    const int64_t vectors = w->v_padded / DOUBLES;
    doubles *out = w->out, *variances = w->sums, *squared = variances + vectors, *linear = squared + vectors;
    const words sign = (words){0} + ((uint64_t)1 << 63);
    double sum = 0, largest_score = 0;
    sum_squared_products(w, p->qk_dim, round_up(keys.end, DOUBLES) / DOUBLES);
    for (int64_t j = keys.first; j < keys.end; j++) {
        sum += s[j];
        largest_score = fabs(raw[j]) > largest_score && s[j] > 0.5 ? fabs(raw[j]) : largest_score;
    }
    memset(w->sums, 0, 3 * (size_t)w->v_padded * sizeof(double));
    for (int64_t j = keys.first; j < keys.end; j++) {
        const double weight = s[j] / sum;
        const key_effect e =
            effect_of(&l, (double)p->qk_dim, of->scores, raw[j], largest_score, squares[j], weight, 1 / sum);
        const doubles *v = (const doubles *)w->v + j * vectors;
        for (int64_t x = 0; x < vectors; x++) {
            const doubles from_output = v[x] - out[x] / sum, square = v[x] * v[x];
            variances[x] += e.score_variance * from_output * from_output + e.weight_variance * square;
            squared[x] += weight * weight * square;
            linear[x] += e.score_most * (doubles)((words)from_output & ~sign);
        }
    }
    const double count = (double)(keys.end - keys.first);
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
static void attend_float(workspace *w, const acr_problem *p, const scales *of, span keys, double *o)
{
    float *s = w->scores;
    const float scale = (float)of->scores;
    memset(s, 0, (size_t)w->kv_padded * sizeof *s);
    add_rows_float(w->scores, w->q, w->k, w->kv_padded / FLOATS, p->qk_dim, round_up(keys.end, FLOATS) / FLOATS);
    float max = -INFINITY;
    for (int64_t j = keys.first; j < keys.end; j++) {
        s[j] *= scale;
        max = s[j] > max || isnan(s[j]) ? s[j] : max;
    }
    float sum = 0;
    for (int64_t j = keys.first; j < keys.end; j++) {
        s[j] = expf(s[j] - max);
        sum += s[j];
    }
    for (int64_t j = keys.first; j < keys.end; j++) {
        s[j] = round_weight(p->dtype, s[j] / sum, w->grid);
    }
    float *out = w->out;
    memset(out, 0, (size_t)w->v_padded * sizeof *out);
    add_rows_float(w->out, s + keys.first, (const floats *)w->v + keys.first * (w->v_padded / FLOATS),
                   w->v_padded / FLOATS, keys.end - keys.first, w->v_padded / FLOATS);
    for (int64_t d = 0; d < p->v_dim; d++) {
        uint32_t stored;
        acr__store_element(p->out_dtype, &stored, 0, out[d] * of->values);
        o[d] = acr__load_element(p->out_dtype, &stored, 0);
    }
}

/* Keys that the entry's query i sees: those from first to end - 1. A window is counted from the key at which the query
 * stands, which without a mask is found as with the bottom-right one. */
static span visible_span(const acr_problem *p, const entry *e, int64_t i)
{
    const int64_t keys = e->kv.length;
    const int64_t position = p->mask == ACR_MASK_CAUSAL_TOP_LEFT ? i : i + keys - e->q.length;
    span seen = {0, keys};
    if (p->mask != ACR_MASK_NONE && seen.end > position + 1) {
        seen.end = position + 1;
    }
    if (p->window_right > 0 && seen.end > position + p->window_right + 1) {
        seen.end = position + p->window_right + 1;
    }
    if (p->window_left > 0 && seen.first < position - p->window_left + 1) {
        seen.first = position - p->window_left + 1;
    }
    return seen.first < seen.end ? seen : (span){0, 0};
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

/* One row, by its number. */
static void attend_row(workspace *w, const acr_problem *p, const acr_buffers *b, int64_t row, const row_result *to)
{
    double *o = to->o;
    const bool packed = p->flags & ACR_PACKED;
    const int64_t q_rows = packed ? b->q_total : p->q_len, in_tensor = row % q_rows;
    const int64_t head = row / q_rows % p->q_heads;
    const int64_t batch = packed ? find_owner(p, b, in_tensor) : row / q_rows / p->q_heads;
    const entry e = batch < p->batch ? entry_of(p, b, batch) : (entry){batch, {0, 0}, {0, 0}};
    const int64_t i = in_tensor - e.q.first;
    const span keys = visible_span(p, &e, i);
    double row_lse = -INFINITY;
    if (keys.end == 0) {
        memset(o, 0, (size_t)p->v_dim * sizeof *o);
        if (w->spread) {
            /* NOLINTNEXTLINE(clang-analyzer-core.NonNullParamChecker): a spread has both arrays */
            memset(to->variance, 0, (size_t)p->v_dim * sizeof *o);
            memset(to->most, 0, (size_t)p->v_dim * sizeof *o);
        }
    } else {
        const int64_t kv_head = head / (p->q_heads / p->kv_heads);
        const scales of = scales_of(p, b, batch, kv_head);
        load_key_value_head(w, p, b, &e, kv_head);
        for (int64_t d = 0; d < p->qk_dim; d++) {
            put(w, w->q, d,
                acr__load_element(p->dtype, b->q, batch * p->q.batch + head * p->q.head + in_tensor * p->q.row + d));
        }
        if (w->precision == IN_DOUBLE) {
            row_lse = attend_double(w, p, &of, keys, o);
            if (w->spread) {
                spread_of_row(w, p, &of, keys, to->variance, to->most);
            }
        } else {
            attend_float(w, p, &of, keys, o);
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
