/* The PTX machine's reader, arithmetic and order of execution, by programs of a few lines: every operation against
 * values worked out by hand or by C, formats exhaustively, lanes that part and meet, warps and CTAs that wait for each
 * other, and what is refused. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ptxvm/vm.h" /* in front of cmocka, which has a macro fail() */

#include <cmocka.h>

#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))

enum {
    TEXT_BYTES = 8192,
    ERROR_BYTES = 1024,
    OUT_WORDS = 4096
};

/* ---- Launching small programs ---- */

/* A launch of one entry that stores to `out` and may read a, b and c. */
typedef struct program {
    const char *declarations; /* outside of the entry */
    const char *body;
    uint32_t grid[3], block[3], cluster, sm_count;
    uint32_t dynamic_smem_bytes;
    uint64_t seed;
    int eager;
    uint64_t a, b, c;
    uint32_t out[OUT_WORDS];
    ptxvm_counts counts;
    char error[ERROR_BYTES];
} program;

static int is_out(void *user, uint64_t address, size_t bytes)
{
    const program *p = user;
    const uint64_t first = (uint64_t)(uintptr_t)p->out;
    return address >= first && address + bytes <= first + sizeof p->out;
}

static program *program_make(const char *body)
{
    program *p = calloc(1, sizeof *p);
    assert_non_null(p);
    *p = (program){.declarations = "", .body = body, .grid = {1, 1, 1}, .block = {32, 1, 1}, .sm_count = 4};
    return p;
}

/* The registers that bodies use; %d1 to %d3 hold a, b and c, and so do the narrower ones their low bits; %d9 is out. */
static const char head[] = ".version 9.0\n.target sm_90a\n.address_size 64\n%s"
                           ".visible .entry test(.param .u64 pout, .param .u64 pa, .param .u64 pb, .param .u64 pc) {\n"
                           ".reg .pred %%p<10>; .reg .b16 %%h<10>; .reg .b32 %%r<20>; .reg .f32 %%f<10>;\n"
                           ".reg .b64 %%d<20>;\n"
                           "ld.param.u64 %%d9, [pout]; ld.param.u64 %%d1, [pa]; ld.param.u64 %%d2, [pb];\n"
                           "ld.param.u64 %%d3, [pc];\n"
                           "cvt.u32.u64 %%r1, %%d1; cvt.u32.u64 %%r2, %%d2; cvt.u32.u64 %%r3, %%d3;\n"
                           "cvt.u16.u64 %%h1, %%d1; cvt.u16.u64 %%h2, %%d2; cvt.u16.u64 %%h3, %%d3;\n"
                           "setp.ne.u64 %%p1, %%d1, 0; setp.ne.u64 %%p2, %%d2, 0; setp.ne.u64 %%p3, %%d3, 0;\n"
                           "%s\nret;\n}\n";

static int launch_program(program *p, const ptxvm_module *module)
{
    memset(p->out, 0, sizeof p->out);
    const uint32_t *out = p->out;
    void *parameters[] = {&out, &p->a, &p->b, &p->c};
    const ptxvm_launch asked = {.module = module,
                                .entry = "test",
                                .grid = {p->grid[0], p->grid[1], p->grid[2]},
                                .block = {p->block[0], p->block[1], p->block[2]},
                                .cluster = p->cluster,
                                .dynamic_smem_bytes = p->dynamic_smem_bytes,
                                .parameters = parameters,
                                .sm_count = p->sm_count,
                                .is_allocated = is_out,
                                .user = p,
                                .seed = p->seed,
                                .eager = p->eager};
    return ptxvm_run(&asked, &p->counts, p->error, sizeof p->error);
}

static int program_run(program *p)
{
    char text[TEXT_BYTES];
    const int length = snprintf(text, sizeof text, head, p->declarations, p->body);
    assert_in_range(length, 1, TEXT_BYTES - 1);
    ptxvm_module *module = ptxvm_load(text, p->error, sizeof p->error);
    const int status = module ? launch_program(p, module) : -1;
    ptxvm_free(module);
    return status;
}

static void program_ok(program *p)
{
    if (program_run(p) != 0)
        fail_msg("%s\n%s", p->error, p->body);
}

/* The program must fail with this in its text. */
static void program_fails(program *p, const char *fragment)
{
    if (program_run(p) == 0)
        fail_msg("no error, wanted: %s\n%s", fragment, p->body);
    if (!strstr(p->error, fragment))
        fail_msg("%s\nwanted: %s\n%s", p->error, fragment, p->body);
}

/* ---- Operations ---- */

/* What an instruction on a, b, c leaves in its register number 0. */
typedef struct operation {
    const char *text;
    uint64_t a, b, c, wanted;
} operation;

static void check_operation(const operation *o)
{
    static const char *const stores[] = {"p selp.u64 %d10, 1, 0, %p0;", "h cvt.u64.u16 %d10, %h0;",
                                         "r cvt.u64.u32 %d10, %r0;", "d mov.u64 %d10, %d0;"};
    const char *result = strchr(o->text, '%');
    assert_non_null(result);
    char body[512] = "";
    for (size_t k = 0; k < COUNT_OF(stores); k++)
        if (stores[k][0] == result[1])
            snprintf(body, sizeof body,
                     "%s\n%s\nmov.u32 %%r10, %%laneid;\nmul.wide.u32 %%d11, %%r10, 8;\nadd.u64 %%d11, %%d11, %%d9;\n"
                     "st.global.u64 [%%d11], %%d10;",
                     o->text, stores[k] + 2);
    assert_true(body[0]);
    program *p = program_make(body);
    p->a = o->a;
    p->b = o->b;
    p->c = o->c;
    program_ok(p);
    for (int lane = 0; lane < LANES; lane++) {
        const uint64_t got = p->out[2 * lane] | (uint64_t)p->out[2 * lane + 1] << 32;
        if (got != o->wanted)
            fail_msg("%s a=%#llx b=%#llx c=%#llx: lane %d has %#llx, wanted %#llx", o->text, (unsigned long long)o->a,
                     (unsigned long long)o->b, (unsigned long long)o->c, lane, (unsigned long long)got,
                     (unsigned long long)o->wanted);
    }
    free(p);
}

static void check_operations(const operation *operations, size_t count)
{
    for (size_t k = 0; k < count; k++)
        check_operation(&operations[k]);
}

#define M1_16 0xffffULL
#define M1_32 0xffffffffULL
#define M1_64 0xffffffffffffffffULL

