/* One context a device and a table of plans. The table is what makes a repeated call cheap: a hash over the problem,
 * one comparison, done. */
#include "plans.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEVICES_MAX = 64,
    PLANS_MAX = 1024,     /* beyond, all are dropped: a length that grows by one each call must not fill memory */
    SLOTS = 4 * PLANS_MAX /* a power of two; never more than a quarter full */
};

static acr_ctx *cpu_context, *cuda_contexts[DEVICES_MAX];
static plan_entry *slots[SLOTS];
static unsigned plan_count, generation;

/* ---- Contexts ---------------------------------------------------------------------------------------------------- */

static void forget_everything(void)
{
    cpu_context = NULL;
    memset(cuda_contexts, 0, sizeof cuda_contexts);
    memset(slots, 0, sizeof slots);
    plan_count = 0;
    generation++;
}

int plans_setup(void)
{
    if (pthread_atfork(NULL, NULL, forget_everything) == 0)
        return 0;
    PyErr_NoMemory();
    return -1;
}

int plans_context(acr_ctx **out, dl_device device)
{
    if (device.type == DL_CUDA && (device.id < 0 || device.id >= DEVICES_MAX))
        return acr_py_invalid("device %d: at most %d are supported", (int)device.id, DEVICES_MAX);
    acr_ctx **const place = device.type == DL_CUDA ? &cuda_contexts[device.id] : &cpu_context;
    if (!*place) {
        acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
        options.backend = device.type == DL_CUDA ? "cuda" : "cpu";
        options.device = device.type == DL_CUDA ? device.id : 0;
        const acr_status status = acr_ctx_create(place, &options);
        if (status != ACR_OK)
            return acr_py_raise(status);
    }
    *out = *place;
    return 0;
}

/* ---- Plans ------------------------------------------------------------------------------------------------------- */

static uint64_t digest_of(const acr_ctx *ctx, const acr_problem *problem)
{
    uint64_t words[sizeof *problem / sizeof(uint64_t)], digest = (uint64_t)(uintptr_t)ctx;
    _Static_assert(sizeof words == sizeof *problem, "a problem is whole 64-bit words");
    memcpy(words, problem, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        digest = (digest ^ words[i]) * UINT64_C(0x9e3779b97f4a7c15); /* 2^64 / golden ratio: spreads every bit */
        digest ^= digest >> 32;
    }
    return digest;
}

static void free_entry(plan_entry *entry)
{
    acr_plan_destroy(entry->plan);
    free(entry->refusal_text);
    free(entry);
}

void plans_forget(void)
{
    for (size_t i = 0; i < SLOTS; i++) {
        plan_entry *entry = slots[i];
        slots[i] = NULL;
        if (entry && entry->users > 0)
            entry->dropped = true;
        else if (entry)
            free_entry(entry);
    }
    plan_count = 0;
    generation++;
}

static plan_entry **slot_of(uint64_t digest, const acr_ctx *ctx, const acr_problem *problem)
{
    size_t i = digest % SLOTS;
    while (slots[i] && (slots[i]->digest != digest || slots[i]->ctx != ctx ||
                        memcmp(&slots[i]->problem, problem, sizeof *problem) != 0))
        i = (i + 1) % SLOTS;
    return &slots[i];
}

/* Fills in the plan of a new entry, or why there is none. Returns 0, or -1 with an exception. */
static int make_plan(plan_entry *entry)
{
    const acr_status status = acr_plan_create(&entry->plan, entry->ctx, &entry->problem, ACR_ESTIMATE);
    if (status == ACR_OK) {
        entry->workspace_bytes = acr_plan_workspace(entry->plan);
        return 0;
    }
    if (status != ACR_UNSUPPORTED) /* what may go well another time is tried again */
        return acr_py_raise(status);
    entry->refusal = status;
    entry->refusal_text = strdup(acr_last_error());
    if (entry->refusal_text)
        return 0;
    PyErr_NoMemory();
    return -1;
}

int plans_find(plan_entry **out, acr_ctx *ctx, const acr_problem *problem)
{
    const uint64_t digest = digest_of(ctx, problem);
    plan_entry **slot = slot_of(digest, ctx, problem), *entry = *slot;
    if (!entry) {
        entry = calloc(1, sizeof *entry);
        if (!entry) {
            PyErr_NoMemory();
            return -1;
        }
        entry->digest = digest;
        entry->ctx = ctx;
        entry->problem = *problem;
        if (make_plan(entry)) {
            free_entry(entry);
            return -1;
        }
        if (plan_count == PLANS_MAX) {
            plans_forget();
            slot = slot_of(digest, ctx, problem);
        }
        *slot = entry;
        plan_count++;
    }
    *out = entry;
    return entry->refusal == ACR_OK ? 0 : acr_py_refuse(entry->refusal, entry->refusal_text);
}

void plans_release(plan_entry *entry)
{
    if (--entry->users == 0 && entry->dropped)
        free_entry(entry);
}

unsigned plans_generation(void)
{
    return generation;
}
