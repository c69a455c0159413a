/* Forward attention for short problems on Hopper, fp16, bf16 and e4m3: the latency kernel, sm_90a. One CTA a query
 * tile, alone on its SM.
 *
 * A producer thread loads Q, K and V by tensor maps; two consumer warpgroups multiply. With tiles of 64 or 32 rows both
 * hold the same rows and share the keys, of every 128 the first 64 and the last 64, and add their results at the end;
 * with tiles of 128 rows each holds its own. All keys of a head lie in shared memory at once, or pass through a ring.
 * Of a consumer's rows, 32 are from the top and 32 from the bottom of the sequence, so that under a causal mask all
 * CTAs have about the same number of exponentials. A tile of 32 rows fills half of each product, and is for problems
 * that would leave SMs without work.
 *
 * The softmax does not search for the row maximum: it subtracts the maximum over the row's first 16 keys of each
 * consumer. Every exponential is at most the row sum, so a sum within fp16's range proves at the end that no
 * probability overflowed; otherwise the row is computed once more, with the true maximum. See README.md.
 *
 * Scores of e4m3 inputs are products of 8 bits. V is upcast to fp16, which holds all of e4m3, where it lies in shared
 * memory, by warps of the producer's warpgroup; then all is as with fp16. Products of 8 bits would want V transposed,
 * and probabilities in 8 bits.
 *
 * Parameters: DIM (64 or 128: head dims up to it, zero-padded), STAGES (of 128 keys, of 64 with Q_TILE 128: without a
 * ring kv_len <= 128 * STAGES); optional Q_TILE (32, 64, 128; default 64), RING=1, BF16=1 or E4M3=1, LAG (of consumer
 * 1, in cycles), WINDOW=1 (for sliding windows, with a ring and tiles of 32 or 64 rows; the other lines take none,
 * so that they need not look for one), EXACT=1 (kv_len is 128 * STAGES, no less; exact.cuh says what for), TERMS (with
 * WINDOW: FWD_TERM_* of fwd_args.h, of softcap, sinks and limits).
 *
 * PARAMETERS: DIM STAGES Q_TILE=64 RING=0 BF16=0 E4M3=0 LAG=0 WINDOW=0 EXACT=0 TERMS=0 */
#include "fwd_args.h"

#include "cuda/kernels/fwd_short/parameters.h"

enum {
    SMEM_BYTES = sizeof(shared_memory)
};

#ifdef __CUDACC__

#if EXACT
#include "cuda/kernels/fwd_short/exact.cuh"
#endif
#include "cuda/kernels/fwd_short/loading.cuh"
#include "cuda/kernels/fwd_short/second_pass.cuh"
#include "cuda/kernels/fwd_short/upcast.cuh"

static_assert(DIM == 64 || DIM == 128, "DIM: 64 or 128");
static_assert(!(BF16 && E4M3), "BF16, E4M3: one of them");
static_assert(Q_TILE == 32 || Q_TILE == 64 || (Q_TILE == 128 && RING), "Q_TILE: 32, 64, or with a ring 128");
static_assert(RING ? STAGES >= 2 : STAGES >= 1 && STAGES <= 4,
              "STAGES: a straight line of code for each number of chunks");
static_assert(SHARED_ROWS || STAGES >= 4,
              "STAGES: with Q_TILE 128 the keys two chunks ahead of a late one have a stage");
static_assert(!WINDOW || (RING && SHARED_ROWS), "WINDOW: a ring, and Q_TILE 32 or 64");
static_assert(!EXACT || (DIM == 64 && Q_TILE == 64 && !RING && !E4M3 && LAG == 0),
              "EXACT: DIM 64, Q_TILE 64, 16-bit inputs, no ring, no LAG");
static_assert(!TERMS || (WINDOW && !E4M3 && ((TERMS) & ~(FWD_TERM_CAP | FWD_TERM_SINKS | FWD_TERM_LIMITS)) == 0),
              "TERMS: softcap, sinks and limits, beside WINDOW, of 16-bit inputs");
static_assert(SMEM_BYTES <= 232448, "stages: 227 KB, a CTA's limit on sm_90");

