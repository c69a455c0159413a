/* What one warp of the mma.sync families does with a tile of keys: WARP_ROWS query rows, whose scores, probabilities
 * and output stay in its registers. Here is what all these families share, the product of queries and keys; softmax
 * and output product of 16-bit elements are in warp_tile_16.cuh.
 *
 * Arrays are in registers, in the accumulator layout of isa/mma.cuh, one array for each 16 rows: elements 4n to 4n + 3
 * are accumulator n, 8 columns. A lane holds row lane / 4 and row lane / 4 + 8 of each.
 *
 * An includer defines ROW_CHUNKS (of a row of Q, K and V), M_TILES (16-row tiles of a warp), K_STEPS (products along
 * the head dim), KEY_TILES (accumulators of 8 keys), CHAINS (sums that a score is made of; few accumulators would wait
 * for each other), Q_IN_REGISTERS, STEPS_UNROLLED, and OPERANDS: what its tensors hold, as MMA_* of mma.cuh. */
#ifndef ACR_DEVICE_ATTENTION_WARP_TILE_CUH
#define ACR_DEVICE_ATTENTION_WARP_TILE_CUH

#include "cuda/device/attention/scores.cuh"
#include "cuda/device/isa/copy.cuh"
#include "cuda/device/isa/mma.cuh"

typedef struct lane_place {
    int lane;
    int group;  /* of warps that take other keys than the CTA's other groups; 0 in families without groups */
    int thread; /* of the group */
    int row;    /* of the warp's first row within the CTA's tile */
} lane_place;

typedef float score_tile[M_TILES][KEY_TILES * 4];
typedef uint32_t query_operands[M_TILES][K_STEPS][4]; /* unused where they are read from shared memory every time */

/* a / b for 0 <= a < 2^16, 0 < b < 2^16: the quotient of a + 1/2 stays further from a whole number than it is rounded
 * by. */
DEV int divide_small(int a, int b)
{
    return (int)((a + 0.5f) * __frcp_rn((float)b));
}

/* Accumulator n. */
template <int ELEMS> DEV float (&accumulator(float (&elements)[ELEMS], int n))[4]
{
    return *(float(*)[4]) & elements[4 * n];
}

DEV void load_query(uint32_t (&q)[4], uint32_t q_smem, const lane_place &l, int m, int step)
{
    load_matrices(q, q_smem + chunk_offset(l.row + 16 * m + l.lane % 16, 2 * step + l.lane / 16, ROW_CHUNKS));
}

DEV void load_query_operands(query_operands &q, uint32_t q_smem, const lane_place &l)
{
    if (Q_IN_REGISTERS)
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int step = 0; step < K_STEPS; step++)
                load_query(q[m][step], q_smem, l, m, step);
}

/* s = Q * transpose(K) for a tile of keys. q holds the query operands when Q_IN_REGISTERS, else they are read again. */
DEV void multiply_scores(score_tile &s, const query_operands &q, uint32_t q_smem, uint32_t k_smem, const lane_place &l)
{
    score_tile sums[CHAINS];
#pragma unroll
    for (int c = 0; c < CHAINS; c++)
#pragma unroll
        for (int i = 0; i < M_TILES * KEY_TILES * 4; i++)
            sums[c][i / (KEY_TILES * 4)][i % (KEY_TILES * 4)] = 0.0f;
#pragma unroll STEPS_UNROLLED
    for (int step = 0; step < K_STEPS; step++) {
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            if (Q_IN_REGISTERS)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[m][i] = q[m][step][i];
            else
                load_query(a[m], q_smem, l, m, step);
#pragma unroll
        for (int n = 0; n < KEY_TILES; n += 2) { /* 16 keys: matrices {n, low dims} {n, high} {n+1, low} {n+1, high} */
            uint32_t k[4];
            load_matrices(
                k, k_smem + chunk_offset(8 * n + l.lane % 8 + l.lane / 16 * 8, 2 * step + l.lane / 8 % 2, ROW_CHUNKS));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                multiply_add<OPERANDS>(accumulator(sums[step % CHAINS][m], n), a[m], k[0], k[1]);
                multiply_add<OPERANDS>(accumulator(sums[step % CHAINS][m], n + 1), a[m], k[2], k[3]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int i = 0; i < KEY_TILES * 4; i++)
            s[m][i] = CHAINS == 1 ? sums[0][m][i] : sums[0][m][i] + sums[CHAINS - 1][m][i];
}

/* Makes the raw scores of the tile that begins with `key` ready for the softmax. first_row: of the warp, in its batch
 * entry, which is number `batch`; masked: whether some row of the CTA's tile does not see some key. */
DEV void finish_warp_scores(score_tile &s, const fwd_args &a, const visible_entry &entry, int batch, int head,
                            int first_row, int lane, int key, bool masked)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        const int row = first_row + 16 * m + lane / 4;
        row_keys seen = {};
        if (masked) /* else not known, and not computed */
            seen = find_row_keys(a, entry, batch, row, row + 8, 2 * (lane % 4));
        const row_terms terms[2] = {find_row_terms(a, entry, batch, head, row),
                                    find_row_terms(a, entry, batch, head, row + 8)};
        finish_scores(s[m], seen, key, masked, a, terms, 2 * (lane % 4), entry.kv_len);
    }
}

#endif
