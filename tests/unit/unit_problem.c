/* The problem: its text form (parse, format), its canonical form, and every way to get them wrong. */
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Text form: reading and writing -------------------------------------------------------------------------------
 * */

/* Texts and their canonical texts. */
static const struct {
    const char *text, *canonical;
} forms[] = {
    {"b2:h8:s512:d64", "b2:h8:s512:d64"},
    /* any order in, one order out */
    {"d64:s512:h8:b2", "b2:h8:s512:d64"},
    {"kvlens:lse:align32:os=1024,512,128:causal-tl:d64/64:s4/9:h2:b3:bf16:fwd",
     "bf16:b3:h2:s4/9:d64:causal-tl:os=1024,512,128:align32:lse:kvlens"},
    {"causal:d128:b8:bf16:h32/8:s1024", "bf16:b8:h32/8:s1024:d128:causal"},
    /* what is default is left out */
    {"fwd:f16:b1:h4/4:s16/16:d32/32:bhsd:align16", "b1:h4:s16:d32"},
    {"f32:b1:h1:s16:d8", "f32:b1:h1:s16:d8"},
    {"e4m3:of16:b1:h1:s16:d16", "e4m3:b1:h1:s16:d16"},
    {"e4m3:obf16:b1:h1:s16:d16", "e4m3:b1:h1:s16:d16:obf16"},
    {"f16:of16:b1:h1:s16:d16", "b1:h1:s16:d16"},
    {"of32:b1:h1:s16:d16", "b1:h1:s16:d16:of32"},
    {"bf16:b1:h1:s16:d16:lse:of32:align32", "bf16:b1:h1:s16:d16:align32:of32:lse"},
    {"f32:of32:b1:h1:s16:d16", "f32:b1:h1:s16:d16"},
    {"bf16:obf16:b1:h1:s16:d16", "bf16:b1:h1:s16:d16"},
    /* lengths and dims in pairs */
    {"b1:h6/3:s7/11:d40/24", "b1:h6/3:s7/11:d40/24"},
    /* masks */
    {"b1:h1:s5/9:d8:causal", "b1:h1:s5/9:d8:causal"},
    {"b1:h1:s5/9:d8:causal-tl", "b1:h1:s5/9:d8:causal-tl"},
    /* layouts and strides; strides that say no more than the layout are left out */
    {"b2:h3:s5:d8:bshd", "b2:h3:s5:d8:bshd"},
    {"b2:h3:s5:d8:qs=120,40,8", "b2:h3:s5:d8"},
    {"b2:h3:s5:d8:qs=120,8,24:ks=120,8,24:vs=120,8,24:os=120,8,24", "b2:h3:s5:d8:bshd"},
    {"b2:h3:s5:d8:bshd:qs=120,40,8", "b2:h3:s5:d8:ks=120,8,24:vs=120,8,24:os=120,8,24"},
    {"b2:h3:s5:d8:ks=0,40,8:vs=0,0,8", "b2:h3:s5:d8:ks=0,40,8:vs=0,0,8"},
    /* the stride of an extent of 1 is ignored */
    {"b1:h3:s5:d8:qs=7,40,8", "b1:h3:s5:d8"},
    {"b1:h1:s5:d8:qs=7,9,8:os=1,2,8", "b1:h1:s5:d8"},
    /* alignment */
    {"b1:h1:s5:d8:align2", "b1:h1:s5:d8:align2"},
    {"b1:h1:s5:d8:align256", "b1:h1:s5:d8:align256"},
    {"e4m3:b1:h1:s5:d8:align2", "e4m3:b1:h1:s5:d8:align2"},
    /* the largest extents */
    {"b1:h1:s1:d2147483647", "b1:h1:s1:d2147483647"},
    {"b2147483647:h1:s1:d8", "b2147483647:h1:s1:d8"},
    {"b1:h2147483647/1:s1:d8", "b1:h2147483647/1:s1:d8"},
};

static void format_gives_the_canonical_text(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(forms); i++) {
        const acr_problem problem = problem_of(forms[i].text);
        char text[ACR_PROBLEM_TEXT_MAX];
        assert_ok(acr_problem_format(&problem, text, sizeof text));
        assert_string_equal(text, forms[i].canonical);
    }
}

static void canonical_texts_stay_as_they_are(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(forms); i++) {
        const acr_problem problem = problem_of(forms[i].canonical);
        char text[ACR_PROBLEM_TEXT_MAX];
        assert_ok(acr_problem_format(&problem, text, sizeof text));
        assert_string_equal(text, forms[i].canonical);
    }
}

static void texts_of_one_problem_give_one_canonical_problem(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(forms); i++) {
        const acr_problem a = canonical_of(forms[i].text), b = canonical_of(forms[i].canonical);
        assert_memory_equal(&a, &b, sizeof a);
        assert_int_equal(acr__problem_digest(&a), acr__problem_digest(&b));
    }
}

static void every_permutation_of_the_fields_reads_alike(void **state)
{
    (void)state;
    const char *fields[] = {"bf16", "b2", "h4/2", "s8/16", "d32", "causal-tl", "lse"};
    generator g = {1};
    const acr_problem expected = canonical_of("bf16:b2:h4/2:s8/16:d32:causal-tl:lse");
    for (int round = 0; round < 200; round++) {
        for (size_t i = COUNT_OF(fields) - 1; i > 0; i--) {
            const size_t j = next_u64(&g) % (i + 1);
            const char *swapped = fields[i];
            fields[i] = fields[j];
            fields[j] = swapped;
        }
        char text[128] = "";
        for (size_t i = 0; i < COUNT_OF(fields); i++) {
            strncat(text, i ? ":" : "", sizeof text - strlen(text) - 1);
            strncat(text, fields[i], sizeof text - strlen(text) - 1);
        }
        const acr_problem problem = canonical_of(text);
        assert_memory_equal(&problem, &expected, sizeof problem);
    }
}

static void parse_sets_every_field(void **state)
{
    (void)state;
    const acr_problem p =
        problem_of("e4m3:b2:h6/3:s5/7:d16/32:causal:bshd:qs=1000,100,20:ks=2000,200,40:vs=3000,300,60:"
                   "os=4000,400,80:align64:obf16:lse:kvlens");
    assert_int_equal(p.size, sizeof p);
    assert_int_equal(p.pass, ACR_FORWARD);
    assert_int_equal(p.dtype, ACR_E4M3);
    assert_int_equal(p.out_dtype, ACR_BF16);
    assert_int_equal(p.mask, ACR_MASK_CAUSAL);
    assert_int_equal(p.layout, ACR_BSHD);
    assert_int_equal(p.flags, ACR_WANT_LSE | ACR_KV_LENS);
    assert_int_equal(p.alignment, 64);
    assert_int_equal(p.batch, 2);
    assert_int_equal(p.q_heads, 6);
    assert_int_equal(p.kv_heads, 3);
    assert_int_equal(p.q_len, 5);
    assert_int_equal(p.kv_len, 7);
    assert_int_equal(p.qk_dim, 16);
    assert_int_equal(p.v_dim, 32);
    const acr_strides q = {1000, 100, 20}, k = {2000, 200, 40}, v = {3000, 300, 60}, o = {4000, 400, 80};
    assert_memory_equal(&p.q, &q, sizeof q);
    assert_memory_equal(&p.k, &k, sizeof k);
    assert_memory_equal(&p.v, &v, sizeof v);
    assert_memory_equal(&p.o, &o, sizeof o);
    /* scale and the fp8 scales have no text form: 0, the default */
    assert_true(p.scale == 0.0f && p.q_scale == 0.0f && p.k_scale == 0.0f && p.v_scale == 0.0f);
}

