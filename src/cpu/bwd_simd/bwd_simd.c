/* Gradients of attention on a CPU. There are two kinds of work items, which compute the same weights from the same
 * numbers, one with query rows in the vector lanes, one with keys there:
 *
 *     dq of a tile of rows:  for every key tile     S = K Q, dP = V dO, dS = P (dP - D);              dQ += dS K
 *     dk and dv of a tile of keys:  for every row tile   S = Q K, dP = dO V, P, dS;       dV += P dO, dK += dS Q
 *
 * So no two items write the same element, no sum is shared between lanes of the pool, and the order of every sum is
 * the problem's: bits depend neither on the number of threads nor on who takes which item. Seven products are computed
 * where five are needed; what that buys is that there is no workspace beyond scratch, and nothing to wait for. dsinks
 * are items of a third kind, one for each query head.
 *
 * dk and dv of a key/value head are summed over its query heads, one head after another. D, the product of a row of o
 * and of its gradient, is computed where it is needed. README.md has the budget.
 *
 * Parameters: DTYPE (ACR_F32, ACR_F16, ACR_BF16), DIM (largest head dim served), Q_TILE, the rows or keys in the lanes
 * of an item, KV_TILE, the keys or rows that it meets at once, and the register block of block.h.
 *
 * PARAMETERS: DTYPE DIM Q_TILE KV_TILE ROW_VECS COLUMNS UNROLL */
#include "cpu/block.h"
#include "cpu/entry.h"

enum {
    WIDENS = DTYPE != ACR_F32 /* what an item meets passes through a float32 tile */
};

_Static_assert(Q_TILE % ROWS == 0, "Q_TILE is not a multiple of ROW_VECS vectors");
_Static_assert(KV_TILE >= COLUMNS, "KV_TILE is narrower than COLUMNS");
_Static_assert(Q_TILE <= 1024 && KV_TILE <= 1024, "tiles above 1024 leave the caches");
_Static_assert(DTYPE != ACR_E4M3, "8-bit inputs have no gradients");

static const float log2_of_e = 1.44269504088896340736f;

/* ---- Work items and scratch ------------------------------------------------------------------------------------ */

/* A lane's scratch, cut into parts. What is in the lanes of an item lies in blocks of ROWS, innermost: query rows and
 * their gradients of o, or keys and values. */
typedef struct scratch_parts {
    float *a;             /* [Q_TILE / ROWS][qk_dim][ROWS]: q or k */
    float *b;             /* [Q_TILE / ROWS][v_dim][ROWS]: d_o or v */
    float *da, *db;       /* as a and b: dq or dk, before the scale; dv */
    float *s, *dp;        /* [KV_TILE][ROWS]: scores, then weights; their gradients */
    float *bias;          /* [KV_TILE][ROWS] */
    float *x;             /* [KV_TILE][qk_dim rounded up to vectors]: k or q, where inputs are widened */
    float *y;             /* [KV_TILE][v_dim rounded up to vectors]: v or d_o */
    float *lse, *delta;   /* of query rows, in the lanes or met: [Q_TILE or KV_TILE] */
    float *slope;         /* likewise */
    int32_t *first, *end; /* likewise: the row sees the keys from first to end - 1; of a row that is none both are 0 */
    int32_t *position;    /* likewise: among the keys */
} scratch_parts;

enum {
    TILE_MOST = Q_TILE > KV_TILE ? Q_TILE : KV_TILE
};

