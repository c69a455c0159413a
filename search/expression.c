/* Integer expressions, see expression.h: recursive descent, evaluated while it is read. */
#include "expression.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEPTH_MAX = 64
};

typedef struct reader {
    const char *at;
    expression_lookup *lookup;
    void *arg;
    char *error; /* "" until something is wrong */
    int unused;  /* above 0: inside a branch whose value does not count */
    int depth;
} reader;

static int64_t fail(reader *r, const char *what)
{
    if (!r->error[0]) {
        snprintf(r->error, EXPRESSION_ERROR_MAX, "%s at '%.40s'", what, r->at);
    }
    return 0;
}

static void skip_blanks(reader *r)
{
    while (*r->at == ' ' || (*r->at >= '\t' && *r->at <= '\r')) { /* isspace, which would be a call */
        ++r->at;
    }
}

/* Takes an operator if it comes next; one that is the start of a longer one is left alone. */
static bool take(reader *r, const char *text)
{
    skip_blanks(r);
    if (*r->at != *text) { /* of a space's many evaluations most attempts end here */
        return false;
    }
    size_t length = strlen(text);
    if (strncmp(r->at, text, length) != 0) {
        return false;
    }
    bool comparison = length == 1 && (*text == '<' || *text == '>' || *text == '!');
    if (comparison && r->at[1] == '=') {
        return false;
    }
    r->at += length;
    return true;
}

static void expect(reader *r, const char *text)
{
    if (!take(r, text)) {
        char what[32];
        snprintf(what, sizeof what, "'%s' expected", text);
        fail(r, what);
    }
}

static int64_t read_choice(reader *r);

/* (a, b) of a function. */
static void read_pair(reader *r, int64_t pair[2])
{
    expect(r, "(");
    pair[0] = read_choice(r);
    expect(r, ",");
    pair[1] = read_choice(r);
    expect(r, ")");
}

static bool is_word(const char *name, size_t length, const char *word)
{
    return strlen(word) == length && strncmp(name, word, length) == 0;
}

static int64_t ceil_div(reader *r, int64_t a, int64_t b)
{
    if (a < 0 || b <= 0) {
        return r->unused ? 0 : fail(r, "ceil_div of a negative number, or by none above 0");
    }
    return a / b + (a % b != 0);
}

static int64_t read_name(reader *r)
{
    const char *name = r->at;
    while (isalnum((unsigned char)*r->at) || *r->at == '_') {
        ++r->at;
    }
    size_t length = (size_t)(r->at - name);
    int64_t pair[2];
    if (is_word(name, length, "max") || is_word(name, length, "min")) {
        read_pair(r, pair);
        return (pair[0] > pair[1]) == (name[1] == 'a') ? pair[0] : pair[1];
    }
    if (is_word(name, length, "ceil_div")) {
        read_pair(r, pair);
        return ceil_div(r, pair[0], pair[1]);
    }
    int64_t value = 0;
    if (!r->lookup(r->arg, name, length, &value)) {
        r->at = name;
        return fail(r, "unknown name");
    }
    return value;
}

static int64_t read_unary(reader *r)
{
    if (++r->depth > DEPTH_MAX) {
        return fail(r, "too deep");
    }
    int64_t value = 0;
    if (take(r, "!")) {
        value = !read_unary(r);
    } else if (take(r, "-")) {
        value = read_unary(r);
        if (__builtin_sub_overflow(0, value, &value)) {
            fail(r, "overflow");
        }
    } else if (take(r, "(")) {
        value = read_choice(r);
        expect(r, ")");
    } else if (isdigit((unsigned char)*r->at)) {
        char *end = NULL;
        errno = 0;
        value = strtoll(r->at, &end, 10);
        if (errno == ERANGE) {
            return fail(r, "overflow");
        }
        r->at = end;
    } else if (isalpha((unsigned char)*r->at) || *r->at == '_') {
        value = read_name(r);
    } else {
        fail(r, "a value expected");
    }
    --r->depth;
    return value;
}

static int64_t divide(reader *r, int64_t a, int64_t b, bool remainder)
{
    if (b == 0) {
        return r->unused ? 0 : fail(r, "division by zero");
    }
    if (b == -1) { /* the smallest number has no negative */
        int64_t negative = 0;
        bool over = __builtin_sub_overflow(0, a, &negative);
        return remainder ? 0 : over && !r->unused ? fail(r, "overflow") : negative;
    }
    return remainder ? a % b : a / b;
}

static int64_t read_product(reader *r)
{
    int64_t value = read_unary(r);
    while (!r->error[0]) {
        if (take(r, "*")) {
            int64_t other = read_unary(r);
            if (__builtin_mul_overflow(value, other, &value) && !r->unused) {
                return fail(r, "overflow");
            }
        } else if (take(r, "/")) {
            value = divide(r, value, read_unary(r), false);
        } else if (take(r, "%")) {
            value = divide(r, value, read_unary(r), true);
        } else {
            break;
        }
    }
    return value;
}

static int64_t read_sum(reader *r)
{
    int64_t value = read_product(r);
    while (!r->error[0]) {
        bool plus = take(r, "+");
        if (!plus && !take(r, "-")) {
            break;
        }
        int64_t other = read_product(r);
        bool over = plus ? __builtin_add_overflow(value, other, &value) : __builtin_sub_overflow(value, other, &value);
        if (over && !r->unused) {
            return fail(r, "overflow");
        }
    }
    return value;
}

static int64_t read_comparison(reader *r)
{
    int64_t value = read_sum(r);
    while (!r->error[0]) {
        if (take(r, "<=")) {
            value = value <= read_sum(r);
        } else if (take(r, ">=")) {
            value = value >= read_sum(r);
        } else if (take(r, "<")) {
            value = value < read_sum(r);
        } else if (take(r, ">")) {
            value = value > read_sum(r);
        } else if (take(r, "==")) {
            value = value == read_sum(r);
        } else if (take(r, "!=")) {
            value = value != read_sum(r);
        } else {
            break;
        }
    }
    return value;
}

static int64_t read_and(reader *r)
{
    int64_t value = read_comparison(r);
    while (!r->error[0] && take(r, "&&")) {
        r->unused += !value;
        int64_t other = read_comparison(r);
        r->unused -= !value;
        value = value && other;
    }
    return value;
}

static int64_t read_or(reader *r)
{
    int64_t value = read_and(r);
    while (!r->error[0] && take(r, "||")) {
        r->unused += !!value;
        int64_t other = read_and(r);
        r->unused -= !!value;
        value = value || other;
    }
    return value;
}

static int64_t read_choice(reader *r)
{
    int64_t condition = read_or(r);
    if (r->error[0] || !take(r, "?")) {
        return condition;
    }
    r->unused += !condition;
    int64_t yes = read_choice(r);
    r->unused -= !condition;
    expect(r, ":");
    r->unused += !!condition;
    int64_t no = read_choice(r);
    r->unused -= !!condition;
    return condition ? yes : no;
}

bool expression_eval(const char *text, expression_lookup *lookup, void *arg, int64_t *value,
                     char error[EXPRESSION_ERROR_MAX])
{
    reader r = {text, lookup, arg, error, 0, 0};
    error[0] = '\0';
    int64_t result = read_choice(&r);
    skip_blanks(&r);
    if (!error[0] && *r.at) {
        fail(&r, "nothing more expected");
    }
    *value = result;
    return !error[0];
}
