/* Deterministic inputs, see inputs.h. */
#include "inputs.h"

#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "base/text.h"
#include "internal.h"

static const char *const kind_names[INPUT_KIND_COUNT] = {
    [INPUT_NORMAL] = "normal",         [INPUT_SHIFTED] = "shifted",
    [INPUT_HEAVY] = "heavy",           [INPUT_LARGE] = "large",
    [INPUT_CONSTANT_V] = "constant-v", [INPUT_NEEDLE] = "needle",
    [INPUT_SCALED] = "scaled",         [INPUT_HEAD_SCALED] = "head-scaled",
    [INPUT_SHIFTED_V] = "shifted-v",   [INPUT_LOWEST_KEYS] = "lowest-keys",
};

/* Streams of random numbers that are no tensor's. */
enum {
    STREAM_NEEDLE_KEY = 16,
    STREAM_NEEDLE_SIGNS,
    STREAM_KV_LENS,
    STREAM_Q_OFFSETS,
    STREAM_KV_OFFSETS,
    STREAM_HEAD_SCALES, /* and the next two */
    STREAM_KV_STARTS = 48,
    STREAM_SINKS,
    STREAM_BIAS,
    STREAM_BIAS_RUNS,
    STREAM_BIAS_ROWS,
    STREAM_BIAS_BLOCKS,
    STREAM_RANGES,
    STREAM_TREE,
    STREAM_TREE_ROWS,
    STREAM_PAGES,
    STREAM_SHARED_PAGES,
    STREAM_UNUSED_PAGES,
    STREAM_BIAS_PAIRS
};

const char *input_kind_name(input_kind kind)
{
    return kind_names[kind];
}

const char *input_kind_names(void)
{
    return "normal shifted heavy large constant-v needle scaled head-scaled shifted-v lowest-keys";
}

bool input_kind_parse(const char *name, input_kind *out)
{
    const int index = text_index(kind_names, INPUT_KIND_COUNT, name);
    if (index >= 0) {
        *out = (input_kind)index;
    }
    return index >= 0;
}

int input_kind_count(acr_dtype kv_dtype)
{
    return kv_dtype == ACR_E4M3 ? INPUT_SHIFTED_V : INPUT_HEAD_SCALED;
}

/* Keys of INPUT_LOWEST_KEYS that are as they are. */
enum {
    LOWEST_KEYS = 16
};

bool input_kind_fits(const acr_problem *p, input_kind kind)
{
    if (kind != INPUT_LOWEST_KEYS) {
        return (int)kind < input_kind_count(acr__kv_dtype(p)) || kind == INPUT_SHIFTED_V;
    }
    return p->pass == ACR_FORWARD && acr__kv_dtype(p) != ACR_E4M3 && p->mask == ACR_MASK_NONE && p->kv_len > 32 &&
           p->window_left == 0 && p->window_right == 0 && acr__terms_of(p) == 0 &&
           !(p->flags & (ACR_KV_LENS | ACR_PACKED | ACR_PAGED | ACR_V_IN_K));
}

void input_scales(acr_problem *problem, input_kind kind)
{
    if (kind != INPUT_SCALED && kind != INPUT_HEAD_SCALED) {
        return;
    }
    problem->scale = 0.3f;
    if (problem->dtype == ACR_E4M3) {
        problem->q_scale = 0.5f;
    }
    if (acr__kv_dtype(problem) == ACR_E4M3) {
        problem->k_scale = 1.5f;
        problem->v_scale = problem->flags & ACR_V_IN_K ? problem->k_scale : 0.25f;
    }
}

/* Two rounds of multiply and shift (the constants of SplitMix64's finaliser), one to spread the seed and stream, one
 * for the counter. */
static inline uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t counter)
{
    return mix(mix(seed * 0x9e3779b97f4a7c15u + stream) + counter * 0x9e3779b97f4a7c15u);
}

