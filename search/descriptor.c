/* Launch descriptors, see descriptor.h. */
#include "descriptor.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "expression.h"

/* ---- Expressions ---- */

/* What the names of an expression stand for. */
typedef struct fields {
    const descriptor *s;
    const acr_problem *problem;
    const acr__device *device;
} fields;

/* Rows lie one after another without gaps, in the layout's order. */
static bool is_packed(const acr_problem *p)
{
    acr_problem packed = *p, given = *p;
    const acr_strides none = {0, 0, 0};
    acr_problem canonical;
    for (int i = 0; i < acr__tensor_count(p); ++i) {
        *acr__strides_of(&packed, acr__tensors[i]) = none;
    }
    bool same = acr_problem_canonical(&canonical, &packed) == ACR_OK;
    for (int i = 0; i < acr__tensor_count(p) && same; ++i) {
        same = memcmp(acr__strides_of(&canonical, acr__tensors[i]), acr__strides_of(&given, acr__tensors[i]),
                      sizeof(acr_strides)) == 0;
    }
    return same;
}

static bool field_value(void *arg, const char *name, size_t length, int64_t *out)
{
    const fields *f = arg;
    const acr_problem *p = f->problem;
    const acr__device *d = f->device;
    const descriptor *s = f->s;
#define X(field, value)                                                                                                \
    if (length == sizeof #field - 1 && memcmp(name, #field, length) == 0) {                                            \
        *out = (int64_t)(value);                                                                                       \
        return true;                                                                                                   \
    }
    DESCRIPTOR_FIELDS(X)
#undef X
    return false;
}

acr_status descriptor_evaluate(int64_t *out, const char *expression, const descriptor *s, const acr_problem *problem,
                               const acr__device *device)
{
    fields f = {s, problem, device};
    char error[EXPRESSION_ERROR_MAX];
    return expression_eval(expression, field_value, &f, out, error)
               ? ACR_OK
               : acr__fail(ACR_FORMAT, "\"%s\": %s", expression, error);
}

/* ---- JSON ---- */

static acr_status read_int(const json_t *object, const char *key, int64_t min, int64_t max, int64_t standard,
                           int64_t *out)
{
    const json_t *value = json_object_get(object, key);
    if (!value && standard >= min) {
        *out = standard;
        return ACR_OK;
    }
    if (!json_is_integer(value) || json_integer_value(value) < min || json_integer_value(value) > max) {
        return acr__fail(ACR_FORMAT, "%s: an integer from %lld to %lld is %s", key, (long long)min, (long long)max,
                         value ? "wanted" : "missing");
    }
    *out = json_integer_value(value);
    return ACR_OK;
}

static acr_status read_expression(const json_t *value, const char *key, const char *standard, descriptor_expression out)
{
    if (!value && standard) {
        snprintf(out, DESCRIPTOR_EXPRESSION_BYTES, "%s", standard);
    } else if (json_is_integer(value)) {
        snprintf(out, DESCRIPTOR_EXPRESSION_BYTES, "%lld", (long long)json_integer_value(value));
    } else if (json_is_string(value) && json_string_length(value) < DESCRIPTOR_EXPRESSION_BYTES) {
        snprintf(out, DESCRIPTOR_EXPRESSION_BYTES, "%s", json_string_value(value));
    } else {
        return acr__fail(ACR_FORMAT, "%s: a number or an expression below %d characters is %s", key,
                         (int)DESCRIPTOR_EXPRESSION_BYTES, value ? "wanted" : "missing");
    }
    /* Any problem shows whether it can be read; what it computes is asked for each problem. */
    acr_problem problem = ACR_PROBLEM_INIT;
    problem.batch = problem.q_heads = problem.kv_heads = problem.q_len = problem.kv_len = 1;
    problem.qk_dim = problem.v_dim = 64;
    const descriptor tiles = {.q_tile = 64, .kv_tile = 64, .stages = 1};
    const acr__device device = {.sm_count = 1, .smem_per_cta_bytes = 1};
    int64_t ignored;
    acr_status status = descriptor_evaluate(&ignored, out, &tiles, &problem, &device);
    if (status == ACR_OK || strstr(acr_last_error(), "division by zero") || strstr(acr_last_error(), "overflow") ||
        strstr(acr_last_error(), "ceil_div of a negative")) {
        return ACR_OK;
    }
    char why[400];
    snprintf(why, sizeof why, "%s", acr_last_error());
    return acr__fail(ACR_FORMAT, "%s: %s", key, why);
}

