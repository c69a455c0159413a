/* The idea of rung 3, which rungs 4 and 5 keep: what one warp does for its 16 query rows, all of it in registers.
 *
 * An accumulator of mma.sync m16n8k16 says which lane holds which score (isa/mma.cuh), so a row's maximum and sum
 * need two shuffles among the four lanes of a quad, and two neighbouring accumulators of Q * transpose(K), packed to
 * fp16, are the left operand of P * V as they are. Shared memory holds K and V and is only read.
 *
 * An includer defines Q_TILE, KV_TILE, DIM, and SWIZZLED: whether a tile's 16-byte chunks lie in plain order or as
 * device/isa/copy.cuh's chunk_offset says. */
#ifndef ACR_LADDER_WARP_ATTENTION_CUH
#define ACR_LADDER_WARP_ATTENTION_CUH

#include "cuda/device/isa/common.cuh"
#include "cuda/device/isa/copy.cuh"
#include "cuda/device/attention/visible.cuh"
#include "cuda/device/isa/mma.cuh"
#include "cuda/device/attention/softmax.cuh"

enum {
    ELEM_BYTES = 2,
    WARP_ROWS = 16,
    ROW_CHUNKS = DIM / CHUNK_ELEMS,
    DIM_STEPS = DIM / 16,     /* products along the head dim */
    KEY_STEPS = KV_TILE / 16, /* products along the keys */
    DIM_TILES = DIM / 8,      /* accumulators of an output row */
    KEY_TILES = KV_TILE / 8   /* accumulators of a score row */
};
static_assert(DIM % 64 == 0 && KV_TILE % 16 == 0 && Q_TILE % WARP_ROWS == 0, "whole chunks, products and warps");

/* ---- Tiles in shared memory: rows of DIM fp16 ---- */

DEV uint32_t place_in_tile(int row, int chunk)
{
    return SWIZZLED ? chunk_offset(row, chunk, ROW_CHUNKS) : (row * ROW_CHUNKS + chunk) * CHUNK_BYTES;
}

/* The rows of one head. */
typedef struct head_rows {
    const char *base;
    int64_t row_bytes;
} head_rows;

DEV head_rows find_rows(const void *tensor, const fwd_strides &strides, int batch, int head)
{
    return {(const char *)tensor + (batch * strides.batch + head * strides.head) * ELEM_BYTES,
            strides.row * ELEM_BYTES};
}

/* Starts copying rows [first, first + ROWS) by threads 0..THREADS-1, to be evicted last from L2 (rung 1). Rows from end
 * on become zeros, whatever memory holds. */
template <int ROWS, int THREADS>
DEV void copy_rows(uint32_t tile, const head_rows &rows, int first, int end, int thread)
{
    constexpr int ROWS_AT_ONCE = THREADS / ROW_CHUNKS;
    const int row = thread / ROW_CHUNKS, chunk = thread % ROW_CHUNKS;
    const char *from = rows.base + (first + row) * rows.row_bytes + chunk * CHUNK_BYTES;
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#pragma unroll
    for (int r = 0; r < ROWS; r += ROWS_AT_ONCE) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
                         tile + place_in_tile(row + r, chunk)),
                     "l"(from), "r"(first + row + r < end ? CHUNK_BYTES : 0), "l"(policy)
                     : "memory");
        from += ROWS_AT_ONCE * rows.row_bytes;
    }
}

/* ---- Registers of a lane. Of its warp's 16 rows it holds [0] row lane / 4 and [1] row lane / 4 + 8. ---- */

typedef uint32_t left_operands[4][4];
static_assert(DIM_STEPS == 4 && KEY_STEPS == 4, "queries and probabilities are left operands of four products each");

typedef float output_tile[DIM_TILES][4];

typedef struct row_state {
    float max[2];
    float sum[2]; /* of this lane's exponentials; the quad's are added at the end */
} row_state;

DEV void clear(output_tile &o, row_state &r)
{
#pragma unroll
    for (int i = 0; i < DIM_TILES * 4; i++)
        o[i / 4][i % 4] = 0.0f;
    r.max[0] = r.max[1] = -CUDART_INF_F;
    r.sum[0] = r.sum[1] = 0.0f;
}

