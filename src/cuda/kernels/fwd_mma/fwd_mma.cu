/* Forward attention on mma.sync tensor cores, fp16 and bf16: the portable fast kernel, sm_80 and newer.
 *
 * A CTA owns Q_TILE query rows of one head. Each warp holds WARP_ROWS of them: its scores, its probabilities and its
 * output stay in registers, K and V tiles come through a ring of STAGES in shared memory (cp.async, XOR swizzle,
 * ldmatrix). KV_GROUPS > 1 splits the keys over groups of warps within the CTA (group g takes tiles g, g + KV_GROUPS,
 * ...), each with its own ring and barrier; at the end the groups exchange slices of their partial outputs through
 * shared memory and each finishes one slice. That is for problems with fewer CTAs than would fill the GPU. After Dao et
 * al. 2022 (online softmax). See README.md.
 *
 * Parameters: DIM (head dims up to it, zero-padded), Q_TILE, KV_TILE (keys a group takes in a step), STAGES; optional
 * BF16=1, WARP_ROWS, KV_GROUPS, MIN_CTAS (CTAs of a SM that registers must leave room for), MAX_REGS (registers of a
 * thread at most, in place of MIN_CTAS), PACKED=1 (for packed batches alone, which take registers), TERMS (FWD_TERM_*
 * of fwd_args.h: the features beyond scale, mask and window; a line with any serves packed batches, too), SLICES (of
 * the output's columns: a CTA computes one, and the scores each time), PAGED=1 (for paged and e4m3 caches alone, packed
 * queries and others; the kernel takes fwd_paging besides).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES BF16=0 WARP_ROWS=16 KV_GROUPS=1 MIN_CTAS=1 MAX_REGS= PACKED=0 TERMS=0 SLICES=1
 * PAGED=0 */
#include "cuda/device/attention/parameters.h"

#include "fwd_args.h"

#ifndef WARP_ROWS
#define WARP_ROWS 16
#endif
#ifndef SLICES
#define SLICES 1
#endif
#ifndef KV_GROUPS
#define KV_GROUPS 1
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 1
#endif
#if !TERMS && !PAGED && !defined PACKED
#define PACKED 0
#endif
#ifdef MAX_REGS
#define BOUNDS __maxnreg__(MAX_REGS)
#else
#define BOUNDS __launch_bounds__(THREADS, MIN_CTAS)
#endif

enum {
#ifdef PACKED
    SERVES_PACKED = PACKED,
    SERVES_OTHERS = !PACKED,
#else
    SERVES_PACKED = 1,
    SERVES_OTHERS = 1,
#endif
    ELEM_BYTES = 2,
    ROW_WARPS = Q_TILE / WARP_ROWS, /* warps of a group */
    GROUP_THREADS = 32 * ROW_WARPS,
    THREADS = GROUP_THREADS * KV_GROUPS,
    STEP_KEYS = KV_TILE * KV_GROUPS,    /* keys that the CTA takes in a step */
    M_TILES = WARP_ROWS / 16,           /* 16-row tiles of a warp */
    OUT_DIM = DIM / SLICES,             /* columns of the output that a CTA computes */
    DIM_TILES = OUT_DIM / 8,            /* 8-column accumulators of an output row */
    SLICE_TILES = DIM_TILES / KV_GROUPS /* of them, those that one group finishes */
};

typedef struct kv_stage {
    unsigned char k[KV_TILE * DIM * ELEM_BYTES], v[KV_TILE * OUT_DIM * ELEM_BYTES];
} kv_stage;

/* What a group leaves for the others, in units of 16 bytes, every warp access contiguous over its lanes: for the next
 * group, the one after it, ... the accumulators of the slice that it finishes; and {reference, reference, sum, sum} of
 * the rows. A lane's counterparts in the other groups hold the same rows and columns, so nothing changes places. */
typedef struct partial_result {
    float slices[KV_GROUPS > 1 ? KV_GROUPS - 1 : 1][ROW_WARPS][M_TILES * SLICE_TILES][32][4];
    float rows[ROW_WARPS][M_TILES][32][4];
} partial_result;

typedef union group_memory {
    kv_stage ring[STAGES];
#if KV_GROUPS > 1
    partial_result partial; /* in the end */
#endif
} group_memory;

typedef struct shared_memory {
    unsigned char q[Q_TILE * DIM * ELEM_BYTES];
    group_memory groups[KV_GROUPS];
} shared_memory;

