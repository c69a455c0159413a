/* Forward attention on the ordinary arithmetic units: the last resort. Any element type, head dims up to 256, any
 * strides and alignment, any lengths and masks; correct everywhere, fast nowhere.
 *
 * A CTA of 16 x 16 threads owns 64 query rows of one head and walks the keys 64 at a time. Thread (y, x) holds rows
 * 4y..4y+3: scores of keys 4x..4x+3, and output columns 4x..4x+3 of each 64-column block. Operands come through shared
 * memory as floats, a slice of the head dim or of the keys at a time; the scores go to shared memory once, as
 * probabilities. Every feature is looked for at run time. Online softmax after Dao et al. 2022. See README.md.
 *
 * Parameters: DTYPE, an acr_dtype; DIM, the largest head dim.
 *
 * PARAMETERS: DTYPE DIM */
#define TERMS 127
#define EXACT_SOFTCAP 1
#include "fwd_args.h"

enum {
    Q_TILE = 64,
    KV_TILE = 64,
    THREADS = 256
};

#ifdef __CUDACC__

#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/scores.cuh"
#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/attention/visible.cuh"
#include "cuda/device/isa/element.cuh"

enum {
    BLOCK = 4,              /* rows, keys and columns that a thread holds side by side */
    SIDE = 16,              /* threads along rows, and along keys or columns */
    DIM_SLICE = 32,         /* of the head dim, in shared memory at a time */
    KEY_SLICE = 16,         /* of the keys of V, in shared memory at a time */
    PITCH = Q_TILE + 4,     /* of a transposed tile: columns 16-byte aligned, stores free of bank conflicts */
    COLUMNS = BLOCK * SIDE, /* output columns in a block */
    COLUMN_BLOCKS = DIM / COLUMNS,
    MIN_CTAS = DIM <= 128 ? 2 : 1 /* CTAs of a SM that registers must leave room for */
};
static_assert(Q_TILE == BLOCK * SIDE && KV_TILE == BLOCK * SIDE && THREADS == SIDE * SIDE,
              "a score for every thread's 4 x 4");
static_assert(DIM % COLUMNS == 0 && DIM <= 256, "DIM: 64, 128, 192 or 256");

typedef struct shared_tiles {
    union { /* the two products take turns */
        struct {
            float q[DIM_SLICE][PITCH], k[DIM_SLICE][PITCH]; /* transposed */
        };
        float v[KEY_SLICE][DIM];
    };
    float p[KV_TILE][PITCH]; /* probabilities, transposed */
    sequence rows;           /* of the batch entry; registers are for the products */
    head_scales scales;      /* of the batch entry and head, where inputs have any */
} shared_tiles;

typedef struct thread_place {
    int y, x;
} thread_place;

/* A matrix of one head in global memory. */
typedef struct head_matrix {
    const void *base;
    int64_t offset, row_stride; /* elements */
    int dim;
} head_matrix;

DEV head_matrix find_matrix(const void *tensor, const fwd_strides &strides, int batch, int head, int row, int dim)
{
    return {tensor, batch * strides.batch + head * strides.head + row * strides.row, strides.row, dim};
}

/* An element, or 0 where there is none. */
DEV float read(const head_matrix &m, int row, int row_end, int column)
{
    return row < row_end && column < m.dim ? load_element<DTYPE>(m.base, m.offset + row * m.row_stride + column) : 0.0f;
}

/* Loads columns [column, column + DIM_SLICE) of 64 rows, transposed. A warp takes 8 columns of 4 rows at a time: whole
 * sectors of global memory, and 32 different banks. */
DEV void load_transposed(float (&to)[DIM_SLICE][PITCH], const head_matrix &m, int row, int row_end, int column)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int r = 0; r < 8; r += 4)
#pragma unroll
        for (int c = 0; c < DIM_SLICE; c += 8) {
            const int in_row = 8 * warp + r + lane / 8, in_column = c + lane % 8;
            to[in_column][in_row] = read(m, row + in_row, row_end, column + in_column);
        }
}

