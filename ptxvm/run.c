/* The PTX machine's clock: which CTAs are alive, which warp runs, which of its lanes, and when asynchronous work
 * happens.
 *
 * Every lane has a program counter of its own. The lanes of a warp that stand at one instruction run together, those
 * that are furthest behind first, so that lanes which parted meet again; now and then others go first, for a program
 * may not rely on this. At a convergent instruction lanes gather until all that it needs are there. A warp runs for a
 * random number of instructions, then another one does; what a warp waits for is asked when it is its turn. All
 * randomness comes from the launch's seed. */
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vm.h"

enum {
    MAX_THREADS = 1024,          /* of a CTA */
    MAX_CTA_SMEM_BYTES = 232448, /* and of an SM that much and 1 KiB for each CTA: */
    SM_SMEM_BYTES = 233472,
    SM_THREADS = 2048,
    SM_CTAS = 32,
    MAX_CLUSTER = 16,
    MAX_SLICE = 256,       /* instructions that a warp runs until another one does */
    CTA_STAY = 16,         /* slices on average until another CTA's turn */
    BUSY_CTAS = 4,         /* begun at once; more begin when these wait, and by chance: */
    CTA_BEGIN = 256,       /* slices on average until one more CTA begins */
    BULK_ALIGNMENT = 1024, /* of shared memory in the host's */
    MAX_IDLE = 1 << 25     /* instructions in which no memory was written, nobody woke, nobody ended */
};

struct async_work {
    struct async_work *next;
    warp *issuer;
    const instruction *instruction; /* that issued it */
    async_kind kind;
    int is_after; /* of async_after_cp: belongs to no group, runs as soon as all before it have run */
    uint32_t lanes;
    uint32_t groups[LANES]; /* of each of these lanes, counted from the warp's start */
    async_action action;
    void *data;
};

typedef struct group_wait {
    wait_state wait;
    uint32_t lanes;
    int pc;
    int was_asked; /* poll() has said no before */
} group_wait;

/* A launch and what only this file knows of it. */
typedef struct machine {
    launch launch; /* first: machine_of() */
    const instruction *code;
    cta **ctas; /* that have begun; those of a cluster stay until all of it have ended */
    int cta_count, cta_limit, current;
    cta **spare; /* ended ones, whose memory the next ones take */
    int spare_count;
    uint64_t next_id, id_count; /* CTAs in order of x, y, z */
    uint32_t cluster;
    uint32_t *sm_load; /* CTAs on each SM */
    async_work *bulk;  /* all ASYNC_BULK */
    int bulk_count;
    uint64_t early; /* one in so many slices runs asynchronous work before anybody demands it */
    uint64_t events, last_progress, last_progress_clock;
    const warp *warp; /* where an error happens, and at which instruction */
    const instruction *instruction;
} machine;

static machine *machine_of(const warp *w)
{
    return (machine *)(void *)w->cta->launch;
}

/* ---- Chance and errors ---- */

