/* Caches on the cuda backend against the cpu backend: every line for GPUs that serves pages or keys of another type,
 * those that are not listed yet too (unlisted.def), on random calls: pages in no order and shared, numbers in the table
 * and rows behind the last key that name nothing or hold NaNs, lengths from none on, packed queries, scales of heads;
 * in the end an entry whose pages do not exist, beside which the others' rows stay right. Each plan's call is captured
 * into a graph while the device holds no lengths, offsets or pages, and the graph is replayed with some, and with
 * others again: what the host would read during the capture, or a kernel leave behind, shows. Of ACR_INVARIANT each
 * entry has the same bits alone, among fewer keys. Over the fake driver the PTX machine executes it.
 *
 *     caches KERNELS PROBLEM...      each line whose name has KERNELS in it, on the problems that it serves
 *
 * Prints each failure and then "N cases passed, M failed"; exits 0 when all passed and there were any. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "support.h"

typedef struct cache_case {
    acr_problem problem; /* canonical */
    acr__rows rows;
    void *host[ACR__BUFFERS];
    int64_t bytes[ACR__BUFFERS];
    generator g;
} cache_case;

static int64_t between(generator *g, int64_t least, int64_t most)
{
    return least + (int64_t)(next_u64(g) % (uint64_t)(most - least + 1));
}

/* ---- Inputs ---- */

static void fill_noise(cache_case *c, acr__buffer which, acr_dtype dtype)
{
    for (int64_t i = 0; i < c->bytes[which] / acr__dtype_bytes(dtype); i++)
        acr__store_element(dtype, c->host[which], i, next_normal(&c->g));
}

static void fill_lengths(cache_case *c)
{
    int32_t *lens = c->host[ACR__KV_LENS];
    for (int64_t b = 0; b < c->problem.batch; b++)
        lens[b] = (int32_t)(b == 0 ? c->problem.kv_len : b == 2 ? 0 : between(&c->g, 1, c->problem.kv_len));
}

static void fill_offsets(cache_case *c)
{
    int32_t *offsets = c->host[ACR__Q_OFFSETS];
    offsets[0] = 1;
    for (int64_t b = 0; b < c->problem.batch; b++)
        offsets[b + 1] = offsets[b] + (int32_t)between(&c->g, b == 1 ? 0 : 1, c->problem.q_len);
}

/* Every entry has pages of its own, in no order, but for the first one, which all share. */
static void fill_table(cache_case *c)
{
    const int64_t pages = c->rows.pages, stride = c->rows.table_stride, page = c->problem.page;
    const int32_t *lens = c->host[ACR__KV_LENS];
    int32_t *table = c->host[ACR__PAGE_TABLE], *order = malloc((size_t)pages * sizeof *order);
    int64_t next = 0;
    for (int64_t i = 0; i < pages; i++) {
        const int64_t at = between(&c->g, 0, i);
        order[i] = order[at];
        order[at] = (int32_t)i;
    }
    for (int64_t b = 0; b < c->problem.batch; b++)
        for (int64_t i = 0; i < stride && b * stride + i < c->bytes[ACR__PAGE_TABLE] / 4; i++)
            table[b * stride + i] = i * page >= lens[b]     ? (i % 2 ? -1 : INT32_MAX)
                                    : i == 0 && lens[0] > 0 ? order[pages - 1]
                                                            : order[next++];
    free(order);
}

/* Computed again value by value, in the PTX machine rows of more work than this take long. */
enum {
    HIDDEN_NAN_MAX = 10000
};

/* Keys or values: noise where some entry has a key, NaNs elsewhere; and NaN for the last value of the first entry,
 * which a mask hides from rows before the last. */
