#include "push.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

enum {
    SHARED_BYTES = 2 << 20,  /* a driver allocates so much at once, and shares all of it */
    PATTERN_BYTES = 256,     /* that ranks push to try the way out */
    TRIAL = 0, ALARM = 1, CHANNELS = 2, /* of the memory that a group has for itself */
    RELEASE_S = 5
};

/* Of a word its low half or, in a broken group, its high half. */
static const uint64_t IS_SET = (UINT64_C(1) << 32) | 1;

struct dist_push {
    dist_push *next; /* in the group */
    int channels;
    char **memory;    /* of each rank, as it is mapped here; NULL where it is not */
    char *is_mapped;  /* by a handle, and is to be unmapped */
    uint64_t *ones;   /* as many words as the memory has */
};

/* ---- Words ------------------------------------------------------------------------------------------------------- */

static size_t word_count(const acr_group *group, int channels)
{
    return (size_t)group->ranks * (size_t)(1 + channels);
}

/* In `owner`'s memory. */
static uint64_t *ready_word(const dist_push *push, int owner, int target)
{
    return (uint64_t *)(void *)push->memory[owner] + target;
}

static uint64_t *arrived_word(const acr_group *group, const dist_push *push, int owner, int channel, int source)
{
    return (uint64_t *)(void *)push->memory[owner] + (size_t)group->ranks * (size_t)(1 + channel) + source;
}

static acr_status set_word(const acr_group *group, uint64_t *word, uint32_t value, void *stream)
{
    return dist_write_word(&group->device, word, value, stream); /* the low half: the machine is little-endian */
}

acr_status dist_push_announce(const acr_group *group, const dist_push *push, int source, void *stream)
{
    acr_status status = ACR_OK;
    for (int c = 0; c < push->channels && status == ACR_OK; c++)
        status = set_word(group, arrived_word(group, push, group->rank, c, source), 0, stream);
    return status == ACR_OK ? set_word(group, ready_word(push, source, group->rank), 1, stream) : status;
}

acr_status dist_push_begin(const acr_group *group, const dist_push *push, int target, void *stream)
{
    uint64_t *word = ready_word(push, group->rank, target);
    const acr_status status = dist_wait_word(&group->device, word, IS_SET, stream);
    return status == ACR_OK ? set_word(group, word, 0, stream) : status;
}

acr_status dist_push_end(const acr_group *group, const dist_push *push, int target, int channel, void *stream)
{
    return set_word(group, arrived_word(group, push, target, channel, group->rank), 1, stream);
}

