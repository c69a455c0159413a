/* Forward attention on a CPU: FlashAttention's tiled online softmax (Dao et al. 2022) with a query row in every
 * vector lane.
 *
 * A work item is a tile of Q_TILE rows: positions of the query heads that share one key/value head. Its queries
 * are transposed once, so that a vector holds the same dim of LANES queries; scores and outputs then stay
 * transposed too:
 *
 *     S[key][row]  = sum over dims of Q[dim][row] * K[key][dim]      vector * scalar, K read where it lies
 *     O[dim][row] += sum over keys of S[key][row] * V[key][dim]      vector * scalar, V read where it lies
 *
 * Maxima, sums and rescaling of the softmax run down the keys, lane by lane: nothing is ever reduced across a
 * vector, K and V need no packing, and neither lengths nor dims need padding. Both products are one
 * register-blocked loop, multiply. 16-bit and 8-bit inputs are widened to float32 a tile at a time, and pages are
 * gathered on the way: load_rows alone knows where keys lie and of what type they are.
 *
 * Which keys are summed together depends on their places alone (tiles begin at multiples of KV_TILE), and what a row
 * does not see adds 0: so a row's bits depend on no other row, and on KV_TILE and the instruction set of the line. The
 * lines of wide row blocks have one KV_TILE for a type and instruction set, and serve ACR_INVARIANT.
 * README.md has the budget of registers and caches, and what did not work.
 *
 * Parameters: DTYPE (ACR_F32...), DIM (largest head dim served), Q_TILE, KV_TILE, the register block of ROW_VECS
 * vectors of rows times COLUMNS keys or dims, and UNROLL, the steps of its loop that are written out.
 *
 * PARAMETERS: DTYPE DIM Q_TILE KV_TILE ROW_VECS COLUMNS UNROLL */
#include "cpu/block.h"
#include "cpu/entry.h"

enum {
    COPIES = DTYPE != ACR_F32, /* K and V pass through a tile of floats or words */
    IS_INVARIANT = ROW_VECS == 2
};

_Static_assert(!PAIRS || DTYPE == ACR_BF16, "avx512bf16 multiplies bf16 alone");
_Static_assert(!PAIRS || KV_TILE % 2 == 0, "KV_TILE is odd: pairs of keys lie at even places");
_Static_assert(Q_TILE % ROWS == 0, "Q_TILE is not a multiple of ROW_VECS vectors");
_Static_assert(KV_TILE >= COLUMNS, "KV_TILE is narrower than COLUMNS");
_Static_assert(Q_TILE <= 1024 && KV_TILE <= 1024, "tiles above 1024 leave the caches");

/* ---- Work items and scratch ------------------------------------------------------------------------------------ */

/* A tile of the rows of one key/value head (entry.h numbers them). */
typedef struct tile {
    cpu_entry entry;
    int64_t first_row, end_row; /* empty beyond the end of a sequence */
    fwd_scales scales;          /* of the batch entry and head */
    fwd_paging pages;
    bool has_terms;  /* what follows is not 0: the scores get a pass of their own between the products */
    bool is_sparse;  /* what a row sees is no interval: ranges, a tree, a bias */
    float raw_scale; /* what q times k is multiplied by for the terms; scales.scale is what is left to do */
} tile;

/* A lane's scratch, cut into parts. Rows come in blocks of ROWS, innermost. */
typedef struct scratch_parts {
    float *q;             /* [Q_TILE / ROWS][steps_of(qk_dim)][ROWS] */
    float *o;             /* [Q_TILE / ROWS][v_dim][ROWS]: not yet divided by sum */
    float *s;             /* [KV_TILE][ROWS]: scores, then [steps][ROWS] weights, of one block and key tile */
    float *max;           /* [Q_TILE]: largest score so far, before scaling */
    float *sum;           /* [Q_TILE]: of the weights, relative to max */
    int32_t *first, *end; /* [Q_TILE]: the row sees the keys from first to end - 1 */
    float *k;             /* [KV_TILE][qk_dim rounded up to vectors], where rows are copied, see copies_rows; or NULL */
    float *v;             /* [KV_TILE][v_dim rounded up to vectors], likewise; of PAIRS a word holds two keys' values */
    /* With terms alone. */
    visible_keys *blocks; /* [Q_TILE / ROWS]: seen by some row of the block, and by every row */
    int32_t *position;    /* [Q_TILE]: of the row among the keys */
    float *slope, *sink;  /* [Q_TILE] */
    int32_t *any;         /* [Q_TILE]: -1 where a sparse row has seen a key, else 0 */
    int32_t *seen;        /* [KV_TILE][ROWS]: -1 where a sparse row sees a key, else 0 */
    float *bias;          /* [KV_TILE][ROWS] */
} scratch_parts;