static acr_status read_pass(const json_t *object, acr_pass *out)
{
    const json_t *value = json_object_get(object, "pass");
    const char *text = value ? json_string_value(value) : "fwd";
    if (!text || (strcmp(text, "fwd") != 0 && strcmp(text, "bwd") != 0)) {
        return acr__fail(ACR_FORMAT, "pass: \"fwd\" or \"bwd\" is wanted");
    }
    *out = strcmp(text, "bwd") == 0 ? ACR_BACKWARD : ACR_FORWARD;
    return ACR_OK;
}

static acr_status read_dtype(const json_t *object, acr_dtype *out)
{
    const char *text = json_string_value(json_object_get(object, "dtype"));
    for (int dtype = ACR_F32; text && dtype <= ACR_E4M3; ++dtype) {
        if (strcmp(acr__dtype_text((acr_dtype)dtype), text) == 0) {
            *out = (acr_dtype)dtype;
            return ACR_OK;
        }
    }
    return acr__fail(ACR_FORMAT, "dtype: \"f32\", \"f16\", \"bf16\" or \"e4m3\" is %s", text ? "wanted" : "missing");
}

static acr_status read_numbers(descriptor *out, const json_t *object)
{
    enum {
        TILE_MAX = 4096
    };
    const struct {
        const char *key;
        int64_t max, standard; /* below 1 = none: the key is needed */
        int32_t *to;
    } numbers[] = {{"qk_dim", 1024, 0, &out->qk_dim},
                   {"v_dim", 1024, 0, &out->v_dim},
                   {"q_tile", TILE_MAX, 0, &out->q_tile},
                   {"kv_tile", TILE_MAX, 0, &out->kv_tile},
                   {"stages", 16, 1, &out->stages}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; ++i) {
        int64_t value;
        acr_status status = read_int(object, numbers[i].key, 1, numbers[i].max, numbers[i].standard, &value);
        if (status != ACR_OK) {
            return status;
        }
        *numbers[i].to = (int32_t)value;
    }
    return ACR_OK;
}

static acr_status read_boxes(acr__boxes *out, acr_pass pass, const json_t *object)
{
    const struct {
        const char *key;
        uint16_t *to;
    } rows[] = {
        {"q", &out->q_rows}, {"k", &out->k_rows}, {"v", &out->v_rows}, {"o", &out->o_rows}, {"out", &out->out_rows}};
    const json_t *boxes = json_object_get(object, "boxes");
    *out = (acr__boxes){0};
    if (!boxes) {
        return ACR_OK;
    }
    size_t known = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        int64_t value;
        acr_status status = read_int(boxes, rows[i].key, 0, 256, 0, &value); /* 256: CUDA's limit on a box */
        if (status != ACR_OK) {
            return acr__fail(ACR_FORMAT, "boxes: %s: an integer from 0 to 256 is wanted", rows[i].key);
        }
        *rows[i].to = (uint16_t)value;
        known += json_object_get(boxes, rows[i].key) != NULL;
    }
    if (out->out_rows != 0 && pass == ACR_FORWARD) {
        return acr__fail(ACR_FORMAT, "boxes: out: of sources for gradients alone, whose o is d_o");
    }
    return json_object_size(boxes) == known ? ACR_OK
                                            : acr__fail(ACR_FORMAT, "boxes: only q, k, v, o and out are known");
}

