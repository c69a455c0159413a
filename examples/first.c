/* The first program: causal attention on the CPU. cc first.c $(pkg-config --cflags --libs acromion) */
#include <acromion.h>
#include <stdio.h>

#define ELEMS (2 * 8 * 512 * 64) /* batch, heads, length, dim */
static _Alignas(64) float q[ELEMS], k[ELEMS], v[ELEMS], o[ELEMS];

int main(void)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cpu"; /* NULL: the GPU where there is one, and then the pointers are device memory */
    acr_ctx *ctx = NULL;
    acr_problem problem = ACR_PROBLEM_INIT;
    acr_buffers buffers = {.size = sizeof buffers, .q = q, .k = k, .v = v, .o = o};
    for (int i = 0; i < ELEMS; i++)
        v[i] = 1.0f; /* whatever the weights are, the average of ones is one */
    if (acr_problem_parse(&problem, "f32:b2:h8:s512:d64:causal", NULL) || acr_ctx_create(&ctx, &options) ||
        acr_forward(ctx, &problem, &buffers, NULL)) {
        fprintf(stderr, "%s\n", acr_last_error());
        return 1;
    }
    printf("acromion %s on %s: o[0] = %g\n", acr_version(), acr_ctx_device(ctx), (double)o[0]);
    acr_ctx_destroy(ctx);
    return 0;
}
