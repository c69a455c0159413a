#include "group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "error.h"
#include "push.h"

enum {
    TIMEOUT_DEFAULT_MS = 60000,
    CTAS_MAX = 64,
    RECORD_BYTES = 1024
};

/* ---- A broken group ---------------------------------------------------------------------------------------------- */

acr_status dist_group_check(const acr_group *group)
{
    return group->broken == ACR_OK ? ACR_OK : dist_fail(group->broken, "the group is broken: %s", group->reason);
}

/* Ends what would wait for ever, the communicator's transfers and streams that wait for words, and remembers the
 * thread's last error. */
static acr_status break_group(acr_group *group, acr_status status)
{
    group->broken = status;
    snprintf(group->reason, sizeof group->reason, "%s", acr_group_last_error());
    dist_push_release(group);
    dist_fail(status, "%s", group->reason);
    if (group->owns_comm && group->comm) {
        group->nccl.CommAbort(group->comm);
        group->comm = NULL;
    }
    return status;
}

static acr_status break_by_nccl(acr_group *group, nccl_result result)
{
    const char *text = group->comm ? group->nccl.GetLastError(group->comm) : NULL;
    return break_group(group, dist_fail(dist_nccl_status(result), "rank %d: NCCL: %s%s%s", group->rank,
                                        dist_nccl_text(result), text && *text ? ": " : "", text ? text : ""));
}

static acr_status break_by_timeout(acr_group *group, uint32_t timeout_ms, const char *what)
{
    return break_group(group,
                       dist_fail(ACR_TIMEOUT, "rank %d: %s did not end within %u ms", group->rank, what, timeout_ms));
}

/* Waits until the communicator is done with the last call. */
static acr_status settle(acr_group *group, const char *what)
{
    const double end_s = dist_now_s() + 1e-3 * group->timeout_ms;
    for (int looks = 0;; looks++) {
        nccl_result state = NCCL_SUCCESS;
        const nccl_result asked = group->nccl.CommGetAsyncError(group->comm, &state);
        if (asked != NCCL_SUCCESS)
            return break_by_nccl(group, asked);
        if (state != NCCL_IN_PROGRESS)
            return state == NCCL_SUCCESS ? ACR_OK : break_by_nccl(group, state);
        if (dist_now_s() >= end_s)
            return break_by_timeout(group, group->timeout_ms, what);
        dist_pause(looks);
    }
}

/* ---- Transfers --------------------------------------------------------------------------------------------------- */

acr_status dist_transfer_begin(acr_group *group)
{
    return dist_transfer_add(group, group->nccl.GroupStart());
}

acr_status dist_transfer_add(acr_group *group, nccl_result result)
{
    return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS ? ACR_OK : break_by_nccl(group, result);
}

acr_status dist_transfer_enqueue(acr_group *group)
{
    const nccl_result result = group->nccl.GroupEnd();
    if (result == NCCL_IN_PROGRESS && group->device.driver)
        return settle(group, "enqueueing a transfer");
    return dist_transfer_add(group, result);
}

acr_status dist_transfer_end(acr_group *group)
{
    return group->device.driver ? ACR_OK : settle(group, "a transfer");
}

/* ---- Agreement --------------------------------------------------------------------------------------------------- */

typedef struct record {
    int32_t status;
    char text[RECORD_BYTES - sizeof(int32_t)];
    char host[48];    /* what ranks of one host have alike */
    char process[48]; /* and those of one process on it; "" = not known */
    double values[DIST_VALUES];
    dist_share share;
} record;

/* The kernel's boot says which host this is, whatever a container calls it. Where it is not told, "". */
static void name_host(char *out, size_t bytes)
{
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!file)
        return;
    if (!fgets(out, (int)bytes, file))
        *out = '\0';
    fclose(file);
}

/* Processes of two containers may have one number; they have other namespaces then. */
static void name_process(char *out, size_t bytes)
{
    char space[32] = "";
    const ssize_t length = readlink("/proc/self/ns/pid", space, sizeof space - 1);
    if (length > 0)
        snprintf(out, bytes, "%ld in %.*s", (long)getpid(), (int)length, space);
}

static int count_hosts(const record *records, int ranks)
{
    int hosts = 0;
    for (int r = 0; r < ranks; r++) {
        int first = 0;
        while (strcmp(records[first].host, records[r].host) != 0)
            first++;
        hosts += first == r;
    }
    return hosts;
}

