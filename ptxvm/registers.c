/* The PTX machine's registers, numbered anew: nvcc writes a new register for every value, up to 14000 in an entry, and
 * they would push each other out of the caches. Those that live within one basic block share numbers; the others keep
 * one each. */
#include <stdlib.h>
#include <string.h>

#include "vm.h"

/* Of the register of an old number. */
typedef struct life {
    int first, last; /* instructions where it occurs; first -1 = nowhere */
    int block;       /* of the first */
    int is_local;    /* occurs in that block alone, and is written there before it is read */
    int number;      /* the new one, -1 = none yet */
    int next_ending; /* another register with the same `last`, -1 = none */
} life;

typedef struct renumbering {
    life *lives; /* by old number */
    int *ending; /* of each instruction, the first register whose life ends there, -1 = none */
    char *leads; /* whether an instruction begins a basic block */
    int *free_numbers;
    int free_count, next_number;
    int at, block;           /* the instruction in hand */
    int is_certain, is_late; /* it has no guard; it reads and writes when others have been executed (wgmma) */
} renumbering;

/* What to do with one occurrence of a register; it may change *reg. */
typedef void (*visitor)(renumbering *r, int *reg, int is_written);

static void visit_operand(renumbering *r, operand *o, int is_written, visitor visit)
{
    if (o->reg >= 0)
        visit(r, &o->reg, is_written && o->kind == O_REGISTER);
    for (int k = 0; k < o->count; k++)
        visit_operand(r, &o->items[k], is_written && o->kind == O_VECTOR, visit);
}

/* The first operand last: it counts as written, which is wrong of a few instructions that write nothing, but harmless:
 * a register that occurs first where it is read may have any value. */
static void visit_instruction(renumbering *r, instruction *i, visitor visit)
{
    if (i->guard >= 0)
        visit(r, &i->guard, 0);
    for (int k = i->operand_count - 1; k >= 0; k--)
        visit_operand(r, &i->operands[k], k == 0, visit);
}

static void note(renumbering *r, int *reg, int is_written)
{
    life *l = &r->lives[*reg];
    if (l->first < 0)
        *l = (life){.first = r->at, .block = r->block, .is_local = is_written && r->is_certain, .number = -1};
    l->last = r->at;
    l->is_local = l->is_local && l->block == r->block && !r->is_late;
}

static void rename_register(renumbering *r, int *reg, int is_written)
{
    (void)is_written;
    life *l = &r->lives[*reg];
    if (l->number < 0)
        l->number = l->is_local && r->free_count ? r->free_numbers[--r->free_count] : r->next_number++;
    *reg = l->number;
}

/* Marks where basic blocks begin: behind control flow and where it goes. */
static void find_blocks(renumbering *r, const instruction *instructions, int first, int end)
{
    for (int n = first; n < end; n++) {
        if (instructions[n].execute)
            continue;
        if (n + 1 < end)
            r->leads[n + 1 - first] = 1;
        if (instructions[n].operand_count)
            r->leads[instructions[n].operands[0].imm - first] = 1;
    }
}

static void find_lives(renumbering *r, instruction *instructions, int first, int end)
{
    for (int n = first; n < end; n++) {
        r->at = n - first;
        r->block += r->leads[r->at];
        r->is_certain = instructions[n].guard < 0;
        r->is_late = begins_with(instructions[n].mnemonic, "wgmma.mma_async");
        visit_instruction(r, &instructions[n], note);
    }
}

static void rename_all(renumbering *r, instruction *instructions, int first, int end)
{
    for (int n = first; n < end; n++) {
        visit_instruction(r, &instructions[n], rename_register);
        for (int reg = r->ending[n - first]; reg >= 0; reg = r->lives[reg].next_ending)
            if (r->lives[reg].is_local)
                r->free_numbers[r->free_count++] = r->lives[reg].number;
    }
}

int renumber_registers(entry *e, instruction *instructions, int end)
{
    const int old_count = e->register_count;
    const size_t length = (size_t)(end - e->first);
    renumbering r = {.lives = malloc(((size_t)old_count + 1) * sizeof *r.lives),
                     .ending = malloc(length * sizeof *r.ending),
                     .leads = calloc(length, 1),
                     .free_numbers = malloc(((size_t)old_count + 1) * sizeof *r.free_numbers)};
    const int status = r.lives && r.ending && r.leads && r.free_numbers ? 0 : -1;
    if (!status) {
        for (int reg = 0; reg < old_count; reg++)
            r.lives[reg].first = -1;
        memset(r.ending, -1, length * sizeof *r.ending);
        find_blocks(&r, instructions, e->first, end);
        find_lives(&r, instructions, e->first, end);
        for (int reg = 0; reg < old_count; reg++) {
            if (r.lives[reg].first < 0)
                continue;
            r.lives[reg].next_ending = r.ending[r.lives[reg].last];
            r.ending[r.lives[reg].last] = reg;
        }
        rename_all(&r, instructions, e->first, end);
        e->register_count = r.next_number;
    }
    free(r.lives);
    free(r.ending);
    free(r.leads);
    free(r.free_numbers);
    return status;
}
