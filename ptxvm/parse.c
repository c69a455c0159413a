/* The PTX machine's reader: text of a module to instructions whose executors are known. One pass over the text, being
 * what nvcc writes: directives, entries, and in them statements, some within the braces of an inline assembly that
 * declare registers of their own. What it does not know it refuses with the line. */
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vm.h"

enum {
    MAX_REGISTERS = 1 << 16, /* of an entry */
    MAX_INSTRUCTIONS = 1 << 20,
    MAX_ITEMS = 512, /* of a vector operand */
    MAX_DEPTH = 64,  /* of braces */
    TEXT_BYTES = 100 /* of a statement, kept for messages */
};

/* A piece of the module's text. */
typedef struct slice {
    const char *start;
    size_t length;
} slice;

/* `.reg .f32 %f<7>` declares %f0 … %f6 (is_range), `.reg .pred p` one. */
typedef struct register_name {
    slice name;
    int is_range;
    int first, count, bits;
} register_name;

/* A variable or a parameter, and where it begins: a global one at its host address. */
typedef struct symbol {
    slice name;
    int is_parameter;
    int64_t address;
} symbol;

typedef struct label {
    slice name;
    int target; /* index of an instruction */
} label;

typedef struct label_use {
    slice name;
    int instruction, line;
} label_use;

/* A list that grows. */
typedef struct list {
    void *items;
    size_t count, capacity;
} list;

/* Memory that lives as long as the module. */
typedef struct arena_block {
    struct arena_block *next;
    uint64_t bytes[];
} arena_block;

typedef struct parser {
    ptxvm_module *module;
    const char *at;
    int line;
    char *error;
    size_t error_bytes;
    list instructions, entries;
    list registers; /* register_name: of the scopes that are open, innermost last */
    list symbols;   /* those of the module first, then those of the entry */
    list labels, label_uses;
    size_t scope_registers[MAX_DEPTH]; /* where each scope's registers begin in the list */
    int scope_numbers[MAX_DEPTH];      /* and their numbers */
    int depth;
    int next_register;
    uint32_t shared_bytes; /* of the shared variables so far */
    slice dynamic;         /* the .extern .shared array, which begins behind the others */
    uint32_t dynamic_align;
    entry *entry; /* that is being read */
} parser;

/* ---- Errors and memory ---- */

/* Writes the error and returns -1. */
static __attribute__((format(printf, 2, 3))) int error_at(parser *p, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int count = snprintf(p->error, p->error_bytes, "line %d: ", p->line);
    if (count >= 0 && (size_t)count < p->error_bytes)
        vsnprintf(p->error + count, p->error_bytes - (size_t)count, format, arguments);
    va_end(arguments);
    return -1;
}

static int no_memory(parser *p)
{
    return error_at(p, "no memory");
}

/* A new item at the end of the list, all zero; NULL without memory. */
static void *list_add(list *l, size_t item_bytes)
{
    if (l->count == l->capacity) {
        const size_t capacity = l->capacity ? 2 * l->capacity : 16;
        void *items = realloc(l->items, capacity * item_bytes);
        if (!items)
            return NULL;
        l->items = items;
        l->capacity = capacity;
    }
    void *item = (char *)l->items + l->count++ * item_bytes;
    memset(item, 0, item_bytes);
    return item;
}

static void *arena_take(parser *p, size_t bytes)
{
    arena_block *block = malloc(sizeof *block + bytes);
    if (!block)
        return NULL;
    block->next = p->module->arena;
    p->module->arena = block;
    return block->bytes;
}

/* Rounds up to a multiple of a power of two. */
static int64_t align_up(int64_t value, int64_t alignment)
{
    return (value + alignment - 1) & -alignment;
}

/* ---- Words ---- */

static int slice_is(slice s, const char *text)
{
    return strlen(text) == s.length && memcmp(s.start, text, s.length) == 0;
}

static int same_slice(slice a, slice b)
{
    return a.length == b.length && memcmp(a.start, b.start, a.length) == 0;
}

/* For "%.*s". */
static int width_of(slice s)
{
    return s.length < 200 ? (int)s.length : 200;
}

/* Goes over blanks and comments. */
static void skip_blanks(parser *p)
{
    for (;;) {
        if (*p->at == '\n') {
            p->line++;
            p->at++;
        } else if (isspace((unsigned char)*p->at)) {
            p->at++;
        } else if (p->at[0] == '/' && p->at[1] == '/') {
            p->at += strcspn(p->at, "\n");
        } else if (p->at[0] == '/' && p->at[1] == '*') {
            const char *end = strstr(p->at + 2, "*/");
            end = end ? end + 2 : p->at + strlen(p->at);
            for (; p->at < end; p->at++)
                p->line += *p->at == '\n';
        } else {
            return;
        }
    }
}

