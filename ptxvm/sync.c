/* What orders threads in the PTX machine: barriers of the CTA and the cluster, mbarriers, fences; and what the lanes of
 * a warp tell each other. */
#include <stdio.h>
#include <string.h>

#include "vm.h"

static int lane_count(uint32_t lanes)
{
    return __builtin_popcount(lanes);
}

static int first_lane(uint32_t lanes)
{
    return __builtin_ctz(lanes);
}

/* Where each executor of this file keeps what its mnemonic said. */
enum {
    D_WHAT,     /* the operation */
    D_SOURCE,   /* the first operand that is read */
    D_HAS_COUNT /* of threads, of a bar */
};

/* ---- Waiting ---- */

static int is_always_ready(warp *w, void *data)
{
    (void)w, (void)data;
    return 1;
}

/* Lets others run before the instruction is executed again. */
static void yield(warp *w, const char *what)
{
    w->wait.poll = is_always_ready;
    snprintf(w->wait.what, sizeof w->wait.what, "%s", what);
}

/* ---- Named barriers ---- */

enum {
    EVERYONE = FULL_WARP /* as a barrier's count: all threads that have not exited */
};

/* decoded[D_WHAT] of a bar */
enum {
    SYNC,
    ARRIVE,
    RED_OR,
    RED_AND,
    RED_POPC
};

static uint32_t threads_needed(const cta *c, const named_barrier *b)
{
    return b->expected == (uint32_t)EVERYONE ? LANES * (uint32_t)c->warps_alive : b->expected;
}

static void end_phase(cta *c, named_barrier *b)
{
    if (c->races != NULL)
        races_barrier_ends(c, (int)(b - c->barriers));
    b->phase++;
    b->result = b->reduction;
    b->expected = b->arrived = 0;
    b->reduction = 0;
}

/* Others may exit and so complete a barrier of everyone: whoever asks first ends its phase. */
static int has_ended(warp *w, void *data)
{
    named_barrier *b = data;
    if (b->phase == (uint32_t)w->wait.token && b->arrived >= threads_needed(w->cta, b))
        end_phase(w->cta, b);
    return b->phase != (uint32_t)w->wait.token;
}

/* The barrier that an operand names; all lanes name one. NULL and *error otherwise. */
static named_barrier *barrier_of(warp *w, const operand *o, uint32_t active, uint64_t *id, const char **error)
{
    *id = (uint32_t)value_of(w, o, first_lane(active));
    if (*id < NAMED_BARRIERS)
        return &w->cta->barriers[*id];
    *error = fail("barrier %llu: there are %d", (unsigned long long)*id, NAMED_BARRIERS);
    return NULL;
}

/* How many threads the instruction says the barrier has. */
static const char *count_of(warp *w, const instruction *i, uint32_t active, uint32_t *count)
{
    *count = (uint32_t)EVERYONE;
    if (!i->decoded[D_HAS_COUNT])
        return NULL;
    *count = (uint32_t)value_of(w, &i->operands[i->decoded[D_SOURCE] + 1], first_lane(active));
    if (*count == 0 || *count % LANES != 0 || *count > LANES * (uint32_t)w->cta->warp_count)
        return fail("a barrier of %u threads in a CTA of %d warps", *count, w->cta->warp_count);
    return NULL;
}

/* True predicates in the low half, threads in the high one. */
static uint64_t contribution(const warp *w, const instruction *i, uint32_t active)
{
    const operand *o = &i->operands[i->decoded[D_SOURCE] + 1 + i->decoded[D_HAS_COUNT]];
    uint64_t sum = (uint64_t)lane_count(active) << 32;
    for (int lane = 0; lane < LANES; lane++)
        sum += (active >> lane & 1) && predicate_of(w, o, lane);
    return sum;
}

static void write_reduction(warp *w, const instruction *i, uint32_t active, uint64_t sum)
{
    const uint32_t true_count = (uint32_t)sum, threads = (uint32_t)(sum >> 32);
    const uint64_t result = i->decoded[D_WHAT] == RED_OR    ? true_count > 0
                            : i->decoded[D_WHAT] == RED_AND ? true_count == threads
                                                            : true_count;
    for (int lane = 0; lane < LANES; lane++)
        if (active >> lane & 1)
            set_register(w, &i->operands[0], lane, result);
}

