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
 * thread at most, in place of MIN_CTAS), PACKED=1 (for packed batches alone, which take registers).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES BF16=0 WARP_ROWS=16 KV_GROUPS=1 MIN_CTAS=1 MAX_REGS= PACKED=0 */
#include "fwd_args.h"

#ifndef BF16
#define BF16 0
#endif
#ifndef WARP_ROWS
#define WARP_ROWS 16
#endif
#ifndef KV_GROUPS
#define KV_GROUPS 1
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 1
#endif
#ifndef PACKED
#define PACKED 0
#endif
#ifdef MAX_REGS
#define BOUNDS __maxnreg__(MAX_REGS)
#else
#define BOUNDS __launch_bounds__(THREADS, MIN_CTAS)
#endif

enum {
    ELEM_BYTES = 2,
    ROW_WARPS = Q_TILE / WARP_ROWS, /* warps of a group */
    GROUP_THREADS = 32 * ROW_WARPS,
    THREADS = GROUP_THREADS * KV_GROUPS,
    Q_BYTES = Q_TILE * DIM * ELEM_BYTES,
    TILE_BYTES = KV_TILE * DIM * ELEM_BYTES, /* of K, or of V */
    STAGE_BYTES = 2 * TILE_BYTES,
    GROUP_BYTES = STAGES * STAGE_BYTES,
    STEP_KEYS = KV_TILE * KV_GROUPS, /* keys that the CTA takes in a step */
    SMEM_BYTES = Q_BYTES + KV_GROUPS * GROUP_BYTES
};

#ifdef __CUDACC__

#define MARK_WARPS ROW_WARPS
#include "cuda/device/isa/copy.cuh"
#include "cuda/device/isa/marks.cuh"
#include "cuda/device/isa/mma.cuh"

enum {
    OPERANDS = BF16 ? MMA_BF16 : MMA_F16,
    ROW_CHUNKS = DIM * ELEM_BYTES / CHUNK_BYTES,
    M_TILES = WARP_ROWS / 16,            /* 16-row tiles of a warp */
    K_STEPS = DIM / 16,                  /* of a score product */
    KEY_TILES = KV_TILE / 8,             /* 8-key accumulators of a score row */
    KEY_STEPS = KV_TILE / 16,            /* of an output product */
    DIM_TILES = DIM / 8,                 /* 8-column accumulators of an output row */
    SLICE_TILES = DIM_TILES / KV_GROUPS, /* of them, those that one group finishes */
    Q_IN_REGISTERS = DIM * M_TILES <= 128,
    STEPS_UNROLLED = Q_IN_REGISTERS ? K_STEPS : 4 /* register arrays need all; 4 are one period of the swizzle */
};

static_assert(DIM % 32 == 0 && DIM <= 256, "DIM: a multiple of 32 up to 256");
static_assert(WARP_ROWS == 16 || WARP_ROWS == 32, "WARP_ROWS: one or two tiles of the product's 16 rows");
static_assert(Q_TILE % WARP_ROWS == 0 && KV_TILE % 16 == 0,
              "Q_TILE: whole warps; KV_TILE: whole steps of the output product");
static_assert(STAGES >= 2, "STAGES: one tile is computed on while the next is on its way");
static_assert(SLICE_TILES % 2 == 0, "KV_GROUPS: a slice is stored in pairs of 8 columns");
static_assert(KV_GROUPS == 1 || (KV_GROUPS - 1) * Q_TILE * (DIM / KV_GROUPS) * 4 + Q_TILE * 32 <= GROUP_BYTES,
              "a group's partial output fits into its ring");

#include "cuda/device/attention/query_tile.cuh"

DEV void group_barrier(int group)
{
    if (KV_GROUPS == 1)
        __syncthreads();
    else /* barrier 0 is __syncthreads's */
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"((int)GROUP_THREADS) : "memory");
}

/* ---- Computing: one warp, WARP_ROWS rows. Arrays are in registers, laid out as device/isa/mma.cuh says. ---- */

typedef float output_tile[M_TILES][DIM_TILES][4];
typedef uint32_t probability_tile[M_TILES][KEY_STEPS][4];

/* Per row that a lane holds: [0] row lane/4, [1] row lane/4 + 8 of each 16-row tile. */
typedef struct softmax_state {
    float reference[M_TILES][2]; /* what exponentials are relative to: a score that was the row's maximum and is
                                    exceeded only by little */
    float sum[M_TILES][2];       /* of this lane's exponentials; lanes of a quad are added at the end */
} softmax_state;