/* Every error of the grammar: where it is and what it says. */
static const struct {
    const char *text;
    acr_status status;
    size_t position;
    const char *reason;
} errors[] = {
    {"", ACR_FORMAT, 0, "expected a field"},
    {":b1:h1:s1:d8", ACR_FORMAT, 0, "expected a field"},
    {"b1::h1:s1:d8", ACR_FORMAT, 3, "expected a field"},
    {"b1:h1:s1:d8:", ACR_FORMAT, 12, "expected a field"},
    {"b1:h1:s1:d8:quux", ACR_FORMAT, 12, "unknown field"},
    {"b1:h1:s1:d8:caus", ACR_FORMAT, 12, "unknown field"},
    {"b1:h1:s1:d8:Causal", ACR_FORMAT, 12, "unknown field"},
    {"b1:h1:s1:d8:bshdx", ACR_FORMAT, 12, "unknown field"},
    {" b1:h1:s1:d8", ACR_FORMAT, 0, "unknown field"},
    {"b1:h1:s1:d8 ", ACR_FORMAT, 11, "unexpected character"},
    {"b1:h1:s1:d8x", ACR_FORMAT, 11, "unexpected character"},
    {"b1/2:h1:s1:d8", ACR_FORMAT, 2, "unexpected character"},
    {"b1:h4/2/1:s1:d8", ACR_FORMAT, 7, "unexpected character"},
    {"b1.5:h1:s1:d8", ACR_FORMAT, 2, "unexpected character"},
    {"b:h1:s1:d8", ACR_FORMAT, 1, "expected a number"},
    {"b-1:h1:s1:d8", ACR_FORMAT, 0, "unknown field"},
    {"b+1:h1:s1:d8", ACR_FORMAT, 0, "unknown field"},
    {"b1:h1/:s1:d8", ACR_FORMAT, 6, "expected a number"},
    {"b1:h1:s1/-3:d8", ACR_FORMAT, 9, "expected a number"},
    {"b1:h1:s1:d0", ACR_FORMAT, 10, "1 to 2147483647"},
    {"b0:h1:s1:d8", ACR_FORMAT, 1, "1 to 2147483647"},
    {"b1:h4/0:s1:d8", ACR_FORMAT, 6, "1 to 2147483647"},
    {"b2147483648:h1:s1:d8", ACR_FORMAT, 1, "1 to 2147483647"},
    {"b1:h1:s1/2147483648:d8", ACR_FORMAT, 9, "1 to 2147483647"},
    {"b99999999999999999999:h1:s1:d8", ACR_FORMAT, SIZE_MAX, "digits"},
    {"b1:b1:h1:s1:d8", ACR_FORMAT, 3, "twice"},
    {"b1:h1:s1:d8:f16:bf16", ACR_FORMAT, 16, "twice"},
    {"b1:h1:s1:d8:causal:causal-tl", ACR_FORMAT, 19, "twice"},
    {"b1:h1:s1:d8:bshd:bhsd", ACR_FORMAT, 17, "twice"},
    {"b1:h1:s1:d8:lse:lse", ACR_FORMAT, 16, "twice"},
    {"b1:h1:s1:d8:kvlens:kvlens", ACR_FORMAT, 19, "twice"},
    {"fwd:fwd:b1:h1:s1:d8", ACR_FORMAT, 4, "twice"},
    {"b1:h1:s1:d8:align4:align4", ACR_FORMAT, 19, "twice"},
    {"b1:h1:s1:d8:qs=1,2,8:qs=1,2,8", ACR_FORMAT, 21, "twice"},
    {"e4m3:b1:h1:s1:d8:of16:obf16", ACR_FORMAT, 22, "twice"},
    {"b1:h1:s1:d8:window128", ACR_FORMAT, 12, "window"},
    {"h1:s1:d8", ACR_FORMAT, 8, "batch"},
    {"b1:s1:d8", ACR_FORMAT, 8, "heads"},
    {"b1:h1:d8", ACR_FORMAT, 8, "lengths"},
    {"b1:h1:s1", ACR_FORMAT, 8, "dim"},
    {"b1:h1:s1:d8:qs=", ACR_FORMAT, 15, "expected a number"},
    {"b1:h1:s1:d8:qs=1,2", ACR_FORMAT, 18, "batch,head,row"},
    {"b1:h1:s1:d8:qs=1,2,3,4", ACR_FORMAT, 20, "unexpected character"},
    {"b1:h1:s1:d8:ks=1,-2,3", ACR_FORMAT, 17, "expected a number"},
    {"b1:h1:s1:d8:ks=0,0,0", ACR_FORMAT, 15, "not all be 0"},
    {"b1:h1:s1:d8:align", ACR_FORMAT, 17, "expected a number"},
    {"b1:h1:s1:d8:align0", ACR_FORMAT, 17, "1 to 256"},
    {"b1:h1:s1:d8:align512", ACR_FORMAT, 17, "1 to 256"},
    /* grammatical, but not a problem: the whole text is at fault */
    {"b1:h8/3:s1:d8", ACR_INVALID, SIZE_MAX, "kv_heads"},
    {"b1:h2/4:s1:d8", ACR_INVALID, SIZE_MAX, "kv_heads"},
    {"b1:h1:s1:d8:align3", ACR_INVALID, SIZE_MAX, "alignment"},
    {"b1:h1:s1:d8:align1", ACR_INVALID, SIZE_MAX, "alignment"},
    {"e4m3:b1:h1:s1:d8:align1", ACR_INVALID, SIZE_MAX, "alignment"},
    {"b1:h1:s1:d8:obf16", ACR_INVALID, SIZE_MAX, "out_dtype"},
    {"f32:b1:h1:s1:d8:of16", ACR_INVALID, SIZE_MAX, "out_dtype"},
    {"b1:h2:s2:d8:os=0,8,8", ACR_INVALID, SIZE_MAX, "overlap itself"},
    {"b2147483647:h2147483647:s2147483647:d8", ACR_INVALID, SIZE_MAX, "q spans"},
};

static void errors_name_their_position_and_reason(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(errors); i++) {
        acr_problem out, before;
        memset(&out, 0x5a, sizeof out);
        before = out;
        size_t position = SIZE_MAX;
        const acr_status status = acr_problem_parse(&out, errors[i].text, &position);
        const bool position_ok =
            errors[i].position == SIZE_MAX ? position <= strlen(errors[i].text) : position == errors[i].position;
        if (status != errors[i].status || !position_ok || !strstr(acr_last_error(), errors[i].reason))
            fail_msg("\"%s\": status %d, position %zu, \"%s\"; expected %d, %zu, \"%s\"", errors[i].text, (int)status,
                     position, acr_last_error(), (int)errors[i].status, errors[i].position, errors[i].reason);
        assert_memory_equal(&out, &before, sizeof out); /* written only on success */
    }
}

static void position_may_be_null(void **state)
{
    (void)state;
    acr_problem out;
    assert_fails(acr_problem_parse(&out, "b1:h1:s1:dx", NULL), ACR_FORMAT, "");
    assert_ok(acr_problem_parse(&out, "b1:h1:s1:d8", NULL));
}

