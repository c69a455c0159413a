/* A serving engine's attention, small: 64 sequences come and go over one pool of pages. Prompts are prefilled in
 * chunks, packed into one call a step; tokens are decoded one a step, in a call whose shape never changes, so that on a
 * GPU one captured graph is replayed for every step. Each finished sequence is checked against attention without pages.
 *
 *     cc serve.c $(pkg-config --cflags --libs acromion)      on the CPU
 *     nvcc -DSERVE_CUDA … serve.c                             on the GPU, by CUDA's runtime; see CMakeLists.txt
 *
 * On the GPU it ends with success and says why where there is no GPU, or no kernel for pages on it. */
#include <acromion.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEQUENCES = 64,
    SLOTS = 12, /* sequences served at once */
    CHUNK = 24, /* tokens of a prompt prefilled in one step */
    PAGE = 16,  /* tokens */
    PAGES = 80, /* of the pool: fewer than all slots could want */
    LENGTH_MOST = 160,
    PAGES_MOST = LENGTH_MOST / PAGE, /* of one sequence */
    Q_HEADS = 8,
    KV_HEADS = 2,
    DIM = 64,
    Q_ROW = Q_HEADS * DIM, /* elements */
    KV_ROW = KV_HEADS * DIM
};

/* Ends the program when a call fails. */
static void die(const char *call, const char *error)
{
    fprintf(stderr, "%s: %s\n", call, error);
    exit(1);
}
#define ACR(call) ((call) == ACR_OK ? (void)0 : die(#call, acr_last_error()))

/* ---- Memory and graphs: CUDA's, or the host's own ---------------------------------------------------------------- */

#ifdef SERVE_CUDA
#include <cuda_runtime_api.h>

#define CUDA(call) ((call) == cudaSuccess ? (void)0 : die(#call, cudaGetErrorString(cudaGetLastError())))

static const char BACKEND[] = "cuda";
static cudaStream_t stream;
static cudaGraphExec_t graph;

static void *device_memory(size_t bytes)
{
    void *memory = NULL;
    CUDA(cudaMalloc(&memory, bytes));
    CUDA(cudaMemset(memory, 0, bytes));
    return memory;
}

static void device_free(void *memory)
{
    CUDA(cudaFree(memory));
}

static void upload(void *to, const void *from, size_t bytes)
{
    CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
}

static void download(void *to, const void *from, size_t bytes)
{
    CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
}

static void open_stream(void)
{
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
}

static void close_stream(void)
{
    if (graph)
        CUDA(cudaGraphExecDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
}

/* Runs work on the stream: as it is the first time, which loads code; captured the second; from then on replayed. */
static void run_captured(void (*work)(void *arg), void *arg, int run)
{
    if (run == 0) {
        work(arg);
        return;
    }
    if (run == 1) {
        cudaGraph_t captured;
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        work(arg);
        CUDA(cudaStreamEndCapture(stream, &captured));
        CUDA(cudaGraphInstantiate(&graph, captured, 0));
        CUDA(cudaGraphDestroy(captured));
    }
    CUDA(cudaGraphLaunch(graph, stream));
}
#else
static const char BACKEND[] = "cpu";
static void *const stream = NULL;

static void *device_memory(size_t bytes)
{
    const size_t whole = (bytes + 255) / 256 * 256;
    void *memory = aligned_alloc(256, whole);
    if (!memory) {
        fprintf(stderr, "no memory for %zu bytes\n", whole);
        exit(1);
    }
    return memset(memory, 0, whole);
}

static void device_free(void *memory)
{
    free(memory);
}

static void upload(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static void download(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static void open_stream(void)
{
}

static void close_stream(void)
{
}

static void run_captured(void (*work)(void *arg), void *arg, int run)
{
    (void)run;
    work(arg);
}
#endif

/* ---- The model: numbers made from a sequence's and a token's ----------------------------------------------------- */

static uint16_t bf16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x8000u) >> 16);
}

