/* A backward image by itself, on a GPU or in the PTX machine: launched by hand, compared with gradients in float64, run
 * twice for equal bits, and timed.
 *
 *     backward IMAGE NAME [key=value ...]
 * keys: b h g (query heads of a key head) s t (query and key length) d; causal=1 (top-left) or 2 (bottom-right); left,
 * right (windows); cap; bf16; lens=1 (key lengths); packed=1; f32=1 (gradients in float32); atomics=1; q_tile; kv_tile; smem;
 * time=N (a graph of N launches, no comparison), seed. Exit code 0 = all gradients agree. */
#include <cuda.h>
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda/kernels/bwd_wgmma/workspace.h"

typedef struct fwd_map {
    uint64_t opaque[16];
} __attribute__((aligned(128))) fwd_map;

typedef struct fwd_maps {
    fwd_map q, k, v, o;
} fwd_maps;

enum {
    HELPER_THREADS = 256,
    FINISH_THREADS = 128,
    MAIN_THREADS = 384
};

typedef struct options {
    int b, h, g, s, t, d, causal, left, right, bf16, lens, packed, f32, atomics, q_tile, kv_tile, smem, time, seed;
    double cap;
} options;

static void *driver_library;
static CUstream stream;

static void *find_entry(const char *name)
{
    const union {
        void *found;
        CUresult (*call)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
    } get = {dlsym(driver_library, "cuGetProcAddress_v2")};
    void *entry = NULL;
    CUdriverProcAddressQueryResult why;
    return get.found && get.call(name, &entry, CUDA_VERSION, 0, &why) == CUDA_SUCCESS ? entry : NULL;
}