static void integers_calculate(void **state)
{
    (void)state;
    const operation operations[] = {
        {"add.s32 %r0, %r1, %r2;", M1_32, 2, 0, 1},
        {"add.s32 %r0, %r1, -3;", 1, 0, 0, 0xfffffffe},
        {"add.s64 %d0, %d1, -3;", 1, 0, 0, M1_64 - 1},
        {"add.s16 %h0, %h1, %h2;", 0xffff, 2, 0, 1},
        {"sub.s32 %r0, %r1, %r2;", 0, 1, 0, M1_32},
        {"sub.s64 %d0, %d1, %d2;", 0, 1, 0, M1_64},
        {"sub.s16 %h0, %h1, %h2;", 0, 1, 0, M1_16},
        {"mul.lo.s32 %r0, %r1, %r2;", 0x10001, 0x10001, 0, 0x20001},
        {"mul.lo.s64 %d0, %d1, %d2;", 0x100000001, 0x100000001, 0, 0x200000001},
        {"mul.lo.s16 %h0, %h1, %h2;", 0x101, 0x101, 0, 0x201},
        {"mul.hi.s32 %r0, %r1, %r2;", M1_32, 2, 0, M1_32},
        {"mul.hi.u32 %r0, %r1, %r2;", M1_32, 2, 0, 1},
        {"mul.hi.u64 %d0, %d1, %d2;", M1_64, 2, 0, 1},
        {"mul.hi.s64 %d0, %d1, %d2;", M1_64, 2, 0, M1_64},
        {"mul.wide.s32 %d0, %r1, %r2;", M1_32, 5, 0, M1_64 - 4},
        {"mul.wide.u32 %d0, %r1, %r2;", M1_32, M1_32, 0, 0xfffffffe00000001},
        {"mul.wide.s16 %r0, %h1, %h2;", M1_16, 5, 0, M1_32 - 4},
        {"mul.wide.u16 %r0, %h1, %h2;", M1_16, M1_16, 0, 0xfffe0001},
        {"mad.lo.s32 %r0, %r1, %r2, %r3;", 3, 5, M1_32, 14},
        {"mad.lo.s64 %d0, %d1, %d2, %d3;", 3, 5, M1_64, 14},
        {"mad.hi.u32 %r0, %r1, %r2, %r3;", M1_32, M1_32, 2, 0},
        {"mad.wide.s32 %d0, %r1, %r2, %d3;", M1_32, 7, 0x100000000, 0xfffffff9},
        {"mad.wide.u32 %d0, %r1, %r2, %d3;", M1_32, 2, 3, 0x200000001},
        {"mad.wide.u16 %r0, %h1, %h2, %r3;", M1_16, 2, 0x10000, 0x2fffe},
        {"div.s32 %r0, %r1, %r2;", (uint32_t)-7, 2, 0, (uint32_t)-3},
        {"div.s32 %r0, %r1, %r2;", 0x80000000, M1_32, 0, 0x80000000},
        {"div.u32 %r0, %r1, %r2;", (uint32_t)-7, 2, 0, 0x7ffffffc},
        {"div.s64 %d0, %d1, %d2;", (uint64_t)-7, 2, 0, (uint64_t)-3},
        {"div.s64 %d0, %d1, %d2;", 1ULL << 63, M1_64, 0, 1ULL << 63},
        {"rem.s32 %r0, %r1, %r2;", (uint32_t)-7, 2, 0, M1_32},
        {"rem.s64 %d0, %d1, %d2;", (uint64_t)-7, 2, 0, M1_64},
        {"rem.u32 %r0, %r1, %r2;", 7, 4, 0, 3},
        {"min.s32 %r0, %r1, %r2;", M1_32, 1, 0, M1_32},
        {"min.u32 %r0, %r1, %r2;", M1_32, 1, 0, 1},
        {"max.s32 %r0, %r1, %r2;", M1_32, 1, 0, 1},
        {"max.s64 %d0, %d1, -5;", (uint64_t)-7, 0, 0, (uint64_t)-5},
        {"min.s64 %d0, %d1, %d2;", (uint64_t)-7, 3, 0, (uint64_t)-7},
        {"min.s16 %h0, %h1, %h2;", M1_16, 1, 0, M1_16},
        {"neg.s32 %r0, %r1;", 5, 0, 0, (uint32_t)-5},
        {"neg.s64 %d0, %d1;", 5, 0, 0, (uint64_t)-5},
        {"abs.s32 %r0, %r1;", (uint32_t)-5, 0, 0, 5},
        {"abs.s32 %r0, %r1;", 0x80000000, 0, 0, 0x80000000},
    };
    check_operations(operations, COUNT_OF(operations));
}

static void bits_are_moved(void **state)
{
    (void)state;
    const operation operations[] = {
        {"and.b32 %r0, %r1, -4;", 0x17, 0, 0, 0x14},
        {"or.b64 %d0, %d1, %d2;", 1ULL << 63, 1, 0, (1ULL << 63) + 1},
        {"xor.b16 %h0, %h1, %h2;", 0xff0f, 0xffff, 0, 0xf0},
        {"not.b32 %r0, %r1;", 5, 0, 0, 0xfffffffa},
        {"not.b16 %h0, %h1;", 5, 0, 0, 0xfffa},
        {"shl.b32 %r0, %r1, 4;", 0xf0000001, 0, 0, 0x10},
        {"shl.b32 %r0, %r1, %r2;", 1, 32, 0, 0},
        {"shl.b64 %d0, %d1, %r2;", 1, 63, 0, 1ULL << 63},
        {"shl.b64 %d0, %d1, %r2;", 1, 64, 0, 0},
        {"shl.b16 %h0, %h1, %r2;", 0xff, 12, 0, 0xf000},
        {"shl.b16 %h0, %h1, %r2;", 0xff, 0x10000, 0, 0},
        {"shr.u32 %r0, %r1, %r2;", 0x80000000, 31, 0, 1},
        {"shr.u32 %r0, %r1, %r2;", 0x80000000, 32, 0, 0},
        {"shr.s32 %r0, %r1, %r2;", 0x80000000, 31, 0, M1_32},
        {"shr.s32 %r0, %r1, %r2;", 0x80000000, 99, 0, M1_32},
        {"shr.s64 %d0, %d1, 64;", 1ULL << 63, 0, 0, M1_64},
        {"shr.u64 %d0, %d1, 63;", 1ULL << 63, 0, 0, 1},
        {"shr.u16 %h0, %h1, 8;", 0xabcd, 0, 0, 0xab},
        {"shr.s16 %h0, %h1, 8;", 0xabcd, 0, 0, 0xffab},
        {"shf.l.wrap.b32 %r0, %r1, %r2, %r3;", 0x80000000, 1, 33, 3},
        {"shf.r.wrap.b32 %r0, %r1, %r2, %r3;", 2, 1, 33, 0x80000001},
        {"shf.r.clamp.b32 %r0, %r1, %r2, %r3;", 2, 7, 33, 7},
        {"shf.l.clamp.b32 %r0, %r1, %r2, %r3;", 9, 7, 33, 9},
        {"prmt.b32 %r0, %r1, %r2, 0x7531;", 0x33221100, 0x77665544, 0, 0x77553311},
        {"prmt.b32 %r0, %r1, %r2, 0x00ba;", 0x80221100, 0x00000080, 0, 0x0000ff00},
        {"prmt.b32 %r0, %r1, %r2, 0x4444;", 0, 0xab, 0, 0xabababab},
        {"bfe.u32 %r0, %r1, 4, 8;", 0xabcdef, 0, 0, 0xde},
        {"bfe.u32 %r0, %r1, 28, 8;", 0xf0000000, 0, 0, 0xf},
        {"bfe.s32 %r0, %r1, 4, 8;", 0xabcdef, 0, 0, 0xffffffde},
        {"bfe.s32 %r0, %r1, 28, 8;", 0xf0000000, 0, 0, M1_32},
        {"bfe.s32 %r0, %r1, 40, 8;", 0xf0000000, 0, 0, M1_32},
        {"bfe.s32 %r0, %r1, 4, 0;", 0xff, 0, 0, 0},
        {"bfe.u64 %d0, %d1, 60, 8;", M1_64, 0, 0, 0xf},
        {"bfi.b32 %r0, %r1, %r2, 4, 8;", 0xab, 0xffffffff, 0, 0xfffffabf},
        {"bfi.b32 %r0, %r1, %r2, 28, 8;", 0xab, 0, 0, 0xb0000000},
        {"bfi.b32 %r0, %r1, %r2, 32, 8;", 0xab, 5, 0, 5},
        {"bfi.b64 %d0, %d1, %d2, 0, 64;", 0xab, 5, 0, 0xab},
        {"lop3.b32 %r0, %r1, %r2, %r3, 0xe8;", 0xff00, 0xf0f0, 0xcccc, 0xfcc0},
        {"lop3.b32 %r0, %r1, %r2, %r3, 0x01;", 1, 2, 4, 0xfffffff8},
        {"dp2a.lo.u32.u32 %r0, %r1, %r2, %r3;", 0x00050003, 0xfffe0702, 100, 141}, /* 3 * 2 + 5 * 7 */
        {"dp2a.hi.u32.u32 %r0, %r1, %r2, %r3;", 0x00050003, 0x07020000, M1_32, 40},
        {"dp2a.lo.s32.u32 %r0, %r1, %r2, %r3;", 0xffff0000, 0x0000ff00, 0, (uint32_t)-255},
        {"dp4a.u32.u32 %r0, %r1, %r2, %r3;", 0x01020304, 0xff010101, 1, 265},
        {"dp4a.s32.s32 %r0, %r1, %r2, %r3;", 0x01020304, 0xff010101, 1, 9},
        {"popc.b32 %r0, %r1;", 0xf0f0, 0, 0, 8},
        {"popc.b64 %r0, %d1;", M1_64, 0, 0, 64},
        {"clz.b32 %r0, %r1;", 1, 0, 0, 31},
        {"clz.b32 %r0, %r1;", 0, 0, 0, 32},
        {"clz.b64 %r0, %d1;", 0, 0, 0, 64},
        {"brev.b32 %r0, %r1;", 0x3, 0, 0, 0xc0000000},
        {"brev.b64 %d0, %d1;", 0x3, 0, 0, 0xc000000000000000},
        {"mov.b64 %d0, {%r1, %r2};", 0x11111111, 0x22222222, 0, 0x2222222211111111},
        {"mov.b64 {_, %r0}, %d1;", 0x2222222211111111, 0, 0, 0x22222222},
        {"mov.b64 %d0, {%r1, 0x40000040};", 5, 0, 0, 0x4000004000000005},
        {"mov.b32 %r0, {%h1, %h2};", 0x1111, 0x2222, 0, 0x22221111},
        {"mov.b32 %r0, {0, %h2};", 0x1111, 0x2222, 0, 0x22220000},
        {"{ .reg .b32 %r0; }\nmov.b32 {%h4, %h5}, %r1;\nmov.b32 %r0, {%h5, %h4};", 0x11112222, 0, 0, 0x22221111},
        {"selp.s32 %r0, %r1, %r2, %p3;", 5, 7, 1, 5},
        {"selp.s32 %r0, %r1, %r2, !%p3;", 5, 7, 1, 7},
        {"selp.b32 %r0, -1, 0, %p3;", 5, 7, 1, M1_32},
        {"mov.u32 %r0, -1;", 0, 0, 0, M1_32},
        {"mov.f32 %r0, 0f3F800000;", 0, 0, 0, 0x3f800000},
        {"mov.u16 %h0, -1;", 0, 0, 0, M1_16},
        {"mov.pred %p0, -1;", 0, 0, 0, 1},
        {"mov.pred %p0, %p1;", 0, 0, 0, 0},
    };
    check_operations(operations, COUNT_OF(operations));
}

