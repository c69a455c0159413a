/* Foreign CPU kernels in a process without system calls, see sandbox.h.
 *
 * Three processes: the judge, which asks; the keeper, forked at sandbox_begin, which is ours and may do anything; the
 * worker, forked by the keeper for each layout of the arena, which seals itself and runs the kernel. Judge and worker
 * talk through two pipes that the keeper holds too:
 *
 *     judge -> 'L' keeper: forks a worker for the layout in the control page, and waits for its end
 *     judge -> 'R' worker: one call.   worker -> 'D': done
 *     judge -> 'Q' worker: exits.      keeper -> 'X' and the wait status: the worker has ended, however it did */
#include "sandbox.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/progress.h"

#if defined __x86_64__
#define THIS_ARCH AUDIT_ARCH_X86_64
#elif defined __aarch64__
#define THIS_ARCH AUDIT_ARCH_AARCH64
#endif

enum {
    PAGE = 65536, /* no smaller than any system's page */
    COMMAND_FD = 0,
    REPLY_FD = 1
};

/* Inputs come first, then outputs: a worker sees [inputs, outputs) read-only. */
typedef enum part {
    PART_Q,
    PART_K,
    PART_V,
    PART_KV_LENS,
    PART_Q_OFFSETS,
    PART_KV_OFFSETS,
    PART_Q_SCALES,
    PART_K_SCALES,
    PART_V_SCALES,
    PART_O,
    PART_LSE,
    PART_SCRATCH,
    PARTS,
    PART_OUTPUTS = PART_O
} part;

/* A tensor in the arena: its last byte lies at most 63 bytes before the inaccessible page that follows it, so that its
 * address is the caller's modulo 64. */
typedef struct place {
    int64_t bytes; /* 0 = there is none */
    const void *from;
    int64_t offset;     /* in the arena */
    int64_t first, end; /* accessible pages */
} place;

/* The page that tells the worker what to do. */
typedef struct control {
    fwd_args args; /* with the arena's addresses */
    place places[PARTS];
    int64_t arena_bytes;
    int64_t calls;
    volatile pid_t worker;
} control;

static struct {
    acr__cpu_run *run;
    acr_dtype dtype;
    double timeout_s;
    size_t scratch_bytes;
    control *shared;
    char *arena; /* ARENA_BYTES of address space, shared with keeper and worker */
    pid_t keeper;
    int to, from; /* the judge's ends of the pipes */
    bool has_worker;
    sandbox_fault fault;
    char text[160];
} box = {.to = -1, .from = -1};

static const int64_t ARENA_BYTES = (int64_t)8 << 30; /* of address space; memory is taken as it is touched */

/* ---- Seals ---- */

#define ALLOW(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (number), 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offsetof(struct seccomp_data, field))

static acr_status install(struct sock_filter *filter, size_t count)
{
    const struct sock_fprog program = {(unsigned short)count, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) != 0) {
        return acr__fail(ACR_UNSUPPORTED, "system calls cannot be filtered here: %s", strerror(errno));
    }
    return ACR_OK;
}

