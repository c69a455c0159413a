/* Backward attention on Hopper's warpgroup tensor cores, fp16 and bf16, sm_90a.
 *
 * Three kernels, one after the other. NAME_prepare: D = rowsum(dO * O) and LSE in powers of two. NAME: a CTA owns 128
 * keys of a key head (DIM 256: 64) and visits the query tiles that see them, of all query heads of the group: dK and dV
 * stay in registers, so nothing of them is ever summed between CTAs. dQ is summed in float32 in the workspace, in the
 * order of the key tiles: a tile's count of visits says whose turn it is, and so every run gives the same bits.
 * NAME_finish: scales dQ and converts it to the output's type, where the CTAs that have no more work have not
 * (converted_dq.cuh), and sums the gradients of sinks.
 *
 * Two consumer warpgroups: own_keys.cuh and, of DIM 256, shared_keys.cuh say how they divide the products. Scores are
 * computed transposed, keys by queries: then P and dS are in the registers that the products P^T * dO and dS^T * Q take
 * them from; dS goes through shared memory for dQ = dS * K alone, which is issued a query tile later, so that the
 * warpgroups may be half a tile apart. After Dao 2023 (FlashAttention-2's loop over keys outside) and Shah et al. 2024.
 * See README.md.
 *
 * Parameters: DIM (64, 128 or 256; dims up to it, zero-padded), Q_TILE (128 for DIM 64, else 64), optional BF16=1,
 * PACKED=1 (packed batches alone), TERMS (FWD_TERM_CAP, or 0, or FWD_TERM_BIAS: boolean masks alone with PAIR=1, else
 * biases of 16 bits alone), HEADS_MEMORY (KB of Q, dO and dQ that the heads at work may take of L2), DQ_RED=1 (dQ goes
 * to global memory from registers, direct_dq.cuh), PAIR=1 (two CTAs sum dQ of their keys together, paired_keys.cuh or,
 * of DIM 256 and with DQ_RED=1, paired_dims.cuh).
 *
 * PARAMETERS: DIM Q_TILE BF16=0 PACKED=0 TERMS=0 HEADS_MEMORY=32768 DQ_RED=0 PAIR=0 */
#include "cuda/device/attention/parameters.h"

#ifndef PACKED
#define PACKED 0
#endif
#ifndef HEADS_MEMORY
#define HEADS_MEMORY 32768
#endif
#ifndef DQ_RED
#define DQ_RED 0
#endif
#ifndef PAIR
#define PAIR 0
#endif
/* Both warpgroups have the same keys: dK and dV of 128 do not fit the register file. */
#define SHARED_KEYS (DIM == 256)
/* K and V of a warpgroup as fragments, read from shared memory once a work tile; other lines lack the registers. */
#define KEYS_IN_REGISTERS (DIM == 64 && ((TERMS) == 0 || ((TERMS) == 4 && PAIR)))
/* Boolean masks, packed as bits by the first kernel, and biases of 16 bits, packed in pairs (packed_bias.cuh). */
#define MASK_BITS (((TERMS)&4) != 0 && PAIR)
#define NARROW_BIASES (((TERMS)&4) != 0 && !PAIR)
/* A pair loads query tiles once for both CTAs. To 128 dims that brought nothing. */
#define SHARED_QUERIES (PAIR && SHARED_KEYS)
/* dQ takes V's place in shared memory: none is left before both warpgroups have stored dS, and so have read V. */
#define DQ_OVER_V (PAIR && KEYS_IN_REGISTERS)
/* Of the four blocks of 64 keys of a pair the first CTA owns the first and the last, the second those between: under a
 * causal mask both then see as much. */
#define SPREAD_KEYS (PAIR && !SHARED_KEYS)
/* Where all rows see all keys, CTAs without work convert dQ. Lines without pairs, and those with a softcap, lose 1 %
 * under a causal mask by it (lab.md). */
#define CONVERTED_DQ (PAIR && !PACKED && !(TERMS))
#include <stddef.h>

#include "cuda/kernels/bwd_wgmma/workspace.h"

enum {
    ELEM_BYTES = 2,
    PANEL_ELEMS = 64, /* tiles are stored in panels of 128-byte rows, as the swizzle wants it */
    PANEL_ROW_BYTES = PANEL_ELEMS * ELEM_BYTES,
    PANELS = DIM / PANEL_ELEMS,
    GROUP_KEYS = 64, /* of a consumer warpgroup */
    CONSUMERS = 2,
    ADDERS = 2, /* threads that add dQ up, one even and one odd visits' */
    KV_TILE = (SHARED_KEYS ? 1 : CONSUMERS) * GROUP_KEYS,
    BOX_KEYS = SPREAD_KEYS ? GROUP_KEYS : KV_TILE, /* that the copy engine brings at a time */
    WORK_CTAS = PAIR ? 2 : 1,                      /* of a work tile: a cluster, each with a key tile */
    WORK_KEYS = WORK_CTAS * KV_TILE,
    THREADS = 128 * (CONSUMERS + 1),
    STAGES = 2,     /* of Q and dO */
    WORK_SLOTS = 3, /* of work tiles: the producer is at the next one, sums of the one before are stored */
    DS_STAGES = SHARED_KEYS ? 1 : 2, /* of dS: warpgroups may be that far apart */
    KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES,
    Q_PANEL_BYTES = Q_TILE * PANEL_ROW_BYTES,
    KV_BYTES = PANELS * KV_PANEL_BYTES,
    Q_BYTES = PANELS * Q_PANEL_BYTES,
    DS_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES, /* 64 queries of each key */
    DS_BYTES = Q_TILE / PANEL_ELEMS * DS_PANEL_BYTES,
    PARTNER_PANELS = SHARED_KEYS ? CONSUMERS : 1, /* of the other CTA's K: of the dims whose dQ this one sums */
    PARTNER_BYTES = PAIR ? PARTNER_PANELS * KV_PANEL_BYTES : 0,
    PART_QUERIES = 64,                   /* whose scores a warpgroup has in registers at a time */
    QUERY_PARTS = Q_TILE / PART_QUERIES, /* that a warpgroup visits of a tile */
    /* dP's product is asked for behind so many columns of eight exponentials, and dV's behind the score gradients: the
     * warps would wait for the tensor cores to take either before they go on. With a softcap no registers are left for
     * that. */
    ASKS_LATE = (TERMS) % 2 == 0,
    BEFORE_DP = ASKS_LATE ? 2 : 0,
    DQ_PART_FLOATS = 64 * 64, /* of dQ that a warpgroup computes at once: 64 rows of DIM 64, else 64 columns */
    DQ_PARTS = Q_TILE * DIM / DQ_PART_FLOATS, /* of a tile: the warpgroups' first ones, then their second ones */
    DQ_ROUNDS = SHARED_KEYS && PAIR > 0 ? 1 : DQ_PARTS / CONSUMERS, /* of a visit: parts that a warpgroup computes */
    DQ_BUFFERS = SHARED_KEYS || PAIR > 0 ? 1 : CONSUMERS,           /* one: the warpgroups take turns */
    STATS_BYTES = 2 * Q_TILE * 4,
    DQ_PLACES = 2,                   /* visits of whose dQ consumers may know where it goes */
    BIAS_WORDS = MASK_BITS ? 1 : 16, /* of a thread's scores of a part */
    MARKS = MASK_BITS ? 2 : 0,       /* of a group of keys and a query tile: whether a mask leaves any pair */
    CONVERTING_CTAS = 72
};

/* What the visits of a work tile are to a warpgroup's keys (SPREAD_KEYS), by their numbers: up to whole_end they are
 * done whole, up to cut_end no row of the query tile's first half sees a key, and then no row does. From plain_first up
 * to plain_end all rows see all keys. */
typedef struct group_visits {
    int32_t whole_end, cut_end, plain_first, plain_end;
} group_visits;

/* What the producer tells of a work tile: its keys, and the query tiles that see one of them. Each is visited for all
 * heads of the group before the next one: if heads came first, the last key tile under a causal mask, with two query
 * tiles a head, would have to wait with each head for the first key tile's sums of the head before. */