#ifdef __CUDACC__

#define TRACE_WARPS ROW_WARPS
#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/isa/copy.cuh"
#include "cuda/device/isa/element.cuh"
#include "cuda/device/isa/trace_points.cuh"
#include "cuda/device/isa/mma.cuh"

enum {
    ELEMENT = BF16 ? ACR_BF16 : ACR_F16,
    KV_TYPE = ELEMENT, /* or e4m3, as fwd_paging says */
    OPERANDS = BF16 ? MMA_BF16 : MMA_F16,
    ROW_CHUNKS = DIM * ELEM_BYTES / CHUNK_BYTES,
    K_STEPS = DIM / 16,       /* of a score product */
    KEY_TILES = KV_TILE / 8,  /* 8-key accumulators of a score row */
    KEY_STEPS = KV_TILE / 16, /* of an output product */
    CHAINS = 1,               /* sums that a score is made of */
    Q_IN_REGISTERS = DIM * M_TILES <= 128,
    STEPS_UNROLLED = Q_IN_REGISTERS ? K_STEPS : 4 /* register arrays need all; 4 are one period of the swizzle */
};

static_assert(DIM % 32 == 0 && DIM <= 256 * SLICES, "DIM: a multiple of 32 up to 256 for each of SLICES");
static_assert(SLICES == 1 || (KV_GROUPS == 1 && DIM % (64 * SLICES) == 0),
              "SLICES: of 64 columns or a multiple, without KV_GROUPS");
#define V_ROW_CHUNKS (OUT_DIM * ELEM_BYTES / CHUNK_BYTES)
static_assert(WARP_ROWS == 16 || WARP_ROWS == 32, "WARP_ROWS: one or two tiles of the product's 16 rows");
static_assert(Q_TILE % WARP_ROWS == 0 && KV_TILE % 16 == 0,
              "Q_TILE: whole warps; KV_TILE: whole steps of the output product");
static_assert(STAGES >= 2, "STAGES: one tile is computed on while the next is on its way");
static_assert(!PAGED || (SLICES == 1 && KV_GROUPS == 1), "PAGED: without SLICES and KV_GROUPS");
static_assert(SLICE_TILES % 2 == 0, "KV_GROUPS: a slice is stored in pairs of 8 columns");
static_assert(KV_GROUPS == 1 || sizeof(partial_result) <= STAGES * sizeof(kv_stage),
              "a group's partial output fits into its ring");

#include "cuda/device/attention/epilogue.cuh"
#if PAGED
#include "cuda/device/attention/paged_ring.cuh"
#else
#include "cuda/device/attention/key_ring.cuh"
#endif
#include "cuda/device/attention/paging_argument.cuh"
#include "cuda/device/attention/tile_scheduler.cuh"
#include "cuda/device/attention/warp_tile_16.cuh"

DEV void group_barrier(int group)
{
    if (KV_GROUPS == 1)
        __syncthreads();
    else
        named_sync(group + 1, GROUP_THREADS); /* barrier 0 is __syncthreads's */
}

/* ---- Merging the groups' partial results: an accumulator's four values are a float4 ---- */

#if KV_GROUPS > 1

DEV void publish(partial_result &to, const output_tile &o, const softmax_state &state, const lane_place &l)
{
    const int warp = l.row / WARP_ROWS;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        *(float4 *)to.rows[warp][m][l.lane] =
            make_float4(state.reference[m][0], state.reference[m][1], state.sum[m][0], state.sum[m][1]);
#pragma unroll
        for (int ahead = 1; ahead < KV_GROUPS; ahead++)
#pragma unroll
            for (int i = 0; i < SLICE_TILES; i++) {
                const float *c = &o[m][4 * (ahead * SLICE_TILES + i)];
                *(float4 *)to.slices[ahead - 1][warp][m * SLICE_TILES + i][l.lane] =
                    make_float4(c[0], c[1], c[2], c[3]);
            }
    }
}

/* The group `behind` places before this one, in a circle. */
DEV int group_behind(int group, int behind)
{
    return group >= behind ? group - behind : group - behind + KV_GROUPS;
}

