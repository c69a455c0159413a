/* The PTX machine's memory, barriers and copy engine: small programs whose results, or whose errors, are known. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

#include "ptxvm/ptxvm.h"

enum {
    WORDS = 4096,
    SMEM_BYTES = 64 * 1024,
    TEXT_BYTES = 64 * 1024
};

/* The one allocation of a program: its parameter is the address of `in`. */
typedef struct arrays {
    tensor_map map;
    _Alignas(128) uint32_t in[WORDS];
    uint32_t out[WORDS];
} arrays;

typedef struct trial {
    unsigned threads;
    uint32_t ctas, cluster;
    uint64_t seed;
    int eager;
    arrays *memory;
} trial;

static trial trial_of(unsigned threads)
{
    trial t = {.threads = threads, .ctas = 1, .seed = 1};
    if (posix_memalign((void **)&t.memory, 128, sizeof(arrays)) != 0)
        abort();
    memset(t.memory, 0, sizeof(arrays));
    for (uint32_t i = 0; i < WORDS; i++)
        t.memory->in[i] = 1000 + i;
    return t;
}

static int in_memory(void *user, uint64_t address, size_t bytes)
{
    const uint64_t first = (uint64_t)(uintptr_t)user;
    return address >= first && address + bytes <= first + sizeof(arrays);
}

/* What a body may use: %r0 is the thread, %rd0 in, %rd1 out, %rd2 the map, %rd3 out + 4 * the thread; the others of
 * %p, %rs, %r, %f, %rd are its own; shared memory is smem. */
static const char prologue[] = ".version 9.0\n"
                               ".target sm_90a\n"
                               ".address_size 64\n"
                               ".extern .shared .align 1024 .b8 smem[];\n"
                               ".global .align 8 .u32 kept[2];\n"
                               ".visible .entry test(.param .u64 test_param_0)\n"
                               "{\n"
                               ".reg .pred %p<8>;\n"
                               ".reg .b16 %rs<8>;\n"
                               ".reg .f32 %f<16>;\n"
                               ".reg .b32 %r<64>;\n"
                               ".reg .b64 %rd<32>;\n"
                               "ld.param.u64 %rd2, [test_param_0];\n"
                               "add.s64 %rd0, %rd2, 128;\n"
                               "add.s64 %rd1, %rd0, 16384;\n"
                               "mov.u32 %r0, %tid.x;\n"
                               "mul.wide.u32 %rd3, %r0, 4;\n"
                               "add.s64 %rd3, %rd1, %rd3;\n";

static int run_in(const trial *t, const char *body, char *error, size_t error_bytes)
{
    char *text = malloc(TEXT_BYTES);
    assert_non_null(text);
    assert_true(snprintf(text, TEXT_BYTES, "%s%s\nret;\n}\n", prologue, body) < TEXT_BYTES);
    ptxvm_module *module = ptxvm_load(text, error, error_bytes);
    free(text);
    if (module == NULL)
        return -1;
    void *first = t->memory;
    void *const parameters[] = {&first};
    const ptxvm_launch launch = {.module = module,
                                 .entry = "test",
                                 .grid = {t->ctas, 1, 1},
                                 .block = {t->threads, 1, 1},
                                 .cluster = t->cluster,
                                 .dynamic_smem_bytes = SMEM_BYTES,
                                 .parameters = parameters,
                                 .sm_count = 4,
                                 .is_allocated = in_memory,
                                 .user = t->memory,
                                 .seed = t->seed,
                                 .eager = t->eager};
    const int result = ptxvm_run(&launch, NULL, error, error_bytes);
    ptxvm_free(module);
    return result;
}

static void run(const trial *t, const char *body)
{
    char error[1024] = "";
    if (run_in(t, body, error, sizeof error) != 0)
        fail_msg("%s\n%s", error, body);
}

static void refuses_in(const trial *t, const char *body, const char *fragment)
{
    char error[1024] = "";
    if (run_in(t, body, error, sizeof error) != -1 || strstr(error, fragment) == NULL)
        fail_msg("\"%s\" does not say \"%s\"\n%s", error, fragment, body);
}

/* The body must fail and say so. */
static void refuses(unsigned threads, const char *body, const char *fragment)
{
    trial t = trial_of(threads);
    refuses_in(&t, body, fragment);
    free(t.memory);
}

/* ---- Loads, stores, atomics ---- */

static void loads_and_stores_move_what_they_name(void **state)
{
    (void)state;
    trial t = trial_of(1);
    t.memory->in[0] = 0x80FF7F01;
    t.memory->in[1] = 0xFFFFFFFE;
    run(&t, "ld.global.u8 %rs1, [%rd0+2]; cvt.u32.u16 %r1, %rs1; st.global.u32 [%rd1], %r1;\n"
            "ld.global.s8 %rs1, [%rd0+2]; cvt.s32.s16 %r1, %rs1; st.global.u32 [%rd1+4], %r1;\n"
            "ld.global.u16 %rs1, [%rd0+2]; cvt.u32.u16 %r1, %rs1; st.global.u32 [%rd1+8], %r1;\n"
            "ld.global.s32 %rd5, [%rd0+4]; st.global.u64 [%rd1+16], %rd5;\n"
            "ld.global.nc.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0+16];\n"
            "st.shared.v2.u32 [smem+8], {%r3, %r4}; ld.shared.u64 %rd5, [smem+8]; st.global.u64 [%rd1+24], %rd5;\n"
            "st.global.v4.b32 [%rd1+32], {%r4, %r3, %r2, %r1};\n"
            "ld.param.u64 %rd6, [test_param_0]; st.global.u64 [%rd1+48], %rd6;\n");
    const uint32_t *out = t.memory->out;
    assert_int_equal(out[0], 0xFF);
    assert_int_equal(out[1], 0xFFFFFFFF);
    assert_int_equal(out[2], 0x80FF);
    assert_int_equal(out[4], 0xFFFFFFFE);
    assert_int_equal(out[5], 0xFFFFFFFF); /* the sign goes into the upper half */
    assert_int_equal(out[6], 1006);
    assert_int_equal(out[7], 1007);
    assert_int_equal(out[8], 1007);
    assert_int_equal(out[11], 1004);
    uint64_t parameter;
    memcpy(&parameter, out + 12, sizeof parameter);
    assert_true(parameter == (uint64_t)(uintptr_t)t.memory);
    free(t.memory);
}

