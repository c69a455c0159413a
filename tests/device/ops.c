/* acr_merge and acr_append on the cuda backend against the cpu backend: random calls, bit for bit but for the bits of
 * NaNs, and against float64. Over the fake driver the PTX machine executes them.
 *
 *     ops [FIRST COUNT]      the cases with these numbers of both, 0 and 40 if not given
 *
 * And that no CTA of an append is without work.
 *
 * Prints each failure and then "N cases passed, M failed"; exits 0 when all passed and there were any. */
#include <stdio.h>
#include <stdlib.h>

#include "cuda/ops/ops.h"
#include "op_cases.h"

typedef struct tally {
    int passed, failed;
} tally;

static const char *difference_of(op_case *c, acr_ctx *cpu, acr_ctx *cuda)
{
    static char difference[256];
    if (op_case_run(c, cuda) != ACR_OK)
        return acr_last_error();
    if (!op_case_agrees(c, difference, sizeof difference))
        return difference;
    op_outcome on_cuda = op_case_keep(c);
    const char *found = NULL;
    if (op_case_run(c, cpu) != ACR_OK)
        found = acr_last_error();
    else if (!op_case_equals(c, &on_cuda, difference, sizeof difference))
        found = difference;
    op_outcome_free(&on_cuda);
    return found;
}

static void check_case(tally *t, op_case *c, uint64_t seed, acr_ctx *cpu, acr_ctx *cuda)
{
    const char *difference = difference_of(c, cpu, cuda);
    if (difference) {
        t->failed++;
        printf("FAIL case %llu, %s: %s\n", (unsigned long long)seed, op_case_text(c), difference);
        fflush(stdout);
    } else
        t->passed++;
    op_case_free(c);
}

/* ---- Launches ---- */

typedef struct shape {
    int32_t q_heads, kv_heads, qk_dim, v_dim, rope_dim; /* 0 heads: none */
    int32_t is_wide;
    acr_dtype dtype;
    uint32_t ctas; /* of a token, by hand */
} shape;

/* A thread's share of a token's work is a unit: two runs, of 16 bytes in wide rows. A CTA has 128 threads. */
static const shape shapes[] = {
    {32, 8, 128, 128, 128, 1, ACR_F16, 3},   /* 32 * 8 units of q, 8 * 8 of k, 4 * 16 of v */
    {0, 33, 128, 128, 0, 1, ACR_BF16, 5},    /* 17 * 16 of k and of v */
    {32, 8, 128, 128, 64, 1, ACR_F32, 6},    /* 32 * 8 + 16 * 16, 8 * 8 + 4 * 16, 4 * 32 */
    {128, 1, 576, 512, 64, 1, ACR_BF16, 38}, /* 128 * 4 + 64 * 64, 4 + 64, 64 */
    {4, 2, 20, 24, 20, 0, ACR_F16, 1},       /* 4 * 10, 2 * 10, 24 */
    {40, 7, 20, 24, 20, 0, ACR_F16, 5},      /* 40 * 10, 7 * 10, 4 * 24 */
};

static void check_launches(tally *t)
{
    static char memory; /* stands for a tensor: only whether there is one counts */
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        const shape *s = &shapes[i];
        append_args a = {.q = s->q_heads ? &memory : NULL,
                         .k = &memory,
                         .v = &memory,
                         .rows = 77,
                         .len = 77,
                         .q_heads = s->q_heads,
                         .kv_heads = s->kv_heads,
                         .qk_dim = s->qk_dim,
                         .v_dim = s->v_dim,
                         .rope_dim = s->rope_dim,
                         .dtype = (int32_t)s->dtype,
                         .is_wide = s->is_wide};
        append_count_units(&a);
        const acr__op_call call = {.op = ACR__OP_APPEND, .dtype = s->dtype, .append = &a};
        acr__launch launch;
        acr__cuda_op_shape(&launch, &call);
        if (launch.grid[0] == s->ctas && launch.grid[1] == 77 && launch.grid[2] == 1 && launch.block == 128) {
            t->passed++;
            continue;
        }
        t->failed++;
        printf("FAIL launch %d: {%u, %u, %u} of %u, not {%u, 77, 1} of 128\n", (int)i, launch.grid[0], launch.grid[1],
               launch.grid[2], launch.block, s->ctas);
    }
}

/* ---- The program ---- */

static acr_ctx *open_backend(const char *backend)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    acr_ctx *ctx = NULL;
    options.backend = backend;
    options.threads = backend[1] == 'p' ? 2 : 0;
    if (acr_ctx_create(&ctx, &options) != ACR_OK) {
        fprintf(stderr, "ops: %s: %s\n", backend, acr_last_error());
        exit(2);
    }
    return ctx;
}

int main(int argc, char **argv)
{
    const uint64_t first = argc > 2 ? strtoull(argv[1], NULL, 10) : 0,
                   count = argc > 2 ? strtoull(argv[2], NULL, 10) : 40;
    acr_ctx *cpu = open_backend("cpu"), *cuda = open_backend("cuda");
    tally t = {0, 0};
    check_launches(&t);
    for (uint64_t seed = first; seed < first + count; seed++) {
        check_case(&t, op_case_merge(seed, 1), seed, cpu, cuda);
        check_case(&t, op_case_append(seed, 1), seed, cpu, cuda);
    }
    acr_ctx_destroy(cpu);
    acr_ctx_destroy(cuda);
    printf("%d cases passed, %d failed\n", t.passed, t.failed);
    return t.failed == 0 && t.passed > 0 ? 0 : 1;
}
