/* Forward attention for short problems on Hopper, fp16, bf16 and e4m3: the latency kernel, sm_90a. One CTA a query
 * tile, alone on its SM.
 *
 * A producer thread loads Q, K and V by tensor maps; two consumer warpgroups multiply. With tiles of 64 or 32 rows both
 * hold the same rows and share the keys, of every 128 the first 64 and the last 64, and add their results at the end;
 * with tiles of 128 rows each holds its own. All keys of a head lie in shared memory at once, or pass through a ring.
 * Of a consumer's rows, 32 are from the top and 32 from the bottom of the sequence, so that under a causal mask all
 * CTAs have about the same number of exponentials. A tile of 32 rows fills half of each product, and is for problems
 * that would leave SMs without work.
 *
 * The softmax does not search for the row maximum: it subtracts the maximum over the row's first 16 keys of each
 * consumer. Every exponential is at most the row sum, so a sum within fp16's range proves at the end that no
 * probability overflowed; otherwise the tile is computed once more, with the true maximum. See
 * docs/kernels/fwd_short.md.
 *
 * Scores of e4m3 inputs are products of 8 bits. V is widened to fp16, which holds all of e4m3, where it lies in shared
 * memory, by warps of the producer's warpgroup; then all is as with fp16. Products of 8 bits would want V transposed,
 * and probabilities in 8 bits.
 *
 * Parameters: DIM (64 or 128: head dims up to it, zero-padded), STAGES (of 128 keys, of 64 with Q_TILE 128: without a
 * ring kv_len <= 128 * STAGES); optional Q_TILE (32, 64, 128; default 64), RING=1, BF16=1 or E4M3=1, LAG (of consumer
 * 1, in cycles), JOINT=1 (K and V of a stage land and are free together: one barrier in place of two), OUTPUT_AT (the
 * group of 8 keys from which on products with V are started, 0 to 4; default 4), LATE=1 (of two chunks a round, the
 * first does not wait for its product with V; Q_TILE 128). */
#include "fwd_args.h"

#ifndef BF16
#define BF16 0
#endif
#ifndef E4M3
#define E4M3 0
#endif
#ifndef Q_TILE
#define Q_TILE 64
#endif
#ifndef RING
#define RING 0
#endif
#ifndef LAG
#define LAG 0
#endif
#ifndef JOINT
#define JOINT 0
#endif
#ifndef OUTPUT_AT
#define OUTPUT_AT 4
#endif
#ifndef LATE
#define LATE 0
#endif
enum {
    PANEL_ROW_BYTES = 128, /* a tile is stored in panels of such rows, as the swizzle wants it */
    OUT_BYTES = 2,         /* of an element of the output, and of V as it is multiplied */
    PANEL_ELEMS = PANEL_ROW_BYTES / OUT_BYTES,
    PANELS = DIM / PANEL_ELEMS,
    ELEM_BYTES = E4M3 ? 1 : 2,                /* of Q, K and V as they come */
    BOX_ELEMS = PANEL_ROW_BYTES / ELEM_BYTES, /* in a panel's row then */
    BOXES = (DIM + BOX_ELEMS - 1) / BOX_ELEMS,
    HALF_ROWS = 32, /* a consumer's rows: so many from the top, and as many from the bottom */
    HALVES = Q_TILE / HALF_ROWS,
    ONE_HALF = HALVES == 1,    /* the bottom half is all that there is; the top one holds the same, and is not stored */
    SHARED_ROWS = HALVES <= 2, /* both consumers hold the same rows */
    CHUNK_KEYS = 64,           /* that a consumer takes at a time */
    KV_TILE = SHARED_ROWS ? 2 * CHUNK_KEYS : CHUNK_KEYS,
    CONSUMERS = 2,
    CONSUMER_WARPS = 4, /* of each */
    CONSUMER_THREADS = CONSUMERS * CONSUMER_WARPS * 32,
    PRODUCER_THREADS = 128, /* a whole warpgroup, for its registers */
    THREADS = CONSUMER_THREADS + PRODUCER_THREADS,
    OUT_ROWS = SHARED_ROWS ? 1 : 2, /* that a lane stores */
    Q_PANEL_BYTES = HALF_ROWS * PANEL_ROW_BYTES,
    Q_HALF_BYTES = PANELS * Q_PANEL_BYTES, /* the output's, which takes its place */
    KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES,
    LOAD_BYTES = BOXES * KV_PANEL_BYTES, /* of a stage of K or V, as it comes */
    K_STAGE_BYTES = LOAD_BYTES,
    V_STAGE_BYTES = PANELS * KV_PANEL_BYTES,
    CHUNK_BYTES = CHUNK_KEYS * PANEL_ROW_BYTES, /* in a panel */
    /* Shared memory: Q, K, V, what a consumer hands to the other (row statistics, half of its output), barriers, and
     * whether the tile is computed again. */
    K_AT = HALVES * Q_HALF_BYTES,
    V_AT = K_AT + STAGES * K_STAGE_BYTES,
    ROWS_AT = V_AT + STAGES * V_STAGE_BYTES,
    ROWS_BYTES = 128 * 16,
    PART_AT = ROWS_AT + (SHARED_ROWS ? 2 * ROWS_BYTES : 0),
    PART_BYTES = 128 * DIM / 2,
    K_FULL_AT = PART_AT + (SHARED_ROWS ? 2 * PART_BYTES : 0),
    V_FULL_AT = K_FULL_AT + STAGES * 8,
    V_WIDE_AT = V_FULL_AT + STAGES * 8,
    K_FREE_AT = V_WIDE_AT + (E4M3 ? STAGES * 8 : 0),
    V_FREE_AT = K_FREE_AT + (RING ? STAGES * 8 : 0),
    VERDICT_AT = V_FREE_AT + (RING ? STAGES * 8 : 0),
    AGAIN_AT = VERDICT_AT + (RING ? 8 : 0),
    SMEM_BYTES = AGAIN_AT + (RING ? 8 : 0)
};

#ifdef __CUDACC__

#if BF16
#define WGMMA_TYPE "bf16"
#else
#define WGMMA_TYPE "f16"
#endif
#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/isa/element.cuh"
#include "cuda/device/isa/fragment.cuh"
#include "cuda/device/attention/visible.cuh"
#include "cuda/device/isa/marks.cuh"
#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/scales.cuh"
#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/isa/tma.cuh"
#include "cuda/device/isa/wgmma_fp8.cuh"

enum {
    ELEMENT = E4M3 ? ACR_E4M3 : BF16 ? ACR_BF16 : ACR_F16,
    OUT_ELEMENT = E4M3 ? ACR_BF16_OR_F16 : ELEMENT,
    /* Registers of a thread, multiples of 8: the launch gives every thread an equal share, then the producer's go to
     * the consumers. */
    PRODUCER_REGISTERS = E4M3 ? 72 : 24,
    CONSUMER_REGISTERS = E4M3 ? 216 : 240,
    PRODUCER_WARPS = 1, /* one thread works; the other warps of its warpgroup widen V, or end at once */
    WIDENERS = PRODUCER_THREADS / WARP_THREADS - PRODUCER_WARPS,
    GROUP_ROWS = 8,            /* the swizzle's period */
    ROWS_AT_ONCE = 6 / PANELS, /* groups of rows that a lane of a widener has in registers */
    V_AHEAD = E4M3,            /* V that is still to be widened is asked for a stage earlier */
    /* Named barriers (0 is __syncthreads). */
    VOTE = 1,
    CONSUMER_ALONE = 2, /* and 3: one for each */
    WARP_PAIR = 4       /* to 7: the warps of both consumers that hold the same rows */
};

