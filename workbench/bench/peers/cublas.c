/* The unfused baseline, see cublas.h. */
#include "cublas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- cuBLAS: the few entries that are used, declared here so that its header is not needed ---- */

typedef struct cublasContext *cublas_handle;

/* cuBLAS's own numbers: of statuses, operations, element types, types of sums, algorithms. */
enum {
    CUBLAS_OK = 0
};
enum {
    CUBLAS_PLAIN = 0,
    CUBLAS_TRANSPOSED = 1
};
enum {
    CUBLAS_R32F = 0,
    CUBLAS_R16F = 2,
    CUBLAS_R16BF = 14
};
enum {
    CUBLAS_COMPUTE_32F = 68
};
enum {
    CUBLAS_ALGO_DEFAULT = -1
};

typedef struct cublas_library {
    void *handle;
    int (*create)(cublas_handle *handle);
    int (*destroy)(cublas_handle handle);
    int (*version)(cublas_handle handle, int *version);
    int (*set_stream)(cublas_handle handle, void *stream);
    int (*set_workspace)(cublas_handle handle, void *memory, size_t bytes);
    int (*gemm)(cublas_handle handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a,
                int a_type, int a_rows, long long a_step, const void *b, int b_type, int b_rows, long long b_step,
                const void *beta, void *c, int c_type, int c_rows, long long c_step, int count, int compute_type,
                int algorithm);
} cublas_library;

/* ---- The softmax kernel ---- */

#define SOFTMAX_IMAGE(name) extern const unsigned char acr__image_##name[], acr__image_end_##name[]
SOFTMAX_IMAGE(softmax_f16_sm80);
SOFTMAX_IMAGE(softmax_bf16_sm80);
SOFTMAX_IMAGE(softmax_f16_f32_sm80);
SOFTMAX_IMAGE(softmax_bf16_f32_sm80);

static void softmax_shape(const acr_problem *p, const acr__device *device, acr__launch *launch)
{
    enum {
        ROWS = 8, /* of a CTA, a warp each, as in the kernel */
        WARP_THREADS = 32
    };
    (void)device;
    *launch =
        (acr__launch){.grid = {(uint32_t)((p->q_len + ROWS - 1) / ROWS), (uint32_t)p->q_heads, (uint32_t)p->batch},
                      .block = ROWS * WARP_THREADS};
}

#define SOFTMAX(image_name)                                                                                            \
    {                                                                                                                  \
        .name = #image_name, .family = "softmax", .backend = ACR__CUDA, .image = acr__image_##image_name,              \
        .image_end = acr__image_end_##image_name, .symbol = #image_name, .arch_min = 80, .arch_max = 999,              \
        .shape = softmax_shape                                                                                         \
    }
static const acr__kernel softmax_f16[] = {SOFTMAX(softmax_f16_sm80), SOFTMAX(softmax_f16_f32_sm80)};
static const acr__kernel softmax_bf16[] = {SOFTMAX(softmax_bf16_sm80), SOFTMAX(softmax_bf16_f32_sm80)};

/* ---- State ---- */

enum {
    PEER_COUNT = 2, /* scores in the input type, in float32 */
    WORKSPACE_BYTES = 32 << 20
};

/* Inputs and output on the device. */
typedef struct buffer_set {
    void *q, *k, *v, *o;
} buffer_set;

static struct {
    cublas_library library;
    cublas_handle handle;
    void *workspace; /* of the library: its own could not be captured */
    void *stream;    /* that the handle has */
    bool has_stream;
    char version[64];
    acr__backend_device *device;
    acr_problem problem; /* canonical; of begin */
    size_t q_bytes, k_bytes, v_bytes, o_bytes;
    buffer_set *sets;
    int set_count, last_set;
    void *scores, *weights; /* scores serve as weights where both have the input type */
    acr__prepared *softmax[PEER_COUNT];
} state;

/* ---- Opening ---- */

static acr_status check(int result, const char *what)
{
    return result == CUBLAS_OK ? ACR_OK : acr__fail(ACR_UNSUPPORTED, "%s failed with cuBLAS status %d", what, result);
}

static bool find_entries(cublas_library *l, const char **missing)
{
    const struct {
        const char *name;
        void *entry;
    } entries[] = {
        {"cublasCreate_v2", &l->create},
        {"cublasDestroy_v2", &l->destroy},
        {"cublasGetVersion_v2", &l->version},
        {"cublasSetStream_v2", &l->set_stream},
        {"cublasSetWorkspace_v2", &l->set_workspace},
        {"cublasGemmStridedBatchedEx", &l->gemm},
    };
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; ++i) {
        void *symbol = dlsym(l->handle, entries[i].name);
        if (!symbol) {
            *missing = entries[i].name;
            return false;
        }
        memcpy(entries[i].entry, &symbol, sizeof symbol); /* ISO C has no cast from void * to a function pointer */
    }
    return true;
}