uint64_t next_random(launch *l)
{
    uint64_t z = l->random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t below(machine *m, uint64_t limit)
{
    return next_random(&m->launch) % limit;
}

/* True once in `times` on average. */
static int chance(machine *m, uint64_t times)
{
    return below(m, times) == 0;
}

const char *fail(const char *format, ...)
{
    static _Thread_local char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return text;
}

/* ---- Asynchronous work ---- */

/* Runs work that is in no list any more. */
static const char *run_work(machine *m, async_work *work)
{
    const char *error = work->action(work->issuer, work->data);
    if (error) {
        m->warp = work->issuer;
        m->instruction = work->instruction;
    }
    free(work->data);
    free(work);
    m->events++;
    return error;
}

/* Takes the oldest work of a kind out of the warp's list; NULL where there is none. */
static async_work *take_oldest(warp *w, async_kind kind)
{
    async_work **link = &w->pending;
    while (*link && (*link)->kind != kind)
        link = &(*link)->next;
    async_work *work = *link;
    if (work)
        *link = work->next;
    return work;
}

/* A copy in flight, drawn at random: bulk copies keep no order. */
static const char *run_some_bulk(machine *m)
{
    async_work **link = &m->bulk;
    for (uint64_t skipped = below(m, (uint64_t)m->bulk_count); skipped > 0; skipped--)
        link = &(*link)->next;
    async_work *work = *link;
    *link = work->next;
    m->bulk_count--;
    return run_work(m, work);
}

static const char *add_work(warp *w, async_kind kind, async_action action, void *data, int is_after)
{
    machine *m = machine_of(w);
    async_work *work = malloc(sizeof *work);
    if (!work) {
        free(data);
        return fail("no memory");
    }
    *work = (async_work){.issuer = w,
                         .instruction = m->instruction,
                         .kind = kind,
                         .is_after = is_after,
                         .lanes = w->active,
                         .action = action,
                         .data = data};
    memcpy(work->groups, w->open_groups[kind], sizeof work->groups);
    if (m->launch.asked->eager)
        return run_work(m, work);
    if (kind == ASYNC_BULK) {
        work->next = m->bulk;
        m->bulk = work;
        m->bulk_count++;
        return NULL;
    }
    async_work **link = &w->pending;
    while (*link)
        link = &(*link)->next;
    *link = work;
    return NULL;
}

/* Whether a lane that waits for all but its `newest` groups waits for this. */
static int is_demanded(const warp *w, const async_work *work, uint32_t newest)
{
    const uint32_t lanes = work->lanes & w->active;
    for (int lane = 0; lane < LANES && !work->is_after; lane++)
        if ((lanes >> lane & 1) && work->groups[lane] + newest < w->open_groups[work->kind][lane])
            return 1;
    return 0;
}

/* Runs what only waited for older copies. */
static const char *run_afters(machine *m, warp *w)
{
    const char *error = NULL;
    for (const async_work *first = w->pending; first && !error;) {
        if (first->kind != ASYNC_CP) {
            first = first->next;
            continue;
        }
        if (!first->is_after)
            return NULL;
        error = run_work(m, take_oldest(w, ASYNC_CP));
        first = w->pending;
    }
    return error;
}

const char *async_add(warp *w, async_kind kind, async_action action, void *data)
{
    return add_work(w, kind, action, data, 0);
}

const char *async_after_cp(warp *w, async_action action, void *data)
{
    const char *error = add_work(w, ASYNC_CP, action, data, 1);
    return error ? error : run_afters(machine_of(w), w);
}

void async_commit(warp *w, async_kind kind)
{
    for (int lane = 0; lane < LANES; lane++)
        w->open_groups[kind][lane] += w->active >> lane & 1;
    if (w->cta->races)
        races_commit(w, kind);
}

const char *async_wait(warp *w, async_kind kind, int newest)
{
    machine *m = machine_of(w);
    int count = 0, demanded = 0; /* of this kind in the list, up to the last that is waited for */
    for (const async_work *work = w->pending; work; work = work->next) {
        if (work->kind != kind)
            continue;
        count++;
        if (is_demanded(w, work, (uint32_t)newest))
            demanded = count;
    }
    const char *error = NULL;
    for (; demanded > 0 && !error; demanded--)
        error = run_work(m, take_oldest(w, kind));
    if (w->cta->races)
        races_waited(w, kind, newest);
    return error || kind != ASYNC_CP ? error : run_afters(m, w);
}

static const char *execute_commit(warp *w, const instruction *i, uint32_t active)
{
    (void)active;
    async_commit(w, (async_kind)i->decoded[0]);
    return NULL;
}

static const char *execute_wait(warp *w, const instruction *i, uint32_t active)
{
    (void)active;
    return async_wait(w, (async_kind)i->decoded[0], (int)i->operands[0].imm);
}

executor find_async_group(instruction *i, const char *beginning, async_kind kind)
{
    if (!begins_with(i->mnemonic, beginning))
        return NULL;
    const char *rest = i->mnemonic + strlen(beginning);
    const executor found = begins_with(rest, "commit_group") ? execute_commit
                           : begins_with(rest, "wait_group") ? execute_wait
                                                             : NULL;
    if (found != NULL)
        i->decoded[0] = kind;
    return found;
}

/* Work that nobody has demanded yet. */
static const char *run_early(machine *m, warp *w)
{
    if (m->bulk_count && chance(m, m->early)) {
        const char *error = run_some_bulk(m);
        if (error)
            return error;
    }
    if (!w->pending || !chance(m, m->early))
        return NULL;
    const char *error = run_work(m, take_oldest(w, w->pending->kind));
    return error ? error : run_afters(m, w);
}

/* Where every warp waits: work that may end a wait. 1 = some ran, 0 = there is none. */
static int run_when_stuck(machine *m, const char **error)
{
    if (m->bulk_count) {
        *error = run_some_bulk(m);
        return 1;
    }
    for (int c = 0; c < m->cta_count; c++) {
        for (int k = 0; k < m->ctas[c]->warp_count; k++) {
            warp *w = &m->ctas[c]->warps[k];
            async_work *work = take_oldest(w, ASYNC_CP);
            if (!work)
                continue;
            *error = run_work(m, work);
            *error = *error ? *error : run_afters(m, w);
            return 1;
        }
    }
    return 0;
}

/* ---- Lanes of a warp ---- */

/* Lanes that run together. */
typedef struct group {
    uint32_t lanes;
    int pc;
    int meeting; /* the next instruction where others stand */
    int is_all;  /* of the warp that can run */
} group;

static void set_pc(warp *w, uint32_t lanes, int pc)
{
    for (int lane = 0; lane < LANES; lane++)
        if (lanes >> lane & 1)
            w->pc[lane] = pc;
}

static int first_of(uint32_t lanes)
{
    return __builtin_ctz(lanes);
}

static uint32_t lanes_at(const warp *w, uint32_t lanes, int pc)
{
    uint32_t there = 0;
    for (int lane = 0; lane < LANES; lane++)
        there |= (uint32_t)(w->pc[lane] == pc) << lane;
    return there & lanes;
}

static uint32_t ready_lanes(const warp *w)
{
    return w->alive & ~w->gathering & ~w->waiting;
}

/* The group of the lane that is furthest behind, or of any lane. */
static group choose_group(machine *m, const warp *w, uint32_t ready, int any)
{
    int leader = first_of(ready);
    if (any) {
        for (uint64_t skipped = below(m, LANES); skipped > 0; skipped--)
            do {
                leader = (leader + 1) % LANES;
            } while (!(ready >> leader & 1));
    } else {
        for (int lane = leader + 1; lane < LANES; lane++)
            if ((ready >> lane & 1) && w->pc[lane] < w->pc[leader])
                leader = lane;
    }
    group g = {.pc = w->pc[leader], .meeting = INT_MAX};
    g.lanes = lanes_at(w, ready, g.pc);
    g.is_all = g.lanes == ready;
    for (int lane = 0; lane < LANES && !g.is_all; lane++)
        if ((ready >> lane & 1) && w->pc[lane] > g.pc && w->pc[lane] < g.meeting)
            g.meeting = w->pc[lane];
    return g;
}

/* The lanes whose guard holds. */
static uint32_t guarded(const warp *w, const instruction *i, uint32_t lanes)
{
    const uint64_t *predicate = register_of(w, i->guard);
    uint32_t holds = 0;
    for (int lane = 0; lane < LANES; lane++)
        holds |= (uint32_t)(predicate[lane] & 1) << lane;
    return lanes & (i->guard_negated ? ~holds : holds);
}

/* The group waits: it stays at its instruction. */
static void add_wait(warp *w, uint32_t lanes, int pc)
{
    w->waits[w->wait_count++] = (group_wait){.wait = w->wait, .lanes = lanes, .pc = pc};
    w->waiting |= lanes;
    w->wait.poll = NULL;
    set_pc(w, lanes, pc);
}

static const char *execute(machine *m, warp *w, const instruction *i, uint32_t active)
{
    w->active = active;
    m->instruction = w->executing = i;
    const char *error = i->execute(w, i, active);
    return error || !m->launch.races ? error : races_found(&m->launch);
}

/* A group at a convergent instruction. *executed: the lanes that it was executed for; the others stay. */
static const char *run_convergent(machine *m, warp *w, const instruction *i, const group *g, uint32_t *executed)
{
    const uint32_t there = g->lanes | lanes_at(w, w->gathering, g->pc);
    uint32_t needed = w->alive;
    if (i->mask_operand >= 0)
        needed &= (uint32_t)value_of(w, &i->operands[i->mask_operand], first_of(g->lanes));
    *executed = 0;
    set_pc(w, g->lanes, g->pc);
    m->instruction = i;
    if (!(needed >> first_of(g->lanes) & 1))
        return fail("lane %d is not in its own mask %08x", first_of(g->lanes), needed);
    if (needed & ~there) {
        w->gathering |= g->lanes;
        return NULL;
    }
    w->gathering &= ~needed;
    w->converged += needed == w->alive;
    *executed = needed;
    return execute(m, w, i, needed);
}

/* ret or exit of some lanes. */
static const char *exit_lanes(machine *m, warp *w, uint32_t lanes)
{
    w->alive &= ~lanes;
    w->gathering = 0; /* who waited for these lanes looks again */
    m->events++;
    if (w->alive)
        return NULL;
    w->cta->warps_alive--;
    if (take_oldest(w, ASYNC_STORE))
        return fail("the warp exits before its bulk stores have read shared memory");
    if (w->products != w->cta->products[w->index / WARPS_PER_GROUP].count)
        return fail("the warp exits and has not issued all wgmmas that its warpgroup has");
    const char *error = NULL;
    while (w->pending && !error)
        error = run_work(m, take_oldest(w, w->pending->kind));
    return error;
}

/* Runs a group until it must be chosen again: it parts, meets others, waits, ends, or has had its turn. */
static const char *run_group(machine *m, warp *w, group g, int *budget)
{
    const char *error = NULL;
    for (; *budget > 0 && g.pc != g.meeting; --*budget) {
        const instruction *i = &m->code[g.pc];
        const uint32_t active = i->guard < 0 ? g.lanes : guarded(w, i, g.lanes);
        m->launch.clock++;
        if (active == 0) {
            g.pc++;
        } else if (i->is_convergent && active != g.lanes) { /* the others need not be gathered */
            set_pc(w, g.lanes & ~active, g.pc + 1);
            set_pc(w, active, g.pc);
            return NULL;
        } else if (i->execute) {
            uint32_t executed = active;
            error = i->is_convergent ? run_convergent(m, w, i, &g, &executed) : execute(m, w, i, active);
            if (error || executed == 0)
                break;
            if (w->wait.poll) {
                set_pc(w, g.lanes & ~executed, i->is_convergent ? g.pc : g.pc + 1);
                add_wait(w, executed, g.pc);
                return NULL;
            }
            if (i->is_convergent && executed != g.lanes) {
                set_pc(w, executed, g.pc + 1);
                return NULL;
            }
            g.pc++;
        } else if (i->operand_count) { /* bra */
            if (active != g.lanes) {
                set_pc(w, active, (int)i->operands[0].imm);
                set_pc(w, g.lanes & ~active, g.pc + 1);
                return NULL;
            }
            g.pc = (int)i->operands[0].imm;
            if (!g.is_all)
                break;
        } else {
            m->instruction = i;
            error = exit_lanes(m, w, active);
            g.lanes &= ~active;
            g.pc++;
            if (g.lanes == 0 || error)
                break;
        }
    }
    set_pc(w, g.lanes, g.pc);
    return error;
}

/* All lanes that are alive stand at convergent instructions, and no two groups at one. */
static const char *lanes_apart(machine *m, const warp *w)
{
    const int pc = w->pc[first_of(w->gathering)];
    const uint32_t here = lanes_at(w, w->gathering, pc), others = w->gathering & ~here;
    m->instruction = &m->code[pc];
    if (!others)
        return fail("lanes %08x stand here, and need lanes that never come", here);
    return fail("lanes %08x stand here, lanes %08x at line %d: no lane can go on", here, others,
                m->code[w->pc[first_of(others)]].line);
}

static const char *run_slice(machine *m, warp *w)
{
    int budget = 1 + (int)below(m, MAX_SLICE), any = chance(m, 4);
    m->warp = w;
    while (budget > 0) {
        const uint32_t ready = ready_lanes(w);
        if (!ready)
            return w->gathering && !w->waiting ? lanes_apart(m, w) : NULL;
        const char *error = run_group(m, w, choose_group(m, w, ready, any), &budget);
        if (error)
            return error;
        any = 0;
    }
    return NULL;
}

/* Lets groups go on whose wait is over. */
static const char *wake(machine *m, warp *w)
{
    for (int k = w->wait_count - 1; k >= 0; k--) {
        group_wait *waiting = &w->waits[k];
        w->wait = waiting->wait;
        const int is_over = w->wait.poll(w, w->wait.data);
        w->wait.poll = NULL;
        if (!is_over) {
            waiting->was_asked = 1;
            continue;
        }
        const group_wait woken = *waiting;
        *waiting = w->waits[--w->wait_count];
        w->waiting &= ~woken.lanes;
        m->events += (uint64_t)woken.was_asked;
        m->warp = w;
        if (!woken.wait.done) {
            w->passed_wait = 1;
            const char *error = execute(m, w, &m->code[woken.pc], woken.lanes);
            w->passed_wait = 0;
            if (error)
                return error;
        }
        if (w->wait.poll)
            add_wait(w, woken.lanes, woken.pc);
        else
            set_pc(w, woken.lanes, woken.pc + 1);
    }
    return NULL;
}

/* ---- CTAs ---- */

static uint32_t thread_count(const ptxvm_launch *asked)
{
    return asked->block[0] * asked->block[1] * asked->block[2];
}

static void free_cta(cta *c)
{
    if (!c)
        return;
    for (int k = 0; c->warps && k < c->warp_count; k++) {
        while (c->warps[k].pending) {
            async_work *work = take_oldest(&c->warps[k], c->warps[k].pending->kind);
            free(work->data);
            free(work);
        }
        free(c->warps[k].registers);
        free(c->warps[k].waits);
    }
    free(c->warps);
    free(c->products);
    free(c->shared);
    free(c->cluster);
    races_end(c);
    free(c);
}

static size_t register_bytes(const machine *m)
{
    return (size_t)(m->launch.entry->register_count + 1) * LANES * sizeof(uint64_t);
}

/* A CTA with all its memory; NULL without memory. */
static cta *make_cta(const machine *m)
{
    cta *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->warp_count = (int)((thread_count(m->launch.asked) + LANES - 1) / LANES);
    c->shared_bytes = m->launch.entry->static_smem_bytes + m->launch.asked->dynamic_smem_bytes;
    const size_t bytes = (c->shared_bytes / BULK_ALIGNMENT + 1) * (size_t)BULK_ALIGNMENT;
    c->shared = aligned_alloc(BULK_ALIGNMENT, bytes);
    c->warps = calloc((size_t)c->warp_count, sizeof *c->warps);
    c->cluster = calloc(m->cluster, sizeof(cta *));
    c->products = calloc((size_t)(c->warp_count / WARPS_PER_GROUP + 1), sizeof *c->products);
    int whole = c->shared && c->warps && c->cluster && c->products;
    for (int k = 0; whole && k < c->warp_count; k++) {
        c->warps[k].registers = malloc(register_bytes(m));
        c->warps[k].waits = calloc(LANES, sizeof *c->warps[k].waits);
        whole = c->warps[k].registers && c->warps[k].waits;
    }
    if (whole)
        return c;
    free_cta(c);
    return NULL;
}

static void reset_warp(const machine *m, cta *c, int index)
{
    warp *w = &c->warps[index];
    uint64_t *registers = w->registers;
    group_wait *waits = w->waits;
    const uint32_t threads = thread_count(m->launch.asked) - (uint32_t)index * LANES;
    *w = (warp){.cta = c, .index = index, .registers = registers, .waits = waits};
    w->alive = threads >= LANES ? (uint32_t)FULL_WARP : (1u << threads) - 1;
    set_pc(w, (uint32_t)FULL_WARP, m->launch.entry->first);
    memset(registers, 0, register_bytes(m));
}

/* A new CTA, or an ended one as if new. */
static cta *take_cta(machine *m)
{
    cta *c = m->spare_count ? m->spare[--m->spare_count] : make_cta(m);
    if (!c)
        return NULL;
    const cta kept = *c;
    *c = (cta){.launch = &m->launch,
               .cluster = kept.cluster,
               .shared = kept.shared,
               .shared_bytes = kept.shared_bytes,
               .warps = kept.warps,
               .products = kept.products,
               .warp_count = kept.warp_count,
               .warps_alive = kept.warp_count};
    memset(c->shared, POISON, c->shared_bytes);
    for (int k = 0; k < c->warp_count; k++) {
        c->products[k / WARPS_PER_GROUP].count = 0;
        reset_warp(m, c, k);
    }
    return c;
}

/* The SM with the fewest CTAs. */
static uint32_t least_loaded(const machine *m)
{
    uint32_t sm = 0;
    for (uint32_t k = 1; k < m->launch.asked->sm_count; k++)
        if (m->sm_load[k] < m->sm_load[sm])
            sm = k;
    return sm;
}

/* Begins the next CTA, or the next cluster of them. */
static const char *begin_cluster(machine *m)
{
    const uint32_t *grid = m->launch.asked->grid;
    cta *cluster[MAX_CLUSTER];
    for (uint32_t rank = 0; rank < m->cluster; rank++, m->next_id++) {
        cta *c = cluster[rank] = take_cta(m);
        if (!c) {
            while (rank > 0)
                free_cta(cluster[--rank]);
            return fail("no memory for a CTA");
        }
        c->id[0] = (uint32_t)(m->next_id % grid[0]);
        c->id[1] = (uint32_t)(m->next_id / grid[0] % grid[1]);
        c->id[2] = (uint32_t)(m->next_id / grid[0] / grid[1]);
        c->rank = rank;
    }
    for (uint32_t rank = 0; rank < m->cluster; rank++) {
        memcpy(cluster[rank]->cluster, cluster, m->cluster * sizeof(cta *));
        cluster[rank]->sm = least_loaded(m);
        m->sm_load[cluster[rank]->sm]++;
        m->ctas[m->cta_count++] = cluster[rank];
    }
    m->events++;
    const char *error = NULL;
    for (uint32_t rank = 0; rank < m->cluster && m->launch.races && !error; rank++)
        error = races_begin(cluster[rank]);
    return error;
}

static int can_begin(const machine *m)
{
    return m->next_id < m->id_count && m->cta_count + (int)m->cluster <= m->cta_limit;
}

static const char *begin_some(machine *m)
{
    const char *error = NULL;
    while (can_begin(m) && m->cta_count < BUSY_CTAS && !error)
        error = begin_cluster(m);
    return !error && can_begin(m) && chance(m, CTA_BEGIN) ? begin_cluster(m) : error;
}

/* A copy or st.async in flight that a CTA of the cluster issued; NULL where there is none. */
static const async_work *bulk_of(const machine *m, cta *const *cluster)
{
    for (const async_work *work = m->bulk; work; work = work->next)
        if (work->issuer->cta->cluster[0] == cluster[0])
            return work;
    return NULL;
}

/* Takes the CTA's cluster out of the list if all its warps have exited. */
static const char *end_cluster(machine *m, const cta *ended)
{
    cta *cluster[MAX_CLUSTER];
    memcpy(cluster, ended->cluster, m->cluster * sizeof(cta *));
    for (uint32_t rank = 0; rank < m->cluster; rank++)
        if (cluster[rank]->warps_alive)
            return NULL;
    const async_work *flying = m->bulk_count ? bulk_of(m, cluster) : NULL;
    if (flying) {
        m->warp = flying->issuer;
        m->instruction = flying->instruction;
        return fail("all threads have exited before this is done");
    }
    const char *error = NULL;
    for (uint32_t rank = 0; rank < m->cluster && !error; rank++)
        error = mbarriers_end(cluster[rank]);
    if (error) {
        m->warp = &ended->warps[0];
        return error;
    }
    int kept = 0;
    for (int k = 0; k < m->cta_count; k++) {
        cta *c = m->ctas[k];
        if (c->cluster[0] != cluster[0])
            m->ctas[kept++] = c;
    }
    m->cta_count = kept;
    for (uint32_t rank = 0; rank < m->cluster; rank++) {
        m->sm_load[cluster[rank]->sm]--;
        races_end(cluster[rank]);
        m->spare[m->spare_count++] = cluster[rank];
    }
    return NULL;
}

/* Lets one warp of the CTA run. 1 = one did, 0 = all wait or have exited. */
static int step_cta(machine *m, cta *c, const char **error)
{
    const int start = (int)below(m, (uint64_t)c->warp_count);
    for (int k = 0; k < c->warp_count; k++) {
        warp *w = &c->warps[(start + k) % c->warp_count];
        if (!w->alive)
            continue;
        *error = wake(m, w);
        if (*error)
            return 1;
        if (!ready_lanes(w) && (w->waiting || !w->gathering))
            continue;
        *error = run_early(m, w);
        if (!*error)
            *error = run_slice(m, w);
        if (!*error && c->warps_alive == 0)
            *error = end_cluster(m, c);
        return 1;
    }
    return 0;
}

/* ---- A launch ---- */

/* Appends to a text of limited size. */
static __attribute__((format(printf, 3, 4))) void append(char *text, size_t bytes, const char *format, ...)
{
    const size_t length = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + length, bytes - length, format, arguments);
    va_end(arguments);
}

