/* Which key tiles of a mask are hidden whole, and which change no score: all CTAs look at it together before any of
 * them begins with its work, so that hidden tiles cost neither loads nor products. What all heads share is looked at
 * once.
 * Biases that differ from head to head are no masks as a rule, and are not looked at.
 *
 * What is left of a query tile says how long it takes: the queue goes by it, longest first (find_surveyed_tile). In the
 * order of the rows a causal mask's longest tiles would be the last ones, and CTAs would wait for them.
 *
 * CTAs wait for each other: a launch has no more of them than run at once. The workspace holds, behind the queue's
 * counter, what they tell each other; all of it is 0 at first, and its counters wrap back to 0.
 *
 * Without a survey and a mask, batch entries that share a bias take its tiles side by side.
 *
 * An includer defines Q_TILE, KV_TILE and THREADS. */
#ifndef ACR_DEVICE_ATTENTION_BIAS_SURVEY_CUH
#define ACR_DEVICE_ATTENTION_BIAS_SURVEY_CUH

#include <limits.h>

#include "cuda/device/attention/bias_survey.h"
#include "cuda/device/attention/scores.cuh"
#include "cuda/device/attention/tile_scheduler.cuh"
#include "cuda/device/isa/copy.cuh"

/* Loads of 16 bytes that a lane has under way at once: one after another a tile's would take 32 times as long as DRAM
 * takes to answer. */
enum {
    SURVEY_LOADS = 32
};

enum {
    TILE_SEEN = 1,   /* some row sees some key */
    TILE_CHANGED = 2 /* some element hides its key or changes its score */
};

DEV bool is_surveyed(const fwd_args &a)
{
    return a.bias != nullptr && survey_is_wanted(a.bias_type, a.bias_stride.head);
}

/* The workspace as it lies. A query tile here is one of an entry and a head that the bias tells apart. */
typedef struct bias_survey {
    int q_tiles, key_tiles;          /* of one entry and head, a part of the bias */
    int units;                       /* query tiles in all */
    unsigned *arrived, *generation;  /* of CTAs */
    unsigned *looked_at, *summed_up; /* of each query tile: its key tiles; of each part: its query tiles */
    visible_tiles *seen;             /* of each query tile: outside [first, end) all is hidden, and in
                                        [full_first, full_end) nothing changes a score */
    int *lengths;                    /* of each query tile: the key tiles that the rule and the bias leave together */
    visible_tiles *ranked;           /* of each part the same as `seen`, the query tile with most key tiles first, */
    int *order;                      /* and which query tile it is */
    uint8_t *found;                  /* of each key tile of a query tile: TILE_* */
} bias_survey;

DEV bias_survey survey_of(const fwd_args &a)
{
    bias_survey s;
    s.q_tiles = (int)count_q_tiles(a.q_len);
    s.key_tiles = (a.kv_len + KV_TILE - 1) / KV_TILE;
    s.units = s.q_tiles * (a.bias_stride.batch != 0 ? a.batch : 1) * (a.bias_stride.head != 0 ? a.q_heads : 1);
    s.arrived = (unsigned *)a.workspace + 1;
    s.generation = s.arrived + 1;
    s.seen = (visible_tiles *)((char *)a.workspace + SURVEY_SEEN_AT);
    s.ranked = s.seen + s.units;
    s.lengths = (int *)(s.ranked + s.units);
    s.order = s.lengths + s.units;
    s.looked_at = (unsigned *)(s.order + s.units);
    s.summed_up = s.looked_at + s.units;
    s.found = (uint8_t *)(s.summed_up + s.units);
    return s;
}

/* ---- One tile, by a warp ---- */

/* What one element of the bias does. */
DEV int judge_element(uint32_t element, int type)
{
    if (type == FWD_BIAS_MASK)
        return element != 0 ? TILE_SEEN : TILE_CHANGED;
    const int hides = element == (type == FWD_BIAS_BF16 ? 0xff80u : 0xfc00u);
    return (hides ? 0 : TILE_SEEN) | ((element & 0x7fff) != 0 ? TILE_CHANGED : 0);
}

/* Of so many elements of a row, the last of a piece of 16 bytes that may be cut. */
DEV int judge_piece(const char *from, int elements, int type)
{
    const int bytes = bias_elem_bytes(type);
    int found = 0;
    for (int i = 0; i < min(elements, CHUNK_BYTES / bytes); i++)
        found |= judge_element(bytes == 1 ? load_bits<1>(from + i) : load_bits<2>(from + 2 * i), type);
    return found;
}

