/* Planning: what may run, what is chosen among it, and that the descriptions of kernels make sense on every device. */
#include "support.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>

#include "cuda/device/attention/bias_boxes.h"
#include "devices.h"

/* Problems of every kind; not every device runs every one. */
static const char *const problems[] = {
    "b2:h8:s512:d64",
    "bf16:b2:h8:s512:d64:causal",
    "f32:b2:h8:s512:d64",
    "e4m3:b2:h8:s512:d64",
    "e4m3:b2:h8:s512:d128:obf16",
    "b1:h1:s1:d1",
    "b1:h1:s1/100000:d128",
    "b8:h32/8:s2048:d128:causal",
    "bf16:b1:h16:s2048:d128:bshd:lse",
    "b1:h2:s1333/77:d40/24:causal-tl:kvlens",
    "b3:h5:s17:d8:align2",
    "f32:b3:h5:s17:d7:align4",
    "b1:h1:s64:d256",
    "b1:h1:s64:d264",
    "b2:h2:s64:d64:qs=100000,1000,65:align2",
    "b65536:h4:s16:d64",
    "b1:h70000:s16:d64",
    "b1:h1:s1000000:d64",
};

/* Calls check for every problem, device and kernel of the list. */
typedef void triple_check(const acr_problem *p, const char *text, const named_device *device,
                          const acr__kernel *kernel);

static void for_all(triple_check *check)
{
    for (size_t i = 0; i < COUNT_OF(problems); i++) {
        const acr_problem p = canonical_of(problems[i]);
        for (size_t n = 0; n < TEST_DEVICES; n++)
            for (size_t k = 0; k < acr__kernel_count; k++)
                check(&p, problems[i], &test_devices[n], acr__kernels[k]);
    }
}

static bool can_run(const acr_problem *p, const named_device *device, const acr__kernel *kernel)
{
    return acr__why_not(kernel, p, &device->device) == NULL;
}

/* ---- The list -----------------------------------------------------------------------------------------------------
 * */

static bool ends_in(const char *text, const char *ending)
{
    const size_t length = strlen(text), end = strlen(ending);
    return length >= end && strcmp(text + length - end, ending) == 0;
}

static void names_decode(void **state)
{
    (void)state;
    assert_true(acr__kernel_count >= 1);
    for (size_t k = 0; k < acr__kernel_count; k++) {
        const acr__kernel *kernel = acr__kernels[k];
        char dim[64];
        /* <pass>_<family>_<dtype>_d<dim>_..._<arch>; the family's name begins with the pass */
        assert_true(strncmp(kernel->name, kernel->family, strlen(kernel->family)) == 0);
        assert_true(strncmp(kernel->family, kernel->pass == ACR_BACKWARD ? "bwd_" : "fwd_", 4) == 0);
        snprintf(dim, sizeof dim, "_%s_d", acr__dtype_text(kernel->dtype));
        if (!strstr(kernel->name, dim))
            fail_msg("%s does not say %s", kernel->name, dim);
        const char *const cpu_ends[] = {"_portable", "_avx2", "_avx512", "_avx512bf16"};
        const char *const cuda_ends[] = {"_sm80", "_sm89", "_sm90a", "_sm90a"};
        bool known = false;
        for (size_t i = 0; i < COUNT_OF(cpu_ends); i++)
            known = known || ends_in(kernel->name, kernel->backend == ACR__CPU ? cpu_ends[i] : cuda_ends[i]);
        if (!known)
            fail_msg("%s does not end in its arch", kernel->name);
        for (const char *c = kernel->name; *c; c++)
            assert_true(islower((unsigned char)*c) || isdigit((unsigned char)*c) || *c == '_');
        assert_ptr_equal(acr__kernel_find(kernel->name), kernel); /* and is unique */
    }
    assert_null(acr__kernel_find("fwd_nothing"));
    assert_null(acr__kernel_find(""));
}

