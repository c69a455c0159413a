/* The race detector of the PTX machine: finds accesses of shared memory that nothing orders, whether or not the order
 * that they happened to have was the right one.
 *
 * Everything that accesses is an agent: a warp; of each warp its copies by cp.async, its wgmmas and its bulk stores,
 * which go on while the warp does; and each mbarrier, for its initialisation and for the copies and st.asyncs that
 * complete on it. An agent's clock counts: a warp's what it has released, an asynchronous agent's its groups, an
 * mbarrier's its phases. Each warp keeps, for every agent, the clock up to which that agent's accesses are known to lie
 * behind it. Barriers pass this knowledge on: who arrives gives its own, who waits takes what all that arrived gave.
 * wait_group takes the warp's own asynchronous operations, an mbarrier's end of phase what it counted.
 *
 * Of each cell of shared memory it keeps the last write and, for each agent that reads, the last read. An access races
 * with one of them that another agent made at a clock which the accessing warp does not know yet.
 *
 * Asynchronous accesses are checked and noted when they are issued: from then on they may happen. What another CTA's
 * st.async brings is released at the cluster's scope: a wait that acquires at the CTA's does not take it.
 *
 * A store of what a warp's store has put there already (a repeat) races neither with that nor with reads, unless the
 * check is strict: kernels have several warps clear the same rows, each before it reads them. Who reads must know the
 * store or one of its repeats to lie before, who writes something else all of them.
 *
 * What this does not see: lanes of a warp are one agent (but for what `strict` adds), and where some of them wait for a
 * copy all do; of several atomics at one place the last one alone is remembered; a copy between shared memories is not
 * noted as a read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vm.h"

enum {
    KINDS_READ = 3, /* agents of a warp that read: itself, its wgmmas, its stores */
    KINDS = 4,      /* and its cp.async */
    GROUPS_KEPT = 64,
    READ_BY_BITS = 64,
    MAX_REPORTED = 256,
    TEXT_BYTES = 640
};

/* Of a warp: agent kind * warps + index of the warp; of the mbarrier m: KINDS * warps + m. */
typedef enum agent_kind {
    A_WARP,
    A_WGMMA,
    A_STORE,
    A_CP
} agent_kind;

typedef struct write_record {
    uint32_t clock; /* 0 = nobody wrote */
    uint32_t instruction, instance;
    uint16_t agent;
    uint8_t lane, is_atomic : 1, is_repeated : 1;
} write_record;

typedef struct read_record {
    uint32_t clock, instruction;
} read_record;

/* strict: what the lanes of one warp did to a cell since they last stood together. */
typedef struct lane_record {
    uint32_t write_epoch, read_epoch, write_instruction, read_instruction, write_instance, read_lanes;
    uint16_t writer, reader; /* 1 + the warp's agent */
    uint8_t write_lane;
} lane_record;

/* Of a warp and one kind of asynchronous work. Lanes count groups each for itself; the agent's clock is the number of
 * the group, so that lanes that parted and issue one after another agree. An arrival behind cp.async ends one too. */
typedef struct async_clock {
    uint32_t number[LANES];           /* groups that have ended */
    uint32_t done[LANES];             /* up to this number they have been waited for */
    uint32_t closed[LANES];           /* groups that wait_group counts */
    uint32_t end[LANES][GROUPS_KEPT]; /* of those, by their number modulo: `number` behind it */
    uint32_t lanes;                   /* that have issued any */
} async_clock;

typedef struct barrier_clock {
    uint32_t *known;  /* what those that arrived know */
    uint32_t waiting; /* warps of the CTA that go on when the barrier's phase ends */
} barrier_clock;

typedef struct mbarrier_clock {
    uint32_t *arrived, *ended; /* known to who arrived so far; the same when the last phase ended */
    uint32_t first;            /* the agent's clock of the initialisation; of phase 0 it is one more */
    uint32_t sent, sent_ended; /* the last phase that counts an st.async of another CTA; the last such that has ended */
} mbarrier_clock;

/* The mbarriers of the CTA that a warp has initialised, by their place: the clocks of those initialisations, and of
 * those that a fence.mbarrier_init follows. */
typedef struct init_clocks {
    uint32_t made[MAX_MBARRIERS], fenced[MAX_MBARRIERS];
} init_clocks;

