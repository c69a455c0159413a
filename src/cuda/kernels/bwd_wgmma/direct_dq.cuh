/* dQ from the consumers' registers to global memory (DQ_RED=1): it never lies in shared memory, whose bytes a visit is
 * short of. A piece of bwd_wgmma.cu, which includes it.
 *
 * Two threads keep the order of the key tiles. One waits for the turn of a visit and then tells the consumers where its
 * dQ goes, up to DQ_PLACES visits ahead; the other waits until both warpgroups have added theirs and passes the turn.
 * From one CTA's additions to the next one's: consumers arrive at place_left (release), the second thread has waited
 * for it (acquire) and stores the count of visits (release, of the GPU); the first thread of the next CTA has loaded
 * that (acquire) and arrives at place_full (release), where its consumers wait (acquire). Each CTA of a pair has turns
 * of its own, for its half of dQ. */
#ifndef ACR_BWD_WGMMA_DIRECT_DQ_CUH
#define ACR_BWD_WGMMA_DIRECT_DQ_CUH

#include "cuda/device/isa/reduce.cuh"

/* Gives visit `use` its place, when the key tiles before this one have added to it. */
DEV void give_place(uint32_t smem, shared_memory *shared, int use, int turn, float *dq, int32_t *visits)
{
    const int place = use % DQ_PLACES;
    barrier_wait(ADDRESS(smem, place_empty) + BARRIER_BYTES * place, (use / DQ_PLACES & 1) ^ 1);
    if (turn > 0)
        while (load_flag(visits) != turn)
            ;
    shared->places[place] = {dq, turn > 0 || turn == ANY_ORDER, turn, visits};
    barrier_arrive(ADDRESS(smem, place_full) + BARRIER_BYTES * place);
}

DEV void give_turns(const bwd_args &args, uint32_t smem, shared_memory *shared)
{
    const fwd_args &a = args.fwd;
    const int rank = own_rank(); /* of the CTAs of a pair each has half of the parts */
    int use = 0;
    for (uint32_t round = 0;; round++) {
        const key_work *const w = wait_key_work(smem, shared, round);
        const int kv_tile = w->kv_tile;
        if (kv_tile < 0)
            break;
        const int first_head = w->kv_head * a.group, first_tile = bwd_first_tile(&a, w->entry, Q_TILE);
#pragma unroll 1
        for (int tile = w->tile_end - 1; tile >= w->tile_first; tile--) {
            /* the key tiles that visit the query tile are consecutive */
            const int turn =
                args.atomics != 0 ? ANY_ORDER : kv_tile / WORK_CTAS - key_tiles_of(entry_of(a, *w), tile).first;
#pragma unroll 1
            for (int head = first_head; head < first_head + a.group; head++) {
                const tile_results to = results_of(a, head, first_tile + tile);
                if constexpr (PAIR)
                    give_place(smem, shared, use++, turn, to.dq + rank * (DQ_ROUNDS * CONSUMERS * DQ_PART_FLOATS),
                               to.visits + rank);
                else
                    give_place(smem, shared, use++, turn, to.dq, to.visits);
            }
        }
        barrier_arrive(ADDRESS(smem, kv_empty)); /* the work tile is read no more */
    }
    give_place(smem, shared, use, NO_MORE, nullptr, nullptr);
}

DEV void pass_turns(uint32_t smem, const shared_memory *shared)
{
    for (int use = 0;; use++) {
        const int place = use % DQ_PLACES;
        const uint32_t barrier = BARRIER_BYTES * place, parity = use / DQ_PLACES & 1;
        barrier_wait(ADDRESS(smem, place_full) + barrier, parity);
        const int turn = shared->places[place].turn;
        int32_t *const visits = shared->places[place].visits;
        if (turn == NO_MORE)
            return;
        barrier_wait(ADDRESS(smem, place_left) + barrier, parity);
        barrier_arrive(ADDRESS(smem, place_empty) + barrier);
        if (turn >= 0)
            store_flag(visits, turn + 1);
    }
}

/* Adds a part of dQ, the warpgroup's number `count`, in its visit's turn; the first key tile stores it. Register 4g + r
 * of thread t is float 4 (128g + t) + r of the part, so that a warp's floats lie one behind the other. */
DEV void hand_over(const query_gradient &d, const consumer &c, int count)
{
    const int use = count / DQ_ROUNDS, place = use % DQ_PLACES;
    const uint32_t barrier = BARRIER_BYTES * place;
    barrier_wait(ADDRESS(c.smem, place_full) + barrier, use / DQ_PLACES & 1);
    trace_dq_place(count);
    static_assert(offsetof(dq_place, dq) == 0 && offsetof(dq_place, adds) == 8 && sizeof(dq_place) == 32, "the load");
    const uint4 of = load_shared_4(ADDRESS(c.smem, places) + place * sizeof(dq_place));
    float *const to = (float *)((uint64_t)of.y << 32 | of.x) +
                      ((count % DQ_ROUNDS * CONSUMERS + c.index) * DQ_PART_FLOATS + 4 * c.thread);
    if (of.z != 0) {
#pragma unroll
        for (int g = 0; g < 8; g++)
            add_float4(to + g * (WARPGROUP_THREADS * 4), d[4 * g], d[4 * g + 1], d[4 * g + 2], d[4 * g + 3]);
    } else {
#pragma unroll
        for (int g = 0; g < 8; g++)
            *(float4 *)(to + g * (WARPGROUP_THREADS * 4)) =
                make_float4(d[4 * g], d[4 * g + 1], d[4 * g + 2], d[4 * g + 3]);
    }
    if (count % DQ_ROUNDS == DQ_ROUNDS - 1)
        arrive_warp(ADDRESS(c.smem, place_left) + barrier, c.lane);
}

#endif