static void addresses_are_checked(void **state)
{
    (void)state;
    refuses(1, "ld.global.u32 %r1, [%rd2+-4];", "in no allocation");
    refuses(1, "st.global.v4.u32 [%rd1+16376], {%r0, %r0, %r0, %r0};", "not a multiple of 16");
    refuses(1, "st.global.u32 [%rd1+16384], %r0;", "in no allocation");
    refuses(1, "ld.global.v2.u32 {%r1, %r2}, [%rd0+4];", "not a multiple of 8");
    refuses(1, "ld.shared.u32 %r1, [smem+65536];", "the CTA has 65536");
    refuses(1, "ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [smem+65528];", "65528");
    refuses(1, "ld.param.u64 %rd5, [test_param_0+8];", "parameters");
    refuses(1, "mov.u64 %rd5, 0; ld.global.u8 %rs1, [%rd5];", "in no allocation");
    refuses(1, "cp.async.cg.shared.global [smem+8], [%rd0], 16;", "not a multiple of 16");
    refuses(1, "cp.async.cg.shared.global [smem], [%rd0+8], 16;", "not a multiple of 16");
    refuses(1, "cp.async.cg.shared.global [smem], [%rd1+16384], 16;", "in no allocation");
    refuses(1, "ld.local.u32 %r1, [smem];", "ld.local.u32");
    refuses(1, "st.global.u32 [kept+8], %r0;", "in no allocation");
}

static void variables_hold_what_is_stored(void **state)
{
    (void)state;
    trial t = trial_of(32);
    run(&t, "atom.global.add.u32 %r1, [kept+4], 1; bar.warp.sync -1; mov.u64 %rd5, kept; cvta.global.u64 %rd6, %rd5;\n"
            "ld.u32 %r2, [%rd6+4]; ld.global.u32 %r3, [kept]; add.s32 %r2, %r2, %r3; st.global.u32 [%rd3], %r2;");
    assert_int_equal(t.memory->out[0], 32);
    assert_int_equal(t.memory->out[31], 32);
    free(t.memory);
}

static void atomics_return_what_was_there(void **state)
{
    (void)state;
    trial t = trial_of(64);
    t.memory->out[64] = 0;
    run(&t, "mov.u32 %r1, 63; atom.global.inc.u32 %r2, [%rd1+256], %r1; st.global.u32 [%rd3], %r2;\n"
            "atom.global.add.u32 %r3, [%rd1+260], 2; red.global.max.u32 [%rd1+264], %r0;\n"
            "atom.acq_rel.gpu.global.min.s32 %r3, [%rd1+268], -5; mov.f32 %f1, 0f3F000000;\n"
            "red.global.add.f32 [%rd1+272], %f1; atom.global.exch.b32 %r4, [%rd1+276], 9;\n"
            "atom.global.cas.b32 %r4, [%rd1+280], 0, 77; red.global.or.b32 [%rd1+284], %r0;\n");
    uint32_t *out = t.memory->out;
    int seen[64] = {0};
    for (int i = 0; i < 64; i++)
        seen[out[i]]++;
    for (int i = 0; i < 64; i++)
        assert_int_equal(seen[i], 1);
    assert_int_equal(out[64], 0); /* 64 increments with the limit 63 */
    assert_int_equal(out[65], 128);
    assert_int_equal(out[66], 63);
    assert_int_equal((int32_t)out[67], -5);
    assert_int_equal(out[68], 0x42000000); /* 32 */
    assert_int_equal(out[69], 9);
    assert_int_equal(out[70], 77);
    assert_int_equal(out[71], 63);
    free(t.memory);
}

/* A vector's floats are added each for itself, by every lane. */
static void vectors_are_added_to(void **state)
{
    (void)state;
    trial t = trial_of(64);
    for (int i = 0; i < 8; i++)
        t.memory->out[i] = 0;
    run(&t, "mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0fBF000000; mov.f32 %f3, 0f40000000; mov.f32 %f4, 0f00000000;\n"
            "red.relaxed.gpu.global.add.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};\n"
            "red.global.add.v2.f32 [%rd1+24], {%f2, %f1};\n");
    const uint32_t *out = t.memory->out;
    static const uint32_t wanted[8] = {0x42800000, 0xC2000000, 0x43000000, 0, 0, 0, 0xC2000000, 0x42800000};
    for (int i = 0; i < 8; i++)
        assert_int_equal(out[i], wanted[i]);
    free(t.memory);
    refuses(1, "red.global.add.v4.f32 [%rd1+8], {%f1, %f1, %f1, %f1};", "not a multiple of 16");
    refuses(1, "red.global.add.v4.f32 [%rd1], {%f1, %f1};", "unknown instruction red");
    refuses(1, "red.shared.add.v4.f32 [smem], {%f1, %f1, %f1, %f1};", "unknown instruction red");
    refuses(1, "red.global.add.v2.u32 [%rd1], {%r1, %r1};", "unknown instruction red");
    refuses(1, "atom.global.add.v2.f32 {%f1, %f2}, [%rd1], {%f1, %f2};", "unknown instruction atom");
}

/* ---- cp.async ---- */

/* Copies words 4..7 and 8..9 (the rest zero) and reads the fifth of them, with what stands between. */
static uint32_t copied(const char *between, int index, int eager, uint64_t seed)
{
    char body[1024];
    snprintf(body, sizeof body,
             "cp.async.cg.shared.global [smem], [%%rd0+16], 16;\n"
             "mov.u32 %%r1, 8; cp.async.cg.shared.global [smem+16], [%%rd0+32], 16, %%r1;\n"
             "mov.u32 %%r1, 0; mov.u64 %%rd5, 16; cp.async.ca.shared.global [smem+32], [%%rd5], 16, %%r1;\n"
             "%s\nld.shared.u32 %%r2, [smem+%d]; st.global.u32 [%%rd1], %%r2;",
             between, 4 * index);
    trial t = trial_of(1);
    t.eager = eager;
    t.seed = seed;
    run(&t, body);
    const uint32_t got = t.memory->out[0];
    free(t.memory);
    return got;
}

