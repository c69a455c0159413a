/* Positive controls of the gate for caches: a plain kernel that serves pages, 8-bit keys and values, values inside keys
 * and rows that do not depend on their neighbours passes every case, and each of its flawed sisters is caught. What is
 * not about caches is gate_controls.c's. */
#include "flaws.h"

#include <math.h>
#include <stdatomic.h>

#include "check/conformance.h"

enum flaw {
    NO_FLAW,
    /* Of pages: */
    TABLE_TRANSPOSED,    /* read as [pages of an entry, batch] */
    TABLE_STRIDE_LOST,   /* taken as the pages that the longest keys need */
    FIRST_ENTRYS_TABLE,  /* for all */
    PAGES_IN_ORDER,      /* page i of an entry taken as page i of the pool */
    ROW_OFF_BY_ONE,      /* in the page, turning round at its end */
    PAGE_OFF_BY_ONE,     /* a page's last key taken from the next page of the table */
    STALE_ROWS_READ,     /* the rest of the last page multiplied by a zero weight */
    PAGES_OF_ROWS_FIRST, /* strides ignored: [page, kv_heads, dim] assumed */
    /* Of 8-bit caches: */
    K_SCALE_LOST, /* that of batch entry and head */
    V_SCALE_LOST,
    SCALES_SWAPPED,
    FIRST_SCALES_FOR_ALL,
    OUT_SCALE_LOST,  /* the problem's v_scale */
    SMALL_KEYS_LOST, /* numbers too small to be normal taken as 0 */
    /* Of values inside keys: */
    LAST_COLUMNS, /* the values are the keys' last columns */
    NEXT_COLUMNS, /* one column on */
    /* Of ACR_INVARIANT: what is summed together depends on something else */
    SPLIT_BY_BATCH,
    SPLIT_BY_LONGEST, /* kv_len */
    SPLIT_BY_QUERIES, /* q_len */
    FLAWS
};

static const char *const flaw_names[FLAWS] = {
    "none",           "table transposed", "table stride lost", "first entry's table", "pages in order",
    "row off by one", "page off by one",  "stale rows read",   "pages of rows first", "k scale lost",
    "v scale lost",   "scales swapped",   "first scales",      "out scale lost",      "small keys lost",
    "last columns",   "next columns",     "split by batch",    "split by longest",    "split by queries"};

static int present; /* the one flaw that the kernel has now */

enum {
    KEYS_MAX = 512,
    PARTS = 4
};

static const char *why_not(const acr_problem *p, const acr__device *device)
{
    (void)device;
    if (p->kv_len > KEYS_MAX)
        return "kv_len exceeds the control's 512";
    if (p->window_left || p->window_right)
        return "window is given, the control serves none";
    const bool plain = !(p->flags & (ACR_PAGED | ACR_V_IN_K | ACR_INVARIANT)) && p->kv_dtype == ACR_DTYPE_DEFAULT;
    if (plain && (p->q_len > 16 || p->kv_len > 20 || p->batch * p->q_heads > 6)) /* gate_controls.c has them */
        return "q_len, kv_len or batch make more work than the control is for";
    return NULL;
}

static double cost(const acr_problem *p, const acr__device *device)
{
    (void)p, (void)device;
    return 1.0;
}

/* A call, and the batch entry and heads of a row. */
typedef struct place {
    const fwd_args *a;
    fwd_paging paging;
    int64_t batch, kv_head;
} place;

static int64_t page_of(const place *at, int64_t i)
{
    const fwd_paging *p = &at->paging;
    const int64_t needed = (at->a->kv_len + p->page - 1) / p->page;
    const int64_t entry = present == FIRST_ENTRYS_TABLE ? 0 : at->batch;
    const int64_t number = present == TABLE_TRANSPOSED    ? i * at->a->batch + entry
                           : present == TABLE_STRIDE_LOST ? entry * needed + i
                                                          : entry * p->table_stride + i;
    const int64_t page = present == PAGES_IN_ORDER ? i : p->table[number];
    return page < 0 || page >= p->pages ? 0 : page; /* flawed, but within the pool */
}

