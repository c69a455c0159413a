/* The made-up CPU kernel: see probe_kernel.h. */
#include "probe_kernel.h"

#include <stdatomic.h>
#include <string.h>

static _Atomic int runs, lanes_max, scratch_faults;

void probe_reset(void)
{
    runs = 0;
    lanes_max = 0;
    scratch_faults = 0;
}

probe_record probe_read(void)
{
    return (probe_record){runs, lanes_max, scratch_faults};
}

static const char *why_not(const acr_problem *problem, const acr__device *device)
{
    (void)device;
    return problem->q_len == 13 ? "q_len is 13: the probe is superstitious" : NULL;
}

static size_t workspace(const acr_problem *problem, const acr__device *device)
{
    (void)problem;
    return (size_t)device->threads * PROBE_SCRATCH_BYTES;
}

static double cost(const acr_problem *problem, const acr__device *device)
{
    (void)problem;
    return 1.0 / device->threads;
}

/* Adds one to every element of a query row. */
static void visit_row(const fwd_args *args, int64_t batch, int64_t head, int64_t row)
{
    const int64_t first = batch * args->o_stride.batch + head * args->o_stride.head + row * args->o_stride.row;
    for (int64_t d = 0; d < args->v_dim; d++)
        acr__store_element(ACR_F16, args->o, first + d, acr__load_element(ACR_F16, args->o, first + d) + 1.0);
}

static void visit_tile(const fwd_args *args, int64_t tile, int64_t tiles_per_head)
{
    const int64_t first = tile % tiles_per_head * PROBE_Q_TILE, head = tile / tiles_per_head;
    for (int64_t row = first; row < first + PROBE_Q_TILE && row < args->q_len; row++)
        visit_row(args, head / args->q_heads, head % args->q_heads, row);
}

static void note_lanes(int32_t lanes)
{
    int known = lanes_max;
    while (lanes > known && !atomic_compare_exchange_weak(&lanes_max, &known, lanes))
        ;
}

static void take_tiles(const fwd_args *args, _Atomic int64_t *queue)
{
    const int64_t tiles_per_head = (args->q_len + PROBE_Q_TILE - 1) / PROBE_Q_TILE;
    const int64_t tiles = (int64_t)args->batch * args->q_heads * tiles_per_head;
    for (int64_t tile; (tile = atomic_fetch_add(queue, 1)) < tiles;)
        visit_tile(args, tile, tiles_per_head);
}

static void run(const fwd_args *args, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    (void)lane;
    runs++;
    note_lanes(lanes);
    if (!scratch || (uintptr_t)scratch % 64 != 0) {
        scratch_faults++;
        return;
    }
    /* The scratch is this lane's alone: a mark of its own must still be there at the end. */
    const unsigned char mark = (unsigned char)(1 + lane);
    memset(scratch, mark, PROBE_SCRATCH_BYTES);
    take_tiles(args, queue);
    for (int i = 0; i < PROBE_SCRATCH_BYTES; i++)
        if (((unsigned char *)scratch)[i] != mark) {
            scratch_faults++;
            return;
        }
}

static void run_without_scratch(const fwd_args *args, int32_t lane, int32_t lanes, _Atomic int64_t *queue,
                                void *scratch)
{
    (void)lane;
    (void)scratch;
    runs++;
    note_lanes(lanes);
    take_tiles(args, queue);
}

/* Stands for the text that identifies a CPU kernel's machine code. */
static const unsigned char identity[] = "probe kernel, version 1";

#define PROBE_COMMON                                                                                                   \
    .family = "probe", .backend = ACR__CPU, .dtype = ACR_F16, .qk_dim_max = 256, .v_dim_max = 256,                     \
    .q_tile = PROBE_Q_TILE, .kv_tile = 1, .stages = 1, .why_not = why_not, .cost = cost, .image = identity,            \
    .image_end = identity + sizeof identity - 1

const acr__kernel probe_kernel = {
    .name = "fwd_probe_f16_d256_4x1_portable", PROBE_COMMON, .workspace = workspace, .run = run};
const acr__kernel probe_kernel_without_workspace = {
    .name = "fwd_probe_f16_d256_4x1_bare_portable", PROBE_COMMON, .run = run_without_scratch};
