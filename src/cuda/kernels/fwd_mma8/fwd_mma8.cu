/* Forward attention on e4m3 queries, keys and values by mma.sync (m16n8k32), sm_89 and newer: fwd_mma's shape with what
 * 8 bits need besides.
 *
 * A CTA owns Q_TILE query rows of one head, each warp WARP_ROWS of them: scores, probabilities and output stay in
 * registers, K and V tiles come through a ring of STAGES in shared memory (cp.async, XOR swizzle, ldmatrix).
 *
 * - V's operand wants four keys of one dim in a register. ldmatrix transposes pairs of bytes; two byte permutations for
 *   each two registers take even and odd dims apart. So the accumulators hold the even dims of each 16 and then the odd
 *   ones, which the store undoes, and the keys stand in the order in which a lane's packed probabilities are.
 * - Probabilities are scaled by 2^8 before rounding, since e4m3 has 448 above 1 and little below.
 * - Row sums are those of the rounded probabilities: eight columns of ones, made of a constant register, beside V.
 * - Two-level accumulation: the tensor cores keep 14 bits or less of a running sum, so the product of each key tile
 *   starts at zero and is added to the output in float32, by the instruction that scales the output as well.
 *
 * After Shah et al. 2024 (scaled probabilities, keys in the order of P) and Zhang et al. 2024 (what precision mma.sync
 * has on Ada). See README.md.
 *
 * Parameters: DIM (head dims up to it, zero-padded), Q_TILE, KV_TILE, STAGES; optional WARP_ROWS, MAX_REGS (registers
 * of a thread at most, but on sm_90), PACKED=1 (for packed batches alone, which take registers).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES WARP_ROWS=16 MAX_REGS= PACKED=0 */
#include "fwd_args.h"

#ifndef WARP_ROWS
#define WARP_ROWS 16
#endif
#ifndef PACKED
#define PACKED 0
#endif
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ == 900
#define BOUNDS __maxnreg__(255) /* no 8-bit mma.sync there: ptxas makes two 16-bit products of one, and needs more */
#elif defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 1200 && defined MAX_REGS
#define BOUNDS __maxnreg__(MAX_REGS < 128 ? 128 : MAX_REGS) /* with 128, too, four CTAs of 128 threads share an SM */
#elif defined MAX_REGS
#define BOUNDS __maxnreg__(MAX_REGS)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

enum {
    ELEM_BYTES = 1,
    ROW_WARPS = Q_TILE / WARP_ROWS,
    THREADS = 32 * ROW_WARPS,
    Q_IN_REGISTERS = DIM * WARP_ROWS <= 128 * 16 /* else its operands are read from shared memory in every step */
};

typedef struct kv_stage {
    unsigned char k[KV_TILE * DIM * ELEM_BYTES], v[KV_TILE * DIM * ELEM_BYTES];
} kv_stage;

typedef unsigned char query_tile[Q_TILE * DIM * ELEM_BYTES];

typedef struct shared_memory {
    kv_stage ring[STAGES]; /* queries that go to registers lie in the last stage until then */
#if DIM * WARP_ROWS > 128 * 16
    query_tile q;
#endif
} shared_memory;

#ifdef __CUDACC__

#define TRACE_WARPS ROW_WARPS
#include "cuda/device/isa/copy.cuh"
#include "cuda/device/isa/trace_points.cuh"
#include "cuda/device/isa/mma.cuh"

enum {
    OPERANDS = MMA_E4M3,
    GROUP_THREADS = THREADS,
    STEP_KEYS = KV_TILE,
    ROW_CHUNKS = DIM * ELEM_BYTES / CHUNK_BYTES,
    M_TILES = WARP_ROWS / 16, /* 16-row tiles of a warp */
    K_STEPS = DIM / 32,       /* of a score product */
    KEY_TILES = KV_TILE / 8,  /* 8-key accumulators of a score row */
    KEY_STEPS = KV_TILE / 32, /* of an output product */
    DIM_BLOCKS = DIM / 16,    /* of an output row: an accumulator of 8 even dims, one of 8 odd ones */
    CHAINS = 1,               /* sums that a score is made of */
    ONES = 0x38383838,        /* four times 1.0 */
    SHIFT = 8,                /* probabilities reach 2^SHIFT, of e4m3's 448 */
    STEPS_UNROLLED = Q_IN_REGISTERS ? K_STEPS : 4
};

static constexpr float SHIFT_LN = SHIFT * 0.6931471806f;

