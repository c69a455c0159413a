/* Loads, stores, atomics, cp.async and st.async of the PTX machine, and the checks of every address. */
#include <string.h>
#include <stdlib.h>

#include "vm.h"

/* ---- Addresses ---- */

enum {
    BLOCK_BYTES = 1024
};

static const char *misaligned(const char *space, uint64_t address, size_t bytes, size_t alignment)
{
    return fail("%zu bytes at %s address %#llx: not a multiple of %zu", bytes, space, (unsigned long long)address,
                alignment);
}

/* The CTA whose shared memory holds this address; NULL and *error when the cluster has none such. */
static cta *cta_at(const warp *w, uint64_t address, const char **error)
{
    const uint32_t ranks = cluster_size(w->cta->launch->asked);
    if (address >> RANK_SHIFT > ranks) {
        *error = fail("shared address %#llx: the cluster has %u CTAs", (unsigned long long)address, ranks);
        return NULL;
    }
    cta *owner = shared_owner(w, address);
    if (address >> RANK_SHIFT == 0 || owner->warps_alive > 0)
        return owner;
    *error = fail("shared address %u of the CTA with rank %u, which has ended", shared_offset(address), owner->rank);
    return NULL;
}

/* Alignments are powers of two, which a division would not know. */
static int is_aligned(uint64_t address, size_t alignment)
{
    return (address & (alignment - 1)) == 0;
}

unsigned char *shared_at(warp *w, uint64_t address, size_t bytes, size_t alignment, const char **error)
{
    const cta *owner = cta_at(w, address, error);
    if (owner == NULL)
        return NULL;
    const uint64_t offset = shared_offset(address);
    if (offset + bytes > owner->shared_bytes) {
        *error = fail("%zu bytes at shared address %llu: the CTA has %u", bytes, (unsigned long long)offset,
                      owner->shared_bytes);
        return NULL;
    }
    if (!is_aligned(offset, alignment)) {
        *error = misaligned("shared", offset, bytes, alignment);
        return NULL;
    }
    return owner->shared + offset;
}

static int is_parameter(const launch *l, uint64_t address, size_t bytes)
{
    const uint64_t first = (uint64_t)(uintptr_t)l->parameters;
    return address >= first && address + bytes <= first + l->entry->parameter_bytes;
}

static int is_variable(const launch *l, uint64_t address, size_t bytes)
{
    const ptxvm_module *m = l->asked->module;
    for (int i = 0; i < m->variable_count; i++)
        if (address >= m->variables[i].address && address + bytes <= m->variables[i].address + m->variables[i].bytes)
            return 1;
    return 0;
}

/* Whether an allocation holds the bytes. Whole blocks that do are remembered, one for each place of a small table:
 * nearly all accesses find theirs there. */
static int is_allocated(launch *l, uint64_t address, size_t bytes)
{
    const uint64_t block = address / BLOCK_BYTES;
    uint64_t *known = &l->allocated_blocks[block % (sizeof l->allocated_blocks / sizeof l->allocated_blocks[0])];
    const int is_inside = (address + bytes - 1) / BLOCK_BYTES == block;
    if (is_inside && *known == block && block != 0)
        return 1;
    const ptxvm_launch *asked = l->asked;
    if (is_inside && asked->is_allocated(asked->user, block * BLOCK_BYTES, BLOCK_BYTES)) {
        *known = block;
        return 1;
    }
    return asked->is_allocated(asked->user, address, bytes);
}

unsigned char *global_at(warp *w, uint64_t address, size_t bytes, size_t alignment, const char **error)
{
    launch *l = w->cta->launch;
    if (!is_aligned(address, alignment)) {
        *error = misaligned("global", address, bytes, alignment);
        return NULL;
    }
    if (!is_allocated(l, address, bytes) && !is_parameter(l, address, bytes) && !is_variable(l, address, bytes)) {
        *error = fail("%zu bytes at global address %#llx: in no allocation", bytes, (unsigned long long)address);
        return NULL;
    }
    return (unsigned char *)(uintptr_t)address;
}

