/* Forward attention on Hopper's warpgroup tensor cores, fp16 and bf16: the throughput kernel, sm_90a.
 *
 * A persistent CTA takes query tiles from a queue, longest first. One producer thread loads Q, K and V by tensor maps
 * into rings in shared memory; Q_TILE / 64 consumer warpgroups hold 64 query rows each, with scores, probabilities and
 * output in registers. While one warpgroup exponentiates, another has the tensor cores: named barriers hand the turn
 * around. The first scores of the next tile are computed under the last store of this one. After Dao et al. 2022
 * (online softmax) and Shah et al. 2024 (warpgroups in turns). See README.md.
 *
 * Parameters: DIM (query-key dims up to it, zero-padded), Q_TILE, KV_TILE, STAGES (of the K and V rings); optional
 * V_DIM (default DIM), BF16=1, Q_STAGES (tiles of Q in shared memory, default 1), PACKED=1 (for packed batches alone:
 * what they need costs the others 1 to 3 % in d64).
 *
 * PARAMETERS: DIM Q_TILE KV_TILE STAGES V_DIM=DIM BF16=0 Q_STAGES=1 PACKED=0 */
#include "fwd_args.h"

#ifndef V_DIM
#define V_DIM DIM
#endif
#ifndef BF16
#define BF16 0
#endif
#ifndef Q_STAGES
#define Q_STAGES 1
#endif
#ifndef PACKED
#define PACKED 0
#endif

enum {
    ELEM_BYTES = 2,
    PANEL_ELEMS = 64, /* a tile is stored in panels of 128-byte rows, as the swizzle wants it */
    PANEL_ROW_BYTES = PANEL_ELEMS * ELEM_BYTES,
    GROUP_ROWS = 64, /* query rows of a consumer warpgroup */
    CONSUMERS = Q_TILE / GROUP_ROWS,
    THREADS = 128 * (CONSUMERS + 1),
    QK_PANELS = (DIM + PANEL_ELEMS - 1) / PANEL_ELEMS,
    V_PANELS = (V_DIM + PANEL_ELEMS - 1) / PANEL_ELEMS,
    Q_PANEL_BYTES = GROUP_ROWS * PANEL_ROW_BYTES,
    Q_GROUP_BYTES = QK_PANELS * Q_PANEL_BYTES,
    Q_SLOTS = Q_STAGES * CONSUMERS,
    KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES,
    K_BYTES = QK_PANELS * KV_PANEL_BYTES,
    V_BYTES = V_PANELS * KV_PANEL_BYTES,
    PLACE_BYTES = PACKED ? 32 : 16,
    ORDERED_SEQUENCES = 256, /* of a packed batch, so many are taken longest first */
    /* Shared memory: the tiles, where each slot of Q is in the problem, barriers of 8 bytes, and of a packed batch the
     * number of places, key lengths and an order of sequences. */
    K_AT = Q_SLOTS * Q_GROUP_BYTES,
    V_AT = K_AT + STAGES * K_BYTES,
    PLACES_AT = V_AT + STAGES * V_BYTES,
    Q_FULL_AT = PLACES_AT + Q_SLOTS * PLACE_BYTES,
    Q_EMPTY_AT = Q_FULL_AT + Q_SLOTS * 8,
    K_FULL_AT = Q_EMPTY_AT + Q_SLOTS * 8,
    K_EMPTY_AT = K_FULL_AT + STAGES * 8,
    V_FULL_AT = K_EMPTY_AT + STAGES * 8,
    V_EMPTY_AT = V_FULL_AT + STAGES * 8,
    COUNT_AT = V_EMPTY_AT + STAGES * 8,
    CURSOR_AT = COUNT_AT + 8,
    LENGTHS_AT = CURSOR_AT + 16,
    ORDER_AT = LENGTHS_AT + ORDERED_SEQUENCES * 4,
    SMEM_BYTES = PACKED ? ORDER_AT + ORDERED_SEQUENCES : COUNT_AT
};

#ifdef __CUDACC__