/* ---- Comparisons ---- */

enum {
    ONE = 0x3f800000,
    MINUS_ONE = (int)0xbf800000,
    QUIET_NAN = 0x7fc00000
};

static void comparisons_know_nan(void **state)
{
    (void)state;
    const struct {
        const char *name;
        int less, equal, greater, unordered;
    } known[] = {{"eq", 0, 1, 0, 0},  {"ne", 1, 0, 1, 0},  {"lt", 1, 0, 0, 0},  {"le", 1, 1, 0, 0},
                 {"gt", 0, 0, 1, 0},  {"ge", 0, 1, 1, 0},  {"equ", 0, 1, 0, 1}, {"neu", 1, 0, 1, 1},
                 {"ltu", 1, 0, 0, 1}, {"leu", 1, 1, 0, 1}, {"gtu", 0, 0, 1, 1}, {"geu", 0, 1, 1, 1},
                 {"num", 1, 1, 1, 0}, {"nan", 0, 0, 0, 1}};
    for (size_t k = 0; k < COUNT_OF(known); k++) {
        char text[64];
        snprintf(text, sizeof text, "setp.%s.f32 %%p0, %%r1, %%r2;", known[k].name);
        const operation operations[] = {{text, (uint32_t)MINUS_ONE, ONE, 0, (uint64_t)known[k].less},
                                        {text, 0x80000000, 0, 0, (uint64_t)known[k].equal},
                                        {text, ONE, 0, 0, (uint64_t)known[k].greater},
                                        {text, ONE, QUIET_NAN, 0, (uint64_t)known[k].unordered},
                                        {text, QUIET_NAN, QUIET_NAN, 0, (uint64_t)known[k].unordered}};
        check_operations(operations, COUNT_OF(operations));
    }
}

static void comparisons_combine(void **state)
{
    (void)state;
    const operation operations[] = {
        {"setp.lt.s32 %p0, %r1, %r2;", M1_32, 1, 0, 1},
        {"setp.lt.u32 %p0, %r1, %r2;", M1_32, 1, 0, 0},
        {"setp.hi.u32 %p0, %r1, %r2;", M1_32, 1, 0, 1},
        {"setp.ls.u32 %p0, %r1, %r2;", M1_32, 1, 0, 0},
        {"setp.eq.s16 %p0, %h1, -1;", M1_16, 0, 0, 1},
        {"setp.lt.s64 %p0, %d1, -1;", (uint64_t)-2, 0, 0, 1},
        {"setp.ge.u64 %p0, %d1, 1;", (uint64_t)-2, 0, 0, 1},
        {"setp.lt.and.s32 %p0, %r1, %r2, %p3;", 1, 2, 0, 0},
        {"setp.lt.and.s32 %p0, %r1, %r2, !%p3;", 1, 2, 0, 1},
        {"setp.lt.or.s32 %p0, %r1, %r2, %p3;", 2, 1, 1, 1},
        {"setp.lt.xor.s32 %p0, %r1, %r2, %p3;", 1, 2, 1, 0},
        {"setp.lt.s32 %p0|%p4, %r1, %r2;", 1, 2, 0, 1},
        {"mov.pred %p0, 1;\nsetp.lt.s32 %p4|%p0, %r1, %r2;", 1, 2, 0, 0},
        {"mov.pred %p0, 0;\nsetp.lt.and.s32 _|%p0, %r1, %r2, %p3;", 2, 1, 1, 1},
        {"setp.lt.ftz.f32 %p0, %r1, %r2;", 1, 2, 0, 0}, /* both subnormal */
        {"setp.lt.f32 %p0, %r1, %r2;", 1, 2, 0, 1},
        {"setp.lt.f16 %p0, %h1, %h2;", 0xbc00, 0x3c00, 0, 1},
        {"setp.gt.bf16 %p0, %h1, %h2;", 0x4000, 0x3f80, 0, 1},
        {"and.pred %p0, %p1, %p2;", 1, 0, 0, 0},
        {"and.pred %p0, %p1, !%p2;", 1, 0, 0, 1},
        {"or.pred %p0, %p1, %p2;", 0, 1, 0, 1},
        {"xor.pred %p0, %p1, %p2;", 1, 1, 0, 0},
        {"not.pred %p0, %p1;", 1, 0, 0, 0},
    };
    check_operations(operations, COUNT_OF(operations));
}

/* ---- f32 ---- */

static void floats_calculate(void **state)
{
    (void)state;
    const uint64_t canonical = 0x7fffffff, infinity = 0x7f800000;
    const operation operations[] = {
        {"add.f32 %r0, %r1, %r2;", ONE, ONE, 0, 0x40000000},
        {"add.f32 %r0, %r1, %r2;", infinity, infinity | 0x80000000, 0, canonical},
        {"add.f32 %r0, %r1, %r2;", QUIET_NAN | 0x80000001, ONE, 0, canonical},
        {"add.f32 %r0, %r1, %r2;", 1, 1, 0, 2},
        {"add.ftz.f32 %r0, %r1, %r2;", 1, 1, 0, 0},
        {"sub.f32 %r0, %r1, %r2;", ONE, 0x40000000, 0, (uint32_t)MINUS_ONE},
        {"mul.f32 %r0, %r1, %r2;", 0x3f800001, 0x3f800001, 0, 0x3f800002},
        {"mul.f32 %r0, %r1, 0f40000000;", ONE, 0, 0, 0x40000000},
        {"mul.ftz.f32 %r0, %r1, %r2;", 0x00800000, 0x3f000000, 0, 0},
        {"fma.rn.f32 %r0, %r1, %r2, %r3;", 0x3f800001, 0x3f800001, 0xbf800002, 0x28800000}, /* 2^-46 is left */
        {"fma.rn.f32 %r0, %r1, %r2, %r3;", infinity, 0, ONE, canonical},
        {"div.rn.f32 %r0, %r1, %r2;", ONE, 0x40400000, 0, 0x3eaaaaab},
        {"div.rn.f32 %r0, %r1, %r2;", ONE, 0, 0, infinity},
        {"rcp.rn.f32 %r0, %r1;", 0x40000000, 0, 0, 0x3f000000},
        {"rcp.approx.ftz.f32 %r0, %r1;", 1, 0, 0, infinity},
        {"sqrt.rn.f32 %r0, %r1;", 0x40800000, 0, 0, 0x40000000},
        {"sqrt.rn.f32 %r0, %r1;", (uint32_t)MINUS_ONE, 0, 0, canonical},
        {"rsqrt.approx.f32 %r0, %r1;", 0x40800000, 0, 0, 0x3f000000},
        {"ex2.approx.ftz.f32 %r0, %r1;", 0xc0000000, 0, 0, 0x3e800000},
        {"ex2.approx.ftz.f32 %r0, %r1;", 0xff800000, 0, 0, 0},
        {"ex2.approx.ftz.f32 %r0, %r1;", 0xc2fe0000, 0, 0, 0}, /* 2^-127 */
        {"ex2.approx.f32 %r0, %r1;", 0xc2fe0000, 0, 0, 0x00400000},
        {"lg2.approx.f32 %r0, %r1;", 0x41000000, 0, 0, 0x40400000},
        {"min.f32 %r0, %r1, %r2;", ONE, QUIET_NAN, 0, ONE},
        {"max.f32 %r0, %r1, %r2;", QUIET_NAN, ONE, 0, ONE},
        {"max.f32 %r0, %r1, %r2;", QUIET_NAN, QUIET_NAN, 0, canonical},
        {"max.NaN.f32 %r0, %r1, %r2;", ONE, QUIET_NAN, 0, canonical},
        {"max.f32 %r0, %r1, %r2;", 0x80000000, 0, 0, 0},
        {"min.f32 %r0, %r1, %r2;", 0, 0x80000000, 0, 0x80000000},
        {"min.ftz.f32 %r0, %r1, %r2;", 5, ONE, 0, 0},
        {"neg.f32 %r0, %r1;", 0, 0, 0, 0x80000000},
        {"abs.f32 %r0, %r1;", 0x80000005, 0, 0, 5},
        {"copysign.f32 %r0, %r1, %r2;", 0x80000000, ONE, 0, (uint32_t)MINUS_ONE},
    };
    check_operations(operations, COUNT_OF(operations));
}

