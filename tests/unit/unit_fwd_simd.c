/* fwd_simd where the gate cannot see it: the exponential and the hyperbolic tangent to a fraction of what the gate
 * allows, the rounding of outputs at ties, and that hidden keys are not read at all. */
#include "support.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static const acr__kernel *kernel_of(const acr_ctx *ctx, acr_dtype dtype, size_t number)
{
    const acr__kernel *kernel;
    for (size_t i = 0; (kernel = cpu_kernel(ctx, i)); i++)
        if (kernel->dtype == dtype && strcmp(kernel->family, "fwd_simd") == 0 && number-- == 0)
            return kernel;
    return NULL;
}

/* ---- The exponential --------------------------------------------------------------------------------------------- */

enum {
    ROWS = 20000,
    TERMS = 3
};

/* Solves the normal equations of a fit by elimination; they are well conditioned. */
static void solve(double a[TERMS][TERMS + 1], double x[TERMS])
{
    for (int i = 0; i < TERMS; i++)
        for (int row = i + 1; row < TERMS; row++) {
            const double factor = a[row][i] / a[i][i];
            for (int column = i; column <= TERMS; column++)
                a[row][column] -= factor * a[i][column];
        }
    for (int i = TERMS - 1; i >= 0; i--) {
        x[i] = a[i][TERMS];
        for (int column = i + 1; column < TERMS; column++)
            x[i] -= a[i][column] * x[column];
        x[i] /= a[i][i];
    }
}

/* Rows see two keys, with scores 0 and x, and values 0 and 1: the output is e^x / (1 + e^x). Its relative errors are
 * roundings, which have no trend over the fraction f of the exponent to base 2; a wrong coefficient of the polynomial
 * in f has. The fit 1, f, f^2 tells an error of 8 units in the last place of the first two coefficients from none. */
static void check_exponential(acr_ctx *ctx, const acr__kernel *kernel)
{
    const acr_problem p = {.size = sizeof p,
                           .dtype = ACR_F32,
                           .batch = 1,
                           .q_heads = 1,
                           .q_len = ROWS,
                           .kv_len = 2,
                           .qk_dim = 1,
                           .alignment = 4,
                           .scale = 1.0f};
    tensors t = tensors_make(&p, 1);
    float *q = t.q, *k = t.k, *v = t.v;
    for (int i = 0; i < ROWS; i++)
        q[i] = -3.0f - 3.0f * (float)i / ROWS;
    k[0] = v[0] = 0.0f;
    k[1] = v[1] = 1.0f;
    execute_once(ctx, kernel, &t);
    double equations[TERMS][TERMS + 1] = {{0}}, fit[TERMS], worst = 0;
    for (int i = 0; i < ROWS; i++) {
        const double exponent = (double)q[i] * (double)(float)1.44269504088896340736, e = exp2(exponent);
        const double f = exponent - nearbyint(exponent), basis[TERMS] = {1.0, f, f * f};
        const double error = (double)((const float *)t.o)[i] / (e / (1.0 + e)) - 1.0;
        worst = fmax(worst, fabs(error));
        for (int row = 0; row < TERMS; row++) {
            for (int column = 0; column < TERMS; column++)
                equations[row][column] += basis[row] * basis[column];
            equations[row][TERMS] += basis[row] * error;
        }
    }
    solve(equations, fit);
    if (!(worst < 6e-7) || fabs(fit[0]) > 3e-8 || fabs(fit[1]) > 4e-8 || fabs(fit[2]) > 8e-8)
        fail_msg("%s: relative error up to %.2g, fit %.2g + %.2g f + %.2g f^2", kernel->name, worst, fit[0], fit[1],
                 fit[2]);
    tensors_free(&t);
}

static void exponentials_have_no_trend(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    const acr__kernel *kernel;
    size_t checked = 0;
    for (; (kernel = kernel_of(ctx, ACR_F32, checked)); checked++)
        check_exponential(ctx, kernel);
    assert_true(checked > 0);
    acr_ctx_destroy(ctx);
}

/* ---- The hyperbolic tangent ------------------------------------------------------------------------------------- */

/* With one key and a cap of 1 the log-sum-exp is tanh(q). */
static void check_tanh(acr_ctx *ctx, const acr__kernel *kernel)
{
    acr_problem p = problem_of("f32:b1:h1:s20000/1:d1:lse:cap1");
    p.scale = 1.0f;
    tensors t = tensors_make(&p, 1);
    float *q = t.q;
    for (int i = 0; i < ROWS; i++)
        q[i] = ldexpf(i % 2 ? 1.0f + (float)i / ROWS : -1.0f - (float)i / ROWS, i % 28 - 20); /* to 2^8 */
    ((float *)t.k)[0] = 1.0f;
    q[0] = INFINITY;
    q[1] = 0.0f;
    execute_once(ctx, kernel, &t);
    for (int i = 0; i < ROWS; i++) {
        const double expected = tanh((double)q[i]), error = fabs((double)t.lse[i] - expected);
        if (!(error <= 4 * 0x1p-24 * fabs(expected)))
            fail_msg("%s: tanh(%a) is %a, not %a", kernel->name, (double)q[i], (double)t.lse[i], expected);
    }
    tensors_free(&t);
}