/* Cuts scratch into its parts and returns its bytes. */
DESCRIBES static int64_t cut_scratch(scratch_parts *parts, char *scratch, int64_t qk_dim, int64_t v_dim)
{
    int64_t used = 0;
    parts->a = cut(scratch, &used, Q_TILE * qk_dim);
    parts->b = cut(scratch, &used, Q_TILE * v_dim);
    parts->da = cut(scratch, &used, Q_TILE * qk_dim);
    parts->db = cut(scratch, &used, Q_TILE * v_dim);
    parts->s = cut(scratch, &used, KV_TILE * ROWS);
    parts->dp = cut(scratch, &used, KV_TILE * ROWS);
    parts->bias = cut(scratch, &used, KV_TILE * ROWS);
    parts->x = cut(scratch, &used, WIDENS ? KV_TILE * round_up(qk_dim, LANES) : 0);
    parts->y = cut(scratch, &used, WIDENS ? KV_TILE * round_up(v_dim, LANES) : 0);
    parts->lse = cut(scratch, &used, TILE_MOST);
    parts->delta = cut(scratch, &used, TILE_MOST);
    parts->slope = cut(scratch, &used, TILE_MOST);
    parts->first = cut(scratch, &used, TILE_MOST);
    parts->end = cut(scratch, &used, TILE_MOST);
    parts->position = cut(scratch, &used, TILE_MOST);
    return used;
}

static cpu_entry head_of(const fwd_args *args, int64_t index)
{
    return entry_of(args, index / args->kv_heads, index % args->kv_heads);
}

/* A query row of a head: a query head of its group and a row of the entry. */
typedef struct query {
    int64_t q_head, row;
} query;

static int64_t query_offset(const fwd_strides *stride, const cpu_entry *h, query q)
{
    return h->batch * stride->batch + q.q_head * stride->head + (h->first_query + q.row) * stride->row;
}

static int64_t key_offset(const fwd_strides *stride, const cpu_entry *h, int64_t key)
{
    return h->batch * stride->batch + h->kv_head * stride->head + (h->first_key + key) * stride->row;
}

static float lse_of(const fwd_args *args, const cpu_entry *h, query q)
{
    return args->q_offsets ? args->lse[q.q_head * args->q_total + h->first_query + q.row]
                           : args->lse[(h->batch * args->q_heads + q.q_head) * args->q_len + q.row];
}

/* D: the product of a row of o and of its gradient. */
static float delta_of(const bwd_args *args, const cpu_entry *h, query q)
{
    const int64_t o = query_offset(&args->fwd.o_stride, h, q), d_o = query_offset(&args->d_o_stride, h, q);
    vec sums = {0};
    for (int64_t dim = 0; dim < args->fwd.v_dim; dim += LANES) {
        const int64_t count = args->fwd.v_dim - dim;
        sums +=
            load_some_floats(DTYPE, args->fwd.o, o + dim, count) * load_some_floats(DTYPE, args->d_o, d_o + dim, count);
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) {
        sum += sums[lane];
    }
    return sum;
}

/* Fills in place `at` of the parts that speak of query rows. */
static void describe_query(const scratch_parts *parts, const bwd_args *args, const cpu_entry *h, query q, int64_t at)
{
    const int32_t row = (int32_t)q.row;
    parts->lse[at] = lse_of(&args->fwd, h, q);
    parts->delta[at] = delta_of(args, h, q);
    parts->slope[at] = args->fwd.slopes ? args->fwd.slopes[q.q_head] : 0;
    parts->first[at] = visible_first(h->visible, row);
    parts->end[at] = visible_end(h->visible, row);
    parts->position[at] = visible_position(h->visible, row);
}

/* ---- In and out ------------------------------------------------------------------------------------------------ */

/* Where the rows of a tensor begin that are in the lanes of an item; -1 where there is none. */
typedef struct lane_rows {
    int64_t at[Q_TILE];
} lane_rows;

/* Transposes LANES rows, the first of them row `first` of the item: what is in no row is 0. */
static void load_lanes(float *to, const void *base, const lane_rows *rows, int64_t first, int64_t dims)
{
    for (int64_t dim = 0; dim < dims; dim += LANES) {
        vec block[LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            const int64_t at = rows->at[first + lane];
            block[lane] = at < 0 ? (vec){0} : load_some_floats(DTYPE, base, at + dim, dims - dim);
        }
        transpose(block);
        for (int64_t d = 0; d < LANES && dim + d < dims; d++) {
            *(vec *)&to[(dim + d) * ROWS] = block[d];
        }
    }
}