/* Cuts scratch into its parts and returns its bytes. */
DESCRIBES static int64_t cut_scratch(scratch_parts *parts, char *scratch, int64_t qk_dim, int64_t v_dim, bool has_terms,
                                     bool copies)
{
    int64_t used = 0;
    parts->q = cut(scratch, &used, Q_TILE * steps_of(qk_dim));
    parts->o = cut(scratch, &used, Q_TILE * v_dim);
    parts->s = cut(scratch, &used, KV_TILE * ROWS);
    parts->max = cut(scratch, &used, Q_TILE);
    parts->sum = cut(scratch, &used, Q_TILE);
    parts->first = cut(scratch, &used, Q_TILE);
    parts->end = cut(scratch, &used, Q_TILE);
    parts->k = copies ? cut(scratch, &used, KV_TILE * round_up(qk_dim, LANES)) : NULL;
    parts->v = copies ? cut(scratch, &used, KV_TILE * round_up(v_dim, LANES)) : NULL;
    const int64_t rows = has_terms ? Q_TILE : 0, scores = has_terms ? KV_TILE * ROWS : 0;
    parts->blocks = cut(scratch, &used, 4 * (rows / ROWS)); /* of 4 numbers each */
    parts->position = cut(scratch, &used, rows);
    parts->slope = cut(scratch, &used, rows);
    parts->sink = cut(scratch, &used, rows);
    parts->any = cut(scratch, &used, rows);
    parts->seen = cut(scratch, &used, scores);
    parts->bias = cut(scratch, &used, scores);
    return used;
}

/* Whether rows of k and v pass through scratch: they are of another type, or in pages. */
DESCRIBES static bool copies_rows(bool paged, int32_t kv_type)
{
    return COPIES || paged || kv_type != (int32_t)ACR_DTYPE_DEFAULT;
}

static bool has_terms(const fwd_args *a)
{
    return a->softcap > 0 || a->sinks || a->slopes || a->bias || a->kv_starts || a->ranges || a->tree || a->chunk;
}

/* Items in the order of the queue. Without a mask, tile after tile of a head, which keeps its keys in the caches;
 * with one, the longest first over all heads, so that no lane is left with a long item at the end. */
static tile locate(const fwd_args *args, int64_t item, int64_t tiles)
{
    const int64_t heads = (int64_t)args->batch * args->kv_heads;
    const bool masked = visible_is_limited(fwd_rule_of(args));
    const int64_t head = masked ? item % heads : item / tiles;
    const int64_t index = masked ? tiles - 1 - item / heads : item % tiles;
    tile t = {.entry = entry_of(args, head / args->kv_heads, head % args->kv_heads),
              .first_row = index * Q_TILE,
              .pages = fwd_paging_of(args),
              .has_terms = has_terms(args),
              .is_sparse = args->ranges || args->tree || args->bias};
    const cpu_scales scales = cpu_scales_of(args, &t.entry);
    t.scales = scales.scales;
    t.raw_scale = scales.raw_scale;
    const int64_t rows = rows_of(args, &t.entry);
    t.end_row = t.first_row + Q_TILE < rows ? t.first_row + Q_TILE : rows;
    return t;
}

/* ---- In: queries, keys, values --------------------------------------------------------------------------------- */

/* The operands of LANES steps from q's element `index` on; what lies behind `count` elements is 0. */
INLINE vec load_some_steps(const void *q, int64_t index, int64_t count)
{
    if (!PAIRS) {
        return load_some_floats(DTYPE, q, index, count);
    }
    vec words;
    u16vec *halves = (u16vec *)&words;
    halves[0] = load_some_bf16(DTYPE, q, index, count);
    halves[1] = count > LANES ? load_some_bf16(DTYPE, q, index + LANES, count - LANES) : (u16vec){0};
    return words;
}

/* Transposes LANES rows of q, from `first` on; rows beyond the tile are 0. q points at lane 0 of the block's part. */
static void load_queries(float *q, const fwd_args *args, const tile *t, int64_t first)
{
    const int64_t steps = steps_of(args->qk_dim);
    for (int64_t step = 0; step < steps; step += LANES) {
        const int64_t dim = PAIRS ? 2 * step : step;
        vec block[LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            block[lane] = (vec){0};
            if (first + lane < t->end_row) {
                block[lane] = load_some_steps(args->q, row_offset(args, &args->q_stride, &t->entry, first + lane) + dim,
                                              args->qk_dim - dim);
            }
        }
        transpose(block);
        for (int64_t n = 0; n < LANES && step + n < steps; n++) {
            *(vec *)&q[(step + n) * ROWS] = block[n];
        }
    }
}

/* Rows of a tile that blocks of ROWS cover. */
static int64_t padded_rows(const tile *t)
{
    return round_up(t->end_row - t->first_row, ROWS);
}

/* The row that a lane beyond the tile follows: its last, so that it never widens the span of keys. */
static int64_t real_row(const tile *t, int64_t lane)
{
    return t->first_row + lane < t->end_row ? t->first_row + lane : t->end_row - 1;
}

static void begin_terms(const scratch_parts *parts, const fwd_args *args, const tile *t)
{
    for (int64_t lane = 0; lane < padded_rows(t); lane++) {
        const int64_t row = real_row(t, lane), head = query_head_of(args, &t->entry, row);
        parts->position[lane] = visible_position(t->entry.visible, (int32_t)(row / args->group));
        parts->slope[lane] = args->slopes ? args->slopes[head] : 0;
        parts->sink[lane] = args->sinks ? args->sinks[head] : minus_infinity;
        parts->any[lane] = 0;
        visible_keys *block = &parts->blocks[lane / ROWS];
        const int64_t block_first = lane / ROWS * ROWS;
        if (lane == block_first) { /* of a later position neither end of the interval is less */
            *block = (visible_keys){0, parts->first[lane + ROWS - 1], parts->end[lane], 0};
        }
        int32_t first = parts->first[lane], end = parts->end[lane];
        widen_by_ranges(args, &t->entry, parts->position[lane], &first, &end);
        if (first < end) {
            block->first = block->first < block->end ? visible_min(block->first, first) : first;
            block->end = visible_max(block->end, end);
        }
    }
}

