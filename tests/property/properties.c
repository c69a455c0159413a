/* What attention must do whatever its numbers are, checked for every CPU kernel of the list that runs on this machine.
 * */
#include "support.h"

#include <math.h>
#include <stdio.h>

/* Problems for the properties; "%" stands for the kernel's type. Lengths and dims that no tile divides are among them.
 * */
static const char *const shapes[] = {
    "%:b1:h2:s64:d64:lse",
    "%:b2:h4/2:s37/101:d40/24:lse",
    "%:b1:h1:s1/333:d128:lse",
    "%:b2:h2:s130/129:d64:bshd:lse",
};

static acr_problem shape_for(const char *shape, const acr__kernel *kernel)
{
    char text[128];
    snprintf(text, sizeof text, "%s%s", acr__dtype_text(kernel->dtype), shape + 1);
    return canonical_of(text);
}

/* How far apart two correct answers may be: an ulp or two of the output at the size of its values, and the float32
 * sums. */
static double tolerance_of(const acr__kernel *kernel)
{
    switch (kernel->dtype) {
    case ACR_F32:
        return 2e-5;
    case ACR_BF16:
        return 0.02;
    default: /* f16, and e4m3 whose output is f16 */
        return 3e-3;
    }
}

/* The least alignment that a problem can promise: one element of the wider type. */
static uint32_t element_alignment(const acr_problem *p)
{
    const int in = acr__dtype_bytes(p->dtype), out = acr__dtype_bytes(p->out_dtype);
    return (uint32_t)(in > out ? in : out);
}

/* Runs a property for every kernel and shape. */
typedef void property(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p);

static void for_all(property *check)
{
    acr_ctx *ctx = cpu_ctx(2);
    size_t kernels = 0;
    for (const acr__kernel *kernel; (kernel = cpu_kernel(ctx, kernels)); kernels++)
        for (size_t i = 0; i < COUNT_OF(shapes); i++) {
            const acr_problem p = shape_for(shapes[i], kernel);
            assert_null(acr__why_not(kernel, &p, &acr__ctx_backend_device(ctx)->device));
            check(ctx, kernel, &p);
        }
    assert_true(kernels >= 1);
    acr_ctx_destroy(ctx);
}

static void fail_at(const acr__kernel *kernel, const acr_problem *p, const char *what, double difference)
{
    char text[ACR_PROBLEM_TEXT_MAX] = "";
    acr_problem_format(p, text, sizeof text);
    fail_msg("%s, %s: %s: off by %g", kernel->name, text, what, difference);
}

/* The outputs of two executions agree within the tolerance; NaN never does. */
static void assert_agree(const acr__kernel *kernel, const tensors *a, const tensors *b, const char *what)
{
    const acr_problem *p = &a->problem;
    for (int64_t batch = 0; batch < p->batch; batch++)
        for (int64_t head = 0; head < p->q_heads; head++)
            for (int64_t row = 0; row < p->q_len; row++) {
                const double lse = fabs(lse_at(a, batch, head, row) - lse_at(b, batch, head, row));
                if (!(lse <= 1e-3))
                    fail_at(kernel, p, what, lse);
                for (int64_t d = 0; d < p->v_dim; d++) {
                    const double difference = fabs(o_at(a, batch, head, row, d) - o_at(b, batch, head, row, d));
                    if (!(difference <= tolerance_of(kernel)))
                        fail_at(kernel, p, what, difference);
                }
            }
}

/* ---- Symmetries ---------------------------------------------------------------------------------------------------
 * */

/* Swaps two rows of a tensor of one head. */
static void swap_rows(const acr_problem *p, void *memory, const acr_strides *strides, int64_t batch, int64_t head,
                      int64_t i, int64_t j, int64_t dim)
{
    for (int64_t d = 0; d < dim; d++) {
        const int64_t a = element_of(strides, batch, head, i, d), b = element_of(strides, batch, head, j, d);
        const double x = acr__load_element(p->dtype, memory, a), y = acr__load_element(p->dtype, memory, b);
        acr__store_element(p->dtype, memory, a, y);
        acr__store_element(p->dtype, memory, b, x);
    }
}

