#ifndef ACR_CORE_PACKED_IMAGE_H
#define ACR_CORE_PACKED_IMAGE_H
/* How a library embeds a device image: this header, then the code as one frame of zstd. Two lines that differ in their
 * element's type alone have nearly the same code, so the second is written as what differs from the first, its base: a
 * tenth of the size. cmake/pack_image.c writes it, cuda/image.c unpacks it. Native byte order. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ACR__PACKED_MAGIC "acrpack1"

typedef struct acr__packed_image {
    char magic[8];
    uint64_t code_bytes;  /* unpacked */
    uint64_t frame_bytes; /* behind this header */
    uint64_t code_digest; /* XXH3 of the code, 64 bits: the same however it is packed */
    uint64_t base_digest; /* of the code that it differs from, which stands alone in the same library; 0: of none */
} acr__packed_image;

/* Reads the header of a packed image into out. 0 = it is another image: a cubin, a fat binary, PTX. */
static inline int acr__read_packed(acr__packed_image *out, const unsigned char *image, size_t bytes)
{
    if (bytes < sizeof *out || memcmp(image, ACR__PACKED_MAGIC, sizeof out->magic) != 0)
        return 0;
    memcpy(out, image, sizeof *out);
    return 1;
}

#endif
