/* Failing the n-th allocation or system call of the library under test. A program that uses this links faults.c and
 * passes the linker --wrap for every function listed there (CMakeLists.txt: fault_program), so that only calls made by
 * the library and the test's own code are counted and failed, never those inside libc, cmocka or a sanitizer. */
#ifndef ACR_TESTS_FAULTS_H
#define ACR_TESTS_FAULTS_H

#include <stdbool.h>
#include <stdint.h>

/* What can fail. */
typedef enum fault_kind {
    FAULT_MEMORY = 0, /* malloc, calloc, realloc, aligned_alloc, posix_memalign: NULL */
    FAULT_THREAD = 1, /* pthread_create: EAGAIN */
    FAULT_FILE = 2    /* mkstemp, write, fsync, fchmod, rename: ENOSPC; a failing write first writes half */
} fault_kind;

/* From now on the n-th call of a kind fails, n >= 1; n = 0 none. Counting starts anew. */
void fault_arm(fault_kind kind, int n);
/* Calls of the kind since fault_arm. */
int fault_calls(fault_kind kind);
/* True when a call has been failed since fault_arm. */
bool fault_fired(void);

/* Blocks of memory allocated and not freed, by wrapped calls. */
int64_t fault_live_blocks(void);
/* Threads created by wrapped calls and not joined. */
int fault_live_threads(void);

#endif