/* Loads KEY_SLICE rows of V, the column blocks that exist. */
DEV void load_values(float (&to)[KEY_SLICE][DIM], const head_matrix &v, int key, int key_end)
{
    const int column = threadIdx.x % COLUMNS, first_key = threadIdx.x / COLUMNS;
    for (int block = 0; block * COLUMNS < v.dim; block++)
#pragma unroll
        for (int i = first_key; i < KEY_SLICE; i += THREADS / COLUMNS)
            to[i][block * COLUMNS + column] = read(v, key + i, key_end, block * COLUMNS + column);
}

DEV void multiply_scores(float (&s)[BLOCK][BLOCK], shared_tiles &tiles, const head_matrix &q, const head_matrix &k,
                         int q_first, int q_end, int key_first, int key_end, const thread_place &t)
{
#pragma unroll
    for (int i = 0; i < BLOCK * BLOCK; i++)
        s[i / BLOCK][i % BLOCK] = 0.0f;
    for (int dim = 0; dim < q.dim; dim += DIM_SLICE) {
        __syncthreads(); /* the slice before, or V, is no longer read */
        load_transposed(tiles.q, q, q_first, q_end, dim);
        load_transposed(tiles.k, k, key_first, key_end, dim);
        __syncthreads();
#pragma unroll 4
        for (int d = 0; d < DIM_SLICE; d++) {
            const float4 q4 = *(const float4 *)&tiles.q[d][BLOCK * t.y], k4 = *(const float4 *)&tiles.k[d][BLOCK * t.x];
            const float qs[BLOCK] = {q4.x, q4.y, q4.z, q4.w}, ks[BLOCK] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
            for (int i = 0; i < BLOCK * BLOCK; i++)
                s[i / BLOCK][i % BLOCK] = fmaf(qs[i / BLOCK], ks[i % BLOCK], s[i / BLOCK][i % BLOCK]);
        }
    }
}

