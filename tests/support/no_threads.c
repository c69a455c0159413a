/* In the place of pthread_create, in test programs that are listed as starting no thread (tests/CMakeLists.txt):
 * ThreadSanitizer does not see them, so one that starts a thread must not be among them. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *data);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *data)
{
    (void)thread, (void)attributes, (void)run, (void)data;
    fputs("a thread is started: take the test from without_threads (tests/CMakeLists.txt)\n", stderr);
    exit(EXIT_FAILURE);
}
