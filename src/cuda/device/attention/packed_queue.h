/* What a CTA knows of a packed batch's queue (tile_scheduler.cuh), in its shared memory. Plain C, so that the host
 * knows its size. */
#ifndef ACR_DEVICE_ATTENTION_PACKED_QUEUE_H
#define ACR_DEVICE_ATTENTION_PACKED_QUEUE_H

#include <stdint.h>

enum {
    ORDERED_SEQUENCES = 256 /* so many are taken in order, that with the most keys first */
};

typedef struct packed_queue {
    uint32_t tiles; /* of the batch */
    /* The sequence that the producer is at: */
    int32_t next;        /* in the order of sequences, the one after it */
    uint32_t first, end; /* its tiles */
    int32_t batch;
    int32_t lengths[ORDERED_SEQUENCES]; /* of the sequences, in keys */
    uint8_t order[ORDERED_SEQUENCES];
} packed_queue;

#endif