/* The way back: LANES rows of a gradient, times a factor. */
static void store_lanes(const bwd_args *args, void *base, const lane_rows *rows, int64_t first, int64_t dims,
                        const float *from, float factor)
{
    for (int64_t dim = 0; dim < dims; dim += LANES) {
        const int64_t count = dims - dim < LANES ? dims - dim : LANES;
        vec block[LANES];
        for (int64_t d = 0; d < LANES; d++) {
            block[d] = d < count ? *(const vec *)&from[(dim + d) * ROWS] * factor : (vec){0};
        }
        transpose(block);
        for (int64_t lane = 0; lane < LANES; lane++) {
            const int64_t at = rows->at[first + lane];
            if (at >= 0 && args->grad_f32) {
                store_some_floats(ACR_F32, base, at + dim, count, block[lane]);
            } else if (at >= 0) {
                store_some_floats(DTYPE, base, at + dim, count, block[lane]);
            }
        }
    }
}

static void clear(float *at, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES) {
        *(vec *)&at[i] = (vec){0};
    }
}

/* Rows that an item meets, `count` of them from `offset` on: where they lie, or widened. */
static matrix met_rows(float *widened, const void *base, int64_t offset, int64_t row_stride, int64_t dims,
                       int64_t count)
{
    if (!WIDENS) {
        return (matrix){(const float *)base + offset, row_stride};
    }
    const int64_t padded = round_up(dims, LANES);
    for (int64_t row = 0; row < count; row++) {
        for (int64_t d = 0; d < dims; d += LANES) {
            *(vec *)&widened[row * padded + d] = load_some_floats(DTYPE, base, offset + row * row_stride + d, dims - d);
        }
    }
    return (matrix){widened, padded};
}

/* ---- Products -------------------------------------------------------------------------------------------------- */

INLINE void multiply_columns(float *to, const float *a, const float *b, int64_t column_stride, int64_t step_stride,
                             int64_t steps, int columns, bool adds)
{
    vec acc[COLUMNS][ROW_VECS] = {0};
    multiply(acc, a, b, column_stride, step_stride, steps, columns);
    FLATTENED
    for (int c = 0; c < columns; c++) {
        FLATTENED
        for (int r = 0; r < ROW_VECS; r++) {
            vec *at = (vec *)&to[c * ROWS + r * LANES];
            *at = adds ? *at + acc[c][r] : acc[c][r];
        }
    }
}

/* to[column][ROWS] (+)= sum over steps of a[step][ROWS] * b[column * column_stride + step * step_stride]. */
INLINE void multiply_all(float *to, const float *a, const float *b, int64_t column_stride, int64_t step_stride,
                         int64_t steps, int64_t all_columns, bool adds)
{
    int columns;
    for (int64_t column = 0; column < all_columns; column += columns) {
        columns = next_columns(all_columns - column);
        float *at = to + column * ROWS;
        const float *from = b + column * column_stride;
        if (columns == COLUMNS) {
            multiply_columns(at, a, from, column_stride, step_stride, steps, COLUMNS, adds);
        } else if (columns == FEW) {
            multiply_columns(at, a, from, column_stride, step_stride, steps, FEW, adds);
        } else {
            multiply_columns(at, a, from, column_stride, step_stride, steps, 1, adds);
        }
    }
}

/* Products of `count` rows of m with what is in the lanes, over the dims. */
static __attribute__((noinline)) void meet(float *to, const float *lanes, matrix m, int64_t dims, int64_t count)
{
    multiply_all(to, lanes, m.at, m.row_stride, 1, dims, count, false);
}

/* Adds `count` rows of m, each times its weights. */
static __attribute__((noinline)) void add_rows(float *to, const float *weights, matrix m, int64_t dims, int64_t count)
{
    multiply_all(to, weights, m.at, 1, m.row_stride, count, dims, true);
}

/* The weight of pairs that do not see each other. */
INLINE vec hidden_weight(void)
{
    return splat(-0.0f);
}