static float of_bf16(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* A token's row of q (0), k (1) or v (2), elements in [-1, 1). */
static void make_row(uint16_t *out, int count, int which, int sequence, int position)
{
    uint32_t state = (uint32_t)(((which + 1) * SEQUENCES + sequence) * LENGTH_MOST + position) * 2654435761u;
    for (int i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        out[i] = bf16_of((float)(state >> 8) / 8388608.0f - 1.0f);
    }
}

/* ---- Pages ------------------------------------------------------------------------------------------------------- */

typedef struct page_pool {
    int free[PAGES], free_count, fewest_free;
} page_pool;

static int take_page(page_pool *pool)
{
    const int page = pool->free[--pool->free_count];
    if (pool->free_count < pool->fewest_free)
        pool->fewest_free = pool->free_count;
    return page;
}

/* ---- Sequences --------------------------------------------------------------------------------------------------- */

typedef struct sequence {
    int number, prompt, length; /* tokens of the prompt, and with what is decoded */
    int done;                   /* tokens in the cache */
    int page_count;
    int is_live;
    uint16_t outputs[LENGTH_MOST * Q_ROW];
} sequence;

/* What a step's call reads and writes, on the device. */
typedef struct batch {
    uint16_t *q, *k, *v, *o;
    int32_t *lens, *offsets; /* offsets: of packed batches */
    acr_plan *plan;
    void *workspace;
    int64_t rows; /* of this step, of packed batches */
} batch;

typedef struct engine {
    acr_ctx *ctx;
    page_pool pool;
    sequence slots[SLOTS];
    int32_t host_table[SLOTS * PAGES_MOST];
    int32_t *table;
    uint16_t *k_pages, *v_pages; /* [PAGES, PAGE, KV_HEADS, DIM] */
    float *cos, *sin;            /* [LENGTH_MOST, DIM / 2] */
    batch prefill, decode;
    int prefill_steps, decode_steps, checked, wrong;
    double worst;
} engine;

static int pages_of(int tokens)
{
    return (tokens + PAGE - 1) / PAGE;
}

/* Pages that live sequences may still want: a sequence is let in when all of its own will be there. */
static int pages_promised(const engine *e)
{
    int promised = 0;
    for (int s = 0; s < SLOTS; s++)
        if (e->slots[s].is_live)
            promised += pages_of(e->slots[s].length) - e->slots[s].page_count;
    return promised;
}

static int admit(engine *e, int slot, int number)
{
    sequence *s = &e->slots[slot];
    const int prompt = 1 + number * 37 % 113, length = prompt + 1 + number * 29 % 47;
    if (e->pool.free_count - pages_promised(e) < pages_of(length))
        return 0;
    s->number = number;
    s->prompt = prompt;
    s->length = length;
    s->done = s->page_count = 0;
    s->is_live = 1;
    return 1;
}

/* Gives a sequence the pages that so many tokens take. */
static void reserve(engine *e, int slot, int tokens)
{
    sequence *s = &e->slots[slot];
    while (s->page_count < pages_of(tokens))
        e->host_table[slot * PAGES_MOST + s->page_count++] = take_page(&e->pool);
}

static void release(engine *e, int slot)
{
    sequence *s = &e->slots[slot];
    for (int i = 0; i < s->page_count; i++) {
        e->pool.free[e->pool.free_count++] = e->host_table[slot * PAGES_MOST + i];
        e->host_table[slot * PAGES_MOST + i] = -1;
    }
    s->is_live = 0;
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

static acr_append_args append_of(const engine *e, const batch *b)
{
    acr_append_args a = ACR_APPEND_ARGS_INIT;
    a.dtype = ACR_BF16;
    a.layout = ACR_BSHD;
    a.q_heads = Q_HEADS;
    a.kv_heads = KV_HEADS;
    a.qk_dim = DIM;
    a.rope_dim = DIM;
    a.rope_rows = LENGTH_MOST;
    a.cos = e->cos;
    a.sin = e->sin;
    a.q = a.q_out = b->q;
    a.k = b->k;
    a.v = b->v;
    a.kv_lens = b->lens;
    return a;
}

/* New rows to their pages, then attention: everything that differs between two steps is read from device memory. */
static void append_and_attend(const engine *e, const batch *b)
{
    acr_append_args a = append_of(e, b);
    a.batch = SLOTS;
    a.len = b->offsets ? b->rows : 1;
    a.page = PAGE;
    a.pages = PAGES;
    a.table_stride = PAGES_MOST;
    a.k_cache = e->k_pages;
    a.v_cache = e->v_pages;
    a.page_table = e->table;
    a.offsets = b->offsets;
    ACR(acr_append(e->ctx, &a, stream));

    acr_buffers buffers = ACR_BUFFERS_INIT;
    buffers.q = b->q;
    buffers.k = e->k_pages;
    buffers.v = e->v_pages;
    buffers.o = b->o;
    buffers.kv_lens = b->lens;
    buffers.page_table = e->table;
    buffers.table_stride = PAGES_MOST;
    buffers.pages = PAGES;
    if (b->offsets) {
        buffers.q_offsets = b->offsets;
        buffers.q_total = b->rows;
    }
    ACR(acr_execute(b->plan, &buffers, b->workspace, acr_plan_workspace(b->plan), stream));
}

static void decode_work(void *arg)
{
    const engine *e = arg;
    append_and_attend(e, &e->decode);
}

static uint16_t host_q[SLOTS * CHUNK * Q_ROW], host_k[SLOTS * CHUNK * KV_ROW], host_v[SLOTS * CHUNK * KV_ROW];

static void make_token(int row, const sequence *s, int position)
{
    make_row(host_q + row * Q_ROW, Q_ROW, 0, s->number, position);
    make_row(host_k + row * KV_ROW, KV_ROW, 1, s->number, position);
    make_row(host_v + row * KV_ROW, KV_ROW, 2, s->number, position);
}

static void upload_step(const engine *e, const batch *b, const int32_t *lens, int rows)
{
    upload(e->table, e->host_table, sizeof e->host_table);
    upload(b->lens, lens, SLOTS * sizeof lens[0]);
    upload(b->q, host_q, sizeof host_q[0] * (size_t)rows * Q_ROW);
    upload(b->k, host_k, sizeof host_k[0] * (size_t)rows * KV_ROW);
    upload(b->v, host_v, sizeof host_v[0] * (size_t)rows * KV_ROW);
}

/* The next chunk of every prompt that is not in the cache yet, all in one call. */
static void prefill(engine *e)
{
    int32_t offsets[SLOTS + 1] = {0}, lens[SLOTS] = {0};
    int rows = 0;
    for (int i = 0; i < SLOTS; i++) {
        sequence *s = &e->slots[i];
        const int left = s->is_live ? s->prompt - s->done : 0, count = left < CHUNK ? left : CHUNK;
        for (int t = 0; t < count; t++)
            make_token(rows++, s, s->done + t);
        if (count > 0) {
            lens[i] = s->done + count;
            reserve(e, i, lens[i]);
        }
        offsets[i + 1] = rows;
    }
    if (rows == 0)
        return;
    e->prefill.rows = rows;
    upload_step(e, &e->prefill, lens, rows);
    upload(e->prefill.offsets, offsets, sizeof offsets);
    append_and_attend(e, &e->prefill);
    download(host_q, e->prefill.o, sizeof host_q[0] * (size_t)rows * Q_ROW);
    for (int i = 0; i < SLOTS; i++) {
        sequence *s = &e->slots[i];
        const size_t count = (size_t)(offsets[i + 1] - offsets[i]);
        memcpy(s->outputs + s->done * Q_ROW, host_q + offsets[i] * Q_ROW, count * Q_ROW * sizeof host_q[0]);
        s->done += (int)count;
    }
    e->prefill_steps++;
}

/* One token of every sequence whose prompt is in the cache. Slots without one have length 0: nothing is written. */
static void decode(engine *e)
{
    int32_t lens[SLOTS] = {0};
    int count = 0;
    for (int i = 0; i < SLOTS; i++) {
        sequence *s = &e->slots[i];
        if (!s->is_live || s->done < s->prompt)
            continue;
        make_token(i, s, s->done);
        lens[i] = s->done + 1;
        reserve(e, i, lens[i]);
        count++;
    }
    if (count == 0)
        return;
    upload_step(e, &e->decode, lens, SLOTS);
    run_captured(decode_work, e, e->decode_steps);
    download(host_q, e->decode.o, sizeof host_q[0] * SLOTS * Q_ROW);
    for (int i = 0; i < SLOTS; i++)
        if (lens[i] > 0)
            memcpy(e->slots[i].outputs + e->slots[i].done++ * Q_ROW, host_q + i * Q_ROW, sizeof host_q[0] * Q_ROW);
    e->decode_steps++;
}

/* ---- Checking ---------------------------------------------------------------------------------------------------- */

/* The same sequence without pages: one contiguous cache, all its tokens at once. */
static void check(engine *e, const sequence *s)
{
    static uint16_t q[LENGTH_MOST * Q_ROW], k[LENGTH_MOST * KV_ROW], v[LENGTH_MOST * KV_ROW];
    const size_t q_bytes = sizeof q[0] * (size_t)s->length * Q_ROW, kv_bytes = sizeof k[0] * (size_t)s->length * KV_ROW;
    for (int t = 0; t < s->length; t++) {
        make_row(q + t * Q_ROW, Q_ROW, 0, s->number, t);
        make_row(k + t * KV_ROW, KV_ROW, 1, s->number, t);
        make_row(v + t * KV_ROW, KV_ROW, 2, s->number, t);
    }
    const int32_t length = s->length;
    batch b = {.q = device_memory(q_bytes),
               .k = device_memory(kv_bytes),
               .v = device_memory(kv_bytes),
               .o = device_memory(q_bytes),
               .lens = device_memory(sizeof length)};
    uint16_t *k_cache = device_memory(kv_bytes), *v_cache = device_memory(kv_bytes);
    upload(b.q, q, q_bytes);
    upload(b.k, k, kv_bytes);
    upload(b.v, v, kv_bytes);
    upload(b.lens, &length, sizeof length);
    acr_append_args a = append_of(e, &b);
    a.batch = 1;
    a.len = a.kv_len = length;
    a.k_cache = k_cache;
    a.v_cache = v_cache;
    ACR(acr_append(e->ctx, &a, stream));

    acr_problem p = ACR_PROBLEM_INIT;
    p.dtype = ACR_BF16;
    p.mask = ACR_MASK_CAUSAL;
    p.layout = ACR_BSHD;
    p.batch = 1;
    p.q_heads = Q_HEADS;
    p.kv_heads = KV_HEADS;
    p.q_len = p.kv_len = length;
    p.qk_dim = DIM;
    acr_buffers buffers = ACR_BUFFERS_INIT;
    buffers.q = b.q;
    buffers.k = k_cache;
    buffers.v = v_cache;
    buffers.o = b.o;
    ACR(acr_forward(e->ctx, &p, &buffers, stream));
    download(q, b.o, q_bytes);
    for (int i = 0; i < s->length * Q_ROW; i++) {
        const double error = fabs((double)of_bf16(q[i]) - (double)of_bf16(s->outputs[i]));
        e->worst = error > e->worst ? error : e->worst;
        e->wrong += !(error <= 1.0 / 128); /* NaN, too */
    }
    e->checked++;
    void *const all[] = {b.q, b.k, b.v, b.o, b.lens, k_cache, v_cache};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        device_free(all[i]);
}

/* ---- The engine -------------------------------------------------------------------------------------------------- */

/* Memory and a plan for steps of at most `rows` rows. Returns 0 where no kernel serves pages. */
static int open_batch(engine *e, batch *b, int rows, int is_packed)
{
    acr_problem p = ACR_PROBLEM_INIT;
    p.dtype = ACR_BF16;
    p.mask = ACR_MASK_CAUSAL;
    p.layout = ACR_BSHD;
    p.flags = ACR_PAGED | ACR_KV_LENS | (is_packed ? ACR_PACKED : 0u);
    p.batch = SLOTS;
    p.q_heads = Q_HEADS;
    p.kv_heads = KV_HEADS;
    p.q_len = is_packed ? CHUNK : 1;
    p.kv_len = LENGTH_MOST;
    p.qk_dim = DIM;
    p.page = PAGE;
    const acr_status status = acr_plan_create(&b->plan, e->ctx, &p, ACR_ESTIMATE);
    if (status == ACR_UNSUPPORTED)
        return 0;
    ACR(status);
    const size_t row_bytes = sizeof(uint16_t) * (size_t)rows, workspace_bytes = acr_plan_workspace(b->plan);
    b->q = device_memory(row_bytes * Q_ROW);
    b->k = device_memory(row_bytes * KV_ROW);
    b->v = device_memory(row_bytes * KV_ROW);
    b->o = device_memory(row_bytes * Q_ROW);
    b->lens = device_memory(SLOTS * sizeof(int32_t));
    b->offsets = is_packed ? device_memory((SLOTS + 1) * sizeof(int32_t)) : NULL;
    b->workspace = workspace_bytes ? device_memory(workspace_bytes) : NULL;
    ACR(acr_workspace_init(b->plan, b->workspace, workspace_bytes, stream));
    printf("%s\n", acr_plan_text(b->plan));
    return 1;
}

static void close_batch(batch *b)
{
    void *const all[] = {b->q, b->k, b->v, b->o, b->lens, b->offsets, b->workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        device_free(all[i]);
    acr_plan_destroy(b->plan);
}

static void open_memory(engine *e)
{
    static float cos_table[LENGTH_MOST * DIM / 2], sin_table[LENGTH_MOST * DIM / 2];
    const size_t pool_bytes = sizeof(uint16_t) * PAGES * PAGE * KV_ROW;
    for (int t = 0; t < LENGTH_MOST; t++)
        for (int i = 0; i < DIM / 2; i++) {
            const double angle = t * pow(10000.0, -2.0 * i / DIM);
            cos_table[t * (DIM / 2) + i] = (float)cos(angle);
            sin_table[t * (DIM / 2) + i] = (float)sin(angle);
        }
    e->cos = device_memory(sizeof cos_table);
    e->sin = device_memory(sizeof sin_table);
    upload(e->cos, cos_table, sizeof cos_table);
    upload(e->sin, sin_table, sizeof sin_table);
    e->k_pages = device_memory(pool_bytes);
    e->v_pages = device_memory(pool_bytes);
    e->table = device_memory(sizeof e->host_table);
    memset(e->host_table, -1, sizeof e->host_table);
    for (int i = 0; i < PAGES; i++)
        e->pool.free[i] = i;
    e->pool.free_count = e->pool.fewest_free = PAGES;
}

/* Serves all sequences, each as soon as a slot and pages are there for it. */
static void serve(engine *e)
{
    int next = 0, live = 0;
    while (next < SEQUENCES || live > 0) {
        for (int i = 0; i < SLOTS && next < SEQUENCES; i++)
            if (!e->slots[i].is_live && admit(e, i, next)) {
                next++;
                live++;
            }
        prefill(e);
        decode(e);
        for (int i = 0; i < SLOTS; i++)
            if (e->slots[i].is_live && e->slots[i].done == e->slots[i].length) {
                check(e, &e->slots[i]);
                release(e, i);
                live--;
            }
    }
}

int main(void)
{
    static engine e;
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = BACKEND;
    if (acr_ctx_create(&e.ctx, &options) != ACR_OK) {
        printf("nothing to run on: %s\n", acr_last_error());
        return 0;
    }
    open_stream();
    open_memory(&e);
    const int is_served = open_batch(&e, &e.prefill, SLOTS * CHUNK, 1) && open_batch(&e, &e.decode, SLOTS, 0);
    if (is_served)
        serve(&e);
    else
        printf("no kernel for pages on %s: %s\n", acr_ctx_device(e.ctx), acr_last_error());

    /* Rows are bfloat16 averages of numbers below 1, whose last place is worth 1/256 at most. */
    const int is_right = !is_served || (e.checked == SEQUENCES && e.wrong == 0 && e.pool.free_count == PAGES);
    if (is_served)
        printf("%d sequences, %d prefill steps, %d decode steps; at most %d of %d pages taken, %d free at the end\n"
               "largest difference from attention without pages: %.3g; %d elements are wrong\n",
               e.checked, e.prefill_steps, e.decode_steps, PAGES - e.pool.fewest_free, PAGES, e.pool.free_count,
               e.worst, e.wrong);
    close_batch(&e.prefill);
    close_batch(&e.decode);
    void *const all[] = {e.cos, e.sin, e.k_pages, e.v_pages, e.table};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        device_free(all[i]);
    close_stream();
    acr_ctx_destroy(e.ctx);
    return is_right ? 0 : 1;
}
