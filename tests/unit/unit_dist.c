/* libacromion_nccl over the fake NCCL, on the CPU: every schedule against one rank over random problems, the same bits
 * twice, what is refused, and ranks that are missing, end or disagree. Ranks are threads; one test has processes.
 *   unit_dist FAKE_NCCL [PROBLEMS]        on the CPU
 *   unit_dist FAKE_NCCL PROBLEMS cuda     the side of CUDA, by the fake driver (ptxvm/driver/fake_driver.h) */
#include "support.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dist/group.h"
#include "dist/shards.h"
#include "ptxvm/driver/fake_driver.h"

static const char *library;
static int problems = 40;
static const char *backend = "cpu";
static acr_transfers transfers; /* that ranks ask for */
static int are_ranks_processes; /* not threads */
static int are_calls_captured;  /* executions are captured into a graph, which is launched */

enum {
    RANKS_MAX = 8,
    LIMIT_MS = 120000, /* only a hang takes so long */
    SHORT_MS = 300     /* for ranks that never come */
};

/* ---- Ranks that are threads -------------------------------------------------------------------------------------- */

typedef struct rank_args {
    const acr_group_id *id;
    int rank, ranks;
    uint32_t timeout_ms;
    void *shared;
    acr_status status;
    char text[512];
    acr_ctx *ctx;
    acr_group *group;
    acr_status (*act)(struct rank_args *r);
    pthread_t thread;
    pid_t process;
} rank_args;

static acr_status note(rank_args *r, acr_status status)
{
    r->status = status;
    snprintf(r->text, sizeof r->text, "%s", status == ACR_OK ? "" : acr_group_last_error());
    return status;
}

static acr_ctx *one_thread_ctx(void)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    acr_ctx *ctx = NULL;
    options.backend = backend;
    options.threads = strcmp(backend, "cpu") == 0;
    return acr_ctx_create(&ctx, &options) == ACR_OK ? ctx : NULL;
}

static void *rank_main(void *arg)
{
    rank_args *r = arg;
    acr_group_options options = ACR_GROUP_OPTIONS_INIT;
    options.rank = r->rank;
    options.ranks = r->ranks;
    options.id = r->id;
    options.library = library;
    options.timeout_ms = r->timeout_ms;
    options.transfers = transfers;
    r->ctx = one_thread_ctx();
    if (r->ctx && note(r, acr_group_create(&r->group, r->ctx, &options)) == ACR_OK)
        note(r, r->act(r));
    acr_group_destroy(r->group);
    acr_ctx_destroy(r->ctx);
    return NULL;
}

static void run_ranks(rank_args *ranks, int count, uint32_t timeout_ms, acr_status (*act)(rank_args *r), void *shared)
{
    acr_group_id id;
    assert_int_equal(acr_group_id_create(&id, library), ACR_OK);
    for (int i = 0; i < count; i++) {
        ranks[i] = (rank_args){.id = &id,
                               .rank = i,
                               .ranks = count,
                               .timeout_ms = timeout_ms,
                               .shared = shared,
                               .act = act,
                               .status = ACR_NO_DEVICE};
        if (are_ranks_processes && (ranks[i].process = fork()) == 0) {
            rank_main(&ranks[i]);
            _exit(0);
        }
        if (!are_ranks_processes)
            assert_int_equal(pthread_create(&ranks[i].thread, NULL, rank_main, &ranks[i]), 0);
    }
    for (int i = 0; i < count; i++)
        if (are_ranks_processes)
            waitpid(ranks[i].process, NULL, 0);
        else
            pthread_join(ranks[i].thread, NULL);
}