static_assert(DIM % 64 == 0 && DIM <= 256, "DIM: a multiple of 64 up to 256");
static_assert(WARP_ROWS == 16 || WARP_ROWS == 32, "WARP_ROWS: one or two tiles of the product's 16 rows");
static_assert(Q_TILE % WARP_ROWS == 0 && KV_TILE % 32 == 0,
              "Q_TILE: whole warps; KV_TILE: whole steps of the output product");
static_assert(!Q_IN_REGISTERS || sizeof(query_tile) <= sizeof(kv_stage),
              "Q_TILE: the queries pass through the last stage");
static_assert(STAGES >= 2, "STAGES: one tile is computed on while the next is on its way");

#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/key_ring.cuh"
#include "cuda/device/attention/tile_scheduler.cuh"
#include "cuda/device/attention/warp_tile.cuh"

/* ---- Computing: one warp, WARP_ROWS rows. Arrays are in registers, laid out as device/isa/mma.cuh says. ---- */

typedef float output_tile[M_TILES][DIM_BLOCKS * 8]; /* of a block 4 elements of the even dims, then 4 of the odd ones */
typedef uint32_t probability_tile[M_TILES][KEY_STEPS][4];

/* Per row that a lane holds: [0] row lane/4, [1] row lane/4 + 8 of each 16-row tile. */
typedef float row_values[M_TILES][2];

typedef struct softmax_state {
    row_values max; /* of the raw scores */
    row_values sum; /* of the rounded probabilities, times 2^SHIFT; the same in all lanes of a quad */
} softmax_state;

/* The rows' maxima with a tile's scores. factor: what sums and output are to be multiplied by, which costs nothing, so
 * that maxima need no threshold: a row's largest weight is 2^SHIFT, rounded by nothing. */
DEV void update_maxima(softmax_state &state, row_values &factor, const score_tile &s, float scale_log2)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float max[2];
        lane_max(max, s[m]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float raised = fmaxf(state.max[m][h], quad_max(max[h]));
            factor[m][h] = exp2_fast((state.max[m][h] - finite_max(raised)) * scale_log2);
            state.max[m][h] = raised;
        }
    }
}

/* Turns scores into rounded probabilities times 2^SHIFT. A lane's scores of two keys in each of two neighbouring groups
 * of 8 make one register: position 16h + 4j + i of the product's 32 is key 16h + 8(i/2) + 2j + i%2 of the step's, for
 * V's operand too (load_values). */
DEV void exponentiate(probability_tile &p, const softmax_state &state, const score_tile &s, float scale_log2)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float offset = offset_of<SHIFT>(state.max[m][h], scale_log2);
#pragma unroll
            for (int n = 0; n < KEY_TILES; n += 2) {
                float x[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    x[i] = exp2_fast(exponent_of(s[m][4 * (n + i / 2) + 2 * h + i % 2], scale_log2, offset));
                p[m][n / 4][h + n % 4] = pack_e4m3(x[0], x[1], x[2], x[3]);
            }
        }
}

/* Operand B of 32 keys x 16 dims of V: {v[0], v[1]} for the even dims, {v[2], v[3]} for the odd ones. The four tiles of
 * 8 keys by 16 bytes come transposed by pairs of bytes: of keys 2j and 2j + 1 a lane has dims 2g and 2g + 1. */
DEV void load_values(uint32_t (&v)[4], uint32_t lane_row, int step, int block)
{
    uint32_t pairs[4];
    load_matrices_transposed(pairs, chunk_address(lane_row, block, ROW_CHUNKS) + 32 * step * DIM * ELEM_BYTES);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        v[half] = __byte_perm(pairs[2 * half], pairs[2 * half + 1], 0x6420);
        v[2 + half] = __byte_perm(pairs[2 * half], pairs[2 * half + 1], 0x7531);
    }
}

/* x = x * factor + product: the second level of accumulation. */
DEV void add_product(float (&x)[4], const float (&factor)[2], const float (&product)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++)
        x[e] = fmaf(x[e], factor[e / 2], product[e]);
}

/* o = o * factor + P * V of a tile of keys. */
DEV void accumulate(output_tile &o, const row_values &factor, const probability_tile &p, uint32_t v_smem, int lane)
{
    const uint32_t lane_row = v_smem + chunk_offset(lane, 0, ROW_CHUNKS);
#pragma unroll
    for (int block = 0; block < DIM_BLOCKS; block++) {
        float product[M_TILES][2][4] = {};
        if (block % 2 == 0)
            __syncwarp(); /* ptxas would read all of V ahead, and spill */
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            uint32_t v[4];
            load_values(v, lane_row, step, block);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                multiply_add<OPERANDS>(product[m][0], p[m][step], v[0], v[1]);
                multiply_add<OPERANDS>(product[m][1], p[m][step], v[2], v[3]);
            }
        }
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++)
                add_product(accumulator(o[m], 2 * block + odd), factor[m], product[m][odd]);
    }
}