acr_status dist_push_await(const acr_group *group, const dist_push *push, int source, int channel, void *stream)
{
    return dist_wait_word(&group->device, arrived_word(group, push, group->rank, channel, source), IS_SET, stream);
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

size_t dist_push_offset(const acr_group *group, int channels)
{
    return (word_count(group, channels) * sizeof(uint64_t) + 255) / 256 * 256;
}

/* Whole allocations of the driver: a handle shares nothing else. */
size_t dist_push_bytes(const acr_group *group, int channels, size_t bytes)
{
    return (dist_push_offset(group, channels) + bytes + SHARED_BYTES - 1) / SHARED_BYTES * SHARED_BYTES;
}

char *dist_push_memory(const acr_group *group, const dist_push *push, int rank)
{
    return push->memory[rank] + dist_push_offset(group, push->channels);
}

static dist_push *make_push(acr_group *group, int channels)
{
    const size_t ranks = (size_t)group->ranks, words = word_count(group, channels);
    dist_push *push = calloc(1, sizeof *push + words * sizeof *push->ones + ranks * (sizeof *push->memory + 1));
    if (!push) {
        dist_fail(ACR_NO_MEMORY, "out of memory");
        return NULL;
    }
    push->channels = channels;
    push->ones = (uint64_t *)(void *)(push + 1);
    push->memory = (char **)(void *)(push->ones + words);
    push->is_mapped = (char *)(push->memory + ranks);
    push->next = group->pushes;
    group->pushes = push;
    return push;
}

/* Words are 0 in memory before any other rank can write it. */
static acr_status clear_words(const acr_group *group, dist_push *push)
{
    const dist_device *device = &group->device;
    const size_t bytes = word_count(group, push->channels) * sizeof *push->ones;
    acr_status status = dist_upload(device, push->memory[group->rank], push->ones, bytes, device->transfers);
    if (status == ACR_OK)
        status = dist_wait_idle(device, device->transfers, 1e-3 * group->timeout_ms);
    memset(push->ones, 0xff, bytes);
    return status;
}

static acr_status map_all(acr_group *group, dist_push *push, const dist_share *shares)
{
    acr_status status = ACR_OK;
    for (int r = 0; r < group->ranks && status == ACR_OK; r++) {
        void *memory = NULL;
        if (r == group->rank)
            continue;
        status = dist_map(&group->device, &shares[r].address, shares[r].is_here, &memory);
        push->memory[r] = memory;
        push->is_mapped[r] = memory && !shares[r].is_here;
    }
    return status;
}

/* What was asked and refused on the way to success is no error of the call's. */
static void restore_error(const char *before)
{
    dist_fail(ACR_OK, "%s", before);
}

/* The rest of dist_push_open with a push that is made and room for shares. status: of this rank so far. */
static acr_status share_with_all(acr_group *group, const char *reason, double *values, acr_status status,
                                 dist_push *push, dist_share *shares, char *objection, size_t bytes)
{
    acr_status able = ACR_OK; /* what fails from here on is an objection: there is another way */
    if (status == ACR_OK && !*reason) {
        able = clear_words(group, push);
        if (able == ACR_OK)
            able = dist_export(&group->device, push->memory[group->rank], &shares[group->rank].address);
    }
    const char *text = status != ACR_OK || able != ACR_OK ? acr_group_last_error() : reason;
    status = dist_group_share(group, status, text, values, shares, objection, bytes);
    if (status == ACR_OK && !*objection && group->hosts > 1)
        snprintf(objection, bytes, "ranks are on %d hosts", group->hosts);
    if (status != ACR_OK || *objection)
        return status;
    able = map_all(group, push, shares);
    return dist_group_object(group, ACR_OK, able == ACR_OK ? "" : acr_group_last_error(), values, objection, bytes);
}

acr_status dist_push_open(acr_group *group, const char *reason, double *values, void *memory, int channels,
                          dist_push **out, char *objection, size_t bytes)
{
    dist_push *push = make_push(group, channels);
    dist_share *shares = calloc((size_t)group->ranks, sizeof *shares);
    acr_status status = ACR_OK;
    char before[512];
    *out = NULL;
    *objection = '\0';
    snprintf(before, sizeof before, "%s", acr_group_last_error());
    if (push)
        push->memory[group->rank] = memory;
    if (!push || !shares) { /* not even the others' answers have room */
        dist_push_close(group, push);
        free(shares);
        return dist_group_agree(group, dist_fail(ACR_NO_MEMORY, "out of memory"), acr_group_last_error());
    }
    status = share_with_all(group, reason, values, status, push, shares, objection, bytes);
    free(shares);
    if (status == ACR_OK && !*objection)
        *out = push;
    else
        dist_push_close(group, push);
    if (status == ACR_OK)
        restore_error(before);
    return status;
}

void dist_push_close(acr_group *group, dist_push *push)
{
    if (!push)
        return;
    for (int r = 0; r < group->ranks; r++)
        if (push->is_mapped[r])
            dist_unmap(&group->device, push->memory[r]);
    dist_push **link = &group->pushes;
    while (*link != push)
        link = &(*link)->next;
    *link = push->next;
    free(push);
}

/* ---- A broken group ---------------------------------------------------------------------------------------------- */

void dist_push_release(acr_group *group)
{
    const dist_device *device = &group->device;
    if (!group->alarm)
        return;
    for (int r = 0; r < group->ranks; r++)
        if (r != group->rank)
            set_word(group, arrived_word(group, group->alarm, r, ALARM, group->rank), 1, device->rescue);
    for (const dist_push *push = group->pushes; push; push = push->next)
        if (push != group->alarm)
            dist_upload(device, push->memory[group->rank], push->ones,
                        word_count(group, push->channels) * sizeof *push->ones, device->rescue);
    dist_wait_idle(device, device->rescue, RELEASE_S);
}

acr_status dist_push_alarmed(const acr_group *group, int *rank)
{
    const dist_device *device = &group->device;
    uint64_t words[DIST_PUSH_RANKS_MAX];
    if (!group->alarm)
        return ACR_OK;
    acr_status status = dist_download(device, words, arrived_word(group, group->alarm, group->rank, ALARM, 0),
                                      (size_t)group->ranks * sizeof words[0], device->rescue);
    if (status == ACR_OK)
        status = dist_wait_idle(device, device->rescue, RELEASE_S);
    for (int r = group->ranks - 1; r >= 0 && status == ACR_OK; r--)
        if (words[r])
            *rank = r;
    return status;
}

/* ---- The way ----------------------------------------------------------------------------------------------------- */

static unsigned char pattern_of(int rank, int i)
{
    return (unsigned char)(7 * i + rank + 1);
}

/* Pushes a pattern and a word to every other rank. */
static acr_status push_pattern(const acr_group *group, const dist_push *alarm)
{
    const dist_device *device = &group->device;
    const size_t place = (size_t)group->rank * PATTERN_BYTES;
    unsigned char pattern[PATTERN_BYTES];
    char *own = dist_push_memory(group, alarm, group->rank) + place;
    for (int i = 0; i < PATTERN_BYTES; i++)
        pattern[i] = pattern_of(group->rank, i);
    acr_status status = dist_upload(device, own, pattern, sizeof pattern, device->transfers);
    for (int r = 0; r < group->ranks && status == ACR_OK; r++) {
        if (r == group->rank)
            continue;
        status = dist_copy_bytes(device, dist_push_memory(group, alarm, r) + place, own, sizeof pattern,
                                 device->transfers);
        if (status == ACR_OK)
            status = dist_push_end(group, alarm, r, TRIAL, device->transfers);
    }
    return status == ACR_OK ? dist_wait_idle(device, device->transfers, 1e-3 * group->timeout_ms) : status;
}

/* What the others pushed, when they have said that they did: it is there, and a stream that waits for it goes on. */
static acr_status look_for_patterns(const acr_group *group, const dist_push *alarm)
{
    const dist_device *device = &group->device;
    acr_status status = ACR_OK;
    for (int r = 0; r < group->ranks && status == ACR_OK; r++) {
        unsigned char pattern[PATTERN_BYTES] = {0};
        uint64_t word = 0;
        int right = 1;
        if (r == group->rank)
            continue;
        status = dist_download(device, pattern,
                               dist_push_memory(group, alarm, group->rank) + (size_t)r * PATTERN_BYTES, sizeof pattern,
                               device->transfers);
        if (status == ACR_OK)
            status = dist_download(device, &word, arrived_word(group, alarm, group->rank, TRIAL, r), sizeof word,
                                   device->transfers);
        if (status == ACR_OK)
            status = dist_wait_idle(device, device->transfers, 1e-3 * group->timeout_ms);
        for (int i = 0; i < PATTERN_BYTES; i++)
            right &= pattern[i] == pattern_of(r, i);
        if (status == ACR_OK && (!right || word != 1))
            status = dist_fail(ACR_DEVICE_FAULT, "what rank %d wrote into this rank's memory did not come there", r);
        if (status == ACR_OK)
            status = dist_push_await(group, alarm, r, TRIAL, device->transfers);
    }
    return status == ACR_OK ? dist_wait_idle(device, device->transfers, 1e-3 * group->timeout_ms) : status;
}

static acr_status try_out(acr_group *group, const dist_push *alarm, double *values, char *objection, size_t bytes)
{
    acr_status able = push_pattern(group, alarm);
    acr_status status = dist_group_object(group, ACR_OK, able == ACR_OK ? "" : acr_group_last_error(), values,
                                          objection, bytes);
    if (status != ACR_OK || *objection)
        return status;
    able = look_for_patterns(group, alarm);
    return dist_group_object(group, ACR_OK, able == ACR_OK ? "" : acr_group_last_error(), values, objection, bytes);
}

/* Why this rank goes by NCCL, "" where it need not. *memory: what the group has for itself. */
static const char *own_reason(const acr_group *group, void **memory)
{
    if (group->asked == ACR_TRANSFERS_NCCL)
        return "options.transfers is ACR_TRANSFERS_NCCL";
    if (group->ranks > DIST_PUSH_RANKS_MAX)
        return "there are more than 64 ranks";
    acr_status status = dist_can_share(&group->device);
    if (status == ACR_OK)
        status = dist_alloc(&group->device,
                            dist_push_bytes(group, CHANNELS, (size_t)group->ranks * PATTERN_BYTES), memory);
    return status == ACR_OK ? "" : acr_group_last_error();
}

static acr_status find_way(acr_group *group)
{
    double values[DIST_VALUES] = {group->asked == ACR_TRANSFERS_COPY_ENGINES};
    char reason[sizeof group->way_reason], before[512];
    void *memory = NULL;
    dist_push *alarm = NULL;
    snprintf(before, sizeof before, "%s", acr_group_last_error());
    snprintf(reason, sizeof reason, "%s", own_reason(group, &memory));
    acr_status status = dist_push_open(group, reason, values, memory, CHANNELS, &alarm, group->way_reason,
                                       sizeof group->way_reason);
    if (status == ACR_OK && alarm)
        status = try_out(group, alarm, values, group->way_reason, sizeof group->way_reason);
    if (status == ACR_OK)
        restore_error(before);
    group->wants_copies = values[0] > 0.0;
    if (status == ACR_OK && !*group->way_reason) {
        group->alarm = alarm;
        group->way = DIST_BY_COPIES;
        return ACR_OK;
    }
    dist_push_close(group, alarm);
    dist_free(&group->device, memory);
    if (status != ACR_OK)
        return status;
    group->way = DIST_BY_NCCL;
    return ACR_OK;
}

acr_status dist_way_refused(const char *reason)
{
    return dist_fail(ACR_UNSUPPORTED, "a rank's options.transfers is ACR_TRANSFERS_COPY_ENGINES, and %s", reason);
}

acr_status dist_way_find(acr_group *group)
{
    acr_status status = ACR_OK;
    if (group->way == DIST_UNKNOWN && (status = dist_enter(&group->device)) == ACR_OK) {
        status = find_way(group);
        dist_leave(&group->device);
    }
    return status == ACR_OK && group->way == DIST_BY_NCCL && group->wants_copies ? dist_way_refused(group->way_reason)
                                                                                 : status;
}

void dist_way_close(acr_group *group)
{
    if (!group->alarm)
        return;
    void *memory = group->alarm->memory[group->rank];
    dist_push_close(group, group->alarm);
    group->alarm = NULL;
    dist_free(&group->device, memory);
}
