/* A kernel being timed, on the cpu backend: an honest one is right in every mode, and those that cheat only when they
 * are timed, and so pass the gate, are caught in the timed loop. The same cheats on a GPU: gpu_controls.c. */
#include "support.h"

#include <math.h>
#include <stdatomic.h>

#include "bench/timed_kernel.h"
#include "bench/timer.h"

/* ---- Kernels: attention over one batch entry and head in float32, honest or not ---- */

typedef enum cheat {
    HONEST,
    CACHES,       /* keeps its output by the output's address, and hands it out again */
    RETURNS,      /* from some launch on returns at once */
    SKIPS,        /* leaves out one launch in `period` */
    PASSES_ALONG, /* when the keys and queries are the last launch's, copies the output of the last launch */
    CHEATS
} cheat;

static cheat present;
static long period = 2;
static long launches;

enum {
    LEN = 16,
    DIM = 8,
    HONEST_LAUNCHES = 12 /* longer than the gate looks */
};

static const char *why_not(const acr_problem *p, const acr__device *device)
{
    (void)device;
    return p->batch * p->q_heads == 1 && p->q_len == LEN && p->kv_len == LEN && p->qk_dim == DIM && p->v_dim == DIM
               ? NULL
               : "only the test's problem";
}

static double cost(const acr_problem *p, const acr__device *device)
{
    (void)p, (void)device;
    return 1e-6;
}

static void attend(const fwd_args *a, float o[LEN * DIM])
{
    const float *q = a->q, *k = a->k, *v = a->v;
    for (int i = 0; i < LEN; i++) {
        float scores[LEN], top = -INFINITY, sum = 0;
        for (int j = 0; j < LEN; j++) {
            scores[j] = 0;
            for (int d = 0; d < DIM; d++)
                scores[j] += q[i * DIM + d] * k[j * DIM + d];
            scores[j] *= a->scale;
            top = fmaxf(top, scores[j]);
        }
        for (int j = 0; j < LEN; j++)
            sum += scores[j] = expf(scores[j] - top);
        for (int d = 0; d < DIM; d++) {
            float out = 0;
            for (int j = 0; j < LEN; j++)
                out += scores[j] / sum * v[j * DIM + d];
            o[i * DIM + d] = out;
        }
    }
}

static void run(const fwd_args *a, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    static float kept[LEN * DIM], kept_q[LEN * DIM];
    static const void *kept_for;
    (void)lanes, (void)queue, (void)scratch;
    if (lane != 0)
        return;
    const long launch = launches++;
    if (present == RETURNS && launch > HONEST_LAUNCHES)
        return;
    if (present == SKIPS && launch > HONEST_LAUNCHES && launch % period == 1)
        return;
    const bool known = present == CACHES         ? kept_for == a->o
                       : present == PASSES_ALONG ? memcmp(kept_q, a->q, sizeof kept_q) == 0
                                                 : false;
    if (known && launch > HONEST_LAUNCHES) {
        memcpy(a->o, kept, sizeof kept);
        return;
    }
    attend(a, kept);
    memcpy(a->o, kept, sizeof kept);
    memcpy(kept_q, a->q, sizeof kept_q);
    kept_for = a->o;
}

static const acr__kernel kernel = {
    .name = "test_subject_f32",
    .family = "test_subject",
    .backend = ACR__CPU,
    .dtype = ACR_F32,
    .qk_dim_max = DIM,
    .v_dim_max = DIM,
    .q_tile = LEN,
    .kv_tile = LEN,
    .why_not = why_not,
    .cost = cost,
    .run = run,
};

/* ---- Timing them ---- */

typedef struct world {
    acr_ctx *ctx;
    acr_problem problem;
    reference *ref;
} world;

static int make_world(void **state)
{
    static world w;
    w.ctx = cpu_ctx(1);
    acr__ctx_backend_device(w.ctx)->device.l2_bytes = 1 << 20; /* little to empty in cold mode */
    w.problem = canonical_of("f32:b1:h1:s16:d8");
    const reference_request wanted = {.problem = &w.problem,
                                      .seed = 1,
                                      .sampled_rows = REFERENCE_SAMPLED_ROWS,
                                      .lengths = LENGTHS_FULL,
                                      .threads = 1};
    assert_ok(reference_create(&w.ref, &wanted));
    *state = &w;
    return 0;
}

static int end_world(void **state)
{
    world *w = *state;
    reference_destroy(w->ref);
    acr_ctx_destroy(w->ctx);
    return 0;
}

/* Passes the gate, as whoever is timed has, then times; what the timed loop found. */
static verdict time_it(const world *w, cheat how, bench_mode mode)
{
    static const timer_limits limits = {1e-3, 5e-3, 64, 64};
    present = how;
    launches = 0;
    verdict gate, found;
    assert_ok(conformance_check(&gate, w->ctx, &kernel, &w->problem, w->ref));
    if (!gate.pass)
        fail_msg("the gate caught it already: %s", gate.failure);
    const timed_kernel_request wanted = {
        .ctx = w->ctx, .kernel = &kernel, .problem = &w->problem, .ref = w->ref, .mode = mode, .seed = 1};
    timed_kernel *s = NULL;
    assert_ok(timed_kernel_create(&s, &wanted));
    timing t;
    watch unwatched = {.monitor = NULL};
    assert_ok(timer_series(&t, timed_kernel_sample, s, &limits, &unwatched));
    assert_int_equal(t.stats.count, 64);
    assert_int_equal(t.discarded, 0);
    assert_true(t.stats.p50 > 0);
    assert_ok(timed_kernel_judge(s, &found));
    timed_kernel_destroy(s);
    return found;
}

