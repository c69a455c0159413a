/* Pairwise-covering cases, see cases.h.
 *
 * A case is a value for each axis. Cases are chosen greedily: start from a pair not covered yet, give the other axes,
 * in a random order, the value that covers most new pairs, and keep the best of several such tries that the kernel can
 * run. */
#include "cases.h"

#include <math.h>
#include <string.h>

typedef enum axis {
    AXIS_DIMS,
    AXIS_Q_LEN,
    AXIS_KV_LEN,
    AXIS_HEADS,
    AXIS_VIEW,
    AXIS_MASK,
    AXIS_WINDOW,
    AXIS_TERMS,
    AXIS_FLAGS,
    AXIS_INPUTS,
    AXIS_OUT_DTYPE,
    AXIS_CACHE, /* the last: it joins when the pairs of the others are covered */
    AXES
} axis;
enum {
    VALUES_MAX = 14,
    LONG_KV_LEN = 10007
};

/* Multiply-adds a case may take on a CPU kernel, so that the portable one takes seconds; a GPU is not held back. */
#define CPU_CASE_WORK 2.0e8
#define CPU_CACHE_WORK 3.0e6 /* of the cases that are there for their cache */
#define CUDA_CASE_WORK 8.0e9
/* Every gradient is compared, and the oracle computes all of them. */
#define CPU_BACKWARD_CASE_WORK 6.0e6
#define CUDA_BACKWARD_CASE_WORK 6.0e7

/* How a tensor lies in memory. */
typedef enum view {
    VIEW_BHSD,
    VIEW_BSHD,
    VIEW_PADDED,  /* bhsd with a gap of 16 bytes after every row, and of rows after every head */
    VIEW_FUSED,   /* bshd rows of one projection: q, k and v of all heads side by side */
    VIEW_ELEMENT, /* rows one element apart from their packed place, aligned to an element only */
    VIEW_SHARED,  /* all batch entries read the same keys and values (stride 0) */
    VIEW_COUNT
} view;

typedef struct heads {
    int64_t batch, kv_heads, group;
} heads;
enum {
    HEAD_VALUES = 7
};
static const heads head_values[HEAD_VALUES] = {{2, 3, 1}, {1, 1, 1}, {3, 1, 4}, {1, 1, 8},
                                               {3, 5, 1}, {2, 2, 4}, {2, 2, 8}};
/* Of GPU kernels for values inside the keys, whose rows are the many heads of a key head. */
static const heads many_head_values[HEAD_VALUES] = {{2, 1, 16}, {1, 1, 16}, {3, 1, 32}, {1, 1, 128},
                                                    {3, 2, 16}, {2, 2, 48}, {2, 1, 64}};

static const acr_mask mask_values[] = {ACR_MASK_NONE, ACR_MASK_CAUSAL, ACR_MASK_CAUSAL_TOP_LEFT};

/* Windows: none, one key, around a tile, several tiles, and limits on both sides. */
typedef struct window {
    int64_t left, right;
} window;
enum {
    WINDOWS = 6
};

/* What a problem has beyond a scale, a mask and a window: each feature alone, and features together. */
typedef enum term_case {
    TERMS_NONE,
    TERMS_CAP,
    TERMS_SINKS,
    TERMS_BIAS,        /* bfloat16, packed: rows that begin anywhere */
    TERMS_SHARED_BIAS, /* float32, rows of whole 16 bytes that all heads share */
    TERMS_MASK,        /* boolean, of a head, for all batch entries */
    TERMS_SHARED_MASK, /* boolean, rows of whole 16 bytes, for all heads and batch entries */
    TERMS_ALIBI,
    TERMS_KV_STARTS,
    TERMS_CHUNK,
    TERMS_RANGES,
    TERMS_TREE,
    TERMS_WITH_STARTS, /* key starts, a chunk, a cap and sinks */
    TERMS_TOGETHER,    /* all but key starts, which packed batches refuse */
    TERM_CASES
} term_case;

/* How keys and values are kept, and whether rows must not depend on their neighbours. */
typedef struct cache_case {
    int32_t page; /* 0 = no pages */
    bool eight_bits, v_in_k, invariant;
} cache_case;
static const cache_case cache_values[] = {{.page = 0},
                                          {.page = 16},
                                          {.page = 64, .v_in_k = true},
                                          {.eight_bits = true},
                                          {.page = 1, .eight_bits = true},
                                          {.page = 16, .eight_bits = true}, /* as boxes of tensor maps want it */
                                          {.v_in_k = true},
                                          {.invariant = true},
                                          {.page = 32, .invariant = true}};
enum {
    CACHE_VALUES = sizeof cache_values / sizeof cache_values[0]
};

/* Bytes that a case's bias may take. */
#define BIAS_BYTES_MOST (64 << 20)

static const uint32_t flag_values[] = {
    0, ACR_WANT_LSE, ACR_KV_LENS, ACR_WANT_LSE | ACR_KV_LENS, ACR_PACKED, ACR_PACKED | ACR_WANT_LSE};