typedef struct key_work {
    int32_t kv_tile; /* the CTA's, see key_of; -1: there is no more work */
#if MASK_BITS
    int32_t made;          /* visits of which the mask leaves a pair: the others are left out */
    const uint32_t *marks; /* of the work tile's query tiles, of the first head (packed_bias.cuh) */
    int32_t marks_of_head; /* how far those of the next one are behind them */
    int32_t words_of_tile; /* the same of the mask's words */
    const uint32_t *words;
    int64_t words_of_head;
#endif
    int32_t kv_head, entry;
    int32_t q_begin, q_len, kv_begin, kv_len;
    int32_t tile_first, tile_end; /* query tiles of the entry, visited from the last to the first */
#if SPREAD_KEYS
    uint32_t round; /* of which it is the work */
    group_visits groups[CONSUMERS];
#else
    int32_t full_first, full_end; /* of them, those whose rows all see all keys of the tile */
#endif
} key_work;

/* Where the dQ of a visit goes; the first 16 bytes are for the consumers. */
typedef struct dq_place {
    float *dq;
    int32_t adds; /* to what is there, or stores */
    int32_t turn; /* of the query tile's key tiles, or why there are no turns */
    int32_t *visits;
    int32_t unused[2];
} dq_place;

/* Whether dQ is converted before the last kernel (converted_dq.cuh): where every row sees all keys, and at least one,
 * nothing is to be fixed behind, and in the order of key tiles everybody knows when sums are complete. Few CTAs are
 * slower at it than all that the last kernel has. */
VISIBLE_FUNCTION int bwd_converts(int is_limited, int has_lengths, int atomics, uint32_t ctas)
{
    return CONVERTED_DQ && !is_limited && !has_lengths && !atomics && ctas >= CONVERTING_CTAS;
}

/* What a query head has in the workspace of one of its tiles. */
typedef struct tile_results {
    int32_t *visits; /* of a pair, one for each of its CTAs */
    float *stats, *dq;
} tile_results;

/* Of a visit, for a warpgroup, under a boolean mask. */
typedef struct visit_note {
    const uint32_t *words; /* of its keys (packed_bias.cuh) */
    int32_t number;        /* among those that the rule lets see the work tile's keys */
    int32_t first_part;    /* the first part of the query tile of which a row sees one of its keys, or QUERY_PARTS */
} visit_note;

/* What lies where in shared memory; the device's loads want each tile at a multiple of 1024 bytes. */
typedef struct shared_memory {
    uint8_t k[KV_BYTES];
#if DQ_OVER_V
    union {
        uint8_t v[KV_BYTES];
        float dq[DQ_BUFFERS][DQ_PART_FLOATS];
    };
#else
    uint8_t v[KV_BYTES];
#endif
#if PAIR
    uint8_t partner_k[PARTNER_BYTES]; /* the other CTA's keys, of the dims whose dQ this one sums */
#endif
    uint8_t q[STAGES][Q_BYTES], d_o[STAGES][Q_BYTES];
    uint8_t ds[DS_STAGES][DS_BYTES];
#if SHARED_KEYS && PAIR
    union { /* P has been read before dS of the same visit comes, whose dQ has ended before the next P */
        uint8_t p[DS_BYTES];
        uint8_t partner_ds[DS_STAGES][DS_PANEL_BYTES];
    };
#elif PAIR
    uint8_t partner_ds[DS_STAGES][DS_PANEL_BYTES]; /* of the queries whose dQ this one sums */
#elif SHARED_KEYS
    uint8_t p[DS_BYTES];
#endif
#if !DQ_RED && !DQ_OVER_V
    float dq[DQ_BUFFERS][DQ_PART_FLOATS];
#endif
    float stats[STAGES][2][Q_TILE];
#if DQ_RED
    __attribute__((aligned(16))) dq_place places[DQ_PLACES];
    uint64_t place_full[DQ_PLACES], place_left[DQ_PLACES], place_empty[DQ_PLACES];
#endif
#if PAIR
    __attribute__((aligned(16))) uint32_t ticket[4]; /* told to the second CTA */
    uint64_t ticket_full, ticket_empty;
#endif
    key_work work[WORK_SLOTS];                   /* of round r that in r % WORK_SLOTS */
    int32_t key_rows[CONSUMERS * GROUP_KEYS][2]; /* the rows that see a key of a warpgroup, [first, end) */
    uint64_t kv_full, kv_empty;                  /* K, V and the work tile */
    uint64_t q_full[STAGES], q_empty[STAGES], do_full[STAGES], do_empty[STAGES];
    uint64_t ds_full[DS_STAGES], ds_empty[DS_STAGES];
#if !DQ_RED
    uint64_t dq_full[ADDERS * (PAIR ? 1 : CONSUMERS)], dq_empty[CONSUMERS];
#endif
#if MASK_BITS
    visit_note visits[STAGES][CONSUMERS]; /* of the query tile in a stage */
#endif
#if SHARED_KEYS
    uint64_t p_full;
#endif
#if SHARED_KEYS && PAIR
    uint64_t ds_stored, p_empty; /* the CTA's own dS; the place of P, to its own warps */
    uint64_t partner_p_read;     /* the place of the other CTA's P, to this one's dS */
#endif
} shared_memory;

#ifdef __CUDACC__

#include "cuda/device/attention/gradient_lines.cuh"
#include "cuda/device/isa/bulk.cuh"
#include "cuda/device/isa/flag.cuh"
#include "cuda/device/isa/names.cuh"
#if PAIR
#include "cuda/device/isa/multicast.cuh"
#endif
#include "cuda/device/isa/shared.cuh"
#include "cuda/device/isa/trace_points.cuh"
#include "cuda/device/isa/wgmma_mn.cuh"

enum {
    PRODUCER_REGISTERS = 40,
    CONSUMER_REGISTERS = 232,
    GROUP_WARPS = WARPGROUP_THREADS / WARP_THREADS,
    CONSUMER_WARPS = GROUP_WARPS * CONSUMERS,
    ANY_ORDER = -1,                    /* instead of a turn */
    NO_MORE = -2,                      /* visits of this CTA */
    BOTH_CONSUMERS = 1,                /* a named barrier */
    FINISH_THREADS = WARPGROUP_THREADS /* of the last kernel */
};

static_assert(DIM == 64 || DIM == 128 || DIM == 256, "DIM: 64, 128 or 256");
static_assert(Q_TILE == (DIM == 64 ? 128 : 64), "Q_TILE: dQ is parts of 64 x 64, two or four");
static_assert(HEADS_MEMORY >= 1024, "HEADS_MEMORY: a MB or more");
static_assert(TERMS == 0 || TERMS == FWD_TERM_CAP || TERMS == FWD_TERM_BIAS, "TERMS: a softcap, or masks, or none");
static_assert(!MASK_BITS || (!SHARED_KEYS && !PACKED), "TERMS: masks at DIM 64 and 128");
static_assert(!NARROW_BIASES || (DIM == 64 && !PACKED), "TERMS: biases at DIM 64");
static_assert(DQ_RED == 0 || DQ_RED == 1, "DQ_RED: 0 or 1");
static_assert(PAIR == 0 || (PAIR == 1 && DQ_RED == SHARED_KEYS && (DIM != 64 || KEYS_IN_REGISTERS)),
              "PAIR: 0, or at DIM 64, with K and V in registers, 128 and, with DQ_RED, 256 1");
static_assert(sizeof(shared_memory) <= 232448, "227 KB, a CTA's limit on sm_90");

/* ---- Workspace ---- */

DEV tile_results results_of(const fwd_args &a, int head, int tile)
{
    const bwd_workspace w = bwd_workspace_of(&a, Q_TILE, KV_TILE, DIM, WORK_CTAS);
    char *const base = (char *)a.workspace;
    const int64_t at = (int64_t)head * w.tiles + tile;
    return {(int32_t *)(base + w.visits) + at * WORK_CTAS, (float *)(base + w.stats) + at * (2 * Q_TILE),
            (float *)(base + w.dq) + at * (Q_TILE * DIM)};
}

/* The same value. Where registers are short, the compiler keeps nothing that follows from it over a loop around. */
DEV int anew(int value, bool is_short_of_registers = SPREAD_KEYS)
{
    if (is_short_of_registers)
        asm volatile("" : "+r"(value));
    return value;
}

DEV uint32_t count_key_tiles(const fwd_args &a)
{
    return (anew(a.kv_len) + KV_TILE - 1) / KV_TILE;
}