/* Memory that ranks write which may be processes. */
static void *shared_block(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

static void assert_all(const rank_args *ranks, int count, acr_status status, const char *fragment)
{
    for (int i = 0; i < count; i++)
        if (ranks[i].status != status || !strstr(ranks[i].text, fragment))
            fail_msg("rank %d: status %d (%s), not %d with \"%s\"", i, (int)ranks[i].status, ranks[i].text, (int)status,
                     fragment);
}

/* ---- Shards of a whole problem ----------------------------------------------------------------------------------- */

typedef struct whole {
    tensors t; /* its o and lse are those of one rank */
    float sinks[16];
    acr_schedule schedule;
    acr_placement placement;
    void *o[2]; /* put together from the ranks, of two executions */
    float *lse[2];
    const char *text;
} whole;

static size_t bytes_of(acr_dtype dtype)
{
    return dtype == ACR_F32 ? 4 : dtype == ACR_E4M3 ? 1 : 2;
}

/* Copies a rank's rows out of a whole tensor or back. */
static void copy_rows(const whole *w, char *all, char *part, int64_t heads, int64_t len, size_t row_bytes,
                      acr_layout layout, const rank_args *r, int to_part)
{
    acr_rows rows[2];
    if (acr_shard_rows(rows, len, r->ranks, r->rank, w->placement) != ACR_OK)
        return;
    const int64_t held = rows[0].count + rows[1].count;
    for (int64_t b = 0; b < w->t.problem.batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < held; i++) {
                const int64_t at = i < rows[0].count ? rows[0].first + i : rows[1].first + i - rows[0].count;
                char *a = all + (size_t)(layout == ACR_BHSD ? (b * heads + h) * len + at : (b * len + at) * heads + h) *
                                    row_bytes,
                     *p =
                         part + (size_t)(layout == ACR_BHSD ? (b * heads + h) * held + i : (b * held + i) * heads + h) *
                                    row_bytes;
                memcpy(to_part ? p : a, to_part ? a : p, row_bytes);
            }
}

static void *block(size_t bytes)
{
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

/* Memory of the rank's device. That of the fake driver can be read and written here, too. */
static void *device_block(const rank_args *r, size_t bytes)
{
    const dist_device *device = &r->group->device;
    void *memory = NULL;
    if (dist_enter(device) == ACR_OK) {
        if (dist_alloc(device, (bytes + 63) / 64 * 64, &memory) != ACR_OK)
            memory = NULL;
        dist_leave(device);
    }
    return memory;
}

static void device_free(const rank_args *r, void *memory)
{
    const dist_device *device = &r->group->device;
    if (dist_enter(device) == ACR_OK) {
        dist_free(device, memory);
        dist_leave(device);
    }
}

/* What a ring's plan says of its partial results. On a GPU lines for sinks write no float32. */
static const char *parts_of(const acr_problem *p)
{
    if (p->dtype == ACR_E4M3)
        return p->out_dtype == ACR_F16 ? "partial results in f16\n" : "partial results in bf16\n";
    if (p->flags & ACR_SINKS && strcmp(backend, "cuda") == 0)
        return "partial results in f16, not in f32: rank 0: ";
    return "partial results in f32\n";
}

/* What a plan of several ranks says of the way that keys and values go. */
static const char *way_of(void)
{
    if (strcmp(backend, "cpu") == 0)
        return "\ntransfers by NCCL: rank 0: the device is the CPU";
    return transfers == ACR_TRANSFERS_NCCL ? "\ntransfers by NCCL: rank 0: options.transfers is ACR_TRANSFERS_NCCL"
                                           : "\ntransfers by copy engines";
}

/* ---- The fake driver --------------------------------------------------------------------------------------------- */

static void *driver_symbol(const char *name)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *symbol = driver ? dlsym(driver, name) : NULL;
    assert_non_null(symbol);
    dlclose(driver); /* the group's device holds it */
    return symbol;
}

static int call_driver(const char *name, int version, void *a, void *b, void *c)
{
    int (*get)(const char *, void **, int, uint64_t, int *), (*entry)(void *, void *, void *);
    void *symbol = driver_symbol("cuGetProcAddress_v2"), *address = NULL;
    int found = 0;
    memcpy(&get, &symbol, sizeof get);
    assert_int_equal(get(name, &address, version, 1, &found), 0);
    memcpy(&entry, &address, sizeof entry);
    return entry(a, b, c);
}

/* Executes by a graph on a stream of its own, waits, and frees both. */
static acr_status execute_captured(rank_args *r, acr_group_plan *plan, const acr_buffers *b)
{
    const dist_device *device = &r->group->device;
    void *stream = NULL, *graph = NULL, *exec = NULL;
    acr_status status = dist_enter(device);
    if (status != ACR_OK)
        return status;
    int wrong = call_driver("cuStreamCreate", 2000, &stream, NULL, NULL) ||
                call_driver("cuStreamBeginCapture", 10010, stream, (void *)1, NULL);
    status = acr_group_execute(plan, b, stream);
    wrong = wrong || call_driver("cuStreamEndCapture", 10000, stream, &graph, NULL) ||
            call_driver("cuGraphInstantiateWithFlags", 11040, &exec, graph, NULL);
    for (int i = 0; i < 2 && status == ACR_OK && !wrong; i++) /* both before any waiting */
        wrong = call_driver("cuGraphLaunch", 10000, exec, stream, NULL);
    if (status == ACR_OK && !wrong)
        status = acr_group_wait(r->group, stream, LIMIT_MS);
    wrong = wrong || call_driver("cuGraphExecDestroy", 10000, exec, NULL, NULL) ||
            call_driver("cuGraphDestroy", 10000, graph, NULL, NULL) ||
            call_driver("cuStreamDestroy", 4000, stream, NULL, NULL);
    dist_leave(device);
    return wrong ? ACR_FORMAT : status;
}

static acr_status execute_and_wait(rank_args *r, acr_group_plan *plan, const acr_buffers *b)
{
    if (are_calls_captured)
        return execute_captured(r, plan, b);
    const acr_status status = acr_group_execute(plan, b, NULL);
    return status == ACR_OK ? acr_group_wait(r->group, NULL, LIMIT_MS) : status;
}

static acr_status execute_shard(rank_args *r)
{
    whole *w = r->shared;
    const acr_problem *p = &w->t.problem;
    const size_t in = bytes_of(p->dtype), out = bytes_of(p->out_dtype);
    acr_problem given = *p;
    acr_group_plan *plan = NULL;
    acr_status status = acr_group_plan_create(&plan, r->group, &given, w->schedule, w->placement, ACR_ESTIMATE);
    if (status != ACR_OK)
        return status;
    if (strstr(acr_group_plan_text(plan), "ring over") && !strstr(acr_group_plan_text(plan), parts_of(p))) {
        print_message("%s: %s, not %s\n", w->text, acr_group_plan_text(plan), parts_of(p));
        acr_group_plan_destroy(plan);
        return ACR_FORMAT;
    }
    if (r->ranks > 1 && !strstr(acr_group_plan_text(plan), way_of())) {
        print_message("%s: %s, not %s\n", w->text, acr_group_plan_text(plan), way_of());
        acr_group_plan_destroy(plan);
        return ACR_FORMAT;
    }
    char *q = device_block(r, w->t.q_bytes), *k = device_block(r, w->t.k_bytes), *v = device_block(r, w->t.v_bytes),
         *o = device_block(r, w->t.o_bytes);
    float *lse = device_block(r, (size_t)(p->batch * p->q_heads * p->q_len) * 4),
          *sinks = device_block(r, sizeof w->sinks);
    memcpy(sinks, w->sinks, sizeof w->sinks);
    copy_rows(w, w->t.q, q, p->q_heads, p->q_len, (size_t)p->qk_dim * in, p->layout, r, 1);
    copy_rows(w, w->t.k, k, p->kv_heads, p->kv_len, (size_t)p->qk_dim * in, p->layout, r, 1);
    copy_rows(w, w->t.v, v, p->kv_heads, p->kv_len, (size_t)p->v_dim * in, p->layout, r, 1);
    for (int turn = 0; turn < 2 && status == ACR_OK; turn++) {
        acr_buffers b = ACR_BUFFERS_INIT;
        b.q = q;
        b.k = k;
        b.v = v;
        b.o = o;
        b.lse = p->flags & ACR_WANT_LSE ? lse : NULL;
        b.sinks = p->flags & ACR_SINKS ? sinks : NULL;
        status = execute_and_wait(r, plan, &b);
        copy_rows(w, w->o[turn], o, p->q_heads, p->q_len, (size_t)p->v_dim * out, p->layout, r, 0);
        if (p->flags & ACR_WANT_LSE)
            copy_rows(w, (char *)w->lse[turn], (char *)lse, p->q_heads, p->q_len, 4, ACR_BHSD, r, 0);
    }
    void *const made[] = {q, k, v, o, lse, sinks};
    for (size_t i = 0; i < COUNT_OF(made); i++)
        device_free(r, made[i]);
    acr_group_plan_destroy(plan);
    return status;
}

/* Of values up to `largest`: roundings of the result and of one rank's, and what kernels lose that weigh the same keys
 * in parts; where parts have 16 bits, theirs. */
static double tolerance_of(const acr_problem *p, double largest)
{
    const int narrow_parts = p->dtype == ACR_E4M3 || strcmp(backend, "cpu") != 0;
    if (p->dtype == ACR_F32)
        return largest * 4e-6;
    if (p->out_dtype == ACR_F32)
        return largest * (p->dtype == ACR_F16 ? 1e-5 : 0x1p-7); /* bf16: products of weights in bf16 */
    return largest * (p->out_dtype == ACR_F16 ? 0x1p-10 : 0x1p-7) * (narrow_parts ? 2 : 1);
}

static double largest_value(const whole *w)
{
    const acr_problem *p = &w->t.problem;
    double largest = 0;
    for (int64_t i = 0; i < p->batch * p->kv_heads * p->kv_len * p->v_dim; i++)
        largest = fmax(largest, fabs(acr__load_element(p->dtype, w->t.v, i)));
    return largest;
}

static void compare(const whole *w)
{
    const acr_problem *p = &w->t.problem;
    const int64_t elements = p->batch * p->q_heads * p->q_len * p->v_dim, rows = p->batch * p->q_heads * p->q_len;
    const double tolerance = tolerance_of(p, largest_value(w));
    if (memcmp(w->o[0], w->o[1], w->t.o_bytes) != 0)
        fail_msg("%s: two executions differ", w->text);
    for (int64_t i = 0; i < elements; i++) {
        const double want = acr__load_element(p->out_dtype, w->t.o, i),
                     got = acr__load_element(p->out_dtype, w->o[0], i);
        if (!(fabs(want - got) <= tolerance))
            fail_msg("%s: o[%lld] is %g, one rank says %g", w->text, (long long)i, got, want);
    }
    for (int64_t i = 0; i < rows && (p->flags & ACR_WANT_LSE); i++) {
        if (w->lse[0][i] != w->lse[1][i])
            fail_msg("%s: two executions differ in lse", w->text);
        if (!(fabsf(w->lse[0][i] - w->t.lse[i]) <= 2e-5f * (1 + fabsf(w->t.lse[i]))))
            fail_msg("%s: lse[%lld] is %g, one rank says %g", w->text, (long long)i, (double)w->lse[0][i],
                     (double)w->t.lse[i]);
    }
}

/* Squares of errors against float32 throughout: of one rank, and of several by the ring. */
static struct {
    double one, several;
    int problems;
} f16_errors;

static void *floats_of(const void *values, size_t bytes)
{
    float *all = block(2 * bytes);
    for (size_t i = 0; i < bytes / 2; i++)
        all[i] = (float)acr__load_element(ACR_F16, values, (int64_t)i);
    return all;
}

static void add_errors(acr_ctx *ctx, const whole *w)
{
    const acr_problem *p = &w->t.problem;
    acr_problem wide = *p;
    acr_buffers b = w->t.buffers;
    wide.dtype = wide.out_dtype = ACR_F32;
    void *const memory[] = {floats_of(w->t.q, w->t.q_bytes), floats_of(w->t.k, w->t.k_bytes),
                            floats_of(w->t.v, w->t.v_bytes), block(2 * w->t.o_bytes)};
    b.q = memory[0];
    b.k = memory[1];
    b.v = memory[2];
    b.o = memory[3];
    assert_ok(acr_forward(ctx, &wide, &b, NULL));
    for (int64_t i = 0; i < p->batch * p->q_heads * p->q_len * p->v_dim; i++) {
        const double right = acr__load_element(ACR_F32, b.o, i), one = acr__load_element(ACR_F16, w->t.o, i) - right,
                     several = acr__load_element(ACR_F16, w->o[0], i) - right;
        f16_errors.one += one * one;
        f16_errors.several += several * several;
    }
    f16_errors.problems++;
    for (size_t i = 0; i < COUNT_OF(memory); i++)
        free(memory[i]);
}

static void check_problem(acr_ctx *ctx, const char *problem, int count, acr_schedule schedule, acr_placement placement,
                          uint64_t seed)
{
    rank_args *ranks = shared_block(RANKS_MAX * sizeof *ranks);
    char text[512];
    const acr_problem p = canonical_of(problem);
    whole w = {.t = tensors_make(&p, seed), .schedule = schedule, .placement = placement, .text = text};
    generator g = {seed};
    snprintf(text, sizeof text, "%s over %d ranks, schedule %d, placement %d, seed %d", problem, count, (int)schedule,
             (int)placement, (int)seed);
    for (size_t i = 0; i < COUNT_OF(w.sinks); i++)
        w.sinks[i] = (float)next_normal(&g);
    if (p.flags & ACR_SINKS)
        w.t.buffers.sinks = w.sinks;
    assert_ok(acr_forward(ctx, &p, &w.t.buffers, NULL));
    for (int i = 0; i < 2; i++) {
        w.o[i] = shared_block(w.t.o_bytes);
        w.lse[i] = shared_block((size_t)(p.batch * p.q_heads * p.q_len) * 4);
    }
    run_ranks(ranks, count, LIMIT_MS, execute_shard, &w);
    for (int i = 0; i < count; i++)
        if (ranks[i].status != ACR_OK)
            fail_msg("%s: rank %d: status %d: %s", text, i, (int)ranks[i].status, ranks[i].text);
    compare(&w);
    if (p.dtype == ACR_F16 && p.out_dtype == ACR_F16 && w.schedule != ACR_GATHER && !p.window_left)
        add_errors(ctx, &w);
    for (int i = 0; i < 2; i++) {
        munmap(w.o[i], w.t.o_bytes);
        munmap(w.lse[i], (size_t)(p.batch * p.q_heads * p.q_len) * 4);
    }
    munmap(ranks, RANKS_MAX * sizeof *ranks);
    tensors_free(&w.t);
}

static int below(generator *g, int end)
{
    return (int)(next_u64(g) % (uint64_t)end);
}

/* ---- Every schedule is one rank ---------------------------------------------------------------------------------- */

static void random_problems_equal_one_rank(void **state)
{
    (void)state;
    static const char *const dtypes[] = {"f32", "f16", "bf16", "e4m3"}, *const masks[] = {"", ":causal", ":causal-tl"};
    static const int dims[] = {8, 16, 20, 40, 64};
    acr_ctx *ctx = cpu_ctx(1);
    for (int i = 0; i < problems; i++) {
        generator g = {(uint64_t)i + 1};
        for (int j = 0; j < 4; j++)
            next_u64(&g);
        const int ranks = 2 + i % 3, kv_heads = 1 + below(&g, 5), mask = below(&g, 3), q_len = 16 + below(&g, 120);
        const int kv_len = below(&g, 3) ? q_len : q_len + below(&g, 60);
        char problem[256], window[32] = "";
        const char *dtype;
        if (mask && below(&g, 3) == 0)
            snprintf(window, sizeof window, ":win%d", 1 + below(&g, 60));
        dtype = dtypes[below(&g, 4)];
        snprintf(problem, sizeof problem, "%s:b%d:h%d/%d:s%d/%d:d%d%s%s%s%s%s%s%s", dtype, 1 + below(&g, 2),
                 kv_heads * (1 + below(&g, 3)), kv_heads, q_len, kv_len, dims[below(&g, 5)], masks[mask], window,
                 below(&g, 2) ? ":lse" : "", below(&g, 2) ? ":bshd" : "", below(&g, 3) ? "" : ":sinks",
                 below(&g, 4) ? "" : ":cap20", strstr(dtype, "f16") && below(&g, 4) == 0 ? ":of32" : "");
        const acr_problem p = canonical_of(problem);
        const acr_schedule schedule = p.window_left || below(&g, 2) ? ACR_SCHEDULE_AUTO : ACR_GATHER;
        check_problem(ctx, problem, ranks, schedule, below(&g, 2) ? ACR_ZIGZAG : ACR_CONTIGUOUS, (uint64_t)i);
    }
    acr_ctx_destroy(ctx);
    assert_true(f16_errors.problems > 0);
    print_message("f16 by the ring, %d problems: the root mean square of errors is %.4f times one rank's\n",
                  f16_errors.problems, sqrt(f16_errors.several / f16_errors.one));
    assert_true(f16_errors.several <= 1.02 * f16_errors.one);
}

static void one_two_three_four_and_eight_ranks(void **state)
{
    (void)state;
    static const int counts[] = {1, 2, 3, 4, 8};
    acr_ctx *ctx = cpu_ctx(1);
    for (size_t i = 0; i < COUNT_OF(counts); i++)
        for (int schedule = ACR_RING; schedule <= ACR_GATHER; schedule++)
            for (int placement = ACR_CONTIGUOUS; placement <= ACR_ZIGZAG; placement++) {
                check_problem(ctx, "f32:b1:h4/2:s64:d16:causal:lse", counts[i], (acr_schedule)schedule,
                              (acr_placement)placement, 7);
                check_problem(ctx, "f32:b2:h2:s50/70:d16", counts[i], (acr_schedule)schedule, (acr_placement)placement,
                              8);
            }
    acr_ctx_destroy(ctx);
}

/* ---- Decoding ---------------------------------------------------------------------------------------------------- */

enum {
    CACHE_B = 2,
    CACHE_H = 4,
    CACHE_KV = 2,
    CACHE_D = 16,
    CACHE_KEYS = 30 /* room of a rank */
};

typedef struct cache {
    float q[CACHE_B][CACHE_H][CACHE_D], k[RANKS_MAX][CACHE_B][CACHE_KV][CACHE_KEYS][CACHE_D],
        v[RANKS_MAX][CACHE_B][CACHE_KV][CACHE_KEYS][CACHE_D];
    int32_t lens[RANKS_MAX][CACHE_B];
    float sinks[CACHE_H], o[RANKS_MAX][CACHE_B][CACHE_H][CACHE_D], lse[RANKS_MAX][CACHE_B][CACHE_H];
} cache;

static acr_status decode(rank_args *r)
{
    cache *shared = r->shared, *c = device_block(r, sizeof *c);
    memcpy(c, shared, sizeof *c);
    acr_problem p = problem_of("f32:b2:h4/2:s1/30:d16:causal:kvlens:lse:sinks");
    acr_group_plan *plan = NULL;
    acr_buffers b = ACR_BUFFERS_INIT;
    b.q = c->q;
    b.k = c->k[r->rank];
    b.v = c->v[r->rank];
    b.o = c->o[r->rank];
    b.lse = &c->lse[r->rank][0][0];
    b.kv_lens = c->lens[r->rank];
    b.sinks = c->sinks;
    acr_status status = acr_group_plan_create(&plan, r->group, &p, ACR_SHARDED_KEYS, ACR_CONTIGUOUS, ACR_ESTIMATE);
    if (status == ACR_OK)
        status = acr_group_execute(plan, &b, NULL);
    if (status == ACR_OK)
        status = acr_group_wait(r->group, NULL, LIMIT_MS);
    memcpy(shared->o[r->rank], c->o[r->rank], sizeof c->o[0]);
    memcpy(shared->lse[r->rank], c->lse[r->rank], sizeof c->lse[0]);
    acr_group_plan_destroy(plan);
    device_free(r, c);
    return status;
}

/* Attention of a row over all keys that ranks hold, in double. */
static double decoded(const cache *c, int ranks, int b, int h, int d, double *lse)
{
    double sum = exp((double)c->sinks[h]), o = 0;
    for (int r = 0; r < ranks; r++)
        for (int j = 0; j < c->lens[r][b]; j++) {
            double s = 0;
            for (int e = 0; e < CACHE_D; e++)
                s += (double)c->q[b][h][e] * (double)c->k[r][b][h / 2][j][e];
            sum += exp(s / 4);
            o += exp(s / 4) * (double)c->v[r][b][h / 2][j][d];
        }
    *lse = log(sum);
    return o / sum;
}

/* Hopper's only lines of float32 results are for prompts: a row over a long cache by one of them would take several
 * times as long as by a line for decoding. */
static acr_status plan_decoding(rank_args *r)
{
    static const char reason[] =
        "partial results in bf16, not in f32: rank 0: kernels that write f32 are expected to take";
    const acr_problem p = problem_of("bf16:b1:h32/8:s1/1048576:d128");
    acr_group_plan *plan = NULL;
    acr_status status = acr_group_plan_create(&plan, r->group, &p, ACR_SHARDED_KEYS, ACR_CONTIGUOUS, ACR_ESTIMATE);
    if (status == ACR_OK && !strstr(acr_group_plan_text(plan), reason)) {
        print_message("%s, not %s\n", acr_group_plan_text(plan), reason);
        status = ACR_FORMAT;
    }
    acr_group_plan_destroy(plan);
    return status;
}

static void decoding_does_not_pay_for_f32(void **state)
{
    (void)state;
    rank_args ranks[RANKS_MAX];
    run_ranks(ranks, 2, LIMIT_MS, plan_decoding, NULL);
    assert_all(ranks, 2, ACR_OK, "");
}

static void decoding_over_a_sharded_cache(void **state)
{
    (void)state;
    static const int counts[] = {1, 2, 3, 4, 8};
    cache *c = calloc(1, sizeof *c);
    rank_args ranks[RANKS_MAX];
    assert_non_null(c);
    for (size_t n = 0; n < COUNT_OF(counts); n++) {
        generator g = {n + 1};
        for (size_t i = 0; i < sizeof *c / sizeof(float); i++)
            if (i < offsetof(cache, lens) / sizeof(float))
                ((float *)c->q)[i] = (float)next_normal(&g);
        for (int h = 0; h < CACHE_H; h++)
            c->sinks[h] = (float)next_normal(&g);
        for (int r = 0; r < RANKS_MAX; r++) /* some have no key, and all of the last entry's are on one */
            for (int b = 0; b < CACHE_B; b++)
                c->lens[r][b] = r == 0 ? 7 : b == 1 ? 0 : below(&g, CACHE_KEYS + 1);
        run_ranks(ranks, counts[n], LIMIT_MS, decode, c);
        assert_all(ranks, counts[n], ACR_OK, "");
        for (int r = 0; r < counts[n]; r++)
            for (int b = 0; b < CACHE_B; b++)
                for (int h = 0; h < CACHE_H; h++)
                    for (int d = 0; d < CACHE_D; d++) {
                        double lse;
                        assert_true(fabs(decoded(c, counts[n], b, h, d, &lse) - (double)c->o[r][b][h][d]) < 1e-5);
                        assert_true(fabs(lse - (double)c->lse[r][b][h]) < 1e-5);
                    }
        for (int r = 1; r < counts[n]; r++)
            assert_memory_equal(c->o[0], c->o[r], sizeof c->o[0]);
    }
    free(c);
}

/* ---- What is expected, and the choice ---------------------------------------------------------------------------- */

/* What every rank's wisdom knows of the link, and what the plan of ACR_SCHEDULE_AUTO must say. */
typedef struct choosing {
    acr_link link;
    int ranks_without; /* the last ranks know no link */
    const char *problem;
    acr_schedule schedule;
    char text[2048]; /* of rank 0 */
    double seconds[RANKS_MAX];
} choosing;

static acr_status choose_schedule(rank_args *r)
{
    choosing *c = r->shared;
    const acr_problem p = problem_of(c->problem);
    acr_group_plan *plan = NULL;
    acr_status status = ACR_OK;
    if (r->rank < r->ranks - c->ranks_without && c->link.ranks > 0)
        status = acr_wisdom_add_link(r->ctx, &c->link);
    if (status == ACR_OK)
        status = acr_group_plan_create(&plan, r->group, &p, c->schedule, ACR_ZIGZAG, ACR_ESTIMATE);
    if (r->rank == 0)
        snprintf(c->text, sizeof c->text, "%s", acr_group_plan_text(plan));
    c->seconds[r->rank] = acr_group_plan_seconds(plan);
    acr_group_plan_destroy(plan);
    return status;
}

static choosing chosen(const char *problem, int count, double bytes_per_s, double copy_bytes_per_s, int ranks_without)
{
    rank_args ranks[RANKS_MAX];
    choosing c = {
        .link = ACR_LINK_INIT, .ranks_without = ranks_without, .problem = problem, .schedule = ACR_SCHEDULE_AUTO};
    c.link.ranks = bytes_per_s > 0.0 ? count : 0;
    c.link.hosts = 1;
    c.link.samples = 1;
    c.link.bytes_per_s = bytes_per_s;
    c.link.latency_s = 1e-6;
    c.link.copy_bytes_per_s = copy_bytes_per_s;
    run_ranks(ranks, count, LIMIT_MS, choose_schedule, &c);
    assert_all(ranks, count, ACR_OK, "");
    return c;
}

static void assert_says(const choosing *c, const char *beginning, const char *fragment)
{
    if (strncmp(c->text, beginning, strlen(beginning)) != 0 || !strstr(c->text, fragment))
        fail_msg("\"%s\" does not begin with \"%s\", or does not say \"%s\"", c->text, beginning, fragment);
}

static void the_link_decides_between_ring_and_gathering(void **state)
{
    (void)state;
    /* Few queries see many keys: merging costs nothing; the ring waits for a slow link only, gathering for copies, too,
     * and copies are slow. */
    choosing c = chosen("f16:b1:h4:s64/1024:d64", 4, 1e6, 1e9, 0);
    assert_says(&c, "ring over 4 ranks", "chosen expected of the slowest rank: ring ");
    /* Copies alone are slow: gathering copies every key. */
    c = chosen("f16:b1:h8:s512:d64", 4, 1e12, 1e6, 0);
    assert_says(&c, "ring over 4 ranks", "gather ");
    /* Many heads, no keys to speak of, and a merge that reads the outputs of four ranks by a slow memory. */
    c = chosen("f16:b1:h4/1:s2048/16:d64", 4, 1e12, 1e5, 0);
    assert_says(&c, "gather over 4 ranks", "chosen expected of the slowest rank: ring ");
    for (int r = 0; r < 4; r++) {
        assert_true(c.seconds[r] > 0.0);
        assert_true(c.seconds[r] == c.seconds[0]);
    }
}

static void without_a_link_the_rule_decides(void **state)
{
    (void)state;
    static const char problem[] = "f16:b1:h4/1:s2048/16:d64";
    choosing c = chosen(problem, 4, 0.0, 0.0, 0);
    assert_says(&c, "ring over 4 ranks",
                "chosen by rule, not by time: rank 0: no wisdom of a link of 4 ranks on 1 hosts");
    assert_true(c.seconds[0] == 0.0);
    /* One rank that knows none is enough, and every rank decides alike. */
    c = chosen(problem, 4, 1e12, 1e5, 1);
    assert_says(&c, "ring over 4 ranks", "chosen by rule, not by time: rank 3: no wisdom of a link of 4 ranks");
    assert_true(c.seconds[0] == 0.0);
    /* A window leaves one schedule, which is chosen by nobody. */
    c = chosen("f16:b1:h2:s256:d64:causal:win32", 2, 1e9, 1e9, 0);
    assert_says(&c, "gather over 2 ranks", "expected of the slowest rank: ");
    assert_null(strstr(c.text, "chosen"));
}

/* A ring's time is at least that of its transfers: what each rank sends, by the link. */
static void what_is_expected_follows_the_link(void **state)
{
    (void)state;
    rank_args ranks[RANKS_MAX];
    for (int i = 0; i < 3; i++) {
        const acr_schedule schedule = (acr_schedule[]){ACR_RING, ACR_GATHER, ACR_SHARDED_KEYS}[i];
        choosing c = {.link = ACR_LINK_INIT, .problem = "f16:b1:h2:s16/256:d64", .schedule = schedule};
        double seconds[2];
        c.link.ranks = 2;
        c.link.hosts = 1;
        c.link.samples = 1;
        c.link.latency_s = 1e-6;
        c.link.copy_bytes_per_s = 1e12;
        for (int slow = 0; slow < 2; slow++) {
            c.link.bytes_per_s = slow ? 1e4 : 1e5;
            run_ranks(ranks, 2, LIMIT_MS, choose_schedule, &c);
            assert_all(ranks, 2, ACR_OK, "");
            seconds[slow] = c.seconds[0];
        }
        assert_true(seconds[1] > 9.9 * seconds[0] && seconds[1] < 10.1 * seconds[0]);
        /* The ring sends a rank's 128 keys and values of both heads; gathering the same; sharded keys one part, its
         * lse in 256 bytes. */
        const double bytes = schedule == ACR_SHARDED_KEYS ? 2.0 * 16 * 64 * 4 + 256 : 2.0 * 128 * 128 * 2;
        assert_true(fabs(seconds[1] - bytes / 1e4) < 0.01 * seconds[1]);
    }
}

static acr_status measure_link(rank_args *r)
{
    acr_link found, *out = (acr_link *)r->shared + r->rank;
    *out = (acr_link)ACR_LINK_INIT;
    acr_status status = acr_group_measure_link(r->group, out);
    if (status == ACR_OK)
        status = acr_wisdom_find_link(r->ctx, r->ranks, 1, &found);
    if (status == ACR_OK && memcmp(&found, out, sizeof found) != 0)
        status = ACR_INVALID;
    return status;
}

static void every_rank_knows_the_link_that_was_measured(void **state)
{
    (void)state;
    rank_args ranks[RANKS_MAX];
    acr_link links[RANKS_MAX];
    run_ranks(ranks, 3, LIMIT_MS, measure_link, links);
    assert_all(ranks, 3, ACR_OK, "");
    for (int r = 0; r < 3; r++)
        assert_memory_equal(&links[r], &links[0], sizeof links[0]);
    assert_int_equal(links[0].ranks, 3);
    assert_int_equal(links[0].hosts, 1);
    assert_true(links[0].bytes_per_s > 0.0 && links[0].latency_s > 0.0 && links[0].copy_bytes_per_s > 0.0);
    run_ranks(ranks, 1, LIMIT_MS, measure_link, links);
    assert_all(ranks, 1, ACR_INVALID, "a group of one rank has no link");
}

static acr_status one_does_not_measure(rank_args *r)
{
    acr_link link;
    const acr_status status = r->rank == 1 ? acr_group_refuse(r->group, ACR_UNSUPPORTED, "no time to measure")
                                           : acr_group_measure_link(r->group, &link);
    return status;
}

static void a_rank_that_does_not_measure_is_told_to_every_rank(void **state)
{
    (void)state;
    rank_args ranks[RANKS_MAX];
    run_ranks(ranks, 3, LIMIT_MS, one_does_not_measure, NULL);
    assert_int_equal(ranks[1].status, ACR_UNSUPPORTED);
    assert_int_equal(ranks[0].status, ACR_PEER);
    assert_int_equal(ranks[2].status, ACR_PEER);
    assert_non_null(strstr(ranks[0].text, "rank 1 failed: no time to measure"));
}

/* ---- What goes wrong --------------------------------------------------------------------------------------------- */

static acr_status plan_of(rank_args *r, const char *text, acr_schedule schedule)
{
    const acr_problem p = problem_of(text);
    acr_group_plan *plan = NULL;
    const acr_status status = acr_group_plan_create(&plan, r->group, &p, schedule, ACR_ZIGZAG, ACR_ESTIMATE);
    acr_group_plan_destroy(plan);
    return status;
}

static acr_status one_differs(rank_args *r)
{
    const acr_status status = plan_of(r, r->rank == 1 ? "f32:b1:h2:s64:d32" : "f32:b1:h2:s64:d16", ACR_RING);
    if (status != ACR_PEER)
        return status;
    /* Disagreement breaks nothing. */
    const acr_status again = plan_of(r, "f32:b1:h2:s64:d16", ACR_RING);
    return again == ACR_OK ? status : again;
}

static void other_arguments_are_told_to_every_rank(void **state)
{
    (void)state;
    rank_args ranks[RANKS_MAX];
    run_ranks(ranks, 3, LIMIT_MS, one_differs, NULL);
    assert_all(ranks, 3, ACR_PEER, "rank 1 has other arguments than rank 0");
}

static acr_status one_is_refused(rank_args *r)
{
    return plan_of(r, r->rank == 2 ? "f32:b1:h2:s64:d16:win8" : "f32:b1:h2:s64:d16", ACR_RING);
}

static void a_rank_that_is_refused_is_told_to_every_rank(void **state)
{
    (void)state;
    rank_args ranks[RANKS_MAX];
    run_ranks(ranks, 3, LIMIT_MS, one_is_refused, NULL);
    assert_int_equal(ranks[2].status, ACR_UNSUPPORTED);
    assert_non_null(strstr(ranks[2].text, "window_left without a mask"));
    assert_all(ranks, 2, ACR_PEER, "rank 2 failed: schedule ring does not serve window_left without a mask");
}

static acr_status one_caller_refuses(rank_args *r)
{
    const acr_status status = r->rank == 1 ? acr_group_refuse(r->group, ACR_UNSUPPORTED, "x is a list")
                                           : plan_of(r, "f32:b1:h2:s64:d16", ACR_RING);
    if (status == ACR_OK)
        return ACR_FORMAT;
    const acr_status again = plan_of(r, "f32:b1:h2:s64:d16", ACR_RING);
    if (again != ACR_OK)
        return ACR_FORMAT;
    /* and alike on every rank: each has its own */
    return acr_group_refuse(r->group, ACR_INVALID, "") == ACR_INVALID ? status : ACR_FORMAT;
}

static void what_a_caller_refuses_is_told_to_every_rank(void **state)
{
    (void)state;
    rank_args ranks[RANKS_MAX];
    acr_group *group = NULL;
    run_ranks(ranks, 3, LIMIT_MS, one_caller_refuses, NULL);
    assert_int_equal(ranks[0].status, ACR_PEER);
    assert_int_equal(ranks[1].status, ACR_UNSUPPORTED);
    assert_int_equal(ranks[2].status, ACR_PEER);
    assert_int_equal(acr_group_refuse(group, ACR_INVALID, "x"), ACR_INVALID);
}

static acr_status refusing_nothing(rank_args *r)
{
    const int wrong = acr_group_refuse(r->group, ACR_OK, "x") != ACR_INVALID ||
                      acr_group_refuse(r->group, ACR_INVALID, NULL) != ACR_INVALID;
    return wrong ? ACR_FORMAT : ACR_OK;
}

static void nothing_is_refused_without_a_reason(void **state)
{
    (void)state;
    rank_args rank;
    run_ranks(&rank, 1, LIMIT_MS, refusing_nothing, NULL);
    assert_all(&rank, 1, ACR_OK, "");
}

static acr_status one_is_absent(rank_args *r)
{
    r->group->timeout_ms = SHORT_MS; /* only now, when all have met */
    if (r->rank == 1) {              /* as if it hung: it ends when the others have given up */
        acr_status status;
        while ((status = acr_group_wait(r->group, NULL, 0)) == ACR_OK)
            usleep(1000);
        return status;
    }
    const acr_status status = plan_of(r, "f32:b1:h2:s64:d16", ACR_RING);
    /* The group stays broken. */
    return plan_of(r, "f32:b1:h2:s64:d16", ACR_RING) == status ? status : ACR_OK;
}

static void a_rank_that_hangs_is_given_up(void **state)
{
    (void)state;
    rank_args ranks[RANKS_MAX];
    run_ranks(ranks, 3, LIMIT_MS, one_is_absent, NULL);
    int timeouts = 0;
    for (int i = 0; i < 3; i++) {
        assert_true(ranks[i].status == ACR_TIMEOUT || ranks[i].status == ACR_PEER);
        timeouts += ranks[i].status == ACR_TIMEOUT;
    }
    assert_true(timeouts >= 1);
    assert_int_equal(ranks[1].status, ACR_PEER);
}

/* Ranks are processes; the last one is killed between two executions, and the others must not wait for ever. */
static int process_rank(const acr_group_id *id, int rank, int count)
{
    enum {
        ELEMENTS = 2 * 16 * 16
    };
    static _Alignas(64) float q[ELEMENTS], o[ELEMENTS];
    const acr_problem p = problem_of("f32:b1:h2:s48:d16:causal");
    acr_group_options options = ACR_GROUP_OPTIONS_INIT;
    acr_ctx *ctx = one_thread_ctx();
    acr_group *group = NULL;
    acr_group_plan *plan = NULL;
    acr_buffers b = ACR_BUFFERS_INIT;
    options.rank = rank;
    options.ranks = count;
    options.id = id;
    options.library = library;
    options.timeout_ms = LIMIT_MS;
    b.q = b.k = b.v = q;
    b.o = o;
    if (!ctx || acr_group_create(&group, ctx, &options) != ACR_OK ||
        acr_group_plan_create(&plan, group, &p, ACR_RING, ACR_CONTIGUOUS, ACR_ESTIMATE) != ACR_OK ||
        acr_group_execute(plan, &b, NULL) != ACR_OK)
        return 10;
    if (rank == count - 1)
        raise(SIGKILL);
    group->timeout_ms = SHORT_MS; /* only now, when all have come so far */
    acr_status status;
    for (status = ACR_OK; status == ACR_OK;)
        status = acr_group_execute(plan, &b, NULL);
    return status == ACR_TIMEOUT || status == ACR_PEER ? 0 : 11;
}

static void a_rank_that_is_killed_is_given_up(void **state)
{
    (void)state;
    enum {
        COUNT = 3
    };
    pid_t pids[COUNT];
    acr_group_id id;
    assert_int_equal(acr_group_id_create(&id, library), ACR_OK);
    for (int i = 0; i < COUNT; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0)
            _exit(process_rank(&id, i, COUNT));
    }
    for (int i = 0; i < COUNT; i++) {
        int ended = 0;
        assert_int_equal(waitpid(pids[i], &ended, 0), pids[i]);
        if (i == COUNT - 1)
            assert_true(WIFSIGNALED(ended));
        else
            assert_int_equal(WIFEXITED(ended) ? WEXITSTATUS(ended) : -1, 0);
    }
}

