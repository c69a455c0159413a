/* Fuzzes the wisdom reader: the bytes as they are, and again as the body of a file whose first and last line are right,
 * since no mutation would ever find a checksum. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "fuzz.h"
#include "wisdom.h"

const char *const fuzz_words[] = {"acromion-wisdom 1\n",
                                  "device x\n",
                                  "end facts=1 crc32=00000000\n",
                                  " = ",
                                  "img=0123456789abcdef",
                                  "effort=patient",
                                  "median_ns=12.5",
                                  "mad_ns=0.0",
                                  "n=7",
                                  "b1:h1:s1:d8",
                                  "fwd_x",
                                  "\n",
                                  " ",
                                  "=",
                                  "99999999999999999999.9",
                                  NULL};

static uint32_t crc_of(const char *bytes, size_t count)
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < count; i++)
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ ((crc ^ (uint32_t)((unsigned char)bytes[i] >> bit)) & 1 ? 0xedb88320u : 0);
    return ~crc;
}

/* Everything about a fact that has been accepted. */
static acr_status check_fact(void *user, const char *device_key, const acr__fact *fact)
{
    acr_problem problem;
    char text[ACR_PROBLEM_TEXT_MAX];
    ++*(uint32_t *)user;
    REQUIRE(device_key[0] != '\0' && strlen(device_key) < WISDOM_DEVICE_MAX && !strchr(device_key, '\n'));
    REQUIRE(fact->kernel[0] != '\0' && strlen(fact->kernel) < WISDOM_KERNEL_MAX);
    REQUIRE(acr_problem_parse(&problem, fact->problem, NULL) == ACR_OK);
    REQUIRE(acr_problem_format(&problem, text, sizeof text) == ACR_OK && strcmp(text, fact->problem) == 0);
    REQUIRE(fact->effort == ACR_MEASURE || fact->effort == ACR_PATIENT);
    REQUIRE(fact->median_ns >= 0.0 && fact->median_ns < 1e16 && fact->mad_ns >= 0.0 && fact->mad_ns < 1e16);
    return ACR_OK;
}

static acr_status check_link(void *user, const char *device_key, const acr_link *link)
{
    ++*(uint32_t *)user;
    REQUIRE(device_key[0] != '\0');
    REQUIRE(!acr__link_why_not(link));
    return ACR_OK;
}

static void check_text(const char *text, size_t size)
{
    static const acr__wisdom_visitor visitor = {check_fact, check_link};
    uint32_t visited = 0, counted = 0;
    const acr_status status = acr__wisdom_parse(text, size, &visitor, &visited);
    REQUIRE(status == ACR_OK || status == ACR_FORMAT);
    REQUIRE(status == ACR_OK || strstr(acr_last_error(), "line "));
    REQUIRE(acr__wisdom_check(text, size, &counted) == status);
    REQUIRE(status != ACR_OK || counted == visited);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char head[] = "acromion-wisdom 1\n";
    check_text((const char *)data, size);

    const size_t capacity = sizeof head + size + 64;
    char *text = malloc(capacity);
    REQUIRE(text);
    memcpy(text, head, sizeof head - 1);
    if (size)
        memcpy(text + sizeof head - 1, data, size);
    const size_t body_end = sizeof head - 1 + size;
    /* As many facts as the body has lines that are no device: right when all of them are facts. */
    unsigned facts = 0;
    for (size_t at = sizeof head - 1, end; at < body_end; at = end + 1) {
        const char *newline = memchr(text + at, '\n', body_end - at);
        end = newline ? (size_t)(newline - text) : body_end;
        facts += end - at < 7 || memcmp(text + at, "device ", 7) != 0;
    }
    const int last = snprintf(text + body_end, capacity - body_end, "end facts=%u crc32=%08" PRIx32 "\n", facts,
                              crc_of(text, body_end));
    char *exact = malloc(body_end + (size_t)last);
    REQUIRE(exact);
    memcpy(exact, text, body_end + (size_t)last);
    free(text);
    check_text(exact, body_end + (size_t)last);
    free(exact);
    return 0;
}
