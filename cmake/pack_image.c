/* Packs a device image for embedding: pack_image OUT IMAGE [BASE]. With BASE, an image too, OUT is what differs from
 * it. See src/core/packed_image.h. A program of the build, on the machine that builds. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <zstd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "packed_image.h"

enum {
    LEVEL = 19,
    WINDOW_LOG = 24 /* a base and an image lie in 16 MB */
};

typedef struct file_bytes {
    unsigned char *data;
    size_t bytes;
} file_bytes;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "pack_image: %s: %s\n", what, why);
    exit(1);
}

static void *allocate(size_t bytes)
{
    void *memory = malloc(bytes);
    if (memory == NULL)
        fail("memory", strerror(errno));
    return memory;
}

static file_bytes read_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0)
        fail(path, strerror(errno));
    const long bytes = ftell(file);
    if (bytes <= 0)
        fail(path, "it is empty");
    rewind(file);
    file_bytes out = {allocate((size_t)bytes), (size_t)bytes};
    if (fread(out.data, 1, out.bytes, file) != out.bytes)
        fail(path, strerror(errno));
    fclose(file);
    return out;
}

static void check(size_t result, const char *what)
{
    if (ZSTD_isError(result))
        fail(what, ZSTD_getErrorName(result));
}

static file_bytes compress(const file_bytes *image, const file_bytes *base)
{
    ZSTD_CCtx *context = ZSTD_createCCtx();
    if (context == NULL)
        fail("zstd", "no memory");
    check(ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, LEVEL), "level");
    check(ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, WINDOW_LOG), "window");
    check(ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1), "checksum");
    if (base->data != NULL)
        check(ZSTD_CCtx_refPrefix(context, base->data, base->bytes), "base");
    const size_t most = ZSTD_compressBound(image->bytes);
    file_bytes out = {allocate(most), 0};
    out.bytes = ZSTD_compress2(context, out.data, most, image->data, image->bytes);
    check(out.bytes, "compressing");
    ZSTD_freeCCtx(context);
    return out;
}

/* Another build may read the same folder: the file is whole or not there. */
static void write_packed(const char *path, const acr__packed_image *header, const file_bytes *frame)
{
    char partial[4096];
    if (snprintf(partial, sizeof partial, "%s.%ld", path, (long)getpid()) >= (int)sizeof partial)
        fail(path, "its name is too long");
    FILE *out = fopen(partial, "wb");
    if (out == NULL)
        fail(partial, strerror(errno));
    const int written = fwrite(header, sizeof *header, 1, out) == 1 && fwrite(frame->data, frame->bytes, 1, out) == 1;
    if (fclose(out) != 0 || !written || rename(partial, path) != 0)
        fail(path, strerror(errno));
}

int main(int argc, char **argv)
{
    if (argc != 3 && argc != 4) {
        fprintf(stderr, "usage: pack_image OUT IMAGE [BASE]\n");
        return 2;
    }
    file_bytes image = read_file(argv[2]), base = {NULL, 0};
    if (argc == 4)
        base = read_file(argv[3]);
    if (base.bytes + image.bytes > (size_t)1 << WINDOW_LOG)
        fail(argv[2], "it and its base have more than 16 MB");
    file_bytes frame = compress(&image, &base);
    const acr__packed_image header = {.magic = ACR__PACKED_MAGIC,
                                      .code_bytes = image.bytes,
                                      .frame_bytes = frame.bytes,
                                      .code_digest = XXH3_64bits(image.data, image.bytes),
                                      .base_digest = base.data != NULL ? XXH3_64bits(base.data, base.bytes) : 0};
    write_packed(argv[1], &header, &frame);
    free(image.data);
    free(base.data);
    free(frame.data);
    return 0;
}
