/* Rings of K and V whose tiles are not loaded as wgmma wants them: of e4m3 (KV_E4M3=1). The copy engine brings bytes to
 * the slot that the tile is for, the warps beside the producer make it a tile of the queries' type there, and only
 * then it is full. A consumer does not know the difference.
 *
 * A slot needs a barrier more, "landed"; what the widening warps have to know of a tile, the producer notes before it
 * loads its keys. They take tiles in the producer's order, K one key tile ahead of V within a work tile. Other lines
 * have no trace of this. */
#ifndef ACR_CUDA_FWD_WGMMA_WIDENING_CUH
#define ACR_CUDA_FWD_WGMMA_WIDENING_CUH

#include "cuda/device/attention/pipeline.cuh"

/* O += P * V, of operands in fp16 beside scores of bf16, or of those that all products have. */
#if VALUES_F16
#undef WGMMA_TYPE
#define WGMMA_TYPE "f16"
/* clang-format off */
namespace f16_operands {
WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37)
WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69)
}
/* clang-format on */
#define OUTPUT_PRODUCT f16_operands::wgmma_rs_mn
#else
#define OUTPUT_PRODUCT wgmma_rs_mn
#endif

enum {
    UPCAST_WARPS = UPCAST_GROUPS * WARPGROUP_THREADS / WARP_THREADS - 1, /* all but the warp that loads */
    /* Of the tiles that the producer loads. */
    LOADED_ELEMS = PANEL_ROW_BYTES / KV_BYTES, /* in a panel's row */
    LOADED_K_PANELS = (DIM + LOADED_ELEMS - 1) / LOADED_ELEMS,
    LOADED_V_PANELS = (V_DIM + LOADED_ELEMS - 1) / LOADED_ELEMS
};

/* The barriers of its loads. */
#if KV_E4M3
#define K_LOADED k_landed
#define V_LOADED v_landed
#else
#define K_LOADED k_full
#define V_LOADED v_full
#endif

#if KV_E4M3

enum {
    PANELS = V_PANELS,
    UPCAST_VECTORS = 4, /* widen_rows.cuh; what PRODUCER_REGISTERS have room for */
    UPCAST_UNROLLED = 1,
    LAST_OF_WORK = 1 << 16, /* in a note, beside the number of rows of V that exist */
    NO_MORE = 1 << 17
};

#include "cuda/device/attention/widen_rows.cuh"

#if UPCAST_ROWS
/* A tile is upcast by units of 512 bytes, 16 for each lane: whole rows, since a row of the first panel takes the place
 * of the row that it is made of, and a warp has read its rows before it writes. Eight lanes side by side are in
 * different banks whenever they read and write: four are in one half of a row, the upper four in the other half of the
 * same row, or of the fourth after it, and these write their second piece first. */
enum {
    UNIT_BYTES = 512,
    UNITS = DIM == 128 ? KV_TILE / 4 : KV_TILE / 8,
    UNITS_EACH = (UNITS + UPCAST_WARPS - 1) / UPCAST_WARPS,
    UNITS_AT_ONCE = UPCAST_GROUPS > 1 ? 2 : 3,                /* that a lane has in registers */
    UNIT_ROW_BYTES = DIM == 128 ? UNIT_BYTES : 2 * UNIT_BYTES /* from a unit to the next */
};

/* A lane's places in a warp's unit 0: of what it reads, and of the first 16 bytes that it writes; the second are beside
 * them, on the other side of a multiple of 32. Of DIM 128, units are in the halves of the swizzle's period in turn, and
 * then half a row apart. */
typedef struct unit_places {
    uint32_t from, first;
} unit_places;

DEV int unit_row(int lane)
{
    const int eight = lane / 8, upper = lane / 4 % 2;
    return DIM == 128 ? eight : eight + 4 * upper;
}

/* Which 16 bytes of its row a lane reads. Of DIM 64 a row has four pieces, by the swizzle in either half. */
DEV int unit_piece(int lane)
{
    return DIM == 64 ? lane % 4 : lane % 8;
}

DEV int writes_second_first(int lane)
{
    return lane / 4 % 2;
}

DEV unit_places find_unit_places(uint32_t tile, int warp, int lane)
{
    const int piece = unit_piece(lane), column = piece % 4 * 2 + writes_second_first(lane);
    const int in_period = unit_row(lane) + (DIM == 128 ? warp % 2 * 4 : 0);
    const uint32_t at = tile + warp * UNIT_ROW_BYTES + unit_row(lane) * PANEL_ROW_BYTES;
    return {at + ((piece ^ in_period) << 4), at + piece / 4 * KV_PANEL_BYTES + ((column ^ in_period) << 4)};
}

/* The same place in the warp's unit i. */
DEV uint32_t in_unit(uint32_t place, int i)
{
    return (place ^ (DIM == 128 ? i % 2 * 64 : 0)) + i * UPCAST_WARPS * UNIT_ROW_BYTES;
}

/* Whether the warp has a unit i: by its number only of the last, which some have. */
DEV bool is_unit(int warp, int i)
{
    return i < UNITS_EACH && (UPCAST_WARPS * (i + 1) <= UNITS || warp + UPCAST_WARPS * i < UNITS);
}

