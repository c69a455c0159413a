/* acromion over several GPUs: the sequence of one attention is split over ranks, which exchange keys and values by copy
 * engines or NCCL (context parallelism). A library of its own, libacromion_nccl, beside libacromion.
 *
 * Each rank is a process or a thread with a GPU of its own. It opens a group, describes the whole problem, and executes
 * with the rows that it holds:
 *
 *     acr_group_options options = ACR_GROUP_OPTIONS_INIT;
 *     options.rank = rank; options.ranks = ranks; options.id = &id;     (rank 0: acr_group_id_create, then sends it)
 *     acr_group *group;            acr_group_create(&group, ctx, &options);
 *     acr_problem p;               acr_problem_parse(&p, "bf16:b1:h16:s131072:d128:causal", NULL);
 *     acr_group_plan *plan;
 *     acr_group_plan_create(&plan, group, &p, ACR_SCHEDULE_AUTO, ACR_ZIGZAG, ACR_ESTIMATE);
 *     acr_group_execute(plan, &buffers, stream);
 *     acr_group_wait(group, stream, 10000);
 *
 * Rules that hold for every function here, beside those of acromion.h:
 *  - acr_group_create, acr_group_measure_link, acr_group_plan_create (or acr_group_refuse in its place) and
 *    acr_group_execute are collective: every rank calls them, in the same order. A rank that is missing, dead or has
 *    other arguments gives every other rank an error within the time limit.
 *  - A group, and its plans, are used by one thread at a time.
 *  - After ACR_TIMEOUT, ACR_PEER of an execution, or ACR_DEVICE_FAULT the group is broken: every later call returns the
 *    same error, and it can only be destroyed. acr_group_plan_create tells ranks that disagree without breaking it.
 *  - Equal arguments on equal machines give equal bits, whatever the order in which transfers end.
 *  - NCCL is loaded by dlopen when a group is made; no NCCL header is needed. */
#ifndef ACROMION_NCCL_H
#define ACROMION_NCCL_H

#include <acromion.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The detail of the last call of this header on this thread that did not return ACR_OK; acr_last_error() is that of
 * acromion.h's. "" before the first. Valid until the next such call on this thread. Never NULL. */
ACR_API const char *acr_group_last_error(void);

/* ---- Group ------------------------------------------------------------------------------------------------------- */

typedef struct acr_group acr_group; /* ranks that execute together, and their communicator */

enum {
    ACR_GROUP_RANKS_MAX = 1024
};

/* What ranks that want to meet share: NCCL's unique id. Plain bytes: send it by any means (MPI, a file, a socket). */
typedef struct acr_group_id {
    char bytes[128];
} acr_group_id;

/* Makes an id, on one rank; NCCL then listens in this process. library: as in acr_group_options.
 * Errors: ACR_INVALID, ACR_NO_DEVICE (NCCL cannot be loaded: the loader's text), ACR_DEVICE_FAULT. */
ACR_API acr_status acr_group_id_create(acr_group_id *out, const char *library);

/* How keys and values go from rank to rank. */
typedef enum acr_transfers {
    /* By copy engines where every rank can, otherwise by NCCL; acr_group_plan_text says which, and why. */
    ACR_TRANSFERS_AUTO = 0,
    ACR_TRANSFERS_NCCL = 1, /* by NCCL's kernels, which take multiprocessors from attention */
    /* By copy engines, which take none: a rank copies its keys and values straight into memory that the others have
     * shared by CUDA's inter-process handles; streams wait for each other's words in that memory. At most 64 ranks of
     * one host, whose GPUs reach each other's memory and who share its /dev/shm. Where a rank cannot, plans fail:
     * ACR_UNSUPPORTED, on every rank. */
    ACR_TRANSFERS_COPY_ENGINES = 2
} acr_transfers;