static void copies_are_late_until_they_are_waited_for(void **state)
{
    (void)state;
    static const char waited[] = "cp.async.commit_group; cp.async.wait_group 0;";
    assert_int_equal(copied(waited, 1, 0, 1), 1005);
    assert_int_equal(copied("cp.async.wait_all;", 1, 0, 1), 1005);
    assert_int_equal(copied(waited, 5, 0, 1), 1009);
    assert_int_equal(copied(waited, 6, 0, 1), 0);
    assert_int_equal(copied(waited, 9, 0, 1), 0); /* nothing is read there, so the address may be none */
    assert_int_equal(copied("", 1, 1, 1), 1005);
    int poisoned = 0;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        poisoned += copied("cp.async.commit_group; cp.async.wait_group 1;", 1, 0, seed) == UINT32_MAX;
        poisoned += copied("", 1, 0, seed) == UINT32_MAX;
    }
    assert_true(poisoned >= 8);
}

static void copies_arrive_on_a_barrier(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        trial t = trial_of(64);
        t.seed = seed;
        run(&t, "setp.ne.s32 %p1, %r0, 0; @%p1 bra $ready;\n"
                "mbarrier.init.shared::cta.b64 [smem+4096], 64;\n"
                "$ready: bar.sync 0;\n"
                "shl.b32 %r1, %r0, 4; cvt.u64.u32 %rd5, %r1; add.s64 %rd5, %rd0, %rd5;\n"
                "cp.async.cg.shared.global [%r1], [%rd5], 16;\n"
                "cp.async.mbarrier.arrive.noinc.shared.b64 [smem+4096];\n"
                "$wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [smem+4096], 0; @!%p2 bra $wait;\n"
                "xor.b32 %r2, %r1, 528; ld.shared.u32 %r3, [%r2]; st.global.u32 [%rd3], %r3;");
        for (uint32_t i = 0; i < 64; i++)
            assert_int_equal(t.memory->out[i], 1000 + 4 * (i ^ 33));
        free(t.memory);
    }
}

/* ---- Lanes of a warp ---- */

static void lanes_read_each_other(void **state)
{
    (void)state;
    static const char *const modes[] = {"up", "down", "bfly", "idx"};
    static const struct {
        int b, c;
    } cases[] = {{1, 0x1F}, {5, 0x1F}, {16, 0x1F}, {3, 0x181F}, {2, 0x1807}, {0, 0}, {7, 0x1C03}, {31, 0x1F}};
    for (size_t m = 0; m < COUNT_OF(modes); m++)
        for (size_t k = 0; k < COUNT_OF(cases); k++) {
            const int b = cases[k].b, c = m == 0 ? cases[k].c & 0x1F00 : cases[k].c, segment = c >> 8 & 31;
            char body[512];
            snprintf(body, sizeof body,
                     "add.s32 %%r1, %%r0, 100; shfl.sync.%s.b32 %%r2|%%p1, %%r1, %d, %d, -1;\n"
                     "selp.u32 %%r3, 1000, 0, %%p1; add.s32 %%r2, %%r2, %%r3; st.global.u32 [%%rd3], %%r2;",
                     modes[m], b, c);
            trial t = trial_of(32);
            run(&t, body);
            for (int lane = 0; lane < 32; lane++) { /* as the PTX ISA has it */
                const int max_lane = (lane & segment) | (c & 31 & ~segment), min_lane = lane & segment;
                const int wanted = m == 0   ? lane - b
                                   : m == 1 ? lane + b
                                   : m == 2 ? lane ^ b
                                            : (min_lane | (b & ~segment));
                const int is_inside = m == 0 ? wanted >= max_lane : wanted <= max_lane;
                assert_int_equal(t.memory->out[lane], 100 + (is_inside ? 1000 + wanted : lane));
            }
            free(t.memory);
        }
    refuses(32, "shfl.sync.idx.b32 %r1, %r0, 0, 31, 65535;", "mask");
}

static void lanes_vote(void **state)
{
    (void)state;
    trial t = trial_of(32);
    run(&t, "setp.gt.u32 %p1, %r0, 28; vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, !%p1, -1;\n"
            "vote.sync.ballot.b32 %r1, %p1, -1; selp.u32 %r2, 1, 0, %p2; selp.u32 %r3, 2, 0, %p3;\n"
            "add.s32 %r1, %r1, %r2; add.s32 %r1, %r1, %r3;\n"
            "elect.sync _|%p4, -1; selp.u32 %r2, 16, 0, %p4; add.s32 %r1, %r1, %r2;\n"
            "activemask.b32 %r4; setp.eq.u32 %p5, %r4, -1; selp.u32 %r2, 32, 0, %p5; add.s32 %r1, %r1, %r2;\n"
            "redux.sync.max.s32 %r5, %r0, -1; add.s32 %r1, %r1, %r5; st.global.u32 [%rd3], %r1;");
    for (uint32_t lane = 0; lane < 32; lane++)
        assert_int_equal(t.memory->out[lane], 0xE0000000u + 1 + (lane == 0 ? 16 : 0) + 32 + 31);
    free(t.memory);
}

/* ---- Named barriers ---- */