/* The warp joins the barrier; a warp counts as 32 threads, however many of them there are. */
static const char *join(warp *w, const instruction *i, uint32_t active, named_barrier *b, uint64_t id)
{
    uint32_t count;
    const char *error = count_of(w, i, active, &count);
    if (error != NULL)
        return error;
    if (active != w->alive)
        return fail("barrier %llu: lanes %#x of the warp come, %#x exist", (unsigned long long)id, active, w->alive);
    if (b->expected != 0 && b->expected != count)
        return fail("barrier %llu: %d threads wait for, %d come with another count", (unsigned long long)id,
                    (int)b->expected, (int)count);
    b->expected = count;
    b->arrived += LANES;
    if (i->decoded[D_WHAT] >= RED_OR)
        b->reduction += contribution(w, i, active);
    if (w->cta->races != NULL) {
        races_barrier_arrive(w, (int)id);
        if (i->decoded[D_WHAT] != ARRIVE)
            races_barrier_wait(w, (int)id);
    }
    return NULL;
}

static const char *execute_bar(warp *w, const instruction *i, uint32_t active)
{
    const char *error = NULL;
    uint64_t id;
    named_barrier *b = barrier_of(w, &i->operands[i->decoded[D_SOURCE]], active, &id, &error);
    if (b == NULL)
        return error;
    if (!w->passed_wait) {
        const uint32_t phase = b->phase;
        error = join(w, i, active, b, id);
        if (error != NULL)
            return error;
        const uint32_t needed = threads_needed(w->cta, b);
        if (b->arrived >= needed) {
            end_phase(w->cta, b);
        } else if (i->decoded[D_WHAT] != ARRIVE) {
            w->wait = (wait_state){.poll = has_ended, .data = b, .token = phase};
            snprintf(w->wait.what, sizeof w->wait.what, "barrier %llu (%u of %u threads)", (unsigned long long)id,
                     b->arrived, needed);
            return NULL;
        }
    }
    if (i->decoded[D_WHAT] >= RED_OR)
        write_reduction(w, i, active, b->result);
    return NULL;
}

static const char *execute_nothing(warp *w, const instruction *i, uint32_t active)
{
    (void)w, (void)i, (void)active;
    return NULL;
}

static executor find_bar(instruction *i)
{
    if (begins_with(i->mnemonic, "bar.warp.sync"))
        return execute_nothing; /* run.c has gathered the lanes */
    const int is_red = has_modifier(i, "red");
    i->decoded[D_WHAT] = has_modifier(i, "arrive") ? ARRIVE
                         : !is_red                 ? SYNC
                         : has_modifier(i, "or")   ? RED_OR
                         : has_modifier(i, "and")  ? RED_AND
                                                   : RED_POPC;
    if (!is_red && !has_modifier(i, "sync") && !has_modifier(i, "arrive"))
        return NULL;
    i->decoded[D_SOURCE] = (uint64_t)is_red;
    const int others = is_red ? 3 : 1; /* operands beside the count */
    i->decoded[D_HAS_COUNT] = i->operand_count == others + 1;
    const int is_whole = i->operand_count == others || i->decoded[D_HAS_COUNT];
    return is_whole && (i->decoded[D_WHAT] != ARRIVE || i->decoded[D_HAS_COUNT]) ? execute_bar : NULL;
}

/* ---- The cluster's barrier ---- */

/* Warps of the cluster that have not ended, and those of them that have arrived in this phase, as threads. A warp that
 * arrives and ends counts once: it is no more waited for. */
static void count_cluster(const cta *c, uint32_t *threads, uint32_t *arrived)
{
    const uint32_t ranks = cluster_size(c->launch->asked), phase = c->cluster[0]->cluster_phase;
    *threads = *arrived = 0;
    for (uint32_t rank = 0; rank < ranks; rank++)
        for (int n = 0; n < c->warp_count; n++) {
            const warp *w = &c->cluster[rank]->warps[n];
            *threads += w->alive != 0 ? LANES : 0;
            *arrived += w->alive != 0 && w->cluster_arrival == phase + 1 ? LANES : 0;
        }
}

static void end_cluster_phase_if_due(cta *c)
{
    uint32_t threads, arrived;
    count_cluster(c, &threads, &arrived);
    if (arrived < threads)
        return;
    if (c->races != NULL)
        races_cluster_ends(c);
    c->cluster[0]->cluster_phase++;
}