/* records[0..ranks) of all ranks, from records[rank]; `memory` is of the device. */
static acr_status exchange(acr_group *group, record *records, record *memory)
{
    const dist_device *device = &group->device;
    void *stream = device->transfers;
    acr_status status = dist_upload(device, memory + group->rank, records + group->rank, sizeof *records, stream);
    if (status == ACR_OK)
        status = dist_transfer_begin(group);
    if (status == ACR_OK)
        status = dist_transfer_add(group, group->nccl.AllGather(memory + group->rank, memory, sizeof *records,
                                                                NCCL_UINT8, group->comm, stream));
    if (status == ACR_OK)
        status = dist_transfer_enqueue(group);
    if (status == ACR_OK)
        status = dist_transfer_end(group);
    /* A driver's copy to the host waits for the stream without a time limit. */
    if (status == ACR_OK)
        status = acr_group_wait(group, stream, group->timeout_ms);
    if (status == ACR_OK)
        status = dist_download(device, records, memory, sizeof *records * (size_t)group->ranks, stream);
    return status == ACR_OK ? acr_group_wait(group, stream, group->timeout_ms) : status;
}

/* What the records say of failures, the same on every rank but for the rank's own. */
static acr_status judge(const acr_group *group, const record *records)
{
    const record *own = &records[group->rank];
    if (own->status != ACR_OK)
        return dist_fail((acr_status)own->status, "%s", own->text);
    for (int r = 0; r < group->ranks; r++)
        if (records[r].status != ACR_OK)
            return dist_fail(ACR_PEER, "rank %d failed: %s", r, records[r].text);
    return ACR_OK;
}

static acr_status compare(const acr_group *group, const record *records)
{
    for (int r = 1; r < group->ranks; r++)
        if (strcmp(records[r].text, records[0].text) != 0)
            return dist_fail(ACR_PEER, "rank %d has other arguments than rank 0: \"%s\", not \"%s\"", r,
                             records[r].text, records[0].text);
    return ACR_OK;
}

/* Exchanges records with every rank: *out, all of them, is the caller's to free. share: NULL = none. */
static acr_status collect(acr_group *group, acr_status status, const char *text, const double *values,
                          const dist_share *share, record **out)
{
    record *records = calloc((size_t)group->ranks, sizeof *records);
    void *memory = NULL;
    *out = records;
    if (!records) {
        dist_fail(ACR_NO_MEMORY, "out of memory");
        return ACR_NO_MEMORY;
    }
    record *own = &records[group->rank];
    own->status = (int32_t)status;
    snprintf(own->text, sizeof own->text, "%s", text);
    name_host(own->host, sizeof own->host);
    name_process(own->process, sizeof own->process);
    if (values)
        memcpy(own->values, values, sizeof own->values);
    if (share)
        own->share = *share;
    acr_status done = dist_enter(&group->device);
    if (done != ACR_OK)
        return done;
    done = dist_alloc(&group->device, sizeof *records * (size_t)group->ranks, &memory);
    if (done == ACR_OK)
        done = exchange(group, records, memory);
    dist_free(&group->device, memory);
    dist_leave(&group->device);
    if (done != ACR_OK)
        return done;
    group->hosts = count_hosts(records, group->ranks);
    return judge(group, records);
}

acr_status dist_group_agree(acr_group *group, acr_status status, const char *text)
{
    record *records;
    acr_status done = collect(group, status, text, NULL, NULL, &records);
    if (done == ACR_OK)
        done = compare(group, records);
    free(records);
    return done;
}

/* What dist_group_object gives of the records. */
static void sum_up(const acr_group *group, const record *records, double *values, char *objection, size_t bytes)
{
    for (int r = 0; r < group->ranks; r++) {
        if (*records[r].text && !*objection)
            snprintf(objection, bytes, "rank %d: %s", r, records[r].text);
        for (int i = 0; i < DIST_VALUES; i++)
            values[i] = records[r].values[i] > values[i] ? records[r].values[i] : values[i];
    }
}

acr_status dist_group_object(acr_group *group, acr_status status, const char *text, double *values, char *objection,
                             size_t bytes)
{
    record *records;
    const acr_status done = collect(group, status, text, values, NULL, &records);
    *objection = '\0';
    if (done == ACR_OK)
        sum_up(group, records, values, objection, bytes);
    free(records);
    return done;
}

