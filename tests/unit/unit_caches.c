/* Caches on the CPU: pages, 8-bit keys and values, and values inside keys change where bytes lie and nothing else, so a
 * kernel gives the same bits for them as for the same numbers in plain tensors. And rows of ACR_INVARIANT have the same
 * bits alone as among others. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const types[] = {"f32", "f16", "bf16", "e4m3"};

/* The i-th forward kernel of this machine that takes the problem, or NULL. */
static const acr__kernel *taker(acr_ctx *ctx, const acr_problem *p, size_t *i)
{
    const acr__device *device = &acr__ctx_backend_device(ctx)->device;
    for (const acr__kernel *kernel; (kernel = cpu_kernel(ctx, *i)) != NULL; ++*i)
        if (!acr__why_not(kernel, p, device))
            return kernel;
    return NULL;
}

typedef struct output {
    unsigned char *o;
    float *lse;
} output;

static output keep(const tensors *t)
{
    output out = {malloc(t->o_bytes + 1), malloc(t->lse_bytes + 4)};
    memcpy(out.o, t->o, t->o_bytes);
    if (t->lse)
        memcpy(out.lse, t->lse, t->lse_bytes);
    return out;
}

static void drop(output *out)
{
    free(out->o);
    free(out->lse);
}

/* ---- Pages ---- */

/* The first key of an entry in the plain tensor, and how many it has. */
static fwd_sequence keys_of(const tensors *t, int64_t entry)
{
    const acr_problem *p = &t->problem;
    if (t->kv_offsets)
        return fwd_sequence_of(t->kv_offsets, entry, t->buffers.kv_total, p->kv_len);
    return (fwd_sequence){0, t->kv_lens[entry]};
}

/* A pool with the keys and values of plain tensors: pages in no order, NaN bytes in all rows that hold nothing, those
 * behind an entry's last key among them, and a table whose unused numbers name no page. */
typedef struct page_pool {
    unsigned char *k, *v;
    int32_t *table, *lens;
    int64_t pages, stride;
} page_pool;

static void copy_key(const tensors *t, const acr_problem *paged, const page_pool *pool, int64_t entry, int64_t j,
                     int32_t page)
{
    const acr_problem *p = &t->problem;
    const size_t size = (size_t)acr__dtype_bytes(p->dtype);
    const int64_t batch = t->kv_offsets ? 0 : entry, row = keys_of(t, entry).first + j;
    for (int64_t h = 0; h < p->kv_heads; h++) {
        memcpy(pool->k + (size_t)element_of(&paged->k, page, h, j % paged->page, 0) * size,
               (const char *)t->k + (size_t)element_of(&p->k, batch, h, row, 0) * size, (size_t)p->qk_dim * size);
        memcpy(pool->v + (size_t)element_of(&paged->v, page, h, j % paged->page, 0) * size,
               (const char *)t->v + (size_t)element_of(&p->v, batch, h, row, 0) * size, (size_t)p->v_dim * size);
    }
}

static page_pool pool_make(const tensors *t, const acr_problem *paged)
{
    const int64_t stride = acr__pages_of_entry(paged) + 2, pages = paged->batch * stride;
    const size_t k_bytes = (size_t)acr__span_bytes(pages, paged->kv_heads, paged->page, paged->qk_dim, &paged->k,
                                                   paged->dtype),
                 v_bytes = (size_t)acr__span_bytes(pages, paged->kv_heads, paged->page, paged->v_dim, &paged->v,
                                                   paged->dtype);
    page_pool pool = {aligned_alloc(64, (k_bytes + 63) / 64 * 64),
                      aligned_alloc(64, (v_bytes + 63) / 64 * 64),
                      malloc((size_t)pages * 4),
                      malloc((size_t)paged->batch * 4),
                      pages,
                      stride};
    generator g = {(uint64_t)paged->page};
    memset(pool.k, 0xff, k_bytes);
    memset(pool.v, 0xff, v_bytes);
    int32_t *free_pages = malloc((size_t)pages * 4);
    for (int64_t i = 0; i < pages; i++) {
        const int64_t at = (int64_t)(next_u64(&g) % (uint64_t)(i + 1));
        free_pages[i] = free_pages[at];
        free_pages[at] = (int32_t)i;
        pool.table[i] = i % 2 ? -1 : INT32_MAX;
    }
    for (int64_t b = 0, next = 0; b < paged->batch; b++) {
        pool.lens[b] = (int32_t)keys_of(t, b).length;
        for (int64_t j = 0; j < pool.lens[b]; j++) {
            int32_t *page = &pool.table[b * stride + j / paged->page];
            if (j % paged->page == 0)
                *page = free_pages[next++];
            copy_key(t, paged, &pool, b, j, *page);
        }
    }
    free(free_pages);
    return pool;
}

