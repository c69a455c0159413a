/* The features of `acromion run`, see run_features.h. */
#include "run_features.h"

#include "run_numbers.h"

/* The place of each option's file. */
enum {
    FILE_MASK,
    FILE_SINKS = RUN_SINKS - RUN_MASK,
    FILE_SLOPES = RUN_ALIBI - RUN_MASK,
    FILE_KV_STARTS = RUN_KV_STARTS - RUN_MASK,
    FILE_RANGES = RUN_RANGES - RUN_MASK,
    FILE_TREE = RUN_TREE - RUN_MASK
};

static const struct {
    const char *option, *expected;
    int rank; /* 0: checked elsewhere */
} run_files[RUN_FEATURE_FILES] = {
    [FILE_MASK] = {"mask", "an array of booleans, float16, bfloat16 or float32", 0},
    [FILE_SINKS] = {"sinks", "a 1-D array of float32", 1},
    [FILE_SLOPES] = {"alibi", "a 1-D array of float32", 1},
    [FILE_KV_STARTS] = {"kv-starts", "a 1-D array of int32 or int64", 1},
    [FILE_RANGES] = {"ranges", "a 3-D array of int32 or int64, [batch, ranges, 2]", 3},
    [FILE_TREE] = {"tree", "a 3-D array of uint8, [batch, query length, bytes]", 3},
};

bool run_features_take(run_features *f, int id, const char *value)
{
    if (id == RUN_SOFTCAP)
        return option_double("softcap", value, 1e-30, 1e30, &f->softcap);
    if (id == RUN_CHUNK)
        return option_int("chunk", value, 1, INT32_MAX, &f->chunk);
    f->paths[id - RUN_MASK] = value;
    return true;
}

/* 0 for what no bias is of. */
static acr_dtype bias_dtype_of(npy_type type)
{
    return type == NPY_RAW1 ? ACR_DTYPE_DEFAULT : npy_dtype(type);
}

static bool holds_expected(int which, const npy_array *a)
{
    if (run_files[which].rank != 0 && a->rank != run_files[which].rank)
        return false;
    switch (which) {
    case FILE_MASK:
        return bias_dtype_of(a->type) != ACR_DTYPE_DEFAULT;
    case FILE_SINKS:
    case FILE_SLOPES:
        return a->type == NPY_F32;
    case FILE_KV_STARTS:
        return run_holds_integers(a);
    case FILE_RANGES:
        return run_holds_integers(a) && a->shape[2] == 2;
    default:
        return a->type == NPY_RAW1;
    }
}

acr_status run_features_open(run_features *f)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < RUN_FEATURE_FILES && status == ACR_OK; i++) {
        if (!f->paths[i])
            continue;
        status = npy_open(f->paths[i], &f->files[i]);
        if (status == ACR_OK && !holds_expected(i, &f->files[i].array))
            status = acr__fail(ACR_INVALID, "%s: expected %s", f->paths[i], run_files[i].expected);
    }
    return status;
}

/* The strides of an array whose dimensions, the last ones first, broadcast to [batch, heads, rows, keys]. */
static acr_status describe_mask(const run_features *f, acr_problem *p)
{
    const npy_array *a = &f->files[FILE_MASK].array;
    const int64_t wanted[4] = {p->batch, p->q_heads, p->q_len, p->kv_len};
    int64_t strides[4] = {0, 0, 0, 1}, step = 1;
    for (int i = 3, at = a->rank - 1; at >= 0; i--, at--) {
        const int64_t extent = a->shape[at];
        if (extent != wanted[i] && (extent != 1 || i == 3))
            return acr__fail(ACR_INVALID,
                             "%s: extent %lld of dimension %d is not %lld; the shape has to broadcast to [batch %lld, "
                             "heads %lld, query length %lld], and its last extent has to be the key length %lld",
                             f->paths[FILE_MASK], (long long)extent, at, (long long)wanted[i], (long long)wanted[0],
                             (long long)wanted[1], (long long)wanted[2], (long long)wanted[3]);
        strides[i] = i == 3 ? 1 : extent == 1 ? 0 : step;
        step *= extent;
    }
    p->bias_dtype = bias_dtype_of(a->type);
    p->bias = (acr_strides){strides[0], strides[1], strides[2]};
    return ACR_OK;
}

