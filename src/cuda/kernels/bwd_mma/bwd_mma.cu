/* Backward attention on mma.sync tensor cores, fp16 and bf16: gradients for every GPU from sm_80 on, and for what
 * bwd_wgmma does not serve.
 *
 * Three kernels, one after the other. NAME_prepare: D = rowsum(dO * O) and LSE in powers of two. NAME: a CTA owns
 * Q_TILE keys of a key head and visits the queries that see them, of all heads of the group: dK and dV. NAME_finish: a
 * CTA owns Q_TILE queries and visits the keys that they see: dQ; and the gradients of sinks. Both compute the scores
 * and their gradients, so nothing is summed between CTAs: every run gives the same bits, and no memory holds a part of
 * a sum.
 *
 * The two are one loop. A CTA owns `lines`, two matrices of them: K and V, or Q and dO. Partners come through a ring of
 * STAGES in shared memory, KV_TILE at a time: Q and dO, or K and V. Lines are the rows of every product: scores and dP
 * are lines by partners, whose packed accumulators are the A operands of dV = P^T * dO and of dK = dS^T * Q or dQ = dS
 * * K. After Dao et al. 2022 and Dao 2023. See README.md.
 *
 * Parameters: DIM (64 or 128; dims up to it, zero-padded), Q_TILE (lines that a CTA owns), KV_TILE (partners of a
 * step), STAGES; optional BF16=1, WARP_ROWS (lines of a warp), TERMS (FWD_TERM_* of fwd_args.h).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES BF16=0 WARP_ROWS=16 TERMS=0 */
#include "cuda/device/attention/parameters.h"

#ifndef WARP_ROWS
#define WARP_ROWS 16
#endif
#include "cuda/device/attention/gradients.h"

enum {
    ELEM_BYTES = 2,
    WARPS = Q_TILE / WARP_ROWS,
    THREADS = 32 * WARPS,
    M_TILES = WARP_ROWS / 16, /* 16-line tiles of a warp */
    TILE_BYTES = KV_TILE * DIM * ELEM_BYTES,
    LINE_BYTES = Q_TILE * DIM * ELEM_BYTES,
    HELPER_THREADS = 256 /* of the first kernel */
};

typedef struct partner_stage {
    unsigned char x[TILE_BYTES], y[TILE_BYTES]; /* Q and dO, or K and V */
    float lse[KV_TILE], d[KV_TILE];             /* of queries */
} partner_stage;

typedef struct shared_memory {
    unsigned char x[LINE_BYTES], y[LINE_BYTES]; /* K and V, or Q and dO */
    partner_stage ring[STAGES];
    int32_t seen[Q_TILE][2]; /* the partners of each line, [first, end) */
} shared_memory;

#ifdef __CUDACC__

#include "cuda/device/attention/gradient_lines.cuh"
#include "cuda/device/isa/mma.cuh"

enum {
    OPERANDS = BF16 ? MMA_BF16 : MMA_F16,
    ROW_CHUNKS = DIM * ELEM_BYTES / CHUNK_BYTES,
    K_STEPS = DIM / 16,       /* of a score product */
    KEY_TILES = KV_TILE / 8,  /* 8-partner accumulators of a score line */
    KEY_STEPS = KV_TILE / 16, /* of a gradient's product */
    DIM_TILES = DIM / 8,      /* 8-column accumulators of a gradient's line */
    CHAINS = 1,
    Q_IN_REGISTERS = 0,
    STEPS_UNROLLED = K_STEPS / 2 /* all: registers spill at d64 */
};

#include "cuda/device/attention/warp_tile_16.cuh"

static_assert(DIM == 64 || DIM == 128, "DIM: 64 or 128");
static_assert(WARP_ROWS == 16 || WARP_ROWS == 32, "WARP_ROWS: one or two tiles of the product's 16 rows");
static_assert(Q_TILE % WARP_ROWS == 0 && KV_TILE % 16 == 0 && Q_TILE % KV_TILE == 0,
              "a warp has whole lines, a step whole products, a tile of statistics whole steps");