static void fill_pool(cache_case *c, acr__buffer which)
{
    const acr_problem *p = &c->problem;
    const acr__tensor t = acr__tensor_of(p, which, c->rows);
    const bool hides_nan = which == ACR__V && p->mask != ACR_MASK_NONE && p->kv_len * p->qk_dim <= HIDDEN_NAN_MAX;
    const int32_t *lens = c->host[ACR__KV_LENS], *table = c->host[ACR__PAGE_TABLE];
    memset(c->host[which], 0xff, (size_t)c->bytes[which]);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t j = 0; j < (lens ? lens[b] : p->kv_len); j++)
            for (int64_t h = 0; h < p->kv_heads; h++)
                for (int64_t d = 0; d < t.dim; d++)
                    acr__store_element(t.dtype, c->host[which],
                                       element_of(&t.strides, table ? table[b * c->rows.table_stride + j / p->page] : b,
                                                  h, table ? j % p->page : j, d),
                                       hides_nan && b == 0 && j == p->kv_len - 1 && h == 0 ? NAN : next_normal(&c->g));
}

static void fill_inputs(cache_case *c)
{
    if (c->host[ACR__KV_LENS])
        fill_lengths(c);
    if (c->host[ACR__Q_OFFSETS])
        fill_offsets(c);
    if (c->host[ACR__PAGE_TABLE])
        fill_table(c);
    fill_noise(c, ACR__Q, c->problem.dtype);
    fill_pool(c, ACR__K);
    if (c->host[ACR__V])
        fill_pool(c, ACR__V);
    for (acr__buffer i = ACR__K_SCALES; i <= ACR__V_SCALES; i++)
        for (int64_t at = 0; c->host[i] && at < c->problem.batch * c->problem.kv_heads; at++)
            ((float *)c->host[i])[at] = 0.5f + (float)between(&c->g, 0, 8) / 8.0f;
    for (acr__buffer i = ACR__O; i <= ACR__LSE; i++)
        if (c->host[i])
            memset(c->host[i], 0xff, (size_t)c->bytes[i]);
}

/* The entry whose table names pages that there are not, in the last replay. */
enum {
    SPOILT = 1
};

static void spoil_table(cache_case *c)
{
    const int64_t stride = c->rows.table_stride;
    int32_t *table = (int32_t *)c->host[ACR__PAGE_TABLE] + SPOILT * stride;
    for (int64_t i = 0; i * c->problem.page < ((int32_t *)c->host[ACR__KV_LENS])[SPOILT]; i++)
        table[i] = i % 3 == 0 ? (int32_t)c->rows.pages : i % 3 == 1 ? INT32_MIN : table[i];
}

/* What the spoilt entry's rows hold is left open: zeros take its place. */
static void forget_spoilt(const cache_case *c, void *o, float *lse)
{
    const acr_problem *p = &c->problem;
    const bool is_packed = p->flags & ACR_PACKED;
    const int32_t *offsets = c->host[ACR__Q_OFFSETS];
    const int64_t first = is_packed ? offsets[SPOILT] : 0, end = is_packed ? offsets[SPOILT + 1] : p->q_len;
    for (int64_t h = 0; h < p->q_heads; h++)
        for (int64_t row = first; row < end; row++) {
            for (int64_t d = 0; d < p->v_dim; d++)
                acr__store_element(p->out_dtype, o, element_of(&p->o, is_packed ? 0 : SPOILT, h, row, d), 0.0);
            if (lse)
                lse[is_packed ? h * c->rows.q + row : (SPOILT * p->q_heads + h) * p->q_len + row] = 0.0f;
        }
}

static cache_case make_case(const char *text)
{
    cache_case c = {.problem = canonical_of(text), .g = {.state = strlen(text)}};
    const acr_problem *p = &c.problem;
    const int64_t needed = acr__pages_of_entry(p), stride = needed ? needed + 2 : 0;
    c.rows = (acr__rows){p->flags & ACR_PACKED ? p->batch * p->q_len + 2 : p->q_len, p->kv_len,
                         needed ? p->batch * needed + 1 : 0, stride};
    for (acr__buffer i = 0; i < ACR__BUFFERS; i++) {
        const bool scales = p->kv_dtype == ACR_E4M3 && (i == ACR__K_SCALES || i == ACR__V_SCALES);
        if (!acr__buffer_is_wanted(p, i) && !scales)
            continue;
        c.bytes[i] = acr__buffer_bytes(p, i, c.rows);
        c.host[i] = calloc(1, (size_t)c.bytes[i]);
        if (!c.host[i])
            abort();
    }
    return c;
}

