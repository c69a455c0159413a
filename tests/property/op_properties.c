/* acr_merge and acr_append on random calls: against float64, and what must hold whatever the numbers are. */
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "op_cases.h"

enum {
    CASES = 400
};

static void check_against_float64(op_case *(*make)(uint64_t seed, int is_small), uint32_t threads)
{
    acr_ctx *ctx = cpu_ctx(threads);
    for (uint64_t seed = 0; seed < CASES; seed++) {
        op_case *c = make(seed, 0);
        char difference[256];
        assert_ok(op_case_run(c, ctx));
        if (!op_case_agrees(c, difference, sizeof difference))
            fail_msg("case %d, %s: %s", (int)seed, op_case_text(c), difference);
        op_case_free(c);
    }
    acr_ctx_destroy(ctx);
}

static void merges_agree_with_float64(void **state)
{
    (void)state;
    check_against_float64(op_case_merge, 3);
}

static void appends_agree_with_float64(void **state)
{
    (void)state;
    check_against_float64(op_case_append, 3);
}

/* One thread and many leave the same bits. */
static void threads_change_no_bit(void **state)
{
    (void)state;
    acr_ctx *one = cpu_ctx(1), *many = cpu_ctx(4);
    for (uint64_t seed = 0; seed < 2 * 40; seed++) {
        op_case *c = seed % 2 ? op_case_merge(1000 + seed, 0) : op_case_append(1000 + seed, 0);
        char difference[256];
        assert_ok(op_case_run(c, one));
        op_outcome alone = op_case_keep(c);
        assert_ok(op_case_run(c, many));
        if (!op_case_equals(c, &alone, difference, sizeof difference))
            fail_msg("%s: %s", op_case_text(c), difference);
        op_outcome_free(&alone);
        op_case_free(c);
    }
    acr_ctx_destroy(one);
    acr_ctx_destroy(many);
}