static_assert(DIM == 64 || DIM == 128, "DIM: 64 or 128");
static_assert(!(BF16 && E4M3), "BF16, E4M3: one of them");
static_assert(Q_TILE == 32 || Q_TILE == 64 || (Q_TILE == 128 && RING), "Q_TILE: 32, 64, or with a ring 128");
static_assert(RING ? STAGES >= 2 : STAGES >= 1 && STAGES <= 4,
              "STAGES: a straight line of code for each number of chunks");
static_assert(OUTPUT_AT >= 0 && OUTPUT_AT <= 4, "OUTPUT_AT: four products, in the eight groups of a chunk");
static_assert(!JOINT || (RING && STAGES >= 3 + LATE), "JOINT: a ring in which the keys two chunks ahead have a stage");
static_assert(!LATE || !SHARED_ROWS, "LATE: for Q_TILE 128, whose loop has two chunks a round");
static_assert(SMEM_BYTES <= 232448, "stages: 227 KB, a CTA's limit on sm_90");

/* ---- The tile ---- */

/* A consumer's query rows are HALF_ROWS from first[0], counted from the top, and HALF_ROWS from first[1], as far from
 * the bottom; where the two meet, rows are held twice or do not exist. */
typedef struct tile {
    int first[2];
    int head, batch;
    keys seen[2]; /* of each half */
    int stages;   /* that hold every key which the CTA's rows see */
} tile;

/* Of a consumer's half: 0 from the top, 1 from the bottom. */
DEV int first_row(const fwd_args &a, int half, int consumer)
{
    const int from_end = SHARED_ROWS ? blockIdx.x : 2 * blockIdx.x + consumer;
    return (half && !ONE_HALF ? (a.q_len - 1) / HALF_ROWS - from_end : from_end) * HALF_ROWS;
}

DEV tile find_tile(const fwd_args &a, int consumer)
{
    tile t;
    t.head = blockIdx.y;
    t.batch = blockIdx.z;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        t.first[half] = first_row(a, half, consumer);
        t.seen[half] = find_keys(a, t.batch, t.first[half], HALF_ROWS);
    }
    int end = max(t.seen[0].end, t.seen[1].end);
    if (!SHARED_ROWS) /* rows see the more keys the lower they are */
        end = max(end, find_keys(a, t.batch, max(first_row(a, 0, 1), first_row(a, 1, 0)), HALF_ROWS).end);
    t.stages = (end + KV_TILE - 1) / KV_TILE;
    return t;
}

DEV head_scales scales_of(const fwd_args &a, const tile &t)
{
    return E4M3 ? find_scales(a, t.batch, t.head / a.group) : head_scales{a.scale, a.scale_log2, 1.0f};
}

/* ---- Stages: a step is a stage's use. Without a ring each is used once. ---- */

DEV uint32_t barrier_of(uint32_t first, int step)
{
    return first + BARRIER_BYTES * (RING ? step % STAGES : step);
}

DEV uint32_t phase_of(int step)
{
    return RING ? step / STAGES & 1 : 0;
}

DEV uint32_t stage_of(uint32_t first, int step, int bytes)
{
    return first + (RING ? step % STAGES : step) * bytes;
}

/* ---- Producer: one thread ---- */

DEV void load_stage(uint32_t to, const fwd_map *map, uint32_t full, int stage, int head, int batch)
{
#pragma unroll
    for (int box = 0; box < BOXES; box++)
        load_box(to + box * KV_PANEL_BYTES, map, full, BOX_ELEMS * box, stage * KV_TILE, head, batch);
}

/* V as it comes ends where it will as it is used. */
DEV uint32_t v_load_at(uint32_t smem, int step)
{
    return stage_of(smem + V_AT, step, V_STAGE_BYTES) + V_STAGE_BYTES - LOAD_BYTES;
}

/* Of the other stages; the first keys' barrier was initialised before their loads. */
DEV void init_barriers(uint32_t smem)
{
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        if (stage > 0)
            barrier_init(smem + K_FULL_AT + BARRIER_BYTES * stage, 1);
        barrier_init(smem + V_FULL_AT + BARRIER_BYTES * stage, 1);
        if (E4M3)
            barrier_init(smem + V_WIDE_AT + BARRIER_BYTES * stage, WIDENERS);
        if (RING) {
            barrier_init(smem + K_FREE_AT + BARRIER_BYTES * stage, CONSUMERS * CONSUMER_WARPS);
            barrier_init(smem + V_FREE_AT + BARRIER_BYTES * stage, CONSUMERS * CONSUMER_WARPS);
        }
    }
    if (RING)
        barrier_init(smem + VERDICT_AT, 1);
    barrier_init_done();
}

/* The first loads: the query rows and the first keys, on one barrier, before anything that can wait. */
DEV void produce_first(const fwd_args &a, const fwd_maps &maps, uint32_t smem, int kv_head)
{
    const uint32_t full = smem + K_FULL_AT;
    barrier_init(full, 1);
    barrier_init_done();
    wait_for_previous_kernel();
    barrier_arrive_expecting(full, (JOINT ? 2 : 1) * LOAD_BYTES + HALVES * BOXES * Q_PANEL_BYTES);
    load_stage(smem + K_AT, &maps.k, full, 0, kv_head, blockIdx.z);
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int box = 0; box < BOXES; box++)
            load_box(smem + half * Q_HALF_BYTES + box * Q_PANEL_BYTES, &maps.q, full, BOX_ELEMS * box,
                     first_row(a, half % 2, half / 2), blockIdx.y, blockIdx.z);
    if (JOINT)
        load_stage(v_load_at(smem, 0), &maps.v, full, 0, kv_head, blockIdx.z);
    ACR_MARK(0, "first loads issued");
}

/* JOINT: of V as well. */
DEV void load_k(const fwd_maps &maps, uint32_t smem, int kv_head, int stage, int step)
{
    const uint32_t full = barrier_of(smem + K_FULL_AT, step);
    if (RING)
        barrier_wait(barrier_of(smem + (JOINT ? V_FREE_AT : K_FREE_AT), step), !phase_of(step));
    barrier_arrive_expecting(full, (JOINT ? 2 : 1) * LOAD_BYTES);
    load_stage(stage_of(smem + K_AT, step, K_STAGE_BYTES), &maps.k, full, stage, kv_head, blockIdx.z);
    if (JOINT)
        load_stage(v_load_at(smem, step), &maps.v, full, stage, kv_head, blockIdx.z);
    ACR_MARK(step, "K asked for");
}

DEV void load_v(const fwd_maps &maps, uint32_t smem, int kv_head, int stage, int step)
{
    if (JOINT)
        return;
    const uint32_t full = barrier_of(smem + V_FULL_AT, step);
    if (RING)
        barrier_wait(barrier_of(smem + V_FREE_AT, step), !phase_of(step));
    barrier_arrive_expecting(full, LOAD_BYTES);
    load_stage(v_load_at(smem, step), &maps.v, full, stage, kv_head, blockIdx.z);
    ACR_MARK(step, "V asked for");
}

/* In the order of use, K two stages ahead of V, and never all at once: loads in flight share the bandwidth, so the
 * first would come last. `from`: the first K that is not under way yet. */