/* By how many powers of two an exponential may exceed that of its row's reference: sums and products of such stay far
 * from the end of fp16's and float's range. */
#define REFERENCE_SLACK 8.0f

/* Makes its maximum the reference of each row that exceeded it by more than the slack, and scales sum and output
 * accordingly. The other rows of the warp keep theirs: what a row gives depends on no other. */
DEV void move_references(softmax_state &state, output_tile &o, const float (&max)[M_TILES][2], float scale_log2)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float old = state.reference[m][h], row_max = quad_max(max[m][h]);
            const float reference = (row_max - old) * scale_log2 > REFERENCE_SLACK ? row_max : old;
            const float correction = exp2_fast((state.reference[m][h] - finite_max(reference)) * scale_log2);
            state.reference[m][h] = reference;
            state.sum[m][h] *= correction;
#pragma unroll
            for (int n = 0; n < DIM_TILES; n++) {
                o[m][n][2 * h] *= correction;
                o[m][n][2 * h + 1] *= correction;
            }
        }
}

/* Turns scores into probabilities relative to the references, which move only when a score exceeds one by more than the
 * slack: then no lane needs another's maximum, and the output no scaling, in most steps. */
DEV void update_softmax(probability_tile &p, softmax_state &state, output_tile &o, const score_tile &s,
                        float scale_log2)
{
    float max[M_TILES][2];
    find_maxima(max, s);
    bool exceeded = false;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        exceeded |= (max[i / 2][i % 2] - state.reference[i / 2][i % 2]) * scale_log2 >
                    REFERENCE_SLACK; /* (-inf) - (-inf) does not */
    if (__any_sync(~0u, exceeded))
        move_references(state, o, max, scale_log2);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float subtrahend = finite_max(state.reference[m][h]) * scale_log2;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                const float even = exp2_fast(s[m][n][2 * h] * scale_log2 - subtrahend);
                const float odd = exp2_fast(s[m][n][2 * h + 1] * scale_log2 - subtrahend);
                state.sum[m][h] += even + odd;
                p[m][n / 2][h + 2 * (n % 2)] = pack<BF16>(even, odd);
            }
        }
}

/* The 8-column tile of V and O that accumulator n belongs to. A group's accumulators begin with the slice that it
 * finishes itself, so that which registers it keeps and which it gives away does not depend on the group. */
DEV int tile_column(int n, int group)
{
    const int tile = n + group * SLICE_TILES;
    return tile < DIM_TILES ? tile : tile - DIM_TILES;
}

/* Operand B of 16 keys x 16 columns of V: {v[0], v[1]} for accumulator n, {v[2], v[3]} for n + 1. */
DEV void load_values(uint32_t (&v)[4], uint32_t v_smem, int key_step, int n, const lane_place &l)
{
    load_matrices_transposed(
        v, v_smem + chunk_offset(16 * key_step + l.lane % 16, tile_column(n, l.group) + l.lane / 16, ROW_CHUNKS));
}

/* o += P * V */
DEV void accumulate(output_tile &o, const probability_tile &p, uint32_t v_smem, const lane_place &l)
{
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++)
#pragma unroll
        for (int n = 0; n < DIM_TILES; n += 2) {
            uint32_t v[4];
            load_values(v, v_smem, step, n, l);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                multiply_add<OPERANDS>(o[m][n], p[m][step], v[0], v[1]);
                multiply_add<OPERANDS>(o[m][n + 1], p[m][step], v[2], v[3]);
            }
        }
}

/* The words of a B operand that belong to one of its 16 keys; zero elsewhere. */
DEV uint32_t only_key(uint32_t word, int key, int half, int lane)
{
    const uint32_t mine = key / 8 == half && key % 8 / 2 == lane % 4 ? (key % 2 ? 0xffff0000u : 0x0000ffffu) : 0;
    return word & mine;
}

/* o += P * V key by key, each row only with keys that it sees: the slow way, for tiles with non-finite values. */
DEV void accumulate_seen(output_tile &o, const probability_tile &p, uint32_t v_smem, const int (&seen)[M_TILES][2],
                         const lane_place &l)
{
#pragma unroll
    for (int n = 0; n < DIM_TILES; n += 2)
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            uint32_t v[4];
            load_values(v, v_smem, step, n, l);
#pragma unroll 1
            for (int key = 0; key < 16; key++)
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float sum[4] = {o[m][n + i][0], o[m][n + i][1], o[m][n + i][2], o[m][n + i][3]};
                        multiply_add<OPERANDS>(sum, p[m][step], only_key(v[2 * i], key, 0, l.lane),
                                               only_key(v[2 * i + 1], key, 1, l.lane));
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            o[m][n + i][e] = 16 * step + key < seen[m][e / 2] ? sum[e] : o[m][n + i][e];
                    }
        }
}