/* Whether the same wait was told already. */
static int is_told(const machine *m, const cta *until_cta, const warp *until_warp, const group_wait *waiting)
{
    for (int c = 0; c < m->cta_count; c++) {
        for (int k = 0; k < m->ctas[c]->warp_count; k++) {
            const warp *w = &m->ctas[c]->warps[k];
            if (m->ctas[c] == until_cta && w == until_warp)
                return 0;
            for (int n = 0; n < w->wait_count; n++)
                if (w->waits[n].pc == waiting->pc && strcmp(w->waits[n].wait.what, waiting->wait.what) == 0)
                    return 1;
        }
    }
    return 0;
}

static int count_waits(const machine *m, const group_wait *waiting)
{
    int count = 0;
    for (int c = 0; c < m->cta_count; c++)
        for (int k = 0; k < m->ctas[c]->warp_count; k++)
            for (int n = 0; n < m->ctas[c]->warps[k].wait_count; n++) {
                const group_wait *other = &m->ctas[c]->warps[k].waits[n];
                count += other->pc == waiting->pc && strcmp(other->wait.what, waiting->wait.what) == 0;
            }
    return count;
}

static void describe_waits(const machine *m)
{
    for (int c = 0; c < m->cta_count; c++)
        for (int k = 0; k < m->ctas[c]->warp_count; k++) {
            const warp *w = &m->ctas[c]->warps[k];
            for (int n = 0; n < w->wait_count; n++)
                if (w->waits[n].wait.describe)
                    w->waits[n].wait.describe(w, &w->waits[n].wait);
        }
}

