/* Tiles of a bias or of a boolean mask in shared memory: a warp of the producer's warpgroup asks for them for each
 * consumer, key tile by key tile, and consumers add them to their scores from there. Read score by score from global
 * memory, a bias costs a thread an address and a load of 2 to 4 bytes for every pair of scores. The copy engine brings
 * what tensor maps can describe (bias_fits_boxes), the warp copies the rest: rows that all share one, and such that do
 * not begin at multiples of 16 bytes.
 *
 * Use number n of a consumer's ring is in slot n % BIAS_TILES: the key tiles that it visits in their order, but those
 * of which a survey (bias_survey.cuh) says that the bias changes no score. A slot has a row of KV_TILE elements of 1 or
 * 2 bytes for each row of the consumer, in panels of 128 bytes a row as boxes come; piece_offset says where 16 bytes
 * are.
 *
 * An includer defines, beside the parameters of pipeline.cuh: BIAS_TILES, the slots of a consumer; and struct
 * shared_memory with bias[CONSUMERS][BIAS_TILES], each BIAS_BYTES, and the barriers bias_full, of bias_arrivals, and
 * bias_empty, of 4, for each of the CONSUMERS * BIAS_TILES. */
#ifndef ACR_DEVICE_ATTENTION_BIAS_TILES_CUH
#define ACR_DEVICE_ATTENTION_BIAS_TILES_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device/attention/bias_boxes.h"
#include "cuda/device/attention/bias_survey.cuh"
#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/attention/pipeline.cuh"
#include "cuda/device/attention/scores.cuh"
#include "cuda/device/isa/copy.cuh"
#include "cuda/device/isa/shared.cuh"

enum {
    BIAS_PIECES = KV_TILE / CHUNK_ELEMS, /* of a row of 2-byte elements; of a mask half as many */
    MASK_PIECES = KV_TILE / CHUNK_BYTES,
    BIAS_PANEL_PIECES = BOX_ROW_BYTES / CHUNK_BYTES,
    BIAS_PANEL_BYTES = GROUP_ROWS * BOX_ROW_BYTES
};
static_assert(MASK_PIECES % BIAS_PANEL_PIECES == 0 && HEADS_IN_TILE == 1, "BIAS_TILES: whole panels, of one head");

/* Where a piece of a row is in a slot. */
DEV uint32_t piece_offset(int row, int piece)
{
    return piece / BIAS_PANEL_PIECES * BIAS_PANEL_BYTES +
           chunk_offset(row, piece % BIAS_PANEL_PIECES, BIAS_PANEL_PIECES);
}

/* The address of a piece of the row whose piece 0 is at address `row_start`. */
DEV uint32_t piece_address(uint32_t row_start, int piece)
{
    return chunk_address(row_start, piece % BIAS_PANEL_PIECES, BIAS_PANEL_PIECES) +
           piece / BIAS_PANEL_PIECES * BIAS_PANEL_BYTES;
}

/* How many arrivals fill a slot. */
DEV int bias_arrivals(const fwd_args &a)
{
    return bias_fits_boxes(&a) ? 1 : WARP_THREADS;
}

DEV int bias_slot(int use, int consumer)
{
    return consumer * BIAS_TILES + use % BIAS_TILES;
}

DEV uint32_t bias_parity(int use)
{
    return (uint32_t)(use / BIAS_TILES) & 1;
}

DEV uint32_t bias_at(uint32_t smem, int slot)
{
    return ADDRESS(smem, bias) + (uint32_t)(slot * BIAS_BYTES);
}

/* Whether a key tile of the work tile at `work` (work_at) has its biases in the ring. Read each time: there are no
 * registers for what the survey says. No other key tile is one that the loop without biases visits (clean_tiles). */
DEV bool has_biases(uint32_t work, int key_tile)
{
    const visible_tiles seen = read_surveyed(work);
    return key_tile < seen.full_first || key_tile >= seen.full_end;
}

/* Of the key tiles that a consumer visits those whose scores it takes as they are, in [full_first, full_end): no row
 * hides a key there, and nothing changes a score. Both ends lie in [first, end]. */
DEV visible_tiles clean_tiles(const visible_tiles &tiles, const visible_tiles &surveyed)
{
    visible_tiles clean = {tiles.first, max(tiles.full_first, surveyed.full_first),
                           min(tiles.full_end, surveyed.full_end), tiles.end};
    clean.full_end = max(clean.full_end, tiles.first);
    return clean;
}

/* ---- Filling a slot: by boxes, or by a warp, whose lane copies a piece of every second row, of a mask of every
 * fourth ---- */