/* Which of a tile's gradients of keys are spoilt: a bit each, that both warpgroups leave for their 64 keys. */
DEV char *spoilt_of(const fwd_args &a, int entry, int kv_head, int tile)
{
    const uint32_t number = (entry * a.kv_heads + kv_head) * count_key_tiles(a) + tile;
    return (char *)a.workspace + bwd_workspace_of(&a, Q_TILE, KV_TILE, DIM, WORK_CTAS).spoilt +
           (int64_t)number * BWD_SPOILT_BYTES;
}

#if MASK_BITS || NARROW_BIASES
#include "cuda/kernels/bwd_wgmma/packed_bias.cuh"
#endif

/* ---- The first kernel: a CTA a tile of queries; grid {tiles, query heads, entries}. ---- */

extern "C" __global__ void __launch_bounds__(STATS_THREADS)
    NAME_WITH(KERNEL_NAME, _prepare)(const __grid_constant__ bwd_args args)
{
    const fwd_args &a = args.fwd;
    const int tile = blockIdx.x, head = blockIdx.y, entry = blockIdx.z;
    wait_for_previous_kernel();
    allow_next_kernel();
    const sequence rows = find_sequence(a, entry);
    if (blockIdx.x == 0 && head == 0 && entry == 0 && threadIdx.x == 0)
        for (int i = 0; i < 1 + CONVERTED_DQ; i++)
            ((uint32_t *)a.workspace)[i] = 0;
#if MASK_BITS || NARROW_BIASES
    pack_bias(a, entry, head, tile);
#endif
    if (tile * Q_TILE >= rows.q_len)
        return;
    const tile_results to = results_of(a, head, bwd_first_tile(&a, entry, Q_TILE) + tile);
    if (threadIdx.x == 0) {
        *to.visits = 0;
#if PAIR
        to.visits[1] = 0;
#endif
    }
    if (args.atomics)
        for (int i = threadIdx.x; i < Q_TILE * DIM / 4; i += STATS_THREADS)
            ((float4 *)to.dq)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    find_row_stats(args, rows, entry, head, tile, to.stats);
}

/* ---- The second kernel: work tiles ---- */

/* The key in a row of the CTA's tile of keys in shared memory: where one of every warpgroup's 64 is. */
DEV int key_of(int kv_tile, int row)
{
#if SPREAD_KEYS
    const int group = row / GROUP_KEYS, block = kv_tile % WORK_CTAS == 0 ? 3 * group : 1 + group;
    return kv_tile / WORK_CTAS * WORK_KEYS + block * GROUP_KEYS + row % GROUP_KEYS;
#else
    return kv_tile * KV_TILE + row;
#endif
}

#if MASK_BITS
#include "cuda/kernels/bwd_wgmma/hidden_visits.cuh"
#endif

/* Of a key head. */
DEV uint32_t count_work_tiles(const fwd_args &a)
{
    return (a.kv_len + WORK_KEYS - 1) / WORK_KEYS;
}

DEV uint32_t count_work(const fwd_args &a)
{
    return count_work_tiles(a) * a.kv_heads * a.batch;
}

/* Heads whose work tiles alternate, so that a key tile begins well behind the one that adds to dQ before it: as many as
 * L2 holds Q, dO and dQ of. */
DEV uint32_t heads_at_once(const fwd_args &a)
{
    return (uint32_t)max((int64_t)HEADS_MEMORY / ((int64_t)a.q_len * a.group * DIM * 8 / 1024 + 1), (int64_t)1);
}

#if SPREAD_KEYS

/* What the visits of a work tile, from its last query tile to its first, are to the warpgroup whose keys begin with
 * `key`. The first one is done whole whatever its rows see: it stores sums to which the others add. */
DEV group_visits visits_of_group(const fwd_args &a, const visible_entry &e, const key_work &w, int key)
{
    const visible_rows rows = visible_to_keys(e, key, GROUP_KEYS);
    const bool is_seen = rows.first < rows.end;
    const bool is_cut = key + GROUP_KEYS > e.kv_len;
    const int first = is_seen ? rows.first / Q_TILE : w.tile_end,
              has_cut = QUERY_PARTS == 2 && rows.first % Q_TILE >= PART_QUERIES && first + 1 < w.tile_end,
              full_first = (rows.full_first + Q_TILE - 1) / Q_TILE,
              /* rows that do not exist have probabilities of 0 by their LSE */
        full_end = rows.full_end >= e.q_len ? w.tile_end : rows.full_end / Q_TILE;
    return {max((w.tile_end - first - has_cut) * a.group, 1), (w.tile_end - first) * a.group,
            (w.tile_end - full_end) * a.group, is_cut ? 0 : (w.tile_end - full_first) * a.group};
}

#endif

/* A key head, of all batch entries, and the number of something among those of the head. */
typedef struct head_place {
    uint32_t head, at;
} head_place;

/* Of some heads at once, what is at their first places, then at their second ones, and so on: that of this number,
 * where each head has per_head places. */
DEV head_place find_place(const fwd_args &a, uint32_t number, uint32_t per_head)
{
    const uint32_t tiles = count_work_tiles(a), heads = a.kv_heads * a.batch;
    /* The last heads, two waves of CTAs and what is left over, are one section: else a head's first key tile, which has
     * the most visits under a causal mask, would begin last. */
    const uint32_t most = min(heads_at_once(a), heads),
                   late = min((2 * gridDim.x / WORK_CTAS + tiles - 1) / tiles, heads),
                   early = (heads - late) / most * most, first = min(number / (per_head * most) * most, early),
                   together = first < early ? most : heads - early, at = number - first * per_head;
    return {first + at % together, at / together};
}

/* A key tile's CTA adds to dQ after those of the key tiles before it, which have smaller numbers and so have begun. */
DEV key_work find_work(const fwd_args &a, uint32_t number, int rank)
{
    const head_place place = find_place(a, number, count_work_tiles(a));
    key_work w;
    w.kv_tile = place.at * WORK_CTAS + rank;
    w.entry = place.head / a.kv_heads;
    w.kv_head = place.head - w.entry * a.kv_heads;
    const sequence rows = find_sequence(a, w.entry);
    w.q_begin = rows.q_begin;
    w.q_len = rows.q_len;
    w.kv_begin = rows.kv_begin;
    w.kv_len = rows.kv_len;
    const visible_rows seen = visible_to_keys(entry_of(a, rows), (w.kv_tile - rank) * KV_TILE, WORK_KEYS);
    w.tile_first = seen.first / Q_TILE;
    w.tile_end = seen.first < seen.end ? (seen.end + Q_TILE - 1) / Q_TILE : w.tile_first;
#if !SPREAD_KEYS
    const visible_rows own = PAIR ? visible_to_keys(entry_of(a, rows), w.kv_tile * KV_TILE, KV_TILE) : seen;
    const bool cut = (w.kv_tile + 1) * KV_TILE > rows.kv_len;
    /* rows that do not exist have probabilities of 0 by their LSE */
    const int full_end = own.full_end >= rows.q_len ? w.tile_end : own.full_end / Q_TILE;
    w.full_first = cut ? w.tile_end : (own.full_first + Q_TILE - 1) / Q_TILE;
    w.full_end = full_end;
#endif
    return w;
}

DEV visible_entry entry_of(const fwd_args &a, const key_work &w)
{
    sequence s = {w.q_begin, w.q_len, w.kv_begin, w.kv_len};
    return entry_of(a, s);
}

/* The key tiles, or pairs of them, that visit a query tile: consecutive ones. */
DEV visible_tiles key_tiles_of(const visible_entry &e, int tile)
{
    return visible_tiles_of(visible_to_rows(e, tile * Q_TILE, Q_TILE), WORK_KEYS);
}

/* Query tiles of all heads of the group that the rule lets see the work tile's keys. */
DEV int count_numbers(const fwd_args &a, const key_work &w)
{
    return (w.tile_end - w.tile_first) * a.group;
}

/* Those that are visited. */
DEV int count_visits(const fwd_args &a, const key_work &w)
{
#if MASK_BITS
    return w.made;
#else
    return count_numbers(a, w);
#endif
}

/* ---- A turn to add to dQ, of the one thread that adds, or keeps turns for those who do ---- */

/* Waits until the key tiles before this one, or pairs of them, have added to dQ: it is number `turn`. With ANY_ORDER
 * nobody waits. */
DEV void wait_turn(const int32_t *visits, int turn)
{
    if (turn > 0) {
        while (load_flag(visits) != turn)
            ;
        bulk_global_fence();
    }
}