/* Whether a tile of V is free of NaN and infinities; the same answer in the whole warp. */
DEV bool is_finite(const unsigned char *v_tile, int lane)
{
    const uint32_t magnitude = 0x7fff7fffu,
                   to_sign = BF16 ? 0x00800080u : 0x04000400u; /* carries the largest exponent into the sign bit */
    const uint4 *chunks = (const uint4 *)v_tile;
    uint32_t found = 0;
#pragma unroll 4
    for (int i = lane; i < TILE_BYTES / CHUNK_BYTES; i += WARP_THREADS) {
        const uint4 c = chunks[i];
        found |= ((c.x & magnitude) + to_sign) | ((c.y & magnitude) + to_sign) | ((c.z & magnitude) + to_sign) |
                 ((c.w & magnitude) + to_sign);
    }
    return !__any_sync(~0u, found & 0x80008000u);
}

/* ---- Merging the groups' partial results ---- */

/* What a group leaves in its ring for the others, in units of 16 bytes, every warp access contiguous over its lanes:
 * for the next group, the one after it, ... the accumulators of the slice that it finishes, then {reference, reference,
 * sum, sum} of the rows. A lane's counterparts in the other groups hold the same rows and columns, so nothing changes
 * places. */
enum {
    SLICE_UNITS = M_TILES * SLICE_TILES * WARP_THREADS
};

/* Of the slice for the group `ahead` places further on, of this lane's warp. */
DEV float4 *slice_place(unsigned char *smem, int group, int ahead, const lane_place &l)
{
    return (float4 *)(smem + Q_BYTES + group * GROUP_BYTES) +
           ((ahead - 1) * ROW_WARPS + l.row / WARP_ROWS) * SLICE_UNITS + l.lane;
}

DEV float4 *state_place(unsigned char *smem, int group, int m, const lane_place &l)
{
    const int slices = (KV_GROUPS - 1) * ROW_WARPS * SLICE_UNITS;
    return (float4 *)(smem + Q_BYTES + group * GROUP_BYTES) + slices +
           (l.row / WARP_ROWS * M_TILES + m) * WARP_THREADS + l.lane;
}

DEV void publish(unsigned char *smem, const output_tile &o, const softmax_state &state, const lane_place &l)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        *state_place(smem, l.group, m, l) =
            make_float4(state.reference[m][0], state.reference[m][1], state.sum[m][0], state.sum[m][1]);
#pragma unroll
        for (int ahead = 1; ahead < KV_GROUPS; ahead++)
#pragma unroll
            for (int i = 0; i < SLICE_TILES; i++) {
                const float(&c)[4] = o[m][ahead * SLICE_TILES + i];
                slice_place(smem, l.group, ahead, l)[(m * SLICE_TILES + i) * WARP_THREADS] =
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
DEV void merge(output_tile &o, softmax_state &state, unsigned char *smem, const lane_place &l, float scale_log2)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float reference[KV_GROUPS][2], sum[KV_GROUPS][2],
            weight[KV_GROUPS][2]; /* [0]: this group's, [i]: of the group i behind */
#pragma unroll
        for (int g = 0; g < KV_GROUPS; g++) {
            const float4 s = *state_place(smem, group_behind(l.group, g), m, l);
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
            float(&c)[4] = o[m][i];
            c[0] *= weight[0][0], c[1] *= weight[0][0], c[2] *= weight[0][1], c[3] *= weight[0][1];
#pragma unroll
            for (int g = 1; g < KV_GROUPS; g++) {
                const float4 other =
                    slice_place(smem, group_behind(l.group, g), g, l)[(m * SLICE_TILES + i) * WARP_THREADS];
                c[0] += weight[g][0] * other.x, c[1] += weight[g][0] * other.y;
                c[2] += weight[g][1] * other.z, c[3] += weight[g][1] * other.w;
            }
        }
    }
}

/* ---- Storing ---- */