static const acr_dtype out_dtype_values[] = {ACR_F16, ACR_BF16, ACR_F32};
enum {
    OUT_DTYPE_VALUES = sizeof out_dtype_values / sizeof out_dtype_values[0]
};

typedef struct dims {
    int64_t qk, v;
} dims;

/* The axes of one kernel. */
typedef struct space {
    const acr__kernel *kernel;
    const acr__device *device;
    const heads *head_values; /* HEAD_VALUES */
    dims dim_values[VALUES_MAX];
    int64_t q_lens[VALUES_MAX], kv_lens[VALUES_MAX]; /* kv: 0 = as q_len */
    uint32_t flags[VALUES_MAX];
    window windows[VALUES_MAX];
    term_case terms[VALUES_MAX];
    cache_case caches[VALUES_MAX];
    acr_dtype out_dtypes[OUT_DTYPE_VALUES];
    int counts[AXES];
    int axes;        /* that a choice has values of; those behind have their first */
    int probe_heads; /* of head_values: some that the kernel takes, for probing the other axes */
    int probe_cache; /* of cache_values, likewise */
    uint64_t random_counter;
} space;

typedef struct choice {
    signed char value[AXES];
} choice;

typedef enum pair_state {
    PAIR_OPEN = 0,
    PAIR_COVERED,
    PAIR_IMPOSSIBLE
} pair_state;

/* pairs[a][x][b][y] for axes a < b. */
typedef struct pair_table {
    unsigned char state[AXES][VALUES_MAX][AXES][VALUES_MAX];
} pair_table;

/* ---- From a choice to a problem ---- */

static acr_strides padded_strides(int64_t rows, int64_t heads_count, int64_t dim, int64_t gap)
{
    int64_t row = dim + gap;
    int64_t head = row * (rows + 1);
    return (acr_strides){heads_count * head + gap, head, row};
}

static acr_strides fused_strides(const acr_problem *p, int64_t rows, int64_t dim)
{
    int64_t row = p->q_heads * p->qk_dim + p->kv_heads * (p->qk_dim + p->v_dim);
    return (acr_strides){rows * row, dim, row};
}

/* Of a packed batch, whose rows are outermost and whose batch stride is 0; false for what does not go with it. */
static bool set_packed_view(acr_problem *p, view v)
{
    int64_t gap = v == VIEW_PADDED ? 16 / acr__dtype_bytes(p->dtype) : v == VIEW_ELEMENT ? 1 : 0;
    int64_t out_gap = v == VIEW_PADDED && p->dtype == ACR_E4M3 ? gap / 2 : gap;
    p->layout = ACR_BSHD;
    if (v == VIEW_FUSED) {
        int64_t row = p->q_heads * p->qk_dim + p->kv_heads * (p->qk_dim + p->v_dim);
        p->q = p->k = (acr_strides){0, p->qk_dim, row};
        p->v = (acr_strides){0, p->v_dim, row};
    } else if (gap > 0) {
        p->q = (acr_strides){0, p->qk_dim + gap, p->q_heads * (p->qk_dim + gap) + gap};
        p->k = (acr_strides){0, p->qk_dim + gap, p->kv_heads * (p->qk_dim + gap) + gap};
        p->v = (acr_strides){0, p->v_dim + gap, p->kv_heads * (p->v_dim + gap) + gap};
        p->o = (acr_strides){0, p->v_dim + out_gap, p->q_heads * (p->v_dim + out_gap) + out_gap};
    }
    if (v == VIEW_ELEMENT) {
        p->alignment = p->dtype == ACR_E4M3 ? 2 : (uint32_t)acr__dtype_bytes(p->dtype);
    }
    return v != VIEW_BHSD && v != VIEW_SHARED;
}

static void set_view(acr_problem *p, view v)
{
    int64_t elem_bytes = acr__dtype_bytes(p->dtype);
    int64_t out_bytes = p->out_dtype == ACR_DTYPE_DEFAULT ? elem_bytes : acr__dtype_bytes(p->out_dtype);
    int64_t gap = 0, out_gap = 0;
    switch (v) {
    case VIEW_BSHD:
        p->layout = ACR_BSHD;
        return;
    case VIEW_PADDED:
        gap = 16 / elem_bytes;
        out_gap = 16 / out_bytes;
        break;
    case VIEW_ELEMENT:
        gap = out_gap = 1;
        p->alignment = (uint32_t)(p->dtype == ACR_E4M3 ? out_bytes : elem_bytes);
        break;
    case VIEW_FUSED:
        p->q = fused_strides(p, p->q_len, p->qk_dim);
        p->k = fused_strides(p, p->kv_len, p->qk_dim);
        p->v = fused_strides(p, p->kv_len, p->v_dim);
        p->layout = ACR_BSHD; /* o is packed */
        return;
    case VIEW_SHARED:
        p->k = (acr_strides){0, p->kv_len * p->qk_dim, p->qk_dim};
        p->v = (acr_strides){0, p->kv_len * p->v_dim, p->v_dim};
        return;
    default:
        return;
    }
    p->q = padded_strides(p->q_len, p->q_heads, p->qk_dim, gap);
    p->k = padded_strides(p->kv_len, p->kv_heads, p->qk_dim, gap);
    p->v = padded_strides(p->kv_len, p->kv_heads, p->v_dim, gap);
    p->o = padded_strides(p->q_len, p->q_heads, p->v_dim, out_gap);
}