static_assert(KV_TILE / 2 <= THREADS, "a thread copies 16 bytes of a step's statistics");
static_assert(STAGES >= 2, "STAGES: one tile is computed on while the next is on its way");
static_assert(HELPER_THREADS == STATS_THREADS, "the host launches as many");
static_assert((TERMS & (FWD_TERM_TREE | FWD_TERM_RANGES)) == 0, "TERMS: neither trees nor ranges");

#define NAME_WITH_(name, suffix) name##suffix
#define NAME_WITH(name, suffix) NAME_WITH_(name, suffix)

/* The statistics of an entry's rows of one head. */
DEV float *stats_of(const fwd_args &a, int entry, int head)
{
    return head_stats(a, (float *)a.workspace, entry, head);
}

extern "C" __global__ void __launch_bounds__(STATS_THREADS)
    NAME_WITH(KERNEL_NAME, _prepare)(const __grid_constant__ bwd_args args)
{
    const fwd_args &a = args.fwd;
    const int tile = blockIdx.x, head = blockIdx.y, entry = blockIdx.z;
    wait_for_previous_kernel();
    allow_next_kernel();
    const sequence rows = find_sequence(a, entry);
    if (tile * Q_TILE < rows.q_len)
        find_row_stats(args, rows, entry, head, tile, stats_of(a, entry, head) + tile * (2 * Q_TILE));
}

/* ---- What a CTA owns, and its partners ---- */

/* What holds for all threads lies in shared memory: registers are short. */
typedef struct owned {
    line_head of;
    int first, end;           /* lines: of the CTA, and one past the last that exists */
    int partners;             /* that exist */
    int first_head;           /* of the partners */
    int tile_first, tile_end; /* steps of a head */
    visible_rows seen;        /* which partners the CTA's lines see or are seen by */
} owned;

template <bool KEYS> DEV owned find_owned(const fwd_args &a, int tile, int head, int batch)
{
    owned own;
    own.of.rows = find_sequence(a, batch);
    own.of.entry = entry_of(a, own.of.rows);
    own.of.batch = batch;
    own.of.head = head;
    own.first_head = KEYS ? head * a.group : head / a.group;
    own.first = tile * Q_TILE;
    own.end = KEYS ? own.of.rows.kv_len : own.of.rows.q_len;
    own.partners = KEYS ? own.of.rows.q_len : own.of.rows.kv_len;
    if (own.first >= own.end)
        own.seen = {0, 0, 0, 0};
    else if (KEYS)
        own.seen = visible_to_keys(own.of.entry, own.first, Q_TILE);
    else {
        const visible_keys keys = visible_to_rows(own.of.entry, own.first, Q_TILE);
        own.seen = {keys.first, keys.full_first, keys.full_end, keys.end};
    }
    own.tile_first = own.seen.first / KV_TILE;
    own.tile_end = own.seen.first < own.seen.end ? (own.seen.end + KV_TILE - 1) / KV_TILE : own.tile_first;
    return own;
}

/* The same by thread 0, for all. */
template <bool KEYS> DEV void share_owned(owned &own, const fwd_args &a, int tile, int head, int batch)
{
    if (threadIdx.x == 0)
        own = find_owned<KEYS>(a, tile, head, batch);
    __syncthreads();
}

/* A step: a tile of partners of one head. Steps go through all tiles of the first head, then of the next. */
typedef struct step_place {
    int head, tile;
} step_place;

DEV void next_step(step_place &at, const owned &own)
{
    if (++at.tile == own.tile_end) {
        at.tile = own.tile_first;
        at.head++;
    }
}

template <bool KEYS> DEV void load_step(const bwd_args &args, const owned &own, const step_place &at, uint32_t stage)
{
    const int first = at.tile * KV_TILE, thread = read_thread();
    load_tile<KV_TILE, ROW_CHUNKS, THREADS>(stage + (uint32_t)offsetof(partner_stage, x),
                                            line_matrix<!KEYS>(args, own.of, at.head, false), first, own.partners,
                                            thread);
    load_tile<KV_TILE, ROW_CHUNKS, THREADS>(stage + (uint32_t)offsetof(partner_stage, y),
                                            line_matrix<!KEYS>(args, own.of, at.head, true), first, own.partners,
                                            thread);
    if (KEYS && thread < KV_TILE / 2) {
        const int which = thread / (KV_TILE / 4), chunk = thread % (KV_TILE / 4);
        copy_chunk_async(stage + (uint32_t)offsetof(partner_stage, lse) + thread * CHUNK_BYTES,
                         stats_of(args.fwd, own.of.batch, at.head) + stats_index(first) + which * Q_TILE + 4 * chunk,
                         1);
    }
}