static void barriers_hold_threads_back(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++) { /* warp 0 produces, warps 1 and 2 read, warp 3 is not concerned */
        trial t = trial_of(128);
        t.seed = seed;
        run(&t, "shr.u32 %r1, %r0, 5; setp.eq.u32 %p1, %r1, 3; @%p1 bra $end;\n"
                "setp.ne.u32 %p1, %r1, 0; @%p1 bra $reader;\n"
                "shl.b32 %r2, %r0, 2; st.shared.u32 [%r2], %r0; bar.arrive 1, 96; bra.uni $end;\n"
                "$reader: bar.sync 1, 96; and.b32 %r2, %r0, 31; shl.b32 %r2, %r2, 2; ld.shared.u32 %r3, [%r2];\n"
                "st.global.u32 [%rd3], %r3;\n"
                "$end: setp.eq.u32 %p2, %r0, 77; bar.red.or.pred %p3, 0, %p2; bar.red.and.pred %p4, 0, !%p2;\n"
                "bar.red.popc.u32 %r4, 0, !%p2; selp.u32 %r5, 1, 0, %p3; @%p4 add.s32 %r5, %r5, 2;\n"
                "setp.eq.u32 %p5, %r0, 5; @%p5 st.global.u32 [%rd1+2048], %r5; @%p5 st.global.u32 [%rd1+2052], %r4;");
        for (uint32_t i = 32; i < 96; i++)
            assert_int_equal(t.memory->out[i], i % 32);
        assert_int_equal(t.memory->out[512], 1);
        assert_int_equal(t.memory->out[513], 127);
        free(t.memory);
    }
    refuses(64, "setp.lt.u32 %p1, %r0, 32; @%p1 bra $end; bar.sync 1, 64; $end:", "barrier 1 (32 of 64 threads)");
    refuses(64,
            "mov.u32 %r1, 64; setp.lt.u32 %p1, %r0, 32; selp.u32 %r1, 32, 64, %p1; bar.arrive 2, 96;\n"
            "add.s32 %r1, %r1, 64; bar.sync 2, %r1;",
            "barrier");
    refuses(32, "bar.sync 16;", "there are 16");
    refuses(32, "bar.sync 1, 33;", "33 threads");
    /* Threads that have left hold nobody up. */
    trial t = trial_of(64);
    run(&t, "setp.lt.u32 %p1, %r0, 32; @%p1 ret; bar.sync 0; st.global.u32 [%rd3], %r0;");
    assert_int_equal(t.memory->out[63], 63);
    free(t.memory);
}

/* ---- mbarriers ---- */

static void mbarriers_count_phases(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++) { /* warp 0 writes three values, warp 1 reads each before the next */
        trial t = trial_of(64);
        t.seed = seed;
        run(&t, "setp.ne.s32 %p1, %r0, 0; @%p1 bra $ready;\n"
                "mbarrier.init.shared::cta.b64 [smem], 32; mbarrier.init.shared::cta.b64 [smem+8], 1;\n"
                "$ready: bar.sync 0; mov.u32 %r1, 0; setp.ge.u32 %p1, %r0, 32; @%p1 bra $reader;\n"
                "$write: and.b32 %r2, %r1, 1; xor.b32 %r2, %r2, 1;\n"
                "$empty: mbarrier.try_wait.parity.shared::cta.b64 %p2, [smem+8], %r2; @!%p2 bra $empty;\n"
                "shl.b32 %r3, %r0, 2; mad.lo.s32 %r4, %r1, 100, %r0; st.shared.u32 [%r3+64], %r4;\n"
                "mbarrier.arrive.shared::cta.b64 _, [smem]; add.s32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 3;\n"
                "@%p3 bra $write; bra.uni $end;\n"
                "$reader: and.b32 %r2, %r1, 1; mov.u32 %r9, 0;\n"
                "$full: mbarrier.test_wait.parity.shared.b64 %p2, [smem], %r2; @!%p2 bra $full;\n"
                "sub.s32 %r5, 63, %r0; shl.b32 %r5, %r5, 2; ld.shared.u32 %r6, [%r5+64];\n"
                "shl.b32 %r7, %r1, 7; cvt.u64.u32 %rd5, %r7; add.s64 %rd5, %rd3, %rd5;\n"
                "st.global.u32 [%rd5+-128], %r6; bar.warp.sync -1; setp.eq.u32 %p4, %r0, 32;\n"
                "@%p4 mbarrier.arrive.shared::cta.b64 _, [smem+8]; add.s32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 3;\n"
                "@%p3 bra $reader;\n"
                "$end:");
        for (uint32_t i = 0; i < 96; i++)
            assert_int_equal(t.memory->out[i], i / 32 * 100 + 31 - i % 32);
        free(t.memory);
    }
    static const char init[] = "mbarrier.init.shared::cta.b64 [smem], 1;";
    char body[512];
    snprintf(body, sizeof body, "%s %s", init, init);
    refuses(1, body, "lives at shared address 0 already");
    refuses(1, "mbarrier.arrive.shared::cta.b64 _, [smem];", "no mbarrier was initialised");
    refuses(1, "mbarrier.init.shared::cta.b64 [smem+4], 1;", "not a multiple of 8");
    snprintf(body, sizeof body, "%s st.shared.u32 [smem+4], %%r0; mbarrier.arrive.shared::cta.b64 _, [smem];", init);
    refuses(1, body, "was overwritten");
    snprintf(body, sizeof body, "%s mbarrier.arrive.shared::cta.b64 _, [smem], 2;", init);
    refuses(1, body, "2 arrivals");
    snprintf(body, sizeof body, "%s $w: mbarrier.try_wait.parity.shared::cta.b64 %%p1, [smem], 0; @!%%p1 bra $w;",
             init);
    refuses(1, body, "the mbarrier at shared address 0");
    snprintf(body, sizeof body, "%s $w: mbarrier.test_wait.parity.shared::cta.b64 %%p1, [smem], 0; @!%%p1 bra $w;",
             init);
    refuses(1, body, "the mbarrier at shared address 0");
    snprintf(body, sizeof body,
             "%s mbarrier.inval.shared::cta.b64 [smem]; %s mbarrier.arrive.shared::cta.b64 %%rd5, [smem];\n"
             "$w: mbarrier.try_wait.shared::cta.b64 %%p1, [smem], %%rd5; @!%%p1 bra $w; st.global.u32 [%%rd1], 7;",
             init, init);
    trial t = trial_of(1);
    run(&t, body);
    assert_int_equal(t.memory->out[0], 7);
    free(t.memory);
}

/* ---- The copy engine ---- */

enum {
    DIMS = 4
};

/* A tensor of 16-bit elements in `in`: rows of 72 elements, 5 rows, 3 heads, 2 batches, of which 70 elements count. */
static tensor_map map_of(const trial *t, int box_columns, int box_rows, int swizzle)
{
    return (tensor_map){.base = (uint64_t)(uintptr_t)t->memory->in,
                        .extents = {70, 5, 3, 2},
                        .strides = {144, 5 * 144, 3 * 5 * 144},
                        .box = {(uint16_t)box_columns, (uint16_t)box_rows, 2, 1},
                        .rank = DIMS,
                        .element_bytes = 2,
                        .swizzle = (uint8_t)swizzle,
                        .magic = TENSOR_MAP_MAGIC};
}

