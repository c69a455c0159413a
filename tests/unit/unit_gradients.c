/* Gradients: the oracle's formulas against finite differences of the oracle's forward pass, and what holds of every
 * kernel whatever its figures are. */
#include "support.h"

#include <math.h>
#include <stdlib.h>

#include "check/conformance.h"
#include "check/oracle.h"

/* The sum of d_o * o over all rows, o by the oracle. */
static double loss_of(const reference *ref)
{
    acr_problem p = ref->problem;
    p.pass = ACR_FORWARD;
    const int64_t rows = ref->entries * p.q_heads * ref->q_rows;
    double *o = malloc((size_t)(rows * p.v_dim) * sizeof *o), *lse = malloc((size_t)rows * sizeof *lse);
    const acr_buffers b = ref->buffers;
    double sum = 0;
    assert_true(o && lse);
    assert_ok(oracle_forward(&p, &b, NULL, rows, o, lse));
    for (int64_t i = 0; i < rows * p.v_dim; i++)
        if (!ref->q_owner || ref->q_owner[i / p.v_dim % ref->q_rows] >= 0)
            sum += o[i] * (double)((const float *)ref->buffers.d_o)[i];
    free(o);
    free(lse);
    return sum;
}

/* The derivative by a float32 element, the difference over four points. */
static double difference(const reference *ref, float *element)
{
    const float at = *element, step = 0x1p-7f;
    double values[4];
    const float steps[4] = {-2 * step, -step, step, 2 * step};
    double taken[4];
    for (int i = 0; i < 4; i++) {
        *element = at + steps[i];
        taken[i] = (double)*element - (double)at;
        values[i] = loss_of(ref);
    }
    *element = at;
    const double near = (values[2] - values[1]) / (taken[2] - taken[1]),
                 far = (values[3] - values[0]) / (taken[3] - taken[0]);
    return (4 * near - far) / 3;
}

static void formulas_equal_differences(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "bwd:f32:b2:h2/1:s5/7:d4/3",
        "bwd:f32:b1:h2:s6/6:d5:causal",
        "bwd:f32:b1:h1:s6/4:d3:causal",
        "bwd:f32:b1:h1:s4/6:d3:causal-tl:win2",
        "bwd:f32:b1:h2:s5/9:d4:win3/2:cap1.5",
        "bwd:f32:b2:h2/1:s5/8:d4:chunk3:causal:kvstarts:kvlens",
        "bwd:f32:b3:h2/1:s4/5:d3:sinks:cap2:causal",
        "bwd:f32:b2:h2:s4/5:d3:alibi:bias-f32/0,20,5:sinks",
        "bwd:f32:b1:h2:s4/5:d3:mask/0,0,5",
        "bwd:f32:b3:h2/1:s5/6:d4:bshd:packed:sinks",
        "bwd:f32:b1:h1:s6/7:d3:causal:ranges3:tree",
    };
    for (size_t t = 0; t < COUNT_OF(texts); t++) {
        const acr_problem p = canonical_of(texts[t]);
        const reference_request wanted = {&p, INPUT_NORMAL, 3, 0, LENGTHS_EDGES, 1};
        reference *ref = NULL;
        assert_ok(reference_create(&ref, &wanted));
        float *inputs[4];
        const void *const given[4] = {ref->buffers.q, ref->buffers.k, ref->buffers.v, ref->buffers.sinks};
        memcpy(inputs, given, sizeof inputs);
        for (int which = 0; which < 4; which++) {
            const int32_t *owner = which == 0 ? ref->q_owner : ref->kv_owner;
            const int64_t dims = which == 2 ? p.v_dim : p.qk_dim, rows = which == 0 ? ref->q_rows : ref->kv_rows;
            for (int64_t i = 0; i < ref->grads->elements[which]; i++) {
                if (which < 3 && owner && owner[i / dims % rows] < 0)
                    continue;
                if (which == 3 && !isfinite(inputs[3][i]))
                    continue;
                const double expected = difference(ref, &inputs[which][i]), got = ref->grads->expected[which][i];
                /* o and lse are stored as float32, and the difference is of the fourth order */
                if (!(fabs(got - expected) <= 3e-5 * (1 + fabs(expected))))
                    fail_msg("%s: gradient %d, element %d: %.9g, the difference says %.9g", texts[t], which, (int)i,
                             got, expected);
            }
        }
        reference_destroy(ref);
    }
}

