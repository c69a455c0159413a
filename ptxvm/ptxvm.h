/* A machine that executes PTX on the CPU: device code runs in tests on machines without a GPU, slowly, one launch at a
 * time, with every access checked. It knows the instructions that the kernels of this project use (NVIDIA's PTX ISA 9.0
 * tells what they do) and refuses others by name.
 *
 * It is no model of a GPU's speed. It executes warps in an order drawn from a seed, asynchronous copies and wgmma as
 * late as the program's waits allow (or at once), and so finds missing waits and barriers that a GPU forgives most of
 * the time. What it cannot show: ptxas's own faults, and orders that need two warps' instructions at once. */
#ifndef PTXVM_H
#define PTXVM_H

#include <stddef.h>
#include <stdint.h>

typedef struct ptxvm_module ptxvm_module;

/* Parses a module of PTX text. Returns NULL and an error's text ("line 12: unknown instruction foo.b32") where it
 * cannot. The module does not keep the text. */
ptxvm_module *ptxvm_load(const char *text, char *error, size_t error_bytes);
void ptxvm_free(ptxvm_module *module); /* NULL does nothing */

/* Whether the module holds this entry. */
int ptxvm_has_entry(const ptxvm_module *module, const char *entry);

/* What a launch of an entry must agree with. */
typedef struct ptxvm_needs {
    int parameter_count;
    size_t parameter_bytes[8];
    uint32_t static_smem_bytes; /* beside which the launch's dynamic ones lie */
    uint32_t max_threads;       /* of a CTA, 0 = not said */
} ptxvm_needs;

/* 0 = done, -1 = the module has no such entry. */
int ptxvm_describe(const ptxvm_module *module, const char *entry, ptxvm_needs *out);

/* Whether accesses of shared memory that no barrier orders end a launch, whatever order they happened to have. */
typedef enum ptxvm_races {
    PTXVM_RACES_OFF,
    PTXVM_RACES_ON,
    PTXVM_RACES_STRICT /* and stores of what is there already, and lanes of a warp that no .sync has gathered */
} ptxvm_races;

typedef struct ptxvm_launch {
    const ptxvm_module *module;
    const char *entry;
    uint32_t grid[3], block[3];
    uint32_t cluster;            /* CTAs along x that share a cluster; 0 and 1 = none */
    uint32_t dynamic_smem_bytes; /* as the launch configuration says */
    void *const *parameters;     /* one host address for each parameter, as for cuLaunchKernel */
    uint32_t sm_count;           /* CTAs that are alive at once, and %nsmid */

    /* Whether [address, address + bytes) lies in one live allocation. Global memory is host memory. */
    int (*is_allocated)(void *user, uint64_t address, size_t bytes);
    void *user;

    uint64_t seed; /* of the order of warps and of asynchronous work; equal seeds, equal runs */
    int eager;     /* asynchronous work happens at once instead of as late as it may */

    ptxvm_races check_races;
    void (*race_found)(void *user, const char *text); /* NULL: the first race is the launch's error. Otherwise each pair
                                                         of instructions is told once, and the launch goes on */
} ptxvm_launch;

typedef struct ptxvm_counts {
    uint64_t instructions; /* of warps */
    uint64_t bytes_global_written;
} ptxvm_counts;

/* Runs a launch to its end. 0 = done. Otherwise -1 and one line of what went wrong and where: "CTA (0,1,0) warp 3, PTX
 * line 412, `ld.shared.v4.u32 ...`: 16 bytes at shared address 232448: the CTA has 232448". A deadlock is an error that
 * names what each kind of waiting warp waits for. Memory is left as it was at that moment. counts may be NULL. */
int ptxvm_run(const ptxvm_launch *launch, ptxvm_counts *counts, char *error, size_t error_bytes);

/* How a driver for the machine writes CUtensorMap's 128 bytes. */
typedef struct tensor_map {
    uint64_t base; /* first: cuTensorMapReplaceAddress changes it */
    uint64_t extents[5];
    uint64_t strides[4]; /* bytes, of dimensions 1 and up */
    uint16_t box[5];
    uint8_t rank, element_bytes, swizzle; /* 0, 32, 64, 128 bytes */
    uint32_t magic;                       /* TENSOR_MAP_MAGIC */
} tensor_map;                             /* what lies outside the tensor reads as zero */

enum {
    TENSOR_MAP_MAGIC = 0x54455831,
    POISON = 0xFF /* every byte of memory that nobody wrote, and of what a copy on its way will write: NaN in every
                     floating-point type */
};

_Static_assert(sizeof(tensor_map) <= 128, "it fits CUtensorMap");

#endif