/* Number 0 stores, nothing is cleared beforehand. */
DEV void add_dq_part(float *dq, uint32_t from, int turn)
{
    if (turn > 0 || turn == ANY_ORDER)
        add_floats(dq, from, DQ_PART_FLOATS * 4);
    else
        store_bytes(dq, from, DQ_PART_FLOATS * 4);
    bulk_commit();
}

DEV void pass_turn(int32_t *visits, int turn)
{
    if (turn >= 0) {
        bulk_wait_done();
        bulk_global_fence();
        store_flag(visits, turn + 1);
    }
}

/* ---- The producer: one thread ---- */

#if PAIR
#include "cuda/kernels/bwd_wgmma/paired_loads.cuh"
#else
DEV int own_rank(void)
{
    return 0;
}

DEV int k_panel_of(int)
{
    return 0;
}

DEV uint32_t take_ticket(uint32_t *ticket, uint32_t, int, uint32_t)
{
    return atomicAdd(ticket, 1u);
}

/* Loads a query tile as use number `use` of the rings of Q and dO. */
DEV void load_queries(const fwd_maps &maps, uint32_t smem, int, int use, const float *stats, int row, int head,
                      int batch)
{
    const int stage = use % STAGES;
    const uint32_t parity = (use / STAGES & 1) ^ 1, at = BARRIER_BYTES * stage, q_full = ADDRESS(smem, q_full) + at,
                   do_full = ADDRESS(smem, do_full) + at;
    barrier_wait(ADDRESS(smem, q_empty) + at, parity);
    barrier_arrive_expecting(q_full, Q_BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        load_box(ADDRESS(smem, q) + stage * Q_BYTES + panel * Q_PANEL_BYTES, &maps.q, q_full, panel * PANEL_ELEMS, row,
                 head, batch);
    barrier_wait(ADDRESS(smem, do_empty) + at, parity);
    barrier_arrive_expecting(do_full, Q_BYTES + STATS_BYTES);
    load_bytes(ADDRESS(smem, stats) + stage * STATS_BYTES, stats, STATS_BYTES, do_full);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        load_box(ADDRESS(smem, d_o) + stage * Q_BYTES + panel * Q_PANEL_BYTES, &maps.o, do_full, panel * PANEL_ELEMS,
                 row, head, batch);
}
#endif

/* Loads boxes of K or V, of the CTA's tile of keys. */
DEV void load_key_boxes(uint32_t to, const fwd_map *map, uint32_t smem, const key_work *w)
{
#pragma unroll
    for (int row = 0; row < KV_TILE; row += BOX_KEYS)
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            load_box(to + panel * KV_PANEL_BYTES + row * PANEL_ROW_BYTES, map, ADDRESS(smem, kv_full),
                     panel * PANEL_ELEMS, w->kv_begin + key_of(w->kv_tile, row), w->kv_head, PACKED ? 0 : w->entry);
}

/* By the producer: nothing of the work tile before that round's is needed any more. */
DEV void wait_keys_left(uint32_t smem, uint32_t round)
{
    barrier_wait(ADDRESS(smem, kv_empty), (round & 1) ^ 1);
}

/* Loads a work tile's keys and values, when those of the one before are needed no more: values at once if they are
 * already. */
DEV void load_keys(const fwd_maps &maps, uint32_t smem, const key_work *w, int rank, uint32_t round, bool v_is_left)
{
    if (v_is_left)
        load_key_boxes(ADDRESS(smem, v), &maps.v, smem, w);
    wait_keys_left(smem, round);
    barrier_arrive_expecting(ADDRESS(smem, kv_full), 2 * KV_BYTES + PARTNER_BYTES);
    load_key_boxes(ADDRESS(smem, k), &maps.k, smem, w);
#if PAIR
    load_partner_keys(maps, smem, *w, rank, PACKED ? 0 : w->entry);
#endif
    if (!v_is_left)
        load_key_boxes(ADDRESS(smem, v), &maps.v, smem, w);
}

/* Behind the first work tile Q and dO of the first visits come before the keys: their places are free sooner. So is
 * that of V, which the last visits' dQ does not read. */
DEV void produce(const bwd_args &args, const fwd_maps &maps, uint32_t smem, shared_memory *shared)
{
    const fwd_args &a = args.fwd;
    const int rank = own_rank();
    const uint32_t kv_full = ADDRESS(smem, kv_full);
    int use = 0;
    bool v_is_left = false; /* by the visits that have their queries, once the first places of those are free */
    for (uint32_t round = 0;; round++) {
        const uint32_t number = take_ticket((uint32_t *)a.workspace, smem, rank, round);
        key_work *const slot = shared->work + round % WORK_SLOTS;
        *slot = number < count_work(a) ? find_work(a, number, rank) : key_work{-1};
        const int kv_tile = slot->kv_tile;
        if (kv_tile < 0) {
            wait_keys_left(smem, round);
            barrier_arrive(kv_full);
            return;
        }
#if SPREAD_KEYS
        slot->round = round;
#pragma unroll 1
        for (int group = 0; group < CONSUMERS; group++)
            slot->groups[group] = visits_of_group(a, entry_of(a, *slot), *slot, key_of(kv_tile, group * GROUP_KEYS));
#endif
#if MASK_BITS
        mark_visits(a, *slot);
#endif
        const int first_tile = bwd_first_tile(&a, slot->entry, Q_TILE), visits = count_visits(a, *slot);
        int tile = slot->tile_end - 1, head = slot->kv_head * a.group;
#pragma unroll 1
        for (int left = visits, before_keys = round == 0 ? 0 : min(visits, STAGES);; left--, before_keys--) {
            if (before_keys == 0)
                load_keys(maps, smem, slot, rank, round, v_is_left && visits >= STAGES);
            if (left == 0)
                break;
#if MASK_BITS
            skip_hidden(a, *slot, tile, head);
#endif
            load_queries(maps, smem, rank, use, results_of(a, head, first_tile + tile).stats,
                         slot->q_begin + tile * Q_TILE, head, PACKED ? 0 : slot->entry);
            use++;
            if (++head == (slot->kv_head + 1) * a.group) {
                head -= a.group;
                tile--;
            }
        }
        v_is_left = !DQ_OVER_V && visits > 0;
    }
}

/* The CTA's next work tile, once its keys and values are there; kv_tile < 0: there is no more. */
DEV const key_work *wait_key_work(uint32_t smem, const shared_memory *shared, uint32_t round)
{
    barrier_wait(ADDRESS(smem, kv_full), round & 1);
    return &shared->work[round % WORK_SLOTS];
}

#if !DQ_RED

/* ---- Accumulators of dQ: two threads in turn, which add what the consumers leave in shared memory. While one waits
 * until its visit's dQ is there, to pass the turn, the other waits for the next visit's turn. ---- */

#if !PAIR
/* Adds a query tile's dQ, of both consumers, when the key tiles before this one have (wait_turn). */
DEV void add_dq(uint32_t smem, int use, int turn, int32_t *visits, float *dq, bool)
{
    wait_turn(visits, turn);
#pragma unroll(DQ_ROUNDS == 1 ? DQ_PARTS : 1)
    for (int part = 0; part < DQ_PARTS; part++) {
        const int group = part % CONSUMERS;
        const uint32_t from = ADDRESS(smem, dq) + group % DQ_BUFFERS * (DQ_PART_FLOATS * 4);
        barrier_wait(ADDRESS(smem, dq_full) + BARRIER_BYTES * (use % ADDERS * CONSUMERS + group),
                     (use / ADDERS * DQ_ROUNDS + part / CONSUMERS) & 1);
        add_dq_part(dq + part * DQ_PART_FLOATS, from, turn);
        if (DQ_BUFFERS == 1) { /* the other warpgroup's turn */
            bulk_wait_read();
            barrier_arrive(ADDRESS(smem, dq_empty) + BARRIER_BYTES * (CONSUMERS - 1 - group));
        }
    }
    if (DQ_BUFFERS == CONSUMERS) {
        bulk_wait_read();
#pragma unroll
        for (int group = 0; group < CONSUMERS; group++)
            barrier_arrive(ADDRESS(smem, dq_empty) + BARRIER_BYTES * group);
    }
    pass_turn(visits, turn);
}
#endif

/* adder: the thread's number; it adds every ADDERS-th visit's. */
DEV void accumulate_dq(const bwd_args &args, uint32_t smem, const shared_memory *shared, int adder)
{
    const fwd_args &a = args.fwd;
    const int rank = own_rank();
    int use = 0;
    for (uint32_t round = 0;; round++) {
        const key_work *const w = wait_key_work(smem, shared, round);
        const int kv_tile = w->kv_tile;
        if (kv_tile < 0)
            break;
        const visible_entry entry = entry_of(a, *w);
        const int first_head = w->kv_head * a.group, first_tile = bwd_first_tile(&a, w->entry, Q_TILE);
        int tile = w->tile_end, head = first_head + a.group - 1, turn = ANY_ORDER, left = count_visits(a, *w);
        if (!SHARED_KEYS && (!DQ_OVER_V || left <= (use + adder) % ADDERS))
            barrier_arrive(ADDRESS(smem, kv_empty)); /* the one before is read no more, nor is dQ in V's place */
#pragma unroll 1
        for (; left > 0; left--) {
            if (++head == first_head + a.group) {
                head = first_head;
                tile--;
                if (!MASK_BITS && args.atomics == 0) /* the key tiles that visit the query tile are consecutive */
                    turn = kv_tile / WORK_CTAS - key_tiles_of(SHARED_KEYS ? entry_of(a, *w) : entry, tile).first;
            }
#if MASK_BITS
            skip_hidden(a, *w, tile, head);
#endif
            if (use % ADDERS == adder) {
#if MASK_BITS
                if (args.atomics == 0)
                    turn = count_visitors(marks_of(a, w->entry, head, tile), key_tiles_of(entry_of(a, *w), tile).first,
                                          w->kv_tile / WORK_CTAS);
#endif
                const tile_results to = results_of(a, head, first_tile + tile);
                add_dq(smem, use, turn, to.visits + rank, to.dq + rank * DQ_PART_FLOATS, left <= ADDERS);
            }
            use++;
        }
        if (SHARED_KEYS)
            barrier_arrive(ADDRESS(smem, kv_empty)); /* the work tile is read no more */
    }
    bulk_wait_done();
}

#endif

/* ---- Consumers: a warpgroup each. Arrays are in registers, as device/isa/wgmma.cuh says; rows are keys. ---- */

typedef float score_tile[PART_QUERIES / 2];
typedef uint32_t packed_tile[PART_QUERIES / 4];
typedef float key_gradient[DIM / 2];
typedef float query_gradient[DQ_PART_FLOATS / 128];

/* Where a thread is, and what stays the same for it. */
typedef struct consumer {
    uint32_t smem;
    int index, thread, lane; /* among the consumers; in the warpgroup; in the warp */
    uint64_t k, v;           /* descriptors of the warpgroup's keys, summed over their dims */
    uint64_t k_keys;         /* of all keys, summed over the keys: the dims of the warpgroup's first part of dQ */
    uint32_t ds_row;         /* address of the row of dS that the lane names to store_matrices */
    float scale_log2;
} consumer;

/* The first of the lane's two keys among those of both warpgroups; the other is the eighth after it. */
DEV int lane_key(const consumer &c)
{
    return c.index * GROUP_KEYS + c.thread / 32 * 16 + c.lane / 4;
}

/* Notes which rows see the warp's keys. */
DEV void note_key_rows(const consumer &c, const visible_entry &e, const key_work *w, shared_memory *shared)
{
    const int key = anew(c.index * GROUP_KEYS + c.thread / 32 * 16 + c.lane);
    __syncwarp(); /* those of the work tile before are read no more */
    if (c.lane < 16) {
        const visible_rows rows = visible_to_keys(e, key_of(w->kv_tile, SHARED_KEYS ? key % GROUP_KEYS : key), 1);
        shared->key_rows[key][0] = rows.first;
        shared->key_rows[key][1] = rows.end;
    }
    __syncwarp();
}

DEV void wait_use(uint32_t barriers, int use)
{
    barrier_wait(barriers + BARRIER_BYTES * (use % STAGES), use / STAGES & 1);
}

/* One arrival per warp, behind what all its lanes have done. */
DEV void arrive_warp(uint32_t barrier, int lane)
{
    __syncwarp();
    if (lane == 0)
        barrier_arrive(barrier);
}

/* What the array held before is of no use: products name their sums as operands even where they overwrite them. */
template <int ELEMS> DEV void forget(float (&d)[ELEMS])
{
#pragma unroll
    for (int i = 0; i < ELEMS; i++)
        asm volatile("" : "=f"(d[i]));
}

/* K and V of the warpgroup as products take them from registers. */
typedef struct key_fragments {
    uint32_t k[KEYS_IN_REGISTERS ? DIM / 4 : 1], v[KEYS_IN_REGISTERS ? DIM / 4 : 1];
} key_fragments;

/* Starts S^T = K * transpose(Q), or dP^T = V * transpose(dO), as a group of its own. The keys are in `fragments` or,
 * where a line has no registers for them, where the descriptor `keys` says. */
DEV void start_scores(score_tile &s, const uint32_t *fragments, uint64_t keys, uint64_t queries)
{
    forget(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM / WGMMA_K; step++) {
        const uint32_t in_panel = step % 4 * WGMMA_K * ELEM_BYTES;
#if KEYS_IN_REGISTERS
        wgmma_rs(s, fragments + 4 * step, descriptor_at(queries, in_panel), step != 0);
#else
        wgmma_ss(s, descriptor_at(keys, step / 4 * KV_PANEL_BYTES + in_panel),
                 descriptor_at(queries, step / 4 * Q_PANEL_BYTES + in_panel), step != 0);
#endif
    }
    wgmma_commit();
}

/* Starts dV += P^T * dO, or dK += dS^T * Q, as a group of its own. */
DEV void start_key_gradient(key_gradient &d, const packed_tile &p, uint64_t queries, int accumulate)
{
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < PART_QUERIES / WGMMA_K; step++)
        wgmma_rs_mn(d, p + 4 * step, descriptor_at(queries, step * WGMMA_K * PANEL_ROW_BYTES), step != 0 || accumulate);
    wgmma_commit();
}

