/* What the operations beside attention are told, on the CPU and on the GPU, and the rules that both follow: see
 * acr_merge and acr_append in acromion.h. Filled by merge.c and append.c. */
#ifndef ACR_OP_ARGS_H
#define ACR_OP_ARGS_H

#include "fwd_args.h"
#include "op_math.h"

/* ---- Merging ----------------------------------------------------------------------------------------------------- */

/* acr_part */
typedef struct merge_part {
    const void *o;
    const float *lse;
} merge_part;

typedef struct merge_args {
    fwd_strides part_stride, part_lse_stride, o_stride, lse_stride; /* elements */
    void *o;
    float *lse;                     /* NULL = not wanted */
    int64_t rows;                   /* batch * heads * len, below 2^32 */
    int64_t count;                  /* parts */
    int64_t o_spacing, lse_spacing; /* bytes from a part to the next, where is_spaced */
    int32_t heads, len, dim;
    int32_t dtype, out_dtype; /* the numbers of acr_dtype */
    int32_t is_spaced;        /* more than MERGE_LISTED parts lie at even distances: the first is enough */
    int32_t is_wide;   /* rows of o and of the parts begin and end at multiples of 16 bytes of the parts' type, and
                                 of as many elements of o's */
    int32_t lane_bits; /* merge_lane_bits */
    op_divisor by_len, by_heads;
} merge_args;

/* A row among all: batch entries outermost, positions innermost. */
typedef struct merge_row {
    uint32_t batch, head, row;
} merge_row;

/* In 32 bits, which rows are limited to: dividing 64 takes a GPU a hundred instructions and a call. */
OP_FUNCTION merge_row merge_row_of(const merge_args *a, uint32_t index)
{
    merge_row r;
    const uint32_t heads = op_divide(a->by_len, index);
    r.batch = op_divide(a->by_heads, heads);
    r.head = heads - r.batch * a->by_heads.by;
    r.row = index - heads * a->by_len.by;
    return r;
}

OP_FUNCTION int64_t merge_offset(const fwd_strides *s, merge_row r)
{
    return r.batch * s->batch + r.head * s->head + r.row * s->row;
}

/* Of a GPU: 16 bytes of a row's columns are a run. A CTA's threads take a run each of so many rows that they are all
 * busy. */
enum {
    MERGE_THREADS = 256,
    MERGE_LISTED = 8,   /* parts that a launch lists one by one; more may be said by their distances */
    MERGE_LANE_BITS = 5 /* of a warp */
};

/* Of a run. */
OP_FUNCTION int32_t merge_elements(const merge_args *a)
{
    return !a->is_wide ? 1 : a->dtype == 1 ? 4 : 8; /* 1: ACR_F32 */
}

/* One turn of a CTA does all columns and parts of its rows. */
OP_FUNCTION int merge_is_small(const merge_args *a)
{
    return a->is_wide && a->count <= MERGE_LISTED && a->dim <= merge_elements(a) << MERGE_LANE_BITS;
}

/* The threads that share a row, as a power of two: those of a warp at most. */
OP_FUNCTION int32_t merge_lane_bits(const merge_args *a)
{
    int32_t bits = 0;
    while (bits < MERGE_LANE_BITS && merge_elements(a) << bits < a->dim)
        bits++;
    return bits;
}

OP_FUNCTION int merge_rows_of_cta(const merge_args *a)
{
    return MERGE_THREADS >> a->lane_bits;
}

OP_FUNCTION merge_part merge_part_of(const merge_args *a, const merge_part *parts, int64_t i)
{
    if (!a->is_spaced)
        return parts[i];
    merge_part part;
    part.o = (const char *)parts[0].o + i * a->o_spacing;
    part.lse = (const float *)(const void *)((const char *)(const void *)parts[0].lse + i * a->lse_spacing);
    return part;
}

/* What a row's parts weigh: exp(lse - max) * factor each, and what becomes of the lse. */
typedef struct merge_weights {
    float max, factor, lse;
} merge_weights;

/* The largest so far and one more: NaN stays. */
OP_FUNCTION float merge_larger(float max, float lse)
{
    return !(lse <= max) && max == max ? lse : max;
}

