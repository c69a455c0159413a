/* Inside the PTX machine: programs, warps, CTAs, and what the files of it offer each other.
 *
 *     parse.c   text -> ptxvm_module            arith.c   scalar arithmetic, comparisons, conversions, moves
 *     registers.c  fewer registers
 *     run.c     warps' control flow, the order  memory.c  ld, st, atom, red, cp.async, st.async; address checks
 *     sync.c    bar, mbarrier, fences, votes,   tensor.c  tensor maps, cp.async.bulk
 *               shuffles, clusters              matrix.c  ldmatrix, stmatrix, mma, wmma, wgmma
 *     races.c   what orders accesses of shared memory, and which nothing orders
 *
 * An instruction's executor is looked up once, while parsing: each file offers `find_executor_…`, which returns NULL
 * for instructions that are not its own. */
#ifndef PTXVM_VM_H
#define PTXVM_VM_H

#include <string.h>

#include "ptxvm.h"

enum {
    LANES = 32,
    FULL_WARP = -1, /* as uint32_t: every lane */
    MAX_OPERANDS = 8,
    MAX_VARIABLES = 16,
    NAMED_BARRIERS = 16
};

/* ---- Programs ---- */

/* The type at the end of a mnemonic; the width decides how a register's low bits are read. */
typedef enum scalar_type {
    T_NONE,
    T_PRED,
    T_B8,
    T_U8,
    T_S8,
    T_B16,
    T_U16,
    T_S16,
    T_F16,
    T_BF16,
    T_B32,
    T_U32,
    T_S32,
    T_F32,
    T_F16X2,
    T_BF16X2,
    T_B64,
    T_U64,
    T_S64,
    T_F64
} scalar_type;

typedef enum operand_kind {
    O_NONE,
    O_REGISTER,  /* reg */
    O_IMMEDIATE, /* imm: integers sign-extended, 0f… floats as their 32 bits; also the address of a shared variable */
    O_ADDRESS,   /* [reg + imm]; reg -1 = imm alone. A parameter's address has is_parameter set and imm = its offset.
                    A tensor's address [map, {c0, c1, …}] has the coordinates as items. */
    O_VECTOR,    /* {a, b, …}: items */
    O_LABEL,     /* imm: index of the instruction to go on with */
    O_SPECIAL    /* %tid.x …: imm is a special_register; the parser allows it in mov only (arith.c) */
} operand_kind;

typedef struct operand {
    operand_kind kind;
    int negated;      /* !%p */
    int is_parameter; /* O_ADDRESS, O_IMMEDIATE: imm counts from the first parameter byte */
    int reg;          /* index into a warp's registers; -1 none; `_` (a sink) is O_NONE */
    int bits; /* O_REGISTER: its declared width; 1 = a predicate. ld.s32 may fill a .b64, and extends the sign */
    int64_t imm;
    int count; /* of items */
    struct operand *items;
} operand;

/* What `mov` reads of O_SPECIAL. The three of a vector follow each other: .x, .y, .z. */
typedef enum special_register {
    S_TID,
    S_NTID = S_TID + 3,
    S_CTAID = S_NTID + 3,
    S_NCTAID = S_CTAID + 3,
    S_CLUSTERID = S_NCTAID + 3,
    S_NCLUSTERID = S_CLUSTERID + 3,
    S_CLUSTER_CTAID = S_NCLUSTERID + 3,
    S_CLUSTER_NCTAID = S_CLUSTER_CTAID + 3,
    S_CLUSTER_CTARANK = S_CLUSTER_NCTAID + 3,
    S_CLUSTER_NCTARANK,
    S_LANEID,
    S_WARPID,
    S_NWARPID,
    S_SMID,
    S_NSMID,
    S_LANEMASK_EQ,
    S_LANEMASK_LE,
    S_LANEMASK_LT,
    S_LANEMASK_GE,
    S_LANEMASK_GT,
    S_CLOCK, /* and clock64, globaltimer: instructions of the launch so far */
    S_DYNAMIC_SMEM_SIZE,
    S_TOTAL_SMEM_SIZE
} special_register;

struct warp;
struct instruction;

/* Executes for the lanes of `active` (never 0; lanes whose guard is false are not in it). NULL = done; otherwise what
 * went wrong, the text being valid until the next call (see fail()). An executor that must wait (a barrier) sets
 * warp->wait and returns NULL: it is executed again when woken unless it also set warp->wait.done (then the warp goes
 * on behind it). */