/* ---- One rank alone ---------------------------------------------------------------------------------------------- */

static acr_status refusals(rank_args *r)
{
    static const struct {
        const char *problem;
        acr_schedule schedule;
        acr_status status;
        const char *fragment;
    } rows[] = {
        {"f32:b1:h2:s64:d16:kvlens", ACR_RING, ACR_UNSUPPORTED, "ACR_KV_LENS"},
        {"f32:b1:h2:s64:d16:bshd:packed", ACR_GATHER, ACR_UNSUPPORTED, "ACR_PACKED"},
        {"f32:b1:h2:s64:d16:alibi", ACR_RING, ACR_UNSUPPORTED, "ACR_ALIBI"},
        {"f32:b1:h2:s64:d16:causal:chunk8", ACR_GATHER, ACR_UNSUPPORTED, "chunk"},
        {"f32:b1:h2:s64:d16:mask/0,0,64", ACR_GATHER, ACR_UNSUPPORTED, "bias_dtype"},
        {"f32:b1:h2:s64:d16:win0/8", ACR_GATHER, ACR_UNSUPPORTED, "window_right"},
        {"f32:b1:h2:s64:d16:win8", ACR_GATHER, ACR_UNSUPPORTED, "window_left without a mask"},
        {"f32:b1:h2:s64:d16:causal:win8", ACR_RING, ACR_UNSUPPORTED, "ring does not serve window_left"},
        {"f32:b1:h2:s64/32:d16:causal", ACR_RING, ACR_UNSUPPORTED, "q_len is greater than kv_len"},
        {"f32:b1:h2:s64:d16:ks=2048,16,32", ACR_RING, ACR_UNSUPPORTED, "strides"},
        {"f32:b1:h2:s1/64:d16", ACR_RING, ACR_INVALID, "less than the 2 chunks"},
        {"bwd:f32:b1:h2:s64:d16", ACR_RING, ACR_UNSUPPORTED, "ACR_BACKWARD"},
        {"f32:b1:h2:s4/64:d16:causal", ACR_SHARDED_KEYS, ACR_UNSUPPORTED, "a mask that hides keys"},
        {"f32:b1:h2:s1/64:d16:win8", ACR_SHARDED_KEYS, ACR_UNSUPPORTED, "window_left"},
        {"f32:b1:h2:s64:d16", (acr_schedule)9, ACR_INVALID, "schedule is 9"},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        const acr_status status = plan_of(r, rows[i].problem, rows[i].schedule);
        if (status != rows[i].status || !strstr(acr_group_last_error(), rows[i].fragment)) {
            fprintf(stderr, "%s: status %d: %s\n", rows[i].problem, (int)status, acr_group_last_error());
            return ACR_FORMAT;
        }
    }
    return ACR_OK;
}

