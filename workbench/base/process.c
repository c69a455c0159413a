/* Child processes, see process.h. */
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"
#include "progress.h"

static void limit(int resource, int64_t value)
{
    if (value > 0) {
        const struct rlimit both = {(rlim_t)value, (rlim_t)value};
        setrlimit((__rlimit_resource_t)resource, &both);
    }
}

/* What the child's side of a start is given. */
typedef struct start {
    const char *const *argv, *const *environment;
    const int *streams;
    const process_limits *limits;
    int failed; /* where the errno of a start that does not succeed goes; closed by one that does */
} start;

/* Between fork and exec: async-signal-safe calls only, since other threads of the parent may hold locks. */
static void become(const start *s)
{
    static const int standard[] = {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO};
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    bool connected = true;
    for (int i = 0; i < 3; ++i) {
        connected = connected && dup2(s->streams[i], standard[i]) >= 0;
    }
    if (s->limits->shared > 0) {
        fcntl(s->limits->shared, F_SETFD, 0);
    }
    limit(RLIMIT_AS, s->limits->memory_bytes);
    limit(RLIMIT_FSIZE, s->limits->file_bytes);
    limit(RLIMIT_CPU, (int64_t)(16 * s->limits->wall_s) + 1); /* of each process, should nobody be left to end it */
    const struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    sigset_t empty;
    sigemptyset(&empty);
    sigprocmask(SIG_SETMASK, &empty, NULL);
    signal(SIGPIPE, SIG_DFL);
    if (connected) {
        execvpe(s->argv[0], (char *const *)(uintptr_t)s->argv, (char *const *)(uintptr_t)s->environment);
    }
    const int reason = errno;
    (void)!write(s->failed, &reason, sizeof reason);
    _exit(127);
}

/* Whether the child has become the program; if not, waits for its end. */
static bool has_started(pid_t pid, int failed, int *reason)
{
    ssize_t count;
    do {
        count = read(failed, reason, sizeof *reason);
    } while (count < 0 && errno == EINTR);
    if (count == (ssize_t)sizeof *reason) {
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {
        }
        return false;
    }
    return true;
}

acr_status process_start(pid_t *out, const char *const *argv, const char *const *environment, const int streams[3],
                         const process_limits *limits)
{
    int failed[2], reason = 0;
    if (pipe2(failed, O_CLOEXEC) != 0) {
        return acr__fail(ACR_IO, "cannot run %s: %s", argv[0], strerror(errno));
    }
    const start s = {argv, environment ? environment : (const char *const *)environ, streams, limits, failed[1]};
    const pid_t pid = fork();
    if (pid == 0) {
        become(&s);
    }
    reason = errno;
    close(failed[1]);
    const bool started = pid > 0 && has_started(pid, failed[0], &reason);
    close(failed[0]);
    *out = pid;
    return started ? ACR_OK : acr__fail(ACR_IO, "cannot run %s: %s", argv[0], strerror(reason));
}

/* Until the child ends by itself or is ended. Returns what waitpid says, -1 when there was nothing to wait for. */
static int await(process_outcome *out, pid_t pid, double end_s, const volatile int *stop)
{
    long pause_ns = 200000; /* grows to 5 ms: compilers take long, checks of small cases do not */
    for (int status;;) {
        const pid_t ended = waitpid(pid, &status, out->end == PROCESS_EXITED ? WNOHANG : 0);
        if (ended == pid || (ended < 0 && errno != EINTR)) {
            return ended == pid ? status : -1;
        }
        if (out->end != PROCESS_EXITED) {
            continue;
        }
        const bool stopped = stop && *stop == 2;
        if (stopped || monotonic_s() > end_s) {
            out->end = stopped ? PROCESS_STOPPED : PROCESS_TIMED_OUT;
            kill(-pid, SIGKILL);
            continue;
        }
        nanosleep(&(struct timespec){0, pause_ns}, NULL);
        pause_ns = pause_ns < 5000000 ? pause_ns * 5 / 4 : pause_ns;
    }
}

void process_wait(process_outcome *out, pid_t pid, double end_s, const volatile int *stop)
{
    const double start_s = monotonic_s();
    *out = (process_outcome){.end = PROCESS_EXITED};
    const int status = await(out, pid, end_s, stop);
    out->wall_s = monotonic_s() - start_s;
    kill(-pid, SIGKILL); /* what it left behind */
    if (out->end == PROCESS_EXITED) {
        out->end = WIFSIGNALED(status) ? PROCESS_SIGNALLED : PROCESS_EXITED;
        out->code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
    }
}

acr_status process_run(process_outcome *out, const char *const *argv, const char *log_path,
                       const process_limits *limits, const volatile int *stop)
{
    *out = (process_outcome){.end = PROCESS_EXITED, .code = -1};
    const int log = open(log_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (log < 0) {
        return acr__fail(ACR_IO, "%s: %s", log_path, strerror(errno));
    }
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    pid_t pid;
    acr_status status = nothing >= 0 ? process_start(&pid, argv, NULL, (const int[]){nothing, log, log}, limits)
                                     : acr__fail(ACR_IO, "/dev/null: %s", strerror(errno));
    close(log);
    if (nothing >= 0) {
        close(nothing);
    }
    if (status == ACR_OK) {
        process_wait(out, pid, monotonic_s() + limits->wall_s, stop);
    }
    return status;
}

void process_outcome_text(char out[96], const process_outcome *outcome)
{
    switch (outcome->end) {
    case PROCESS_EXITED:
        snprintf(out, 96, "exit code %d", outcome->code);
        break;
    case PROCESS_SIGNALLED:
        snprintf(out, 96, "signal %d (%s)", outcome->code, strsignal(outcome->code));
        break;
    case PROCESS_TIMED_OUT:
        snprintf(out, 96, "did not end within %.3g s", outcome->wall_s);
        break;
    case PROCESS_STOPPED:
        snprintf(out, 96, "stopped");
        break;
    }
}
