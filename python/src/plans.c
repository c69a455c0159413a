/* One context a device and a table of plans. The table is what makes a repeated call cheap: a hash over the problem and
 * one comparison; the comparison alone where the call before had the same problem. */
#include "plans.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    PLANS_MAX = 1024,     /* beyond, all are dropped: a length that grows by one each call must not fill memory */
    SLOTS = 4 * PLANS_MAX /* a power of two; never more than a quarter full */
};

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(acr_ctx *) cpu_context, cuda_contexts[PLANS_DEVICES_MAX]; /* written under `opening` */
static plan_entry *slots[SLOTS];
static plan_entry *latest; /* found last: one of the table's, or NULL */
static unsigned plan_count, generation;

/* ---- Contexts ---------------------------------------------------------------------------------------------------- */

/* A child of fork() has no thread that could be opening. */
static void before_fork(void)
{
    pthread_mutex_lock(&opening);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&opening);
}

static void forget_everything(void)
{
    atomic_store(&cpu_context, NULL);
    for (int i = 0; i < PLANS_DEVICES_MAX; i++)
        atomic_store(&cuda_contexts[i], NULL);
    memset(slots, 0, sizeof slots);
    latest = NULL;
    plan_count = 0;
    generation++;
    after_fork();
}

int plans_setup(void)
{
    if (pthread_atfork(before_fork, after_fork, forget_everything) == 0)
        return 0;
    PyErr_NoMemory();
    return -1;
}

acr_status plans_open(acr_ctx **out, dl_device device)
{
    _Atomic(acr_ctx *) *const place = device.type == DL_CUDA ? &cuda_contexts[device.id] : &cpu_context;
    acr_status status = ACR_OK;
    acr_ctx *ctx = atomic_load_explicit(place, memory_order_acquire);
    if (!ctx) {
        acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
        options.backend = device.type == DL_CUDA ? "cuda" : "cpu";
        options.device = device.type == DL_CUDA ? device.id : 0;
        pthread_mutex_lock(&opening);
        ctx = atomic_load_explicit(place, memory_order_relaxed);
        if (!ctx && (status = acr_ctx_create(&ctx, &options)) == ACR_OK)
            atomic_store_explicit(place, ctx, memory_order_release);
        pthread_mutex_unlock(&opening);
    }
    *out = ctx;
    return status;
}

int plans_context(acr_ctx **out, dl_device device)
{
    if (device.type == DL_CUDA && (device.id < 0 || device.id >= PLANS_DEVICES_MAX))
        return acr_py_invalid("device %d: at most %d are supported", (int)device.id, PLANS_DEVICES_MAX);
    const acr_status status = plans_open(out, device);
    return status == ACR_OK ? 0 : acr_py_raise(status);
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
    latest = NULL;
    plan_count = 0;
    generation++;
}

static bool is_of(const plan_entry *entry, const acr_ctx *ctx, const acr_problem *problem)
{
    return entry->ctx == ctx && memcmp(&entry->problem, problem, sizeof *problem) == 0;
}

static plan_entry **slot_of(uint64_t digest, const acr_ctx *ctx, const acr_problem *problem)
{
    size_t i = digest % SLOTS;
    while (slots[i] && (slots[i]->digest != digest || !is_of(slots[i], ctx, problem)))
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

/* The entry of a problem, new where there is none; NULL with an exception. */
static plan_entry *look_up(acr_ctx *ctx, const acr_problem *problem)
{
    const uint64_t digest = digest_of(ctx, problem);
    plan_entry **slot = slot_of(digest, ctx, problem), *entry = *slot;
    if (entry)
        return entry;
    entry = calloc(1, sizeof *entry);
    if (!entry) {
        PyErr_NoMemory();
        return NULL;
    }
    entry->digest = digest;
    entry->ctx = ctx;
    entry->problem = *problem;
    if (make_plan(entry)) {
        free_entry(entry);
        return NULL;
    }
    if (plan_count == PLANS_MAX) {
        plans_forget();
        slot = slot_of(digest, ctx, problem);
    }
    *slot = entry;
    plan_count++;
    return entry;
}

int plans_find(plan_entry **out, acr_ctx *ctx, const acr_problem *problem)
{
    plan_entry *entry = latest && is_of(latest, ctx, problem) ? latest : look_up(ctx, problem);
    if (!entry)
        return -1;
    *out = latest = entry;
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
