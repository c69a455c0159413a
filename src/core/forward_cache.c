/* The cache of acr_forward: plans by the digest of their problem, each with a workspace for every stream that executed
 * it.
 *
 * The cache is bounded by the number of plans and by the bytes of their workspaces: beyond either bound the plan goes
 * that has not been used for longest. Two kinds of plans never go before the context does: one that a call is
 * executing, and one that was executed while its stream was captured, because the graph goes on using the workspace. */
#include "forward_cache.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "plan.h"

enum {
    BUCKETS = 256,
    PLANS_MOST = 1024,
    STREAMS_MOST = 64 /* workspaces of one plan */
};
static const size_t WORKSPACE_BYTES_MOST = (size_t)1 << 30;

/* A workspace of a plan for one stream. Plans without workspace have none. */
typedef struct stream_workspace {
    void *stream, *memory;
    size_t capacity;
    int users; /* calls that are executing with it */
    struct stream_workspace *next;
} stream_workspace;

typedef struct cached_plan {
    uint64_t digest;
    acr_plan *plan;
    stream_workspace *workspaces;      /* the one used last first */
    struct cached_plan *next;          /* in the same bucket */
    struct cached_plan *newer, *older; /* by last use */
    int users;                         /* calls of acr_forward that are executing it */
    bool captured;                     /* a graph may hold its workspace */
    bool dropped;                      /* out of the cache: the last user frees it */
} cached_plan;

struct forward_cache {
    cached_plan *buckets[BUCKETS];
    cached_plan *newest, *oldest;
    int plans;
    size_t workspace_bytes; /* of all workspaces of all plans in the cache */
};

forward_cache *acr__forward_cache_create(void)
{
    return calloc(1, sizeof(forward_cache));
}

/* ---- Entries ----------------------------------------------------------------------------------------------------- */

static void free_workspace(stream_workspace *workspace, acr__backend_device *device)
{
    device->backend->mem_free(device, workspace->memory); /* cuda: waits for work that still uses it */
    free(workspace);
}

static void free_cached(cached_plan *entry, acr__backend_device *device)
{
    while (entry->workspaces) {
        stream_workspace *next = entry->workspaces->next;
        free_workspace(entry->workspaces, device);
        entry->workspaces = next;
    }
    acr_plan_destroy(entry->plan);
    free(entry);
}

static cached_plan *find_cached(const forward_cache *cache, uint64_t digest, const acr_problem *canonical)
{
    cached_plan *entry = cache->buckets[digest % BUCKETS];
    while (entry && (entry->digest != digest || memcmp(&entry->plan->problem, canonical, sizeof *canonical) != 0))
        entry = entry->next;
    return entry;
}

static void unlink_from_order(forward_cache *cache, cached_plan *entry)
{
    *(entry->newer ? &entry->newer->older : &cache->newest) = entry->older;
    *(entry->older ? &entry->older->newer : &cache->oldest) = entry->newer;
}

static void link_as_newest(forward_cache *cache, cached_plan *entry)
{
    entry->newer = NULL;
    entry->older = cache->newest;
    *(cache->newest ? &cache->newest->newer : &cache->oldest) = entry;
    cache->newest = entry;
}

static void insert(forward_cache *cache, cached_plan *entry)
{
    entry->next = cache->buckets[entry->digest % BUCKETS];
    cache->buckets[entry->digest % BUCKETS] = entry;
    link_as_newest(cache, entry);
    cache->plans++;
}

/* Takes an entry out of the cache; it is the caller's to free. */
static void take_out(forward_cache *cache, cached_plan *entry)
{
    cached_plan **link = &cache->buckets[entry->digest % BUCKETS];
    while (*link != entry)
        link = &(*link)->next;
    *link = entry->next;
    unlink_from_order(cache, entry);
    cache->plans--;
    for (const stream_workspace *w = entry->workspaces; w; w = w->next)
        cache->workspace_bytes -= w->capacity;
}

void acr__forward_cache_clear(forward_cache *cache, acr__backend_device *device)
{
    while (cache->newest) {
        cached_plan *entry = cache->newest;
        take_out(cache, entry);
        if (entry->users > 0)
            entry->dropped = true;
        else
            free_cached(entry, device);
    }
}

void acr__forward_cache_destroy(forward_cache *cache, acr__backend_device *device)
{
    if (cache && device)
        acr__forward_cache_clear(cache, device);
    free(cache);
}

