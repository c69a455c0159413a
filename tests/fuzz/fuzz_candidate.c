/* Fuzzes what a proposer writes: a source through admission and its launch descriptor, of either backend. No text makes
 * them read outside; what is refused is refused with words; what is accepted computes launches within their limits. The
 * input is a source, a line "----", a descriptor; its first byte chooses the backend. */
#include <string.h>

#include "fuzz.h"
#include "search/admission.h"

const char *const fuzz_words[] = {"----\n",     "KERNEL_NAME",
                                  "/*",         "*/",
                                  "//",         "\\\n",
                                  "#include ",  "<stdint.h>",
                                  "\"x.h\"",    "#pragma unroll\n",
                                  "asm",        "__attribute__((",
                                  "R\"(",       "'\"'",
                                  "%:",         "{\"dtype\":",
                                  "\"f16\"",    "\"qk_dim\":",
                                  "\"when\":",  "\"grid\":[",
                                  "\"boxes\":", "ceil_div(",
                                  "q_len",      "?",
                                  "&&",         "(",
                                  ")",          "9223372036854775807",
                                  "-",          "/0",
                                  NULL};

static void check_accepted(const descriptor *d, acr__backend_id backend)
{
    acr_problem problem = ACR_PROBLEM_INIT;
    const acr__device device = {.backend = backend, .threads = 3, .sm_count = 132, .smem_per_cta_bytes = 232448};
    problem.batch = 2;
    problem.q_heads = problem.kv_heads = 8;
    problem.q_len = 100;
    problem.kv_len = 333;
    problem.qk_dim = problem.v_dim = 1;
    REQUIRE(acr_problem_canonical(&problem, &problem) == ACR_OK);
    const char *reason = descriptor_why_not(d, &problem, &device);
    if (reason) {
        REQUIRE(reason[0] != '\0');
        return;
    }
    acr__launch launch;
    REQUIRE(descriptor_workspace(d, &problem, &device) <= ((size_t)3 << 30) + 192);
    if (backend == ACR__CUDA) {
        descriptor_shape(d, &problem, &device, &launch);
        REQUIRE(launch.grid[0] >= 1 && launch.grid[1] >= 1 && launch.grid[1] <= 65535);
        REQUIRE(launch.block >= 1 && launch.block <= 1024 && launch.cluster <= 8);
        REQUIRE(launch.smem_bytes <= 232448);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char separator[] = "\n----\n";
    char *text = malloc(size + 1);
    REQUIRE(text);
    if (size)
        memcpy(text, data, size);
    text[size] = '\0';
    char *middle = strstr(text, separator);
    const char *json = middle ? middle + sizeof separator - 1 : text;
    if (middle)
        middle[1] = '\0';
    candidate c;
    descriptor d;
    const bool cuda = text[0] == '/';
    REQUIRE(candidate_of_source(&c, "x", cuda ? "90a" : "portable", "", text, json) == ACR_OK);
    acr_status status = admission_check(&c, ".", &d);
    REQUIRE(status == ACR_OK || status == ACR_INVALID || status == ACR_FORMAT);
    REQUIRE(status == ACR_OK || acr_last_error()[0] != '\0');
    if (status != ACR_OK)
        status = descriptor_parse(&d, c.backend, json); /* whatever the source was */
    if (status == ACR_OK)
        check_accepted(&d, c.backend);
    candidate_free(&c);
    free(text);
    return 0;
}
