/* A context: the open device, its wisdom, and the plans that acr_forward keeps. Shared by acromion.c and plan.c. */
#ifndef ACR_CONTEXT_H
#define ACR_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>

#include "backend.h"
#include "wisdom.h"

typedef struct forward_cache forward_cache; /* acromion.c */

struct acr_ctx {
    atomic_int references; /* the caller's, and one for each plan */
    acr__backend_device *device;
    pthread_mutex_t lock; /* guards wisdom and cache */
    acr__wisdom *wisdom;
    forward_cache *cache;
};

void acr__ctx_retain(acr_ctx *ctx);
/* Frees the context with the last reference. */
void acr__ctx_release(acr_ctx *ctx);

#endif
