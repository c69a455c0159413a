/* Which rows a CTA of fwd_short has and which keys they see, and where the stages of K and V lie. */
#ifndef ACR_CUDA_FWD_SHORT_TILE_CUH
#define ACR_CUDA_FWD_SHORT_TILE_CUH

#include "cuda/device/attention/scores.cuh"
#include "cuda/device/attention/visible.cuh"
#include "cuda/device/isa/barrier.cuh"
#include "cuda/device/isa/shared.cuh"
#include "cuda/kernels/fwd_short/parameters.h"

/* The address of a member of shared_memory, which begins at `smem`. */
#define ADDRESS(smem, member) ((smem) + (uint32_t)offsetof(shared_memory, member))

enum {
    /* Named barriers (0 is __syncthreads). */
    VOTE = 1,
    CONSUMER_ALONE = 2, /* and 3: one for each */
    WARP_PAIR = 4,      /* to 7: the warps of both consumers that hold the same rows */
    REFERENCES = 8      /* to 15, EXACT: consumer 0's and 1's warps have told their references */
};

/* A consumer's query rows are HALF_ROWS from first[0], counted from the top, and HALF_ROWS from first[1], as far from
 * the bottom; where the two meet, rows are held twice or do not exist. With WINDOW the second half follows the first:
 * then the rows of a tile see nearly the same keys. */
typedef struct tile {
    int first[2];
    int head, batch;
    sequence rows;
    visible_entry entry;
    visible_keys seen[2]; /* by each half */
    int first_key;        /* of the first stage */
    int stages;           /* that hold every key which the CTA's rows see */
} tile;

/* half: 0 from the top, 1 from the bottom. */
DEV int first_row(const fwd_args &a, int half, int consumer)
{
    if (WINDOW)
        return ((int)blockIdx.x * HALVES + (ONE_HALF ? 0 : half)) * HALF_ROWS;
    const int from_end = SHARED_ROWS ? blockIdx.x : 2 * blockIdx.x + consumer;
    return (half && !ONE_HALF ? (a.q_len - 1) / HALF_ROWS - from_end : from_end) * HALF_ROWS;
}

/* The entry, if its rule has a mask or has none: the compiler knows which. Both are asked what rows see and one answer
 * is taken: of the entry itself the compiler would make a jump for each answer, which costs more than the
 * instructions. */
DEV visible_entry as_masked(const visible_entry &e)
{
    return {{e.rule.mask == FWD_MASK_TOP_LEFT ? FWD_MASK_TOP_LEFT : FWD_MASK_BOTTOM_RIGHT, 0, 0}, e.q_len, e.kv_len};
}

DEV visible_entry as_unmasked(const visible_entry &e)
{
    return {{FWD_MASK_NONE, 0, 0}, e.q_len, e.kv_len};
}

DEV visible_keys half_keys(const visible_entry &e, int first)
{
    if (WINDOW)
        return visible_to_rows(e, first, HALF_ROWS);
    const visible_keys all = visible_to_rows(as_unmasked(e), first, HALF_ROWS),
                       some = visible_to_rows(as_masked(e), first, HALF_ROWS);
    return e.rule.mask == FWD_MASK_NONE ? all : some;
}

/* As find_row_keys, and above as visible_to_rows. */
DEV row_keys lane_keys(const visible_entry &e, int row_0, int row_1, int first_column)
{
    if (WINDOW)
        return find_row_keys(e, row_0, row_1, first_column);
    const row_keys all = find_row_keys(as_unmasked(e), row_0, row_1, first_column),
                   some = find_row_keys(as_masked(e), row_0, row_1, first_column);
    return e.rule.mask == FWD_MASK_NONE ? all : some;
}

DEV tile find_tile(const fwd_args &a, int consumer)
{
    tile t;
    t.head = blockIdx.y;
    t.batch = blockIdx.z;
    t.rows = EXACT ? sequence{0, a.q_len, 0, EXACT_KEYS} : find_sequence(a, t.batch);
    t.entry = entry_of(a, t.rows);
    if (!WINDOW) /* none: known to the compiler */
        t.entry.rule = {a.mask, 0, 0};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        t.first[half] = first_row(a, half, consumer);
        t.seen[half] = half_keys(t.entry, t.first[half]);
    }
    int end = max(t.seen[0].end, t.seen[1].end);
    if (!SHARED_ROWS) /* rows see the more keys the lower they are */
        end = max(end, half_keys(t.entry, max(first_row(a, 0, 1), first_row(a, 1, 0))).end);
    t.first_key = WINDOW ? t.seen[0].first / KV_TILE * KV_TILE : 0;
    t.stages = (end - t.first_key + KV_TILE - 1) / KV_TILE;
    return t;
}

DEV head_scales scales_of(const fwd_args &a, const tile &t)
{
    return E4M3 ? find_scales(a, t.batch, t.head / a.group) : head_scales{score_scale(a), score_scale_log2(a), 1.0f};
}

/* ---- Stages: a step is one use of a stage. Without a ring each stage is used once. ---- */

/* Of the stages' barriers, the first of which is at `first`. */
DEV uint32_t barrier_of(uint32_t first, int step)
{
    return first + BARRIER_BYTES * (RING ? step % STAGES : step);
}

DEV uint32_t phase_of(int step)
{
    return RING ? step / STAGES & 1 : 0;
}

DEV uint32_t stage_of(uint32_t first, int step, int bytes)
{
    return first + (RING ? step % STAGES : step) * bytes;
}

/* Where V lands in its stage: at the stage's end, so that e4m3 can be upcast in place from the stage's start on. */
DEV uint32_t v_load_at(uint32_t smem, int step)
{
    return stage_of(ADDRESS(smem, v), step, V_STAGE_BYTES) + V_STAGE_BYTES - LOAD_BYTES;
}

/* The stage's values have landed, as they are in global memory. */
DEV void wait_loaded_values(uint32_t smem, int step)
{
    barrier_wait(barrier_of(JOINT ? ADDRESS(smem, k_full) : ADDRESS(smem, v_full), step), phase_of(step));
}

/* With a ring: whether the consumers want everything once more. */
DEV int wait_verdict(uint32_t smem)
{
    barrier_wait(ADDRESS(smem, verdict), 0);
    return load_shared(ADDRESS(smem, again));
}

#endif