/* Every kind of wait once, with the first warp that waits so. */
static const char *tell_waits(const machine *m, const char *headline)
{
    char text[800] = "";
    describe_waits(m);
    for (int c = 0; c < m->cta_count; c++) {
        for (int k = 0; k < m->ctas[c]->warp_count; k++) {
            const warp *w = &m->ctas[c]->warps[k];
            for (int n = 0; n < w->wait_count; n++) {
                const group_wait *waiting = &w->waits[n];
                const uint32_t *id = w->cta->id;
                if (is_told(m, m->ctas[c], w, waiting))
                    continue;
                append(text, sizeof text, "%s CTA (%u,%u,%u) warp %d lanes %08x at line %d for %s", *text ? ";" : "",
                       id[0], id[1], id[2], w->index, waiting->lanes, m->code[waiting->pc].line, waiting->wait.what);
                if (count_waits(m, waiting) > 1)
                    append(text, sizeof text, " (and %d like it)", count_waits(m, waiting) - 1);
            }
        }
    }
    return fail("%s%s%s", headline, *text ? ", waiting:" : "", text);
}

/* Whether the launch still does something that others can see. */
static int is_idle(machine *m)
{
    const uint64_t progress = m->events + m->launch.counts.bytes_global_written;
    if (progress != m->last_progress) {
        m->last_progress = progress;
        m->last_progress_clock = m->launch.clock;
    }
    return m->launch.clock - m->last_progress_clock > MAX_IDLE;
}

