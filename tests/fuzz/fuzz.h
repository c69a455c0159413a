/* A fuzz target: one function that libFuzzer or replay.c feeds. A broken invariant aborts, so that both see it as a
 * crash.
 *
 * By libFuzzer (clang):   cmake -S . -B build/fuzz -DCMAKE_C_COMPILER=clang
 * -DACR_SANITIZE=fuzzer-no-link,address,undefined -DACR_IMAGES=...
 *                         build/fuzz/tests/fuzz_problem -max_total_time=600 tests/fuzz/corpus_problem
 * In any other build the same programs replay the corpus and random mutations of it:   fuzz_problem CORPUS MUTATIONS
 * [SEED] */
#ifndef ACR_TESTS_FUZZ_H
#define ACR_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Words of the format, for mutations; NULL ends the list. */
extern const char *const fuzz_words[];

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #condition);                                    \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

#endif
