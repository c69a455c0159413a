/* .npy files, see npy.h. The header is a Python dict literal with three known keys; anything else is refused with its
 * offset. */
#include "npy.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "files.h"
#include "internal.h"

/* The format: 6 bytes magic, 2 bytes version, header length (2 bytes in version 1, else 4, little endian), header,
 * data. */
static const unsigned char magic[6] = {0x93, 'N', 'U', 'M', 'P', 'Y'};

typedef struct cursor {
    const unsigned char *begin, *at, *end; /* of the header; begin is the file's first byte, for offsets in messages */
} cursor;

typedef struct header {
    char descr[16];
    bool has_descr, has_order, has_shape;
    bool fortran_order;
    int rank;
    int64_t shape[NPY_RANK_MAX];
} header;

static const struct {
    const char *descr;
    npy_type type;
} types[] = {
    {"<f4", NPY_F32},  {"<f2", NPY_F16},  {"<V2", NPY_RAW2}, {"|V2", NPY_RAW2}, {"|V1", NPY_RAW1},
    {"<V1", NPY_RAW1}, {"|u1", NPY_RAW1}, {"<i4", NPY_I32},  {"<i8", NPY_I64},  {"|b1", NPY_BOOL},
};

size_t npy_type_bytes(npy_type type)
{
    static const size_t bytes[] = {
        [NPY_F32] = 4, [NPY_F16] = 2, [NPY_RAW2] = 2, [NPY_RAW1] = 1, [NPY_BOOL] = 1, [NPY_I32] = 4, [NPY_I64] = 8};
    return bytes[type];
}

const char *npy_type_text(npy_type type)
{
    static const char *const texts[] = {[NPY_F32] = "<f4",  [NPY_F16] = "<f2", [NPY_RAW2] = "<V2", [NPY_RAW1] = "|V1",
                                        [NPY_BOOL] = "|b1", [NPY_I32] = "<i4", [NPY_I64] = "<i8"};
    return texts[type];
}

acr_dtype npy_dtype(npy_type type)
{
    static const acr_dtype dtypes[NPY_I64 + 1] = {
        [NPY_F32] = ACR_F32, [NPY_F16] = ACR_F16, [NPY_RAW2] = ACR_BF16, [NPY_RAW1] = ACR_E4M3, [NPY_BOOL] = ACR_BOOL8};
    return dtypes[type];
}

static acr_status malformed(const cursor *in, const char *what)
{
    return acr__fail(ACR_FORMAT, "byte %zu: %s", (size_t)(in->at - in->begin), what);
}

static void skip_spaces(cursor *in)
{
    while (in->at < in->end && (*in->at == ' ' || *in->at == '\n')) {
        ++in->at;
    }
}

/* Takes the character if it comes next, after spaces. */
static bool take(cursor *in, char wanted)
{
    skip_spaces(in);
    if (in->at < in->end && *in->at == (unsigned char)wanted) {
        ++in->at;
        return true;
    }
    return false;
}

static bool take_word(cursor *in, const char *word)
{
    size_t length = strlen(word);
    skip_spaces(in);
    if ((size_t)(in->end - in->at) < length || memcmp(in->at, word, length) != 0) {
        return false;
    }
    in->at += length;
    return true;
}

/* A quoted string without escapes, shorter than `capacity`. */
static acr_status take_string(cursor *in, char *out, size_t capacity)
{
    skip_spaces(in);
    if (in->at >= in->end || (*in->at != '\'' && *in->at != '"')) {
        return malformed(in, "expected a quoted string");
    }
    unsigned char quote = *in->at++;
    size_t length = 0;
    while (in->at < in->end && *in->at != quote) {
        if (*in->at == '\\' || length + 1 >= capacity) {
            return malformed(in, "string too long, or with an escape");
        }
        out[length++] = (char)*in->at++;
    }
    if (in->at >= in->end) {
        return malformed(in, "string without its closing quote");
    }
    ++in->at;
    out[length] = '\0';
    return ACR_OK;
}

static acr_status take_extent(cursor *in, int64_t *out)
{
    int64_t value = 0;
    const unsigned char *first = in->at;
    while (in->at < in->end && *in->at >= '0' && *in->at <= '9') {
        if (value > (INT64_MAX - 9) / 10) {
            return malformed(in, "extent too large");
        }
        value = value * 10 + (*in->at++ - '0');
    }
    if (in->at == first) {
        return malformed(in, "expected an extent");
    }
    *out = value;
    return ACR_OK;
}

