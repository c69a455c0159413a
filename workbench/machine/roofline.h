/* The physical floor of a problem: no kernel can take less time. Not a prediction: real kernels add launches, latencies
 * and imperfect overlap. */
#ifndef WORKBENCH_ROOFLINE_H
#define WORKBENCH_ROOFLINE_H

#include <stdbool.h>

#include "internal.h"

/* What a machine can do at most. */
typedef struct machine {
    char name[96];
    const char *source;
    double multiply_add_flops[ACR_E4M3 + 1]; /* by input type, FLOP/s of the units that kernels would use */
    double exps_per_s;                       /* exponentials of the special function units; cpu: by polynomial */
    double exps_per_s_most;                  /* the most, with some of them moved to idle multiply-add lanes */
    double cache_bytes_per_s, cache_bytes;   /* L2; cpu: at the problem's own size, measured, and no further limit */
    double memory_bytes_per_s;               /* DRAM */
    double launch_s;                         /* of an empty kernel in a stream; 0 on a cpu */
    double link_bytes_per_s;                 /* that one of several GPUs receives from the others; 0 = not known */
    double cpu_share;                        /* cpu: of the processors' time what this process had meanwhile; else 1 */
    bool shared_lanes; /* cpu: exponentials and multiply-adds take the same lanes, so their times add */
} machine;

/* From a device that is here or a line of the table (gpus.h). */
void machine_of_gpu(machine *out, const acr__device *device);
/* Measures this machine's processors, with a working set of so many bytes: 0.4 s. Rates are of
 * the time in which this process ran, so that a busy machine has nearly an idle one's floors. */
void machine_of_cpu(machine *out, const acr__device *device, uint32_t threads, double bytes);

/* The least work that a problem is. What a bias, ranges or a tree hide is not known here: pairs are those that masks,
 * windows, chunks, key starts and lengths leave. */
typedef struct problem_work {
    double flops; /* 2 a multiply-add, two products, of a backward pass five; visible keys only */
    double exps;  /* one for each visible pair of a row and a key, two with a softcap (its tanh) */
    double bytes; /* every element of q, of the bias and of the keys and values that a row sees read once, of o and lse
                     written once; of a backward pass o, lse and the gradient of o read, all gradients written */
} problem_work;

/* lengths: whose kv_lens and kv_starts, or offsets and totals, on the host, say which keys the batch entries have; its
 * other members are not used. NULL: all are the longest. problem is canonical. */
problem_work work_of(const acr_problem *problem, const acr_buffers *lengths);

typedef struct floor_times {
    double multiply_add_s, exp_s,
        exp_sfu_s; /* exp_sfu_s: without help of the multiply-add lanes; not part of the floor */
    double cache_s, memory_cold_s, memory_warm_s; /* warm: only what exceeds the cache comes from memory */
    double warm_s, cold_s;                        /* the floors: inputs in the cache (stream mode), inputs in memory */
    const char *warm_bound, *cold_bound;          /* which of them binds */
} floor_times;

void floor_of(floor_times *out, const machine *m, const acr_problem *problem, const problem_work *d);

/* Over several GPUs, which hold equal shares of the rows and of the keys (docs/manual/several-gpus.md). */
typedef struct shared_floor {
    floor_times times; /* of one GPU's share; warm_s and cold_s are not below link_s */
    double link_bytes; /* what the GPU that sees most receives: the keys and values of the others, or where no mask asks
                          for more the others' partial results, whichever is less */
    double link_s;
} shared_floor;

/* Why a problem is not split over GPUs, or NULL. */
const char *not_shared(const acr_problem *problem);

/* m->link_bytes_per_s is known; d is of the whole problem. */
void floor_over_gpus(shared_floor *out, const machine *m, const acr_problem *problem, const problem_work *d,
                     int64_t gpus);

/* What a target of so many seconds is worth. */
typedef enum target_verdict {
    TARGET_IMPOSSIBLE,  /* below the floor */
    TARGET_IMPLAUSIBLE, /* above the floor, but not by as much as an empty launch takes */
    TARGET_HARD,        /* needs more than 70 % of the floor's rate after the launch: nobody is known to sustain that */
    TARGET_OPEN         /* physics does not forbid it */
} target_verdict;
target_verdict judge_target(const machine *m, const floor_times *f, double target_s);
const char *target_verdict_text(target_verdict verdict);

#endif
