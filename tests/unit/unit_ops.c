/* acr_merge and acr_append as callers meet them: small examples worked out by hand, and every refusal. */
#include "support.h"

#include <math.h>
#include "op_math.h"

/* ---- Arithmetic -------------------------------------------------------------------------------------------------- */

static void divisors_known_before_divide_exactly(void **state)
{
    (void)state;
    for (uint32_t shift = 0; shift < 32; shift++)
        for (uint32_t by = (1u << shift) - 3; by != (1u << shift) + 4; by++) {
            if (by == 0)
                continue;
            const op_divisor d = op_divisor_of(by);
            for (uint32_t times = 0; times < 40; times++) {
                const uint32_t product = (times < 20 ? times : UINT32_MAX / by - (times - 20)) * by;
                for (uint32_t x = product - 2; x != product + 3; x++)
                    assert_int_equal(op_divide(d, x), x / by);
            }
        }
}

/* ---- Merging ----------------------------------------------------------------------------------------------------- */

/* Two parts of a row of two elements. */
typedef struct pair {
    acr_merge_args args;
    acr_part parts[2];
    float part_o[2][2], part_lse[2][1], o[2], lse[1];
} pair;

static void make_pair(pair *p, float first, float second)
{
    *p = (pair){.args = ACR_MERGE_ARGS_INIT,
                .part_o = {{1.0f, 8.0f}, {3.0f, 0.0f}},
                .part_lse = {{first}, {second}},
                .o = {-1.0f, -1.0f},
                .lse = {-1.0f}};
    p->args.dtype = ACR_F32;
    p->args.alignment = 4;
    p->args.batch = p->args.heads = p->args.len = 1;
    p->args.dim = 2;
    p->args.count = 2;
    for (int i = 0; i < 2; i++)
        p->parts[i] = (acr_part){p->part_o[i], p->part_lse[i]};
    p->args.parts = p->parts;
    p->args.o = p->o;
    p->args.lse = p->lse;
}

static void merge_pair(pair *p)
{
    acr_ctx *ctx = cpu_ctx(1);
    assert_ok(acr_merge(ctx, &p->args, NULL));
    acr_ctx_destroy(ctx);
}

static void weights_are_those_of_the_sums(void **state)
{
    (void)state;
    pair p;
    make_pair(&p, logf(3.0f), 0.0f); /* three quarters and one */
    merge_pair(&p);
    assert_true(fabsf(p.o[0] - 1.5f) < 1e-6f && fabsf(p.o[1] - 6.0f) < 1e-6f);
    assert_true(fabsf(p.lse[0] - logf(4.0f)) < 1e-6f);
    make_pair(&p, 1000.0f, 1000.0f); /* exponentials beyond float32 */
    merge_pair(&p);
    assert_true(p.o[0] == 2.0f && p.o[1] == 4.0f && fabsf(p.lse[0] - 1000.0f - logf(2.0f)) < 1e-4f);
}

static void rows_without_keys_and_rows_that_are_spoilt(void **state)
{
    (void)state;
    pair p;
    make_pair(&p, -INFINITY, -INFINITY);
    p.part_o[0][0] = NAN;
    merge_pair(&p);
    assert_true(p.o[0] == 0.0f && p.o[1] == 0.0f && p.lse[0] == -INFINITY);
    make_pair(&p, -INFINITY, 2.0f);
    p.part_o[0][0] = NAN;
    merge_pair(&p);
    assert_true(p.o[0] == 3.0f && p.o[1] == 0.0f && p.lse[0] == 2.0f);
    static const float bad[] = {NAN, INFINITY};
    for (int i = 0; i < 2; i++)
        for (int part = 0; part < 2; part++) {
            make_pair(&p, part ? 0.0f : bad[i], part ? bad[i] : 0.0f);
            merge_pair(&p);
            assert_true(isnan(p.o[0]) && isnan(p.o[1]) && isnan(p.lse[0]));
        }
}

