/* Fuzzes the reader of Nsight Compute's tables: it ends, keeps to its bytes, and gives no number that is not there. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "profile/profile_counters.h"

const char *const fuzz_words[] = {"ID",
                                  "Kernel Name",
                                  "Metric Name",
                                  "Metric Unit",
                                  "Metric Value",
                                  "\"",
                                  ",",
                                  "\n",
                                  "k(",
                                  "gpu__time_duration.sum",
                                  "1,234.5",
                                  "n/a",
                                  "ns",
                                  "cycle/nsecond",
                                  "\"\"",
                                  "==PROF==",
                                  "\n\"\",",
                                  NULL};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    if (!text) {
        return 0;
    }
    memcpy(text, data, size);
    text[size] = '\0';
    profile_counters c;
    bool is_table = false;
    const int launches = profile_parse_csv(&c, text, "k", &is_table);
    REQUIRE(launches >= 0);
    REQUIRE(launches == 0 || is_table);
    for (int i = 0; i < COUNTER_COUNT; i++) {
        REQUIRE(isnan(c.value[i]) || (launches > 0 && c.value[i] >= 0));
    }
    for (int i = 0; i < STALL_COUNT; i++) {
        REQUIRE(isnan(c.stall[i]) || (launches > 0 && c.stall[i] >= 0));
    }
    free(text);
    return 0;
}