static void free_case(cache_case *c)
{
    for (int i = 0; i < ACR__BUFFERS; i++)
        free(c->host[i]);
}

/* ---- Executions ---- */

static acr_buffers buffers_of(const cache_case *c, void *const memory[ACR__BUFFERS])
{
    acr_buffers b = ACR_BUFFERS_INIT;
    for (int i = 0; i < ACR__BUFFERS; i++)
        if (memory[i])
            acr__set_pointer_at(&b, acr__buffer_fields[i].in_buffers, memory[i]);
    b.pages = c->rows.pages;
    b.table_stride = c->rows.table_stride;
    b.q_total = c->problem.flags & ACR_PACKED ? c->rows.q : 0;
    return b;
}

/* A plan and memory of its device. */
typedef struct executor {
    acr_ctx *ctx;
    acr_plan *plan;
    void *memory[ACR__BUFFERS], *workspace;
    acr_buffers buffers;
    acr__graph *graph; /* NULL: executions are calls */
} executor;

static acr__backend_device *device_of(const executor *e)
{
    return acr__ctx_backend_device(e->ctx);
}

static void start_executor(executor *e, acr_ctx *ctx, const cache_case *c, const acr__kernel *kernel)
{
    *e = (executor){.ctx = ctx};
    const acr__backend *backend = device_of(e)->backend;
    assert_ok(kernel ? acr__plan_create_forced(&e->plan, ctx, &c->problem, kernel)
                     : acr_plan_create(&e->plan, ctx, &c->problem, ACR_ESTIMATE));
    for (int i = 0; i < ACR__BUFFERS; i++)
        if (c->host[i])
            assert_ok(backend->mem_alloc(device_of(e), (size_t)c->bytes[i], &e->memory[i]));
    e->buffers = buffers_of(c, e->memory);
    const size_t bytes = acr_plan_workspace(e->plan);
    if (bytes > 0) {
        assert_ok(backend->mem_alloc(device_of(e), bytes, &e->workspace));
        assert_ok(backend->mem_fill(device_of(e), e->workspace, 0, bytes));
    }
}

static acr_status enqueue(void *arg, void *stream)
{
    const executor *e = arg;
    return acr_execute(e->plan, &e->buffers, e->workspace, acr_plan_workspace(e->plan), stream);
}

/* From here on executions are replays of a graph. Its capture finds numbers that name nothing in the case's memory. */
static void capture(executor *e, const cache_case *c)
{
    static const acr__buffer read_by_device[] = {ACR__KV_LENS, ACR__Q_OFFSETS, ACR__PAGE_TABLE};
    const acr__backend *backend = device_of(e)->backend;
    for (size_t i = 0; i < COUNT_OF(read_by_device); i++)
        if (e->memory[read_by_device[i]])
            assert_ok(backend->mem_fill(device_of(e), e->memory[read_by_device[i]], 0xff,
                                        (size_t)c->bytes[read_by_device[i]]));
    assert_ok(backend->timing->graph_record(&e->graph, device_of(e), enqueue, e, 1));
}

/* With the case's inputs; its outputs come back to `o` and `lse`. */
static void execute(executor *e, const cache_case *c, void *o, void *lse)
{
    const acr__backend *backend = device_of(e)->backend;
    for (int i = 0; i < ACR__BUFFERS; i++)
        if (c->host[i])
            assert_ok(backend->mem_upload(device_of(e), e->memory[i], c->host[i], (size_t)c->bytes[i]));
    assert_ok(e->graph ? backend->timing->graph_time(e->graph, 0, NULL) : enqueue(e, NULL));
    assert_ok(backend->synchronize(device_of(e)));
    assert_ok(backend->mem_download(device_of(e), o, e->memory[ACR__O], (size_t)c->bytes[ACR__O]));
    if (lse)
        assert_ok(backend->mem_download(device_of(e), lse, e->memory[ACR__LSE], (size_t)c->bytes[ACR__LSE]));
}

