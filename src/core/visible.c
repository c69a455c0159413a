/* Visibility for the host: the rule of a problem, and how many pairs of a row and a key it lets through. */
#include "kernel.h"

static int32_t mask_of(acr_mask mask)
{
    switch (mask) {
    case ACR_MASK_CAUSAL:
        return FWD_MASK_BOTTOM_RIGHT;
    case ACR_MASK_CAUSAL_TOP_LEFT:
        return FWD_MASK_TOP_LEFT;
    case ACR_MASK_NONE:
        break;
    }
    return FWD_MASK_NONE;
}

visible_rule acr__rule_of(const acr_problem *p)
{
    return (visible_rule){mask_of(p->mask), (int32_t)p->window_left, (int32_t)p->window_right};
}

visible_entry acr__longest_entry(const acr_problem *p)
{
    return (visible_entry){acr__rule_of(p), (int32_t)p->q_len, (int32_t)p->kv_len};
}

/* The first row for which an end of the interval is at least `value`; q_len if there is none. */
static int32_t first_row_at(visible_entry e, int32_t (*end_of)(visible_entry, int32_t), int32_t value)
{
    int32_t below = -1, end = e.q_len;
    while (end - below > 1) {
        const int32_t middle = below + (end - below) / 2;
        *(end_of(e, middle) < value ? &below : &end) = middle;
    }
    return end;
}

/* The sum over all rows of one end of a row's interval. It stays at its least value, then grows by one a row, then
 * stays at its largest. */
static double sum_over_rows(visible_entry e, int32_t (*end_of)(visible_entry, int32_t))
{
    const int32_t least = end_of(e, 0), most = end_of(e, e.q_len - 1);
    const int32_t grows = first_row_at(e, end_of, least + (least < most)), stays = first_row_at(e, end_of, most);
    const double growing = (double)stays - (double)grows;
    return (double)grows * (double)least + growing * ((double)end_of(e, grows) + (double)most - 1.0) / 2.0 +
           ((double)e.q_len - (double)stays) * (double)most;
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

double acr__visible_pairs(visible_entry e)
{
    return e.q_len > 0 && e.kv_len > 0 ? sum_over_rows(e, end_of_row) - sum_over_rows(e, first_of) : 0.0;
}

double acr__visible_keys(visible_entry e)
{
    if (e.q_len == 0 || e.kv_len == 0)
        return 0.0;
    const visible_keys k = visible_to_rows(e, 0, e.q_len);
    return (double)k.end - (double)k.first;
}
