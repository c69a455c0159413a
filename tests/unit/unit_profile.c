/* What `acromion profile` makes of the stamps that a kernel left, of a source's trace points, and of tables that are
 * none. */
#include <math.h>
#include <string.h>

#include "profile/profile_counters.h"
#include "profile/profile_timeline.h"
#include "support.h"

enum {
    WORDS = TRACE_HEADER_WORDS + TRACE_CTAS * TRACE_GROUPS * TRACE_STEPS * TRACE_HITS
};

static uint32_t *word_of(uint32_t *words, int cta, int group, int step, int hit)
{
    return words + TRACE_HEADER_WORDS + ((cta * TRACE_GROUPS + group) * TRACE_STEPS + step) * TRACE_HITS + hit;
}

/* Three CTAs, of which the first one's clock wraps: start, then four rounds of 100 and 300 cycles (the last CTA: twice
 * that). */
static void test_cycles_of_steps(void **state)
{
    (void)state;
    uint32_t *words = calloc(WORDS, sizeof *words);
    timeline *t = calloc(1, sizeof *t);
    assert_non_null(words);
    assert_non_null(t);
    words[0] = 4;
    t->steps = 3;
    for (int cta = 0; cta < 3; ++cta) {
        const uint32_t slow = cta == 2 ? 2 : 1;
        uint32_t clock = cta == 0 ? UINT32_MAX - 200 : 1001; /* odd, as the device makes them */
        *word_of(words, cta, 1, 0, 0) = clock;
        for (int hit = 0; hit < 4; ++hit) {
            *word_of(words, cta, 1, 1, hit) = clock += 100 * slow;
            *word_of(words, cta, 1, 2, hit) = clock += 300 * slow;
        }
    }
    timeline_evaluate(t, words);
    assert_int_equal(t->ctas, 3);
    assert_int_equal(t->warps_of_group, 4);
    assert_false(t->group_seen[0]);
    assert_true(t->group_seen[1]);
    const timeline_step *start = &t->table[1][0], *first = &t->table[1][1], *second = &t->table[1][2];
    assert_int_equal(start->hits, 1);
    assert_int_equal(first->hits, 4);
    assert_true(fabs(start->first_cycles - 0) <= 0);
    assert_true(fabs(first->first_cycles - 100) <= 0);
    assert_true(fabs(first->first_max - 200) <= 0);
    assert_true(fabs(first->each_cycles - 100) <= 0);
    assert_true(fabs(second->each_cycles - 300) <= 0);
    assert_true(fabs(second->each_max - 600) <= 0);
    assert_true(fabs(second->share - 0.75) <= 1e-12);
    assert_true(fabs(t->cta_cycles - 1600) <= 0);
    assert_true(fabs(t->cta_max - 3200) <= 0);
    free(words);
    free(t);
}

/* Zeros, and the bytes that fill a fresh workspace, are no stamps. */
static void test_no_stamps(void **state)
{
    (void)state;
    uint32_t *words = malloc(WORDS * sizeof *words);
    timeline *t = calloc(1, sizeof *t);
    assert_non_null(words);
    assert_non_null(t);
    for (int fill = 0; fill <= 0xff; fill += 0xff) {
        memset(words, fill, WORDS * sizeof *words);
        timeline_evaluate(t, words);
        assert_int_equal(t->ctas, 0);
    }
    free(words);
    free(t);
}

static void test_names_of_trace_points(void **state)
{
    (void)state;
    char names[TRACE_STEPS][64];
    const char *source = "/* ACR_TRACE_POINT(0, \"in a comment\") */\n ACR_TRACE_POINT(0, \"start\");\n x();\n "
                         "ACR_TRACE_POINT(use + 1, \"end\");\n"
                         "ACR_TRACE_END(a);";
    assert_int_equal(timeline_names(names, source), 2);
    assert_string_equal(names[0], "start");
    assert_string_equal(names[1], "end");
    assert_int_equal(timeline_names(names, "no trace points, ACR_TRACE_POINT( and no name"), 0);
    assert_int_equal(timeline_names(names, ""), 0);
}

/* Whatever the text is, reading it ends, and finds nothing where nothing is. */
static void test_tables_that_are_none(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "",
        "\n",
        "\"",
        "\"ID",
        "\"ID\",\"Kernel Name\"",
        "ID,Kernel Name,a\n,,\n0",
        "ID,Kernel Name\n0,other\n",
        "Kernel Name,ID\n0,k\n",
        "ID,Kernel Name\n,\n,\n,\n",
        ",,,,\n\"\"\"\",\"\n==PROF== x",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; ++i) {
        char text[256];
        bool is_table = true;
        profile_counters c;
        snprintf(text, sizeof text, "%s", texts[i]);
        assert_int_equal(profile_parse_csv(&c, text, "k", &is_table), 0);
    }
}

/* The last of several launches counts, and nothing of the one before. */
static void test_several_launches(void **state)
{
    (void)state;
    char text[] = "ID,Kernel Name,gpu__time_duration.sum,launch__registers_per_thread\n,,us,\n0,\"k(a, b)\",5,40\n"
                  "1,other,6,41\n2,k,7,n/a\n";
    bool is_table = false;
    profile_counters c;
    assert_int_equal(profile_parse_csv(&c, text, "k", &is_table), 2);
    assert_true(is_table);
    assert_true(fabs(c.value[COUNTER_DURATION] - 7) <= 1e-9);
    assert_true(isnan(c.value[COUNTER_REGISTERS]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cycles_of_steps),       cmocka_unit_test(test_no_stamps),
        cmocka_unit_test(test_names_of_trace_points), cmocka_unit_test(test_tables_that_are_none),
        cmocka_unit_test(test_several_launches),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
