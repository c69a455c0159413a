/* Transfers by copy engines: memory of every rank that the other ranks write, and words in it by which streams wait for
 * each other. No multiprocessor takes part.
 *
 * Rank S pushes into the memory of rank T. ready[T] is a word of S's memory, arrived[c][S] one of T's, for each of the
 * channels c, things that S pushes in one execution. Words are 0 at first. In an execution
 *
 *     T   dist_push_announce   arrived[..][S] = 0, then ready[T] = 1
 *     S   dist_push_begin      waits for ready[T] = 1, then ready[T] = 0
 *     S                        copies into T's memory
 *     S   dist_push_end        arrived[c][S] = 1
 *     T   dist_push_await      waits for arrived[c][S] = 1
 *
 * T announces on a stream that follows all that it did with the memory in executions before, and its execution ends
 * behind its last wait; S's ends behind its last push. Hence:
 *  - S writes into T's memory only between T's announcement and T's wait: T reads none of it then.
 *  - A word is written from one side at a time. S takes ready[T] back before it pushes; T announces again only behind
 *    its wait for that push. T takes arrived[c][S] back before it announces; S sets it again only behind that.
 *  - When an execution of T has ended, all that others write into T's memory in it has been written, words too: T's
 *    memory can be freed. (What S pushes to T ends in T's wait; T's word at S in S's wait.)
 *  - Words hold no count, so that a graph that is replayed says the same each time.
 *
 * Nothing waits in a circle, even where a device does the work of both streams in one order, that of the calls or any
 * that its events allow: announcements come before all waits; of step s of a schedule, a rank's push is enqueued before
 * its own wait for what arrives in s, and that wait's stream follows the push by an event. So if all waits of the steps
 * before s end, all pushes of step s begin (their targets have announced) and end, and with them all waits of step s.
 *
 * The high half of a word is written only when the group is broken, and never taken back: every wait, of this call or
 * of a graph's next replay, then ends at once. What is pushed behind such a wait may come at a wrong time. So a rank
 * that breaks raises its alarm on the board before it lets its own streams go, and the others look for alarms when
 * their work has ended (acr_group_wait): no rank takes such a result for right. And memory is freed when every rank has
 * said on the board that it pushes into it no more. */
#ifndef ACR_DIST_PUSH_H
#define ACR_DIST_PUSH_H

#include "group.h"

/* Finds by which way keys and values go in this group; the first call asks every rank, and tries the way out.
 * Collective. Errors: ACR_UNSUPPORTED (a rank wants copy engines, and one cannot: which, and why; on every rank). */
acr_status dist_way_find(acr_group *group);

/* What a plan says that cannot go by copy engines, and whose ranks want nothing else. */
acr_status dist_way_refused(const char *reason);

/* Frees what dist_way_find made, and what waits to be freed. */
void dist_way_close(acr_group *group);

/* ---- Memory ---- */

/* Bytes that such memory has, of which the first ones hold words: for `bytes` that are pushed. */
size_t dist_push_bytes(const acr_group *group, int channels, size_t bytes);

/* Where what is pushed begins in the memory. */
size_t dist_push_offset(const acr_group *group, int channels);

/* Shares memory, of dist_push_bytes, with all ranks. Collective. If a rank cannot, or has a `reason` not to, the
 * objection says which and why, on every rank, and *out is NULL; else the memory is the push's. values: as of
 * dist_group_object. */
acr_status dist_push_open(acr_group *group, const char *reason, double *values, void *memory, int channels,
                          dist_push **out, char *objection, size_t bytes);

/* This rank pushes no more: its executions have ended; in a broken group those that the driver still has are waited
 * for. The memory is freed when no rank pushes into it any more. NULL is a no-op. */
void dist_push_close(acr_group *group, dist_push *push);

/* Where rank's memory lies here, behind its words. */
char *dist_push_memory(const acr_group *group, const dist_push *push, int rank);

/* ---- What streams do ---- */

acr_status dist_push_announce(const acr_group *group, const dist_push *push, int source, void *stream);
acr_status dist_push_begin(const acr_group *group, const dist_push *push, int target, void *stream);
acr_status dist_push_end(const acr_group *group, const dist_push *push, int target, int channel, void *stream);
acr_status dist_push_await(const acr_group *group, const dist_push *push, int source, int channel, void *stream);

/* ---- A broken group ---- */

/* Raises the alarm at the other ranks, then lets this rank's streams go that wait for one. Errors are kept quiet. */
void dist_push_release(acr_group *group);

/* The first other rank that has raised its alarm; -1: none has. */
int dist_push_alarmed(const acr_group *group);

#endif
