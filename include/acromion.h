/* acromion: fused scaled-dot-product attention for NVIDIA GPUs and for CPUs, as a small C11 library.
 *
 *     O = softmax(scale * Q * transpose(K) + mask) * V          (per batch and head; softmax over the keys)
 *
 * Describe a problem, make a plan, execute it:
 *
 *     acr_ctx *ctx;    acr_ctx_create(&ctx, NULL);
 *     acr_problem p = ACR_PROBLEM_INIT;   p.batch = 2; p.q_heads = 8; p.q_len = 512; p.kv_len = 512; p.qk_dim = 64;
 *     acr_plan *plan;  acr_plan_create(&plan, ctx, &p, ACR_ESTIMATE);
 *     acr_buffers b = ACR_BUFFERS_INIT;   b.q = q; b.k = k; b.v = v; b.o = o;
 *     acr_execute(plan, &b, workspace, acr_plan_workspace(plan), stream);
 *
 * or, in one call with a cached plan, acr_forward(ctx, &p, &b, stream).
 *
 * Rules that hold for every function here:
 *  - A function that can fail returns an acr_status; 0 is success. acr_last_error() then tells the detail: which field,
 *    which value, which limit. An output argument is written only on success.
 *  - Nothing is chosen silently. What cannot run is refused with a reason; acr_plan_text() says what runs and why.
 *  - The library never keeps a tensor pointer beyond the call that was given it.
 *  - Sizes, strides and offsets are 64-bit. Strides count elements, the last dimension is always contiguous.
 *  - A context, and a plan, may be used by several threads at once. Destroying one must not race with its use.
 *  - In a child process of fork a "cpu" context still works and can be destroyed, on the calling thread alone, provided
 *    that no other thread was inside a call with it when the process forked. A "cuda" context is of no use there: CUDA
 *    itself does not outlive a fork. Create a new one after exec.
 *  - The library stays loaded after dlclose, since the threads of a context run its code.
 *  - No CUDA header is needed: a stream travels as a void pointer.
 *  - Structures begin with their size, so that later versions can append fields: initialise them with the macros.
 */
#ifndef ACROMION_H
#define ACROMION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined _WIN32
#define ACR_API
#else
#define ACR_API __attribute__((visibility("default")))
#endif

/* ---- Version ----------------------------------------------------------------------------------------------------- */

#define ACR_VERSION_MAJOR 0
#define ACR_VERSION_MINOR 1
#define ACR_VERSION_PATCH 0

/* The version of the library that is loaded, as "major.minor.patch"; a static string. Compare it with the macros above,
 * which are the version of the header that was compiled against. */
ACR_API const char *acr_version(void);

/* ---- Status ------------------------------------------------------------------------------------------------------ */

/* name, number, text. A number never changes its meaning and is never reused. */
#define ACR_STATUS_LIST(X)                                                                                             \
    X(OK, 0, "success")                                                                                                \
    X(INVALID, -1, "invalid argument")                                                                                 \
    X(UNSUPPORTED, -2, "no kernel can run this")                                                                       \
    X(NO_DEVICE, -3, "no such device, or its driver is missing or too old")                                            \
    X(NO_MEMORY, -4, "out of memory")                                                                                  \
    X(NO_WISDOM, -5, "no wisdom for this problem")                                                                     \
    X(WORKSPACE, -6, "workspace missing, too small or misaligned")                                                     \
    X(IO, -7, "a file could not be read or written")                                                                   \
    X(FORMAT, -8, "malformed text or file")                                                                            \
    X(ALIGNMENT, -9, "a pointer is less aligned than the problem says")                                                \
    X(DEVICE_FAULT, -10, "the device or its driver reported an error")                                                 \
    X(OVERLAP, -11, "the output overlaps an input")                                                                    \
    X(PEER, -12, "another rank failed or has other arguments")                                                         \
    X(TIMEOUT, -13, "another rank did not answer in time")

typedef enum acr_status {
#define ACR_STATUS_ENUM(name, number, text) ACR_##name = number,
    ACR_STATUS_LIST(ACR_STATUS_ENUM)
#undef ACR_STATUS_ENUM
} acr_status;

/* One sentence for a status; for a number that is no status, "unknown status". Static string, never NULL. */
ACR_API const char *acr_status_text(acr_status status);

/* The detail of the last call on this thread that did not return ACR_OK, or of an acr_ctx_create that took the CPU: why
 * no GPU. "" before the first. Valid until the next such call on this thread. Never NULL. */
ACR_API const char *acr_last_error(void);

/* ---- Context ----------------------------------------------------------------------------------------------------- */

typedef struct acr_ctx acr_ctx; /* one device, its kernels, its wisdom, its cached plans; there are no globals */

/* One piece of parallel work: run it for an index. */
typedef void (*acr_task)(void *task_arg, size_t index);

/* Calls task(task_arg, i) exactly once for every i in [0, count), from any threads, in any order, perhaps one after
 * another, and returns when all have returned. count never exceeds the context's thread count. */
typedef void (*acr_parallel_for)(void *user, size_t count, acr_task task, void *task_arg);

typedef struct acr_ctx_options {
    uint32_t size;                 /* sizeof(acr_ctx_options) */
    int32_t device;                /* "cuda": device ordinal, 0-based; "cpu": must be 0 */
    const char *backend;           /* "cuda", "cpu", or NULL: cuda where a usable device exists, else cpu */
    uint32_t threads;              /* "cpu": threads, the caller's included; 0 = all this process may run on; <= 1024 */
    uint32_t reserved;             /* 0 */
    acr_parallel_for parallel_for; /* "cpu": the caller's own thread pool; NULL = the context makes one of `threads` */
    void *parallel_user;           /* handed to parallel_for */
} acr_ctx_options;

