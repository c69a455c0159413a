/* Fuzzes the PTX machine's reader: no text makes it read or write outside; what it refuses it refuses with a line and a
 * reason; what it accepts has executors, registers and labels within their bounds. */
#include <string.h>

#include "fuzz.h"
#include "ptxvm/vm.h"

const char *const fuzz_words[] = {".visible .entry k(.param .u64 p)\n{\n",
                                  ".reg .b32 %r<5>;\n",
                                  ".reg .pred p, q;\n",
                                  ".extern .shared .align 16 .b8 memory[];\n",
                                  "{ ",
                                  " }\n",
                                  "[memory+16]",
                                  "{%r1, %r2, %r3, %r4}",
                                  "[%rd1, {%r1, %r2}], [%r3]",
                                  "@!%p1 ",
                                  "bra $L1;\n",
                                  "$L1:\n",
                                  "ret;\n",
                                  "setp.lt.and.s32 %p1|%p2, %r1, -1, !%p1;\n",
                                  "cvt.rn.f16x2.f32 %r1, %f1, %f2;\n",
                                  "cvt.rzi.s32.f32 %r1, %f1;\n",
                                  "mov.b64 %rd1, {%r1, %r2};\n",
                                  "mov.u32 %r1, %tid.x;\n",
                                  "shfl.sync.idx.b32 %r1|%p1, %r2, 0, 31, -1;\n",
                                  "ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r1+-16];\n",
                                  "bar.sync 1, 128;\n",
                                  "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;\n",
                                  "0f3F800000",
                                  "0x",
                                  "18446744073709551615U",
                                  ".maxntid 128, 1, 1\n",
                                  "// c\n",
                                  "/*",
                                  "*/",
                                  "_",
                                  NULL};

static void check_operand(const operand *o, const entry *e, const ptxvm_module *module)
{
    REQUIRE(o->reg < e->register_count);
    REQUIRE(o->kind != O_REGISTER || (o->reg >= 0 && o->bits >= 1 && o->bits <= 64));
    REQUIRE(o->kind != O_LABEL || (o->imm >= e->first && o->imm < module->instruction_count));
    REQUIRE(o->count == 0 || o->kind == O_VECTOR || o->kind == O_ADDRESS);
    for (int k = 0; k < o->count; k++)
        check_operand(&o->items[k], e, module);
}

/* Instructions of an entry end where those of the next one begin. */
static void check_module(const ptxvm_module *module)
{
    REQUIRE(module->entry_count > 0);
    for (int k = 0; k < module->entry_count; k++) {
        const entry *e = &module->entries[k];
        const int end = k + 1 < module->entry_count ? module->entries[k + 1].first : module->instruction_count;
        REQUIRE(e->first < end && strcmp(module->instructions[end - 1].mnemonic, "ret") == 0);
        REQUIRE(find_entry(module, e->name));
        for (int n = e->first; n < end; n++) {
            const instruction *i = &module->instructions[n];
            const int is_own = strncmp(i->mnemonic, "bra", 3) == 0 || strncmp(i->mnemonic, "ret", 3) == 0 ||
                               strcmp(i->mnemonic, "exit") == 0;
            REQUIRE((i->execute == NULL) == is_own);
            REQUIRE(i->guard >= -1 && i->guard < e->register_count && i->mask_operand < i->operand_count);
            for (int o = 0; o < i->operand_count; o++)
                check_operand(&i->operands[o], e, module);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    REQUIRE(text);
    if (size)
        memcpy(text, data, size);
    text[size] = '\0';
    char error[160] = "";
    ptxvm_module *module = ptxvm_load(text, error, sizeof error);
    if (module)
        check_module(module);
    else
        REQUIRE(strncmp(error, "line ", 5) == 0 && strchr(error, ':'));
    ptxvm_free(module);
    free(text);
    return 0;
}
