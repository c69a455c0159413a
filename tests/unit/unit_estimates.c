/* Estimates against physics: on every GPU of the table no kernel is estimated below the floor that the roofline gives,
 * and no rung of the teaching ladder quicker than the kernel that the planner takes. And the CPU's measured rates. */
#include "machine/cpu_peak.h"
#include "machine/gpus.h"
#include "machine/roofline.h"
#include "support.h"

static const char *const problems[] = {"b2:h8:s512:d64",           "b4:h16:s2048:d64:causal", "b1:h16:s16384:d128",
                                       "b2:h16:s4096:d128:causal", "b16:h16:s2048:d64",       "b8:h32/8:s1/8192:d128"};

static void check_problem(const gpu_model *gpu, const char *text)
{
    const acr_problem p = canonical_of(text);
    const acr__kernel *chosen = acr__choose(&p, &gpu->device);
    if (!chosen)
        return;
    machine m;
    machine_of_gpu(&m, &gpu->device);
    const problem_work d = work_of(&p, NULL);
    floor_times f;
    floor_of(&f, &m, &p, &d);
    const double chosen_s = chosen->cost(&p, &gpu->device);
    for (size_t i = 0; i < acr__kernel_count; i++) {
        const acr__kernel *kernel = acr__kernels[i];
        if (acr__why_not(kernel, &p, &gpu->device))
            continue;
        const double cost_s = kernel->cost(&p, &gpu->device);
        if (cost_s < 0.99 * f.multiply_add_s)
            fail_msg("%s, %s: %s is estimated to take %.2f us, the floor is %.2f us", gpu->name, text, kernel->name,
                     1e6 * cost_s, 1e6 * f.multiply_add_s);
        if (kernel->traits & ACR__TRAIT_NEVER_PLANNED && cost_s < chosen_s)
            fail_msg("%s, %s: %s is estimated to take %.2f us, the planner's %s %.2f us", gpu->name, text, kernel->name,
                     1e6 * cost_s, chosen->name, 1e6 * chosen_s);
    }
}

static void no_estimate_is_below_physics(void **state)
{
    (void)state;
    for (size_t g = 0; g < gpu_model_count; g++)
        for (size_t i = 0; i < COUNT_OF(problems); i++)
            check_problem(&gpu_models[g], problems[i]);
}

static problem_work work(const char *text, const acr_buffers *lengths)
{
    const acr_problem p = canonical_of(text);
    return work_of(&p, lengths);
}

/* Worked out by hand: 2 entries, 4 heads, 8 rows, 8 keys. */
static void features_are_work(void **state)
{
    (void)state;
    const problem_work plain = work("b2:h4:s8:d16", NULL);
    assert_true(plain.exps == 2 * 4 * 8 * 8);
    assert_true(work("b2:h4:s8:d16:cap30", NULL).exps == 2 * plain.exps);
    assert_true(work("b2:h4:s8:d16:chunk4", NULL).exps == plain.exps / 2);
    assert_true(work("b2:h4:s8:d16:chunk4:causal", NULL).exps == 2 * 4 * 2 * 10);
    const struct {
        const char *text;
        double bias_bytes;
    } biases[] = {{"b2:h4:s8:d16:bias-bf16/256,64,8", 2 * 4 * 64 * 2},
                  {"b2:h4:s8:d16:bias-f32/0,64,8", 4 * 64 * 4},
                  {"b2:h4:s8:d16:mask/0,0,8", 64},
                  {"b2:h4:s8:d16:mask/8,0,0", 2 * 8}};
    for (size_t i = 0; i < COUNT_OF(biases); i++)
        assert_true(work(biases[i].text, NULL).bytes == plain.bytes + biases[i].bias_bytes);
    assert_true(work("b2:h4:s8:d16:mask/0,0,8", NULL).exps == 2 * 4 * 36); /* as causal, which measured masks are */
    assert_true(work("b2:h4:s8:d16:mask/8,0,0", NULL).exps == plain.exps);
    const int32_t starts[] = {3, 8};
    const acr_buffers lengths = {.size = sizeof lengths, .kv_starts = starts};
    assert_true(work("b2:h4:s8:d16:kvstarts", &lengths).exps == 4 * 8 * 5);
}