typedef struct cta_races {
    int ranks, warps;          /* CTAs of the cluster, warps of each */
    int agents, readers;       /* of each CTA */
    int total;                 /* agents of the cluster */
    uint32_t cell_shift;       /* a cell has 2^cell_shift bytes */
    uint32_t cells;            /* one more than shared memory has */
    uint32_t *known;           /* [warps][total] */
    async_clock *asynchronous; /* [warps][KINDS] */
    init_clocks *inits;        /* [warps] */
    barrier_clock barriers[NAMED_BARRIERS];
    uint32_t *cluster_arrived, *cluster_ended; /* of rank 0: known to who arrived at the cluster's barrier in this
                                                  phase, and in the one before */
    mbarrier_clock mbarriers[MAX_MBARRIERS];
    write_record *writes; /* [cells] */
    uint64_t *read_by;    /* [cells]: bit n: of the readers n, n + READ_BY_BITS, ... one has read it */
    /* An agent's records lie together: it reads runs of cells, and what others did is asked only where it writes. */
    read_record *reads;   /* [ranks][readers][cells] */
    read_record *repeats; /* [ranks][warps][cells]: of the last write, by warps */
    lane_record *lanes;   /* [cells], NULL unless strict */
} cta_races;

/* Pairs of instructions that were reported, of a launch. */
typedef struct launch_races {
    char first[TEXT_BYTES];
    int count;
    uint64_t pairs[MAX_REPORTED];
} launch_races;

/* ---- Their memory ---- */

/* The smallest access of the entry decides: most kernels touch shared memory in words. */
static uint32_t cell_shift_of(const launch *l)
{
    uint32_t shift = 2;
    const ptxvm_module *m = l->asked->module;
    const entry *next = l->entry + 1;
    const int end = next < m->entries + m->entry_count ? next->first : m->instruction_count;
    for (int i = l->entry->first; i < end; i++) {
        const instruction *in = &m->instructions[i];
        if (strstr(in->mnemonic, ".shared") == NULL)
            continue;
        const int is_plain = begins_with(in->mnemonic, "ld.") || begins_with(in->mnemonic, "st.");
        if (is_plain && (in->type == T_U8 || in->type == T_S8 || in->type == T_B8))
            shift = 0;
        else if (is_plain && shift > 1 && (in->type == T_U16 || in->type == T_S16 || in->type == T_B16))
            shift = 1;
    }
    return shift;
}

static uint32_t *clocks(const cta_races *r)
{
    return calloc((size_t)r->total, sizeof(uint32_t));
}

static int take_clocks(cta_races *r)
{
    int is_whole = 1;
    is_whole &= (r->cluster_arrived = clocks(r)) != NULL;
    is_whole &= (r->cluster_ended = clocks(r)) != NULL;
    for (int b = 0; b < NAMED_BARRIERS; b++)
        is_whole &= (r->barriers[b].known = clocks(r)) != NULL;
    for (int b = 0; b < MAX_MBARRIERS; b++) {
        is_whole &= (r->mbarriers[b].arrived = clocks(r)) != NULL;
        is_whole &= (r->mbarriers[b].ended = clocks(r)) != NULL;
    }
    return is_whole;
}

int races_open(launch *l)
{
    l->races = calloc(1, sizeof *l->races);
    return l->races != NULL;
}

void races_close(launch *l)
{
    free(l->races);
    l->races = NULL;
}

const char *races_begin(cta *c)
{
    const launch *l = c->launch;
    cta_races *r = calloc(1, sizeof *r);
    c->races = r;
    if (r == NULL)
        return fail("no memory for the race detector");
    r->ranks = (int)cluster_size(l->asked);
    r->warps = c->warp_count;
    r->agents = KINDS * r->warps + MAX_MBARRIERS;
    r->readers = KINDS_READ * r->warps;
    r->total = r->ranks * r->agents;
    r->cell_shift = cell_shift_of(l);
    r->cells = (c->shared_bytes >> r->cell_shift) + 2;
    r->known = calloc((size_t)r->warps * (size_t)r->total, sizeof *r->known);
    r->asynchronous = calloc((size_t)r->warps * KINDS, sizeof *r->asynchronous);
    r->inits = calloc((size_t)r->warps, sizeof *r->inits);
    r->writes = calloc(r->cells, sizeof *r->writes);
    r->read_by = calloc(r->cells, sizeof *r->read_by);
    r->reads = calloc((size_t)r->cells * (size_t)(r->ranks * r->readers), sizeof *r->reads);
    r->repeats = calloc((size_t)r->cells * (size_t)(r->ranks * r->warps), sizeof *r->repeats);
    if (l->asked->check_races == PTXVM_RACES_STRICT)
        r->lanes = calloc(r->cells, sizeof *r->lanes);
    if (!take_clocks(r) || r->known == NULL || r->asynchronous == NULL || r->inits == NULL || r->writes == NULL ||
        r->read_by == NULL || r->reads == NULL || r->repeats == NULL ||
        (l->asked->check_races == PTXVM_RACES_STRICT && r->lanes == NULL))
        return fail("no memory for the race detector");
    for (int w = 0; w < r->warps; w++)
        r->known[(size_t)w * (size_t)r->total + c->rank * (uint32_t)r->agents + (uint32_t)w] = 1;
    return NULL;
}

