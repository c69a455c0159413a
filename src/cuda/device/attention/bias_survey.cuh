/* Which key tiles of a mask are hidden whole, and which change no score: all CTAs look at it together before any of
 * them begins with its work, so that hidden tiles cost neither loads nor products. What all heads share is looked at
 * once.
 * Biases that differ from head to head are no masks as a rule, and are not looked at.
 *
 * CTAs wait for each other: a launch has no more of them than run at once. The workspace holds, behind the queue's
 * counter, what they tell each other; all of it is 0 at first, and its counters wrap back to 0.
 *
 * An includer defines Q_TILE, KV_TILE and THREADS. */
#ifndef ACR_DEVICE_ATTENTION_BIAS_SURVEY_CUH
#define ACR_DEVICE_ATTENTION_BIAS_SURVEY_CUH

#include <limits.h>

#include "cuda/device/attention/bias_survey.h"
#include "cuda/device/attention/scores.cuh"
#include "cuda/device/attention/tile_scheduler.cuh"
#include "cuda/device/isa/copy.cuh"

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
    int q_tiles, key_tiles;                     /* of one entry and head */
    int units;                                  /* query tiles in all */
    unsigned *arrived, *generation, *looked_at; /* of CTAs; of each query tile: its key tiles */
    visible_tiles *seen;                        /* of each query tile: outside [first, end) all is hidden, and in
                                                   [full_first, full_end) nothing changes a score */
    uint8_t *found;                             /* of each of its key tiles: TILE_* */
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
    s.looked_at = (unsigned *)(s.seen + s.units);
    s.found = (uint8_t *)(s.looked_at + s.units);
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

/* Four bytes or two numbers at once. */
DEV int judge_word(uint32_t word, int type)
{
    if (type == FWD_BIAS_MASK)
        return (word != 0 ? TILE_SEEN : 0) | (((word - 0x01010101u) & ~word & 0x80808080u) != 0 ? TILE_CHANGED : 0);
    return (word != (type == FWD_BIAS_BF16 ? 0xff80ff80u : 0xfc00fc00u) ? TILE_SEEN : 0) |
           ((word & 0x7fff7fffu) != 0 ? TILE_CHANGED : 0);
}

/* Of so many elements of a row, the last of a piece of 16 bytes that may be cut. */
DEV int judge_piece(const char *from, int elements, int type, bool is_aligned)
{
    const int bytes = bias_elem_bytes(type);
    if (is_aligned && elements * bytes >= CHUNK_BYTES) {
        const uint4 words = *(const uint4 *)from;
        return judge_word(words.x, type) | judge_word(words.y, type) | judge_word(words.z, type) |
               judge_word(words.w, type);
    }
    int found = 0;
    for (int i = 0; i < min(elements, CHUNK_BYTES / bytes); i++)
        found |= judge_element(bytes == 1 ? load_bits<1>(from + i) : load_bits<2>(from + 2 * i), type);
    return found;
}

DEV int look_at_tile(const fwd_args &a, const bias_survey &s, int unit, int key_tile, int lane)
{
    const int bytes = bias_elem_bytes(a.bias_type), pieces = KV_TILE * bytes / CHUNK_BYTES;
    const int part = unit / s.q_tiles, first_row = unit % s.q_tiles * Q_TILE, key = key_tile * KV_TILE;
    const int64_t batch = a.bias_stride.head != 0 ? part / a.q_heads : part,
                  head = a.bias_stride.head != 0 ? part % a.q_heads : 0; /* a stride of 0 ignores its number */
    const char *const from =
        (const char *)a.bias +
        (batch * a.bias_stride.batch + head * a.bias_stride.head + first_row * a.bias_stride.row + key) * bytes;
    const int64_t row_bytes = a.bias_stride.row * bytes;
    const bool is_aligned = ((uintptr_t)from | (uintptr_t)row_bytes) % CHUNK_BYTES == 0;
    const int rows = min((int)Q_TILE, a.q_len - first_row), piece = lane % pieces,
              elements = a.kv_len - key - piece * (CHUNK_BYTES / bytes);
    int found = 0;
#pragma unroll 4
    for (int row = lane / pieces; row < rows; row += WARP_THREADS / pieces)
        found |= judge_piece(from + row * row_bytes + piece * CHUNK_BYTES, elements, a.bias_type, is_aligned);
    return (__any_sync(~0u, found & TILE_SEEN) ? TILE_SEEN : 0) |
           (__any_sync(~0u, found & TILE_CHANGED) ? TILE_CHANGED : 0);
}