static void a_rate_counts_the_time_that_threads_ran(void **state)
{
    (void)state;
    const peak_part parts[] = {{100, 1.0}, {100, 0.5}, {5, 0.0}};
    assert_true(peak_rate(parts, 3) == 300.0);
}

/* Many threads on few processors have each a fraction of one, as on a busy machine. */
static void a_busy_machine_has_an_idle_ones_floor(void **state)
{
    (void)state;
    enum {
        THREADS = 32
    };
    double share_of_one, share_of_many;
    const uint32_t portable = 0;
    const double one = cpu_peak_flops(portable, 1, &share_of_one);
    const double many = cpu_peak_flops(portable, THREADS, &share_of_many);
    if (many < THREADS / 4 * one)
        fail_msg("%d threads reach %.3g times what one does", THREADS, many / one);
    assert_true(share_of_one > 0 && share_of_one < 1.1);
    assert_true(share_of_many > 0 && share_of_many < 1.1);
}

/* Five products; q, k, v, o, its gradient and lse read, three gradients written. */
static void gradients_are_five_products(void **state)
{
    (void)state;
    const acr_problem p = canonical_of("bwd:bf16:b2:h4/2:s8:d16"),
                      wide = canonical_of("bwd:bf16:b2:h4/2:s8:d16:grad-f32");
    const problem_work d = work_of(&p, NULL), w = work_of(&wide, NULL);
    assert_true(d.flops == 2.0 * 2 * 4 * 64 * 5 * 16 && d.exps == 2.0 * 4 * 64);
    assert_true(d.bytes == 4 * 2048.0 + 4 * 1024.0 + 256);
    assert_true(w.bytes == d.bytes + 2048 + 2 * 1024);
}

static void caches_are_charged_what_they_hold(void **state)
{
    (void)state;
    const double rows = 16, keys = 100;
    const double q_and_o = rows * (576 + 512) * 2;
    assert_true(work("b1:h16/1:s1/100:d576/512", NULL).bytes == q_and_o + keys * (576 + 512) * 2);
    assert_true(work("b1:h16/1:s1/100:d576/512:v-in-k", NULL).bytes == q_and_o + keys * 576 * 2);
    assert_true(work("b1:h16/1:s1/100:d576/512:kv-e4m3", NULL).bytes == q_and_o + keys * (576 + 512));
    assert_true(work("b1:h16/1:s1/100:d576/512:kvlens:page64:v-in-k:kv-e4m3", NULL).bytes == q_and_o + keys * 576);
    /* packed queries over pages have offsets of queries alone: 3 rows over 7 keys, and 1 over 3 */
    const int32_t offsets[] = {1, 4, 5}, lens[] = {7, 3};
    const acr_buffers lengths = {.size = sizeof lengths, .q_offsets = offsets, .q_total = 6, .kv_lens = lens};
    const problem_work packed = work("b2:h2/1:s8/10:d16:bshd:packed:kvlens:page16", &lengths);
    assert_true(packed.exps == 2 * (3 * 7 + 1 * 3));
    assert_true(packed.bytes == 2 * 2 * (3 + 1) * 16 * 2 + 2 * (7 + 3) * 16 * 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_five_products),
        cmocka_unit_test(no_estimate_is_below_physics),
        cmocka_unit_test(caches_are_charged_what_they_hold),
        cmocka_unit_test(features_are_work),
        cmocka_unit_test(a_rate_counts_the_time_that_threads_ran),
        cmocka_unit_test(a_busy_machine_has_an_idle_ones_floor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
