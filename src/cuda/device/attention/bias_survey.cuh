/* Which key tiles of a mask are hidden whole, and which change no score: all CTAs look at it together, so that hidden
 * tiles cost neither loads nor products. What all heads share is looked at once.
 * Biases that differ from head to head are no masks as a rule, and are not looked at.
 *
 * What is left of a query tile says how long it takes: the queue goes by it, longest first (find_surveyed_tile). In the
 * order of the rows a causal mask's longest tiles would be the last ones, and CTAs would wait for them. But a head's
 * last query tiles come first, whatever is left of them: as many as CTAs have for their first work tiles (survey_plan).
 * So a CTA begins when those have been looked at, by all warps, and all CTAs have met (survey_first, meet_others); the
 * others are looked at by one warp of each CTA, and ranked, under the first work tiles (survey_rest), and who takes a
 * second one waits for that (wait_for_ranks). Where that is too much for one warp, all are looked at first.
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
#include "cuda/device/isa/shared.cuh"

enum {
    TILE_SEEN = 1,   /* some row sees some key */
    TILE_CHANGED = 2 /* some element hides its key or changes its score */
};

/* Loads of 16 bytes that a lane has under way at once: one after another a tile's would take 32 times as long as DRAM
 * takes to answer. The warp that looks beside the others' work has few registers. */
enum {
    LOADS_FIRST = 32,
    LOADS_BESIDE = 8,
    TILES_BESIDE = 8 /* of a CTA at most, that one warp looks at */
};

DEV bool is_surveyed(const fwd_args &a)
{
    return a.bias != nullptr && survey_is_wanted(a.bias_type, a.bias_stride.head);
}

/* Whether, without a survey and a mask, batch entries take a tile of a bias that they share side by side
 * (order_by_bias). */
DEV bool shares_bias(const fwd_args &a)
{
    return a.mask == FWD_MASK_NONE && a.bias != nullptr && a.bias_stride.batch == 0;
}

/* What CTAs tell each other, in the workspace behind the queue's counter. */
typedef struct survey_counters {
    unsigned queue;
    unsigned arrived, generation; /* of CTAs */
    unsigned ranked_parts, ready; /* parts that are ranked; launches in which all were */
} survey_counters;

/* A query tile of one entry and head that the bias tells apart; all of one entry and head are a part of the bias. */
typedef struct surveyed_unit {
    visible_tiles seen; /* outside [first, end) all is hidden, and in [full_first, full_end) nothing changes a score */
    visible_tiles ranked; /* the same of the query tile that has this one's number when they are ranked: the one with
                             most key tiles first, but for the fixed ones */
    int order;            /* which one that is */
    int length;           /* the key tiles that the rule and the bias leave together */
    unsigned looked_at;   /* of its key tiles */
    unsigned summed_up;   /* in the first one of a part: of its query tiles */
} surveyed_unit;
static_assert(sizeof(survey_counters) <= SURVEY_SEEN_AT && sizeof(surveyed_unit) == SURVEY_UNIT_BYTES,
              "bias_survey.h says how long they are");

typedef struct bias_survey {
    int q_tiles, key_tiles; /* of a part */
    int units;              /* query tiles in all */
    surveyed_unit *unit;
    uint8_t *found; /* of each key tile of a query tile: TILE_* */
} bias_survey;

DEV survey_counters *survey_counters_of(const fwd_args &a)
{
    return (survey_counters *)a.workspace;
}

