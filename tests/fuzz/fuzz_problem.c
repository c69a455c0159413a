/* Fuzzes the problem parser: no text makes it read outside, and what it accepts is a problem that prints and reads back
 * the same. */
#include <string.h>

#include "fuzz.h"
#include "problem.h"

const char *const fuzz_words[] = {"b1",     "h8/2",      "s512/1",  "d64",        "bf16",       "e4m3",
                                  "causal", "causal-tl", "bshd",    "qs=1,2,3",   "os=0,8,64",  "align8",
                                  "obf16",  "lse",       "kvlens",  "packed",     "fwd",        "window",
                                  "cap50",  "chunk8",    "ranges2", "mask/0,0,8", "bias-bf16/", "tree",
                                  "sinks",  "e-3",       ".",       "alibi",      "kvstarts",   "win4/2",
                                  ":",      "/",         ",",       "=",          "2147483647", "9223372036854775807",
                                  NULL};

static void check_accepted(const acr_problem *problem)
{
    acr_problem canonical, again, read;
    char text[ACR_PROBLEM_TEXT_MAX], text_again[ACR_PROBLEM_TEXT_MAX];
    size_t position;
    REQUIRE(acr_problem_canonical(&canonical, problem) == ACR_OK);
    REQUIRE(acr_problem_canonical(&again, &canonical) == ACR_OK);
    REQUIRE(memcmp(&canonical, &again, sizeof again) == 0);
    REQUIRE(acr_problem_format(problem, text, sizeof text) == ACR_OK);
    REQUIRE(acr_problem_parse(&read, text, &position) == ACR_OK);
    REQUIRE(acr_problem_canonical(&read, &read) == ACR_OK);
    REQUIRE(memcmp(&canonical, &read, sizeof read) == 0);
    REQUIRE(acr_problem_format(&read, text_again, sizeof text_again) == ACR_OK);
    REQUIRE(strcmp(text, text_again) == 0);
    REQUIRE(acr__span_bytes(canonical.batch, canonical.q_heads, canonical.q_len, canonical.qk_dim, &canonical.q,
                            canonical.dtype) > 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    REQUIRE(text);
    if (size)
        memcpy(text, data, size);
    text[size] = '\0';
    acr_problem problem;
    size_t position = SIZE_MAX;
    const acr_status status = acr_problem_parse(&problem, text, &position);
    if (status == ACR_OK) {
        check_accepted(&problem);
    } else {
        REQUIRE(status == ACR_FORMAT || status == ACR_INVALID);
        REQUIRE(position <= strlen(text));
        REQUIRE(acr_last_error()[0] != '\0');
    }
    free(text);
    return 0;
}