static void what_is_not_served_is_named(void **state)
{
    (void)state;
    rank_args rank;
    run_ranks(&rank, 1, LIMIT_MS, refusals, NULL);
    assert_all(&rank, 1, ACR_OK, "");
}

static acr_status wrong_buffers(rank_args *r)
{
    static _Alignas(64) float x[2 * 64 * 16], o[2 * 64 * 16];
    const acr_problem p = problem_of("f32:b1:h2:s64:d16");
    acr_group_plan *plan = NULL;
    acr_buffers good = ACR_BUFFERS_INIT, b;
    good.q = good.k = good.v = x;
    good.o = o;
    if (acr_group_plan_create(&plan, r->group, &p, ACR_SCHEDULE_AUTO, ACR_ZIGZAG, ACR_ESTIMATE) != ACR_OK)
        return ACR_FORMAT;
    int wrong = acr_group_execute(plan, &good, NULL) != ACR_OK;
    b = good;
    b.k = NULL;
    wrong |= acr_group_execute(plan, &b, NULL) != ACR_INVALID || !strstr(acr_group_last_error(), "buffers.k is NULL");
    b = good;
    b.q = x + 1;
    wrong |= acr_group_execute(plan, &b, NULL) != ACR_ALIGNMENT;
    b = good;
    b.lse = o;
    wrong |= acr_group_execute(plan, &b, NULL) != ACR_INVALID;
    b = good;
    b.flags = ACR_OVERLAP_PREVIOUS;
    wrong |= acr_group_execute(plan, &b, NULL) != ACR_INVALID;
    wrong |= !strstr(acr_group_plan_text(plan), "ring over 1 ranks") || acr_group_plan_traffic(plan) != 0 ||
             acr_group_plan_memory(plan) == 0;
    acr_group_plan_destroy(plan);
    return wrong ? ACR_FORMAT : ACR_OK;
}