/* ---- A tile of scores: lines by partners ---- */

template <int ELEMS> DEV void clear(float (&d)[M_TILES][ELEMS])
{
#pragma unroll
    for (int i = 0; i < M_TILES * ELEMS; i++)
        d[i / ELEMS][i % ELEMS] = 0.0f;
}

/* Of the lines that a lane holds, if they are queries. */
typedef struct line_state {
    float lse[M_TILES][2], d[M_TILES][2];   /* of queries */
    int first[M_TILES][2], end[M_TILES][2]; /* their partners */
} line_state;

DEV int line_at(const owned &own, const lane_place &l, int m, int h)
{
    return own.first + l.row + 16 * m + 8 * h + l.lane / 4;
}

template <bool KEYS> DEV void find_lines(line_state &s, const fwd_args &a, const owned &own, const lane_place &l)
{
    if (KEYS)
        return;
    const float *stats = stats_of(a, own.of.batch, own.of.head);
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) { /* a tile of statistics is whole, whatever rows exist */
        const int at = stats_index(line_at(own, l, i / 2, i % 2));
        s.lse[i / 2][i % 2] = stats[at];
        s.d[i / 2][i % 2] = stats[at + Q_TILE];
    }
}

/* Notes which partners the CTA's lines have. */
template <bool KEYS> DEV void note_partners(shared_memory &smem, const owned &own)
{
    for (int i = threadIdx.x; i < Q_TILE; i += THREADS) {
        const int line = own.first + i;
        const key_range seen = line < own.end ? partners_of<KEYS>(own.of.entry, line) : key_range{0, 0};
        smem.seen[i][0] = seen.first;
        smem.seen[i][1] = seen.end;
    }
}

/* Scores of pairs that are hidden become -inf. partner: the step's first. */
DEV void hide_partners(score_tile &s, const shared_memory &smem, const lane_place &l, int partner, bool masked)
{
    if (!masked)
        return;
    const int32_t(*const seen)[2] = smem.seen + l.row + l.lane / 4;
    const int column = partner + 2 * (l.lane % 4);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        const int first[2] = {seen[16 * m][0] - column, seen[16 * m + 8][0] - column},
                  end[2] = {seen[16 * m][1] - column, seen[16 * m + 8][1] - column};
#pragma unroll
        for (int i = 0; i < KEY_TILES * 4; i++) {
            const int at = 8 * (i / 4) + i % 2, h = i % 4 / 2;
            if (at < first[h] || at >= end[h])
                s[m][i] = -CUDART_INF_F;
        }
    }
}

/* By how many keys a row and a key of element i are apart. */
template <bool KEYS> DEV float distance_of(const owned &own, const lane_place &l, int m, int i, int partner)
{
    return fabsf((float)(position_of<KEYS>(own.of.entry, line_at(own, l, m, i % 4 / 2)) -
                         (partner + 2 * (l.lane % 4) + 8 * (i / 4) + i % 2)));
}

/* What element i's exponent is relative to. */
template <bool KEYS>
DEV float lse_of(const line_state &lines, const partner_stage &stage, const lane_place &l, int m, int i)
{
    return KEYS ? stage.lse[2 * (l.lane % 4) + 8 * (i / 4) + i % 2] : lines.lse[m][i % 4 / 2];
}

/* Turns scores into probabilities, rounded ones in p. With a softcap s becomes the probabilities times the slope of the
 * cap. */