static void check_permutation(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    tensors a = tensors_make(p, 11), b = tensors_make(p, 11);
    generator g = {12};
    for (int64_t batch = 0; batch < p->batch; batch++)
        for (int64_t head = 0; head < p->kv_heads; head++)
            for (int64_t i = p->kv_len - 1; i > 0; i--) {
                const int64_t j = (int64_t)(next_u64(&g) % (uint64_t)(i + 1));
                swap_rows(p, b.k, &p->k, batch, head, i, j, p->qk_dim);
                swap_rows(p, b.v, &p->v, batch, head, i, j, p->v_dim);
            }
    execute_once(ctx, kernel, &a);
    execute_once(ctx, kernel, &b);
    assert_agree(kernel, &a, &b, "keys and values in another order");
    tensors_free(&a);
    tensors_free(&b);
}

static void the_order_of_keys_does_not_matter(void **state)
{
    (void)state;
    for_all(check_permutation);
}

static void check_constant_values(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    tensors t = tensors_make(p, 13);
    /* Every value row is {1, -2, 3, -4...}, small integers that every type holds. */
    for (int64_t batch = 0; batch < p->batch; batch++)
        for (int64_t head = 0; head < p->kv_heads; head++)
            for (int64_t j = 0; j < p->kv_len; j++)
                for (int64_t d = 0; d < p->v_dim; d++)
                    acr__store_element(p->dtype, t.v, element_of(&p->v, batch, head, j, d),
                                       (double)(d % 2 ? -(1 + d % 7) : 1 + d % 7));
    execute_once(ctx, kernel, &t);
    for (int64_t batch = 0; batch < p->batch; batch++)
        for (int64_t head = 0; head < p->q_heads; head++)
            for (int64_t row = 0; row < p->q_len; row++)
                for (int64_t d = 0; d < p->v_dim; d++) {
                    const double expected = (double)(d % 2 ? -(1 + d % 7) : 1 + d % 7);
                    const double difference = fabs(o_at(&t, batch, head, row, d) - expected);
                    if (!(difference <=
                          8e-6 * fabs(expected))) /* far below an ulp of the narrow types: they must be exact */
                        fail_at(kernel, p, "constant values", difference);
                }
    tensors_free(&t);
}

static void constant_values_come_out_unchanged(void **state)
{
    (void)state;
    for_all(check_constant_values);
}

static void check_shift(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    /* Keys on a grid of quarters, so that adding whole numbers is exact in every type. */
    tensors a = tensors_make(p, 14), b = tensors_make(p, 14);
    generator g = {15};
    const double range = p->dtype == ACR_E4M3 ? 4.0 : 16.0; /* in quarters: e4m3 holds quarters up to 4 */
    const double shifts[] = {1.0, -2.0, 0.0, 1.0};
    for (int64_t batch = 0; batch < p->batch; batch++)
        for (int64_t head = 0; head < p->kv_heads; head++)
            for (int64_t j = 0; j < p->kv_len; j++)
                for (int64_t d = 0; d < p->qk_dim; d++) {
                    const int64_t at = element_of(&p->k, batch, head, j, d);
                    const double key =
                        0.25 * (double)(int64_t)(next_u64(&g) % (uint64_t)(2 * range + 1)) - 0.25 * range;
                    acr__store_element(p->dtype, a.k, at, key);
                    acr__store_element(p->dtype, b.k, at, key + shifts[d % 4]);
                    assert_true(acr__load_element(p->dtype, b.k, at) == key + shifts[d % 4]);
                }
    execute_once(ctx, kernel, &a);
    execute_once(ctx, kernel, &b);
    /* lse moves with the shift; only the output stays. */
    memcpy(b.lse, a.lse, a.lse_bytes);
    assert_agree(kernel, &a, &b, "one vector added to every key");
    tensors_free(&a);
    tensors_free(&b);
}

static void adding_one_vector_to_every_key_changes_nothing(void **state)
{
    (void)state;
    for_all(check_shift);
}