static void null_arguments_are_refused(void **state)
{
    (void)state;
    acr_problem p = problem_of("b1:h1:s1:d8");
    char text[ACR_PROBLEM_TEXT_MAX];
    assert_fails(acr_problem_parse(NULL, "b1:h1:s1:d8", NULL), ACR_INVALID, "NULL");
    assert_fails(acr_problem_parse(&p, NULL, NULL), ACR_INVALID, "NULL");
    assert_fails(acr_problem_format(NULL, text, sizeof text), ACR_INVALID, "NULL");
    assert_fails(acr_problem_format(&p, NULL, 512), ACR_INVALID, "text");
    assert_fails(acr_problem_canonical(NULL, &p), ACR_INVALID, "NULL");
    assert_fails(acr_problem_canonical(&p, NULL), ACR_INVALID, "NULL");
}

static void format_needs_room_for_the_whole_text(void **state)
{
    (void)state;
    const char *canonical = "bf16:b2:h8/2:s512:d64:causal";
    const acr_problem p = problem_of(canonical);
    char text[64], before[64];
    memset(text, '#', sizeof text);
    memcpy(before, text, sizeof text);
    for (size_t capacity = 0; capacity <= strlen(canonical); capacity++) {
        assert_fails(acr_problem_format(&p, text, capacity), ACR_INVALID, "capacity");
        assert_memory_equal(text, before, sizeof text);
    }
    assert_ok(acr_problem_format(&p, text, strlen(canonical) + 1));
    assert_string_equal(text, canonical);
    assert_int_equal(text[strlen(canonical) + 1], '#');
}

/* ---- Canonical form -----------------------------------------------------------------------------------------------
 * */

static void defaults_are_filled_in(void **state)
{
    (void)state;
    acr_problem p = ACR_PROBLEM_INIT;
    p.batch = 2;
    p.q_heads = 8;
    p.q_len = 512;
    p.qk_dim = 64;
    acr_problem c;
    assert_ok(acr_problem_canonical(&c, &p));
    assert_int_equal(c.kv_heads, 8);
    assert_int_equal(c.kv_len, 512);
    assert_int_equal(c.v_dim, 64);
    assert_int_equal(c.alignment, 16);
    assert_int_equal(c.dtype, ACR_F16);
    assert_int_equal(c.out_dtype, ACR_F16);
    assert_true(c.scale == 0.125f);
    assert_true(c.q_scale == 1.0f && c.k_scale == 1.0f && c.v_scale == 1.0f);
    const acr_strides packed = {8 * 512 * 64, 512 * 64, 64};
    assert_memory_equal(&c.q, &packed, sizeof packed);
    assert_memory_equal(&c.k, &packed, sizeof packed);
    assert_memory_equal(&c.v, &packed, sizeof packed);
    assert_memory_equal(&c.o, &packed, sizeof packed);
}

static void packed_strides_follow_the_layout(void **state)
{
    (void)state;
    const acr_problem a = canonical_of("b2:h6/3:s5/7:d16/32");
    const acr_strides q = {6 * 5 * 16, 5 * 16, 16}, k = {3 * 7 * 16, 7 * 16, 16}, v = {3 * 7 * 32, 7 * 32, 32},
                      o = {6 * 5 * 32, 5 * 32, 32};
    assert_memory_equal(&a.q, &q, sizeof q);
    assert_memory_equal(&a.k, &k, sizeof k);
    assert_memory_equal(&a.v, &v, sizeof v);
    assert_memory_equal(&a.o, &o, sizeof o);
    const acr_problem b = canonical_of("b2:h6/3:s5/7:d16/32:bshd");
    const acr_strides bq = {5 * 6 * 16, 16, 6 * 16}, bk = {7 * 3 * 16, 16, 3 * 16}, bv = {7 * 3 * 32, 32, 3 * 32},
                      bo = {5 * 6 * 32, 32, 6 * 32};
    assert_memory_equal(&b.q, &bq, sizeof bq);
    assert_memory_equal(&b.k, &bk, sizeof bk);
    assert_memory_equal(&b.v, &bv, sizeof bv);
    assert_memory_equal(&b.o, &bo, sizeof bo);
}

static void default_output_type_follows_the_input(void **state)
{
    (void)state;
    assert_int_equal(canonical_of("f32:b1:h1:s1:d8").out_dtype, ACR_F32);
    assert_int_equal(canonical_of("bf16:b1:h1:s1:d8").out_dtype, ACR_BF16);
    assert_int_equal(canonical_of("e4m3:b1:h1:s1:d8").out_dtype, ACR_F16);
    assert_int_equal(canonical_of("e4m3:b1:h1:s1:d8:obf16").out_dtype, ACR_BF16);
}

static void canonical_is_idempotent_and_in_place(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(forms); i++) {
        const acr_problem in = problem_of(forms[i].text);
        acr_problem once, twice, in_place = in;
        assert_ok(acr_problem_canonical(&once, &in));
        assert_ok(acr_problem_canonical(&twice, &once));
        assert_ok(acr_problem_canonical(&in_place, &in_place));
        assert_memory_equal(&once, &twice, sizeof once);
        assert_memory_equal(&once, &in_place, sizeof once);
    }
}

/* One field changed to a value that is refused, or accepted. */
static acr_problem valid_problem(void)
{
    return problem_of("b2:h4/2:s8/16:d32/64");
}

#define assert_refused(change, fragment)                                                                               \
    do {                                                                                                               \
        acr_problem p = valid_problem(), out;                                                                          \
        memset(&out, 0x5a, sizeof out);                                                                                \
        const acr_problem before = out;                                                                                \
        change;                                                                                                        \
        assert_fails(acr_problem_canonical(&out, &p), ACR_INVALID, fragment);                                          \
        assert_memory_equal(&out, &before, sizeof out);                                                                \
    } while (0)
#define assert_accepted(change)                                                                                        \
    do {                                                                                                               \
        acr_problem p = valid_problem();                                                                               \
        change;                                                                                                        \
        assert_ok(acr_problem_canonical(&p, &p));                                                                      \
    } while (0)

static void extents_have_limits(void **state)
{
    (void)state;
    const int64_t too_many = INT64_C(1) << 31;
    assert_refused(p.batch = 0, "batch");
    assert_refused(p.batch = -1, "batch");
    assert_refused(p.batch = too_many, "2147483647");
    assert_refused(p.q_heads = 0, "q_heads");
    assert_refused(p.q_heads = too_many, "q_heads");
    assert_refused(p.kv_heads = -2, "kv_heads");
    assert_refused(p.kv_heads = 3, "kv_heads (3) must divide q_heads (4)");
    assert_refused(p.kv_heads = 8, "kv_heads");
    assert_refused(p.q_len = 0, "q_len");
    assert_refused(p.q_len = INT64_MIN, "q_len");
    assert_refused(p.kv_len = -1, "kv_len");
    assert_refused(p.kv_len = INT64_MAX, "kv_len");
    assert_refused(p.qk_dim = 0, "qk_dim");
    assert_refused(p.v_dim = -64, "v_dim");
    assert_refused(p.v_dim = too_many, "v_dim");
    assert_accepted(p.kv_heads = 1);
    assert_accepted(p.batch = 2147483647);
    assert_accepted(p.kv_len = 1);
}