static void wrong_buffers_are_refused(void **state)
{
    (void)state;
    rank_args rank;
    run_ranks(&rank, 1, LIMIT_MS, wrong_buffers, NULL);
    assert_all(&rank, 1, ACR_OK, "");
}

static void wrong_options_are_refused(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr_group_id id = {{0}};
    acr_group *group = NULL;
    acr_group_options options = ACR_GROUP_OPTIONS_INIT, o;
    options.ranks = 2;
    options.library = library;
    options.id = &id;
#define REFUSED(field, value, fragment)                                                                                \
    o = options;                                                                                                       \
    o.field = (value);                                                                                                 \
    assert_int_equal(acr_group_create(&group, ctx, &o), ACR_INVALID);                                                  \
    assert_non_null(strstr(acr_group_last_error(), fragment))
    REFUSED(size, 8, "options.size");
    REFUSED(rank, 2, "options.rank is 2");
    REFUSED(ranks, 0, "options.ranks is 0");
    REFUSED(id, NULL, "one of options.id and options.comm");
    REFUSED(max_ctas, 65, "max_ctas");
    REFUSED(device, 1, "options.device");
    REFUSED(transfers, (acr_transfers)3, "options.transfers is 3");
    REFUSED(library, NULL, "NCCL exchanges memory of GPUs");
#undef REFUSED
    o = options;
    o.library = "no_such_library.so";
    assert_int_equal(acr_group_create(&group, ctx, &o), ACR_NO_DEVICE);
    assert_non_null(strstr(acr_group_last_error(), "no_such_library.so"));
    assert_int_equal(acr_group_id_create(&id, "no_such_library.so"), ACR_NO_DEVICE);
    acr_group_destroy(NULL);
    acr_group_plan_destroy(NULL);
    acr_ctx_destroy(ctx);
}