/* Pages of [page, kv_heads, dim] or, as VIEW_BHSD, of [kv_heads, page, dim]; VIEW_FUSED has a page's keys and values
 * side by side. False for what does not go with pages. */
static bool set_page_view(acr_problem *p, view v)
{
    const acr_strides none = {0, 0, 0};
    const int64_t heads_count = p->kv_heads, gap = v == VIEW_PADDED ? 16 / acr__dtype_bytes(acr__kv_dtype(p)) : 1;
    p->k = p->v = none;
    if (v == VIEW_FUSED) {
        const int64_t both = p->page * heads_count * (p->qk_dim + p->v_dim);
        p->k = (acr_strides){both, p->qk_dim, heads_count * p->qk_dim};
        p->v = (acr_strides){both, p->v_dim, heads_count * p->v_dim};
    } else if (v == VIEW_PADDED || v == VIEW_ELEMENT) {
        p->k = padded_strides(p->page, heads_count, p->qk_dim, gap);
        p->v = padded_strides(p->page, heads_count, p->v_dim, gap);
    }
    return v != VIEW_SHARED;
}

/* After the view. False for what does not go with it. */
static bool set_cache(acr_problem *p, const cache_case *c, view v)
{
    const acr_strides none = {0, 0, 0};
    p->kv_dtype = c->eight_bits ? ACR_E4M3 : ACR_DTYPE_DEFAULT;
    p->flags |= c->invariant ? ACR_INVARIANT : 0;
    if (c->page > 0) {
        p->flags |= ACR_PAGED | ACR_KV_LENS;
        p->page = c->page;
        if (!set_page_view(p, v)) {
            return false;
        }
    }
    if (c->v_in_k) {
        p->flags |= ACR_V_IN_K;
        p->scale = (float)(1.0 / sqrt((double)p->qk_dim)); /* as in a problem's text */
        p->v = none;
    }
    return !c->eight_bits || p->dtype != ACR_E4M3;
}

static void set_bias(acr_problem *p, acr_dtype dtype, int64_t row, bool by_head, bool by_entry)
{
    p->bias_dtype = dtype;
    p->bias =
        (acr_strides){by_entry ? (by_head ? p->q_heads : 1) * p->q_len * row : 0, by_head ? p->q_len * row : 0, row};
}

static void set_terms(acr_problem *p, term_case terms, int64_t kv_tile)
{
    const int64_t whole_row = (p->kv_len + 7) / 8 * 8;
    const bool together = terms == TERMS_TOGETHER;
    if (together || terms == TERMS_CAP || terms == TERMS_WITH_STARTS)
        p->softcap = 1.5f;
    if (together || terms == TERMS_SINKS || terms == TERMS_WITH_STARTS)
        p->flags |= ACR_SINKS;
    if (terms == TERMS_BIAS)
        set_bias(p, ACR_BF16, p->kv_len, true, true);
    if (terms == TERMS_SHARED_BIAS)
        set_bias(p, ACR_F32, whole_row, false, true);
    if (terms == TERMS_MASK)
        set_bias(p, ACR_BOOL8, p->kv_len, true, false);
    if (terms == TERMS_SHARED_MASK)
        set_bias(p, ACR_BOOL8, (p->kv_len + 15) / 16 * 16, false, false);
    if (together)
        set_bias(p, ACR_F16, whole_row, true, false);
    if (together || terms == TERMS_ALIBI)
        p->flags |= ACR_ALIBI;
    if (terms == TERMS_KV_STARTS || terms == TERMS_WITH_STARTS)
        p->flags |= ACR_KV_STARTS;
    if (together || terms == TERMS_CHUNK || terms == TERMS_WITH_STARTS)
        p->chunk = kv_tile + 3;
    if (together || terms == TERMS_RANGES) {
        p->flags |= ACR_RANGES;
        p->ranges = 3;
    }
    if (together || terms == TERMS_TREE)
        p->flags |= ACR_TREE;
}

static int64_t kv_tile_of(const acr__kernel *kernel)
{
    return kernel->kv_tile > 0 ? kernel->kv_tile : 64;
}

/* Gradients lie as what they are gradients of, but not as one memory where that is; those of float32 go with every
 * other view. A row of d_o may repeat. */
static void set_gradients(acr_problem *p, view v)
{
    p->grad_dtype = v == VIEW_BSHD || v == VIEW_PADDED ? ACR_F32 : ACR_DTYPE_DEFAULT;
    if (p->flags & ACR_PACKED) {
        p->d_o = p->o;
        return;
    }
    if (v == VIEW_PADDED || v == VIEW_ELEMENT) {
        p->d_o = p->o;
        p->dq = p->q;
        p->dk = p->k;
        p->dv = p->v;
    } else if (v == VIEW_FUSED) {
        p->dq = p->q;
    } else if (v == VIEW_SHARED) {
        p->d_o = (acr_strides){0, p->q_len * p->v_dim, p->v_dim};
    }
}

