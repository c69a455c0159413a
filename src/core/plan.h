/* A plan: a kernel chosen and made ready. How the choice is made: plan.c. */
#ifndef ACR_PLAN_H
#define ACR_PLAN_H

#include "backend.h"
#include "buffers.h"

struct acr_plan {
    acr_ctx *ctx; /* one reference; NULL for the plans of the context's own cache, which the context outlives */
    acr__prepared *prepared;
    acr_problem problem; /* canonical */
    /* Bits 1 << acr__buffer. settled: the buffers about which a flag or a field of the problem decides; wanted: those
     * of them that an execution must bring. */
    uint32_t settled, wanted;
    int64_t span_bytes[ACR__BUFFERS]; /* of tensors, for the overlap checks of an execution; 0 where it is not known */
    double seconds;                   /* acr_plan_seconds */
    char text[ACR_PROBLEM_TEXT_MAX + 256];
};

/* acr_plan_create for a canonical problem; the plan holds a reference on ctx if `pins`. */
acr_status acr__plan_make(acr_plan **out, acr_ctx *ctx, const acr_problem *canonical, acr_effort effort, int pins);

#endif