template <bool KEYS>
DEV void find_probabilities(score_tile &s, probability_tile &p, const fwd_args &a, const owned &own,
                            const line_state &lines, const partner_stage &stage, const lane_place &l, int head,
                            int partner)
{
    const float slope = slope_of(a, KEYS ? head : own.of.head);
    if (has_term(FWD_TERM_CAP) && a.softcap > 0.0f) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int i = 0; i < KEY_TILES * 4; i += 2) {
                float x[2], flat[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float t = tanh_fast(s[m][i + j] * a.softcap_in),
                                offset = lse_of<KEYS>(lines, stage, l, m, i + j) +
                                         slope * distance_of<KEYS>(own, l, m, i + j, partner);
                    x[j] = s[m][i + j] == -CUDART_INF_F ? 0.0f : exp2_fast(fmaf(t, a.softcap_out, -offset));
                    flat[j] = fmaf(-t, t, 1.0f);
                    s[m][i + j] = x[j] * flat[j];
                }
                p[m][i / 8][i % 8 / 2] = pack<BF16>(x[0], x[1]);
            }
        return;
    }
    if (has_term(FWD_TERM_ALIBI) && slope != 0.0f) {
        const float raw_slope = slope / a.scale_log2;
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int i = 0; i < KEY_TILES * 4; i++)
                s[m][i] -= raw_slope * distance_of<KEYS>(own, l, m, i, partner);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int i = 0; i < KEY_TILES * 4; i += 2) {
            float *const x = &s[m][i];
            x[0] = exp2_fast(fmaf(x[0], a.scale_log2, -lse_of<KEYS>(lines, stage, l, m, i)));
            x[1] = exp2_fast(fmaf(x[1], a.scale_log2, -lse_of<KEYS>(lines, stage, l, m, i + 1)));
            p[m][i / 8][i % 8 / 2] = pack<BF16>(x[0], x[1]);
        }
}

/* ---- Biases ---- */

/* Elements of a bias for a tile, as what they add to exponents of 2; -inf hides a pair. Nothing is read of rows and
 * keys that do not exist, whose scores nobody wants. */
template <bool KEYS, int BYTES>
DEV void load_biases(score_tile &b, const fwd_args &a, const owned &own, const lane_place &l, int head, int partner)
{
    const char *const biases =
        (const char *)a.bias + (own.of.batch * a.bias_stride.batch + head * a.bias_stride.head) * BYTES;
    const int column = partner + 2 * (l.lane % 4);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int i = 0; i < KEY_TILES * 4; i++) {
            const int line = line_at(own, l, m, i % 4 / 2), other = column + 8 * (i / 4) + i % 2,
                      row = KEYS ? other : line, key = KEYS ? line : other;
            b[m][i] = 0.0f;
            if (line < own.end && other < own.partners)
                b[m][i] =
                    bias_of<BYTES>(load_bits<BYTES>(biases + (row * a.bias_stride.row + key) * BYTES), a.bias_type);
        }
}

/* What is added to the exponents of a tile, ALiBi's share included; -inf: the pair is hidden, by whatever rule. */
template <bool KEYS>
DEV void find_added(score_tile &b, const shared_memory &smem, const fwd_args &a, const owned &own, const lane_place &l,
                    int head, int partner, bool masked)
{
    if (a.bias == nullptr)
        clear(b);
    else if (a.bias_type == FWD_BIAS_F32)
        load_biases<KEYS, 4>(b, a, own, l, head, partner);
    else if (a.bias_type == FWD_BIAS_MASK)
        load_biases<KEYS, 1>(b, a, own, l, head, partner);
    else
        load_biases<KEYS, 2>(b, a, own, l, head, partner);
    const float slope = slope_of(a, head);
    if (slope != 0.0f) {
#pragma unroll
        for (int i = 0; i < M_TILES * KEY_TILES * 4; i++)
            b[i / (KEY_TILES * 4)][i % (KEY_TILES * 4)] -=
                slope * distance_of<KEYS>(own, l, i / (KEY_TILES * 4), i % (KEY_TILES * 4), partner);
    }
    hide_partners(b, smem, l, partner, masked);
}

