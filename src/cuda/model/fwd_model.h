/* What a GPU's ways of launching and copying ask of a problem, and how long a GPU needs for it: behind the why_not,
 * workspace, shape and cost functions of the kernel families (tile_kernel.h). No CUDA header needed. */
#ifndef ACR_CUDA_FWD_MODEL_H
#define ACR_CUDA_FWD_MODEL_H

#include "kernel.h"

/* Which CTAs have which rows. */
typedef enum acr__work {
    ACR__WORK_OWN,      /* as the family's own shape function says, which limits nothing but the lengths */
    ACR__WORK_TILES,    /* a CTA has a query tile of a head: grid {query tiles, q_heads, batch} */
    ACR__WORK_QUEUE,    /* CTAs, one for each SM at most, take the query tiles of all heads from a queue
                           (device/attention/tile_scheduler.cuh), whose counter lies in the workspace */
    ACR__WORK_HEAD_ROWS /* rows are the query heads of a key head times the query positions; the grid, of the family's
                           own shape function, is {CTAs of a row tile, row tiles of all key heads, batch} */
} acr__work;

/* What a kernel's launch and its copies ask of a problem and a device. */
typedef struct acr__tiling {
    acr__work work;
    int32_t q_tile, threads, smem_bytes; /* of a CTA; smem_bytes: dynamic */
    int32_t heads_in_tile;               /* ACR__WORK_QUEUE: query heads of one key head that share a tile; 0 means 1 */
    int any_strides;                     /* rows are read element by element; else in pieces of 16 bytes */
    int packed_only;                     /* serves packed batches alone */
    int caches_only;                     /* serves paged caches and those of another type than q alone */
    int narrow_only;                     /* of them those of another type than q */
    int no_windows;                      /* has no registers for a sliding window's limits */
} acr__tiling;

/* Why a kernel tiled like this, with these tensor maps, cannot run the problem; NULL when it can. Head dims above a
 * kernel's are refused before (acr__why_not). */
const char *acr__tiling_why_not(const acr__tiling *tiling, const acr__boxes *boxes, const acr_problem *problem,
                                const acr__device *device);

/* The bytes of a queue's counter; 0 without a queue, and when every CTA has one tile. */
size_t acr__tiling_workspace(const acr__tiling *tiling, const acr_problem *problem, const acr__device *device);

/* The launch of ACR__WORK_TILES and ACR__WORK_QUEUE. */
acr__launch acr__tiling_launch(const acr__tiling *tiling, const acr_problem *problem, const acr__device *device);

/* The query tiles of one head; and, of ACR__WORK_HEAD_ROWS, the row tiles of one key head. */
int64_t acr__q_tiles(const acr_problem *problem, int32_t q_tile);
int64_t acr__row_tiles(const acr_problem *problem, int32_t q_tile);

/* The CTAs that fit on an SM beside each other; at least 1. */
int32_t acr__ctas_per_sm(const acr__device *device, int32_t smem_bytes, int32_t regs_per_thread, int32_t threads);

/* Whether mma.sync with float32 accumulation runs at half the rate that other cards of the architecture have: GeForce
 * cards, which say so by their name alone. */
int acr__accumulates_slowly(const acr__device *device);

/* What an SM does of 16-bit mma.sync in a cycle, beside one of sm_80 or sm_90. */
double acr__mma_share(const acr__device *device);

/* The problem with the head dims that a kernel's products run over, for acr__fwd_seconds. */
acr_problem acr__padded(const acr_problem *problem, int32_t qk_dim, int32_t v_dim);

/* Bytes a second at which CTAs read a problem's tensors: the L2 cache's where all fit, else the memory's, for each of
 * `readers` CTAs that read the same bytes at about the same time (1 = none do), up to the cache's. */
double acr__memory_rate(const acr_problem *problem, const acr__device *device, double readers);

/* An empty kernel in a graph of them, measured on an H200: part of every cost. */
#define ACR__LAUNCH_SECONDS 0.7e-6

/* The rates of one kernel on one SM, for acr__fwd_seconds. A family states by formula what holds where nobody has
 * fitted a kernel: other GPUs, new lines, candidates of a search. Where rates.def has a line for the kernel and the
 * device's architecture, all seven rates come from that line and none from the family; only ctas_per_sm is always the
 * family's. */
typedef struct acr__fwd_rates {
    const char *kernel; /* its name: a line of rates.def for it and the device's architecture replaces the rates */
    int32_t q_tile, kv_tile;
    int32_t heads_in_tile;     /* whose rows make up a query tile, each q_tile / heads_in_tile positions; 0 means 1 */
    double mma_flop_per_cycle; /* both products, a SM's all pipes together */
    double exp_per_cycle;
    double step_cycles;  /* shortest time of one CTA for one (query tile, key tile) pair: dependent latencies */
    double cta_cycles;   /* of each query tile: first load, last store */
    double mask_cycles;  /* more of each CTA when the problem is causal: tiles across the diagonal */
    double first_cycles; /* once: until the first CTAs are at work, caches and tensor maps cold */
    double memory_share; /* of the memory's or L2's bandwidth that it reaches; 0 = all */
    int32_t ctas_per_sm;
} acr__fwd_rates;

/* Expected seconds of one execution in a stream of them: the last CTA's end, or the SMs' shared pipes, or memory,
 * whichever binds, and the launch. Rough; only the order of kernels matters. */
double acr__fwd_seconds(const acr_problem *problem, const acr__device *device, const acr__fwd_rates *rates);

/* A line of rates.def: the rates of one kernel, fitted to measurements on GPUs of one architecture. A device may carry
 * one that counts before those of the file (acr__device.rates_on_trial). */
typedef struct acr__fitted_rates {
    const char *kernel; /* its name without the type, so that fp16 and bf16 share a line */
    int32_t arch;
    double mma_flop_per_cycle, exp_per_cycle, step_cycles, cta_cycles, memory_share, mask_cycles, first_cycles;
} acr__fitted_rates;

/* Writes a kernel's name as rates.def has it: without "_f16", "_bf16" and the like. */
void acr__rates_key(char *out, size_t capacity, const char *kernel);

#endif