static inline uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double double_of(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* An integer below 2^32: the last bits of a number whose own last bit counts ones. */
static inline double double_of_integer(uint64_t integer)
{
    return double_of(bits_of(0x1p52) | integer) - 0x1p52;
}

/* The natural logarithm of a positive normal number: of 2^e m with m from sqrt(1/2) to sqrt(2), by the series of the
 * inverse hyperbolic tangent. */
static inline double log_of(double x)
{
    const uint64_t bits = bits_of(x), one = bits_of(1.0);
    const uint64_t biased = (bits - bits_of(0.70710678118654757) + one) >> 52; /* e + 1023 */
    const double m = double_of(bits - (biased << 52) + one), e = double_of_integer(biased) - 1023.0;
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    const double series =
        1.0 + z * (1.0 / 3 +
                   z * (1.0 / 5 + z * (1.0 / 7 + z * (1.0 / 9 + z * (1.0 / 11 + z * (1.0 / 13 + z * (1.0 / 15)))))));
    return 0.6931471805599453 * e + 2.0 * s * series;
}

/* The cosine of so many turns, 0 to 1: the sine of an angle within a quarter turn of 0, by its series. */
static inline double cos_of_turns(double turns)
{
    const double x = 6.283185307179586 * (fabs(turns - 0.5) - 0.25), z = x * x;
    const double of_9 = 1.0 / 362880 + z * (-1.0 / 39916800 + z * (1.0 / 6227020800 + z * (-1.0 / 1307674368000)));
    return x * (1.0 + z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * of_9))));
}

/* Box and Muller: the upper half of the bits gives the radius, the lower the angle. Largest magnitude 6.7. Right to
 * ten digits: without branches, so that loops become vectors, where the C library's functions were half of a check. */
static inline double normal(uint64_t bits)
{
    const double radius_uniform = (double_of_integer(bits >> 32) + 0.5) * 0x1p-32;
    return sqrt(-2.0 * log_of(radius_uniform)) * cos_of_turns(double_of_integer(bits & 0xffffffffu) * 0x1p-32);
}

static double student_t2(uint64_t bits, double drawn)
{
    double uniform = ((double)(mix(bits + 1) >> 32) + 0.5) * 0x1p-32;
    double value = drawn / sqrt(-log_of(uniform));
    return fmax(-50.0, fmin(50.0, value));
}

typedef struct fill {
    unsigned char *packed;
    acr_dtype dtype;
    input_tensor tensor;
    input_kind kind;
    uint64_t seed;
    int64_t heads, length, dim, rows;
    bool one_batch, one_head; /* strides of 0; and pages of one value row */
} fill;

/* The needle's direction: signs by dimension, the same for queries and for the key that they match. */
static double needle_sign(const fill *f, int64_t d)
{
    return random_bits(f->seed, STREAM_NEEDLE_SIGNS, (uint64_t)d) & 1 ? 1.0 : -1.0;
}

/* Whether a position is that of its head's needle. head_index counts batch * heads + head. */
static bool is_needle(const fill *f, int64_t head_index, int64_t position)
{
    return position == (int64_t)(random_bits(f->seed, STREAM_NEEDLE_KEY, (uint64_t)head_index) % (uint64_t)f->length);
}

/* Element d of a row, from random bits and the normal number that they make. */
static double element(const fill *f, int64_t head_index, int64_t position, int64_t d, uint64_t bits, double drawn)
{
    switch (f->kind) {
    case INPUT_SHIFTED:
        return 1.0 + drawn;
    case INPUT_SHIFTED_V:
        return (f->tensor == INPUT_V ? 1.0 : 0.0) + drawn;
    case INPUT_HEAVY:
        return student_t2(bits, drawn);
    case INPUT_LARGE:
        return f->tensor == INPUT_V || f->tensor == INPUT_D_O ? drawn : 10.0 * drawn;
    case INPUT_LOWEST_KEYS: {
        const int64_t first = head_index % 2 == 0 ? LOWEST_KEYS : f->length - LOWEST_KEYS;
        const bool is_lowest = f->tensor == INPUT_K && d == 0 && position < first;
        return is_lowest ? -INFINITY : f->tensor == INPUT_Q && d == 0 ? 0.5 + fabs(drawn) : drawn;
    }
    case INPUT_NEEDLE:
        if (f->tensor == INPUT_Q) {
            return needle_sign(f, d) + 0.1 * drawn;
        }
        return f->tensor == INPUT_K && is_needle(f, head_index, position) ? 4.0 * needle_sign(f, d) : drawn;
    default:
        return drawn;
    }
}

