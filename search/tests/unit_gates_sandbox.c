/* What holds a candidate in: processes with limits (workbench/base/process.h), and the sandbox of CPU kernels
 * (search/sandbox.h), each tried with what it must withstand. */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/process.h"
#include "machine/device_lock.h"
#include "search/sandbox.h"

/* ---- Processes: this program again, misbehaving ---- */

static int take_memory(void)
{
    for (size_t taken = 0;; taken += 1 << 20) {
        void *memory = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            return taken < ((size_t)4 << 30) ? 3 : 4;
        }
        memset(memory, 1, 1 << 20);
    }
}

/* Children that hold the write end of a pipe for ever, in a process that waits for ever. */
static int fork_many(const char *fd)
{
    for (int i = 0; i < 40; ++i) {
        if (fork() == 0) {
            for (;;) {
                pause();
            }
        }
    }
    if (write((int)strtol(fd, NULL, 10), "r", 1) != 1) {
        return 9;
    }
    for (;;) {
        pause();
    }
}

static int write_much(const char *path)
{
    static char page[1 << 16];
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    for (int i = 0; i < 1000; ++i) {
        if (write(file, page, sizeof page) < 0) {
            return 5;
        }
    }
    return 0;
}

static int misbehave(char **argv)
{
    const char *how = argv[2];
    if (strcmp(how, "memory") == 0) {
        return take_memory();
    }
    if (strcmp(how, "forks") == 0) {
        return fork_many(argv[3]);
    }
    if (strcmp(how, "file") == 0) {
        return write_much(argv[3]);
    }
    if (strcmp(how, "signal") == 0) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    return 7;
}

static process_outcome run_self(const char *how, const char *argument, const process_limits *limits)
{
    process_outcome outcome;
    const char *const argv[] = {"/proc/self/exe", "--misbehave", how, argument, NULL};
    assert_ok(process_run(&outcome, argv, scratch_path("process.log"), limits, NULL));
    return outcome;
}

static void exit_codes_and_signals_are_told(void **state)
{
    (void)state;
    const process_limits limits = {.wall_s = 20};
    char text[96];
    process_outcome o = run_self("nothing", NULL, &limits);
    assert_int_equal(o.end, PROCESS_EXITED);
    assert_int_equal(o.code, 7);
    process_outcome_text(text, &o);
    assert_string_equal(text, "exit code 7");
    o = run_self("signal", NULL, &limits);
    assert_int_equal(o.end, PROCESS_SIGNALLED);
    assert_int_equal(o.code, SIGSEGV);
    process_outcome_text(text, &o);
    assert_non_null(strstr(text, "signal 11"));
}

static void output_goes_to_the_log(void **state)
{
    (void)state;
    process_outcome outcome;
    const process_limits limits = {.wall_s = 20};
    const char *const argv[] = {"sh", "-c", "echo out; echo err >&2", NULL};
    assert_ok(process_run(&outcome, argv, scratch_path("process.log"), &limits, NULL));
    char *log = read_file(scratch_path("process.log"));
    assert_string_equal(log, "out\nerr\n");
    free(log);
    const char *const missing[] = {"/no/such/program", NULL};
    assert_fails(process_run(&outcome, missing, scratch_path("process.log"), &limits, NULL), ACR_IO, "No such file");
    assert_fails(process_run(&outcome, argv, "/no/such/folder/log", &limits, NULL), ACR_IO, "/no/such/folder");
}

/* And no other descriptor of this program. */
static void one_descriptor_can_be_shared(void **state)
{
    (void)state;
    int ends[2];
    char script[128];
    process_outcome outcome;
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    snprintf(script, sizeof script, "test -e /proc/self/fd/%d && test ! -e /proc/self/fd/%d", ends[0], ends[1]);
    const char *const argv[] = {"sh", "-c", script, NULL};
    const process_limits shared = {.wall_s = 20, .shared = ends[0]}, alone = {.wall_s = 20};
    assert_ok(process_run(&outcome, argv, scratch_path("process.log"), &shared, NULL));
    assert_int_equal(outcome.code, 0);
    assert_ok(process_run(&outcome, argv, scratch_path("process.log"), &alone, NULL));
    assert_int_equal(outcome.code, 1);
    assert_true(fcntl(ends[0], F_GETFD) & FD_CLOEXEC); /* here nothing has changed */
    close(ends[0]);
    close(ends[1]);
}