void races_end(cta *c)
{
    cta_races *r = c->races;
    c->races = NULL;
    if (r == NULL)
        return;
    free(r->cluster_arrived);
    free(r->cluster_ended);
    for (int b = 0; b < NAMED_BARRIERS; b++)
        free(r->barriers[b].known);
    for (int b = 0; b < MAX_MBARRIERS; b++) {
        free(r->mbarriers[b].arrived);
        free(r->mbarriers[b].ended);
    }
    void *const tables[] = {r->known, r->asynchronous, r->inits, r->writes, r->read_by,
                            r->reads, r->repeats,      r->lanes, r};
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++)
        free(tables[i]);
}

/* ---- Clocks ---- */

static uint32_t *known_by(const warp *w)
{
    const cta_races *r = w->cta->races;
    return r->known + (size_t)w->index * (size_t)r->total;
}

static uint32_t agent_of(const warp *w, agent_kind kind)
{
    const cta_races *r = w->cta->races;
    return w->cta->rank * (uint32_t)r->agents + (uint32_t)((int)kind * r->warps + w->index);
}

/* Of the mbarrier in the CTA's first place; the others follow. */
static uint32_t first_mbarrier_agent(const cta *c)
{
    return c->rank * (uint32_t)c->races->agents + (uint32_t)(KINDS * c->races->warps);
}

static uint32_t agent_of_mbarrier(const mbarrier *b)
{
    return first_mbarrier_agent(b->owner) + (uint32_t)(b - b->owner->mbarriers);
}

static mbarrier_clock *clock_of(const mbarrier *b)
{
    return &b->owner->races->mbarriers[b - b->owner->mbarriers];
}

static void join_clocks(uint32_t *to, const uint32_t *from, int count)
{
    for (int i = 0; i < count; i++)
        to[i] = to[i] > from[i] ? to[i] : from[i];
}

/* The warp gives what it knows and what it has done; what it does from now on is later. */
static void release(warp *w, uint32_t *to)
{
    uint32_t *known = known_by(w);
    join_clocks(to, known, w->cta->races->total);
    known[agent_of(w, A_WARP)]++;
}

/* ---- Reports ---- */

static const char *work_of_mbarrier(const char *mnemonic)
{
    return begins_with(mnemonic, "mbarrier.init") ? "the initialisation of"
           : begins_with(mnemonic, "st.async")    ? "an st.async that completes on"
                                                  : "a copy that completes on";
}

/* number: of the instruction that accesses. */
static void name_agent(const warp *w, uint32_t agent, uint32_t number, int is_write, char *text, size_t bytes)
{
    static const char *const kinds[] = {
        [A_WARP] = "", [A_WGMMA] = "'s wgmma", [A_STORE] = "'s bulk store", [A_CP] = "'s cp.async"};
    const cta_races *r = w->cta->races;
    const int rank = (int)agent / r->agents, local = (int)agent % r->agents;
    char other[32] = "";
    if (rank != (int)w->cta->rank)
        snprintf(other, sizeof other, "rank %d's ", rank);
    if (local >= KINDS * r->warps)
        snprintf(text, bytes, "%s %smbarrier at %u wrote",
                 work_of_mbarrier(w->cta->launch->asked->module->instructions[number].mnemonic),
                 other[0] != '\0' ? other : "the ", w->cta->cluster[rank]->mbarriers[local - KINDS * r->warps].address);
    else
        snprintf(text, bytes, "%swarp %d%s %s", other, local % r->warps, kinds[local / r->warps],
                 is_write ? "wrote" : "read");
}