typedef const char *(*executor)(struct warp *warp, const struct instruction *instruction, uint32_t active);

typedef struct instruction {
    executor execute; /* NULL: control flow, run.c's own */
    scalar_type type; /* the last type in the mnemonic: what ld loads, what add adds, the source of a cvt */
    scalar_type to;   /* the type before it, if there are two (cvt.TO.FROM, mul.wide has one): else T_NONE */
    int vector;       /* .v2 = 2, .v4 = 4, else 1 */
    int guard;        /* a predicate register, -1 = none */
    int guard_negated;
    int is_convergent; /* needs all lanes of the warp that have not exited (.sync, bar): run.c gathers them first */
    int mask_operand;  /* is_convergent: the operand that names the lanes it needs; -1 = all that have not exited */
    int line;          /* in the text, from 1 */
    int operand_count;
    uint64_t decoded[4]; /* for the executor's file: what it read from the mnemonic while parsing (shapes, flags) */
    operand operands[MAX_OPERANDS]; /* destination first; `d|p` counts as two */
    char mnemonic[128];             /* whole: "ld.shared.v4.u32" */
    const char *text;               /* the statement, shortened: for messages */
} instruction;

static inline int begins_with(const char *text, const char *beginning)
{
    return strncmp(text, beginning, strlen(beginning)) == 0;
}

/* Whether the mnemonic holds this modifier: has_modifier(i, "trans") for ldmatrix….trans.shared.b16. Slow: call while
 * parsing, keep the answer in decoded[]. */
int has_modifier(const instruction *instruction, const char *modifier);

typedef struct entry {
    char name[160];
    int first;          /* of its instructions; they end with ret */
    int register_count; /* of all kinds, numbered from 0 */
    int parameter_count;
    struct {
        uint32_t offset, bytes; /* in the parameter block */
    } parameters[8];
    uint32_t parameter_bytes;
    uint32_t static_smem_bytes; /* module's shared variables; the extern one begins behind them, aligned */
    uint32_t max_threads;       /* .maxntid, 0 = not said */
} entry;

struct ptxvm_module {
    instruction *instructions;
    int instruction_count;
    entry *entries;
    int entry_count;
    struct {
        uint64_t address, bytes; /* host memory that lives as long as the module, from launch to launch */
    } variables[MAX_VARIABLES];  /* of the .global state space */
    int variable_count;
    void *arena; /* parse.c's: operands' items, variables */
};

/* NULL where the module does not hold it. */
const entry *find_entry(const ptxvm_module *module, const char *name);

/* registers.c: gives the entry's registers new numbers, as few as it finds; its instructions go up to `end`. -1 = no
 * memory. Operands of wgmma.mma_async keep a number of their own: they are read and written later. */
int renumber_registers(entry *e, instruction *instructions, int end);

executor find_executor_arith(instruction *instruction);
executor find_executor_memory(instruction *instruction);
executor find_executor_sync(instruction *instruction);
executor find_executor_tensor(instruction *instruction);
executor find_executor_matrix(instruction *instruction);

/* ---- A running launch ---- */

/* Asynchronous work of one warp or CTA: run.c keeps the list in order of issue and runs items when told to. */
typedef struct async_work async_work;
typedef const char *(*async_action)(struct warp *issuer, void *data); /* frees nothing; data is freed behind it */

typedef enum async_kind {
    ASYNC_CP,    /* cp.async: until cp.async.wait_group/all or the mbarrier it arrives on */
    ASYNC_BULK,  /* cp.async.bulk into shared memory, st.async: completes on an mbarrier at any time */
    ASYNC_STORE, /* cp.async.bulk out of shared memory: bulk groups */
    ASYNC_WGMMA  /* wgmma.mma_async: until wgmma.wait_group */
} async_kind;

/* Why a warp does not run now. poll() returns 1 when it may run again; NULL poll = it runs. */
typedef struct wait_state {
    int (*poll)(struct warp *warp, void *data);
    void *data;
    int done;       /* the instruction needs no second execution: the warp goes on behind it */
    uint64_t token; /* poll's own: the phase that it waits for */
    /* Writes `what` once it is asked for, where that changes while the warp waits; NULL: it stands there. */
    void (*describe)(const struct warp *warp, struct wait_state *wait);
    char what[128]; /* for the deadlock's text: "barrier 3 (96 of 128 threads)" */
} wait_state;

