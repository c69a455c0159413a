/* fwd_short for one number of keys, EXACT_KEYS, no more and no fewer, all in shared memory: without a mask, or with a
 * causal mask over as many rows. So it is known when this is compiled which chunks a tile's halves see, and all chunks
 * are a straight line of code. Otherwise than the other lines:
 *
 * - Only the query rows and the first keys are under way until they have landed.
 * - Scores are scaled where they are, a group of 8 keys ahead of their exponentials; two score tiles in turn.
 * - V has a 65th column, and more, of ones (shared_memory::ones), so that its product gives the rows' sums, too: of the
 *   probabilities as they are rounded.
 * - The consumers exchange once, at the end: all of their outputs, each by the power of two above its own sum, so that
 *   nothing waits for the other's sums, and no value leaves V's range. They told each other the references before.
 *
 * A sum that is too large is found behind the stores, and the tile is computed again as in the other lines. */
#ifndef ACR_CUDA_FWD_SHORT_EXACT_CUH
#define ACR_CUDA_FWD_SHORT_EXACT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kernels/fwd_short/loading.cuh"
#include "cuda/kernels/fwd_short/second_pass.cuh"

enum {
    SUM_AT = DIM / 2,     /* of the output tile: the sum of row 0; that of row 1 is two further */
    PIECES = DIM / 8 / 2, /* of 16 bytes in a row, of each of the two columns' groups that a stmatrix takes */
    PART_BYTES = CONSUMER_WARPS * 2 * 8 * PANEL_ROW_BYTES, /* of one consumer */
    ROW_BYTES = sizeof(shared_row),
    HIDES_NOTHING = INT32_MAX /* a row's end: of a chunk that it sees whole */
};

typedef float summed_tile[SUM_AT + 4]; /* the output, and columns of sums */

/* Which way a tile takes over the chunks of either consumer. */
typedef struct exact_way {
    int chunks;     /* that the bottom half sees */
    int top_chunks; /* that the top half sees, at most as many */
    int masked;     /* of each half the last chunk */
} exact_way;

/* What a lane knows beside the consumer. */
typedef struct exact_work {
    lane_rows r;
    score_tile s[2];       /* in turn */
    probability_tile p[2]; /* in turn */
    summed_tile o;
    float weight[CONSUMERS]; /* of the consumers' parts of the row that the lane finishes, but for their sums */
    float max;               /* the larger of that row's references */
} exact_work;

/* ---- A lane's places in shared memory ---- */

/* Of eight rows of a half: those of the lane's warp. */
DEV uint32_t shared_rows_at(const consumer &c, int half)
{
    return ADDRESS(c.smem, row) + (2 * c.warp + half) * 8 * ROW_BYTES;
}

/* Piece 0 of row `row` of the warp's eight; others are where their number says, exclusive or. */
DEV uint32_t part_row_at(const consumer &c, int index, int half, int row)
{
    return ADDRESS(c.smem, whole_part) + index * PART_BYTES + ((2 * c.warp + half) * 8 + row) * PANEL_ROW_BYTES +
           (row << 4);
}

/* Lanes of a quad know the same of both rows; the even ones store the first. field: 0 for references, else sums. */
DEV void tell_row(const consumer &c, const float (&value)[2], int field)
{
    const int odd = c.lane % 2;
    store_shared(shared_rows_at(c, odd) + c.lane / 4 * ROW_BYTES + field * CONSUMERS * 4 + c.index * 4,
                 __float_as_uint(odd ? value[1] : value[0]));
}

/* Both consumers' of the row that the lane finishes. */
DEV float2 ask_row(const consumer &c, int field)
{
    const uint2 x = load_shared_2(shared_rows_at(c, c.index) + c.lane / 4 * ROW_BYTES + field * CONSUMERS * 4);
    return {__uint_as_float(x.x), __uint_as_float(x.y)};
}

/* ---- The pipeline ---- */

/* O += P * [V, ones], 16 of the chunk's keys. The ones are the same rows for all keys: as much nearer to V's rows as
 * these are further. */