/* Each pair of instructions once a launch. */
static int is_new_pair(launch_races *found, uint32_t a, uint32_t b)
{
    const uint64_t pair = (uint64_t)a << 32 | b;
    for (int i = 0; i < found->count; i++)
        if (found->pairs[i] == pair)
            return 0;
    if (found->count == MAX_REPORTED)
        return 0;
    found->pairs[found->count++] = pair;
    return 1;
}

/* An access that is being made, or issued. */
typedef struct access {
    warp *warp;
    int lane;
    uint32_t agent, clock; /* that it is noted by */
    int is_write, is_atomic;
    int is_repeat;
    int is_own; /* the lane does it itself and at once */
    uint32_t instruction, instance;
} access;

static void report(const access *a, uint32_t address, uint32_t earlier_instruction, const char *earlier)
{
    launch *l = a->warp->cta->launch;
    launch_races *found = l->races;
    if (!is_new_pair(found, a->instruction, earlier_instruction))
        return;
    const instruction *all = l->asked->module->instructions;
    const instruction *now = &all[a->instruction], *before = &all[earlier_instruction];
    char text[TEXT_BYTES], name[96];
    name_agent(a->warp, a->agent, a->instruction, a->is_write, name, sizeof name);
    const cta *c = a->warp->cta;
    snprintf(
        text, sizeof text,
        "race at shared address %u of CTA (%u,%u,%u): %s (lane %d, PTX line %d, `%s`); nothing orders this behind: "
        "%s (PTX line %d, `%s`)",
        address, c->id[0], c->id[1], c->id[2], name, a->lane, now->line, now->text, earlier, before->line,
        before->text);
    if (l->asked->race_found != NULL)
        l->asked->race_found(l->asked->user, text);
    else if (found->first[0] == '\0')
        memcpy(found->first, text, sizeof text);
}

const char *races_found(const launch *l)
{
    return l->races->first[0] != '\0' ? l->races->first : NULL;
}

/* ---- Accesses ---- */

/* What a cell remembers. */
typedef struct cell {
    write_record *write;
    uint64_t *read_by;
    read_record *reads, *repeats; /* the first; the others follow, `step` apart */
    size_t step;
    uint32_t address;
} cell;

static cell cell_at(const cta_races *r, uint32_t number)
{
    return (cell){.write = &r->writes[number],
                  .read_by = &r->read_by[number],
                  .reads = r->reads + number,
                  .repeats = r->repeats + number,
                  .step = r->cells,
                  .address = number << r->cell_shift};
}

static int is_repeat_known(const cta_races *r, const cell *c, const uint32_t *known)
{
    if (!c->write->is_repeated)
        return 0;
    for (int rank = 0; rank < r->ranks; rank++)
        for (int n = 0; n < r->warps; n++) {
            const uint32_t clock = c->repeats[(size_t)(rank * r->warps + n) * c->step].clock;
            if (clock != 0 && clock <= known[rank * r->agents + n])
                return 1;
        }
    return 0;
}

static void check_earlier_write(const access *a, const cell *c, const uint32_t *known)
{
    const write_record *record = c->write;
    const cta_races *r = a->warp->cta->races;
    if (record->clock <= known[record->agent] || (a->is_atomic && record->is_atomic) ||
        (!a->is_write && is_repeat_known(r, c, known)))
        return;
    char earlier[128];
    name_agent(a->warp, record->agent, record->instruction, 1, earlier, sizeof earlier);
    report(a, c->address, record->instruction, earlier);
}

/* The record of the n-th of `count` agents that each rank has. */
static void check_earlier_record(const access *a, const cell *c, const read_record *records, int n, int count,
                                 int is_write, const uint32_t *known)
{
    const read_record *record = &records[(size_t)n * c->step];
    const uint32_t agent = (uint32_t)(n / count * a->warp->cta->races->agents + n % count);
    if (record->clock <= known[agent])
        return;
    char earlier[128];
    name_agent(a->warp, agent, record->instruction, is_write, earlier, sizeof earlier);
    report(a, c->address, record->instruction, earlier);
}