/* The case of a choice; false when it is no problem, too much work, or the kernel cannot run it. */
static bool case_of(test_case *out, const space *s, const choice *c)
{
    const heads *h = &s->head_values[c->value[AXIS_HEADS]];
    const dims *d = &s->dim_values[c->value[AXIS_DIMS]];
    acr_problem p = ACR_PROBLEM_INIT;
    p.pass = s->kernel->pass;
    p.dtype = s->kernel->dtype;
    p.out_dtype = s->out_dtypes[c->value[AXIS_OUT_DTYPE]];
    p.batch = h->batch;
    p.kv_heads = h->kv_heads;
    p.q_heads = h->kv_heads * h->group;
    p.q_len = s->q_lens[c->value[AXIS_Q_LEN]];
    p.kv_len = s->kv_lens[c->value[AXIS_KV_LEN]];
    p.kv_len = p.kv_len ? p.kv_len : p.q_len;
    p.qk_dim = d->qk;
    p.v_dim = d->v;
    p.mask = mask_values[c->value[AXIS_MASK]];
    p.window_left = s->windows[c->value[AXIS_WINDOW]].left;
    p.window_right = s->windows[c->value[AXIS_WINDOW]].right;
    p.flags = s->flags[c->value[AXIS_FLAGS]];
    if (p.flags & ACR_PACKED) {
        p.batch += 4; /* sequences of every kind side by side */
        if (!set_packed_view(&p, (view)c->value[AXIS_VIEW])) {
            return false;
        }
    } else {
        set_view(&p, (view)c->value[AXIS_VIEW]);
    }
    set_terms(&p, s->terms[c->value[AXIS_TERMS]], kv_tile_of(s->kernel));
    if (!set_cache(&p, &s->caches[c->value[AXIS_CACHE]], (view)c->value[AXIS_VIEW])) {
        return false;
    }
    out->inputs = (input_kind)c->value[AXIS_INPUTS];
    if ((int)out->inputs >= input_kind_count(acr__kv_dtype(&p))) {
        return false;
    }
    double work = (double)(p.batch * p.q_heads * p.q_len) * (double)p.kv_len * (double)(p.qk_dim + p.v_dim);
    const bool on_cpu = s->kernel->backend == ACR__CPU;
    double limit = !on_cpu ? CUDA_CASE_WORK : s->axes == AXES ? CPU_CACHE_WORK : CPU_CASE_WORK;
    if (p.pass == ACR_BACKWARD) {
        limit = on_cpu ? CPU_BACKWARD_CASE_WORK : CUDA_BACKWARD_CASE_WORK;
        set_gradients(&p, (view)c->value[AXIS_VIEW]);
    }
    return work <= limit && acr_problem_canonical(&out->problem, &p) == ACR_OK &&
           acr__buffer_bytes(&out->problem, ACR__BIAS, (acr__rows){0}) <= BIAS_BYTES_MOST &&
           !acr__why_not(s->kernel, &out->problem, s->device);
}

/* ---- The axes of a kernel ---- */

static void add_length(int64_t *lens, int *count, int64_t length)
{
    for (int i = 0; i < *count; ++i) {
        if (lens[i] == length) {
            return;
        }
    }
    if (length >= 1 && *count < VALUES_MAX) {
        lens[(*count)++] = length;
    }
}

/* Whether CTAs of a GPU kernel hand something over, through a workspace or within a cluster. */
static bool ctas_share_work(const acr__kernel *kernel, const acr__device *device)
{
    const acr_problem decoding = {.dtype = kernel->dtype,
                                  .batch = 1,
                                  .q_heads = 1,
                                  .kv_heads = 1,
                                  .q_len = 1,
                                  .kv_len = LONG_KV_LEN,
                                  .qk_dim = kernel->qk_dim_max,
                                  .v_dim = kernel->v_dim_max};
    acr__launch launch;
    if (kernel->backend != ACR__CUDA) {
        return false;
    }
    if (kernel->workspace) {
        return true;
    }
    kernel->shape(&decoding, device, &launch);
    return launch.cluster > 1;
}

/* All keys that its stages hold, of a kernel for exactly so many; of others 0. */
static int64_t only_length(const acr__kernel *kernel, const acr__device *device)
{
    const int64_t lengths[] = {kv_tile_of(kernel), kernel->stages * kv_tile_of(kernel)};
    bool runs[2];
    for (int i = 0; i < 2; ++i) {
        acr_problem p = ACR_PROBLEM_INIT, canonical;
        p.pass = kernel->pass;
        p.dtype = kernel->dtype;
        p.batch = p.q_heads = p.kv_heads = 1;
        p.q_len = p.kv_len = lengths[i];
        p.qk_dim = kernel->qk_dim_max;
        p.v_dim = kernel->v_dim_max;
        runs[i] = acr_problem_canonical(&canonical, &p) == ACR_OK && !acr__why_not(kernel, &canonical, device);
    }
    return !runs[0] && runs[1] ? lengths[1] : 0;
}