#if BF16
#define WGMMA_TYPE "bf16"
#else
#define WGMMA_TYPE "f16"
#endif
#include "cuda/device/isa/element.cuh"
#include "cuda/device/isa/fragment.cuh"
#include "cuda/device/isa/marks.cuh"
#include "cuda/device/attention/pipeline.cuh"
#include "cuda/device/attention/scores.cuh"
#include "cuda/device/attention/softmax.cuh"
#include "cuda/device/isa/wgmma.cuh"

enum {
    ELEMENT = BF16 ? ACR_BF16 : ACR_F16,
    /* Registers of a thread, multiples of 8: the launch gives every thread an equal share, then the producer's go to
     * the consumers. */
    MORE_FOR_PRODUCER = PACKED && CONSUMERS == 2 && V_DIM <= 64, /* where few outputs are in registers */
    PRODUCER_REGISTERS = MORE_FOR_PRODUCER ? 40 : CONSUMERS == 3 || (PACKED && CONSUMERS == 4) ? 32 : 24,
    CONSUMER_REGISTERS = MORE_FOR_PRODUCER ? 232 : CONSUMERS == 2 ? 240 : CONSUMERS == 3 ? 160 : 112,
    FIRST_ALONE = FIRST_TURN + CONSUMERS, /* named barriers, behind those of the turns: one for each consumer */
    /* When a consumer passes the turn: two do best one after the other, so that the scores of one run under the output
     * product of the other; more of them keep the tensor cores fed by queueing. */
    PASS_AFTER_SCORES = CONSUMERS == 2
};

static_assert(DIM % WGMMA_K == 0 && V_DIM % 16 == 0 && KV_TILE % WGMMA_K == 0,
              "DIM, V_DIM and KV_TILE: multiples of 16");
static_assert(Q_TILE % GROUP_ROWS == 0 && CONSUMERS >= 2 && CONSUMERS <= 4, "Q_TILE: 128, 192 or 256");
static_assert(STAGES >= 2, "STAGES: the next K arrives while this one is in use");
static_assert(SMEM_BYTES <= 232448, "tiles and stages: 227 KB, a CTA's limit on sm_90");

/* ---- The queue of a packed batch: sequence after sequence, the one with the most keys first ---- */

/* The sequence that the producer is at: it takes places in ascending order. In shared memory, the producer has few
 * registers. */
typedef struct cursor {
    int next;       /* in the order of sequences */
    uint32_t first; /* the sequence's first place, */
    uint32_t end;   /* and the next one's */
    int batch;
} cursor;

/* By all threads: counts the places, and orders the sequences if they are not too many. */
DEV void order_sequences(const fwd_args &a, uint8_t *memory)
{
    uint32_t *const count = (uint32_t *)(memory + COUNT_AT);
    int *const lengths = (int *)(memory + LENGTHS_AT);
    const int ordered = a.batch <= ORDERED_SEQUENCES;
    if (threadIdx.x == 0) {
        *count = 0;
        *(cursor *)(memory + CURSOR_AT) = {0, 0, 0, 0};
    }
    __syncthreads();
    uint32_t q_tiles = 0;
    for (int i = threadIdx.x; i < a.batch; i += THREADS) {
        const sequence rows = find_sequence(a, i);
        q_tiles += count_q_tiles(rows.q_len);
        if (ordered)
            lengths[i] = rows.kv_len;
    }
    atomicAdd(count, q_tiles * (uint32_t)a.q_heads);
    __syncthreads();
    for (int i = threadIdx.x; ordered && i < a.batch; i += THREADS) {
        int rank = 0;
        for (int other = 0; other < a.batch; other++)
            rank += lengths[other] > lengths[i] || (lengths[other] == lengths[i] && other < i);
        memory[ORDER_AT + rank] = (uint8_t)i;
    }
    __syncthreads();
}

/* Of a packed batch, order_sequences has counted them. */
DEV uint32_t count_places(const fwd_args &a, const uint8_t *memory)
{
    return is_packed(a) ? *(const uint32_t *)(memory + COUNT_AT) : count_equal_places(a);
}