static void choices_have_limits(void **state)
{
    (void)state;
    assert_refused(p.pass = (acr_pass)2, "pass is 2");
    assert_refused(p.dtype = ACR_DTYPE_DEFAULT, "dtype");
    assert_refused(p.dtype = (acr_dtype)5, "dtype is 5");
    assert_refused(p.out_dtype = ACR_BF16, "out_dtype is 3 (bf16), must be f32 or the type of the inputs");
    assert_accepted(p.out_dtype = ACR_F32);
    assert_accepted((p.out_dtype = ACR_F32, p.alignment = 2));
    assert_refused((p.out_dtype = ACR_F32, p.pass = ACR_BACKWARD), "out_dtype is 1 (f32), with ACR_BACKWARD");
    assert_refused(p.out_dtype = (acr_dtype)9, "out_dtype");
    assert_refused((p.dtype = ACR_E4M3, p.out_dtype = ACR_F32), "out_dtype");
    assert_refused((p.dtype = ACR_E4M3, p.out_dtype = ACR_E4M3), "out_dtype");
    assert_refused(p.mask = (acr_mask)3, "mask");
    assert_refused(p.mask = (acr_mask)-1, "mask");
    assert_refused(p.layout = (acr_layout)2, "layout");
    assert_refused(p.flags = 0x1000, "flags");
    assert_refused(p.flags = ACR_WANT_LSE | 0x80000000u, "flags");
    assert_accepted((p.dtype = ACR_E4M3, p.out_dtype = ACR_BF16));
    assert_accepted(p.flags = ACR_WANT_LSE | ACR_KV_LENS);
}

static void packed_batches_have_one_layout(void **state)
{
    (void)state;
    assert_refused(p.flags = ACR_PACKED, "layout");
    assert_refused((p.layout = ACR_BSHD, p.flags = ACR_PACKED | ACR_KV_LENS), "ACR_KV_LENS");
    assert_refused((p.layout = ACR_BSHD, p.flags = ACR_PACKED, p.q = (acr_strides){4096, 64, 256}), "q.batch");
    assert_refused((p.layout = ACR_BSHD, p.flags = ACR_PACKED, p.o = (acr_strides){1, 64, 256}), "o.batch");
    assert_refused((p.layout = ACR_BSHD, p.flags = ACR_PACKED, p.o = (acr_strides){0, 64, 255}), "overlap itself");
    assert_refused((p.layout = ACR_BSHD, p.flags = ACR_PACKED, p.o = (acr_strides){0, 1 << 20, 64}), "overlap itself");
    assert_accepted((p.layout = ACR_BSHD, p.flags = ACR_PACKED | ACR_WANT_LSE));
    assert_accepted((p.layout = ACR_BSHD, p.flags = ACR_PACKED, p.k = (acr_strides){0, 64, 1000}));
    assert_accepted((p.layout = ACR_BSHD, p.flags = ACR_PACKED, p.k = (acr_strides){0, 1 << 20, 64}));
}

static void assert_canonical_text(const char *text, const char *expected)
{
    const acr_problem p = problem_of(text);
    char written[ACR_PROBLEM_TEXT_MAX];
    assert_ok(acr_problem_format(&p, written, sizeof written));
    assert_string_equal(written, expected);
}

/* Nothing of it depends on how many rows there are: that is the execution's to say. */
static void packed_batches_are_canonical(void **state)
{
    (void)state;
    const acr_problem p = canonical_of("b3:h4/2:s1/70:d16/8:bshd:packed"), q = canonical_of("b3:h4/2:s1/70:d16/8:bshd");
    assert_int_equal(p.flags, ACR_PACKED);
    assert_int_equal(p.layout, ACR_BSHD);
    assert_true(p.q.batch == 0 && p.q.head == 16 && p.q.row == 64);
    assert_true(p.v.batch == 0 && p.v.head == 8 && p.v.row == 16);
    assert_true(acr__problem_digest(&p) != acr__problem_digest(&q));
    assert_canonical_text("packed:b3:h4/2:s1/70:d16/8:bshd:lse", "b3:h4/2:s1/70:d16/8:bshd:lse:packed");
    assert_canonical_text("b1:h1:s9:d8:bshd:packed", "b1:h1:s9:d8:bshd:packed");
    assert_canonical_text("b2:h4:s9:d8:bshd:packed:ks=0,8,96", "b2:h4:s9:d8:bshd:ks=0,8,96:packed");
    /* Sequences differ in length, so top-left and bottom-right stay apart; one query sees every key, in each. */
    assert_canonical_text("b2:h4:s9:d8:bshd:packed:causal-tl", "b2:h4:s9:d8:causal-tl:bshd:packed");
    assert_canonical_text("b2:h4:s1/9:d8:bshd:packed:causal", "b2:h4:s1/9:d8:bshd:packed");
}

static void alignment_has_limits(void **state)
{
    (void)state;
    assert_refused(p.alignment = 1, "alignment");
    assert_refused(p.alignment = 3, "alignment");
    assert_refused(p.alignment = 24, "alignment");
    assert_refused(p.alignment = 512, "256");
    assert_refused(p.alignment = 0x80000000u, "alignment");
    assert_refused((p.dtype = ACR_F32, p.alignment = 2), "alignment");
    for (uint32_t a = 2; a <= 256; a *= 2)
        assert_accepted(p.alignment = a);
}

static void scales_have_limits(void **state)
{
    (void)state;
    assert_refused(p.scale = -1.0f, "scale");
    assert_refused(p.scale = NAN, "scale");
    assert_refused(p.scale = INFINITY, "scale");
    assert_accepted(p.scale = 1e-30f);
    assert_accepted(p.scale = 3.5f);
    /* only fp8 inputs have scales of their own */
    assert_refused(p.q_scale = 2.0f, "q_scale");
    assert_refused(p.k_scale = 0.5f, "k_scale");
    assert_refused(p.v_scale = NAN, "v_scale");
    assert_accepted(p.v_scale = 1.0f);
    assert_accepted((p.dtype = ACR_E4M3, p.q_scale = 2.0f));
    assert_refused((p.dtype = ACR_E4M3, p.q_scale = -2.0f), "q_scale");
    assert_refused((p.dtype = ACR_E4M3, p.k_scale = INFINITY), "k_scale");
    assert_refused((p.dtype = ACR_E4M3, p.v_scale = NAN), "v_scale");
}

static void strides_have_limits(void **state)
{
    (void)state;
    const int64_t huge = INT64_MAX / 2;
    /* valid_problem: q [2, 4, 8, 32], k [2, 2, 16, 32], v [2, 2, 16, 64], o [2, 4, 8, 64] */
    assert_refused((p.q = (acr_strides){-1024, 256, 32}), "q strides");
    assert_refused((p.k = (acr_strides){1024, -512, 32}), "k strides");
    assert_refused((p.v = (acr_strides){2048, 1024, -64}), "v strides");
    assert_refused((p.o = (acr_strides){2048, 512, -64}), "o strides");
    assert_refused((p.q = (acr_strides){huge, 256, 32}), "q spans");
    assert_refused((p.k = (acr_strides){1024, huge, 32}), "k spans");
    assert_refused((p.v = (acr_strides){2048, 1024, huge}), "v spans");
    assert_refused((p.o = (acr_strides){INT64_MAX, 512, 64}), "o ");
    /* inputs may repeat and overlap */
    assert_accepted((p.q = (acr_strides){0, 0, 32}));
    assert_accepted((p.k = (acr_strides){1, 1, 1}));
    assert_accepted((p.v = (acr_strides){0, 1024, 0}));
}

static void output_may_not_overlap_itself(void **state)
{
    (void)state;
    /* o [2, 4, 8, 64] */
    assert_refused((p.o = (acr_strides){0, 512, 64}), "overlap itself");
    assert_refused((p.o = (acr_strides){2048, 0, 64}), "overlap itself");
    assert_refused((p.o = (acr_strides){2048, 512, 0}), "overlap itself");
    assert_refused((p.o = (acr_strides){2048, 512, 63}), "overlap itself");
    assert_refused((p.o = (acr_strides){2048, 511, 64}), "overlap itself");
    assert_refused((p.o = (acr_strides){2047, 512, 64}), "overlap itself");
    assert_refused((p.o = (acr_strides){2048, 64, 255}), "overlap itself");
    /* packed, interleaved, padded, batch innermost */
    assert_accepted((p.o = (acr_strides){2048, 512, 64}));
    assert_accepted((p.o = (acr_strides){2048, 64, 256}));
    assert_accepted((p.o = (acr_strides){4096, 1000, 70}));
    assert_accepted((p.o = (acr_strides){64, 128, 512}));
}

