/* Ours against peers on a machine without a GPU: peers that are a few lines of C with a simulated clock, ours on the
 * cpu backend. What the gates must let through and what they must catch, and what the records then say. */
#include "support.h"

#include <jansson.h>
#include <math.h>

#include "base/progress.h"
#include "bench/comparison.h"
#include "bench/interleave.h"
#include "machine/roofline.h"

/* ---- the peers ---- */

enum {
    DEFAULT,
    FAST,
    WRONG,
    REFUSING,
    PEER_COUNT
};
static const char *const names[PEER_COUNT] = {"fake-default", "fake-fast", "fake-wrong", "fake-refusing"};

/* What the callbacks know. */
static struct {
    const reference *ref;
    double ours_s;
    int begun, ended;
    int32_t mask, sets, pass;
    bool step; /* asked of the comparison */
} fake;

static int32_t refuse(char *text, const char *reason)
{
    snprintf(text, PEER_TEXT_BYTES, "%s", reason);
    return -1;
}

static int32_t fake_begin(const peer_problem *problem, char *text)
{
    ++fake.begun;
    fake.mask = problem->mask;
    fake.sets = problem->sets;
    fake.pass = problem->pass;
    bool known = problem->batch == 1 && problem->q_heads == 2 && problem->q_len == 16 && problem->qk_dim == 16 &&
                 problem->dtype == (int32_t)ACR_F32 && problem->q == fake.ref->buffers.q &&
                 fabs(problem->scale - 0.25) < 1e-9;
    return known ? 0 : refuse(text, "another problem than the test's");
}

static int32_t fake_capture(int32_t peer, int32_t launches, void **graph, char *text)
{
    (void)launches;
    if (peer == REFUSING)
        return refuse(text, "does not like this problem");
    *graph = &fake;
    return 0;
}

static int32_t fake_call(int32_t peer, int32_t calls, peer_enqueue *enqueue, void *arg, double *seconds, char *text)
{
    static const double peer_s[PEER_COUNT] = {[DEFAULT] = 40e-6, [FAST] = 22e-6, [WRONG] = 1e-6};
    (void)calls;
    if (peer == REFUSING)
        return refuse(text, "does not like this problem");
    *seconds = peer == PEER_OURS ? fake.ours_s : peer_s[peer];
    return peer == PEER_OURS ? enqueue(arg, NULL) : 0;
}

static int32_t fake_output(int32_t peer, void *packed, int64_t bytes, char *text)
{
    float *o = packed;
    if (fake.ref->grads) {
        const gradients *g = fake.ref->grads;
        if (bytes != (g->elements[0] + g->elements[1] + g->elements[2]) * (int64_t)sizeof *o)
            return refuse(text, "another size than the problem's");
        for (int which = 0; which < 3; which++)
            for (int64_t i = 0; i < g->elements[which]; i++)
                *o++ = peer == WRONG ? 0 : (float)g->expected[which][i];
        return 0;
    }
    int64_t count = fake.ref->rows * fake.ref->problem.v_dim;
    if (bytes != count * (int64_t)sizeof *o)
        return refuse(text, "another size than the problem's");
    for (int64_t i = 0; i < count; i++)
        o[i] = peer == WRONG ? 0 : (float)fake.ref->o[i];
    return 0;
}

static void fake_end(void)
{
    ++fake.ended;
}

static const peer_provider provider = {
    .count = PEER_COUNT,
    .names = names,
    .version = "fake 1.0",
    .begin = fake_begin,
    .capture = fake_capture,
    .call = fake_call,
    .output = fake_output,
    .end = fake_end,
};

/* A provider in C: it enqueues, here nothing but a wait, over the sets in turn. */
enum {
    SETS_SEEN = 64
};
static int32_t sets_seen[SETS_SEEN], calls_seen;

static const double WAIT_S = 300e-6; /* far more than ours takes */