DEV place find_packed_place(const fwd_args &a, uint32_t index, uint8_t *memory)
{
    cursor *const at = (cursor *)(memory + CURSOR_AT);
    while (index >= at->end) {
        const int next = at->next;
        const int batch = a.batch <= ORDERED_SEQUENCES ? memory[ORDER_AT + next] : next;
        const sequence rows = find_sequence(a, batch);
        *at = {next + 1, at->end, at->end + count_q_tiles(rows.q_len) * (uint32_t)a.q_heads, batch};
    }
    const sequence rows = find_sequence(a, at->batch);
    uint32_t head, q_tile;
    order_tiles(head, q_tile, a, index - at->first, count_q_tiles(rows.q_len), (uint32_t)a.q_heads,
                max(rows.kv_len, 1));
    return {(int)q_tile * Q_TILE, (int)head, 0, rows};
}

/* ---- Producer: one thread ---- */

DEV void produce_k(const place &p, const fwd_map *map, uint32_t smem, int kv_head, int use, int kv_tile)
{
    produce_keys(smem + K_AT, smem + K_FULL_AT, smem + K_EMPTY_AT, QK_PANELS, KV_PANEL_BYTES, p, map, kv_head, use,
                 kv_tile);
}

DEV void produce_v(const place &p, const fwd_map *map, uint32_t smem, int kv_head, int use, int kv_tile)
{
    produce_keys(smem + V_AT, smem + V_FULL_AT, smem + V_EMPTY_AT, V_PANELS, KV_PANEL_BYTES, p, map, kv_head, use,
                 kv_tile);
}

/* Loads in the order of use: K of the last key tile, Q, then K a step ahead of V, from the right to the left. */
DEV void produce(const fwd_args &a, const fwd_maps &maps, uint32_t smem, uint8_t *memory)
{
    int use = 0, q_use = 0; /* of the K and V rings; of the Q ring */
    for (uint32_t index = blockIdx.x; index < count_places(a, memory);) {
        const place p = is_packed(a) ? find_packed_place(a, index, memory) : find_place(a, index);
        const int kv_head = p.head / a.group, kv_tiles = count_kv_tiles(a, p);
        produce_k(p, &maps.k, smem, kv_head, use, kv_tiles - 1);
        produce_place(p, &maps.q, smem, q_use++);
        for (int kv_tile = kv_tiles - 2; kv_tile >= 0; kv_tile--) {
            use++;
            produce_k(p, &maps.k, smem, kv_head, use, kv_tile);
            produce_v(p, &maps.v, smem, kv_head, use - 1, kv_tile + 1);
        }
        index = take_next(a, count_places(a, memory)); /* arrives during the wait for the last V's stage */
        produce_v(p, &maps.v, smem, kv_head, use++, 0);
    }
    const place none = {-1, 0, 0, {0, 0, 0, 0}};
    produce_place(none, nullptr, smem, q_use);
}

/* ---- Consumers: a warpgroup each. Arrays are in registers, laid out as device/isa/wgmma.cuh says. ---- */

typedef float score_tile[KV_TILE / 2];
typedef float output_tile[V_DIM / 2];
typedef uint32_t probability_tile[KV_TILE / 4];

/* The two rows that a lane holds: l / 4 and l / 4 + 8 of its warp's 16. */
typedef struct softmax_rows {
    float max[2];    /* what is subtracted from the raw scores; the true maximum may be higher by `slack` */
    float offset[2]; /* the same, finite, times scale_log2 */
    float sum[2];    /* of this lane's exponentials; lanes of a quad are added at the end */
} softmax_rows;

/* Where a thread is, and what stays the same for it. */
typedef struct consumer {
    uint32_t smem;
    int index;     /* among the consumers */
    int lane, row; /* the lane's first row within the query tile */
    uint64_t k, v; /* descriptors of stage 0 */
    float scale_log2;
    float slack; /* raw scores may rise so far above the subtracted maximum: probabilities stay below 2^8 */
} consumer;

/* The descriptor of the consumer's rows of Q. */
DEV uint64_t query_matrix(const consumer &c, int use)
{
    return matrix_descriptor(query_at(c.smem, c.index, use), 0);
}

/* Starts S = Q * transpose(K) as a group of its own. */
DEV void start_scores(score_tile &s, uint64_t q, uint64_t k)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM / WGMMA_K; step++) {
        const uint32_t in_panel = step % 4 * WGMMA_K * ELEM_BYTES;
        wgmma_ss(s, descriptor_at(q, step / 4 * Q_PANEL_BYTES + in_panel),
                 descriptor_at(k, step / 4 * KV_PANEL_BYTES + in_panel), step != 0);
    }
    wgmma_commit();
}

