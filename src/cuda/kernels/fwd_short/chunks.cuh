/* fwd_short's pipeline: the exponentials of a chunk of keys with the products of its neighbours between them, and the
 * ways over all chunks: a straight line of code where all keys lie in shared memory, a loop where they pass through a
 * ring. */
#ifndef ACR_CUDA_FWD_SHORT_CHUNKS_CUH
#define ACR_CUDA_FWD_SHORT_CHUNKS_CUH

#include "cuda/kernels/fwd_short/softmax.cuh"

enum {
    ACCUMULATE = RING || ONE_HALF,          /* the output starts as zeros, not with the first product */
    GROUPS = 8,                             /* of 8 keys: a chunk's exponentials in pieces, products between them */
    GROUP_STEPS = SCORE_STEPS <= 4 ? 1 : 2, /* products for scores, in each of the first groups */
    OUTPUT_GROUP = 4                        /* the first group with a product with V, of four */
};

/* The exponentials of one chunk, whose scores are in s; between them, one at a time so that none waits for a full
 * queue, the products that can start: the scores of the chunk after, into s, and the chunk before times V. In an early
 * last chunk also three of its own four times V; end_output starts the fourth. top 0: the top half sees none of these
 * keys. drain: the product with V of two chunks before, from p, is still in flight. At the end only products with V may
 * be. */
DEV void compute_chunk(consumer &c, lane_rows &r, score_tile &s, output_tile &o, probability_tile &p,
                       const probability_tile &before, const int chunk, const int first, const int last, const int top,
                       const int early, const int masked, const int drain)
{
    score_tile t;
    ACR_TRACE_POINT(chunk, "scores ready, masked");
    find_exponents(c, r, t, s, top);
    if (!last)
        wait_keys(c, chunk + 1);
    if (!first)
        wait_values(c, chunk - 1);
    if (drain) {
        WGMMA_WAIT(0);
        release_values(c, chunk - 2);
    }
    ACR_TRACE_POINT(chunk, "scores scaled, next keys and values landed");
    keep_order(c);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int output = early ? group : group - OUTPUT_GROUP; /* the product with V of the chunk before */
        if (!last && group < SCORE_STEPS / GROUP_STEPS) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < GROUP_STEPS; i++)
                score_step(c, s, chunk + 1, GROUP_STEPS * group + i);
            if (group == SCORE_STEPS / GROUP_STEPS - 1)
                wgmma_commit();
        }
        if (!first && output >= 0 && output < 4) {
            wgmma_fence();
            output_step(c, o, before, chunk - 1, output, ACCUMULATE || chunk > 1);
            if (output == 3)
                wgmma_commit();
        }
        if (early && group == 4) {
            if (masked)
                wait_last_values(c);
            else
                wait_values(c, chunk);
        }
        if (early && (group == 4 || group >= 6)) {
            wgmma_fence();
            output_step(c, o, p, chunk, max(0, group - 5), ACCUMULATE || chunk > 0);
        }
        exponentiate(t, group, top);
        if (group > 0)
            add_and_pack(r, p, t, group - 1, top);
        keep_order(c);
    }
    add_and_pack(r, p, t, GROUPS - 1, top);
    ACR_TRACE_POINT(chunk, "exponentials done");
}

/* The last product of an early last chunk. */
DEV void end_output(const consumer &c, output_tile &o, const probability_tile &p, int chunk)
{
    wgmma_fence();
    output_step(c, o, p, chunk, CHUNK_KEYS / WGMMA_K - 1, 1);
    wgmma_commit();
}

#if !RING

/* All chunks, in a straight line of code: their number is a constant, and so is whether any of them needs a mask.
 * Exponentials of the top half only where it sees something. Leaves the last product running. */
DEV void attend(consumer &c, lane_rows &r, score_tile &s, output_tile &o, const int chunks, const int masked)
{
    const int early = !(masked && chunks == 1); /* no gain there */
    probability_tile p[2];                      /* in turn */
    if (!masked)
        keep_scale_in_register(c);
#pragma unroll
    for (int chunk = 0; chunk < STAGES; chunk++) {
        if (chunk == chunks)
            break;
        finish_chunk(c, s, chunk * KV_TILE,
                     masked && chunk >= c.whole_chunks && (chunk < c.top_chunks || chunk >= c.bottom_chunks));
        if (chunk == 0)
            choose_references(c, r, s);
        if (!ONE_HALF && (!masked || chunk == 0 || chunk < c.top_chunks))
            compute_chunk(c, r, s, o, p[chunk % 2], p[1 - chunk % 2], chunk, chunk == 0, chunk == chunks - 1, 1,
                          early && chunk == chunks - 1, masked, 0);
        else
            compute_chunk(c, r, s, o, p[chunk % 2], p[1 - chunk % 2], chunk, chunk == 0, chunk == chunks - 1, 0,
                          early && chunk == chunks - 1, masked, 0);
        if (chunk == chunks - 1)
            break;
        if (chunk == 0)
            WGMMA_WAIT(0);
        else
            WGMMA_WAIT(1);
    }
    if (early) {
        end_output(c, o, p[(chunks - 1) % 2], chunks - 1);
        return;
    }
    wait_last_values(c);
    start_output(c, o, p[(chunks - 1) % 2], chunks - 1, ACCUMULATE);
}

