/* The entry points as a caller without a GPU meets them: contexts, plans, executions, the one call, and every error
 * that they name. */
#include "support.h"

#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check/oracle.h"
#include "probe_kernel.h"

/* ---- Contexts -----------------------------------------------------------------------------------------------------
 * */

static acr_ctx_options cpu_options(uint32_t threads)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cpu";
    options.threads = threads;
    return options;
}

#define assert_options_refused(change, status, fragment)                                                               \
    do {                                                                                                               \
        acr_ctx_options options = cpu_options(1);                                                                      \
        acr_ctx *const untouched = (acr_ctx *)(uintptr_t)64, *ctx = untouched;                                         \
        change;                                                                                                        \
        assert_fails(acr_ctx_create(&ctx, &options), status, fragment);                                                \
        assert_ptr_equal(ctx, untouched);                                                                              \
    } while (0)

static void bad_options_are_refused(void **state)
{
    (void)state;
    assert_options_refused(options.size = 0, ACR_INVALID, "size");
    assert_options_refused(options.size -= 1, ACR_INVALID, "size");
    assert_options_refused(options.reserved = 1, ACR_INVALID, "reserved");
    assert_options_refused(options.threads = 1025, ACR_INVALID, "1024");
    assert_options_refused(options.device = -1, ACR_INVALID, "device");
    assert_options_refused(options.device = 1, ACR_NO_DEVICE, "device");
    assert_options_refused(options.backend = "abacus", ACR_INVALID, "abacus");
    assert_options_refused(options.backend = "", ACR_INVALID, "backend");
    assert_options_refused(options.backend = "CPU", ACR_INVALID, "backend");
    const acr_ctx_options options = cpu_options(1);
    assert_fails(acr_ctx_create(NULL, &options), ACR_INVALID, "NULL");
}

static void contexts_describe_themselves(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(3);
    assert_string_equal(acr_ctx_backend(ctx), "cpu");
    const char *text = acr_ctx_device(ctx);
    assert_true(strlen(text) > 0);
    assert_null(strchr(text, '\n'));
    assert_non_null(strstr(text, "3 threads"));
    acr_ctx_destroy(ctx);
}

static void default_context_opens_something(void **state)
{
    (void)state;
    acr_ctx *ctx = NULL;
    assert_ok(acr_ctx_create(&ctx, NULL));
    const char *backend = acr_ctx_backend(ctx);
    assert_true(strcmp(backend, "cpu") == 0 || strcmp(backend, "cuda") == 0);
    acr_ctx_destroy(ctx);
}

static void destroying_null_does_nothing(void **state)
{
    (void)state;
    acr_ctx_destroy(NULL);
    acr_plan_destroy(NULL);
}

static void null_has_no_description(void **state)
{
    (void)state;
    assert_string_equal(acr_ctx_backend(NULL), "");
    assert_string_equal(acr_ctx_device(NULL), "");
    assert_string_equal(acr_plan_text(NULL), "");
    assert_string_equal(acr_plan_kernel(NULL), "");
    assert_int_equal(acr_plan_workspace(NULL), 0);
}

static void every_thread_count_opens(void **state)
{
    (void)state;
    const uint32_t counts[] = {0, 1, 2, 3, 7};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        acr_ctx *ctx = cpu_ctx(counts[i]);
        const int32_t threads = acr__ctx_backend_device(ctx)->device.threads;
        assert_true(counts[i] ? threads == (int32_t)counts[i] : threads >= 1);
        acr_ctx_destroy(ctx);
    }
}

/* ---- Plans --------------------------------------------------------------------------------------------------------
 * */

static void bad_plan_arguments_are_refused(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr_problem p = problem_of("b1:h1:s16:d64");
    acr_plan *const untouched = (acr_plan *)(uintptr_t)64, *plan = untouched;
    assert_fails(acr_plan_create(NULL, ctx, &p, ACR_ESTIMATE), ACR_INVALID, "out");
    assert_fails(acr_plan_create(&plan, NULL, &p, ACR_ESTIMATE), ACR_INVALID, "ctx");
    assert_fails(acr_plan_create(&plan, ctx, NULL, ACR_ESTIMATE), ACR_INVALID, "problem");
    assert_fails(acr_plan_create(&plan, ctx, &p, (acr_effort)4), ACR_INVALID, "effort");
    assert_fails(acr_plan_create(&plan, ctx, &p, (acr_effort)-1), ACR_INVALID, "effort");
    p.batch = 0;
    assert_fails(acr_plan_create(&plan, ctx, &p, ACR_ESTIMATE), ACR_INVALID, "batch");
    p = problem_of("b1:h1:s16:d64");
    assert_fails(acr_plan_create(&plan, ctx, &p, ACR_WISDOM_ONLY), ACR_NO_WISDOM, "b1:h1:s16:d64");
    p = problem_of("b1:h1:s16:d100000/8"); /* more than any kernel serves */
    assert_fails(acr_plan_create(&plan, ctx, &p, ACR_ESTIMATE), ACR_UNSUPPORTED, "qk_dim");
    p = problem_of("b1:h1:s16:d8/100000");
    assert_fails(acr_plan_create(&plan, ctx, &p, ACR_PATIENT), ACR_UNSUPPORTED, "v_dim");
    assert_ptr_equal(plan, untouched);
    acr_ctx_destroy(ctx);
}

static void forced_plans_say_why_not(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr_plan *plan = NULL;
    const acr_problem unlucky = problem_of("b1:h1:s13:d64"), f32 = problem_of("f32:b1:h1:s16:d64");
    assert_fails(acr__plan_create_forced(&plan, ctx, &unlucky, &probe_kernel), ACR_UNSUPPORTED, "superstitious");
    assert_fails(acr__plan_create_forced(&plan, ctx, &f32, &probe_kernel), ACR_UNSUPPORTED, "dtype");
    assert_null(plan);
    acr_ctx_destroy(ctx);
}

static void a_plan_outlives_its_context(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    const acr_problem p = problem_of("b1:h2:s16:d64");
    acr_plan *first = estimate_plan(ctx, "b1:h2:s16:d64"),
             *second = forced_plan(ctx, &p, &probe_kernel_without_workspace);
    acr_ctx_destroy(ctx);
    assert_non_null(strstr(acr_plan_text(first), "b1:h2:s16:d64"));
    acr_plan_destroy(first);
    tensors t = tensors_make(&p, 1);
    memset(t.o, 0, t.o_bytes);
    assert_ok(acr_execute(second, &t.buffers, NULL, 0, NULL));
    assert_true(o_at(&t, 0, 1, 15, 63) == 1.0);
    acr_plan_destroy(second);
    tensors_free(&t);
}

static void plan_text_is_one_line_that_names_problem_kernel_and_reason(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr_plan *plan = estimate_plan(ctx, "d64:s16:h2:b1");
    const char *text = acr_plan_text(plan);
    assert_null(strchr(text, '\n'));
    assert_non_null(strstr(text, "b1:h2:s16:d64"));
    assert_non_null(strstr(text, acr_plan_kernel(plan)));
    assert_non_null(strstr(text, "estimate"));
    const char *name = acr_plan_kernel(plan);
    assert_non_null(acr__kernel_find(name));
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
    assert_true(strlen(name) > 0); /* lives as long as the library */
}

/* ---- Executions: what is refused ----------------------------------------------------------------------------------
 * */

/* A plan of the probe kernel with its tensors and workspace, all valid; tests spoil one thing at a time. */
typedef struct bench {
    acr_ctx *ctx;
    acr_plan *plan;
    tensors t;
    void *workspace;
    size_t workspace_bytes;
} bench;