/* Others may exit and so complete the phase: whoever asks first ends it. */
static int has_cluster_ended(warp *w, void *data)
{
    const uint32_t *phase = data;
    if (w->cluster_arrival == *phase + 1)
        end_cluster_phase_if_due(w->cta);
    return w->cluster_arrival != *phase + 1;
}

static void describe_cluster(const warp *w, wait_state *wait)
{
    uint32_t threads, arrived;
    count_cluster(w->cta, &threads, &arrived);
    snprintf(wait->what, sizeof wait->what, "the cluster's barrier (%u of %u threads)", arrived, threads);
}

static const char *execute_cluster_arrive(warp *w, const instruction *i, uint32_t active)
{
    if (active != w->alive)
        return fail("the cluster's barrier: lanes %#x of the warp come, %#x exist", active, w->alive);
    if (w->cluster_arrival != 0)
        return fail("the cluster's barrier: the warp arrives again and has not waited since it arrived");
    w->cluster_arrival = w->cta->cluster[0]->cluster_phase + 1;
    if (w->cta->races != NULL)
        races_cluster_arrive(w, strstr(i->mnemonic, ".relaxed") != NULL);
    end_cluster_phase_if_due(w->cta);
    return NULL;
}

static const char *execute_cluster_wait(warp *w, const instruction *i, uint32_t active)
{
    (void)i, (void)active;
    uint32_t *phase = &w->cta->cluster[0]->cluster_phase;
    if (w->cluster_arrival == 0)
        return fail("the cluster's barrier: the warp waits and has not arrived");
    if (w->cluster_arrival == *phase + 1) {
        w->wait = (wait_state){.poll = has_cluster_ended, .data = phase, .describe = describe_cluster};
        return NULL;
    }
    w->cluster_arrival = 0;
    if (w->cta->races != NULL)
        races_cluster_passed(w);
    return NULL;
}

/* d = the address in the shared memory of another CTA of the cluster. */
static const char *execute_mapa(warp *w, const instruction *i, uint32_t active)
{
    const uint32_t ranks = cluster_size(w->cta->launch->asked);
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        const uint64_t rank = (uint32_t)value_of(w, &i->operands[2], lane);
        if (rank >= ranks)
            return fail("rank %llu: the cluster has %u CTAs", (unsigned long long)rank, ranks);
        set_register(w, &i->operands[0], lane, shared_address_in(value_of(w, &i->operands[1], lane), rank));
    }
    return NULL;
}

/* ---- mbarriers ---- */

static const unsigned char mbarrier_mark[8] = {0xB1, 0x6B, 0xA2, 0x5C, 0x93, 0x4D, 0x84, 0x3E};

enum {
    MAX_COUNT = (1 << 20) - 1, /* of arrivals, and of bytes either way */
    TESTS_BEFORE_WAITING = 1000
};

/* The CTA of a shared address, and its own part of the address; NULL and *error when it lies outside. */
static cta *owner_of(warp *w, uint64_t address, uint32_t *offset, unsigned char **bytes, const char **error)
{
    *bytes = shared_at(w, address, sizeof mbarrier_mark, sizeof mbarrier_mark, error);
    if (*bytes == NULL)
        return NULL;
    *offset = shared_offset(address);
    return shared_owner(w, address);
}

/* The barrier at an offset, or a free place for it: from the place that the offset gives on. */
static mbarrier *search(cta *owner, uint32_t offset, int for_free_place)
{
    for (uint32_t n = 0; n < MAX_MBARRIERS; n++) {
        mbarrier *b = &owner->mbarriers[(offset / sizeof mbarrier_mark + n) % MAX_MBARRIERS];
        if (for_free_place ? b->expected == 0 : b->expected != 0 && b->address == offset)
            return b;
    }
    return NULL;
}

mbarrier *mbarrier_at(warp *w, uint64_t address, const char **error)
{
    uint32_t offset;
    unsigned char *bytes;
    cta *owner = owner_of(w, address, &offset, &bytes, error);
    if (owner == NULL)
        return NULL;
    mbarrier *b = search(owner, offset, 0);
    if (b == NULL)
        *error = fail("no mbarrier was initialised at shared address %u", offset);
    else if (memcmp(bytes, mbarrier_mark, sizeof mbarrier_mark) != 0)
        *error = fail("the mbarrier at shared address %u was overwritten", offset);
    else
        return b;
    return NULL;
}