enum {
    FILL_CHUNK = 64 /* elements of a row that are made together */
};

static void fill_row(const fill *f, int64_t row)
{
    const int64_t head = row / f->length % f->heads, batch = row / f->length / f->heads;
    const int64_t head_index = (f->one_batch ? 0 : batch) * f->heads + (f->one_head ? 0 : head);
    const int64_t position = f->kind == INPUT_CONSTANT_V && f->tensor == INPUT_V ? 0 : row % f->length;
    const uint64_t first = (uint64_t)((head_index * f->length + position) * f->dim);
    for (int64_t d = 0; d < f->dim; d += FILL_CHUNK) {
        const int64_t count = f->dim - d < FILL_CHUNK ? f->dim - d : FILL_CHUNK;
        uint64_t bits[FILL_CHUNK];
        double values[FILL_CHUNK];
        for (int64_t i = 0; i < FILL_CHUNK; ++i) { /* whatever the count: vectors of a known number */
            bits[i] = random_bits(f->seed, (uint64_t)f->tensor, first + (uint64_t)(d + i));
        }
        for (int64_t i = 0; i < FILL_CHUNK; ++i) {
            values[i] = normal(bits[i]);
        }
        for (int64_t i = 0; i < count; ++i) {
            values[i] = element(f, head_index, position, d + i, bits[i], values[i]);
        }
        acr__store_elements(f->dtype, f->packed, row * f->dim + d, count, values);
    }
}

/* Rows that a thread takes at once: taken one by one, a large tensor's threads would wait for the counter. */
enum {
    FILL_ROWS = 64
};

static void fill_rows(void *arg, int64_t slice)
{
    const fill *f = arg;
    const int64_t first = slice * FILL_ROWS, end = first + FILL_ROWS < f->rows ? first + FILL_ROWS : f->rows;
    for (int64_t row = first; row < end; ++row) {
        fill_row(f, row);
    }
}

void input_fill(void *packed, const acr_problem *problem, input_tensor tensor, int64_t entries, int64_t length,
                input_kind kind, uint64_t seed, uint32_t threads)
{
    const bool of_queries = tensor == INPUT_Q || tensor == INPUT_D_O,
               one_value = problem->flags & ACR_PAGED && tensor == INPUT_V && kind == INPUT_CONSTANT_V;
    const acr_strides *strides = tensor == INPUT_Q   ? &problem->q
                                 : tensor == INPUT_K ? &problem->k
                                 : tensor == INPUT_V ? &problem->v
                                                     : &problem->d_o;
    fill f = {
        .packed = packed,
        .dtype = of_queries ? problem->dtype : acr__kv_dtype(problem),
        .tensor = tensor,
        .kind = kind,
        .seed = seed,
        .heads = of_queries ? problem->q_heads : problem->kv_heads,
        .length = length,
        .dim = tensor == INPUT_V || tensor == INPUT_D_O ? problem->v_dim : problem->qk_dim,
        .one_batch = strides->batch == 0 || one_value,
        .one_head = strides->head == 0,
    };
    f.rows = entries * f.heads * f.length;
    parallel_for(threads, (f.rows + FILL_ROWS - 1) / FILL_ROWS, fill_rows, &f);
}