static bench bench_make(const char *text, const acr__kernel *kernel)
{
    bench b = {.ctx = cpu_ctx(2)};
    const acr_problem p = problem_of(text);
    b.plan = forced_plan(b.ctx, &p, kernel);
    b.t = tensors_make(&p, 1);
    b.workspace_bytes = acr_plan_workspace(b.plan);
    b.workspace = b.workspace_bytes ? aligned_alloc(256, b.workspace_bytes) : NULL;
    assert_ok(acr_workspace_init(b.plan, b.workspace, b.workspace_bytes, NULL));
    return b;
}

static void bench_free(bench *b)
{
    free(b->workspace);
    tensors_free(&b->t);
    acr_plan_destroy(b->plan);
    acr_ctx_destroy(b->ctx);
}

static acr_status bench_execute(const bench *b, const acr_buffers *buffers)
{
    return acr_execute(b->plan, buffers, b->workspace, b->workspace_bytes, NULL);
}

/* Executes with one thing changed in the buffers: refused, and o untouched. */
#define assert_buffers_refused(bench, change, status, fragment)                                                        \
    do {                                                                                                               \
        acr_buffers buffers = (bench)->t.buffers;                                                                      \
        change;                                                                                                        \
        tensors_poison_outputs(&(bench)->t);                                                                           \
        assert_fails(bench_execute((bench), &buffers), status, fragment);                                              \
        assert_outputs_untouched(&(bench)->t);                                                                         \
    } while (0)

static void assert_outputs_untouched(const tensors *t)
{
    for (size_t i = 0; i < t->o_bytes; i++)
        assert_int_equal(((const unsigned char *)t->o)[i], 0xff);
    for (size_t i = 0; i < t->lse_bytes; i++)
        assert_int_equal(((const unsigned char *)t->lse)[i], 0xff);
}

static void null_pointers_are_refused(void **state)
{
    (void)state;
    bench b = bench_make("b1:h2:s8:d16:lse:kvlens", &probe_kernel_without_workspace);
    assert_fails(acr_execute(NULL, &b.t.buffers, NULL, 0, NULL), ACR_INVALID, "plan");
    assert_fails(acr_execute(b.plan, NULL, NULL, 0, NULL), ACR_INVALID, "buffers");
    assert_fails(acr_workspace_init(NULL, NULL, 0, NULL), ACR_INVALID, "plan");
    assert_buffers_refused(&b, buffers.q = NULL, ACR_INVALID, "q");
    assert_buffers_refused(&b, buffers.k = NULL, ACR_INVALID, "k");
    assert_buffers_refused(&b, buffers.v = NULL, ACR_INVALID, "v");
    assert_buffers_refused(&b, buffers.o = NULL, ACR_INVALID, "o");
    assert_buffers_refused(&b, buffers.lse = NULL, ACR_INVALID, "lse");
    assert_buffers_refused(&b, buffers.kv_lens = NULL, ACR_INVALID, "kv_lens");
    bench_free(&b);
}

static void outputs_and_lengths_nobody_asked_for_are_refused(void **state)
{
    (void)state;
    bench b = bench_make("b1:h2:s8:d16", &probe_kernel_without_workspace);
    float lse[16];
    const int32_t lens[1] = {8};
    assert_buffers_refused(&b, buffers.lse = lse, ACR_INVALID, "lse");
    assert_buffers_refused(&b, buffers.kv_lens = lens, ACR_INVALID, "kv_lens");
    bench_free(&b);
}

static void buffers_have_a_size_and_known_flags(void **state)
{
    (void)state;
    bench b = bench_make("b1:h2:s8:d16", &probe_kernel_without_workspace);
    assert_buffers_refused(&b, buffers.size = 0, ACR_INVALID, "size");
    assert_buffers_refused(&b, buffers.size -= 8, ACR_INVALID, "size");
    assert_buffers_refused(&b, buffers.flags = 2, ACR_INVALID, "flags");
    assert_buffers_refused(&b, buffers.flags = 0x80000001u, ACR_INVALID, "flags");
    acr_buffers buffers = b.t.buffers;
    buffers.flags = ACR_OVERLAP_PREVIOUS; /* means nothing on the cpu, but is no error */
    assert_ok(bench_execute(&b, &buffers));
    bench_free(&b);
}

/* Callers compiled against earlier versions of the header, whose buffers end before the offsets or the scales. */
static void buffers_of_earlier_versions_are_accepted(void **state)
{
    (void)state;
    bench b = bench_make("b1:h2:s8:d16", &probe_kernel_without_workspace);
    const size_t sizes[] = {offsetof(acr_buffers, q_offsets), offsetof(acr_buffers, q_scales)};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        acr_buffers earlier = b.t.buffers;
        earlier.size = (uint32_t)sizes[i];
        memset((char *)&earlier + sizes[i], 0x5a, sizeof earlier - sizes[i]); /* not the caller's to set */
        assert_ok(bench_execute(&b, &earlier));
        assert_buffers_refused(&b, buffers.size = (uint32_t)sizes[i] + 8, ACR_INVALID, "size");
    }
    struct {
        acr_buffers known;
        uint64_t later;
    } longer = {b.t.buffers, 0};
    longer.known.size = sizeof longer;
    assert_ok(bench_execute(&b, &longer.known));
    longer.later = 1;
    assert_fails(bench_execute(&b, &longer.known), ACR_INVALID, "does not know");
    bench_free(&b);
}

static void offsets_are_checked(void **state)
{
    (void)state;
    const char *text = "b3:h2:s8:d16:bshd:packed:lse";
    bench plain = bench_make("b1:h2:s8:d16", &probe_kernel_without_workspace);
    const int32_t numbers[4] = {0, 1, 2, 3};
    assert_buffers_refused(&plain, buffers.q_offsets = numbers, ACR_INVALID, "q_offsets");
    assert_buffers_refused(&plain, buffers.kv_offsets = numbers, ACR_INVALID, "kv_offsets");
    assert_buffers_refused(&plain, buffers.q_total = 1, ACR_INVALID, "q_total");
    assert_buffers_refused(&plain, buffers.kv_total = 1, ACR_INVALID, "kv_total");
    bench_free(&plain);
    acr_ctx *ctx = cpu_ctx(1);
    const acr_problem p = problem_of(text);
    acr_plan *plan = NULL;
    assert_fails(acr__plan_create_forced(&plan, ctx, &p, &probe_kernel_without_workspace), ACR_UNSUPPORTED, "packed");
    acr_ctx_destroy(ctx);
    acr__kernel probe = probe_kernel_without_workspace;
    probe.traits |= ACR__TRAIT_PACKED;
    bench b = bench_make(text, &probe);
    const int64_t most = INT32_MAX - 1024;
    assert_buffers_refused(&b, buffers.q_offsets = NULL, ACR_INVALID, "q_offsets");
    assert_buffers_refused(&b, buffers.kv_offsets = NULL, ACR_INVALID, "kv_offsets");
    assert_buffers_refused(&b, buffers.q_total = 0, ACR_INVALID, "q_total");
    assert_buffers_refused(&b, buffers.kv_total = -1, ACR_INVALID, "kv_total");
    assert_buffers_refused(&b, buffers.kv_total = most + 1, ACR_INVALID, "2147482623");
    assert_buffers_refused(&b, buffers.size = (uint32_t)offsetof(acr_buffers, q_offsets), ACR_INVALID, "q_offsets");
    assert_buffers_refused(&b, buffers.q_offsets = (const int32_t *)(const void *)((char *)b.t.q_offsets + 2),
                           ACR_ALIGNMENT, "q_offsets");
    assert_buffers_refused(&b, buffers.kv_offsets = (const int32_t *)b.t.o, ACR_OVERLAP, "kv_offsets");
    assert_buffers_refused(&b, buffers.q_offsets = (const int32_t *)(const void *)b.t.lse, ACR_OVERLAP, "q_offsets");
    /* How far o reaches is known from the total. */
    assert_buffers_refused(&b, (buffers.k = (char *)b.t.o + 64, buffers.q_total = 8), ACR_OVERLAP, "buffers.k");
    bench_free(&b);
}

