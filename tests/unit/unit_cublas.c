/* The unfused baseline over a fake cuBLAS and the fake driver: what it is asked to multiply, that it may be captured,
 * what it refuses, and that a missing library is named. The fake driver runs no kernels, so here the softmax leaves its
 * scores as they are, and the output must be the product of three matrices; the softmax itself runs on GPUs only, where
 * its output is judged like every peer's. */
#include "support.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench/peers/cublas.h"
#include "fakes/fake_cublas.h"
#include "ptxvm/driver/fake_driver.h"

static const char *library; /* the fake's path */

static acr_ctx *cuda_ctx(void)
{
    acr_ctx *ctx = NULL;
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cuda";
    assert_ok(acr_ctx_create(&ctx, &options));
    return ctx;
}

static fake_cublas_state *fake_state(void)
{
    fake_cublas_state *(*get)(void) = NULL;
    void *handle = dlopen(library, RTLD_NOW), *symbol = handle ? dlsym(handle, "fake_cublas") : NULL;
    assert_non_null(symbol);
    memcpy(&get, &symbol, sizeof get);
    return get();
}

/* ---- One problem ---- */

enum {
    BATCH = 2,
    Q_HEADS = 4,
    KV_HEADS = 2,
    Q_LEN = 3,
    KV_LEN = 5,
    DIM = 8,
    V_DIM = 4
};

typedef struct inputs {
    uint16_t q[BATCH * Q_HEADS * Q_LEN * DIM], k[BATCH * KV_HEADS * KV_LEN * DIM], v[BATCH * KV_HEADS * KV_LEN * V_DIM];
} inputs;

static void fill(uint16_t *elements, size_t count, generator *g)
{
    for (size_t i = 0; i < count; i++)
        acr__store_element(ACR_F16, elements, (int64_t)i, next_normal(g));
}

static peer_problem problem_over(const inputs *in, int32_t mask)
{
    return (peer_problem){.batch = BATCH,
                          .q_heads = Q_HEADS,
                          .kv_heads = KV_HEADS,
                          .q_len = Q_LEN,
                          .kv_len = KV_LEN,
                          .qk_dim = DIM,
                          .v_dim = V_DIM,
                          .dtype = (int32_t)ACR_F16,
                          .mask = mask,
                          .sets = 2,
                          .scale = 0.25,
                          .q = in->q,
                          .k = in->k,
                          .v = in->v};
}

static double half(const uint16_t *elements, int64_t index)
{
    return acr__load_element(ACR_F16, elements, index);
}

/* scale * q k' v of one output element, query heads sharing their key head. */
static double expected(const inputs *in, int batch, int head, int row, int d)
{
    const int64_t kv = (int64_t)batch * KV_HEADS + head / (Q_HEADS / KV_HEADS);
    const int64_t q_row = ((int64_t)batch * Q_HEADS + head) * Q_LEN + row;
    double out = 0;
    for (int key = 0; key < KV_LEN; key++) {
        double score = 0;
        for (int i = 0; i < DIM; i++)
            score += half(in->q, q_row * DIM + i) * half(in->k, (kv * KV_LEN + key) * DIM + i);
        out += 0.25 * score * half(in->v, (kv * KV_LEN + key) * V_DIM + d);
    }
    return out;
}

static void check_output(const peer_provider *p, const inputs *in)
{
    uint16_t o[BATCH * Q_HEADS * Q_LEN * V_DIM];
    char text[PEER_TEXT_BYTES] = "";
    assert_int_equal(p->output(0, o, sizeof o, text), 0);
    for (int batch = 0, i = 0; batch < BATCH; batch++)
        for (int head = 0; head < Q_HEADS; head++)
            for (int row = 0; row < Q_LEN; row++)
                for (int d = 0; d < V_DIM; d++, i++)
                    assert_true(fabs(half(o, i) - expected(in, batch, head, row, d)) < 0.02);
    assert_int_equal(p->output(0, o, sizeof o - 2, text), -1);
}

static int use_fake(void **state)
{
    (void)state;
    setenv("ACROMION_CUBLAS", library, 1);
    fake_cuda_reset();
    return 0;
}

