/* Foreign CPU kernels in processes that hold nothing else, see sandbox.h.
 *
 * A cell is one layout of a call's tensors in a shared arena, and one process a lane, forked from here. The process
 * gives itself the arena's access rights and stops. Then this process empties it by ptrace: a page of the arena holds
 * one system call instruction, with which every mapping but the arena is taken away and the filter installed that ends
 * the process at any further system call. Only then is the kernel entered. */
#include "sandbox.h"

#include <elf.h>
#include <errno.h>
#include <inttypes.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/progress.h"

enum {
    PAGE = 65536,         /* no smaller than any system's page */
    STACK_BYTES = 524288, /* of a lane */
    EMPTY_CALLS = 33,     /* to know what one costs */
    STATE_BYTES = 65536   /* no processor's vector state is larger */
};

/* Buffers by their numbers, then what else a call has. */
enum {
    PART_ARGS = ACR__BUFFERS,
    PART_QUEUE,
    PART_SCRATCH,
    PARTS
};

/* A tensor in the arena: its last byte lies at most 63 bytes before the inaccessible page that follows it, so that its
 * address is the caller's modulo 64. */
typedef struct arena_part {
    int64_t bytes; /* 0 = there is none */
    const void *from;
    int64_t offset;     /* in the arena */
    int64_t first, end; /* accessible pages */
    bool writable;
} arena_part;

typedef struct lane_process {
    pid_t pid; /* 0 = none */
    clockid_t clock;
    int64_t stack; /* its first byte in the arena; STACK_BYTES */
    double start_s;
} lane_process;

typedef struct cell {
    char *arena; /* NULL = there is none; the same address in every lane */
    int64_t arena_bytes, syscall_page, code;
    arena_part parts[PARTS];
    lane_process *lanes;
    int32_t lane_count;
    double empty_s; /* what the clock says of a call that does nothing */
} cell;

typedef struct sandbox {
    const elf_code *kernel;
    acr_dtype dtype;
    acr_pass pass;
    double timeout_s;
    size_t workspace_bytes, shared_bytes;
    int32_t threads;
    bool shared;
    cell cell;
    int64_t calls;
    double seconds;
    sandbox_fault fault;
    char text[160];
} sandbox;

static sandbox boxes[SANDBOX_SLOTS];
static const int64_t ARENA_BYTES_MAX = (int64_t)8 << 30; /* of address space; memory is taken as it is touched */

static void note(sandbox *b, sandbox_fault fault, const char *text)
{
    if (b->fault == SANDBOX_FINE) {
        b->fault = fault;
        snprintf(b->text, sizeof b->text, "%s", text);
    }
}

/* ---- The processor ---- */

/* A call in a stopped process: where it goes, with what, and to where it returns. */
typedef struct entry_state {
    uintptr_t code, stack, returns_to;
    uint64_t arguments[6];
} entry_state;

#if defined __x86_64__
static const unsigned char syscall_code[] = {0x0f, 0x05, 0xcc}; /* syscall; int3 */

static bool set_registers(pid_t pid, const entry_state *e, int64_t system_call)
{
    struct user_regs_struct r;
    if (ptrace(PTRACE_GETREGS, pid, NULL, &r) != 0) {
        return false;
    }
    r = (struct user_regs_struct){.cs = r.cs, .ss = r.ss, .eflags = 0x202};
    r.rip = e->code;
    r.rsp = e->stack;
    r.rax = (uint64_t)system_call;
    r.orig_rax = ~0ull; /* no system call to resume */
    r.rdi = e->arguments[0];
    r.rsi = e->arguments[1];
    r.rdx = e->arguments[2];
    r.r8 = e->arguments[4];
    r.r9 = e->arguments[5];
    r.rcx = e->arguments[3];
    r.r10 = e->arguments[3];
    return ptrace(PTRACE_SETREGS, pid, NULL, &r) == 0;
}

static bool get_registers(pid_t pid, uintptr_t *code, int64_t *result)
{
    struct user_regs_struct r;
    const bool got = ptrace(PTRACE_GETREGS, pid, NULL, &r) == 0;
    *code = got ? r.rip : 0;
    *result = got ? (int64_t)r.rax : -1;
    return got;
}

