#include "push.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

enum {
    SHARED_BYTES = 2 << 20, /* a driver allocates so much at once, and shares all of it */
    PATTERN_BYTES = 256,    /* that ranks push to try the way out */
    PATIENCE_S = 5          /* with other ranks that should be about to say something */
};

/* Of a word its low half or, in a broken group, its high half. */
static const uint64_t IS_SET = (UINT64_C(1) << 32) | 1;

struct dist_push {
    dist_push *next; /* in the group */
    int number;      /* on the board; -1: it is not there */
    int is_closed;   /* waits for other ranks to close it */
    int channels;
    char **memory;   /* of each rank, as it is mapped here; NULL where it is not */
    char *is_mapped; /* by a handle, and is to be unmapped */
    uint64_t *ones;  /* as many words as the memory has */
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
    push->number = -1;
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
        push->is_mapped[r] = (char)(memory && !shares[r].is_here);
    }
    return status;
}

/* What was asked and refused on the way to success is no error of the call's. */
static void restore_error(const char *before)
{
    dist_fail(ACR_OK, "%s", before);
}

/* Ends the view of the others' memory. */
static void unmap_all(const acr_group *group, dist_push *push)
{
    for (int r = 0; r < group->ranks; r++) {
        if (push->is_mapped[r])
            dist_unmap(&group->device, push->memory[r]);
        push->is_mapped[r] = 0;
    }
}

static void drop(acr_group *group, dist_push *push)
{
    dist_push **link = &group->pushes;
    if (!push)
        return;
    while (*link != push)
        link = &(*link)->next;
    *link = push->next;
    unmap_all(group, push);
    free(push);
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
    memcpy(shares[group->rank].board, group->board_name, sizeof group->board_name);
    const char *text = status != ACR_OK || able != ACR_OK ? acr_group_last_error() : reason;
    status = dist_group_share(group, status, text, values, shares, objection, bytes);
    if (status == ACR_OK && !*objection && group->hosts > 1)
        snprintf(objection, bytes, "ranks are on %d hosts", group->hosts);
    if (status != ACR_OK || *objection)
        return status;
    able = map_all(group, push, shares);
    if (able == ACR_OK && !group->board)
        able = dist_board_open(&group->board, shares[0].board);
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
        drop(group, push);
        free(shares);
        return dist_group_agree(group, dist_fail(ACR_NO_MEMORY, "out of memory"), acr_group_last_error());
    }
    status = share_with_all(group, reason, values, status, push, shares, objection, bytes);
    free(shares);
    if (status == ACR_OK && !*objection) {
        push->number = group->push_count++;
        *out = push;
    } else {
        drop(group, push);
    }
    if (status == ACR_OK)
        restore_error(before);
    return status;
}

/* Frees the memory that no rank pushes into any more; returns how many others are left. */
static int sweep(acr_group *group)
{
    int left = 0;
    for (dist_push *push = group->pushes, *next; push; push = next) {
        next = push->next;
        if (!push->is_closed)
            continue;
        if (dist_board_left(group->board, push->number, group->ranks) < group->ranks) {
            left++;
            continue;
        }
        dist_free(&group->device, push->memory[group->rank]);
        drop(group, push);
    }
    return left;
}

void dist_push_close(acr_group *group, dist_push *push)
{
    const dist_device *device = &group->device;
    if (!push)
        return;
    push->is_closed = 1;
    /* A stream that cannot be seen to its end may push still: then the others keep their memory. */
    if (group->broken == ACR_OK || dist_wait_idle(device, device->transfers, PATIENCE_S) == ACR_OK) {
        unmap_all(group, push);
        dist_board_leave(group->board, push->number);
    }
    sweep(group);
}

/* ---- A broken group ---------------------------------------------------------------------------------------------- */

void dist_push_release(acr_group *group)
{
    const dist_device *device = &group->device;
    if (!group->board)
        return;
    dist_board_raise(group->board, group->rank);
    for (const dist_push *push = group->pushes; push; push = push->next)
        dist_upload(device, push->memory[group->rank], push->ones,
                    word_count(group, push->channels) * sizeof *push->ones, device->rescue);
    dist_wait_idle(device, device->rescue, PATIENCE_S);
}

int dist_push_alarmed(const acr_group *group)
{
    for (int r = 0; r < group->ranks && group->board; r++)
        if (r != group->rank && dist_board_is_raised(group->board, r))
            return r;
    return -1;
}

/* ---- The way ----------------------------------------------------------------------------------------------------- */

static unsigned char pattern_of(int rank, int i)
{
    return (unsigned char)(7 * i + rank + 1);
}

/* Pushes a pattern and a word to every other rank. */
static acr_status push_pattern(const acr_group *group, const dist_push *trial)
{
    const dist_device *device = &group->device;
    const size_t place = (size_t)group->rank * PATTERN_BYTES;
    unsigned char pattern[PATTERN_BYTES];
    char *own = dist_push_memory(group, trial, group->rank) + place;
    for (int i = 0; i < PATTERN_BYTES; i++)
        pattern[i] = pattern_of(group->rank, i);
    acr_status status = dist_upload(device, own, pattern, sizeof pattern, device->transfers);
    for (int r = 0; r < group->ranks && status == ACR_OK; r++) {
        if (r == group->rank)
            continue;
        status =
            dist_copy_bytes(device, dist_push_memory(group, trial, r) + place, own, sizeof pattern, device->transfers);
        if (status == ACR_OK)
            status = dist_push_end(group, trial, r, 0, device->transfers);
    }
    return status == ACR_OK ? dist_wait_idle(device, device->transfers, 1e-3 * group->timeout_ms) : status;
}

