/* Measuring the link of a group, by the way that keys and values go: how fast each rank sends to the next while it
 * receives from the one before, how long the shortest message takes, how fast a device copies inside its memory. */
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "group.h"
#include "push.h"

enum {
    SAMPLES = 7,
    SHORT_BYTES = 256,
    SHORT_IN_ROW = 32, /* messages in one sample, behind each other */
    LONG_IN_ROW = 4,
    COPIES_IN_ROW = 16
};

/* What is timed: `count` messages of `bytes` to the next rank, or copies. */
typedef struct link_work {
    const dist_push *push; /* of `to`; NULL = by NCCL */
    char *from, *to;
    size_t bytes;
    int count, is_copy;
} link_work;

/* What comes is waited for, too: a message has come when the next one begins. */
static acr_status push_message(const acr_group *group, const link_work *w)
{
    const int next = (group->rank + 1) % group->ranks, before = (group->rank + group->ranks - 1) % group->ranks;
    const dist_device *device = &group->device;
    acr_status status = dist_push_announce(group, w->push, before, device->transfers);
    if (status == ACR_OK)
        status = dist_push_begin(group, w->push, next, device->transfers);
    if (status == ACR_OK)
        status = dist_copy_bytes(device, dist_push_memory(group, w->push, next), w->from, w->bytes, device->transfers);
    if (status == ACR_OK)
        status = dist_push_end(group, w->push, next, 0, device->transfers);
    return status == ACR_OK ? dist_push_await(group, w->push, before, 0, device->transfers) : status;
}

static acr_status message(acr_group *group, const link_work *w)
{
    if (w->push)
        return push_message(group, w);
    const int next = (group->rank + 1) % group->ranks, before = (group->rank + group->ranks - 1) % group->ranks;
    void *stream = group->device.transfers;
    acr_status status = dist_transfer_begin(group);
    if (status == ACR_OK)
        status = dist_transfer_add(group, group->nccl.Send(w->from, w->bytes, NCCL_UINT8, next, group->comm, stream));
    if (status == ACR_OK)
        status = dist_transfer_add(group, group->nccl.Recv(w->to, w->bytes, NCCL_UINT8, before, group->comm, stream));
    if (status == ACR_OK)
        status = dist_transfer_enqueue(group);
    return status == ACR_OK ? dist_transfer_end(group) : status;
}

static acr_status copy(const acr_group *group, const link_work *w)
{
    const size_t line = 4096; /* the buffers hold whole lines */
    const dist_copy lines = {
        .from = w->from, .to = w->to, .from_pitch = line, .to_pitch = line, .width = line, .height = w->bytes / line};
    return dist_copy_lines(&group->device, &lines, group->device.transfers);
}

/* Seconds of one message or copy. */
static acr_status time_once(acr_group *group, dist_timer *timer, const link_work *w, double *seconds)
{
    const dist_device *device = &group->device;
    acr_status status = dist_timer_start(device, timer, device->transfers);
    for (int i = 0; i < w->count && status == ACR_OK; i++)
        status = w->is_copy ? copy(group, w) : message(group, w);
    if (status == ACR_OK)
        status = dist_timer_stop(device, timer, device->transfers);
    if (status == ACR_OK)
        status = acr_group_wait(group, device->transfers, group->timeout_ms);
    if (status == ACR_OK)
        status = dist_timer_read(device, timer, seconds);
    *seconds /= w->count;
    return status;
}

static int compare_doubles(const void *a, const void *b)
{
    double x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

/* The median of SAMPLES, after one that is thrown away: the first transfer connects ranks. */
static acr_status time_median(acr_group *group, dist_timer *timer, const link_work *w, double *seconds)
{
    double samples[SAMPLES + 1] = {0.0};
    acr_status status = ACR_OK;
    for (int i = 0; i <= SAMPLES && status == ACR_OK; i++)
        status = time_once(group, timer, w, &samples[i]);
    qsort(samples + 1, SAMPLES, sizeof samples[0], compare_doubles);
    *seconds = samples[1 + SAMPLES / 2];
    return status;
}

/* seconds: of a short message, a long one, a copy, DIST_VALUES in all. */
static acr_status measure(acr_group *group, const dist_push *push, char *from, char *to, size_t bytes, double *seconds)
{
    const link_work works[DIST_VALUES] = {{push, from, to, SHORT_BYTES, SHORT_IN_ROW, 0},
                                          {push, from, to, bytes, LONG_IN_ROW, 0},
                                          {push, from, to, bytes, COPIES_IN_ROW, 1}};
    dist_timer timer;
    acr_status status = dist_timer_open(&group->device, &timer);
    for (int i = 0; i < DIST_VALUES && status == ACR_OK; i++)
        status = time_median(group, &timer, &works[i], &seconds[i]);
    dist_timer_close(&group->device, &timer);
    return status;
}

/* Memory for what is sent, and for what comes: by copy engines `bytes` of it behind the words. */
static acr_status measure_in_memory(acr_group *group, size_t bytes, double *seconds)
{
    const dist_device *device = &group->device;
    const int by_copies = group->way == DIST_BY_COPIES;
    double none[DIST_VALUES] = {0.0};
    char objection[512];
    dist_push *push = NULL;
    void *from = NULL, *to = NULL;
    acr_status status = dist_enter(device);
    if (status != ACR_OK)
        return status;
    status = dist_alloc(device, bytes, &from);
    if (status == ACR_OK)
        status = dist_alloc(device, by_copies ? dist_push_bytes(group, 1, bytes) : bytes, &to);
    /* Whoever has no memory says so before the others wait for its messages. */
    status = dist_group_agree(group, status, status == ACR_OK ? "" : acr_group_last_error());
    if (status == ACR_OK && by_copies)
        status = dist_push_open(group, "", none, to, 1, &push, objection, sizeof objection);
    if (status == ACR_OK)
        status = measure(group, push, from, to, bytes, seconds);
    dist_free(device, from);
    if (!push)
        dist_free(device, to);
    dist_push_close(group, push);
    dist_leave(device);
    return status;
}

/* A clock that stood still gives the shortest time that wisdom can hold. */
static double at_least(double seconds)
{
    return seconds > 1e-9 ? seconds : 1e-9;
}

acr_status acr_group_measure_link(acr_group *group, acr_link *out)
{
    if (!group || !out)
        return dist_fail(ACR_INVALID, "%s is NULL", group ? "out" : "group");
    if (group->ranks < 2)
        return dist_fail(ACR_INVALID, "a group of one rank has no link");
    acr_status status = dist_group_check(group);
    if (status != ACR_OK)
        return status;
    const size_t bytes = group->device.driver ? (size_t)64 << 20 : (size_t)1 << 20;
    double seconds[DIST_VALUES] = {0.0};
    char none[8];
    if ((status = dist_way_find(group)) == ACR_OK)
        status = measure_in_memory(group, bytes, seconds);
    if (status != ACR_OK)
        return status;
    if ((status = dist_group_object(group, status, "", seconds, none, sizeof none)) != ACR_OK)
        return status;
    acr_link link = ACR_LINK_INIT;
    link.ranks = group->ranks;
    link.hosts = group->hosts;
    link.samples = SAMPLES;
    link.latency_s = at_least(seconds[0]);
    link.bytes_per_s = (double)bytes / at_least(seconds[1] - link.latency_s);
    link.copy_bytes_per_s = (double)bytes / at_least(seconds[2]);
    if ((status = dist_pass(acr_wisdom_add_link(group->ctx, &link))) == ACR_OK)
        *out = link;
    return status;
}