OP_FUNCTION float merge_exp(float lse, float max)
{
    return op_exp(op_add(lse, -max));
}

/* Of the largest lse and the sum of all merge_exp. */
OP_FUNCTION merge_weights merge_weights_of(float max, float sum)
{
    merge_weights w;
    w.max = max;
    w.factor = op_div(1.0f, sum);
    w.lse = op_add(max, op_log(sum));
    if (max == -OP_INFINITY) { /* no part saw a key */
        w.factor = 0.0f;
        w.lse = max;
    }
    return w;
}

OP_FUNCTION merge_weights merge_weigh(const merge_args *a, const merge_part *parts, int64_t lse_offset)
{
    float sum = 0.0f, max = -OP_INFINITY;
    for (int64_t i = 0; i < a->count; i++)
        max = merge_larger(max, merge_part_of(a, parts, i).lse[lse_offset]);
    for (int64_t i = 0; i < a->count; i++)
        sum = op_add(sum, merge_exp(merge_part_of(a, parts, i).lse[lse_offset], max));
    return merge_weights_of(max, sum);
}

/* A part's weight; of one without keys it is not asked. */
OP_FUNCTION float merge_weight(merge_weights w, float lse)
{
    return op_mul(merge_exp(lse, w.max), w.factor);
}

/* ---- Appending --------------------------------------------------------------------------------------------------- */

typedef struct append_args {
    fwd_strides q_stride, k_stride, v_stride, q_out_stride, k_cache_stride, v_cache_stride; /* elements */
    const void *q, *k, *v;                                                                  /* NULL = none */
    void *q_out, *k_cache, *v_cache;
    const float *cos, *sin;           /* NULL = no rotation */
    const float *k_scales, *v_scales; /* NULL = 1 */
    const int32_t *kv_lens, *offsets, *page_table, *rope_offsets, *rope_positions;
    int64_t rows;         /* tokens that k, v and q hold, below 2^32 */
    int64_t kv_len;       /* positions of a sequence */
    int64_t table_stride; /* entries of the table, of a sequence */
    int64_t rope_rows, rope_stride;
    int32_t batch, len; /* sequences; tokens of each where there are no offsets */
    int32_t q_heads, kv_heads, qk_dim, v_dim;
    int32_t page, pages; /* 0 = a plain cache */
    int32_t rope_first, rope_dim, is_interleaved;
    int32_t dtype, cache_dtype; /* the numbers of acr_dtype */
    int32_t is_wide;            /* rows, and what of them is rotated, fall into 16 bytes of dtype, the halves, too, and
                                 so do rows of cosines and sines */
    float k_scale, v_scale;
    /* By append_count_units. A thread of a GPU takes a unit of a token: two runs, of 16 bytes where is_wide, else of an
     * element. Of what is rotated, they are both elements of some pairs; of the rest, the same columns of two heads.
     * Units of k come first, then those of v and of q; of each, first what is rotated. */
    op_divisor by_len, by_page;
    op_divisor turned, copied, v_copied; /* units of a head; of two of k or q; of two of v. by: 0 = none */
    uint32_t turned_of_k, turned_of_q, v_from, q_from; /* v_from: the first of v */
    int64_t units;                                     /* cuda: below 2^31 */
} append_args;

enum {
    APPEND_THREADS = 128 /* of a CTA of a GPU */
};

#ifndef __CUDACC__
OP_FUNCTION op_divisor append_divisor(int64_t by)
{
    return by > 0 ? op_divisor_of((uint32_t)by) : (op_divisor){0, 0, 0, 0};
}

/* What follows from the other arguments. */
OP_FUNCTION void append_count_units(append_args *a)
{
    const int run = !a->is_wide ? 1 : a->dtype == 1 ? 4 : 8; /* 1: ACR_F32 */
    const int64_t two_kv_heads = ((int64_t)a->kv_heads + 1) / 2, two_q_heads = ((int64_t)a->q_heads + 1) / 2;
    a->by_len = append_divisor(a->len);
    a->by_page = append_divisor(a->page);
    a->turned = append_divisor(a->rope_dim / 2 / run);
    a->copied = append_divisor((a->qk_dim - a->rope_dim) / run);
    a->v_copied = append_divisor(a->v_dim / run);
    a->turned_of_k = (uint32_t)a->kv_heads * a->turned.by;
    a->turned_of_q = (uint32_t)a->q_heads * a->turned.by;
    const int64_t of_k = a->k ? a->turned_of_k + two_kv_heads * a->copied.by : 0,
                  of_v = a->v ? two_kv_heads * a->v_copied.by : 0,
                  of_q = a->q ? a->turned_of_q + two_q_heads * a->copied.by : 0;
    a->v_from = (uint32_t)of_k;
    a->q_from = (uint32_t)(of_k + of_v);
    a->units = of_k + of_v + of_q;
}
#endif