/* Starts O += P * V, or O = P * V, as a group of its own. */
DEV void start_output(output_tile &o, const probability_tile &p, uint64_t v, int accumulate)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_K; step++)
        wgmma_rs_mn(o, p + 4 * step, descriptor_at(v, step * WGMMA_K * PANEL_ROW_BYTES), step != 0 || accumulate);
    wgmma_commit();
}

DEV void pack_probabilities(probability_tile &p, const score_tile &s)
{
#pragma unroll
    for (int i = 0; i < KV_TILE / 4; i++)
        p[i] = pack<BF16>(s[2 * i], s[2 * i + 1]);
}

/* Scores become probabilities, relative to the subtracted maximum, and are added up. */
DEV void exponentiate(score_tile &s, softmax_rows &r, float scale_log2)
{
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; i++) {
        const int h = i % 4 / 2;
        s[i] = exp2_fast(fmaf(s[i], scale_log2, -r.offset[h]));
        sum[h] += s[i];
    }
    r.sum[0] += sum[0];
    r.sum[1] += sum[1];
}

DEV void softmax_first(score_tile &s, softmax_rows &r, float scale_log2)
{
    lane_max(r.max, s);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.max[h] = quad_max(r.max[h]);
        r.offset[h] = finite_max(r.max[h]) * scale_log2;
        r.sum[h] = 0.0f;
    }
    exponentiate(s, r, scale_log2);
}

/* A row's maximum is left alone until it has grown by more than the slack; mostly it never does. It depends on no other
 * row. Returns whether some row's was changed, and the output so far is to be multiplied by `factor`. */
DEV int softmax_next(score_tile &s, softmax_rows &r, float (&factor)[2], const consumer &c)
{
    float max[2];
    lane_max(max, s);
    const int grown = __any_sync(~0u, max[0] > r.max[0] + c.slack || max[1] > r.max[1] + c.slack);
    if (grown) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float row_max = quad_max(max[h]);
            max[h] = row_max > r.max[h] + c.slack ? row_max : r.max[h];
            const float offset = finite_max(max[h]) * c.scale_log2;
            factor[h] = max[h] == r.max[h] ? 1.0f : exp2_fast(r.max[h] * c.scale_log2 - offset);
            r.sum[h] *= factor[h];
            r.max[h] = max[h];
            r.offset[h] = offset;
        }
    }
    exponentiate(s, r, c.scale_log2);
    return grown;
}

/* One key tile: S = Q * transpose(K) of it and O += P * V of the one before, then P of this one. `use` is that of the
 * tile before. */
DEV void step(score_tile &s, probability_tile &p, output_tile &o, softmax_rows &r, uint64_t q, const consumer &c,
              int use, int accumulate, int masked, int seen_0, int seen_1)
{
    float factor[2];
    wait_full(c.smem + K_FULL_AT, use + 1);
    wait_turn(c.index);
    ACR_MARK(use, "K landed, turn taken");
    start_scores(s, q, descriptor_at(c.k, stage_of(use + 1) * K_BYTES));
    wait_full(c.smem + V_FULL_AT, use);
    start_output(o, p, descriptor_at(c.v, stage_of(use) * V_BYTES), accumulate);
    if (!PASS_AFTER_SCORES)
        pass_turn(c.index);
    WGMMA_WAIT(1);
    ACR_MARK(use, "scores ready");
    if (PASS_AFTER_SCORES)
        pass_turn(c.index);
    release(c.smem + K_EMPTY_AT, use + 1);
    if (masked)
        mask_scores(s, seen_0, seen_1);
    const int grown = softmax_next(s, r, factor, c);
    ACR_MARK(use, "exponentials done");
    WGMMA_WAIT(0);
    ACR_MARK(use, "output product done");
    release(c.smem + V_EMPTY_AT, use);
    pack_probabilities(p, s);
    if (grown)
        scale_output(o, factor);
}

/* Rows of V beyond the key length may hold anything, the next sequence for one, and NaN times a probability of zero
 * is NaN: each consumer clears them for itself. */