/* What four bytes or two numbers at once do, for as many words as are joined: `differs` is 0 where all elements hide
 * their keys, `changed & changes` where none changes a score. Of a mask that is a byte of 0: only there, or above such
 * a byte, the highest bit of its difference to 1 is 1 and its own is not. */
typedef struct words_judge {
    uint32_t hidden, less, turned, changes; /* of the type */
    uint32_t differs, changed;
} words_judge;

DEV words_judge judge_of(int type)
{
    if (type == FWD_BIAS_MASK)
        return {0, 0x01010101u, ~0u, 0x80808080u, 0, 0};
    return {type == FWD_BIAS_BF16 ? 0xff80ff80u : 0xfc00fc00u, 0, 0, 0x7fff7fffu, 0, 0};
}

DEV void judge_word(words_judge &j, uint32_t word)
{
    j.differs |= word ^ j.hidden;
    j.changed |= (word - j.less) & (word ^ j.turned);
}

/* A lane's pieces of 16 bytes of a tile, `rows` rows from the first one: behind the last the last again, so that no
 * load waits for another. */
template <int PIECES>
DEV int judge_pieces(const char *first, int64_t row_bytes, int row, int at_once, int rows, int type)
{
    words_judge j = judge_of(type);
    static_assert(PIECES % SURVEY_LOADS == 0, "SURVEY_LOADS: a lane's pieces are a multiple");
#pragma unroll 1
    for (int n = 0; n < Q_TILE / at_once; n += SURVEY_LOADS) {
        uint4 words[SURVEY_LOADS];
#pragma unroll
        for (int i = 0; i < SURVEY_LOADS; i++)
            words[i] = *(const uint4 *)(first + min(row + (n + i) * at_once, rows - 1) * row_bytes);
#pragma unroll
        for (int i = 0; i < SURVEY_LOADS; i++) {
            judge_word(j, words[i].x);
            judge_word(j, words[i].y);
            judge_word(j, words[i].z);
            judge_word(j, words[i].w);
        }
    }
    return (j.differs != 0 ? TILE_SEEN : 0) | ((j.changed & j.changes) != 0 ? TILE_CHANGED : 0);
}

DEV int look_at_tile(const fwd_args &a, const bias_survey &s, int unit, int key_tile, int lane)
{
    const int bytes = bias_elem_bytes(a.bias_type), pieces = KV_TILE * bytes / CHUNK_BYTES;
    const int part = unit / s.q_tiles, first_row = unit % s.q_tiles * Q_TILE, key = key_tile * KV_TILE;
    const int64_t batch = a.bias_stride.head != 0 ? part / a.q_heads : part,
                  head = a.bias_stride.head != 0 ? part % a.q_heads : 0; /* a stride of 0 ignores its number */
    const int piece = lane % pieces, at_once = WARP_THREADS / pieces, rows = min((int)Q_TILE, a.q_len - first_row),
              elements = a.kv_len - key - piece * (CHUNK_BYTES / bytes);
    const char *const first =
        (const char *)a.bias +
        (batch * a.bias_stride.batch + head * a.bias_stride.head + first_row * a.bias_stride.row + key) * bytes +
        piece * CHUNK_BYTES;
    const int64_t row_bytes = a.bias_stride.row * bytes;
    int found = 0;
    if (((uintptr_t)first | (uintptr_t)row_bytes) % CHUNK_BYTES == 0 && elements * bytes >= CHUNK_BYTES)
        found = judge_pieces<Q_TILE / 4>(first, row_bytes, lane / pieces, at_once, rows, a.bias_type);
    else
#pragma unroll 1
        for (int row = lane / pieces; row < rows; row += at_once)
            found |= judge_piece(first + row * row_bytes, elements, a.bias_type);
    return (__any_sync(~0u, found & TILE_SEEN) ? TILE_SEEN : 0) |
           (__any_sync(~0u, found & TILE_CHANGED) ? TILE_CHANGED : 0);
}

/* ---- A query tile, by the warp that has looked at its last key tile ---- */

