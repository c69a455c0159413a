/* What a kernel is. Newcomers start here.
 *
 * A kernel is one line of kernels.def: KERNEL(name, family, arch, parameters). Its family is one file,
 * <family>.c in src/cpu/<family>/ or <family>.cu in src/cuda/kernels/<family>/. The build compiles that file once for
 * every line with the line's parameters as -D:
 *  - a CUDA family twice: by nvcc into a device image (the part under #ifdef __CUDACC__) and by the C compiler into the
 *    acr__kernel below (the part under #else), so that tile sizes, shared memory and grid cannot drift apart;
 *  - a CPU family once, by the C compiler with the flags of its arch, code and description together.
 * The names a family file can count on: its parameters, KERNEL_NAME (identifier of the line), KERNEL_TEXT (the same as
 * a string), KERNEL_ARCH (string), KERNEL_IMAGE, KERNEL_IMAGE_END. It defines `const acr__kernel KERNEL_DESCRIPTION =
 * {...}`.
 *
 * What a kernel CAN run (why_not) and what it SHOULD run (the planner, by cost and wisdom) stay apart. */
#ifndef ACR_KERNEL_H
#define ACR_KERNEL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "acromion.h"
#include "bwd_args.h"
#include "fwd_paging.h"

typedef enum acr__backend_id {
    ACR__CPU = 0,
    ACR__CUDA = 1
} acr__backend_id;

/* Instruction sets of a CPU: acr__device.isa */
enum {
    ACR__ISA_PORTABLE = 1u << 0,
    ACR__ISA_AVX2 = 1u << 1,      /* with FMA and F16C */
    ACR__ISA_AVX512 = 1u << 2,    /* F, BW, DQ, VL, with FMA and F16C */
    ACR__ISA_AVX512BF16 = 1u << 3 /* the same and products of bf16 */
};
enum {
    ACR__ISA_COUNT = 4
};

/* Their names, the widest first. The names are in wisdom, so they stay. */
typedef struct acr__isa {
    const char *name;
    uint32_t bit;
} acr__isa;
extern const acr__isa acr__isas[ACR__ISA_COUNT];

/* The name of the widest instruction set in `isa`. */
const char *acr__isa_widest(uint32_t isa);

/* What kernels may know about the machine: limits for why_not, rates for cost. Filled by the backend, or by a table of
 * GPUs. */
typedef struct acr__device {
    acr__backend_id backend;
    char name[96];              /* the vendor's name: wisdom is keyed by it */
    uint32_t isa;               /* cpu: ACR__ISA_* */
    int32_t threads;            /* cpu: workers; 1 on cuda */
    int32_t arch;               /* cuda: compute capability times 10: 80, 86, 89, 90, 120 */
    int32_t sm_count;           /* cuda */
    int32_t smem_per_cta_bytes; /* cuda: opt-in maximum of dynamic shared memory */
    int32_t smem_per_sm_bytes;  /* cuda */
    int32_t regs_per_sm;        /* cuda: 32-bit registers */
    int64_t l2_bytes;           /* cuda: L2; cpu: last-level cache, 0 = unknown */
    int64_t mem_bytes;          /* device memory */
    int32_t driver;             /* cuda: driver's CUDA version, 13000 = 13.0 */
    int32_t ptx_only;           /* cuda: 1 = machine code is left aside (ACR_FORCE_PTX), as on a GPU not known here */
    double clock_hz;            /* sustained boost clock of the SMs or cores */
    double dram_bytes_per_s;    /* 0 = unknown */
    const struct acr__fitted_rates *rates_on_trial; /* cuda: a line that counts before those of rates.def; for
                                                       tools/fit_cost.c alone, else NULL */
} acr__device;

/* The terms that a kernel needs for a problem (canonical), as bits FWD_TERM_*. */
uint32_t acr__terms_of(const acr_problem *problem);

/* Why a kernel of these terms cannot run the problem (canonical), by the feature's name; NULL when it can. A static
 * string. */
const char *acr__terms_why_not(uint32_t terms, const acr_problem *problem);

/* What a problem lets its rows see, the batch entry of the longest lengths under that rule, and how many pairs of a row
 * and a key are visible in an entry, for one head. problem canonical. */
visible_rule acr__rule_of(const acr_problem *problem);
visible_entry acr__longest_entry(const acr_problem *problem);
double acr__visible_pairs(visible_entry entry);
/* Keys of an entry that some row sees. */
double acr__visible_keys(visible_entry entry);

/* The launch of a CUDA kernel. */
typedef struct acr__launch {
    uint32_t grid[3], block, cluster; /* cluster: CTAs along x; 0 or 1 = none */
    uint32_t smem_bytes;              /* dynamic */
} acr__launch;

/* A helper: another kernel of the same image, which every execution of a CUDA kernel launches, too, with the same first
 * parameter. From sm_90 on a launch may begin while the launch before it still runs. So every helper, and every kernel
 * that has one, waits for the launch before it (griddepcontrol.wait) before it touches global memory. */
typedef struct acr__helper {
    const char *symbol; /* NULL: there is none */
    /* grid[0] 0: none for this problem. */
    void (*shape)(const acr_problem *problem, const acr__device *device, acr__launch *launch);
} acr__helper;

/* The tensor maps of a CUDA kernel. Each has rank 4, {dim, rows, heads, batch}, a box of {128 bytes, rows, 1, 1} and
 * 128-byte swizzle; the box of q has q_heads heads. Elements beyond dim and rows read as zero and are not written. In a
 * packed batch rows is the total and batch 1: a sequence is found by its first row, and the next one lies behind it.
 *
 * A kernel with any map takes a second parameter: four CUtensorMaps in the order q, k, v, o in one __grid_constant__
 * struct (cuda/tensormap.h). A backward kernel has d_o in the place of o, and with out_rows a fifth map, of o. All
 * zero: no maps, no second parameter. */
