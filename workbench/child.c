/* Child processes, see child.h. */
#include "child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/poll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <glob.h>

#include "internal.h"
#include "progress.h"

/* Everything a pipe has brought so far. */
typedef struct collected {
    int fd; /* -1: at its end */
    char *text;
    size_t size, capacity;
} collected;

static bool grow(collected *c)
{
    enum {
        FIRST_BYTES = 1 << 14,
        ROOM_BYTES = 1 << 12
    };
    if (c->capacity - c->size > ROOM_BYTES) {
        return true;
    }
    size_t capacity = c->capacity ? 2 * c->capacity : FIRST_BYTES;
    char *text = realloc(c->text, capacity);
    if (!text) {
        return false;
    }
    c->text = text;
    c->capacity = capacity;
    return true;
}

/* Reads what is there; closes at the end of the pipe. What exceeds the limit is read and dropped, so that the child
 * does not stand still. */
static bool drain(collected *c)
{
    if (!grow(c)) {
        return false;
    }
    ssize_t count = read(c->fd, c->text + c->size, c->capacity - c->size - 1);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) {
        return true;
    }
    if (count <= 0) {
        close(c->fd);
        c->fd = -1;
    } else if (c->size + (size_t)count < CHILD_OUTPUT_MAX) {
        c->size += (size_t)count;
    }
    c->text[c->size] = '\0';
    return true;
}

/* Until both pipes are at their end or the time is over. Returns false without memory. */
static bool collect(collected pipes[2], double end_s, bool *timed_out)
{
    while (pipes[0].fd >= 0 || pipes[1].fd >= 0) {
        double left_s = end_s - monotonic_s();
        if (left_s <= 0) {
            *timed_out = true;
            return true;
        }
        struct pollfd polled[2] = {{pipes[0].fd, POLLIN, 0}, {pipes[1].fd, POLLIN, 0}};
        if (poll(polled, 2, (int)(left_s * 1e3) + 1) < 0 && errno != EINTR) {
            return true;
        }
        for (int i = 0; i < 2; ++i) {
            if (pipes[i].fd >= 0 && polled[i].revents && !drain(&pipes[i])) {
                return false;
            }
        }
    }
    return true;
}

