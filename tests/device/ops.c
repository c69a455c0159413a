/* acr_merge and acr_append on the cuda backend against the cpu backend: random calls, bit for bit but for the bits of
 * NaNs, and against float64. Over the fake driver the PTX machine executes them.
 *
 *     ops [FIRST COUNT]      the cases with these numbers of both, 0 and 40 if not given
 *
 * Prints each failure and then "N cases passed, M failed"; exits 0 when all passed and there were any. */
#include <stdio.h>
#include <stdlib.h>

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
    for (uint64_t seed = first; seed < first + count; seed++) {
        check_case(&t, op_case_merge(seed, 1), seed, cpu, cuda);
        check_case(&t, op_case_append(seed, 1), seed, cpu, cuda);
    }
    acr_ctx_destroy(cpu);
    acr_ctx_destroy(cuda);
    printf("%d cases passed, %d failed\n", t.passed, t.failed);
    return t.failed == 0 && t.passed > 0 ? 0 : 1;
}
