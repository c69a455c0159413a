/* External proposers, see proposer.h. */
#include "proposer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"
#include "progress.h"

const char *proposer_status_name(proposer_status status)
{
    static const char *const names[] = {
#define X(identifier, name) name,
        PROPOSER_STATUSES(X)
#undef X
    };
    return names[status];
}

/* ---- The answer ---- */

static void refuse(proposer_answer *a, proposer_status status, const char *what)
{
    a->status = status;
    snprintf(a->detail, sizeof a->detail, "%s", what);
}

/* What is wrong with an object, or NULL. */
static const char *wrong_answer(const json_t *json)
{
    static const char *const keys[] = {"family", "arch",       "parameters", "name",
                                       "source", "descriptor", "rationale",  "macro"};
    const char *key = NULL;
    json_t *value = NULL;
    json_object_foreach((json_t *)(uintptr_t)json, key, value)
    {
        bool known = false;
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; ++i) {
            known = known || strcmp(keys[i], key) == 0;
        }
        bool object = strcmp(key, "parameters") == 0 || strcmp(key, "descriptor") == 0;
        if (!known) {
            return "an unknown key: family arch parameters name source descriptor rationale macro are known";
        }
        if (!json_is_string(value) && !(object && json_is_object(value))) {
            return "a value has the wrong type";
        }
    }
    if (!json_object_get(json, "arch")) {
        return "arch is missing";
    }
    if (json_object_get(json, "source")) {
        return json_object_get(json, "name") && json_object_get(json, "descriptor")
                   ? NULL
                   : "a source needs name and descriptor";
    }
    return json_object_get(json, "family") && json_object_get(json, "parameters") ? NULL
                                                                                  : "family or parameters are missing";
}

void proposer_read(proposer_answer *a)
{
    json_error_t error;
    a->json = json_loads(a->text, JSON_REJECT_DUPLICATES, &error);
    if (!a->json) {
        char what[256];
        snprintf(what, sizeof what, "not JSON: line %d: %s", error.line, error.text);
        refuse(a, PROPOSER_MALFORMED, what);
        return;
    }
    const char *wrong = json_is_object(a->json) ? wrong_answer(a->json) : "not a JSON object";
    if (wrong) {
        refuse(a, PROPOSER_MALFORMED, wrong);
        json_decref(a->json);
        a->json = NULL;
    }
}

void proposer_answer_free(proposer_answer *answer)
{
    free(answer->text);
    json_decref(answer->json);
    *answer = (proposer_answer){.status = PROPOSER_ANSWERED};
}

/* ---- The conversation ---- */

enum {
    END_IN,
    END_OUT,
    END_ERR,
    PIPES,
    COMPLAINT_BYTES = 300 /* the end of stderr that is kept */
};

typedef struct conversation {
    pid_t pid;
    int ends[PIPES]; /* ours: its stdin, stdout, stderr; -1 = closed */
    const char *request;
    size_t left;
    char *text;
    size_t length;
    char complaint[COMPLAINT_BYTES + 1];
    size_t complaint_length;
} conversation;

static void close_end(conversation *c, int end)
{
    if (c->ends[end] >= 0) {
        close(c->ends[end]);
        c->ends[end] = -1;
    }
}

/* After fork: only what is safe there. */
static void become(const char *command, int pipes[PIPES][2])
{
    static const int standard[PIPES] = {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO};
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int i = 0; i < PIPES; ++i) {
        dup2(pipes[i][i == END_IN ? 0 : 1], standard[i]);
    }
    signal(SIGPIPE, SIG_DFL);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(127);
}

static bool start(conversation *c, const char *command)
{
    int pipes[PIPES][2];
    int made = 0;
    while (made < PIPES && pipe2(pipes[made], O_CLOEXEC) == 0) {
        ++made;
    }
    c->pid = made == PIPES ? fork() : -1;
    if (c->pid == 0) {
        become(command, pipes);
    }
    for (int i = 0; i < made; ++i) {
        int ours = i == END_IN ? 1 : 0;
        close(pipes[i][1 - ours]);
        c->ends[i] = pipes[i][ours];
        if (c->pid < 0) {
            close_end(c, i);
        }
    }
    if (c->pid > 0) {
        setpgid(c->pid, c->pid); /* whichever of the two is first */
        fcntl(c->ends[END_IN], F_SETFL, O_NONBLOCK);
    }
    return c->pid > 0;
}