/* Vector registers as a new process has them. */
static bool clear_vectors(pid_t pid)
{
    enum {
        CONTROL_WORD = 0,
        MXCSR = 24,
        COMPONENTS = 512 /* of the state that follow; the others are as at the start */
    };
    static _Alignas(64) unsigned char state[STATE_BYTES];
    static size_t bytes;
    struct iovec view = {state, sizeof state};
    if (bytes == 0) {
        if (ptrace(PTRACE_GETREGSET, pid, NT_X86_XSTATE, &view) != 0 || view.iov_len < COMPONENTS + 64) {
            return false;
        }
        bytes = view.iov_len;
        memset(state, 0, sizeof state);
        memcpy(state + CONTROL_WORD, &(uint16_t){0x37f}, sizeof(uint16_t));
        memcpy(state + MXCSR, &(uint32_t){0x1f80}, sizeof(uint32_t));
        state[COMPONENTS] = 3; /* x87 and SSE */
    }
    view.iov_len = bytes;
    return ptrace(PTRACE_SETREGSET, pid, NT_X86_XSTATE, &view) == 0;
}

/* Where a function finds its return address. */
static void put_return(entry_state *e, char *stack_top)
{
    memcpy(stack_top - sizeof(uint64_t), &(uint64_t){e->returns_to}, sizeof(uint64_t));
    e->stack -= sizeof(uint64_t);
}

static bool is_clock(const unsigned char *at)
{
    /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference): callers give bytes of a mapped range */
    return at[0] == 0x0f && (at[1] == 0x31 || at[1] == 0x33 || (at[1] == 0x01 && at[2] == 0xf9));
}

static bool take_clock(void)
{
    return prctl(PR_SET_TSC, PR_TSC_SIGSEGV, 0, 0, 0) == 0;
}
#elif defined __aarch64__
static const unsigned char syscall_code[] = {0x01, 0x00, 0x00, 0xd4, 0x00, 0x00, 0x20, 0xd4}; /* svc #0; brk #0 */

enum {
    SYSTEM_CALL_REGISTER = 8,
    LINK_REGISTER = 30
};

static bool set_registers(pid_t pid, const entry_state *e, int64_t system_call)
{
    struct user_regs_struct r;
    struct iovec view = {&r, sizeof r};
    if (ptrace(PTRACE_GETREGSET, pid, NT_PRSTATUS, &view) != 0) {
        return false;
    }
    r = (struct user_regs_struct){.pstate = r.pstate & 0x0fffffff};
    r.pc = e->code;
    r.sp = e->stack;
    for (int i = 0; i < 6; ++i) {
        r.regs[i] = e->arguments[i];
    }
    r.regs[SYSTEM_CALL_REGISTER] = (uint64_t)system_call;
    r.regs[LINK_REGISTER] = e->returns_to;
    return ptrace(PTRACE_SETREGSET, pid, NT_PRSTATUS, &view) == 0;
}

static bool get_registers(pid_t pid, uintptr_t *code, int64_t *result)
{
    struct user_regs_struct r;
    struct iovec view = {&r, sizeof r};
    const bool got = ptrace(PTRACE_GETREGSET, pid, NT_PRSTATUS, &view) == 0;
    *code = got ? r.pc : 0;
    *result = got ? (int64_t)r.regs[0] : -1;
    return got;
}

static bool clear_vectors(pid_t pid)
{
    struct user_fpsimd_struct state;
    struct iovec view = {&state, sizeof state};
    memset(&state, 0, sizeof state);
    return ptrace(PTRACE_SETREGSET, pid, NT_PRFPREG, &view) == 0;
}

static void put_return(entry_state *e, char *stack_top)
{
    (void)e, (void)stack_top;
}

/* Reads of a counter are refused in the disassembly (identity.h); where the system can, they fault too. */
static bool is_clock(const unsigned char *at)
{
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return (word & 0xffffff00u) == 0xd53be000u; /* mrs x, cntfrq..cntvctss */
}

static bool take_clock(void)
{
    (void)prctl(PR_SET_TSC, PR_TSC_SIGSEGV, 0, 0, 0);
    return true;
}
#else
#error "the sandbox knows the registers of x86-64 and aarch64 alone"
#endif

/* ---- A lane, on its own side ---- */

static void limit(__rlimit_resource_t resource, rlim_t value)
{
    const struct rlimit both = {value, value};
    setrlimit(resource, &both);
}

/* Sanitizers and the harness catch signals to explain them; a lane just dies of them. */
static void forget_handlers(void)
{
    for (int i = 1; i < _NSIG; ++i) {
        if (i != SIGKILL && i != SIGSTOP && i != 32 && i != 33) { /* the last two are the C library's */
            signal(i, SIG_DFL);
        }
    }
    const stack_t none = {.ss_flags = SS_DISABLE};
    sigset_t nothing;
    sigaltstack(&none, NULL);
    sigemptyset(&nothing);
    sigprocmask(SIG_SETMASK, &nothing, NULL);
}

/* The C library has told the system of memory, about to go, into which it writes the processor's number. */
extern const ptrdiff_t __rseq_offset __attribute__((weak));
extern const unsigned int __rseq_size __attribute__((weak));