/* The warp's query rows, from row `warp_row` of the tile on, as left operands. */
DEV void load_queries(left_operands &q, uint32_t q_tile, int warp_row, int lane)
{
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++)
        load_matrices(q[step], q_tile + place_in_tile(warp_row + lane % 16, 2 * step + lane / 16));
}

/* s = Q * transpose(K) */
DEV void multiply_scores(float (&s)[KEY_TILES][4], const left_operands &q, uint32_t k_tile, int lane)
{
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++)
#pragma unroll
        for (int n = 0; n < KEY_TILES; n += 2) {
            uint32_t k[4]; /* matrices {keys n, low dims} {n, high dims} {n + 1, low} {n + 1, high} */
            const int key = 8 * n + lane % 8 + lane / 16 * 8;
            load_matrices(k, k_tile + place_in_tile(key, 2 * step + lane / 8 % 2));
            multiply_add<0>(s[n], q[step], k[0], k[1]);
            multiply_add<0>(s[n + 1], q[step], k[2], k[3]);
        }
}

/* Turns scores into probabilities, and brings sums and output to the new maxima. */
DEV void take_softmax(left_operands &p, row_state &r, output_tile &o, const float (&s)[KEY_TILES][4], float scale_log2)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float max = r.max[h];
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
            max = fmaxf(max, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        max = quad_max(max);
        const float correction = exp2_fast((r.max[h] - finite_max(max)) * scale_log2);
        const float subtrahend = finite_max(max) * scale_log2;
        r.max[h] = max;
        r.sum[h] *= correction;
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++) {
            o[n][2 * h] *= correction;
            o[n][2 * h + 1] *= correction;
        }
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            const float even = exp2_fast(s[n][2 * h] * scale_log2 - subtrahend);
            const float odd = exp2_fast(s[n][2 * h + 1] * scale_log2 - subtrahend);
            r.sum[h] += even + odd;
            p[n / 2][h + 2 * (n % 2)] = pack<0>(even, odd);
        }
    }
}

/* Right operands of 16 keys and 16 columns of V: {v[0], v[1]} for accumulator n, {v[2], v[3]} for n + 1. */
DEV void load_values(uint32_t (&v)[4], uint32_t v_tile, int step, int n, int lane)
{
    load_matrices_transposed(v, v_tile + place_in_tile(16 * step + lane % 16, n + lane / 16));
}

/* o += P * V */
DEV void multiply_values(output_tile &o, const left_operands &p, uint32_t v_tile, int lane)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++)
#pragma unroll
        for (int n = 0; n < DIM_TILES; n += 2) {
            uint32_t v[4];
            load_values(v, v_tile, step, n, lane);
            multiply_add<0>(o[n], p[step], v[0], v[1]);
            multiply_add<0>(o[n + 1], p[step], v[2], v[3]);
        }
}

/* ---- Keys that only some rows see ---- */

DEV bool all_finite(const float (&c)[2][4])
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum += fabsf(c[i / 4][i % 4]);
    return __all_sync(~0u, sum < CUDART_INF_F);
}

/* The half of a right operand's word that belongs to a key, counted from the operand's first; else zero. */
DEV uint32_t only_key(uint32_t word, int key, int lane)
{
    return key >> 1 == lane % 4 ? word & (key & 1 ? 0xffff0000u : 0x0000ffffu) : 0;
}

/* c += P * V for 16 keys and columns, key by key, each row only with the keys that it sees. */
DEV void multiply_by_key(float (&c)[2][4], const uint32_t (&p)[4], const uint32_t (&v)[4], const int (&seen)[2],
                         int lane)
{
#pragma unroll 1
    for (int key = 0; key < 16; key++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum[4] = {c[i][0], c[i][1], c[i][2], c[i][3]};
            multiply_add<0>(sum, p, only_key(v[2 * i], key, lane), only_key(v[2 * i + 1], key - 8, lane));
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[i][e] = key < seen[e / 2] ? sum[e] : c[i][e];
        }
}