/* As add_rows, to the bit, with nothing added for pairs that do not see each other: their weight is -0 (`weigh`), and
 * 0 * infinity would be NaN. It is NaN where a weight is 0 and the row sees the key. Slow, and rare. */
static void add_seen_rows(float *to, const float *weights, matrix m, int64_t dims, int64_t count)
{
    for (int64_t dim = 0; dim < dims; dim++) {
        for (int r = 0; r < ROW_VECS; r++) {
            vec sum = {0};
            for (int64_t row = 0; row < count; row++) {
                const vec weight = *(const vec *)&weights[row * ROWS + r * LANES];
                sum += weight *
                       pick((ivec)weight == (ivec)hidden_weight(), (vec){0}, splat(m.at[row * m.row_stride + dim]));
            }
            *(vec *)&to[dim * ROWS + r * LANES] += sum;
        }
    }
}

/* ---- Weights and their gradients ------------------------------------------------------------------------------- */

/* What a vector of pair_terms of a row and a key has beside its two products. */
typedef struct pair_terms {
    ivec seen;
    vec lse, delta, slope, bias;
    ivec distance; /* position minus key */
} pair_terms;

/* Turns q times k and d_o times v into the weight and the gradient of the product q times k, but for the scale; both -0
 * where the row does not see the key, and never where it does. */
INLINE void weigh(const fwd_args *args, const pair_terms *of, vec *s, vec *dp)
{
    const float cap = args->softcap;
    vec x = *s * args->scale, slope_of_cap = splat(1.0f);
    ivec seen = of->seen;
    if (cap > 0) {
        const vec t = tanh_vec(x * (1.0f / cap));
        x = cap * t;
        slope_of_cap = (1.0f - t) * (1.0f + t);
    }
    if (args->bias && args->bias_type == FWD_BIAS_MASK) {
        seen &= (ivec)(of->bias != 0);
    } else if (args->bias) {
        seen &= (ivec)(of->bias != minus_infinity);
        x += of->bias;
    }
    if (args->slopes) {
        const uvec distance = pick_bits(of->distance < 0, (uvec)-of->distance, (uvec)of->distance);
        x -= of->slope * __builtin_convertvector(distance, vec);
    }
    const vec p = exp2_scaled(x - of->lse, log2_of_e, -127.0f / log2_of_e);
    const vec ds = p * (*dp - of->delta) * slope_of_cap + 0.0f; /* -0 + 0 = 0 */
    *s = pick(seen, p, hidden_weight());
    *dp = pick(seen, ds, hidden_weight());
}

/* ---- dq of a tile of rows -------------------------------------------------------------------------------------- */

/* The bias of a block of rows for `count` keys, key by key. */
static void load_bias_of_rows(const scratch_parts *parts, const fwd_args *args, const lane_rows *rows, int64_t block,
                              int64_t first_key, int64_t count)
{
    for (int64_t row = 0; row < ROWS; row += LANES) {
        for (int64_t key = 0; key < count; key += LANES) {
            vec v[LANES];
            for (int64_t lane = 0; lane < LANES; lane++) {
                const int64_t at = rows->at[block + row + lane];
                v[lane] = at < 0 ? (vec){0}
                                 : load_some_bias(args->bias_type, args->bias, at + first_key + key,
                                                  count - key < LANES ? count - key : LANES);
            }
            transpose(v);
            for (int64_t k = 0; k < LANES && key + k < count; k++) {
                *(vec *)&parts->bias[(key + k) * ROWS + row] = v[k];
            }
        }
    }
}

