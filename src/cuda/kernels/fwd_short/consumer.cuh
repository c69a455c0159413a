/* fwd_short's consumers, a warpgroup each: what a thread keeps, its products, and what it waits for and releases.
 * Arrays are in registers, laid out as isa/wgmma.cuh says; of the two rows that a lane holds, row 0 is from the top
 * half of the tile and row 1 from the bottom half. */
#ifndef ACR_CUDA_FWD_SHORT_CONSUMER_CUH
#define ACR_CUDA_FWD_SHORT_CONSUMER_CUH

#include "cuda/device/isa/trace_points.cuh"
#include "cuda/device/isa/shared.cuh"
#include "cuda/device/isa/wgmma_fp8.cuh"
#include "cuda/kernels/fwd_short/tile.cuh"

enum {
    STEP_BYTES = 32, /* of the rows of Q and K, in one product */
    SCORE_STEPS = DIM * ELEM_BYTES / STEP_BYTES
};

typedef float score_tile[CHUNK_KEYS / 2];
typedef float output_tile[DIM / 2];
typedef uint32_t probability_tile[CHUNK_KEYS / 4];
typedef uint32_t query_tile[4 * SCORE_STEPS];

/* What a thread knows of its work, and its queries. */
typedef struct consumer {
    uint32_t smem;
    int index; /* among the consumers */
    int warp;  /* of the consumer */
    int lane;
    uint32_t q_at; /* its rows of Q: two halves */
    uint32_t k, v; /* low words of the descriptors of stage 0, the consumer's keys */
    int passed;    /* steps before chunk 0: none, or in a second pass those of the first */
    float scale_log2;
    row_keys seen; /* by the lane's rows, counted from the consumer's first key */
#if TERMS
    const fwd_args *args;
    row_terms terms[2];          /* of the lane's rows */
    int head, first_column, end; /* the lane's first key of chunk 0; one past the last key that exists */
#endif
    int late;          /* whether the next kernel may start only now */
    int chunks;        /* of either consumer, so that both take the same way: chunk i begins KV_TILE * i keys later */
    int masked;        /* whether any row of the tile does not see all of the chunks' keys */
    int top_chunks;    /* so many have keys that a row of the top half sees, at least 1 */
    int whole_chunks;  /* so many are seen to their end by every row of the tile */
    int left_chunks;   /* WINDOW: so many are not seen from their start on by every row of the tile */
    int bottom_chunks; /* so many are seen whole by every row of the bottom half */
    int present_rows;  /* of V, in the last chunk; beyond, memory may hold anything. CHUNK_KEYS: nothing to do */
    query_tile q;
    uint32_t order; /* see keep_order */
    uint32_t zero;  /* 0, which the compiler does not know */
} consumer;

/* Under a mask CTAs last differently long, and the next kernel's, started early, are in the way of the last. */
DEV int start_next_late(const fwd_args &a)
{
    return WINDOW || a.mask != FWD_MASK_NONE;
}

/* Behind what needs no other kernel's results. */
DEV void meet_other_kernels(const fwd_args &a)
{
    wait_for_previous_kernel();
    if (!start_next_late(a))
        allow_next_kernel();
}

/* From here on the scale is a value of which the assembler does not know that it is a kernel's parameter: such a one it
 * would load again for every few uses, 24 times a chunk. Where keys are masked that gains nothing. */
DEV void keep_scale_in_register(consumer &c)
{
    c.scale_log2 = __uint_as_float(__float_as_uint(c.scale_log2) | c.zero);
}

