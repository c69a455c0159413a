/* What fwd_short does with the sums of rows and, where both consumers hold the same rows, how they exchange and add
 * their parts: a lane then finishes its row of half `index` and sends its part of the other row to the other consumer;
 * else it finishes both of its rows. */
#ifndef ACR_CUDA_FWD_SHORT_MERGE_CUH
#define ACR_CUDA_FWD_SHORT_MERGE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kernels/fwd_short/softmax.cuh"

enum {
    SUMS_BYTES = WARPGROUP_THREADS * sizeof(row_sums), /* of one consumer */
    PART_STRIDE = WARPGROUP_THREADS * 16
};

/* What is known of a lane's rows before their output is there. */
typedef struct row_results {
    float own[2];                         /* factors of this consumer's part, of the lane's row in each half */
    float max[OUT_ROWS], total[OUT_ROWS]; /* what was subtracted from the raw scores, and the sum */
    int row[OUT_ROWS];
    int present[OUT_ROWS]; /* the row exists, and is this consumer's to store */
    char *o[OUT_ROWS];     /* the row's first byte */
    int v_dim;
    float scale; /* e4m3: of the output; and its type */
    int bf16;
} row_results;

/* The half that finished row `out` belongs to. */
DEV int half_of(const consumer &c, int out)
{
    return SHARED_ROWS ? c.index : out;
}

/* What makes a row's sum relative to its reference alone. */
DEV constexpr float unshifted(void)
{
    return (float)(1 << -SHIFT);
}

/* By what the sum of a row's probabilities times V is multiplied. max: the row's reference, of finished scores. */
DEV float factor_of(const consumer &c, float max, float sum, const row_results &f)
{
#if TERMS
    return row_factor(*c.args, c.head, max, sum * unshifted()) * unshifted();
#else
    return E4M3 ? inverse_sum(sum) * f.scale : inverse_sum(sum);
#endif
}

/* ---- Sums ---- */

/* Where the thread of consumer `index` leaves what the same thread of the other consumer reads. */
DEV uint32_t sums_at(const consumer &c, int index)
{
    return ADDRESS(c.smem, sums) + index * SUMS_BYTES + threadIdx.x % WARPGROUP_THREADS * sizeof(row_sums);
}

/* After a barrier: both consumers' sums give the factors. */
DEV void find_shared_factors(const consumer &c, const lane_rows &r, row_results &f)
{
    const float4 other_rows = load_shared_float4(sums_at(c, 1 - c.index));
    const float reference[2] = {other_rows.x, other_rows.y}, sum[2] = {other_rows.z, other_rows.w};
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const float max = fmaxf(reference[row], r.max[row]);
        const float own = exp2_fast((r.max[row] - finite_max(max)) * c.scale_log2);
        const float other = exp2_fast((reference[row] - finite_max(max)) * c.scale_log2);
        const float total = own * r.sum[row] + other * sum[row];
        f.own[row] = own * factor_of(c, max, total, f);
        if (row == c.index) {
            f.max[0] = max;
            f.total[0] = total;
        }
    }
}

DEV void find_own_factors(const consumer &c, const lane_rows &r, row_results &f)
{
#pragma unroll
    for (int row = 0; row < 2; row++) {
        f.own[row] = factor_of(c, r.max[row], r.sum[row], f);
        f.max[row % OUT_ROWS] = r.max[row];
        f.total[row % OUT_ROWS] = r.sum[row];
    }
}

/* Does for the rows what can be done before the last product is there. Returns whether the tile must be computed again,
 * the same to all consumers; with a ring the producer is told. */
DEV int find_factors(const consumer &c, lane_rows &r, row_results &f)
{
#pragma unroll
    for (int row = 0; row < 2; row++)
        r.sum[row] = quad_sum(r.sum[row]);
    if (SHARED_ROWS)
        store_shared_float4(sums_at(c, c.index), r.max[0], r.max[1], r.sum[0], r.sum[1]);
    const int again = named_any<VOTE, CONSUMER_THREADS>(is_large(r.sum[0]) || is_large(r.sum[1]));
    if (c.late)
        allow_next_kernel();
    if (SHARED_ROWS)
        find_shared_factors(c, r, f);
    else
        find_own_factors(c, r, f);
    if (RING && threadIdx.x == 0) {
        store_shared(ADDRESS(c.smem, again), again);
        barrier_arrive(ADDRESS(c.smem, verdict));
    }
    ACR_TRACE_POINT(0, "rows weighed");
    return again;
}

/* ---- Parts of the output ---- */

/* The output's type. */
DEV int is_bf16(const row_results &f)
{
    return E4M3 ? f.bf16 : BF16;
}

DEV uint32_t pack_as(float low, float high, const row_results &f)
{
    return E4M3 ? pack_output(low, high, f.bf16) : pack<BF16>(low, high);
}

DEV float2 unpack_as(uint32_t pair, const row_results &f)
{
    if (is_bf16(f))
        return __bfloat1622float2(*(const __nv_bfloat162 *)&pair);
    return __half22float2(*(const __half2 *)&pair);
}

/* This consumer's row, packed: columns 8i + 2(lane % 4) and the next in element i. */
DEV void pack_row(uint32_t (&packed)[DIM / 8], const output_tile &o, const row_results &f, const int row)
{
#pragma unroll
    for (int i = 0; i < DIM / 8; i++)
        packed[i] = pack_as(o[4 * i + 2 * row] * f.own[row], o[4 * i + 2 * row + 1] * f.own[row], f);
}

/* As sums_at, of the part's first 16 bytes; those after are PART_STRIDE further each. */
DEV uint32_t part_at(const consumer &c, int index)
{
    return ADDRESS(c.smem, part) + index * (DIM / 32) * PART_STRIDE + threadIdx.x % WARPGROUP_THREADS * 16;
}

/* Sends the part of row `row`, scaled and rounded like the output. */
DEV void send_part(const consumer &c, const output_tile &o, const row_results &f, const int row)
{
    uint32_t part[DIM / 8];
    pack_row(part, o, f, row);
#pragma unroll
    for (int i = 0; i < DIM / 32; i++)
        store_shared_4(part_at(c, c.index) + i * PART_STRIDE, part[4 * i], part[4 * i + 1], part[4 * i + 2],
                       part[4 * i + 3]);
}

/* Adds the other's part to row `row`, and packs the row. */
DEV void add_part(const consumer &c, uint32_t (&packed)[DIM / 8], const output_tile &o, const row_results &f,
                  const int row)
{
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
        const uint4 part = load_shared_4(part_at(c, 1 - c.index) + i * PART_STRIDE);
        packed[4 * i] = part.x;
        packed[4 * i + 1] = part.y;
        packed[4 * i + 2] = part.z;
        packed[4 * i + 3] = part.w;
    }
#pragma unroll
    for (int i = 0; i < DIM / 8; i++) {
        const float2 part = unpack_as(packed[i], f);
        packed[i] =
            pack_as(fmaf(o[4 * i + 2 * row], f.own[row], part.x), fmaf(o[4 * i + 2 * row + 1], f.own[row], part.y), f);
    }
}

#endif