/* A consumer's rows of a key tile, by one thread. Rows and keys that do not exist become 0. */
template <int BYTES>
DEV void load_bias_tile(uint32_t slot, uint32_t full, const fwd_args &a, const fwd_map *map, const work_tile &t,
                        int consumer, int tile)
{
    const int panel_keys = BOX_ROW_BYTES / BYTES;
    barrier_arrive_expecting(full, GROUP_ROWS * KV_TILE * BYTES);
#pragma unroll
    for (int panel = 0; panel < KV_TILE / panel_keys; panel++)
        load_box(slot + panel * BIAS_PANEL_BYTES, map, full, tile * KV_TILE + panel * panel_keys,
                 t.q_first + GROUP_ROWS * consumer, a.bias_stride.head != 0 ? t.head : 0,
                 a.bias_stride.batch != 0 ? entry_number(t) : 0);
}

/* A lane's share of a work tile. */
typedef struct bias_copier {
    const char *from; /* the lane's piece of its first row, in key tile 0 */
    int64_t step;     /* bytes from one of its rows to the next */
    uint32_t to;      /* where its first piece is in a slot */
    int rows;         /* from its first row on; those that do not exist become 0 */
    int is_aligned;   /* every row begins at a multiple of 16 bytes */
} bias_copier;

template <int BYTES>
DEV bias_copier find_bias_copier(const fwd_args &a, const visible_entry &e, const work_tile &t, int consumer, int lane)
{
    const int pieces = KV_TILE * BYTES / CHUNK_BYTES;
    const int piece = lane % pieces, row = lane / pieces, first_row = t.q_first + GROUP_ROWS * consumer;
    const char *const first = find_row_terms(a, e, entry_number(t), t.head, first_row).bias;
    const int64_t row_bytes = a.bias_stride.row * BYTES;
    bias_copier c;
    c.from = first + row * row_bytes + piece * CHUNK_BYTES;
    c.step = WARP_THREADS / pieces * row_bytes;
    c.to = piece_offset(row, piece);
    c.rows = e.q_len - first_row - row;
    c.is_aligned = ((uintptr_t)first | (uintptr_t)row_bytes) % CHUNK_BYTES == 0;
    return c;
}

/* A word of which so many bytes are there, byte by byte; the others are 0. */
DEV uint32_t gather_word(const char *from, int bytes)
{
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < bytes)
            word |= (uint32_t) * (const uint8_t *)(from + i) << (8 * i);
    return word;
}

/* Fills a slot. tile: of keys; bytes: of the lane's piece that are of keys that exist, more or fewer than it has. */
template <int BYTES> DEV void copy_bias_tile(uint32_t slot, uint32_t full, const bias_copier &c, int tile, int bytes)
{
    const int row_bytes = KV_TILE * BYTES, at_once = WARP_THREADS * CHUNK_BYTES / row_bytes; /* rows, a power of two */
    const char *from = c.from + (int64_t)tile * row_bytes;
    bytes = max(0, min(bytes, (int)CHUNK_BYTES));
    if (c.is_aligned) {
#pragma unroll 2
        for (int row = 0; row < GROUP_ROWS; row += at_once, from += c.step)
            copy_bytes_async(slot + (c.to ^ (row % 8 * CHUNK_BYTES)) + row * BOX_ROW_BYTES, from,
                             row < c.rows ? bytes : 0);
        copies_arrive(full);
        return;
    }
#pragma unroll 1
    for (int row = 0; row < GROUP_ROWS; row += at_once, from += c.step)
#pragma unroll 1
        for (int at = 0; at < CHUNK_BYTES; at += 4)
            store_shared(slot + (c.to ^ (row % 8 * CHUNK_BYTES)) + row * BOX_ROW_BYTES + at,
                         gather_word(from + at, row < c.rows ? bytes - at : 0));
    barrier_arrive(full);
}

/* All that a consumer asks for, in its order, of elements of so many bytes. */
template <int BYTES> DEV void produce_bias_tiles(const fwd_args &a, const fwd_map *map, uint32_t smem, int consumer)
{
    const int lane = threadIdx.x % WARP_THREADS, row_bytes = KV_TILE * BYTES, in_boxes = bias_fits_boxes(&a);
    int use = 0;
    for (int q_use = 0;; q_use++) {
        const work_tile t = wait_work(smem, consumer, q_use);
        if (t.q_first < 0)
            return;
        const visible_entry entry = entry_of(a, t);
        const uint32_t work = work_at(smem, q_slot(q_use, consumer));
        const visible_tiles tiles = without_hidden(find_key_tiles(a, t), read_surveyed(work));
        const bias_copier copier = find_bias_copier<BYTES>(a, entry, t, consumer, lane);
        const int end = entry.kv_len * BYTES - lane * CHUNK_BYTES % row_bytes;
#pragma unroll 1
        for (int tile = tiles.end - 1; tile >= tiles.first; tile--) {
            if (!has_biases(work, tile))
                continue;
            const int slot = bias_slot(use, consumer);
            barrier_wait(ADDRESS(smem, bias_empty) + BARRIER_BYTES * slot, bias_parity(use) ^ 1);
            const uint32_t full = ADDRESS(smem, bias_full) + BARRIER_BYTES * slot;
            if (!in_boxes)
                copy_bias_tile<BYTES>(bias_at(smem, slot), full, copier, tile, end - tile * row_bytes);
            else if (elect_one())
                load_bias_tile<BYTES>(bias_at(smem, slot), full, a, map, t, consumer, tile);
            use++;
        }
        /* A consumer waits for no copy where no key tile has biases: its slot must not be told anew before. */
        __syncwarp();
        if (lane == 0)
            barrier_arrive(ADDRESS(smem, q_empty) + BARRIER_BYTES * q_slot(q_use, consumer));
    }
}

