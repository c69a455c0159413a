/* integrations/ggml: GGML_OP_FLASH_ATTN_EXT on random problems against its definition in float64, and what is refused.
 *
 * The definition here is ggml's own, key by key over bytes; it shares nothing with the integration or the oracle. It
 * also bounds what a right execution may be off by: float32 sums in exact executions, and the roundings of q and dst
 * to f16 in the others. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "acromion_ggml.h"
#include "dtype.h"
#include "support.h"

enum {
    PROBLEMS = 1500
};

static int64_t below(generator *g, int64_t end)
{
    return (int64_t)(next_u64(g) % (uint64_t)end);
}

static int64_t pick(generator *g, const int64_t *list, int64_t count)
{
    return list[below(g, count)];
}

/* ---- tensors in random memory layouts ---- */

/* A tensor whose dimensions 1 to 3 lie in memory in the given order, with room after some rows, filled with normals.
 * The rest of the memory is all ones, which is NaN in every type. */
static acr_ggml_tensor make_tensor(generator *g, int32_t type, const int64_t ne[4], const int order[3], double scale)
{
    const size_t size = type == ACR_GGML_F32 ? 4 : 2;
    acr_ggml_tensor t = {.type = type, .ne = {ne[0], ne[1], ne[2], ne[3]}, .nb = {size}};
    size_t step = size * (size_t)(ne[0] + below(g, 3));
    for (int i = 0; i < 3; i++) {
        t.nb[order[i]] = step;
        step *= (size_t)ne[order[i]];
        step += size * (size_t)below(g, 2);
    }
    t.data = malloc(step + 64);
    assert_non_null(t.data);
    memset(t.data, 0xff, step + 64);
    for (int64_t i3 = 0; i3 < ne[3]; i3++)
        for (int64_t i2 = 0; i2 < ne[2]; i2++)
            for (int64_t i1 = 0; i1 < ne[1]; i1++)
                for (int64_t i0 = 0; i0 < ne[0]; i0++)
                    acr__store_element(type == ACR_GGML_F32 ? ACR_F32 : ACR_F16,
                                       (char *)t.data + (size_t)i1 * t.nb[1] + (size_t)i2 * t.nb[2] +
                                           (size_t)i3 * t.nb[3],
                                       i0, scale * next_normal(g));
    return t;
}

static double value_at(const acr_ggml_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    const char *row = (const char *)t->data + (size_t)i1 * t->nb[1] + (size_t)i2 * t->nb[2] + (size_t)i3 * t->nb[3];
    return acr__load_element(t->type == ACR_GGML_F32 ? ACR_F32 : ACR_F16, row, i0);
}

static void set_half(acr_ggml_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3, double value)
{
    acr__store_element(ACR_F16, (char *)t->data + (size_t)i1 * t->nb[1] + (size_t)i2 * t->nb[2] + (size_t)i3 * t->nb[3],
                       i0, value);
}

static acr_ggml_flash_attn random_op(generator *g)
{
    static const int orders[][3] = {{1, 2, 3}, {2, 1, 3}}; /* heads outside the rows, and inside them */
    const int64_t dims[] = {8, 16, 17, 40, 64, 80}, kv_heads_of[] = {1, 2, 3}, group_of[] = {1, 2, 4, 5},
                  queries_of[] = {1, 2, 7, 33}, keys_of[] = {1, 5, 16, 31, 70};
    const int64_t d = pick(g, dims, 6), d_v = below(g, 3) ? d : pick(g, dims, 6), kv_heads = pick(g, kv_heads_of, 3),
                  heads = kv_heads * pick(g, group_of, 4), queries = pick(g, queries_of, 4), keys = pick(g, keys_of, 5),
                  batch = 1 + below(g, 3), kv_batch = below(g, 3) ? batch : 1;
    const int64_t kind = below(g, 8); /* mostly f32 beside f16; 6: all f32, 7: all f16 */
    const int32_t q_type = kind == 7 ? ACR_GGML_F16 : ACR_GGML_F32, kv_type = kind == 6 ? ACR_GGML_F32 : ACR_GGML_F16;
    acr_ggml_flash_attn op = {
        .scale = below(g, 4) ? (float)(1.0 / sqrt((double)d)) : 0.3f,
        .logit_softcap = below(g, 3) ? 0.0f : 4.0f,
        .exact = (int32_t)below(g, 2),
    };
    op.q = make_tensor(g, q_type, (int64_t[]){d, queries, heads, batch}, orders[below(g, 2)], 1.0);
    op.k = make_tensor(g, kv_type, (int64_t[]){d, keys, kv_heads, kv_batch}, orders[below(g, 2)], 1.0);
    op.v = make_tensor(g, kv_type, (int64_t[]){d_v, keys, kv_heads, kv_batch}, orders[below(g, 2)], 1.0);
    op.dst = make_tensor(g, q_type, (int64_t[]){d_v, heads, queries, batch}, orders[0], 0.0);
    if (below(g, 3)) {
        const int64_t mask_heads = below(g, 2) ? 1 : heads / (heads % 2 == 0 && below(g, 2) ? 2 : 1),
                      mask_batch = below(g, 2) ? 1 : batch;
        op.mask =
            make_tensor(g, ACR_GGML_F16, (int64_t[]){keys + below(g, 3), queries + below(g, 5), mask_heads, mask_batch},
                        orders[0], 1.0);
        for (int64_t b = 0; b < mask_batch; b++) /* causal with holes, and rows that see nothing */
            for (int64_t h = 0; h < mask_heads; h++)
                for (int64_t i = 0; i < op.mask.ne[1]; i++) {
                    const bool nothing = below(g, 12) == 0;
                    for (int64_t j = 0; j < op.mask.ne[0]; j++)
                        if (nothing || j > i + keys - queries || below(g, 6) == 0)
                            set_half(&op.mask, j, i, h, b, -INFINITY);
                }
        op.max_bias = below(g, 2) ? 0.0f : 8.0f;
    }
    if (below(g, 2))
        op.sinks = make_tensor(g, ACR_GGML_F32, (int64_t[]){heads, 1, 1, 1}, orders[0], 2.0);
    return op;
}