static void the_first_part_may_be_the_output(void **state)
{
    (void)state;
    pair p, q;
    make_pair(&p, 0.5f, 0.25f);
    make_pair(&q, 0.5f, 0.25f);
    merge_pair(&p);
    q.args.o = q.part_o[0];
    q.args.lse = q.part_lse[0];
    merge_pair(&q);
    assert_memory_equal(p.o, q.part_o[0], sizeof p.o);
    assert_memory_equal(p.lse, q.part_lse[0], sizeof p.lse);
}

#define assert_merge_refused(change, status, fragment)                                                                 \
    do {                                                                                                               \
        pair p;                                                                                                        \
        make_pair(&p, 0.0f, 0.0f);                                                                                     \
        change;                                                                                                        \
        assert_fails(acr_merge(ctx, &p.args, NULL), status, fragment);                                                 \
        assert_true(p.o[0] == -1.0f && p.lse[0] == -1.0f);                                                             \
    } while (0)

static void merges_are_refused_by_name(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    assert_fails(acr_merge(NULL, NULL, NULL), ACR_INVALID, "ctx is NULL");
    assert_fails(acr_merge(ctx, NULL, NULL), ACR_INVALID, "args is NULL");
    assert_merge_refused(p.args.size = 8, ACR_INVALID, "args.size is 8");
    assert_merge_refused(p.args.flags = 2, ACR_INVALID, "flags");
    assert_merge_refused(p.args.dtype = ACR_DTYPE_DEFAULT, ACR_INVALID, "args.dtype");
    assert_merge_refused(p.args.dtype = ACR_E4M3, ACR_INVALID, "args.dtype");
    assert_merge_refused(p.args.out_dtype = ACR_E4M3, ACR_INVALID, "args.out_dtype");
    assert_merge_refused(p.args.layout = (acr_layout)2, ACR_INVALID, "layout");
    assert_merge_refused(p.args.alignment = 3, ACR_INVALID, "alignment");
    assert_merge_refused(p.args.alignment = 2, ACR_INVALID, "alignment");
    assert_merge_refused((p.args.out_dtype = ACR_F16, p.args.alignment = 1), ACR_INVALID, "alignment");
    assert_merge_refused((p.args.out_dtype = ACR_F16, p.args.alignment = 2, p.args.o = (char *)p.o + 1), ACR_ALIGNMENT,
                         "not a multiple of 2");
    assert_merge_refused(
        (p.args.dtype = ACR_F16, p.args.out_dtype = ACR_F32, p.args.alignment = 2, p.args.o = (char *)p.o + 2),
        ACR_ALIGNMENT, "not a multiple of 4");
    assert_merge_refused(p.args.batch = 0, ACR_INVALID, "args.batch is 0");
    assert_merge_refused(p.args.dim = INT64_MAX, ACR_INVALID, "args.dim");
    assert_merge_refused(p.args.count = 0, ACR_INVALID, "args.count");
    assert_merge_refused((p.args.batch = 1 << 20, p.args.len = 1 << 12), ACR_INVALID, "below 2^32");
    assert_merge_refused((p.args.len = 2, p.args.o_stride = (acr_strides){2, 2, 1}), ACR_INVALID, "overlap itself");
    assert_merge_refused((p.args.len = 2, p.args.part_stride = (acr_strides){2, 2, -1}), ACR_INVALID, "negative");
    assert_merge_refused((p.args.len = 2, p.args.lse_stride = (acr_strides){1, 1, 0}), ACR_INVALID, "args.lse_stride");
    assert_merge_refused(p.args.parts = NULL, ACR_INVALID, "args.parts is NULL");
    assert_merge_refused(p.args.o = NULL, ACR_INVALID, "args.o is NULL");
    assert_merge_refused(p.parts[1].o = NULL, ACR_INVALID, "args.parts[1].o is NULL");
    assert_merge_refused(p.parts[0].lse = NULL, ACR_INVALID, "args.parts[0].lse is NULL");
    assert_merge_refused(p.args.alignment = 256, ACR_ALIGNMENT, "not a multiple of 256");
    assert_merge_refused(p.args.lse = (float *)(void *)((char *)p.lse + 1), ACR_ALIGNMENT, "args.lse");
    assert_merge_refused(p.args.o = p.part_o[1], ACR_OVERLAP, "args.o overlaps args.parts[1].o");
    assert_merge_refused(p.args.lse = p.part_lse[1], ACR_OVERLAP, "args.lse overlaps args.parts[1].lse");
    assert_merge_refused(p.args.lse = p.o, ACR_OVERLAP, "args.o overlaps args.lse");
    acr_ctx_destroy(ctx);
}

