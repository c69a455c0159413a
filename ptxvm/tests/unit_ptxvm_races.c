/* The PTX machine's race detector: for each kind of synchronisation a kernel that relies on it, and ones in which it is
 * missing, too early, or somebody else's. What a detector says must not hang on the order in which warps happened to
 * run: each kernel runs with several seeds, and all must agree. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

#include "ptxvm/ptxvm.h"

enum {
    SEEDS = 8,
    SMEM_BYTES = 16384,
    TEXT_BYTES = 16384
};

/* Before each kernel's body: %r0 thread, %r1 warp, %r2 lane, %r3 4 * lane (the lane's word), %rd0 global memory;
 * %p0..%p4: warp 0..4; %q0..%q4: lane 0 of it. mbarriers are at 8192 (count 1), 8200 (1) and 8208 (32). */
static const char *const beginning =
    ".version 8.7\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
    ".visible .entry test(.param .u64 test_param_0)\n{\n"
    ".reg .pred %p<8>;\n.reg .pred %q<8>;\n.reg .pred %done;\n.reg .b32 %r<32>;\n.reg .b64 %rd<8>;\n.reg .f32 %f<16>;\n"
    "ld.param.u64 %rd0, [test_param_0];\ncvta.to.global.u64 %rd0, %rd0;\n"
    "mov.u32 %r0, %tid.x;\nshr.u32 %r1, %r0, 5;\nand.b32 %r2, %r0, 31;\nshl.b32 %r3, %r2, 2;\n"
    "setp.eq.u32 %p0, %r1, 0;\nsetp.eq.u32 %p1, %r1, 1;\nsetp.eq.u32 %p2, %r1, 2;\nsetp.eq.u32 %p3, %r1, 3;\n"
    "setp.eq.u32 %p4, %r1, 4;\nsetp.eq.u32 %q0, %r0, 0;\nsetp.eq.u32 %q1, %r0, 32;\nsetp.eq.u32 %q2, %r0, 64;\n"
    "setp.eq.u32 %q3, %r0, 96;\nsetp.eq.u32 %q4, %r0, 128;\n"
    "mov.u32 %r10, 8192;\nmov.u32 %r11, 8200;\nmov.u32 %r12, 8208;\nmov.u32 %r13, 0;\n"
    "@%q0 mbarrier.init.shared::cta.b64 [%r10], 1;\n@%q0 mbarrier.init.shared::cta.b64 [%r11], 1;\n"
    "@%q0 mbarrier.init.shared::cta.b64 [%r12], 32;\nbar.sync 0;\n";

/* Pieces of bodies. W: warp 0 writes its words; R: warp 1 reads them. */
#define W0 "@%p0 st.shared.u32 [%r3], %r0;\n"
#define W0_AGAIN "@%p0 st.shared.u32 [%r3], %r10;\n" /* another value */
#define CLEAR "st.shared.u32 [%r3], %r13;\n"
#define R0 "@%p0 ld.shared.u32 %r5, [%r3];\n"
#define R1 "@%p1 ld.shared.u32 %r5, [%r3];\n"
#define R2 "@%p2 ld.shared.u32 %r5, [%r3];\n"
#define W1 "@%p1 st.shared.u32 [%r3], %r0;\n"
#define ARRIVE(q, barrier) "@" q " mbarrier.arrive.shared::cta.b64 _, [" barrier "];\n"
/* Warp `p` waits for a phase; `name` is a label. */
#define WAIT(p, name, barrier, parity)                                                                                 \
    "@!" p " bra $end_" name ";\n$" name ":\nmbarrier.try_wait.parity.shared::cta.b64 %done, [" barrier "], " parity   \
    ";\n@!%done bra $" name ";\n$end_" name ":\n"
#define EXPECT(q, barrier, bytes) "@" q " mbarrier.arrive.expect_tx.shared::cta.b64 _, [" barrier "], " bytes ";\n"
#define COPY(q, to, bytes, barrier)                                                                                    \
    "@" q " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [" to "], [%rd0], " bytes ", [" barrier  \
    "];\n"
#define CP(p, to) "@" p " cp.async.ca.shared.global [" to "], [%rd0], 4;\n"
#define WGMMA(a)                                                                                                       \
    "mov.u64 %rd1, " a ";\nmov.u64 %rd2, 0;\nwgmma.fence.sync.aligned;\n"                                              \
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd1, %rd2, 0, 1, 1, 0, 0;\n"             \
    "wgmma.commit_group.sync.aligned;\n"