/* ---- 16-bit and 8-bit numbers ---- */

static double value_of_code(int code, int mantissa_bits, int bias)
{
    const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    return exponent ? ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
                    : ldexp(mantissa, 1 - bias - mantissa_bits);
}

/* Positive codes [0, count) of a format are the numbers in order; what lies between two rounds to the nearest of them,
 * from halfway to the even one; the same negative. */
static void check_format(int count, int mantissa_bits, int bias, int sign, float (*decode)(int), int (*encode)(float))
{
    for (int code = 0; code < count; code++) {
        const float here = (float)value_of_code(code, mantissa_bits, bias);
        assert_true(decode(code) == here && decode(code | sign) == -here && signbit(decode(code | sign)));
        assert_int_equal(encode(here), code);
        assert_int_equal(encode(-here), code | sign);
        if (code + 1 == count)
            break;
        const float next = (float)value_of_code(code + 1, mantissa_bits, bias), middle = here / 2 + next / 2;
        assert_int_equal(encode(middle), code + (code & 1));
        assert_int_equal(encode(nextafterf(middle, 0)), code);
        assert_int_equal(encode(-nextafterf(middle, INFINITY)), (code + 1) | sign);
    }
}

static float decode_half(int code)
{
    return float_of_half((uint16_t)code);
}

static int encode_half(float value)
{
    return half_of_float(value);
}

static float decode_bfloat(int code)
{
    return float_of_bfloat((uint16_t)code);
}

static int encode_bfloat(float value)
{
    return bfloat_of_float(value);
}

static float decode_e4m3(int code)
{
    return float_of_e4m3((uint8_t)code);
}

static int encode_e4m3(float value)
{
    return e4m3_of_float_satfinite(value);
}

static void halves_round(void **state)
{
    (void)state;
    check_format(0x7c00, 10, 15, 0x8000, decode_half, encode_half);
    assert_int_equal(half_of_float(65519.99f), 0x7bff);
    assert_int_equal(half_of_float(65520), 0x7c00);
    assert_int_equal(half_of_float(-INFINITY), 0xfc00);
    assert_int_equal(half_of_float(NAN), 0x7fff);
    assert_true(isinf(float_of_half(0x7c00)) && float_of_half(0xfc00) < 0);
    for (int code = 0x7c01; code < 0x8000; code++)
        assert_true(isnan(decode_half(code)) && isnan(decode_half(code | 0x8000)));
}

static void bfloats_round(void **state)
{
    (void)state;
    check_format(0x7f80, 7, 127, 0x8000, decode_bfloat, encode_bfloat);
    assert_int_equal(bfloat_of_float(FLT_MAX), 0x7f80);
    assert_int_equal(bfloat_of_float(-INFINITY), 0xff80);
    assert_int_equal(bfloat_of_float(NAN), 0x7fff);
    for (int code = 0x7f81; code < 0x8000; code++)
        assert_true(isnan(decode_bfloat(code)) && isnan(decode_bfloat(code | 0x8000)));
}

static void eighths_round(void **state)
{
    (void)state;
    check_format(0x7f, 3, 7, 0x80, decode_e4m3, encode_e4m3);
    assert_true(isnan(decode_e4m3(0x7f)) && isnan(decode_e4m3(0xff)));
    assert_int_equal(encode_e4m3(465), 0x7e); /* beyond 448 there is nothing */
    assert_int_equal(encode_e4m3(-INFINITY), 0xfe);
    assert_int_equal(encode_e4m3(NAN), 0x7f);
}

static void short_arithmetic_rounds_once(void **state)
{
    (void)state;
    const operation operations[] = {
        {"add.f16 %h0, %h1, %h2;", 0x3c00, 0x1000, 0, 0x3c00},              /* 1 + 2^-11: a tie, to even */
        {"add.f16 %h0, %h1, %h2;", 0x3c01, 0x1000, 0, 0x3c02},              /* the next tie, up */
        {"fma.rn.f16 %h0, %h1, %h2, %h3;", 0x3c01, 0x3c01, 0xbc02, 0x0010}, /* (1 + 2^-10)^2 - 1 - 2^-9 = 2^-20 */
        /* 1.5 (1 + 3 * 2^-7) is a tie between 0x3fc4 and 0x3fc5, 1.5 (1 + 2^-7) one above 0x3fc1; c is tiny */
        {"fma.rn.bf16 %h0, %h1, %h2, %h3;", 0x3f83, 0x3fc0, 0, 0x3fc4},
        {"fma.rn.bf16 %h0, %h1, %h2, %h3;", 0x3f83, 0x3fc0, 0x0080, 0x3fc5},
        {"fma.rn.bf16 %h0, %h1, %h2, %h3;", 0x3f83, 0x3fc0, 0x8080, 0x3fc4},
        {"fma.rn.bf16 %h0, %h1, %h2, %h3;", 0x3f81, 0x3fc0, 0, 0x3fc2},
        {"fma.rn.bf16 %h0, %h1, %h2, %h3;", 0x3f81, 0x3fc0, 0x8080, 0x3fc1},
        {"add.f16x2 %r0, %r1, %r2;", 0x3c004000, 0x40003c00, 0, 0x42004200},
        {"sub.bf16x2 %r0, %r1, %r2;", 0x3f804000, 0x40003f80, 0, 0xbf803f80},
        {"mul.f16x2 %r0, %r1, %r2;", 0x3c004000, 0x40003c00, 0, 0x40004000},
        {"mul.bf16 %h0, %h1, %h2;", 0x3f81, 0x3f81, 0, 0x3f82},
        {"max.f16x2 %r0, %r1, %r2;", 0x7e003c00, 0x3c00bc00, 0, 0x3c003c00},
        {"min.NaN.bf16x2 %r0, %r1, %r2;", 0x7fc03f80, 0x3f803f80, 0, 0x7fff3f80},
        {"neg.f16x2 %r0, %r1;", 0x3c00bc00, 0, 0, 0xbc003c00},
        {"abs.bf16 %h0, %h1;", 0xbf80, 0, 0, 0x3f80},
    };
    check_operations(operations, COUNT_OF(operations));
}