/* ---- Appending --------------------------------------------------------------------------------------------------- */

/* One sequence of one head with four elements a row, in a cache of four positions; two new tokens. */
typedef struct cache {
    acr_append_args args;
    float q[8], k[8], v[8], q_out[8], k_cache[16], v_cache[16], cos[8], sin[8];
    int32_t kv_lens[1], table[2], offsets[2];
} cache;

static void make_cache(cache *c)
{
    *c = (cache){.args = ACR_APPEND_ARGS_INIT,
                 .q = {1, 2, 3, 4, 5, 6, 7, 8},
                 .k = {1, 2, 3, 4, 5, 6, 7, 8},
                 .v = {10, 20, 30, 40, 50, 60, 70, 80},
                 .cos = {1, 1, 0, 0, -1, -1, 0, 1}, /* no turn, a quarter, a half, a quarter back and none */
                 .sin = {0, 0, 1, 1, 0, 0, -1, 0},
                 .kv_lens = {3},
                 .table = {1, 0},
                 .offsets = {0, 2}};
    acr_append_args *a = &c->args;
    a->dtype = ACR_F32;
    a->alignment = 4;
    a->batch = a->kv_heads = a->q_heads = 1;
    a->len = 2;
    a->qk_dim = 4;
    a->kv_len = 4;
    a->rope_dim = 4;
    a->rope_rows = 4;
    a->q = c->q;
    a->k = c->k;
    a->v = c->v;
    a->q_out = c->q_out;
    a->k_cache = c->k_cache;
    a->v_cache = c->v_cache;
    a->cos = c->cos;
    a->sin = c->sin;
    a->kv_lens = c->kv_lens;
}

static void append_cache(cache *c)
{
    acr_ctx *ctx = cpu_ctx(1);
    assert_ok(acr_append(ctx, &c->args, NULL));
    acr_ctx_destroy(ctx);
}

static void assert_floats(const float *got, const float *wanted, int count)
{
    for (int i = 0; i < count; i++)
        if (got[i] != wanted[i])
            fail_msg("element %d is %g, must be %g", i, (double)got[i], (double)wanted[i]);
}

static void tokens_go_to_the_last_positions_turned(void **state)
{
    (void)state;
    cache c;
    make_cache(&c); /* positions 1 and 2: a quarter and a half turn */
    append_cache(&c);
    assert_floats(c.k_cache, (float[16]){0, 0, 0, 0, -3, -4, 1, 2, -5, -6, -7, -8}, 16);
    assert_floats(c.v_cache, (float[16]){0, 0, 0, 0, 10, 20, 30, 40, 50, 60, 70, 80}, 16);
    assert_floats(c.q_out, (float[8]){-3, -4, 1, 2, -5, -6, -7, -8}, 8);
    make_cache(&c);
    c.args.flags = ACR_ROPE_INTERLEAVED;
    append_cache(&c);
    assert_floats(c.k_cache, (float[16]){0, 0, 0, 0, -2, 1, -4, 3, -5, -6, -7, -8}, 16);
    make_cache(&c); /* the last two elements alone */
    c.args.rope_first = c.args.rope_dim = 2;
    c.args.rope_stride = 2;
    append_cache(&c);
    assert_floats(c.k_cache, (float[16]){0, 0, 0, 0, 1, 2, -4, 3, 5, 6, -7, -8}, 16);
}