/* Weighs `count` keys from first_key on against a block of rows. */
static void weigh_keys(const scratch_parts *parts, const fwd_args *args, int64_t block, int64_t first_key,
                       int64_t count)
{
    for (int64_t row = 0; row < ROWS; row += LANES) {
        const int64_t lanes = block + row;
        pair_terms of = {.lse = *(const vec *)&parts->lse[lanes],
                         .delta = *(const vec *)&parts->delta[lanes],
                         .slope = *(const vec *)&parts->slope[lanes]};
        const ivec first = *(const ivec *)&parts->first[lanes], end = *(const ivec *)&parts->end[lanes],
                   position = *(const ivec *)&parts->position[lanes];
        for (int64_t key = 0; key < count; key++) {
            const int32_t number = (int32_t)(first_key + key);
            const int64_t at = key * ROWS + row;
            of.seen = (ivec)(first <= number) & (ivec)(end > number);
            of.distance = position - number;
            of.bias = *(const vec *)&parts->bias[at];
            weigh(args, &of, (vec *)&parts->s[at], (vec *)&parts->dp[at]);
        }
    }
}

/* Rows are numbered row by row, and at each row query head by query head of the group, so that those of a tile see
 * nearly the same keys. */
static void run_rows(const scratch_parts *parts, const bwd_args *args, const cpu_entry *h, int64_t first_row)
{
    const fwd_args *fwd = &args->fwd;
    const int64_t rows = h->queries * fwd->group;
    lane_rows q, d_o, dq, bias;
    int64_t keys_first = INT64_MAX, keys_end = 0;
    for (int64_t lane = 0; lane < Q_TILE; lane++) {
        const bool exists = first_row + lane < rows;
        const int64_t number = exists ? first_row + lane : rows - 1;
        const query row = {h->kv_head * fwd->group + number % fwd->group, number / fwd->group};
        q.at[lane] = exists ? query_offset(&fwd->q_stride, h, row) : -1;
        d_o.at[lane] = exists ? query_offset(&args->d_o_stride, h, row) : -1;
        dq.at[lane] = exists ? query_offset(&args->dq_stride, h, row) : -1;
        bias.at[lane] = exists ? h->batch * fwd->bias_stride.batch + row.q_head * fwd->bias_stride.head +
                                     row.row * fwd->bias_stride.row
                               : -1;
        if (!exists) {
            parts->first[lane] = parts->end[lane] = parts->position[lane] = 0;
            parts->lse[lane] = parts->delta[lane] = parts->slope[lane] = 0;
            continue;
        }
        describe_query(parts, args, h, row, lane);
        if (parts->first[lane] < parts->end[lane]) {
            keys_first = parts->first[lane] < keys_first ? parts->first[lane] : keys_first;
            keys_end = parts->end[lane] > keys_end ? parts->end[lane] : keys_end;
        }
    }
    const int64_t padded = round_up(rows - first_row < Q_TILE ? rows - first_row : Q_TILE, ROWS);
    for (int64_t row = 0; row < padded; row += LANES) {
        load_lanes(parts->a + row / ROWS * fwd->qk_dim * ROWS + row % ROWS, fwd->q, &q, row, fwd->qk_dim);
        load_lanes(parts->b + row / ROWS * fwd->v_dim * ROWS + row % ROWS, args->d_o, &d_o, row, fwd->v_dim);
    }
    clear(parts->da, padded * fwd->qk_dim);
    for (int64_t first = keys_first < keys_end ? keys_first / KV_TILE * KV_TILE : keys_end; first < keys_end;
         first += KV_TILE) {
        const int64_t count = keys_end - first < KV_TILE ? keys_end - first : KV_TILE;
        const matrix k =
            met_rows(parts->x, fwd->k, key_offset(&fwd->k_stride, h, first), fwd->k_stride.row, fwd->qk_dim, count);
        const matrix v =
            met_rows(parts->y, fwd->v, key_offset(&fwd->v_stride, h, first), fwd->v_stride.row, fwd->v_dim, count);
        const bool finite = all_finite(k, count, fwd->qk_dim);
        for (int64_t block = 0; block < padded; block += ROWS) {
            if (fwd->bias) {
                load_bias_of_rows(parts, fwd, &bias, block, first, count);
            }
            meet(parts->s, parts->a + block * fwd->qk_dim, k, fwd->qk_dim, count);
            meet(parts->dp, parts->b + block * fwd->v_dim, v, fwd->v_dim, count);
            weigh_keys(parts, fwd, block, first, count);
            (finite ? add_rows : add_seen_rows)(parts->da + block * fwd->qk_dim, parts->dp, k, fwd->qk_dim, count);
        }
    }
    for (int64_t row = 0; row < padded; row += LANES) {
        store_lanes(args, args->dq, &dq, row, fwd->qk_dim, parts->da + row / ROWS * fwd->qk_dim * ROWS + row % ROWS,
                    fwd->scale);
    }
}

