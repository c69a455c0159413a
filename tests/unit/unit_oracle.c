/* The judge: conversions of stored elements, exhaustively, and attention on cases small enough to work out by hand. */
#include "support.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "check/oracle.h"

/* ---- Stored elements ----------------------------------------------------------------------------------------------
 * */

/* A narrow format by its definition, apart from the oracle's own table. */
typedef struct format {
    acr_dtype dtype;
    int exponent_bits, mantissa_bits, bias;
    bool has_infinity;
    uint32_t largest; /* bits of the largest finite number */
} format;

static const format formats[] = {
    {ACR_F16, 5, 10, 15, true, 0x7bff},
    {ACR_BF16, 8, 7, 127, true, 0x7f7f},
    {ACR_E4M3, 4, 3, 7, false, 0x7e},
};

static double load_bits(acr_dtype dtype, uint32_t bits)
{
    const uint16_t wide = (uint16_t)bits;
    const uint8_t narrow = (uint8_t)bits;
    return dtype == ACR_E4M3 ? acr__load_element(dtype, &narrow, 0) : acr__load_element(dtype, &wide, 0);
}

static uint32_t store_bits(acr_dtype dtype, double value)
{
    uint16_t wide = 0;
    uint8_t narrow = 0;
    acr__store_element(dtype, dtype == ACR_E4M3 ? (void *)&narrow : (void *)&wide, 0, value);
    return dtype == ACR_E4M3 ? narrow : wide;
}

/* The value of non-negative bits, from the definition. */
static double value_of(const format *f, uint32_t bits)
{
    const uint32_t mantissa = bits & ((1u << f->mantissa_bits) - 1);
    const int exponent = (int)(bits >> f->mantissa_bits);
    if (bits > f->largest)
        return f->has_infinity && mantissa == 0 ? INFINITY : NAN;
    return exponent == 0 ? ldexp(mantissa, 1 - f->bias - f->mantissa_bits)
                         : ldexp(mantissa + (1u << f->mantissa_bits), exponent - f->bias - f->mantissa_bits);
}

static void every_stored_element_has_its_value(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT_OF(formats); n++) {
        const format *f = &formats[n];
        const uint32_t sign = 1u << (f->exponent_bits + f->mantissa_bits);
        for (uint32_t bits = 0; bits < sign; bits++) {
            const double expected = value_of(f, bits), plus = load_bits(f->dtype, bits),
                         minus = load_bits(f->dtype, bits | sign);
            if (isnan(expected)) {
                assert_true(isnan(plus) && isnan(minus));
                assert_true(isnan(load_bits(f->dtype, store_bits(f->dtype, plus))));
                continue;
            }
            assert_true(plus == expected && minus == -expected && signbit(minus));
            if (isinf(expected) && !f->has_infinity)
                continue;
            assert_int_equal(store_bits(f->dtype, plus),
                             bits); /* what is representable stays, down to the sign of zero */
            assert_int_equal(store_bits(f->dtype, minus), bits | sign);
        }
    }
}

static void rounding_is_to_nearest_even_everywhere(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT_OF(formats); n++) {
        const format *f = &formats[n];
        for (uint32_t bits = 0; bits < f->largest; bits++) { /* between each number and its neighbour above */
            const double below = value_of(f, bits), above = value_of(f, bits + 1), middle = 0.5 * (below + above);
            const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
            assert_int_equal(store_bits(f->dtype, middle), even);
            assert_int_equal(store_bits(f->dtype, nextafter(middle, 0.0)), bits);
            assert_int_equal(store_bits(f->dtype, nextafter(middle, INFINITY)), bits + 1);
            assert_int_equal(store_bits(f->dtype, nextafter(below, INFINITY)), bits);
            assert_int_equal(store_bits(f->dtype, nextafter(above, 0.0)), bits + 1);
        }
    }
}

static void numbers_beyond_the_largest_overflow(void **state)
{
    (void)state;
    /* f16: 65504 is the largest, 65520 the middle between it and 2^16, which would be even. */
    assert_int_equal(store_bits(ACR_F16, 65519.99), 0x7bff);
    assert_int_equal(store_bits(ACR_F16, 65520.0), 0x7c00);
    assert_int_equal(store_bits(ACR_F16, -1e300), 0xfc00);
    assert_int_equal(store_bits(ACR_F16, INFINITY), 0x7c00);
    assert_int_equal(store_bits(ACR_BF16, 3.39e38), 0x7f7f);
    assert_int_equal(store_bits(ACR_BF16, 3.4e38), 0x7f80);
    assert_int_equal(store_bits(ACR_BF16, -INFINITY), 0xff80);
    /* e4m3 has no infinity: conversions saturate, as the hardware's do */
    assert_int_equal(store_bits(ACR_E4M3, 464.0), 0x7e);
    assert_int_equal(store_bits(ACR_E4M3, 1e9), 0x7e);
    assert_int_equal(store_bits(ACR_E4M3, -1e9), 0xfe);
    for (size_t n = 0; n < COUNT_OF(formats); n++)
        assert_true(isnan(load_bits(formats[n].dtype, store_bits(formats[n].dtype, NAN))));
}