DEV void clear_rows(const consumer &c, int use, int first)
{
    const int thread = threadIdx.x % WARPGROUP_THREADS;
    wait_full(c.smem + V_FULL_AT, use);
    for (int i = thread + first * 8; i < KV_TILE * 8; i += WARPGROUP_THREADS)
        for (int panel = 0; panel < V_PANELS; panel++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(c.smem + V_AT + stage_of(use) * V_BYTES +
                                                                          panel * KV_PANEL_BYTES + i * 16),
                         "r"(0)
                         : "memory");
    shared_stores_visible();
    named_sync(FIRST_ALONE + c.index, WARPGROUP_THREADS);
}

/* ---- Output ---- */

/* Stores one row of the lane, 16 bytes at a time: h selects it. Returns whether all its values are finite. */
DEV int store_row(const fwd_args &a, const place &p, const output_tile &o, int h, int row, float factor, int lane)
{
    char *to =
        (char *)a.o +
        (p.batch * a.o_stride.batch + p.head * a.o_stride.head + (p.rows.q_begin + row) * a.o_stride.row) * ELEM_BYTES;
    float probe = 0.0f;
#pragma unroll
    for (int c = 0; c < V_DIM / 8; c += 4) {
        uint32_t x[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 4 && c + i < V_DIM / 8; i++) {
            const float low = o[4 * (c + i) + 2 * h] * factor, high = o[4 * (c + i) + 2 * h + 1] * factor;
            probe = fmaf(low, 0.0f, fmaf(high, 0.0f, probe));
            x[i] = pack<BF16>(low, high);
        }
        transpose_quad(x);
        const int column = 8 * (c + lane % 4);
        if (row < count_queries(a, p) && column < a.v_dim) {
            const uint4 none = {0, 0, 0, 0}, values = {x[0], x[1], x[2], x[3]};
            *(uint4 *)(to + column * ELEM_BYTES) =
                factor != 0.0f ? values : none; /* factor 0: no key seen, whatever V holds */
        }
    }
    return probe == 0.0f;
}

/* A value that is not finite reaches, as 0 * NaN, also the rows of its key tile that the mask hides it from. Computes
 * those outputs of one row of the lane again, one by one: right, and slow, and only for such inputs. */
DEV void repair_row(const fwd_args &a, const place &p, int row, int keys_end, float offset, float factor, int lane)
{
    const int kv_head = p.head / a.group, q_row = p.rows.q_begin + row;
    const int64_t q = p.batch * a.q_stride.batch + p.head * a.q_stride.head + q_row * a.q_stride.row;
    const int64_t k = p.batch * a.k_stride.batch + kv_head * a.k_stride.head + p.rows.kv_begin * a.k_stride.row,
                  v = p.batch * a.v_stride.batch + kv_head * a.v_stride.head + p.rows.kv_begin * a.v_stride.row;
    const int64_t o = p.batch * a.o_stride.batch + p.head * a.o_stride.head + q_row * a.o_stride.row;
    for (int column = lane % 4; column < a.v_dim; column += 4) {
        int key = keys_end;
        if (!isfinite(load_element<ELEMENT>(a.o, o + column)))
            for (key = 0; key < keys_end && isfinite(load_element<ELEMENT>(a.v, v + key * a.v_stride.row + column));)
                key++;
        if (key < keys_end || keys_end == 0) /* the row sees such a value itself, or nothing is wrong */
            continue;
        float output = 0.0f;
        for (key = 0; key < keys_end; key++) {
            float score = 0.0f;
            for (int d = 0; d < a.qk_dim; d++)
                score += load_element<ELEMENT>(a.q, q + d) * load_element<ELEMENT>(a.k, k + key * a.k_stride.row + d);
            output += exp2_fast(fmaf(score, a.scale_log2, -offset)) *
                      load_element<ELEMENT>(a.v, v + key * a.v_stride.row + column);
        }
        store_element<ELEMENT>(a.o, o + column, output * factor);
    }
}