struct cta;

typedef struct warp {
    struct cta *cta;
    int index;           /* in the CTA */
    uint32_t alive;      /* lanes that have not exited; the last warp of a block may be short from the start */
    int pc[LANES];       /* of each lane */
    uint64_t *registers; /* [register_count][LANES]; low bits of the type's width count, the rest is 0 */
    wait_state wait;
    int passed_wait; /* the executor that waited is being executed again */
    uint32_t active; /* lanes of the instruction that is being executed */
    const struct instruction *executing;
    uint32_t converged;       /* .sync instructions that gathered all lanes so far */
    uint64_t products;        /* wgmmas that it has issued */
    uint32_t cluster_arrival; /* 1 + the phase of the cluster's barrier in which the warp arrived without having waited
                                 since, 0 = none (sync.c) */

    /* run.c's: */
    uint32_t gathering; /* lanes that stand at a convergent instruction until others come */
    uint32_t waiting;   /* lanes of waits[] */
    struct group_wait *waits;
    int wait_count;
    struct async_work *pending;     /* ASYNC_CP, ASYNC_STORE, ASYNC_WGMMA in order of issue */
    uint32_t open_groups[4][LANES]; /* of an async_kind: groups that each lane has closed */
} warp;

/* A named barrier of a CTA (sync.c). */
typedef struct named_barrier {
    uint32_t expected, arrived, phase; /* threads; expected 0 = nobody is there yet */
    uint64_t reduction;                /* bar.red */
    uint64_t result;                   /* of the phase before */
} named_barrier;

/* An mbarrier (sync.c). Its eight bytes of shared memory hold a mark, so that stores over it are noticed. */
typedef struct mbarrier {
    uint32_t address, expected, pending; /* expected 0 = no barrier is here */
    int32_t bytes;                       /* the transaction count */
    uint32_t failed_tests;               /* test_waits that failed in this phase */
    uint64_t phase;
    struct cta *owner;
} mbarrier;

enum {
    WARPS_PER_GROUP = 4, /* a warpgroup: what wgmma takes; each warp has 16 of the 64 rows */
    PRODUCTS_KEPT = 1024
};

/* The wgmmas of a warpgroup in the order of issue, the latest of them: all its warps have to issue the same ones. */
typedef struct product_ring {
    uint64_t count; /* by the warp that has issued most */
    const struct instruction *issued[PRODUCTS_KEPT];
} product_ring;

enum {
    MAX_MBARRIERS = 128, /* of a CTA */
    PROXY_UNIT_BYTES = 16,
    MAX_SHARED_BYTES = 233472
};

typedef struct cta {
    struct launch *launch;
    uint32_t id[3], rank; /* rank in its cluster */
    struct cta **cluster; /* its CTAs by rank; cluster[rank] == this one */
    unsigned char *shared;
    uint32_t shared_bytes;
    warp *warps;
    int warp_count, warps_alive; /* alive: with a lane that has not exited */
    named_barrier barriers[NAMED_BARRIERS];
    product_ring *products; /* of each warpgroup */
    uint32_t cluster_phase; /* of the CTA with rank 0: of the cluster's barrier */
    mbarrier mbarriers[MAX_MBARRIERS];
    uint32_t unfenced[MAX_SHARED_BYTES / PROXY_UNIT_BYTES]; /* memory.c's: the warps whose ordinary stores this unit
                                                               holds, none of them with a fence.proxy.async behind it;
                                                               of an st.async's: all */
    uint32_t sm;                                            /* %smid */
    struct cta_races *races;                                /* NULL: they are not checked */
} cta;

typedef struct launch {
    const ptxvm_launch *asked;
    const entry *entry;
    unsigned char *parameters; /* the parameter block: a copy; cvta.param gives its host address */
    uint64_t random;           /* state of next_random() */
    ptxvm_counts counts;
    uint64_t clock;                 /* %clock64, globaltimer: counts instructions */
    uint64_t allocated_blocks[256]; /* memory.c's: blocks of global memory known to be allocated */
    struct launch_races *races;     /* NULL: they are not checked */
} launch;