static const char *end_mbarrier_phase_if_due(mbarrier *b)
{
    if (b->bytes > MAX_COUNT || b->bytes < -MAX_COUNT)
        return fail("the mbarrier at shared address %u: a transaction count of %d bytes", b->address, (int)b->bytes);
    if (b->pending == 0 && b->bytes == 0) {
        b->phase++;
        b->pending = b->expected;
        b->failed_tests = 0;
        if (b->owner->races != NULL)
            races_mbarrier_ends(b);
    }
    return NULL;
}

/* Bytes that a phase does not expect yet may come, but somebody must expect them. */
const char *mbarriers_end(const cta *ended)
{
    for (int n = 0; n < MAX_MBARRIERS; n++) {
        const mbarrier *b = &ended->mbarriers[n];
        if (b->expected != 0 && b->bytes < 0)
            return fail("the CTA with rank %u has ended, and %d bytes came to its mbarrier at shared address %u that "
                        "nobody expected",
                        ended->rank, -(int)b->bytes, b->address);
    }
    return NULL;
}

const char *mbarrier_complete_bytes(warp *w, uint64_t shared_address, uint32_t bytes)
{
    const char *error = NULL;
    mbarrier *b = mbarrier_at(w, shared_address, &error);
    if (b == NULL)
        return error;
    b->bytes -= (int32_t)bytes;
    return end_mbarrier_phase_if_due(b);
}

static const char *arrive(warp *w, uint64_t shared_address, uint32_t count, uint32_t expect_bytes, uint64_t *phase)
{
    const char *error = NULL;
    mbarrier *b = mbarrier_at(w, shared_address, &error);
    if (b == NULL)
        return error;
    *phase = b->phase;
    if (count > b->pending)
        return fail("%u arrivals at the mbarrier at shared address %u, whose phase %llu lacks %u of %u", count,
                    b->address, (unsigned long long)b->phase, b->pending, b->expected);
    if (expect_bytes > MAX_COUNT)
        return fail("an mbarrier shall expect %u bytes: at most %d", expect_bytes, MAX_COUNT);
    b->pending -= count;
    b->bytes += (int32_t)expect_bytes;
    return end_mbarrier_phase_if_due(b);
}

const char *mbarrier_arrive(warp *w, uint64_t shared_address, uint32_t count)
{
    uint64_t phase;
    return arrive(w, shared_address, count, 0, &phase);
}

static const char *init_one(warp *w, int lane, uint64_t address, uint32_t count)
{
    const char *error = NULL;
    uint32_t offset;
    unsigned char *bytes;
    cta *owner = owner_of(w, address, &offset, &bytes, &error);
    if (owner == NULL)
        return error;
    if (owner != w->cta)
        return fail("an mbarrier of another CTA: its own threads initialise it");
    if (count == 0 || count > MAX_COUNT)
        return fail("an mbarrier of %u arrivals", count);
    if (search(owner, offset, 0) != NULL)
        return fail("an mbarrier lives at shared address %u already", offset);
    mbarrier *b = search(owner, offset, 1);
    if (b == NULL)
        return fail("more than %d mbarriers in a CTA", MAX_MBARRIERS);
    *b = (mbarrier){.address = offset, .expected = count, .pending = count, .owner = owner};
    memcpy(bytes, mbarrier_mark, sizeof mbarrier_mark);
    if (w->cta->races != NULL)
        races_mbarrier_begins(w, lane, b);
    return NULL;
}

static const char *execute_init(warp *w, const instruction *i, uint32_t active)
{
    const char *error = NULL;
    for (int lane = 0; lane < LANES && error == NULL; lane++)
        if (active >> lane & 1)
            error = init_one(w, lane, value_of(w, &i->operands[0], lane), (uint32_t)value_of(w, &i->operands[1], lane));
    return error;
}