typedef struct experiment {
    const char *body;
    const char *race; /* NULL: there is none */
    unsigned warps;
    int is_strict;
    unsigned cluster;
} experiment;

static unsigned char memory[4096] __attribute__((aligned(128)));

static int in_memory(void *user, uint64_t address, size_t bytes)
{
    (void)user;
    const uint64_t first = (uint64_t)(uintptr_t)memory;
    return address >= first && address + bytes <= first + sizeof memory;
}

static char found[16][700];
static int found_count;

static void keep_race(void *user, const char *text)
{
    (void)user;
    assert_true(found_count < (int)COUNT_OF(found));
    snprintf(found[found_count++], sizeof found[0], "%s", text);
}

/* 0, or -1 and its text. */
static int run_once(const experiment *e, uint64_t seed, int keeps_all, char *error, size_t error_bytes)
{
    char text[TEXT_BYTES];
    assert_true(snprintf(text, sizeof text, "%s%sret;\n}\n", beginning, e->body) < (int)sizeof text);
    ptxvm_module *module = ptxvm_load(text, error, error_bytes);
    if (!module)
        fail_msg("%s\n%s", error, e->body);
    void *parameter = memory;
    void *const parameters[] = {&parameter};
    const ptxvm_launch launch = {.module = module,
                                 .entry = "test",
                                 .grid = {e->cluster ? e->cluster : 1, 1, 1},
                                 .block = {32 * (e->warps ? e->warps : 2), 1, 1},
                                 .cluster = e->cluster,
                                 .dynamic_smem_bytes = SMEM_BYTES,
                                 .parameters = parameters,
                                 .sm_count = 2,
                                 .is_allocated = in_memory,
                                 .seed = seed,
                                 .check_races = e->is_strict ? PTXVM_RACES_STRICT : PTXVM_RACES_ON,
                                 .race_found = keeps_all ? keep_race : NULL};
    const int result = ptxvm_run(&launch, NULL, error, error_bytes);
    ptxvm_free(module);
    return result;
}

static void check_all(const experiment *experiments, size_t count)
{
    for (size_t i = 0; i < count; i++)
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            const experiment *e = &experiments[i];
            char error[1024] = "";
            const int result = run_once(e, seed, 0, error, sizeof error);
            if (e->race == NULL && result != 0)
                fail_msg("experiment %zu, seed %d: %s\n%s", i, (int)seed, error, e->body);
            if (e->race != NULL && (result == 0 || !strstr(error, "race at") || !strstr(error, e->race)))
                fail_msg("experiment %zu, seed %d: \"%s\" does not say \"%s\"\n%s", i, (int)seed, error, e->race,
                         e->body);
        }
}

static void barriers_order_warps(void **state)
{
    (void)state;
    const experiment experiments[] = {
        {W0 "bar.sync 0;\n" R1, NULL, 2, 0, 0},
        {W0 R1, "nothing orders this", 2, 0, 0},
        {R1 W0, "nothing orders this", 2, 0, 0},
        {R1 "bar.sync 0;\n" W0, NULL, 2, 0, 0},
        {W0 W1, "wrote", 2, 0, 0},
        {CLEAR, NULL, 2, 0, 0}, /* both warps clear the same words */
        {CLEAR "ld.shared.u32 %r5, [%r3];\n", NULL, 2, 0, 0},
        {CLEAR "bar.sync 0;\n@%p0 st.shared.u32 [%r3], %r10;\n", NULL, 2, 0, 0},
        {CLEAR, "wrote", 2, 1, 0}, /* strict */
        {"@!%p2 st.shared.u32 [%r3], %r13;\n@%p1 bar.arrive 1, 64;\n@%p2 bar.sync 1, 64;\n" R2, NULL, 3, 0, 0},
        {CLEAR "@%p0 st.shared.u32 [%r3], %r10;\n", "nothing orders this", 2, 0, 0}, /* the other's may come later */
        {"@!%p2 st.shared.u32 [%r3], %r13;\n" R2, "nothing orders this", 3, 0, 0},
        {W0 "bar.sync 0;\n" W1, NULL, 2, 0, 0},
        {R0 R1, NULL, 2, 0, 0},
        {W0 R0 W0_AGAIN, NULL, 2, 0, 0}, /* its own */
        {W0 "@%p1 ld.shared.u32 %r5, [%r3+128];\n", NULL, 2, 0, 0},
        {W0 "@%p1 ld.shared.u32 %r5, [%r3+124];\n", "nothing orders this", 2, 0, 0}, /* one lane's word */
        {"@%p0 st.shared.v4.u32 [%r13], {%r0, %r0, %r0, %r0};\n@%p1 ld.shared.u32 %r5, [%r13+12];\n",
         "nothing orders this", 2, 0, 0},
        {W0 "bar.red.or.pred %p5, 0, %p0;\n" R1, NULL, 2, 0, 0},
        {W0 "bar.sync 0;\n" R1 W0_AGAIN, "nothing orders this", 2, 0, 0}, /* the next turn overtakes */
        {W0 "bar.sync 0;\n" R1 "bar.sync 0;\n" W0_AGAIN, NULL, 2, 0, 0},
        {W0 "fence.acq_rel.cta;\n" R1, "nothing orders this", 2, 0, 0}, /* a fence alone is no order */
    };
    check_all(experiments, COUNT_OF(experiments));
}