/* Takes the character if it comes next. */
static int accept(parser *p, char wanted)
{
    skip_blanks(p);
    if (*p->at != wanted)
        return 0;
    p->at++;
    return 1;
}

static int expect(parser *p, char wanted)
{
    if (accept(p, wanted))
        return 0;
    return *p->at ? error_at(p, "'%c' expected, not '%c'", wanted, *p->at)
                  : error_at(p, "'%c' expected, not the end of the text", wanted);
}

static int is_name_character(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%';
}

/* A name: %r12, $L__BB0_2, memory, _. Empty where none comes next. */
static slice take_name(parser *p)
{
    skip_blanks(p);
    slice s = {p->at, 0};
    if (!isdigit((unsigned char)*p->at))
        while (is_name_character(s.start[s.length]))
            s.length++;
    p->at += s.length;
    return s;
}

/* A word with dots: a mnemonic, a directive. */
static slice take_dotted(parser *p)
{
    skip_blanks(p);
    slice s = {p->at, 0};
    while (is_name_character(s.start[s.length]) || s.start[s.length] == '.' ||
           (s.start[s.length] == ':' && s.start[s.length + 1] == ':' && is_name_character(s.start[s.length + 2])) ||
           (s.start[s.length] == ':' && s.length && s.start[s.length - 1] == ':'))
        s.length++;
    p->at += s.length;
    return s;
}

static int hex_digits(const char *text)
{
    int count = 0;
    while (isxdigit((unsigned char)text[count]))
        count++;
    return count;
}

/* 12, 0x1F, 017, 12U, -3, 0f3F800000, 0d…, 1.0: as an immediate holds them. */
static int take_number(parser *p, int64_t *value)
{
    skip_blanks(p);
    const int negative = *p->at == '-';
    p->at += negative;
    if (!isdigit((unsigned char)*p->at))
        return error_at(p, "a number expected");
    const int kind = p->at[0] == '0' ? tolower((unsigned char)p->at[1]) : 0;
    char *end;
    errno = 0;
    if (kind == 'f' || kind == 'd') {
        const int digits = kind == 'f' ? 8 : 16;
        if (hex_digits(p->at + 2) != digits || negative)
            return error_at(p, "%d hexadecimal digits expected behind 0%c", digits, p->at[1]);
        *value = (int64_t)strtoull(p->at + 2, &end, 16);
    } else if (p->at[strspn(p->at, "0123456789")] == '.') {
        const float number = strtof(p->at, &end);
        *value = (int64_t)bits_of_float(negative ? -number : number);
    } else {
        const uint64_t magnitude = strtoull(p->at, &end, 0);
        *value = (int64_t)(negative ? 0 - magnitude : magnitude);
        end += *end == 'U';
    }
    if (errno || is_name_character(*end))
        return error_at(p, "not a number: %.*s", (int)strcspn(p->at, " \t\n,;]}") % 40, p->at);
    p->at = end;
    return 0;
}

/* A number within [first, end). */
static int take_count(parser *p, int64_t first, int64_t end, int64_t *value)
{
    if (take_number(p, value))
        return -1;
    if (*value < first || *value >= end)
        return error_at(p, "%lld is not within [%lld, %lld)", (long long)*value, (long long)first, (long long)end);
    return 0;
}

/* ---- Types ---- */

static const struct {
    const char *name;
    scalar_type type;
    int bits;
} types[] = {{"pred", T_PRED, 1},  {"b8", T_B8, 8},        {"u8", T_U8, 8},          {"s8", T_S8, 8},
             {"b16", T_B16, 16},   {"u16", T_U16, 16},     {"s16", T_S16, 16},       {"f16", T_F16, 16},
             {"bf16", T_BF16, 16}, {"b32", T_B32, 32},     {"u32", T_U32, 32},       {"s32", T_S32, 32},
             {"f32", T_F32, 32},   {"f16x2", T_F16X2, 32}, {"bf16x2", T_BF16X2, 32}, {"b64", T_B64, 64},
             {"u64", T_U64, 64},   {"s64", T_S64, 64},     {"f64", T_F64, 64}};

/* The type's row, or -1. */
static int type_row(slice name)
{
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (slice_is(name, types[i].name))
            return (int)i;
    return -1;
}

/* The type of a declaration, behind its dot: the row. */
static int take_type(parser *p)
{
    if (expect(p, '.'))
        return -1;
    const slice name = take_name(p);
    const int row = type_row(name);
    return row >= 0 ? row : error_at(p, "unknown type .%.*s", width_of(name), name.start);
}

/* The next modifier of a mnemonic from *at on; *at goes behind it. Empty at the end. */
static slice next_modifier(const char **at)
{
    const char *start = *at + (**at == '.');
    const slice s = {start, strcspn(start, ".")};
    *at = start + s.length;
    return s;
}