static acr_status read_launch(descriptor *out, const json_t *object)
{
    const json_t *grid = json_object_get(object, "grid");
    if (!json_is_array(grid) || json_array_size(grid) < 1 || json_array_size(grid) > 3) {
        return acr__fail(ACR_FORMAT, "grid: an array of one to three expressions is %s", grid ? "wanted" : "missing");
    }
    for (size_t i = 0; i < 3; ++i) {
        acr_status status = read_expression(json_array_get(grid, i), "grid", "1", out->grid[i]);
        if (status != ACR_OK) {
            return status;
        }
    }
    acr_status status = read_expression(json_object_get(object, "block"), "block", NULL, out->block);
    if (status == ACR_OK) {
        status = read_expression(json_object_get(object, "cluster"), "cluster", "0", out->cluster);
    }
    if (status == ACR_OK) {
        status = read_expression(json_object_get(object, "smem_bytes"), "smem_bytes", "0", out->smem_bytes);
    }
    return status == ACR_OK ? read_boxes(&out->boxes, out->pass, object) : status;
}

static acr_status check_keys(const json_t *object, acr__backend_id backend)
{
    static const char *const known[] = {"pass", "dtype",           "qk_dim", "v_dim", "q_tile",  "kv_tile",    "stages",
                                        "when", "workspace_bytes", "grid",   "block", "cluster", "smem_bytes", "boxes"};
    enum {
        CUDA_FIRST = 9
    };
    const size_t count = backend == ACR__CUDA ? sizeof known / sizeof known[0] : CUDA_FIRST;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        size_t i = 0;
        while (i < count && strcmp(known[i], key) != 0) {
            ++i;
        }
        if (i == count) {
            return acr__fail(ACR_FORMAT, "%.64s: no such key in a %s descriptor", key,
                             backend == ACR__CUDA ? "cuda" : "cpu");
        }
    }
    return ACR_OK;
}

static acr_status read_object(descriptor *out, const json_t *object)
{
    acr_status status = check_keys(object, out->backend);
    if (status == ACR_OK) {
        status = read_pass(object, &out->pass);
    }
    if (status == ACR_OK) {
        status = read_dtype(object, &out->dtype);
    }
    if (status == ACR_OK) {
        status = read_numbers(out, object);
    }
    if (status == ACR_OK) {
        status = read_expression(json_object_get(object, "when"), "when", "1", out->when);
    }
    if (status == ACR_OK) {
        status =
            read_expression(json_object_get(object, "workspace_bytes"), "workspace_bytes", "0", out->workspace_bytes);
    }
    return status == ACR_OK && out->backend == ACR__CUDA ? read_launch(out, object) : status;
}

acr_status descriptor_parse(descriptor *out, acr__backend_id backend, const char *json)
{
    json_error_t error;
    json_t *object = json_loads(json, JSON_REJECT_DUPLICATES, &error);
    if (!object) {
        return acr__fail(ACR_FORMAT, "descriptor: line %d: %s", error.line, error.text);
    }
    descriptor s = {.backend = backend};
    acr_status status = json_is_object(object) ? read_object(&s, object) : acr__fail(ACR_FORMAT, "not a JSON object");
    json_decref(object);
    if (status == ACR_OK) {
        *out = s;
        return ACR_OK;
    }
    char why[512];
    snprintf(why, sizeof why, "%s", acr_last_error());
    return acr__fail(status, "descriptor: %s", why);
}

/* ---- As a kernel's functions ---- */

/* An expression's value within [min, max], else the reason. */
static const char *bounded(int64_t *out, const char *what, const char *expression, const descriptor *s,
                           const acr_problem *problem, const acr__device *device, int64_t min, int64_t max)
{
    static _Thread_local char reason[512];
    if (descriptor_evaluate(out, expression, s, problem, device) != ACR_OK) {
        snprintf(reason, sizeof reason, "%s: %s", what, acr_last_error());
        return reason;
    }
    if (*out < min || *out > max) {
        snprintf(reason, sizeof reason, "%s is %lld, outside [%lld, %lld]", what, (long long)*out, (long long)min,
                 (long long)max);
        return reason;
    }
    return NULL;
}

