/* integrations/candle and integrations/ggml on a cuda context against the same calls on a cpu context: tensors of the
 * device, terms that the functions translate, and what ggml's function refuses there. Over the fake driver the PTX
 * machine executes the kernels. Prints each failure and then "N cases passed, M failed"; exits 0 when all passed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "acromion_candle.h"
#include "acromion_ggml.h"
#include "backend.h"
#include "dtype.h"
#include "support.h"

enum {
    HEADS = 4,
    KV_HEADS = 2,
    DIM = 64,
    BATCH = 2,
    QUERIES = 37,
    KEYS = 70,
    COPIES_MAX = 8
};

/* A tensor as the host has it, and where a context has it. */
typedef struct copy {
    void *host, *placed;
    size_t bytes;
} copy;

typedef struct copies {
    acr__backend_device *device;
    copy of[COPIES_MAX];
    int count;
} copies;

static void stop(const char *what)
{
    fprintf(stderr, "engines: %s: %s\n", what, acr_last_error());
    exit(2);
}

/* A copy of the host's bytes on the device of t; NULL for NULL. */
static void *place(copies *t, void *host, size_t bytes)
{
    copy *const new = &t->of[t->count];
    if (!host)
        return NULL;
    *new = (copy){.host = host, .bytes = bytes};
    if (t->device->backend->mem_alloc(t->device, bytes, &new->placed) != ACR_OK ||
        t->device->backend->mem_upload(t->device, new->placed, host, bytes) != ACR_OK)
        stop("placing a tensor");
    t->count++;
    return new->placed;
}

/* The device's bytes back to the host, and everything freed. */
static void take_back(copies *t)
{
    if (t->device->backend->synchronize(t->device) != ACR_OK)
        stop("waiting");
    for (int i = 0; i < t->count; i++) {
        if (t->device->backend->mem_download(t->device, t->of[i].host, t->of[i].placed, t->of[i].bytes) != ACR_OK)
            stop("reading a tensor");
        t->device->backend->mem_free(t->device, t->of[i].placed);
    }
    t->count = 0;
}

/* ---- Inputs and outputs of both functions: f16, but for the log-sum-exp, slopes and sinks ---- */

static uint16_t q[BATCH * HEADS * QUERIES * DIM], k[BATCH * KV_HEADS * KEYS * DIM], v[BATCH * KV_HEADS * KEYS * DIM],
    mask[QUERIES * KEYS], out[2][BATCH * HEADS * QUERIES * DIM];
static float lse[2][BATCH * HEADS * QUERIES], heads[HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f};
static int32_t offsets_q[] = {0, 20, QUERIES + 20}, offsets_k[] = {0, 33, KEYS + 33};

static void fill(uint16_t *tensor, int64_t count, generator *g)
{
    for (int64_t i = 0; i < count; i++)
        acr__store_element(ACR_F16, tensor, i, next_normal(g));
}

/* Prints what differs; both hold f16 where width is 2. Elements of which neither call wrote any are 0 in both. */
static bool agree(const char *name, const void *cpu, const void *cuda, int64_t count, int width)
{
    for (int64_t i = 0; i < count; i++) {
        const acr_dtype type = width == 2 ? ACR_F16 : ACR_F32;
        const double a = acr__load_element(type, cpu, i), b = acr__load_element(type, cuda, i);
        if (!(fabs(a - b) <= 2e-3 * (1.0 + fabs(a)))) {
            printf("FAIL %s: element %lld is %g on cpu, %g on cuda\n", name, (long long)i, a, b);
            return false;
        }
    }
    return true;
}

/* ---- candle ---- */

typedef struct candle_case {
    const char *name;
    int causal, left, right, is_packed, has_slopes;
    float softcap;
} candle_case;

static acr_status call_candle(acr_ctx *ctx, const candle_case *c, int side)
{
    copies t = {.device = acr__ctx_backend_device(ctx)};
    const uint32_t row = HEADS * DIM, kv_row = KV_HEADS * DIM;
    const int64_t rows = c->is_packed ? offsets_q[2] : 0, kv_rows = c->is_packed ? offsets_k[2] : 0;
    void *const q_at = place(&t, q, sizeof q), *const k_at = place(&t, k, sizeof k),
                *const v_at = place(&t, v, sizeof v), *const o_at = place(&t, out[side], sizeof out[side]),
                *const lse_at = place(&t, lse[side], sizeof lse[side]),
                *const slopes_at = place(&t, c->has_slopes ? heads : NULL, sizeof heads);
    const int32_t *const q_offsets = place(&t, c->is_packed ? offsets_q : NULL, sizeof offsets_q),
                         *const k_offsets = place(&t, c->is_packed ? offsets_k : NULL, sizeof offsets_k);
    const acr_status status = acr_candle_run_mha(
        ctx, q_at, k_at, v_at, o_at, lse_at, slopes_at, q_offsets, k_offsets, QUERIES * row, KEYS * kv_row,
        KEYS * kv_row, QUERIES * row, 0, row, kv_row, kv_row, row, DIM, DIM, DIM, DIM, BATCH, HEADS, KV_HEADS, DIM, DIM,
        0.125f, QUERIES, KEYS, 128, 128, 0, c->causal, 1, c->left, c->right, c->softcap, rows, kv_rows, NULL);
    take_back(&t);
    return status;
}

static bool check_candle(acr_ctx *cpu, acr_ctx *cuda, const candle_case *c)
{
    memset(out, 0, sizeof out);
    memset(lse, 0, sizeof lse);
    if (call_candle(cpu, c, 0) != ACR_OK || call_candle(cuda, c, 1) != ACR_OK) {
        printf("FAIL %s: %s\n", c->name, acr_candle_error());
        return false;
    }
    return agree(c->name, out[0], out[1], sizeof out[0] / 2, 2) && agree(c->name, lse[0], lse[1], sizeof lse[0] / 4, 4);
}