/* ---- Ordinary stores that wgmma and the copy engine do not see yet ---- */

static void first_and_end_unit(uint64_t address, size_t bytes, size_t *first, size_t *end)
{
    const uint64_t offset = shared_offset(address);
    *first = offset / PROXY_UNIT_BYTES;
    *end = (offset + bytes + PROXY_UNIT_BYTES - 1) / PROXY_UNIT_BYTES;
}

/* A store that changes nothing vouches for what is there as well: two warpgroups may clear the same rows each for
 * itself, and each needs its own fence only. */
static void note_store(warp *w, uint64_t address, size_t bytes, int changes)
{
    const char *error;
    cta *owner = cta_at(w, address, &error);
    if (owner == NULL)
        return; /* the store itself has failed */
    size_t first, end;
    first_and_end_unit(address, bytes, &first, &end);
    for (size_t i = first; i < end; i++)
        if (changes)
            owner->unfenced[i] = 1u << w->index;
        else if (owner->unfenced[i] != 0)
            owner->unfenced[i] |= 1u << w->index;
}

void shared_written(warp *w, uint64_t address, size_t bytes)
{
    note_store(w, address, bytes, 1);
}

/* No warp of the CTA stored this; the fence of any of them that has waited for it shows it. */
static void note_sent(cta *owner, uint64_t address, size_t bytes)
{
    size_t first, end;
    first_and_end_unit(address, bytes, &first, &end);
    memset(&owner->unfenced[first], 0xFF, (end - first) * sizeof owner->unfenced[0]);
}

void shared_fenced(warp *w)
{
    const size_t units = (w->cta->shared_bytes + PROXY_UNIT_BYTES - 1) / PROXY_UNIT_BYTES;
    uint32_t *unfenced = w->cta->unfenced;
    for (size_t i = 0; i < units; i++)
        if (unfenced[i] >> w->index & 1)
            unfenced[i] = 0;
}

const char *shared_for_async(warp *w, uint64_t address, size_t bytes)
{
    const char *error = NULL;
    const cta *owner = cta_at(w, address, &error);
    if (owner == NULL)
        return error;
    size_t first, end;
    first_and_end_unit(address, bytes, &first, &end);
    for (size_t i = first; i < end; i++)
        if (owner->unfenced[i] == UINT32_MAX)
            return fail("shared address %zu was stored to by an st.async without a fence.proxy.async behind it",
                        i * PROXY_UNIT_BYTES);
        else if (owner->unfenced[i] != 0)
            return fail("shared address %zu was stored to by warp %d without a fence.proxy.async behind it",
                        i * PROXY_UNIT_BYTES, __builtin_ctz(owner->unfenced[i]));
    return NULL;
}

/* ---- What the mnemonics say ---- */

typedef enum space {
    PARAMETER,
    SHARED,
    GLOBAL
} space;

/* decoded[] of the instructions of this file */
enum {
    D_SPACE,
    D_BYTES, /* of one element */
    D_OPERATION,
    D_IS_SIGNED = D_OPERATION /* of ld */
};

/* Constant and local memory, which no kernel of the project uses, are not known. */
static int decode_space(instruction *i)
{
    if (has_modifier(i, "local") || has_modifier(i, "const"))
        return 0;
    i->decoded[D_SPACE] = strstr(i->mnemonic, ".shared") != NULL  ? SHARED
                          : strstr(i->mnemonic, ".param") != NULL ? PARAMETER
                                                                  : GLOBAL;
    return 1;
}

/* 0 = not a type of memory. */
static unsigned bytes_of(scalar_type type)
{
    switch (type) {
    case T_B8:
    case T_U8:
    case T_S8:
        return 1;
    case T_B16:
    case T_U16:
    case T_S16:
    case T_F16:
    case T_BF16:
        return 2;
    case T_B32:
    case T_U32:
    case T_S32:
    case T_F32:
    case T_F16X2:
    case T_BF16X2:
        return 4;
    case T_B64:
    case T_U64:
    case T_S64:
    case T_F64:
        return 8;
    case T_NONE:
    case T_PRED:
        break;
    }
    return 0;
}