static void named_barriers_order_who_takes_part(void **state)
{
    (void)state;
    const experiment experiments[] = {
        {W0 "@%p0 bar.arrive 1, 64;\n@%p1 bar.sync 1, 64;\n" R1, NULL, 2, 0, 0},
        {"@%p0 bar.arrive 1, 64;\n" W0 "@%p1 bar.sync 1, 64;\n" R1, "nothing orders this", 2, 0, 0},
        {R1 "@%p1 bar.arrive 1, 64;\n@%p0 bar.sync 1, 64;\n" W0, NULL, 2, 0, 0},
        {R1 "@%p0 bar.arrive 1, 64;\n@%p1 bar.sync 1, 64;\n" W0, "nothing orders this", 2, 0, 0}, /* reversed */
        {W0 "@!%p2 bar.sync 1, 64;\n" R1, NULL, 3, 0, 0},
        {W0 "@!%p2 bar.sync 1, 64;\n" R2, "nothing orders this", 3, 0, 0},
        {W0 "@!%p2 bar.sync 1, 64;\n@!%p0 bar.sync 2, 64;\n" R2, NULL, 3, 0, 0}, /* by way of warp 1 */
        {W0 "@!%p0 bar.sync 2, 64;\n@!%p2 bar.sync 1, 64;\n" R2, "nothing orders this", 3, 0, 0},
    };
    check_all(experiments, COUNT_OF(experiments));
}

static void mbarriers_order_arrivals_and_waits(void **state)
{
    (void)state;
    const experiment experiments[] = {
        {W0 ARRIVE("%q0", "%r10") WAIT("%p1", "a", "%r10", "0") R1, NULL, 2, 0, 0},
        {ARRIVE("%q0", "%r10") W0 WAIT("%p1", "a", "%r10", "0") R1, "nothing orders this", 2, 0, 0},
        {W0 ARRIVE("%q0", "%r10") WAIT("%p1", "a", "%r11", "1") R1, "nothing orders this", 2, 0, 0}, /* another one's */
        {W0 ARRIVE("%q0", "%r10") WAIT("%p1", "a", "%r10", "0") R2, "nothing orders this", 3, 0, 0},
        {W0 ARRIVE("%p0", "%r12") WAIT("%p1", "a", "%r12", "0") R1, NULL, 2, 0, 0}, /* all lanes arrive */
        /* a ring of one place: full at %r10, empty at %r11, two turns */
        {W0 ARRIVE("%q0", "%r10") WAIT("%p1", "a", "%r10", "0") R1 ARRIVE("%q1", "%r11") WAIT("%p0", "b", "%r11", "0")
             W0_AGAIN ARRIVE("%q0", "%r10") WAIT("%p1", "c", "%r10", "1") R1,
         NULL, 2, 0, 0},
        {W0 ARRIVE("%q0", "%r10") WAIT("%p1", "a", "%r10", "0") R1 ARRIVE("%q1", "%r11") W0_AGAIN,
         "nothing orders this", 2, 0, 0},
    };
    check_all(experiments, COUNT_OF(experiments));
}

