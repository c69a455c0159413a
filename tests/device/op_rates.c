/* How fast acr_append and acr_merge are on a GPU: microseconds a call, back to back in a replayed graph, and the bytes
 * that a call must read and write beside them, as a part of what memory passes. Calls of more than the L2 cache, and
 * steps of decoding, which latencies bound. What was predicted: src/cuda/ops/lab.md.
 *
 *     op_rates [PEAK [PART]]      PEAK: bytes a second of the GPU's memory, 4.8e12 if not given; PART: of the rows one
 *                                 in so many, for a look over the fake driver
 *
 * Prints a line a case; exits 1 where something could not run. What the calls write is checked by ops.c. */
#include <stdio.h>
#include <stdlib.h>

#include "support.h"

enum {
    LAUNCHES = 20,
    REPLAYS = 15,
    PAGE = 16,
    HEADS = 32,
    KV_HEADS = 8,
    DIM = 128
};

typedef struct gpu {
    acr_ctx *ctx;
    acr__backend_device *device;
    double peak;
    int64_t part;
} gpu;

static void *device_memory(const gpu *g, int64_t bytes)
{
    void *memory = NULL;
    assert_ok(g->device->backend->mem_alloc(g->device, (size_t)bytes, &memory));
    assert_ok(g->device->backend->mem_fill(g->device, memory, 0, (size_t)bytes));
    return memory;
}

static void *uploaded(const gpu *g, const void *from, int64_t bytes)
{
    void *memory = device_memory(g, bytes);
    assert_ok(g->device->backend->mem_upload(g->device, memory, from, (size_t)bytes));
    return memory;
}