static void strides_of_extents_of_one_are_ignored(void **state)
{
    (void)state;
    acr_problem p = problem_of("b1:h1:s1:d8");
    const acr_problem packed = canonical_of("b1:h1:s1:d8");
    p.o = (acr_strides){1, 1, 1};         /* would overlap itself if any extent were more than 1 */
    p.q = (acr_strides){INT64_MAX, 1, 0}; /* would overflow */
    p.k = (acr_strides){0, INT64_MAX, INT64_MAX};
    assert_ok(acr_problem_canonical(&p, &p));
    assert_memory_equal(&p, &packed, sizeof p);

    /* ... and what is left after ignoring them may repeat, without turning into "packed" */
    acr_problem repeated = problem_of("b1:h2:s4:d8");
    repeated.k = (acr_strides){64, 0, 0};
    assert_ok(acr_problem_canonical(&repeated, &repeated));
    assert_int_equal(repeated.k.head, 0);
    assert_int_equal(repeated.k.row, 0);
    acr_problem again;
    assert_ok(acr_problem_canonical(&again, &repeated));
    assert_memory_equal(&again, &repeated, sizeof again);
    char text[ACR_PROBLEM_TEXT_MAX];
    assert_ok(acr_problem_format(&repeated, text, sizeof text));
    const acr_problem read = canonical_of(text);
    assert_memory_equal(&read, &repeated, sizeof read);
}

/* ---- Versions of the struct ---------------------------------------------------------------------------------------
 * */

static void a_later_struct_is_read_when_its_tail_is_zero(void **state)
{
    (void)state;
    struct {
        acr_problem known;
        unsigned char tail[24];
    } later;
    memset(&later, 0, sizeof later);
    later.known = valid_problem();
    later.known.size = (uint32_t)sizeof later;
    acr_problem out;
    assert_ok(acr_problem_canonical(&out, &later.known));
    assert_int_equal(out.size, sizeof out);
    for (size_t i = 0; i < sizeof later.tail; i++) {
        later.tail[i] = 1;
        assert_fails(acr_problem_canonical(&out, &later.known), ACR_INVALID, "size");
        later.tail[i] = 0;
    }
}

static void a_struct_without_its_size_is_refused(void **state)
{
    (void)state;
    assert_refused(p.size = 0, "size");
    assert_refused(p.size = 4, "size");
    assert_refused(p.size = (uint32_t)sizeof p - 1, "ACR_PROBLEM_INIT");
}

/* ---- Texts name problems uniquely ---------------------------------------------------------------------------------
 * */

static int64_t pick(generator *g, const int64_t *list, size_t count)
{
    return list[next_u64(g) % count];
}

static acr_strides random_strides(generator *g)
{
    static const int64_t steps[] = {0, 8, 16, 64, 128, 4096, 1000000, INT64_C(123456789012345), INT64_C(1) << 59};
    return (acr_strides){pick(g, steps, COUNT_OF(steps)), pick(g, steps, COUNT_OF(steps)),
                         pick(g, steps, COUNT_OF(steps))};
}

/* Any problem: often invalid. */
static acr_problem random_problem(generator *g)
{
    static const int64_t extents[] = {1, 1, 2, 3, 4, 8, 64, 1333, 2147483647};
    acr_problem p = ACR_PROBLEM_INIT;
    p.dtype = (acr_dtype)(1 + next_u64(g) % 4);
    if (p.dtype == ACR_E4M3)
        p.out_dtype = (acr_dtype)pick(g, (const int64_t[]){ACR_DTYPE_DEFAULT, ACR_F16, ACR_BF16}, 3);
    p.mask = (acr_mask)(next_u64(g) % 3);
    p.layout = (acr_layout)(next_u64(g) % 2);
    p.flags = (uint32_t)(next_u64(g) % 4);
    p.alignment = (uint32_t)pick(g, (const int64_t[]){0, 2, 4, 16, 128, 256}, 6);
    p.batch = pick(g, extents, COUNT_OF(extents));
    p.q_heads = pick(g, extents, COUNT_OF(extents));
    p.kv_heads = next_u64(g) % 2 ? 0 : 1;
    p.q_len = pick(g, extents, COUNT_OF(extents));
    p.kv_len = next_u64(g) % 2 ? 0 : pick(g, extents, COUNT_OF(extents));
    p.qk_dim = pick(g, extents, COUNT_OF(extents));
    p.v_dim = next_u64(g) % 2 ? 0 : pick(g, extents, COUNT_OF(extents));
    acr_strides *const strides[] = {&p.q, &p.k, &p.v, &p.o};
    for (size_t i = 0; i < COUNT_OF(strides); i++)
        if (next_u64(g) % 4 == 0)
            *strides[i] = random_strides(g);
    if (next_u64(g) % 2) {
        p.flags |= (uint32_t)(next_u64(g) % 32) << 3;
        p.softcap = (float)(next_u64(g) % 3) * 12.5f;
        p.chunk = pick(g, extents, COUNT_OF(extents)) - 1;
        p.window_left = pick(g, extents, COUNT_OF(extents)) - 1;
        p.window_right = pick(g, extents, COUNT_OF(extents)) - 1;
        p.ranges = p.flags & ACR_RANGES ? 1 + (int32_t)(next_u64(g) % 3) : 0;
        p.bias_dtype = (acr_dtype)pick(g, (const int64_t[]){0, 0, ACR_F32, ACR_BF16, ACR_BOOL8, ACR_E4M3}, 6);
        if (p.bias_dtype != ACR_DTYPE_DEFAULT)
            p.bias = random_strides(g);
    }
    return p;
}

static void text_and_canonical_problem_determine_each_other(void **state)
{
    (void)state;
    generator g = {2};
    int valid = 0, invalid = 0;
    for (int round = 0; round < 20000; round++) {
        const acr_problem p = random_problem(&g);
        acr_problem canonical;
        char text[ACR_PROBLEM_TEXT_MAX];
        if (acr_problem_canonical(&canonical, &p) != ACR_OK) {
            invalid++;
            assert_int_equal(acr_problem_format(&p, text, sizeof text), ACR_INVALID);
            continue;
        }
        valid++;
        assert_ok(acr_problem_format(&p, text, sizeof text));
        assert_true(strlen(text) < sizeof text);
        const acr_problem read = canonical_of(text);
        if (memcmp(&read, &canonical, sizeof read) != 0)
            fail_msg("\"%s\" reads back as another problem", text);
    }
    assert_true(valid > 1000 && invalid > 1000);
}