/* ---- ld, st ---- */

/* Where the bytes of a lane's access lie. */
static unsigned char *access(warp *w, const instruction *i, const operand *address, int lane, size_t bytes,
                             const char **error)
{
    const uint64_t at = value_of(w, address, lane);
    if (i->decoded[D_SPACE] == SHARED)
        return shared_at(w, at, bytes, bytes, error);
    if (i->decoded[D_SPACE] == GLOBAL)
        return global_at(w, at, bytes, bytes, error);
    const launch *l = w->cta->launch;
    if (at + bytes > l->entry->parameter_bytes || !is_aligned(at, bytes)) {
        *error = fail("%zu bytes at offset %llu of the parameters: there are %u", bytes, (unsigned long long)at,
                      l->entry->parameter_bytes);
        return NULL;
    }
    return l->parameters + at;
}

static uint64_t read_element(const unsigned char *from, size_t bytes)
{
    uint16_t two;
    uint32_t four;
    uint64_t eight;
    switch (bytes) { /* a size that the compiler does not know would be a call */
    case 1:
        return *from;
    case 2:
        memcpy(&two, from, sizeof two);
        return two;
    case 4:
        memcpy(&four, from, sizeof four);
        return four;
    default:
        memcpy(&eight, from, sizeof eight);
        return eight;
    }
}

/* Registers may be wider than what is loaded; bits above a register's width stay 0. */
static uint64_t sign_extended(uint64_t value, size_t bytes, int register_bits)
{
    const unsigned shift = 64 - 8 * (unsigned)bytes;
    const uint64_t extended = (uint64_t)((int64_t)(value << shift) >> shift);
    return register_bits < 64 ? extended & (((uint64_t)1 << register_bits) - 1) : extended;
}

/* The register of an element: the operand itself, or its item. */
static const operand *element_of(const operand *o, int index)
{
    return o->kind == O_VECTOR ? &o->items[index] : o;
}

static const char *execute_ld(warp *w, const instruction *i, uint32_t active)
{
    const char *error = NULL;
    const size_t bytes = i->decoded[D_BYTES];
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        const unsigned char *from = access(w, i, &i->operands[1], lane, bytes * (size_t)i->vector, &error);
        if (from == NULL)
            return error;
        if (i->decoded[D_SPACE] == SHARED && w->cta->races != NULL)
            races_access(w, lane, ACCESS_READ, value_of(w, &i->operands[1], lane), bytes * (size_t)i->vector);
        for (int e = 0; e < i->vector; e++) {
            const operand *to = element_of(&i->operands[0], e);
            uint64_t value = read_element(from + (size_t)e * bytes, bytes);
            if (i->decoded[D_IS_SIGNED])
                value = sign_extended(value, bytes, to->bits);
            set_register(w, to, lane, value);
        }
    }
    return NULL;
}

static const char *execute_st(warp *w, const instruction *i, uint32_t active)
{
    const char *error = NULL;
    const size_t bytes = i->decoded[D_BYTES], all = bytes * (size_t)i->vector;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        unsigned char *to = access(w, i, &i->operands[0], lane, all, &error);
        if (to == NULL)
            return error;
        unsigned char stored[4 * sizeof(uint64_t)];
        for (int e = 0; e < i->vector; e++) {
            const uint64_t value = value_of(w, element_of(&i->operands[1], e), lane);
            memcpy(stored + (size_t)e * bytes, &value, sizeof value);
        }
        const int changes = memcmp(to, stored, all) != 0;
        if (i->decoded[D_SPACE] == SHARED && w->cta->races != NULL)
            races_store(w, lane, value_of(w, &i->operands[0], lane), all, to, stored);
        memcpy(to, stored, all);
        if (i->decoded[D_SPACE] == GLOBAL)
            w->cta->launch->counts.bytes_global_written += all;
        else
            note_store(w, value_of(w, &i->operands[0], lane), all, changes);
    }
    return NULL;
}