/* One turn of one warp of some CTA; where all wait, of what may end a wait. */
static const char *step(machine *m)
{
    const char *error = begin_some(m);
    if (error)
        return error;
    if (m->current >= m->cta_count || chance(m, CTA_STAY))
        m->current = (int)below(m, (uint64_t)m->cta_count);
    for (int k = 0; k < m->cta_count; k++) {
        const int turn = (m->current + k) % m->cta_count;
        if (step_cta(m, m->ctas[turn], &error)) {
            m->current = turn;
            return error;
        }
    }
    if (run_when_stuck(m, &error))
        return error;
    if (can_begin(m))
        return begin_cluster(m);
    m->warp = NULL;
    return tell_waits(m, "deadlock");
}

static const char *run_all(machine *m)
{
    const char *error = NULL;
    while (!error && (m->cta_count || m->next_id < m->id_count)) {
        error = step(m);
        if (!error && is_idle(m))
            error = tell_waits(m, "the launch spins: no warp writes memory, wakes or ends any more; one runs here");
    }
    return error;
}

/* What no launch of this entry may be. */
static const char *check_launch(const ptxvm_launch *asked, const entry *e)
{
    const uint64_t threads = (uint64_t)asked->block[0] * asked->block[1] * asked->block[2];
    const uint64_t smem_bytes = (uint64_t)e->static_smem_bytes + asked->dynamic_smem_bytes;
    const uint64_t most = e->max_threads ? e->max_threads : MAX_THREADS;
    if (asked->block[0] == 0 || asked->block[1] == 0 || asked->block[2] == 0 || asked->block[0] > MAX_THREADS ||
        asked->block[1] > MAX_THREADS || threads > most)
        return fail("a block of %u x %u x %u threads: 1 to %llu are possible", asked->block[0], asked->block[1],
                    asked->block[2], (unsigned long long)most);
    if (asked->grid[0] == 0 || asked->grid[1] == 0 || asked->grid[2] == 0)
        return fail("a grid of %u x %u x %u CTAs", asked->grid[0], asked->grid[1], asked->grid[2]);
    if (smem_bytes > MAX_CTA_SMEM_BYTES)
        return fail("%llu bytes of shared memory: %d are possible", (unsigned long long)smem_bytes, MAX_CTA_SMEM_BYTES);
    if (asked->cluster > MAX_CLUSTER || (asked->cluster > 1 && asked->grid[0] % asked->cluster != 0))
        return fail("clusters of %u CTAs in a grid %u wide: up to %d, and the grid whole clusters", asked->cluster,
                    asked->grid[0], MAX_CLUSTER);
    if (asked->sm_count == 0)
        return fail("a launch on 0 SMs");
    return NULL;
}