static void conversions_round_and_saturate(void **state)
{
    (void)state;
    const operation operations[] = {
        {"cvt.s64.s32 %d0, %r1;", M1_32, 0, 0, M1_64},
        {"cvt.u64.u32 %d0, %r1;", M1_32, 0, 0, M1_32},
        {"cvt.u32.u64 %r0, %d1;", 0x123456789abcdef0, 0, 0, 0x9abcdef0},
        {"cvt.u16.u32 %h0, %r1;", 0x12345678, 0, 0, 0x5678},
        {"cvt.s32.s16 %r0, %h1;", 0x8000, 0, 0, 0xffff8000},
        {"cvt.s32.s8 %r0, %r1;", 0x80, 0, 0, 0xffffff80},
        {"cvt.sat.u8.s32 %r0, %r1;", (uint32_t)-5, 0, 0, 0},
        {"cvt.sat.u8.s32 %r0, %r1;", 300, 0, 0, 255},
        {"cvt.sat.s8.s32 %r0, %r1;", (uint32_t)-300, 0, 0, 0x80},
        {"cvt.rn.f32.s32 %r0, %r1;", (uint32_t)-16777217, 0, 0, 0xcb800000},
        {"cvt.rn.f32.u32 %r0, %r1;", M1_32, 0, 0, 0x4f800000},
        {"cvt.rn.f32.s64 %r0, %d1;", M1_64, 0, 0, (uint32_t)MINUS_ONE},
        {"cvt.rn.f16.s32 %h0, %r1;", 2049, 0, 0, 0x6800},
        {"cvt.rzi.s32.f32 %r0, %r1;", 0xbfffffff, 0, 0, M1_32},
        {"cvt.rni.s32.f32 %r0, %r1;", 0x40200000, 0, 0, 2}, /* 2.5 */
        {"cvt.rmi.s32.f32 %r0, %r1;", 0xbf000000, 0, 0, M1_32},
        {"cvt.rpi.s32.f32 %r0, %r1;", 0x3f000000, 0, 0, 1},
        {"cvt.rzi.s32.f32 %r0, %r1;", 0x4f000000, 0, 0, 0x7fffffff},
        {"cvt.rzi.s32.f32 %r0, %r1;", 0xff800000, 0, 0, 0x80000000},
        {"cvt.rzi.s32.f32 %r0, %r1;", QUIET_NAN, 0, 0, 0},
        {"cvt.rzi.u32.f32 %r0, %r1;", 0xbf800000, 0, 0, 0},
        {"cvt.rzi.u32.f32 %r0, %r1;", 0x7f800000, 0, 0, M1_32},
        {"cvt.rzi.s64.f32 %d0, %r1;", 0x5f000000, 0, 0, M1_64 >> 1},
        {"cvt.rzi.u64.f32 %d0, %r1;", 0x7f800000, 0, 0, M1_64},
        {"cvt.rmi.f32.f32 %r0, %r1;", 0xbf000000, 0, 0, (uint32_t)MINUS_ONE},
        {"cvt.rni.f32.f32 %r0, %r1;", 0x3f000000, 0, 0, 0},
        {"cvt.sat.f32.f32 %r0, %r1;", 0x40000000, 0, 0, ONE},
        {"cvt.sat.f32.f32 %r0, %r1;", QUIET_NAN, 0, 0, 0},
        {"cvt.ftz.f32.f32 %r0, %r1;", 0x80000001, 0, 0, 0x80000000},
        {"cvt.f32.f16 %r0, %h1;", 0x3c00, 0, 0, ONE},
        {"cvt.f32.bf16 %r0, %h1;", 0x3f80, 0, 0, ONE},
        {"cvt.rn.f16.f32 %h0, %r1;", 0x3f801000, 0, 0, 0x3c00},
        {"cvt.rn.bf16.f32 %h0, %r1;", 0x3f818000, 0, 0, 0x3f82},
        {"cvt.rn.f16x2.f32 %r0, %r1, %r2;", ONE, 0x40000000, 0, 0x3c004000},
        {"cvt.rn.bf16x2.f32 %r0, %r1, %r2;", ONE, 0x40000000, 0, 0x3f804000},
        {"cvt.rn.relu.f16x2.f32 %r0, %r1, %r2;", ONE, 0xc0000000, 0, 0x3c000000},
        {"cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2;", ONE, 0x7f800000, 0, 0x387e},
        {"cvt.rn.f16x2.e4m3x2 %r0, %h1;", 0x38b8, 0, 0, 0x3c00bc00},
        {"cvt.rn.satfinite.e4m3x2.f16x2 %h0, %r1;", 0x3c00bc00, 0, 0, 0x38b8},
    };
    check_operations(operations, COUNT_OF(operations));
}

/* fma, and the others against C, with random bits: a launch with 32 numbers at a time. */
static void random_floats_agree_with_c(void **state)
{
    (void)state;
    program *p = program_make("mov.u32 %r10, %tid.x;\n"
                              "mul.wide.u32 %d11, %r10, 32;\n"
                              "add.u64 %d11, %d11, %d9;\n"
                              "add.u32 %r11, %r10, %r1; mul.lo.u32 %r12, %r11, 0x9e3779b1; shr.u32 %r13, %r12, 15;\n"
                              "xor.b32 %r4, %r12, %r13; mul.lo.u32 %r4, %r4, 0x85ebca6b;\n"
                              "mul.lo.u32 %r5, %r4, 0xc2b2ae35; shf.l.wrap.b32 %r6, %r5, %r5, 7;\n"
                              "xor.b32 %r5, %r5, %r4; mov.b32 %f1, %r4; mov.b32 %f2, %r5; mov.b32 %f3, %r6;\n"
                              "fma.rn.f32 %f4, %f1, %f2, %f3; mul.f32 %f5, %f1, %f2; add.f32 %f6, %f1, %f3;\n"
                              "div.rn.f32 %f7, %f1, %f2; max.f32 %f8, %f2, %f3;\n"
                              "st.global.v4.u32 [%d11], {%r4, %r5, %r6, %r4};\n"
                              "st.global.v4.f32 [%d11+16], {%f4, %f5, %f6, %f7};");
    p->block[0] = 512;
    for (uint64_t round = 0; round < 40; round++) {
        p->a = 12345 + 512 * round;
        program_ok(p);
        for (int t = 0; t < 512; t++) {
            const uint32_t *words = &p->out[8 * t];
            const float a = float_of_bits(words[0]), b = float_of_bits(words[1]), c = float_of_bits(words[2]);
            const float wanted[] = {fmaf(a, b, c), a * b, a + c, a / b};
            for (int k = 0; k < 4; k++) {
                const uint32_t bits = isnan(wanted[k]) ? 0x7fffffff : bits_of_float(wanted[k]);
                if (words[4 + k] != bits)
                    fail_msg("operation %d of %08x, %08x, %08x: %08x, wanted %08x", k, words[0], words[1], words[2],
                             words[4 + k], bits);
            }
        }
    }
    free(p);
}

/* ---- Special registers ---- */

static void threads_know_their_place(void **state)
{
    (void)state;
    program *p = program_make(
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;\n"
        "mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y;\n"
        "mov.u32 %r6, %ctaid.x; mov.u32 %r7, %ctaid.y; mov.u32 %r8, %ctaid.z;\n"
        "mov.u32 %r9, %nctaid.x; mov.u32 %r10, %nctaid.y;\n"
        "mad.lo.u32 %r11, %r3, %r5, %r2; mad.lo.u32 %r11, %r11, %r4, %r1;\n"  /* thread */
        "mad.lo.u32 %r12, %r8, %r10, %r7; mad.lo.u32 %r12, %r12, %r9, %r6;\n" /* CTA */
        "mad.lo.u32 %r13, %r12, 60, %r11; mul.wide.u32 %d1, %r13, 16; add.u64 %d1, %d1, %d9;\n"
        "mov.u32 %r14, %laneid; mov.u32 %r15, %warpid; mov.u32 %r16, %lanemask_lt; mov.u32 %r17, %cluster_ctarank;\n"
        "mad.lo.u32 %r15, %r15, 32, %r14; mad.lo.u32 %r13, %r12, 1000, %r11; st.global.v4.u32 [%d1], {%r13, %r15, "
        "%r16, %r17};");
    memcpy(p->grid, (uint32_t[]){4, 2, 2}, sizeof p->grid);
    memcpy(p->block, (uint32_t[]){5, 4, 3}, sizeof p->block);
    p->cluster = 2;
    program_ok(p);
    for (uint32_t c = 0; c < 16; c++) {
        for (uint32_t t = 0; t < 60; t++) {
            const uint32_t *words = &p->out[4 * (60 * c + t)];
            assert_int_equal(words[0], 1000 * c + t);
            assert_int_equal(words[1], t);
            assert_int_equal(words[2], (1U << t % 32) - 1);
            assert_int_equal(words[3], c % 2);
        }
    }
    free(p);
}

/* ---- Control flow ---- */

/* Stores %r0 at out[thread]. */
#define STORE_R0 "mov.u32 %r19, %tid.x; mul.wide.u32 %d19, %r19, 4; add.u64 %d19, %d19, %d9; st.global.u32 [%d19], %r0;"

/* Runs with several seeds; out[t] must be what `wanted` says. */
static void check_threads(program *p, uint32_t (*wanted)(uint32_t thread))
{
    for (p->seed = 0; p->seed < 20; p->seed++) {
        program_ok(p);
        for (uint32_t t = 0; t < p->block[0]; t++)
            if (p->out[t] != wanted(t))
                fail_msg("seed %llu: thread %u has %u, wanted %u\n%s", (unsigned long long)p->seed, t, p->out[t],
                         wanted(t), p->body);
    }
    free(p);
}

