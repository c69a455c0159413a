/* Kernels for the sandbox's tests (unit_gates_sandbox.c): what a CPU candidate could try, without a compiler's or a
 * text's gate before it. q holds what they need, o shows that they ran. Linked with nothing. */
#include <stdatomic.h>
#include <stdint.h>

#include "fwd_args.h"

#define KERNEL(name)                                                                                                   \
    __attribute__((visibility("default"))) void name(const fwd_args *a, int32_t lane, int32_t lanes,                   \
                                                     _Atomic int64_t *queue, void *scratch);                           \
    void name(const fwd_args *a, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
#define UNUSED (void)a, (void)lane, (void)lanes, (void)queue, (void)scratch

KERNEL(write_o)
{
    UNUSED;
    for (int32_t i = 0; i < a->q_len * a->v_dim; ++i) {
        ((float *)a->o)[i] = ((const float *)a->q)[i] + 1.0f;
    }
    ++*(unsigned char *)a->workspace;
}

/* Lanes share the work; the last says in each row who made it. */
KERNEL(share_rows)
{
    UNUSED;
    for (int64_t row; (row = atomic_fetch_add(queue, 1)) < a->q_len;) {
        for (int32_t d = 0; d < a->v_dim; ++d) {
            ((float *)a->o)[row * a->v_dim + d] = (float)lanes;
        }
        for (volatile int wait = 0; wait < 100000; ++wait) {
        }
    }
    *(unsigned char *)scratch = (unsigned char)(1 + lane);
}

/* The scales of the last head of the last entry, as the lane sees them. */
KERNEL(write_scales)
{
    UNUSED;
    const int last = a->batch * a->kv_heads - 1;
    ((float *)a->o)[0] = a->q_scales[last];
    ((float *)a->o)[1] = a->k_scales == 0;
    ((float *)a->o)[2] = a->v_scales[last];
}

KERNEL(write_to_scales)
{
    UNUSED;
    *(volatile float *)(uintptr_t)a->v_scales = 1.0f;
}

KERNEL(loop_forever)
{
    UNUSED;
    for (volatile int forever = 1; forever;) {
    }
}

KERNEL(loop_for_a_while)
{
    UNUSED;
    for (volatile int left = *(const int32_t *)a->q; left > 0; --left) {
    }
}

KERNEL(write_nowhere)
{
    UNUSED;
    *(volatile int *)(16 * (uintptr_t)a->batch) = 1;
}

KERNEL(write_input)
{
    UNUSED;
    *(volatile float *)(uintptr_t)a->v = 1.0f;
}

KERNEL(write_arguments)
{
    UNUSED;
    ((volatile fwd_args *)(uintptr_t)a)->scale = 1.0f;
}

KERNEL(write_beside)
{
    UNUSED;
    ((volatile float *)a->o)[-1] = 1.0f; /* still within the page */
}

KERNEL(write_beside_queue)
{
    UNUSED;
    ((volatile int64_t *)(uintptr_t)queue)[-1] = 1;
}

KERNEL(write_far)
{
    UNUSED;
    ((volatile float *)a->o)[1 << 20] = 1.0f;
}

KERNEL(read_far)
{
    UNUSED;
    *(float *)a->o = ((const volatile float *)a->k)[1 << 14]; /* the page after its own */
}

static int descend(volatile int depth)
{
    volatile char frame[4096];
    frame[0] = (char)depth;
    return depth < 0 ? 0 : descend(depth + 1) + frame[0];
}

KERNEL(overflow_stack)
{
    UNUSED;
    *(volatile int *)a->workspace = descend(0);
}

/* Reads where q says. */
KERNEL(read_there)
{
    UNUSED;
    const uintptr_t at = *(const uintptr_t *)a->q;
    *(unsigned char *)a->o = *(const volatile unsigned char *)at;
}

/* Calls what q says. */
KERNEL(call_there)
{
    UNUSED;
    ((void (*)(void)) * (const uintptr_t *)a->q)();
}

static const int32_t constants[64] = {1, 2, 3};

KERNEL(write_constants)
{
    UNUSED;
    ((volatile int32_t *)(uintptr_t)constants)[lane] = 4;
}

KERNEL(write_code)
{
    UNUSED;
    *(volatile unsigned char *)(uintptr_t)&write_code = 0xc3;
}

KERNEL(run_data)
{
    UNUSED;
    *(volatile unsigned char *)a->o = 0xc3;
    ((void (*)(void))a->o)();
}

/* Whether the stack holds anything but this call. */
KERNEL(search_stack)
{
    UNUSED;
    const volatile unsigned char here = 0, *at = &here - 4096;
    uint64_t found = 0;
    for (const volatile unsigned char *end = &here - 262144; at > end; --at) {
        found += *at != 0;
    }
    ((float *)a->o)[0] = (float)found;
}

#if defined __x86_64__
/* What registers hold at the entry that no argument is in: written to o, 8 bytes each, ten of them; then ymm7. */
__attribute__((visibility("default"), naked)) void search_registers(const fwd_args *a, int32_t lane, int32_t lanes,
                                                                    _Atomic int64_t *queue, void *scratch);
void search_registers(const fwd_args *a, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    __asm__("mov %c0(%%rdi), %%rdi\n\t"
            "mov %%rax, (%%rdi)\n\tmov %%rbx, 8(%%rdi)\n\tmov %%rbp, 16(%%rdi)\n\tmov %%r9, 24(%%rdi)\n\t"
            "mov %%r11, 32(%%rdi)\n\tmov %%r12, 40(%%rdi)\n\tmov %%r13, 48(%%rdi)\n\tmov %%r14, 56(%%rdi)\n\t"
            "mov %%r15, 64(%%rdi)\n\tmovups %%xmm7, 72(%%rdi)\n\tmovups %%xmm15, 88(%%rdi)\n\t"
            "pcmpeqd %%xmm7, %%xmm7\n\tmov $-1, %%rbx\n\tmov $-1, %%r11\n\tret"
            :
            : "i"(__builtin_offsetof(fwd_args, o)));
}

#define INSTRUCTION(name, text)                                                                                        \
    KERNEL(name)                                                                                                       \
    {                                                                                                                  \
        UNUSED;                                                                                                        \
        __asm__ volatile(text ::: "rax", "rbx", "rcx", "rdx", "r11", "memory");                                        \
        *(float *)a->o = 1.0f;                                                                                         \
    }
INSTRUCTION(call_system, "mov $39, %%eax\n\tsyscall")
INSTRUCTION(open_file, "mov $257, %%eax\n\tsyscall")
INSTRUCTION(fork_once, "mov $57, %%eax\n\tsyscall")
INSTRUCTION(leave_group, "mov $231, %%eax\n\tsyscall")
INSTRUCTION(leave_alone, "mov $60, %%eax\n\tsyscall")
INSTRUCTION(write_result, "mov $1, %%eax\n\tmov $3, %%edi\n\tmov %%rsp, %%rsi\n\tmov $8, %%edx\n\tsyscall")
INSTRUCTION(call_old_system, "mov $20, %%eax\n\tint $0x80")
INSTRUCTION(call_vsyscall, "mov $0xffffffffff600000, %%rax\n\txor %%edi, %%edi\n\tcall *%%rax")
INSTRUCTION(read_counter, "rdtsc")
INSTRUCTION(read_counter_and_core, "rdtscp")
INSTRUCTION(read_events, "xor %%ecx, %%ecx\n\trdpmc")
INSTRUCTION(stop_itself, "int3")
INSTRUCTION(step_itself, "pushf\n\torl $256, (%%rsp)\n\tpopf\n\tnop\n\tnop")
INSTRUCTION(halt, "hlt")
#elif defined __aarch64__
#define INSTRUCTION(name, text)                                                                                        \
    KERNEL(name)                                                                                                       \
    {                                                                                                                  \
        UNUSED;                                                                                                        \
        __asm__ volatile(text ::: "x0", "x8", "memory");                                                               \
        *(float *)a->o = 1.0f;                                                                                         \
    }
INSTRUCTION(call_system, "mov x8, #172\n\tsvc #0")
INSTRUCTION(leave_group, "mov x8, #94\n\tsvc #0")
INSTRUCTION(stop_itself, "brk #0")
#endif