static void check_scale(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    /* A power of two moved from the scale into the queries: exact in every type, but for the smallest e4m3 numbers. */
    acr_problem folded = *p;
    folded.scale = 0.5f * p->scale;
    tensors a = tensors_make(p, 16), b = tensors_make(&folded, 16);
    for (int64_t i = 0; i < (int64_t)a.q_bytes / acr__dtype_bytes(p->dtype); i++)
        acr__store_element(p->dtype, b.q, i, 2.0 * acr__load_element(p->dtype, a.q, i));
    execute_once(ctx, kernel, &a);
    execute_once(ctx, kernel, &b);
    assert_agree(kernel, &a, &b, "half the scale and twice the queries");
    tensors_free(&a);
    tensors_free(&b);
}

static void scale_and_queries_can_be_traded(void **state)
{
    (void)state;
    for_all(check_scale);
}

/* ---- Splitting ----------------------------------------------------------------------------------------------------
 * */

/* Attention over keys [first, end) of the tensors, as a problem of its own over the same memory. */
static tensors part_of(const tensors *whole, int64_t first, int64_t end)
{
    acr_problem p = whole->problem;
    const int bytes = acr__dtype_bytes(p.dtype);
    p.kv_len = end - first;
    p.alignment = element_alignment(&p); /* rows begin anywhere */
    tensors part = tensors_make(&p, 0);
    /* Strides of the whole, for k and v are not packed as the part would be: */
    part.problem.k = whole->problem.k;
    part.problem.v = whole->problem.v;
    part.buffers.q = whole->q;
    part.buffers.k = (const char *)whole->k + first * p.k.row * bytes;
    part.buffers.v = (const char *)whole->v + first * p.v.row * bytes;
    return part;
}

static void check_split(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    if (p->kv_len < 2)
        return;
    tensors whole = tensors_make(p, 17);
    const int64_t middle = (p->kv_len + 2) / 3;
    tensors first = part_of(&whole, 0, middle), second = part_of(&whole, middle, p->kv_len);
    execute_once(ctx, kernel, &whole);
    execute_once(ctx, kernel, &first);
    execute_once(ctx, kernel, &second);
    for (int64_t batch = 0; batch < p->batch; batch++)
        for (int64_t head = 0; head < p->q_heads; head++)
            for (int64_t row = 0; row < p->q_len; row++) {
                const double a = lse_at(&first, batch, head, row), b = lse_at(&second, batch, head, row);
                const double merged_lse = (a > b ? a : b) + log1p(exp(-fabs(a - b)));
                const double difference = fabs(merged_lse - lse_at(&whole, batch, head, row));
                if (!(difference <= 1e-4))
                    fail_at(kernel, p, "lse of two parts, merged", difference);
                for (int64_t d = 0; d < p->v_dim; d++) {
                    const double merged = exp(a - merged_lse) * o_at(&first, batch, head, row, d) +
                                          exp(b - merged_lse) * o_at(&second, batch, head, row, d);
                    const double error = fabs(merged - o_at(&whole, batch, head, row, d));
                    if (!(error <= 2.0 * tolerance_of(kernel)))
                        fail_at(kernel, p, "two parts, merged by lse", error);
                }
            }
    tensors_free(&whole);
    tensors_free(&first);
    tensors_free(&second);
}

static void parts_merged_by_lse_equal_the_whole(void **state)
{
    (void)state;
    for_all(check_split);
}

static void check_prefixes(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    /* With the top-left mask, row i attends to the first i + 1 keys and nothing else. */
    if (p->q_len < 3 || p->kv_len < 3)
        return;
    acr_problem masked = *p;
    masked.mask = ACR_MASK_CAUSAL_TOP_LEFT;
    tensors whole = tensors_make(&masked, 18);
    execute_once(ctx, kernel, &whole);
    const int64_t last = (p->q_len < p->kv_len ? p->q_len : p->kv_len) - 1, rows[] = {0, 1, last / 2, last};
    for (size_t n = 0; n < COUNT_OF(rows); n++) {
        tensors prefix = part_of(&whole, 0, rows[n] + 1);
        prefix.problem.mask = ACR_MASK_NONE;
        execute_once(ctx, kernel, &prefix);
        for (int64_t batch = 0; batch < p->batch; batch++)
            for (int64_t head = 0; head < p->q_heads; head++)
                for (int64_t d = 0; d < p->v_dim; d++) {
                    const double difference =
                        fabs(o_at(&prefix, batch, head, rows[n], d) - o_at(&whole, batch, head, rows[n], d));
                    if (!(difference <= tolerance_of(kernel)))
                        fail_at(kernel, p, "a causal row and its prefix", difference);
                }
        tensors_free(&prefix);
    }
    tensors_free(&whole);
}

