/* Forward attention on a CPU for few query rows, as in decoding: a head's dims in the lanes of vectors.
 *
 * A work item is up to Q_TILE rows of one key/value head (entry.h numbers them) and a part of its keys. Keys and
 * values are read once for all of the item's rows, where they lie and in the type that they have there:
 *
 *     S[row][key]  = sum over dims of Q[row][dim] * K[key][dim]     vectors of dims, summed across lanes
 *     O[row][dim] += sum over keys of P[row][key] * V[key][dim]     vector * scalar
 *
 * fwd_simd has a row in every lane; of one row it wastes all lanes but one. Here the price is the sum across lanes,
 * about two instructions a score.
 *
 * Nothing is masked: rows that see the same keys of a tile are multiplied together, up to four, and only by those
 * keys. Where what a row sees is no interval (ranges, a tree, a bias), it is given a list of the keys that it sees. So
 * what a row does not see is not even read for it.
 *
 * Where heads are too few for the processor's threads, or keys very many, the keys of a head are cut into parts of
 * equal length. How they are cut depends on the problem alone, so bits do not depend on threads. The parts' results
 * lie in the workspace that all lanes share, and the lane that finishes the last item merges them: the queue counts
 * what is taken in its lower and what is finished in its upper half.
 *
 * Parameters: DTYPE (ACR_F32...), DIM (largest head dim served), Q_TILE (rows of an item), KV_TILE (keys whose scores
 * are kept at a time).
 *
 * PARAMETERS: DTYPE DIM Q_TILE KV_TILE */
#include "cpu/entry.h"
#include "cpu/simd.h"

_Static_assert(!PAIRS, "avx512bf16 multiplies pairs, which have no use here");
_Static_assert(Q_TILE >= 1 && Q_TILE <= 64, "Q_TILE is a number of rows from 1 to 64");
_Static_assert(KV_TILE >= LANES && KV_TILE <= 1024, "KV_TILE is a number of keys, from a vector's to 1024");
_Static_assert(KV_TILE % LANES == 0, "KV_TILE is not a multiple of a vector");

/* Rows that are multiplied together: it divides LANES, as many sums are added across lanes at once. */
enum {
    TOGETHER = LANES < 4 ? LANES : 4
};

/* How keys are cut: into ITEMS_WANTED items if parts of at least PART_KEYS give so many, and into parts of at most
 * PART_KEYS_MOST, so that one long sequence among short ones is shared, too; but never into more than ITEMS_MOST. */
enum {
    PART_KEYS = 512,
    PART_KEYS_MOST = 8192,
    ITEMS_WANTED = 128,
    ITEMS_MOST = 8192
};

/* ---- Work items and what they leave ---- */

typedef struct cutting {
    int64_t heads, tiles, parts; /* items: heads * tiles * parts, the last innermost */
    int64_t part_keys;
    int64_t tile_rows; /* of a tile at most */
} cutting;

DESCRIBES static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

DESCRIBES static cutting cut_keys(int64_t heads, int64_t rows, int64_t kv_len)
{
    cutting c = {
        .heads = heads, .tiles = ceil_div(rows, Q_TILE), .parts = 1, .tile_rows = rows < Q_TILE ? rows : Q_TILE};
    const int64_t units = c.heads * c.tiles;
    const int64_t wanted = ceil_div(ITEMS_WANTED, units), least = ceil_div(kv_len, PART_KEYS_MOST);
    int64_t parts = wanted > least ? wanted : least;
    parts = parts < ITEMS_MOST / units ? parts : ITEMS_MOST / units;
    parts = parts < kv_len / PART_KEYS ? parts : kv_len / PART_KEYS;
    parts = parts < 1 ? 1 : parts;
    c.part_keys = round_up(ceil_div(kv_len, parts), KV_TILE);
    c.parts = kv_len > 0 ? ceil_div(kv_len, c.part_keys) : 1;
    return c;
}

/* What the rows of an item leave: in the lane's scratch, or in the shared workspace where there are several parts.
 * `rows` is Q_TILE there, tile_rows here. */
typedef struct partial {
    float *o;         /* [rows][v_dim rounded up to vectors]: not yet divided by sum */
    float *max, *sum; /* [rows]: largest score before scaling, -infinity at first; of the weights */
    int32_t *sees;    /* [rows]: 1 where the row has seen a key, else 0 */
} partial;

DESCRIBES static int64_t cut_partial(partial *p, char *memory, int64_t v_dim, int64_t rows)
{
    int64_t used = 0;
    p->o = cut(memory, &used, rows * round_up(v_dim, LANES));
    p->max = cut(memory, &used, rows);
    p->sum = cut(memory, &used, rows);
    p->sees = cut(memory, &used, rows);
    return used;
}