static void begin_tile(const scratch_parts *parts, const fwd_args *args, const tile *t)
{
    for (int64_t row = 0; row < padded_rows(t); row += LANES) {
        float *q = parts->q + row / ROWS * steps_of(args->qk_dim) * ROWS + row % ROWS;
        load_queries(q, args, t, t->first_row + row);
        *(vec *)&parts->max[row] = splat(minus_infinity);
        *(vec *)&parts->sum[row] = (vec){0};
        for (int64_t lane = row; lane < row + LANES; lane++) {
            const int32_t position = (int32_t)(real_row(t, lane) / args->group);
            parts->first[lane] = visible_first(t->entry.visible, position);
            parts->end[lane] = visible_end(t->entry.visible, position);
        }
    }
    for (int64_t i = 0; i < padded_rows(t) * args->v_dim; i += LANES) {
        *(vec *)&parts->o[i] = (vec){0};
    }
    if (t->has_terms) {
        begin_terms(parts, args, t);
    }
}

/* Copies a run as floats, rows `padded` apart; NaN without a page. dtype: a constant. */
INLINE void copy_rows(float *to, acr_dtype dtype, const void *base, key_run run, int64_t row_stride, int64_t dim,
                      int64_t padded)
{
    for (int64_t row = 0; row < run.rows; row++) {
        for (int64_t d = 0; d < dim; d += LANES) {
            *(vec *)&to[row * padded + d] = run.at < 0
                                                ? splat(__builtin_nanf(""))
                                                : load_some_floats(dtype, base, run.at + row * row_stride + d, dim - d);
        }
    }
}

/* The same as bf16: of k row by row, so that a word holds two dims; of v, whose first row is the `from`th of its tile,
 * each row in its half of the words of two. */
INLINE void copy_pairs(float *to, acr_dtype dtype, const void *base, key_run run, int64_t row_stride, int64_t dim,
                       int64_t padded, int64_t from, bool is_v)
{
    for (int64_t row = 0; row < run.rows; row++) {
        for (int64_t d = 0; d < dim; d += LANES) {
            const u16vec x = run.at < 0 ? (u16vec){0} + (uint16_t)0x7fc0u
                                        : load_some_bf16(dtype, base, run.at + row * row_stride + d, dim - d);
            if (!is_v) {
                *(u16vec_anywhere *)((char *)&to[(from + row) * padded] + 2 * d) = x;
                continue;
            }
            uvec *words = (uvec *)&to[(from + row) / 2 * padded + d];
            const uvec wide = extend_16(x);
            *words = (from + row) % 2 == 0 ? wide : *words | wide << 16;
        }
    }
}

/* Rows [first, end) of k or v of the tile's head: where they lie, or copied to `copied`. is_v: a constant. */
INLINE matrix load_rows(float *copied, const void *base, const fwd_strides *stride, const tile *t, int64_t dim,
                        int64_t first, int64_t end, bool is_v)
{
    key_run run = find_rows(stride, &t->entry, &t->pages, first, end);
    if (!COPIES && !copied) {
        return (matrix){(const float *)base + run.at, stride->row};
    }
    const int64_t padded = round_up(is_v ? dim : steps_of(dim), LANES);
    const bool is_e4m3 = DTYPE != ACR_E4M3 && t->pages.kv_type == ACR_E4M3;
    for (int64_t row = first; row < end; row += run.rows) {
        run = find_rows(stride, &t->entry, &t->pages, row, end);
        float *to = &copied[(row - first) * padded];
        if (PAIRS && is_e4m3) {
            copy_pairs(copied, ACR_E4M3, base, run, stride->row, dim, padded, row - first, is_v);
        } else if (PAIRS) {
            copy_pairs(copied, DTYPE, base, run, stride->row, dim, padded, row - first, is_v);
        } else if (is_e4m3) {
            copy_rows(to, ACR_E4M3, base, run, stride->row, dim, padded);
        } else {
            copy_rows(to, DTYPE, base, run, stride->row, dim, padded);
        }
    }
    return (matrix){copied, padded};
}

/* A tile of keys, loaded when a block of rows sees some of it. */
typedef struct key_tile {
    matrix k, v;
    bool is_loaded;
} key_tile;

INLINE void load_key_tile(key_tile *now, const scratch_parts *parts, const fwd_args *args, const tile *t, int64_t first,
                          int64_t end)
{
    now->k = load_rows(parts->k, args->k, &args->k_stride, t, args->qk_dim, first, end, false);
    now->v = !PAIRS && values_are_keys(args)
                 ? now->k
                 : load_rows(parts->v, args->v, &args->v_stride, t, args->v_dim, first, end, true);
    now->is_loaded = true;
}

/* ---- The two products ------------------------------------------------------------------------------------------ */

/* Which of a block's rows see a key; first and end are the block's. */
INLINE ivec sees(const int32_t *first, const int32_t *end, int r, int32_t key)
{
    return (ivec)(*(const ivec *)&first[r * LANES] <= key) & (ivec)(*(const ivec *)&end[r * LANES] > key);
}