static executor find_ld_or_st(instruction *i)
{
    const int is_load = i->mnemonic[0] == 'l';
    const operand *data = &i->operands[is_load ? 0 : 1];
    const int has_policy = strstr(i->mnemonic, "L2::cache_hint") != NULL;
    i->decoded[D_BYTES] = bytes_of(i->type);
    if (!decode_space(i) || i->decoded[D_BYTES] == 0 || has_modifier(i, "async") ||
        i->operand_count != 2 + has_policy || i->vector > 4 || (i->vector > 1) != (data->kind == O_VECTOR) ||
        (data->kind == O_VECTOR && data->count != i->vector))
        return NULL;
    if (!is_load)
        return i->decoded[D_SPACE] == PARAMETER ? NULL : execute_st;
    i->decoded[D_IS_SIGNED] = i->type == T_S8 || i->type == T_S16 || i->type == T_S32;
    return execute_ld;
}

/* ---- st.async ---- */

enum {
    MAX_SENT_BYTES = 16
};

/* A lane's store on its way into the shared memory of a CTA of the cluster. */
typedef struct sent_store {
    uint64_t address, barrier, phase; /* of the mbarrier when it was sent */
    uint32_t bytes;
    unsigned char value[MAX_SENT_BYTES];
} sent_store;

static const char *store_sent(warp *issuer, void *data)
{
    const sent_store *sent = data;
    const char *error = NULL;
    unsigned char *to = shared_at(issuer, sent->address, sent->bytes, sent->bytes, &error);
    const mbarrier *b = to != NULL ? mbarrier_at(issuer, sent->barrier, &error) : NULL;
    if (b == NULL)
        return error;
    if (b->phase != sent->phase)
        return fail("phase %llu of the mbarrier at shared address %u has ended without these %u bytes, which were sent "
                    "in it: it expected fewer",
                    (unsigned long long)sent->phase, b->address, sent->bytes);
    memcpy(to, sent->value, sent->bytes);
    note_sent(b->owner, sent->address, sent->bytes);
    return mbarrier_complete_bytes(issuer, sent->barrier, sent->bytes);
}

static const char *send_one(warp *w, const instruction *i, int lane)
{
    const char *error = NULL;
    const size_t bytes = i->decoded[D_BYTES];
    sent_store sent = {.address = value_of(w, &i->operands[0], lane),
                       .barrier = value_of(w, &i->operands[2], lane),
                       .bytes = (uint32_t)bytes * (uint32_t)i->vector};
    unsigned char *to = shared_at(w, sent.address, sent.bytes, sent.bytes, &error);
    const mbarrier *b = to != NULL ? mbarrier_at(w, sent.barrier, &error) : NULL;
    if (b == NULL)
        return error;
    if (b->owner != shared_owner(w, sent.address))
        return fail("the data go to the CTA with rank %u, their mbarrier is in that with rank %u",
                    shared_owner(w, sent.address)->rank, b->owner->rank);
    sent.phase = b->phase;
    for (int e = 0; e < i->vector; e++) {
        const uint64_t value = value_of(w, element_of(&i->operands[1], e), lane);
        memcpy(sent.value + (size_t)e * bytes, &value, bytes);
    }
    memset(to, POISON, sent.bytes); /* from now on it may be stored: who still reads what was there reads NaN */
    if (w->cta->races != NULL) {
        races_access(w, lane, ACCESS_READ, sent.barrier, sizeof(uint64_t));
        races_send(w, lane, sent.address, sent.bytes, b);
    }
    sent_store *kept = malloc(sizeof *kept);
    if (kept == NULL)
        return fail("no memory");
    *kept = sent;
    return async_add(w, ASYNC_BULK, store_sent, kept);
}

/* Each lane's store comes and completes its bytes for itself. */
static const char *execute_st_async(warp *w, const instruction *i, uint32_t active)
{
    return each_lane(w, i, active, send_one);
}