static void pages_and_lengths_say_where(void **state)
{
    (void)state;
    cache c;
    make_cache(&c); /* positions 1 and 2: page 1 row 1, page 0 row 0 */
    c.args.kv_len = 0;
    c.args.page = c.args.pages = c.args.table_stride = 2;
    c.args.page_table = c.table;
    append_cache(&c);
    assert_floats(c.v_cache, (float[16]){50, 60, 70, 80, 0, 0, 0, 0, 0, 0, 0, 0, 10, 20, 30, 40}, 16);
    make_cache(&c);
    c.table[1] = 2; /* no page: its token is not written */
    c.args.kv_len = 0;
    c.args.page = c.args.pages = c.args.table_stride = 2;
    c.args.page_table = c.table;
    append_cache(&c);
    assert_floats(c.v_cache, (float[16]){0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 20, 30, 40}, 16);
    make_cache(&c);
    c.kv_lens[0] = 1; /* the first token would lie before the cache */
    append_cache(&c);
    assert_floats(c.v_cache, (float[16]){50, 60, 70, 80}, 16);
    make_cache(&c);
    c.offsets[1] = 1; /* the second row is nobody's */
    c.args.offsets = c.offsets;
    append_cache(&c);
    assert_floats(c.v_cache, (float[16]){0, 0, 0, 0, 0, 0, 0, 0, 10, 20, 30, 40}, 16);
    assert_floats(c.q_out, (float[8]){-1, -2, -3, -4, 0, 0, 0, 0}, 8);
}

static void eight_bits_are_scaled_and_saturate(void **state)
{
    (void)state;
    cache c;
    make_cache(&c);
    c.args.cache_dtype = ACR_E4M3;
    c.args.v_scale = 0.125f; /* 80 / 0.125 is 640 */
    append_cache(&c);
    static const double wanted[] = {80, 160, 240, 320, 384, 448, 448, 448}; /* 400 lies between 384 and 416: even */
    for (int i = 0; i < 8; i++)
        assert_true(acr__load_element(ACR_E4M3, c.v_cache, 4 + i) == wanted[i]);
}

static void a_table_that_ends_early_spoils_the_pairs(void **state)
{
    (void)state;
    cache c;
    make_cache(&c);
    c.args.rope_rows = 2;
    append_cache(&c);
    assert_floats(c.k_cache + 4, (float[4]){-3, -4, 1, 2}, 4);
    for (int i = 8; i < 12; i++)
        assert_true(isnan(c.k_cache[i]) && isnan(c.q_out[i - 4]));
    assert_floats(c.v_cache + 8, c.v + 4, 4);
}

#define assert_append_refused(change, status, fragment)                                                                \
    do {                                                                                                               \
        cache c;                                                                                                       \
        make_cache(&c);                                                                                                \
        change;                                                                                                        \
        assert_fails(acr_append(ctx, &c.args, NULL), status, fragment);                                                \
        assert_floats(c.k_cache, (float[16]){0}, 16);                                                                  \
    } while (0)