static const char *execute_inval(warp *w, const instruction *i, uint32_t active)
{
    const char *error = NULL;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        mbarrier *b = mbarrier_at(w, value_of(w, &i->operands[0], lane), &error);
        if (b == NULL)
            return error;
        b->expected = 0;
        if (w->cta->races != NULL)
            races_access(w, lane, ACCESS_WRITE, value_of(w, &i->operands[0], lane), sizeof mbarrier_mark);
    }
    return NULL;
}

/* decoded[D_WHAT] of arrive, expect_tx, complete_tx */
enum {
    ARRIVES = 1,
    EXPECTS = 2,
    COMPLETES = 4
};

/* The barrier's own bytes are read: stores of others to them, its initialisation too, must lie before or behind. */
static const char *tell_of_arrival(warp *w, int lane, uint64_t address, uint32_t arrivals)
{
    const char *error = NULL;
    const mbarrier *b = mbarrier_at(w, address, &error);
    if (b == NULL)
        return error;
    races_access(w, lane, ACCESS_READ, address, sizeof mbarrier_mark);
    if (arrivals > 0)
        races_mbarrier_arrive(w, b);
    return NULL;
}

static const char *change_one(warp *w, const instruction *i, int lane)
{
    const operand *address = &i->operands[i->decoded[D_SOURCE]];
    const uint64_t at = value_of(w, address, lane), what = i->decoded[D_WHAT];
    const int is_last = address == &i->operands[i->operand_count - 1];
    const uint32_t number = is_last ? 1 : (uint32_t)value_of(w, address + 1, lane); /* arrivals or bytes */
    if (what == COMPLETES)
        return mbarrier_complete_bytes(w, at, number);
    uint64_t phase = 0;
    const uint32_t arrivals = what == EXPECTS ? 0 : what == ARRIVES ? number : 1;
    const char *error = w->cta->races == NULL ? NULL : tell_of_arrival(w, lane, at, arrivals);
    if (error != NULL)
        return error;
    error = arrive(w, at, arrivals, what & EXPECTS ? number : 0, &phase);
    if (error == NULL && i->decoded[D_SOURCE] == 1)
        set_register(w, &i->operands[0], lane, phase);
    return error;
}

static const char *execute_change(warp *w, const instruction *i, uint32_t active)
{
    return each_lane(w, i, active, change_one);
}

/* decoded[D_WHAT] of the waits */
enum {
    BY_PARITY = 1,
    MAY_SUSPEND = 2,
    ACQUIRES_OF_CLUSTER = 4 /* .acquire.cluster: what other CTAs sent, too */
};

/* Whether the phase that a lane asks for has ended: by parity, it is the present one or the one before. */
static const char *test_one(warp *w, const instruction *i, int lane, mbarrier **b, int *has_phase_ended)
{
    const char *error = NULL;
    *b = mbarrier_at(w, value_of(w, &i->operands[1], lane), &error);
    if (*b == NULL)
        return error;
    if ((*b)->owner != w->cta)
        return fail("a wait for the mbarrier of another CTA: its own threads alone can");
    const uint64_t asked = value_of(w, &i->operands[2], lane);
    *has_phase_ended = i->decoded[D_WHAT] & BY_PARITY ? ((*b)->phase & 1) != (asked & 1) : (*b)->phase != asked;
    return NULL;
}

static int has_phase_gone(warp *w, void *data)
{
    const mbarrier *b = data;
    return b->phase != w->wait.token || b->expected == 0;
}

static void describe_mbarrier(const warp *w, wait_state *wait)
{
    (void)w;
    const mbarrier *b = wait->data;
    snprintf(wait->what, sizeof wait->what, "the mbarrier at shared address %u (phase %llu lacks %u of %u, %d bytes%s)",
             b->address, (unsigned long long)b->phase, b->pending, b->expected, (int)b->bytes,
             b->bytes < 0 ? ": more came than it expects" : "");
}

/* A try_wait sleeps until the phase ends, which is one way to behave that PTX allows, and makes a deadlock a state that
 * can be seen. A program that spins with test_wait sleeps likewise after some time. */
static void sleep_for(warp *w, mbarrier *b)
{
    w->wait = (wait_state){.poll = has_phase_gone, .data = b, .token = b->phase, .describe = describe_mbarrier};
}