/* The same for the row sums: each of the product's columns is one. */
DEV void accumulate_sums(row_values &sum, const row_values &factor, const probability_tile &p)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float product[4] = {};
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            multiply_add<OPERANDS>(product, p[m][step], ONES, ONES);
#pragma unroll
        for (int h = 0; h < 2; h++)
            sum[m][h] = fmaf(sum[m][h], factor[m][h], product[2 * h]);
    }
}

/* ---- Storing ---- */

DEV void store_rows(const fwd_args &a, const work_tile &t, const visible_entry &entry, const lane_place &l,
                    const output_tile &o, const softmax_state &state)
{
    const head_scales scales = find_scales(a, t.batch, divide_small(t.head, a.group)); /* again: registers are few */
    int finite = true;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int m = i / 2, h = i % 2, row = t.q_first + l.row + l.lane / 4 + 8 * i;
        const row_store to = {(char *)a.o + output_index(a, t.rows, t.batch, t.head, row) * 2, row < t.rows.q_len,
                              a.v_dim, inverse_sum(state.sum[m][h]) * scales.out};
        finite &= store_even_odd_row<DIM>(to, o[m], h, a.out_bf16, l.lane);
        if (a.lse != nullptr && l.lane % 4 == 0 && to.exists)
            find_lse(a, t.rows, t.batch, t.head)[row] =
                log_sum_exp(state.max[m][h], state.sum[m][h], scales.scale) - SHIFT_LN;
    }
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int m = i / 2, h = i % 2, row = t.q_first + l.row + l.lane / 4 + 8 * i;
        const stored_row stored = {t.batch,
                                   t.head,
                                   row,
                                   t.rows.q_begin,
                                   t.rows.kv_begin,
                                   scales.scale_log2,
                                   offset_of<SHIFT>(state.max[m][h], scales.scale_log2),
                                   inverse_sum(state.sum[m][h]) * scales.out};
        fix_hidden_nan<ACR_E4M3, ACR_BF16_OR_F16>(a, entry, stored, state.sum[m][h], finite, l.lane);
    }
}

/* ---- The kernel ---- */

/* The compiler knows nothing of the value any more, and computes anew what depends on it. */
template <typename WORD> DEV void forget(WORD &value)
{
    asm("" : "+r"(value));
}

DEV void clear(output_tile &o, softmax_state &state)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            state.max[m][h] = -CUDART_INF_F;
            state.sum[m][h] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < DIM_BLOCKS * 8; i++)
            o[m][i] = 0.0f;
    }
}