#define CALL(name, ...)                                                                                                \
    do {                                                                                                               \
        typeof(&name) call = (typeof(&name))find_entry(#name);                                                         \
        CUresult result_ = call ? call(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;                                            \
        if (result_ != CUDA_SUCCESS) {                                                                                 \
            fprintf(stderr, "%s:%d: %s: error %d\n", __FILE__, __LINE__, #name, (int)result_);                         \
            exit(2);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* ---- Numbers ---- */

static uint64_t random_state;

static double random_normal(void)
{
    double sum = 0;
    for (int i = 0; i < 4; i++) {
        random_state = random_state * 6364136223846793005u + 1442695040888963407u;
        sum += (double)(random_state >> 40) / 16777216.0 - 0.5;
    }
    return sum * 1.7320508;
}

static uint16_t to_16(double x, int bf16)
{
    uint16_t bits;
    if (bf16) {
        const float f = (float)x;
        uint32_t u;
        memcpy(&u, &f, 4);
        return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
    }
    const _Float16 h = (_Float16)x;
    memcpy(&bits, &h, 2);
    return bits;
}

static double from_16(uint16_t bits, int bf16)
{
    if (bf16) {
        const uint32_t u = (uint32_t)bits << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    _Float16 h;
    memcpy(&h, &bits, 2);
    return (double)h;
}

/* ---- Tensors: [rows of all entries][heads][dim], packed in this order; an entry's rows are consecutive. ---- */

typedef struct tensor {
    size_t elems;
    double *values;
    uint16_t *bits;
    CUdeviceptr device;
} tensor;

static CUdeviceptr device_alloc(size_t bytes)
{
    CUdeviceptr p;
    CALL(cuMemAlloc, &p, bytes ? bytes : 16);
    return p;
}

static void upload(CUdeviceptr to, const void *from, size_t bytes)
{
    CALL(cuMemcpyHtoDAsync, to, from, bytes, stream);
    CALL(cuStreamSynchronize, stream);
}

static tensor make_tensor(size_t elems, int bf16, int is_input, double scale)
{
    tensor t = {elems, calloc(elems, sizeof(double)), calloc(elems, 2), device_alloc(elems * 2)};
    for (size_t i = 0; i < elems && is_input; i++) {
        t.bits[i] = to_16(random_normal() * scale, bf16);
        t.values[i] = from_16(t.bits[i], bf16);
    }
    if (is_input)
        upload(t.device, t.bits, elems * 2);
    return t;
}

static void *pointer(CUdeviceptr p)
{
    return (void *)(uintptr_t)p;
}

/* ---- The reference ---- */

static int is_visible(const options *o, int row, int key, int q_len, int kv_len)
{
    const long position = row + (o->causal == 1 ? 0 : kv_len - q_len);
    return key < kv_len && !(o->causal && key > position) && !(o->left && key <= position - o->left) &&
           !(o->right && key > position + o->right);
}

typedef struct reference {
    tensor *q, *k, *v, *out, *d_o;
    double *dq, *dk, *dv;
    float *lse;
} reference;

/* One head of an entry; strides in elements of a row. Gradients are added to, or with `forward` o and lse are made. */
static void reference_head(const options *o, const reference *r, int head, int q_first, int q_len, int k_first,
                           int kv_len, size_t lse_at, int forward)
{
    const size_t q_row = (size_t)o->h * o->d, k_row = (size_t)(o->h / o->g) * o->d;
    const size_t q_at = q_first * q_row + (size_t)head * o->d, k_at = k_first * k_row + (size_t)(head / o->g) * o->d;
    const double scale = 1 / sqrt(o->d);
    double *p = malloc(sizeof(double) * (size_t)(kv_len + 1)), *slope = malloc(sizeof(double) * (size_t)(kv_len + 1));
    for (int i = 0; i < q_len; i++) {
        const double *q = r->q->values + q_at + (size_t)i * q_row;
        double max = -INFINITY, sum = 0;
        for (int j = 0; j < kv_len; j++) {
            const double *k = r->k->values + k_at + (size_t)j * k_row;
            double s = 0;
            for (int x = 0; x < o->d; x++)
                s += q[x] * k[x];
            s *= scale;
            slope[j] = 1;
            if (o->cap > 0) {
                const double t = tanh(s / o->cap);
                slope[j] = 1 - t * t;
                s = o->cap * t;
            }
            p[j] = is_visible(o, i, j, q_len, kv_len) ? s : -INFINITY;
            max = p[j] > max ? p[j] : max;
        }
        if (max == -INFINITY) {
            if (forward)
                r->lse[lse_at + (size_t)i] = -INFINITY;
            continue;
        }
        for (int j = 0; j < kv_len; j++)
            sum += p[j] = exp(p[j] - max);
        if (forward)
            r->lse[lse_at + (size_t)i] = (float)(max + log(sum));
        double out[512] = {0}, d = 0;
        for (int j = 0; j < kv_len; j++) {
            p[j] /= sum;
            for (int x = 0; x < o->d; x++)
                out[x] += p[j] * r->v->values[k_at + (size_t)j * k_row + (size_t)x];
        }
        const size_t row = q_at + (size_t)i * q_row;
        for (int x = 0; x < o->d; x++) {
            if (forward)
                r->out->values[row + (size_t)x] = out[x];
            d += out[x] * r->d_o->values[row + (size_t)x];
        }
        for (int j = 0; j < kv_len && !forward; j++) {
            const size_t key = k_at + (size_t)j * k_row;
            double dp = 0;
            if (p[j] == 0)
                continue;
            for (int x = 0; x < o->d; x++)
                dp += r->d_o->values[row + (size_t)x] * r->v->values[key + (size_t)x];
            const double ds = p[j] * (dp - d) * scale * slope[j];
            for (int x = 0; x < o->d; x++) {
                r->dv[key + (size_t)x] += p[j] * r->d_o->values[row + (size_t)x];
                r->dk[key + (size_t)x] += ds * q[x];
                r->dq[row + (size_t)x] += ds * r->k->values[key + (size_t)x];
            }
        }
    }
    free(p);
    free(slope);
}

/* ---- Comparison ---- */

static int compare(const char *name, const void *got, const double *want, size_t elems, const options *o)
{
    double error = 0, norm = 0, worst = 0;
    size_t bad = 0;
    for (size_t i = 0; i < elems; i++) {
        const double x = o->f32 ? (double)((const float *)got)[i] : from_16(((const uint16_t *)got)[i], o->bf16);
        if (!isfinite(x)) {
            bad++;
            continue;
        }
        error += (x - want[i]) * (x - want[i]);
        norm += want[i] * want[i];
        worst = fmax(worst, fabs(x - want[i]));
    }
    const double relative = sqrt(error / (norm > 0 ? norm : 1)), size = sqrt(norm / (double)elems);
    const int fails =
        bad > 0 || !(relative <= (o->bf16 ? 8e-3 : 1.2e-3)) || !(worst <= (o->bf16 ? 0.15 : 0.02) * (size + 0.1));
    printf("  %s: relative %.2e, worst %.2e of rms %.2e%s", name, relative, worst, size, fails ? " FAILS" : "");
    if (bad)
        printf(" (%zu not finite)", bad);
    printf("\n");
    return fails;
}

/* ---- Main ---- */

static fwd_map encode(CUdeviceptr base, int d, int heads, int rows, int batch, int box_rows, int bf16)
{
    union {
        CUtensorMap cu;
        fwd_map map;
    } m;
    const cuuint64_t extents[4] = {(cuuint64_t)d, (cuuint64_t)rows, (cuuint64_t)heads, (cuuint64_t)batch};
    const cuuint64_t row = (cuuint64_t)heads * (cuuint64_t)d * 2,
                     strides[3] = {row, (cuuint64_t)d * 2, row * (cuuint64_t)rows};
    const cuuint32_t box[4] = {64, (cuuint32_t)box_rows, 1, 1}, ones[4] = {1, 1, 1, 1};
    CALL(cuTensorMapEncodeTiled, &m.cu, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
         pointer(base), extents, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return m.map;
}

int main(int argc, char **argv)
{
    options o = {.b = 1, .h = 1, .g = 1, .s = 64, .t = 128, .d = 64, .kv_tile = 128, .seed = 1};
    const struct {
        const char *name;
        int *to;
    } keys[] = {{"b", &o.b},           {"h", &o.h},
                {"g", &o.g},           {"s", &o.s},
                {"t", &o.t},           {"d", &o.d},
                {"causal", &o.causal}, {"left", &o.left},
                {"right", &o.right},   {"bf16", &o.bf16},
                {"lens", &o.lens},     {"packed", &o.packed},
                {"f32", &o.f32},       {"atomics", &o.atomics},
                {"q_tile", &o.q_tile}, {"kv_tile", &o.kv_tile},
                {"smem", &o.smem},     {"time", &o.time},
                {"seed", &o.seed}};
    if (argc < 3)
        return fprintf(stderr, "usage: backward IMAGE NAME [key=value ...]\n"), 2;
    for (int i = 3; i < argc; i++) {
        const char *equals = strchr(argv[i], '=');
        bool known = false;
        for (size_t n = 0; equals && n < sizeof keys / sizeof keys[0]; n++)
            if (strlen(keys[n].name) == (size_t)(equals - argv[i]) &&
                !strncmp(argv[i], keys[n].name, (size_t)(equals - argv[i])))
                *keys[n].to = atoi(equals + 1), known = true;
        if (equals && !strncmp(argv[i], "cap=", 4))
            o.cap = atof(equals + 1), known = true;
        if (!known)
            return fprintf(stderr, "unknown: %s\n", argv[i]), 2;
    }
    if (!o.q_tile)
        o.q_tile = o.d <= 64 ? 128 : 64;
    random_state = (uint64_t)o.seed * 77777;
    driver_library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver_library)
        return fprintf(stderr, "%s\n", dlerror()), 2;
    CUdevice device;
    CUcontext context;
    int sms;
    CALL(cuInit, 0);
    CALL(cuDeviceGet, &device, 0);
    CALL(cuDevicePrimaryCtxRetain, &context, device);
    CALL(cuCtxPushCurrent, context);
    CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CALL(cuDeviceGetAttribute, &sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);

    /* the image */
    FILE *file = fopen(argv[1], "rb");
    if (!file)
        return perror(argv[1]), 2;
    fseek(file, 0, SEEK_END);
    const long image_bytes = ftell(file);
    rewind(file);
    char *image = calloc(1, (size_t)image_bytes + 1);
    if (fread(image, 1, (size_t)image_bytes, file) != (size_t)image_bytes)
        return 2;
    fclose(file);
    CUlibrary library;
    CUkernel kernels[3];
    const char *suffixes[3] = {"_prepare", "", "_finish"};
    CALL(cuLibraryLoadData, &library, image, NULL, NULL, 0, NULL, NULL, 0);
    for (int i = 0; i < 3; i++) {
        char name[256];
        snprintf(name, sizeof name, "%s%s", argv[2], suffixes[i]);
        CALL(cuLibraryGetKernel, &kernels[i], library, name);
    }

    /* inputs */
    const int hk = o.h / o.g, q_rows = o.b * o.s, k_rows = o.b * o.t;
    const size_t q_elems = (size_t)q_rows * o.h * o.d, k_elems = (size_t)k_rows * hk * o.d;
    tensor q = make_tensor(q_elems, o.bf16, 1, 1.0), k = make_tensor(k_elems, o.bf16, 1, 1.0),
           v = make_tensor(k_elems, o.bf16, 1, 1.0), d_o = make_tensor(q_elems, o.bf16, 1, 1.0),
           out = make_tensor(q_elems, o.bf16, 0, 0);
    int32_t *lens = calloc((size_t)o.b + 1, 4), *q_offsets = calloc((size_t)o.b + 1, 4),
            *kv_offsets = calloc((size_t)o.b + 1, 4);
    for (int i = 0; i < o.b; i++)
        lens[i] = o.lens ? (i % 3 == 2 ? 0 : o.t - (i * 37 + 5) % o.t) : o.t;
    /* packed: entries of different lengths, the longest of s and t */
    for (int i = 0; i < o.b; i++) {
        q_offsets[i + 1] = q_offsets[i] + (i == 0 ? o.s : (o.s * (i + 1) + 3) % (o.s + 1));
        kv_offsets[i + 1] = kv_offsets[i] + (i == 0 ? o.t : (o.t * (i + 2) + 5) % (o.t + 1));
    }
    const size_t lse_elems = (size_t)q_rows * o.h, grad_bytes = o.f32 ? 4 : 2;
    reference r = {
        &q, &k, &v, &out, &d_o, calloc(q_elems, 8), calloc(k_elems, 8), calloc(k_elems, 8), calloc(lse_elems, 4)};
    const int q_total = o.packed ? q_offsets[o.b] : 0, kv_total = o.packed ? kv_offsets[o.b] : 0;
    for (int pass = 0; pass < 2 && !o.time; pass++) {
        for (int b = 0; b < o.b; b++)
            for (int h = 0; h < o.h; h++) {
                const int q_first = o.packed ? q_offsets[b] : b * o.s, k_first = o.packed ? kv_offsets[b] : b * o.t;
                const int q_len = o.packed ? q_offsets[b + 1] - q_first : o.s,
                          kv_len = o.packed ? kv_offsets[b + 1] - k_first : lens[b];
                const size_t lse_at = o.packed ? (size_t)h * q_total + q_first : ((size_t)b * o.h + h) * o.s;
                reference_head(&o, &r, h, q_first, q_len, k_first, kv_len, lse_at, pass == 0);
            }
        for (size_t i = 0; i < q_elems && pass == 0; i++)
            out.values[i] = from_16(out.bits[i] = to_16(out.values[i], o.bf16), o.bf16);
    }
    if (o.lens || o.packed) /* what no key length reaches is NaN, and must not be looked at */
        for (int b = 0; b < (o.packed ? 1 : o.b); b++)
            for (size_t i = (size_t)(o.packed ? kv_total : b * o.t + lens[b]) * hk * o.d;
                 i < (o.packed ? k_elems : (size_t)(b + 1) * o.t * hk * o.d); i++)
                k.bits[i] = v.bits[i] = 0x7FFF;
    upload(k.device, k.bits, k_elems * 2);
    upload(v.device, v.bits, k_elems * 2);
    upload(out.device, out.bits, q_elems * 2);
    if (o.time)
        for (size_t i = 0; i < lse_elems; i++)
            r.lse[i] = logf((float)o.t) + 0.5f;
    CUdeviceptr lse = device_alloc(lse_elems * 4), lens_d = device_alloc(4 * (size_t)o.b + 4),
                qo_d = device_alloc(4 * (size_t)o.b + 4), ko_d = device_alloc(4 * (size_t)o.b + 4);
    upload(lse, r.lse, lse_elems * 4);
    upload(lens_d, lens, 4 * (size_t)o.b);
    upload(qo_d, q_offsets, 4 * (size_t)o.b + 4);
    upload(ko_d, kv_offsets, 4 * (size_t)o.b + 4);
    CUdeviceptr dq = device_alloc(q_elems * grad_bytes), dk = device_alloc(k_elems * grad_bytes),
                dv = device_alloc(k_elems * grad_bytes);

    /* arguments */
    const fwd_strides qs = {o.packed ? 0 : (int64_t)o.s * o.h * o.d, o.d, (int64_t)o.h * o.d},
                      ks = {o.packed ? 0 : (int64_t)o.t * hk * o.d, o.d, (int64_t)hk * o.d};
    const double scale = 1 / sqrt(o.d);
    bwd_args a;
    memset(&a, 0, sizeof a);
    a.fwd = (fwd_args){.q = pointer(q.device),
                       .k = pointer(k.device),
                       .v = pointer(v.device),
                       .o = pointer(out.device),
                       .lse = pointer(lse),
                       .kv_lens = o.lens ? pointer(lens_d) : NULL,
                       .q_offsets = o.packed ? pointer(qo_d) : NULL,
                       .kv_offsets = o.packed ? pointer(ko_d) : NULL,
                       .q_stride = qs,
                       .k_stride = ks,
                       .v_stride = ks,
                       .o_stride = qs,
                       .batch = o.b,
                       .q_heads = o.h,
                       .kv_heads = hk,
                       .group = o.g,
                       .q_len = o.s,
                       .kv_len = o.t,
                       .qk_dim = o.d,
                       .v_dim = o.d,
                       .mask = o.causal,
                       .window_left = o.left,
                       .window_right = o.right,
                       .scale = (float)scale,
                       .scale_log2 = (float)(scale * 1.4426950408889634),
                       .out_scale = 1,
                       .q_total = q_total,
                       .kv_total = kv_total};
    if (o.cap > 0) {
        a.fwd.softcap = (float)o.cap;
        a.fwd.softcap_in = (float)(scale / o.cap);
        a.fwd.softcap_out = (float)(o.cap * 1.4426950408889634);
    }
    a.d_o = pointer(d_o.device);
    a.dq = pointer(dq), a.dk = pointer(dk), a.dv = pointer(dv);
    a.d_o_stride = a.dq_stride = qs;
    a.dk_stride = a.dv_stride = ks;
    a.grad_f32 = o.f32;
    a.atomics = o.atomics;
    const bwd_workspace w = bwd_workspace_of(&a.fwd, o.q_tile, o.kv_tile, o.d <= 64 ? 64 : 128);
    CUdeviceptr workspace = device_alloc((size_t)w.bytes);
    a.fwd.workspace = pointer(workspace);
    const int map_batch = o.packed ? 1 : o.b, map_q = o.packed ? q_total : o.s, map_k = o.packed ? kv_total : o.t;
    fwd_maps maps = {encode(q.device, o.d, o.h, map_q, map_batch, o.q_tile, o.bf16),
                     encode(k.device, o.d, hk, map_k, map_batch, o.kv_tile, o.bf16),
                     encode(v.device, o.d, hk, map_k, map_batch, o.kv_tile, o.bf16),
                     encode(d_o.device, o.d, o.h, map_q, map_batch, o.q_tile, o.bf16)};
    if (!o.smem)
        o.smem = 200 * 1024;
    CALL(cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, o.smem, kernels[1], device);
    const unsigned tiles = (unsigned)((o.s + o.q_tile - 1) / o.q_tile);
    const long work = (long)((o.t + o.kv_tile - 1) / o.kv_tile) * hk * o.b;
    void *parameters[2] = {&a, &maps};
    CUlaunchAttribute overlap = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION};
    overlap.value.programmaticStreamSerializationAllowed = 1;
    const CUlaunchConfig configs[3] = {{.gridDimX = tiles,
                                        .gridDimY = (unsigned)o.h,
                                        .gridDimZ = (unsigned)o.b,
                                        .blockDimX = HELPER_THREADS,
                                        .blockDimY = 1,
                                        .blockDimZ = 1,
                                        .hStream = stream,
                                        .attrs = &overlap,
                                        .numAttrs = 1},
                                       {.gridDimX = (unsigned)(work < sms ? work : sms),
                                        .gridDimY = 1,
                                        .gridDimZ = 1,
                                        .blockDimX = MAIN_THREADS,
                                        .blockDimY = 1,
                                        .blockDimZ = 1,
                                        .sharedMemBytes = (unsigned)o.smem,
                                        .hStream = stream,
                                        .attrs = &overlap,
                                        .numAttrs = 1},
                                       {.gridDimX = 2 * tiles,
                                        .gridDimY = (unsigned)o.h,
                                        .gridDimZ = (unsigned)o.b,
                                        .blockDimX = FINISH_THREADS,
                                        .blockDimY = 1,
                                        .blockDimZ = 1,
                                        .hStream = stream,
                                        .attrs = &overlap,
                                        .numAttrs = 1}};

    if (o.time) {
        const double pairs = (double)o.s * o.t * (o.causal ? 0.5 : 1.0), flop = 10.0 * o.b * o.h * pairs * o.d;
        float ms[4];
        CUevent events[2];
        CALL(cuEventCreate, &events[0], CU_EVENT_DEFAULT);
        CALL(cuEventCreate, &events[1], CU_EVENT_DEFAULT);
        for (int which = 0; which < 4; which++) { /* all, then parts; the second wants the first, which resets it */
            const int count = which == 0 || which == 2 ? o.time : 20;
            CUgraph graph;
            CUgraphExec graph_exec;
            CALL(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
            for (int i = 0; i < count; i++)
                for (int n = 0; n < 3; n++)
                    if (which == 0 || n == which - 1 || (n == 0 && which == 2))
                        CALL(cuLaunchKernelEx, &configs[n], (CUfunction)kernels[n], parameters, NULL);
            CALL(cuStreamEndCapture, stream, &graph);
            CALL(cuGraphInstantiateWithFlags, &graph_exec, graph, 0);
            CALL(cuGraphLaunch, graph_exec, stream);
            CALL(cuEventRecord, events[0], stream);
            CALL(cuGraphLaunch, graph_exec, stream);
            CALL(cuEventRecord, events[1], stream);
            CALL(cuStreamSynchronize, stream);
            CALL(cuEventElapsedTime, &ms[which], events[0], events[1]);
            CALL(cuGraphExecDestroy, graph_exec);
            CALL(cuGraphDestroy, graph);
            ms[which] /= (float)count;
        }
        printf("%s b%d h%d/%d s%d/%d d%d causal%d atomics%d: %.2f us, %.1f TFLOP/s; prepare %.2f, prepare + main %.2f, "
               "finish %.2f us\n",
               argv[2], o.b, o.h, hk, o.s, o.t, o.d, o.causal, o.atomics, ms[0] * 1e3, flop / (ms[0] * 1e9),
               ms[1] * 1e3, ms[2] * 1e3, ms[3] * 1e3);
        return 0;
    }

    int failed = 0;
    char *got[2][3];
    CUdeviceptr outputs[3] = {dq, dk, dv};
    const size_t elems[3] = {q_elems, k_elems, k_elems};
    size_t noise_bytes = (size_t)w.bytes;
    for (int i = 0; i < 3; i++)
        noise_bytes = elems[i] * grad_bytes > noise_bytes ? elems[i] * grad_bytes : noise_bytes;
    void *noise = memset(malloc(noise_bytes), 0xFF, noise_bytes);
    for (int run = 0; run < 2; run++) {
        for (int i = 0; i < 3; i++)
            upload(outputs[i], noise, elems[i] * grad_bytes);
        upload(workspace, noise, (size_t)w.bytes);
        for (int i = 0; i < 3; i++)
            CALL(cuLaunchKernelEx, &configs[i], (CUfunction)kernels[i], parameters, NULL);
        CALL(cuStreamSynchronize, stream);
        for (int i = 0; i < 3; i++) {
            got[run][i] = calloc(elems[i], grad_bytes);
            CALL(cuMemcpyDtoHAsync, got[run][i], outputs[i], elems[i] * grad_bytes, stream);
            CALL(cuStreamSynchronize, stream);
        }
    }
    const size_t used[3] = {o.packed ? (size_t)q_total * o.h * o.d : q_elems,
                            o.packed ? (size_t)kv_total * hk * o.d : k_elems,
                            o.packed ? (size_t)kv_total * hk * o.d : k_elems};
    const char *names[3] = {"dq", "dk", "dv"};
    const double *want[3] = {r.dq, r.dk, r.dv};
    for (int i = 0; i < 3; i++) {
        failed += compare(names[i], got[0][i], want[i], used[i], &o);
        if (!o.atomics && memcmp(got[0][i], got[1][i], elems[i] * grad_bytes)) {
            printf("  %s: two runs differ\n", names[i]);
            failed++;
        }
    }
    printf("%s", failed ? "FAILED:" : "ok:");
    for (int i = 2; i < argc; i++)
        printf(" %s", argv[i]);
    printf("\n");
    return failed != 0;
}
