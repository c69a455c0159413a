#include "board.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "error.h"

enum {
    NUMBERS = 4096
};

struct dist_board {
    atomic_uint alarms[DIST_BOARD_RANKS];
    atomic_uint left[NUMBERS]; /* of all numbers that have this rest */
};

static acr_status map_file(int file, const char *path, dist_board **out)
{
    void *memory = MAP_FAILED;
    if (file >= 0)
        memory = mmap(NULL, sizeof **out, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
        return dist_fail(ACR_UNSUPPORTED, "%s, which ranks of a host share: %s", path, strerror(errno));
    *out = memory;
    return ACR_OK;
}

acr_status dist_board_make(dist_board **out, char name[DIST_BOARD_NAME])
{
    static atomic_int made;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    snprintf(name, DIST_BOARD_NAME, "/dev/shm/acromion.%ld.%d.%ld", (long)getpid(), atomic_fetch_add(&made, 1),
             (long)t.tv_nsec);
    const int file = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    const int has_room = file >= 0 && ftruncate(file, (off_t)sizeof **out) == 0; /* all zero */
    const acr_status status = map_file(has_room ? file : -1, name, out);
    if (file >= 0)
        close(file);
    if (status != ACR_OK)
        unlink(name);
    return status;
}

acr_status dist_board_open(dist_board **out, const char *name)
{
    const int file = open(name, O_RDWR | O_CLOEXEC);
    const acr_status status = map_file(file, name, out);
    if (file >= 0)
        close(file);
    return status;
}

void dist_board_hide(const char *name)
{
    unlink(name);
}

void dist_board_close(dist_board *board)
{
    if (board)
        munmap(board, sizeof *board);
}

void dist_board_raise(dist_board *board, int rank)
{
    atomic_store(&board->alarms[rank], 1);
}

int dist_board_is_raised(const dist_board *board, int rank)
{
    return atomic_load(&board->alarms[rank]) != 0;
}

void dist_board_leave(dist_board *board, int number)
{
    atomic_fetch_add(&board->left[number % NUMBERS], 1);
}

int dist_board_left(const dist_board *board, int number, int ranks)
{
    const unsigned before = (unsigned)(number / NUMBERS) * (unsigned)ranks,
                   now = atomic_load(&board->left[number % NUMBERS]);
    return now > before ? (int)(now - before) : 0;
}