/* Makes state and the first slice of o those of all keys. */
DEV void merge(output_tile &o, softmax_state &state, const shared_memory &smem, const lane_place &l, float scale_log2)
{
    const int warp = l.row / WARP_ROWS;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float reference[KV_GROUPS][2], sum[KV_GROUPS][2],
            weight[KV_GROUPS][2]; /* [0]: this group's, [i]: of the group i behind */
#pragma unroll
        for (int g = 0; g < KV_GROUPS; g++) {
            const float4 s = *(const float4 *)smem.groups[group_behind(l.group, g)].partial.rows[warp][m][l.lane];
            reference[g][0] = s.x, reference[g][1] = s.y, sum[g][0] = s.z, sum[g][1] = s.w;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = reference[0][h], total = 0.0f;
#pragma unroll
            for (int g = 1; g < KV_GROUPS; g++)
                largest = fmaxf(largest, reference[g][h]);
#pragma unroll
            for (int g = 0; g < KV_GROUPS; g++) {
                weight[g][h] = exp2_fast((reference[g][h] - finite_max(largest)) * scale_log2);
                total += weight[g][h] * sum[g][h];
            }
            state.reference[m][h] = largest;
            state.sum[m][h] = total;
        }
#pragma unroll
        for (int i = 0; i < SLICE_TILES; i++) {
            float *c = &o[m][4 * i];
            c[0] *= weight[0][0], c[1] *= weight[0][0], c[2] *= weight[0][1], c[3] *= weight[0][1];
#pragma unroll
            for (int g = 1; g < KV_GROUPS; g++) {
                const partial_result &from = smem.groups[group_behind(l.group, g)].partial;
                const float4 other = *(const float4 *)from.slices[g - 1][warp][m * SLICE_TILES + i][l.lane];
                c[0] += weight[g][0] * other.x, c[1] += weight[g][0] * other.y;
                c[2] += weight[g][1] * other.z, c[3] += weight[g][1] * other.w;
            }
        }
    }
}

#endif

/* ---- Storing ---- */

/* The columns of the output that a group stores, or a CTA computes: a problem of which they are the whole. */
DEV fwd_args slice_of(const fwd_args &a, int number)
{
    fwd_args slice = a;
    const int first = 8 * SLICE_TILES * number;
    slice.o = (char *)a.o + first * ELEM_BYTES;
    slice.v = (const char *)a.v + first * ELEM_BYTES;
    slice.v_dim = min(8 * SLICE_TILES, a.v_dim - first);
    return slice;
}

/* What a row of the output is multiplied by. */
DEV float output_factor(const fwd_args &a, int head, float reference, float sum)
{
    return PAGED ? row_factor(a, head, reference, sum) * a.out_scale : row_factor(a, head, reference, sum);
}

/* Divides a slice by the sums and stores it, and with the first the log-sum-exps. */
DEV void store_rows(const fwd_args &a PAGING_PARAMETER, const work_tile &t, const visible_entry &entry,
                    const lane_place &l, int number, const output_tile &o, const softmax_state &state)
{
    const fwd_args slice = KV_GROUPS * SLICES > 1 ? slice_of(a, number) : a;
    int finite = true;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int m = i / 2, h = i % 2, row = t.q_first + l.row + l.lane / 4 + 8 * i;
        const row_store to = {(char *)slice.o + output_index(a, t.rows, t.batch, t.head, row) * ELEM_BYTES,
                              row < t.rows.q_len, slice.v_dim,
                              output_factor(a, t.head, state.reference[m][h], state.sum[m][h])};
        finite &= store_row<BF16>(to, *(const float(*)[SLICE_TILES * 4]) o[m], h, l.lane);
        if (a.lse != nullptr && number == 0 && l.lane % 4 == 0 && to.exists)
            find_lse(a, t.rows, t.batch, t.head)[row] = row_lse(a, t.head, state.reference[m][h], state.sum[m][h]);
    }
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int m = i / 2, h = i % 2, row = t.q_first + l.row + l.lane / 4 + 8 * i;
        const stored_row stored = {t.batch,
                                   t.head,
                                   row,
                                   t.rows.q_begin,
                                   t.rows.kv_begin,
                                   score_scale_log2(a),
                                   offset_of(state.reference[m][h], score_scale_log2(a)),
                                   output_factor(a, t.head, state.reference[m][h], state.sum[m][h])};
#if PAGED
        const key_pages pages = pages_of_entry(a, paging, t.batch);
        if (paging.kv_type == ACR_E4M3)
            fix_paged_nan<ELEMENT, ACR_E4M3>(slice, pages, entry, stored, state.sum[m][h], finite, l.lane);
        else
            fix_paged_nan<ELEMENT>(slice, pages, entry, stored, state.sum[m][h], finite, l.lane);