/* The pipe closes when the last of the forty-one is gone. */
static void a_crowd_ends_with_its_time(void **state)
{
    (void)state;
    int ends[2];
    char fd[16], byte;
    assert_int_equal(pipe(ends), 0);
    snprintf(fd, sizeof fd, "%d", ends[1]);
    const process_limits limits = {.wall_s = 1.5};
    const process_outcome o = run_self("forks", fd, &limits);
    close(ends[1]);
    assert_int_equal(o.end, PROCESS_TIMED_OUT);
    assert_true(o.wall_s >= 1.5 && o.wall_s < 15);
    assert_int_equal(read(ends[0], &byte, 1), 1); /* it was ready */
    assert_int_equal(read(ends[0], &byte, 1), 0);
    close(ends[0]);
}

static void memory_and_files_are_limited(void **state)
{
    (void)state;
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__ /* they reserve terabytes of addresses */
    const process_limits memory = {.wall_s = 60, .memory_bytes = (int64_t)256 << 20};
    assert_int_equal(run_self("memory", NULL, &memory).code, 3);
#endif
    const process_limits file = {.wall_s = 20, .file_bytes = 1 << 20};
    const process_outcome o = run_self("file", scratch_path("large"), &file);
    assert_int_equal(o.end, PROCESS_SIGNALLED);
    assert_int_equal(o.code, SIGXFSZ);
    unlink(scratch_path("large"));
}

static void a_stop_ends_a_process(void **state)
{
    (void)state;
    const volatile int stop = 2;
    process_outcome outcome;
    const process_limits limits = {.wall_s = 20};
    const char *const argv[] = {"sleep", "20", NULL};
    assert_ok(process_run(&outcome, argv, scratch_path("process.log"), &limits, &stop));
    assert_int_equal(outcome.end, PROCESS_STOPPED);
    assert_true(outcome.wall_s < 5);
}

/* One timing job a device, whichever process it is in. */
static void a_device_is_timed_by_one(void **state)
{
    (void)state;
    static const volatile int stop = 2; /* do not wait */
    int first, second;
    assert_ok(device_lock(&first, "cuda", 101, NULL));
    assert_fails(device_lock(&second, "cuda", 101, &stop), ACR_IO, "stopped");
    assert_ok(device_lock(&second, "cuda", 102, &stop)); /* another GPU */
    device_unlock(second);
    setenv("CUDA_VISIBLE_DEVICES", "7,101", 1);
    assert_fails(device_lock(&second, "cuda", 1, &stop), ACR_IO, "cuda101");
    unsetenv("CUDA_VISIBLE_DEVICES");
    device_unlock(first);
    assert_ok(device_lock(&second, "cuda", 101, &stop));
    device_unlock(second);
    int beside;
    assert_ok(device_share(&first, "cuda", 101)); /* who checks does so beside others */
    assert_ok(device_share(&beside, "cuda", 101));
    assert_fails(device_lock(&second, "cuda", 101, &stop), ACR_IO, "stopped");
    device_unlock(beside);
    assert_ok(device_take(first));
    const pid_t other = fork();
    if (other == 0) { /* who shares it waits while another times */
        alarm(1);
        _exit(device_share(&beside, "cuda", 101) == ACR_OK ? 0 : 1);
    }
    int end = 0;
    assert_int_equal(waitpid(other, &end, 0), other);
    assert_true(WIFSIGNALED(end) && WTERMSIG(end) == SIGALRM);
    device_unlock(first);
    unlink("/tmp/acromion-cuda101.lock");
    unlink("/tmp/acromion-cuda102.lock");
}

/* ---- The sandbox ---- */

enum {
    SCRATCH_BYTES = 256
};

static const char *kernels_path; /* the object of sandbox_kernels.c */

/* A small call with tensors of its own. */
typedef struct small_call {
    float q[64], k[64], v[64], o[64];
    unsigned char workspace[SCRATCH_BYTES];
    fwd_args args; /* its strides are of 4 rows of 16 */
} small_call;

static void make_call(small_call *c)
{
    *c = (small_call){.args = {.batch = 1, .q_heads = 1, .kv_heads = 1, .group = 1, .q_len = 4, .kv_len = 4}};
    c->args.qk_dim = c->args.v_dim = 16;
    const fwd_strides strides = {64, 64, 16};
    c->args.q_stride = c->args.k_stride = c->args.v_stride = c->args.o_stride = strides;
    c->args.q = c->q;
    c->args.k = c->k;
    c->args.v = c->v;
    c->args.o = c->o;
    c->args.workspace = c->workspace;
    for (int i = 0; i < 64; ++i) {
        c->q[i] = (float)i;
    }
}