/* The worker's: a byte from its command pipe, a byte to its reply pipe, the end. */
static acr_status seal_worker(void)
{
#if defined THIS_ARCH
    struct sock_filter filter[] = {
        LOAD(arch),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, THIS_ARCH, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        LOAD(nr),
        ALLOW(SYS_read),
        ALLOW(SYS_write),
        ALLOW(SYS_exit_group),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    return install(filter, sizeof filter / sizeof filter[0]);
#else
    return acr__fail(ACR_UNSUPPORTED, "system calls cannot be filtered on this processor");
#endif
}

acr_status sandbox_seal(void)
{
#if defined THIS_ARCH
    struct sock_filter filter[] = {
        LOAD(arch),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, THIS_ARCH, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        LOAD(nr),
        /* Memory may be taken, not made executable. */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 0, 4),
        LOAD(args[2]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        ALLOW(SYS_futex),
        ALLOW(SYS_clock_gettime),
        ALLOW(SYS_sched_yield),
        ALLOW(SYS_sched_getaffinity),
        ALLOW(SYS_nanosleep),
        ALLOW(SYS_clock_nanosleep),
        ALLOW(SYS_munmap),
        ALLOW(SYS_mremap),
        ALLOW(SYS_madvise),
        ALLOW(SYS_brk),
        ALLOW(SYS_write),
        ALLOW(SYS_rt_sigreturn),
        ALLOW(SYS_rt_sigprocmask),
        ALLOW(SYS_set_robust_list),
        ALLOW(SYS_sigaltstack),
        ALLOW(SYS_gettid),
        ALLOW(SYS_getpid),
        ALLOW(SYS_exit),
        ALLOW(SYS_exit_group),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    return install(filter, sizeof filter / sizeof filter[0]);
#else
    return acr__fail(ACR_UNSUPPORTED, "system calls cannot be filtered on this processor");
#endif
}

/* ---- Worker ---- */

static void limit(__rlimit_resource_t resource, rlim_t value)
{
    const struct rlimit both = {value, value};
    setrlimit(resource, &both);
}

/* Sanitizers and the harness catch signals to explain them; a worker just dies of them. */
static void forget_handlers(void)
{
    static const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS, SIGTERM, SIGINT};
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; ++i) {
        signal(signals[i], SIG_DFL);
    }
}

static bool protect(const control *c)
{
    if (mprotect(box.arena, (size_t)ARENA_BYTES, PROT_NONE) != 0) {
        return false;
    }
    for (int i = 0; i < PARTS; ++i) {
        const place *p = &c->places[i];
        const int access = i < PART_OUTPUTS ? PROT_READ : PROT_READ | PROT_WRITE;
        if (p->bytes > 0 && mprotect(box.arena + p->first, (size_t)(p->end - p->first), access) != 0) {
            return false;
        }
    }
    return mprotect(box.shared, PAGE, PROT_READ) == 0;
}

/* Lanes share a queue, and lanes that start late or never leave nothing undone: so one of three lanes, by turns, does
 * all the work, or a lane that is alone. */
static void call_kernel(const control *c)
{
    const int32_t lanes = c->calls % 2 ? 3 : 1, lane = (int32_t)(c->calls / 2 % lanes);
    _Atomic int64_t queue = 0;
    const fwd_args args = c->args;
    box.run(&args, lane, lanes, &queue, args.workspace);
}

static void be_worker(void)
{
    forget_handlers();
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_NPROC, 0);
    limit(RLIMIT_FSIZE, 0);
    limit(RLIMIT_NOFILE, 0);
    limit(RLIMIT_STACK, 8 << 20);
    if (!protect(box.shared) || seal_worker() != ACR_OK) {
        _exit(125);
    }
    for (char command; read(COMMAND_FD, &command, 1) == 1 && command == 'R';) {
        call_kernel(box.shared);
        const char done = 'D';
        if (write(REPLY_FD, &done, 1) != 1) {
            break;
        }
    }
    syscall(SYS_exit_group, 0);
}

/* ---- Keeper ---- */

/* The judge's death ends the keeper: its pipe closes, its parent is gone. */
static void be_keeper(void)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (char command; read(COMMAND_FD, &command, 1) == 1;) {
        if (command != 'L') {
            continue; /* a call that the worker did not live to take */
        }
        const pid_t worker = fork();
        if (worker == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            be_worker();
            _exit(125);
        }
        box.shared->worker = worker;
        int status = 125 << 8;
        while (worker > 0 && waitpid(worker, &status, 0) < 0 && errno == EINTR) {
        }
        box.shared->worker = 0;
        char reply[1 + sizeof status] = {'X'};
        memcpy(reply + 1, &status, sizeof status);
        if (write(REPLY_FD, reply, sizeof reply) != (ssize_t)sizeof reply) {
            break;
        }
    }
    _exit(0);
}