/* ---- dk and dv of a tile of keys ------------------------------------------------------------------------------- */

/* The bias of `count` rows from `offset` on for a block of keys from first_key on, row by row; what is behind the last
 * key is 0. */
static void load_bias_of_keys(const scratch_parts *parts, const fwd_args *args, int64_t offset, int64_t first_key,
                              int64_t keys, int64_t count)
{
    for (int64_t row = 0; row < count; row++) {
        for (int64_t lane = 0; lane < ROWS; lane += LANES) {
            const int64_t left = keys - first_key - lane;
            *(vec *)&parts->bias[row * ROWS + lane] =
                left <= 0 ? (vec){0}
                          : load_some_bias(args->bias_type, args->bias,
                                           offset + row * args->bias_stride.row + first_key + lane,
                                           left < LANES ? left : LANES);
        }
    }
}

/* Weighs `count` rows against a block of keys from first_key on. */
static void weigh_rows(const scratch_parts *parts, const fwd_args *args, int64_t first_key, int64_t count)
{
    for (int64_t lane = 0; lane < ROWS; lane += LANES) {
        ivec number;
        for (int l = 0; l < LANES; l++) {
            number[l] = (int32_t)(first_key + lane + l);
        }
        for (int64_t row = 0; row < count; row++) {
            const int64_t at = row * ROWS + lane;
            const pair_terms of = {.seen = (ivec)(number >= parts->first[row]) & (ivec)(number < parts->end[row]),
                                   .lse = splat(parts->lse[row]),
                                   .delta = splat(parts->delta[row]),
                                   .slope = splat(parts->slope[row]),
                                   .bias = *(const vec *)&parts->bias[at],
                                   .distance = parts->position[row] - number};
            weigh(args, &of, (vec *)&parts->s[at], (vec *)&parts->dp[at]);
        }
    }
}

/* Adds the rows [first, first + count) of a query head to a tile of keys. */
static void add_queries(const scratch_parts *parts, const bwd_args *args, const cpu_entry *h, query first,
                        int64_t count, int64_t first_key, int64_t padded)
{
    const fwd_args *fwd = &args->fwd;
    for (int64_t row = 0; row < count; row++) {
        describe_query(parts, args, h, (query){first.q_head, first.row + row}, row);
    }
    const matrix q =
        met_rows(parts->x, fwd->q, query_offset(&fwd->q_stride, h, first), fwd->q_stride.row, fwd->qk_dim, count);
    const matrix d_o = met_rows(parts->y, args->d_o, query_offset(&args->d_o_stride, h, first), args->d_o_stride.row,
                                fwd->v_dim, count);
    const bool finite = all_finite(q, count, fwd->qk_dim) && all_finite(d_o, count, fwd->v_dim);
    const int64_t bias =
        h->batch * fwd->bias_stride.batch + first.q_head * fwd->bias_stride.head + first.row * fwd->bias_stride.row;
    for (int64_t block = 0; block < padded; block += ROWS) {
        if (fwd->bias) {
            load_bias_of_keys(parts, fwd, bias, first_key + block, h->keys, count);
        }
        meet(parts->s, parts->a + block * fwd->qk_dim, q, fwd->qk_dim, count);
        meet(parts->dp, parts->b + block * fwd->v_dim, d_o, fwd->v_dim, count);
        weigh_rows(parts, fwd, first_key + block, count);
        (finite ? add_rows : add_seen_rows)(parts->db + block * fwd->v_dim, parts->s, d_o, fwd->v_dim, count);
        (finite ? add_rows : add_seen_rows)(parts->da + block * fwd->qk_dim, parts->dp, q, fwd->qk_dim, count);
    }
}