DEV void store_tile(const fwd_args &a, const place &p, const keys &k, const output_tile &o, const softmax_rows &r,
                    const consumer &c)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = p.q_first + c.row + 8 * h;
        const float sum = quad_sum(r.sum[h]), factor = inverse_sum(sum);
        const int finite = store_row(a, p, o, h, row, factor, c.lane);
        if (a.lse != nullptr && c.lane % 4 == 0 && row < count_queries(a, p))
            find_lse(a, p.rows, p.batch, p.head)[row] = log_sum_exp(r.max[h], sum, a.scale);
        if (a.mask != FWD_MASK_NONE && __any_sync(~0u, !finite)) {
            __threadfence();
            __syncwarp(); /* the values are other lanes' */
            if (row < count_queries(a, p) && isfinite(sum))
                repair_row(a, p, row, keys_seen(a, k, row), r.offset[h], factor, c.lane);
        }
    }
}

DEV void consume(const fwd_args &a, uint32_t smem, int index)
{
    const int lane = threadIdx.x % WARP_THREADS;
    const consumer c = {smem,
                        index,
                        lane,
                        lane_row(index, lane),
                        matrix_descriptor(smem + K_AT, 0),
                        matrix_descriptor(smem + V_AT, KV_PANEL_BYTES),
                        a.scale_log2,
                        8.0f / a.scale_log2};
    int use = 0, q_use = 0;
    score_tile s;
    probability_tile probabilities;
    output_tile o;
    softmax_rows r;

    open_turns(index);
    place p = wait_place(smem, index, q_use);
    uint64_t q = query_matrix(c, q_use);
    wait_full(smem + K_FULL_AT, use);
    ACR_MARK(0, "first Q and K landed");
    start_scores(s, q, c.k);
    do {
        const keys k = place_keys(a, p, GROUP_ROWS * index, GROUP_ROWS);
        const int first_column = 2 * (lane % 4);
        const int seen_0 = keys_seen(a, k, p.q_first + c.row) - first_column,
                  seen_1 = keys_seen(a, k, p.q_first + c.row + 8) - first_column;
        const int unmasked = k.full_end / KV_TILE; /* key tiles that every row sees whole */
        int tile = count_kv_tiles(a, p) - 1, accumulate = 0;

        WGMMA_WAIT(0);
        ACR_MARK(q_use, "tile: first scores ready");
        release(smem + K_EMPTY_AT, use);
        if (tile >= unmasked)
            mask_scores(s, seen_0 - tile * KV_TILE, seen_1 - tile * KV_TILE);
        softmax_first(s, r, c.scale_log2);
        pack_probabilities(probabilities, s);
        ACR_MARK(q_use, "tile: first exponentials done");
        if ((a.kv_lens != nullptr || is_packed(a)) && (tile + 1) * KV_TILE > k.len)
            clear_rows(c, use, k.len - tile * KV_TILE);
#pragma unroll 1
        for (tile--; tile >= unmasked; tile--, accumulate = 1)
            step(s, probabilities, o, r, q, c, use++, accumulate, 1, seen_0 - tile * KV_TILE, seen_1 - tile * KV_TILE);
#pragma unroll 1
        for (; tile >= 0; tile--, accumulate = 1)
            step(s, probabilities, o, r, q, c, use++, accumulate, 0, 0, 0);

        /* The last output product of this place, and under its store the first scores of the next. */
        release_query(smem, index, q_use);
        wait_full(smem + V_FULL_AT, use);
        wait_turn(c.index);
        start_output(o, probabilities, descriptor_at(c.v, stage_of(use) * V_BYTES), accumulate);
        const place next = wait_place(smem, index, ++q_use);
        if (next.q_first >= 0)
            wait_full(smem + K_FULL_AT, use + 1);
        q = query_matrix(c, q_use);
        start_scores(
            s, q,
            descriptor_at(c.k, stage_of(use + 1) * K_BYTES)); /* after the last place of stale tiles: never looked at */
        pass_turn(c.index);
        WGMMA_WAIT(1);
        ACR_MARK(q_use, "tile: last output product done");
        release(smem + V_EMPTY_AT, use++);
        store_tile(a, p, k, o, r, c);
        ACR_MARK(q_use, "tile: stored");
        p = next;
    } while (p.q_first >= 0);
    WGMMA_WAIT(0);
    close_turns(index);
}