static void free_op(acr_ggml_flash_attn *op)
{
    free(op->q.data);
    free(op->k.data);
    free(op->v.data);
    free(op->mask.data);
    free(op->sinks.data);
    free(op->dst.data);
}

/* ---- ggml's definition ---- */

enum {
    LEAVE_NOTHING_OUT,
    NO_SINKS,
    NO_SLOPES,
    NO_CAP,
    MASK_OF_OTHER_HEAD,
    FLAWS
};

static double slope_by_definition(const acr_ggml_flash_attn *op, int64_t h)
{
    const double n_log2 = floor(log2((double)op->q.ne[2])), n = pow(2.0, n_log2);
    const double m0 = pow(2.0, -op->max_bias / n), m1 = pow(2.0, -(op->max_bias / 2.0) / n);
    if (!(op->max_bias > 0.0f))
        return 1.0;
    return (double)h < n ? pow(m0, (double)h + 1.0) : pow(m1, 2.0 * ((double)h - n) + 1.0);
}

/* The score of a key, and in *error how far a right one may be from it. */
static double score(const acr_ggml_flash_attn *op, int flaw, int64_t b, int64_t h, int64_t i, int64_t j, bool narrow,
                    double *error)
{
    const int64_t kv_head = h / (op->q.ne[2] / op->k.ne[2]), kv_batch = b / (op->q.ne[3] / op->k.ne[3]);
    double sum = 0.0, rounding = 0.0, magnitude = 0.0;
    for (int64_t d = 0; d < op->q.ne[0]; d++) {
        const double q = value_at(&op->q, d, i, h, b), k = value_at(&op->k, d, j, kv_head, kv_batch);
        sum += q * k;
        magnitude += fabs(q * k);
        rounding += (fabs(q) * 0x1p-11 + 0x1p-25) * fabs(k);
    }
    double s = op->scale * sum;
    *error = op->scale * ((narrow ? rounding : 0.0) + magnitude * (double)op->q.ne[0] * FLT_EPSILON);
    if (op->logit_softcap > 0.0f && flaw != NO_CAP)
        s = op->logit_softcap * tanh(s / op->logit_softcap); /* contracts: the error does not grow, but for its own */
    *error += 4.0 * FLT_EPSILON * (fabs(s) + op->logit_softcap);
    if (op->mask.data) {
        const int64_t mask_head = (h + (flaw == MASK_OF_OTHER_HEAD)) % op->mask.ne[2];
        const double added = (flaw == NO_SLOPES ? 1.0 : slope_by_definition(op, h)) *
                             value_at(&op->mask, j, i, mask_head, b % op->mask.ne[3]);
        if (isinf(added))
            return -INFINITY;
        s += added;
        *error += 8.0 * FLT_EPSILON * (fabs(added) + fabs(s));
    }
    return s;
}