/* Around a tile, one query and a few, a prime, several tiles with a rest, and the common odd length 1333. Where CTAs
 * hand something over also keys so many that a GPU kernel splits them as far as it ever does. The first are those that
 * the other axes are probed with. */
static void set_lengths(space *s)
{
    int64_t q_tile = s->kernel->q_tile > 0 ? s->kernel->q_tile : 64;
    int64_t kv_tile = kv_tile_of(s->kernel);
    const int64_t q_lens[] = {q_tile, q_tile + 1, 1, q_tile - 1, 97, 1333, 2 * q_tile + 3, 5};
    const int64_t kv_lens[] = {kv_tile + 1, kv_tile, 1, kv_tile - 1, 131, 1333, 3 * kv_tile + 5};
    s->kv_lens[0] = 0;
    s->counts[AXIS_KV_LEN] = 1;
    add_length(s->q_lens, &s->counts[AXIS_Q_LEN], only_length(s->kernel, s->device));
    add_length(s->kv_lens, &s->counts[AXIS_KV_LEN], only_length(s->kernel, s->device));
    for (size_t i = 0; i < sizeof q_lens / sizeof q_lens[0]; ++i) {
        add_length(s->q_lens, &s->counts[AXIS_Q_LEN], q_lens[i]);
    }
    for (size_t i = 0; i < sizeof kv_lens / sizeof kv_lens[0]; ++i) {
        add_length(s->kv_lens, &s->counts[AXIS_KV_LEN], kv_lens[i]);
    }
    if (ctas_share_work(s->kernel, s->device)) {
        add_length(s->kv_lens, &s->counts[AXIS_KV_LEN], LONG_KV_LEN);
    }
}

/* What a probe starts from. */
static choice first_choice(const space *s)
{
    choice c = {{0}};
    c.value[AXIS_HEADS] = (signed char)s->probe_heads;
    c.value[AXIS_VIEW] = VIEW_BSHD;
    return c;
}

/* None alone where the kernel serves no window, probed with a small problem. */
static void set_windows(space *s)
{
    const int64_t kv_tile = kv_tile_of(s->kernel);
    const window values[WINDOWS] = {{0, 0}, {kv_tile, 0}, {1, 0}, {kv_tile + 1, 3}, {2 * kv_tile - 5, kv_tile}, {0, 7}};
    memcpy(s->windows, values, sizeof values);
    choice c = first_choice(s);
    c.value[AXIS_WINDOW] = 2; /* one key: it hides something wherever there are two */
    test_case probe;
    s->counts[AXIS_WINDOW] = case_of(&probe, s, &c) && probe.problem.window_left ? WINDOWS : 1;
}

/* Those that the kernel is compiled with, probed with a causal problem. */
static void set_term_cases(space *s)
{
    choice c = first_choice(s);
    c.value[AXIS_MASK] = 1;
    for (int terms = TERMS_NONE; terms < TERM_CASES; terms++) {
        const int place = s->counts[AXIS_TERMS];
        test_case probe;
        s->terms[place] = (term_case)terms;
        c.value[AXIS_TERMS] = (signed char)place;
        s->counts[AXIS_TERMS] += case_of(&probe, s, &c);
    }
}

/* Dims that the kernel takes at all, probed with small packed problems: its full ones, the common ones, smaller ones
 * that it pads, unequal and odd ones. */
static void set_dims(space *s)
{
    int64_t qk = s->kernel->qk_dim_max, v = s->kernel->v_dim_max;
    int64_t large = qk < 256 ? qk : 256, common = qk < 128 ? qk : 128;
    const dims wanted[] = {{qk, v},
                           {common, common},
                           {large - 8, large - 8},
                           {common / 2 + 8, common / 2 + 8},
                           {common, common / 2},
                           {common / 2, common},
                           {common - 3, common - 5},
                           {1, 1}};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; ++i) {
        const dims *d = &wanted[i];
        bool known = d->qk < 1 || d->v < 1;
        for (int j = 0; j < s->counts[AXIS_DIMS]; ++j) {
            known = known || (s->dim_values[j].qk == d->qk && s->dim_values[j].v == d->v);
        }
        if (known) {
            continue;
        }
        int place = s->counts[AXIS_DIMS];
        s->dim_values[place] = *d;
        choice c = first_choice(s);
        c.value[AXIS_DIMS] = (signed char)place;
        test_case probe;
        if (case_of(&probe, s, &c)) {
            ++s->counts[AXIS_DIMS];
        }
    }
}

/* Leaves in the space the first heads, cache and flags with which the kernel serves a probe of its first terms. False =
 * it serves none. */
static bool find_probe_heads(space *s)
{
    for (int cache = 0; cache < CACHE_VALUES; cache++)
        for (int place = 0; place < HEAD_VALUES; place++)
            for (size_t i = 0; i < sizeof flag_values / sizeof flag_values[0]; i++) {
                test_case probe;
                s->probe_heads = place;
                s->probe_cache = cache;
                s->caches[0] = cache_values[cache];
                s->flags[0] = flag_values[i];
                const choice c = first_choice(s);
                if (case_of(&probe, s, &c))
                    return true;
            }
    return false;
}