DEV void produce(const fwd_maps &maps, uint32_t smem, int kv_head, int stages, int from, int step)
{
    for (int stage = from; stage < 2 && stage < stages; stage++)
        load_k(maps, smem, kv_head, stage, step + stage);
    if (V_AHEAD && stages > 0)
        load_v(maps, smem, kv_head, 0, step);
    for (int stage = 0; stage < stages; stage++, step++) {
        barrier_wait(barrier_of(smem + K_FULL_AT, step), phase_of(step));
        if (!V_AHEAD)
            load_v(maps, smem, kv_head, stage, step);
        if (stage + 2 < stages)
            load_k(maps, smem, kv_head, stage + 2, step + 2);
        if (V_AHEAD && stage + 1 < stages)
            load_v(maps, smem, kv_head, stage + 1, step + 1);
    }
    if (stages == 0) /* no CTA ends before its loads */
        barrier_wait(smem + K_FULL_AT, 0);
}

/* With a ring: whether the consumers want everything once more. */
DEV int wait_verdict(uint32_t smem)
{
    barrier_wait(smem + VERDICT_AT, 0);
    int again;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(again) : "r"(smem + AGAIN_AT) : "memory");
    return again;
}

DEV void produce_all(const fwd_maps &maps, uint32_t smem, int kv_head, int stages)
{
    produce(maps, smem, kv_head, stages, 1, 0);
    if (RING && wait_verdict(smem))
        produce(maps, smem, kv_head, stages, 0, stages);
}

/* ---- Wideners: warps of the producer's warpgroup turn V of e4m3 into fp16. Eight rows, the swizzle's period, are one
 * warp's: it has read all of them before it writes where they were. A lane has 16 dims of a row in each panel; eight
 * lanes side by side are in eight rows, so in different banks, when they read and when they write. ---- */

DEV uint32_t place_in(uint32_t rows_at, int row, int place)
{
    return rows_at + row * PANEL_ROW_BYTES + ((place ^ row) << 4);
}

DEV void read_rows(uint4 (&x)[PANELS], uint32_t rows_at, int row, int lane)
{
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[panel].x), "=r"(x[panel].y), "=r"(x[panel].z), "=r"(x[panel].w)
                     : "r"(place_in(rows_at, row, 4 * panel + lane / 8))
                     : "memory");
}

/* Eight e4m3 as fp16, which holds all of them. */
DEV void write_wide(uint32_t to, uint32_t low, uint32_t high)
{
    asm volatile("{ .reg .b16 a, b, c, d; .reg .b32 w, x, y, z; mov.b32 {a, b}, %1; mov.b32 {c, d}, %2; "
                 "cvt.rn.f16x2.e4m3x2 w, a; cvt.rn.f16x2.e4m3x2 x, b; cvt.rn.f16x2.e4m3x2 y, c; "
                 "cvt.rn.f16x2.e4m3x2 z, d; st.shared.v4.b32 [%0], {w, x, y, z}; }" ::"r"(to),
                 "r"(low), "r"(high)
                 : "memory");
}

DEV void write_rows(const uint4 (&x)[PANELS], uint32_t rows_at, int row, int lane)
{
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        const uint32_t panel_at = rows_at + panel * KV_PANEL_BYTES;
        write_wide(place_in(panel_at, row, lane / 8 * 2), x[panel].x, x[panel].y);
        write_wide(place_in(panel_at, row, lane / 8 * 2 + 1), x[panel].z, x[panel].w);
    }
}

/* The warp's next rows of a stage, from group `first` of eight on; what is not `present` may hold NaN, which a
 * probability of 0 does not silence, and becomes 0. */
DEV void widen_rows(uint32_t from, uint32_t to, int first, int present, int lane)
{
    const int row = lane % GROUP_ROWS;
    uint4 x[ROWS_AT_ONCE][PANELS];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const int group = first + WIDENERS * i;
        if (group < KV_TILE / GROUP_ROWS)
            read_rows(x[i], from + group * SWIZZLE_ROWS_BYTES, row, lane);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const int group = first + WIDENERS * i;
        if (group * GROUP_ROWS + row >= present)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++)
                x[i][panel] = {0, 0, 0, 0};
        if (group < KV_TILE / GROUP_ROWS)
            write_rows(x[i], to + group * SWIZZLE_ROWS_BYTES, row, lane);
    }
}

DEV void widen_stage(uint32_t smem, int step, int present)
{
    const int warp = threadIdx.x / WARP_THREADS - (CONSUMER_THREADS / WARP_THREADS + PRODUCER_WARPS);
    const int lane = threadIdx.x % WARP_THREADS;
    barrier_wait(barrier_of(smem + (JOINT ? K_FULL_AT : V_FULL_AT), step), phase_of(step));
#pragma unroll
    for (int first = 0; first < KV_TILE / GROUP_ROWS; first += WIDENERS * ROWS_AT_ONCE)
        widen_rows(v_load_at(smem, step), stage_of(smem + V_AT, step, V_STAGE_BYTES), first + warp, present, lane);
    shared_stores_visible();
    __syncwarp();
    if (lane == 0)
        barrier_arrive(barrier_of(smem + V_WIDE_AT, step));
}

DEV void widen_all(uint32_t smem, int stages, int kv_len)
{
    int step = 0;
    do
        for (int stage = 0; stage < stages; stage++)
            widen_stage(smem, step++, kv_len - stage * KV_TILE);
    while (RING && step == stages && wait_verdict(smem));
}

/* The consumers: whether any thread of them says yes. */
DEV int vote(int yes)
{
    int any;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.s32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; selp.s32 %0, 1, 0, q; }"
        : "=r"(any)
        : "r"(yes), "n"((int)VOTE), "n"((int)CONSUMER_THREADS)
        : "memory");
    return any;
}

/* ---- Consumers: a warpgroup each. Arrays are in registers, laid out as isa/wgmma.cuh says; of the two rows that a
 * lane holds, row 0 is from the top half of the tile and row 1 from the bottom half. ---- */

enum {
    STEP_BYTES = 32, /* of the rows of Q and K, in one product */
    SCORE_STEPS = DIM * ELEM_BYTES / STEP_BYTES
};

typedef float score_tile[CHUNK_KEYS / 2];
typedef float output_tile[DIM / 2];
typedef uint32_t probability_tile[CHUNK_KEYS / 4];
typedef uint32_t query_tile[4 * SCORE_STEPS];

typedef struct softmax_rows {
    float reference[2]; /* what is subtracted from the raw scores */
    float offset[2];    /* the same, finite, times scale_log2, and the shift below */
    float sum[2];       /* of this lane's exponentials; lanes of a quad are added at the end */
} softmax_rows;

enum {
    ACCUMULATE = RING || ONE_HALF,          /* the output starts as zeros, not with the first product */
    GROUPS = 8,                             /* of 8 keys: a chunk's exponentials in pieces, products between them */
    GROUP_STEPS = SCORE_STEPS <= 4 ? 1 : 2, /* products for scores, in each of the first groups */
    /* Probabilities are 2^-SHIFT relative to the reference: they may rise by 2^24 before fp16 overflows. */
    SHIFT = BF16 ? 0 : 8
};

/* Of a lane's exponentials: none overflowed, and neither does their product with V. */
#define LARGEST_SUM (BF16 ? 0x1p100f : 60000.0f)