/* Keys [first_key, end_key) of the tensor, which need not all exist: those that do not get 0. */
static void run_keys(const scratch_parts *parts, const bwd_args *args, const cpu_entry *h, int64_t first_key,
                     int64_t end_key)
{
    const fwd_args *fwd = &args->fwd;
    lane_rows k, v, dk, dv;
    for (int64_t lane = 0; lane < Q_TILE; lane++) {
        const int64_t key = first_key + lane;
        k.at[lane] = key < h->keys ? key_offset(&fwd->k_stride, h, key) : -1;
        v.at[lane] = key < h->keys ? key_offset(&fwd->v_stride, h, key) : -1;
        dk.at[lane] = key < end_key ? key_offset(&args->dk_stride, h, key) : -1;
        dv.at[lane] = key < end_key ? key_offset(&args->dv_stride, h, key) : -1;
    }
    const int64_t padded = round_up(end_key - first_key, ROWS);
    for (int64_t key = 0; key < padded; key += LANES) {
        load_lanes(parts->a + key / ROWS * fwd->qk_dim * ROWS + key % ROWS, fwd->k, &k, key, fwd->qk_dim);
        load_lanes(parts->b + key / ROWS * fwd->v_dim * ROWS + key % ROWS, fwd->v, &v, key, fwd->v_dim);
    }
    clear(parts->da, padded * fwd->qk_dim);
    clear(parts->db, padded * fwd->v_dim);
    const visible_rows seen_by = visible_to_keys(h->visible, (int32_t)first_key, (int32_t)(end_key - first_key));
    for (int64_t member = 0; member < fwd->group; member++) {
        for (int64_t row = seen_by.first; row < seen_by.end; row += KV_TILE) {
            const int64_t count = seen_by.end - row < KV_TILE ? seen_by.end - row : KV_TILE;
            add_queries(parts, args, h, (query){h->kv_head * fwd->group + member, row}, count, first_key, padded);
        }
    }
    for (int64_t key = 0; key < padded; key += LANES) {
        store_lanes(args, args->dk, &dk, key, fwd->qk_dim, parts->da + key / ROWS * fwd->qk_dim * ROWS + key % ROWS,
                    fwd->scale);
        store_lanes(args, args->dv, &dv, key, fwd->v_dim, parts->db + key / ROWS * fwd->v_dim * ROWS + key % ROWS,
                    1.0f);
    }
}

/* ---- dsinks ---------------------------------------------------------------------------------------------------- */

static void run_sink(const bwd_args *args, int64_t q_head)
{
    const fwd_args *fwd = &args->fwd;
    double sum = 0;
    for (int64_t batch = 0; batch < fwd->batch; batch++) {
        const cpu_entry h = head_of(fwd, batch * fwd->kv_heads + q_head / fwd->group);
        for (int64_t row = 0; row < h.queries; row++) {
            const query q = {q_head, row};
            const vec p = exp2_scaled(splat(fwd->sinks[q_head] - lse_of(fwd, &h, q)), log2_of_e, -127.0f / log2_of_e);
            if (fwd->sinks[q_head] != minus_infinity) {
                sum -= (double)p[0] * (double)delta_of(args, &h, q);
            }
        }
    }
    args->dsinks[q_head] = (float)sum;
}

/* ---- Items ----------------------------------------------------------------------------------------------------- */