/* A row lies across SIDE lanes. */
DEV float row_max(float x)
{
#pragma unroll
    for (int distance = 1; distance < SIDE; distance *= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

DEV float row_sum(float x)
{
#pragma unroll
    for (int distance = 1; distance < SIDE; distance *= 2)
        x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

typedef struct softmax_state {
    float max[BLOCK], sum[BLOCK]; /* of this thread's rows; sum of its own keys, lanes are added at the end */
} softmax_state;

typedef float output_block[BLOCK][COLUMN_BLOCKS][BLOCK]; /* row, column block, column */

/* Of the scores of e4m3 inputs: what the execution brings. */
DEV float input_scales(const fwd_args &a, const shared_tiles &tiles)
{
    return DTYPE == ACR_E4M3 ? tiles.scales.scale / a.scale : 1.0f;
}

/* The tile's first row, of a query head of a batch entry. */
typedef struct row_place {
    int batch, head, q_first;
} row_place;

/* A probability in shared memory of a key that its row does not see. */
#define HIDDEN (-1.0f)

/* Turns raw scores into powers of two, hides keys, raises the maxima, writes the probabilities, and scales sums and
 * output down. */
DEV void update_softmax(const fwd_args &a, shared_tiles &tiles, softmax_state &state, output_block &o,
                        const float (&s)[BLOCK][BLOCK], const visible_entry &entry, const row_place &at, int key_first,
                        const thread_place &t)
{
    /* Found again for every tile: registers are for the products. */
    const int first_row = at.q_first + BLOCK * (read_thread() / SIDE);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        const row_view view = find_row_view(a, entry, at.batch, first_row + i);
        const row_terms terms = find_row_terms(a, entry, at.batch, at.head, first_row + i);
        float visible[BLOCK], max = state.max[i];
        bool sees[BLOCK];
#pragma unroll
        for (int j = 0; j < BLOCK; j++) {
            const int key = key_first + BLOCK * t.x + j;
            sees[j] = sees_key(view, key);
            visible[j] = -CUDART_INF_F;
            if (sees[j]) {
                visible[j] = finish_score(a, terms, s[i][j] * input_scales(a, tiles), key);
                sees[j] = !hides_key(a, terms, key);
            }
            max = fmaxf(max, visible[j]);
        }
        max = row_max(max);
        const float correction = exp2_fast(state.max[i] - finite_max(max));
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < BLOCK; j++) {
            const float p = exp2_fast(visible[j] - finite_max(max));
            tiles.p[BLOCK * t.x + j][BLOCK * t.y + i] = sees[j] ? p : HIDDEN;
            sum += p;
        }
        state.max[i] = max;
        state.sum[i] = state.sum[i] * correction + sum;
#pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS * BLOCK; j++)
            o[i][j / BLOCK][j % BLOCK] *= correction;
    }
}

/* o += P * V. Where some rows do not see some keys, each takes only those that it sees: 0 * NaN would be NaN. */
template <bool MASKED>
DEV void accumulate(output_block &o, shared_tiles &tiles, const head_matrix &v, int key_first, int key_end,
                    const thread_place &t)
{
    for (int slice = 0; slice < KV_TILE && key_first + slice < key_end; slice += KEY_SLICE) {
        __syncthreads(); /* probabilities are written; Q and K, or the slice before, are no longer read */
        load_values(tiles.v, v, key_first + slice, key_end);
        __syncthreads();
#pragma unroll 4
        for (int key = 0; key < KEY_SLICE; key++) {
            const float4 p4 = *(const float4 *)&tiles.p[slice + key][BLOCK * t.y];
            const float p[BLOCK] = {p4.x, p4.y, p4.z, p4.w};
#pragma unroll
            for (int block = 0; block < COLUMN_BLOCKS; block++)
                if (block * COLUMNS < v.dim) {
                    const float4 v4 = *(const float4 *)&tiles.v[key][block * COLUMNS + BLOCK * t.x];
                    const float vs[BLOCK] = {v4.x, v4.y, v4.z, v4.w};
#pragma unroll
                    for (int i = 0; i < BLOCK; i++)
                        if (!MASKED || p[i] != HIDDEN)
#pragma unroll
                            for (int j = 0; j < BLOCK; j++)
                                o[i][block][j] = fmaf(p[i], vs[j], o[i][block][j]);
                }
        }
    }
}

DEV void store_rows(const fwd_args &a, const shared_tiles &tiles, int batch, int head, int q_first,
                    const softmax_state &state, const output_block &o, const thread_place &t)
{
    const sequence &rows = tiles.rows;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        const int row = q_first + BLOCK * t.y + i;
        const float sum = row_sum(state.sum[i]),
                    factor = row_factor(a, head, state.max[i], sum) * (DTYPE == ACR_E4M3 ? tiles.scales.out : 1.0f);
        if (row >= rows.q_len)
            continue;
        const int64_t base = output_index(a, rows, batch, head, row);
#pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS * BLOCK; j++) {
            const int column = j / BLOCK * COLUMNS + BLOCK * t.x + j % BLOCK;
            if (column < a.v_dim)
                store_output<DTYPE == ACR_E4M3 ? ACR_BF16_OR_F16 : DTYPE>(a, base + column,
                                                                          o[i][j / BLOCK][j % BLOCK] * factor);
        }
        if (a.lse != nullptr && t.x == 0)
            find_lse(a, rows, batch, head)[row] = row_lse(a, head, state.max[i], sum);
    }
}

