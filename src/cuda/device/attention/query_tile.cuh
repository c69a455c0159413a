/* What the mma.sync families share whose CTA owns a tile of one head's queries and whose warps own WARP_ROWS of them
 * each: where a CTA is, the ring of key tiles in shared memory, the score product, masks.
 *
 * An includer defines Q_TILE, KV_TILE, STEP_KEYS, TILE_BYTES, STAGE_BYTES, GROUP_THREADS, ELEM_BYTES, ROW_CHUNKS (of a
 * row of Q, K and V), M_TILES, K_STEPS, KEY_TILES, Q_IN_REGISTERS, STEPS_UNROLLED, and OPERANDS: what its tensors hold,
 * as MMA_* of mma.cuh. */
#ifndef ACR_DEVICE_ATTENTION_QUERY_TILE_CUH
#define ACR_DEVICE_ATTENTION_QUERY_TILE_CUH

#include "cuda/device/isa/common.cuh"
#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/kv_loader.cuh"
#include "cuda/device/isa/copy.cuh"
#include "cuda/device/isa/mma.cuh"
#include "cuda/device/attention/visible.cuh"
#include "cuda/device/attention/softmax.cuh"

/* ---- Where a CTA and a warp are ---- */

typedef struct place {
    int q_first; /* of the CTA's tile */
    int head, batch;
} place;

/* Without a mask, tiles of one head run side by side and share its keys in L2. With one, tiles differ in length: the
 * long ones of all heads start first, within sections of heads few enough for L2. */
DEV place find_place(const fwd_args &a)
{
    enum {
        SECTION_HEADS = 64
    };
    if (a.mask == FWD_MASK_NONE)
        return {(int)blockIdx.x * Q_TILE, (int)blockIdx.y, (int)blockIdx.z};
    const uint32_t tiles = gridDim.x, heads = gridDim.y * gridDim.z;
    const uint32_t index = blockIdx.x + tiles * (blockIdx.y + gridDim.y * blockIdx.z);
    const uint32_t section = index / (tiles * SECTION_HEADS), in_section = index - section * tiles * SECTION_HEADS;
    const uint32_t section_heads = min((uint32_t)SECTION_HEADS, heads - section * SECTION_HEADS);
    const uint32_t rank = in_section / section_heads, head = section * SECTION_HEADS + in_section % section_heads;
    return {(int)((tiles - 1 - rank) * Q_TILE), (int)(head % gridDim.y), (int)(head / gridDim.y)};
}

/* a / b for 0 <= a < 2^16, 0 < b < 2^16: the quotient of a + 1/2 stays further from a whole number than it is rounded
 * by. */
DEV int divide_small(int a, int b)
{
    return (int)((a + 0.5f) * __frcp_rn((float)b));
}

typedef struct lane_place {
    int lane;
    int group; /* of warps that take other keys than the CTA's other groups; 0 in families without groups */
    int row;   /* of the warp's first row within the CTA's tile */
} lane_place;

/* ---- Loading ---- */

DEV chunk_matrix find_matrix(const void *tensor, const fwd_strides &strides, int batch, int head, int row, int dim)
{
    return head_matrix_of(tensor, strides, batch, head, row, dim, ELEM_BYTES);
}

/* What a group's threads load, step by step: the keys and values of every tile that is the group's. */
typedef struct key_loader {
    chunk_matrix k, v;
    uint32_t ring; /* the group's stages: K and then V in each */
    int thread;    /* of the group */
    int first;     /* key of the next step to load */
    int end;       /* one past the last key to load */
} key_loader;

/* Starts loading the next step into a stage: two groups of copies, K and V, empty beyond the last step. */
DEV void load_next(key_loader &loader, int stage)
{
    const uint32_t tile = loader.ring + stage * STAGE_BYTES;
    if (loader.first < loader.end)
        load_tile<KV_TILE, ROW_CHUNKS, GROUP_THREADS>(tile, loader.k, loader.first, loader.end, loader.thread);
    copies_commit();
    if (loader.first < loader.end)
        load_tile<KV_TILE, ROW_CHUNKS, GROUP_THREADS>(tile + TILE_BYTES, loader.v, loader.first, loader.end,
                                                      loader.thread);
    copies_commit();
    loader.first += STEP_KEYS;
}

/* ---- Scores: one warp, WARP_ROWS rows. Arrays are in registers, laid out as device/isa/mma.cuh says. ---- */

typedef float score_tile[M_TILES][KEY_TILES][4];
typedef uint32_t query_operands[M_TILES][K_STEPS][4]; /* unused where they are read from shared memory every time */

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
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
            s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
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
                multiply_add<OPERANDS>(s[m][n], a[m], k[0], k[1]);
                multiply_add<OPERANDS>(s[m][n + 1], a[m], k[2], k[3]);
            }
        }
    }
}

/* Of each row that a lane holds, how many keys it sees, counted from key `first`. */
DEV void count_seen(int (&seen)[M_TILES][2], const fwd_args &a, const keys &visible, const place &p,
                    const lane_place &l, int first)
{
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        seen[i / 2][i % 2] = keys_seen(a, visible, p.q_first + l.row + l.lane / 4 + 8 * i) - first;
}

/* Sets the scores of keys that a row does not see to -inf. seen is relative to the tile's first key. */
DEV void mask_scores(score_tile &s, const int (&seen)[M_TILES][2], int lane)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (8 * n + 2 * (lane % 4) + e % 2 >= seen[m][e / 2])
                    s[m][n][e] = -CUDART_INF_F;
}

/* The largest of a lane's scores in each of its rows. */
DEV void find_maxima(float (&max)[M_TILES][2], const score_tile &s)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            max[m][h] = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
            for (int n = 1; n < KEY_TILES; n++)
                max[m][h] = fmaxf(max[m][h], fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        }
}

#endif