/* A row that sees no key, keys that no row sees: exactly 0. */
static void what_is_not_seen_has_no_gradient(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    const acr_problem p = canonical_of("bwd:f32:b1:h1:s6/4:d4:causal:win2");
    const reference_request wanted = {&p, INPUT_NORMAL, 5, 0, LENGTHS_EDGES, 1};
    reference *ref = NULL;
    assert_ok(reference_create(&ref, &wanted));
    for (size_t k = 0; k < acr__kernel_count; k++) {
        const acr__kernel *kernel = acr__kernels[k];
        if (acr__why_not(kernel, &p, &acr__ctx_backend_device(ctx)->device))
            continue;
        execution *e = NULL;
        run_output output;
        assert_ok(execution_create(&e, ctx, kernel, &p, ref, false, 0, 0));
        assert_ok(execution_run(e));
        assert_ok(execution_collect(e, &output));
        for (int i = 0; i < 2 * 4; i++) /* the first two rows stand before the first key */
            assert_true(((const float *)output.grads[0])[i] == 0.0f);
        run_output_free(&output);
        execution_destroy(e);
    }
    reference_destroy(ref);
    acr_ctx_destroy(ctx);
}

/* The bits of a kernel's gradients with so many threads; to be freed. */
static run_output gradients_with(uint32_t threads, const acr__kernel *kernel, const acr_problem *p,
                                 const reference *ref)
{
    acr_ctx *ctx = cpu_ctx(threads);
    execution *e = NULL;
    run_output output;
    assert_ok(execution_create(&e, ctx, kernel, p, ref, false, 0, 0));
    assert_ok(execution_run(e));
    assert_ok(execution_collect(e, &output));
    execution_destroy(e);
    acr_ctx_destroy(ctx);
    return output;
}

static void bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    static const char *const texts[] = {"bwd:b2:h4/2:s150/170:d40:causal:sinks:cap30", "bwd:b3:h2:s200:d64:bshd:packed",
                                        "bwd:f32:b1:h6/1:s130:d32/48:win40"};
    acr_ctx *ctx = cpu_ctx(1);
    for (size_t t = 0; t < COUNT_OF(texts); t++) {
        const acr_problem p = canonical_of(texts[t]);
        const reference_request wanted = {&p, INPUT_NORMAL, 7, 0, LENGTHS_EDGES, 2};
        reference *ref = NULL;
        assert_ok(reference_create(&ref, &wanted));
        for (size_t k = 0; k < acr__kernel_count; k++) {
            if (acr__why_not(acr__kernels[k], &p, &acr__ctx_backend_device(ctx)->device))
                continue;
            run_output one = gradients_with(1, acr__kernels[k], &p, ref);
            const uint32_t counts[] = {2, 3, 7};
            for (size_t i = 0; i < COUNT_OF(counts); i++) {
                run_output more = gradients_with(counts[i], acr__kernels[k], &p, ref);
                for (int g = 0; g < 4; g++)
                    if (one.grads[g])
                        assert_memory_equal(one.grads[g], more.grads[g], one.grad_bytes[g]);
                run_output_free(&more);
            }
            run_output_free(&one);
        }
        reference_destroy(ref);
    }
    acr_ctx_destroy(ctx);
}

/* NaN and infinity in a row or a key reach the gradients of what sees it, and no others. */
static void what_is_not_finite_stays_where_it_is_seen(void **state)
{
    (void)state;
    enum {
        ROWS = 70,
        DIMS = 8
    };
    acr_ctx *ctx = cpu_ctx(1);
    const acr_problem p = canonical_of("bwd:f32:b1:h1:s70:d8:causal");
    const reference_request wanted = {&p, INPUT_NORMAL, 9, 0, LENGTHS_EDGES, 1};
    reference *ref = NULL;
    assert_ok(reference_create(&ref, &wanted));
    for (size_t k = 0; k < acr__kernel_count; k++) {
        const acr__kernel *kernel = acr__kernels[k];
        if (acr__why_not(kernel, &p, &acr__ctx_backend_device(ctx)->device))
            continue;
        run_output plain = gradients_with(1, kernel, &p, ref);
        float *inputs[4];
        const void *const given[4] = {ref->buffers.q, ref->buffers.k, ref->buffers.v, ref->buffers.d_o};
        memcpy(inputs, given, sizeof inputs);
        for (int i = 0; i < 4; i++) {
            const int at = 40; /* row or key */
            float kept[DIMS];
            memcpy(kept, inputs[i] + at * DIMS, sizeof kept);
            inputs[i][at * DIMS] = NAN;
            inputs[i][at * DIMS + 3] = INFINITY;
            run_output with = gradients_with(1, kernel, &p, ref);
            memcpy(inputs[i] + at * DIMS, kept, sizeof kept);
            const bool of_row = i == 0 || i == 3;
            for (int row = 0; row < ROWS; row++) {
                const bool sees = of_row ? row == at : row >= at, seen = of_row ? row <= at : row == at;
                const size_t bytes = DIMS * sizeof(float), first = (size_t)row * bytes;
                if (!sees)
                    assert_memory_equal((char *)with.grads[0] + first, (char *)plain.grads[0] + first, bytes);
                if (!seen && of_row) {
                    assert_memory_equal((char *)with.grads[1] + first, (char *)plain.grads[1] + first, bytes);
                    assert_memory_equal((char *)with.grads[2] + first, (char *)plain.grads[2] + first, bytes);
                }
            }
            assert_true(isnan(((float *)with.grads[0])[at * DIMS]));
            run_output_free(&with);
        }
        run_output_free(&plain);
    }
    reference_destroy(ref);
    acr_ctx_destroy(ctx);
}