static void pool_free(page_pool *p)
{
    free(p->k);
    free(p->v);
    free(p->table);
    free(p->lens);
}

/* The same call with pages for keys and values; outputs stay the plain one's. */
static tensors with_pages(const tensors *t, const acr_problem *paged, const page_pool *p)
{
    tensors u = *t;
    u.problem = *paged;
    u.buffers.k = p->k;
    u.buffers.v = p->v;
    u.buffers.kv_lens = p->lens;
    u.buffers.kv_offsets = NULL;
    u.buffers.kv_total = 0;
    u.buffers.page_table = p->table;
    u.buffers.table_stride = p->stride;
    u.buffers.pages = p->pages;
    return u;
}

static const char *const paged_rest[] = {":b4:h4/2:s5/150:d40/24:causal:lse%s", ":b3:h6/1:s1/131:d16:lse%s",
                                         ":b2:h2:s70/200:d33/65:win60:cap5:sinks%s"};
static const int pages_tried[] = {1, 8, 16, 64, 256};

static void compare_pages(acr_ctx *ctx, const char *type, const char *rest, const char *plain, const char *tail)
{
    for (size_t n = 0; n < COUNT_OF(pages_tried); n++) {
        char text[200], paged_text[240], fields[200];
        snprintf(fields, sizeof fields, rest, plain);
        snprintf(text, sizeof text, "%s%s", type, fields);
        snprintf(fields, sizeof fields, rest, "");
        snprintf(paged_text, sizeof paged_text, "%s%s%s:kvlens:page%d", type, fields, tail, pages_tried[n]);
        const acr_problem p = canonical_of(text), paged = canonical_of(paged_text);
        float sinks[8] = {1, -1, 0.5f, 2, 0, 0, 0, 0};
        tensors t = tensors_make(&p, n + 1);
        t.buffers.sinks = p.flags & ACR_SINKS ? sinks : NULL;
        page_pool pool = pool_make(&t, &paged);
        tensors u = with_pages(&t, &paged, &pool);
        size_t tried = 0;
        for (size_t i = 0; taker(ctx, &paged, &i); i++, tried++) {
            execute_once(ctx, cpu_kernel(ctx, i), &t);
            output expected = keep(&t);
            tensors_poison_outputs(&t);
            execute_once(ctx, cpu_kernel(ctx, i), &u);
            assert_memory_equal(t.o, expected.o, t.o_bytes);
            if (t.lse)
                assert_memory_equal(t.lse, expected.lse, t.lse_bytes);
            drop(&expected);
        }
        assert_true(tried > 0);
        pool_free(&pool);
        tensors_free(&t);
    }
}

static void pages_give_the_bits_of_plain_tensors(void **state)
{
    for (size_t type = 0; type < COUNT_OF(types); type++)
        for (size_t i = 0; i < COUNT_OF(paged_rest); i++)
            compare_pages(*state, types[type], paged_rest[i], ":kvlens", "");
}

static void packed_queries_over_pages_give_the_bits_of_a_packed_batch(void **state)
{
    for (size_t type = 0; type < COUNT_OF(types); type++)
        compare_pages(*state, types[type], ":b5:h4/2:s40/90:d24/40:causal:lse:bshd%s", ":packed", ":packed");
}

/* A number that names no page: its entry's rows are left open, all others keep their bits, nothing else is touched (a
 * sanitizer sees to that). */