/* What the scores of one block of rows against one tile of keys need. */
typedef struct score_call {
    float *s;       /* [keys][ROWS]: the scores */
    const float *q; /* [dim][ROWS] */
    matrix k;
    int64_t dim, keys;
    int32_t first_key;                  /* of the tile */
    const int32_t *row_first, *row_end; /* [ROWS] */
    bool masked;                        /* some row does not see some key: its score becomes -infinity */
} score_call;

/* Scores of `columns` keys from the tile's key `key` on, for one block of rows; raises max[rows]. */
INLINE void score_columns(const score_call *call, vec max[ROW_VECS], int64_t key, int columns)
{
    vec acc[COLUMNS][ROW_VECS] = {0};
    multiply(acc, call->q, call->k.at + key * call->k.row_stride, call->k.row_stride, 1, steps_of(call->dim), columns);
    FLATTENED
    for (int c = 0; c < columns; c++) {
        FLATTENED
        for (int r = 0; r < ROW_VECS; r++) {
            if (call->masked) {
                const ivec visible = sees(call->row_first, call->row_end, r, call->first_key + (int32_t)key + c);
                acc[c][r] = pick(visible, acc[c][r], splat(minus_infinity));
            }
            max[r] = max_or_second(acc[c][r], max[r]);
            *(vec *)&call->s[(key + c) * ROWS + r * LANES] = acc[c][r];
        }
    }
}

/* Multiplies o by rescale[rows] and adds the weighted values of `columns` dims. The tile's share is summed by
 * itself: partial sums stay small, and so do their roundings. */
INLINE void add_columns(float *o, const vec rescale[ROW_VECS], const float *s, matrix v, int64_t keys, int columns)
{
    vec acc[COLUMNS][ROW_VECS] = {0};
    multiply(acc, s, v.at, 1, v.row_stride, steps_of(keys), columns);
    FLATTENED
    for (int c = 0; c < columns; c++) {
        FLATTENED
        for (int r = 0; r < ROW_VECS; r++) {
            vec *at = (vec *)&o[c * ROWS + r * LANES];
            *at = *at * rescale[r] + acc[c][r];
        }
    }
}

/* Scores of all keys of the tile for one block of rows; returns their maxima in max[rows]. */
INLINE void score(const score_call *call, vec max[ROW_VECS])
{
    FLATTENED
    for (int r = 0; r < ROW_VECS; r++) {
        max[r] = splat(minus_infinity);
    }
    int columns;
    for (int64_t key = 0; key < call->keys; key += columns) {
        columns = next_columns(call->keys - key);
        if (columns == COLUMNS) {
            score_columns(call, max, key, COLUMNS);
        } else if (columns == FEW) {
            score_columns(call, max, key, FEW);
        } else {
            score_columns(call, max, key, 1);
        }
    }
}

/* o = o * rescale + transpose(weights) * v, for one block of rows. */
INLINE void add_values(float *o, const vec rescale[ROW_VECS], const float *s, matrix v, int64_t keys, int64_t dims)
{
    int columns;
    for (int64_t dim = 0; dim < dims; dim += columns) {
        columns = next_columns(dims - dim);
        const matrix part = {v.at + dim, v.row_stride};
        if (columns == COLUMNS) {
            add_columns(&o[dim * ROWS], rescale, s, part, keys, COLUMNS);
        } else if (columns == FEW) {
            add_columns(&o[dim * ROWS], rescale, s, part, keys, FEW);
        } else {
            add_columns(&o[dim * ROWS], rescale, s, part, keys, 1);
        }
    }
}

/* As add_values, to the bit, with nothing added for keys that a row does not see: 0 * infinity would be NaN. Slow, and
 * rare. seen: of sparse rows, else NULL. */
static void add_seen_values(float *o, const vec rescale[ROW_VECS], const float *s, matrix v, int64_t keys, int64_t dims,
                            const int32_t *row_first, const int32_t *row_end, int32_t first_key, const int32_t *seen)
{
    for (int64_t dim = 0; dim < dims; dim++) {
        for (int r = 0; r < ROW_VECS; r++) {
            vec sum = {0};
            for (int32_t step = 0; step < (int32_t)steps_of(keys); step++) {
                ivec visible = {0}; /* of the lane's word */
                for (int32_t half = 0; half < (PAIRS ? 2 : 1); half++) {
                    const int32_t key = PAIRS ? 2 * step + half : step;
                    const ivec sees_key = key >= keys ? (ivec){0}
                                          : seen      ? *(const ivec *)&seen[key * ROWS + r * LANES]
                                                      : sees(row_first, row_end, r, first_key + key);
                    visible |= !PAIRS ? sees_key : sees_key & (half ? (int32_t)0xffff0000u : 0xffff);
                }
                const vec value = pick(visible, splat_at(&v.at[step * v.row_stride + dim]), (vec){0});
                sum = add_product(sum, *(const vec *)&s[step * ROWS + r * LANES], value);
            }
            vec *at = (vec *)&o[dim * ROWS + r * LANES];
            *at = *at * rescale[r] + sum;
        }
    }
}

/* ---- Softmax --------------------------------------------------------------------------------------------------- */

/* A weight: 2^(x * scale), as exactly as its type needs. */
INLINE vec weight_of(vec x, float scale, float least)
{
    return PAIRS ? exp2_of_bf16(x * scale) : exp2_scaled(x, scale, least);
}