int has_modifier(const instruction *i, const char *modifier)
{
    const char *at = i->mnemonic;
    next_modifier(&at); /* the operation itself */
    while (*at)
        if (slice_is(next_modifier(&at), modifier))
            return 1;
    return 0;
}

static void read_types(instruction *i)
{
    i->vector = has_modifier(i, "v2") ? 2 : has_modifier(i, "v4") ? 4 : 1;
    const char *at = i->mnemonic;
    next_modifier(&at);
    while (*at) {
        const int row = type_row(next_modifier(&at));
        if (row >= 0) {
            i->to = i->type;
            i->type = types[row].type;
        }
    }
}

/* ---- Registers and symbols ---- */

/* The number at the end of %r12; -1 where there is none, or where it is written otherwise than PTX numbers a range. */
static int range_index(slice name, slice prefix)
{
    const size_t digits = name.length - prefix.length;
    if (name.length <= prefix.length || digits > 6 || memcmp(name.start, prefix.start, prefix.length) != 0 ||
        (name.start[prefix.length] == '0' && digits > 1))
        return -1;
    int index = 0;
    for (size_t i = prefix.length; i < name.length; i++) {
        if (!isdigit((unsigned char)name.start[i]))
            return -1;
        index = 10 * index + (name.start[i] - '0');
    }
    return index;
}

/* Whether the name is a register's; then the operand is it. */
static int find_register(const parser *p, slice name, operand *o)
{
    const register_name *names = p->registers.items;
    for (size_t i = p->registers.count; i > 0; i--) {
        const register_name *r = &names[i - 1];
        const int index = r->is_range ? range_index(name, r->name) : same_slice(name, r->name) ? 0 : -1;
        if (index >= 0 && index < r->count) {
            o->kind = O_REGISTER;
            o->reg = r->first + index;
            o->bits = r->bits;
            return 1;
        }
    }
    return 0;
}

static const symbol *find_symbol(const parser *p, slice name)
{
    const symbol *symbols = p->symbols.items;
    for (size_t i = p->symbols.count; i > 0; i--)
        if (same_slice(name, symbols[i - 1].name))
            return &symbols[i - 1];
    return NULL;
}

static int add_symbol(parser *p, slice name, int64_t address, int is_parameter)
{
    if (name.length == 0)
        return error_at(p, "a name expected");
    if (find_symbol(p, name))
        return error_at(p, "%.*s is declared twice", width_of(name), name.start);
    symbol *s = list_add(&p->symbols, sizeof *s);
    if (!s)
        return no_memory(p);
    *s = (symbol){name, is_parameter, address};
    return 0;
}

static const struct {
    const char *name;
    special_register first;
    int is_vector; /* %tid.x, %tid.y, %tid.z */
} special_registers[] = {{"%tid", S_TID, 1},
                         {"%ntid", S_NTID, 1},
                         {"%ctaid", S_CTAID, 1},
                         {"%nctaid", S_NCTAID, 1},
                         {"%clusterid", S_CLUSTERID, 1},
                         {"%nclusterid", S_NCLUSTERID, 1},
                         {"%cluster_ctaid", S_CLUSTER_CTAID, 1},
                         {"%cluster_nctaid", S_CLUSTER_NCTAID, 1},
                         {"%cluster_ctarank", S_CLUSTER_CTARANK, 0},
                         {"%cluster_nctarank", S_CLUSTER_NCTARANK, 0},
                         {"%laneid", S_LANEID, 0},
                         {"%warpid", S_WARPID, 0},
                         {"%nwarpid", S_NWARPID, 0},
                         {"%smid", S_SMID, 0},
                         {"%nsmid", S_NSMID, 0},
                         {"%lanemask_eq", S_LANEMASK_EQ, 0},
                         {"%lanemask_le", S_LANEMASK_LE, 0},
                         {"%lanemask_lt", S_LANEMASK_LT, 0},
                         {"%lanemask_ge", S_LANEMASK_GE, 0},
                         {"%lanemask_gt", S_LANEMASK_GT, 0},
                         {"%clock", S_CLOCK, 0},
                         {"%clock64", S_CLOCK, 0},
                         {"%globaltimer", S_CLOCK, 0},
                         {"%dynamic_smem_size", S_DYNAMIC_SMEM_SIZE, 0},
                         {"%total_smem_size", S_TOTAL_SMEM_SIZE, 0}};

/* Whether the name is a special register's; then takes its .x, .y or .z as well. */
static int find_special(parser *p, slice name, operand *o)
{
    for (size_t i = 0; i < sizeof special_registers / sizeof special_registers[0]; i++) {
        if (!slice_is(name, special_registers[i].name))
            continue;
        const int is_vector = special_registers[i].is_vector;
        if (is_vector && (p->at[0] != '.' || p->at[1] < 'x' || p->at[1] > 'z' || is_name_character(p->at[2])))
            return 0;
        o->kind = O_SPECIAL;
        o->imm = (int64_t)special_registers[i].first + (is_vector ? p->at[1] - 'x' : 0);
        p->at += is_vector ? 2 : 0;
        return 1;
    }
    return 0;
}