static void a_number_that_names_no_page_touches_its_own_rows_alone(void **state)
{
    acr_ctx *ctx = *state;
    static const int32_t bad[] = {-1, INT32_MIN, INT32_MAX, 0};
    const acr_problem p = canonical_of("f16:b3:h2:s4/100:d32:kvlens"),
                      paged = canonical_of("f16:b3:h2:s4/100:d32:kvlens:page16");
    for (size_t n = 0; n < COUNT_OF(bad); n++) {
        tensors t = tensors_make(&p, 5);
        t.kv_lens[1] = 100;
        page_pool pool = pool_make(&t, &paged);
        tensors u = with_pages(&t, &paged, &pool);
        pool.table[pool.stride + 3] = bad[n] ? bad[n] : (int32_t)pool.pages;
        size_t tried = 0;
        for (size_t i = 0; taker(ctx, &paged, &i); i++, tried++) {
            execute_once(ctx, cpu_kernel(ctx, i), &t);
            output expected = keep(&t);
            execute_once(ctx, cpu_kernel(ctx, i), &u);
            const size_t entry = t.o_bytes / 3;
            assert_memory_equal(t.o, expected.o, entry);
            assert_memory_equal((char *)t.o + 2 * entry, expected.o + 2 * entry, entry);
            drop(&expected);
        }
        assert_true(tried > 0);
        pool_free(&pool);
        tensors_free(&t);
    }
}

/* ---- 8-bit caches ---- */

static void eight_bit_caches_give_the_bits_of_their_values(void **state)
{
    acr_ctx *ctx = *state;
    for (size_t type = 0; type < 3; type++) {
        char text[120];
        snprintf(text, sizeof text, "%s:b2:h4/2:s5/150:d40/24:causal:lse", types[type]);
        const acr_problem p = canonical_of(text);
        acr_problem narrow = p;
        narrow.kv_dtype = ACR_E4M3;
        narrow.k_scale = 0.5f; /* powers of two: nothing is rounded by them */
        narrow.v_scale = 2.0f;
        narrow.scale = p.scale * 8.0f;
        assert_ok(acr_problem_canonical(&narrow, &narrow));
        tensors t = tensors_make(&p, 3), u = t;
        const size_t keys = t.k_bytes / (size_t)acr__dtype_bytes(p.dtype),
                     values = t.v_bytes / (size_t)acr__dtype_bytes(p.dtype);
        unsigned char *k = malloc(keys), *v = malloc(values + 16);
        const float quarter[4] = {0.25f, 0.25f, 0.25f, 0.25f};
        for (size_t i = 0; i < keys; i++) {
            acr__store_element(ACR_E4M3, k, (int64_t)i, acr__load_element(p.dtype, t.k, (int64_t)i));
            acr__store_element(p.dtype, t.k, (int64_t)i, acr__load_element(ACR_E4M3, k, (int64_t)i));
        }
        for (size_t i = 0; i < values; i++) {
            acr__store_element(ACR_E4M3, v, (int64_t)i, acr__load_element(p.dtype, t.v, (int64_t)i));
            acr__store_element(p.dtype, t.v, (int64_t)i, acr__load_element(ACR_E4M3, v, (int64_t)i));
        }
        u.problem = narrow;
        u.buffers.k = k;
        u.buffers.v = v;
        u.buffers.k_scales = quarter; /* 8 * 0.5 * 0.25 = 1 */
        size_t tried = 0;
        for (size_t i = 0; taker(ctx, &narrow, &i); i++, tried++) {
            execute_once(ctx, cpu_kernel(ctx, i), &t);
            output expected = keep(&t);
            tensors_poison_outputs(&t);
            execute_once(ctx, cpu_kernel(ctx, i), &u);
            assert_memory_equal(t.lse, expected.lse, t.lse_bytes);
            for (size_t e = 0; e < t.o_bytes / (size_t)acr__dtype_bytes(p.out_dtype); e++) {
                const double got = acr__load_element(p.out_dtype, t.o, (int64_t)e),
                             wanted = 2.0 * acr__load_element(p.out_dtype, expected.o, (int64_t)e);
                if (got < wanted - 1e-6 || got > wanted + 1e-6 || got != got)
                    fail_msg("%s: element %zu is %g, not %g", cpu_kernel(ctx, i)->name, e, got, wanted);
            }
            drop(&expected);
        }
        assert_true(tried > 0);
        free(k);
        free(v);
        tensors_free(&t);
    }
}

/* ---- Values inside keys ---- */