/* Of a caller that was compiled when options ended before `transfers`, whose bytes are something else. */
static void options_of_an_older_caller_are_taken(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr_group_id id;
    acr_group *group = NULL;
    acr_group_options options = ACR_GROUP_OPTIONS_INIT;
    assert_int_equal(acr_group_id_create(&id, library), ACR_OK);
    options.size = offsetof(acr_group_options, transfers);
    options.ranks = 1;
    options.library = library;
    options.id = &id;
    options.transfers = (acr_transfers)77;
    assert_int_equal(acr_group_create(&group, ctx, &options), ACR_OK);
    acr_group_destroy(group);
    acr_ctx_destroy(ctx);
}

/* Ranks that never come. */
static void a_group_that_is_not_complete_is_given_up(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(1);
    acr_group_id id;
    acr_group *group = NULL;
    acr_group_options options = ACR_GROUP_OPTIONS_INIT;
    assert_int_equal(acr_group_id_create(&id, library), ACR_OK);
    options.ranks = 2;
    options.library = library;
    options.id = &id;
    options.timeout_ms = SHORT_MS;
    assert_int_equal(acr_group_create(&group, ctx, &options), ACR_TIMEOUT);
    assert_null(group);
    acr_ctx_destroy(ctx);
}

static void shards_cover_the_sequence_once(void **state)
{
    (void)state;
    for (int64_t len = 1; len < 70; len++)
        for (int ranks = 1; ranks <= 9; ranks++)
            for (int placement = ACR_CONTIGUOUS; placement <= ACR_ZIGZAG; placement++) {
                char seen[70] = {0};
                for (int r = 0; r < ranks; r++) {
                    acr_rows rows[2];
                    assert_int_equal(acr_shard_rows(rows, len, ranks, r, (acr_placement)placement), ACR_OK);
                    for (int i = 0; i < 2; i++)
                        for (int64_t j = rows[i].first; j < rows[i].first + rows[i].count; j++)
                            assert_int_equal(seen[j]++, 0);
                }
                for (int64_t j = 0; j < len; j++)
                    assert_int_equal(seen[j], 1);
            }
    acr_rows rows[2];
    assert_int_equal(acr_shard_rows(rows, 10, 2, 2, ACR_ZIGZAG), ACR_INVALID);
    assert_int_equal(acr_shard_rows(rows, -1, 2, 0, ACR_ZIGZAG), ACR_INVALID);
    assert_int_equal(acr_shard_rows(rows, 10, 0, 0, ACR_ZIGZAG), ACR_INVALID);
    assert_int_equal(acr_shard_rows(rows, 10, 2, -1, ACR_ZIGZAG), ACR_INVALID);
    assert_int_equal(acr_shard_rows(rows, 10, ACR_GROUP_RANKS_MAX + 1, 0, ACR_ZIGZAG), ACR_INVALID);
    assert_int_equal(acr_shard_rows(rows, 10, ACR_GROUP_RANKS_MAX, ACR_GROUP_RANKS_MAX - 1, ACR_ZIGZAG), ACR_OK);
    assert_int_equal(acr_shard_rows(rows, 10, 2, 0, (acr_placement)2), ACR_INVALID);
}

