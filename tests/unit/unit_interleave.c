/* Interleaved timing: the order of its slots, what it discards, and that through it a kernel is the same as itself and
 * a slower one is found; on a simulated clock, where 5 % must be found every time, and on the cpu backend, where other
 * programs disturb and 50 % are injected. */
#include "support.h"

#include <math.h>
#include <time.h>

#include "bench/comparison.h"
#include "bench/interleave.h"

/* ---- the simulated clock ---- */

/* What both sides share: a noise, a drift, and a list of who was asked. */
typedef struct world {
    generator noise;
    double drift;
    char asked[512];
    size_t asked_count;
    int failing_after; /* slots; 0 = never */
} world;

typedef struct simulated {
    world *world;
    char name;
    double seconds;
} simulated;

static acr_status sample_simulated(void *arg, int count, double *seconds)
{
    simulated *s = arg;
    world *w = s->world;
    if (w->failing_after > 0 && (int)w->asked_count >= w->failing_after)
        return ACR_DEVICE_FAULT;
    if (w->asked_count < sizeof w->asked - 1)
        w->asked[w->asked_count++] = s->name;
    for (int i = 0; i < count; i++) {
        w->drift += 0.0005;
        seconds[i] = s->seconds * (1 + 0.01 * sin(w->drift)) * exp(0.005 * next_normal(&w->noise));
    }
    return ACR_OK;
}

static interleave_design design_of(int blocks, uint64_t seed)
{
    return (interleave_design){.blocks = blocks, .budget_s = 60, .seed = seed};
}

/* The comparison of two simulated sides, held to the noise floor of the first. */
static stats_comparison compare_simulated(double baseline_s, double candidate_s, uint64_t seed)
{
    world w = {.noise = {seed}};
    simulated a = {&w, 'A', baseline_s}, b = {&w, 'B', candidate_s};
    const interleave_side baseline = {sample_simulated, &a}, candidate = {sample_simulated, &b};
    const interleave_design design = design_of(INTERLEAVE_BLOCKS_PUBLISH, seed);
    interleave_result control, r;
    assert_ok(interleave_run(&control, &baseline, &baseline, &design));
    assert_ok(interleave_run(&r, &baseline, &candidate, &design));
    double noise_floor = stats_noise_floor(control.views, (size_t)control.blocks);
    stats_comparison comparison = stats_compare(r.views, (size_t)r.blocks, noise_floor);
    interleave_free(&control);
    interleave_free(&r);
    return comparison;
}

static void five_per_cent_are_found(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        stats_comparison slower = compare_simulated(10e-6, 10.5e-6, seed);
        assert_int_equal(slower.verdict, STATS_SLOWER);
        assert_true(fabs(slower.speedup - 1 / 1.05) < 0.005);
        assert_int_equal(compare_simulated(10.5e-6, 10e-6, seed).verdict, STATS_FASTER);
    }
}

static void a_kernel_is_the_same_as_itself(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++)
        assert_int_equal(compare_simulated(10e-6, 10e-6, seed).verdict, STATS_SAME);
}

/* ---- slots ---- */

static void blocks_are_abba_or_mirrored(void **state)
{
    (void)state;
    world w = {.noise = {1}};
    simulated a = {&w, 'A', 1e-6}, b = {&w, 'B', 2e-6};
    const interleave_side baseline = {sample_simulated, &a}, candidate = {sample_simulated, &b};
    const interleave_design design = design_of(INTERLEAVE_BLOCKS_PUBLISH, 7);
    interleave_result r;
    assert_ok(interleave_run(&r, &baseline, &candidate, &design));
    assert_int_equal(r.blocks, INTERLEAVE_BLOCKS_PUBLISH);
    assert_int_equal(r.discarded, 0);
    int mirrored = 0;
    for (int i = 0; i < r.blocks; i++) {
        const char *block = &w.asked[4 * i];
        bool mirror = strncmp(block, "BAAB", 4) == 0;
        assert_true(mirror || strncmp(block, "ABBA", 4) == 0);
        mirrored += mirror;
    }
    assert_in_range(mirrored, 10, 40); /* by chance, but not always */
    for (int i = 0; i < r.blocks * INTERLEAVE_BLOCK_SAMPLES; i++) {
        assert_true(fabs(r.baseline_us[i] - 1) < 0.1);
        assert_true(fabs(r.candidate_us[i] - 2) < 0.2);
    }
    interleave_free(&r);
}

/* Every third of the first looks finds a disturbance; there is a look before each block and after each slot. */
static bool every_third(void *arg)
{
    int *asked = arg;
    return ++*asked % 3 == 0 && *asked < 30;
}

static bool always(void *arg)
{
    (void)arg;
    return true;
}

static void disturbed_blocks_are_made_again(void **state)
{
    (void)state;
    world w = {.noise = {1}};
    simulated a = {&w, 'A', 1e-6}, b = {&w, 'B', 2e-6};
    const interleave_side baseline = {sample_simulated, &a}, candidate = {sample_simulated, &b};
    interleave_design design = design_of(INTERLEAVE_BLOCKS_SEARCH, 1);
    int asked = 0;
    interleave_result r;
    design.disturbed = every_third;
    design.disturbed_arg = &asked;
    assert_ok(interleave_run(&r, &baseline, &candidate, &design));
    assert_int_equal(r.blocks, INTERLEAVE_BLOCKS_SEARCH);
    assert_int_equal(r.discarded, 6); /* each of the first 30 / 5 blocks has such a look */
    interleave_free(&r);
    design.disturbed = always;
    assert_fails(interleave_run(&r, &baseline, &candidate, &design), ACR_DEVICE_FAULT, "the clock stays far below");
}

