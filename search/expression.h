/* Integer expressions over names, as the .space files write their conditions: C's operators
 * ?: || && == != < <= > >= + - * / % ! and parentheses, 64-bit, and min(a, b), max(a, b), ceil_div(a, b). */
#ifndef SEARCH_EXPRESSION_H
#define SEARCH_EXPRESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    EXPRESSION_ERROR_MAX = 160
};

/* Writes the value of a name of `length` characters; false when it is unknown. */
typedef bool expression_lookup(void *arg, const char *name, size_t length, int64_t *value);

/* Evaluates a whole text. false with the reason in error: syntax, an unknown name, overflow, division by zero. Branches
 * that C would not evaluate may divide by zero or overflow. */
bool expression_eval(const char *text, expression_lookup *lookup, void *arg, int64_t *value,
                     char error[EXPRESSION_ERROR_MAX]);

#endif
