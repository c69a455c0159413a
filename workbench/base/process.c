/* Child processes, see process.h. */
#include "process.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
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

/* ---- Who was started here, so that strays can be told from them ---- */

enum {
    LIVING_MAX = 256
};
static struct {
    pthread_mutex_t lock;
    pid_t pids[LIVING_MAX];
    int count;
} living = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void note_start(pid_t pid)
{
    pthread_mutex_lock(&living.lock);
    if (living.count < LIVING_MAX) {
        living.pids[living.count++] = pid;
    }
    pthread_mutex_unlock(&living.lock);
}

static void note_end(pid_t pid)
{
    pthread_mutex_lock(&living.lock);
    for (int i = 0; i < living.count; ++i) {
        if (living.pids[i] == pid) {
            living.pids[i] = living.pids[--living.count];
            break;
        }
    }
    pthread_mutex_unlock(&living.lock);
}

/* Whether a process or the group that it is in was started here and has not ended. */
static bool is_living(pid_t pid, pid_t group)
{
    bool found = false;
    pthread_mutex_lock(&living.lock);
    for (int i = 0; i < living.count && !found; ++i) {
        found = living.pids[i] == pid || living.pids[i] == group;
    }
    found = found || living.count == LIVING_MAX; /* more than are remembered: nobody is known to be a stray */
    pthread_mutex_unlock(&living.lock);
    return found;
}

static bool is_stray(pid_t pid)
{
    char path[64], text[512], state;
    int parent = 0, group = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    const size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) {
        fclose(file);
    }
    text[length] = '\0';
    const char *after_name = strrchr(text, ')'); /* the name may hold anything */
    /* NOLINTNEXTLINE(cert-err34-c): the kernel wrote the line, and three fields are asked for */
    return after_name && sscanf(after_name + 1, " %c %d %d", &state, &parent, &group) == 3 && parent == getpid() &&
           !is_living(pid, group);
}

/* One look at all processes. Returns how many strays it ended. */
static int end_strays_once(void)
{
    int ended = 0;
    DIR *all = opendir("/proc");
    for (const struct dirent *entry = all ? readdir(all) : NULL; entry; entry = readdir(all)) {
        const pid_t pid = isdigit((unsigned char)entry->d_name[0]) ? (pid_t)strtol(entry->d_name, NULL, 10) : 0;
        if (pid > 0 && is_stray(pid)) {
            kill(pid, SIGKILL);
            while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {
            }
            ++ended;
        }
    }
    if (all) {
        closedir(all);
    }
    return ended;
}

void process_adopt_strays(void)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
}

/* Ending one makes its children strays; those of a group that was just killed come a moment later. */
void process_end_strays(void)
{
    enum {
        LOOKS = 200,
        QUIET = 3 /* looks in a row that find nobody */
    };
    for (int i = 0, quiet = 0; i < LOOKS && quiet < QUIET; ++i) {
        quiet = end_strays_once() > 0 ? 0 : quiet + 1;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
}

/* ---- Starting ---- */

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
    if (pid > 0) {
        note_start(pid);
    }
    const bool started = pid > 0 && has_started(pid, failed[0], &reason);
    if (pid > 0 && !started) {
        note_end(pid);
    }
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
    note_end(pid);
    if (out->end == PROCESS_EXITED) {
        out->end = WIFSIGNALED(status) ? PROCESS_SIGNALLED : PROCESS_EXITED;
        out->code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
    }
}

/* This program's environment with another TMPDIR; the caller frees the list. NULL without memory. */
static const char **environment_with(const char *temporary)
{
    size_t count = 0, kept = 0;
    while (environ[count]) {
        ++count;
    }
    const char **list = calloc(count + 2, sizeof *list);
    for (size_t i = 0; i < count && list; ++i) {
        if (strncmp(environ[i], "TMPDIR=", 7) != 0) {
            list[kept++] = environ[i];
        }
    }
    if (list) {
        list[kept] = temporary;
    }
    return list;
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
    char variable[PATH_MAX + 8];
    snprintf(variable, sizeof variable, "TMPDIR=%s", limits->temporary ? limits->temporary : "");
    const char **environment = limits->temporary ? environment_with(variable) : NULL;
    acr_status status = nothing >= 0 ? process_start(&pid, argv, environment, (const int[]){nothing, log, log}, limits)
                                     : acr__fail(ACR_IO, "/dev/null: %s", strerror(errno));
    free(environment);
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