acr_status dist_group_share(acr_group *group, acr_status status, const char *text, double *values, dist_share *shares,
                            char *objection, size_t bytes)
{
    record *records;
    const acr_status done = collect(group, status, text, values, &shares[group->rank], &records);
    *objection = '\0';
    if (done == ACR_OK)
        sum_up(group, records, values, objection, bytes);
    for (int r = 0; r < group->ranks && done == ACR_OK; r++) {
        const record *own = &records[group->rank];
        shares[r] = records[r].share;
        shares[r].is_here =
            *own->process && strcmp(records[r].host, own->host) == 0 && strcmp(records[r].process, own->process) == 0;
    }
    free(records);
    return done;
}

/* ---- Making and ending ------------------------------------------------------------------------------------------- */

static acr_status check_options(const acr_group_options *o, const acr_ctx *ctx)
{
    if (o->transfers != ACR_TRANSFERS_AUTO && o->transfers != ACR_TRANSFERS_NCCL &&
        o->transfers != ACR_TRANSFERS_COPY_ENGINES)
        return dist_fail(ACR_INVALID,
                         "options.transfers is %d, must be ACR_TRANSFERS_AUTO to ACR_TRANSFERS_COPY_ENGINES",
                         (int)o->transfers);
    if (!o->id == !o->comm)
        return dist_fail(ACR_INVALID, "one of options.id and options.comm is given, not %s", o->id ? "both" : "none");
    if (o->comm && (o->rank != 0 || o->ranks != 0))
        return dist_fail(ACR_INVALID, "options.rank and options.ranks are 0 with options.comm, which knows them");
    if (!o->comm && (o->ranks < 1 || o->ranks > ACR_GROUP_RANKS_MAX))
        return dist_fail(ACR_INVALID, "options.ranks is %d, must be 1 to %d", (int)o->ranks, ACR_GROUP_RANKS_MAX);
    if (!o->comm && (o->rank < 0 || o->rank >= o->ranks))
        return dist_fail(ACR_INVALID, "options.rank is %d of %d ranks", (int)o->rank, (int)o->ranks);
    if (o->max_ctas > CTAS_MAX || (o->comm && o->max_ctas))
        return dist_fail(ACR_INVALID, "options.max_ctas is %u, must be %s", o->max_ctas,
                         o->comm ? "0 with options.comm" : "at most 64");
    if (!o->library && strcmp(acr_ctx_backend(ctx), "cuda") != 0)
        return dist_fail(ACR_INVALID,
                         "options.library is NULL: NCCL exchanges memory of GPUs, and the context's "
                         "backend is \"%s\"",
                         acr_ctx_backend(ctx));
    return ACR_OK;
}

/* A communicator of the group's own never blocks: the time limit holds for its making, too. */
static acr_status make_comm(acr_group *group, const acr_group_options *options)
{
    nccl_config config = NCCL_CONFIG_INIT;
    config.blocking = 0;
    if (options->max_ctas)
        config.max_ctas = (int)options->max_ctas;
    group->owns_comm = 1;
    const nccl_result result =
        group->nccl.CommInitRankConfig(&group->comm, group->ranks, *options->id, group->rank, &config);
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        return dist_fail(dist_nccl_status(result), "ncclCommInitRankConfig: %s", dist_nccl_text(result));
    return settle(group, "making the communicator");
}

static acr_status take_comm(acr_group *group, const acr_group_options *options)
{
    group->comm = options->comm;
    nccl_result result = group->nccl.CommCount(group->comm, &group->ranks);
    if (result == NCCL_SUCCESS)
        result = group->nccl.CommUserRank(group->comm, &group->rank);
    if (result != NCCL_SUCCESS)
        return dist_fail(ACR_INVALID, "options.comm: %s", dist_nccl_text(result));
    if (group->ranks > ACR_GROUP_RANKS_MAX)
        return dist_fail(ACR_INVALID, "options.comm has %d ranks, at most %d are served", group->ranks,
                         ACR_GROUP_RANKS_MAX);
    return ACR_OK;
}

void acr_group_destroy(acr_group *group)
{
    if (!group)
        return;
    if (dist_enter(&group->device) == ACR_OK) {
        dist_way_close(group);
        if (group->owns_comm && group->comm)
            group->nccl.CommDestroy(group->comm);
        dist_leave(&group->device);
    }
    dist_device_close(&group->device);
    free(group);
}

