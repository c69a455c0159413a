/* What the workbench makes of a cache: pools of pages in which stale rows are NaN, tables that kernels get wrong when
 * they read too far or in the wrong order, and an oracle that reads through them. */
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "check/oracle.h"
#include "check/reference.h"

static reference *reference_of(const acr_problem *p, input_kind inputs, length_pattern lengths, uint64_t seed)
{
    const reference_request wanted = {p, inputs, seed, REFERENCE_SAMPLED_ROWS, lengths, 1};
    reference *ref;
    assert_ok(reference_create(&ref, &wanted));
    return ref;
}

/* The element of a key or value of a batch entry, by the header's words. */
static double pooled(const reference *ref, bool value, int64_t b, int64_t h, int64_t j, int64_t d)
{
    const acr_problem *p = &ref->problem;
    const acr_buffers *at = &ref->buffers;
    const bool inside = p->flags & ACR_V_IN_K;
    const int64_t page = at->page_table[b * at->table_stride + j / p->page];
    const int64_t dims = value && !inside ? p->v_dim : p->qk_dim;
    assert_in_range(page, 0, at->pages - 1);
    return acr__load_element(acr__kv_dtype(p), value && !inside ? at->v : at->k,
                             ((page * p->kv_heads + h) * p->page + j % p->page) * dims + d);
}

/* The oracle's answer is that of the same keys and values in plain tensors of the queries' type. */
static void compare_plain(const char *paged, const char *plain, input_kind inputs)
{
    const acr_problem problem = canonical_of(paged);
    reference *ref = reference_of(&problem, inputs, LENGTHS_EDGES, 3);
    acr_problem p = canonical_of(plain);
    const int64_t rows = p.batch * p.kv_heads * p.kv_len, all = p.batch * p.q_heads * p.q_len;
    float *k = calloc((size_t)(rows * p.qk_dim), sizeof *k), *v = calloc((size_t)(rows * p.v_dim), sizeof *v);
    const float *k_scales = ref->buffers.k_scales,
                *v_scales = problem.flags & ACR_V_IN_K ? k_scales : ref->buffers.v_scales;
    float *q = calloc((size_t)(all * p.qk_dim), sizeof *q);
    for (int64_t i = 0; i < all * p.qk_dim; i++)
        q[i] = (float)acr__load_element(problem.dtype, ref->buffers.q, i);
    for (int64_t n = 0; n < rows; n++) {
        const int64_t b = n / p.kv_len / p.kv_heads, h = n / p.kv_len % p.kv_heads, j = n % p.kv_len;
        const double of_k = (double)ref->problem.k_scale * (k_scales ? k_scales[b * p.kv_heads + h] : 1.0f),
                     of_v = (double)ref->problem.v_scale * (v_scales ? v_scales[b * p.kv_heads + h] : 1.0f);
        const bool is_key = j < reference_kv_len(ref, b) && j >= reference_kv_start(ref, b);
        for (int64_t d = 0; d < p.qk_dim && is_key; d++)
            k[n * p.qk_dim + d] = (float)(of_k * pooled(ref, false, b, h, j, d));
        for (int64_t d = 0; d < p.v_dim && is_key; d++)
            v[n * p.v_dim + d] = (float)(of_v * pooled(ref, true, b, h, j, d));
    }
    acr_buffers same = ref->buffers;
    same.q = q;
    same.k = k;
    same.v = v;
    same.q_scales = same.k_scales = same.v_scales = NULL;
    p.scale = ref->problem.scale * ref->problem.q_scale;
    double *o = malloc((size_t)(all * p.v_dim) * sizeof *o), *lse = malloc((size_t)all * sizeof *lse);
    assert_null(ref->row_list);
    assert_ok(oracle_forward(&p, &same, NULL, all, o, lse));
    for (int64_t i = 0; i < all * p.v_dim; i++)
        assert_true(fabs(o[i] - ref->o[i]) <= 1e-5 * (1 + fabs(o[i])));
    for (int64_t i = 0; i < all; i++)
        assert_true(lse[i] == ref->lse[i] || fabs(lse[i] - ref->lse[i]) <= 1e-5 * (1 + fabs(lse[i])));
    free(q);
    free(k);
    free(v);
    free(o);
    free(lse);
    reference_destroy(ref);
}

static void the_oracle_reads_through_the_table(void **state)
{
    (void)state;
    compare_plain("f32:b6:h4/2:s5/70:d24/40:causal:lse:kvlens:page1", "f32:b6:h4/2:s5/70:d24/40:causal:lse:kvlens",
                  INPUT_NORMAL);
    compare_plain("bf16:b6:h4/2:s5/70:d24:causal:lse:kvlens:kvstarts:page16",
                  "f32:b6:h4/2:s5/70:d24:causal:lse:kvlens:kvstarts", INPUT_NORMAL);
    compare_plain("f16:b6:h4/2:s5/70:d24:lse:kvlens:kv-e4m3:page8", "f32:b6:h4/2:s5/70:d24:lse:kvlens",
                  INPUT_HEAD_SCALED);
    compare_plain("f16:b6:h4/2:s5/70:d24/8:lse:kvlens:kv-e4m3:v-in-k:page64", "f32:b6:h4/2:s5/70:d24/8:lse:kvlens",
                  INPUT_HEAD_SCALED);
}

/* What a table holds: the pages of a pool, how often they are some entry's, and where it names none. */
typedef struct table_facts {
    int shared, stale, outside, turned; /* numbers: of pages of two entries, unused ones, none, below the one before */
} table_facts;