/* Sixteen e4m3, by a lane that writes the second eight first, or not. */
template <int TO_BF16> DEV void write_unit(uint32_t first, const uint4 &x, bool swapped)
{
    const uint2 a = widen_e4m3<TO_BF16>(swapped ? x.z : x.x), b = widen_e4m3<TO_BF16>(swapped ? x.w : x.y);
    store_shared_4(first, a.x, a.y, b.x, b.y);
    const uint2 c = widen_e4m3<TO_BF16>(swapped ? x.x : x.z), d = widen_e4m3<TO_BF16>(swapped ? x.y : x.w);
    store_shared_4(first ^ 16, c.x, c.y, d.x, d.y);
}

/* A warp's part of a tile, as upcast_tile. CLEARS: some rows may not be present. */
template <int TO_BF16, bool CLEARS> DEV void upcast_units(uint32_t tile, uint32_t done, int present, int warp, int lane)
{
    static_assert(UPCAST_WARPS % 2 == 1, "a warp's units are at the two places of the period in turn");
    const unit_places p = find_unit_places(tile, warp, lane);
    const int row = warp * (UNIT_ROW_BYTES / PANEL_ROW_BYTES) + unit_row(lane);
#pragma unroll
    for (int first = 0; first < UNITS_EACH; first += UNITS_AT_ONCE) {
        uint4 x[UNITS_AT_ONCE];
#pragma unroll
        for (int j = 0; j < UNITS_AT_ONCE; j++) {
            const int i = first + j;
            if (is_unit(warp, i))
                x[j] = load_shared_4(in_unit(p.from, i));
            if (CLEARS && row + UPCAST_WARPS * i * (UNIT_ROW_BYTES / PANEL_ROW_BYTES) >= present)
                x[j] = {0, 0, 0, 0};
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < UNITS_AT_ONCE; j++) {
            const int i = first + j;
            if (is_unit(warp, i))
                write_unit<TO_BF16>(in_unit(p.first, i), x[j], writes_second_first(lane));
        }
    }
    shared_stores_visible();
    __syncwarp();
    if (lane == 0)
        barrier_arrive(done);
}
#endif

static_assert(!VALUES_F16 || UPCAST_ROWS, "VALUES_F16: beside UPCAST_ROWS");

DEV uint32_t note_at(uint32_t smem, int use)
{
    return ADDRESS(smem, notes) + (uint32_t)sizeof(shared_memory::notes[0]) * stage_of(use);
}

/* As the producer: the next note, once the slot is empty; so whoever reads the last one has done so. */
DEV void write_note(const kv_ring &k, uint32_t smem, int use, uint32_t note)
{
    barrier_wait(k.empty + BARRIER_BYTES * stage_of(use), parity_of(use) ^ 1);
    store_shared(note_at(smem, use), note);
}

/* A warp's part of a key tile, whose note is returned. */
DEV uint32_t widen_keys(uint32_t smem, int use)
{
    const int warp = threadIdx.x / WARP_THREADS - 1, lane = threadIdx.x % WARP_THREADS;
    const uint32_t at = ADDRESS(smem, k) + stage_of(use) * K_BYTES;
    wait_full(ADDRESS(smem, k_landed), use);
    const uint32_t note = load_shared(note_at(smem, use));
    const uint32_t done = ADDRESS(smem, k_full) + BARRIER_BYTES * stage_of(use);
    if (note != NO_MORE)
#if UPCAST_ROWS
        upcast_units<BF16, false>(at, done, KV_TILE, warp, lane);
#else
        upcast_tile(at, at, done, KV_TILE, warp, lane);
#endif
    return note;
}

/* Of the values of that tile. Rows that do not exist become zeros: they may hold NaN. */
DEV void widen_values(uint32_t smem, int use, uint32_t note)
{
    const int warp = threadIdx.x / WARP_THREADS - 1, lane = threadIdx.x % WARP_THREADS;
    const uint32_t at = ADDRESS(smem, v) + stage_of(use) * V_BYTES;
    wait_full(ADDRESS(smem, v_landed), use);
    const uint32_t done = ADDRESS(smem, v_full) + BARRIER_BYTES * stage_of(use);
    const int present = (int)(note % LAST_OF_WORK);
#if UPCAST_ROWS
    if (present < KV_TILE)
        upcast_units<BF16 && !VALUES_F16, true>(at, done, present, warp, lane);
    else
        upcast_units<BF16 && !VALUES_F16, false>(at, done, present, warp, lane);
#else
    upcast_tile(at, at, done, present, warp, lane);
#endif
}

/* The upcasting warps. */
DEV void widen_tiles(uint32_t smem)
{
    int use = 0;
    uint32_t note = widen_keys(smem, use);
    while (note != NO_MORE) {
#pragma unroll 1
        while (!(note & LAST_OF_WORK)) {
            const uint32_t next = widen_keys(smem, use + 1);
            widen_values(smem, use++, note);
            note = next;
        }
        widen_values(smem, use++, note);
        note = widen_keys(smem, use);
    }
}

#endif

/* What is told of key tile `tile` of a work tile, before its keys are loaded as use number `use`. */
DEV void tell_widening(const kv_ring &k, uint32_t smem, int use, const work_tile &t, const visible_tiles &tiles,
                       int tile)
{
#if KV_E4M3
    const int rows = min(max(t.rows.kv_len - tile * KV_TILE, 0), KV_TILE);
    write_note(k, smem, use, rows | (tile == tiles.first ? LAST_OF_WORK : 0));
#endif
}

/* There is no more work: `use` would be the next. */
DEV void end_widening(const kv_ring &k, uint32_t smem, int use)
{
#if KV_E4M3
    write_note(k, smem, use, NO_MORE);
    barrier_arrive(k.full + BARRIER_BYTES * stage_of(use));
#endif
}

#endif