/* The number of the lowest bit that is 1; some is. */
DEV int lowest_bit(unsigned bits)
{
    return 31 - __clz((int)(bits & (0u - bits)));
}

/* What a query tile's key tiles are together: one, for rows that see no key; key_tiles for both ends of an empty
 * stretch. One look at each, since a look takes as long as L2 takes to answer. */
DEV visible_tiles join_found(const uint8_t *found, int key_tiles, int lane)
{
    visible_tiles joined = {0, key_tiles, key_tiles, 0};
    for (int first = 0; first < key_tiles; first += WARP_THREADS) {
        const int tile = first + lane, is = tile < key_tiles ? __ldcg(found + tile) : 0;
        const unsigned seen = __ballot_sync(~0u, is & TILE_SEEN), changed = __ballot_sync(~0u, is & TILE_CHANGED);
        if (seen == 0 && changed == 0)
            continue;
        if (seen != 0) {
            if (joined.end == 0)
                joined.first = first + lowest_bit(seen);
            joined.end = first + WARP_THREADS - __clz((int)seen);
        }
        unsigned behind = changed; /* of full_first */
        if (joined.full_first == key_tiles && (seen & ~changed) != 0) {
            const int bit = lowest_bit(seen & ~changed);
            joined.full_first = first + bit;
            behind &= ~0u << bit;
        }
        if (joined.full_first < key_tiles && joined.full_end == key_tiles && behind != 0)
            joined.full_end = first + lowest_bit(behind);
    }
    return joined.end != 0 ? joined : visible_tiles{0, 0, 0, 1};
}

/* Key tiles that a rule leaves, without those that a bias hides; of the rule's at least one, all of it masked where the
 * bias hides it. A survey knows nothing of the rule nor of key lengths, so what it sees may lie behind both. */
DEV visible_tiles without_hidden(const visible_tiles &k, const visible_tiles &seen)
{
    visible_tiles left = {min(max(k.first, seen.first), k.end - 1), k.full_first, k.full_end, min(k.end, seen.end)};
    left.end = max(left.end, left.first + 1);
    left.full_first = max(left.full_first, left.first);
    return left;
}

DEV void sum_up(const fwd_args &a, const bias_survey &s, int unit, int lane)
{
    const visible_tiles seen = join_found(s.found + (int64_t)unit * s.key_tiles, s.key_tiles, lane);
    const sequence longest = {0, a.q_len, 0, a.kv_len};
    const visible_tiles left = without_hidden(key_tiles_of(entry_of(a, longest), unit % s.q_tiles * Q_TILE), seen);
    if (lane == 0) {
        s.seen[unit] = seen;
        s.lengths[unit] = left.end - left.first;
    }
}

/* ---- A part, by the warp that has summed up its last query tile ---- */

/* Of query tiles of one length the later ones come first, as under a causal mask. */
DEV void rank_tiles(const bias_survey &s, int part, int lane)
{
    const int of_part = part * s.q_tiles;
    for (int first = 0; first < s.q_tiles; first += WARP_THREADS) {
        const int tile = first + lane, length = tile < s.q_tiles ? __ldcg(s.lengths + of_part + tile) : 0;
        int rank = 0;
        for (int others = 0; others < s.q_tiles; others += WARP_THREADS) {
            const int other = others + lane;
            const int its_length = other < s.q_tiles ? __ldcg(s.lengths + of_part + other) : -1; /* behind all */
#pragma unroll 8
            for (int i = 0; i < WARP_THREADS; i++) {
                const int shown = __shfl_sync(~0u, its_length, i);
                rank += shown > length || (shown == length && others + i > tile);
            }
        }
        if (tile < s.q_tiles) {
            const int4 seen = __ldcg((const int4 *)(s.seen + of_part + tile));
            *(int4 *)(s.ranked + of_part + rank) = seen;
            s.order[of_part + rank] = tile;
        }
    }
}

/* ---- All CTAs ---- */

/* Returns in no CTA before all have come, and what each has written is seen by all. */
DEV void wait_for_all(const bias_survey &s)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned generation = *(volatile unsigned *)s.generation;
        __threadfence();
        if (atomicInc(s.arrived, gridDim.x - 1) == gridDim.x - 1) {
            __threadfence();
            atomicAdd(s.generation, 1);
        } else {
            while (*(volatile unsigned *)s.generation == generation)
                ;
            __threadfence();
        }
    }
    __syncthreads();
}