/* What the others pushed, when they have said that they did: it is there, and a stream that waits for it goes on. */
static acr_status look_for_patterns(const acr_group *group, const dist_push *trial)
{
    const dist_device *device = &group->device;
    acr_status status = ACR_OK;
    for (int r = 0; r < group->ranks && status == ACR_OK; r++) {
        unsigned char pattern[PATTERN_BYTES] = {0};
        uint64_t word = 0;
        int right = 1;
        if (r == group->rank)
            continue;
        status = dist_download(device, pattern, dist_push_memory(group, trial, group->rank) + (size_t)r * PATTERN_BYTES,
                               sizeof pattern, device->transfers);
        if (status == ACR_OK)
            status = dist_download(device, &word, arrived_word(group, trial, group->rank, 0, r), sizeof word,
                                   device->transfers);
        if (status == ACR_OK)
            status = dist_wait_idle(device, device->transfers, 1e-3 * group->timeout_ms);
        for (int i = 0; i < PATTERN_BYTES; i++)
            right &= pattern[i] == pattern_of(r, i);
        if (status == ACR_OK && (!right || word != 1))
            status = dist_fail(ACR_DEVICE_FAULT, "what rank %d wrote into this rank's memory did not come there", r);
        if (status == ACR_OK)
            status = dist_push_await(group, trial, r, 0, device->transfers);
    }
    return status == ACR_OK ? dist_wait_idle(device, device->transfers, 1e-3 * group->timeout_ms) : status;
}

/* Nobody views memory that another rank may free next. */
static acr_status try_out(acr_group *group, dist_push *trial, double *values, char *objection, size_t bytes)
{
    acr_status able = push_pattern(group, trial);
    acr_status status =
        dist_group_object(group, ACR_OK, able == ACR_OK ? "" : acr_group_last_error(), values, objection, bytes);
    if (status != ACR_OK || *objection)
        return status;
    able = look_for_patterns(group, trial);
    unmap_all(group, trial);
    return dist_group_object(group, ACR_OK, able == ACR_OK ? "" : acr_group_last_error(), values, objection, bytes);
}

/* Why this rank goes by NCCL, "" where it need not. *memory: for the trial. Rank 0 makes the board. */
static const char *own_reason(acr_group *group, void **memory)
{
    if (group->asked == ACR_TRANSFERS_NCCL)
        return "options.transfers is ACR_TRANSFERS_NCCL";
    if (group->ranks > DIST_BOARD_RANKS)
        return "there are more than 64 ranks";
    acr_status status = dist_can_share(&group->device);
    if (status == ACR_OK)
        status = dist_alloc(&group->device, dist_push_bytes(group, 1, (size_t)group->ranks * PATTERN_BYTES), memory);
    if (status == ACR_OK && group->rank == 0)
        status = dist_board_make(&group->board, group->board_name);
    return status == ACR_OK ? "" : acr_group_last_error();
}

/* Shares memory, and tries it out. Then all ranks have the board open, and its name can go. */
static acr_status find_way(acr_group *group)
{
    double values[DIST_VALUES] = {group->asked == ACR_TRANSFERS_COPY_ENGINES};
    char reason[sizeof group->way_reason], before[512];
    void *memory = NULL;
    dist_push *trial = NULL;
    snprintf(before, sizeof before, "%s", acr_group_last_error());
    snprintf(reason, sizeof reason, "%s", own_reason(group, &memory));
    acr_status status =
        dist_push_open(group, reason, values, memory, 1, &trial, group->way_reason, sizeof group->way_reason);
    if (status == ACR_OK && trial)
        status = try_out(group, trial, values, group->way_reason, sizeof group->way_reason);
    drop(group, trial);
    dist_free(&group->device, memory);
    if (*group->board_name)
        dist_board_hide(group->board_name);
    group->board_name[0] = '\0';
    if (status == ACR_OK && !*group->way_reason) {
        group->wants_copies = values[0] > 0.0;
        group->way = DIST_BY_COPIES;
        return ACR_OK;
    }
    dist_board_close(group->board);
    group->board = NULL;
    if (status != ACR_OK)
        return status;
    restore_error(before);
    group->wants_copies = values[0] > 0.0;
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

/* In a group that is well nobody pushes into memory of a rank whose executions have ended, even where it is mapped
 * still. In a broken one memory that another rank may write is left to the process. */
void dist_way_close(acr_group *group)
{
    const double end_s = dist_now_s() + PATIENCE_S;
    if (!group->board)
        return;
    for (int looks = 0; sweep(group) > 0 && dist_now_s() < end_s; looks++)
        dist_pause(looks);
    while (group->pushes) {
        if (group->broken == ACR_OK)
            dist_free(&group->device, group->pushes->memory[group->rank]);
        drop(group, group->pushes);
    }
    dist_board_close(group->board);
    group->board = NULL;
}