/* CTAs that fit the GPU at a time. */
static int limit_of(const machine *m)
{
    const ptxvm_launch *asked = m->launch.asked;
    const uint32_t warps = (thread_count(asked) + LANES - 1) / LANES;
    const uint32_t by_threads = SM_THREADS / (warps * LANES);
    const uint32_t by_smem = SM_SMEM_BYTES / (m->launch.entry->static_smem_bytes + asked->dynamic_smem_bytes + 1024);
    uint32_t per_sm = by_threads < by_smem ? by_threads : by_smem;
    per_sm = per_sm < SM_CTAS ? per_sm : SM_CTAS;
    const uint64_t all = (uint64_t)per_sm * asked->sm_count, most = all < m->id_count ? all : m->id_count;
    return most < m->cluster ? (int)m->cluster : (int)most;
}

/* The parameters as one block, as an entry declares them. */
static const char *copy_parameters(machine *m)
{
    const entry *e = m->launch.entry;
    const size_t bytes = ((size_t)e->parameter_bytes / 128 + 1) * 128;
    m->launch.parameters = aligned_alloc(128, bytes);
    if (!m->launch.parameters)
        return fail("no memory");
    memset(m->launch.parameters, 0, bytes);
    for (int k = 0; k < e->parameter_count; k++)
        memcpy(m->launch.parameters + e->parameters[k].offset, m->launch.asked->parameters[k], e->parameters[k].bytes);
    return NULL;
}