DEV void make_consumer(consumer &c, const fwd_args &a, const tile &t, uint32_t smem, int index)
{
    c.smem = smem;
    c.index = index;
    c.warp = threadIdx.x / WARP_THREADS % 4;
    c.lane = threadIdx.x % WARP_THREADS;
    c.q_at = ADDRESS(smem, q) + (SHARED_ROWS ? 0 : index * 2 * Q_HALF_BYTES);
    const uint32_t no_panel_stride = 1 << 16, v_panel_stride = KV_PANEL_BYTES / 16 << 16;
    const int first_chunk = SHARED_ROWS ? index : 0, first_key = t.first_key + first_chunk * CHUNK_KEYS;
    c.k = (ADDRESS(smem, k) + first_chunk * CHUNK_PANEL_BYTES) / 16 | no_panel_stride;
    c.v = (ADDRESS(smem, v) + first_chunk * CHUNK_PANEL_BYTES) / 16 | v_panel_stride;
    c.passed = 0;
    c.scale_log2 = scales_of(a, t).scale_log2;
    const int row = 8 * c.warp + c.lane / 4;
    c.seen = lane_keys(t.entry, t.first[0] + row, t.first[1] + row, 2 * (c.lane % 4) + first_key);
    const int whole = min(t.seen[0].full_end, t.seen[1].full_end);
#if TERMS
    c.args = &a;
    c.head = t.head;
    c.first_column = 2 * (c.lane % 4) + first_key;
    c.end = t.entry.kv_len;
#pragma unroll
    for (int half = 0; half < 2; half++)
        c.terms[half] = find_row_terms(a, t.entry, t.batch, t.head, t.first[half] + row);
#endif
    c.late = start_next_late(a);
    c.chunks = t.stages;
    c.masked = whole < c.chunks * KV_TILE;
    c.top_chunks = max(1, (t.seen[0].end - first_key + KV_TILE - 1) / KV_TILE);
    c.whole_chunks = (whole - first_key + KV_TILE - CHUNK_KEYS) / KV_TILE;
    c.left_chunks = (max(t.seen[0].full_first, t.seen[1].full_first) - first_key + KV_TILE - 1) / KV_TILE;
    c.bottom_chunks = (t.seen[1].full_end - first_key + KV_TILE - CHUNK_KEYS) / KV_TILE;
    c.present_rows = CHUNK_KEYS;
    if (!E4M3 && a.kv_lens != nullptr) /* upcast rows are 0 there */
        c.present_rows = max(0, min((int)CHUNK_KEYS, t.entry.kv_len - first_key - (c.chunks - 1) * KV_TILE));
    c.order = 0;
    c.zero = (uint32_t)c.chunks >> 31;
}

/* Consumer 1 begins a little later, so that one has products where the other has exponentials. Barriers that keep them
 * so cost more than they bring. */
DEV void lag_behind(int index)
{
    if (LAG == 0)
        return;
    const long long start = clock64();
    while (index == 1 && clock64() - start < LAG)
        ;
}

/* Keeps the assembler from moving instructions across: it does not reorder around a clock read (2 cycles) whose value
 * is used. */
DEV void keep_order(consumer &c)
{
    asm volatile("{ .reg .u32 t; mov.u32 t, %%clock; xor.b32 %0, %0, t; }" : "+r"(c.order)::"memory");
}

/* Where keep_order's value is used, which never happens. The output counts as used here, too, with rows that are not
 * stored: without any use the assembler takes their registers away from the products and serialises them. */
DEV void end_order(const consumer &c, const output_tile &o)
{
    if (c.order != 0x9e3779b9)
        return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        sum += ONE_HALF ? o[i] : 0.0f;
    __nanosleep(__float_as_uint(sum) & 1);
}

/* Whether some row of the tile does not see some key of a chunk. */
DEV int is_masked(const consumer &c, int chunk)
{
    return chunk >= c.whole_chunks || (WINDOW && chunk < c.left_chunks);
}

/* ---- Waiting and releasing ---- */

DEV void wait_keys(const consumer &c, int chunk)
{
    barrier_wait(barrier_of(ADDRESS(c.smem, k_full), c.passed + chunk), phase_of(c.passed + chunk));
}

/* JOINT: they came with the keys. */
DEV void wait_values(const consumer &c, int chunk)
{
    if (E4M3)
        barrier_wait(barrier_of(ADDRESS(c.smem, v_upcast), c.passed + chunk), phase_of(c.passed + chunk));
    else if (!JOINT)
        wait_loaded_values(c.smem, c.passed + chunk);
}

/* Waits for the last chunk of V. Behind the batch entry's keys it may hold NaN, which a probability of 0 does not
 * silence: such rows become 0. */