static void scales_are_checked(void **state)
{
    (void)state;
    const float fine[6] = {1, 2, 3, 4, 5, 6};
    bench f16 = bench_make("b2:h6/3:s8:d16", &probe_kernel_without_workspace);
    assert_buffers_refused(&f16, buffers.q_scales = fine, ACR_INVALID, "q_scales");
    assert_buffers_refused(&f16, buffers.k_scales = fine, ACR_INVALID, "only e4m3");
    assert_buffers_refused(&f16, buffers.v_scales = fine, ACR_INVALID, "f16");
    bench_free(&f16);
    acr__kernel probe = probe_kernel_without_workspace;
    probe.dtype = ACR_E4M3;
    bench b = bench_make("e4m3:b2:h6/3:s8:d16:lse", &probe);
    acr_buffers given = b.t.buffers;
    given.q_scales = given.k_scales = given.v_scales = fine;
    assert_ok(bench_execute(&b, &given));
    assert_buffers_refused(&b, buffers.k_scales = (const float *)(const void *)((const char *)fine + 2), ACR_ALIGNMENT,
                           "k_scales");
    assert_buffers_refused(&b, buffers.q_scales = b.t.o, ACR_OVERLAP, "q_scales");
    assert_buffers_refused(&b, buffers.v_scales = b.t.lse + 2 * 6 * 8 - 1, ACR_OVERLAP, "v_scales");
    /* The last byte of the scales counts: two entries of three heads. */
    assert_buffers_refused(&b, buffers.k_scales = b.t.lse - 5, ACR_OVERLAP, "k_scales");
    const float bad[] = {0.0f, -1.0f, NAN, INFINITY};
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        const float scales[6] = {1, 2, 3, 4, bad[i], 6};
        assert_buffers_refused(&b, buffers.q_scales = scales, ACR_INVALID, "q_scales[1, 1]");
        assert_buffers_refused(&b, (buffers.q_scales = fine, buffers.k_scales = scales), ACR_INVALID, "k_scales[1, 1]");
        assert_buffers_refused(&b, buffers.v_scales = scales, ACR_INVALID, "positive and finite");
    }
    bench_free(&b);
}

/* What a term reads is wanted where the problem has the term, and only there. */
static void buffers_of_terms_are_checked(void **state)
{
    (void)state;
    const float numbers[4] = {1, 2, 3, 4};
    const int32_t places[8] = {0};
    const uint8_t bytes[64] = {0};
    bench plain = bench_make("b1:h2:s8:d16", &probe_kernel_without_workspace);
    assert_buffers_refused(&plain, buffers.kv_starts = places, ACR_INVALID, "kv_starts is given");
    assert_buffers_refused(&plain, buffers.sinks = numbers, ACR_INVALID, "sinks is given");
    assert_buffers_refused(&plain, buffers.slopes = numbers, ACR_INVALID, "slopes is given");
    assert_buffers_refused(&plain, buffers.bias = bytes, ACR_INVALID, "bias is given");
    assert_buffers_refused(&plain, buffers.ranges = places, ACR_INVALID, "ranges is given");
    assert_buffers_refused(&plain, buffers.tree = bytes, ACR_INVALID, "tree is given");
    assert_buffers_refused(&plain, buffers.page_table = places, ACR_INVALID, "page_table is given");
    assert_buffers_refused(&plain, buffers.pages = 1, ACR_INVALID, "pages is given");
    /* A caller of the version before: what its structure does not have is not read. */
    plain.t.buffers.size = (uint32_t)offsetof(acr_buffers, kv_starts);
    plain.t.buffers.sinks = numbers;
    assert_ok(bench_execute(&plain, &plain.t.buffers));
    bench_free(&plain);

    acr__kernel probe = probe_kernel_without_workspace;
    probe.terms = FWD_TERM_ALL;
    bench b = bench_make("b2:h2:s8:d16:lse:causal:sinks:alibi:kvstarts:ranges2:tree:bias-f16/0,0,8", &probe);
    b.t.buffers.kv_starts = places;
    b.t.buffers.sinks = b.t.buffers.slopes = numbers;
    b.t.buffers.bias = bytes;
    b.t.buffers.ranges = places;
    b.t.buffers.tree = bytes;
    assert_ok(bench_execute(&b, &b.t.buffers));
    assert_buffers_refused(&b, buffers.kv_starts = NULL, ACR_INVALID, "ACR_KV_STARTS");
    assert_buffers_refused(&b, buffers.sinks = NULL, ACR_INVALID, "ACR_SINKS");
    assert_buffers_refused(&b, buffers.slopes = NULL, ACR_INVALID, "ACR_ALIBI");
    assert_buffers_refused(&b, buffers.bias = NULL, ACR_INVALID, "bias_dtype");
    assert_buffers_refused(&b, buffers.ranges = NULL, ACR_INVALID, "ACR_RANGES");
    assert_buffers_refused(&b, buffers.tree = NULL, ACR_INVALID, "ACR_TREE");
    assert_buffers_refused(&b, buffers.sinks = (const float *)(const void *)((const char *)numbers + 2), ACR_ALIGNMENT,
                           "sinks");
    assert_buffers_refused(&b, buffers.bias = bytes + 1, ACR_ALIGNMENT, "bias");
    /* The last byte of each counts: two entries, two ranges and a tree of 8 rows in each, two heads, 64 elements. */
    const char *lse = (const char *)b.t.lse, *o = b.t.o;
    const int32_t *o_places = (const int32_t *)b.t.o;
    assert_buffers_refused(&b, buffers.kv_starts = (const int32_t *)(const void *)(lse - 4), ACR_OVERLAP, "kv_starts");
    assert_buffers_refused(&b, buffers.slopes = b.t.lse - 1, ACR_OVERLAP, "slopes");
    assert_buffers_refused(&b, buffers.sinks = b.t.lse + 2 * 2 * 8 - 1, ACR_OVERLAP, "sinks");
    assert_buffers_refused(&b, buffers.bias = o - 2 * 64 + 2, ACR_OVERLAP, "bias");
    assert_buffers_refused(&b, buffers.ranges = o_places - 7, ACR_OVERLAP, "ranges");
    assert_buffers_refused(&b, buffers.tree = (const uint8_t *)o - 15, ACR_OVERLAP, "tree");
    bench_free(&b);
}

static void misaligned_pointers_are_refused(void **state)
{
    (void)state;
    bench b = bench_make("b1:h2:s8:d16:lse:kvlens:align32", &probe_kernel_without_workspace);
    assert_buffers_refused(&b, buffers.q = (char *)b.t.q + 16, ACR_ALIGNMENT, "q");
    assert_buffers_refused(&b, buffers.k = (char *)b.t.k + 2, ACR_ALIGNMENT, "k");
    assert_buffers_refused(&b, buffers.v = (char *)b.t.v + 1, ACR_ALIGNMENT, "v");
    assert_buffers_refused(&b, buffers.o = (char *)b.t.o + 8, ACR_ALIGNMENT, "32");
    assert_buffers_refused(&b, buffers.lse = (float *)(void *)((char *)b.t.lse + 2), ACR_ALIGNMENT, "lse");
    assert_buffers_refused(&b, buffers.kv_lens = (const int32_t *)(const void *)((char *)b.t.kv_lens + 1),
                           ACR_ALIGNMENT, "kv_lens");
    bench_free(&b);
}