static void copies_are_ordered_by_their_mbarrier(void **state)
{
    (void)state;
    const experiment experiments[] = {
        {EXPECT("%q0", "%r10", "128") COPY("%q0", "%r13", "128", "%r10") WAIT("%p1", "a", "%r10", "0") R1, NULL, 2, 0,
         0},
        {EXPECT("%q0", "%r10", "128") COPY("%q0", "%r13", "128", "%r10") WAIT("%p0", "a", "%r10", "0") R1,
         "a copy that completes on the mbarrier at 8192 wrote", 2, 0, 0},
        {EXPECT("%q0", "%r10", "128") COPY("%q0", "%r13", "128", "%r10")
             WAIT("%p0", "a", "%r10", "0") "bar.sync 0;\n" R1,
         NULL, 2, 0, 0},
        /* two copies, and a wait for the other one */
        {EXPECT("%q0", "%r10", "128") COPY("%q0", "%r13", "128", "%r10") EXPECT("%q0", "%r11", "128")
             COPY("%q0", "%r12+112", "128", "%r11") WAIT("%p1", "a", "%r11", "0") R1 WAIT("%p0", "b", "%r10", "0"),
         "a copy that completes on the mbarrier at 8192", 2, 0, 0},
        /* what was there is read before, or not known to be read */
        {R1 ARRIVE("%q1", "%r11") WAIT("%p0", "b", "%r11", "0") EXPECT("%q0", "%r10", "128")
             COPY("%q0", "%r13", "128", "%r10") WAIT("%p0", "a", "%r10", "0"),
         NULL, 2, 0, 0},
        {R1 EXPECT("%q0", "%r10", "128") COPY("%q0", "%r13", "128", "%r10") WAIT("%p0", "a", "%r10", "0"),
         "nothing orders this", 2, 0, 0},
        /* the next copy into the same place, one phase later */
        {EXPECT("%q0", "%r10", "128") COPY("%q0", "%r13", "128", "%r10") WAIT("%p1", "a", "%r10", "0")
             R1 WAIT("%p0", "b", "%r10", "0") EXPECT("%q0", "%r10", "128") COPY("%q0", "%r13", "128", "%r10")
                 WAIT("%p0", "c", "%r10", "1"),
         "nothing orders this", 2, 0, 0},
        {EXPECT("%q0", "%r10", "128") COPY("%q0", "%r13", "128", "%r10") WAIT("%p1", "a", "%r10", "0")
             R1 ARRIVE("%q1", "%r11") WAIT("%p0", "b", "%r11", "0") EXPECT("%q0", "%r10", "128")
                 COPY("%q0", "%r13", "128", "%r10") WAIT("%p1", "c", "%r10", "1") R1,
         NULL, 2, 0, 0},
    };
    check_all(experiments, COUNT_OF(experiments));
}

static void small_copies_are_ordered_by_groups(void **state)
{
    (void)state;
#define COMMIT "cp.async.commit_group;\n"
    const experiment experiments[] = {
        {CP("%p0", "%r3") COMMIT "cp.async.wait_group 0;\nbar.sync 0;\n" R1, NULL, 2, 0, 0},
        {CP("%p0", "%r3") COMMIT "bar.sync 0;\ncp.async.wait_group 0;\n" R1, "warp 0's cp.async wrote", 2, 0, 0},
        {CP("%p0", "%r3") COMMIT R0 "cp.async.wait_group 0;\n", "warp 0's cp.async wrote", 2, 0, 0},
        {CP("%p0", "%r3") COMMIT CP("%p0", "%r3+128") COMMIT "cp.async.wait_group 1;\nbar.sync 0;\n" R1, NULL, 2, 0, 0},
        {CP("%p0", "%r3+128") COMMIT CP("%p0", "%r3") COMMIT "cp.async.wait_group 1;\nbar.sync 0;\n" R1,
         "warp 0's cp.async wrote", 2, 0, 0},
        {CP("%p0", "%r3") "cp.async.wait_all;\nbar.sync 0;\n" R1, NULL, 2, 0, 0},
        {CP("%p0", "%r3+128") "cp.async.wait_all;\n" CP("%p0", "%r3") "bar.sync 0;\n" R1 "cp.async.wait_all;\n",
         "warp 0's cp.async wrote", 2, 0, 0},
        /* lanes that issue one half after the other */
        {"setp.lt.u32 %p5, %r0, 16;\n@!%p5 bra $upper;\n" CP("%p5", "%r3") COMMIT CP("%p5", "%r3+128") COMMIT
         "cp.async.wait_group 1;\nbra.uni $met;\n$upper:\n" CP("%p0", "%r3") COMMIT CP("%p0", "%r3+128") COMMIT
         "cp.async.wait_group 1;\n$met:\nbar.sync 0;\n" R1,
         NULL, 2, 0, 0},
        {R1 CP("%p0", "%r3") "cp.async.wait_all;\n", "nothing orders this", 2, 0, 0},
        {CP("%p0", "%r3") "@%p0 cp.async.mbarrier.arrive.noinc.shared.b64 [%r12];\n" WAIT("%p1", "a", "%r12", "0") R1,
         NULL, 2, 0, 0},
        {CP("%p0", "%r3+128") "@%p0 cp.async.mbarrier.arrive.noinc.shared.b64 [%r12];\n" CP("%p0", "%r3")
             WAIT("%p1", "a", "%r12", "0") R1 "cp.async.wait_all;\n",
         "warp 0's cp.async", 2, 0, 0},
    };
    check_all(experiments, COUNT_OF(experiments));
}