static void check_earlier_reads(const access *a, const cell *c, const uint32_t *known)
{
    const cta_races *r = a->warp->cta->races;
    for (uint64_t rest = *c->read_by; rest != 0; rest &= rest - 1)
        for (int n = __builtin_ctzll(rest); n < r->ranks * r->readers; n += READ_BY_BITS)
            check_earlier_record(a, c, c->reads, n, r->readers, 0, known);
}

static void check_earlier_repeats(const access *a, const cell *c, const uint32_t *known)
{
    const cta_races *r = a->warp->cta->races;
    for (int n = 0; n < r->ranks * r->warps; n++)
        check_earlier_record(a, c, c->repeats, n, r->warps, 1, known);
}

/* Two lanes of a warp that have not stood together since. */
static void check_lanes(const access *a, lane_record *record, uint32_t address)
{
    const uint16_t agent = (uint16_t)(agent_of(a->warp, A_WARP) + 1);
    const uint32_t epoch = a->warp->converged;
    char earlier[128];
    const int has_write = record->writer == agent && record->write_epoch == epoch;
    if (has_write && record->write_lane != a->lane && record->write_instance != a->instance) {
        snprintf(earlier, sizeof earlier, "lane %u of the same warp wrote", record->write_lane);
        report(a, address, record->write_instruction, earlier);
    }
    const uint32_t others =
        record->reader == agent && record->read_epoch == epoch ? record->read_lanes & ~(UINT32_C(1) << a->lane) : 0;
    if (a->is_write && others != 0) {
        snprintf(earlier, sizeof earlier, "lanes %#x of the same warp read", others);
        report(a, address, record->read_instruction, earlier);
    }
    if (a->is_write) {
        record->writer = agent;
        record->write_epoch = epoch;
        record->write_instruction = a->instruction;
        record->write_instance = a->instance;
        record->write_lane = (uint8_t)a->lane;
        return;
    }
    if (record->reader != agent || record->read_epoch != epoch)
        record->read_lanes = 0;
    record->reader = agent;
    record->read_epoch = epoch;
    record->read_instruction = a->instruction;
    record->read_lanes |= UINT32_C(1) << a->lane;
}

static void note_write(const access *a, const cell *c, const uint32_t *known)
{
    const cta_races *r = a->warp->cta->races;
    check_earlier_reads(a, c, known);
    if (c->write->is_repeated) {
        check_earlier_repeats(a, c, known);
        for (int n = 0; n < r->ranks * r->warps; n++)
            c->repeats[(size_t)n * c->step] = (read_record){0};
    }
    *c->write = (write_record){.clock = a->clock,
                               .instruction = a->instruction,
                               .instance = a->instance,
                               .agent = (uint16_t)a->agent,
                               .lane = (uint8_t)a->lane,
                               .is_atomic = a->is_atomic ? 1 : 0};
}

/* Checks the access against what each cell remembers, and has the cell remember it. The address has been checked. */
static void note(const access *a, uint64_t address, size_t bytes)
{
    const cta_races *owner = shared_owner(a->warp, address)->races;
    const uint32_t offset = shared_offset(address);
    const uint32_t *known = known_by(a->warp);
    const uint32_t end = (uint32_t)((offset + bytes + (UINT32_C(1) << owner->cell_shift) - 1) >> owner->cell_shift);
    const int rank = (int)a->agent / owner->agents, local = (int)a->agent % owner->agents;
    for (uint32_t number = offset >> owner->cell_shift; number < end; number++) {
        const cell c = cell_at(owner, number);
        const int is_repeat = a->is_repeat && c.write->clock != 0 && (int)c.write->agent % owner->agents < owner->warps;
        if (owner->lanes != NULL && a->is_own)
            check_lanes(a, &owner->lanes[number], c.address);
        if (is_repeat) {
            c.repeats[(size_t)(rank * owner->warps + local) * c.step] = (read_record){a->clock, a->instruction};
            c.write->is_repeated = 1;
            continue;
        }
        check_earlier_write(a, &c, known);
        if (a->is_write)
            note_write(a, &c, known);
        else {
            const int reader = rank * owner->readers + local;
            c.reads[(size_t)reader * c.step] = (read_record){a->clock, a->instruction};
            *c.read_by |= UINT64_C(1) << reader % READ_BY_BITS;
        }
    }
}

