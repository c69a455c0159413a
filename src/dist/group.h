/* A group: the communicator, what it is broken by, and how its ranks agree. */
#ifndef ACR_DIST_GROUP_H
#define ACR_DIST_GROUP_H

#include "board.h"
#include "device.h"
#include "nccl.h"

typedef struct dist_push dist_push; /* memory of every rank that the others write (push.h) */

typedef enum dist_way {
    DIST_UNKNOWN, /* no plan has needed it yet */
    DIST_BY_NCCL,
    DIST_BY_COPIES
} dist_way;

struct acr_group {
    acr_ctx *ctx;
    dist_device device;
    dist_nccl nccl;
    dist_comm *comm; /* NULL once it is aborted */
    int owns_comm;
    int rank, ranks;
    int hosts; /* that the ranks are spread over; 0 before they have exchanged a record */
    uint32_t timeout_ms;
    acr_transfers asked;  /* options.transfers */
    dist_way way;         /* of keys and values, the same on every rank */
    char way_reason[512]; /* why NCCL */
    int wants_copies;     /* a rank takes no other way than copy engines */
    dist_board *board;    /* by which ranks that push tell each other what no stream waits for; NULL by NCCL */
    char board_name[DIST_BOARD_NAME]; /* on rank 0 until all have opened it */
    dist_push *pushes;                /* all that live, and those that others may still write */
    int push_count;                   /* so far, the same on every rank */
    acr_status broken;                /* ACR_OK, or what every call returns from now on */
    char reason[512];
};

/* The group's error, if it is broken. */
acr_status dist_group_check(const acr_group *group);

/* A transfer: dist_transfer_begin, then group->nccl's Send and Recv or one collective through dist_transfer_add, then
 * dist_transfer_enqueue. On the host it goes on while the caller computes and is over after dist_transfer_end; on a GPU
 * it is enqueued on group->device.transfers. Whatever fails breaks the group. */
acr_status dist_transfer_begin(acr_group *group);
acr_status dist_transfer_add(acr_group *group, nccl_result result);
acr_status dist_transfer_enqueue(acr_group *group);
acr_status dist_transfer_end(acr_group *group);

/* Whether every rank is well and says the same: status and text of this rank go to all. Returns the status if it is a
 * failure (text says which), ACR_PEER with the first rank that failed or differs. Collective. */
acr_status dist_group_agree(acr_group *group, acr_status status, const char *text);

enum {
    DIST_VALUES = 3
};

/* Likewise, but the texts of ranks that are well may differ: of those that are not "" the first goes to `objection`,
 * with its rank, the same on every rank; "" where no rank has one. values[DIST_VALUES]: of each the largest that a rank
 * has. */
acr_status dist_group_object(acr_group *group, acr_status status, const char *text, double *values, char *objection,
                             size_t bytes);

/* What a rank shares with the others, or where theirs is. */
typedef struct dist_share {
    dist_address address;
    char board[DIST_BOARD_NAME]; /* rank 0's, where it makes one; else "" */
    int is_here;                 /* its rank is a thread of this process */
} dist_share;

/* Likewise, and shares[ranks] of all ranks from shares[rank]. */
acr_status dist_group_share(acr_group *group, acr_status status, const char *text, double *values, dist_share *shares,
                            char *objection, size_t bytes);

#endif