static acr_status start_keeper(void)
{
    int commands[2], replies[2];
    if (pipe(commands) != 0) {
        return acr__fail(ACR_IO, "no pipe: %s", strerror(errno));
    }
    if (pipe(replies) != 0) {
        close(commands[0]);
        close(commands[1]);
        return acr__fail(ACR_IO, "no pipe: %s", strerror(errno));
    }
    fflush(NULL); /* what is buffered is the judge's to write */
    box.keeper = fork();
    if (box.keeper == 0) {
        dup2(commands[0], 250); /* out of the way of 0 and 1, in case they are among the four */
        dup2(replies[1], 251);
        dup2(250, COMMAND_FD);
        dup2(251, REPLY_FD);
        syscall(SYS_close_range, 2u, ~0u, 0u);
        be_keeper();
    }
    close(commands[0]);
    close(replies[1]);
    box.to = commands[1];
    box.from = replies[0];
    return box.keeper > 0 ? ACR_OK : acr__fail(ACR_IO, "no process for the sandbox: %s", strerror(errno));
}

/* ---- Judge ---- */

static void note(sandbox_fault fault, const char *text)
{
    if (box.fault == SANDBOX_FINE) {
        box.fault = fault;
        snprintf(box.text, sizeof box.text, "%s", text);
    }
}

static void note_end(int status)
{
    char text[160];
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS) {
        note(SANDBOX_FORBIDDEN, "it attempted a system call");
    } else if (WIFSIGNALED(status)) {
        snprintf(text, sizeof text, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
        note(SANDBOX_CRASHED, text);
    } else if (WEXITSTATUS(status) == 125) {
        note(SANDBOX_BROKEN, "the sandbox could not be set up");
    } else {
        note(SANDBOX_CRASHED, "its process ended");
    }
}

static bool tell(char command)
{
    if (write(box.to, &command, 1) == 1) {
        return true;
    }
    note(SANDBOX_BROKEN, "the sandbox is gone");
    return false;
}

/* The next reply; 'H' when none came in time, 'G' when the keeper is gone. */
static char hear(double timeout_s)
{
    const double start_s = monotonic_s();
    for (;;) {
        struct pollfd reply = {.fd = box.from, .events = POLLIN};
        const double left_s = timeout_s - (monotonic_s() - start_s);
        const int ready = left_s > 0 ? poll(&reply, 1, (int)(1e3 * left_s) + 1) : 0;
        if (ready < 0 && errno == EINTR) {
            continue;
        }
        char kind;
        int status;
        if (ready <= 0) {
            return 'H';
        }
        if (read(box.from, &kind, 1) != 1 ||
            (kind == 'X' && read(box.from, &status, sizeof status) != (ssize_t)sizeof status)) {
            return 'G';
        }
        if (kind == 'X') {
            box.has_worker = false;
            if (!(WIFEXITED(status) && WEXITSTATUS(status) == 0)) {
                note_end(status);
            }
        }
        return kind;
    }
}

/* Ends the worker and reads of its end. */
static void end_worker(bool by_force)
{
    const pid_t worker = box.shared->worker;
    if (!box.has_worker) {
        return;
    }
    if (by_force && worker > 0) {
        kill(worker, SIGKILL);
    } else if (!by_force) {
        tell('Q');
    }
    for (char kind = 'D'; box.has_worker && kind == 'D';) {
        kind = hear(5.0);
    }
    box.has_worker = false;
}

static int64_t span(const fwd_args *a, const fwd_strides *s, int32_t heads, int32_t rows, int32_t dim, acr_dtype dtype)
{
    const acr_strides strides = {s->batch, s->head, s->row};
    const int64_t entries = a->q_offsets ? 1 : a->batch; /* a packed batch is one entry with all rows */
    return acr__span_bytes(entries, heads, rows, dim, &strides, dtype);
}

static acr_dtype out_dtype(const fwd_args *a)
{
    if (box.dtype != ACR_E4M3) {
        return box.dtype;
    }
    return a->out_bf16 ? ACR_BF16 : ACR_F16;
}