/* ---- Operands ---- */

/* A register, a special one, a symbol's address or a label. */
static int take_named(parser *p, instruction *i, operand *o)
{
    const slice name = take_name(p);
    if (name.length == 0)
        return *p->at ? error_at(p, "an operand expected, not '%c'", *p->at) : error_at(p, "an operand expected");
    if (slice_is(name, "_") || find_register(p, name, o) || find_special(p, name, o))
        return 0;
    const symbol *s = find_symbol(p, name);
    if (s) {
        o->kind = O_IMMEDIATE;
        o->imm = s->address;
        o->is_parameter = s->is_parameter;
        return 0;
    }
    if (begins_with(i->mnemonic, "bra")) {
        label_use *use = list_add(&p->label_uses, sizeof *use);
        if (!use)
            return no_memory(p);
        *use = (label_use){name, (int)p->instructions.count - 1, p->line};
        o->kind = O_LABEL;
        return 0;
    }
    return error_at(p, "nothing is called %.*s", width_of(name), name.start);
}

/* +16, +-16 behind an address. */
static int take_offset(parser *p, operand *o)
{
    int64_t offset;
    while (accept(p, '+')) {
        if (take_number(p, &offset))
            return -1;
        o->imm = (int64_t)((uint64_t)o->imm + (uint64_t)offset);
    }
    return 0;
}

/* A register, a number, an address or a label by name. */
static int take_scalar(parser *p, instruction *i, operand *o)
{
    *o = (operand){.kind = O_NONE, .reg = -1};
    if (accept(p, '!')) {
        o->negated = 1;
        const slice name = take_name(p);
        return find_register(p, name, o) && o->bits == 1 ? 0 : error_at(p, "a predicate expected behind '!'");
    }
    if (*p->at == '-' || isdigit((unsigned char)*p->at)) {
        o->kind = O_IMMEDIATE;
        return take_number(p, &o->imm);
    }
    return take_named(p, i, o);
}

/* {a, b, …} behind the brace. */
static int take_items(parser *p, instruction *i, operand *o)
{
    operand *items = NULL;
    int capacity = 0, status = 0;
    o->count = 0;
    do {
        if (o->count == capacity) {
            capacity = capacity ? 4 * capacity : 4;
            operand *larger = realloc(items, (size_t)capacity * sizeof *items);
            if (!larger) {
                status = no_memory(p);
                break;
            }
            items = larger;
        }
        status =
            o->count == MAX_ITEMS ? error_at(p, "more than %d items", MAX_ITEMS) : take_scalar(p, i, &items[o->count]);
        if (!status && items[o->count].kind > O_IMMEDIATE)
            status = error_at(p, "an item is neither a register nor a number");
        o->count++;
    } while (!status && accept(p, ','));
    if (!status)
        status = expect(p, '}');
    if (!status) {
        const size_t bytes = (size_t)o->count * sizeof *items;
        o->items = arena_take(p, bytes);
        if (o->items)
            memcpy(o->items, items, bytes);
        else
            status = no_memory(p);
    }
    free(items);
    return status;
}

/* [base + offset] or [base, {coordinates}] behind the bracket. */
static int take_address(parser *p, instruction *i, operand *o)
{
    if (take_scalar(p, i, o) || take_offset(p, o))
        return -1;
    if ((o->kind != O_REGISTER && o->kind != O_IMMEDIATE) || o->negated)
        return error_at(p, "not an address");
    o->kind = O_ADDRESS;
    if (accept(p, ',') && (expect(p, '{') || take_items(p, i, o)))
        return -1;
    return expect(p, ']');
}

static int take_operand(parser *p, instruction *i, operand *o)
{
    *o = (operand){.kind = O_VECTOR, .reg = -1};
    if (accept(p, '['))
        return take_address(p, i, o);
    if (accept(p, '{'))
        return take_items(p, i, o);
    if (take_scalar(p, i, o))
        return -1;
    return o->kind == O_IMMEDIATE ? take_offset(p, o) : 0;
}

/* The operands of a statement and its semicolon; a|b are two. */
static int take_operands(parser *p, instruction *i)
{
    if (accept(p, ';'))
        return 0;
    do {
        if (i->operand_count == MAX_OPERANDS)
            return error_at(p, "more than %d operands", MAX_OPERANDS);
        operand *o = &i->operands[i->operand_count];
        if (take_operand(p, i, o))
            return -1;
        if (o->kind == O_SPECIAL && !begins_with(i->mnemonic, "mov."))
            return error_at(p, "special registers are known in mov only");
        i->operand_count++;
    } while (accept(p, ',') || accept(p, '|'));
    return expect(p, ';');
}

