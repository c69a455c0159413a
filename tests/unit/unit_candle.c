/* integrations/candle: run_mha's arguments against FlashAttention's definition in float64, and what is refused. */
#include <math.h>
#include <stdlib.h>

#include "acromion_candle.h"
#include "dtype.h"
#include "support.h"

/* The arguments of one call, so that tests change one at a time. */
typedef struct arguments {
    const void *q, *k, *v;
    void *o;
    float *lse;
    const float *slopes;
    const int32_t *cu_q, *cu_k;
    uint32_t batch_strides[4], slopes_stride, row_strides[4], head_strides[4]; /* q, k, v, o */
    uint32_t b, h, h_k, d, seqlen_q, seqlen_k;
    float scale, softcap;
    int is_bf16, is_causal, unpadded_lse, left, right;
    int64_t total_q, total_k;
} arguments;

static acr_status call(acr_ctx *ctx, const arguments *a)
{
    return acr_candle_run_mha(
        ctx, a->q, a->k, a->v, a->o, a->lse, a->slopes, a->cu_q, a->cu_k, a->batch_strides[0], a->batch_strides[1],
        a->batch_strides[2], a->batch_strides[3], a->slopes_stride, a->row_strides[0], a->row_strides[1],
        a->row_strides[2], a->row_strides[3], a->head_strides[0], a->head_strides[1], a->head_strides[2],
        a->head_strides[3], a->b, a->h, a->h_k, a->d, (a->d + 31) / 32 * 32, a->scale, a->seqlen_q, a->seqlen_k,
        (a->seqlen_q + 127) / 128 * 128, (a->seqlen_k + 127) / 128 * 128, a->is_bf16, a->is_causal, a->unpadded_lse,
        a->left, a->right, a->softcap, a->total_q, a->total_k, NULL);
}

/* Tensors [rows, heads, d] of all entries in one piece, a head's elements padded by 3. */
static void *make_tensor(generator *g, acr_dtype type, int64_t rows, int64_t heads, int64_t d)
{
    uint16_t *tensor = malloc((size_t)(rows * heads * (d + 3)) * sizeof *tensor);
    assert_non_null(tensor);
    for (int64_t i = 0; i < rows * heads * (d + 3); i++)
        acr__store_element(type, tensor, i, next_normal(g));
    return tensor;
}

static arguments random_arguments(generator *g)
{
    static const uint32_t dims[] = {8, 40, 64, 128}, groups[] = {1, 2, 4};
    arguments a = {
        .b = 1 + (uint32_t)(next_u64(g) % 3),
        .h_k = 1 + (uint32_t)(next_u64(g) % 2),
        .d = dims[next_u64(g) % 4],
        .seqlen_q = 1 + (uint32_t)(next_u64(g) % 40),
        .seqlen_k = 1 + (uint32_t)(next_u64(g) % 60),
        .scale = 0.2f,
        .softcap = next_u64(g) % 3 ? 0.0f : 5.0f,
        .is_bf16 = (int)(next_u64(g) % 2),
        .left = (int)(next_u64(g) % 20) - 5,
        .right = (int)(next_u64(g) % 10) - 5,
        .unpadded_lse = 1,
    };
    a.left = a.left < 0 ? -1 : a.left;
    a.right = a.right < 0 ? -1 : a.right;
    a.is_causal = a.left < 0 && a.right == 0;
    a.h = a.h_k * groups[next_u64(g) % 3];
    const bool packed = next_u64(g) % 2;
    const acr_dtype type = a.is_bf16 ? ACR_BF16 : ACR_F16;
    const int64_t q_rows = (int64_t)a.b * a.seqlen_q, k_rows = (int64_t)a.b * a.seqlen_k;
    a.q = make_tensor(g, type, q_rows, a.h, a.d);
    a.k = make_tensor(g, type, k_rows, a.h_k, a.d);
    a.v = make_tensor(g, type, k_rows, a.h_k, a.d);
    a.o = make_tensor(g, type, q_rows, a.h, a.d);
    a.lse = malloc((size_t)(q_rows * a.h) * sizeof *a.lse);
    assert_non_null(a.lse);
    for (int i = 0; i < 4; i++) {
        const bool of_q = i == 0 || i == 3;
        a.head_strides[i] = a.d + 3;
        a.row_strides[i] = (of_q ? a.h : a.h_k) * (a.d + 3);
        a.batch_strides[i] = packed ? 0 : (of_q ? a.seqlen_q : a.seqlen_k) * a.row_strides[i];
    }
    if (packed) { /* lengths from 1 to the longest, one after another */
        int32_t *cu_q = calloc(a.b + 1, sizeof *cu_q), *cu_k = calloc(a.b + 1, sizeof *cu_k);
        assert_non_null(cu_q);
        assert_non_null(cu_k);
        for (uint32_t b = 0; b < a.b; b++) {
            cu_q[b + 1] = cu_q[b] + 1 + (int32_t)(next_u64(g) % a.seqlen_q);
            cu_k[b + 1] = cu_k[b] + 1 + (int32_t)(next_u64(g) % a.seqlen_k);
        }
        a.cu_q = cu_q;
        a.cu_k = cu_k;
        a.total_q = cu_q[a.b];
        a.total_k = cu_k[a.b];
    }
    if (next_u64(g) % 2) {
        float *slopes = malloc(a.h * sizeof *slopes);
        assert_non_null(slopes);
        for (uint32_t h = 0; h < a.h; h++)
            slopes[h] = 0.5f / (float)(h + 1);
        a.slopes = slopes;
    }
    return a;
}