static executor find_st_async(instruction *i)
{
    const operand *data = &i->operands[1];
    const size_t bytes = bytes_of(i->type);
    const int is_packed = i->type == T_F16X2 || i->type == T_BF16X2;
    i->decoded[D_BYTES] = bytes;
    if ((!begins_with(i->mnemonic, "st.async.shared::cluster.mbarrier::complete_tx::bytes.") &&
         !begins_with(i->mnemonic, "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.")) ||
        bytes < 4 || is_packed || bytes * (size_t)i->vector > MAX_SENT_BYTES || i->operand_count != 3 ||
        (i->vector > 1) != (data->kind == O_VECTOR) || (data->kind == O_VECTOR && data->count != i->vector))
        return NULL;
    return execute_st_async;
}

/* ---- atom, red ---- */

typedef enum operation {
    ADD,
    INC,
    DEC,
    EXCHANGE,
    COMPARE_AND_SWAP,
    MINIMUM,
    MAXIMUM,
    AND,
    OR,
    XOR,
    OPERATIONS
} operation;

static const char *const operation_names[OPERATIONS] = {"add", "inc", "dec", "exch", "cas",
                                                        "min", "max", "and", "or",   "xor"};

static int is_less(scalar_type type, uint64_t a, uint64_t b)
{
    if (type == T_S32)
        return (int32_t)a < (int32_t)b;
    if (type == T_S64)
        return (int64_t)a < (int64_t)b;
    return a < b;
}

static uint64_t sum(scalar_type type, uint64_t a, uint64_t b)
{
    if (type == T_F32)
        return bits_of_float(float_of_bits((uint32_t)a) + float_of_bits((uint32_t)b));
    return a + b;
}

/* What the memory holds afterwards. c: the new value of cas. */
static uint64_t combined(operation what, scalar_type type, uint64_t old, uint64_t b, uint64_t c)
{
    switch (what) {
    case ADD:
        return sum(type, old, b);
    case INC:
        return old >= b ? 0 : old + 1;
    case DEC:
        return old == 0 || old > b ? b : old - 1;
    case EXCHANGE:
        return b;
    case COMPARE_AND_SWAP:
        return old == b ? c : old;
    case MINIMUM:
        return is_less(type, b, old) ? b : old;
    case MAXIMUM:
        return is_less(type, old, b) ? b : old;
    case AND:
        return old & b;
    case OR:
        return old | b;
    case XOR:
        return old ^ b;
    case OPERATIONS:
        break;
    }
    return old;
}

/* One lane's update; a red has no place for the old value. A vector's elements are updated each for itself. */
static const char *update(warp *w, const instruction *i, int is_red, int lane)
{
    const char *error = NULL;
    const operand *address = &i->operands[is_red ? 0 : 1], *b = address + 1;
    const size_t bytes = i->decoded[D_BYTES];
    unsigned char *at = access(w, i, address, lane, bytes * (size_t)i->vector, &error);
    if (at == NULL)
        return error;
    const operation what = (operation)i->decoded[D_OPERATION];
    const uint64_t c = what == COMPARE_AND_SWAP ? value_of(w, b + 1, lane) : 0;
    uint64_t old = 0;
    for (int e = 0; e < i->vector; e++) {
        old = read_element(at + (size_t)e * bytes, bytes);
        const uint64_t now = combined(what, i->type, old, value_of(w, element_of(b, e), lane), c);
        memcpy(at + (size_t)e * bytes, &now, bytes);
    }
    if (i->decoded[D_SPACE] == SHARED) {
        shared_written(w, value_of(w, address, lane), bytes);
        if (w->cta->races != NULL)
            races_access(w, lane, ACCESS_ATOMIC, value_of(w, address, lane), bytes);
    }
    if (!is_red) /* last: it may be the address's register */
        set_register(w, &i->operands[0], lane, old);
    return NULL;
}

/* The lanes' updates follow each other from a random lane on: nothing says which is first. */
static const char *update_all(warp *w, const instruction *i, int is_red, uint32_t active)
{
    const int first = (int)(next_random(w->cta->launch) % LANES);
    const char *error = NULL;
    for (int n = 0; n < LANES && error == NULL; n++) {
        const int lane = (first + n) % LANES;
        if (active >> lane & 1)
            error = update(w, i, is_red, lane);
    }
    return error;
}