static void descriptions_are_complete(void **state)
{
    (void)state;
    for (size_t k = 0; k < acr__kernel_count; k++) {
        const acr__kernel *kernel = acr__kernels[k];
        assert_true(kernel->why_not && kernel->cost);
        assert_true(kernel->qk_dim_max >= 1 && kernel->v_dim_max >= 1 && kernel->q_tile >= 1 && kernel->kv_tile >= 1);
        assert_true(kernel->image && kernel->image_end > kernel->image);
        assert_in_range(kernel->dtype, ACR_F32, ACR_E4M3);
        if (kernel->backend == ACR__CPU) {
            assert_non_null(kernel->run);
        } else {
            assert_true(kernel->symbol && kernel->shape);
            assert_in_range(kernel->arch_min, 80, kernel->arch_max);
        }
    }
}

/* ---- What may run -------------------------------------------------------------------------------------------------
 * */

static void check_reason(const acr_problem *p, const char *text, const named_device *device, const acr__kernel *kernel)
{
    const char *reason = acr__why_not(kernel, p, &device->device);
    if (reason && (strlen(reason) < 8 || strchr(reason, '\n')))
        fail_msg("%s on %s, %s: the reason \"%s\" explains nothing", text, device->label, kernel->name, reason);
    if (kernel->backend != device->device.backend || kernel->dtype != p->dtype || p->qk_dim > kernel->qk_dim_max ||
        p->v_dim > kernel->v_dim_max)
        assert_non_null(reason);
    if (kernel->backend == ACR__CUDA &&
        (device->device.arch < kernel->arch_min || device->device.arch > kernel->arch_max))
        assert_non_null(reason);
}

static void what_cannot_run_says_why(void **state)
{
    (void)state;
    for_all(check_reason);
}

static void check_cost(const acr_problem *p, const char *text, const named_device *device, const acr__kernel *kernel)
{
    if (!can_run(p, device, kernel))
        return;
    const double seconds = kernel->cost(p, &device->device);
    if (!(seconds > 1e-9 && seconds < 1e6))
        fail_msg("%s on %s, %s: cost %g s", text, device->label, kernel->name, seconds);
}

static void costs_are_times(void **state)
{
    (void)state;
    for_all(check_cost);
}

static void check_growth(const acr_problem *p, const char *text, const named_device *device, const acr__kernel *kernel)
{
    acr_problem longer = *p;
    if (p->batch > 1000)
        return;
    longer.batch *= 64;
    assert_ok(acr_problem_canonical(&longer, &longer));
    if (!can_run(p, device, kernel) || !can_run(&longer, device, kernel))
        return;
    if (!(kernel->cost(&longer, &device->device) >= kernel->cost(p, &device->device)))
        fail_msg("%s on %s, %s: 64 times the batch costs less", text, device->label, kernel->name);
}

static void more_work_never_costs_less(void **state)
{
    (void)state;
    for_all(check_growth);
}

static void check_launch(const acr_problem *p, const char *text, const named_device *device, const acr__kernel *kernel)
{
    if (kernel->backend != ACR__CUDA || !can_run(p, device, kernel))
        return;
    acr__launch launch = {{0, 0, 0}, 0, 0, 0};
    kernel->shape(p, &device->device, &launch);
    const bool fits = launch.grid[0] >= 1 && launch.grid[0] <= 2147483647u && launch.grid[1] >= 1 &&
                      launch.grid[1] <= 65535 && launch.grid[2] >= 1 && launch.grid[2] <= 65535 && launch.block >= 32 &&
                      launch.block <= 1024 && launch.block % 32 == 0 && launch.cluster <= 8 &&
                      (int64_t)launch.smem_bytes <= device->device.smem_per_cta_bytes;
    if (!fits || (launch.cluster > 1 && (launch.grid[0] % launch.cluster != 0 || device->device.arch < 90)))
        fail_msg("%s on %s, %s: grid %u %u %u, block %u, cluster %u, %u bytes of shared memory", text, device->label,
                 kernel->name, launch.grid[0], launch.grid[1], launch.grid[2], launch.block, launch.cluster,
                 launch.smem_bytes);
}