extern "C" __global__ void BOUNDS KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    extern __shared__ __align__(128) unsigned char memory[];
    shared_memory &smem = *(shared_memory *)memory;
    wait_for_previous_kernel();
    ACR_TRACE_POINT(0, "start");

    lane_place l = {(int)threadIdx.x % 32, 0, (int)threadIdx.x, (int)threadIdx.x / 32 * WARP_ROWS};
    work_tile t = tile_of_cta(a, blockIdx);
    t.rows = find_sequence(a, t.batch);
    if (PACKED && t.q_first >= t.rows.q_len) /* a sequence shorter than the longest */
        return;
    const float scale_log2 = find_scales(a, t.batch, divide_small(t.head, a.group)).scale_log2;
    const visible_entry entry = entry_of(a, t.rows);
    const visible_keys visible = visible_to_rows(entry, t.q_first, Q_TILE);
    const int first_key = visible.first / KV_TILE * KV_TILE;
    const uint32_t q_smem = smem_address(&smem.ring[Q_IN_REGISTERS ? STAGES - 1 : STAGES]);
    key_ring ring = make_ring(a, t, first_key, visible.end, smem_address(smem.ring), threadIdx.x);

    /* Groups of copies: {Q, K 0}, {V 0}, {K 1}, {V 1}, ... */
    load_tile<Q_TILE, ROW_CHUNKS, THREADS>(q_smem, query_matrix(a, t), t.q_first, t.rows.q_len, threadIdx.x);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++)
        load_next(ring, stage);
    softmax_state state;
    output_tile o;
    clear(o, state);
    COPIES_WAIT(2 * STAGES - 3); /* Q and K 0 */
    __syncthreads();
    ACR_TRACE_POINT(0, "Q and first K landed");
    query_operands q_operands;
    load_query_operands(q_operands, q_smem, l);
    if (Q_IN_REGISTERS)
        __syncthreads(); /* the last stage is free */

    int stage = 0;
    for (int key = first_key; key < visible.end; key += KV_TILE) {
        if (key > first_key) { /* this step's copies have landed for all, and all have left the stage before */
            COPIES_WAIT(2 * (STAGES - 2));
            __syncthreads();
        }
        forget(ring.next); /* or addresses stay in registers from step to step, more than there are */
        forget(l.lane);
        load_next(ring, stage == 0 ? STAGES - 1 : stage - 1);
        ACR_TRACE_POINT((key - first_key) / KV_TILE, "tile landed, next loads issued");

        const uint32_t k_smem = stage_address(ring, stage), v_smem = k_smem + offsetof(kv_stage, v);
        const bool masked = key < visible.full_first || key + KV_TILE > visible.full_end;
        score_tile s;
        multiply_scores(s, q_operands, q_smem, k_smem, l);
        ACR_TRACE_POINT((key - first_key) / KV_TILE, "scores ready");
        finish_warp_scores(s, a, entry, t.batch, t.head, t.q_first + l.row, l.lane, key, masked);
        probability_tile probabilities;
        row_values factor;
        update_maxima(state, factor, s, scale_log2);
        exponentiate(probabilities, state, s, scale_log2);
        ACR_TRACE_POINT((key - first_key) / KV_TILE, "exponentials done");
        if (key == first_key) { /* V 0 */
            COPIES_WAIT(2 * (STAGES - 1));
            __syncthreads();
        }
        accumulate_sums(state.sum, factor, probabilities);
        accumulate(o, factor, probabilities, v_smem, l.lane);
        ACR_TRACE_POINT((key - first_key) / KV_TILE, "output product done");
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    /* Not before: the next kernel's CTAs would crowd onto SMs that have room early, and leave others idle. */
    allow_next_kernel();
    uint3 cta = blockIdx; /* the tile once more: over the loop there are no registers for it */
    forget(cta.x);
    forget(cta.y);
    forget(cta.z);
    t = tile_of_cta(a, cta);
    t.rows = find_sequence(a, t.batch);
    store_rows(a, t, entry_of(a, t.rows), l, o, state);
    ACR_TRACE_POINT(0, "stored");
    ACR_TRACE_END(a);
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {.work = ACR__WORK_TILES,
                                   .q_tile = Q_TILE,
                                   .threads = THREADS,
                                   .smem_bytes = sizeof(shared_memory),
                                   .packed_only = PACKED};

#include "cuda/model/tile_kernel.h"

/* Whether mma.sync has 8-bit products there. Hopper's has 16-bit ones only: ptxas makes two, behind conversions. */
static int has_8_bit_products(const acr__device *device)
{
    return device->arch != 90;
}

/* FLOP a cycle of an SM. Of 2048, or of 1024, behind which the rest of the kernel hides better. */
static double product_rate(const acr__device *device)
{
    return !has_8_bit_products(device) ? 700.0 : acr__accumulates_slowly(device) ? 750.0 : 1100.0;
}

/* CTAs that fit on an SM beside each other; on Hopper, where nothing is to be promised, one. */
static int32_t ctas_per_sm(const acr__device *device)
{
#ifdef MAX_REGS
    const int32_t limit = MAX_REGS;
#else
    const int32_t limit = DIM > 128 ? 248 : 168; /* what ptxas takes */
#endif
    return has_8_bit_products(device) ? tile_ctas_per_sm(device, limit) : 1;
}

/* Predicted for GPUs with 8-bit products, on which this family has not run: README.md says where the
 * rates come from. Those of sm_90 are such that fwd_fp8, which is measured, is taken where it can run. */
static double cost(const acr_problem *problem, const acr__device *device)
{
    const int fast = has_8_bit_products(device);
    const acr__fwd_rates rates = {
        .mma_flop_per_cycle = product_rate(device),
        .exp_per_cycle = fast ? 12.0 : 8.0,
        .step_cycles = (500.0 + 12.0 * KV_TILE * (DIM / 64.0)) * (fast ? 1.0 : 2.0),
        .cta_cycles = fast ? 6000.0 : 12000.0,
        .mask_cycles = 300.0,
        .ctas_per_sm = ctas_per_sm(device),
    };
    return tile_seconds(problem, device, rates);
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("fwd_mma8", 89, 999), .dtype = ACR_E4M3, .traits = PACKED ? ACR__TRAIT_PACKED : 0,
    .why_not = tile_why_not,          .cost = cost,      .shape = tile_shape,
};

#endif