static bool leave_rseq(void)
{
#if defined SYS_rseq && (defined __x86_64__ || defined __aarch64__)
    enum {
        UNREGISTER = 1,
        LEAST_BYTES = 32
    };
#if defined __x86_64__
    const uint32_t signature = 0x53053053;
#else
    const uint32_t signature = 0xd428bc00;
#endif
    if (!&__rseq_size || __rseq_size == 0) {
        return true;
    }
    char *area;
#if defined __x86_64__
    __asm__("mov %%fs:0, %0" : "=r"(area));
#else
    area = __builtin_thread_pointer();
#endif
    area += __rseq_offset;
    return syscall(SYS_rseq, area, LEAST_BYTES, UNREGISTER, signature) == 0 ||
           syscall(SYS_rseq, area, (__rseq_size + 31) / 32 * 32, UNREGISTER, signature) == 0;
#else
    return true;
#endif
}

static bool allow(const cell *c, int64_t first, int64_t bytes, int access)
{
    return mprotect(c->arena + first, (size_t)bytes, access) == 0;
}

static int64_t page_down(int64_t bytes)
{
    const int64_t page = sysconf(_SC_PAGESIZE);
    return bytes / page * page;
}

static int64_t page_up(int64_t bytes)
{
    return page_down(bytes + sysconf(_SC_PAGESIZE) - 1);
}

static bool protect(const cell *c, const elf_code *kernel, int64_t stack)
{
    const int64_t first_code = page_down((int64_t)kernel->first_code), end_code = page_up((int64_t)kernel->end_code);
    bool done = allow(c, 0, c->arena_bytes, PROT_NONE) && allow(c, c->syscall_page, PAGE, PROT_READ | PROT_EXEC) &&
                allow(c, c->code, page_up((int64_t)kernel->size), PROT_READ) &&
                allow(c, c->code + first_code, end_code - first_code, PROT_READ | PROT_EXEC) &&
                allow(c, stack, STACK_BYTES, PROT_READ | PROT_WRITE);
    for (int i = 0; i < PARTS; ++i) {
        const arena_part *p = &c->parts[i];
        const int access = p->writable ? PROT_READ | PROT_WRITE : PROT_READ;
        done = done && (p->bytes == 0 || allow(c, p->first, p->end - p->first, access));
    }
    return done;
}

/* Ends in a stop, after which this process is emptied from outside. */
static void be_lane(const cell *c, const elf_code *kernel, int64_t stack)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    forget_handlers();
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_NPROC, 0);
    limit(RLIMIT_FSIZE, 0);
    limit(RLIMIT_NOFILE, 0);
    syscall(SYS_close_range, 0u, ~0u, 0u);
    if (protect(c, kernel, stack) && take_clock() && leave_rseq() && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
        ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0) {
        raise(SIGSTOP);
    }
    _exit(125);
}

/* ---- A lane, from this side ---- */

/* Waits until it stops or ends. False when it did neither in time. */
static bool await(pid_t pid, int *status, double end_s)
{
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    for (;;) {
        const pid_t done = waitpid(pid, status, WNOHANG | __WALL);
        if (done == pid || (done < 0 && errno != EINTR)) {
            return done == pid;
        }
        const double left_s = fmin(end_s - monotonic_s(), 0.05); /* no longer, should a signal go astray */
        if (end_s - monotonic_s() <= 0) {
            return false;
        }
        const struct timespec wait = {0, (long)(1e9 * left_s) + 1};
        sigtimedwait(&child, NULL, &wait);
    }
}

static void kill_lane(lane_process *l)
{
    int status;
    if (l->pid > 0) {
        kill(l->pid, SIGKILL);
        while (await(l->pid, &status, monotonic_s() + 5.0) && WIFSTOPPED(status)) {
        }
        l->pid = 0;
    }
}

/* One system call of a stopped process that has no filter yet. */
static bool call_system(const cell *c, pid_t pid, int64_t number, uint64_t first, uint64_t second, uint64_t third)
{
    int status;
    uintptr_t code;
    int64_t result;
    const entry_state e = {.code = (uintptr_t)c->arena + (uintptr_t)c->syscall_page,
                           .arguments = {first, second, third}};
    if (!set_registers(pid, &e, number) || ptrace(PTRACE_CONT, pid, NULL, NULL) != 0 ||
        !await(pid, &status, monotonic_s() + 10.0) || !WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP ||
        !get_registers(pid, &code, &result)) {
        return false;
    }
    errno = result < 0 ? (int)-result : 0;
    return result >= 0;
}

/* Goes through what is mapped in a process beside the arena: takes it away, or only looks. False when something cannot
 * be taken away, or is still there. What is above all user memory is the system's: calls into it end in the filter. */