static acr_status expect_extent(const run_features *f, int which, int dim, int64_t wanted, const char *what)
{
    const npy_array *a = &f->files[which].array;
    if (!f->paths[which] || a->shape[dim] == wanted)
        return ACR_OK;
    return acr__fail(ACR_INVALID, "%s: extent %lld of dimension %d is not %lld, %s", f->paths[which],
                     (long long)a->shape[dim], dim, (long long)wanted, what);
}

acr_status run_features_describe(const run_features *f, acr_problem *p)
{
    const struct {
        int which, dim;
        int64_t wanted;
        const char *what;
    } extents[] = {
        {FILE_SINKS, 0, p->q_heads, "the heads of q"},
        {FILE_SLOPES, 0, p->q_heads, "the heads of q"},
        {FILE_KV_STARTS, 0, p->batch, "the batch"},
        {FILE_RANGES, 0, p->batch, "the batch"},
        {FILE_TREE, 0, p->batch, "the batch"},
        {FILE_TREE, 1, p->q_len, "the query length"},
        {FILE_TREE, 2, (p->q_len + 7) / 8, "the bytes of as many bits as queries"},
    };
    p->softcap = (float)f->softcap;
    p->chunk = f->chunk;
    p->flags |= (f->paths[FILE_SINKS] ? ACR_SINKS : 0u) | (f->paths[FILE_SLOPES] ? ACR_ALIBI : 0u) |
                (f->paths[FILE_KV_STARTS] ? ACR_KV_STARTS : 0u) | (f->paths[FILE_RANGES] ? ACR_RANGES : 0u) |
                (f->paths[FILE_TREE] ? ACR_TREE : 0u);
    acr_status status = f->paths[FILE_MASK] ? describe_mask(f, p) : ACR_OK;
    for (size_t i = 0; i < sizeof extents / sizeof extents[0] && status == ACR_OK; i++)
        status = expect_extent(f, extents[i].which, extents[i].dim, extents[i].wanted, extents[i].what);
    if (status == ACR_OK && f->paths[FILE_RANGES]) {
        const int64_t ranges = f->files[FILE_RANGES].array.shape[1];
        if (ranges < 1 || ranges > INT32_MAX)
            return acr__fail(ACR_INVALID, "%s: holds no ranges", f->paths[FILE_RANGES]);
        p->ranges = (int32_t)ranges;
    }
    return status;
}

acr_status run_features_upload(run_features *f, const acr_problem *p, acr__backend_device *device)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < RUN_FEATURE_FILES && status == ACR_OK; i++) {
        const npy_array *a = &f->files[i].array;
        if (!f->paths[i])
            continue;
        if (i == FILE_KV_STARTS || i == FILE_RANGES)
            status = run_upload_integers(device, &f->memory[i], a, i == FILE_RANGES ? INT32_MAX : p->kv_len,
                                         run_files[i].option);
        else
            status = run_upload(device, &f->memory[i], a->data, a->data_bytes);
    }
    return status;
}

void run_features_set(const run_features *f, acr_buffers *buffers)
{
    buffers->bias = f->memory[FILE_MASK];
    buffers->sinks = f->memory[FILE_SINKS];
    buffers->slopes = f->memory[FILE_SLOPES];
    buffers->kv_starts = f->memory[FILE_KV_STARTS];
    buffers->ranges = f->memory[FILE_RANGES];
    buffers->tree = f->memory[FILE_TREE];
}

void run_features_free(run_features *f, acr__backend_device *device)
{
    for (int i = 0; i < RUN_FEATURE_FILES; i++) {
        if (f->memory[i])
            device->backend->mem_free(device, f->memory[i]);
        f->memory[i] = NULL;
    }
}

void run_features_close(run_features *f)
{
    for (int i = 0; i < RUN_FEATURE_FILES; i++)
        npy_close(&f->files[i]);
}