static void tiny_numbers_round_to_zero_or_the_smallest(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT_OF(formats); n++) {
        const double smallest = value_of(&formats[n], 1);
        assert_int_equal(store_bits(formats[n].dtype, 0.5 * smallest), 0);
        assert_int_equal(store_bits(formats[n].dtype, 0.51 * smallest), 1);
        assert_int_equal(store_bits(formats[n].dtype, 1e-300), 0);
    }
}

static void float32_rounds_to_nearest_even(void **state)
{
    (void)state;
    float stored;
    const struct {
        double value;
        float expected;
    } cases[] = {{1.0 + 0x1p-24, 1.0f},
                 {1.0 + 0x1.8p-23, 1.0f + 0x1p-22f},
                 {1.0 + 0x1.00001p-24, 1.0f + 0x1p-23f},
                 {0x1p-149, 0x1p-149f}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        acr__store_element(ACR_F32, &stored, 0, cases[i].value);
        assert_true(stored == cases[i].expected);
        assert_true(acr__load_element(ACR_F32, &stored, 0) == (double)cases[i].expected);
    }
}

/* ---- Attention ----------------------------------------------------------------------------------------------------
 * */

/* The judge's answer for all rows of tensors. */
typedef struct answer {
    double *o, *lse;
    int64_t rows, v_dim;
} answer;

static answer judge(const tensors *t)
{
    const acr_problem *p = &t->problem;
    answer a = {.rows = p->batch * p->q_heads * p->q_len, .v_dim = p->v_dim};
    a.o = malloc((size_t)(a.rows * a.v_dim) * sizeof *a.o);
    a.lse = malloc((size_t)a.rows * sizeof *a.lse);
    assert_true(a.o && a.lse);
    assert_ok(oracle_forward(p, &t->buffers, NULL, a.rows, a.o, a.lse));
    return a;
}

static void answer_free(answer *a)
{
    free(a->o);
    free(a->lse);
}

#define assert_near(value, expected)                                                                                   \
    assert_true((value) == (expected) || fabs((value) - (expected)) <= 1e-12 * (1.0 + fabs(expected)))

static void set_floats(void *to, const float *values, size_t count)
{
    memcpy(to, values, count * sizeof *values);
}
#define SET(tensor, ...) set_floats((tensor), (const float[]){__VA_ARGS__}, COUNT_OF(((const float[]){__VA_ARGS__})))

static void one_key_gives_its_value(void **state)
{
    (void)state;
    const acr_problem p = problem_of("f32:b1:h2:s3/1:d2/3");
    tensors t = tensors_make(&p, 1);
    answer a = judge(&t);
    const float *q = t.q, *k = t.k, *v = t.v;
    for (int64_t head = 0; head < 2; head++)
        for (int64_t row = 0; row < 3; row++) {
            const float *qr = q + (head * 3 + row) * 2, *kr = k + head * 2;
            for (int64_t d = 0; d < 3; d++)
                assert_true(a.o[(head * 3 + row) * 3 + d] == (double)v[head * 3 + d]);
            const double score = (double)qr[0] * (double)kr[0] + (double)qr[1] * (double)kr[1];
            assert_near(a.lse[head * 3 + row], (double)t.problem.scale * score);
        }
    answer_free(&a);
    tensors_free(&t);
}

static void weights_follow_the_scores(void **state)
{
    (void)state;
    /* Scores 0 and ln 3: weights 1/4 and 3/4. float32 holds ln 3 rounded, so the tolerance is float32's. */
    acr_problem p = problem_of("f32:b1:h1:s1/2:d1/2");
    p.scale = 1.0f;
    tensors t = tensors_make(&p, 1);
    SET(t.q, 1.0f);
    SET(t.k, 0.0f, 1.0986123f);
    SET(t.v, 4.0f, -8.0f, 8.0f, 16.0f);
    answer a = judge(&t);
    assert_true(fabs(a.o[0] - 7.0) < 1e-6);
    assert_true(fabs(a.o[1] - 10.0) < 1e-6);
    assert_true(fabs(a.lse[0] - log(4.0)) < 1e-6);
    answer_free(&a);
    tensors_free(&t);
}

static void the_scale_multiplies_the_scores(void **state)
{
    (void)state;
    /* The same two scores from q k = 0, 4 ln 3 at scale 1/4, and by the default scale at qk_dim 16 where one dim
     * counts. */
    acr_problem p = problem_of("f32:b1:h1:s1/2:d16/1");
    tensors t = tensors_make(&p, 1);
    float q[16] = {2.0f}, k[32] = {0};
    k[16] = 2.0f * 1.0986123f;
    set_floats(t.q, q, 16);
    set_floats(t.k, k, 32);
    SET(t.v, 0.0f, 1.0f);
    answer a = judge(&t);
    assert_true(fabs(a.o[0] - 0.75) < 1e-6);
    answer_free(&a);
    t.problem.scale = 0.5f; /* doubles the score: weights 1/10, 9/10 */
    a = judge(&t);
    assert_true(fabs(a.o[0] - 0.9) < 1e-6);
    answer_free(&a);
    tensors_free(&t);
}