static acr_status take_shape(cursor *in, header *h)
{
    if (!take(in, '(')) {
        return malformed(in, "expected the shape, a tuple");
    }
    h->rank = 0;
    while (!take(in, ')')) {
        if (h->rank == NPY_RANK_MAX) {
            return malformed(in, "more than 4 dimensions");
        }
        acr_status status = take_extent(in, &h->shape[h->rank]);
        if (status != ACR_OK) {
            return status;
        }
        ++h->rank;
        bool comma = take(in, ',');
        skip_spaces(in);
        if (!comma && (in->at >= in->end || *in->at != ')')) {
            return malformed(in, "expected ',' or ')' in the shape");
        }
    }
    return h->rank > 0 ? ACR_OK : malformed(in, "a scalar, no tensor: the shape is empty");
}

static acr_status take_entry(cursor *in, header *h)
{
    char key[16];
    acr_status status = take_string(in, key, sizeof key);
    if (status != ACR_OK) {
        return status;
    }
    if (!take(in, ':')) {
        return malformed(in, "expected ':' after a key");
    }
    skip_spaces(in);
    if (strcmp(key, "descr") == 0 && !h->has_descr) {
        h->has_descr = true;
        if (in->at < in->end && *in->at == '[') {
            return malformed(in, "a structured type, expected a plain one");
        }
        return take_string(in, h->descr, sizeof h->descr);
    }
    if (strcmp(key, "fortran_order") == 0 && !h->has_order) {
        h->has_order = true;
        h->fortran_order = take_word(in, "True");
        return h->fortran_order || take_word(in, "False") ? ACR_OK : malformed(in, "expected True or False");
    }
    if (strcmp(key, "shape") == 0 && !h->has_shape) {
        h->has_shape = true;
        return take_shape(in, h);
    }
    return malformed(in, "unknown or repeated key; expected descr, fortran_order and shape once each");
}

static acr_status take_header(cursor *in, header *h)
{
    if (!take(in, '{')) {
        return malformed(in, "expected '{'");
    }
    while (!take(in, '}')) {
        acr_status status = take_entry(in, h);
        if (status != ACR_OK) {
            return status;
        }
        bool comma = take(in, ',');
        skip_spaces(in);
        if (!comma && (in->at >= in->end || *in->at != '}')) {
            return malformed(in, "expected ',' or '}'");
        }
    }
    skip_spaces(in);
    if (in->at != in->end) {
        return malformed(in, "text after the header's '}'");
    }
    if (!h->has_descr || !h->has_order || !h->has_shape) {
        return malformed(in, "the header lacks descr, fortran_order or shape");
    }
    if (h->fortran_order) {
        return malformed(in, "fortran_order is True: rows must be contiguous; save it with numpy.ascontiguousarray");
    }
    return ACR_OK;
}

static acr_status find_type(const cursor *in, const char *descr, npy_type *out)
{
    for (size_t i = 0; i < sizeof types / sizeof types[0]; ++i) {
        if (strcmp(types[i].descr, descr) == 0) {
            *out = types[i].type;
            return ACR_OK;
        }
    }
    if (strcmp(descr, "<f8") == 0 || strcmp(descr, ">f4") == 0 || strcmp(descr, ">f2") == 0) {
        return acr__fail(ACR_FORMAT, "byte %zu: type '%s' (%s): save it with .astype('%s')",
                         (size_t)(in->at - in->begin), descr, descr[0] == '<' ? "float64" : "big endian",
                         strcmp(descr, ">f2") == 0 ? "<f2" : "<f4");
    }
    return acr__fail(ACR_FORMAT,
                     "byte %zu: type '%s' is not supported; supported are <f4, <f2, <V2 (bfloat16), |V1 and |u1 "
                     "(e4m3), <i4, <i8, |b1",
                     (size_t)(in->at - in->begin), descr);
}

/* Elements and bytes of a shape; false when they do not fit in 63 bits. */
static bool count_elems(const header *h, size_t elem_bytes, int64_t *elems, int64_t *bytes)
{
    *elems = 1;
    for (int i = 0; i < h->rank; ++i) {
        if (__builtin_mul_overflow(*elems, h->shape[i], elems)) {
            return false;
        }
    }
    return !__builtin_mul_overflow(*elems, (int64_t)elem_bytes, bytes);
}