static void launches_fit_the_device(void **state)
{
    (void)state;
    for_all(check_launch);
}

/* ---- What is chosen -----------------------------------------------------------------------------------------------
 * */

static void the_cheapest_that_can_run_is_chosen(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(problems); i++)
        for (size_t n = 0; n < TEST_DEVICES; n++) {
            const acr_problem p = canonical_of(problems[i]);
            const acr__kernel *best = NULL;
            for (size_t k = 0; k < acr__kernel_count; k++) {
                const acr__kernel *kernel = acr__kernels[k];
                if (kernel->traits & ACR__TRAIT_NEVER_PLANNED || !can_run(&p, &test_devices[n], kernel))
                    continue;
                if (!best || kernel->cost(&p, &test_devices[n].device) < best->cost(&p, &test_devices[n].device))
                    best = kernel;
            }
            assert_ptr_equal(acr__choose(&p, &test_devices[n].device), best);
        }
}

/* fwd_mma8 took 2.0 to 3.9 times as long as fwd_fp8 on an H200 wherever there was work for all SMs (results/grid/). */
static void hopper_products_are_used_for_fp8(void **state)
{
    (void)state;
    if (!has_cuda_kernels())
        skip();
    static const int lengths[] = {1024, 1333, 4096, 16384}, dims[] = {16, 64, 96, 128, 192, 256};
    static const char *const masks[] = {"", ":causal", ":kvlens:lse"};
    for (size_t q = 0; q < COUNT_OF(lengths); q++)
        for (size_t k = 0; k < COUNT_OF(lengths); k++)
            for (size_t d = 0; d < COUNT_OF(dims); d++)
                for (size_t i = 0; i < 3 * COUNT_OF(masks); i++) {
                    if (dims[d] > 128 && lengths[k] > 4096) /* there it serves no more keys */
                        continue;
                    char text[96];
                    snprintf(text, sizeof text, "e4m3:b%d:h8:s%d/%d:d%d%s", 1 << i / 3 * 3, lengths[q], lengths[k],
                             dims[d], masks[i % 3]);
                    const acr_problem p = canonical_of(text);
                    const acr__kernel *kernel = acr__choose(&p, &test_devices[0].device);
                    assert_string_equal(test_devices[0].label, "h200");
                    assert_non_null(kernel);
                    if (strcmp(kernel->family, "fwd_fp8") != 0 && strcmp(kernel->family, "fwd_short") != 0)
                        fail_msg("%s on an H200: %s", text, kernel->name);
                }
}

/* One packed call over pages is planned by its longest query; prompts are fwd_wgmma's where pages fit its boxes. */
static void mixed_batches_are_planned_by_their_longest_query(void **state)
{
    (void)state;
    if (!has_cuda_kernels())
        skip();
    const struct {
        const char *text, *family;
    } expected[] = {{"b32:h32/8:s4/8192:d64:bshd:packed:kvlens:page16:causal", "fwd_split"},
                    {"b32:h32/8:s512/8192:d64:bshd:packed:kvlens:page16:causal", "fwd_wgmma"},
                    {"bf16:b32:h32/8:s512/8192:d128:bshd:packed:kvlens:page16:causal:win4096", "fwd_wgmma"},
                    {"b32:h32/8:s512/8192:d128:bshd:packed:kvlens:page64:causal:kv-e4m3", "fwd_wgmma"},
                    {"b32:h32/8:s512/8192:d64:bshd:packed:kvlens:page24:causal", "fwd_mma"},
                    {"b4:h32/8:s512/8192:d64:kvlens:page16:causal", "fwd_wgmma"},
                    {"b4:h32/8:s512/8192:d64:kvlens:page16:causal:kv-e4m3", "fwd_wgmma"},
                    {"bf16:b4:h32/8:s512/8192:d128:causal:kv-e4m3", "fwd_wgmma"},
                    {"b4:h32/8:s512/8192:d64:kvlens:page24:causal", "fwd_mma"}};
    assert_string_equal(test_devices[0].label, "h200");
    for (size_t i = 0; i < COUNT_OF(expected); i++) {
        const acr_problem p = canonical_of(expected[i].text);
        const acr__kernel *kernel = acr__choose(&p, &test_devices[0].device);
        assert_non_null(kernel);
        if (strcmp(kernel->family, expected[i].family) != 0)
            fail_msg("%s on an H200: %s", expected[i].text, kernel->name);
    }
}

