/* Visibility for the host: the rule of a problem, and how many pairs of a row and a key it lets through. */
#include "kernel.h"

#include <stdbool.h>

static int32_t mask_of(acr_mask mask)
{
    return mask == ACR_MASK_CAUSAL            ? FWD_MASK_BOTTOM_RIGHT
           : mask == ACR_MASK_CAUSAL_TOP_LEFT ? FWD_MASK_TOP_LEFT
                                              : FWD_MASK_NONE;
}

visible_rule acr__rule_of(const acr_problem *p)
{
    return (visible_rule){mask_of(p->mask), (int32_t)p->window_left, (int32_t)p->window_right, (int32_t)p->chunk};
}

visible_entry acr__longest_entry(const acr_problem *p)
{
    return (visible_entry){acr__rule_of(p), (int32_t)p->q_len, (int32_t)p->kv_len, 0};
}

/* The first of the rows [begin, end) for which an end of the interval is at least `value`; `end` if there is none. */
static int32_t first_row_at(visible_entry e, int32_t begin, int32_t end, int32_t (*end_of)(visible_entry, int32_t),
                            int32_t value)
{
    while (begin < end) {
        const int32_t middle = begin + (end - begin) / 2;
        if (end_of(e, middle) < value)
            begin = middle + 1;
        else
            end = middle;
    }
    return end;
}

/* The sum over the rows [begin, end) of one end of a row's interval. Over all rows, or where there are chunks over
 * those of one chunk, it stays at its least value, then grows by one a row, then stays at its largest. */
static double sum_over_rows(visible_entry e, int32_t begin, int32_t end, int32_t (*end_of)(visible_entry, int32_t))
{
    const int32_t least = end_of(e, begin), most = end_of(e, end - 1);
    const int32_t grows = first_row_at(e, begin, end, end_of, least + (least < most));
    const int32_t stays = first_row_at(e, begin, end, end_of, most);
    const double growing = (double)stays - (double)grows;
    return ((double)grows - (double)begin) * (double)least +
           growing * ((double)end_of(e, grows) + (double)most - 1.0) / 2.0 +
           ((double)end - (double)stays) * (double)most;
}

/* As functions with an address. */
static int32_t first_of(visible_entry e, int32_t row)
{
    return visible_first(e, row);
}

static int32_t end_of_row(visible_entry e, int32_t row)
{
    return visible_end(e, row);
}

static double pairs_of_rows(visible_entry e, int32_t begin, int32_t end)
{
    return begin < end ? sum_over_rows(e, begin, end, end_of_row) - sum_over_rows(e, begin, end, first_of) : 0.0;
}

/* One past the last row whose position lies in the same chunk as that of `row`, which stands at kv_start or behind. */
static int32_t chunk_end(visible_entry e, int32_t row)
{
    const int64_t left =
        (int64_t)visible_chunk_first(e, visible_position(e, row)) + e.rule.chunk - visible_position(e, row);
    return left < e.q_len - row ? row + (int32_t)left : e.q_len;
}

/* Chunk by chunk: those that have all their rows and keys let equally many pairs through, so one of them is counted. */
static double pairs_of_chunks(visible_entry e)
{
    const int32_t chunk = e.rule.chunk;
    int32_t row = visible_max(0, visible_min(e.q_len, (int32_t)((int64_t)e.kv_start - visible_diagonal(e))));
    double pairs = 0.0;
    while (row < e.q_len && visible_first(e, row) < e.kv_len) {
        const int32_t end = chunk_end(e, row);
        const int64_t whole_keys = ((int64_t)e.kv_len - visible_position(e, row)) / chunk;
        const int64_t whole_rows = (e.q_len - row) / chunk, whole = whole_keys < whole_rows ? whole_keys : whole_rows;
        const bool is_whole = end - row == chunk && whole > 0;
        pairs += pairs_of_rows(e, row, end) * (is_whole ? (double)whole : 1.0);
        row = is_whole ? row + (int32_t)whole * chunk : end;
    }
    return pairs;
}

double acr__visible_pairs(visible_entry e)
{
    if (e.q_len == 0 || e.kv_len == 0)
        return 0.0;
    return e.rule.chunk == 0 ? pairs_of_rows(e, 0, e.q_len) : pairs_of_chunks(e);
}

double acr__visible_keys(visible_entry e)
{
    if (e.q_len == 0 || e.kv_len == 0)
        return 0.0;
    const visible_keys k = visible_to_rows(e, 0, e.q_len);
    return (double)k.end - (double)k.first;
}
