/* What warp_tile.cuh and warp_tile_16.cuh do, with keys and values of e4m3 under queries of 16 bits: they become the
 * queries' type in registers, exactly, and are multiplied in 16 bits. sm_89 and newer.
 *
 * K: ldmatrix gives a lane four neighbouring dims of a key. They are the elements 2i, 2i + 1, 2i + 8 and 2i + 9 (i =
 * lane % 4) of a product of 16 dims, whose sum has no order: the queries are read in the same one. V: transposed
 * matrices are of pairs of bytes, two dims of each of two keys; so of every 16 dims the even ones are in the first
 * accumulator of 8 columns, the odd ones in the second.
 *
 * An includer defines what warp_tile_16.cuh wants, and KV_ROW_CHUNKS (16-byte chunks in a row of K and V). */
#ifndef ACR_DEVICE_ATTENTION_WARP_TILE_KV8_CUH
#define ACR_DEVICE_ATTENTION_WARP_TILE_KV8_CUH

#include "cuda/device/attention/warp_tile_16.cuh"
#include "cuda/device/isa/widen.cuh"

/* Q in the order of K's dims, from a tile of 16-bit elements. */
DEV void load_query_operands_kv8(query_operands &q, uint32_t q_smem, const lane_place &l)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int step = 0; step < K_STEPS; step++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = l.row + 16 * m + l.lane / 4 + 8 * h, chunk = 2 * step + l.lane % 4 / 2;
                const uint2 dims = load_shared_2(q_smem + chunk_offset(row, chunk, ROW_CHUNKS) + l.lane % 2 * 8);
                q[m][step][h] = dims.x;
                q[m][step][2 + h] = dims.y;
            }
}

/* s = Q * transpose(K) for a tile of keys, of queries in registers. */
DEV void multiply_scores_kv8(score_tile &s, const query_operands &q, uint32_t k_smem, const lane_place &l)
{
    score_tile sums[CHAINS] = {};
#pragma unroll
    for (int step = 0; step < K_STEPS; step += 2)
#pragma unroll
        for (int n = 0; n < KEY_TILES; n += 2) { /* 16 keys: matrices {n, step} {n, step+1} {n+1, step} {n+1, step+1} */
            uint32_t k[4];
            load_matrices(
                k, k_smem + chunk_offset(8 * n + l.lane % 8 + l.lane / 16 * 8, step + l.lane / 8 % 2, KV_ROW_CHUNKS));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint2 first = widen_e4m3<BF16>(k[i]), second = widen_e4m3<BF16>(k[2 + i]);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    multiply_add<OPERANDS>(accumulator(sums[i % CHAINS][m], n), q[m][step + i], first.x, first.y);
                    multiply_add<OPERANDS>(accumulator(sums[i % CHAINS][m], n + 1), q[m][step + i], second.x, second.y);
                }
            }
        }
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int i = 0; i < KEY_TILES * 4; i++)
            s[m][i] = CHAINS == 1 ? sums[0][m][i] : sums[0][m][i] + sums[CHAINS - 1][m][i];
}

/* Of two keys' pairs of dims {0 0', 0 1', 1 0', 1 1'} those of the even dim, then those of the odd one. */
template <int IS_BF16> DEV uint2 widen_transposed(uint32_t x)
{
    return widen_e4m3<IS_BF16>(__byte_perm(x, 0, 0x3120));
}

/* o += P * V. */
DEV void multiply_values_kv8(output_tile &o, const probability_tile &p, uint32_t v_smem, int lane)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++)
#pragma unroll
        for (int chunk = 0; chunk < KV_ROW_CHUNKS; chunk += 2) { /* 16 keys x 32 columns */
            uint32_t v[4];
            load_matrices_transposed(v, v_smem + chunk_offset(16 * step + lane % 16, chunk + lane / 16, KV_ROW_CHUNKS));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint2 low = widen_transposed<BF16>(v[2 * i]), high = widen_transposed<BF16>(v[2 * i + 1]);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    multiply_add<OPERANDS>(accumulator(o[m], 2 * (chunk + i)), p[m][step], low.x, high.x);
                    multiply_add<OPERANDS>(accumulator(o[m], 2 * (chunk + i) + 1), p[m][step], low.y, high.y);
                }
            }
        }
}

/* The column of V and O that an accumulator's element c (0 or 1) of a lane is, which begins with column 8n + 2 (lane %
 * 4) where V is of 16 bits: of accumulators n and n + 1, n even, these are four in a row, from here on. */
DEV int first_column_kv8(int n, int lane)
{
    return 8 * n + 4 * (lane % 4);
}

#endif