static void huge_scores_do_not_overflow(void **state)
{
    (void)state;
    acr_problem p = problem_of("f32:b1:h1:s1/3:d1/1");
    p.scale = 1.0f;
    tensors t = tensors_make(&p, 1);
    SET(t.q, 1e4f);
    SET(t.k, 1e4f, 1e4f, -1e4f);
    SET(t.v, 1.0f, 3.0f, 1e30f);
    answer a = judge(&t);
    assert_true(a.o[0] == 2.0);
    assert_near(a.lse[0], 1e8 + log(2.0));
    answer_free(&a);
    tensors_free(&t);
}

/* Keys that row i sees, by the header's sentences. */
static int64_t keys_seen(const acr_problem *p, const int32_t *kv_lens, int64_t batch, int64_t i)
{
    int64_t length = p->kv_len;
    if (kv_lens)
        length = kv_lens[batch] < 0 ? 0 : kv_lens[batch] > p->kv_len ? p->kv_len : kv_lens[batch];
    int64_t seen = 0;
    const int64_t diagonal = p->mask == ACR_MASK_CAUSAL ? length - p->q_len : 0;
    for (int64_t j = 0; j < length; j++)
        seen += p->mask == ACR_MASK_NONE || j <= i + diagonal;
    return seen;
}

/* With q = 0 all scores are equal: the output is the mean of the values seen, and lse the logarithm of how many they
 * are. */
static void assert_counts_keys(const char *text, uint64_t seed)
{
    const acr_problem p = problem_of(text);
    tensors t = tensors_make(&p, seed);
    memset(t.q, 0, t.q_bytes);
    if (t.kv_lens && seed % 2)
        t.kv_lens[0] = seed % 4 == 1 ? -5 : INT32_MAX;
    answer a = judge(&t);
    const acr_problem *c = &t.problem;
    for (int64_t row = 0; row < a.rows; row++) {
        const int64_t i = row % c->q_len, head = row / c->q_len % c->q_heads, batch = row / c->q_len / c->q_heads;
        const int64_t seen = keys_seen(c, t.kv_lens, batch, i);
        assert_near(a.lse[row], log((double)seen)); /* log(0) = -infinity: compared below */
        for (int64_t d = 0; d < c->v_dim; d++) {
            double sum = 0.0;
            for (int64_t j = 0; j < seen; j++)
                sum +=
                    acr__load_element(c->dtype, t.v, element_of(&c->v, batch, head / (c->q_heads / c->kv_heads), j, d));
            if (seen)
                assert_near(a.o[row * a.v_dim + d], sum / (double)seen);
            else
                assert_true(a.o[row * a.v_dim + d] == 0.0 && a.lse[row] == -INFINITY);
        }
    }
    answer_free(&a);
    tensors_free(&t);
}

static void masks_lengths_and_heads_follow_the_header(void **state)
{
    (void)state;
    const char *masks[] = {"", ":causal", ":causal-tl"}, *lens[] = {"", ":kvlens"}, *layouts[] = {"", ":bshd"};
    char text[128];
    for (int q_len = 1; q_len <= 4; q_len++)
        for (int kv_len = 1; kv_len <= 5; kv_len++)
            for (size_t m = 0; m < COUNT_OF(masks); m++)
                for (size_t l = 0; l < COUNT_OF(lens); l++)
                    for (uint64_t seed = 0; seed < 4; seed++) {
                        snprintf(text, sizeof text, "f32:b3:h4/2:s%d/%d:d2/3%s%s%s", q_len, kv_len, masks[m], lens[l],
                                 layouts[seed / 2]);
                        assert_counts_keys(text, seed);
                    }
}

/* A sequence of a packed batch gives, bit for bit, what it gives alone; rows of no sequence see no key. */
static void assert_sequences_stand_alone(const char *text, const char *alone_text, uint64_t seed)
{
    const acr_problem p = problem_of(text);
    tensors t = tensors_make(&p, seed);
    const acr_problem *c = &t.problem;
    const int64_t q_total = t.buffers.q_total;
    const int64_t rows = c->q_heads * q_total;
    double *o = calloc((size_t)(rows * c->v_dim), sizeof *o), *lse = calloc((size_t)rows, sizeof *lse);
    assert_ok(oracle_forward(c, &t.buffers, NULL, rows, o, lse));
    int64_t seen = 0;
    for (int64_t b = 0; b < c->batch; b++) {
        const int64_t q_first = t.q_offsets[b], q_len = t.q_offsets[b + 1] - q_first;
        const int64_t kv_first = t.kv_offsets[b], kv_len = t.kv_offsets[b + 1] - kv_first;
        if (q_len == 0 || kv_len == 0)
            continue;
        acr_problem alone = problem_of(alone_text);
        alone.q_len = q_len;
        alone.kv_len = kv_len;
        assert_ok(acr_problem_canonical(&alone, &alone));
        acr_buffers buffers = ACR_BUFFERS_INIT;
        const float *q = t.q, *k = t.k, *v = t.v;
        buffers.q = q + q_first * c->q.row;
        buffers.k = k + kv_first * c->k.row;
        buffers.v = v + kv_first * c->v.row;
        const int64_t alone_rows = c->q_heads * q_len;
        double *alone_o = calloc((size_t)(alone_rows * c->v_dim), sizeof *o);
        double *alone_lse = calloc((size_t)alone_rows, sizeof *lse);
        assert_ok(oracle_forward(&alone, &buffers, NULL, alone_rows, alone_o, alone_lse));
        for (int64_t head = 0; head < c->q_heads; head++) {
            const int64_t first = head * q_total + q_first;
            assert_memory_equal(o + first * c->v_dim, alone_o + head * q_len * c->v_dim,
                                (size_t)(q_len * c->v_dim) * sizeof *o);
            assert_memory_equal(lse + first, alone_lse + head * q_len, (size_t)q_len * sizeof *lse);
        }
        free(alone_o);
        free(alone_lse);
        seen++;
    }
    assert_true(seen > 0 && lse[0] == -INFINITY && lse[rows - 1] == -INFINITY && o[0] == 0.0);
    free(o);
    free(lse);
    tensors_free(&t);
}