/* One place where the library may be; what is wrong with it is added to `tried`. */
static bool load_from(cublas_library *l, const char *path, char *tried, size_t capacity)
{
    const size_t length = strlen(tried);
    const char *missing = NULL;
    /* It stays for ever: it has state of its own in the driver. */
    l->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (l->handle && find_entries(l, &missing)) {
        return true;
    }
    if (l->handle) {
        snprintf(tried + length, capacity - length, "%s%s lacks %s", length ? "; " : "", path, missing);
    } else {
        const char *reason = dlerror();
        snprintf(tried + length, capacity - length, "%s%s", length ? "; " : "", reason ? reason : path);
    }
    return false;
}

static acr_status load_library(cublas_library *l)
{
    static const char *const usual[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so",
                                        "/usr/local/cuda/lib64/libcublas.so"};
    const char *named = getenv("ACROMION_CUBLAS");
    char tried[800] = "";
    if (named && *named) {
        return load_from(l, named, tried, sizeof tried) ? ACR_OK : acr__fail(ACR_UNSUPPORTED, "no cuBLAS: %s", tried);
    }
    for (size_t i = 0; i < sizeof usual / sizeof usual[0]; ++i) {
        if (load_from(l, usual[i], tried, sizeof tried)) {
            return ACR_OK;
        }
    }
    return acr__fail(ACR_UNSUPPORTED, "no cuBLAS: %s", tried);
}

/* With the device's context current. */
static acr_status make_handle(void *arg, void *stream)
{
    int version = 0;
    (void)arg;
    (void)stream;
    acr_status status = check(state.library.create(&state.handle), "cublasCreate");
    if (status == ACR_OK) {
        status = check(state.library.version(state.handle, &version), "cublasGetVersion");
    }
    snprintf(state.version, sizeof state.version, "cuBLAS %d.%d.%d", version / 10000, version / 100 % 100,
             version % 100);
    return status;
}

static acr_status drop_handle(void *arg, void *stream)
{
    (void)arg;
    (void)stream;
    return check(state.library.destroy(state.handle), "cublasDestroy");
}

/* ---- One problem ---- */

static int32_t refuse(char *text)
{
    snprintf(text, PEER_TEXT_BYTES, "%s", acr_last_error());
    return -1;
}

static void end(void)
{
    const acr__backend *backend = state.device->backend;
    backend->synchronize(state.device);
    for (int i = 0; i < state.set_count; ++i) {
        void *const memory[] = {state.sets[i].q, state.sets[i].k, state.sets[i].v, state.sets[i].o};
        for (size_t j = 0; j < sizeof memory / sizeof memory[0]; ++j) {
            backend->mem_free(state.device, memory[j]);
        }
    }
    free(state.sets);
    backend->mem_free(state.device, state.scores);
    backend->mem_free(state.device, state.weights);
    for (int i = 0; i < PEER_COUNT; ++i) {
        if (state.softmax[i]) {
            backend->release(state.softmax[i]);
        }
        state.softmax[i] = NULL;
    }
    state.sets = NULL;
    state.set_count = 0;
    state.scores = state.weights = NULL;
}

static acr_status describe(const peer_problem *given)
{
    acr_problem p = ACR_PROBLEM_INIT;
    p.dtype = (acr_dtype)given->dtype;
    p.mask = given->mask == PEER_MASK_NONE       ? ACR_MASK_NONE
             : given->mask == PEER_MASK_TOP_LEFT ? ACR_MASK_CAUSAL_TOP_LEFT
                                                 : ACR_MASK_CAUSAL;
    p.layout = ACR_BHSD;
    p.batch = given->batch;
    p.q_heads = given->q_heads;
    p.kv_heads = given->kv_heads;
    p.q_len = given->q_len;
    p.kv_len = given->kv_len;
    p.qk_dim = given->qk_dim;
    p.v_dim = given->v_dim;
    p.scale = (float)given->scale;
    return acr_problem_canonical(&state.problem, &p);
}

static double score_count(const acr_problem *p)
{
    return (double)p->batch * (double)p->q_heads * (double)p->q_len * (double)p->kv_len;
}