/* A lane's scratch. */
typedef struct scratch_parts {
    float *q;             /* [Q_TILE][qk_dim rounded up to vectors], zeros behind qk_dim */
    float *s;             /* [TOGETHER][KV_TILE + LANES]: scores, then weights */
    const char **k, **v;  /* [KV_TILE]: where a tile's rows begin */
    char *nowhere;        /* a row of NaN, for keys in pages that do not exist */
    int32_t *first, *end; /* [Q_TILE]: the row sees no key before first, none from end on, and if it is not sparse all
                             between */
    partial partial;
    /* Of a sparse row: the keys of a tile that it sees, and their biases. */
    const char **seen_k, **seen_v; /* [KV_TILE] */
    int32_t *seen_key;             /* [KV_TILE + LANES] */
    float *bias;                   /* [KV_TILE + LANES] */
} scratch_parts;

/* Of a row of any type. */
DESCRIBES static int64_t nowhere_bytes(int64_t qk_dim, int64_t v_dim)
{
    return (int64_t)sizeof(float) * (qk_dim > v_dim ? qk_dim : v_dim);
}

DESCRIBES static int64_t cut_scratch(scratch_parts *parts, char *scratch, int64_t qk_dim, int64_t v_dim)
{
    int64_t used = 0;
    const int64_t words_of_pointer = (int64_t)(sizeof(char *) / sizeof(float));
    parts->q = cut(scratch, &used, Q_TILE * round_up(qk_dim, LANES));
    parts->s = cut(scratch, &used, TOGETHER * (KV_TILE + LANES));
    parts->k = cut(scratch, &used, KV_TILE * words_of_pointer);
    parts->v = cut(scratch, &used, KV_TILE * words_of_pointer);
    parts->nowhere = cut(scratch, &used, nowhere_bytes(qk_dim, v_dim) / (int64_t)sizeof(float));
    parts->first = cut(scratch, &used, Q_TILE);
    parts->end = cut(scratch, &used, Q_TILE);
    parts->seen_k = cut(scratch, &used, KV_TILE * words_of_pointer);
    parts->seen_v = cut(scratch, &used, KV_TILE * words_of_pointer);
    parts->seen_key = cut(scratch, &used, KV_TILE + LANES);
    parts->bias = cut(scratch, &used, KV_TILE + LANES);
    return used + cut_partial(&parts->partial, scratch ? scratch + used : NULL, v_dim, Q_TILE);
}

/* What a work item works on. */
typedef struct item {
    cpu_entry entry;
    cpu_scales scales;
    fwd_paging pages;
    int64_t first_row, rows; /* rows: of the tile, 0 behind the end of a sequence */
    bool is_sparse;          /* what a row sees is no interval: ranges, a tree, a bias */
} item;

static item item_of(const fwd_args *args, const cutting *c, int64_t unit)
{
    const int64_t head = unit / c->tiles, first_row = unit % c->tiles * Q_TILE;
    item it = {.entry = entry_of(args, head / args->kv_heads, head % args->kv_heads),
               .pages = fwd_paging_of(args),
               .first_row = first_row,
               .is_sparse = args->ranges || args->tree || args->bias};
    it.scales = cpu_scales_of(args, &it.entry);
    const int64_t left = rows_of(args, &it.entry) - first_row;
    it.rows = left < 0 ? 0 : left < Q_TILE ? left : Q_TILE;
    return it;
}

/* ---- Products ---- */

/* The type in which keys and values lie. */
static acr_dtype stored_type(const fwd_paging *pages)
{
    return pages->kv_type == (int32_t)ACR_DTYPE_DEFAULT ? DTYPE : (acr_dtype)pages->kv_type;
}