static void different_problems_have_different_texts(void **state)
{
    (void)state;
    /* Neighbours of one problem, each different in one thing that a kernel could depend on. */
    const char *texts[] = {
        "b2:h4/2:s8/16:d32/64",
        "f32:b2:h4/2:s8/16:d32/64",
        "bf16:b2:h4/2:s8/16:d32/64",
        "e4m3:b2:h4/2:s8/16:d32/64",
        "e4m3:b2:h4/2:s8/16:d32/64:obf16",
        "b3:h4/2:s8/16:d32/64",
        "b2:h6/2:s8/16:d32/64",
        "b2:h4/1:s8/16:d32/64",
        "b2:h4/2:s9/16:d32/64",
        "b2:h4/2:s8/17:d32/64",
        "b2:h4/2:s8/16:d33/64",
        "b2:h4/2:s8/16:d32/65",
        "b2:h4/2:s8/16:d32/64:causal",
        "b2:h4/2:s8/16:d32/64:causal-tl",
        "b2:h4/2:s8/16:d32/64:bshd",
        "b2:h4/2:s8/16:d32/64:lse",
        "b2:h4/2:s8/16:d32/64:kvlens",
        "b2:h4/2:s8/16:d32/64:align32",
        "b2:h4/2:s8/16:d32/64:qs=2048,256,32",
        "b2:h4/2:s8/16:d32/64:ks=2048,512,32",
        "b2:h4/2:s8/16:d32/64:vs=4096,1024,64",
        "b2:h4/2:s8/16:d32/64:os=4096,512,64",
        "b2:h4/2:s8/16:d32/64:win4",
        "b2:h4/2:s8/16:d32/64:win0/4",
        "b2:h4/2:s8/16:d32/64:chunk4",
        "b2:h4/2:s8/16:d32/64:ranges1",
        "b2:h4/2:s8/16:d32/64:ranges2",
        "b2:h4/2:s8/16:d32/64:kvstarts",
        "b2:h4/2:s8/16:d32/64:sinks",
        "b2:h4/2:s8/16:d32/64:alibi",
        "b2:h4/2:s8/16:d32/64:tree",
        "b2:h4/2:s8/16:d32/64:cap50",
        "b2:h4/2:s8/16:d32/64:cap30",
        "b2:h4/2:s8/16:d32/64:mask/0,0,16",
        "b2:h4/2:s8/16:d32/64:mask/0,0,0",
        "b2:h4/2:s8/16:d32/64:bias-f16/0,0,16",
        "b2:h4/2:s8/16:d32/64:bias-bf16/0,0,16",
        "b2:h4/2:s8/16:d32/64:bias-f32/0,0,16",
    };
    char canonical[COUNT_OF(texts)][ACR_PROBLEM_TEXT_MAX];
    uint64_t digest[COUNT_OF(texts)];
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        const acr_problem p = canonical_of(texts[i]);
        assert_ok(acr_problem_format(&p, canonical[i], sizeof canonical[i]));
        digest[i] = acr__problem_digest(&p);
        for (size_t j = 0; j < i; j++) {
            assert_string_not_equal(canonical[i], canonical[j]);
            assert_int_not_equal(digest[i], digest[j]);
        }
    }
}

static void digest_sees_the_scales(void **state)
{
    (void)state;
    acr_problem a = canonical_of("e4m3:b1:h1:s1:d16"), b = a, c = a;
    b.scale = 0.5f;
    c.v_scale = 2.0f;
    assert_int_not_equal(acr__problem_digest(&a), acr__problem_digest(&b));
    assert_int_not_equal(acr__problem_digest(&a), acr__problem_digest(&c));
}

static void spans_reach_from_the_first_to_the_last_element(void **state)
{
    (void)state;
    const acr_strides packed = {4 * 8 * 32, 8 * 32, 32}, padded = {10000, 1000, 100}, repeated = {0, 0, 32};
    assert_int_equal(acr__span_bytes(2, 4, 8, 32, &packed, ACR_F16), 2 * 4 * 8 * 32 * 2);
    assert_int_equal(acr__span_bytes(2, 4, 8, 32, &packed, ACR_F32), 2 * 4 * 8 * 32 * 4);
    assert_int_equal(acr__span_bytes(2, 4, 8, 32, &padded, ACR_E4M3), 10000 + 3 * 1000 + 7 * 100 + 32);
    assert_int_equal(acr__span_bytes(2, 4, 8, 32, &repeated, ACR_BF16), (7 * 32 + 32) * 2);
    assert_int_equal(acr__span_bytes(1, 1, 1, 1, &packed, ACR_E4M3), 1);
}

/* ---- Windows --------------------------------------------------------------------------------------------------- */

static void windows_have_a_text(void **state)
{
    (void)state;
    const struct {
        const char *text, *canonical;
        int64_t left, right;
    } cases[] = {
        {"b1:h2:s64:d32:causal:win16", "b1:h2:s64:d32:causal:win16", 16, 0},
        {"win16/8:b1:h2:s64:d32", "b1:h2:s64:d32:win16/8", 16, 8},
        {"b1:h2:s64:d32:win0/8", "b1:h2:s64:d32:win0/8", 0, 8},
        {"b1:h2:s64/128:d32:bshd:win100:causal", "b1:h2:s64/128:d32:causal:win100:bshd", 100, 0},
        /* limits that hide nothing */
        {"b1:h2:s64:d32:causal:win64", "b1:h2:s64:d32:causal", 0, 0},
        {"b1:h2:s64:d32:causal:win63", "b1:h2:s64:d32:causal:win63", 63, 0},
        {"b1:h2:s64:d32:causal:win16/8", "b1:h2:s64:d32:causal:win16", 16, 0},
        {"b1:h2:s64:d32:win0/63", "b1:h2:s64:d32", 0, 0},
        {"b1:h2:s64:d32:win0/62", "b1:h2:s64:d32:win0/62", 0, 62},
        {"b1:h2:s64/128:d32:causal-tl:win64", "b1:h2:s64/128:d32:causal-tl", 0, 0},
        {"b1:h2:s1/128:d32:win64/1", "b1:h2:s1/128:d32:win64", 64, 0},
        {"b1:h2:s1/128:d32:causal:win64", "b1:h2:s1/128:d32:win64", 64, 0},
        {"b1:h2:s64:d32:win9999999999999", "b1:h2:s64:d32", 0, 0},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const acr_problem p = canonical_of(cases[i].text);
        char text[ACR_PROBLEM_TEXT_MAX];
        assert_ok(acr_problem_format(&p, text, sizeof text));
        assert_string_equal(text, cases[i].canonical);
        assert_int_equal(p.window_left, cases[i].left);
        assert_int_equal(p.window_right, cases[i].right);
    }
}

static void bad_windows_are_refused(void **state)
{
    (void)state;
    const char *texts[] = {"b1:h2:s64:d32:win",       "b1:h2:s64:d32:win0",   "b1:h2:s64:d32:win0/0",
                           "b1:h2:s64:d32:win4/0",    "b1:h2:s64:d32:win4/",  "b1:h2:s64:d32:win-1",
                           "b1:h2:s64:d32:win4:win4", "b1:h2:s64:d32:window4"};
    acr_problem p;
    for (size_t i = 0; i < COUNT_OF(texts); i++)
        assert_int_equal(acr_problem_parse(&p, texts[i], NULL), ACR_FORMAT);
    p = problem_of("b1:h2:s64:d32");
    p.window_left = -1;
    assert_fails(acr_problem_canonical(&p, &p), ACR_INVALID, "window_left is -1");
    p.window_left = 0;
    p.window_right = -5;
    assert_fails(acr_problem_canonical(&p, &p), ACR_INVALID, "window_right is -5");
}

/* ---- What changes scores, and what hides or adds keys beyond a mask and a window ------------------------------- */