/* Lays the call's tensors out, and says whether the present worker's layout is another. */
static bool lay_out(place places[PARTS], const fwd_args *a)
{
    const bool is_packed = a->q_offsets != NULL;
    const int32_t q_rows = is_packed ? a->q_total : a->q_len, kv_rows = is_packed ? a->kv_total : a->kv_len;
    const int64_t rows = (is_packed ? 1 : (int64_t)a->batch) * a->q_heads * q_rows;
    const int64_t scale_bytes = (int64_t)sizeof(float) * a->batch * a->kv_heads;
    const int64_t offset_bytes = is_packed ? (int64_t)sizeof(int32_t) * (a->batch + 1) : 0;
    const place wanted[PARTS] = {
        [PART_Q] = {span(a, &a->q_stride, a->q_heads, q_rows, a->qk_dim, box.dtype), a->q, 0, 0, 0},
        [PART_K] = {span(a, &a->k_stride, a->kv_heads, kv_rows, a->qk_dim, box.dtype), a->k, 0, 0, 0},
        [PART_V] = {span(a, &a->v_stride, a->kv_heads, kv_rows, a->v_dim, box.dtype), a->v, 0, 0, 0},
        [PART_KV_LENS] = {a->kv_lens ? (int64_t)sizeof(int32_t) * a->batch : 0, a->kv_lens, 0, 0, 0},
        [PART_Q_OFFSETS] = {offset_bytes, a->q_offsets, 0, 0, 0},
        [PART_KV_OFFSETS] = {offset_bytes, a->kv_offsets, 0, 0, 0},
        [PART_Q_SCALES] = {a->q_scales ? scale_bytes : 0, a->q_scales, 0, 0, 0},
        [PART_K_SCALES] = {a->k_scales ? scale_bytes : 0, a->k_scales, 0, 0, 0},
        [PART_V_SCALES] = {a->v_scales ? scale_bytes : 0, a->v_scales, 0, 0, 0},
        [PART_O] = {span(a, &a->o_stride, a->q_heads, q_rows, a->v_dim, out_dtype(a)), a->o, 0, 0, 0},
        [PART_LSE] = {a->lse ? (int64_t)sizeof(float) * rows : 0, a->lse, 0, 0, 0},
        [PART_SCRATCH] = {(int64_t)box.scratch_bytes, a->workspace, 0, 0, 0}};
    int64_t at = PAGE;
    for (int i = 0; i < PARTS; ++i) {
        place *p = &places[i];
        *p = wanted[i];
        p->first = at;
        p->end = at + (p->bytes + 63 + PAGE - 1) / PAGE * PAGE;
        const int64_t misalignment = (int64_t)((uintptr_t)p->from % 64);
        p->offset = (p->end - p->bytes - misalignment) / 64 * 64 + misalignment;
        at = p->bytes > 0 ? p->end + PAGE : at;
    }
    box.shared->arena_bytes = at;
    return memcmp(places, box.shared->places, sizeof(place[PARTS])) != 0;
}

static void *arena_address(const place *p)
{
    return p->bytes > 0 ? box.arena + p->offset : NULL;
}

/* Everything that the worker may touch becomes NaN bytes, then what the judge has there; guards beside tensors too. */
static void copy_in(const place places[PARTS])
{
    for (int i = 0; i < PARTS; ++i) {
        const place *p = &places[i];
        if (p->bytes > 0) {
            memset(box.arena + p->first, 0xff, (size_t)(p->end - p->first));
            memcpy(box.arena + p->offset, p->from, (size_t)p->bytes);
        }
    }
}

/* The pages' bytes beside an output that were written. */
static bool stained(const place *p)
{
    for (int64_t at = p->first; at < p->end; ++at) {
        at = at == p->offset ? at + p->bytes : at;
        if (at < p->end && (unsigned char)box.arena[at] != 0xff) {
            return true;
        }
    }
    return false;
}

static void copy_out(const place places[PARTS])
{
    for (int i = PART_OUTPUTS; i < PARTS; ++i) {
        const place *p = &places[i];
        if (p->bytes > 0) {
            memcpy((void *)(uintptr_t)p->from, box.arena + p->offset, (size_t)p->bytes);
            if (stained(p)) {
                note(SANDBOX_CRASHED, i == PART_O     ? "it wrote outside of o"
                                      : i == PART_LSE ? "it wrote outside of lse"
                                                      : "it wrote outside of its scratch");
            }
        }
    }
}