uint64_t next_random(launch *launch);

/* CTAs of a cluster; 1 where the launch has none. */
static inline uint32_t cluster_size(const ptxvm_launch *asked)
{
    return asked->cluster > 1 ? asked->cluster : 1;
}

/* ---- Reading and writing operands (run.c, inline here: everything is made of them) ---- */

static inline uint64_t *register_of(const warp *w, int reg)
{
    return w->registers + (size_t)reg * LANES;
}

/* The value of a register or immediate in one lane (an address operand: its address in its state space). */
static inline uint64_t value_of(const warp *w, const operand *o, int lane)
{
    if (o->kind == O_REGISTER)
        return register_of(w, o->reg)[lane];
    uint64_t base = o->kind == O_ADDRESS && o->reg >= 0 ? register_of(w, o->reg)[lane] : 0;
    return base + (uint64_t)o->imm;
}

/* A predicate operand with its negation. */
static inline int predicate_of(const warp *w, const operand *o, int lane)
{
    return (int)(value_of(w, o, lane) & 1) != o->negated;
}

static inline void set_register(warp *w, const operand *o, int lane, uint64_t value)
{
    if (o->kind == O_REGISTER)
        register_of(w, o->reg)[lane] = value;
}

/* Formats an error into the thread's buffer and returns it. */
const char *fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- Memory (memory.c) ---- */

/* Shared addresses below 2^RANK_SHIFT are the warp's own CTA's; bits RANK_SHIFT and up hold 1 + the rank of a CTA of
 * the cluster (as mapa gives). */
enum {
    RANK_SHIFT = 24
};

static inline uint32_t shared_offset(uint64_t address)
{
    return (uint32_t)address & ((1u << RANK_SHIFT) - 1);
}

/* The address of the same place in the CTA with this rank. */
static inline uint64_t shared_address_in(uint64_t address, uint64_t rank)
{
    return shared_offset(address) | (rank + 1) << RANK_SHIFT;
}

/* The CTA that an address names; its rank has been checked. */
static inline cta *shared_owner(const warp *w, uint64_t address)
{
    const uint64_t rank = address >> RANK_SHIFT;
    return rank == 0 ? w->cta : w->cta->cluster[rank - 1];
}

/* Host address of [address, address + bytes) in shared memory. NULL and *error where it lies outside or is not aligned
 * to `alignment`. */
unsigned char *shared_at(warp *w, uint64_t address, size_t bytes, size_t alignment, const char **error);

/* The same for global memory (and parameters by their generic address). */
unsigned char *global_at(warp *w, uint64_t address, size_t bytes, size_t alignment, const char **error);

/* Ordinary ("generic") stores to shared memory are visible to the copy engine and to wgmma only behind a
 * fence.proxy.async. Who stores without being one of them says so (st, atom, stmatrix, cp.async); the fence forgets the
 * warp's marks; who reads as one of them asks first. shared_for_async: NULL or the error. */
void shared_written(warp *w, uint64_t address, size_t bytes);
void shared_fenced(warp *w);
const char *shared_for_async(warp *w, uint64_t address, size_t bytes);

/* ---- mbarriers (sync.c): 64-bit objects in shared memory ---- */

/* The live one at an address; NULL and *error otherwise. */
mbarrier *mbarrier_at(warp *w, uint64_t shared_address, const char **error);

/* tensor.c and memory.c: completes `bytes` of the transaction count (complete_tx), or arrives. */
const char *mbarrier_complete_bytes(warp *w, uint64_t shared_address, uint32_t bytes);
const char *mbarrier_arrive(warp *w, uint64_t shared_address, uint32_t count);

/* run.c: what is wrong with a CTA's mbarriers when its cluster has ended; NULL = nothing. */
const char *mbarriers_end(const cta *ended);

/* ---- Asynchronous work (run.c) ---- */

/* Adds work issued by the warp. `data` (malloc'd; the list frees it) goes to `action`, which runs when the kind's waits
 * demand it, at a random moment before (ASYNC_BULK: any moment), or at once where the launch is eager. Work of one kind
 * and warp keeps its order. Returns what the action says if it ran. */
const char *async_add(warp *w, async_kind kind, async_action action, void *data);

/* cp.async.commit_group, bulk commit_group, wgmma.commit_group: closes the open group of that kind. */
void async_commit(warp *w, async_kind kind);

