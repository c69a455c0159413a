/* The plans and workspaces that acr_forward keeps, by problem and stream, in bounded memory. */
#ifndef ACR_FORWARD_CACHE_H
#define ACR_FORWARD_CACHE_H

#include "context.h"

/* A cached plan and the stream's workspace of it, held from acr__forward_begin to acr__forward_end. */
typedef struct forward_use {
    struct cached_plan *entry;
    const acr_plan *plan;
    void *workspace;
    size_t workspace_bytes;
} forward_use;

/* NULL when out of memory. */
forward_cache *acr__forward_cache_create(void);

/* Drops every plan and workspace; those that another thread is executing go when it is done. The context's lock is
 * held. */
void acr__forward_cache_clear(forward_cache *cache, acr__backend_device *device);
void acr__forward_cache_destroy(forward_cache *cache, acr__backend_device *device);

/* Finds or makes the plan of a canonical problem and its workspace for a stream. Takes the context's lock. */
acr_status acr__forward_begin(forward_use *out, acr_ctx *ctx, const acr_problem *canonical, void *stream);
void acr__forward_end(acr_ctx *ctx, const forward_use *use);

#endif