/* All chunks; the last product is done at the end. Returns whether the tile must be computed again. */
DEV int attend_all(consumer &c, lane_rows &r, score_tile &s, output_tile &o, row_results &f)
{
    int again;
/* clang-format off */
#if RING
#if STRAIGHT
    if (c.chunks == STRAIGHT && !c.masked && c.present_rows == CHUNK_KEYS) {
        attend_straight(c, r, s, o);
        again = find_factors(c, r, f);
        WGMMA_WAIT(0);
    } else
#endif
    if (c.chunks > 0) {
        attend_ring(c, r, s, o);
        again = find_factors(c, r, f);
        WGMMA_WAIT(0);
    } else
#else
    /* One straight line of code for each number of chunks, with masks or without: taken jumps cost more than the
     * instructions that they save, since each code line is executed once and comes from afar. */
#define ATTEND(number, with_mask)                    \
    if (c.chunks == number && c.masked == with_mask) { \
        attend(c, r, s, o, number, with_mask);         \
        again = find_factors(c, r, f);                        \
        WGMMA_WAIT(0);                                 \
    } else
#if STAGES >= 4
    ATTEND(4, 0) ATTEND(4, 1)
#endif
#if STAGES >= 3
    ATTEND(3, 0) ATTEND(3, 1)
#endif
#if STAGES >= 2
    ATTEND(2, 0) ATTEND(2, 1)
#endif
    ATTEND(1, 0) ATTEND(1, 1)
#endif
    {
#pragma unroll
        for (int i = 0; i < DIM / 2; i++)
            o[i] = 0.0f;
        again = find_factors(c, r, f);
    }
/* clang-format on */
#undef ATTEND
    return again;
}

/* What is rare comes last. */
DEV void consume(const fwd_args &a, const tile &t, uint32_t smem, int index)
{
    consumer c;
    row_results f;
    lane_rows r = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    score_tile s;
    output_tile o;
    uint32_t packed[OUT_ROWS][DIM / 8];
    make_consumer(c, a, t, smem, index);
    locate_rows(f, a, t, c);
    /* Asked here: behind the stores the answers would come late. */
    int hides = hides_keys(a, t.entry), wants_lse = a.lse != nullptr;
    asm volatile("" : "+r"(hides), "+r"(wants_lse));
    receive_query(c);
    lag_behind(index);
    if (ACCUMULATE)
#pragma unroll
        for (int i = 0; i < DIM / 2; i++)
            o[i] = 0.0f;
    compute_first_scores(c, s);
    const int again = attend_all(c, r, s, o, f);
    store_output_rows(c, packed, o, f);
    const int stores = !ONE_HALF || index == 1;
    const int spoilt = hides && stores && spoils_a_row(packed, f);
    /* One question for all that is rare, so that its code is far from what every tile passes. */
    if (__builtin_expect(again || spoilt || wants_lse, 0)) {
        if (again)
            compute_again(c, r, o, f, packed);
        if (stores)
#pragma unroll
            for (int out = 0; out < OUT_ROWS; out++)
                finish_row(a, t, c, f, packed[out], out, again);
    }
    end_order(c, o);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_NAME(const __grid_constant__ fwd_args a, const __grid_constant__ fwd_maps maps)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t smem = smem_address(memory);
#if EXACT
    run_exact(a, maps, smem);
#else
    const int warp = __shfl_sync(~0u, threadIdx.x / WARP_THREADS, 0); /* the same in all lanes, for the compiler too */
    const int producer_warp = CONSUMER_THREADS / WARP_THREADS;
    const int kv_head = a.group == 1 ? blockIdx.y : blockIdx.y / a.group;
    ACR_TRACE_POINT(0, "start");
    if (warp == producer_warp && elect_one()) {
        key_source source = {kv_head, (int)blockIdx.z, 0};
        if (WINDOW) { /* otherwise nothing is read before the first loads */
            wait_for_previous_kernel();
            source.row_first = find_tile(a, 0).first_key;
        }
        load_first(a, maps, smem, source);
        init_barriers(smem);
    }
    __syncwarp();
    meet_other_kernels(a);
    const tile t = find_tile(a, warp / CONSUMER_WARPS % CONSUMERS);
    __syncthreads();
    ACR_TRACE_POINT(0, "CTA ready");
    if (warp >= producer_warp) {
        REGISTERS_GIVE(PRODUCER_REGISTERS);
        if (warp == producer_warp && elect_one())
            load_all(maps, smem, {kv_head, t.batch, t.first_key}, t.stages);
        if (E4M3 && warp >= producer_warp + 1)
            upcast_all(smem, t.stages, t.rows.kv_len - t.first_key);
    } else {
        REGISTERS_TAKE(CONSUMER_REGISTERS);
        consume(a, t, smem, warp / CONSUMER_WARPS);
    }
#endif
    ACR_TRACE_END(a);
}

