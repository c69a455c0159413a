/* Included by force before every file that `./run lint` analyses: tells clang-tidy, which sees one file at a time, what
 * it would otherwise have to guess, that acr__fail returns the status it is given. */
#include "error.h"

#define acr__fail(status, ...) ((acr__fail)(status, __VA_ARGS__), (status))