static int32_t wait_a_while(int32_t peer, int32_t set, void *stream, char *text)
{
    (void)stream;
    if (peer == REFUSING)
        return refuse(text, "does not like this problem");
    sets_seen[calls_seen++ % SETS_SEEN] = set;
    const double start_s = monotonic_s();
    while (monotonic_s() - start_s < WAIT_S)
        continue;
    return 0;
}

static const peer_provider enqueuing = {
    .count = PEER_COUNT,
    .names = names,
    .version = "enqueuing 1.0",
    .begin = fake_begin,
    .output = fake_output,
    .end = fake_end,
    .enqueue = wait_a_while,
};

/* ---- one comparison ---- */

typedef struct outcome {
    json_t *records;
    comparison_counts counts;
} outcome;

/* Holds a comparison of the planner's kernel on a problem of the cpu backend. The caller drops the records. */
static outcome hold_with(const peer_provider *const *providers, int provider_count, const char *text, bench_mode mode,
                         double ours_s, double floor_s)
{
    acr_ctx *ctx = cpu_ctx(1);
    acr__ctx_backend_device(ctx)->device.l2_bytes = 1 << 20; /* little to empty in cold mode */
    const acr_problem problem = canonical_of(text);
    acr_plan *plan = estimate_plan(ctx, text);
    const reference_request wanted = {
        .problem = &problem, .seed = 1, .sampled_rows = REFERENCE_SAMPLED_ROWS, .lengths = LENGTHS_FULL, .threads = 1};
    reference *ref = NULL;
    assert_ok(reference_create(&ref, &wanted));
    fake.ref = ref;
    fake.ours_s = ours_s;
    fake.begun = fake.ended = 0;
    const problem_work asked = work_of(&problem, NULL);
    const floor_times floor = {
        .warm_s = floor_s, .warm_bound = "the test", .cold_s = floor_s, .cold_bound = "the test"};
    const kernel_patterns all = {.count = 0};
    const comparison_request request = {
        .ctx = ctx,
        .problem = &problem,
        .text = text,
        .ref = ref,
        .work = &asked,
        .floor = &floor,
        .patterns = &all,
        .planned = acr_plan_kernel(plan),
        .providers = providers,
        .provider_count = provider_count,
        .mode = mode,
        .step = fake.step,
        .blocks = 13,
        .seed = 1,
    };
    outcome result = {.records = json_array()};
    assert_ok(comparison_run(&request, result.records, &result.counts));
    assert_int_equal(fake.ended, provider_count);
    reference_destroy(ref);
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
    return result;
}

static outcome hold(const char *text, bench_mode mode, double ours_s, double floor_s)
{
    const peer_provider *const alone[] = {&provider};
    return hold_with(alone, 1, text, mode, ours_s, floor_s);
}

static const char *text_of(const json_t *record, const char *field)
{
    const char *text = json_string_value(json_object_get(record, field));
    return text ? text : "";
}

static double number_of(const json_t *record, const char *field)
{
    return json_number_value(json_object_get(record, field));
}

#define PROBLEM "f32:b1:h2:s16:d16"