/* Where a thread is, and what stays the same for it. */
typedef struct consumer {
    uint32_t smem;
    int index; /* among the consumers */
    int warp;  /* of the consumer */
    int lane;
    uint32_t q_at; /* its rows of Q: two halves */
    uint32_t k, v; /* low words of the descriptors of stage 0, the consumer's keys */
    int passed;    /* steps before chunk 0: none, or in a second pass those of the first */
    float scale_log2;
    int seen[2];      /* how many keys the lane's rows see, less the lane's first column and the consumer's first key */
    int late;         /* whether the next kernel may start only now */
    int chunks;       /* of either consumer, so that both take the same way: chunk i is at key KV_TILE * i */
    int masked;       /* whether any row of the tile does not see all of the chunks' keys */
    int top_chunks;   /* so many have keys that a row of the top half sees, at least 1 */
    int whole_chunks; /* so many are seen whole by every row of the tile */
    int bottom_chunks; /* so many are seen whole by every row of the bottom half */
    int present_rows;  /* of V, in the last chunk; beyond, memory may hold anything. CHUNK_KEYS: nothing to do */
    query_tile q;
    uint32_t order; /* see keep_order */
    uint32_t zero;  /* 0, which the compiler does not know */
} consumer;

/* Keeps the assembler from moving instructions across: it does not reorder around a clock read (2 cycles) whose value
 * is used. */
DEV void keep_order(consumer &c)
{
    asm volatile("{ .reg .u32 t; mov.u32 t, %%clock; xor.b32 %0, %0, t; }" : "+r"(c.order)::"memory");
}

/* The use, which never happens. It counts for rows that are not stored, too: without any, the assembler takes their
 * registers away from the products and serialises them. */
DEV void use_order(const consumer &c, const output_tile &o)
{
    if (c.order != 0x9e3779b9)
        return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        sum += ONE_HALF ? o[i] : 0.0f;
    __nanosleep(__float_as_uint(sum) & 1);
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

DEV void start_scores(const consumer &c, score_tile &s, int chunk)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; step++)
        score_step(c, s, chunk, step);
    wgmma_commit();
}

/* Scores that a row does not see become -inf. */
DEV void mask_scores(const consumer &c, score_tile &s, int chunk)
{
#pragma unroll
    for (int i = 0; i < CHUNK_KEYS / 2; i++)
        if (chunk * KV_TILE + 8 * (i / 4) + i % 2 >= c.seen[i / 2 % 2])
            s[i] = -CUDART_INF_F;
}

/* Of the lane's columns among the first so many eights. */
DEV float row_max(const score_tile &s, int row, const int eights)
{
    float max = fmaxf(s[2 * row], s[2 * row + 1]);
#pragma unroll
    for (int i = 1; i < eights; i++)
        max = fmaxf(max, fmaxf(s[4 * i + 2 * row], s[4 * i + 2 * row + 1]));
    return max;
}

/* Keys are seen from the first on, so a row that sees none of the first 16 sees none of this consumer's. */
DEV void choose_reference(const consumer &c, softmax_rows &r, const score_tile &s)
{
#pragma unroll
    for (int row = 0; row < 2; row++) {
        r.reference[row] = quad_max(row_max(s, row, 2));
        r.offset[row] = -finite_max(r.reference[row]) * c.scale_log2 - SHIFT;
        r.sum[row] = 0.0f;
    }
}

DEV void scale_scores(const consumer &c, const softmax_rows &r, score_tile &t, const score_tile &s, const int top)
{
#pragma unroll
    for (int i = 0; i < CHUNK_KEYS / 2; i++)
        if (top || i / 2 % 2)
            t[i] = fmaf(s[i], c.scale_log2, r.offset[i / 2 % 2]);
}

DEV void exponentiate(score_tile &t, int group, const int top)
{
#pragma unroll
    for (int i = 4 * group; i < 4 * group + 4; i++)
        if (top || i / 2 % 2)
            t[i] = exp2_fast(t[i]);
}

DEV void add_and_pack(softmax_rows &r, probability_tile &p, const score_tile &t, int group, const int top)
{
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const int i = 4 * group + 2 * row;
        if (top || row) {
            r.sum[row] += t[i] + t[i + 1];
            p[i / 2] = pack<BF16>(t[i], t[i + 1]);
        } else
            p[i / 2] = ONE_HALF ? pack<BF16>(t[i + 2], t[i + 3]) : 0; /* anything finite would do; this compiles best */
    }
}

DEV void wait_keys(const consumer &c, int chunk)
{
    barrier_wait(barrier_of(c.smem + K_FULL_AT, c.passed + chunk), phase_of(c.passed + chunk));
}

/* JOINT: they came with the keys. */
DEV void wait_values(const consumer &c, int chunk)
{
    if (E4M3)
        barrier_wait(barrier_of(c.smem + V_WIDE_AT, c.passed + chunk), phase_of(c.passed + chunk));
    else if (!JOINT)
        barrier_wait(barrier_of(c.smem + V_FULL_AT, c.passed + chunk), phase_of(c.passed + chunk));
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
        stage_of(c.smem + V_AT, c.passed + chunk, V_STAGE_BYTES) + (SHARED_ROWS ? c.index * CHUNK_BYTES : 0);
    for (int at = c.present_rows * PANEL_ROW_BYTES + threadIdx.x % WARPGROUP_THREADS * 16; at < CHUNK_BYTES;
         at += WARPGROUP_THREADS * 16)
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(chunk_at + panel * KV_PANEL_BYTES + at),
                         "r"(0)
                         : "memory");
    shared_stores_visible();
    named_sync(CONSUMER_ALONE + c.index, WARPGROUP_THREADS);
}

/* The warp has read this chunk of K or V for the last time. */
DEV void release(const consumer &c, int free_at, int chunk)
{
    if (RING && !(JOINT && free_at == K_FREE_AT) && c.lane == 0)
        barrier_arrive(barrier_of(c.smem + free_at, c.passed + chunk));
}

/* The exponentials of one chunk, whose scores are in s; between them, one at a time so that none waits for a full
 * queue, the products that can start: the scores of the chunk after, into s, and the chunk before times V. In an early
 * last chunk also three of its own four times V; end_output starts the fourth. top 0: the top half sees none of these
 * keys. drain: the product with V of two chunks before, from p, is still in flight. At the end only products with V may
 * be. */
DEV void compute_chunk(consumer &c, softmax_rows &r, score_tile &s, output_tile &o, probability_tile &p,
                       const probability_tile &before, const int chunk, const int first, const int last, const int top,
                       const int early, const int masked, const int drain)
{
    score_tile t;
    ACR_MARK(chunk, "scores ready, masked");
    scale_scores(c, r, t, s, top);
    if (!last)
        wait_keys(c, chunk + 1);
    if (!first)
        wait_values(c, chunk - 1);
    if (drain) {
        WGMMA_WAIT(0);
        release(c, V_FREE_AT, chunk - 2);
    }
    ACR_MARK(chunk, "scores scaled, next keys and values landed");
    keep_order(c);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int output = early ? group : group - OUTPUT_AT; /* the product with V of the chunk before */
        if (!last && group < SCORE_STEPS / GROUP_STEPS) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < GROUP_STEPS; i++)
                score_step(c, s, chunk + 1, GROUP_STEPS * group + i);
            if (group == SCORE_STEPS / GROUP_STEPS - 1)
                wgmma_commit();
        }
        if (!first && output >= 0 && output < 4) {
            wgmma_fence();
            output_step(c, o, before, chunk - 1, output, ACCUMULATE || chunk > 1);
            if (output == 3)
                wgmma_commit();
        }
        if (early && group == 4) {
            if (masked)
                wait_last_values(c);
            else
                wait_values(c, chunk);
        }
        if (early && (group == 4 || group >= 6)) {
            wgmma_fence();
            output_step(c, o, p, chunk, max(0, group - 5), ACCUMULATE || chunk > 0);
        }
        exponentiate(t, group, top);
        if (group > 0)
            add_and_pack(r, p, t, group - 1, top);
        keep_order(c);
    }
    add_and_pack(r, p, t, GROUPS - 1, top);
    ACR_MARK(chunk, "exponentials done");
}