/* The child's part: never returns. What keeps it from starting goes to `failed` as an errno. */
static void become(const char *const *argv, int in, int out, int err, int failed)
{
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setenv("LC_ALL", "C", 1); /* numbers with a point and without grouping */
    if (dup2(in, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 && dup2(err, STDERR_FILENO) >= 0) {
        execvp(argv[0], (char *const *)(uintptr_t)argv);
    }
    int reason = errno;
    (void)!write(failed, &reason, sizeof reason);
    _exit(127);
}

/* An unnamed file that holds the input, at its start. */
static int input_file(const char *input)
{
    int fd = memfd_create("input", MFD_CLOEXEC);
    size_t size = input ? strlen(input) : 0;
    if (fd >= 0 && (write(fd, input ? input : "", size) != (ssize_t)size || lseek(fd, 0, SEEK_SET) != 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

/* The fate of a started child, whose pipes are collected: waits for it, kills it when its time is over. */
static void await(child_result *result, pid_t pid, double end_s)
{
    int state = 0;
    while (!result->timed_out && waitpid(pid, &state, WNOHANG) == 0) {
        result->timed_out = monotonic_s() > end_s;
        usleep(1000);
    }
    if (result->timed_out) {
        kill(-pid, SIGKILL);
        waitpid(pid, &state, 0);
    }
    result->exit_code = WIFEXITED(state) && !result->timed_out ? WEXITSTATUS(state) : -1;
}

/* With all descriptors made: {input, stdout's two ends, stderr's, the failure's}. Closes the ends it uses up. */
static acr_status start_and_wait(child_result *result, const char *const *argv, int fds[7], double limit_s)
{
    double end_s = monotonic_s() + limit_s;
    pid_t pid = fork();
    if (pid < 0) {
        return acr__fail(ACR_IO, "%s: %s", argv[0], strerror(errno));
    }
    if (pid == 0) {
        become(argv, fds[0], fds[2], fds[4], fds[6]);
    }
    static const int children[] = {2, 4, 6};
    for (size_t i = 0; i < sizeof children / sizeof children[0]; ++i) {
        close(fds[children[i]]);
        fds[children[i]] = -1;
    }
    int reason = 0;
    bool started = read(fds[5], &reason, sizeof reason) != (ssize_t)sizeof reason;
    collected pipes[2] = {{fds[1], NULL, 0, 0}, {fds[3], NULL, 0, 0}};
    fds[1] = fds[3] = -1;
    bool enough_memory = grow(&pipes[0]) && grow(&pipes[1]);
    if (enough_memory) {
        pipes[0].text[0] = pipes[1].text[0] = '\0';
        enough_memory = collect(pipes, end_s, &result->timed_out);
    }
    result->timed_out = result->timed_out || !enough_memory;
    await(result, pid, end_s);
    for (int i = 0; i < 2; ++i) {
        if (pipes[i].fd >= 0) {
            close(pipes[i].fd);
        }
    }
    result->out = pipes[0].text;
    result->out_bytes = pipes[0].size;
    result->err = pipes[1].text;
    if (started && enough_memory) {
        return ACR_OK;
    }
    child_result_free(result);
    return started ? acr__fail(ACR_NO_MEMORY, "%s: no memory for its output", argv[0])
                   : acr__fail(ACR_IO, "%s: %s", argv[0], strerror(reason));
}

acr_status child_run(child_result *out, const char *const *argv, const char *input, double limit_s)
{
    int fds[7] = {-1, -1, -1, -1, -1, -1, -1};
    *out = (child_result){.exit_code = -1};
    fds[0] = input_file(input);
    acr_status status = ACR_OK;
    if (fds[0] < 0 || pipe2(fds + 1, O_CLOEXEC) != 0 || pipe2(fds + 3, O_CLOEXEC) != 0 ||
        pipe2(fds + 5, O_CLOEXEC) != 0) {
        status = acr__fail(ACR_IO, "%s: %s", argv[0], strerror(errno));
    } else {
        status = start_and_wait(out, argv, fds, limit_s);
    }
    for (size_t i = 0; i < sizeof fds / sizeof fds[0]; ++i) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
    return status;
}

void child_result_free(child_result *result)
{
    free(result->out);
    free(result->err);
    *result = (child_result){.exit_code = -1};
}

/* ---- Finding programs ---- */

static bool is_program(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) && access(path, X_OK) == 0;
}

static bool find_in(char out[PATH_MAX], const char *folder, size_t folder_length, const char *name)
{
    int length = snprintf(out, PATH_MAX, "%.*s/%s", (int)folder_length, folder, name);
    return length > 0 && length < PATH_MAX && is_program(out);
}

static bool find_on_path(char out[PATH_MAX], const char *name)
{
    const char *folder = getenv("PATH");
    while (folder && *folder) {
        size_t length = strcspn(folder, ":");
        if (length > 0 && find_in(out, folder, length, name)) {
            return true;
        }
        folder += length + (folder[length] == ':');
    }
    return false;
}

static bool find_by_pattern(char out[PATH_MAX], const char *folder, const char *name)
{
    glob_t matches;
    bool found = false;
    if (glob(folder, 0, NULL, &matches) == 0) {
        for (size_t i = matches.gl_pathc; i > 0 && !found; --i) {
            found = find_in(out, matches.gl_pathv[i - 1], strlen(matches.gl_pathv[i - 1]), name);
        }
        globfree(&matches);
    }
    return found;
}

bool child_find(char out[PATH_MAX], const char *name, const char *const *folders)
{
    bool found = find_on_path(out, name);
    for (; !found && *folders; ++folders) {
        found = find_by_pattern(out, *folders, name);
    }
    return found;
}

bool child_own_folder(char out[PATH_MAX])
{
    ssize_t length = readlink("/proc/self/exe", out, PATH_MAX - 1);
    if (length <= 0) {
        return false;
    }
    out[length] = '\0';
    *strrchr(out, '/') = '\0';
    return true;
}