/* A vector whose lane i is the sum of all lanes of v[i]; v is overwritten. Every v[i] is added in the same order. */
INLINE vec sum_lanes(vec v[LANES])
{
    FLATTENED
    for (int half = LANES / 2; half > 0; half /= 2) {
        FLATTENED
        for (int i = 0; i < half; i++) {
            const vec a = v[i], b = v[i + half];
#if defined KERNEL_ARCH_avx512
            v[i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
                   __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined KERNEL_ARCH_avx2
            v[i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11) +
                   __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
            v[i] = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
        }
    }
    return v[0];
}

/* Scores of `keys` keys for `rows` rows, a constant that divides LANES: s[row][key]. q and s point at the first row.
 * type: a constant. Behind the keys up to LANES scores are written that mean nothing. */
INLINE void score(float *s, const float *q, const char *const *k, acr_dtype type, int64_t dims, int64_t keys, int rows)
{
    const int columns = LANES / rows; /* keys at a time */
    const int64_t q_stride = round_up(dims, LANES), whole = dims / LANES * LANES;
    for (int64_t key = 0; key < keys; key += columns) {
        vec acc[LANES];
        const char *at[LANES];
        FLATTENED
        for (int i = 0; i < LANES; i++) {
            acc[i] = (vec){0};
        }
        FLATTENED
        for (int c = 0; c < columns; c++) {
            at[c] = k[key + c < keys ? key + c : keys - 1];
        }
        for (int64_t dim = 0; dim < whole; dim += LANES) {
            FLATTENED
            for (int c = 0; c < columns; c++) {
                const vec x = load_floats(type, at[c], dim);
                FLATTENED
                for (int r = 0; r < rows; r++) {
                    acc[r * columns + c] += x * *(const vec *)&q[r * q_stride + dim];
                }
            }
        }
        if (whole < dims) {
            FLATTENED
            for (int c = 0; c < columns; c++) {
                const vec x = load_some_floats(type, at[c], whole, dims - whole);
                FLATTENED
                for (int r = 0; r < rows; r++) {
                    acc[r * columns + c] += x * *(const vec *)&q[r * q_stride + whole];
                }
            }
        }
        const vec sums = sum_lanes(acc);
        FLATTENED
        for (int r = 0; r < rows; r++) {
            __builtin_memcpy(&s[r * (KV_TILE + LANES) + key], (const float *)&sums + r * columns,
                             (size_t)columns * sizeof(float));
        }
    }
}

/* o = o * rescale + weights * v, of `vectors` vectors of dims from `dim` on; `rows`, `vectors` and type are constants.
 * count: dims that exist of the last vector. A tile's share is summed by itself: partial sums stay small. */
INLINE void add_vectors(float *o, const float rescale[TOGETHER], const float *p, const char *const *v, acr_dtype type,
                        int64_t o_stride, int64_t dim, int64_t keys, int rows, int vectors, int64_t count)
{
    vec acc[TOGETHER][8] = {0};
    for (int64_t key = 0; key < keys; key++) {
        FLATTENED
        for (int n = 0; n < vectors; n++) {
            const vec x = count == LANES ? load_floats(type, v[key], dim + n * LANES)
                                         : load_some_floats(type, v[key], dim + n * LANES, count);
            FLATTENED
            for (int r = 0; r < rows; r++) {
                acc[r][n] += p[r * (KV_TILE + LANES) + key] * x;
            }
        }
    }
    FLATTENED
    for (int r = 0; r < rows; r++) {
        FLATTENED
        for (int n = 0; n < vectors; n++) {
            vec *at = (vec *)&o[r * o_stride + dim + n * LANES];
            *at = *at * rescale[r] + acc[r][n];
        }
    }
}

INLINE void add_values(float *o, const float rescale[TOGETHER], const float *p, const char *const *v, acr_dtype type,
                       int64_t dims, int64_t keys, int rows)
{
    const int most = REGISTERS / 2 / rows < 8 ? REGISTERS / 2 / rows : 8, few = most < 4 ? 1 : most / 2;
    const int64_t o_stride = round_up(dims, LANES);
    int64_t dim = 0;
    for (; dim + most * LANES <= dims; dim += most * LANES) {
        add_vectors(o, rescale, p, v, type, o_stride, dim, keys, rows, most, LANES);
    }
    for (; few > 1 && dim + few * LANES <= dims; dim += few * LANES) {
        add_vectors(o, rescale, p, v, type, o_stride, dim, keys, rows, few, LANES);
    }
    for (; dim + LANES <= dims; dim += LANES) {
        add_vectors(o, rescale, p, v, type, o_stride, dim, keys, rows, 1, LANES);
    }
    if (dim < dims) {
        add_vectors(o, rescale, p, v, type, o_stride, dim, keys, rows, 1, dims - dim);
    }
}

/* ---- Softmax ---- */

static float max_of_lanes(vec x)
{
    float most = minus_infinity;
    for (int lane = 0; lane < LANES; lane++) {
        most = x[lane] > most ? x[lane] : most;
    }
    return most;
}

static float sum_of_lanes(vec x)
{
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) {
        sum += x[lane];
    }
    return sum;
}

/* 2^(x * scale) of one number. */
static float exp2_of(float x, float scale_log2)
{
    return exp2_scaled(splat(x), scale_log2, -127.0f / scale_log2)[0];
}