static void causal_rows_equal_their_prefixes(void **state)
{
    (void)state;
    for_all(check_prefixes);
}

/* ---- Repetition ---------------------------------------------------------------------------------------------------
 * */

static void check_repetition(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    tensors a = tensors_make(p, 19), b = tensors_make(p, 19);
    execute_once(ctx, kernel, &a);
    for (int round = 0; round < 3; round++) {
        tensors_poison_outputs(&b);
        execute_once(ctx, kernel, &b);
        if (memcmp(a.o, b.o, a.o_bytes) != 0 || memcmp(a.lse, b.lse, a.lse_bytes) != 0)
            fail_at(kernel, p, "repeated", 0.0);
    }
    tensors_free(&a);
    tensors_free(&b);
}

static void repeating_gives_the_same_bits(void **state)
{
    (void)state;
    for_all(check_repetition);
}

static void check_threads(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    tensors a = tensors_make(p, 20), b = tensors_make(p, 20);
    execute_once(ctx, kernel, &a);
    const uint32_t counts[] = {1, 3};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        acr_ctx *other = cpu_ctx(counts[i]);
        tensors_poison_outputs(&b);
        execute_once(other, kernel, &b);
        acr_ctx_destroy(other);
        if (memcmp(a.o, b.o, a.o_bytes) != 0 || memcmp(a.lse, b.lse, a.lse_bytes) != 0)
            fail_at(kernel, p, "another number of threads", 0.0);
    }
    tensors_free(&a);
    tensors_free(&b);
}

static void any_number_of_threads_gives_the_same_bits(void **state)
{
    (void)state;
    for_all(check_threads);
}

/* ---- Isolation ----------------------------------------------------------------------------------------------------
 * */

static void check_nan(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    /* A NaN in the last key/value head of the last batch entry: its queries' rows become NaN, all others keep their
     * bits. */
    tensors clean = tensors_make(p, 21), spoilt = tensors_make(p, 21);
    const int64_t batch = p->batch - 1, kv_head = p->kv_heads - 1, group = p->q_heads / p->kv_heads;
    acr__store_element(p->dtype, spoilt.k, element_of(&p->k, batch, kv_head, p->kv_len / 2, 0), NAN);
    execute_once(ctx, kernel, &clean);
    execute_once(ctx, kernel, &spoilt);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->q_heads; h++)
            for (int64_t row = 0; row < p->q_len; row++)
                for (int64_t d = 0; d < p->v_dim; d++) {
                    const double before = o_at(&clean, b, h, row, d), after = o_at(&spoilt, b, h, row, d);
                    const bool affected = b == batch && h / group == kv_head;
                    if (affected ? !isnan(after) : before != after)
                        fail_at(kernel, p, affected ? "a NaN key was lost" : "a NaN key reached another head", after);
                }
    tensors_free(&clean);
    tensors_free(&spoilt);
}

static void nan_stays_where_it_belongs(void **state)
{
    (void)state;
    for_all(check_nan);
}

static void check_lengths(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    /* Keys and values beyond kv_lens hold NaN: nothing of them is seen. */
    acr_problem with_lens = *p;
    with_lens.flags |= ACR_KV_LENS;
    tensors clean = tensors_make(&with_lens, 22), spoilt = tensors_make(&with_lens, 22);
    clean.kv_lens[0] = spoilt.kv_lens[0] = (int32_t)(p->kv_len / 2);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->kv_heads; h++)
            for (int64_t j = spoilt.kv_lens[b]; j < p->kv_len; j++) {
                for (int64_t d = 0; d < p->qk_dim; d++)
                    acr__store_element(p->dtype, spoilt.k, element_of(&p->k, b, h, j, d), NAN);
                for (int64_t d = 0; d < p->v_dim; d++)
                    acr__store_element(p->dtype, spoilt.v, element_of(&p->v, b, h, j, d), NAN);
            }
    execute_once(ctx, kernel, &clean);
    execute_once(ctx, kernel, &spoilt);
    if (memcmp(clean.o, spoilt.o, clean.o_bytes) != 0 || memcmp(clean.lse, spoilt.lse, clean.lse_bytes) != 0)
        fail_at(kernel, p, "keys beyond kv_lens were seen", 0.0);
    tensors_free(&clean);
    tensors_free(&spoilt);
}