/* How many elements of dst are further from the definition than a right execution may be. */
static int64_t wrong_elements(const acr_ggml_flash_attn *op, int flaw)
{
    const bool half_output = op->q.type == ACR_GGML_F16 || (op->k.type == ACR_GGML_F16 && !op->exact);
    const bool narrow = op->q.type == ACR_GGML_F32 && half_output;
    const int64_t keys = op->k.ne[1], d_v = op->v.ne[0];
    double *p = malloc((size_t)keys * sizeof *p);
    int64_t wrong = 0;
    assert_non_null(p);
    for (int64_t b = 0; b < op->q.ne[3]; b++)
        for (int64_t h = 0; h < op->q.ne[2]; h++)
            for (int64_t i = 0; i < op->q.ne[1]; i++) {
                const bool sink = op->sinks.data && flaw != NO_SINKS;
                double most = sink ? value_at(&op->sinks, h, 0, 0, 0) : -INFINITY, off = 0.0, error;
                const double sink_score = most;
                for (int64_t j = 0; j < keys; j++) {
                    p[j] = score(op, flaw, b, h, i, j, narrow, &error);
                    most = fmax(most, p[j]);
                    off = fmax(off, isinf(p[j]) ? 0.0 : error);
                }
                double sum = sink ? exp(sink_score - most) : 0.0;
                for (int64_t j = 0; j < keys; j++)
                    sum += p[j] = isinf(p[j]) ? 0.0 : exp(p[j] - most);
                const int64_t kv_head = h / (op->q.ne[2] / op->v.ne[2]), kv_batch = b / (op->q.ne[3] / op->v.ne[3]);
                for (int64_t d = 0; d < d_v; d++) {
                    double o = 0.0, magnitude = 0.0;
                    for (int64_t j = 0; j < keys; j++) {
                        const double v = value_at(&op->v, d, j, kv_head, kv_batch);
                        o += p[j] * v;
                        magnitude += p[j] * fabs(v);
                    }
                    o = sum > 0.0 ? o / sum : 0.0;
                    magnitude = sum > 0.0 ? magnitude / sum : 0.0;
                    /* A weight is off by a factor of at most e^(2 off); sums and the exponential are float32's. */
                    const double allowed = magnitude * (expm1(2.0 * off) + (double)(keys + 16) * FLT_EPSILON) +
                                           (half_output ? fabs(o) * 0x1p-11 * 1.01 + 0x1p-24 : 0.0) + 1e-30;
                    const double got = value_at(&op->dst, d, h, i, b);
                    wrong += !(fabs(got - o) <= allowed);
                }
            }
    free(p);
    return wrong;
}

static acr_status execute(acr_ctx *ctx, const acr_ggml_flash_attn *op)
{
    size_t bytes = 0;
    acr_status status = acr_ggml_scratch(ctx, op, &bytes);
    if (status != ACR_OK)
        return status;
    char *scratch = malloc(bytes + 1); /* at an odd address: any alignment will do */
    assert_non_null(scratch);
    memset(scratch, 0xff, bytes + 1);
    status = acr_ggml_flash_attn_ext(ctx, op, bytes ? scratch + 1 : NULL, bytes, NULL);
    free(scratch);
    return status;
}

static void test_random_problems_are_as_ggml_defines(void **state)
{
    acr_ctx *ctx = cpu_ctx(2);
    generator g = {7};
    int noticed[FLAWS] = {0};
    (void)state;
    for (int n = 0; n < PROBLEMS; n++) {
        acr_ggml_flash_attn op = random_op(&g);
        if (execute(ctx, &op) != ACR_OK)
            fail_msg("problem %d: %s", n, acr_ggml_error());
        const int64_t wrong = wrong_elements(&op, LEAVE_NOTHING_OUT);
        if (wrong != 0)
            fail_msg("problem %d: %lld elements are wrong (exact %d, softcap %g, max_bias %g, sinks %d)", n,
                     (long long)wrong, (int)op.exact, (double)op.logit_softcap, (double)op.max_bias,
                     op.sinks.data != NULL);
        if (n < PROBLEMS / 10)
            for (int flaw = 1; flaw < FLAWS; flaw++)
                noticed[flaw] += wrong_elements(&op, flaw) != 0;
        free_op(&op);
    }
    for (int flaw = 1; flaw < FLAWS; flaw++) /* the comparison would see each of these */
        assert_true(noticed[flaw] > 5);
    acr_ctx_destroy(ctx);
}