static const char *execute_wait(warp *w, const instruction *i, uint32_t active)
{
    mbarrier *first = NULL;
    int some_ended = 0, is_uniform = 1;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        mbarrier *b;
        int has_phase_ended = 0;
        const char *error = test_one(w, i, lane, &b, &has_phase_ended);
        if (error != NULL)
            return error;
        first = first == NULL ? b : first;
        is_uniform &= b == first;
        some_ended |= has_phase_ended;
        if (w->cta->races != NULL) {
            races_access(w, lane, ACCESS_READ, value_of(w, &i->operands[1], lane), sizeof mbarrier_mark);
            if (has_phase_ended)
                races_mbarrier_passed(w, b, (i->decoded[D_WHAT] & ACQUIRES_OF_CLUSTER) != 0);
        }
        set_register(w, &i->operands[0], lane, (uint64_t)has_phase_ended);
    }
    if (some_ended || w->passed_wait)
        return NULL;
    const int may_sleep = i->decoded[D_WHAT] & MAY_SUSPEND || ++first->failed_tests > TESTS_BEFORE_WAITING;
    if (is_uniform && may_sleep)
        sleep_for(w, first);
    else
        yield(w, "its turn");
    return NULL;
}

static executor find_mbarrier(instruction *i)
{
    if (strstr(i->mnemonic, ".shared") == NULL)
        return NULL;
    if (has_modifier(i, "init"))
        return i->operand_count == 2 ? execute_init : NULL;
    if (has_modifier(i, "inval"))
        return i->operand_count == 1 ? execute_inval : NULL;
    if (has_modifier(i, "try_wait") || has_modifier(i, "test_wait")) {
        i->decoded[D_WHAT] = (has_modifier(i, "parity") ? BY_PARITY : 0) |
                             (has_modifier(i, "try_wait") ? MAY_SUSPEND : 0) |
                             (has_modifier(i, "cluster") && !has_modifier(i, "relaxed") ? ACQUIRES_OF_CLUSTER : 0);
        return i->operand_count == 3 || i->operand_count == 4 ? execute_wait : NULL; /* a limit of time may follow */
    }
    i->decoded[D_WHAT] = (has_modifier(i, "arrive") ? ARRIVES : 0) | (has_modifier(i, "expect_tx") ? EXPECTS : 0) |
                         (has_modifier(i, "complete_tx") ? COMPLETES : 0);
    i->decoded[D_SOURCE] = (i->decoded[D_WHAT] & ARRIVES) != 0;
    const int after = i->operand_count - (int)i->decoded[D_SOURCE];
    const int is_whole = i->decoded[D_WHAT] == ARRIVES ? after == 1 || after == 2 : after == 2;
    return i->decoded[D_WHAT] != 0 && !has_modifier(i, "noComplete") && is_whole ? execute_change : NULL;
}

/* ---- Fences, and what has no effect here ---- */

static const char *execute_proxy_fence(warp *w, const instruction *i, uint32_t active)
{
    (void)i, (void)active;
    shared_fenced(w);
    return NULL;
}

static const char *execute_mbarrier_init_fence(warp *w, const instruction *i, uint32_t active)
{
    (void)i, (void)active;
    if (w->cta->races != NULL)
        races_mbarrier_init_fenced(w);
    return NULL;
}

static const char *execute_yield(warp *w, const instruction *i, uint32_t active)
{
    (void)i, (void)active;
    if (!w->passed_wait)
        yield(w, "its turn");
    return NULL;
}

static const char *execute_setmaxnreg(warp *w, const instruction *i, uint32_t active)
{
    const uint64_t count = value_of(w, &i->operands[0], first_lane(active));
    if (count < 24 || count > 256 || count % 8 != 0)
        return fail("%llu registers: 24 to 256, in eights", (unsigned long long)count);
    return NULL;
}

/* The policy has no meaning here; it is a value all the same. */
static const char *execute_createpolicy(warp *w, const instruction *i, uint32_t active)
{
    for (int lane = 0; lane < LANES; lane++)
        if (active >> lane & 1)
            set_register(w, &i->operands[0], lane, 0);
    return NULL;
}