/* Finds the header between the fixed-size fields and the data. */
static acr_status find_header(const unsigned char *bytes, size_t size, cursor *out)
{
    cursor in = {bytes, bytes, bytes + size};
    if (size < 10 || memcmp(bytes, magic, sizeof magic) != 0) {
        return malformed(&in, "not a .npy file");
    }
    unsigned version = bytes[6];
    in.at = bytes + 6;
    if (version < 1 || version > 3 || bytes[7] != 0) {
        return malformed(&in, "unknown version of the .npy format; 1.0, 2.0 and 3.0 are known");
    }
    size_t length_bytes = version == 1 ? 2 : 4;
    in.at = bytes + 8;
    if (size < 8 + length_bytes) {
        return malformed(&in, "the file ends within the header length");
    }
    size_t length = 0;
    for (size_t i = length_bytes; i-- > 0;) {
        length = length << 8 | bytes[8 + i];
    }
    if (length > size - 8 - length_bytes) {
        return malformed(&in, "the file ends within the header");
    }
    in.at = bytes + 8 + length_bytes;
    in.end = in.at + length;
    *out = in;
    return ACR_OK;
}

acr_status npy_parse(const void *bytes, size_t size, npy_array *out)
{
    cursor in = {NULL, NULL, NULL};
    acr_status status = find_header(bytes, size, &in);
    if (status != ACR_OK) {
        return status;
    }
    header h = {.rank = 0};
    npy_type type = NPY_F32;
    status = take_header(&in, &h);
    if (status == ACR_OK) {
        status = find_type(&in, h.descr, &type);
    }
    if (status != ACR_OK) {
        return status;
    }
    int64_t elems = 0, data_bytes = 0;
    int64_t available = (int64_t)(size - (size_t)(in.end - in.begin));
    if (!count_elems(&h, npy_type_bytes(type), &elems, &data_bytes)) {
        return malformed(&in, "the shape has more elements than 63 bits can count");
    }
    if (data_bytes != available) {
        return acr__fail(ACR_FORMAT, "byte %zu: the shape needs %" PRId64 " bytes of data, the file has %" PRId64,
                         (size_t)(in.end - in.begin), data_bytes, available);
    }
    *out = (npy_array){.type = type, .rank = h.rank, .elems = elems, .data = in.end, .data_bytes = (size_t)data_bytes};
    memcpy(out->shape, h.shape, sizeof h.shape);
    return ACR_OK;
}

acr_status npy_open(const char *path, npy_file *out)
{
    npy_file file = {.bytes = NULL};
    acr_status status = file_map(path, &file.bytes, &file.size);
    if (status != ACR_OK) {
        return status;
    }
    status = npy_parse(file.bytes ? file.bytes : "", file.size, &file.array);
    if (status != ACR_OK) {
        char detail[512];
        snprintf(detail, sizeof detail, "%s", acr_last_error());
        npy_close(&file);
        return acr__fail(status, "%s: %s", path, detail);
    }
    *out = file;
    return ACR_OK;
}

void npy_close(npy_file *file)
{
    file_unmap(file->bytes, file->size);
    *file = (npy_file){.bytes = NULL};
}

acr_status npy_write(const char *path, npy_type type, int rank, const int64_t *shape, const void *data)
{
    char dims[NPY_RANK_MAX * 24] = "";
    size_t length = 0, elems = 1;
    for (int i = 0; i < rank; ++i) {
        const char *separator = i + 1 < rank ? ", " : rank == 1 ? "," : ""; /* a tuple of one needs its comma */
        length += (size_t)snprintf(dims + length, sizeof dims - length, "%" PRId64 "%s", shape[i], separator);
        elems *= (size_t)shape[i];
    }
    /* Version 1.0; the data begins at a multiple of 64 bytes, as NumPy writes it. */
    enum {
        PREAMBLE_BYTES = 10,
        DATA_ALIGNMENT = 64
    };
    char text[PREAMBLE_BYTES + 256];
    int used = snprintf(text + PREAMBLE_BYTES, sizeof text - PREAMBLE_BYTES,
                        "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", npy_type_text(type), dims);
    size_t header_end = (PREAMBLE_BYTES + (size_t)used + 1 + DATA_ALIGNMENT - 1) / DATA_ALIGNMENT * DATA_ALIGNMENT;
    memset(text + PREAMBLE_BYTES + used, ' ', header_end - PREAMBLE_BYTES - (size_t)used);
    text[header_end - 1] = '\n';
    size_t header_bytes = header_end - PREAMBLE_BYTES;
    memcpy(text, magic, sizeof magic);
    text[6] = 1;
    text[7] = 0;
    text[8] = (char)(header_bytes & 0xff);
    text[9] = (char)(header_bytes >> 8);
    const file_part parts[] = {{text, header_end}, {data, elems * npy_type_bytes(type)}};
    return file_write(path, parts, 2);
}