static void products_read_until_they_are_waited_for(void **state)
{
    (void)state;
#define WAIT_PRODUCT(n) "@!%p4 wgmma.wait_group.sync.aligned " n ";\n"
#define PRODUCT(name, a) "@%p4 bra $" name ";\n" WGMMA(a) "$" name ":\n"
#define W4 "@%p4 st.shared.u32 [%r3], %r0;\n" /* B; A is at 4096 or 12288 */
    const experiment experiments[] = {
        {PRODUCT("a", "4294967552") WAIT_PRODUCT("0") "bar.sync 0;\n" W4, NULL, 5, 0, 0},
        {PRODUCT("a", "4294967552") "bar.sync 0;\n" W4 WAIT_PRODUCT("0"), "'s wgmma", 5, 0, 0},
        {PRODUCT("a", "4294967552") PRODUCT("b", "4294968064")
             WAIT_PRODUCT("1") "bar.sync 0;\n"
                               "@%p4 st.shared.u32 [%r3+4096], %r0;\n" WAIT_PRODUCT("0"),
         NULL, 5, 0, 0},
        {PRODUCT("a", "4294967552") PRODUCT("b", "4294968064")
             WAIT_PRODUCT("1") "bar.sync 0;\n"
                               "@%p4 st.shared.u32 [%r3+12288], %r0;\n" WAIT_PRODUCT("0"),
         "'s wgmma", 5, 0, 0},
    };
    check_all(experiments, COUNT_OF(experiments));
}

static void stores_read_until_they_are_waited_for(void **state)
{
    (void)state;
#define STORE                                                                                                          \
    "@%q0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r13], 128;\n@%q0 cp.async.bulk.commit_group;\n"
#define FENCED W0 "fence.proxy.async;\nbar.sync 0;\n"
    const experiment experiments[] = {
        {FENCED STORE "@%q0 cp.async.bulk.wait_group.read 0;\n" W0_AGAIN, NULL, 2, 0, 0},
        {FENCED STORE W0_AGAIN "@%q0 cp.async.bulk.wait_group.read 0;\n", "warp 0's bulk store read", 2, 0, 0},
        {FENCED STORE "@%q0 cp.async.bulk.wait_group.read 0;\nbar.sync 0;\n" W1, NULL, 2, 0, 0},
        {FENCED STORE "bar.sync 0;\n" W1 "@%q0 cp.async.bulk.wait_group.read 0;\n", "warp 0's bulk store read", 2, 0,
         0},
        {"@%p1 st.shared.u32 [%r3], %r0;\nfence.proxy.async;\n" STORE "@%q0 cp.async.bulk.wait_group 0;\n",
         "nothing orders this", 2, 0, 0},
    };
    check_all(experiments, COUNT_OF(experiments));
}

static void atomics_race_with_ordinary_accesses_only(void **state)
{
    (void)state;
    const experiment experiments[] = {
        {"st.shared.u32 [%r3], %r0;\nbar.sync 0;\natom.shared.add.u32 %r5, [%r13], 1;\n", "wrote", 2, 0, 0},
        {"@%p0 st.shared.u32 [%r3], %r13;\nbar.sync 0;\natom.shared.add.u32 %r5, [%r13], 1;\n", NULL, 2, 0, 0},
        {"@%p0 st.shared.u32 [%r3], %r13;\nbar.sync 0;\natom.shared.add.u32 %r5, [%r13], 1;\nbar.sync 0;\n" R1, NULL, 2,
         0, 0},
        {"@%p0 st.shared.u32 [%r3], %r13;\nbar.sync 0;\n@%p0 atom.shared.add.u32 %r5, [%r13], 1;\n" R1,
         "nothing orders this", 2, 0, 0},
        {"@%p0 st.shared.u32 [%r13], %r10;\nbar.sync 0;\nmov.u32 %r5, %r13;\n" /* its address goes, for the old value */
         "@%p0 atom.shared.add.u32 %r5, [%r5], 1;\n@%p1 ld.shared.u32 %r5, [%r13];\n",
         "race at shared address 0 of", 2, 0, 0},
    };
    check_all(experiments, COUNT_OF(experiments));
}