/* ---- A query tile, by the warp that has looked at its last key tile ---- */

/* The number of the lowest bit that is 1; some is. */
DEV int lowest_bit(unsigned bits)
{
    return 31 - __clz((int)(bits & (0u - bits)));
}

/* The first key tile from `from` on whose bits among `mask` are `bits`; key_tiles where there is none. */
DEV int find_tile(const uint8_t *found, int from, int key_tiles, int mask, int bits, int lane)
{
    for (int first = from; first < key_tiles; first += WARP_THREADS) {
        const int tile = first + lane;
        const unsigned hits = __ballot_sync(~0u, tile < key_tiles && (__ldcg(found + tile) & mask) == bits);
        if (hits != 0)
            return first + lowest_bit(hits);
    }
    return key_tiles;
}

/* The last one that some row sees; one before it, `from`, is seen. */
DEV int find_last(const uint8_t *found, int from, int key_tiles, int lane)
{
    for (int last = key_tiles - 1; last > from; last -= WARP_THREADS) {
        const int tile = last - lane;
        const unsigned hits = __ballot_sync(~0u, tile > from && (__ldcg(found + tile) & TILE_SEEN) != 0);
        if (hits != 0)
            return last - lowest_bit(hits);
    }
    return from;
}

DEV void sum_up(const bias_survey &s, int unit, int lane)
{
    const uint8_t *const found = s.found + (int64_t)unit * s.key_tiles;
    visible_tiles seen = {0, 0, 0, 1}; /* one tile, for rows that see no key */
    const int first = find_tile(found, 0, s.key_tiles, TILE_SEEN, TILE_SEEN, lane);
    if (first < s.key_tiles) {
        seen.first = first;
        seen.end = find_last(found, first, s.key_tiles, lane) + 1;
        seen.full_first = find_tile(found, first, s.key_tiles, TILE_SEEN | TILE_CHANGED, TILE_SEEN, lane);
        seen.full_end = find_tile(found, seen.full_first, s.key_tiles, TILE_CHANGED, TILE_CHANGED, lane);
    }
    if (lane == 0)
        s.seen[unit] = seen;
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

/* By all threads of all CTAs. */
DEV void survey_bias(const fwd_args &a)
{
    if (!is_surveyed(a))
        return;
    const bias_survey s = survey_of(a);
    const int lane = threadIdx.x % WARP_THREADS, warps = THREADS / WARP_THREADS;
    const int64_t tiles = (int64_t)s.units * s.key_tiles;
    for (int64_t i = (int64_t)blockIdx.x * warps + threadIdx.x / WARP_THREADS; i < tiles; i += gridDim.x * warps) {
        const int unit = (int)(i / s.key_tiles), key_tile = (int)(i % s.key_tiles);
        const int found = look_at_tile(a, s, unit, key_tile, lane);
        int is_last = 0;
        if (lane == 0) {
            s.found[i] = (uint8_t)found;
            __threadfence();
            is_last = atomicInc(s.looked_at + unit, s.key_tiles - 1) == s.key_tiles - 1;
        }
        if (__shfl_sync(~0u, is_last, 0)) {
            __threadfence();
            sum_up(s, unit, lane);
        }
    }
    wait_for_all(s);
}

/* What the survey says of a query tile; without one, that anything may be seen and changed. */
DEV visible_tiles find_surveyed(const fwd_args &a, const work_tile &t)
{
    if (!is_surveyed(a))
        return {0, 0, 0, INT_MAX};
    const bias_survey s = survey_of(a);
    const int part = (a.bias_stride.batch != 0 ? t.batch : 0) * (a.bias_stride.head != 0 ? a.q_heads : 1) +
                     (a.bias_stride.head != 0 ? t.head : 0);
    const int4 seen = __ldcg((const int4 *)(s.seen + part * s.q_tiles + t.q_first / Q_TILE));
    return {seen.x, seen.y, seen.z, seen.w};
}

/* Key tiles that the rule leaves, without those that a bias hides; of the rule's at least one, all of it masked where
 * the bias hides it. A survey knows nothing of the rule nor of key lengths, so what it sees may lie behind both. */
DEV visible_tiles without_hidden(const visible_tiles &k, const visible_tiles &seen)
{
    visible_tiles left = {min(max(k.first, seen.first), k.end - 1), k.full_first, k.full_end, min(k.end, seen.end)};
    left.end = max(left.end, left.first + 1);
    left.full_first = max(left.full_first, left.first);
    return left;
}

#endif