#else

#include "cuda/model/fwd_model.h"

static const acr__tiling TILING = {
    .work = ACR__WORK_TILES, .q_tile = Q_TILE, .threads = THREADS, .smem_bytes = SMEM_BYTES};

#include "cuda/model/tile_kernel.h"

static int has_window(const acr_problem *problem)
{
    return problem->window_left != 0 || problem->window_right != 0;
}

static const char *exact_why_not(const acr_problem *problem)
{
    if (problem->kv_len != EXACT_KEYS)
        return STAGES == 4   ? "kv_len is not 512: this kernel is for exactly so many keys"
               : STAGES == 2 ? "kv_len is not 256: this kernel is for exactly so many keys"
                             : "kv_len is not 128 a stage: this kernel is for exactly so many keys";
    if (problem->kv_heads != problem->q_heads)
        return "kv_heads is not q_heads: this kernel is for query heads with keys of their own";
    if (problem->flags & ACR_KV_LENS)
        return "kv_lens: this kernel is for one number of keys, whatever the batch entry";
    if (problem->mask != ACR_MASK_NONE && problem->q_len != problem->kv_len)
        return "q_len is not kv_len: under a mask this kernel is for as many rows as keys";
    return NULL;
}

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    if (!WINDOW && has_window(problem))
        return "window_left, window_right: this kernel looks for no window; fwd_short's _window kernels are for them";
    const char *reason = EXACT ? exact_why_not(problem) : NULL;
    if (reason != NULL)
        return reason;
    if (!RING && problem->kv_len > STAGES * KV_TILE)
        return STAGES == 4   ? "kv_len is above 512: this kernel keeps all keys in shared memory"
               : STAGES == 2 ? "kv_len is above 256: this kernel keeps all keys in shared memory"
                             : "kv_len is above 128 a stage: this kernel keeps all keys in shared memory";
    return tile_why_not(problem, device);
}

/* Measured on an H200, in cycles at 1980 MHz: a step (Q_TILE rows, KV_TILE keys), and what a CTA takes besides. */
static double step_cycles(void)
{
    if (DIM == 128)
        return Q_TILE == 32 ? 1400.0 : 1650.0;
    if (!SHARED_ROWS)
        return 1030.0;
    if (EXACT)
        return 770.0;
    return Q_TILE == 64 ? (RING ? 1050.0 : 1100.0) : RING ? 900.0 : 780.0;
}

static double cta_cycles(void)
{
    if (DIM == 128)
        return (Q_TILE == 32 ? 3350.0 : 3700.0) + (RING ? 450.0 : 0.0);
    if (!SHARED_ROWS)
        return 3900.0;
    const double less_code = STAGES < 4 ? 150.0 : 0.0;
    if (EXACT)
        return 3450.0 - less_code;
    return (Q_TILE == 64 ? (RING ? 3750.0 : 3200.0) : RING ? 3100.0 : 3030.0) - less_code;
}

static double cost(const acr_problem *problem, const acr__device *device)
{
    acr_problem padded = acr__padded(problem, DIM, DIM);
    if (!has_window(problem))
        padded.mask = ACR_MASK_NONE; /* nearly every CTA has rows that see nearly all keys */
    const acr__fwd_rates rates = {
        .mma_flop_per_cycle = 3600.0,
        .exp_per_cycle = 13.0,
        .step_cycles = step_cycles(),
        .cta_cycles = cta_cycles() + (WINDOW && !TERMS && !has_window(problem) ? 5000.0 : 0.0), /* no choice */
        .ctas_per_sm = 1,
    };
    return tile_seconds_unpadded(&padded, device, rates) * tile_terms_cost(problem, TERMS);
}

const acr__kernel KERNEL_DESCRIPTION = {
    TILE_KERNEL("fwd_short", 90, 90),
    .dtype = E4M3 ? ACR_E4M3 : (BF16 ? ACR_BF16 : ACR_F16),
    .terms = TERMS,
    .why_not = why_not,
    .cost = cost,
    .shape = tile_shape,
    .boxes = {.q_rows = HALF_ROWS, .k_rows = KV_TILE, .v_rows = KV_TILE},
};

#endif