/* ---- ggml ---- */

typedef struct ggml_case {
    const char *name;
    int has_mask, has_sinks;
    float softcap;
} ggml_case;

static acr_ggml_tensor tensor_of(void *data, int32_t type, int64_t rows, int64_t inner, int64_t outer, int64_t batch,
                                 bool is_inner_first)
{
    const size_t size = type == ACR_GGML_F32 ? 4 : 2;
    acr_ggml_tensor t = {.data = data, .type = type, .ne = {rows, inner, outer, batch}, .nb = {size}};
    t.nb[is_inner_first ? 1 : 2] = size * (size_t)rows;
    t.nb[is_inner_first ? 2 : 1] = size * (size_t)(rows * (is_inner_first ? inner : outer));
    t.nb[3] = size * (size_t)(rows * inner * outer);
    return t;
}

static acr_status call_ggml(acr_ctx *ctx, const ggml_case *c, int side)
{
    copies t = {.device = acr__ctx_backend_device(ctx)};
    acr_ggml_flash_attn op = {.scale = 0.125f, .logit_softcap = c->softcap};
    op.q = tensor_of(place(&t, q, sizeof q), ACR_GGML_F16, DIM, QUERIES, HEADS, BATCH, false);
    op.k = tensor_of(place(&t, k, sizeof k), ACR_GGML_F16, DIM, KEYS, KV_HEADS, BATCH, false);
    op.v = tensor_of(place(&t, v, sizeof v), ACR_GGML_F16, DIM, KEYS, KV_HEADS, BATCH, false);
    op.dst = tensor_of(place(&t, out[side], sizeof out[side]), ACR_GGML_F16, DIM, HEADS, QUERIES, BATCH, true);
    if (c->has_mask)
        op.mask = tensor_of(place(&t, mask, sizeof mask), ACR_GGML_F16, KEYS, QUERIES, 1, 1, true);
    if (c->has_sinks)
        op.sinks = tensor_of(place(&t, heads, sizeof heads), ACR_GGML_F32, HEADS, 1, 1, 1, true);
    const acr_status status = acr_ggml_flash_attn_ext(ctx, &op, NULL, 0, NULL);
    take_back(&t);
    return status;
}

static bool check_ggml(acr_ctx *cpu, acr_ctx *cuda, const ggml_case *c)
{
    memset(out, 0, sizeof out);
    if (call_ggml(cpu, c, 0) != ACR_OK || call_ggml(cuda, c, 1) != ACR_OK) {
        printf("FAIL %s: %s\n", c->name, acr_ggml_error());
        return false;
    }
    return agree(c->name, out[0], out[1], sizeof out[0] / 2, 2);
}

/* What would need a conversion, which the host makes, is refused before anything is launched. */
static bool check_refusal(acr_ctx *cuda)
{
    acr_ggml_flash_attn op = {.scale = 1.0f};
    size_t bytes = 0;
    op.q = tensor_of(q, ACR_GGML_F32, DIM, 1, 1, 1, true);
    op.k = op.v = tensor_of(k, ACR_GGML_F16, DIM, 1, 1, 1, true);
    op.dst = tensor_of(out[0], ACR_GGML_F32, DIM, 1, 1, 1, true);
    if (acr_ggml_scratch(cuda, &op, &bytes) == ACR_UNSUPPORTED && strstr(acr_ggml_error(), "f16") &&
        acr_ggml_flash_attn_ext(cuda, &op, lse, sizeof lse, NULL) == ACR_UNSUPPORTED)
        return true;
    printf("FAIL ggml, q in f32: not refused on cuda: %s\n", acr_ggml_error());
    return false;
}

static acr_ctx *open_backend(const char *backend)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    acr_ctx *ctx = NULL;
    options.backend = backend;
    if (acr_ctx_create(&ctx, &options) != ACR_OK)
        stop(backend);
    return ctx;
}

int main(void)
{
    static const candle_case candles[] = {
        {"candle", 0, -1, -1, 0, 0, 0.0f},
        {"candle, causal", 1, -1, 0, 0, 0, 0.0f},
        {"candle, packed and causal", 1, -1, 0, 1, 0, 0.0f},
        {"candle, a window, ALiBi and a soft cap", 0, 20, 5, 0, 1, 5.0f},
    };
    static const ggml_case ggmls[] = {{"ggml", 0, 0, 0.0f}, {"ggml, a mask, sinks and a soft cap", 1, 1, 4.0f}};
    acr_ctx *const cpu = open_backend("cpu"), *const cuda = open_backend("cuda");
    generator g = {17};
    int passed = 0, failed = 0;
    fill(q, sizeof q / 2, &g);
    fill(k, sizeof k / 2, &g);
    fill(v, sizeof v / 2, &g);
    for (int i = 0; i < QUERIES * KEYS; i++)
        acr__store_element(ACR_F16, mask, i, next_u64(&g) % 4 ? next_normal(&g) : -INFINITY);
    for (size_t i = 0; i < sizeof candles / sizeof candles[0]; i++)
        check_candle(cpu, cuda, &candles[i]) ? passed++ : failed++;
    for (size_t i = 0; i < sizeof ggmls / sizeof ggmls[0]; i++)
        check_ggml(cpu, cuda, &ggmls[i]) ? passed++ : failed++;
    check_refusal(cuda) ? passed++ : failed++;
    acr_ctx_destroy(cpu);
    acr_ctx_destroy(cuda);
    printf("%d cases passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}
