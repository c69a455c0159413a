/* A user of the library and of an integration: one key, so that the result is its value. */
#include <acromion_ggml.h>
#include <stdio.h>

int main(void)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cpu";
    acr_ctx *ctx = NULL;
    float q[64] = {0}, k[64] = {0}, v[64] = {0}, o[64];
    const acr_ggml_tensor row = {.type = ACR_GGML_F32, .ne = {64, 1, 1, 1}, .nb = {4, 256, 256, 256}};
    acr_ggml_flash_attn op = {.q = row, .k = row, .v = row, .dst = row, .scale = 1.0f};
    op.q.data = q, op.k.data = k, op.v.data = v, op.dst.data = o;
    v[63] = 3.0f;
    if (acr_ctx_create(&ctx, &options) || acr_ggml_flash_attn_ext(ctx, &op, NULL, 0, NULL)) {
        fprintf(stderr, "%s %s\n", acr_last_error(), acr_ggml_error());
        return 1;
    }
    printf("acromion %s: o[63] = %g\n", acr_version(), (double)o[63]);
    acr_ctx_destroy(ctx);
    return o[63] != 3.0f;
}