static const char *prepare(machine *m, const ptxvm_launch *asked)
{
    m->launch.asked = asked;
    m->launch.random = asked->seed;
    m->launch.entry = find_entry(asked->module, asked->entry);
    if (!m->launch.entry)
        return fail("the module has no entry %s", asked->entry);
    const char *error = check_launch(asked, m->launch.entry);
    if (error)
        return error;
    static const uint64_t early[] = {4, 32, 256};
    m->early = early[below(m, sizeof early / sizeof early[0])];
    m->code = asked->module->instructions;
    m->cluster = cluster_size(asked);
    m->id_count = (uint64_t)asked->grid[0] * asked->grid[1] * asked->grid[2];
    m->cta_limit = limit_of(m);
    m->ctas = calloc((size_t)m->cta_limit, sizeof(cta *));
    m->spare = calloc((size_t)m->cta_limit, sizeof(cta *));
    m->sm_load = calloc(asked->sm_count, sizeof *m->sm_load);
    if (!m->ctas || !m->spare || !m->sm_load)
        return fail("no memory");
    if (asked->check_races != PTXVM_RACES_OFF && !races_open(&m->launch))
        return fail("no memory for the race detector");
    return copy_parameters(m);
}

static void clean_up(machine *m)
{
    while (m->bulk) {
        async_work *work = m->bulk;
        m->bulk = work->next;
        free(work->data);
        free(work);
    }
    for (int k = 0; k < m->cta_count; k++)
        free_cta(m->ctas[k]);
    for (int k = 0; k < m->spare_count; k++)
        free_cta(m->spare[k]);
    free(m->ctas);
    free(m->spare);
    free(m->sm_load);
    free(m->launch.parameters);
    races_close(&m->launch);
}

/* An error with its place. */
static void report(const machine *m, const char *what, char *error, size_t error_bytes)
{
    if (!m->warp) {
        snprintf(error, error_bytes, "%s", what);
        return;
    }
    const uint32_t *id = m->warp->cta->id;
    const instruction *i = m->instruction;
    snprintf(error, error_bytes, "CTA (%u,%u,%u) warp %d, PTX line %d, `%s`: %s", id[0], id[1], id[2], m->warp->index,
             i->line, i->text, what);
}

int ptxvm_run(const ptxvm_launch *asked, ptxvm_counts *counts, char *error, size_t error_bytes)
{
    machine *m = calloc(1, sizeof *m);
    if (!m) {
        snprintf(error, error_bytes, "no memory");
        return -1;
    }
    const char *what = prepare(m, asked);
    if (!what)
        what = run_all(m);
    m->launch.counts.instructions = m->launch.clock;
    if (counts)
        *counts = m->launch.counts;
    if (what)
        report(m, what, error, error_bytes);
    clean_up(m);
    free(m);
    return what ? -1 : 0;
}