static void terms_have_a_text(void **state)
{
    (void)state;
    const struct {
        const char *text, *canonical;
    } cases[] = {
        {"cap50:b1:h2:s64:d32", "b1:h2:s64:d32:cap50"},
        {"b1:h2:s64:d32:cap30.50", "b1:h2:s64:d32:cap30.5"},
        {"b1:h2:s64:d32:cap0.125", "b1:h2:s64:d32:cap0.125"},
        {"b1:h2:s64:d32:cap1e-3", "b1:h2:s64:d32:cap0.001"},
        {"b1:h2:s64:d32:cap2.5e3", "b1:h2:s64:d32:cap2500"},
        {"b1:h2:s64:d32:cap1e30", "b1:h2:s64:d32:cap1e30"},
        {"b1:h2:s64:d32:cap1e-30", "b1:h2:s64:d32:cap1e-30"},
        {"b1:h2:s64:d32:tree:sinks:alibi:kvstarts", "b1:h2:s64:d32:tree:alibi:sinks:kvstarts"},
        {"ranges4:b1:h2:s64:d32:causal", "b1:h2:s64:d32:causal:ranges4"},
        {"b2:h2:s64:d32:mask/0,0,64", "b2:h2:s64:d32:mask/0,0,64"},
        {"bf16:b2:h2:s64:d32:bias-bf16/0,0,0", "bf16:b2:h2:s64:d32:bias-bf16/0,0,0"},
        {"b2:h2:s64:d32:bias-f32/8192,4096,64:lse", "b2:h2:s64:d32:bias-f32/8192,4096,64:lse"},
        {"b2:h2:s64:d32:bias-f16/8192,4096,64", "b2:h2:s64:d32:bias-f16/8192,4096,64"},
        /* the stride of an extent of 1 */
        {"b1:h1:s1/64:d32:mask/7,8,9", "b1:h1:s1/64:d32:mask/0,0,0"},
        {"b2:h2:s64:d32:packed:bshd:mask/4096,0,64", "b2:h2:s64:d32:mask/4096,0,64:bshd:packed"},
        /* chunks, and limits that hide nothing beside others */
        {"b1:h2:s64:d32:causal:chunk16", "b1:h2:s64:d32:causal:chunk16"},
        {"b1:h2:s64:d32:causal:chunk63", "b1:h2:s64:d32:causal:chunk63"},
        {"b1:h2:s64:d32:causal:chunk64", "b1:h2:s64:d32:causal"},
        {"b1:h2:s64:d32:chunk64", "b1:h2:s64:d32"},
        {"b1:h2:s64:d32:chunk9999999999", "b1:h2:s64:d32"},
        {"b1:h2:s64/32:d32:chunk99", "b1:h2:s64/32:d32:chunk32"}, /* rows before key 0 see none */
        {"b1:h2:s64:d32:chunk99:kvlens", "b1:h2:s64:d32:chunk64:kvlens"},
        {"b1:h2:s64:d32:chunk99:kvstarts", "b1:h2:s64:d32:chunk64:kvstarts"},
        {"b1:h2:s64:d32:chunk99:causal:kvstarts:kvlens", "b1:h2:s64:d32:causal:kvlens:kvstarts"},
        {"b1:h2:s64/32:d32:causal-tl:chunk63", "b1:h2:s64/32:d32:causal-tl:chunk63"},
        {"b1:h2:s64/32:d32:causal-tl:chunk64", "b1:h2:s64/32:d32:causal-tl"},
        {"b1:h2:s1/64:d32:chunk64:kvlens", "b1:h2:s1/64:d32:kvlens"},
        {"b1:h2:s64:d32:causal:win16:chunk16", "b1:h2:s64:d32:causal:chunk16"},
        {"b1:h2:s64:d32:causal:win15:chunk16", "b1:h2:s64:d32:causal:win15:chunk16"},
        {"b1:h2:s64:d32:win8/15:chunk16", "b1:h2:s64:d32:win8:chunk16"},
        {"b1:h2:s64:d32:win8/14:chunk16", "b1:h2:s64:d32:win8/14:chunk16"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const acr_problem p = canonical_of(cases[i].text);
        char text[ACR_PROBLEM_TEXT_MAX];
        assert_ok(acr_problem_format(&p, text, sizeof text));
        assert_string_equal(text, cases[i].canonical);
        const acr_problem again = canonical_of(text);
        assert_memory_equal(&again, &p, sizeof p);
    }
}

/* Every softcap is read as it was, whatever its digits. */
static void softcaps_survive_their_text(void **state)
{
    (void)state;
    generator g = {7};
    for (int i = 0; i < 20000; i++) {
        acr_problem p = canonical_of("b1:h2:s64:d32");
        const uint32_t bits = (uint32_t)(next_u64(&g) % 0x7f800000u);
        memcpy(&p.softcap, &bits, sizeof bits);
        if (!(p.softcap > 0.0f))
            continue;
        char text[ACR_PROBLEM_TEXT_MAX];
        assert_ok(acr_problem_format(&p, text, sizeof text));
        const acr_problem again = canonical_of(text);
        assert_memory_equal(&again.softcap, &p.softcap, sizeof p.softcap);
    }
}

static void bad_terms_are_refused(void **state)
{
    (void)state;
    const struct {
        const char *field, *reason;
    } texts[] = {
        {"cap", "decimal"},
        {"cap0", "positive"},
        {"cap-1", "decimal"},
        {"cap1.", "decimal"},
        {"cap.5.5", "unexpected"},
        {"cap1e99", "finite"},
        {"cap1e-99", "positive"},
        {"cap1e", "number"},
        {"cap5:cap5", "twice"},
        {"capx", "decimal"},
        {"chunk", "number"},
        {"chunk0", "chunk"},
        {"chunk4/2", "unexpected"},
        {"ranges0", "1 to 65536"},
        {"ranges65537", "1 to 65536"},
        {"mask", "mask/B,H,S"},
        {"bias", "bias-bf16/B,H,S"},
        {"mask/1,2", "','"},
        {"bias-f64/0,0,0", "unknown field"},
        {"mask/0,0,0:bias-f16/0,0,0", "twice"},
        {"sinks:sinks", "twice"},
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        char text[ACR_PROBLEM_TEXT_MAX];
        snprintf(text, sizeof text, "b1:h2:s64:d32:%s", texts[i].field);
        acr_problem p;
        assert_fails(acr_problem_parse(&p, text, NULL), ACR_FORMAT, texts[i].reason);
    }
    assert_refused(p.softcap = -1.0f, "softcap");
    assert_refused(p.softcap = NAN, "softcap");
    assert_refused(p.softcap = INFINITY, "softcap");
    assert_accepted(p.softcap = -0.0f);
    assert_refused(p.chunk = -4, "chunk is -4");
    assert_refused(p.ranges = 3, "without ACR_RANGES");
    assert_refused(p.flags = ACR_RANGES, "with ACR_RANGES");
    assert_refused((p.flags = ACR_RANGES, p.ranges = 65537), "65536");
    assert_refused((p.flags = ACR_PACKED | ACR_KV_STARTS, p.layout = ACR_BSHD), "ACR_KV_STARTS");
    assert_refused(p.bias.row = 16, "bias_dtype is 0");
    assert_refused(p.bias_dtype = ACR_E4M3, "bias_dtype is 4");
    assert_refused((p.bias_dtype = ACR_F16, p.bias.head = -1), "bias strides");
    assert_refused((p.bias_dtype = ACR_F16, p.bias.head = INT64_MAX / 2), "bias spans");
    assert_refused(p.dtype = ACR_BOOL8, "dtype is 5");
    assert_refused(p.reserved = 1, "reserved");
}

/* Fields that the header has and no kernel serves: refused by their names. */
static void what_nobody_serves_is_refused_by_name(void **state)
{
    (void)state;
    const acr_problem plain = problem_of("b1:h2:s64:d32");
    acr_problem p, out;
    p = plain, p.reserved_2 = 1;
    assert_fails(acr_problem_canonical(&out, &p), ACR_INVALID, "reserved");
    p = plain, p.flags = 0x1000;
    assert_fails(acr_problem_canonical(&out, &p), ACR_INVALID, "flags");
}

/* ---- Gradients ----------------------------------------------------------------------------------------------------
 * */

static void gradients_have_a_text(void **state)
{
    (void)state;
    static const struct {
        const char *text, *canonical;
    } texts[] = {
        {"b2:h4/2:s8/9:d16:bwd", "bwd:b2:h4/2:s8/9:d16"},
        {"bwd:lse:b2:h4/2:s8/9:d16", "bwd:b2:h4/2:s8/9:d16"}, /* which it reads in any case */
        {"bwd:f32:grad-f32:b1:h1:s8:d16", "bwd:f32:b1:h1:s8:d16"},
        {"bf16:grad-f32:atomics:bwd:b1:h1:s8:d16:causal:cap30:sinks",
         "bwd:bf16:b1:h1:s8:d16:causal:cap30:sinks:grad-f32:atomics"},
        {"bwd:b2:h2:s4:d8:dos=0,0,8:dqs=90,40,10:dks=64,32,8:dvs=64,8,16",
         "bwd:b2:h2:s4:d8:dos=0,0,8:dqs=90,40,10:dvs=64,8,16"},
        {"bwd:b2:h2:s4:d8:bshd:dos=64,32,8",
         "bwd:b2:h2:s4:d8:qs=64,8,16:ks=64,8,16:vs=64,8,16:os=64,8,16:dqs=64,8,16:dks=64,8,16:dvs=64,8,16"},
        {"bwd:b3:h2:s4:d8:bshd:packed", "bwd:b3:h2:s4:d8:bshd:packed"},
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        const acr_problem a = canonical_of(texts[i].text), b = canonical_of(texts[i].canonical);
        char text[ACR_PROBLEM_TEXT_MAX];
        assert_ok(acr_problem_format(&a, text, sizeof text));
        assert_string_equal(text, texts[i].canonical);
        assert_memory_equal(&a, &b, sizeof a);
    }
    const acr_problem p = canonical_of("bwd:b1:h1:s8:d16:grad-f32");
    assert_true(p.pass == ACR_BACKWARD && p.grad_dtype == ACR_F32 && p.flags == ACR_WANT_LSE);
    assert_int_equal(canonical_of("bwd:b1:h1:s8:d16").grad_dtype, ACR_F16);
    assert_int_equal(canonical_of("b1:h1:s8:d16").grad_dtype, ACR_DTYPE_DEFAULT);
    assert_int_equal(canonical_of("b1:h1:s8:d16").dq.row, 0);
}

static void bad_gradients_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text, *fragment;
    } texts[] = {
        {"b1:h1:s8:d16:grad-f32", "grad_dtype"},          {"b1:h1:s8:d16:atomics", "ACR_FAST_ATOMICS"},
        {"b2:h1:s8:d16:dos=0,0,16", "d_o strides"},       {"b2:h1:s8:d16:dvs=256,128,16", "dv strides"},
        {"bwd:e4m3:b1:h1:s8:d16", "dtype e4m3"},          {"bwd:b1:h1:s8:d16:align2:grad-f32", "alignment is 2"},
        {"bwd:b2:h1:s8:d16:dqs=0,128,16", "dq strides"}, /* an output */
        {"bwd:b2:h2:s8:d16:dks=512,64,16", "dk strides"}, {"bwd:b2:h1:s8:d16:bshd:packed:dvs=256,16,16", "dv.batch"},
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        acr_problem p;
        assert_fails(acr_problem_parse(&p, texts[i].text, NULL), ACR_INVALID, texts[i].fragment);
    }
    acr_problem p = problem_of("bwd:b1:h1:s8:d16"), out;
    p.grad_dtype = ACR_BF16;
    assert_fails(acr_problem_canonical(&out, &p), ACR_INVALID, "grad_dtype is 3");
    assert_fails(acr_problem_parse(&p, "bwd:fwd:b1:h1:s8:d16", NULL), ACR_FORMAT, "twice");
    assert_fails(acr_problem_parse(&p, "bwd:b1:h1:s8:d16:grad-f16", NULL), ACR_FORMAT, "unknown field");
}