static void promised_alignment_is_enough(void **state)
{
    (void)state;
    /* 2 bytes promised, 2 bytes given: room for one element more before each tensor. */
    acr_problem p = problem_of("b1:h2:s8:d16:align2");
    tensors t = tensors_make(&p, 1);
    acr_ctx *ctx = cpu_ctx(1);
    acr_plan *plan = forced_plan(ctx, &p, &probe_kernel_without_workspace);
    char *wider = aligned_alloc(256, t.o_bytes + 256);
    assert_non_null(wider);
    memset(wider, 0, t.o_bytes + 256);
    t.buffers.o = wider + 2;
    assert_ok(acr_execute(plan, &t.buffers, NULL, 0, NULL));
    free(wider);
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
    tensors_free(&t);
}

static void overlapping_outputs_are_refused(void **state)
{
    (void)state;
    bench b = bench_make("b2:h2:s8:d16:lse:kvlens", &probe_kernel_without_workspace);
    assert_buffers_refused(&b, buffers.q = b.t.o, ACR_OVERLAP, "q");
    assert_buffers_refused(&b, buffers.k = b.t.o, ACR_OVERLAP, "k");
    assert_buffers_refused(&b, buffers.v = b.t.o, ACR_OVERLAP, "v");
    /* by the last and by the first 16 bytes */
    assert_buffers_refused(&b, buffers.q = (char *)b.t.o + b.t.o_bytes - 16, ACR_OVERLAP, "q");
    assert_buffers_refused(&b, buffers.k = (char *)b.t.o - b.t.k_bytes + 16, ACR_OVERLAP, "k");
    assert_buffers_refused(&b, buffers.lse = b.t.o, ACR_OVERLAP, "lse");
    assert_buffers_refused(&b, buffers.lse = (float *)(void *)((char *)b.t.o + b.t.o_bytes - 4), ACR_OVERLAP, "lse");
    assert_buffers_refused(&b, buffers.q = b.t.lse, ACR_OVERLAP, "lse");
    assert_buffers_refused(&b, buffers.kv_lens = (const int32_t *)b.t.o, ACR_OVERLAP, "kv_lens");
    assert_buffers_refused(&b, buffers.kv_lens = (const int32_t *)(const void *)(b.t.lse + 1), ACR_OVERLAP, "kv_lens");
    bench_free(&b);
}

static void neighbours_and_shared_inputs_are_no_overlap(void **state)
{
    (void)state;
    /* q, k and v are one tensor (self-attention without projections), and o follows them directly. */
    const acr_problem p = problem_of("b1:h2:s8:d16");
    acr_ctx *ctx = cpu_ctx(1);
    acr_plan *plan = forced_plan(ctx, &p, &probe_kernel_without_workspace);
    const size_t bytes = 2 * 8 * 16 * sizeof(uint16_t);
    char *memory = aligned_alloc(256, 2 * bytes);
    assert_non_null(memory);
    memset(memory, 0, 2 * bytes);
    acr_buffers buffers = ACR_BUFFERS_INIT;
    buffers.q = buffers.k = buffers.v = memory;
    buffers.o = memory + bytes;
    assert_ok(acr_execute(plan, &buffers, NULL, 0, NULL));
    buffers.q = buffers.k = buffers.v = memory + bytes;
    buffers.o = memory;
    assert_ok(acr_execute(plan, &buffers, NULL, 0, NULL));
    free(memory);
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
}

static void interleaved_tensors_are_no_overlap(void **state)
{
    (void)state;
    /* One buffer [batch, length, {q, k, v, o}, head, dim]: the spans cross, the elements do not. Shifted by one head
     * they do. */
    acr_problem p = problem_of("b2:h2:s8:d16");
    p.q = p.k = p.v = p.o = (acr_strides){8 * 4 * 32, 16, 4 * 32};
    acr_ctx *ctx = cpu_ctx(1);
    acr_plan *plan = forced_plan(ctx, &p, &probe_kernel_without_workspace);
    uint16_t *memory = aligned_alloc(256, 2 * 8 * 4 * 32 * sizeof *memory);
    assert_non_null(memory);
    memset(memory, 0, 2 * 8 * 4 * 32 * sizeof *memory);
    acr_buffers buffers = ACR_BUFFERS_INIT;
    buffers.q = memory;
    buffers.k = memory + 32;
    buffers.v = memory + 64;
    buffers.o = memory + 96;
    assert_ok(acr_execute(plan, &buffers, NULL, 0, NULL));
    buffers.v = memory + 80;
    assert_fails(acr_execute(plan, &buffers, NULL, 0, NULL), ACR_OVERLAP, "v");
    free(memory);
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
}

/* To the byte: inputs of one byte an element, outputs of two, in rows of 64 bytes. */
static void interleaving_is_judged_to_the_byte(void **state)
{
    (void)state;
    acr__kernel probe = probe_kernel_without_workspace;
    probe.dtype = ACR_E4M3;
    acr_problem p = problem_of("e4m3:b1:h1:s8:d15/8:align2");
    p.q = (acr_strides){8 * 64, 64, 64};
    p.o = (acr_strides){8 * 32, 32, 32};
    acr_ctx *ctx = cpu_ctx(1);
    acr_plan *plan = forced_plan(ctx, &p, &probe);
    char *memory = aligned_alloc(256, 4 * 1024);
    assert_non_null(memory);
    memset(memory, 0, 4 * 1024);
    acr_buffers buffers = ACR_BUFFERS_INIT;
    buffers.k = buffers.v = memory + 2048;
    const struct {
        int q, o;
        bool apart;
    } places[] = {{0, 16, true}, {0, 14, false}, {48, 0, true}, {50, 0, false},
                  {0, 48, true}, {0, 50, false}, {16, 0, true}, {14, 0, false}};
    for (size_t i = 0; i < COUNT_OF(places); i++) {
        buffers.q = memory + places[i].q;
        buffers.o = memory + places[i].o;
        if (places[i].apart)
            assert_ok(acr_execute(plan, &buffers, NULL, 0, NULL));
        else
            assert_fails(acr_execute(plan, &buffers, NULL, 0, NULL), ACR_OVERLAP, "buffers.q");
    }
    free(memory);
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
}

static void a_workspace_overlaps_nothing(void **state)
{
    (void)state;
    bench b = bench_make("b1:h2:s8:d16:lse", &probe_kernel);
    char *const workspace = b.workspace;
    assert_buffers_refused(&b, buffers.q = workspace, ACR_OVERLAP, "buffers.q overlaps the workspace");
    assert_buffers_refused(&b, buffers.k = workspace + 256, ACR_OVERLAP, "buffers.k overlaps the workspace");
    assert_buffers_refused(&b, buffers.v = workspace + b.workspace_bytes - 16, ACR_OVERLAP, "buffers.v");
    assert_buffers_refused(&b, buffers.lse = (float *)(void *)workspace, ACR_OVERLAP, "buffers.lse overlaps the work");
    assert_buffers_refused(&b, buffers.o = workspace, ACR_OVERLAP, "buffers.o overlaps the workspace");
    bench_free(&b);
}

static void workspaces_have_a_size_and_an_alignment(void **state)
{
    (void)state;
    bench b = bench_make("b1:h2:s8:d16", &probe_kernel);
    const size_t bytes = b.workspace_bytes;
    assert_int_equal(bytes, 2 * PROBE_SCRATCH_BYTES);
    char *wider = aligned_alloc(256, 2 * bytes + 256);
    assert_non_null(wider);
    const struct {
        void *workspace;
        size_t bytes;
        const char *fragment;
    } bad[] = {{NULL, bytes, "NULL"}, {NULL, 0, "NULL"},           {wider, bytes - 1, "bytes"},
               {wider, 0, "bytes"},   {wider + 128, bytes, "256"}, {wider + 1, bytes, "aligned"}};
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        tensors_poison_outputs(&b.t);
        assert_fails(acr_execute(b.plan, &b.t.buffers, bad[i].workspace, bad[i].bytes, NULL), ACR_WORKSPACE,
                     bad[i].fragment);
        assert_outputs_untouched(&b.t);
        assert_fails(acr_workspace_init(b.plan, bad[i].workspace, bad[i].bytes, NULL), ACR_WORKSPACE, bad[i].fragment);
    }
    /* exactly enough, and more than enough */
    assert_ok(acr_workspace_init(b.plan, wider, bytes, NULL));
    assert_ok(acr_execute(b.plan, &b.t.buffers, wider, bytes, NULL));
    assert_ok(acr_execute(b.plan, &b.t.buffers, wider, 2 * bytes, NULL));
    free(wider);
    bench_free(&b);
}

