/* Caches: pages of keys and values, 8-bit keys and values, values inside the keys, and rows that do not depend on what
 * is computed beside them. What a problem and an execution may say, and who refuses it. */
#include "probe_kernel.h"
#include "support.h"

#include <math.h>

/* ---- The problem ---- */

static const struct {
    const char *text, *canonical;
} forms[] = {
    {"page16:b2:h8/2:s1/100:d64:kvlens", "b2:h8/2:s1/100:d64:kvlens:page16"},
    {"b2:h8/2:s4/100:d64:kvlens:page1:invariant", "b2:h8/2:s4/100:d64:kvlens:page1:invariant"},
    /* heads before keys in a page, and after them; pages of keys and values by turns */
    {"b2:h8/2:s4/100:d64:kvlens:page16:ks=2048,1024,64:vs=2048,1024,64", "b2:h8/2:s4/100:d64:kvlens:page16"},
    {"bshd:b2:h8/2:s4/100:d64:kvlens:page16", "b2:h8/2:s4/100:d64:bshd:kvlens:page16"},
    {"bshd:b2:h8/2:s4/100:d64:kvlens:page16:ks=4096,64,128:vs=4096,64,128",
     "b2:h8/2:s4/100:d64:qs=2048,64,512:ks=4096,64,128:vs=4096,64,128:os=2048,64,512:kvlens:page16"},
    /* queries of many sequences, keys in pages: lengths and a table, no offsets of keys */
    {"b4:h8/2:s32/100:d64:bshd:packed:kvlens:page64:causal", "b4:h8/2:s32/100:d64:causal:bshd:kvlens:packed:page64"},
    {"b4:h8/2:s32/100:d64:bshd:packed:kvlens:page64:ks=8192,4096,64",
     "b4:h8/2:s32/100:d64:bshd:ks=8192,4096,64:kvlens:packed:page64"},
    /* a stride that is never used */
    {"b2:h1:s4/100:d64:kvlens:page1:ks=64,7,9:vs=64,7,9", "b2:h1:s4/100:d64:kvlens:page1"},
    {"bf16:b1:h8:s1/100:d64:kv-e4m3", "bf16:b1:h8:s1/100:d64:kv-e4m3"},
    {"e4m3:b1:h8:s1/100:d64:kv-e4m3", "e4m3:b1:h8:s1/100:d64"},
    {"b1:h16/1:s1/100:d576/512:v-in-k", "b1:h16/1:s1/100:d576/512:v-in-k"},
    {"b1:h16/1:s1/100:d576/512:v-in-k:ks=0,0,640:vs=0,0,640", "b1:h16/1:s1/100:d576/512:ks=57600,57600,640:v-in-k"},
    {"b1:h16/1:s1/100:d576/512:v-in-k:page64:kvlens:kv-e4m3", "b1:h16/1:s1/100:d576/512:kvlens:page64:kv-e4m3:v-in-k"},
};

static void texts_say_where_keys_lie(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(forms); i++) {
        char text[ACR_PROBLEM_TEXT_MAX];
        const acr_problem problem = problem_of(forms[i].text), a = canonical_of(forms[i].text),
                          b = canonical_of(forms[i].canonical);
        assert_ok(acr_problem_format(&problem, text, sizeof text));
        assert_string_equal(text, forms[i].canonical);
        assert_memory_equal(&a, &b, sizeof a);
    }
}

static void canonical_problems_stay_as_they_are(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(forms); i++) {
        const acr_problem once = canonical_of(forms[i].text);
        acr_problem twice;
        assert_ok(acr_problem_canonical(&twice, &once));
        assert_memory_equal(&once, &twice, sizeof once);
    }
}

static void values_inside_keys_take_strides_and_scales_of_k(void **state)
{
    (void)state;
    acr_problem p = problem_of("b1:h16/1:s1/100:d576/512:kv-e4m3:v-in-k"), out;
    p.k = (acr_strides){70000, 64000, 640};
    p.k_scale = 0.25f;
    assert_ok(acr_problem_canonical(&out, &p));
    assert_memory_equal(&out.v, &out.k, sizeof out.k);
    assert_true(out.v_scale == 0.25f && out.q_scale == 1.0f);
}

#define assert_refused(text, change, fragment)                                                                         \
    do {                                                                                                               \
        acr_problem p = problem_of(text), out;                                                                         \
        change;                                                                                                        \
        assert_fails(acr_problem_canonical(&out, &p), ACR_INVALID, fragment);                                          \
    } while (0)

