/* A plan: the kernels, the buffers, and what a schedule does with them. plan.c makes and ends plans; each schedule has
 * a file with the two functions of dist_schedule. */
#ifndef ACR_DIST_PLAN_H
#define ACR_DIST_PLAN_H

#include "group.h"
#include "push.h"
#include "shards.h"

/* A kernel with a workspace of its own; calls of equal problems share it. */
typedef struct dist_kernel {
    char text[ACR_PROBLEM_TEXT_MAX]; /* of its problem */
    double seconds;                  /* that a call is expected to take */
    acr_plan *plan;                  /* NULL in an estimate */
    void *workspace;
} dist_kernel;

/* One attention of a piece. Offsets are bytes from the first element of the rank's tensors, or of a block. */
typedef struct dist_call {
    int kernel, piece;
    int step; /* ring: of the block; gather: the stage of the heads */
    size_t q, k, v;
    int64_t q_head; /* the first */
    size_t o;       /* gather: where in the rank's o */
    acr_part part;  /* ring, sharded keys: where o and lse go */
    int with_sinks;
} dist_call;

typedef struct dist_schedule dist_schedule;

struct acr_group_plan {
    acr_group *group;
    const dist_schedule *schedule;
    acr_problem problem; /* canonical; of the whole sequence, or with sharded keys the rank's */
    acr_effort effort;
    int is_estimate;         /* nothing is allocated or loaded, and nothing can be executed */
    double seconds;          /* expected, of the slowest rank; 0 where a rank knows no link */
    char choice[512];        /* why ACR_SCHEDULE_AUTO took this schedule; "" where the caller did */
    acr_dtype part_dtype;    /* of partial outputs */
    char narrow_reason[512]; /* why that is not f32; "" where it is, or the problem's output says otherwise */
    dist_way way;            /* of keys and values */
    char way_reason[512];    /* why NCCL */
    dist_push *push;         /* by copies: the others' view of `shared`; NULL in an estimate */
    void *shared;            /* what dist_plan_alloc_shared gave out lies in it; NULL by NCCL */
    int channels;            /* of `shared` */
    dist_sequences sequences;
    int64_t q_rows, kv_rows; /* of this rank */
    dist_piece *pieces;
    int piece_count;
    dist_kernel *kernels;
    int kernel_count;
    dist_call *calls;
    int call_count;
    void **memory; /* all that was allocated on the device */
    int memory_count;
    size_t memory_bytes, traffic_bytes;
    void *own; /* the schedule's own data, one block of malloc */
    char *text;
};

/* prepare: counts, calls, kernels, memory. execute: buffers are checked. expect: seconds of this rank. */
struct dist_schedule {
    const char *name;
    double (*expect)(const acr_group_plan *plan, const acr_link *link);
    acr_status (*prepare)(acr_group_plan *plan);
    acr_status (*execute)(acr_group_plan *plan, const acr_buffers *buffers, void *stream);
};
extern const dist_schedule dist_ring, dist_gather, dist_sharded_keys;

size_t dist_dtype_bytes(acr_dtype dtype);
size_t dist_round_up(size_t bytes); /* to 256 */
acr_dtype dist_kv_dtype(const acr_problem *p);

/* Strides of a packed tensor. */
acr_strides dist_packed(acr_layout layout, int64_t heads, int64_t rows, int64_t dim);
int64_t dist_element(const acr_strides *s, int64_t head, int64_t row);

/* Memory of the device that lives as long as the plan. */
acr_status dist_plan_alloc(acr_group_plan *plan, size_t bytes, void **out);

/* Likewise, the only such memory of a plan: what other ranks push into, where that is the plan's way. */
acr_status dist_plan_alloc_shared(acr_group_plan *plan, int channels, size_t bytes, void **out);

/* A zeroed block of the host, freed by free. */
acr_status dist_calloc(size_t count, size_t bytes, void *out);

/* The problem of a call: `rows` rows see `keys`; tensors by the strides. Partial outputs have the plan's part_dtype and
 * an lse. */
typedef struct dist_shape {
    int64_t rows, q_heads, kv_heads;
    dist_keys keys;
    acr_strides q, k, v, o;
    int is_partial, with_sinks;
} dist_shape;

/* Adds a call with its kernel, whose alignment is what the call's offsets leave. */
acr_status dist_plan_add_call(acr_group_plan *plan, const dist_call *call, const dist_shape *shape);

/* The kernel for a problem, found or made. */
acr_status dist_plan_kernel(acr_group_plan *plan, const acr_problem *problem, int *out);

/* Expected seconds of the calls of a step. */
double dist_plan_attention(const acr_group_plan *plan, int step);

/* Expected seconds of joining `count` parts of `rows` rows of o, all heads and entries counted. */
double dist_plan_merging(const acr_group_plan *plan, const acr_link *link, int64_t rows, int count);

/* Executes a call; k and v are where its block begins. */
acr_status dist_plan_run(const acr_group_plan *plan, const dist_call *call, const acr_buffers *rank, const void *k,
                         const void *v, void *o, float *lse, void *stream);

/* ---- Choosing (choose.c) ---- */

/* Whether this rank's wisdom has the link of the group's ranks and hosts. If not, acr_last_error() says so. */
int dist_link_of(const acr_group *group, acr_link *out);

/* Of the two schedules that both serve the problem the one whose slowest rank is expected to end first; the plan keeps
 * its own where a rank knows no link. Collective. */
acr_status dist_plan_choose(acr_group_plan *plan, const dist_schedule *other);

/* What an estimate of a plan needs of plan.c. */
acr_status dist_plan_prepare(acr_group_plan *plan);
void dist_plan_unprepare(acr_group_plan *plan);

#endif