/* ---- Instructions ---- */

/* Where run.c has to gather lanes, and which. */
static void read_convergence(instruction *i)
{
    static const char *const with_mask[] = {"shfl.sync", "vote.sync", "redux.sync", "elect.sync"};
    const char *at = i->mnemonic;
    const slice operation = next_modifier(&at);
    i->mask_operand = -1;
    i->is_convergent = slice_is(operation, "bar") || slice_is(operation, "barrier") || has_modifier(i, "sync") ||
                       has_modifier(i, "aligned");
    if (begins_with(i->mnemonic, "bar.warp.sync") && i->operand_count == 1)
        i->mask_operand = 0;
    for (size_t k = 0; k < sizeof with_mask / sizeof with_mask[0]; k++)
        if (begins_with(i->mnemonic, with_mask[k]))
            i->mask_operand = i->operand_count - 1;
    if (i->mask_operand >= 0 && i->operands[i->mask_operand].kind != O_REGISTER &&
        i->operands[i->mask_operand].kind != O_IMMEDIATE)
        i->mask_operand = -1;
}

/* bra, ret and exit are run.c's own: they have no executor. */
static int is_control_flow(const instruction *i)
{
    const int jumps = strcmp(i->mnemonic, "bra") == 0 || strcmp(i->mnemonic, "bra.uni") == 0;
    const int ends =
        strcmp(i->mnemonic, "ret") == 0 || strcmp(i->mnemonic, "ret.uni") == 0 || strcmp(i->mnemonic, "exit") == 0;
    return (jumps && i->operand_count == 1 && i->operands[0].kind == O_LABEL) || (ends && i->operand_count == 0);
}

static int find_executor(parser *p, instruction *i)
{
    static executor (*const find[])(instruction *) = {find_executor_arith, find_executor_memory, find_executor_sync,
                                                      find_executor_tensor, find_executor_matrix};
    read_types(i);
    read_convergence(i);
    if (is_control_flow(i))
        return 0;
    for (size_t k = 0; k < sizeof find / sizeof find[0] && !i->execute; k++)
        i->execute = find[k](i);
    return i->execute ? 0
                      : error_at(p, "unknown instruction %s, or not with these operands: `%s`", i->mnemonic, i->text);
}

/* The statement from `start` up to its semicolon, blanks made one each. */
static const char *statement_text(parser *p, const char *start)
{
    char *text = arena_take(p, TEXT_BYTES);
    if (!text)
        return NULL;
    size_t length = 0;
    const char *at = start;
    for (; *at && *at != ';' && length < TEXT_BYTES - sizeof "..."; at++) {
        const int blank = isspace((unsigned char)*at);
        if (!blank || (length && text[length - 1] != ' '))
            text[length++] = *(blank ? " " : at);
    }
    const char *rest = *at && *at != ';' ? "..." : "";
    memcpy(text + length, rest, strlen(rest) + 1);
    return text;
}

static instruction *add_instruction(parser *p, const char *start)
{
    if (p->instructions.count == MAX_INSTRUCTIONS) {
        error_at(p, "more than %d instructions", MAX_INSTRUCTIONS);
        return NULL;
    }
    instruction *i = list_add(&p->instructions, sizeof *i);
    if (!i || !(i->text = statement_text(p, start))) {
        no_memory(p);
        return NULL;
    }
    i->line = p->line;
    i->guard = i->mask_operand = -1;
    i->vector = 1;
    return i;
}

/* @%p or @!%p behind the @. */
static int take_guard(parser *p, instruction *i)
{
    operand o = {.reg = -1};
    i->guard_negated = accept(p, '!');
    if (!find_register(p, take_name(p), &o) || o.bits != 1)
        return error_at(p, "a predicate expected behind '@'");
    i->guard = o.reg;
    return 0;
}

/* The .extern array lies behind the shared variables of module and entry: all are known at the first instruction. */
static int place_dynamic(parser *p)
{
    if ((size_t)p->entry->first != p->instructions.count || p->dynamic.length == 0)
        return 0;
    p->shared_bytes = (uint32_t)align_up(p->shared_bytes, p->dynamic_align);
    return add_symbol(p, p->dynamic, p->shared_bytes, 0);
}

static int take_instruction(parser *p)
{
    instruction *i = place_dynamic(p) ? NULL : add_instruction(p, p->at);
    if (!i || (accept(p, '@') && take_guard(p, i)))
        return -1;
    const slice mnemonic = take_dotted(p);
    if (mnemonic.length == 0)
        return *p->at ? error_at(p, "an instruction expected, not '%c'", *p->at)
                      : error_at(p, "the text ends within an entry");
    if (mnemonic.length >= sizeof i->mnemonic)
        return error_at(p, "unknown instruction %.*s", width_of(mnemonic), mnemonic.start);
    memcpy(i->mnemonic, mnemonic.start, mnemonic.length);
    return take_operands(p, i) ? -1 : find_executor(p, i);
}