/* find_probabilities where numbers are added: added, of find_added. */
template <bool KEYS>
DEV void find_probabilities(score_tile &s, probability_tile &p, const fwd_args &a, const score_tile &added,
                            const line_state &lines, const partner_stage &stage, const lane_place &l)
{
    const bool capped = is_capped(a);
    const float factor = capped ? a.softcap_out : a.scale_log2;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int i = 0; i < KEY_TILES * 4; i += 2) {
            float x[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float score = capped ? tanh_fast(s[m][i + j] * a.softcap_in) : s[m][i + j], b = added[m][i + j];
                const float exponent = added_exponent(score, factor, b, lse_of<KEYS>(lines, stage, l, m, i + j));
                x[j] = b == -CUDART_INF_F ? 0.0f : exp2_fast(exponent);
                s[m][i + j] = capped ? x[j] * fmaf(-score, score, 1.0f) : x[j];
            }
            p[m][i / 8][i % 8 / 2] = pack<BF16>(x[0], x[1]);
        }
}

/* ---- Gradients of scores ---- */

/* dS = P * (dP - D), rounded. */
template <bool KEYS>
DEV void find_score_gradients(probability_tile &ds, const score_tile &p, const score_tile &dp, const line_state &lines,
                              const partner_stage &stage, const lane_place &l)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            const float2 d = KEYS ? *(const float2 *)(stage.d + 8 * n + 2 * (l.lane % 4)) : float2{0.0f, 0.0f};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int at = 4 * n + 2 * h;
                const float even = KEYS ? d.x : lines.d[m][h], odd = KEYS ? d.y : lines.d[m][h];
                ds[m][n / 2][h + 2 * (n % 2)] =
                    pack<BF16>(p[m][at] * (dp[m][at] - even), p[m][at + 1] * (dp[m][at + 1] - odd));
            }
        }
}

/* ---- The loop ---- */

/* Where the thread is, found anew: addresses that follow from it are not kept over a step, for want of registers. */
DEV lane_place find_place(void)
{
    const int thread = read_thread();
    return {thread % 32, 0, thread, thread / 32 * WARP_ROWS};
}

/* The gradients of a CTA's lines. head: of the lines; stored: one past the last line that has a place in the gradients,
 * those that do not exist become 0. */