static void sequences_of_a_packed_batch_stand_alone(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        assert_sequences_stand_alone("f32:b5:h4/2:s6/9:d5/3:bshd:packed", "f32:b1:h4/2:s6/9:d5/3:bshd", seed);
        assert_sequences_stand_alone("f32:b5:h4/2:s6/9:d5/3:bshd:packed:causal", "f32:b1:h4/2:s6/9:d5/3:bshd:causal",
                                     seed);
        assert_sequences_stand_alone("f32:b5:h4/2:s6/9:d5/3:bshd:packed:causal-tl",
                                     "f32:b1:h4/2:s6/9:d5/3:bshd:causal-tl", seed);
    }
}

static void layouts_only_move_elements(void **state)
{
    (void)state;
    const acr_problem p = problem_of("f32:b2:h4/2:s5/7:d6/3:causal"),
                      other = problem_of("f32:b2:h4/2:s5/7:d6/3:causal:bshd");
    tensors a = tensors_make(&p, 1), b = tensors_make(&other, 2);
    const struct {
        const void *from;
        void *to;
        const acr_strides *from_strides, *to_strides;
        int64_t heads, rows, dim;
    } parts[] = {{a.q, b.q, &a.problem.q, &b.problem.q, 4, 5, 6},
                 {a.k, b.k, &a.problem.k, &b.problem.k, 2, 7, 6},
                 {a.v, b.v, &a.problem.v, &b.problem.v, 2, 7, 3}};
    for (size_t n = 0; n < COUNT_OF(parts); n++)
        for (int64_t i = 0; i < 2 * parts[n].heads * parts[n].rows * parts[n].dim; i++) {
            const int64_t dim = i % parts[n].dim, row = i / parts[n].dim % parts[n].rows;
            const int64_t head = i / parts[n].dim / parts[n].rows % parts[n].heads,
                          batch = i / parts[n].dim / parts[n].rows / parts[n].heads;
            ((float *)parts[n].to)[element_of(parts[n].to_strides, batch, head, row, dim)] =
                ((const float *)parts[n].from)[element_of(parts[n].from_strides, batch, head, row, dim)];
        }
    answer x = judge(&a), y = judge(&b);
    assert_memory_equal(x.o, y.o, (size_t)(x.rows * x.v_dim) * sizeof *x.o);
    assert_memory_equal(x.lse, y.lse, (size_t)x.rows * sizeof *x.lse);
    answer_free(&x);
    answer_free(&y);
    tensors_free(&a);
    tensors_free(&b);
}

static void listed_rows_are_those_of_the_whole(void **state)
{
    (void)state;
    const acr_problem p = problem_of("bf16:b2:h4/2:s9/13:d8:causal:kvlens");
    tensors t = tensors_make(&p, 3);
    answer all = judge(&t);
    const int64_t rows[] = {71, 0, 8, 9, 40, 40, 17};
    double o[COUNT_OF(rows) * 8], lse[COUNT_OF(rows)];
    assert_ok(oracle_forward(&t.problem, &t.buffers, rows, COUNT_OF(rows), o, lse));
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        assert_memory_equal(&o[i * 8], &all.o[rows[i] * 8], 8 * sizeof *o);
        assert_true(lse[i] == all.lse[rows[i]]);
    }
    assert_ok(oracle_forward(&t.problem, &t.buffers, rows, COUNT_OF(rows), o, NULL)); /* lse may be NULL */
    answer_free(&all);
    tensors_free(&t);
}

static void fp8_scales_say_what_stored_numbers_mean(void **state)
{
    (void)state;
    acr_problem p = problem_of("e4m3:b1:h2:s5/7:d16");
    p.q_scale = 0.5f;
    p.k_scale = 4.0f;
    p.v_scale = 0.25f;
    tensors t = tensors_make(&p, 1);
    /* The same values in float32 storage, multiplied out. */
    const acr_problem wide = problem_of("f32:b1:h2:s5/7:d16");
    tensors w = tensors_make(&wide, 1);
    for (int64_t i = 0; i < (int64_t)t.q_bytes; i++)
        ((float *)w.q)[i] = 0.5f * (float)acr__load_element(ACR_E4M3, t.q, i);
    for (int64_t i = 0; i < (int64_t)t.k_bytes; i++) {
        ((float *)w.k)[i] = 4.0f * (float)acr__load_element(ACR_E4M3, t.k, i);
        ((float *)w.v)[i] = 0.25f * (float)acr__load_element(ACR_E4M3, t.v, i);
    }
    answer a = judge(&t), b = judge(&w);
    for (int64_t i = 0; i < a.rows * a.v_dim; i++)
        assert_near(a.o[i], b.o[i]);
    for (int64_t i = 0; i < a.rows; i++)
        assert_near(a.lse[i], b.lse[i]);
    answer_free(&a);
    answer_free(&b);
    tensors_free(&t);
    tensors_free(&w);
}