#else
        fix_hidden_nan<ELEMENT>(slice, entry, stored, state.sum[m][h], finite, l.lane);
#endif
    }
}

/* ---- The kernel ---- */

#if PAGED
extern "C" __global__ void BOUNDS KERNEL_NAME(const __grid_constant__ fwd_args given,
                                              const __grid_constant__ fwd_paging paging)
{
    fwd_args a = given;
#else
extern "C" __global__ void BOUNDS KERNEL_NAME(const __grid_constant__ fwd_args a)
{
#endif
    extern __shared__ __align__(128) unsigned char memory[];
    shared_memory &smem = *(shared_memory *)memory;
    wait_for_previous_kernel();
    ACR_TRACE_POINT(0, "start");

    const int thread = threadIdx.x % GROUP_THREADS, group = KV_GROUPS == 1 ? 0 : threadIdx.x / GROUP_THREADS;
    const lane_place l = {(int)threadIdx.x % 32, group, thread, thread / 32 * WARP_ROWS};
    work_tile t = tile_of_cta(a, blockIdx);
    const int slice = SLICES == 1 ? 0 : t.batch % SLICES; /* slices of a tile are neighbours: the grid has each batch
                                                             entry SLICES times */
    if (SLICES > 1) {
        t.batch /= SLICES;
        set_entry_number(t, t.batch);
        if (slice * OUT_DIM >= a.v_dim && slice != 0)
            return;
    }
#if PAGED
    t.rows = find_cached_sequence(a, t.batch);
#else
    t.rows = find_sequence(a, t.batch);
#endif
    if (SERVES_PACKED && t.q_first >= t.rows.q_len) /* a sequence shorter than the longest */
        return;
#if PAGED
    const head_scales scales = find_scales(a, t.batch, divide_small(t.head, a.group));
    a.scale = scales.scale, a.scale_log2 = scales.scale_log2, a.out_scale = scales.out;
#endif
    const visible_entry entry = entry_of(a, t.rows);
    const visible_keys visible = find_visible_keys(a, entry, t.batch, t.q_first, Q_TILE);
    const int first_key = visible.first / KV_TILE * KV_TILE + group * KV_TILE;
    const uint32_t q_smem = smem_address(smem.q);
    key_ring ring = make_ring(SLICES > 1 ? slice_of(a, slice) : a PAGING_ARGUMENT, t, first_key, visible.end,
                              smem_address(&smem.groups[group].ring), thread);

    /* Groups of copies: {Q, K 0}, {V 0}, {K 1}, {V 1}, ... */
    load_tile<Q_TILE, ROW_CHUNKS, THREADS>(q_smem, query_matrix(a, t), t.q_first, t.rows.q_len, threadIdx.x);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++)
        load_next(ring, stage);
    softmax_state state;
    output_tile o;
    clear(o, state);
    COPIES_WAIT(2 * STAGES - 3); /* Q and K 0 */
#if PAGED
    widen_tile(ring, stage_address(ring, 0));
#endif
    __syncthreads();
    ACR_TRACE_POINT(0, "Q and first K landed");
    query_operands q_operands;
    load_query_operands(q_operands, q_smem, l);

    bool exists[M_TILES][2]; /* rows behind the last are zeros */
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        exists[i / 2][i % 2] = true;
    int stage = 0;
    for (int key = first_key; key < visible.end; key += STEP_KEYS) {
        const bool first_step = key == first_key;
        if (!first_step) { /* this step's copies have landed for all, and all have left the stage before */
            COPIES_WAIT(2 * (STAGES - 2));
#if PAGED
            widen_tile(ring, stage_address(ring, stage));
            widen_tile(ring, stage_address(ring, stage) + offsetof(kv_stage, v));
#endif
            group_barrier(group);
        }
        load_next(ring, stage == 0 ? STAGES - 1 : stage - 1);
        ACR_TRACE_POINT((key - first_key) / STEP_KEYS, "tile landed, next loads issued");

        const uint32_t k_smem = stage_address(ring, stage), v_smem = k_smem + offsetof(kv_stage, v);
        const bool masked = key < visible.full_first || key + KV_TILE > visible.full_end;
        score_tile s;
        multiply_scores(s, q_operands, q_smem, k_smem, l);
        ACR_TRACE_POINT((key - first_key) / STEP_KEYS, "scores ready");
        finish_warp_scores(s, a, entry, t.batch, t.head, t.q_first + l.row, l.lane, key, masked);
        probability_tile probabilities;
        update_softmax(probabilities, state, o, s, exists, score_scale_log2(a));
        ACR_TRACE_POINT((key - first_key) / STEP_KEYS, "exponentials done");
        if (first_step) { /* V 0 */
            COPIES_WAIT(2 * (STAGES - 1));
#if PAGED
            widen_tile(ring, v_smem);
#endif
            group_barrier(group);
        }
        multiply_values(o, probabilities, v_smem, group * SLICE_TILES, l.lane);
        ACR_TRACE_POINT((key - first_key) / STEP_KEYS, "output product done");
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    /* Not before: the next kernel's CTAs would crowd onto SMs that have room early, and leave others idle. */
    allow_next_kernel();
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        state.sum[i / 2][i % 2] = quad_sum(state.sum[i / 2][i % 2]);
#if KV_GROUPS > 1
    group_barrier(group); /* the group's last reads of its ring are done */
    publish(smem.groups[group].partial, o, state, l);
    __syncthreads();
    merge(o, state, smem, l, score_scale_log2(a));
#endif
    ACR_TRACE_POINT(0, "sums and groups merged");
    store_rows(a PAGING_ARGUMENT, t, entry, l, SLICES > 1 ? slice : group, o, state);
    ACR_TRACE_POINT(0, "stored");
    ACR_TRACE_END(a);
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {.work = ACR__WORK_TILES,
                                   .q_tile = Q_TILE,
                                   .threads = THREADS,
                                   .smem_bytes = sizeof(shared_memory),
                                   .packed_only = !SERVES_OTHERS,
                                   .caches_only = PAGED};

#include "cuda/model/tile_kernel.h"

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    if (SLICES > 1 && problem->batch > UINT16_MAX / SLICES)
        return "batch exceeds 65535 / SLICES, which the grid has room for";
    if (PAGED && (problem->flags & (ACR_PACKED | ACR_PAGED)) == ACR_PACKED)
        return "packed: keys of another type than q's (kv_dtype) only in pages (ACR_PAGED)";
    return tile_why_not(problem, device);
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    tile_shape(problem, device, launch);
    launch->grid[2] *= SLICES;
}

/* CTAs that fit on an SM beside each other. */
static int32_t ctas_per_sm(const acr__device *device)
{
#ifdef MAX_REGS
    const int32_t regs_per_thread = MAX_REGS;
#else
    const int32_t wide = DIM >= 128 || WARP_ROWS == 32;
    const int32_t regs_per_thread = wide ? 248 : DIM == 96 ? 200 : 160; /* roughly; ptxas -v tells */
#endif
    return tile_ctas_per_sm(device, regs_per_thread);
}

/* Fitted to runs on an H200 (README.md); other GPUs by the ratio of their tensor rates. */
static double cost(const acr_problem *problem, const acr__device *device)
{
    const double wide_rows = WARP_ROWS == 32, query_reread = DIM * WARP_ROWS > 128 * 16, crowded = THREADS > 128;
    const double row_cycles = 1000.0 * (DIM / 64.0) * (KV_TILE / 64.0) * (1.0 + 0.7 * wide_rows);
    const acr__fwd_rates rates = {
        .kv_tile = STEP_KEYS,
        .mma_flop_per_cycle = 1200.0 * acr__mma_share(device) * (1.0 + 0.1 * wide_rows) * (1.0 - 0.14 * query_reread) /
                              (1.0 + 0.05 * (KV_GROUPS - 1)) / (0.5 + 0.5 * SLICES),
        .exp_per_cycle = 16.0,
        .step_cycles = (400.0 + row_cycles) * (1.0 + 0.25 * crowded) * (1.0 + 0.2 * query_reread),
        .cta_cycles = 5000.0 + 1000.0 * (KV_GROUPS > 1),
        .ctas_per_sm = ctas_per_sm(device),
    };
    return tile_terms_cost(problem, TERMS) * tile_seconds(problem, device, rates);
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("fwd_mma", 80, 999),
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .traits = SERVES_PACKED ? ACR__TRAIT_PACKED : 0,
    .terms = TERMS,
    .pages = PAGED,
    .kv_types = PAGED ? 1u << ACR_E4M3 : 0,
    .why_not = why_not,
    .cost = cost,
    .shape = shape,
};

#endif