/* A kernel may want several query heads for each key head, and may serve one kind of cache, masks or biases alone. */
static void set_probe_heads(space *s)
{
    static const term_case probes[] = {TERMS_NONE, TERMS_MASK, TERMS_BIAS};
    for (size_t i = 0; i < sizeof probes / sizeof probes[0]; i++) {
        s->terms[0] = probes[i];
        if (find_probe_heads(s))
            return;
    }
}

/* The caches that it serves, that of the probes first. */
static void set_caches(space *s)
{
    choice c = first_choice(s);
    s->counts[AXIS_CACHE] = 1;
    for (int i = 0; i < CACHE_VALUES; ++i) {
        const int place = s->counts[AXIS_CACHE];
        test_case probe;
        s->caches[place] = cache_values[i];
        c.value[AXIS_CACHE] = (signed char)place;
        s->counts[AXIS_CACHE] += i != s->probe_cache && case_of(&probe, s, &c);
    }
}

/* The flags that it takes at all: a kernel may serve packed batches alone, or none. */
static void set_flags(space *s)
{
    s->dim_values[0] = (dims){s->kernel->qk_dim_max < 128 ? s->kernel->qk_dim_max : 128,
                              s->kernel->v_dim_max < 128 ? s->kernel->v_dim_max : 128};
    set_probe_heads(s);
    for (size_t i = 0; i < sizeof flag_values / sizeof flag_values[0]; ++i) {
        int place = s->counts[AXIS_FLAGS];
        s->flags[place] = flag_values[i];
        choice c = first_choice(s);
        c.value[AXIS_FLAGS] = (signed char)place;
        test_case probe;
        s->counts[AXIS_FLAGS] += case_of(&probe, s, &c);
    }
}

/* The default is the first of those that the kernel writes. */
static void set_out_dtypes(space *s)
{
    const acr_dtype dtype = s->kernel->dtype;
    acr_problem p = {.dtype = dtype};
    for (int i = 0; i < OUT_DTYPE_VALUES && dtype != ACR_F32; ++i) {
        p.out_dtype = out_dtype_values[i];
        if (!acr__out_why_not(s->kernel, &p))
            s->out_dtypes[s->counts[AXIS_OUT_DTYPE]++] = p.out_dtype;
    }
    if (s->counts[AXIS_OUT_DTYPE] == 0)
        s->out_dtypes[s->counts[AXIS_OUT_DTYPE]++] = dtype;
}

static void set_axes(space *s, const acr__kernel *kernel, const acr__device *device)
{
    const bool many_heads = kernel->v_in_k && kernel->backend == ACR__CUDA;
    *s = (space){.kernel = kernel,
                 .device = device,
                 .head_values = many_heads ? many_head_values : head_values,
                 .axes = AXIS_CACHE};
    set_out_dtypes(s);
    set_lengths(s);
    set_flags(s);
    set_caches(s);
    set_dims(s);
    set_windows(s);
    set_term_cases(s);
    s->counts[AXIS_HEADS] = HEAD_VALUES;
    s->counts[AXIS_VIEW] = VIEW_COUNT;
    s->counts[AXIS_MASK] = sizeof mask_values / sizeof mask_values[0];
    s->counts[AXIS_INPUTS] = input_kind_count(s->caches[0].eight_bits ? ACR_E4M3 : kernel->dtype);
}

/* ---- Choosing ---- */

static int random_below(space *s, int end)
{
    enum {
        SEED = 20,
        STREAM = 0
    };
    return (int)(random_bits(SEED, STREAM, s->random_counter++) % (uint64_t)end);
}

static unsigned char *pair(pair_table *t, int a, int x, int b, int y)
{
    return a < b ? &t->state[a][x][b][y] : &t->state[b][y][a][x];
}

/* Pairs that giving `axis_index` the value would newly cover, against the axes chosen so far (value >= 0). */
static int gain(const space *s, pair_table *t, const choice *c, int axis_index, int value)
{
    int count = 0;
    for (int other = 0; other < s->axes; ++other) {
        if (other != axis_index && c->value[other] >= 0) {
            count += *pair(t, axis_index, value, other, c->value[other]) == PAIR_OPEN;
        }
    }
    return count;
}

/* Gives every axis without a value the one that covers most, ties broken at random. */
static int complete(space *s, pair_table *t, choice *c)
{
    int order[AXES], covered = 1;
    for (int i = 0; i < s->axes; ++i) {
        int at = random_below(s, i + 1);
        order[i] = order[at];
        order[at] = i;
    }
    for (int i = 0; i < s->axes; ++i) {
        int axis_index = order[i];
        if (c->value[axis_index] >= 0) {
            continue;
        }
        int best = -1, best_value = 0, offset = random_below(s, s->counts[axis_index]);
        for (int k = 0; k < s->counts[axis_index]; ++k) {
            int value = (k + offset) % s->counts[axis_index];
            int g = gain(s, t, c, axis_index, value);
            if (g > best) {
                best = g;
                best_value = value;
            }
        }
        c->value[axis_index] = (signed char)best_value;
        covered += best;
    }
    return covered;
}

