/* What children print, see child.h. */
#include "child.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <glob.h>

#include "internal.h"
#include "process.h"
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

/* This program's environment, with numbers that have a point and no grouping; NULL without memory. */
static const char **plain_environment(void)
{
    size_t count = 0, kept = 0;
    while (environ[count]) {
        ++count;
    }
    const char **out = calloc(count + 2, sizeof *out);
    for (size_t i = 0; out && i < count; ++i) {
        if (strncmp(environ[i], "LC_ALL=", strlen("LC_ALL=")) != 0) {
            out[kept++] = environ[i];
        }
    }
    if (out) {
        out[kept] = "LC_ALL=C";
    }
    return out;
}

/* Ends of the pipes from a child's stdout and stderr, and its input. */
enum {
    IN,
    OUT_READ,
    OUT_WRITE,
    ERR_READ,
    ERR_WRITE,
    ENDS
};

static void close_end(int *fd)
{
    if (*fd >= 0) {
        close(*fd);
    }
    *fd = -1;
}

/* With the ends made; closes those that it uses up. */
static acr_status start_and_wait(child_result *result, const char *const *argv, int ends[ENDS], double limit_s)
{
    const process_limits limits = {.wall_s = limit_s};
    const double end_s = monotonic_s() + limit_s;
    const char **environment = plain_environment();
    pid_t pid;
    acr_status status = environment ? process_start(&pid, argv, environment,
                                                    (const int[]){ends[IN], ends[OUT_WRITE], ends[ERR_WRITE]}, &limits)
                                    : acr__fail(ACR_NO_MEMORY, "%s: no memory for its environment", argv[0]);
    free((void *)environment);
    if (status != ACR_OK) {
        return status;
    }
    close_end(&ends[OUT_WRITE]);
    close_end(&ends[ERR_WRITE]);
    collected pipes[2] = {{ends[OUT_READ], NULL, 0, 0}, {ends[ERR_READ], NULL, 0, 0}};
    ends[OUT_READ] = ends[ERR_READ] = -1;
    bool enough_memory = grow(&pipes[0]) && grow(&pipes[1]);
    if (enough_memory) {
        pipes[0].text[0] = pipes[1].text[0] = '\0';
        enough_memory = collect(pipes, end_s, &result->timed_out);
    }
    process_outcome outcome;
    process_wait(&outcome, pid, enough_memory && !result->timed_out ? end_s : 0.0, NULL);
    close_end(&pipes[0].fd);
    close_end(&pipes[1].fd);
    result->timed_out = outcome.end == PROCESS_TIMED_OUT;
    result->exit_code = outcome.end == PROCESS_EXITED ? outcome.code : -1;
    result->out = pipes[0].text;
    result->out_bytes = pipes[0].size;
    result->err = pipes[1].text;
    if (!enough_memory) {
        child_result_free(result);
        return acr__fail(ACR_NO_MEMORY, "%s: no memory for its output", argv[0]);
    }
    return ACR_OK;
}

acr_status child_run(child_result *out, const char *const *argv, const char *input, double limit_s)
{
    int ends[ENDS] = {-1, -1, -1, -1, -1};
    *out = (child_result){.exit_code = -1};
    ends[IN] = input_file(input);
    acr_status status = ends[IN] < 0 || pipe2(ends + OUT_READ, O_CLOEXEC) != 0 || pipe2(ends + ERR_READ, O_CLOEXEC) != 0
                            ? acr__fail(ACR_IO, "%s: %s", argv[0], strerror(errno))
                            : start_and_wait(out, argv, ends, limit_s);
    for (int i = 0; i < ENDS; ++i) {
        close_end(&ends[i]);
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