static void ours_meets_every_peer_that_can(void **state)
{
    (void)state;
    outcome result = hold(PROBLEM, MODE_CALL, 10e-6, 1e-9);
    assert_int_equal(result.counts.measured, 1);
    assert_int_equal(result.counts.refused, 0);
    assert_int_equal(json_array_size(result.records), 3); /* neither the wrong nor the refusing one */
    const json_t *ours = json_array_get(result.records, 0);
    assert_non_null(strstr(text_of(ours, "kernel"), "fwd_simd_f32"));
    assert_string_equal(text_of(ours, "mode"), "call");
    assert_true(json_is_true(json_object_get(ours, "planned")));
    assert_string_equal(text_of(ours, "best_peer"), "fake-fast");
    assert_true(fabs(number_of(ours, "ratio_to_best_peer") - 2.2) < 1e-9);
    assert_string_equal(text_of(ours, "verdict"), "FASTER");
    assert_string_equal(text_of(ours, "tier"), "B");
    assert_string_equal(text_of(ours, "default_peer"), "fake-default");
    assert_true(fabs(number_of(ours, "ratio_to_default") - 4) < 1e-9);
    assert_string_equal(text_of(ours, "tier_to_default"), "B+");
    assert_string_equal(text_of(ours, "control"), "SAME");
    assert_int_equal(number_of(ours, "blocks"), 13);
    assert_string_equal(text_of(json_array_get(result.records, 1), "peer"), "fake-default");
    const json_t *fast = json_array_get(result.records, 2);
    assert_string_equal(text_of(fast, "peer"), "fake-fast");
    assert_string_equal(text_of(fast, "peer_version"), "fake 1.0");
    assert_true(json_is_true(json_object_get(fast, "within_tolerance")));
    assert_true(fabs(number_of(fast, "p50_us") - 22) < 1e-9);
    json_decref(result.records);
}

static void losing_is_said(void **state)
{
    (void)state;
    outcome result = hold(PROBLEM, MODE_CALL, 22e-6 * 1.05, 1e-9);
    const json_t *ours = json_array_get(result.records, 0);
    assert_string_equal(text_of(ours, "verdict"), "SLOWER");
    assert_string_equal(text_of(ours, "tier"), "-");
    json_decref(result.records);
    result = hold(PROBLEM, MODE_CALL, 22e-6, 1e-9);
    ours = json_array_get(result.records, 0);
    assert_string_equal(text_of(ours, "verdict"), "SAME");
    assert_string_equal(text_of(ours, "tier"), "C");
    json_decref(result.records);
}

static void times_below_the_floor_are_refused(void **state)
{
    (void)state;
    outcome result = hold(PROBLEM, MODE_CALL, 10e-6, 20e-6);
    assert_int_equal(result.counts.measured, 0);
    assert_int_equal(result.counts.refused, 1);
    json_t *record;
    size_t i;
    json_array_foreach(result.records, i, record) assert_null(json_object_get(record, "kernel"));
    json_decref(result.records);
}

/* Without peers ours is measured all the same, and no ratio is made up. */
static void check_alone(const outcome *result)
{
    assert_int_equal(result->counts.measured, 1);
    assert_int_equal(json_array_size(result->records), 1);
    assert_null(json_object_get(json_array_get(result->records, 0), "best_peer"));
    assert_null(json_object_get(json_array_get(result->records, 0), "verdict"));
    json_decref(result->records);
}

static void what_peers_cannot_be_given_they_are_not(void **state)
{
    (void)state;
    const char *const beyond[] = {"f32:b1:h2:s16:d16:lse", "f32:b1:h2:s16:d16:kvlens",
                                  "f32:b1:h2:s16:d16:qs=1024,16,64", "bwd:f32:b1:h2:s16:d16:sinks",
                                  "bwd:f32:b1:h2:s16:d16:dqs=1024,16,64"};
    for (size_t i = 0; i < COUNT_OF(beyond); i++) {
        const outcome result = hold(beyond[i], MODE_CALL, 10e-6, 1e-9);
        assert_int_equal(fake.begun, 0);
        check_alone(&result);
    }
}

static void no_cuda_graph_no_peer(void **state)
{
    (void)state;
    const outcome result = hold(PROBLEM, MODE_STREAM, 0, 1e-9);
    assert_int_equal(fake.begun, 1);
    check_alone(&result);
}

/* Where the two causal masks are the same, a peer may take the one that it knows. */
static void the_mask_is_named(void **state)
{
    (void)state;
    outcome result = hold("f32:b1:h2:s16:d16:causal", MODE_CALL, 10e-6, 1e-9);
    assert_int_equal(fake.mask, PEER_MASK_TOP_LEFT);
    json_decref(result.records);
    result = hold("f32:b1:h2:s16/24:d16:causal", MODE_CALL, 10e-6, 1e-9);
    assert_int_equal(fake.mask, PEER_MASK_BOTTOM_RIGHT);
    json_decref(result.records);
}