/* Why the baseline does not serve a problem. */
static acr_status refuse_problem(const peer_problem *given, const acr_problem *p)
{
    enum {
        GRID_MAX = 65535
    };
    if (p->dtype != ACR_F16 && p->dtype != ACR_BF16) {
        return acr__fail(ACR_UNSUPPORTED, "the baseline is for f16 and bf16");
    }
    if (peer_has_features(given)) {
        return acr__fail(ACR_UNSUPPORTED, "the baseline has no windows, softcaps, sinks or biases");
    }
    if (given->bshd) {
        return acr__fail(ACR_UNSUPPORTED, "the baseline is for the layout bhsd");
    }
    if (p->q_heads > GRID_MAX || p->batch > GRID_MAX) {
        return acr__fail(ACR_UNSUPPORTED, "batch or heads exceed %d", GRID_MAX);
    }
    const double bytes = score_count(p) * (sizeof(float) + 2);
    if (bytes > 0.5 * (double)state.device->device.mem_bytes) {
        return acr__fail(ACR_UNSUPPORTED, "scores and weights need %.3g GiB, more than half of the memory",
                         bytes / 0x1p30);
    }
    return ACR_OK;
}

static acr_status make_input(void **out, const void *from, size_t bytes)
{
    acr_status status = state.device->backend->mem_alloc(state.device, bytes, out);
    return status == ACR_OK ? state.device->backend->mem_upload(state.device, *out, from, bytes) : status;
}

static acr_status make_set(buffer_set *set, const peer_problem *given)
{
    const acr__backend *backend = state.device->backend;
    acr_status status = make_input(&set->q, given->q, state.q_bytes);
    if (status == ACR_OK) {
        status = make_input(&set->k, given->k, state.k_bytes);
    }
    if (status == ACR_OK) {
        status = make_input(&set->v, given->v, state.v_bytes);
    }
    if (status == ACR_OK) {
        status = backend->mem_alloc(state.device, state.o_bytes, &set->o);
    }
    return status == ACR_OK ? backend->mem_fill(state.device, set->o, 0xff, state.o_bytes) : status;
}

static acr_status make_all(const peer_problem *given)
{
    const acr__backend *backend = state.device->backend;
    const acr_problem *p = &state.problem;
    const size_t elem_bytes = (size_t)acr__dtype_bytes(p->dtype);
    state.q_bytes = (size_t)(p->batch * p->q_heads * p->q_len * p->qk_dim) * elem_bytes;
    state.k_bytes = (size_t)(p->batch * p->kv_heads * p->kv_len * p->qk_dim) * elem_bytes;
    state.v_bytes = (size_t)(p->batch * p->kv_heads * p->kv_len * p->v_dim) * elem_bytes;
    state.o_bytes = (size_t)(p->batch * p->q_heads * p->q_len * p->v_dim) * elem_bytes;
    state.sets = calloc((size_t)given->sets, sizeof *state.sets);
    if (!state.sets) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %d sets of buffers", (int)given->sets);
    }
    state.set_count = given->sets;
    acr_status status = ACR_OK;
    for (int i = 0; i < state.set_count && status == ACR_OK; ++i) {
        status = make_set(&state.sets[i], given);
    }
    if (status == ACR_OK) {
        status = backend->mem_alloc(state.device, (size_t)score_count(p) * sizeof(float), &state.scores);
    }
    if (status == ACR_OK) {
        status = backend->mem_alloc(state.device, (size_t)score_count(p) * elem_bytes, &state.weights);
    }
    const acr__kernel *kernels = p->dtype == ACR_BF16 ? softmax_bf16 : softmax_f16;
    for (int i = 0; i < PEER_COUNT && status == ACR_OK; ++i) {
        status = backend->prepare(&state.softmax[i], state.device, &kernels[i], p);
    }
    return status;
}

static int32_t begin(const peer_problem *given, char *text)
{
    acr_status status = describe(given);
    if (status == ACR_OK) {
        status = refuse_problem(given, &state.problem);
    }
    if (status == ACR_OK) {
        status = make_all(given);
    }
    return status == ACR_OK ? 0 : refuse(text);
}

/* ---- One call ---- */

typedef struct one_call {
    int32_t peer, set;
    void *stream;
} one_call;

static acr_status use_stream(void *stream)
{
    if (state.has_stream && state.stream == stream) {
        return ACR_OK;
    }
    acr_status status = check(state.library.set_stream(state.handle, stream), "cublasSetStream");
    if (status == ACR_OK) { /* a new stream takes the workspace away */
        status =
            check(state.library.set_workspace(state.handle, state.workspace, WORKSPACE_BYTES), "cublasSetWorkspace");
    }
    state.has_stream = status == ACR_OK;
    state.stream = stream;
    return status;
}

/* A matrix in memory: elements of consecutive rows, and from one head's matrix to the next. */
typedef struct matrix {
    void *base;
    int type, row_elems;
    long long step_elems;
} matrix;

/* cuBLAS thinks in columns: what is a row here is a column there, so c = a b is asked for as c' = b' a', and b or a are
 * given as they lie in memory. Query heads that share keys are rows of one product. */