static void lanes_race_too(void **state)
{
    (void)state;
#define NEIGHBOUR "xor.b32 %r6, %r3, 4;\n@%p0 ld.shared.u32 %r5, [%r6];\n"
    const experiment experiments[] = {
        {"@%p0 st.shared.u32 [%r13], %r0;\n", "of the same instruction wrote another value", 2, 0, 0},
        {"@%p0 st.shared.u32 [%r13], %r13;\n", NULL, 2, 0, 0},
        {W0 NEIGHBOUR, NULL, 2, 0, 0}, /* who relies on convergence */
        {W0 NEIGHBOUR, "of the same warp wrote", 2, 1, 0},
        {W0 "bar.warp.sync -1;\n" NEIGHBOUR, NULL, 2, 1, 0},
        {W0 "bar.warp.sync -1;\n" NEIGHBOUR W0, "of the same warp read", 2, 1, 0},
        {W0 R0, NULL, 2, 1, 0},
    };
    check_all(experiments, COUNT_OF(experiments));
}

static void clusters_meet_at_their_barrier(void **state)
{
    (void)state;
    /* rank 0's warp 0 writes into rank 1, whose warp 1 reads it */
#define REMOTE                                                                                                         \
    "mov.u32 %r7, %cluster_ctarank;\nmov.u32 %r8, 1;\nmapa.shared::cluster.u32 %r9, %r3, %r8;\n"                       \
    "setp.eq.and.u32 %p6, %r7, 0, %p0;\nsetp.eq.and.u32 %p7, %r7, 1, %p1;\n"                                           \
    "@%p6 st.shared::cluster.u32 [%r9], %r0;\n"
    const experiment experiments[] = {
        {REMOTE "barrier.cluster.arrive;\nbarrier.cluster.wait;\n@%p7 ld.shared.u32 %r5, [%r3];\n", NULL, 2, 0, 2},
        {REMOTE "@%p7 ld.shared.u32 %r5, [%r3];\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\n", "rank", 2, 0, 2},
        {REMOTE "bar.sync 0;\n@%p7 ld.shared.u32 %r5, [%r3];\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\n",
         "nothing orders this", 2, 0, 2},
    };
    check_all(experiments, COUNT_OF(experiments));
}

/* Rank 0's warps 0 and 1 send words to rank 1, whose warp 1 waits for its mbarrier at 8192 and reads. %p6: rank 0's
 * warp 0, %p5: its warp 1; %p7: rank 1's warp 1; %q5: rank 1's thread 0, %q6: rank 1's thread 32. */
#define RANKS(receiver)                                                                                                \
    "mov.u32 %r7, %cluster_ctarank;\nmov.u32 %r8, " receiver ";\nmapa.shared::cluster.u32 %r9, %r3, %r8;\n"            \
    "mapa.shared::cluster.u32 %r14, %r10, %r8;\nmapa.shared::cluster.u32 %r15, %r11, %r13;\n"                          \
    "setp.eq.and.u32 %p6, %r7, 0, %p0;\nsetp.eq.and.u32 %p5, %r7, 0, %p1;\nsetp.eq.and.u32 %p7, %r7, %r8, %p1;\n"      \
    "setp.eq.and.u32 %q5, %r7, %r8, %q0;\nsetp.eq.and.u32 %q6, %r7, %r8, %q1;\n"
#define SHOWN "fence.mbarrier_init.release.cluster;\n"
#define BEGUN "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
#define START RANKS("1") SHOWN BEGUN
#define SEND(p, to) "@" p " st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r9" to "], %r0, [%r14];\n"
#define WAIT_IN(scope, p, name, parity)                                                                                \
    "@!" p " bra $end_" name ";\n$" name ":\nmbarrier.try_wait.parity" scope ".shared::cta.b64 %done, [%r10], " parity \
    ";\n@!%done bra $" name ";\n$end_" name ":\n"
