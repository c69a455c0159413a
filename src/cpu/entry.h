/* What a call says of one batch entry and one of its key/value heads, for all of the CPU's kernels: how many rows and
 * keys exist, where they lie, what scales the scores. Rules of visibility are in core/visible.h. */
#ifndef ACR_CPU_ENTRY_H
#define ACR_CPU_ENTRY_H

#include <stdbool.h>

#include "kernel.h"

/* first_query and first_key: of a packed batch's sequence, from the tensor's first row on; else 0. */
typedef struct cpu_entry {
    int64_t batch, kv_head;
    int64_t queries, keys; /* that exist */
    int64_t first_query, first_key;
    visible_entry visible;
} cpu_entry;

static inline cpu_entry entry_of(const fwd_args *args, int64_t batch, int64_t kv_head)
{
    cpu_entry e = {.batch = batch, .kv_head = kv_head, .queries = args->q_len, .keys = args->kv_len};
    if (args->q_offsets) {
        const fwd_sequence q = fwd_sequence_of(args->q_offsets, batch, args->q_total, args->q_len);
        e.first_query = q.first;
        e.queries = q.length;
    }
    if (args->kv_offsets) {
        const fwd_sequence kv = fwd_sequence_of(args->kv_offsets, batch, args->kv_total, args->kv_len);
        e.first_key = kv.first;
        e.keys = kv.length;
    }
    if (args->kv_lens) {
        const int64_t keys = args->kv_lens[batch];
        e.keys = keys < 0 ? 0 : keys < e.keys ? keys : e.keys;
    }
    const int32_t keys = (int32_t)e.keys, start = args->kv_starts ? args->kv_starts[batch] : 0;
    e.visible = (visible_entry){fwd_rule_of(args), (int32_t)e.queries, keys,
                                start < 0      ? 0
                                : start > keys ? keys
                                               : start};
    return e;
}

/* Rows of a key/value head are numbered position by position, and at each position query head by query head, so that
 * neighbours see nearly the same keys: row r is position r / group of the head's query head r % group. */
static inline int64_t rows_of(const fwd_args *args, const cpu_entry *e)
{
    return args->group * e->queries;
}

static inline int64_t query_head_of(const fwd_args *args, const cpu_entry *e, int64_t row)
{
    return e->kv_head * args->group + row % args->group;
}

/* Offset of a row's first element in q or o. */
static inline int64_t row_offset(const fwd_args *args, const fwd_strides *stride, const cpu_entry *e, int64_t row)
{
    return e->batch * stride->batch + query_head_of(args, e, row) * stride->head +
           (e->first_query + row / args->group) * stride->row;
}

/* Index of a row's log-sum-exp. */
static inline int64_t lse_index(const fwd_args *args, const cpu_entry *e, int64_t row)
{
    const int64_t head = query_head_of(args, e, row);
    const int64_t first =
        args->q_offsets ? head * args->q_total + e->first_query : (e->batch * args->q_heads + head) * args->q_len;
    return first + row / args->group;
}

/* Widens the keys [*first, *end) that a row at `position` sees by the ranges that hold its position: from the first key
 * that it sees to the last. Empty where it sees none. */
static inline void widen_by_ranges(const fwd_args *args, const cpu_entry *e, int32_t position, int32_t *first,
                                   int32_t *end)
{
    for (int32_t n = 0; args->ranges && n < args->ranges_count; n++) {
        const int32_t *range = &args->ranges[2 * (e->batch * args->ranges_count + n)];
        if (position < range[0] || position >= range[1]) {
            continue;
        }
        const int32_t begin = visible_max(range[0], e->visible.kv_start),
                      stop = visible_min(range[1], (int32_t)e->keys);
        if (begin < stop) {
            *first = *first < *end ? visible_min(*first, begin) : begin;
            *end = visible_max(*end, stop);
        }
    }
}

/* ---- Keys and values ------------------------------------------------------------------------------------------- */

/* Rows of k or v that follow one another by the row stride. */
typedef struct key_run {
    int64_t at, rows; /* the first one's first element, or -1: there is no such page */
} key_run;

/* The first of the head's rows [first, end): all of them, or those up to the end of a page. */
static inline key_run find_rows(const fwd_strides *stride, const cpu_entry *e, const fwd_paging *pages, int64_t first,
                                int64_t end)
{
    const int64_t head = e->kv_head * stride->head;
    if (!pages->table) {
        return (key_run){e->batch * stride->batch + head + (e->first_key + first) * stride->row, end - first};
    }
    const int64_t row = first % pages->page, left = pages->page - row;
    const int64_t page = pages->table[e->batch * pages->table_stride + first / pages->page];
    return (key_run){page < 0 || page >= pages->pages ? -1 : page * stride->batch + head + row * stride->row,
                     left < end - first ? left : end - first};
}

/* Whether values are the first elements of the keys. */
static inline bool values_are_keys(const fwd_args *args)
{
    const fwd_strides *k = &args->k_stride, *v = &args->v_stride;
    return args->v == args->k && args->v_dim <= args->qk_dim && v->batch == k->batch && v->head == k->head &&
           v->row == k->row;
}

/* ---- Scales ---------------------------------------------------------------------------------------------------- */

/* Scales that the execution brings may have any product: beyond these bounds, which scale_why_not holds the problem's
 * to, all weights are equal, or all but the largest 0, as they are at the bound. */
static const float scale_min = 1e-36f, scale_max = 1e36f;

static inline const char *scale_why_not(const acr_problem *problem)
{
    const double scale = (double)problem->scale * problem->q_scale * problem->k_scale;
    if (!(scale >= (double)scale_min && scale <= (double)scale_max)) {
        return "scale, with q_scale and k_scale, is outside [1e-36, 1e36]"; /* -127 / scale must be a float */
    }
    return NULL;
}

/* Of a batch entry and head. Terms that change scores want them in natural units: raw_scale, else 0, is what q times k
 * is multiplied by for them, and then scales.scale is 1. */
typedef struct cpu_scales {
    fwd_scales scales;
    float raw_scale;
} cpu_scales;

static inline cpu_scales cpu_scales_of(const fwd_args *args, const cpu_entry *e)
{
    const float log2_e = 1.44269504088896340736f, raw_max = 1e30f; /* finite times any capped or biased score */
    cpu_scales s = {.scales = {args->scale, args->scale_log2, args->out_scale}};
    if (args->q_scales || args->k_scales || args->v_scales) {
        s.scales = fwd_scales_of(args, e->batch, e->kv_head);
        const float at_least = s.scales.scale_log2 > scale_min ? s.scales.scale_log2 : scale_min;
        s.scales.scale_log2 = at_least < scale_max ? at_least : scale_max;
    }
    if (args->softcap > 0 || args->slopes || args->bias) {
        s.raw_scale = s.scales.scale < raw_max ? s.scales.scale : raw_max;
        s.scales.scale = 1.0f;
        s.scales.scale_log2 = log2_e;
    }
    return s;
}

#endif