/* Gradients: a peer's are dq, dk and dv; with their forward pass before them that is said to peers and in records. */
static void gradients_meet_gradients(void **state)
{
    (void)state;
    for (int step = 0; step < 2; step++) {
        fake.step = step != 0;
        outcome result = hold("bwd:f32:b1:h2:s16:d16", MODE_CALL, 10e-6, 1e-9);
        fake.step = false;
        assert_int_equal(fake.pass, step ? PEER_STEP : PEER_BACKWARD);
        assert_int_equal(json_array_size(result.records), 3); /* neither the wrong nor the refusing one */
        const json_t *ours = json_array_get(result.records, 0), *fast = json_array_get(result.records, 2);
        assert_non_null(strstr(text_of(ours, "kernel"), "bwd_simd_f32"));
        assert_string_equal(text_of(ours, "best_peer"), "fake-fast");
        assert_true(json_is_true(json_object_get(fast, "within_tolerance")));
        assert_true(json_is_true(json_object_get(fast, "with_forward")) == (step != 0));
        assert_int_equal(strncmp(text_of(ours, "forward_kernel"), "fwd_simd_f32", 12) == 0, step != 0);
        json_decref(result.records);
    }
}

/* Two providers in one comparison: the best peer is the best of both, each in its own way of calling. */
static void providers_meet_in_one_table(void **state)
{
    (void)state;
    const peer_provider *const both[] = {&provider, &enqueuing};
    outcome result = hold_with(both, 2, PROBLEM, MODE_CALL_SINGLE, 10e-6, 1e-9);
    assert_int_equal(fake.begun, 2);
    assert_int_equal(result.counts.measured, 1);
    assert_int_equal(json_array_size(result.records), 1 + 2 + 2);
    const json_t *ours = json_array_get(result.records, 0);
    assert_string_equal(text_of(ours, "mode"), "call-single");
    assert_string_equal(text_of(ours, "best_peer"), "fake-fast"); /* 22 us, where the others wait */
    assert_int_equal(number_of(ours, "launches"), 1);
    const json_t *last = json_array_get(result.records, 4);
    assert_string_equal(text_of(last, "peer_version"), "enqueuing 1.0");
    assert_true(number_of(last, "p50_us") > 0.99e6 * WAIT_S);
    json_decref(result.records);
}

/* What is recorded by enqueuing can meet ours in every mode that the machine has. */
static void enqueuing_peers_are_recorded(void **state)
{
    (void)state;
    const peer_provider *const alone[] = {&enqueuing};
    static const bench_mode modes[] = {MODE_STREAM, MODE_COLD, MODE_CALL_SINGLE};
    for (size_t i = 0; i < COUNT_OF(modes); i++) {
        calls_seen = 0;
        outcome result = hold_with(alone, 1, PROBLEM, modes[i], 0, 1e-9);
        assert_int_equal(fake.sets, 1);
        const json_t *ours = json_array_get(result.records, 0);
        assert_string_equal(text_of(ours, "mode"), mode_name(modes[i]));
        assert_string_equal(text_of(ours, "verdict"), "FASTER");
        assert_true(calls_seen > 13 * INTERLEAVE_BLOCK_SAMPLES);
        json_decref(result.records);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ours_meets_every_peer_that_can),
        cmocka_unit_test(losing_is_said),
        cmocka_unit_test(times_below_the_floor_are_refused),
        cmocka_unit_test(what_peers_cannot_be_given_they_are_not),
        cmocka_unit_test(no_cuda_graph_no_peer),
        cmocka_unit_test(the_mask_is_named),
        cmocka_unit_test(gradients_meet_gradients),
        cmocka_unit_test(providers_meet_in_one_table),
        cmocka_unit_test(enqueuing_peers_are_recorded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