/* ---- Declarations ---- */

/* .reg .b32 %r<10>, x; behind .reg */
static int take_registers(parser *p)
{
    const int row = take_type(p);
    if (row < 0)
        return -1;
    do {
        int64_t count = 1;
        const slice name = take_name(p);
        if (name.length == 0)
            return error_at(p, "a register's name expected");
        const int is_range = accept(p, '<');
        if (is_range && (take_count(p, 0, MAX_REGISTERS, &count) || expect(p, '>')))
            return -1;
        if (p->next_register + count > MAX_REGISTERS)
            return error_at(p, "more than %d registers", MAX_REGISTERS);
        register_name *r = list_add(&p->registers, sizeof *r);
        if (!r)
            return no_memory(p);
        *r = (register_name){name, is_range, p->next_register, (int)count, types[row].bits};
        p->next_register += (int)count;
        if (p->next_register > p->entry->register_count)
            p->entry->register_count = p->next_register;
    } while (accept(p, ','));
    return expect(p, ';');
}

/* [.align N] .TYPE NAME [ "[" [COUNT] "]" ]: what .shared and .param declare. has_count: COUNT, or no bracket. */
typedef struct declaration {
    slice name;
    int64_t align, bytes;
    int has_count;
} declaration;

static int take_declaration(parser *p, declaration *d)
{
    *d = (declaration){.has_count = 1};
    int row = -1;
    while (accept(p, '.')) {
        const slice word = take_name(p);
        if (slice_is(word, "align")) {
            if (take_count(p, 1, 1 << 16, &d->align))
                return -1;
            if (d->align & (d->align - 1))
                return error_at(p, "%lld is no alignment", (long long)d->align);
        } else if (type_row(word) > 0) {
            row = type_row(word);
        } else if (!slice_is(word, "ptr") && !slice_is(word, "global") && !slice_is(word, "shared")) {
            return error_at(p, "unknown directive .%.*s", width_of(word), word.start);
        }
    }
    if (row < 0)
        return error_at(p, "a declaration without a type");
    d->name = take_name(p);
    int64_t count = 1;
    if (accept(p, '[')) {
        d->has_count = !accept(p, ']');
        if (d->has_count && (take_count(p, 1, MAX_SHARED_BYTES + 1, &count) || expect(p, ']')))
            return -1;
    }
    const int64_t item_bytes = types[row].bits / 8;
    if (d->align < item_bytes)
        d->align = item_bytes;
    d->bytes = count * item_bytes;
    return 0;
}

/* A shared variable behind .shared. */
static int take_shared(parser *p, int is_extern)
{
    declaration d;
    if (take_declaration(p, &d) || expect(p, ';'))
        return -1;
    if (p->entry && (size_t)p->entry->first != p->instructions.count)
        return error_at(p, "a shared variable behind the first instruction");
    if (is_extern) {
        if (d.has_count || p->entry)
            return error_at(p, "an .extern variable is an array without a size, outside of entries");
        if (p->dynamic.length && !same_slice(p->dynamic, d.name))
            return error_at(p, "a second .extern variable");
        p->dynamic = d.name;
        p->dynamic_align = (uint32_t)d.align;
        return d.name.length ? 0 : error_at(p, "a name expected");
    }
    if (!d.has_count)
        return error_at(p, "an array without a size");
    const int64_t address = align_up(p->shared_bytes, d.align);
    if (address + d.bytes > MAX_SHARED_BYTES)
        return error_at(p, "more than %d bytes of shared memory", MAX_SHARED_BYTES);
    p->shared_bytes = (uint32_t)(address + d.bytes);
    return add_symbol(p, d.name, address, 0);
}

/* A variable in global memory, behind .global: zeros at first. */
static int take_variable(parser *p)
{
    enum {
        ALIGNMENT = 256
    };
    declaration d;
    if (take_declaration(p, &d) || expect(p, ';')) /* initialised ones are not known */
        return -1;
    if (!d.has_count || d.align > ALIGNMENT || p->module->variable_count == MAX_VARIABLES)
        return error_at(p, "a variable without a size, aligned to more than %d bytes, or behind %d others", ALIGNMENT,
                        MAX_VARIABLES);
    unsigned char *memory = arena_take(p, (size_t)d.bytes + ALIGNMENT);
    if (!memory)
        return no_memory(p);
    memset(memory, 0, (size_t)d.bytes + ALIGNMENT);
    const int64_t address = align_up((int64_t)(intptr_t)memory, ALIGNMENT);
    p->module->variables[p->module->variable_count].address = (uint64_t)address;
    p->module->variables[p->module->variable_count++].bytes = (uint64_t)d.bytes;
    return add_symbol(p, d.name, address, 0);
}

