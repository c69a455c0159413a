/* What a GPU's ways of copying ask of a problem's layout, and how long a GPU needs for it: shared by the why_not and
 * cost functions of the kernel families. No CUDA header needed. */
#ifndef ACR_CUDA_FWD_MODEL_H
#define ACR_CUDA_FWD_MODEL_H

#include "kernel.h"

/* Why lengths are so long that tile arithmetic in 32 bits could overflow; NULL when they are not. Head dims above a
 * kernel's are refused before why_not is asked (acr__why_not). */
const char *acr__length_why_not(const acr_problem *problem);

/* Why rows cannot be copied in pieces of 16 bytes: pointers, head dims or strides that are no multiple of it. NULL when
 * they can. */
const char *acr__vector_why_not(const acr_problem *problem);

/* Why these tensor maps cannot be made: beyond acr__vector_why_not, a stride that is zero or 2^40 bytes and more. NULL
 * when they can. */
const char *acr__boxes_why_not(const acr_problem *problem, const acr__boxes *boxes);

/* Why a grid of {query tiles, q_heads, batch} is too large for a launch; NULL when it is not. */
const char *acr__grid_why_not(const acr_problem *problem, int32_t q_tile);

/* Of kernels whose rows are the query heads of a key head times the query positions, in a grid of {CTAs of a tile, row
 * tiles of all key heads, batch}: the row tiles of one key head, and why the grid or the keys, shared out in 32-bit
 * numbers, would be too many; NULL when they are not. */
int64_t acr__row_tiles(const acr_problem *problem, int32_t q_tile);
const char *acr__row_tiles_why_not(const acr_problem *problem, int32_t q_tile);

/* Why a CTA's shared memory is more than the device has; NULL when it is not. */
const char *acr__smem_why_not(int32_t smem_bytes, const acr__device *device);

/* The query tiles of one head. */
int64_t acr__q_tiles(const acr_problem *problem, int32_t q_tile);

/* A CTA for each query tile of every head, in a grid of {query tiles, q_heads, batch}. */
acr__launch acr__tile_launch(const acr_problem *problem, int32_t q_tile, int32_t threads, int32_t smem_bytes);

/* Of kernels whose CTAs, one for each SM at most, take the query tiles of all heads from a queue
 * (device/attention/tile_scheduler.cuh):
 * why the queue would be too long, NULL when it is not; the bytes of its counter, none when every CTA has one tile; and
 * the launch. */
const char *acr__queue_why_not(const acr_problem *problem, int32_t q_tile);
size_t acr__queue_workspace(const acr_problem *problem, const acr__device *device, int32_t q_tile);
acr__launch acr__queue_launch(const acr_problem *problem, const acr__device *device, int32_t q_tile, int32_t threads,
                              int32_t smem_bytes);

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

/* The rates of one kernel on one SM, for acr__fwd_seconds. */
typedef struct acr__fwd_rates {
    const char *kernel; /* its name: a line of rates.def for it and the device's architecture replaces the rates */
    int32_t q_tile, kv_tile;
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