static uint32_t sum_of_below(uint32_t t)
{
    return t * (t - 1) / 2 + (t % 3 == 0 ? 1000 : 2000);
}

static void loops_part_and_meet(void **state)
{
    (void)state;
    program *p = program_make("mov.u32 %r1, %tid.x; mov.u32 %r0, 0; mov.u32 %r2, 0;\n"
                              "$loop: setp.ge.u32 %p1, %r2, %r1; @%p1 bra $behind;\n"
                              "add.u32 %r0, %r0, %r2; add.u32 %r2, %r2, 1; bra.uni $loop;\n"
                              "$behind: rem.u32 %r3, %r1, 3; setp.eq.u32 %p2, %r3, 0; @!%p2 bra $else;\n"
                              "add.u32 %r0, %r0, 1000; bra $end;\n"
                              "$else: add.u32 %r0, %r0, 2000;\n"
                              "$end:\n" STORE_R0);
    p->block[0] = 75; /* a short warp at the end */
    check_threads(p, sum_of_below);
}

static uint32_t lane_to_the_left(uint32_t t)
{
    return t % 2 ? t - 1 : 100 + t;
}

/* Odd lanes take a way of their own to each shuffle; all must be there before it happens. */
static void shuffles_gather_lanes(void **state)
{
    (void)state;
    program *p = program_make("mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; mov.u32 %r4, 0;\n"
                              "@%p1 bra $even;\n"
                              "$more: add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, %r1; @%p2 bra $more;\n"
                              "$even: mov.u32 %r5, %r1;\n"
                              "shfl.sync.bfly.b32 %r0|%p3, %r5, 1, 31, -1;\n"
                              "@%p1 add.u32 %r0, %r1, 100;\n" STORE_R0);
    p->block[0] = 64;
    check_threads(p, lane_to_the_left);
}

static uint32_t votes_of_halves(uint32_t t)
{
    return t % 32 < 16 ? 0x5555 : 0xaaaa0000;
}

/* The halves of a warp vote with masks of their own, at one instruction, some of them later than others. */
static void halves_vote_apart(void **state)
{
    (void)state;
    program *p = program_make(
        "mov.u32 %r1, %laneid; and.b32 %r2, %r1, 1; setp.lt.u32 %p1, %r1, 16; selp.b32 %r3, 0xffff, 0xffff0000, %p1;\n"
        "setp.eq.u32 %p2, %r2, 0; setp.ne.u32 %p3, %r2, 0; and.pred %p2, %p2, %p1; and.pred %p3, %p3, !%p1;\n"
        "or.pred %p4, %p2, %p3; mov.u32 %r5, 0; setp.gt.u32 %p5, %r1, 20; @!%p5 bra $vote;\n"
        "$more: add.u32 %r5, %r5, 1; setp.lt.u32 %p6, %r5, %r1; @%p6 bra $more;\n"
        "$vote: vote.sync.ballot.b32 %r0, %p4, %r3;\n" STORE_R0);
    p->block[0] = 64;
    check_threads(p, votes_of_halves);
}

static uint32_t those_left(uint32_t t)
{
    return t < 8 ? 0 : 24;
}

/* Lanes that exit are waited for no longer, by shuffles, votes and barriers. */
static void exits_free_the_others(void **state)
{
    (void)state;
    program *p = program_make("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 8; @!%p1 bra $stay;\n"
                              "mov.u32 %r2, 0;\n"
                              "$more: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 50; @%p2 bra $more; exit;\n"
                              "$stay: bar.warp.sync -1; setp.eq.u32 %p3, %r1, %r1;\n"
                              "vote.sync.ballot.b32 %r3, %p3, -1; popc.b32 %r0, %r3; bar.sync 0;\n" STORE_R0);
    check_threads(p, those_left);
}

static uint32_t two_threads_meet(uint32_t t)
{
    return t == 0 ? 77 : 0;
}

/* A lane spins until another lane of its warp, which stands behind it in the program, has stored. */
static void lanes_wait_for_lanes(void **state)
{
    (void)state;
    program *p = program_make("mov.u32 %r1, %tid.x; mov.u32 %r0, 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra $other;\n"
                              "$spin: ld.volatile.global.u32 %r0, [%d9+400]; setp.eq.u32 %p2, %r0, 0; @%p2 bra $spin;\n"
                              "bra $end;\n"
                              "$other: setp.ne.u32 %p3, %r1, 5; @%p3 bra $end; st.volatile.global.u32 [%d9+400], 77;\n"
                              "$end:\n" STORE_R0);
    check_threads(p, two_threads_meet);
}

static uint32_t guarded_threads(uint32_t t)
{
    return t % 32 < 4 ? 10 : t % 32;
}

/* Instructions with guards touch nothing of the other lanes; a convergent one takes the lanes of its mask. */
static void guards_hold(void **state)
{
    (void)state;
    program *p =
        program_make("mov.u32 %r1, %laneid; mov.u32 %r0, %r1; setp.lt.u32 %p1, %r1, 4;\n"
                     "@%p1 mov.u32 %r0, 5; @%p1 add.u32 %r0, %r0, %r0; @!%p1 bar.warp.sync 0xfffffff0;\n" STORE_R0);
    p->block[0] = 64;
    check_threads(p, guarded_threads);
}

/* Registers of braces hide those around them and end with them. */
static void scopes_hide_names(void **state)
{
    (void)state;
    const operation operations[] = {
        {"mov.u32 %r0, 1; { .reg .b32 %r0; .reg .b16 low, high; mov.u32 %r0, 2; mov.b32 {low, high}, %r0; }", 0, 0, 0,
         1},
        {"mov.u32 %r0, 9; { .reg .pred p; setp.ne.b32 p, %r1, 0; selp.b32 %r0, 3, 4, p; }\n{.reg .b32 p;\nmov.u32 p, "
         "5;}",
         1, 0, 0, 3},
    };
    check_operations(operations, COUNT_OF(operations));
}

/* A hundred values, each used once, need few numbers; what a wgmma reads and writes late shares none. */
static void values_share_registers(void **state)
{
    (void)state;
    char text[TEXT_BYTES], error[ERROR_BYTES];
    int length = snprintf(text, sizeof text,
                          ".version 9.0\n.target sm_90a\n.visible .entry test(.param .u64 p)\n{\n"
                          ".reg .b32 %%r<200>; .reg .f32 %%f<20>; .reg .b64 %%d<20>; .reg .pred %%p<2>;\n"
                          "mov.u32 %%r0, 1;\n");
    for (int k = 0; k < 100; k++)
        length += snprintf(text + length, sizeof text - (size_t)length, "add.u32 %%r%d, %%r%d, 1;\n", k + 1, k);
    for (int k = 0; k < 4; k++)
        length +=
            snprintf(text + length, sizeof text - (size_t)length,
                     "mov.f32 %%f%d, 0f00000000; mov.f32 %%f%d, 0f00000000; mov.f32 %%f%d, 0f00000000;\n"
                     "mov.f32 %%f%d, 0f00000000; mov.b64 %%d0, 0; setp.eq.u32 %%p1, 0, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%%f%d, %%f%d, %%f%d, %%f%d}, %%d0, %%d0, "
                     "%%p1, 1, 1, 0, 0;\n",
                     4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3, 4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3);
    snprintf(text + length, sizeof text - (size_t)length, "ret;\n}\n");
    ptxvm_module *module = ptxvm_load(text, error, sizeof error);
    if (!module)
        fail_msg("%s", error);
    assert_in_range(find_entry(module, "test")->register_count, 18, 24);
    uint64_t taken = 0;
    for (int n = 0; n < module->instruction_count; n++) {
        const operand *sums = &module->instructions[n].operands[0];
        for (int k = 0; k < sums->count; k++) {
            assert_int_equal(taken >> sums->items[k].reg & 1, 0);
            taken |= 1ULL << sums->items[k].reg;
        }
    }
    assert_int_equal(__builtin_popcountll(taken), 16);
    ptxvm_free(module);
}

static uint32_t kept_from_the_first_round(uint32_t t)
{
    return 100 + t;
}

/* A register that only a guarded instruction of a loop's block writes keeps its value from round to round. */
static void values_outlive_rounds(void **state)
{
    (void)state;
    program *p = program_make("{ .reg .b32 kept, a, b; mov.u32 %r1, %tid.x; mov.u32 %r2, 0;\n"
                              "$round: setp.eq.u32 %p1, %r2, 0; add.u32 a, %r1, 50; add.u32 b, a, 50;\n"
                              "@%p1 mov.u32 kept, b; add.u32 a, %r2, 7; add.u32 b, a, 7; mov.u32 %r0, kept;\n"
                              "add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 3; @%p2 bra $round; }\n" STORE_R0);
    check_threads(p, kept_from_the_first_round);
}