static void free_arguments(arguments *a)
{
    free((void *)(uintptr_t)a->q);
    free((void *)(uintptr_t)a->k);
    free((void *)(uintptr_t)a->v);
    free(a->o);
    free(a->lse);
    free((void *)(uintptr_t)a->slopes);
    free((void *)(uintptr_t)a->cu_q);
    free((void *)(uintptr_t)a->cu_k);
}

/* How many outputs and log-sum-exps are not what FlashAttention's rules say; `shift` moves the window's left edge. */
static int64_t wrong_elements(const arguments *a, int shift)
{
    const acr_dtype type = a->is_bf16 ? ACR_BF16 : ACR_F16;
    const double rounding = a->is_bf16 ? 0x1p-8 : 0x1p-11;
    int64_t wrong = 0;
    for (uint32_t b = 0; b < a->b; b++) {
        const int64_t q_first = a->cu_q ? a->cu_q[b] : (int64_t)b * a->seqlen_q,
                      k_first = a->cu_k ? a->cu_k[b] : (int64_t)b * a->seqlen_k,
                      q_len = a->cu_q ? a->cu_q[b + 1] - a->cu_q[b] : (int64_t)a->seqlen_q,
                      k_len = a->cu_k ? a->cu_k[b + 1] - a->cu_k[b] : (int64_t)a->seqlen_k;
        for (uint32_t h = 0; h < a->h; h++)
            for (int64_t i = 0; i < q_len; i++) {
                const int64_t head = h / (a->h / a->h_k), place = i + k_len - q_len;
                double p[64], sum = 0.0, most = -INFINITY;
                for (int64_t j = 0; j < k_len; j++) {
                    double s = 0.0;
                    for (uint32_t d = 0; d < a->d; d++)
                        s += acr__load_element(
                                 type, a->q, (q_first + i) * a->row_strides[0] + (int64_t)h * a->head_strides[0] + d) *
                             acr__load_element(type, a->k,
                                               (k_first + j) * a->row_strides[1] + head * a->head_strides[1] + d);
                    s *= a->scale;
                    if (a->softcap > 0.0f)
                        s = a->softcap * tanh(s / a->softcap);
                    if (a->slopes)
                        s -= a->slopes[h] * fabs((double)(place - j));
                    const bool hidden = (a->is_causal && j > place) || (a->left >= 0 && j < place - a->left + shift) ||
                                        (a->right >= 0 && j > place + a->right);
                    p[j] = hidden ? -INFINITY : s;
                    most = fmax(most, p[j]);
                }
                for (int64_t j = 0; j < k_len; j++)
                    sum += p[j] = isinf(p[j]) ? 0.0 : exp(p[j] - most);
                for (uint32_t d = 0; d < a->d; d++) {
                    double o = 0.0, magnitude = 0.0;
                    for (int64_t j = 0; j < k_len; j++) {
                        const double v = acr__load_element(
                            type, a->v, (k_first + j) * a->row_strides[2] + head * a->head_strides[2] + d);
                        o += p[j] * v;
                        magnitude += p[j] * fabs(v);
                    }
                    o = sum > 0.0 ? o / sum : 0.0;
                    magnitude = sum > 0.0 ? magnitude / sum : 0.0;
                    const double got = acr__load_element(
                        type, a->o, (q_first + i) * a->row_strides[3] + (int64_t)h * a->head_strides[3] + d);
                    wrong += !(fabs(got - o) <= rounding * (fabs(o) + magnitude) + 1e-5);
                }
                const double lse = sum > 0.0 ? most + log(sum) : -INFINITY;
                const float got = a->cu_q ? a->lse[(int64_t)h * a->total_q + q_first + i]
                                          : a->lse[((int64_t)b * a->h + h) * a->seqlen_q + i];
                wrong += isinf(lse) ? got != -INFINITY : !(fabs((double)got - lse) <= 1e-4);
            }
    }
    return wrong;
}