DEV void produce_biases(const fwd_args &a, const fwd_map *map, uint32_t smem, int consumer)
{
    if (!BIAS_FIRST && a.bias_type == FWD_BIAS_MASK)
        produce_bias_tiles<1>(a, map, smem, consumer);
    else if (!MASKS && a.bias != nullptr)
        produce_bias_tiles<2>(a, map, smem, consumer);
}

/* ---- Adding: a consumer ---- */

/* Two neighbouring elements of the bias. */
template <int IS_BF16> DEV float2 widen_bias_pair(uint32_t pair)
{
    if (IS_BF16)
        return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
    return __half22float2(*(const __half2 *)&pair);
}

/* From raw scores to natural ones with their bias; with BIAS_FIRST raw ones stay raw, and `scale` is the inverse: then
 * the lowest finite biases become -inf (loses_keys). BEGINS: the scores are only begun, and their products come on top.
 * A hidden key's score is -inf, or NaN where the product was not finite: then the row's sum is NaN, and the row is
 * computed again (compute_row_again). */
template <int IS_BF16, int BEGINS, int ELEMS> DEV void add_bias_tile(float (&s)[ELEMS], uint32_t slot, float scale)
{
    const int lane = threadIdx.x % WARP_THREADS, row = threadIdx.x % WARPGROUP_THREADS / WARP_THREADS * 16 + lane % 16;
    const uint32_t from = slot + piece_offset(row, lane / 16);
#pragma unroll
    for (int piece = 0; piece < BIAS_PIECES; piece += 2) {
        uint32_t x[4]; /* of both rows 8 columns, then the next 8 */
        load_matrices(x, piece_address(from, piece));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float *const pair = s + 4 * piece + 2 * i;
            const float2 bias = widen_bias_pair<IS_BF16>(x[i]);
            pair[0] = BEGINS       ? bias.x * scale
                      : BIAS_FIRST ? fmaf(bias.x, scale, pair[0])
                                   : fmaf(pair[0], scale, bias.x);
            pair[1] = BEGINS       ? bias.y * scale
                      : BIAS_FIRST ? fmaf(bias.y, scale, pair[1])
                                   : fmaf(pair[1], scale, bias.y);
        }
    }
}

/* Scores stay raw: no numbers are added. */
template <int ELEMS> DEV void add_mask_tile(float (&s)[ELEMS], uint32_t slot)
{
    const int lane = threadIdx.x % WARP_THREADS, row = threadIdx.x % WARPGROUP_THREADS / WARP_THREADS * 16 + lane / 4;
    const uint32_t from = slot + piece_offset(row, 0) + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < ELEMS; i += 2) {
        const int group = i / 4, h = i % 4 / 2; /* 8 columns; the row, of which the second has the first's swizzle */
        const uint32_t pair = load_shared_16(piece_address(from, group / 2) + group % 2 * 8 + h * 8 * BOX_ROW_BYTES);
        s[i] = pair & 0x00ff ? s[i] : -CUDART_INF_F;
        s[i + 1] = pair & 0xff00 ? s[i + 1] : -CUDART_INF_F;
    }
}

/* Finishes raw scores of a key tile without biases. */
template <int ELEMS> DEV void finish_clean_scores(float (&s)[ELEMS], const fwd_args &a)
{
    if (!adds_numbers(a))
        return;
#pragma unroll
    for (int i = 0; i < ELEMS; i++)
        s[i] *= a.scale;
}