static bool empty(const cell *c, pid_t pid, bool look_only)
{
    char path[64], line[512];
    const uintptr_t arena = (uintptr_t)c->arena, arena_end = arena + (uintptr_t)c->arena_bytes;
    struct range {
        uintptr_t first, end;
    } *ranges = NULL;
    size_t count = 0, capacity = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *maps = fopen(path, "re");
    bool done = maps != NULL;
    while (done && fgets(line, sizeof line, maps)) {
        struct range r;
        /* NOLINTNEXTLINE(cert-err34-c): the kernel wrote the line, and two numbers are asked for */
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR, &r.first, &r.end) != 2) {
            done = false;
        } else if (!(r.first >= arena && r.end <= arena_end) && r.first < UINTPTR_MAX / 2) {
            struct range *grown =
                count < capacity ? ranges : realloc(ranges, (capacity = 2 * capacity + 64) * sizeof r);
            done = grown != NULL;
            ranges = done ? grown : ranges;
            if (done) {
                ranges[count++] = r;
            }
        }
    }
    if (maps) {
        fclose(maps);
    }
    for (size_t i = 0; i < count && done; ++i) {
        done = !look_only && call_system(c, pid, SYS_munmap, ranges[i].first, ranges[i].end - ranges[i].first, 0);
    }
    free(ranges);
    return done;
}

/* The filter stands in the system call's page, behind the code. */
static uintptr_t write_syscall_page(cell *c)
{
    enum {
        FILTER_AT = 256,
        PROGRAM_AT = 512
    };
    static const struct sock_filter end_always[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)};
    char *page = c->arena + c->syscall_page;
    const struct sock_fprog program = {1, (struct sock_filter *)(void *)(page + FILTER_AT)};
    memcpy(page, syscall_code, sizeof syscall_code);
    memcpy(page + FILTER_AT, end_always, sizeof end_always);
    memcpy(page + PROGRAM_AT, &program, sizeof program);
    return (uintptr_t)page + PROGRAM_AT;
}

/* Where a call returns to: it faults, in the first page of the arena, which nobody may touch. */
static uintptr_t return_address(const cell *c)
{
    return (uintptr_t)c->arena + 64;
}

static bool enter(const cell *c, const lane_process *l, uintptr_t code, const uint64_t arguments[6])
{
    if (!c->arena) {
        return false;
    }
    entry_state e = {.code = code, .returns_to = return_address(c)};
    e.stack = (uintptr_t)c->arena + (uintptr_t)(l->stack + STACK_BYTES - 64);
    memcpy(e.arguments, arguments, sizeof e.arguments);
    memset(c->arena + l->stack, 0, STACK_BYTES);
    put_return(&e, c->arena + l->stack + STACK_BYTES - 64);
    return clear_vectors(l->pid) && set_registers(l->pid, &e, 0);
}