static uint16_t element_at(const void *array, size_t index)
{
    uint16_t value;
    memcpy(&value, (const unsigned char *)array + 2 * index, sizeof value);
    return value;
}

/* What box element (c, r, h, b) of a box at these coordinates is. */
static uint16_t expected(const trial *t, const int at[DIMS], int c, int r, int h)
{
    const int column = at[0] + c, row = at[1] + r, head = at[2] + h, batch = at[3];
    const int is_inside =
        column >= 0 && column < 70 && row >= 0 && row < 5 && head >= 0 && head < 3 && batch >= 0 && batch < 2;
    return is_inside ? element_at(t->memory->in, (size_t)(((batch * 3 + head) * 5 + row) * 72 + column)) : 0;
}

/* Loads a box, waits, and copies the box's bytes as they lie in shared memory to `out`. */
static void load_box(trial *t, const int at[DIMS], uint32_t bytes)
{
    char body[2048];
    snprintf(body, sizeof body,
             "mbarrier.init.shared::cta.b64 [smem], 1; fence.mbarrier_init.release.cluster;\n"
             "mov.u32 %%r1, %d; mov.u32 %%r2, %d; mov.u32 %%r3, %d; mov.u32 %%r4, %d;\n"
             "mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], %u;\n"
             "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [smem+1024], [%%rd2, "
             "{%%r1, %%r2, %%r3, %%r4}], [smem];\n"
             "$wait: mbarrier.try_wait.parity.shared::cta.b64 %%p1, [smem], 0; @!%%p1 bra $wait;\n"
             "mov.u32 %%r5, 0;\n"
             "$copy: ld.shared.u32 %%r6, [%%r5+1024]; cvt.u64.u32 %%rd5, %%r5; add.s64 %%rd5, %%rd1, %%rd5;\n"
             "st.global.u32 [%%rd5], %%r6; add.s32 %%r5, %%r5, 4; setp.lt.u32 %%p2, %%r5, %u; @%%p2 bra $copy;",
             at[0], at[1], at[2], at[3], bytes, bytes);
    run(t, body);
}

static void boxes_are_swizzled_and_clipped(void **state)
{
    (void)state;
    static const struct {
        int columns, rows, swizzle, at[DIMS];
    } cases[] = {
        {64, 4, 128, {0, 0, 0, 0}}, {64, 4, 128, {32, 3, 2, 1}}, {64, 4, 128, {-8, -2, -1, 0}},
        {32, 4, 64, {40, 1, 1, 1}}, {16, 4, 32, {56, 4, 0, 0}},  {8, 4, 0, {64, 2, 1, 1}},
        {64, 4, 128, {0, 0, 0, 2}}, {64, 4, 128, {70, 0, 0, 0}}, {24, 4, 0, {-30, 0, 0, 0}},
    };
    for (size_t k = 0; k < COUNT_OF(cases); k++) {
        const int columns = cases[k].columns, rows = cases[k].rows;
        trial t = trial_of(1);
        t.eager = (int)(k % 2);
        t.memory->map = map_of(&t, columns, rows, cases[k].swizzle);
        load_box(&t, cases[k].at, (uint32_t)(2 * columns * rows * 2));
        const unsigned chunks = cases[k].swizzle == 0 ? 1 : (unsigned)cases[k].swizzle / 16;
        for (int h = 0; h < 2; h++)
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < columns; c++) {
                    /* the box begins at a multiple of 1024, so its own bytes say which line of 128 they are in */
                    const unsigned byte = (unsigned)(((h * rows + r) * columns + c) * 2), line = byte / 128;
                    const unsigned place = (byte & ~(16 * (chunks - 1))) | ((byte / 16 ^ line) % chunks * 16);
                    assert_int_equal(element_at(t.memory->out, place / 2), expected(&t, cases[k].at, c, r, h));
                }
        free(t.memory);
    }
}

static void stores_undo_loads(void **state)
{
    (void)state;
    trial t = trial_of(1);
    t.memory->map = map_of(&t, 64, 4, 128);
    uint16_t before[WORDS * 2];
    memcpy(before, t.memory->in, sizeof before);
    static const char body[] =
        "mbarrier.init.shared::cta.b64 [smem], 1; mov.u32 %r1, 0; mov.u32 %r2, 1; mov.u32 %r3, 24; mov.u32 %r4, -3;\n"
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], 1024;\n"
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [smem+1024], [%rd2, "
        "{%r1, %r1, %r1, %r1}], [smem];\n"
        "$wait: mbarrier.try_wait.parity.shared::cta.b64 %p1, [smem], 0; @!%p1 bra $wait;\n"
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%rd2, {%r3, %r2, %r2, %r2}], [smem+1024];\n"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;";
    run(&t, body);
    for (int h = 0; h < 3; h++)
        for (int r = 0; r < 5; r++)
            for (int c = 0; c < 72; c++) { /* batch 1: heads 1 and up, rows 1 and up, columns 24 to 70 were written */
                const int written = h >= 1 && r >= 1 && c >= 24 && c < 70;
                const int from = written ? ((h - 1) * 5 + r - 1) * 72 + c - 24 : ((3 + h) * 5 + r) * 72 + c;
                assert_int_equal(element_at(t.memory->in, (size_t)(((3 + h) * 5 + r) * 72 + c)), before[from]);
            }
    free(t.memory);
}

static void plain_runs_are_copied(void **state)
{
    (void)state;
    static const char body[] =
        "mbarrier.init.shared::cta.b64 [smem], 1; mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], 64;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+16], [%rd0+32], 64, [smem];\n"
        "$wait: mbarrier.try_wait.parity.shared::cta.b64 %p1, [smem], 0; @!%p1 bra $wait;\n"
        "st.shared.u32 [smem+20], 5; fence.proxy.async.shared::cta;\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1+16], [smem+16], 48;\n"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;";
    trial t = trial_of(1);
    run(&t, body);
    assert_int_equal(t.memory->out[3], 0);
    assert_int_equal(t.memory->out[4], 1008);
    assert_int_equal(t.memory->out[5], 5);
    assert_int_equal(t.memory->out[15], 1019);
    assert_int_equal(t.memory->out[16], 0);
    free(t.memory);
    refuses(1,
            "st.shared.u32 [smem+20], 5; cp.async.bulk.global.shared::cta.bulk_group [%rd1], [smem+16], 16;\n"
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
            "fence.proxy.async");
    refuses(1, "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [smem+16], 24;", "a multiple of 16");
}