static ivec lane_numbers(void)
{
    ivec numbers;
    for (int lane = 0; lane < LANES; lane++) {
        numbers[lane] = lane;
    }
    return numbers;
}

/* Scores in natural units: cap, bias, ALiBi. Of keys from `first` on, or of those that are listed where the rows are
 * sparse. */
static void apply_terms(const scratch_parts *parts, float *s, const fwd_args *args, const item *it, int64_t row,
                        int64_t first, int64_t keys)
{
    const float cap = args->softcap, inverse_cap = cap > 0 ? 1.0f / cap : 0;
    const float slope = args->slopes ? args->slopes[query_head_of(args, &it->entry, row)] : 0;
    const int32_t position = visible_position(it->entry.visible, (int32_t)(row / args->group));
    for (int64_t key = 0; key < keys; key += LANES) {
        vec x = *(const vec_anywhere *)&s[key] * it->scales.raw_scale;
        x = cap > 0 ? cap * tanh_vec(x * inverse_cap) : x;
        x = args->bias && args->bias_type != FWD_BIAS_MASK ? x + *(const vec *)&parts->bias[key] : x;
        if (args->slopes) {
            const ivec number =
                it->is_sparse ? *(const ivec *)&parts->seen_key[key] : (int32_t)(first + key) + lane_numbers();
            const ivec behind = position - number;
            x -= slope * __builtin_convertvector(pick_bits(behind < 0, (uvec)-behind, (uvec)behind), vec);
        }
        *(vec_anywhere *)&s[key] = x;
    }
}

/* Turns a row's scores into weights relative to the new maximum, updates max and sum, and returns what older results
 * must be multiplied by. Behind the keys there is room for a vector. */
static float weigh(float *s, int64_t keys, float *max, float *sum, float scale_log2)
{
    const float least = -127.0f / scale_log2;
    for (int64_t key = keys; key < round_up(keys, LANES); key++) {
        s[key] = minus_infinity;
    }
    vec tile_max = splat(*max); /* a maximum that NaN does not touch: sums do not lose it */
    for (int64_t key = 0; key < keys; key += LANES) {
        tile_max = max_or_second(*(const vec *)&s[key], tile_max);
    }
    const float new_max = max_of_lanes(tile_max);
    const float reference = new_max == minus_infinity ? 0 : new_max; /* keeps (-inf) - (-inf) from giving NaN */
    const float rescale = exp2_of(*max - reference, scale_log2);
    vec added = {0};
    for (int64_t key = 0; key < keys; key += LANES) {
        const vec weight = exp2_scaled(*(const vec *)&s[key] - reference, scale_log2, least);
        added += weight;
        *(vec *)&s[key] = weight;
    }
    *max = new_max;
    *sum = *sum * rescale + sum_of_lanes(added);
    return rescale;
}

/* ---- An item ---- */

static void begin(const scratch_parts *parts, const partial *p, const fwd_args *args, const item *it)
{
    const int64_t stride = round_up(args->qk_dim, LANES);
    for (int64_t r = 0; r < it->rows; r++) {
        const int64_t row = it->first_row + r, at = row_offset(args, &args->q_stride, &it->entry, row);
        for (int64_t dim = 0; dim < args->qk_dim; dim += LANES) {
            *(vec *)&parts->q[r * stride + dim] = load_some_floats(DTYPE, args->q, at + dim, args->qk_dim - dim);
        }
        const int32_t i = (int32_t)(row / args->group);
        parts->first[r] = visible_first(it->entry.visible, i);
        parts->end[r] = visible_end(it->entry.visible, i);
        widen_by_ranges(args, &it->entry, visible_position(it->entry.visible, i), &parts->first[r], &parts->end[r]);
        p->max[r] = minus_infinity;
        p->sum[r] = 0;
        p->sees[r] = 0;
    }
    for (int64_t i = 0; i < it->rows * round_up(args->v_dim, LANES); i += LANES) {
        *(vec *)&p->o[i] = (vec){0};
    }
}

/* Where the rows [first, end) of k or v begin. */
static void find_tile(const char **at, const scratch_parts *parts, const void *base, const fwd_strides *stride,
                      const item *it, int64_t first, int64_t end)
{
    const int64_t bytes = bytes_of(stored_type(&it->pages));
    for (int64_t row = first; row < end;) {
        const key_run run = find_rows(stride, &it->entry, &it->pages, row, end);
        for (int64_t n = 0; n < run.rows; n++) {
            at[row - first + n] = run.at < 0 ? parts->nowhere : (const char *)base + (run.at + n * stride->row) * bytes;
        }
        row += run.rows;
    }
}