/* dim elements of every row: the stored numbers of t times the problem's scale and the head's, in float32 storage. */
static void multiply_out(void *to, const void *stored, int64_t heads, int64_t rows_of_head, int64_t dim, float scale,
                         const float *head_scales, int64_t heads_sharing)
{
    for (int64_t i = 0; i < heads * rows_of_head * dim; i++)
        ((float *)to)[i] = scale * head_scales[i / (rows_of_head * dim) / heads_sharing] *
                           (float)acr__load_element(ACR_E4M3, stored, i);
}

static void fp8_scales_of_heads_multiply_those_of_the_problem(void **state)
{
    (void)state;
    acr_problem p = problem_of("e4m3:b2:h6/3:s5/7:d16/8");
    p.q_scale = 0.5f;
    p.k_scale = 4.0f;
    p.v_scale = 0.25f;
    tensors t = tensors_make(&p, 2);
    const float q_scales[] = {1, 2, 4, 0.5f, 0.25f, 8}, k_scales[] = {0.5f, 2, 1, 0.25f, 1, 0.125f},
                v_scales[] = {16, 1, 0.5f, 2, 32, 4};
    t.buffers.q_scales = q_scales;
    t.buffers.k_scales = k_scales;
    t.buffers.v_scales = v_scales;
    const acr_problem wide = problem_of("f32:b2:h6/3:s5/7:d16/8");
    tensors w = tensors_make(&wide, 2);
    multiply_out(w.q, t.q, 12, 5, 16, 0.5f, q_scales, 2);
    multiply_out(w.k, t.k, 6, 7, 16, 4.0f, k_scales, 1);
    multiply_out(w.v, t.v, 6, 7, 8, 0.25f, v_scales, 1);
    answer a = judge(&t), b = judge(&w);
    for (int64_t i = 0; i < a.rows * a.v_dim; i++)
        assert_near(a.o[i], b.o[i]);
    for (int64_t i = 0; i < a.rows; i++)
        assert_near(a.lse[i], b.lse[i]);
    double *unfused = malloc((size_t)(a.rows * a.v_dim) * sizeof *unfused);
    assert_non_null(unfused);
    assert_ok(oracle_unfused(&t.problem, &t.buffers, NULL, a.rows, 1.0f, unfused));
    for (int64_t i = 0; i < a.rows * a.v_dim; i++) /* weights of 3 mantissa bits, values up to 4 times the scale */
        assert_true(fabs(unfused[i] - a.o[i]) <= 0.25 * 0.25 * v_scales[i / (2 * 5 * 8)]);
    free(unfused);
    answer_free(&a);
    answer_free(&b);
    tensors_free(&t);
    tensors_free(&w);
}

static void nan_spoils_the_rows_that_see_it_and_no_others(void **state)
{
    (void)state;
    const acr_problem p = problem_of("f32:b1:h2:s4:d2:causal");
    tensors t = tensors_make(&p, 1);
    ((float *)t.k)[2 * 2] = NAN;       /* head 0, key 2: seen by rows 2 and 3 */
    ((float *)t.v)[(4 + 3) * 2] = NAN; /* head 1, key 3, element 0: seen by row 3 */
    answer a = judge(&t);
    for (int64_t row = 0; row < 8; row++)
        for (int64_t d = 0; d < 2; d++) {
            const bool spoilt = row == 2 || row == 3 || (row == 7 && d == 0);
            if (row == 7 && d == 1)
                continue; /* "the affected output rows": this element may be either */
            assert_int_equal(isnan(a.o[row * 2 + d]) != 0, spoilt);
        }
    answer_free(&a);
    tensors_free(&t);
}

static void keys_beyond_the_length_are_never_used(void **state)
{
    (void)state;
    const acr_problem p = problem_of("f16:b2:h1:s3/6:d4:kvlens");
    tensors t = tensors_make(&p, 1);
    t.kv_lens[0] = 2;
    t.kv_lens[1] = 0;
    answer before = judge(&t);
    for (int64_t b = 0; b < 2; b++)
        for (int64_t j = t.kv_lens[b]; j < 6; j++)
            for (int64_t d = 0; d < 4; d++) {
                acr__store_element(ACR_F16, t.k, element_of(&t.problem.k, b, 0, j, d), NAN);
                acr__store_element(ACR_F16, t.v, element_of(&t.problem.v, b, 0, j, d), INFINITY);
            }
    answer after = judge(&t);
    assert_memory_equal(before.o, after.o, (size_t)(before.rows * before.v_dim) * sizeof *before.o);
    answer_free(&before);
    answer_free(&after);
    tensors_free(&t);
}

/* ---- The unfused computation --------------------------------------------------------------------------------------
 * */