#define ACR_CTX_OPTIONS_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(acr_ctx_options), 0, NULL, 0, 0, NULL, NULL                                                             \
    }

/* Opens a device. options may be NULL: the default backend, device 0.
 * The cuda backend needs driver R580 (CUDA 13.0) or newer, loads it with dlopen, and retains the device's primary
 * context, to which every stream and pointer given later must belong. On "cpu" streams are ignored and calls return
 * when done.
 * The caller frees *out with acr_ctx_destroy.
 * Errors: ACR_INVALID (options), ACR_NO_DEVICE (the loader's or driver's text in acr_last_error), ACR_NO_MEMORY. */
ACR_API acr_status acr_ctx_create(acr_ctx **out, const acr_ctx_options *options);

/* Frees a context. Plans made from it stay valid: each holds its context, and the last to go frees it. NULL is a
 * no-op. */
ACR_API void acr_ctx_destroy(acr_ctx *ctx);

/* The backend's name ("cuda" or "cpu") and one line about the device; "" for NULL. Strings live as long as ctx. */
ACR_API const char *acr_ctx_backend(const acr_ctx *ctx);
ACR_API const char *acr_ctx_device(const acr_ctx *ctx);

/* ---- Problem ----------------------------------------------------------------------------------------------------- */

typedef enum acr_pass {
    ACR_FORWARD = 0,
    ACR_BACKWARD = 1 /* gradients: q, k, v, o, lse and d_o are read, dq, dk and dv written. Of the same fields as the
                        forward pass whose o and lse these are; not of ACR_E4M3 */
} acr_pass;

typedef enum acr_dtype {
    ACR_DTYPE_DEFAULT = 0, /* out_dtype only: the input's type; for ACR_E4M3 ACR_F16 */
    ACR_F32 = 1,           /* IEEE binary32 */
    ACR_F16 = 2,           /* IEEE binary16 */
    ACR_BF16 = 3,          /* bfloat16: the upper half of a binary32 */
    ACR_E4M3 = 4,          /* 8-bit float, 4 exponent and 3 mantissa bits, no infinities (OCP FP8 E4M3) */
    ACR_BOOL8 = 5          /* bias_dtype only: one byte an element, 0 = false */
} acr_dtype;

/* Which keys a query row sees: key j is visible to query row i when j <= i + diagonal (and j < the batch's key
 * length). i + diagonal is the row's position; without a mask the diagonal is that of ACR_MASK_CAUSAL. What hides more,
 * or lets more be seen, is under acr_problem. */
typedef enum acr_mask {
    ACR_MASK_NONE = 0,
    ACR_MASK_CAUSAL = 1,         /* bottom-right: diagonal = key length - q_len; the last query sees every key
                                    (FlashAttention's rule). With kv_lens the key length is that of the batch entry,
                                    with ACR_PACKED both lengths are. */
    ACR_MASK_CAUSAL_TOP_LEFT = 2 /* diagonal = 0: query i sees keys 0..i (PyTorch's is_causal) */
} acr_mask;

typedef enum acr_layout {
    ACR_BHSD = 0, /* [batch, heads, length, dim] */
    ACR_BSHD = 1  /* [batch, length, heads, dim] */
} acr_layout;

/* Distances in elements from one batch entry, head, row (position) to the next; >= 0. All three zero = packed in the
 * problem's layout. A stride of an extent of 1 is ignored. Inputs may repeat (stride 0 for some, not all); the output
 * may not overlap itself. With ACR_PACKED batch is 0, and rows are outermost in the output. */
typedef struct acr_strides {
    int64_t batch, head, row;
} acr_strides;

enum {                      /* acr_problem.flags */
    ACR_WANT_LSE = 1u << 0, /* executions also write the log-sum-exp; with ACR_BACKWARD they read it in any case */
    ACR_KV_LENS = 1u << 1,  /* executions read a key length for each batch entry */
    /* The batch entries are sequences of different lengths, one after another along the rows of tensors
     * [total, heads, dim], and executions read where each begins (acr_buffers.q_offsets and kv_offsets). q_len and
     * kv_len are the longest lengths that an entry may have. layout must be ACR_BSHD. Not with ACR_KV_LENS. */
    ACR_PACKED = 1u << 2,
    ACR_KV_STARTS = 1u << 3, /* executions read where each batch entry's keys begin (left padding). Not with
                                ACR_PACKED */
    ACR_SINKS = 1u << 4,     /* executions read a sink for each query head */
    ACR_ALIBI = 1u << 5,     /* executions read an ALiBi slope for each query head */
    ACR_RANGES = 1u << 6,    /* executions read `ranges` ranges of keys for each batch entry */
    ACR_TREE = 1u << 7,      /* executions read which of the last q_len keys each row sees */
    /* k and v are [pages, page, kv_heads, dim], the batch stride being the page's, and executions read which pages hold
     * a batch entry's keys (acr_buffers.page_table). Wants ACR_KV_LENS. With ACR_PACKED q alone is packed: there are
     * no kv_offsets. */
    ACR_PAGED = 1u << 8,
    /* v is the first v_dim elements of each key: one tensor, loaded once (MLA in its absorbed form). v's strides are
     * k's, v's scales those of k; scale has no default here. */
    ACR_V_IN_K = 1u << 9,
    /* A row's bits depend on its own query and keys, and on the problem's types, heads, dims, mask and limits: not on
     * batch, q_len, kv_len, its place in the batch, what the other rows hold, or how many share the work. */
    ACR_INVARIANT = 1u << 10,
    /* ACR_BACKWARD alone: gradients may be summed in an order that differs between runs. Without it runs give the same
     * bits, on "cpu" for any number of threads. */
    ACR_FAST_ATOMICS = 1u << 11
};