DEV bias_survey survey_of(const fwd_args &a)
{
    bias_survey s;
    s.q_tiles = (int)count_q_tiles(a.q_len);
    s.key_tiles = (a.kv_len + KV_TILE - 1) / KV_TILE;
    s.units = s.q_tiles * (a.bias_stride.batch != 0 ? a.batch : 1) * (a.bias_stride.head != 0 ? a.q_heads : 1);
    s.unit = (surveyed_unit *)((char *)a.workspace + SURVEY_SEEN_AT);
    s.found = (uint8_t *)(s.unit + s.units);
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
template <int LOADS>
DEV int judge_pieces(const char *first, int64_t row_bytes, int row, int at_once, int rows, int type)
{
    words_judge j = judge_of(type);
    static_assert(Q_TILE / 4 % LOADS == 0, "LOADS: a lane's pieces are a multiple");
#pragma unroll 1
    for (int n = 0; n < Q_TILE / at_once; n += LOADS) {
        uint4 words[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            words[i] = *(const uint4 *)(first + min(row + (n + i) * at_once, rows - 1) * row_bytes);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            judge_word(j, words[i].x);
            judge_word(j, words[i].y);
            judge_word(j, words[i].z);
            judge_word(j, words[i].w);
        }
    }
    return (j.differs != 0 ? TILE_SEEN : 0) | ((j.changed & j.changes) != 0 ? TILE_CHANGED : 0);
}

/* HAS_PIECES: has_whole_pieces. */
template <int LOADS, bool HAS_PIECES>
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
    if (HAS_PIECES) {
        if (elements > 0)
            found = judge_pieces<LOADS>(first, row_bytes, lane / pieces, at_once, rows, a.bias_type);
    } else if (((uintptr_t)first | (uintptr_t)row_bytes) % CHUNK_BYTES == 0 && elements * bytes >= CHUNK_BYTES)
        found = judge_pieces<LOADS>(first, row_bytes, lane / pieces, at_once, rows, a.bias_type);
    else
#pragma unroll 1
        for (int row = lane / pieces; row < rows; row += at_once)
            found |= judge_piece(first + row * row_bytes, elements, a.bias_type);
    return (__any_sync(~0u, found & TILE_SEEN) ? TILE_SEEN : 0) |
           (__any_sync(~0u, found & TILE_CHANGED) ? TILE_CHANGED : 0);
}

/* Whether all of the bias that there is lies in pieces of 16 bytes. */
DEV bool has_whole_pieces(const fwd_args &a)
{
    const int64_t elements = a.bias_stride.batch | a.bias_stride.head | a.bias_stride.row | a.kv_len;
    return ((int64_t)(uintptr_t)a.bias | elements * bias_elem_bytes(a.bias_type)) % CHUNK_BYTES == 0;
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
        s.unit[unit].seen = seen;
        s.unit[unit].length = left.end - left.first;
    }
}

/* ---- A part, by the warp that has summed up its last query tile ---- */

/* fixed: survey_plan. Of query tiles of one length the later ones come first, as under a causal mask. */
DEV void rank_tiles(const bias_survey &s, int part, int fixed, int lane)
{
    const int of_part = part * s.q_tiles, first_fixed = s.q_tiles - fixed;
#pragma unroll 1
    for (int first = 0; first < s.q_tiles; first += WARP_THREADS) {
        const int tile = first + lane;
        const int length = tile < first_fixed ? __ldcg(&s.unit[of_part + tile].length) : INT_MAX;
        int rank = 0;
#pragma unroll 1
        for (int others = 0; others < s.q_tiles; others += WARP_THREADS) {
            const int other = others + lane;
            const int its_length = other < first_fixed ? __ldcg(&s.unit[of_part + other].length)
                                   : other < s.q_tiles ? INT_MAX
                                                       : -1; /* behind all */
#pragma unroll 8
            for (int i = 0; i < WARP_THREADS; i++) {
                const int shown = __shfl_sync(~0u, its_length, i);
                rank += shown > length || (shown == length && others + i > tile);
            }
        }
        if (tile < s.q_tiles) {
            const int4 seen = __ldcg((const int4 *)&s.unit[of_part + tile].seen);
            *(int4 *)&s.unit[of_part + rank].ranked = seen;
            s.unit[of_part + rank].order = tile;
        }
    }
}

/* ---- All CTAs ---- */

/* Of the queue: what sections go by (find_surveyed_tile). */
DEV uint32_t find_surveyed_section(const fwd_args &a, int elem_bytes)
{
    if (is_surveyed(a))
        return find_section_heads(a, a.kv_len, count_head_units(a) * (uint32_t)a.batch, elem_bytes);
    if (shares_bias(a))
        return min((find_section_heads(a, a.kv_len, INT_MAX, elem_bytes) - 1) / (uint32_t)a.group + 1,
                   (uint32_t)a.batch);
    return find_queue_section(a, elem_bytes);
}