static executor find_without_effect(instruction *i)
{
    static const named_executor rows[] = {{"membar.", execute_nothing},
                                          {"griddepcontrol.", execute_nothing},
                                          {"prefetch.", execute_nothing},
                                          {"prefetchu.", execute_nothing},
                                          {"applypriority.", execute_nothing},
                                          {"fence.sc", execute_nothing},
                                          {"fence.acq_rel", execute_nothing},
                                          {"fence.acquire", execute_nothing},
                                          {"fence.release", execute_nothing},
                                          {"fence.proxy.tensormap", execute_nothing},
                                          {"fence.proxy.async", execute_proxy_fence},
                                          {"fence.mbarrier_init.release.cluster", execute_mbarrier_init_fence},
                                          {"nanosleep.", execute_yield},
                                          {"setmaxnreg.", execute_setmaxnreg},
                                          {"createpolicy.", execute_createpolicy}};
    return find_named(i, rows, sizeof rows / sizeof rows[0]);
}

/* ---- Lanes of a warp ---- */

/* Each lane that exists and is named must be here, and each that is here must be named. */
static const char *check_members(const warp *w, const operand *mask, uint32_t active)
{
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        const uint32_t members = (uint32_t)value_of(w, mask, lane);
        if ((members & w->alive) != active)
            return fail("lanes %#x execute with a member mask of %#x", active, members);
    }
    return NULL;
}

/* The number of the first of these names that is among the mnemonic's modifiers; `count` where none is. */
static uint64_t first_modifier(const instruction *i, const char *const *names, uint64_t count)
{
    uint64_t n = 0;
    while (n < count && !has_modifier(i, names[n]))
        n++;
    return n;
}

/* decoded[D_WHAT] of a vote */
enum {
    ANY,
    ALL,
    UNIFORM,
    BALLOT
};

static const char *execute_vote(warp *w, const instruction *i, uint32_t active)
{
    const char *error = check_members(w, &i->operands[2], active);
    if (error != NULL)
        return error;
    uint32_t ballot = 0;
    for (int lane = 0; lane < LANES; lane++)
        if ((active >> lane & 1) && predicate_of(w, &i->operands[1], lane))
            ballot |= 1u << lane;
    const uint64_t results[] = {
        [ANY] = ballot != 0, [ALL] = ballot == active, [UNIFORM] = ballot == active || ballot == 0, [BALLOT] = ballot};
    for (int lane = 0; lane < LANES; lane++)
        if (active >> lane & 1)
            set_register(w, &i->operands[0], lane, results[i->decoded[D_WHAT]]);
    return NULL;
}

static executor find_vote(instruction *i)
{
    i->decoded[D_WHAT] =
        first_modifier(i, (const char *const[]){[ANY] = "any", [ALL] = "all", [UNIFORM] = "uni"}, BALLOT);
    return has_modifier(i, "sync") && i->operand_count == 3 ? execute_vote : NULL;
}

/* decoded[D_WHAT] of a shuffle */
enum {
    UP,
    DOWN,
    BUTTERFLY,
    INDEX
};

/* The lane that `lane` reads; *is_inside says whether it lies within the segment. */
static int source_lane(uint64_t mode, int lane, uint32_t b, uint32_t c, int *is_inside)
{
    const int segment = (int)(c >> 8 & 31), clamp = (int)(c & 31), first = lane & segment;
    const int last = first | (clamp & ~segment), distance = (int)(b & 31);
    const int from = mode == UP          ? lane - distance
                     : mode == DOWN      ? lane + distance
                     : mode == BUTTERFLY ? lane ^ distance
                                         : (first | (distance & ~segment));
    *is_inside = mode == UP ? from >= last : from <= last;
    return *is_inside ? from : lane;
}

static const char *execute_shfl(warp *w, const instruction *i, uint32_t active)
{
    const operand *o = &i->operands[i->decoded[D_SOURCE]]; /* a, b, c, members */
    const char *error = check_members(w, &o[3], active);
    if (error != NULL)
        return error;
    uint64_t results[LANES];
    int is_inside[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        const int from = source_lane(i->decoded[D_WHAT], lane, (uint32_t)value_of(w, &o[1], lane),
                                     (uint32_t)value_of(w, &o[2], lane), &is_inside[lane]);
        if (!(active >> from & 1))
            return fail("lane %d reads lane %d, which is not here", lane, from);
        results[lane] = (uint32_t)value_of(w, &o[0], from);
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        set_register(w, &i->operands[0], lane, results[lane]);
        if (i->decoded[D_SOURCE] == 2)
            set_register(w, &i->operands[1], lane, (uint64_t)is_inside[lane]);
    }
    return NULL;
}

