/* The backward pass in the core: what its executions want, and which kernels are offered it. */
#include "support.h"

#include <math.h>
#include <stdlib.h>

/* A kernel of gradients that writes nothing, for the checks in front of it. */
static fwd_args told;
static bwd_args told_gradients;

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    (void)problem, (void)device;
    return NULL;
}

static double cost(const acr_problem *problem, const acr__device *device)
{
    (void)problem, (void)device;
    return 1e-6;
}

static void run(const fwd_args *args, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    (void)lane, (void)lanes, (void)queue, (void)scratch;
    told = *args;
    told_gradients = *bwd_args_of(args);
}

static const unsigned char identity[] = "probe";
static const acr__kernel probe = {.name = "bwd_probe_f16_d256_4x4_portable",
                                  .family = "bwd_probe",
                                  .backend = ACR__CPU,
                                  .pass = ACR_BACKWARD,
                                  .dtype = ACR_F16,
                                  .qk_dim_max = 256,
                                  .v_dim_max = 256,
                                  .q_tile = 4,
                                  .kv_tile = 4,
                                  .traits = ACR__TRAIT_PACKED,
                                  .terms = FWD_TERM_SINKS,
                                  .image = identity,
                                  .image_end = identity + sizeof identity,
                                  .why_not = why_not,
                                  .cost = cost,
                                  .run = run};

/* The memory of an execution: 8 tensors of 4 KiB, and numbers. */
enum {
    ROOM = 4096
};
typedef struct memory {
    _Alignas(256) char q[ROOM], k[ROOM], v[ROOM], o[ROOM], d_o[ROOM], dq[ROOM], dk[ROOM], dv[ROOM];
    float lse[64], sinks[4], dsinks[4];
} memory;

static acr_buffers buffers_of(memory *m)
{
    acr_buffers b = ACR_BUFFERS_INIT;
    b.q = m->q, b.k = m->k, b.v = m->v, b.o = m->o, b.lse = m->lse;
    b.d_o = m->d_o, b.dq = m->dq, b.dk = m->dk, b.dv = m->dv;
    return b;
}

#define assert_buffers_refused(change, status, fragment)                                                               \
    do {                                                                                                               \
        acr_buffers buffers = plain;                                                                                   \
        change;                                                                                                        \
        assert_fails(acr_execute(plan, &buffers, NULL, 0, NULL), (status), (fragment));                                \
    } while (0)

static acr_plan *plan_of(acr_ctx *ctx, const char *text)
{
    const acr_problem p = problem_of(text);
    acr_plan *plan = NULL;
    assert_ok(acr__plan_create_forced(&plan, ctx, &p, &probe));
    return plan;
}

static void buffers_of_gradients_are_checked(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    static memory m;
    const acr_buffers plain = buffers_of(&m);
    acr_plan *plan = plan_of(ctx, "bwd:b1:h4:s8:d16:align32");
    assert_ok(acr_execute(plan, &plain, NULL, 0, NULL));
    assert_buffers_refused(buffers.lse = NULL, ACR_INVALID, "lse is NULL, the problem has ACR_BACKWARD");
    assert_buffers_refused(buffers.o = NULL, ACR_INVALID, "o is NULL");
    assert_buffers_refused(buffers.d_o = NULL, ACR_INVALID, "d_o is NULL");
    assert_buffers_refused(buffers.dq = NULL, ACR_INVALID, "dq is NULL");
    assert_buffers_refused(buffers.dk = NULL, ACR_INVALID, "dk is NULL");
    assert_buffers_refused(buffers.dv = NULL, ACR_INVALID, "dv is NULL");
    assert_buffers_refused(buffers.dsinks = m.dsinks, ACR_INVALID, "dsinks is given, the problem lacks ACR_SINKS");
    assert_buffers_refused(buffers.d_o = m.d_o + 16, ACR_ALIGNMENT, "d_o");
    assert_buffers_refused(buffers.dq = m.dq + 16, ACR_ALIGNMENT, "dq");
    assert_buffers_refused(buffers.dk = m.dk + 16, ACR_ALIGNMENT, "dk");
    assert_buffers_refused(buffers.dv = m.dv + 16, ACR_ALIGNMENT, "dv");
    acr_plan_destroy(plan);

    plan = plan_of(ctx, "bwd:b1:h4:s8:d16:sinks");
    acr_buffers with = plain;
    with.sinks = m.sinks;
    assert_fails(acr_execute(plan, &with, NULL, 0, NULL), ACR_INVALID, "dsinks is NULL, the problem has ACR_SINKS");
    with.dsinks = m.dsinks;
    assert_ok(acr_execute(plan, &with, NULL, 0, NULL));
    assert_ptr_equal(told_gradients.dsinks, m.dsinks);
    with.dsinks = m.lse + 3;
    assert_fails(acr_execute(plan, &with, NULL, 0, NULL), ACR_OVERLAP, "dsinks overlaps buffers.lse");
    with.dsinks = (float *)(void *)((char *)m.dsinks + 2);
    assert_fails(acr_execute(plan, &with, NULL, 0, NULL), ACR_ALIGNMENT, "dsinks");
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
}