typedef struct acr__boxes {
    uint16_t q_rows, k_rows, v_rows, o_rows; /* 0 = no map for that tensor */
    uint16_t q_heads;                        /* of q's box, each with q_rows; 0 means 1 */
    uint16_t bias_rows; /* of the bias, in the place of o, whose o_rows is 0; a map only where bias_fits_boxes */
    uint16_t out_rows;  /* of o itself, of a backward kernel */
} acr__boxes;

/* The arguments of a kernel of any kind: it is given `fwd`, with which each of them begins. */
typedef union acr__args {
    fwd_args fwd;
    fwd_paged_args paged;
    bwd_args bwd;
} acr__args;

/* The work of one lane of a CPU kernel. Lanes 0..lanes-1 share `queue`, which starts at 0: tiles are taken by
 * fetch-add, so lanes that start late or never are harmless. scratch is the lane's own, scratch_bytes of it, 64-byte
 * aligned. A backward kernel is given its bwd_args by their first member. */
typedef void acr__cpu_run(const fwd_args *args, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch);

typedef struct acr__kernel {
    const char *name;   /* <pass>_<family>_<dtype>_d<dim>_<qtile>x<kvtile>[_s<stages>][_<trait>]_<arch>; never reused */
    const char *family; /* file name without its ending */
    acr__backend_id backend;
    acr_pass pass; /* ACR_FORWARD where it is not named */
    acr_dtype dtype;
    int32_t qk_dim_max, v_dim_max; /* head dims served, padded inside where smaller; limits are in why_not */
    int32_t q_tile, kv_tile, stages;
    uint32_t traits; /* ACR__TRAIT_* */
    uint32_t terms;  /* FWD_TERM_*: what it serves beyond a scale, a mask and a window */
    /* Which caches it serves; refused in one place, acr__cache_why_not. */
    int32_t pages;     /* 1: keys and values in pages (ACR_PAGED) */
    int32_t v_in_k;    /* 1: values inside the keys (ACR_V_IN_K) */
    uint32_t kv_types; /* bits 1 << acr_dtype: types of k and v beside dtype (kv_dtype) */
    /* Which types of o, as bits 1 << acr_dtype; 0: dtype, of ACR_E4M3 f16 and bf16. Refused by acr__out_why_not. */
    uint32_t out_types;

    /* NULL when this kernel can run the (canonical) problem on the device; else the reason, a static string naming
     * field and limit. */
    const char *(*why_not)(const acr_problem *problem, const acr__device *device);
    /* Bytes of caller's workspace: on cpu what lanes share and the scratch of all of them. NULL = none. */
    size_t (*workspace)(const acr_problem *problem, const acr__device *device);
    /* Expected seconds of one execution in a stream of them. Called only where why_not is NULL. */
    double (*cost)(const acr_problem *problem, const acr__device *device);

    /* KERNEL_IMAGE and KERNEL_IMAGE_END. cuda: cubin, fatbin, NUL-terminated PTX, or one of them packed
     * (packed_image.h); cpu: a text that changes with the kernel's code. Wisdom is valid for one digest of the code. */
    const unsigned char *image, *image_end;

    /* cpu only */
    acr__cpu_run *run;
    /* Bytes of the workspace, from its beginning on, that all lanes share: what lies behind them is the lanes' scratch.
     * Whatever they hold at the start of a call, no lane may rely on it. NULL = none. */
    size_t (*shared)(const acr_problem *problem);
    /* Work items, which lanes take one at a time: more lanes find no work. NULL: tiles of q_tile rows of a head. */
    int64_t (*items)(const acr_problem *problem);

    /* cuda only */
    const char *symbol;         /* entry point in the image */
    int32_t arch_min, arch_max; /* compute capabilities served, inclusive */
    void (*shape)(const acr_problem *problem, const acr__device *device, acr__launch *launch);
    acr__boxes boxes;
    acr__helper before, after; /* launched before and behind it */
} acr__kernel;

enum {
    ACR__TRAIT_NEVER_PLANNED = 1u << 0, /* the teaching ladder: listed, checked and benched, never chosen */
    ACR__TRAIT_LAST_RESORT = 1u << 1,   /* correct everywhere, fast nowhere: said so by acr_plan_text */
    ACR__TRAIT_PACKED = 1u << 2,        /* serves packed batches (ACR_PACKED); without it they are never offered */
    ACR__TRAIT_INVARIANT = 1u << 3      /* serves ACR_INVARIANT: all lines that take a problem with it on one device
                                           give the same bits */
};

/* Whether the image holds PTX, so that GPUs newer than the library can run it: the kernels without an upper limit. */
static inline int acr__kernel_has_ptx(const acr__kernel *kernel)
{
    return kernel->arch_max >= 999;
}

/* fwd_args.out_bf16 of f16 and bf16 inputs: 0, or where o is float32 this. Lines whose out_types name one type have no
 * need to look. */
enum {
    ACR__OUT_F32 = 2
};

/* Why a kernel cannot write o in the problem's (canonical) out_dtype; NULL when it can. A static string. */
const char *acr__out_why_not(const acr__kernel *kernel, const acr_problem *problem);

/* Of the types of o that a kernel writes one, as a problem says it: the default if it can be. */
static inline acr_dtype acr__usual_out_dtype(const acr__kernel *kernel)
{
    return kernel->out_types == 1u << ACR_F32 ? ACR_F32 : ACR_DTYPE_DEFAULT;
}

/* The table: every line of kernels.def, in its order. */
extern const acr__kernel *const acr__kernels[];
extern const size_t acr__kernel_count;

#endif