#if !RING

/* The last product of an early last chunk. */
DEV void end_output(const consumer &c, output_tile &o, const probability_tile &p, int chunk)
{
    wgmma_fence();
    output_step(c, o, p, chunk, CHUNK_KEYS / WGMMA_K - 1, 1);
    wgmma_commit();
}

/* All chunks, in a straight line of code: their number is a constant, and so is whether any of them needs a mask.
 * Exponentials of the top half only where it sees something. Leaves the last product running. */
DEV void attend(consumer &c, softmax_rows &r, score_tile &s, output_tile &o, const int chunks, const int masked)
{
    const int early = !(masked && chunks == 1); /* no gain there */
    probability_tile p[2];                      /* in turn */
#pragma unroll
    for (int chunk = 0; chunk < STAGES; chunk++) {
        if (chunk == chunks)
            break;
        if (masked && chunk >= c.whole_chunks && (chunk < c.top_chunks || chunk >= c.bottom_chunks))
            mask_scores(c, s, chunk);
        if (chunk == 0)
            choose_reference(c, r, s);
        if (!ONE_HALF && (!masked || chunk == 0 || chunk < c.top_chunks))
            compute_chunk(c, r, s, o, p[chunk % 2], p[1 - chunk % 2], chunk, chunk == 0, chunk == chunks - 1, 1,
                          early && chunk == chunks - 1, masked, 0);
        else
            compute_chunk(c, r, s, o, p[chunk % 2], p[1 - chunk % 2], chunk, chunk == 0, chunk == chunks - 1, 0,
                          early && chunk == chunks - 1, masked, 0);
        if (chunk == chunks - 1)
            break;
        if (chunk == 0)
            WGMMA_WAIT(0);
        else
            WGMMA_WAIT(1);
    }
    if (early) {
        end_output(c, o, p[(chunks - 1) % 2], chunks - 1);
        return;
    }
    wait_last_values(c);
    start_output(c, o, p[(chunks - 1) % 2], chunks - 1, ACCUMULATE);
}

#else

/* A chunk that is neither the first nor the last; at the end no product is in flight, or, where it is late, that with
 * V. drain: the chunk before was late. */
DEV void compute_next(consumer &c, softmax_rows &r, score_tile &s, output_tile &o, probability_tile &p,
                      const probability_tile &before, const int chunk, const int top, const int late, const int drain)
{
    if (chunk >= c.whole_chunks)
        mask_scores(c, s, chunk);
    compute_chunk(c, r, s, o, p, before, chunk, 0, 0, top, 0, 1, drain);
    if (late)
        WGMMA_WAIT(1);
    else
        WGMMA_WAIT(0);
    release(c, K_FREE_AT, chunk + 1);
    if (!late)
        release(c, V_FREE_AT, chunk - 1);
}

/* Those up to `end`. Two a round without copies pay where there are many; a single one needs a copy, and not a plain
 * one, which the assembler would merge with the original, and then serialise the products. */
DEV void compute_until(consumer &c, softmax_rows &r, score_tile &s, output_tile &o, probability_tile &p, int &chunk,
                       const int end, const int top)
{
    probability_tile next;
    if (!SHARED_ROWS)
#pragma unroll 1
        for (; chunk + 1 < end; chunk += 2) {
            compute_next(c, r, s, o, next, p, chunk, top, LATE, 0);
            compute_next(c, r, s, o, p, next, chunk + 1, top, 0, LATE);
        }
#pragma unroll 1
    for (; chunk < end; chunk++) {
        compute_next(c, r, s, o, next, p, chunk, top, 0, 0);
#pragma unroll
        for (int i = 0; i < CHUNK_KEYS / 4; i++)
            p[i] = next[i] ^ c.zero;
    }
}

/* All chunks, at least one, in a loop. Leaves the last products running. */
DEV void attend_ring(consumer &c, softmax_rows &r, score_tile &s, output_tile &o)
{
    probability_tile p, end;
    const int last = c.chunks - 1;
    release(c, K_FREE_AT, 0);
    if (c.whole_chunks <= 0)
        mask_scores(c, s, 0);
    choose_reference(c, r, s);
    if (last == 0)
        compute_chunk(c, r, s, o, end, p, 0, 1, 1, !ONE_HALF, 0, 1, 0);
    else {
        compute_chunk(c, r, s, o, p, end, 0, 1, 0, !ONE_HALF, 0, 1, 0);
        WGMMA_WAIT(0);
        release(c, K_FREE_AT, 1);
        int chunk = 1;
        if (!ONE_HALF)
            compute_until(c, r, s, o, p, chunk, min(last, c.top_chunks), 1);
        compute_until(c, r, s, o, p, chunk, last, 0);
        if (last >= c.whole_chunks)
            mask_scores(c, s, last);
        if (!ONE_HALF && last < c.top_chunks)
            compute_chunk(c, r, s, o, end, p, last, 0, 1, 1, 0, 1, 0);
        else
            compute_chunk(c, r, s, o, end, p, last, 0, 1, 0, 0, 1, 0);
    }
    wait_last_values(c);
    start_output(c, o, end, last, 1);
}

#endif

/* The tile again with the true maximum, chunk by chunk: for scores that rose too far above the reference. */
DEV void attend_exactly(consumer &c, softmax_rows &r, output_tile &o)
{
    score_tile s;
    probability_tile p;
    if (RING) {
        if (c.chunks > 1)
            release(c, V_FREE_AT, c.chunks - 2);
        release(c, V_FREE_AT, c.chunks - 1);
        c.passed = c.chunks;
    }
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        o[i] = 0.0f;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        r.reference[row] = -CUDART_INF_F;
        r.sum[row] = 0.0f;
    }
#pragma unroll 1
    for (int chunk = 0; chunk < c.chunks; chunk++) {
        wait_keys(c, chunk);
        start_scores(c, s, chunk);
        WGMMA_WAIT(0);
        release(c, K_FREE_AT, chunk);
        mask_scores(c, s, chunk);
        float rescale[2];
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float max = quad_max(fmaxf(r.reference[row], row_max(s, row, CHUNK_KEYS / 8)));
            rescale[row] = exp2_fast((r.reference[row] - finite_max(max)) * c.scale_log2);
            r.reference[row] = max;
            r.offset[row] = -finite_max(max) * c.scale_log2 - SHIFT;
            r.sum[row] *= rescale[row];
        }
#pragma unroll
        for (int i = 0; i < DIM / 2; i++)
            o[i] *= rescale[i / 2 % 2];
        scale_scores(c, r, s, s, !ONE_HALF);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            exponentiate(s, group, !ONE_HALF);
            add_and_pack(r, p, s, group, !ONE_HALF);
        }
        if (chunk == c.chunks - 1)
            wait_last_values(c);
        else
            wait_values(c, chunk);
        start_output(c, o, p, chunk, 1);
        WGMMA_WAIT(0);
        release(c, V_FREE_AT, chunk);
    }
}