static void run(const fwd_args *fwd, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    (void)lane;
    (void)lanes;
    const bwd_args *args = bwd_args_of(fwd);
    scratch_parts parts;
    cut_scratch(&parts, scratch, fwd->qk_dim, fwd->v_dim);
    const int64_t heads = (int64_t)fwd->batch * fwd->kv_heads;
    const int64_t key_tiles = (fwd->kv_len + Q_TILE - 1) / Q_TILE;
    const int64_t row_tiles = ((int64_t)fwd->group * fwd->q_len + Q_TILE - 1) / Q_TILE;
    const int64_t key_items = heads * key_tiles, row_items = heads * row_tiles;
    const int64_t items = key_items + row_items + (args->dsinks ? fwd->q_heads : 0);
    for (;;) {
        const int64_t item = atomic_fetch_add_explicit(queue, 1, memory_order_relaxed);
        if (item >= items) {
            return;
        }
        if (item >= key_items + row_items) {
            run_sink(args, item - key_items - row_items);
        } else if (item >= key_items) {
            const cpu_entry h = head_of(fwd, (item - key_items) / row_tiles);
            const int64_t first = (item - key_items) % row_tiles * Q_TILE;
            if (first < h.queries * fwd->group) {
                run_rows(&parts, args, &h, first);
            }
        } else {
            const cpu_entry h = head_of(fwd, item / key_tiles);
            const int64_t first = item % key_tiles * Q_TILE, all = fwd->q_offsets ? h.keys : fwd->kv_len;
            if (first < all) {
                run_keys(&parts, args, &h, first, first + Q_TILE < all ? first + Q_TILE : all);
            }
        }
    }
}

/* ---- The description ------------------------------------------------------------------------------------------- */

DESCRIBES static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    (void)problem;
    return device->isa & ISA ? NULL : "this CPU lacks " KERNEL_ARCH;
}

DESCRIBES static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    scratch_parts parts;
    return (size_t)(cut_scratch(&parts, NULL, problem->qk_dim, problem->v_dim) * device->threads);
}

/* Cycles of the vector units, counted; caches and memory are taken to keep up. */
DESCRIBES static double cost(const acr_problem *problem, const acr__device *device)
{
    const double loads_per_cycle = 2, weights = 2; /* each weight is computed with its row and with its key */
    const double by_units = ROW_VECS * COLUMNS * 10.0 / PRODUCTS_IN_TEN_CYCLES,
                 by_loads = (ROW_VECS + COLUMNS) / loads_per_cycle;
    const double cycles_per_product = (by_units > by_loads ? by_units : by_loads) / (ROW_VECS * COLUMNS);
    const uint32_t terms = acr__terms_of(problem);
    const double weight_cycles =
        18 + (terms & FWD_TERM_CAP ? 24 : 0) + (terms & FWD_TERM_BIAS ? 12 : 0) + (terms & FWD_TERM_ALIBI ? 3 : 0);
    /* S and dP twice, then dq, dk and dv. */
    const double products = 4.0 * (double)problem->qk_dim + 3.0 * (double)problem->v_dim;
    const double pairs = acr__visible_pairs(acr__longest_entry(problem)) * (double)(problem->batch * problem->q_heads);
    const double masked =
        visible_is_limited(acr__rule_of(problem))
            ? 0.5 * ROWS * (double)(problem->batch * problem->q_heads * (problem->q_len + problem->kv_len))
            : 0; /* blocks along the edge of what is visible */
    const double rows = (double)(problem->batch * problem->q_heads * problem->q_len);
    const double d_cycles =
        rows * (double)problem->v_dim / LANES * (2.0 + (double)((problem->kv_len + Q_TILE - 1) / Q_TILE));
    const double cycles =
        (pairs + masked) / LANES * (products * cycles_per_product + weights * weight_cycles) + d_cycles;
    const double heads = (double)(problem->batch * problem->kv_heads);
    const int64_t group = problem->q_heads / problem->kv_heads;
    const double items =
        heads * (double)((problem->kv_len + Q_TILE - 1) / Q_TILE + (group * problem->q_len + Q_TILE - 1) / Q_TILE);
    const double rounds = (double)(((int64_t)items + device->threads - 1) / device->threads);
    return cycles / device->clock_hz * rounds / items;
}

const acr__kernel KERNEL_DESCRIPTION = {
    SIMD_KERNEL("bwd_simd"),
    .pass = ACR_BACKWARD,
    .traits = ACR__TRAIT_PACKED,
    .terms = FWD_TERM_CAP | FWD_TERM_SINKS | FWD_TERM_BIAS | FWD_TERM_ALIBI | FWD_TERM_LIMITS,
};