/* o += P * V. Hidden keys have probability 0, but 0 * NaN is NaN: 16 columns whose sums are not finite are taken again,
 * key by key. Sums that were finite stay as they are, so that a row does not depend on its neighbours. */
DEV void multiply_seen_values(output_tile &o, const left_operands &p, uint32_t v_tile, const int (&seen)[2], int lane)
{
#pragma unroll
    for (int n = 0; n < DIM_TILES; n += 2) {
        float sums[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++)
            sums[i / 4][i % 4] = o[n + i / 4][i % 4];
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            uint32_t v[4];
            load_values(v, v_tile, step, n, lane);
            multiply_add<0>(sums[0], p[step], v[0], v[1]);
            multiply_add<0>(sums[1], p[step], v[2], v[3]);
        }
        if (!all_finite(sums)) {
            float by_key[2][4];
#pragma unroll
            for (int i = 0; i < 8; i++)
                by_key[i / 4][i % 4] = o[n + i / 4][i % 4];
#pragma unroll
            for (int step = 0; step < KEY_STEPS; step++) {
                uint32_t v[4];
                load_values(v, v_tile, step, n, lane);
                const int seen_in_step[2] = {seen[0] - 16 * step, seen[1] - 16 * step};
                multiply_by_key(by_key, p[step], v, seen_in_step, lane);
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (!isfinite(sums[i / 4][i % 4]))
                    sums[i / 4][i % 4] = by_key[i / 4][i % 4];
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            o[n + i / 4][i % 4] = sums[i / 4][i % 4];
    }
}

/* ---- One tile of keys ---- */

/* `seen`: keys of the tile that each of the lane's rows sees, below 0 and beyond KV_TILE included. */
DEV void attend(output_tile &o, row_state &r, const left_operands &q, uint32_t k_tile, uint32_t v_tile,
                const int (&seen)[2], float scale_log2, int lane)
{
    float s[KEY_TILES][4];
    left_operands p;
    multiply_scores(s, q, k_tile, lane);
    const bool all_seen = __all_sync(~0u, min(seen[0], seen[1]) >= KV_TILE);
    if (!all_seen)
#pragma unroll
        for (int i = 0; i < KEY_TILES * 4; i++)
            if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= seen[i % 4 / 2])
                s[i / 4][i % 4] = -CUDART_INF_F;
    take_softmax(p, r, o, s, scale_log2);
    if (all_seen)
        multiply_values(o, p, v_tile, lane);
    else
        multiply_seen_values(o, p, v_tile, seen, lane);
}

/* ---- The end of a row ---- */

/* Divides the warp's rows by their sums and stores them, 16 bytes a lane; first_row: the warp's first. */
DEV void store_rows(const fwd_args &a, int batch, int head, int first_row, const output_tile &o, row_state &r, int lane)
{
    char *base = (char *)a.o + (batch * a.o_stride.batch + head * a.o_stride.head) * ELEM_BYTES;
    float *lse = a.lse + ((int64_t)batch * a.q_heads + head) * a.q_len;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = first_row + lane / 4 + 8 * h;
        r.sum[h] = quad_sum(r.sum[h]);
        inverse[h] = inverse_sum(r.sum[h]);
        if (a.lse != nullptr && row < a.q_len && lane % 4 == 0)
            lse[row] = log_sum_exp(r.max[h], r.sum[h], a.scale);
    }
    const int row = first_row + lane / 4 + lane % 4 / 2 * 8; /* after the transposition: two rows, two tiles a quad */
#pragma unroll
    for (int n = 0; n < DIM_TILES; n += 2) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) { /* row, tile */
            const int h = i / 2;
            w[i] = pack<0>(o[n + i % 2][2 * h] * inverse[h], o[n + i % 2][2 * h + 1] * inverse[h]);
        }
        transpose_quad(w);
        if (row < a.q_len)
            *(uint4 *)(base + row * a.o_stride.row * ELEM_BYTES + (n + lane % 2) * CHUNK_BYTES) =
                make_uint4(w[0], w[1], w[2], w[3]);
    }
}

#endif