static const bench_mode modes[] = {MODE_STREAM, MODE_COLD, MODE_CALL, MODE_CALL_SINGLE};

static void an_honest_kernel_is_right_in_every_mode(void **state)
{
    for (size_t i = 0; i < COUNT_OF(modes); i++) {
        const verdict v = time_it(*state, HONEST, modes[i]);
        if (!v.pass)
            fail_msg("%s: %s", mode_name(modes[i]), v.failure);
        assert_true(v.err_max <= v.tol_max);
    }
}

static void check_is_caught(const world *w, cheat how)
{
    for (size_t i = 0; i < COUNT_OF(modes); i++)
        if (time_it(w, how, modes[i]).pass)
            fail_msg("cheat %d is not caught in %s mode; period %ld", (int)how, mode_name(modes[i]), period);
}

static void a_kept_output_is_caught(void **state)
{
    check_is_caught(*state, CACHES);
}

static void returning_early_is_caught(void **state)
{
    check_is_caught(*state, RETURNS);
}

static void leaving_out_launches_is_caught(void **state)
{
    /* Up to the length of the last run nothing is left to chance. */
    static const long periods[] = {2, 3, 4, 7, 8, 16};
    for (size_t i = 0; i < COUNT_OF(periods); i++) {
        period = periods[i];
        check_is_caught(*state, SKIPS);
    }
    period = 2;
}

static void passing_along_is_caught(void **state)
{
    check_is_caught(*state, PASSES_ALONG);
}

/* ---- Sets of buffers ---- */

static void sets_exceed_the_cache_five_times(void **state)
{
    (void)state;
    int sets = 0;
    acr__device device = {.name = "a device", .l2_bytes = 50 << 20, .mem_bytes = (int64_t)80 << 30};
    problem_work d = {.bytes = 4 << 20};
    assert_ok(timed_kernel_sets(&sets, &device, &d));
    assert_int_equal(sets, 63); /* 252 MiB */
    d.bytes = 400 << 20;
    assert_ok(timed_kernel_sets(&sets, &device, &d));
    assert_int_equal(sets, 2);
    d.bytes = 1 << 10;
    assert_fails(timed_kernel_sets(&sets, &device, &d), ACR_UNSUPPORTED, "at most 1024");
    d.bytes = 11.0 * (1 << 30);
    assert_fails(timed_kernel_sets(&sets, &device, &d), ACR_UNSUPPORTED, "a quarter of the memory");
    device.l2_bytes = 0;
    assert_fails(timed_kernel_sets(&sets, &device, &d), ACR_UNSUPPORTED, "unknown");
}

/* The cpu backend with a cache so small that a few sets exceed it. */
static acr_status time_rotating(const world *w, cheat how, verdict *found, int *launches_of_sample)
{
    acr__device *device = &acr__ctx_backend_device(w->ctx)->device;
    const int64_t l2_bytes = device->l2_bytes;
    device->l2_bytes = 4096;
    *found = time_it(w, how, MODE_ROTATING);
    const timed_kernel_request wanted = {
        .ctx = w->ctx, .kernel = &kernel, .problem = &w->problem, .ref = w->ref, .mode = MODE_ROTATING, .seed = 1};
    timed_kernel *s = NULL;
    present = HONEST;
    acr_status status = timed_kernel_create(&s, &wanted);
    assert_int_equal(timed_kernel_set_count(s), 10); /* 4 tensors of 512 bytes; 20 KiB */
    *launches_of_sample = timed_kernel_launches(s);
    timed_kernel_destroy(s);
    device->l2_bytes = l2_bytes;
    return status;
}

static void rotating_goes_through_all_sets(void **state)
{
    verdict found;
    int sample = 0;
    assert_ok(time_rotating(*state, HONEST, &found, &sample));
    if (!found.pass)
        fail_msg("%s", found.failure);
    assert_true(sample > 0 && sample % 10 == 0);
    static const cheat all[] = {RETURNS, SKIPS, PASSES_ALONG}; /* what one address's output helps, nothing here does */
    for (size_t i = 0; i < COUNT_OF(all); i++) {
        assert_ok(time_rotating(*state, all[i], &found, &sample));
        if (found.pass)
            fail_msg("cheat %d is not caught", (int)all[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_honest_kernel_is_right_in_every_mode),
        cmocka_unit_test(a_kept_output_is_caught),
        cmocka_unit_test(returning_early_is_caught),
        cmocka_unit_test(leaving_out_launches_is_caught),
        cmocka_unit_test(passing_along_is_caught),
        cmocka_unit_test(sets_exceed_the_cache_five_times),
        cmocka_unit_test(rotating_goes_through_all_sets),
    };
    return cmocka_run_group_tests(tests, make_world, end_world);
}
