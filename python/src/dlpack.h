/* The parts of DLPack's binary interface that the extension uses: how array libraries describe a tensor to each other
 * (dmlc/dlpack, major version 1). Layouts and numbers are the standard's, names are ours. */
#ifndef ACR_PY_DLPACK_H
#define ACR_PY_DLPACK_H

#include <stdint.h>

enum { /* dl_device.type */
    DL_CPU = 1,
    DL_CUDA = 2,
    DL_CUDA_HOST = 3, /* pinned: the CPU reads it like any other memory */
    DL_CUDA_MANAGED = 13
};

enum {      /* dl_type.code */
    DL_INT, /* 0, and so on */
    DL_UINT,
    DL_FLOAT,
    DL_OPAQUE,
    DL_BFLOAT,
    DL_BOOL = 6,
    DL_FLOAT8_E4M3FN = 10 /* OCP FP8 E4M3; from version 1.1 on */
};

enum {
    DL_MAJOR = 1,
    DL_READ_ONLY = 1 /* bit of dl_managed_versioned.flags */
};

typedef struct dl_device {
    int32_t type, id;
} dl_device;

typedef struct dl_type {
    uint8_t code, bits;
    uint16_t lanes;
} dl_type;

typedef struct dl_tensor {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_type dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; before version 1.2 NULL = packed */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_version {
    uint32_t major, minor;
} dl_version;

/* In a capsule named "dltensor". */
typedef struct dl_managed {
    dl_tensor tensor;
    void *manager;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

/* In a capsule named "dltensor_versioned". */
typedef struct dl_managed_versioned {
    dl_version version;
    void *manager;
    void (*deleter)(struct dl_managed_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_versioned;

/* What a type offers under `__dlpack_c_exchange_api__`, in a capsule named "dlpack_exchange_api": the same without a
 * Python call, and the stream that the library works on. Functions return 0, or -1 with a Python exception set. */
typedef struct dl_exchange {
    dl_version version;
    struct dl_exchange *previous; /* for an older major version, or NULL */
    int (*allocate)(dl_tensor *prototype, dl_managed_versioned **out, void *error_arg,
                    void (*set_error)(void *error_arg, const char *kind, const char *message));
    int (*export_managed)(void *object, dl_managed_versioned **out);
    int (*import_managed)(dl_managed_versioned *tensor, void **out_object);
    int (*view)(void *object, dl_tensor *out); /* valid until Python runs again; NULL: not offered */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} dl_exchange;

#endif
