/* Fuzzes the .npy reader: an array that it accepts lies inside the bytes, whole. */
#include "base/npy.h"
#include "fuzz.h"

const char *const fuzz_words[] = {"\x93NUMPY\x01",
                                  "'descr'",
                                  "'fortran_order'",
                                  "'shape'",
                                  "True",
                                  "False",
                                  "'<f4'",
                                  "'<f2'",
                                  "'|V1'",
                                  "'>f4'",
                                  "(1, 2, 3, 4)",
                                  "(0,)",
                                  "9223372036854775807",
                                  "4294967296",
                                  "{",
                                  "}",
                                  ", ",
                                  "\n",
                                  NULL};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    npy_array array;
    const acr_status status = npy_parse(data, size, &array);
    if (status != ACR_OK) {
        REQUIRE(status == ACR_FORMAT);
        REQUIRE(acr_last_error()[0] != '\0');
        return 0;
    }
    REQUIRE(array.rank >= 1 && array.rank <= NPY_RANK_MAX);
    int64_t elems = 1;
    for (int i = 0; i < array.rank; i++) {
        REQUIRE(array.shape[i] >= 0);
        elems *= array.shape[i];
    }
    REQUIRE(elems == array.elems);
    REQUIRE(array.data_bytes == (size_t)elems * npy_type_bytes(array.type));
    const uint8_t *first = array.data;
    REQUIRE(first >= data && first + array.data_bytes <= data + size);
    REQUIRE(npy_type_text(array.type)[0] != '\0');
    unsigned sum = 0;
    for (size_t i = 0; i < array.data_bytes; i++) /* a sanitizer watches */
        sum += first[i];
    volatile unsigned sink = sum;
    (void)sink;
    return 0;
}