static void begin(elf_code *code, const char *symbol)
{
    assert_ok(elf_code_read(code, kernels_path, symbol));
    assert_ok(sandbox_begin(SANDBOX_CANDIDATE, code, ACR_FORWARD, ACR_F32, 1.0));
    sandbox_set_workspace(SANDBOX_CANDIDATE, SCRATCH_BYTES, 0, 1);
}

static void call_kernel(const small_call *c)
{
    sandbox_run_candidate(&c->args, 0, 1, NULL, NULL);
}

static sandbox_fault end(elf_code *code, char text[160])
{
    const sandbox_fault fault = sandbox_end(SANDBOX_CANDIDATE, text);
    elf_code_free(code);
    return fault;
}

/* What becomes of a kernel's first call. */
static sandbox_fault fault_of(const char *symbol, const void *first, char text[160])
{
    small_call call;
    elf_code code;
    make_call(&call);
    if (first) {
        memcpy(call.q, &first, sizeof first);
    }
    begin(&code, symbol);
    call_kernel(&call);
    for (int i = 0; i < 64; ++i) {
        assert_true(call.v[i] == 0.0f && call.k[i] == 0.0f);
    }
    return end(&code, text);
}

static void an_honest_kernel_runs(void **state)
{
    (void)state;
    small_call call;
    elf_code code;
    char text[160];
    make_call(&call);
    begin(&code, "write_o");
    for (int times = 1; times <= 3; ++times) { /* the workspace comes back as the last call left it */
        call.q[0] = (float)times;
        call_kernel(&call);
        assert_true(call.o[0] == (float)times + 1.0f && call.o[63] == 64.0f);
        assert_int_equal(call.workspace[0], times);
    }
    small_call other; /* other addresses */
    make_call(&other);
    other.args.q_len = 2;
    call_kernel(&other);
    assert_true(other.o[31] == 32.0f && other.o[32] == 0.0f);
    assert_int_equal(end(&code, text), SANDBOX_FINE);
    assert_string_equal(text, "");
}

/* Each lane a process, all at the same queue and workspace. */
static void lanes_share_a_call(void **state)
{
    (void)state;
    enum {
        LANES = 3
    };
    small_call call;
    elf_code code;
    char text[160];
    make_call(&call);
    begin(&code, "share_rows");
    sandbox_share_work(SANDBOX_CANDIDATE, true);
    sandbox_set_workspace(SANDBOX_CANDIDATE, SCRATCH_BYTES, 0, LANES);
    for (int times = 0; times < 5; ++times) {
        memset(call.o, 0, sizeof call.o);
        sandbox_run_candidate(&call.args, 0, LANES, NULL, NULL);
        sandbox_run_candidate(&call.args, 1, LANES, NULL, NULL); /* lane 0's call was everybody's */
        for (int i = 0; i < 64; ++i) {
            assert_true(call.o[i] == (float)LANES);
        }
        for (int lane = 0; lane < LANES; ++lane) {
            assert_int_equal(call.workspace[lane * (SCRATCH_BYTES / LANES)], 1 + lane);
        }
    }
    assert_int_equal(end(&code, text), SANDBOX_FINE);
}

static bool is_about_twice(const double least_s[2])
{
    return least_s[1] / least_s[0] > 1.4 && least_s[1] / least_s[0] < 2.8;
}

/* A call's time is that of its process: twice the work is about twice the time, whatever else runs here. What shares
 * the core makes single calls slower, so the least of as many as it takes counts. */
static void calls_are_timed(void **state)
{
    (void)state;
    enum {
        TRIES = 9,
        MAX_TRIES = 2000
    };
    static const int32_t work[] = {200000, 400000};
    small_call call;
    elf_code code;
    char text[160];
    double least_s[2] = {1, 1};
    make_call(&call);
    begin(&code, "loop_for_a_while");
    for (int i = 0; i < 2 * TRIES || (i < 2 * MAX_TRIES && !is_about_twice(least_s)); ++i) {
        memcpy(call.q, &work[i % 2], sizeof work[0]);
        call_kernel(&call);
        const double s = sandbox_seconds(SANDBOX_CANDIDATE);
        least_s[i % 2] = s < least_s[i % 2] ? s : least_s[i % 2];
    }
    assert_int_equal(end(&code, text), SANDBOX_FINE);
    assert_true(least_s[0] > 1e-5);
    assert_true(is_about_twice(least_s));
}