template <bool KEYS> DEV void find_gradients(const bwd_args &args, shared_memory &smem, const owned &own, int stored)
{
    const fwd_args &a = args.fwd;
    const lane_place l = find_place();
    const uint32_t x_smem = smem_address(smem.x), y_smem = smem_address(smem.y), ring = smem_address(smem.ring);
    const int steps = (own.tile_end - own.tile_first) * (KEYS ? a.group : 1);

    /* Groups of copies: {lines, step 0}, {step 1}, ... */
    load_tile<Q_TILE, ROW_CHUNKS, THREADS>(x_smem, line_matrix<KEYS>(args, own.of, own.of.head, false), own.first,
                                           own.end, l.thread);
    load_tile<Q_TILE, ROW_CHUNKS, THREADS>(y_smem, line_matrix<KEYS>(args, own.of, own.of.head, true), own.first,
                                           own.end, l.thread);
    step_place at = {own.first_head, own.tile_first}, ahead = at;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (stage < steps) {
            load_step<KEYS>(args, own, ahead, ring + stage * (uint32_t)sizeof(partner_stage));
            next_step(ahead, own);
        }
        copies_commit();
    }
    line_state lines;
    find_lines<KEYS>(lines, a, own, l);
    note_partners<KEYS>(smem, own);
    output_tile dx, dy; /* of dK and dV; dQ alone */
    clear(dx);
    clear(dy);
    int stage = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        COPIES_WAIT(STAGES - 2);
        __syncthreads(); /* the step has landed for all, and all have left the stage before */
        if (step + STAGES - 1 < steps) {
            ahead = at;
#pragma unroll
            for (int i = 0; i < STAGES - 1; i++)
                next_step(ahead, own);
            load_step<KEYS>(args, own, ahead,
                            ring + (stage == 0 ? STAGES - 1 : stage - 1) * (uint32_t)sizeof(partner_stage));
        }
        copies_commit();
        const uint32_t from_x = ring + stage * (uint32_t)sizeof(partner_stage), from_y = from_x + TILE_BYTES;
        const int partner = at.tile * KV_TILE;
        const bool masked = partner < own.seen.full_first || partner + KV_TILE > own.seen.full_end;
        const lane_place place = find_place();
        const query_operands unused = {};
        score_tile s, dp;
        probability_tile p, ds;
        if constexpr (has_term(FWD_TERM_BIAS)) {
            score_tile added;
            find_added<KEYS>(added, smem, a, own, place, KEYS ? at.head : own.of.head, partner, masked);
            multiply_scores(s, unused, x_smem, from_x, place);
            find_probabilities<KEYS>(s, p, a, added, lines, smem.ring[stage], place);
        } else {
            multiply_scores(s, unused, x_smem, from_x, place);
            hide_partners(s, smem, place, partner, masked);
            find_probabilities<KEYS>(s, p, a, own, lines, smem.ring[stage], place, at.head, partner);
        }
        if (KEYS)
            multiply_values(dy, p, from_y, 0, place.lane);
        multiply_scores(dp, unused, y_smem, from_y, place);
        find_score_gradients<KEYS>(ds, s, dp, lines, smem.ring[stage], place);
        multiply_values(dx, ds, from_x, 0, place.lane);
        next_step(at, own);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    COPIES_WAIT(0); /* of a CTA without a step, which has not come to a barrier either */
    __syncthreads();
    allow_next_kernel();

    unsigned spoilt = 0; /* of the warp's lines, a bit each */
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        const int m = i / 2, h = i % 2, line = line_at(own, l, m, h);
        const bool exists = line < stored, sees = smem.seen[line - own.first][0] < smem.seen[line - own.first][1];
        if (KEYS) {
            store_gradient_row(args, args.dk, gradient_index<KEYS>(own.of, args.dk_stride, line), exists, a.qk_dim,
                               sees ? a.scale : 0.0f, dx[m], h, l.lane);
            store_gradient_row(args, args.dv, gradient_index<KEYS>(own.of, args.dv_stride, line), exists, a.v_dim,
                               sees ? 1.0f : 0.0f, dy[m], h, l.lane);
        } else
            store_gradient_row(args, args.dq, gradient_index<KEYS>(own.of, args.dq_stride, line), exists, a.qk_dim,
                               sees ? a.scale : 0.0f, dx[m], h, l.lane);
        const float found = KEYS ? probe(dx[m], h) + probe(dy[m], h) : probe(dx[m], h);
        spoilt |= find_spoilt(sees && found != 0.0f) << 8 * i;
    }
    fix_lines<KEYS>(args, own.of, stored_stats{(float *)a.workspace}, spoilt, own.first + l.row, 0, DIM, l.lane);
}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL_NAME(const __grid_constant__ bwd_args args)
{
    extern __shared__ __align__(128) unsigned char memory[];
    const fwd_args &a = args.fwd;
    wait_for_previous_kernel();
    __shared__ owned own;
    share_owned<true>(own, a, blockIdx.x, blockIdx.y, blockIdx.z);
    const int stored = is_packed(a) ? own.end : a.kv_len; /* keys behind an entry's length get 0 */
    if (own.first < stored)
        find_gradients<true>(args, *(shared_memory *)memory, own, stored);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    NAME_WITH(KERNEL_NAME, _finish)(const __grid_constant__ bwd_args args)
{
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ float sums[THREADS];
    const fwd_args &a = args.fwd;
    wait_for_previous_kernel();
    if (args.dsinks != nullptr && blockIdx.x == 0 && blockIdx.z == 0)
        sum_sinks(sums, args, blockIdx.y, stats_of(a, 0, blockIdx.y));
    const int tile = gridDim.x - 1 - blockIdx.x; /* with a mask the last rows see the most keys */
    __shared__ owned own;
    share_owned<false>(own, a, tile, blockIdx.y, blockIdx.z);
    if (own.first < own.end)
        find_gradients<false>(args, *(shared_memory *)memory, own, own.end);
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {.work = ACR__WORK_TILES, /* of the last kernel */
                                   .q_tile = Q_TILE,
                                   .threads = THREADS,
                                   .smem_bytes = sizeof(shared_memory)};

#include "cuda/model/tile_kernel.h"

static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    const fwd_args args = {
        .batch = (int32_t)problem->batch, .q_heads = (int32_t)problem->q_heads, .q_len = (int32_t)problem->q_len};
    (void)device;
    return (size_t)bwd_stats_bytes(&args, Q_TILE);
}

static int64_t count_key_tiles(const acr_problem *problem)
{
    return (problem->kv_len + Q_TILE - 1) / Q_TILE;
}

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    if (count_key_tiles(problem) > INT32_MAX / (problem->kv_heads * problem->batch))
        return "batch * kv_heads has more than 2^31 key tiles";
    return tile_why_not(problem, device);
}

