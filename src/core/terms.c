/* Terms: what a problem has beyond a scale, a mask and a window, and which kernels are compiled with it; and the type
 * of o. Families call this file and visible.c, of all the core. */
#include "kernel.h"

#include <stdbool.h>
#include <stddef.h>

/* Writes which terms a problem needs, and returns why a kernel with `served` cannot run it: its first term, in this
 * order, that the kernel lacks; NULL when it lacks none. Two names may share a term. */
static const char *find_terms(uint32_t *needed, const acr_problem *p, uint32_t served)
{
    const struct {
        uint32_t term;
        bool is_there;
        const char *why_not;
    } terms[] = {
        {FWD_TERM_CAP, p->softcap > 0.0f, "softcap: the kernel is compiled without softcap (TERMS)"},
        {FWD_TERM_SINKS, p->flags & ACR_SINKS, "sinks: the kernel is compiled without sinks (TERMS)"},
        {FWD_TERM_BIAS, p->bias_dtype == ACR_BOOL8, "mask: the kernel is compiled without boolean masks (TERMS)"},
        {FWD_TERM_BIAS, p->bias_dtype != ACR_DTYPE_DEFAULT, "bias: the kernel is compiled without bias (TERMS)"},
        {FWD_TERM_ALIBI, p->flags & ACR_ALIBI, "alibi: the kernel is compiled without ALiBi (TERMS)"},
        {FWD_TERM_TREE, p->flags & ACR_TREE, "tree: the kernel is compiled without tree masks (TERMS)"},
        {FWD_TERM_RANGES, p->flags & ACR_RANGES && visible_is_limited(acr__rule_of(p)),
         "ranges: the kernel is compiled without ranges (TERMS)"},
        {FWD_TERM_LIMITS, p->chunk != 0, "chunk: the kernel is compiled without chunks (TERMS)"},
        {FWD_TERM_LIMITS, p->flags & ACR_KV_STARTS, "kv_starts: the kernel is compiled without key starts (TERMS)"}};
    const char *reason = NULL;
    *needed = 0;
    for (size_t i = 0; i < sizeof terms / sizeof terms[0]; i++) {
        if (!terms[i].is_there)
            continue;
        *needed |= terms[i].term;
        if (!reason && !(served & terms[i].term))
            reason = terms[i].why_not;
    }
    return reason;
}

const char *acr__out_why_not(const acr__kernel *kernel, const acr_problem *p)
{
    const uint32_t usual = p->dtype == ACR_E4M3 ? 1u << ACR_F16 | 1u << ACR_BF16 : 1u << p->dtype;
    const uint32_t types = kernel->out_types ? kernel->out_types : usual;
    if (types & 1u << p->out_dtype || (p->out_dtype == ACR_DTYPE_DEFAULT && types & usual))
        return NULL;
    return p->out_dtype == ACR_F32 ? "out_dtype is f32: the kernel is compiled for o of its inputs' type (OUT_F32)"
                                   : "out_dtype: the kernel is compiled for o of f32 alone (OUT_F32)";
}

uint32_t acr__terms_of(const acr_problem *p)
{
    uint32_t needed;
    (void)find_terms(&needed, p, FWD_TERM_ALL);
    return needed;
}

const char *acr__terms_why_not(uint32_t terms, const acr_problem *problem)
{
    uint32_t needed;
    return find_terms(&needed, problem, terms);
}
