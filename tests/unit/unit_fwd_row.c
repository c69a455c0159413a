/* fwd_row where the gate cannot see it: that its bits depend neither on the number of threads nor on the order in which
 * lanes come, and that keys are really shared among lanes. */
#include "support.h"

#include <stdlib.h>
#include <string.h>

static const acr__kernel *kernel_of(const acr_ctx *ctx, acr_dtype dtype)
{
    const acr__kernel *kernel;
    for (size_t i = 0; (kernel = cpu_kernel(ctx, i)); i++)
        if (kernel->dtype == dtype && strcmp(kernel->family, "fwd_row") == 0)
            return kernel;
    return NULL;
}

/* Runs lanes one after another, the last one first, and counts them. */
static void backwards(void *user, size_t count, acr_task task, void *task_arg)
{
    *(size_t *)user = count;
    for (size_t i = count; i > 0; i--)
        task(task_arg, i - 1);
}

/* All of them take a thread longer than what is shared at all, on any processor. */
static void keys_are_shared_and_bits_stay(void **state)
{
    (void)state;
    static const char *const problems[] = {"f32:b1:h1:s1/24000:d64:lse", "f16:b1:h4/2:s3/5000:d40:causal:lse",
                                           "bf16:b2:h2/1:s1/3000:d128:kvlens:lse",
                                           "f32:b1:h8:s2/9000:d16:causal:win2500:lse", "f32:b3:h8/1:s2/2000:d16:lse"};
    for (size_t i = 0; i < COUNT_OF(problems); i++) {
        const acr_problem p = problem_of(problems[i]);
        tensors t = tensors_make(&p, (uint64_t)i + 1);
        void *expected = malloc(t.o_bytes);
        float *lse = malloc(t.lse_bytes);
        size_t lanes = 0;
        for (uint32_t threads = 1; threads <= 7; threads += 2) {
            acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
            options.backend = "cpu";
            options.threads = threads;
            options.parallel_for = threads == 7 ? backwards : NULL;
            options.parallel_user = &lanes;
            acr_ctx *ctx = NULL;
            assert_ok(acr_ctx_create(&ctx, &options));
            const acr__kernel *kernel = kernel_of(ctx, p.dtype);
            assert_non_null(kernel);
            memset(t.o, 0x55, t.o_bytes);
            execute_once(ctx, kernel, &t);
            if (threads == 1) {
                memcpy(expected, t.o, t.o_bytes);
                memcpy(lse, t.lse, t.lse_bytes);
            } else {
                assert_memory_equal(expected, t.o, t.o_bytes);
                assert_memory_equal(lse, t.lse, t.lse_bytes);
            }
            acr_ctx_destroy(ctx);
        }
        assert_int_equal(lanes, 7); /* more than there are heads */
        free(expected);
        free(lse);
        tensors_free(&t);
    }
}

/* Many sequences and a long row of keys: what lanes share stays within what the head comment of fwd_row.c says. */
static void partial_results_are_bounded(void **state)
{
    (void)state;
    static const struct {
        const char *problem;
        size_t most_bytes;
    } rows[] = {{"f16:b1:h8:s1/512:d128", 0},
                {"f16:b32:h32/8:s1/8192:d128", 0},
                {"f16:b32:h32/8:s1/131072:d128", 64u << 20},
                {"f16:b1:h32:s4096/131072:d128", 64u << 20},
                {"f16:b4096:h8:s1/1048576:d128", 0}};
    acr_ctx *ctx = cpu_ctx(1);
    const acr__kernel *kernel = kernel_of(ctx, ACR_F16);
    assert_non_null(kernel);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        const acr_problem p = canonical_of(rows[i].problem);
        assert_true(kernel->shared(&p) <= rows[i].most_bytes);
    }
    acr_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_are_shared_and_bits_stay),
        cmocka_unit_test(partial_results_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
