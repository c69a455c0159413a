/* The lines that integrations/ggml/README.md has for a fork of ggml, in a stand-in for ggml: what they name is declared
 * here. The build takes them from the page: function.h is their function, lines.h what stands in the backend's own. The
 * result depends on each field that they pass on. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acromion_ggml.h"

enum {
    GGML_PREC_F32 = 10,
    KEYS = 3,
    DIM = 8,
    F32 = 0,
    F16 = 1
};

struct ggml_tensor {
    int type;
    void *buffer;
    int64_t ne[4];
    size_t nb[4];
    int32_t op_params[16];
    struct ggml_tensor *src[10];
    void *data;
};

struct ggml_compute_params {
    int ith, nth;
    size_t wsize;
    void *wdata;
};

static int ggml_flash_attn_ext_get_prec(const struct ggml_tensor *tensor)
{
    return tensor->op_params[3];
}

#define GGML_ABORT(...) (fprintf(stderr, __VA_ARGS__), abort())

#include "fork/function.h"

static void compute(acr_ctx *ctx, const struct ggml_compute_params *params, struct ggml_tensor *dst)
{
#include "fork/lines.h"
}

static struct ggml_tensor rows_of(int type, void *data, int64_t length, int64_t rows)
{
    struct ggml_tensor t = {.type = type, .ne = {length, rows, 1, 1}, .data = data};
    t.nb[0] = type == F32 ? 4 : 2;
    t.nb[1] = t.nb[0] * (size_t)length;
    t.nb[2] = t.nb[3] = t.nb[1] * (size_t)rows;
    return t;
}

/* In f16. */
static uint16_t power_of_two(int exponent)
{
    return (uint16_t)((exponent + 15) << 10);
}

int main(void)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cpu";
    acr_ctx *ctx = NULL;
    if (acr_ctx_create(&ctx, &options)) {
        fprintf(stderr, "%s\n", acr_last_error());
        return 1;
    }
    float q[DIM] = {1}, out[DIM] = {0}, sink = 0.25f;
    uint16_t k[KEYS][DIM] = {{power_of_two(0)}, {power_of_two(2)}, {power_of_two(4)}},
             v[KEYS][DIM] = {{power_of_two(0)}, {power_of_two(1)}, {power_of_two(2)}},
             mask[KEYS] = {0, power_of_two(-1), 0xfc00}; /* 0, 0.5, hidden */
    static char scratch[1 << 12];
    const struct ggml_compute_params params = {0, 1, sizeof scratch, scratch};
    const float numbers[] = {0.5f, 0.0f, 2.0f}; /* scale, max_bias, logit_softcap */
    struct ggml_tensor tq = rows_of(F32, q, DIM, 1), tk = rows_of(F16, k, DIM, KEYS), tv = rows_of(F16, v, DIM, KEYS),
                       tm = rows_of(F16, mask, KEYS, 1), ts = rows_of(F32, &sink, 1, 1),
                       dst = rows_of(F32, out, DIM, 1);
    struct ggml_tensor *const sources[] = {&tq, &tk, &tv, &tm, &ts};
    memcpy(dst.src, sources, sizeof sources);
    memcpy(dst.op_params, numbers, sizeof numbers);
    const double first = exp(2 * tanh(0.5 / 2)), second = exp(2 * tanh(2.0 / 2) + 0.5),
                 wanted = (first + 2 * second) / (first + second + exp(0.25));
    for (int exact = 0; exact < 2; exact++) {
        dst.op_params[3] = exact ? GGML_PREC_F32 : 0;
        out[0] = 0;
        compute(ctx, &params, &dst);
        if (!(fabs(out[0] - wanted) <= (exact ? 1e-6 : 1e-3) * wanted)) {
            fprintf(stderr, "exact %d: %.9g, not %.9g\n", exact, (double)out[0], wanted);
            return 1;
        }
    }
    printf("a fork's lines: %.7g\n", (double)out[0]);
    acr_ctx_destroy(ctx);
    return 0;
}