static void tanh_is_exact_to_a_few_units(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    const acr__kernel *kernel;
    size_t checked = 0;
    for (; (kernel = kernel_of(ctx, ACR_F32, checked)); checked++)
        check_tanh(ctx, kernel);
    assert_true(checked > 0);
    acr_ctx_destroy(ctx);
}

/* ---- Hidden keys ------------------------------------------------------------------------------------------------- */

enum {
    ROW_BYTES = 65536,  /* of k and v: a page or more on every machine */
    HIDDEN_FIRST = 384, /* a multiple of every kernel's tile */
    HIDDEN_END = 768,
    KEYS = 1152
};

/* Runs one query whose hidden keys lie in memory that cannot be read: a kernel that loads them dies. */
static void check_hidden(acr_ctx *ctx, const acr__kernel *kernel, const char *terms, const acr_buffers *buffers)
{
    const size_t row_bytes = ROW_BYTES, bytes = KEYS * row_bytes;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    assert_int_equal(mprotect(memory + HIDDEN_FIRST * row_bytes, (HIDDEN_END - HIDDEN_FIRST) * row_bytes, PROT_NONE),
                     0);
    const int row = ROW_BYTES / acr__dtype_bytes(kernel->dtype);
    char text[ACR_PROBLEM_TEXT_MAX];
    snprintf(text, sizeof text, "%s:b1:h1:s1/%d:d16:%s:ks=0,0,%d:vs=0,0,%d", acr__dtype_text(kernel->dtype), KEYS,
             terms, row, row);
    const acr_problem p = canonical_of(text);
    char q[64] = {0}, o[64];
    acr_buffers b = *buffers;
    b.q = q;
    b.k = b.v = memory;
    b.o = o;
    acr_plan *plan;
    assert_ok(acr__plan_create_forced(&plan, ctx, &p, kernel));
    const size_t workspace_bytes = acr_plan_workspace(plan);
    void *workspace = aligned_alloc(256, (workspace_bytes + 255) / 256 * 256);
    assert_ok(acr_execute(plan, &b, workspace, workspace_bytes, NULL));
    free(workspace);
    acr_plan_destroy(plan);
    munmap(memory, bytes);
}

static void hidden_keys_are_not_read(void **state)
{
    (void)state;
    uint8_t mask[KEYS];
    uint16_t bias[KEYS] = {0};
    for (int key = 0; key < KEYS; key++) {
        const bool hidden = key >= HIDDEN_FIRST && key < HIDDEN_END;
        mask[key] = !hidden;
        bias[key] = hidden ? 0xfc00 : 0; /* -infinity */
    }
    const int32_t start[] = {HIDDEN_END}, ranges[] = {HIDDEN_END, KEYS, HIDDEN_END + 1, KEYS};
    acr_buffers plain = ACR_BUFFERS_INIT, masked = ACR_BUFFERS_INIT, biased = ACR_BUFFERS_INIT,
                started = ACR_BUFFERS_INIT, ranged = ACR_BUFFERS_INIT;
    masked.bias = mask;
    biased.bias = bias;
    started.kv_starts = start;
    ranged.ranges = ranges;
    acr_ctx *ctx = cpu_ctx(1);
    const acr__kernel *kernel;
    size_t checked = 0;
    for (; (kernel = cpu_kernel(ctx, checked)); checked++) {
        check_hidden(ctx, kernel, "mask/0,0,0", &masked);
        check_hidden(ctx, kernel, "bias-f16/0,0,0", &biased);
        check_hidden(ctx, kernel, "kvstarts", &started);
        check_hidden(ctx, kernel, "chunk384", &plain);
        check_hidden(ctx, kernel, "win384:ranges2", &ranged);
    }
    assert_true(checked > 0);
    acr_ctx_destroy(ctx);
}

/* ---- Lowest biases ----------------------------------------------------------------------------------------------- */

enum {
    LOWEST_KEYS = 700, /* of several tiles */
    LOWEST_DIMS = 24,
    LOWEST_ROWS = 3,
    PLAIN_KEY = 411,
    HIDDEN_KEY = 5
};

/* The mean of V over keys [0, LOWEST_KEYS) but one. */
static double mean_value(const tensors *t, int64_t dim, int64_t without)
{
    double sum = 0;
    int64_t count = 0;
    for (int64_t key = 0; key < LOWEST_KEYS; key++)
        if (key != without) {
            sum += acr__load_element(t->problem.dtype, t->v, element_of(&t->problem.v, 0, 0, key, dim));
            count++;
        }
    return sum / (double)count;
}

/* The lowest number of a type as a mask, which is what users of PyTorch write: the keys of row 0 have nothing else and
 * weigh the same; row 1 has one key without a bias, which takes all; row 2 has a hidden one. */