static access access_of(warp *w, int lane)
{
    const launch *l = w->cta->launch;
    return (access){.warp = w,
                    .lane = lane,
                    .agent = agent_of(w, A_WARP),
                    .clock = known_by(w)[agent_of(w, A_WARP)],
                    .is_own = 1,
                    .instruction = (uint32_t)(w->executing - l->asked->module->instructions),
                    .instance = (uint32_t)l->clock};
}

static async_clock *async_of(const warp *w, agent_kind kind)
{
    return &w->cta->races->asynchronous[w->index * KINDS + (int)kind];
}

void races_access(warp *w, int lane, access_kind kind, uint64_t address, size_t bytes)
{
    static const agent_kind agents[] = {
        [ACCESS_WGMMA_READ] = A_WGMMA, [ACCESS_STORE_READ] = A_STORE, [ACCESS_CP_WRITE] = A_CP};
    access a = access_of(w, lane);
    a.is_write = kind == ACCESS_WRITE || kind == ACCESS_ATOMIC || kind == ACCESS_CP_WRITE;
    a.is_atomic = kind == ACCESS_ATOMIC;
    if (kind == ACCESS_WGMMA_READ || kind == ACCESS_STORE_READ || kind == ACCESS_CP_WRITE) {
        a.is_own = 0;
        a.agent = agent_of(w, agents[kind]);
        async_clock *c = async_of(w, agents[kind]);
        c->lanes |= UINT32_C(1) << lane;
        a.clock = c->number[lane] + 1;
    }
    note(&a, address, bytes);
}

void races_store(warp *w, int lane, uint64_t address, size_t bytes, const void *old, const void *new)
{
    access a = access_of(w, lane);
    const cta_races *owner = shared_owner(w, address)->races;
    const uint32_t offset = shared_offset(address);
    const write_record *record = &owner->writes[offset >> owner->cell_shift];
    const int same_instruction = record->clock != 0 && record->agent == a.agent && record->instance == a.instance;
    const int is_change = memcmp(old, new, bytes) != 0;
    if (same_instruction && record->lane != lane && is_change) {
        char earlier[128];
        snprintf(earlier, sizeof earlier, "lane %u of the same instruction wrote another value", record->lane);
        report(&a, offset, record->instruction, earlier);
    }
    a.is_write = 1;
    a.is_repeat = !is_change && w->cta->launch->asked->check_races != PTXVM_RACES_STRICT;
    note(&a, address, bytes);
}

void races_copy(warp *w, int lane, uint64_t address, size_t bytes, const mbarrier *b)
{
    access a = access_of(w, lane);
    a.is_own = 0;
    a.agent = agent_of_mbarrier(b);
    a.clock = clock_of(b)->first + (uint32_t)b->phase + 1;
    a.is_write = 1;
    note(&a, address, bytes);
}

void races_send(warp *w, int lane, uint64_t address, size_t bytes, const mbarrier *b)
{
    races_copy(w, lane, address, bytes, b);
    if (b->owner != w->cta)
        clock_of(b)->sent = clock_of(b)->first + (uint32_t)b->phase + 1;
}

/* ---- Groups of asynchronous work ---- */

static agent_kind agent_kind_of(async_kind kind)
{
    return kind == ASYNC_CP ? A_CP : kind == ASYNC_WGMMA ? A_WGMMA : A_STORE;
}

void races_commit(warp *w, async_kind kind)
{
    async_clock *c = async_of(w, agent_kind_of(kind));
    for (int lane = 0; lane < LANES; lane++)
        if (w->active >> lane & 1)
            c->end[lane][c->closed[lane]++ % GROUPS_KEPT] = ++c->number[lane];
}

/* The group that is done in all lanes that have issued any. */
static uint32_t least(const async_clock *c, const uint32_t *numbers)
{
    uint32_t result = UINT32_MAX;
    for (int lane = 0; lane < LANES; lane++)
        if ((c->lanes >> lane & 1) && numbers[lane] < result)
            result = numbers[lane];
    return c->lanes != 0 ? result : 0;
}

static void raise_to(uint32_t *clock, uint32_t value)
{
    *clock = value > *clock ? value : *clock;
}

void races_waited(warp *w, async_kind kind, int newest)
{
    async_clock *c = async_of(w, agent_kind_of(kind));
    for (int lane = 0; lane < LANES; lane++)
        if ((w->active >> lane & 1) && c->closed[lane] > (uint32_t)newest)
            raise_to(&c->done[lane], c->end[lane][(c->closed[lane] - (uint32_t)newest - 1) % GROUPS_KEPT]);
    raise_to(&known_by(w)[agent_of(w, agent_kind_of(kind))], least(c, c->done));
}

