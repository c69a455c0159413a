/* fwd_short's parameters, the sizes that follow from them, and what lies where in shared memory: for its device code
 * and for its host description alike. */
#ifndef ACR_CUDA_FWD_SHORT_PARAMETERS_H
#define ACR_CUDA_FWD_SHORT_PARAMETERS_H

#include <stddef.h>
#include <stdint.h>

#include "cuda/device/attention/parameters.h"

#ifndef E4M3
#define E4M3 0
#endif
#ifndef Q_TILE
#define Q_TILE 64
#endif
#ifndef RING
#define RING 0
#endif
#ifndef LAG
#define LAG 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef EXACT
#define EXACT 0
#endif
/* With a ring: so many chunks without a mask pass in a straight line of code. Each costs 3 KB, so only 64 rows at d128,
 * where it brings 5 %. */
#define STRAIGHT (RING && DIM == 128 && Q_TILE == 64 && !E4M3 && !WINDOW ? 4 : 0)
#define PACKED 0 /* no parameter: the device headers of all families ask whether batches can be packed */

enum {
    PANEL_ROW_BYTES = 128, /* a tile is stored in panels of such rows, as the swizzle wants it */
    OUT_BYTES = 2,         /* of an element of the output, and of V when it is multiplied */
    PANEL_ELEMS = PANEL_ROW_BYTES / OUT_BYTES,
    PANELS = DIM / PANEL_ELEMS,
    ELEM_BYTES = E4M3 ? 1 : 2,                /* of Q, K and V in global memory */
    BOX_ELEMS = PANEL_ROW_BYTES / ELEM_BYTES, /* of them in a panel's row */
    BOXES = (DIM + BOX_ELEMS - 1) / BOX_ELEMS,
    HALF_ROWS = 32, /* a consumer's rows: so many from the top, and as many from the bottom */
    HALVES = Q_TILE / HALF_ROWS,
    ONE_HALF = HALVES == 1,    /* the bottom half is all that there is; the top one holds the same, and is not stored */
    SHARED_ROWS = HALVES <= 2, /* both consumers hold the same rows */
    CHUNK_KEYS = 64,           /* that a consumer takes at a time */
    KV_TILE = SHARED_ROWS ? 2 * CHUNK_KEYS : CHUNK_KEYS,
    CONSUMERS = 2,
    CONSUMER_WARPS = 4, /* of each */
    CONSUMER_THREADS = CONSUMERS * CONSUMER_WARPS * 32,
    PRODUCER_THREADS = 128, /* a whole warpgroup, for its registers */
    THREADS = CONSUMER_THREADS + PRODUCER_THREADS,
    /* Registers of a thread, multiples of 8: the launch gives every thread an equal share, then the producer's go to
     * the consumers. */
    PRODUCER_REGISTERS = E4M3 ? 72 : 24,
    CONSUMER_REGISTERS = E4M3 ? 216 : 240,
    OUT_ROWS = SHARED_ROWS ? 1 : 2, /* that a lane stores */
    /* With Q_TILE 128: K and V of a stage land and are released together, one barrier in place of two; and of the two
     * chunks of a round, the first does not wait for its product with V. Either alone brings nothing there. */
    JOINT = !SHARED_ROWS,
    LATE = !SHARED_ROWS,
    Q_PANEL_BYTES = HALF_ROWS * PANEL_ROW_BYTES,
    KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES,
    Q_HALF_BYTES = PANELS * Q_PANEL_BYTES, /* the output's, which takes its place */
    LOAD_BYTES = BOXES * KV_PANEL_BYTES,   /* of a stage of K or V, as it lands */
    K_STAGE_BYTES = LOAD_BYTES,
    V_STAGE_BYTES = PANELS * KV_PANEL_BYTES,
    CHUNK_PANEL_BYTES = CHUNK_KEYS * PANEL_ROW_BYTES, /* in a panel */
    EXACT_KEYS = STAGES * KV_TILE,                    /* EXACT: so many keys, no more and no fewer */
    ONES_ROWS = 16,                                   /* of ones behind V: of one product's keys; all share them */
};

/* What a thread tells the thread of the other consumer that holds the same two rows. */
typedef struct row_sums {
    float reference[2], sum[2];
} row_sums;

/* EXACT: what the consumers tell each other of a row. */
typedef struct shared_row {
    float reference[CONSUMERS], sum[CONSUMERS];
} shared_row;

typedef struct shared_memory {
    unsigned char q[HALVES][Q_HALF_BYTES]; /* then the output */
    unsigned char k[STAGES][K_STAGE_BYTES], v[STAGES][V_STAGE_BYTES];
    __extension__ unsigned char ones[EXACT ? ONES_ROWS : 0][PANEL_ROW_BYTES];
    /* EXACT: both consumers' outputs, of each warp eight rows of either half, and its rows. */
    __extension__ unsigned char whole_part[EXACT ? CONSUMERS : 0][CONSUMER_WARPS][2][8][PANEL_ROW_BYTES];
    __extension__ shared_row row[EXACT ? CONSUMER_WARPS : 0][2][8];
    /* What a consumer gives to the other one: row sums, and half of its output, of each thread 8 columns at a time. */
    __extension__ row_sums sums[SHARED_ROWS ? CONSUMERS : 0][CONSUMER_WARPS * 32];
    __extension__ uint32_t part[SHARED_ROWS ? CONSUMERS : 0][DIM / 32][CONSUMER_WARPS * 32][4];
    /* mbarriers of each stage: K and V have landed; V of e4m3 is fp16 now; K and V are not read any more. */
    uint64_t k_full[STAGES], v_full[STAGES];
    __extension__ uint64_t v_upcast[E4M3 ? STAGES : 0];
    __extension__ uint64_t k_free[RING ? STAGES : 0], v_free[RING ? STAGES : 0];
    /* With a ring the producer waits to be told whether the consumers compute the tile again. */
    __extension__ uint64_t verdict[RING ? 1 : 0], again[RING ? 1 : 0];
} shared_memory;

#endif