static acr_status multiply(const matrix *c, const matrix *a, const matrix *b, bool b_transposed, int rows, int columns,
                           int inner, float factor)
{
    const acr_problem *p = &state.problem;
    const float zero = 0;
    return check(state.library.gemm(state.handle, b_transposed ? CUBLAS_TRANSPOSED : CUBLAS_PLAIN, CUBLAS_PLAIN,
                                    columns, rows, inner, &factor, b->base, b->type, b->row_elems, b->step_elems,
                                    a->base, a->type, a->row_elems, a->step_elems, &zero, c->base, c->type,
                                    c->row_elems, c->step_elems, (int)(p->batch * p->kv_heads), CUBLAS_COMPUTE_32F,
                                    CUBLAS_ALGO_DEFAULT),
                 "cublasGemmStridedBatchedEx");
}

static acr_status softmax(const one_call *call, void *scores, void *weights)
{
    const acr_buffers buffers = {.q = scores, .o = weights};
    fwd_args args;
    acr__fwd_args(&args, &state.problem, &buffers, NULL);
    return state.device->backend->launch(state.softmax[call->peer], &args, 0, call->stream);
}

/* With the device's context current. */
static acr_status enqueue_all(void *arg, void *ignored)
{
    const one_call *call = arg;
    const buffer_set *set = &state.sets[call->set];
    const acr_problem *p = &state.problem;
    const bool wide = call->peer == 1;
    const int type = p->dtype == ACR_BF16 ? CUBLAS_R16BF : CUBLAS_R16F;
    const int rows = (int)(p->q_heads / p->kv_heads * p->q_len), keys = (int)p->kv_len;
    const int dim = (int)p->qk_dim, v_dim = (int)p->v_dim;
    void *const weights = wide ? state.weights : state.scores;
    const matrix q = {set->q, type, dim, (long long)rows * dim};
    const matrix k = {set->k, type, dim, (long long)keys * dim};
    const matrix v = {set->v, type, v_dim, (long long)keys * v_dim};
    const matrix o = {set->o, type, v_dim, (long long)rows * v_dim};
    const matrix s = {state.scores, wide ? CUBLAS_R32F : type, keys, (long long)rows * keys};
    const matrix w = {weights, type, keys, (long long)rows * keys};
    (void)ignored;
    acr_status status = use_stream(call->stream);
    if (status == ACR_OK) {
        status = multiply(&s, &q, &k, true, rows, keys, dim, p->scale);
    }
    if (status == ACR_OK) {
        status = softmax(call, state.scores, weights);
    }
    return status == ACR_OK ? multiply(&o, &w, &v, false, rows, v_dim, keys, 1) : status;
}

static int32_t enqueue(int32_t peer, int32_t set, void *stream, char *text)
{
    one_call call = {peer, set, stream};
    state.last_set = set;
    return state.device->backend->timing->within(state.device, enqueue_all, &call) == ACR_OK ? 0 : refuse(text);
}

static int32_t output(int32_t peer, void *packed, int64_t bytes, char *text)
{
    (void)peer;
    acr_status status = state.device->backend->synchronize(state.device);
    if (status == ACR_OK && bytes != (int64_t)state.o_bytes) {
        status = acr__fail(ACR_INVALID, "the output has %zu bytes, not %lld", state.o_bytes, (long long)bytes);
    }
    if (status == ACR_OK) {
        status = state.device->backend->mem_download(state.device, packed, state.sets[state.last_set].o, state.o_bytes);
    }
    return status == ACR_OK ? 0 : refuse(text);
}

/* ---- The provider ---- */

acr_status cublas_open(const peer_provider **out, acr_ctx *ctx)
{
    static const char *const names[PEER_COUNT] = {"cublas-unfused", "cublas-unfused-f32"};
    static const peer_provider provider = {
        .provider_bytes = (int32_t)sizeof(peer_provider),
        .problem_bytes = (int32_t)sizeof(peer_problem),
        .count = PEER_COUNT,
        .names = names,
        .version = state.version,
        .begin = begin,
        .output = output,
        .end = end,
        .enqueue = enqueue,
    };
    state.device = acr__ctx_backend_device(ctx);
    acr_status status = load_library(&state.library);
    if (status == ACR_OK) {
        status = state.device->backend->mem_alloc(state.device, WORKSPACE_BYTES, &state.workspace);
    }
    if (status == ACR_OK) {
        status = state.device->backend->timing->within(state.device, make_handle, NULL);
    }
    if (status != ACR_OK) {
        cublas_close();
        return status;
    }
    *out = &provider;
    return ACR_OK;
}

void cublas_close(void)
{
    if (!state.device) {
        return;
    }
    if (state.handle) {
        state.device->backend->timing->within(state.device, drop_handle, NULL);
    }
    state.device->backend->mem_free(state.device, state.workspace);
    state.handle = NULL;
    state.workspace = NULL;
    state.device = NULL;
    state.has_stream = false;
}