/* A key of weight 0 that a row sees is not a key that it does not see: 0 times its infinity is NaN. */
static void infinities_of_weight_0_are_seen(void **state)
{
    (void)state;
    enum {
        ROWS = 70,
        DIMS = 8,
        KEY = 40
    };
    acr_ctx *ctx = cpu_ctx(1);
    const acr_problem p = canonical_of("bwd:f32:b1:h1:s70:d8:causal");
    const reference_request wanted = {&p, INPUT_NORMAL, 9, 0, LENGTHS_EDGES, 1};
    reference *ref = NULL;
    assert_ok(reference_create(&ref, &wanted));
    float *q, *k;
    memcpy(&q, &ref->buffers.q, sizeof q);
    memcpy(&k, &ref->buffers.k, sizeof k);
    for (int row = 0; row < ROWS; row++)
        q[row * DIMS + 3] = 1.0f;
    k[KEY * DIMS + 3] = -INFINITY; /* its scores, too */
    for (size_t i = 0; i < acr__kernel_count; i++) {
        const acr__kernel *kernel = acr__kernels[i];
        if (acr__why_not(kernel, &p, &acr__ctx_backend_device(ctx)->device))
            continue;
        run_output out = gradients_with(1, kernel, &p, ref);
        const float *dq = out.grads[0];
        for (int row = 0; row < ROWS; row++)
            for (int dim = 0; dim < DIMS; dim++) {
                const bool is_nan = isnan(dq[row * DIMS + dim]);
                if (is_nan != (row >= KEY && dim == 3))
                    fail_msg("%s: dq of row %d, dim %d: %f", kernel->name, row, dim, (double)dq[row * DIMS + dim]);
            }
        run_output_free(&out);
    }
    reference_destroy(ref);
    acr_ctx_destroy(ctx);
}

/* Of a large problem some rows and keys are judged, the others looked at for NaN. */
static void large_problems_are_judged_in_part(void **state)
{
    (void)state;
    enum {
        DIMS = 1024,
        ROWS = 1040,
        JUDGED = 8
    };
    acr_ctx *ctx = cpu_ctx(2);
    const acr_problem p = canonical_of("bwd:f32:b1:h1:s1040:d1024:causal:sinks");
    const reference_request wanted = {&p, INPUT_NORMAL, 5, JUDGED, LENGTHS_FULL, 2};
    reference *ref = NULL;
    assert_ok(reference_create(&ref, &wanted));
    const gradients *g = ref->grads;
    assert_non_null(g->rows);
    assert_non_null(g->keys);
    int64_t rows = 0, free_key = -1;
    for (int64_t i = 0; i < ROWS; i++) {
        rows += g->rows[i];
        free_key = g->keys[i] ? free_key : i;
    }
    assert_int_equal(rows, JUDGED);
    assert_true(g->rows[0] && g->rows[ROWS - 1] && g->keys[0] && g->keys[ROWS - 1]);
    acr_plan *plan = estimate_plan(ctx, "bwd:f32:b1:h1:s1040:d1024:causal:sinks");
    const acr__kernel *kernel = NULL;
    for (size_t k = 0; k < acr__kernel_count; k++)
        if (strcmp(acr__kernels[k]->name, acr_plan_kernel(plan)) == 0)
            kernel = acr__kernels[k];
    assert_non_null(kernel);
    run_output output = gradients_with(2, kernel, &p, ref);
    verdict v;
    conformance_judge(&v, ref, &output);
    assert_true(v.pass);
    float *const dk = output.grads[1], *const dq = output.grads[0];
    const float kept = dk[free_key * DIMS], last = dq[(int64_t)ROWS * DIMS - 1];
    dk[free_key * DIMS] = NAN;
    conformance_judge(&v, ref, &output);
    assert_false(v.pass);
    dk[free_key * DIMS] = kept;
    dq[(int64_t)ROWS * DIMS - 1] = 1.001f * last + 0.01f;
    conformance_judge(&v, ref, &output);
    assert_false(v.pass);
    run_output_free(&output);
    acr_plan_destroy(plan);
    reference_destroy(ref);
    acr_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formulas_equal_differences),      cmocka_unit_test(what_is_not_seen_has_no_gradient),
        cmocka_unit_test(bits_do_not_depend_on_threads),   cmocka_unit_test(what_is_not_finite_stays_where_it_is_seen),
        cmocka_unit_test(infinities_of_weight_0_are_seen), cmocka_unit_test(large_problems_are_judged_in_part),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