/* ---- Warps and CTAs ---- */

/* Every warp writes its number where a counter says; the order is the seed's. */
static void seeds_repeat(void **state)
{
    (void)state;
    program *p = program_make(
        "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.u32 %r3, %laneid; setp.ne.u32 %p1, %r3, 0; @%p1 bra $end;\n"
        "mov.u32 %r5, 0; $more: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 100; @%p2 bra $more;\n"
        "mov.u32 %r7, %ctaid.x; mad.lo.u32 %r2, %r7, 8, %r2;\n"
        "atom.global.add.u32 %r4, [%d9], 1; mul.wide.u32 %d1, %r4, 4; add.u64 %d1, %d1, %d9;\n"
        "st.global.u32 [%d1+4], %r2;\n$end:");
    p->block[0] = 256;
    p->grid[0] = 3;
    uint32_t first[25];
    int differing = 0;
    for (int round = 0; round < 10; round++) {
        p->seed = (uint64_t)round;
        program_ok(p);
        memcpy(first, p->out, sizeof first);
        const uint64_t instructions = p->counts.instructions;
        uint32_t seen = 0;
        for (int k = 0; k < 24; k++)
            seen |= 1U << p->out[1 + k];
        assert_int_equal(seen, 0xffffff);
        program_ok(p);
        assert_memory_equal(p->out, first, sizeof first);
        assert_int_equal(p->counts.instructions, instructions);
        p->seed = (uint64_t)round + 1;
        program_ok(p);
        differing += memcmp(p->out, first, sizeof first) != 0;
    }
    assert_in_range(differing, 8, 10);
    free(p);
}

/* CTA k waits for a flag of CTA k - 1 (or k + 1): all of them are alive together, whichever way round. */
static void ctas_wait_for_each_other(void **state)
{
    (void)state;
    static const char body[] = "mov.u32 %r1, %ctaid.x; add.u32 %r2, %r1, %r10; setp.ge.u32 %p1, %r2, 40;\n"
                               "mul.wide.u32 %d1, %r2, 4; add.u64 %d1, %d1, %d9; @%p1 bra $mine;\n"
                               "$spin: ld.acquire.gpu.global.u32 %r3, [%d1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra $spin;\n"
                               "$mine: mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d9;\n"
                               "st.release.gpu.global.u32 [%d2], 1;";
    for (int ahead = 0; ahead < 2; ahead++) {
        char text[1024];
        snprintf(text, sizeof text, "mov.u32 %%r10, %d;\n%s", ahead ? 1 : -1, body);
        program *p = program_make(text);
        p->grid[0] = 40;
        p->sm_count = 2; /* with 20 CTAs each */
        program_ok(p);
        for (int k = 0; k < 40; k++)
            assert_int_equal(p->out[k], 1);
        free(p);
    }
}

/* A lane's groups of copies are its own, though lanes commit at different times. */
static void groups_belong_to_lanes(void **state)
{
    (void)state;
    program *p = program_make(
        "mov.u32 %r1, %laneid; mul.wide.u32 %d1, %r1, 16; add.u64 %d1, %d1, %d9; shl.b32 %r2, %r1, 4;\n"
        "mov.u32 %r3, memory; add.u32 %r2, %r2, %r3; add.u32 %r4, %r1, 500; st.global.v4.u32 [%d1], {%r4, %r4, %r4, "
        "%r4};\n"
        "cp.async.cg.shared.global [%r2], [%d1], 16; setp.lt.u32 %p1, %r1, 9; @%p1 bra $first;\n"
        "cp.async.commit_group; cp.async.commit_group; bra $both;\n"
        "$first: cp.async.commit_group;\n"
        "$both: @%p1 cp.async.wait_group 0; @!%p1 cp.async.wait_group 1; bar.warp.sync -1; ld.shared.u32 %r0, [%r2];\n"
        "bar.warp.sync -1;\n" STORE_R0);
    p->declarations = ".extern .shared .align 16 .b8 memory[];\n";
    p->dynamic_smem_bytes = 512;
    for (p->seed = 0; p->seed < 40; p->seed++) {
        program_ok(p);
        for (uint32_t t = 0; t < 32; t++)
            assert_int_equal(p->out[t], 500 + t);
    }
    free(p);
}

/* Shared variables of module and entry lie one behind the other, and the .extern one behind all. */
static void shared_variables_have_places(void **state)
{
    (void)state;
    program *p = program_make(".shared .align 2 .b8 mine[6];\n"
                              "mov.u32 %r1, first; mov.u32 %r2, second; mov.u32 %r3, mine; mov.u32 %r4, memory;\n"
                              "mov.u32 %r5, memory+12; mov.u32 %r6, 9; st.shared.u32 [memory+12], %r6; ld.shared.u32 "
                              "%r7, [%r4+12];\n"
                              "st.global.v4.u32 [%d9], {%r1, %r2, %r3, %r4}; st.global.v2.u32 [%d9+16], {%r5, %r7};");
    p->declarations =
        ".shared .align 4 .b8 first[6];\n.shared .b64 second;\n.extern .shared .align 128 .b8 memory[];\n";
    p->dynamic_smem_bytes = 64;
    program_fails(p, "behind the first instruction"); /* the head has some */
    p->body += strlen(".shared .align 2 .b8 mine[6];\n");
    p->declarations = ".shared .align 4 .b8 first[6];\n.shared .b64 second;\n.shared .align 2 .b8 mine[6];\n"
                      ".extern .shared .align 128 .b8 memory[];\n";
    program_ok(p);
    const uint32_t wanted[] = {0, 8, 16, 128, 140, 9};
    assert_memory_equal(p->out, wanted, sizeof wanted);
    free(p);
}

/* Global variables begin as zero and live as long as their module, from launch to launch. */
static void global_variables_stay(void **state)
{
    (void)state;
    char text[TEXT_BYTES], error[ERROR_BYTES];
    program *p = program_make("mov.u64 %d1, number; atom.global.add.u32 %r1, [%d1], 1; ld.global.u32 %r2, [bytes+4];\n"
                              "st.global.u32 [%d9], %r1; st.global.u32 [%d9+4], %r2; st.global.u32 [bytes+4], 7;\n");
    snprintf(text, sizeof text, head, ".global .align 8 .b8 bytes[12];\n.visible .global .u32 number;\n", p->body);
    ptxvm_module *module = ptxvm_load(text, error, sizeof error);
    if (!module)
        fail_msg("%s", error);
    p->block[0] = 1;
    for (uint32_t k = 0; k < 3; k++) {
        assert_int_equal(launch_program(p, module), 0);
        assert_int_equal(p->out[0], k);
        assert_int_equal(p->out[1], k ? 7 : 0);
    }
    ptxvm_free(module);
    p->body = "st.global.u32 [bytes+12], 7;";
    p->declarations = ".global .align 8 .b8 bytes[12];\n";
    program_fails(p, "in no allocation");
    free(p);
}

/* ---- What goes wrong ---- */

static void deadlocks_are_told(void **state)
{
    (void)state;
    program *p = program_make("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra $other;\n"
                              "bar.sync 3, 128; bra $end;\n$other: bar.sync 4, 64;\n$end:");
    p->block[0] = 128;
    program_fails(p,
                  "deadlock, waiting: CTA (0,0,0) warp 0 lanes ffffffff at line 14 for barrier 4 (32 of 64 threads)");
    program_fails(p, "at line 13 for barrier 3 (");
    program_fails(p, "of 128 threads)");
    free(p);
    p = program_make("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 5; @%p1 bra $other;\n"
                     "bar.warp.sync -1; bra $end;\n$other: bar.sync 0;\n$end:");
    program_fails(p, "lanes 0000001f stand here, lanes ffffffe0 at line 13: no lane can go on");
    program_fails(p, "CTA (0,0,0) warp 0, PTX line 14, `bar.sync 0`: ");
    free(p);
    p = program_make("$spin: ld.volatile.global.u32 %r1, [%d9]; setp.eq.u32 %p1, %r1, 0; @%p1 bra $spin;");
    program_fails(p, "spins");
    free(p);
    p = program_make("bar.warp.sync 0xfffffffe;");
    program_fails(p, "lane 0 is not in its own mask fffffffe");
    free(p);
    p = program_make("mov.u32 %r1, %laneid; setp.eq.u32 %p1, %r1, 7; @%p1 trap;");
    program_fails(p, "PTX line 12, `@%p1 trap`: lanes 00000080 trap");
    free(p);
}