static double unfused_error(const char *text)
{
    const acr_problem p = problem_of(text);
    tensors t = tensors_make(&p, 7);
    answer exact = judge(&t);
    double *o = malloc((size_t)(exact.rows * exact.v_dim) * sizeof *o), worst = 0.0;
    assert_non_null(o);
    assert_ok(oracle_unfused(&t.problem, &t.buffers, NULL, exact.rows, 1.0f, o));
    for (int64_t i = 0; i < exact.rows * exact.v_dim; i++) {
        const double error = fabs(o[i] - exact.o[i]);
        assert_true(error <= 1.0); /* fails for NaN */
        worst = error > worst ? error : worst;
        /* it holds rounded values */
        uint32_t stored = 0;
        acr__store_element(t.problem.out_dtype, &stored, 0, o[i]);
        assert_true(acr__load_element(t.problem.out_dtype, &stored, 0) == o[i]);
    }
    free(o);
    answer_free(&exact);
    tensors_free(&t);
    return worst;
}

static void unfused_errs_as_much_as_its_type(void **state)
{
    (void)state;
    /* Outputs are averages of N(0, 1) values: around 0.2, so an output ulp is 2^-24 * 0.25 in f32, 2^-13 in f16, 2^-10
     * in bf16. */
    const double f32 = unfused_error("f32:b1:h2:s32:d32"), f16 = unfused_error("f16:b1:h2:s32:d32");
    const double bf16 = unfused_error("bf16:b1:h2:s32:d32"), e4m3 = unfused_error("e4m3:b1:h2:s32:d32");
    assert_true(f32 > 0.0 && f32 < 2e-6);
    assert_true(f16 > 1e-5 && f16 < 2e-3);
    assert_true(bf16 > 1e-4 && bf16 < 2e-2);
    assert_true(e4m3 > 1e-3 && e4m3 < 0.2);
    assert_true(f32 < f16 && f16 < bf16 && bf16 < e4m3);
}

static void unfused_rows_without_keys_are_zero(void **state)
{
    (void)state;
    const acr_problem p = problem_of("f16:b1:h1:s5/2:d4:causal");
    tensors t = tensors_make(&p, 1);
    double o[20];
    assert_ok(oracle_unfused(&t.problem, &t.buffers, NULL, 5, 1.0f, o));
    for (int i = 0; i < 3 * 4; i++)
        assert_true(o[i] == 0.0);
    assert_true(o[12] != 0.0);
    tensors_free(&t);
}

/* ---- What changes scores, and what hides or adds keys beyond a mask and a window -------------------------------- */

/* Which keys each row of a head sees, as bits: with scores of 0 every visible key has the same weight, and key j has
 * the value 2^j. At most 16 rows. */
static void assert_seen(const char *text, const acr_buffers *terms, const unsigned *expected)
{
    const acr_problem p = problem_of(text);
    tensors t = tensors_make(&p, 1);
    const float zeros[16] = {0};
    float powers[16];
    for (int j = 0; j < 16; j++)
        powers[j] = (float)(1 << j);
    set_floats(t.q, zeros, (size_t)p.q_len);
    set_floats(t.k, zeros, (size_t)p.kv_len);
    set_floats(t.v, powers, (size_t)p.kv_len);
    t.buffers.kv_lens = terms->kv_lens;
    t.buffers.kv_starts = terms->kv_starts;
    t.buffers.ranges = terms->ranges;
    t.buffers.tree = terms->tree;
    t.buffers.bias = terms->bias;
    answer a = judge(&t);
    for (int64_t i = 0; i < a.rows; i++) {
        const double seen = a.o[i] * exp(a.lse[i]);
        if (fabs(seen - (double)expected[i]) > 1e-9)
            fail_msg("%s: row %d sees %g, expected %u", text, (int)i, seen, expected[i]);
        if (expected[i] == 0)
            assert_true(a.lse[i] == -INFINITY && a.o[i] == 0.0);
    }
    answer_free(&a);
    tensors_free(&t);
}
#define ASSERT_SEEN(text, terms, ...) assert_seen((text), (terms), (const unsigned[]){__VA_ARGS__})

static void chunks_and_key_starts_hide_keys(void **state)
{
    (void)state;
    acr_buffers terms = ACR_BUFFERS_INIT;
    ASSERT_SEEN("f32:b1:h1:s6:d1:causal:chunk4", &terms, 1, 3, 7, 15, 16, 48);
    ASSERT_SEEN("f32:b1:h1:s6:d1:chunk4", &terms, 15, 15, 15, 15, 48, 48);
    ASSERT_SEEN("f32:b1:h1:s2/6:d1:causal:chunk4", &terms, 16, 48); /* they stand at keys 4 and 5 */
    ASSERT_SEEN("f32:b1:h1:s6/5:d1:causal-tl:chunk3", &terms, 1, 3, 7, 8, 24, 24);
    ASSERT_SEEN("f32:b1:h1:s3/2:d1:chunk2", &terms, 0, 3, 3); /* the first stands before key 0: another chunk */
    const int32_t two[] = {2}, five[] = {5}, far[] = {100}, below[] = {-3};
    terms.kv_starts = two;
    ASSERT_SEEN("f32:b1:h1:s6:d1:causal:chunk2:kvstarts", &terms, 0, 0, 4, 12, 16, 48);
    ASSERT_SEEN("f32:b1:h1:s6:d1:causal:kvstarts", &terms, 0, 0, 4, 12, 28, 60);
    ASSERT_SEEN("f32:b1:h1:s3:d1:kvstarts", &terms, 4, 4, 4);
    ASSERT_SEEN("f32:b1:h1:s3:d1:causal:win2:kvstarts", &terms, 0, 0, 4);
    terms.kv_lens = five;
    ASSERT_SEEN("f32:b1:h1:s2/6:d1:causal:kvlens:kvstarts", &terms, 12, 28);
    terms.kv_starts = far; /* clamped to the key length */
    ASSERT_SEEN("f32:b1:h1:s2/6:d1:kvlens:kvstarts", &terms, 0, 0);
    terms.kv_starts = below;
    ASSERT_SEEN("f32:b1:h1:s2/6:d1:kvlens:kvstarts", &terms, 31, 31);
}

