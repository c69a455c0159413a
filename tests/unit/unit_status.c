/* The status codes: numbers are pinned, because callers store them; the last error is the thread's own. */
#include "support.h"

#include <pthread.h>
#include <stdio.h>

/* Written out by hand on purpose: the list in the header must never drift from these. */
static const struct {
    acr_status status;
    int number;
    const char *text;
} pinned[] = {
    {ACR_OK, 0, "success"},
    {ACR_INVALID, -1, "invalid argument"},
    {ACR_UNSUPPORTED, -2, "no kernel can run this"},
    {ACR_NO_DEVICE, -3, "no such device, or its driver is missing or too old"},
    {ACR_NO_MEMORY, -4, "out of memory"},
    {ACR_NO_WISDOM, -5, "no wisdom for this problem"},
    {ACR_WORKSPACE, -6, "workspace missing, too small or misaligned"},
    {ACR_IO, -7, "a file could not be read or written"},
    {ACR_FORMAT, -8, "malformed text or file"},
    {ACR_ALIGNMENT, -9, "a pointer is less aligned than the problem says"},
    {ACR_DEVICE_FAULT, -10, "the device or its driver reported an error"},
    {ACR_OVERLAP, -11, "the output overlaps an input"},
    {ACR_PEER, -12, "another rank failed or has other arguments"},
    {ACR_TIMEOUT, -13, "another rank did not answer in time"},
};

static void numbers_never_change(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(pinned); i++) {
        assert_int_equal(pinned[i].status, pinned[i].number);
        assert_string_equal(acr_status_text(pinned[i].status), pinned[i].text);
    }
}

static void every_status_is_pinned(void **state)
{
    (void)state;
    size_t listed = 0;
#define COUNT_STATUS(name, number, text) listed++;
    ACR_STATUS_LIST(COUNT_STATUS)
#undef COUNT_STATUS
    assert_int_equal(listed, COUNT_OF(pinned));
}

static void unknown_numbers_have_a_text(void **state)
{
    (void)state;
    const int unknown[] = {1, 2, -14, -1000, 1 << 30};
    for (size_t i = 0; i < COUNT_OF(unknown); i++)
        assert_string_equal(acr_status_text((acr_status)unknown[i]), "unknown status");
}

static void other_enums_are_pinned(void **state)
{
    (void)state;
    const int values[] = {ACR_FORWARD,   ACR_DTYPE_DEFAULT, ACR_F32,
                          ACR_F16,       ACR_BF16,          ACR_E4M3,
                          ACR_MASK_NONE, ACR_MASK_CAUSAL,   ACR_MASK_CAUSAL_TOP_LEFT,
                          ACR_BHSD,      ACR_BSHD,          ACR_WANT_LSE,
                          ACR_KV_LENS,   ACR_ESTIMATE,      ACR_MEASURE,
                          ACR_PATIENT,   ACR_WISDOM_ONLY,   ACR_OVERLAP_PREVIOUS,
                          ACR_PACKED,    ACR_KV_STARTS,     ACR_SINKS,
                          ACR_ALIBI,     ACR_RANGES,        ACR_TREE,
                          ACR_BOOL8};
    const int numbers[] = {0, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 1, 2, 0, 1, 2, 3, 1, 4, 8, 16, 32, 64, 128, 5};
    assert_int_equal(COUNT_OF(values), COUNT_OF(numbers));
    for (size_t i = 0; i < COUNT_OF(values); i++)
        assert_int_equal(values[i], numbers[i]);
}

static void structures_keep_their_layout(void **state)
{
    (void)state;
    /* 64-bit layout of version 0.1: a caller compiled then passes exactly this. */
    if (sizeof(void *) != 8)
        skip();
    assert_int_equal(sizeof(acr_problem), 376);
    assert_int_equal(offsetof(acr_problem, window_left), 200); /* the size of the first version, still accepted */
    assert_int_equal(offsetof(acr_problem, softcap), 216);     /* of the second, likewise */
    assert_int_equal(offsetof(acr_problem, kv_dtype), 264);    /* of the third, likewise */
    assert_int_equal(offsetof(acr_problem, batch), 32);
    assert_int_equal(offsetof(acr_problem, q), 88);
    assert_int_equal(offsetof(acr_problem, scale), 184);
    assert_int_equal(sizeof(acr_buffers), 224);
    assert_int_equal(offsetof(acr_buffers, o), 32);
    assert_int_equal(offsetof(acr_buffers, q_offsets), 56); /* the size of the first version, still accepted */
    assert_int_equal(offsetof(acr_buffers, q_scales), 88);  /* of the second, likewise */
    assert_int_equal(offsetof(acr_buffers, kv_starts), 112);
    assert_int_equal(offsetof(acr_buffers, page_table), 160);
    assert_int_equal(sizeof(acr_ctx_options), 40);
    assert_int_equal(sizeof(acr_wisdom_report), 16);
    assert_int_equal(sizeof(acr_link), 40);
}

static void version_is_that_of_the_header(void **state)
{
    (void)state;
    char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", ACR_VERSION_MAJOR, ACR_VERSION_MINOR, ACR_VERSION_PATCH);
    assert_string_equal(acr_version(), text);
}

static void *fresh_thread(void *arg)
{
    (void)arg;
    const char *before = acr_last_error();
    const bool empty = before && before[0] == '\0';
    acr_ctx *ctx;
    const acr_ctx_options bad = {(uint32_t)sizeof(acr_ctx_options), 0, "abacus", 0, 0, NULL, NULL};
    const bool failed = acr_ctx_create(&ctx, &bad) == ACR_INVALID && strstr(acr_last_error(), "abacus");
    return empty && failed ? (void *)1 : NULL;
}

static void last_error_belongs_to_the_thread(void **state)
{
    (void)state;
    size_t position;
    acr_problem problem;
    assert_fails(acr_problem_parse(&problem, "b1:h1:s1:quux", &position), ACR_FORMAT, "unknown field");
    char mine[256];
    snprintf(mine, sizeof mine, "%s", acr_last_error());

    pthread_t thread;
    void *passed = NULL;
    assert_int_equal(pthread_create(&thread, NULL, fresh_thread, NULL), 0);
    assert_int_equal(pthread_join(thread, &passed), 0);
    assert_non_null(passed);
    assert_string_equal(acr_last_error(), mine);
}

static void success_keeps_the_last_error(void **state)
{
    (void)state;
    /* "The detail of the last call that did not return ACR_OK": a success in between changes nothing. */
    acr_problem problem;
    assert_fails(acr_problem_parse(&problem, "", NULL), ACR_FORMAT, "");
    char before[256];
    snprintf(before, sizeof before, "%s", acr_last_error());
    assert_true(before[0] != '\0');
    assert_ok(acr_problem_parse(&problem, "b1:h1:s1:d8", NULL));
    assert_string_equal(acr_last_error(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_never_change),
        cmocka_unit_test(every_status_is_pinned),
        cmocka_unit_test(unknown_numbers_have_a_text),
        cmocka_unit_test(other_enums_are_pinned),
        cmocka_unit_test(structures_keep_their_layout),
        cmocka_unit_test(version_is_that_of_the_header),
        cmocka_unit_test(last_error_belongs_to_the_thread),
        cmocka_unit_test(success_keeps_the_last_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
