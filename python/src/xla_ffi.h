/* The parts of XLA's typed FFI that the extension uses: how XLA calls a function of another library
 * (xla/ffi/api/c_api.h, versions 0.1 to 0.3, which agree in all of this). Layouts and numbers are XLA's, names ours.
 * tests/python/xla_layout.c compares every field with the header that the tests' jaxlib brings. */
#ifndef ACR_PY_XLA_FFI_H
#define ACR_PY_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

enum {
    XLA_MAJOR = 0,
    XLA_MINOR = 1 /* the first whose layouts are those below; jaxlib 0.6 to 0.10 serve it */
};

enum { /* xla_extension.type */
    XLA_METADATA = 1
};

enum { /* xla_attributes.types */
    XLA_ATTRIBUTE_ARRAY = 1,
    XLA_ATTRIBUTE_STRING = 4
};

enum { /* xla_array.dtype */
    XLA_S64 = 5
};

enum { /* xla_call_frame.stage */
    XLA_EXECUTE = 3
};

enum { /* what an error is */
    XLA_INVALID_ARGUMENT = 3,
    XLA_RESOURCE_EXHAUSTED = 8,
    XLA_UNIMPLEMENTED = 12,
    XLA_INTERNAL = 13,
    XLA_UNAVAILABLE = 14
};

/* Of types that only XLA knows. */
typedef struct xla_error xla_error;
typedef struct xla_context xla_context;

/* Every structure begins with its size and what extends it. */
typedef struct xla_extension {
    size_t size;
    int32_t type;
    struct xla_extension *next;
} xla_extension;

typedef struct xla_version {
    size_t size;
    xla_extension *extension;
    int32_t major, minor;
} xla_version;

/* What a handler tells of itself when a call comes with this extension. Later versions append. */
typedef struct xla_metadata {
    size_t size;
    xla_version api_version;
    uint32_t traits;
} xla_metadata;

typedef struct xla_metadata_extension {
    xla_extension base;
    xla_metadata *metadata;
} xla_metadata_extension;

typedef struct xla_error_create {
    size_t size;
    xla_extension *extension;
    const char *message;
    int32_t code;
} xla_error_create;

typedef struct xla_stream_get {
    size_t size;
    xla_extension *extension;
    xla_context *ctx;
    void *stream; /* written: a CUstream */
} xla_stream_get;

typedef struct xla_device_ordinal_get {
    size_t size;
    xla_extension *extension;
    xla_context *ctx;
    int32_t ordinal; /* written */
} xla_device_ordinal_get;

/* The functions that XLA offers. Those that return an error return NULL for success. */
typedef struct xla_api {
    size_t size;
    xla_extension *extension;
    xla_version version;
    const void *internal;
    xla_error *(*create_error)(xla_error_create *args);
    void (*get_error_message)(void);
    void (*destroy_error)(void);
    void (*register_handler)(void);
    xla_error *(*get_stream)(xla_stream_get *args);
    void (*unused[12])(void); /* types, states, memory, threads, futures, runs */
    xla_error *(*get_device_ordinal)(xla_device_ordinal_get *args);
} xla_api;

/* An argument or a result: packed, the last dimension innermost. */
typedef struct xla_buffer {
    size_t size;
    xla_extension *extension;
    int32_t dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} xla_buffer;

typedef struct xla_buffers {
    size_t size;
    xla_extension *extension;
    int64_t count;
    int32_t *types;       /* 1: a buffer, the only type there is */
    xla_buffer **buffers; /* [count] */
} xla_buffers;

/* Text without a terminating zero. */
typedef struct xla_text {
    const char *bytes;
    size_t length;
} xla_text;

typedef struct xla_array {
    int32_t dtype;
    size_t count;
    const void *data;
} xla_array;

typedef struct xla_attributes {
    size_t size;
    xla_extension *extension;
    int64_t count;
    int32_t *types;
    xla_text **names; /* in the order of their names */
    void **values;    /* XLA_ATTRIBUTE_ARRAY: an xla_array; XLA_ATTRIBUTE_STRING: an xla_text */
} xla_attributes;

typedef struct xla_call_frame {
    size_t size;
    xla_extension *extension;
    const xla_api *api;
    xla_context *ctx;
    int32_t stage;
    xla_buffers arguments, results;
    xla_attributes attributes;
    void *future;
} xla_call_frame;

_Static_assert(sizeof(void *) == 8 && sizeof(xla_extension) == 24 && sizeof(xla_version) == 24 &&
                   sizeof(xla_metadata) == 40 && sizeof(xla_error_create) == 32 && sizeof(xla_stream_get) == 32 &&
                   sizeof(xla_device_ordinal_get) == 32 && sizeof(xla_api) == 192 && sizeof(xla_buffer) == 48 &&
                   sizeof(xla_buffers) == 40 && sizeof(xla_attributes) == 48 && sizeof(xla_call_frame) == 176,
               "XLA's sizes on machines of 64 bits");

#endif
