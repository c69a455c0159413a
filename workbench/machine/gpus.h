/* A table of GPUs: what their vendor publishes, and where that is silent what was measured. For `roofline` and for
 * `why` about a GPU that is not here. */
#ifndef WORKBENCH_GPUS_H
#define WORKBENCH_GPUS_H

#include <stdbool.h>

#include "internal.h"

typedef struct gpu_model {
    const char *name;        /* as --gpu takes it */
    acr__device device;      /* as the backend would describe it; driver 13000 */
    double l2_bytes_per_clk; /* whole chip, reads; 0 = not known: each SM's port is then the bound, 64 bytes a clock */
    double launch_s;         /* of an empty kernel in a stream of them */
    double link_gb_s;        /* that one GPU receives from others of its host at most, 10^9 bytes a second: half of what
                                data sheets print, which is both directions */
    const char *source;      /* of the rates */
} gpu_model;

extern const gpu_model gpu_models[];
extern const size_t gpu_model_count;

/* The model of that name, in small or capital letters, or NULL. */
const gpu_model *gpu_find(const char *name);
/* The same for the option --gpu: returns false after printing that there is no such GPU. */
bool gpu_asked(const char *name, const gpu_model **out);
/* The model with the vendor's name of a device that is here, or NULL. */
const gpu_model *gpu_of_device(const acr__device *device);

/* Dense operations a clock and SM. */
typedef struct sm_rates {
    double f16;  /* fp16 and bf16 tensor FLOP, float32 accumulation */
    double e4m3; /* fp8 tensor FLOP, float32 accumulation; where there is no fp8 unit, that of f16 */
    double f32;  /* float32 FLOP of the ordinary lanes: tensor cores have no float32, and tf32 is not it */
    double exp2; /* exponentials of the special function units */
} sm_rates;
/* By architecture and name (GeForce cards halve the rate with float32 accumulation). */
sm_rates gpu_sm_rates(const acr__device *device);

#endif
