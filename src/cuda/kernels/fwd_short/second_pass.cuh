/* fwd_short's second pass: for rows whose scores rose too far above their reference, and for NaN. The whole tile is
 * computed again, with the true maximum, but only the rows that need it take the result. The others keep what they
 * have, so that a row's bits do not depend on the rows beside it. */
#ifndef ACR_CUDA_FWD_SHORT_SECOND_PASS_CUH
#define ACR_CUDA_FWD_SHORT_SECOND_PASS_CUH

#include "cuda/kernels/fwd_short/chunks.cuh"
#include "cuda/kernels/fwd_short/epilogue.cuh"

/* Which of the lane's rows have a sum that is too large, of either consumer. Between find_factors, which votes on the
 * same sums, and the next one, which replaces them. */
DEV void find_large_rows(const consumer &c, const lane_rows &r, int (&large)[2])
{
    const float4 other = SHARED_ROWS ? load_shared_float4(sums_at(c, 1 - c.index)) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    large[0] = is_large(r.sum[0]) || is_large(other.z);
    large[1] = is_large(r.sum[1]) || is_large(other.w);
}

/* All chunks with the true maximum, one by one. */
DEV void attend_exactly(consumer &c, lane_rows &r, output_tile &o)
{
    score_tile s;
    probability_tile p;
    if (RING) {
        if (c.chunks > 1)
            release_values(c, c.chunks - 2);
        release_values(c, c.chunks - 1);
        c.passed = c.chunks;
    }
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        o[i] = 0.0f;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        r.max[row] = -CUDART_INF_F;
        r.sum[row] = 0.0f;
    }
#pragma unroll 1
    for (int chunk = 0; chunk < c.chunks; chunk++) {
        wait_keys(c, chunk);
        if (EXACT) /* for each chunk: nvcc 13.0's assembler puts p where q was, although q is needed again */
            load_query(c);
        start_scores(c, s, chunk);
        WGMMA_WAIT(0);
        release_keys(c, chunk);
        finish_chunk(c, s, chunk * KV_TILE, 1);
        const float max[2] = {row_max(s, 0, CHUNK_KEYS / 8), row_max(s, 1, CHUNK_KEYS / 8)};
        float rescale[2];
        raise_references<SHIFT>(r, rescale, max, c.scale_log2);
        scale_output(o, rescale);
        find_exponents(c, r, s, s, !ONE_HALF);
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
        release_values(c, chunk);
    }
}

/* Replaces the rows that need it: stored output, packed output and what is known of them. */
DEV void compute_again(consumer &c, lane_rows &r, output_tile &o, row_results &f, uint32_t (&packed)[OUT_ROWS][DIM / 8])
{
    int large[2];
    row_results second = f;
    find_large_rows(c, r, large);
#pragma unroll
    for (int out = 0; out < OUT_ROWS; out++)
        second.present[out] = f.present[out] && (half_of(c, out) ? large[1] : large[0]);
    attend_exactly(c, r, o);
    named_sync(VOTE, CONSUMER_THREADS); /* what was sent the first time has been read */
    find_factors(c, r, second);
    store_output_rows(c, packed, o, second);
#pragma unroll
    for (int out = 0; out < OUT_ROWS; out++)
        if (second.present[out]) {
            f.max[out] = second.max[out];
            f.total[out] = second.total[out];
        }
}

#endif