static void illegal_boxes_are_refused(void **state)
{
    (void)state;
    static const char load[] = "mbarrier.init.shared::cta.b64 [smem], 1; mov.u32 %%r1, 0;\n"
                               "cp.async.bulk.tensor.%dd.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                               "[smem+%d], [%%rd%d, {%%r1, %%r1%s}], [smem];";
    char body[1024];
    snprintf(body, sizeof body, load, 4, 1024 + 64, 2, ", %r1, %r1");
    trial t = trial_of(1);
    char error[512];
    t.memory->map = map_of(&t, 64, 4, 128);
    assert_int_equal(run_in(&t, body, error, sizeof error), -1);
    assert_non_null(strstr(error, "not a multiple of 128"));
    snprintf(body, sizeof body, load, 2, 1024, 2, "");
    assert_int_equal(run_in(&t, body, error, sizeof error), -1);
    assert_non_null(strstr(error, "2 coordinates for a tensor map of rank 4"));
    snprintf(body, sizeof body, load, 4, 1024, 0, ", %r1, %r1");
    assert_int_equal(run_in(&t, body, error, sizeof error), -1);
    assert_non_null(strstr(error, "no tensor map"));
    free(t.memory);
}

/* ---- Clusters ---- */

static void ctas_of_a_cluster_meet(void **state)
{
    (void)state;
    trial t = trial_of(32);
    t.ctas = 4;
    t.cluster = 2;
    run(&t, "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %cluster_ctarank; shl.b32 %r3, %r0, 2;\n"
            "mad.lo.s32 %r4, %r1, 1000, %r0; st.shared.u32 [%r3], %r4;\n"
            "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
            "xor.b32 %r5, %r2, 1; mapa.shared::cluster.u32 %r6, %r3, %r5; ld.shared::cluster.u32 %r7, [%r6];\n"
            "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
            "shl.b32 %r8, %r1, 7; cvt.u64.u32 %rd5, %r8; add.s64 %rd5, %rd3, %rd5; st.global.u32 [%rd5], %r7;");
    for (uint32_t i = 0; i < 128; i++)
        assert_int_equal(t.memory->out[i], (i / 32 ^ 1) * 1000 + i % 32);
    free(t.memory);
}

/* Warp 1 of each CTA arrives and ends, and counts once: rank 0 goes on when rank 1's warp 0 has stored, late. */
static void warps_that_arrive_and_end_count_once(void **state)
{
    (void)state;
    static const char body[] =
        "mov.u32 %r2, %cluster_ctarank; setp.ge.u32 %p1, %r0, 32; setp.eq.u32 %p2, %r2, 0;\n"
        "@%p1 bra $arrive; @%p2 bra $arrive; mov.u32 %r3, 0;\n"
        "$late: add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 2000; @%p3 bra $late; st.shared.u32 [smem], %r3;\n"
        "$arrive: barrier.cluster.arrive.release.aligned; @%p1 exit; barrier.cluster.wait.acquire.aligned;\n"
        "mov.u32 %r4, 1; mov.u32 %r5, smem; mapa.shared::cluster.u32 %r6, %r5, %r4;\n"
        "ld.shared::cluster.u32 %r7, [%r6]; st.global.u32 [%rd3], %r7;\n"
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;";
    for (uint64_t seed = 0; seed < 8; seed++) {
        trial t = trial_of(64);
        t.ctas = t.cluster = 2;
        t.seed = seed;
        run(&t, body);
        assert_int_equal(t.memory->out[0], 2000);
        free(t.memory);
    }
}

static void arrivals_and_waits_of_a_cluster_alternate(void **state)
{
    (void)state;
    refuses(32, "barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;", "arrives again and has not waited");
    refuses(32, "barrier.cluster.wait.aligned;", "waits and has not arrived");
    trial t = trial_of(32);
    t.ctas = t.cluster = 2;
    refuses_in(&t,
               "setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared::cta.b64 [smem], 1;\n"
               "mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %r2, 0; @%p1 bra $wait;\n"
               "$never: mbarrier.try_wait.parity.shared::cta.b64 %p2, [smem], 0; @!%p2 bra $never;\n"
               "$wait: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
               "the cluster's barrier (32 of 64 threads)");
    free(t.memory);
}

/* ---- st.async ---- */

/* The mbarrier is at smem, of `expected` bytes a CTA, and the inbox at smem+1024: 512 bytes from each rank. */
#define BEGIN_EXPECTING(expected)                                                                                      \
    "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, %cluster_nctarank; setp.eq.u32 %p0, %r0, 0;\n" \
    "@%p0 mbarrier.init.shared::cta.b64 [smem], 1; @%p0 fence.mbarrier_init.release.cluster;\n" expected               \
    "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], %r4;\n"                                                 \
    "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;\n"
#define MEET "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
#define BEGIN BEGIN_EXPECTING("shl.b32 %r4, %r3, 9;\n")
/* Each lane sends four words, 1000 * CTA + 4 * lane and on, to each rank of its cluster. */
#define SEND_TO_ALL                                                                                                    \
    "shl.b32 %r5, %r0, 2; mad.lo.s32 %r5, %r1, 1000, %r5; add.u32 %r6, %r5, 1; add.u32 %r7, %r5, 2;\n"                 \
    "add.u32 %r8, %r5, 3; shl.b32 %r9, %r2, 9; shl.b32 %r10, %r0, 4; add.u32 %r9, %r9, %r10; mov.u32 %r10, smem;\n"    \
    "add.u32 %r9, %r9, %r10; mov.u32 %r11, 0;\n"                                                                       \
    "$send: mapa.shared::cluster.u32 %r12, %r9, %r11; mapa.shared::cluster.u32 %r13, %r10, %r11;\n" STORES             \
    "add.u32 %r11, %r11, 1; setp.lt.u32 %p1, %r11, %r3; @%p1 bra $send;\n"