static const char *execute_atom(warp *w, const instruction *i, uint32_t active)
{
    return update_all(w, i, 0, active);
}

static const char *execute_red(warp *w, const instruction *i, uint32_t active)
{
    return update_all(w, i, 1, active);
}

static executor find_atom_or_red(instruction *i)
{
    const int is_red = i->mnemonic[0] == 'r';
    int what = 0;
    while (what < OPERATIONS && !has_modifier(i, operation_names[what]))
        what++;
    i->decoded[D_OPERATION] = (uint64_t)what;
    i->decoded[D_BYTES] = bytes_of(i->type);
    const int sources = what == COMPARE_AND_SWAP ? 3 : 2; /* the address and what is combined with it */
    const int is_float = i->type == T_F32;
    if (what == OPERATIONS || !decode_space(i) || has_modifier(i, "async") || i->decoded[D_BYTES] < 4 ||
        i->type == T_F64 || i->type == T_F16X2 || i->type == T_BF16X2 || i->operand_count != sources + !is_red ||
        (is_float && what != ADD && what != EXCHANGE))
        return NULL;
    /* Of vectors, which global memory alone has, the additions of floats whose old values nobody asks for. */
    const operand *with = &i->operands[is_red ? 1 : 2];
    if (i->vector == 1 ? with->kind == O_VECTOR
                       : !is_red || !is_float || what != ADD || i->decoded[D_SPACE] != GLOBAL || i->vector > 4 ||
                             with->kind != O_VECTOR || with->count != i->vector)
        return NULL;
    return is_red ? execute_red : execute_atom;
}

/* ---- cp.async ---- */

typedef struct chunk {
    unsigned char *to;
    const unsigned char *from; /* NULL: nothing is read */
    uint32_t bytes, bytes_read;
    uint64_t shared_address;
} chunk;

typedef struct chunks {
    int count;
    chunk items[LANES];
} chunks;

static const char *copy_chunks(warp *issuer, void *data)
{
    const chunks *all = data;
    for (int n = 0; n < all->count; n++) {
        const chunk *c = &all->items[n];
        memset(c->to, 0, c->bytes);
        if (c->from != NULL)
            memcpy(c->to, c->from, c->bytes_read);
        shared_written(issuer, c->shared_address, c->bytes);
    }
    return NULL;
}

/* Reads a lane's operands: to, from, bytes and, unless a hint alone follows, how many of them to read. */
static const char *find_chunk(warp *w, const instruction *i, int lane, chunk *c)
{
    const char *error = NULL;
    c->bytes = (uint32_t)i->operands[2].imm;
    const uint64_t wanted = i->decoded[D_OPERATION] ? (uint32_t)value_of(w, &i->operands[3], lane) : c->bytes;
    if (wanted > c->bytes)
        return fail("a copy of %u bytes shall read %llu", c->bytes, (unsigned long long)wanted);
    c->bytes_read = (uint32_t)wanted;
    c->shared_address = value_of(w, &i->operands[0], lane);
    c->to = shared_at(w, c->shared_address, c->bytes, c->bytes, &error);
    c->from = NULL;
    if (c->to == NULL || wanted == 0)
        return error;
    const uint64_t from = value_of(w, &i->operands[1], lane);
    if (from % c->bytes != 0)
        return misaligned("global", from, c->bytes, c->bytes);
    c->from = global_at(w, from, wanted, 1, &error);
    return error;
}

/* Takes what each active lane asks for into *all, which has room for all lanes; frees it when a lane asks for what
 * cannot be. */
static const char *for_lanes(warp *w, const instruction *i, uint32_t active, void *all,
                             const char *(*take)(warp *w, const instruction *i, int lane, void *all))
{
    if (all == NULL)
        return fail("no memory");
    for (int lane = 0; lane < LANES; lane++) {
        const char *error = active >> lane & 1 ? take(w, i, lane, all) : NULL;
        if (error != NULL) {
            free(all);
            return error;
        }
    }
    return NULL;
}