static void common_problems_run_everywhere(void **state)
{
    (void)state;
    if (!has_cuda_kernels())
        skip();
    /* The promise of the families of last resort: any strides, element alignment, head dims to 256, all three wide
     * types. */
    const char *const texts[] = {"b2:h8:s512:d64", "bf16:b3:h5/1:s17/1333:d33/65:causal:align2:lse",
                                 "f32:b1:h2:s7:d256:kvlens:align4", "b2:h2:s64:d64:qs=100000,1000,65:align2",
                                 "b1:h1:s1/100000:d128"};
    for (size_t i = 0; i < COUNT_OF(texts); i++)
        for (size_t n = 0; n < TEST_DEVICES; n++) {
            const acr_problem p = canonical_of(texts[i]);
            if (!acr__choose(&p, &test_devices[n].device))
                fail_msg("nothing runs %s on %s", texts[i], test_devices[n].label);
        }
}

static void better_instructions_are_used(void **state)
{
    (void)state;
    const acr_problem p = canonical_of("f32:b2:h8:s512:d64");
    const struct {
        const char *label, *ending;
    } expected[] = {{"cpu-avx512", "_avx512"}, {"cpu-avx2", "_avx2"}, {"cpu-portable", "_portable"}};
    for (size_t n = 0; n < TEST_DEVICES; n++)
        for (size_t i = 0; i < COUNT_OF(expected); i++)
            if (strcmp(test_devices[n].label, expected[i].label) == 0) {
                const acr__kernel *kernel = acr__choose(&p, &test_devices[n].device);
                assert_non_null(kernel);
                if (!ends_in(kernel->name, expected[i].ending))
                    fail_msg("%s runs %s", expected[i].label, kernel->name);
            }
}

static void estimate_follows_choose(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    for (size_t i = 0; i < COUNT_OF(problems); i++) {
        const acr_problem p = canonical_of(problems[i]);
        const acr__kernel *kernel = acr__choose(&p, &acr__ctx_backend_device(ctx)->device);
        acr_plan *plan = NULL;
        if (!kernel) {
            assert_fails(acr_plan_create(&plan, ctx, &p, ACR_ESTIMATE), ACR_UNSUPPORTED, "");
            continue;
        }
        assert_ok(acr_plan_create(&plan, ctx, &p, ACR_ESTIMATE));
        assert_string_equal(acr_plan_kernel(plan), kernel->name);
        assert_int_equal(acr_plan_workspace(plan),
                         kernel->workspace ? kernel->workspace(&p, &acr__ctx_backend_device(ctx)->device) : 0);
        acr_plan_destroy(plan);
    }
    acr_ctx_destroy(ctx);
}

/* The bench's "nothing but launches" is of drivers alone. */
static void cpu_kernels_are_not_launched_bare(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr__backend_device *device = acr__ctx_backend_device(ctx);
    const acr_problem p = canonical_of("f32:b1:h1:s4:d8");
    const acr__kernel *kernel = acr__choose(&p, &device->device);
    acr__prepared *prepared = NULL;
    double seconds = 0;
    assert_ok(device->backend->prepare(&prepared, device, kernel, &p));
    assert_fails(device->backend->timing->launch_bare(prepared, NULL, NULL, 1, &seconds), ACR_UNSUPPORTED,
                 kernel->name);
    device->backend->release(prepared);
    acr_ctx_destroy(ctx);
}