DEV void attend(const fwd_args &a, shared_tiles &tiles, int batch, int head, int q_first)
{
    const thread_place t = {(int)threadIdx.x / SIDE, (int)threadIdx.x % SIDE};
    const visible_entry entry = entry_of(a, tiles.rows);
    const visible_keys visible = find_visible_keys(a, entry, batch, q_first, Q_TILE);
    const head_matrix q = find_matrix(a.q, a.q_stride, batch, head, 0, a.qk_dim);
    /* Queries of the next sequence may be read, they are not stored: the tensor's end needs no register. */
    const int q_row = tiles.rows.q_begin + q_first, q_end = is_packed(a) ? a.q_total : a.q_len;
    const head_matrix k = find_matrix(a.k, a.k_stride, batch, head / a.group, tiles.rows.kv_begin, a.qk_dim);
    const head_matrix v = find_matrix(a.v, a.v_stride, batch, head / a.group, tiles.rows.kv_begin, a.v_dim);
    softmax_state state;
    output_block o;
    const row_place at = {batch, head, q_first};
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        state.max[i] = -CUDART_INF_F;
        state.sum[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS * BLOCK; j++)
            o[i][j / BLOCK][j % BLOCK] = 0.0f;
    }
    for (int64_t first = visible.first / KV_TILE * KV_TILE; first < visible.end; first += KV_TILE) {
        float s[BLOCK][BLOCK];
        multiply_scores(s, tiles, q, k, q_row, q_end, (int)first, visible.end, t);
        update_softmax(a, tiles, state, o, s, entry, at, (int)first, t);
        if (hides_keys(a, entry) &&
            (a.bias != nullptr || first < visible.full_first || first + KV_TILE > visible.full_end))
            accumulate<true>(o, tiles, v, (int)first, visible.end, t);
        else
            accumulate<false>(o, tiles, v, (int)first, visible.end, t);
    }
    store_rows(a, tiles, batch, head, q_first, state, o, t);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    __shared__ shared_tiles tiles;
    wait_for_previous_kernel();
    const int64_t q_tiles = ((int64_t)a.q_len + Q_TILE - 1) / Q_TILE, count = q_tiles * a.q_heads * a.batch;
    for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
        const int64_t tile = q_tiles - 1 - index % q_tiles,
                      head = index / q_tiles; /* with a causal mask the last tile is the longest */
        const int batch = (int)(head / a.q_heads), in_batch = (int)(head % a.q_heads), q_first = (int)(tile * Q_TILE);
        if (threadIdx.x == 0) {
            tiles.rows = find_sequence(a, batch);
            if constexpr (DTYPE == ACR_E4M3)
                tiles.scales = find_scales(a, batch, in_batch / a.group);
        }
        __syncthreads();
        if (q_first < tiles.rows.q_len)
            attend(a, tiles, batch, in_batch, q_first);
        __syncthreads(); /* the tiles are free for the next */
    }
    allow_next_kernel();
}

#else

#include "cuda/model/fwd_model.h"

enum {
    STAGES = 1
};

static const acr__tiling TILING = {.work = ACR__WORK_OWN, .any_strides = 1};

#include "cuda/model/tile_kernel.h"

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    (void)device;
    const double ctas = (double)acr__q_tiles(problem, Q_TILE) * (double)problem->q_heads * (double)problem->batch;
    *launch = (acr__launch){.grid = {ctas < INT32_MAX ? (uint32_t)ctas : INT32_MAX, 1, 1}, .block = THREADS};
}

/* Fitted to runs on an H200 (README.md). */
static double cost(const acr_problem *problem, const acr__device *device)
{
    const int32_t ctas_per_sm = DIM <= 128 ? 2 : 1;
    const acr__fwd_rates rates = {
        .mma_flop_per_cycle =
            ctas_per_sm == 2 ? 68.0 : 42.0, /* of 256: one or two CTAs cannot hide loads and barriers */
        .exp_per_cycle = 16.0,
        .step_cycles = 8000.0,
        .cta_cycles = 5000.0,
        .ctas_per_sm = ctas_per_sm,
    };
    return tile_seconds_unpadded(problem, device, rates);
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("fwd_simt", 80, 999),
    .dtype = DTYPE,
    .traits = ACR__TRAIT_LAST_RESORT | ACR__TRAIT_PACKED,
    .terms = TERMS,
    .why_not = tile_why_not,
    .cost = cost,
    .shape = shape,
};

#endif