static void failures_of_a_side_come_through(void **state)
{
    (void)state;
    world w = {.noise = {1}, .failing_after = 9};
    simulated a = {&w, 'A', 1e-6}, b = {&w, 'B', 2e-6};
    const interleave_side baseline = {sample_simulated, &a}, candidate = {sample_simulated, &b};
    const interleave_design design = design_of(INTERLEAVE_BLOCKS_SEARCH, 1);
    interleave_result r;
    assert_int_equal(interleave_run(&r, &baseline, &candidate, &design), ACR_DEVICE_FAULT);
}

/* ---- the cpu backend ---- */

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Works for so many seconds. */
static acr_status spin(void *arg, void *stream)
{
    const double *seconds = arg;
    (void)stream;
    for (double start_s = now_s(); now_s() - start_s < *seconds;) {
    }
    return ACR_OK;
}

static acr_status sample_graph(void *arg, int count, double *seconds)
{
    acr__graph *graph = arg;
    return graph->device->backend->timing->graph_time(graph, count, seconds);
}

static void a_slowdown_is_found_on_the_cpu_backend(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr__backend_device *device = acr__ctx_backend_device(ctx);
    double fast_s = 100e-6, slow_s = 150e-6;
    acr__graph *fast, *slow;
    assert_ok(device->backend->timing->graph_record(&fast, device, spin, &fast_s, 2));
    assert_ok(device->backend->timing->graph_record(&slow, device, spin, &slow_s, 2));
    const interleave_side baseline = {sample_graph, fast}, candidate = {sample_graph, slow};
    interleave_design design = design_of(INTERLEAVE_BLOCKS_SEARCH, 1);
    design.warm_up_s = 1e-3;
    const double noise_floor = 0.1;
    interleave_result r;
    assert_ok(interleave_run(&r, &baseline, &candidate, &design));
    assert_int_equal(stats_compare(r.views, (size_t)r.blocks, noise_floor).verdict, STATS_SLOWER);
    interleave_free(&r);
    assert_ok(interleave_run(&r, &baseline, &baseline, &design));
    assert_int_equal(stats_compare(r.views, (size_t)r.blocks, noise_floor).verdict, STATS_SAME);
    interleave_free(&r);
    device->backend->timing->graph_free(fast);
    device->backend->timing->graph_free(slow);
    acr_ctx_destroy(ctx);
}

static void a_long_comparison_is_cut_to_its_least(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr__backend_device *device = acr__ctx_backend_device(ctx);
    double seconds = 200e-6;
    acr__graph *graph;
    assert_ok(device->backend->timing->graph_record(&graph, device, spin, &seconds, 1));
    const interleave_side side = {sample_graph, graph};
    interleave_design design = design_of(INTERLEAVE_BLOCKS_PUBLISH, 1);
    design.budget_s = 1e-3;
    interleave_result r;
    assert_ok(interleave_run(&r, &side, &side, &design));
    assert_int_equal(r.blocks, INTERLEAVE_BLOCKS_SEARCH);
    interleave_free(&r);
    device->backend->timing->graph_free(graph);
    acr_ctx_destroy(ctx);
}

static void the_cpu_backend_adopts_no_cuda_graph(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr__backend_device *device = acr__ctx_backend_device(ctx);
    acr__graph *graph;
    assert_fails(device->backend->timing->graph_adopt(&graph, device, ctx, 1), ACR_UNSUPPORTED, "CUDA graphs");
    device->backend->timing->graph_free(NULL);
    acr_ctx_destroy(ctx);
}

/* ---- tiers ---- */

static void tiers_are_judged_by_the_lower_end(void **state)
{
    (void)state;
    const struct {
        double low;
        const char *tier;
    } known[] = {{14, "A+"}, {13, "A+"},  {12.9, "A"}, {5, "A"},     {3.2, "B+"},
                 {2, "B"},   {1.99, "C"}, {1, "C"},    {0.995, "C"}, {0.98, "-"}};
    for (size_t i = 0; i < COUNT_OF(known); i++)
        assert_string_equal(comparison_tier(known[i].low, 0.01), known[i].tier);
}

/* Whoever asks for the blocks can end them; what was taken until then is whole. */
static bool enough_of_four(void *arg, const stats_block *views, int blocks)
{
    ++*(int *)arg;
    return views[blocks - 1].baseline_count == INTERLEAVE_BLOCK_SAMPLES && blocks == 4;
}

static void blocks_end_when_enough(void **state)
{
    (void)state;
    world w = {.noise = {7}};
    int looks = 0;
    simulated a = {&w, 'A', 10e-6}, b = {&w, 'B', 11e-6};
    const interleave_side baseline = {sample_simulated, &a}, candidate = {sample_simulated, &b};
    interleave_design design = design_of(INTERLEAVE_BLOCKS_SEARCH, 1);
    interleave_result r;
    design.enough = enough_of_four;
    design.enough_arg = &looks;
    assert_ok(interleave_run(&r, &baseline, &candidate, &design));
    assert_int_equal(r.blocks, 4);
    assert_int_equal(looks, 4);
    assert_true(r.candidate_us[4 * INTERLEAVE_BLOCK_SAMPLES - 1] > 0);
    interleave_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(five_per_cent_are_found),
        cmocka_unit_test(blocks_end_when_enough),
        cmocka_unit_test(a_kernel_is_the_same_as_itself),
        cmocka_unit_test(blocks_are_abba_or_mirrored),
        cmocka_unit_test(disturbed_blocks_are_made_again),
        cmocka_unit_test(failures_of_a_side_come_through),
        cmocka_unit_test(a_slowdown_is_found_on_the_cpu_backend),
        cmocka_unit_test(a_long_comparison_is_cut_to_its_least),
        cmocka_unit_test(the_cpu_backend_adopts_no_cuda_graph),
        cmocka_unit_test(tiers_are_judged_by_the_lower_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