#define RECEIVE(p, name, parity) WAIT_IN(".acquire.cluster", p, name, parity)
#define READ "@%p7 ld.shared.u32 %r5, [%r3];\n"
/* Rank 1's reader tells rank 0's mbarrier at 8200, which warp 0 of rank 0 waits for. */
#define CONSENT "@%q6 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r15];\n"
#define AGREED                                                                                                         \
    "@!%p6 bra $agreed;\n$agree:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %done, [%r11], 0;\n"        \
    "@!%done bra $agree;\n$agreed:\n"

static void what_is_sent_is_ordered_by_its_mbarrier(void **state)
{
    (void)state;
    const experiment experiments[] = {
        {START EXPECT("%q5", "%r10", "128") SEND("%p6", "") RECEIVE("%p7", "a", "0") READ, NULL, 2, 0, 2},
        {START EXPECT("%q5", "%r10", "128") SEND("%p6", "") RECEIVE("%p7", "a", "0") READ, NULL, 2, 1, 2},
        {START EXPECT("%q5", "%r10", "128") SEND("%p6", "") READ RECEIVE("%p7", "a", "0"), "st.async", 2, 0, 2},
        /* the wait of another warp, and one that acquires at the scope of its CTA */
        {START EXPECT("%q5", "%r10", "128") SEND("%p6", "") RECEIVE("%q5", "a", "0") READ, "st.async", 2, 0, 2},
        {START EXPECT("%q5", "%r10", "128") SEND("%p6", "") WAIT_IN("", "%p7", "a", "0") READ,
         "an st.async that completes on the mbarrier at 8192 wrote", 2, 0, 2},
        {START EXPECT("%q5", "%r10", "128") SEND("%p6", "") WAIT_IN(".acquire.cta", "%p7", "a", "0") READ,
         "an st.async that completes on the mbarrier at 8192 wrote", 2, 0, 2},
        /* without a cluster: to itself */
        {RANKS("0") SHOWN BEGUN EXPECT("%q5", "%r10", "128") SEND("%p6", "") RECEIVE("%p7", "a", "0") READ, NULL, 2, 0,
         0},
        {RANKS("0") SHOWN BEGUN EXPECT("%q5", "%r10", "128") SEND("%p6", "") WAIT_IN("", "%p7", "a", "0") READ, NULL, 2,
         0, 0},
        /* two senders, in two places and in one */
        {START EXPECT("%q5", "%r10", "256") SEND("%p6", "") SEND("%p5", "+128") RECEIVE("%p7", "a", "0") READ, NULL, 2,
         0, 2},
        {START EXPECT("%q5", "%r10", "256") SEND("%p6", "") SEND("%p5", "") RECEIVE("%p7", "a", "0") READ,
         "nothing orders this", 2, 0, 2},
        /* again into the place: when the reader has said so, before it has, and when it said so too early */
        {START EXPECT("%q5", "%r10", "128") SEND("%p6", "") RECEIVE("%p7", "a", "0") READ EXPECT("%q6", "%r10", "128")
             CONSENT AGREED SEND("%p6", "") RECEIVE("%p7", "b", "1") READ,
         NULL, 2, 0, 2},
        {START EXPECT("%q5", "%r10", "128") SEND("%p6", "") RECEIVE("%p7", "a", "0") READ EXPECT("%q6", "%r10", "128")
             CONSENT SEND("%p6", "") RECEIVE("%p7", "b", "1") READ AGREED,
         "nothing orders this", 2, 0, 2},
        {START EXPECT("%q5", "%r10", "128") SEND("%p6", "") RECEIVE("%p7", "a", "0") EXPECT("%q6", "%r10", "128")
             CONSENT READ AGREED SEND("%p6", "") RECEIVE("%p7", "b", "1"),
         "nothing orders this", 2, 0, 2},
        /* it brings nothing else that the sender has stored */
        {START EXPECT("%q5", "%r10", "128") "@%p6 st.shared::cluster.u32 [%r9+128], %r0;\n" SEND("%p6", "")
             RECEIVE("%p7", "a", "0") "@%p7 ld.shared.u32 %r5, [%r3+128];\n",
         "nothing orders this", 2, 0, 2},
        {START EXPECT("%q5", "%r10", "128") SEND("%p6", "") RECEIVE("%p7", "a", "0") READ, NULL, 8, 0, 16},
    };
    check_all(experiments, COUNT_OF(experiments));
}

