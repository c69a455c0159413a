/* Children with limits, see process.h. */
#include "evolve/process.h"

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

/* Between fork and exec: async-signal-safe calls only, since other threads of the parent may hold locks. */
static void become(const char *const *argv, int log, const process_limits *limits)
{
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(nothing, STDIN_FILENO);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    limit(RLIMIT_AS, limits->memory_bytes);
    limit(RLIMIT_FSIZE, limits->file_bytes);
    limit(RLIMIT_CPU, (int64_t)(16 * limits->wall_s) + 1); /* of each process, should nobody be left to end it */
    const struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    sigset_t empty;
    sigemptyset(&empty);
    sigprocmask(SIG_SETMASK, &empty, NULL);
    execvp(argv[0], (char *const *)(uintptr_t)argv);
    dprintf(STDERR_FILENO, "cannot run %s: %s\n", argv[0], strerror(errno));
    _exit(127);
}

static void end_group(pid_t pid)
{
    kill(-pid, SIGKILL);
    kill(pid, SIGKILL); /* in case it has no group of its own yet */
}

/* Waits until the child ends by itself or is ended. */
static int await(process_outcome *out, pid_t pid, double wall_s, const volatile int *stop)
{
    const double start_s = monotonic_s();
    long pause_ns = 200000; /* grows to 5 ms: compilers take long, checks of small cases do not */
    out->end = PROCESS_EXITED;
    for (int status;;) {
        pid_t ended = waitpid(pid, &status, out->end == PROCESS_EXITED ? WNOHANG : 0);
        if (ended == pid || (ended < 0 && errno != EINTR)) {
            out->wall_s = monotonic_s() - start_s;
            kill(-pid, SIGKILL); /* what it left behind */
            return ended == pid ? status : -1;
        }
        if (out->end != PROCESS_EXITED) {
            continue;
        }
        if (monotonic_s() - start_s > wall_s || (stop && *stop == 2)) {
            out->end = stop && *stop == 2 ? PROCESS_STOPPED : PROCESS_TIMED_OUT;
            end_group(pid);
            continue;
        }
        nanosleep(&(struct timespec){0, pause_ns}, NULL);
        pause_ns = pause_ns < 5000000 ? pause_ns * 5 / 4 : pause_ns;
    }
}

acr_status process_run(process_outcome *out, const char *const *argv, const char *log_path,
                       const process_limits *limits, const volatile int *stop)
{
    *out = (process_outcome){.end = PROCESS_EXITED};
    int log = open(log_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (log < 0) {
        return acr__fail(ACR_IO, "%s: %s", log_path, strerror(errno));
    }
    pid_t pid = fork();
    if (pid == 0) {
        become(argv, log, limits);
    }
    close(log);
    if (pid < 0) {
        return acr__fail(ACR_IO, "cannot start %s: %s", argv[0], strerror(errno));
    }
    setpgid(pid, pid); /* as the child does itself: whoever is first */
    int status = await(out, pid, limits->wall_s, stop);
    if (out->end == PROCESS_EXITED) {
        out->end = WIFSIGNALED(status) ? PROCESS_SIGNALLED : PROCESS_EXITED;
        out->code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
    }
    return ACR_OK;
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