static void plans_without_workspace_accept_anything(void **state)
{
    (void)state;
    bench b = bench_make("b1:h2:s8:d16", &probe_kernel_without_workspace);
    assert_int_equal(b.workspace_bytes, 0);
    assert_ok(acr_workspace_init(b.plan, NULL, 0, NULL));
    assert_ok(acr_execute(b.plan, &b.t.buffers, NULL, 0, NULL));
    bench_free(&b);
}

/* ---- Executions: what happens -------------------------------------------------------------------------------------
 * */

/* Every element of o was visited exactly once. */
static void assert_visited_once(const tensors *t)
{
    const acr_problem *p = &t->problem;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->q_heads; h++)
            for (int64_t i = 0; i < p->q_len; i++)
                for (int64_t d = 0; d < p->v_dim; d++)
                    assert_true(o_at(t, b, h, i, d) == 1.0);
}

static void every_row_is_visited_once_by_any_number_of_threads(void **state)
{
    (void)state;
    const acr_problem p = problem_of("b3:h2:s37:d16");
    for (uint32_t threads = 1; threads <= 9; threads += 2) {
        acr_ctx *ctx = cpu_ctx(threads);
        tensors t = tensors_make(&p, 1);
        for (int round = 0; round < 50; round++) {
            memset(t.o, 0, t.o_bytes);
            probe_reset();
            execute_once(ctx, &probe_kernel, &t);
            assert_visited_once(&t);
            const probe_record record = probe_read();
            assert_int_equal(record.scratch_faults, 0);
            assert_in_range(record.runs, 1, threads);
            assert_int_equal(record.lanes_max <= (int)threads, 1);
        }
        tensors_free(&t);
        acr_ctx_destroy(ctx);
    }
}

