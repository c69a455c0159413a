/* Encoding tensor maps with the driver. */
#include "cuda/tensormap.h"

#include <stdio.h>
#include <string.h>

#include "cuda/device/attention/bias_boxes.h"
#include "cuda/driver.h"
#include "paging.h"
#include "problem.h"

_Static_assert(sizeof(fwd_map) == sizeof(CUtensorMap) && _Alignof(fwd_map) >= _Alignof(CUtensorMap),
               "fwd_map is a CUtensorMap");

enum {
    BOX_ROW_BYTES = 128,
    STRIDE_UNIT_BYTES = 16
};

typedef struct tensor {
    const char *name;
    const void *base;
    fwd_strides strides; /* elements */
    int32_t batch, heads, rows, dim;
    acr_dtype dtype;
} tensor;

static CUtensorMapDataType map_type(acr_dtype dtype)
{
    switch (dtype) {
    case ACR_F16:
        return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case ACR_BF16:
        return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case ACR_F32:
        return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case ACR_E4M3: /* bytes: the driver has no fp8 type, and none is needed to copy */
    case ACR_BOOL8:
    case ACR_DTYPE_DEFAULT:
        break;
    }
    return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

/* The stride of an extent of 1 is never used, but must be one that the driver accepts. */
static cuuint64_t stride_bytes(int32_t extent, int64_t stride_elems, int elem_bytes)
{
    return extent == 1 ? (cuuint64_t)STRIDE_UNIT_BYTES : (cuuint64_t)(stride_elems * elem_bytes);
}

static acr_status encode(const acr__cuda_driver *driver, fwd_map *map, const tensor *t, uint32_t box_rows,
                         uint32_t box_heads)
{
    const int elem_bytes = acr__dtype_bytes(t->dtype);
    const cuuint64_t extents[4] = {(cuuint64_t)t->dim, (cuuint64_t)t->rows, (cuuint64_t)t->heads, (cuuint64_t)t->batch};
    const cuuint64_t strides[3] = {stride_bytes(t->rows, t->strides.row, elem_bytes),
                                   stride_bytes(t->heads, t->strides.head, elem_bytes),
                                   stride_bytes(t->batch, t->strides.batch, elem_bytes)};
    const cuuint32_t box[4] = {(cuuint32_t)(BOX_ROW_BYTES / elem_bytes), box_rows, box_heads, 1};
    const cuuint32_t element_strides[4] = {1, 1, 1, 1};
    CUtensorMap encoded;
    void *base;
    memcpy(&base, &t->base, sizeof base); /* the driver's signature lacks the const */
    CUresult result = driver->TensorMapEncodeTiled(
        &encoded, map_type(t->dtype), 4, base, extents, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        char what[160];
        snprintf(what, sizeof what, "tensor map of %s (base %p, strides %llu, %llu, %llu bytes)", t->name, t->base,
                 (unsigned long long)strides[0], (unsigned long long)strides[1], (unsigned long long)strides[2]);
        return acr__cuda_fail(driver, result, ACR_DEVICE_FAULT, what);
    }
    memcpy(map, &encoded, sizeof encoded);
    return ACR_OK;
}

static uint32_t box_rows(const fwd_paging *paging, uint32_t rows)
{
    return paging->table && (uint32_t)paging->page < rows ? (uint32_t)paging->page : rows;
}

acr_status acr__maps_encode(const acr__cuda_driver *driver, bwd_maps *maps, const acr__boxes *boxes,
                            const acr_problem *problem, const fwd_args *args)
{
    const int packed = args->q_offsets != NULL;
    const int32_t batch = packed ? 1 : args->batch;
    const int32_t q_rows = packed ? args->q_total : args->q_len;
    const fwd_paging paging = fwd_paging_of(args);
    const acr_dtype kv_dtype = acr__kv_dtype(problem);
    /* of a cache its pages, whose boxes are no longer than they are */
    const int32_t kv_batch = paging.table ? paging.pages : batch;
    const int32_t kv_rows = paging.table ? paging.page : packed ? args->kv_total : args->kv_len;
    const tensor q = {"q", args->q, args->q_stride, batch, args->q_heads, q_rows, args->qk_dim, problem->dtype};
    const tensor k = {"k", args->k, args->k_stride, kv_batch, args->kv_heads, kv_rows, args->qk_dim, kv_dtype};
    const tensor v = {"v", args->v, args->v_stride, kv_batch, args->kv_heads, kv_rows, args->v_dim, kv_dtype};
    tensor o = {"o", args->o, args->o_stride, batch, args->q_heads, q_rows, args->v_dim, problem->out_dtype};
    const tensor out = o;
    if (problem->pass == ACR_BACKWARD) {
        o.name = "d_o";
        o.base = bwd_args_of(args)->d_o;
        o.strides = bwd_args_of(args)->d_o_stride;
    }
    /* a stride of 0 is of heads or entries that share the bias */
    const tensor bias = {"bias",
                         args->bias,
                         args->bias_stride,
                         args->bias_stride.batch != 0 ? batch : 1,
                         args->bias_stride.head != 0 ? args->q_heads : 1,
                         args->q_len,
                         args->kv_len,
                         problem->bias_dtype};
    acr_status status = ACR_OK;
    if (boxes->q_rows != 0)
        status = encode(driver, &maps->inputs.q, &q, boxes->q_rows, boxes->q_heads > 0 ? boxes->q_heads : 1);
    if (boxes->k_rows != 0 && status == ACR_OK)
        status = encode(driver, &maps->inputs.k, &k, box_rows(&paging, boxes->k_rows), 1);
    if (boxes->v_rows != 0 && status == ACR_OK)
        status = encode(driver, &maps->inputs.v, &v, box_rows(&paging, boxes->v_rows), 1);
    if (boxes->o_rows != 0 && status == ACR_OK)
        status = encode(driver, &maps->inputs.o, &o, boxes->o_rows, 1);
    if (boxes->bias_rows != 0 && bias_fits_boxes(args) && status == ACR_OK)
        status = encode(driver, &maps->inputs.o, &bias, boxes->bias_rows, 1);
    if (boxes->out_rows != 0 && status == ACR_OK)
        status = encode(driver, &maps->out, &out, boxes->out_rows, 1);
    return status;
}

static acr_status move(const acr__cuda_driver *driver, fwd_map *map, const char *name, const void *base)
{
    void *address;
    memcpy(&address, &base, sizeof address); /* the driver's signature lacks the const */
    CUresult result = driver->TensorMapReplaceAddress((CUtensorMap *)(void *)map, address);
    if (result == CUDA_SUCCESS)
        return ACR_OK;
    char what[80];
    snprintf(what, sizeof what, "tensor map of %s (base %p)", name, base);
    return acr__cuda_fail(driver, result, ACR_DEVICE_FAULT, what);
}

acr_status acr__maps_move(const acr__cuda_driver *driver, bwd_maps *maps, const acr__boxes *boxes,
                          const acr_problem *problem, const fwd_args *args)
{
    const int backward = problem->pass == ACR_BACKWARD;
    acr_status status = ACR_OK;
    if (boxes->q_rows != 0)
        status = move(driver, &maps->inputs.q, "q", args->q);
    if (boxes->k_rows != 0 && status == ACR_OK)
        status = move(driver, &maps->inputs.k, "k", args->k);
    if (boxes->v_rows != 0 && status == ACR_OK)
        status = move(driver, &maps->inputs.v, "v", args->v);
    if (boxes->o_rows != 0 && status == ACR_OK)
        status = move(driver, &maps->inputs.o, backward ? "d_o" : "o", backward ? bwd_args_of(args)->d_o : args->o);
    if (boxes->bias_rows != 0 && bias_fits_boxes(args) && status == ACR_OK)
        status = move(driver, &maps->inputs.o, "bias", args->bias);
    if (boxes->out_rows != 0 && status == ACR_OK)
        status = move(driver, &maps->out, "o", args->o);
    return status;
}