/* Adds keys that lie at k and v, of an interval the first of them key `first`, to `rows` rows from the item's row r on;
 * `rows` and type are constants. */
INLINE void attend(const scratch_parts *parts, const partial *p, const fwd_args *args, const item *it, int64_t r,
                   const char *const *k, const char *const *v, int64_t first, int64_t keys, acr_dtype type, int rows)
{
    float rescale[TOGETHER];
    score(parts->s, parts->q + r * round_up(args->qk_dim, LANES), k, type, args->qk_dim, keys, rows);
    for (int n = 0; n < rows; n++) {
        float *s = parts->s + n * (KV_TILE + LANES);
        if (it->scales.raw_scale != 0) {
            apply_terms(parts, s, args, it, it->first_row + r + n, first, keys);
        }
        p->sees[r + n] = 1;
        rescale[n] = weigh(s, keys, &p->max[r + n], &p->sum[r + n], it->scales.scales.scale_log2);
    }
    add_values(p->o + r * round_up(args->v_dim, LANES), rescale, parts->s, v, type, args->v_dim, keys, rows);
}

/* rows: 4, 2 or 1. */
INLINE void attend_some(const scratch_parts *parts, const partial *p, const fwd_args *args, const item *it, int64_t r,
                        const char *const *k, const char *const *v, int64_t first, int64_t keys, acr_dtype type,
                        int rows)
{
    if (rows == 4) {
        attend(parts, p, args, it, r, k, v, first, keys, type, 4);
    } else if (rows == 2) {
        attend(parts, p, args, it, r, k, v, first, keys, type, 2);
    } else {
        attend(parts, p, args, it, r, k, v, first, keys, type, 1);
    }
}

/* One function a type, so that each has its registers. */
static __attribute__((noinline)) void attend_as_they_are(const scratch_parts *parts, const partial *p,
                                                         const fwd_args *args, const item *it, int64_t r,
                                                         const char *const *k, const char *const *v, int64_t first,
                                                         int64_t keys, int rows)
{
    attend_some(parts, p, args, it, r, k, v, first, keys, DTYPE, rows);
}

static __attribute__((noinline)) void attend_of_8_bits(const scratch_parts *parts, const partial *p,
                                                       const fwd_args *args, const item *it, int64_t r,
                                                       const char *const *k, const char *const *v, int64_t first,
                                                       int64_t keys, int rows)
{
    attend_some(parts, p, args, it, r, k, v, first, keys, ACR_E4M3, rows);
}

static void attend_rows(const scratch_parts *parts, const partial *p, const fwd_args *args, const item *it, int64_t r,
                        const char *const *k, const char *const *v, int64_t first, int64_t keys, int rows)
{
    const bool as_they_are = DTYPE == ACR_E4M3 || stored_type(&it->pages) == DTYPE;
    (as_they_are ? attend_as_they_are : attend_of_8_bits)(parts, p, args, it, r, k, v, first, keys, rows);
}

/* Lists the keys of a tile [first, end) that a sparse row sees, with their biases, and returns how many they are. */
static int64_t list_seen(const scratch_parts *parts, const fwd_args *args, const item *it, int64_t row, int32_t first,
                         int32_t end, int32_t tile)
{
    const int32_t i = (int32_t)(row / args->group), position = visible_position(it->entry.visible, i);
    const int32_t row_first = visible_first(it->entry.visible, i), row_end = visible_end(it->entry.visible, i);
    const int64_t tree_first = it->entry.keys - it->entry.queries, tree_bytes = (args->q_len + 7) / 8;
    const float hidden = args->bias_type == FWD_BIAS_MASK ? 0 : minus_infinity;
    if (args->bias) {
        const fwd_strides *s = &args->bias_stride;
        const int64_t at =
            it->entry.batch * s->batch + query_head_of(args, &it->entry, row) * s->head + i * s->row + first;
        for (int64_t key = 0; key < end - first; key += LANES) {
            const int64_t count = end - first - key < LANES ? end - first - key : LANES;
            *(vec *)&parts->bias[key] = load_some_bias(args->bias_type, args->bias, at + key, count);
        }
    }
    int64_t seen = 0;
    for (int32_t key = first; key < end; key++) {
        bool sees = key >= row_first && key < row_end;
        for (int32_t n = 0; !sees && args->ranges && n < args->ranges_count; n++) {
            const int32_t *range = &args->ranges[2 * (it->entry.batch * args->ranges_count + n)];
            sees = position >= range[0] && position < range[1] && key >= range[0] && key < range[1] &&
                   key >= it->entry.visible.kv_start;
        }
        if (sees && args->tree && key >= tree_first) {
            const int64_t bit = key - tree_first;
            sees = args->tree[(it->entry.batch * args->q_len + i) * tree_bytes + bit / 8] >> bit % 8 & 1;
        }
        if (!sees || (args->bias && parts->bias[key - first] == hidden)) {
            continue;
        }
        parts->bias[seen] = args->bias ? parts->bias[key - first] : 0; /* seen is at most key - first: it was read */
        parts->seen_key[seen] = key;
        parts->seen_k[seen] = parts->k[key - tile];
        parts->seen_v[seen] = parts->v[key - tile];
        seen++;
    }
    return seen;
}

