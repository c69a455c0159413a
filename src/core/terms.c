/* Terms: what a problem has beyond a scale, a mask and a window, and which kernels are compiled with it. Families call
 * this file and visible.c, of all the core. */
#include "kernel.h"

#include <stddef.h>

uint32_t acr__terms_of(const acr_problem *p)
{
    uint32_t terms = 0;
    if (p->softcap > 0.0f)
        terms |= FWD_TERM_CAP;
    if (p->flags & ACR_SINKS)
        terms |= FWD_TERM_SINKS;
    if (p->bias_dtype != ACR_DTYPE_DEFAULT)
        terms |= FWD_TERM_BIAS;
    if (p->flags & ACR_ALIBI)
        terms |= FWD_TERM_ALIBI;
    if (p->flags & ACR_TREE)
        terms |= FWD_TERM_TREE;
    if (p->flags & ACR_RANGES && visible_is_limited(acr__rule_of(p)))
        terms |= FWD_TERM_RANGES;
    if (p->flags & ACR_KV_STARTS || p->chunk != 0)
        terms |= FWD_TERM_LIMITS;
    return terms;
}

const char *acr__terms_why_not(uint32_t terms, const acr_problem *problem)
{
    const uint32_t missing = acr__terms_of(problem) & ~terms;
    if (missing & FWD_TERM_CAP)
        return "softcap: the kernel is compiled without softcap (TERMS)";
    if (missing & FWD_TERM_SINKS)
        return "sinks: the kernel is compiled without sinks (TERMS)";
    if (missing & FWD_TERM_BIAS)
        return problem->bias_dtype == ACR_BOOL8 ? "mask: the kernel is compiled without boolean masks (TERMS)"
                                                : "bias: the kernel is compiled without bias (TERMS)";
    if (missing & FWD_TERM_ALIBI)
        return "alibi: the kernel is compiled without ALiBi (TERMS)";
    if (missing & FWD_TERM_TREE)
        return "tree: the kernel is compiled without tree masks (TERMS)";
    if (missing & FWD_TERM_RANGES)
        return "ranges: the kernel is compiled without ranges (TERMS)";
    if (missing & FWD_TERM_LIMITS)
        return problem->chunk != 0 ? "chunk: the kernel is compiled without chunks (TERMS)"
                                   : "kv_starts: the kernel is compiled without key starts (TERMS)";
    return NULL;
}
