/* Device images: every one of the library unpacks to the code that its digest names, and a damaged one is refused. */
#include "support.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cuda/image.h"
#include "cuda/ops/ops.h"
#include "packed_image.h"

static size_t image_bytes(const acr__kernel *kernel)
{
    return (size_t)(kernel->image_end - kernel->image);
}

static acr__packed_image header_of(const acr__kernel *kernel)
{
    acr__packed_image header;
    assert_int_equal(acr__read_packed(&header, kernel->image, image_bytes(kernel)), 1);
    assert_int_equal(sizeof header + header.frame_bytes, image_bytes(kernel));
    return header;
}

static void assert_unpacks(const acr__kernel *kernel)
{
    const acr__packed_image header = header_of(kernel);
    acr__code code;
    assert_int_equal(acr__code_find(&code, kernel), ACR_OK);
    assert_int_equal(XXH3_64bits(code.bytes, header.code_bytes), acr__kernel_digest(kernel));
    assert_int_equal(code.bytes[header.code_bytes], 0);
    acr__code_free(&code);
    assert_null(code.bytes);
}

static void all_unpack(void **state)
{
    (void)state;
    for (size_t i = 0; i < acr__kernel_count; i++)
        if (acr__kernels[i]->backend == ACR__CUDA)
            assert_unpacks(acr__kernels[i]);
    for (size_t i = 0; i < ACR__CUDA_OPS; i++)
        assert_unpacks(&acr__cuda_ops[i].code);
}

/* The first CUDA kernel that differs from another, or the first that stands alone. */
static const acr__kernel *find_kernel(bool differs)
{
    for (size_t i = 0; i < acr__kernel_count; i++)
        if (acr__kernels[i]->backend == ACR__CUDA && (header_of(acr__kernels[i]).base_digest != 0) == differs)
            return acr__kernels[i];
    fail_msg("there is no such kernel");
    return NULL;
}

static void twins_are_small(void **state)
{
    (void)state;
    const acr__kernel *twin = find_kernel(true);
    const acr__packed_image header = header_of(twin);
    assert_true(header.frame_bytes < header.code_bytes / 20);
}

static void other_images_are_taken_as_they_are(void **state)
{
    (void)state;
    static const unsigned char ptx[] = ".version 8.0\n";
    const acr__kernel kernel = {.name = "candidate", .image = ptx, .image_end = ptx + sizeof ptx - 1};
    acr__code code;
    assert_int_equal(acr__code_find(&code, &kernel), ACR_OK);
    assert_ptr_equal(code.bytes, ptx);
    acr__code_free(&code);
}

/* A kernel with an image of its own to damage. */
typedef struct damaged {
    acr__kernel kernel;
    unsigned char *image;
} damaged;

static damaged copy_of(const acr__kernel *kernel)
{
    damaged d = {*kernel, malloc(image_bytes(kernel))};
    assert_non_null(d.image);
    memcpy(d.image, kernel->image, image_bytes(kernel));
    d.kernel.image = d.image;
    d.kernel.image_end = d.image + image_bytes(kernel);
    return d;
}

static void set_header(damaged *d, acr__packed_image header)
{
    memcpy(d->image, &header, sizeof header);
}

static void assert_refused(damaged *d, const char *why)
{
    acr__code code;
    assert_int_equal(acr__code_find(&code, &d->kernel), ACR_DEVICE_FAULT);
    assert_non_null(strstr(acr_last_error(), d->kernel.name));
    assert_non_null(strstr(acr_last_error(), why));
    assert_null(code.owned);
    free(d->image);
}

static void damage_is_refused(void **state)
{
    (void)state;
    const acr__kernel *alone = find_kernel(false), *twin = find_kernel(true);

    damaged d = copy_of(alone);
    d.image[image_bytes(alone) - 1] ^= 1; /* of the checksum */
    assert_refused(&d, "checksum");

    d = copy_of(alone);
    acr__packed_image header = header_of(alone);
    header.code_bytes++;
    set_header(&d, header);
    assert_refused(&d, "too short");

    d = copy_of(alone);
    header = header_of(alone);
    header.code_bytes /= 2;
    set_header(&d, header);
    assert_refused(&d, "unpacking");

    d = copy_of(twin);
    header = header_of(twin);
    header.base_digest ^= 1;
    set_header(&d, header);
    assert_refused(&d, "lacks the image");

    header.base_digest = acr__kernel_digest(twin); /* is in the library, but stands not alone */
    d = copy_of(twin);
    set_header(&d, header);
    assert_refused(&d, "lacks the image");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_unpack),
        cmocka_unit_test(twins_are_small),
        cmocka_unit_test(other_images_are_taken_as_they_are),
        cmocka_unit_test(damage_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