/* Starts a part of dQ = dS * K, as a group of its own. */
DEV void start_query_gradient(query_gradient &d, uint64_t ds, uint64_t keys)
{
    forget(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KV_TILE / WGMMA_K; step++)
        wgmma_ss_mn(d, descriptor_at(ds, step * WGMMA_K * PANEL_ROW_BYTES),
                    descriptor_at(keys, step * WGMMA_K * PANEL_ROW_BYTES), step != 0);
    wgmma_commit();
}

/* The descriptor of a tile of Q or dO, either way: panel_bytes is not looked at where dims are summed over. */
DEV uint64_t query_matrix(uint32_t tiles, int use)
{
    return matrix_descriptor(tiles + use % STAGES * Q_BYTES, Q_PANEL_BYTES);
}

/* Hides scores by the rows that see the lane's keys. query: the row of the first column. */
DEV void hide_scores(score_tile &s, const consumer &c, const shared_memory *shared, int query)
{
    const int32_t(*const seen)[2] = shared->key_rows + lane_key(c);
    const int column = query + 2 * (c.lane % 4), first[2] = {seen[0][0] - column, seen[8][0] - column},
              end[2] = {seen[0][1] - column, seen[8][1] - column};
#pragma unroll
    for (int i = 0; i < PART_QUERIES / 2; i++) {
        const int at = 8 * (i / 4) + i % 2, h = i % 4 / 2;
        if (at < first[h] || at >= end[h])
            s[i] = -CUDART_INF_F;
    }
}

DEV bool has_softcap(const fwd_args &a)
{
    return has_term(FWD_TERM_CAP) && a.softcap > 0.0f;
}

/* Turns scores of eight columns into probabilities, rounded ones in p. With a softcap s becomes the probabilities times
 * the slope of the cap. lse: of the lane's first one of them. */
DEV void find_probabilities_of(score_tile &s, packed_tile &p, int column, const float *lse, const consumer &c,
                               const fwd_args &a, bool is_capped)
{
    const float2 l = *(const float2 *)lse;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float *const x = s + 4 * column + 2 * h;
        float slope[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (is_capped) {
                const float t = tanh_fast(x[i] * a.softcap_in);
                slope[i] = fmaf(-t, t, 1.0f);
                x[i] = x[i] == -CUDART_INF_F ? 0.0f : exp2_fast(fmaf(t, a.softcap_out, -(i == 0 ? l.x : l.y)));
            } else
                x[i] = exp2_fast(fmaf(x[i], c.scale_log2, -(i == 0 ? l.x : l.y)));
        }
        p[2 * column + h] = pack<BF16>(x[0], x[1]);
        if (is_capped) {
            x[0] *= slope[0];
            x[1] *= slope[1];
        }
    }
}