DEV void init_barriers(uint32_t smem)
{
    const int warps = WARPGROUP_THREADS / WARP_THREADS;
    for (int i = 0; i < Q_SLOTS; i++) {
        barrier_init(smem + Q_FULL_AT + BARRIER_BYTES * i, 1);
        barrier_init(smem + Q_EMPTY_AT + BARRIER_BYTES * i, warps);
    }
    for (int i = 0; i < STAGES; i++) {
        barrier_init(smem + K_FULL_AT + BARRIER_BYTES * i, 1);
        barrier_init(smem + K_EMPTY_AT + BARRIER_BYTES * i, warps * CONSUMERS);
        barrier_init(smem + V_FULL_AT + BARRIER_BYTES * i, 1);
        barrier_init(smem + V_EMPTY_AT + BARRIER_BYTES * i, warps * CONSUMERS);
    }
    barrier_init_done();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_maps maps)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t smem = smem_address(memory);
    ACR_MARK(0, "start");
    const int group =
        __shfl_sync(~0u, threadIdx.x / WARPGROUP_THREADS, 0); /* the same in all lanes, for the compiler too */
    if (threadIdx.x == 0) {
        prefetch_map(&maps.q);
        prefetch_map(&maps.k);
        prefetch_map(&maps.v);
        init_barriers(smem);
    }
    __syncthreads();
    wait_for_previous_kernel();
    allow_next_kernel();
    if (is_packed(a)) {
        order_sequences(a, memory);
        if (blockIdx.x >= count_places(a, memory))
            return;
    }
    ACR_MARK(0, "CTA ready");
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)PRODUCER_REGISTERS));
        if (threadIdx.x == 0)
            produce(a, maps, smem, memory);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)CONSUMER_REGISTERS));
        consume(a, smem, group - 1);
    }
    ACR_MARKS_END(a);
}

#else

#include "cuda/model/fwd_model.h"

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    const char *reason = acr__fwd_size_why_not(problem, DIM, V_DIM);
    if (reason == NULL && PACKED && !(problem->flags & ACR_PACKED))
        reason = "serves packed batches only (ACR_PACKED)";
    if (reason == NULL)
        reason = acr__boxes_why_not(problem, &KERNEL_DESCRIPTION.boxes);
    if (reason == NULL)
        reason = acr__queue_why_not(problem, Q_TILE);
    return reason != NULL ? reason : acr__smem_why_not(SMEM_BYTES, device);
}

static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    return acr__queue_workspace(problem, device, Q_TILE);
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    *launch = acr__queue_launch(problem, device, Q_TILE, THREADS, SMEM_BYTES);
}

static double cost(const acr_problem *problem, const acr__device *device)
{
    const acr_problem padded = acr__padded(problem, DIM, V_DIM);
    const acr__fwd_rates rates = {
        .kernel = KERNEL_TEXT,
        .q_tile = Q_TILE,
        .kv_tile = KV_TILE,
        .mma_flop_per_cycle = 3600.0, /* of 4096: what the power limit leaves */
        .exp_per_cycle = 14.0,
        .step_cycles = 600.0 + 4.0 * KV_TILE, /* of one warpgroup alone */
        .cta_cycles = 3500.0,
        .ctas_per_sm = 1,
    };
    return acr__fwd_seconds(&padded, device, &rates);
}

const acr__kernel KERNEL_DESCRIPTION = {
    .name = KERNEL_TEXT,
    .family = "fwd_wgmma",
    .backend = ACR__CUDA,
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .qk_dim_max = DIM,
    .v_dim_max = V_DIM,
    .q_tile = Q_TILE,
    .kv_tile = KV_TILE,
    .stages = STAGES,
    .traits = PACKED ? ACR__TRAIT_PACKED : 0,
    .why_not = why_not,
    .workspace = workspace,
    .cost = cost,
    .symbol = KERNEL_TEXT,
    .image = KERNEL_IMAGE,
    .image_end = KERNEL_IMAGE_END,
    .arch_min = 90,
    .arch_max = 90,
    .shape = shape,
    .boxes = {.q_rows = GROUP_ROWS, .k_rows = KV_TILE, .v_rows = KV_TILE},
};

#endif