#define RECEIVE "$wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [smem], 0; @!%p2 bra $wait;\n"
#define ST_ASYNC "st.async.shared::cluster.mbarrier::complete_tx::bytes"
#define STORES ST_ASYNC ".v4.u32 [%r12+1024], {%r5, %r6, %r7, %r8}, [%r13];\n"

/* Each lane's four words of each rank, which the CTA writes to `out`. */
static const char write_inbox[] =
    "mul.lo.s32 %r20, %r1, %r3; shl.b32 %r20, %r20, 9; cvt.u64.u32 %rd5, %r20; add.s64 %rd5, %rd1, %rd5;\n"
    "shl.b32 %r21, %r0, 4; cvt.u64.u32 %rd6, %r21; add.s64 %rd5, %rd5, %rd6; add.u32 %r21, %r21, %r10;\n"
    "mov.u32 %r22, 0;\n"
    "$read: ld.shared.v4.u32 {%r23, %r24, %r25, %r26}, [%r21+1024]; st.global.v4.u32 [%rd5], {%r23, %r24, %r25, "
    "%r26};\n"
    "add.u32 %r21, %r21, 512; add.s64 %rd5, %rd5, 512; add.u32 %r22, %r22, 1; setp.lt.u32 %p3, %r22, %r3;\n"
    "@%p3 bra $read;\n";

static void check_inboxes(const trial *t, const char *sending)
{
    char body[4096];
    assert_true(snprintf(body, sizeof body, "%s%s", sending, write_inbox) < (int)sizeof body);
    run(t, body);
    const uint32_t ranks = t->cluster > 1 ? t->cluster : 1;
    for (uint32_t cta = 0; cta < t->ctas; cta++)
        for (uint32_t from = 0; from < ranks; from++)
            for (uint32_t i = 0; i < 128; i++)
                assert_int_equal(t->memory->out[(cta * ranks + from) * 128 + i],
                                 (cta / ranks * ranks + from) * 1000 + i);
}

/* In clusters of one, two and four, and without any; late and at once. */
static void ctas_send_each_other_words(void **state)
{
    (void)state;
    static const uint32_t clusters[] = {0, 1, 2, 4};
    for (size_t n = 0; n < 4 * COUNT_OF(clusters); n++) {
        trial t = trial_of(32);
        t.ctas = 4;
        t.cluster = clusters[n / 4];
        t.seed = n;
        t.eager = n % 2 == 1;
        check_inboxes(&t, BEGIN SEND_TO_ALL RECEIVE);
        free(t.memory);
    }
}
#undef STORES

/* All widths, each store with the bytes that it has. */
static void stores_complete_their_bytes(void **state)
{
    (void)state;
#define STORES                                                                                                         \
    "mov.b64 %rd10, {%r5, %r6}; mov.b64 %rd11, {%r7, %r8}; mov.b32 %f1, %r7; mov.b32 %f2, %r8;\n"                      \
    "setp.ge.u32 %p4, %r0, 8; @%p4 bra $twos;\n" ST_ASYNC ".u32 [%r12+1024], %r5, [%r13];\n" ST_ASYNC                  \
    ".b32 [%r12+1028], %r6, [%r13];\n" ST_ASYNC ".v2.f32 [%r12+1032], {%f1, %f2}, [%r13]; bra.uni $sent;\n"            \
    "$twos: setp.ge.u32 %p4, %r0, 16; @%p4 bra $wide;\n" ST_ASYNC ".b64 [%r12+1024], %rd10, [%r13];\n"                 \
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s64 [%r12+1032], %rd11, [%r13]; bra.uni $sent;\n"      \
    "$wide: " ST_ASYNC ".v2.u64 [%r12+1024], {%rd10, %rd11}, [%r13];\n$sent:\n"
    for (uint64_t seed = 0; seed < 4; seed++) {
        trial t = trial_of(32);
        t.ctas = t.cluster = 2;
        t.seed = seed;
        check_inboxes(&t, BEGIN SEND_TO_ALL RECEIVE);
        free(t.memory);
    }
#undef STORES
    refuses(1, ST_ASYNC ".v4.b64 [%r1], {%rd4, %rd5, %rd6, %rd7}, [%r2];", "unknown instruction st.async");
    refuses(1, ST_ASYNC ".b16 [%r1], %rs1, [%r2];", "unknown instruction st.async");
    refuses(1, ST_ASYNC ".v2.f32 [%r1], {%f1, %f2};", "unknown instruction st.async");
    refuses(1, "st.async.shared::cta.mbarrier::complete_tx::bytes.b32 [%r1], %r1, [%r2];", "unknown instruction st.");
}
#define STORES ST_ASYNC ".v4.u32 [%r12+1024], {%r5, %r6, %r7, %r8}, [%r13];\n"

/* Two CTAs that send to each other: the launch must fail under every seed, and say one of up to three things. */
static void sending_fails(const char *body, const char *const texts[3])
{
    for (uint64_t n = 0; n < 16; n++) {
        trial t = trial_of(32);
        t.ctas = t.cluster = 2;
        t.seed = n / 2;
        t.eager = n % 2 == 1;
        char error[1024] = "";
        const int status = run_in(&t, body, error, sizeof error);
        int is_said = 0;
        for (int k = 0; k < 3; k++)
            is_said |= texts[k] != NULL && strstr(error, texts[k]) != NULL;
        if (status != -1 || !is_said)
            fail_msg("seed %d: \"%s\" does not say \"%s\"", (int)t.seed, error, texts[0]);
        free(t.memory);
    }
}
#define SAYS(...) ((const char *const[3]){__VA_ARGS__})

