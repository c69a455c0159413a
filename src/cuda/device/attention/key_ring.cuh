/* The ring of key tiles of a group of warps that loads by cp.async what it computes on: STAGES stages, K and V in each,
 * the next tiles on their way while one is in use.
 *
 * An includer defines KV_TILE, STEP_KEYS (from one of the group's tiles to its next), GROUP_THREADS, ELEM_BYTES,
 * ROW_CHUNKS (of a row of Q, K and V), and struct kv_stage {k, v}. */
#ifndef ACR_DEVICE_ATTENTION_KEY_RING_CUH
#define ACR_DEVICE_ATTENTION_KEY_RING_CUH

#ifndef V_ROW_CHUNKS /* of a row of V alone, where a CTA takes some of its columns */
#define V_ROW_CHUNKS ROW_CHUNKS
#endif

#include "cuda/device/attention/kv_loader.cuh"
#include "cuda/device/attention/tile_scheduler.cuh"
#include "cuda/device/attention/warp_tile.cuh"

typedef struct key_ring {
    chunk_matrix k, v;
    uint32_t stages; /* the first's address */
    int thread;      /* of the group */
    int next;        /* key of the next tile to load */
    int end;         /* one past the last key to load */
} key_ring;

/* Of a work tile's head, from key `first` on. */
DEV key_ring make_ring(const fwd_args &a, const work_tile &t, int first, int end, uint32_t stages, int thread)
{
    const key_source source = key_source_of(t.rows, t.batch, divide_small(t.head, a.group));
    return {key_matrix(a.k, a.k_stride, source, a.qk_dim, ELEM_BYTES),
            key_matrix(a.v, a.v_stride, source, a.v_dim, ELEM_BYTES),
            stages,
            thread,
            first,
            end};
}

/* The rows of a work tile's head of Q. */
DEV chunk_matrix query_matrix(const fwd_args &a, const work_tile &t)
{
    return head_matrix_of(a.q, a.q_stride, t.batch, t.head, t.rows.q_begin, a.qk_dim, ELEM_BYTES);
}

DEV uint32_t stage_address(const key_ring &ring, int stage)
{
    return ring.stages + stage * (uint32_t)sizeof(kv_stage);
}

/* Starts loading the next tile into a stage: two groups of copies, K and V, empty beyond the last tile. */
DEV void load_next(key_ring &ring, int stage)
{
    const uint32_t to = stage_address(ring, stage);
    if (ring.next < ring.end)
        load_tile<KV_TILE, ROW_CHUNKS, GROUP_THREADS>(to, ring.k, ring.next, ring.end, ring.thread);
    copies_commit();
    if (ring.next < ring.end)
        load_tile<KV_TILE, V_ROW_CHUNKS, GROUP_THREADS>(to + offsetof(kv_stage, v), ring.v, ring.next, ring.end,
                                                        ring.thread);
    copies_commit();
    ring.next += STEP_KEYS;
}

#endif