/* What a gathering sends: of a chunk the keys that a rank's rows see, and nothing of one that they do not. */
static void keys_that_no_row_sees_are_not_needed(void **state)
{
    (void)state;
    const dist_sequences causal = {64, 64, 4, ACR_CONTIGUOUS, 1, 0, 0}, window = {64, 64, 4, ACR_CONTIGUOUS, 1, 0, 4};
    dist_piece pieces[8];
    assert_in_range(dist_pieces_max(&causal), 1, COUNT_OF(pieces));
    const int count = dist_pieces(&causal, 2, 0, pieces); /* rows 32 to 47 */
    static const int64_t of_causal[] = {16, 16, 16, 0}, of_window[] = {0, 3, 16, 0};
    for (int chunk = 0; chunk < 4; chunk++) {
        assert_int_equal(dist_needed(&causal, pieces, count, chunk).count, of_causal[chunk]);
        assert_int_equal(dist_needed(&window, pieces, count, chunk).count, of_window[chunk]);
    }
}

/* ---- The side of CUDA -------------------------------------------------------------------------------------------- */

typedef struct gpu_case {
    const char *problem;
    int ranks;
    acr_schedule schedule;
    acr_placement placement;
} gpu_case;

static const gpu_case gpu_cases[] = {
    {"f16:b1:h4/2:s70:d64:causal:lse", 2, ACR_RING, ACR_ZIGZAG},
    {"bf16:b2:h2:s50/70:d64", 3, ACR_RING, ACR_CONTIGUOUS},
    {"bf16:b1:h2:s50:d128:causal:of32:lse", 2, ACR_RING, ACR_ZIGZAG},
    {"f16:b1:h2:s40:d64:sinks:lse", 2, ACR_RING, ACR_CONTIGUOUS},
    {"f16:b1:h2:s96:d64:causal", 4, ACR_RING, ACR_ZIGZAG},
    {"f16:b1:h2:s60/90:d64:causal:bshd", 4, ACR_RING, ACR_CONTIGUOUS}, /* blocks that nobody needs */
    {"bf16:b1:h2:s90/100:d64:causal:bshd:lse", 2, ACR_GATHER, ACR_ZIGZAG},
    {"f16:b1:h3:s60/90:d64", 4, ACR_GATHER, ACR_ZIGZAG},
    {"f16:b2:h4/2:s64:d64:causal:win20:lse", 3, ACR_SCHEDULE_AUTO, ACR_CONTIGUOUS}};

/* Every so many cases from one on. */
static void check_cases(size_t first, size_t step)
{
    acr_ctx *ctx = cpu_ctx(1);
    for (size_t i = first; i < COUNT_OF(gpu_cases); i += step) {
        const gpu_case *c = &gpu_cases[i];
        check_problem(ctx, c->problem, c->ranks, c->schedule, c->placement, i + 1);
    }
    acr_ctx_destroy(ctx);
}

static void schedules_on_a_gpu_are_one_rank(void **state)
{
    (void)state;
    check_cases(0, 1);
}

static void so_they_are_by_nccl(void **state)
{
    (void)state;
    transfers = ACR_TRANSFERS_NCCL;
    check_cases(1, 3);
    transfers = ACR_TRANSFERS_AUTO;
}

/* The fake NCCL does not wait for a replay, so that only what goes by copy engines can be captured here. */
static void so_they_are_in_a_graph(void **state)
{
    (void)state;
    transfers = ACR_TRANSFERS_COPY_ENGINES;
    are_calls_captured = 1;
    check_cases(0, 2);
    are_calls_captured = 0;
    transfers = ACR_TRANSFERS_AUTO;
}

/* By handles of memory, not by addresses. First: it forks. */
static void so_they_are_of_processes(void **state)
{
    (void)state;
    transfers = ACR_TRANSFERS_COPY_ENGINES;
    are_ranks_processes = 1;
    setenv("FAKE_CUDA_SHARING", "1", 1);
    check_cases(1, 2);
    unsetenv("FAKE_CUDA_SHARING");
    are_ranks_processes = 0;
    transfers = ACR_TRANSFERS_AUTO;
}

/* ---- Copy engines that a rank has not, or that stop ---- */

static void fail_entry(const char *name, int result)
{
    void (*set_failing)(const char *, int);
    void *symbol = driver_symbol("fake_cuda_fail_entry");
    memcpy(&set_failing, &symbol, sizeof set_failing);
    set_failing(name, result);
}

static void hide_entry(const char *name)
{
    void (*hide)(const char *);
    void *symbol = driver_symbol("fake_cuda_hide_entry");
    memcpy(&hide, &symbol, sizeof hide);
    hide(name);
}

typedef struct way_case {
    const char *hidden, *failing, *reason;
} way_case;

static acr_status plan_says(rank_args *r)
{
    const way_case *c = r->shared;
    const acr_problem p = problem_of("f16:b1:h2:s64:d64");
    acr_group_plan *plan = NULL;
    acr_status status = acr_group_plan_create(&plan, r->group, &p, ACR_RING, ACR_ZIGZAG, ACR_ESTIMATE);
    if (status == ACR_OK && !strstr(acr_group_plan_text(plan), c->reason)) {
        print_message("%s\nnot \"%s\"\n", acr_group_plan_text(plan), c->reason);
        status = ACR_FORMAT;
    }
    acr_group_plan_destroy(plan);
    return status;
}