/* An element of a key, or of a value; dims: of a row. */
static double element(const place *at, const void *base, const fwd_strides *s, int64_t dims, int64_t key, int64_t d)
{
    const fwd_paging *p = &at->paging;
    const acr_dtype dtype = p->kv_type ? (acr_dtype)p->kv_type : ACR_F32;
    int64_t index = at->batch * s->batch + at->kv_head * s->head + key * s->row;
    if (p->table) {
        const bool turns = present == PAGE_OFF_BY_ONE && key % p->page == p->page - 1 && key + 1 < at->a->kv_len;
        const int64_t page = page_of(at, key / p->page + turns);
        const int64_t row = (key + (present == ROW_OFF_BY_ONE)) % p->page;
        index = present == PAGES_OF_ROWS_FIRST ? ((page * p->page + row) * at->a->kv_heads + at->kv_head) * dims
                                               : page * s->batch + at->kv_head * s->head + row * s->row;
    }
    const double x = acr__load_element(dtype, base, index + d);
    return present == SMALL_KEYS_LOST && dtype == ACR_E4M3 && fabs(x) < 0x1p-6 ? 0.0 : x;
}

static double value_of(const place *at, int64_t key, int64_t d)
{
    const fwd_args *a = at->a;
    const bool inside = a->v == a->k;
    const int64_t shift = !inside || a->qk_dim == a->v_dim ? 0
                          : present == LAST_COLUMNS        ? a->qk_dim - a->v_dim
                          : present == NEXT_COLUMNS        ? 1
                                                           : 0;
    return element(at, a->v, &a->v_stride, inside ? a->qk_dim : a->v_dim, key, d + shift);
}

static fwd_scales scales_of(const place *at)
{
    fwd_args seen = *at->a;
    if (present == K_SCALE_LOST)
        seen.k_scales = NULL;
    if (present == V_SCALE_LOST)
        seen.v_scales = NULL;
    if (present == SCALES_SWAPPED) {
        seen.k_scales = at->a->v_scales;
        seen.v_scales = at->a->k_scales;
    }
    if (present == OUT_SCALE_LOST)
        seen.out_scale = 1.0f;
    const bool first = present == FIRST_SCALES_FOR_ALL;
    return fwd_scales_of(&seen, first ? 0 : at->batch, first ? 0 : at->kv_head);
}

/* Keys that are summed together in float32 before they join the others. */
static int64_t keys_together(const fwd_args *a)
{
    switch (present) {
    case SPLIT_BY_BATCH:
        return 8 + a->batch;
    case SPLIT_BY_LONGEST:
        return 1 + a->kv_len / PARTS;
    case SPLIT_BY_QUERIES:
        return a->q_len == 1 ? 7 : 16;
    default:
        return 16;
    }
}

/* The sum of weights times numbers, in parts. */
static double sum_in_parts(const fwd_args *a, const double *weights, const double *numbers, int64_t count)
{
    const int64_t together = keys_together(a);
    float total = 0;
    for (int64_t first = 0; first < count; first += together) {
        float sum = 0;
        for (int64_t j = first; j < count && j < first + together; j++)
            sum += (float)(weights[j] * numbers[j]);
        total += sum;
    }
    return (double)total;
}

/* Keys that a query of an entry with so many keys sees. */
static int64_t keys_seen(const fwd_args *a, int64_t i, int64_t queries, int64_t keys)
{
    const int64_t wanted = i + 1 + (a->mask == FWD_MASK_TOP_LEFT ? 0 : keys - queries);
    if (a->mask == FWD_MASK_NONE)
        return keys;
    return wanted < 0 ? 0 : wanted > keys ? keys : wanted;
}