/* Divides the group's slice by the sums and stores it, 16 bytes a lane. */
DEV void store_output(const fwd_args &a, const place &p, const sequence &rows, const lane_place &l,
                      const output_tile &o, const softmax_state &state)
{
    char *base = (char *)a.o +
                 (p.batch * a.o_stride.batch + p.head * a.o_stride.head + rows.q_begin * a.o_stride.row) * ELEM_BYTES;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        const float inverse[2] = {inverse_sum(state.sum[m][0]), inverse_sum(state.sum[m][1])};
        const int row = p.q_first + l.row + 16 * m + l.lane / 4 +
                        l.lane % 4 / 2 * 8; /* after the transposition: two rows, two tiles a quad */
#pragma unroll
        for (int n = 0; n < SLICE_TILES; n += 2) {
            uint32_t w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) /* i: row half, tile */
                w[i] = pack<BF16>(o[m][n + i % 2][i / 2 * 2] * inverse[i / 2],
                                  o[m][n + i % 2][i / 2 * 2 + 1] * inverse[i / 2]);
            transpose_quad(w);
            const int column = 8 * (tile_column(n, l.group) + l.lane % 2);
            if (row < rows.q_len && column < a.v_dim)
                *(uint4 *)(base + (row * a.o_stride.row + column) * ELEM_BYTES) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

DEV void store_lse(const fwd_args &a, const place &p, const sequence &rows, const lane_place &l,
                   const softmax_state &state)
{
    if (a.lse == nullptr || l.lane % 4 != 0)
        return;
    float *base = find_lse(a, rows, p.batch, p.head);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = p.q_first + l.row + 16 * m + l.lane / 4 + 8 * h;
            if (row < rows.q_len)
                base[row] = log_sum_exp(state.reference[m][h], state.sum[m][h], a.scale);
        }
}

/* ---- The kernel ---- */

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
        for (int n = 0; n < DIM_TILES; n++)
            o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.0f;
    }
}

extern "C" __global__ void BOUNDS KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    extern __shared__ __align__(128) unsigned char smem[];
    wait_for_previous_kernel();
    ACR_MARK(0, "start");

    const int thread = threadIdx.x % GROUP_THREADS, group = KV_GROUPS == 1 ? 0 : threadIdx.x / GROUP_THREADS;
    const lane_place l = {(int)threadIdx.x % 32, group, thread / 32 * WARP_ROWS};
    const place p = find_place(a);
    const sequence rows = find_sequence(a, p.batch);
    if (PACKED && p.q_first >= rows.q_len) /* a sequence shorter than the longest */
        return;
    const int kv_head = divide_small(p.head, a.group);
    const keys visible = sequence_keys(a, rows, p.q_first, Q_TILE);
    const chunk_matrix q = find_matrix(a.q, a.q_stride, p.batch, p.head, rows.q_begin, a.qk_dim);
    const uint32_t q_smem = smem_address(smem);
    key_loader loader = {find_matrix(a.k, a.k_stride, p.batch, kv_head, rows.kv_begin, a.qk_dim),
                         find_matrix(a.v, a.v_stride, p.batch, kv_head, rows.kv_begin, a.v_dim),
                         q_smem + Q_BYTES + group * GROUP_BYTES,
                         thread,
                         group * KV_TILE,
                         visible.end};

    /* Groups of copies: {Q, K 0}, {V 0}, {K 1}, {V 1}, ... */
    load_tile<Q_TILE, ROW_CHUNKS, THREADS>(q_smem, q, p.q_first, rows.q_len, threadIdx.x);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++)
        load_next(loader, stage);
    softmax_state state;
    output_tile o;
    clear(o, state);
    COPIES_WAIT(2 * STAGES - 3); /* Q and K 0 */
    __syncthreads();
    ACR_MARK(0, "Q and first K landed");
    query_operands q_operands;
    load_query_operands(q_operands, q_smem, l);

    int stage = 0;
    for (int first = group * KV_TILE; first < visible.end; first += STEP_KEYS) {
        const bool first_step = first < STEP_KEYS;
        if (!first_step) { /* this step's copies have landed for all, and all have left the stage before */
            COPIES_WAIT(2 * (STAGES - 2));
            group_barrier(group);
        }
        load_next(loader, stage == 0 ? STAGES - 1 : stage - 1);
        ACR_MARK(first / STEP_KEYS, "tile landed, next loads issued");

        const uint32_t k_smem = loader.ring + stage * STAGE_BYTES, v_smem = k_smem + TILE_BYTES;
        const bool masked = first + KV_TILE > visible.full_end;
        int seen[M_TILES][2]; /* set where some keys are masked */
        score_tile s;
        multiply_scores(s, q_operands, q_smem, k_smem, l);
        ACR_MARK(first / STEP_KEYS, "scores ready");
        if (masked) {
            count_seen(seen, a, visible, p, l, first);
            mask_scores(s, seen, l.lane);
        }
        probability_tile probabilities;
        update_softmax(probabilities, state, o, s, a.scale_log2);
        ACR_MARK(first / STEP_KEYS, "exponentials done");
        if (first_step) { /* V 0 */
            COPIES_WAIT(2 * (STAGES - 1));
            group_barrier(group);
        }
        /* Keys that a row does not see have probability 0, but 0 * NaN is NaN: a value must not reach rows that do not
         * see it. */
        if (masked && a.mask != FWD_MASK_NONE && !is_finite(smem + (v_smem - q_smem), l.lane))
            accumulate_seen(o, probabilities, v_smem, seen, l);
        else
            accumulate(o, probabilities, v_smem, l);
        ACR_MARK(first / STEP_KEYS, "output product done");
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    /* Not before: the next kernel's CTAs would crowd onto SMs that have room early, and leave others idle. */
    allow_next_kernel();
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        state.sum[i / 2][i % 2] = quad_sum(state.sum[i / 2][i % 2]);
    if (KV_GROUPS > 1) {
        group_barrier(group); /* the group's last reads of its ring are done */
        publish(smem, o, state, l);
        __syncthreads();
        merge(o, state, smem, l, a.scale_log2);
    }
    ACR_MARK(0, "sums and groups merged");
    store_output(a, p, rows, l, o, state);
    if (group == 0)
        store_lse(a, p, rows, l, state);
    ACR_MARK(0, "stored");
    ACR_MARKS_END(a);
}