/* Turns scores into weights relative to the new maximum, updates max and sum, and returns what older results must
 * be multiplied by. Of PAIRS the weights are rounded to bf16, the sum is of what they were before. */
INLINE void weigh(float *s, int64_t keys, const vec tile_max[ROW_VECS], float *max, float *sum, float scale_log2,
                  vec rescale[ROW_VECS])
{
    const float least = -127.0f / scale_log2;
    vec reference[ROW_VECS], added[ROW_VECS];
    FLATTENED
    for (int r = 0; r < ROW_VECS; r++) {
        const vec old_max = *(const vec *)&max[r * LANES];
        const vec new_max = max_or_second(tile_max[r], old_max);
        *(vec *)&max[r * LANES] = new_max;
        /* A row that has seen no key has maximum -infinity; 0 keeps (-infinity) - (-infinity) from giving NaN. */
        reference[r] = pick(new_max == minus_infinity, (vec){0}, new_max);
        rescale[r] = exp2_scaled(old_max - reference[r], scale_log2, least);
        added[r] = (vec){0};
    }
    for (int64_t step = 0; step < steps_of(keys); step++) {
        FLATTENED
        for (int r = 0; r < ROW_VECS; r++) {
            const int64_t key = PAIRS ? 2 * step : step;
            const vec *from = (const vec *)&s[key * ROWS + r * LANES];
            vec *to = (vec *)&s[step * ROWS + r * LANES]; /* what is there has been read */
            const vec weight = weight_of(*from - reference[r], scale_log2, least);
            added[r] += weight;
            if (PAIRS) {
                const vec next =
                    key + 1 < keys ? weight_of(from[ROW_VECS] - reference[r], scale_log2, least) : (vec){0};
                added[r] += next;
                *to = pair_of(weight, next);
            } else {
                *to = weight;
            }
        }
    }
    FLATTENED
    for (int r = 0; r < ROW_VECS; r++) {
        vec *at = (vec *)&sum[r * LANES];
        *at = *at * rescale[r] + added[r];
    }
}

/* ---- Terms: what the scores are beyond q times k ---------------------------------------------------------------- */

/* The bias of a block of rows for `keys` keys, key by key. */
static void load_bias(const scratch_parts *parts, const fwd_args *args, const tile *t, int block, int64_t first,
                      int64_t keys)
{
    const fwd_strides *s = &args->bias_stride;
    for (int row = 0; row < ROWS; row += LANES) {
        int64_t at[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t real = real_row(t, (int64_t)block * ROWS + row + lane);
            at[lane] = t->entry.batch * s->batch + (t->entry.kv_head * args->group + real % args->group) * s->head +
                       real / args->group * s->row + first;
        }
        for (int64_t key = 0; key < keys; key += LANES) {
            const int64_t count = keys - key < LANES ? keys - key : LANES;
            vec v[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                v[lane] = load_some_bias(args->bias_type, args->bias, at[lane] + key, count);
            }
            transpose(v);
            for (int64_t k = 0; k < count; k++) {
                *(vec *)&parts->bias[(key + k) * ROWS + row] = v[k];
            }
        }
    }
}

static void hide_by_bias(const scratch_parts *parts, const fwd_args *args, int64_t keys)
{
    const float hidden = args->bias_type == FWD_BIAS_MASK ? 0 : minus_infinity;
    for (int64_t i = 0; i < keys * ROWS; i += LANES) {
        *(ivec *)&parts->seen[i] &= (ivec)(*(const vec *)&parts->bias[i] != hidden);
    }
}

static void show_ranges(const scratch_parts *parts, const fwd_args *args, const tile *t, const int32_t *position,
                        int64_t first, int64_t keys)
{
    for (int32_t n = 0; n < args->ranges_count; n++) {
        const int32_t *range = &args->ranges[2 * (t->entry.batch * args->ranges_count + n)];
        const int64_t begin = range[0] > first ? range[0] : first;
        const int64_t from = begin > t->entry.visible.kv_start ? begin : t->entry.visible.kv_start;
        const int64_t end = range[1] < first + keys ? range[1] : first + keys;
        for (int64_t key = from; key < end; key++) {
            for (int row = 0; row < ROWS; row += LANES) {
                const ivec at = *(const ivec *)&position[row];
                *(ivec *)&parts->seen[(key - first) * ROWS + row] |= (ivec)(at >= range[0]) & (ivec)(at < range[1]);
            }
        }
    }
}

static void hide_by_tree(const scratch_parts *parts, const fwd_args *args, const tile *t, int block, int64_t first,
                         int64_t keys)
{
    const int64_t tree_first = t->entry.keys - t->entry.queries, row_bytes = (args->q_len + 7) / 8;
    for (int row = 0; row < ROWS; row++) {
        const int64_t i = real_row(t, (int64_t)block * ROWS + row) / args->group;
        const uint8_t *bits = args->tree + (t->entry.batch * args->q_len + i) * row_bytes;
        for (int64_t key = first > tree_first ? first : tree_first; key < first + keys; key++) {
            const int64_t bit = key - tree_first;
            parts->seen[(key - first) * ROWS + row] &= -(bits[bit / 8] >> bit % 8 & 1);
        }
    }
}

