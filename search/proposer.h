/* External proposers: any program that reads one JSON request on stdin and writes one JSON answer on stdout
 * (docs/manual/evolve.md, "Proposers"). What goes wrong with it is a trial of its own, with a typed status. */
#ifndef SEARCH_PROPOSER_H
#define SEARCH_PROPOSER_H

#include <jansson.h>
#include <stddef.h>

/* X(identifier, stable name): beside those of the gates. */
#define PROPOSER_STATUSES(X)                                                                                           \
    X(ANSWERED, "")                                                                                                    \
    X(TIMEOUT, "proposer_timeout")                                                                                     \
    X(FLOOD, "proposer_flood")                                                                                         \
    X(CRASHED, "proposer_crashed")                                                                                     \
    X(MALFORMED, "proposer_malformed")                                                                                 \
    X(ILLEGAL, "proposal_illegal")   /* no point of a space, or one that its conditions exclude */                     \
    X(REPEATED, "proposal_repeated") /* proposed before */                                                             \
    X(STOPPED, "stopped")            /* by the user: no trial */

typedef enum proposer_status {
#define X(identifier, name) PROPOSER_##identifier,
    PROPOSER_STATUSES(X)
#undef X
} proposer_status;

const char *proposer_status_name(proposer_status status);

enum {
    PROPOSER_ANSWER_BYTES_MAX = 1 << 20 /* more is a flood */
};

typedef struct proposer_answer {
    proposer_status status; /* up to MALFORMED, or STOPPED */
    char detail[512];       /* what is wrong, with the end of what it wrote to stderr */
    char *text;             /* all it wrote to stdout, as far as it was read */
    json_t *json;           /* an object of the answer's schema; NULL unless ANSWERED */
} proposer_answer;

/* Runs `sh -c command` in a process group of its own and ends all of it when it has answered, after timeout_s, or once
 * *stop is 2; also what has left the group (process_adopt_strays says what that asks of this program). Free with
 * proposer_answer_free. */
void proposer_ask(proposer_answer *out, const char *command, const char *request, double timeout_s,
                  const volatile int *stop);
void proposer_answer_free(proposer_answer *answer);

/* Checks an answer's text against the schema: what proposer_ask does with it. For tests. */
void proposer_read(proposer_answer *answer);

#endif