/* What a row sees, and what becomes of a score.
 *
 * A score is s = scale * (q . k); then, in this order:
 *  - softcap c > 0: s = c * tanh(s / c). Kernels for GPUs may take tanh with an error of 2^-11 relative to its value.
 *  - bias: s = s + bias[b, h, i, j]; ALiBi: s = s - slopes[h] * |i' - j|.
 *  - what is hidden becomes -infinity; softmax over the keys; with sinks the sum of exponentials gains
 *    exp(sinks[h]), a sink being neither scaled nor capped.
 *
 * Row i of a batch entry stands at position i' = i + diagonal among its keys. It sees key j when the key exists, which
 * is kv_start <= j < key length (kv_start is 0 without ACR_KV_STARTS), and both (a) and (b) hold:
 *  (a) one of the ranges holds both i' and j, or each limit is kept:
 *       - mask: j <= i';
 *       - window_left L > 0: j > i' - L;
 *       - window_right R > 0, without a mask: j <= i' + R;
 *       - chunk C > 0: floor((j - kv_start) / C) == floor((i' - kv_start) / C);
 *  (b) tree: the key is before the entry's last q_len keys, or its bit is 1 for row i. Key j's bit is number
 *      j - (key length - q_len), with the lengths of the entry.
 * A bias of -infinity hides its key, as a boolean mask does. A row that sees no key gets o = 0 and an lse of
 * -infinity, or with a sink of the sink. Finite biases below -2e38 may count alike, and an lse down there is any
 * finite number below -2e38: a row whose keys all have float32's or bf16's lowest number weighs them evenly.
 *
 * Gradients (ACR_BACKWARD): those of the sum over all elements of d_o * o, with respect to q, k, v and the sinks, by
 *     p = exp(s - lse),  D = sum of d_o * o over a row's dims,  ds = p * (d_o . v - D),  dv = sum of p * d_o,
 *     dq = scale * sum of ds' * k,  dk = scale * sum of ds' * q,  dsinks = -sum of exp(sink - lse) * D,
 * where ds' is ds times the softcap's derivative, 1 - (s / c)^2 of the capped score. dk and dv are summed over the
 * query heads that share a key/value head. A bias and slopes are read and get no gradient. Rows that see no key have
 * dq = 0, keys that no row sees or that do not exist dk = dv = 0. A row whose lse is below -2e38 has no gradients worth
 * the name: they may be anything finite or NaN. */

typedef struct acr_problem {
    uint32_t size;   /* sizeof(acr_problem) */
    acr_pass pass;   /* ACR_FORWARD or ACR_BACKWARD */
    acr_dtype dtype; /* of q, k and v; 0 is refused: say ACR_F16 or another */
    /* Of o; 0 = dtype (ACR_F16 for ACR_E4M3). Inputs of ACR_E4M3: ACR_F16 or ACR_BF16; of ACR_F16 and ACR_BF16: also
     * ACR_F32, for partial results (acr_merge), with ACR_FORWARD. */
    acr_dtype out_dtype;
    acr_mask mask;
    acr_layout layout;  /* of every tensor whose strides are all zero */
    uint32_t flags;     /* ACR_WANT_LSE, ACR_KV_LENS and those that follow it, or 0 */
    uint32_t alignment; /* bytes: q, k, v and o are multiples of it; a power of two, one element to 256; 0 = 16. An o of
                           ACR_F32 is a multiple of 4 in any case */
    int64_t batch;      /* >= 1; every extent is at most 2^31 - 1 */
    int64_t q_heads;    /* >= 1 */
    int64_t kv_heads;   /* divides q_heads: query head h reads key/value head h / (q_heads / kv_heads); 0 = q_heads */
    int64_t q_len;      /* >= 1 */
    int64_t kv_len;     /* >= 1; 0 = q_len */
    int64_t qk_dim;     /* >= 1: elements of a query or key row */
    int64_t v_dim;      /* >= 1: elements of a value or output row; 0 = qk_dim */
    acr_strides q;      /* of q [batch, q_heads, q_len, qk_dim] */
    acr_strides k;      /* of k [batch, kv_heads, kv_len, qk_dim] */
    acr_strides v;      /* of v [batch, kv_heads, kv_len, v_dim] */
    acr_strides o;      /* of o [batch, q_heads, q_len, v_dim] */
    float scale;        /* multiplies the scores; positive and finite; 0 = 1 / sqrt(qk_dim) */
    float q_scale;      /* ACR_E4M3: value = stored * q_scale; positive and finite; 0 = 1. Other types: 0 or 1. Scales
                           for each batch entry and head: acr_buffers.q_scales */
    float k_scale;      /* likewise for k, also with kv_dtype ACR_E4M3 */
    float v_scale;      /* likewise for v */
    /* Sliding window, with any mask. Row i stands at key i' = i + diagonal; without a mask the diagonal is that of
     * ACR_MASK_CAUSAL. Both >= 0; 0 = no limit, or left out by a caller's smaller size. A limit that hides nothing is 0
     * in the canonical problem. */
    int64_t window_left;  /* key j is visible when j > i' - window_left: so many keys, that at i' included */
    int64_t window_right; /* key j is visible when j <= i' + window_right; with a mask it hides nothing */
    /* Left out by a caller's smaller size: 0. What each means is said above. */
    float softcap;        /* natural units, >= 0 and finite; 0 = none. Its value selects no kernel, like scale */
    int32_t ranges;       /* ACR_RANGES: how many each batch entry has, 1 to 65536; otherwise 0 */
    int64_t chunk;        /* keys, >= 0; 0 = no limit. One that hides nothing is 0 in the canonical problem */
    acr_dtype bias_dtype; /* of the bias: ACR_F32, ACR_F16 or ACR_BF16; ACR_BOOL8: a boolean mask; 0 = no bias */
    uint32_t reserved;    /* 0 */
    acr_strides bias;     /* of bias [batch, q_heads, q_len, kv_len]; elements, >= 0, each 0 broadcasts, all three too;
                             the stride of keys is 1. With ACR_PACKED batch counts entries, row an entry's rows.
                             Kernels for GPUs load rows that are multiples of 16 bytes faster */
    /* Left out by a caller's smaller size: 0. */
    acr_dtype kv_dtype;   /* of k and v where it is another than dtype: ACR_E4M3, each element brought to dtype exactly,
                           with k_scale and v_scale (and acr_buffers.k_scales, v_scales); 0 = dtype */
    int32_t page;         /* ACR_PAGED: keys in a page, 1 to 65536; otherwise 0 */
    acr_dtype grad_dtype; /* ACR_BACKWARD: of dq, dk and dv; ACR_F32, or that of the inputs; 0 = the latter */
    uint32_t reserved_2;  /* 0 */
    acr_strides d_o, dq, dk, dv; /* ACR_BACKWARD: of tensors shaped as o, q, k and v; all zero = packed. d_o, an input,
                                    may repeat; alignment is theirs, too */
} acr_problem;