static void unsupported_names_the_nearest_kernel_and_its_limit(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr_plan *plan = NULL;
    const acr_problem p = problem_of("f32:b1:h1:s4:d1000000/8");
    assert_fails(acr_plan_create(&plan, ctx, &p, ACR_ESTIMATE), ACR_UNSUPPORTED, "fwd_");
    assert_fails(acr_plan_create(&plan, ctx, &p, ACR_ESTIMATE), ACR_UNSUPPORTED, "qk_dim");
    assert_fails(acr_plan_create(&plan, ctx, &p, ACR_ESTIMATE), ACR_UNSUPPORTED, "f32:b1:h1:s4:d1000000/8");
    acr_ctx_destroy(ctx);
}

static void measuring_picks_a_kernel_that_can_run(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    const char *const texts[] = {"f32:b1:h2:s32:d64", "b1:h2:s32:d40:causal:kvlens:lse", "bf16:b1:h2:s9:d64:align2"};
    const acr_effort efforts[] = {ACR_MEASURE, ACR_PATIENT};
    for (size_t i = 0; i < COUNT_OF(texts); i++)
        for (size_t e = 0; e < COUNT_OF(efforts); e++) {
            const acr_problem p = canonical_of(texts[i]);
            acr_plan *plan = NULL;
            assert_ok(acr_plan_create(&plan, ctx, &p, efforts[e]));
            const acr__kernel *kernel = acr__kernel_find(acr_plan_kernel(plan));
            assert_non_null(kernel);
            assert_null(acr__why_not(kernel, &p, &acr__ctx_backend_device(ctx)->device));
            assert_int_equal(kernel->traits & ACR__TRAIT_NEVER_PLANNED, 0);
            assert_non_null(strstr(acr_plan_text(plan), "measured"));
            acr_plan_destroy(plan);
        }
    acr_ctx_destroy(ctx);
}

static void arguments_follow_problem_and_buffers(void **state)
{
    (void)state;
    acr_problem p = problem_of("e4m3:b2:h6/3:s5/7:d16/32:causal-tl:obf16:lse:kvlens");
    p.scale = 0.25f;
    p.q_scale = 2.0f;
    p.k_scale = 0.5f;
    p.v_scale = 3.0f;
    assert_ok(acr_problem_canonical(&p, &p));
    float lse[60];
    int32_t lens[2];
    acr_buffers buffers = {.size = (uint32_t)sizeof buffers,
                           .q = lse,
                           .k = lse + 1,
                           .v = lse + 2,
                           .o = lse + 3,
                           .lse = lse + 4,
                           .kv_lens = lens,
                           .q_scales = lse + 5,
                           .k_scales = lse + 6,
                           .v_scales = lse + 7};
    fwd_args args;
    memset(&args, 0x5a, sizeof args);
    acr__fwd_args(&args, &p, &buffers, lens + 1);
    assert_true(args.q == lse && args.k == lse + 1 && args.v == lse + 2 && args.o == lse + 3 && args.lse == lse + 4);
    assert_true(args.kv_lens == lens && args.workspace == lens + 1);
    assert_true(args.batch == 2 && args.q_heads == 6 && args.kv_heads == 3 && args.group == 2);
    assert_true(args.q_len == 5 && args.kv_len == 7 && args.qk_dim == 16 && args.v_dim == 32);
    assert_true(args.q_stride.row == 16 && args.k_stride.head == 7 * 16 && args.v_stride.batch == 3 * 7 * 32 &&
                args.o_stride.row == 32);
    assert_int_equal(args.mask, FWD_MASK_TOP_LEFT);
    assert_true(args.scale == 0.25f && fabsf(args.scale_log2 - 0.25f * 1.44269504f) < 1e-7f && args.out_scale == 3.0f);
    assert_int_equal(args.out_bf16, 1);
    assert_true(args.q_scales == lse + 5 && args.k_scales == lse + 6 && args.v_scales == lse + 7);
    for (int i = 5; i < 5 + 2 + 6; i++)
        lse[i] = (float)(1 << i); /* of batch entry 1, head 2, the sixth of each */
    const fwd_scales scales = fwd_scales_of(&args, 1, 2);
    assert_true(scales.scale == 0.25f * (1 << 10) * (1 << 11) && scales.out_scale == 3.0f * (1 << 12));
    assert_true(scales.scale_log2 == args.scale_log2 * (1 << 10) * (1 << 11));
    assert_true(args.q_offsets == NULL && args.kv_offsets == NULL && args.q_total == 0 && args.kv_total == 0);
    p = canonical_of("bf16:b1:h1:s5/7:d16:causal");
    buffers.q_scales = buffers.k_scales = buffers.v_scales = NULL;
    acr__fwd_args(&args, &p, &buffers, NULL);
    const fwd_scales none = fwd_scales_of(&args, 0, 0);
    assert_true(none.scale == args.scale && none.scale_log2 == args.scale_log2 && none.out_scale == 1.0f);
    assert_int_equal(args.mask, FWD_MASK_BOTTOM_RIGHT);
    assert_int_equal(args.out_bf16, 0);
    assert_true(args.out_scale == 1.0f);
}