/* ---- The bounds -------------------------------------------------------------------------------------------------- */

/* Takes a plan's workspace for a stream out of its list; NULL when there is none. */
static stream_workspace *take_workspace(cached_plan *entry, const void *stream)
{
    for (stream_workspace **link = &entry->workspaces; *link; link = &(*link)->next)
        if ((*link)->stream == stream) {
            stream_workspace *taken = *link;
            *link = taken->next;
            return taken;
        }
    return NULL;
}

static cached_plan *oldest_idle(const forward_cache *cache, const cached_plan *except)
{
    cached_plan *entry = cache->oldest;
    while (entry && (entry->users > 0 || entry->captured || entry == except))
        entry = entry->newer;
    return entry;
}

/* Drops what has not been used for longest until `kept`, with `more` bytes of workspace, fits the bounds, or all that
 * is left is in use. *spare, if not NULL, receives a dropped workspace of the stream: work enqueued on the stream later
 * may use it at once, whatever is still running there. */
static void make_room(forward_cache *cache, acr__backend_device *device, const cached_plan *kept, size_t more,
                      const void *stream, stream_workspace **spare)
{
    while (cache->plans > PLANS_MOST || cache->workspace_bytes + more > WORKSPACE_BYTES_MOST) {
        cached_plan *entry = oldest_idle(cache, kept);
        if (!entry)
            return;
        take_out(cache, entry);
        if (spare && !*spare)
            *spare = take_workspace(entry, stream);
        free_cached(entry, device);
    }
}

/* Drops the workspace of a plan that has been idle for longest when the plan has one for too many streams. */
static void drop_oldest_stream(forward_cache *cache, cached_plan *entry, acr__backend_device *device)
{
    int count = 0;
    stream_workspace **last_idle = NULL;
    for (stream_workspace **link = &entry->workspaces; *link; link = &(*link)->next) {
        count++;
        if ((*link)->users == 0)
            last_idle = link;
    }
    if (count < STREAMS_MOST || !last_idle || entry->captured)
        return;
    stream_workspace *dropped = *last_idle;
    *last_idle = dropped->next;
    cache->workspace_bytes -= dropped->capacity;
    free_workspace(dropped, device);
}

/* ---- Finding and making ------------------------------------------------------------------------------------------ */

/* The cached plan of a problem, made when it is not there. The caller holds the lock; making a plan lets go of it
 * meanwhile. */
static acr_status cached_plan_of(cached_plan **out, acr_ctx *ctx, const acr_problem *canonical)
{
    const uint64_t digest = acr__problem_digest(canonical);
    if ((*out = find_cached(ctx->cache, digest, canonical))) {
        if (ctx->cache->newest != *out) {
            unlink_from_order(ctx->cache, *out);
            link_as_newest(ctx->cache, *out);
        }
        return ACR_OK;
    }
    pthread_mutex_unlock(&ctx->lock);
    acr_plan *plan = NULL;
    cached_plan *entry = calloc(1, sizeof *entry);
    const acr_status status = entry ? acr__plan_make(&plan, ctx, canonical, ACR_ESTIMATE, 0)
                                    : acr__fail(ACR_NO_MEMORY, "no memory for a plan");
    pthread_mutex_lock(&ctx->lock);
    if (status != ACR_OK) {
        free(entry);
        return status;
    }
    if ((*out = find_cached(ctx->cache, digest, canonical))) { /* another thread was faster */
        acr_plan_destroy(plan);
        free(entry);
        return ACR_OK;
    }
    *entry = (cached_plan){.digest = digest, .plan = plan};
    insert(ctx->cache, entry);
    *out = entry;
    return ACR_OK;
}

/* Rounded up so that a need that grows slowly finds the memory of a dropped plan large enough. */
static size_t capacity_for(size_t bytes)
{
    size_t step = 256;
    while (step < bytes / 8)
        step *= 2;
    return (bytes + step - 1) / step * step;
}