static executor find_shfl(instruction *i)
{
    i->decoded[D_WHAT] =
        first_modifier(i, (const char *const[]){[UP] = "up", [DOWN] = "down", [BUTTERFLY] = "bfly"}, INDEX);
    i->decoded[D_SOURCE] = (uint64_t)i->operand_count - 4;
    return has_modifier(i, "sync") && (i->operand_count == 5 || i->operand_count == 6) ? execute_shfl : NULL;
}

/* decoded[D_WHAT] of redux */
enum {
    SUM,
    LEAST,
    GREATEST,
    AND,
    OR,
    XOR
};

static uint32_t reduced(uint64_t what, int is_signed, uint32_t a, uint32_t b)
{
    const int b_is_less = is_signed ? (int32_t)b < (int32_t)a : b < a;
    switch (what) {
    case SUM:
        return a + b;
    case LEAST:
        return b_is_less ? b : a;
    case GREATEST:
        return b_is_less ? a : b;
    case AND:
        return a & b;
    case OR:
        return a | b;
    default:
        return a ^ b;
    }
}

static const char *execute_redux(warp *w, const instruction *i, uint32_t active)
{
    const char *error = check_members(w, &i->operands[2], active);
    if (error != NULL)
        return error;
    const int first = first_lane(active);
    uint32_t result = (uint32_t)value_of(w, &i->operands[1], first);
    for (int lane = first + 1; lane < LANES; lane++)
        if (active >> lane & 1)
            result =
                reduced(i->decoded[D_WHAT], i->type == T_S32, result, (uint32_t)value_of(w, &i->operands[1], lane));
    for (int lane = 0; lane < LANES; lane++)
        if (active >> lane & 1)
            set_register(w, &i->operands[0], lane, result);
    return NULL;
}

static executor find_redux(instruction *i)
{
    static const char *const names[] = {"add", "min", "max", "and", "or", "xor"};
    const int is_integer = i->type == T_U32 || i->type == T_S32 || i->type == T_B32;
    for (size_t n = 0; n < sizeof names / sizeof names[0] && is_integer && i->operand_count == 3; n++)
        if (has_modifier(i, names[n])) {
            i->decoded[D_WHAT] = n;
            return execute_redux;
        }
    return NULL;
}

/* d|p: the lowest member, and whether it is this lane. */
static const char *execute_elect(warp *w, const instruction *i, uint32_t active)
{
    const char *error = check_members(w, &i->operands[2], active);
    if (error != NULL)
        return error;
    const int leader = first_lane(active);
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        set_register(w, &i->operands[0], lane, (uint64_t)leader);
        set_register(w, &i->operands[1], lane, lane == leader);
    }
    return NULL;
}

static const char *execute_activemask(warp *w, const instruction *i, uint32_t active)
{
    for (int lane = 0; lane < LANES; lane++)
        if (active >> lane & 1)
            set_register(w, &i->operands[0], lane, active);
    return NULL;
}

/* ---- All of them ---- */

executor find_executor_sync(instruction *i)
{
    static const struct {
        const char *beginning;
        int operands; /* 0 = find says */
        executor execute;
        executor (*find)(instruction *i);
    } known[] = {
        {"barrier.cluster.arrive", 0, execute_cluster_arrive, NULL},
        {"barrier.cluster.wait", 0, execute_cluster_wait, NULL},
        {"mapa.shared::cluster.u32", 3, execute_mapa, NULL},
        {"bar.", 0, NULL, find_bar},
        {"barrier.", 0, NULL, find_bar},
        {"mbarrier.", 0, NULL, find_mbarrier},
        {"vote.", 0, NULL, find_vote},
        {"shfl.", 0, NULL, find_shfl},
        {"redux.sync.", 0, NULL, find_redux},
        {"elect.sync", 3, execute_elect, NULL},
        {"activemask.b32", 1, execute_activemask, NULL},
    };
    for (size_t n = 0; n < sizeof known / sizeof known[0]; n++) {
        if (!begins_with(i->mnemonic, known[n].beginning))
            continue;
        if (known[n].find != NULL)
            return known[n].find(i);
        return known[n].operands == 0 || known[n].operands == i->operand_count ? known[n].execute : NULL;
    }
    return find_without_effect(i);
}