static void what_is_no_cache_is_refused(void **state)
{
    (void)state;
    const char *paged = "b2:h8/2:s4/100:d64:kvlens:page16", *plain = "b2:h8/2:s4/100:d64",
               *mla = "b1:h16/1:s1/100:d576/512:v-in-k";
    assert_refused(paged, p.flags &= ~(uint32_t)ACR_KV_LENS, "ACR_PAGED without ACR_KV_LENS");
    assert_refused(paged, p.page = 0, "page is 0, with ACR_PAGED it must be 1 to 65536");
    assert_refused(paged, p.page = -1, "page is -1");
    assert_refused(paged, p.page = 65537, "page is 65537");
    assert_refused(plain, p.page = 16, "page is 16, without ACR_PAGED");
    assert_refused(plain, p.kv_dtype = ACR_F32, "kv_dtype is 1 (f32)");
    assert_refused(plain, p.kv_dtype = ACR_BOOL8, "kv_dtype is 5");
    assert_refused(plain, p.k_scale = 2.0f, "k_scale is 2");
    assert_refused("b2:h8/2:s4/100:d64:kv-e4m3", p.q_scale = 2.0f, "q_scale is 2");
    assert_refused("b2:h8/2:s4/100:d64:kv-e4m3", p.v_scale = -1.0f, "v_scale is -1");
    assert_refused(mla, p.scale = 0.0f, "scale is 0, with ACR_V_IN_K");
    assert_refused(mla, p.v_dim = 577, "v_dim is 577, with ACR_V_IN_K it must be at most qk_dim (576)");
    assert_refused(mla, p.v.row = 512, "v strides");
    assert_refused(mla, p.v_scale = 0.5f, "v_scale is 0.5");
    assert_refused("b4:h8/2:s32/100:d64:bshd:packed:kvlens:page64", p.flags &= ~(uint32_t)ACR_PAGED, "ACR_KV_LENS");
    assert_refused("b4:h8/2:s32/100:d64:bshd:packed:kvlens:page64", p.q.batch = 8, "q.batch stride");
    acr_problem out;
    size_t at = 0;
    assert_fails(acr_problem_parse(&out, "b1:h1:s8:d8:kvlens:page0", &at), ACR_FORMAT, "1 to 2147483647");
    assert_int_equal(at, 23);
    assert_fails(acr_problem_parse(&out, "b1:h1:s8:d8:kvlens:page8:page8", &at), ACR_FORMAT, "twice");
}

/* ---- Kernels ---- */

static void kernels_refuse_by_name_what_they_are_compiled_without(void **state)
{
    const acr__device *device = &acr__ctx_backend_device(*state)->device;
    const struct {
        const char *text, *reason;
    } wanted[] = {{"b2:h8/2:s4/100:d64:kvlens:page16", "compiled without paging (PAGED)"},
                  {"b2:h8/2:s4/100:d64:kv-e4m3", "keys and values of q's type (KV_E4M3)"},
                  {"b2:h8/1:s4/100:d64/32:v-in-k", "without values inside the keys (V_IN_K)"},
                  {"b2:h8/1:s4/100:d64:invariant", "(ACR_INVARIANT)"}};
    for (size_t i = 0; i < COUNT_OF(wanted); i++) {
        const acr_problem p = canonical_of(wanted[i].text);
        assert_non_null(strstr(acr__why_not(&probe_kernel, &p, device), wanted[i].reason));
    }
}

/* Until a line of a GPU is compiled with it, every one refuses, and by the name. */
static void no_line_of_a_gpu_takes_what_it_does_not_serve(void **state)
{
    (void)state;
    const acr__device h200 = {.backend = ACR__CUDA, .arch = 90, .sm_count = 132, .smem_per_cta_bytes = 232448};
    const acr_problem paged = canonical_of("b2:h8/2:s4/100:d64:kvlens:page16"),
                      mixed = canonical_of("b2:h8/2:s4/100:d64:kv-e4m3");
    for (size_t i = 0; i < acr__kernel_count; i++) {
        const acr__kernel *kernel = acr__kernels[i];
        if (kernel->backend != ACR__CUDA)
            continue;
        assert_true(kernel->pages || acr__why_not(kernel, &paged, &h200));
        assert_true(kernel->kv_types || acr__why_not(kernel, &mixed, &h200));
    }
}

/* ---- Executions ---- */

enum {
    PAGES = 5,
    POOL = PAGES * 2 * 8 * 16 /* elements of k or v: pages, heads, keys, dims */
};

typedef struct call {
    acr_plan *plan;
    acr_buffers buffers;
    _Alignas(16) uint16_t q[2 * 2 * 4 * 16];
    _Alignas(16) uint16_t k[POOL];
    _Alignas(16) uint16_t v[POOL];
    _Alignas(16) uint16_t o[2 * 2 * 4 * 16];
    int32_t lens[2], table[2 * 4];
    float scales[4];
} call;

static acr__kernel probe;

static void open_call(call *c, acr_ctx *ctx, const char *text)
{
    const acr_problem p = problem_of(text);
    *c = (call){.plan = forced_plan(ctx, &p, &probe), .buffers = ACR_BUFFERS_INIT, .lens = {13, 4}};
    c->buffers.q = c->q;
    c->buffers.k = c->k;
    c->buffers.v = c->v;
    c->buffers.o = c->o;
    c->buffers.kv_lens = c->lens;
    c->buffers.page_table = c->table;
    c->buffers.table_stride = 4;
    c->buffers.pages = PAGES;
}

static acr_status execute(const call *c, const acr_buffers *buffers)
{
    return acr_execute(c->plan, buffers, NULL, 0, NULL);
}

