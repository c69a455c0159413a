/* Contexts and plans that calls from Python share. All functions but plans_open need the GIL. */
#ifndef ACR_PY_PLANS_H
#define ACR_PY_PLANS_H

#include <stdbool.h>

#include "common.h"
#include "dlpack.h"

/* A plan, counted by the calls that execute it without the GIL. */
typedef struct plan_entry {
    uint64_t digest;
    acr_ctx *ctx;
    acr_problem problem; /* as asked for: the key, with ctx */
    acr_plan *plan;
    acr_status refusal; /* ACR_OK, or why there is no plan; then with a text */
    char *refusal_text;
    size_t workspace_bytes;
    int users;
    bool dropped; /* out of the table: the last user frees it */
} plan_entry;

enum {
    PLANS_DEVICES_MAX = 64
};

/* The context of a device, opened when first asked for. device.id is below PLANS_DEVICES_MAX. From any thread, without
 * the GIL. Errors: those of acr_ctx_create. */
acr_status plans_open(acr_ctx **out, dl_device device);

/* The same with the GIL and for every device.id. Returns 0, or -1 with an exception. */
int plans_context(acr_ctx **out, dl_device device);

/* The plan of a problem, made when first asked for; a problem that no kernel can run is remembered, too. The problem's
 * bytes are the key: zero what is not set. The pointer is good until the next call, or while users is above zero. */
int plans_find(plan_entry **out, acr_ctx *ctx, const acr_problem *problem);

/* Ends what users++ began. */
void plans_release(plan_entry *entry);

/* Drops every plan; those in use go with their last user. */
void plans_forget(void);

/* Grows each time that plans are dropped: addresses of entries mean nothing across a change. */
unsigned plans_generation(void);

/* After fork() the child starts without contexts: threads and GPU contexts did not come along. */
int plans_setup(void);

#endif