/* dS = P * (dP - D) of eight columns, rounded. p, d: of the lane's first one of them. */
DEV void find_score_gradients_of(packed_tile &ds, int column, const float *p, const score_tile &dp, const float *d)
{
    const float2 sum = *(const float2 *)d;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int at = 4 * column + 2 * h;
        ds[2 * column + h] = pack<BF16>(p[2 * h] * (dp[at] - sum.x), p[2 * h + 1] * (dp[at + 1] - sum.y));
    }
}

/* Rows of dS: keys; 64 queries a panel. */
DEV void store_score_gradients(const packed_tile &ds, const consumer &c, int buffer, int part)
{
    const int query = part * PART_QUERIES;
    const uint32_t row = c.ds_row + buffer * DS_BYTES + query / PANEL_ELEMS * DS_PANEL_BYTES;
#pragma unroll
    for (int step = 0; step < PART_QUERIES / 16; step++)
        store_matrices(row ^ (uint32_t)((query % PANEL_ELEMS / 8 + step * 2) * CHUNK_BYTES), ds + 4 * step);
}

/* Trace points of a visit, here because the program reads their names from this file. */
DEV void trace_scores(int use)
{
    ACR_TRACE_POINT(use, "scores ready");
}
DEV void trace_dv_asked(int use)
{
    ACR_TRACE_POINT(use, "dV asked");
}
DEV void trace_dp(int use)
{
    ACR_TRACE_POINT(use, "dP ready");
}
DEV void trace_ds_left(int use)
{
    ACR_TRACE_POINT(use, "dS left");
}
DEV void trace_dq(int use)
{
    ACR_TRACE_POINT(use, "dQ ready");
}
DEV void trace_dq_place(int use)
{
    ACR_TRACE_POINT(use, "the place of dQ free");
}
DEV void trace_dq_left(int use)
{
    ACR_TRACE_POINT(use, "dQ left");
}
DEV void trace_end_of_visit(int use)
{
    ACR_TRACE_POINT(use, "all products done");
}

#if DQ_RED
#include "cuda/kernels/bwd_wgmma/direct_dq.cuh"
#elif !PAIR

/* Leaves a part of dQ, the warpgroup's number `count`, to the thread that adds it up. Register 4g + r of thread t is
 * float 4 (128g + t) + r of the part. */
DEV void hand_over(const query_gradient &d, const consumer &c, int count)
{
    const uint32_t to = ADDRESS(c.smem, dq) + (DQ_BUFFERS == 1 ? 0 : c.index) * (DQ_PART_FLOATS * 4) + c.thread * 16;
    const uint32_t parity =
        (count & 1) ^ (DQ_BUFFERS == 1 ? c.index == 0 : 1); /* of one buffer the first has it first */
    barrier_wait(ADDRESS(c.smem, dq_empty) + BARRIER_BYTES * c.index, parity);
    trace_dq_place(count);
#pragma unroll
    for (int g = 0; g < 8; g++)
        store_shared_float4(to + g * (WARPGROUP_THREADS * 16), d[4 * g], d[4 * g + 1], d[4 * g + 2], d[4 * g + 3]);
    shared_stores_visible();
    const int adder = count / DQ_ROUNDS % ADDERS;
    arrive_warp(ADDRESS(c.smem, dq_full) + BARRIER_BYTES * (adder * CONSUMERS + c.index), c.lane);
}

#endif

#if !PAIR

/* Waits in the first round for dS of a use, and starts the warpgroup's part of dQ of it of that round. */
DEV void start_dq_of(query_gradient &d, const consumer &c, int use, int round)
{
    const int buffer = use % DS_STAGES;
    const int panel = DIM == 64 ? c.index : 0;
    if (round == 0)
        barrier_wait(ADDRESS(c.smem, ds_full) + BARRIER_BYTES * buffer, use / DS_STAGES & 1);
    start_query_gradient(
        d, matrix_descriptor(ADDRESS(c.smem, ds) + buffer * DS_BYTES + panel * DS_PANEL_BYTES, DS_PANEL_BYTES),
        descriptor_at(c.k_keys, round * CONSUMERS * KV_PANEL_BYTES));
}

#endif

/* Keys that do not exist may be anything in a packed batch or behind a key length, and NaN times a gradient of zero is
 * NaN: both warpgroups clear them. */
DEV void clear_keys(const consumer &c, const key_work &w)
{
    const int first = anew(c.index * WARPGROUP_THREADS + c.thread);
#if PAIR
    for (int i = first; i < KV_TILE * 8; i += CONSUMERS * WARPGROUP_THREADS)
        if (key_of(w.kv_tile ^ 1, i / 8) >= w.kv_len)
#pragma unroll
            for (int panel = 0; panel < PARTNER_PANELS; panel++)
                store_shared_4(ADDRESS(c.smem, partner_k) + panel * KV_PANEL_BYTES + i * 16, 0, 0, 0, 0);
#endif
    for (int i = first; i < KV_TILE * 8; i += CONSUMERS * WARPGROUP_THREADS)
        if (key_of(w.kv_tile, i / 8) >= w.kv_len)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                store_shared_4(ADDRESS(c.smem, k) + panel * KV_PANEL_BYTES + i * 16, 0, 0, 0, 0);
                store_shared_4(ADDRESS(c.smem, v) + panel * KV_PANEL_BYTES + i * 16, 0, 0, 0, 0);
            }
    shared_stores_visible();
    named_sync(BOTH_CONSUMERS, CONSUMERS * WARPGROUP_THREADS);
}

/* The same of queries, in packed batches: in the last tile of a sequence others' rows follow. */
DEV void clear_queries(const consumer &c, uint32_t tiles, int use, int first)
{
    for (int i = c.index * WARPGROUP_THREADS + c.thread; i < Q_TILE * 8; i += CONSUMERS * WARPGROUP_THREADS)
        if (i / 8 >= first)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++)
                store_shared_4(tiles + use % STAGES * Q_BYTES + panel * Q_PANEL_BYTES + i * 16, 0, 0, 0, 0);
    shared_stores_visible();
    named_sync(BOTH_CONSUMERS, CONSUMERS * WARPGROUP_THREADS);
}

/* Before a work tile's first visit. */
DEV void begin_keys(const consumer &c, const fwd_args &a, const key_work *w, shared_memory *shared)
{
    note_key_rows(c, entry_of(a, *w), w, shared);
    if ((a.kv_lens != nullptr || PACKED) && (w->kv_tile / WORK_CTAS + 1) * WORK_KEYS > w->kv_len)
        clear_keys(c, *w);
}

/* Where a key's row of dK or dV begins, in elements. */
DEV int64_t key_gradient_index(const key_work &w, const fwd_strides &stride, int key)
{
    return (PACKED ? 0 : w.entry * stride.batch) + w.kv_head * stride.head + (w.kv_begin + key) * stride.row;
}

#if PAIR
#include "cuda/kernels/bwd_wgmma/paired_dq.cuh"
#endif
#if MASK_BITS
#include "cuda/kernels/bwd_wgmma/masked_visits.cuh"
#endif
#if SHARED_KEYS
#include "cuda/kernels/bwd_wgmma/shared_keys.cuh"
#elif PAIR
#include "cuda/kernels/bwd_wgmma/paired_keys.cuh"
#else
#include "cuda/kernels/bwd_wgmma/own_keys.cuh"
#endif

/* What a lane of the 16 rows by 64 columns of dQ that a warp had in registers had of them. from: the lane's first. */
DEV void load_piece(float (&d)[32], const float4 *from)
{
#pragma unroll
    for (int g = 0; g < 8; g++) {
        const float4 x = from[g * WARPGROUP_THREADS];
        d[4 * g] = x.x;
        d[4 * g + 1] = x.y;
        d[4 * g + 2] = x.z;
        d[4 * g + 3] = x.w;
    }
}

#if CONVERTED_DQ
#include "cuda/kernels/bwd_wgmma/converted_dq.cuh"
#endif