static void test_random_calls_are_as_flash_attention_defines(void **state)
{
    acr_ctx *ctx = cpu_ctx(2);
    generator g = {5};
    int noticed = 0;
    (void)state;
    for (int n = 0; n < 400; n++) {
        arguments a = random_arguments(&g);
        if (call(ctx, &a) != ACR_OK)
            fail_msg("call %d: %s", n, acr_candle_error());
        const int64_t wrong = wrong_elements(&a, 0);
        if (wrong != 0)
            fail_msg("call %d: %lld wrong (causal %d, left %d, right %d, softcap %g, slopes %d, packed %d)", n,
                     (long long)wrong, a.is_causal, a.left, a.right, (double)a.softcap, a.slopes != NULL,
                     a.cu_q != NULL);
        noticed += a.left >= 0 && wrong_elements(&a, 1) != 0; /* the comparison would see a window that is off by one */
        free_arguments(&a);
    }
    assert_true(noticed > 50);
    acr_ctx_destroy(ctx);
}

#define refuses(change, status, fragment)                                                                              \
    do {                                                                                                               \
        arguments changed = a;                                                                                         \
        changed.change;                                                                                                \
        assert_int_equal(call(ctx, &changed), status);                                                                 \
        if (!strstr(acr_candle_error(), fragment))                                                                     \
            fail_msg("\"%s\" does not mention \"%s\"", acr_candle_error(), fragment);                                  \
    } while (0)

static void test_refusals(void **state)
{
    acr_ctx *ctx = cpu_ctx(1);
    generator g = {9};
    arguments a;
    (void)state;
    do {
        a = random_arguments(&g);
        if (a.cu_q && a.slopes && a.b > 1)
            break;
        free_arguments(&a);
    } while (true);
    refuses(cu_k = NULL, ACR_INVALID, "one is NULL");
    refuses(cu_q = NULL, ACR_INVALID, "one is NULL");
    refuses(unpadded_lse = 0, ACR_INVALID, "unpadded_lse is 0");
    refuses(slopes_stride = a.h, ACR_INVALID, "alibi_slopes_batch_stride");
    refuses(scale = 0.0f, ACR_INVALID, "softmax_scale is 0");
    refuses(scale = -1.0f, ACR_INVALID, "scale");
    refuses(h_k = 0, ACR_INVALID, "h_k is 0");
    refuses(seqlen_k = 0, ACR_INVALID, "seqlen_k 0");
    refuses(softcap = -1.0f, ACR_INVALID, "softcap");
    refuses(total_k = 0, ACR_INVALID, "total");
    refuses(q = NULL, ACR_INVALID, "q");
    arguments plain = a;
    plain.cu_q = plain.cu_k = NULL;
    assert_int_equal(call(ctx, &plain), ACR_INVALID);
    assert_non_null(strstr(acr_candle_error(), "must be 0 without cu_seqlens"));
    assert_int_equal(call(NULL, &a), ACR_INVALID);
    free_arguments(&a);
    acr_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_calls_are_as_flash_attention_defines),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