/* Which of `keys` keys each of a block's sparse rows sees, into parts->seen; returns whether there is any. */
static bool mark_seen(const scratch_parts *parts, const fwd_args *args, const tile *t, int block, int64_t first,
                      int64_t keys)
{
    const int32_t *row_first = parts->first + block * ROWS, *row_end = parts->end + block * ROWS;
    for (int64_t key = 0; key < keys; key++) {
        for (int r = 0; r < ROW_VECS; r++) {
            *(ivec *)&parts->seen[key * ROWS + r * LANES] = sees(row_first, row_end, r, (int32_t)(first + key));
        }
    }
    if (args->ranges) {
        show_ranges(parts, args, t, parts->position + block * ROWS, first, keys);
    }
    if (args->tree) {
        hide_by_tree(parts, args, t, block, first, keys);
    }
    if (args->bias) {
        load_bias(parts, args, t, block, first, keys);
        hide_by_bias(parts, args, keys);
    }
    ivec any = {0};
    for (int row = 0; row < ROWS; row += LANES) {
        ivec of_rows = {0};
        for (int64_t key = 0; key < keys; key++) {
            of_rows |= *(const ivec *)&parts->seen[key * ROWS + row];
        }
        *(ivec *)&parts->any[block * ROWS + row] |= of_rows;
        any |= of_rows;
    }
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) {
        found |= any[lane];
    }
    return found != 0;
}

/* Turns q times k into scores: cap, bias, ALiBi, then -infinity where a row does not see the key. max: as of score. */
static void finish_scores(const scratch_parts *parts, const fwd_args *args, const tile *t, int block, int64_t first,
                          int64_t keys, bool masked, vec max[ROW_VECS])
{
    const int32_t *row_first = parts->first + block * ROWS, *row_end = parts->end + block * ROWS;
    const float cap = args->softcap, inverse_cap = cap > 0 ? 1.0f / cap : 0;
    for (int r = 0; r < ROW_VECS; r++) {
        const ivec position = *(const ivec *)&parts->position[block * ROWS + r * LANES];
        const vec slope = *(const vec *)&parts->slope[block * ROWS + r * LANES];
        max[r] = splat(minus_infinity);
        for (int64_t key = 0; key < keys; key++) {
            const int64_t at = key * ROWS + r * LANES;
            vec x = *(const vec *)&parts->s[at];
            x = t->raw_scale != 0 ? x * t->raw_scale : x;
            x = cap > 0 ? cap * tanh_vec(x * inverse_cap) : x;
            x = args->bias && args->bias_type != FWD_BIAS_MASK ? x + *(const vec *)&parts->bias[at] : x;
            if (args->slopes) {
                const ivec behind = position - (int32_t)(first + key);
                x -= slope * __builtin_convertvector(pick_bits(behind < 0, (uvec)-behind, (uvec)behind), vec);
            }
            if (t->is_sparse) {
                x = pick(*(const ivec *)&parts->seen[at], x, splat(minus_infinity));
            } else if (masked) {
                x = pick(sees(row_first, row_end, r, (int32_t)(first + key)), x, splat(minus_infinity));
            }
            max[r] = max_or_second(x, max[r]);
            *(vec *)&parts->s[at] = x;
        }
    }
}

/* Takes the sinks into max and sum, as if each were a key of its own without a value; o follows. */
static void join_sinks(const scratch_parts *parts, const fwd_args *args, const tile *t)
{
    const float log2_e = 1.44269504088896340736f, least = -127.0f / log2_e;
    for (int64_t row = 0; row < padded_rows(t); row += LANES) {
        vec *max = (vec *)&parts->max[row], *sum = (vec *)&parts->sum[row];
        const vec sink = *(const vec *)&parts->sink[row], natural = *max * t->scales.scale;
        const vec largest = max_or_second(sink, natural);
        const vec reference = pick(largest == minus_infinity, (vec){0}, largest);
        const vec kept = exp2_scaled(natural - reference, log2_e, least);
        *sum = *sum * kept + exp2_scaled(sink - reference, log2_e, least);
        *max = largest;
        float *o = parts->o + row / ROWS * args->v_dim * ROWS + row % ROWS;
        for (int64_t dim = 0; dim < args->v_dim; dim++) {
            *(vec *)&o[dim * ROWS] *= kept;
        }
    }
}

/* ---- A tile ---------------------------------------------------------------------------------------------------- */

/* Adds keys [first, end) to one block of rows. now starts at key `first`, and ends at `loaded_end`. terms is a
 * constant: t->has_terms. */