static void arguments_name_the_terms(void **state)
{
    (void)state;
    const acr_problem p = canonical_of("b2:h6/3:s5/7:d16:causal:chunk3:ranges2:cap50:bias-bf16/0,35,7:sinks:alibi:tree:"
                                       "kvstarts"),
                      unlimited = canonical_of("b2:h6/3:s5/7:d16:ranges2");
    float numbers[6];
    int32_t places[8];
    uint16_t bias[1];
    uint8_t tree[1];
    const acr_buffers buffers = {.size = (uint32_t)sizeof buffers,
                                 .kv_starts = places,
                                 .sinks = numbers,
                                 .slopes = numbers + 1,
                                 .bias = bias,
                                 .ranges = places + 2,
                                 .tree = tree};
    fwd_args args;
    acr__fwd_args(&args, &p, &buffers, NULL);
    assert_true(args.softcap == 50.0f && args.softcap_in == args.scale / 50.0f);
    assert_true(fabsf(args.softcap_out - 50.0f * 1.44269504f) < 1e-4f);
    assert_true(args.kv_starts == places && args.ranges == places + 2 && args.ranges_count == 2 && args.chunk == 3);
    assert_true(args.sinks == numbers && args.slopes == numbers + 1 && args.bias == bias && args.tree == tree);
    assert_true(args.bias_stride.batch == 0 && args.bias_stride.head == 35 && args.bias_stride.row == 7);
    assert_int_equal(args.bias_type, FWD_BIAS_BF16);
    acr__fwd_args(&args, &unlimited, &buffers, NULL); /* every row sees every key: ranges have nothing to add */
    assert_true(args.ranges == NULL && args.ranges_count == 0 && args.softcap_in == 0.0f);
}