/* As add_tile, of sparse rows. */
static void add_sparse_tile(const scratch_parts *parts, const partial *p, const fwd_args *args, const item *it,
                            int32_t first, int32_t end)
{
    for (int64_t r = 0; r < it->rows; r++) {
        const int32_t from = visible_max(parts->first[r], first), to = visible_min(parts->end[r], end);
        const int64_t seen = from < to ? list_seen(parts, args, it, it->first_row + r, from, to, first) : 0;
        if (seen > 0) {
            attend_rows(parts, p, args, it, r, parts->seen_k, parts->seen_v, 0, seen, 1);
        }
    }
}

/* Adds a tile of keys [first, end), whose places are found, to all rows: those together that see the same of it. */
static void add_tile(const scratch_parts *parts, const partial *p, const fwd_args *args, const item *it, int32_t first,
                     int32_t end)
{
    int rows;
    for (int64_t r = 0; r < it->rows; r += rows) {
        const int32_t from = visible_max(parts->first[r], first), to = visible_min(parts->end[r], end);
        int alike = 1;
        while (alike < TOGETHER && r + alike < it->rows && visible_max(parts->first[r + alike], first) == from &&
               visible_min(parts->end[r + alike], end) == to) {
            alike++;
        }
        rows = alike >= 4 ? 4 : alike >= 2 ? 2 : 1;
        if (from >= to) {
            continue;
        }
        const char *const *k = parts->k + (from - first), *const *v = parts->v + (from - first);
        attend_rows(parts, p, args, it, r, k, v, from, to - from, rows);
    }
}

/* Adds keys [first, end) to the item's rows, tile by tile from multiples of KV_TILE on: which keys are summed together
 * depends on no other row. */
static void add_keys(const scratch_parts *parts, const partial *p, const fwd_args *args, const item *it, int64_t first,
                     int64_t end)
{
    for (int64_t tile = first / KV_TILE * KV_TILE; tile < end; tile += KV_TILE) {
        const int64_t from = tile > first ? tile : first, to = tile + KV_TILE < end ? tile + KV_TILE : end;
        find_tile(parts->k, parts, args->k, &args->k_stride, it, from, to);
        find_tile(parts->v, parts, args->v, &args->v_stride, it, from, to);
        if (it->is_sparse) {
            add_sparse_tile(parts, p, args, it, (int32_t)from, (int32_t)to);
        } else {
            add_tile(parts, p, args, it, (int32_t)from, (int32_t)to);
        }
    }
}

/* ---- Out ---- */

/* Takes a row's sink into max and sum, as if it were a key of its own without a value, and returns what o must be
 * multiplied by. max is in natural units then. */
static float join_sink(float *max, float *sum, float sink, float scale)
{
    const float log2_e = 1.44269504088896340736f, natural = *max * scale;
    const float largest = sink > natural ? sink : natural; /* natural where either is NaN */
    const float reference = largest == minus_infinity ? 0 : largest;
    const float kept = exp2_of(natural - reference, log2_e);
    *sum = *sum * kept + exp2_of(sink - reference, log2_e);
    *max = largest;
    return kept;
}

