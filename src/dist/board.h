/* A board that all ranks of a host read and write: shared memory of the host, which lives as long as one of them has it
 * open. On it ranks say what nobody waits for in a stream. */
#ifndef ACR_DIST_BOARD_H
#define ACR_DIST_BOARD_H

#include <acromion.h>
#include <stddef.h>

enum {
    DIST_BOARD_RANKS = 64,
    DIST_BOARD_NAME = 64
};

typedef struct dist_board dist_board;

/* Makes a board, and the name by which others open it. Errors: ACR_UNSUPPORTED (says what failed). */
acr_status dist_board_make(dist_board **out, char name[DIST_BOARD_NAME]);
acr_status dist_board_open(dist_board **out, const char *name);

/* Takes the name back, once all have opened it. */
void dist_board_hide(const char *name);
void dist_board_close(dist_board *board);

/* Rank's alarm: raised by a rank that is broken, before anything that it does about it. */
void dist_board_raise(dist_board *board, int rank);
int dist_board_is_raised(const dist_board *board, int rank);

/* How many ranks no longer write the memory with this number, which counts from 0 on; up to thousands at a time. */
void dist_board_leave(dist_board *board, int number);
int dist_board_left(const dist_board *board, int number, int ranks);

#endif
