/* External proposers, see proposer.h. */
#include "proposer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/process.h"
#include "base/progress.h"
#include "internal.h"

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
    static const char *const keys[] = {"family",     "arch",      "parameters", "name",    "source",
                                       "descriptor", "rationale", "macro",      "insight", "guidance"};
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
            return "an unknown key: family arch parameters name source descriptor rationale macro insight guidance are "
                   "known";
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

/* Errors: those of process_start; ACR_IO without pipes. */
static acr_status start(conversation *c, const char *command, double timeout_s)
{
    const char *const argv[] = {"/bin/sh", "-c", command, NULL};
    const process_limits limits = {.wall_s = timeout_s};
    int pipes[PIPES][2], theirs[PIPES], made = 0;
    while (made < PIPES && pipe2(pipes[made], O_CLOEXEC) == 0) {
        ++made;
    }
    for (int i = 0; i < made; ++i) {
        const int ours = i == END_IN ? 1 : 0;
        theirs[i] = pipes[i][1 - ours];
        c->ends[i] = pipes[i][ours];
    }
    acr_status status = made == PIPES ? process_start(&c->pid, argv, NULL, theirs, &limits)
                                      : acr__fail(ACR_IO, "no pipes for the proposer: %s", strerror(errno));
    for (int i = 0; i < made; ++i) {
        close(theirs[i]);
        if (status != ACR_OK) {
            close_end(c, i);
        }
    }
    if (status == ACR_OK) {
        fcntl(c->ends[END_IN], F_SETFL, O_NONBLOCK);
    }
    return status;
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

/* One that has closed its stdout has until end_s to leave; the others are ended at once. */
static void finish(const conversation *c, proposer_status status, double end_s, const volatile int *stop,
                   proposer_answer *out)
{
    process_outcome outcome;
    char what[sizeof out->detail], how[96];
    const char *complaint = c->complaint_length > 0 ? c->complaint : "nothing on stderr";
    process_wait(&outcome, c->pid, status == PROPOSER_ANSWERED ? end_s : 0.0, stop);
    process_end_strays();
    process_outcome_text(how, &outcome);
    if (status == PROPOSER_STOPPED || (status == PROPOSER_ANSWERED && outcome.end == PROCESS_STOPPED)) {
        refuse(out, PROPOSER_STOPPED, "stopped");
    } else if (status == PROPOSER_FLOOD) {
        snprintf(what, sizeof what, "it wrote more than %d bytes", PROPOSER_ANSWER_BYTES_MAX - 1);
        refuse(out, PROPOSER_FLOOD, what);
    } else if (status == PROPOSER_TIMEOUT || outcome.end == PROCESS_TIMED_OUT) {
        snprintf(what, sizeof what, "it did not answer and end in its time; stderr: %s", complaint);
        refuse(out, PROPOSER_TIMEOUT, what);
    } else if (outcome.end != PROCESS_EXITED || outcome.code != 0) {
        snprintf(what, sizeof what, "%s; stderr: %s", how, complaint);
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
    process_adopt_strays();
    c.text = calloc(1, PROPOSER_ANSWER_BYTES_MAX + 1);
    out->text = c.text;
    if (!c.text || start(&c, command, timeout_s) != ACR_OK) {
        refuse(out, PROPOSER_CRASHED, c.text ? acr_last_error() : "out of memory");
        return;
    }
    void (*before)(int) = signal(SIGPIPE, SIG_IGN);
    proposer_status status = talk(&c, timeout_s, stop);
    for (int i = 0; i < PIPES; ++i) {
        close_end(&c, i);
    }
    finish(&c, status, end_s, stop, out);
    signal(SIGPIPE, before);
}