typedef struct acr_group_options {
    uint32_t size;          /* sizeof(acr_group_options) */
    int32_t rank;           /* 0 to ranks - 1; with comm 0 */
    int32_t ranks;          /* 1 to ACR_GROUP_RANKS_MAX; with comm 0 */
    int32_t device;         /* that of the context's acr_ctx_options; the device's primary context holds what the group
                               allocates */
    uint32_t timeout_ms;    /* how long a rank waits for the others while it makes a group or a plan, and on "cpu" while
                               it executes; 0 = 60000 */
    uint32_t max_ctas;      /* the most thread blocks that NCCL's transfers take from attention's; 0 = as NCCL chooses;
                               at most 64. Of a communicator that the group makes */
    const char *library;    /* path of NCCL's library; NULL = "libnccl.so.2". On "cpu" one that exchanges memory of the
                               host, which NCCL's does not: NULL is refused there */
    const acr_group_id *id; /* of ranks that meet here; NULL with comm */
    void *comm;             /* an ncclComm_t of that library, which the caller keeps and destroys after the group; a
                               broken group leaves aborting it to the caller. NULL with id */
    acr_transfers transfers; /* one rank that asks for NCCL is enough for all */
} acr_group_options;

#define ACR_GROUP_OPTIONS_INIT                                                                                         \
    {                                                                                                                  \
        sizeof(acr_group_options), 0, 0, 0, 0, 0, NULL, NULL, NULL, ACR_TRANSFERS_AUTO                                 \
    }

/* Joins a group. ctx is of this rank's device and outlives the group. The caller frees *out with acr_group_destroy.
 * Errors: ACR_INVALID (options), ACR_NO_DEVICE (NCCL or the driver cannot be loaded), ACR_TIMEOUT (ranks did not come),
 * ACR_PEER, ACR_NO_MEMORY, ACR_DEVICE_FAULT. */
ACR_API acr_status acr_group_create(acr_group **out, acr_ctx *ctx, const acr_group_options *options);

/* Leaves a group, after its plans are destroyed and its work has ended. NULL is a no-op. */
ACR_API void acr_group_destroy(acr_group *group);

/* Waits until the stream's work has ended, at most timeout_ms (0: looks once), and tells what went wrong on the way: on
 * cuda errors of transfers and a rank that does not answer show here, and what was computed is right if nothing did.
 * "cpu": executions are over when they return.
 * Errors: ACR_TIMEOUT (the group is broken: its transfers are aborted, its streams come to their end), ACR_PEER (or
 * another rank gave the group up), ACR_DEVICE_FAULT. */
ACR_API acr_status acr_group_wait(acr_group *group, void *stream, uint32_t timeout_ms);

/* ---- Link -------------------------------------------------------------------------------------------------------- */

/* Measures the link, by the way that keys and values go in this group: what each rank sends to the next while it
 * receives from the one before, the shortest message, and copies inside the device, in buffers of its own, less than a
 * second. Every rank gets the slowest rank's figures, and its context's wisdom has them from now on. Collective; at
 * least two ranks.
 * Errors: ACR_INVALID, ACR_TIMEOUT, ACR_PEER, ACR_NO_MEMORY, ACR_DEVICE_FAULT. */
ACR_API acr_status acr_group_measure_link(acr_group *group, acr_link *out);

/* ---- Plan -------------------------------------------------------------------------------------------------------- */

/* Which rows of a sequence a rank holds, of q and o as of k and v. */
typedef enum acr_placement {
    ACR_CONTIGUOUS = 0, /* chunk r of n */
    ACR_ZIGZAG = 1      /* chunks r and 2n-1-r of 2n, one after the other: ranks have equal work under a causal mask */
} acr_placement;

typedef enum acr_schedule {
    /* ACR_GATHER where there is a window. Otherwise ACR_RING or ACR_GATHER, whichever is expected to end first on the
     * slowest rank; ACR_RING if a rank's wisdom has no link of so many ranks and hosts. acr_group_plan_text says what
     * was expected of both, or what is missing. */
    ACR_SCHEDULE_AUTO = 0,
    /* Each rank attends to the others' blocks of keys and values in turn, that of the rank before it first, while the
     * next ones arrive; the partial outputs are merged in the order of ranks. No windows. */
    ACR_RING = 1,
    /* Each rank receives the keys that its rows see, and only those, a few heads ahead of attention. One pass: nothing
     * is merged. Its buffers hold all of those keys. */
    ACR_GATHER = 2,
    /* Decoding: every rank has the same queries and keys of its own, attends to those, and gets the whole output. What
     * travels is the partial outputs. The problem's k and v are this rank's; kv_len, strides, page and pages may differ
     * between ranks. No mask but causal with q_len 1, which hides nothing. */
    ACR_SHARDED_KEYS = 3
} acr_schedule;