/* ---- Adding up. Where both consumers hold the same rows, a lane finishes that of half `index` and hands its part of
 * the other one to the other consumer; else it finishes both of its rows. ---- */

/* Rows on their way out. */
typedef struct finish {
    float own[2];                         /* factors of this consumer's part, of the lane's row in each half */
    float max[OUT_ROWS], total[OUT_ROWS]; /* what was subtracted from the raw scores, and the sum */
    int row[OUT_ROWS];
    int present[OUT_ROWS]; /* the row exists, and is this consumer's to store */
    char *o[OUT_ROWS];     /* the row's first byte */
    int v_dim;
    float scale; /* e4m3: of the output; and its type */
    int bf16;
} finish;

/* Of a row's output: what a sum of its probabilities times V is multiplied by. */
DEV float row_factor(float sum, const finish &f)
{
    return E4M3 ? inverse_sum(sum) * f.scale : inverse_sum(sum);
}

/* The half that finished row `out` is of. */
DEV int half_of(const consumer &c, int out)
{
    return SHARED_ROWS ? c.index : out;
}

DEV uint32_t rows_from(const consumer &c, int index)
{
    return c.smem + ROWS_AT + index * ROWS_BYTES + threadIdx.x % WARPGROUP_THREADS * 16;
}

DEV void hand_rows(const consumer &c, softmax_rows &r)
{
    r.sum[0] = quad_sum(r.sum[0]);
    r.sum[1] = quad_sum(r.sum[1]);
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(rows_from(c, c.index)), "f"(r.reference[0]),
                 "f"(r.reference[1]), "f"(r.sum[0]), "f"(r.sum[1])
                 : "memory");
}

/* After a barrier: both consumers' sums give the factors. */
DEV void weigh_rows(const consumer &c, const softmax_rows &r, finish &f)
{
    float reference[2], sum[2];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(reference[0]), "=f"(reference[1]), "=f"(sum[0]), "=f"(sum[1])
                 : "r"(rows_from(c, 1 - c.index))
                 : "memory");
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const float max = fmaxf(reference[row], r.reference[row]);
        const float own = exp2_fast((r.reference[row] - finite_max(max)) * c.scale_log2);
        const float other = exp2_fast((reference[row] - finite_max(max)) * c.scale_log2);
        const float total = own * r.sum[row] + other * sum[row];
        f.own[row] = own * row_factor(total, f);
        if (row == c.index) {
            f.max[0] = max;
            f.total[0] = total;
        }
    }
}

DEV void weigh_own_rows(softmax_rows &r, finish &f)
{
#pragma unroll
    for (int row = 0; row < 2; row++) {
        r.sum[row] = quad_sum(r.sum[row]);
        f.own[row] = row_factor(r.sum[row], f);
        f.max[row % OUT_ROWS] = r.reference[row];
        f.total[row % OUT_ROWS] = r.sum[row];
    }
}

/* What can be done about the rows before the last product is there. Returns whether the tile must be computed again,
 * the same to all consumers; with a ring the producer is told. */
DEV int weigh(const consumer &c, softmax_rows &r, finish &f)
{
    const int too_large = !(r.sum[0] < LARGEST_SUM && r.sum[1] < LARGEST_SUM);
    if (SHARED_ROWS)
        hand_rows(c, r);
    const int again = vote(too_large);
    if (c.late)
        allow_next_kernel();
    if (SHARED_ROWS)
        weigh_rows(c, r, f);
    else
        weigh_own_rows(r, f);
    if (RING && threadIdx.x == 0) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(c.smem + AGAIN_AT), "r"(again) : "memory");
        barrier_arrive(c.smem + VERDICT_AT);
    }
    ACR_MARK(0, "rows weighed");
    return again;
}

DEV uint32_t part_from(const consumer &c, int index)
{
    return c.smem + PART_AT + index * PART_BYTES + threadIdx.x % WARPGROUP_THREADS * 16;
}

/* The output's type. */
DEV int is_bf16(const finish &f)
{
    return E4M3 ? f.bf16 : BF16;
}

DEV uint32_t pack_as(float low, float high, const finish &f)
{
    return E4M3 ? pack_output(low, high, f.bf16) : pack<BF16>(low, high);
}

/* Hands the part of row `row` over, scaled and rounded like the output. */
DEV void hand_part(const consumer &c, const output_tile &o, const finish &f, const int row)
{
    uint32_t part[DIM / 8];
#pragma unroll
    for (int i = 0; i < DIM / 8; i++)
        part[i] = pack_as(o[4 * i + 2 * row] * f.own[row], o[4 * i + 2 * row + 1] * f.own[row], f);
#pragma unroll
    for (int i = 0; i < DIM / 32; i++)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(part_from(c, c.index) + i * ROWS_BYTES),
                     "r"(part[4 * i]), "r"(part[4 * i + 1]), "r"(part[4 * i + 2]), "r"(part[4 * i + 3])
                     : "memory");
}

DEV float2 unpack_as(uint32_t pair, const finish &f)
{
    if (is_bf16(f))
        return __bfloat1622float2(*(const __nv_bfloat162 *)&pair);
    return __half22float2(*(const __half2 *)&pair);
}

/* Adds the other's part to row `row`, and packs the row's columns 8i + 2(lane % 4) and the next. */
DEV void add_part(const consumer &c, uint32_t (&packed)[DIM / 8], const output_tile &o, const finish &f, const int row)
{
#pragma unroll
    for (int i = 0; i < DIM / 32; i++)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(packed[4 * i]), "=r"(packed[4 * i + 1]), "=r"(packed[4 * i + 2]), "=r"(packed[4 * i + 3])
                     : "r"(part_from(c, 1 - c.index) + i * ROWS_BYTES)
                     : "memory");
#pragma unroll
    for (int i = 0; i < DIM / 8; i++) {
        const float2 part = unpack_as(packed[i], f);
        packed[i] =
            pack_as(fmaf(o[4 * i + 2 * row], f.own[row], part.x), fmaf(o[4 * i + 2 * row + 1], f.own[row], part.y), f);
    }
}

/* Eight rows of a warp, from fragments through the place where its rows of Q were to 16-byte stores, 64 bytes of a row
 * at a time. */
DEV void store_rows(const consumer &c, const uint32_t (&packed)[DIM / 8], const finish &f, const int out)
{
    const uint32_t rows_at = c.q_at + half_of(c, out) % HALVES * Q_HALF_BYTES + c.warp * SWIZZLE_ROWS_BYTES;
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
        const int row = c.lane % 8, place = i % 2 * 4 + c.lane / 8; /* of 16 bytes in the panel's row */
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         rows_at + i / 2 * Q_PANEL_BYTES + row * PANEL_ROW_BYTES + ((place ^ row) << 4)),
                     "r"(packed[4 * i]), "r"(packed[4 * i + 1]), "r"(packed[4 * i + 2]), "r"(packed[4 * i + 3])
                     : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
        /* odd rows take their halves the other way around: no two lanes in one bank */
        const int row = c.lane / 4, place = (i % 2 * 4 + c.lane % 4) ^ (row % 2 * 4),
                  column = i / 2 * PANEL_ELEMS + place * 8;
        uint32_t v[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(rows_at + i / 2 * Q_PANEL_BYTES + row * PANEL_ROW_BYTES + ((place ^ row) << 4))
                     : "memory");
        if (f.present[out] && column < f.v_dim)
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(f.o[out] + column * OUT_BYTES), "r"(v[0]),
                         "r"(v[1]), "r"(v[2]), "r"(v[3])
                         : "memory");
    }
}