static void the_products_are_those_of_attention(void **state)
{
    (void)state;
    static inputs in;
    generator g = {1};
    char text[PEER_TEXT_BYTES] = "";
    fill(in.q, COUNT_OF(in.q), &g);
    fill(in.k, COUNT_OF(in.k), &g);
    fill(in.v, COUNT_OF(in.v), &g);
    acr_ctx *ctx = cuda_ctx();
    const long alive = fake_cuda_count().allocations;
    const peer_provider *p = NULL;
    assert_ok(cublas_open(&p, ctx));
    assert_string_equal(p->version, "cuBLAS 13.1.0");
    assert_null(p->capture);
    const peer_problem problem = problem_over(&in, PEER_MASK_BOTTOM_RIGHT);
    assert_int_equal(p->begin(&problem, text), 0);
    for (int32_t set = 0; set < problem.sets; set++) {
        assert_int_equal(p->enqueue(0, set, NULL, text), 0);
        check_output(p, &in);
    }
    /* What the softmax was told: scores and weights in one place, all its rows, the mask. */
    const fake_cuda_launch launch = fake_cuda_last_launch();
    fwd_args args;
    memcpy(&args, launch.args, sizeof args);
    assert_ptr_equal(args.q, args.o);
    assert_int_equal(args.mask, FWD_MASK_BOTTOM_RIGHT);
    assert_int_equal(args.kv_len, KV_LEN);
    assert_int_equal(launch.grid[0], 1);
    assert_int_equal(launch.grid[1], Q_HEADS);
    assert_int_equal(launch.grid[2], BATCH);
    /* The other peer keeps scores in float32, apart from the weights. */
    assert_int_equal(p->enqueue(1, 0, NULL, text), 0);
    memcpy(&args, fake_cuda_last_launch().args, sizeof args);
    assert_ptr_not_equal(args.q, args.o);
    assert_int_equal(fake_state()->without_workspace, 0);
    p->end();
    cublas_close();
    assert_int_equal(fake_state()->handles, 0);
    assert_int_equal(fake_cuda_count().allocations, alive);
    acr_ctx_destroy(ctx);
    assert_int_equal(fake_cuda_count().misuses, 0);
}

static void failures_are_reported(void **state)
{
    (void)state;
    static inputs in;
    char text[PEER_TEXT_BYTES] = "";
    acr_ctx *ctx = cuda_ctx();
    const peer_provider *p = NULL;
    assert_ok(cublas_open(&p, ctx));
    peer_problem problem = problem_over(&in, PEER_MASK_NONE);
    assert_int_equal(p->begin(&problem, text), 0);
    fake_state()->fail_products = 1;
    assert_int_equal(p->enqueue(0, 0, NULL, text), -1);
    assert_non_null(strstr(text, "cublasGemmStridedBatchedEx failed with cuBLAS status 13"));
    fake_state()->fail_products = 0;
    p->end();
    problem.bshd = 1;
    assert_int_equal(p->begin(&problem, text), -1);
    assert_non_null(strstr(text, "bhsd"));
    p->end();
    problem.bshd = 0;
    problem.dtype = (int32_t)ACR_F32;
    assert_int_equal(p->begin(&problem, text), -1);
    assert_non_null(strstr(text, "f16 and bf16"));
    p->end();
    problem = problem_over(&in, PEER_MASK_NONE);
    problem.q_len = problem.kv_len = 1 << 18;
    assert_int_equal(p->begin(&problem, text), -1);
    assert_non_null(strstr(text, "more than half of the memory"));
    p->end();
    cublas_close();
    acr_ctx_destroy(ctx);
}

static void a_missing_library_is_named(void **state)
{
    (void)state;
    acr_ctx *ctx = cuda_ctx();
    const peer_provider *p = NULL;
    setenv("ACROMION_CUBLAS", "/nowhere/libcublas.so", 1);
    assert_fails(cublas_open(&p, ctx), ACR_UNSUPPORTED, "/nowhere/libcublas.so");
    setenv("ACROMION_CUBLAS", "libm.so.6", 1); /* a library that is another */
    assert_fails(cublas_open(&p, ctx), ACR_UNSUPPORTED, "libm.so.6 lacks cublasCreate_v2");
    assert_null(p);
    assert_int_equal(fake_cuda_count().allocations, 0);
    acr_ctx_destroy(ctx);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(the_products_are_those_of_attention, use_fake),
        cmocka_unit_test_setup(failures_are_reported, use_fake),
        cmocka_unit_test_setup(a_missing_library_is_named, use_fake),
    };
    if (argc != 2) {
        fprintf(stderr, "usage: unit_cublas FAKE_LIBRARY\n");
        return 2;
    }
    library = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