static void scales_are_handed_in(void **state)
{
    (void)state;
    const float q_scales[] = {1, 2, 3, 4, 5, 6}, v_scales[] = {10, 20, 30, 40, 50, 60};
    small_call call;
    elf_code code;
    char text[160];
    make_call(&call);
    call.args.batch = 2;
    call.args.kv_heads = 3;
    call.args.q_scales = q_scales;
    call.args.v_scales = v_scales;
    /* The tensors hold one entry and head: all of them read it. */
    call.args.q_stride.batch = call.args.k_stride.batch = call.args.v_stride.batch = call.args.o_stride.batch = 0;
    call.args.q_stride.head = call.args.k_stride.head = call.args.v_stride.head = call.args.o_stride.head = 0;
    begin(&code, "write_scales");
    call_kernel(&call);
    assert_true(call.o[0] == 6.0f && call.o[1] == 1.0f && call.o[2] == 60.0f);
    assert_int_equal(end(&code, text), SANDBOX_FINE);
    begin(&code, "write_to_scales");
    call_kernel(&call);
    assert_int_equal(end(&code, text), SANDBOX_CRASHED);
    assert_true(v_scales[0] == 10.0f);
}

static void every_breach_is_told(void **state)
{
    (void)state;
    static const struct {
        const char *name, *symbol;
        sandbox_fault fault;
        const char *says;
    } breaches[] = {
        {"endless loop", "loop_forever", SANDBOX_HUNG, "did not end"},
        {"write to nowhere", "write_nowhere", SANDBOX_CRASHED, "signal 11"},
        {"write to an input", "write_input", SANDBOX_CRASHED, "signal 11"},
        {"write to its arguments", "write_arguments", SANDBOX_CRASHED, "signal 11"},
        {"write beside the output", "write_beside", SANDBOX_CRASHED, "outside of o"},
        {"write beside the queue", "write_beside_queue", SANDBOX_CRASHED, "outside of the queue"},
        {"write far from the output", "write_far", SANDBOX_CRASHED, "signal 11"},
        {"read far from an input", "read_far", SANDBOX_CRASHED, "signal 11"},
        {"write to its constants", "write_constants", SANDBOX_CRASHED, "signal 11"},
        {"write to its code", "write_code", SANDBOX_CRASHED, "signal 11"},
        {"run what it has written", "run_data", SANDBOX_CRASHED, "signal 11"},
        {"endless recursion", "overflow_stack", SANDBOX_CRASHED, "signal 11"},
        {"harmless system call", "call_system", SANDBOX_FORBIDDEN, "system call"},
        {"leaving", "leave_group", SANDBOX_FORBIDDEN, "system call"},
        {"stopping", "stop_itself", SANDBOX_CRASHED, "signal 5"},
#if defined __x86_64__
        {"opening a file", "open_file", SANDBOX_FORBIDDEN, "system call"},
        {"a process of its own", "fork_once", SANDBOX_FORBIDDEN, "system call"},
        {"leaving alone", "leave_alone", SANDBOX_FORBIDDEN, "system call"},
        {"writing the verdict", "write_result", SANDBOX_FORBIDDEN, "system call"},
        {"a 32-bit system call", "call_old_system", SANDBOX_FORBIDDEN, "system call"},
        {"a clock", "read_counter", SANDBOX_FORBIDDEN, "clock"},
        {"a clock and the core", "read_counter_and_core", SANDBOX_FORBIDDEN, "clock"},
        {"a counter of events", "read_events", SANDBOX_FORBIDDEN, "clock"},
        {"single steps", "step_itself", SANDBOX_CRASHED, "signal 5"},
        {"the processor's end", "halt", SANDBOX_CRASHED, "signal 11"},
#endif
    };
    for (size_t i = 0; i < COUNT_OF(breaches); ++i) {
        char text[160];
        const sandbox_fault fault = fault_of(breaches[i].symbol, NULL, text);
        if (fault != breaches[i].fault || !strstr(text, breaches[i].says)) {
            fail_msg("%s: fault %d, \"%s\"", breaches[i].name, (int)fault, text);
        }
    }
#if defined __x86_64__
    char text[160]; /* the old page of system calls, where the system still has it */
    const sandbox_fault fault = fault_of("call_vsyscall", NULL, text);
    assert_true(fault == SANDBOX_FORBIDDEN || fault == SANDBOX_CRASHED);
#endif
}