void races_arrive_after_cp(warp *w, int lane, const mbarrier *b)
{
    async_clock *c = async_of(w, A_CP);
    c->number[lane]++;
    raise_to(&clock_of(b)->arrived[agent_of(w, A_CP)], least(c, c->number));
}

/* ---- Barriers ---- */

void races_barrier_arrive(warp *w, int id)
{
    release(w, w->cta->races->barriers[id].known);
}

void races_barrier_wait(warp *w, int id)
{
    w->cta->races->barriers[id].waiting |= UINT32_C(1) << w->index;
}

void races_barrier_ends(cta *c, int id)
{
    const cta_races *r = c->races;
    barrier_clock *b = &c->races->barriers[id];
    for (int n = 0; n < r->warps; n++)
        if (b->waiting >> n & 1)
            join_clocks(known_by(&c->warps[n]), b->known, r->total);
    b->waiting = 0;
    memset(b->known, 0, (size_t)r->total * sizeof *b->known);
}

/* ---- The cluster's barrier ---- */

void races_cluster_arrive(warp *w, int is_relaxed)
{
    uint32_t *arrived = w->cta->cluster[0]->races->cluster_arrived;
    if (is_relaxed)
        join_clocks(arrived + first_mbarrier_agent(w->cta), w->cta->races->inits[w->index].fenced, MAX_MBARRIERS);
    else
        release(w, arrived);
}

void races_cluster_ends(cta *c)
{
    cta_races *r = c->cluster[0]->races;
    memcpy(r->cluster_ended, r->cluster_arrived, (size_t)r->total * sizeof *r->cluster_ended);
    memset(r->cluster_arrived, 0, (size_t)r->total * sizeof *r->cluster_arrived);
}

/* The phase cannot end again before this warp arrives again. */
void races_cluster_passed(warp *w)
{
    join_clocks(known_by(w), w->cta->cluster[0]->races->cluster_ended, w->cta->races->total);
}

/* ---- mbarriers ---- */

void races_mbarrier_begins(warp *w, int lane, const mbarrier *b)
{
    mbarrier_clock *c = clock_of(b);
    const uint32_t agent = agent_of_mbarrier(b), last = c->ended[agent];
    memset(c->arrived, 0, (size_t)b->owner->races->total * sizeof *c->arrived);
    memset(c->ended, 0, (size_t)b->owner->races->total * sizeof *c->ended);
    c->first = c->ended[agent] = last + 2; /* behind the phases of one that was here before: its last has not ended */
    c->sent = c->sent_ended = 0;
    access a = access_of(w, lane);
    a.agent = agent;
    a.clock = c->first;
    a.is_write = 1;
    note(&a, b->address, sizeof(uint64_t));
    raise_to(&known_by(w)[agent], c->first);
    init_clocks *inits = &b->owner->races->inits[w->index];
    inits->made[b - b->owner->mbarriers] = c->first;
}

void races_mbarrier_init_fenced(warp *w)
{
    init_clocks *inits = &w->cta->races->inits[w->index];
    memcpy(inits->fenced, inits->made, sizeof inits->fenced);
}

void races_mbarrier_arrive(warp *w, const mbarrier *b)
{
    release(w, clock_of(b)->arrived);
}

void races_mbarrier_ends(const mbarrier *b)
{
    mbarrier_clock *c = clock_of(b);
    c->arrived[agent_of_mbarrier(b)] =
        c->first + (uint32_t)b->phase; /* of the phase that ended: b->phase is the next */
    memcpy(c->ended, c->arrived, (size_t)b->owner->races->total * sizeof *c->ended);
    if (c->sent == c->ended[agent_of_mbarrier(b)])
        c->sent_ended = c->sent;
}

void races_mbarrier_passed(warp *w, const mbarrier *b, int acquires_of_cluster)
{
    const mbarrier_clock *c = clock_of(b);
    uint32_t *of_copies = &known_by(w)[agent_of_mbarrier(b)];
    const uint32_t known_before = *of_copies;
    join_clocks(known_by(w), c->ended, w->cta->races->total);
    if (!acquires_of_cluster && c->sent_ended > known_before)
        *of_copies = known_before;
}