/* Attention over the keys in parts, merged, is attention over all keys. */
static void merged_parts_are_the_whole(void **state)
{
    (void)state;
    enum {
        KEYS = 90,
        ROWS = 2 * 3 * 20,
        DIM = 16,
        PARTS = 4
    };
    static const int ends[PARTS + 1] = {0, 1, 40, 40 + 27, KEYS};
    acr_ctx *ctx = cpu_ctx(2);
    const acr_problem whole = canonical_of("f32:b2:h3:s20/90:d16:lse");
    tensors t = tensors_make(&whole, 5);
    execute_once(ctx, NULL, &t);
    float *o = calloc(PARTS * ROWS * DIM, sizeof *o), *lse = calloc(PARTS * ROWS, sizeof *lse);
    float *merged = calloc(ROWS * DIM, sizeof *merged), *merged_lse = calloc(ROWS, sizeof *merged_lse);
    assert_true(o && lse && merged && merged_lse);
    acr_part parts[PARTS];
    for (int i = 0; i < PARTS; i++) {
        acr_problem p = whole;
        p.kv_len = ends[i + 1] - ends[i];
        acr_buffers b = t.buffers;
        b.k = (const float *)t.k + ends[i] * p.k.row;
        b.v = (const float *)t.v + ends[i] * p.v.row;
        b.o = o + i * ROWS * DIM;
        b.lse = lse + i * ROWS;
        assert_ok(acr_forward(ctx, &p, &b, NULL));
        parts[i] = (acr_part){b.o, b.lse};
    }
    acr_merge_args m = ACR_MERGE_ARGS_INIT;
    m.dtype = ACR_F32;
    m.batch = 2;
    m.heads = 3;
    m.len = 20;
    m.dim = DIM;
    m.count = PARTS;
    m.parts = parts;
    m.o = merged;
    m.lse = merged_lse;
    m.alignment = 4;
    assert_ok(acr_merge(ctx, &m, NULL));
    for (int i = 0; i < ROWS * DIM; i++)
        assert_true(fabsf(merged[i] - ((float *)t.o)[i]) <= 2e-6f);
    for (int i = 0; i < ROWS; i++)
        assert_true(fabsf(merged_lse[i] - t.lse[i]) <= 4e-6f);
    free(o);
    free(lse);
    free(merged);
    free(merged_lse);
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

/* A call over [batch, heads, len, dim] with parts of random numbers. */
typedef struct small_merge {
    acr_merge_args args;
    acr_part parts[3];
    float part_o[3][4 * 5 * 8], part_lse[3][4 * 5], o[4 * 5 * 8], lse[4 * 5];
} small_merge;

static void make_small_merge(small_merge *s, uint64_t seed, int64_t count)
{
    generator g = {seed};
    s->args = (acr_merge_args)ACR_MERGE_ARGS_INIT;
    s->args.dtype = ACR_F32;
    s->args.batch = 1;
    s->args.heads = 4;
    s->args.len = 5;
    s->args.dim = 8;
    s->args.count = count;
    s->args.alignment = 4;
    for (int i = 0; i < 3; i++) {
        for (int e = 0; e < 160; e++)
            s->part_o[i][e] = (float)next_normal(&g);
        for (int e = 0; e < 20; e++)
            s->part_lse[i][e] = (float)(2.0 * next_normal(&g));
        s->parts[i] = (acr_part){s->part_o[i], s->part_lse[i]};
    }
    s->args.parts = s->parts;
    s->args.o = s->o;
    s->args.lse = s->lse;
}

static void a_part_alone_is_itself_and_one_without_keys_changes_no_bit(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    for (uint64_t seed = 1; seed <= 50; seed++) {
        small_merge one, with;
        make_small_merge(&one, seed, 1);
        assert_ok(acr_merge(ctx, &one.args, NULL));
        assert_memory_equal(one.o, one.part_o[0], sizeof one.o);
        assert_memory_equal(one.lse, one.part_lse[0], sizeof one.lse);
        make_small_merge(&one, seed, 2);
        make_small_merge(&with, seed, 3);
        for (int e = 0; e < 160; e++)
            with.part_o[2][e] = NAN;
        for (int e = 0; e < 20; e++)
            with.part_lse[2][e] = -INFINITY;
        assert_ok(acr_merge(ctx, &one.args, NULL));
        assert_ok(acr_merge(ctx, &with.args, NULL));
        assert_memory_equal(one.o, with.o, sizeof one.o);
        assert_memory_equal(one.lse, with.lse, sizeof one.lse);
    }
    acr_ctx_destroy(ctx);
}

/* A cache that is filled a token at a time is the one filled at once, and pages hold what a plain cache holds. */
typedef struct fill {
    acr_append_args args;
    uint16_t k[2][24][3 * 16], v[2][24][3 * 16];
    uint8_t k_cache[2][40][3][16], v_cache[2][40][3][16];
    float cos[64][8], sin[64][8];
    int32_t kv_lens[2], table[2 * 5];
} fill;

static void make_fill(fill *f, uint64_t seed)
{
    generator g = {seed};
    memset(f, 0, sizeof *f);
    acr_append_args *a = &f->args;
    *a = (acr_append_args)ACR_APPEND_ARGS_INIT;
    a->dtype = ACR_BF16;
    a->cache_dtype = ACR_E4M3;
    a->layout = ACR_BSHD;
    a->alignment = 2;
    a->batch = 2;
    a->kv_heads = 3;
    a->len = 24;
    a->qk_dim = 16;
    a->kv_len = 40;
    a->rope_dim = 16;
    a->rope_rows = 64;
    a->k_scale = 0.02f;
    a->v_scale = 0.01f;
    for (int i = 0; i < 2 * 24 * 48; i++) {
        acr__store_element(ACR_BF16, f->k, i, next_normal(&g));
        acr__store_element(ACR_BF16, f->v, i, next_normal(&g));
    }
    for (int i = 0; i < 64 * 8; i++) {
        f->cos[i / 8][i % 8] = (float)cos(0.3 * i);
        f->sin[i / 8][i % 8] = (float)sin(0.3 * i);
    }
    a->k = f->k;
    a->v = f->v;
    a->k_cache = f->k_cache;
    a->v_cache = f->v_cache;
    a->cos = &f->cos[0][0];
    a->sin = &f->sin[0][0];
    a->kv_lens = f->kv_lens;
    f->kv_lens[0] = 24;
    f->kv_lens[1] = 40;
}

static void one_by_one_is_all_at_once_and_pages_are_rows(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    fill *whole = malloc(sizeof *whole), *steps = malloc(sizeof *steps), *pages = malloc(sizeof *pages);
    assert_true(whole && steps && pages);
    make_fill(whole, 3);
    make_fill(steps, 3);
    make_fill(pages, 3);
    assert_ok(acr_append(ctx, &whole->args, NULL));
    for (int i = 0; i < 24; i++) {
        steps->args.len = 1;
        steps->args.k_stride = steps->args.v_stride = (acr_strides){24 * 48, 16, 48};
        steps->args.k = steps->k[0][i];
        steps->args.v = steps->v[0][i];
        steps->kv_lens[0] = i + 1;
        steps->kv_lens[1] = 16 + i + 1;
        assert_ok(acr_append(ctx, &steps->args, NULL));
    }
    assert_memory_equal(whole->k_cache, steps->k_cache, sizeof whole->k_cache);
    assert_memory_equal(whole->v_cache, steps->v_cache, sizeof whole->v_cache);
    static const int32_t table[] = {7, 2, 9, 0, 4, 3, 8, 1, 6, 5};
    memcpy(pages->table, table, sizeof table);
    pages->args.kv_len = 0;
    pages->args.page = 8;
    pages->args.pages = 10;
    pages->args.table_stride = 5;
    pages->args.page_table = pages->table;
    assert_ok(acr_append(ctx, &pages->args, NULL));
    const uint8_t *paged = &pages->k_cache[0][0][0][0];
    for (int b = 0; b < 2; b++)
        for (int p = 0; p < 40; p++)
            assert_memory_equal(whole->k_cache[b][p], paged + 48 * (table[b * 5 + p / 8] * 8 + p % 8), 48);
    free(whole);
    free(steps);
    free(pages);
    acr_ctx_destroy(ctx);
}

/* Offsets, lengths and tables of any numbers: nothing outside the tensors is touched, which sanitizers and the bytes
 * around show. */
static void any_numbers_are_harmless(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    generator g = {77};
    for (uint64_t seed = 0; seed < 300; seed++) {
        op_case *c = op_case_append(5000 + seed, 1);
        static const int kinds[] = {OP_KV_LENS, OP_OFFSETS, OP_TABLE, OP_ROPE_OFFSETS, OP_ROPE_POSITIONS};
        for (int k = 0; k < 5; k++)
            for (int64_t i = 0; i < c->buffers[kinds[k]].elements; i++)
                ((int32_t *)c->buffers[kinds[k]].before)[i] = (int32_t)(next_u64(&g) >> (next_u64(&g) % 32));
        if (c->buffers[OP_TABLE].before) /* two sequences that write one row are the caller's fault */
            for (int64_t i = 0; i < c->buffers[OP_TABLE].elements; i++)
                ((int32_t *)c->buffers[OP_TABLE].before)[i] |= INT32_MIN;
        assert_ok(op_case_run(c, ctx));
        op_case_free(c);
    }
    acr_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_agree_with_float64),
        cmocka_unit_test(appends_agree_with_float64),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(merged_parts_are_the_whole),
        cmocka_unit_test(a_part_alone_is_itself_and_one_without_keys_changes_no_bit),
        cmocka_unit_test(one_by_one_is_all_at_once_and_pages_are_rows),
        cmocka_unit_test(any_numbers_are_harmless),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