/* (.param …, …) of an entry. */
static int take_parameters(parser *p)
{
    entry *e = p->entry;
    if (!accept(p, '(') || accept(p, ')'))
        return 0;
    do {
        declaration d;
        const slice word = take_dotted(p);
        if (!slice_is(word, ".param"))
            return error_at(p, ".param expected");
        if (take_declaration(p, &d))
            return -1;
        if (!d.has_count || e->parameter_count == (int)(sizeof e->parameters / sizeof e->parameters[0]))
            return error_at(p, "a parameter without a size, or too many of them");
        const int64_t offset = align_up(e->parameter_bytes, d.align);
        e->parameters[e->parameter_count].offset = (uint32_t)offset;
        e->parameters[e->parameter_count++].bytes = (uint32_t)d.bytes;
        e->parameter_bytes = (uint32_t)(offset + d.bytes);
        if (add_symbol(p, d.name, offset, 1))
            return -1;
    } while (accept(p, ','));
    return expect(p, ')');
}

/* .maxntid 384, 1, 1 and the like, up to the body's brace. */
static int take_limits(parser *p)
{
    while (accept(p, '.')) {
        const slice word = take_name(p);
        int64_t product = 1, value;
        if (!slice_is(word, "maxntid") && !slice_is(word, "reqntid") && !slice_is(word, "minnctapersm") &&
            !slice_is(word, "maxnreg"))
            return error_at(p, "unknown directive .%.*s", width_of(word), word.start);
        do {
            if (take_count(p, 1, 2048, &value))
                return -1;
            product *= value;
        } while (accept(p, ','));
        if (slice_is(word, "maxntid") || slice_is(word, "reqntid"))
            p->entry->max_threads = (uint32_t)product;
    }
    return expect(p, '{');
}

/* ---- Entries ---- */

static int open_scope(parser *p)
{
    if (p->depth == MAX_DEPTH)
        return error_at(p, "more than %d braces", MAX_DEPTH);
    p->scope_registers[p->depth] = p->registers.count;
    p->scope_numbers[p->depth++] = p->next_register;
    return 0;
}

/* The numbers of the scope's registers are free again: scopes behind it use them. */
static void close_scope(parser *p)
{
    p->registers.count = p->scope_registers[--p->depth];
    p->next_register = p->scope_numbers[p->depth];
}

static int resolve_labels(parser *p)
{
    const label *labels = p->labels.items;
    const label_use *uses = p->label_uses.items;
    instruction *instructions = p->instructions.items;
    for (size_t u = 0; u < p->label_uses.count; u++) {
        size_t l = 0;
        while (l < p->labels.count && !same_slice(labels[l].name, uses[u].name))
            l++;
        if (l == p->labels.count) {
            p->line = uses[u].line;
            return error_at(p, "there is no label %.*s", width_of(uses[u].name), uses[u].name.start);
        }
        instructions[uses[u].instruction].operands[0].imm = labels[l].target;
    }
    p->labels.count = p->label_uses.count = 0;
    return 0;
}

/* Whether a label comes next; then it is taken. -1 = an error. */
static int accept_label(parser *p)
{
    const char *before = p->at;
    const slice name = take_name(p);
    if (name.length == 0 || *p->at != ':') {
        p->at = before;
        return 0;
    }
    p->at++;
    const label *labels = p->labels.items;
    for (size_t l = 0; l < p->labels.count; l++)
        if (same_slice(labels[l].name, name))
            return error_at(p, "%.*s is declared twice", width_of(name), name.start);
    label *added = list_add(&p->labels, sizeof *added);
    if (!added)
        return no_memory(p);
    *added = (label){name, (int)p->instructions.count};
    return 1;
}

/* .reg, .shared, .pragma, .loc in a body. */
static int take_body_directive(parser *p)
{
    const slice word = take_dotted(p);
    if (slice_is(word, ".reg"))
        return take_registers(p);
    if (slice_is(word, ".shared"))
        return take_shared(p, 0);
    if (slice_is(word, ".pragma")) {
        p->at += strcspn(p->at, ";\n");
        return expect(p, ';');
    }
    if (slice_is(word, ".loc")) {
        p->at += strcspn(p->at, "\n");
        return 0;
    }
    return error_at(p, "unknown directive %.*s", width_of(word), word.start);
}