/* A workspace of at least `bytes`: a dropped one of this stream, or new memory. */
static acr_status obtain_workspace(stream_workspace **out, forward_cache *cache, const cached_plan *entry,
                                   acr__backend_device *device, size_t bytes, void *stream)
{
    const size_t capacity = capacity_for(bytes);
    stream_workspace *spare = NULL;
    make_room(cache, device, entry, capacity, stream, &spare);
    if (spare && spare->capacity >= bytes) {
        *out = spare;
        return ACR_OK;
    }
    if (spare)
        free_workspace(spare, device);
    stream_workspace *made = calloc(1, sizeof *made);
    if (!made)
        return acr__fail(ACR_NO_MEMORY, "no memory for a workspace");
    *made = (stream_workspace){.stream = stream, .capacity = capacity};
    const acr_status status = device->backend->mem_alloc(device, capacity, &made->memory);
    if (status != ACR_OK) {
        free(made);
        return status;
    }
    *out = made;
    return ACR_OK;
}

static acr_status make_workspace(stream_workspace **out, forward_cache *cache, cached_plan *entry, void *stream)
{
    acr__backend_device *device = entry->plan->prepared->device;
    const size_t bytes = entry->plan->prepared->workspace_bytes;
    stream_workspace *made = NULL;
    drop_oldest_stream(cache, entry, device);
    acr_status status = obtain_workspace(&made, cache, entry, device, bytes, stream);
    if (status == ACR_OK && (status = device->backend->mem_zero_async(device, made->memory, bytes, stream)) != ACR_OK)
        free_workspace(made, device);
    if (status != ACR_OK)
        return status;
    cache->workspace_bytes += made->capacity;
    *out = made;
    return ACR_OK;
}

/* The workspace of a plan for a stream, made when it is not there. The caller holds the lock. */
static acr_status workspace_of(stream_workspace **out, forward_cache *cache, cached_plan *entry, void *stream)
{
    acr__backend_device *device = entry->plan->prepared->device;
    int capturing = 0;
    const acr_status asked = device->backend->is_capturing(device, stream, &capturing);
    if (asked != ACR_OK)
        return asked;
    stream_workspace *found = take_workspace(entry, stream);
    if (!found && capturing)
        return acr__fail(
            ACR_WORKSPACE,
            "this stream has no workspace of %zu bytes yet and is being captured: call acr_forward once before",
            entry->plan->prepared->workspace_bytes);
    if (!found) {
        const acr_status status = make_workspace(&found, cache, entry, stream);
        if (status != ACR_OK)
            return status;
    }
    entry->captured |= capturing != 0;
    found->next = entry->workspaces;
    entry->workspaces = found;
    *out = found;
    return ACR_OK;
}

acr_status acr__plan_lookup(acr_ctx *ctx, const acr_problem *problem)
{
    acr_problem canonical;
    cached_plan *entry;
    acr_status status = acr_problem_canonical(&canonical, problem);
    if (status != ACR_OK)
        return status;
    pthread_mutex_lock(&ctx->lock);
    status = cached_plan_of(&entry, ctx, &canonical);
    if (status == ACR_OK)
        make_room(ctx->cache, ctx->device, entry, 0, NULL, NULL);
    pthread_mutex_unlock(&ctx->lock);
    return status;
}

acr_status acr__forward_begin(forward_use *out, acr_ctx *ctx, const acr_problem *canonical, void *stream)
{
    cached_plan *entry;
    stream_workspace *workspace = NULL;
    pthread_mutex_lock(&ctx->lock);
    acr_status status = cached_plan_of(&entry, ctx, canonical);
    if (status == ACR_OK && entry->plan->prepared->workspace_bytes > 0)
        status = workspace_of(&workspace, ctx->cache, entry, stream);
    else if (status == ACR_OK)
        make_room(ctx->cache, ctx->device, entry, 0, NULL, NULL);
    if (status == ACR_OK) {
        entry->users++;
        if (workspace)
            workspace->users++;
        *out = (forward_use){entry, entry->plan, workspace ? workspace->memory : NULL,
                             entry->plan->prepared->workspace_bytes};
    }
    pthread_mutex_unlock(&ctx->lock);
    return status;
}

void acr__forward_end(acr_ctx *ctx, const forward_use *use)
{
    cached_plan *entry = use->entry;
    pthread_mutex_lock(&ctx->lock);
    for (stream_workspace *w = entry->workspaces; w; w = w->next)
        w->users -= w->memory == use->workspace;
    const bool unwanted = --entry->users == 0 && entry->dropped;
    pthread_mutex_unlock(&ctx->lock);
    if (unwanted)
        free_cached(entry, ctx->device);
}