typedef struct acr_rows {
    int64_t first, count; /* positions in the whole sequence */
} acr_rows;

/* The rows that a rank holds, in their order there: out[0], and with ACR_ZIGZAG out[1] (count 0 otherwise). Chunk i of
 * c is [len * i / c, len * (i + 1) / c). Errors: ACR_INVALID. */
ACR_API acr_status acr_shard_rows(acr_rows out[2], int64_t len, int32_t ranks, int32_t rank, acr_placement placement);

typedef struct acr_group_plan acr_group_plan;

/* Makes a plan, with buffers of its own for what is received and for partial results. problem is of the whole sequence
 * (ACR_SHARDED_KEYS: see there) and the same on every rank, as are schedule, placement and effort.
 * ACR_RING and ACR_GATHER: dtype, heads, dims, layout, mask (q_len <= kv_len with a mask), scale and scales, softcap,
 * ACR_SINKS, ACR_WANT_LSE, window_left with a mask; tensors are packed (strides zero); every chunk has a row. Whatever
 * else the problem has is refused by name.
 * The caller frees *out with acr_group_plan_destroy, before the group.
 * Errors: those of acr_plan_create; ACR_UNSUPPORTED (what is refused), ACR_PEER (a rank has other arguments, or failed:
 * which, and its text), ACR_TIMEOUT. */
ACR_API acr_status acr_group_plan_create(acr_group_plan **out, acr_group *group, const acr_problem *problem,
                                         acr_schedule schedule, acr_placement placement, acr_effort effort);

/* In the place of acr_group_plan_create, on a rank that has nothing to plan: its caller has refused the call. The other
 * ranks, which make a plan, get ACR_PEER with this rank's number and text at once, and the group goes on. Ranks that
 * execute a plan instead are not reached: they and this rank wait until the time limit. status: not ACR_OK.
 * Returns status once the others know; errors: ACR_INVALID (an argument), ACR_TIMEOUT, ACR_PEER, ACR_DEVICE_FAULT. */
ACR_API acr_status acr_group_refuse(acr_group *group, acr_status status, const char *text);

/* Frees a plan whose executions have ended. NULL is a no-op. */
ACR_API void acr_group_plan_destroy(acr_group_plan *plan);

/* The schedule, the type of partial results, why ACR_SCHEDULE_AUTO took it, a line for each kernel, how keys and values
 * travel (and why by NCCL), and what is expected of it; "" for NULL. Lives as long as the plan. */
ACR_API const char *acr_group_plan_text(const acr_group_plan *plan);

/* Seconds that an execution is expected to take on the slowest rank: attention by acr_plan_seconds, transfers, by copy
 * engines beside it, by the link that wisdom has (acr_wisdom_find_link). 0 for NULL, one rank, and where a rank's
 * wisdom has no link. */
ACR_API double acr_group_plan_seconds(const acr_group_plan *plan);

/* Bytes that the plan allocated on the device, and bytes that an execution sends to other ranks. 0 for NULL. */
ACR_API size_t acr_group_plan_memory(const acr_group_plan *plan);
ACR_API size_t acr_group_plan_traffic(const acr_group_plan *plan);

/* ---- Execution --------------------------------------------------------------------------------------------------- */

/* Enqueues one execution on the stream, and its transfers on a stream of the group's that waits for it and for which it
 * waits; may be captured into a CUDA graph, which every rank launches in the same order as its other executions, and no
 * more once the group is broken. buffers are this rank's: its rows of q, o and lse (those of acr_shard_rows,
 * packed: [batch, heads, rows, dim] or by the layout, lse [batch, q_heads, rows]), its rows of k and v, all sinks.
 * ACR_SHARDED_KEYS: as acr_execute's of the rank's problem. Executions of one plan follow each other.
 * Errors: those of acr_execute; ACR_TIMEOUT and ACR_PEER ("cpu"). An execution that is refused on one rank leaves the
 * others waiting until their time limit. */
ACR_API acr_status acr_group_execute(acr_group_plan *plan, const acr_buffers *buffers, void *stream);

#ifdef __cplusplus
}
#endif
#endif