INLINE void attend(const scratch_parts *parts, const fwd_args *args, const tile *t, int block, key_tile *now,
                   int64_t first, int64_t loaded_end, bool terms)
{
    const bool is_sparse = terms && t->is_sparse;
    int64_t end = loaded_end;
    const float *q = parts->q + (int64_t)block * steps_of(args->qk_dim) * ROWS;
    float *o = parts->o + (int64_t)block * args->v_dim * ROWS;
    const int32_t *row_first = parts->first + block * ROWS, *row_end = parts->end + block * ROWS;
    /* Of a later position neither end is less. */
    visible_keys seen = {row_first[0], row_first[ROWS - 1], row_end[0], row_end[ROWS - 1]};
    if (terms) {
        seen = parts->blocks[block];
    }
    end = end < seen.end ? end : seen.end;
    if (first >= end || end <= seen.first) {
        return;
    }
    const int64_t keys = end - first;
    if (is_sparse && !mark_seen(parts, args, t, block, first, keys)) {
        return;
    }
    if (is_sparse && !now->is_loaded) {
        load_key_tile(now, parts, args, t, first, loaded_end);
    }
    const bool masked = is_sparse || first < seen.full_first || end > seen.full_end;
    vec tile_max[ROW_VECS], rescale[ROW_VECS];
    score_call call = {parts->s, q, now->k, args->qk_dim, keys, (int32_t)first, row_first, row_end, true};
    if (masked && !terms) {
        score(&call, tile_max);
    } else {
        call.masked = false; /* a constant here: the loop without a mask is compiled by itself */
        score(&call, tile_max);
    }
    if (terms) {
        finish_scores(parts, args, t, block, first, keys, masked, tile_max);
    }
    weigh(parts->s, keys, tile_max, parts->max + block * ROWS, parts->sum + block * ROWS, t->scales.scale_log2,
          rescale);
    /* The last word of an odd number of keys may hold a value that the rows do not see. */
    if ((masked || (PAIRS && keys % 2 != 0)) && !all_finite(now->v, keys, args->v_dim)) {
        add_seen_values(o, rescale, parts->s, now->v, keys, args->v_dim, row_first, row_end, (int32_t)first,
                        is_sparse ? parts->seen : NULL);
    } else {
        add_values(o, rescale, parts->s, now->v, keys, args->v_dim);
    }
}

/* Divides by the sums and writes LANES rows, from `row` of the tile on. */
static void store_rows(const scratch_parts *parts, const fwd_args *args, const tile *t, int64_t row)
{
    const float *o = parts->o + row / ROWS * args->v_dim * ROWS + row % ROWS;
    const ivec sees_keys = t->is_sparse ? *(const ivec *)&parts->any[row]
                                        : (ivec)(*(const ivec *)&parts->end[row] > *(const ivec *)&parts->first[row]);
    const vec factor = t->scales.out_scale / *(const vec *)&parts->sum[row];
    const acr_dtype out_dtype = args->out_bf16 == ACR__OUT_F32 ? ACR_F32
                                : DTYPE != ACR_E4M3            ? DTYPE
                                : args->out_bf16               ? ACR_BF16
                                                               : ACR_F16;
    for (int64_t dim = 0; dim < args->v_dim; dim += LANES) {
        const int64_t count = args->v_dim - dim < LANES ? args->v_dim - dim : LANES;
        vec block[LANES];
        for (int64_t d = 0; d < LANES; d++) {
            block[d] = d < count ? pick(sees_keys, *(const vec *)&o[(dim + d) * ROWS] * factor, (vec){0}) : (vec){0};
        }
        transpose(block);
        for (int64_t lane = 0; lane < LANES && t->first_row + row + lane < t->end_row; lane++) {
            store_some_floats(out_dtype, args->o,
                              row_offset(args, &args->o_stride, &t->entry, t->first_row + row + lane) + dim, count,
                              block[lane]);
        }
    }
}

static void store_lse(const scratch_parts *parts, const fwd_args *args, const tile *t, int64_t row)
{
    const vec sum = *(const vec *)&parts->sum[row];
    const float scale = args->sinks ? 1.0f : t->scales.scale; /* join_sinks has scaled the maxima */
    const vec lse = pick(sum == 0, splat(minus_infinity), *(const vec *)&parts->max[row] * scale + ln_vec(sum));
    for (int64_t lane = 0; lane < LANES && t->first_row + row + lane < t->end_row; lane++) {
        args->lse[lse_index(args, &t->entry, t->first_row + row + lane)] = lse[lane];
    }
}

/* Adds keys [keys_first, keys_end) to all blocks. */
INLINE void add_keys(const scratch_parts *parts, const fwd_args *args, const tile *t, int64_t keys_first,
                     int64_t keys_end, bool terms)
{
    /* From a multiple of KV_TILE on: which keys are summed together depends on no other row. */
    for (int64_t first = keys_first / KV_TILE * KV_TILE; first < keys_end; first += KV_TILE) {
        const int64_t end = first + KV_TILE < keys_end ? first + KV_TILE : keys_end;
        key_tile now = {.is_loaded = false};
        if (!terms || !t->is_sparse) {
            load_key_tile(&now, parts, args, t, first, end);
        }
        for (int block = 0; block * ROWS < padded_rows(t); block++) {
            attend(parts, args, t, block, &now, first, end, terms);
        }
    }
}

/* Two functions, so that tiles without terms keep their registers for the products. */
static __attribute__((noinline)) void add_keys_without_terms(const scratch_parts *parts, const fwd_args *args,
                                                             const tile *t, int64_t first, int64_t end)
{
    add_keys(parts, args, t, first, end, false);
}

static __attribute__((noinline)) void add_keys_with_terms(const scratch_parts *parts, const fwd_args *args,
                                                          const tile *t, int64_t first, int64_t end)
{
    add_keys(parts, args, t, first, end, true);
}