/* …wait_group N: runs all work of the kind but that of the N newest closed groups (and of the open one). */
const char *async_wait(warp *w, async_kind kind, int newest);

/* The executor of BEGINNINGcommit_group and of BEGINNINGwait_group N, for the groups of that kind; NULL: neither. */
executor find_async_group(instruction *i, const char *beginning, async_kind kind);

/* cp.async.mbarrier.arrive.noinc: behind all the warp's cp.async so far, then does `action`. */
const char *async_after_cp(warp *w, async_action action, void *data);

/* ---- Races (races.c) ----
 *
 * Executors tell the detector what they access and what they order, where w->cta->races is not NULL. Addresses have
 * been checked. Asynchronous accesses are told when they are issued. */

int races_open(launch *l); /* 0 = no memory */
void races_close(launch *l);
const char *races_begin(cta *c); /* NULL or the error; races_end follows either */
void races_end(cta *c);
const char *races_found(const launch *l); /* the first race's text, or NULL */

typedef enum access_kind {
    ACCESS_READ,
    ACCESS_WRITE,
    ACCESS_ATOMIC,
    ACCESS_CP_WRITE,   /* cp.async */
    ACCESS_WGMMA_READ, /* before the group is closed */
    ACCESS_STORE_READ  /* cp.async.bulk out of shared memory, before the group is closed */
} access_kind;
void races_access(warp *w, int lane, access_kind kind, uint64_t address, size_t bytes);
/* An ordinary store of `new` over `old`, which other lanes of the same instruction may have written already. */
void races_store(warp *w, int lane, uint64_t address, size_t bytes, const void *old, const void *new);
/* A copy into shared memory, or an st.async, that completes on the mbarrier. */
void races_copy(warp *w, int lane, uint64_t address, size_t bytes, const mbarrier *b);
void races_send(warp *w, int lane, uint64_t address, size_t bytes, const mbarrier *b);

void races_commit(warp *w, async_kind kind);
void races_waited(warp *w, async_kind kind, int newest);
void races_arrive_after_cp(warp *w, int lane, const mbarrier *b);

/* Named barriers by number. */
void races_barrier_arrive(warp *w, int id);
void races_barrier_wait(warp *w, int id); /* goes on when the phase ends */
void races_barrier_ends(cta *c, int id);

/* The cluster's barrier. A relaxed arrival shows the initialisations of mbarriers that a fence.mbarrier_init of the
 * warp follows, and nothing else. */
void races_cluster_arrive(warp *w, int is_relaxed);
void races_cluster_ends(cta *c);
void races_cluster_passed(warp *w);
void races_mbarrier_init_fenced(warp *w);

void races_mbarrier_begins(warp *w, int lane, const mbarrier *b);
void races_mbarrier_arrive(warp *w, const mbarrier *b);
void races_mbarrier_ends(const mbarrier *b); /* a phase, and b->phase is the next one */
void races_mbarrier_passed(warp *w, const mbarrier *b, int acquires_of_cluster);

/* The executor of the first row whose text an instruction's name begins with; NULL where there is none. */
typedef struct named_executor {
    const char *beginning;
    executor execute;
} named_executor;

static inline executor find_named(const instruction *i, const named_executor *rows, size_t count)
{
    for (size_t n = 0; n < count; n++)
        if (begins_with(i->mnemonic, rows[n].beginning))
            return rows[n].execute;
    return NULL;
}

/* What one lane does of an instruction, lane after lane, until one fails. */
typedef const char *lane_executor(warp *w, const instruction *i, int lane);

static inline const char *each_lane(warp *w, const instruction *i, uint32_t active, lane_executor *execute)
{
    const char *error = NULL;
    for (int lane = 0; lane < LANES && error == NULL; lane++)
        if (active >> lane & 1)
            error = execute(w, i, lane);
    return error;
}

/* ---- Numbers (arith.c) ---- */

float float_of_half(uint16_t bits);
float float_of_bfloat(uint16_t bits);
float float_of_e4m3(uint8_t bits);
uint16_t half_of_float(float value);          /* round to nearest even */
uint16_t bfloat_of_float(float value);        /* round to nearest even */
uint8_t e4m3_of_float_satfinite(float value); /* NaN stays NaN */

static inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#endif