/* Every f16 is widened and every rounding to f16 is made as the library's own conversion does it. */
static void test_conversions(void **state)
{
    enum {
        KEYS = 1,
        DIM = 64
    };
    acr_ctx *ctx = cpu_ctx(1);
    float q[DIM] = {1.0f}, dst[DIM];
    uint16_t k[DIM] = {0}, v[DIM];
    const size_t f32_row = DIM * sizeof(float), f16_row = DIM * sizeof(uint16_t);
    acr_ggml_flash_attn op = {
        .q = {q, ACR_GGML_F32, 0, {DIM, 1, 1, 1}, {4, f32_row, f32_row, f32_row}},
        .k = {k, ACR_GGML_F16, 0, {DIM, KEYS, 1, 1}, {2, f16_row, f16_row, f16_row}},
        .v = {v, ACR_GGML_F16, 0, {DIM, KEYS, 1, 1}, {2, f16_row, f16_row, f16_row}},
        .dst = {dst, ACR_GGML_F32, 0, {DIM, 1, 1, 1}, {4, f32_row, f32_row, f32_row}},
        .scale = 1.0f,
    };
    (void)state;
    for (op.exact = 0; op.exact < 2; op.exact++) /* one key: dst is v, widened before or after */
        for (uint32_t half = 0; half < 0x10000; half += DIM) {
            for (uint32_t i = 0; i < DIM; i++)
                v[i] = (uint16_t)((half + i) & 0x7c00u) == 0x7c00u ? 0 : (uint16_t)(half + i);
            if (execute(ctx, &op) != ACR_OK)
                fail_msg("%s", acr_ggml_error());
            for (int i = 0; i < DIM; i++)
                assert_true((double)dst[i] == acr__load_element(ACR_F16, v, i));
        }
    /* Two keys whose scores are c (q[0] - q[1]) and its negative, q[1] being what q[0] is to be rounded to: dst is
     * exactly 0 when it is, and tanh(c * the difference) otherwise. */
    uint16_t k2[2 * DIM] = {0}, v2[2 * DIM] = {0};
    const double c = 0x1p14;
    generator g = {3};
    op.exact = 0;
    op.k.data = k2, op.v.data = v2;
    op.k.ne[1] = op.v.ne[1] = 2;
    for (int key = 0; key < 2; key++) {
        acr__store_element(ACR_F16, k2, key * DIM, key == 0 ? c : -c);
        acr__store_element(ACR_F16, k2, key * DIM + 1, key == 0 ? -c : c);
        acr__store_element(ACR_F16, v2, key * DIM, key == 0 ? 1.0 : -1.0);
    }
    for (int n = 0; n < 4000; n++) {
        const uint32_t bits = ((uint32_t)next_u64(&g) & 0x807fffffu) | (uint32_t)(100 + below(&g, 42)) << 23;
        memcpy(&q[0], &bits, sizeof q[0]);
        if (n % 3 == 0) /* halfway between two neighbours, where ties go to even */
            q[0] = (float)ldexp(2.0 * (double)below(&g, 2048) + 1.0, 4 - (int)below(&g, 30));
        uint16_t rounded;
        acr__store_element(ACR_F16, &rounded, 0, (double)q[0]);
        q[1] = (float)acr__load_element(ACR_F16, &rounded, 0);
        if (execute(ctx, &op) != ACR_OK)
            fail_msg("%s", acr_ggml_error());
        if (dst[0] != 0.0f)
            fail_msg("%a is not rounded to %a: %a", (double)q[0], (double)q[1], (double)dst[0]);
    }
    acr_ctx_destroy(ctx);
}

#define assert_refused(call, status, fragment)                                                                         \
    do {                                                                                                               \
        assert_int_equal(call, status);                                                                                \
        if (!strstr(acr_ggml_error(), fragment))                                                                       \
            fail_msg("\"%s\" does not mention \"%s\"", acr_ggml_error(), fragment);                                    \
    } while (0)