static double clock_of(const lane_process *l)
{
    struct timespec now = {0, 0};
    clock_gettime(l->clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void note_end(sandbox *b, lane_process *l, int status)
{
    char text[160];
    l->pid = 0;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS) {
        note(b, SANDBOX_FORBIDDEN, "it attempted a system call");
    } else if (WIFSIGNALED(status)) {
        snprintf(text, sizeof text, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
        note(b, SANDBOX_CRASHED, text);
    } else {
        note(b, SANDBOX_CRASHED, "its process ended");
    }
}

static bool is_fatal(int signal_number)
{
    static const int fatal[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGABRT, SIGSYS};
    bool found = false;
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; ++i) {
        found = found || fatal[i] == signal_number;
    }
    return found;
}

/* It has stopped for a signal: 1 = it has returned from its call, 0 = it goes on, -1 = it is at fault. */
static int look_at_stop(sandbox *b, const lane_process *l, int signal_number)
{
    uintptr_t code;
    int64_t ignored;
    char text[160];
    const cell *c = &b->cell;
    if (!is_fatal(signal_number)) {
        return ptrace(PTRACE_CONT, l->pid, NULL, NULL) == 0 ? 0 : -1;
    }
    if (get_registers(l->pid, &code, &ignored) && signal_number == SIGSEGV && code == return_address(c)) {
        return 1;
    }
    const uintptr_t first = (uintptr_t)c->arena + (uintptr_t)c->code;
    if (signal_number == SIGSEGV && code >= first && code < first + b->kernel->end_code &&
        is_clock((const unsigned char *)code)) {
        note(b, SANDBOX_FORBIDDEN, "it read a clock");
    } else {
        snprintf(text, sizeof text, "signal %d (%s)", signal_number, strsignal(signal_number));
        note(b, SANDBOX_CRASHED, text);
    }
    return -1;
}

/* Lets lanes that are entered run until all have returned; writes what the longest took. */
static bool run_lanes(sandbox *b, int32_t count, double *seconds)
{
    cell *c = &b->cell;
    static const double LOOK_S = 0.1, SHARE = 1.0 / 64; /* of a processor, which a busy machine gives at least */
    const double end_s = monotonic_s() + b->timeout_s / SHARE;
    bool done = true;
    for (int32_t i = 0; i < count; ++i) {
        c->lanes[i].start_s = clock_of(&c->lanes[i]);
    }
    for (int32_t i = 0; i < count; ++i) {
        done = ptrace(PTRACE_CONT, c->lanes[i].pid, NULL, NULL) == 0 && done;
    }
    *seconds = 0;
    for (int32_t i = 0; i < count && done; ++i) {
        lane_process *l = &c->lanes[i];
        for (int stop = 0, status; stop == 0 && done;) {
            if (!await(l->pid, &status, monotonic_s() + LOOK_S)) {
                done = clock_of(l) - l->start_s < b->timeout_s && monotonic_s() < end_s;
                if (!done) {
                    note(b, SANDBOX_HUNG, "a call did not end in its time");
                }
            } else if (!WIFSTOPPED(status)) {
                note_end(b, l, status);
                done = false;
            } else {
                stop = look_at_stop(b, l, WSTOPSIG(status));
                done = stop >= 0;
            }
        }
        *seconds = done ? fmax(*seconds, clock_of(l) - l->start_s) : 0;
    }
    if (!done) {
        note(b, SANDBOX_BROKEN, "a lane of the sandbox is gone");
    }
    return done;
}

/* ---- A cell ---- */

static void end_cell(cell *c)
{
    for (int32_t i = 0; i < c->lane_count; ++i) {
        kill_lane(&c->lanes[i]);
    }
    if (c->arena) {
        munmap(c->arena, (size_t)c->arena_bytes);
    }
    free(c->lanes);
    *c = (cell){.arena = NULL};
}

static const char *start_lane(cell *c, lane_process *l, const elf_code *kernel, uintptr_t filter)
{
    int status;
    fflush(NULL); /* what is buffered is this process's to write */
    l->pid = fork();
    if (l->pid == 0) {
        be_lane(c, kernel, l->stack);
    }
    if (l->pid < 0) {
        l->pid = 0;
        return "no process";
    }
    if (!await(l->pid, &status, monotonic_s() + 30.0) || !WIFSTOPPED(status) ||
        ptrace(PTRACE_SETOPTIONS, l->pid, NULL, PTRACE_O_EXITKILL) != 0) {
        return "a process cannot be traced here";
    }
    if (!empty(c, l->pid, false)) {
        return "a process cannot be emptied here";
    }
    if (!call_system(c, l->pid, SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, filter)) {
        return "system calls cannot be filtered here";
    }
    if (!empty(c, l->pid, true)) {
        return "a process is not empty";
    }
    return clock_getcpuclockid(l->pid, &l->clock) == 0 ? NULL : "no clock of a process";
}

/* The least that a call costs which returns at once, on one lane: what is taken off is never too much. */
static bool measure_empty(sandbox *b)
{
    const uint64_t nothing[6] = {0};
    cell *c = &b->cell;
    c->empty_s = INFINITY;
    for (int i = 0; i < EMPTY_CALLS; ++i) {
        double seconds;
        if (!enter(c, &c->lanes[0], return_address(c), nothing) || !run_lanes(b, 1, &seconds)) {
            return false;
        }
        c->empty_s = fmin(c->empty_s, seconds);
    }
    return true;
}

/* Memory at an address that nobody can guess, with the same place in every lane. */
static char *map_arena(int64_t bytes)
{
    enum {
        TRIES = 64
    };
    const int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
    for (int i = 0; i < TRIES; ++i) {
        uint64_t bits;
        if (getrandom(&bits, sizeof bits, 0) != (ssize_t)sizeof bits) {
            break;
        }
        const uintptr_t at = (uintptr_t)(bits % ((uint64_t)1 << 46) / PAGE * PAGE + ((uint64_t)1 << 32));
        void *memory = mmap((void *)at, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (memory == MAP_FAILED) {
            break;
        }
        if ((uintptr_t)memory % PAGE == 0) {
            return memory;
        }
        munmap(memory, (size_t)bytes);
    }
    return NULL;
}

/* Makes the arena of the parts as they are laid out, and the lanes' processes. */
static bool start_cell(sandbox *b, const cell *layout, int32_t lanes)
{
    cell *c = &b->cell;
    end_cell(c);
    *c = *layout;
    c->lanes = calloc((size_t)lanes, sizeof *c->lanes);
    c->arena_bytes = layout->arena_bytes + lanes * (STACK_BYTES + (int64_t)PAGE);
    c->arena = c->lanes && c->arena_bytes <= ARENA_BYTES_MAX ? map_arena(c->arena_bytes) : NULL;
    if (!c->arena) {
        note(b, SANDBOX_BROKEN, "no memory, or the problem is too large for the sandbox");
        return false;
    }
    elf_code_place((unsigned char *)c->arena + c->code, b->kernel, (uintptr_t)c->arena + (uintptr_t)c->code);
    const uintptr_t filter = write_syscall_page(c);
    const char *failure = NULL;
    for (int32_t i = 0; i < lanes && !failure; ++i) {
        lane_process *l = &c->lanes[c->lane_count++];
        l->stack = layout->arena_bytes + i * (STACK_BYTES + (int64_t)PAGE);
        failure = start_lane(c, l, b->kernel, filter);
    }
    if (failure) {
        char text[160];
        snprintf(text, sizeof text, "the sandbox could not be set up: %s", failure);
        note(b, SANDBOX_BROKEN, text);
    }
    return !failure && measure_empty(b);
}

/* ---- Calls ---- */

static acr_strides strides_of(const fwd_strides *s)
{
    return (acr_strides){s->batch, s->head, s->row};
}

static acr_dtype out_dtype(acr_dtype dtype, const fwd_args *a)
{
    if (dtype != ACR_E4M3) {
        return a->out_bf16 == ACR__OUT_F32 ? ACR_F32 : dtype;
    }
    return a->out_bf16 ? ACR_BF16 : ACR_F16;
}

/* Gaps between the parts, which nobody may touch, of lengths that nobody can guess. */
static int64_t random_gap(void)
{
    enum {
        PAGES = 8
    };
    unsigned char byte = 0;
    (void)!getrandom(&byte, 1, 0);
    return (1 + byte % PAGES) * (int64_t)PAGE;
}

/* What a kernel of the pass is given: with zeros where it is told of no cache. */
static acr__args whole_args(const sandbox *b, const fwd_args *a)
{
    return b->pass == ACR_BACKWARD ? (acr__args){.bwd = *bwd_args_of(a)}
                                   : (acr__args){.paged = {.fwd = *a, .paging = fwd_paging_of(a)}};
}

/* Whether the arguments of the pass name a buffer. */
static bool is_told(const sandbox *b, acr__buffer which)
{
    return b->pass == ACR_BACKWARD ? which != ACR__PAGE_TABLE : which < ACR__FORWARD_BUFFERS;
}

static const void *told_address(const sandbox *b, const acr__args *all, acr__buffer which)
{
    return is_told(b, which) ? acr__pointer_at(all, acr__buffer_fields[which].in_args) : NULL;
}

/* As much of the problem as the sizes of its buffers want. */
static acr_problem problem_of_args(const sandbox *b, const acr__args *all)
{
    const fwd_args *a = &all->fwd;
    const fwd_paging paging = fwd_paging_of(a);
    acr_problem p = {.dtype = b->dtype,
                     .pass = b->pass,
                     .out_dtype = out_dtype(b->dtype, a),
                     .batch = a->batch,
                     .q_heads = a->q_heads,
                     .kv_heads = a->kv_heads,
                     .q_len = a->q_len,
                     .kv_len = a->kv_len,
                     .qk_dim = a->qk_dim,
                     .v_dim = a->v_dim,
                     .q = strides_of(&a->q_stride),
                     .k = strides_of(&a->k_stride),
                     .v = strides_of(&a->v_stride),
                     .o = strides_of(&a->o_stride),
                     .bias = strides_of(&a->bias_stride),
                     .bias_dtype = (acr_dtype)a->bias_type,
                     .ranges = a->ranges_count,
                     .kv_dtype = (acr_dtype)paging.kv_type,
                     .page = paging.page};
    if (b->pass == ACR_BACKWARD) {
        p.grad_dtype = all->bwd.grad_f32 ? ACR_F32 : b->dtype;
        p.d_o = strides_of(&all->bwd.d_o_stride);
        p.dq = strides_of(&all->bwd.dq_stride);
        p.dk = strides_of(&all->bwd.dk_stride);
        p.dv = strides_of(&all->bwd.dv_stride);
    }
    for (acr__buffer i = 0; i < ACR__BUFFERS; ++i) {
        p.flags |= told_address(b, all, i) ? acr__buffer_fields[i].flag : 0;
    }
    return p;
}

static int64_t args_bytes(const sandbox *b)
{
    return b->pass == ACR_BACKWARD ? sizeof(bwd_args) : sizeof(fwd_paged_args);
}

/* What a call brings: the sizes and where they come from. */
static void list_parts(arena_part parts[PARTS], const sandbox *b, const fwd_args *a, const int64_t *queue)
{
    const acr__args all = whole_args(b, a);
    const fwd_paging paging = fwd_paging_of(a);
    const acr_problem p = problem_of_args(b, &all);
    const bool packed = p.flags & ACR_PACKED;
    const acr__rows rows = {packed ? a->q_total : a->q_len, packed ? a->kv_total : a->kv_len, paging.pages,
                            paging.table_stride};
    for (acr__buffer i = 0; i < ACR__BUFFERS; ++i) {
        const void *from = told_address(b, &all, i);
        parts[i] = (arena_part){
            .bytes = from ? acr__buffer_bytes(&p, i, rows) : 0, .from = from, .writable = acr__is_output(&p, i)};
    }
    parts[PART_ARGS] = (arena_part){.bytes = args_bytes(b)};
    parts[PART_QUEUE] = (arena_part){.bytes = sizeof *queue, .from = queue, .writable = true};
    parts[PART_SCRATCH] = (arena_part){.bytes = (int64_t)b->workspace_bytes, .from = a->workspace, .writable = true};
}

static int64_t misalignment(const arena_part *p)
{
    return (int64_t)((uintptr_t)p->from % 64);
}

/* Whether a call fits the cell that there is. */
static bool fits(const cell *c, const arena_part parts[PARTS], int32_t lanes)
{
    bool same = c->arena && c->lane_count == lanes;
    for (int i = 0; i < PARTS && same; ++i) {
        same = c->parts[i].bytes == parts[i].bytes &&
               (i == PART_QUEUE || misalignment(&c->parts[i]) == misalignment(&parts[i]));
    }
    return same;
}

static void lay_out(cell *layout, const arena_part parts[PARTS], const elf_code *kernel)
{
    *layout = (cell){.syscall_page = PAGE, .code = 2 * PAGE + random_gap()};
    int64_t at = layout->code + ((int64_t)kernel->size + PAGE - 1) / PAGE * PAGE + random_gap();
    for (int i = 0; i < PARTS; ++i) {
        arena_part *p = &layout->parts[i];
        *p = parts[i];
        p->first = at;
        p->end = at + (p->bytes + 63 + PAGE - 1) / PAGE * PAGE;
        p->offset = (p->end - p->bytes - misalignment(p)) / 64 * 64 + misalignment(p);
        at = p->bytes > 0 ? p->end + random_gap() : at;
    }
    layout->arena_bytes = at;
}

static void *arena_address(const cell *c, int which)
{
    const arena_part *p = &c->parts[which];
    return p->bytes > 0 ? c->arena + p->offset : NULL;
}

/* Everything that a lane may touch becomes NaN bytes, then what the caller has there; guards beside tensors too. */
static void copy_in(cell *c, const arena_part parts[PARTS])
{
    for (int i = 0; i < PARTS; ++i) {
        arena_part *p = &c->parts[i];
        p->from = parts[i].from;
        if (p->bytes > 0) {
            memset(c->arena + p->first, 0xff, (size_t)(p->end - p->first));
        }
        if (p->bytes > 0 && p->from) {
            memcpy(c->arena + p->offset, p->from, (size_t)p->bytes);
        }
    }
}

static void copy_args(sandbox *b, const fwd_args *a)
{
    const cell *c = &b->cell;
    acr__args there = whole_args(b, a);
    for (acr__buffer i = 0; i < ACR__BUFFERS; ++i) {
        if (is_told(b, i)) {
            acr__set_pointer_at(&there, acr__buffer_fields[i].in_args, arena_address(c, (int)i));
        }
    }
    there.fwd.workspace = arena_address(c, PART_SCRATCH);
    memcpy(arena_address(c, PART_ARGS), &there, (size_t)args_bytes(b));
}

/* The pages' bytes beside an output that were written. */
static bool stained(const cell *c, const arena_part *p)
{
    for (int64_t at = p->first; at < p->end; ++at) {
        at = at == p->offset ? at + p->bytes : at;
        if (at < p->end && (unsigned char)c->arena[at] != 0xff) {
            return true;
        }
    }
    return false;
}

static void copy_out(sandbox *b)
{
    const cell *c = &b->cell;
    for (int i = 0; i < PARTS; ++i) {
        const arena_part *p = &c->parts[i];
        if (p->bytes > 0 && p->writable) {
            memcpy((void *)(uintptr_t)p->from, c->arena + p->offset, (size_t)p->bytes);
            if (stained(c, p)) {
                char text[64];
                snprintf(text, sizeof text, "it wrote outside of %s",
                         i == PART_QUEUE     ? "the queue"
                         : i == PART_SCRATCH ? "its scratch"
                                             : acr__buffer_fields[i].name);
                note(b, SANDBOX_CRASHED, text);
            }
        }
    }
}

/* Sets the lanes' processes to the kernel's entry. */
static bool enter_lanes(sandbox *b, int32_t first_lane, int32_t lanes)
{
    const cell *c = &b->cell;
    const size_t scratch_bytes = b->threads > 0 ? (b->workspace_bytes - b->shared_bytes) / (size_t)b->threads : 0;
    bool done = true;
    for (int32_t i = 0; i < c->lane_count && done; ++i) {
        char *workspace = arena_address(c, PART_SCRATCH);
        char *scratch =
            workspace ? workspace + b->shared_bytes + (c->lane_count > 1 ? (size_t)i * scratch_bytes : 0) : NULL;
        const uint64_t arguments[6] = {(uint64_t)(uintptr_t)arena_address(c, PART_ARGS), (uint64_t)(first_lane + i),
                                       (uint64_t)lanes, (uint64_t)(uintptr_t)arena_address(c, PART_QUEUE),
                                       (uint64_t)(uintptr_t)scratch};
        done = enter(c, &c->lanes[i], (uintptr_t)c->arena + (uintptr_t)c->code + b->kernel->entry, arguments);
    }
    if (!done) {
        note(b, SANDBOX_BROKEN, "a lane of the sandbox is gone");
    }
    return done;
}

/* Lanes share a queue, and lanes that start late or never leave nothing undone: so one of three lanes, by turns, does
 * all the work, or a lane that is alone; or all lanes that there are. */
static void run(sandbox *b, const fwd_args *args, int32_t lanes)
{
    int64_t queue = 0;
    arena_part parts[PARTS];
    const int32_t processes = b->shared ? lanes : 1;
    const int32_t told = b->shared ? lanes : b->calls % 2 ? 3 : 1;
    const int32_t first = b->shared ? 0 : (int32_t)(b->calls / 2 % told);
    ++b->calls;
    list_parts(parts, b, args, &queue);
    if (!fits(&b->cell, parts, processes)) {
        cell layout;
        lay_out(&layout, parts, b->kernel);
        if (!start_cell(b, &layout, processes)) {
            return;
        }
    }
    copy_in(&b->cell, parts);
    copy_args(b, args);
    double seconds;
    if (enter_lanes(b, first, told) && run_lanes(b, processes, &seconds)) {
        b->seconds = fmax(0, seconds - b->cell.empty_s);
        copy_out(b);
    } else {
        end_cell(&b->cell);
    }
}

static void run_in(sandbox_slot slot, const fwd_args *args, int32_t lane, int32_t lanes)
{
    sandbox *b = &boxes[slot];
    if (lane == 0 && b->fault == SANDBOX_FINE && b->kernel) {
        run(b, args, lanes);
    }
}

void sandbox_run_candidate(const fwd_args *args, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    (void)queue, (void)scratch;
    run_in(SANDBOX_CANDIDATE, args, lane, lanes);
}

void sandbox_run_incumbent(const fwd_args *args, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    (void)queue, (void)scratch;
    run_in(SANDBOX_INCUMBENT, args, lane, lanes);
}

/* ---- From outside ---- */

void sandbox_set_workspace(sandbox_slot slot, size_t bytes, size_t shared_bytes, int32_t threads)
{
    boxes[slot].workspace_bytes = bytes;
    boxes[slot].shared_bytes = shared_bytes;
    boxes[slot].threads = threads;
}

void sandbox_share_work(sandbox_slot slot, bool shared)
{
    boxes[slot].shared = shared;
}

double sandbox_seconds(sandbox_slot slot)
{
    return boxes[slot].seconds;
}

sandbox_fault sandbox_look(sandbox_slot slot, char text[160])
{
    snprintf(text, 160, "%s", boxes[slot].text);
    return boxes[slot].fault;
}

/* A clock of coarse steps would not tell kernels apart. */
static bool clock_is_fine(void)
{
    struct timespec step;
    return clock_getres(CLOCK_PROCESS_CPUTIME_ID, &step) == 0 && step.tv_sec == 0 && step.tv_nsec <= 1000;
}

acr_status sandbox_begin(sandbox_slot slot, const elf_code *code, acr_pass pass, acr_dtype dtype, double call_timeout_s)
{
    sigset_t child;
    if (!clock_is_fine()) {
        return acr__fail(ACR_UNSUPPORTED, "sandbox: the system counts a process's time in steps above 1 us");
    }
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &child, NULL);
    boxes[slot] = (sandbox){.kernel = code, .dtype = dtype, .pass = pass, .timeout_s = call_timeout_s};
    return ACR_OK;
}

sandbox_fault sandbox_end(sandbox_slot slot, char text[160])
{
    sandbox *b = &boxes[slot];
    end_cell(&b->cell);
    const sandbox_fault fault = sandbox_look(slot, text);
    *b = (sandbox){.kernel = NULL};
    return fault;
}