/* The statements of a body up to the brace that closes it. */
static int take_body(parser *p)
{
    if (open_scope(p))
        return -1;
    while (p->depth > 0) {
        int status = 0;
        skip_blanks(p);
        if (accept(p, '{'))
            status = open_scope(p);
        else if (accept(p, '}'))
            close_scope(p);
        else if (*p->at == '.')
            status = take_body_directive(p);
        else if ((status = accept_label(p)) == 0)
            status = take_instruction(p);
        if (status < 0)
            return -1;
    }
    instruction *end = add_instruction(p, "ret;"); /* where control reaches the body's end */
    if (!end)
        return -1;
    memcpy(end->mnemonic, "ret", 4);
    if (resolve_labels(p))
        return -1;
    return renumber_registers(p->entry, p->instructions.items, (int)p->instructions.count) ? no_memory(p) : 0;
}

static int take_entry(parser *p)
{
    const slice name = take_name(p);
    entry *e = list_add(&p->entries, sizeof *e);
    if (!e)
        return no_memory(p);
    if (name.length == 0 || name.length >= sizeof e->name)
        return error_at(p, "an entry's name of less than %zu characters expected", sizeof e->name);
    memcpy(e->name, name.start, name.length);
    e->first = (int)p->instructions.count;
    p->entry = e;
    p->next_register = 0;
    const size_t module_symbols = p->symbols.count;
    const uint32_t module_bytes = p->shared_bytes;
    const int status = take_parameters(p) || take_limits(p) || take_body(p) ? -1 : 0;
    e->static_smem_bytes = p->shared_bytes;
    p->symbols.count = module_symbols;
    p->shared_bytes = module_bytes;
    p->entry = NULL;
    return status;
}

/* ---- Modules ---- */

/* .version 9.0, .target sm_90a, .address_size 64, .file …: the rest of the line says nothing that matters here. */
static int is_header(slice word)
{
    return slice_is(word, ".version") || slice_is(word, ".target") || slice_is(word, ".file");
}

static int take_address_size(parser *p)
{
    int64_t bits;
    if (take_number(p, &bits))
        return -1;
    return bits == 64 ? 0 : error_at(p, "addresses of %lld bits", (long long)bits);
}

static int take_module(parser *p)
{
    for (;;) {
        skip_blanks(p);
        if (!*p->at)
            return 0;
        const slice word = take_dotted(p);
        int status = 0;
        if (is_header(word))
            p->at += strcspn(p->at, "\n");
        else if (slice_is(word, ".address_size"))
            status = take_address_size(p);
        else if (slice_is(word, ".visible") || slice_is(word, ".weak"))
            continue;
        else if (slice_is(word, ".extern"))
            status =
                slice_is(take_dotted(p), ".shared") ? take_shared(p, 1) : error_at(p, "an .extern that is not .shared");
        else if (slice_is(word, ".shared"))
            status = take_shared(p, 0);
        else if (slice_is(word, ".global"))
            status = take_variable(p);
        else if (slice_is(word, ".entry"))
            status = take_entry(p);
        else if (word.length)
            status = error_at(p, "unknown directive %.*s", width_of(word), word.start);
        else
            status = error_at(p, "a directive expected, not '%c'", *p->at);
        if (status)
            return -1;
    }
}

ptxvm_module *ptxvm_load(const char *text, char *error, size_t error_bytes)
{
    parser p = {.at = text, .line = 1, .error = error, .error_bytes = error_bytes};
    p.module = calloc(1, sizeof *p.module);
    int status = p.module ? take_module(&p) : no_memory(&p);
    if (!status && p.entries.count == 0)
        status = error_at(&p, "the module has no entry");
    free(p.registers.items);
    free(p.symbols.items);
    free(p.labels.items);
    free(p.label_uses.items);
    if (p.module) {
        p.module->instructions = p.instructions.items;
        p.module->instruction_count = (int)p.instructions.count;
        p.module->entries = p.entries.items;
        p.module->entry_count = (int)p.entries.count;
    }
    if (!status)
        return p.module;
    ptxvm_free(p.module);
    return NULL;
}

void ptxvm_free(ptxvm_module *module)
{
    if (!module)
        return;
    for (arena_block *block = module->arena, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    free(module->instructions);
    free(module->entries);
    free(module);
}

const entry *find_entry(const ptxvm_module *module, const char *name)
{
    for (int i = 0; i < module->entry_count; i++)
        if (strcmp(module->entries[i].name, name) == 0)
            return &module->entries[i];
    return NULL;
}

int ptxvm_has_entry(const ptxvm_module *module, const char *name)
{
    return find_entry(module, name) != NULL;
}

int ptxvm_describe(const ptxvm_module *module, const char *name, ptxvm_needs *out)
{
    const entry *e = find_entry(module, name);
    if (!e)
        return -1;
    *out = (ptxvm_needs){.parameter_count = e->parameter_count,
                         .static_smem_bytes = e->static_smem_bytes,
                         .max_threads = e->max_threads};
    for (int i = 0; i < e->parameter_count; i++)
        out->parameter_bytes[i] = e->parameters[i].bytes;
    return 0;
}