static void ranges_add_keys(void **state)
{
    (void)state;
    acr_buffers terms = ACR_BUFFERS_INIT;
    const int32_t ranges[] = {1, 3, 3, 3, 5, 2, -4, 1};
    terms.ranges = ranges;
    ASSERT_SEEN("f32:b1:h1:s4:d1:causal:ranges1", &terms, 1, 7, 7, 15);
    ASSERT_SEEN("f32:b1:h1:s4:d1:causal:ranges4", &terms, 1, 7, 7, 15); /* empty, turned around, one key */
    ASSERT_SEEN("f32:b1:h1:s4:d1:causal:win1:ranges1", &terms, 1, 6, 6, 8);
    ASSERT_SEEN("f32:b1:h1:s2/4:d1:causal:ranges1", &terms, 7, 15); /* positions, not rows: keys 2 and 3 */
    ASSERT_SEEN("f32:b1:h1:s4:d1:chunk1:ranges1", &terms, 1, 6, 6, 8);
    const int32_t start[] = {2};
    terms.kv_starts = start; /* what does not exist is in no range */
    ASSERT_SEEN("f32:b1:h1:s4:d1:causal:ranges1:kvstarts", &terms, 0, 4, 4, 12);
}

static void trees_and_boolean_masks_hide_keys(void **state)
{
    (void)state;
    acr_buffers terms = ACR_BUFFERS_INIT;
    const uint8_t tree[] = {1, 3, 5};
    terms.tree = tree;
    ASSERT_SEEN("f32:b1:h1:s3/5:d1:tree", &terms, 3 + 4, 3 + 12, 3 + 20);
    ASSERT_SEEN("f32:b1:h1:s3/5:d1:causal:tree", &terms, 7, 15, 23);
    ASSERT_SEEN("f32:b1:h1:s3:d1:causal:win1:tree", &terms, 1, 2, 4);
    const int32_t four[] = {4};
    terms.kv_lens = four; /* the last three keys of four */
    ASSERT_SEEN("f32:b1:h1:s3/5:d1:kvlens:tree", &terms, 1 + 2, 1 + 6, 1 + 10);
    terms.kv_lens = NULL;
    const uint8_t nine[18] = {1, 0, 1, 1};
    terms.tree = nine; /* two bytes a row */
    ASSERT_SEEN("f32:b1:h1:s9:d1:tree", &terms, 1, 257, 0, 0, 0, 0, 0, 0, 0);
    terms.tree = NULL;
    const uint8_t mask[] = {1, 0, 1, 99, 0, 255, 0};
    terms.bias = mask;
    ASSERT_SEEN("f32:b1:h1:s2/3:d1:mask/0,0,4", &terms, 5, 2);
    ASSERT_SEEN("f32:b1:h1:s2/3:d1:mask/0,0,0", &terms, 5, 5);
    ASSERT_SEEN("f32:b1:h1:s2/3:d1:causal:mask/0,0,2", &terms, 1, 3);
    const float bias[] = {0.0f, -INFINITY, 0.0f, -INFINITY, -INFINITY, -INFINITY};
    terms.bias = bias;
    ASSERT_SEEN("f32:b1:h1:s2/3:d1:bias-f32/0,0,3", &terms, 5, 0);
}

/* Two keys, q = 1, k = {0, score}, values 0 and 4: the output is 4 times the second key's weight. */
static void assert_second_weight(const char *text, float score, const acr_buffers *terms, double weight, double lse)
{
    acr_problem p = problem_of(text);
    p.scale = 1.0f;
    tensors t = tensors_make(&p, 1);
    SET(t.q, 1.0f);
    const float k[] = {0.0f, score};
    set_floats(t.k, k, 2);
    SET(t.v, 0.0f, 4.0f);
    t.buffers.sinks = terms->sinks;
    t.buffers.slopes = terms->slopes;
    t.buffers.bias = terms->bias;
    answer a = judge(&t);
    assert_true(fabs(a.o[0] / 4.0 - weight) < 1e-6);
    assert_true(fabs(a.lse[0] - lse) < 1e-6);
    answer_free(&a);
    tensors_free(&t);
}