#else

/* A chunk that is neither the first nor the last; at the end no product is in flight, or, where it is late, that with
 * V. drain: the chunk before was late. */
DEV void compute_next(consumer &c, lane_rows &r, score_tile &s, output_tile &o, probability_tile &p,
                      const probability_tile &before, const int chunk, const int top, const int late, const int drain)
{
    finish_chunk(c, s, chunk * KV_TILE, is_masked(c, chunk));
    if (WINDOW && chunk == 1)
        choose_late_references(c, r, s);
    compute_chunk(c, r, s, o, p, before, chunk, 0, 0, top, 0, 1, drain);
    if (late)
        WGMMA_WAIT(1);
    else
        WGMMA_WAIT(0);
    release_keys(c, chunk + 1);
    if (!late)
        release_values(c, chunk - 1);
}

/* Those up to `end`. Two a round without copies pay where there are many; a single one needs a copy, and not a plain
 * one, which the assembler would merge with the original, and then serialise the products. */
DEV void compute_until(consumer &c, lane_rows &r, score_tile &s, output_tile &o, probability_tile &p, int &chunk,
                       const int end, const int top)
{
    probability_tile next;
    if (!SHARED_ROWS)
#pragma unroll 1
        for (; chunk + 1 < end; chunk += 2) {
            compute_next(c, r, s, o, next, p, chunk, top, LATE, 0);
            compute_next(c, r, s, o, p, next, chunk + 1, top, 0, LATE);
        }
#pragma unroll 1
    for (; chunk < end; chunk++) {
        compute_next(c, r, s, o, next, p, chunk, top, 0, 0);
#pragma unroll
        for (int i = 0; i < CHUNK_KEYS / 4; i++)
            p[i] = next[i] ^ c.zero;
    }
}

/* All chunks, at least one, in a loop. Leaves the last products running. */
DEV void attend_ring(consumer &c, lane_rows &r, score_tile &s, output_tile &o)
{
    probability_tile p, end;
    const int last = c.chunks - 1;
    if (SHARED_ROWS) /* else that costs 1 % */
        keep_scale_in_register(c);
    release_keys(c, 0);
    finish_chunk(c, s, 0, is_masked(c, 0));
    choose_references(c, r, s);
    if (last == 0)
        compute_chunk(c, r, s, o, end, p, 0, 1, 1, !ONE_HALF, 0, 1, 0);
    else {
        compute_chunk(c, r, s, o, p, end, 0, 1, 0, !ONE_HALF, 0, 1, 0);
        WGMMA_WAIT(0);
        release_keys(c, 1);
        int chunk = 1;
        if (!ONE_HALF)
            compute_until(c, r, s, o, p, chunk, min(last, c.top_chunks), 1);
        compute_until(c, r, s, o, p, chunk, last, 0);
        finish_chunk(c, s, last * KV_TILE, is_masked(c, last));
        if (WINDOW && last == 1)
            choose_late_references(c, r, s);
        if (!ONE_HALF && last < c.top_chunks)
            compute_chunk(c, r, s, o, end, p, last, 0, 1, 1, 0, 1, 0);
        else
            compute_chunk(c, r, s, o, end, p, last, 0, 1, 0, 0, 1, 0);
    }
    wait_last_values(c);
    start_output(c, o, end, last, 1);
}

#if STRAIGHT

/* STRAIGHT chunks without a mask, in a straight line of code: no probabilities are copied, and the last product is
 * early. Leaves it running. */
DEV void attend_straight(consumer &c, lane_rows &r, score_tile &s, output_tile &o)
{
    probability_tile p[2]; /* in turn */
    release_keys(c, 0);
    choose_references(c, r, s);
#pragma unroll
    for (int chunk = 0; chunk < STRAIGHT; chunk++) {
        compute_chunk(c, r, s, o, p[chunk % 2], p[1 - chunk % 2], chunk, chunk == 0, chunk == STRAIGHT - 1, !ONE_HALF,
                      chunk == STRAIGHT - 1, 0, 0);
        if (chunk == STRAIGHT - 1)
            break;
        WGMMA_WAIT(0);
        release_keys(c, chunk + 1);
        if (chunk > 0)
            release_values(c, chunk - 1);
    }
    end_output(c, o, p[(STRAIGHT - 1) % 2], STRAIGHT - 1);
}

#endif

#endif

#endif
