/* What `acromion profile` asks Nsight Compute for, and what came back. The list is fixed: records of different days and
 * kernels can be laid beside each other. */
#ifndef WORKBENCH_PROFILE_COUNTERS_H
#define WORKBENCH_PROFILE_COUNTERS_H

#include <jansson.h>
#include <stdbool.h>

/* id, key in records, unit as printed, Nsight Compute's metric, what it is */
#define PROFILE_COUNTERS(X)                                                                                            \
    X(DURATION, "duration_us", "us", "gpu__time_duration.sum", "one launch, alone")                                    \
    X(SM_CLOCK, "sm_clock_mhz", "MHz", "sm__cycles_elapsed.avg.per_second", "SM clock during it")                      \
    X(SM_ACTIVE, "sm_active_pct", "%", "sm__cycles_active.avg.pct_of_peak_sustained_elapsed", "SMs that have a CTA")   \
    X(SM_THROUGHPUT, "sm_throughput_pct", "%", "sm__throughput.avg.pct_of_peak_sustained_elapsed",                     \
      "busiest part of the SMs")                                                                                       \
    X(MEMORY_THROUGHPUT, "memory_throughput_pct", "%",                                                                 \
      "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed", "busiest part of the memory system")         \
    X(TENSOR, "tensor_pct", "%", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "tensor cores")    \
    X(EXPONENTIALS, "exponentials_pct", "%", "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",            \
      "special function units")                                                                                        \
    X(FMA, "fma_pct", "%", "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed", "multiply-add lanes")       \
    X(ALU, "alu_pct", "%", "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed",                             \
      "integer and compare lanes")                                                                                     \
    X(ISSUE, "issue_pct", "%", "sm__inst_issued.avg.pct_of_peak_sustained_elapsed", "issue slots")                     \
    X(SHARED, "shared_pct", "%", "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",                  \
      "shared memory and L1")                                                                                          \
    X(L2, "l2_pct", "%", "lts__throughput.avg.pct_of_peak_sustained_elapsed", "L2")                                    \
    X(DRAM, "dram_pct", "%", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "DRAM")                         \
    X(L2_BYTES, "l2_bytes", "bytes", "lts__t_bytes.sum", "moved through L2")                                           \
    X(DRAM_READ, "dram_read_bytes", "bytes", "dram__bytes_read.sum", "read from DRAM")                                 \
    X(DRAM_WRITE, "dram_write_bytes", "bytes", "dram__bytes_write.sum", "written to DRAM")                             \
    X(WAVEFRONTS, "shared_wavefronts", "", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",                           \
      "shared-memory accesses, by wavefront")                                                                          \
    X(CONFLICTS, "bank_conflicts", "", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",                           \
      "of them, repeated for bank conflicts")                                                                          \
    X(OCCUPANCY, "occupancy_pct", "%", "sm__warps_active.avg.pct_of_peak_sustained_active",                            \
      "warps on an SM, of what it holds")                                                                              \
    X(REGISTERS, "registers", "", "launch__registers_per_thread", "a thread")                                          \
    X(GRID, "ctas", "", "launch__grid_size", "in the grid")                                                            \
    X(BLOCK, "threads", "", "launch__block_size", "a CTA")                                                             \
    X(SMEM, "smem_bytes", "bytes", "launch__shared_mem_per_block_dynamic", "dynamic shared memory a CTA")              \
    X(WAVES, "waves", "", "launch__waves_per_multiprocessor", "of CTAs")

typedef enum profile_counter {
#define X(id, key, unit, metric, what) COUNTER_##id,
    PROFILE_COUNTERS(X)
#undef X
    COUNTER_COUNT
} profile_counter;

/* reason, in Nsight Compute's word; what the warps wait for */
#define PROFILE_STALLS(X)                                                                                              \
    X(barrier, "a barrier of the CTA or of some warps")                                                                \
    X(branch_resolving, "a branch")                                                                                    \
    X(dispatch_stall, "the dispatcher")                                                                                \
    X(drain, "stores on their way at the end")                                                                         \
    X(gmma, "a warpgroup product")                                                                                     \
    X(imc_miss, "the constant cache")                                                                                  \
    X(lg_throttle, "room in the queue of global accesses")                                                             \
    X(long_scoreboard, "global or L2 data")                                                                            \
    X(math_pipe_throttle, "a busy arithmetic unit")                                                                    \
    X(membar, "a memory fence")                                                                                        \
    X(mio_throttle, "room in the queue of shared-memory and special-function instructions")                            \
    X(misc, "something else")                                                                                          \
    X(no_instruction, "the instruction cache")                                                                         \
    X(not_selected, "their turn: another warp was taken")                                                              \
    X(short_scoreboard, "shared memory or a special function")                                                         \
    X(sleeping, "nanosleep")                                                                                           \
    X(tex_throttle, "room in the texture queue")                                                                       \
    X(wait, "a fixed latency of the instruction before")

typedef enum profile_stall {
#define X(reason, what) STALL_##reason,
    PROFILE_STALLS(X)
#undef X
    STALL_COUNT
} profile_stall;

typedef struct profile_counters {
    double value[COUNTER_COUNT]; /* in the units above; NaN where the tool had none */
    double stall[STALL_COUNT];   /* warps that wait for it, a cycle in which an instruction issues; NaN likewise */
} profile_counters;

typedef struct counter_info {
    const char *key, *unit, *metric, *what;
} counter_info;
extern const counter_info counter_infos[COUNTER_COUNT];

typedef struct stall_info {
    const char *reason, *metric, *what;
} stall_info;
extern const stall_info stall_infos[STALL_COUNT];

/* All NaN. */
profile_counters profile_no_counters(void);

/* Reads what `ncu --csv --page raw` printed of the kernel of that name: a line a launch with a column a metric, or
 * (older versions) a line a metric. Lines that are no table, units and their prefixes, grouping commas and "n/a" are
 * dealt with. Returns how many launches of the kernel were found; the last one counts. *is_table: whether there was a
 * table at all. text is changed. */
int profile_parse_csv(profile_counters *out, char *text, const char *kernel, bool *is_table);

/* {"key": number or null, ...}, and the stalls by reason. */
json_t *counters_json(const profile_counters *c);
json_t *stalls_json(const profile_counters *c);

#endif