static void end_executor(executor *e)
{
    if (e->graph)
        device_of(e)->backend->timing->graph_free(e->graph);
    for (int i = 0; i < ACR__BUFFERS; i++)
        if (e->memory[i])
            device_of(e)->backend->mem_free(device_of(e), e->memory[i]);
    if (e->workspace)
        device_of(e)->backend->mem_free(device_of(e), e->workspace);
    acr_plan_destroy(e->plan);
}

/* ---- Verdicts ---- */

/* The greatest difference of two outputs, which must be NaN, or infinite, in the same places. */
static double greatest_difference(acr_dtype dtype, const void *a, const void *b, int64_t elements)
{
    double greatest = 0.0;
    for (int64_t i = 0; i < elements; i++) {
        const double x = acr__load_element(dtype, a, i), y = acr__load_element(dtype, b, i);
        if (isnan(x) != isnan(y) || (isinf(x) && x != y))
            return INFINITY;
        if (isfinite(x) && isfinite(y))
            greatest = fmax(greatest, fabs(x - y));
    }
    return greatest;
}

/* Outputs are averages of normal numbers. */
static double tolerance_of(const cache_case *c)
{
    const double rounding = c->problem.out_dtype == ACR_BF16 ? 0x1p-8 : 0x1p-11;
    return 12.0 * rounding;
}

static bool runs_alike(cache_case *c, acr_ctx *cpu, acr_ctx *cuda, const acr__kernel *kernel, const char *text)
{
    executor on_cpu, on_cuda;
    bool alike = true;
    void *o[2] = {malloc((size_t)c->bytes[ACR__O]), malloc((size_t)c->bytes[ACR__O])};
    void *lse[2] = {NULL, NULL};
    for (int i = 0; i < 2 && c->host[ACR__LSE]; i++)
        lse[i] = malloc((size_t)c->bytes[ACR__LSE]);
    start_executor(&on_cpu, cpu, c, NULL);
    start_executor(&on_cuda, cuda, c, kernel);
    capture(&on_cuda, c);
    const int can_spoil = c->host[ACR__PAGE_TABLE] && c->problem.batch > SPOILT;
    for (int replay = 0; replay < 2 + can_spoil; replay++) {
        fill_inputs(c);
        if (replay == 2)
            spoil_table(c);
        execute(&on_cpu, c, o[0], lse[0]);
        execute(&on_cuda, c, o[1], lse[1]);
        for (int i = 0; replay == 2 && i < 2; i++)
            forget_spoilt(c, o[i], lse[i]);
        const acr_dtype type = c->problem.out_dtype;
        const double apart = greatest_difference(type, o[0], o[1], c->bytes[ACR__O] / acr__dtype_bytes(type)),
                     lse_apart = lse[0] ? greatest_difference(ACR_F32, lse[0], lse[1], c->bytes[ACR__LSE] / 4) : 0.0;
        if (apart > tolerance_of(c) || lse_apart > 0x1p-10) {
            printf("FAIL %s %s, replay %d: outputs are up to %g apart, log-sum-exps %g\n", kernel->name, text, replay,
                   apart, lse_apart);
            alike = false;
        }
    }
    end_executor(&on_cpu);
    end_executor(&on_cuda);
    for (int i = 0; i < 2; i++) {
        free(o[i]);
        free(lse[i]);
    }
    return alike;
}

/* An entry of the case as a problem of its own, with as many keys as it has and a few more. Its buffers are the case's,
 * but for the outputs. */