static void miscounted_bytes_are_named(void **state)
{
    (void)state;
    sending_fails(BEGIN_EXPECTING("mov.u32 %r4, 1040;") SEND_TO_ALL RECEIVE,
                  SAYS("waiting: CTA", "the mbarrier at shared address 0 (phase 0 lacks 0 of 1, 16 bytes)"));
    sending_fails(BEGIN_EXPECTING("mov.u32 %r4, 1020;") SEND_TO_ALL RECEIVE,
                  SAYS("(phase 0 lacks 0 of 1, -4 bytes: more came than it expects)"));
    sending_fails(BEGIN_EXPECTING("mov.u32 %r4, 1008;") SEND_TO_ALL RECEIVE MEET,
                  SAYS("has ended without these 16 bytes, which were sent in it", "16 bytes came to its mbarrier",
                       "have exited before this is done"));
}

/* ---- What may not be sent, or not there ---- */

static void sends_go_where_a_cta_and_its_mbarrier_live(void **state)
{
    (void)state;
#define IDS "mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p0, %r0, 0; mov.u32 %r5, smem; xor.b32 %r6, %r2, 1;\n"
#define OTHER "mapa.shared::cluster.u32 %r12, %r5, %r6; mapa.shared::cluster.u32 %r13, %r5, %r6;\n"
#define INIT "@%p0 mbarrier.init.shared::cta.b64 [smem], 1;\n"
#define SEND "@%p0 " ST_ASYNC ".b32 [%r12+1024], %r0, [%r13];\n"
    sending_fails(IDS OTHER MEET SEND, SAYS("no mbarrier was initialised at shared address 0"));
    sending_fails(IDS INIT OTHER "mapa.shared::cluster.u32 %r13, %r5, %r2;\n" MEET SEND,
                  SAYS("the data go to the CTA with rank 1, their mbarrier is in that with rank 0",
                       "the data go to the CTA with rank 0, their mbarrier is in that with rank 1"));
    sending_fails(IDS INIT OTHER MEET "@%p0 " ST_ASYNC ".v2.b32 [%r12+1028], {%r0, %r0}, [%r13];\n",
                  SAYS("not a multiple of 8"));
    sending_fails(IDS INIT OTHER MEET "@%p0 " ST_ASYNC ".b32 [%r12+65536], %r0, [%r13];\n", SAYS("the CTA has 65536"));
    /* rank 1 ends, rank 0 sends when it knows */
    sending_fails(IDS INIT OTHER MEET "setp.eq.u32 %p1, %r2, 1; @%p1 exit;\n" MEET SEND,
                  SAYS("of the CTA with rank 1, which has ended"));
    /* what nobody expects */
    sending_fails(IDS INIT OTHER MEET SEND MEET,
                  SAYS("4 bytes came to its mbarrier at shared address 0 that nobody expected",
                       "all threads have exited before this is done", "which has ended"));
    /* its own threads alone initialise an mbarrier and wait for it */
    sending_fails(IDS INIT OTHER MEET "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r13], 1;\n",
                  SAYS("a wait for the mbarrier of another CTA"));
    sending_fails(IDS OTHER "@%p0 mbarrier.init.shared::cta.b64 [%r13], 1;\n", SAYS("an mbarrier of another CTA"));
}

/* A CTA that does not wait for what is sent to it may end before: not in every order. */
static void a_cta_waits_for_what_is_sent_to_it(void **state)
{
    (void)state;
    static const char body[] = IDS INIT "setp.eq.u32 %p1, %r2, 1; and.pred %p2, %p0, %p1; not.pred %p3, %p1;\n"
                                        "and.pred %p4, %p0, %p3;\n"
                                        "@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], 4;\n" OTHER MEET
                                        "@%p4 " ST_ASYNC ".b32 [%r12+1024], %r0, [%r13];\n";
    int found = 0;
    for (uint64_t seed = 0; seed < 16; seed++) {
        trial t = trial_of(32);
        t.ctas = t.cluster = 2;
        t.seed = seed;
        char error[1024] = "";
        const int status = run_in(&t, body, error, sizeof error);
        if (status != 0 && !strstr(error, "which has ended") && !strstr(error, "have exited before this is done"))
            fail_msg("%s", error);
        found += status != 0;
        free(t.memory);
    }
    assert_true(found >= 8);
}

/* wgmma and the copy engine see what was sent behind a fence of who has waited for it. */
static void what_was_sent_is_fenced_for_copies(void **state)
{
    (void)state;
#define STORE_INBOX                                                                                                    \
    "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [smem+1024], 512; @%p0 cp.async.bulk.commit_group;\n"    \
    "@%p0 cp.async.bulk.wait_group 0;"
    trial t = trial_of(32);
    refuses_in(&t, BEGIN SEND_TO_ALL RECEIVE STORE_INBOX, "stored to by an st.async without a fence.proxy.async");
    run(&t, BEGIN SEND_TO_ALL RECEIVE "fence.proxy.async.shared::cta;\n" STORE_INBOX);
    assert_int_equal(t.memory->out[127], 127);
    free(t.memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loads_and_stores_move_what_they_name),
        cmocka_unit_test(addresses_are_checked),
        cmocka_unit_test(variables_hold_what_is_stored),
        cmocka_unit_test(atomics_return_what_was_there),
        cmocka_unit_test(vectors_are_added_to),
        cmocka_unit_test(copies_are_late_until_they_are_waited_for),
        cmocka_unit_test(copies_arrive_on_a_barrier),
        cmocka_unit_test(lanes_read_each_other),
        cmocka_unit_test(lanes_vote),
        cmocka_unit_test(barriers_hold_threads_back),
        cmocka_unit_test(mbarriers_count_phases),
        cmocka_unit_test(boxes_are_swizzled_and_clipped),
        cmocka_unit_test(stores_undo_loads),
        cmocka_unit_test(plain_runs_are_copied),
        cmocka_unit_test(illegal_boxes_are_refused),
        cmocka_unit_test(ctas_of_a_cluster_meet),
        cmocka_unit_test(warps_that_arrive_and_end_count_once),
        cmocka_unit_test(arrivals_and_waits_of_a_cluster_alternate),
        cmocka_unit_test(ctas_send_each_other_words),
        cmocka_unit_test(stores_complete_their_bytes),
        cmocka_unit_test(miscounted_bytes_are_named),
        cmocka_unit_test(sends_go_where_a_cta_and_its_mbarrier_live),
        cmocka_unit_test(a_cta_waits_for_what_is_sent_to_it),
        cmocka_unit_test(what_was_sent_is_fenced_for_copies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