/* Tensor maps want rows apart, and units of 16 bytes. */
static void biases_fit_boxes(void **state)
{
    (void)state;
    const struct {
        const char *problem;
        uintptr_t base;
        int fits;
    } cases[] = {
        {"b2:h2:s8/16:d16:bias-bf16/0,128,16", 4096, 1},
        {"b2:h2:s8/16:d16:bias-bf16/0,128,16", 4096 + 8, 0},
        {"b2:h2:s8/9:d16:bias-f16/0,0,16", 4096, 1},
        {"b2:h2:s8/12:d16:bias-f16/0,0,12", 4096, 0},
        {"b2:h2:s8/16:d16:bias-f16/0,132,16", 4096, 0},
        {"b2:h2:s8/16:d16:bias-f16/260,0,16", 4096, 0},
        {"b2:h2:s8/16:d16:bias-f16/0,0,0", 4096, 0}, /* all rows share one */
        {"b2:h2:s8/12:d16:bias-f32/0,0,12", 4096, 1},
        {"b2:h2:s8/16:d16:mask/0,0,16", 4096, 1},
        {"b2:h2:s8/16:d16:mask/0,0,24", 4096, 0},
        {"b2:h2:s8/16:d16:mask/1099511627776,0,16", 4096, 0}, /* 2^40 bytes are one too many */
        {"b2:h2:s8/16:d16:bias-f16/549755813888,0,16", 4096, 0},
        {"b2:h2:s8/16:d16:bias-f16/549755813880,0,16", 4096, 1},
        {"b2:h2:s8/16:d16", 4096, 0},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const acr_problem p = canonical_of(cases[i].problem);
        const acr_buffers buffers = {.size = (uint32_t)sizeof buffers, .bias = (const void *)cases[i].base};
        fwd_args args;
        acr__fwd_args(&args, &p, &buffers, NULL);
        if (bias_fits_boxes(&args) != cases[i].fits)
            fail_msg("case %zu: %s", i, cases[i].problem);
    }
}

/* Whatever a kernel can do otherwise, it refuses by name what it is compiled without. */
static void terms_are_refused_by_name(void **state)
{
    (void)state;
    const struct {
        const char *field, *name;
        uint32_t term;
    } cases[] = {
        {"cap50", "softcap", FWD_TERM_CAP},
        {"sinks", "sinks", FWD_TERM_SINKS},
        {"bias-f16/0,0,0", "bias", FWD_TERM_BIAS},
        {"mask/0,0,0", "mask", FWD_TERM_BIAS},
        {"alibi", "alibi", FWD_TERM_ALIBI},
        {"tree", "tree", FWD_TERM_TREE},
        {"causal:ranges2", "ranges", FWD_TERM_RANGES},
        {"kvstarts", "kv_starts", FWD_TERM_LIMITS},
        {"chunk4", "chunk", FWD_TERM_LIMITS},
        {"ranges2", NULL, 0},
        {"causal:win4", NULL, 0},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char text[ACR_PROBLEM_TEXT_MAX];
        snprintf(text, sizeof text, "b1:h2:s64:d32:%s", cases[i].field);
        const acr_problem p = canonical_of(text);
        assert_int_equal(acr__terms_of(&p), cases[i].term);
        assert_null(acr__terms_why_not(FWD_TERM_ALL, &p));
        const char *reason = acr__terms_why_not(FWD_TERM_ALL & ~cases[i].term, &p);
        assert_int_equal(reason != NULL, cases[i].term != 0);
        if (reason)
            assert_int_equal(strncmp(reason, cases[i].name, strlen(cases[i].name)), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_decode),
        cmocka_unit_test(descriptions_are_complete),
        cmocka_unit_test(what_cannot_run_says_why),
        cmocka_unit_test(costs_are_times),
        cmocka_unit_test(more_work_never_costs_less),
        cmocka_unit_test(launches_fit_the_device),
        cmocka_unit_test(the_cheapest_that_can_run_is_chosen),
        cmocka_unit_test(hopper_products_are_used_for_fp8),
        cmocka_unit_test(mixed_batches_are_planned_by_their_longest_query),
        cmocka_unit_test(common_problems_run_everywhere),
        cmocka_unit_test(better_instructions_are_used),
        cmocka_unit_test(estimate_follows_choose),
        cmocka_unit_test(unsupported_names_the_nearest_kernel_and_its_limit),
        cmocka_unit_test(measuring_picks_a_kernel_that_can_run),
        cmocka_unit_test(arguments_follow_problem_and_buffers),
        cmocka_unit_test(arguments_name_the_terms),
        cmocka_unit_test(biases_fit_boxes),
        cmocka_unit_test(terms_are_refused_by_name),
        cmocka_unit_test(cpu_kernels_are_not_launched_bare),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
