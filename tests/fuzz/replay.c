/* The driver of a fuzz target where libFuzzer is not: runs every file of a corpus, then mutations of them, from a
 * printed seed.
 *     PROGRAM CORPUS_FOLDER MUTATIONS [SEED]
 * When the target aborts, the input stands in the file crash-input of the working folder. */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "fuzz.h"

enum {
    FILES_MAX = 256,
    INPUT_MAX = 1 << 16
};

typedef struct input {
    uint8_t *bytes;
    size_t size;
} input;

static input corpus[FILES_MAX];
static size_t corpus_count;
static uint64_t state; /* of the generator */

static uint64_t next(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static size_t below(size_t limit)
{
    return (size_t)(next() % limit);
}

/* What is being tried, for on_abort. */
static const uint8_t *current;
static size_t current_size;

static void on_abort(int signal_number)
{
    FILE *file = fopen("crash-input", "wb");
    if (file) {
        fwrite(current, 1, current_size, file);
        fclose(file);
    }
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

/* In memory of exactly its size, so that a sanitizer sees a step beyond. */
static void try_input(const uint8_t *bytes, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    REQUIRE(copy);
    if (size)
        memcpy(copy, bytes, size);
    current = copy;
    current_size = size;
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void read_corpus(const char *folder)
{
    DIR *directory = opendir(folder);
    if (!directory) {
        fprintf(stderr, "%s: %s\n", folder, strerror(errno));
        exit(2);
    }
    static uint8_t buffer[INPUT_MAX];
    for (const struct dirent *entry; (entry = readdir(directory)) && corpus_count < FILES_MAX;) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (!file)
            continue;
        const size_t size = fread(buffer, 1, sizeof buffer, file);
        fclose(file);
        corpus[corpus_count] = (input){malloc(size ? size : 1), size};
        REQUIRE(corpus[corpus_count].bytes);
        memcpy(corpus[corpus_count++].bytes, buffer, size);
    }
    closedir(directory);
}

/* Puts bytes in at a place, if they fit. */
static void insert(uint8_t *bytes, size_t *size, size_t at, const void *what, size_t count)
{
    if (*size + count > INPUT_MAX)
        return;
    memmove(bytes + at + count, bytes + at, *size - at);
    memcpy(bytes + at, what, count);
    *size += count;
}

static void erase(uint8_t *bytes, size_t *size, size_t at, size_t count)
{
    memmove(bytes + at, bytes + at + count, *size - at - count);
    *size -= count;
}

static void insert_word(uint8_t *bytes, size_t *size, size_t at)
{
    size_t words = 0;
    while (fuzz_words[words])
        words++;
    const char *word = fuzz_words[below(words)];
    insert(bytes, size, at, word, strlen(word));
}

/* One random change. */
static void mutate(uint8_t *bytes, size_t *size)
{
    const size_t at = below(*size + 1), rest = *size - at;
    const uint8_t byte = (uint8_t)next();
    const input *other = &corpus[below(corpus_count)];
    switch (below(7)) {
    case 0: /* flip a bit */
        if (rest)
            bytes[at] ^= (uint8_t)(1u << (byte % 8));
        break;
    case 1: /* any byte */
        if (rest)
            bytes[at] = byte;
        break;
    case 2: /* a digit, where numbers grow and shrink */
        insert(bytes, size, at, &"0123456789"[byte % 10], 1);
        break;
    case 3:
        if (rest)
            erase(bytes, size, at, 1 + below(rest));
        break;
    case 4:
        insert_word(bytes, size, at);
        break;
    case 5: /* the end of another input */
        if (other->size) {
            const size_t from = below(other->size);
            *size = at;
            insert(bytes, size, at, other->bytes + from, other->size - from);
        }
        break;
    default: /* a piece of itself, twice */
        if (rest) {
            uint8_t piece[64];
            const size_t count = 1 + below(rest < sizeof piece ? rest : sizeof piece);
            memcpy(piece, bytes + at, count);
            insert(bytes, size, at, piece, count);
        }
    }
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: %s CORPUS_FOLDER MUTATIONS [SEED]\n", argv[0]);
        return 2;
    }
    const unsigned long mutations = strtoul(argv[2], NULL, 10);
    state = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    printf("%s: seed %llu, %lu mutations\n", argv[1], (unsigned long long)state, mutations);
    signal(SIGABRT, on_abort);
    read_corpus(argv[1]);
    REQUIRE(corpus_count > 0);
    for (size_t i = 0; i < corpus_count; i++)
        try_input(corpus[i].bytes, corpus[i].size);
    static uint8_t bytes[INPUT_MAX];
    for (unsigned long i = 0; i < mutations; i++) {
        const input *from = &corpus[below(corpus_count)];
        size_t size = from->size;
        memcpy(bytes, from->bytes, size);
        for (size_t changes = 1 + below(4); changes > 0; changes--)
            mutate(bytes, &size);
        try_input(bytes, size);
    }
    for (size_t i = 0; i < corpus_count; i++)
        free(corpus[i].bytes);
    return 0;
}