/* Divides by the sums and writes the item's rows. */
static void finish(const partial *p, const fwd_args *args, const item *it)
{
    const acr_dtype out_dtype = args->out_bf16 == ACR__OUT_F32 ? ACR_F32
                                : DTYPE != ACR_E4M3            ? DTYPE
                                : args->out_bf16               ? ACR_BF16
                                                               : ACR_F16;
    const float log_scale = args->sinks ? 1.0f : it->scales.scales.scale;
    for (int64_t r = 0; r < it->rows; r++) {
        const int64_t row = it->first_row + r;
        float max = p->max[r], sum = p->sum[r], kept = 1;
        if (args->sinks) {
            kept = join_sink(&max, &sum, args->sinks[query_head_of(args, &it->entry, row)], it->scales.scales.scale);
        }
        const float factor = it->scales.scales.out_scale / sum;
        const float *o = p->o + r * round_up(args->v_dim, LANES);
        const int64_t at = row_offset(args, &args->o_stride, &it->entry, row);
        for (int64_t dim = 0; dim < args->v_dim; dim += LANES) {
            const vec x = p->sees[r] ? *(const vec *)&o[dim] * kept * factor : (vec){0};
            store_some_floats(out_dtype, args->o, at + dim, args->v_dim - dim < LANES ? args->v_dim - dim : LANES, x);
        }
        if (args->lse) {
            args->lse[lse_index(args, &it->entry, row)] =
                sum == 0 ? minus_infinity : max * log_scale + ln_vec(splat(sum))[0];
        }
    }
}

/* Adds the parts of an item's rows into `to`. */
static void merge(const partial *to, const fwd_args *args, const cutting *c, const item *it, char *first_part)
{
    const int64_t stride = round_up(args->v_dim, LANES);
    const float scale_log2 = it->scales.scales.scale_log2;
    partial part;
    const int64_t bytes = cut_partial(&part, NULL, args->v_dim, c->tile_rows);
    for (int64_t r = 0; r < it->rows; r++) {
        float max = minus_infinity;
        for (int64_t n = 0; n < c->parts; n++) {
            cut_partial(&part, first_part + n * bytes, args->v_dim, c->tile_rows);
            max = part.max[r] > max ? part.max[r] : max;
        }
        const float reference = max == minus_infinity ? 0 : max;
        to->max[r] = max;
        to->sum[r] = 0;
        to->sees[r] = 0;
        for (int64_t n = 0; n < c->parts; n++) {
            cut_partial(&part, first_part + n * bytes, args->v_dim, c->tile_rows);
            const float kept = exp2_of(part.max[r] - reference, scale_log2);
            to->sum[r] += part.sum[r] * kept;
            to->sees[r] |= part.sees[r];
            for (int64_t dim = 0; dim < args->v_dim; dim += LANES) {
                const vec x = *(const vec *)&part.o[r * stride + dim] * kept;
                vec *sum = (vec *)&to->o[r * stride + dim];
                *sum = n == 0 ? x : *sum + x;
            }
        }
    }
}

/* ---- A call ---- */

static void run_item(const scratch_parts *parts, const fwd_args *args, const cutting *c, const item *it, int64_t part,
                     char *leaves)
{
    partial p = parts->partial;
    if (c->parts > 1) {
        cut_partial(&p, leaves, args->v_dim, c->tile_rows);
    }
    begin(parts, &p, args, it);
    int64_t first = part * c->part_keys, end = first + c->part_keys;
    int32_t seen_first = INT32_MAX, seen_end = 0;
    for (int64_t r = 0; r < it->rows; r++) {
        if (parts->first[r] < parts->end[r]) {
            seen_first = visible_min(seen_first, parts->first[r]);
            seen_end = visible_max(seen_end, parts->end[r]);
        }
    }
    first = first > seen_first ? first : seen_first;
    end = end < seen_end ? end : seen_end;
    if (first < end) {
        add_keys(parts, &p, args, it, first, end);
    }
    if (c->parts == 1) {
        finish(&p, args, it);
    }
}

static void run(const fwd_args *args, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    (void)lane;
    (void)lanes;
    const int64_t one_finished = (int64_t)1 << 32;
    scratch_parts parts;
    cut_scratch(&parts, scratch, args->qk_dim, args->v_dim);
    if (fwd_paging_of(args).table) {
        __builtin_memset(parts.nowhere, 0xff, (size_t)nowhere_bytes(args->qk_dim, args->v_dim)); /* NaN in every type */
    }
    const cutting c = cut_keys((int64_t)args->batch * args->kv_heads, (int64_t)args->group * args->q_len, args->kv_len);
    const int64_t units = c.heads * c.tiles, items = units * c.parts;
    partial leaves;
    const int64_t bytes = cut_partial(&leaves, NULL, args->v_dim, c.tile_rows);
    char *shared = args->workspace;
    for (;;) {
        int64_t taken = atomic_fetch_add_explicit(queue, 1, memory_order_relaxed);
        taken = c.parts > 1 ? taken % one_finished : taken;
        if (taken >= items) {
            return;
        }
        const item it = item_of(args, &c, taken / c.parts);
        run_item(&parts, args, &c, &it, taken % c.parts, c.parts > 1 ? shared + taken * bytes : NULL);
        if (c.parts > 1 &&
            atomic_fetch_add_explicit(queue, one_finished, memory_order_acq_rel) / one_finished == items - 1) {
            for (int64_t unit = 0; unit < units; unit++) {
                const item whole = item_of(args, &c, unit);
                merge(&parts.partial, args, &c, &whole, shared + unit * c.parts * bytes);
                finish(&parts.partial, args, &whole);
            }
        }
    }
}