#define ACR_PROBLEM_INIT                                                                                               \
    {                                                                                                                  \
        sizeof(acr_problem), ACR_FORWARD, ACR_F16, ACR_DTYPE_DEFAULT, ACR_MASK_NONE, ACR_BHSD, 0, 0, 0, 0, 0, 0, 0, 0, \
            0, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, 0.0f, 0.0f, 0.0f, 0.0f, 0, 0, 0.0f, 0, 0,                   \
            ACR_DTYPE_DEFAULT, 0, {0, 0, 0}, ACR_DTYPE_DEFAULT, 0, ACR_DTYPE_DEFAULT, 0, {0, 0, 0}, {0, 0, 0},         \
            {0, 0, 0},                                                                                                 \
        {                                                                                                              \
            0, 0, 0                                                                                                    \
        }                                                                                                              \
    }

/* Reads the text form, e.g. "b2:h8:s512:d64" or "bf16:b8:h32/8:s1/8192:d128:causal:kvlens". Fields in any order,
 * separated by ':'
 *     fwd bwd                  the pass (default fwd)
 *     f32 f16 bf16 e4m3        type of q, k, v (default f16)
 *     bN                       batch                           hN or hN/M   query heads / key-value heads
 *     sN or sN/M               query length / key length       dN or dN/M   query-key dim / value dim
 *     causal  causal-tl        mask, bottom-right or top-left  bhsd  bshd   layout (default bhsd)
 *     winL or winL/R           window_left, window_right; win0/R has the right limit alone
 *     chunkN                   chunk                           rangesN      ACR_RANGES with N ranges
 *     capX                     softcap, a decimal: cap50, cap0.5, cap1e-3
 *     bias-bf16/B,H,S          bias_dtype (bias-f16, bias-f32) and its strides; mask/B,H,S: ACR_BOOL8
 *     sinks alibi kvstarts tree                                the flags
 *     pageN                    ACR_PAGED with N keys a page    kv-e4m3      kv_dtype
 *     v-in-k  invariant        the flags
 *     qs=B,H,S ks= vs= os=     strides in elements             alignN       pointer alignment in bytes (default 16)
 *     of16 obf16 of32          output type: of16 and obf16 with e4m3, of32 with f16 and bf16
 *     lse  kvlens  packed      the flags
 *     grad-f32 atomics         with bwd: grad_dtype, the flag  dos=B,H,S dqs= dks= dvs=   with bwd: strides
 * b, h, s and d are required; packed wants bshd beside it, and strides with B = 0. scale and the fp8 scales have
 * no text form: they are 0 (default) in *out, but for the scale of v-in-k, which is 1 / sqrt(qk_dim).
 * On failure *position, if position is not NULL, is the 0-based offset of the offending character.
 * Errors: ACR_FORMAT (not the grammar), ACR_INVALID (grammatical, but not a problem). */
ACR_API acr_status acr_problem_parse(acr_problem *out, const char *text, size_t *position);

/* Writes the canonical text form, NUL-terminated, into text[0..capacity). Two problems with the same text get the same
 * kernels, as do two whose texts differ in the value of the softcap alone.
 * ACR_PROBLEM_TEXT_MAX bytes always suffice. Errors: ACR_INVALID (problem; text NULL; capacity too small, nothing
 * written). */
#define ACR_PROBLEM_TEXT_MAX 768
ACR_API acr_status acr_problem_format(const acr_problem *problem, char *text, size_t capacity);

/* Checks a problem and fills in every default: afterwards no zero stands for something else, and strides are explicit.
 * *out may be *in. Errors: ACR_INVALID, naming the field and the limit. */
ACR_API acr_status acr_problem_canonical(acr_problem *out, const acr_problem *in);

/* ---- Plan -------------------------------------------------------------------------------------------------------- */

typedef struct acr_plan acr_plan; /* a kernel chosen, loaded and ready; immutable */

/* How much a plan may cost to make. Every effort uses wisdom where the context has it. */
typedef enum acr_effort {
    ACR_ESTIMATE = 0,   /* choose by the kernels' cost models: microseconds, plus loading the kernel */
    ACR_MEASURE = 1,    /* time the likely candidates in the library's own scratch memory; keep the result as wisdom */
    ACR_PATIENT = 2,    /* time every candidate, longer */
    ACR_WISDOM_ONLY = 3 /* take wisdom of any effort, or fail with ACR_NO_WISDOM */
} acr_effort;

/* Chooses a kernel for a problem and makes it ready to run (loads its code: file-free, but milliseconds the first
 * time).
 * The caller frees *out with acr_plan_destroy. May be called while a stream is being captured.
 * Errors: ACR_INVALID (problem), ACR_UNSUPPORTED (the reason of the kernel that came nearest), ACR_NO_WISDOM,
 * ACR_NO_MEMORY, ACR_DEVICE_FAULT. */