static void launches_are_checked(void **state)
{
    (void)state;
    program *p = program_make("");
    p->block[1] = 33;
    program_fails(p, "a block of 32 x 33 x 1 threads: 1 to 1024 are possible");
    p->block[1] = 0;
    program_fails(p, "32 x 0 x 1");
    p->block[1] = 1;
    p->grid[2] = 0;
    program_fails(p, "a grid of 1 x 1 x 0 CTAs");
    p->grid[2] = 1;
    p->dynamic_smem_bytes = 232449;
    program_fails(p, "232449 bytes of shared memory: 232448 are possible");
    p->dynamic_smem_bytes = 0;
    p->cluster = 2;
    program_fails(p, "clusters of 2 CTAs in a grid 1 wide");
    p->cluster = 1;
    p->sm_count = 0;
    program_fails(p, "0 SMs");
    free(p);
}

static void texts_are_refused(void **state)
{
    (void)state;
#define ENTRY ".version 9.0\n.visible .entry e(.param .u64 p)\n{\n.reg .b32 %r<4>; .reg .pred %p<2>;\n"
    const struct {
        const char *text, *wanted;
    } texts[] = {
        {"", "line 1: the module has no entry"},
        {ENTRY "frobnicate.b32 %r1;\n}", "line 5: unknown instruction frobnicate.b32"},
        {ENTRY "add.s32 %r1, %r2;\n}",
         "line 5: unknown instruction add.s32, or not with these operands: `add.s32 %r1, %r2`"},
        {ENTRY "add.s32 {%r1, %r2}, %r2, %r3;\n}", "line 5: unknown instruction add.s32"},
        {ENTRY "add.s32 %r1, %tid.x, 1;\n}", "line 5: special registers are known in mov only"},
        {ENTRY "add.s32 %r1, %r4, 1;\n}", "line 5: nothing is called %r4"},
        {ENTRY "add.s32 %r1, %r01, 1;\n}", "line 5: nothing is called %r01"},
        {ENTRY "mov.u32 %r1, %tid.w;\n}", "line 5: nothing is called %tid"},
        {ENTRY "mov.u32 %r1, 12x;\n}", "line 5: not a number: 12x"},
        {ENTRY "mov.u32 %r1, 99999999999999999999;\n}", "line 5: not a number"},
        {ENTRY "mov.f32 %r1, 0f3F80;\n}", "line 5: 8 hexadecimal digits expected behind 0f"},
        {ENTRY "mov.u32 %r1, 1\n}", "line 6: ';' expected, not '}'"},
        {ENTRY "mov.u32 %r1, 1;", "line 5: the text ends within an entry"},
        {ENTRY "mov.u32 %r1,", "line 5: an operand expected"},
        {ENTRY "@%r1 mov.u32 %r1, 1;\n}", "line 5: a predicate expected behind '@'"},
        {ENTRY "bra $nowhere;\n}", "line 5: there is no label $nowhere"},
        {ENTRY "$a:\n$a: ret;\n}", "line 6: $a is declared twice"},
        {ENTRY "ld.global.u32 %r1, [$a];\n}", "line 5: nothing is called $a"},
        {ENTRY "ld.global.u32 %r1, [{%r1}];\n}", "line 5: "},
        {ENTRY "mov.b64 %r1, {{%r1}};\n}", "line 5: an operand expected, not '{'"},
        {ENTRY ".local .b8 stack[8];\n}", "line 5: unknown directive .local"},
        {ENTRY ".reg .b128 %q<2>;\n}", "line 5: unknown type .b128"},
        {ENTRY ".reg .b32 %q<70000>;\n}", "line 5: 70000 is not within [0, 65536)"},
        {ENTRY "call foo;\n}", "line 5: nothing is called foo"},
        {ENTRY "st.global.u32 [%r1], %r2, %r2, %r2, %r2, %r2, %r2, %r2, %r2;\n}", "line 5: more than 8 operands"},
        {".visible .func f()\n{\n}", "line 1: unknown directive .func"},
        {".const .b32 g;", "line 1: unknown directive .const"},
        {".global .b32 g = 5;", "line 1: ';' expected, not '='"},
        {".global .b8 g[];", "line 1: a variable without a size"},
        {".address_size 32\n", "line 1: addresses of 32 bits"},
        {".shared .align 3 .b8 x[4];", "line 1: 3 is no alignment"},
        {".shared .b8 x[999999];", "line 1: 999999 is not within"},
        {".shared .b8 x[200000];\n.shared .b8 y[200000];", "line 2: more than 233472 bytes of shared memory"},
        {".shared .b8 x[4];\n.shared .b8 x[4];", "line 2: x is declared twice"},
        {".visible .entry e(.param .u64 p, .param .u64 p) { ret; }", "line 1: p is declared twice"},
        {"}", "line 1: a directive expected, not '}'"},
    };
#undef ENTRY
    for (size_t k = 0; k < COUNT_OF(texts); k++) {
        char error[ERROR_BYTES] = "";
        ptxvm_module *module = ptxvm_load(texts[k].text, error, sizeof error);
        if (module || strncmp(error, texts[k].wanted, strlen(texts[k].wanted)) != 0)
            fail_msg("%s\n%s\nwanted: %s", texts[k].text, error, texts[k].wanted);
    }
}

static void entries_are_described(void **state)
{
    (void)state;
    char error[ERROR_BYTES];
    ptxvm_module *module = ptxvm_load(".version 9.0\n"
                                      ".visible .entry a(.param .u32 x, .param .align 64 .b8 y[70], .param .u8 z)\n"
                                      ".maxntid 96, 2, 1\n.minnctapersm 1\n{ .shared .b32 s; ret; }\n"
                                      ".entry b { }\n",
                                      error, sizeof error);
    assert_non_null(module);
    ptxvm_needs needs;
    assert_int_equal(ptxvm_describe(module, "a", &needs), 0);
    assert_int_equal(needs.parameter_count, 3);
    assert_int_equal(needs.parameter_bytes[1], 70);
    assert_int_equal(needs.static_smem_bytes, 4);
    assert_int_equal(needs.max_threads, 192);
    const entry *a = find_entry(module, "a");
    assert_int_equal(a->parameters[1].offset, 64);
    assert_int_equal(a->parameters[2].offset, 134);
    assert_int_equal(ptxvm_describe(module, "b", &needs), 0);
    assert_int_equal(needs.parameter_count, 0);
    assert_int_equal(ptxvm_describe(module, "c", &needs), -1);
    assert_true(ptxvm_has_entry(module, "b") && !ptxvm_has_entry(module, "c"));
    ptxvm_free(module);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(integers_calculate),
        cmocka_unit_test(bits_are_moved),
        cmocka_unit_test(comparisons_know_nan),
        cmocka_unit_test(comparisons_combine),
        cmocka_unit_test(floats_calculate),
        cmocka_unit_test(halves_round),
        cmocka_unit_test(bfloats_round),
        cmocka_unit_test(eighths_round),
        cmocka_unit_test(short_arithmetic_rounds_once),
        cmocka_unit_test(conversions_round_and_saturate),
        cmocka_unit_test(random_floats_agree_with_c),
        cmocka_unit_test(threads_know_their_place),
        cmocka_unit_test(loops_part_and_meet),
        cmocka_unit_test(shuffles_gather_lanes),
        cmocka_unit_test(halves_vote_apart),
        cmocka_unit_test(exits_free_the_others),
        cmocka_unit_test(lanes_wait_for_lanes),
        cmocka_unit_test(guards_hold),
        cmocka_unit_test(scopes_hide_names),
        cmocka_unit_test(values_share_registers),
        cmocka_unit_test(values_outlive_rounds),
        cmocka_unit_test(seeds_repeat),
        cmocka_unit_test(ctas_wait_for_each_other),
        cmocka_unit_test(groups_belong_to_lanes),
        cmocka_unit_test(shared_variables_have_places),
        cmocka_unit_test(global_variables_stay),
        cmocka_unit_test(deadlocks_are_told),
        cmocka_unit_test(launches_are_checked),
        cmocka_unit_test(texts_are_refused),
        cmocka_unit_test(entries_are_described),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