static void run_tile(const scratch_parts *parts, const fwd_args *args, const tile *t)
{
    begin_tile(parts, args, t);
    int64_t keys_first = parts->first[0], keys_end = parts->end[padded_rows(t) - 1];
    for (int block = 0; args->ranges && block * ROWS < padded_rows(t); block++) {
        const visible_keys *seen = &parts->blocks[block];
        keys_first = seen->first < seen->end && seen->first < keys_first ? seen->first : keys_first;
        keys_end = seen->end > keys_end ? seen->end : keys_end;
    }
    (t->has_terms ? add_keys_with_terms : add_keys_without_terms)(parts, args, t, keys_first, keys_end);
    if (args->sinks) {
        join_sinks(parts, args, t);
    }
    for (int64_t row = 0; row < t->end_row - t->first_row; row += LANES) {
        store_rows(parts, args, t, row);
        if (args->lse) {
            store_lse(parts, args, t, row);
        }
    }
}

static void run(const fwd_args *args, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    (void)lane;
    (void)lanes;
    scratch_parts parts;
    const fwd_paging pages = fwd_paging_of(args);
    cut_scratch(&parts, scratch, args->qk_dim, args->v_dim, has_terms(args),
                copies_rows(pages.table != NULL, pages.kv_type));
    const int64_t tiles = ((int64_t)args->group * args->q_len + Q_TILE - 1) / Q_TILE; /* of the longest entry */
    const int64_t items = tiles * args->batch * args->kv_heads;
    for (;;) {
        const int64_t item = atomic_fetch_add_explicit(queue, 1, memory_order_relaxed);
        if (item >= items) {
            return;
        }
        const tile t = locate(args, item, tiles);
        if (t.first_row < t.end_row) {
            run_tile(&parts, args, &t);
        }
    }
}

/* ---- The description ------------------------------------------------------------------------------------------- */

DESCRIBES static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    if (!(device->isa & ISA)) {
        return "this CPU lacks " KERNEL_ARCH;
    }
    const uint32_t usable = DTYPE == ACR_BF16 ? device->isa : device->isa & ~(uint32_t)ACR__ISA_AVX512BF16;
    if (problem->flags & ACR_INVARIANT && usable >= 2u * ISA) {
        return "invariant: lines of the CPU's widest instruction set alone compute it (ACR_INVARIANT)";
    }
    return scale_why_not(problem);
}

DESCRIBES static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    scratch_parts parts;
    const bool terms = acr__terms_of(problem) != 0,
               copies = copies_rows(problem->flags & ACR_PAGED, (int32_t)problem->kv_dtype);
    return (size_t)(cut_scratch(&parts, NULL, problem->qk_dim, problem->v_dim, terms, copies) * device->threads);
}

/* Cycles of the vector units, counted; caches and memory are taken to keep up. */
DESCRIBES static double cost(const acr_problem *problem, const acr__device *device)
{
    const double loads_per_cycle = 2;
    const double by_units = ROW_VECS * COLUMNS * 10.0 / PRODUCTS_IN_TEN_CYCLES,
                 by_loads = (ROW_VECS + COLUMNS) / loads_per_cycle;
    const double elements_a_step = PAIRS ? 2 : 1;
    const double cycles_per_product =
        (by_units > by_loads ? by_units : by_loads) / (ROW_VECS * COLUMNS * elements_a_step);
    const uint32_t terms = acr__terms_of(problem);
    const double term_cycles = (terms != 0 ? 3 : 0) + (terms & FWD_TERM_CAP ? 22 : 0) +
                               (terms & FWD_TERM_BIAS ? 12 : 0) + (terms & FWD_TERM_ALIBI ? 3 : 0) +
                               (terms & FWD_TERM_TREE ? 2 * LANES : 0);
    const bool copies = copies_rows(problem->flags & ACR_PAGED, (int32_t)problem->kv_dtype);
    const double exp_cycles = 10 + term_cycles,
                 widen_cycles = PAIRS    ? 2
                                : copies ? 3
                                         : 0,
                 row_cycles = 6; /* a vector; row_cycles: transposing in and out */

    const double dims = (double)(problem->qk_dim + problem->v_dim);
    const int64_t rows = problem->q_heads / problem->kv_heads * problem->q_len;
    const double heads = (double)(problem->batch * problem->kv_heads);
    const double items = heads * (double)((rows + Q_TILE - 1) / Q_TILE);
    double keys = acr__visible_pairs(acr__longest_entry(problem)) / (double)problem->q_len; /* an average row sees */
    if (visible_is_limited(acr__rule_of(problem))) {
        keys += 0.5 * ROWS; /* a block sees what its last row sees */
    }
    const double row_vectors = heads * (double)(round_up(rows, ROWS) / LANES);
    const double cycles = row_vectors * (keys * (dims * cycles_per_product + exp_cycles) + dims * row_cycles) +
                          items * keys * dims / LANES * widen_cycles;
    const double rounds =
        (double)(((int64_t)items + device->threads - 1) / device->threads); /* the longest lane's items */
    return cycles / device->clock_hz * rounds / items;
}

const acr__kernel KERNEL_DESCRIPTION = {
    SIMD_KERNEL("fwd_simd"),
    .traits = ACR__TRAIT_PACKED | (IS_INVARIANT ? ACR__TRAIT_INVARIANT : 0),
    .terms = FWD_TERM_ALL,
    .pages = 1,
    .v_in_k = 1,
    .kv_types = DTYPE == ACR_E4M3 ? 0 : 1u << ACR_E4M3,
    .out_types = DTYPE == ACR_E4M3 ? 0 : 1u << DTYPE | 1u << ACR_F32,
};