ACR_API acr_status acr_plan_create(acr_plan **out, acr_ctx *ctx, const acr_problem *problem, acr_effort effort);

/* Frees a plan that no execution on the host is using; work already enqueued may still be running. NULL is a no-op. */
ACR_API void acr_plan_destroy(acr_plan *plan);

/* One line: the problem, the kernel, and why it was chosen ("estimate", "wisdom", "measured"); "" for NULL. Lives as
 * long as the plan. */
ACR_API const char *acr_plan_text(const acr_plan *plan);

/* The chosen kernel's name; "" for NULL. Lives as long as the library. */
ACR_API const char *acr_plan_kernel(const acr_plan *plan);

/* Bytes of workspace an execution needs; often 0. 0 for NULL. */
ACR_API size_t acr_plan_workspace(const acr_plan *plan);

/* Seconds that one execution is expected to take: what was measured where wisdom or a measurement chose the kernel,
 * otherwise what its cost model says, for lengths that are full. A figure to compare plans by. 0 for NULL. */
ACR_API double acr_plan_seconds(const acr_plan *plan);

/* acr_plan_seconds of the plan that ACR_ESTIMATE would make, which is not made: no code is loaded.
 * Errors: ACR_INVALID (problem, a NULL pointer), ACR_UNSUPPORTED. */
ACR_API acr_status acr_estimate_seconds(double *out, acr_ctx *ctx, const acr_problem *problem);

/* ---- Execution --------------------------------------------------------------------------------------------------- */

enum { /* acr_buffers.flags */
    /* cuda: this launch may start before the previous kernel in the stream has ended (programmatic dependent
     * launch). It still reads and writes nothing before that kernel's results are visible. */
    ACR_OVERLAP_PREVIOUS = 1u << 0
};

typedef struct acr_buffers {
    uint32_t size;  /* sizeof(acr_buffers) */
    uint32_t flags; /* 0 or ACR_OVERLAP_PREVIOUS */
    const void *q;  /* [batch, q_heads, q_len, qk_dim], the problem's strides and alignment; cuda: device memory */
    const void *k;  /* [batch, kv_heads, kv_len, qk_dim] */
    const void *v;  /* [batch, kv_heads, kv_len, v_dim]; ACR_V_IN_K: NULL, or k. Weights relative to the row's largest
                       are summed before they are divided: o may be infinite where the number of keys times the largest
                       |v| is beyond float32 (3.4e38) */
    void *o;        /* [batch, q_heads, q_len, v_dim]: all of it is written; a row that sees no key gets 0.
                       ACR_PACKED: q and o are [q_total, q_heads, dim], k and v [kv_total, kv_heads, dim], and only rows
                       of a sequence are read and written */
    float *lse;     /* ACR_WANT_LSE: [batch, q_heads, q_len] packed, 4-byte aligned: ln(sum over visible keys of
                       exp(scale * score)); -infinity for a row that sees no key. ACR_PACKED: [q_heads, q_total].
                       Otherwise NULL */
    const int32_t *kv_lens; /* ACR_KV_LENS: [batch], 4-byte aligned: keys 0..kv_lens[b]-1 exist in batch entry b; what
                               else k and v hold is never used. Outside [0, kv_len] they are clamped. Otherwise NULL */
    /* ACR_PACKED, otherwise NULL and 0, or left out by a caller's smaller size. Sequence b has the query rows
     * q_offsets[b]..q_offsets[b+1]-1 and the keys kv_offsets[b]..kv_offsets[b+1]-1. Both [batch + 1], 4-byte
     * aligned, on the device, not decreasing; rows before the first and from the last offset on belong to no
     * sequence. An offset outside [0, total] is clamped, a sequence longer than q_len or kv_len is cut there, one
     * that would end before it begins is empty: whatever they hold, nothing outside the tensors is touched. */
    const int32_t *q_offsets, *kv_offsets;
    int64_t q_total, kv_total; /* rows of q and o, and of k and v; 1 to 2^31 - 1025 */
    /* Of tensors in ACR_E4M3, otherwise NULL, or left out by a caller's smaller size: scales for each batch entry
     * (ACR_PACKED: sequence) and key/value head, [batch, kv_heads] packed, 4-byte aligned; cuda: device memory, read
     * when the execution runs (ACR_INVALID for an address of the host where that can be told). They multiply those of
     * the problem: in batch entry b and key/value head h, k's value = stored * k_scale * k_scales[b * kv_heads + h];
     * q's scale is shared by the query heads that read h. Each may be NULL, which is 1 everywhere; none is part of the
     * plan. Every scale is positive and finite: on cpu checked (ACR_INVALID), on cuda one that is not spoils the output
     * rows of its batch entry and head, never others. */
    const float *q_scales, *k_scales, *v_scales;
    /* Left out by a caller's smaller size: NULL. Each is wanted where the problem says so, otherwise NULL; none is
     * written; on cuda they are device memory, read when the execution runs. */
    const int32_t *kv_starts; /* ACR_KV_STARTS: [batch], 4-byte aligned: keys before kv_starts[b] do not exist, what k
                                 and v hold there is never used. Clamped to [0, the entry's key length] */
    const float *sinks;       /* ACR_SINKS: [q_heads], 4-byte aligned, natural units. -infinity is no sink */
    const float *slopes;      /* ACR_ALIBI: [q_heads], 4-byte aligned */
    const void *bias;         /* bias_dtype: [batch, q_heads, q_len, kv_len] by the problem's strides, aligned to an
                                 element. A NaN or +infinity spoils its row */
    const int32_t *ranges;    /* ACR_RANGES: [batch, ranges, 2] packed, 4-byte aligned: half-open ranges of keys {begin,
                                 end}; one with begin >= end is ignored. They may overlap and reach beyond the keys */
    const uint8_t *tree;      /* ACR_TREE: bits [batch, q_len, (q_len + 7) / 8 bytes], the lowest bit of a byte first */
    /* Left out by a caller's smaller size: NULL and 0. ACR_PAGED, otherwise NULL and 0: key j of batch entry b is row
     * j % page of page page_table[b * table_stride + j / page] of k and v. Entries of the table from ceil(key length /
     * page) on are never read. Several may name one page. A number outside [0, pages) names none: nothing outside k and
     * v is touched, the rows of that batch entry hold anything, no others do. */
    const int32_t *page_table; /* [batch, table_stride], 4-byte aligned; cuda: device memory, read at the execution */
    int64_t table_stride;      /* from one entry's pages to the next one's: ceil(kv_len / page) or more */
    int64_t pages;             /* pages that k and v hold; 1 to 2^31 - 1 */
    /* Left out by a caller's smaller size: NULL. */
    const void *d_o;    /* ACR_BACKWARD: the gradient of o. q, k, v, o and lse are read, too */
    void *dq, *dk, *dv; /* ACR_BACKWARD: written, all of it but rows of no sequence; none overlaps another */
    float *dsinks;      /* ACR_BACKWARD with ACR_SINKS: [q_heads], written */
} acr_buffers;