/* i: the query of its entry, which has the rows `of` of the tensor. */
static void do_row(const fwd_args *a, int64_t batch, int64_t head, fwd_sequence of, int64_t i)
{
    static double weights[2 * KEYS_MAX], numbers[2 * KEYS_MAX]; /* the controls run on one thread */
    const place at = {a, fwd_paging_of(a), batch, head / a->group};
    const fwd_scales scales = scales_of(&at);
    const int64_t entry = a->q_offsets ? 0 : batch, in_tensor = of.first + i;
    const int64_t wanted = a->kv_lens ? a->kv_lens[batch] : a->kv_len,
                  all = wanted < 0           ? 0
                        : wanted > a->kv_len ? a->kv_len
                                             : wanted,
                  keys = keys_seen(a, i, of.length, all);
    const int64_t q = entry * a->q_stride.batch + head * a->q_stride.head + in_tensor * a->q_stride.row,
                  o = entry * a->o_stride.batch + head * a->o_stride.head + in_tensor * a->o_stride.row;
    const int64_t rest = present == STALE_ROWS_READ && at.paging.table && keys == all && keys > 0
                             ? (at.paging.page - keys % at.paging.page) % at.paging.page
                             : 0;
    double top = -INFINITY;
    for (int64_t j = 0; j < keys + rest; j++) {
        double sum = 0;
        for (int64_t d = 0; d < a->qk_dim && j < keys; d++)
            sum += acr__load_element(ACR_F32, a->q, q + d) * element(&at, a->k, &a->k_stride, a->qk_dim, j, d);
        weights[j] = (double)scales.scale * sum;
        top = j < keys && weights[j] > top ? weights[j] : top;
    }
    for (int64_t j = 0; j < keys + rest; j++) {
        weights[j] = j < keys ? exp(weights[j] - top) : 0.0;
        numbers[j] = 1.0;
    }
    const double sum = sum_in_parts(a, weights, numbers, keys);
    for (int64_t d = 0; d < a->v_dim; d++) {
        for (int64_t j = 0; j < keys + rest; j++)
            numbers[j] = value_of(&at, j, d);
        const double out = keys > 0 ? sum_in_parts(a, weights, numbers, keys + rest) / sum : 0.0;
        ((float *)a->o)[o + d] = (float)(out * (double)scales.out_scale);
    }
    if (a->lse)
        a->lse[a->q_offsets ? head * a->q_total + in_tensor : (batch * a->q_heads + head) * a->q_len + in_tensor] =
            keys > 0 ? (float)(top + log(sum)) : -INFINITY;
}

static void run(const fwd_args *a, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    (void)lanes, (void)queue, (void)scratch;
    for (int64_t batch = 0; batch < a->batch && lane == 0; batch++) {
        const fwd_sequence q =
            a->q_offsets ? fwd_sequence_of(a->q_offsets, batch, a->q_total, a->q_len) : (fwd_sequence){0, a->q_len};
        for (int64_t head = 0; head < a->q_heads; head++)
            for (int64_t row = 0; row < q.length; row++)
                do_row(a, batch, head, q, row);
    }
}

static const unsigned char identity[] = "cache control";
static const acr__kernel control = {.name = "fwd_control_f32_d64_16x16_portable",
                                    .family = "fwd_control",
                                    .backend = ACR__CPU,
                                    .dtype = ACR_F32,
                                    .qk_dim_max = 64,
                                    .v_dim_max = 64,
                                    .q_tile = 16,
                                    .kv_tile = 16,
                                    .stages = 1,
                                    .traits = ACR__TRAIT_INVARIANT,
                                    .pages = 1,
                                    .v_in_k = 1,
                                    .kv_types = 1u << ACR_E4M3,
                                    .why_not = why_not,
                                    .cost = cost,
                                    .run = run,
                                    .image = identity,
                                    .image_end = identity + sizeof identity - 1};

static void every_flaw_is_caught(void **state)
{
    (void)state;
    check_flaws(&(flawed_kernel){&control, &present, FLAWS, flaw_names, REFERENCE_SAMPLED_ROWS, true});
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_flaw_is_caught)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