#else

#include "cuda/model/fwd_model.h"

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    const char *reason = acr__fwd_size_why_not(problem, DIM, DIM);
    if (reason == NULL && PACKED && !(problem->flags & ACR_PACKED))
        reason = "serves packed batches only (ACR_PACKED)";
    if (reason == NULL)
        reason = acr__grid_why_not(problem, Q_TILE);
    if (reason == NULL)
        reason = acr__vector_why_not(problem);
    return reason != NULL ? reason : acr__smem_why_not(SMEM_BYTES, device);
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    (void)device;
    *launch = acr__tile_launch(problem, Q_TILE, THREADS, SMEM_BYTES);
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
    return acr__ctas_per_sm(device, SMEM_BYTES, regs_per_thread, THREADS);
}

/* Fitted to runs on an H200 (README.md); other GPUs by the ratio of their tensor rates. */
static double cost(const acr_problem *problem, const acr__device *device)
{
    const acr_problem padded = acr__padded(problem, DIM, DIM);
    const double wide_rows = WARP_ROWS == 32, query_reread = DIM * WARP_ROWS > 128 * 16, crowded = THREADS > 128;
    const double row_cycles = 1000.0 * (DIM / 64.0) * (KV_TILE / 64.0) * (1.0 + 0.7 * wide_rows);
    const acr__fwd_rates rates = {
        .kernel = KERNEL_TEXT,
        .q_tile = Q_TILE,
        .kv_tile = STEP_KEYS,
        .mma_flop_per_cycle = 1200.0 * acr__mma_share(device) * (1.0 + 0.1 * wide_rows) * (1.0 - 0.14 * query_reread) /
                              (1.0 + 0.05 * (KV_GROUPS - 1)),
        .exp_per_cycle = 16.0,
        .step_cycles = (400.0 + row_cycles) * (1.0 + 0.25 * crowded) * (1.0 + 0.2 * query_reread),
        .cta_cycles = 5000.0 + 1000.0 * (KV_GROUPS > 1),
        .ctas_per_sm = ctas_per_sm(device),
    };
    return acr__fwd_seconds(&padded, device, &rates);
}

const acr__kernel KERNEL_DESCRIPTION = {
    .name = KERNEL_TEXT,
    .family = "fwd_mma",
    .backend = ACR__CUDA,
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .qk_dim_max = DIM,
    .v_dim_max = DIM,
    .q_tile = Q_TILE,
    .kv_tile = KV_TILE,
    .stages = STAGES,
    .traits = PACKED ? ACR__TRAIT_PACKED : 0,
    .why_not = why_not,
    .cost = cost,
    .symbol = KERNEL_TEXT,
    .image = KERNEL_IMAGE,
    .image_end = KERNEL_IMAGE_END,
    .arch_min = 80,
    .arch_max = 999, /* PTX for what comes */
    .shape = shape,
};

#endif
