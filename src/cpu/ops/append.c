/* acr_append on the CPU. */
#include <math.h>

#include "cpu/ops.h"
#include "cpu/ops/element.h"
#include "error.h"

static int64_t elements_of_row(const append_args *a)
{
    const int64_t kv = (a->k ? a->qk_dim : 0) + (a->v ? a->v_dim : 0);
    return a->kv_heads * kv + (int64_t)a->q_heads * a->qk_dim;
}

int64_t acr__cpu_append_blocks(const acr__op_call *call)
{
    return blocks_of(call->append->rows, elements_of_row(call->append));
}

acr_status acr__cpu_append_check(const acr__op_call *call)
{
    const append_args *a = call->append;
    const struct {
        const char *name;
        const float *values;
    } scales[] = {{"k_scales", a->k_scales}, {"v_scales", a->v_scales}};
    for (int s = 0; s < 2; s++)
        for (int64_t i = 0; scales[s].values && i < (int64_t)a->batch * a->kv_heads; i++)
            if (!(scales[s].values[i] > 0.0f) || !isfinite(scales[s].values[i]))
                return acr__fail(ACR_INVALID, "args.%s[%d, %d] is %g, must be positive and finite", scales[s].name,
                                 (int)(i / a->kv_heads), (int)(i % a->kv_heads), (double)scales[s].values[i]);
    return ACR_OK;
}

/* A row of one head: where its elements begin, and what becomes of them. */
typedef struct head_row {
    const void *from;
    void *to;
    int64_t from_first, to_first;
    int32_t to_dtype;
    float factor; /* before rounding; 1 changes no bit */
} head_row;

static void store_scaled(const head_row *h, int64_t column, float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        values[i] = op_mul(values[i], h->factor);
    store_run(h->to_dtype, h->to, h->to_first + column, values, count);
}

/* Columns [column, end) as they are. */
static void copy_columns(const append_args *a, const head_row *h, int64_t column, int64_t end)
{
    float values[RUN];
    for (; column < end; column += RUN) {
        const int64_t count = end - column < RUN ? end - column : RUN;
        load_run(values, a->dtype, h->from, h->from_first + column, count);
        store_scaled(h, column, values, count);
    }
}

/* Turns pairs [pair, pair + count), of which first[i] and second[i] are the elements. */
static void turn(const append_args *a, int64_t angle, int64_t pair, float *first, float *second, int64_t count)
{
    const float *cos = a->cos + angle * a->rope_stride + pair, *sin = a->sin + angle * a->rope_stride + pair;
    for (int64_t i = 0; i < count; i++) {
        const float c = angle < 0 ? OP_NAN : cos[i], s = angle < 0 ? OP_NAN : sin[i], x = first[i], y = second[i];
        first[i] = op_rotated_first(x, y, c, s);
        second[i] = op_rotated_second(x, y, c, s);
    }
}

static void turn_halves(const append_args *a, const head_row *h, int64_t angle)
{
    float first[RUN], second[RUN];
    const int64_t pairs = a->rope_dim / 2;
    for (int64_t pair = 0; pair < pairs; pair += RUN) {
        const int64_t count = pairs - pair < RUN ? pairs - pair : RUN, column = a->rope_first + pair;
        load_run(first, a->dtype, h->from, h->from_first + column, count);
        load_run(second, a->dtype, h->from, h->from_first + column + pairs, count);
        turn(a, angle, pair, first, second, count);
        store_scaled(h, column, first, count);
        store_scaled(h, column + pairs, second, count);
    }
}

static void turn_neighbours(const append_args *a, const head_row *h, int64_t angle)
{
    float both[RUN], first[RUN / 2], second[RUN / 2];
    const int64_t pairs = a->rope_dim / 2;
    for (int64_t pair = 0; pair < pairs; pair += RUN / 2) {
        const int64_t count = pairs - pair < RUN / 2 ? pairs - pair : RUN / 2, column = a->rope_first + 2 * pair;
        load_run(both, a->dtype, h->from, h->from_first + column, 2 * count);
        for (int64_t i = 0; i < count; i++) {
            first[i] = both[2 * i];
            second[i] = both[2 * i + 1];
        }
        turn(a, angle, pair, first, second, count);
        for (int64_t i = 0; i < count; i++) {
            both[2 * i] = first[i];
            both[2 * i + 1] = second[i];
        }
        store_scaled(h, column, both, 2 * count);
    }
}

static void turn_row(const append_args *a, const head_row *h, int64_t angle)
{
    copy_columns(a, h, 0, a->rope_first);
    if (a->rope_dim > 0 && a->is_interleaved)
        turn_neighbours(a, h, angle);
    else if (a->rope_dim > 0)
        turn_halves(a, h, angle);
    copy_columns(a, h, a->rope_first + a->rope_dim, a->qk_dim);
}

static int64_t offset_of(const fwd_strides *s, int64_t batch, int64_t head, int64_t row)
{
    return batch * s->batch + head * s->head + row * s->row;
}

/* Keys or values, and the cache that they go to. */
typedef struct cache_side {
    const void *from;
    void *to;
    const fwd_strides *from_stride, *to_stride;
    float scale;
    const float *scales;
} cache_side;

static head_row row_for_cache(const append_args *a, const append_token *t, const cache_side *s, int32_t head)
{
    return (head_row){.from = s->from,
                      .to = s->to,
                      .from_first = offset_of(s->from_stride, t->batch, head, t->row),
                      .to_first = offset_of(s->to_stride, t->entry, head, t->at),
                      .to_dtype = a->cache_dtype,
                      .factor = append_factor(a, s->scale, s->scales, t->sequence, head)};
}

static void append_keys(const append_args *a, const append_token *t)
{
    const cache_side keys = {a->k, a->k_cache, &a->k_stride, &a->k_cache_stride, a->k_scale, a->k_scales};
    for (int32_t head = 0; head < a->kv_heads; head++) {
        const head_row h = row_for_cache(a, t, &keys, head);
        turn_row(a, &h, t->angle);
    }
}

static void append_values(const append_args *a, const append_token *t)
{
    const cache_side values = {a->v, a->v_cache, &a->v_stride, &a->v_cache_stride, a->v_scale, a->v_scales};
    for (int32_t head = 0; head < a->kv_heads; head++) {
        const head_row h = row_for_cache(a, t, &values, head);
        copy_columns(a, &h, 0, a->v_dim);
    }
}

static void turn_queries(const append_args *a, const append_token *t)
{
    for (int32_t head = 0; head < a->q_heads; head++) {
        const head_row h = {.from = a->q,
                            .to = a->q_out,
                            .from_first = offset_of(&a->q_stride, t->batch, head, t->row),
                            .to_first = offset_of(&a->q_out_stride, t->batch, head, t->row),
                            .to_dtype = a->dtype,
                            .factor = 1.0f};
        turn_row(a, &h, t->angle);
    }
}

static void append_one(const append_args *a, int64_t index)
{
    const append_token t = append_token_of(a, index);
    if (t.sequence < 0)
        return;
    if (a->k && t.entry >= 0)
        append_keys(a, &t);
    if (a->v && t.entry >= 0)
        append_values(a, &t);
    if (a->q)
        turn_queries(a, &t);
}

void acr__cpu_append(const acr__op_call *call, int64_t blocks, _Atomic int64_t *queue)
{
    const int64_t rows = call->append->rows, in_block = (rows - 1) / blocks + 1;
    for (int64_t block; (block = atomic_fetch_add(queue, 1)) < blocks;)
        for (int64_t row = block * in_block; row < rows && row < (block + 1) * in_block; row++)
            append_one(call->append, row);
}