#define ACR_BUFFERS_INIT                                                                                               \
    {                                                                                                                  \
        sizeof(acr_buffers), 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL,    \
            NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL                                           \
    }

/* Prepares a workspace, once after allocating it and before its first execution; enqueued on the stream. bytes is at
 * least acr_plan_workspace(plan), workspace 256-byte aligned. Executions leave it ready for the next. A plan that needs
 * no workspace accepts NULL, 0. Errors: ACR_INVALID, ACR_WORKSPACE, ACR_DEVICE_FAULT. */
ACR_API acr_status acr_workspace_init(const acr_plan *plan, void *workspace, size_t bytes, void *stream);

/* Enqueues one execution on the stream (cuda: a CUstream or cudaStream_t, NULL = the legacy default stream; cpu:
 * ignored, the call returns when o is written). It neither allocates nor synchronises, and may be captured into a CUDA
 * graph.
 * Several threads may execute one plan at once, with a workspace each.
 * On cuda, faults while running surface at the caller's next synchronisation.
 * NaN or infinite inputs: a NaN score or value makes the affected output rows NaN, never others; they are no error.
 * Errors: ACR_INVALID (null pointers; a buffer given or missing against what the problem says; a total out of range;
 * scales for a type that has none, or not positive and finite), ACR_ALIGNMENT, ACR_OVERLAP (an output overlaps an input
 * or another; a buffer overlaps the workspace), ACR_WORKSPACE, ACR_DEVICE_FAULT. */
ACR_API acr_status acr_execute(const acr_plan *plan, const acr_buffers *buffers, void *workspace, size_t bytes,
                               void *stream);

/* Everything in one call, of either pass: finds or makes the ACR_ESTIMATE plan of the problem (cached in ctx), finds or
 * makes a workspace for this stream (kept in ctx), executes. After the first call for a problem and stream it neither
 * allocates nor synchronises, until the cache drops the plan: it keeps the 1024 plans used last, with at most 1 GiB of
 * workspaces, and every plan that was executed while its stream was captured, because the graph uses the workspace.
 * Executions on one stream share that workspace: use one stream from one thread at a time. On cpu too, where a stream
 * does nothing else: threads that call this at once give each its own value (the address of a local variable, say).
 * Errors: those of acr_plan_create and acr_execute; ACR_WORKSPACE when a workspace would have to be made while the
 * stream is being captured: call it once before capturing. */
ACR_API acr_status acr_forward(acr_ctx *ctx, const acr_problem *problem, const acr_buffers *buffers, void *stream);

/* ---- Beside attention: partial results, caches ------------------------------------------------------------------- */

/* Attention over one part of the keys, as an execution with ACR_WANT_LSE leaves it. */
typedef struct acr_part {
    const void *o;    /* [batch, heads, len, dim] by part_stride, as aligned as `alignment`; cuda: device memory */
    const float *lse; /* [batch, heads, len] by part_lse_stride, 4-byte aligned, natural logarithm */
} acr_part;

typedef struct acr_merge_args {
    uint32_t size;       /* sizeof(acr_merge_args) */
    uint32_t flags;      /* 0 or ACR_OVERLAP_PREVIOUS */
    acr_dtype dtype;     /* of the parts' o: ACR_F32, ACR_F16 or ACR_BF16; 0 is refused */
    acr_dtype out_dtype; /* of o, another of these or the same; 0 = dtype */
    acr_layout layout;   /* of o and the parts' o where their strides are all zero */
    uint32_t alignment;  /* bytes: o and the parts' o are multiples of it, and of their elements; a power of two, one
                            element of the narrower type to 256; 0 = 16 */
    int64_t batch, heads, len, dim; /* each 1 to 2^31 - 1, batch * heads * len below 2^32. Packed sequences are batch
                                       1, len their rows together */
    int64_t count;                  /* of parts, >= 1. cuda: more than 1900 must lie at even distances, o and lse */
    acr_strides part_stride;        /* of every part's o; elements, all zero = packed */
    acr_strides part_lse_stride; /* of every part's lse; all zero = packed [batch, heads, len], whatever the layout */
    acr_strides o_stride;        /* of o */
    acr_strides lse_stride;      /* of lse, as part_lse_stride */
    const acr_part *parts;       /* [count], memory of the host, read during the call */
    void *o;                     /* [batch, heads, len, dim] */
    float *lse;                  /* [batch, heads, len], 4-byte aligned; NULL = not wanted */
} acr_merge_args;