static void keys_beyond_their_lengths_are_never_seen(void **state)
{
    (void)state;
    for_all(check_lengths);
}

static void check_gaps(acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *p)
{
    /* Padded rows: what lies between the elements is neither read (NaN) nor written. */
    acr_problem padded = *p;
    padded.alignment = element_alignment(p);
    acr_strides *const strides[] = {&padded.q, &padded.k, &padded.v, &padded.o};
    const int64_t lengths[] = {p->q_len, p->kv_len, p->kv_len, p->q_len},
                  dims[] = {p->qk_dim, p->qk_dim, p->v_dim, p->v_dim};
    const int64_t heads[] = {p->q_heads, p->kv_heads, p->kv_heads, p->q_heads};
    for (int i = 0; i < 4; i++) {
        strides[i]->row = dims[i] + 3;
        strides[i]->head = lengths[i] * strides[i]->row + 5;
        strides[i]->batch = heads[i] * strides[i]->head + 7;
    }
    tensors t = tensors_make(&padded, 23), packed = tensors_make(p, 24);
    memset(t.q, 0xff, t.q_bytes);
    memset(t.k, 0xff, t.k_bytes);
    memset(t.v, 0xff, t.v_bytes);
    const struct {
        void *to;
        const void *from;
        const acr_strides *from_strides;
    } inputs[] = {{t.q, packed.q, &p->q}, {t.k, packed.k, &p->k}, {t.v, packed.v, &p->v}};
    for (int i = 0; i < 3; i++)
        for (int64_t b = 0; b < p->batch; b++)
            for (int64_t h = 0; h < heads[i]; h++)
                for (int64_t row = 0; row < lengths[i]; row++)
                    for (int64_t d = 0; d < dims[i]; d++)
                        acr__store_element(p->dtype, inputs[i].to, element_of(strides[i], b, h, row, d),
                                           acr__load_element(p->dtype, inputs[i].from,
                                                             element_of(inputs[i].from_strides, b, h, row, d)));
    execute_once(ctx, kernel, &packed);
    execute_once(ctx, kernel, &t);
    assert_agree(kernel, &packed, &t, "padded rows");
    /* After blanking the elements, only the poison of the gaps is left. */
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < p->q_heads; h++)
            for (int64_t row = 0; row < p->q_len; row++)
                memset((char *)t.o + element_of(&t.problem.o, b, h, row, 0) * acr__dtype_bytes(p->out_dtype), 0xff,
                       (size_t)(p->v_dim * acr__dtype_bytes(p->out_dtype)));
    for (size_t i = 0; i < t.o_bytes; i++)
        if (((const unsigned char *)t.o)[i] != 0xff)
            fail_at(kernel, p, "something was written between the rows", 0.0);
    tensors_free(&t);
    tensors_free(&packed);
}

static void gaps_between_rows_are_neither_read_nor_written(void **state)
{
    (void)state;
    for_all(check_gaps);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_order_of_keys_does_not_matter),
        cmocka_unit_test(constant_values_come_out_unchanged),
        cmocka_unit_test(adding_one_vector_to_every_key_changes_nothing),
        cmocka_unit_test(scale_and_queries_can_be_traded),
        cmocka_unit_test(parts_merged_by_lse_equal_the_whole),
        cmocka_unit_test(causal_rows_equal_their_prefixes),
        cmocka_unit_test(repeating_gives_the_same_bits),
        cmocka_unit_test(any_number_of_threads_gives_the_same_bits),
        cmocka_unit_test(nan_stays_where_it_belongs),
        cmocka_unit_test(keys_beyond_their_lengths_are_never_seen),
        cmocka_unit_test(gaps_between_rows_are_neither_read_nor_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