static void without_copy_engines_there_is_nccl(void **state)
{
    (void)state;
    way_case cases[] = {
        {"cuStreamWaitValue64", "", "transfers by NCCL: rank 0: libcuda.so.1 lacks cuStreamWaitValue64"},
        {"", "cuIpcGetMemHandle", "transfers by NCCL: rank 0: cuIpcGetMemHandle: error 801"},
        {"", "cuStreamWriteValue32", "transfers by NCCL: rank 0: cuStreamWriteValue32: error 801"},
        {"", "cuStreamWaitValue64", "transfers by NCCL: rank 0: cuStreamWaitValue64: error 801"}};
    rank_args ranks[RANKS_MAX];
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (int must = 0; must < 2; must++) {
            transfers = must ? ACR_TRANSFERS_COPY_ENGINES : ACR_TRANSFERS_AUTO;
            hide_entry(cases[i].hidden);
            fail_entry(cases[i].failing, 801);
            run_ranks(ranks, 3, LIMIT_MS, plan_says, &cases[i]);
            hide_entry(NULL);
            fail_entry(NULL, 0);
            transfers = ACR_TRANSFERS_AUTO;
            assert_all(ranks, 3, must ? ACR_UNSUPPORTED : ACR_OK, must ? strstr(cases[i].reason, "rank 0") : "");
        }
}

/* The group goes by copy engines; then memory of a plan cannot be shared, and that plan goes by NCCL. */
static acr_status one_plan_is_not_shared(rank_args *r)
{
    way_case says = {"", "", "\ntransfers by copy engines"};
    r->shared = &says;
    acr_status status = plan_says(r);
    if (r->rank == 0)
        fail_entry("cuIpcGetMemHandle", 801);
    says.reason = "\ntransfers by NCCL: rank 0: cuIpcGetMemHandle: error 801";
    return status == ACR_OK ? plan_says(r) : status;
}

static void a_plan_that_cannot_share_goes_by_nccl(void **state)
{
    (void)state;
    rank_args ranks[RANKS_MAX];
    run_ranks(ranks, 3, LIMIT_MS, one_plan_is_not_shared, NULL);
    fail_entry(NULL, 0);
    assert_all(ranks, 3, ACR_OK, "");
}

/* All execute twice, then all but one a third time, which waits for it on its streams. */
static acr_status one_stops(rank_args *r)
{
    const acr_problem p = problem_of("f16:b1:h2:s64:d64");
    acr_group_plan *plan = NULL;
    acr_buffers b = ACR_BUFFERS_INIT;
    char *memory = device_block(r, 1 << 16);
    memset(memory, 0, 1 << 16);
    b.q = b.k = b.v = memory;
    b.o = memory + (1 << 15);
    acr_status status = acr_group_plan_create(&plan, r->group, &p, ACR_RING, ACR_ZIGZAG, ACR_ESTIMATE);
    for (int i = 0; i < 2 && status == ACR_OK; i++)
        status = acr_group_execute(plan, &b, NULL);
    if (status == ACR_OK)
        status = acr_group_wait(r->group, NULL, LIMIT_MS);
    for (int i = 0; i < 3 && status == ACR_OK && r->rank != 1; i++) /* more than one that is let go */
        status = acr_group_execute(plan, &b, NULL);
    while (status == ACR_OK) {
        usleep(1000);
        status = acr_group_wait(r->group, NULL, r->rank == 1 ? 0 : SHORT_MS);
    }
    /* Both streams come to their end, and the group stays broken. */
    if (dist_enter(&r->group->device) != ACR_OK || dist_wait_idle(&r->group->device, NULL, 1e-3 * LIMIT_MS) != ACR_OK ||
        dist_wait_idle(&r->group->device, r->group->device.transfers, 1e-3 * LIMIT_MS) != ACR_OK ||
        acr_group_execute(plan, &b, NULL) != status || acr_group_wait(r->group, NULL, LIMIT_MS) != status)
        status = ACR_FORMAT;
    dist_leave(&r->group->device);
    acr_group_plan_destroy(plan);
    device_free(r, memory);
    return status;
}

static void a_rank_that_stops_is_given_up(void **state)
{
    (void)state;
    rank_args ranks[RANKS_MAX];
    int timeouts = 0;
    for (int count = 2; count <= 4; count++) {
        run_ranks(ranks, count, LIMIT_MS, one_stops, NULL);
        for (int i = 0; i < count; i++) {
            if (ranks[i].status != ACR_PEER && ranks[i].status != ACR_TIMEOUT)
                fail_msg("rank %d of %d: status %d (%s)", i, count, (int)ranks[i].status, ranks[i].text);
            timeouts += ranks[i].status == ACR_TIMEOUT;
        }
        assert_int_equal(ranks[1].status, ACR_PEER);
        assert_non_null(strstr(ranks[1].text, "gave the group up"));
    }
    assert_in_range(timeouts, 3, 9);
}

static void nothing_is_left(void **state)
{
    (void)state;
    fake_cuda_counters (*now)(void);
    void *symbol = driver_symbol("fake_cuda_count");
    memcpy(&now, &symbol, sizeof now);
    const fake_cuda_counters count = now();
    assert_int_equal(count.misuses, 0);
    assert_int_equal(count.allocations + count.streams + count.events + count.graphs + count.graph_execs, 0);
    assert_int_equal(count.contexts + count.pushed, 0);
}

static int run_on_cuda(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(so_they_are_of_processes), /* first: it forks */
        cmocka_unit_test(schedules_on_a_gpu_are_one_rank),
        cmocka_unit_test(so_they_are_by_nccl),
        cmocka_unit_test(so_they_are_in_a_graph),
        cmocka_unit_test(without_copy_engines_there_is_nccl),
        cmocka_unit_test(a_plan_that_cannot_share_goes_by_nccl),
        cmocka_unit_test(a_rank_that_stops_is_given_up),
        cmocka_unit_test(decoding_does_not_pay_for_f32),
        cmocka_unit_test(decoding_over_a_sharded_cache),
        cmocka_unit_test(every_rank_knows_the_link_that_was_measured),
        cmocka_unit_test(other_arguments_are_told_to_every_rank),
        cmocka_unit_test(a_rank_that_is_refused_is_told_to_every_rank),
        cmocka_unit_test(what_a_caller_refuses_is_told_to_every_rank),
        cmocka_unit_test(nothing_is_refused_without_a_reason),
        cmocka_unit_test(a_rank_that_hangs_is_given_up),
        cmocka_unit_test(a_group_that_is_not_complete_is_given_up),
        cmocka_unit_test(nothing_is_left),
    };
    backend = "cuda";
    return cmocka_run_group_tests_name("cuda", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_that_is_killed_is_given_up), /* first: it forks */
        cmocka_unit_test(shards_cover_the_sequence_once),
        cmocka_unit_test(keys_that_no_row_sees_are_not_needed),
        cmocka_unit_test(wrong_options_are_refused),
        cmocka_unit_test(options_of_an_older_caller_are_taken),
        cmocka_unit_test(what_is_not_served_is_named),
        cmocka_unit_test(wrong_buffers_are_refused),
        cmocka_unit_test(one_two_three_four_and_eight_ranks),
        cmocka_unit_test(random_problems_equal_one_rank),
        cmocka_unit_test(decoding_over_a_sharded_cache),
        cmocka_unit_test(the_link_decides_between_ring_and_gathering),
        cmocka_unit_test(without_a_link_the_rule_decides),
        cmocka_unit_test(what_is_expected_follows_the_link),
        cmocka_unit_test(every_rank_knows_the_link_that_was_measured),
        cmocka_unit_test(a_rank_that_does_not_measure_is_told_to_every_rank),
        cmocka_unit_test(other_arguments_are_told_to_every_rank),
        cmocka_unit_test(a_rank_that_is_refused_is_told_to_every_rank),
        cmocka_unit_test(a_rank_that_hangs_is_given_up),
        cmocka_unit_test(a_group_that_is_not_complete_is_given_up),
    };
    if (argc < 2)
        return 2;
    library = argv[1];
    if (argc > 2)
        problems = (int)strtol(argv[2], NULL, 10);
    if (argc > 3 && strcmp(argv[3], "cuda") == 0)
        return run_on_cuda();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