static void free_all(const gpu *g, void *const *memory, size_t count)
{
    for (size_t i = 0; i < count; i++)
        g->device->backend->mem_free(g->device, memory[i]);
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* One untimed call loads the code. */
static void print_rate(const gpu *g, acr__enqueue *call, void *arg, double bytes, const char *text)
{
    const acr__timing *timing = g->device->backend->timing;
    acr__graph *graph = NULL;
    double seconds[REPLAYS];
    assert_ok(call(arg, NULL));
    assert_ok(g->device->backend->synchronize(g->device));
    assert_ok(timing->graph_record(&graph, g->device, call, arg, LAUNCHES));
    assert_ok(timing->graph_time(graph, REPLAYS, seconds));
    timing->graph_free(graph);
    qsort(seconds, REPLAYS, sizeof *seconds, by_size);
    const double median = seconds[REPLAYS / 2];
    printf("%-58s %9.2f us  %6.0f GB/s  %5.1f %%\n", text, median * 1e6, bytes / median * 1e-9,
           100.0 * bytes / median / g->peak);
    fflush(stdout);
}

/* ---- Merging ---- */

typedef struct merge_call {
    acr_ctx *ctx;
    acr_merge_args args;
} merge_call;

static acr_status merge(void *arg, void *stream)
{
    const merge_call *c = arg;
    return acr_merge(c->ctx, &c->args, stream);
}

static void time_merge(const gpu *g, acr_dtype dtype, acr_dtype out_dtype, int parts, int64_t all_rows)
{
    const int64_t rows = all_rows / g->part < HEADS ? HEADS : all_rows / g->part,
                  in = rows * DIM * acr__dtype_bytes(dtype), out = rows * DIM * acr__dtype_bytes(out_dtype);
    acr_part part[8];
    void *memory[18];
    size_t count = 0;
    for (int i = 0; i < parts; i++) {
        part[i] = (acr_part){memory[count] = device_memory(g, in), memory[count + 1] = device_memory(g, rows * 4)};
        count += 2;
    }
    merge_call call = {g->ctx, ACR_MERGE_ARGS_INIT};
    acr_merge_args *m = &call.args;
    m->dtype = dtype;
    m->out_dtype = out_dtype;
    m->batch = 1;
    m->heads = HEADS;
    m->len = rows / HEADS;
    m->dim = DIM;
    m->count = parts;
    m->parts = part;
    m->o = memory[count++] = device_memory(g, out);
    m->lse = memory[count++] = device_memory(g, rows * 4);
    char text[96];
    snprintf(text, sizeof text, "merge %d parts, %s to %s, %lld rows of %d", parts, acr__dtype_text(dtype),
             acr__dtype_text(out_dtype), (long long)rows, DIM);
    print_rate(g, merge, &call, (double)(parts * (in + rows * 4) + out + rows * 4), text);
    free_all(g, memory, count);
}

/* ---- Appending ---- */

typedef struct append_call {
    acr_ctx *ctx;
    acr_append_args args;
} append_call;

static acr_status append(void *arg, void *stream)
{
    const append_call *c = arg;
    return acr_append(c->ctx, &c->args, stream);
}

/* `len` new tokens of each sequence behind `before` that are there, with rotation of q and k, into pages in an order
 * that is none. */
static void time_append(const gpu *g, acr_dtype cache, int64_t entries, int64_t len, int64_t before)
{
    const int64_t batch = entries >= g->part ? entries / g->part : 1, tokens = batch * len,
                  needed = (before + len + PAGE - 1) / PAGE, pages = batch * needed, q_bytes = tokens * HEADS * DIM * 2,
                  kv_bytes = tokens * KV_HEADS * DIM * 2, row_bytes = (int64_t)KV_HEADS * DIM * acr__dtype_bytes(cache),
                  table_bytes = pages * 4;
    int32_t *table = malloc((size_t)table_bytes), *lens = malloc((size_t)batch * 4);
    if (!table || !lens)
        abort();
    for (int64_t i = 0; i < pages; i++)
        table[i] = (int32_t)(i * 7919 % pages); /* a prime that divides none of these numbers of pages */
    for (int64_t i = 0; i < batch; i++)
        lens[i] = (int32_t)(before + len);
    append_call call = {g->ctx, ACR_APPEND_ARGS_INIT};
    acr_append_args *a = &call.args;
    a->dtype = ACR_F16;
    a->cache_dtype = cache;
    a->layout = ACR_BSHD;
    a->batch = batch;
    a->q_heads = HEADS;
    a->kv_heads = KV_HEADS;
    a->len = len;
    a->qk_dim = DIM;
    a->page = PAGE;
    a->pages = pages;
    a->table_stride = needed;
    a->rope_dim = DIM;
    a->rope_rows = before + len;
    void *memory[10] = {device_memory(g, q_bytes),
                        device_memory(g, kv_bytes),
                        device_memory(g, kv_bytes),
                        device_memory(g, q_bytes),
                        device_memory(g, pages * PAGE * row_bytes),
                        device_memory(g, pages * PAGE * row_bytes),
                        device_memory(g, a->rope_rows * DIM * 2),
                        device_memory(g, a->rope_rows * DIM * 2),
                        uploaded(g, table, table_bytes),
                        uploaded(g, lens, batch * 4)};
    a->q = memory[0];
    a->k = memory[1];
    a->v = memory[2];
    a->q_out = memory[3];
    a->k_cache = memory[4];
    a->v_cache = memory[5];
    a->cos = memory[6];
    a->sin = memory[7];
    a->page_table = memory[8];
    a->kv_lens = memory[9];
    char text[96];
    snprintf(text, sizeof text, "append %lld x %lld tokens, %d/%d heads of %d, pages of %s", (long long)batch,
             (long long)len, HEADS, KV_HEADS, DIM, acr__dtype_text(cache));
    print_rate(g, append, &call, (double)(2 * q_bytes + 2 * kv_bytes + 2 * tokens * row_bytes), text);
    free_all(g, memory, COUNT_OF(memory));
    free(table);
    free(lens);
}

int main(int argc, char **argv)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    gpu g = {.peak = argc > 1 ? strtod(argv[1], NULL) : 4.8e12, .part = argc > 2 ? strtoll(argv[2], NULL, 10) : 1};
    options.backend = "cuda";
    if (acr_ctx_create(&g.ctx, &options) != ACR_OK) {
        fprintf(stderr, "op_rates: %s\n", acr_last_error());
        return 1;
    }
    g.device = acr__ctx_backend_device(g.ctx);
    time_merge(&g, ACR_F16, ACR_F16, 2, 1 << 20);
    time_merge(&g, ACR_F32, ACR_BF16, 2, 1 << 19);
    time_merge(&g, ACR_F32, ACR_BF16, 8, 1 << 18);
    time_merge(&g, ACR_F32, ACR_F16, 2, 1 << 10);
    time_append(&g, ACR_F16, 16, 2048, 0);
    time_append(&g, ACR_E4M3, 16, 2048, 0);
    time_append(&g, ACR_F16, 4, 2048, 0);
    time_append(&g, ACR_E4M3, 4, 2048, 0);
    time_append(&g, ACR_F16, 32, 1, 2047);
    time_append(&g, ACR_E4M3, 32, 1, 2047);
    time_append(&g, ACR_F16, 128, 1, 2047);
    time_append(&g, ACR_E4M3, 128, 1, 2047);
    acr_ctx_destroy(g.ctx);
    return 0;
}