void input_head_scales(float *scales, const acr_problem *problem, input_tensor tensor, uint64_t seed)
{
    for (int64_t i = 0; i < problem->batch * problem->kv_heads; ++i) {
        const uint64_t bits = random_bits(seed, STREAM_HEAD_SCALES + (uint64_t)tensor, (uint64_t)i);
        scales[i] = (float)exp2(3.0 * ((double)(bits >> 32) * 0x1p-32) - 1.5);
    }
}

#define LENGTHS_SPREAD 64.0 /* the longest length over the shortest */
enum {
    MIXED_STEP = 8 /* of LENGTHS_MIXED: one entry in so many is long */
};

/* Between 1 and the longest. */
static int64_t some_length(uint64_t seed, uint64_t stream, int64_t entry, int64_t longest)
{
    return 1 + (int64_t)(random_bits(seed, stream, (uint64_t)entry) % (uint64_t)longest);
}

/* The i-th of `count` lengths, a geometric series that ends with the longest. */
static double skewed_length(int64_t entry, int64_t count, double longest)
{
    return count == 1 ? longest : longest * pow(LENGTHS_SPREAD, (double)(entry + 1 - count) / (double)(count - 1));
}

/* Of a pattern other than LENGTHS_EDGES: an entry's queries, or its keys. */
static int64_t patterned_length(const acr_problem *p, int64_t entry, input_tensor tensor, length_pattern pattern)
{
    const int64_t longest = tensor == INPUT_Q ? p->q_len : p->kv_len;
    double length = (double)longest;
    if (pattern == LENGTHS_SKEWED) {
        length = skewed_length(entry, p->batch, length);
    } else if (pattern == LENGTHS_ONE_LONG && entry > 0) {
        length /= LENGTHS_SPREAD;
    } else if (pattern == LENGTHS_MIXED && tensor == INPUT_Q && entry % MIXED_STEP > 0) {
        length = 1;
    }
    return length < 1 && longest > 0 ? 1 : (int64_t)(length + 0.5);
}

void input_kv_lens(int32_t *lens, const acr_problem *problem, uint64_t seed, length_pattern pattern)
{
    for (int64_t batch = 0; batch < problem->batch; ++batch) {
        int64_t some = some_length(seed, STREAM_KV_LENS, batch, problem->kv_len);
        const int64_t edges[] = {some, 0, problem->kv_len + 5, 1, problem->kv_len, -2};
        lens[batch] =
            (int32_t)(pattern == LENGTHS_EDGES ? edges[batch % 6] : patterned_length(problem, batch, INPUT_K, pattern));
    }
}

enum {
    ROWS_BEFORE = 2,
    ROWS_BEHIND = 3
};

int64_t input_offsets(int32_t *offsets, const acr_problem *problem, input_tensor tensor, uint64_t seed,
                      length_pattern pattern)
{
    const int64_t longest = tensor == INPUT_Q ? problem->q_len : problem->kv_len;
    const uint64_t stream = tensor == INPUT_Q ? STREAM_Q_OFFSETS : STREAM_KV_OFFSETS;
    /* Which of the edges come first differs from problem to problem. */
    const uint64_t bits = random_bits(seed, stream, (uint64_t)(problem->q_len * 65537 + problem->kv_len));
    const bool beyond = pattern == LENGTHS_EDGES && bits >> 32 & 1; /* outermost offsets outside the tensor */
    int64_t at = pattern == LENGTHS_EDGES && !beyond ? ROWS_BEFORE : 0;
    for (int64_t batch = 0; batch < problem->batch; ++batch) {
        int64_t some = some_length(seed, stream, batch, longest);
        const int64_t edges[] = {some, 0, longest + 5, 1, longest, some};
        const int64_t edge = problem->batch > 1 ? edges[((uint64_t)batch + bits) % 6] : some;
        offsets[batch] = (int32_t)at;
        at += pattern == LENGTHS_EDGES ? edge : patterned_length(problem, batch, tensor, pattern);
    }
    offsets[problem->batch] = (int32_t)at;
    if (beyond) {
        offsets[0] = -7;
        offsets[problem->batch] += 100;
    }
    return pattern == LENGTHS_EDGES && !beyond ? at + ROWS_BEHIND : at;
}