/* Whether this warp is the last of so many at a counter: then what each has written before is seen by this one. What a
 * warp has written before, lane 0 has, or shows to it. */
DEV bool is_last_warp(unsigned *counter, int warps, int lane)
{
    int is_last = 0;
    __syncwarp();
    if (lane == 0) {
        __threadfence();
        is_last = atomicInc(counter, (unsigned)warps - 1) == (unsigned)warps - 1;
        if (is_last)
            __threadfence();
    }
    return __shfl_sync(~0u, is_last, 0) != 0;
}

/* By all threads of all CTAs. */
DEV void survey_bias(const fwd_args &a)
{
    if (!is_surveyed(a))
        return;
    const bias_survey s = survey_of(a);
    const int lane = threadIdx.x % WARP_THREADS, warps = THREADS / WARP_THREADS;
    const int64_t tiles = (int64_t)s.units * s.key_tiles;
    for (int64_t i = blockIdx.x + (int64_t)gridDim.x * (threadIdx.x / WARP_THREADS); i < tiles;
         i += gridDim.x * warps) {
        const int unit = (int)(i / s.key_tiles), key_tile = (int)(i % s.key_tiles), part = unit / s.q_tiles;
        const int found = look_at_tile(a, s, unit, key_tile, lane);
        if (lane == 0)
            s.found[i] = (uint8_t)found;
        if (is_last_warp(s.looked_at + unit, s.key_tiles, lane)) {
            sum_up(a, s, unit, lane);
            if (is_last_warp(s.summed_up + part, s.q_tiles, lane))
                rank_tiles(s, part, lane);
        }
    }
    wait_for_all(s);
}

/* ---- The queue ---- */

/* Without a mask: batch entries that share a bias take a tile of it side by side, so that DRAM is asked for it once.
 * in_head: tiles of one head. */
DEV void order_by_bias(uint32_t &head, uint32_t &q_tile, const fwd_args &a, uint32_t index, uint32_t in_head)
{
    const uint32_t tile = index / (uint32_t)a.batch, batch = index - tile * (uint32_t)a.batch;
    const uint32_t in_batch = tile / in_head;
    q_tile = tile - in_batch * in_head;
    head = batch * (uint32_t)a.q_heads + in_batch;
}

/* Whether the queue goes so. */
DEV bool shares_bias(const fwd_args &a)
{
    return a.mask == FWD_MASK_NONE && a.bias != nullptr && a.bias_stride.batch == 0;
}

/* find_queue_section (tile_scheduler.cuh). */
DEV uint32_t find_surveyed_section(const fwd_args &a, int elem_bytes)
{
    if (!is_surveyed(a))
        return find_queue_section(a, elem_bytes);
    return find_section_heads(a, a.kv_len, count_head_units(a) * (uint32_t)a.batch, elem_bytes);
}

/* Tile number `index` of the queue, and what the survey says of it; without one, that anything may be seen and
 * changed. */
DEV work_tile find_surveyed_tile(const fwd_args &a, uint32_t index, uint32_t section_heads, visible_tiles &surveyed)
{
    surveyed = {0, 0, 0, INT_MAX};
    if (!is_surveyed(a)) {
        if (!shares_bias(a))
            return tile_in_section(a, index, section_heads);
        uint32_t head, q_tile;
        order_by_bias(head, q_tile, a, index, count_q_tiles(a.q_len));
        return tile_of_queue(a, head, q_tile);
    }
    const bias_survey s = survey_of(a);
    const bool has_parts = a.bias_stride.batch != 0, has_heads = a.bias_stride.head != 0;
    uint32_t head, rank;
    order_in_sections(head, rank, index, (uint32_t)s.q_tiles, (uint32_t)(a.q_heads * a.batch), section_heads);
    const uint32_t batch = head / (uint32_t)a.q_heads, in_batch = head - batch * (uint32_t)a.q_heads;
    const uint32_t part = has_parts ? has_heads ? head : batch : has_heads ? in_batch : 0;
    const uint32_t at = part * (uint32_t)s.q_tiles + rank;
    const int4 seen = __ldcg((const int4 *)(s.ranked + at));
    surveyed = {seen.x, seen.y, seen.z, seen.w};
    return tile_of_queue(a, head, (uint32_t)__ldcg(s.order + at));
}

#endif