static void shape_prepare(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    tile_shape(problem, device, launch);
    launch->block = HELPER_THREADS;
    launch->smem_bytes = 0;
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    tile_shape(problem, device, launch);
    launch->grid[0] = (uint32_t)count_key_tiles(problem);
    launch->grid[1] = (uint32_t)problem->kv_heads;
}

/* By how much a line with biases is slower, which reads their elements one by one; seen on an H200. */
static double bias_factor(const acr_problem *problem)
{
    if (!(TERMS & FWD_TERM_BIAS))
        return 1.0;
    if (problem->bias_dtype == ACR_DTYPE_DEFAULT)
        return 1.6; /* other lines serve those */
    if (problem->bias_dtype == ACR_BOOL8)
        return DIM == 64 ? 1.05 : 1.43;
    return DIM == 64 ? 1.65 : 2.7;
}

/* Fitted to times of an H200 (lab.md, "The cost"): cycles of a CTA for a step, which waits more than it multiplies, and
 * by its products' FLOPs. */
static double cost(const acr_problem *problem, const acr__device *device)
{
    const double flop_per_cycle = (DIM == 64 ? 1650.0 : 2000.0) * acr__mma_share(device),
                 step_latency = DIM == 64 ? 2900.0 : 3400.0;
    const double product = 2.0 * Q_TILE * KV_TILE * DIM, cta_cycles = 8500.0;
    const int32_t at_once = tile_ctas_per_sm(device, 255);
    const double slots = (double)device->sm_count * at_once;
    const visible_entry entry = acr__longest_entry(problem);
    const double group = (double)(problem->q_heads / problem->kv_heads);
    double seconds = 3 * ACR__LAUNCH_SECONDS;
    for (int keys = 0; keys <= 1; keys++) {
        const double step_product = (keys ? 4.0 : 3.0) * product / flop_per_cycle;
        const double step = step_product > step_latency ? step_product : step_latency; /* of a CTA alone */
        const int64_t lines = keys ? problem->kv_len : problem->q_len, tiles = (lines + Q_TILE - 1) / Q_TILE;
        double steps = 0, most = 0; /* of a head */
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int32_t first = (int32_t)tile * Q_TILE;
            const visible_rows rows = visible_to_keys(entry, first, Q_TILE);
            const visible_keys columns = visible_to_rows(entry, first, Q_TILE);
            const int32_t from = keys ? rows.first : columns.first, end = keys ? rows.end : columns.end;
            const double own =
                from < end ? (keys ? group : 1.0) * (double)((end + KV_TILE - 1) / KV_TILE - from / KV_TILE) : 0;
            steps += own;
            most = own > most ? own : most;
        }
        const double heads = (double)(problem->batch * (keys ? problem->kv_heads : problem->q_heads));
        const double all = heads * steps * step_product / device->sm_count,
                     waits = heads * (steps * step_latency + (double)tiles * cta_cycles) / slots,
                     alone = most * step + cta_cycles;
        /* CTAs that end unevenly leave SMs idle: half of the longest, as seen. */
        const double shared = (all > waits ? all : waits) + 0.5 * alone;
        seconds += (shared > alone ? shared : alone) / device->clock_hz;
    }
    const double rows = (double)(problem->batch * problem->q_heads * problem->q_len);
    return seconds * bias_factor(problem) + rows * DIM * 2 * ELEM_BYTES / acr__memory_rate(problem, device, 1.0);
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("bwd_mma", 80, 999),
    .pass = ACR_BACKWARD,
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .traits = ACR__TRAIT_PACKED,
    .terms = TERMS | FWD_TERM_SINKS, /* which are in the log-sum-exp */
    .why_not = why_not,
    .workspace = workspace,
    .cost = cost,
    .shape = shape,
    .before = {.symbol = KERNEL_TEXT "_prepare", .shape = shape_prepare},
    .after = {.symbol = KERNEL_TEXT "_finish", .shape = tile_shape},
};

#endif