/* Adds the next tile of the consumer's ring, number `use`, to scores (add_bias_tile), or hides keys. */
template <int BEGINS, int ELEMS>
DEV void take_bias_tile(float (&s)[ELEMS], const fwd_args &a, uint32_t smem, int consumer, int &use)
{
    const int slot = bias_slot(use, consumer);
    const float scale = BIAS_FIRST ? reciprocal_fast(a.scale) : a.scale;
    barrier_wait(ADDRESS(smem, bias_full) + BARRIER_BYTES * slot, bias_parity(use));
    if (!BIAS_FIRST && (MASKS || a.bias_type == FWD_BIAS_MASK))
        add_mask_tile(s, bias_at(smem, slot));
    else if (a.bias_type == FWD_BIAS_BF16)
        add_bias_tile<1, BEGINS>(s, bias_at(smem, slot), scale);
    else
        add_bias_tile<0, BEGINS>(s, bias_at(smem, slot), scale);
    use++;
    __syncwarp(); /* every lane has read */
    if (threadIdx.x % WARP_THREADS == 0)
        barrier_arrive(ADDRESS(smem, bias_empty) + BARRIER_BYTES * slot);
}

/* Finishes raw scores, with their bias where has_biases: then `use` is the next of the consumer's ring. */
template <int ELEMS>
DEV void finish_biased_scores(float (&s)[ELEMS], const fwd_args &a, uint32_t smem, int consumer, int &use,
                              bool is_biased)
{
    if (a.bias == nullptr || !is_biased) {
        finish_clean_scores(s, a);
        return;
    }
    take_bias_tile<0>(s, a, smem, consumer, use);
}

#if BIAS_FIRST
/* Begins scores with their bias where has_biases. Returns whether their products come on top. */
template <int ELEMS>
DEV int begin_biased_scores(float (&s)[ELEMS], const fwd_args &a, uint32_t smem, int consumer, int &use, bool is_biased)
{
    if (a.bias == nullptr || !is_biased)
        return 0;
    take_bias_tile<1>(s, a, smem, consumer, use);
    return 1;
}
#endif

/* ---- Rows that are computed again ---- */

/* Whether a row's output is not what its keys give: a hidden key's score was not finite, or all biases that it sees are
 * so low that their exponents were not. max, sum: over the row's keys, as the softmax has them. */
DEV int loses_keys(const fwd_args &a, float max, float sum)
{
    return a.bias != nullptr && (!isfinite(sum) || (sum == 0.0f && (BIAS_FIRST || max != -CUDART_INF_F)));
}

/* Computes a row key by key, and its log-sum-exp where lse is not nullptr: slow, and only for such rows. Each of the
 * four lanes of the row's quad takes every fourth eight columns. */
template <int TYPE>
DEV void compute_row_again(const fwd_args &a, const visible_entry &e, const stored_row &r, float *lse, int lane)
{
    enum {
        LANE_COLUMNS = 8
    };
    const int kv_head = r.head / a.group, part = lane % 4;
    const int64_t q = r.batch * a.q_stride.batch + r.head * a.q_stride.head + r.row * a.q_stride.row;
    const int64_t k = r.batch * a.k_stride.batch + kv_head * a.k_stride.head,
                  v = r.batch * a.v_stride.batch + kv_head * a.v_stride.head;
    const int64_t o = r.batch * a.o_stride.batch + r.head * a.o_stride.head + r.row * a.o_stride.row;
    const visible_keys keys = find_visible_keys(a, e, r.batch, r.row, 1);
    const row_rules rules = find_row_rules(a, e, r);
#pragma unroll 1
    for (int first = part * LANE_COLUMNS; first - part * LANE_COLUMNS < a.v_dim; first += 4 * LANE_COLUMNS) {
        float max = -CUDART_INF_F, sum = 0.0f, output[LANE_COLUMNS] = {};
#pragma unroll 1
        for (int key = keys.first; key < keys.end; key++) {
            if (!reaches(a, rules, key))
                continue;
            float score = 0.0f;
            for (int d = 0; d < a.qk_dim; d++)
                score += load_element<TYPE>(a.q, q + d) * load_element<TYPE>(a.k, k + key * a.k_stride.row + d);
            score = BIAS_FIRST ? add_bias(score * a.scale, find_bias(a, rules.terms, key))
                               : finish_score(a, rules.terms, score, key) * score_scale(a);
            if (score == -CUDART_INF_F)
                continue;
            const float raised = fmaxf(max, score), kept = exp2_fast((max - raised) * LOG2_E),
                        weight = exp2_fast((score - raised) * LOG2_E);
            sum = sum * kept + weight;
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++)
                if (first + i < a.v_dim)
                    output[i] =
                        output[i] * kept + weight * load_element<TYPE>(a.v, v + key * a.v_stride.row + first + i);
            max = raised;
        }
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++)
            if (first + i < a.v_dim)
                store_element<TYPE>(a.o, o + first + i, sum == 0.0f ? 0.0f : output[i] / sum);
        if (lse != nullptr && first == 0)
            *lse = log_sum_exp(max, sum, 1.0f);
    }
}

#endif