DEV void init_barriers(uint32_t smem)
{
    barrier_init(ADDRESS(smem, kv_full), 1);
    barrier_init(ADDRESS(smem, kv_empty), CONSUMER_WARPS + (DQ_RED ? 1 + PAIR : ADDERS) + MASK_BITS);
#if PAIR
    barrier_init(ADDRESS(smem, ticket_full), 1);
    barrier_init(ADDRESS(smem, ticket_empty), 1);
#endif
    const int readers = CONSUMER_WARPS * (SHARED_QUERIES ? WORK_CTAS : 1); /* of a query tile */
    for (int i = 0; i < STAGES; i++) {
        barrier_init(ADDRESS(smem, q_full) + BARRIER_BYTES * i, 1 + MASK_BITS);
        barrier_init(ADDRESS(smem, q_empty) + BARRIER_BYTES * i, readers);
        barrier_init(ADDRESS(smem, do_full) + BARRIER_BYTES * i, 1);
        if (!PAIR || SHARED_KEYS)
            barrier_init(ADDRESS(smem, do_empty) + BARRIER_BYTES * i, readers);
    }
    for (int i = 0; i < DS_STAGES; i++) {
#if SHARED_KEYS && PAIR
        barrier_init(ADDRESS(smem, ds_full) + BARRIER_BYTES * i, 1);
        barrier_init(ADDRESS(smem, ds_empty) + BARRIER_BYTES * i, 1);
#else
        barrier_init(ADDRESS(smem, ds_full) + BARRIER_BYTES * i, SHARED_KEYS ? GROUP_WARPS : CONSUMER_WARPS);
        barrier_init(ADDRESS(smem, ds_empty) + BARRIER_BYTES * i, PAIR ? GROUP_WARPS * WORK_CTAS : CONSUMER_WARPS);
#endif
    }
#if DQ_RED
    for (int i = 0; i < DQ_PLACES; i++) {
        barrier_init(ADDRESS(smem, place_full) + BARRIER_BYTES * i, 1);
        barrier_init(ADDRESS(smem, place_left) + BARRIER_BYTES * i, CONSUMER_WARPS);
        barrier_init(ADDRESS(smem, place_empty) + BARRIER_BYTES * i, 1);
    }
#else
    for (int i = 0; i < ADDERS * (PAIR ? 1 : CONSUMERS); i++)
        barrier_init(ADDRESS(smem, dq_full) + BARRIER_BYTES * i, GROUP_WARPS);
    for (int i = 0; i < CONSUMERS; i++)
        barrier_init(ADDRESS(smem, dq_empty) + BARRIER_BYTES * i, 1);
#endif
#if SHARED_KEYS
    barrier_init(ADDRESS(smem, p_full), GROUP_WARPS);
#endif
#if SHARED_KEYS && PAIR
    barrier_init(ADDRESS(smem, ds_stored), GROUP_WARPS);
    barrier_init(ADDRESS(smem, p_empty), CONSUMER_WARPS);
    barrier_init(ADDRESS(smem, partner_p_read), CONSUMER_WARPS);
#endif
    barrier_init_done();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ bwd_args args, const __grid_constant__ fwd_maps maps)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_memory *const shared = (shared_memory *)memory;
    const uint32_t smem = smem_address(memory);
    const int group = read_warpgroup();
    if (threadIdx.x == 0) {
        prefetch_inputs(maps);
        prefetch_map(&maps.o);
        init_barriers(smem);
    }
#if PAIR
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait(); /* the other's barriers are there, too */
#else
    __syncthreads();
#endif
    wait_for_previous_kernel();
    allow_next_kernel();
    if (group == 0) {
        REGISTERS_GIVE(PRODUCER_REGISTERS);
        if (threadIdx.x == 0)
            produce(args, maps, smem, shared);
#if DQ_RED
        if (threadIdx.x == WARP_THREADS)
            give_turns(args, smem, shared);
        if (threadIdx.x == 2 * WARP_THREADS)
            pass_turns(smem, shared);
#if PAIR
        if (threadIdx.x == 3 * WARP_THREADS)
            send_score_gradients(args, smem, shared);
#endif
#else
        if (threadIdx.x == WARP_THREADS || threadIdx.x == 2 * WARP_THREADS)
            accumulate_dq(args, smem, shared, threadIdx.x / WARP_THREADS - 1);
#endif
#if MASK_BITS
        if (threadIdx.x == 3 * WARP_THREADS)
            tell_visits(args.fwd, smem, shared);
#endif
#if PAIR
        __syncwarp();
#endif
    } else {
        REGISTERS_TAKE(CONSUMER_REGISTERS);
#if SHARED_KEYS
        if (group == 1)
            consume<0>(args, smem, shared);
        else
            consume<1>(args, smem, shared);
#else
        consume(args, smem, shared, group - 1);
#endif
#if CONVERTED_DQ
        convert_dq(args);
#endif
    }
#if PAIR
    cluster_arrive(); /* this CTA's shared memory is the other's, too, until that has ended its work */
    cluster_wait();
#endif
    ACR_TRACE_END(args.fwd);
}

/* ---- The third kernel: a CTA a part of dQ; grid {DQ_PARTS * tiles, query heads, entries}. Where the rule hides
 * something, CTAs of a tile of keys each follow those of queries: the heads of a group share the key head's. Where dQ
 * is converted before, a CTA a head is there for its sink, or there is none. ---- */

/* Scales the sums of a part of a tile's dQ and stores them. */
DEV void finish_dq(const bwd_args &args, const line_head &of, int tile, int part)
{
    const fwd_args &a = args.fwd;
    const int thread = threadIdx.x, lane = thread % WARP_THREADS;
    const tile_results from = results_of(a, of.head, bwd_first_tile(&a, of.batch, Q_TILE) + tile);
    const visible_tiles seen = key_tiles_of(of.entry, tile);
#if MASK_BITS
    const bool is_seen = is_visited(marks_of(a, of.batch, of.head, tile), seen.first, seen.end);
#else
    const bool is_seen = seen.first < seen.end; /* else nobody has written its sums */
#endif
    float d[32] = {};
    if (is_seen)
        load_piece(d, (const float4 *)(from.dq + part * DQ_PART_FLOATS) + thread);
    const int column = DIM == 64 ? 0 : 64 * part, columns = a.qk_dim - column;
    const int first_row = tile * Q_TILE + (DIM == 64 ? 64 * part : 0) + thread / WARP_THREADS * 16;
    unsigned spoilt = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = first_row + lane / 4 + 8 * h;
        store_gradient_row(args, args.dq, gradient_index<false>(of, args.dq_stride, row) + column, row < of.rows.q_len,
                           columns, is_seen ? a.scale : 0.0f, d, h, lane);
        spoilt |= find_spoilt(row < of.rows.q_len && probe(d, h) != 0.0f) << 8 * h;
    }
    fix_lines<false>(args, of, stored_stats{results_of(a, 0, 0).stats}, spoilt, first_row, column, column + 64, lane);
}

/* Fixes dK and dV of the keys of a tile, a warp a quarter of them. */
DEV void finish_keys(const bwd_args &args, const line_head &of, int tile)
{
    const fwd_args &a = args.fwd;
    const int warp = threadIdx.x / WARP_THREADS, keys = KV_TILE / (FINISH_THREADS / WARP_THREADS);
#if SHARED_KEYS
    const uint16_t *const of_groups = (const uint16_t *)spoilt_of(a, of.batch, of.head, tile) + warp;
    const uint32_t spoilt = of_groups[0] | of_groups[KV_TILE / 16];
#else
    const uint32_t spoilt = ((const uint32_t *)spoilt_of(a, of.batch, of.head, tile))[warp];
#endif
    static_assert(CONSUMERS * GROUP_KEYS == FINISH_THREADS, "a lane's bit is a key, or a gradient of one");
    fix_lines<true>(args, of, stored_stats{results_of(a, 0, 0).stats}, spoilt, tile * KV_TILE + warp * keys, 0, DIM,
                    threadIdx.x % WARP_THREADS);
}

extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
    NAME_WITH(KERNEL_NAME, _finish)(const __grid_constant__ bwd_args args)
{
    const fwd_args &a = args.fwd;
    const int number = blockIdx.x, ctas = DQ_PARTS * bwd_tiles(&a, Q_TILE), head = blockIdx.y, entry = blockIdx.z;
    __shared__ float sums[FINISH_THREADS];
    wait_for_previous_kernel();
    allow_next_kernel();
    if (args.dsinks != nullptr && blockIdx.x == 0 && entry == 0)
        sum_sinks(sums, args, head, results_of(a, head, 0).stats);
    line_head of = {find_sequence(a, entry), {}, entry, head};
    of.entry = entry_of(a, of.rows);
    if (CONVERTED_DQ && gridDim.x == 1) /* for sinks alone */
        return;
    if (number < ctas) {
        if (number / DQ_PARTS * Q_TILE < of.rows.q_len)
            finish_dq(args, of, number / DQ_PARTS, number % DQ_PARTS);
        return;
    }
    of.head = head / a.group;
    const int tile = (number - ctas) * a.group + head % a.group;
    if (tile < (int)count_key_tiles(a))
        finish_keys(args, of, tile);
}

#else

#include "cuda/model/fwd_model.h"

enum {
    HELPER_THREADS = 256, /* as above */
    FINISH_THREADS = 128
};

static const acr__tiling TILING = {.work = ACR__WORK_TILES, /* of the helpers */
                                   .q_tile = Q_TILE,
                                   .threads = THREADS,
                                   .smem_bytes = sizeof(shared_memory),
                                   .packed_only = PACKED};

#include "cuda/model/tile_kernel.h"

static int64_t count_key_tiles(const acr_problem *problem)
{
    return (problem->kv_len + KV_TILE - 1) / KV_TILE;
}

static int64_t count_work_tiles(const acr_problem *problem)
{
    return (problem->kv_len + WORK_KEYS - 1) / WORK_KEYS;
}

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    if (count_key_tiles(problem) > INT32_MAX / 2 / (problem->kv_heads * problem->batch))
        return "batch * kv_heads has more than 2^30 key tiles";
    if (MASK_BITS && problem->bias_dtype != ACR_BOOL8)
        return "bias_dtype: the kernel serves problems with a boolean mask alone (TERMS)";
    if (NARROW_BIASES && problem->bias_dtype != ACR_F16 && problem->bias_dtype != ACR_BF16)
        return "bias_dtype: the kernel serves problems with a bias of 16 bits alone (TERMS)";
    return tile_why_not(problem, device);
}

static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    const fwd_args args = {.batch = (int32_t)problem->batch,
                           .q_heads = (int32_t)problem->q_heads,
                           .kv_heads = (int32_t)problem->kv_heads,
                           .q_len = (int32_t)problem->q_len,
                           .kv_len = (int32_t)problem->kv_len,
                           .bias_stride = {.batch = problem->bias.batch, .head = problem->bias.head}};
    (void)device;
    const int64_t bytes = bwd_workspace_of(&args, Q_TILE, KV_TILE, DIM, WORK_CTAS).bytes;
    return (size_t)(bytes + (MASK_BITS || NARROW_BIASES
                                 ? bwd_biases_of(&args, Q_TILE, WORK_KEYS, BIAS_WORDS, MARKS).bytes
                                 : 0));
}

static void shape(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    const int64_t work = count_work_tiles(problem) * problem->kv_heads * problem->batch,
                  most = device->sm_count < WORK_CTAS ? 1 : device->sm_count / WORK_CTAS;
    *launch = (acr__launch){.grid = {(uint32_t)(work < most ? work : most) * WORK_CTAS, 1, 1},
                            .block = THREADS,
                            .cluster = PAIR ? WORK_CTAS : 0,
                            .smem_bytes = sizeof(shared_memory)};
}

static void shape_prepare(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    *launch = acr__tiling_launch(&TILING, problem, device);
    launch->block = HELPER_THREADS;
    launch->smem_bytes = 0;
}

static int is_limited(const acr_problem *problem)
{
    return visible_is_limited(acr__longest_entry(problem).rule);
}

static int converts(const acr_problem *problem, const acr__device *device)
{
    acr__launch launch;
    shape(problem, device, &launch);
    return bwd_converts(is_limited(problem), (problem->flags & ACR_KV_LENS) != 0,
                        (problem->flags & ACR_FAST_ATOMICS) != 0, launch.grid[0]);
}

static void shape_finish(const acr_problem *problem, const acr__device *device, acr__launch *launch)
{
    const int64_t group = problem->q_heads / problem->kv_heads;
    shape_prepare(problem, device, launch);
    if (converts(problem, device))
        launch->grid[0] = (problem->flags & ACR_SINKS) != 0;
    else
        launch->grid[0] *= DQ_PARTS;
    if (is_limited(problem) || problem->bias_dtype != ACR_DTYPE_DEFAULT)
        launch->grid[0] += (uint32_t)((count_key_tiles(problem) + group - 1) / group);
    launch->block = FINISH_THREADS;
}

/* Fitted to times of an H200, of DIM 256 without pairs of an H100 (lab.md, "The cost"), in cycles of an SM: a visit of
 * a query tile by a key tile, a key tile besides, and passing the turn at a query tile's dQ. Key tiles begin at their
 * last query tile: there a key tile waits for those before it that see the tile, too. A pair of key tiles takes two
 * SMs, both for the visits of either, and turns are pairs'. */
static double cost(const acr_problem *problem, const acr__device *device)
{
    typedef struct fitted_cycles {
        double visit, tile, turn;
    } fitted_cycles;
    static const fitted_cycles alone[] = {{4750, 7700, 3100}, {4500, 8600, 3300}, {7550, 21200, 4100}}, /* DIM 64.. */
        pairs[] = {{4500, 9600, 5000}, {3900, 10400, 3000}, {4000, 17600, 5500}};
    const fitted_cycles fitted = (PAIR ? pairs : alone)[DIM / 128];
    /* A cap's are charged without one, too: other lines serve those. Of masks and biases they are not fitted. */
    const double terms_cycles = TERMS & FWD_TERM_CAP ? 1500.0
                                : MASK_BITS ? 500.0
                                : NARROW_BIASES ? 1500.0
                                                : 0.0,
                 visit_cycles = fitted.visit + terms_cycles;
    const visible_entry entry = acr__longest_entry(problem);
    const double heads = (double)(problem->batch * problem->kv_heads),
                 group = (double)(problem->q_heads / problem->kv_heads);
    double all = 0, longest = 0; /* of a key head's tiles together, and of one */
    for (int64_t tile = 0; tile < count_work_tiles(problem); tile++) {
        const visible_rows rows = visible_to_keys(entry, (int32_t)tile * WORK_KEYS, WORK_KEYS);
        double own = fitted.tile, waits = 0;
        if (rows.first < rows.end) {
            const int32_t last = (rows.end - 1) / Q_TILE;
            own += group * (double)(last + 1 - rows.first / Q_TILE) * visit_cycles;
            waits = ((double)tile - visible_to_rows(entry, last * Q_TILE, Q_TILE).first / WORK_KEYS) * fitted.turn;
        }
        all += own * WORK_CTAS;
        longest = own + waits > longest ? own + waits : longest;
    }
    /* Tiles that end unevenly leave SMs idle: 0.4 of the longest, as seen. */
    const double even = heads * all / device->sm_count + 0.4 * longest, cycles = even > longest ? even : longest;
    const double rows = (double)(problem->batch * problem->q_heads * problem->q_len);
    /* Half of converting is hidden behind the last work tiles: in short problems, in long ones more. */
    const double converting = converts(problem, device) ? 0.5 : 1.0,
                 helper_bytes = rows * DIM * (2 * ELEM_BYTES + converting * (ELEM_BYTES + 4));
    const double handing_over_s = 3.3e-6; /* three kernels, each of which waits for the last row of the one before */
    return cycles / device->clock_hz + helper_bytes / acr__memory_rate(problem, device, 1.0) + 3 * ACR__LAUNCH_SECONDS +
           handing_over_s;
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("bwd_wgmma", 90, 90),
    .pass = ACR_BACKWARD,
    .dtype = BF16 ? ACR_BF16 : ACR_F16,
    .traits = PACKED ? ACR__TRAIT_PACKED : 0,
    .terms = TERMS | FWD_TERM_SINKS, /* which are in the log-sum-exp */
    .why_not = why_not,
    .workspace = workspace,
    .cost = cost,
    .shape = shape,
    .boxes = {.q_rows = Q_TILE, .k_rows = BOX_KEYS, .v_rows = BOX_KEYS, .o_rows = Q_TILE},
    .before = {.symbol = KERNEL_TEXT "_prepare", .shape = shape_prepare},
    .after = {.symbol = KERNEL_TEXT "_finish", .shape = shape_finish},
};

#endif