/* Nothing of this process is there, and nothing that tells the time: neither data nor code. */
static void nothing_is_there_to_be_found(void **state)
{
    (void)state;
    static const int secret = 42;
    const int on_the_stack = 43;
    int *on_the_heap = malloc(sizeof *on_the_heap);
    const struct {
        const char *name;
        uintptr_t address;
    } places[] = {
        {"the program's data", (uintptr_t)&secret}, {"its code", (uintptr_t)&nothing_is_there_to_be_found},
        {"its stack", (uintptr_t)&on_the_stack},    {"its heap", (uintptr_t)on_the_heap},
        {"its environment", (uintptr_t)environ},    {"the C library", (uintptr_t)&strlen},
        {"the thread's own", (uintptr_t)&errno},    {"the system's clocks", (uintptr_t)getauxval(AT_SYSINFO_EHDR)}};
    for (size_t i = 0; i < COUNT_OF(places); ++i) {
        char text[160];
        if (places[i].address == 0) {
            continue;
        }
        const sandbox_fault read = fault_of("read_there", (const void *)places[i].address, text);
        if (read != SANDBOX_CRASHED || !strstr(text, "signal 11")) {
            fail_msg("%s can be read: fault %d, \"%s\"", places[i].name, (int)read, text);
        }
        assert_int_equal(fault_of("call_there", (const void *)places[i].address, text), SANDBOX_CRASHED);
    }
    free(on_the_heap);
}

/* Registers and stack are empty at each entry, also after a call that left something in them. */
static void nothing_is_left_between_calls(void **state)
{
    (void)state;
    small_call call;
    elf_code code;
    char text[160];
    make_call(&call);
    begin(&code, "search_stack");
    for (int times = 0; times < 2; ++times) {
        call.o[0] = -1;
        call_kernel(&call);
        assert_true(call.o[0] == 0.0f);
    }
    assert_int_equal(end(&code, text), SANDBOX_FINE);
#if defined __x86_64__
    begin(&code, "search_registers");
    for (int times = 0; times < 3; ++times) {
        memset(call.o, 1, sizeof call.o);
        call_kernel(&call);
        for (int i = 0; i < 26; ++i) {
            assert_true(call.o[i] == 0.0f);
        }
    }
    assert_int_equal(end(&code, text), SANDBOX_FINE);
#endif
}

static void after_a_breach_nothing_runs(void **state)
{
    (void)state;
    small_call call;
    elf_code code;
    char text[160];
    make_call(&call);
    begin(&code, "write_nowhere");
    call_kernel(&call);
    assert_int_equal(sandbox_look(SANDBOX_CANDIDATE, text), SANDBOX_CRASHED);
    call_kernel(&call);
    assert_int_equal(end(&code, text), SANDBOX_CRASHED);
    assert_int_equal(sandbox_end(SANDBOX_CANDIDATE, text), SANDBOX_FINE); /* of nothing */
}

static int remove_log(void **state)
{
    (void)state;
    return unlink(scratch_path("process.log"));
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[1], "--misbehave") == 0) {
        return misbehave(argv);
    }
    if (argc < 2) {
        fprintf(stderr, "usage: unit_gates_sandbox KERNELS\n");
        return 2;
    }
    kernels_path = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exit_codes_and_signals_are_told),
        cmocka_unit_test(output_goes_to_the_log),
        cmocka_unit_test(one_descriptor_can_be_shared),
        cmocka_unit_test(a_crowd_ends_with_its_time),
        cmocka_unit_test(memory_and_files_are_limited),
        cmocka_unit_test(a_stop_ends_a_process),
        cmocka_unit_test(a_device_is_timed_by_one),
        cmocka_unit_test(an_honest_kernel_runs),
        cmocka_unit_test(lanes_share_a_call),
        cmocka_unit_test(calls_are_timed),
        cmocka_unit_test(scales_are_handed_in),
        cmocka_unit_test(every_breach_is_told),
        cmocka_unit_test(nothing_is_there_to_be_found),
        cmocka_unit_test(nothing_is_left_between_calls),
        cmocka_unit_test(after_a_breach_nothing_runs),
    };
    return cmocka_run_group_tests(tests, NULL, remove_log);
}
