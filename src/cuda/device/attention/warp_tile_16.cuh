/* The other half of warp_tile.cuh, for elements of 16 bits: online softmax, whose references lag behind the maxima by
 * up to the rescale threshold, and the product of probabilities and values.
 *
 * A row's results depend on its own scores alone: where a row of the warp moves its reference, the others keep theirs.
 *
 * An includer defines, beside what warp_tile.cuh wants, KEY_STEPS (products of 16 keys), DIM_TILES (accumulators of 8
 * output columns) and BF16. */
#ifndef ACR_DEVICE_ATTENTION_WARP_TILE_16_CUH
#define ACR_DEVICE_ATTENTION_WARP_TILE_16_CUH

#ifndef V_ROW_CHUNKS /* of a row of V alone, where a CTA takes some of its columns */
#define V_ROW_CHUNKS ROW_CHUNKS
#endif

#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/attention/warp_tile.cuh"

typedef float output_tile[M_TILES][DIM_TILES * 4];
typedef uint32_t probability_tile[M_TILES][KEY_STEPS][4];

/* Of the two rows that a lane holds in each 16-row tile. */
typedef struct softmax_state {
    float reference[M_TILES][2]; /* what exponentials are relative to: a score that was the row's maximum and is
                                    exceeded by the rescale threshold at most */
    float sum[M_TILES][2];       /* of this lane's exponentials; lanes of a quad are added at the end */
} softmax_state;

DEV void clear(output_tile &o, softmax_state &state)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            state.reference[m][h] = -CUDART_INF_F;
            state.sum[m][h] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < DIM_TILES * 4; i++)
            o[m][i] = 0.0f;
    }
}

/* Whether a maximum is too far beyond the reference. A difference of infinities is NaN, which is not. */
DEV bool exceeds(float max, float reference, float scale_log2)
{
    return (max - reference) * scale_log2 > RESCALE_THRESHOLD;
}

/* Rows whose maxima exceed their references take the maxima for references; sums and output are scaled accordingly.
 * max: of the lane's own columns. */
DEV void move_references(softmax_state &state, output_tile &o, const float (&max)[M_TILES][2], float scale_log2)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float old = state.reference[m][h], row_max = quad_max(max[m][h]);
            const float reference = exceeds(row_max, old, scale_log2) ? row_max : old;
            factor[h] = exp2_fast((old - finite_max(reference)) * scale_log2);
            state.reference[m][h] = reference;
            state.sum[m][h] *= factor[h];
        }
        scale_output(o[m], factor);
    }
}

/* Turns scores into probabilities relative to the references, which move only when a score exceeds one by more than the
 * threshold: then no lane needs another's maximum, and the output no scaling, in most steps. Rows that do not exist,
 * whose scores may be anything, move none. */
DEV void update_softmax(probability_tile &p, softmax_state &state, output_tile &o, const score_tile &s,
                        const bool (&exists)[M_TILES][2], float scale_log2)
{
    float max[M_TILES][2];
    bool exceeded = false;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        lane_max<2>(max[m], s[m]);
#pragma unroll
        for (int h = 0; h < 2; h++)
            exceeded |= exists[m][h] && exceeds(max[m][h], state.reference[m][h], scale_log2);
    }
    if (__any_sync(~0u, exceeded))
        move_references(state, o, max, scale_log2);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float offset = offset_of(state.reference[m][h], scale_log2);
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                const float even = exp2_fast(exponent_of(s[m][4 * n + 2 * h], scale_log2, offset)),
                            odd = exp2_fast(exponent_of(s[m][4 * n + 2 * h + 1], scale_log2, offset));
                state.sum[m][h] += even + odd;
                p[m][n / 2][h + 2 * (n % 2)] = pack<BF16>(even, odd);
            }
        }
}

/* The 8-column tile of V and O that accumulator n belongs to, where accumulators are counted from tile `first` on and
 * wrap. */
DEV int column_tile(int n, int first)
{
    const int tile = n + first;
    return tile < DIM_TILES ? tile : tile - DIM_TILES;
}

/* o += P * V. first: the tile of columns that accumulator 0 belongs to, even. */
DEV void multiply_values(output_tile &o, const probability_tile &p, uint32_t v_smem, int first, int lane)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++)
#pragma unroll
        for (int n = 0; n < DIM_TILES; n += 2) { /* 16 keys x 16 columns */
            uint32_t v[4];
            load_matrices_transposed(
                v, v_smem + chunk_offset(16 * step + lane % 16, column_tile(n, first) + lane / 16, V_ROW_CHUNKS));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                multiply_add<OPERANDS>(accumulator(o[m], n), p[m][step], v[0], v[1]);
                multiply_add<OPERANDS>(accumulator(o[m], n + 1), p[m][step], v[2], v[3]);
            }
        }
}

#endif