DEV void complete(const consumer &c, uint32_t (&packed)[OUT_ROWS][DIM / 8], const output_tile &o, const finish &f)
{
    ACR_MARK(0, "last product done");
    if (!SHARED_ROWS)
#pragma unroll
        for (int row = 0; row < OUT_ROWS; row++)
#pragma unroll
            for (int i = 0; i < DIM / 8; i++)
                packed[row][i] = pack_as(o[4 * i + 2 * row] * f.own[row], o[4 * i + 2 * row + 1] * f.own[row], f);
    else {
        if (c.index == 0)
            hand_part(c, o, f, 1);
        else if (!ONE_HALF)
            hand_part(c, o, f, 0);
        named_sync(WARP_PAIR + c.warp, 2 * WARP_THREADS);
        ACR_MARK(0, "parts exchanged");
        if (c.index != 0)
            add_part(c, packed[0], o, f, 1);
        else if (!ONE_HALF)
            add_part(c, packed[0], o, f, 0);
        else
            return;
    }
#pragma unroll
    for (int out = 0; out < OUT_ROWS; out++)
        store_rows(c, packed[out], f, out);
    ACR_MARK(0, "stored");
}

DEV int any_not_finite(const uint32_t (&packed)[DIM / 8], const finish &f)
{
    const uint32_t exponent = is_bf16(f) ? 0x7f80 : 0x7c00;
    int found = 0;
#pragma unroll
    for (int i = 0; i < DIM / 8; i++)
        found |= (packed[i] & exponent) == exponent || (packed[i] >> 16 & exponent) == exponent;
    return __any_sync(~0u, found);
}

/* ---- The kernel ---- */

DEV void load_query(consumer &c)
{
    const int half = c.lane / 8 % 2 % HALVES, row = 8 * c.warp + c.lane % 8;
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; step++) {
        const int place = step % 4 * 2 + c.lane / 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(c.q[4 * step]), "=r"(c.q[4 * step + 1]), "=r"(c.q[4 * step + 2]), "=r"(c.q[4 * step + 3])
                     : "r"(c.q_at + half * Q_HALF_BYTES + step / 4 * Q_PANEL_BYTES + row * PANEL_ROW_BYTES +
                           ((place ^ (row % 8)) << 4))
                     : "memory");
    }
}

/* Under a mask CTAs last differently long, and the next kernel's, started early, are in the way of the last. */
DEV int start_next_late(const fwd_args &a)
{
    return a.mask != FWD_MASK_NONE;
}

DEV void make_consumer(consumer &c, const fwd_args &a, const tile &t, uint32_t smem, int index)
{
    c.smem = smem;
    c.index = index;
    c.warp = threadIdx.x / WARP_THREADS % 4;
    c.lane = threadIdx.x % WARP_THREADS;
    c.q_at = smem + (SHARED_ROWS ? 0 : index * 2 * Q_HALF_BYTES);
    const uint32_t no_panel_stride = 1 << 16, v_panel_stride = KV_PANEL_BYTES / 16 << 16;
    const int first_chunk = SHARED_ROWS ? index : 0, first_key = first_chunk * CHUNK_KEYS;
    c.k = (smem + K_AT + first_chunk * CHUNK_BYTES) / 16 | no_panel_stride;
    c.v = (smem + V_AT + first_chunk * CHUNK_BYTES) / 16 | v_panel_stride;
    c.passed = 0;
    c.scale_log2 = scales_of(a, t).scale_log2;
#pragma unroll
    for (int half = 0; half < 2; half++)
        c.seen[half] =
            keys_seen(a, t.seen[half], t.first[half] + 8 * c.warp + c.lane / 4) - 2 * (c.lane % 4) - first_key;
    const int whole = min(t.seen[0].full_end, t.seen[1].full_end);
    c.late = start_next_late(a);
    c.chunks = t.stages;
    c.masked = whole < c.chunks * KV_TILE;
    c.top_chunks = max(1, (t.seen[0].end - first_key + KV_TILE - 1) / KV_TILE);
    c.whole_chunks = (whole - first_key + KV_TILE - CHUNK_KEYS) / KV_TILE;
    c.bottom_chunks = (t.seen[1].full_end - first_key + KV_TILE - CHUNK_KEYS) / KV_TILE;
    c.present_rows = CHUNK_KEYS;
    if (!E4M3 && a.kv_lens != nullptr) /* widened rows are 0 there */
        c.present_rows = max(0, min((int)CHUNK_KEYS, t.seen[0].len - first_key - (c.chunks - 1) * KV_TILE));
    c.order = 0;
    c.zero = (uint32_t)c.chunks >> 31;
}

/* Consumer 1 begins a little later, so that one has products where the other has exponentials. Barriers that keep them
 * so cost more than they bring. */
DEV void lag_behind(int index)
{
    const long long start = clock64();
    while (index == 1 && clock64() - start < LAG)
        ;
}

DEV void make_finish(finish &f, const fwd_args &a, const tile &t, const consumer &c)
{
    f.v_dim = a.v_dim;
    if (E4M3) {
        f.scale = scales_of(a, t).out;
        f.bf16 = a.out_bf16;
    }
#pragma unroll
    for (int out = 0; out < OUT_ROWS; out++) {
        const int bottom = half_of(c, out);
        f.row[out] = (bottom ? t.first[1] : t.first[0]) + 8 * c.warp + c.lane / 4;
        /* rows that are held twice are stored once */
        f.present[out] = f.row[out] < a.q_len &&
                         (bottom ? ONE_HALF || t.first[0] < t.first[1] : !ONE_HALF && t.first[0] <= t.first[1]);
        f.o[out] = (char *)a.o +
                   (t.batch * a.o_stride.batch + t.head * a.o_stride.head + f.row[out] * a.o_stride.row) * OUT_BYTES;
        /* now, not when they are needed: the first read of a parameter takes as long as one of L2 */
        asm volatile("" : "+l"(f.o[out]), "+r"(f.v_dim), "+r"(f.present[out]));
    }
}

/* All chunks; the last product is done at the end. Returns whether the tile must be computed again. */
DEV int attend_all(consumer &c, softmax_rows &r, score_tile &s, output_tile &o, finish &f)
{
    int again;
#if RING
    if (c.chunks > 0) {
        attend_ring(c, r, s, o);
        again = weigh(c, r, f);
        WGMMA_WAIT(0);
    } else
#else
    /* One straight line of code for each number of chunks, with masks or without: taken jumps cost more than the
     * instructions that they save, since each code line is executed once and comes from afar. */
/* clang-format off */
#define ATTEND(number, with_mask)                    \
    if (c.chunks == number && c.masked == with_mask) { \
        attend(c, r, s, o, number, with_mask);         \
        again = weigh(c, r, f);                        \
        WGMMA_WAIT(0);                                 \
    } else
#if STAGES >= 4
    ATTEND(4, 0) ATTEND(4, 1)
#endif
#if STAGES >= 3
    ATTEND(3, 0) ATTEND(3, 1)
#endif
#if STAGES >= 2
    ATTEND(2, 0) ATTEND(2, 1)
#endif
    ATTEND(1, 0) ATTEND(1, 1)
#endif
    {
#pragma unroll
        for (int i = 0; i < DIM / 2; i++)
            o[i] = 0.0f;
        again = weigh(c, r, f);
    }
/* clang-format on */
#undef ATTEND
    return again;
}