/* Those of a caller that was compiled when there was no `transfers`, too. */
static acr_status read_options(const acr_group_options *given, acr_group_options *out)
{
    if (given->size < offsetof(acr_group_options, transfers) || given->size > sizeof *out)
        return dist_fail(ACR_INVALID, "options.size is %u, must be %zu to %zu: initialise with ACR_GROUP_OPTIONS_INIT",
                         given->size, offsetof(acr_group_options, transfers), sizeof *out);
    *out = (acr_group_options)ACR_GROUP_OPTIONS_INIT;
    memcpy(out, given, given->size);
    return ACR_OK;
}

acr_status acr_group_create(acr_group **out, acr_ctx *ctx, const acr_group_options *given)
{
    acr_group_options all;
    const acr_group_options *options = &all;
    if (!out || !ctx || !given)
        return dist_fail(ACR_INVALID, "%s is NULL", !out ? "out" : ctx ? "options" : "ctx");
    acr_status status = read_options(given, &all);
    if (status == ACR_OK)
        status = check_options(options, ctx);
    if (status != ACR_OK)
        return status;
    acr_group *group = calloc(1, sizeof *group);
    if (!group)
        return dist_fail(ACR_NO_MEMORY, "out of memory");
    group->ctx = ctx;
    group->rank = options->rank;
    group->ranks = options->ranks;
    group->timeout_ms = options->timeout_ms ? options->timeout_ms : TIMEOUT_DEFAULT_MS;
    group->asked = options->transfers;
    if ((status = dist_nccl_open(&group->nccl, options->library)) == ACR_OK &&
        (status = dist_device_open(&group->device, ctx, options->device)) == ACR_OK &&
        (status = dist_enter(&group->device)) == ACR_OK) {
        status = options->comm ? take_comm(group, options) : make_comm(group, options);
        dist_leave(&group->device);
    }
    if (status != ACR_OK) {
        acr_group_destroy(group);
        return status;
    }
    *out = group;
    return ACR_OK;
}

acr_status acr_group_id_create(acr_group_id *out, const char *library)
{
    dist_nccl nccl;
    acr_group_id id;
    if (!out)
        return dist_fail(ACR_INVALID, "out is NULL");
    const acr_status status = dist_nccl_open(&nccl, library);
    if (status != ACR_OK)
        return status;
    const nccl_result result = nccl.GetUniqueId(&id);
    if (result != NCCL_SUCCESS)
        return dist_fail(ACR_DEVICE_FAULT, "ncclGetUniqueId: %s", dist_nccl_text(result));
    *out = id;
    return ACR_OK;
}

/* ---- acr_group_wait ---------------------------------------------------------------------------------------------- */

/* Whether another rank has told that it is broken. What it pushed since then may be of another call. */
static acr_status check_alarm(acr_group *group)
{
    const int rank = dist_push_alarmed(group);
    return rank < 0 ? ACR_OK
                    : break_group(group, dist_fail(ACR_PEER, "rank %d: rank %d gave the group up", group->rank, rank));
}

/* Looks at the stream before it looks for an alarm: what the stream did is right if none had been raised then. */
static acr_status wait_for(acr_group *group, void *stream, uint32_t timeout_ms)
{
    const double end_s = dist_now_s() + 1e-3 * timeout_ms;
    for (int looks = 0;; looks++) {
        int idle = 0;
        nccl_result state = NCCL_SUCCESS;
        acr_status status = dist_is_idle(&group->device, stream, &idle);
        if (status != ACR_OK)
            return break_group(group, status);
        if ((status = check_alarm(group)) != ACR_OK)
            return status;
        const nccl_result asked = group->nccl.CommGetAsyncError(group->comm, &state);
        if (asked != NCCL_SUCCESS || (state != NCCL_SUCCESS && state != NCCL_IN_PROGRESS))
            return break_by_nccl(group, asked != NCCL_SUCCESS ? asked : state);
        if (idle)
            return ACR_OK;
        if (dist_now_s() >= end_s)
            return break_by_timeout(group, timeout_ms, "the stream's work");
        dist_pause(looks);
    }
}

acr_status acr_group_wait(acr_group *group, void *stream, uint32_t timeout_ms)
{
    if (!group)
        return dist_fail(ACR_INVALID, "group is NULL");
    acr_status status = dist_group_check(group);
    if (status != ACR_OK || (status = dist_enter(&group->device)) != ACR_OK)
        return status;
    status = wait_for(group, stream, timeout_ms);
    dist_leave(&group->device);
    return status;
}