DEV void summed_step(const consumer &c, exact_work &w, const int chunk, const int step)
{
    const int units = (chunk * V_STAGE_BYTES + step * WGMMA_K * PANEL_ROW_BYTES) / 16;
    wgmma_rs_mn(w.o, w.p[chunk % 2] + 4 * step, descriptor(c.v + units - (units << 16), 0), chunk > 0 || step > 0);
}

/* Of both rows, also where the top half sees nothing; see pack_keys. */
DEV void scale_group(const consumer &c, exact_work &w, const int chunk, const int group)
{
#pragma unroll
    for (int i = 4 * group; i < 4 * group + 4; i++)
        w.s[chunk % 2][i] = exponent_of(w.s[chunk % 2][i], c.scale_log2, w.r.offset[i / 2 % 2]);
}

/* Without `top` the top row's probabilities are 0, made of its scores: were these not used, the assembler would take
 * their registers away from the products that write them, and serialise these. */
DEV void pack_keys(const consumer &c, exact_work &w, const int chunk, const int group, const int top)
{
    const score_tile &t = w.s[chunk % 2];
    pack_group(w.p[chunk % 2], t, group, top);
    if (!top)
        w.p[chunk % 2][2 * group] = (__float_as_uint(t[4 * group]) | __float_as_uint(t[4 * group + 1])) & c.zero;
}

/* keep_order for code in which the clock would otherwise be read by way of a uniform register, which is slow: its value
 * is used twice. */
DEV void keep_exact_order(consumer &c)
{
    asm volatile("{ .reg .u32 t, u; mov.u32 t, %%clock; mov.b32 u, t; prmt.b32 %0, t, u, %0; }"
                 : "+r"(c.order)::"memory");
}

/* The scores of a chunk have arrived: masks, in chunk 0 the references, and the first group's scaling. */
DEV void receive_scores(const consumer &c, exact_work &w, const int chunk, const exact_way way)
{
    const int top_masked = way.masked && chunk == way.top_chunks - 1, masked = way.masked && chunk == way.chunks - 1;
    const row_keys seen = {
        {0, 0}, {top_masked ? c.seen.end[0] : (int)HIDES_NOTHING, masked ? c.seen.end[1] : (int)HIDES_NOTHING}, false};
    finish_scores(w.s[chunk % 2], seen, chunk * KV_TILE, top_masked || masked);
    if (chunk == 0)
        choose_references(c, w.r, w.s[0]);
    scale_group(c, w, chunk, 0);
}

/* The exponentials of one chunk, group by group, each with the packing of the group before and the scaling of the next;
 * ahead of them, one at a time, the products that can start: the scores of the next chunk, and the chunk before, in the
 * last chunk also this one, times V; end_exact_output starts the last. Behind the exponentials they would come too
 * late. */
DEV void stream_chunk(consumer &c, exact_work &w, const int chunk, const exact_way way)
{
    const int last = chunk == way.chunks - 1, top = chunk < way.top_chunks;
    const int scores_group = chunk == 0 ? 3 : 1, output_group = last ? 1 : 4, own_group = 5;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int scores = group - scores_group, output = group - output_group;
        if (!last && scores == 0)
            wait_keys(c, chunk + 1);
        if (!last && scores >= 0 && scores < 3) {
            wgmma_fence();
            score_step(c, w.s[(chunk + 1) % 2], chunk + 1, scores);
            if (scores == 2) {
                score_step(c, w.s[(chunk + 1) % 2], chunk + 1, 3);
                wgmma_commit();
            }
        }
        if (chunk > 0 && output == 0)
            wait_values(c, chunk - 1);
        if (chunk > 0 && output >= 0 && output < 4) {
            wgmma_fence();
            summed_step(c, w, chunk - 1, output);
            if (!last && output == 3)
                wgmma_commit();
        }
        if (last && group == own_group)
            wait_values(c, chunk);
        if (last && group >= own_group) {
            wgmma_fence();
            summed_step(c, w, chunk, group - own_group);
        }
        exponentiate(w.s[chunk % 2], group, top);
        if (group > 0)
            pack_keys(c, w, chunk, group - 1, top);
        else if (chunk > 0)
            pack_keys(c, w, chunk - 1, GROUPS - 1, chunk - 1 < way.top_chunks);
        if (group < GROUPS - 1)
            scale_group(c, w, chunk, group + 1);
        else if (!last) {
            if (chunk == 0)
                WGMMA_WAIT(0);
            else
                WGMMA_WAIT(1); /* the scores; the product with V may go on */
            receive_scores(c, w, chunk + 1, way);
        }
        keep_exact_order(c);
    }
}