static table_facts facts_of(const reference *ref)
{
    const acr_problem *p = &ref->problem;
    const acr_buffers *b = &ref->buffers;
    table_facts f = {0};
    int *entries = calloc((size_t)b->pages, sizeof *entries);
    for (int pass = 0; pass < 2; pass++)
        for (int64_t n = 0; n < p->batch * b->table_stride; n++) {
            const int64_t batch = n / b->table_stride, i = n % b->table_stride;
            const bool used = i < (reference_kv_len(ref, batch) + p->page - 1) / p->page;
            const int32_t page = b->page_table[n];
            assert_true(!used || (page >= 0 && page < b->pages));
            if (pass == 0) {
                f.outside += page < 0 || page >= b->pages;
                f.turned += used && i > 0 && page < b->page_table[n - 1];
                if (used)
                    f.shared += entries[page]++ > 0;
            } else if (!used && page >= 0 && page < b->pages) {
                f.stale += entries[page] == 0;
            }
        }
    free(entries);
    return f;
}

static void tables_have_what_kernels_get_wrong(void **state)
{
    (void)state;
    const int sizes[] = {1, 8, 16, 64, 256};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        char text[100];
        snprintf(text, sizeof text, "f16:b12:h2:s2/600:d8:kvlens:page%d", sizes[i]);
        const acr_problem p = canonical_of(text);
        table_facts all = {0};
        for (uint64_t seed = 1; seed <= 3; seed++) {
            reference *ref = reference_of(&p, INPUT_NORMAL, LENGTHS_EDGES, seed);
            const table_facts f = facts_of(ref);
            all.shared += f.shared;
            all.stale += f.stale;
            all.outside += f.outside;
            all.turned += f.turned;
            reference_destroy(ref);
        }
        assert_true(all.shared > 0 && all.stale > 0 && all.outside > 0 && all.turned > 0);
    }
    /* for times: every page is one entry's alone, and none is behind an entry's keys */
    const acr_problem p = canonical_of("f16:b4:h2:s1/600:d8:kvlens:page16");
    reference *ref = reference_of(&p, INPUT_NORMAL, LENGTHS_FULL, 1);
    const table_facts f = facts_of(ref);
    assert_true(f.shared == 0 && f.stale == 0 && f.outside == 0 && f.turned > 0);
    assert_int_equal(ref->buffers.pages, 4 * 38);
    reference_destroy(ref);
}

/* The patterns that bench offers, and that a pool holds no more pages than its entries have keys. */
static void lengths_follow_their_pattern(void **state)
{
    (void)state;
    static const struct {
        length_pattern pattern;
        int32_t q_begins[10], kv_lens[9];
        int64_t pages;
    } cases[] = {
        {LENGTHS_FULL,
         {0, 64, 128, 192, 256, 320, 384, 448, 512, 576},
         {640, 640, 640, 640, 640, 640, 640, 640, 640},
         9 * 40},
        {LENGTHS_SKEWED, /* factors of 64^(1/8) = 1.68 */
         {0, 1, 3, 6, 11, 19, 32, 55, 93, 157},
         {10, 17, 28, 48, 80, 135, 226, 381, 640},
         1 + 2 + 2 + 3 + 5 + 9 + 15 + 24 + 40},
        {LENGTHS_ONE_LONG, {0, 64, 65, 66, 67, 68, 69, 70, 71, 72}, {640, 10, 10, 10, 10, 10, 10, 10, 10}, 40 + 8},
        {LENGTHS_MIXED,
         {0, 64, 65, 66, 67, 68, 69, 70, 71, 135},
         {640, 640, 640, 640, 640, 640, 640, 640, 640},
         9 * 40},
    };
    const acr_problem p = canonical_of("f16:b9:h1:s64/640:d8:kvlens:page16:bshd:packed");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        reference *ref = reference_of(&p, INPUT_NORMAL, cases[i].pattern, 1);
        const acr_buffers *b = &ref->buffers;
        assert_memory_equal(b->q_offsets, cases[i].q_begins, sizeof cases[i].q_begins);
        assert_memory_equal(b->kv_lens, cases[i].kv_lens, sizeof cases[i].kv_lens);
        assert_int_equal(b->pages, cases[i].pages);
        const table_facts f = facts_of(ref);
        assert_true(f.shared == 0 && f.stale == 0);
        reference_destroy(ref);
    }
}

static void rows_that_are_nobodys_key_are_nan(void **state)
{
    (void)state;
    const acr_problem p = canonical_of("f16:b6:h2:s2/100:d8:kvlens:kvstarts:page16");
    reference *ref = reference_of(&p, INPUT_NORMAL, LENGTHS_EDGES, 1);
    const acr_buffers *b = &ref->buffers;
    int numbers = 0, nan = 0;
    for (int64_t row = 0; row < b->pages * 16; row++) {
        bool is_key = false;
        for (int64_t batch = 0; batch < p.batch; batch++)
            for (int64_t j = reference_kv_start(ref, batch); j < reference_kv_len(ref, batch); j++)
                is_key |= b->page_table[batch * b->table_stride + j / 16] == row / 16 && j % 16 == row % 16;
        for (int64_t h = 0; h < 2; h++)
            for (int64_t d = 0; d < 8; d++) {
                const int64_t at = ((row / 16 * 2 + h) * 16 + row % 16) * 8 + d;
                assert_true(isnan(acr__load_element(ACR_F16, b->k, at)) == !is_key);
                assert_true(isnan(acr__load_element(ACR_F16, b->v, at)) == !is_key);
            }
        numbers += is_key;
        nan += !is_key;
    }
    assert_true(numbers > 0 && nan > 0);
    reference_destroy(ref);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oracle_reads_through_the_table),
        cmocka_unit_test(tables_have_what_kernels_get_wrong),
        cmocka_unit_test(lengths_follow_their_pattern),
        cmocka_unit_test(rows_that_are_nobodys_key_are_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