/* ---- Pages ---- */

static int64_t pages_of_keys(const acr_problem *p, int64_t keys)
{
    const int64_t existing = keys < 0 ? 0 : keys > p->kv_len ? p->kv_len : keys;
    return (existing + p->page - 1) / p->page;
}

enum {
    PAGES_UNUSED = 3,
    TABLE_GAP = 2
};

/* The pages that the pool has for an entry. */
static int64_t entry_pages(const acr_problem *p, int64_t entry, length_pattern pattern)
{
    return pages_of_keys(p, pattern == LENGTHS_EDGES ? p->kv_len : patterned_length(p, entry, INPUT_K, pattern));
}

input_pool input_pool_of(const acr_problem *problem, length_pattern pattern)
{
    const bool edges = pattern == LENGTHS_EDGES;
    int64_t pages = edges ? PAGES_UNUSED : 0;
    for (int64_t batch = 0; batch < problem->batch; ++batch) {
        pages += entry_pages(problem, batch, pattern);
    }
    return (input_pool){pages, pages_of_keys(problem, problem->kv_len) + (edges ? TABLE_GAP : 0)};
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The i-th page of a permutation of so many, below 2^31. */
static int64_t shuffled_page(int64_t i, int64_t pages, uint64_t seed)
{
    const int64_t half = pages / 2 + 1, first = (int64_t)(random_bits(seed, STREAM_PAGES, 0) % (uint64_t)pages);
    int64_t step = half + (int64_t)(random_bits(seed, STREAM_PAGES, 1) % (uint64_t)half);
    while (common_divisor(step, pages) != 1) {
        ++step;
    }
    return (first + i * step) % pages;
}

void input_page_table(int32_t *table, const acr_problem *problem, const int32_t *lens, uint64_t seed,
                      length_pattern pattern)
{
    const input_pool pool = input_pool_of(problem, pattern);
    const bool edges = pattern == LENGTHS_EDGES;
    int64_t first = 0; /* of the entry's pages */
    for (int64_t batch = 0; batch < problem->batch; ++batch) {
        int32_t *row = table + batch * pool.table_stride;
        const int64_t used = pages_of_keys(problem, lens[batch]);
        const int64_t before = batch > 0 ? pages_of_keys(problem, lens[batch - 1]) : 0;
        const bool shares = edges && random_bits(seed, STREAM_SHARED_PAGES, (uint64_t)batch) % 2 == 0;
        for (int64_t i = 0; i < pool.table_stride; ++i) {
            const int64_t nobodys = pool.pages - PAGES_UNUSED + i % PAGES_UNUSED;
            const int64_t unused[] = {-1, edges ? shuffled_page(nobodys, pool.pages, seed) : -1, pool.pages, INT32_MAX,
                                      INT32_MIN};
            const int64_t own = shuffled_page(first + i, pool.pages, seed);
            const uint64_t which = edges ? random_bits(seed, STREAM_UNUSED_PAGES, (uint64_t)(batch * 131 + i)) % 5 : 0;
            row[i] = (int32_t)(i >= used                                    ? unused[which]
                               : shares && i < before && i < (used + 1) / 2 ? (row - pool.table_stride)[i]
                                                                            : own);
        }
        first += entry_pages(problem, batch, pattern);
    }
}

/* ---- What terms read ---- */

static void fill_kv_starts(void *to, const acr_problem *problem, uint64_t seed, length_pattern pattern)
{
    int32_t *starts = to;
    for (int64_t batch = 0; batch < problem->batch; ++batch) {
        const int64_t some = some_length(seed, STREAM_KV_STARTS, batch, problem->kv_len) - 1;
        const int64_t edges[] = {some, -2, problem->kv_len + 5, some / 4, 0, 1};
        starts[batch] = (int32_t)(pattern == LENGTHS_EDGES ? edges[batch % 6] : 0);
    }
}

static void fill_sinks(void *to, const acr_problem *problem, uint64_t seed, length_pattern pattern)
{
    float *sinks = to;
    for (int64_t head = 0; head < problem->q_heads; ++head) {
        const double some = 2.0 * normal(random_bits(seed, STREAM_SINKS, (uint64_t)head));
        const double edges[] = {some, 6.0 + some, -INFINITY, 150.0, -some};
        sinks[head] = (float)(pattern == LENGTHS_EDGES ? edges[head % 5] : some);
    }
}

static void fill_slopes(void *to, const acr_problem *problem, uint64_t seed, length_pattern pattern)
{
    float *slopes = to;
    (void)seed;
    (void)pattern;
    for (int64_t head = 0; head < problem->q_heads; ++head) {
        slopes[head] = (float)exp2(-8.0 * (double)(head + 1) / (double)problem->q_heads);
    }
}

/* Keys of a row that are hidden together, and rows and keys of a block that is hidden or left alone as a whole. */
enum {
    BIAS_RUN = 64,
    BIAS_BLOCK = 128
};

typedef enum bias_block {
    BLOCK_MIXED,
    BLOCK_HIDDEN,
    BLOCK_UNCHANGED
} bias_block;

/* The block of key j and row i of a batch entry and head whose bias begins at `from`; a problem's first is mixed. Now
 * and then two neighbours are hidden, as many keys as two CTAs have that work together (bwd_wgmma). */
static bias_block block_of(uint64_t seed, int64_t from, int64_t i, int64_t j)
{
    const int64_t row = i / BIAS_BLOCK, key = j / BIAS_BLOCK;
    const uint64_t bits = random_bits(seed, STREAM_BIAS_BLOCKS, (uint64_t)((from * 1009 + row) * 1009 + key)) % 4,
                   pair = random_bits(seed, STREAM_BIAS_PAIRS, (uint64_t)((from * 1009 + row) * 1009 + key / 2)) % 4;
    return row + key == 0           ? BLOCK_MIXED
           : bits == 0 || pair == 0 ? BLOCK_HIDDEN
           : bits == 1              ? BLOCK_UNCHANGED
                                    : BLOCK_MIXED;
}

/* The element at `at` of the row that begins at `first`: key j of row i. */
static double bias_element(const acr_problem *p, uint64_t seed, length_pattern pattern, int64_t first, int64_t i,
                           int64_t j)
{
    const uint64_t bits = random_bits(seed, STREAM_BIAS, (uint64_t)(first + j));
    const bool is_mask = p->bias_dtype == ACR_BOOL8;
    bool hidden = is_mask && p->bias.row != 0 && j > i + p->kv_len - p->q_len;
    const bias_block block = pattern == LENGTHS_EDGES ? block_of(seed, first - i * p->bias.row, i, j) : BLOCK_MIXED;
    if (block == BLOCK_UNCHANGED) {
        return is_mask ? 1.0 : 0.0;
    }
    if (block == BLOCK_HIDDEN) {
        hidden = true;
    } else if (pattern == LENGTHS_EDGES) {
        const uint64_t run = (uint64_t)(first + j / BIAS_RUN);
        hidden = random_bits(seed, STREAM_BIAS_ROWS, (uint64_t)first) % 13 == 0 ||
                 random_bits(seed, STREAM_BIAS_RUNS, run) % 4 == 0 || bits % 16 == 0;
    }
    if (is_mask) {
        return hidden ? 0.0 : 1.0;
    }
    if (pattern == LENGTHS_EDGES && block == BLOCK_MIXED && p->bias_dtype != ACR_F16 &&
        random_bits(seed, STREAM_BIAS_ROWS, (uint64_t)first) % 13 == 1) {
        return p->bias_dtype == ACR_BF16 ? -0x1.fep127 : -0x1.fffffep127; /* the type's lowest: even weights */
    }
    return hidden ? -INFINITY : 2.0 * normal(bits);
}

static void fill_bias(void *bias, const acr_problem *p, uint64_t seed, length_pattern pattern)
{
    const acr_strides *s = &p->bias;
    memset(bias, 0xff, (size_t)acr__buffer_bytes(p, ACR__BIAS, (acr__rows){0}));
    for (int64_t batch = 0; batch < (s->batch == 0 ? 1 : p->batch); ++batch) {
        for (int64_t head = 0; head < (s->head == 0 ? 1 : p->q_heads); ++head) {
            for (int64_t i = 0; i < (s->row == 0 ? 1 : p->q_len); ++i) {
                const int64_t first = batch * s->batch + head * s->head + i * s->row;
                for (int64_t j = 0; j < p->kv_len; ++j) {
                    acr__store_element(p->bias_dtype, bias, first + j, bias_element(p, seed, pattern, first, i, j));
                }
            }
        }
    }
}

static void fill_ranges(void *to, const acr_problem *p, uint64_t seed, length_pattern pattern)
{
    int32_t *ranges = to;
    const int64_t part = p->kv_len / p->ranges;
    for (int64_t n = 0; n < p->batch * p->ranges; ++n) {
        const uint64_t bits = random_bits(seed, STREAM_RANGES, (uint64_t)n);
        const int64_t begin = (int64_t)(bits % (uint64_t)p->kv_len),
                      length = (int64_t)((bits >> 32) % (uint64_t)p->kv_len) / 2;
        const int64_t edges[6][2] = {
            {begin, begin + 1 + length / 4}, {begin, begin + length}, {-3, length / 4}, {begin, begin},
            {begin + 2, begin - 1},          {begin, p->kv_len + 9}};
        const int64_t even[2] = {n % p->ranges * part, n % p->ranges * part + part / 4};
        const int64_t *range = pattern == LENGTHS_EDGES ? edges[n % 6] : even;
        ranges[2 * n] = (int32_t)range[0];
        ranges[2 * n + 1] = (int32_t)range[1];
    }
}

static void fill_tree(void *to, const acr_problem *p, uint64_t seed, length_pattern pattern)
{
    uint8_t *tree = to;
    const int64_t row_bytes = (p->q_len + 7) / 8;
    for (int64_t row = 0; row < p->batch * p->q_len; ++row) {
        const int64_t i = row % p->q_len;
        for (int64_t byte = 0; byte < row_bytes; ++byte) {
            uint64_t bits = random_bits(seed, STREAM_TREE, (uint64_t)(row * row_bytes + byte)); /* beyond q_len, too */
            if (pattern != LENGTHS_EDGES) {
                const int64_t seen = i + 1 - 8 * byte;
                bits = seen <= 0 ? 0 : seen >= 8 ? 0xff : (UINT64_C(1) << seen) - 1;
            } else if (random_bits(seed, STREAM_TREE_ROWS, (uint64_t)row) % 7 == 0) {
                bits = 0;
            }
            tree[row * row_bytes + byte] = (uint8_t)bits;
        }
    }
}

void input_term(void *to, acr__buffer which, const acr_problem *problem, uint64_t seed, length_pattern pattern)
{
    static void (*const fillers[ACR__BUFFERS])(void *, const acr_problem *, uint64_t, length_pattern) = {
        [ACR__KV_STARTS] = fill_kv_starts, [ACR__SINKS] = fill_sinks,   [ACR__SLOPES] = fill_slopes,
        [ACR__BIAS] = fill_bias,           [ACR__RANGES] = fill_ranges, [ACR__TREE] = fill_tree,
    };
    fillers[which](to, problem, seed, pattern);
}