static const char *launch_why_not(const descriptor *s, const acr_problem *problem, const acr__device *device)
{
    const struct {
        const char *what, *expression;
        int64_t min, max;
    } sizes[] = {{"grid[0]", s->grid[0], 1, INT32_MAX}, {"grid[1]", s->grid[1], 1, 65535},
                 {"grid[2]", s->grid[2], 1, 65535},     {"block", s->block, 1, 1024},
                 {"cluster", s->cluster, 0, 8},         {"smem_bytes", s->smem_bytes, 0, device->smem_per_cta_bytes}};
    const char *reason = NULL;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] && !reason; ++i) {
        int64_t ignored;
        reason = bounded(&ignored, sizes[i].what, sizes[i].expression, s, problem, device, sizes[i].min, sizes[i].max);
    }
    return reason;
}

const char *descriptor_why_not(const descriptor *s, const acr_problem *problem, const acr__device *device)
{
    enum {
        WORKSPACE_MAX = 1 << 30
    };
    int64_t value;
    if (problem->pass != s->pass) {
        return problem->pass == ACR_BACKWARD ? "pass is bwd, the descriptor's is fwd"
                                             : "pass is fwd, the descriptor's is bwd";
    }
    if (problem->qk_dim > s->qk_dim) {
        return "qk_dim is above the descriptor's";
    }
    if (problem->v_dim > s->v_dim) {
        return "v_dim is above the descriptor's";
    }
    if ((problem->window_left > 0 || problem->window_right > 0) && !strstr(s->when, "window_")) {
        return "it has a window, and the descriptor's \"when\" names neither window_left nor window_right";
    }
    if (problem->pass == ACR_BACKWARD && problem->grad_dtype != problem->dtype && !strstr(s->when, "grad_f32")) {
        return "grad_dtype is another than the inputs', and the descriptor's \"when\" does not name grad_f32";
    }
    const char *terms = acr__terms_why_not(0, problem);
    if (terms) {
        return terms;
    }
    const char *reason = bounded(&value, "when", s->when, s, problem, device, INT64_MIN, INT64_MAX);
    if (!reason && !value) {
        reason = "the descriptor's \"when\" excludes it";
    }
    if (!reason) {
        reason = bounded(&value, "workspace_bytes", s->workspace_bytes, s, problem, device, 0, WORKSPACE_MAX);
    }
    return !reason && s->backend == ACR__CUDA ? launch_why_not(s, problem, device) : reason;
}

size_t descriptor_workspace(const descriptor *s, const acr_problem *problem, const acr__device *device)
{
    int64_t bytes = 0;
    descriptor_evaluate(&bytes, s->workspace_bytes, s, problem, device);
    if (s->backend == ACR__CPU) {
        bytes = (bytes + 63) / 64 * 64 * device->threads; /* lanes' parts are 64-byte aligned */
    }
    return (size_t)bytes;
}

void descriptor_shape(const descriptor *s, const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    int64_t value[6] = {1, 1, 1, 1, 0, 0};
    const char *const expressions[] = {s->grid[0], s->grid[1], s->grid[2], s->block, s->cluster, s->smem_bytes};
    for (size_t i = 0; i < 6; ++i) {
        descriptor_evaluate(&value[i], expressions[i], s, problem, device);
    }
    *launch = (acr__launch){.grid = {(uint32_t)value[0], (uint32_t)value[1], (uint32_t)value[2]},
                            .block = (uint32_t)value[3],
                            .cluster = (uint32_t)value[4],
                            .smem_bytes = (uint32_t)value[5]};
}
