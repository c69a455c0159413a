/* Rings of K and V whose tiles are not loaded as wgmma wants them: of e4m3 (KV_E4M3=1). The copy engine brings bytes to
 * the slot that the tile is for, three warps beside the producer make it a tile of the queries' type there, and only
 * then it is full. A consumer does not know the difference.
 *
 * A slot needs a barrier more, "landed"; what the widening warps have to know of a tile, the producer notes before it
 * loads its keys. They take tiles in the producer's order, K one key tile ahead of V within a work tile. Other lines
 * have no trace of this. */
#ifndef ACR_CUDA_FWD_WGMMA_WIDENING_CUH
#define ACR_CUDA_FWD_WGMMA_WIDENING_CUH

#include "cuda/device/attention/pipeline.cuh"

enum {
    UPCAST_WARPS = WARPGROUP_THREADS / WARP_THREADS - 1, /* the producer's warpgroup but the warp that loads */
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
    if (note != NO_MORE)
        upcast_tile(at, at, ADDRESS(smem, k_full) + BARRIER_BYTES * stage_of(use), KV_TILE, warp, lane);
    return note;
}

/* Of the values of that tile. Rows that do not exist become zeros: they may hold NaN. */
DEV void widen_values(uint32_t smem, int use, uint32_t note)
{
    const int warp = threadIdx.x / WARP_THREADS - 1, lane = threadIdx.x % WARP_THREADS;
    const uint32_t at = ADDRESS(smem, v) + stage_of(use) * V_BYTES;
    wait_full(ADDRESS(smem, v_landed), use);
    upcast_tile(at, at, ADDRESS(smem, v_full) + BARRIER_BYTES * stage_of(use), (int)(note % LAST_OF_WORK), warp, lane);
}

/* The three warps. */
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