/* Reads both consumers' references. */
DEV void weigh_consumers(const consumer &c, exact_work &w)
{
    named_sync(REFERENCES + CONSUMER_WARPS * (1 - c.index) + c.warp, 2 * WARP_THREADS);
    const float2 reference = ask_row(c, 0);
    w.max = fmaxf(reference.x, reference.y);
    w.weight[0] = exp2_fast((reference.x - finite_max(w.max)) * c.scale_log2);
    w.weight[1] = exp2_fast((reference.y - finite_max(w.max)) * c.scale_log2);
}

DEV void attend_exact_keys(consumer &c, exact_work &w, const exact_way way)
{
    receive_scores(c, w, 0, way);
#pragma unroll
    for (int chunk = 0; chunk < STAGES; chunk++) {
        if (chunk == way.chunks)
            break;
        stream_chunk(c, w, chunk, way);
        if (chunk == 0) {
            tell_row(c, w.r.max, 0);
            named_arrive(REFERENCES + CONSUMER_WARPS * c.index + c.warp, 2 * WARP_THREADS);
        }
        if (chunk == min(1, way.chunks - 1)) /* the other consumer has long told */
            weigh_consumers(c, w);
    }
    pack_keys(c, w, way.chunks - 1, GROUPS - 1, way.chunks <= way.top_chunks);
    wgmma_fence();
    summed_step(c, w, way.chunks - 1, CHUNK_KEYS / WGMMA_K - 1);
    wgmma_commit();
    WGMMA_WAIT(0);
    asm volatile("" : "+f"(w.o[SUM_AT]), "+f"(w.o[SUM_AT + 2])::"memory"); /* they are read here, not before */
}

/* ---- The end ---- */

/* 2^-(k + 1) of a sum in [2^k, 2^(k + 1)), by integer arithmetic, which waits for no unit; and its inverse. Of sum 0 a
 * number: the output is 0, and its weight. */
DEV float power_below(float sum)
{
    return __uint_as_float(0x7e800000 - (__float_as_uint(sum) & 0x7f800000));
}

DEV float power_above(float sum)
{
    return __uint_as_float((__float_as_uint(sum) & 0x7f800000) + 0x00800000);
}

DEV void send_output(const consumer &c, const exact_work &w)
{
    const float factor[2] = {power_below(w.o[SUM_AT]), power_below(w.o[SUM_AT + 2])};
    const uint32_t to = part_row_at(c, c.index, c.lane / 8 % 2, c.lane % 8) ^ c.lane / 16 << 4;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        uint32_t packed[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int at = 4 * (2 * i + n / 2) + n % 2 * 2;
            packed[n] = pack<BF16>(w.o[at] * factor[n % 2], w.o[at + 1] * factor[n % 2]);
        }
        store_matrices(to ^ i << 5, packed);
    }
}

/* The two parts of two columns. fp16: in fp16 by one instruction each, whose rounding is the output's; weights of bf16
 * would be too coarse. */
DEV uint32_t mix(uint32_t x, uint32_t y, const float (&weight)[CONSUMERS])
{
    if (BF16) {
        const float2 f = __bfloat1622float2(*(const __nv_bfloat162 *)&x),
                     g = __bfloat1622float2(*(const __nv_bfloat162 *)&y);
        return pack<1>(fmaf(f.x, weight[0], g.x * weight[1]), fmaf(f.y, weight[0], g.y * weight[1]));
    }
    const __half2 sum = __hfma2(*(const __half2 *)&x, __float2half2_rn(weight[0]),
                                __hmul2(*(const __half2 *)&y, __float2half2_rn(weight[1])));
    return *(const uint32_t *)&sum;
}