static cache_case entry_alone(const cache_case *c, int64_t entry)
{
    cache_case alone = *c;
    acr_problem *p = &alone.problem;
    p->batch = 1;
    p->kv_len = ((int32_t *)c->host[ACR__KV_LENS])[entry] + p->page;
    const int64_t needed = acr__pages_of_entry(p);
    alone.rows.table_stride = needed;
    const int64_t scales = entry * p->kv_heads * 4, table = entry * c->rows.table_stride * 4;
    const struct {
        acr__buffer which;
        int64_t at;
    } moved[] = {{ACR__Q, entry * p->q.batch * acr__dtype_bytes(p->dtype)},
                 {ACR__KV_LENS, entry * 4},
                 {ACR__PAGE_TABLE, table},
                 {ACR__K_SCALES, scales},
                 {ACR__V_SCALES, scales}};
    for (size_t i = 0; i < COUNT_OF(moved); i++)
        if (c->host[moved[i].which]) {
            alone.host[moved[i].which] = (char *)c->host[moved[i].which] + moved[i].at;
            alone.bytes[moved[i].which] =
                moved[i].which == ACR__PAGE_TABLE ? needed * 4 : acr__buffer_bytes(p, moved[i].which, alone.rows);
        }
    alone.bytes[ACR__O] = p->q_heads * p->q_len * p->v_dim * acr__dtype_bytes(p->out_dtype);
    alone.host[ACR__LSE] = NULL;
    p->flags &= ~(uint32_t)ACR_WANT_LSE;
    return alone;
}

/* Of ACR_INVARIANT: whether each entry has the same bits alone. */
static bool is_invariant(cache_case *c, acr_ctx *cuda, const acr__kernel *kernel, const char *text)
{
    executor all, one;
    char *together = malloc((size_t)c->bytes[ACR__O]), *alone = malloc((size_t)c->bytes[ACR__O]);
    bool same = true;
    start_executor(&all, cuda, c, kernel);
    fill_inputs(c);
    void *lse = c->host[ACR__LSE] ? malloc((size_t)c->bytes[ACR__LSE]) : NULL;
    execute(&all, c, together, lse);
    end_executor(&all);
    for (int64_t b = 0; b < c->problem.batch; b++) {
        cache_case entry = entry_alone(c, b);
        if (entry.problem.kv_len == entry.problem.page) /* no keys */
            continue;
        start_executor(&one, cuda, &entry, kernel);
        execute(&one, &entry, alone, NULL);
        end_executor(&one);
        if (memcmp(together + b * entry.bytes[ACR__O], alone, (size_t)entry.bytes[ACR__O]) != 0) {
            printf("FAIL %s %s: entry %lld has other bits alone\n", kernel->name, text, (long long)b);
            same = false;
        }
    }
    free(together);
    free(alone);
    free(lse);
    return same;
}

static acr_ctx *open_cuda(void)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    acr_ctx *ctx = NULL;
    options.backend = "cuda";
    assert_ok(acr_ctx_create(&ctx, &options));
    return ctx;
}

int main(int argc, char **argv)
{
    acr_ctx *cpu = cpu_ctx(2), *cuda = open_cuda();
    int passed = 0, failed = 0;
    for (int at = 2; at < argc; at++) {
        cache_case c = make_case(argv[at]);
        for (size_t i = 0; i < acr__kernel_count; i++) {
            const acr__kernel *kernel = acr__kernels[i];
            if (kernel->backend != ACR__CUDA || !strstr(kernel->name, argv[1]) ||
                acr__why_not(kernel, &c.problem, &acr__ctx_backend_device(cuda)->device))
                continue;
            bool right = runs_alike(&c, cpu, cuda, kernel, argv[at]);
            if (c.problem.flags & ACR_INVARIANT)
                right &= is_invariant(&c, cuda, kernel, argv[at]);
            if (right)
                passed++;
            else
                failed++;
            fflush(stdout);
        }
        free_case(&c);
    }
    acr_ctx_destroy(cpu);
    acr_ctx_destroy(cuda);
    printf("%d cases passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}