static void scores_are_capped_then_biased(void **state)
{
    (void)state;
    /* A cap of 2 and a score of 2 artanh(ln(3) / 2): capped, it is ln 3. */
    const float log3 = 1.0986123f, score = (float)(2.0 * atanh(0.5 * log(3.0)));
    acr_buffers terms = ACR_BUFFERS_INIT;
    assert_second_weight("f32:b1:h1:s1/2:d1:cap2", score, &terms, 0.75, log(4.0));
    assert_second_weight("f32:b1:h1:s1/2:d1:cap2", 1e6f, &terms, exp(2.0) / (1.0 + exp(2.0)), log(1.0 + exp(2.0)));
    const float bias[] = {0.0f, -log3}, slopes[] = {log3};
    terms.bias = bias; /* not capped: it takes away what the score is */
    assert_second_weight("f32:b1:h1:s1/2:d1:cap2:bias-f32/0,0,0", score, &terms, 0.5, log(2.0));
    terms.slopes = slopes; /* the query stands at key 1, key 0 is one away */
    assert_second_weight("f32:b1:h1:s1/2:d1:alibi", 0.0f, &terms, 0.75, log(4.0 / 3.0));
    assert_second_weight("f32:b1:h1:s1/2:d1:causal-tl:win0/1:alibi", 0.0f, &terms, 0.0, 0.0);
    assert_second_weight("f32:b1:h1:s1/2:d1:cap2:bias-f32/0,0,0:alibi", score, &terms, 0.75, log(4.0 / 3.0));
}

/* A row whose keys all have a type's lowest number: even weights, whatever the scores. Nothing of the scores is left to
 * be rounded, so the gate must not allow an error as large as a bias of that size would otherwise excuse. */
static void lowest_biases_weigh_keys_evenly(void **state)
{
    (void)state;
    const float bias[] = {-FLT_MAX, -FLT_MAX};
    acr_buffers terms = ACR_BUFFERS_INIT;
    terms.bias = bias;
    for (float score = -50.0f; score <= 50.0f; score += 25.0f)
        assert_second_weight("f32:b1:h1:s1/2:d1:bias-f32/0,0,0", score, &terms, 0.5, -(double)FLT_MAX);
    const acr_problem p = problem_of("f32:b1:h1:s1/2:d1:bias-f32/0,0,0");
    tensors t = tensors_make(&p, 1);
    t.buffers.bias = bias;
    double o, lse, variance, most;
    assert_ok(oracle_spread(&t.problem, &t.buffers, NULL, 1, &o, &lse, &variance, &most));
    assert_true(sqrt(variance) < 1e-5 && most < 1e-5);
    tensors_free(&t);
}

static void sinks_join_the_sum(void **state)
{
    (void)state;
    acr_buffers terms = ACR_BUFFERS_INIT;
    float sink = 0.6931472f; /* ln 2, neither scaled nor capped */
    terms.sinks = &sink;
    assert_second_weight("f32:b1:h1:s1/2:d1:sinks", 0.0f, &terms, 0.25, log(4.0));
    assert_second_weight("f32:b1:h1:s1/2:d1:cap0.001:sinks", 0.0f, &terms, 0.25, log(4.0));
    sink = 1000.0f;
    assert_second_weight("f32:b1:h1:s1/2:d1:sinks", 0.0f, &terms, 0.0, 1000.0);
    sink = -INFINITY;
    assert_second_weight("f32:b1:h1:s1/2:d1:sinks", 0.0f, &terms, 0.5, log(2.0));
    /* a row that sees no key */
    const acr_problem p = problem_of("f32:b1:h1:s2/1:d1:causal:sinks");
    tensors t = tensors_make(&p, 1);
    sink = 3.5f;
    t.buffers.sinks = &sink;
    answer a = judge(&t);
    assert_true(a.o[0] == 0.0 && a.lse[0] == 3.5);
    answer_free(&a);
    tensors_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_stored_element_has_its_value),
        cmocka_unit_test(rounding_is_to_nearest_even_everywhere),
        cmocka_unit_test(numbers_beyond_the_largest_overflow),
        cmocka_unit_test(tiny_numbers_round_to_zero_or_the_smallest),
        cmocka_unit_test(float32_rounds_to_nearest_even),
        cmocka_unit_test(one_key_gives_its_value),
        cmocka_unit_test(weights_follow_the_scores),
        cmocka_unit_test(the_scale_multiplies_the_scores),
        cmocka_unit_test(huge_scores_do_not_overflow),
        cmocka_unit_test(masks_lengths_and_heads_follow_the_header),
        cmocka_unit_test(sequences_of_a_packed_batch_stand_alone),
        cmocka_unit_test(layouts_only_move_elements),
        cmocka_unit_test(listed_rows_are_those_of_the_whole),
        cmocka_unit_test(fp8_scales_say_what_stored_numbers_mean),
        cmocka_unit_test(fp8_scales_of_heads_multiply_those_of_the_problem),
        cmocka_unit_test(nan_spoils_the_rows_that_see_it_and_no_others),
        cmocka_unit_test(keys_beyond_the_length_are_never_used),
        cmocka_unit_test(unfused_errs_as_much_as_its_type),
        cmocka_unit_test(unfused_rows_without_keys_are_zero),
        cmocka_unit_test(chunks_and_key_starts_hide_keys),
        cmocka_unit_test(ranges_add_keys),
        cmocka_unit_test(trees_and_boolean_masks_hide_keys),
        cmocka_unit_test(scores_are_capped_then_biased),
        cmocka_unit_test(lowest_biases_weigh_keys_evenly),
        cmocka_unit_test(sinks_join_the_sum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