/* Adds both parts of the lane's row, and stores it: pieces lane % 4 and four further; odd rows take them the other way
 * around, so that no two lanes are in one bank. */
DEV void store_mixed_row(const consumer &c, const exact_work &w, row_results &f, uint32_t (&packed)[DIM / 8])
{
    const int row = c.lane / 4, piece = c.lane % 4 ^ row % 2 * 4;
    const uint32_t from = part_row_at(c, 0, c.index, row) ^ piece << 4;
    const float2 sum = ask_row(c, 1);
    uint4 x[2], y[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x[i] = load_shared_4(from ^ i << 6);
        y[i] = load_shared_4((from ^ i << 6) + PART_BYTES);
    }
    f.max[0] = w.max;
    f.total[0] = sum.x * w.weight[0] + sum.y * w.weight[1];
    const float whole = reciprocal_fast(f.total[0]); /* a row sees a key: a sum of 0 has had no reference */
    const float weight[CONSUMERS] = {w.weight[0] * whole * power_above(sum.x),
                                     w.weight[1] * whole * power_above(sum.y)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 v = {mix(x[i].x, y[i].x, weight), mix(x[i].y, y[i].y, weight), mix(x[i].z, y[i].z, weight),
                         mix(x[i].w, y[i].w, weight)};
        const int column = (piece ^ 4 * i) * 8;
        if (f.present[0] && column < f.v_dim)
            store_global_4(f.o[0] + column * OUT_BYTES, v);
        packed[4 * i] = v.x;
        packed[4 * i + 1] = v.y;
        packed[4 * i + 2] = v.z;
        packed[4 * i + 3] = v.w;
    }
    ACR_TRACE_POINT(0, "stored");
}

/* Leaves the rows' sums where a second pass looks for them. A row whose first scores are all -inf, though it sees their
 * keys, had no reference: its sum counts as too large. */
DEV void find_exact_sums(const consumer &c, exact_work &w)
{
#pragma unroll
    for (int row = 0; row < 2; row++)
        w.r.sum[row] = w.r.max[row] == -CUDART_INF_F && c.seen.end[row] > 0 ? CUDART_NAN_F : w.o[SUM_AT + 2 * row];
}

DEV void compute_exact_again(const fwd_args &a, const tile &t, consumer &c, exact_work &w, row_results &f,
                             uint32_t (&packed)[OUT_ROWS][DIM / 8])
{
    output_tile o;
    const uint32_t order = c.order;
    store_shared_float4(sums_at(c, c.index), w.r.max[0], w.r.max[1], w.r.sum[0], w.r.sum[1]);
    make_consumer(c, a, t, c.smem, c.index);
    c.order = order;
    named_sync(VOTE, CONSUMER_THREADS);
    compute_again(c, w.r, o, f, packed);
}

/* ---- A consumer ---- */

/* What make_consumer would find, and what it would not need. */
DEV void make_exact_consumer(consumer &c, const fwd_args &a, const tile &t, uint32_t smem, int index)
{
    const uint32_t no_panel_stride = 1 << 16, v = ADDRESS(smem, v) + index * CHUNK_PANEL_BYTES;
    c.smem = smem;
    c.index = index;
    c.warp = threadIdx.x / WARP_THREADS % 4;
    c.lane = threadIdx.x % WARP_THREADS;
    c.q_at = ADDRESS(smem, q);
    c.k = (ADDRESS(smem, k) + index * CHUNK_PANEL_BYTES) / 16 | no_panel_stride;
    c.v = v / 16 | (ADDRESS(smem, ones) - v) / 16 << 16;
    c.passed = 0;
    c.scale_log2 = __shfl_sync(~0u, a.scale_log2, 0); /* a parameter would be loaded again for every few uses */
    c.late = start_next_late(a);
    c.order = 0;
    c.zero = (uint32_t)index >> 31;
    const int row = 8 * c.warp + c.lane / 4;
    c.seen = lane_keys(t.entry, t.first[0] + row, t.first[1] + row, 2 * (c.lane % 4) + index * CHUNK_KEYS);
}