#define assert_call_refused(call, change, status, fragment)                                                            \
    do {                                                                                                               \
        acr_buffers b = (call)->buffers;                                                                               \
        change;                                                                                                        \
        assert_fails(execute((call), &b), status, fragment);                                                           \
    } while (0)

static void an_execution_brings_a_table_and_nothing_else(void **state)
{
    static call c;
    open_call(&c, *state, "b2:h2:s4/30:d16:kvlens:page8");
    assert_ok(execute(&c, &c.buffers));
    assert_call_refused(&c, b.page_table = NULL, ACR_INVALID, "page_table is NULL");
    assert_call_refused(&c, b.table_stride = 3, ACR_INVALID, "table_stride is 3, must be 4 (kv_len 30 in pages of 8)");
    assert_call_refused(&c, b.pages = 0, ACR_INVALID, "pages is 0");
    assert_call_refused(&c, b.pages = (int64_t)1 << 31, ACR_INVALID, "pages is 2147483648");
    assert_call_refused(&c, b.kv_lens = NULL, ACR_INVALID, "kv_lens");
    assert_call_refused(&c, b.k_scales = c.scales, ACR_INVALID, "k_scales is given, but only e4m3");
    assert_call_refused(&c, b.page_table = (const int32_t *)(const void *)((char *)c.table + 2), ACR_ALIGNMENT,
                        "page_table");
    assert_call_refused(&c, b.page_table = (const int32_t *)(const void *)c.o, ACR_OVERLAP, "page_table");
    /* the last page of the pool is a part of it */
    assert_call_refused(&c, b.o = &c.v[POOL - 8], ACR_OVERLAP, "overlaps buffers.v");
    acr_plan_destroy(c.plan);
    open_call(&c, *state, "b2:h2:s4/30:d16:kvlens");
    assert_call_refused(&c, (void)b, ACR_INVALID, "table_stride is given, the problem lacks ACR_PAGED");
    assert_call_refused(&c, b.table_stride = 0, ACR_INVALID, "pages is given");
    assert_call_refused(&c, b.table_stride = b.pages = 0, ACR_INVALID, "page_table is given");
    acr_plan_destroy(c.plan);
}

static void packed_queries_come_with_lengths_and_a_table(void **state)
{
    static call c;
    static const int32_t offsets[3] = {0, 4, 8};
    open_call(&c, *state, "b2:h2:s4/30:d16:bshd:packed:kvlens:page8");
    assert_call_refused(&c, (void)b, ACR_INVALID, "q_offsets is NULL");
    c.buffers.q_offsets = offsets;
    c.buffers.q_total = 8;
    assert_ok(execute(&c, &c.buffers));
    assert_call_refused(&c, b.kv_offsets = offsets, ACR_INVALID, "kv_offsets is given, with ACR_PAGED");
    assert_call_refused(&c, b.kv_total = 8, ACR_INVALID, "kv_total is given, with ACR_PAGED");
    acr_plan_destroy(c.plan);
}

static void values_and_scales_are_those_that_the_cache_has(void **state)
{
    static call c;
    open_call(&c, *state, "b2:h2:s4/30:d16:kvlens:page8:kv-e4m3:v-in-k");
    assert_ok(execute(&c, (c.buffers.v = NULL, &c.buffers)));
    assert_ok(execute(&c, (c.buffers.v = c.k, c.buffers.k_scales = c.scales, c.scales[0] = c.scales[1] = 1,
                           c.scales[2] = c.scales[3] = 1, &c.buffers)));
    assert_call_refused(&c, b.v = c.v, ACR_INVALID, "v is given, the problem has ACR_V_IN_K");
    assert_call_refused(&c, b.v_scales = c.scales, ACR_INVALID, "v_scales is given, with ACR_V_IN_K");
    assert_call_refused(&c, b.q_scales = c.scales, ACR_INVALID, "q_scales is given");
    assert_call_refused(&c, b.k = NULL, ACR_INVALID, "k is NULL");
    acr_plan_destroy(c.plan);
}

static int open_context(void **state)
{
    *state = cpu_ctx(1);
    probe = probe_kernel_without_workspace;
    probe.traits |= ACR__TRAIT_PACKED;
    probe.pages = probe.v_in_k = 1;
    probe.kv_types = 1u << ACR_E4M3;
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
        cmocka_unit_test(texts_say_where_keys_lie),
        cmocka_unit_test(canonical_problems_stay_as_they_are),
        cmocka_unit_test(values_inside_keys_take_strides_and_scales_of_k),
        cmocka_unit_test(what_is_no_cache_is_refused),
        cmocka_unit_test(kernels_refuse_by_name_what_they_are_compiled_without),
        cmocka_unit_test(no_line_of_a_gpu_takes_what_it_does_not_serve),
        cmocka_unit_test(an_execution_brings_a_table_and_nothing_else),
        cmocka_unit_test(packed_queries_come_with_lengths_and_a_table),
        cmocka_unit_test(values_and_scales_are_those_that_the_cache_has),
    };
    return cmocka_run_group_tests(tests, open_context, close_context);
}