static void check_lowest(acr_ctx *ctx, const acr__kernel *kernel, acr_dtype bias_dtype, uint64_t seed)
{
    char text[ACR_PROBLEM_TEXT_MAX];
    snprintf(text, sizeof text, "%s:b1:h1:s%d/%d:d%d:lse:cap30:bias-%s/0,0,%d", acr__dtype_text(kernel->dtype),
             LOWEST_ROWS, LOWEST_KEYS, LOWEST_DIMS, acr__dtype_text(bias_dtype), LOWEST_KEYS);
    const acr_problem p = problem_of(text);
    tensors t = tensors_make(&p, seed);
    float bias[LOWEST_ROWS * LOWEST_KEYS]; /* or twice as many bf16 */
    const double lowest = bias_dtype == ACR_BF16 ? -0x1.fep127 : -(double)FLT_MAX;
    for (int64_t i = 0; i < (int64_t)LOWEST_ROWS * LOWEST_KEYS; i++)
        acr__store_element(bias_dtype, bias, i, lowest);
    acr__store_element(bias_dtype, bias, LOWEST_KEYS + PLAIN_KEY, 0);
    acr__store_element(bias_dtype, bias, 2 * LOWEST_KEYS + HIDDEN_KEY, -INFINITY);
    t.buffers.bias = bias;
    execute_once(ctx, kernel, &t);
    for (int64_t dim = 0; dim < LOWEST_DIMS; dim++) {
        const double expected[LOWEST_ROWS] = {
            mean_value(&t, dim, -1),
            acr__load_element(t.problem.dtype, t.v, element_of(&t.problem.v, 0, 0, PLAIN_KEY, dim)),
            mean_value(&t, dim, HIDDEN_KEY)};
        for (int64_t row = 0; row < LOWEST_ROWS; row++) {
            const double got = o_at(&t, 0, 0, row, dim);
            if (!(fabs(got - expected[row]) <= 1e-4 + 0x1p-8 * fabs(expected[row])))
                fail_msg("%s: %s, row %d: %g, expected %g", kernel->name, text, (int)row, got, expected[row]);
        }
    }
    assert_true(t.lse[0] <= -2e38f && isfinite(t.lse[0]) && t.lse[2] <= -2e38f && isfinite(t.lse[2]));
    tensors_free(&t);
}

static void lowest_biases_weigh_keys_evenly(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    const acr__kernel *kernel;
    size_t checked = 0;
    for (; (kernel = cpu_kernel(ctx, checked)); checked++) {
        check_lowest(ctx, kernel, ACR_F32, checked + 1);
        check_lowest(ctx, kernel, ACR_BF16, checked + 1);
    }
    assert_true(checked > 0);
    acr_ctx_destroy(ctx);
}

/* ---- Ties -------------------------------------------------------------------------------------------------------- */

/* Two keys with one score and neighbouring values: the output lies half way between them, where the even one is to be
 * taken. `begin` and `last` are the bit patterns of the least and the largest number. */
static void check_ties(acr_ctx *ctx, const acr__kernel *kernel, unsigned begin, uint16_t last)
{
    enum {
        DIMS = 64
    };
    acr_problem p = problem_of("b1:h1:s1/2:d64");
    p.dtype = kernel->dtype;
    tensors t = tensors_make(&p, 1);
    uint16_t *q = t.q, *v = t.v;
    const uint16_t *o = t.o;
    memset(q, 0, DIMS * sizeof *q);
    const unsigned step = 37; /* odd: even and odd numbers, normal and not */
    for (unsigned first = begin; first + DIMS * step < last; first += DIMS * step) {
        for (unsigned d = 0; d < DIMS; d++) {
            const uint16_t sign = d % 3 == 0 ? 0x8000 : 0;
            v[d] = (uint16_t)(sign | (first + d * step));
            v[DIMS + d] = (uint16_t)(v[d] + 1);
        }
        execute_once(ctx, kernel, &t);
        for (unsigned d = 0; d < DIMS; d++)
            if (o[d] != (uint16_t)(v[d] + (v[d] & 1)))
                fail_msg("%s: half way between %04x and %04x became %04x", kernel->name, v[d], v[DIMS + d], o[d]);
    }
    tensors_free(&t);
}

static void ties_go_to_even(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    const acr__kernel *kernel;
    size_t checked = 0;
    for (size_t i = 0; (kernel = kernel_of(ctx, ACR_F16, i)); i++, checked++)
        check_ties(ctx, kernel, 0, 0x7bff);
    for (size_t i = 0; (kernel = kernel_of(ctx, ACR_BF16, i)); i++, checked++)
        /* Below the end of float32, where the sum of two stays finite; the products of bf16 take what is not normal
         * for 0. */
        check_ties(ctx, kernel, strstr(kernel->name, "_avx512bf16") ? 0x100 : 0, 0x7e00);
    assert_true(checked > 0);
    acr_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exponentials_have_no_trend),
        cmocka_unit_test(tanh_is_exact_to_a_few_units),
        cmocka_unit_test(hidden_keys_are_not_read),
        cmocka_unit_test(lowest_biases_weigh_keys_evenly),
        cmocka_unit_test(ties_go_to_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