/* For a pair that no try satisfied: the other axes at random. */
static void complete_at_random(space *s, choice *c)
{
    for (int a = 0; a < s->axes; ++a) {
        if (c->value[a] < 0) {
            c->value[a] = (signed char)random_below(s, s->counts[a]);
        }
    }
}

/* The best case found that contains the pair; false when there seems to be none. */
static bool find_case(space *s, pair_table *t, int a, int x, int b, int y, test_case *out, choice *out_choice)
{
    enum {
        GREEDY_TRIES = 24,
        RANDOM_TRIES = 200
    };
    int best = 0;
    for (int attempt = 0; attempt < GREEDY_TRIES + RANDOM_TRIES; ++attempt) {
        bool greedy = attempt < GREEDY_TRIES;
        if (!greedy && best > 0) {
            break;
        }
        choice c = {{0}};
        memset(c.value, -1, (size_t)s->axes);
        c.value[a] = (signed char)x;
        c.value[b] = (signed char)y;
        int covered = 1;
        if (greedy) {
            covered = complete(s, t, &c);
        } else {
            complete_at_random(s, &c);
        }
        test_case candidate;
        if (covered > best && case_of(&candidate, s, &c)) {
            best = covered;
            *out = candidate;
            *out_choice = c;
        }
    }
    return best > 0;
}

static void mark_covered(case_list *list, const space *s, pair_table *t, const choice *c)
{
    for (int a = 0; a < s->axes; ++a) {
        for (int b = a + 1; b < s->axes; ++b) {
            unsigned char *state = pair(t, a, c->value[a], b, c->value[b]);
            /* inputs that 8-bit keys alone have are asked for with caches only (add_caches) */
            const bool asked = s->axes < AXES || b == AXIS_CACHE || *state == PAIR_IMPOSSIBLE;
            list->pairs_covered += asked && *state != PAIR_COVERED;
            list->pairs_impossible -= *state == PAIR_IMPOSSIBLE;
            *state = PAIR_COVERED;
        }
    }
}

/* Covers one open pair by a new case, or finds it impossible. */
static void cover(case_list *list, space *s, pair_table *t, int a, int x, int b, int y)
{
    choice c;
    if (list->count < CASES_MAX && find_case(s, t, a, x, b, y, &list->items[list->count], &c)) {
        ++list->count;
        mark_covered(list, s, t, &c);
    } else if (list->count < CASES_MAX) {
        *pair(t, a, x, b, y) = PAIR_IMPOSSIBLE;
        ++list->pairs_impossible;
    }
}

static int index_of(const int64_t *values, int count, int64_t value)
{
    for (int i = 0; i < count; ++i) {
        if (values[i] == value) {
            return i;
        }
    }
    return -1;
}

static void add_choice(case_list *list, space *s, pair_table *t, const choice *c)
{
    if (list->count < CASES_MAX && case_of(&list->items[list->count], s, c)) {
        ++list->count;
        mark_covered(list, s, t, c);
    }
}

/* Decoding over the longest keys, where CTAs share a tile's keys, in the forms that differ there: as many CTAs as ever
 * do, batch entries of different key lengths, masks, groups of heads. Pairs alone do not promise these, since a window
 * or a mask may come with every long case. */
static void add_long_decoding(case_list *list, space *s, pair_table *t)
{
    const struct {
        int64_t q_len;
        signed char heads_place, mask_place;
        uint32_t flags;
    } forms[] = {{1, 1, 0, 0}, /* one head: the fewest tiles, so the most splits */
                 {1, 2, 0, ACR_KV_LENS},
                 {5, 3, 1, 0},
                 {5, 5, 2, 0}};
    const int kv_len = index_of(s->kv_lens, s->counts[AXIS_KV_LEN], LONG_KV_LEN);
    for (size_t i = 0; kv_len >= 0 && i < sizeof forms / sizeof forms[0]; i++) {
        const int q_len = index_of(s->q_lens, s->counts[AXIS_Q_LEN], forms[i].q_len);
        choice c = {{0}};
        c.value[AXIS_Q_LEN] = (signed char)q_len;
        c.value[AXIS_KV_LEN] = (signed char)kv_len;
        c.value[AXIS_HEADS] = forms[i].heads_place;
        c.value[AXIS_MASK] = forms[i].mask_place;
        for (int flags = 0; q_len >= 0 && flags < s->counts[AXIS_FLAGS]; flags++) {
            c.value[AXIS_FLAGS] = (signed char)flags;
            for (int cache = 0; cache < s->counts[AXIS_CACHE] && s->flags[flags] == forms[i].flags; cache++) {
                c.value[AXIS_CACHE] = (signed char)cache;
                if (cache == 0 || forms[i].flags & ACR_KV_LENS)
                    add_choice(list, s, t, &c);
            }
        }
    }
}

/* Of e4m3, what the narrower limit of reference.c is for: as many keys as the kernel takes, nothing hidden, and values
 * without a mean and with one. */