static void set_args(const fwd_args *a, const place places[PARTS])
{
    fwd_args there = *a;
    there.q = arena_address(&places[PART_Q]);
    there.k = arena_address(&places[PART_K]);
    there.v = arena_address(&places[PART_V]);
    there.kv_lens = arena_address(&places[PART_KV_LENS]);
    there.q_offsets = arena_address(&places[PART_Q_OFFSETS]);
    there.kv_offsets = arena_address(&places[PART_KV_OFFSETS]);
    there.q_scales = arena_address(&places[PART_Q_SCALES]);
    there.k_scales = arena_address(&places[PART_K_SCALES]);
    there.v_scales = arena_address(&places[PART_V_SCALES]);
    there.o = arena_address(&places[PART_O]);
    there.lse = arena_address(&places[PART_LSE]);
    there.workspace = arena_address(&places[PART_SCRATCH]);
    box.shared->args = there;
    ++box.shared->calls;
}

static bool ready_worker(const place places[PARTS], bool changed)
{
    if (changed || !box.has_worker) {
        end_worker(false);
        memcpy(box.shared->places, places, sizeof(place[PARTS]));
        box.has_worker = tell('L');
    }
    return box.has_worker;
}

void sandbox_run(const fwd_args *args, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    (void)lane, (void)lanes, (void)queue, (void)scratch;
    place places[PARTS];
    if (box.fault != SANDBOX_FINE || !box.arena) {
        return;
    }
    const bool changed = lay_out(places, args);
    if (box.shared->arena_bytes > ARENA_BYTES) {
        note(SANDBOX_BROKEN, "the problem is too large for the sandbox");
        return;
    }
    copy_in(places);
    set_args(args, places);
    if (!ready_worker(places, changed) || !tell('R')) {
        return;
    }
    switch (hear(box.timeout_s)) {
    case 'D':
        copy_out(places);
        break;
    case 'H':
        note(SANDBOX_HUNG, "a call did not end in its time");
        end_worker(true);
        break;
    case 'G':
        note(SANDBOX_BROKEN, "the sandbox is gone");
        break;
    default: /* 'X': the worker has ended, and how is noted */
        note(SANDBOX_CRASHED, "its process ended");
    }
}

void sandbox_set_workspace(size_t bytes)
{
    box.scratch_bytes = bytes;
}

sandbox_fault sandbox_look(char text[160])
{
    snprintf(text, 160, "%s", box.text);
    return box.fault;
}

acr_status sandbox_begin(acr__cpu_run *run, acr_dtype dtype, double call_timeout_s)
{
    _Static_assert(sizeof(control) <= PAGE, "the control page is one page");
    box.run = run;
    box.dtype = dtype;
    box.timeout_s = call_timeout_s;
    box.fault = SANDBOX_FINE;
    box.text[0] = '\0';
    box.has_worker = false;
    box.scratch_bytes = 0;
    signal(SIGPIPE, SIG_IGN); /* a sandbox that is gone is noted where it is told something */
    const int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
    void *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    void *arena = mmap(NULL, (size_t)ARENA_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    box.shared = shared == MAP_FAILED ? NULL : shared;
    box.arena = arena == MAP_FAILED ? NULL : arena;
    acr_status status =
        box.shared && box.arena ? start_keeper() : acr__fail(ACR_NO_MEMORY, "no shared memory for the sandbox");
    if (status != ACR_OK) {
        char ignored[160];
        sandbox_end(ignored);
    }
    return status;
}

sandbox_fault sandbox_end(char text[160])
{
    if (box.keeper > 0) {
        end_worker(false);
        kill(box.keeper, SIGKILL);
        waitpid(box.keeper, NULL, 0);
    }
    const int ends[] = {box.to, box.from};
    for (size_t i = 0; i < 2; ++i) {
        if (ends[i] >= 0) {
            close(ends[i]);
        }
    }
    if (box.shared) {
        munmap(box.shared, PAGE);
    }
    if (box.arena) {
        munmap(box.arena, (size_t)ARENA_BYTES);
    }
    const sandbox_fault fault = sandbox_look(text);
    box.shared = NULL;
    box.arena = NULL;
    box.keeper = 0;
    box.to = box.from = -1;
    box.fault = SANDBOX_FINE;
    return fault;
}