static const char *take_chunk(warp *w, const instruction *i, int lane, void *data)
{
    chunks *all = data;
    chunk *c = &all->items[all->count];
    const char *error = find_chunk(w, i, lane, c);
    if (error != NULL)
        return error;
    /* From now on the copy may write at any time: who still reads what was there reads NaN. */
    memset(c->to, POISON, c->bytes);
    if (w->cta->races != NULL)
        races_access(w, lane, ACCESS_CP_WRITE, c->shared_address, c->bytes);
    all->count++;
    return NULL;
}

static const char *execute_cp_async(warp *w, const instruction *i, uint32_t active)
{
    chunks *all = calloc(1, sizeof *all);
    const char *error = for_lanes(w, i, active, all, take_chunk);
    return error != NULL ? error : async_add(w, ASYNC_CP, copy_chunks, all);
}

static const char *execute_cp_wait_all(warp *w, const instruction *i, uint32_t active)
{
    (void)i, (void)active;
    async_commit(w, ASYNC_CP);
    return async_wait(w, ASYNC_CP, 0);
}

static const char *arrive_all(warp *issuer, void *data)
{
    const chunks *all = data; /* of which only the address is said: that of the barrier */
    const char *error = NULL;
    for (int n = 0; n < all->count && error == NULL; n++)
        error = mbarrier_arrive(issuer, all->items[n].shared_address, 1);
    return error;
}

static const char *take_arrival(warp *w, const instruction *i, int lane, void *data)
{
    chunks *all = data;
    const uint64_t address = value_of(w, &i->operands[0], lane);
    const char *error = NULL;
    const mbarrier *b = mbarrier_at(w, address, &error);
    if (b == NULL)
        return error;
    if (w->cta->races != NULL)
        races_arrive_after_cp(w, lane, b);
    all->items[all->count++].shared_address = address;
    return NULL;
}

static const char *execute_cp_arrive(warp *w, const instruction *i, uint32_t active)
{
    chunks *all = calloc(1, sizeof *all);
    const char *error = for_lanes(w, i, active, all, take_arrival);
    return error != NULL ? error : async_after_cp(w, arrive_all, all);
}

static executor find_cp_async(instruction *i)
{
    const executor group = find_async_group(i, "cp.async.", ASYNC_CP);
    if (group != NULL)
        return group;
    static const named_executor others[] = {{"cp.async.wait_all", execute_cp_wait_all},
                                            {"cp.async.mbarrier.arrive.noinc", execute_cp_arrive}};
    const executor other = find_named(i, others, sizeof others / sizeof others[0]);
    if (other != NULL)
        return other;
    if (!begins_with(i->mnemonic, "cp.async.cg.") && !begins_with(i->mnemonic, "cp.async.ca."))
        return NULL;
    const int hints = strstr(i->mnemonic, "L2::cache_hint") != NULL;
    const int sizes = i->operand_count - hints - 2;
    if (sizes < 1 || sizes > 2 || i->operands[2].kind != O_IMMEDIATE)
        return NULL;
    const int64_t bytes = i->operands[2].imm;
    if (bytes != 16 && (begins_with(i->mnemonic, "cp.async.cg.") || (bytes != 8 && bytes != 4)))
        return NULL;
    i->decoded[D_OPERATION] = sizes == 2; /* the bytes to read are an operand */
    return execute_cp_async;
}

executor find_executor_memory(instruction *i)
{
    if (begins_with(i->mnemonic, "st.async."))
        return find_st_async(i);
    if (begins_with(i->mnemonic, "ld.") || begins_with(i->mnemonic, "st."))
        return find_ld_or_st(i);
    if (begins_with(i->mnemonic, "atom.") || begins_with(i->mnemonic, "red."))
        return find_atom_or_red(i);
    if (begins_with(i->mnemonic, "cp.async.") && !begins_with(i->mnemonic, "cp.async.bulk."))
        return find_cp_async(i);
    return NULL;
}
