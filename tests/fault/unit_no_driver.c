/* A machine whose CUDA driver does not load: "cuda" says why (REASON: the loader's own words, or that the build has no
 * CUDA), the default context is a cpu one. ctest runs this with LD_LIBRARY_PATH set to a folder where libcuda.so.1 is a
 * file that is no library, so that it holds on GPU machines too. */
#include "support.h"

static void cuda_says_why_it_is_not_there(void **state)
{
    (void)state;
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cuda";
    acr_ctx *const untouched = (acr_ctx *)(uintptr_t)64, *ctx = untouched;
    assert_fails(acr_ctx_create(&ctx, &options), ACR_NO_DEVICE, REASON);
    assert_ptr_equal(ctx, untouched);
}

static void the_cpu_takes_over(void **state)
{
    (void)state;
    acr_ctx *ctx = NULL;
    assert_ok(acr_ctx_create(&ctx, NULL));
    assert_string_equal(acr_ctx_backend(ctx), "cpu");
    const acr_problem p = problem_of("b1:h2:s16:d64");
    tensors t = tensors_make(&p, 1);
    assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
    tensors_free(&t);
    acr_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuda_says_why_it_is_not_there),
        cmocka_unit_test(the_cpu_takes_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