static void values_inside_keys_give_the_bits_of_a_copy(void **state)
{
    acr_ctx *ctx = *state;
    for (size_t type = 0; type < COUNT_OF(types); type++) {
        char text[120], whole[140];
        snprintf(text, sizeof text, "%s:b2:h16/1:s3/100:d72/64:lse", types[type]);
        snprintf(whole, sizeof whole, "%s:v-in-k", text);
        acr_problem p = canonical_of(text);
        const acr_problem inside = canonical_of(whole);
        tensors t = tensors_make(&p, 9), u = t;
        const size_t size = (size_t)acr__dtype_bytes(p.dtype);
        for (int64_t row = 0; row < p.batch * p.kv_len; row++)
            memcpy((char *)t.v + (size_t)(row * p.v_dim) * size, (char *)t.k + (size_t)(row * p.qk_dim) * size,
                   (size_t)p.v_dim * size);
        u.problem = inside;
        u.buffers.v = NULL;
        size_t tried = 0;
        for (size_t i = 0; taker(ctx, &inside, &i); i++, tried++) {
            execute_once(ctx, cpu_kernel(ctx, i), &t);
            output expected = keep(&t);
            tensors_poison_outputs(&t);
            execute_once(ctx, cpu_kernel(ctx, i), &u);
            assert_memory_equal(t.o, expected.o, t.o_bytes);
            assert_memory_equal(t.lse, expected.lse, t.lse_bytes);
            drop(&expected);
        }
        assert_true(tried > 0);
        tensors_free(&t);
    }
}

/* ---- Rows alone ---- */

/* Row i of head h of entry b as an execution of its own: one query, and the keys that it sees. */
static void compare_alone(acr_ctx *ctx, const tensors *t, const char *type, int64_t b, int64_t h, int64_t i)
{
    const acr_problem *p = &t->problem;
    const size_t size = (size_t)acr__dtype_bytes(p->dtype), out = (size_t)acr__dtype_bytes(p->out_dtype);
    const int64_t keys = p->kv_len - p->q_len + i + 1, kv_head = h / (p->q_heads / p->kv_heads);
    char text[120];
    snprintf(text, sizeof text, "%s:b1:h1:s1/%lld:d%lld/%lld:invariant:lse", type, (long long)keys,
             (long long)p->qk_dim, (long long)p->v_dim);
    const acr_problem one = problem_of(text);
    tensors u = tensors_make(&one, 1);
    memcpy(u.q, (char *)t->q + (size_t)element_of(&p->q, b, h, i, 0) * size, u.q_bytes);
    memcpy(u.k, (char *)t->k + (size_t)element_of(&p->k, b, kv_head, 0, 0) * size, u.k_bytes);
    memcpy(u.v, (char *)t->v + (size_t)element_of(&p->v, b, kv_head, 0, 0) * size, u.v_bytes);
    size_t tried = 0;
    for (size_t n = 0; taker(ctx, &u.problem, &n); n++, tried++) {
        execute_once(ctx, cpu_kernel(ctx, n), &u);
        assert_memory_equal(u.o, (char *)t->o + (size_t)element_of(&p->o, b, h, i, 0) * out, u.o_bytes);
        assert_true(u.lse[0] == t->lse[(b * p->q_heads + h) * p->q_len + i]);
    }
    assert_true(tried > 0);
    tensors_free(&u);
}

static void invariant_rows_have_the_same_bits_alone(void **state)
{
    acr_ctx *ctx = *state;
    for (size_t type = 0; type < COUNT_OF(types); type++) {
        char text[120];
        snprintf(text, sizeof text, "%s:b2:h4/2:s77/300:d40/24:causal:lse:invariant", types[type]);
        const acr_problem p = problem_of(text);
        tensors t = tensors_make(&p, 4);
        execute_once(ctx, NULL, &t);
        const int64_t rows[] = {0, 1, 31, 32, 63, 64, 76};
        for (size_t r = 0; r < COUNT_OF(rows); r++)
            compare_alone(ctx, &t, types[type], (int64_t)(r % 2), (int64_t)(r % 4), rows[r]);
        tensors_free(&t);
    }
}

static int open_context(void **state)
{
    *state = cpu_ctx(1);
    return 0;
}

static int close_context(void **state)
{
    acr_ctx_destroy(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_give_the_bits_of_plain_tensors),
        cmocka_unit_test(packed_queries_over_pages_give_the_bits_of_a_packed_batch),
        cmocka_unit_test(a_number_that_names_no_page_touches_its_own_rows_alone),
        cmocka_unit_test(eight_bit_caches_give_the_bits_of_their_values),
        cmocka_unit_test(values_inside_keys_give_the_bits_of_a_copy),
        cmocka_unit_test(invariant_rows_have_the_same_bits_alone),
    };
    return cmocka_run_group_tests(tests, open_context, close_context);
}