/* Where a token comes from and goes to. */
typedef struct append_token {
    int64_t batch, row; /* in q, k and v */
    int64_t sequence;   /* -1: it belongs to none */
    int64_t from_end;   /* 1: the sequence's last */
    int64_t entry, at;  /* in the caches: sequence or page, and row of it; entry -1: nowhere */
    int64_t angle;      /* of cos and sin; -1: outside */
} append_token;

/* The last sequence that begins at or before a row. */
OP_FUNCTION int64_t append_sequence(const append_args *a, int64_t row)
{
    int64_t first = 0, end = a->batch; /* offsets[first] <= row < offsets[end], if they do not decrease */
    while (end - first > 1) {
        const int64_t middle = (first + end) / 2;
        if (a->offsets[middle] <= row)
            first = middle;
        else
            end = middle;
    }
    return first;
}

/* The page's entry and row of a position, or of a plain cache the sequence's. */
OP_FUNCTION void append_find_entry(const append_args *a, int64_t position, append_token *t)
{
    t->entry = -1;
    t->at = position;
    if (position < 0 || position >= a->kv_len)
        return;
    t->entry = t->sequence;
    if (a->page_table) {
        /* Lengths have 32 bits, and so have positions. */
        const uint32_t entry = op_divide(a->by_page, (uint32_t)position),
                       in_page = (uint32_t)position - entry * a->by_page.by;
        const int64_t page = a->page_table[t->sequence * a->table_stride + entry];
        t->entry = page >= 0 && page < a->pages ? page : -1;
        t->at = in_page;
    }
}

/* Where a token comes from; where it goes is not known yet. */
OP_FUNCTION append_token append_source_of(const append_args *a, int64_t index)
{
    append_token t;
    int64_t in_sequence, count = a->len;
    if (a->offsets) {
        t.sequence = append_sequence(a, index);
        in_sequence = index - a->offsets[t.sequence];
        count = (int64_t)a->offsets[t.sequence + 1] - a->offsets[t.sequence];
        t.batch = 0;
        t.row = index;
        if (in_sequence < 0 || in_sequence >= count)
            t.sequence = -1;
    } else {
        const uint32_t sequence = op_divide(a->by_len, (uint32_t)index);
        t.sequence = t.batch = sequence;
        t.row = in_sequence = (uint32_t)index - sequence * a->by_len.by;
    }
    t.from_end = count - in_sequence;
    t.entry = t.at = t.angle = -1;
    return t;
}

/* Where token `index`, of a sequence, goes. */
OP_FUNCTION void append_find_target(const append_args *a, int64_t index, append_token *t)
{
    const int64_t position = a->kv_lens[t->sequence] - t->from_end;
    append_find_entry(a, position, t);
    if (a->rope_dim > 0) {
        t->angle = a->rope_positions ? a->rope_positions[index] : position;
        if (a->rope_offsets)
            t->angle += a->rope_offsets[t->sequence];
        if (t->angle < 0 || t->angle >= a->rope_rows)
            t->angle = -1;
    }
}

OP_FUNCTION append_token append_token_of(const append_args *a, int64_t index)
{
    append_token t = append_source_of(a, index);
    if (t.sequence >= 0)
        append_find_target(a, index, &t);
    return t;
}

/* What values of a head are multiplied by before they are rounded. */
OP_FUNCTION float append_factor(const append_args *a, float scale, const float *scales, int64_t sequence, int32_t head)
{
    if (scales)
        scale = op_mul(scale, scales[sequence * a->kv_heads + head]);
    return op_div(1.0f, scale);
}

#endif