/* A caller compiled against an earlier header: what its structure does not have is no limit. */
static void problems_of_earlier_versions_are_accepted(void **state)
{
    (void)state;
    acr_problem earlier = problem_of("b1:h2:s64:d32:causal"), out;
    earlier.size = (uint32_t)offsetof(acr_problem, window_left);
    earlier.window_left = earlier.window_right = 7; /* memory that is not the caller's structure */
    earlier.chunk = 5;
    assert_ok(acr_problem_canonical(&out, &earlier));
    assert_int_equal(out.size, sizeof out);
    assert_true(out.window_left == 0 && out.window_right == 0);
    earlier.size = (uint32_t)offsetof(acr_problem, softcap);
    assert_ok(acr_problem_canonical(&out, &earlier));
    assert_true(out.window_left == 7 && out.chunk == 0);
    for (uint32_t size = 0; size < sizeof earlier; size++)
        if (size != offsetof(acr_problem, window_left) && size != offsetof(acr_problem, softcap) &&
            size != offsetof(acr_problem, kv_dtype)) {
            earlier.size = size;
            assert_fails(acr_problem_canonical(&out, &earlier), ACR_INVALID, "size");
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(format_gives_the_canonical_text),
        cmocka_unit_test(canonical_texts_stay_as_they_are),
        cmocka_unit_test(texts_of_one_problem_give_one_canonical_problem),
        cmocka_unit_test(every_permutation_of_the_fields_reads_alike),
        cmocka_unit_test(parse_sets_every_field),
        cmocka_unit_test(errors_name_their_position_and_reason),
        cmocka_unit_test(position_may_be_null),
        cmocka_unit_test(null_arguments_are_refused),
        cmocka_unit_test(format_needs_room_for_the_whole_text),
        cmocka_unit_test(defaults_are_filled_in),
        cmocka_unit_test(packed_strides_follow_the_layout),
        cmocka_unit_test(default_output_type_follows_the_input),
        cmocka_unit_test(canonical_is_idempotent_and_in_place),
        cmocka_unit_test(extents_have_limits),
        cmocka_unit_test(choices_have_limits),
        cmocka_unit_test(packed_batches_have_one_layout),
        cmocka_unit_test(packed_batches_are_canonical),
        cmocka_unit_test(alignment_has_limits),
        cmocka_unit_test(scales_have_limits),
        cmocka_unit_test(strides_have_limits),
        cmocka_unit_test(output_may_not_overlap_itself),
        cmocka_unit_test(strides_of_extents_of_one_are_ignored),
        cmocka_unit_test(a_later_struct_is_read_when_its_tail_is_zero),
        cmocka_unit_test(a_struct_without_its_size_is_refused),
        cmocka_unit_test(text_and_canonical_problem_determine_each_other),
        cmocka_unit_test(different_problems_have_different_texts),
        cmocka_unit_test(digest_sees_the_scales),
        cmocka_unit_test(spans_reach_from_the_first_to_the_last_element),
        cmocka_unit_test(windows_have_a_text),
        cmocka_unit_test(bad_windows_are_refused),
        cmocka_unit_test(terms_have_a_text),
        cmocka_unit_test(softcaps_survive_their_text),
        cmocka_unit_test(bad_terms_are_refused),
        cmocka_unit_test(what_nobody_serves_is_refused_by_name),
        cmocka_unit_test(gradients_have_a_text),
        cmocka_unit_test(bad_gradients_are_refused),
        cmocka_unit_test(problems_of_earlier_versions_are_accepted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