DEV void wait_last_values(const consumer &c)
{
    const int chunk = c.chunks - 1;
    wait_values(c, chunk);
    if (c.present_rows == CHUNK_KEYS)
        return;
    const uint32_t chunk_at =
        stage_of(ADDRESS(c.smem, v), c.passed + chunk, V_STAGE_BYTES) + (SHARED_ROWS ? c.index * CHUNK_PANEL_BYTES : 0);
    for (int at = c.present_rows * PANEL_ROW_BYTES + threadIdx.x % WARPGROUP_THREADS * 16; at < CHUNK_PANEL_BYTES;
         at += WARPGROUP_THREADS * 16)
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            store_shared_4(chunk_at + panel * KV_PANEL_BYTES + at, 0, 0, 0, 0);
    shared_stores_visible();
    named_sync(CONSUMER_ALONE + c.index, WARPGROUP_THREADS);
}

/* The warp has read this chunk of K for the last time. JOINT: the release of V counts. */
DEV void release_keys(const consumer &c, int chunk)
{
    if (RING && !JOINT && c.lane == 0)
        barrier_arrive(barrier_of(ADDRESS(c.smem, k_free), c.passed + chunk));
}

DEV void release_values(const consumer &c, int chunk)
{
    if (RING && c.lane == 0)
        barrier_arrive(barrier_of(ADDRESS(c.smem, v_free), c.passed + chunk));
}

/* ---- Products ---- */

DEV void load_query(consumer &c)
{
    const int half = c.lane / 8 % 2 % HALVES, row = 8 * c.warp + c.lane % 8;
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; step++) {
        const int piece = step % 4 * 2 + c.lane / 16; /* of 16 bytes in the panel's row */
        load_matrices(c.q + 4 * step, c.q_at + half * Q_HALF_BYTES + step / 4 * Q_PANEL_BYTES + row * PANEL_ROW_BYTES +
                                          ((piece ^ (row % 8)) << 4));
    }
}

DEV void receive_query(consumer &c)
{
    wait_keys(c, 0);
    ACR_TRACE_POINT(0, "Q and first keys landed");
    load_query(c);
}

DEV uint64_t descriptor(uint32_t low, int bytes)
{
    uint64_t d; /* the high word is a constant: 1024 bytes between groups of 8 rows, 128-byte swizzle */
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low + bytes / 16), "n"(1 << 30 | SWIZZLE_ROWS_BYTES / 16));
    return d;
}

/* S += Q * transpose(K), 16 of the head's dims (e4m3: 32), Q in registers. */
DEV void product_scores(score_tile &d, const uint32_t *a, uint64_t b, int accumulate)
{
    if (E4M3) {
        wgmma_fp8_rs(d, a, b, accumulate);
        return;
    }
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; " WGMMA_TEXT(64) ", {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : WGMMA_IO_N64
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

DEV void score_step(const consumer &c, score_tile &s, int chunk, int step)
{
    product_scores(s, c.q + 4 * step,
                   descriptor(stage_of(c.k, c.passed + chunk, K_STAGE_BYTES / 16),
                              step / 4 * KV_PANEL_BYTES + step % 4 * STEP_BYTES),
                   step != 0);
}

DEV void start_scores(const consumer &c, score_tile &s, int chunk)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; step++)
        score_step(c, s, chunk, step);
    wgmma_commit();
}

/* Makes the raw scores of a chunk ready for the softmax. key: its first, counted from the consumer's first. */
DEV void finish_chunk(const consumer &c, score_tile &s, int key, int masked)
{
#if TERMS
    finish_scores(s, c.seen, key, masked, *c.args, c.terms, c.first_column, c.end);
#else
    finish_scores(s, c.seen, key, masked);
#endif
}

DEV void compute_first_scores(const consumer &c, score_tile &s)
{
    start_scores(c, s, 0);
    WGMMA_WAIT(0);
    ACR_TRACE_POINT(0, "first scores ready");
}

/* O += P * V, 16 of the chunk's keys. */
DEV void output_step(const consumer &c, output_tile &o, const probability_tile &p, int chunk, int step, int accumulate)
{
    wgmma_rs_mn(o, p + 4 * step,
                descriptor(stage_of(c.v, c.passed + chunk, V_STAGE_BYTES / 16), step * WGMMA_K * PANEL_ROW_BYTES),
                accumulate || step != 0);
}

DEV void start_output(const consumer &c, output_tile &o, const probability_tile &p, int chunk, int accumulate)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < CHUNK_KEYS / WGMMA_K; step++)
        output_step(c, o, p, chunk, step, accumulate);
    wgmma_commit();
}

#endif