static void no_more_lanes_than_tiles(void **state)
{
    (void)state;
    const acr_problem p = problem_of("b1:h1:s5:d16"); /* two tiles */
    acr_ctx *ctx = cpu_ctx(8);
    tensors t = tensors_make(&p, 1);
    memset(t.o, 0, t.o_bytes);
    probe_reset();
    execute_once(ctx, &probe_kernel, &t);
    assert_visited_once(&t);
    assert_in_range(probe_read().lanes_max, 1, 2);
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

/* A pool that was not given back would leave every later call to one thread. */
static void every_call_has_the_pool(void **state)
{
    (void)state;
    const acr_problem p = problem_of("b1:h8:s40:d16");
    acr_ctx *ctx = cpu_ctx(4);
    tensors t = tensors_make(&p, 1);
    for (int call = 0; call < 3; call++) {
        memset(t.o, 0, t.o_bytes);
        probe_reset();
        execute_once(ctx, &probe_kernel, &t);
        assert_int_equal(probe_read().lanes_max, 4);
    }
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

/* The child of a fork has none of the pool's threads: it computes alone, and destroying waits for nobody. */
static void a_context_works_in_a_child_process(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(4);
    const acr_problem p = problem_of("f32:b2:h4:s200:d64");
    tensors t = tensors_make(&p, 1);
    assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(60); /* against a hang alone */
        void *expected = malloc(t.o_bytes);
        memcpy(expected, t.o, t.o_bytes);
        tensors_poison_outputs(&t);
        bool passed = acr_forward(ctx, &p, &t.buffers, NULL) == ACR_OK && memcmp(expected, t.o, t.o_bytes) == 0;
        acr_ctx_destroy(ctx);
        _exit(passed ? 0 : 1);
    }
    int result = -1;
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_int_equal(result, 0);
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

/* A caller's own parallel_for. */
typedef struct own_pool {
    int calls;
    size_t count_max;
    bool backwards, in_threads;
} own_pool;

typedef struct own_call {
    acr_task task;
    void *task_arg;
    size_t index;
} own_call;

static void *own_thread(void *arg)
{
    const own_call *call = arg;
    call->task(call->task_arg, call->index);
    return NULL;
}

static void run_in_threads(size_t count, acr_task task, void *task_arg)
{
    pthread_t threads[64];
    own_call calls[64];
    assert_true(count <= COUNT_OF(threads));
    for (size_t i = 0; i < count; i++) {
        calls[i] = (own_call){task, task_arg, i};
        assert_int_equal(pthread_create(&threads[i], NULL, own_thread, &calls[i]), 0);
    }
    for (size_t i = 0; i < count; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
}

static void own_parallel_for(void *user, size_t count, acr_task task, void *task_arg)
{
    own_pool *pool = user;
    pool->calls++;
    pool->count_max = count > pool->count_max ? count : pool->count_max;
    if (pool->in_threads)
        run_in_threads(count, task, task_arg);
    else
        for (size_t i = 0; i < count; i++)
            task(task_arg, pool->backwards ? count - 1 - i : i);
}

static void the_callers_parallel_for_is_used(void **state)
{
    (void)state;
    own_pool pools[] = {{.backwards = false}, {.backwards = true}, {.in_threads = true}};
    const acr_problem p = problem_of("b2:h3:s21:d16");
    tensors t = tensors_make(&p, 1);
    for (size_t i = 0; i < COUNT_OF(pools); i++) {
        acr_ctx_options options = cpu_options(5);
        options.parallel_for = own_parallel_for;
        options.parallel_user = &pools[i];
        acr_ctx *ctx = NULL;
        assert_ok(acr_ctx_create(&ctx, &options));
        memset(t.o, 0, t.o_bytes);
        probe_reset();
        execute_once(ctx, &probe_kernel, &t);
        assert_visited_once(&t);
        assert_int_equal(probe_read().scratch_faults, 0);
        assert_int_equal(pools[i].calls, 1);
        assert_in_range(pools[i].count_max, 2, 5);
        acr_ctx_destroy(ctx);
    }
    tensors_free(&t);
}

static void a_thousand_threads_need_the_callers_pool_only(void **state)
{
    (void)state;
    own_pool pool = {0};
    acr_ctx_options options = cpu_options(1024);
    options.parallel_for = own_parallel_for;
    options.parallel_user = &pool;
    acr_ctx *ctx = NULL;
    assert_ok(acr_ctx_create(&ctx, &options));
    acr_ctx_destroy(ctx);
    assert_int_equal(pool.calls, 0);
}

/* Several threads execute one plan at once, each with its own workspace and output. */
typedef struct executor {
    pthread_t thread;
    const acr_plan *plan;
    tensors t;
    void *workspace;
    bool passed;
} executor;

static void *execute_often(void *arg)
{
    executor *e = arg;
    e->passed = true;
    for (int round = 0; round < 200 && e->passed; round++) {
        memset(e->t.o, 0, e->t.o_bytes);
        e->passed = acr_execute(e->plan, &e->t.buffers, e->workspace, acr_plan_workspace(e->plan), NULL) == ACR_OK;
        for (int64_t i = 0; i < (int64_t)(e->t.o_bytes / 2) && e->passed; i++)
            e->passed = acr__load_element(ACR_F16, e->t.o, i) == 1.0;
    }
    return NULL;
}

static void threads_share_a_plan(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    const acr_problem p = problem_of("b1:h3:s37:d16");
    acr_plan *plan = forced_plan(ctx, &p, &probe_kernel);
    executor executors[4];
    probe_reset();
    for (size_t i = 0; i < COUNT_OF(executors); i++) {
        executors[i] = (executor){.plan = plan, .t = tensors_make(&p, i)};
        executors[i].workspace = aligned_alloc(256, acr_plan_workspace(plan));
        assert_non_null(executors[i].workspace);
        assert_ok(acr_workspace_init(plan, executors[i].workspace, acr_plan_workspace(plan), NULL));
    }
    for (size_t i = 0; i < COUNT_OF(executors); i++)
        assert_int_equal(pthread_create(&executors[i].thread, NULL, execute_often, &executors[i]), 0);
    for (size_t i = 0; i < COUNT_OF(executors); i++) {
        assert_int_equal(pthread_join(executors[i].thread, NULL), 0);
        assert_true(executors[i].passed);
        free(executors[i].workspace);
        tensors_free(&executors[i].t);
    }
    assert_int_equal(probe_read().scratch_faults, 0);
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
}

/* ---- One call -----------------------------------------------------------------------------------------------------
 * */

static void forward_refuses_what_plan_and_execute_refuse(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr_problem p = problem_of("b1:h2:s8:d16");
    tensors t = tensors_make(&p, 1);
    assert_fails(acr_forward(NULL, &p, &t.buffers, NULL), ACR_INVALID, "ctx");
    assert_fails(acr_forward(ctx, NULL, &t.buffers, NULL), ACR_INVALID, "problem");
    assert_fails(acr_forward(ctx, &p, NULL, NULL), ACR_INVALID, "buffers");
    acr_buffers buffers = t.buffers;
    buffers.v = NULL;
    assert_fails(acr_forward(ctx, &p, &buffers, NULL), ACR_INVALID, "v");
    buffers = t.buffers;
    buffers.q = (char *)t.q + 2;
    assert_fails(acr_forward(ctx, &p, &buffers, NULL), ACR_ALIGNMENT, "q");
    buffers = t.buffers;
    buffers.k = t.o;
    assert_fails(acr_forward(ctx, &p, &buffers, NULL), ACR_OVERLAP, "k");
    const acr_problem wide = problem_of("b1:h2:s8:d100000");
    assert_fails(acr_forward(ctx, &wide, &t.buffers, NULL), ACR_UNSUPPORTED, "qk_dim");
    p.kv_heads = 7;
    assert_fails(acr_forward(ctx, &p, &t.buffers, NULL), ACR_INVALID, "kv_heads");
    assert_outputs_untouched(&t);
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

/* The largest distance from the judge's answer. */
static double distance_from_oracle(const tensors *t)
{
    const acr_problem *p = &t->problem;
    const int64_t rows = p->batch * p->q_heads * p->q_len;
    double *expected = malloc((size_t)(rows * p->v_dim) * sizeof *expected);
    assert_non_null(expected);
    assert_ok(oracle_forward(p, &t->buffers, NULL, rows, expected, NULL));
    double worst = 0.0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < p->v_dim; d++) {
            const int64_t head = row / p->q_len;
            const double difference =
                fabs(o_at(t, head / p->q_heads, head % p->q_heads, row % p->q_len, d) - expected[row * p->v_dim + d]);
            worst = !(difference <= worst) ? difference : worst;
        }
    free(expected);
    return worst;
}

static void forward_computes_attention(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    const char *texts[] = {"b1:h2:s40:d64", "f32:b2:h4/2:s33/57:d40/24:causal", "bf16:b1:h2:s40:d64:bshd:lse"};
    for (int round = 0; round < 3; round++) /* the second and third time from the cache */
        for (size_t i = 0; i < COUNT_OF(texts); i++) {
            const acr_problem p = problem_of(texts[i]);
            tensors t = tensors_make(&p, (uint64_t)round);
            assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
            assert_true(distance_from_oracle(&t) < 0.02);
            tensors_free(&t);
        }
    acr_ctx_destroy(ctx);
}

static void forward_keeps_problems_apart(void **state)
{
    (void)state;
    /* Two problems with one text: the scale differs, and with it the result. */
    acr_ctx *ctx = cpu_ctx(1);
    acr_problem p = problem_of("f32:b1:h1:s16:d32");
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 4; i++) {
            p.scale = 0.05f * (float)(1 + 3 * i);
            tensors t = tensors_make(&p, 5);
            assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
            assert_true(distance_from_oracle(&t) < 1e-4);
            tensors_free(&t);
        }
    acr_ctx_destroy(ctx);
}

static void forget_drops_the_cached_plans(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    const acr_problem p = problem_of("f32:b1:h2:s40:d64");
    tensors t = tensors_make(&p, 3);
    for (int round = 0; round < 3; round++) {
        tensors_poison_outputs(&t);
        assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
        assert_true(distance_from_oracle(&t) < 1e-4);
        acr_wisdom_forget(ctx);
    }
    acr_wisdom_forget(NULL);
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

/* One thread, one stream: its own stand-in for a stream handle, which the cpu backend ignores but acr_forward keys
 * workspaces by. */
typedef struct forwarder {
    pthread_t thread;
    acr_ctx *ctx;
    int stream;
    bool passed;
} forwarder;

static void *forward_often(void *arg)
{
    forwarder *f = arg;
    const acr_problem p = problem_of("f32:b1:h2:s24:d32");
    tensors t = tensors_make(&p, (uint64_t)f->stream);
    f->passed = true;
    for (int round = 0; round < 100 && f->passed; round++) {
        tensors_poison_outputs(&t);
        f->passed = acr_forward(f->ctx, &p, &t.buffers, &f->stream) == ACR_OK && distance_from_oracle(&t) < 1e-4;
    }
    tensors_free(&t);
    return NULL;
}

static void threads_share_a_context(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    forwarder forwarders[4];
    for (size_t i = 0; i < COUNT_OF(forwarders); i++) {
        forwarders[i] = (forwarder){.ctx = ctx, .stream = (int)i};
        assert_int_equal(pthread_create(&forwarders[i].thread, NULL, forward_often, &forwarders[i]), 0);
    }
    for (size_t i = 0; i < COUNT_OF(forwarders); i++) {
        assert_int_equal(pthread_join(forwarders[i].thread, NULL), 0);
        assert_true(forwarders[i].passed);
    }
    acr_ctx_destroy(ctx);
}

static void forgetting_may_happen_while_others_execute(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    forwarder forwarders[3];
    for (size_t i = 0; i < COUNT_OF(forwarders); i++) {
        forwarders[i] = (forwarder){.ctx = ctx, .stream = (int)i};
        assert_int_equal(pthread_create(&forwarders[i].thread, NULL, forward_often, &forwarders[i]), 0);
    }
    for (int round = 0; round < 300; round++) {
        acr_wisdom_forget(ctx);
        sched_yield();
    }
    for (size_t i = 0; i < COUNT_OF(forwarders); i++) {
        assert_int_equal(pthread_join(forwarders[i].thread, NULL), 0);
        assert_true(forwarders[i].passed);
    }
    acr_ctx_destroy(ctx);
}

/* A cpu backend that says every stream is being captured, as a cuda stream may be. */
static acr_status always_capturing(acr__backend_device *device, void *stream, int *out)
{
    (void)device;
    (void)stream;
    *out = 1;
    return ACR_OK;
}

static void forward_makes_no_workspace_while_capturing(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr__backend_device *device = acr__ctx_backend_device(ctx);
    acr__backend capturing = *device->backend;
    capturing.is_capturing = always_capturing;
    const acr_problem p = problem_of("f32:b1:h2:s40:d64");
    acr_plan *plan = estimate_plan(ctx, "f32:b1:h2:s40:d64");
    assert_true(acr_plan_workspace(plan) > 0); /* else there would be nothing to refuse */
    acr_plan_destroy(plan);

    tensors t = tensors_make(&p, 6);
    int one_stream, other_stream;
    const acr__backend *const original = device->backend;
    device->backend = &capturing;
    assert_fails(acr_forward(ctx, &p, &t.buffers, &one_stream), ACR_WORKSPACE, "captured");
    assert_outputs_untouched(&t);
    device->backend = original;
    assert_ok(acr_forward(ctx, &p, &t.buffers, &one_stream)); /* "call it once before capturing" */
    device->backend = &capturing;
    assert_ok(acr_forward(ctx, &p, &t.buffers, &one_stream));
    assert_fails(acr_forward(ctx, &p, &t.buffers, &other_stream), ACR_WORKSPACE, "captured"); /* a workspace for each */
    device->backend = original;
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

static acr_problem problem_of_length(int64_t kv_len)
{
    acr_problem p = ACR_PROBLEM_INIT;
    p.dtype = ACR_F32;
    p.batch = p.q_heads = p.q_len = 1;
    p.kv_len = kv_len;
    p.qk_dim = 16;
    p.alignment = 4;
    p.flags = ACR_KV_LENS;
    p.k = p.v = (acr_strides){0, 16, 0}; /* every key is the same one */
    return p;
}

/* Of the entry's keys one alone exists, so that a call takes next to no time. */
static acr_status forward_of_length(acr_ctx *ctx, int64_t kv_len, void *stream)
{
    static float q[16], k[16], v[16], o[16];
    static const int32_t one[1] = {1};
    const acr_problem p = problem_of_length(kv_len);
    acr_buffers b = ACR_BUFFERS_INIT;
    b.q = q;
    b.k = k;
    b.v = v;
    b.o = o;
    b.kv_lens = one;
    return acr_forward(ctx, &p, &b, stream);
}

static size_t allocated_bytes(void)
{
    return mallinfo2().uordblks + mallinfo2().hblkhd;
}

/* As a decoder without key lengths would call it: every length is a problem of its own. A plan of more keys may have a
 * larger workspace, and so many plans are kept. */
static void growing_lengths_need_constant_memory(void **state)
{
    (void)state;
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    enum {
        LENGTHS = 5000
    };
#else
    enum {
        LENGTHS = 100000
    };
#endif
    enum {
        PLANS_KEPT = 1024
    };
    acr_ctx *ctx = cpu_ctx(1);
    const acr_problem longest = problem_of_length(LENGTHS);
    acr_plan *plan = NULL;
    assert_ok(acr_plan_create(&plan, ctx, &longest, ACR_ESTIMATE));
    const size_t workspace_bytes = acr_plan_workspace(plan);
    acr_plan_destroy(plan);
    size_t full = 0;
    for (int64_t length = 1; length <= LENGTHS; length++) {
        assert_ok(forward_of_length(ctx, length, NULL));
        if (length == 2000)
            full = allocated_bytes();
    }
    assert_true(allocated_bytes() <= full + PLANS_KEPT * workspace_bytes);
    acr_ctx_destroy(ctx);
}

/* Nor do streams that come and go. */
static void many_streams_need_constant_memory(void **state)
{
    (void)state;
    static char streams[4000];
    acr_ctx *ctx = cpu_ctx(1);
    size_t full = 0;
    for (size_t i = 0; i < sizeof streams; i++) {
        assert_ok(forward_of_length(ctx, 1, &streams[i]));
        if (i == 1000)
            full = allocated_bytes();
    }
    assert_true(allocated_bytes() <= full + 4096);
    acr_ctx_destroy(ctx);
}

/* A graph holds on to the workspace of what was captured. */
static void captured_plans_are_kept(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr__backend_device *device = acr__ctx_backend_device(ctx);
    const acr__backend *const original = device->backend;
    acr__backend capturing = *original;
    capturing.is_capturing = always_capturing;
    assert_ok(forward_of_length(ctx, 1, NULL));
    assert_ok(forward_of_length(ctx, 2, NULL));
    device->backend = &capturing;
    assert_ok(forward_of_length(ctx, 1, NULL));
    device->backend = original;
    for (int64_t length = 3; length <= 3000; length++)
        assert_ok(forward_of_length(ctx, length, NULL));
    device->backend = &capturing;
    assert_ok(forward_of_length(ctx, 1, NULL));
    assert_fails(forward_of_length(ctx, 2, NULL), ACR_WORKSPACE, "captured"); /* which was dropped */
    device->backend = original;
    acr_ctx_destroy(ctx);
}

static void extreme_lengths_are_clamped(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    const acr_problem p = problem_of("f32:b4:h1:s8:d16:lse:kvlens");
    tensors t = tensors_make(&p, 4);
    t.kv_lens[0] = INT32_MAX;
    t.kv_lens[1] = INT32_MIN;
    t.kv_lens[2] = 0;
    t.kv_lens[3] = 9;
    assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
    assert_true(isfinite(lse_at(&t, 0, 0, 0)) && isfinite(lse_at(&t, 3, 0, 7)));
    for (int64_t b = 1; b <= 2; b++)
        for (int64_t i = 0; i < 8; i++) {
            assert_true(lse_at(&t, b, 0, i) == -INFINITY);
            for (int64_t d = 0; d < 16; d++)
                assert_true(o_at(&t, b, 0, i, d) == 0.0);
        }
    assert_true(distance_from_oracle(&t) < 1e-4);
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

/* Whatever the offsets hold, nothing outside the tensors is touched: their allocations end where they do, which the
 * address sanitizer watches. */
static void garbage_offsets_stay_inside(void **state)
{
    (void)state;
    static const int32_t garbage[][5] = {{INT32_MIN, INT32_MAX, 0, -1, 7},
                                         {9, 7, 5, 3, 1},
                                         {INT32_MAX, INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN},
                                         {0, 1000000, 2000000, 3000000, 4000000},
                                         {-5, -4, -3, -2, -1}};
    acr_ctx *ctx = cpu_ctx(2);
    const char *texts[] = {"f32:b4:h2:s40/50:d16:bshd:packed:lse", "f16:b4:h4/2:s40/50:d16:causal:bshd:packed:lse"};
    for (size_t n = 0; n < COUNT_OF(texts); n++)
        for (size_t i = 0; i < COUNT_OF(garbage); i++)
            for (size_t j = 0; j < COUNT_OF(garbage); j++) {
                const acr_problem p = problem_of(texts[n]);
                tensors t = tensors_make(&p, 5);
                memcpy(t.q_offsets, garbage[i], sizeof garbage[i]);
                memcpy(t.kv_offsets, garbage[j], sizeof garbage[j]);
                assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
                tensors_free(&t);
            }
    acr_ctx_destroy(ctx);
}

/* Sequences one by one, as problems of their own, give the same. */
static void packed_batches_equal_their_sequences(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    const acr_problem p = problem_of("f32:b6:h4/2:s40/50:d16/24:causal:bshd:packed:lse");
    tensors t = tensors_make(&p, 6);
    assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
    for (int b = 0; b < 6; b++) {
        acr_problem alone = problem_of("f32:b1:h4/2:s40/50:d16/24:causal:bshd:lse");
        alone.q_len = t.q_offsets[b + 1] - t.q_offsets[b];
        alone.kv_len = t.kv_offsets[b + 1] - t.kv_offsets[b];
        if (alone.q_len == 0 || alone.kv_len == 0)
            continue;
        float o[40 * 4 * 24], lse[4 * 40];
        acr_buffers buffers = ACR_BUFFERS_INIT;
        buffers.q = (const float *)t.q + t.q_offsets[b] * t.problem.q.row;
        buffers.k = (const float *)t.k + t.kv_offsets[b] * t.problem.k.row;
        buffers.v = (const float *)t.v + t.kv_offsets[b] * t.problem.v.row;
        buffers.o = o;
        buffers.lse = lse;
        alone.alignment = 4;
        assert_ok(acr_forward(ctx, &alone, &buffers, NULL));
        for (int64_t i = 0; i < alone.q_len * 4 * 24; i++)
            assert_true(fabs(o[i] - ((const float *)t.o)[t.q_offsets[b] * t.problem.o.row + i]) < 1e-5);
        for (int64_t i = 0; i < 4 * alone.q_len; i++) {
            const int64_t head = i / alone.q_len, at = head * t.buffers.q_total + t.q_offsets[b] + i % alone.q_len;
            assert_true(lse[i] == t.lse[at] || fabs(lse[i] - t.lse[at]) < 1e-5);
        }
    }
    for (int64_t i = 0; i < ROWS_AROUND * t.problem.o.row; i++) /* rows of no sequence are left alone */
        assert_true(isnan(((const float *)t.o)[i]));
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

/* A problem of e4m3 inputs, whole or packed, with scales of heads gives what its entries and heads give one by one,
 * with the same numbers as the problem's scales. */
static void assert_scales_are_of_the_head(acr_ctx *ctx, const char *text, const char *alone_text)
{
    const acr_problem p = problem_of(text);
    tensors t = tensors_make(&p, 8);
    const acr_problem *c = &t.problem;
    float scales[3][3 * 2];
    for (int i = 0; i < 3 * 6; i++)
        scales[i / 6][i % 6] = ldexpf(1.0f, (7 * i + i / 5) % 6 - 3);
    acr_buffers with = t.buffers;
    with.q_scales = scales[0];
    with.k_scales = scales[1];
    with.v_scales = scales[2];
    assert_ok(acr_forward(ctx, &p, &with, NULL));
    for (int i = 0; i < 6; i++) {
        const int64_t b = i / 2, kv_head = i % 2;
        acr_problem alone = problem_of(alone_text); /* of the two query heads that read one key/value head */
        int64_t q_first = 0, kv_first = 0;
        if (t.q_offsets) {
            q_first = t.q_offsets[b];
            kv_first = t.kv_offsets[b];
            alone.q_len = t.q_offsets[b + 1] - q_first;
            alone.kv_len = t.kv_offsets[b + 1] - kv_first;
            if (alone.q_len == 0 || alone.kv_len == 0)
                continue;
        }
        alone.q = c->q;
        alone.k = c->k;
        alone.v = c->v;
        alone.alignment = 2;
        alone.q_scale = scales[0][i];
        alone.k_scale = scales[1][i];
        alone.v_scale = scales[2][i];
        uint16_t o[2 * 40 * 24];
        acr_buffers buffers = ACR_BUFFERS_INIT;
        buffers.q = (const char *)t.q + element_of(&c->q, b, 2 * kv_head, q_first, 0);
        buffers.k = (const char *)t.k + element_of(&c->k, b, kv_head, kv_first, 0);
        buffers.v = (const char *)t.v + element_of(&c->v, b, kv_head, kv_first, 0);
        buffers.o = o;
        assert_ok(acr_forward(ctx, &alone, &buffers, NULL));
        for (int64_t h = 0; h < 2; h++)
            for (int64_t row = 0; row < alone.q_len; row++)
                for (int64_t d = 0; d < 24; d++) {
                    const double got = o_at(&t, b, 2 * kv_head + h, q_first + row, d);
                    const double expected = acr__load_element(ACR_F16, o, (h * alone.q_len + row) * 24 + d);
                    assert_true(fabs(got - expected) <= 2e-3 * (double)scales[2][i]);
                }
    }
    tensors_free(&t);
}

static void scales_are_of_the_batch_entry_and_head(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    assert_scales_are_of_the_head(ctx, "e4m3:b3:h4/2:s40/50:d16/24:causal", "e4m3:b1:h2/1:s40/50:d16/24:causal");
    assert_scales_are_of_the_head(ctx, "e4m3:b3:h4/2:s40/50:d16/24:causal:bshd:packed",
                                  "e4m3:b1:h2/1:s40/50:d16/24:causal");
    acr_ctx_destroy(ctx);
}

/* Products that no float holds: the weights are all equal, or all of them the largest score's. */
static void scales_may_have_any_product(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    const acr_problem p = problem_of("e4m3:b1:h1:s8/40:d16");
    tensors t = tensors_make(&p, 9);
    const float sizes[] = {1e-38f, 1e-30f, 1e30f, 3e38f};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        t.buffers.q_scales = t.buffers.k_scales = &sizes[i];
        assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
        double mean = 0;
        for (int64_t key = 0; key < 40; key++)
            mean += acr__load_element(ACR_E4M3, t.v, key * 16) / 40;
        for (int64_t row = 0; row < 8; row++) {
            const double o = o_at(&t, 0, 0, row, 0);
            assert_true(isfinite(o) && (sizes[i] > 1.0f || fabs(o - mean) < 1e-3));
        }
    }
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_options_are_refused),
        cmocka_unit_test(contexts_describe_themselves),
        cmocka_unit_test(default_context_opens_something),
        cmocka_unit_test(destroying_null_does_nothing),
        cmocka_unit_test(null_has_no_description),
        cmocka_unit_test(every_thread_count_opens),
        cmocka_unit_test(bad_plan_arguments_are_refused),
        cmocka_unit_test(forced_plans_say_why_not),
        cmocka_unit_test(a_plan_outlives_its_context),
        cmocka_unit_test(plan_text_is_one_line_that_names_problem_kernel_and_reason),
        cmocka_unit_test(null_pointers_are_refused),
        cmocka_unit_test(outputs_and_lengths_nobody_asked_for_are_refused),
        cmocka_unit_test(buffers_have_a_size_and_known_flags),
        cmocka_unit_test(buffers_of_earlier_versions_are_accepted),
        cmocka_unit_test(offsets_are_checked),
        cmocka_unit_test(scales_are_checked),
        cmocka_unit_test(buffers_of_terms_are_checked),
        cmocka_unit_test(misaligned_pointers_are_refused),
        cmocka_unit_test(promised_alignment_is_enough),
        cmocka_unit_test(overlapping_outputs_are_refused),
        cmocka_unit_test(neighbours_and_shared_inputs_are_no_overlap),
        cmocka_unit_test(interleaved_tensors_are_no_overlap),
        cmocka_unit_test(interleaving_is_judged_to_the_byte),
        cmocka_unit_test(a_workspace_overlaps_nothing),
        cmocka_unit_test(workspaces_have_a_size_and_an_alignment),
        cmocka_unit_test(plans_without_workspace_accept_anything),
        cmocka_unit_test(every_row_is_visited_once_by_any_number_of_threads),
        cmocka_unit_test(no_more_lanes_than_tiles),
        cmocka_unit_test(every_call_has_the_pool),
        cmocka_unit_test(a_context_works_in_a_child_process),
        cmocka_unit_test(the_callers_parallel_for_is_used),
        cmocka_unit_test(a_thousand_threads_need_the_callers_pool_only),
        cmocka_unit_test(threads_share_a_plan),
        cmocka_unit_test(forward_refuses_what_plan_and_execute_refuse),
        cmocka_unit_test(forward_computes_attention),
        cmocka_unit_test(forward_keeps_problems_apart),
        cmocka_unit_test(forget_drops_the_cached_plans),
        cmocka_unit_test(threads_share_a_context),
        cmocka_unit_test(forgetting_may_happen_while_others_execute),
        cmocka_unit_test(forward_makes_no_workspace_while_capturing),
        cmocka_unit_test(growing_lengths_need_constant_memory),
        cmocka_unit_test(many_streams_need_constant_memory),
        cmocka_unit_test(captured_plans_are_kept),
        cmocka_unit_test(extreme_lengths_are_clamped),
        cmocka_unit_test(garbage_offsets_stay_inside),
        cmocka_unit_test(packed_batches_equal_their_sequences),
        cmocka_unit_test(scales_are_of_the_batch_entry_and_head),
        cmocka_unit_test(scales_may_have_any_product),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