static void write_some(conversation *c)
{
    ssize_t written = write(c->ends[END_IN], c->request, c->left);
    if (written < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (written > 0) {
        c->request += written;
        c->left -= (size_t)written;
    }
    if (written <= 0 || c->left == 0) { /* it may answer without having read everything */
        close_end(c, END_IN);
    }
}

/* false when it has written more than it may. */
static bool read_answer(conversation *c)
{
    ssize_t count = read(c->ends[END_OUT], c->text + c->length, PROPOSER_ANSWER_BYTES_MAX - c->length);
    if (count > 0) {
        c->length += (size_t)count;
    } else if (count == 0 || errno != EINTR) {
        close_end(c, END_OUT);
    }
    return c->length < PROPOSER_ANSWER_BYTES_MAX;
}

/* Keeps the end of it. */
static void read_complaint(conversation *c)
{
    char bytes[256];
    ssize_t count = read(c->ends[END_ERR], bytes, sizeof bytes);
    if (count <= 0) {
        close_end(c, END_ERR);
        return;
    }
    size_t added = (size_t)count, kept = COMPLAINT_BYTES - added;
    kept = c->complaint_length < kept ? c->complaint_length : kept;
    memmove(c->complaint, c->complaint + c->complaint_length - kept, kept);
    memcpy(c->complaint + kept, bytes, added);
    c->complaint_length = kept + added;
    c->complaint[c->complaint_length] = '\0';
}

/* Until its stdout is closed, or something ends it earlier. */
static proposer_status talk(conversation *c, double timeout_s, const volatile int *stop)
{
    enum {
        POLL_MS = 50
    };
    double end_s = monotonic_s() + timeout_s;
    while (c->ends[END_OUT] >= 0) {
        if (stop && *stop == 2) {
            return PROPOSER_STOPPED;
        }
        if (monotonic_s() > end_s) {
            return PROPOSER_TIMEOUT;
        }
        struct pollfd ends[PIPES];
        for (int i = 0; i < PIPES; ++i) {
            ends[i] = (struct pollfd){c->ends[i], i == END_IN ? POLLOUT : POLLIN, 0};
        }
        if (poll(ends, PIPES, POLL_MS) <= 0) {
            continue;
        }
        if (c->ends[END_IN] >= 0 && ends[END_IN].revents) {
            write_some(c);
        }
        if (c->ends[END_ERR] >= 0 && ends[END_ERR].revents) {
            read_complaint(c);
        }
        if (c->ends[END_OUT] >= 0 && ends[END_OUT].revents && !read_answer(c)) {
            return PROPOSER_FLOOD;
        }
    }
    return PROPOSER_ANSWERED;
}

/* Waits for the program itself; one that has closed its stdout has until end_s to leave. */
static bool await(pid_t pid, double end_s, int *code)
{
    for (;;) {
        pid_t done = waitpid(pid, code, WNOHANG);
        if (done == pid) {
            return true;
        }
        if ((done < 0 && errno != EINTR) || monotonic_s() > end_s) {
            return false;
        }
        const struct timespec pause = {0, 5000000};
        nanosleep(&pause, NULL);
    }
}

static void finish(conversation *c, proposer_status status, double end_s, proposer_answer *out)
{
    int code = 0;
    bool left = status == PROPOSER_ANSWERED && await(c->pid, end_s, &code);
    kill(-c->pid, SIGKILL); /* whatever it has started */
    if (!left) {
        while (waitpid(c->pid, &code, 0) < 0 && errno == EINTR) {
        }
    }
    char what[sizeof out->detail];
    const char *complaint = c->complaint_length > 0 ? c->complaint : "nothing on stderr";
    if (status == PROPOSER_TIMEOUT || (status == PROPOSER_ANSWERED && !left)) {
        snprintf(what, sizeof what, "it did not answer and end in its time; stderr: %s", complaint);
        refuse(out, PROPOSER_TIMEOUT, what);
    } else if (status == PROPOSER_FLOOD) {
        snprintf(what, sizeof what, "it wrote more than %d bytes", PROPOSER_ANSWER_BYTES_MAX - 1);
        refuse(out, PROPOSER_FLOOD, what);
    } else if (status == PROPOSER_STOPPED) {
        refuse(out, PROPOSER_STOPPED, "stopped");
    } else if (!WIFEXITED(code) || WEXITSTATUS(code) != 0) {
        snprintf(what, sizeof what, "%s %d; stderr: %s", WIFEXITED(code) ? "exit code" : "signal",
                 WIFEXITED(code) ? WEXITSTATUS(code) : WTERMSIG(code), complaint);
        refuse(out, PROPOSER_CRASHED, what);
    } else {
        proposer_read(out);
    }
}

void proposer_ask(proposer_answer *out, const char *command, const char *request, double timeout_s,
                  const volatile int *stop)
{
    double end_s = monotonic_s() + timeout_s;
    conversation c = {.ends = {-1, -1, -1}, .request = request, .left = strlen(request)};
    *out = (proposer_answer){.status = PROPOSER_ANSWERED};
    c.text = calloc(1, PROPOSER_ANSWER_BYTES_MAX + 1);
    out->text = c.text;
    if (!c.text || !start(&c, command)) {
        refuse(out, PROPOSER_CRASHED, c.text ? strerror(errno) : "out of memory");
        return;
    }
    void (*before)(int) = signal(SIGPIPE, SIG_IGN);
    proposer_status status = talk(&c, timeout_s, stop);
    for (int i = 0; i < PIPES; ++i) {
        close_end(&c, i);
    }
    finish(&c, status, end_s, out);
    signal(SIGPIPE, before);
}