/* By one thread, before all others read it. */
DEV void plan_survey(survey_plan &p, const fwd_args &a, int elem_bytes)
{
    p.section_heads = find_surveyed_section(a, elem_bytes);
    if (!is_surveyed(a))
        return;
    const bias_survey s = survey_of(a);
    p.fixed = min((int)((gridDim.x - 1) / p.section_heads) + 1, s.q_tiles);
    const bool is_too_much = !has_whole_pieces(a) || (int64_t)s.units * s.key_tiles > (int64_t)TILES_BESIDE * gridDim.x;
    p.first = is_too_much ? s.q_tiles : p.fixed;
}

/* Read each time. */
DEV survey_plan read_plan(const survey_plan &p)
{
    const uint4 x = load_shared_4(smem_address(&p));
    return {x.x, (int)x.y, (int)x.z, x.w};
}

/* Returns in no CTA before all have come, and what each has written is seen by all. */
DEV void wait_for_all(survey_counters *c, survey_plan &plan)
{
    if (threadIdx.x == 0) {
        const unsigned generation = *(volatile unsigned *)&c->generation;
        plan.ready = *(volatile unsigned *)&c->ready;
        __threadfence();
        if (atomicInc(&c->arrived, gridDim.x - 1) == gridDim.x - 1) {
            __threadfence();
            atomicAdd(&c->generation, 1);
        } else {
            while (*(volatile unsigned *)&c->generation == generation)
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

/* Which part of the bias a head of the queue has. */
DEV uint32_t part_of(const fwd_args &a, uint32_t head)
{
    const uint32_t batch = head / (uint32_t)a.q_heads, in_batch = head - batch * (uint32_t)a.q_heads;
    const bool has_heads = a.bias_stride.head != 0;
    return a.bias_stride.batch != 0 ? has_heads ? head : batch : has_heads ? in_batch : 0;
}

/* The CTA's first work tile, if there is a survey. Nothing has to be looked at before. */
DEV work_tile find_first_tile(const fwd_args &a, const survey_plan &plan)
{
    const uint32_t q_tiles = count_q_tiles(a.q_len);
    uint32_t head, rank;
    order_in_sections(head, rank, blockIdx.x, q_tiles, (uint32_t)(a.q_heads * a.batch), read_plan(plan).section_heads);
    return tile_of_queue(a, head, q_tiles - 1 - rank);
}

/* By all threads: looks at the CTA's share of what is looked at first. The last warps have some first: the first one
 * has something else to do. */
DEV void survey_first(const fwd_args &a, const survey_plan &plan)
{
    const bias_survey s = survey_of(a);
    const int lane = threadIdx.x % WARP_THREADS, warp = threadIdx.x / WARP_THREADS, warps = THREADS / WARP_THREADS;
    const uint32_t looked = (uint32_t)read_plan(plan).first, key_tiles = (uint32_t)s.key_tiles,
                   tiles = (uint32_t)(s.units / s.q_tiles) * looked * key_tiles;
#pragma unroll 1
    for (uint32_t i = blockIdx.x + gridDim.x * (uint32_t)(warps - 1 - warp); i < tiles; i += gridDim.x * warps) {
        const uint32_t number = i / key_tiles, key_tile = i - number * key_tiles, part = number / looked;
        const int unit = (int)((part + 1) * s.q_tiles - looked + (number - part * looked));
        const int found = look_at_tile<LOADS_FIRST, false>(a, s, unit, (int)key_tile, lane);
        if (lane == 0)
            s.found[(int64_t)unit * s.key_tiles + key_tile] = (uint8_t)found;
    }
    __syncthreads();
}

/* By all threads, behind it: waits for the other CTAs, and returns to thread 0 what the survey says of the first work
 * tile. */
DEV visible_tiles meet_others(const fwd_args &a, survey_plan &plan)
{
    wait_for_all(survey_counters_of(a), plan);
    visible_tiles surveyed = {};
    if (threadIdx.x < WARP_THREADS) {
        const bias_survey s = survey_of(a);
        uint32_t head, rank;
        order_in_sections(head, rank, blockIdx.x, (uint32_t)s.q_tiles, (uint32_t)(a.q_heads * a.batch),
                          read_plan(plan).section_heads);
        const int unit = (int)(part_of(a, head) + 1) * s.q_tiles - 1 - (int)rank;
        surveyed = join_found(s.found + (int64_t)unit * s.key_tiles, s.key_tiles, (int)threadIdx.x);
    }
    return surveyed;
}

/* By one warp of each CTA, behind survey_first and beside the others' work: looks at the key tiles that are left, sums
 * up query tiles, ranks a part behind its last one, and says so behind the last part. */
DEV void survey_rest(const fwd_args &a, const survey_plan &plan)
{
    const int lane = threadIdx.x % WARP_THREADS;
#pragma unroll 1
    for (int i = (int)blockIdx.x;; i += (int)gridDim.x) {
        int unit, key_tile = -1; /* a query tile that has been looked at, or a key tile of another */
        {
            const bias_survey s = survey_of(a);
            const int looked = read_plan(plan).first, rest = s.q_tiles - looked, parts = s.units / s.q_tiles,
                      whole = parts * looked;
            if (i < whole) {
                const int part = i / looked;
                unit = part * s.q_tiles + rest + i - part * looked;
            } else {
                unit = (i - whole) / s.key_tiles;
                key_tile = i - whole - unit * s.key_tiles;
                if (unit >= parts * rest)
                    break;
                unit += unit / rest * looked;
            }
        }
        if (key_tile >= 0) {
            const int found = look_at_tile<LOADS_BESIDE, true>(a, survey_of(a), unit, key_tile, lane);
            const bias_survey s = survey_of(a);
            if (lane == 0)
                s.found[unit * s.key_tiles + key_tile] = (uint8_t)found;
            if (!is_last_warp(&s.unit[unit].looked_at, s.key_tiles, lane))
                continue;
        }
        const bias_survey s = survey_of(a);
        sum_up(a, s, unit, lane);
        const int part = unit / s.q_tiles;
        if (!is_last_warp(&s.unit[part * s.q_tiles].summed_up, s.q_tiles, lane))
            continue;
        rank_tiles(s, part, read_plan(plan).fixed, lane);
        if (is_last_warp(&survey_counters_of(a)->ranked_parts, s.units / s.q_tiles, lane) && lane == 0)
            atomicAdd(&survey_counters_of(a)->ready, 1);
    }
}

/* By a producer before its second work tile. */
DEV void wait_for_ranks(const fwd_args &a, const survey_plan &plan)
{
    const unsigned ready = read_plan(plan).ready;
    while (*(volatile unsigned *)&survey_counters_of(a)->ready == ready)
        ;
    __threadfence();
}

/* ---- The queue ---- */

/* Without a mask: batch entries that share a bias take a tile of it side by side, so that DRAM is asked for it once.
 * entries: so many at most, whose keys and values
 * of a head fit L2 together. in_head: tiles of one head. */
DEV void order_by_bias(uint32_t &head, uint32_t &q_tile, const fwd_args &a, uint32_t index, uint32_t in_head,
                       uint32_t entries)
{
    const uint32_t of_entry = (uint32_t)a.q_heads * in_head, section = index / (entries * of_entry),
                   in_section = index - section * entries * of_entry,
                   here = min(entries, (uint32_t)a.batch - section * entries);
    const uint32_t tile = in_section / here, entry = section * entries + in_section - tile * here,
                   in_entry = tile / in_head;
    q_tile = tile - in_entry * in_head;
    head = entry * (uint32_t)a.q_heads + in_entry;
}

/* Tile number `index` of the queue, and what the survey says of it; without one, that anything may be seen and
 * changed. Not of a CTA's first tile, if there is a survey. */
DEV work_tile find_surveyed_tile(const fwd_args &a, uint32_t index, const survey_plan &plan, visible_tiles &surveyed)
{
    const uint32_t section_heads = read_plan(plan).section_heads;
    const uint32_t q_tiles = count_q_tiles(a.q_len);
    uint32_t head, rank;
    if (!is_surveyed(a)) {
        surveyed = {0, 0, 0, INT_MAX};
        if (!shares_bias(a))
            return tile_in_section(a, index, section_heads);
        order_by_bias(head, rank, a, index, q_tiles, section_heads);
        return tile_of_queue(a, head, rank);
    }
    const bias_survey s = survey_of(a);
    order_in_sections(head, rank, index, q_tiles, (uint32_t)(a.q_heads * a.batch), section_heads);
    const surveyed_unit *ranked = s.unit + part_of(a, head) * q_tiles + rank;
    const int4 seen = __ldcg((const int4 *)&ranked->ranked);
    surveyed = {seen.x, seen.y, seen.z, seen.w};
    return tile_of_queue(a, head, (uint32_t)__ldcg(&ranked->order));
}

#endif