static void gradients_overlap_nothing(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    static memory m;
    const acr_buffers plain = buffers_of(&m);
    acr_plan *plan = plan_of(ctx, "bwd:b1:h4:s8:d16");
    assert_buffers_refused(buffers.dq = m.q + 32, ACR_OVERLAP, "dq overlaps buffers.q");
    assert_buffers_refused(buffers.dk = m.o + 32, ACR_OVERLAP, "dk overlaps buffers.o");
    assert_buffers_refused(buffers.dv = m.d_o + 32, ACR_OVERLAP, "dv overlaps buffers.d_o");
    assert_buffers_refused(buffers.dv = m.lse, ACR_OVERLAP, "dv overlaps buffers.lse");
    assert_buffers_refused(buffers.dk = m.dq, ACR_OVERLAP, "dq overlaps buffers.dk");
    assert_buffers_refused(buffers.dv = m.dq, ACR_OVERLAP, "dq overlaps buffers.dv");
    assert_buffers_refused(buffers.dv = m.dk, ACR_OVERLAP, "dk overlaps buffers.dv");
    acr_buffers shared = plain; /* inputs may be one another */
    shared.d_o = shared.o;
    shared.k = shared.q;
    assert_ok(acr_execute(plan, &shared, NULL, 0, NULL));
    acr_plan_destroy(plan);
    /* the gradients of one projection of all three side by side */
    plan = plan_of(ctx, "bwd:b1:h2:s8:d16:bshd:dqs=768,16,96:dks=768,16,96:dvs=768,16,96");
    acr_buffers fused = plain;
    fused.dk = m.dq + 64;
    fused.dv = m.dq + 128;
    assert_ok(acr_execute(plan, &fused, NULL, 0, NULL));
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
}

static void kernels_are_told_of_gradients(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    static memory m;
    const acr_buffers b = buffers_of(&m);
    acr_plan *plan = plan_of(ctx, "bwd:b1:h4/2:s8/6:d16:dos=0,0,24:dqs=640,160,20:grad-f32:atomics");
    assert_ok(acr_execute(plan, &b, NULL, 0, NULL));
    assert_true(told.q == m.q && told.k == m.k && told.v == m.v && told.o == m.o && told.lse == m.lse);
    const bwd_args *g = &told_gradients;
    assert_true(g->d_o == m.d_o && g->dq == m.dq && g->dk == m.dk && g->dv == m.dv && !g->dsinks);
    assert_true(g->d_o_stride.row == 24 && g->d_o_stride.head == 0 && g->dq_stride.head == 160);
    assert_true(g->dk_stride.row == 16 && g->dv_stride.head == 96 && g->grad_f32 == 1 && g->atomics == 1);
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
}

/* Neither pass is offered to a kernel of the other. */
static void kernels_refuse_the_other_pass(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    const acr__device *device = &acr__ctx_backend_device(ctx)->device;
    const acr_problem forward = canonical_of("b1:h1:s16:d64"), backward = canonical_of("bwd:b1:h1:s16:d64");
    assert_string_equal(acr__why_not(&probe, &forward, device), "pass is fwd, the kernel computes gradients");
    assert_null(acr__why_not(&probe, &backward, device));
    for (size_t k = 0; k < acr__kernel_count; k++) {
        acr_problem p = acr__kernels[k]->pass == ACR_BACKWARD ? forward : backward;
        p.dtype = p.out_dtype = acr__kernels[k]->dtype;
        const char *reason = acr__why_not(acr__kernels[k], &p, device);
        assert_non_null(reason);
        if (acr__kernels[k]->backend == ACR__CPU)
            assert_memory_equal(reason, "pass is ", 8);
    }
    acr_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buffers_of_gradients_are_checked),
        cmocka_unit_test(gradients_overlap_nothing),
        cmocka_unit_test(kernels_are_told_of_gradients),
        cmocka_unit_test(kernels_refuse_the_other_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