/* A relaxed arrival and a fence.mbarrier_init show mbarriers, and nothing else. */
static void mbarriers_are_shown_to_the_cluster(void **state)
{
    (void)state;
#define THEN EXPECT("%q5", "%r10", "128") SEND("%p6", "") RECEIVE("%p7", "a", "0") READ
    const experiment experiments[] = {
        {RANKS("1") BEGUN THEN, "the initialisation of rank 1's mbarrier at 8192 wrote", 2, 0, 2},
        {RANKS("1") "@%p1 fence.mbarrier_init.release.cluster;\n" BEGUN THEN, "the initialisation of", 2, 0, 2},
        {RANKS("1") "barrier.cluster.arrive.relaxed.aligned;\n" SHOWN "barrier.cluster.wait.acquire.aligned;\n" THEN,
         "the initialisation of", 2, 0, 2},
        {RANKS("1") "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" THEN, NULL, 2, 0,
         2},
        {REMOTE SHOWN BEGUN "@%p7 ld.shared.u32 %r5, [%r3];\n", "nothing orders this", 2, 0, 2},
    };
    check_all(experiments, COUNT_OF(experiments));
    const experiment before = {RANKS("1") SHOWN "barrier.cluster.arrive.relaxed.aligned;\n" THEN
                                                "barrier.cluster.wait.acquire.aligned;\n",
                               NULL, 2, 0, 2};
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        char error[1024] = "";
        assert_int_equal(run_once(&before, seed, 0, error, sizeof error), -1);
        if (!strstr(error, "the initialisation of") && !strstr(error, "no mbarrier was initialised"))
            fail_msg("seed %d: %s", (int)seed, error);
    }
}

static void bytes_of_a_word_are_told_apart(void **state)
{
    (void)state;
    const experiment experiments[] = {
        {"st.shared.u8 [%r0], %r0;\n", NULL, 2, 0, 0},
        {"shr.u32 %r6, %r0, 1;\nadd.u32 %r6, %r6, %r1;\nst.shared.u8 [%r6], %r13;\n", NULL, 2, 0, 0},
        {"sub.u32 %r6, %r0, %r1;\nst.shared.u8 [%r6], %r0;\n", "wrote", 2, 0, 0}, /* threads 31 and 32: one byte */
    };
    check_all(experiments, COUNT_OF(experiments));
}

/* With a function to tell, the launch goes on, and each pair of instructions is told once. */
static void all_races_of_a_launch_are_told(void **state)
{
    (void)state;
    const experiment e = {W0 "@%p0 st.shared.u32 [%r3+128], %r0;\n" R1 "@%p1 ld.shared.u32 %r5, [%r3+128];\n", NULL, 2,
                          0, 0};
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        char error[1024] = "";
        found_count = 0;
        assert_int_equal(run_once(&e, seed, 1, error, sizeof error), 0);
        assert_int_equal(found_count, 2);
        for (int i = 0; i < 2; i++) {
            assert_non_null(strstr(found[i], "race at shared address"));
            assert_non_null(strstr(found[i], "PTX line"));
            assert_non_null(strstr(found[i], "st.shared.u32"));
            assert_non_null(strstr(found[i], "ld.shared.u32"));
            assert_non_null(strstr(found[i], "warp 0"));
            assert_non_null(strstr(found[i], "warp 1"));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(barriers_order_warps),
        cmocka_unit_test(named_barriers_order_who_takes_part),
        cmocka_unit_test(mbarriers_order_arrivals_and_waits),
        cmocka_unit_test(copies_are_ordered_by_their_mbarrier),
        cmocka_unit_test(small_copies_are_ordered_by_groups),
        cmocka_unit_test(products_read_until_they_are_waited_for),
        cmocka_unit_test(stores_read_until_they_are_waited_for),
        cmocka_unit_test(atomics_race_with_ordinary_accesses_only),
        cmocka_unit_test(lanes_race_too),
        cmocka_unit_test(clusters_meet_at_their_barrier),
        cmocka_unit_test(what_is_sent_is_ordered_by_its_mbarrier),
        cmocka_unit_test(mbarriers_are_shown_to_the_cluster),
        cmocka_unit_test(bytes_of_a_word_are_told_apart),
        cmocka_unit_test(all_races_of_a_launch_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