static void test_refusals(void **state)
{
    acr_ctx *ctx = cpu_ctx(1);
    generator g = {11};
    acr_ggml_flash_attn op, changed;
    size_t bytes = 12345;
    (void)state;
    do {
        op = random_op(&g);
        if (op.mask.data && op.sinks.data && op.max_bias > 0.0f && op.q.type == ACR_GGML_F32 &&
            op.k.type == ACR_GGML_F16 && op.q.ne[2] > 1 && op.q.ne[3] == 3 && op.k.ne[2] > 1)
            break;
        free_op(&op);
    } while (true);

#define refuses(field, value, status, fragment)                                                                        \
    do {                                                                                                               \
        changed = op;                                                                                                  \
        changed.field = (value);                                                                                       \
        assert_refused(acr_ggml_scratch(ctx, &changed, &bytes), status, fragment);                                     \
        assert_refused(acr_ggml_flash_attn_ext(ctx, &changed, NULL, 0, NULL), status, fragment);                       \
    } while (0)
    refuses(q.data, NULL, ACR_INVALID, "q.data is NULL");
    refuses(dst.data, NULL, ACR_INVALID, "dst.data is NULL");
    refuses(k.data, (char *)op.k.data + 1, ACR_ALIGNMENT, "k.data");
    refuses(k.type, 8, ACR_UNSUPPORTED, "k.type is ggml's 8");
    refuses(v.type, ACR_GGML_F32, ACR_INVALID, "v.nb[0]");
    refuses(mask.type, ACR_GGML_F32, ACR_INVALID, "mask.nb[0]");
    refuses(sinks.type, ACR_GGML_F16, ACR_UNSUPPORTED, "sinks.type");
    refuses(q.reserved, 1, ACR_INVALID, "q.reserved");
    refuses(q.nb[1], 0, ACR_INVALID, "q.nb[1] is 0");
    refuses(q.nb[2], 6, ACR_INVALID, "q.nb[2] is 6");
    refuses(k.ne[1], 0, ACR_INVALID, "k.ne[1] is 0");
    refuses(k.ne[0], op.k.ne[0] + 1, ACR_INVALID, "k.ne[0]");
    refuses(v.ne[1], op.v.ne[1] + 1, ACR_INVALID, "v.ne[1]");
    refuses(v.ne[2], op.v.ne[2] + 1, ACR_INVALID, "v.ne[2]");
    refuses(dst.ne[1], op.dst.ne[1] + 1, ACR_INVALID, "dst.ne[1]");
    refuses(dst.ne[2], op.dst.ne[2] + 1, ACR_INVALID, "dst.ne[2]");
    refuses(mask.ne[0], op.k.ne[1] - 1 ? op.k.ne[1] - 1 : 0, ACR_INVALID, "mask");
    refuses(mask.ne[1], op.q.ne[1] - 1 ? op.q.ne[1] - 1 : 0, ACR_INVALID, "mask");
    refuses(mask.ne[3], 2, ACR_INVALID, "must divide");
    refuses(sinks.ne[0], op.q.ne[2] + 1, ACR_INVALID, "sinks.ne[0]");
    refuses(scale, 0.0f, ACR_INVALID, "scale is 0");
    refuses(scale, NAN, ACR_INVALID, "scale is nan");
    refuses(max_bias, -1.0f, ACR_INVALID, "max_bias is -1");
    refuses(max_bias, INFINITY, ACR_INVALID, "max_bias is inf");
    refuses(mask.data, NULL, ACR_INVALID, "mask is missing");
    refuses(exact, 2, ACR_INVALID, "exact is 2");
    assert_int_equal(bytes, 12345);

    changed = op;
    changed.k.ne[3] = changed.v.ne[3] = 2;
    assert_refused(acr_ggml_scratch(ctx, &changed, &bytes), ACR_UNSUPPORTED, "k.ne[3] is 2");
    changed = op;
    changed.k.ne[2] = changed.v.ne[2] = op.q.ne[2] + 1;
    assert_refused(acr_ggml_scratch(ctx, &changed, &bytes), ACR_INVALID, "does not divide");
    changed = op;
    changed.q.ne[1] = changed.dst.ne[2] = changed.mask.ne[1] = INT32_MAX;
    changed.k.ne[1] = changed.v.ne[1] = changed.mask.ne[0] = INT32_MAX;
    assert_refused(acr_ggml_scratch(ctx, &changed, &bytes), ACR_INVALID, "would have more than");
    assert_refused(acr_ggml_scratch(NULL, &op, &bytes), ACR_INVALID, "ctx is NULL");
    assert_refused(acr_ggml_scratch(ctx, NULL, &bytes), ACR_INVALID, "op is NULL");
    assert_refused(acr_ggml_scratch(ctx, &op, NULL), ACR_INVALID, "bytes is NULL");

    assert_int_equal(acr_ggml_scratch(ctx, &op, &bytes), ACR_OK);
    assert_true(bytes > 0);
    char *scratch = malloc(bytes);
    assert_non_null(scratch);
    assert_refused(acr_ggml_flash_attn_ext(ctx, &op, scratch, bytes - 1, NULL), ACR_WORKSPACE, "scratch has");
    assert_refused(acr_ggml_flash_attn_ext(ctx, &op, NULL, bytes, NULL), ACR_WORKSPACE, "scratch has 0");
    changed = op; /* what the library refuses keeps its sentence */
    changed.logit_softcap = -1.0f;
    assert_refused(acr_ggml_flash_attn_ext(ctx, &changed, scratch, bytes, NULL), ACR_INVALID, "softcap");
    free(scratch);
    free_op(&op);
    acr_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_problems_are_as_ggml_defines),
        cmocka_unit_test(test_conversions),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