static void appends_are_refused_by_name(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    float scales[1] = {0.0f};
    assert_fails(acr_append(NULL, NULL, NULL), ACR_INVALID, "ctx is NULL");
    assert_fails(acr_append(ctx, NULL, NULL), ACR_INVALID, "args is NULL");
    assert_append_refused(c.args.size = 8, ACR_INVALID, "args.size is 8");
    assert_append_refused(c.args.flags = 4, ACR_INVALID, "flags");
    assert_append_refused(c.args.layout = (acr_layout)2, ACR_INVALID, "layout");
    assert_append_refused(c.args.dtype = ACR_E4M3, ACR_INVALID, "args.dtype");
    assert_append_refused(c.args.cache_dtype = ACR_BOOL8, ACR_INVALID, "args.cache_dtype");
    assert_append_refused(c.args.k_cache = NULL, ACR_INVALID, "args.k_cache is missing");
    assert_append_refused(c.args.v = NULL, ACR_INVALID, "args.v_cache is given without v");
    assert_append_refused(c.args.q_out = NULL, ACR_INVALID, "args.q_out is missing");
    assert_append_refused(c.args.q_heads = 0, ACR_INVALID, "args.q_heads is missing");
    assert_append_refused(c.args.kv_lens = NULL, ACR_INVALID, "args.kv_lens is NULL");
    assert_append_refused(c.args.sin = NULL, ACR_INVALID, "args.sin is missing");
    assert_append_refused(c.args.rope_dim = 0, ACR_INVALID, "args.cos is given without rope_dim");
    assert_append_refused(c.args.rope_dim = 3, ACR_INVALID, "even");
    assert_append_refused(c.args.rope_first = 1, ACR_INVALID, "at most qk_dim, 4");
    assert_append_refused(c.args.rope_stride = 1, ACR_INVALID, "rope_stride");
    assert_append_refused(c.args.len = 0, ACR_INVALID, "args.len is 0");
    assert_append_refused(c.args.kv_len = 0, ACR_INVALID, "args.kv_len is 0");
    assert_append_refused(c.args.page = 2, ACR_INVALID, "args.page is given without page_table");
    assert_append_refused(c.args.page_table = c.table, ACR_INVALID, "args.page is missing");
    assert_append_refused((c.args.page_table = c.table, c.args.page = c.args.pages = c.args.table_stride = 2),
                          ACR_INVALID, "args.kv_len is 4, with a page_table it must be 0");
    assert_append_refused(c.args.k_scale = 2.0f, ACR_INVALID, "only an e4m3 cache has scales");
    assert_append_refused(c.args.v_scales = scales, ACR_INVALID, "args.v_scales is given");
    assert_append_refused((c.args.cache_dtype = ACR_E4M3, c.args.k_scale = -1.0f), ACR_INVALID, "args.k_scale is -1");
    assert_append_refused((c.args.cache_dtype = ACR_E4M3, c.args.v_scales = scales), ACR_INVALID,
                          "args.v_scales[0, 0] is 0");
    assert_append_refused((c.args.offsets = c.offsets, c.args.k_stride = (acr_strides){8, 4, 4}), ACR_INVALID,
                          "args.k_stride.batch is 8");
    assert_append_refused((c.args.k_cache_stride = (acr_strides){16, 16, 2}), ACR_INVALID, "overlap itself");
    assert_append_refused(c.args.alignment = 2, ACR_INVALID, "alignment");
    assert_append_refused(c.args.alignment = 256, ACR_ALIGNMENT, "not a multiple of 256");
    assert_append_refused(c.args.cos = (float *)(void *)((char *)c.cos + 2), ACR_ALIGNMENT, "args.cos");
    assert_append_refused(c.args.v_cache = c.k_cache, ACR_OVERLAP, "args.v_cache overlaps args.k_cache");
    assert_append_refused(c.args.k_cache = c.v, ACR_OVERLAP, "args.k_cache overlaps args.v");
    assert_append_refused(c.args.q_out = c.q + 1, ACR_OVERLAP, "args.q_out overlaps args.q");
    assert_append_refused(c.args.q_out = c.cos, ACR_OVERLAP, "args.q_out overlaps args.cos");
    acr_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(divisors_known_before_divide_exactly),
        cmocka_unit_test(weights_are_those_of_the_sums),
        cmocka_unit_test(rows_without_keys_and_rows_that_are_spoilt),
        cmocka_unit_test(the_first_part_may_be_the_output),
        cmocka_unit_test(merges_are_refused_by_name),
        cmocka_unit_test(tokens_go_to_the_last_positions_turned),
        cmocka_unit_test(pages_and_lengths_say_where),
        cmocka_unit_test(eight_bits_are_scaled_and_saturate),
        cmocka_unit_test(a_table_that_ends_early_spoils_the_pairs),
        cmocka_unit_test(appends_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