/* The rest of a finished row: what few callers want or few inputs need. */
DEV void finish_row(const fwd_args &a, const tile &t, const consumer &c, const finish &f,
                    const uint32_t (&packed)[DIM / 8], const int out)
{
    if (a.lse != nullptr && f.present[out] && c.lane % 4 == 0)
        a.lse[((int64_t)t.batch * a.q_heads + t.head) * a.q_len + f.row[out]] =
            log_sum_exp(f.max[out], f.total[out] * (float)(1 << SHIFT), scales_of(a, t).scale);
    if (a.mask != FWD_MASK_NONE && any_not_finite(packed, f)) {
        __threadfence();
        __syncwarp(); /* the values are other lanes' */
        if (f.present[out] && isfinite(f.total[out]))
            repair_row<ELEMENT, OUT_ELEMENT>(a,
                                             {t.batch, t.head, f.row[out], 0, 0, keys_seen(a, t.seen[0], f.row[out]),
                                              scales_of(a, t).scale_log2, finite_max(f.max[out]) * c.scale_log2 + SHIFT,
                                              row_factor(f.total[out], f)},
                                             c.lane);
    }
}

/* What is rare comes last. */
DEV void consume(const fwd_args &a, const tile &t, uint32_t smem, int index)
{
    consumer c;
    finish f;
    softmax_rows r = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    score_tile s;
    output_tile o;
    uint32_t packed[OUT_ROWS][DIM / 8];
    make_consumer(c, a, t, smem, index);
    make_finish(f, a, t, c);
    wait_keys(c, 0);
    ACR_MARK(0, "Q and first keys landed");
    load_query(c);
    lag_behind(index);
    if (ACCUMULATE)
#pragma unroll
        for (int i = 0; i < DIM / 2; i++)
            o[i] = 0.0f;
    start_scores(c, s, 0);
    WGMMA_WAIT(0);
    ACR_MARK(0, "first scores ready");
    const int again = attend_all(c, r, s, o, f);
    complete(c, packed, o, f);
    if (again) {
        attend_exactly(c, r, o);
        named_sync(VOTE, CONSUMER_THREADS); /* what was handed over the first time has been read */
        weigh(c, r, f);
        complete(c, packed, o, f);
    }
    if (!ONE_HALF || index == 1)
#pragma unroll
        for (int out = 0; out < OUT_ROWS; out++)
            finish_row(a, t, c, f, packed[out], out);
    use_order(c, o);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_maps maps)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t smem = smem_address(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / WARP_THREADS, 0); /* the same in all lanes, for the compiler too */
    const int producer_warp = CONSUMER_THREADS / WARP_THREADS;
    const int kv_head = a.group == 1 ? blockIdx.y : blockIdx.y / a.group;
    ACR_MARK(0, "start");
    if (warp == producer_warp && elect_one()) {
        produce_first(a, maps, smem, kv_head);
        init_barriers(smem);
    }
    __syncwarp();
    wait_for_previous_kernel();
    if (!start_next_late(a))
        allow_next_kernel();
    const tile t = find_tile(a, warp / CONSUMER_WARPS % CONSUMERS);
    __syncthreads();
    ACR_MARK(0, "CTA ready");
    if (warp >= producer_warp) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)PRODUCER_REGISTERS));
        if (warp == producer_warp && elect_one())
            produce_all(maps, smem, kv_head, t.stages);
        if (E4M3 && warp >= producer_warp + PRODUCER_WARPS)
            widen_all(smem, t.stages, t.seen[0].len);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)CONSUMER_REGISTERS));
        consume(a, t, smem, warp / CONSUMER_WARPS);
    }
    ACR_MARKS_END(a);
}

#else

#include "cuda/model/fwd_model.h"

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    const char *reason = acr__fwd_size_why_not(problem, DIM, DIM);
    if (reason == NULL && !RING && problem->kv_len > STAGES * KV_TILE)
        reason = STAGES == 4   ? "kv_len is above 512: this kernel keeps all keys in shared memory"
                 : STAGES == 2 ? "kv_len is above 256: this kernel keeps all keys in shared memory"
                               : "kv_len is above 128 a stage: this kernel keeps all keys in shared memory";
    if (reason == NULL)
        reason = acr__boxes_why_not(problem, &KERNEL_DESCRIPTION.boxes);
    if (reason == NULL)
        reason = acr__grid_why_not(problem, Q_TILE);
    return reason != NULL ? reason : acr__smem_why_not(SMEM_BYTES, device);
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    (void)device;
    *launch = acr__tile_launch(problem, Q_TILE, THREADS, SMEM_BYTES);
}

/* Measured on an H200, in cycles at 1980 MHz: a step (Q_TILE rows, KV_TILE keys), and what a CTA takes besides. */
static double step_cycles(void)
{
    if (DIM == 128)
        return Q_TILE == 32 ? 1400.0 : 1650.0;
    if (!SHARED_ROWS)
        return 1030.0;
    return Q_TILE == 64 ? (RING ? 1050.0 : 1100.0) : RING ? 900.0 : 780.0;
}

static double cta_cycles(void)
{
    if (DIM == 128)
        return (Q_TILE == 32 ? 3350.0 : 3700.0) + (RING ? 450.0 : 0.0);
    if (!SHARED_ROWS)
        return 3900.0;
    const double less_code = STAGES < 4 ? 150.0 : 0.0;
    return (Q_TILE == 64 ? (RING ? 3750.0 : 3200.0) : RING ? 3100.0 : 3030.0) - less_code;
}

static double cost(const acr_problem *problem, const acr__device *device)
{
    acr_problem padded = acr__padded(problem, DIM, DIM);
    padded.mask = ACR_MASK_NONE; /* nearly every CTA has rows that see nearly all keys */
    const acr__fwd_rates rates = {
        .kernel = KERNEL_TEXT,
        .q_tile = Q_TILE,
        .kv_tile = KV_TILE,
        .mma_flop_per_cycle = 3600.0,
        .exp_per_cycle = 13.0,
        .step_cycles = step_cycles(),
        .cta_cycles = cta_cycles(),
        .ctas_per_sm = 1,
    };
    return acr__fwd_seconds(&padded, device, &rates);
}

const acr__kernel KERNEL_DESCRIPTION = {
    .name = KERNEL_TEXT,
    .family = "fwd_short",
    .backend = ACR__CUDA,
    .dtype = E4M3 ? ACR_E4M3 : (BF16 ? ACR_BF16 : ACR_F16),
    .qk_dim_max = DIM,
    .v_dim_max = DIM,
    .q_tile = Q_TILE,
    .kv_tile = KV_TILE,
    .stages = STAGES,
    .why_not = why_not,
    .cost = cost,
    .symbol = KERNEL_TEXT,
    .image = KERNEL_IMAGE,
    .image_end = KERNEL_IMAGE_END,
    .arch_min = 90,
    .arch_max = 90,
    .shape = shape,
    .boxes = {.q_rows = HALF_ROWS, .k_rows = KV_TILE, .v_rows = KV_TILE},
};

#endif
