/* How an integration says no: a status, and one sentence kept for the thread. Each integration includes this once, so
 * each has a text of its own; what the library refuses keeps the library's sentence. */
#ifndef ACROMION_REFUSAL_H
#define ACROMION_REFUSAL_H

#include <acromion.h>
#include <stdarg.h>
#include <stdio.h>

static _Thread_local char refusal_text[256];

#if defined __GNUC__
__attribute__((format(printf, 2, 3)))
#endif
static inline acr_status
refuse(acr_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(refusal_text, sizeof refusal_text, format, arguments);
    va_end(arguments);
    return status;
}

/* Passes a status of the library on, with its sentence. */
static inline acr_status pass_on(acr_status status)
{
    return status == ACR_OK ? ACR_OK : refuse(status, "%s", acr_last_error());
}

/* The largest power of two, at most 16, that divides every address: what acr_problem.alignment may promise. */
static inline uint32_t common_alignment(const void *const *pointers, int count)
{
    uintptr_t bits = 16;
    for (int i = 0; i < count; i++)
        bits |= (uintptr_t)pointers[i];
    return (uint32_t)(bits & (~bits + 1));
}

#endif