/* All that a tile's time hangs on. The end is written once for each way, too: where ways met before it, the assembler
 * would give products too few registers, and serialise them. */
DEV void take_way(consumer &c, exact_work &w, row_results &f, uint32_t (&packed)[DIM / 8], const exact_way way)
{
    attend_exact_keys(c, w, way);
    if (way.masked)
        allow_next_kernel();
    const float sums[2] = {w.o[SUM_AT], w.o[SUM_AT + 2]};
    tell_row(c, sums, 1);
    send_output(c, w);
    named_sync(WARP_PAIR + c.warp, 2 * WARP_THREADS);
    ACR_TRACE_POINT(0, "parts exchanged");
    store_mixed_row(c, w, f, packed);
    find_exact_sums(c, w);
}

DEV void consume_exact(const fwd_args &a, uint32_t smem, int index)
{
    const tile t = find_tile(a, index);
    consumer c;
    exact_work w;
    row_results f;
    uint32_t packed[OUT_ROWS][DIM / 8];
    make_exact_consumer(c, a, t, smem, index);
    locate_rows(f, a, t, c);
    receive_query(c);
    compute_first_scores(c, w.s[0]);
    /* Under a mask, halves of a tile are as far from the first row as from the last; four neighbouring tiles have the
     * same chunks. */
    if (!c.late)
        take_way(c, w, f, packed[0], {STAGES, STAGES, 0});
    else if (blockIdx.x * HALF_ROWS < KV_TILE)
        take_way(c, w, f, packed[0], {STAGES, 1, 1});
#if STAGES > 2
    else
        take_way(c, w, f, packed[0], {STAGES - 1, 2, 1});
#endif
    const int again = named_any<VOTE, CONSUMER_THREADS>(is_large(w.r.sum[0]) || is_large(w.r.sum[1]));
    const int spoilt = c.late && spoils_a_row(packed, f);
    if (__builtin_expect(again || spoilt || a.lse != nullptr, 0)) {
        if (again)
            compute_exact_again(a, t, c, w, f, packed);
        finish_row(a, t, c, f, packed[0], 0, again);
    }
    if (c.order == 0x9e3779b9) /* never: as end_order */
        __nanosleep(c.order & 1);
}

/* ---- The kernel ---- */

DEV void fill_ones(uint32_t smem)
{
    const uint32_t ones = BF16 ? 0x3f803f80 : 0x3c003c00;
    if (threadIdx.x < ONES_ROWS * PANEL_ROW_BYTES / 16)
        store_shared_4(ADDRESS(smem, ones) + threadIdx.x * 16, ones, ones, ones, ones);
    shared_stores_visible();
}

DEV void run_exact(const fwd_args &a, const fwd_maps &maps, uint32_t smem)
{
    const key_source source = {(int)blockIdx.y, (int)blockIdx.z, 0}; /* groups of one: no division before the loads */
    ACR_TRACE_POINT(0, "start");
    if (threadIdx.x / WARP_THREADS == CONSUMER_THREADS / WARP_THREADS && elect_one()) { /* without asking the warp */
        load_first(a, maps, smem, source);
        init_barriers(smem);
    }
    __syncwarp();
    meet_other_kernels(a);
    fill_ones(smem);
    const int warp = __shfl_sync(~0u, threadIdx.x / WARP_THREADS, 0);
    __syncthreads();
    ACR_TRACE_POINT(0, "CTA ready");
    if (warp >= CONSUMER_THREADS / WARP_THREADS) {
        REGISTERS_GIVE(PRODUCER_REGISTERS);
        if (warp == CONSUMER_THREADS / WARP_THREADS && elect_one())
            load_all(maps, smem, source,
                     a.mask == FWD_MASK_NONE ? STAGES : STAGES - (int)blockIdx.x * HALF_ROWS / KV_TILE);
    } else {
        REGISTERS_TAKE(CONSUMER_REGISTERS);
        consume_exact(a, smem, warp / CONSUMER_WARPS);
    }
}

#endif