/* ---- The description ---- */

DESCRIBES static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    if (!(device->isa & ISA)) {
        return "this CPU lacks " KERNEL_ARCH;
    }
    return scale_why_not(problem);
}

DESCRIBES static cutting cutting_of(const acr_problem *problem)
{
    return cut_keys(problem->batch * problem->kv_heads, problem->q_heads / problem->kv_heads * problem->q_len,
                    problem->kv_len);
}

DESCRIBES static int64_t items(const acr_problem *problem)
{
    const cutting c = cutting_of(problem);
    return c.heads * c.tiles * c.parts;
}

DESCRIBES static size_t shared(const acr_problem *problem)
{
    partial p;
    const cutting c = cutting_of(problem);
    return c.parts == 1 ? 0 : (size_t)(items(problem) * cut_partial(&p, NULL, problem->v_dim, c.tile_rows));
}

DESCRIBES static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    scratch_parts parts;
    return shared(problem) + (size_t)(cut_scratch(&parts, NULL, problem->qk_dim, problem->v_dim) * device->threads);
}

/* Cycles of the vector units, counted, and fitted to what a Zen 4 took where caches keep up, as they are taken to
 * (lab.md). */
DESCRIBES static double cost(const acr_problem *problem, const acr__device *device)
{
    const cutting c = cutting_of(problem);
    const double vectors = (double)(round_up(problem->qk_dim, LANES) + round_up(problem->v_dim, LANES)) / LANES;
#if defined KERNEL_ARCH_avx512
    const double upcast_16 = 1.27, upcast_8 = 3.5;
#else /* dims up to 96 were seen to take less; why is not known */
    const double upcast_16 = (DTYPE == ACR_BF16 ? 0.95 : 0.7) - (vectors < 32 ? 0.3 : 0), upcast_8 = 3;
#endif
    const uint32_t terms = acr__terms_of(problem);
    const bool is_sparse = terms & (FWD_TERM_BIAS | FWD_TERM_TREE | FWD_TERM_RANGES);
    const double weight_cycles =
        (14 + (terms & FWD_TERM_CAP ? 22 : 0) + (terms & FWD_TERM_ALIBI ? 3 : 0)) / (double)LANES + (is_sparse ? 8 : 0);
    /* A score: its products, two shuffles and an addition across lanes, storing and weighing. */
    const double score_cycles = vectors * 10 / PRODUCTS_IN_TEN_CYCLES + 3 + weight_cycles + 1;
    const acr_dtype stored = problem->kv_dtype == ACR_DTYPE_DEFAULT ? DTYPE : problem->kv_dtype;
    const double upcast = stored == ACR_F32 ? 0.5 : stored == ACR_E4M3 ? upcast_8 : upcast_16;
    const double key_cycles = vectors * upcast + 4; /* loaded and upcast for each TOGETHER rows */
    const int64_t rows = problem->q_heads / problem->kv_heads * problem->q_len;
    const double keys = acr__visible_pairs(acr__longest_entry(problem)) / (double)problem->q_len;
    const double groups = (double)ceil_div(rows, is_sparse ? 1 : TOGETHER), heads = (double)c.heads;
    const double merged = c.parts > 1 ? (double)(rows * c.parts) * (double)problem->v_dim / LANES * 4 : 0;
    const double cycles =
        heads * (keys * ((double)rows * score_cycles + groups * key_cycles) + (double)rows * (40 + 4 * vectors));
    const double all = (double)items(problem);
    const double rounds = (double)(((int64_t)all + device->threads - 1) / device->threads);
    return (cycles * rounds / all + heads * merged) / device->clock_hz;
}

const acr__kernel KERNEL_DESCRIPTION = {
    SIMD_KERNEL("fwd_row"),
    .shared = shared,
    .items = items,
    .traits = ACR__TRAIT_PACKED,
    .terms = FWD_TERM_ALL,
    .pages = 1,
    .v_in_k = 1,
    .kv_types = DTYPE == ACR_E4M3 ? 0 : 1u << ACR_E4M3,
    .out_types = DTYPE == ACR_E4M3 ? 0 : 1u << DTYPE | 1u << ACR_F32,
};