static void add_long_sums(case_list *list, const space *s)
{
    static const int64_t kv_lens[] = {LONG_KV_LEN, 4096, 2048, 1333};
    static const input_kind kinds[] = {INPUT_NORMAL, INPUT_SHIFTED_V};
    const int64_t dim = s->kernel->backend == ACR__CPU && s->kernel->qk_dim_max > 64 ? 64 : s->kernel->qk_dim_max;
    const double limit = s->kernel->backend == ACR__CPU ? CPU_CASE_WORK : CUDA_CASE_WORK;
    for (size_t kind = 0; kind < 2 && s->kernel->dtype == ACR_E4M3; ++kind) {
        bool found = false;
        for (size_t i = 0; i < sizeof kv_lens / sizeof kv_lens[0] && !found && list->count < CASES_MAX; ++i) {
            acr_problem p = ACR_PROBLEM_INIT;
            p.dtype = ACR_E4M3;
            p.batch = p.q_heads = p.kv_heads = 1;
            p.q_len = 256;
            p.kv_len = kv_lens[i];
            p.qk_dim = p.v_dim = dim;
            test_case *out = &list->items[list->count];
            out->inputs = kinds[kind];
            found = (double)(p.q_len * p.kv_len) * (double)(2 * dim) <= limit &&
                    acr_problem_canonical(&out->problem, &p) == ACR_OK &&
                    !acr__why_not(s->kernel, &out->problem, s->device);
            list->count += found;
        }
    }
}

/* A running maximum that begins late: see INPUT_LOWEST_KEYS. */
static void add_lowest_keys(case_list *list, const space *s)
{
    static const int64_t lengths[][2] = {{70, 256}, {70, 512}, {1, 256}, {70, 64}}; /* of queries, of keys */
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0] && list->count < CASES_MAX; ++i) {
        acr_problem p = ACR_PROBLEM_INIT;
        p.pass = s->kernel->pass;
        p.dtype = s->kernel->dtype;
        p.out_dtype = s->out_dtypes[0];
        p.batch = 1;
        p.q_heads = p.kv_heads = 2;
        p.q_len = lengths[i][0];
        p.kv_len = lengths[i][1];
        p.qk_dim = s->kernel->qk_dim_max;
        p.v_dim = s->kernel->v_dim_max;
        test_case *out = &list->items[list->count];
        out->inputs = INPUT_LOWEST_KEYS;
        if (acr_problem_canonical(&out->problem, &p) == ACR_OK && input_kind_fits(&out->problem, out->inputs) &&
            !acr__why_not(s->kernel, &out->problem, s->device)) {
            ++list->count;
            return;
        }
    }
}

/* What each cache other than the probes' does to every value of the other axes. */
static void add_caches(case_list *list, space *s, pair_table *t)
{
    const bool scales = s->kernel->kv_types & 1u << ACR_E4M3; /* of batch entries and heads, where keys have 8 bits */
    s->axes = AXES;
    s->counts[AXIS_INPUTS] = scales ? input_kind_count(ACR_E4M3) : s->counts[AXIS_INPUTS];
    for (int a = 0; a < AXIS_CACHE; ++a) {
        list->pairs += (size_t)(s->counts[a] * (s->counts[AXIS_CACHE] - 1));
        for (int x = 0; x < s->counts[a]; ++x) {
            for (int cache = 1; cache < s->counts[AXIS_CACHE]; ++cache) {
                if (*pair(t, a, x, AXIS_CACHE, cache) == PAIR_OPEN) {
                    cover(list, s, t, a, x, AXIS_CACHE, cache);
                }
            }
        }
    }
}

void cases_make(case_list *out, const acr__kernel *kernel, const acr__device *device, bool quick)
{
    space s;
    pair_table t = {{{{{PAIR_OPEN}}}}};
    *out = (case_list){.count = 0};
    set_axes(&s, kernel, device);
    if (s.counts[AXIS_FLAGS] == 0 || s.counts[AXIS_DIMS] == 0) {
        return;
    }
    for (int a = 0; a < s.axes; ++a) {
        for (int b = a + 1; b < s.axes; ++b) {
            out->pairs += (size_t)(s.counts[a] * s.counts[b]);
            for (int x = 0; x < s.counts[a]; ++x) {
                for (int y = 0; y < s.counts[b]; ++y) {
                    if (*pair(&t, a, x, b, y) == PAIR_OPEN) {
                        cover(out, &s, &t, a, x, b, y);
                    }
                }
            }
        }
    }
    add_long_decoding(out, &s, &t);
    add_long_sums(out, &s);
    add_lowest_keys(out, &s);
    const size_t plain = out->count;
    add_caches(out, &s, &t);
    if (quick && out->count > CASES_QUICK) {
        const size_t caches = out->count - plain < CASES_QUICK / 4 ? out->count - plain : CASES_QUICK / 4;
        memmove(&out->items[CASES_QUICK - caches], &out->items[plain], caches * sizeof *out->items);
        out->count = CASES_QUICK;
    }
}