#define ACR_MERGE_ARGS_INIT                                                                                            \
    {                                                                                                                  \
        sizeof(acr_merge_args), 0, ACR_DTYPE_DEFAULT, ACR_DTYPE_DEFAULT, ACR_BHSD, 0, 0, 0, 0, 0, 0, {0, 0, 0},        \
            {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, NULL, NULL, NULL                                                          \
    }

/* Joins parts into the attention over all their keys, which no two parts share: for every row
 *     lse = ln(sum of exp(part.lse)),   o = sum of exp(part.lse - lse) * part.o
 * with float32 weights, summed in the order of the parts. A sink goes into one part. Equal arguments give equal bits.
 * A part whose lse is -infinity saw no key: its o is not used, whatever it holds. Where all are, o = 0 and lse =
 * -infinity. An lse of NaN or +infinity makes its row NaN, o and lse; a NaN or infinite element of a part makes that
 * element NaN or infinite; other rows are never affected.
 * o may be parts[0].o with the same type and strides, lse may be parts[0].lse with the same strides. Other parts may
 * not overlap o or lse.
 * cuda: enqueued on the stream (as acr_execute does), neither allocates nor synchronises, and may be captured; the
 * first call for a type loads its code. cpu: done when it returns, by the context's threads.
 * Errors: ACR_INVALID (a field, a NULL pointer), ACR_UNSUPPORTED (cuda: too many parts at uneven distances),
 * ACR_ALIGNMENT, ACR_OVERLAP, ACR_NO_MEMORY and ACR_DEVICE_FAULT (cuda). */
ACR_API acr_status acr_merge(acr_ctx *ctx, const acr_merge_args *args, void *stream);

enum { /* acr_append_args.flags, beside ACR_OVERLAP_PREVIOUS */
    /* The rotated pairs are neighbours (2p, 2p + 1) in place of (p, p + rope_dim / 2). */
    ACR_ROPE_INTERLEAVED = 1u << 1
};

typedef struct acr_append_args {
    uint32_t size;         /* sizeof(acr_append_args) */
    uint32_t flags;        /* ACR_OVERLAP_PREVIOUS, ACR_ROPE_INTERLEAVED, or 0 */
    acr_dtype dtype;       /* of k, v, q and q_out: ACR_F32, ACR_F16 or ACR_BF16; 0 is refused */
    acr_dtype cache_dtype; /* of k_cache and v_cache: one of these or ACR_E4M3; 0 = dtype */
    acr_layout layout;     /* of tensors whose strides are all zero; ACR_BSHD pages are [pages, page, heads, dim] */
    uint32_t alignment;    /* bytes: k, v, q, q_out and the caches are multiples of it; a power of two, one element of
                              the widest type to 256; 0 = 16 */
    int64_t batch;         /* sequences; this and every extent is at most 2^31 - 1, batch * len and heads * dim are
                              below 2^32 */
    int64_t q_heads;       /* of q; 0 without q */
    int64_t kv_heads;      /* of k and v; 0 without both */
    int64_t len;           /* new tokens of each sequence; with offsets: rows of k, v and q */
    int64_t qk_dim;        /* elements of a row of k and q; 0 without both */
    int64_t v_dim;         /* elements of a row of v; 0 = qk_dim */
    int64_t kv_len;        /* rows of a sequence in a plain cache; 0 with pages, whose table says how many */
    /* Pages; 0 and NULL = a plain cache. Position p of sequence b is row p % page of page
     * page_table[b * table_stride + p / page]. */
    int64_t page, pages, table_stride; /* rows of a page, pages of the caches, entries of a sequence in the table */
    /* Elements [rope_first, rope_first + rope_dim) of rows of k and q are rotated; rope_dim is even, 0 = none. */
    int64_t rope_first, rope_dim;
    int64_t rope_rows;   /* positions that cos and sin have */
    int64_t rope_stride; /* from one position to the next there, in elements; 0 = rope_dim / 2 */
    float k_scale;       /* ACR_E4M3: value = stored * k_scale; positive and finite, 0 = 1. Other types: 0 or 1 */
    float v_scale;       /* likewise for v */
    acr_strides q_stride, k_stride, v_stride, q_out_stride; /* elements, all zero = packed; with offsets batch is 0 */
    acr_strides k_cache_stride, v_cache_stride;             /* batch: from one sequence, or page, to the next */
    const void *q;     /* [batch, q_heads, len, qk_dim], with offsets [len, q_heads, qk_dim]: rotated into q_out. NULL =
                          none */
    const void *k, *v; /* [batch, kv_heads, len, dim], with offsets [len, kv_heads, dim]. NULL with its cache */
    void *q_out;       /* shaped as q; may be q with the same strides */
    void *k_cache;     /* [batch, kv_heads, kv_len, qk_dim], or with pages [pages, kv_heads, page, qk_dim] */
    void *v_cache;     /* the same with v_dim */
    const float *cos, *sin; /* [rope_rows, rope_dim / 2], 4-byte aligned; NULL without rope_dim */
    const int32_t *kv_lens; /* [batch], 4-byte aligned: lengths after the append */
    /* [batch + 1], 4-byte aligned: the new tokens of sequence b are rows offsets[b]..offsets[b+1]-1 of k, v and q.
     * NULL = len of each sequence */
    const int32_t *offsets;
    const int32_t *page_table; /* [batch, table_stride], 4-byte aligned */
    /* [batch], 4-byte aligned: added to the positions that rotate; minus kv_starts for batches padded on the left.
     * NULL = 0 */
    const int32_t *rope_offsets;
    /* [batch, len], with offsets [len], 4-byte aligned: the positions that rotate. NULL = those in the cache */
    const int32_t *rope_positions;
    /* ACR_E4M3: [batch, kv_heads], 4-byte aligned; multiply k_scale and v_scale, as acr_buffers.k_scales does. NULL =
     * 1 */
    const float *k_scales, *v_scales;
} acr_append_args;

#define ACR_APPEND_ARGS_INIT                                                                                           \
    {                                                                                                                  \
        sizeof(acr_append_args), 0, ACR_DTYPE_DEFAULT, ACR_DTYPE_DEFAULT, ACR_BHSD, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,   \
            0, 0, 0, 0, 0.0f, 0.0f, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, NULL, NULL,      \
            NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL                               \
    }

/* Writes new rows of k and v to a cache, where acr_execute reads them with the same kv_lens, and on the way rotates k
 * and q by their positions (RoPE) and rounds to the cache's type.
 * The last of a sequence's n new tokens goes to position kv_lens[b] - 1, the first to kv_lens[b] - n. A token whose
 * position is below 0, from kv_len on or beyond the table, or whose page id is outside [0, pages), is not written to
 * the cache, and a row that belongs to no sequence nowhere: whatever the lengths, the offsets and the table hold,
 * nothing outside the caches and q_out is touched. Two sequences may not write one row of a page.
 * Pair p of a row that rotates by position t becomes (x * c - y * s, y * c + x * s) in float32, c = cos[t, p] and
 * s = sin[t, p]; other elements are copied. A t outside [0, rope_rows) makes the pairs NaN. Values are rounded once,
 * to the nearest of the output's type, ties to even; for ACR_E4M3 those are value * (1 / scale), and from 448 on 448.
 * cuda: enqueued on the stream (as acr_execute does), neither allocates nor synchronises, and may be captured; the
 * first call for a type loads its code. cpu: done when it returns, by the context's threads.
 * Errors: ACR_INVALID (a field, a pointer missing or given against the others; cpu: a scale that is not positive and
 * finite, on cuda it spoils what it scales), ACR_ALIGNMENT, ACR_OVERLAP (q_out or a cache overlaps another tensor),
 * ACR_UNSUPPORTED (cuda: 2^32 - 2^17 tokens or more; 2^31 elements of a token), ACR_NO_MEMORY and ACR_DEVICE_FAULT
 * (cuda). */
ACR_API acr_status acr_append(acr_ctx *ctx, const acr_append_args *args, void *stream);

/* ---- Wisdom ------------------------------------------------------------------------------------------------------ */

/* What an import did; links count as facts. */
typedef struct acr_wisdom_report {
    uint32_t size;     /* sizeof(acr_wisdom_report) */
    uint32_t imported; /* facts now in the context */
    uint32_t skipped;  /* left out: kernel unknown, its machine code changed, or it cannot run the problem */
    uint32_t other;    /* facts for other devices, left out */
} acr_wisdom_report;

#define ACR_WISDOM_REPORT_INIT                                                                                         \
    {                                                                                                                  \
        sizeof(acr_wisdom_report), 0, 0, 0                                                                             \
    }

/* Adds a file's facts about this device to the context; a fact of higher effort replaces one of lower, equal effort the
 * older.
 * All or nothing: a malformed file changes nothing, and acr_last_error names the line. report may be NULL.
 * Errors: ACR_IO, ACR_FORMAT, ACR_NO_MEMORY. */
ACR_API acr_status acr_wisdom_import(acr_ctx *ctx, const char *path, acr_wisdom_report *report);

/* Writes the context's facts to a file, atomically: temporary file beside it, sync, rename. Facts that the file already
 * holds for other devices or problems are kept, those of exports that run at the same time too: exports to one folder
 * wait for each other (not on a file system that cannot lock a folder, as NFS). Errors: ACR_IO, ACR_FORMAT (the file
 * exists and is malformed), ACR_NO_MEMORY. */
ACR_API acr_status acr_wisdom_export(const acr_ctx *ctx, const char *path);

/* What was measured of the link between the GPUs of several ranks (acromion_nccl.h), all ranks sending at once. */
typedef struct acr_link {
    uint32_t size;           /* sizeof(acr_link) */
    int32_t ranks;           /* >= 2, each with a device like the context's */
    int32_t hosts;           /* 1 to ranks: hosts that they are spread over */
    uint32_t samples;        /* >= 1 */
    double bytes_per_s;      /* that each rank sends to the next while it receives from the one before */
    double latency_s;        /* of the shortest message there */
    double copy_bytes_per_s; /* copied inside a device's memory, read and written once */
} acr_link;

#define ACR_LINK_INIT                                                                                                  \
    {                                                                                                                  \
        sizeof(acr_link), 0, 0, 0, 0.0, 0.0, 0.0                                                                       \
    }

/* Adds a fact about a link to the context's wisdom, where it replaces that of as many ranks and hosts.
 * acr_wisdom_export writes it. Rates and latency are kept to a tenth of a byte a second and of a nanosecond.
 * Errors: ACR_INVALID (a field, a rate or latency that is not positive, or beyond 10^15), ACR_NO_MEMORY. */
ACR_API acr_status acr_wisdom_add_link(acr_ctx *ctx, const acr_link *link);

/* What wisdom knows of the link of so many ranks and hosts; out->size is set. Errors: ACR_INVALID, ACR_NO_WISDOM. */
ACR_API acr_status acr_wisdom_find_link(const acr_ctx *ctx, int32_t ranks, int32_t hosts, acr_link *out);

/* Drops every fact and every cached plan and workspace of acr_forward. No acr_forward of this context may be running,
 * nor its work on the device. NULL is a no-op. */
ACR_API void acr_wisdom_forget(acr_ctx *ctx);

#ifdef __cplusplus
}
#endif
#endif
